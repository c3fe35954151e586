"""The files of docs/scale, run as they stand: two nodes of two ranks on this machine, one of which loses a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from kvcal.models.names import resolve
from tests.support.models_fixture import SUFFIX, kvcal, wait_until, write_model, write_text
from tests.support.pages import ROOT
from tests.support.ranks import free_port

SCALE = ROOT / "docs" / "scale"
STANDS_FOR = {  # programs of a cluster
    "scontrol": "echo 127.0.0.1; echo 127.0.0.1",
    # of 22.05 and later: cores by this variable alone, or one
    "srun": '[ "$SRUN_CPUS_PER_TASK" = 2 ] || exit 9; SLURM_NODEID=0 "$@" & SLURM_NODEID=1 "$@" & wait %1 && wait %2',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "python": f'exec {sys.executable} "$@"',
}


def nodes(folder: Path) -> dict[str, str]:
    """The environment of a node, with the programs of a cluster on its path."""
    tools = folder / "tools"
    tools.mkdir()
    for name, body in STANDS_FOR.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    path = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "artifacts")]
    return os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path),
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "KVCAL_RANK_TIMEOUT": "100",
        "PORT": str(free_port()),
    }


def arguments(folder: Path) -> list[str]:
    """What a fit of five layers is given besides --output."""
    write_model(folder / "model", 5)
    write_text(folder / "words.txt")
    windows = ["--windows", "10", "--length", "68", "--sink", "4", "--recent", "16", "--block", "8", "--batch", "2"]
    return ["--model", str(folder / "model"), "--text", str(folder / "words.txt"), *windows]


@contextmanager
def run(commands: list[tuple[list[str], dict[str, str]]], folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Each command with its environment in a process group of its own, none of which outlives the block."""
    processes = [
        subprocess.Popen(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )
        for command, environment in commands
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.communicate(timeout=60)


def rank_of(output: Path, rank: int) -> int | None:
    """The process of this rank that writes, or would write, to an output."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            environment = (place / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[2:4] == [b"-m", b"kvcal"] and str(output).encode() in words and b"RANK=%d" % rank in environment:
            return int(place.name)
    return None


def test_sky_installs_what_its_fit_needs_and_needs_no_token(tmp_path: Path) -> None:
    """The text of every real model comes by `datasets`, which is an extra; Meta's models are gated."""
    task = yaml.safe_load((SCALE / "sky.yaml").read_text())
    environment = nodes(tmp_path)
    (tmp_path / "tools" / "pip").write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "tools" / "pip").chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", task["setup"]], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    first, option, constraints, what = done.stdout.splitlines()
    assert (first, option, (ROOT / constraints).is_file(), what[0]) == ("install", "-c", True, ".")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"]]
    for extra in Requirement(f"kvcal{what[1:]}").extras:
        needed += project["optional-dependencies"][extra]
    assert {"torch", "transformers", "datasets"} <= {Requirement(one).name for one in needed}
    hub_id = resolve(task["envs"]["MODEL"]).hub_id
    assert hub_id is not None and hub_id.startswith("Qwen/")


@pytest.mark.parametrize(("given", "restarts"), [({}, "3"), ({"RESTARTS": "0"}, "0")])
def test_a_slurm_job_restarts_as_often_as_it_is_to(tmp_path: Path, given: dict[str, str], restarts: str) -> None:
    environment = nodes(tmp_path) | given | {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    environment["SLURM_CPUS_PER_TASK"] = "2"
    (tmp_path / "tools" / "torchrun").write_text('#!/bin/bash\necho "$@"\n')
    command = ["bash", str(SCALE / "slurm.sh"), "eval", "tiny", "--max-kl", "0.1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        words = line.split()
        assert words[words.index("--max-restarts") + 1] == restarts
        assert words[words.index("-m") :] == ["-m", "kvcal", *command[2:]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slurm", "sky"])
def test_two_nodes_write_the_bytes_of_one_process_though_a_rank_is_killed(tmp_path: Path, kind: str) -> None:
    given, output = arguments(tmp_path), tmp_path / f"shared{SUFFIX}"
    assert kvcal("fit", "aqua-kv", *given, "--output", tmp_path / f"alone{SUFFIX}").code == 0
    environment = nodes(tmp_path)
    if kind == "slurm":
        job = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "RANKS_PER_NODE": "2"}
        job["SLURM_CPUS_PER_TASK"] = "2"
        words = ["bash", str(SCALE / "slurm.sh"), "fit", "aqua-kv", *given, "--output", str(output)]
        commands = [(words, environment | job)]
    else:
        task = yaml.safe_load((SCALE / "sky.yaml").read_text())
        assert task["num_nodes"] == 2
        job = {
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NUM_GPUS_PER_NODE": "2",
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        }
        job |= {name: str(value) for name, value in task["envs"].items()}
        job |= {"OUTPUT": str(output), "MODEL": str(tmp_path / "model")}
        line = task["run"].replace('--output "$OUTPUT"', '--output "$OUTPUT" "$@"')
        words = ["bash", "-c", line, "bash", *given[2:]]  # text and windows: the model's defaults need the hub
        commands = [(words, environment | job | {"SKYPILOT_NODE_RANK": str(node)}) for node in range(2)]
    with run(commands, tmp_path) as processes:
        partial = output.with_name(f".{output.name}.partial")
        wait_until(lambda: (partial / "layer-0000.safetensors").exists() or output.exists(), processes[0])
        victim = rank_of(output, 3)
        assert victim is not None and not output.exists()
        os.kill(victim, signal.SIGKILL)
        said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said
    assert "resuming after layer" in "".join(said), said
    assert output.read_bytes() == (tmp_path / f"alone{SUFFIX}").read_bytes()
