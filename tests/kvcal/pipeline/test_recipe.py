"""Compositions and recipes: which codec each layer gets, by options or by a file, and the same bytes either way."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcal.methods.composition import Composition
from kvcal.methods.registry import codec_maker
from kvcal.pipeline.scheme_file import read_recipe
from kvcal_artifacts import load_bundle
from kvcal_artifacts.codecs import Predicted, Role, Shape
from kvcal_artifacts.errors import UsageError
from tests.support.models_fixture import SUFFIX, kvcal, write_model, write_text

LAYERS = 4
ROLES: tuple[Role, ...] = ("key", "value")
SHAPE = Shape(2, 16, 32)
WHOLE = """
frame = "post_rope"
keys = "higgs-3"
values = "uniform-2"
[layers]
"0" = "higgs-4"
"2-3" = {keys = "uniform-4"}
"-1" = {values = "exact-16"}
[windows]
sink = 5
recent = 64
block = 16
[predictor]
kind = "linear-4bit"
keys = ["k1"]
values = []
ridge = 0.01
"""


def described(composition: Composition) -> list[tuple[str, str]]:
    """What each layer's key and value codecs say they are."""
    pairs = [[composition.codec(i, LAYERS, role)(SHAPE, role) for role in ROLES] for i in range(LAYERS)]
    return [(key.describe(), value.describe()) for key, value in pairs]


def named(keys: str, values: str) -> tuple[str, str]:
    return codec_maker(keys)(SHAPE, "key").describe(), codec_maker(values)(SHAPE, "value").describe()


def test_the_last_exception_that_names_a_layer_holds() -> None:
    made = Composition("higgs-2", "uniform-2", ("0-2=uniform-4", "1:keys=higgs-3", "-1:values=exact-16"))
    assert described(made) == [
        named("uniform-4", "uniform-4"),
        named("higgs-3", "uniform-4"),
        named("uniform-4", "uniform-4"),
        named("higgs-2", "exact-16"),
    ]


@pytest.mark.parametrize(
    ("exception", "said"),
    [
        ("higgs-4", "reads LAYERS=CODEC"),
        ("0:queries=higgs-4", "reads LAYERS=CODEC"),
        ("3-1=higgs-4", "ends before it begins"),
        ("0=higgs-9", "codec 'higgs-9' is not known"),
        ("4=higgs-4", "the model has layers 0 to 3"),
        ("-5=higgs-4", "the model has layers 0 to 3"),
        ("2-4=higgs-4", "the model has layers 0 to 3"),
    ],
)
def test_bad_exceptions(exception: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Composition("higgs-2", "higgs-2", (exception,)).check(LAYERS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keys = 'higgs-2'", "names no codec; give codec, or keys and values"),
        ("codec = 'higgs-2'\nvalue = 'higgs-2'", "unknown key value; did you mean values?"),
        ("codec = 'higgs-2'\n[windows]\nsinks = 4", r"unknown key windows\.sinks; did you mean sink?"),
        ("codec = 'higgs-2'\n[predictor]\nzzz = 4", r"unknown key predictor\.zzz; known are kind"),
        ("codec = 2", "codec is 2; it must be text"),
        ("codec = 'higgs-2'\n[windows]\nsink = true", r"windows\.sink is True; it must be a whole number"),
        ("codec = 'higgs-2'\n[layers]\n'0' = 3", r"layers\.0 is 3; a codec's name, or a table"),
        ("codec = 'higgs-2'\n[layers]\n'0' = {key = 'x'}", r"unknown key layers\.0\.key; did you mean keys?"),
        ("codec = ", "not TOML"),
    ],
)
def test_bad_recipes(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_recipe(path)


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_recipe(tmp_path / "none.toml")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("recipe")
    write_model(base / "model", LAYERS)
    write_text(base / "words.txt")
    (base / "whole.toml").write_text(WHOLE)
    return base


def test_a_recipe_is_its_options(base: Path) -> None:
    fit = [
        "fit-predictors",
        "--model",
        base / "model",
        "--text",
        base / "words.txt",
        "--windows",
        5,
        "--length",
        96,
        "--output",
    ]
    by_file, by_options = base / f"file{SUFFIX}", base / f"options{SUFFIX}"
    assert kvcal(*fit, by_file, "--recipe", base / "whole.toml").code == 0
    options = [
        "--frame", "post_rope", "--keys", "higgs-3", "--values", "uniform-2", "--first-layer", "",
        "--per-layer", "0=higgs-4", "--per-layer", "2-3:keys=uniform-4", "--per-layer", "-1:values=exact-16",
        "--sink", 5, "--recent", 64, "--block", 16, "--predictor", "linear-4bit", "--value-inputs", "none", "--ridge", 0.01,
    ]  # fmt: skip
    done = kvcal(*fit, by_options, *options)
    assert done.code == 0, done.err
    assert by_file.read_bytes() == by_options.read_bytes()
    scheme = load_bundle(by_file).scheme
    kinds = [[type(c).__name__ for c in (pair.key, pair.value)] for pair in scheme.layers if pair]
    assert kinds == [["Higgs", "Higgs"], ["Predicted", "Uniform"], ["Predicted", "Uniform"], ["Predicted", "Exact"]]
    inner = [pair.key.inner.name for pair in scheme.layers if pair and isinstance(pair.key, Predicted)]
    assert inner == ["higgs", "uniform", "uniform"]


@pytest.mark.parametrize("command", ["fit-predictors", "compare"])
def test_a_setting_that_its_predictor_does_not_use_is_refused(
    command: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the option would be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "idle.toml").write_text('codec = "higgs-2"\n[predictor]\nkind = "bias"\nridge = 0.01\n')
    done = kvcal(command, "--model", base / "model", "--text", base / "words.txt", "--recipe", "idle.toml")
    assert done.code == 2 and "--ridge applies only to predictors by least squares" in done.complaint
    assert [path.name for path in tmp_path.iterdir()] == ["idle.toml"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("keys", "higgs-2"), ("sink", 4), ("key-inputs", "k1")],
    ids=["other", "default", "default-text"],
)
def test_options_beside_a_recipe_are_refused(base: Path, option: str, value: object) -> None:
    """Also one that is given its default's value: the recipe says another, and would win without a word."""
    done = kvcal("fit-predictors", "--recipe", base / "whole.toml", f"--{option}", value)
    assert done.code == 2
    assert done.complaint == f"kvcal: --{option} and --recipe both say what to store: put it into the recipe"
