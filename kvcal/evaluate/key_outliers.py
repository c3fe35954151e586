"""How unequal the channels of a model's keys are, by layer and kv head: what decides whether keys may share a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor, nn

from ..capture.scan import Capture, LayerSource
from ..report.progress import tracked


class HeadOutlier(TypedDict):
    """A KeyOutlier as results and reports have it, its ratio to two digits."""

    layer: int
    head: int
    channel: int
    ratio: float


@dataclass(frozen=True)
class KeyOutlier:
    """The largest channel of one kv head's keys after RoPE. ratio: its root mean square over the median channel's."""

    layer: int
    head: int
    channel: int
    ratio: float

    def as_dict(self) -> HeadOutlier:
        return {"layer": self.layer, "head": self.head, "channel": self.channel, "ratio": round(self.ratio, 2)}


@torch.no_grad()
def key_outliers(model: LayerSource | nn.Module, ids: Tensor, device: torch.device) -> list[KeyOutlier]:
    """One entry for each compressed layer and kv head, lowest first, of token windows ids (N, T) int64.

    Raises KVCalError for a model that `Capture` does not run.
    """
    rows: list[KeyOutlier] = []
    with Capture(model, ids, device=device) as capture:
        for taps in tracked(capture, "Key outliers, layers", len(capture)):
            square, count = torch.zeros((), dtype=torch.float32, device="cpu"), 0
            for batch in taps.batches({"k"}, "post_rope"):
                assert batch.k is not None
                square = square.to(batch.k.device) + batch.k.double().square().sum((0, 2))
                count += batch.k.shape[0] * batch.k.shape[2]
            size = (square / count).sqrt()
            ratios = size / size.median(-1, keepdim=True).values.clamp_min(1e-30)
            for head, row in enumerate(ratios):
                channel = int(row.argmax())
                rows.append(KeyOutlier(taps.index, head, channel, float(row[channel])))
    return rows
