"""Attention over packed blocks in the place of a model's own attention function.

A module finds its attention function by the name in its own `config`. A module whose cache may take the kernel gets a
stand-in with our name (`SeamConfig`); our function is the model's own one, unless the cache has just left word (`HandOff`)
that this call's keys are not all there and the operator is to be called. Where the cache hands all keys to the model's own
one, a token more each step, it keeps torch from the backend that prepares for each number anew.
"""

from __future__ import annotations

import copy
import operator
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcal_kernels.device import capturing as capturing

from ..errors import KVCalError
from .attention import plain_config, weights_wanted
from .sites import AttentionSite

OURS = "kvcal"


class HandOff:
    """What a layer's update() leaves for the attention call that follows it: the handle for the operator, and keys before RoPE
    where these are stored; or None.

    Eagerly for each thread, as several may run the model with caches of their own; what is traced has one.
    """

    def __init__(self) -> None:
        self._threads = threading.local()
        self._traced: tuple[int, Tensor | None] | None = None
        self._shown: Tensor | None = None

    def show(self, keys: Tensor) -> None:
        """Keys (B, H, Q, D) before RoPE of a traced forward, whatever its cache is: gone with its attention."""
        self._shown = keys

    @property
    def shown(self) -> Tensor | None:
        return self._shown

    def leave(self, handle: int, key: Tensor, value: Tensor, before: Tensor | None = None) -> None:
        """key, value: what update() gives back, which attention must then be called with. before: keys before RoPE."""
        if torch.compiler.is_compiling():
            self._traced = handle, before
        else:
            self._threads.left = handle, key, value, before

    def take(self, key: Tensor | None = None, value: Tensor | None = None) -> tuple[int, Tensor | None] | None:
        """Raises KVCalError where attention was called with other keys or values than were left."""
        if torch.compiler.is_compiling():
            traced, self._traced, self._shown = self._traced, None, None
            return traced
        entry, self._threads.left = getattr(self._threads, "left", None), None
        if entry is None:
            return None
        if key is not None and (entry[1] is not key or entry[2] is not value):
            raise KVCalError(
                "attention was called with other keys or values than its cache gave: an earlier forward broke off (call "
                "reset() and start again), or the architecture changes them (make the cache with kernels='off')"
            )
        return entry[0], entry[3]

    def hand(self, key: Tensor, grown: bool) -> None:
        """key: what update() gives back, all keys up to now, for the model's own attention. grown: one token more than in the
        call before.
        """
        if not torch.compiler.is_compiling():
            self._threads.handed = weakref.ref(key), grown

    def handed(self, key: Tensor) -> tuple[bool, bool]:
        """Whether attention is called with keys that were handed to it, and these are a token more; not if it is compiled."""
        if torch.compiler.is_compiling():
            return False, False
        entry, self._threads.handed = getattr(self._threads, "handed", None), None
        if entry is None or entry[0]() is not key:
            return False, False
        return True, entry[1]


FORWARD = threading.local()  # ours: whether this thread's forward was given one of our caches


