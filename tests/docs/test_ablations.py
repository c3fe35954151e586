"""The ablation runner's report: rows of several files put together, what is missing or refused shown, verdicts. No
model.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.models_fixture import ROOT

SETTINGS = {
    "model": "m", "dtype": "float32", "text": "t", "eval_windows": 1, "length": 64, "attention_windows": 1,
    "attention_tokens": 64, "fit_windows": 2, "fit_length": 64, "calibration": "c", "task": None,
}  # fmt: skip
RECIPE = """
text = "A table"
[[table]]
name = "T"
paper = "perplexity"
row = [
  {label = "a", preset = "kivi-2", paper = 2.0},
  {label = "b", preset = "kivi-4", paper = 1.0},
  {label = "c", preset = "fp8", paper = 0.5},
]
[[table]]
name = "At 2 bits"
row = [{label = "wide", target = 2, preset = "kivi-3"}, {label = "refused", preset = "none"}]
[[claim]]
text = "b over a"
better = "b"
worse = "a"
[[claim]]
text = "c over a"
better = "c"
worse = "a"
[[claim]]
text = "b over the best of 2 to 3 bits"
better = "b"
worse = {tables = ["T", "At 2 bits"], bits = [2.0, 3.0]}
"""


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ablations_run", ROOT / "docs" / "ablations" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(bits: float, kl: float) -> dict[str, Any]:
    return {
        "bits_per_value": bits, "paper_bits": bits - 0.75, "perplexity": 10 + kl, "kl": kl, "logit_error": kl,
        "output_error": kl, "full_perplexity": 10.0, "device": "cpu",
    }  # fmt: skip


def key(preset: str) -> str:
    return json.dumps({"preset": preset, "options": {}}, sort_keys=True)


def written(path: Path, rows: dict[str, Any], **other: object) -> Path:
    path.write_text(json.dumps({"settings": SETTINGS | other, "rows": rows}))
    return path


def report(runner: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, *add: Path) -> str:
    (folder / "recipe.toml").write_text(RECIPE)
    words = ["run.py", str(folder / "recipe.toml"), "--report", "--output", str(folder / "out")]
    monkeypatch.setattr(sys, "argv", [*words, *(word for path in add for word in ("--add", str(path)))])
    runner.main()
    return (folder / "out.md").read_text()


def test_a_report_of_two_files(runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = written(tmp_path / "1.json", {key("kivi-2"): row(3, 0.2), key("none"): {"refused": "no such thing"}})
    two = written(
        tmp_path / "2.json",
        {
            key("kivi-2"): row(3, 9.0),
            key("kivi-4"): row(5, 0.1),
            key("kivi-3"): row(4, 0.15),
            key("other"): row(1, 1.0),
        },
    )
    told = report(runner, tmp_path, monkeypatch, one, two)
    assert "1 of 5 rows are not run." in told
    assert "| a | 3.000 | 2.250 | 10.200 | 0.20000 |" in told, "the first file's figure counts"
    assert "| c | not run |" in told
    assert "| refused | no such thing |" in told
    assert "| wide | 4.000 |  |  |" in told, "more bits than the target: only these are told"
    assert "Order agrees; by KL: agrees. Rows without a figure: 1." in told
    assert (
        "| b over a | b: KL 0.10000 against 0.20000 (-50%), 5.000 and 3.000 bits (a) | holds, with 67% more bits |"
        in told
    )
    assert "| full precision | 32.000 | 32.000 | 10.000 | 0.00000 | 0.0000 | 0.0000 |  |\n| a |" in told
    assert told.count("| full precision |") == 1
    assert "| c over a | c: no figure | open |" in told
    assert "| b over the best of 2 to 3 bits | b: KL 0.10000 against 0.20000 (-50%), 5.000 and 3.000 bits (a) |" in told
    kept = json.loads((tmp_path / "out.json").read_text())
    assert [*kept["rows"]] == [key(name) for name in ("kivi-2", "kivi-4", "kivi-3", "none")]


def test_the_papers_count_is_told_and_may_be_missing(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = written(
        tmp_path / "1.json",
        {
            key("kivi-2"): row(3, 0.2) | {"paper_bits": None},
            key("kivi-4"): row(5, 0.1) | {"paper_bits_from": "calibration"},
        },
    )
    told = report(runner, tmp_path, monkeypatch, one)
    assert "| a | 3.000 | - | 10.200 | 0.20000 |" in told
    assert "Paper's count: bits a value" in told
    assert "are those of the calibration text. -: the tiers depend on the text" in told
    plain = written(tmp_path / "2.json", {key("kivi-2"): row(3, 0.2)})
    (tmp_path / "out.json").unlink()
    assert "calibration text. -:" not in report(runner, tmp_path, monkeypatch, plain)


COUNTED: list[
    tuple[dict[str, Any], dict[str, Any], float | None]
] = [  # a row, its figures, bits as its paper counts them
    ({"preset": "kivi-2", "options": {}}, {"bits_per_value": 3.0}, 3.0),
    ({"keys": "turboquant-3", "values": "turboquant-2", "options": {}}, {"bits_per_value": 2.75}, 2.5 + 32 / 64),
    ({"keys": "turboquant-2", "values": "turboquant-2", "keep": 0.2, "options": {}}, {"bits_per_value": 2.4}, 2.5),
    (
        {"command": "tune-bits", "options": {"group": 128}},
        {"bits_per_value": 2.575, "told": {"bits_per_value": 2.575}},
        2.575 - (32 / 128 + 32 / 64) / 2,
    ),
    ({"command": "tune-bits", "options": {}}, {"bits_per_value": 3.9, "told": {"bits_per_value": 3.9}}, 2.9),
    (
        {"command": "train-codebooks", "options": {"stages": "9,18,13"}},
        {"bits_per_value": 2.5, "told": {"bits_per_value": 2.5, "paper_bits_per_value": 5.0}},
        5.0,
    ),
    ({"command": "train-codebooks", "options": {"stages": "9,18,13"}}, {"bits_per_value": 2.5}, 16 * 40 / 128),
    (
        {"command": "tune-thresholds", "options": {"full": 8, "four": 16}},
        {"bits_per_value": 4.09375, "told": {"full_channels": 8.0, "four_bit_channels": 16.0}},
        ((8 * 16 + 16 * 4 + 40 * 2) / 64 + 2) / 2,
    ),
    (
        {"command": "tune-thresholds", "options": {}},
        {
            "bits_per_value": 2.917,
            "paper_bits": 2.923,
            "told": {"expected_bits_per_value": 2.923, "full_channels": 0.5, "four_bit_channels": 16.5},
        },
        ((0.5 * 16 + 16.5 * 4 + 47 * 2) / 64 + 2) / 2,
    ),
    ({"preset": "mixkvq", "options": {}}, {"bits_per_value": 3.7, "paper_bits": 3.03369140625}, None),
    (
        {"command": "fit-predictors", "options": {"backbone": "higgs-2-wide"}},
        {"bits_per_value": 2.61, "told": {"bits_per_value": 2.325}},
        2.325,
    ),
    (
        {"command": "fit-predictors", "options": {"backbone": "turboquant-2"}},
        {"bits_per_value": 2.325, "told": {"bits_per_value": 2.325}},
        None,
    ),
]


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "ablations"))
    return importlib.import_module("paper_bits")


@pytest.mark.parametrize(("what", "figures", "bits"), COUNTED)
def test_recounted(counter: ModuleType, what: dict[str, Any], figures: dict[str, Any], bits: float | None) -> None:
    seen = {"paper_bits": figures["bits_per_value"]} | figures
    found = {"settings": {"model": "kvref-28m"}, "rows": {json.dumps(what): seen}}
    counter.recount(found)
    assert seen["paper_bits"] == (None if bits is None else pytest.approx(bits))
    before = json.dumps(found)
    assert counter.recount(found) == []
    assert json.dumps(found) == before


def test_what_an_evaluation_counted_stays(counter: ModuleType) -> None:
    told = {"expected_bits_per_value": 2.923, "full_channels": 0.5, "four_bit_channels": 16.5}
    for what in ({"command": "tune-thresholds", "options": {}}, {"preset": "mixkvq", "options": {}}):
        seen = {"bits_per_value": 2.917, "paper_bits": 2.27, "told": told}
        assert counter.recount({"settings": {"model": "kvref-28m"}, "rows": {json.dumps(what): seen}}) == []
        assert seen["paper_bits"] == 2.27 and "paper_bits_from" not in seen


def test_recounting_refuses_what_it_does_not_know(counter: ModuleType) -> None:
    with pytest.raises(SystemExit, match="model 'other': its kv heads"):
        counter.recount({"settings": {"model": "other"}, "rows": {key("kivi-2"): row(3, 0.1)}})
    with pytest.raises(SystemExit, match=r"3\.0 bits by its codecs, 3\.5 in the row"):
        counter.recount({"settings": {"model": "kvref-28m"}, "rows": {key("kivi-2"): row(3.5, 0.1)}})


def test_the_files_of_the_ablations_are_recounted(counter: ModuleType) -> None:
    for path in sorted((ROOT / "docs" / "ablations").glob("*.json")):
        assert counter.recount(json.loads(path.read_text())) == [], f"{path.name}: run docs/ablations/paper_bits.py"


@pytest.mark.parametrize(
    ("kl", "bits", "verdict"),
    [(0.1, 3.0, "holds"), (0.1, 3.02, "holds"), (0.1, 2.7, "holds, with 10% fewer bits"),
     (0.3, 3.0, "does not hold"), (0.3, 3.3, "does not hold, with 10% more bits")],
)  # fmt: skip
def test_a_verdict_says_when_bits_are_not_equal(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kl: float, bits: float, verdict: str
) -> None:
    rows = {key("kivi-2"): row(3, 0.2), key("kivi-4"): row(bits, kl)}
    told = report(runner, tmp_path, monkeypatch, written(tmp_path / "1.json", rows))
    assert f"{bits:.3f} and 3.000 bits (a) | {verdict} |" in told


def test_a_measured_row_replaces_a_refused_one(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = written(tmp_path / "1.json", {key("kivi-2"): row(3, 0.2), key("none"): {"refused": "no such thing"}})
    two = written(tmp_path / "2.json", {key("none"): row(2, 0.3)})
    assert "| refused | 2.000 |" in report(runner, tmp_path, monkeypatch, one, two)


def test_rows_of_other_settings_are_refused(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = written(tmp_path / "1.json", {key("kivi-2"): row(3, 0.2)})
    two = written(tmp_path / "2.json", {key("kivi-4"): row(5, 0.1)}, length=128)
    with pytest.raises(SystemExit, match=r"2\.json: was measured with \{'length': 128\}"):
        report(runner, tmp_path, monkeypatch, one, two)
    assert not (tmp_path / "out.json").exists()


def test_a_report_without_rows_is_refused(runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no such file, and no --add"):
        report(runner, tmp_path, monkeypatch)


def test_the_verdicts_on_the_page_are_those_of_the_rows() -> None:
    script = ROOT / "docs" / "ablations" / "verdicts.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
