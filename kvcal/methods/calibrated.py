"""Codecs that are learned from text, by name: fitted, layer by layer, to what the layer stores.

Under predictors that is their residuals, which exist only when all layers below are coded. So each of these is of one
layer and one role, and layers share nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvcal_artifacts.cache.statistics.subspace import subspace
from kvcal_artifacts.codecs import Codec, MixKVQ, ResidualVQ, Scaled, Squat
from kvcal_artifacts.errors import UsageError

from ..capture.ranks import ALONE
from ..capture.shards import Gathered, Largest, ShardSums
from .codebooks import Training, train_stage
from .factors import by_queries, channel_factor
from .hashing import spread
from .registry import CODEWORDS, calibrated_name, codec_maker, refuse_factors
from .squat import not_nothing
from .statistics import Moments, TrainingData, taps_of
from .training_vectors import TrainingVectors, is_shared, subtract
from .transform import CalibratedTransform
from .vqkv import head_scale

VECTORS = 128  # at most, for each codeword: twice as many lower the error of vq-2 on `tiny` (keys, values) by 4 %
ASIDE = 32  # one training vector of so many says when a stage is done, and is not trained on
TRAINING = Training(least=3)  # 5 lower it by 2 %, for up to twice the time
BLOCKS = 4096  # at most, whose saliences are looked at for thresholds
FLAT = 12.0  # tau_high over tau_low: see CalibratedTiers
Rule = Literal["scaled", "balanced"]


@runtime_checkable
class Calibrated(Protocol):
    """A maker of codecs that learns their constants from the keys or values of calibration text."""

    def learn(self, data: TrainingData) -> Codec:
        """The codec of one layer's keys or values. Raises UsageError where the text or the shape does not suffice."""


