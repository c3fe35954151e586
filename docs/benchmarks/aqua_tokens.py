"""Tokens a second of AQUA-KV beside HIGGS that is decoded, HIGGS that the fused kernel reads, and Transformers'
DynamicCache.

    PYTHONPATH=.:kernels:artifacts python docs/benchmarks/aqua_tokens.py [--out DIR] [--seconds 170]

The paper's set-up (AQUA-KV, "Inference time"): Llama 3.1 8B in bfloat16 under Transformers, one sequence, HIGGS in 2
bits with one norm and one rotation a token, sink 4, recent 128. Here: that model's geometry with random weights, random
packed data, predictors of random weights. Steps are eager, as the paper's. What is compared:
docs/benchmarks/aqua_tokens.md.

At each length all caches are in memory at once and take their steps in turn, one each. The order within turns is that
of Williams squares (each cache follows each other one equally often), drawn anew for each square by --seed. A length
has two passes over the same numbers of tokens, `first` and `again`: what torch and cuDNN prepare for a number of keys
that they have not seen is in the former alone. At the first length a third and a fourth, `torch's choice`, let ours be
attended by the backend that torch prefers, as before hf.seam.without_plans.

Of every step: microseconds until the device was done (`wall`), until the call returned (`host`), between CUDA events
around it (`span`), of processor time of this thread (`busy`), and how many segments the allocator took and gave back,
how often it had to try again, how often Python collected garbage, how often the thread was switched against its will,
whether a block was packed. A cache whose `wall` is `span` is `host` waits for the host alone; one whose `wall` is more
than its `busy` waited for others.

aqua_tokens.json is written anew after each length. A length that has not begun after --seconds is named and left out.
On an H200: 83 s until the first step, then 53 s for the first length, 26 s for the second (a23af7b).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from generation import libraries, show
from torch.profiler import ProfilerActivity, profile

from kvcal.bench import caches, decoding, filled, generation, schemes
from kvcal.bench.caches import Kind
from kvcal.bench.kernels import predictor_flops
from kvcal.bench.timing import Clock
from kvcal.models import configuration, devices, loading
from kvcal.models.geometry import Geometry
from kvcal.models.names import resolve
from kvcal_artifacts.hf import seam
from kvcal_artifacts.paths import choose, dequantised, packing_rules
from kvcal_artifacts.scheme import Windows

WINDOWS = Windows(4, 128, 32)
STEPS = 10  # of a graph, timed
SHAPES = [(1, 8192), (1, 2048), (1, 32768)]  # rows, tokens a row
TURNS = 32  # of a pass: one of a cache's steps packs a block
PROFILED = 4  # steps, behind one that packs
AQUA, DECODED, FUSED = "aqua-kv-2", "higgs-2, decoded", "higgs-2, fused"
MADE = {  # codecs, and the frame of keys where it is not the scheme's own
    AQUA: ("aqua-kv-2", None),
    DECODED: ("higgs-2-wide+higgs-2-wide", "pre_rope"),  # what AQUA-KV stores, without predictors
    FUSED: ("higgs-2", None),  # rotated head by head: what the fused kernel reads
}
FIRST, AGAIN, CHOICE = "first", "again", "torch's choice"
COLUMNS = (
    "turn", "cache", "before", "wall", "host", "span", "busy", "segments", "given_back", "retries", "collections",
    "switches", "packs",
)  # fmt: skip


def benched(name: str, geometry: Geometry) -> schemes.Benched:
    codecs, frame = MADE[name]
    one = schemes.named(codecs, geometry, WINDOWS)
    return replace(one, name=name, frame=frame or one.frame)


def kinds(model: Any, geometry: Geometry) -> list[Kind]:
    """On a GPU a row of AQUA-KV or HIGGS is one of kernels, or an error."""
    required = model.device.type == "cuda"
    dynamic = next(kind for kind in caches.plain_kinds(model, geometry) if kind.path == "DynamicCache")
    own = [caches.scheme_kind(model, geometry, benched(name, geometry), required, "auto") for name in MADE]
    return [*own, dynamic]


def compile_for(name: str, geometry: Geometry, dtype: torch.dtype) -> None:
    """Have the kernels of a scheme compiled and tried: in a process of its own, beside others and the making of the
    model.
    """
    one, device = benched(name, geometry), torch.device("cuda")
    pair, ratio = one.codecs, geometry.heads // geometry.kv_heads
    packing_rules.packing("auto", pair, dtype, device)
    if name == FUSED:
        choose.absence("auto", pair, ratio, dtype, device)
        packing_rules.rules("auto", pair, dtype, device)
        packing_rules.block_rules("auto", pair, dtype, device)
    else:
        dequantised.refusal("auto", pair, dtype, device)
        rotary = geometry.head_dim if one.frame == "pre_rope" else 0
        reader = dequantised.dequantiser_of(pair, dtype, "auto", 0, 1)
        reader.rotates(rotary, device)


@torch.no_grad()
def on_device(model: Any, kind: Kind, shape: tuple[int, int]) -> dict[str, float]:
    """Microseconds a step that kernels take on the GPU, by torch's profiler, whatever the host takes to launch them;
    and those of the reconstruction kernel alone.
    """
    decoding.released(model.device)
    assert kind.maker is not None
    start = kind.maker(*shape, decoding.WARM_UP + PROFILED)
    stepper = decoding.Stepper(model, start, shape[0])
    with caches.attention(model, kind):
        for _ in range(decoding.WARM_UP):
            stepper.step()
        decoding.wait(model.device)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            for _ in range(PROFILED):
                stepper.step()
            decoding.wait(model.device)
    start.close()
    times = {event.key: event.self_device_time_total / PROFILED for event in seen.key_averages()}
    own = sum(taken for name, taken in times.items() if name == "dequantise_kernel")
    return {"device_microseconds": sum(times.values()), "reconstruct_microseconds": own}


def flops(model: Any, geometry: Geometry, batch: int, length: int) -> float:
    """Of the predictors' products in a step of AQUA-KV: over all packed tokens of all layers that have one."""
    one = benched(AQUA, geometry)
    packed = caches.blocks_of(WINDOWS, caches.start_of(WINDOWS, length)) * WINDOWS.block
    numbers = batch * packed * geometry.kv_heads * geometry.head_dim
    layers = [pair for pair in filled.scheme_of(model, one).layers if pair is not None]
    return sum(predictor_flops(codec, numbers) for pair in layers for codec in (pair.key, pair.value))


