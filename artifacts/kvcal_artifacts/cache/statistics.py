"""What codecs learn at run time from a row's own queries and keys, without depending on how the tokens came in.

Block j of a row is packed when the row has sink + (j + 1) * block + recent tokens. A statistic of that block is one of
exactly so many first real tokens, whether they came in one call or in many, alone or in a batch: sums are in
fixed-point numbers, where the order of adding does not matter.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvcal_kernels.quantise import factors_of

from ..codecs import Shape
from ..errors import KVCalError
from .prefixes import Prefixes
from .statistic import Statistic, Summed, Wants
from .subspace import QuerySubspace, QuerySubspaceBeforeRope

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

        keys (B, H, S, D): the exact ones; occupied (B, S) bool: slots that hold a token; untouched (B,) bool: rows that
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


STATISTICS: dict[str, type[Statistic]] = {
    s.name: s for s in (QueryMagnitude, KeyScale, QuerySubspace, QuerySubspaceBeforeRope)
}


def statistic(name: str, shape: Shape) -> Statistic:
    """A statistic by the name that codecs ask for, NAME or NAME:ARGUMENT."""
    kind, _, argument = name.partition(":")
    if kind not in STATISTICS:
        raise KVCalError(f"statistic {name!r}: known are {', '.join(STATISTICS)}")
    return STATISTICS[kind](shape, argument)
