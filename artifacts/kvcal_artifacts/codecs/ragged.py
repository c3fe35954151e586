"""Items of different sizes in one pool of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """Items of different sizes: item (b, h, n) owns counts[b, h, n] consecutive rows of `data`.

    Items lie in row-major order, so that offsets are the running sum of the counts and need no storage. A slot that
    holds no block has a count of 0.

    data: (sum of counts, ...); counts: (B, H, N) uint8, int16 or int32.
    """

    data: Tensor
    counts: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape (B, H, N), as a dense packed tensor begins."""
        return self.counts.shape

    @property
    def device(self) -> torch.device:
        return self.counts.device

    def offsets(self) -> Tensor:
        """The first row of each item: int64 (B, H, N)."""
        flat = self.counts.flatten().long()
        return (flat.cumsum(0) - flat).view(self.counts.shape)

    def take(self, order: Tensor) -> Ragged:
        """Items by their number in row-major order, int64 (B', H', N'); -1 gives an empty one."""
        counts, starts = self.counts.flatten().long(), self.offsets().flatten()
        items = order.flatten()
        there = items >= 0
        if not len(counts):
            lengths = begins = torch.zeros_like(items)
        else:
            at = items.clamp_min(0)
            lengths, begins = torch.where(there, counts[at], 0), starts[at]
        offsets = lengths.cumsum(0) - lengths
        index = torch.arange(int(lengths.sum()), device=order.device)
        index += torch.repeat_interleave(begins - offsets, lengths, output_size=len(index))
        return Ragged(self.data.index_select(0, index), lengths.view(order.shape).to(self.counts.dtype))
