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
    """What `python ARGUMENTS` prints, line by line. With KVCAL_EMULATE=90 in the environment kernels run as compiled."""
    if "KVCAL_EMULATE" in os.environ:
        return _printed("tests.emulator", arguments)
    return _printed("tests.emulator.quick_interpreter", arguments, TRITON_INTERPRET="1")


def emulated(*arguments: str, capability: int = 90, more: str = "") -> list[str]:
    """As `interpreted`, of kernels compiled for a GPU of this compute capability. more: "early" or "count"
    (tests/emulator).
    """
    return _printed("tests.emulator", arguments, KVCAL_EMULATE=f"{capability},{more}")


def _printed(module: str, arguments: tuple[str, ...], **more: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run_cases(main: Callable[[list[Any]], None], **named: Callable[[], Iterable[Any]]) -> None:
    """`main` over the cases that the command line names."""
    from tests import conftest

    torch.set_num_threads(1)
    conftest.fill_uninitialised()
    try:
        main(list(named[sys.argv[1]]()))
    finally:
        conftest.pytest_unconfigure()
