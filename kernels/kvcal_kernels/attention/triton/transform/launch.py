"""Launches of the attention kernel over the transform codec: constants of bases as the kernel reads them, checked
arguments, compiled kernels.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....layout.transform import OCTET, QUAD, Basis, TransformBlocks, TransformForm, check_transform, half_points
from ....triton import Prepared, Ready, interpreted
from ...checks import Exact, aligned_exact, check_exact
from ...plan import (
    ALONE,
    MOST_AT_ONCE,
    MOST_WARPS,
    RING,
    SHORT,
    SPARE,
    Launch,
    Plan,
    merge_width_of,
    plan,
    power_of_two,
    splits_at_once,
)
from ...transform_side import ENTRIES, REPLICAS, side_of, table_entries, table_places
from .. import launch as common
from ..launch import LOG2E, Workspace
from .kernel import transform_kernel

MUCH_SHARED = ((9, 0), (10, 0), (10, 3))  # compute capabilities of multiprocessors with 228 KB of shared memory
MULTIPROCESSOR, RESERVED = 228 << 10, 1 << 10  # bytes of shared memory there, and what the driver takes a program
SCRATCH = 10 << 10  # bytes that Triton takes for four warps to meet, with products of eight columns
# programs of four warps that a multiprocessor runs, and registers of a thread; with 128 there, products wait for their
# own look-ups (docs/benchmarks/reasons.md)
TRIED = ((3, 168), (2, 255))
CARRIED = 16  # blocks that a program with exact tokens, 64 as a rule, has fewer (timed in docs/runs/gpu-tests.md)


def launch_of(keys: TransformForm, values: TransformForm, rows: int, device: torch.device) -> Launch:
    """Return the launch for so many query rows of a kv head: as many programs a multiprocessor as `TRIED` finds space
    for in shared memory where that is much.
    """
    if columns(rows) > 8:
        return Launch(warps=4, registers=168, slots=2)
    much = device.type == "cuda" and torch.cuda.get_device_capability(device) in MUCH_SHARED
    return tried(keys, values) if much else Launch(warps=4, registers=128)


def tried(keys: TransformForm, values: TransformForm) -> Launch:
    """Return the launch of the first of `TRIED` of which a multiprocessor's shared memory has space for a table and a
    ring of two blocks a warp in each program.
    """
    ring = 2 * 4 * (side_of(keys).slot + side_of(values).slot)
    taken = RESERVED + REPLICAS * table_entries(keys, values) + SCRATCH + ring
    registers = next((registers for programs, registers in TRIED if programs * taken <= MULTIPROCESSOR), 255)
    return Launch(warps=4, registers=registers, slots=2)


def columns(rows: int) -> int:
    """Return the columns of a product for `rows` query rows, each of which takes two."""
    return min(max(2 * power_of_two(rows), 8), 32)


def settings(
    keys: TransformForm, values: TransformForm, heads: int, ratio: int, queries: int, launch: Launch
) -> dict[str, Any]:
    """Return the compile-time constants of transform_kernel that follow from shapes and the launch."""
    rows = ratio * queries
    wide = columns(rows)
    query_rows = min(power_of_two(rows), wide // 2)
    key_side, value_side = side_of(keys), side_of(values)
    return {
        "HEADS": heads,
        "RATIO": ratio,
        "QUERIES": queries,
        "D": keys.dim,
        "CHUNKS": -(-2 * rows // wide),
        "AT_ONCE": splits_at_once(query_rows, keys.dim, launch.warps, False),
        "ROWS": query_rows,
        "KEYS": key_side,
        "VALUES": value_side,
        "TABLES": table_places(keys, values),
        "ENTRIES": table_entries(keys, values),
        "SLOTS": launch.slots or max(2, min(4, RING // (key_side.slot + value_side.slot))),
        "NW": launch.warps,
        "N": wide,
    }


def ring_bytes(constants: dict[str, Any]) -> int:
    """Return the bytes of the ring, which lies behind the shared memory that Triton manages."""
    slot: int = constants["KEYS"].slot + constants["VALUES"].slot
    return slot * int(constants["SLOTS"]) * int(constants["NW"])


def tiles_of(matrix: Tensor) -> Tensor:
    """Return matrices (..., 16, 16) as a lane has them of a product's first operand: (..., 256). Lane (g, t) has rows
    g, g + 8 of columns 2 t, 2 t + 1, then of 2 t + 8, 2 t + 9.
    """
    apart = matrix.unflatten(-1, (2, 4, 2)).unflatten(-4, (2, 8))  # (..., row half, g, column half, t, column)
    tiles: Tensor = apart.permute(*range(apart.ndim - 5), -4, -2, -3, -5, -1).flatten(-5)
    return tiles.contiguous()


def _coordinates(form: TransformForm, width: int) -> list[int]:
    """Return which pair each place of runs of `width` pairs has, runs two by two; -1 where none does."""
    places: list[int] = []
    for _, _, count, before in form.runs(width):
        places += [before + i if i < count else -1 for i in range(width)]
    return places + [-1] * (-len(places) % (2 * width))


def _taken(x: Tensor, places: list[int], dim: int) -> Tensor:
    """Return entries `places` of a dimension, zeros for -1."""
    index = torch.tensor(places, device=x.device)
    shape = [1] * x.ndim
    shape[dim] = -1
    return x.index_select(dim, index.clamp_min(0)) * (index >= 0).view(shape).to(x.dtype)


def _units(basis: Basis, form: TransformForm) -> Tensor:
    """Return by what the numbers of each pair's codes are multiplied to be coordinates: float32 (pairs,)."""
    units: list[float] = []
    for bits, count in form.tiers:
        points = basis.points[bits]
        unit = float(points.abs().max()) if bits == 1 else half_points(points)[1]
        units += [unit * basis.gain[bits]] * count
    return torch.tensor(units, dtype=torch.float32, device=basis.decoder.device)


