"""The newest columns of a cache are removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..storage.ledger import CropPlan
from . import observing

if TYPE_CHECKING:
    from .cache import KVCalCache


def carry_out(cache: KVCalCache, count: int, plan: CropPlan) -> None:
    """Remove the newest `count` columns from the ledger, from every layer and from its statistics."""
    cache.leave_forward()
    for layer in cache.own_layers:
        if layer.is_initialized:
            layer.crop_to(plan)
        layer.columns -= count
    columns, tails = (
        cache.ledger.columns,
        [layer.tail for layer in cache.own_layers if layer.tail is not None],
    )
    old = cache.ledger.real(columns - count, columns - min(tails)) if tails and count > min(tails) else 0
    cache.ledger.commit_crop(count)
    if not cache.ledger.columns:  # what comes next may have other rows
        for layer in cache.own_layers:
            layer.reset()
    elif any(layer.statistics for layer in cache.own_layers):
        occupied, untouched = cache.ledger.occupied, cache.ledger.untouched
        for layer in cache.own_layers:
            observing.forget(layer, count, occupied, untouched)
        cache.record.unforgotten["tokens"] += old
        cache.record.unforgotten["blocks"] += cache.ledger.early
    cache.record.returned_tokens += plan.returned
    cache.publish()
