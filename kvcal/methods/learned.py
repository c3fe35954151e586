"""Codecs that are learned from text, by name: fitted, layer by layer, to what the layer stores.

Under predictors that is their residuals, which exist only when all layers below are coded: so each of these is of one layer
and one role, and nothing is shared by layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Codec, MixKVQ, ResidualVQ, Scaled, Squat
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.statistics import subspace

from .backbones import backbone
from .codebooks import Training, subtract, train_stage
from .factors import by_queries, channel_factor, no_factors
from .hashing import spread
from .observed import taps_of
from .seen import Seen
from .transform import NAME as TRANSFORM
from .transform import Moments, transform_backbone
from .vqkv import head_scale

VECTORS = 128  # at most, for each codeword: twice as many lower the error of vq-2 on `tiny` (keys, values) by 4 %
ASIDE = 32  # one training vector of so many says when a stage is done, and is not trained on
TRAINING = Training(least=3)  # 5 lower it by 2 %, for up to twice the time
BLOCKS = 4096  # at most, whose saliences are looked at for thresholds
FLAT = 12.0  # tau_high over tau_low: see TierBackbone
Rule = Literal["scaled", "balanced"]


@runtime_checkable
class Learned(Protocol):
    """What makes a codec of what calibration shows."""

    def learn(self, seen: Seen) -> Codec:
        """The codec of one layer's keys or values. Raises UsageError where the text or the shape does not suffice."""


