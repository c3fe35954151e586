"""The plan of `kvcal plan` beside what this GPU measures: memory and tokens per second of a whole model.

    PYTHONPATH=.:kernels:artifacts python docs/benchmarks/plan.py [--out FOLDER or FILE.json] [--seconds 300]

Llama-3.1-8B's geometry, random weights made on the device, bfloat16, one row. `decode`: FP16 in a full cache (cuDNN) and
each scheme with its own windows, at each length: caches filled with random packed data, decode steps under a CUDA graph,
as `kvcal bench -o generate` takes them. Peak memory by the driver (all that is in use on the device) and by torch's
allocator. `prefill` and `prefill-chunks`: a prompt of the first length in one forward and 2048 tokens at a time, memory
alone. Each line has measured, planned and their ratio; the last one says how many are within 5 % (memory) and 15 %
(tokens per second). Prefill has no limit: its plan rests on no measurement yet.

Kernels are compiled first, side by side: for each scheme and length a process of its own runs the same rows of a model of
one layer, whose figures are thrown away. With one process alone an H100 had 3 of 11 rows in 180 s.

The file is written anew after each row; the same command goes on behind the rows that it has. No row begins after
--seconds, and one that still runs LATEST later is given up: 335 s in all by default. The exit code is 1 where a row was
refused or is not measured. `--device cpu --model tiny --lengths 512,1024` tries the script: times and memory of a CPU
are not planned.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from kvcal.bench import caches, decoding
from kvcal.bench import schemes as bench_schemes
from kvcal.bench.caches import Kind
from kvcal.bench.filled import scheme_of
from kvcal.bench.planning import cards, projection, schemes, speed
from kvcal.bench.planning.cards import Card
from kvcal.bench.planning.memory import CHUNK, Model, Parts
from kvcal.commands.bench_options import numbers
from kvcal.models import configuration, loading
from kvcal.models.names import resolve
from kvcal.report.checkout import commit
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.scheme import Windows

SCHEMES = "kivi-4,kivi-2,higgs-2"
LIBRARIES = ("torch", "triton", "transformers")
GIB = 2**30
MEMORY, TIME = 0.05, 0.15  # of what was measured, that a plan may be off
SPARE = 64  # columns of a prefilled cache behind the prompt
LATEST = 35  # seconds behind --seconds at which a row is given up
COMPILING = 120.0  # seconds that processes which compile may take


@dataclass(frozen=True)
class Job:
    what: str  # decode, prefill or prefill-chunks
    scheme: str
    length: int


@dataclass(frozen=True)
class Run:
    """What all jobs share. card: None on a CPU."""

    model: Any
    geometry: Any
    plan: Model
    card: Card | None
    most: int

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def jobs_of(names: Sequence[str], lengths: Sequence[int], what: Sequence[str]) -> list[Job]:
    """What is to hold first: schemes at both lengths."""
    decode = [Job("decode", name, length) for length in lengths for name in (*names, projection.FULL)]
    first = lengths[0]
    prefill = [Job("prefill", name, first) for name in (names[0], projection.FULL)]
    return [job for job in (*decode, *prefill, Job("prefill-chunks", names[0], first)) if job.what in what]


def one_layer(model: str, folder: Path) -> None:
    """A folder with the configuration of `model`, cut to its first layer."""
    config = configuration.geometry_config(resolve(model))
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    config.save_pretrained(folder)


def compile_beside(chosen: Any) -> None:
    """Every kernel that the rows start, compiled by processes side by side; what fails there fails in its row, too."""
    with tempfile.TemporaryDirectory() as name:
        one_layer(chosen.model, Path(name))
        options = ["--device", chosen.device, "--dtype", chosen.dtype, "--model", name, "--compiled"]
        options += ["--seconds", str(COMPILING), "--out"]
        begun = []
        for scheme in chosen.schemes:
            for length in chosen.lengths:
                what = chosen.what if (scheme, length) == (chosen.schemes[0], chosen.lengths[0]) else ["decode"]
                own = [f"{name}/{scheme}-{length}.json", "--schemes", scheme, "--lengths", str(length)]
                command = [sys.executable, __file__, *options, *own, "--what", ",".join(what)]
                begun.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        last = time.time() + COMPILING
        for process in begun:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, last - time.time()))
            process.kill()
            process.wait()


def benched(run: Run, name: str) -> bench_schemes.Benched:
    """The scheme with its own windows, as the plan has them."""
    mine = schemes.planned(name)
    return bench_schemes.named(name, run.geometry, Windows(mine.sink, mine.recent, mine.block))


def kind_of(run: Run, name: str) -> Kind:
    if name != projection.FULL:
        return caches.scheme_kind(run.model, run.geometry, benched(run, name), run.on_gpu, "auto")
    full = [kind for kind in caches.plain_kinds(run.model, run.geometry) if kind.path.startswith("full cache")]
    return next((kind for kind in full if kind.path.endswith("cuDNN")), full[0])


def candidate_of(run: Run, name: str) -> projection.Candidate:
    if name == projection.FULL:
        return projection.full(run.plan)
    card = run.card or cards.of_numbers(1e12, None)
    return projection.candidate(schemes.planned(name), run.plan, card)


def cleared(run: Run) -> None:
    """As little in use as a fresh process has: cuBLAS keeps a workspace for each stream that ever was."""
    decoding.released(run.device)
    gc.collect()
    if run.on_gpu:
        with suppress(AttributeError):
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(run.device)


def decode(run: Run, job: Job) -> dict[str, Any]:
    kind = kind_of(run, job.scheme)
    if kind.maker is None:
        return {"refused": kind.why_not}
    ran = decoding.run(run.model, kind, 1, job.length)
    taken = ran.eager if ran.graph is None else ran.graph
    measured = {
        "path": kind.path,
        "step": "eager" if ran.graph is None else "CUDA graph",
        "no_graph": ran.no_graph,
        "tokens": ran.length,
        "microseconds": taken,
        "tokens_per_second": 1e6 / taken,
        **in_use(run, ran.bytes),
    }
    one = candidate_of(run, job.scheme)
    goal = projection.Goal(job.scheme, run.plan, ran.length, run.most, 1)
    step, seconds = projection.step_of(goal, one), None
    if run.card is not None and step is not None:
        seconds = speed.seconds(step, run.card)
    return compared(run, measured, one.load.decode(1, ran.length), None if seconds is None else 1 / seconds)


@torch.no_grad()
def prefill(run: Run, job: Job) -> dict[str, Any]:
    chunk = CHUNK if job.what == "prefill-chunks" else job.length
    ids = torch.randint(1, run.geometry.vocab, (1, job.length), device=run.device)
    if job.scheme == projection.FULL:
        cache: Any = DynamicCache(config=run.model.config)
    else:
        scheme = scheme_of(run.model, benched(run, job.scheme))
        cache = KVCalCache(scheme, run.model, max_length=job.length + SPARE)
    try:
        for start in range(0, job.length, chunk):
            run.model(ids[:, start : start + chunk], past_key_values=cache, logits_to_keep=1)
        decoding.wait(run.device)
        measured = {"tokens": job.length, **in_use(run, decoding.peak_bytes(run.device))}
    finally:
        if isinstance(cache, KVCalCache):
            cache.close()
    load = candidate_of(run, job.scheme).load
    memory = load.prefill(1, job.length, chunk if chunk < job.length else None)
    return compared(run, measured, memory)


def in_use(run: Run, by_driver: int) -> dict[str, Any]:
    allocated = torch.cuda.max_memory_allocated(run.device) if run.on_gpu else None
    return {"device_bytes": by_driver, "allocated_bytes": allocated}


def compared(
    run: Run, measured: dict[str, Any], memory: Parts, tokens_per_second: float | None = None
) -> dict[str, Any]:
    """A row's figures; of a CPU the parts alone are planned."""
    planned: dict[str, float | None] = {"tokens_per_second": tokens_per_second}
    if run.on_gpu:
        tensors = memory.total - memory.runtime - memory.allocator
        planned |= {"device_bytes": memory.total, "allocated_bytes": tensors}
    both = {name: (plan, measured.get(name)) for name, plan in planned.items()}
    ratios = {name: plan / real for name, (plan, real) in both.items() if plan and real}
    return {"measured": measured, "planned": {**planned, "bytes": asdict(memory)}, "planned_to_measured": ratios}


