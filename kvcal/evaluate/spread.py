"""Whether two schemes differ by more than windows do: Student's t of paired differences over the same windows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcal_artifacts.errors import KVCalError

ENOUGH = 8  # windows; with fewer the quantile is so large that only large differences are decided
NORMAL = 1.959964  # two-sided 95 % quantile of the normal distribution
# Two-sided 95 % quantiles of Student's t at 1, 2, ... degrees of freedom, as tables print them;
# 2.3646 has one digit more
QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.3646, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def quantile(windows: int) -> float:
    """The two-sided 95 % quantile of Student's t for the mean of two or more windows: 12.7 at 2, 2.36 at 8, 1.96 at
    many. Beyond the table by the first two terms of its expansion about the normal quantile (Abramowitz and Stegun,
    26.7.5), which are right to three decimals there.
    """
    freedom = windows - 1
    if freedom <= len(QUANTILES):
        return QUANTILES[freedom - 1]
    third, fifth = NORMAL**3, NORMAL**5
    return NORMAL + (third + NORMAL) / (4 * freedom) + (5 * fifth + 16 * third + 3 * NORMAL) / (96 * freedom**2)


def standard_error(numbers: Sequence[float]) -> float:
    """The standard error of the mean of two or more numbers."""
    return statistics.stdev(numbers) / math.sqrt(len(numbers))


@dataclass(frozen=True)
class Difference:
    """A paired difference between two schemes. mean: first less second, in the figure's unit. error: its standard
    error over `windows`, which are the same for both.
    """

    mean: float
    error: float
    windows: int

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> Difference | None:
        """The difference of two figures of each window. None of one window, which has no spread. Raises ValueError
        where the numbers of windows differ.
        """
        differences = [a - b for a, b in zip(first, second, strict=True)]
        if len(differences) < 2:
            return None
        return cls(statistics.fmean(differences), standard_error(differences), len(differences))

    @property
    def ratio(self) -> float:
        """The difference over its standard error, without sign; infinite where all windows differ by the same."""
        if self.error == 0.0:
            return 0.0 if self.mean == 0.0 else math.inf
        return abs(self.mean) / self.error

    @property
    def apart(self) -> bool:
        """Whether the difference is significant at 95 %: its ratio exceeds `quantile`."""
        return self.ratio > quantile(self.windows)


def difference(first: Mapping[str, object], second: Mapping[str, object]) -> Difference | None:
    """The difference in KL of two rows of the same windows, in nats per token; None of one window. Raises KVCalError
    where a row has no `kl_windows`, or another number of them.
    """
    a, b = kl_windows(first), kl_windows(second)
    if len(a) != len(b):
        raise KVCalError(
            f"rows {first.get('name')} and {second.get('name')}: kl_windows are {len(a)} and {len(b)}, must be of the "
            "same windows; measure both in one call"
        )
    return Difference.of(a, b)


def apart(first: Mapping[str, object], second: Mapping[str, object]) -> bool | None:
    """Whether the KL of two rows of the same windows differs by more than their spread explains, at 95 %. None of one
    window, which has no spread. Raises KVCalError as `difference`.
    """
    gap = difference(first, second)
    return None if gap is None else gap.apart


def kl_windows(row: Mapping[str, object]) -> list[float]:
    """The KL of each window of a row, in nats. Raises KVCalError where the row, of a file, has no such numbers."""
    kl = row.get("kl_windows")
    if not isinstance(kl, list) or not all(isinstance(one, (int, float)) for one in kl):
        raise KVCalError(f"row {row.get('name')}: kl_windows must be a list of numbers, measure the row again")
    return kl


def ties(rows: Sequence[Mapping[str, object]], chosen: Mapping[str, object]) -> list[str]:
    """Names of the other rows whose KL is not `apart` from the chosen row's."""
    return [str(row["name"]) for row in rows if row["name"] != chosen["name"] and apart(row, chosen) is False]


def few_windows(windows: int) -> str | None:
    """The line that says how little so many windows tell; None from `ENOUGH` windows on."""
    if windows >= ENOUGH:
        return None
    if windows < 2:
        return f"one window has no spread: differences decide nothing; give --windows {ENOUGH} or more"
    return (
        f"{windows} windows tell little: two rows are apart only above {quantile(windows):.3g} standard errors of "
        f"their difference, {quantile(ENOUGH):.3g} at {ENOUGH} windows; give --windows {ENOUGH} or more"
    )
