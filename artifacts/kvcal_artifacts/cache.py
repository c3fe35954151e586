"""KVCalCache: a Transformers cache whose tokens are sinks, packed blocks and a recent window.

Prefill attends to the exact keys and values of the current call; what leaves the recent window is packed in the same
update, for later calls. Decode steps read packed blocks by the fused kernel where fused.py says so; else, on the reference
path, blocks are decoded for the attention of the current call and dropped again.
"""

from __future__ import annotations

import copy
import sys
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import replace
from operator import is_not
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from kvcal_kernels.device import on
from kvcal_kernels.layout import BLOCK, Blocks, Rope, rope
from kvcal_kernels.quantise import AnyRule
from kvcal_kernels.reconstruct import Turn

from . import fused, hf, reconstructed, store, vectors
from .call import Call
from .codecs import Codec, Context, Squat
from .codecs.base import Packed, Refusals, check_finite, collecting
from .errors import KVCalError, NonFiniteError, UsageError
from .ledger import CropPlan, Ledger, Plan
from .modes import without_autocast, without_grad
from .scheme import LayerCodecs, Scheme
from .selection import Moves, SelectedLedger, SelectedPlan, allowed, attention_mass
from .statistics import KeyScale, Summed, statistic

PARTS = ("packed", "window", "bookkeeping", "decoded")


# what a layer does not share with its copies
OWN = ("_owner", "site", "title", "_in_place", "codecs", "handle", "_shown", "_layer")


