"""Eager decode steps of a whole model: what the host takes for them, and the kernels that they launch.

    PYTHONPATH=.:kernels:artifacts python docs/benchmarks/eager.py [--length 2k] [--schemes innerq-base,kivi-2] [--out DIR]

Llama-3.1-8B's geometry, random weights made on the device, bfloat16, one row. Steps are called as generate() calls them
without compilation, with a mask of all columns, and the device is waited for after each. Caches are filled with random
packed data.

ms: median and mean of --steps steps; the mean has its share of the steps that pack a block in every layer. to_fp16: the
median over that of as many steps of DynamicCache, half of them right before and half right after, as a machine's
processors are not equally fast all the time. launches: kernels and copies of one step that packs nothing, by
torch.profiler.

Each step of DynamicCache attends to a number of keys that is new, for which cuDNN's attention, where torch prefers it,
builds a plan (docs/benchmarks/aqua_tokens.md): that is in to_fp16, and no cost of a fused step.

Torch's allocator is given POOL bytes first: each step DynamicCache wants tensors a little larger than those it gives
back, and would wait for the driver's memory instead of the host.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from kvcal.bench import caches, decoding, schemes
from kvcal.bench.filled import filled_cache
from kvcal.commands.bench_options import numbers
from kvcal.models import configuration, loading, names

SCHEMES = "innerq-base,kivi-2,higgs-2,turboquant-4"
WARM_UP = 4  # steps nobody times: kernels are compiled
POOL = 8 << 30


class Loop:
    """generate()'s own steps."""

    def __init__(self, model: Any, cache: Any, length: int, room: int) -> None:
        self.model, self.cache, self.length = model, cache, length
        self.token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        self.mask = torch.ones(1, room, dtype=torch.long, device=model.device)

    def step(self) -> None:
        self.length += 1
        given = {"attention_mask": self.mask[:, : self.length], "past_key_values": self.cache, "use_cache": True}
        place = torch.full((1, 1), self.length - 1, device=self.token.device)
        self.token = self.model(self.token, position_ids=place, **given).logits[:, -1].argmax(-1, keepdim=True)

    def timed(self) -> float:
        """Milliseconds of a step."""
        decoding.wait(self.token.device)
        start = time.perf_counter()
        self.step()
        decoding.wait(self.token.device)
        return (time.perf_counter() - start) * 1e3

    def launches(self) -> int:
        """What the device did in a step: kernels and copies."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            self.step()
            decoding.wait(self.token.device)
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events() or [])


def timed(loop: Loop, steps: int) -> list[float]:
    return [loop.timed() for _ in range(steps)]


def summary(times: list[float]) -> dict[str, float]:
    return {"ms": statistics.median(times), "mean_ms": statistics.fmean(times), "least_ms": min(times)}


@torch.no_grad()
def rows(model: Any, geometry: Any, chosen: Any) -> Iterator[dict[str, Any]]:
    half, on_gpu = chosen.steps // 2, model.device.type == "cuda"
    kinds = [(name, fixed) for name in chosen.schemes.split(",") for fixed in (False, True)]
    dynamic = next(kind for kind in caches.plain_kinds(model, geometry) if kind.path == "DynamicCache")
    assert dynamic.maker is not None
    if on_gpu:
        torch.empty(POOL, dtype=torch.uint8, device=model.device)
    plain = Loop(
        model, dynamic.maker(1, chosen.length, 0).cache, chosen.length, chosen.length + half * (len(kinds) + 2)
    )
    timed(plain, WARM_UP)
    every = before = timed(plain, half)
    for name, fixed in kinds:
        own = schemes.named(name, geometry)
        length = caches.start_of(own.windows, chosen.length)  # a block is packed in the second step, which is not timed
        room = length + WARM_UP + 2 * half + 2
        with filled_cache(model, geometry, own, 1, length, max_length=room if fixed else None) as cache:
            loop = Loop(model, cache, length, room)
            timed(loop, WARM_UP)
            launches = loop.launches() if on_gpu else None
            found, path = summary(times := timed(loop, 2 * half)), cache.describe()["path"]
        after = timed(plain, half)
        found["to_fp16"] = statistics.median(times) / statistics.median(before + after)
        every, before = every + after, after
        yield {"scheme": name, "max_length": fixed, "path": path, **found, "launches": launches}
    launches = plain.launches() if on_gpu else None
    yield {
        "scheme": "fp16",
        "max_length": False,
        "path": "DynamicCache",
        **summary(every),
        "to_fp16": 1.0,
        "launches": launches,
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default=os.environ.get("OUT", "."))
    options.add_argument("--device", default="cuda")
    options.add_argument("--model", default="llama-3.1-8b", help="whose geometry")
    options.add_argument("--length", default="2k")
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--schemes", default=SCHEMES)
    chosen = options.parse_args()
    Path(chosen.out).mkdir(parents=True, exist_ok=True)
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        options.error("needs a CUDA GPU, and torch finds none here (--device cpu --model tiny tries the script)")
    chosen.length = numbers(chosen.length, "--length", [])[0]
    source = names.resolve(chosen.model)
    model = loading.load_model(source, dtype="bfloat16", device=chosen.device, random_weights=True).model
    device = torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"
    made: dict[str, Any] = {"device": device, "torch": torch.__version__, "length": chosen.length, "rows": []}
    for row in rows(model, configuration.geometry(source), chosen):
        made["rows"].append(row)
        where = "max_length" if row["max_length"] else "grows"
        print(
            f"{row['scheme']} {where}: {row['ms']:.2f} ms a step (x {row['to_fp16']:.2f}), mean {row['mean_ms']:.2f}, "
            f"least {row['least_ms']:.2f}, {row['launches']} launches; {row['path'][:40]}",
            flush=True,
        )
        Path(chosen.out, "eager.json").write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
