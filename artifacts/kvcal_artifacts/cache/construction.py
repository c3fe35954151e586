"""The making of a cache: whether its scheme suits the model, and what it puts on the model."""

from __future__ import annotations

from typing import Any

from torch import nn

from .. import hf
from ..errors import KVCalError
from ..paths import choose
from ..paths.choose import PathKind
from ..scheme import LayerCodecs, Scheme
from .statistics import statistic
from .whole_cache import WholeCache


def check_served(model: nn.Module, scheme: Scheme) -> None:
    """Raises KVCalError where a cache of this scheme cannot serve the model.

    Weights are not read: the model may be on the meta device.
    """
    checked_config(model, scheme)


def checked_config(model: nn.Module, scheme: Scheme) -> Any:
    """The model's config, as Transformers takes it. Raises as `check_served`."""
    hf.check_supported(model)
    config = hf.config_of(model)
    if len(scheme.layers) != config.num_hidden_layers:
        raise KVCalError(f"scheme of {len(scheme.layers)} layers, model of {config.num_hidden_layers}")
    scheme.check_chain()
    for index, reason in hf.unsupported_layers(config).items():
        if scheme.layers[index] is not None:
            raise KVCalError(f"layer {index} cannot be compressed: {reason}; leave it out of the scheme")
    sites = {site.index: site for site in hf.attention_sites(model)}
    hf.check_frame([sites[index] for index in scheme.compressed], scheme.frame)
    for index, pair in enumerate(scheme.layers):
        if pair is None:
            continue
        if scheme.selection is not None:
            hf.check_selectable(sites[index])
        if asks_queries(pair):
            hf.check_queries(sites[index], pair.key.describe())
    return config


def local_heads(
    scheme: Scheme, model: nn.Module
) -> tuple[Scheme, dict[int, hf.AttentionSite], hf.HeadShard | None, str | None]:
    """The scheme and the sites by which one process of a tensor-parallel model stores its heads.

    Also which part of the heads it has, None where the model is not spread. Last why it stores the heads of all
    processes nevertheless, where codecs store them together: each then holds the whole cache.
    """
    sites = {site.index: site for site in hf.attention_sites(model)}
    shard = next((site.shard for site in sites.values() if site.shard is not None), None)
    if shard is None:
        return scheme, sites, None, None
    site = next(iter(sites.values()))
    cut = scheme.of_heads(shard.heads(site.kv_heads // shard.count))
    if isinstance(cut, str):
        return scheme, sites, shard, cut
    return cut, {index: site.of_local_heads() for index, site in sites.items()}, shard, None


def asks_queries(pair: LayerCodecs) -> bool:
    """Whether a layer's run-time statistics are of queries."""
    return any(statistic(name, pair.key.shape).wants != "k" for name in pair.stats)


def require_kernels(cache: WholeCache) -> None:
    """Raises KernelsUnavailable where a layer takes no kernel, as far as its weights tell before keys come."""
    paths = [(layer.index, layer.paths) for layer in cache.compressed_layers]
    choose.require([(index, path.refused or "") for index, path in paths if path.kind is PathKind.DECODED])


def hooks(cache: WholeCache) -> hf.Hooks:
    """The hooks that tell the cache of forwards: of keys before RoPE, queries and masks only where they are needed."""
    layers, selects = cache.compressed_layers, cache.scheme.selection is not None
    compressed = [layer.site for layer in layers]
    tapped = compressed if cache.scheme.frame == "pre_rope" else []
    selected = compressed if selects else []
    asked = [layer.site for layer in layers if asks_queries(layer.codecs)]
    return hf.Hooks(cache.model, cache, tapped, selected or asked, selected)
