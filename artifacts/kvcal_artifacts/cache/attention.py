"""Attention of a decode step over a layer's packed blocks, by a kernel, where storage grows on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from ..modes import without_autocast
from ..paths import codebook, fused
from ..storage.plan import Plan
from ..storage.slots import over_heads
from .forward import Forward
from .protocols import LayerProtocol


def attend(layer: LayerProtocol, plan: Plan, stored: list[Tensor], q: Tensor, scaling: float) -> Tensor:
    """The output (B, heads, Q, D) for queries q of the same size and dtype; then the call's tokens are stored.

    stored: the call's keys and values (B, H, Q, D), in the frame they are stored in.
    """
    cache = layer.cache
    with without_autocast(q.device.type):
        each = 1 if layer.paths.vector else fused.kernel_blocks(layer.codecs)
        sink, blocks, recent = cache.forward.counts(q.device, each)
        both = zip(layer.window, stored, strict=True)
        extended = [_extended(cache.forward, plan, recent, window, new.to(layer.dtype)) for window, new in both]
        exact = (layer.sink[0], layer.sink[1], sink), (extended[0], extended[1], recent)
        out = _by_kernel(layer, q.to(layer.dtype).contiguous(), blocks, *exact, scaling)
        if cache.watch is not None:
            cache.watch.read(layer.index, layer.block_slots * q.shape[0])
        layer.finish(plan, stored, extended)
    return out.to(q.dtype)


def _by_kernel(
    layer: LayerProtocol, q: Tensor, blocks: Tensor, sink: fused.Exact, recent: fused.Exact, scaling: float
) -> Tensor:
    """Attention by a kernel. blocks: (B,) int32, of the kernel, or of the scheme where they are vector codes."""
    cache, packed = layer.cache, layer.packed
    kernels, space = cache.kernels, cache.memory.workspace(q.device, layer.paths.vector)
    if layer.paths.vector:
        coded = codebook.coded(layer.codecs, packed)
        return codebook.attention(kernels, q, coded, blocks, sink, recent, scaling, space)
    (keys, values), rope = layer.as_blocks(packed), None
    if layer.rotary:
        sizes = sink[0].shape[2], keys.words.shape[2], recent[0].shape[2]
        rope = cache.stored_rope.of_rows(cache.full_ledger, q.device, *sizes)
    factor = layer.query_factor()
    return fused.attention(kernels, q, keys, values, blocks, sink, recent, scaling, factor, space, rotation=rope)


def _extended(forward: Forward, plan: Plan, recent: Tensor, window: Tensor, new: Tensor) -> Tensor:
    """A recent window with the new tokens behind it, row by row. recent: (B,) int32, how many each row then has."""
    wide = torch.cat([window, new], 2)
    if not plan.ragged:
        return wide
    return wide.scatter_(2, over_heads(forward.places(new.device, recent), new), new)
