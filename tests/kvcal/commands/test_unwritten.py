"""A file that cannot be written costs nothing of what was measured: figures are printed, then a line about the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.models_fixture import Done, kvcal, small_disk

SHORT = ["--windows", 1, "--length", 196]
NO_ROOM = "No space left on device"


def figures_then_a_line(done: Done, *paths: Path) -> Any:
    """What `--json` printed of a command that ended with code 1 and one line, which names all these files."""
    lines = [line for line in done.err.splitlines() if line.startswith("kvcal: ")]
    assert (done.code, len(lines)) == (1, 1), done.err
    assert all(f"{path}: cannot be written" in lines[0] for path in paths), lines
    assert "next: open" not in done.out
    return done.json


@pytest.fixture
def full_disk(tmp_path: Path) -> Any:
    with small_disk(tmp_path) as disk:
        (disk / "rest").write_bytes(bytes(1 << 14))
        yield disk


def test_figures_of_eval_are_there_without_its_files(
    full_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "/nonexist/x")
    plot, junit, good = full_disk / "n.png", full_disk / "j.xml", tmp_path / "s.md"
    needles = ["--task", "needle", "--lengths", 256, "--limit", 1, "--needle-plot", plot]
    files = ["--junit", junit, "--summary", good]
    done = kvcal("eval", "--preset", "exact", *SHORT, *needles, "--max-kl", 1, *files, "--json")
    found = figures_then_a_line(done, plot, junit)
    assert "; and $GITHUB_STEP_SUMMARY /nonexist/x: cannot be written" in done.err
    assert found["rows"][1]["needles"] and len(found["unwritten"]) == 3
    assert good.read_text().startswith("### kvcal: all 2 gates passed")


def test_a_failed_gate_outranks_a_file(full_disk: Path) -> None:
    done = kvcal("eval", "--preset", "kivi-2", *SHORT, "--max-kl", 0, "--junit", full_disk / "j.xml")
    assert done.code == 3 and "FAILED" in done.out
    assert "at most 0" in done.err.splitlines()[-1] and NO_ROOM in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    "words", [["compare", "--preset", "kivi-2", *SHORT], ["probe", "--windows", 2, "--length", 64, "--probe", "v=k0"]]
)
def test_figures_are_there_without_csv_and_plot(full_disk: Path, words: list[Any]) -> None:
    table, plot = full_disk / "rows.csv", full_disk / "front.png"
    found = figures_then_a_line(kvcal(*words, "--csv", table, "--plot", plot, "--json"), table, plot)
    assert found["rows"] and len(found["unwritten"]) == 2
