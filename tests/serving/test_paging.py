"""Tokens are stored the same however they come, and attention reads what is stored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvcal_artifacts.codecs import Float8, Higgs, MixKVQ, ResidualVQ, Scaled, Shape, Squat, Transform, Uniform
from kvcal_artifacts.errors import KVCalError, NonFiniteError, UsageError
from kvcal_artifacts.scheme import LayerCodecs
from kvcal_kernels.layout import BLOCK
from kvcal_vllm import presets
from kvcal_vllm.attention import Step, attend, attend_tails
from kvcal_vllm.paging import PagedLayer
from kvcal_vllm.tails import LayerTails, TailTable

HEADS = 3
BITS = [4] * 16 + [3] * 8 + [2] * 24 + [1] * 8 + [0] * 8


def transform(shape: Shape) -> LayerCodecs:
    """Codecs of all four tiers, in a basis that is not orthogonal."""
    generator = torch.Generator().manual_seed(5)
    decoder = torch.eye(shape.dim) + 0.1 * torch.randn(shape.heads, shape.dim, shape.dim, generator=generator)
    mean = torch.randn(shape.heads, shape.dim, generator=generator)
    bits = (BITS * 2)[: shape.dim] if shape.dim == len(BITS) else sorted(BITS * 2, reverse=True)
    return LayerCodecs(Transform(shape, "key", bits, decoder, mean), Transform(shape, "value", bits, decoder, mean))


def squat(shape: Shape) -> LayerCodecs:
    """SQuat's keys in a subspace that a bundle has."""
    basis = torch.randn(HEADS, 4, shape.dim, generator=torch.Generator().manual_seed(6))
    pair = presets.codecs("kivi-2", shape)
    assert isinstance(pair.key, Uniform)
    return LayerCodecs(Squat(pair.key, 4, channels=32, subspace="calibrated", calibrated=basis), pair.value)


def mixkvq(shape: Shape) -> LayerCodecs:
    key = MixKVQ(shape, "key", importance="none", full=8, four=8)
    return LayerCodecs(key, presets.codecs("kivi-2", shape).value)


def vqkv(shape: Shape) -> LayerCodecs:
    """Keys in two bands of unlike codebooks, values in one, divided by factors."""
    generator = torch.Generator().manual_seed(7)
    bands = [list(range(0, shape.dim, 2)), list(range(1, shape.dim, 2))]
    keys = [torch.randn(3, 64, len(bands[0]), generator=generator), torch.randn(2, 16, len(bands[1]))]
    values, scale = torch.randn(5, 512, shape.dim, generator=generator), torch.rand(HEADS, shape.dim) + 0.5
    return LayerCodecs(
        ResidualVQ(shape, "key", bands, [book.half() for book in keys]),
        ResidualVQ(shape, "value", [list(range(shape.dim))], [values.half()], scale.half()),
    )


def scaled(shape: Shape) -> LayerCodecs:
    pair = presets.codecs("innerq-hybrid-plain", shape)
    return LayerCodecs(Scaled(pair.key, (torch.rand(HEADS, shape.dim) + 0.5).half()), pair.value)


def along_tokens(shape: Shape) -> LayerCodecs:
    """Without a form that kernels read, one of them with tensors that all heads share."""
    return LayerCodecs(Higgs(shape, "key", axis="token", rotation="head"), Float8(shape, "value"))


MADE = {
    "transform": transform,
    "squat": squat,
    "mixkvq": mixkvq,
    "vqkv": vqkv,
    "scaled": scaled,
    "along_tokens": along_tokens,
}
TAILED = ["kivi-2", "innerq-base-plain", "squat", "mixkvq", "scaled", "along_tokens"]


def codecs(name: str, dim: int) -> LayerCodecs:
    shape = Shape(HEADS, dim, BLOCK)
    return MADE[name](shape) if name in MADE else presets.codecs(name, shape)


PACKED = [name for name in presets.PRESETS if not name.startswith(("kivi", "innerq"))]  # token by token
CASES = [(name, dim) for name in (*PACKED, "transform", "vqkv") for dim in (64, 128)]


@pytest.fixture(params=CASES, ids=lambda one: f"{one[0]}-{one[1]}")
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
    assert not layer.tailed
    for codec, x, read in zip((pair.key, pair.value), (key, value), layer.load(whole, table), strict=True):
        padded = torch.nn.functional.pad(x.transpose(0, 1)[None], (0, 0, 0, 28))
        expected = codec.decode(codec.encode(padded))[0, :, :100]
        torch.testing.assert_close(read.transpose(0, 1).flatten(1, 2)[:, :100], expected, rtol=2e-6, atol=2e-6)


