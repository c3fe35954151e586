"""A call as a layer sees it: its keys in the frame they are stored in, and what run-time statistics make of it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import KVCalError
from ..modes import without_grad
from ..storage.plan import Plan
from .protocols import LayerProtocol
from .statistics.base import Summed
from .statistics.key_scale import KeyScale


def frame_keys(layer: LayerProtocol, rotated_keys: Tensor) -> Tensor:
    """The current call's keys in the frame they are stored in, from those that attention gets."""
    cache = layer.cache
    if cache.scheme.frame == "post_rope":
        return rotated_keys
    before = cache.forward.keys_before.pop(layer.index, None)
    if before is None:
        raise KVCalError(f"layer {layer.index}: keys before RoPE were not seen; call the model the cache was made for")
    if not layer.is_verified:
        _verify_frame(layer, before, rotated_keys)
    return before


@without_grad
def observe(layer: LayerProtocol, plan: Plan, keys: Tensor) -> dict[str, Tensor]:
    """Show the call's queries and keys to the statistics; returns those of the blocks that it packs."""
    before = layer.cache.forward.queries_before.pop(layer.index, None)
    if not layer.statistics:
        return {}
    if _is_settled(layer):
        return layer.current_statistics() if plan.flush else {}
    at, inputs = layer.cache.forward.prefixes(keys.device), {"k": keys}
    layer.unseen = 0
    if before is None and any(s.wants != "k" for s in layer.statistics.values()):
        raise KVCalError(f"layer {layer.index}: queries were not seen; call the model the cache was made for")
    for statistic in layer.statistics.values():
        if statistic.wants not in inputs:
            assert before is not None
            inputs[statistic.wants] = rotated(layer, before) if statistic.wants == "q" else before
    observed = {name: statistic.observe(inputs[statistic.wants], at) for name, statistic in layer.statistics.items()}
    for statistic in layer.statistics.values():
        if isinstance(statistic, Summed):
            statistic.remember(inputs[statistic.wants], at)
    return {name: value for name, value in observed.items() if value is not None}


def _is_settled(layer: LayerProtocol) -> bool:
    """Whether tokens no longer change the statistics: all rows had blocks, by whose first one keys are divided."""
    cache = layer.cache
    plain = layer.statistics.keys() <= {KeyScale.name} and cache.scheme.selection is None
    return plain and cache.forward.opened


def rotated(layer: LayerProtocol, queries: Tensor) -> Tensor:
    """The current call's queries after RoPE."""
    return layer.site.rotate(queries, *layer.cache.forward.rotation(queries)) if layer.site.rope else queries


def _verify_frame(layer: LayerProtocol, before: Tensor, expected: Tensor) -> None:
    """Check once that rotated keys are those that attention gets; else the architecture is not understood."""
    ours, expected = layer.site.rotate(before, *layer.cache.forward.rotation(expected)).detach(), expected.detach()
    # the same function of the same cos and sin: not a bit may differ. A NaN is named when it is packed.
    same = (ours == expected) | (ours.isnan() & expected.isnan())
    if not bool(same.all()):
        raise KVCalError(
            f"layer {layer.index}: keys captured before RoPE do not give the model's keys when rotated "
            f"(largest difference {float((ours - expected).abs().max()):.2g}); use a bundle with frame post_rope"
        )
    layer.is_verified = True


@torch.no_grad()
def forget(layer: LayerProtocol, count: int, occupied: Tensor, untouched: Tensor) -> None:
    """Take the newest `count` columns out of the statistics, after a crop. occupied, untouched: of the ledger."""
    if not layer.is_initialized:
        return
    unseen = min(count, layer.unseen)
    layer.unseen -= unseen
    layer.missed -= unseen
    for statistic in layer.statistics.values():
        if isinstance(statistic, Summed):
            statistic.crop(count - unseen)
        if isinstance(statistic, KeyScale):
            keys = torch.cat([layer.sink[0], layer.window[0]], 2)
            statistic.renew(keys, occupied.to(keys.device), untouched.to(keys.device))


def tail(layer: LayerProtocol) -> int | None:
    """How many of the newest columns the statistics of queries can forget; None without any."""
    tails = [statistic.tail + layer.unseen for statistic in layer.statistics.values() if isinstance(statistic, Summed)]
    return min(tails, default=None)
