"""Transform coding: bits, directions and errors against what theory says of Gaussian data."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kvcal.evaluate.outliers import outlier_twin
from kvcal.methods.composition import Composition
from kvcal.methods.data_free import Preset
from kvcal.methods.registry import codec_maker
from kvcal.methods.statistics import Moments, at_distances
from kvcal.methods.transform import CalibratedTransform, allocate, fit_transform
from kvcal_artifacts import hf
from kvcal_artifacts.codecs import Shape, Transform
from kvcal_artifacts.codecs.transform import MSE
from kvcal_artifacts.errors import KVCalError, UsageError
from tests.support.schemes import tiny

SHAPE = Shape(2, 16, 8)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixed(heads: int, dim: int, decay: float, seed: int = 0) -> Tensor:
    """Covariances with energies decay^j along random directions: float64 (heads, dim, dim)."""
    basis = torch.linalg.qr(gaussian(heads, dim, dim, seed=seed)).Q
    return (basis * decay ** torch.arange(dim, dtype=torch.float64)) @ basis.mT


def drawn(spread: Tensor, mean: Tensor, tokens: int, seed: int = 3) -> Tensor:
    """(1, H, tokens, D) float32 of these covariances and means."""
    factor = torch.linalg.cholesky(spread)
    return (gaussian(len(spread), tokens, spread.shape[1], seed=seed) @ factor.mT + mean[:, None])[None].float()


def weighted_errors(codec: Transform, x: Tensor, metric: Tensor) -> Tensor:
    """e' W e of each token's error, summed over heads: float64 (tokens,) of x (1, H, tokens, D)."""
    error = (codec.decode(codec.encode(x)) - x)[0].double()
    return ((error @ metric) * error).sum(-1).sum(0)


@pytest.mark.parametrize("bits", [0.5, 1, 1.5, 2, 3])
def test_the_greedy_choice_is_the_best_there_is(bits: float) -> None:
    pairs = torch.tensor([9.0, 3.0, 1.1, 0.2, 0.05])
    given = allocate((pairs / 2).repeat_interleave(2), bits)[::2]
    budget = max(1, round(bits * len(pairs)))
    assert sum(given) == budget and given == sorted(given, reverse=True)

    def loss(choice: tuple[int, ...]) -> float:
        return sum(float(energy) * MSE[b] for energy, b in zip(pairs, choice, strict=True))

    best = min(loss(c) for c in itertools.product(range(5), repeat=len(pairs)) if sum(c) == budget)
    assert loss(tuple(given)) == pytest.approx(best)


@pytest.mark.parametrize("bits", [1.5, 2, 3])
def test_weighted_error_is_what_the_formula_says(bits: float) -> None:
    """Sum over directions of energy times the grid's MSE, that of 4 bits balanced, up to the token's norm, which is of
    finite length.
    """
    spread, metric, mean = mixed(2, 16, 0.7), mixed(2, 16, 0.8, seed=1), gaussian(2, 16, seed=2)
    codec = fit_transform(SHAPE, "key", spread, metric, mean, bits, "mse")
    x = drawn(spread, mean, 8192)
    error = (codec.decode(codec.encode(x)) - x)[0].double()
    seen = sum(float(((e @ w) * e).sum(-1).mean()) for e, w in zip(error, metric, strict=True))
    roots = [torch.linalg.cholesky(w) for w in metric]
    energies = torch.stack([torch.linalg.eigvalsh(r.mT @ s @ r).flip(0) for r, s in zip(roots, spread, strict=True)])
    most = codec.bits.count(4)
    expected = float((energies * torch.tensor([MSE[b] for b in codec.bits]))[:, most:].sum())
    expected += MSE[4] * float((energies[:, :most].sqrt().sum(-1).square() / max(1, most)).sum())
    assert seen == pytest.approx(expected, rel=0.15)
    rotated = codec_maker("higgs-2-wide")(SHAPE, "key")
    off = (rotated.decode(rotated.encode(x)) - x)[0].double()
    if bits <= 2:  # fewer bits than HIGGS, a fraction of its error
        assert seen < 0.7 * sum(float(((e @ w) * e).sum(-1).mean()) for e, w in zip(off, metric, strict=True))


def keys_like_gemmas(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Covariance, metric and mean, each of one head of 256, and keys (1, 1, tokens, 256) float32.

    Layers 5, 11 and 17 of Gemma-3-270M: a channel of root mean square 75 among others of 1, one direction with a third
    of the energy that queries see, and tokens that lie far out in it, which a softmax does see.
    """
    energies = 1.0 / torch.arange(1, 257, dtype=torch.float64) ** 2
    energies[0] = 0.5 * energies[1:].sum()
    basis = torch.linalg.qr(gaussian(256, 256, seed=5)).Q
    coordinates = gaussian(tokens, 256, seed=6)
    coordinates[::64, 0] = 5.0
    coordinates[:, 0] /= coordinates[:, 0].square().mean().sqrt()
    channel = torch.ones(256, dtype=torch.float64)
    channel[70] = 75.0
    mean = 0.1 * gaussian(256, seed=7) * channel
    mean[70] = 70.0
    x = (coordinates * energies.sqrt()) @ basis.mT * channel
    spread = x.mT @ x / tokens - x.mean(0)[:, None] * x.mean(0)
    return spread[None], torch.diag(channel**-2)[None], (x.mean(0) + mean)[None], (x + mean)[None, None].float()


