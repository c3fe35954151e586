"""Decode attention over the transform codec on a GPU, one layer of Llama-3.1-8B geometry (32 query heads, 8 kv heads,
head_dim 128), one new token, random data of 2.0, 2.5, 3.0 and 4.0 bits in unequal tiers; and variants of its kernel.

    PYTHONPATH=.:kernels:artifacts python docs/benchmarks/transform_attention.py [--out DIR] [--bits 2.0,...]
        [--shapes BxN,...] [--variants A;B]
    PYTHONPATH=... python docs/benchmarks/transform_attention.py --old TREE [--bits ...] [--shapes ...] [--variants A;B]
    PYTHONPATH=... python docs/benchmarks/transform_attention.py --count [--bits ...] [--variants A;B]
    PYTHONPATH=... python docs/benchmarks/transform_attention.py --dry-run

Kernels are compiled and compared with the float32 reference first, each in a process of its own; nothing is timed that
does not agree. Times are CUDA events, the L2 flushed, medians of passes in turns; beside them the fraction of the
bandwidth of a copy (bytes read plus bytes written) in the same process. Variants that change a kernel (CHANGES) run in a
process of their own each, with a Triton cache of their own.

--old: another checkout, whose own copy of this script runs the same cells in turns with this one's, each turn in a
process of its own: as many times of either, on one GPU.

--count needs no GPU: it compiles for sm_90 and counts the instructions of a warp's loop, for each block, by the unit
that runs them. --dry-run takes all steps in Triton's interpreter, with tiny sizes; what it prints are no times of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from kvcal.bench.timing import Clock
from kvcal_artifacts.files import write_atomically
from kvcal_kernels.attention import reference, transform
from kvcal_kernels.attention import triton as fused
from kvcal_kernels.attention.plan import ALONE
from kvcal_kernels.attention.triton.transform import codes, ring
from kvcal_kernels.layout import BLOCK, Basis, TransformBlocks, TransformForm
from kvcal_kernels.layout.transform import PAIR_BYTES
from kvcal_kernels.triton import interpreted

MIXES = {2.0: (8, 14, 20, 14), 2.5: (16, 18, 16, 10), 3.0: (26, 21, 11, 3), 4.0: (64, 0, 0, 0)}  # pairs of 4 to 1 bits
HEADS, RATIO, DIM = 8, 4, 128
SHAPES = "32x32768,8x32768,1x32768"
DRY_SHAPES = "1x224"  # two blocks beside sink and window
PASSES = 3
TURNS = 2  # of each checkout
GOAL = 0.75  # of copy bandwidth at 32 x 32768
DEVICE = torch.device("cpu" if interpreted() else "cuda")
FAMILIES = {  # units of a multiprocessor's quarter that run instructions; a warp takes ALU and IMAD two cycles
    "ALU": "LOP3 SHF PRMT IADD3 LEA FMNMX FSETP ISETP SEL VIADD VIMNMX FSEL F2FP PLOP3 VIADDMNMX VOTE SGXT MOV",
    "integer products": "IMAD IDP",
    "floats": "FFMA FMUL FADD HADD2 HFMA2 HMUL2",
    "shared memory": "LDS LDSM STS LDGSTS MOVM SHFL",
    "tensor cores": "HMMA",
    "exponentials": "MUFU",
}


_product_of_bytes = codes._look_up  # before it is changed


@triton.constexpr_function
def _shifted(into: str, word: str, byte: int, first: int, factors: str = "") -> str:
    """`codes._look_up` by shift, mask and sum: two instructions where a product of bytes is one. Codes of 4 bits, whose
    place in a byte is a lane's, keep the product.
    """
    if factors:
        text: str = _product_of_bytes(into, word, byte, first, factors)
        return text
    shift = 8 * byte - 7
    move = f"shr.u32 at, {word}, {shift};" if shift > 0 else f"shl.b32 at, {word}, {-shift};"
    text = "{ .reg .b32 own, table; and.b32 own, kvcal_bank, 127; mov.u32 table, kvcal_table;"
    text += f"{move} lop3.b32 at, at, {255 << 7}, own, 0xEA; add.u32 at, at, table;"
    return f"{text} ld.shared.b32 {into}, [at + {first * 128}]; }}"


_rows_of_pieces = ring._rows  # before it is changed


@triton.constexpr_function
def _row_a_piece(pieces: Any) -> Any:
    """`ring._rows` where each row of lanes copies from one piece."""
    rows = []
    for i in range(len(pieces)):  # Triton 3.6 reads the names of a loop, but none within a tuple of them
        for row in _rows_of_pieces((pieces[i],)):
            (part,) = row[2]
            rows.append((row[0], row[1], ((part[0], i, *part[2:]),)))
    return tuple(rows)


CHANGES: dict[str, list[tuple[Any, str, Any]]] = {  # module, name, what stands there instead
    "": [],
    "shifts": [(codes, "_look_up", _shifted)],
    "pieces": [(ring, "_rows", _row_a_piece)],
    "shifts, pieces": [(codes, "_look_up", _shifted), (ring, "_rows", _row_a_piece)],
}
VARIANTS: dict[str, tuple[str, fused.Launch | None]] = {  # change of a kernel, launch; None: as the cache launches it
    "product": ("", None),
    "4 warps, 128 registers": ("", fused.Launch(warps=4, registers=128, slots=2)),
    "4 warps, 168 registers": ("", fused.Launch(warps=4, registers=168, slots=2)),
    "4 warps, 255 registers": ("", fused.Launch(warps=4, registers=255, slots=2)),
    "8 warps, 128 registers": ("", fused.Launch(warps=8, registers=128, slots=2)),
    "shifts": ("shifts", None),
    "pieces": ("pieces", None),
    "shifts, pieces, 128 registers": ("shifts, pieces", fused.Launch(warps=4, registers=128, slots=2)),
    # last, as they are compiled by then: exact tokens in programs of packed ones, which have 16 blocks fewer for them,
    # whatever the plan says, or in programs of their own
    "exact tokens carried": ("", fused.Launch(warps=4, registers=168, slots=2, tail_cost=16)),
    "exact tokens carried, 4 blocks": ("", fused.Launch(warps=4, registers=168, slots=2, tail_cost=4)),
    "exact tokens carried, 255 registers": ("", fused.Launch(warps=4, registers=255, slots=2, tail_cost=16)),
    "exact tokens apart": ("", fused.Launch(warps=4, registers=168, slots=2, tail_cost=ALONE)),
}


def blocks_of(role: Any, bits: float, batch: int, count: int) -> TransformBlocks:
    """Random codes of a random basis: what a time and an error depend on is there."""
    form = TransformForm(role, DIM, MIXES[bits])
    sizes = [(2 * n, 4) if b == 1 else (n, PAIR_BYTES[b]) for b, n in form.tiers]
    codes = tuple(torch.randint(0, 256, (batch, HEADS, count, *s), dtype=torch.uint8, device=DEVICE) for s in sizes)
    generator = torch.Generator(DEVICE).manual_seed(0)  # of keys and values alike: the kernel keeps one table
    points = {b: torch.randn(1 << 2 * b, 2, generator=generator, device=DEVICE).half().float() for b in (4, 3, 2)}
    points[1] = torch.tensor([[-0.8], [0.8]], device=DEVICE)
    decoder = (torch.randn(HEADS, DIM, DIM, device=DEVICE) * DIM**-0.5).half()
    basis = Basis(decoder, torch.randn(HEADS, DIM, device=DEVICE).half() / 2, points, dict.fromkeys(points, 1.0))
    norm = (torch.rand(batch, 1, count, BLOCK, device=DEVICE) + 0.5).half()
    return TransformBlocks(form, codes, norm, basis)


def cell(bits: float, batch: int, length: int) -> tuple[Any, ...]:
    """Arguments of `attend`: sink 32, 128 recent tokens, the rest packed."""
    count = length // BLOCK - 5

    def exact(tokens: int) -> tuple[Any, ...]:
        k, v = (torch.randn(batch, HEADS, tokens, DIM, device=DEVICE).half() for _ in (0, 1))
        return k, v, torch.full((batch,), tokens, dtype=torch.int32, device=DEVICE)

    q = torch.randn(batch, HEADS * RATIO, 1, DIM, device=DEVICE).half()
    sides = [blocks_of(role, bits, batch, count) for role in ("key", "value")]
    return q, *sides, torch.full((batch,), count, dtype=torch.int32, device=DEVICE), exact(32), exact(128), DIM**-0.5


def bytes_of(arguments: tuple[Any, ...]) -> int:
    tensors = [x for side in arguments[1:3] for x in (*side.codes, side.norm)]
    tensors += [x for part in arguments[4:6] for x in part[:2]]
    return sum(x.numel() * x.element_size() for x in tensors)


def agree(bits: float, launch: fused.Launch | None, length: int) -> tuple[float, float]:
    """The kernel's error against float32, and that of the reference with inputs and output in float16."""
    torch.manual_seed(0)
    arguments = cell(bits, 2, length)
    out = transform().attend(*arguments, launch)
    exact = reference.attend(arguments[0].float(), *arguments[1:])
    plain = reference.attend(*arguments)
    off, same = (float((x.float() - exact).norm() / exact.norm()) for x in (out, plain))
    return off, same


