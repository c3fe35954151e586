"""`kvcal bench`."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvcal_artifacts.bundle import write_atomically
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.scheme import Windows
from kvcal_kernels.device import on

from .. import __version__
from ..bench import caches, devices, generation, jetson, measure, memory, paper, schemes
from ..bench.fused import require_fused
from ..bench.left_out import left_out
from ..bench.operation import Operation
from ..bench.operations import OPERATIONS, TABLES
from ..bench.rows import KEY, SETTINGS, Row, compared, made_by, read_earlier, remarks, to_csv
from ..bench.schemes import Benched
from ..bench.tables import MIXKVQ, no_scheme
from ..bench.target import Target, target
from ..bench.timing import Clock
from ..calibrate.checkpoint import Work, short
from ..calibrate.provenance import cpu_record
from ..models import configuration, loading
from ..models.devices import to_dtype
from ..models.memory import check_room
from ..models.names import ModelSource, resolve
from ..pipeline.build import code_identity
from ..report.checkout import commit
from ..report.outputs import check_output
from ..report.plots import check_plot, plot_bench
from ..report.suggest import allowed
from .bundles import file_sha256
from .common import Say, refuse_idle
from .doctor import machine

PAPER_SCHEMES = tuple(name for name in paper.TABLE_4 if name != "fp16")
GPU_SCHEMES = (
    "inner-4", "innerq-base", "innerq-hybrid", "innerq-small", "inner-2", "kivi-2", "kivi-2-g128", "squat-2",
    "squat-2-g128", "turboquant-4-3", "higgs-2", "higgs-3", "higgs-4", "mixkvq-16-16", "mixkvq-16-16-g128",
)  # fmt: skip
SIZED = ("largest-batch", "longest-generation")  # how far a memory goes
AT_SHAPE = {"generate", "generate-compiled", "generate-call"}  # a whole model at each --batch and --length
GENERATION = {  # of whole models, and what they are
    "generate": "decode steps of a whole model: tokens a second, peak memory",
    "generate-compiled": "the same with a compiled forward under a CUDA graph, a minute or so a scheme to compile",
    "generate-call": "the same by model.generate() itself, as a caller gets them",
    "largest-batch": "rows of --length tokens that a memory holds, and their tokens a second, also by model.generate()",
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


def run_bench(o: dict[str, Any], say: Say, show: Callable[[dict[str, Any]], None], said: Collection[str] = ()) -> None:
    """Measure, or project where the device is not this machine; show rows, and how they compare with an earlier file's, then
    write the files asked for. What was measured is kept until all of that is out.

    show: prints the result. said: names of the options that somebody gave; UsageError for one that no row takes.
    """
    _check_numbers(o)
    _check_files(o)
    ran_from = commit()  # now: the next one may be made while this runs
    earlier = read_earlier(o["compare"]) if o["compare"] is not None else None
    where = target(o["device"])
    wanted = _wanted(o["operation"], where)
    check_taken(o, where, wanted, said)
    _check_memory(o, where, wanted)
    model = o["model"]
    if model is None:
        model = next((GROUP_MODEL[name] for name in o["operation"] or () if name in GROUP_MODEL), MODEL)
    work: Work | None = None
    if where.device is None:
        found = _projected(o, where, model, wanted)
    else:
        with on(where.device):  # the current one for all that is measured: CUDA's events and streams are of that
            found, work = _measured(o, where, model, wanted, say)
    rows = [row.as_dict() for row in found.pop("rows")]
    beside = None if earlier is None else compared(rows, earlier.rows)
    found = {
        "version": __version__, "commit": ran_from, "device": where.name, "projected": where.device is None, **found,
        "rows": rows, "compared": beside,
    }  # fmt: skip
    if earlier is not None:
        if not beside:
            say(_nothing_common(o["compare"], earlier.rows, rows))
        for line in remarks(rows, made_by(found), earlier):
            say(f"--compare {o['compare']}: {line}")
    with nullcontext() if work is None else work.until_out():
        _put_out(o, found, show)


def _put_out(o: dict[str, Any], found: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> None:
    """The table first: of all that is asked for it is the least to fail. The files even where it does."""
    try:
        show(found)
    finally:
        if o["csv"] is not None:
            write_atomically(o["csv"], to_csv(found["rows"]).encode(), "--csv")
        if o["plot"] is not None:
            plot_bench(found["rows"], o["plot"])


def _nothing_common(path: Path, earlier: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """Names what must be alike, and the devices, in which files differ most often."""
    then, this = (", ".join(sorted({str(row["device"]) for row in every})) or "no device" for every in (earlier, now))
    return (
        f"--compare {path}: no row in common, nothing is compared: its rows are of {then}, these of {this}; compared are rows "
        f"that agree in {', '.join((*KEY, *SETTINGS))}"
    )


def _check_numbers(o: dict[str, Any]) -> None:
    """What the command line's own ranges let through: NaN, infinity, no memory at all."""
    if o["memory"] is not None and not 0 < o["memory"] <= MOST_GIB:
        raise UsageError(
            f"--memory {o['memory']:g}: GiB, needs a number above 0 and up to {MOST_GIB}, 64 bits of bytes"
        )
    if not 0 <= o["seconds"] < math.inf:
        raise UsageError(f"--seconds {o['seconds']:g}: needs a finite number from 0")


