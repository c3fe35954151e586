"""The figures of `kvcal bench` that are computed: of devices that are not here, and of memory alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcal_artifacts.errors import UsageError

from ..bench import devices, jetson, memory, paper
from ..bench.planning import speed
from ..bench.rows import Row
from ..bench.schemes import Benched
from ..bench.target import Target
from ..models import configuration
from ..models.names import resolve
from .bench_options import PAPER_SCHEMES, SIZED, TABLE_4, benched_schemes, dtype_of, memory_gib, numbers, paper_dtype
from .options import BenchOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..models.geometry import Geometry


def projected(o: BenchOptions, where: Target, model: str, operations: list[str]) -> dict[str, Any]:
    assert where.profile is not None
    source = resolve(model, o.revision)
    geometry = configuration.geometry(source)
    benched = benched_schemes(o, geometry, PAPER_SCHEMES)
    rows: list[Row] = []
    notes: list[str] = []
    if TABLE_4 in operations:
        rows += jetson.table_4()
    if "fused-attention" in operations:
        lengths = within_context(numbers(o.length, "--length", paper.LENGTHS), source.public, geometry, notes)
        shapes = [(batch, length) for batch in numbers(o.batch, "--batch", [1]) for length in lengths]
        every = _footprints(o, operations, benched, geometry, where)
        notes += memory.too_much(every, where.profile.memory, shapes)
        for batch, length in shapes:
            rows += jetson.projected(where.profile, benched, geometry, source.public, batch, length)
    rows += memory_rows(o, operations, benched, geometry, source.public, where, notes)
    no = "not known to be a" if where.jetson else "no"
    why = f"this machine is {no} {where.profile.title}: every figure is projected, none measured"
    large = memory.too_large(source.public, geometry, where.profile.memory)
    return {
        "why_projected": "; ".join([why, *([] if large is None else [large]), *dict.fromkeys(notes)]),
        **assumptions(rows, TABLE_4 in operations),
        "profile": {
            "title": where.profile.title,
            "capability": ".".join(map(str, where.profile.capability)),
            "sms": where.profile.sms,
            "clock_mhz": where.profile.clock,
            "gb_per_s": where.profile.bandwidth,
            "memory_gib": where.profile.memory,
            "triton": where.profile.why_no_triton or f"from {where.profile.least_triton}",
            "sources": dict(where.profile.sources),
        },
        "rows": rows,
    }


def within_context(lengths: Sequence[int], model: str, geometry: Geometry, notes: list[str]) -> list[int]:
    """Lengths, in tokens, that the model holds; notes takes what to say of the others. UsageError if it holds none."""
    within = [length for length in lengths if length <= geometry.context]
    if beyond := ", ".join(f"{length:,}" for length in lengths if length > geometry.context):
        if not within:
            raise UsageError(f"--length {beyond}: {model} holds at most {geometry.context:,} tokens; give shorter ones")
        notes.append(f"no rows of {beyond} tokens, as {model} holds at most {geometry.context:,}")
    return within


def assumptions(rows: list[Row], table_4: bool) -> dict[str, Any]:
    """What projected times rest on, and how far they are from the paper's FP16."""
    xavier, timed = jetson.fitted(), [row for row in rows if row.projected and row.microseconds is not None]
    planned = any(not row.operation.startswith(TABLE_4) for row in timed)
    assumed = [jetson.PLANNED] if planned else []
    assumed += [jetson.ASSUMED] if len(timed) and table_4 else []
    unable_there = devices.device(jetson.PAPER_DEVICE).why_no_triton
    return {
        "assumed": "; ".join(assumed) or None,
        "efficiency": speed.FULL_READ if planned else xavier.efficiency,
        "launch_microseconds": speed.ATTENTION * 1e6 if planned else xavier.launch,
        "paper_device": f"the Xavier NX cannot run our kernels: {unable_there}" if table_4 else None,
        "largest_miss": jetson.largest_miss(rows) if table_4 else None,
    }


def memory_rows(
    o: BenchOptions,
    operations: list[str],
    benched: list[Benched],
    geometry: Geometry,
    model: str,
    where: Target,
    notes: list[str],
) -> list[Row]:
    """largest-batch and longest-generation, as far as asked for, from bytes. notes: takes what to say of them."""
    if not set(SIZED) & set(operations):
        return []
    gib = memory_gib(o, where)
    assert gib is not None  # _check_memory
    every = _footprints(o, operations, benched, geometry, where)
    rows: list[Row] = []
    if "largest-batch" in operations:
        for length in within_context(numbers(o.length, "--length", [32768]), model, geometry, notes):
            rows += memory.projected_batch(model, every, length, gib, where.name)
    if "longest-generation" in operations:
        for batch in numbers(o.batch, "--batch", [1]):
            rows += memory.projected_longest(model, every, batch, gib, where.name)
    return rows


def _footprints(
    o: BenchOptions, operations: list[str], benched: list[Benched], geometry: Geometry, where: Target
) -> list[memory.Footprint]:
    return memory.footprints(geometry, benched, dtype_of(o, paper_dtype(o, operations, torch.float16)), where.profile)
