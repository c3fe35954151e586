"""What commands print fits 80 columns, and --wide has all of it.

Cheap commands run on a small model; of those that measure or reach for the hub a result is given, with long names.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcal.cli.app import COMMANDS
from kvcal.cli.output import command_line, print_facts, print_rows, print_table, width
from kvcal.pipeline.gates import Check
from kvcal.report.quantities import QUANTITIES, duration, folded, percent, quantity, ranges, significant, size, written
from tests.support.models_fixture import SUFFIX, kvcal, write_model, write_text
from tests.support.pages import ROOT

WIDTH = 80
LONG = "smollm2-135m-instruct-aqua-kv-rank16"
HASH = "0123456789abcdef" * 4
FIT = "--model model --text words.txt --windows 4 --length 68 --sink 4 --recent 16 --block 8 --holdout 1"
BLOCK_32 = "--model model --text words.txt --windows 4 --length 132 --sink 4 --recent 32 --block 32 --holdout 1"
RUN = {  # in this order, in one folder
    "names": "names",
    "names of operations": "names operation",
    "models": "models",
    "doctor": "doctor",
    "check-codec": "check-codec uniform-1",
    "plan": "plan --model llama-3.1-8b --gpu rtx-4090",
    "preset": "preset kivi-2 --model model --no-check -o k2.kvcal.safetensors",
    "fit-predictors": f"fit-predictors {FIT} -o aq.kvcal.safetensors",
    "fit-norms": f"fit-norms {FIT} --factors pair -o ns.kvcal.safetensors",
    "measure-subspaces": f"measure-subspaces {BLOCK_32} -o sq.kvcal.safetensors",
    "tune-bits": f"tune-bits {BLOCK_32} -o tb.kvcal.safetensors",
    "probe": "probe --model model --text words.txt --windows 4 --length 20",
    "inspect": "inspect aq.kvcal.safetensors",
    "verify": "verify aq.kvcal.safetensors --model model",
    "diff": "diff aq.kvcal.safetensors k2.kvcal.safetensors",
    "combine": "combine ns.kvcal.safetensors ns.kvcal.safetensors -o comb.kvcal.safetensors",
    "reproduce": "reproduce k2.kvcal.safetensors --model model -o again.kvcal.safetensors",
    "fold": "fold --model model -b ns.kvcal.safetensors -o folded --bundle-output nf.kvcal.safetensors",
    "export": "export --to fp8 --model model --text words.txt --windows 2 --length 64 -o exported",
    "bench": "bench --device jetson-orin-nano --length 512",
    "bench of a paper's table": "bench --device jetson-xavier-nx --operation innerq-table-4",
    "report": "report aq.kvcal.safetensors -o page.html",
}
ENDS = {"diff": 7, "check-codec": 1}
NOT_HERE = {"generate": "prints the text of a model, whatever it is"}

FULL = {
    "name": "full", "perplexity": 62.75519, "kl": 0.0, "kl_se": 0.0, "kl_median": 0.0, "kl_p99": 0.0, "kl_max": 0.0,
    "bits_per_value": 16.0, "paper_bits": 16.0, "cache_bytes": 23_592_960, "window_bytes": 0, "same_top": 1.0,
    "smaller": 1.0, "positions": [], "bytes_at_16_bit": 23_592_960,
}  # fmt: skip
PAIRED = {
    "score": 0.51,
    "full": 0.525,
    "difference": -0.015,
    "low": -0.04,
    "high": 0.011,
    "mcnemar": 0.4,
    "n": 1319,
    "differing": 99,
}
ROW = FULL | {
    "name": LONG, "perplexity": 64.07013, "kl": 0.0077723, "kl_se": 0.0003412, "kl_median": 0.00293, "kl_p99": 0.0811321,
    "kl_max": 0.4948312, "bits_per_value": 2.375, "same_top": 0.9598712, "smaller": 6.7234567, "logit_error": 0.12345,
    "cache_bytes": 4_123_456, "output_error": None, "bytes_at_length": 4_123_456, "front": True,
    "positions": [{"first": at, "last": at + 127, "kl": 0.00123 + at / 1e7} for at in range(0, 2048, 128)],
    "tasks": {"gsm8k_cot_zeroshot": PAIRED}, "kl_windows": [0.007, 0.0085446],
}  # fmt: skip
GATES = [Check(LONG, "max-kl", True, 0.00777, 0.5, 11, "layer 11, values of head 1: relative error 0.0072")]
RUNG = {
    "scheme": "uniform-3-channel+turboquant-4-3", "bits_per_value": 3.3125, "times_smaller": 4.83, "kl": 0.0123456,
    "forecast_kl": 0.0234567, "kl_se": 0.001, "learned": True, "kernel": False,
    "command": f"kvcal fit-predictors -m {LONG} --text words.txt --windows 36 --holdout 4 --length 1024",
}  # fmt: skip
BUILT = {"name": LONG, "method": "fit-predictors", "action": "built", "pass": 12, "file": f"bundles/{LONG}{SUFFIX}"}
WRITTEN = {"bundle": f"{LONG}{SUFFIX}", "sha256": HASH, "bytes": 6_543_210, "bits_per_value": 2.3712345}
STAGE = {
    "quantiser": "value",
    "stage": 1,
    "iterations": 55,
    "error": 0.2431234,
    "used": 256,
    "reseeded": 0,
    "seconds": 3.2,
}
CACHE = {"name": "full", "bits_per_value": None, "nbytes": 33_554_432, "kl": 0.0, "same": 100, "of": 100}
GIVEN: dict[str, tuple[str, str, dict[str, Any]]] = {  # command -> its words, the function, what that returns
    "eval": (
        "eval --preset kivi-2", "kvcal.commands.evaluation.run_eval",
        {"rows": [FULL, ROW], "windows": 4, "gates": GATES, "failed": {}, "unwritten": []},
    ),
    "compare": (
        "compare --preset kivi-2 --output rows.json", "kvcal.commands.compare.run_compare",
        {
            "full_perplexity": 62.75, "rows": [ROW, ROW | {"name": f"{LONG} + {LONG}"}], "at_length": 131_072, "length": 1024,
            "windows": 2, "against": "bits", "max_bits": 2.5, "best": LONG, "ties": [LONG] * 3, "failed": {},
            "unwritten": [],
        },
    ),
    "recommend": (
        "recommend", "kvcal.commands.recommend.run_recommend",
        {
            "rows": [RUNG, RUNG | {"scheme": "kivi-4"}], "chosen": RUNG["scheme"], "runner_up": "kivi-4", "holdout_windows": 2,
            "instead_of": None, "max_bits": None, "max_kl": 0.01, "left_out": {"mixkvq": "packs " + "too late " * 20},
            "outliers": [{"ratio": 12.3, "layer": 1, "head": 2}], "device": "cuda:0", "seconds": 312.4,
            "attention_errors": {RUNG["scheme"]: [{"layer": 3, "output_head_errors": [0.1, 0.2]}]},
            "bundle": f"{LONG}{SUFFIX}", "next": f"kvcal eval {LONG}{SUFFIX} -m smollm2",
        },
    ),
    "tune-thresholds": (
        "tune-thresholds", "kvcal.commands.tune_thresholds.run_tune_thresholds",
        WRITTEN | {"front": [{"trial": 3, "tau_low": 0.123456, "tau_high": 4.5, "quality": 0.0123, "bits": 3.456}]},
    ),
    "train-codebooks": (
        "train-codebooks", "kvcal.commands.train_codebooks.run_train_codebooks", WRITTEN | {"stage_rows": [STAGE]},
    ),
    "build": (
        "build r.toml --no-gates", "kvcal.commands.build.run_build",
        {"bundles": [BUILT | {"why": "the text is another one: " + HASH}], "gates": GATES},
    ),
    "card": (
        f"card {LONG}{SUFFIX} -o card.md", "kvcal.commands.publish.run_card",
        {"bundle": LONG, "card": "", "files": ["card.md", f"{LONG}.errors.png"]},
    ),
    "push": (
        f"push {LONG}{SUFFIX} org/name", "kvcal.commands.publish.run_push",
        {"repo": "org/name", "commit": HASH, "files": ("README.md", *[f"{LONG}-{n}.errors.png" for n in range(3)])},
    ),
    "pull": (
        "pull org/name", "kvcal.commands.publish.run_pull",
        WRITTEN | {"commit": HASH, "files": ("README.md", *[f"{LONG}-{n}.errors.png" for n in range(3)])},
    ),
    "demo": (
        "demo", "kvcal.commands.demo.run_demo",
        {
            "rows": [CACHE, CACHE | {"name": "tiny-aqua-kv", "bits_per_value": 2.375, "nbytes": 7_952_640}],
            "rows_of_text": 4, "length": 2048, "sample": "The emperor had resolved to march.", "bundle": f"x{SUFFIX}",
            "next": "kvcal plan --model llama-3.1-8b --gpu rtx-4090 --context 32k",
        },
    ),
}  # fmt: skip
WRITES = {*GIVEN} - {"eval"} | {
    "preset", "fit-predictors", "fit-norms", "measure-subspaces", "tune-bits", "combine", "reproduce", "fold", "export",
    "report",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a model, a text, a recipe and the file that commands with a given result would read."""
    folder = tmp_path_factory.mktemp("tables")
    write_model(folder / "model", 4)
    write_text(folder / "words.txt")
    (folder / f"{LONG}{SUFFIX}").touch()
    (folder / "r.toml").write_text('[models.tiny]\n[bundles.a]\npreset = "kivi-2"\n')
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[str, str]:
    """What each command prints on stdout in 80 columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", str(WIDTH))
        return {name: out_of(words, ENDS.get(name, 0)) for name, words in RUN.items()} | given(patch)


def given(patch: pytest.MonkeyPatch, *options: str) -> dict[str, str]:
    """What commands print of the results in GIVEN. All modules are there before: one that is imported while another's
    function is replaced would keep the replacement.
    """
    for _, function, _ in GIVEN.values():
        importlib.import_module(function.rpartition(".")[0])
    for _, function, result in GIVEN.values():
        patch.setattr(function, lambda *_, _result=result, **__: dict(_result))
    return {name: out_of(" ".join([words, *options])) for name, (words, *_) in GIVEN.items()}


def out_of(words: str, code: int = 0) -> str:
    done = kvcal(*shlex.split(words))
    assert done.code == code, f"{words}: {done.err}"
    return done.out


def test_every_command_is_here() -> None:
    assert {*RUN, *GIVEN, *NOT_HERE} - {"names of operations", "bench of a paper's table"} == {*COMMANDS}


@pytest.mark.parametrize("name", [*RUN, *GIVEN])
def test_no_line_is_wider_than_the_terminal(name: str, printed: dict[str, str]) -> None:
    """But for the command that comes next, which is one line, where its paths are long."""
    printed_lines = printed[name].splitlines()
    assert len(printed_lines) > 0
    assert [
        line for line in printed_lines if len(line) > WIDTH and not (name in GIVEN and line.startswith("next:"))
    ] == []


@pytest.mark.parametrize("name", sorted(WRITES))
def test_what_writes_says_what_to_do_next(name: str, printed: dict[str, str]) -> None:
    last = printed[name].splitlines()[-1]
    assert last.startswith("next: ") and len(last) > len("next: ")


def test_commands_that_come_next_are_the_program_s(printed: dict[str, str]) -> None:
    """With options that it has."""
    from docs.check import parse_problem

    commands = [out.splitlines()[-1].removeprefix("next: ") for out in printed.values()]
    typed = [shlex.split(command)[1:] for command in commands if command.startswith("kvcal ")]
    assert len(typed) > 10
    assert [words for words in typed if parse_problem(words)] == []


def test_equal_layers_are_one_row(printed: dict[str, str]) -> None:
    assert "\n0–3 " in printed["tune-bits"] and "\n1–3 " in printed["inspect"]


def test_full_precision_stands_where_caches_are_compared(printed: dict[str, str]) -> None:
    for name in ("eval", "compare", "recommend", "plan", "demo", "bench"):
        assert "fp16" in printed[name], name
        assert "smaller" in printed[name] or "FP16" in printed[name], name


def test_numbers_have_units_and_three_digits(printed: dict[str, str]) -> None:
    assert "6.54 MB" in printed["pull"] and "2.37" in printed["pull"] and "2.3712" not in printed["pull"]
    assert "23.6 MB" in printed["eval"] and "0.00777" in printed["eval"] and "96.0 %" in printed["eval"]
    assert "3.02 GB" in printed["compare"]  # 16 bits per value at 131,072 tokens


def test_errors_of_scores_that_are_no_one_quantity_have_no_one_name(printed: dict[str, str]) -> None:
    """docs/evaluation.md#errors-of-attention-scores defines the three: relative, in nats, squared."""
    facts = {
        name: re.findall(r"^(?:squared )?logit error[^ ]*(?: of KIVI,)?(?: nats)?", printed[name], re.M)
        for name in WRITES
    }
    assert facts["measure-subspaces"] == ["logit error, nats", "logit error of KIVI, nats"]
    assert facts["fit-norms"] == ["squared logit error"] and "the same, no factors" in printed["fit-norms"]
    page = (ROOT / "docs" / "evaluation.md").read_text()
    for name in ("| logit error |", "| logit error, nats |", "| squared logit error |"):
        assert name in page


