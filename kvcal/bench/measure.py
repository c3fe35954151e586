"""Kernel-level rows: every operation of every scheme next to the best FP16 of the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

import torch

from kvcal_artifacts.checked import Json
from kvcal_artifacts.codecs import Exact, Shape
from kvcal_artifacts.scheme import LayerCodecs, Windows

from ..models.geometry import Geometry
from . import peers
from .layer import Case, fill
from .needed import FreeMemory
from .operation import Operation, Prepared
from .peers import DTYPE_NAMES, Peer
from .rows import Row
from .schemes import Benched
from .timing import Clock, Timed

Say = Callable[[str], None]
POSSIBLE = 1.2  # times the rate of torch's product: more is no speed, but something skipped
FP16_BITS = {torch.float16: 16.0, torch.bfloat16: 16.0, torch.float32: 32.0}


def fp16_scheme(geometry: Geometry) -> Benched:
    """Nothing compressed: a case for the peers."""
    shape = Shape(geometry.kv_heads, geometry.head_dim, 1)
    codecs = LayerCodecs(Exact(shape, "key", "float16"), Exact(shape, "value", "float16"))
    return Benched("fp16", codecs, Windows(0, 0, 1), "post_rope")


def rows_of(
    model: str,
    geometry: Geometry,
    schemes: Sequence[Benched],
    operations: Sequence[Operation],
    shapes: Iterable[tuple[int, int]],
    clock: Clock,
    dtype: torch.dtype,
    device_name: str,
    say: Say,
    seed: int = 0,
    new: int = 1,
) -> list[Row]:
    """Measured rows of every scheme and operation at these shapes. shapes: (batch, length) pairs; new: tokens that a
    call brings, the last of them. The first rows of each shape are the FP16 peers, if an operation compares with them
    that some scheme has.
    """
    rows: list[Row] = []
    omitted: dict[str, str] = {}
    for batch, length in shapes:
        plain = Case(fp16_scheme(geometry), geometry, batch, length, clock.device, dtype, seed, new)
        best: Peer | None = None
        cases = [replace(plain, scheme=scheme) for scheme in schemes]
        attends = [operation for operation in operations if operation.peer == "attention"]
        if any(one.alone or one.refuses(case) is None for one in attends for case in cases):
            say(f"batch {batch}, length {length}: FP16 attention, every backend")
            measured_peers = peers.measure(plain, clock)
            best = peers.best(measured_peers)
            if best is None and measured_peers:
                omitted[f"FP16 attention at {length}"] = measured_peers[0].why_not or "no backend runs"
            rows += [_peer_row(model, plain, peer, best, clock, device_name) for peer in measured_peers]
        free = FreeMemory.of(clock)
        for operation in operations:
            if operation.alone:
                say(f"batch {batch}, length {length}: {operation.name}")
                rows.append(_row(model, plain, operation, best, clock, device_name, free))
        for case in cases:
            scheme, free = case.scheme, FreeMemory.of(clock)  # before what operations share is there
            for operation in operations:
                why = operation.refuses(case)
                if why is not None:
                    if not operation.alone:
                        omitted[f"{operation.name} {scheme.name} at {length}"] = why
                    continue
                say(f"batch {batch}, length {length}: {operation.name} {scheme.name}")
                rows.append(_row(model, case, operation, best, clock, device_name, free))
            fill.cache_clear()
    for name, why in omitted.items():
        say(f"left out: {name}: {why}")
    return rows


def _peer_row(model: str, case: Case, peer: Peer, best: Peer | None, clock: Clock, device: str) -> Row:
    width = 4 if peer.name.endswith("float32") else 2
    size = 2 * case.batch * case.geometry.kv_heads * case.length * case.geometry.head_dim * width
    taken = None if peer.timed is None else peer.timed.microseconds
    fastest = None if best is None or best.timed is None else best.timed.microseconds
    return Row(
        operation="decode-attention",
        scheme="fp16",
        model=model,
        batch=case.batch,
        length=case.length,
        microseconds=taken,
        stored_bits=8.0 * width,
        fraction_of_copy=_fraction(size, taken, clock),
        ratio_to_fp16=None if taken is None or fastest is None else fastest / taken,
        fp16_backend=None if best is None else best.name,
        projected=False,
        device=device,
        path=peer.name,
        bytes=size,
        repeats=None if peer.timed is None else peer.timed.repeats,
        refused=peer.why_not,
        dtype=peer.dtype,
        queries=case.new,
        more=_spread(peer.timed),
    )


def _fraction(size: float, microseconds: float | None, clock: Clock) -> float | None:
    return None if microseconds is None else size / clock.copy_bandwidth() * 1e6 / microseconds


def _spread(timed: Timed | None, per: float = 1.0) -> dict[str, Json]:
    return {} if timed is None else {"low_microseconds": timed.low / per, "high_microseconds": timed.high / per}


def _row(
    model: str,
    case: Case,
    operation: Operation,
    best: Peer | None,
    clock: Clock,
    device: str,
    free: FreeMemory | None = None,
) -> Row:
    """A row of `operation`, refused where memory is short. free: None for enough."""
    prepared: Prepared | None = None
    if free is not None and (why := free.lacks(operation.needs(case))):
        return _figure(model, case, operation, device, None, refused=why)
    try:
        with torch.no_grad():
            prepared = operation.build(case)
            why = prepared.check()
            if why is not None:
                return _figure(model, case, operation, device, prepared, refused=why)
            timed = clock.time(prepared.run)
    except Exception as error:  # of this operation alone: what the others gave, and will give, stays
        fill.cache_clear()
        return _figure(model, case, operation, device, prepared, refused=peers.first_line(error))
    taken = timed.microseconds / prepared.per
    more = _spread(timed, prepared.per) | dict(prepared.more)
    if prepared.flops:
        fraction = _fraction_of_matmul(prepared, timed.microseconds, clock)
        if prepared.bounded and fraction > POSSIBLE:
            why = (
                f"impossible figure: {taken:.1f} us are {fraction:.2f} times the rate of torch's own matrix product "
                "here, "
                f"{POSSIBLE:g} allowed; not all of it was computed, or the device was busy: measure again"
            )
            return _figure(model, case, operation, device, prepared, refused=why)
        more |= {"teraflops": prepared.flops / timed.microseconds / 1e6, "fraction_of_matmul": fraction}
    if case.scheme.placeholder:
        more["made_up"] = case.scheme.placeholder
    compares = operation.peer == "attention" and best is not None and best.timed is not None
    return _figure(
        model,
        case,
        operation,
        device,
        prepared,
        microseconds=taken,
        repeats=timed.repeats,
        fraction_of_copy=_fraction(prepared.bytes, taken, clock),
        ratio_to_fp16=best.timed.microseconds / taken if compares and best and best.timed else None,
        fp16_backend=best.name if compares and best else None,
        more=more,
    )


def _fraction_of_matmul(prepared: Prepared, microseconds: float, clock: Clock) -> float:
    """Where it looks impossible, next to another measurement of the product."""
    rate = prepared.flops / (microseconds * 1e-6)
    fraction = rate / clock.matmul_rate()
    return rate / clock.matmul_rate(again=True) if prepared.bounded and fraction > POSSIBLE else fraction


class Figures(TypedDict, total=False):
    """Fields of a Row that a measurement gives, or why there is none."""

    microseconds: float
    fraction_of_copy: float | None
    ratio_to_fp16: float | None
    fp16_backend: str | None
    repeats: int
    refused: str
    more: Mapping[str, Json]


def _figure(
    model: str, case: Case, operation: Operation, device: str, prepared: Prepared | None, **figures: Unpack[Figures]
) -> Row:
    without = case.scheme.name == "fp16"  # an operation that no scheme has a part in
    windows = None if without else case.scheme.windows
    return Row(
        operation=operation.name,
        scheme="none" if without else case.scheme.name,
        model=model,
        batch=case.batch,
        length=case.length,
        microseconds=figures.get("microseconds"),
        stored_bits=None if without else case.scheme.stored_bits,
        fraction_of_copy=figures.get("fraction_of_copy"),
        ratio_to_fp16=figures.get("ratio_to_fp16"),
        fp16_backend=figures.get("fp16_backend"),
        projected=False,
        device=device,
        path="none" if prepared is None else prepared.path,
        bytes=None if prepared is None else prepared.bytes,
        repeats=figures.get("repeats"),
        refused=figures.get("refused"),
        dtype=DTYPE_NAMES[case.dtype],
        sink=None if windows is None else windows.sink,
        recent=None if windows is None else windows.recent,
        block=None if windows is None else windows.block,
        queries=case.new if operation.of_calls else None,
        more=figures.get("more", {}),
    )
