"""Which columns of a call each block's run-time statistic is of."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ...scheme import Windows
from ...storage.plan import Plan


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
        self.windows, self._device, self._tokens = windows, device, tokens
        after = (plan.lengths + _count(plan) - windows.sink - windows.recent).div(windows.block, rounding_mode="floor")
        flushed = (after - plan.packed).clamp_min(0)
        # blocks of each row before this call, packed by it, and `columns`
        self.host_first, self.host_flushed, self.host_columns = plan.packed, flushed, ends

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


def _count(plan: Plan) -> Tensor:
    """The real tokens of the call, (B,)."""
    assert plan.lengths is not None
    return torch.full_like(plan.lengths, plan.query) if plan.valid is None else plan.valid.sum(1)
