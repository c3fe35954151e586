"""One layer of a cache that evicts tokens: what leaves is chosen at the end of each forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import hf
from ..codecs.base import Packed
from ..errors import KVCalError
from ..storage import block_store
from ..storage.eviction import EvictingPlan, Moves, attention_mass
from . import observing, packing, reading
from .chain import Chain
from .layer import KVCalLayer
from .slots import fill_slots, take_slots

if TYPE_CHECKING:
    from .cache import KVCalCache


class EvictingLayer(KVCalLayer):
    """A layer of a scheme that selects tokens: all exact ones are in `window`, `sink` stays empty, and nothing is packed
    before the forward's end, when all layers have said which tokens they look at.
    """

    due: dict[str, Tensor]  # run-time statistics of the blocks that this forward may pack, (B, H, 1, ...)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As KVCalLayer.update, in the order of storage: packed, exact, new."""
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
        return out

    @torch.no_grad()
    def _weigh(self, plan: EvictingPlan, keys: Tensor) -> None:
        """Add what the call's queries look at. keys (B, H, past + query, D) as attention takes them."""
        before = self.cache.forward.queries_before.get(self.index)
        if before is None:
            raise KVCalError(f"layer {self.index}: queries were not seen; call the model the cache was made for")
        valid, scaling = self.cache.forward.prefixes(keys.device).valid, hf.score_scaling(self.site)
        self.cache.add_mass(attention_mass(observing.rotated(self, before), keys, plan.alive, valid, scaling))

    @staticmethod
    def _newest(plan: EvictingPlan, values: Tensor) -> Tensor:
        """Of the statistics (B, H, F or 1, ...) of the blocks that the plain scheme would pack now the last one's."""
        last = (plan.flushed - 1).clamp(0, values.shape[2] - 1).to(values.device)
        return values[torch.arange(len(last), device=values.device), :, last][:, :, None]

    @torch.no_grad()
    def _hold(self, plan: EvictingPlan, new: list[Tensor]) -> None:
        at = self.cache.forward.prefixes(new[0].device)
        for role in (0, 1):  # what a pad holds never comes near a softmax
            self.window[role] = torch.cat([self.window[role], at.mask(new[role])], 2)

    @torch.no_grad()
    def carry_out(self, moves: Moves) -> None:
        """Pack, evict and close ranks as the ledger chose."""
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


def evict(cache: KVCalCache, plan: EvictingPlan) -> None:
    """At the end of a call by which tokens leave the window: the ledger chooses, and every layer does as it says."""
    moves = cache.ledger.choose(plan)
    cache.forward.chain = Chain(cache.scheme)
    for layer in cache.own_layers:
        assert isinstance(layer, EvictingLayer)
        layer.carry_out(moves)
