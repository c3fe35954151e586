"""A small model folder with a tokenizer of bytes, a text, the command line called in-process, and a process to kill."""

from __future__ import annotations

import ctypes
import fnmatch
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import typer
from typer.testing import CliRunner

from kvcal.cli import main
from kvcal.cli.app import app
from tests.support.architectures import TINY, initialise
from tests.support.fork_server import exit_code

ROOT = Path(__file__).resolve().parents[2]
ROOT_COMMAND: Any = typer.main.get_command(app)  # once: CliRunner.invoke makes it anew for each command, in 70 ms
SUFFIX = ".kvcal.safetensors"
SMALL = ["--windows", "8", "--length", "68", "--sink", "4", "--recent", "16", "--block", "8"]


def write_model(folder: Path, layers: int = 4, seed: int = 1, **overrides: Any) -> Path:
    """A Llama whose hidden states change little from layer to layer, so that predictors have something to learn."""
    model = TINY["llama"](num_hidden_layers=layers, vocab_size=258, bos_token_id=256, eos_token_id=257, **overrides)
    initialise(model, seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """One token a byte, and none before a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>")
    fast.save_pretrained(folder)


def write_text(path: Path, characters: int = 20_000) -> Path:
    chooser = random.Random(0)
    words = ["".join(chooser.choices("etaoinshrdlu", k=chooser.randint(1, 9))) for _ in range(300)]
    path.write_text(" ".join(chooser.choices(words, k=characters // 6))[:characters])
    return path


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def complaint(self) -> str:
        """The one line of a command that failed; notes for the reader may stand before it."""
        lines = [line for line in self.err.splitlines() if not line.startswith(("text: ", "warning: "))]
        assert self.out == ""
        assert len(lines) == 1 and lines[0].startswith("kvcal: "), self.err
        return lines[0]


def kvcal(*arguments: object) -> Done:
    """A command in this process."""
    with CliRunner().isolation() as (out, err, *_):
        try:
            ROOT_COMMAND.main([str(a) for a in arguments], prog_name="kvcal")
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
        return Done(code, out.getvalue().decode(), err.getvalue().decode())


def _hears_control_c() -> None:
    """A shell starts background jobs, CI perhaps among them, with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(*arguments: object, folder: Path, program: tuple[str, str] = ("-m", "kvcal.cli")) -> subprocess.Popen[str]:
    """A command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=_environment(),
        preexec_fn=_hears_control_c,
    )  # fmt: skip


def _environment() -> dict[str, str]:
    """For as many threads as this process has: sums then have the same last bits."""
    path = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "artifacts"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": str(torch.get_num_threads())}


def killed_at(pattern: str, *arguments: object, folder: Path, number: int = 1) -> None:
    """A command in a process of its own, ended by SIGKILL as soon as that many files of such paths are whole.

    It does that to itself: who watches from outside sees a file too late on a busy machine. The process is a fork of
    this one, with its settings: a fresh one imports for 5 s. CUDA works in no fork.
    """
    words = [str(a) for a in arguments]
    with tempfile.TemporaryFile() as said:
        if torch.cuda.is_available():
            given = f"{pattern!r}, {number}, {words!r}, {str(folder)!r}, 1"
            script = f"from tests.support import models_fixture; models_fixture._run_until({given})"
            command = [sys.executable, "-c", script]
            code = subprocess.run(command, stdout=said, stderr=said, env=_environment(), check=False).returncode
        else:
            child = os.fork()
            if not child:
                _run_until(pattern, number, words, str(folder), said.fileno())
            code = _ended(child)
        said.seek(0)
        assert code == -signal.SIGKILL, said.read().decode()


def killed_when(condition: Callable[[], bool], *arguments: object, folder: Path) -> None:
    """A command in a process of its own, ended by SIGKILL as soon as the condition holds: a fork as of `killed_at`."""
    if torch.cuda.is_available():
        process = started(*arguments, folder=folder)
        wait_until(condition, process)
        process.kill()
        assert finished(process).code == -signal.SIGKILL
        return
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            _run_until("", -1, [str(a) for a in arguments], str(folder), said.fileno())
        end, ended = time.monotonic() + 100, 0
        while not ended and time.monotonic() < end and not condition():
            ended = os.waitpid(child, os.WNOHANG)[0]
            time.sleep(0.002)
        said.seek(0)
        assert not ended, said.read().decode()
        os.kill(child, signal.SIGKILL)
        assert _ended(child) == -signal.SIGKILL and time.monotonic() < end


def _ended(child: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except BaseException:  # as where the test took too long
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise


def _run_until(pattern: str, number: int, arguments: list[str], folder: str, said: int) -> NoReturn:
    """The command in this process, which ends with it in whichever way; said: the file of its output."""
    left, rename = number, os.replace

    def replace(source: Any, place: Any) -> None:
        nonlocal left
        rename(source, place)
        left -= fnmatch.fnmatch(str(place), pattern)
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    code = 99
    try:
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.stdout, sys.stderr = (os.fdopen(file, "w") for file in (1, 2))
        os.chdir(folder)
        pytest.MonkeyPatch().setattr(os, "replace", replace)
        sys.argv = ["kvcal", *arguments]
        main()
        code = 0
    except SystemExit as ended:
        code = exit_code(ended)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not into pytest


def finished(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=120)
    return Done(process.returncode, out, err)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 100) -> None:
    """Until it holds; fails if the process ends before."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing past `size` bytes fails, by an error of the kernel, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def small_disk(base: Path) -> Iterator[Path]:
    """A disk of 16 kB; skips the test where none may be mounted."""
    disk = base / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "kvcal", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small disk here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


DAC_OVERRIDE = 1  # the capability by which root writes anywhere


@contextmanager
def denied(folder: Path) -> Iterator[None]:
    """No permission to write in the folder, not for root either."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    libc.capget(header, sets)
    before = sets[0]
    sets[0] &= ~(1 << DAC_OVERRIDE)
    libc.capset(header, sets)
    folder.chmod(0o555)
    try:
        yield
    finally:
        folder.chmod(0o755)
        sets[0] = before
        libc.capset(header, sets)
