"""Codecs learned from what a layer stores: names, what is learned against numpy and brute force, units, what is
refused.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcal.calibrate.driver import fit
from kvcal.capture.scan import TapBatch, WholeModel
from kvcal.capture.shards import Shards
from kvcal.evaluate.attention_error import attention_errors
from kvcal.evaluate.outliers import outlier_twin
from kvcal.methods.aqua_kv import AquaKV
from kvcal.methods.base import Carry
from kvcal.methods.calibrated import (
    CalibratedCodebooks,
    CalibratedFactors,
    CalibratedSubspace,
    CalibratedTiers,
    calibration_of,
)
from kvcal.methods.composition import Composition, DataFreeComposition
from kvcal.methods.data_free import Preset
from kvcal.methods.factors import channel_factor
from kvcal.methods.registry import CALIBRATED, codec_maker
from kvcal.methods.statistics import TrainingData
from kvcal.report.timing import PhaseTimer
from kvcal_artifacts import load_bundle, load_cache
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import MixKVQ, Predicted, ResidualVQ, Role, Scaled, Shape, Squat, Uniform
from kvcal_artifacts.codecs.squat import check_directions
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.scheme import Windows
from tests.support import schemes
from tests.support.architectures import build
from tests.support.models_fixture import SUFFIX

SHAPE = Shape(2, 16, 32)
SINK, TOKENS, GROUP = 4, 128, 2  # coded tokens of a window; query heads a kv head


class Given:
    """Stands for LayerTaps: windows of given keys, values and queries (N, heads, T, D), some at a time, as after RoPE."""

    rope, device = None, torch.device("cpu")

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.q, self.k, self.site = q, k, SimpleNamespace()

    def batches(self, want: set[str], frame: str, rows: slice, sums: Any = None) -> Any:
        found = self._batches(want, rows)
        shards = Shards(len(self.k), 3)
        return found if sums is None else sums.over(found, shards, rows, lambda phase: contextlib.nullcontext())

    def _batches(self, want: set[str], rows: slice) -> Any:
        for start in range(0, rows.stop, 3):
            here = slice(start, min(start + 3, rows.stop))
            q, k = (x[here] if name in want else None for name, x in (("q", self.q), ("k", self.k)))
            yield TapBatch(here, q, k, None)


def shown(k: Tensor, q: Tensor, role: Role = "key", train: int = 7) -> TrainingData:
    """k (N, H, T, D), q (N, H * group, T, D): the first windows are fitted on; sinks and later windows hold NaN."""
    k, q = k.clone(), q.clone()
    k[:, :, :SINK] = float("nan")
    k[train:], q[train:] = float("nan"), float("nan")
    carry = Carry(train, slice(SINK, SINK + TOKENS), SHAPE, PhaseTimer(), 4)
    return TrainingData(1, role, Windows(SINK, 16, SHAPE.block), "post_rope", Given(q, k), carry)  # type: ignore[arg-type]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def usual(unit: Tensor | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys of falling energy over channels, queries of another; unit (D,): keys times it, queries by it."""
    unit = torch.ones(SHAPE.dim) if unit is None else unit
    k = normal(8, SHAPE.heads, SINK + TOKENS + 9, SHAPE.dim, seed=seed) * 0.8 ** torch.arange(SHAPE.dim) * unit
    q = normal(8, SHAPE.heads * GROUP, SINK + TOKENS + 9, SHAPE.dim, seed=seed + 1) / unit
    return k, q * (1 + torch.arange(SHAPE.dim) % 3)


def coded(k: Tensor) -> Tensor:
    """What shown() gives as stored, of the training windows."""
    return k[:7, :, SINK : SINK + TOKENS]


def score_error(codec: Any, k: Tensor, q: Tensor) -> float:
    """Mean square of q . (k - k̂) over all training queries of the kv head's group."""
    error = (codec.decode(codec.encode(coded(k))) - coded(k)).movedim(1, 0).flatten(1, 2)
    wide = q[:7].unflatten(1, (SHAPE.heads, GROUP)).movedim(1, 0).flatten(1, 3)
    return float((wide @ error.mT).square().mean())


# Names.


