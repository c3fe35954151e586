"""Errors by layer and kv head: what attention reads from a compressed cache against what the model computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvcal_artifacts.cache import KVCalCache, KVCalLayer
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


def measured_head_errors(model: Any, scheme: Scheme, ids: Tensor) -> HeadErrors:
    """From token windows ids (N, T) int64: each goes through the model once, and one more token reads all of it back.

    Token selection is left out: an error is of tokens that are there. Raises UsageError where windows pack nothing.
    """
    windows = scheme.windows
    blocks = max(0, ids.shape[1] - 1 - windows.sink - windows.recent) // windows.block
    if not blocks:
        least = windows.sink + windows.recent + windows.block + 1
        raise UsageError(f"windows of {ids.shape[1]} tokens pack nothing: use --length {least} or more")
    packed = slice(windows.sink, windows.sink + blocks * windows.block)
    sums: list[list[Tensor] | None] = [None] * len(scheme.layers)
    device = next(model.parameters()).device
    with torch.no_grad(), progress("Measuring", total=len(ids)) as advance:
        for row in ids:
            for layer, exact, read in _read_back(model, replace(scheme, selection=None), row[None].to(device)):
                found = [_squares(x[:, :, packed], y[:, :, packed]) for x, y in zip(exact, read, strict=True)]
                before = sums[layer]
                sums[layer] = found if before is None else [a + b for a, b in zip(before, found, strict=True)]
            advance()
    by_role = [[None if s is None else _relative(s[role]) for s in sums] for role in (0, 1)]
    return HeadErrors(by_role[0], by_role[1], len(ids) * blocks * windows.block)


def _read_back(model: Any, scheme: Scheme, ids: Tensor) -> list[tuple[int, list[Tensor], list[Tensor]]]:
    """(layer, exact keys and values, the same as the cache gives them back), each (1, H, T - 1, D), as attention gets them."""
    exact: dict[int, list[Tensor]] = {}
    read: dict[int, list[Tensor]] = {}
    with KVCalCache(scheme, model) as cache:
        for layer in cache.own_layers:
            layer.update = _watched(layer, exact, read)  # type: ignore[method-assign]
        model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)
        model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)
    return [(layer, exact[layer], read[layer]) for layer in exact]


def _watched(
    layer: KVCalLayer, exact: dict[int, list[Tensor]], read: dict[int, list[Tensor]]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """layer.update, with its first call's input and its second call's output kept."""
    own = layer.update

    def update(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        out = own(keys, values, *args, **kwargs)
        if layer.index in exact:
            read[layer.index] = [x[:, :, :-1] for x in out]
        else:
            exact[layer.index] = [keys, values]
        return out

    return update


def _squares(exact: Tensor, read: Tensor) -> Tensor:
    """(1, H, T, D) twice -> (2, H) float64: squared error, squares."""
    x, y = exact.double(), read.double()
    return torch.stack([(x - y).square().sum((0, 2, 3)), x.square().sum((0, 2, 3))]).cpu()


def _relative(sums: Tensor) -> list[float]:
    return [round(value, 6) for value in (sums[0] / sums[1].clamp_min(1e-30)).tolist()]
