"""Extras: what a bare install does and which line a missing package gives; the names agree with pyproject.toml."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvcal.report.extras import EXTRAS, require
from kvcal_artifacts.errors import UsageError
from tests.support import bare_install
from tests.support.models_fixture import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HIDDEN = f"import sys\nsys.modules.update(dict.fromkeys({sorted(EXTRAS)!r}))\n"  # found no more, import fails


def packages(requirements: list[str]) -> set[str]:
    """Names of packages, as they are imported, without versions and markers."""
    names = {requirement.split(">")[0].split(";")[0].split("[")[0].strip() for requirement in requirements}
    return {name.replace("-", "_") for name in names}


def test_every_package_is_in_the_extra_that_its_line_names() -> None:
    extras = PROJECT["optional-dependencies"]
    assert not packages(PROJECT["dependencies"]) & set(EXTRAS)
    for module, extra in EXTRAS.items():
        assert module in packages(extras[extra])
    assert extras["all"] == ["kvcal[data,plot,tune,tasks,spread]"]
    assert set(EXTRAS.values()) == {"data", "plot", "tune", "tasks", "spread"}
    assert bare_install.EXTRAS == EXTRAS


def test_a_missing_package_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    line = r"^this needs lm-eval, which is not installed: pip install 'kvcal\[tasks\]', or that$"
    with pytest.raises(UsageError, match=line):
        require("lm_eval", "this", "that")
    require("matplotlib", "this")


def test_a_bare_install_loads_a_bundle_and_generates(tmp_path: Path) -> None:
    """The same script runs on the wheel in `nox -s install_check`; here the extras' packages are hidden."""
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    script = [sys.executable, bare_install.__file__]
    done = subprocess.run(script, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout == "bare install: 6 things work, 6 name their extra, 0 problems\n"


def test_a_package_that_should_not_be_there_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bare_install, "WORKS", ())
    monkeypatch.setattr(bare_install, "REFUSED", ())
    monkeypatch.setattr(bare_install, "LOADS", "raise SystemExit('no')")
    lines = list(bare_install.problems())
    assert any(line.startswith("optuna is installed: ") for line in lines)
    assert lines[-1] == "a bundle does not load and generate: no\n"