def key_constants(basis: Basis, form: TransformForm) -> tuple[Tensor, Tensor]:
    """Return the decoder's rows in tiles (H, steps, D / 16, 256) float16, and factors of coordinates (steps * 16,)."""
    pairs = _coordinates(form, QUAD)
    rows = [2 * pair + parity if pair >= 0 else -1 for pair in pairs for parity in range(2)]
    matrix = _taken(basis.decoder, rows, 1).unflatten(1, (-1, 16)).unflatten(-1, (-1, 16)).transpose(2, 3)
    units = _taken(_units(basis, form), pairs, 0)
    return tiles_of(matrix), units.repeat_interleave(2)


def value_constants(basis: Basis, form: TransformForm) -> tuple[Tensor, Tensor]:
    """Return the decoder in tiles of channels by pairs, (H, D / 32, tiles, 4, 256) float16: from even and odd
    coordinates to even and odd channels; and factors of pairs (tiles * 16,).
    """
    pairs = _coordinates(form, OCTET)
    both = basis.decoder.unflatten(1, (-1, 2)).unflatten(-1, (-1, 2))  # (H, pairs, parity, D / 2, parity)
    matrix = _taken(both, pairs, 1).permute(0, 3, 1, 2, 4)  # (H, D / 2, places, from, to)
    matrix = matrix.unflatten(2, (-1, 16)).unflatten(1, (-1, 16)).permute(0, 1, 3, 5, 6, 2, 4)
    return tiles_of(matrix.flatten(3, 4)), _taken(_units(basis, form), pairs, 0)


def table_of(keys: TransformBlocks, values: TransformBlocks) -> Tensor:
    """Return the points of 4, 3 and 2 bits that a tier reads, float16 (entries, 2)."""
    points = values.basis.points | keys.basis.points
    used = {bits for blocks in (keys, values) for bits, _ in blocks.form.tiers}
    parts = [half_points(points[bits])[0] for bits in ENTRIES if bits in used]
    device = keys.norm.device
    return torch.cat(parts).to(device) if parts else torch.zeros(1, 2, dtype=torch.float16, device=device)


