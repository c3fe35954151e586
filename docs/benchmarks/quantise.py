"""Time of quantise-and-pack and of a decode step's append on a GPU: one layer of Llama-3.1-8B geometry (8 kv heads, D =
128), FP16.

    PYTHONPATH=.:kernels:artifacts python docs/benchmarks/quantise.py [--out DIR] [--seconds 90] [--schemes 2/2,Base]

Every kernel is first compared bit for bit with the reference on the CPU (words and scales that differ are printed; a
kernel that differs gets no time), append also over calls of many lengths and in a replayed CUDA graph. Random data, L2
flushed before each run, CUDA events, medians; copy bandwidth is measured in the same run.

prefill: 32 rows of 4096 tokens, keys and values, one launch; bytes: read and written. append: 32 rows, one new token,
one launch; "idle": nothing is due; "due": every row packs a block. Grids (HIGGS, TurboQuant) likewise, and their first
launch alone, "rotate+nearest": keys to codes, a byte each. fraction: bytes over copy bandwidth, over the
time taken.

--step-registers COUNTS: only, append of grids with at most so many registers a thread.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from kvcal.bench.timing import Clock
from kvcal_artifacts.codecs.higgs_grids import gaussian_grid
from kvcal_kernels.higgs import Rotated
from kvcal_kernels.higgs import reference as higgs_reference
from kvcal_kernels.higgs import triton as higgs
from kvcal_kernels.layout import Blocks, Form, grid_of
from kvcal_kernels.mixkvq import Tiers
from kvcal_kernels.mixkvq import reference as mixkvq_reference
from kvcal_kernels.mixkvq import triton as mixkvq
from kvcal_kernels.quantise import AnyRule, Counts, GridRule, Layer, Rule, Windows, blocks_for, reference
from kvcal_kernels.quantise import triton as fused
from kvcal_kernels.squat import Moves, moves
from kvcal_kernels.squat import reference as squat_reference
from kvcal_kernels.squat import triton as squat

HEADS, D, BATCH, LENGTH = 8, 128, 32, 4096
Setting = tuple[int, int, bool, reference.Mode, bool]  # bits, group, inner, mode, search
SCHEMES: dict[str, tuple[Setting, Setting]] = {
    "uniform 4/4": ((4, 32, True, "symmetric", False), (4, 32, True, "symmetric", False)),
    "InnerQ Base 3/3": ((3, 32, True, "symmetric", False), (3, 32, True, "symmetric", False)),
    "InnerQ Hybrid": ((3, 32, True, "symmetric", False), (2, 32, True, "hybrid", False)),
    "uniform 2/2": ((2, 32, True, "symmetric", False), (2, 32, True, "symmetric", False)),
    "KIVI 2/2 G=32": ((2, 32, False, "asymmetric", False), (2, 32, False, "asymmetric", False)),
    "KIVI 2/2 G=128": ((2, 128, False, "asymmetric", False), (2, 128, False, "asymmetric", False)),
    "uniform 8/8": ((8, 32, True, "symmetric", False), (8, 32, True, "symmetric", False)),
    "InnerQ Base, search": ((3, 32, True, "symmetric", True), (3, 32, True, "symmetric", True)),
}
# Thread-instructions a number, mean of keys and values, compiled for sm_90 by Triton 3.7.1 and counted
# (tests/kernels/quantise/test_quantise_kernel.py), times the turns of each loop. Grids: to codes, without the candidates
# that few cells have; ONE_LAUNCH: to words.
INSTRUCTIONS = {
    "uniform 4/4": 19.5, "InnerQ Base 3/3": 24.4, "InnerQ Hybrid": 48.2, "uniform 2/2": 19.4, "KIVI 2/2 G=32": 25.9,
    "KIVI 2/2 G=128": 17.2, "uniform 8/8": 18.9, "InnerQ Base, search": 655.0, "HIGGS 2 (2, 16)": 75.0,
    "HIGGS 3 (2, 64)": 76.0, "HIGGS 4 (2, 256)": 82.0, "TurboQuant 3 (1, 8)": 71.0, "SQuat": 66.0,
    "MixKVQ": 42.0,
}  # fmt: skip
ONE_LAUNCH = {"TurboQuant 3 (1, 8)": 75.0}
GRIDS = {"HIGGS 2 (2, 16)": (2, 16, 1), "HIGGS 3 (2, 64)": (2, 64, 1), "HIGGS 4 (2, 256)": (2, 256, 1)}
GRIDS |= {"TurboQuant 3 (1, 8)": (1, 8, HEADS)}  # d, n, norms
SQUAT_OVER = "KIVI 2/2 G=32"
LAUNCHES = [fused.Launch(4), fused.Launch(1), fused.Launch(4, 96)]


def rule(role: Any, setting: Setting) -> Rule:
    bits, group, inner, mode, search = setting
    return Rule(Form(role, D, bits, group, inner, mode == "symmetric"), mode, search)


def rules(scheme: str, device: str = "cuda") -> tuple[AnyRule, AnyRule]:
    scheme = SQUAT_OVER if scheme == "SQuat" else scheme
    if scheme in GRIDS:
        keys, values = (grid_rule(role, scheme, device) for role in ("key", "value"))
        return keys, values
    key, value = SCHEMES[scheme]
    return rule("key", key), rule("value", value)


def grid_rule(role: Any, scheme: str, device: str) -> GridRule:
    d, n, norms = GRIDS[scheme]
    how, bits = rotated_of(scheme), (n - 1).bit_length() // d
    grid = grid_of(how.points.cpu(), how.sign.cpu().view(HEADS, D), bits).to(device)
    return GridRule(Form(role, D, bits, vector=d, norm_heads=HEADS // norms), grid, how.gain)


def random(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    k, v = (torch.randn(batch, HEADS, tokens, D, device="cuda", dtype=torch.float16) for _ in range(2))
    k.mul_(torch.rand(D, device="cuda") * 3)
    return k, v


def empty_layer(own: tuple[AnyRule, AnyRule], batch: int, room: int, windows: Windows, queries: int) -> Layer:
    keys, values = (blocks_for(one, batch, HEADS, room, "cuda") for one in own)
    sink, recent = (random(batch, count) for count in (windows.sink, windows.ring_capacity(queries)))
    return Layer(keys, values, sink, recent, torch.zeros(HEADS, dtype=torch.int32, device="cuda"))


def block_of(own: tuple[AnyRule, AnyRule]) -> int:
    return 32 * max(one.form.scale_blocks for one in own)


def on_cpu(layer: Layer) -> Layer:
    def moved(x: Any) -> Any:
        if isinstance(x, Blocks):
            return Blocks(x.form, x.words.cpu(), x.scale.cpu(), None if x.grid is None else x.grid.to("cpu"))
        return tuple(t.cpu() for t in x) if isinstance(x, tuple) else x.cpu()

    return Layer(*(moved(x) for x in vars(layer).values()))


def differing(found: Blocks, wanted: Blocks) -> int:
    """Words and scales that are not the same bits."""
    words = int((found.words.cpu() != wanted.words).sum())
    return words + int((found.scale.cpu().view(torch.int16) != wanted.scale.view(torch.int16)).sum())


def check_prefill(scheme: str, launch: fused.Launch | None) -> int:
    """Of 2 rows of 512 tokens; -1 where flags are not those of the reference."""
    own = rules(scheme)
    k, v = random(2, 512)
    k[1, 1, 70, 5] = torch.inf
    found = fused.quantise(k, v, *own, launch=launch)
    slow = rules(scheme, "cpu")
    (keys, bad), (values, _) = (reference.quantise(x.cpu(), r) for x, r in zip((k, v), slow, strict=True))
    if found[2].cpu().ne(0).tolist() != bad.ne(0).tolist():
        return -1
    for blocks in (found[0], keys):  # what a flagged head holds is nobody's; a norm may be of all heads
        blocks.words[1, bad.ne(0)], blocks.scale[1, -1 if blocks.scale.shape[1] == 1 else bad.ne(0)] = 0, 0
    return differing(found[0], keys) + differing(found[1], values)


def check_append(scheme: str) -> int:
    """Of calls of 150, 1, 1, 300, 4 and 40 single tokens, rows of different lengths; the last ones replay a graph."""
    own, exact_rules = rules(scheme), rules(scheme, "cpu")
    windows = Windows(32, 96, block_of(own))
    layer, counts = empty_layer(own, 3, 64, windows, 4), Counts(3, windows, "cuda")
    slow, slow_counts = on_cpu(layer), Counts(3, windows)
    graph, inputs, ones = None, random(3, 1), torch.ones(3, dtype=torch.int32, device="cuda")

    def step(k: Tensor, v: Tensor) -> None:
        fused.advance(counts, ones if k.shape[2] == 1 else new.cuda())
        fused.append(layer, counts, k, v, *own, due=keys_due(scheme, layer, counts, k))

    for count in [150, 1, 1, 300, 4] + [1] * 40:
        k, v = random(3, count)
        new = torch.tensor([count, count, max(count - 100, 1)], dtype=torch.int32)
        reference.advance(slow_counts, new)
        due = keys_due(scheme, slow, slow_counts, k.cpu())
        reference.append(slow, slow_counts, k.cpu(), v.cpu(), *exact_rules, due=due)
        if count > 1 or graph is None:
            step(k, v)
        if count == 1 and graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # both kernels have run before; capture runs nothing
                step(*inputs)
        elif count == 1 and graph is not None:
            for to, x in zip(inputs, (k, v), strict=True):
                to.copy_(x)
            graph.replay()
    wrong = int((counts.data.cpu() != slow_counts.data).sum()) + int(layer.flags.ne(0).sum())
    for fast, exact in zip((*layer.sink, *layer.recent), (*slow.sink, *slow.recent), strict=True):
        wrong += int((fast.cpu() != exact).sum())
    return wrong + differing(layer.keys, slow.keys) + differing(layer.values, slow.values)


def measure_prefill(clock: Clock, scheme: str, copy: float) -> dict[str, Any]:
    own = rules(scheme)
    k, v = random(BATCH, LENGTH)
    bits = sum(one.form.stored_bits for one in own) / 2
    size = 2 * k.numel() * (2 + bits / 8)
    tried: list[tuple[float, fused.Launch, int]] = []
    for launch in launches_of(scheme):
        if wrong := check_prefill(scheme, launch):
            tried.append((float("inf"), launch, wrong))
            continue
        tried.append(
            (clock.time(lambda launch=launch: fused.quantise(k, v, *own, launch=launch), 9).microseconds, launch, 0)
        )
    tried.sort(key=lambda one: one[0])
    row: dict[str, Any] = {"operation": "quantise", "scheme": scheme, "batch": BATCH, "length": LENGTH, "bytes": size}
    row["stored_bits"], row["differing"] = bits, [wrong for _, _, wrong in tried]
    row["tried"] = [[t, *vars(launch).values()] for t, launch, _ in tried]
    if tried[0][2]:
        return row | {"microseconds": None}
    row["microseconds"] = clock.time(lambda: fused.quantise(k, v, *own, launch=tried[0][1]), 15).microseconds
    row |= bound(scheme, 2 * k.numel(), row["microseconds"], ONE_LAUNCH.get(scheme))
    return row | {"fraction_of_copy": size / copy * 1e6 / row["microseconds"]}


def launches_of(scheme: str) -> list[fused.Launch]:
    if scheme in GRIDS:
        return [fused.launch_of(*rules(scheme), step=False), fused.Launch(4, 128)]
    return LAUNCHES[:1] if scheme.endswith("search") else LAUNCHES


def measure_append(clock: Clock, scheme: str, copy: float, due: bool) -> dict[str, Any]:
    """A cold L2; new tokens in it or not makes no difference, they are 128 KB."""
    own = rules(scheme)
    windows = Windows(32, 96, block_of(own))
    layer, counts = empty_layer(own, BATCH, 16, windows, 1), Counts(BATCH, windows, "cuda")
    k, v = random(BATCH, 1)
    counts.data[0], counts.data[4], counts.data[6] = windows.sink, windows.sink, windows.recent
    counts.data[6] += windows.block - 1 if due else 0
    fused.advance(counts, torch.ones(BATCH, dtype=torch.int32, device="cuda"))
    bits = sum(one.form.stored_bits for one in own) / 2
    size = 2 * BATCH * HEADS * D * (4 + (windows.block * (2 + bits / 8) if due else 0))
    row: dict[str, Any] = {
        "operation": f"append {'due' if due else 'idle'}",
        "scheme": scheme,
        "batch": BATCH,
        "bytes": size,
    }
    moves, room = moves_of(), torch.empty(BATCH, HEADS, windows.block, D, device="cuda")

    def step() -> None:
        keys = squat.due(layer.recent[0], counts, k, moves, 2, 32, room) if scheme == "SQuat" else None
        fused.append(layer, counts, k, v, *own, due=keys)

    row["microseconds"] = clock.time(step, 21).microseconds
    return row | {"stored_bits": bits, "fraction_of_copy": size / copy * 1e6 / row["microseconds"]}


def keys_due(scheme: str, layer: Layer, counts: Counts, keys: Tensor) -> Tensor | None:
    """SQuat's of a step, which the ring's tokens and the new ones have."""
    if scheme != "SQuat" or keys.shape[2] > counts.windows.block:
        return None
    by = squat if keys.is_cuda else squat_reference
    made: Tensor = by.due(layer.recent[0], counts, keys, moves_of(keys.device.type), 2, 32)
    return made


def rotated_of(scheme: str) -> Rotated:
    d, n, norms = GRIDS[scheme]
    sign = torch.randint(0, 2, (HEADS * D,), generator=torch.Generator().manual_seed(n)) * 2 - 1
    return Rotated(gaussian_grid(d, n).cuda(), sign.to(torch.int8).cuda(), norms, 1.1)


def check_grid(scheme: str) -> int:
    """Of 2 rows of 100 tokens."""
    how, x = rotated_of(scheme), random(2, 100)[0]
    wanted = higgs_reference.encode(x.cpu(), Rotated(how.points.cpu(), how.sign.cpu(), how.norms, how.gain))
    return sum(int((a.cpu() != b).sum()) for a, b in zip(higgs.encode(x, how), wanted, strict=True))


def measure_grid(clock: Clock, scheme: str, copy: float) -> dict[str, Any]:
    """Of keys alone: codes a byte each, not yet packed."""
    d, n, _ = GRIDS[scheme]
    how, x = rotated_of(scheme), random(BATCH, LENGTH)[0]
    size = x.numel() * (2 + 1 / d)
    row: dict[str, Any] = {
        "operation": "rotate+nearest",
        "scheme": scheme,
        "batch": BATCH,
        "length": LENGTH,
        "bytes": size,
    }
    row |= {"stored_bits": math.log2(n) / d, "microseconds": None, "differing": check_grid(scheme)}
    if row["differing"]:
        return row
    row["microseconds"] = clock.time(lambda: higgs.encode(x, how), 9).microseconds
    row |= bound(scheme, x.numel(), row["microseconds"])
    return row | {"fraction_of_copy": size / copy * 1e6 / row["microseconds"]}


@cache
def moves_of(device: str = "cuda") -> Moves:
    """As of D = 128, 64 channels at a time: any weights do."""
    response = torch.randn(1, HEADS, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.1
    made = moves([response], 64)
    return Moves(64, [w.to(device) for w in made.weights], [u.to(device) for u in made.units])


def check_squat() -> int:
    own, x = moves_of(), random(2, 160)[0]
    there = Moves(64, [w.cpu() for w in own.weights], [u.cpu() for u in own.units])
    wanted = squat_reference.corrected(x.cpu(), there, 2, 32, 32)
    return int((squat.corrected(x, own, 2, 32, 32).cpu() != wanted).sum())


def measure_squat(clock: Clock, copy: float) -> dict[str, Any]:
    """Keys' corrections alone: a read, and a write of float32, which `quantise` reads again."""
    own, x = moves_of(), random(BATCH, LENGTH)[0]
    row: dict[str, Any] = {"operation": "correct", "scheme": "SQuat", "batch": BATCH, "length": LENGTH}
    row |= {"bytes": x.numel() * 6, "stored_bits": 2.0, "microseconds": None, "differing": check_squat()}
    if row["differing"]:
        return row
    row["microseconds"] = clock.time(lambda: squat.corrected(x, own, 2, 32, 32), 9).microseconds
    row |= bound("SQuat", x.numel(), row["microseconds"])
    return row | {"fraction_of_copy": x.numel() * 6 / copy * 1e6 / row["microseconds"]}


