"""All keys and values of a layer, as the model's attention takes them: decoded, in column order, and after RoPE."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal_kernels.dequantise import Rotation

from ..codecs import Context
from ..paths import dequantised
from ..storage import block_store
from ..storage.plan import Plan
from ..storage.slots import take_slots
from .protocols import LayerProtocol


def materialise(layer: LayerProtocol, plan: Plan, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
    """All keys and values so far, decoded, then the new ones unchanged."""
    if plan.past == 0:
        layer.cache.forward.chain.leave("old", layer.index, None, None)
        return new_keys, new_values
    dequantiser = layer.paths.dequantiser
    if dequantiser and layer.block_slots and not layer.cache.remember and not layer.learns(new_keys, new_values):
        return _dequantise(layer, dequantiser, plan, new_keys, new_values)
    out: list[Tensor] = []
    for role, (decoded, new) in enumerate(zip(layer.decode_all(), (new_keys, new_values), strict=True)):
        old = [layer.storage.sink[role], decoded.to(layer.dtype), layer.storage.window[role]]
        rotates = role == 0 and layer.rotates
        if plan.past_index is not None or rotates:
            slots = ordered(plan, torch.cat(old, 2))
            old = [layer.site.rotate(slots, *_rope(layer, plan.past, slots)) if rotates else slots]
        out.append(torch.cat([*old, new], 2))
    return out[0], out[1]


@torch.no_grad()
def _dequantise(
    layer: LayerProtocol, dequantiser: dequantised.LayerDequantiser, plan: Plan, *new: Tensor
) -> tuple[Tensor, Tensor]:
    """What `materialise` gives, in shared storage where all rows hold the same columns."""
    context, dense = layer.cache.forward.chain.context("old", layer.index, layer.device), not plan.ragged
    context.stats, rotations = layer.current_statistics(), None
    if dense and layer.rotates:
        packed = slice(layer.sink[0].shape[2], plan.past - layer.window[0].shape[2])
        rotations = _rotations(layer, packed, plan.past, dequantiser)
    placed = dense and (rotations is not None or not layer.rotates)
    fresh = list(new) if placed else [x[:, :, :0] for x in new]
    exact = layer.sink, layer.window, fresh
    whole, decoded = dequantiser(layer.cache.memory.storage(layer.device), layer.packed, context, exact, rotations)
    layer.cache.forward.chain.leave("old", layer.index, *decoded)
    if layer.cache.watch is not None:
        layer.cache.watch.read(layer.index, layer.block_slots * new[0].shape[0])
    if placed:
        return whole[0], whole[1]
    keys, values = (ordered(plan, x) for x in whole)
    if layer.rotates:
        keys = layer.site.rotate(keys, *_rope(layer, plan.past, keys))
    return torch.cat([keys, new[0]], 2), torch.cat([values, new[1]], 2)


def _rope(layer: LayerProtocol, past: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The cos and sin of the first `past` columns."""
    positions = layer.cache.ledger.positions
    assert positions is not None
    return layer.cache.forward.tables(positions, slice(0, past), like)


def _rotations(
    layer: LayerProtocol, packed: slice, past: int, dequantiser: dequantised.LayerDequantiser
) -> tuple[Rotation, Rotation] | None:
    """RoPE of the packed columns and of the others, where the dequantiser rotates keys as it writes them."""
    positions = layer.cache.ledger.positions
    assert positions is not None
    rotations = layer.cache.forward.split_rotation(positions, layer.site, packed, past, layer.window[0])
    return (
        rotations
        if rotations is not None and dequantiser.rotates(rotations[0].cos.shape[-1], layer.window[0].device)
        else None
    )


def ordered(plan: Plan, slots: Tensor) -> Tensor:
    """The tokens of all old columns, from the slots that they lie in."""
    if plan.past_index is None:
        return slots
    if not slots.shape[2]:  # no real token yet, in any row
        slots = slots.new_zeros(*slots.shape[:2], 1, slots.shape[3])
    return take_slots(slots, plan.past_index)


TOGETHER = 1 << 23  # numbers, at most, that new blocks of several layers decode to at a time


def remembering(layer: LayerProtocol, context: Context) -> tuple[Tensor, Tensor]:
    """What all blocks decode to; only what was packed since the last call is decoded.

    The same operations decode the new blocks of layers above whose codecs are alike, for their turn in this call.
    """
    parts, block = _decoded_before(layer), layer.cache.scheme.windows.block
    old = parts[0].shape[2] if parts else 0
    if old < layer.block_slots * block:
        alike = _alike(layer, old)
        if len(alike) > 1:
            _decode_together(alike, old // block)
        else:
            fresh = [{n: block_store.from_block(t, old // block) for n, t in packed.items()} for packed in layer.packed]
            decoded = layer.decode(fresh, context.part(old, layer.block_slots * block))
            rounded = decoded if layer.cache.scheme.chained else [x.to(layer.dtype) for x in decoded]
            parts = [torch.cat([a, b], 2) for a, b in zip(parts, rounded, strict=True)] if parts else list(rounded)
            layer.remembered = layer.packed, parts
        parts = _decoded_before(layer)
    return parts[0], parts[1]


def _decoded_before(layer: LayerProtocol) -> list[Tensor]:
    """What the first blocks of a layer decode to, as far as it is remembered: keys and values, or nothing."""
    if layer.remembered is None or layer.remembered[0] is not layer.packed:
        return []
    return layer.remembered[1]


def _alike(layer: LayerProtocol, old: int) -> list[LayerProtocol]:
    """The layer, and those above with as many blocks that it can be decoded together with, `TOGETHER` numbers in all.

    old: tokens that are decoded already, of each.
    """
    if layer.decoding is None:
        return [layer]
    window, slots = layer.window[0], layer.block_slots

    def is_alike(other: LayerProtocol) -> bool:
        if other.index <= layer.index or other.decoding != layer.decoding or other.block_slots != slots:
            return False
        states, parts = other.window[0], _decoded_before(other)
        where = states.shape[0], states.dtype, states.device
        return where == (window.shape[0], window.dtype, window.device) and (parts[0].shape[2] if parts else 0) == old

    batch, heads, _, dim = window.shape
    numbers = batch * heads * dim * (slots * layer.cache.scheme.windows.block - old)
    above = [other for other in layer.cache.compressed_layers if is_alike(other)]
    return [layer, *above[: max(1, TOGETHER // numbers) - 1]]


def _decode_together(layers: list[LayerProtocol], start: int) -> None:
    """Decode the blocks from `start` on of layers that are `_alike`, as rows of one."""
    pair, batch, parts = layers[0].codecs, layers[0].window[0].shape[0], []
    statistics = [layer.current_statistics() for layer in layers]
    context = Context(layers[0].index, stats={n: torch.cat([one[n] for one in statistics]) for n in statistics[0]})
    for role, codec in enumerate((pair.key, pair.value)):
        names = layers[0].packed[role]
        fresh = {n: block_store.as_rows([layer.packed[role][n] for layer in layers], start) for n in names}
        decoded = codec.decode(fresh, context)
        context.k0 = decoded if role == 0 else context.k0
        parts.append(decoded.to(layers[0].dtype).split(batch))
    for layer, *new in zip(layers, *parts, strict=True):
        before = _decoded_before(layer)
        # of their own storage: a part of all layers' would keep them all alive
        whole = [torch.cat(pair, 2) for pair in zip(before, new, strict=True)] if before else [x.clone() for x in new]
        layer.remembered = layer.packed, whole
