"""The figures of `kvcal bench` that are measured: kernels at each shape, and whole models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvcal_artifacts.errors import UsageError

from ..bench import caches, generation, jetson, measure, paper
from ..bench.caches import Kind
from ..bench.fused import require_fused
from ..bench.omitted import omitted_rows
from ..bench.operation import Operation
from ..bench.operations import OPERATIONS, TABLES
from ..bench.rows import Row
from ..bench.schemes import Benched
from ..bench.tables import MIXKVQ
from ..bench.target import Target
from ..bench.timing import Clock
from ..calibrate.checkpoint import CommandCheckpoint, short
from ..calibrate.provenance import cpu_record
from ..models import configuration, loading
from ..models.memory import check_fits
from ..models.names import ModelSource, resolve
from ..pipeline.identity import code_identity
from ..report.progress import tracked
from .bench_options import (
    AT_SHAPE,
    GENERATION,
    GPU_SCHEMES,
    MODEL,
    MODEL_CPU,
    PAPER_SCHEMES,
    TABLE_4,
    benched_schemes,
    dtype_of,
    numbers,
    paper_dtype,
)
from .bench_projected import assumptions, memory_rows
from .bundles import file_sha256
from .common import Say, each_line_once
from .doctor import machine
from .options import BenchOptions

if TYPE_CHECKING:
    from ..models.geometry import Geometry
    from ..models.structure import CausalLM


@dataclass(frozen=True)
class Session:
    """What is measured, and with what. shapes: (batch, length); dtype: of kernels; say_once: says each line the first
    time.
    """

    o: BenchOptions
    where: Target
    device: torch.device
    operations: list[str]
    source: ModelSource
    geometry: Geometry
    benched: list[Benched]
    shapes: list[tuple[int, int]]
    dtype: torch.dtype
    rows: RowCheckpoint
    say: Say
    say_once: Say

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def clock(self) -> Clock:
        return self.rows.clock


def _session(o: BenchOptions, where: Target, model: str, operations: list[str], say: Say) -> Session:
    assert where.device is not None
    on_gpu = where.device.type == "cuda"
    source = resolve(model, o.revision)
    geometry = configuration.geometry(source)
    benched = benched_schemes(o, geometry, GPU_SCHEMES if on_gpu else PAPER_SCHEMES)
    jetson_here = where.jetson and on_gpu
    lengths = numbers(o.length, "--length", paper.LENGTHS if jetson_here else [4096, 32768] if on_gpu else [2048])
    batches = numbers(o.batch, "--batch", [1] if jetson_here or not on_gpu else [1, 8, 32])
    shapes = [(batch, length) for batch in batches for length in lengths]
    clock = Clock(where.device, o.repeats, o.seconds)
    rows = RowCheckpoint(
        CommandCheckpoint("bench", _record(o, source), output=None, resume=o.resume, say=say), say, clock
    )
    return Session(
        o,
        where,
        where.device,
        operations,
        source,
        geometry,
        benched,
        shapes,
        dtype_of(o, torch.float16),
        rows,
        say,
        each_line_once(say),
    )


def measured_rows(
    o: BenchOptions, where: Target, model: str, operations: list[str], say: Say
) -> tuple[dict[str, Any], CommandCheckpoint]:
    """The result, and what the file stores of it."""
    session = _session(o, where, model, operations, say)
    clock = session.clock
    if o.require_kernels:
        require_fused(session.benched, session.geometry, session.dtype, session.device)
    rows = list(jetson.table_4()) if TABLE_4 in operations else []
    generates, runs_model = bool(set(operations) & set(GENERATION)), False
    if generates:  # before kernels are measured: a model that does not fit shows now
        runs_model = _check_model_fits(session)
    rows += _kernel_rows(session, able=bool(generates or rows))
    rows = _with_shares(rows)
    if runs_model:
        clock.copy_bandwidth()
    if "copy" in clock.ceilings:
        clock.read_bandwidth()
    clock.release()
    if generates:
        rows += _generation(session)
    why = "InnerQ's Table 4 is computed, on every device"
    return {
        **({"why_projected": why, **assumptions(rows, True)} if TABLE_4 in operations else {}),
        "resumed_rows": session.rows.resumed,
        "resumed_copy_gb_per_s": [rate / 1e9 for rate in dict.fromkeys(session.rows.copies)],
        "dtype": str(session.dtype).removeprefix("torch."),
        "machine": machine(),
        **_ceilings(clock),
        "threads": None if session.on_gpu else torch.get_num_threads(),
        "rows": rows,
    }, session.rows.work


def _ceilings(clock: Clock) -> dict[str, float | None]:
    """What the device was measured to reach; None where it was not."""
    units = {"copy_gb_per_s": ("copy", 1e9), "read_gb_per_s": ("read", 1e9), "matmul_teraflops": ("matmul", 1e12)}
    return {
        name: clock.ceilings[what] / unit if what in clock.ceilings else None for name, (what, unit) in units.items()
    }


def _check_model_fits(session: Session) -> bool:
    """Whether a whole model runs; OutOfMemory where it does not fit."""
    source, dtype, runs = _whole(session.o, session.on_gpu, session.operations)
    if runs:
        size = configuration.geometry(source).parameters * dtype.itemsize
        check_fits(source.label, size, dtype, session.device)
    return runs


def _kernel_rows(session: Session, able: bool) -> list[Row]:
    """Timed operations at each shape, and what was skipped. able: whether the run has other rows.

    Raises UsageError where there is neither.
    """
    model, o = session.source.public, session.o
    operations: list[Operation] = [OPERATIONS[name] for name in session.operations if name in OPERATIONS]
    rows: list[Row] = []
    shapes = session.shapes if operations else []
    for shape in tracked(shapes, "Measuring, batches and lengths", len(shapes)):
        timed = session.rows.rows(
            f"batch {shape[0]}, length {shape[1]}",
            partial(
                measure.rows_of,
                model,
                session.geometry,
                session.benched,
                operations,
                [shape],
                session.clock,
                session.dtype,
                session.where.name,
                session.say_once,
                o.seed,
                o.queries,
            ),
        )
        able |= any(row.operation in session.operations for row in timed)
        rows += timed
        rows += omitted_rows(
            timed,
            model,
            session.geometry,
            session.benched,
            operations,
            shape,
            session.device,
            session.dtype,
            session.where.name,
            o.queries,
        )
    if not able:
        session.rows.work.remove()
        first = rows[0]
        raise UsageError(f"nothing to measure: {first.operation} of {first.scheme}: {first.refused}")
    return rows


def _record(o: BenchOptions, source: ModelSource) -> dict[str, object]:
    """What all rows of a run depend on."""
    files = ("bundle", "csv", "plot", "compare", "json", "wide", "resume", "model", "revision")
    here = {name: value for name, value in machine().items() if name != "GPU memory free"}
    return {
        "options": {name: value for name, value in o.by_name().items() if name not in files},
        "bundles": [file_sha256(path) for path in o.bundle or ()],
        "model": [source.label, asdict(configuration.geometry(source))],
        "machine": here,
        "cpu": cpu_record(),
        "code": code_identity(),
    }


@dataclass
class RowCheckpoint:
    """Rows that a killed run had measured.

    Kernels of one shape are stored together, so that FP16 is of the same run; of whole models each scheme is stored
    alone. resumed: how many rows were taken over. copies: bytes per second at which the runs that measured them copied.
    """

    work: CommandCheckpoint
    say: Say
    clock: Clock
    resumed: int = 0
    copies: list[float] = field(default_factory=list)

    def rows(self, of: str, measured: Callable[[], Iterable[Row]]) -> list[Row]:
        name = f"rows-{short(of)}"
        earlier: dict[str, Any] | None = self.work.read(name)
        if earlier is not None:
            self.resumed += len(earlier["rows"])
            self.copies += earlier["copy"]
            self.say(f"resuming: {of}, measured by a run before, from {self.work.folder}")
            return [Row(**row) for row in earlier["rows"]]
        rows, ceilings = list(measured()), self.clock.ceilings
        copies = [ceilings["copy"]] if "copy" in ceilings else []
        self.work.keep(name, {"rows": [asdict(row) for row in rows], "copy": copies})
        return rows


def _with_shares(rows: list[Row]) -> list[Row]:
    """MixKVQ's Table 7: where its three operations are there, each one's part of their sum, the paper's next to it."""
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
            of_paper: dict[str, Any] = {
                "paper_table": MIXKVQ,
                "paper_share_percent": share,
                "paper_calls_percent": calls,
            }
            row = replace(row, more={**row.more, "share_percent": 100 * row.microseconds / sum(times), **of_paper})
        out.append(row)
    return out


