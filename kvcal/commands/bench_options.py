"""What the options of `kvcal bench` mean: operations and their groups, schemes, shapes; which options nothing takes."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.scheme import Windows

from ..bench import paper, schemes
from ..bench.operations import OPERATIONS, TABLES
from ..bench.schemes import Benched
from ..bench.tables import no_scheme
from ..bench.target import Target
from ..models.devices import to_dtype
from ..report.outputs import check_output
from ..report.plots import check_plot
from ..report.suggest import allowed
from .common import refuse_idle
from .options import BenchOptions

if TYPE_CHECKING:
    from ..models.geometry import Geometry

PAPER_SCHEMES = tuple(name for name in paper.TABLE_4 if name != "fp16")


GPU_SCHEMES = (
    "inner-4", "innerq-base", "innerq-hybrid", "innerq-small", "inner-2", "kivi-2", "kivi-2-g128", "squat-2",
    "squat-2-g128", "turboquant-4-3", "higgs-2", "higgs-3", "higgs-4", "mixkvq-16-16", "mixkvq-16-16-g128",
)  # fmt: skip


SIZED = ("largest-batch", "longest-generation")  # how far a memory goes


AT_SHAPE = {"generate", "generate-compiled", "generate-call"}  # a whole model at each --batch and --length


GENERATION = {  # of whole models, and what they are
    "generate": "decode steps of a whole model: tokens per second, peak memory",
    "generate-compiled": "the same with a compiled forward under a CUDA graph, a minute or so a scheme to compile",
    "generate-call": "the same by model.generate() itself, as a caller gets them",
    "largest-batch": "rows of --length tokens that a memory holds, their tokens per second, also by model.generate()",
    "longest-generation": "tokens that one row may have on a memory (VQKV Table 3)",
}


TABLE_4 = "innerq-table-4"


ALWAYS_PROJECTED = {TABLE_4: "one layer's keys and values on the Xavier NX, paper beside projection (InnerQ Table 4)"}


PROJECTED = ("fused-attention", *ALWAYS_PROJECTED, *SIZED)  # where the device is not here


WHOLE = tuple(name for name in GENERATION if name != "generate-compiled")  # that is asked for by name: it compiles


GROUPS = {"generation": WHOLE, "vqkv-table-3": ("longest-generation",), **TABLES}


GROUP_SCHEMES = {
    "innerq-table-5": PAPER_SCHEMES, "innerq-table-6": ("innerq-hybrid",), "mixkvq-table-7": ("mixkvq",),
    "vqkv-table-3": ("vqkv-4k",),
}  # fmt: skip


GROUP_MODEL = {"mixkvq-table-7": "r1-distill-qwen-7b"}


GROUP_DTYPE = {"vqkv-table-3": torch.float32}


MODEL, MODEL_CPU = "llama-3.1-8b", "tiny"  # the second where a whole model must run on a CPU


def check_numbers(o: BenchOptions) -> None:
    """Raise UsageError for what the command line's ranges let through: NaN, infinity, no memory at all."""
    if o.memory is not None and not 0 < o.memory <= MOST_GIB:
        raise UsageError(f"--memory {o.memory:g}: GiB, needs a number above 0 and up to {MOST_GIB}, 64 bits of bytes")
    if not 0 <= o.seconds < math.inf:
        raise UsageError(f"--seconds {o.seconds:g}: needs a finite number from 0")


def check_files(o: BenchOptions) -> None:
    """UsageError where a file asked for cannot be written, or would replace another that is asked for or read."""
    try:
        if o.plot is not None:
            check_plot(o.plot)
        if o.csv is not None:
            check_output(o.csv, "--csv")
    except KVCalError as error:
        raise UsageError(str(error)) from error
    read = [("--compare", o.compare), *(("--bundle", path) for path in o.bundle or ())]
    option_of: dict[str, str] = {}
    for option, path in (*read, ("--csv", o.csv), ("--plot", o.plot)):
        if path is None:
            continue
        before = option_of.setdefault(os.path.realpath(path), option)
        if option != before and option in ("--csv", "--plot"):
            raise UsageError(
                f"{option} {path}: is the file of {before} too, and would replace it; give another file name"
            )


