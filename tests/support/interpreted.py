"""Kernels in Triton's interpreter: in processes of their own, because TRITON_INTERPRET counts when Triton is imported."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def interpreted(*arguments: str) -> list[str]:
    """What `python ARGUMENTS` prints, line by line. With KVCAL_EMULATE=90 in the environment kernels run as compiled."""
    if "KVCAL_EMULATE" in os.environ:
        return _printed(EMULATOR, arguments)
    return _printed(INTERPRETER, arguments, **INTERPRET)


INTERPRETER, EMULATOR = "tests.emulator.quick_interpreter", "tests.emulator"
INTERPRET = {"TRITON_INTERPRET": "1"}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # a fork waits without end for a pool of threads that its parent had


def _ask(module: str, request: list[Any]) -> int:
    """The exit code of a program in a fork of the module's server."""
    server = _server(module)
    assert server.stdin is not None and server.stdout is not None
    try:
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())
    except BaseException:  # as where the test took too long: the next one starts another server
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        _server.cache_clear()
        raise


@cache
def _server(module: str) -> subprocess.Popen[str]:
    """One for all tests of this process: what each program would import takes it 4 s."""
    own = INTERPRET if module == INTERPRETER else {}
    server = subprocess.Popen(
        [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=_environment(**own, **ONE_THREAD), start_new_session=True,
    )  # fmt: skip
    atexit.register(server.communicate)  # which ends it
    return server


def emulated(*arguments: str, capability: int = 90, more: str = "") -> list[str]:
    """As `interpreted`, of kernels compiled for a GPU of this compute capability. more: "early" or "count"
    (tests/emulator).
    """
    return _printed(EMULATOR, arguments, KVCAL_EMULATE=f"{capability},{more}")


def _printed(module: str, arguments: tuple[str, ...], **more: str) -> list[str]:
    """The lines that a program prints, in a fork of the module's server."""
    with tempfile.TemporaryDirectory() as folder:
        out, errors = (Path(folder, name) for name in ("out", "errors"))
        out.touch()
        errors.touch()
        code = _ask(module, [arguments, _environment(**more), str(out), str(errors)])
        assert code == 0, errors.read_text()
        return out.read_text().splitlines()


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def run_cases(main: Callable[[list[Any]], None], **named: Callable[[], Iterable[Any]]) -> None:
    """`main` over the cases that the command line names."""
    from tests import conftest

    torch.set_num_threads(1)
    conftest.fill_uninitialised()
    try:
        main(list(named[sys.argv[1]]()))
    finally:
        conftest.pytest_unconfigure()
