"""Errors by layer and kv head: what attention reads from a compressed cache against what the model computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import Scheme

from ..report.progress import progress

Rows = list[list[float] | None]  # a row a layer, a number a kv head; None: a layer that is not compressed


@dataclass(frozen=True)
class HeadErrors:
    """|x - decoded|^2 / |x|^2 of packed tokens, key and value. tokens: how many a head they were measured on."""

    key: Rows
    value: Rows
    tokens: int


def stored_head_errors(metrics: dict[str, Any]) -> HeadErrors | None:
    """What the fit wrote into a bundle's metrics, of its held-out windows; None where it wrote none."""
    layers = metrics.get("layers")
    if not isinstance(layers, list) or not any("key_head_errors" in row for row in layers):
        return None
    return HeadErrors(
        [row.get("key_head_errors") for row in layers], [row.get("value_head_errors") for row in layers], 0
    )


class HeadSums:
    """A Watch (KVCalCache.watch) that sums over packed blocks, by layer and head: squared errors and squares."""

    def __init__(self, layers: int) -> None:
        self.sums: list[list[Tensor] | None] = [None] * layers
        self.tokens = 0  # of the layer that packed first; all pack alike

    def packed(self, layer: int, exact: list[Tensor], decoded: list[Tensor]) -> None:
        found = [_squares(x, y) for x, y in zip(exact, decoded, strict=True)]
        before = self.sums[layer]
        self.sums[layer] = found if before is None else [a + b for a, b in zip(before, found, strict=True)]
        if layer == next(i for i, sums in enumerate(self.sums) if sums is not None):
            self.tokens += exact[0].shape[0] * exact[0].shape[2]

    def read(self, layer: int, blocks: int) -> None:
        """Reading changes nothing."""

    def rows(self, role: int) -> Rows:
        return [None if sums is None else _relative(sums[role]) for sums in self.sums]


def measured_head_errors(model: Any, scheme: Scheme, ids: Tensor) -> HeadErrors:
    """From token windows ids (N, T) int64, each in one forward pass, whose keys and values are the model's own.

    Token selection is left out: an error is of tokens that are there. Raises UsageError where windows pack nothing.
    """
    windows = scheme.windows
    if ids.shape[1] < (least := windows.sink + windows.recent + windows.block):
        raise UsageError(f"windows of {ids.shape[1]} tokens pack nothing: use --length {least} or more")
    seen = HeadSums(len(scheme.layers))
    device = next(model.parameters()).device
    with torch.no_grad(), progress("Measuring", total=len(ids)) as advance:
        for row in ids:
            with KVCalCache(replace(scheme, selection=None), model) as cache:
                cache.watch = seen
                model(input_ids=row[None].to(device), past_key_values=cache, use_cache=True)
            advance()
    return HeadErrors(seen.rows(0), seen.rows(1), seen.tokens)


def _squares(exact: Tensor, read: Tensor) -> Tensor:
    """(1, H, T, D) twice -> (2, H) float64: squared error, squares."""
    x, y = exact.double(), read.double()
    return torch.stack([(x - y).square().sum((0, 2, 3)), x.square().sum((0, 2, 3))]).cpu()


def _relative(sums: Tensor) -> list[float]:
    return [round(value, 6) for value in (sums[0] / sums[1].clamp_min(1e-30)).tolist()]