def check_selection() -> int:
    x, own = random(2, 160)[0], torch.rand(2, HEADS, 1, D, device="cuda")
    wanted = mixkvq_reference.select(x.cpu(), own.cpu(), Tiers(), 32)
    return sum(int((a.cpu() != b).sum()) for a, b in zip(mixkvq.select(x, own, Tiers(), 32), wanted, strict=True))


def measure_selection(clock: Clock, copy: float) -> dict[str, Any]:
    """Which channels of which block go to which tier; the keys are read once more where they are packed."""
    x, own = random(BATCH, LENGTH)[0], torch.rand(BATCH, HEADS, 1, D, device="cuda")
    size = x.numel() * (2 + 1 / 32)
    row: dict[str, Any] = {"operation": "select", "scheme": "MixKVQ", "batch": BATCH, "length": LENGTH, "bytes": size}
    row |= {"stored_bits": 0.0, "microseconds": None, "differing": check_selection()}
    if row["differing"]:
        return row
    row["microseconds"] = clock.time(lambda: mixkvq.select(x, own, Tiers(), 32), 9).microseconds
    row |= bound("MixKVQ", x.numel(), row["microseconds"])
    return row | {"fraction_of_copy": size / copy * 1e6 / row["microseconds"]}


def bound(scheme: str, numbers: int, microseconds: float, instructions: float | None = None) -> dict[str, float]:
    """What issuing the instructions takes on every multiprocessor at its highest clock, and the share of it in the
    time.
    """
    own = torch.cuda.get_device_properties(0)
    rate = own.multi_processor_count * 128 * getattr(own, "clock_rate", 1_755_000) * 1e3
    least = numbers * (instructions or INSTRUCTIONS[scheme]) / rate * 1e6
    return {"instruction_bound": least, "fraction_of_issue": least / microseconds}


