"""What a plot draws quality against: stored bits, or the size of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """A figure that plots draw quality against. of: the figure of a row of `kvcal compare`; label: of the axis."""

    of: Callable[[Mapping[str, Any]], float]
    label: str


BITS = Cost(lambda row: float(row["bits_per_value"]), "stored bits per value")
SIZE = Cost(
    lambda row: float(row["bytes_at_length_16_bit"]) / 1e6,
    "MB of one sequence, exact tokens and resident bytes included",
)
