"""Scores of a compressed cache against those of full precision, on the same questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcal_artifacts.errors import UsageError

RESAMPLES, SEED, LEVEL = 10_000, 0, 0.95
PART = 1 << 22  # drawn indices that are held at a time


@dataclass(frozen=True)
class Paired:
    """A paired comparison of two runs on the same questions. score, full: mean scores of n questions, compressed and in
    full precision. difference: score - full. low, high: its percentile bootstrap interval at LEVEL, over contexts, of
    which most tasks ask one question each; None of one context, which has no spread. mcnemar: two-sided p-value of
    McNemar's exact test, None where a score is neither 0 nor 1, or a context has several questions.
    """

    score: float
    full: float
    difference: float
    low: float | None
    high: float | None
    n: int
    mcnemar: float | None

    @classmethod
    def of(cls, scores: Sequence[float], full: Sequence[float], per_context: int = 1) -> Paired:
        """Pair the scores of the same questions in the same order. Raises UsageError where there are none.

        per_context: how many questions, one after the other, are of one context. These are not independent: the
        bootstrap draws whole contexts (Field and Welsh 2007), and McNemar's test, which has no clusters, is left out.
        """
        if not scores or len(scores) != len(full) or len(scores) % per_context:
            raise UsageError(
                f"{len(scores)} scores and {len(full)} of full precision: needs one pair per question, and "
                f"{per_context} per context"
            )
        differences = np.subtract(scores, full, dtype="f8")
        contexts = differences.reshape(-1, per_context).mean(1)
        low, high = interval(contexts) if len(contexts) > 1 else (None, None)
        return cls(
            score=float(np.mean(scores)),
            full=float(np.mean(full)),
            difference=float(differences.mean()),
            low=low,
            high=high,
            n=len(scores),
            mcnemar=mcnemar(scores, full) if per_context == 1 else None,
        )


def interval(differences: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean, from RESAMPLES draws of a generator of seed SEED."""
    generator, count = np.random.default_rng(SEED), len(differences)
    rows = max(1, PART // count)
    means = [
        differences[generator.integers(0, count, (min(rows, RESAMPLES - start), count))].mean(1)
        for start in range(0, RESAMPLES, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mcnemar(scores: Sequence[float], full: Sequence[float]) -> float | None:
    """Two-sided p-value of McNemar's exact test: of the questions that one of both answers, as many or more go one way.
    None where a score is neither 0 nor 1.
    """
    if any(score not in (0, 1) for score in (*scores, *full)):
        return None
    worse = sum(right > score for score, right in zip(scores, full, strict=True))
    better = sum(right < score for score, right in zip(scores, full, strict=True))
    count = worse + better
    tail = sum(math.comb(count, k) for k in range(min(worse, better) + 1))
    return float(min(1.0, 2 * tail / 2**count))
