"""Which columns of a call each block's run-time statistic is of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...scheme import Windows
from ...storage.plan import Plan


@dataclass(frozen=True)
class Span:
    """Columns of a call, of each row those from `start` to `stop`, int64 (B,) on the CPU."""

    start: Tensor
    stop: Tensor

    @cached_property
    def bounds(self) -> tuple[int, int, int, int]:
        """The least and the largest start, the least and the largest stop."""
        return int(self.start.min()), int(self.start.max()), int(self.stop.min()), int(self.stop.max())


@dataclass(frozen=True)
class Refit:
    """A fit of some rows within a call: of `tokens` real tokens, once those in the span are counted, too."""

    rows: list[int]
    tokens: int
    span: Span


@dataclass(frozen=True)
class Refitting:
    """A call's fits in their order, and the columns behind the last. use: which of them each block takes, from 1 on; 0:
    the one before the call; int64 (B, F) on the CPU.
    """

    refits: list[Refit]
    rest: Span
    use: Tensor


class Prefixes:
    """How many of the call's columns come before a block is due, for each block that a plan packs.

    columns: int64 (B, F), at least 1; the block's statistic is of everything before this call and of the first
    `columns` columns of it. tokens: int64 (B, F), the real tokens these are in all. valid: (B, Q) bool or None.
    flushed: (B,) blocks that this call really packs, the rest of F slots are idle. opening: (B,) rows without a block
    before this call.

    These lie on the device, copied there when first asked for, as most steps ask for none; those that begin with host_
    lie on the CPU.
    """

    def __init__(self, plan: Plan, windows: Windows, device: torch.device) -> None:
        assert plan.lengths is not None and plan.packed is not None
        self.flush = plan.flush
        number = plan.packed[:, None] + torch.arange(plan.flush, device="cpu")
        tokens = windows.sink + (number + 1) * windows.block + windows.recent
        ends = (tokens - plan.lengths[:, None]).clamp(1, plan.query)
        self._valid = None if plan.valid is None or bool(plan.valid.all()) else plan.valid
        if self._valid is not None:
            # the column that holds the row's new token of that number; idle slots get the last one
            ends = (torch.searchsorted(self._valid.long().cumsum(1), ends) + 1).clamp_max(plan.query)
        self.windows, self._device, self._tokens, self._query = windows, device, tokens, plan.query
        after = (plan.lengths + _count(plan) - windows.sink - windows.recent).div(windows.block, rounding_mode="floor")
        flushed = (after - plan.packed).clamp_min(0)
        # blocks of each row before this call, packed by it, and `columns`
        self.host_first, self.host_flushed, self.host_columns = plan.packed, flushed, ends

    @cached_property
    def refitting(self) -> Refitting:
        """When subspaces are fitted in this call: the same in all layers."""
        batch = len(self.host_first)
        counted, refitted = torch.zeros(batch, dtype=torch.int64, device="cpu"), list[Refit]()
        use = torch.zeros(batch, self.flush, dtype=torch.int64, device="cpu")
        for number in refits(self.windows, int((self.host_first + self.host_flushed).max()) - 1):
            slot = number - self.host_first
            due = (slot >= 0) & (slot < self.host_flushed)
            if bool(due.any()):
                columns = self.host_columns.gather(1, slot.clamp(0, self.flush - 1)[:, None])[:, 0]
                until = torch.where(due, columns, counted)
                rows = due.nonzero().flatten().tolist()
                refitted.append(Refit(rows, due_tokens(self.windows, number), Span(counted, until)))
                use[due[:, None] & (torch.arange(self.flush, device="cpu") >= slot[:, None])] = len(refitted)
                counted = until
        return Refitting(refitted, Span(counted, torch.full_like(counted, self._query)), use)

    @cached_property
    def columns(self) -> Tensor:
        return self.host_columns.to(self._device)

    @cached_property
    def tokens(self) -> Tensor:
        return self._tokens.to(self._device)

    @cached_property
    def valid(self) -> Tensor | None:
        return None if self._valid is None else self._valid.to(self._device)

    @cached_property
    def flushed(self) -> Tensor:
        return self.host_flushed.to(self._device)

    @cached_property
    def opening(self) -> Tensor:
        return (self.host_first == 0).to(self._device)

    def mask(self, x: Tensor) -> Tensor:
        """The numbers x (B, H, Q, ...) with the columns of pads zeroed."""
        if self.valid is None:
            return x
        shape = (self.valid.shape[0], 1, self.valid.shape[1], *[1] * (x.ndim - 3))
        return x.masked_fill(~self.valid.view(shape), 0)  # pads may hold anything, NaN too


def due_tokens(windows: Windows, number: int) -> int:
    """The real tokens that a row has when that block is packed."""
    return windows.sink + (number + 1) * windows.block + windows.recent


def refits(windows: Windows, last: int) -> list[int]:
    """Blocks up to `last` for which a subspace is fitted: 0, each first one with twice the tokens of the last fit."""
    numbers, number = [], 0
    while number <= last:
        numbers.append(number)
        missing = 2 * due_tokens(windows, number) - windows.sink - windows.recent
        number = -(-missing // windows.block) - 1
    return numbers


def _count(plan: Plan) -> Tensor:
    """The real tokens of the call, (B,)."""
    assert plan.lengths is not None
    return torch.full_like(plan.lengths, plan.query) if plan.valid is None else plan.valid.sum(1)
