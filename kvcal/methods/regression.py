"""Closed-form predictors from sums: ridge, reduced rank, error-compensated 4-bit rounding. All solves in float64.

Sums add up over chunks, devices and processes; the tokens are never held. Inputs carry a constant one as their last
column, so the intercept is one more coefficient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal_artifacts.codecs.predictors import Bias, Linear, Predictor, QuantisedLinear, ReducedRank
from kvcal_artifacts.errors import UsageError

CHUNK = 8192  # tokens a product: float32 sums of this length round at 1e-6, far below the ridge


def product_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums over CHUNK tokens: float64 costs nothing worth having on a CPU; many GPUs are 64 times
    slower.
    """
    return torch.float64 if device.type == "cpu" else torch.float32


@dataclass
class Gram:
    """Sums over tokens: xx = X'X (Cin+1, Cin+1), xy = X'Y (Cin+1, C), yy (C,), count; float64, X with a column of
    ones.
    """

    xx: Tensor
    xy: Tensor
    yy: Tensor
    count: int = 0

    @classmethod
    def empty(cls, inputs: int, outputs: int, device: torch.device) -> Gram:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        return cls(zeros(inputs + 1, inputs + 1), zeros(inputs + 1, outputs), zeros(outputs))

    def add(self, x: Tensor, y: Tensor) -> None:
        """x (n, Cin), y (n, C) float32."""
        exact = product_dtype(x.device)
        for part_x, part_y in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
            wide = torch.nn.functional.pad(part_x.to(exact), (0, 1), value=1.0)
            target = part_y.to(exact)
            self.xx += wide.T @ wide
            self.xy += wide.T @ target
            self.yy += target.double().square().sum(0)
        self.count += x.shape[0]

    def merge(self, other: Gram) -> None:
        """Sums of another process or device."""
        self.xx += other.xx.to(self.xx.device)
        self.xy += other.xy.to(self.xy.device)
        self.yy += other.yy.to(self.yy.device)
        self.count += other.count

    @property
    def mean_x(self) -> Tensor:
        return self.xx[-1, :-1] / self.count

    @property
    def mean_y(self) -> Tensor:
        return self.xy[-1] / self.count

    def centred(self) -> Tensor:
        """Covariance sums of the inputs (Cin, Cin)."""
        return self.xx[:-1, :-1] - self.count * torch.outer(self.mean_x, self.mean_x)


class SharedGram:
    """Sums for many regressions over the same tokens at once: each product of two inputs is taken a single time.

    regressions: (names of the inputs, name of the target) of each; every name stands for C channels. float64 on
    `device`.
    """

    def __init__(
        self, regressions: Iterable[tuple[Sequence[str], str]], channels: int, device: torch.device | str
    ) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.channels, self.count = channels, 0
        self._products: dict[tuple[str, str], Tensor] = {}  # x_a' x_b (C, C), a <= b
        self._totals: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        for inputs, target in regressions:
            pairs = [(a, b) for a in inputs for b in (*inputs, target)]
            self._products |= {(min(pair), max(pair)): zeros(channels, channels) for pair in pairs}
            self._totals |= {name: zeros(channels) for name in (*inputs, target)}
            self._squares[target] = zeros(channels)

    @property
    def names(self) -> list[str]:
        """The names that `add` needs."""
        return list(self._totals)

    def add(self, x: Mapping[str, Tensor]) -> None:
        """Add tokens to the sums. x: name -> (n, C), the same n tokens for all."""
        tokens = min((len(y) for y in x.values()), default=0)
        for start in range(0, tokens, CHUNK):
            part = {name: x[name][start : start + CHUNK] for name in self.names}
            wide = {name: y.to(product_dtype(y.device)) for name, y in part.items()}
            for (a, b), total in self._products.items():
                total += wide[a].T @ wide[b]
            for name, sums in self._totals.items():
                sums += wide[name].double().sum(0)
            for name, sums in self._squares.items():
                sums += wide[name].double().square().sum(0)
        self.count += tokens

    def gram(self, inputs: Sequence[str], target: str) -> Gram:
        """The sums of one regression, inputs side by side in this order."""
        totals = torch.cat([self._totals[name] for name in inputs])
        ones = torch.full((1,), float(self.count), dtype=torch.float64, device=totals.device)
        rows = [torch.cat([self._product(a, b) for b in inputs], 1) for a in inputs]
        xx = torch.cat([torch.cat([*rows, totals[None]]), torch.cat([totals, ones])[:, None]], 1)
        xy = torch.cat([*(self._product(a, target) for a in inputs), self._totals[target][None]])
        return Gram(xx, xy, self._squares[target], self.count)

    def _product(self, a: str, b: str) -> Tensor:
        return self._products[a, b] if a <= b else self._products[b, a].T


