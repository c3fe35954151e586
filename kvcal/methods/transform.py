"""Transform coding of what a cache stores: directions by query-weighted energy, bits by reverse water-filling.

What of the papers is in it: like SQuat it minimises the error of scores, q . (k - k̂), not of keys; like MixKVQ it
gives more bits to what matters more, but to directions rather than channels, chosen once on calibration text; grids and
the token's norm are HIGGS's. Under AQUA-KV's predictors it codes their residuals. None of the papers has this
combination.

With S the covariance of what is stored and W the second moment of what it will be multiplied by (the queries of the kv
head's group; for values the rows of the output projection), the expected squared error of scores is tr(W E), E the
error's second moment. In coordinates U' W^1/2 (x - mean), U the eigenvectors of W^1/2 S W^1/2, it is the sum of the
coordinates' errors, each its variance times the grid's MSE. Bits go where they lower the sum most; a bit more lowers an
MSE by less and less, so the greedy choice is best.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Shape, Transform
from kvcal_artifacts.codecs.base import Role
from kvcal_artifacts.codecs.transform import MSE

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
        return self.fit(data.shape, data.role, data.moments())

    def fit(self, shape: Shape, role: Role, moments: Moments) -> Transform:
        spread, mean = moments.covariance()
        return fit_transform(shape, role, spread, moments.metric(), mean, self.bits, self.gain)


def fit_transform(
    shape: Shape, role: Role, spread: Tensor, metric: Tensor, mean: Tensor, bits: float, gain: str
) -> Transform:
    """Fit the basis and the bits of its coordinates. spread, metric: S and W above, float64 (H, D, D)."""
    root, inverse = _roots(metric.cpu())
    value, vector = torch.linalg.eigh(root @ spread.cpu() @ root)
    value, vector = value.flip(-1), vector.flip(-1)  # largest first
    value = value.clamp_min(FLOOR * value.mean(-1, keepdim=True)).clamp_min(1e-6)
    decoder = value.sqrt()[..., None] * (vector.mT @ inverse)
    return Transform(shape, role, allocate(value.sum(0), bits), decoder.half(), mean.cpu().half(), gain)


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
