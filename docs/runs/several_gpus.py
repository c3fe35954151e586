"""What docs/scale.md says of two and of four GPUs, part after part, in as many calls as it takes:

    PYTHONPATH=.:kernels:artifacts python docs/runs/several_gpus.py --out DIR [--seconds 540] [--only PART ...]

A part that has ended is not run again: --state keeps its figures, with the hash of its bundle. A part of another commit
or on another device is run again. A part that takes longer than its limit is stopped, and has failed. What does not fit
into --seconds waits for the next call, and what has no part on one GPU to be compared with, of the same commit and
device, waits for that: the last line lists both. Exit code 1 if a part failed, 3 if some wait or are not compared.
Models have random weights: times, memory and whether bytes are equal are of use, errors are not.

    small-1 small-2     fit aqua-kv of Llama-3.2-1B geometry on one GPU and by two ranks (NCCL): the same bytes
    tests               layers, heads and windows on two GPUs: tests/**/test_two_gpus.py
    fit-1 fit-2 fit-4   fit aqua-kv of Llama-3.2-3B geometry, 256 windows of 8192 tokens
    books-1, -2, -4     train-codebooks of the paper's size for it
    70b-1, -2, -4       two layers of Llama-3.1-70B geometry: the second stands for 79 of 80

A part for more GPUs than the machine has is left out. With Ctrl-C or SIGTERM the running part's processes are ended, and
the same command goes on behind the last part that has ended.

Transformers' sources are compiled first, as pip does it: without bytecode each process takes seconds longer to import
them, which no rank can share. --gpu 1 takes the second card for parts of one rank: two of them side by side, each with
a --state of its own. --beside STATE: where the part on one GPU is, to compare with, if it ran with another --state.
--beside-running TEXT: what else the machine did meanwhile; each part's figures keep it. --commit: of a copy without .git.
--dry: sizes for two CPU cores, ranks by gloo: the script itself is tried.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
SUFFIX = ".kvcal.safetensors"
MARK = "SEVERAL_GPUS_PART"  # in the environment of a part's processes, whatever session or parent they have
PATIENCE = 40.0  # seconds from SIGTERM to SIGKILL; torchrun gives its ranks 30
GEOMETRY_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 2, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "high_freq_factor": 4.0,
                        "low_freq_factor": 1.0, "original_max_position_embeddings": 8192},
}  # fmt: skip
SMALL_70B = GEOMETRY_70B | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 300,
}  # fmt: skip
TESTS = ("tests/artifacts/cache/test_two_gpus.py", "tests/kvcal/calibrate/test_two_gpus.py")


@dataclass(frozen=True)
class Part:
    """One command. ranks: processes of torchrun; 1: without it. limit: seconds after which it is stopped. twin: the
    part whose bundle must have the same bytes.
    """

    name: str
    ranks: int
    limit: float
    words: list[str] = field(default_factory=list)
    twin: str | None = None


def parts(folder: Path, dry: bool) -> list[Part]:
    random = ["--random-weights", "--no-resume", "--json"]
    sizes = ["--windows", "8", "--length", "256", "--batch", "1", "--device", "cpu"] if dry else []
    fit, books = ["fit-predictors", *random, *sizes], ["train-codebooks", *random, *sizes]
    small, large, paper = ["-m", "llama-3.2-1b"], ["-m", "llama-3.2-3b"], ["--preset", "3b"]
    some = ["--windows", "24", "--length", "4096"]
    if dry:
        small = large = ["-m", "tiny"]
        paper, some = ["--preset", "small", "--vectors", "2000"], []
    wide = [
        "-m",
        str(folder / "70b"),
        "--text",
        str(folder / "words.txt"),
        "--layerwise",
        *([] if dry else ["--windows", "256", "--length", "8192"]),
    ]
    return [
        Part("small-1", 1, 120, [*fit, *small, *some]),
        Part("small-2", 2, 120, [*fit, *small, *some], "small-1"),
        Part("tests", 1, 530),
        Part("fit-1", 1, 330, [*fit, *large]),
        Part("fit-2", 2, 200, [*fit, *large], "fit-1"),
        Part("fit-4", 4, 150, [*fit, *large], "fit-1"),
        Part("books-1", 1, 420, [*books, *large, *paper]),
        Part("books-2", 2, 330, [*books, *large, *paper], "books-1"),
        Part("books-4", 4, 200, [*books, *large, *paper], "books-1"),
        Part("70b-1", 1, 420, [*fit, *wide]),
        Part("70b-2", 2, 300, [*fit, *wide], "70b-1"),
        Part("70b-4", 4, 200, [*fit, *wide], "70b-1"),
    ]


def launched(part: Part, folder: Path, dry: bool) -> list[str]:
    if part.name == "tests":
        jobs = ["--jobs", "2" if dry else "12", "--seconds", str(part.limit - 20)]
        return [sys.executable, "docs/runs/gpu_tests.py", "--out", str(folder / "tests"), *jobs, *TESTS]
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(part.ranks)]
    output = ["--output", str(folder / f"{part.name}{SUFFIX}")]
    return [sys.executable, *(many if part.ranks > 1 else []), "-m", "kvcal", *part.words, *output]


def marked(mark: str) -> Iterator[int]:
    """Ids of the processes that have this mark in their environment; dead ones have no environment."""
    entry = f"{MARK}={mark}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if entry in (process / "environ").read_bytes().split(b"\0"):
                yield int(process.name)


def end(mark: str) -> None:
    """End all processes of this mark: ranks of torchrun have sessions of their own, and may have lost their parent."""

    def send(number: signal.Signals) -> None:
        for process in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    try:
        send(signal.SIGTERM)
        until = time.monotonic() + PATIENCE
        while any(marked(mark)) and time.monotonic() < until:
            time.sleep(0.05)
    finally:  # after a second Ctrl-C, too
        send(signal.SIGKILL)


def exit_code(command: list[str], environment: dict[str, str], limit: float, printed: Path) -> int | None:
    """Run a command; output goes to `printed`, errors beside it. None: it took longer than the limit. However this
    ends, the command's processes have ended.
    """
    mark = f"{os.getpid()}-{time.time_ns()}"
    with (
        printed.open("w") as out,
        printed.with_suffix(".err").open("w") as err,
        subprocess.Popen(
            command, stdout=out, stderr=err, env=environment | {MARK: mark}, start_new_session=True
        ) as process,
    ):
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(mark)


def run(part: Part, folder: Path, dry: bool, gpu: int) -> dict[str, Any]:
    """What a part came to; its output goes to PART.out and PART.err."""
    environment = dict(os.environ)
    if dry:  # as torchrun sets it
        environment["OMP_NUM_THREADS"] = "1"
    environment["TRITON_CACHE_DIR"] = str(folder / f"triton-{part.name}")  # what others compiled is not there
    if part.ranks == 1 and part.name != "tests":
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    began, printed = time.time(), folder / f"{part.name}.out"
    code = exit_code(launched(part, folder, dry), environment, part.limit, printed)
    found: dict[str, Any] = {"code": code, "wall_s": round(time.time() - began, 1)}
    if part.name == "tests":
        # without GPUs all are skipped, which says that the files can be read
        found["line"] = (printed.read_text().splitlines() or ["nothing"])[-1]
        found["ok"] = code == 0 or (dry and re.match(r"0 passed of \d+", found["line"]) is not None)
        return found
    found["ok"] = code == 0
    if code == 0:
        result = json.loads(printed.read_text())
        kept = ("seconds", "phases", "sha256", "peak_device_bytes", "peak_bytes", "bytes", "train_windows", "length")
        found |= {name: result[name] for name in kept if name in result}
        found["sha256"] = hashlib.sha256((folder / f"{part.name}{SUFFIX}").read_bytes()).hexdigest()
        found["seconds_outside_phases"] = round(found["seconds"] - sum(found["phases"].values()), 1)
    else:
        found["said"] = printed.with_suffix(".err").read_text()[-600:]
    return found


def commit_of(checkout: Path) -> str | None:
    """None where git does not know it, as of a copy without .git, which may lie inside another checkout."""
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(checkout), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def compared(found: dict[str, Any], twin: dict[str, Any]) -> dict[str, Any]:
    """Also how it compares with the part on one GPU: `times_as_fast` is the ratio of `seconds`, which begin where
    Transformers is imported, and `times_as_fast_without_weights` that of the seconds without the phase "weights", in
    which random weights are made instead of a checkpoint read. `times_as_fast_by_wall` has the start of Python, of
    torch and of torchrun, too.
    """
    same = found["sha256"] == twin["sha256"]
    rest, of_one = (part["seconds"] - part["phases"].get("weights", 0.0) for part in (found, twin))
    return found | {
        "times_as_fast": round(twin["seconds"] / found["seconds"], 3),
        "times_as_fast_without_weights": round(of_one / rest, 3),
        "times_as_fast_by_wall": round(twin["wall_s"] / found["wall_s"], 3),
        "same_bytes": same,
        "ok": same,
    }


class Results:
    """Figures of parts, in the folder that all calls share; each change is written there, and to `copy`.

    where: what the parts of this call have in common, of which those of earlier calls must have the same commit and
    device to count. beside: folders of other calls, for parts to compare with.
    """

    def __init__(self, folder: Path, copy: Path, where: dict[str, Any], beside: list[Path]) -> None:
        self._places, self._where = (folder / "results.json", copy), where
        self._parts: dict[str, dict[str, Any]] = {}
        if self._places[0].exists():
            self._parts = json.loads(self._places[0].read_text())
        self._others: dict[str, dict[str, Any]] = {}
        for state in beside:
            self._others = json.loads((state / "results.json").read_text()) | self._others

    def add(self, part: Part, found: dict[str, Any]) -> None:
        self._parts[part.name] = {"part": part.name, **self._where, **found}
        self._write()

    def done(self, part: Part) -> bool:
        return self._of(self._parts, part.name).get("ok", False)

    def failed(self, part: Part) -> bool:
        return not self._of(self._parts, part.name).get("ok", True)

    def alone(self, part: Part) -> bool:
        """Whether it has ended, and has not been compared with its twin."""
        return part.twin is not None and self.done(part) and "same_bytes" not in self._parts[part.name]

    def compare(self, part: Part) -> bool:
        """Compare it with its twin, and return whether there is one that has ended well."""
        twins = [self._of(parts, part.twin or "") for parts in (self._parts, self._others)]
        twins = [twin for twin in twins if twin.get("ok")]
        if not twins:
            return False
        self._parts[part.name] = compared(self._parts[part.name], twins[0])
        self._write()
        return True

    def line(self, part: Part) -> str:
        return json.dumps(self._parts[part.name])

    def ratios(self, part: Part) -> str:
        found = self._parts[part.name]
        return (
            f"{part.twin} / {part.name}: {'the same' if found['same_bytes'] else 'other'} bytes; {found['times_as_fast']} "
            f"by all seconds, {found['times_as_fast_without_weights']} by those without the phase weights, "
            f"{found['times_as_fast_by_wall']} by the clock"
        )

    def _of(self, parts: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
        """A part of this commit and device, or nothing."""
        found = parts.get(name, {})
        return found if all(found.get(key) == self._where[key] for key in ("commit", "device")) else {}

    def _write(self) -> None:
        for place in self._places:
            place.with_suffix(".tmp").write_text(json.dumps(self._parts, indent=1) + "\n")
            place.with_suffix(".tmp").replace(place)


def compile_sources(package: str) -> None:
    """Write the bytecode of an installed package, where it has none."""
    found = importlib.util.find_spec(package)
    for folder in [] if found is None else found.submodule_search_locations or []:
        compileall.compile_dir(folder, quiet=2, workers=0)


def asked() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    options.add_argument("--state", type=Path, default=Path("/tmp/kvcal-several-gpus"))
    options.add_argument("--seconds", type=float, default=540.0)
    names = [part.name for part in parts(Path(), False)]
    options.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART")
    options.add_argument("--gpu", type=int, default=0, help="of parts with one rank")
    options.add_argument("--beside", type=Path, nargs="*", default=[], help="other --state folders, to compare with")
    options.add_argument(
        "--beside-running", metavar="TEXT", help="other work on this machine meanwhile, to be recorded"
    )
    options.add_argument("--commit", help="of a copy without .git; by default that of the checkout")
    options.add_argument("--dry", action="store_true")
    chosen = options.parse_args()
    chosen.commit = (chosen.commit or "")[:8] or commit_of(ROOT)
    if chosen.commit is None:
        options.error(f"no commit: git knows none of {ROOT}: say of which commit it is a copy, --commit 6928256b")
    for state in chosen.beside:
        if not (state / "results.json").exists():
            options.error(f"--beside {state}: no results.json there: give a --state of an earlier call")
    gpus = torch.cuda.device_count()
    if not chosen.dry and not 0 <= chosen.gpu < max(1, gpus):
        options.error(f"--gpu {chosen.gpu}: GPUs here: {gpus}: give a number from 0 to {max(1, gpus) - 1}")
    return chosen


def prepare(folder: Path, dry: bool) -> None:
    """Write what the parts read: two layers of 70B, a tokenizer, a text."""
    (folder / "70b").mkdir(exist_ok=True)
    (folder / "70b" / "config.json").write_text(json.dumps(SMALL_70B if dry else GEOMETRY_70B))
    if not dry:
        compile_sources("transformers")
    from tests.support.models_fixture import write_text, write_tokenizer

    write_tokenizer(folder / "70b")  # a token a byte
    write_text(folder / "words.txt", 20_000 if dry else 2_600_000)


def compare_all(known: list[Part], results: Results) -> list[Part]:
    """Compare the parts of this and of earlier calls whose twins have ended meanwhile, and return them."""
    judged = [part for part in known if results.alone(part) and results.compare(part)]
    for part in judged:
        print(results.ratios(part), flush=True)
    return judged


def measured(chosen: argparse.Namespace) -> int:
    """Run, compare and print what was asked for, and return the exit code."""
    began, folder, out = time.time(), chosen.state, chosen.out
    folder.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    prepare(folder, chosen.dry)
    here = torch.cuda.device_count()
    gpus = 4 if chosen.dry else here
    known = parts(folder, chosen.dry)
    every = [part for part in known if part.name in chosen.only and part.ranks <= gpus]
    more = [part.name for part in known if part.name in chosen.only and part.ranks > gpus]
    on_gpu = here > 0 and not chosen.dry
    where = {
        "device": torch.cuda.get_device_name(chosen.gpu) if on_gpu else "CPU",
        "gpus_here": here,
        "commit": chosen.commit,
        "torch": str(torch.__version__),
        "beside": chosen.beside_running,
    }
    results, waiting = Results(folder, out / "several_gpus.json", where, chosen.beside), []
    judged = compare_all(known, results)
    for part in every:
        if results.done(part):
            print(f"{part.name}: done before", flush=True)
        elif part.limit > began + chosen.seconds - time.time():
            waiting.append(part.name)
        else:
            results.add(part, run(part, folder, chosen.dry, chosen.gpu))
            print(results.line(part), flush=True)
            judged += compare_all(known, results)
    for kind in ("*.out", "*.err", "tests/gpu_tests.txt"):
        for file in folder.glob(kind):
            (out / file.name).write_text(file.read_text(errors="replace")[-200_000:])
    failed = [part.name for part in known if (part in every or part in judged) and results.failed(part)]
    alone = [f"{part.name} with {part.twin}" for part in every if results.alone(part)]
    listed = {"failed": failed, "not compared": alone, "waiting for the next call": waiting}
    listed |= {f"left out, {gpus} GPUs": more} if more else {}
    print("; ".join(f"{what}: {', '.join(names) or 'none'}" for what, names in listed.items()))
    return 1 if failed else 3 if waiting or alone else 0


def terminated(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    signal.signal(signal.SIGTERM, terminated)
    try:
        sys.exit(measured(asked()))
    except KeyboardInterrupt:
        print("several_gpus.py: interrupted: --state keeps the parts that have ended", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
