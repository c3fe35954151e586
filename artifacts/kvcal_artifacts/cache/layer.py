"""One layer of a cache: sink, packed blocks and recent window, and how attention reads them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from operator import is_not
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcal_kernels.device import on
from kvcal_kernels.layout import Blocks
from kvcal_kernels.quantise import AnyRule
from kvcal_kernels.reconstruct import Turn

from .. import hf
from ..codecs import Codec, Context
from ..codecs.base import Packed, check_finite, collecting
from ..errors import KVCalError, NonFiniteError
from ..modes import without_autocast, without_grad
from ..paths import choose, codebook, dequantised, fused, operator
from ..scheme import LayerCodecs
from ..storage import block_store
from ..storage.ledger import CropPlan, Plan
from .slots import fill_slots, first_slots, own_storage, take_slots
from .statistics import KeyScale, Summed, statistic

if TYPE_CHECKING:
    from .cache import KVCalCache


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
        self.rotary = cache.stored_rope.rotary if site.rope else 0  # channels that the kernel turns
        self.handle = operator.register(self)
        self._due: tuple[Plan, list[Tensor]] | None = None  # between update() and its attention by the kernel
        self.paths = choose.LayerPaths.of(cache.kernels, cache.scheme, codecs, site, self.rotary)
        self.expect(site.placed[1])
        self._clear()

    def expect(self, dtype: torch.dtype) -> None:
        """Until keys come: the paths that they will take if they are of that dtype and where the layer's weights are."""
        self._choose(dtype, self.site.placed[0])

    def _choose(self, dtype: torch.dtype, device: torch.device) -> None:
        scheme = self._cache.scheme
        self.paths = self.paths.on(scheme, self.index, self.codecs, self.site, dtype, device, self.rotary)

    def _clear(self) -> None:
        self.sink: list[Tensor] = []  # [keys, values], each (B, H, tokens, D) in the model's dtype
        self.window: list[Tensor] = []
        self.packed = [{}, {}]
        self._factor: tuple[list[Tensor], tuple[Tensor | None, Tensor | None]] | None = None
        self.remembered: tuple[list[Packed], list[Tensor]] | None = None  # blocks, and what they decode to
        self.statistics = {name: statistic(name, self.codecs.key.shape) for name in sorted(self.codecs.stats)}
        self.columns, self.is_initialized = 0, False
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
        self._choose(self.dtype, self.device)
        if self.paths.refused is not None:
            self._cache.on_refused(self)
        self.codecs = choose.packing(self._cache.kernels, self.codecs, self.dtype, self.device)
        self.paths = self.paths.packing(self.codecs, self.dtype, self.device, self.is_compileable)
        self.packed = [codec.empty(key_states.shape[0], key_states.device) for codec in self._pair]
        self.is_initialized = True

    @property
    def packing(self) -> str:
        """What packs whole blocks, those of prompts above all."""
        own = [role for role, codec in zip(("keys", "values"), self._pair, strict=True) if codec.encodes_by_kernel]
        helped = f"Triton kernels of the codecs of {' and '.join(own)}" if own else ""
        if len(own) == 2:
            return helped
        if isinstance(packs := self.paths.packs, str):
            return f"{helped}, else torch: {packs}" if own else f"torch: {packs}"
        if not self.codecs.key.corrected_channels:
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
        if self.paths.seamed:  # prompts gain by cuDNN, and build a plan once
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
        cache, forward = self._cache, self._cache.forward
        tokens = self._blocks * cache.scheme.windows.block
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
        """The operator of paths/operator.py: attention of the call that update() was told of; then its tokens are stored."""
        due, self._due = self._due, None
        if due is None:
            raise KVCalError(f"layer {self.index}: attention was called without update(); call reset() and start again")
        (plan, stored), cache = due, self._cache
        with without_autocast(q.device.type):
            each = 1 if self.paths.vector else fused.kernel_blocks(self.codecs)
            sink, blocks, recent = cache.forward.counts(q.device, each)
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
        slots = self._cache.forward.places(new.device, recent)
        return wide.scatter_(2, slots[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]), new.to(self.dtype))

    def _frame_keys(self, handed: Tensor) -> Tensor:
        """The current call's keys in the frame they are stored in."""
        if self._cache.scheme.frame == "post_rope":
            return handed
        before = self._cache.forward.keys_before.pop(self.index, None)
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
        before = self._cache.forward.queries_before.pop(self.index, None)
        if not self.statistics:
            return {}
        if self._settled():
            return self._current() if plan.flush else {}
        at, seen = self._cache.forward.prefixes(keys.device), {"k": keys}
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
        return plain and cache.forward.opened

    def _turned(self, queries: Tensor) -> Tensor:
        """The current call's queries after RoPE."""
        return self.site.rotate(queries, *self._cache.forward.rotation(queries)) if self.site.rope else queries

    is_verified = False

    def _verify_frame(self, before: Tensor, handed: Tensor) -> None:
        """Once: rotating what was captured must give what attention got, or the architecture is not understood."""
        turned, handed = self.site.rotate(before, *self._cache.forward.rotation(handed)).detach(), handed.detach()
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
            self._cache.forward.chain.leave("old", self.index, None, None)
            return new_keys, new_values
        if self.paths.reader and self._blocks and not self._cache.remember and not self.learns(new_keys, new_values):
            return self._read(self.paths.reader, plan, new_keys, new_values)
        keys, values = self._decode_all()
        whole = [
            self._ordered(plan, torch.cat([self.sink[role], x.to(self.dtype), self.window[role]], 2))
            for role, x in enumerate((keys, values))
        ]
        if self._rotates:
            whole[0] = self.site.rotate(whole[0], *self._rope(plan.past, whole[0]))
        return torch.cat([whole[0], new_keys], 2), torch.cat([whole[1], new_values], 2)

    @torch.no_grad()
    def _read(self, reader: dequantised.Reader, plan: Plan, *new: Tensor) -> tuple[Tensor, Tensor]:
        """What _materialise gives, from shared storage where all rows hold the same columns."""
        context, dense = self._cache.forward.chain.context("old", self.index, self.device), not plan.ragged
        context.stats, turns = self._current(), None
        if dense and self._rotates:
            packed = slice(self.sink[0].shape[2], plan.past - self.window[0].shape[2])
            turns = self._turns(packed, plan.past, reader)
        placed = dense and (turns is not None or not self._rotates)
        fresh = list(new) if placed else [x[:, :, :0] for x in new]
        exact = self.sink, self.window, fresh
        whole, made = reader(self._cache.rooms(self.device), self.packed, context, exact, turns)
        self._cache.forward.chain.leave("old", self.index, *made)
        if self._cache.watch is not None:
            self._cache.watch.read(self.index, self._blocks * new[0].shape[0])
        if placed:
            return whole[0], whole[1]
        keys, values = (self._ordered(plan, x) for x in whole)
        if self._rotates:
            keys = self.site.rotate(keys, *self._rope(plan.past, keys))
        return torch.cat([keys, new[0]], 2), torch.cat([values, new[1]], 2)

    def _rope(self, past: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The cos and sin of the first `past` columns."""
        positions = self._cache.ledger.positions
        return self._cache.forward.tables(positions, slice(0, past), like)

    def _turns(self, packed: slice, past: int, reader: dequantised.Reader) -> tuple[Turn, Turn] | None:
        """RoPE of the packed columns and of the others, where the reader rotates keys as it writes them."""
        positions = self._cache.ledger.positions
        turns = self._cache.forward.turns(positions, self.site, packed, past, self.window[0])
        return turns if turns is not None and reader.turns(turns[0].cos.shape[-1], self.window[0].device) else None

    @torch.no_grad()
    def _decode_all(self) -> tuple[Tensor, Tensor]:
        if not self._blocks:
            nothing = self.window[0][:, :, :0].float()
            self._cache.forward.chain.leave("old", self.index, nothing, nothing)
            return nothing, nothing
        context = self._cache.forward.chain.context("old", self.index, self.device)
        keys, values = self._remembering(context) if self._cache.remember else self._decoded(self.packed, context)
        self._cache.forward.chain.leave("old", self.index, keys, values)
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
            fresh = [{n: block_store.from_block(t, old // block) for n, t in packed.items()} for packed in self.packed]
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
        return take_slots(slots, plan.past_index)

    @without_grad
    def _store(self, plan: Plan, new: list[Tensor], stats: dict[str, Tensor], kept: list[Tensor] | None = None) -> None:
        """Distribute the new tokens over sink and window, and pack what leaves the window. kept: as of _finish."""
        if not plan.flush and self._cache.forward.rolls and (kept is not None or not plan.ragged):  # most steps
            self.window = kept or [torch.cat([held, x], 2) for held, x in zip(self.window, new, strict=True)]
            self._cache.forward.chain.leave("new", self.index, None, None)
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
                sink, window = take_slots(fresh, plan.sink_index), take_slots(fresh, plan.window_index)
                if plan.flush:
                    assert plan.flush_index is not None and plan.idle is not None
                    leaving.append(fill_slots(take_slots(fresh, plan.flush_index), plan.idle))
            self.sink[role], self.window[role] = own_storage(sink), own_storage(window)
        if plan.flush:
            self._pack(plan, leaving, stats, by_kernel=kept is not None)
        else:
            self._cache.forward.chain.leave("new", self.index, None, None)

    def _pack(self, plan: Plan, leaving: list[Tensor], stats: dict[str, Tensor], by_kernel: bool = False) -> None:
        before, remembered = self.packed, self.remembered
        apart = not by_kernel and all(codec.encodes_by_kernel for codec in self._pair)
        made = self._encode(leaving, stats) if apart else self._encode_by(self.paths.packs, leaving, stats)
        self.packed = [
            {name: block_store.append(old[name], t, plan) for name, t in packed.items()}
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
        with collecting(self._cache.record.refusals, self.index):
            keys, factor = self.codecs.key.before_rounding(keys, context), self.codecs.key.key_factor(context)
        blocks, flags = fused.quantise_by(rules, [keys, values], factor)
        self._cache.record.refusals.note(
            self.index, ~flags.any(), lambda: NonFiniteError(fused.refused_by(flags, self.index))
        )
        made = [codec.from_blocks(x, leaving[0].shape[2] // block) for codec, x in zip(self._pair, blocks, strict=True)]
        self._cache.forward.chain.leave("new", self.index, None, None)
        if self._cache.watch is not None:
            self._cache.watch.packed(self.index, leaving, list(self._decoded(made, Context(self.index))))
        return made

    def _encode(self, leaving: list[Tensor], stats: dict[str, Tensor]) -> list[Packed]:
        """Keys and values (B, H, F * b, D) -> their packed blocks; reconstructions are left for the layers above.

        What cannot be packed is told when all layers are done, by `KVCalCache.check_packed`.
        """
        with collecting(self._cache.record.refusals, self.index):
            return self._encode_both(leaving, stats)

    def _encode_both(self, leaving: list[Tensor], stats: dict[str, Tensor]) -> list[Packed]:
        context, chained = self._cache.forward.chain.context("new", self.index, self.device), self._cache.scheme.chained
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
        self._cache.forward.chain.leave("new", self.index, *made)
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
                window = take_slots(torch.cat([part.to(self.dtype), window], 2), plan.window_index.to(window.device))
            self.window[role] = own_storage(window[:, :, : plan.window])
            self.sink[role] = own_storage(self.sink[role][:, :, : plan.sink])
        self.packed = [
            {n: block_store.first_blocks(t, plan.blocks) for n, t in packed.items()} for packed in self.packed
        ]

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
            self.sink = [first_slots(t[rows.to(t.device)], sink) for t in self.sink]
            self.window = [first_slots(t[rows.to(t.device)], window) for t in self.window]
            self.packed = [
                {name: block_store.first_blocks(block_store.select(t, rows), blocks) for name, t in packed.items()}
                for packed in self.packed
            ]
            for own in self.statistics.values():
                own.select(rows)

    def _move(self, device: torch.device | str) -> None:
        if self.window[0].device == torch.device(device):
            return
        self.sink, self.window = ([t.to(device, non_blocking=True) for t in part] for part in (self.sink, self.window))
        self.packed = [{name: block_store.move(t, device) for name, t in packed.items()} for packed in self.packed]
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
        return self.paths.refused or (self._cache.uneven if self.rotary else None)

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
            return [t for packed in self.packed for held in packed.values() for t in block_store.tensors_of(held)]
        return self.sink + self.window

    def bookkeeping(self) -> list[Tensor]:
        return [t for own in self.statistics.values() for t in own.state.values()]
