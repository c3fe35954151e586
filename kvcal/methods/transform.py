"""Transform coding of what a cache stores: directions by query-weighted energy, bits by reverse water-filling.

Like SQuat it minimises the error of scores, q . (k - k̂), not of keys. Like MixKVQ it gives more bits to what matters
more, but to directions rather than channels, chosen once on calibration text. Grids and the token's norm are HIGGS's.
Under AQUA-KV's predictors it codes their residuals. None of the papers has this combination.

Let S be the second moment of what is stored about a centre, which is taken off. Let W be the second moment of what it
will be multiplied by: the queries of the kv head's group; for values the rows of the output projection. The expected
squared error of scores is tr(W E), E the error's second moment.

The coordinates are U' W^1/2 (x - centre), U the eigenvectors of W^1/2 S W^1/2. In them the error is the sum of the
coordinates' errors, each its energy times the grid's MSE. Bits go where they lower the sum most. A bit more lowers an
MSE by less and less, so the greedy choice is best.

A token's error grows with its distance from the centre. The centre is therefore not the mean of all tokens, but the
mean by the squares of the attention that they get. Some tokens get most of it, such as a text's first "the", and their
values are near 0. About the mean of all tokens they had the error of a vector of the mean's length.

A coordinate has 4 bits at most, and a grid ends at about 3.4 deviations. So the error of the greatest coordinates would
not fall with more bits, and their outliers would be cut. The n coordinates of 4 bits are therefore mixed by a rotation,
divided before by the fourth root of their variance. With divisors f the error is the sum of f^2 times the mean of
variance / f^2, and these divisors are best (Cauchy-Schwarz). They give (sum of deviations)^2 / n instead of the sum of
variances. No grid's end is then met by one coordinate alone. Those of fewer bits are of nearly one variance, and stay
unmixed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Shape, Transform
from kvcal_artifacts.codecs.base import Role
from kvcal_artifacts.codecs.transform import MSE

from .hashing import hashed_normal
from .statistics import Moments, TrainingData

FLOOR = 1e-5  # of the mean: the smallest metric and variance of a direction, so that all have an inverse in float16


@dataclass(frozen=True)
class CalibratedTransform:
    """The transform codec with a basis fitted on text. bits: of the codes, a value, on average; the norm comes on top
    (16 / (H * D)).
    """

    bits: float
    gain: str = "mse"

    def learn(self, data: TrainingData) -> Transform:
        return self.fit(data.shape, data.role, data.moments(attended=True))

    def fit(self, shape: Shape, role: Role, moments: Moments) -> Transform:
        centre = moments.centre()
        return fit_transform(shape, role, moments.spread(centre), moments.metric(), centre, self.bits, self.gain)


def fit_transform(
    shape: Shape, role: Role, spread: Tensor, metric: Tensor, mean: Tensor, bits: float, gain: str
) -> Transform:
    """Fit the basis and the bits of its coordinates. spread, metric: S and W above, float64 (H, D, D); mean: the point
    that S is about, float64 (H, D).
    """
    root, inverse = _roots(metric.cpu())
    value, vector = torch.linalg.eigh(root @ spread.cpu() @ root)
    value, vector = value.flip(-1), vector.flip(-1)  # largest first
    value = value.clamp_min(FLOOR * value.mean(-1, keepdim=True)).clamp_min(1e-6)
    bits_of = allocate(value.sum(0), bits)
    decoder = _mixed(value.sqrt(), vector.mT @ inverse, bits_of)
    return Transform(shape, role, bits_of, decoder.half(), mean.cpu().half(), gain)


def _mixed(deviation: Tensor, direction: Tensor, bits_of: list[int]) -> Tensor:
    """Rows of the decoder (H, D, D): directions (H, D, D) of coordinates of these deviations (H, D), those of most bits
    mixed so that they have unit variance on average.
    """
    rows, count = deviation[..., None] * direction, bits_of.count(max(MSE))
    if count:
        part = deviation[:, :count]
        scale = (part * part.mean(-1, keepdim=True)).sqrt()
        rows[:, :count] = _rotation(count).to(rows) @ (scale[..., None] * direction[:, :count])
    return rows


@cache
def _rotation(size: int) -> Tensor:
    """A rotation (size, size) float64 without zeros, drawn at random from a constant seed."""
    factor, upper = torch.linalg.qr(hashed_normal(size, size, f"transform:{size}").double())
    rotation: Tensor = factor * upper.diagonal().sign()
    return rotation


def _roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """W^1/2 and W^-1/2, W scaled to a mean of 1 on its diagonal over all heads."""
    size = metric.diagonal(dim1=-2, dim2=-1).mean().clamp_min(1e-30)
    value, vector = torch.linalg.eigh(metric / size)
    value = value.clamp_min(FLOOR)
    root, inverse = ((vector * value[:, None] ** power) @ vector.mT for power in (0.5, -0.5))
    return root, inverse


def allocate(variance: Tensor, bits: float) -> list[int]:
    """Bits of each direction, in pairs, `bits` on average: variance (D,), not rising."""
    pairs = variance.unflatten(0, (-1, 2)).sum(1).tolist()
    bits_of = [0] * len(pairs)
    heap = [(-energy * (MSE[0] - MSE[1]), j) for j, energy in enumerate(pairs)]
    heapq.heapify(heap)
    for _ in range(max(1, round(bits * len(pairs)))):
        _, j = heapq.heappop(heap)
        bits_of[j] += 1
        if (b := bits_of[j]) < max(MSE):
            heapq.heappush(heap, (-pairs[j] * (MSE[b] - MSE[b + 1]), j))
    return [b for b in sorted(bits_of, reverse=True) for _ in range(2)]