@dataclass(frozen=True)
class CodebookBackbone:
    """Residual codebooks (VQKV's) of one layer and role, for all its heads: bits of the codes, a value; size: codewords.

    Keys in units of the queries that meet them, values of their head's root mean square, as VQKV here; one band of dimensions.
    """

    bits: float
    size: int = 256

    def stages(self, dim: int) -> int:
        """As many as come nearest to the bits, at least one."""
        return max(1, round(self.bits * dim / (self.size.bit_length() - 1)))

    def learn(self, seen: Seen) -> ResidualVQ:
        label = f"vq:{seen.layer}:{seen.role}"
        count = min(seen.vectors, VECTORS * self.size)
        if count - -(-count // ASIDE) < self.size:
            raise UsageError(
                f"codec vq: {seen.vectors} vectors a layer for codebooks of {self.size} codewords; give more --windows, or "
                f"a smaller size, as vq-{self.bits:g}-k16"
            )
        x, scale = sampled(seen, count, label)
        aside = torch.arange(len(x), device=x.device) % ASIDE == 0
        x, held = x[~aside], x[aside]
        energy, books = float(held.double().square().sum()), []
        for stage in range(self.stages(seen.shape.dim)):
            with seen.carry.timer("train"):
                book, _ = train_stage(x, held, energy, stage, self.size, f"{label}:{stage}", TRAINING)
                subtract(x, book)
                subtract(held, book)
            books.append(book.cpu())
        return ResidualVQ(seen.shape, seen.role, [range(seen.shape.dim)], [torch.stack(books)], scale.cpu())


def sampled(seen: Seen, count: int, label: str) -> tuple[Tensor, Tensor]:
    """So many of the training windows' vectors, evenly strewn, (count, D) float32, divided by a scale, (H, D) float16, that
    gives them a mean square of about 1.
    """
    shape, tokens = seen.shape, seen.carry.tokens.stop - seen.carry.tokens.start
    places = spread(seen.vectors, count, label).sort().values
    taken, heads, found = [], [], Moments(shape, torch.device("cpu"))
    for stored, batch in seen.batches({"q"} if seen.role == "key" else ()):
        unit = shape.heads * tokens
        edges = torch.tensor([batch.rows.start * unit, batch.rows.stop * unit])
        low, high = torch.searchsorted(places, edges).tolist()
        here = (places[low:high] - batch.rows.start * unit).to(stored.device)
        taken.append(stored.flatten(0, 2)[here])
        heads.append(here // tokens % shape.heads)
        found = found if found.count else Moments(shape, stored.device)
        found.add(stored)
        seen.weighed(found, batch)
    square = found.square.diagonal(dim1=1, dim2=2) / max(1, found.count)
    weight = found.metric().diagonal(dim1=1, dim2=2)
    scale = head_scale(
        "query" if seen.role == "key" else "head", square, weight / (square * weight).mean().clamp_min(1e-30)
    )
    assert scale is not None
    return torch.cat(taken) / scale.float()[torch.cat(heads)], scale


@dataclass(frozen=True)
class FactorBackbone:
    """A codec without data whose key channels are divided by factors learned from text; values are stored as they are.

    rule: "scaled": InnerQ section 4.3, the root of the channel's largest magnitude. "balanced": the root of its root mean
    square over that of the queries that meet it. Where an error is spread evenly over the scaled channels, that of scores is
    sum f^2 w times sum s^2 / f^2 (s^2: a channel's energy, w: its queries'), least at f^2 = s / sqrt(w) (Cauchy-Schwarz).
    A codec that searches for scales weighs its channels by w.
    """

    codec: str
    rule: Rule

    def __post_init__(self) -> None:
        if (found := no_factors(self.codec)) is not None:
            why, bare = found
            other = f"{self.codec}, or factors with codes along channels, as higgs-2-wide-{self.rule}"
            take = f"{bare}-{self.rule}" if bare else other
            raise UsageError(f"codec '{self.codec}-{self.rule}': {why}; take {take}")

    def learn(self, seen: Seen) -> Codec:
        inner = backbone(self.codec)(seen.shape, seen.role)
        if seen.role == "value":
            return inner
        found = seen.moments()
        factor = self._largest(seen) if self.rule == "scaled" else self._balance(found)
        inner = by_queries(inner, found.metric().diagonal(dim1=1, dim2=2))
        return Scaled(inner, channel_factor(factor).cpu())

    @staticmethod
    def _largest(seen: Seen) -> Tensor:
        """(H, D) float32."""
        return torch.stack([stored.abs().amax((0, 2)) for stored, _ in seen.batches()]).amax(0)

    @staticmethod
    def _balance(found: Moments) -> Tensor:
        """(H, D) float32, about 1 for keys of unit size."""
        weight = found.metric().diagonal(dim1=1, dim2=2)
        weight = (weight / weight.mean()).clamp_min(1e-12)
        energy = found.square.diagonal(dim1=1, dim2=2) / max(1, found.count)
        return (energy / weight).sqrt().float()


@dataclass(frozen=True)
class SubspaceBackbone:
    """SQuat's keys with a subspace from text: the directions of the queries that stored keys meet. codec: squat-B, squat-B-gG.

    What it makes up for is the error of a residual, which is the key's own. Singular values are those of one window of text.
    """

    codec: str

    def learn(self, seen: Seen) -> Codec:
        made = backbone(self.codec)(seen.shape, seen.role)
        if not isinstance(made, Squat):
            return made
        gram = seen.moments().weight.cpu() / seen.carry.train
        own = subspace(gram, made.rank).float()
        return Squat(made.inner, made.rank, made.strength, made.channels, "calibrated", made.normalise, calibrated=own)


@dataclass(frozen=True)
class TierBackbone:
    """MixKVQ's keys at thresholds of the layer's own, such that its codes take `bits` a value on the training windows.

    With a salience of A a channel of 2 bits errs by A^2, one of 4 by A^2 / 25, an exact one by nothing; a bit buys the same
    everywhere if it buys 12/25 A^2 at the lower threshold and A^2 / 300 at the upper one, so that is 12 times the lower.
    """

    bits: float

    def learn(self, seen: Seen) -> Codec:
        base = backbone("mixkvq")(seen.shape, seen.role)
        if not isinstance(base, MixKVQ):
            return base
        step, parts = -(-seen.vectors // (seen.shape.heads * seen.shape.block * BLOCKS)), []
        for stored, batch in seen.batches(taps_of(base.stats)):
            salience = base.salience(stored, seen.context(base, batch))
            parts.append(salience.transpose(1, 2).flatten(0, 1)[::step].transpose(0, 1)[None])
        salience = torch.cat(parts, 2)  # (1, H, blocks, D)
        low, high = -20.0, 20.0
        for _ in range(40):  # powers of two: 2^-40 of them is far below a step of the tiers' sizes
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean(_at(base, middle), salience) > self.bits else (low, middle)
        return _at(base, high)

    @staticmethod
    def _mean(codec: MixKVQ, salience: Tensor) -> float:
        """Bits a value of the codes; exact channels take 16."""
        first, second = codec.bounds(salience)
        return 2 + (12 * float(first.double().mean()) + 2 * float(second.double().mean())) / codec.shape.dim


def _at(base: MixKVQ, power: float) -> MixKVQ:
    """The codec with 2^power as its lower threshold."""
    tau = float(f"{2.0**power:.6g}")
    return MixKVQ.from_state(base.shape, base.role, base.config() | {"tau_low": tau, "tau_high": FLAT * tau}, {})


def _codebooks(found: re.Match[str]) -> Learned:
    size, bits = int(found["size"] or 256), float(found["bits"])
    if not 2 <= size <= 65536 or size & (size - 1):
        raise UsageError(f"codec {found[0]!r}: a codebook has a power of two from 2 to 65536 codewords")
    if not 0 < bits <= 16:
        raise UsageError(f"codec {found[0]!r}: residual codebooks take above 0 to 16 bits")
    return CodebookBackbone(bits, size)


def _tiers(found: re.Match[str]) -> Learned:
    if not 2 <= (bits := float(found["bits"])) <= 16:
        raise UsageError(f"codec {found[0]!r}: tiers of 2, 4 and 16 bits make 2 to 16 bits")
    return TierBackbone(bits)


def _subspace(found: re.Match[str]) -> Learned:
    backbone(found["codec"])  # refuses bits that SQuat is not named with
    return SubspaceBackbone(found["codec"])


def _factors(found: re.Match[str]) -> Learned:
    if learned(found["codec"]) is not None:
        raise UsageError(f"codec {found[0]!r}: {found['codec']} learns its own units or tiers; take it without factors")
    return FactorBackbone(found["codec"], "scaled" if found["rule"] == "scaled" else "balanced")


def _transform(found: re.Match[str]) -> Learned:
    made = transform_backbone(found[0])
    assert made is not None
    return made


@dataclass(frozen=True)
class Family:
    """Names of one kind. example: one of them."""

    example: str
    pattern: re.Pattern[str]
    make: Callable[[re.Match[str]], Learned]


# By how they read. Adding one here adds its example to the contract tests.
LEARNED = {
    "transform-BITS[-debiased]": Family("transform-2.5", TRANSFORM, _transform),
    "vq-BITS[-kCODEWORDS]": Family("vq-2", re.compile(r"vq-(?P<bits>\d+(\.\d+)?)(-k(?P<size>\d+))?"), _codebooks),
    "mixkvq-BITS": Family("mixkvq-3", re.compile(r"mixkvq-(?P<bits>\d+(\.\d+)?)"), _tiers),
    "squat-BITS[-g128]-calibrated": Family(
        "squat-2-calibrated", re.compile(r"(?P<codec>squat-\d(-g128)?)-calibrated"), _subspace
    ),
    "CODEC-scaled": Family("inner-2-symmetric-scaled", re.compile(r"(?P<codec>.+)-(?P<rule>scaled)"), _factors),
    "CODEC-balanced": Family("higgs-2-wide-balanced", re.compile(r"(?P<codec>.+)-(?P<rule>balanced)"), _factors),
}


def learned(name: str) -> Learned | None:
    """What learns the codec of that name; None for names of other codecs. Raises UsageError for one that cannot be."""
    for family in LEARNED.values():
        if (found := family.pattern.fullmatch(name)) is not None:
            return family.make(found)
    return None
