"""Caches of whole models, filled with random packed data: a few blocks that repeat over rows and tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcal_artifacts.cache import KVCalCache, KVCalLayer
from kvcal_artifacts.cache.protocols import CacheOptions
from kvcal_artifacts.cache.static.layer import StaticLayer
from kvcal_artifacts.cache.statistics.prefixes import Prefixes
from kvcal_artifacts.codecs.ragged import Ragged
from kvcal_artifacts.scheme import LayerCodecs, Scheme
from kvcal_artifacts.storage.block_store import Stored
from kvcal_artifacts.storage.ledger import Ledger
from kvcal_artifacts.storage.plan import Plan

from ..models.geometry import Geometry
from .layer import Case, fill
from .schemes import Benched

BLOCKS = 4  # random ones, which repeat


def scheme_of(model: PreTrainedModel, one: Benched) -> Scheme:
    """A bundle's scheme; else the benched layer's codecs for every layer, in the lowest ones without their
    predictors.
    """
    if one.whole is not None:
        return one.whole
    layers = [one.codecs] * model.config.get_text_config().num_hidden_layers
    depth = Scheme.depth(one.codecs)
    inner = LayerCodecs(
        getattr(one.codecs.key, "inner", one.codecs.key), getattr(one.codecs.value, "inner", one.codecs.value)
    )
    return Scheme(one.windows, one.frame, tuple([inner] * depth + layers[depth:]))


def filled_cache(
    model: PreTrainedModel, geometry: Geometry, one: Benched, batch: int, length: int, **options: Unpack[CacheOptions]
) -> KVCalCache:
    """A cache of that scheme that holds `length` random tokens in each row; options: of KVCalCache."""
    cache = KVCalCache(scheme_of(model, one), model, **options)
    fill_cache(cache, geometry, one, batch, length)
    return cache


def fill_cache(cache: KVCalCache, geometry: Geometry, one: Benched, batch: int, length: int) -> None:
    """Fill an empty cache with random keys and values. After a reset() it gets the same bytes again, where storage is
    allocated once at the same addresses.
    """
    model = cache.model
    assert isinstance(model, PreTrainedModel)
    plan = cache.ledger.begin(batch, length, None)
    if one.frame == "pre_rope":
        places = torch.arange(length, dtype=torch.int32, device=model.device)
        cache.ledger.positions = places[None].repeat(batch, 1)
        cache.full_ledger.starts = torch.zeros(batch, dtype=torch.long, device="cpu")
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, KVCalLayer):
            codecs = cache.scheme.layers[index]
            assert codecs is not None
            tokens_in = one.windows.sink + one.windows.recent + BLOCKS * one.windows.block
            case = Case(replace(one, codecs=codecs), geometry, 1, tokens_in, model.device, model.dtype)
            _fill_layer(layer, case, batch, plan, length)
        else:  # left to Transformers by the scheme
            layer.update(*(tokens(model, geometry, batch, length, 2 * index + role) for role in (0, 1)))


def _fill_layer(layer: KVCalLayer, case: Case, batch: int, plan: Plan, length: int) -> None:
    filled, heads = fill(case), case.geometry.kv_heads
    empty = case.random(heads, 0, salt=0).expand(batch, -1, -1, -1)
    layer.lazy_initialization(empty, empty)
    layer.sink = [x[:, :, : plan.sink].expand(batch, -1, -1, -1).contiguous() for x in filled.sink]
    layer.window = [
        case.random(heads, plan.window, salt=7 + role).expand(batch, -1, -1, -1).contiguous() for role in (0, 1)
    ]
    _observe(layer, case, batch)
    layer.columns = length
    if isinstance(layer, StaticLayer):  # packed blocks go where they stay: a copy of all would not fit next to them
        layer.publish()
        # The storage itself: what the host would look at as `packed` brings a copy of each layer's window with it.
        stored = layer.packed if layer.allocation is None else layer.allocation.packed
        for role, packed in enumerate(filled.packed):
            for name, x in packed.items():
                assert isinstance(x, Tensor)
                out = stored[role][name]
                assert isinstance(out, Tensor)
                cycled(out[:, :, : plan.flush], x)
    else:
        layer.packed = [
            {name: repeated(x, batch, plan.flush) for name, x in packed.items()} for packed in filled.packed
        ]


def _observe(layer: KVCalLayer, case: Case, batch: int) -> None:
    """Show the layer's run-time statistics a few random tokens."""
    windows, geometry = case.scheme.windows, case.geometry
    short = windows.sink + windows.recent + windows.block
    plan = Ledger(windows).begin(batch, short, None)
    for statistic in layer.statistics.values():
        heads = geometry.kv_heads if statistic.wants == "k" else geometry.heads
        states = case.random(heads, short, salt=9).expand(batch, -1, -1, -1)
        statistic.observe(states, Prefixes(plan, windows, case.device))


def cycled(out: Tensor, stored: Tensor) -> None:
    """Write the blocks of one row (1, H, n, ...) over and over into out (batch, H, blocks, ...)."""
    every = stored.shape[2]
    for first in range(every):
        out[:, :, first::every].copy_(stored[:, :, first : first + 1].expand_as(out[:, :, first::every]))


def repeated(stored: Stored, batch: int, blocks: int) -> Stored:
    """The blocks of one row, over and over: (1, H, n, ...) -> (batch, H, blocks, ...)."""
    if isinstance(stored, Ragged):
        numbers = torch.arange(stored.counts.numel(), device=stored.device).view(stored.counts.shape)
        order = numbers[:, :, torch.arange(blocks, device=stored.device) % numbers.shape[2]]
        return stored.take(order.expand(batch, -1, -1).contiguous())
    out = stored.new_empty(batch, stored.shape[1], blocks, *stored.shape[3:])
    cycled(out, stored)
    return out


def tokens(model: PreTrainedModel, geometry: Geometry, batch: int, length: int, seed: int) -> Tensor:
    """Random keys or values (batch, kv_heads, length, head_dim) in the model's dtype."""
    generator = torch.Generator(model.device).manual_seed(seed)
    size = (batch, geometry.kv_heads, length, geometry.head_dim)
    return torch.randn(size, generator=generator, device=model.device, dtype=model.dtype)