class Fed:
    """A request whose tokens come in steps, in a layer with tails."""

    def __init__(self, layer: PagedLayer, pages: Tensor, table: Tensor, tails: LayerTails) -> None:
        self.layer, self.pages, self.table, self.tails, self.length = layer, pages, table, tails, 0

    def step(self, key: Tensor, value: Tensor) -> Step:
        """Store so many more tokens (T, H, D); return the step."""
        before, self.length = self.length, self.length + len(key)
        at = torch.arange(before, self.length)
        step = Step((0, len(key)), (self.length,), self.table[None])
        step = replace(step, tails=tuple(self.tails.table.begin(step.spans)))
        self.layer.store(self.pages, self.table[at // BLOCK] * BLOCK + at % BLOCK, key, value, self.tails)
        return step


@pytest.mark.parametrize("name", TAILED)
def test_blocks_are_packed_once_they_are_full(name: str) -> None:
    """However their tokens come, as the codec packs the block; and every query sees its own block exactly."""
    pair, (key, value) = codecs(name, 64), tokens(100, 64)
    layer, table = PagedLayer(pair, multiple=2), torch.tensor([3, 0, 5, 6])
    assert layer.tailed
    query = torch.randn(100, 2 * HEADS, 64, generator=torch.Generator().manual_seed(3))
    whole, outputs = dirty(layer, 7), []
    for sizes in ([100], [1, 1, 37, 2, 40, 19], [31, 2, 32, 32, 3]):
        pages = whole.clone()
        fed, out = Fed(layer, pages, table, LayerTails(TailTable(2))), []
        for q, k, v in zip(query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
            out.append(attend_tails(layer, pages, fed.step(k, v), q, 0.125, (k, v), fed.tails, deterministic=True))
        outputs.append(torch.cat(out))
        loaded = layer.load(pages, table[:3])
        for codec, x, read in zip((pair.key, pair.value), (key, value), loaded, strict=True):
            expected = codec.decode(codec.encode(x[:96].transpose(0, 1)[None]))[0]
            torch.testing.assert_close(read.transpose(0, 1).flatten(1, 2), expected, rtol=2e-6, atol=2e-6)
    k, v = (x.transpose(0, 1).flatten(1, 2) for x in loaded)
    for at in (0, 31, 32, 70, 99):
        begin = at // BLOCK * BLOCK
        exact = [x[begin : at + 1].transpose(0, 1) for x in (key, value)]
        seen = [torch.cat([a[:, :begin], b], 1) for a, b in zip((k, v), exact, strict=True)]
        weights = torch.softmax(query[at].unflatten(0, (HEADS, 2)) @ seen[0].transpose(1, 2) * 0.125, -1)
        for out in outputs:
            torch.testing.assert_close(out[at], (weights @ seen[1]).flatten(0, 1), rtol=1e-5, atol=1e-5)


def test_the_default_is_exact_within_a_step() -> None:
    layer, (key, value) = PagedLayer(codecs("kivi-2", 64)), tokens(80, 64)
    pages, table = dirty(layer, 3), torch.arange(3)
    query, first = torch.randn(80, HEADS, 64), 40
    fed = Fed(layer, pages, table, LayerTails(TailTable(2)))
    fed.step(key[:first], value[:first])
    own = key[first:], value[first:]
    step = fed.step(*own)
    out = attend_tails(layer, pages, step, query[first:], 0.125, own, fed.tails, deterministic=False)
    stored = [x[0] for x in layer.load(pages, table[:1])]
    k, v = (torch.cat([a, x[32:].transpose(0, 1)], 1) for a, x in zip(stored, (key, value), strict=True))
    weights = torch.softmax(query[79][:, None] @ k.transpose(1, 2) * 0.125, -1)
    torch.testing.assert_close(out[39], (weights @ v)[:, 0], rtol=1e-5, atol=1e-5)


def test_tails_go_to_who_needs_them() -> None:
    table, (a, b, c) = TailTable(2), torch.arange(12).view(3, 4)
    assert table.begin([(a, 0, 5), (b, 0, 40)]) == [-1, -1]
    first, second = table.slots(torch.tensor([0, 5]))
    assert {first, second} == {0, 1}
    assert table.begin([(a, 5, 6)]) == [first]
    assert table.begin([(c, 0, 3), (a, 6, 7)]) == [-1, first]  # b has ended: nothing touched it
    assert table.slots(torch.tensor([0, 8, 5])) == [first, second, -1]
    with pytest.raises(KVCalError, match="page 5: 0 exact tokens of an unfinished block are there, vLLM says 8"):
        table.begin([(b, 40, 41)])
    with pytest.raises(KVCalError, match="page 8: 3 exact tokens"):
        table.begin([(c, 4, 5)])
    with pytest.raises(KVCalError, match="more than 2 unfinished blocks in one step"):
        table.begin([(a, 0, 5), (b, 0, 5), (c, 0, 3)])


def test_a_finished_tail_is_free_after_its_step() -> None:
    table, pages = TailTable(2), torch.arange(8)
    table.begin([(pages, 0, 20)])
    for before in range(20, 200, 20):
        slot = table.begin([(pages, before, before + 20)])[0]
        assert slot in ((-1,) if before % BLOCK == 0 else (0, 1))


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


def test_pages_of_other_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="norms span 3 heads"):
        PagedLayer(LayerCodecs(*(Higgs(Shape(HEADS, 64, BLOCK), role, norm="token") for role in ("key", "value"))))
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


def test_attention_does_not_depend_on_chunks() -> None:
    """Not in the last bit: a code of a layer above may be on its border."""
    layer, length = PagedLayer(codecs("higgs-4", 64)), 500
    pages, table = dirty(layer, 16), torch.arange(16)[None]
    key, value = tokens(length, 64)
    layer.store(pages, torch.arange(length), key, value)
    query = torch.randn(length, 2 * HEADS, 64, generator=torch.Generator().manual_seed(4))
    whole = attend(layer, pages, Step((0, length), (length,), table), query, 0.125)
    begin = 0
    for count in (1, 31, 32, 36, 100, 1, 1, 298):
        step = Step((0, count), (begin + count,), table)
        chunk = slice(begin, begin + count)
        assert torch.equal(attend(layer, pages, step, query[chunk], 0.125), whole[chunk]), chunk
        begin += count
    assert begin == length