def test_wide_has_all_columns_and_digits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    out = given(monkeypatch, "--wide")
    for head in ("KL median", "KL 99 %", "KL max", "same top", "perplexity"):
        assert head in out["eval"] and head in out["compare"]
    for head in ("paper's bits/value", "logit error", "output error", "±"):
        assert head in out["compare"]
    assert "0.0077723" in out["eval"] and "3,509,052 B" in out["eval"] and HASH in out["pull"]
    assert "hub id" in out_of("models --wide") and "hidden" in out_of("models --wide")
    assert "how" in out_of("bench --device jetson-orin-nano --length 512 --wide").splitlines()[2].split()
    assert "longest, prompt whole" in out_of("plan --model llama-3.1-8b --gpu rtx-4090 --wide")
    assert "…" not in out_of(f"diff {made(folder, 'higgs-2')} {made(folder, 'kivi-2')} --wide", 7)


def test_guard_and_canary_say_how_long_they_took(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a log; in a terminal their bars stay."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("kvcal.report.progress.LEAST_SECONDS_REPORTED", 0.0)
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    guarded = kvcal("preset", "kivi-2", "--model", "model", "--output", f"guarded{SUFFIX}")
    assert "\nOutlier guard, passes: 1/1 after " in f"\n{guarded.err}"
    text = shlex.split("--model model --text words.txt --windows 1 --length 164")
    measured = kvcal("eval", *text, "--preset", "kivi-2", "--json")
    assert "\nCanary: 1/1 after " in f"\n{measured.err}" and measured.out.startswith("{")


def made(folder: Path, preset: str) -> str:
    name = f"wide-{preset}{SUFFIX}"
    assert kvcal("preset", preset, "--config-only", "--output", folder / name).code == 0
    return name


# The parts.


def lines(capsys: pytest.CaptureFixture[str], run: Callable[[], None]) -> list[str]:
    run()
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def test_the_width_is_the_terminal_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "132")
    assert width() == 132
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((100, 30)))
    assert width() == 100

    def none(*_: object) -> os.terminal_size:
        raise OSError

    monkeypatch.setattr("os.get_terminal_size", none)
    assert width() == WIDTH


