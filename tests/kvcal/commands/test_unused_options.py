"""An option that nothing takes is refused before any work, in one line that names it: never ignored in silence.

Each case has a canary: without the option, or with what gives it an effect, the same command goes on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from kvcal.cli.app import COMMANDS
from tests.support.models_fixture import ROOT_COMMAND, SUFFIX, kvcal, write_model, write_text


class Began(Exception):
    """A model was asked for."""


def began(*given: Any, **options: Any) -> None:
    raise Began


# What a command does when its options are good: it reads its text, then the model.
WORK = ("text.token_windows.token_windows", "text.token_windows.evaluation_windows", "models.loading.load_model")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its text, a bundle, a recipe with a gate, a text with columns."""
    base = tmp_path_factory.mktemp("idle")
    write_model(base / "model")
    words = write_text(base / "words.txt").read_text()
    (base / "rows.jsonl").write_text("\n".join(json.dumps({"body": words[i : i + 500]}) for i in range(0, 5000, 500)))
    head = f'[models.own]\nmodel = "{base / "model"}"\ntext = "{base / "words.txt"}"\n'
    (base / "gated.toml").write_text(f'{head}[bundles.kivi]\npreset = "kivi-2"\ngates = {{max_bits = 8}}\n')
    made = kvcal("preset", "kivi-2", "--model", base / "model", "--output", base / f"kivi{SUFFIX}")
    assert made.code == 0, made.err
    return base


KIVI, WORDS, GATED = f"BASE/kivi{SUFFIX}", "BASE/words.txt", "BASE/gated.toml"
OWN = ["--model", "BASE/model"]
TEXT, PROMPT = [*OWN, "--text", WORDS], [*OWN, "-p", "fp8", "--prompt", "a"]
SEED, RANDOM, GUARD = ["--seed", "0"], "--random-weights", "the model's run on a text"
NOTHING = "and there is none"
PAIR, FULL = ["--keys", "fp8", "--values", "fp8"], ["--full", "8", "--four", "8"]

