"""Attention over packed blocks instead of the model's attention function.

A module finds its attention function by the name in its own `config`. A module whose cache may take the kernel gets a
stand-in with our name (`SeamConfig`). Our function calls the model's, unless the cache has just noted
(`HandOff`) that the operator is to be called, as it holds back this call's keys. Where the cache gives all keys to the
model's own one, one token more each step, torch must not use the backend that prepares for each number of keys anew.
"""

from __future__ import annotations

import copy
import functools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from kvcal_kernels.device import capturing as capturing

from ..errors import KVCalError
from .attention import asks_for_weights, plain_config
from .protocols import Configured, ModelConfig, attribute
from .sites import AttentionSite

OURS = "kvcal"


class HandOff:
    """What a layer's update() leaves for the attention call that follows it.

    That is the handle for the operator, and keys before RoPE where these are stored; or None. Eagerly there is one for
    each thread, as several may run the model, each with its cache; what is traced has one.
    """

    def __init__(self) -> None:
        self._threads = threading.local()
        self._traced: tuple[int, Tensor | None] | None = None
        self._shown: Tensor | None = None

    def show(self, keys: Tensor) -> None:
        """Note keys (B, H, Q, D) before RoPE of a traced forward, whatever its cache is, until its attention."""
        self._shown = keys

    @property
    def shown(self) -> Tensor | None:
        """Keys before RoPE of a traced forward, if its hook showed them."""
        return self._shown

    def leave(self, handle: int, key: Tensor, value: Tensor, before: Tensor | None = None) -> None:
        """Let the operator of a handle compute the attention that follows.

        key, value: what update() returns, and attention must be called with. before: keys before RoPE.
        """
        if torch.compiler.is_compiling():
            self._traced = handle, before
        else:
            self._threads.hand_off = handle, key, value, before

    def take(self, key: Tensor | None = None, value: Tensor | None = None) -> tuple[int, Tensor | None] | None:
        """What `leave` noted, if anything. Raises KVCalError where attention was called with other keys or values."""
        if torch.compiler.is_compiling():
            traced, self._traced, self._shown = self._traced, None, None
            return traced
        entry, self._threads.hand_off = getattr(self._threads, "hand_off", None), None
        if entry is None:
            return None
        if key is not None and (entry[1] is not key or entry[2] is not value):
            raise KVCalError(
                "attention was called with other keys or values than its cache gave: an earlier forward broke off "
                "(call reset() and start again), or the architecture changes them (make the cache with kernels='off')"
            )
        return entry[0], entry[3]

    def note_keys(self, key: Tensor, grown: bool) -> None:
        """Note that the model's attention function follows.

        key: what update() returns, all keys up to now. grown: whether they are one token more than in the call before.
        """
        if not torch.compiler.is_compiling():
            self._threads.noted = weakref.ref(key), grown

    def noted(self, key: Tensor) -> tuple[bool, bool]:
        """Whether these keys were noted, and whether they are one token more than before; never if it is compiled."""
        if torch.compiler.is_compiling():
            return False, False
        entry, self._threads.noted = getattr(self._threads, "noted", None), None
        if entry is None or entry[0]() is not key:
            return False, False
        return True, entry[1]


FORWARD = threading.local()  # ours: whether this thread's forward runs with one of our caches