def _check_files(o: dict[str, Any]) -> None:
    """UsageError where a file asked for cannot be written, or would replace another that is asked for or read."""
    try:
        if o["plot"] is not None:
            check_plot(o["plot"])
        if o["csv"] is not None:
            check_output(o["csv"], "--csv")
    except KVCalError as error:
        raise UsageError(str(error)) from error
    read = [("--compare", o["compare"]), *(("--bundle", path) for path in o["bundle"] or ())]
    seen: dict[str, str] = {}
    for option, path in (*read, ("--csv", o["csv"]), ("--plot", o["plot"])):
        if path is None:
            continue
        before = seen.setdefault(os.path.realpath(path), option)
        if option != before and option in ("--csv", "--plot"):
            raise UsageError(
                f"{option} {path}: is the file of {before} too, and would replace it; give another file name"
            )


def check_taken(o: dict[str, Any], where: Target, wanted: Sequence[str], said: Collection[str]) -> None:
    """UsageError for the first option given (`said`) that none of the wanted rows takes."""
    for names, taken, of, instead in _idle(o, where, set(wanted)):
        if not taken:
            refuse_idle(said, names, of, f"{instead}, or leave it out")


def _memory(o: dict[str, Any], where: Target) -> float | None:
    """GiB that bytes alone are counted for."""
    return o["memory"] or (where.profile.memory if where.profile else None)


def _check_memory(o: dict[str, Any], where: Target, wanted: Sequence[str]) -> None:
    """UsageError where a memory is to be filled that nobody named; a GPU has its own. Before anything is measured."""
    on_gpu = where.device is not None and where.device.type == "cuda"
    if set(SIZED) & set(wanted) and not on_gpu and _memory(o, where) is None:
        raise UsageError("largest-batch and longest-generation: on how much memory? give --memory in GiB")


def _idle(o: dict[str, Any], where: Target, wanted: set[str]) -> Iterable[tuple[tuple[str, ...], bool, str, str]]:
    """(options, whether a row takes them, what they apply to, what to do)."""
    here, on_gpu = where.device is not None, where.device is not None and where.device.type == "cuda"
    kernels, sized = wanted & set(OPERATIONS) if here else set(), wanted & set(SIZED)
    runs = bool(kernels or (here and AT_SHAPE & wanted) or (on_gpu and sized))  # else of bytes alone
    shaped = bool(kernels or wanted & {*AT_SHAPE, "fused-attention"})
    alike = {TABLE_4, *(name for name, one in OPERATIONS.items() if one.refuses is no_scheme)}
    untimed = {"longest-generation"} if on_gpu else set(SIZED)
    another, run = (
        "give another --operation",
        "give an --operation that runs" if here else "give a --device that is here",
    )
    yield ("memory",), bool(sized), " and ".join(SIZED), "give --operation for one of them"
    yield ("repeats", "seconds"), bool(kernels), "kernels that are timed", another if here else run
    yield ("seed",), runs, "random data that is measured", run
    yield ("require_kernels",), here and wanted != {TABLE_4}, "rows that are measured", run
    yield ("dtype",), runs or bool(sized), "rows that are measured or fill a memory", run
    yield ("batch",), shaped or ("longest-generation" in wanted and not on_gpu), "rows of a given batch", another
    yield ("length",), shaped or "largest-batch" in wanted, "rows of a given length", another
    calls = {name for name, one in OPERATIONS.items() if one.of_calls}
    yield ("queries",), bool(kernels & calls), "decode attention and append where they run", another if here else run
    yield ("model",), wanted != {TABLE_4}, "rows of a given model", another
    yield ("preset", "bundle"), bool(wanted - alike), "rows of a scheme", another
    yield ("sink", "recent"), bool(wanted - alike), "rows of a scheme", another
    yield (
        ("sink", "recent"),
        bool(o["preset"] or not o["bundle"]),
        "schemes by name",
        "bundles have their own; give --preset",
    )
    yield ("plot",), bool(wanted - untimed), "rows with a time", another