def compile_one(job: tuple[str, int]) -> str:
    scheme, number = job
    try:
        if scheme in GRIDS and number == 0:
            check_grid(scheme)
        elif scheme in GRIDS and number in (1, 2):
            fused.quantise(*random(1, 128), *rules(scheme), launch=launches_of(scheme)[number - 1])
        elif scheme == "SQuat":
            check_squat()
            check_append(scheme)
        elif scheme == "MixKVQ":
            check_selection()
        elif number < len(LAUNCHES):
            fused.quantise(*random(1, 128), *rules(scheme), launch=LAUNCHES[number])
        else:
            check_append(scheme)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{scheme} {number}: {type(error).__name__} {str(error)[:200]}"
    return ""


def compile_all(schemes: list[str]) -> None:
    """Into Triton's cache on disk, a process a core."""
    whole = [s for s in schemes if s in SCHEMES]
    whole += [s for s in schemes if s in GRIDS]
    jobs = [(scheme, number) for number in (3, 0, 1, 2) for scheme in whole]
    jobs += [(scheme, 0) for scheme in schemes if scheme not in whole]
    workers = max(1, min(len(jobs), (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for said in pool.map(compile_one, jobs):
            if said:
                print(said, file=sys.stderr)


def step_of(job: tuple[str, int], repeats: int = 1) -> list[float]:
    """Microseconds of an append of a grid with at most so many registers, with nothing due and with every row."""
    scheme, fused.GRID_STEP = job
    fused.launch._PREPARED.clear()
    clock = Clock(torch.device("cuda"), repeats=repeats)
    return [measure_append(clock, scheme, 1.0, due)["microseconds"] for due in (False, True)]


def by_registers(schemes: list[str], counts: list[int]) -> None:
    jobs = [(scheme, count) for scheme in schemes if scheme in GRIDS for count in counts]
    with ProcessPoolExecutor(len(jobs), mp_context=get_context("spawn")) as pool:
        list(pool.map(step_of, jobs))  # compiled
    for job in jobs:
        idle, due = step_of(job, 21)
        mean = (31 * idle + due) / 32
        print(
            f"append of {job[0]}, {job[1]} registers: idle {idle:.2f} us, due {due:.1f} us, mean of 32 steps "
            f"{mean:.2f} us",
        )


def show(row: dict[str, Any]) -> None:
    if row["microseconds"] is None:
        print(f"{row['operation']:14} {row['scheme']:20}: WRONG, differing {row['differing']}", flush=True)
        return
    more = f", of issue {row['fraction_of_issue']:.2f}" if "fraction_of_issue" in row else ""
    more += f", launches {row['tried']}" if "tried" in row else ""
    print(
        f"{row['operation']:14} {row['scheme']:20}: {row['stored_bits']:.2f} bits {row['microseconds']:.1f} us, of "
        "copy "
        f"{row['fraction_of_copy']:.3f}{more}",
        flush=True,
    )


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default=os.environ.get("OUT", "."))
    options.add_argument("--schemes", default="", help="part of the names, comma-separated")
    options.add_argument("--seconds", type=float, default=90.0)
    options.add_argument("--step-registers", default="", help="counts, comma-separated")
    chosen = options.parse_args()
    Path(chosen.out).mkdir(parents=True, exist_ok=True)
    if not torch.cuda.is_available():
        options.error("needs a CUDA GPU, and torch finds none here")
    began = time.time()
    torch.manual_seed(0)
    wanted = [
        s
        for s in [*SCHEMES, *GRIDS, "SQuat", "MixKVQ"]
        if not chosen.schemes or any(part in s for part in chosen.schemes.split(","))
    ]
    if chosen.step_registers:
        by_registers(wanted, [int(count) for count in chosen.step_registers.split(",")])
        return
    compile_all(wanted)
    print(f"compiled in {time.time() - began:.0f} s", file=sys.stderr)
    clock = Clock(torch.device("cuda"), repeats=15)
    copy = clock.copy_bandwidth()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result |= {"triton": triton.__version__, "copy_bandwidth": copy, "rows": []}
    print(
        f"{result['device']}, torch {torch.__version__}, triton {triton.__version__}, copy {copy / 1e12:.2f} TB/s",
        flush=True,
    )
    jobs = [(s, "prefill") for s in wanted] + [(s, "append") for s in wanted if s != "MixKVQ"]
    for scheme, what in jobs:
        if time.time() - began > chosen.seconds:
            print(f"{scheme} {what}: not measured, {chosen.seconds:g} s are over", flush=True)
            continue
        try:
            if scheme in GRIDS and what == "prefill":
                rows = [measure_grid(clock, scheme, copy), measure_prefill(clock, scheme, copy)]
            elif scheme == "SQuat" and what == "prefill":
                rows = [measure_squat(clock, copy)]
            elif scheme == "MixKVQ":
                rows = [measure_selection(clock, copy)]
            elif what == "prefill":
                rows = [measure_prefill(clock, scheme, copy)]
            elif differs := check_append(scheme):
                rows = [{"operation": "append", "scheme": scheme, "microseconds": None, "differing": differs}]
            else:
                rows = [measure_append(clock, scheme, copy, due) for due in (False, True)]
        except Exception as error:
            print(f"{scheme} {what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        for row in rows:
            show(row)
        result["rows"] += rows
        Path(chosen.out, "quantise.json").write_text(json.dumps(result, indent=1))
    print(f"{time.time() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
