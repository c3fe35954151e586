"""docs/benchmarks/*.py where there is no GPU: one line and exit code 2, before anything is made."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.pages import ROOT

pytest.importorskip("triton")
FOLDER = ROOT / "docs" / "benchmarks"
# errors of grids; times of codecs, of kvcal eval, of kvcal compare; reader of files; KL of rows; sizes; CPU time of
# commands; vLLM on a CPU; scores
ON_A_CPU = {
    "byte_grids.py",
    "cold_tier.py",
    "comparing.py",
    "higgs_rotation.py",
    "evaluation.py",
    "old_and_new.py",
    "results.py",
    "smallest.py",
    "startup.py",
    "served_quality.py",
    "tasks.py",
}
PARTS = {"vllm_024.py", "vllm_stored.py", "result_tables.py"}  # of vllm_engine.py, results.py
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if path.name not in ON_A_CPU | PARTS)


def check(name: str, code: object, said: str) -> None:
    assert code == 2
    assert said.splitlines()[-1].startswith(f"{name}: error: needs a CUDA GPU, and torch finds none here")
    assert "Traceback" not in said


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_gpu_a_script_ends_with_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path)])
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    check(name, ended.value.code, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # 2 to 6 s each for torch and Transformers
@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_gpu_a_command_ends_with_one_line(name: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "artifacts")])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    given = [sys.executable, str(FOLDER / name), "--out", str(tmp_path)]
    done = subprocess.run(given, env=environment, capture_output=True, text=True, timeout=120)
    check(name, done.returncode, done.stderr)
    assert not done.stdout and not list(tmp_path.iterdir())