MOST_GIB = 2**33
MOST = 2**31 - 1  # rows, or tokens of one: kernels count them in 32 bits


def numbers(text: str | None, option: str, default: Sequence[int]) -> list[int]:
    """Whole numbers from 1, as 512,4096 or 32k; UsageError names the option."""
    if text is None:
        return list(default)
    found = []
    for part in text.split(","):
        word = part.strip().lower()
        scale = 1024 if word.endswith("k") else 1
        digits = word.removesuffix("k")
        if not digits.isdecimal() or int(digits) < 1:
            raise UsageError(f"{option} {text!r}: {part.strip()!r} is not a whole number from 1; as in 1,32 or 4k,32k")
        if (number := int(digits) * scale) > MOST:
            raise UsageError(f"{option} {text!r}: {part.strip()!r} is more than {MOST}, beyond any device's memory")
        found.append(number)
    return found


def _wanted(given: Sequence[str] | None, where: Target) -> list[str]:
    """Names of operations, groups resolved; by default the kernel-level ones, or those that can be projected."""
    known = {**{name: (name,) for name in (*OPERATIONS, *GENERATION, *ALWAYS_PROJECTED)}, **GROUPS}
    if not given:
        tables = [TABLE_4] if where.table_4 else []
        kernels = [n for n, one in OPERATIONS.items() if one.by_default]
        return [*tables, *(["fused-attention"] if where.device is None else kernels)]
    found: list[str] = []
    for name in given:
        if name not in known:
            here = [one for one in known if where.device is not None or set(known[one]) <= set(PROJECTED)]
            raise UsageError(f"--operation {name}: not known; {allowed(name, here, 'kvcal names operation')}")
        unable = [one for one in known[name] if one not in PROJECTED]
        if unable and where.device is None:
            of = "" if len(unable) == len(known[name]) else f"{' and '.join(unable)} "
            raise UsageError(
                f"--operation {name}: {of}cannot be projected for {where.name}; {', '.join(PROJECTED)} can, the rest is "
                "measured on a device"
            )
        found += [one for one in known[name] if one not in found]
    return found


def _schemes(o: dict[str, Any], geometry: Any, default: tuple[str, ...]) -> list[Benched]:
    names, bundles = list(o["preset"] or ()), list(o["bundle"] or ())
    if not names and not bundles:
        groups = [GROUP_SCHEMES[name] for name in o["operation"] or () if name in GROUP_SCHEMES]
        names = list(dict.fromkeys(name for group in groups or [default] for name in group))
    given = None if o["sink"] is None and o["recent"] is None else _windows(o)
    return schemes.schemes(names, bundles, geometry, given)


def _windows(o: dict[str, Any]) -> Windows:
    own = schemes.WINDOWS
    return Windows(
        own.sink if o["sink"] is None else o["sink"], own.recent if o["recent"] is None else o["recent"], own.block
    )


def _dtype(o: dict[str, Any], default: torch.dtype) -> torch.dtype:
    return default if o["dtype"] == "auto" else to_dtype(o["dtype"])


def _papers(o: dict[str, Any], wanted: Sequence[str], otherwise: torch.dtype) -> torch.dtype:
    """The dtype of a paper's table where nothing else is asked for."""
    alone = (name for name in o["operation"] or () if name in GROUP_DTYPE and set(wanted) <= set(GROUPS[name]))
    return next((GROUP_DTYPE[name] for name in alone), otherwise)


# Projected.


