"""Decode attention over pages beside that over contiguous blocks, on a GPU in one run: one layer of Llama-3.1-8B geometry
(32 query heads, 8 kv heads, head_dim 128), random data, all tokens packed, pages in random order.

    PYTHONPATH=.:kernels:artifacts python docs/benchmarks/paged_attention.py [--out DIR] [--formats A,B]
        [--shapes BxN,...] [--parts 1,4,store]
    PYTHONPATH=... python docs/benchmarks/paged_attention.py --dry-run [--formats A,B]

Kernels are compared first, each part of a format in a process of its own: pages against blocks, and both against the
float32 reference; nothing is timed that does not agree. Those processes also launch each kernel once at the sizes to be
timed, so that the compiled code is in Triton's cache. The file is written after each row: what a limit cuts off is the
rest. Parts: attention of 1 query a row, over pages and blocks; of 4 over pages; stores of new tokens. --dry-run takes all
steps in Triton's interpreter, with tiny sizes; what it prints are no times of a GPU.
Times are CUDA events, the L2 flushed, medians of passes in turns; beside them the fraction of the bandwidth of a copy
(bytes read plus bytes written) in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from kvcal.bench.timing import Clock
from kvcal_artifacts.codecs.higgs_grids import gaussian_grid
from kvcal_artifacts.files import write_atomically
from kvcal_kernels.attention import reference, transform
from kvcal_kernels.attention import triton as fused
from kvcal_kernels.hadamard import signs
from kvcal_kernels.layout import (
    BLOCK,
    AnyBlocks,
    Basis,
    Blocks,
    Form,
    PageForm,
    TransformBlocks,
    TransformForm,
    grid_of,
    move_blocks,
)
from kvcal_kernels.layout.transform import PAIR_BYTES
from kvcal_kernels.quantise import GridRule, Rule
from kvcal_kernels.quantise import pages as store
from kvcal_kernels.quantise.pages import TransformRule
from kvcal_kernels.triton import interpreted

HEADS, RATIO, DIM = 8, 4, 128
MIXES = {2.0: (8, 14, 20, 14), 2.5: (16, 18, 16, 10), 3.0: (26, 21, 11, 3), 4.0: (64, 0, 0, 0)}  # pairs of 4 to 1 bits
FORMATS: dict[str, tuple[Any, Any]] = {
    **{f"transform {b}": (TransformForm("key", DIM, m), TransformForm("value", DIM, m)) for b, m in MIXES.items()},
    "HIGGS 2": (Form("key", DIM, 2, vector=2), Form("value", DIM, 2, vector=2)),
    "HIGGS 4": (Form("key", DIM, 4, vector=2), Form("value", DIM, 4, vector=2)),
    "TurboQuant 4/3": (Form("key", DIM, 4, vector=1), Form("value", DIM, 3, vector=1)),
    "uniform 4/4": (Form("key", DIM, 4, 32), Form("value", DIM, 4, 32, False, False)),
}
PARTS = ("1", "4", "store")  # queries of a row, or stores of new tokens
STORED = (32, 2048)  # new tokens of a store
COMPARED = (2, 544)  # those compared with the reference
LENGTH, DRY_LENGTH = 2048, 96  # of a row where kernels are compared
DRY_SHAPES = "2x96"
MOST_STORED = 4e-3  # share of bytes that may differ
GOAL = 1.05  # of the time over contiguous blocks
DEVICE = torch.device("cpu" if interpreted() else "cuda")


def random_blocks(form: Any, batch: int, count: int) -> AnyBlocks:
    """Random codes: what a time and an error depend on is there."""
    if isinstance(form, TransformForm):
        return transform_blocks(form, batch, count)
    words = torch.randint(-(1 << 15), 1 << 15, (batch, HEADS, count, form.words), dtype=torch.int16, device=DEVICE)
    scale = (torch.rand(batch, HEADS, count, form.scales, device=DEVICE) + 0.5).half()
    if not form.vector:
        return Blocks(form, words, scale / (1 << form.bits))
    points = gaussian_grid(form.vector, 1 << form.bits * form.vector).half().float()
    return Blocks(form, words, scale, grid_of(points, signs(HEADS * DIM, 1).view(HEADS, DIM), form.bits).to(DEVICE))


def transform_blocks(form: TransformForm, batch: int, count: int) -> TransformBlocks:
    """Random codes of a random basis."""
    sizes = [(2 * n, 4) if b == 1 else (n, PAIR_BYTES[b]) for b, n in form.tiers]
    codes = tuple(
        torch.randint(0, 256, (batch, HEADS, count, *size), dtype=torch.uint8, device=DEVICE) for size in sizes
    )
    points = {b: gaussian_grid(2, 1 << 2 * b).half().float().to(DEVICE) for b in (4, 3, 2)}
    points[1] = torch.tensor([[-0.8], [0.8]], device=DEVICE)
    decoder = (torch.randn(HEADS, DIM, DIM, device=DEVICE) * DIM**-0.5).half()
    basis = Basis(decoder, torch.randn(HEADS, DIM, device=DEVICE).half() / 2, points, dict.fromkeys(points, 1.0))
    norm = (torch.rand(batch, 1, count, BLOCK, device=DEVICE) + 0.5).half()
    return TransformBlocks(form, codes, norm, basis)


def cell(name: str, batch: int, length: int) -> tuple[Any, ...]:
    """Keys and values in blocks, the same in pages, and how the pages lie."""
    count = length // BLOCK
    keys, values = (random_blocks(form, batch, count) for form in FORMATS[name])
    if isinstance(keys, Blocks) and isinstance(values, Blocks) and keys.form.bits == values.form.bits:
        values = replace(values, grid=keys.grid)  # of one grid: one table in shared memory
    form = PageForm(keys.form, values.form)
    table = torch.randperm(batch * count, device=DEVICE).view(batch, count).int()
    pages = form.empty(batch * count, HEADS, DEVICE)
    for row in range(batch):
        move_blocks(pages, form, one_row(keys, row), one_row(values, row), table[row : row + 1])
    return keys, values, pages, form, table


def one_row(blocks: AnyBlocks, row: int) -> AnyBlocks:
    at = slice(row, row + 1)
    if isinstance(blocks, Blocks):
        return Blocks(blocks.form, blocks.words[at], blocks.scale[at], blocks.grid)
    return TransformBlocks(blocks.form, tuple(c[at] for c in blocks.codes), blocks.norm[at], blocks.basis)


def kernels_of(keys: AnyBlocks) -> Any:
    return fused if isinstance(keys, Blocks) else transform()


def over_blocks(q: Tensor, keys: AnyBlocks, values: AnyBlocks) -> tuple[Any, ...]:
    """Arguments of attention over blocks: no exact tokens. q (B, Hq, 1, D)."""
    batch, count = keys.words.shape[0], keys.words.shape[2]
    exact = [torch.zeros(batch, HEADS, BLOCK, DIM, dtype=q.dtype, device=DEVICE) for _ in (0, 1)]
    none = (*exact, torch.zeros(batch, dtype=torch.int32, device=DEVICE))
    return q, keys, values, torch.full((batch,), count, dtype=torch.int32, device=DEVICE), none, none, DIM**-0.5


def over_pages(q: Tensor, keys: Any, values: Any, pages: Tensor, form: PageForm, table: Tensor) -> tuple[Any, ...]:
    """Arguments of attention over pages. q (B, Q, Hq, D)."""
    batch, queries = q.shape[:2]
    lengths = torch.full((batch,), table.shape[1] * BLOCK, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * queries
    constants = [x.grid if isinstance(x, Blocks) else x.basis for x in (keys, values)]
    return q.flatten(0, 1), pages, form, table, lengths, starts, DIM**-0.5, *constants


def rules_of(keys: AnyBlocks, values: AnyBlocks) -> list[Any]:
    """How new tokens are coded for pages of such blocks."""
    rules: list[Any] = []
    for x in (keys, values):
        if isinstance(x, TransformBlocks):
            encoder = torch.linalg.inv(x.basis.decoder.float())[..., : x.form.coded].contiguous()
            points = {bits: x.basis.points[bits] for bits, _ in x.form.tiers if bits > 1}
            rules.append(TransformRule(x.form, encoder, x.basis.mean, points))
        elif x.grid is not None:
            rules.append(GridRule(x.form, x.grid))
        else:
            rules.append(Rule(x.form, "symmetric" if x.form.symmetric else "asymmetric"))
    return rules


def new_tokens(count: int, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and slots: of a row each, or of one row, in order, where they are more."""
    k, v = (torch.randn(count, HEADS, DIM, device=DEVICE).half() for _ in (0, 1))
    if count <= len(table):
        return k, v, table[:count, table.shape[1] // 2].long() * BLOCK + torch.arange(count, device=DEVICE) % BLOCK
    return k, v, (table.flatten()[: count // BLOCK, None] * BLOCK + torch.arange(BLOCK, device=DEVICE)).flatten().long()


def stored(keys: AnyBlocks, values: AnyBlocks, pages: Tensor, form: PageForm, table: Tensor) -> float:
    """The share of bytes that the store kernel and its reference store differently: of the transform codec some, as its
    coordinates are of another matrix product.
    """
    rules, shares = rules_of(keys, values), []
    for count in COMPARED[: 1 if interpreted() else 2]:
        k, v, slots = new_tokens(count, table)
        actual, expected = pages.clone(), pages.clone()
        store.fast().store(k, v, actual, form, slots, *rules)
        store.store(k, v, expected, form, slots, *rules)
        shares.append(float((actual != expected).sum() / (count * HEADS * form.token_bytes)))
    return max(shares)


def off(x: Tensor, exact: Tensor) -> float:
    return float((x.float() - exact).norm() / exact.norm())


def agree(name: str, part: str) -> dict[str, float]:
    """Errors against float32: of the kernel over pages, of that over blocks, of the reference in float16; or the share
    of bytes that are stored differently.
    """
    torch.manual_seed(0)
    keys, values, *paged = cell(name, 2, DRY_LENGTH if interpreted() else LENGTH)
    if part == "store":
        return {"stored": stored(keys, values, *paged)}
    queries = int(part)
    q = torch.randn(2, queries, HEADS * RATIO, DIM, device=DEVICE).half()
    arguments = over_pages(q, keys, values, *paged)
    exact = reference.attend_pages(arguments[0].float(), *arguments[1:])
    errors = {"pages": off(kernels_of(keys).attend_pages(*arguments, queries), exact)}
    errors["float16"] = off(reference.attend_pages(*arguments), exact)
    if queries == 1:
        out = kernels_of(keys).attend(*over_blocks(q.transpose(1, 2).contiguous(), keys, values))
        errors["blocks"] = off(out.transpose(1, 2).flatten(0, 1), exact)
    return errors


def within(errors: dict[str, float]) -> bool:
    """Whether errors are at most twice those of float16, and stored bytes are those of the reference."""
    if "stored" in errors:
        return errors["stored"] <= MOST_STORED
    return max(errors.values()) <= 2 * errors["float16"] + 2.0**-11


def launches(name: str, batch: int, length: int, parts: list[str]) -> tuple[dict[str, Any], int]:
    """What is timed of a format, by name, and the bytes of its pages."""
    keys, values, *paged = cell(name, batch, length)
    runs: dict[str, Any] = {}
    for part in parts:
        if part == "store":
            rules = rules_of(keys, values)
            for count in STORED:
                if count <= batch * length:
                    k, v, slots = new_tokens(count, paged[2])
                    runs[f"store {count}"] = partial(store.fast().store, k, v, *paged[:2], slots, *rules)
            continue
        queries = int(part)
        q = torch.randn(batch, queries, HEADS * RATIO, DIM, device=DEVICE).half()
        if queries == 1:
            over = over_blocks(q.transpose(1, 2).contiguous(), keys, values)
            runs["blocks"] = partial(kernels_of(keys).attend, *over, None, fused.Workspace(DEVICE))
        arguments = over_pages(q, keys, values, *paged)
        runs[f"pages, {queries}"] = partial(
            kernels_of(keys).attend_pages, *arguments, queries, workspace=fused.Workspace(DEVICE),
            out=torch.empty_like(arguments[0]),
        )  # fmt: skip
    return runs, paged[0].numel()


def timed(name: str, batch: int, length: int, parts: list[str], clock: Clock, copy: float) -> dict[str, Any]:
    runs, size = launches(name, batch, length, parts)
    passes: dict[str, list[float]] = {run: [] for run in runs}
    for _ in range(1 if interpreted() else 3):
        for run, function in runs.items():
            passes[run].append(clock.time(function).microseconds)
    taken = {run: statistics.median(times) for run, times in passes.items()}
    row = {"format": name, "batch": batch, "length": length, "microseconds": taken, "passes": passes, "bytes": size}
    text = ", ".join(f"{run} {time:.1f} us" for run, time in taken.items())
    if "blocks" in taken:
        row["pages_over_blocks"] = taken["pages, 1"] / taken["blocks"]
        row["fraction_of_copy"] = size / taken["pages, 1"] * 1e6 / copy
        text += f"; pages / blocks {row['pages_over_blocks']:.3f}, {row['fraction_of_copy']:.2f} of copy bandwidth"
    print(f"{name}, {batch} x {length}: {text}", flush=True)
    return row


def checked(name: str, part: str, shapes: list[tuple[int, int]]) -> dict[str, float]:
    """Errors of a part, after one launch at each size that is timed."""
    errors = agree(name, part)
    for batch, length in shapes:
        for function in launches(name, batch, length, [part])[0].values():
            function()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return errors


def errors_of(formats: list[str], parts: list[str], shapes: str, dry: list[str]) -> dict[str, dict[str, Any]]:
    """Of each format and part, worked out in a process of its own; None where that failed."""

    def one(name: str, part: str) -> Any:
        arguments = ["--check", name, "--parts", part, "--shapes", shapes, *dry]
        done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=False)
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        begun = {(name, part): pool.submit(one, name, part) for part in parts for name in formats}
        return {name: {part: begun[name, part].result() for part in parts} for name in formats}


def shapes_of(text: str) -> list[tuple[int, int]]:
    shapes = [(int(batch), int(length)) for batch, length in (one.split("x") for one in text.split(","))]
    if any(length % BLOCK or min(batch, length) < 1 for batch, length in shapes):
        raise ValueError(text)
    return shapes


def formats_of(text: str) -> list[str]:
    formats = text.split(",")
    if unknown := [name for name in formats if name not in FORMATS]:
        raise argparse.ArgumentTypeError(f"no format {unknown[0]!r}: there are {', '.join(FORMATS)}")
    return formats


def parts_of(text: str) -> list[str]:
    parts = text.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}: there are {', '.join(PARTS)}")
    return parts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="a folder for paged_attention.json")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a cell's passes, at most")
    parser.add_argument("--formats", type=formats_of, default=list(FORMATS), help="which, with commas between")
    parser.add_argument("--shapes", type=shapes_of, default="32x32768,8x32768", help="BATCHxTOKENS, with commas")
    parser.add_argument("--parts", type=parts_of, default=list(PARTS), help="1, 4 (queries a row), store")
    parser.add_argument("--dry-run", action="store_true", help="all steps in the interpreter, tiny sizes, no GPU")
    parser.add_argument("--check", help="a format: compare a part's kernels with the reference, print errors, end")
    options = parser.parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    if options.dry_run and not interpreted():
        sys.exit(subprocess.run([sys.executable, *sys.argv], env={**os.environ, "TRITON_INTERPRET": "1"}).returncode)
    if not (options.dry_run or torch.cuda.is_available()):
        parser.error("needs a CUDA GPU, and torch finds none here: --dry-run does without")
    shapes = shapes_of(DRY_SHAPES) if options.dry_run else options.shapes
    if options.check:
        print(json.dumps(checked(options.check, *options.parts, shapes)))
        return
    text = ",".join(f"{batch}x{length}" for batch, length in shapes)
    errors = errors_of(options.formats, options.parts, text, ["--dry-run"] if options.dry_run else [])
    print("errors against float32:", errors, flush=True)
    failed = [n for n, of in errors.items() if not all(e is not None and within(e) for e in of.values())]
    clock = Clock(DEVICE, repeats=21, seconds=0 if options.dry_run else options.seconds)
    copy = clock.copy_bandwidth()
    device = "interpreter" if options.dry_run else torch.cuda.get_device_name()
    result = {"errors": errors, "failed": failed, "copy_bandwidth": copy, "device": device,
              "torch": torch.__version__, "triton": triton.__version__}  # fmt: skip
    rows: list[dict[str, Any]] = []
    for batch, length in shapes:
        for name in options.formats:
            if name not in failed:
                rows.append(timed(name, batch, length, options.parts, clock, copy))
                text = json.dumps(result | {"rows": rows}, indent=1)
                write_atomically(Path(options.out, "paged_attention.json"), text.encode())
    slow = [f"{r['format']}, {r['batch']} x {r['length']}" for r in rows if r.get("pages_over_blocks", 0) > GOAL]
    note = " (no GPU: nothing was timed)" if options.dry_run else ""
    print(f"within {GOAL} of blocks: {len(rows) - len(slow)} of {len(rows)} cells; not: {slow}{note}")
    if failed:
        sys.exit(f"kernels that do not agree with the reference: {failed}; they were not timed")


if __name__ == "__main__":
    main()
