"""The tokens of a step are appended to a static layer by torch, for codecs that no kernel appends for."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal_kernels import quantise
from kvcal_kernels.quantise import Counts

from ...codecs import Context
from ...codecs.refusals import device_only
from ...paths import fused
from ...storage.slots import take_slots
from ...storage.static_storage import Allocation, ring_slots
from ..protocols import LayerProtocol

NOT_FINITE, NO_SLOT = quantise.reference.NONFINITE, quantise.reference.NO_SLOT


def append(
    layer: LayerProtocol, memory: Allocation, counts: Counts, new: list[Tensor], keys: Tensor | None = None
) -> None:
    """Do what quantise.append does, for any codec, in operations whose shapes never change.

    A block is packed in each step, and stored where it is due. keys: those that are due, corrected.
    """
    windows, each = layer.cache.scheme.windows, fused.kernel_blocks(layer.codecs)
    quantise.keep((memory.sink[0], memory.sink[1]), (memory.ring[0], memory.ring[1]), counts, (new[0], new[1]))
    due, slot = counts.blocks > counts.blocks_before, counts.blocks_before.long() // each
    last = next(iter(memory.packed[0].values())).shape[2] - 1
    context = Context(layer.index, stats=layer.current_statistics())
    for role, (codec, packed) in enumerate(zip(layer.pair, memory.packed, strict=True)):
        with device_only() as fits:
            first = ring_slots(slot, windows.block, windows.block, memory.ring[role])
            leaving = take_slots(memory.ring[role], first)
            if role == 0 and keys is not None:
                codec, leaving = codec.rounding, keys
            encoded = codec.encode(leaving, context)
        heads = len(memory.flags)  # a norm of several is all of theirs
        finite = torch.stack([one.repeat_interleave(heads // one.shape[1], 1) for one in fits]).all(0)
        bad = (due[:, None] & ~finite).any(0) * NOT_FINITE + (due & (slot > last)).any() * NO_SLOT
        memory.flags.bitwise_or_(bad.int() << quantise.reference.VALUES * role)
        for name, x in encoded.items():
            index = slot.clamp_max(last)[:, None, None, None].expand_as(x)
            keep = (due & (slot <= last))[:, None, None, None]
            packed[name].scatter_(2, index, torch.where(keep, x, packed[name].gather(2, index)))