def _projected(o: dict[str, Any], where: Target, model: str, wanted: list[str]) -> dict[str, Any]:
    assert where.profile is not None
    source = resolve(model, o["revision"])
    geometry = configuration.geometry(source)
    own = _schemes(o, geometry, PAPER_SCHEMES)
    rows: list[Row] = []
    if TABLE_4 in wanted:
        rows += jetson.table_4()
    if "fused-attention" in wanted:
        lengths = numbers(o["length"], "--length", paper.LENGTHS)
        shapes = [(batch, length) for batch in numbers(o["batch"], "--batch", [1]) for length in lengths]
        for batch, length in shapes:
            rows += jetson.projected(where.profile, own, geometry, source.public, batch, length)
    rows += _of_memory(o, wanted, own, geometry, source.public, where)
    no = "not known to be a" if where.jetson else "no"
    return {
        "why_projected": f"this machine is {no} {where.profile.title}: every figure is projected, none measured",
        **_assumed(rows, TABLE_4 in wanted),
        "profile": {
            "title": where.profile.title, "capability": ".".join(map(str, where.profile.capability)),
            "sms": where.profile.sms, "clock_mhz": where.profile.clock, "gb_per_s": where.profile.bandwidth,
            "memory_gib": where.profile.memory, "triton": where.profile.why_no_triton or f"from {where.profile.least_triton}",
            "sources": dict(where.profile.sources),
        },
        "rows": rows,
    }  # fmt: skip


def _assumed(rows: list[Row], table_4: bool) -> dict[str, Any]:
    """What projected times rest on, and how far they are from the paper's FP16."""
    xavier, timed = jetson.fitted(), any(row.projected and row.microseconds is not None for row in rows)
    unable_there = devices.device(jetson.PAPER_DEVICE).why_no_triton
    return {
        "assumed": jetson.ASSUMED if timed else None,
        "efficiency": xavier.efficiency, "launch_microseconds": xavier.launch,
        "paper_device": f"the Xavier NX cannot run our kernels: {unable_there}" if table_4 else None,
        "largest_miss": jetson.largest_miss(rows) if table_4 else None,
    }  # fmt: skip


def _of_memory(
    o: dict[str, Any], wanted: list[str], own: list[Benched], geometry: Any, model: str, where: Target
) -> list[Row]:
    """largest-batch and longest-generation, as far as asked for, from bytes."""
    if not set(SIZED) & set(wanted):
        return []
    gib = _memory(o, where)
    assert gib is not None  # _check_memory
    every = memory.footprints(geometry, own, _dtype(o, _papers(o, wanted, torch.float16)), where.profile)
    rows: list[Row] = []
    if "largest-batch" in wanted:
        for length in numbers(o["length"], "--length", [32768]):
            rows += memory.projected_batch(model, every, length, gib, where.name)
    if "longest-generation" in wanted:
        for batch in numbers(o["batch"], "--batch", [1]):
            rows += memory.projected_longest(model, every, batch, gib, where.name)
    return rows


# Measured.


