"""Closed-form predictors and the trained one: against textbook solutions, and at the sizes the paper states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvcal.methods import mlp, regression
from kvcal.methods.aqua_kv import PREDICTOR_KINDS
from kvcal.methods.mlp import MLPSettings, fit_mlp
from kvcal.methods.regression import (
    Gram,
    explained_variance,
    fit_bias,
    fit_linear,
    fit_quantised,
    fit_reduced_rank,
    ridge_solution,
)
from kvcal_artifacts.codecs import PREDICTORS, Predictor
from kvcal_artifacts.codecs.predictors import MLP, Bias, Linear, QuantisedLinear, ReducedRank
from kvcal_kernels.packing import unpack

RIDGE = 1e-3
TOKENS, INPUTS, OUTPUTS = 3000, 24, 12


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pairs(
    tokens: int = TOKENS, inputs: int = INPUTS, outputs: int = OUTPUTS, noise: float = 0.3
) -> tuple[Tensor, Tensor]:
    """Inputs as reconstructions are: correlated, of very different scale, not centred."""
    spectrum = 0.8 ** torch.arange(inputs)
    x = (normal(tokens, inputs) * spectrum) @ torch.linalg.qr(normal(inputs, inputs, seed=1)).Q + normal(inputs, seed=2)
    y = x @ normal(inputs, outputs, seed=3) + normal(outputs, seed=4) + noise * normal(tokens, outputs, seed=5)
    return x, y


def gram_of(x: Tensor, y: Tensor) -> Gram:
    gram = Gram.empty(x.shape[1], y.shape[1], x.device)
    gram.add(x, y)
    return gram


def training_error(predictor: Predictor, x: Tensor, y: Tensor) -> float:
    return float((predictor(x) - y).double().square().mean())


def assert_same_sums(left: Gram, right: Gram) -> None:
    assert left.count == right.count
    for name in ("xx", "xy", "yy"):
        assert torch.allclose(getattr(left, name), getattr(right, name), rtol=1e-12, atol=1e-9), name


# Sums


def test_gram_is_the_definition() -> None:
    x, y = pairs()
    gram, wide = gram_of(x, y), torch.cat([x, torch.ones(TOKENS, 1)], 1).double()
    expected = Gram(wide.T @ wide, wide.T @ y.double(), y.double().square().sum(0), TOKENS)
    assert_same_sums(gram, expected)
    assert {gram.xx.dtype, gram.xy.dtype, gram.yy.dtype} == {torch.float64}
    assert torch.allclose(gram.mean_x, x.double().mean(0))
    assert torch.allclose(gram.mean_y, y.double().mean(0))
    centred = (x - x.double().mean(0)).double()
    assert torch.allclose(gram.centred(), centred.T @ centred, atol=1e-8)


@pytest.mark.parametrize("chunk", [1, 7, 1000, TOKENS, 10**6])
def test_gram_sums_over_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = pairs()
    whole = gram_of(x, y)
    if chunk > 1:
        monkeypatch.setattr(regression, "CHUNK", chunk)
        assert_same_sums(gram_of(x, y), whole)
    parts = Gram.empty(INPUTS, OUTPUTS, x.device)
    for part_x, part_y in zip(x.split(max(chunk, 11)), y.split(max(chunk, 11)), strict=True):
        parts.add(part_x, part_y)
    assert_same_sums(parts, whole)


def test_gram_merges_across_processes() -> None:
    x, y = pairs()
    grams = [gram_of(x[i::3], y[i::3]) for i in range(3)]
    grams[0].merge(grams[1])
    grams[0].merge(grams[2])
    assert_same_sums(grams[0], gram_of(x, y))


# Ridge


@pytest.mark.parametrize("ridge", [1e-6, RIDGE, 0.1])
def test_ridge_is_least_squares_of_the_augmented_system(ridge: float) -> None:
    """lambda = ridge * mean of the Gram diagonal, on every diagonal entry, the intercept's too (methods.md)."""
    x, y = pairs()
    weight, bias = ridge_solution(gram_of(x, y), ridge)
    wide = torch.cat([x.double(), torch.ones(TOKENS, 1).double()], 1)
    damp = ridge * wide.square().sum(0).mean()
    system = torch.cat([wide, damp.sqrt() * torch.eye(INPUTS + 1).double()])
    target = torch.cat([y.double(), torch.zeros(INPUTS + 1, OUTPUTS).double()])
    expected = torch.linalg.lstsq(system, target, driver="gelsd").solution
    assert torch.allclose(torch.cat([weight, bias[None]]), expected, rtol=0, atol=1e-8)


