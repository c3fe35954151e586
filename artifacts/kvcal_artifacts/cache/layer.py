"""One layer of a cache: sink, packed blocks and recent window, and how attention reads them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from operator import is_not
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcal_kernels.device import on
from kvcal_kernels.layout import Blocks, TransformBlocks

from .. import hf, operator
from ..codecs import Codec, Context
from ..codecs.base import Packed
from ..errors import KVCalError
from ..modes import without_autocast, without_grad
from ..paths import choose, codebook, fused
from ..scheme import LayerCodecs
from ..storage import block_store
from ..storage.ledger import Plan
from . import observing, packing, reading
from .slots import fill_slots, first_slots, own_storage, take_slots
from .static_storage import StaticStorage
from .statistics import statistic

if TYPE_CHECKING:
    from .cache import KVCalCache


class Watch(Protocol):
    """Is told what a cache packs and reads, for those who measure; `KVCalCache.watch`."""

    def packed(self, layer: int, exact: list[Tensor], decoded: list[Tensor]) -> None:
        """Blocks just packed: keys and values (B, H, T, D) that went in, and what comes back, float32."""

    def read(self, layer: int, blocks: int) -> None:
        """A call's attention gets so many blocks, all rows together."""


class HostStorage:
    """Storage of one layer that grows on the host. sink, window: keys and values, each (B, H, tokens, D) in the model's dtype;
    packed: theirs.
    """

    def __init__(self) -> None:
        self.sink: list[Tensor] = []
        self.window: list[Tensor] = []
        self.packed: list[Packed] = [{}, {}]

    def clear(self) -> None:
        """Nothing to do: the layer gives it tensors of no tokens."""


