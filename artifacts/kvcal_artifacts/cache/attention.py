"""Attention of a decode step over a layer's packed blocks, by a kernel, where storage grows on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal_kernels.layout import AnyBlocks

from ..paths import codebook, fused
from ..storage.plan import Plan
from ..storage.slots import over_heads
from .forward import Forward
from .protocols import CacheProtocol, LayerProtocol


def attend(
    layer: LayerProtocol,
    packed: tuple[AnyBlocks, AnyBlocks] | None,
    plan: Plan,
    stored: list[Tensor],
    q: Tensor,
    scaling: float,
) -> tuple[Tensor, list[Tensor]]:
    """The output (B, heads, Q, D) for queries q of that size, and the windows with the new tokens behind them.

    packed: keys and values as the fused kernel takes them; None where they are vector codes. stored: the call's keys
    and values (B, H, Q, D), in the frame they are stored in. All in the layer's dtype.
    """
    cache, storage = layer.cache, layer.storage
    sink, blocks, recent = cache.forward.counts(q.device, 1 if packed is None else fused.kernel_blocks(layer.codecs))
    both = zip(storage.window, stored, strict=True)
    extended = [_extended(cache.forward, plan, recent, window, new.to(layer.dtype)) for window, new in both]
    exact = (storage.sink[0], storage.sink[1], sink), (extended[0], extended[1], recent)
    out = _by_kernel(layer, cache, packed, q.to(layer.dtype).contiguous(), blocks, *exact, scaling)
    if cache.watch is not None:
        cache.watch.read(layer.index, layer.block_slots * q.shape[0])
    return out, extended


def _by_kernel(
    layer: LayerProtocol,
    cache: CacheProtocol,
    packed: tuple[AnyBlocks, AnyBlocks] | None,
    q: Tensor,
    blocks: Tensor,
    sink: fused.Exact,
    recent: fused.Exact,
    scaling: float,
) -> Tensor:
    """Attention by a kernel. blocks: (B,) int32, of the kernel, or of the scheme where they are vector codes."""
    kernels, space = cache.kernels, cache.memory.workspace(q.device, packed is None)
    if packed is None:
        coded = codebook.coded(layer.codecs, layer.storage.packed)
        return codebook.attention(kernels, q, coded, blocks, sink, recent, scaling, space)
    (keys, values), rope = packed, None
    if layer.rotary:
        sizes = sink[0].shape[2], keys.words.shape[2], recent[0].shape[2]
        rope = cache.stored_rope.of_rows(cache.full_ledger, q.device, *sizes)
    _, factor = layer.key_factor.of(layer)
    return fused.attention(kernels, q, keys, values, blocks, sink, recent, scaling, factor, space, rotation=rope)


def _extended(forward: Forward, plan: Plan, recent: Tensor, window: Tensor, new: Tensor) -> Tensor:
    """A recent window with the new tokens behind it, row by row. recent: (B,) int32, how many each row then has."""
    wide = torch.cat([window, new], 2)
    if not plan.ragged:
        return wide
    return wide.scatter_(2, over_heads(forward.places(new.device, recent), new), new)