# Steps in turn.


def squares(count: int, turns: int, seed: int) -> Iterator[list[int]]:
    """Orders of 0 to count - 1: rows of Williams squares in which each number stands right behind each other one
    equally often (once in `count` rows; twice in 2 * count where it is odd). Numbers and rows of each square are
    shuffled.
    """
    draw = random.Random(seed)
    zigzag = [0, *(number for low in range(1, count // 2 + 1) for number in (low, count - low))][:count]
    rows = [[(number + shift) % count for number in zigzag] for shift in range(count)]
    rows += [row[::-1] for row in rows] if count % 2 else []
    made = 0
    while True:
        names = draw.sample(range(count), count)
        for row in draw.sample(rows, len(rows)):
            if made == turns:
                return
            made += 1
            yield [names[number] for number in row]


def counters(device: torch.device) -> list[int]:
    """What may disturb a step, so far: in the order of COLUMNS."""
    found = [0, 0, 0]
    if device.type == "cuda":
        seen = torch.cuda.memory_stats(device)
        found = [seen["segment.all.allocated"], seen["segment.all.freed"], seen["num_alloc_retries"]]
    collections = sum(generation["collections"] for generation in gc.get_stats())
    return [*found, collections, resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw]


def timed(stepper: decoding.Stepper) -> list[float]:
    """wall, host, span, busy, and the differences of counters, of one step."""
    device = stepper.model.device
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
    before = counters(device)
    decoding.wait(device)
    busy, began = time.thread_time(), time.perf_counter()
    for event in events[:1]:
        event.record()
    stepper.step()
    for event in events[1:]:
        event.record()
    returned = time.perf_counter()
    decoding.wait(device)
    done, busy = time.perf_counter(), time.thread_time() - busy
    span = events[0].elapsed_time(events[1]) * 1e3 if events else (done - began) * 1e6
    times = [round(1e6 * taken, 1) for taken in (done - began, returned - began, span / 1e6, busy)]
    return [*times, *(b - a for a, b in zip(before, counters(device), strict=True))]


@torch.no_grad()
def in_turns(model: Any, every: Sequence[Kind], shape: tuple[int, int], turns: int, seed: int) -> list[list[Any]]:
    """COLUMNS of every step, in the order in which they were taken. Caches are by their place in `every`; `before` is
    the one that stepped right before, None at the very first.
    """
    decoding.released(model.device)
    with ExitStack() as stack:
        steppers = []
        for kind in every:
            assert kind.maker is not None
            start = kind.maker(*shape, decoding.WARM_UP + turns)
            stack.callback(start.close)
            steppers.append(decoding.Stepper(model, start, shape[0]))
            with caches.attention(model, kind):
                for _ in range(decoding.WARM_UP):
                    steppers[-1].step()
            steppers[-1].back()
        found: list[list[Any]] = []
        for turn, order in enumerate(squares(len(every), turns, seed)):
            for cache in order:
                start = steppers[cache].start
                packs = start.flush is not None and turn % start.period == start.flush
                with caches.attention(model, every[cache]):
                    taken = timed(steppers[cache])
                found.append([turn, cache, found[-1][1] if found else None, *taken, int(packs)])
    decoding.released(model.device)
    return found


@contextmanager
def torchs_choice() -> Iterator[None]:
    """Caches that decode leave it to torch which backend attends, cuDNN on an H200."""
    own, seam.has_flash = seam.has_flash, lambda query: False
    try:
        yield
    finally:
        seam.has_flash = own


def passes(model: Any, every: Sequence[Kind], shape: tuple[int, int], chosen: Any, control: bool) -> dict[str, Any]:
    """Name of a pass -> its caches and steps. control: also those of torch's choice, of AQUA-KV and HIGGS decoded
    alone.
    """
    found = {}

    def add(name: str, kinds: Sequence[Kind], turns: int) -> None:
        found[name] = {
            "caches": [kind.name for kind in kinds],
            "steps": in_turns(model, kinds, shape, turns, chosen.seed),
        }

    for name in (FIRST, AGAIN):
        add(name, every, chosen.turns)
    for name in (FIRST, AGAIN) if control else ():
        with torchs_choice():
            two = [kind for kind in every if kind.name in (AQUA, DECODED)]
            add(f"{CHOICE}, {name}", two, max(4, chosen.turns // 2))
    return found


def column(steps: Sequence[Sequence[Any]], name: str) -> list[Any]:
    return [step[COLUMNS.index(name)] for step in steps]


def spread(times: Sequence[float]) -> dict[str, float]:
    """Microseconds: first decile, median, ninth decile."""
    deciles = quantiles(times, n=10, method="inclusive") if len(times) > 1 else [times[0]] * 9
    return {"low": deciles[0], "median": median(times), "high": deciles[8]}


def summed(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each cache of a pass: its steps that pack nothing, all of them and behind each predecessor; the one that
    packs; a `step` with its share of packing; what disturbed it, counted.
    """
    names, result = found["caches"], {}
    for number, name in enumerate(names):
        own = [step for step in found["steps"] if step[COLUMNS.index("cache")] == number]
        plain, flushes = ([s for s in own if s[-1] == packs] for packs in (0, 1))
        one: dict[str, Any] = {"steps": len(plain), **spread(column(plain, "wall"))}
        one |= {what: median(column(plain, what)) for what in ("host", "span", "busy")}
        one["packing"] = median(column(flushes, "wall")) if flushes else None
        one["step"] = one["median"] + (max(0.0, one["packing"] - one["median"]) / WINDOWS.block if flushes else 0.0)
        behind = {other: [s for s in plain if s[COLUMNS.index("before")] == at] for at, other in enumerate(names)}
        one["behind"] = {
            other: {"steps": len(s), "median": median(column(s, "wall"))} for other, s in behind.items() if s
        }
        disturbed = ("segments", "given_back", "retries", "collections", "switches")
        one |= {what: sum(column(own, what)) for what in disturbed}
        result[name] = one
    return result


def shown(name: str, shape: tuple[int, int], sums: dict[str, dict[str, Any]]) -> str:
    """A pass in lines: milliseconds."""
    lines = [f"{shape[0]} x {shape[1]}, {name}:"]
    for cache, one in sums.items():
        low, middle, high, host, span, busy, step = (
            f"{one[what] / 1e3:.1f}" for what in ("low", "median", "high", "host", "span", "busy", "step")
        )
        behind = ", ".join(
            f"{other} {own['median'] / 1e3:.1f} ({own['steps']})" for other, own in one["behind"].items()
        )
        lines.append(
            f"  {cache}: median {middle} ms ({low} to {high}; host {host}, span {span}, busy {busy}), with packing "
            f"{step}; "
            f"behind {behind}; segments {one['segments']}, retries {one['retries']}, collections {one['collections']}, "
            f"switches {one['switches']}"
        )
    own = sums[AQUA]["step"]
    ratios = ", ".join(f"{one['step'] / own - 1:+.1%} {cache}" for cache, one in sums.items() if cache != AQUA)
    return "\n".join([*lines, f"  AQUA-KV's tokens a second over those of: {ratios}"])


def measure(
    model: Any, geometry: Geometry, every: Sequence[Kind], shape: tuple[int, int], rate: float, chosen: Any
) -> Any:
    """All of one shape: passes, time on the GPU, the fused one's graph, and the bound of AQUA-KV's products."""
    found: dict[str, Any] = {"batch": shape[0], "length": shape[1]}
    found["passes"] = passes(model, every, shape, chosen, shape == chosen.shapes[0])
    for name, one in found["passes"].items():
        one["summary"] = summed(one)
        print(shown(name, shape, one["summary"]), flush=True)
    products = flops(model, geometry, *shape)
    found |= {"predictor_flops": products, "flop_bound_microseconds": products / rate * 1e6}
    print(
        f"  products of the predictors: {products / rate * 1e3:.2f} ms at {rate / 1e12:.0f} TFLOP/s of torch's own "
        "product",
    )
    if model.device.type == "cuda":
        found["device"] = {kind.name: on_device(model, kind, shape) for kind in every}
        for name, taken in found["device"].items():
            busy, kernel = (taken[what] / 1e3 for what in ("device_microseconds", "reconstruct_microseconds"))
            print(
                f"  {name}: the GPU is busy for {busy:.2f} ms a step, with reconstruction for {kernel:.2f}", flush=True
            )
    graphs = [kind for kind in every if kind.name == FUSED]
    rows = list(generation.generate_rows(chosen.model, model, graphs, [shape], chosen.device, chosen.steps))
    print(*map(show, rows), sep="\n", flush=True)
    return found | {"rows": [row.as_dict() for row in rows]}


def parsed(given: Sequence[str] | None) -> Any:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default=os.environ.get("OUT", "."))
    options.add_argument("--seconds", type=float, default=170.0)
    options.add_argument("--device", default="cuda")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--model", default="llama-3.1-8b", help="whose geometry")
    options.add_argument("--steps", type=int, default=STEPS, help="of the fused one's graph")
    options.add_argument("--turns", type=int, default=TURNS, help="steps of each cache in a pass")
    options.add_argument("--seed", type=int, default=0, help="of the order of steps")
    options.add_argument("--shapes", default=",".join(f"{b}x{n}" for b, n in SHAPES), help="rows x tokens")
    options.add_argument("--compile", default="", help="only compile the kernels of this scheme")
    chosen = options.parse_args(given)
    Path(chosen.out).mkdir(parents=True, exist_ok=True)
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        options.error("needs a CUDA GPU, and torch finds none here (--device cpu --model tiny tries the script)")
    chosen.shapes = [tuple(int(part) for part in shape.split("x")) for shape in chosen.shapes.split(",")]
    return chosen


def main(given: Sequence[str] | None = None) -> None:
    chosen, began = parsed(given), time.time()
    source = resolve(chosen.model)
    geometry = configuration.geometry(source)
    if chosen.compile:
        compile_for(chosen.compile, geometry, devices.to_dtype(chosen.dtype))
        return
    on_gpu = chosen.device == "cuda"
    own = [sys.executable, __file__, "--model", chosen.model, "--dtype", chosen.dtype, "--compile"]
    compiling = [subprocess.Popen([*own, name]) for name in MADE if on_gpu]
    model = loading.load_model(source, dtype=chosen.dtype, device=chosen.device, random_weights=True).model
    for process in compiling:
        process.wait()
    about = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", **libraries(), "windows": vars(WINDOWS)}
    about |= {"cudnn": torch.backends.cudnn.version(), "seed": chosen.seed, "columns": COLUMNS}
    clock = Clock(model.device)
    rate = clock.matmul_rate()
    print(about, clock.ceilings, f"- kernels compiled and model made in {time.time() - began:.0f} s", flush=True)
    every, done = kinds(model, geometry), []
    for shape in chosen.shapes:
        if time.time() - began > chosen.seconds:
            print(f"{shape}: not measured, {chosen.seconds:g} s are over")
            continue
        done.append(measure(model, geometry, every, shape, rate, chosen))
        print(f"  ({time.time() - began:.0f} s so far)", flush=True)
        result = {**about, "ceilings": clock.ceilings, "shapes": done}
        Path(chosen.out, "aqua_tokens.json").write_text(json.dumps(result))
    decoding.released(model.device)


if __name__ == "__main__":
    main()