class SeamConfig:
    """The config of a module whose attention function is ours in a forward that was given one of our caches; in all else, also
    copied, pickled or written as JSON, and where someone changes it, the config that the model was given.
    """

    kvcal_plain: Any
    kvcal_turn: HandOff

    def __init__(self, plain: Any) -> None:
        vars(self).update(kvcal_plain=plain, kvcal_turn=HandOff())

    @property
    def _attn_implementation(self) -> Any:
        """Ours is also the name where no hook tells whose forward it is: a compiled one, or what a CUDA graph records."""
        if torch.compiler.is_compiling() or getattr(FORWARD, "ours", False) or capturing():
            return OURS
        return self.kvcal_plain._attn_implementation

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["kvcal_plain"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.kvcal_plain, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ([self.kvcal_plain], 0)  # read without this package

    def __copy__(self) -> Any:
        return copy.copy(self.kvcal_plain)


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
    """The model's own attention function, or the operator over what the layer's cache holds."""
    turn = getattr(module.config, "kvcal_turn", None)  # None: closed by another thread since this call began
    entry = None if turn is None else turn.take(key, value)
    if entry is None:
        handed, grown = (False, False) if turn is None else turn.handed(key)
        if handed and isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:
            attention_mask = attention_mask[
                ..., : key.shape[2]
            ]  # caches that compile have masks of all that they can hold
        return _own_attention(module, query, key, value, attention_mask, grown, options)
    unseen = torch.compiler.is_compiling() or capturing()  # else the cache has asked before the forward
    if unseen and weights_wanted(plain_config(module.config), options):
        raise KVCalError(
            "output_attentions: the fused kernel gives no attention weights, and a compiled or recorded forward cannot do "
            "without it; run this call with the uncompiled model (generate: disable_compile=True)"
        )
    odd = [name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if odd:
        raise KVCalError(f"{type(module).__name__}: attention with {odd[0]}; make the cache with kernels='off'")
    handle, before = entry
    positions = None if before is None else options.get("position_ids")
    if before is not None and positions is None and (torch.compiler.is_compiling() or capturing()):
        raise KVCalError(
            f"{type(module).__name__}: its attention is not given position_ids, by which compiled and recorded steps see that "
            "keys before RoPE follow those held; run them with the uncompiled model (generate: disable_compile=True)"
        )
    stored = key if before is None else before
    from ..operator import decode_eagerly

    decode: Any = torch.ops.kvcal.decode_attention if torch.compiler.is_compiling() else decode_eagerly
    out = decode(query, stored, value, float(options["scaling"]), handle, positions)
    return out.transpose(1, 2).contiguous(), None


def _own_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, grown: bool, options: dict[str, Any]
) -> Any:
    """The model's own attention function. grown: the keys are those of the call before and one token."""
    kind = plain_config(module.config)._attn_implementation or "eager"
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    call = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager)
    plain = grown and kind == "sdpa" and attention_mask is None
    with without_plans() if plain and has_flash(query) else nullcontext():
        return call(module, query, key, value, attention_mask, **options)


def has_flash(query: Tensor) -> bool:
    """Whether torch's flash attention takes what cuDNN's would, given no mask: grouped heads, head_dim up to 256."""
    cuda = torch.backends.cuda
    return (
        query.is_cuda and cuda.cudnn_sdp_enabled() and cuda.flash_sdp_enabled() and cuda.is_flash_attention_available()
    )


@contextmanager
def without_plans() -> Iterator[None]:
    """scaled_dot_product_attention without cuDNN, which torch prefers on Hopper and Blackwell: it builds a plan for every
    number of keys that a thread has not seen (`MHAParams` in torch's cudnn/MHA.cpp), 35 to 39 ms of the host on an H200,
    in each step of a cache that grows (docs/benchmarks/aqua_tokens.md). flash builds nothing and takes 12 to 62 % longer on
    the GPU (docs/benchmarks/decode_attention.md): 19 ms a step of 32 layers and 32 rows of 32768 tokens, 0.2 of one row's.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


_SEAMS: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()  # caches that use a module's


class Seams:
    """Lets a cache's layers answer for their attention, until close(). Caches of one model share the seam of a module."""

    def __init__(self, owner: object, sites: list[AttentionSite]) -> None:
        ALL_ATTENTION_FUNCTIONS.register(OURS, _attention)
        self._modules: list[Any] = [site.module for site in sites]
        self._user = id(owner)
        for module in self._modules:
            _SEAMS.setdefault(module, set()).add(self._user)
            if not isinstance(module.config, SeamConfig):
                module.config = SeamConfig(module.config)
        weakref.finalize(owner, self.close)

    def close(self) -> None:
        while self._modules:
            module = self._modules.pop()
            _SEAMS[module].discard(self._user)
            if not _SEAMS[module]:
                module.config = plain_config(module.config)


def turn_of(site: AttentionSite) -> HandOff:
    """Where a layer's update() leaves word."""
    module: Any = site.module
    turn: HandOff = module.config.kvcal_turn
    return turn


def drop_turn(site: AttentionSite) -> None:
    """Forget what a layer's update() left for an attention that did not come; nothing where there is no seam."""
    turn = getattr(getattr(site.module, "config", None), "kvcal_turn", None)
    if turn is not None:
        turn.take()


def hand(site: AttentionSite, keys: Tensor, grown: bool) -> None:
    """Leaves word that the model's own attention gets these keys of ours, as HandOff.hand; nothing where there is no seam."""
    module: Any = site.module
    turn = getattr(module.config, "kvcal_turn", None)
    if turn is not None:
        turn.hand(keys, grown)
