"""What a model's config says, and its decoder: which models and layers can be compressed, and why others cannot."""

from __future__ import annotations

import torch
from torch import nn

from ..codecs.base import Shape
from ..errors import UnsupportedModel, UsageError
from .protocols import Decoder, ModelConfig, attribute, is_decoder


def decoder_of(model: nn.Module) -> Decoder:
    """The module whose forward takes attention_mask and past_key_values.

    That is LlamaModel of a LlamaForCausalLM, or the text model of a vision-language model. Raises UnsupportedModel
    where there is none.
    """
    decoder = find_decoder(model)
    if (why := why_no_decoder(model, decoder)) is not None:
        raise UnsupportedModel(f"{model_type_of(model)}: {why}")
    assert is_decoder(decoder)
    return decoder


def find_decoder(model: nn.Module) -> nn.Module:
    """The module that should be the decoder of a model: `why_no_decoder` says whether it is.

    Raises UsageError for what is no module, such as a model's name.
    """
    check_module(model)
    decoder: nn.Module = attribute(model, "get_decoder")() if hasattr(model, "get_decoder") else model
    inner = getattr(decoder, "model", None)  # some causal LMs name themselves, as Llama-4 and Mllama
    if isinstance(inner, nn.Module) and not hasattr(decoder, "layers") and hasattr(inner, "layers"):
        return inner
    return decoder


def check_module(model: object) -> None:
    """Raises UsageError for what is no module, such as a model's name where the loaded model belongs."""
    if not isinstance(model, nn.Module):
        raise not_loaded("model", model, "a loaded model (a torch.nn.Module)", "AutoModelForCausalLM")


def not_loaded(argument: str, value: object, required: str, loader: str) -> UsageError:
    """The error for a name, or anything else, where an object that Transformers loads belongs. loader: its class."""
    what, name = f"a {type(value).__name__}", "NAME"
    if isinstance(value, str):
        what, name = f"the text {value!r}", repr(value)
    return UsageError(f"{argument} is {what}, must be {required}: give {loader}.from_pretrained({name})")


def model_type_of(model: nn.Module) -> str:
    """The architecture of a model, for messages."""
    config = getattr(model, "config", None)
    return str(getattr(config, "model_type", "") or type(model).__name__)


def why_no_decoder(model: nn.Module, decoder: nn.Module) -> str | None:
    """Why a model's decoder cannot be compressed, as far as its config and its parts say; None where it may be."""
    if (config := getattr(model, "config", None)) is not None and (why := unsupported_config(config)) is not None:
        return why
    missing = [name for name in ("layers", "rotary_emb") if getattr(decoder, name, None) is None]
    if not missing:
        return None
    return f"its {type(decoder).__name__} has no `{missing[0]}`; {SUPPORTED}"


def config_of(model: nn.Module) -> ModelConfig:
    """The config of a model's decoder."""
    return decoder_of(model).config


def input_device(model: nn.Module) -> torch.device:
    """Where a model, or its decoder, takes token ids: where its first weights are, or where accelerate's hooks bring
    those that lie elsewhere, as on a disk. `model.device` is "meta" then.
    """
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(model.parameters()).device


def head_dim_of(config: ModelConfig) -> int:
    """Channels of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_heads_of(config: ModelConfig) -> int:
    """Heads of keys and values."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def unsupported_layers(config: ModelConfig) -> dict[int, str]:
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


def unsupported_config(config: ModelConfig) -> str | None:
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


def text_config(config: ModelConfig) -> ModelConfig:
    """The part of a config that describes the language model."""
    get_text_config = getattr(config, "get_text_config", None)
    text: ModelConfig = config if get_text_config is None else get_text_config(decoder=True)
    return text


def layer_kind(config: ModelConfig, index: int) -> str:
    """What a layer attends to: full_attention, sliding_attention, ..."""
    types = getattr(config, "layer_types", None)
    return str(types[index]) if types else "full_attention"


def layer_shape(config: ModelConfig, block: int) -> Shape:
    """The shape of a layer's keys and values, for blocks of so many tokens."""
    return Shape(kv_heads_of(config), head_dim_of(config), block)
