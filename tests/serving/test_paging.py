"""Tokens are stored the same however they come, and attention reads what is stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcal_artifacts.codecs import Shape, Transform
from kvcal_artifacts.errors import NonFiniteError, UsageError
from kvcal_artifacts.scheme import LayerCodecs
from kvcal_kernels.layout import BLOCK
from kvcal_vllm import presets
from kvcal_vllm.attention import Step, attend
from kvcal_vllm.paging import PagedLayer

HEADS = 3
BITS = [4] * 16 + [3] * 8 + [2] * 24 + [1] * 8 + [0] * 8


def transform(shape: Shape) -> LayerCodecs:
    """Codecs of all four tiers, in a basis that is not orthogonal."""
    generator = torch.Generator().manual_seed(5)
    decoder = torch.eye(shape.dim) + 0.1 * torch.randn(shape.heads, shape.dim, shape.dim, generator=generator)
    mean = torch.randn(shape.heads, shape.dim, generator=generator)
    bits = (BITS * 2)[: shape.dim] if shape.dim == len(BITS) else sorted(BITS * 2, reverse=True)
    return LayerCodecs(Transform(shape, "key", bits, decoder, mean), Transform(shape, "value", bits, decoder, mean))


def codecs(name: str, dim: int) -> LayerCodecs:
    shape = Shape(HEADS, dim, BLOCK)
    return transform(shape) if name == "transform" else presets.codecs(name, shape)


NAMES = [*presets.PRESETS, "transform"]


@pytest.fixture(params=[(name, dim) for name in NAMES for dim in (64, 128)], ids=lambda one: f"{one[0]}-{one[1]}")
def pair(request: pytest.FixtureRequest) -> LayerCodecs:
    return codecs(*request.param)


def tokens(count: int, dim: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, count, HEADS, dim, generator=generator)
    return key, value


def dirty(layer: PagedLayer, count: int) -> Tensor:
    """Pages that other requests left."""
    generator = torch.Generator().manual_seed(2)
    shape = (count, HEADS, BLOCK, layer.token_bytes)
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


def test_tokens_are_stored_the_same_however_they_come(pair: LayerCodecs) -> None:
    layer, (key, value) = PagedLayer(pair, multiple=8), tokens(100, pair.key.shape.dim)
    table = torch.tensor([3, 0, 5, 6])
    slots = table[torch.arange(100) // BLOCK] * BLOCK + torch.arange(100) % BLOCK
    whole = dirty(layer, 7)
    pieces = whole.clone()
    layer.store(whole, slots, key, value)
    for part in torch.arange(100).split([1, 1, 37, 2, 40, 19]):
        layer.store(pieces, slots[part], key[part], value[part])
    assert torch.equal(whole, pieces)
    for codec, x, read in zip((pair.key, pair.value), (key, value), layer.load(whole, table), strict=True):
        padded = torch.nn.functional.pad(x.transpose(0, 1)[None], (0, 0, 0, 28))
        expected = codec.decode(codec.encode(padded))[0, :, :100]
        torch.testing.assert_close(read.transpose(0, 1).flatten(1, 2)[:, :100], expected, rtol=2e-6, atol=2e-6)


def test_other_tokens_stay(pair: LayerCodecs) -> None:
    layer, (key, value) = PagedLayer(pair), tokens(64, pair.key.shape.dim)
    pages = dirty(layer, 2)
    layer.store(pages, torch.arange(64), key, value)
    before = [x.clone() for x in layer.load(pages, torch.arange(2))]
    layer.store(pages, torch.tensor([40, -1]), key[:2] + 1, value[:2] + 1)
    for old, new in zip(before, layer.load(pages, torch.arange(2)), strict=True):
        changed = (old != new).any(1).any(-1)
        assert changed.nonzero().tolist() == [[1, 8]]


def test_padding_is_not_stored() -> None:
    layer, (key, value) = PagedLayer(codecs("higgs-2", 64)), tokens(3, 64)
    pages = dirty(layer, 1)
    before = pages.clone()
    layer.store(pages, torch.full((3,), -1), key, value)
    assert torch.equal(before, pages)


def test_what_float16_cannot_hold_is_refused() -> None:
    layer, (key, value) = PagedLayer(codecs("higgs-2", 64)), tokens(1, 64)
    with pytest.raises(NonFiniteError, match="norm"):
        layer.store(dirty(layer, 1), torch.zeros(1, dtype=torch.long), key * 1e6, value)


def test_head_sizes_and_blocks_without_a_kernel_are_refused() -> None:
    with pytest.raises(UsageError, match="head_dim"):
        PagedLayer(presets.codecs("higgs-2", Shape(HEADS, 80, BLOCK)))
    with pytest.raises(UsageError, match="blocks of 64 tokens: a page holds 32"):
        PagedLayer(presets.codecs("higgs-2", Shape(HEADS, 64, 64)))


@pytest.mark.parametrize("exact", [False, True])
def test_attention_of_a_ragged_batch(exact: bool) -> None:
    """Against attention of one query at a time over what the pages decode to, and the step's own keys if exact."""
    layer, lengths, new, groups = PagedLayer(codecs("higgs-4", 64)), (70, 33, 1), (5, 1, 1), 2
    pages, table = dirty(layer, 8), torch.tensor([[4, 1, 7], [2, 6, 0], [3, 0, 0]])
    key, value = tokens(sum(lengths), 64)
    first, own, outputs = 0, [], []
    query = torch.randn(sum(new), groups * HEADS, 64, generator=torch.Generator().manual_seed(3))
    for row, (length, count) in enumerate(zip(lengths, new, strict=True)):
        at = torch.arange(length)
        span = slice(first, first + length)
        layer.store(pages, table[row][at // BLOCK] * BLOCK + at % BLOCK, key[span], value[span])
        stored = [x.transpose(0, 1).flatten(1, 2)[:, :length] for x in layer.load(pages, table[row])]
        k, v = (x.clone() for x in stored)
        if exact:
            k[:, -count:], v[:, -count:] = (x[span][-count:].transpose(0, 1) for x in (key, value))
        for step in range(count):
            q = query[sum(new[:row]) + step].unflatten(0, (HEADS, groups))
            seen = length - count + 1 + step
            weights = torch.softmax(q @ k[:, :seen].transpose(1, 2) * 0.125, -1)
            outputs.append((weights @ v[:, :seen]).flatten(0, 1))
        own.append(torch.arange(first + length - count, first + length))
        first += length
    chunk = torch.cat(own)
    starts = (0, 5, 6, 7)
    out = attend(
        layer, pages, Step(starts, lengths, table), query, 0.125, (key[chunk], value[chunk]) if exact else None
    )
    torch.testing.assert_close(out, torch.stack(outputs), rtol=1e-5, atol=1e-5)