def test_ridge_on_inputs_that_do_not_determine_it() -> None:
    x, y = pairs(tokens=10)
    x[:, 3], x[:, 4] = 0, x[:, 5]
    weight, bias = ridge_solution(gram_of(x, y), RIDGE)
    assert bool(torch.isfinite(weight).all())
    assert float(weight[3].abs().max()) == 0
    assert torch.allclose(weight[4], weight[5], atol=1e-9)
    assert bool(torch.isfinite(bias).all())


def test_linear_is_the_ridge_solution_in_16_bits() -> None:
    x, y = pairs()
    gram = gram_of(x, y)
    weight, bias = ridge_solution(gram, RIDGE)
    fitted = fit_linear(gram, RIDGE)
    assert torch.equal(fitted.weights["weight"], weight.half())
    assert torch.equal(fitted.weights["bias"], bias.half())
    assert torch.allclose(fitted(x).double(), x.double() @ weight + bias, atol=0.02)


def test_bias_is_the_mean() -> None:
    x, y = pairs()
    fitted = fit_bias(gram_of(x, y))
    assert torch.allclose(fitted(x[:5]), y.mean(0).expand(5, -1), atol=2e-3)
    assert fitted(x[:5]).shape == (5, OUTPUTS)
    assert fitted(x.view(2, -1, INPUTS)[:, :7]).shape == (2, 7, OUTPUTS)


def test_explained_variance_is_the_definition() -> None:
    x, y = pairs()
    gram = gram_of(x, y)
    for weight, bias in (ridge_solution(gram, RIDGE), (normal(INPUTS, OUTPUTS), normal(OUTPUTS))):
        guess = x.double() @ weight.double() + bias.double()
        residual = (y.double() - guess).square().sum(0)
        expected = 1 - residual / (y.double() - y.double().mean(0)).square().sum(0)
        assert torch.allclose(explained_variance(gram, weight, bias), expected, rtol=1e-7, atol=1e-9)
    mean = explained_variance(gram, torch.zeros(INPUTS, OUTPUTS), gram.mean_y)
    assert float(mean.abs().max()) < 1e-9


# Reduced rank


def test_reduced_rank_is_the_whole_solution_at_full_rank() -> None:
    x, y = pairs()
    gram = gram_of(x, y)
    full, reduced = fit_linear(gram, RIDGE), fit_reduced_rank(gram, RIDGE, OUTPUTS)
    assert training_error(reduced, x, y) == pytest.approx(training_error(full, x, y), rel=0.01)
    product = reduced.weights["down"].double() @ reduced.weights["up"].double()
    assert torch.allclose(product, ridge_solution(gram, RIDGE)[0], atol=5e-3)


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_reduced_rank_beats_truncating_the_weights(rank: int) -> None:
    """What matters is the error of predictions, not of weights: rare directions of the input may go."""
    x, y = pairs()
    gram = gram_of(x, y)
    fitted = fit_reduced_rank(gram, RIDGE, rank)
    assert (fitted.weights["down"].shape, fitted.weights["up"].shape) == ((INPUTS, rank), (rank, OUTPUTS))
    weight, _ = ridge_solution(gram, RIDGE)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    truncated = (u[:, :rank] * s[:rank]) @ v[:rank]
    guess = (x - x.mean(0)).double() @ truncated + gram.mean_y
    error = training_error(fitted, x, y)
    assert error < 0.99 * float((guess - y).square().mean())
    # Eckart and Young on the least-squares predictions: no rank does better than this
    centred = (x - x.mean(0)).double()
    best = centred @ torch.linalg.lstsq(centred, y.double() - gram.mean_y).solution
    u, s, v = torch.linalg.svd(best, full_matrices=False)
    optimal = (u[:, :rank] * s[:rank]) @ v[:rank] + gram.mean_y
    assert error < 1.02 * float((optimal - y).square().mean())


def test_reduced_rank_cannot_exceed_the_outputs() -> None:
    x, y = pairs()
    assert fit_reduced_rank(gram_of(x, y), RIDGE, 100).weights["up"].shape == (OUTPUTS, OUTPUTS)


# Four bits


def rounded_plainly(gram: Gram) -> Predictor:
    weight, _ = ridge_solution(gram, RIDGE)
    low = weight.amin(0).half().double()
    scale = ((weight.amax(0) - weight.amin(0)) / 15).half().double()
    codes = ((weight - low) / scale).round().clamp(0, 15)
    bias = gram.mean_y - gram.mean_x @ (codes * scale + low)
    return QuantisedLinear.from_codes(codes.to(torch.uint8), scale, low, bias)