class Watch(Protocol):
    """Is told what a cache packs and reads, for those who measure; `KVCalCache.watch`."""

    def packed(self, layer: int, exact: list[Tensor], decoded: list[Tensor]) -> None:
        """Blocks just packed: keys and values (B, H, T, D) that went in, and what comes back, float32."""

    def read(self, layer: int, blocks: int) -> None:
        """A call's attention gets so many blocks, all rows together."""


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
        self.pending: Tensor | None = None  # keys before RoPE of the current call
        self.pending_queries: Tensor | None = None  # queries before RoPE of it
        self.rotary = cache.rotary if site.rope else 0  # channels that the kernel turns
        self.handle = fused.register(self)
        self.refused = fused.refusal(cache.kernels, cache.scheme, codecs, site, self.rotary)
        self._due: tuple[Plan, list[Tensor]] | None = None  # between update() and its attention by the kernel
        self.readable = self.refused is None  # whether a kernel may read it, wherever it is
        # whether its attention function is ours: a kernel's, or the model's own that gets a token more each step
        plain = cache.kernels != "off" and cache.scheme.selection is None and hf.odd_attention(site) is None
        self.seamed = self.readable or (plain and hf.implementation(site) == "sdpa")
        self.vectors = self.readable and vectors.both(codecs)
        self.most_queries = vectors.most_queries(site.ratio) if self.vectors else fused.QUERIES
        self.least_tokens = vectors.least_tokens(codecs) if self.vectors else 0
        self.expect(cache.kernels, site.placed[1])
        self._clear()

    def expect(self, kernels: str, dtype: torch.dtype) -> None:
        """Until keys come: whether they will take the kernel if they are of that dtype and where the layer's weights are."""
        device = self.site.placed[0]
        if self.readable:
            self.refused = fused.absence(kernels, self.codecs, self.site.ratio, dtype, device, self.rotary)
        self._find_reader(device, dtype)

    def _find_reader(self, device: torch.device, dtype: torch.dtype) -> None:
        """Where no kernel attends to the blocks, one may decode them."""
        scheme, kernels = self._cache.scheme, self._cache.kernels
        self.reader: reconstructed.Reader | None = None
        self.unread = "token selection" if scheme.selection is not None else ""
        if self.refused is not None and not self.unread:
            self.unread = reconstructed.refusal(kernels, self.codecs, dtype, device) or ""
            if not self.unread:
                number = scheme.compressed.index(self.index)  # neighbours in the chain have storage of their own
                self.reader = reconstructed.reader_of(self.codecs, dtype, kernels, number, scheme.reach + 1)

    def _clear(self) -> None:
        self.sink: list[Tensor] = []  # [keys, values], each (B, H, tokens, D) in the model's dtype
        self.window: list[Tensor] = []
        self.packed = [{}, {}]
        self._factor: tuple[list[Tensor], tuple[Tensor | None, Tensor | None]] | None = None
        self.remembered: tuple[list[Packed], list[Tensor]] | None = None  # blocks, and what they decode to
        self.statistics = {name: statistic(name, self.codecs.key.shape) for name in sorted(self.codecs.stats)}
        self.columns, self.is_initialized, self.pending, self.pending_queries = 0, False, None, None
        # columns that no statistic has been shown, the device's own steps: the newest ones, and all
        self.unseen = self.missed = 0
        self._due = None

    @property
    def packed(self) -> list[Packed]:
        """Packed keys and values."""
        return self._packed

    @packed.setter
    def packed(self, value: list[Packed]) -> None:
        self._packed, self._shown = value, None

    _packed: list[Packed]
    _shown: tuple[list[Packed], tuple[Blocks, Blocks]] | None = None  # packed tensors, and how the kernel sees them

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
        self.codecs = self._cache.scheme.on(self.index, self.device, self._ratio)
        self._cache.on_keys_of(self.dtype)
        if self.readable:
            ratio, kernels = self.site.ratio, self._cache.kernels
            self.refused = fused.absence(kernels, self.codecs, ratio, self.dtype, self.device, self.rotary)
        self._find_reader(self.device, self.dtype)
        if self.refused is not None:
            self._cache.on_refused(self)
        self.codecs = fused.packing(self._cache.kernels, self.codecs, self.dtype, self.device)
        self._find_rules()
        self.packed = [codec.empty(key_states.shape[0], key_states.device) for codec in self._pair]
        self.is_initialized = True

    def _find_rules(self) -> None:
        """How a kernel packs whole blocks of a layer whose steps a kernel attends to; else why the codecs do."""
        self._rules = self.refused or "vector codes"
        if self.refused is None and not self.vectors:
            self._rules = fused.block_rules(self._cache.kernels, self.codecs, self.dtype, self.device)

    _rules: tuple[AnyRule, AnyRule] | str = ""

    @property
    def packing(self) -> str:
        """What packs whole blocks, those of prompts above all."""
        own = [role for role, codec in zip(("keys", "values"), self._pair, strict=True) if codec.encodes_by_kernel]
        helped = f"Triton kernels of the codecs of {' and '.join(own)}" if own else ""
        if len(own) == 2:
            return helped
        if isinstance(self._rules, str):
            return f"{helped}, else torch: {self._rules}" if own else f"torch: {self._rules}"
        if not isinstance(self.codecs.key, Squat):
            return "the Triton kernel"  # also where one codec has its own
        return f"{helped or 'corrections of keys by torch'}, else the Triton kernel"

    @property
    def _cache(self) -> KVCalCache:
        """Held weakly: storage is free as soon as the last reference to the cache is gone, without a garbage collection."""
        owner = self._owner()
        if owner is None:
            raise KVCalError(f"layer {self.index}: the cache it belongs to is gone; keep a reference to it")
        return owner

    @property
    def _pair(self) -> tuple[Codec, Codec]:
        return self.codecs.key, self.codecs.value

    @property
    def _rotates(self) -> bool:
        return self._cache.scheme.frame == "pre_rope" and self.site.rope

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys (B, H, Q, D) after RoPE and values of the current call -> all keys and values, in column order."""
        with without_autocast(key_states.device.type), on(key_states.device):  # else packed bytes would depend on both
            return self._update(key_states, value_states)

    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        plan = self._cache.plan_for(self, key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._move(key_states.device)
        stored = [self._frame_keys(key_states), value_states]
        if self._is_for_kernel(plan, key_states, value_states):
            self._due = plan, stored
            hf.turn_of(self.site).leave(self.handle, key_states, value_states)
            return key_states, value_states
        out = self._materialise(plan, key_states, value_states)
        if self.seamed:  # prompts gain by cuDNN, and build a plan once
            hf.hand(self.site, out[0], grown=plan.past > 0 and plan.query == 1)
        self._finish(plan, stored)
        return out

    def _finish(self, plan: Plan, stored: list[Tensor], kept: list[Tensor] | None = None) -> None:
        """kept: windows with the new tokens behind them, where attention has made them."""
        self._store(plan, stored, self._observe(plan, stored[0]), kept)
        self.columns += plan.query
        if self._cache.offloading_layers:
            self.offload()

    def _is_for_kernel(self, plan: Plan, keys: Tensor, values: Tensor) -> bool:
        """Whether the kernel computes this call's attention: a few new tokens, all real, over packed blocks."""
        cache = self._cache
        tokens = self._blocks * cache.scheme.windows.block
        if self.refused is not None or plan.query > self.most_queries or tokens <= self.least_tokens:
            return False
        reasons = {
            "a row's mask says 0 for a new token": not plan.whole,
            "a mask that is not 2-D": cache.has_custom_mask,
            "the mask hides stored tokens": cache.hides_old,
            "output_attentions": cache.gives_weights,
            "the model is in training mode": self.site.module.training,
            "a gradient may be asked for": self.learns(keys, values),
            "positions that do not follow those before": bool(self.rotary and not cache.turns_evenly),
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
        """What the operator of fused.py does: attention of the call that update() was told of, then its tokens are stored."""
        due, self._due = self._due, None
        if due is None:
            raise KVCalError(f"layer {self.index}: attention was called without update(); call reset() and start again")
        (plan, stored), cache = due, self._cache
        with without_autocast(q.device.type):
            each = 1 if self.vectors else fused.kernel_blocks(self.codecs)
            sink, blocks, recent = cache.call.counts(q.device, each)
            kept = [self._with_new(plan, recent, role, new) for role, new in enumerate(stored)]
            exact = (self.sink[0], self.sink[1], sink), (kept[0], kept[1], recent)
            out = self._attention(q.to(self.dtype).contiguous(), blocks, *exact, scaling)
            if cache.watch is not None:
                cache.watch.read(self.index, self._blocks * q.shape[0])
            self._finish(plan, stored, kept)
        return out.to(q.dtype)

    def _attention(self, q: Tensor, blocks: Tensor, sink: fused.Exact, recent: fused.Exact, scaling: float) -> Tensor:
        """blocks (B,) int32: of the kernel; of vector codes of the scheme."""
        cache = self._cache
        kernels, space = cache.kernels, cache.workspace(q.device, self.vectors)
        if self.vectors:
            coded = vectors.coded(self.codecs, self.packed)
            return vectors.attention(kernels, q, coded, blocks, sink, recent, scaling, space)
        (keys, values), turns = self._as_blocks(self.packed), None
        if self.rotary:
            turns = cache.turns(q.device, sink[0].shape[2], keys.words.shape[2], recent[0].shape[2])
        factor = self._key_factor()[1]
        return fused.attention(kernels, q, keys, values, blocks, sink, recent, scaling, factor, space, turns=turns)

    def _as_blocks(self, packed: list[Packed]) -> tuple[Blocks, Blocks]:
        """Keys and values as the kernel takes them; made once for tensors that stay."""
        if self._shown is None or self._shown[0] is not packed:
            keys, values = (codec.as_blocks(held) for codec, held in zip(self._pair, packed, strict=True))
            self._shown = packed, (keys, values)
        return self._shown[1]

    def _key_factor(
        self, keep: bool = True, seen: Mapping[str, tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """What packed keys were divided by, of kv heads, contiguous, and of query heads; kept for statistics that stay, which
        are never changed in place here. seen: statistics of kv heads and of query heads, where they are at hand.
        """
        states = [state for own in self.statistics.values() for state in own.state.values()]
        if self._factor is not None and len(self._factor[0]) == len(states):
            held, both = self._factor
            if not any(map(is_not, states, held)):
                return both
        stats = self._current() if seen is None else {name: of_keys for name, (of_keys, _) in seen.items()}
        own = self.codecs.key.key_factor(Context(self.index, stats=stats))
        heads = self.site.ratio * self.site.kv_heads
        wide = next((of_queries for of_keys, of_queries in (seen or {}).values() if of_keys is own), None)
        if own is not None and wide is None:
            wide = fused.for_queries(own, heads)
        both = (None if own is None else own.contiguous(), wide)
        self._factor = (states, both) if keep else None
        return both

    def _with_new(self, plan: Plan, recent: Tensor, role: int, new: Tensor) -> Tensor:
        """The recent window and the new tokens behind it, row by row; recent: how many each row then has."""
        wide = torch.cat([self.window[role], new.to(self.dtype)], 2)
        if not plan.ragged:
            return wide
        slots = self._cache.call.places(new.device, recent)
        return wide.scatter_(2, slots[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]), new.to(self.dtype))

    def _frame_keys(self, handed: Tensor) -> Tensor:
        """The current call's keys in the frame they are stored in."""
        if self._cache.scheme.frame == "post_rope":
            return handed
        before, self.pending = self.pending, None
        if before is None:
            raise KVCalError(
                f"layer {self.index}: keys before RoPE were not seen; call the model the cache was made for"
            )
        if not self.is_verified:
            self._verify_frame(before, handed)
        return before

    @without_grad
    def _observe(self, plan: Plan, keys: Tensor) -> dict[str, Tensor]:
        """Show the call's queries and keys to the statistics -> those of the blocks that it packs."""
        before, self.pending_queries = self.pending_queries, None
        if not self.statistics:
            return {}
        if self._settled():
            return self._current() if plan.flush else {}
        at, seen = self._cache.call.prefixes(keys.device), {"k": keys}
        self.unseen = 0
        if before is None and any(s.wants != "k" for s in self.statistics.values()):
            raise KVCalError(f"layer {self.index}: queries were not seen; call the model the cache was made for")
        for own in self.statistics.values():
            if own.wants not in seen:
                assert before is not None
                seen[own.wants] = self._turned(before) if own.wants == "q" else before
        found = {name: own.observe(seen[own.wants], at) for name, own in self.statistics.items()}
        for own in self.statistics.values():
            if isinstance(own, Summed):
                own.remember(seen[own.wants], at)
        return {name: value for name, value in found.items() if value is not None}

    def _settled(self) -> bool:
        """Whether no token changes the statistics any more: all rows had blocks, by whose first one keys are divided."""
        cache = self._cache
        plain = self.statistics.keys() <= {KeyScale.name} and cache.scheme.selection is None
        return plain and cache.call.opened

    def _turned(self, queries: Tensor) -> Tensor:
        """The current call's queries after RoPE."""
        return self.site.rotate(queries, *self._cache.rope_now(queries)) if self.site.rope else queries

    is_verified = False

    def _verify_frame(self, before: Tensor, handed: Tensor) -> None:
        """Once: rotating what was captured must give what attention got, or the architecture is not understood."""
        turned, handed = self.site.rotate(before, *self._cache.rope_now(handed)).detach(), handed.detach()
        # the same function of the same cos and sin: not a bit may differ. A NaN is named when it is packed.
        same = (turned == handed) | (turned.isnan() & handed.isnan())
        if not bool(same.all()):
            raise KVCalError(
                f"layer {self.index}: keys captured before RoPE do not give the model's keys when rotated "
                f"(largest difference {float((turned - handed).abs().max()):.2g}); use a bundle with frame post_rope"
            )
        self.is_verified = True

    def _materialise(self, plan: Plan, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        """Everything so far, decoded, then the new tokens as handed over."""
        if plan.past == 0:
            self._cache.leave_old(self.index, None, None)
            return new_keys, new_values
        if self.reader and self._blocks and not self._cache.remember and not self.learns(new_keys, new_values):
            return self._read(self.reader, plan, new_keys, new_values)
        keys, values = self._decode_all()
        whole = [
            self._ordered(plan, torch.cat([self.sink[role], x.to(self.dtype), self.window[role]], 2))
            for role, x in enumerate((keys, values))
        ]
        if self._rotates:
            whole[0] = self.site.rotate(whole[0], *self._cache.rope(slice(0, plan.past), whole[0]))
        return torch.cat([whole[0], new_keys], 2), torch.cat([whole[1], new_values], 2)

    @torch.no_grad()
    def _read(self, reader: reconstructed.Reader, plan: Plan, *new: Tensor) -> tuple[Tensor, Tensor]:
        """What _materialise gives, from shared storage where all rows hold the same columns."""
        context, dense = self._cache.old_context(self.index), not plan.ragged
        context.stats, turns = self._current(), None
        if dense and self._rotates:
            packed = slice(self.sink[0].shape[2], plan.past - self.window[0].shape[2])
            turns = self._cache.turn(self, packed, plan.past, reader)
        placed = dense and (turns is not None or not self._rotates)
        fresh = list(new) if placed else [x[:, :, :0] for x in new]
        exact = self.sink, self.window, fresh
        whole, made = reader(self._cache.rooms(self.device), self.packed, context, exact, turns)
        self._cache.leave_old(self.index, *made)
        if self._cache.watch is not None:
            self._cache.watch.read(self.index, self._blocks * new[0].shape[0])
        if placed:
            return whole[0], whole[1]
        keys, values = (self._ordered(plan, x) for x in whole)
        if self._rotates:
            keys = self.site.rotate(keys, *self._cache.rope(slice(0, plan.past), keys))
        return torch.cat([keys, new[0]], 2), torch.cat([values, new[1]], 2)

    @torch.no_grad()
    def _decode_all(self) -> tuple[Tensor, Tensor]:
        if not self._blocks:
            nothing = self.window[0][:, :, :0].float()
            self._cache.leave_old(self.index, nothing, nothing)
            return nothing, nothing
        context = self._cache.old_context(self.index)
        keys, values = self._remembering(context) if self._cache.remember else self._decoded(self.packed, context)
        self._cache.leave_old(self.index, keys, values)
        if self._cache.watch is not None:
            self._cache.watch.read(self.index, self._blocks * keys.shape[0])
        return keys, values

    def _decoded(self, packed: list[Packed], context: Context) -> tuple[Tensor, Tensor]:
        context.stats = self._current()
        keys = self.codecs.key.decode(packed[0], context)
        context.k0 = keys
        return keys, self.codecs.value.decode(packed[1], context)

    def _current(self) -> dict[str, Tensor]:
        """Run-time statistics that decoding needs."""
        return {name: now for name, own in self.statistics.items() if (now := own.current()) is not None}

    def _remembering(self, context: Context) -> tuple[Tensor, Tensor]:
        """As _decoded of all blocks, but only those are decoded that were packed since the last time."""
        parts: list[Tensor] = []
        if self.remembered is not None and self.remembered[0] is self.packed:
            parts = self.remembered[1]
        old, block = parts[0].shape[2] if parts else 0, self._cache.scheme.windows.block
        if old < self._blocks * block:
            fresh = [{n: store.from_block(t, old // block) for n, t in packed.items()} for packed in self.packed]
            made = self._decoded(fresh, context.part(old, self._blocks * block))
            kept = made if self._cache.scheme.chained else [x.to(self.dtype) for x in made]
            parts = [torch.cat([a, b], 2) for a, b in zip(parts, kept, strict=True)] if parts else list(kept)
            self.remembered = self.packed, parts
        return parts[0], parts[1]

    @property
    def _blocks(self) -> int:
        """Block slots that the fullest row needs."""
        return int(next(iter(self.packed[0].values())).shape[2])

    @staticmethod
    def _ordered(plan: Plan, slots: Tensor) -> Tensor:
        if plan.past_index is None:
            return slots
        if not slots.shape[2]:  # no real token yet, in any row
            slots = slots.new_zeros(*slots.shape[:2], 1, slots.shape[3])
        return _take(slots, plan.past_index)

    @without_grad
    def _store(self, plan: Plan, new: list[Tensor], stats: dict[str, Tensor], kept: list[Tensor] | None = None) -> None:
        """Distribute the new tokens over sink and window, and pack what leaves the window. kept: as of _finish."""
        if not plan.flush and self._cache.call.rolls and (kept is not None or not plan.ragged):  # most steps
            self.window = kept or [torch.cat([held, x], 2) for held, x in zip(self.window, new, strict=True)]
            self._cache.leave_new(self.index, None, None)
            return
        leaving: list[Tensor] = []
        for role in (0, 1):
            fresh = torch.cat([self.sink[role], self.window[role], new[role]], 2)
            if plan.sink_index is None:
                wide = plan.flush * self._cache.scheme.windows.block
                sink, rest = fresh[:, :, : plan.sink], fresh[:, :, plan.sink :]
                leaving.append(rest[:, :, :wide])
                window = rest[:, :, wide:]
            else:
                assert plan.window_index is not None
                sink, window = _take(fresh, plan.sink_index), _take(fresh, plan.window_index)
                if plan.flush:
                    assert plan.flush_index is not None and plan.idle is not None
                    leaving.append(_fill(_take(fresh, plan.flush_index), plan.idle))
            self.sink[role], self.window[role] = _own(sink), _own(window)
        if plan.flush:
            self._pack(plan, leaving, stats, by_kernel=kept is not None)
        else:
            self._cache.leave_new(self.index, None, None)

    def _pack(self, plan: Plan, leaving: list[Tensor], stats: dict[str, Tensor], by_kernel: bool = False) -> None:
        before, remembered = self.packed, self.remembered
        apart = not by_kernel and all(codec.encodes_by_kernel for codec in self._pair)
        made = self._encode(leaving, stats) if apart else self._encode_by(self._rules, leaving, stats)
        self.packed = [
            {name: store.append(old[name], t, plan) for name, t in packed.items()}
            for old, packed in zip(before, made, strict=True)
        ]
        if remembered is not None and remembered[0] is before and plan.rows is None:  # no block has moved
            self.remembered = self.packed, remembered[1]

    def _encode_by(
        self, rules: tuple[AnyRule, AnyRule] | str, leaving: list[Tensor], stats: dict[str, Tensor]
    ) -> list[Packed]:
        """As _encode, of a layer that is neither predicted nor predicts, in one launch where there are rules; in two where
        keys are corrected first.
        """
        if isinstance(rules, str):
            return self._encode(leaving, stats)
        context, block = Context(self.index, stats=stats), self._cache.scheme.windows.block
        keys, values = (x.to(self.dtype) for x in leaving)
        with collecting(self._cache.refusals, self.index):
            keys, factor = self.codecs.key.before_rounding(keys, context), self.codecs.key.key_factor(context)
        blocks, flags = fused.quantise_by(rules, [keys, values], factor)
        self._cache.refusals.note(self.index, ~flags.any(), lambda: NonFiniteError(fused.refused_by(flags, self.index)))
        made = [codec.from_blocks(x, leaving[0].shape[2] // block) for codec, x in zip(self._pair, blocks, strict=True)]
        self._cache.leave_new(self.index, None, None)
        if self._cache.watch is not None:
            self._cache.watch.packed(self.index, leaving, list(self._decoded(made, Context(self.index))))
        return made

    def _encode(self, leaving: list[Tensor], stats: dict[str, Tensor]) -> list[Packed]:
        """Keys and values (B, H, F * b, D) -> their packed blocks; reconstructions are left for the layers above.

        What cannot be packed is told when all layers are done, by `KVCalCache.check_packed`.
        """
        with collecting(self._cache.refusals, self.index):
            return self._encode_both(leaving, stats)

    def _encode_both(self, leaving: list[Tensor], stats: dict[str, Tensor]) -> list[Packed]:
        context, chained = self._cache.new_context(self.index), self._cache.scheme.chained
        context.stats = stats
        blocks: list[Packed] = [{}, {}]
        made: list[Tensor | None] = [None, None]
        for role, (codec, x) in enumerate(zip(self._pair, leaving, strict=True)):
            x = check_finite(x, self.index, codec.role)
            if chained:
                blocks[role], made[role] = codec.encode_decode(x, context)
            else:
                blocks[role] = codec.encode(x, context)
            if role == 0:
                context.k0 = made[0]
        self._cache.leave_new(self.index, *made)
        if self._cache.watch is not None:
            self._cache.watch.packed(self.index, leaving, list(self._decoded(blocks, replace(context))))
        return blocks

    def crop_to(self, plan: CropPlan) -> None:
        """Carry out a crop; with plan.deep the cut block's remaining tokens return to the window, decoded."""
        decoded = self._decode_all() if plan.deep else (None, None)
        for role in (0, 1):
            window = self.window[role]
            if plan.window_index is not None:
                part = decoded[role]
                assert part is not None
                window = _take(torch.cat([part.to(self.dtype), window], 2), plan.window_index.to(window.device))
            self.window[role] = _own(window[:, :, : plan.window])
            self.sink[role] = _own(self.sink[role][:, :, : plan.sink])
        self.packed = [{n: store.first_blocks(t, plan.blocks) for n, t in packed.items()} for packed in self.packed]

    @torch.no_grad()
    def forget(self, count: int, held: Tensor, untouched: Tensor) -> None:
        """After a crop: take the newest `count` columns out of the statistics. held, untouched: of the ledger."""
        if not self.is_initialized:
            return
        unseen = min(count, self.unseen)
        self.unseen -= unseen
        self.missed -= unseen
        for own in self.statistics.values():
            if isinstance(own, Summed):
                own.crop(count - unseen)
            if isinstance(own, KeyScale):
                keys = torch.cat([self.sink[0], self.window[0]], 2)
                own.renew(keys, held.to(keys.device), untouched.to(keys.device))

    @property
    def tail(self) -> int | None:
        """How many of the newest columns the statistics of queries can forget; None without any."""
        tails = [own.tail + self.unseen for own in self.statistics.values() if isinstance(own, Summed)]
        return min(tails, default=None)

    def select_rows(self, rows: Tensor, widths: tuple[int, int, int]) -> None:
        """Keep these batch rows in this order; widths: sink, blocks and window that the fullest of them needs."""
        if self.is_initialized:
            sink, blocks, window = widths
            self.sink = [_cut(t[rows.to(t.device)], sink) for t in self.sink]
            self.window = [_cut(t[rows.to(t.device)], window) for t in self.window]
            self.packed = [
                {name: store.first_blocks(store.select(t, rows), blocks) for name, t in packed.items()}
                for packed in self.packed
            ]
            for own in self.statistics.values():
                own.select(rows)

    def _move(self, device: torch.device | str) -> None:
        if self.window[0].device == torch.device(device):
            return
        self.sink, self.window = ([t.to(device, non_blocking=True) for t in part] for part in (self.sink, self.window))
        self.packed = [{name: store.move(t, device) for name, t in packed.items()} for packed in self.packed]
        for own in self.statistics.values():
            own.move(device)

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
        return self.refused or (self._cache.uneven if self.rotary else None)

    @property
    def path(self) -> str:
        """How decode steps of this layer read its packed blocks, and why not otherwise."""
        told = fused.path(self.why_reference, self._cache.kernels)
        if self.reader is not None:
            kernel = "its reference in torch" if self._cache.kernels == "torch" else "the Triton kernel"
            return f"{told}; reconstructed by {kernel}"
        return f"{told}; decoded by torch, not the reconstruction kernel: {self.unread}" if self.codecs.needs else told

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
            return [t for packed in self.packed for held in packed.values() for t in store.tensors_of(held)]
        return self.sink + self.window

    def bookkeeping(self) -> list[Tensor]:
        return [t for own in self.statistics.values() for t in own.state.values()]


class SelectedLayer(KVCalLayer):
    """A layer of a scheme that selects tokens: all exact ones are in `window`, `sink` stays empty, and nothing is packed
    before the forward's end, when all layers have said which tokens they look at.
    """

    due: dict[str, Tensor]  # run-time statistics of the blocks that this forward may pack, (B, H, 1, ...)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As KVCalLayer.update, in the order of storage: packed, exact, new."""
        plan = self._cache.plan_for(self, key_states)
        assert isinstance(plan, SelectedPlan)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._move(key_states.device)
        stored = [self._frame_keys(key_states), value_states]
        out = self._materialise(plan, key_states, value_states)
        self._weigh(plan, out[0])
        self.due = {name: self._newest(plan, found) for name, found in self._observe(plan, stored[0]).items()}
        self._hold(plan, stored)
        self.columns += plan.query
        if self._cache.offloading_layers:
            self.offload()
        return out

    @torch.no_grad()
    def _weigh(self, plan: SelectedPlan, keys: Tensor) -> None:
        """Add what the call's queries look at. keys (B, H, past + query, D) as attention takes them."""
        before = self.pending_queries
        if before is None:
            raise KVCalError(f"layer {self.index}: queries were not seen; call the model the cache was made for")
        valid, scaling = self._cache.call.prefixes(keys.device).valid, hf.score_scaling(self.site)
        self._cache.add_mass(attention_mass(self._turned(before), keys, plan.alive, valid, scaling))

    @staticmethod
    def _newest(plan: SelectedPlan, found: Tensor) -> Tensor:
        """Of the statistics (B, H, F or 1, ...) of the blocks that the plain scheme would pack now the last one's."""
        last = (plan.flushed - 1).clamp(0, found.shape[2] - 1).to(found.device)
        return found[torch.arange(len(last), device=found.device), :, last][:, :, None]

    @torch.no_grad()
    def _hold(self, plan: SelectedPlan, new: list[Tensor]) -> None:
        at = self._cache.call.prefixes(new[0].device)
        for role in (0, 1):  # what a pad holds never comes near a softmax
            self.window[role] = torch.cat([self.window[role], at.mask(new[role])], 2)

    @torch.no_grad()
    def carry_out(self, moves: Moves) -> None:
        """Pack, evict and close ranks as the ledger chose."""
        self._move(self.device)
        moves = moves.to(self.device)
        sources = [self.window[role] for role in (0, 1)]
        if moves.decodes:
            sources = [torch.cat([x.to(self.dtype), w], 2) for x, w in zip(self._decode_all(), sources, strict=True)]
        start = 0 if moves.decodes else moves.packed
        new: list[Packed | None] = [None, None]
        if moves.pack.shape[1]:
            leaving = [_fill(_take(x, (moves.pack - start).clamp_min(0)), moves.idle) for x in sources]
            new = list(self._encode(leaving, self.due))
        for role in (0, 1):
            self.window[role] = _fill(_take(sources[role], (moves.exact - start).clamp_min(0)), moves.unused)
        self.packed = [
            {n: store.arrange(held, None if made is None else made[n], moves.order) for n, held in packed.items()}
            for packed, made in zip(self.packed, new, strict=True)
        ]
        self.due = {}
        if self._cache.offloading_layers:
            self.offload()


class KVCalCache(Cache):
    """A cache for `model.generate(past_key_values=cache)` that really holds what its scheme says.

    scheme: windows, frame and codecs of each layer. model: the model it will serve; hooks are put on it until close(),
    the end of a `with` block, or the cache's own end of life. strict: a crop that reaches into packed blocks raises
    before anything changes. offload: each layer's storage rests in host memory between its turns. remember: decoded blocks
    are kept beside the packed ones (nbytes("decoded")) in place of decoding them at each call: for evaluation, faster and
    not smaller.

    kernels: "auto": decode steps of 1 to 16 tokens read packed blocks by the fused Triton kernel on a GPU where it passes
    its check; "off": never; "triton": anywhere (on a CPU in Triton's interpreter); "torch": by its reference in torch.
    max_length: columns that a row can have; layers that take the kernel then have all their storage from the first call on,
    and decode steps of up to 16 tokens work under a CUDA graph and generate()'s compiled forward (`is_compileable`).
    require_kernels: raises errors.KernelsUnavailable unless every compressed layer takes the kernel, or another decodes it,
    here as far as it can be known, else when the first keys come.
    """

    layers: list[Any]
    watch: Watch | None = None

    def __init__(
        self,
        scheme: Scheme,
        model: nn.Module,
        *,
        strict: bool = False,
        offload: bool = False,
        remember: bool = False,
        kernels: str = "auto",
        require_kernels: bool = False,
        max_length: int | None = None,
    ) -> None:
        fused.check_choice(kernels)
        check_length(max_length, scheme, offload)
        hf.check_supported(model)
        config = hf.config_of(model)
        if len(scheme.layers) != config.num_hidden_layers:
            raise KVCalError(f"scheme of {len(scheme.layers)} layers, model of {config.num_hidden_layers}")
        scheme.check_chain()
        for index, reason in hf.unsupported_layers(config).items():
            if scheme.layers[index] is not None:
                raise KVCalError(f"layer {index} cannot be compressed: {reason}; leave it out of the scheme")
        self.caveats = hf.caveats(config)
        for caveat in self.caveats:
            warnings.warn(caveat, stacklevel=2)
        if max_length is not None and any(
            pair and isinstance(pair.key, Squat) and pair.stats for pair in scheme.layers
        ):
            self.caveats = [*self.caveats, PROMPTS]
        self.scheme, self.strict, self.offloading_layers, self.remember = scheme, strict, offload, remember
        self.model, self.max_length, self.kernels, self.require_kernels = model, max_length, kernels, require_kernels
        self._sites = hf.attention_sites(model)
        hf.check_frame([self._sites[index] for index in scheme.compressed], scheme.frame)
        self.rotary = hf.rotary_width(model) if scheme.frame == "pre_rope" and kernels != "off" else 0
        plain = DynamicCache(config=config).layers
        kind = KVCalLayer if scheme.selection is None else SelectedLayer
        layers = [
            kind(self, i, pair, self._sites[i]) if pair is not None else plain[i]
            for i, pair in enumerate(scheme.layers)
        ]
        self._growing: str | None = "without max_length, storage grows on the host"
        super().__init__(layers=layers if max_length is None else self._fixed(layers))
        # new tokens of a call that the kernels of all layers take
        self.most_queries = min([fused.QUERIES, *(layer.most_queries for layer in self.own_layers)])
        if require_kernels:
            fused.require([(o.index, o.refused) for o in self.own_layers if o.refused and o.reader is None])
        self.ledger: Any = Ledger(scheme.windows)  # or SelectedLedger, which has the same methods
        if scheme.selection is not None:
            self.ledger = SelectedLedger(scheme.windows, scheme.selection)
            for layer in self.own_layers:
                hf.check_selectable(layer.site)
        self.returned_tokens = 0
        self.unforgotten = {"tokens": 0, "blocks": 0}  # see describe()
        self.decoded: dict[str, int] = {}  # see describe()
        self._mask: Tensor | None = None
        self._custom_mask = False
        self._positions: Tensor | None = None
        self._rope: tuple[Tensor, Tensor] | None = None  # of all columns
        self._rope_now: tuple[Tensor, Tensor] | None = None  # of the current call's, as the model itself made them
        self._call: Call | None = None  # the current forward's, from its first layer on
        self._chain: dict[str, dict[int | None, tuple[Tensor | None, Tensor | None]]] = {"old": {}, "new": {}}
        tapped = [self._sites[layer.index] for layer in self.own_layers] if scheme.frame == "pre_rope" else []
        selected = [layer.site for layer in self.own_layers if scheme.selection is not None]
        asked = [layer.site for layer in self.own_layers if any(s.wants != "k" for s in layer.statistics.values())]
        hf.check_frame([*asked, *selected], "pre_rope")  # queries are rotated as keys are
        self._torn, self._chained = False, scheme.chained
        self._inside: str | None = (
            None  # of a forward that has changed the cache: its "layers", its "head"; None: it returned
        )
        self._broken = False  # a forward that had changed the cache did not return
        self._held: Any = None
        self.refusals = Refusals()
        self._refused: str | None = None  # what was packed last and could not be
        self._on_device: bool | None = None
        self.steps: dict[torch.device, Any] = {}  # fixed.Steps of the layers on a device
        self._masks: dict[torch.device, Tensor | None] = {}
        self._workspaces: dict[tuple[torch.device, bool], Any] = {}
        self._rooms: dict[torch.device, reconstructed.Rooms] = {}
        self._turns: dict[torch.device, tuple[Turn, Turn] | None] = {}
        self._runs: dict[torch.device, tuple[Tensor, int, Rope]] = {}  # of starts and sink tokens
        self._even: bool | None = None  # whether the model's RoPE turns by one angle a position
        own = [layer.site for layer in self.own_layers]
        self._hooks = hf.Hooks(model, self, tapped, selected or asked, selected, own)
        self._seams = hf.Seams(self, [layer.site for layer in self.own_layers if layer.seamed])
        self._opened: tuple[Tensor, bool] | None = None  # of the ledger's blocks
        self.hides_old = False  # whether the current forward's mask hides columns that were real when they came
        self.gives_weights = False  # whether attention weights are asked of the current forward
        self._held_mask: Tensor | None = None  # the ledger's `valid`, on the masks' device

    def _fixed(self, layers: list[Any]) -> list[Any]:
        """With max_length: layers with fixed storage, if the device can do the step of every one; else as they are. Whether
        the kernel runs where the model is and in its dtype is for the first keys to say: those that are refused then grow.
        """
        from . import fixed

        own = [layer for layer in layers if isinstance(layer, KVCalLayer)]
        moves = self.rotary > 0 and hf.rope_moves(hf.config_of(self.model))
        for index, layer in enumerate(layers):
            if not isinstance(layer, KVCalLayer):
                self._growing = f"layer {index} is left to Transformers' own cache, which grows"
            elif why := (None if layer.readable else layer.refused) or fixed.refusal(layer.codecs, moves):
                self._growing = f"layer {index}: {why}"
            else:
                continue
            return layers
        self._growing = None
        return [fixed.FixedLayer(self, layer.index, layer.codecs, layer.site) for layer in own]

    @property
    def why_not_compileable(self) -> str | None:
        """Why decode steps are not left to the device as a whole; None if they are. A guess until keys have come."""
        refused = (f"{layer.title}: {layer.refused}" for layer in self.own_layers if layer.refused)
        return self._growing or next(refused, None) or (self.uneven if self.rotary else None)

    def why_not_compiled(self, query: int) -> str:
        """Why a call of so many tokens cannot run compiled, and what to do."""
        numbers = [said(number) for number in (self.most_queries, query, self.ledger.columns)]
        what = f"behind a prompt, of a cache with max_length, not {numbers[1]} behind {numbers[2]}"
        grows = f" ({self.why_not_compileable})" if self.why_not_compileable else ""
        return (
            f"only steps of up to {numbers[0]} tokens can run compiled, {what}{grows}: run this call with the "
            "uncompiled model, as generate() runs its prompt"
        )

    @property
    def is_compileable(self) -> bool:
        return self.why_not_compileable is None

    def grow(self, why: str) -> None:
        """With max_length: a layer cannot leave its steps to the device where it turned out to be."""
        self._growing = self._growing or why
        self._leave_rooms()

    @property
    def own_layers(self) -> list[KVCalLayer]:
        return [layer for layer in self.layers if isinstance(layer, KVCalLayer)]

    @property
    def opened(self) -> bool:
        """Whether every row has packed blocks, as far as the host knows; what it has not yet heard of are more."""
        blocks: Tensor = self.ledger.blocks  # never changed in place
        if self._opened is None or self._opened[0] is not blocks:
            self._opened = blocks, len(blocks) > 0 and bool((blocks > 0).all())
        return self._opened[1]

    # With max_length.

    def steps_on_device(self, keys: Tensor) -> bool:
        """Whether this forward, of which a layer has keys (B, H, Q, D), is a step that the device does by itself."""
        if self._on_device is None:
            self._on_device = self._can_step(keys)
            if self._on_device and not hf.capturing():
                self._inside = "layers"
        return self._on_device

    def _can_step(self, keys: Tensor) -> bool:
        query, past, own = keys.shape[2], self.ledger.columns, self.own_layers
        if (
            self.watch is not None
            or not self.is_compileable
            or query > self.most_queries
            or not all(layer.ready for layer in own)
        ):
            return False
        if hf.capturing():
            return True
        if not self._hooks.active or len(keys) != self.ledger.batch:
            return False  # what the host says of that
        if any(layer.columns != past for layer in own):
            raise KVCalError("layers hold different numbers of tokens: an earlier forward broke off; call reset()")
        self._check_returned()
        valid = self._new_valid(past, query)
        learns = torch.is_grad_enabled() and any(layer.learns(keys, keys) for layer in own)
        if self._custom_mask or self.hides_old or self.gives_weights or self.model.training or learns:
            return False
        self._check_room(query)
        if valid is not None and not bool(valid.all()):
            return False
        return self.scheme.frame == "post_rope" or self.ledger.follows(self._reported)

    def _check_room(self, query: int) -> None:
        if self.max_length is not None and self.ledger.columns + query > self.max_length:
            raise KVCalError(
                f"{query} tokens behind {self.ledger.columns}: the cache was made for max_length={self.max_length}; make a "
                "larger one"
            )

    def settle(self) -> None:
        """Let the host know of the steps that the device did by itself."""
        if hf.capturing() or torch.compiler.is_compiling():
            return
        self._await_offloading()
        self.check_packed()
        try:
            self._settle()
        except KVCalError:
            self._said = True
            raise

    def _await_offloading(self) -> None:
        """Layers in host memory were copied there without anyone waiting: what runs on the host must not come first."""
        if self.offloading_layers:
            own = [layer for layer in self.own_layers if layer.is_initialized]
            for device in {layer.device for layer in own if layer.device.type == "cuda"}:
                torch.cuda.synchronize(device)

    _said = False  # the caller has been told of what is wrong

    def _settle(self) -> None:
        ready: list[Any] = [layer for layer in self.own_layers if layer.ready]
        if not ready:
            return
        from . import fixed

        length, counts = fixed.read(ready)
        if self.max_length is not None and length > self.max_length:
            raise KVCalError(
                f"compiled or recorded steps went on to {length} tokens: the cache was made for max_length={self.max_length}; "
                "make a larger one"
            )
        if new := length - self.ledger.columns:
            self.ledger.proceed(new)
            if self._held_mask is not None:
                self._held_mask = torch.nn.functional.pad(self._held_mask, (0, new), value=True)
        fixed.compare(counts, self.ledger, fused.kernel_blocks(ready[0].codecs))
        for layer in ready if new else ():
            layer.columns = length
            layer.unseen += new
            layer.missed += new
            layer.overlook(self.held)

    @property
    def held(self) -> Any:
        """fixed.Held of the ledger as it is, for all layers."""
        from . import fixed

        if self._held is None or not self._held.of(self.ledger):
            self._held = fixed.Held(self.ledger)
        return self._held

    def note_decoded(self, layer: KVCalLayer, why: str) -> None:
        """A step of a layer that a kernel reads was not the kernel's. The first such layer speaks for all."""
        if next(one for one in self.own_layers if one.refused is None) is layer:
            self.decoded[why] = self.decoded.get(why, 0) + 1

    def on_keys_of(self, dtype: torch.dtype) -> None:
        """The first keys of a layer come: if they are the cache's first, all layers expect their dtype."""
        if not any(layer.is_initialized for layer in self.own_layers):
            for layer in self.own_layers:
                layer.expect(self.kernels, dtype)

    def on_refused(self, layer: KVCalLayer) -> None:
        """The first keys of a layer show that it does not take the kernel."""
        assert layer.refused is not None
        if layer.reader is None:
            fused.warn_of_shape(self.kernels, layer.codecs, layer.device, layer.refused)
            if self.require_kernels:
                fused.require([(layer.index, layer.refused)])
        self._leave_rooms()

    def _leave_rooms(self) -> None:
        for layer in self.own_layers:
            layer.leave_room()

    def _publish(self) -> None:
        for layer in self.own_layers:
            layer.publish()

    # What the hooks tell.

    def on_forward(self, mask: Tensor | Mapping[str, Tensor | None] | None, weights: bool = False) -> None:
        self._on_device, self.hides_old, self.gives_weights = None, False, weights
        if weights and any(layer.refused is None for layer in self.own_layers):
            fused.warn("output_attentions: the fused kernel gives no attention weights")
        self.settle()
        by_kind = isinstance(mask, Mapping)  # of a vision-language model, which makes its masks outside its decoder
        if isinstance(mask, Mapping):
            mask = mask.get("full_attention")
        wide = mask is not None and mask.ndim == 4 and not hf.capturing()
        if (self.max_length is not None or by_kind) and mask is not None and wide:
            real = hf.real_columns(mask, self.ledger.columns, mask.shape[2])
            mask = mask if real is None else real
        self._mask, self._custom_mask = mask, mask is not None and mask.ndim != 2
        if self._custom_mask and self.scheme.selection is not None:
            assert mask is not None
            raise KVCalError(
                f"attention_mask has {mask.ndim} dimensions: with token selection it must be (batch, tokens), because "
                "evicted tokens are not there to be masked"
            )
        self._masks, self._turns = {}, {}
        if self.rotary and hf.rope_moves(hf.config_of(self.model)):
            self._runs = {}
        for layer in self.own_layers:
            layer.drop_turn()
        self._call = self._rope = self._rope_now = self._positions = None

    def on_rotary(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        self._positions, self._rope_now = positions, (cos, sin)

    def on_keys(self, layer: int, keys: Tensor) -> None:
        own = self.layers[layer]
        assert isinstance(own, KVCalLayer)
        own.pending = keys

    def on_queries(self, layer: int, queries: Tensor) -> None:
        own = self.layers[layer]
        assert isinstance(own, KVCalLayer)
        own.pending_queries = queries

    @torch.no_grad()
    def on_attention(self, layer: int, hidden: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask of what is kept, (B, 1, query, kept + query), in the place of the model's of all columns."""
        own = self.layers[layer]
        assert isinstance(own, KVCalLayer)
        plan = self._plan_of(own, hidden.shape[0], hidden.shape[1], hidden.device)
        assert isinstance(plan, SelectedPlan)
        if plan.first:
            return mask
        if hidden.device not in self._masks:
            hf.check_selectable(own.site)
            seen = allowed(plan.alive, self.call.prefixes(hidden.device).valid, 0, plan.query)
            self._masks[hidden.device] = None if bool(seen.all()) else hf.mask_for(own.site, seen, hidden.dtype)
        return self._masks[hidden.device]

    def on_done(self) -> None:
        plan, self._torn = None if self._call is None else self._call.plan, self.scheme.selection is not None
        if isinstance(plan, SelectedPlan) and plan.flush:
            moves = self.ledger.choose(plan)
            self._chain = {"old": {}, "new": {}}
            for layer in self.own_layers:
                assert isinstance(layer, SelectedLayer)
                layer.carry_out(moves)
        self._torn = False
        self.check_packed()
        self._inside = self._inside and "head"

    def on_returned(self) -> None:
        self._inside = None

    def on_broken(self) -> None:
        self._broken = self._broken or self._inside is not None
        for layer in self.own_layers:
            layer.drop_turn()

    def _check_returned(self) -> None:
        """Raises KVCalError where a forward changed the cache and did not return: all its layers hold tokens of which the
        caller knows nothing.
        """
        if self._broken or self._inside == "layers":
            raise KVCalError(
                "the cache holds tokens of a forward that did not return: an earlier forward broke off; call reset() and "
                "start again"
            )

    def check_use(self) -> None:
        """What the hooks check before a forward, at a step that is compiled, of which they do not hear."""
        if not hf.capturing():
            if (replaced := self._hooks.replaced) is not None:
                raise KVCalError(replaced)
            self._check_returned()

    def check_packed(self) -> None:
        """Raises NonFiniteError where a forward packed what cannot be: at its end, or at the next use if it broke off."""
        try:
            self.refusals.check()
        except NonFiniteError as error:
            self._refused, self._said = str(error), True
            raise

    # What layers ask for.

    def add_mass(self, mass: Tensor) -> None:
        """Attention (B, past + query) that one layer's queries gave to each slot."""
        self.ledger.add(mass)

    @property
    def call(self) -> Call:
        """What the current forward's layers share; once its first one has come."""
        assert self._call is not None
        return self._call

    def plan_for(self, layer: KVCalLayer, keys: Tensor) -> Plan:
        """The current forward's plan, made when its first layer comes, on the device of the keys."""
        return self._plan_of(layer, keys.shape[0], keys.shape[2], keys.device)

    def _plan_of(self, layer: KVCalLayer, batch: int, query: int, device: torch.device) -> Plan:
        if not self._hooks.active:
            if torch.compiler.is_compiling():
                raise KVCalError(f"{layer.title}: {self.why_not_compiled(query)}")
            if not self._hooks.closed and (replaced := self._hooks.replaced) is not None:
                raise KVCalError(replaced)
            state = "was closed" if self._hooks.closed else "belongs to another model or another forward"
            more = "" if self._hooks.closed else f". Or was the forward compiled? Then {self.why_not_compiled(query)}"
            raise KVCalError(f"layer {layer.index}: this cache {state}; make one with load_cache(bundle, model){more}")
        if self._call is None:
            self._check_whole(layer.index, query)
            plan, self._inside = self._begin(batch, query), "layers"
            self._call = Call(plan, self.scheme.windows)
        return self._call.on(device)

    def _check_whole(self, first: int, query: int) -> None:
        """Before a forward changes anything: all layers hold the same tokens, those below `first` also the new ones."""
        if self._refused is not None:
            raise KVCalError(
                f"an earlier forward broke off; call reset() and start again. It ended with: {self._refused}"
            )
        if self._torn:
            raise KVCalError("an earlier forward broke off while it evicted tokens: call reset() and start again")
        for index, layer in enumerate(self.layers):
            wanted = self.ledger.columns + (query if index < first else 0)
            held = layer.columns if isinstance(layer, KVCalLayer) else layer.get_seq_length()
            if isinstance(layer, CacheLayerMixin) and held != wanted:
                raise KVCalError(
                    f"layer {index} holds {held} tokens, the cache {wanted}: "
                    "an earlier forward broke off; call reset() and start again"
                )
        self._check_returned()

    def _begin(self, batch: int, query: int) -> Plan:
        past = self.ledger.columns
        self._check_room(query)
        plan: Plan = self.ledger.begin(batch, query, self._new_valid(past, query))
        if self._mask is None or self._custom_mask or self._held_mask is None:
            self._held_mask = None
        else:
            self._held_mask = torch.cat([self._held_mask, self._mask[:, past : past + query].bool()], 1)
        if isinstance(plan, SelectedPlan) and self._mask is not None:
            plan = self.ledger.hide(plan, self._mask[:, :past].to("cpu").bool())
        if self.scheme.frame == "pre_rope":
            new = self._reported.to(torch.int32).expand(batch, query)
            old = self.ledger.positions
            self.ledger.positions = new.clone() if old is None or past == 0 else torch.cat([old, new], 1)
            if any(layer.readable and (layer.rotary or self.max_length) for layer in self.own_layers):
                self.ledger.follow(plan, new)
                if self.max_length and self.rotary and not self.turns_evenly:
                    self._leave_rooms()
        self._chain = {"old": {}, "new": {}}
        return plan

    @property
    def _reported(self) -> Tensor:
        """Positions int (B or 1, query) of the current forward's columns."""
        if self._positions is None:
            raise KVCalError("the model's rotary module did not report positions; use a bundle with frame post_rope")
        return self._positions

    @property
    def has_custom_mask(self) -> bool:
        """Whether the current forward was given a mask that is not (batch, tokens)."""
        return self._custom_mask

    def workspace(self, device: torch.device, vector: bool = False) -> Any:
        """Memory that the launches of this cache's layers share on a device; vector: of those over vector codes."""
        if (device, vector) not in self._workspaces:
            made = vectors.workspace(self.kernels, device, self.max_length is not None) if vector else None
            self._workspaces[device, vector] = made if vector else fused.workspace(self.kernels, device)
        return self._workspaces[device, vector]

    def rooms(self, device: torch.device) -> reconstructed.Rooms:
        """Storage for the layers on a device that are read one after the other."""
        return self._rooms.setdefault(device, reconstructed.Rooms())

    def turn(
        self, layer: KVCalLayer, packed: slice, past: int, reader: reconstructed.Reader
    ) -> tuple[Turn, Turn] | None:
        """RoPE of the packed columns, and of the others of the first `past`, as the reconstruction kernels take it: once a
        forward; None where the model's is another.
        """
        device = layer.window[0].device
        if device not in self._turns:
            tables = self.rope(slice(0, past), layer.window[0])
            own = Turn(*(t[:, packed] for t in tables))
            others = Turn(*(torch.cat([t[:, : packed.start], t[:, packed.stop :]], 1) for t in tables))
            self._turns[device] = (own, others) if reconstructed.by_halves(layer.site, own.cos.shape[-1]) else None
        turns = self._turns[device]
        return turns if turns is not None and reader.turns(turns[0].cos.shape[-1], device) else None

    @property
    def uneven(self) -> str | None:
        """Why no kernel turns the keys that are held, stored before RoPE; None if it does, as far as is known."""
        if not self.ledger.gapless:
            return fused.GAPS
        return fused.UNEVEN if self._even is False else None

    @property
    def turns_evenly(self) -> bool:
        """Whether tokens of a run differ by `near` alone: once a cache, seen on the model's own cosines and sines."""
        if self._even is None:
            first = torch.arange(0, 2 * BLOCK, device=self.ledger.positions.device)
            cos, sin = self._own_rope(first)
            own = Rope(torch.stack([cos[::BLOCK], sin[::BLOCK]], 1)[None], rope.near(cos[:BLOCK], sin[:BLOCK]))
            wanted = torch.stack([cos, sin], 1)[None]
            self._even = bool(((own.tables(first[None]) - wanted).abs() < 1e-4 * wanted.abs().max()).all())
        return self.uneven is None

    def _own_rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The model's cosines and sines (T, R/2) float32 of positions (T,); it is told how far the sequence has come, too."""
        newest = torch.full_like(positions[:1], self._newest)
        cos, sin = hf.rope_tables(self.model, torch.cat([positions, newest])[None], torch.float32)
        return cos[0, :-1, : self.rotary // 2], sin[0, :-1, : self.rotary // 2]

    @property
    def _newest(self) -> int:
        """The largest position that a token has."""
        starts: Tensor = self.ledger.starts
        return int((starts + self.ledger.seen).max()) - 1

    @torch.no_grad()
    def turns(self, device: torch.device, sink: int, blocks: int, recent: int) -> Rope:
        """RoPE of rows with room for so many sink tokens, kernel blocks and recent tokens; made where these outgrow it."""
        starts = self.ledger.starts
        of, held, own = self._runs.get(device, (None, -1, None))
        if own is None or of is not starts or held != sink or own.first.shape[1] < rope.runs(sink, blocks, recent):
            same = starts[:1] if bool((starts == starts[0]).all()) else starts
            room = blocks if hf.rope_moves(hf.config_of(self.model)) else blocks + blocks // 8 + 8
            first = rope.first_positions(same, sink, room, recent).to(device)
            if room == blocks:  # what lies beyond is no token's, and would say that the sequence is longer
                first = first.clamp_max(self._newest)
            own = self.turns_at(first)
            self._runs[device] = starts, sink, own
        return own

    def turns_at(self, first: Tensor) -> Rope:
        """RoPE of runs at these first positions, (B or 1, runs)."""
        cos, sin = self._own_rope(torch.cat([torch.arange(BLOCK, device=first.device), first.flatten()]))
        far = torch.stack([cos[BLOCK:], sin[BLOCK:]], -2).unflatten(0, first.shape)
        return Rope(far, rope.near(cos[:BLOCK], sin[:BLOCK]))

    def _new_valid(self, past: int, query: int) -> Tensor | None:
        """(B, query) bool on the CPU: which new columns are real tokens; None if all are."""
        if self._mask is None or self._custom_mask:
            return None
        if self._mask.shape[1] < past + query:
            raise KVCalError(
                f"attention_mask has {self._mask.shape[1]} columns, needs {past + query} (cached plus new); "
                "give the mask of the whole sequence"
            )
        new, same = self._mask[:, past : past + query].bool(), self._same_old(past)
        told = torch.cat([new, same.expand(len(new), 1)], 1).to("cpu")  # one wait for the device
        self.hides_old = not bool(told[:, -1].all())
        return told[:, :-1]

    def _same_old(self, past: int) -> Tensor:
        """0-d bool: whether the mask says of the columns held what it said when they came."""
        assert self._mask is not None
        old, held = self._mask[:, :past].bool(), self._held_mask
        if not past or self.scheme.selection is not None or len(old) != self.ledger.batch:
            # With selection the ledger hides what the mask does.
            return torch.ones((), dtype=torch.bool, device=old.device)
        if held is None or held.shape != old.shape or held.device != old.device:
            held = self._held_mask = self.ledger.valid.to(old.device)
        return (old == held).all()

    def rope(self, columns: slice, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin for these columns of every row, in the dtype and on the device of `like`; once a forward."""
        if self._rope is None:
            assert self.ledger.positions is not None
            self._rope = hf.rope_tables(self.model, self.ledger.positions, like.dtype)
        cos, sin = (t[:, columns].to(like.device) for t in self._rope)
        return cos, sin

    def rope_now(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin that the model turned the current call's keys by, on the device of `like`."""
        assert self._rope_now is not None
        cos, sin = (t.to(like.device) for t in self._rope_now)
        return cos, sin

    def old_context(self, layer: int) -> Context:
        return self._context(layer, "old")

    def new_context(self, layer: int) -> Context:
        return self._context(layer, "new")

    def _context(self, layer: int, which: str) -> Context:
        chain = self._chain[which]
        (k1, v1), (k2, v2) = (chain.get(self.scheme.below(layer, back), (None, None)) for back in (1, 2))
        own = self.layers[layer]
        assert isinstance(own, KVCalLayer)
        device = own.device  # a model spread over devices hands reconstructions on from one to the next
        parts: dict[str, Any] = {
            name: x.to(device) for name, x in (("k1", k1), ("v1", v1), ("k2", k2), ("v2", v2)) if x is not None
        }
        return Context(layer, **parts)

    def leave_old(self, layer: int, keys: Tensor | None, values: Tensor | None) -> None:
        self._leave("old", layer, keys, values)

    def leave_new(self, layer: int, keys: Tensor | None, values: Tensor | None) -> None:
        self._leave("new", layer, keys, values)

    def _leave(self, which: str, layer: int, keys: Tensor | None, values: Tensor | None) -> None:
        """Reconstructions for the layers above; those that no layer will read again are dropped."""
        if self._chained:
            chain = self._chain[which]
            chain[layer] = (keys, values)
            chain.pop(self.scheme.below(layer, self.scheme.reach), None)
            if layer == self.scheme.compressed[-1]:
                chain.clear()

    # What Transformers asks for.

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest -tokens_to_remove columns: exact inside the recent window, to the block edge below it."""
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding of Transformers 5.17 counts in tensors
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass a negative number, the tokens to remove from the end; to be left with "
                f"{tokens_to_remove} tokens: crop({tokens_to_remove} - get_seq_length())"
            )
        self.settle()
        self._check_returned()
        count = min(-tokens_to_remove, self.ledger.columns)
        plan = self.ledger.crop(count)
        if plan.deep and self.strict:
            raise KVCalError(
                f"crop of {count} tokens reaches into packed blocks (recent window "
                f"{int(self.ledger.window.min())}); strict caches refuse: use a larger recent window or strict=False"
            )
        for layer in self.layers:  # first, as a sliding layer may refuse
            if not isinstance(layer, KVCalLayer):
                layer.crop(tokens_to_remove)
        if count:
            self._crop(count, plan)

    def _crop(self, count: int, plan: CropPlan) -> None:
        self._chain = {"old": {}, "new": {}}
        for layer in self.own_layers:
            if layer.is_initialized:
                layer.crop_to(plan)
            layer.columns -= count
        columns, tails = self.ledger.columns, [layer.tail for layer in self.own_layers if layer.tail is not None]
        old = self.ledger.real(columns - count, columns - min(tails)) if tails and count > min(tails) else 0
        self.ledger.commit_crop(count)
        if not self.ledger.columns:  # what comes next may have other rows
            for layer in self.own_layers:
                layer.reset()
        elif any(layer.statistics for layer in self.own_layers):
            held, untouched = self.ledger.held, self.ledger.untouched
            for layer in self.own_layers:
                layer.forget(count, held, untouched)
            self.unforgotten["tokens"] += old
            self.unforgotten["blocks"] += self.ledger.early
        self.returned_tokens += plan.returned
        self._rope = self._call = self._held_mask = None
        self._publish()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx, lambda layer: layer.reorder_cache(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices, lambda layer: layer.batch_select_indices(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.settle()
        self._check_returned()
        rows = torch.arange(self.ledger.batch).repeat_interleave(repeats)
        self._select(rows, lambda layer: layer.batch_repeat_interleave(repeats))

    def _select(self, rows: Tensor, plain: Any) -> None:
        self.settle()
        self._check_returned()
        if self.ledger.columns:
            self.ledger.select(rows)
        for layer in self.layers:
            if isinstance(layer, KVCalLayer):
                layer.select_rows(rows, self.ledger.widths)
            else:
                plain(layer)
        self._rope = self._call = self._held_mask = None
        self._publish()

    def reset(self) -> None:
        super().reset()
        self.ledger.clear()
        self.returned_tokens, self._torn, self._said = 0, False, False
        self._inside, self._broken = None, False
        self._hooks.forget()
        self.refusals, self._refused = Refusals(), None
        self.unforgotten, self.decoded = {"tokens": 0, "blocks": 0}, {}
        self._rope = self._call = self._mask = self._held_mask = None
        self._chain = {"old": {}, "new": {}}

    def close(self) -> None:
        """Remove every hook from the model. The cache cannot be used afterwards. Raises KVCalError where steps since the last
        call lost something (a NaN, a block beyond max_length), unless an error has said so or is under way.
        """
        was = self._hooks.closed
        self._hooks.close()
        self._seams.close()
        if not was and not self._said and sys.exc_info()[0] is None and not hf.capturing():
            self._last_words()

    def _last_words(self) -> None:
        self.check_packed()
        for device in self.steps:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a step that still runs may yet say so
        for layer in self.own_layers:
            layer.heed()

    def __enter__(self) -> KVCalCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCalCache:
        """An independent cache on the same model with the same contents, for reusing a prompt."""
        self.settle()
        kind: dict[str, Any] = {"strict": self.strict, "offload": self.offloading_layers, "remember": self.remember}
        kind |= {"kernels": self.kernels, "max_length": self.max_length, "require_kernels": self.require_kernels}
        twin = KVCalCache(self.scheme, self.model, **kind)
        twin.ledger = copy.deepcopy(self.ledger, memo)
        twin.returned_tokens, twin._torn, twin._refused = self.returned_tokens, self._torn, self._refused
        twin._broken = self._broken or self._inside == "layers"
        twin.decoded = dict(self.decoded)
        twin.unforgotten, twin.steps = dict(self.unforgotten), copy.deepcopy(self.steps, memo)
        twin._growing = self._growing
        for i, (mine, other) in enumerate(zip(self.layers, twin.layers, strict=True)):
            if isinstance(mine, KVCalLayer) and isinstance(other, KVCalLayer):
                held = {k: v for k, v in vars(mine).items() if k not in OWN}
                other.__dict__.update(copy.deepcopy(held, memo))
                other.codecs = mine.codecs
            else:
                twin.layers[i] = copy.deepcopy(mine, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises KVCalError: a cache is hooks in one model, and a shallow copy would share its layers."""
        raise KVCalError(
            "a KVCalCache cannot be pickled nor copied by copy.copy: it belongs to the model in this process; save the bundle "
            "and run the prompt again, or take copy.deepcopy(cache) for a second one on the same model"
        )

    # What people ask for.

    def nbytes(self, part: str | None = None) -> int:
        """Bytes of real storage: "packed" (codes, scales, zeros, norms), "window" (sinks and recent tokens, and layers
        left uncompressed), "bookkeeping", "decoded" (only with remember); None for their sum. Predictors and grids:
        resident_bytes().
        """
        if part is None:
            return sum(self.nbytes(name) for name in PARTS)
        if part not in PARTS:
            raise KVCalError(f"nbytes({part!r}): allowed are {', '.join(PARTS)}")
        if part == "bookkeeping":
            own = [t for layer in self.own_layers for t in layer.bookkeeping()]
            shared: int = self.ledger.nbytes
            return shared + sum(t.numel() * t.element_size() for t in own)
        tensors = [t for layer in self.own_layers for t in layer.stored(part)]
        if part == "window":
            plain = [layer for layer in self.layers if not isinstance(layer, KVCalLayer)]
            tensors += [t for layer in plain for t in (layer.keys, layer.values) if t is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def packed_values(self) -> int:
        """How many numbers the packed blocks stand for; those of evicted tokens do not count."""
        pairs = [pair for pair in self.scheme.layers if pair is not None]
        self.settle()
        numbers = sum(pair.key.shape.values + pair.value.shape.values for pair in pairs)
        if self.scheme.selection is None:
            blocks: int = self.ledger.blocks.sum().item()
            return blocks * numbers
        tokens: int = self.ledger.packed_tokens
        return tokens * numbers // self.scheme.windows.block

    def bits_per_value(self) -> float:
        """Stored bits of the packed blocks over the values they stand for; nan while nothing is packed."""
        values = self.packed_values()
        return self.nbytes("packed") * 8 / values if values else float("nan")

    def paper_bits(self) -> float:
        """As the methods' own papers count bits a value; of the packed blocks where their sizes differ."""
        if not self.scheme.ragged:
            return self.scheme.paper_bits()
        self.settle()
        return self.scheme.paper_bits_of({layer.index: layer.packed for layer in self.own_layers})

    def resident_bytes(self) -> int:
        """Bytes of predictors, grids and signs that serve the cache, whatever its length."""
        return self.scheme.resident_bytes()

    def describe(self) -> dict[str, Any]:
        """What every layer does, by which path and why; and what happened so far.

        returned_by_crop: tokens that came back from packed blocks, decoded. unforgotten_by_statistics: what crops removed but
        run-time statistics still show: `tokens` further back than they can forget, and `blocks` packed when the removed tokens
        were there. All zero: the cache is, to the byte, one that never had the removed tokens. decoded_steps: how many steps a
        kernel that reads packed blocks had to leave to the model's own attention, by the reason.
        """
        self.settle()
        rows = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, KVCalLayer):
                key, value = layer.codecs.key.describe(), layer.codecs.value.describe()
                row = {"layer": index, "state": "applied", "key": key, "value": value, "path": layer.path}
                rows.append(row | ({"packing": layer.packing} if layer.is_initialized else {}))
            else:
                rows.append({"layer": index, "state": "skipped", "why": self.scheme.skipped[index]})
        return {
            "windows": vars(self.scheme.windows),
            "frame": self.scheme.frame,
            "coverage": self.scheme.coverage,
            "tokens": self.ledger.columns,
            "selection": None if self.scheme.selection is None else self.ledger.describe(),
            "packed_blocks": self.ledger.blocks.tolist(),
            "caveats": self.caveats,
            "returned_by_crop": self.returned_tokens,
            "unforgotten_by_statistics": dict(self.unforgotten),
            "mask": "custom (not 2-D): every token counts as real" if self._custom_mask else "2-D or none",
            "decoded_steps": dict(self.decoded),
            "path": fused.summary([layer.why_reference for layer in self.own_layers], self.kernels),
            "max_length": self.max_length,
            "compileable": self.why_not_compileable or True,
            "nbytes": {name: self.nbytes(name) for name in PARTS},
            "shared_bytes": sum(rooms.nbytes for rooms in self._rooms.values()),
            "bits_per_value": self.bits_per_value(),
            "resident_bytes": self.resident_bytes(),
            "layers": rows,
        }

    def __repr__(self) -> str:
        return (
            f"KVCalCache({self.ledger.columns} tokens, {len(self.own_layers)} of {len(self.layers)} layers compressed)"
        )


PROMPTS = (
    "max_length: SQuat corrects keys by a subspace of the row's prompt, which steps on the device leave as it is; a prompt of "
    "few tokens gives another one than a cache that grows comes to"
)
MOST_COLUMNS = 2**31 - 1  # kernels count tokens in 32 bits


def check_length(max_length: int | None, scheme: Scheme, offload: bool) -> None:
    if max_length is None:
        return
    least = scheme.windows.sink + scheme.windows.recent + scheme.windows.block
    if type(max_length) is not int or not least <= max_length <= MOST_COLUMNS:
        raise UsageError(
            f"max_length={max_length!r}: must be a whole number from {least}, sink, recent window and a block, "
            f"to {MOST_COLUMNS}"
        )
    if offload:
        raise UsageError("max_length with offload=True: storage that moves has no fixed place; give one of them")


def said(number: int) -> str:
    """A whole number of at least 0 in decimals. In a forward that is traced it may be a symbol, which dynamo does not put into
    strings (torch 2.13): compared with what it may be, it is a number again.
    """
    if not torch.compiler.is_compiling():
        return str(number)
    digits = ""
    while number or not digits:
        digits = next(digit for digit in DIGITS if DIGITS[digit] == number % 10) + digits
        number = number // 10
    return digits


DIGITS = {str(digit): digit for digit in range(10)}


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x (B, H, S, D), index (B, T) -> (B, H, T, D)."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _fill(x: Tensor, idle: Tensor) -> Tensor:
    """Zeros where idle (B, T) says that a slot of x (B, H, T, D) holds nothing."""
    return x.masked_fill(idle[:, None, :, None], 0)


def _cut(x: Tensor, width: int) -> Tensor:
    """The first `width` slots."""
    return x if x.shape[2] == width else _own(x[:, :, :width])


def _own(x: Tensor) -> Tensor:
    """A copy with storage of its own size: a slice would keep the whole prefill alive and make nbytes() lie."""
    return x.clone(memory_format=torch.contiguous_format)
