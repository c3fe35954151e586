"""docs/benchmarks/comparing.py: both trees run the same command; rows that differ are told."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import ROOT


@pytest.fixture(scope="module")
def comparing() -> Any:
    spec = importlib.util.spec_from_file_location("comparing", ROOT / "docs" / "benchmarks" / "comparing.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_trees_have_one_command(
    comparing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trees = ["--tree", f"before={ROOT}", "--tree", f"after={ROOT}"]
    sizes = ["--windows", "1", "--length", "256", "--device", "cpu", "--presets", "1", "--rounds", "1"]
    places = ["--state", str(tmp_path / "state"), "--output", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["comparing.py", *trees, *sizes, *places])
    comparing.main()
    [round_] = json.loads((tmp_path / "out.json").read_text())["rounds"]
    assert round_["before"]["kl"] == round_["after"]["kl"]
    assert round_["after"]["kl"].keys() == {"higgs-2"}
    assert "\nKL of 1 rows: at most 0.0e+00 apart\n" in capsys.readouterr().out


def test_what_rows_are_apart(comparing: Any) -> None:
    assert comparing.apart([{"a": 1.0, "b": 0.0}, {"a": 1.25, "b": 0.0}]) == 0.2
    with pytest.raises(SystemExit, match="trees have other rows"):
        comparing.apart([{"a": 1.0}, {"b": 1.0}])


def test_a_command_that_fails_ends_all(comparing: Any, tmp_path: Path) -> None:
    running = comparing.Running("before", ROOT, ["--preset", "no-such-preset"], tmp_path, None)
    with pytest.raises(SystemExit, match="no-such-preset"):
        running.result()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--presets", "20"], "--presets 20: must be from 1 to 17, which is all"),
        (["--presets", "0"], "--presets 0: must be from 1 to 17, which is all"),
        (["--rounds", "0"], "--rounds 0: must be 1 or more; the last one counts"),
        (["--tree", "before"], "--tree before: must be NAME=FOLDER, as in before=../before"),
        (["--tree", "a=none"], "--tree a=none: no folder none/kvcal: give a checkout, as git worktree add makes it"),
        (["--tree", "after=."], f"--tree after=.: after is {ROOT} already: give each tree a name of its own"),
    ],
)
def test_what_cannot_be_run_is_refused(
    comparing: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    line: str,
) -> None:
    state = ["--tree", f"after={ROOT}", "--state", str(tmp_path / "state")]
    monkeypatch.setattr(sys, "argv", ["comparing.py", *state, *words])
    with pytest.raises(SystemExit, match="2"):
        comparing.main()
    assert capsys.readouterr().err.splitlines()[-1] == f"comparing.py: error: {line}"
    assert not (tmp_path / "state").exists()