def ridge_solution(gram: Gram, ridge: float) -> tuple[Tensor, Tensor]:
    """argmin |XW + b - Y|^2 + lambda |W, b|^2, lambda = ridge * mean of the Gram diagonal, intercept included.

    AQUA-KV Algorithm 1 lines 13 and 17, Appendix A (rate 1e-3). Returns float64 W (Cin, C), b (C,).
    """
    damp = ridge * gram.xx.diagonal().mean()
    system = gram.xx + damp * torch.eye(len(gram.xx), dtype=torch.float64, device=gram.xx.device)
    factor, failed = torch.linalg.cholesky_ex(system)
    if int(failed):
        raise UsageError(
            f"ridge {ridge:g} leaves the normal equations singular ({gram.count} tokens, {len(gram.xx) - 1} inputs); "
            "use a larger --ridge or more --windows"
        )
    solution = torch.cholesky_solve(gram.xy, factor)
    return solution[:-1], solution[-1]


def fit_linear(gram: Gram, ridge: float) -> Predictor:
    weight, bias = ridge_solution(gram, ridge)
    return Linear({"weight": weight.half(), "bias": bias.half()})


def fit_bias(gram: Gram) -> Predictor:
    return Bias({"bias": gram.mean_y.half()})


def fit_reduced_rank(gram: Gram, ridge: float, rank: int) -> Predictor:
    """Ridge solution projected on the leading directions of its predictions (Reinsel and Velu 1998)."""
    weight, _ = ridge_solution(gram, ridge)
    energy = weight.T @ gram.centred() @ weight
    basis = torch.linalg.eigh(energy).eigenvectors[:, -rank:]
    down, up = (weight @ basis).half(), basis.T.contiguous().half()
    bias = gram.mean_y - gram.mean_x @ down.double() @ up.double()
    return ReducedRank({"down": down, "up": up, "bias": bias.half()})


def fit_quantised(gram: Gram, ridge: float) -> Predictor:
    """4-bit rounding of the ridge solution, each input's rounding error compensated by the inputs after it (GPTQ).

    One scale and minimum per output channel. The compensation is the Cholesky form of Frantar et al. 2022, Eq. 3 and 4,
    with the damped input covariance as Hessian; the intercept is refitted for the rounded weights.
    """
    weight, _ = ridge_solution(gram, ridge)
    low, high = weight.amin(0), weight.amax(0)
    scale = ((high - low) / 15).clamp_min(2.0**-24).half().double()
    base = low.half().double()
    hessian = gram.centred()
    damp = ridge * hessian.diagonal().mean() + 1e-12
    hessian = hessian + damp * torch.eye(len(hessian), dtype=torch.float64, device=hessian.device)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    codes = _compensated_codes(weight.clone(), upper, scale, base)
    rounded = codes * scale + base
    bias = gram.mean_y - gram.mean_x @ rounded
    return QuantisedLinear.from_codes(codes.to(torch.uint8), scale, base, bias)


def _compensated_codes(weight: Tensor, upper: Tensor, scale: Tensor, base: Tensor, block: int = 128) -> Tensor:
    """Codes (Cin, C) in input order; errors spread within a block at once, to later blocks in one product."""
    codes = torch.empty_like(weight)
    for start in range(0, len(weight), block):
        stop = min(start + block, len(weight))
        errors = torch.empty_like(weight[start:stop])
        for i in range(start, stop):
            codes[i] = ((weight[i] - base) / scale).round().clamp(0, 15)
            errors[i - start] = (weight[i] - codes[i] * scale - base) / upper[i, i]
            weight[i:stop] -= torch.outer(upper[i, i:stop], errors[i - start])
        weight[stop:] -= upper[start:stop, stop:].T @ errors
    return codes


def explained_variance(gram: Gram, weight: Tensor, bias: Tensor) -> Tensor:
    """1 - residual variance / variance by channel of a linear predictor on the tokens of `gram`, (C,) float64."""
    whole = torch.cat([weight.double(), bias.double()[None]])
    residual = gram.yy - 2 * (whole * gram.xy).sum(0) + (whole * (gram.xx @ whole)).sum(0)
    variance = gram.yy - gram.count * gram.mean_y.square()
    return 1 - residual / variance.clamp_min(1e-30)
