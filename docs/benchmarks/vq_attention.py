"""Decode attention over residual vector codes on a GPU, against decoding everything and then attending.

    PYTHONPATH=.:kernels:artifacts python docs/benchmarks/vq_attention.py [--out DIR] [--seconds 90]

One layer of Llama-3.1-8B geometry (32 query heads, 8 kv heads, D = 128), one new token, keys in two bands of 80 and 48
dimensions. 4k: 27 + 19 stages for keys, 13 for values, of 4096 codewords (40 MB). paper: 20 stages of 65536, 16 of
16384, 8 of 65536 (370 MB). Random codes and codebooks, packed tokens only, L2 flushed before each run, CUDA events,
medians. Each cell is compared with float64 attention over what the reference decodes, on the first row; no figure where
that fails.

one-pass: our kernel that decodes to float16 in one pass, then the fastest of torch's backends; torch: the codec's own
decoding (float32) in its place. fused over one-pass is the ratio that the bar of 3 is held against.

Then what a step of a cache with max_length appends: one token a row to sink 32, recent 96 and blocks of 128, where
nothing is due and where every row's block is searched and packed, whose error is compared with that of the reference's
codes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvcal.bench.timing import Clock
from kvcal_kernels.packing import packed_bytes
from kvcal_kernels.quantise import Counts, Windows
from kvcal_kernels.quantise import triton as counting
from kvcal_kernels.residual_vq import append as vq_append
from kvcal_kernels.residual_vq.attention import Band, Coded, longest, reference
from kvcal_kernels.residual_vq.attention import triton as fused

HEADS, RATIO, D, BLOCK = 8, 4, 128, 128
BANDS = ([*range(80)], [*range(80, 128)])
SIZES = {  # (stages, codewords) of the low and the high band of keys, of values
    "4k": ((27, 4096), (19, 4096), (13, 4096)),
    "paper": ((20, 65536), (16, 16384), (8, 65536)),
}
CELLS = [
    ("4k", 8, 8192), ("4k", 1, 32768), ("4k", 32, 4096), ("4k", 8, 32768), ("4k", 1, 4096),
    ("paper", 1, 4096), ("paper", 1, 32768), ("paper", 1, 131072), ("paper", 8, 8192), ("paper", 8, 32768),
]  # fmt: skip
LAUNCHES = [
    fused.Launch(), fused.Launch(1024), fused.Launch(shared=0), fused.Launch(scattered=256, shared=0, few=128),
    fused.Launch(scattered=64),
]  # fmt: skip
APPENDED = [("4k", 1), ("4k", 8), ("4k", 32), ("paper", 1), ("paper", 32)]
WINDOWS = Windows(32, 96, BLOCK)
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
Row = dict[str, Any]


def books(stages: int, size: int, width: int) -> Tensor:
    fading = 2.0 ** -(torch.arange(stages, device="cuda") / 2)
    return (torch.randn(stages, size, width, device="cuda") * fading.view(-1, 1, 1)).half()


def bands(sizes: list[tuple[int, int]], dims: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """Codebooks and channels."""
    return [
        (books(*size, len(own)), torch.tensor(own, dtype=torch.int32, device="cuda"))
        for size, own in zip(sizes, dims, strict=True)
    ]


def coded(own: list[tuple[Tensor, Tensor]], batch: int, length: int) -> Coded:
    """Any byte is a valid code."""
    made = []
    for book, dims in own:
        stages, size = book.shape[:2]
        shape = (batch, HEADS, length // BLOCK, stages, packed_bytes(BLOCK, (size - 1).bit_length()))
        made.append(Band(torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda"), book, dims, longest(book)))
    return Coded(tuple(made), BLOCK)


def row_of(whole: Coded, row: int) -> Coded:
    parts = tuple(
        Band(band.codes[row : row + 1].contiguous(), band.books, band.dims, band.lengths) for band in whole.bands
    )
    return Coded(parts, whole.block)


class Cell:
    def __init__(self, keys: list[Any], values: list[Any], batch: int, length: int) -> None:
        self.keys, self.values = coded(keys, batch, length), coded(values, batch, length)
        self.q = torch.randn(batch, HEADS * RATIO, 1, D, device="cuda").half() * 0.2
        self.blocks = torch.full((batch,), length // BLOCK, dtype=torch.int32, device="cuda")
        self.space = fused.Workspace(self.q.device)
        self.k = torch.empty(batch, HEADS, length, D, dtype=torch.float16, device="cuda")
        self.v = torch.empty_like(self.k)
        self.bytes = sum(band.codes.nbytes for side in (self.keys, self.values) for band in side.bands)

    def fused(self, launch: fused.Launch) -> tuple[Tensor, Tensor]:
        return fused.attend(self.q, self.keys, self.values, self.blocks, D**-0.5, self.space, launch)

    def one_pass(self) -> None:
        fused.decode(self.keys, out=self.k)
        fused.decode(self.values, out=self.v)

    def by_torch(self) -> None:
        self.k.copy_(reference.decode(self.keys))
        self.v.copy_(reference.decode(self.values))

    def attend(self) -> Tensor:
        return F.scaled_dot_product_attention(self.q, self.k, self.v, enable_gqa=True)

    def errors(self, launch: fused.Launch) -> Row:
        """Of the first row, relative to float64: fused, the same attention in float16, and decoding in one pass."""
        keys, values, q = row_of(self.keys, 0), row_of(self.values, 0), self.q[:1]
        exact, log = reference.attend(q.double(), keys, values, self.blocks[:1], D**-0.5)
        same = reference.attend(q, keys, values, self.blocks[:1], D**-0.5)[0]
        for _ in range(2):  # the second one finds what the first one left
            out, found = self.fused(launch)
        again = self.fused(launch)[0]
        self.one_pass()
        decoded = reference.decode(keys).double()
        return {
            "error": off(out[:1], exact), "error_float16": off(same, exact),
            "error_log": float((found[:1].double() - log).abs().max()), "same_bits": torch.equal(out, again),
            "error_decode": off(self.k[:1], decoded), "error_decode_float16": off(decoded.half(), decoded),
        }  # fmt: skip


class Step:
    """A step that appends, of rows that have a sink, a full window and no block yet. of: the first row of another."""

    def __init__(self, keys: list[Any], values: list[Any], batch: int, due: bool, of: Step | None = None) -> None:
        self.keys, self.values = coded(keys, batch, 4 * BLOCK), coded(values, batch, 4 * BLOCK)
        room, self.flags = WINDOWS.ring_capacity(1), torch.zeros(HEADS, dtype=torch.int32, device="cuda")
        sizes = (WINDOWS.sink, WINDOWS.sink, room, room, 1, 1)
        self.exact = [torch.randn(batch, HEADS, tokens, D, device="cuda").half() for tokens in sizes]
        if of is not None:
            self.exact = [x[:1].contiguous() for x in of.exact]
        self.counts, self.space = Counts(batch, WINDOWS, "cuda"), fused.Workspace(self.flags.device)
        self.counts.data[0], self.counts.data[4], self.counts.data[6] = WINDOWS.sink, WINDOWS.sink, WINDOWS.recent
        self.counts.data[6] += WINDOWS.block - 1 if due else 0
        counting.advance(self.counts, torch.ones(batch, dtype=torch.int32, device="cuda"))

    def run(self, by: Any = None) -> None:
        sk, sv, rk, rv, k, v = self.exact
        given = self.keys, self.values, (sk, sv), (rk, rv), self.counts, self.flags, k, v
        if by is None:
            vq_append.fast().append(*given, self.space)
        else:
            by.append(*given)

    def error(self, role: int) -> float:
        """Squared, of the first row's first block."""
        found = reference.decode(row_of((self.keys, self.values)[role], 0))[:, :, :BLOCK]
        return float((found - self.exact[2 + role][:1, :, :BLOCK].float()).square().sum())


