"""MixKVQ: tiers by hand, thresholds searched, the same bytes twice and after a kill, and by several workers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcal_artifacts.codecs import Context, MixKVQ, Shape
from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.store import Ragged

SHAPE = Shape(2, 16, 16)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def keys(batch: int = 2, blocks: int = 3) -> Tensor:
    """Some channels wide, some narrow, some constant."""
    x = normal(batch, SHAPE.heads, blocks * SHAPE.block, SHAPE.dim) * torch.logspace(-1.5, 1.5, SHAPE.dim)
    x[..., 3] = 0.25
    return x


def context(batch: int = 2, blocks: int = 3) -> Context:
    return Context(5, stats={"query_abs": normal(batch, SHAPE.heads, blocks, SHAPE.dim, seed=1).abs()})


def counts(codec: MixKVQ, x: Tensor, seen: Context) -> list[Tensor]:
    packed = codec.encode(x, seen)
    return [packed[name].counts.long() for name in ("raw", "four_codes", "two_codes")]


def test_paper_loop_by_loop() -> None:
    """Equations 2, 3, 6, 7 and 8 in float64, one channel at a time."""
    codec = MixKVQ(SHAPE, "key", tau_low=1.0, tau_high=6.0, group=8, round_up=1, dtype="float32")
    x, seen = keys(), context()
    packed, query = codec.encode(x, seen), seen.stats["query_abs"].double()
    made, tier_of = codec.decode(packed, seen), torch.zeros(2, 2, 3, 16, dtype=torch.long)
    for b in range(2):
        for n in range(3):
            block = x[b, :, n * 16 : n * 16 + 16].double()
            salience = query[b, :, n] * (block.amax(1) - block.amin(1)) / 3
            unit = sorted(a for a in salience.flatten().tolist() if a > 0)
            median = unit[(len(unit) - 1) // 2]
            for h in range(2):
                for c in range(16):
                    bits = 16 if salience[h, c] > 6 * median else 4 if salience[h, c] > median else 2
                    tier_of[b, h, n, c] = (16, 4, 2).index(bits)
                    for g in range(2):
                        tokens = slice(n * 16 + 8 * g, n * 16 + 8 * g + 8)
                        values = x[b, h, tokens, c].double()
                        if bits < 16:
                            scale = ((values.amax() - values.amin()) / (2**bits - 1)).half().double()
                            zero = values.amin().half().double()
                            codes = ((values - zero) / scale.clamp_min(2.0**-24)).round().clamp(0, 2**bits - 1)
                            values = codes * scale + zero
                        torch.testing.assert_close(made[b, h, tokens, c].double(), values, rtol=2e-3, atol=2e-3)
    got = [packed[name].counts.long() for name in ("raw", "four_codes", "two_codes")]
    assert all(torch.equal(got[tier], (tier_of == tier).sum(-1)) for tier in range(3))
    assert all(int(g.sum()) for g in got), "every tier takes part"


def test_counts_round_up_to_the_better_tier() -> None:
    x, seen = keys(), context()
    fine = counts(MixKVQ(SHAPE, "key", 1.0, 6.0, group=8, round_up=1), x, seen)
    coarse = counts(MixKVQ(SHAPE, "key", 1.0, 6.0, group=8), x, seen)
    assert torch.equal(coarse[0], (fine[0] + 7) // 8 * 8)
    assert torch.equal(coarse[0] + coarse[1], torch.maximum(coarse[0], (fine[0] + fine[1] + 7) // 8 * 8))
    assert {int(n) % 8 for tier in coarse for n in tier.flatten()} == {0}


def test_a_channel_that_no_query_reads_gets_two_bits() -> None:
    """The paper's point: error-only selection spends its bits on the widest channel, whoever asks for it."""
    x, seen = keys(1, 1), context(1, 1)
    seen.stats["query_abs"][..., 15] = 0
    asked = MixKVQ(SHAPE, "key", 1.0, 6.0, group=8, round_up=1).encode(x, seen)
    blind = MixKVQ(SHAPE, "key", 1.0, 6.0, group=8, round_up=1, importance="none").encode(x)
    for packed, exact in ((asked, False), (blind, True)):
        first = packed["raw"].counts[0, :, 0]
        kept = [packed["perm"][0, h, 0, : int(first[h])].tolist() for h in range(2)]
        assert all((15 in channels) is exact for channels in kept)


