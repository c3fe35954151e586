"""Ranks that have done their share stay until rank 0, which works on alone, has ended; and end as it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from kvcal.capture import ranks as of_ranks
from kvcal.capture.ranks import ShareDoneError, joined, leave_to_first
from kvcal.cli.launched import as_rank
from kvcal_artifacts.errors import GateFailed, KVCalError
from tests.support.models_fixture import SMALL, SUFFIX, kvcal, write_model, write_text
from tests.support.pages import ROOT
from tests.support.ranks import agents_store, free_port, in_ranks

SECONDS = 2  # that ranks wait; for rank 0 twice as long


@pytest.fixture
def agent() -> Iterator[int]:
    """The port of a store such as torchrun's agent has."""
    with agents_store() as port:
        yield port


def works_on(how: str, folder: Path) -> int:
    """Rank 0 goes on alone, and ends as `how` says."""
    os.environ["KVCAL_RANK_TIMEOUT"] = f"{SECONDS}"
    first, started = folder / "first", time.monotonic()
    code = 0
    try:
        with joined("cpu") as ranks:
            if ranks.rank == 0:
                first.write_text(str(os.getpid()))
            ranks.meet()
            leave_to_first()
            if how == "is killed":
                time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "is stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(2 * SECONDS + 2)
            (folder / "written").touch()
    except ShareDoneError:
        code = 3 if (folder / "written").exists() else 4
    except KVCalError as error:
        print(f"{type(error).__name__}: {error}")
        code = 1
    print(f"after {time.monotonic() - started:.1f} s")
    if how == "is stopped":
        os.kill(int(first.read_text()), signal.SIGKILL)
    return code


@pytest.mark.slow
def test_others_wait_for_a_rank_0_that_works_longer_than_the_timeout(tmp_path: Path, agent: int) -> None:
    ends = in_ranks(3, lambda: works_on("is done", tmp_path), tmp_path, timeout=30, port=agent)
    assert [code for code, _ in ends] == [0, 3, 3], ends
    assert "Error" not in "".join(text for _, text in ends), ends


def test_others_end_at_once_with_a_rank_0_that_is_killed(tmp_path: Path, agent: int) -> None:
    ends = in_ranks(3, lambda: works_on("is killed", tmp_path), tmp_path, timeout=30, port=agent)
    assert [code for code, _ in ends] == [-signal.SIGKILL, 1, 1], ends
    lines = [line for _, text in ends for line in text.splitlines() if line.startswith("RankEndedError: ")]
    assert lines == ["RankEndedError: rank 0 of 3 ended; torchrun's report says why"], ends


@pytest.mark.slow
def test_others_name_a_rank_0_that_is_silent(tmp_path: Path, agent: int) -> None:
    ends = in_ranks(2, lambda: works_on("is stopped", tmp_path), tmp_path, timeout=30, port=agent)
    assert [code for code, _ in ends] == [-signal.SIGKILL, 1], ends
    line = f"rank 0 of 2 did not come within {2 * SECONDS} s (twice KVCAL_RANK_TIMEOUT): it hangs, or has ended"
    assert f"RankEndedError: {line}" in ends[1][1], ends


def fails_alone(error: Exception) -> int:
    """Rank 0 fails as a command does after the others have left it alone."""

    def run() -> None:
        of_ranks.current().meet()
        leave_to_first()
        time.sleep(0.5)
        raise error

    try:
        as_rank(run, "fit", True, None)
    except typer.Exit as ended:
        return ended.exit_code
    except KVCalError as ended:
        print(f"kvcal: {ended}")
        return ended.exit_code
    return 0


@pytest.mark.parametrize(("error", "line"), [(GateFailed("too large"), ["kvcal: too large"]), (typer.Exit(3), [])])
def test_a_rank_0_that_fails_alone_ends_all_with_its_line_and_code(
    tmp_path: Path, agent: int, error: Exception, line: list[str]
) -> None:
    ends = in_ranks(2, lambda: fails_alone(error), tmp_path, timeout=40, port=agent)
    assert [code for code, _ in ends] == [3, 3], ends
    assert [line for _, text in ends for line in text.splitlines()] == line, ends


# A command whose rank 0 is killed in the write of its bundle, at the first start: after a look at the other rank.
KILLED = """
import os, signal, sys, time
from pathlib import Path
from kvcal.cli import main
from kvcal_artifacts.bundle import Bundle
write, output = Bundle.write, Path(sys.argv[-1])

def killed(bundle, path):
    if Path(path) == output and not output.with_name("writing").exists():
        Path(path).write_bytes(b"half")
        time.sleep(3)
        pid = int(output.with_name("other").read_text())
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        output.with_name("writing").write_text(state)
        os.kill(os.getpid(), signal.SIGKILL)
    return write(bundle, path)

Bundle.write = killed
if os.environ["RANK"] == "1":
    output.with_name("other").write_text(str(os.getpid()))
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_rank_0_that_is_killed_in_its_write_is_restarted_with_all(tmp_path: Path, nodes: int) -> None:
    """And the run goes on behind the last layer, to the bytes of one process; on two nodes without a common store."""
    write_model(tmp_path / "model", 3)
    write_text(tmp_path / "words.txt")
    words = ["fit", "aqua-kv", "--model", tmp_path / "model", "--text", tmp_path / "words.txt", *SMALL]
    words += ["--batch", "2", "--device", "cpu", "--output"]
    alone, output = tmp_path / f"alone{SUFFIX}", tmp_path / f"shared{SUFFIX}"
    assert kvcal(*words, alone).code == 0
    (tmp_path / "killed.py").write_text(KILLED)
    path = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "artifacts"))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "KVCAL_RANK_TIMEOUT": "100"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", 2 // nodes]
    launcher += ["--max-restarts", "2", "--master-addr", "127.0.0.1", "--master-port", free_port()]
    agents = [
        subprocess.Popen(
            [str(word) for word in (*launcher, "--node-rank", node, tmp_path / "killed.py", *words, output)],
            env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in range(nodes)
    ]  # fmt: skip
    try:
        printed = [agent.communicate(timeout=150)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()
                agent.communicate(timeout=60)
    assert [agent.returncode for agent in agents] == [0] * nodes, printed
    assert (tmp_path / "writing").read_text() in "RSD"  # rank 1 was there
    assert "resuming after layer 2" in printed[0] and "hangs" not in "".join(printed), printed
    assert output.read_bytes() == alone.read_bytes()