@pytest.mark.parametrize("inputs", [24, 160])
def test_error_compensated_rounding_beats_plain_rounding(inputs: int) -> None:
    x, y = pairs(inputs=inputs, noise=0.05)
    gram = gram_of(x, y)
    whole = training_error(fit_linear(gram, RIDGE), x, y)
    plain, fitted = rounded_plainly(gram), fit_quantised(gram, RIDGE)
    losses = [training_error(p, x, y) - whole for p in (fitted, plain)]
    assert losses[0] < 0.5 * losses[1]


def test_compensation_across_column_blocks_is_the_same() -> None:
    """Errors spread within blocks of 128 inputs and then to the rest: as if there were one block."""
    x, y = pairs(inputs=300, outputs=5)
    gram = gram_of(x, y)
    hessian = gram.centred() + torch.eye(300).double()
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    weight, _ = ridge_solution(gram, RIDGE)
    base = weight.amin(0)
    scale = (weight.amax(0) - base) / 15
    one, many = (regression._compensated_codes(weight.clone(), upper, scale, base, block) for block in (300, 64))
    assert torch.equal(one, many)


def test_quantised_weights_are_codes_times_scale_plus_min() -> None:
    x, y = pairs(inputs=160)
    fitted = fit_quantised(gram_of(x, y), RIDGE)
    codes = unpack(fitted.weights["codes"], 4, 160)
    assert codes.shape == (OUTPUTS, 160)
    assert int(codes.min()) >= 0 and int(codes.max()) <= 15
    assert set(codes.flatten().tolist()) == set(range(16))
    scale, low, bias = (fitted.weights[name].float() for name in ("scale", "min", "bias"))
    assert torch.equal(fitted.working()["weight"], codes.T.float() * scale + low)
    expected = x @ (codes.T.float() * scale + low) + bias
    assert torch.allclose(fitted(x), expected, atol=1e-4)
    assert fitted.weights["codes"].nbytes == 160 * OUTPUTS / 2


def test_quantised_constant_channel() -> None:
    x, y = pairs()
    y[:, 2] = 3.0
    fitted = fit_quantised(gram_of(x, y), 1e-9)  # more ridge moves some of a constant into the weights
    assert bool(torch.isfinite(fitted(x)).all())
    assert torch.allclose(fitted(x)[:, 2], torch.tensor(3.0), atol=0.01)


# The trained one


def nonlinear(tokens: int = 4096) -> tuple[Tensor, Tensor]:
    x = normal(tokens, 8) * torch.tensor([1.0, 5.0, 0.2, 1.0, 1.0, 1.0, 1.0, 1.0]) + 2 * normal(8, seed=1)
    centred = (x - x.mean(0)) / x.std(0)
    return x, 3 * centred[:, :4].abs() + centred[:, 4:] + 10


def trained(x: Tensor, y: Tensor, chunk: int = 10**6, **settings: int | float | bool) -> Predictor:
    made = MLPSettings(**{"epochs": 25, "rate": 1e-2, "batch": 256} | settings)  # type: ignore[arg-type]
    return fit_mlp(lambda: zip(x.split(chunk), y.split(chunk), strict=True), gram_of(x, y), len(x), made)


@pytest.mark.parametrize("norm", [True, False])
def test_mlp_learns_what_a_linear_map_cannot(norm: bool) -> None:
    x, y = nonlinear()
    fitted = trained(x, y, norm=norm)
    assert isinstance(fitted, MLP)
    assert ("norm_weight" in fitted.weights) == norm
    linear = training_error(fit_linear(gram_of(x, y), 1e-6), x, y)
    assert training_error(fitted, x, y) < (0.75 if norm else 0.4) * linear  # the norm hides each token's scale


def test_mlp_is_the_same_from_the_same_seed() -> None:
    x, y = nonlinear(1024)
    first, second, other = (trained(x, y, epochs=2, seed=seed) for seed in (3, 3, 4))
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name]), name
    assert not torch.equal(first.weights["in_weight"], other.weights["in_weight"])


@pytest.mark.parametrize("norm", [True, False])
def test_scaling_folds_into_the_weights(norm: bool) -> None:
    """On numbers that float16 holds, so that nothing but the algebra is seen."""

    def dyadic(*shape: int, seed: int) -> Tensor:
        return (normal(*shape, seed=seed) * 4).round() / 4

    mean_x, std_x = dyadic(6, seed=0), torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0, 1.0])
    mean_y, std_y = dyadic(3, seed=1), torch.tensor([0.5, 4.0, 1.0])
    weights = {"in_weight": dyadic(6, 6, seed=2), "in_bias": dyadic(6, seed=3)}
    weights |= {"out_weight": dyadic(6, 3, seed=4), "out_bias": dyadic(3, seed=5)}
    if norm:
        weights |= {"norm_weight": dyadic(6, seed=6), "norm_bias": dyadic(6, seed=7)}
    x = normal(50, 6, seed=8)
    scaled = x if norm else (x - mean_x) / std_x
    expected = mlp._forward(scaled, weights) * std_y + mean_y
    folded = MLP(mlp._fold(weights, norm, mean_x, std_x, mean_y, std_y))
    assert torch.allclose(folded(x), expected, atol=1e-4)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("constant", [0.0, 5.0])
