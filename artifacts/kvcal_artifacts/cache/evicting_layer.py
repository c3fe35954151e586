"""A layer of a cache that evicts tokens: which ones is chosen at the end of each forward."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import hf
from ..codecs.base import Packed
from ..errors import KVCalError
from ..storage import block_store
from ..storage.attention_mass import attention_mass
from ..storage.selection import EvictingPlan, Moves
from ..storage.slots import fill_slots, take_slots
from . import observing, packing, reading
from .chain import Chain
from .layer import KVCalLayer
from .whole_cache import WholeCache


class EvictingLayer(KVCalLayer):
    """A layer of a scheme that selects tokens: all exact ones are in `window`, `sink` stays empty.

    Nothing is packed before the forward's end, when all layers have added the attention that tokens get.
    """

    due: dict[str, Tensor]  # run-time statistics of the blocks that this forward may pack, (B, H, 1, ...)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """All keys and values, as KVCalLayer.update gives them, but in the order of storage: packed, exact, new."""
        key_states, value_states = self.site.gather(key_states), self.site.gather(value_states)
        plan = self.cache.plan_for(self, key_states)
        assert isinstance(plan, EvictingPlan)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._move(key_states.device)
        stored = [observing.frame_keys(self, key_states), value_states]
        out = reading.materialise(self, plan, key_states, value_states)
        self._weigh(plan, out[0])
        self.due = {
            name: self._newest(plan, values) for name, values in observing.observe(self, plan, stored[0]).items()
        }
        self._hold(plan, stored)
        self.columns += plan.query
        if self.cache.offloading_layers:
            self.offload()
        return self.site.local(out[0]), self.site.local(out[1])

    @torch.no_grad()
    def _weigh(self, plan: EvictingPlan, keys: Tensor) -> None:
        """Add the attention of the call's queries. keys: (B, H, past + query, D) as attention takes them."""
        before = self.cache.forward.queries_before.get(self.index)
        if before is None:
            raise KVCalError(f"layer {self.index}: queries were not seen; call the model the cache was made for")
        valid, scaling = self.cache.forward.prefixes(keys.device).valid, hf.score_scaling(self.site)
        self.cache.add_mass(attention_mass(observing.rotated(self, before), keys, plan.alive, valid, scaling))

    @staticmethod
    def _newest(plan: EvictingPlan, values: Tensor) -> Tensor:
        """The last of the statistics (B, H, F or 1, ...) of the blocks that would be packed without selection."""
        last = (plan.flushed - 1).clamp(0, values.shape[2] - 1).to(values.device)
        return values[torch.arange(len(last), device=values.device), :, last][:, :, None]

    @torch.no_grad()
    def _hold(self, plan: EvictingPlan, new: list[Tensor]) -> None:
        at = self.cache.forward.prefixes(new[0].device)
        for role in (0, 1):  # no softmax is ever over what a pad holds
            self.window[role] = torch.cat([self.window[role], at.mask(new[role])], 2)

    @torch.no_grad()
    def carry_out(self, moves: Moves) -> None:
        """Pack, evict and close gaps as the ledger chose."""
        self._move(self.device)
        moves = moves.to(self.device)
        sources = [self.window[role] for role in (0, 1)]
        if moves.decodes:
            sources = [torch.cat([x.to(self.dtype), w], 2) for x, w in zip(self.decode_all(), sources, strict=True)]
        start = 0 if moves.decodes else moves.packed
        new: list[Packed | None] = [None, None]
        if moves.pack.shape[1]:
            leaving = [fill_slots(take_slots(x, (moves.pack - start).clamp_min(0)), moves.idle) for x in sources]
            new = list(packing.encode(self, leaving, self.due))
        for role in (0, 1):
            self.window[role] = fill_slots(take_slots(sources[role], (moves.exact - start).clamp_min(0)), moves.unused)
        self.packed = [
            {
                n: block_store.arrange(part, None if fresh is None else fresh[n], moves.order)
                for n, part in packed.items()
            }
            for packed, fresh in zip(self.packed, new, strict=True)
        ]
        self.due = {}
        if self.cache.offloading_layers:
            self.offload()


def evict(cache: WholeCache, plan: EvictingPlan) -> None:
    """Evict tokens at the end of a call by which some leave the window: the ledger chooses, and every layer follows."""
    moves = cache.evicting_ledger.choose(plan)
    cache.forward.chain = Chain(cache.scheme)
    for layer in cache.compressed_layers:
        assert isinstance(layer, EvictingLayer)
        layer.carry_out(moves)