def _whole(o: BenchOptions, on_gpu: bool, operations: Sequence[str]) -> tuple[ModelSource, torch.dtype, bool]:
    """(whole model that is meant, its dtype, whether it runs: else only its bytes are counted)."""
    runs_here = not on_gpu and bool(AT_SHAPE & set(operations))
    name = o.model if o.model is not None else MODEL_CPU if runs_here else MODEL
    source = resolve(name, o.revision)
    return (
        source,
        dtype_of(o, paper_dtype(o, operations, torch.bfloat16 if on_gpu else torch.float32)),
        on_gpu or runs_here,
    )


@dataclass(frozen=True)
class Generating:
    """A whole model on the device, and the caches that it is measured with. name: of the model, as rows bear it."""

    session: Session
    name: str
    model: CausalLM
    kinds: list[Kind]

    def rows(
        self, label: str, rows_of: Callable[..., Iterable[Row]], *arguments: object, **options: object
    ) -> list[Row]:
        """Measured, or taken over from a killed run; label: what they are of."""
        return self.session.rows.rows(label, partial(rows_of, self.name, self.model, *arguments, **options))


def _generation(session: Session) -> list[Row]:
    o, operations, device = session.o, session.operations, session.device
    source, dtype, runs = _whole(o, session.on_gpu, operations)
    geometry = configuration.geometry(source)
    benched = benched_schemes(o, geometry, PAPER_SCHEMES)
    rows: list[Row] = []
    if not session.on_gpu:  # a CPU has no separate memory to fill
        notes: list[str] = []
        rows += memory_rows(o, operations, benched, geometry, source.public, session.where, notes)
        for line in notes:
            session.say(line)
    if not runs:
        return rows
    if session.on_gpu and o.memory:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, o.memory * 2**30 / total), device)
    session.say(f"making {source.label} with random weights")
    model = loading.load_model(source, dtype=dtype, device=device, random_weights=True, seed=o.seed).model
    kinds = caches.kinds(model, geometry, benched, o.require_kernels)
    generating = Generating(session, source.public, model, kinds)
    measured = _step_rows(generating)
    if session.on_gpu and "largest-batch" in operations:
        for length in dict.fromkeys(length for _, length in session.shapes):
            measured += _largest_batch_rows(generating, length)
    if session.on_gpu and "longest-generation" in operations:
        gib = o.memory or torch.cuda.get_device_properties(device).total_memory / 2**30
        session.say(f"longest generation on {gib:g} GiB")
        for kind in kinds:
            label = f"longest-generation {kind.name} ({kind.path})"
            measured += generating.rows(label, generation.longest_rows, [kind], 1, gib, session.where.name)
    return rows + generation.with_fp16_ratios(measured)