def check_taken(o: BenchOptions, where: Target, operations: Sequence[str], typed: Collection[str]) -> None:
    """Raise UsageError for the first option on the command line (`typed`) that none of the rows takes."""
    for names, taken, of, instead in _idle(o, where, set(operations)):
        if not taken:
            refuse_idle(typed, names, of, f"{instead}, or leave it out")


def memory_gib(o: BenchOptions, where: Target) -> float | None:
    """GiB that bytes alone are counted for: as given, or what CUDA reports of the device, as `kvcal plan` takes it."""
    return o.memory or (where.profile.usable or where.profile.memory if where.profile else None)


def check_memory(o: BenchOptions, where: Target, operations: Sequence[str]) -> None:
    """Raise UsageError, before anything is measured, where a memory is to be filled and neither named nor a GPU's."""
    on_gpu = where.device is not None and where.device.type == "cuda"
    if set(SIZED) & set(operations) and not on_gpu and memory_gib(o, where) is None:
        raise UsageError("largest-batch and longest-generation: on how much memory? give --memory in GiB")


@dataclass(frozen=True)
class Runs:
    """Which of the chosen operations run. kernels: operations that are timed; sized: those that fill a memory.

    here, on_gpu: whether the device is here, and a GPU. at_shapes: rows of a given batch and length; of_schemes: rows
    of a scheme. measured: whether anything is run, not only counted in bytes.
    """

    here: bool
    on_gpu: bool
    kernels: set[str]
    sized: set[str]
    at_shapes: bool
    of_schemes: bool
    measured: bool


def _runs(where: Target, operations: set[str]) -> Runs:
    here, on_gpu = where.device is not None, where.device is not None and where.device.type == "cuda"
    kernels, sized = operations & set(OPERATIONS) if here else set(), operations & set(SIZED)
    without_scheme = {TABLE_4, *(name for name, one in OPERATIONS.items() if one.refuses is no_scheme)}
    return Runs(
        here,
        on_gpu,
        kernels,
        sized,
        at_shapes=bool(kernels or operations & {*AT_SHAPE, "fused-attention"}),
        of_schemes=bool(operations - without_scheme),
        measured=bool(kernels or (here and AT_SHAPE & operations) or (on_gpu and sized)),
    )


def _idle(o: BenchOptions, where: Target, operations: set[str]) -> Iterable[tuple[tuple[str, ...], bool, str, str]]:
    """(options, whether a row takes them, what they apply to, what to do)."""
    runs = _runs(where, operations)
    another = "give another --operation"
    run = "give an --operation that runs" if runs.here else "give a --device that is here"
    another_or_run = another if runs.here else run
    untimed = {"longest-generation"} if runs.on_gpu else set(SIZED)
    of_bytes = "longest-generation" in operations and not runs.on_gpu
    calls = {name for name, one in OPERATIONS.items() if one.of_calls}
    yield ("memory",), bool(runs.sized), " and ".join(SIZED), "give --operation for one of them"
    yield ("repeats", "seconds"), bool(runs.kernels), "kernels that are timed", another_or_run
    yield ("seed",), runs.measured, "random data that is measured", run
    yield ("require_kernels",), runs.here and operations != {TABLE_4}, "rows that are measured", run
    yield ("dtype",), runs.measured or bool(runs.sized), "rows that are measured or fill a memory", run
    yield ("batch",), runs.at_shapes or of_bytes, "rows of a given batch", another
    yield ("length",), runs.at_shapes or "largest-batch" in operations, "rows of a given length", another
    yield ("queries",), bool(runs.kernels & calls), "decode attention and append where they run", another_or_run
    yield ("model",), operations != {TABLE_4}, "rows of a given model", another
    yield ("preset", "bundle"), runs.of_schemes, "rows of a scheme", another
    yield ("sink", "recent"), runs.of_schemes, "rows of a scheme", another
    by_name = bool(o.preset or not o.bundle)
    yield ("sink", "recent"), by_name, "schemes by name", "bundles have their own; give --preset"
    yield ("plot",), bool(operations - untimed), "rows with a time", another


