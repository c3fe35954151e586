"""Time of fused decode attention on a GPU: one layer of Llama-3.1-8B geometry (32 query heads, 8 kv heads, D = 128).

    PYTHONPATH=.:kernels:artifacts python docs/benchmarks/decode_attention.py [--out DIR] [--all-launches] [--schemes 2/2,Base]

The launch that is chosen for a cell is compared with the float32 reference before it is timed, other launches with that
one; what fails gets no time. Random data, L2 flushed before each run, CUDA events, medians of 21, of which each cell
has one in every pass over all of them, there and back; its time is the median of these, and the GPU's clock is read
beside them. The file is written after each pass; passes end after --seconds. Copy bandwidth is measured in the same
run, the FP16 peers before the first pass and behind the last one, of which the smaller time counts: all backends of
torch, with grouped heads and with a kv head's query heads as rows, and FlashInfer where it is installed
(kvcal.bench.peers). Two minutes on an H200.

bytes: what a call must read, packed blocks with their scales, 32 sink and 96 recent tokens in FP16. copy bandwidth:
bytes read plus bytes written, over the time of a large copy. fraction: bytes over copy bandwidth, over the time taken;
1 is the speed of memory, 281 us at 32 x 32768, 4.5 bits, 4.3 TB/s. bare read: what the fastest of some launches
(READERS) takes of a kernel that adds up so many bytes and does nothing else; it is timed in every pass, too.

Kernels are compiled first, then cells are measured in the order of the table, each with at most --cell-seconds of
trying launches; cells that have not begun after --seconds are named and left out.

--programs COUNTS: only, with so many programs a kv head, every scheme at 32 x 32768, and the first one at each of
CELLS: as usual, with exact tokens in programs of their own, and merged in one round.

--shared PERCENTS: only, every scheme at 32 x 32768, with so much of a multiprocessor's memory preferred as shared
memory (-1: as the driver likes), and how many programs it says that a multiprocessor then runs.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kvcal.bench import peers
from kvcal.bench.layer import Case, angles
from kvcal.bench.measure import fp16_scheme
from kvcal.bench.timing import Clock
from kvcal.models import configuration, names
from kvcal_artifacts.files import write_atomically
from kvcal_kernels.attention import plan, reference
from kvcal_kernels.attention import triton as fused
from kvcal_kernels.layout import Blocks, Form, Rope, decode, grid_of, grids, rope
from kvcal_kernels.triton import examined

GEOMETRY = configuration.geometry(names.resolve("llama-3.1-8b"))
HEADS, RATIO, D = GEOMETRY.kv_heads, GEOMETRY.heads // GEOMETRY.kv_heads, GEOMETRY.head_dim
REPEATS = 21
SINK, RECENT = 32, 96
SCHEMES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], float]] = {  # key and value form, fraction wanted
    "uniform 4/4": ((4, 32, True, True), (4, 32, True, True), 0.92),
    "InnerQ Base 3/3": ((3, 32, True, True), (3, 32, True, True), 0.88),
    "InnerQ Hybrid": ((3, 32, True, True), (2, 32, True, False), 0.82),
    "InnerQ Small": ((3, 32, True, True), (2, 32, True, True), 0.82),
    "uniform 2/2": ((2, 32, True, True), (2, 32, True, True), 0.80),
    "KIVI 2/2 G=32": ((2, 32, False, False), (2, 32, False, False), 0.78),
    "KIVI 2/2 before RoPE": ((2, 32, False, False), (2, 32, False, False), 0.65),  # as SQuat before RoPE is stored
    "KIVI 2/2 G=128": ((2, 128, False, False), (2, 128, False, False), 0.75),
    "TurboQuant 4/3": (("grid", 4, 1, 1), ("grid", 3, 1, 1), 0.65),  # norms per head
    "HIGGS 2": (("grid", 2, 2, 1), ("grid", 2, 2, 1), 0.65),
    "TurboQuant 4/3 in bytes": (("bytes", 4, 1, 1), ("bytes", 3, 1, 1), 0.65),
    "HIGGS 2 in bytes": (("bytes", 2, 2, 1), ("bytes", 2, 2, 1), 0.65),
    "HIGGS 3": (("grid", 3, 2, 1), ("grid", 3, 2, 1), 0.65),
    "HIGGS 4": (("grid", 4, 2, 1), ("grid", 4, 2, 1), 0.65),
    "MixKVQ G=32": (("tiers", 32, 16, 16), (2, 32, False, False), 0.65),  # of 128 channels 16 exact, 16 of 4 bits
    "MixKVQ G=128": (("tiers", 128, 16, 16), (2, 128, False, False), 0.65),
    "HIGGS 3, InnerQ 3": (("grid", 3, 2, 1), (3, 32, True, True), 0.65),
}
CELLS = [(1, 4096), (1, 32768), (1, 131072), (8, 32768), (32, 4096)]
# of `bare_read`: warps, loads of 16 bytes a thread at a time, programs a multiprocessor
READERS = [(2, 2, 16), (2, 4, 16), (4, 2, 16), (4, 4, 8), (8, 4, 4), (8, 4, 8), (8, 2, 2), (8, 2, 4)]
# what --all-launches tries beside those that caches make: warps, registers, turns of a program at most
OTHERS = [(warps, registers, turns) for warps in (1, 4) for registers in (128, 152, 168) for turns in (40, 60, 96)]


def form(role: Any, settings: tuple[Any, ...]) -> Form:
    if settings[0] in ("grid", "bytes"):
        kind, bits, vector, norm_heads = settings
        return Form(role, D, bits, vector=vector, norm_heads=norm_heads, in_bytes=kind == "bytes")
    if settings[0] == "tiers":
        _, group, full, four = settings
        return Form(role, D, 2, group, False, False, full=full, four=four)
    bits, group, inner, symmetric = settings
    return Form(role, D, bits, group, inner, symmetric)


def launches_of(scheme: str, batch: int, length: int, more: bool = False) -> list[fused.Launch]:
    """The launch that is chosen there; with `more` others behind it."""
    key, value, _ = SCHEMES[scheme]
    about = form("key", key), form("value", value), RATIO, scheme.endswith("before RoPE")
    own = fused.chosen(*about, batch * HEADS, room_of(length), torch.device("cuda"))
    others = [
        *fused.launches(*about),
        *(replace(own, warps=w, registers=r, iterations=n, merge_rate=0) for w, r, n in OTHERS),
    ]
    return [own, *(each for each in others if each != own)] if more else [own]


def room_of(length: int) -> int:
    return -(-((length - SINK - RECENT) // 32) // 4) * 4


def random_blocks(made: Form, batch: int, count: int, twin: Blocks | None = None) -> Blocks:
    """Any word is a valid one. Scales such that a number's standard deviation is about 1. Points of a grid are random
    too; twin: blocks of the same grid, if they are.
    """
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (batch, HEADS, count, made.words // 4), device="cuda")
    if made.vector:
        points = torch.randn(1 << made.bits * made.vector, made.vector, device="cuda").half().float()
        if made.in_bytes:
            points = (points / points.abs().max() * grids.LARGEST).round() / 64
        own = twin.grid if twin and twin.form.vector == made.vector and twin.form.bits == made.bits else None
        sign = torch.randint(0, 2, (HEADS, D), device="cuda", dtype=torch.int8) * 2 - 1
        grid = grid_of(own.points if own else points, sign, made.bits, own, made.in_bytes)
        norm = torch.rand((batch, HEADS // made.norm_heads, count, made.scales), device="cuda") + 0.5
        return Blocks(made, words.view(torch.int16), norm.half(), grid)
    shape = (batch, HEADS, -(-count // made.scale_blocks), made.scales)
    scale = (torch.rand(shape, device="cuda") + 0.5) * 3.4 / 2**made.bits
    order = None
    if made.tiered:
        words = words.view(torch.int16)
        words[..., : 32 * made.full].copy_(
            torch.randn(words[..., : 32 * made.full].shape, device="cuda").half().view(torch.int16)
        )
        order = torch.rand(*shape[:3], D, device="cuda").argsort(-1).to(torch.uint8)
    if not made.symmetric:
        zeros = scale.unflatten(-1, (-1, 2))[..., 1:] if made.inner else scale.unflatten(-1, (-1, 4))[..., 2:]
        zeros.copy_(torch.randn_like(zeros) * 0.2 - 1.7)
    return Blocks(made, words.view(torch.int16), scale.half(), None, order)


class Cell:
    """Random inputs of one scheme, batch and length."""

    def __init__(self, scheme: str, batch: int, length: int, dtype: torch.dtype = torch.float16) -> None:
        self.scheme, (key, value, self.wanted) = scheme, SCHEMES[scheme]
        self.own = launches_of(scheme, batch, length)[0]
        count = (length - SINK - RECENT) // 32
        room = room_of(length)
        self.keys = random_blocks(form("key", key), batch, room)
        self.values = random_blocks(form("value", value), batch, room, self.keys)
        self.q = torch.randn(batch, HEADS * RATIO, 1, D, device="cuda", dtype=dtype)
        self.blocks = torch.full((batch,), count, dtype=torch.int32, device="cuda")
        self.sink, self.recent = (self._exact(batch, room, dtype) for room in (SINK, RECENT))
        pair = (
            self.keys.form.stored_bits + self.values.form.stored_bits
        ) / 8  # bytes of a number of keys and one of values
        self.bytes = batch * HEADS * D * (count * 32 * pair + (SINK + RECENT) * 2 * self.q.itemsize)
        self.space = fused.Workspace(self.q.device)
        self.rope = turns(SINK, room, RECENT) if scheme.endswith("before RoPE") else None

    @staticmethod
    def _exact(batch: int, room: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = (torch.randn(batch, HEADS, room, D, device="cuda", dtype=dtype) for _ in range(2))
        return keys, values, torch.full((batch,), room, dtype=torch.int32, device="cuda")

    def run(self, launch: fused.Launch | None) -> Tensor:
        given = self.q, self.keys, self.values, self.blocks, self.sink, self.recent, D**-0.5
        return fused.attend(*given, launch, self.space, rope=self.rope)

    def errors(self, launch: fused.Launch) -> tuple[float, float]:
        """Relative errors against float32 of the kernel, and of attention in q's dtype over the decoded blocks, of the
        first and the last row.
        """
        out, found = self.run(launch), []
        for row in {0, len(self.q) - 1}:
            here = slice(row, row + 1)
            keys, values = (
                Blocks(b.form, b.words[here], b.scale[here], b.grid, None if b.order is None else b.order[here])
                for b in (self.keys, self.values)
            )
            sink, recent = (tuple(t[here] for t in part) for part in (self.sink, self.recent))
            q, count = self.q[here], self.blocks[here]
            exact = reference.attend(q.float(), keys, values, count, sink, recent, D**-0.5, rope=self.rope)
            tokens = int(count) * 32
            k, v = (
                torch.cat([a, decode(b)[:, :, :tokens].to(q.dtype), c], 2)
                for a, b, c in ((sink[0], keys, recent[0]), (sink[1], values, recent[1]))
            )
            if self.rope is not None:
                k = rotated(k)
            plain = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            found.append([float((o.float() - exact).norm() / exact.norm()) for o in (out[here], plain)])
        return max(f[0] for f in found), max(f[1] for f in found)


def turns(sink: int, blocks: int, recent: int) -> Rope:
    """Of rows that begin at position 0."""
    first = angles(rope.first_positions(torch.zeros(1, device="cuda"), sink, blocks, recent), D)
    near = angles(torch.arange(rope.RUN, device="cuda"), D)
    return Rope(torch.stack([first.cos(), first.sin()], -2), rope.near(near.cos(), near.sin()))


def rotated(keys: Tensor) -> Tensor:
    """Keys of positions 0 and on, by RoPE in their dtype, as a model turns them."""
    angle = angles(torch.arange(keys.shape[2], device="cuda"), D).repeat(1, 2)
    low, high = keys.chunk(2, -1)
    return keys * angle.cos().to(keys.dtype) + torch.cat([-high, low], -1) * angle.sin().to(keys.dtype)


def peers_of(clock: Clock, batch: int, length: int) -> tuple[dict[str, float], dict[str, str]]:
    """Microseconds of FP16 attention by each backend that `kvcal bench` knows, and why others have none."""
    case = Case(fp16_scheme(GEOMETRY), GEOMETRY, batch, length, clock.device, torch.float16)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # why other backends do not run
        found = peers.measure(case, clock)
    if not any(peer.name.startswith("flashinfer") for peer in found):
        found.append(peers.Peer("flashinfer", None, "not installed"))
    taken = {peer.name: peer.timed.microseconds for peer in found if peer.timed}
    return taken, {peer.name: str(peer.why_not) for peer in found if not peer.timed}


BEST: dict[int, tuple[int, int, int]] = {}  # of READERS, by bytes
KERNELS: dict[tuple[str, int], Any] = {}  # of schemes and warps, launches that are chosen, as Triton compiled them


def kernel_of(scheme: str, cell: Cell, launch: fused.Launch) -> Any:
    before = set(map(id, examined()))
    cell.run(launch)
    for made in examined():
        if id(made) not in before:
            KERNELS[scheme, launch.warps] = made
    return KERNELS[scheme, launch.warps]


def by_shared(clock: Clock, schemes: list[str], percents: list[int]) -> None:
    cuda, carveout = ctypes.CDLL("libcuda.so.1"), 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    for scheme in schemes:
        cell, found = Cell(scheme, 32, 32768), []
        launch = cell.own
        made = kernel_of(scheme, cell, launch)
        for percent in percents:
            if error := cuda.cuFuncSetAttribute(ctypes.c_void_p(made.function), carveout, percent):
                raise RuntimeError(f"cuFuncSetAttribute: CUDA error {error}")
            taken = clock.time(partial(cell.run, launch), 9).microseconds
            found.append(f"{percent}: {taken:.1f} ({fused.programs_at_once(made)})")
        print(f"{scheme}, percent of shared memory: us (programs at once): {', '.join(found)}", flush=True)
        del cell
        torch.cuda.empty_cache()


def compile_one(job: tuple[str, fused.Launch]) -> str:
    scheme, launch = job
    try:
        Cell(scheme, 1, 4096).run(launch)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{scheme} {launch}: {type(error).__name__} {str(error)[:200]}"
    return ""


def compile_all(schemes: list[str], more: bool) -> None:
    """Into Triton's cache on disk, a process a core."""
    cells = {scheme: [(32, 32768)] for scheme in schemes}
    cells[schemes[0]] += CELLS
    every = [
        (scheme, each) for scheme in schemes for cell in cells[scheme] for each in launches_of(scheme, *cell, more)
    ]
    # what is compiled follows from these; the rest of a launch is the plan's
    jobs = list({(scheme, each.warps, each.stages, each.registers): (scheme, each) for scheme, each in every}.values())
    workers = max(1, min(len(jobs), (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for said in pool.map(compile_one, jobs):
            if said:
                print(said, file=sys.stderr)


@triton.jit
def read_kernel(p, p_out, words, SIZE: tl.constexpr, UNROLL: tl.constexpr):
    b_sum = tl.zeros([SIZE], tl.int64)
    step = SIZE * UNROLL
    for first in tl.range(tl.program_id(0) * step, words, tl.num_programs(0) * step):
        for i in tl.static_range(UNROLL):
            at = first + i * SIZE + tl.arange(0, SIZE)
            b_sum += tl.load(p + at, mask=at < words, other=0)
    tl.store(p_out + tl.program_id(0), tl.sum(b_sum, 0))


def bare_read(clock: Clock, size: int) -> float:
    """Microseconds for so many bytes, newly allocated, by the launch that was fastest when their number was new."""
    given = torch.randint(-(1 << 60), 1 << 60, (-(-size // 8),), device="cuda")
    processors, right = torch.cuda.get_device_properties().multi_processor_count, given.sum()
    found = {}
    for reader in [BEST[size]] if size in BEST else READERS:
        warps, unroll, programs = reader
        sums = torch.empty(processors * programs, dtype=torch.int64, device="cuda")
        fixed = {"SIZE": 64 * warps, "UNROLL": unroll, "num_warps": warps}
        run = partial(read_kernel[(len(sums),)], given, sums, len(given), **fixed)
        found[reader] = clock.time(run).microseconds
        if not torch.equal(sums.sum(), right):
            raise ValueError(f"a bare read of {size} bytes by {fixed} gave another sum than torch's")
    BEST[size] = min(found, key=lambda reader: found[reader])
    return found[BEST[size]]


def tune(clock: Clock, cell: Cell, launches: list[fused.Launch], seconds: float) -> list[tuple[float, fused.Launch]]:
    """(microseconds, launch), best first; no further ones after so many seconds."""
    found: list[tuple[float, fused.Launch]] = []
    began = time.time()
    right = cell.run(cell.own) if launches else None
    for launch in launches:
        if time.time() - began > seconds:
            print(f"  {seconds:g} s are over: {len(found)} launches were tried", file=sys.stderr)
            break
        try:
            agree(cell, launch, right)
            found.append((clock.time(partial(cell.run, launch), 5).microseconds, launch))
        except Exception as error:
            print(f"  {launch}: {type(error).__name__} {str(error)[:120]}", file=sys.stderr)
    return sorted(found, key=lambda f: f[0])


def agree(cell: Cell, launch: fused.Launch, right: torch.Tensor | None) -> None:
    """ValueError where a launch finds something else than the chosen one, which was compared with the reference."""
    assert right is not None
    difference = float((cell.run(launch).float() - right.float()).norm() / right.float().norm())
    if not difference <= 1e-3:
        raise ValueError(f"{launch}: {difference:.1e} off the chosen launch, at most 1e-3 is allowed")


class Clocks:
    """Of multiprocessors, in MHz, as nvidia-smi says them every 50 ms."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []
        command = ["nvidia-smi", "-i", f"GPU-{torch.cuda.get_device_properties().uuid}", "-lms", "50"]
        command += ["--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
        if shutil.which(command[0]):
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            atexit.register(self.process.terminate)
            threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            if line.strip().isdigit():
                self.seen.append((time.time(), int(line)))

    def since(self, began: float) -> list[int] | None:
        """Lowest and highest from 50 ms before that moment."""
        found = [mhz for when, mhz in self.seen if when >= began - 0.05]
        return [min(found), max(found)] if found else None


def timed(clock: Clock, clocks: Clocks, row: dict[str, Any], cell: Cell, launch: fused.Launch) -> None:
    """One pass more, and what a bare read of as many bytes takes beside it."""
    row["bare_passes"].append(bare_read(clock, int(cell.bytes)))
    began = time.time()
    row["passes"].append(clock.time(partial(cell.run, launch)).microseconds)
    row["sm_mhz"].append(clocks.since(began))


def measure(
    clock: Clock,
    clocks: Clocks,
    scheme: str,
    batch: int,
    length: int,
    launches: list[fused.Launch],
    seconds: float,
) -> dict[str, Any]:
    """Of the first launch, the chosen one; what the others take is beside it."""
    cell, own = Cell(scheme, batch, length), launches[0]
    row: dict[str, Any] = {"operation": "decode attention", "scheme": scheme, "batch": batch, "length": length}
    row["stored_bits"] = (cell.keys.form.stored_bits + cell.values.form.stored_bits) / 2
    row["bytes"] = cell.bytes
    row["programs_at_once"] = fused.programs_at_once(kernel_of(scheme, cell, own))
    row["error"], row["error_fp16"] = cell.errors(own)
    if not row["error"] <= 2 * row["error_fp16"]:
        row["microseconds"] = None
        return row
    row["tried"] = [[round(t, 2), *vars(launch).values()] for t, launch in tune(clock, cell, launches[1:], seconds)]
    row |= {"microseconds": 0.0, "passes": [], "bare_passes": [], "sm_mhz": [], "wanted": cell.wanted}
    row["launch"] = vars(own)
    timed(clock, clocks, row, cell, own)
    return row


def show(row: dict[str, Any], best: tuple[str, float]) -> None:
    print(
        f"{row['scheme']:16} {row['batch']} x {row['length']}: {row['stored_bits']:.2f} bits {row['microseconds']:.1f} "
        "us, "
        f"of copy {row['fraction_of_copy']:.3f} ({row['wanted']}), x {row['ratio_to_fp16']:.2f} of {best[0]} "
        f"{best[1]:.1f} us, bare read {row['bare_read']:.1f} us, "
        f"error {row['error']:.1e} (fp16 {row['error_fp16']:.1e}), {list(row['launch'].values())}, "
        f"{row['programs_at_once']} programs at once; passes {[round(t, 1) for t in row['passes']]}, MHz "
        f"{row['sm_mhz']}; "
        f"others {row['tried'][:3]}",
        flush=True,
    )


def conclude(result: dict[str, Any], out: str) -> list[tuple[dict[str, Any], tuple[str, float]]]:
    """What the passes up to now say, also to the file. Rows, each with the best FP16 peer."""
    found = []
    for row in result["rows"]:
        if row["microseconds"] is not None:
            name = f"{row['batch']} x {row['length']}"
            peers_there = [*result["fp16"][name].items(), *result["fp16_again"].get(name, {}).items()]
            best = min(peers_there, key=lambda item: item[1], default=("none", float("nan")))
            row["microseconds"], row["bare_read"] = map(statistics.median, (row["passes"], row["bare_passes"]))
            row["fraction_of_copy"] = row["bytes"] / result["copy_bandwidth"] * 1e6 / row["microseconds"]
            row |= {"fp16_backend": best[0], "ratio_to_fp16": best[1] / row["microseconds"], "projected": False}
            found.append((row, best))
    write_atomically(Path(out, "decode_attention.json"), json.dumps(result, indent=1).encode())
    return found


def by_programs(clock: Clock, schemes: list[str], counts: list[int]) -> None:
    """Prints microseconds with each count of programs a kv head, 0: the usual one."""
    for scheme, batch, length in [(scheme, 32, 32768) for scheme in schemes] + [(schemes[0], *cell) for cell in CELLS]:
        cell, found = Cell(scheme, batch, length), []
        for count in (0, *counts):
            own = replace(cell.own, splits=count)
            tried = [own, replace(own, tail_cost=plan.ALONE), replace(own, merge_width=1 << 20)]
            right = cell.run(cell.own)
            for each in tried:
                agree(cell, each, right)
            times = [f"{clock.time(partial(cell.run, each), 7).microseconds:.1f}" for each in tried]
            found.append(f"{count or 'usual'}: {' '.join(times)}")
        print(
            f"{scheme}, {batch} x {length}, programs: us, us with exact tokens alone, us merged at once: "
            f"{', '.join(found)}",
            flush=True,
        )
        del cell
        torch.cuda.empty_cache()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default=os.environ.get("OUT", "."))
    options.add_argument(
        "--all-launches", action="store_true", help="the chosen one and others, which take 18 times as long to compile"
    )
    options.add_argument("--schemes", default="", help="part of the names, comma-separated")
    options.add_argument("--programs", default="", help="counts a kv head, comma-separated")
    options.add_argument("--shared", default="", help="percents, comma-separated")
    options.add_argument("--cell-seconds", type=float, default=8.0)
    options.add_argument("--passes", type=int, default=5)
    options.add_argument("--seconds", type=float, default=225.0)
    chosen = options.parse_args()
    Path(chosen.out).mkdir(parents=True, exist_ok=True)
    if not torch.cuda.is_available():
        options.error("needs a CUDA GPU, and torch finds none here")
    began = time.time()
    torch.manual_seed(0)
    wanted = [s for s in SCHEMES if not chosen.schemes or any(part in s for part in chosen.schemes.split(","))]
    compile_all(wanted, chosen.all_launches)
    print(f"compiled in {time.time() - began:.0f} s", file=sys.stderr)
    clock = Clock(torch.device("cuda"), repeats=REPEATS)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result["triton"] = triton.__version__
    result["copy_bandwidth"] = copy = clock.copy_bandwidth()
    print(
        f"{result['device']}, torch {torch.__version__}, triton {triton.__version__}, copy {copy / 1e12:.2f} TB/s",
        flush=True,
    )
    if chosen.programs:
        by_programs(clock, wanted, [int(count) for count in chosen.programs.split(",")])
        return
    if chosen.shared:
        by_shared(clock, wanted, [int(percent) for percent in chosen.shared.split(",")])
        return
    result["fp16"], result["fp16_refused"], result["rows"] = {}, {}, []
    cells = [(scheme, 32, 32768) for scheme in wanted] + [(wanted[0], b, n) for b, n in CELLS]
    clocks, result["fp16_again"] = Clocks(), {}
    for scheme, batch, length in cells:
        name = f"{batch} x {length}"
        if time.time() - began > chosen.seconds:
            print(f"{scheme:16} {name}: not measured, {chosen.seconds:g} s are over", flush=True)
            continue
        torch.cuda.empty_cache()
        if name not in result["fp16"]:
            result["fp16"][name], result["fp16_refused"][name] = found, refused = peers_of(clock, batch, length)
            print(f"{'FP16':16} {name}: " + ", ".join(f"{who} {t:.1f} us" for who, t in found.items()), flush=True)
            print("".join(f"  {who}: {why}\n" for who, why in refused.items()), end="", file=sys.stderr)
        try:
            launches = launches_of(scheme, batch, length, chosen.all_launches)
            row = measure(clock, clocks, scheme, batch, length, launches, chosen.cell_seconds)
        except Exception as error:
            print(f"{scheme:16} {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        if row["microseconds"] is None:
            print(f"{scheme:16} {name}: WRONG: error {row['error']:.1e}, fp16 {row['error_fp16']:.1e}", flush=True)
        result["rows"].append(row)
    conclude(result, chosen.out)
    right = [row for row in result["rows"] if row["microseconds"] is not None]
    for number in range(1, chosen.passes):
        for row in reversed(right) if number % 2 else right:
            if time.time() - began > chosen.seconds:
                continue
            torch.cuda.empty_cache()
            try:
                cell = Cell(row["scheme"], row["batch"], row["length"])
                timed(clock, clocks, row, cell, cell.own)
                del cell
            except Exception as error:
                print(f"{row['scheme']:16}, pass {number + 1}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        conclude(result, chosen.out)
    for name in result["fp16"]:
        batch, length = map(int, name.split(" x "))
        torch.cuda.empty_cache()
        result["fp16_again"][name] = found = peers_of(clock, batch, length)[0]
        print(f"{'FP16 again':16} {name}: " + ", ".join(f"{who} {t:.1f} us" for who, t in found.items()), flush=True)
    for row, best in conclude(result, chosen.out):
        show(row, best)
    print(f"{time.time() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
