"""Which tokens stay exact, which are packed together, and which are evicted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import KVCalError


@dataclass(frozen=True)
class Windows:
    """Which tokens stay exact: the `sink` first ones and at least the `recent` newest ones of a row.

    These are in the model's dtype; the rest is packed `block` tokens at a time.
    """

    sink: int = 4
    recent: int = 128
    block: int = 32

    def __post_init__(self) -> None:
        for name, least in (("sink", 0), ("recent", 0), ("block", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise KVCalError(f"window {name} = {value!r}: must be an integer of at least {least}")


@dataclass(frozen=True)
class HeavyHitters:
    """Token selection before compression: H2O (Zhang et al. 2023).

    Of n tokens a row keeps keep * n: the share `heavy` of them because they got the most attention, the rest because
    they are the newest. All heads and layers keep the same tokens.
    """

    keep: float = 0.2
    heavy: float = 0.5

    def __post_init__(self) -> None:
        for name, least in (("keep", "above 0"), ("heavy", "at least 0")):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value <= 1 or (name == "keep" and value == 0):
                raise KVCalError(f"selection {name} = {value!r}: must be a number {least}, at most 1")
            object.__setattr__(self, name, float(value))

    def budget(self, tokens: int) -> tuple[int, int]:
        """How many of so many tokens stay in all, and how many of those as heavy hitters."""
        total = math.floor(self.keep * tokens + 1e-9)  # 0.29 * 100 is 28.999999999999996
        return total, math.floor(self.heavy * total + 1e-9)