def test_columns_that_do_not_fit_stand_below(capsys: pytest.CaptureFixture[str]) -> None:
    """With the columns that name a row; nothing is lost."""
    heads, row = ["name", *(f"layer {n}" for n in range(30))], ["v", *(f"0.{n:05}" for n in range(30))]
    out = lines(capsys, lambda: print_table(heads, [row]))
    assert max(map(len, out)) <= WIDTH
    assert [word for line in out if line.startswith("v") for word in line.split()[1:]] == row[1:]
    assert sum(line.startswith("name") for line in out) > 1
    assert len(lines(capsys, lambda: print_table(heads, [row], wide=True))) == 3


def test_headings_break_before_cells_do(capsys: pytest.CaptureFixture[str]) -> None:
    heads = [f"a heading {n}" for n in range(7)]
    out = lines(capsys, lambda: print_table(heads, [["0.25"] * 7]))
    assert max(map(len, out)) <= WIDTH and out[0].split() == ["a"] * 7 and out[1].split() == ["heading"] * 7


def test_text_is_wrapped_and_numbers_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    out = lines(capsys, lambda: print_table(["n", "why"], [["1,234,567", "because " * 20]]))
    assert max(map(len, out)) <= WIDTH and "1,234,567" in out[2] and sum("because" in line for line in out) > 1


