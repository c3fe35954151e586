"""Proof that an evaluation reads what was packed: with other packed blocks in a layer, other logits come out.

An evaluation whose cache kept exact copies aside, or never came to read a block, would give good figures of nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvcal_artifacts import store
from kvcal_artifacts.cache import KVCalCache, KVCalLayer
from kvcal_artifacts.errors import GateFailed

from .perplexity import CacheMaker


@dataclass(frozen=True)
class Canary:
    """layers: whose blocks were exchanged, one at a time. blocks: that each held. unread: layers where that had no effect.
    uncounted: layers that packed blocks in the evaluation itself, and never read one there.
    """

    layers: int
    blocks: int
    unread: tuple[int, ...] = ()
    uncounted: tuple[int, ...] = ()

    @property
    def alive(self) -> bool:
        return self.blocks > 0 and not self.unread and not self.uncounted

    def counted(self, rows: Iterable[Mapping[str, Any]]) -> Canary:
        """With what the evaluation's own caches counted; rows: of LayerErrors."""
        silent = (row["layer"] for row in rows if row["key_relative_error"] is not None and not row["blocks_read"])
        return replace(self, uncounted=tuple(silent))

    def __str__(self) -> str:
        if not self.blocks:
            return "no block was packed before the last step: nothing compressed was measured; take longer windows"
        if self.unread:
            layers = ", ".join(map(str, self.unread))
            return f"layer {layers}: other packed blocks gave the same logits, so what is packed was not read"
        if self.uncounted:
            return f"layer {', '.join(map(str, self.uncounted))}: packed blocks were never read in the evaluation"
        return f"other packed blocks gave other logits in each of {self.layers} layers"

    def check(self, name: str) -> None:
        """Raise GateFailed where packed blocks were not read."""
        if not self.alive:
            raise GateFailed(f"{name}: canary: {self}")


@torch.no_grad()
def canary(model: Any, ids: Tensor, maker: CacheMaker, *, step: int = 32) -> Canary:
    """Two windows of ids (N, T) up to their last `step` tokens, the first of which then runs with layer after layer's packed
    blocks taken from the other window: bytes as valid as the row's own, whatever the codec. step: the evaluation's.
    """
    device = next(model.parameters()).device
    own = ids[:1].to(device)
    other = ids[1:2].to(device) if len(ids) > 1 else own.roll(max(1, ids.shape[1] // 2), 1)
    last = max(1, min(step, ids.shape[1] - 1))
    with maker() as cache, maker() as twin:
        for held, window in ((cache, own), (twin, other)):
            model(input_ids=window[:, :-last], past_key_values=held, use_cache=True, logits_to_keep=1)
        layers = [layer.index for layer in cache.own_layers]
        blocks = min((_blocks(layer) for layer in cache.own_layers), default=0)
        if not blocks:
            return Canary(len(layers), 0)
        token = own[:, -last : own.shape[1] - last + 1]
        right = _logits(model, cache, token, {})
        unread = [
            index
            for index in layers
            if torch.equal(
                right, _logits(model, cache, token, {index: _others(cache.layers[index], twin.layers[index])})
            )
        ]
    return Canary(len(layers), blocks, tuple(unread))


def _logits(model: Any, cache: KVCalCache, ids: Tensor, packed: dict[int, list[Any]]) -> Tensor:
    """Of a copy of the cache, in which these layers hold these packed blocks."""
    with copy.deepcopy(cache) as held:
        for index, blocks in packed.items():
            held.layers[index].packed = blocks
        logits: Tensor = model(input_ids=ids, past_key_values=held, use_cache=True).logits
        return logits


def _blocks(layer: KVCalLayer) -> int:
    return int(next(iter(layer.packed[0].values())).shape[2]) if layer.is_initialized else 0


def _others(own: KVCalLayer, other: KVCalLayer) -> list[Any]:
    """As many blocks as `own` holds, of the other window; where that has fewer (token selection), its own in reverse."""
    count = _blocks(own)
    if _blocks(other) >= count:
        return [{name: store.first_blocks(held, count) for name, held in packed.items()} for packed in other.packed]
    order = torch.arange(count).flip(0)[None]
    return [
        {name: store.arrange(held, None, order.to(held.device)) for name, held in packed.items()}
        for packed in own.packed
    ]