def test_thresholds_are_of_the_layers_median() -> None:
    """Eight times larger queries change nothing; the raw form does not forgive it."""
    x, seen = keys(), context()
    larger = Context(5, stats={"query_abs": 8 * seen.stats["query_abs"]})
    codec, raw = (MixKVQ(SHAPE, "key", 1.0, 6.0, 8, 1, normalise=form) for form in ("median", "none"))
    assert torch.equal(codec.encode(x, seen)["perm"], codec.encode(x, larger)["perm"])
    assert torch.equal(torch.stack(counts(codec, x, seen)), torch.stack(counts(codec, x, larger)))
    assert int(counts(raw, x, larger)[0].sum()) > int(counts(raw, x, seen)[0].sum())
    one_head = x.clone()
    one_head[:, 1] *= 1e-4  # of the layer, not of the head: a quiet head takes fewer bits
    assert int(counts(codec, one_head, seen)[0][:, 1].sum()) == 0


def test_a_layer_of_constant_channels() -> None:
    x = torch.full((1, 2, 16, 16), 0.5)
    codec = MixKVQ(SHAPE, "key", 0.5, 6.0, group=8)
    assert [int(n.sum()) for n in counts(codec, x, context(1, 1))] == [0, 0, 32]
    x[..., 2] += normal(1, 2, 16)  # one that moves: the median of the positive ones is its own
    assert [int(n.sum()) for n in counts(codec, x, context(1, 1))] == [0, 16, 16]


def test_a_fixed_shape_goes_by_rank() -> None:
    codec = MixKVQ(SHAPE, "key", group=8, full=8, four=0, dtype="bfloat16")
    x, seen = keys(), context()
    packed, salience = codec.encode(x, seen), codec.salience(x, seen)
    assert not any(isinstance(held, Ragged) for held in packed.values())
    assert packed["raw"].shape == (2, 2, 3, 8, 16) and packed["raw"].dtype == torch.bfloat16
    best = salience.topk(8, -1).indices.sort(-1).values
    assert torch.equal(packed["perm"][..., :8].long(), best)
    assert codec.bits_per_value() == pytest.approx((8 * 16 + 8 * (2 + 32 / 8)) / 16 + 8 / 16)
    assert codec.block_bytes() * 2 * 3 == sum(t.numel() * t.element_size() for t in packed.values())


def test_a_head_of_256_channels() -> None:
    shape = Shape(1, 256, 8)
    codec = MixKVQ(shape, "key", 0.0, 0.0, group=8, dtype="float32")
    x = normal(1, 1, 16, 256)
    packed = codec.encode(x, Context(stats={"query_abs": torch.ones(1, 1, 2, 256)}))
    assert packed["raw"].counts.tolist() == [[[256, 256]]]
    assert torch.equal(codec.decode(packed), x)


def test_without_queries_it_says_so() -> None:
    with pytest.raises(
        KVCalError, match=r"layer 5: mixkvq needs the run-time statistic query_abs .*importance \"none\""
    ) as e:
        MixKVQ(SHAPE, "key", group=8).encode(keys(), Context(5))
    assert "\n" not in str(e.value)


def test_expected_bits_are_those_of_the_blocks_it_saw() -> None:
    x, seen = keys(), context()
    codec = MixKVQ(SHAPE, "key", 1.0, 6.0, group=8)
    first, second, _ = (n.double().mean().item() for n in counts(codec, x, seen))
    told = MixKVQ(SHAPE, "key", 1.0, 6.0, group=8, expected=(first, second))
    packed = told.encode(x, seen)
    stored = sum(t.numel() * t.element_size() for held in packed.values() for t in
                 ([held.data, held.counts] if isinstance(held, Ragged) else [held]))  # fmt: skip
    assert told.ragged and told.bits_per_value() == pytest.approx(stored * 8 / x.numel(), rel=2e-3)
    assert codec.bits_per_value() < told.bits_per_value()  # uncalibrated: two bits for all
