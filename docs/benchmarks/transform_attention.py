"""Decode attention over the transform codec on a GPU, one layer of Llama-3.1-8B geometry (32 query heads, 8 kv heads,
head_dim 128), one new token, random data of 2.0, 2.5, 3.0 and 4.0 bits in unequal tiers.

PYTHONPATH=.:kernels:artifacts python docs/benchmarks/transform_attention.py [--out DIR]

Kernels are compiled and compared with the float32 reference first, each in a process of its own; nothing is timed that does
not agree. Times are CUDA events, the L2 flushed, medians of several passes over all cells; beside them the fraction of the
bandwidth of a copy (bytes read plus bytes written) in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from kvcal.bench.timing import Clock
from kvcal_artifacts.files import write_atomically
from kvcal_kernels.attention import reference, transform
from kvcal_kernels.attention import triton as fused
from kvcal_kernels.layout import BLOCK, Basis, TransformBlocks, TransformForm
from kvcal_kernels.layout.transform import PAIR_BYTES

MIXES = {2.0: (8, 14, 20, 14), 2.5: (16, 18, 16, 10), 3.0: (26, 21, 11, 3), 4.0: (64, 0, 0, 0)}  # pairs of 4 to 1 bits
HEADS, RATIO, DIM = 8, 4, 128
SHAPES = ((32, 32768), (8, 32768), (32, 4096))
LAUNCHES = {
    f"{warps} warps, {slots} slots": fused.Launch(warps=warps, registers=128, slots=slots)
    for warps, slots in ((8, 2), (4, 2))
}
GOAL = 0.75  # of copy bandwidth at 32 x 32768
CUDA = torch.device("cuda")


def blocks_of(role: Any, bits: float, batch: int, count: int) -> TransformBlocks:
    """Random codes of a random basis: what a time and an error depend on is there."""
    form = TransformForm(role, DIM, MIXES[bits])
    codes = tuple(
        torch.randint(
            0,
            256,
            (batch, HEADS, count, *((2 * n, 4) if b == 1 else (n, PAIR_BYTES[b]))),
            dtype=torch.uint8,
            device=CUDA,
        )
        for b, n in form.tiers
    )
    generator = torch.Generator(CUDA).manual_seed(0)  # of keys and values alike: the kernel keeps one table
    points = {b: torch.randn(1 << 2 * b, 2, generator=generator, device=CUDA).half().float() for b in (4, 3, 2)}
    points[1] = torch.tensor([[-0.8], [0.8]], device=CUDA)
    decoder = (torch.randn(HEADS, DIM, DIM, device=CUDA) * DIM**-0.5).half()
    basis = Basis(decoder, torch.randn(HEADS, DIM, device=CUDA).half() / 2, points, dict.fromkeys(points, 1.0))
    norm = (torch.rand(batch, 1, count, BLOCK, device=CUDA) + 0.5).half()
    return TransformBlocks(form, codes, norm, basis)


def cell(bits: float, batch: int, length: int) -> tuple[Any, ...]:
    """Arguments of `attend`: sink 32, 128 recent tokens, the rest packed."""
    count = length // BLOCK - 5

    def exact(tokens: int) -> tuple[Any, ...]:
        k, v = (torch.randn(batch, HEADS, tokens, DIM, device=CUDA).half() for _ in (0, 1))
        return k, v, torch.full((batch,), tokens, dtype=torch.int32, device=CUDA)

    q = torch.randn(batch, HEADS * RATIO, 1, DIM, device=CUDA).half()
    sides = [blocks_of(role, bits, batch, count) for role in ("key", "value")]
    return q, *sides, torch.full((batch,), count, dtype=torch.int32, device=CUDA), exact(32), exact(128), DIM**-0.5


def bytes_of(arguments: tuple[Any, ...]) -> int:
    tensors = [x for side in arguments[1:3] for x in (*side.codes, side.norm)]
    tensors += [x for part in arguments[4:6] for x in part[:2]]
    return sum(x.numel() * x.element_size() for x in tensors)


def agree(bits: float, launch: fused.Launch) -> tuple[float, float]:
    """The kernel's error against float32, and that of the reference with inputs and output in float16."""
    torch.manual_seed(0)
    arguments = cell(bits, 2, 2048)
    out = transform().attend(*arguments, launch)
    exact = reference.attend(arguments[0].float(), *arguments[1:])
    plain = reference.attend(*arguments)
    off, same = (float((x.float() - exact).norm() / exact.norm()) for x in (out, plain))
    return off, same


def measure(seconds: float) -> dict[str, Any]:
    clock = Clock(CUDA, repeats=21, seconds=seconds)
    copy, space = clock.copy_bandwidth(), fused.Workspace(CUDA)
    rows: list[dict[str, Any]] = []
    for batch, length in SHAPES:
        for bits in MIXES:
            arguments = cell(bits, batch, length)
            for name, launch in LAUNCHES.items():
                run = partial(transform().attend, *arguments, launch, space)
                passes = [clock.time(run).microseconds for _ in range(3)]
                taken, size = statistics.median(passes), bytes_of(arguments)
                fraction = size / taken * 1e6 / copy
                rows.append({"bits": bits, "batch": batch, "length": length, "launch": name, "microseconds": taken,
                             "passes": passes, "bytes": size, "fraction_of_copy": fraction})  # fmt: skip
                print(
                    f"{bits} bits, {batch} x {length}, {name}: {taken:.1f} us, {fraction:.2f} of copy bandwidth",
                    flush=True,
                )
            del arguments, run
    for bits in MIXES:
        best = max(r["fraction_of_copy"] for r in rows if r["bits"] == bits and (r["batch"], r["length"]) == SHAPES[0])
        print(f"{bits} bits, 32 x 32768: best {best:.2f} of copy, goal {GOAL}: {'met' if best >= GOAL else 'MISSED'}")
    return {"copy_bandwidth": copy, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "triton": triton.__version__, "mixes": {str(k): v for k, v in MIXES.items()}, "rows": rows}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="a folder for transform_attention.json")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a cell's passes, at most")
    parser.add_argument("--check", help="bits and launch: compare one kernel with the reference, print errors, end")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU, and torch finds none here")
    if options.check:
        bits, name = options.check.split(",", 1)
        print(json.dumps(agree(float(bits), LAUNCHES[name])))
        return
    names = [f"{bits},{name}" for bits in MIXES for name in LAUNCHES]
    begun = [
        subprocess.Popen([sys.executable, __file__, "--check", name], stdout=subprocess.PIPE, text=True)
        for name in names
    ]
    errors = {name: json.loads(one.communicate()[0] or "null") for name, one in zip(names, begun, strict=True)}
    print("error, that of float16:", errors)
    failed = [name for name, both in errors.items() if both is None or not both[0] <= 2 * both[1] + 2.0**-11]
    result: dict[str, Any] = {"errors": errors, "failed": failed}
    if not failed:
        result |= measure(options.seconds)
    write_atomically(Path(options.out, "transform_attention.json"), json.dumps(result, indent=1).encode())
    if failed:
        sys.exit(f"kernels that do not agree with the reference: {failed}; nothing was timed")


if __name__ == "__main__":
    main()