def _step_rows(generating: Generating) -> list[Row]:
    """Decode steps at each --batch and --length, as asked for: eager, compiled, by model.generate()."""
    session = generating.session
    ways: dict[str, Callable[..., Iterable[Row]]] = {
        "generate": generation.generate_rows,
        generation.COMPILED_STEPS: generation.compiled_rows,
        generation.CALLED: generation.called_rows,
    }
    rows: list[Row] = []
    for operation, rows_of in ways.items():
        if operation not in session.operations:
            continue
        session.say(f"{operation}: decode steps from caches filled with random packed data")
        cases = list(itertools.product(session.shapes, generating.kinds))
        for shape, kind in tracked(cases, f"Measuring {operation}", len(cases)):
            label = f"{operation} {kind.name} ({kind.path}), batch {shape[0]}, length {shape[1]}"
            copy = session.clock.ceilings.get("copy")
            rows += generating.rows(label, rows_of, [kind], [shape], session.where.name, copy=copy)
    return rows


def _largest_batch_rows(generating: Generating, length: int) -> list[Row]:
    """How many rows of that length each cache fits, and model.generate() with so many."""
    session, device_name = generating.session, generating.session.where.name
    copy = session.clock.ceilings.get("copy")
    session.say(f"largest batch at {length} tokens")
    largest: dict[str, int] = {}  # by path
    rows: list[Row] = []
    for kind in generating.kinds:
        sized = generating.rows(
            f"largest-batch {kind.name} ({kind.path}), length {length}",
            generation.largest_batch_rows,
            [kind],
            length,
            device_name,
            largest,
            copy,
        )
        rows += sized
        if sizes := [size for row in sized if isinstance(size := row.more.get("largest_batch"), int)]:
            largest[kind.path] = sizes[0]
            rows += generating.rows(
                f"{generation.LARGEST_CALLED} {kind.name} ({kind.path}), length {length}",
                generation.largest_called_rows,
                kind,
                length,
                sizes[0],
                device_name,
                copy,
            )
    return rows