def test_rows_and_facts_take_names_and_forms_from_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"bits_per_value": 2.375, "bytes": 6_543_210, "kl": None}
    assert lines(capsys, lambda: print_rows([*row], [row])) == [
        "bits/value     size",
        "─" * 20,
        "      2.38  6.54 MB",
    ]
    assert lines(capsys, lambda: print_facts(row)) == ["bits/value  2.38", "size        6.54 MB"]
    assert lines(capsys, lambda: print_facts(row, wide=True)) == [
        "bits/value  2.375", "size        6,543,210 B", "KL          -",
    ]  # fmt: skip


def test_one_quantity_has_one_name() -> None:
    assert quantity("bits").name == quantity("stored_bits").name == quantity("bits_per_value").name == "bits/value"
    assert quantity("smaller").name == quantity("times_smaller").name == "× smaller"
    assert quantity("cache_bytes").name == "cache" and quantity("train_windows").name == "train windows"
    assert all(not one.name.startswith("x ") and "_" not in one.name for one in QUANTITIES.values())


def test_equal_neighbours_fold() -> None:
    rows = [[0, "a"], [1, "b"], [2, "b"], [3, "b"], [4, "a"]]
    assert list(folded(rows)) == [["0", "a"], ["1–3", "b"], ["4", "a"]]
    assert ranges([0, 2, 3, 4, 9]) == "0, 2–4, 9" and ranges([]) == ""


