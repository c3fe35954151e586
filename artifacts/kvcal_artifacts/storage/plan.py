"""What one forward, or one crop, does to every layer of a cache: which slots its tokens come from and go to.

Slots that a layer sees: past = [sink S | packed N * b | window W], fresh = [sink S | window W | new Q].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Past:
    """Where the tokens of padded rows lay before a call.

    Its index is costly (docs/benchmarks/reasons.md), so it is computed on demand: attention by the kernel needs none.
    valid (B, columns) bool, sink, blocks (B,): of the ledger then. block: tokens of a block.
    """

    valid: Tensor
    sink: Tensor
    blocks: Tensor
    block: int

    @cached_property
    def index(self) -> Tensor:
        """The slot of each column in [sink | packed | window], (B, columns); pads have 0, which the mask hides."""
        rank = self.valid.long().cumsum(1) - 1
        sink, packed = self.sink[:, None], self.blocks[:, None] * self.block
        slots_sink, slots_packed = width(self.sink), width(self.blocks) * self.block
        slot = torch.where(
            rank < sink + packed, rank - sink + slots_sink, rank - sink - packed + slots_sink + slots_packed
        )
        return torch.where(rank < sink, rank, slot).masked_fill(~self.valid, 0).clamp_min(0)


@dataclass(frozen=True)
class Plan:
    """What one forward does to every layer. Index tensors are None where plain slices in order do (no padding).

    before: of padded rows, where old columns lie; past_index is computed from it. device: where index tensors are.
    sink_index (B, S'), window_index (B, W'), flush_index (B, F * b): slots in `fresh` of exact tokens and of those
    packed. idle: (B, F * b) bool, which of the flushed slots hold nothing: rows of a padded batch flush different
    numbers. lengths, packed: (B,) real tokens and packed blocks of each row before this call. valid: (B, Q) bool, its
    real columns (None: all). These three are on the CPU. rows, slots: (K,) where each of the K really flushed blocks
    goes: batch row, block slot. picks: which of the F.
    """

    past: int
    query: int
    sink: int
    window: int
    flush: int
    blocks: int
    before: Past | None = None
    device: torch.device = CPU
    sink_index: Tensor | None = None
    window_index: Tensor | None = None
    flush_index: Tensor | None = None
    idle: Tensor | None = None
    rows: Tensor | None = None
    slots: Tensor | None = None
    picks: Tensor | None = None
    lengths: Tensor | None = None
    packed: Tensor | None = None
    valid: Tensor | None = None

    @property
    def ragged(self) -> bool:
        """Whether rows may differ, so that there are indices instead of slices."""
        return self.before is not None

    @cached_property
    def whole(self) -> bool:
        """Whether all new columns are real tokens."""
        return self.valid is None or bool(self.valid.all())

    @cached_property
    def past_index(self) -> Tensor | None:
        """The slot in `past` of each old column, (B, past); None where columns lie in order."""
        return None if self.before is None else self.before.index.to(self.device)

    def to(self, device: torch.device) -> Plan:
        """The plan with its index tensors on `device`, in one copy; counts stay on the CPU, for run-time statistics."""
        indices = (
            self.sink_index,
            self.window_index,
            self.flush_index,
            self.idle,
            self.rows,
            self.slots,
            self.picks,
        )
        here = [t for t in indices if t is not None]
        if device == self.device or not here:
            return replace(self, device=device)
        copied = torch.cat([t.flatten().long() for t in here]).to(device).split([t.numel() for t in here])
        moved = iter([part.view(t.shape).to(t.dtype) for t, part in zip(here, copied, strict=True)])
        sink, window, flush, idle, rows, slots, picks = (None if t is None else next(moved) for t in indices)
        return replace(
            self,
            device=device,
            sink_index=sink,
            window_index=window,
            flush_index=flush,
            idle=idle,
            rows=rows,
            slots=slots,
            picks=picks,
        )


@dataclass(frozen=True)
class CropPlan:
    """What a crop does: packed blocks and window that stay, and whether any row reaches into its packed blocks.

    window_index: (B, W') slot in [packed N * b | window W] of the tokens of the new window, None if slices do.
    """

    sink: int
    blocks: int
    window: int
    deep: bool
    returned: int
    window_index: Tensor | None


def width(counts: Tensor) -> int:
    """The slots that the fullest row needs."""
    return int(counts.max()) if counts.numel() else 0