def within(errors: tuple[float, float] | None) -> bool:
    """Whether a kernel is as close as float16 is; None: it did not run."""
    return errors is not None and errors[0] <= 2 * errors[1] + 2.0**-11


def measure(names: list[str], widths: list[float], shapes: list[tuple[int, int]], seconds: float) -> dict[str, Any]:
    """Times of variants of one change, passes in turns."""
    clock = Clock(DEVICE, repeats=21, seconds=0 if interpreted() else seconds)
    copy, space = clock.copy_bandwidth(), fused.Workspace(DEVICE)
    rows: list[dict[str, Any]] = []
    for batch, length in shapes:
        for bits in widths:
            arguments = cell(bits, batch, length)
            apart = [name for name in names if not is_product(name, bits)]
            runs = {name: partial(transform().attend, *arguments, VARIANTS[name][1], space) for name in apart}
            passes: dict[str, list[float]] = {name: [] for name in apart}
            for _ in range(1 if interpreted() else PASSES):
                for name, run in runs.items():
                    passes[name].append(clock.time(run).microseconds)
            size = bytes_of(arguments)
            for name, times in passes.items():
                taken = statistics.median(times)
                fraction = size / taken * 1e6 / copy
                rows.append({"bits": bits, "batch": batch, "length": length, "variant": name, "microseconds": taken,
                             "passes": times, "bytes": size, "fraction_of_copy": fraction})  # fmt: skip
                cell_name = f"{bits} bits, {batch} x {length}, {name}"
                print(f"{cell_name}: {taken:.1f} us, {fraction:.2f} of copy bandwidth", file=sys.stderr, flush=True)
            del arguments, runs
    device = "interpreter" if interpreted() else torch.cuda.get_device_name()
    return {"copy_bandwidth": copy, "device": device, "rows": rows}