def test_a_long_command_is_one_for_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["kvcal", "eval", "it's here", *[f"--option-{n}" for n in range(12)]]
    out = lines(capsys, lambda: command_line(words, before="next: "))
    assert len(out) > 1 and max(map(len, out)) <= WIDTH
    assert shlex.split("\n".join(out).removeprefix("next: ").replace("\\\n", "")) == words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0077723, "0.00777"), (5, "5.00"), (130.9, "131"), (1371.87, "1,372"), (7.37e-5, "7.37e-05"), (0, "0"),
        (0.9996, "1.00"), (99.96, "100"), (-0.4765, "-0.476"), (float("inf"), "inf"), (0.000123456, "0.000123"),
    ],
)  # fmt: skip
def test_three_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (812, "812 B"), (6_500_000, "6.50 MB"), (999_999, "1.00 MB"), (23_592_960, "23.6 MB"),
        (8 * 10**9, "8.00 GB"),
    ],
)  # fmt: skip
def test_bytes_have_units(count: int, text: str) -> None:
    assert size(count) == text


def test_times_shares_and_hashes() -> None:
    assert [duration(s) for s in (0.44, 12.2, 185, 7620)] == ["0.4 s", "12 s", "3 min 5 s", "2 h 7 min"]
    assert (percent(0.9598), percent(1)) == ("96.0 %", "100 %")
    assert written("sha256", HASH) == f"{HASH[:16]}…" and written("sha256", HASH, whole=True) == HASH
    assert written("revision", f"sha256:{HASH}") == f"sha256:{HASH[:16]}…" and written("revision", "main") == "main"
    assert written("windows", {"sink": 4, "key_relative_error": 0.1234}) == "sink 4, key error 0.123"
    assert written("skipped", {}) is None and written("seed", 1234567) == "1234567" and written("chosen", True) == "yes"


def test_compare_says_which_pairs_are_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """The signed ratio of each pair, in brackets where the windows do not tell it from none."""
    from kvcal.cli.compare import _print_pairs

    rows: list[dict[str, Any]] = [
        {"name": "a", "kl_windows": [1.0, 2.0, 3.0]},
        {"name": "b", "kl_windows": [1.1, 1.9, 3.05]},
        {"name": "c", "kl_windows": [1.5, 2.5, 3.6]},
    ]
    _print_pairs(rows)
    told = capsys.readouterr().out
    assert [line.split() for line in told.splitlines() if line.split()[:1] in (["a"], ["c"])] == [
        ["a", "-", "(-0.277)", "-16"], ["c", "+16", "+8.6", "-"],
    ]  # fmt: skip
    assert "in brackets up to 4.3: not apart at 95 %" in " ".join(told.split())
    _print_pairs([row | {"kl_windows": [1.0]} for row in rows])
    assert capsys.readouterr().out == ""
