"""The mean magnitude of a row's queries: a run-time statistic."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...codecs import Shape
from ...errors import KVCalError
from .base import Summed, Wants
from .prefixes import Prefixes

FIXED_POINT = 2.0**16  # steps of 1.5e-5; |q| up to 1e4 over 1e9 tokens stays below 2^63


class QueryMagnitude(Summed):
    """Mean |q| per kv head and channel, over the query heads that share the head (MixKVQ, importance I_c).

    It is of all tokens so far; with the argument `recent`, of those since the block before became due.
    """

    name = "query_abs"
    wants: ClassVar[Wants] = "q"

    def __init__(self, shape: Shape, argument: str = "") -> None:
        super().__init__(shape, argument)
        if argument not in ("", "recent"):
            raise KVCalError(f"statistic query_abs:{argument}: allowed are query_abs and query_abs:recent")
        self.recent = argument == "recent"

    def observe(self, x: Tensor, at: Prefixes) -> Tensor | None:
        sums = at.mask(self._steps(x)).cumsum(2)  # (B, H, Q, D)
        if not self.state:
            self.state["total"] = torch.zeros_like(sums[:, :, 0])
            if self.recent:
                self.state["before"] = torch.zeros_like(sums[:, :, 0])
        total = self.state["total"]
        self.state["total"] = total + sums[:, :, -1]
        if not at.flush:
            return None
        index = (at.columns - 1)[:, None, :, None].expand(-1, sums.shape[1], -1, sums.shape[3])
        until = total[:, :, None] + sums.gather(2, index)
        tokens = at.tokens
        if self.recent:
            until, tokens = self._since(until, tokens, at)
        return until.float() / (FIXED_POINT * tokens[:, None, :, None].float())

    def _steps(self, x: Tensor) -> Tensor:
        """Mean |q| as fixed-point numbers: (B, heads, Q, D) -> int64 (B, H, Q, D)."""
        mean: Tensor = self.grouped(x.float().abs()).mean(2)
        return (mean * FIXED_POINT).round().long()

    def _forget(self, x: Tensor) -> None:
        self.state["total"] = self.state["total"] - self._steps(x).sum(2)
        if self.recent:  # of a block that counted some of them
            self.state["before"] = torch.minimum(self.state["before"], self.state["total"])

    def _since(self, until: Tensor, tokens: Tensor, at: Prefixes) -> tuple[Tensor, Tensor]:
        """The sums since the block before became due, and their tokens."""
        steps = torch.cat([self.state["before"][:, :, None], until], 2)  # (B, H, 1 + F, D)
        last = at.flushed[:, None, None, None].expand(-1, steps.shape[1], 1, steps.shape[3])
        self.state["before"] = steps.gather(2, last)[:, :, 0]
        opening = at.opening[:, None] & (torch.arange(at.flush, device=tokens.device) == 0)
        return steps.diff(dim=2), torch.where(opening, tokens, self.shape.block)
