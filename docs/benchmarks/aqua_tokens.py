"""Tokens a second of AQUA-KV beside HIGGS that is decoded, HIGGS that the fused kernel reads, and Transformers' DynamicCache.

    PYTHONPATH=.:kernels:artifacts python docs/benchmarks/aqua_tokens.py [--out DIR] [--seconds 150]

The paper's set-up (AQUA-KV, "Inference time"): Llama 3.1 8B in bfloat16 under Transformers, one sequence, HIGGS in 2 bits with
one norm and one rotation a token, sink 4, recent 128. Here: that model's geometry with random weights, random packed data,
predictors of random weights, one step at a time (kvcal.bench.generation says how). Steps are eager, as the paper's; where a
step can be a CUDA graph there is a row of that too. What is compared: docs/benchmarks/aqua_tokens.md.

Shapes are in the order of their weight. At the first one all eager caches then take their steps in turn, one each, forwards
and backwards, so that a host that is slow for a while is so for all alike: that is what comparisons are made of. A shape that
has not begun after --seconds is named and left out. aqua_tokens.json is written anew after each shape.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from generation import libraries, show
from torch.profiler import ProfilerActivity, profile

from kvcal import models
from kvcal.bench import caches, decoding, filled, generation, schemes
from kvcal.bench.caches import Kind
from kvcal.bench.kernels import predictor_flops
from kvcal.bench.rows import Row
from kvcal.bench.timing import Clock
from kvcal.catalogue import Geometry
from kvcal_artifacts import fused, reconstructed
from kvcal_artifacts.scheme import Windows

WINDOWS = Windows(4, 128, 32)
STEPS = 20
SHAPES = [(1, 8192), (1, 2048), (1, 32768), (8, 8192)]  # rows, tokens a row
IN_TURN = 64  # steps of each cache
PROFILED = 4  # steps, behind one that packs
AQUA, DECODED, AFTER, FUSED = "aqua-kv-2", "higgs-2, decoded", "higgs-2 after RoPE, decoded", "higgs-2, fused"
MADE = {  # codecs, and the frame of keys where it is not the scheme's own
    AQUA: ("aqua-kv-2", None),
    DECODED: ("higgs-2-wide+higgs-2-wide", "pre_rope"),  # what AQUA-KV stores, without predictors
    AFTER: ("higgs-2-wide+higgs-2-wide", None),
    FUSED: ("higgs-2", None),  # rotated head by head: what the fused kernel reads
}


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
    """Have the kernels of a scheme compiled and tried: in a process of its own, beside others and the making of the model."""
    one, device = benched(name, geometry), torch.device("cuda")
    pair, ratio = one.codecs, geometry.heads // geometry.kv_heads
    if name == FUSED:
        fused.absence("auto", pair, ratio, dtype, device)
        fused.rules("auto", pair, dtype, device)
        fused.packing("auto", pair, dtype, device)
    else:
        reconstructed.refusal("auto", pair, dtype, device)
        rotary = geometry.head_dim if one.frame == "pre_rope" else 0
        reader = reconstructed.reader_of(pair, dtype, "auto", 0, 1)
        reader.turns(rotary, device)


@torch.no_grad()
def on_device(model: Any, kind: Kind, shape: tuple[int, int]) -> dict[str, float]:
    """Microseconds a step that kernels take on the GPU, by torch's profiler, whatever the host takes to launch them; and
    those of the reconstruction kernel alone.
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
    own = sum(taken for name, taken in times.items() if name == "reconstruct_kernel")
    return {"device_microseconds": sum(times.values()), "reconstruct_microseconds": own}


def flops(model: Any, geometry: Geometry, batch: int, length: int) -> float:
    """Of the predictors' products in a step of AQUA-KV: over all packed tokens of all layers that have one."""
    one = benched(AQUA, geometry)
    packed = caches.blocks_of(WINDOWS, caches.start_of(WINDOWS, length)) * WINDOWS.block
    numbers = batch * packed * geometry.kv_heads * geometry.head_dim
    layers = [pair for pair in filled.scheme_of(model, one).layers if pair is not None]
    return sum(predictor_flops(codec, numbers) for pair in layers for codec in (pair.key, pair.value))


def measure(
    model: Any, geometry: Geometry, every: Sequence[Kind], shape: tuple[int, int], rate: float, chosen: Any
) -> list[Row]:
    """Each kind at a shape."""
    made = []
    for row in generation.generate_rows(chosen.model, model, every, [shape], chosen.device, chosen.steps):
        print(show(row), flush=True)
        more: dict[str, Any] = {}
        if row.microseconds is not None:
            if row.scheme == AQUA:
                own = flops(model, geometry, *shape)
                more |= {"predictor_flops": own, "flop_bound_microseconds": own / rate * 1e6}
            if row.path.endswith(generation.EAGER) and model.device.type == "cuda":
                more |= on_device(model, next(kind for kind in every if kind.name == row.scheme), shape)
        made.append(replace(row, more={**row.more, **more}))
    return made


@torch.no_grad()
def in_turns(model: Any, every: Sequence[Kind], shape: tuple[int, int], steps: int) -> dict[str, Any]:
    """Eager steps of each kind, taken in turn by caches that are all there at once: `microseconds` of each step by name."""
    with ExitStack() as stack:
        steppers = []
        for kind in every:
            assert kind.maker is not None
            start = kind.maker(*shape, decoding.WARM_UP + steps)
            stack.callback(start.close)
            steppers.append(decoding.Stepper(model, start, shape[0]))
            with caches.attention(model, kind):
                for _ in range(decoding.WARM_UP):
                    steppers[-1].step()
            steppers[-1].back()
        taken: dict[str, list[float]] = {kind.name: [] for kind in every}
        for number in range(steps):
            for kind, stepper in list(zip(every, steppers, strict=True))[:: 1 if number % 2 == 0 else -1]:
                with caches.attention(model, kind):
                    decoding.wait(model.device)
                    began = time.perf_counter()
                    stepper.step()
                    decoding.wait(model.device)
                    taken[kind.name].append((time.perf_counter() - began) * 1e6)
        return {"batch": shape[0], "length": shape[1], "microseconds": taken}


