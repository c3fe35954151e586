"""A layer whose storage is allocated once, and whose decode step leaves every decision to the device.

Counts, lengths and the question whether a block is due are tensors; a step runs the same operations with the same shapes each
time, so that one CUDA graph of it, or one compiled forward, serves all. Prefill, crops and reordering happen on the host as
for other layers; `publish` then writes what they left into the allocated storage, `settle` of the cache reads counts back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import fused, hf
from .cache import KVCalLayer
from .codecs import Context
from .codecs.base import Packed, device_only
from .errors import KVCalError
from .ledger import Plan
from .scheme import LayerCodecs, Scheme, Windows
from .statistics import KeyScale

NOT_FINITE, FULL = 1, 2  # bits of Room.fault


def refusal(scheme: Scheme, pair: LayerCodecs) -> str | None:
    """Why a layer that takes the kernel cannot leave all of its step to the device; None if it can."""
    if scheme.frame != "post_rope":
        return "positions are kept on the host for keys before RoPE"
    if others := sorted(name for name in pair.stats if name != KeyScale.name):
        return f"its rounding follows {others[0]}, a run-time statistic that the host counts"
    return None


@dataclass
class Room:
    """Storage of B rows: sink and recent [keys, values] (B, H, tokens, D), packed blocks (B, H, N, ...), and how much of each
    a row has, (B,) int32. length: columns, 0-d int64. fault: NOT_FINITE, FULL; 0-d int32.
    """

    sink: list[Tensor]
    recent: list[Tensor]
    packed: list[Packed]
    sinks: Tensor
    blocks: Tensor
    recents: Tensor
    length: Tensor
    fault: Tensor
    statistics: dict[str, Tensor]

    @property
    def counts(self) -> list[Tensor]:
        return [self.sinks, self.blocks, self.recents, self.length, self.fault]


def most_blocks(windows: Windows, tokens: int) -> int:
    """Blocks that so many tokens can have packed; at least one, that tensors have a slot."""
    return max(1, (tokens - windows.sink - windows.recent) // windows.block)


class FixedLayer(KVCalLayer):
    is_compileable = True
    grows = None
    room: Room | None = None
    ready = False  # room holds what the layer holds
    _quiet = False  # of the next step alone: the host, which is on the way, knows that no token moves

    def _clear(self) -> None:
        super()._clear()
        self.ready = False  # the room stays where it is: a graph knows its address

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As KVCalLayer.update; of a decode step only the new keys and values, as the operator takes them."""
        if not torch.compiler.is_compiling() and not self._cache.steps_on_device(key_states):
            return super().update(key_states, value_states)
        if not self.ready or key_states.shape[2] > fused.QUERIES:
            raise KVCalError(
                f"layer {self.index}: a compiled call brings {key_states.shape[2]} tokens to a cache of {self.columns}: "
                f"only steps of up to {fused.QUERIES} tokens behind a prompt can be compiled; run the prompt uncompiled"
            )
        if not torch.compiler.is_compiling():
            self._quiet = self._cache.step_is_quiet
        hf.turn_of(self.site).leave(self.handle)
        return key_states, value_states

    def _is_for_kernel(self, plan: Plan, keys: Tensor) -> bool:
        return False  # update() has asked

    def drop_turn(self) -> None:
        hf.turn_of(self.site).take()

    def _finish(self, plan: Plan, stored: list[Tensor]) -> None:
        super()._finish(plan, stored)
        self.publish()

    # From the host to the device and back.

    @torch.no_grad()
    def publish(self) -> None:
        """Write what the host has made of the layer into its room."""
        if not self.is_initialized:
            return
        ledger, room = self._cache.ledger, self._room_for(self.window[0])
        for role in (0, 1):
            _fill(room.sink[role], self.sink[role])
            _fill(room.recent[role], self.window[role])
            for name, held in self.packed[role].items():
                _fill(room.packed[role][name], held)
        for mine, count in ((room.sinks, ledger.sink), (room.blocks, ledger.blocks), (room.recents, ledger.window)):
            mine.copy_(count)
        room.length.fill_(self.columns)
        room.fault.zero_()
        for own in self.statistics.values():
            for name, value in own.state.items():
                kept = room.statistics.get(name)
                if kept is None or kept.shape != value.shape:
                    kept = room.statistics[name] = value.clone()
                own.state[name] = kept.copy_(value)
        self.ready = True
        self.look()

    def look(self) -> None:
        """The host's tensors are the parts of the room that the ledger says are in use."""
        room = self.room
        assert room is not None
        sink, blocks, window = self._cache.ledger.widths
        self.sink = [t[:, :, :sink] for t in room.sink]
        self.window = [t[:, :, :window] for t in room.recent]
        self.packed = [{name: t[:, :, :blocks] for name, t in packed.items()} for packed in room.packed]

    def _room_for(self, like: Tensor) -> Room:
        """The layer's room; a new one for another number of rows."""
        batch, heads, _, dim = like.shape
        if self.room is None or len(self.room.sinks) != batch:
            windows, longest = self._cache.scheme.windows, self._cache.max_length
            assert longest is not None
            newest = windows.recent + windows.block - 1 + fused.QUERIES

            def exact(tokens: int) -> list[Tensor]:
                return [like.new_zeros(batch, heads, tokens, dim) for _ in (0, 1)]

            def count() -> Tensor:
                return torch.zeros(batch, dtype=torch.int32, device=like.device)

            many, each = most_blocks(windows, longest), fused.kernel_blocks(self.codecs)
            packed = [
                {n: t.new_zeros(*t.shape[:2], many, *t.shape[3:]) for n, t in codec.empty(batch, like.device).items()}
                for codec in self._pair
            ]
            length = torch.zeros((), dtype=torch.int64, device=like.device)
            self.room = Room(
                exact(windows.sink), exact(newest), packed, count(), count(), count(), length, length.int(), {}
            )
            forms, shape = (self.codecs.key.fused(), self.codecs.value.fused()), (batch, heads, self.site.ratio)
            fused.reserve(self._cache.kernels, self._cache.workspace(like.device), *forms, *shape, many * each)  # type: ignore[arg-type]
        return self.room

    def get_seq_length(self) -> Any:
        """Columns; once there are some, on the device, as of Transformers' StaticLayer."""
        if not self.ready:
            return self.columns
        assert self.room is not None
        return self.room.length.clone()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Always as wide as the cache can be where steps may be compiled; the operator does not read the mask."""
        if self.ready and query_length <= fused.QUERIES:
            return self.get_max_length(), 0
        self._cache.settle()
        return super().get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        assert self._cache.max_length is not None
        return self._cache.max_length

    def stored(self, part: str) -> list[Tensor]:
        """All that is allocated, used or not."""
        if self.room is None:
            return super().stored(part)
        if part == "packed":
            return [t for packed in self.room.packed for t in packed.values()]
        return self.room.sink + self.room.recent

    def bookkeeping(self) -> list[Tensor]:
        return super().bookkeeping() + ([] if self.room is None else self.room.counts)

    # On the device.

    @torch.no_grad()
    def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """A whole step: append, attend, pack what is due, count. No value is looked at on the host. What moves nothing is left
        out where Python runs step by step and update() has seen the host's counts; graphs and compiled code have it all.
        """
        room, quiet, self._quiet = self.room, self._quiet, False
        assert room is not None
        with torch.autocast(q.device.type, enabled=False):
            after = room.recents + k.shape[2]
            slots = room.recents.long()[:, None] + torch.arange(k.shape[2], device=k.device)
            for recent, new in zip(room.recent, (k, v), strict=True):
                index = slots[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
                recent.scatter_(2, index, new.to(self.dtype))
            keys, values = (codec.as_blocks(held) for codec, held in zip(self._pair, room.packed, strict=True))
            factor = self.codecs.key.key_factor(Context(self.index, stats=self._current()))
            out = fused.attention(
                self._cache.kernels, q.to(self.dtype).contiguous(), keys, values,
                room.blocks * fused.kernel_blocks(self.codecs), (room.sink[0], room.sink[1], room.sinks),
                (room.recent[0], room.recent[1], after), scaling, factor, self._cache.workspace(q.device),
            )  # fmt: skip
            self._observe_peak(room, k)
            if quiet:
                room.recents.copy_(after)
            else:
                self._flush(room, after)
            room.length.add_(k.shape[2])
        return out.to(q.dtype)

    def _observe_peak(self, room: Room, keys: Tensor) -> None:
        """InnerQ's factors of rows that have nothing packed: of keys up to the one with which the first block is due."""
        windows = self._cache.scheme.windows
        until = windows.sink + windows.recent + windows.block
        for own in self.statistics.values():
            rank = (room.sinks + room.recents)[:, None] + torch.arange(keys.shape[2], device=keys.device)
            counts = (rank < until) & (room.blocks == 0)[:, None]
            size = keys.to(self.dtype).float().abs().masked_fill(~counts[:, None, :, None], 0).amax(2)
            own.state["peak"].copy_(torch.maximum(own.state["peak"], size))

    def _flush(self, room: Room, after: Tensor) -> None:
        """The oldest recent tokens, of which a row now has `after` (B,): into the sink while that has slots, or, a block of
        them where that many wait behind the recent window, packed. In torch everything is computed and kept where it is due;
        a kernel that returns at once where nothing is may take the place of this function.
        """
        windows = self._cache.scheme.windows
        moved = (windows.sink - room.sinks).minimum(after)
        due = after - moved >= windows.recent + windows.block
        self._pack_due(room, due)
        slots = torch.arange(windows.sink, device=after.device)
        source = slots - room.sinks[:, None]
        taken = (source >= 0) & (source < moved[:, None])
        shift = moved + due * windows.block
        for sink, recent in zip(room.sink, room.recent, strict=True):
            there = torch.arange(recent.shape[2], device=after.device) + shift[:, None]
            sink.copy_(torch.where(taken[:, None, :, None], _take(recent, source.clamp_min(0)), sink))
            recent.copy_(_take(recent, there.clamp_max(recent.shape[2] - 1)))
        for own in self.statistics.values():
            own.state["fixed"].logical_or_(due)
        room.sinks.add_(moved)
        room.blocks.add_(due)
        room.recents.copy_(after - shift)

    def _pack_due(self, room: Room, due: Tensor) -> None:
        """The first block of recent tokens behind the packed ones of the rows that are due."""
        block, last = self._cache.scheme.windows.block, next(iter(room.packed[0].values())).shape[2] - 1
        context = Context(self.index, stats=self._current())
        slot = room.blocks.clamp_max(last).long()
        for codec, recent, packed in zip(self._pair, room.recent, room.packed, strict=True):
            with device_only() as fits:
                made = codec.encode(recent[:, :, :block], context)
            bad = due & ~torch.stack(fits).all(0)
            room.fault.bitwise_or_(bad.any().int() * NOT_FINITE)
            for name, new in made.items():
                index = slot[:, None, None, None].expand_as(new)
                kept = torch.where(due[:, None, None, None], new, packed[name].gather(2, index))
                packed[name].scatter_(2, index, kept)
        room.fault.bitwise_or_((due & (room.blocks > last)).any().int() * FULL)