# command, words that stay, words of which the first is refused, words in their place that are not, what it applies to
CASES: list[tuple[str, list[str], list[str], list[str], str]] = [
    # --seed where it is of random weights
    ("eval", [*TEXT, "-p", "fp8"], SEED, [*SEED, RANDOM], "random weights"),
    ("generate", PROMPT, SEED, [*SEED, "--sample"], "--sample and --random-weights"),
    ("generate", PROMPT, SEED, [*SEED, RANDOM], "--sample and --random-weights"),
    ("compare", [*TEXT, "-p", "fp8"], SEED, [*SEED, RANDOM], "random weights and rows that are fitted"),
    ("compare", [*TEXT, *PAIR], SEED, [*SEED, "--predict"], "random weights and rows that are fitted"),
    ("preset", ["kivi-2", *OWN], SEED, [*SEED, RANDOM], "random weights"),
    ("preset", ["kivi-2", *OWN, "--config-only"], SEED, [], "random weights"),
    ("inspect", [KIVI, *TEXT], SEED, [*SEED, RANDOM], "random weights"),
    ("verify", [KIVI, *OWN], SEED, [*SEED, RANDOM], "random weights"),
    # what is of --model
    *(
        ("inspect", [KIVI], option, [*option, *OWN], "a measurement")
        for option in (["--dtype", "float32"], ["--device", "cpu"], ["--windows", "2"], ["--text", WORDS])
    ),
    ("inspect", [KIVI], SEED, [*SEED, *OWN, RANDOM], "a measurement"),
    ("verify", [KIVI], ["--device", "cpu"], ["--device", "cpu", *OWN], "a comparison with a model"),
    ("verify", [KIVI], [RANDOM], [RANDOM, *OWN], "a comparison with a model"),
    ("names", ["device"], ["--model", "tiny"], [], "names with bits/value"),
    ("names", ["operation"], ["--model", "tiny"], [], "names with bits/value"),
    # the outlier guard of preset
    ("preset", ["kivi-2", *OWN, "--no-check"], ["--device", "cpu"], [], GUARD),
    ("preset", ["kivi-2", *OWN, "--config-only"], ["--check"], ["--no-check"], GUARD),
    ("preset", ["kivi-2", *OWN, RANDOM], ["--device", "cpu"], [], GUARD),
    # reports of gates
    ("build", [GATED], ["--summary", "x.md", "--no-gates"], ["--summary", "x.md"], "gates that are held"),
    *(
        ("build", [GATED], [*option, "--dry-run"], option, "bundles that are built")
        for option in (["--junit", "x.xml"], ["--jobs", "1"], ["--gates"])
    ),
    # predictors
    *(
        ("fit-predictors", [*TEXT, "--key-inputs", "none"], [*option, "--value-inputs", "none"], option, "predictors")
        for option in (["--predictor", "linear"], ["--ridge", "0.1"], ["--quantiser-agnostic"])
    ),
    *(
        ("fit-predictors", TEXT, ["--ridge", "1", "--predictor", kind], ["--ridge", "1"], "predictors by least squares")
        for kind in ("bias", "mlp", "mlp-no-norm")
    ),
    (
        "fit-predictors", [*TEXT, "--keys", "higgs-2"], ["--backbone", "higgs-3", "--values", "higgs-2"],
        ["--backbone", "higgs-3"], "keys or values without a codec of their own",
    ),
    (
        "fit-norms", TEXT, ["--variant", "small", "--values", "uniform-2"], ["--variant", "small"],
        "values without a codec of their own",
    ),
    # searches
    *(
        ("tune-thresholds", [*TEXT, *fixed], option, [], f"a search, and there is none: {why}")
        for fixed, why in (
            (FULL, "--full and --four leave nothing to search"),
            (["--tau-low", "1", "--tau-high", "2"], "one number for --tau-low and one for --tau-high leave nothing"),
        )
        for option in (
            ["--trials", "30"], ["--max-bits", "4"], ["--objective", "auto"], ["--step", "32"], ["--limit", "2"],
            ["--storage", "sqlite:///x"], ["--heartbeat", "5"], ["--plot", "x.png"], ["--metric", "acc"],
            ["--tasks-path", "."],
        )
    ),
    *(
        ("tune-thresholds", [*TEXT, *FULL], option, [], "tiers by thresholds")
        for option in (["--tau-low", "1"], ["--tau-high", "2"], ["--raw-salience"])
    ),
    (
        "tune-thresholds", TEXT, ["--step", "32", "--objective", "attention"], ["--step", "32", "--objective", "perplexity"],
        "an objective of perplexity",
    ),
    (
        "measure-subspaces", [*TEXT, "--rank", "2", "--strength", "1"], ["--settings", "lm-eval", "--channels", "4"],
        ["--settings", "lm-eval"], "a rank, strength or number of channels that is not given",
    ),
    # codebooks
    *(
        ("train-codebooks", TEXT, option, [*option, "--trainer", "adam"], "steps of Adam")
        for option in (["--rate", "0.1"], ["--batch-vectors", "8"], ["--beta", "2"], ["--gamma", "1"])
    ),
    (
        "train-codebooks", TEXT, ["--split-by", "relative", "--high-dims", "0"], ["--split-by", "relative"],
        "keys in two bands",
    ),
    (
        "train-codebooks",
        [*TEXT, "--stages", "1,1,1", "--sizes", "8,8,8", "--high-dims", "8", "--vectors", "9", "--recent", "8"],
        ["--preset", "small", "--block", "8"], ["--preset", "small"], "sizes and windows that are not given",
    ),
]  # fmt: skip


def placed(words: list[str], base: Path) -> list[str]:
    return [word.replace("BASE", str(base)) for word in words]


