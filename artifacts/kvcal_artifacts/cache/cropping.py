"""The removal of a cache's newest columns."""

from __future__ import annotations

import torch

from ..errors import KVCalError
from ..storage import block_store
from ..storage.plan import CropPlan
from ..storage.slots import compact_copy, take_slots
from . import observing
from .layer import KVCalLayer
from .whole_cache import WholeCache


def crop(cache: WholeCache, tokens_to_remove: int) -> None:
    """Remove the newest -tokens_to_remove columns, as KVCalCache.crop says."""
    if tokens_to_remove > 0:
        raise ValueError(
            f"crop({tokens_to_remove}): pass a negative number, the tokens to remove from the end; to be left with "
            f"{tokens_to_remove} tokens: crop({tokens_to_remove} - get_seq_length())"
        )
    cache.settle()
    cache.record.check_returned()
    count = min(-tokens_to_remove, cache.ledger.columns)
    plan = cache.ledger.crop(count)
    if plan.deep and cache.strict:
        raise KVCalError(
            f"crop of {count} tokens reaches into packed blocks (recent window "
            f"{int(cache.ledger.window.min())}); strict caches refuse: use a larger recent window or strict=False"
        )
    for layer in cache.layers:  # first, as a sliding layer may refuse
        if not isinstance(layer, KVCalLayer):
            layer.crop(tokens_to_remove)
    if count:
        _carry_out(cache, count, plan)


def _carry_out(cache: WholeCache, count: int, plan: CropPlan) -> None:
    """Remove the newest `count` columns from the ledger, from every layer and from its statistics."""
    cache.leave_forward()
    for layer in cache.compressed_layers:
        if layer.is_initialized:
            _crop_layer(layer, plan)
        layer.columns -= count
    columns, tails = cache.ledger.columns, [layer.tail for layer in cache.compressed_layers if layer.tail is not None]
    old = cache.ledger.real(columns - count, columns - min(tails)) if tails and count > min(tails) else 0
    cache.ledger.commit_crop(count)
    if not cache.ledger.columns:  # what comes next may have other rows
        for layer in cache.compressed_layers:
            layer.reset()
    elif any(layer.statistics for layer in cache.compressed_layers):
        occupied, untouched = cache.ledger.occupied, cache.ledger.untouched
        for layer in cache.compressed_layers:
            observing.forget(layer, count, occupied, untouched)
        cache.record.unforgotten["tokens"] += old
        cache.record.unforgotten["blocks"] += cache.ledger.early
    cache.record.returned_tokens += plan.returned
    cache.publish()


def _crop_layer(layer: KVCalLayer, plan: CropPlan) -> None:
    """Crop a layer; with plan.deep the cut block's remaining tokens return to the window, decoded."""
    decoded = layer.decode_all() if plan.deep else (None, None)
    for role in (0, 1):
        window = layer.window[role]
        if plan.window_index is not None:
            part = decoded[role]
            assert part is not None
            window = take_slots(torch.cat([part.to(layer.dtype), window], 2), plan.window_index.to(window.device))
        layer.window[role] = compact_copy(window[:, :, : plan.window])
        layer.sink[role] = compact_copy(layer.sink[role][:, :, : plan.sink])
    layer.packed = [{n: block_store.first_blocks(t, plan.blocks) for n, t in packed.items()} for packed in layer.packed]