def constants_of(keys: TransformBlocks, values: TransformBlocks) -> tuple[Tensor, ...]:
    """Return what the kernel reads of two bases, made once: table, both decoders in tiles, factors, means."""
    prepared, name = keys.basis.prepared, (id(values.basis), keys.form, values.form)
    if name not in prepared:
        for bits in {bits for bits, _ in keys.form.tiers} & {bits for bits, _ in values.form.tiers}:
            if not torch.equal(keys.basis.points[bits], values.basis.points[bits]):
                raise ValueError(f"points of {bits} bits differ between keys and values: the kernel keeps one table")
        key_tiles, key_factors = key_constants(keys.basis, keys.form)
        value_tiles, value_factors = value_constants(values.basis, values.form)
        means = torch.stack([keys.basis.mean, values.basis.mean])
        factors = torch.cat([key_factors, value_factors])
        # values' basis is kept, so that its id stays its own
        prepared[name] = (table_of(keys, values), key_tiles, value_tiles, factors, means), values.basis
    constants: tuple[Tensor, ...] = prepared[name][0]
    return constants


_PREPARED: Prepared[tuple[Ready, tuple[int, ...], tuple[int, ...]]] = Prepared()


def attend(
    q: Tensor,
    keys: TransformBlocks,
    values: TransformBlocks,
    blocks: Tensor,
    sink: Exact,
    recent: Exact,
    scaling: float,
    launch: Launch | None = None,
    workspace: Workspace | None = None,
    ring: bool = False,
) -> Tensor:
    """Compute `reference.attend` for q, sink and recent of one dtype, float16 or bfloat16, every tensor contiguous:
    ValueError says what is not. A `workspace` of its own is needed where launches overlap, and under a CUDA graph.
    """
    q, sink, recent = aligned_exact(q, sink, recent)
    tensors = (q, blocks, *sink, *recent)
    shapes = tuple((x.shape, x.dtype, x.device) for x in tensors)
    key = keys.launch_key, values.launch_key, shapes, launch, ring
    prepared = _PREPARED.get(key)
    if prepared is None or not all(map(Tensor.is_contiguous, tensors)):
        check(q, keys, values, blocks, sink, recent)
    out, constants = torch.empty_like(q), constants_of(keys, values)
    before = (q, out, *_pointers(keys), *_pointers(values), *sink[:2], *recent[:2], blocks, sink[2], recent[2])
    if prepared is None:
        prepared = _PREPARED[key] = _prepared(q, keys, values, sink, recent, launch, ring, before, constants)
    ready, take, numbers = prepared
    ready((*before, *(workspace or Workspace(q.device)).take(*take), *constants), *numbers, scaling * LOG2E)
    return out


def _pointers(blocks: TransformBlocks) -> tuple[Tensor, ...]:
    """Return codes of 4, 3, 2 and 1 bits, those of another tier where there are none, and norms."""
    codes = dict(zip((bits for bits, _ in blocks.form.tiers), blocks.codes, strict=True))
    return (*(codes.get(bits, blocks.codes[0]) for bits in (4, 3, 2, 1)), blocks.norm)


def check(
    q: Tensor, keys: TransformBlocks, values: TransformBlocks, blocks: Tensor, sink: Exact, recent: Exact
) -> None:
    """Raise ValueError unless the kernel can take these arguments."""
    batch, heads, capacity = keys.words.shape[:3]
    if keys.form.role != "key" or values.form.role != "value" or keys.form.dim != values.form.dim:
        raise ValueError(f"blocks of {keys.form} and {values.form}: must be keys and values of one head_dim")
    for name, packed in (("keys", keys), ("values", values)):
        check_transform(name, packed, batch, heads, capacity)
    check_exact(q, (batch, heads, keys.form.dim), blocks, sink, recent)


