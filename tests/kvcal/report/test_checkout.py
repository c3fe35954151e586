"""The commit in result files: of a checkout that is kvcal's own, and of nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcal.report import checkout
from kvcal.report.checkout import commit_of

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
FILES = ("kvcal/__init__.py", "artifacts/kvcal_artifacts/__init__.py", "kernels/kvcal_kernels/__init__.py")


def git(folder: Path, *command: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *own, *command], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def written(top: Path, name: str = "kvcal") -> list[Path]:
    for file in FILES:
        (top / file).parent.mkdir(parents=True, exist_ok=True)
        (top / file).write_text("")
    (top / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
    return [top / file for file in FILES]


def committed(top: Path, name: str = "kvcal") -> list[Path]:
    files = written(top, name)
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-q", "-m", "a")
    return files


@pytest.fixture
def top(tmp_path: Path) -> Path:
    return tmp_path.resolve() / "a"


def test_a_checkout_says_its_commit_and_whether_it_was_changed(top: Path) -> None:
    files = committed(top)
    head = git(top, "rev-parse", "--short", "HEAD")
    assert commit_of(files) == head
    (top / "results.json").write_text("{}")  # not tracked
    assert commit_of(files) == head
    files[2].write_text("x = 1\n")
    assert commit_of(files) == f"{head}-dirty"
    git(top, "commit", "-qam", "b")
    assert commit_of(files) == git(top, "rev-parse", "--short", "HEAD") != head
    git(top, "worktree", "add", "-q", "--detach", str(top.parent / "tree"), head)
    assert commit_of([top.parent / "tree" / file for file in FILES]) == head


def _untracked(top: Path) -> list[Path]:
    """Installed into a checkout of something else, which ignores it."""
    committed(top, "other")
    return written(top / "venv/site-packages")


def _of_another(top: Path) -> list[Path]:
    """Part of a larger project's checkout."""
    committed(top, "other")
    files = written(top / "vendor")
    git(top, "add", ".")
    git(top, "commit", "-qm", "b")
    return files


def _elsewhere(top: Path) -> list[Path]:
    """Kernels from another place."""
    return [*committed(top)[:2], written(top.parent / "b")[2]]


def _added(top: Path) -> list[Path]:
    """A file that the commit does not have."""
    files = committed(top)
    git(top, "rm", "-q", "--cached", FILES[1])
    return files


def _half_written(top: Path) -> list[Path]:
    (files := committed(top)) and (top / "pyproject.toml").write_text("[project")
    return files


CASES: list[Callable[[Path], list[Path]]] = [
    written, lambda top: committed(top, "other"), _untracked, _of_another, _elsewhere, _added, _half_written,
]  # fmt: skip


@pytest.mark.parametrize("made", CASES)
def test_what_is_no_checkout_of_kvcal_has_no_commit(made: Callable[[Path], list[Path]], top: Path) -> None:
    top.mkdir()
    assert commit_of(made(top)) is None


def test_git_that_is_not_there_or_refuses_is_silent(
    top: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    files, own = committed(top), os.environ["PATH"]
    bad = top.parent / "bin"
    bad.mkdir()
    (bad / "git").write_text("#!/bin/sh\necho 'fatal: detected dubious ownership in repository' >&2\nexit 128\n")
    (bad / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bad}:{own}")
    assert commit_of(files) is None
    monkeypatch.setenv("PATH", str(top))
    assert commit_of(files) is None
    assert capfd.readouterr() == ("", "")
    (bad / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setenv("PATH", f"{bad}:{own}")
    monkeypatch.setattr(checkout, "SECONDS", 0.1)
    assert commit_of(files) is None


def test_a_hooks_variables_lead_nowhere(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = committed(top)
    head = git(top, "rev-parse", "--short", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(top / "none"))
    assert commit_of(files) == head
