"""Differences to full precision on the same questions: mean, bootstrap interval, McNemar's test."""

from __future__ import annotations

import pytest

from kvcal.evaluate.paired import Paired, mcnemar
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


def test_the_same_answers_have_no_difference() -> None:
    found = Paired.of([0.0, 1.0, 0.25], [0.0, 1.0, 0.25])
    assert (found.difference, found.low, found.high, found.mcnemar) == (0, 0, 0, None)


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
