"""A layer whose storage is allocated once, and whose decode step leaves every decision to the device.

Counts, lengths and whether a block is due are tensors; a step runs the same operations with the same shapes each time,
so that one CUDA graph of it, or one compiled forward, serves all. Prefill, crops and reordering happen on the host as
for other layers; `publish` then writes their result into the allocated storage, `settle` of the cache reads counts
back.

Recent tokens lie in a ring, as storage/static_storage.py says.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvcal_kernels import quantise
from kvcal_kernels.layout import BLOCK, Blocks, rope
from kvcal_kernels.quantise import Counts
from kvcal_kernels.squat import Digits

from ... import hf, operator
from ...codecs.squat import corrects
from ...errors import KVCalError
from ...modes import without_autocast, without_grad
from ...paths import codebook, fused
from ...paths.choose import PathKind
from ...scheme import LayerCodecs
from ...storage.plan import Plan
from ...storage.slots import over_heads
from ...storage.static_storage import (
    STORED,
    Allocation,
    Contents,
    StaticStorage,
    StepRope,
    Steps,
    allocate,
    host_bool,
    most_blocks,
)
from .. import observing
from ..layer import KVCalLayer
from ..protocols import CacheProtocol
from ..statistics.key_scale import KeyScale
from ..statistics.subspace import QuerySubspace
from .appending import append


class StaticLayer(KVCalLayer):
    """A layer of a cache with max_length, whose decode steps run on the device alone."""

    is_compileable = True
    storage: StaticStorage
    ready = False  # the storage on the device holds what the layer holds
    _layer: quantise.Layer | None = None  # the allocation as the kernel that appends takes it
    _uncompiled = False  # whether update() ran for this step, which a compiled forward does not do

    def __init__(self, cache: CacheProtocol, index: int, codecs: LayerCodecs, site: hf.AttentionSite) -> None:
        super().__init__(cache, index, codecs, site)
        self._in_place = hf.InPlace(hf.decoder_of(cache.model), site)

    def _new_storage(self, block: int) -> StaticStorage:
        return StaticStorage(block)

    @property
    def _vector(self) -> bool:
        return self.read_path.kind is PathKind.CODEBOOK

    @property
    def allocation(self) -> Allocation | None:
        """What is allocated, if anything is."""
        return self.storage.allocation

    @allocation.setter
    def allocation(self, value: Allocation | None) -> None:
        self.storage.allocation = value

    def _clear(self) -> None:
        super()._clear()
        self.ready = False  # the allocation does not move: a graph knows its address

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        if self.read_path.kind is PathKind.CODEBOOK:
            why = codebook.append_refusal(self.cache.kernels, self.codecs, self.dtype, self.device)
            if why is not None:
                self.cache.grow(f"layer {self.index}: {why}")

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

    def _is_for_kernel(self, cache: CacheProtocol, plan: Plan, keys: Tensor, values: Tensor) -> bool:
        possible = super()._is_for_kernel(cache, plan, keys, values)  # which tells the cache why not
        return possible and not cache.is_compileable  # update() has asked

    def drop_hand_off(self) -> None:
        self._due = None
        hf.drop_hand_off(self.site)

    def finish(self, plan: Plan, stored: list[Tensor], extended: list[Tensor] | None = None) -> None:
        super().finish(plan, stored, extended)
        self.publish()

    @property
    def path(self) -> str:
        """One line for describe(): KVCalLayer.path, then what appends the tokens of steps."""
        if self.allocation is None:
            return super().path
        return f"{super().path}; steps appended by {self.rules.appending(self.cache.kernels, self._vector)}"

    @torch.inference_mode(False)  # else what is allocated could be written to in inference mode alone
    @torch.no_grad()
    def publish(self) -> None:
        """Write what the host has of the layer into its allocation."""
        if not self.is_initialized or not self.cache.is_compileable:
            return
        like, ledger, contents = self.window[0], self.cache.full_ledger, self.cache.contents
        if self.cache.stored_rope.rotary and not bool(ledger.lengths.all()):
            self.grow_on_host()  # no one knows where a row without a token will begin
            return
        memory, steps = self._allocation_for(like), self._steps_for(like)
        slots = contents.slots(self.cache.scheme.windows.block, memory.ring[0])
        for role in (0, 1):
            self.storage.fill(memory.sink[role], self.sink[role])
            memory.ring[role].scatter_(2, over_heads(slots, like), self.window[role])
            for name, part in self.packed[role].items():
                self.storage.fill(memory.packed[role][name], part)
        if self.index == steps.first:
            stored = torch.stack([ledger.sink, ledger.window, ledger.blocks * fused.kernel_blocks(self.codecs)])
            for name, count in zip(STORED, stored.to(like.device), strict=True):
                getattr(steps.counts, name).copy_(count)
            steps.length.fill_(self.columns)
            steps.wrong.fill_(False)
            if steps.rope is not None:
                self._begin_rope(steps.rope)
        memory.flags.zero_()
        self.key_factor.forget()
        for scale in self._scales.values():
            for name, value in scale.state.items():
                target = memory.statistics.get(name)
                if target is None or target.shape != value.shape:
                    target = memory.statistics[name] = value.clone(memory_format=torch.contiguous_format)
                scale.state[name] = target.copy_(value)
        if self.cache.opened and not self._vector:
            self.key_factor.of(self)
        self._correct_by(memory)
        self.ready = True
        self.overlook(contents)

    @property
    def _scales(self) -> dict[str, KeyScale]:
        """The statistics that steps continue; a subspace of queries does not change in them."""
        return {name: statistic for name, statistic in self.statistics.items() if isinstance(statistic, KeyScale)}

    def _correct_by(self, memory: Allocation) -> None:
        """Compute what corrects the blocks of the steps to come, for SQuat."""
        key, ledger, subspaces = self.codecs.key, self.cache.full_ledger, None
        if not corrects(key):
            return
        for statistic in self.statistics.values():
            assert isinstance(statistic, QuerySubspace)
            subspaces = statistic.standing(ledger.blocks, (ledger.lengths - self.missed).clamp_min(0), self.site.ratio)
        previous = self._corrected_for
        unchanged = subspaces is not None and previous is not None and torch.equal(subspaces, previous)
        if memory.moves is not None and unchanged:
            return
        moves = key.step_moves(subspaces)
        self._corrected_for = subspaces
        if memory.moves is None or not memory.moves.renew(moves):
            memory.moves = Digits.of(moves)
        if memory.due is None:
            keys = memory.sink[0]
            size = torch.Size((*keys.shape[:2], self.cache.scheme.windows.block, keys.shape[3]))
            memory.due = self.steps.due.setdefault(size, torch.zeros(size, device=keys.device))

    _corrected_for: Tensor | None = None  # rows' own subspaces that the moves are of

    def _begin_rope(self, step_rope: StepRope) -> None:
        """Let rows begin where the ledger says."""
        ledger = self.cache.full_ledger
        starts = ledger.starts
        assert starts is not None
        step_rope.start.copy_(starts)
        step_rope.gap.zero_()
        if not self.cache.stored_rope.rotary or (step_rope.of is not None and torch.equal(step_rope.of, starts)):
            return
        windows, memory = self.cache.scheme.windows, self.allocation
        assert memory is not None
        blocks = most_blocks(windows, self.cache.max_length or 0) * fused.kernel_blocks(self.codecs)
        first = rope.first_positions(starts, windows.sink, blocks, memory.ring[0].shape[2])
        angles, step_rope.of = self.cache.stored_rope.of_runs(ledger, first.to(step_rope.start.device)), starts.clone()
        if step_rope.angles is None:
            step_rope.angles = angles
        step_rope.angles.renew(angles.first)

    def grow_on_host(self) -> None:
        if self.allocation is not None:
            self.storage.leave()
            self.ready, self._shown, self._layer = False, None, None

    def overlook(self, contents: Contents) -> None:
        """Note that the storage on the device has what `contents` says."""
        self.storage.overlook(contents)

    def _allocation_for(self, like: Tensor) -> Allocation:
        """The layer's allocation; a new one for another number of rows, dtype or device."""
        memory = self.allocation
        sink = None if memory is None else memory.sink[0]
        if sink is not None and (len(sink), sink.dtype, sink.device) == (len(like), like.dtype, like.device):
            assert memory is not None
            return memory
        self._shown = self._layer = None
        windows, longest = self.cache.scheme.windows, self.cache.max_length
        assert longest is not None
        ring = quantise.Windows(windows.sink, windows.recent, windows.block).ring_capacity(fused.QUERIES)
        self.allocation = memory = allocate(like, self.pair, windows, longest, ring)
        self.handle = operator.register(self)  # what was compiled for another allocation knows its addresses
        batch, heads, _, dim = like.shape
        if self._vector:
            coded, q = (
                codebook.coded(self.codecs, memory.packed),
                like.new_zeros(batch, heads * self.site.ratio, 1, dim),
            )
            codebook.reserve(self.cache.kernels, coded, q, self.cache.memory.workspace(self.device, True))
        else:
            self._reserve(batch, heads, next(iter(memory.packed[0].values())).shape[2])
        return memory

    def _reserve(self, batch: int, heads: int, many: int) -> None:
        """Allocate the memory of the kernel's launches over so many blocks of the scheme."""
        keys, values = self.codecs.key.fused(), self.codecs.value.fused()
        assert not isinstance(keys, str) and not isinstance(values, str)
        space, blocks = self.cache.memory.workspace(self.device), many * fused.kernel_blocks(self.codecs)
        assert self.allocation is not None
        windows = self.allocation.sink[0].shape[2], self.allocation.ring[0].shape[2]
        ratio = self.site.ratio
        fused.reserve(self.cache.kernels, space, keys, values, batch, heads, ratio, blocks, windows, self.rotary)

    def _steps_for(self, like: Tensor) -> Steps:
        """What the cache's layers on this device share; made anew for another number of rows."""
        shared, windows = self.cache.steps.get(like.device), self.cache.scheme.windows
        if shared is None or shared.counts.data.shape[1] != len(like):
            counts = Counts(len(like), quantise.Windows(windows.sink, windows.recent, windows.block), like.device)
            length = torch.zeros((), dtype=torch.int64, device=like.device)
            step_rope = None
            if self.cache.scheme.frame == "pre_rope":
                step_rope = StepRope(None, length.new_zeros(len(like)), length.new_zeros((), dtype=torch.bool))
            shared = Steps(counts, length, self.index, self.index, host_bool(like.device), step_rope)
            self.cache.steps[like.device] = shared
        shared.first, shared.last = min(shared.first, self.index), max(shared.last, self.index)
        return shared

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

    def stored(self, part: str) -> list[Tensor]:
        """The tensors of a part, as they are allocated, used or not."""
        if self.allocation is None or part == "decoded":
            return super().stored(part)
        if part == "packed":
            return [t for packed in self.allocation.packed for t in packed.values()]
        return self.allocation.sink + self.allocation.ring

    def bookkeeping(self) -> list[Tensor]:
        memory = self.allocation
        if memory is None:
            return super().bookkeeping()
        steps = self.cache.steps.get(self.device)
        shared = [*steps.due.values()] if steps is not None and self.index == steps.first else []
        return [*super().bookkeeping(), memory.flags, *([] if memory.moves is None else memory.moves.tensors), *shared]

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
            if self._vector:
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
            if by is not None and not isinstance(self.rules.steps, str):
                by.append(self._stored(memory), counts, k, v, *self.rules.steps, factor, due)
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

    def heed(self) -> None:
        if self.ready and not torch.compiler.is_compiling() and not hf.capturing() and bool(self.steps.wrong):
            self.cache.settle()

    def _keys_due(self, memory: Allocation, counts: Counts, keys: Tensor) -> Tensor | None:
        """Keys of the block that this step packs, corrected by SQuat; this step's attention reads the exact ones."""
        if not corrects(self.codecs.key):
            return None
        self.cache.forward.queries_before.pop(self.index, None)
        assert memory.moves is not None
        return self.codecs.key.due(memory.ring[0], counts, keys, memory.moves, memory.due)

    def _stored(self, memory: Allocation) -> quantise.Layer:
        """The tensors that the kernel appends to."""
        if self._layer is None or self._layer.flags is not memory.flags:
            sink, ring = (memory.sink[0], memory.sink[1]), (memory.ring[0], memory.ring[1])
            keys, values = self.as_blocks(memory.packed)
            assert isinstance(keys, Blocks) and isinstance(values, Blocks)  # packed by a rule, so no coordinates
            self._layer = quantise.Layer(keys, values, sink, ring, memory.flags)
        return self._layer

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
            for name, scale in self._scales.items()
        }
