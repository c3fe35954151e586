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

from .codebooks import Training, subtract, train_stage
from .factors import by_queries, channel_factor
from .hashing import spread
from .registry import CODEWORDS, backbone, learned_name, refuse_factors
from .statistics import Moments, Seen, taps_of
from .transform import TransformBackbone
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
    size: int = CODEWORDS

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
        refuse_factors(self.codec, self.rule)

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


# The maker of each kind in LEARNED, from the parts of a name.
MAKERS: dict[str, Callable[[re.Match[str]], Learned]] = {
    "transform-BITS[-debiased]": lambda name: TransformBackbone(
        float(name["bits"]), "debiased" if name["gain"] else "mse"
    ),
    "vq-BITS[-kCODEWORDS]": lambda name: CodebookBackbone(float(name["bits"]), int(name["size"] or CODEWORDS)),
    "mixkvq-BITS": lambda name: TierBackbone(float(name["bits"])),
    "squat-BITS[-g128]-calibrated": lambda name: SubspaceBackbone(name["codec"]),
    "CODEC-scaled": lambda name: FactorBackbone(name["codec"], "scaled"),
    "CODEC-balanced": lambda name: FactorBackbone(name["codec"], "balanced"),
}


def learned(name: str) -> Learned | None:
    """What learns the codec of that name; None for names of other codecs. Raises UsageError for one that cannot be."""
    kind_and_parts = learned_name(name)
    if kind_and_parts is None:
        return None
    kind, parts = kind_and_parts
    return MAKERS[kind](parts)