MEASURES: dict[str, Callable[[Run, Job], dict[str, Any]]] = {
    "decode": decode,
    "prefill": prefill,
    "prefill-chunks": prefill,
}


@contextmanager
def given_up(seconds: float) -> Iterator[None]:
    """TimeoutError after so many seconds, as soon as Python has its turn: not within a call that waits for the GPU."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done {LATEST} s behind --seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure(run: Run, job: Job, most: float) -> dict[str, Any]:
    """A row; refused, with the reason, where anything fails or it takes more than `most` seconds."""
    cleared(run)
    began = time.time()
    try:
        with given_up(most):
            row = MEASURES[job.what](run, job)
    except Exception as error:  # of this row alone: the others go on
        row = {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return {**asdict(job), **row, "seconds": time.time() - began}


def show(row: dict[str, Any]) -> str:
    head = f"{row['what']} {row['scheme']} 1 x {row['length']}"
    if "refused" in row:
        return f"{head}: {row['refused']}"
    measured, planned, ratios = row["measured"], row["planned"], row["planned_to_measured"]
    parts = []
    for name, unit, form in (
        ("device_bytes", "GiB in use", GIB), ("allocated_bytes", "GiB by torch", GIB), ("tokens_per_second", "tokens/s", 1),
    ):  # fmt: skip
        if measured.get(name):
            ratio = f", x {ratios[name]:.3f}" if name in ratios else ""
            plan = f", planned {planned[name] / form:.2f}" if planned.get(name) else ""
            parts.append(f"{measured[name] / form:.2f} {unit}{plan}{ratio}")
    if measured.get("no_graph"):
        parts.append(f"eager steps, no CUDA graph: {measured['no_graph']}")
    return f"{head}: {'; '.join(parts)} ({row['seconds']:.0f} s)"


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """How many figures of decode steps are as near as they are to be, and how far those of prefill are off."""
    ratios = [row["planned_to_measured"] for row in rows if row["what"] == "decode" and "refused" not in row]
    prefill = [row["planned_to_measured"] for row in rows if row["what"] != "decode" and "refused" not in row]
    parts = []
    for name, limit in (("device_bytes", MEMORY), ("tokens_per_second", TIME)):
        off = [abs(ratio[name] - 1) for ratio in ratios if name in ratio]
        within = sum(one <= limit for one in off)
        worst = f", worst {max(off):.1%}" if off else ""
        parts.append(f"{name} within {limit:.0%}: {within} of {len(off)}{worst}")
    if off := [ratio["device_bytes"] - 1 for ratio in prefill if "device_bytes" in ratio]:
        parts.append(f"prefill's device_bytes, without a limit: {min(off):+.1%} to {max(off):+.1%}")
    return "; ".join(parts)


def libraries() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def parsed(words: Sequence[str] | None) -> Any:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default=os.environ.get("OUT", "."), help="a folder for plan.json, or a file")
    options.add_argument("--seconds", type=float, default=300.0)
    options.add_argument("--device", default="cuda")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--model", default="llama-3.1-8b", help="whose geometry")
    options.add_argument("--lengths", default="32k,128k", help="tokens of the row")
    options.add_argument("--schemes", default=SCHEMES)
    options.add_argument("--what", default=",".join(MEASURES), help="kinds of rows, with commas between")
    options.add_argument("--compiled", action="store_true", help="kernels are there: start no processes that compile")
    chosen = options.parse_args(words)
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        options.error("needs a CUDA GPU, and torch finds none here (--device cpu --model tiny tries the script)")
    chosen.lengths = numbers(chosen.lengths, "--lengths", [])
    chosen.schemes = chosen.schemes.split(",")
    chosen.what = chosen.what.split(",")
    if unknown := [what for what in chosen.what if what not in MEASURES]:
        options.error(f"--what {unknown[0]}: must be of {', '.join(MEASURES)}")
    out = Path(chosen.out)
    chosen.file = out if out.suffix == ".json" else out / "plan.json"
    return chosen


def earlier(file: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a run of the same that was cut off; those that were refused are tried again."""
    try:
        before = json.loads(file.read_text())
    except (OSError, ValueError):
        return []
    if any(before.get(name) != about[name] for name in ("device", "commit", "model", "dtype", *LIBRARIES)):
        return []
    return [row for row in before["rows"] if "refused" not in row]


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print; 1 where a row is missing."""
    began, chosen = time.time(), parsed(words)
    if chosen.device.startswith("cuda") and not chosen.compiled:
        compile_beside(chosen)
        print(f"kernels compiled in {time.time() - began:.0f} s", flush=True)
    source = resolve(chosen.model)
    geometry = configuration.geometry(source)
    model = loading.load_model(source, dtype=chosen.dtype, device=chosen.device, random_weights=True).model
    on_gpu = model.device.type == "cuda"
    card = cards.here() if on_gpu else None
    width = model.dtype.itemsize
    run = Run(model, geometry, Model(geometry, geometry.parameters * width, width), card, geometry.context)
    cleared(run)
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "commit": commit(),
        "model": chosen.model,
        "dtype": chosen.dtype,
        **libraries(),
        "card": None if card is None else asdict(card),
        "total_memory": torch.cuda.get_device_properties(model.device).total_memory if on_gpu else None,
        "used_beside_weights": decoding.peak_bytes(model.device) - round(run.plan.weights) if on_gpu else None,
    }
    rows = earlier(chosen.file, about)
    print(", ".join(f"{name} {value}" for name, value in about.items()), f"- model made in {time.time() - began:.0f} s")
    there = {(row["what"], row["scheme"], row["length"]) for row in rows}
    jobs = jobs_of(chosen.schemes, chosen.lengths, chosen.what)
    for job in jobs:
        if (job.what, job.scheme, job.length) in there:
            continue
        if time.time() - began > chosen.seconds:
            print(f"{job.what} {job.scheme} 1 x {job.length}: not measured, {chosen.seconds:g} s are over")
            continue
        rows.append(measure(run, job, chosen.seconds + LATEST - (time.time() - began)))
        print(show(rows[-1]), flush=True)
        partial = chosen.file.with_name(f".{chosen.file.name}.partial")
        partial.write_text(json.dumps({**about, "verdict": verdict(rows), "rows": rows}, indent=1))
        os.replace(partial, chosen.file)
    print()
    for row in rows:
        print(show(row))
    print(verdict(rows))
    missing = [row for row in rows if "refused" in row]
    print(f"{len(rows) - len(missing)} of {len(jobs)} rows measured, {len(missing)} refused")
    return 1 if missing or len(rows) < len(jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
