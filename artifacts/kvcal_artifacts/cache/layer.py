"""One layer of a cache: sink, packed blocks and recent window, and how attention reads them."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from operator import is_not

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcal_kernels.device import on

from .. import hf, operator
from ..codecs import Codec, Context
from ..codecs.base import Packed
from ..errors import KVCalError
from ..modes import without_autocast
from ..paths import choose
from ..scheme import LayerCodecs
from ..storage import block_store
from ..storage.host_storage import HostStorage
from ..storage.plan import Plan
from ..storage.slots import first_slots
from . import observing, reading
from .attending import AttendingLayer
from .former_names import OF_LAYERS, also_named
from .key_factor import KeyFactor
from .protocols import CacheProtocol, LayerStorage
from .statistics import statistic


class KVCalLayer(AttendingLayer, CacheLayerMixin):
    """One layer's storage. Keys are stored in the scheme's frame; the bookkeeping is that of the layer's cache."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False
    dtype: torch.dtype
    device: torch.device

    def __init__(
        self,
        cache: CacheProtocol,
        index: int,
        codecs: LayerCodecs,
        site: hf.AttentionSite,
        storage: LayerStorage | None = None,
    ) -> None:
        super().__init__()
        self._owner, self.index, self.site = weakref.ref(cache), index, site
        self.title = f"layer {index}"  # in errors of forwards that are traced, which know integers only as symbols
        # no kernel reads blocks of odd attention, in whatever order
        self._ratio = 1 if hf.odd_attention(site) else site.ratio
        self.codecs = codecs = codecs.read_by(self._ratio)
        self.columns = 0
        self.rotary = cache.stored_rope.rotary if site.rope else 0  # channels that the kernel rotates
        self.handle = operator.register(self)
        self.storage = storage or HostStorage()
        self.key_factor = KeyFactor()
        self.expect(site.placed[1])
        self._clear()

    def expect(self, dtype: torch.dtype, device: torch.device | None = None) -> None:
        """Choose the layer's paths. device: of its first keys; None before they come, for that of its weights."""
        cache, static = self.cache, None if device is None else self.is_compileable
        layer = self.index, self.codecs, self.site, self.rotary
        self.paths = choose.layer_paths(
            cache.kernels, cache.scheme, *layer, dtype, device or self.site.placed[0], static
        )

    def _clear(self) -> None:
        self.storage.clear()
        self.sink, self.window, self.packed = [], [], [{}, {}]
        self.key_factor.forget()
        self.remembered: tuple[list[Packed], list[Tensor]] | None = None  # blocks, and what they decode to
        self.statistics = {name: statistic(name, self.codecs.key.shape) for name in sorted(self.codecs.stats)}
        self.columns, self.is_initialized = 0, False
        # columns that no statistic counts, those of steps on the device: the newest ones, and all
        self.unseen = self.missed = 0
        self._current: tuple[list[Tensor], dict[str, Tensor]] = [], {}  # states of statistics, and what they give
        self.decoding: Hashable = None  # of `codecs`, where blocks of layers may be decoded together
        self._due = None

    @property
    def sink(self) -> list[Tensor]:
        """Keys and values of the first tokens, each (B, H, tokens, D) in the model's dtype."""
        return self.storage.sink

    @sink.setter
    def sink(self, value: list[Tensor]) -> None:
        self.storage.sink = value

    @property
    def window(self) -> list[Tensor]:
        """Keys and values of the newest tokens, like `sink`."""
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
        self.expect(self.dtype, self.device)
        self.codecs = self.paths.codecs
        if self.paths.refused is not None:
            self.cache.on_refused(self)
        self.decoding = self.codecs.decoding if self.cache.remember and self.cache.max_length is None else None
        self.packed = [codec.empty(key_states.shape[0], key_states.device) for codec in self.pair]
        self.is_initialized = True

    @property
    def packing(self) -> str:
        """The kernels, or torch, that pack whole blocks, those of prompts above all."""
        return self.paths.packing.describe(self.codecs)

    @property
    def cache(self) -> CacheProtocol:
        """The cache. A layer refers to it weakly, so that storage is freed with the last other reference to it."""
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

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """All keys and values in column order, from keys (B, H, Q, D) after RoPE and values of the current call."""
        with without_autocast(key_states.device.type), on(key_states.device):  # else packed bytes would depend on both
            return self._update(key_states, value_states)

    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        cache = self.cache
        key_states, value_states = self.site.gather(key_states), self.site.gather(value_states)
        plan = cache.plan_for(self, key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._move(key_states.device)
        stored = [observing.frame_keys(self, key_states), value_states]
        if self._is_for_kernel(cache, plan, key_states, value_states):
            self._due = plan, stored
            hf.hand_off_of(self.site).leave(self.handle, key_states, value_states)
            return key_states, value_states
        keys, values = reading.materialise(self, plan, key_states, value_states)
        out = self.site.local(keys), self.site.local(values)
        if self.paths.replaces_attention:  # cuDNN serves prompts better, and builds a plan once
            hf.note_keys(self.site, out[0], grown=plan.past > 0 and plan.query == 1)
        self.finish(plan, stored)
        return out

    def _is_for_kernel(self, cache: CacheProtocol, plan: Plan, keys: Tensor, values: Tensor) -> bool:
        """Whether the kernel computes this call's attention: a few new tokens, all real, over packed blocks."""
        tokens = self.block_slots * cache.scheme.windows.block
        if self.paths.refused is not None:
            return False
        if plan.query > self.paths.most_queries or tokens <= self.paths.least_tokens:
            return False
        why = self._why_not_kernel(cache, plan, keys, values)
        if why is not None:
            cache.note_decoded(self, why)
        return why is None and not (self.is_compileable and cache.is_compileable)  # else update() has asked

    def _why_not_kernel(self, cache: CacheProtocol, plan: Plan, keys: Tensor, values: Tensor) -> str | None:
        """What this call asks that the kernel does not do; None if nothing."""
        forward = cache.forward
        if not plan.whole:
            return "a row's mask says 0 for a new token"
        if forward.custom_mask:
            return "a mask that is not 2-D"
        if forward.hides_old:
            return "the mask hides stored tokens"
        if forward.gives_weights:
            return "output_attentions"
        if self.site.module.training:
            return "the model is in training mode"
        if self.learns(keys, values):
            return "a gradient may be asked for"
        if self.rotary and not cache.stored_rope.is_even(cache.full_ledger):
            return "positions that do not follow those before"
        return None

    def learns(self, keys: Tensor, values: Tensor) -> bool:
        """Whether a gradient may be asked for, which the operator does not have."""
        if not torch.is_grad_enabled():
            return False
        return keys.requires_grad or values.requires_grad or any(p.requires_grad for p in self.site.module.parameters())

    @property
    def ready(self) -> bool:
        """Whether the device holds what the layer holds, and may take a step."""
        return self.storage.ready

    def heed(self) -> None:
        """Raise the errors of steps on the device, without a wait for those that still run."""
        self.storage.heed(self)

    def publish(self) -> None:
        """Let the device have what the host changed: nothing where the host stores it all."""
        self.storage.publish(self)

    def grow_on_host(self) -> None:
        """Let storage grow on the host from now on."""
        self.storage.grow_on_host()
        self._shown = None

    def on_moved(self) -> None:
        """Called where storage lies elsewhere now: what was compiled before knows its old addresses."""
        self.handle, self._shown = operator.register(self), None

    def drop_hand_off(self) -> None:
        """Forget a forward that broke off between update() and its attention."""
        if self._due is not None or self.is_compileable:  # steps on the device hand off nothing here
            self._due = None
            hf.drop_hand_off(self.site)

    is_verified = False

    @torch.no_grad()
    def decode_all(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, tokens, D) float32 of all packed blocks."""
        cache = self.cache
        chain = cache.forward.chain
        if not self.block_slots:
            nothing = self.window[0][:, :, :0].float()
            chain.leave("old", self.index, nothing, nothing)
            return nothing, nothing
        context = chain.context("old", self.index, self.device)
        keys, values = reading.remembering(self, context) if cache.remember else self.decode(self.packed, context)
        chain.leave("old", self.index, keys, values)
        if cache.watch is not None:
            cache.watch.read(self.index, self.block_slots * keys.shape[0])
        return keys, values

    def decode(self, packed: list[Packed], context: Context) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, tokens, D) float32 of these packed blocks."""
        context.stats = self.current_statistics()
        keys = self.codecs.key.decode(packed[0], context)
        context.k0 = keys
        return keys, self.codecs.value.decode(packed[1], context)

    def current_statistics(self) -> dict[str, Tensor]:
        """The run-time statistics that decoding needs, by name."""
        if self.decoding is None:  # steps on the device change them in place
            return self._statistics_now()
        states = [state for tracker in self.statistics.values() for state in tracker.state.values()]
        states_then, now = self._current
        if len(states_then) != len(states) or any(map(is_not, states_then, states)):
            now = self._statistics_now()
            self._current = states, now
        return dict(now)

    def _statistics_now(self) -> dict[str, Tensor]:
        return {name: now for name, tracker in self.statistics.items() if (now := tracker.current()) is not None}

    @property
    def block_slots(self) -> int:
        """The block slots that the fullest row needs."""
        return int(next(iter(self.storage.packed[0].values())).shape[2])

    @property
    def tail(self) -> int | None:
        """How many of the newest columns the statistics of queries can forget; None without any."""
        return observing.tail(self)

    def select_rows(self, rows: Tensor, widths: tuple[int, int, int]) -> None:
        """Continue with these batch rows in this order. widths: sink, blocks and window that the fullest needs."""
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
        if self.storage.window[0].device == torch.device(device):
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
        """Why decode steps do not take the kernel now; None if they do."""
        return self.paths.refused or (self.cache.uneven if self.rotary else None)

    @property
    def path(self) -> str:
        """How decode steps of this layer read its packed blocks, and why not otherwise."""
        kernels = self.cache.kernels
        text = self.paths.describe(self.why_reference, kernels)
        if not self.storage.is_allocated:
            return text
        return f"{text}; steps appended by {self.paths.packing.appending(kernels, self.paths.reads_codes)}"

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def stored(self, part: str) -> list[Tensor]:
        if part == "decoded":
            return [] if self.remembered is None else self.remembered[1]
        return self.storage.tensors(part)

    def bookkeeping(self) -> list[Tensor]:
        states = [t for tracker in self.statistics.values() for t in tracker.state.values()]
        return states + self.storage.bookkeeping(self)


also_named(KVCalLayer, OF_LAYERS)
