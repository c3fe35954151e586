"""Scores of a compressed cache against those of full precision, on the same questions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from kvcal_artifacts.errors import UsageError

RESAMPLES, SEED, LEVEL = 10_000, 0, 0.95
PART = 1 << 22  # drawn indices that are held at a time
ROUNDING = 1e-12  # what sums of equal differences may be apart by
HALVINGS = 60  # of [-1, 1], until the ends of an interval are exact

Differences = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Paired:
    """A paired comparison of two runs on the same questions. score, full: mean scores of n questions, compressed and in
    full precision. difference: score - full. low, high: the interval of it at LEVEL, as `interval_of`. mcnemar:
    two-sided p-value of McNemar's exact test, None where a score is neither 0 nor 1, or a context has several
    questions. differing: on how many questions the two scores differ.
    """

    score: float
    full: float
    difference: float
    low: float | None
    high: float | None
    n: int
    mcnemar: float | None
    differing: int

    @classmethod
    def of(cls, scores: Sequence[float], full: Sequence[float], per_context: int = 1) -> Paired:
        """Pair the scores of the same questions in the same order. Raises UsageError where there are none.

        per_context: how many questions, one after the other, are of one context. These are not independent: the
        interval is over contexts, and McNemar's test, which has no clusters, is left out.
        """
        if not scores or len(scores) != len(full) or len(scores) % per_context:
            raise UsageError(
                f"{len(scores)} scores and {len(full)} of full precision: needs one pair per question, and "
                f"{per_context} per context"
            )
        differences = np.subtract(scores, full, dtype="f8")
        low, high = interval_of(scores, full, per_context)
        return cls(
            score=float(np.mean(scores)),
            full=float(np.mean(full)),
            difference=float(differences.mean()),
            low=low,
            high=high,
            n=len(scores),
            mcnemar=mcnemar(scores, full) if per_context == 1 else None,
            differing=int(np.count_nonzero(differences)),
        )


def interval_of(
    scores: Sequence[float], full: Sequence[float], per_context: int = 1
) -> tuple[float, float] | tuple[None, None]:
    """The interval at LEVEL of the mean difference of these scores, of which contexts have `per_context` each.

    One question per context and scores of 0 or 1: Tango's score interval (`tango`), which has a width where no score
    differs, too. Else the percentile bootstrap over the contexts' means (of several questions a cluster bootstrap,
    Field and Welsh 2007). A bootstrap of equal means would have no width, and claim certainty. Where scores of 0 or 1
    are all the same, Clopper and Pearson's bound on the share of contexts with a difference takes its place. It is
    1 - 0.025 ** (1 / contexts), on both sides. (None, None) for other equal means, and for one context.
    """
    means = np.subtract(scores, full, dtype="f8").reshape(-1, per_context).mean(1)
    if len(means) == 1:
        return None, None
    if binary(scores, full):
        if per_context == 1:
            worse, better = discordant(scores, full)
            return tango(worse, better, len(scores))
        if list(scores) == list(full):
            bound = 1 - ((1 - LEVEL) / 2) ** (1 / len(means))
            return -bound, bound
    return bootstrap(means) if np.ptp(means) > ROUNDING else (None, None)


def tango(worse: int, better: int, count: int) -> tuple[float, float]:
    """Tango's score interval at LEVEL of (better - worse) / count, the difference of two paired proportions.

    worse, better: pairs of `count` in which only the second, or only the first, is 1. All differences that the score
    test does not reject (Tango 1998, Statistics in Medicine 17, 891-908). With neither it is z² / (count + z²) on both
    sides.
    """
    quantile, difference = NormalDist().inv_cdf((1 + LEVEL) / 2), (better - worse) / count

    def score(delta: float) -> float:
        """The test's statistic, which falls with delta: excess over its deviation if the difference were delta."""
        linear = (2 * count + worse - better) * delta - worse - better
        root = math.sqrt(max(0.0, linear**2 + 8 * count * worse * delta * (1 - delta)))
        rate = (root - linear) / (4 * count)  # of `worse`, the likeliest under that difference
        variance, excess = count * (2 * rate + delta * (1 - delta)), better - worse - count * delta
        return excess / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, excess)

    return (
        _falls_below(score, quantile, -1.0, difference),
        _falls_below(score, -quantile, difference, 1.0),
    )


def _falls_below(function: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Where between low and high a falling function passes a level; the nearer end where it does not."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > level else (low, middle)
    return high


def bootstrap(differences: Differences) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean, from RESAMPLES draws of a generator of seed SEED."""
    generator, count = np.random.default_rng(SEED), len(differences)
    rows = max(1, PART // count)
    means = [
        differences[generator.integers(0, count, (min(rows, RESAMPLES - start), count))].mean(1)
        for start in range(0, RESAMPLES, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def binary(scores: Sequence[float], full: Sequence[float]) -> bool:
    """Whether all scores are 0 or 1."""
    return all(score in (0, 1) for score in (*scores, *full))


def discordant(scores: Sequence[float], full: Sequence[float]) -> tuple[int, int]:
    """How many questions are answered worse than in full precision, and how many better."""
    worse = sum(right > score for score, right in zip(scores, full, strict=True))
    return worse, sum(right < score for score, right in zip(scores, full, strict=True))


def mcnemar(scores: Sequence[float], full: Sequence[float]) -> float | None:
    """Two-sided p-value of McNemar's exact test: of the questions that one of both answers, as many or more go one way.
    None where a score is neither 0 nor 1.
    """
    if not binary(scores, full):
        return None
    worse, better = discordant(scores, full)
    count = worse + better
    tail = sum(math.comb(count, k) for k in range(min(worse, better) + 1))
    return float(min(1.0, 2 * tail / 2**count))