def test_names() -> None:
    assert calibration_of("vq-2.5") == CalibratedCodebooks(2.5) and calibration_of("vq-2-k16") == CalibratedCodebooks(
        2.0, 16
    )
    assert calibration_of("mixkvq-2.5") == CalibratedTiers(2.5)
    assert calibration_of("squat-3-g128-calibrated") == CalibratedSubspace("squat-3-g128")
    assert calibration_of("innerq-small-plain-scaled") == CalibratedFactors("innerq-small-plain", "scaled")
    assert calibration_of("higgs-2-wide-debiased-balanced") == CalibratedFactors("higgs-2-wide-debiased", "balanced")
    assert [calibration_of(name) for name in ("higgs-2", "mixkvq", "mixkvq-8-16", "squat-2", "nonsense")] == [None] * 5
    made = Composition("vq-2", "higgs-2", ("0=higgs-4",))
    assert made.learns and not Composition("mixkvq-8-16", "kivi-2").learns
    assert made.codec(0, 4, "key")(SHAPE, "key").name == "higgs"  # type: ignore[operator]
    for family in CALIBRATED.values():
        assert calibration_of(family.example) is not None


def test_tiers_of_a_fixed_size_need_no_data() -> None:
    key, value = (
        DataFreeComposition("mixkvq-8-0", "mixkvq-8-0").codec(0, 1, role)(SHAPE, role) for role in ("key", "value")
    )
    assert isinstance(key, MixKVQ) and (key.full, key.four, key.ragged) == (8, 0, False)
    assert isinstance(value, Uniform) and value.bits == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vq-2-k100", "a power of two from 2 to 65536"),
        ("vq-0", "above 0 to 16 bits"),
        ("mixkvq-1.5", "2 to 16 bits"),
        ("squat-9-calibrated", "codec 'squat-9' is not known"),
        ("kivi-2-scaled", "codes each key channel by itself, where a factor changes nothing"),
        ("squat-2-balanced", "codes each key channel by itself"),
        ("mixkvq-balanced", "codes each key channel by itself"),
        ("higgs-2-channel-balanced", "codes each key channel by itself"),
        ("exact-16-scaled", "codes each key channel by itself"),
        ("innerq-base-scaled", "take innerq-base-plain-scaled"),
        ("vq-2-scaled", "vq-2 learns its own units or tiers"),
        ("transform-2-balanced", "transform-2 learns its own units or tiers"),
        ("mixkvq-2.5-scaled", "mixkvq-2.5 learns its own units or tiers"),
        ("nothing-scaled", "codec 'nothing' is not known; `kvcal names codec` lists all"),
        ("vqkv", "codebooks of residuals are vq-2"),
        ("squat", "with a subspace from text squat-2-calibrated"),
        ("innerq", "with factors of residuals innerq-base-plain-scaled"),
    ],
)  # fmt: skip
def test_names_that_are_refused(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        Composition(name, "higgs-2")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", [family.example for family in CALIBRATED.values()])
def test_what_is_learned_is_no_preset(name: str) -> None:
    with pytest.raises(UsageError, match=rf"learned from text: fit it with `kvcal fit-predictors --residual {name}`"):
        Preset("kivi-2", "kivi-2", per_layer=(f"0:keys={name}",)).scheme(schemes.tiny("llama"))


# Codebooks.


def test_codebooks_code_as_the_public_library_does() -> None:
    """With our codewords; and its sums of them are ours."""
    published = pytest.importorskip("vector_quantize_pytorch")  # machines with a GPU may lack it
    k, q = usual()
    codec = CalibratedCodebooks(2.0).learn(shown(k, q))
    assert isinstance(codec, ResidualVQ) and codec.scale is not None
    assert [tuple(book.shape) for book in codec.codebooks] == [(4, 256, 16)]
    public = published.ResidualVQ(dim=16, num_quantizers=4, codebook_size=256).eval()
    for layer, book in zip(public.layers, codec.codebooks[0], strict=True):
        layer._codebook.embed.copy_(book.float()[None])  # type: ignore[union-attr]
        layer._codebook.initted.fill_(True)  # type: ignore[union-attr]
    scale = codec.scale.float()[:, None]
    x = coded(k)[:1]
    with torch.no_grad():
        theirs = public((x / scale).flatten(0, 2)[None])[0].view_as(x) * scale
    assert torch.allclose(codec.decode(codec.encode(x)), theirs, atol=1e-5)


def test_codebooks_are_of_the_training_tokens() -> None:
    """Five times as many bits as a Gaussian channel: a few per cent of the error of integers at the same bits; nothing
    of NaN sinks and held-out windows (see shown) got in.
    """
    k, q = usual()
    codec = CalibratedCodebooks(2.0).learn(shown(k, q))
    assert codec.bits_per_value() == 2.0
    plain, turned = codec_maker("uniform-2-channel")(SHAPE, "key"), codec_maker("higgs-2-wide-debiased")(SHAPE, "key")
    error = score_error(codec, k, q)
    assert 0 < error < 0.8 * score_error(turned, k, q) < 0.8 * score_error(plain, k, q)


def test_codebooks_of_points_that_repeat_are_exact() -> None:
    points = normal(1, SHAPE.heads, 16, SHAPE.dim).half().float()
    k = points.repeat(8, 1, (SINK + TOKENS + 9) // 16 + 1, 1)[:, :, : SINK + TOKENS + 9]
    codec = CalibratedCodebooks(2.0, 256).learn(shown(k, usual()[1]))
    made = codec.decode(codec.encode(coded(k)))
    assert float((made - coded(k)).abs().max()) < 2e-3


@pytest.mark.parametrize("size", [16, pytest.param(256, marks=pytest.mark.slow)])
def test_codebooks_of_a_layer_of_zeros(size: int) -> None:
    k, q = usual()
    codec = CalibratedCodebooks(2.0, size).learn(shown(k * 0, q))
    assert float(codec.decode(codec.encode(coded(k) * 0)).abs().max()) == 0


def test_a_subspace_of_no_queries_is_one_that_a_bundle_may_hold() -> None:
    k, q = usual()
    for queries in (q * 0, q * 1e-9, q):
        learned = CalibratedSubspace("squat-2").learn(shown(k, queries))
        assert isinstance(learned, Squat) and learned.calibrated is not None
        check_directions(learned.calibrated)
        again = Squat.from_state(SHAPE, "key", learned.config(), learned.tensors())
        assert again.calibrated is not None and torch.equal(again.calibrated, learned.calibrated)
    with pytest.raises(KVCalError, match="no direction is longer than 0"):
        check_directions(torch.zeros(2, 5, 16))


def test_factors_of_the_largest_keys_are_those_that_a_bundle_may_hold() -> None:
    assert float(channel_factor(torch.tensor([[1.0, 3e9, 1e-9]])).max()) == 4096
    assert float(channel_factor(torch.tensor([[1.0, 1e7]])).max()) < 4096


def test_too_few_vectors_for_a_codebook() -> None:
    k, q = usual()
    with pytest.raises(UsageError, match=r"1792 vectors a layer for codebooks of 4096 codewords; give more --windows"):
        CalibratedCodebooks(2.0, 4096).learn(shown(k, q))


@pytest.mark.parametrize("name", ["vq-2", "higgs-2-wide-balanced"])
def test_scaling_keys_up_and_queries_down_changes_nothing(name: str) -> None:
    """Powers of two: the codes are the same to the bit, so no outlier channel is one to them."""
    unit = torch.ones(SHAPE.dim)
    unit[3], unit[11] = 64.0, 0.25
    made = calibration_of(name)
    assert made is not None
    codes = []
    for k, q in (usual(), usual(unit)):
        codec = made.learn(shown(k, q))
        packed = codec.encode(coded(k))
        codes.append({part: packed[part] for part in packed if "codes" in part})
    assert codes[0].keys() == codes[1].keys() and len(codes[0])
    for part, own in codes[0].items():
        same = float((own == codes[1][part]).double().mean())
        assert same > 0.97, (part, same)  # factors are float16: a root of 64 is, one of another square is rounded


# Factors.


def test_scaled_factors_are_the_root_of_the_largest() -> None:
    k, q = usual()
    codec = CalibratedFactors("inner-3-symmetric", "scaled").learn(shown(k, q))
    assert isinstance(codec, Scaled) and codec.factor is not None
    expected = [[float(coded(k)[:, h, :, c].abs().max()) ** 0.5 for c in range(16)] for h in range(2)]
    assert np.allclose(codec.factor.float().numpy(), expected, rtol=2**-10)


@pytest.mark.parametrize("rule", ["scaled", "balanced"])
def test_a_search_behind_factors_weighs_channels_by_queries(rule: str) -> None:
    """Mean squares of the training windows' queries over the head's mean; a codec that searches for nothing has none."""
    k, q = usual(torch.linspace(0.1, 8, 16))
    codec = CalibratedFactors("inner-3-symmetric", rule).learn(shown(k, q))  # type: ignore[arg-type]
    assert isinstance(codec, Scaled) and isinstance(codec.inner, Uniform) and codec.inner.weight is not None
    squares = q[:7].unflatten(1, (SHAPE.heads, GROUP)).square().mean((0, 2, 3)).double()
    expected = (squares / squares.mean(-1, keepdim=True)).clamp_min(1e-4)
    assert torch.allclose(codec.inner.weight.double(), expected, rtol=2e-3)
    for name in ("inner-3-symmetric-max", "uniform-4", "higgs-2"):
        plain = CalibratedFactors(name, rule).learn(shown(k, q))  # type: ignore[arg-type]
        assert isinstance(plain, Scaled) and "weight" not in plain.inner.tensors()


def test_balanced_factors_are_the_best_there_are() -> None:
    """No other factors have a lower sum f^2 w times sum s^2 / f^2, and the score error of a rotated code is what it
    says.
    """
    k, q = usual(torch.linspace(0.1, 8, 16))
    codec = CalibratedFactors("higgs-2-wide", "balanced").learn(shown(k, q))
    assert isinstance(codec, Scaled) and codec.factor is not None
    energy = coded(k).square().mean((0, 2)).double()
    weight = q[:7].unflatten(1, (SHAPE.heads, GROUP)).square().mean((0, 2, 3)).double()

    def loss(factor: Tensor) -> float:
        return float((factor.square() * weight).sum() * (energy / factor.square()).sum())

    own = codec.factor.double()
    for seed in range(50):
        other = own * torch.exp(0.1 * normal(2, 16, seed=seed).double())
        assert loss(other) > loss(own)
    plain = score_error(codec_maker("higgs-2-wide")(SHAPE, "key"), k, q)
    assert score_error(codec, k, q) == pytest.approx(plain * loss(own) / loss(torch.ones(2, 16)), rel=0.25)
    assert score_error(codec, k, q) < 0.5 * plain


def test_values_have_no_factors() -> None:
    seen = replace(shown(*usual()), role="value")
    for rule in ("scaled", "balanced"):
        assert CalibratedFactors("innerq-hybrid-plain", rule).learn(seen).describe() == (  # type: ignore[arg-type]
            codec_maker("innerq-hybrid")(SHAPE, "value").describe()
        )


# SQuat.


def test_the_subspace_is_that_of_the_queries() -> None:
    """Against numpy's singular values of all queries of a window's length."""
    k, q = usual()
    codec = CalibratedSubspace("squat-2").learn(shown(k, q))
    assert isinstance(codec, Squat) and codec.calibrated is not None and codec.subspace == "calibrated"
    assert codec.stats == frozenset()  # nothing of run time
    for head in range(SHAPE.heads):
        rows = q[:7].unflatten(1, (SHAPE.heads, GROUP))[:, head].flatten(0, 2).double().numpy()
        _, size, right = np.linalg.svd(rows / 7**0.5, full_matrices=False)
        expected = (size[:5, None] * right[:5]).T @ (size[:5, None] * right[:5])
        own = codec.calibrated[head].double().numpy()
        assert np.allclose(own.T @ own, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_it_moves_errors_to_where_queries_do_not_look() -> None:
    k, q = usual()
    low = normal(1, 1, 5, 16, seed=9)  # queries of five directions only
    q = normal(8, SHAPE.heads * GROUP, SINK + TOKENS + 9, 5, seed=4) @ low[0, 0]
    codec = CalibratedSubspace("squat-2").learn(shown(k, q))
    assert score_error(codec, k, q) < 0.8 * score_error(codec_maker("kivi-2")(SHAPE, "key"), k, q)


# MixKVQ.


def tier_counts(codec: MixKVQ, seen: TrainingData) -> tuple[float, float]:
    """Mean channels a head in the first two tiers, block by block and channel by channel."""
    full = four = blocks = 0
    for stored, batch in seen.batches({"q"}):
        salience = codec.salience(stored, seen.context(codec, batch))
        for row in salience.transpose(1, 2).flatten(0, 1):  # a block: (H, D)
            unit = sorted(row.flatten().tolist())[(row.numel() - 1) // 2]
            for head in row.tolist():
                first, second = (
                    -(-sum(a > tau * unit for a in head) // 8) * 8 for tau in (codec.tau_high, codec.tau_low)
                )
                full, four, blocks = full + first, four + max(first, second) - first, blocks + 1
    return full / blocks, four / blocks


@pytest.mark.parametrize("bits", [2.0, 2.5, 3.0, 5.0])
def test_thresholds_take_the_bits_that_were_asked_for(bits: float) -> None:
    k, q = usual(2.0 ** normal(16, seed=5))
    seen = shown(k, q)
    codec = CalibratedTiers(bits).learn(seen)
    assert isinstance(codec, MixKVQ) and codec.ragged
    assert codec.tau_high == pytest.approx(12 * codec.tau_low)
    full, four = tier_counts(codec, seen)
    taken = (16 * full + 4 * four + 2 * (16 - full - four)) / 16
    assert bits - 0.35 <= taken <= bits  # tiers are multiples of 8 channels of 16


def test_the_ratio_of_thresholds_is_the_best() -> None:
    """Others at no fewer bits leave more of the salience: A^2 in 2 bits, A^2 / 25 in 4."""
    salience = torch.exp(3 * normal(1, 4, 400, 64, seed=6))

    def at(ratio: float, bits: float) -> tuple[float, float]:
        """Error and bits at the highest threshold of that many bits."""
        for power in np.linspace(8, -8, 400):
            low, high = 2.0**power, ratio * 2.0**power
            share = [float((salience > tau).double().mean()) for tau in (high, low)]
            taken = 2 + 12 * share[0] + 2 * share[1]
            if taken >= bits:
                kept = torch.where(salience > high, 0.0, torch.where(salience > low, salience**2 / 25, salience**2))
                return float(kept.mean()), taken
        raise AssertionError

    best = at(12, 4)[0]
    assert best < min(at(ratio, 4)[0] for ratio in (2, 4, 30, 100))


# Whole.


def test_predicted_outlier_channels_break_higgs_and_not_these() -> None:
    """Through the method, predictors and the cache: logits err as much on the outlier twin as on the model."""
    model = schemes.tiny("llama")
    twin = outlier_twin(model)
    schemes.ALL["outlier-twin"] = lambda: twin
    ids, found = schemes.token_ids(2, 68, seed=9), {}
    try:
        for codec in ("higgs-2-wide-debiased", "higgs-2-wide-debiased-balanced", "vq-2-k16"):
            for name in ("llama", "outlier-twin"):
                made, one = schemes.aqua(name, backbone=codec, first_layer=""), schemes.tiny(name)
                errors = attention_errors(one, ids, lambda made=made, one=one: KVCalCache(made, one), step=8)  # type: ignore[misc]
                assert errors is not None
                found[codec, name] = errors.as_dict()["logit_error"]
    finally:
        del schemes.ALL["outlier-twin"]
        schemes.tiny.cache_clear()
        schemes.aqua.cache_clear()
    plain, *others = ("higgs-2-wide-debiased", "higgs-2-wide-debiased-balanced", "vq-2-k16")
    assert found[plain, "outlier-twin"] > 2 * found[plain, "llama"]
    for codec in others:
        assert 0 < found[codec, "outlier-twin"] == pytest.approx(found[codec, "llama"], rel=0.2)


def test_what_lies_behind_a_predictor() -> None:
    """The factor divides the residual, not the prediction; codebooks are each layer's own."""
    layers = schemes.aqua("llama", backbone="higgs-2-wide-balanced", first_layer="vq-2-k16").layers
    kinds = [type(pair.key.inner if isinstance(pair.key, Predicted) else pair.key) for pair in layers if pair]
    assert kinds == [ResidualVQ, Scaled, Scaled]
    books = [schemes.aqua("llama", backbone="vq-2-k16", first_layer="").layers[i] for i in range(3)]
    held = [pair.key.tensors() for pair in books if pair]
    names = [next(name for name in one if name.endswith("codebooks.0")) for one in held]
    assert len({one[name].data_ptr() for one, name in zip(held, names, strict=True)}) == 3


EXAMPLES = [family.example for family in CALIBRATED.values()]


@pytest.mark.parametrize(
    ("name", "device"),
    [("vq-2-k16", "cpu"), *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in EXAMPLES)],
)
def test_two_fits_on_a_device_are_alike_and_generate_there(name: str, device: str, tmp_path: Path) -> None:
    """On a GPU in bfloat16; the bundle then serves the model on a CPU, too."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = build("Llama").requires_grad_(False).to(device, dtype)
    text: Any = SimpleNamespace(
        train=schemes.token_ids(10, 132, seed=1), holdout=schemes.token_ids(2, 132, seed=2), source="random",
        sha256="0" * 64, ids_sha256="0" * 64, tokens_read=0, bos=False, column=None,
    )  # fmt: skip
    method = AquaKV(backbone=name, first_layer="", sink=4, recent=16, block=32)
    made = [
        fit(
            method, WholeModel(model), text, tmp_path / f"{number}{SUFFIX}", model_record={}, revision=None,
            device=torch.device(device),
        )
        for number in range(2)
    ]  # fmt: skip
    assert made[0].path.read_bytes() == made[1].path.read_bytes()
    assert made[0].bundle.metrics["key_relative_error"] < 0.6
    ids = schemes.token_ids(2, 120, seed=3)
    for place, kind in dict.fromkeys(((device, dtype), ("cpu", torch.float32))):
        served = model.to(place, kind)
        with load_cache(load_bundle(made[0].path), served) as cache:
            out = served.generate(
                ids.to(place), past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0
            )
            assert out.shape == (2, 128) and cache.nbytes("packed") > 0
            assert bool(torch.isfinite(served(out[:, -1:], past_key_values=cache).logits).all())
