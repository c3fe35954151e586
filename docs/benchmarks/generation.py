"""A whole model on a GPU: largest batch and tokens per second at memory saturation, and one row of 128k tokens.

    PYTHONPATH=.:kernels:artifacts python docs/benchmarks/generation.py [--out DIR] [--seconds 480]

Llama-3.1-8B's geometry, random weights made on the device, bfloat16. Caches are not prefilled but hold random packed
data (a few blocks that repeat); every step runs through the whole model with greedy choice. Behind each largest batch
model.generate() itself is called there (`largest-batch-call`: 4 tokens, then 17 of which 16 are timed, some seconds a
kind). What a row says, and what is compared: docs/lab/benchmarks.md, "Whole models". --compiled: then once more with
generate()'s compiled forward, the first scheme alone; compiling takes a minute or so. --only steps: one row of --long
tokens under CUDA graphs of forwards that torch compiled, FP16 and each scheme.

Jobs are in the order of their weight; one that has not begun after --seconds is named and left out. generation.json is
written anew after each row. QuantizedCache runs last, each of its jobs in a process of its own that leaves some memory
alone and cuDNN out of torch's attention: with the device nearly full cuDNN failed inside of it (H200).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import CompileConfig

from kvcal.bench import caches, decoding, generation, schemes
from kvcal.bench.caches import Kind
from kvcal.bench.rows import Row
from kvcal.bench.timing import Clock
from kvcal.commands.bench_options import numbers
from kvcal.models import configuration, loading
from kvcal.models.names import resolve
from kvcal.report.checkout import commit

SCHEMES = ["innerq-small", "inner-4", "kivi-2-g128"]  # 3.0, 4.5 and 2.25 bits
LIBRARIES = ("torch", "triton", "transformers", "optimum-quanto")
GIB = 2**30
BUILD = "from optimum.quanto.library.extensions.extension import get_extension; get_extension('quanto_cuda').lib"
BUILD_SECONDS = 240.0
ALONE = 60.0  # seconds more for a process of its own: torch, a model, quanto's code from its cache
# Of 141 GiB, what QuantizedCache's tensors may not take: cuDNN loads code, and breaks the process where it cannot.
ROOM = 3 * GIB


def order(every: Sequence[Kind]) -> list[tuple[str, Kind]]:
    """largest: batches at --length, and generate() there; long: one row of --long tokens; compiled: generate() with a
    compiled forward at the largest batch of the first scheme. Ours and the best FP16 first, what is slow last: of the
    other FP16 DynamicCache, which generate() makes by itself, before StaticCache.
    """
    ours = [kind for kind in every if kind.stored_bits is not None]
    plain, quanto = [kind for kind in every if kind.plain], [k for k in every if "quanto" in k.name]
    full, rest = [k for k in plain if k.path.startswith("full")], [k for k in plain if not k.path.startswith("full")]
    rest.sort(key=lambda kind: kind.path == "StaticCache")
    first = [("largest", ours[0]), ("largest", full[0]), ("long", full[0]), *(("long", kind) for kind in ours)]
    then = [("largest", kind) for kind in (*ours[1:], *full[1:])] + [("long", kind) for kind in full[1:]]
    slow = [(job, kind) for kind in rest for job in ("largest", "long")]
    return [*first, *then, *slow, ("compiled", ours[0]), *((job, k) for k in quanto for job in ("largest", "long"))]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second; the memory that this took is given back."""
    rate = Clock(device).copy_bandwidth()
    decoding.released(device)
    return rate


Largest = dict[tuple[str, str], int]  # batches by name and path of a kind


def rows_of(
    job: str, kind: Kind, model: Any, chosen: Any, found: dict[str, int], largest: Largest, device: str, copy: float
) -> Iterator[Row]:
    """found: as of largest_batch_rows. largest: is added to."""
    if job == "long":
        shapes = [(1, chosen.long)]
        yield from generation.generate_rows(chosen.model, model, [kind], shapes, device, copy=copy)
        return
    if job == "steps":
        yield from generation.compiled_rows(chosen.model, model, [kind], [(1, chosen.long)], device, copy=copy)
        return
    if job == "largest":
        for row in generation.largest_batch_rows(chosen.model, model, [kind], chosen.length, device, found, copy):
            if "largest_batch" in row.more:
                largest[kind.name, kind.path] = row.batch
            yield row
    batch = largest.get((kind.name, kind.path))
    if batch is not None:
        compiled = CompileConfig() if job == "compiled" else None
        given = chosen.model, model, kind, chosen.length, batch, device, copy, compiled
        yield from generation.largest_called_rows(*given)
    elif job == "compiled":
        raise RuntimeError("its largest batch is not known")


