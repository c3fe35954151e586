"""--keep on models whose attention cannot be followed: one sentence from every command, before any work."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvcal.methods.data_free import preset
from kvcal_artifacts.bundle import Bundle, Fingerprint
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.errors import KVCalError, UnsupportedModel
from kvcal_artifacts.scheme import HeavyHitters
from tests.support import architectures
from tests.support.models_fixture import SUFFIX, Done, kvcal, write_model, write_text, write_tokenizer

ODD = {
    "gpt-oss": "layer 1 (GptOssAttention): token selection does not know this layer's attention weights: its attention "
    "has sinks; store every token instead (no --keep)",
    "gemma2": "layer 1 (Gemma2Attention): token selection does not know this layer's attention weights: its attention "
    "has attn_logit_softcapping; store every token instead (no --keep)",
    "doge": "layer 0 (DogeAttention): token selection does not know this layer's attention weights: DogeAttention "
    "computes more than softmax(q k) v of what its cache gives; store every token instead (no --keep)",
}
WINDOWS = ["--sink", 2, "--recent", 32, "--block", 32]
CALIBRATES = {
    "fit-predictors": [*WINDOWS],
    "fit-norms": [*WINDOWS],
    "measure-subspaces": [*WINDOWS],
    "train-codebooks": ["--preset", "small", *WINDOWS],
    "tune-bits": [*WINDOWS],
    "tune-bits --objective kl": [*WINDOWS],
}


@cache
def model(name: str) -> Any:
    own = {"vocab_size": 258, "bos_token_id": 256, "eos_token_id": 257}
    return architectures.build("Doge", head_dim=16, **own) if name == "doge" else architectures.HYBRID[name](**own)


@pytest.fixture(scope="module", params=ODD)
def odd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder of a model, and the sentence."""
    folder = tmp_path_factory.mktemp("odd") / request.param
    model(request.param).save_pretrained(folder)
    write_tokenizer(folder)
    return folder, ODD[request.param]


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading weights, or windows of a text, is an error."""

    def fails(*args: object, **kwargs: object) -> None:
        raise AssertionError("work was begun")

    for place in (
        "kvcal.models.loading.load_model",
        "kvcal.models.layerwise.LayerwiseWeights.load_outer",
        "kvcal.text.token_windows.token_windows",
        "kvcal.text.token_windows.evaluation_windows",
    ):
        monkeypatch.setattr(place, fails)


def refused(done: Done, why: str) -> None:
    assert done.code == UnsupportedModel.exit_code, done.err
    assert done.complaint.endswith(why)


@pytest.mark.parametrize("command", CALIBRATES)
def test_no_bundle_is_fitted_that_nothing_can_use(
    command: str, odd: tuple[Path, str], no_work: None, tmp_path: Path
) -> None:
    folder, why = odd
    source = ["--model", folder, "--text", write_text(tmp_path / "text.txt")]
    refused(kvcal(*command.split(), *source, *CALIBRATES[command], "--keep", 0.5, "-o", tmp_path / f"a{SUFFIX}"), why)
    assert not list(tmp_path.glob(f"*{SUFFIX}"))


@pytest.mark.parametrize("options", [[], ["--config-only"], ["--no-check"], ["--random-weights"]], ids=str)
def test_no_preset_is_written_that_nothing_can_use(options: list[str], odd: tuple[Path, str], tmp_path: Path) -> None:
    folder, why = odd
    output = tmp_path / f"a{SUFFIX}"
    refused(kvcal("preset", "kivi-2", *WINDOWS, "--keep", 0.5, *options, "--model", folder, "-o", output), why)
    assert not output.exists()


def test_a_build_is_refused_before_any_bundle(odd: tuple[Path, str], no_work: None, tmp_path: Path) -> None:
    folder, why = odd
    text = write_text(tmp_path / "text.txt")
    recipe = tmp_path / "build.toml"
    for method in ('preset = "kivi-2"', f'method = "aqua-kv"\ntext = "{text}"'):
        recipe.write_text(
            f'[models.m]\nmodel = "{folder}"\n[bundles.sound]\npreset = "kivi-2"\n[bundles.keeps]\n{method}\nkeep = 0.5\n'
        )
        done = kvcal("build", recipe)
        refused(done, why)
        assert "m-keeps: layer " in done.complaint and not list(tmp_path.glob(f"*{SUFFIX}"))


def test_what_an_earlier_version_wrote_is_refused_by_every_reader(
    odd: tuple[Path, str], no_work: None, tmp_path: Path
) -> None:
    folder, why = odd
    plain = model(folder.name)
    scheme = preset("kivi-2").scheme(plain).keeping(HeavyHitters(0.5))
    Bundle(Fingerprint.of(plain), scheme, {"method": "kivi-2"}).write(old := tmp_path / f"old{SUFFIX}")
    text = write_text(tmp_path / "text.txt")
    named = f"old: {why}"
    refused(kvcal("verify", old, "--model", folder), why)
    refused(kvcal("generate", "--bundle", old, "--prompt", "x", "--model", folder), named)
    refused(kvcal("eval", old, "--preset", "kivi-2", "--text", text, "--model", folder), named)
    refused(kvcal("compare", "--bundle", old, "--preset", "kivi-2", "--text", text, "--model", folder), named)


def test_every_row_of_keep_is_named(odd: tuple[Path, str], no_work: None, tmp_path: Path) -> None:
    folder, why = odd
    source = ["--keep", 0.5, "--text", write_text(tmp_path / "text.txt"), "--model", folder]
    refused(kvcal("eval", "--preset", "kivi-2", *source), f"kivi-2: {why}")
    refused(kvcal("compare", "--preset", "kivi-4", *source), f"kivi-4: {why}")
    pairs = ["--keys", "uniform-4", "--values", "uniform-4", "--predict", "--calibration", tmp_path / "text.txt"]
    refused(kvcal("compare", *pairs, *source), f"uniform-4: {why}")
    refused(
        kvcal("generate", "--preset", "kivi-2", "--prompt", "x", "--keep", 0.5, "--model", folder), f"kivi-2: {why}"
    )


@pytest.mark.parametrize("command", ["eval", "compare"])
def test_a_refused_row_is_named_before_the_others_are_measured(command: str, no_work: None, tmp_path: Path) -> None:
    """Heads of 16 channels hold no group of 32 that a codec asks for, and a bundle is of another model."""
    folder = write_model(tmp_path / "model")
    source = ["--model", folder, "--text", write_text(tmp_path / "text.txt")]
    refused_preset = kvcal(command, "--preset", "kivi-2", "--preset", "uniform-2", *source, "--keep", 2)
    assert refused_preset.code == 2 and "--keep 2" in refused_preset.complaint
    other = write_model(tmp_path / "other", layers=3)
    bundle = tmp_path / f"b{SUFFIX}"
    assert kvcal("preset", "kivi-2", "--no-check", "--model", other, "-o", bundle).code == 0
    done = kvcal(command, "--preset", "kivi-2", "--bundle", bundle, *source)
    assert done.code == 4 and re.search(r"^kvcal: b was made for another model: layers", done.complaint), done.err


# A row that fails on the way.


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    base = tmp_path_factory.mktemp("sound")
    text = write_text(base / "text.txt")
    return ["--model", write_model(base / "model"), "--text", text, "--windows", 2, "--length", 220]


@pytest.fixture
def kivi_4_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of kivi-4 cannot be packed after 100 tokens: what nobody knows before."""
    update = KVCalCache.update

    def failing(cache: Any, keys: Any, *rest: Any, **named: Any) -> Any:
        pair = cache.scheme.layers[0]
        if "bits=4" in pair.key.describe() and cache.get_seq_length() > 100:
            raise KVCalError("layer 0: cannot be packed")
        return update(cache, keys, *rest, **named)

    monkeypatch.setattr(KVCalCache, "update", failing)