@pytest.mark.parametrize(
    ("command", "stay", "idle", "taken", "of"), CASES, ids=[f"{c} {' '.join(o)}" for c, _, o, _, _ in CASES]
)
def test_an_option_that_nothing_takes_is_refused(
    command: str, stay: list[str], idle: list[str], taken: list[str], of: str, base: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for place in (
        *WORK,
        "models.layerwise.open_layerwise",
        "commands.workbench.open_layerwise",
        "commands.build.run_all",
        "commands.names.stored",
    ):
        monkeypatch.setattr(f"kvcal.{place}", began)
    monkeypatch.setattr("kvcal.commands.preset._from_config", began)
    done = kvcal(command, *placed([*stay, *idle], base))
    assert done.code == 2, done.err
    assert f"{idle[0]} applies only to {of}" in done.complaint and NOTHING in done.complaint
    assert list(tmp_path.iterdir()) == []
    assert "Began" in kvcal(command, *placed([*stay, *taken], base)).err


def test_every_seed_of_random_weights_alone_is_among_them() -> None:
    """Commands that fit draw windows by it, always."""
    options = {name: {p.name for p in ROOT_COMMAND.commands[name].params} for name in COMMANDS}
    alone = {name for name, own in options.items() if {"seed", "random_weights"} <= own and "holdout" not in own}
    assert alone == {command for command, _, idle, *_ in CASES if idle == SEED}


# --column, of texts without columns.


@pytest.mark.parametrize("command", ["eval", "fit-predictors", "tune-bits", "probe", "compare", "inspect"])
def test_a_column_of_the_embedded_text(command: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in WORK:
        monkeypatch.setattr(f"kvcal.{place}", began)
    always = {"eval": ["-p", "fp8"], "compare": ["-p", "fp8"], "inspect": [KIVI]}.get(command, [])
    done = kvcal(command, *placed([*always, "--model", "tiny", "--column", "body"], base))
    assert done.code == 2, done.err
    assert "--column body: embedded:" in done.complaint and " has no columns" in done.complaint
    rows = ["--model", "tiny", "--column", "body", "--text", base / "rows.jsonl"]
    assert "Began" in kvcal(command, *placed(always, base), *rows).err


def test_a_column_of_random_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in WORK:
        monkeypatch.setattr(f"kvcal.{place}", began)
    done = kvcal("eval", "-p", "fp8", "--model", "qwen2.5-0.5b", "--random-weights", "--column", "body")
    assert done.code == 2 and "--column body: random token ids (random weights) has no columns" in done.complaint


def test_a_column_of_one_text_of_two(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fitted reads it, what is measured does not."""
    for place in WORK:
        monkeypatch.setattr(f"kvcal.{place}", began)
    more = [*PAIR, "--predict", "--model", "tiny", "--column", "body"]
    assert "Began" in kvcal("compare", *more, "--calibration", base / "rows.jsonl").err
    assert "has no columns" in kvcal("compare", *more).complaint
    both = ["--model", "tiny", "--column", "body", "--other-text", base / "rows.jsonl"]
    assert "Began" in kvcal("measure-subspaces", *both).err


# Numbers of no use.


@pytest.mark.parametrize("option", ["--rate", "--beta", "--gamma"])
def test_settings_of_adam_are_finite(option: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = kvcal("train-codebooks", *placed(TEXT, base), "--trainer", "adam", option, "inf")
    assert done.code == 2 and f"{option}" in done.complaint and "all of them finite" in done.complaint


WHOLE = [
    (name, f"--{option.replace('_', '-')}")
    for name, command in COMMANDS.items()
    for option, kind in get_type_hints(command).items()
    if kind in (int, int | None) and option != "seed"
]


@pytest.mark.parametrize(("command", "option"), WHOLE, ids=[" ".join(pair) for pair in WHOLE])
def test_a_number_that_no_tensor_can_have_is_refused(command: str, option: str, base: Path) -> None:
    needed = {"generate": PROMPT, "preset": ["kivi-2", *OWN], "build": [GATED], "inspect": [KIVI], "plan": OWN}
    needed["export"] = [*TEXT, "--to", "fp8", "--output", "new"]
    needed = needed.get(command, TEXT)
    done = kvcal(command, *placed(needed if command != "bench" else [], base), option, 2**63)
    assert done.code == 2 and done.out == ""
    assert (f"{option} {2**63}: at most {2**63 - 1}" in done.err) or "less than or equal to" in done.err, done.err


# An empty value, of a variable that is not set, say, is no default.

EMPTY = [
    ("train-codebooks", [], "--stages", "--stages '': three numbers"),
    ("train-codebooks", [], "--sizes", "--sizes '': three numbers"),
    ("train-codebooks", [], "--preset", "--preset '': allowed are"),
    ("fit-norms", [], "--keys", "codec '' is not known"),
    ("fit-norms", [], "--values", "codec '' is not known"),
    ("fit-norms", [], "--factors", "factors '': allowed are channel, pair, none"),
    ("compare", ["-p", "fp8"], "--keys", "--keys is empty: give codecs"),
    ("compare", ["-p", "fp8"], "--values", "--values is empty: give codecs"),
]


@pytest.mark.parametrize(("command", "stay", "option", "said"), EMPTY, ids=[f"{c} {o}" for c, _, o, _ in EMPTY])
def test_an_empty_value_is_no_default(
    command: str, stay: list[str], option: str, said: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in WORK:
        monkeypatch.setattr(f"kvcal.{place}", began)
    done = kvcal(command, *placed(TEXT, base), *stay, option, "")
    assert done.code == 2 and said in done.complaint, done.err
    assert "Began" in kvcal(command, *placed(TEXT, base), *stay).err
