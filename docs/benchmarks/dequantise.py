"""AQUA-KV reconstruction and nearest codeword on a GPU, against the rate of torch's own bfloat16 matrix product.

    PYTHONPATH=.:kernels:artifacts python docs/benchmarks/dequantise.py [--out DIR] [--seconds 90]

One layer of Llama-3.1-8B geometry (8 kv heads, D = 128, C = 1024): keys from HIGGS codes of 2 bits and the keys below
(C x C), turned by RoPE too; values from codes, the values below and this layer's keys (2C x C). Random data, L2 flushed
before each run, CUDA events, medians. Every cell is compared with a float64 reference before it is timed.

flops: of the predictor's products alone; the rotation's are not counted. fraction: flops over time, over the rate of
torch's bfloat16 product of 8192 x 8192 matrices in the same run. of copy: time that the bytes take at copy bandwidth.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from kvcal.bench.timing import Clock
from kvcal_artifacts.codecs.higgs_grids import GRIDS, gaussian_grid
from kvcal_kernels.dequantise import Coded, Rotation, reference
from kvcal_kernels.dequantise import triton as fused
from kvcal_kernels.hadamard import signs
from kvcal_kernels.packing import packed_bytes
from kvcal_kernels.residual_vq.nearest import reference as vq_reference
from kvcal_kernels.residual_vq.nearest import triton as vq

HEADS, D, BLOCK = 8, 128, 32
C = HEADS * D
CELLS = [(8, 8192), (1, 32768), (32, 2048), (8, 32768)]
LAUNCHES = [fused.Launch(256), fused.Launch(128), fused.Launch(256, 32, 8, 4), fused.Launch(128, 32, 8, 3)]
NEAREST = [vq.Launch(), vq.Launch(128, 64, 1, 4, 3), vq.Launch(256, 128, 2, 8, 2), vq.Launch(128, 64, 2, 4, 3)]
Row = dict[str, Any]


def codes(batch: int, length: int, key: bool, rotation: str, grid: tuple[int, int] = (2, 16)) -> Coded:
    """Any byte is a valid code."""
    (d, n), blocks = grid, length // BLOCK
    bits = GRIDS[grid]
    packed = packed_bytes(D // d if key else BLOCK, bits)
    rows = BLOCK if key else D // d
    made = torch.randint(0, 256, (batch, HEADS, blocks, rows, packed), dtype=torch.uint8, device="cuda")
    norm = (torch.rand(batch, 1, blocks, BLOCK, device="cuda") + 0.5).half()
    width = C if rotation == "token" else D
    return Coded(made, norm, gaussian_grid(d, n).cuda(), signs(C, 0).cuda(), width, bits, D, key)


def row_of(coded: Coded, row: int) -> Coded:
    part = coded.codes[row : row + 1], coded.norm[row : row + 1]
    return Coded(*part, coded.grid, coded.sign, coded.width, coded.bits, coded.dim, coded.key)


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


class Side:
    """Keys or values of one cell."""

    def __init__(self, batch: int, length: int, key: bool, rotation: str, dtype: torch.dtype) -> None:
        self.coded, self.key, self.dtype = codes(batch, length, key, rotation), key, dtype
        count = 1 if key else 2
        shape = (batch, HEADS, length, D)
        self.inputs = [torch.randn(shape, device="cuda").to(dtype) for _ in range(count)]
        self.weight = (torch.randn(count * C, C, device="cuda") / (count * C) ** 0.5).half()
        self.bias = torch.randn(C, device="cuda").half()
        self.turn = rope(length) if key else None
        rotated = D if key else 0
        self.prepared = fused.prepare(self.coded, self.weight, self.bias, rotated, dtype)
        self.out = torch.empty(shape, device="cuda", dtype=dtype)
        self.rotated = torch.empty_like(self.out) if key else None
        self.flops = 2.0 * batch * length * count * C * C
        written = (2 if key else 1) * self.out.nbytes
        self.bytes = self.coded.codes.nbytes + self.coded.norm.nbytes + sum(x.nbytes for x in self.inputs) + written

    def run(self, launch: fused.Launch | None = None) -> None:
        fused.dequantise(self.coded, self.prepared, self.inputs, self.turn, self.out, self.rotated, self.dtype, launch)

    def errors(self, launch: fused.Launch | None) -> list[float]:
        """Of the first and last row, relative: the kernel's and torch's in the same dtype, the worse one of out and
        turned.
        """
        self.out.fill_(torch.nan)
        self.run(launch)
        worst = [0.0, 0.0]
        for row in {0, len(self.out) - 1}:
            coded, inputs = row_of(self.coded, row), [x[row : row + 1] for x in self.inputs]
            exact = reference.dequantise(coded, inputs, self.weight, self.bias, self.turn, torch.float64)
            same = reference.dequantise(coded, inputs, self.weight, self.bias, self.turn, self.dtype)
            for made, e, s in zip((self.out, self.rotated), exact, same, strict=True):
                if e is not None and made is not None and s is not None:
                    ours, torchs = off(made[row : row + 1], e), off(s, e)
                    worst = [ours, torchs] if not ours / torchs <= worst[0] / max(worst[1], 1e-30) else worst
        return worst


def rope(length: int) -> Rotation:
    half = torch.arange(D // 2, device="cuda") / (D // 2)
    angle = torch.arange(length, device="cuda")[None, :, None] * 500000.0**-half
    angle = torch.cat([angle, angle], -1)
    return Rotation(angle.cos(), angle.sin())


def measure(clock: Clock, side: Side, launches: list[fused.Launch], until: float) -> Row:
    """The launch that is fastest, checked; no further ones after `until`."""
    tried: list[tuple[float, Any]] = []
    for launch in launches:
        if tried and time.time() > until:
            break
        try:
            tried.append((clock.time(lambda launch=launch: side.run(launch)).microseconds, launch))  # type: ignore[misc]
        except Exception as error:
            print(f"  {launch}: {type(error).__name__} {str(error)[:120]}", file=sys.stderr)
    tried.sort(key=lambda each: each[0])
    taken, launch = tried[0]
    error, same = side.errors(launch)
    row: Row = {"side": "keys" if side.key else "values", "error": error, "error_torch": same, "launch": vars(launch)}
    row["tried"] = [[round(t, 1), *vars(each).values()] for t, each in tried]
    row["microseconds"] = taken if error <= 2 * same else None
    return row


def reconstruction(clock: Clock, batch: int, length: int, rotation: str, dtype: torch.dtype, until: float) -> list[Row]:
    rows, taken, flops = [], 0.0, 0.0
    for key in (True, False):
        side = Side(batch, length, key, rotation, dtype)
        row = measure(clock, side, LAUNCHES, until)
        wide = torch.cat([x.transpose(1, 2).reshape(-1, C) for x in side.inputs], 1)
        weight = side.weight.to(dtype)
        row |= {"batch": batch, "length": length, "rotation": rotation, "dtype": str(dtype).removeprefix("torch.")}
        row["bare_product_microseconds"] = clock.time(lambda wide=wide, weight=weight: wide @ weight).microseconds  # type: ignore[misc]
        if row["microseconds"]:
            row["fraction_of_matmul"] = side.flops / row["microseconds"] * 1e6 / clock.matmul_rate()
            row["fraction_of_copy"] = side.bytes / clock.copy_bandwidth() * 1e6 / row["microseconds"]
            taken, flops = taken + row["microseconds"], flops + side.flops
        show(row)
        rows.append(row)
        del side, wide
        torch.cuda.empty_cache()
    if all(row["microseconds"] for row in rows):
        both = {k: rows[0][k] for k in ("batch", "length", "rotation", "dtype")} | {
            "side": "both",
            "microseconds": taken,
        }
        both["fraction_of_matmul"] = flops / taken * 1e6 / clock.matmul_rate()
        print(f"{name(both)} both: {taken:.1f} us, {both['fraction_of_matmul']:.3f} of matmul (wanted 0.5)", flush=True)
        rows.append(both)
    return rows


def name(row: Row) -> str:
    return f"reconstruct {row['batch']} x {row['length']} {row['dtype']} rotation over the {row['rotation']}"


def show(row: Row) -> None:
    said = f"error {row['error']:.2e} (torch {row['error_torch']:.2e})"
    if not row["microseconds"]:
        print(f"{name(row)} {row['side']}: WRONG, {said}", flush=True)
        return
    print(
        f"{name(row)} {row['side']}: {row['microseconds']:.1f} us, {row['fraction_of_matmul']:.3f} of matmul, "
        f"{row['fraction_of_copy']:.3f} of copy, bare product {row['bare_product_microseconds']:.1f} us, {said}, "
        f"{row['tried']}",
        flush=True,
    )


def decoding(clock: Clock, batch: int, length: int, key: bool, rotation: str) -> Row:
    """HIGGS without a predictor: codes to float16."""
    coded = codes(batch, length, key, rotation)
    prepared = fused.prepare(coded)
    out = torch.empty(batch, HEADS, length, D, device="cuda", dtype=torch.float16)
    taken = clock.time(lambda: fused.dequantise(coded, prepared, out=out)).microseconds
    exact = reference.decode(row_of(coded, batch - 1), torch.float64)
    error, same = off(out[batch - 1 :], exact), off(exact.half(), exact)
    size = coded.codes.nbytes + coded.norm.nbytes + out.nbytes
    row: Row = {"side": "keys" if key else "values", "batch": batch, "length": length, "rotation": rotation}
    row |= {"operation": "decode", "error": error, "error_torch": same, "microseconds": taken}
    row["fraction_of_copy"] = size / clock.copy_bandwidth() * 1e6 / taken
    good = error <= 2 * same  # points are rounded to float16, too, and summed over heads
    print(
        f"decode {batch} x {length} {row['side']} over the {rotation}: "
        + (f"{taken:.1f} us, {row['fraction_of_copy']:.3f} of copy" if good else "WRONG")
        + f", error {error:.2e} (float16 itself {same:.2e})",
        flush=True,
    )
    return row


def flash_kmeans(x: torch.Tensor, book: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """The assignment kernel of flash-kmeans, where it is installed: of vectors in float16, squares of lengths given."""
    try:
        from flash_kmeans.assign_euclid_triton import euclid_assign_triton
    except ImportError:
        return None
    own, squares, lengths = x.half()[None], x.square().sum(1)[None], book.float().square().sum(1)[None]
    out = torch.empty(1, len(x), dtype=torch.int32, device=x.device)
    return lambda: euclid_assign_triton(own, book[None], squares, out, lengths)[0]


def farther(x: torch.Tensor, book: torch.Tensor, chosen: torch.Tensor, best: torch.Tensor) -> float:
    """By how much of the least distance a chosen codeword lies farther, at most."""
    far, least = ((x.double() - book[c.long()].double()).norm(dim=1) for c in (chosen, best))
    return float((far / least.clamp_min(1e-12)).max()) - 1


def nearest(clock: Clock, n: int, d: int, k: int, launches: list[vq.Launch], until: float) -> Row:
    x, book = torch.randn(n, d, device="cuda"), torch.randn(k, d, device="cuda").half()
    tried: list[tuple[float, Any]] = []
    for launch in launches:
        if tried and time.time() > until:
            break
        try:
            tried.append((clock.time(lambda launch=launch: vq.nearest(x, book, launch)).microseconds, launch))  # type: ignore[misc]
        except Exception as error:
            print(f"  {launch}: {type(error).__name__} {str(error)[:120]}", file=sys.stderr)
    tried.sort(key=lambda each: each[0])
    taken, launch = tried[0]
    step = max(1, n // 4096)
    some = x[::step]
    best = vq_reference.nearest(some, book)
    worst = farther(some, book, vq.nearest(some, book, launch), best)
    padded = sum(vq.chunks(d))
    row: Row = {"operation": "nearest", "vectors": n, "dimension": d, "codewords": k, "farther": worst}
    row |= {"launch": vars(launch), "tried": [[round(t, 1), *vars(each).values()] for t, each in tried]}
    row["microseconds"] = taken if worst <= 1e-3 else None
    row["fraction_of_matmul"] = 2.0 * n * k * d / taken * 1e6 / clock.matmul_rate()
    row["fraction_padded"] = row["fraction_of_matmul"] * padded / d
    said = f"{taken:.1f} us, {row['fraction_of_matmul']:.3f} of matmul, padded to {padded} {row['fraction_padded']:.3f}"
    said = said if row["microseconds"] else "WRONG"
    if (peer := flash_kmeans(x, book)) is not None:
        row["flash_kmeans_farther"] = farther(some, book, peer()[::step], best)
        row["flash_kmeans_microseconds"] = clock.time(peer).microseconds
        said += (
            f", flash-kmeans {row['flash_kmeans_microseconds']:.1f} us, farther by {row['flash_kmeans_farther']:.1e}"
        )
    print(f"nearest {n} x {d}, {k} codewords: {said}, farther by {worst:.1e}, {row['tried']}", flush=True)
    return row


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default=os.environ.get("OUT", "."))
    options.add_argument("--seconds", type=float, default=90.0)
    chosen = options.parse_args()
    Path(chosen.out).mkdir(parents=True, exist_ok=True)
    if not torch.cuda.is_available():
        options.error("needs a CUDA GPU, and torch finds none here")
    began = time.time()
    torch.manual_seed(0)
    clock = Clock(torch.device("cuda"), repeats=15, seconds=1.0)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result |= {"triton": triton.__version__, "rows": []}
    print(
        f"{result['device']}, torch {torch.__version__}, triton {triton.__version__}, copy "
        f"{clock.copy_bandwidth() / 1e12:.2f} TB/s, matmul {clock.matmul_rate() / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    until = began + chosen.seconds
    half, brain = torch.float16, torch.bfloat16
    work: list[Any] = [
        lambda: reconstruction(clock, 8, 8192, "token", half, until),
        lambda: [nearest(clock, 1 << 18, 128, 65536, NEAREST, until)],
        lambda: [nearest(clock, 1 << 18, d, 65536, NEAREST[:1], until) for d in (80, 48)],
        lambda: reconstruction(clock, 8, 8192, "head", brain, until),
        lambda: [decoding(clock, 8, 8192, key, "head") for key in (True, False)],
        lambda: [decoding(clock, 8, 8192, key, "token") for key in (True, False)],
        lambda: reconstruction(clock, 8, 8192, "token", brain, until),
        lambda: [nearest(clock, 1 << 18, 128, 4096, NEAREST[:1], until)],
        *(lambda b=b, n=n: reconstruction(clock, b, n, "token", half, until) for b, n in CELLS[1:]),
    ]
    for number, each in enumerate(work):
        if time.time() > until:
            print(f"{len(work) - number} parts not measured, {chosen.seconds:g} s are over", flush=True)
            break
        try:
            result["rows"] += each()
        except Exception as error:
            print(f"part {number}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        torch.cuda.empty_cache()
        result["ceilings"] = clock.ceilings
        Path(chosen.out, "dequantise.json").write_text(json.dumps(result, indent=1))
    print(f"{time.time() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
