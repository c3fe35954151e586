"""Caches of whole models, filled with random packed data: a few blocks that repeat over rows and tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvcal_artifacts.cache import KVCalCache, KVCalLayer
from kvcal_artifacts.ledger import Ledger
from kvcal_artifacts.scheme import LayerCodecs, Scheme
from kvcal_artifacts.statistics import Prefixes
from kvcal_artifacts.store import Ragged, Stored

from ..catalogue import Geometry
from .layer import Case, fill
from .schemes import Benched

BLOCKS = 4  # random ones, which repeat


def scheme_of(model: Any, one: Benched) -> Scheme:
    """A bundle's own scheme; else the benched layer's codecs for every layer, in the lowest ones without their predictors."""
    if one.whole is not None:
        return one.whole
    layers = [one.codecs] * model.config.get_text_config().num_hidden_layers
    depth = Scheme.depth(one.codecs)
    inner = LayerCodecs(
        getattr(one.codecs.key, "inner", one.codecs.key), getattr(one.codecs.value, "inner", one.codecs.value)
    )
    return Scheme(one.windows, one.frame, tuple([inner] * depth + layers[depth:]))


def filled_cache(
    model: Any, geometry: Geometry, one: Benched, batch: int, length: int, max_length: int | None = None
) -> KVCalCache:
    """A cache of that scheme that holds `length` random tokens in each row. max_length: of KVCalCache."""
    cache = KVCalCache(scheme_of(model, one), model, max_length=max_length)
    plan = cache.ledger.begin(batch, length, None)
    if one.frame == "pre_rope":
        places = torch.arange(length, dtype=torch.int32, device=model.device)
        cache.ledger.positions = places[None].repeat(batch, 1)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, KVCalLayer):
            _fill_layer(layer, geometry, one, batch, plan.window, plan.flush, model)
            layer.columns = length
            layer.publish()
        else:  # left to Transformers by the scheme
            layer.update(*(tokens(model, geometry, batch, length, 2 * index + role) for role in (0, 1)))
    return cache


def _fill_layer(
    layer: KVCalLayer, geometry: Geometry, one: Benched, batch: int, window: int, blocks: int, model: Any
) -> None:
    own = one.windows
    tokens = own.sink + own.recent + BLOCKS * own.block
    case = Case(replace(one, codecs=layer.codecs), geometry, 1, tokens, model.device, model.dtype)
    filled = fill(case)
    empty = case.random(geometry.kv_heads, 0, salt=0).expand(batch, -1, -1, -1)
    layer.lazy_initialization(empty, empty)
    layer.sink = [x.expand(batch, -1, -1, -1).contiguous() for x in filled.sink]
    layer.window = [
        case.random(geometry.kv_heads, window, salt=7 + role).expand(batch, -1, -1, -1).contiguous() for role in (0, 1)
    ]
    layer.packed = [{name: repeated(x, batch, blocks) for name, x in packed.items()} for packed in filled.packed]
    short = own.sink + own.recent + own.block
    plan = Ledger(own).begin(batch, short, None)
    for statistic in layer.statistics.values():
        heads = geometry.kv_heads if statistic.wants == "k" else geometry.heads
        seen = case.random(heads, short, salt=9).expand(batch, -1, -1, -1)
        statistic.observe(seen, Prefixes(plan, own, model.device))


def repeated(stored: Stored, batch: int, blocks: int) -> Stored:
    """The blocks of one row, over and over: (1, H, n, ...) -> (batch, H, blocks, ...)."""
    if isinstance(stored, Ragged):
        numbers = torch.arange(stored.counts.numel(), device=stored.device).view(stored.counts.shape)
        order = numbers[:, :, torch.arange(blocks, device=stored.device) % numbers.shape[2]]
        return stored.take(order.expand(batch, -1, -1).contiguous())
    picks = torch.arange(blocks, device=stored.device) % stored.shape[2]
    return stored[:, :, picks].expand(batch, *[-1] * (stored.ndim - 1)).contiguous()


def tokens(model: Any, geometry: Geometry, batch: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator(model.device).manual_seed(seed)
    size = (batch, geometry.kv_heads, length, geometry.head_dim)
    return torch.randn(size, generator=generator, device=model.device, dtype=model.dtype)
