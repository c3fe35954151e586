"""Differences to full precision on the same questions: mean, interval, McNemar's test."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest

from kvcal.evaluate.paired import Paired, mcnemar, tango
from kvcal_artifacts.errors import UsageError


def test_mcnemar_by_hand() -> None:
    """Of six questions that only one answers, five go one way: 2 * (1 + 6) / 64."""
    full = [1, 1, 1, 1, 1, 0, 1, 0]
    scores = [0, 0, 0, 0, 0, 1, 1, 0]
    assert mcnemar(scores, full) == pytest.approx(2 * 7 / 64)
    assert mcnemar(full, full) == 1
    assert mcnemar([0.5], [1]) is None


def test_the_interval_is_that_of_the_mean() -> None:
    """Of many questions it is the normal one; the same scores give the same interval."""
    full = [1.0] * 400
    scores = [0.0, 1.0, 1.0, 1.0] * 100
    found = Paired.of(scores, full)
    width = 1.96 * (0.25 * 0.75 / 400) ** 0.5
    assert (found.score, found.full, found.difference, found.n) == (0.75, 1, -0.25, 400)
    assert found.low == pytest.approx(-0.25 - width, abs=0.004)
    assert found.high == pytest.approx(-0.25 + width, abs=0.004)
    assert Paired.of(scores, full) == found


def test_tangos_interval_is_the_published_one() -> None:
    """Of Fagerland, Lydersen and Laake 2014 (Statistics in Medicine 33): 1 and 7 discordant pairs of 21."""
    assert tango(7, 1, 21) == pytest.approx((-0.517, -0.026), abs=5e-4)
    assert tango(1, 7, 21) == pytest.approx((0.026, 0.517), abs=5e-4)
    square = NormalDist().inv_cdf(0.975) ** 2
    assert tango(0, 0, 20) == pytest.approx((-square / (20 + square), square / (20 + square)))
    assert (tango(5, 0, 5)[0], tango(0, 5, 5)[1]) == (-1, 1)


@pytest.mark.parametrize(("count", "worse", "better"), [(5, 0.4, 0.0), (10, 0.2, 0.1), (20, 0.05, 0.0), (20, 0.3, 0.3)])
def test_the_interval_holds_the_difference_as_often_as_it_says(count: int, worse: float, better: float) -> None:
    """Over all outcomes of `count` questions, each with its chance. A bootstrap would have no width in 36 % of the third."""
    held = 0.0
    for lost in range(count + 1):
        for gained in range(count + 1 - lost):
            chance = math.comb(count, lost) * math.comb(count - lost, gained) * worse**lost * better**gained
            low, high = tango(lost, gained, count)
            held += chance * (1 - worse - better) ** (count - lost - gained) * (low <= better - worse <= high)
    assert held > 0.94


def test_where_no_answer_differs_nothing_is_certain() -> None:
    """An interval without width would say that no question ever differs."""
    for count in (2, 5, 164):
        one = Paired.of([1.0] * count, [1.0] * count)
        assert one.low is not None and one.high is not None
        assert one.low < -1 / count < 0 < 1 / count < one.high == pytest.approx(-one.low)
        assert one.differing == 0
    others = Paired.of([0.0, 1.0, 0.25], [0.0, 1.0, 0.25])  # no such bound of scores that are shares
    assert (others.difference, others.low, others.high, others.mcnemar) == (0, None, None, None)
    assert Paired.of([0.1, 0.3, 0.2], [0.2, 0.4, 0.3]).low is None  # nor where all differ by as much
    clustered = Paired.of([1.0] * 10, [1.0] * 10, 5)
    assert (clustered.low, clustered.high) == pytest.approx((0.025**0.5 - 1, 1 - 0.025**0.5))
    assert Paired.of([1.0, 0.0] * 2, [1.0] * 4, 2).low is None
    assert Paired.of([0.25, 0.75, 1.0], [0.5, 0.5, 0.5]).differing == 3


def test_one_question_has_no_interval() -> None:
    one = Paired.of([0.0], [1.0])
    assert (one.difference, one.low, one.high, one.n) == (-1, None, None, 1)


def test_questions_of_one_context_are_drawn_together() -> None:
    """Contexts that are answered as a whole or not at all say as much as one question each; McNemar's test none."""
    by_context = [0.0, 1.0, 1.0, 1.0] * 10
    scores = [score for score in by_context for _ in range(5)]
    clustered, single = Paired.of(scores, [1.0] * 200, 5), Paired.of([0.5 * s for s in by_context], [0.5] * 40)
    assert (clustered.difference, clustered.n, clustered.mcnemar) == (-0.25, 200, None)
    assert clustered.low is not None and clustered.high is not None and single.low is not None
    assert clustered.low == pytest.approx(2 * single.low)
    width = 2 * 1.96 * (0.25 * 0.75 / 40) ** 0.5
    assert clustered.high - clustered.low == pytest.approx(width, rel=0.1)
    one = Paired.of([0.0, 1.0], [1.0, 1.0], 2)
    assert (one.difference, one.low, one.high, one.mcnemar) == (-0.5, None, None, None)
    with pytest.raises(UsageError, match=r"3 scores .* 2 per context"):
        Paired.of([1.0] * 3, [1.0] * 3, 2)


@pytest.mark.parametrize(("scores", "full"), [([], []), ([1.0], [1.0, 0.0])])
def test_what_is_no_pair_is_refused(scores: list[float], full: list[float]) -> None:
    with pytest.raises(UsageError, match="needs one pair per question"):
        Paired.of(scores, full)
