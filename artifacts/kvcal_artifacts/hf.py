"""Everything that touches Transformers' internals: where a model's keys come from, its RoPE, its masks.

Facts this file rests on (Transformers 5.17 to 5.23): an attention module calls `past_key_values.update(k, v, layer)`
with keys after RoPE and passes neither cos, sin nor positions; a cache never sees the attention mask. So one forward
hook a layer hands out keys before RoPE (the output of `k_norm`, `k_proj` or the middle of `qkv_proj`), one hook on the
rotary module hands out positions, cos and sin, and one pre-hook on the decoder hands out the 2-D attention mask. Where
tokens were evicted, the model's mask of all columns does not fit what the cache gives back: one pre-hook an attention module
then puts ours in its place.

Attention over packed blocks: a module finds its attention function by the name in its own `config`. A module whose cache
may take the kernel gets a stand-in with our name (`SeamConfig`); our function is the model's own one, unless the cache has
just left word (`Turn`) that this call's keys are not all there and the operator is to be called. Where the cache hands all
keys to the model's own one, a token more each step, it keeps torch from the backend that prepares for each number anew.
"""

from __future__ import annotations

import copy
import inspect
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcal_kernels.device import capturing as capturing

from . import trial
from .codecs.base import Shape
from .errors import KVCalError, UnsupportedModel

TRIED = "kvcal-trial"  # the attention function of modules on trial