def is_product(name: str, bits: float) -> bool:
    """Whether a variant is at this width what an H100's cache launches, under another name."""
    return name != "product" and VARIANTS[name] == ("", on_an_h100(bits))


def counted(name: str, bits: float) -> dict[str, Any]:
    """What a variant compiles to for sm_90, its loop by units. Without a GPU `None` stands for the launch of an H100."""
    from kvcal_kernels.attention.triton.transform.blocks import turns_of
    from tests.kernels.attention.test_transform import built
    from tests.support.compiled import loops, resources

    launch = VARIANTS[name][1] or on_an_h100(bits)
    own = built(MIXES[bits], launch.warps, launch.registers)
    with tempfile.TemporaryDirectory() as folder:
        registers, spilled = resources(own, Path(folder))
        found = [one for one in loops(own, Path(folder)) if one["HMMA"] > 16]
    loop, turns = max(found, key=Counter.total), turns_of(launch.slots)
    each = {unit: number / turns for unit, number in loop.most_common()}
    families = {family: sum(each.get(one, 0) for one in names.split()) for family, names in FAMILIES.items()}
    return {"bits": bits, "variant": name, "warps": launch.warps, "registers": registers, "spilled_bytes": spilled,
            "shared_of_triton": own.metadata.shared, "instructions": loop.total() / turns,
            "for_each_number": loop.total() / turns / (2 * BLOCK * DIM / 32), "units": families,
            "names": each}  # fmt: skip