def shown_beside(done: Done, alone: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    assert done.code == 1 and done.err.splitlines()[-1] == "kvcal: kivi-4: layer 0: cannot be packed", done.err
    assert {row["name"]: row["kl"] for row in found} == {row["name"]: row["kl"] for row in alone}


@pytest.mark.parametrize("command", ["eval", "compare"])
def test_rows_beside_one_that_fails_are_there(command: str, sound: list[Any], kivi_4_fails: None) -> None:
    others = ["--preset", "kivi-2", "--preset", "higgs-2"]
    alone = kvcal(command, *others, *sound, "--json")
    assert alone.code == 0 and alone.json["failed"] == {}, alone.err
    done = kvcal(command, "--preset", "kivi-4", *others, *sound, "--json")
    shown_beside(done, alone.json["rows"], done.json["rows"])
    assert done.json["failed"] == {"kivi-4": "kivi-4: layer 0: cannot be packed"}
    table = kvcal(command, "--preset", "kivi-4", *others, *sound)
    assert table.code == 1 and "kivi-2" in table.out and "higgs-2" in table.out and "kivi-4" not in table.out


@pytest.mark.parametrize("command", ["eval", "compare"])
def test_where_nothing_is_left_the_error_is_all(command: str, sound: list[Any], kivi_4_fails: None) -> None:
    done = kvcal(command, "--preset", "kivi-4", *sound)
    assert done.code == 1 and done.err.splitlines()[-1] == "kvcal: kivi-4: layer 0: cannot be packed"
