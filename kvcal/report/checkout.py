"""Which commit of kvcal runs, where it runs from a git checkout."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path

SECONDS = 10.0  # a file system that hangs


def commit() -> str | None:
    """`git describe --always --dirty` of the checkout that all three packages are read from; None where there is none,
    or git is not installed or does not trust it.
    """
    import kvcal_artifacts
    import kvcal_kernels

    ours = Path(__file__).resolve().parents[1] / "__init__.py"
    return commit_of([ours, *(Path(str(one.__file__)).resolve() for one in (kvcal_artifacts, kvcal_kernels))])


def commit_of(files: Iterable[Path]) -> str | None:
    """The commit of the checkout that has all these files, in which the first is kvcal/__init__.py of a project named
    kvcal. None if no checkout tracks them: installed packages may lie in one of something else.
    """
    files = list(files)
    top = files[0].parent.parent
    if not _is_kvcal(top / "pyproject.toml") or not all(one.is_relative_to(top) for one in files):
        return None
    root = _git(top, "rev-parse", "--show-toplevel")
    if root is None or Path(root).resolve() != top:
        return None
    if _git(top, "ls-files", "--error-unmatch", *(str(one.relative_to(top)) for one in files)) is None:
        return None
    return _git(top, "describe", "--always", "--dirty")


def _is_kvcal(project: Path) -> bool:
    try:
        return bool(tomllib.loads(project.read_text("utf-8"))["project"]["name"] == "kvcal")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _git(folder: Path, *command: str) -> str | None:
    """What git prints; None if it fails, for whatever reason."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_")
    }  # of a hook: another checkout
    try:
        done = subprocess.run(
            ["git", *command],
            cwd=folder,
            env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            text=True,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() or None