MOST_GIB = 2**33


MOST = 2**31 - 1  # rows, or tokens of one: kernels count them in 32 bits


def numbers(text: str | None, option: str, default: Sequence[int]) -> list[int]:
    """Whole numbers from 1, as 512,4096 or 32k; UsageError names the option."""
    if text is None:
        return list(default)
    counts = []
    for part in text.split(","):
        word = part.strip().lower()
        scale = 1024 if word.endswith("k") else 1
        digits = word.removesuffix("k")
        if not digits.isdecimal() or int(digits) < 1:
            raise UsageError(f"{option} {text!r}: {part.strip()!r} is not a whole number from 1; as in 1,32 or 4k,32k")
        if (number := int(digits) * scale) > MOST:
            raise UsageError(f"{option} {text!r}: {part.strip()!r} is more than {MOST}, beyond any device's memory")
        counts.append(number)
    return counts


def resolve_operations(asked: Sequence[str] | None, where: Target) -> list[str]:
    """Names of operations, groups resolved; by default the kernel-level ones, or those that can be projected."""
    members = {**{name: (name,) for name in (*OPERATIONS, *GENERATION, *ALWAYS_PROJECTED)}, **GROUPS}
    if not asked:
        tables = [TABLE_4] if where.table_4 else []
        kernels = [n for n, one in OPERATIONS.items() if one.by_default]
        return [*tables, *(["fused-attention"] if where.device is None else kernels)]
    operations: list[str] = []
    for name in asked:
        if name not in members:
            here = [one for one in members if where.device is not None or set(members[one]) <= set(PROJECTED)]
            raise UsageError(f"--operation {name}: not known; {allowed(name, here, 'kvcal names operation')}")
        unable = [one for one in members[name] if one not in PROJECTED]
        if unable and where.device is None:
            of = "" if len(unable) == len(members[name]) else f"{' and '.join(unable)} "
            raise UsageError(
                f"--operation {name}: {of}cannot be projected for {where.name}; {', '.join(PROJECTED)} can, the rest "
                "is "
                "measured on a device"
            )
        operations += [one for one in members[name] if one not in operations]
    return operations


def benched_schemes(o: BenchOptions, geometry: Geometry, default: tuple[str, ...]) -> list[Benched]:
    names, bundles = list(o.preset or ()), list(o.bundle or ())
    if not names and not bundles:
        groups = [GROUP_SCHEMES[name] for name in o.operation or () if name in GROUP_SCHEMES]
        names = list(dict.fromkeys(name for group in groups or [default] for name in group))
    windows = None if o.sink is None and o.recent is None else windows_of(o)
    return schemes.schemes(names, bundles, geometry, windows)


def windows_of(o: BenchOptions) -> Windows:
    default = schemes.WINDOWS
    return Windows(
        default.sink if o.sink is None else o.sink,
        default.recent if o.recent is None else o.recent,
        default.block,
    )


def dtype_of(o: BenchOptions, default: torch.dtype) -> torch.dtype:
    return default if o.dtype == "auto" else to_dtype(o.dtype)


def paper_dtype(o: BenchOptions, operations: Sequence[str], otherwise: torch.dtype) -> torch.dtype:
    """The dtype of a paper's table where nothing else is asked for."""
    alone = (name for name in o.operation or () if name in GROUP_DTYPE and set(operations) <= set(GROUPS[name]))
    return next((GROUP_DTYPE[name] for name in alone), otherwise)
