"""Run what a page of the documentation tells people to run: its bash blocks, one after the other, in one folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^ *```(\w*)([^\n]*)\n(.*?)^ *```", flags=re.DOTALL | re.MULTILINE)
NEEDS = 'title="needs '  # of a block that wants what no test has: the hub, a GPU, a model


@dataclass(frozen=True)
class Block:
    """heading: the nearest one above, without its hashes."""

    heading: str
    code: str


@dataclass(frozen=True)
class Ran:
    block: Block
    code: int
    out: str
    err: str

    @property
    def report(self) -> str:
        return f"## {self.block.heading}\n{self.block.code}exit code {self.code}\n{self.out}\n{self.err}"


def bash_blocks(
    page: Path, headings: Collection[str] | None = None, languages: Collection[str] = ("bash",)
) -> list[Block]:
    """The page's blocks, but those whose title says what they need; headings: only those below these, whatever their
    level. Python's become a program that bash runs.
    """
    text, found, heading, at = page.read_text("utf-8"), [], "", 0
    for fence in FENCE.finditer(text):
        above = re.findall(r"^#+ +(.*?) *$", text[at : fence.start()], flags=re.MULTILINE)
        heading, at = (above or [heading])[-1], fence.end()
        if fence[1] in languages and NEEDS not in fence[2] and (headings is None or heading in headings):
            code = fence[3] if fence[1] == "bash" else f"python - <<'END_OF_PYTHON'\n{fence[3]}END_OF_PYTHON\n"
            found.append(Block(heading, code))
    return found


def sources(tools: Path) -> dict[str, str]:
    """The environment of a shell that finds this package, and first of all programs those in `tools`."""
    path = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "artifacts"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }


def run_page(
    page: Path,
    folder: Path,
    headings: Collection[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    seconds: float = 120,
    languages: Collection[str] = ("bash",),
    tools: Path | None = None,
) -> list[Ran]:
    """Run the blocks in `folder` with `kvcal` on the path; fails at the first that ends with another code than 0.

    Each block is a shell of its own (bash -eu -o pipefail): files stay, variables do not. tools: a folder whose `kvcal`
    it is, as of `forking`; None: a process of its own.
    """
    if tools is None:
        tools = folder / ".bin"
        tools.mkdir(exist_ok=True)
        program = tools / "kvcal"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvcal.cli "$@"\n')
        program.chmod(0o755)
    own = {**sources(tools), **(environment or {})}
    done = []
    for block in bash_blocks(page, headings, languages):
        ran = subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-c", block.code],
            cwd=folder, env=own, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
        done.append(Ran(block, ran.returncode, ran.stdout, ran.stderr))
        assert ran.returncode == 0, done[-1].report
    return done


def asked(
    page: Path,
    folder: Path,
    tokens: Collection[str],
    environment: Mapping[str, str] | None = None,
    tools: Path | None = None,
) -> list[dict[str, Any]]:
    """Answers of the server guide's own server, which is started in one shell and asked from another, by the page's own
    commands, once for each number of tokens.
    """
    run_page(page, folder, ["2. Make the bundle, once", "3. Write the server"], environment=environment, tools=tools)
    start, question = re.findall(r"^(?:python serve|curl) ?.*$", page.read_text("utf-8"), re.M)
    assert "8000" in start and "8000" in question
    server = subprocess.Popen(
        ["bash", "-c", f"exec {start.replace('8000', '0')}"],
        cwd=folder, env={**sources(folder), **(environment or {})}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        port = line.removeprefix("serving on port ").strip()
        assert port.isdecimal(), line
        answers = []
        for number in tokens:
            words = question.replace("8000", port).replace('"tokens": 100', f'"tokens": {number}')
            done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, timeout=100, check=True)
            answers.append(json.loads(done.stdout))
    finally:
        server.kill()
        server.wait()
    return answers
