"""The beginning of a forward: whether this cache may take it, and the ledger's plan for it."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..errors import KVCalError
from ..storage.plan import Plan
from ..storage.selection import EvictingPlan
from .layer import KVCalLayer
from .protocols import LayerProtocol
from .whole_cache import WholeCache


def plan_of(cache: WholeCache, layer: LayerProtocol, batch: int, query: int, device: torch.device) -> Plan:
    """The current forward's plan on a device; the call's first layer makes it."""
    if not cache.hooks.active:
        if torch.compiler.is_compiling():
            raise KVCalError(f"{layer.title}: {cache.why_not_compiled(query)}")
        if not cache.hooks.closed and (replaced := cache.hooks.replaced) is not None:
            raise KVCalError(replaced)
        state = "was closed" if cache.hooks.closed else "belongs to another model or another forward"
        more = "" if cache.hooks.closed else f". Or was the forward compiled? Then {cache.why_not_compiled(query)}"
        raise KVCalError(f"layer {layer.index}: this cache {state}; make one with load_cache(bundle, model){more}")
    if cache.forward.begun is None:
        _check_whole(cache, layer.index, query)
        cache.forward.begun = _begin(cache, batch, query)
        cache.record.stage = "layers"
    return cache.forward.on(device)


def _check_whole(cache: WholeCache, first: int, query: int) -> None:
    """Raises KVCalError, before a forward changes anything, unless all layers hold the same tokens.

    Layers below `first` hold the new ones, too.
    """
    cache.record.check_whole()
    for index, layer in enumerate(cache.layers):
        expected = cache.ledger.columns + (query if index < first else 0)
        columns = layer.columns if isinstance(layer, KVCalLayer) else layer.get_seq_length()
        if isinstance(layer, CacheLayerMixin) and columns != expected:
            raise KVCalError(
                f"layer {index} holds {columns} tokens, the cache {expected}: "
                "an earlier forward broke off; call reset() and start again"
            )
    cache.record.check_returned()


def _begin(cache: WholeCache, batch: int, query: int) -> Plan:
    """The ledger's plan of a call of so many rows and new tokens, which it counts from now on, with their positions."""
    past = cache.ledger.columns
    check_capacity(cache, query)
    forward = cache.forward
    plan: Plan = cache.ledger.begin(batch, query, cache.mask_history.new_columns(forward, cache.ledger, query))
    cache.mask_history.extend(forward, past, query)
    if isinstance(plan, EvictingPlan) and forward.mask is not None:
        plan = cache.evicting_ledger.hide(plan, forward.mask[:, :past].to("cpu").bool())
    if cache.scheme.frame == "pre_rope":
        new = forward.positions.to(torch.int32).expand(batch, query)
        old = cache.ledger.positions
        cache.ledger.positions = new.clone() if old is None or past == 0 else torch.cat([old, new], 1)
        if any(
            layer.paths.unreadable is None and (layer.rotary or cache.max_length) for layer in cache.compressed_layers
        ):
            cache.full_ledger.follow(plan, new)
            if cache.max_length and cache.stored_rope.rotary and not cache.stored_rope.is_even(cache.full_ledger):
                cache.grow_on_host()
    return plan


def check_capacity(cache: WholeCache, query: int) -> None:
    """Raises KVCalError where a row cannot have so many more columns."""
    if cache.max_length is not None and cache.ledger.columns + query > cache.max_length:
        raise KVCalError(
            f"{query} tokens behind {cache.ledger.columns}: the cache was made for max_length={cache.max_length}; "
            "make a larger one"
        )


def check_mask(mask: Tensor | None) -> None:
    """Raises KVCalError, for a cache that evicts tokens, unless the mask is (batch, tokens)."""
    if mask is not None and mask.ndim != 2:
        raise KVCalError(
            f"attention_mask has {mask.ndim} dimensions: with token selection it must be (batch, tokens), because "
            "evicted tokens are not there to be masked"
        )