def _measured(o: dict[str, Any], where: Target, model: str, wanted: list[str], say: Say) -> tuple[dict[str, Any], Work]:
    """The result, and what is kept of it."""
    assert where.device is not None
    on_gpu = where.device.type == "cuda"
    source = resolve(model, o["revision"])
    geometry = configuration.geometry(source)
    own = _schemes(o, geometry, GPU_SCHEMES if on_gpu else PAPER_SCHEMES)
    jetson_here = where.jetson and on_gpu
    lengths = numbers(o["length"], "--length", paper.LENGTHS if jetson_here else [4096, 32768] if on_gpu else [2048])
    batches = numbers(o["batch"], "--batch", [1] if jetson_here or not on_gpu else [1, 8, 32])
    shapes = [(batch, length) for batch in batches for length in lengths]
    clock = Clock(where.device, o["repeats"], o["seconds"])
    dtype = _dtype(o, torch.float16)
    kept = KeptRows(Work("bench", _record(o, source), output=None, resume=o["resume"], say=say), say, clock)
    kernels: list[Operation] = [OPERATIONS[name] for name in wanted if name in OPERATIONS]
    rows: list[Row] = []
    if o["require_kernels"]:
        require_fused(own, geometry, dtype, where.device)
    once, generated = _once(say), bool(set(wanted) & set(GENERATION))
    if TABLE_4 in wanted:
        rows += jetson.table_4()
    if generated:  # before kernels are measured: a model that does not fit is known now
        whole, kind, runs = _whole(o, on_gpu, wanted)
        if runs:
            check_room(whole.label, configuration.geometry(whole).parameters * kind.itemsize, kind, where.device)
    able = bool(generated or rows)
    for shape in shapes if kernels else []:
        given = source.public, geometry, own, kernels, [shape], clock, dtype, where.name, once, o["seed"], o["queries"]
        found = kept.rows(f"batch {shape[0]}, length {shape[1]}", partial(measure.rows_of, *given))
        able |= any(row.operation in wanted for row in found)
        rows += found
        rows += left_out(
            found, source.public, geometry, own, kernels, shape, where.device, dtype, where.name, o["queries"]
        )
    if not able:
        kept.work.remove()
        first = rows[0]
        raise UsageError(f"nothing to measure: {first.operation} of {first.scheme}: {first.refused}")
    rows = _with_shares(rows)
    if generated and runs:
        clock.copy_bandwidth()
    if "copy" in clock.ceilings:
        clock.read_bandwidth()
    clock.release()
    if generated:
        rows += _generation(o, where, wanted, shapes, kept, say)
    ceilings, why = clock.ceilings, "InnerQ's Table 4 is computed, on every device"
    return {
        **({"why_projected": why, **_assumed(rows, True)} if TABLE_4 in wanted else {}),
        "resumed_rows": kept.resumed,
        "resumed_copy_gb_per_s": [rate / 1e9 for rate in dict.fromkeys(kept.copies)],
        "dtype": str(dtype).removeprefix("torch."),
        "machine": machine(),
        "copy_gb_per_s": ceilings["copy"] / 1e9 if "copy" in ceilings else None,
        "read_gb_per_s": ceilings["read"] / 1e9 if "read" in ceilings else None,
        "matmul_teraflops": ceilings["matmul"] / 1e12 if "matmul" in ceilings else None,
        "threads": None if on_gpu else torch.get_num_threads(),
        "rows": rows,
    }, kept.work


def _record(o: dict[str, Any], source: ModelSource) -> dict[str, Any]:
    """What all rows of a run depend on."""
    files = ("bundle", "csv", "plot", "compare", "json", "resume", "model", "revision")
    here = {name: value for name, value in machine().items() if name != "GPU memory free"}
    return {
        "options": {name: value for name, value in o.items() if name not in files},
        "bundles": [file_sha256(path) for path in o["bundle"] or ()],
        "model": [source.label, asdict(configuration.geometry(source))], "machine": here, "cpu": cpu_record(),
        "code": code_identity(),
    }  # fmt: skip


@dataclass
class KeptRows:
    """Rows that a killed run had measured, by what they are of: kernels of one shape all in one run, and so beside FP16 of the
    same; of whole models each scheme. resumed: how many rows were taken over; copies: bytes a second that the runs which
    measured them copied at.
    """

    work: Work
    say: Say
    clock: Clock
    resumed: int = 0
    copies: list[float] = field(default_factory=list)

    def rows(self, of: str, measured: Callable[[], Iterable[Row]]) -> list[Row]:
        name = f"rows-{short(of)}"
        known: dict[str, Any] | None = self.work.read(name)
        if known is not None:
            self.resumed += len(known["rows"])
            self.copies += known["copy"]
            self.say(f"resuming: {of}, measured by a run before, from {self.work.folder}")
            return [Row(**row) for row in known["rows"]]
        rows, ceilings = list(measured()), self.clock.ceilings
        copies = [ceilings["copy"]] if "copy" in ceilings else []
        self.work.keep(name, {"rows": [asdict(row) for row in rows], "copy": copies})
        return rows


