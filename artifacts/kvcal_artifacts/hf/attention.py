"""What a layer's attention function computes: its implementation, its scaling, and whether it is softmax(q k) v."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import UnsupportedModel
from .protocols import ModelConfig, attribute
from .sites import AttentionSite

IMPLEMENTATIONS = ("sdpa", "eager")  # attention that takes any mask (B, 1, query, keys)


EVERY_TOKEN = "store every token instead (no --keep)"


def check_selectable(site: AttentionSite) -> None:
    """Raises UnsupportedModel where tokens of the layer cannot be selected by the attention that they get (H2O).

    That is where its attention weights cannot be computed again, or its mask cannot be replaced.
    """
    name = f"layer {site.index} ({type(site.module).__name__})"
    if why := _custom_scores(site) or _odd_weights(site):
        raise UnsupportedModel(
            f"{name}: token selection does not know this layer's attention weights: {why}; {EVERY_TOKEN}"
        )
    if site.odd is not None:
        raise UnsupportedModel(f"{name}: token selection needs this layer's queries: {site.odd}; {EVERY_TOKEN}")
    kind = implementation(site)
    if kind not in IMPLEMENTATIONS:
        raise UnsupportedModel(
            f"{name}: token selection needs attn_implementation {' or '.join(IMPLEMENTATIONS)}, the model has "
            f"{kind!r}: load it with one of these"
        )


def check_queries(site: AttentionSite, reader: str) -> None:
    """Raises UnsupportedModel where `reader`, which needs the layer's queries, cannot have them."""
    if site.odd is not None:
        raise UnsupportedModel(
            f"{site.config.model_type}: layer {site.index}: {site.odd}, so that {reader} cannot have its queries; take "
            "a preset that needs none, such as kivi-2 or higgs-2"
        )


def implementation(site: AttentionSite) -> str:
    """The model's attention implementation: sdpa, eager, ..."""
    return getattr(plain_config(site.config), "_attn_implementation", None) or "eager"


def _odd_weights(site: AttentionSite) -> str | None:
    """Why a layer's attention weights are not softmax(scaling q k); None if they are."""
    module = site.module
    odd = [part for part in ("sinks", "softcap", "attn_logit_softcapping") if getattr(module, part, None) is not None]
    if odd or not isinstance(getattr(module, "scaling", None), (int, float)):
        return f"its attention has {odd[0]}" if odd else "it has no `scaling`"
    return None


def odd_attention(site: AttentionSite) -> str | None:
    """Why only the model's attention function computes this layer's attention; None if others may."""
    if not hasattr(site.module, "config"):
        return "its attention has no config that names an attention function"
    if (why := _custom_scores(site)) is not None:
        return why
    kind = implementation(site)
    if kind not in IMPLEMENTATIONS:
        return f"attn_implementation {kind!r}: the fused kernel takes the place of {' and '.join(IMPLEMENTATIONS)}"
    return _odd_weights(site)


CUSTOM_SCORES = ("Doge", "DiffLlama")  # a mask computed from the values; values cut into pieces after the cache


def _custom_scores(site: AttentionSite) -> str | None:
    """Why a layer's scores are not those of its cache's keys; None if they are."""
    name = type(site.module).__name__
    return (
        f"{name} computes more than softmax(q k) v of what its cache gives" if name.startswith(CUSTOM_SCORES) else None
    )


def asks_for_weights(config: object, arguments: Mapping[str, object]) -> bool:
    """Whether a call asks for attention weights, which only eager attention has."""
    asked = arguments.get("output_attentions", getattr(config, "output_attentions", False))
    return bool(asked) and (getattr(config, "_attn_implementation", None) or "eager") == "eager"


def plain_config(config: ModelConfig) -> ModelConfig:
    """The model's config, without our stand-in."""
    plain: ModelConfig = getattr(config, "kvcal_plain", config)
    return plain


def score_scaling(site: AttentionSite) -> float:
    """What the model multiplies q . k by before the softmax."""
    return float(attribute(site.module, "scaling"))
