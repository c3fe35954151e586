"""What a layer's own attention computes: its implementation, its scaling, and whether it is softmax(q k) v."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import KVCalError
from .protocols import ModelConfig, attribute
from .sites import AttentionSite

IMPLEMENTATIONS = ("sdpa", "eager")  # attention that takes any mask (B, 1, query, keys)


def check_selectable(site: AttentionSite) -> None:
    """Raises KVCalError where the layer's attention weights cannot be computed again, or its mask not be replaced."""
    name = f"layer {site.index} ({type(site.module).__name__})"
    kind = implementation(site)
    if kind not in IMPLEMENTATIONS:
        raise KVCalError(
            f"{name}: token selection needs attn_implementation {' or '.join(IMPLEMENTATIONS)}, the model has "
            f"{kind!r}: load it with one of these"
        )
    if why := _odd_weights(site):
        raise KVCalError(f"{name}: token selection does not know this layer's attention weights: {why}")


def implementation(site: AttentionSite) -> str:
    """The model's own attention implementation: sdpa, eager, ..."""
    return getattr(plain_config(site.config), "_attn_implementation", None) or "eager"


def _odd_weights(site: AttentionSite) -> str | None:
    """Why a layer's attention weights are not softmax(scaling q k); None if they are."""
    module = site.module
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


OWN_SCORES = ("Doge", "DiffLlama")  # a mask made of the values; values cut into pieces after the cache


def weights_wanted(config: object, arguments: Mapping[str, object]) -> bool:
    """Whether a call asks for the weights of the model's own attention, which only eager attention has."""
    asked = arguments.get("output_attentions", getattr(config, "output_attentions", False))
    return bool(asked) and (getattr(config, "_attn_implementation", None) or "eager") == "eager"


def plain_config(config: ModelConfig) -> ModelConfig:
    """The config that the model was given."""
    plain: ModelConfig = getattr(config, "kvcal_plain", config)
    return plain


def score_scaling(site: AttentionSite) -> float:
    """What the model multiplies q . k by before the softmax."""
    return float(attribute(site.module, "scaling"))