def on_an_h100(bits: float) -> fused.Launch:
    from kvcal_kernels.attention.triton.transform.launch import tried

    return tried(TransformForm("key", DIM, MIXES[bits]), TransformForm("value", DIM, MIXES[bits]))


def environment(change: str, folder: Path) -> dict[str, str]:
    """A Triton cache for each change: the same source stands for another program there."""
    own = os.environ.get("TRITON_CACHE_DIR") or str(folder)
    return {**os.environ, "TRITON_CACHE_DIR": str(Path(own, change.replace(", ", "_") or "product"))}


def of_tree(tree: Path, folder: Path) -> dict[str, str]:
    """What Python imports in a process of another checkout, or of this one, and its Triton cache."""
    roots = [str(tree / part) for part in (".", "kernels", "artifacts", "serving")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "TRITON_CACHE_DIR": str(folder)}


def part(arguments: list[str], given: dict[str, str], script: Path = Path(__file__)) -> Any:
    """What a script prints as JSON with these arguments, in a process of its own; None where it failed."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=given, stdout=subprocess.PIPE, text=True, check=False
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def old_and_new(options: argparse.Namespace) -> bool:
    """Time the same cells by this checkout and by options.old, in turns: print and write medians and their ratio. False
    where something failed or does not agree with the reference.
    """
    trees = {"old": Path(options.old).resolve(), "new": Path(__file__).resolve().parents[2]}
    scripts = {name: tree / "docs" / "benchmarks" / "transform_attention.py" for name, tree in trees.items()}
    shapes = ",".join(f"{batch}x{length}" for batch, length in options.shapes)
    bits, dry = ",".join(map(str, options.bits)), ["--dry-run"] if options.dry_run else []
    wanted = [(name, one, variant) for name in trees for one in options.bits for variant in options.variants]
    passes: dict[str, dict[str, list[float]]] = {}
    result: dict[str, Any] = {"trees": {name: str(tree) for name, tree in trees.items()}, "cells": {}}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        given = {name: of_tree(tree, Path(folder, name)) for name, tree in trees.items()}
        checks = [
            pool.submit(part, ["--check", variant, "--bits", str(one), *dry], given[name], scripts[name])
            for name, one, variant in wanted
        ]
        errors = {one: check.result() for one, check in zip(wanted, checks, strict=True)}
        result["failed"] = [", ".join(map(str, one)) for one, both in errors.items() if not within(both)]
        for name in ["old", "new"] * TURNS:
            asked = ["--time", ";".join(options.variants), "--shapes", shapes, "--seconds", str(options.seconds)]
            measured = part([*asked, "--bits", bits, *dry], given[name], scripts[name])
            if measured is None:
                result["failed"].append(f"times of {name}")
                continue
            result["device"] = measured["device"]
            for row in measured["rows"]:
                cell_name = f"{row['bits']} bits, {row['batch']} x {row['length']}, {row['variant']}"
                of_cell = passes.setdefault(cell_name, {"old": [], "new": [], "old_copy": [], "new_copy": []})
                of_cell[name] += row["passes"]
                of_cell[f"{name}_copy"].append(row["fraction_of_copy"])
    for cell_name, times in passes.items():
        old, new, *fractions = (statistics.median(times[key]) if times[key] else 0.0 for key in times)
        ratio = new / old if old else 0.0
        result["cells"][cell_name] = {"old": old, "new": new, "ratio": ratio, "fractions": fractions, "all": times}
        print(f"{cell_name}: {old:.1f} us, now {new:.1f}, {ratio:.3f}; of copy {fractions[0]:.3f}, {fractions[1]:.3f}")
    write_atomically(Path(options.out, "transform_attention-old.json"), json.dumps(result, indent=1).encode())
    print("failed:", result["failed"])
    return not result["failed"]


def take(options: argparse.Namespace) -> dict[str, Any]:
    """All checks, side by side, then all times, one change after another."""
    jobs = max(1, (os.cpu_count() or 2) - 1)
    dry = ["--dry-run"] if options.dry_run else []
    shapes = ",".join(f"{batch}x{length}" for batch, length in options.shapes)
    wanted = [(name, bits) for name in options.variants for bits in options.bits if not is_product(name, bits)]
    result: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "rows": []}
    result["mixes"] = {str(bits): MIXES[bits] for bits in options.bits}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        cache = Path(folder)
        checks = [
            pool.submit(part, ["--check", name, "--bits", str(bits), *dry], environment(VARIANTS[name][0], cache))
            for name, bits in wanted
        ]
        errors = {one: check.result() for one, check in zip(wanted, checks, strict=True)}
        result["errors"] = {f"{bits}, {name}": both for (name, bits), both in errors.items()}
        print("error, that of float16:", result["errors"], flush=True)
        result["failed"] = [f"{bits}, {name}" for (name, bits), both in errors.items() if not within(both)]
        for change in dict.fromkeys(VARIANTS[name][0] for name in options.variants):
            names = [name for name in options.variants if VARIANTS[name][0] == change]
            right = [name for name in names if all(within(errors.get((name, bits), (0, 0))) for bits in options.bits)]
            if not right:
                continue
            asked = ["--time", ";".join(right), "--shapes", shapes, "--seconds", str(options.seconds)]
            measured = part([*asked, "--bits", ",".join(map(str, options.bits)), *dry], environment(change, cache))
            if measured is None:
                result["failed"] += [f"times of {name}" for name in right]
                continue
            result["rows"] += [row | {"copy_bandwidth": measured["copy_bandwidth"]} for row in measured["rows"]]
            result["device"] = measured["device"]
            write_atomically(Path(options.out, "transform_attention.json"), json.dumps(result, indent=1).encode())
    return result


def summary(result: dict[str, Any], options: argparse.Namespace) -> None:
    """The fastest variant of each width at the first shape, against the goal, beside the product's."""
    batch, length = options.shapes[0]
    for bits in options.bits:
        rows = [r for r in result["rows"] if (r["bits"], r["batch"], r["length"]) == (bits, batch, length)]
        if not rows:
            continue
        best = max(rows, key=lambda row: float(row["fraction_of_copy"]))
        own = [row["fraction_of_copy"] for row in rows if row["variant"] == "product"]
        text = f"{bits} bits, {batch} x {length}: best {best['fraction_of_copy']:.2f} of copy ({best['variant']})"
        text += f", product {own[0]:.2f}" if own else ""
        reached = "met" if best["fraction_of_copy"] >= GOAL else "MISSED"
        print(f"{text}, goal {GOAL}: {reached}{' (no GPU: nothing was timed)' if interpreted() else ''}")