@dataclass(frozen=True)
class AttentionSite:
    """One attention layer of a model: where its keys appear before RoPE, and their shape.

    rotation: how RoPE is applied, a name of trial.ROTATIONS. keys_first, queries_first: whether a source's output is
    (B, H, T, D). odd: why keys or queries before RoPE cannot be had; None where they can.
    """

    index: int
    module: nn.Module
    key_source: nn.Module
    key_slice: slice | None  # part of key_source's last dimension that holds the keys (fused qkv)
    query_source: nn.Module
    query_slice: slice | None
    kv_heads: int
    head_dim: int
    rope: bool
    rotation: str = "whole"
    keys_first: bool = False
    queries_first: bool = False
    odd: str | None = None

    @property
    def ratio(self) -> int:
        """Query heads a kv head."""
        config: Any = self.module.config
        return int(config.num_attention_heads) // self.kv_heads

    @property
    def placed(self) -> tuple[torch.device, torch.dtype]:
        """Device and dtype of the layer's weights: what its keys will be, if nothing changes before they come."""
        every, plain = list(self.module.parameters()), (torch.float16, torch.bfloat16, torch.float32)
        if own := [p for p in every if p.dtype in plain]:
            return own[0].device, own[0].dtype
        named = getattr(getattr(self.module, "config", None), "dtype", None)  # of quantised weights
        return every[0].device if every else torch.device("cpu"), named if named in plain else torch.float32

    def keys_from(self, output: Tensor) -> Tensor:
        """The source's output (B, T, C), (B, T, H, D) or (B, H, T, D) as keys (B, H, T, D), before RoPE."""
        if self.keys_first:
            return output
        if self.key_slice is not None:
            output = output[..., self.key_slice]
        return output.reshape(*output.shape[:2], self.kv_heads, self.head_dim).transpose(1, 2)

    def queries_from(self, output: Tensor) -> Tensor:
        """The source's output as queries (B, heads, T, D), before RoPE."""
        if self.queries_first:
            return output
        if self.query_slice is not None:
            output = output[..., self.query_slice]
        return output.reshape(*output.shape[:2], -1, self.head_dim).transpose(1, 2)

    def rotate(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """RoPE exactly as this model applies it (partial rotary, cos/sin dtype), or the keys where it has none.

        keys (B, H, T, D) in the model's dtype; cos, sin (B or 1, T, rotary dim) as the model's rotary module gives.
        """
        return trial.rotate(self.module, self.rotation, keys, cos, sin) if self.rope else keys


_CHANNELS: weakref.WeakKeyDictionary[nn.Module, dict[str, int | None]] = weakref.WeakKeyDictionary()  # by rotary module


def decoder_of(model: Any) -> Any:
    """The module whose forward takes attention_mask and past_key_values: LlamaModel of a LlamaForCausalLM, the text model of a
    vision-language model. Raises UnsupportedModel where there is none.
    """
    decoder = _decoder(model)
    if (why := _no_decoder(model, decoder)) is not None:
        raise UnsupportedModel(f"{_model_type(model)}: {why}")
    return decoder


def _decoder(model: Any) -> Any:
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def _model_type(model: Any) -> str:
    config = getattr(model, "config", None)
    return str(getattr(config, "model_type", "") or type(model).__name__)


def _no_decoder(model: Any, decoder: Any) -> str | None:
    if (config := getattr(model, "config", None)) is not None and (why := unsupported_config(config)) is not None:
        return why
    missing = [name for name in ("layers", "rotary_emb") if not hasattr(decoder, name)]
    if not missing:
        return None
    return f"its {type(decoder).__name__} has no `{missing[0]}`; {SUPPORTED}"


def config_of(model: Any) -> Any:
    return decoder_of(model).config


def head_dim_of(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_heads_of(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def unsupported_layers(config: Any) -> dict[int, str]:
    """Layers that cannot be compressed, with the reason: sliding-window, shared-KV, MLA, other layer types."""
    count = config.num_hidden_layers
    if getattr(config, "kv_lora_rank", None):
        return dict.fromkeys(range(count), "multi-head latent attention caches a latent, not keys and values")
    reasons: dict[int, str] = {}
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    for index in range(count):
        kind = types[index] if types else ("sliding_attention" if window else "full_attention")
        if kind == "sliding_attention" and not window and types is None:
            continue
        if kind != "full_attention":
            extra = f" (window {window})" if kind == "sliding_attention" else ""
            reasons[index] = f"{kind.replace('_', '-')} layer{extra} keeps its own short cache"
    shared = int(getattr(config, "num_kv_shared_layers", 0) or 0)
    for index in range(count - shared, count):
        reasons[index] = "shares the keys and values of an earlier layer"
    return reasons


SUPPORTED = "kvcal compresses Llama-like decoders: layers with self_attn, and a rotary embedding of their own"
CACHING = ("full_attention", "sliding_attention", "chunked_attention")  # kinds of layers that cache keys and values


def unsupported_config(config: Any) -> str | None:
    """Why a model of this config cannot be compressed at all, as far as the config alone says; None where it may be.

    config: of the model or of its text part.
    """
    text = text_config(config)
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        return "an encoder-decoder model caches cross-attention, too; kvcal compresses decoder-only models"
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        try:
            getattr(text, name, None)
        except Exception:  # Transformers' own, of an attribute that each layer has for itself
            return f"{name} differs from layer to layer; kvcal needs layers of one shape"
    if getattr(text, "num_attention_heads", None) is None or getattr(text, "num_hidden_layers", None) is None:
        return f"it has no attention heads: a recurrent model keeps a state, not keys and values; {SUPPORTED}"
    if getattr(text, "kv_lora_rank", None):
        return "multi-head latent attention caches a latent, not keys and values"
    kinds = [kind for kind in dict.fromkeys(getattr(text, "layer_types", None) or ()) if kind not in CACHING]
    if kinds:
        return f"its {str(kinds[0]).replace('_', '-')} layers keep something else than keys and values; {SUPPORTED}"
    if "mrope_section" in (getattr(text, "rope_parameters", None) or {}):
        return "its rotary embedding takes positions in three dimensions (mrope); kvcal keeps one position a token"
    skipped = unsupported_layers(text)
    if len(skipped) == text.num_hidden_layers:
        return f"no layer can be compressed: {skipped[0]}"
    return None


def text_config(config: Any) -> Any:
    """The part of a config that describes the language model."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def unsupported(model: Any) -> str | None:
    """Why a model cannot be compressed, in one clause; None where it can. Its weights are not read: it may be on the meta
    device. A model that passes has a site for each layer, and RoPE is known for those that can be compressed.
    """
    decoder = _decoder(model)
    if (why := _no_decoder(model, decoder)) is not None:
        return why
    config, skipped = decoder.config, unsupported_layers(decoder.config)
    shape = layer_shape(config, 1)
    for index in range(config.num_hidden_layers):
        if index in skipped:
            continue
        layer = decoder.layers[index]
        if not isinstance(getattr(layer, "self_attn", None), nn.Module):
            return f"layer {index} ({type(layer).__name__}) has no self_attn; {SUPPORTED}"
        seen = _trial(decoder, index)
        if isinstance(seen, str):
            return f"layer {index}: {seen}; {SUPPORTED}"
        if (seen.kv_heads, seen.head_dim) != (shape.heads, shape.dim):
            return (
                f"layer {index} has keys of {seen.kv_heads} heads of {seen.head_dim}, its config says {shape.heads} of "
                f"{shape.dim}; kvcal needs layers of one shape"
            )
        if seen.value_dim != seen.head_dim:
            return (
                f"layer {index} has keys of {seen.head_dim} channels a head and values of {seen.value_dim}; kvcal needs one "
                "number for both"
            )
    return None


def check_supported(model: Any) -> None:
    """Raises UnsupportedModel, with the one reason that all commands give, for a model that cannot be compressed."""
    if (why := unsupported(model)) is not None:
        raise UnsupportedModel(f"{_model_type(model)}: {why}")


def check_frame(sites: Iterable[AttentionSite], frame: str) -> None:
    """Raises UnsupportedModel where keys are to be stored before RoPE, and a layer's cannot be had there."""
    for site in sites:
        if frame == "pre_rope" and site.odd is not None:
            raise UnsupportedModel(
                f"{site.module.config.model_type}: layer {site.index}: {site.odd}, so that keys cannot be stored before "  # type: ignore[union-attr]
                "RoPE; store them after it (--frame post_rope)"
            )


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """One site a layer, or one clear error naming the layer that is not understood."""
    decoder = decoder_of(model)
    return [attention_site(decoder, index) for index in range(decoder.config.num_hidden_layers)]


def attention_site(decoder: Any, index: int) -> AttentionSite:
    config, layer = decoder.config, decoder.layers[index]
    attention = getattr(layer, "self_attn", None)
    if attention is None:
        raise UnsupportedModel(
            f"{config.model_type}: layer {index} ({type(layer).__name__}) has no self_attn; {SUPPORTED}"
        )
    seen = _trial(decoder, index)
    if isinstance(seen, str):
        raise UnsupportedModel(f"{config.model_type}: layer {index}: {seen}; {SUPPORTED}")
    key, query = seen.key, seen.query
    return AttentionSite(
        index, attention, getattr(attention, key.name), key.part, getattr(attention, query.name), query.part,
        seen.kv_heads, seen.head_dim, seen.how is not None, seen.how or "whole", key.heads_first, query.heads_first,
        seen.odd,
    )  # fmt: skip


def _trial(decoder: Any, index: int) -> trial.Trial | str:
    ALL_ATTENTION_FUNCTIONS.register(TRIED, trial.attention)
    attention = decoder.layers[index].self_attn
    return trial.trial_of(attention, decoder.config, _rotary_channels(decoder, index), TRIED)


def _rotary_channels(decoder: Any, index: int) -> int | None:
    """The last dimension of a layer's cos and sin; None where the rotary module gives something else. Seen on a module of its
    own, as the model's may be on the meta device and remembers lengths: a new one, or a copy of one that is made otherwise.
    """
    rotary = decoder.rotary_emb
    kind, known = layer_kind(decoder.config, index), _CHANNELS.setdefault(rotary, {})
    if kind not in known:
        copies = (lambda: type(rotary)(config=decoder.config), lambda: copy.deepcopy(rotary))
        known[kind] = next((width for make in copies if (width := _channels(make, kind)) is not None), None)
    return known[kind]


def _channels(make: Callable[[], Any], kind: str) -> int | None:
    try:
        with torch.device("cpu"):
            made = make()
            where = next(made.buffers(), torch.empty(0)).device
            first = torch.zeros(1, 1, dtype=torch.long, device=where)
            options = rotary_options(type(made), kind)
            cos, sin = made.forward(torch.zeros(1, device=where), position_ids=first, **options)
    except (TypeError, ValueError, AttributeError, RuntimeError, KeyError):
        return None
    return int(cos.shape[-1]) if isinstance(cos, Tensor) and cos.shape == sin.shape else None


def layer_kind(config: Any, index: int) -> str:
    types = getattr(config, "layer_types", None)
    return str(types[index]) if types else "full_attention"


def rotary_options(rotary: type, kind: str = "full_attention") -> dict[str, str]:
    """What the forward of a rotary module is given besides positions: models with two kinds of RoPE name the layers' kind."""
    return {"layer_type": kind} if "layer_type" in inspect.signature(rotary.forward).parameters else {}  # type: ignore[attr-defined]


def rope_parameters(config: Any) -> dict[str, Any]:
    """Of the full-attention layers."""
    own = getattr(config, "rope_parameters", None) or {}
    nested = own.get("full_attention")
    return nested if isinstance(nested, dict) else own


def rope_tables(model: nn.Module, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (B, T, rotary dim) of int positions (B, T), as the model's own rotary module computes them now."""
    like = torch.empty(0, dtype=dtype, device=positions.device)
    # forward(), as a call would tell the hooks below about these positions
    rotary = decoder_of(model).rotary_emb
    cos, sin = rotary.forward(like, position_ids=positions, **rotary_options(type(rotary)))
    return cos, sin


def rope_moves(config: Any) -> bool:
    """Whether a token's cosines and sines may change as the sequence grows."""
    kind = str(rope_parameters(config).get("rope_type", "default"))
    return kind not in ("default", "linear", "llama3", "yarn")


def rotary_width(model: nn.Module) -> int:
    """How many channels of a head RoPE turns: the last dimension of cos and sin. The rotary module must be in memory."""
    rotary = decoder_of(model).rotary_emb
    first = torch.zeros(1, 1, dtype=torch.long, device=next(rotary.buffers()).device)
    return int(rope_tables(model, first, torch.float32)[0].shape[-1])


def rope_partners(site: AttentionSite, width: int) -> Tensor:
    """int64 (D,): with which channel RoPE turns each channel of a head; itself where it is not turned.

    width: as rotary_width gives it. Seen by turning unit vectors a quarter, so that any pairing an architecture has comes out.
    """
    units = torch.eye(site.head_dim)[None, None]
    quarter = torch.zeros(1, site.head_dim, width), torch.ones(1, site.head_dim, width)
    return site.rotate(units, *quarter)[0, 0].abs().argmax(-1)


def caveats(config: Any) -> list[str]:
    """What Transformers does behind a cache's back with this model, for describe() and a warning."""
    kind = str(rope_parameters(config).get("rope_type", ""))
    limit = getattr(config, "original_max_position_embeddings", None)
    if config.model_type == "phi3" and kind == "longrope" and limit:
        return [
            f"phi3 with LongRoPE: generate() drops any cache and starts an uncompressed one where a sequence passes "
            f"{limit} tokens; keep prompt and new tokens below or above that length"
        ]
    return []


IMPLEMENTATIONS = ("sdpa", "eager")  # attention that takes any mask (B, 1, query, keys)


def check_selectable(site: AttentionSite) -> None:
    """Raises KVCalError where the layer's attention weights cannot be computed again, or its mask not be replaced."""
    name = f"layer {site.index} ({type(site.module).__name__})"
    kind = implementation(site)
    if kind not in IMPLEMENTATIONS:
        raise KVCalError(
            f"{name}: token selection needs attn_implementation {' or '.join(IMPLEMENTATIONS)}, the model has {kind!r}: "
            "load it with one of these"
        )
    if why := _odd_weights(site):
        raise KVCalError(f"{name}: token selection does not know this layer's attention weights: {why}")


def implementation(site: AttentionSite) -> str:
    """The model's own attention implementation: sdpa, eager, ..."""
    module: Any = site.module
    return getattr(_plain(module.config), "_attn_implementation", None) or "eager"


def _odd_weights(site: AttentionSite) -> str | None:
    """Why a layer's attention weights are not softmax(scaling q k); None if they are."""
    module: Any = site.module
    odd = [part for part in ("sinks", "softcap", "attn_logit_softcapping") if getattr(module, part, None) is not None]
    if odd or not isinstance(getattr(module, "scaling", None), (int, float)):
        return f"its attention has {odd[0]}" if odd else "it has no `scaling`"
    return None


def odd_attention(site: AttentionSite) -> str | None:
    """Why nothing but the model's own attention function computes this layer's attention; None if others may."""
    if not hasattr(site.module, "config"):
        return "its attention has no config that names an attention function"
    if (name := type(site.module).__name__).startswith(OWN_SCORES):
        return f"{name} computes more than softmax(q k) v of what its cache gives"
    kind = implementation(site)
    if kind not in IMPLEMENTATIONS:
        return f"attn_implementation {kind!r}: the fused kernel takes the place of {' and '.join(IMPLEMENTATIONS)}"
    return _odd_weights(site)


OURS = "kvcal"
OWN_SCORES = ("Doge", "DiffLlama")  # a mask made of the values; values cut into pieces behind the cache


class Turn:
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
        left, self._threads.left = getattr(self._threads, "left", None), None
        if left is None:
            return None
        if key is not None and (left[1] is not key or left[2] is not value):
            raise KVCalError(
                "attention was called with other keys or values than its cache gave: an earlier forward broke off (call "
                "reset() and start again), or the architecture changes them (make the cache with kernels='off')"
            )
        return left[0], left[3]

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
        held, self._threads.handed = getattr(self._threads, "handed", None), None
        if held is None or held[0]() is not key:
            return False, False
        return True, held[1]


_FORWARD = threading.local()  # ours: whether this thread's forward was given one of our caches


class SeamConfig:
    """The config of a module whose attention function is ours in a forward that was given one of our caches; in all else, also
    copied, pickled or written as JSON, and where someone changes it, the config that the model was given.
    """

    kvcal_plain: Any
    kvcal_turn: Turn

    def __init__(self, plain: Any) -> None:
        vars(self).update(kvcal_plain=plain, kvcal_turn=Turn())

    @property
    def _attn_implementation(self) -> Any:
        """Ours is also the name where no hook tells whose forward it is: a compiled one, or what a CUDA graph records."""
        if torch.compiler.is_compiling() or getattr(_FORWARD, "ours", False) or capturing():
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


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any) -> Any:
    """The model's own attention function, or the operator over what the layer's cache holds."""
    turn = getattr(module.config, "kvcal_turn", None)  # None: closed by another thread since this call began
    left = None if turn is None else turn.take(key, value)
    if left is None:
        kind = _plain(module.config)._attn_implementation or "eager"
        handed, grown = (False, False) if turn is None else turn.handed(key)
        if handed and isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:
            attention_mask = attention_mask[
                ..., : key.shape[2]
            ]  # caches that compile have masks of all that they can hold
        own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        call = ALL_ATTENTION_FUNCTIONS.get_interface(kind, own)
        plain = grown and kind == "sdpa" and attention_mask is None
        with without_plans() if plain and has_flash(query) else nullcontext():
            return call(module, query, key, value, attention_mask, **given)
    unseen = torch.compiler.is_compiling() or capturing()  # else the cache has asked before the forward
    if unseen and _weights_wanted(_plain(module.config), given):
        raise KVCalError(
            "output_attentions: the fused kernel gives no attention weights, and a compiled or recorded forward cannot do "
            "without it; run this call with the uncompiled model (generate: disable_compile=True)"
        )
    odd = [name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if given.get(name) is not None]
    if odd:
        raise KVCalError(f"{type(module).__name__}: attention with {odd[0]}; make the cache with kernels='off'")
    handle, before = left
    positions = None if before is None else given.get("position_ids")
    if before is not None and positions is None and (torch.compiler.is_compiling() or capturing()):
        raise KVCalError(
            f"{type(module).__name__}: its attention is not given position_ids, by which compiled and recorded steps see that "
            "keys before RoPE follow those held; run them with the uncompiled model (generate: disable_compile=True)"
        )
    stored = key if before is None else before
    from .fused import decode_eagerly

    decode: Any = torch.ops.kvcal.decode_attention if torch.compiler.is_compiling() else decode_eagerly
    out = decode(query, stored, value, float(given["scaling"]), handle, positions)
    return out.transpose(1, 2).contiguous(), None


def has_flash(query: Tensor) -> bool:
    """Whether torch's flash attention takes what cuDNN's would, given no mask: grouped heads, head_dim up to 256."""
    own = torch.backends.cuda
    return query.is_cuda and own.cudnn_sdp_enabled() and own.flash_sdp_enabled() and own.is_flash_attention_available()


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


def _weights_wanted(config: Any, given: dict[str, Any]) -> bool:
    """Whether a call is to give back the weights of the model's own attention, which eager attention alone has."""
    asked = given.get("output_attentions", getattr(config, "output_attentions", False))
    return bool(asked) and (getattr(config, "_attn_implementation", None) or "eager") == "eager"


def _plain(config: Any) -> Any:
    """The config that the model was given."""
    return getattr(config, "kvcal_plain", config)


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
                module.config = _plain(module.config)


def turn_of(site: AttentionSite) -> Turn:
    """Where a layer's update() leaves word."""
    module: Any = site.module
    turn: Turn = module.config.kvcal_turn
    return turn


def drop_turn(site: AttentionSite) -> None:
    """Forget what a layer's update() left for an attention that did not come; nothing where there is no seam."""
    turn = getattr(getattr(site.module, "config", None), "kvcal_turn", None)
    if turn is not None:
        turn.take()


def hand(site: AttentionSite, keys: Tensor, grown: bool) -> None:
    """Leaves word that the model's own attention gets these keys of ours, as Turn.hand; nothing where there is no seam."""
    module: Any = site.module
    turn = getattr(module.config, "kvcal_turn", None)
    if turn is not None:
        turn.hand(keys, grown)


def output_projection(site: AttentionSite) -> Tensor | None:
    """What the layer multiplies its heads' outputs by, (hidden size, heads * D); None where it has no such matrix."""
    for name in ("o_proj", "dense", "out_proj"):
        weight = getattr(getattr(site.module, name, None), "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[1] % (site.kv_heads * site.head_dim) == 0:
            return weight.detach()
    return None


def score_scaling(site: AttentionSite) -> float:
    """What the model multiplies q . k by before the softmax."""
    scaling: Any = site.module.scaling
    return float(scaling)


def mask_for(site: AttentionSite, allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """allowed (B, Q, keys) bool -> (B, 1, Q, keys) as the layer's attention takes it."""
    mask = allowed[:, None]
    if implementation(site) == "sdpa":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def real_columns(mask: Tensor, past: int, query: int) -> Tensor | None:
    """What a mask (B, 1, query, past + query or more), as generate() makes it for caches that compile, says of columns:
    (B, past + query) bool, True where a token is real. None where it is not the causal mask of these.
    """
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != query or mask.shape[3] < past + query:
        return None
    seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] >= 0
    real = seen[:, -1, : past + query]
    causal = seen.sum(-1) == real.cumsum(1)[:, past:]
    return real if bool((causal | ~real[:, past:]).all()) else None


class Listener(Protocol):
    """What a cache hears of its model during a forward pass."""

    def on_forward(self, mask: Tensor | Mapping[str, Tensor | None] | None, weights: bool = False) -> None:
        """Before the decoder runs: the mask it was given, (B, past + query), 4-D, None (all tokens real) or 4-D ones by the
        kind of layer, and whether it is to give attention weights back.
        """

    def on_rotary(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Position ids int (B or 1, query) and what the rotary module made of them, each (B or 1, query, rotary dim)."""

    def on_keys(self, layer: int, keys: Tensor) -> None:
        """Keys (B, H, query, D) of one layer before RoPE; only if asked for."""

    def on_queries(self, layer: int, queries: Tensor) -> None:
        """Queries (B, heads, query, D) of one layer before RoPE; only if asked for."""

    def on_attention(self, layer: int, hidden: Tensor, mask: Tensor | None) -> Tensor | None:
        """Before a layer's attention: its input (B, query, hidden size) and mask -> the mask to use; only if asked for."""

    def on_done(self) -> None:
        """After a decoder's forward that did not fail."""

    def on_returned(self) -> None:
        """After that, when the whole model's forward has returned, with its head."""

    def on_broken(self) -> None:
        """A forward, the decoder's or that of the model around it, did not return."""


Wanted = tuple[str, int]  # "keys", "queries" or "mask", and a layer


class _Hook:
    """One hook function. In a forward that is compiled `traced`, which knows of no cache: what is compiled has its on the
    device; nothing without it.
    """

    def __init__(self, call: Callable[..., Any], traced: Callable[..., Any] | None = None) -> None:
        self._call, self._traced = call, traced

    def __call__(self, *given: Any) -> Any:
        if torch.compiler.is_compiling():
            return None if self._traced is None else self._traced(*given)
        return self._call(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled model gets one that takes anything and does nothing, and is there without this package."""
        return getattr, (nullcontext(), "__exit__")


class _Tap:
    """A hook on one module while at least one cache uses it: the same object under the same number whenever it is there, as
    compiled forwards are guarded by both.
    """

    def __init__(
        self,
        module: nn.Module,
        register: str,
        call: Callable[..., Any],
        traced: Callable[..., Any] | None = None,
        **options: bool,
    ) -> None:
        self._module, self._register, self._options = weakref.ref(module), register, options
        self._hook, self._users = _Hook(call, traced), set[int]()
        self._handle: RemovableHandle | None = None
        self._number: int | None = None

    def is_on(self, module: nn.Module | None) -> bool:
        return self._module() is module

    def open(self, user: int) -> None:
        self._users.add(user)  # sets, not counters: a garbage collection may close another cache at any time
        module = self._module()
        if self._handle is None and module is not None:
            self._handle = getattr(module, self._register)(self._hook, **self._options)
            self._number = _renumber(self._handle, self._number)

    def close(self, user: int) -> None:
        self._users.discard(user)
        if not self._users and self._handle is not None:
            self._handle.remove()
            self._handle = None


def _renumber(handle: RemovableHandle, number: int | None) -> int:
    """Put a hook under the number that it had before, if it had one; the number it has then."""
    if number is not None:
        for held in (ref() for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref)):
            if held is not None and handle.id in held:
                held[number] = held.pop(handle.id)
        handle.id = number
    return handle.id


@dataclass(frozen=True)
class _Owner:
    """A cache that listens, its hooks by what they tell, and where the modules that it knows hang. around: ids of hooked
    models around the decoder whose forward runs with it now.
    """

    listener: Callable[[], Listener | None]
    taps: dict[Wanted, _Tap]
    rotary: _Tap
    places: Places
    around: set[int]


class Places:
    """Where modules hang below a decoder, to see that one was replaced: compared at each forward, 5 us for 32 layers."""

    def __init__(self, decoder: nn.Module, modules: Iterable[nn.Module]) -> None:
        names = {id(module): name for name, module in decoder.named_modules()}
        links: dict[str, tuple[dict[str, Any], str, nn.Module | None]] = {}
        for name in (names[id(module)] for module in modules if id(module) in names):
            holder, path = decoder, ""
            for part in name.split("."):
                path = f"{path}.{part}" if path else part
                links[path] = holder._modules, part, holder._modules[part]
                holder = getattr(holder, part)
        self._names = list(links)
        self._held = [held for held, _, _ in links.values()]
        self._parts = [part for _, part, _ in links.values()]
        self._modules = [module for _, _, module in links.values()]

    def replaced(self) -> str | None:
        """The name of the first module in whose place another one is, or none; None if all are there."""
        now = list(map(dict.get, self._held, self._parts))
        if now == self._modules:  # modules have no equality but identity
            return None
        return next(n for n, one, was in zip(self._names, now, self._modules, strict=True) if one is not was)


class _Board:
    """The hooks of one decoder, for all its caches: they tell the cache that a forward was given, and no other."""

    def __init__(self, decoder: nn.Module) -> None:
        self._signature = inspect.signature(type(decoder).forward)
        self._thread = threading.local()
        self.owners: dict[int, _Owner] = {}
        self._always = [
            _Tap(decoder, "register_forward_pre_hook", self._before, with_kwargs=True),
            _Tap(decoder, "register_forward_hook", self._after, always_call=True),
        ]
        self._turning: _Tap | None = None
        self._taps: dict[Wanted, _Tap] = {}

    def open(
        self, decoder: Any, owner: Listener, wanted: dict[Wanted, AttentionSite], sites: list[AttentionSite]
    ) -> None:
        """sites: of all layers that the cache compresses. Hooks of modules that are no longer there stay with the caches that
        have them.
        """
        if self._turning is None or not self._turning.is_on(decoder.rotary_emb):
            self._turning = _Tap(decoder.rotary_emb, "register_forward_hook", self._rotary, with_kwargs=True)
        for key, site in wanted.items():
            if key not in self._taps or not self._taps[key].is_on(_source(key, site)):
                self._taps[key] = self._tap(key, site)
        modules = [decoder.rotary_emb, *(part for o in sites for part in (o.module, o.key_source, o.query_source))]
        taps = {key: self._taps[key] for key in wanted}
        self.owners[id(owner)] = _Owner(weakref.ref(owner), taps, self._turning, Places(decoder, modules), set())
        for tap in self._used(self.owners[id(owner)]):
            tap.open(id(owner))

    def close(self, user: int) -> None:
        for tap in self._used(self.owners.pop(user)):
            tap.close(user)

    def _used(self, own: _Owner) -> list[_Tap]:
        return [*self._always, own.rotary, *own.taps.values()]

    def _tap(self, key: Wanted, site: AttentionSite) -> _Tap:
        source = _source(key, site)
        if key[0] == "keys":
            return _Tap(source, "register_forward_hook", self._key_hook(site), _show_keys(site))
        if key[0] == "queries":
            return _Tap(source, "register_forward_hook", self._query_hook(site))
        return _Tap(source, "register_forward_pre_hook", self._mask_hook(site), with_kwargs=True)

    def current(self, wanted: Wanted | None = None, module: nn.Module | None = None) -> Listener | None:
        """The cache of this thread's forward, if it wants to hear of that from that module."""
        own: _Owner | None = getattr(self._thread, "owner", None)
        if own is None or (wanted is not None and not (wanted in own.taps and own.taps[wanted].is_on(module))):
            return None
        return own.listener()

    def owner_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Owner | None:
        """Of the cache of ours that a forward was given."""
        own = self.owners.get(id(kwargs.get("past_key_values")))
        return own or next((self.owners[id(x)] for x in args if id(x) in self.owners), None)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is None:  # removed while torch was calling its hooks: it then forgets that kwargs were asked for
            return
        if (broken := self.current()) is not None:  # not even hooks that are always called were: KeyboardInterrupt
            broken.on_broken()
        self._thread.owner = own = self.owner_of(args, kwargs)
        _FORWARD.ours = own is not None
        if own is None or (owner := own.listener()) is None:
            return
        given = kwargs
        if args:  # called with positional arguments
            given = {**self._signature.bind_partial(module, *args, **kwargs).arguments}
            given.update(given.pop("kwargs", {}))
        if (name := own.places.replaced()) is not None:
            raise KVCalError(REPLACED.format(name))
        owner.on_forward(given.get("attention_mask"), _weights_wanted(getattr(module, "config", None), given))

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """output: None after a forward that failed."""
        own: _Owner | None = getattr(self._thread, "owner", None)
        self._thread.owner, _FORWARD.ours = None, False
        if own is None or (owner := own.listener()) is None:
            return
        if output is None:
            owner.on_broken()
            return
        owner.on_done()
        if not own.around:
            owner.on_returned()

    def _rotary(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        own: _Owner | None = getattr(self._thread, "owner", None)
        if kwargs.get("layer_type", *args[2:3] or ("full_attention",)) != "full_attention":
            return  # RoPE of layers that keep their own cache
        if own is not None and own.rotary.is_on(module) and (owner := own.listener()) is not None:
            cos, sin = made
            owner.on_rotary(kwargs["position_ids"] if "position_ids" in kwargs else args[1], cos, sin)

    def _key_hook(self, site: AttentionSite) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if (owner := self.current(("keys", site.index), module)) is not None:
                owner.on_keys(site.index, site.keys_from(output))

        return hook

    def _query_hook(self, site: AttentionSite) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if (owner := self.current(("queries", site.index), module)) is not None:
                owner.on_queries(site.index, site.queries_from(output))

        return hook

    def _mask_hook(self, site: AttentionSite) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]:
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            owner = self.current(("mask", site.index), module)
            if owner is None or kwargs is None:
                return None
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            if hidden is None or "attention_mask" not in kwargs:
                raise KVCalError(
                    f"layer {site.index} ({type(module).__name__}): attention is not called with hidden_states and "
                    "attention_mask=...; token selection cannot hide evicted tokens from it"
                )
            return args, {**kwargs, "attention_mask": owner.on_attention(site.index, hidden, kwargs["attention_mask"])}

        return hook


REPLACED = (
    "{} was replaced since this cache was made (an adapter attached, merged or unloaded, or another module set): close the "
    "cache and make a new one"
)


class InPlace:
    """Whether a layer's attention and its source of keys are still in the model, for a forward that is traced, in which no
    hook compares them: by names that dynamo looks up.
    """

    def __init__(self, decoder: Any, site: AttentionSite) -> None:
        self._decoder, self._layer, self._site = decoder, str(site.index), site
        self._source = next((name for name, own in site.module.named_children() if own is site.key_source), None)

    def check(self, title: str) -> None:
        """Raises KVCalError where one is not."""
        module = getattr(self._decoder.layers, self._layer).self_attn
        source = self._source is None or getattr(module, self._source) is self._site.key_source
        if module is not self._site.module or not source:
            raise KVCalError(REPLACED.format(f"{title}: its attention, or what makes its keys,"))


def _source(wanted: Wanted, site: AttentionSite) -> nn.Module:
    """The module whose hook tells it."""
    return {"keys": site.key_source, "queries": site.query_source, "mask": site.module}[wanted[0]]


class _Around:
    """The hooks of a model around a decoder: they tell the cache that a forward was given when all of it has returned."""

    def __init__(self, model: nn.Module, board: _Board) -> None:
        self._board, self._number = board, id(model)
        self.taps = [
            _Tap(model, "register_forward_pre_hook", self._before, with_kwargs=True),
            _Tap(model, "register_forward_hook", self._after, with_kwargs=True, always_call=True),
        ]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        own = None if kwargs is None else self._board.owner_of(args, kwargs)
        if own is None:
            return
        if self._number in own.around:  # KeyboardInterrupt: its last forward did not come to the hook below
            own.around.clear()
            if (owner := own.listener()) is not None:
                owner.on_broken()
        own.around.add(self._number)

    def _after(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        """rest: kwargs, and what the model gives; None after a forward that failed."""
        if len(rest) != 2:  # as in _before of _Board
            return
        kwargs, output = rest
        own = self._board.owner_of(args, kwargs)
        if own is None or (owner := own.listener()) is None:
            return
        own.around.discard(self._number)
        if output is None:
            owner.on_broken()
        elif not own.around:
            owner.on_returned()


def _show_keys(site: AttentionSite) -> Callable[..., None]:
    """The hook on a site's keys in a forward that is compiled: update() finds them in the layer's turn."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        own: Any = site.module
        turn = getattr(own.config, "kvcal_turn", None)
        if turn is not None:
            turn.show(site.keys_from(output))

    return hook


_BOARDS: weakref.WeakKeyDictionary[nn.Module, _Board] = weakref.WeakKeyDictionary()  # by decoder
_AROUND: weakref.WeakKeyDictionary[nn.Module, tuple[_Board, _Around]] = weakref.WeakKeyDictionary()  # by model


class Hooks:
    """Tells one cache what its model does; holds the cache weakly, so that dropping it removes the hooks."""

    def __init__(
        self,
        model: nn.Module,
        owner: Listener,
        sites: list[AttentionSite],
        query_sites: list[AttentionSite],
        mask_sites: list[AttentionSite],
        compressed: list[AttentionSite],
    ) -> None:
        """The layers whose keys and queries before RoPE are wanted, and whose mask may be replaced; empty for none.
        compressed: all layers that are not left to Transformers.
        """
        self._model, decoder = model, decoder_of(model)
        wanted = {("keys", site.index): site for site in sites}
        wanted |= {("queries", site.index): site for site in query_sites}
        wanted |= {("mask", site.index): site for site in mask_sites}
        self._board = _BOARDS.get(decoder) or _BOARDS.setdefault(decoder, _Board(decoder))
        self._user, self.closed = id(owner), False
        self._owner: Callable[[], Listener | None] = weakref.ref(owner)
        self._around: list[_Tap] = []
        if model is not decoder:
            board, around = _AROUND.get(model, (None, None))
            if around is None or board is not self._board:
                around = _Around(model, self._board)
                _AROUND[model] = self._board, around
            self._around = around.taps
        self._board.open(decoder, owner, wanted, compressed)
        for tap in self._around:
            tap.open(self._user)
        weakref.finalize(owner, self.close)

    @property
    def active(self) -> bool:
        """Whether a forward of the model with this very cache is under way on this thread."""
        owner = self._board.current()
        return owner is not None and owner is self._owner()

    @property
    def replaced(self) -> str | None:
        """What to say if a module that the cache knows is no longer in the model; None if all are."""
        if _BOARDS.get(decoder_of(self._model)) is not self._board:
            return REPLACED.format("the decoder")
        own = self._board.owners.get(self._user)
        name = None if own is None else own.places.replaced()
        return None if name is None else REPLACED.format(name)

    def forget(self) -> None:
        """Forwards of the cache that are still under way, as far as is known, are no more."""
        if (own := self._board.owners.get(self._user)) is not None:
            own.around.clear()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._board.close(self._user)
            for tap in self._around:
                tap.close(self._user)


def layer_shape(config: Any, block: int) -> Shape:
    """Kv heads and head_dim of a config, for blocks of so many tokens."""
    return Shape(kv_heads_of(config), head_dim_of(config), block)


def key_probe(site: AttentionSite) -> tuple[float, ...]:
    """Eight of a layer's key weights, to tell models of one shape apart; empty where they are not plain numbers."""
    weight = getattr(getattr(site.module, "k_proj", None) or site.key_source, "weight", None)
    if weight is None or weight.ndim != 2 or not weight.is_floating_point() or weight.is_meta:
        return ()
    row = weight.detach()[-1 if site.key_slice is None else site.key_slice.start, :8]
    return tuple(float(f"{v:.6g}") for v in row.float().tolist())
