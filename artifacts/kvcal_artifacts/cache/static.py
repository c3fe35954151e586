"""A layer whose storage is allocated once, and whose decode step leaves every decision to the device.

Counts, lengths and the question whether a block is due are tensors; a step runs the same operations with the same shapes each
time, so that one CUDA graph of it, or one compiled forward, serves all. Prefill, crops and reordering happen on the host as
for other layers; `publish` then writes what they left into the allocated storage, `settle` of the cache reads counts back.

Recent tokens lie in a ring, as kvcal_kernels.quantise has them: token j of a row's window in slot (32 * blocks + j) mod room.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcal_kernels import quantise
from kvcal_kernels.layout import BLOCK, Blocks, rope
from kvcal_kernels.quantise import Counts
from kvcal_kernels.squat import Digits

from .. import hf, operator
from ..codecs import Context
from ..codecs.base import device_only
from ..codecs.squat import corrects
from ..errors import KVCalError
from ..modes import without_autocast, without_grad
from ..paths import codebook, fused
from ..scheme import LayerCodecs
from ..storage.ledger import Plan
from . import observing
from .layer import KVCalLayer
from .slots import over_heads, take_slots
from .static_storage import STORED, Held, Room, StaticStorage, Steps, Turns, host_bool, most_blocks, ring_slots
from .statistics import KeyScale, QuerySubspace

if TYPE_CHECKING:
    from .cache import KVCalCache

NOT_FINITE, NO_SLOT = quantise.reference.NONFINITE, quantise.reference.NO_SLOT


class StaticLayer(KVCalLayer):
    is_compileable = True
    storage: StaticStorage
    ready = False  # the storage on the device holds what the layer holds
    _layer: quantise.Layer | None = None  # the room as the kernel that appends takes it
    _uncompiled = False  # whether update() ran for this step, which a compiled forward does not do

    def __init__(self, cache: KVCalCache, index: int, codecs: LayerCodecs, site: hf.AttentionSite) -> None:
        super().__init__(cache, index, codecs, site)
        self._in_place = hf.InPlace(hf.decoder_of(cache.model), site)

    def _new_storage(self, block: int) -> StaticStorage:
        return StaticStorage(block)

    @property
    def room(self) -> Room | None:
        """What is allocated, if anything is."""
        return self.storage.room

    @room.setter
    def room(self, value: Room | None) -> None:
        self.storage.room = value

    def _clear(self) -> None:
        super()._clear()
        self.ready = False  # the room stays where it is: a graph knows its address

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        if self.paths.vector and self.paths.refused is None:
            why = codebook.append_refusal(self.cache.kernels, self.codecs, self.dtype, self.device)
            if why is not None:
                self.cache.grow(f"layer {self.index}: {why}")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As KVCalLayer.update; of a decode step only the new keys and values, as the operator takes them."""
        if not torch.compiler.is_compiling():
            if not self.cache.steps_on_device(key_states):
                return super().update(key_states, value_states)
            self._uncompiled = True
        else:
            self._in_place.check(self.title)
        if not self.ready or key_states.shape[2] > self.cache.most_queries:
            raise KVCalError(f"{self.title}: {self.cache.why_not_compiled(key_states.shape[2])}")
        turn = hf.turn_of(self.site)
        turn.leave(self.handle, key_states, value_states, self._keys_before(turn, key_states))
        return key_states, value_states

    def _keys_before(self, turn: hf.HandOff, handed: Tensor) -> Tensor | None:
        """The step's keys before RoPE where these are stored; None else."""
        if self.cache.scheme.frame == "post_rope":
            return None
        if not torch.compiler.is_compiling():
            return observing.frame_keys(self, handed)
        if turn.shown is None:
            raise KVCalError(
                f"{self.title}: a compiled forward does not show its keys before RoPE: compile it while a cache of this "
                "scheme is open, the projection of keys within it"
            )
        return turn.shown

    def _is_for_kernel(self, plan: Plan, keys: Tensor, values: Tensor) -> bool:
        possible = super()._is_for_kernel(plan, keys, values)  # which tells the cache why not
        return possible and not self.cache.is_compileable  # update() has asked

    def drop_turn(self) -> None:
        self._due = None
        hf.drop_turn(self.site)

    def _finish(self, plan: Plan, stored: list[Tensor], extended: list[Tensor] | None = None) -> None:
        super()._finish(plan, stored, extended)
        self.publish()

    @property
    def path(self) -> str:
        """As KVCalLayer.path; then what appends the tokens of steps."""
        if self.room is None:
            return super().path
        return f"{super().path}; steps appended by {self.paths.appending()}"

    # From the host to the device and back.

    @torch.inference_mode(False)  # else what is allocated could be written to in inference mode alone
    @torch.no_grad()
    def publish(self) -> None:
        """Write what the host has made of the layer into its room."""
        if not self.is_initialized or not self.cache.is_compileable:
            return
        like, ledger, contents = self.window[0], self.cache.ledger, self.cache.held
        if self.cache.stored_rope.rotary and not bool(
            ledger.lengths.all()
        ):  # no one knows where a row without a token will begin
            self.leave_room()
            return
        room, steps = self._room_for(like), self._steps_for(like)
        slots = contents.slots(self.cache.scheme.windows.block, room.ring[0])
        for role in (0, 1):
            self.storage.fill(room.sink[role], self.sink[role])
            room.ring[role].scatter_(2, over_heads(slots, like), self.window[role])
            for name, part in self.packed[role].items():
                self.storage.fill(room.packed[role][name], part)
        if self.index == steps.first:
            stored = torch.stack([ledger.sink, ledger.window, ledger.blocks * fused.kernel_blocks(self.codecs)])
            for name, count in zip(STORED, stored.to(like.device), strict=True):
                getattr(steps.counts, name).copy_(count)
            steps.length.fill_(self.columns)
            steps.wrong.fill_(False)
            if steps.turns is not None:
                self._begin_turns(steps.turns)
        room.flags.zero_()
        self._factor = None
        for scale in self._scales.values():
            for name, value in scale.state.items():
                target = room.statistics.get(name)
                if target is None or target.shape != value.shape:
                    target = room.statistics[name] = value.clone(memory_format=torch.contiguous_format)
                scale.state[name] = target.copy_(value)
        if self.cache.opened and not self.paths.vector:
            self._key_factor()
        self._correct_by(room)
        self.ready = True
        self.overlook(contents)

    @property
    def _scales(self) -> dict[str, KeyScale]:
        """The statistics that steps go on with; a subspace of queries stays as it is."""
        return {name: statistic for name, statistic in self.statistics.items() if isinstance(statistic, KeyScale)}

    def _correct_by(self, room: Room) -> None:
        """Of SQuat: what corrects the blocks of the steps to come."""
        key, ledger, subspaces = self.codecs.key, self.cache.ledger, None
        if not corrects(key):
            return
        for statistic in self.statistics.values():
            assert isinstance(statistic, QuerySubspace)
            subspaces = statistic.standing(ledger.blocks, (ledger.lengths - self.missed).clamp_min(0), self.site.ratio)
        previous = self._corrected_for
        if (
            room.moves is not None
            and subspaces is not None
            and previous is not None
            and torch.equal(subspaces, previous)
        ):
            return
        moves = key.step_moves(subspaces)
        self._corrected_for = subspaces
        if room.moves is None or not room.moves.renew(moves):
            room.moves = Digits.of(moves)
        if room.due is None:
            keys = room.sink[0]
            size = torch.Size((*keys.shape[:2], self.cache.scheme.windows.block, keys.shape[3]))
            room.due = self.steps.due.setdefault(size, torch.zeros(size, device=keys.device))

    _corrected_for: Tensor | None = None  # rows' own subspaces that room.moves are of

    def _begin_turns(self, turns: Turns) -> None:
        """Rows begin where the ledger says."""
        ledger = self.cache.ledger
        starts = ledger.starts
        turns.start.copy_(starts)
        turns.gap.zero_()
        if not self.cache.stored_rope.rotary or (turns.of is not None and torch.equal(turns.of, starts)):
            return
        windows, room = self.cache.scheme.windows, self.room
        assert room is not None
        blocks = most_blocks(windows, self.cache.max_length or 0) * fused.kernel_blocks(self.codecs)
        first = rope.first_positions(starts, windows.sink, blocks, room.ring[0].shape[2])
        angles, turns.of = self.cache.stored_rope.of_runs(ledger, first.to(turns.start.device)), starts.clone()
        if turns.rope is None:
            turns.rope = angles
        turns.rope.renew(angles.first)

    def leave_room(self) -> None:
        if self.room is not None:
            self.storage.leave()
            self.ready, self._shown, self._layer = False, None, None

    def overlook(self, contents: Held) -> None:
        """The storage on the device has what `contents` says."""
        self.storage.overlook(contents)

    def _room_for(self, like: Tensor) -> Room:
        """The layer's room; a new one for another number of rows, dtype or device."""
        batch, heads, _, dim = like.shape
        was = None if self.room is None else self.room.sink[0]
        if self.room is None or was is None or (len(was), was.dtype, was.device) != (batch, like.dtype, like.device):
            windows, longest = self.cache.scheme.windows, self.cache.max_length
            assert longest is not None
            shared = quantise.Windows(windows.sink, windows.recent, windows.block)

            def exact(tokens: int) -> list[Tensor]:
                return [like.new_zeros(batch, heads, tokens, dim) for _ in (0, 1)]

            many = most_blocks(windows, longest)
            packed = [
                {n: t.new_zeros(*t.shape[:2], many, *t.shape[3:]) for n, t in codec.empty(batch, like.device).items()}
                for codec in self.pair
            ]
            flags = torch.zeros(heads, dtype=torch.int32, device=like.device)
            self._shown = self._layer = None
            self.room = Room(exact(windows.sink), exact(shared.ring_capacity(fused.QUERIES)), packed, flags, {})
            self.handle = operator.register(self)  # what was compiled for another room knows its addresses
            if self.paths.vector:
                coded, shape = codebook.coded(self.codecs, self.room.packed), (batch, heads * self.site.ratio, 1, dim)
                codebook.reserve(
                    self.cache.kernels, coded, like.new_zeros(shape), self.cache.workspace(self.device, True)
                )
            else:
                self._reserve(batch, heads, many)
        return self.room

    def _reserve(self, batch: int, heads: int, many: int) -> None:
        keys, values = self.codecs.key.fused(), self.codecs.value.fused()
        assert not isinstance(keys, str) and not isinstance(values, str)
        space, blocks = self.cache.workspace(self.device), many * fused.kernel_blocks(self.codecs)
        assert self.room is not None
        windows = self.room.sink[0].shape[2], self.room.ring[0].shape[2]
        ratio = self.site.ratio
        fused.reserve(self.cache.kernels, space, keys, values, batch, heads, ratio, blocks, windows, self.rotary)

    def _steps_for(self, like: Tensor) -> Steps:
        """What the cache's layers on this device share; anew for another number of rows."""
        shared, windows = self.cache.steps.get(like.device), self.cache.scheme.windows
        if shared is None or shared.counts.data.shape[1] != len(like):
            counts = Counts(len(like), quantise.Windows(windows.sink, windows.recent, windows.block), like.device)
            length = torch.zeros((), dtype=torch.int64, device=like.device)
            turns = None
            if self.cache.scheme.frame == "pre_rope":
                turns = Turns(None, length.new_zeros(len(like)), length.new_zeros((), dtype=torch.bool))
            shared = Steps(counts, length, self.index, self.index, host_bool(like.device), turns)
            self.cache.steps[like.device] = shared
        shared.first, shared.last = min(shared.first, self.index), max(shared.last, self.index)
        steps: Steps = shared
        return steps

    @property
    def steps(self) -> Steps:
        shared: Steps = self.cache.steps[self.device]
        return shared

    def get_seq_length(self) -> Any:
        """Columns; once there are some, on the device, as of Transformers' StaticLayer."""
        self.heed()
        return self.steps.length.clone() if self.ready else self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Always as wide as the cache can be where steps may be compiled; the operator does not read the mask."""
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
        """All that is allocated, used or not."""
        if self.room is None or part == "decoded":
            return super().stored(part)
        if part == "packed":
            return [t for packed in self.room.packed for t in packed.values()]
        return self.room.sink + self.room.ring

    def bookkeeping(self) -> list[Tensor]:
        room = self.room
        if room is None:
            return super().bookkeeping()
        steps = self.cache.steps.get(self.device)
        shared = [*steps.due.values()] if steps is not None and self.index == steps.first else []
        return [*super().bookkeeping(), room.flags, *([] if room.moves is None else room.moves.tensors), *shared]

    # On the device.

    @without_grad
    def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, positions: Tensor | None = None) -> Tensor:
        """A whole step: count, append, pack what is due, attend. No value is looked at on the host."""
        uncompiled, self._uncompiled = self._uncompiled, False
        if self._due is not None:  # of a cache that grows
            return super().attend(q, k, v, scaling)
        room, steps, dtype = self.room, self.steps, self.dtype
        assert room is not None
        counts, by = steps.counts, fused.steps_by(self.cache.kernels)
        with without_autocast(q.device.type):
            if self.index == steps.first:
                if not uncompiled:
                    self.cache.check_use()
                new = torch.full_like(counts.new, k.shape[2])
                (by or quantise).advance(counts, new)
                if steps.turns is not None and positions is not None:  # else the host has looked
                    steps.turns.note(counts, positions)
            if self.paths.vector:
                return self._leave(steps, self._attend_codes(room, counts, q, k, v, scaling), q, k)
            settled = not hf.capturing() and self.cache.opened  # a graph serves other prompts, too
            observed, k, v = None, k.to(dtype), v.to(dtype)
            if not settled:
                observed = self._factors_seen(counts, k, by or quantise)
                self._factor = None
            # not kept where a replayed graph may change the statistics in place, nor in memory of a compiled forward's graphs
            factor, wide = self._key_factor(settled and uncompiled, observed)
            keys, values = self._as_blocks(room.packed)
            due = self._keys_due(room, counts, k)
            if by is not None and not isinstance(self.paths.appends, str):
                by.append(self._stored(room), counts, k, v, *self.paths.appends, factor, due)
            else:
                self._append(room, counts, [k, v], due)
            out = fused.attention(
                self.cache.kernels, q.to(dtype).contiguous(), keys, values, counts.blocks_before,
                (room.sink[0], room.sink[1], counts.sink), (room.ring[0], room.ring[1], counts.seen), scaling, wide,
                self.cache.workspace(q.device), ring=True, turns=steps.turns.rope if steps.turns and self.rotary else None,
            )  # fmt: skip
            return self._leave(steps, out, q, k)

    def _leave(self, steps: Steps, out: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """What attention gives. Of the step's last layer it is NaN where a block was lost, in any layer: no one would see
        otherwise that what follows a recorded or compiled step is not the model's. Six small launches a step.
        """
        if self.index == steps.last:
            steps.length.add_(k.shape[2])
            layers: list[Any] = self.cache.own_layers
            lost = torch.cat(
                [one.room.flags for one in layers if one.room is not None and one.device == self.device]
            ).any()
            wrong = lost | (steps.length > (self.cache.max_length or 0))
            if steps.turns is not None:
                wrong = wrong | steps.turns.gap
            steps.wrong.copy_(wrong, non_blocking=True)
            out = out.masked_fill(lost, math.nan)
        return out.to(q.dtype)

    def heed(self) -> None:
        if self.ready and not torch.compiler.is_compiling() and not hf.capturing() and bool(self.steps.wrong):
            self.cache.settle()

    def _keys_due(self, room: Room, counts: Counts, keys: Tensor) -> Tensor | None:
        """Of SQuat: keys of the block that this step packs, corrected; this step's attention sees the exact ones."""
        if not corrects(self.codecs.key):
            return None
        self.cache.forward.queries_before.pop(self.index, None)
        assert room.moves is not None
        return self.codecs.key.due(room.ring[0], counts, keys, room.moves, room.due)

    def _stored(self, room: Room) -> quantise.Layer:
        """What the kernel appends to."""
        if self._layer is None or self._layer.flags is not room.flags:
            sink, ring = (room.sink[0], room.sink[1]), (room.ring[0], room.ring[1])
            keys, values = self._as_blocks(room.packed)
            assert isinstance(keys, Blocks) and isinstance(values, Blocks)  # of a rule, so no coordinates
            self._layer = quantise.Layer(keys, values, sink, ring, room.flags)
        return self._layer

    def _attend_codes(self, room: Room, counts: Counts, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Of vector codes."""
        kernels, space = self.cache.kernels, self.cache.workspace(q.device, True)
        coded = codebook.coded(self.codecs, room.packed)
        sink, ring = (room.sink[0], room.sink[1]), (room.ring[0], room.ring[1])
        new = k.to(self.dtype), v.to(self.dtype)
        codebook.append(kernels, coded, sink, ring, counts, room.flags, new, space)
        slots = next(iter(room.packed[0].values())).shape[2]
        blocks = (counts.blocks_before // fused.kernel_blocks(self.codecs)).clamp_max(slots)
        exact = (*sink, counts.sink), (*ring, counts.seen)
        first = counts.blocks_before * BLOCK
        return codebook.attention(kernels, q.to(self.dtype).contiguous(), coded, blocks, *exact, scaling, space, first)

    def _factors_seen(self, counts: Counts, keys: Tensor, by: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """By name what statistics are with this step's keys, of kv heads and of query heads."""
        ratio = self.site.ratio
        return {
            name: by.observe(scale.state["peak"], scale.state["fixed"], counts, keys, ratio)
            for name, scale in self._scales.items()
        }

    def _append(self, room: Room, counts: Counts, new: list[Tensor], keys: Tensor | None = None) -> None:
        """What quantise.append does, in operations of fixed shape for any codec: packed is always, kept what is due.
        keys: those that are due, corrected.
        """
        windows, each = self.cache.scheme.windows, fused.kernel_blocks(self.codecs)
        quantise.keep((room.sink[0], room.sink[1]), (room.ring[0], room.ring[1]), counts, (new[0], new[1]))
        due, slot = counts.blocks > counts.blocks_before, counts.blocks_before.long() // each
        last = next(iter(room.packed[0].values())).shape[2] - 1
        context = Context(self.index, stats=self.current_statistics())
        for role, (codec, packed) in enumerate(zip(self.pair, room.packed, strict=True)):
            with device_only() as fits:
                first = ring_slots(slot, windows.block, windows.block, room.ring[role])
                leaving = take_slots(room.ring[role], first)
                if role == 0 and keys is not None:
                    codec, leaving = codec.rounding, keys
                encoded = codec.encode(leaving, context)
            heads = len(room.flags)  # a norm of several is all of theirs
            finite = torch.stack([one.repeat_interleave(heads // one.shape[1], 1) for one in fits]).all(0)
            bad = (due[:, None] & ~finite).any(0) * NOT_FINITE + (due & (slot > last)).any() * NO_SLOT
            room.flags.bitwise_or_(bad.int() << quantise.reference.VALUES * role)
            for name, x in encoded.items():
                index = slot.clamp_max(last)[:, None, None, None].expand_as(x)
                keep = (due & (slot <= last))[:, None, None, None]
                packed[name].scatter_(2, index, torch.where(keep, x, packed[name].gather(2, index)))