class KVCalLayer(CacheLayerMixin):
    """One layer's storage. Keys are kept in the scheme's frame; the cache it belongs to holds the bookkeeping."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: KVCalCache, index: int, codecs: LayerCodecs, site: hf.AttentionSite) -> None:
        super().__init__()
        self._owner, self.index, self.site = weakref.ref(cache), index, site
        self.title = f"layer {index}"  # in errors of forwards that are traced, which know integers only as symbols
        # no kernel reads blocks of odd attention, in whatever order
        self._ratio = 1 if hf.odd_attention(site) else site.ratio
        self.codecs = codecs = codecs.read_by(self._ratio)
        self.columns = 0
        self.rotary = cache.stored_rope.rotary if site.rope else 0  # channels that the kernel turns
        self.handle = operator.register(self)
        self._due: tuple[Plan, list[Tensor]] | None = None  # between update() and its attention by the kernel
        self.storage = self._new_storage(cache.scheme.windows.block)
        self.paths = choose.LayerPaths.of(cache.kernels, cache.scheme, codecs, site, self.rotary)
        self.expect(site.placed[1])
        self._clear()

    def expect(self, dtype: torch.dtype) -> None:
        """Until keys come: the paths that they will take if they are of that dtype and where the layer's weights are."""
        self._choose(dtype, self.site.placed[0])

    def _choose(self, dtype: torch.dtype, device: torch.device) -> None:
        scheme = self.cache.scheme
        self.paths = self.paths.on(scheme, self.index, self.codecs, self.site, dtype, device, self.rotary)

    def _clear(self) -> None:
        self.storage.clear()
        self.sink, self.window, self.packed = [], [], [{}, {}]
        self._factor: tuple[list[Tensor], tuple[Tensor | None, Tensor | None]] | None = None
        self.remembered: tuple[list[Packed], list[Tensor]] | None = None  # blocks, and what they decode to
        self.statistics = {name: statistic(name, self.codecs.key.shape) for name in sorted(self.codecs.stats)}
        self.columns, self.is_initialized = 0, False
        # columns that no statistic has been shown, the device's own steps: the newest ones, and all
        self.unseen = self.missed = 0
        self._due = None

    def _new_storage(self, block: int) -> HostStorage | StaticStorage:
        return HostStorage()

    @property
    def sink(self) -> list[Tensor]:
        """Keys and values of the first tokens, each (B, H, tokens, D) in the model's dtype."""
        return self.storage.sink

    @sink.setter
    def sink(self, value: list[Tensor]) -> None:
        self.storage.sink = value

    @property
    def window(self) -> list[Tensor]:
        """Keys and values of the newest tokens, as `sink`."""
        return self.storage.window

    @window.setter
    def window(self, value: list[Tensor]) -> None:
        self.storage.window = value

    @property
    def packed(self) -> list[Packed]:
        """Packed keys and values."""
        return self.storage.packed

    @packed.setter
    def packed(self, value: list[Packed]) -> None:
        self.storage.packed, self._shown = value, None

    # packed tensors, and how the kernel sees them
    _shown: tuple[list[Packed], tuple[Blocks | TransformBlocks, Blocks | TransformBlocks]] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        shape = self.codecs.key.shape
        if key_states.shape[1] != shape.heads or key_states.shape[3] != shape.dim:
            raise KVCalError(
                f"layer {self.index}: the model's keys have {key_states.shape[1]} heads of {key_states.shape[3]}, "
                f"the bundle was made for {shape.heads} of {shape.dim}"
            )
        empty = [x[:, :, :0].clone() for x in (key_states, value_states)]
        self.sink, self.window = list(empty), list(empty)
        self.codecs = self.cache.scheme.on(self.index, self.device, self._ratio)
        self.cache.on_keys_of(self.dtype)
        self._choose(self.dtype, self.device)
        if self.paths.refused is not None:
            self.cache.on_refused(self)
        self.codecs = choose.packing(self.cache.kernels, self.codecs, self.dtype, self.device)
        self.paths = self.paths.packing(self.codecs, self.dtype, self.device, self.is_compileable)
        self.packed = [codec.empty(key_states.shape[0], key_states.device) for codec in self.pair]
        self.is_initialized = True

    @property
    def packing(self) -> str:
        """What packs whole blocks, those of prompts above all."""
        return self.paths.packing_blocks(self.codecs)

    @property
    def cache(self) -> KVCalCache:
        """Held weakly: storage is free as soon as the last reference to the cache is gone, without a garbage collection."""
        owner = self._owner()
        if owner is None:
            raise KVCalError(f"layer {self.index}: the cache it belongs to is gone; keep a reference to it")
        return owner

    @property
    def pair(self) -> tuple[Codec, Codec]:
        return self.codecs.key, self.codecs.value

    @property
    def rotates(self) -> bool:
        return self.cache.scheme.frame == "pre_rope" and self.site.rope

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys (B, H, Q, D) after RoPE and values of the current call -> all keys and values, in column order."""
        with without_autocast(key_states.device.type), on(key_states.device):  # else packed bytes would depend on both
            return self._update(key_states, value_states)

    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        plan = self.cache.plan_for(self, key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._move(key_states.device)
        stored = [observing.frame_keys(self, key_states), value_states]
        if self._is_for_kernel(plan, key_states, value_states):
            self._due = plan, stored
            hf.turn_of(self.site).leave(self.handle, key_states, value_states)
            return key_states, value_states
        out = reading.materialise(self, plan, key_states, value_states)
        if self.paths.seamed:  # prompts gain by cuDNN, and build a plan once
            hf.hand(self.site, out[0], grown=plan.past > 0 and plan.query == 1)
        self._finish(plan, stored)
        return out

    def _finish(self, plan: Plan, stored: list[Tensor], extended: list[Tensor] | None = None) -> None:
        """extended: windows with the new tokens behind them, where attention has made them."""
        self._store(plan, stored, observing.observe(self, plan, stored[0]), extended)
        self.columns += plan.query
        if self.cache.offloading_layers:
            self.offload()

    def _is_for_kernel(self, plan: Plan, keys: Tensor, values: Tensor) -> bool:
        """Whether the kernel computes this call's attention: a few new tokens, all real, over packed blocks."""
        cache, forward = self.cache, self.cache.forward
        tokens = self.block_slots * cache.scheme.windows.block
        if self.paths.refused is not None or plan.query > self.paths.most_queries or tokens <= self.paths.least_tokens:
            return False
        reasons = {
            "a row's mask says 0 for a new token": not plan.whole,
            "a mask that is not 2-D": forward.custom_mask,
            "the mask hides stored tokens": forward.hides_old,
            "output_attentions": forward.gives_weights,
            "the model is in training mode": self.site.module.training,
            "a gradient may be asked for": self.learns(keys, values),
            "positions that do not follow those before": bool(
                self.rotary and not cache.stored_rope.is_even(cache.ledger)
            ),
        }
        why = next((why for why, holds in reasons.items() if holds), None)
        if why is not None:
            cache.note_decoded(self, why)
        return why is None

    def learns(self, keys: Tensor, values: Tensor) -> bool:
        """Whether a gradient may be asked for, which the operator does not have."""
        if not torch.is_grad_enabled():
            return False
        return keys.requires_grad or values.requires_grad or any(p.requires_grad for p in self.site.module.parameters())

    ready = False

    def heed(self) -> None:
        """Raise what the device has found out about steps that it did by itself; those that still run are not waited for."""

    def publish(self) -> None:
        """After the host changed the layer: nothing to do where the host has it all."""

    def leave_room(self) -> None:
        """Storage grows on the host from now on: as ever."""

    def drop_turn(self) -> None:
        """Of a forward that broke off between update() and its attention."""
        if self._due is not None:
            self._due = None
            hf.drop_turn(self.site)

    @without_grad
    def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, positions: Tensor | None = None) -> Tensor:
        """The operator of operator.py: attention of the call that update() was told of; then its tokens are stored."""
        due, self._due = self._due, None
        if due is None:
            raise KVCalError(f"layer {self.index}: attention was called without update(); call reset() and start again")
        (plan, stored), cache = due, self.cache
        with without_autocast(q.device.type):
            each = 1 if self.paths.vector else fused.kernel_blocks(self.codecs)
            sink, blocks, recent = cache.forward.counts(q.device, each)
            extended = [self._with_new(plan, recent, role, new) for role, new in enumerate(stored)]
            exact = (self.sink[0], self.sink[1], sink), (extended[0], extended[1], recent)
            out = self._attention(q.to(self.dtype).contiguous(), blocks, *exact, scaling)
            if cache.watch is not None:
                cache.watch.read(self.index, self.block_slots * q.shape[0])
            self._finish(plan, stored, extended)
        return out.to(q.dtype)

    def _attention(self, q: Tensor, blocks: Tensor, sink: fused.Exact, recent: fused.Exact, scaling: float) -> Tensor:
        """blocks (B,) int32: of the kernel; of vector codes of the scheme."""
        cache = self.cache
        kernels, space = cache.kernels, cache.workspace(q.device, self.paths.vector)
        if self.paths.vector:
            coded = codebook.coded(self.codecs, self.packed)
            return codebook.attention(kernels, q, coded, blocks, sink, recent, scaling, space)
        (keys, values), turns = self._as_blocks(self.packed), None
        if self.rotary:
            turns = cache.stored_rope.of_rows(
                cache.ledger, q.device, sink[0].shape[2], keys.words.shape[2], recent[0].shape[2]
            )
        factor = self._key_factor()[1]
        return fused.attention(kernels, q, keys, values, blocks, sink, recent, scaling, factor, space, turns=turns)

    def _as_blocks(self, packed: list[Packed]) -> tuple[Blocks | TransformBlocks, Blocks | TransformBlocks]:
        """Keys and values as the kernel takes them; made once for tensors that stay."""
        if self._shown is None or self._shown[0] is not packed:
            keys, values = (codec.as_blocks(tensors) for codec, tensors in zip(self.pair, packed, strict=True))
            self._shown = packed, (keys, values)
        return self._shown[1]

    def _key_factor(
        self, keep: bool = True, observed: Mapping[str, tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """What packed keys were divided by, of kv heads, contiguous, and of query heads; kept for statistics that stay, which
        are never changed in place here. observed: statistics of kv heads and of query heads, where they are at hand.
        """
        states = [state for tracker in self.statistics.values() for state in tracker.state.values()]
        if self._factor is not None and len(self._factor[0]) == len(states):
            states_then, both = self._factor
            if not any(map(is_not, states, states_then)):
                return both
        stats = (
            self.current_statistics()
            if observed is None
            else {name: of_keys for name, (of_keys, _) in observed.items()}
        )
        factor = self.codecs.key.key_factor(Context(self.index, stats=stats))
        heads = self.site.ratio * self.site.kv_heads
        wide = next((of_queries for of_keys, of_queries in (observed or {}).values() if of_keys is factor), None)
        if factor is not None and wide is None:
            wide = fused.for_queries(factor, heads)
        both = (None if factor is None else factor.contiguous(), wide)
        self._factor = (states, both) if keep else None
        return both

    def _with_new(self, plan: Plan, recent: Tensor, role: int, new: Tensor) -> Tensor:
        """The recent window and the new tokens behind it, row by row; recent: how many each row then has."""
        wide = torch.cat([self.window[role], new.to(self.dtype)], 2)
        if not plan.ragged:
            return wide
        slots = self.cache.forward.places(new.device, recent)
        return wide.scatter_(2, slots[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]), new.to(self.dtype))

    is_verified = False

    @torch.no_grad()
    def decode_all(self) -> tuple[Tensor, Tensor]:
        if not self.block_slots:
            nothing = self.window[0][:, :, :0].float()
            self.cache.forward.chain.leave("old", self.index, nothing, nothing)
            return nothing, nothing
        context = self.cache.forward.chain.context("old", self.index, self.device)
        keys, values = reading.remembering(self, context) if self.cache.remember else self.decode(self.packed, context)
        self.cache.forward.chain.leave("old", self.index, keys, values)
        if self.cache.watch is not None:
            self.cache.watch.read(self.index, self.block_slots * keys.shape[0])
        return keys, values

    def decode(self, packed: list[Packed], context: Context) -> tuple[Tensor, Tensor]:
        context.stats = self.current_statistics()
        keys = self.codecs.key.decode(packed[0], context)
        context.k0 = keys
        return keys, self.codecs.value.decode(packed[1], context)

    def current_statistics(self) -> dict[str, Tensor]:
        """Run-time statistics that decoding needs."""
        return {name: now for name, tracker in self.statistics.items() if (now := tracker.current()) is not None}

    @property
    def block_slots(self) -> int:
        """Block slots that the fullest row needs."""
        return int(next(iter(self.packed[0].values())).shape[2])

    @without_grad
    def _store(
        self, plan: Plan, new: list[Tensor], stats: dict[str, Tensor], extended: list[Tensor] | None = None
    ) -> None:
        """Distribute the new tokens over sink and window, and pack what leaves the window. extended: as of _finish."""
        if not plan.flush and self.cache.forward.rolls and (extended is not None or not plan.ragged):  # most steps
            self.window = extended or [torch.cat([before, x], 2) for before, x in zip(self.window, new, strict=True)]
            self.cache.forward.chain.leave("new", self.index, None, None)
            return
        leaving: list[Tensor] = []
        for role in (0, 1):
            fresh = torch.cat([self.sink[role], self.window[role], new[role]], 2)
            if plan.sink_index is None:
                wide = plan.flush * self.cache.scheme.windows.block
                sink, rest = fresh[:, :, : plan.sink], fresh[:, :, plan.sink :]
                leaving.append(rest[:, :, :wide])
                window = rest[:, :, wide:]
            else:
                assert plan.window_index is not None
                sink, window = take_slots(fresh, plan.sink_index), take_slots(fresh, plan.window_index)
                if plan.flush:
                    assert plan.flush_index is not None and plan.idle is not None
                    leaving.append(fill_slots(take_slots(fresh, plan.flush_index), plan.idle))
            self.sink[role], self.window[role] = own_storage(sink), own_storage(window)
        if plan.flush:
            self._pack(plan, leaving, stats, by_kernel=extended is not None)
        else:
            self.cache.forward.chain.leave("new", self.index, None, None)

    def _pack(self, plan: Plan, leaving: list[Tensor], stats: dict[str, Tensor], by_kernel: bool = False) -> None:
        before, remembered = self.packed, self.remembered
        apart = not by_kernel and all(codec.encodes_by_kernel for codec in self.pair)
        encoded = (
            packing.encode(self, leaving, stats) if apart else packing.encode_by(self, self.paths.packs, leaving, stats)
        )
        self.packed = [
            {name: block_store.append(old[name], t, plan) for name, t in packed.items()}
            for old, packed in zip(before, encoded, strict=True)
        ]
        if remembered is not None and remembered[0] is before and plan.rows is None:  # no block has moved
            self.remembered = self.packed, remembered[1]

    @property
    def tail(self) -> int | None:
        """How many of the newest columns the statistics of queries can forget; None without any."""
        return observing.tail(self)

    def select_rows(self, rows: Tensor, widths: tuple[int, int, int]) -> None:
        """Keep these batch rows in this order; widths: sink, blocks and window that the fullest of them needs."""
        if self.is_initialized:
            sink, blocks, window = widths
            self.sink = [first_slots(t[rows.to(t.device)], sink) for t in self.sink]
            self.window = [first_slots(t[rows.to(t.device)], window) for t in self.window]
            self.packed = [
                {name: block_store.first_blocks(block_store.select(t, rows), blocks) for name, t in packed.items()}
                for packed in self.packed
            ]
            for tracker in self.statistics.values():
                tracker.select(rows)

    def _move(self, device: torch.device | str) -> None:
        if self.window[0].device == torch.device(device):
            return
        self.sink, self.window = ([t.to(device, non_blocking=True) for t in part] for part in (self.sink, self.window))
        self.packed = [{name: block_store.move(t, device) for name, t in packed.items()} for packed in self.packed]
        for tracker in self.statistics.values():
            tracker.move(device)

    def offload(self) -> None:
        if self.is_initialized:
            self._move("cpu")

    def prefetch(self) -> None:
        if self.is_initialized:
            self._move(self.device)

    def reset(self) -> None:
        self._clear()

    @property
    def why_reference(self) -> str | None:
        """Why decode steps do not take the kernel as things are; None if they do."""
        return self.paths.refused or (self.cache.uneven if self.rotary else None)

    @property
    def path(self) -> str:
        """How decode steps of this layer read its packed blocks, and why not otherwise."""
        return self.paths.reading(self.why_reference, self.codecs)

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def stored(self, part: str) -> list[Tensor]:
        if part == "decoded":
            return [] if self.remembered is None else self.remembered[1]
        if part == "packed":
            return [t for packed in self.packed for tensors in packed.values() for t in block_store.tensors_of(tensors)]
        return self.sink + self.window

    def bookkeeping(self) -> list[Tensor]:
        return [t for tracker in self.statistics.values() for t in tracker.state.values()]
