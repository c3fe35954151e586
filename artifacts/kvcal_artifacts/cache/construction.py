"""The making of a cache: whether its scheme suits the model, and what it puts on the model."""

from __future__ import annotations

from typing import Any

from torch import nn

from .. import hf
from ..errors import KVCalError
from ..paths import choose
from ..scheme import Scheme
from .whole_cache import WholeCache


def checked_config(model: nn.Module, scheme: Scheme) -> Any:
    """The model's config, as Transformers takes it.

    Raises KVCalError where a cache of this scheme cannot serve the model.
    """
    hf.check_supported(model)
    config = hf.config_of(model)
    if len(scheme.layers) != config.num_hidden_layers:
        raise KVCalError(f"scheme of {len(scheme.layers)} layers, model of {config.num_hidden_layers}")
    scheme.check_chain()
    for index, reason in hf.unsupported_layers(config).items():
        if scheme.layers[index] is not None:
            raise KVCalError(f"layer {index} cannot be compressed: {reason}; leave it out of the scheme")
    return config


def require_kernels(cache: WholeCache) -> None:
    """Raises KernelsUnavailable where a layer, as far as it can be known before keys come, takes no kernel."""
    paths = [(layer.index, layer.paths) for layer in cache.own_layers]
    choose.require([(index, path.refused) for index, path in paths if path.refused and path.dequantiser is None])


def hooks(cache: WholeCache) -> hf.Hooks:
    """The hooks that tell the cache of forwards: of keys before RoPE, queries and masks only where they are needed."""
    layers, selects = cache.own_layers, cache.scheme.selection is not None
    compressed = [layer.site for layer in layers]
    tapped = compressed if cache.scheme.frame == "pre_rope" else []
    selected = compressed if selects else []
    asked = [layer.site for layer in layers if any(one.wants != "k" for one in layer.statistics.values())]
    hf.check_frame([*asked, *selected], "pre_rope")  # queries are rotated as keys are
    return hf.Hooks(cache.model, cache, tapped, selected or asked, selected)
