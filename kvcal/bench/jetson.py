"""Projections: InnerQ's Table 4 next to a roofline of the Xavier NX, and our kernels on any device profile.

The paper's kernels decode one query head a time: 32 query heads of Llama-3.1-8B read 32 separate copies of the keys,
though 8 kv heads hold them. So its FP16 keys of 32768 tokens are 32 * 32768 * 128 * 2 bytes = 268 MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from kvcal_artifacts.checked import Json
from kvcal_artifacts.paths.preflight.verdicts import triton_version
from kvcal_artifacts.scheme import Windows
from kvcal_kernels.layout import Form

from ..models.catalogue import CATALOGUE
from ..models.geometry import Geometry
from . import paper, roofline
from .devices import DEVICES, Device
from .fused import refuses_anywhere
from .layer import Case
from .planning import cards, schemes, speed
from .roofline import Machine
from .rows import Row
from .schemes import Benched, named

PAPER_MODEL = "llama-3.1-8b"
PAPER_DEVICE = "jetson-xavier-nx"
OURS_ON = "jetson-orin-nano"  # the smallest that Triton has code for
FP16_BITS = 16.0
PLANNED = (
    f"attention takes {speed.ATTENTION * 1e6:.0f} µs a call, {speed.FULL_READ:.3f} of the data sheet's bandwidth and "
    "the instructions that it took on one H200, as `kvcal plan` has it"
)
ASSUMED = (
    f"bandwidth efficiency and launch time are those of the paper's FP16 kernels at lengths "
    f"{' and '.join(map(str, paper.FIT_LENGTHS))} on the Xavier NX, and nothing else was fitted"
)


def fitted() -> Machine:
    """The Xavier NX as the FP16 totals of Table 4 at two lengths describe it: two launches, keys' and values'."""
    totals = dict(zip(paper.LENGTHS, paper.TABLE_4["fp16"]["total"], strict=True))
    geometry = CATALOGUE[PAPER_MODEL].geometry
    sizes = [2 * geometry.heads * geometry.head_dim * length * FP16_BITS / 8 for length in paper.FIT_LENGTHS]
    return roofline.fit(DEVICES[PAPER_DEVICE], sizes, [totals[n] for n in paper.FIT_LENGTHS], launches=2)


def table_4() -> list[Row]:
    """Every cell of the paper's table, projected."""
    geometry, machine = CATALOGUE[PAPER_MODEL].geometry, fitted()
    full = {
        (part, length): _cell(machine, geometry, part, length, (FP16_BITS, FP16_BITS))
        for part in paper.PARTS
        for length in paper.LENGTHS
    }
    return [
        _row_of_table_4(machine, geometry, scheme, part, length, full[part, length][0])
        for scheme in paper.TABLE_4
        for part in paper.PARTS
        for length in paper.LENGTHS
    ]


def _bits(scheme: str, geometry: Geometry) -> tuple[float, float]:
    """Stored bits of keys and of values, from the codecs themselves."""
    if scheme == "fp16":
        return FP16_BITS, FP16_BITS
    codecs = named(scheme, geometry).codecs
    return codecs.key.bits_per_value(), codecs.value.bits_per_value()


def _cell(
    machine: Machine, geometry: Geometry, part: str, length: int, bits: tuple[float, float], heads: int | None = None
) -> tuple[float, float, int]:
    """(projected µs, bytes, launches) of one part of the table; heads: how many copies are read (default: query
    heads).
    """
    values = (geometry.heads if heads is None else heads) * geometry.head_dim * length
    chosen = {"K": bits[:1], "V": bits[1:], "total": bits}[part]
    size = sum(values * b / 8 for b in chosen)
    return machine.time(size, launches=len(chosen)), size, len(chosen)


def _row_of_table_4(machine: Machine, geometry: Geometry, scheme: str, part: str, length: int, full: float) -> Row:
    bits = _bits(scheme, geometry)
    microseconds, size, launches = _cell(machine, geometry, part, length, bits)
    shared, _, _ = _cell(machine, geometry, part, length, bits, geometry.kv_heads)
    reported = float(paper.TABLE_4[scheme][part][paper.LENGTHS.index(length)])
    implied = machine.implied(size, reported, launches)
    bits_per_value = {"K": bits[0], "V": bits[1], "total": sum(bits) / 2}[part]
    elements = launches * geometry.heads * geometry.head_dim * length
    of_paper = {"paper_bits": paper.TABLE_4_BITS[scheme][part]} if scheme in paper.TABLE_4_BITS else {}
    slots = (reported - launches * machine.launch) * 1e-6 * machine.device.issue_rate / elements
    return Row(
        operation=f"innerq-table-4 {part}",
        scheme=scheme,
        model=PAPER_MODEL,
        batch=1,
        length=length,
        microseconds=microseconds,
        stored_bits=bits_per_value,
        fraction_of_copy=machine.reading(size) / microseconds,
        ratio_to_fp16=full / microseconds,
        fp16_backend="projected",
        projected=True,
        device=PAPER_DEVICE,
        path="projected: the paper's kernel, a query head at a time",
        bytes=round(size),
        more={
            "paper_microseconds": reported,
            "off_by": microseconds / reported - 1,
            "paper_gb_per_s": implied,
            "paper_slots_per_element": slots,
            "shared_microseconds": shared,
            "used_for_fit": scheme == "fp16" and part == "total" and length in paper.FIT_LENGTHS,
            **of_paper,
        },
    )