def measure_append(clock: Clock, sizes: str, own: Any, batch: int, due: bool) -> Row:
    step = Step(*own, batch, due)
    row: Row = {"operation": f"append {'due' if due else 'idle'}", "scheme": sizes, "batch": batch, "error": None}
    row["microseconds"] = clock.time(step.run, 21).microseconds
    if due:
        wanted = Step(*own, 1, due, step)
        wanted.run(vq_append)
        row["error"] = max(step.error(role) / wanted.error(role) for role in (0, 1))
        row["microseconds"] = row["microseconds"] if row["error"] < 1.001 else None
    stages = [(book.shape[0] * book.shape[1], len(dims)) for side in own for book, dims in side]
    row["flops"] = 2 * batch * HEADS * BLOCK * sum(count * width for count, width in stages) if due else 0
    taken = "WRONG" if row["microseconds"] is None else f"{row['microseconds']:.1f} us"
    rate = f", {row['flops'] / row['microseconds'] / 1e6:.0f} TFLOP/s" if due and row["microseconds"] else ""
    error = f", squared error {row['error']:.6f} times that of the reference's codes" if due else ""
    print(f"{sizes:5} {row['operation']} {batch}: {taken}{rate}{error}", flush=True)
    return row


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def fastest(clock: Clock, cell: Cell) -> tuple[str, float]:
    found = {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = clock.time(cell.attend).microseconds
        except RuntimeError as error:
            print(f"  sdpa {name}: {str(error).splitlines()[0][:80]}", file=sys.stderr)
    return min(found.items(), key=lambda item: item[1])


def parts(run: Callable[[], Any]) -> dict[str, float]:
    """Microseconds by kernel, of one call with a warm L2; empty where the profiler does not run."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        return {e.key: round(e.device_time_total, 1) for e in profile.key_averages() if e.device_time_total > 0}
    except Exception as error:
        print(f"  profiler: {type(error).__name__} {str(error)[:80]}", file=sys.stderr)
        return {}


def measure(clock: Clock, sizes: str, cell: Cell, batch: int, length: int, launches: list[fused.Launch]) -> Row:
    row: Row = {"operation": "vq attention", "scheme": sizes, "batch": batch, "length": length}
    tried = sorted(
        ((clock.time(lambda launch=launch: cell.fused(launch)).microseconds, launch) for launch in launches),  # type: ignore[misc]
        key=lambda each: each[0],
    )
    taken, launch = tried[0]
    row |= cell.errors(launch)
    right = row["error"] <= 2 * row["error_float16"] and row["error_log"] < 1e-2 and row["same_bits"]
    right = right and row["error_decode"] <= 2 * row["error_decode_float16"]
    row |= {"launch": vars(launch), "tried": [[round(t, 1), *vars(each).values()] for t, each in tried]}
    row |= {"workspace_bytes": cell.space.nbytes, "code_bytes": cell.bytes}
    row["microseconds"] = taken if right else None
    row["backend"], row["sdpa_microseconds"] = fastest(clock, cell)
    row["decode_microseconds"] = clock.time(cell.one_pass).microseconds
    row["ratio_to_one_pass"] = (row["decode_microseconds"] + row["sdpa_microseconds"]) / taken
    row["parts"] = parts(lambda: cell.fused(launch))
    if batch * length <= 1 << 17:
        row["torch_decode_microseconds"] = Clock(clock.device, 3, 0.5).time(cell.by_torch).microseconds
        row["ratio_to_torch"] = (row["torch_decode_microseconds"] + row["sdpa_microseconds"]) / taken
    row["fraction_of_copy"] = cell.bytes / clock.copy_bandwidth() * 1e6 / taken
    return row


def show(row: Row) -> None:
    what = f"{row['scheme']:5} {row['batch']} x {row['length']}"
    said = f"error {row['error']:.1e} (float16 {row['error_float16']:.1e}), decode {row['error_decode']:.1e}"
    if not row["microseconds"]:
        print(f"{what}: WRONG, {said}, log {row['error_log']:.1e}, same bits {row['same_bits']}", flush=True)
        return
    torchs = f", torch's decode {row['torch_decode_microseconds']:.0f}" if "torch_decode_microseconds" in row else ""
    print(
        f"{what}: fused {row['microseconds']:.1f} us, of copy (codes alone) {row['fraction_of_copy']:.3f}; one-pass "
        f"decode {row['decode_microseconds']:.1f} us + sdpa {row['backend']} {row['sdpa_microseconds']:.1f}: x "
        f"{row['ratio_to_one_pass']:.2f} (wanted 3 at 4k){torchs}; workspace {row['workspace_bytes'] / 1e6:.0f} MB, "
        f"{said}, "
        f"{row['tried']}",
        flush=True,
    )
    for kernel, taken in row["parts"].items():
        print(f"      {taken:8.1f} us {kernel[:60]}")


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
    result: Row = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(
        f"{result['device']}, torch {torch.__version__}, triton {triton.__version__}, copy "
        f"{clock.copy_bandwidth() / 1e12:.2f} TB/s",
        flush=True,
    )
    result["rows"], held, own = [], "", ([], [])

    def books_of(sizes: str) -> tuple[list[Any], list[Any]]:
        low, high, value = SIZES[sizes]
        return bands([low, high], list(BANDS)), bands([value], [[*range(D)]])

    for sizes, batch, length in CELLS:
        if time.time() - began > chosen.seconds:
            print(f"{sizes:5} {batch} x {length}: not measured, {chosen.seconds:g} s are over", flush=True)
            continue
        try:
            if sizes != held:
                own, held = books_of(sizes), sizes
            launches = LAUNCHES if (batch, length) == CELLS[0][1:] else LAUNCHES[:2]
            row = measure(clock, sizes, Cell(*own, batch, length), batch, length, launches)
        except Exception as error:
            print(f"{sizes:5} {batch} x {length}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            torch.cuda.empty_cache()
            continue
        show(row)
        result["rows"].append(row)
        torch.cuda.empty_cache()
        Path(chosen.out, "vq_attention.json").write_text(json.dumps(result | {"ceilings": clock.ceilings}, indent=1))
    for sizes, batch in APPENDED:
        if sizes != held:
            own, held = books_of(sizes), sizes
        for due in (False, True):
            result["rows"].append(measure_append(clock, sizes, own, batch, due))
        Path(chosen.out, "vq_attention.json").write_text(json.dumps(result | {"ceilings": clock.ceilings}, indent=1))
    print(f"{time.time() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