class SeamConfig:
    """The config of a module whose attention function is ours in a forward with one of our caches.

    In everything else, also copied, pickled or written as JSON, and where someone changes it, it is the config that the
    model was given.
    """

    kvcal_plain: ModelConfig
    kvcal_hand_off: HandOff

    def __init__(self, plain: ModelConfig) -> None:
        vars(self).update(kvcal_plain=plain, kvcal_hand_off=HandOff())

    @property
    def _attn_implementation(self) -> str | None:
        """The name of the attention function.

        It is ours also where no hook tells whose forward it is: a compiled one, or what a CUDA graph records.
        """
        if torch.compiler.is_compiling() or getattr(FORWARD, "ours", False) or capturing():
            return OURS
        return self.kvcal_plain._attn_implementation

    def __getattr__(self, name: str) -> object:
        return getattr(vars(self)["kvcal_plain"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.kvcal_plain, name, value)

    def __reduce__(self) -> tuple[object, ...]:
        return operator.getitem, ([self.kvcal_plain], 0)  # read without this package

    def __copy__(self) -> ModelConfig:
        return copy.copy(self.kvcal_plain)


ODD_OPTIONS = ("sliding_window", "softcap", "s_aux", "position_bias")  # of attention, which no kernel of ours knows


def _attention(
    module: Configured, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The model's attention function, or the operator over the layer's packed blocks."""
    config = module.config
    hand_off: HandOff | None = getattr(config, "kvcal_hand_off", None)  # None: another thread closed it in this call
    entry = None if hand_off is None else hand_off.take(key, value)
    if entry is None:
        noted, grown = (False, False) if hand_off is None else hand_off.noted(key)
        if noted and isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:
            # caches that compile have masks of all that they can hold
            attention_mask = attention_mask[..., : key.shape[2]]
        return _model_attention(module, query, key, value, attention_mask, grown, options)
    unseen = torch.compiler.is_compiling() or capturing()  # else the cache has asked before the forward
    if unseen and asks_for_weights(plain_config(config), options):
        raise KVCalError(
            "output_attentions: the fused kernel gives no attention weights, and a compiled or recorded forward "
            "cannot do without it; run this call with the uncompiled model (generate: disable_compile=True)"
        )
    for name in ODD_OPTIONS:
        if options.get(name) is not None:
            raise KVCalError(f"{type(module).__name__}: attention with {name}; make the cache with kernels='off'")
    handle, before = entry
    positions = None if before is None else options.get("position_ids")
    if before is not None and positions is None and (torch.compiler.is_compiling() or capturing()):
        raise KVCalError(
            f"{type(module).__name__}: its attention is not given position_ids, by which compiled and recorded steps "
            "see that keys before RoPE follow those held; run them with the uncompiled model (generate: "
            "disable_compile=True)"
        )
    stored = key if before is None else before
    decode = torch.ops.kvcal.decode_attention if torch.compiler.is_compiling() else _eager_operator()
    out: Tensor = decode(query, stored, value, float(options["scaling"]), handle, positions)
    return out.transpose(1, 2).contiguous(), None


@functools.cache
def _eager_operator() -> Callable[..., Tensor]:
    """The operator without torch's dispatcher. Its module imports this one."""
    from ..operator import decode_eagerly

    return decode_eagerly


def _model_attention(
    module: Configured,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    grown: bool,
    options: dict[str, object],
) -> tuple[Tensor, Tensor | None]:
    """The model's attention function. grown: the keys are those of the call before and one token."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # not at the top: bundles are read without

    kind = plain_config(module.config)._attn_implementation or "eager"
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    call = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager)
    plain = grown and kind == "sdpa" and attention_mask is None
    with without_plans() if plain and has_flash(query) else nullcontext():
        result: tuple[Tensor, Tensor | None] = call(module, query, key, value, attention_mask, **options)
        return result


def has_flash(query: Tensor) -> bool:
    """Whether torch's flash attention takes what cuDNN's would, without a mask: grouped heads, head_dim up to 256."""
    cuda = torch.backends.cuda
    return (
        query.is_cuda and cuda.cudnn_sdp_enabled() and cuda.flash_sdp_enabled() and cuda.is_flash_attention_available()
    )


@contextmanager
def without_plans() -> Iterator[None]:
    """A context in which scaled_dot_product_attention does not use cuDNN, which torch prefers on Hopper and Blackwell.

    cuDNN builds a plan for every number of keys that is new to a thread (`MHAParams` in torch's cudnn/MHA.cpp), so in
    each step of a cache that grows. flash builds nothing: it is slower on the GPU by less than the host takes for such
    a plan (docs/benchmarks/reasons.md).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


_SEAMS: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()  # caches that use a module's


class Seams:
    """Lets a cache's layers answer for their attention, until close().

    Caches of one model share the seam of a module.
    """

    def __init__(self, owner: object, sites: list[AttentionSite]) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(OURS, _attention)
        self._modules = [site.module for site in sites]
        self._user = id(owner)
        for module in self._modules:
            _SEAMS.setdefault(module, set()).add(self._user)
            config: ModelConfig = attribute(module, "config")
            if not isinstance(config, SeamConfig):
                _set_config(module, SeamConfig(config))
        weakref.finalize(owner, self.close)

    def close(self) -> None:
        while self._modules:
            module = self._modules.pop()
            _SEAMS[module].discard(self._user)
            if not _SEAMS[module]:
                _set_config(module, plain_config(attribute(module, "config")))


def _set_config(module: nn.Module, config: ModelConfig | SeamConfig) -> None:
    vars(module)["config"] = config


def hand_off_of(site: AttentionSite) -> HandOff:
    """The HandOff of a layer, by which its update() leads to the operator."""
    hand_off: HandOff = attribute(site.module, "config").kvcal_hand_off
    return hand_off


def drop_hand_off(site: AttentionSite) -> None:
    """Drop the hand-off of an update() whose attention did not follow; nothing where there is no seam."""
    hand_off: HandOff | None = getattr(getattr(site.module, "config", None), "kvcal_hand_off", None)
    if hand_off is not None:
        hand_off.take()


def note_keys(site: AttentionSite, keys: Tensor, grown: bool) -> None:
    """Note that the model's attention gets these keys, as HandOff.note_keys; nothing where there is no seam."""
    hand_off: HandOff | None = getattr(site.config, "kvcal_hand_off", None)
    if hand_off is not None:
        hand_off.note_keys(keys, grown)