def projected(
    device: Device, benched: Sequence[Benched], geometry: Geometry, model: str, batch: int, length: int
) -> list[Row]:
    """Fused decode attention of one layer on that device, FP16 first. A row without a time says why: Triton has no code
    for the device, the fused kernel does not take the scheme, or the layer does not fit its memory.

    Times are those of `kvcal plan` (planning/speed.py), whose rates one H200 reached: another card may reach others.
    """
    card = cards.of_profile(device)
    machine = Machine(device, speed.FULL_READ, speed.ATTENTION * 1e6)
    values = batch * geometry.kv_heads * geometry.head_dim
    size = 2.0 * values * length * 2
    beyond = _beyond(device, size)
    full = None if beyond else speed.attention_seconds(size, 2 * values * length, None, card) * 1e6

    def row(
        scheme: str,
        bits: float,
        size: float,
        microseconds: float | None,
        path: str,
        more: Mapping[str, Json] | None = None,
        refused: str | None = None,
        windows: Windows | None = None,
    ) -> Row:
        ratio = None if microseconds is None or full is None else full / microseconds
        fraction = None if microseconds is None else machine.reading(size) / microseconds
        return Row(
            operation="decode-attention" if scheme == "fp16" else "fused-attention",
            scheme=scheme,
            model=model,
            batch=batch,
            length=length,
            microseconds=microseconds,
            stored_bits=bits,
            fraction_of_copy=fraction,
            ratio_to_fp16=ratio,
            fp16_backend="projected",
            projected=True,
            device=device.name,
            path=path,
            bytes=round(size),
            dtype="float16",
            refused=refused,
            sink=None if windows is None else windows.sink,
            recent=None if windows is None else windows.recent,
            block=None if windows is None else windows.block,
            more=more or {},
        )

    more: dict[str, Json] = {"bound": None if beyond else "bytes"}
    newer = device.needs_triton(triton_version())
    rows = [row("fp16", FP16_BITS, size, full, "projected: roofline", refused=beyond, more=more)]
    for one in benched:
        size = _size(one, values, length)
        case = Case(one, geometry, batch, length, torch.device("meta"), torch.float16)
        refused = device.why_no_triton or refuses_anywhere(case) or _beyond(device, size)
        instructions, note = (refused, None) if refused else _instructions(case)
        if isinstance(instructions, str):
            rows.append(
                row(one.name, one.stored_bits, size, None, "projected", refused=instructions, windows=one.windows)
            )
            continue
        elements = 2 * values * length
        bound = _bound(machine, size, elements, instructions)
        more = {
            "bound": bound,
            "instructions_per_element": instructions,
            **_note(note, newer),
        }
        time = speed.attention_seconds(size, elements, instructions, card) * 1e6
        path = "projected: roofline of the fused kernel"
        rows.append(row(one.name, one.stored_bits, size, time, path, more=more, windows=one.windows))
    return rows


def _beyond(device: Device, size: float) -> str | None:
    """Why so many bytes of keys and values, of one layer, are not on the device at a time; None if they can be."""
    if size < device.memory * 2**30:
        return None
    return f"keys and values of one layer take {size / 2**30:.1f} GiB, the device has {device.memory:g}"


def _instructions(case: Case) -> tuple[float | str, str | None]:
    """Thread-instructions an element of a scheme that the fused kernel takes, as timed where it was, else as counted,
    and the shape that they are of where it is another; or why they are not known.
    """
    planned = schemes.SCHEMES.get(case.scheme.name)
    alike = planned is not None and (planned.frame, planned.block) == (case.scheme.frame, case.scheme.windows.block)
    if alike and planned is not None and planned.timed is not None:
        return speed.SLOTS[planned.timed], roofline.timed_at(case.geometry.head_dim, case.group)
    if case.scheme.codecs.has_codes:
        return "instructions of the compiled kernels are not counted for vector codes", None
    of = _counted_of(case)
    return roofline.counted(*of), roofline.counted_at(*of)


def _counted_of(case: Case) -> tuple[Form, Form, bool, int]:
    """What instructions depend on, of a scheme that the fused kernel takes, but not vector codes."""
    keys, values = case.scheme.codecs.key.fused(), case.scheme.codecs.value.fused()
    assert isinstance(keys, Form) and isinstance(values, Form)
    return keys, values, case.scheme.frame == "pre_rope", case.group


def _note(*notes: str | None) -> dict[str, Json]:
    every = ", ".join(filter(None, notes))
    return {"note": every} if every else {}


def _bound(machine: Machine, size: float, elements: float, instructions: float) -> str:
    issuing = elements * instructions / machine.device.issue_rate * 1e6
    return "instructions" if issuing > machine.reading(size) else "bytes"


def _size(one: Benched, values: int, length: int) -> float:
    """Bytes of keys and values of `length` tokens, windows at 16 bits; values: numbers of one token's keys."""
    exact = min(length, one.windows.sink + one.windows.recent)
    rest = length - exact
    blocks = rest // one.windows.block * one.windows.block
    exact += rest - blocks
    return 2 * values * (exact * FP16_BITS + blocks * one.stored_bits) / 8


def largest_miss(rows: Iterable[Row]) -> float:
    """The largest relative error of the FP16 totals that were not fitted."""
    misses = [
        abs(off)
        for row in rows
        if row.scheme == "fp16" and row.operation.endswith("total") and not row.more["used_for_fit"]
        if isinstance(off := row.more["off_by"], (int, float))
    ]
    return max(misses, default=0.0)