def _prepared(
    q: Tensor,
    keys: TransformBlocks,
    values: TransformBlocks,
    sink: Exact,
    recent: Exact,
    launch: Launch | None,
    ring: bool,
    before: tuple[Tensor, ...],
    behind: tuple[Tensor, ...],
) -> tuple[Ready, tuple[int, ...], tuple[int, ...]]:
    """Return all of a launch that follows from shapes, as `..launch` does for other formats."""
    batch, heads, capacity = keys.words.shape[:3]
    ratio, queries, windows = q.shape[1] // heads, q.shape[2], (sink[0].shape[2], recent[0].shape[2])
    if launch is None:
        launch = launch_of(keys.form, values.form, ratio * queries, q.device)
    constants = settings(keys.form, values.form, heads, ratio, queries, launch)
    options: dict[str, object] = {**constants, "ASM": not interpreted(), "RING": ring, "LONG": capacity + SPARE > SHORT}
    options |= {"num_warps": launch.warps, "num_stages": launch.stages}
    options |= {"maxnreg": launch.registers} if launch.registers and not interpreted() else {}
    ready = Ready(transform_kernel, (1, 1, 1), options, functools.partial(common.examine, ring_bytes(constants)))

    def numbers(chosen: Plan, merge_width: int) -> tuple[int, ...]:
        splits, tail_tokens = chosen.splits, chosen.tail_tokens
        sink_splits, merges = -(-windows[0] // tail_tokens), -(-splits // merge_width)
        return capacity, *windows, *chosen.numbers(), sink_splits, splits, tail_tokens, merge_width, merges

    at_once = common.by_registers(launch)
    if q.is_cuda and not interpreted():
        some = q.new_empty(16, dtype=torch.float32)
        tensors = (*before, some, some, some.view(torch.int32), *behind)
        at_once = common.PROGRAMS_AT_ONCE[id(ready.compiled(tensors, (*numbers(Plan(2, 1, 16, ALONE), 1), 1.0)))]
    layout = _plan(constants, batch, capacity, windows, launch, at_once, q.device)
    merge_width = launch.merge_width or merge_width_of(layout.splits, constants["AT_ONCE"])
    ready.grid = (batch, heads * constants["CHUNKS"], layout.splits)
    take = batch * ready.grid[1], layout.splits, constants["N"], constants["D"], merge_width
    return ready, take, numbers(layout, merge_width)


def _plan(
    constants: dict[str, Any],
    batch: int,
    capacity: int,
    windows: tuple[int, int],
    launch: Launch,
    at_once: int,
    device: torch.device,
) -> Plan:
    groups = batch * constants["HEADS"] * constants["CHUNKS"]
    return planned(groups, capacity, windows, launch, at_once * common.processors_of(device))


def planned(groups: int, capacity: int, windows: tuple[int, int], launch: Launch, slots: int) -> Plan:
    """Return the plan for `groups` of query rows on a GPU that runs `slots` programs at a time. Exact tokens have
    programs of their own where all programs run at once. Else those would begin when others end, and hold a place
    while they wait for memory: programs of packed tokens carry them (docs/benchmarks/reasons.md).
    """
    chosen = plan(groups, capacity, windows, launch.warps, slots, True, launch)
    late = chosen.tail_cost == ALONE and chosen.tail > 0 and groups * chosen.splits > slots
    if late and launch.tail_cost is None:
        chosen = plan(groups, capacity, windows, launch.warps, slots, True, replace(launch, tail_cost=CARRIED))
    return chosen


def reserve(
    space: Workspace,
    keys: TransformForm,
    values: TransformForm,
    batch: int,
    heads: int,
    ratio: int,
    capacity: int,
    windows: tuple[int, int],
    queries: int = 1,
) -> None:
    """Let `space` have what a launch over so many blocks of capacity needs, however many programs run at a time."""
    device = space.counter.device
    launch = launch_of(keys, values, ratio * queries, device)
    constants = settings(keys, values, heads, ratio, queries, launch)
    most = min(MOST_AT_ONCE, MOST_WARPS // launch.warps)
    plans = {_plan(constants, batch, capacity, windows, launch, count, device).splits for count in range(1, most + 1)}
    for splits in sorted(plans, reverse=True):
        merge_width = launch.merge_width or merge_width_of(splits, constants["AT_ONCE"])
        space.take(batch * heads * constants["CHUNKS"], splits, constants["N"], constants["D"], merge_width)