def in_its_own_process(job: str, kind: str, chosen: Any, seconds: float) -> list[Row]:
    """What this script measures of one kind, called for it alone."""
    own = ["--device", chosen.device, "--dtype", chosen.dtype, "--model", chosen.model, "--schemes", chosen.schemes]
    own += ["--length", str(chosen.length), "--long", str(chosen.long), "--only", job, "--kind", kind]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--out", folder, "--seconds", f"{seconds:.0f}", *own]
        said = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        made = Path(folder, "generation.json")
        if not made.exists():
            lines = said.stdout.splitlines(), said.stderr.splitlines()
            why = [line for line in lines[0] if line.startswith(f"{job} {kind}")] or [*lines[0], *lines[1]][-1:]
            raise RuntimeError(f"exit {said.returncode}: {(why or ['nothing was said'])[-1][:300]}")
        found = json.loads(made.read_text())["rows"]
    names = {one.name for one in fields(Row)}
    return [
        Row(**{n: row[n] for n in row if n in names}, more={n: row[n] for n in row if n not in names}) for row in found
    ]


def quanto_building(on_gpu: bool) -> subprocess.Popen[bytes] | None:
    """optimum-quanto compiles its CUDA code on first use, which takes minutes: beside what is measured before it is
    needed.
    """
    if not on_gpu or not caches.installed("optimum.quanto"):
        return None
    return subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def quanto_built(building: subprocess.Popen[bytes] | None, seconds: float) -> str:
    """Wait for it; if it fails, torch unpacks as quanto does on a CPU. What rows are to say of it."""
    if building is None:
        return ""
    try:
        if building.wait(max(1.0, seconds)) == 0:
            return ""
    except subprocess.TimeoutExpired:
        building.kill()
    from optimum.quanto.library.extensions.extension import get_extension

    get_extension("quanto_cuda")._lib = SimpleNamespace(unpack=unpacked)
    return ", unpacked by torch: its CUDA code was not built here"


def unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 (n, ...) of 8 / bits numbers each -> (8 / bits * n, ...), the lowest bits first."""
    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])


def show(row: Row) -> str:
    bits = f" {row.stored_bits:.2f} bits" if row.stored_bits else ""
    head = f"{row.operation} {row.scheme}{bits} {row.batch} x {row.length}, {row.path}"
    if row.refused:
        return f"{head}: {row.refused}"
    more = row.more
    parts = [f"{row.microseconds:.0f} us a step" if row.microseconds else ""]
    for key, form in (
        ("flush_microseconds", "{:.0f} us one that packs"), ("tokens_per_second", "{:.1f} tokens/s"),
        ("logits_apart", "logits within {:.1e} of eager"), ("one_more_fails", "one more fails: {}"),
        ("limited_by", "no more by {}"), ("batch_to_fp16", "batch x {:.2f}"),
        ("throughput_to_fp16", "throughput x {:.2f}"), ("no_graph", "no graph: {}"),
    ):  # fmt: skip
        if more.get(key) is not None:
            parts.append(form.format(more[key]))
    if row.ratio_to_fp16:
        parts.append(f"x {row.ratio_to_fp16:.2f}")
    if row.fraction_of_copy:
        parts.append(f"{row.fraction_of_copy:.3f} of copy")
    if row.fp16_backend:
        parts.append(f"of {row.fp16_backend}")
    if more.get("peak_bytes"):
        parts.append(f"{more['peak_bytes'] / GIB:.2f} GiB in use")
    return f"{head}: {', '.join(filter(None, parts))}"


def libraries() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def save(folder: str, about: dict[str, Any], rows: Sequence[Row]) -> None:
    path, made = Path(folder, "generation.json"), [row.as_dict() for row in generation.with_fp16_ratios(rows)]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps({**about, "rows": made}, indent=1))
    os.replace(partial, path)


def parsed(given: Sequence[str] | None) -> Any:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default=os.environ.get("OUT", "."))
    options.add_argument("--seconds", type=float, default=480.0)
    options.add_argument("--device", default="cuda")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--model", default="llama-3.1-8b", help="whose geometry")
    options.add_argument("--length", default="32k", help="tokens a row at the largest batch")
    options.add_argument("--long", default="128k", help="tokens of the single row")
    options.add_argument("--schemes", default=",".join(SCHEMES))
    options.add_argument("--only", default="", help="largest, long or steps")
    options.add_argument("--kind", default="", help="this one alone, in this process")
    options.add_argument("--compiled", action="store_true", help="also generate() with its forward compiled")
    chosen = options.parse_args(given)
    Path(chosen.out).mkdir(parents=True, exist_ok=True)
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        options.error("needs a CUDA GPU, and torch finds none here (--device cpu --model tiny tries the script)")
    for name in ("length", "long"):
        setattr(chosen, name, numbers(getattr(chosen, name), f"--{name}", [])[0])
    return chosen


def main(given: Sequence[str] | None = None) -> None:
    chosen, began = parsed(given), time.time()
    source = resolve(chosen.model)
    geometry = configuration.geometry(source)
    copy = copy_bandwidth(torch.device(chosen.device))
    model = loading.load_model(source, dtype=chosen.dtype, device=chosen.device, random_weights=True).model
    on_gpu = model.device.type == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    about: dict[str, Any] = {"device": device, "commit": commit(), **libraries(), "copy_bandwidth": copy}
    if on_gpu:
        about["free_bytes"], about["total_bytes"] = torch.cuda.mem_get_info()
    print(", ".join(f"{name} {value}" for name, value in about.items()), f"- model made in {time.time() - began:.0f} s")
    if on_gpu and "quanto" in chosen.kind:
        torch.cuda.set_per_process_memory_fraction(1 - ROOM / about["total_bytes"])
        torch.backends.cuda.enable_cudnn_sdp(False)
    ours_alone = bool(chosen.kind) and "quanto" not in chosen.kind
    building, quanto = None if ours_alone or chosen.only == "steps" else quanto_building(on_gpu), ""
    every = caches.kinds(model, geometry, [schemes.named(name, geometry) for name in chosen.schemes.split(",")])
    rows: list[Row] = []
    found: dict[str, int] = {}
    largest: Largest = {}
    jobs = [(job, kind) for job, kind in order(every) if chosen.only in ("", job) and chosen.kind in ("", kind.name)]
    jobs = [(job, kind) for job, kind in jobs if job != "compiled" or chosen.compiled]
    if chosen.only == "steps":
        like = [kind for job, kind in order(every) if job == "long" and chosen.kind in ("", kind.name)]
        like.sort(
            key=lambda kind: (kind.path.endswith("flash"), not kind.plain)
        )  # the best FP16 first, the other one last
        jobs = [("steps", kind) for kind in like if kind.stored_bits is not None or kind.path.startswith("full")]
    if not on_gpu:
        for name in (f"largest {kind.name}, {kind.path}" for job, kind in jobs if job == "largest"):
            print(f"{name}: not measured, a CPU has no memory of its own to fill")
        jobs = [(job, kind) for job, kind in jobs if job in ("long", "steps")]
    apart = [(job, kind.name) for job, kind in jobs if on_gpu and "quanto" in kind.name and not chosen.kind]

    def take(name: str, measured: Callable[[], Iterable[Row]]) -> None:
        job_began = time.time()
        if job_began - began > chosen.seconds:
            print(f"{name}: not measured, {chosen.seconds:g} s are over")
            return
        try:
            for row in measured():
                rows.append(row)
                print(show(generation.with_fp16_ratios(rows)[-1]), flush=True)
                save(chosen.out, about, rows)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        print(f"  {name}: {time.time() - job_began:.0f} s", file=sys.stderr)

    for job, kind in jobs:
        if (job, kind.name) in apart:
            continue
        if "quanto" in kind.name:
            left = chosen.seconds + began - time.time()
            quanto = quanto or quanto_built(building, min(BUILD_SECONDS, left))
            kind = replace(kind, path=f"{kind.path}{quanto}, {ROOM // GIB} GiB left to libraries, without cuDNN")
            if quanto:
                kind = replace(kind, most_tokens=None)  # torch's code counts further
        take(
            f"{job} {kind.name}, {kind.path}", partial(rows_of, job, kind, model, chosen, found, largest, device, copy)
        )
    if apart:  # the model's memory is theirs; kinds hold it too
        del model, every, jobs, kind
        gc.collect()
        torch.cuda.empty_cache()
    for job, alone in apart:
        left = chosen.seconds + began - time.time() + ALONE
        take(f"{job} {alone}", partial(in_its_own_process, job, alone, chosen, left))
    print("\nwith all of the run's FP16 rows beside them:")
    for row in generation.with_fp16_ratios(rows):
        print(show(row))


if __name__ == "__main__":
    main()
