"""New tokens are distributed over a layer's sink and window, and what leaves the window is packed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..modes import without_grad
from ..storage import block_store
from ..storage.plan import Plan
from ..storage.slots import compact_copy, fill_slots, take_slots
from . import packing
from .protocols import LayerProtocol


@without_grad
def store(
    layer: LayerProtocol, plan: Plan, new: list[Tensor], stats: dict[str, Tensor], extended: list[Tensor] | None = None
) -> None:
    """Store the new tokens, and pack what leaves the window.

    stats: of the blocks that are packed. extended: windows with the new tokens behind them, if attention joined them.
    """
    forward, storage = layer.cache.forward, layer.storage
    if not plan.flush and forward.rolls and (extended is not None or not plan.ragged):  # most steps
        storage.window = extended or [torch.cat([before, x], 2) for before, x in zip(storage.window, new, strict=True)]
        forward.chain.leave("new", layer.index, None, None)
        return
    leaving: list[Tensor] = []
    wide = plan.flush * layer.cache.scheme.windows.block
    if not plan.ragged and forward.rolls:  # sinks stay as they are
        whole = [torch.cat([before, x], 2) for before, x in zip(storage.window, new, strict=True)]
        leaving = [x[:, :, :wide] for x in whole]
        storage.window = [compact_copy(x[:, :, wide:]) for x in whole]
        _pack(layer, plan, leaving, stats, by_kernel=extended is not None)
        return
    for role in (0, 1):
        fresh = torch.cat([storage.sink[role], storage.window[role], new[role]], 2)
        if plan.sink_index is None:
            sink, rest = fresh[:, :, : plan.sink], fresh[:, :, plan.sink :]
            leaving.append(rest[:, :, :wide])
            window = rest[:, :, wide:]
        else:
            assert plan.window_index is not None
            sink, window = take_slots(fresh, plan.sink_index), take_slots(fresh, plan.window_index)
            if plan.flush:
                assert plan.flush_index is not None and plan.idle is not None
                leaving.append(fill_slots(take_slots(fresh, plan.flush_index), plan.idle))
        storage.sink[role], storage.window[role] = compact_copy(sink), compact_copy(window)
    if plan.flush:
        _pack(layer, plan, leaving, stats, by_kernel=extended is not None)
    else:
        forward.chain.leave("new", layer.index, None, None)


def _pack(
    layer: LayerProtocol, plan: Plan, leaving: list[Tensor], stats: dict[str, Tensor], by_kernel: bool = False
) -> None:
    before, remembered = layer.packed, layer.remembered
    apart = not by_kernel and all(codec.encodes_by_kernel for codec in layer.pair)
    rules = layer.paths.packing.blocks
    encoded = packing.encode(layer, leaving, stats) if apart else packing.encode_by(layer, rules, leaving, stats)
    layer.packed = [
        {name: block_store.append(old[name], t, plan) for name, t in packed.items()}
        for old, packed in zip(before, encoded, strict=True)
    ]
    if remembered is not None and remembered[0] is before and plan.rows is None:  # no block has moved
        layer.remembered = layer.packed, remembered[1]