def test_more_bits_lower_the_error_of_a_direction_with_most_of_the_energy() -> None:
    """4 bits, the most that a coordinate has, are no floor: it stood at MSE[4] of all energy from 2 bits on."""
    spread, metric, mean, x = keys_like_gemmas(2048)
    energy = float(torch.einsum("hij,hji->", spread, metric))
    errors = {
        bits: weighted_errors(fit_transform(Shape(1, 256, 8), "key", spread, metric, mean, bits, "mse"), x, metric)
        for bits in (2, 3, 3.9)
    }
    means = {bits: float(error.mean()) / energy for bits, error in errors.items()}
    assert means[3.9] < 0.25 * MSE[4] and means[3.9] < 0.6 * means[3] < 0.36 * means[2]


@pytest.mark.parametrize("bits", [2, 3, 3.9])
def test_tokens_far_out_in_one_direction_are_not_cut(bits: float) -> None:
    """A grid of 4 bits ends at 3.4 deviations: at 5 the rest of the strongest direction was lost, 5 times the bound."""
    spread, metric, mean, x = keys_like_gemmas(2048)
    codec = fit_transform(Shape(1, 256, 8), "key", spread, metric, mean, bits, "mse")
    centred = (x - mean[:, None])[0].double()[0, ::64]
    energy = float(((centred @ metric[0]) * centred).sum(-1).mean())
    assert float(weighted_errors(codec, x, metric)[::64].mean()) < MSE[4] * energy


def test_scaling_keys_up_and_queries_down_changes_nothing() -> None:
    """An outlier channel is no outlier to it: relative errors of scores stay what they were."""
    factor = torch.ones(2, 16, dtype=torch.float64)
    factor[:, 3] = factor[:, 11] = 32.0
    spread, metric, mean = mixed(2, 16, 0.8), mixed(2, 16, 0.9, seed=1), gaussian(2, 16, seed=2)
    wide = spread * factor[:, :, None] * factor[:, None]
    narrow = metric / factor[:, :, None] / factor[:, None]
    x = drawn(spread, mean, 2048)
    errors = []
    for s, w, y, unit in ((spread, metric, x, torch.ones_like(factor)), (wide, narrow, x * factor[:, None], factor)):
        codec = fit_transform(SHAPE, "key", s, w, mean * unit, 2, "mse")
        off = (codec.decode(codec.encode(y.float())) - y)[0].double() / unit[:, None]
        errors.append(sum(float(((e @ m) * e).sum(-1).mean()) for e, m in zip(off, metric, strict=True)))
    assert errors[1] == pytest.approx(errors[0], rel=0.05)


def test_moments_are_those_of_torch() -> None:
    x = gaussian(3, 2, 40, 16).float()
    seen = Moments(SHAPE, torch.device("cpu"))
    for part in x.split(1):
        seen.add(part)
    spread, mean = seen.covariance()
    for head in range(2):
        rows = x[:, head].flatten(0, 1).double()
        assert torch.allclose(spread[head], torch.cov(rows.T, correction=0))
        assert torch.allclose(mean[head], rows.mean(0))
    assert torch.equal(seen.metric()[0], torch.eye(16, dtype=torch.float64))
    projection = gaussian(24, 4 * 16, seed=5)
    seen.weigh_output(projection)
    parts = projection.split(16, 1)
    assert torch.allclose(seen.metric()[1], parts[2].T @ parts[2] + parts[3].T @ parts[3])


