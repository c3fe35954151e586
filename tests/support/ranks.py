"""Processes that share a calibration, forked from a test as torchrun starts them: without its agent, and in no time."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def in_ranks(
    count: int, run: Callable[[], int], folder: Path, timeout: float = 60, port: int | None = None
) -> list[tuple[int, str]]:
    """Run `run` in so many forked processes, each with a rank's environment: the exit code (negative: the signal) and
    the output of each. A process that lasts longer than `timeout` seconds is killed. port: of an agent's store; by
    default rank 0 has one of its own.
    """
    names = {"WORLD_SIZE": str(count), "MASTER_PORT": str(port or free_port())}
    names["TORCHELASTIC_USE_AGENT_STORE"] = str(port is not None)
    children = []
    for rank in range(count):
        said = folder / f"rank-{rank}.txt"
        child = os.fork()
        if child == 0:
            _be(names | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, run, said, timeout)
        children.append((child, said))
    return [(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.read_text()) for child, said in children]


def _be(names: dict[str, str], run: Callable[[], int], said: Path, timeout: float) -> None:
    code = 70
    try:
        signal.alarm(int(timeout))
        with said.open("w", buffering=1) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.stdout = sys.stderr = output
            os.environ |= {"MASTER_ADDR": "127.0.0.1", **names}
            code = run()
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


@contextmanager
def agents_store() -> Iterator[int]:
    """The port of a store such as torchrun's agent has.

    It has a process of its own: its threads look up addresses, and a process forked beside them may find libc's lock
    taken for ever.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port, told = os.pipe()
    child = os.fork()
    if child == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(told, str(store.port).encode())
        signal.pause()
        os._exit(0)
    try:
        yield int(os.read(port, 16))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(port)
        os.close(told)