def _once(say: Say) -> Say:
    """Each line the first time: what is left out of one shape is left out of others."""
    said: set[str] = set()

    def new(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    return new


def _with_shares(rows: list[Row]) -> list[Row]:
    """MixKVQ's Table 7: where its three operations are there, each one's part of their sum, the paper's beside it."""
    names = dict(zip(TABLES["mixkvq-table-7"], paper.MIXKVQ_SHARES, strict=True))
    out = []
    for row in rows:
        same = [one for one in rows if (one.batch, one.length) == (row.batch, row.length) and one.operation in names]
        times = [one.microseconds for one in same if one.scheme in ("none", "mixkvq") and one.microseconds]
        if (
            row.operation in names
            and row.scheme in ("none", "mixkvq")
            and len(times) == len(names)
            and row.microseconds
        ):
            share, calls = paper.MIXKVQ_SHARES[names[row.operation]]
            beside = {"paper_table": MIXKVQ, "paper_share_percent": share, "paper_calls_percent": calls}
            row = replace(row, more={**row.more, "share_percent": 100 * row.microseconds / sum(times), **beside})
        out.append(row)
    return out


def _whole(o: dict[str, Any], on_gpu: bool, wanted: Sequence[str]) -> tuple[ModelSource, torch.dtype, bool]:
    """(whole model that is meant, its dtype, whether it runs: else only its bytes are counted)."""
    runs_here = not on_gpu and bool(AT_SHAPE & set(wanted))
    name = o["model"] if o["model"] is not None else MODEL_CPU if runs_here else MODEL
    source = resolve(name, o["revision"])
    return source, _dtype(o, _papers(o, wanted, torch.bfloat16 if on_gpu else torch.float32)), on_gpu or runs_here


def _generation(
    o: dict[str, Any], where: Target, wanted: list[str], shapes: list[tuple[int, int]], kept: KeptRows, say: Say
) -> list[Row]:
    assert where.device is not None
    on_gpu, copy = where.device.type == "cuda", kept.clock.ceilings.get("copy")
    source, dtype, runs = _whole(o, on_gpu, wanted)
    geometry = configuration.geometry(source)
    own = _schemes(o, geometry, PAPER_SCHEMES)
    rows: list[Row] = []
    if not on_gpu:  # a CPU has no memory of its own to fill
        rows += _of_memory(o, wanted, own, geometry, source.public, where)
    if not runs:
        return rows
    if on_gpu and o["memory"]:
        total = torch.cuda.get_device_properties(where.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, o["memory"] * 2**30 / total), where.device)
    say(f"making {source.label} with random weights")
    model = loading.load_model(source, dtype=dtype, device=where.device, random_weights=True, seed=o["seed"]).model
    every = caches.kinds(model, geometry, own, o["require_kernels"])
    measured: list[Row] = []
    ways: dict[str, Callable[..., Iterable[Row]]]
    ways = {
        "generate": generation.generate_rows,
        generation.COMPILED_STEPS: generation.compiled_rows,
        generation.CALLED: generation.called_rows,
    }
    for operation, rows_of in ways.items():
        if operation not in wanted:
            continue
        say(f"{operation}: decode steps from caches filled with random packed data")
        for shape, kind in itertools.product(shapes, every):
            measured += kept.rows(
                f"{operation} {kind.name} ({kind.path}), batch {shape[0]}, length {shape[1]}",
                partial(rows_of, source.public, model, [kind], [shape], where.name, copy=copy),
            )
    if on_gpu and "largest-batch" in wanted:
        for length in dict.fromkeys(length for _, length in shapes):
            say(f"largest batch at {length} tokens")
            found: dict[str, int] = {}
            for kind in every:
                rows_now = kept.rows(
                    f"largest-batch {kind.name} ({kind.path}), length {length}",
                    partial(
                        generation.largest_batch_rows, source.public, model, [kind], length, where.name, found, copy
                    ),
                )
                measured += rows_now
                if sizes := [row.more["largest_batch"] for row in rows_now if "largest_batch" in row.more]:
                    found[kind.path] = sizes[0]
                    given = source.public, model, kind, length, sizes[0], where.name, copy
                    measured += kept.rows(
                        f"{generation.LARGEST_CALLED} {kind.name} ({kind.path}), length {length}",
                        partial(generation.largest_called_rows, *given),
                    )
    if on_gpu and "longest-generation" in wanted:
        gib = o["memory"] or torch.cuda.get_device_properties(where.device).total_memory / 2**30
        say(f"longest generation on {gib:g} GiB")
        for kind in every:
            measured += kept.rows(
                f"longest-generation {kind.name} ({kind.path})",
                partial(generation.longest_rows, source.public, model, [kind], 1, gib, where.name),
            )
    return rows + generation.beside_fp16(measured)