def _fill(held: Tensor, new: Tensor) -> None:
    """Into the first slots; nothing to do where `new` is a part of `held` already."""
    if new.shape[2] > held.shape[2]:
        raise KVCalError(f"{new.shape[2]} slots of a row do not fit into {held.shape[2]}; give a larger max_length")
    if new.untyped_storage().data_ptr() != held.untyped_storage().data_ptr():
        held[:, :, : new.shape[2]].copy_(new)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x (B, H, S, D), index (B, T) -> (B, H, T, D)."""
    return x.gather(2, index.long()[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def length_of(layers: Sequence[FixedLayer]) -> int:
    """Columns that all of them hold, read from the device; KVCalError says what steps there could not say."""
    rooms = [layer.room for layer in layers if layer.room is not None]
    read = torch.stack([torch.stack([room.length, room.fault.long()]).to(rooms[0].length.device) for room in rooms])
    lengths, bits = read.T.tolist()
    for layer, fault in zip(layers, bits, strict=True):
        if why := faults(fault):
            raise KVCalError(f"layer {layer.index}: {why}; call reset() and start again")
    if len(set(lengths)) > 1:
        raise KVCalError(
            f"layers hold {sorted(set(lengths))} tokens: a forward broke off; call reset() and start again"
        )
    length: int = lengths[0]
    return length


def faults(bits: int) -> str | None:
    """What went wrong in a step on the device, which could not say so then."""
    if bits & NOT_FINITE:
        return "a NaN, an infinity or a number beyond float16 reached the cache; check the model's dtype and weights"
    return "more tokens came than max_length; make the cache larger" if bits & FULL else None
