"""Which codec each place gets under a budget of bytes, for the least sum of costs: an exact multiple-choice
knapsack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcal_artifacts.errors import UsageError


@dataclass(frozen=True)
class Option:
    """A codec for one place: the bytes that it takes, and what it costs in quality (not negative, finite)."""

    name: str
    size: int
    cost: float


def solve(places: Sequence[Sequence[Option]], budget: int) -> list[Option]:
    """One option a place, of sizes that add up to at most `budget`, with the least sum of costs. Of equal sums the
    smaller, then the first listed.

    A table over what may be spent, in units of the sizes' greatest common divisor. Raises UsageError where not even the
    smallest options fit.
    """
    if (least := least_size(places)) > budget:
        raise UsageError(f"--max-bits: the smallest codecs of all layers take {least:,} bytes, of {budget:,} allowed")
    unit = math.gcd(*(option.size for options in places for option in options)) or 1
    capacity = budget // unit
    best: dict[int, float] = {0: 0.0}
    taken: list[Mapping[int, Option]] = []  # by place: what was spent with it -> the option
    for options in places:
        grown: dict[int, float] = {}
        chosen: dict[int, Option] = {}
        for spent, total in sorted(best.items()):
            for option in options:
                after, cost = spent + option.size // unit, total + option.cost
                if after <= capacity and cost < grown.get(after, math.inf):
                    grown[after], chosen[after] = cost, option
        best = _undominated(grown)
        taken.append(chosen)
    spent = min(best, key=lambda after: (best[after], after))
    result = []
    for by_spent in reversed(taken):
        option = by_spent[spent]
        result.append(option)
        spent -= option.size // unit
    return result[::-1]


def least_size(places: Sequence[Sequence[Option]]) -> int:
    """What the smallest options of all places take together."""
    return sum(min(option.size for option in options) for options in places)


def _undominated(states: Mapping[int, float]) -> dict[int, float]:
    """Those that no cheaper state beats."""
    best: dict[int, float] = {}
    lowest = math.inf
    for spent, total in sorted(states.items()):
        if total < lowest:
            best[spent], lowest = total, total
    return best
