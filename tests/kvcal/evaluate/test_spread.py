"""Paired differences over windows, and Student's t that judges them."""

from __future__ import annotations

from typing import Any

import pytest

from kvcal.evaluate.spread import Difference, apart, few_windows, quantile, ties
from kvcal_artifacts.errors import KVCalError


@pytest.mark.parametrize(
    ("windows", "expected"),
    [(2, 12.706), (3, 4.303), (4, 3.182), (8, 2.3646), (31, 2.042), (32, 2.0395), (61, 2.0003), (10**6, 1.96)],
)
def test_quantiles_are_those_of_the_tables(windows: int, expected: float) -> None:
    assert quantile(windows) == pytest.approx(expected, abs=5e-4)


def test_a_ratio_between_two_and_the_quantile_decides_nothing() -> None:
    """Of eight windows 2.2 standard errors are too few, and 2.4 are enough."""
    assert [Difference(-ratio, 1.0, 8).apart for ratio in (2.2, 2.4)] == [False, True]
    assert [Difference(ratio, 1.0, 2).apart for ratio in (12.0, 13.0)] == [False, True]
    assert (Difference(0.0, 0.0, 8).apart, Difference(0.1, 0.0, 8).apart) == (False, True)
    assert Difference.of([1.0], [2.0]) is None


def test_a_difference_within_the_spread_is_no_order() -> None:
    def row(name: str, *kl: float) -> dict[str, Any]:
        return {"name": name, "kl_windows": list(kl)}

    a, b, c = row("a", 1.0, 2.0, 3.0), row("b", 1.1, 1.9, 3.05), row("c", 1.5, 2.5, 3.6)
    assert apart(a, b) is False
    assert apart(a, c) is True
    assert apart(row("a", 1.0), row("b", 2.0)) is None
    assert ties([a, b, c], a) == ["b"]
    with pytest.raises(KVCalError, match="kl_windows are 3 and 1"):
        apart(a, row("d", 1.0))


def test_few_windows_are_told() -> None:
    assert few_windows(8) is None
    assert (
        "4 windows tell little: two rows are apart only above 3.18 standard errors of their difference, 2.36 at 8 windows"
        in str(few_windows(4))
    )
    assert "one window has no spread" in str(few_windows(1))
