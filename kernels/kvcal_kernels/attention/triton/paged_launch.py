"""Launches of the attention kernels over pages: checked arguments, compiled kernels, the number of programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ...layout import Form, Grid, PageForm
from ...triton import Kernel, Prepared, Ready, interpreted
from ..checks import check_paged
from ..plan import (
    SHORT,
    SPARE,
    Launch,
    Settings,
    merge_width_of,
    plan,
    ring_bytes,
    rounded_blocks,
    settings,
    usual,
)
from . import launch as common
from .launch import LOG2E, Workspace
from .paged import paged_kernel


@dataclass(frozen=True)
class Pages:
    """The arguments of `reference.attend_pages` that say where queries and blocks lie, without what decodes blocks.

    q: queries. pages: bytes, each page laid out as `form` says. table: which pages a row has. lengths: tokens of each
    row. starts: where each row's queries begin in q. queries: the most that a row has. blocks: the most that a row is
    expected to have; 0: as many as the table has columns.
    """

    q: Tensor
    pages: Tensor
    form: PageForm
    table: Tensor
    lengths: Tensor
    starts: Tensor
    queries: int
    blocks: int

    @property
    def likely(self) -> int:
        """Blocks that the number of programs follows."""
        return rounded_blocks(min(self.blocks or self.table.shape[1], self.table.shape[1]))

    @property
    def ratio(self) -> int:
        return self.q.shape[1] // self.pages.shape[1]

    def key(self) -> tuple[object, ...]:
        """All that a prepared launch follows from."""
        tensors = (self.q, self.pages, self.table, self.lengths, self.starts)
        shapes = ((x.shape, x.stride(), x.dtype, x.device) for x in tensors)
        return self.form, self.queries, self.likely, *shapes


class PreparedLaunch:
    """A compiled launch over pages of one shape, with all its numbers that follow from shapes.

    kernel: takes tensors (queries, outputs, pages, table, lengths, starts, those of a workspace, `behind`), then
    numbers. constants: its compile-time constants. ring: bytes of shared memory that the kernel manages itself, behind
    Triton's. units: how many numbers each call adds at the end.
    """

    def __init__(
        self,
        call: Pages,
        kernel: Kernel,
        constants: dict[str, Any],
        launch: Launch,
        ring: int,
        behind: tuple[Tensor, ...],
        units: int,
    ) -> None:
        q, pages, (batch, capacity) = call.q, call.pages, call.table.shape
        options: dict[str, object] = {**constants, "ASM": not interpreted(), "LONG": capacity + SPARE > SHORT}
        options |= {"num_warps": launch.warps, "num_stages": launch.stages}
        options |= {"maxnreg": launch.registers} if launch.registers and not interpreted() else {}
        self._ready = Ready(kernel, (1, 1, 1), options, functools.partial(common.examine, ring))
        strides = q.stride(0), pages.stride(0), pages.stride(1), call.table.stride(0), capacity
        at_once = common.by_registers(launch)
        if q.is_cuda and not interpreted():
            some = q.new_empty(16, dtype=torch.float32)
            before = (q, torch.empty_like(q), pages, call.table, call.lengths, call.starts)
            tensors = (*before, some, some, some.view(torch.int32), *behind)
            numbers = (*strides, 2, 2, 1, *[1.0] * units)
            at_once = common.PROGRAMS_AT_ONCE[id(self._ready.compiled(tensors, numbers))]
        groups = batch * pages.shape[1] * constants["CHUNKS"]
        slots = at_once * common.processors_of(q.device)
        splits = plan(groups, call.likely, (0, 0), launch.warps, slots, False, launch).splits
        merge_width = launch.merge_width or merge_width_of(splits, constants["AT_ONCE"])
        self._ready.grid = (batch, pages.shape[1] * constants["CHUNKS"], splits)
        self._take = batch * self._ready.grid[1], splits, constants["N"], constants["D"], merge_width
        self._numbers = (*strides, splits, merge_width, -(-splits // merge_width))

    def __call__(
        self, call: Pages, out: Tensor, behind: tuple[Tensor, ...], workspace: Workspace | None, *units: float
    ) -> Tensor:
        """Launch, and return `out`."""
        before = (call.q, out, call.pages, call.table, call.lengths, call.starts)
        taken = (workspace or Workspace(call.q.device)).take(*self._take)
        self._ready((*before, *taken, *behind), *self._numbers, *units)
        return out


_PREPARED: Prepared[PreparedLaunch] = Prepared()


def launched(
    call: Pages,
    out: Tensor | None,
    workspace: Workspace | None,
    name: object,
    prepare: Callable[[], PreparedLaunch],
    behind: tuple[Tensor, ...],
    *units: float,
) -> Tensor:
    """Check and launch; `prepare` is called for the first launch of its kind. name: what else it follows from."""
    key = (name, *call.key())
    prepared = _PREPARED.get(key)
    if prepared is None:
        check_paged(call.q, call.pages, call.form, call.table, call.lengths, call.starts)
    q = call.q
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    elif out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out {tuple(out.shape)} {out.dtype}: must be {tuple(q.shape)} {q.dtype}, contiguous")
    if prepared is None:
        prepared = _PREPARED[key] = prepare()
    return prepared(call, out, behind, workspace, *units)


def attend_pages(
    q: Tensor,
    pages: Tensor,
    form: PageForm,
    table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    scaling: float,
    keys: Grid | None,
    values: Grid | None,
    queries: int,
    blocks: int = 0,
    launch: Launch | None = None,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `reference.attend_pages` for q of float16 or bfloat16; ValueError says what the kernel cannot take: grids
    in bytes, heads of norms that span several. Nothing waits for the device, and under a CUDA graph tables, lengths and
    starts may change between replays.

    queries: the most that a row has; those of a row beyond it are left out. blocks: the most that a row is expected to
    have, which the number of programs follows; rows may have more. 0: as many as a row of the table has. workspace: of
    its own where launches overlap, and under a CUDA graph. out: (T, Hq, D) contiguous, which takes the result.
    """
    call = Pages(q, pages, form, table, lengths, starts, queries, blocks)
    tables = [(pages, pages, 1.0) if grid is None else (grid.table, grid.sign, grid.unit) for grid in (keys, values)]
    (k_table, k_sign, k_unit), (v_table, v_sign, v_unit) = tables
    same = keys is not None and k_table.data_ptr() == v_table.data_ptr()
    behind = k_table, v_table, k_sign, v_sign

    def prepare() -> PreparedLaunch:
        chosen, constants = _constants(call, launch, same)
        ring = ring_bytes(cast(Settings, constants))
        return PreparedLaunch(call, paged_kernel, constants, chosen, ring, behind, 3)

    name = launch, same, keys is None, values is None
    return launched(call, out, workspace, name, prepare, behind, scaling * LOG2E, k_unit, v_unit)


def _constants(call: Pages, launch: Launch | None, same: bool) -> tuple[Launch, dict[str, Any]]:
    """Return the launch, and the compile-time constants of `paged_kernel`."""
    keys, values = call.form.keys, call.form.values
    assert isinstance(keys, Form) and isinstance(values, Form)
    launch = launch or usual(keys, values, call.ratio * call.queries)
    return launch, constants_of(keys, values, call.pages.shape[1], call.ratio, call.queries, launch.warps, same,
                                call.pages.stride(0) // 2 if interpreted() else 1)  # fmt: skip


def constants_of(
    keys: Form, values: Form, heads: int, ratio: int, queries: int, warps: int, same: bool, page: int
) -> dict[str, Any]:
    """Return the compile-time constants of `paged_kernel` that follow from shapes. page: `Side.page`, which compiled
    code only compares with 0.
    """
    constants: dict[str, Any] = {**settings(keys, values, heads, ratio, queries, warps, same, pages=True)}
    for side in ("KEYS", "VALUES"):
        constants[side] = replace(constants[side], page=page)
    for name in ("PAIRS", "ROWS", "WIDTH"):  # the kernel derives the last two
        del constants[name]
    return constants