def shapes_of(text: str) -> list[tuple[int, int]]:
    shapes = [(int(batch), int(length)) for batch, length in (one.split("x") for one in text.split(","))]
    if any(length % BLOCK or length < 7 * BLOCK or batch < 1 for batch, length in shapes):
        raise argparse.ArgumentTypeError(f"{text}: lengths must be multiples of {BLOCK}, at least {7 * BLOCK}")
    return shapes


def bits_of(text: str) -> list[float]:
    widths = [float(one) for one in text.split(",")]
    if unknown := [one for one in widths if one not in MIXES]:
        raise argparse.ArgumentTypeError(f"no mix of {unknown[0]} bits: there are {', '.join(map(str, MIXES))}")
    return widths


def variants_of(text: str) -> list[str]:
    names = [name.strip() for name in text.split(";")]
    if unknown := [name for name in names if name not in VARIANTS]:
        raise argparse.ArgumentTypeError(f"no variant {unknown[0]!r}: there are {'; '.join(VARIANTS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="a folder for transform_attention.json")
    parser.add_argument("--seconds", type=float, default=0.25, help="of a cell's pass, at most")
    parser.add_argument("--bits", type=bits_of, default=list(MIXES), help="which, with commas between")
    parser.add_argument("--shapes", type=shapes_of, default=SHAPES, help="BATCHxTOKENS, with commas between")
    parser.add_argument("--variants", type=variants_of, help="which, with semicolons between: all, with --old product")
    parser.add_argument("--old", help="another checkout, whose kernel is timed in turns with this one's")
    parser.add_argument("--dry-run", action="store_true", help="all steps in the interpreter, tiny sizes, no GPU")
    parser.add_argument("--count", action="store_true", help="count instructions of sm_90 instead, without a GPU")
    parser.add_argument("--check", type=variants_of, help="a variant: compare with the reference, print errors, end")
    parser.add_argument("--time", type=variants_of, help="variants of one change: time them, print times, end")
    options = parser.parse_args()
    options.variants = options.variants or (["product"] if options.old else list(VARIANTS))
    Path(options.out).mkdir(parents=True, exist_ok=True)
    if options.dry_run and not interpreted():
        sys.exit(subprocess.run([sys.executable, *sys.argv], env={**os.environ, "TRITON_INTERPRET": "1"}).returncode)
    if options.dry_run and options.shapes == shapes_of(SHAPES):
        options.shapes = shapes_of(DRY_SHAPES)
    if not (options.dry_run or options.count or torch.cuda.is_available()):
        parser.error("needs a CUDA GPU, and torch finds none here: --dry-run and --count do without")
    for name in (options.check or options.time or [])[:1]:
        for module, function, other in CHANGES[VARIANTS[name][0]]:
            setattr(module, function, other)
    if options.check:
        ((name,), (bits,)) = options.check, options.bits
        print(json.dumps(agree(bits, VARIANTS[name][1], 224 if options.dry_run else 2048)))
    elif options.time:
        print(json.dumps(measure(options.time, options.bits, options.shapes, options.seconds)))
    elif options.count:
        count(options)
    elif options.old:
        sys.exit(not old_and_new(options))
    else:
        result = take(options)
        summary(result, options)
        if result["failed"]:
            sys.exit(f"kernels that do not agree with the reference, or did not run: {result['failed']}")


def count(options: argparse.Namespace) -> None:
    """Counts of each variant, in a process of its own where it changes the kernel; they are counted, not timed."""
    names = options.variants
    if len(names) > 1:
        with tempfile.TemporaryDirectory() as folder:
            bits = ",".join(map(str, options.bits))
            rows: list[dict[str, Any]] = []
            for name in names:
                made = part(
                    ["--count", "--variants", name, "--bits", bits], environment(VARIANTS[name][0], Path(folder))
                )
                rows += made or [{"variant": name, "failed": True}]
        text = json.dumps({"triton": triton.__version__, "counted, not timed": rows}, indent=1)
        write_atomically(Path(options.out, "transform_attention-counted.json"), text.encode())
        return
    for module, function, other in CHANGES[VARIANTS[names[0]][0]]:
        setattr(module, function, other)
    rows = [counted(names[0], bits) for bits in options.bits]
    for row in rows:
        print({k: v for k, v in row.items() if k != "names"}, file=sys.stderr, flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