@dataclass(frozen=True)
class CalibratedCodebooks:
    """Residual codebooks (VQKV's) of one layer and role, for all its heads: bits of the codes, a value; size:
    codewords.

    Keys in units of the queries that meet them, values of their head's root mean square, as VQKV here; one band of
    dimensions.
    """

    bits: float
    size: int = CODEWORDS

    def stages(self, dim: int) -> int:
        """The number of stages that comes nearest to the bits, at least one."""
        return max(1, round(self.bits * dim / (self.size.bit_length() - 1)))

    def learn(self, data: TrainingData) -> ResidualVQ:
        label = f"vq:{data.layer}:{data.role}"
        count = min(data.vectors, VECTORS * self.size)
        if count - -(-count // ASIDE) < self.size:
            raise UsageError(
                f"codec vq: {data.vectors} vectors a layer for codebooks of {self.size} codewords; give more "
                "--windows, or "
                f"a smaller size, as vq-{self.bits:g}-k16"
            )
        x, scale = sampled(data, count, label)
        aside = torch.arange(len(x), device=x.device) % ASIDE == 0
        ranks = data.taps.ranks if is_shared(x, self.size) else ALONE
        vectors, holdout = TrainingVectors.of(x[~aside], ranks), x[aside]
        energy, books = float(holdout.double().square().sum()), []
        for stage in range(self.stages(data.shape.dim)):
            with data.carry.timer("train"):
                book, _ = train_stage(vectors, holdout, energy, stage, self.size, f"{label}:{stage}", TRAINING)
                vectors.subtract(book)
                subtract(holdout, book, ranks)
            books.append(book.cpu())
        return ResidualVQ(data.shape, data.role, [range(data.shape.dim)], [torch.stack(books)], scale.cpu())


def sampled(data: TrainingData, count: int, label: str) -> tuple[Tensor, Tensor]:
    """Return so many of the training windows' vectors, evenly strewn, (count, D) float32, divided by a scale, (H, D)
    float16, that gives them a mean square of about 1.
    """
    shape, tokens = data.shape, data.carry.tokens.stop - data.carry.tokens.start
    places = spread(data.vectors, count, label).sort().values
    sums = ShardSums(lambda: _Sampled(Moments(shape, data.taps.device)))
    for stored, batch in data.batches({"q"} if data.role == "key" else (), sums):
        unit = shape.heads * tokens
        edges = torch.tensor([batch.rows.start * unit, batch.rows.stop * unit], device="cpu")
        low, high = torch.searchsorted(places, edges).tolist()
        here = (places[low:high] - batch.rows.start * unit).to(stored.device)
        sums.part.vectors.append(stored.flatten(0, 2)[here])
        sums.part.heads.append(here // tokens % shape.heads)
        sums.part.moments.add(stored)
        data.weighed(sums.part.moments, batch)
    moments = sums.total.moments
    square = moments.square.diagonal(dim1=1, dim2=2) / max(1, moments.count)
    weight = moments.metric().diagonal(dim1=1, dim2=2)
    scale = head_scale(
        "query" if data.role == "key" else "head", square, weight / (square * weight).mean().clamp_min(1e-30)
    )
    assert scale is not None
    return torch.cat(sums.total.vectors) / scale.float()[torch.cat(sums.total.heads)], scale


@dataclass
class _Sampled:
    """Vectors (n, D) of each batch with their heads (n,), and the moments of all."""

    moments: Moments
    vectors: list[Tensor] = field(default_factory=list)
    heads: list[Tensor] = field(default_factory=list)

    def merge(self, other: _Sampled) -> None:
        self.moments.merge(other.moments)
        self.vectors += other.vectors
        self.heads += other.heads


@dataclass(frozen=True)
class CalibratedFactors:
    """A codec without data whose key channels are divided by factors learned from text. Values are stored undivided.

    rule: "scaled": InnerQ section 4.3, the root of the channel's largest magnitude. "balanced": the root of its root
    mean square over that of the queries that meet it.

    Let s^2 be a channel's energy and w that of its queries. Where an error is spread evenly over the scaled channels,
    that of scores is sum f^2 w times sum s^2 / f^2. It is least at f^2 = s / sqrt(w) (Cauchy-Schwarz). A codec that
    searches for scales weighs its channels by w.
    """

    codec: str
    rule: Rule

    def __post_init__(self) -> None:
        refuse_factors(self.codec, self.rule)

    def learn(self, data: TrainingData) -> Codec:
        inner = codec_maker(self.codec)(data.shape, data.role)
        if data.role == "value":
            return inner
        moments = data.moments()
        factor = self._largest(data) if self.rule == "scaled" else self._balance(moments)
        inner = by_queries(inner, moments.metric().diagonal(dim1=1, dim2=2))
        return Scaled(inner, channel_factor(factor).cpu())

    @staticmethod
    def _largest(data: TrainingData) -> Tensor:
        """(H, D) float32."""
        sums = ShardSums(Largest)
        for stored, _ in data.batches(sums=sums):
            sums.part.add(stored.abs().amax((0, 2)))
        assert sums.total.value is not None
        return sums.total.value

    @staticmethod
    def _balance(moments: Moments) -> Tensor:
        """(H, D) float32, about 1 for keys of unit size."""
        weight = moments.metric().diagonal(dim1=1, dim2=2)
        weight = (weight / weight.mean()).clamp_min(1e-12)
        energy = moments.square.diagonal(dim1=1, dim2=2) / max(1, moments.count)
        return (energy / weight).sqrt().float()


@dataclass(frozen=True)
class CalibratedSubspace:
    """SQuat's keys with a subspace from text: the directions of the queries that stored keys meet. codec: squat-B,
    squat-B-gG.

    What it makes up for is the error of a residual, which is the key's own. Singular values are those of one window of
    text.
    """

    codec: str

    def learn(self, data: TrainingData) -> Codec:
        codec = codec_maker(self.codec)(data.shape, data.role)
        if not isinstance(codec, Squat):
            return codec
        gram = data.moments().weight.cpu() / data.carry.train
        directions = not_nothing(subspace(gram, codec.rank).float())
        return Squat(
            codec.inner,
            codec.rank,
            codec.strength,
            codec.channels,
            "calibrated",
            codec.normalise,
            calibrated=directions,
        )


@dataclass(frozen=True)
class CalibratedTiers:
    """MixKVQ's keys at thresholds of the layer's own, such that its codes take `bits` per value on the training
    windows.

    With a salience of A a channel of 2 bits errs by A^2, one of 4 by A^2 / 25, an exact one by nothing. A bit buys
    12/25 A^2 at the lower threshold and A^2 / 300 at the upper one. It buys the same everywhere if the upper threshold
    is 12 times the lower.
    """

    bits: float

    def learn(self, data: TrainingData) -> Codec:
        base = codec_maker("mixkvq")(data.shape, data.role)
        if not isinstance(base, MixKVQ):
            return base
        step, parts = -(-data.vectors // (data.shape.heads * data.shape.block * BLOCKS)), ShardSums(Gathered)
        for stored, batch in data.batches(taps_of(base.stats), parts):
            salience = base.salience(stored, data.context(base, batch))
            parts.part.tensors.append(salience.transpose(1, 2).flatten(0, 1)[::step].transpose(0, 1)[None])
        salience = torch.cat(parts.total.tensors, 2)  # (1, H, blocks, D)
        low, high = -20.0, 20.0
        for _ in range(40):  # powers of two: 2^-40 of them is far below a step of the tiers' sizes
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean(_at(base, middle), salience) > self.bits else (low, middle)
        return _at(base, high)

    @staticmethod
    def _mean(codec: MixKVQ, salience: Tensor) -> float:
        """Bits per value of the codes; exact channels take 16."""
        first, second = codec.bounds(salience)
        return 2 + (12 * float(first.double().mean()) + 2 * float(second.double().mean())) / codec.shape.dim


def _at(base: MixKVQ, power: float) -> MixKVQ:
    """The codec with 2^power as its lower threshold."""
    tau = float(f"{2.0**power:.6g}")
    return MixKVQ.from_state(base.shape, base.role, base.config() | {"tau_low": tau, "tau_high": FLAT * tau}, {})


# The maker of each kind in CALIBRATED, from the parts of a name.
MAKERS: dict[str, Callable[[re.Match[str]], Calibrated]] = {
    "transform-BITS[-debiased]": lambda name: CalibratedTransform(
        float(name["bits"]), "debiased" if name["gain"] else "mse"
    ),
    "vq-BITS[-kCODEWORDS]": lambda name: CalibratedCodebooks(float(name["bits"]), int(name["size"] or CODEWORDS)),
    "mixkvq-BITS": lambda name: CalibratedTiers(float(name["bits"])),
    "squat-BITS[-g128]-calibrated": lambda name: CalibratedSubspace(name["codec"]),
    "CODEC-scaled": lambda name: CalibratedFactors(name["codec"], "scaled"),
    "CODEC-balanced": lambda name: CalibratedFactors(name["codec"], "balanced"),
}


def calibration_of(name: str) -> Calibrated | None:
    """What learns the codec of that name; None for names of other codecs. Raises UsageError for one that cannot be."""
    kind_and_parts = calibrated_name(name)
    if kind_and_parts is None:
        return None
    kind, parts = kind_and_parts
    return MAKERS[kind](parts)
