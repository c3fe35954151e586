"""A layer whose storage is allocated once, and whose decode step leaves every decision to the device.

Counts, lengths and whether a block is due are tensors. A step runs the same operations with the same shapes each time,
so that one CUDA graph of it, or one compiled forward, serves all. Prefill, crops and reordering happen on the host as
for other layers. `publish` of the storage (storage.py) then writes their result into what is allocated; `settle` of the
cache reads counts back. What differs from other layers is in the storage. Here are the step itself, and what
Transformers asks before one: how many columns there are and can be, and how wide a mask is.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvcal_kernels import quantise
from kvcal_kernels.layout import BLOCK
from kvcal_kernels.quantise import Counts

from ... import hf
from ...errors import KVCalError
from ...modes import without_autocast, without_grad
from ...paths import codebook, fused
from ...scheme import LayerCodecs
from ...storage.static_storage import Allocation, Steps
from .. import observing
from ..layer import KVCalLayer
from ..protocols import CacheProtocol
from .appending import append
from .storage import StaticStorage, key_scales


class StaticLayer(KVCalLayer):
    """A layer of a cache with max_length, whose decode steps run on the device alone."""

    is_compileable = True
    storage: StaticStorage
    _uncompiled = False  # whether update() ran for this step, which a compiled forward does not do

    def __init__(self, cache: CacheProtocol, index: int, codecs: LayerCodecs, site: hf.AttentionSite) -> None:
        super().__init__(cache, index, codecs, site, StaticStorage(cache.scheme.windows.block))
        self._in_place = hf.InPlace(hf.decoder_of(cache.model), site)

    @property
    def allocation(self) -> Allocation | None:
        """What is allocated, if anything is."""
        return self.storage.allocation

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """All keys and values, as KVCalLayer.update; of a decode step only the new ones, as the operator takes them."""
        cache = self.cache
        if not torch.compiler.is_compiling():
            if not cache.steps_on_device(key_states):
                return super().update(key_states, value_states)
            self._uncompiled = True
        else:
            self._in_place.check(self.title)
        if not self.ready or key_states.shape[2] > cache.most_queries:
            raise KVCalError(f"{self.title}: {cache.why_not_compiled(key_states.shape[2])}")
        hand_off = hf.hand_off_of(self.site)
        hand_off.leave(self.handle, key_states, value_states, self._keys_before(hand_off, key_states))
        return key_states, value_states

    def _keys_before(self, hand_off: hf.HandOff, rotated: Tensor) -> Tensor | None:
        """The step's keys before RoPE where these are stored; else None."""
        if self.cache.scheme.frame == "post_rope":
            return None
        if not torch.compiler.is_compiling():
            return observing.frame_keys(self, rotated)
        if hand_off.shown is None:
            raise KVCalError(
                f"{self.title}: a compiled forward does not show its keys before RoPE: compile it while a cache of "
                "this scheme is open, the projection of keys within it"
            )
        return hand_off.shown

    @property
    def steps(self) -> Steps:
        """What the cache's layers on this device share."""
        return self.cache.steps[self.device]

    def get_seq_length(self) -> Any:
        """The columns; once there are some, on the device, as Transformers' StaticLayer gives them."""
        self.heed()
        return self.steps.length.clone() if self.ready else self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The width of a mask: where steps may be compiled that of all columns that the cache can have.

        The operator does not read the mask.
        """
        self.heed()  # generate() asks before each step, whose forward may be compiled
        if self.ready and query_length <= self.cache.most_queries:
            return self.cache.max_length or 0, 0
        self.cache.settle()
        return super().get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        if not self.cache.is_compileable:
            return super().get_max_length()
        assert self.cache.max_length is not None
        return self.cache.max_length

    @without_grad
    def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, positions: Tensor | None = None) -> Tensor:
        """Do a whole step: count, append, pack what is due, attend. The host reads no value."""
        uncompiled, self._uncompiled = self._uncompiled, False
        if self._due is not None:  # of a cache that grows
            return super().attend(q, k, v, scaling)
        cache, memory, dtype = self.cache, self.storage.allocation, self.dtype
        assert memory is not None
        steps = cache.steps[self.device]
        counts, by = steps.counts, fused.steps_by(cache.kernels)
        with without_autocast(q.device.type):
            if self.index == steps.first:
                if not uncompiled:
                    cache.check_use()
                new = torch.full_like(counts.new, k.shape[2])
                (by or quantise).advance(counts, new)
                if steps.rope is not None and positions is not None:  # else the host has compared them
                    steps.rope.note(counts, positions)
            if self.paths.reads_codes:
                return self._leave(steps, self._attend_codes(memory, counts, q, k, v, scaling), q, k)
            settled = not hf.capturing() and cache.opened  # a graph serves other prompts, too
            observed, k, v = None, k.to(dtype), v.to(dtype)
            if not settled:
                observed = self._observed_factors(counts, k, by or quantise)
                self.key_factor.forget()
            # not remembered where a replayed graph may change the statistics in place, nor in memory of graphs of a
            # compiled forward
            factor, wide = self.key_factor.of(self, settled and uncompiled, observed)
            keys, values = self.as_blocks(memory.packed)
            due = self._keys_due(memory, counts, k)
            if by is not None and not isinstance(self.paths.packing.steps, str):
                by.append(self.storage.target(self), counts, k, v, *self.paths.packing.steps, factor, due)
            else:
                append(self, memory, counts, [k, v], due)
            sink, ring = (memory.sink[0], memory.sink[1], counts.sink), (memory.ring[0], memory.ring[1], counts.seen)
            angles = steps.rope.angles if steps.rope and self.rotary else None
            kernels, space, query = cache.kernels, cache.memory.workspace(q.device), q.to(dtype).contiguous()
            blocks = counts.blocks_before
            out = fused.attention(
                kernels, query, keys, values, blocks, sink, ring, scaling, wide, space, ring=True, rotation=angles
            )
            return self._leave(steps, out, q, k)

    def _leave(self, steps: Steps, out: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The result of attention; in the step's last layer it is NaN if any layer lost a block.

        Otherwise no one would see that what follows a recorded or compiled step is not the model's. It takes six small
        launches per step.
        """
        if self.index == steps.last:
            steps.length.add_(k.shape[2])
            layers = [layer for layer in self.cache.compressed_layers if isinstance(layer, StaticLayer)]
            ours = [one.storage.allocation for one in layers if one.device == self.device]
            lost = torch.cat([memory.flags for memory in ours if memory is not None]).any()
            wrong = lost | (steps.length > (self.cache.max_length or 0))
            if steps.rope is not None:
                wrong = wrong | steps.rope.gap
            steps.wrong.copy_(wrong, non_blocking=True)
            out = out.masked_fill(lost, math.nan)
        return out.to(q.dtype)

    def _keys_due(self, memory: Allocation, counts: Counts, keys: Tensor) -> Tensor | None:
        """Keys of the block that this step packs, corrected by SQuat; this step's attention reads the exact ones."""
        if not self.codecs.key.corrected_channels:
            return None
        self.cache.forward.queries_before.pop(self.index, None)
        assert memory.moves is not None
        return self.codecs.key.due(memory.ring[0], counts, keys, memory.moves, memory.due)

    def _attend_codes(
        self, memory: Allocation, counts: Counts, q: Tensor, k: Tensor, v: Tensor, scaling: float
    ) -> Tensor:
        """Append the new tokens, and attend, over vector codes."""
        kernels, space = self.cache.kernels, self.cache.memory.workspace(q.device, True)
        coded = codebook.coded(self.codecs, memory.packed)
        sink, ring = (memory.sink[0], memory.sink[1]), (memory.ring[0], memory.ring[1])
        new = k.to(self.dtype), v.to(self.dtype)
        codebook.append(kernels, coded, sink, ring, counts, memory.flags, new, space)
        slots = next(iter(memory.packed[0].values())).shape[2]
        blocks = (counts.blocks_before // fused.kernel_blocks(self.codecs)).clamp_max(slots)
        exact = (*sink, counts.sink), (*ring, counts.seen)
        first = counts.blocks_before * BLOCK
        return codebook.attention(kernels, q.to(self.dtype).contiguous(), coded, blocks, *exact, scaling, space, first)

    def _observed_factors(self, counts: Counts, keys: Tensor, by: ModuleType) -> dict[str, tuple[Tensor, Tensor]]:
        """The statistics with this step's keys, by name, of kv heads and of query heads.

        by: quantise or its kernels.
        """
        ratio = self.site.ratio
        return {
            name: by.observe(scale.state["peak"], scale.state["frozen"], counts, keys, ratio)
            for name, scale in key_scales(self).items()
        }
