"""The factor that a row's keys are divided by: a run-time statistic."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvcal_kernels.quantise import factors_of

from .base import Statistic, Wants
from .prefixes import Prefixes


class KeyScale(Statistic):
    """The factor sqrt(max |K_c|) per kv head and channel over the tokens until a row's first block is due (InnerQ 4.3).

    It is rounded to float16 and does not change from then on: blocks are decoded with the factor they were encoded
    with.
    """

    name = "key_scale"
    wants: ClassVar[Wants] = "k"

    def observe(self, x: Tensor, at: Prefixes) -> Tensor | None:
        size = at.mask(x.float().abs())
        if not self.state:
            self.state["peak"] = torch.zeros_like(size[:, :, 0])
            self.state["frozen"] = torch.zeros(size.shape[0], dtype=torch.bool, device=x.device)
        if at.flush:  # rows whose first block this call packs count until it is due
            until = torch.where(at.opening & (at.flushed > 0), at.columns[:, 0], x.shape[2])
            late = torch.arange(x.shape[2], device=x.device) >= until[:, None]
            size = size.masked_fill(late[:, None, :, None], 0)
        peak, frozen = torch.maximum(self.state["peak"], size.amax(2)), self.state["frozen"]
        self.state["peak"] = torch.where(frozen[:, None, None], self.state["peak"], peak)
        if not at.flush:
            return None
        self.state["frozen"] = frozen | (at.flushed > 0)
        return self.current()

    def renew(self, keys: Tensor, occupied: Tensor, untouched: Tensor) -> None:
        """Find the maximum anew after a crop: as long as nothing is packed, the cache has all keys that count.

        keys (B, H, S, D): the exact ones. occupied (B, S) bool: slots that hold a token. untouched (B,) bool: rows that
        have no other tokens, whose factor may change again.
        """
        if self.state:
            peak = keys.float().abs().masked_fill(~occupied[:, None, :, None], 0).amax(2) if keys.shape[2] else 0.0
            self.state["peak"] = torch.where(untouched[:, None, None], peak, self.state["peak"])
            self.state["frozen"] = self.state["frozen"] & ~untouched

    def current(self) -> Tensor | None:
        if not self.state:
            return None
        return factors_of(self.state["peak"])[:, :, None]
