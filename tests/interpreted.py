"""Kernels in Triton's interpreter: in processes of their own, because TRITON_INTERPRET counts when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def interpreted(*arguments: str) -> list[str]:
    """What `python ARGUMENTS` prints, line by line."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "quick_interpreter", *arguments],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run_cases(main: Callable[[list[Any]], None], **named: Callable[[], Iterable[Any]]) -> None:
    """`main` over the cases that the command line names."""
    import conftest

    torch.set_num_threads(1)
    conftest.pytest_configure()  # torch.empty is full of NaN
    try:
        main(list(named[sys.argv[1]]()))
    finally:
        conftest.pytest_unconfigure()
