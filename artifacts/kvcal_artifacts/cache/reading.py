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
    keys, values = layer.decode_all()
    whole = [
        ordered(plan, torch.cat([layer.storage.sink[role], x.to(layer.dtype), layer.storage.window[role]], 2))
        for role, x in enumerate((keys, values))
    ]
    if layer.rotates:
        whole[0] = layer.site.rotate(whole[0], *_rope(layer, plan.past, whole[0]))
    return torch.cat([whole[0], new_keys], 2), torch.cat([whole[1], new_values], 2)


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


def remembering(layer: LayerProtocol, context: Context) -> tuple[Tensor, Tensor]:
    """What all blocks decode to; only what was packed since the last call is decoded."""
    parts: list[Tensor] = []
    if layer.remembered is not None and layer.remembered[0] is layer.packed:
        parts = layer.remembered[1]
    old, block = parts[0].shape[2] if parts else 0, layer.cache.scheme.windows.block
    if old < layer.block_slots * block:
        fresh = [{n: block_store.from_block(t, old // block) for n, t in packed.items()} for packed in layer.packed]
        decoded = layer.decode(fresh, context.part(old, layer.block_slots * block))
        rounded = decoded if layer.cache.scheme.chained else [x.to(layer.dtype) for x in decoded]
        parts = [torch.cat([a, b], 2) for a, b in zip(parts, rounded, strict=True)] if parts else list(rounded)
        layer.remembered = layer.packed, parts
    return parts[0], parts[1]