def test_a_turned_query_scores_keys_before_rope_as_the_model_does() -> None:
    model = tiny("llama")
    site = hf.attention_sites(model)[0]
    q, k = gaussian(1, 4, 6, site.head_dim).float(), gaussian(1, 2, 6, site.head_dim, seed=1).float()
    rope = hf.rope_tables(model, torch.arange(6)[None], torch.float32)
    after_q, after_k = site.rotate(q, *rope), site.rotate(k, *rope)
    drawn_at = torch.rand(6, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 7)
    turned = at_distances(site, q, rope)
    for t, distance in enumerate(drawn_at.long().tolist()):
        assert 0 <= distance <= t
        exact = after_q[0, 0, t] @ after_k[0, 0, t - distance]
        assert float(turned[0, 0, t] @ k[0, 0, t - distance]) == pytest.approx(float(exact), abs=1e-4)


def test_names() -> None:
    made = Composition("transform-2.25", "transform-2-debiased")
    key, value = made.codec(0, 1, "key"), made.codec(0, 1, "value")
    assert key == CalibratedTransform(2.25) and value == CalibratedTransform(2.0, "debiased")
    with pytest.raises(UsageError, match="above 0 to 4"):
        Composition("transform-5", "higgs-2")
    with pytest.raises(UsageError, match="learned from text"):
        Preset("transform-2", "transform-2").scheme(tiny("llama"))


@pytest.mark.parametrize(
    ("bits", "said"),
    [([4] * 15, "needs 16"), ([5] * 16, "needs 16 of 0 to 4"), ([1] * 8 + [2] * 8, "must not rise"), ([0] * 16, "not all"),
     ([3] + [2] * 15, "equal pairs")],
)  # fmt: skip
def test_what_is_refused(bits: list[int], said: str) -> None:
    eye = torch.eye(16).expand(2, 16, 16)
    with pytest.raises(KVCalError, match=said):
        Transform(SHAPE, "key", bits, eye, torch.zeros(2, 16))


def test_matrices_that_do_not_fit_are_refused() -> None:
    with pytest.raises(KVCalError, match="decoder"):
        Transform(SHAPE, "key", [2] * 16, torch.eye(8).expand(2, 8, 8), torch.zeros(2, 16))
    with pytest.raises(KVCalError, match="no inverse"):
        Transform(SHAPE, "key", [2] * 16, torch.zeros(2, 16, 16), torch.zeros(2, 16))


def test_constant_tokens_and_zero() -> None:
    codec = fit_transform(SHAPE, "value", mixed(2, 16, 0.8), mixed(2, 16, 1.0), torch.zeros(2, 16).double(), 2, "mse")
    nothing = torch.zeros(1, 2, 8, 16)
    assert torch.equal(codec.decode(codec.encode(nothing)), nothing)
    same = torch.ones(1, 2, 8, 16)
    made = codec.decode(codec.encode(same))
    assert bool(torch.isfinite(made).all()) and float((made - made[:, :, :1]).abs().max()) < 1e-6


def test_calibration_tokens_that_are_all_alike() -> None:
    seen = Moments(SHAPE, torch.device("cpu"))
    seen.add(torch.full((1, 2, 8, 16), 0.5))
    codec = CalibratedTransform(2).fit(SHAPE, "key", seen)
    assert bool(torch.isfinite(codec.decode(codec.encode(torch.ones(1, 2, 8, 16)))).all())


def test_outlier_twin_is_served_as_well_as_the_model() -> None:
    """Through the whole method: predictors, basis, cache."""
    from kvcal.evaluate.attention_error import attention_errors
    from kvcal_artifacts.cache import KVCalCache
    from tests.support import schemes

    model = tiny("llama")
    twin = outlier_twin(model)
    schemes.ALL["outlier-twin"] = lambda: twin
    ids = schemes.token_ids(2, 68, seed=9)
    found = []
    try:
        for name in ("llama", "outlier-twin"):
            made = schemes.aqua(name, backbone="transform-2", first_layer="", key_inputs=())
            one = schemes.tiny(name)
            errors = attention_errors(one, ids, lambda made=made, one=one: KVCalCache(made, one), step=8)
            assert errors is not None
            found.append(errors.as_dict()["logit_error"])
    finally:
        del schemes.ALL["outlier-twin"]
        schemes.tiny.cache_clear()
        schemes.aqua.cache_clear()
    assert 0 < found[1] == pytest.approx(found[0], rel=0.1)