def test_mlp_with_a_channel_that_never_changes(norm: bool, constant: float) -> None:
    x, y = nonlinear(1024)
    x[:, 7], y[:, 0] = constant, constant
    fitted = trained(x, y, norm=norm, epochs=3)
    for name, weight in fitted.weights.items():
        assert bool(torch.isfinite(weight).all()), f"{name} does not fit float16"
    assert bool(torch.isfinite(fitted(x)).all())


@pytest.mark.parametrize("chunk", [10**6, 300, 100])
def test_mlp_rate_falls_to_zero_however_the_tokens_arrive(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = torch.optim.Adam.step

    def watched(self: torch.optim.Adam, *args: object) -> object:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args)

    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    x, y = nonlinear(1200)
    trained(x, y, chunk, epochs=3, rate=1e-2)
    assert rates[0] == pytest.approx(1e-2)
    assert rates == sorted(rates, reverse=True), "the rate rises again: more steps than the schedule has"
    assert rates[-1] < 2e-3


# Sizes

Shapes = dict[str, tuple[int, ...]]
STORED: dict[str, tuple[type[Predictor], Callable[[int, int, int], Shapes], str]] = {
    "bias": (Bias, lambda i, c, r: {"bias": (c,)}, ""),
    "linear": (Linear, lambda i, c, r: {"weight": (i, c), "bias": (c,)}, ""),
    "reduced-rank": (ReducedRank, lambda i, c, r: {"down": (i, r), "up": (r, c), "bias": (c,)}, ""),
    "linear-4bit": (
        QuantisedLinear,
        lambda i, c, r: {"codes": (c, i // 2), "scale": (c,), "min": (c,), "bias": (c,)},
        "codes",
    ),
    "mlp-no-norm": (
        MLP,
        lambda i, c, r: {"in_weight": (i, 2 * c), "in_bias": (2 * c,), "out_weight": (2 * c, c), "out_bias": (c,)},
        "",
    ),
}
STORED["mlp"] = (
    MLP,
    lambda i, c, r: STORED["mlp-no-norm"][1](i, c, r) | {"norm_weight": (i,), "norm_bias": (i,)},
    "",
)


def stored(kind: str, inputs: int, outputs: int, rank: int) -> Predictor:
    """A predictor of these sizes that holds nothing."""
    made, shapes, in_bytes = STORED[kind]
    names = shapes(inputs, outputs, rank).items()
    dtypes = {n: torch.uint8 if n == in_bytes else torch.float16 for n, _ in names}
    return made({n: torch.empty(shape, dtype=dtypes[n], device="meta") for n, shape in names})


@pytest.mark.parametrize("kind", PREDICTOR_KINDS)
def test_what_is_fitted_is_what_is_counted(kind: str) -> None:
    x, y = pairs(tokens=200)
    gram = gram_of(x, y)
    fitted = {
        "bias": lambda: fit_bias(gram),
        "linear": lambda: fit_linear(gram, RIDGE),
        "reduced-rank": lambda: fit_reduced_rank(gram, RIDGE, 3),
        "linear-4bit": lambda: fit_quantised(gram, RIDGE),
        "mlp": lambda: trained(x, y, epochs=1),
        "mlp-no-norm": lambda: trained(x, y, epochs=1, norm=False),
    }[kind]()
    counted = stored(kind, INPUTS, OUTPUTS, 3)
    assert type(fitted) is type(counted) is PREDICTORS[fitted.name]
    assert {n: (w.shape, w.dtype) for n, w in fitted.weights.items()} == {
        n: (w.shape, w.dtype) for n, w in counted.weights.items()
    }
    assert fitted.nbytes == counted.nbytes


@pytest.mark.parametrize(
    ("kind", "mebibytes"), [("linear", 162), ("mlp", 540), ("reduced-rank", 68), ("linear-4bit", 41)]
)
def test_sizes_of_the_paper_at_llama_3_2_3b(kind: str, mebibytes: float) -> None:
    """Table 1: 28 layers of which 27 are predicted, C = 1024, K from K and V from [V; K], rank 256."""
    c = 1024
    size = 27 * sum(stored(kind, inputs, c, c // 4).nbytes for inputs in (c, 2 * c))
    assert size / 2**20 == pytest.approx(mebibytes, abs=1)