def compared(found: dict[str, Any]) -> str:
    """AQUA-KV's steps beside those of each other kind in the same turns: the step that a tenth are faster than, which a host
    that others disturb leaves alone, and the median of ratios step by step.
    """
    lines = [f"{found['batch']} x {found['length']}, steps in turn, {len(found['microseconds'][AQUA])} each:"]
    own = found["microseconds"][AQUA]
    quiet = quantiles(own, n=10)[0]
    for name, times in found["microseconds"].items():
        decile, ratios = quantiles(times, n=10)[0], [b / a for a, b in zip(own, times, strict=True)]
        lines.append(
            f"  {name}: {median(times) / 1e3:.2f} ms, first decile {decile / 1e3:.2f}; AQUA-KV's tokens a second over its: "
            f"{decile / quiet:.3f} by first deciles, {median(ratios):.3f} step by step"
        )
    return "\n".join(lines)


def eager(rows: Sequence[Row], scheme: str) -> Row | None:
    return next(
        (row for row in rows if row.scheme == scheme and row.path.endswith("; eager") and row.microseconds), None
    )


def summary(rows: Sequence[Row], rate: float) -> str:
    """What is asked of a shape, in lines."""
    aqua = eager(rows, AQUA)
    if aqua is None or aqua.microseconds is None:
        return "no figure of AQUA-KV"
    own, bound = aqua.microseconds, aqua.more["flop_bound_microseconds"]
    lines = [f"{aqua.batch} x {aqua.length}: AQUA-KV {own / 1e3:.2f} ms a step"]
    for name in (DECODED, AFTER, FUSED):
        if (other := eager(rows, name)) is not None and other.microseconds is not None:
            taken = other.microseconds
            lines.append(f"  to {name}: {taken / own - 1:+.1%} tokens a second, {(own - taken) / 1e3:+.2f} ms a step")
    if "device_microseconds" in aqua.more:
        busy, kernel = aqua.more["device_microseconds"], aqua.more["reconstruct_microseconds"]
        lines.append(f"  the GPU is busy for {busy / 1e3:.2f} ms, with reconstruction for {kernel / 1e3:.2f}")
    lines.append(
        f"  products of the predictors: {bound / 1e3:.2f} ms at the {rate / 1e12:.0f} TFLOP/s of torch's own product"
    )
    return "\n".join(lines)


def parsed(given: Sequence[str] | None) -> Any:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default=os.environ.get("OUT", "."))
    options.add_argument("--seconds", type=float, default=150.0)
    options.add_argument("--device", default="cuda")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--model", default="llama-3.1-8b", help="whose geometry")
    options.add_argument("--steps", type=int, default=STEPS, help="timed ones, at most")
    options.add_argument("--in-turn", type=int, default=IN_TURN, help="steps of each cache at the first shape, 0: none")
    options.add_argument("--shapes", default=",".join(f"{b}x{n}" for b, n in SHAPES), help="rows x tokens")
    options.add_argument("--compile", default="", help="only compile the kernels of this scheme")
    chosen = options.parse_args(given)
    chosen.shapes = [tuple(int(part) for part in shape.split("x")) for shape in chosen.shapes.split(",")]
    return chosen


def main(given: Sequence[str] | None = None) -> None:
    chosen, began = parsed(given), time.time()
    source = models.resolve(chosen.model)
    geometry = models.geometry(source)
    if chosen.compile:
        compile_for(chosen.compile, geometry, models.to_dtype(chosen.dtype))
        return
    on_gpu = chosen.device == "cuda"
    own = [sys.executable, __file__, "--model", chosen.model, "--dtype", chosen.dtype, "--compile"]
    compiling = [subprocess.Popen([*own, name]) for name in MADE if on_gpu]
    model = models.load_model(source, dtype=chosen.dtype, device=chosen.device, random_weights=True).model
    for process in compiling:
        process.wait()
    about = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", **libraries(), "windows": vars(WINDOWS)}
    clock = Clock(model.device)
    rate = clock.matmul_rate()
    print(about, clock.ceilings, f"- kernels compiled and model made in {time.time() - began:.0f} s", flush=True)
    every, rows, turns = kinds(model, geometry), [], None
    for shape in chosen.shapes:
        if time.time() - began > chosen.seconds:
            print(f"{shape}: not measured, {chosen.seconds:g} s are over")
            continue
        made = measure(model, geometry, every, shape, rate, chosen)
        rows += made
        print(summary(made, rate), f"  ({time.time() - began:.0f} s so far)", sep="\n", flush=True)
        if chosen.in_turn and shape == chosen.shapes[0]:
            decoding.released(model.device)
            turns = in_turns(model, every, shape, chosen.in_turn)
            print(compared(turns), f"  ({time.time() - began:.0f} s so far)", sep="\n", flush=True)
        result = {**about, "ceilings": clock.ceilings, "rows": [row.as_dict() for row in generation.beside_fp16(rows)]}
        result["in_turns"] = turns
        Path(chosen.out, "aqua_tokens.json").write_text(json.dumps(result, indent=1))
    decoding.released(model.device)


if __name__ == "__main__":
    main()
