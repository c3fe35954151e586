"""What `kvcal recommend` is asked for: a limit of bits, or one of KL. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcal_artifacts.errors import UsageError

MOST_KL = 0.01  # nats per token, where no limit is given: the lowest class of `kvcal plan`


@dataclass(frozen=True)
class Limit:
    """The limit of a choice: the smallest KL of at most `bits` stored bits per value, or the fewest bits whose KL is at
    most `kl` nats per token. A standard error is added to the KL as a margin; `kvcal.evaluate.spread` tests two
    schemes.
    """

    bits: float | None = None
    kl: float | None = None

    def __post_init__(self) -> None:
        if self.bits is not None and self.kl is not None:
            raise UsageError(f"--max-bits {self.bits:g} and --max-kl {self.kl:g}: give one of the two")
        for name, value in (("bits", self.bits), ("kl", self.kl)):
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"--max-{name} {value:g}: must be positive and finite")
        if self.bits is None and self.kl is None:
            object.__setattr__(self, "kl", MOST_KL)

    def __str__(self) -> str:
        return f"--max-bits {self.bits:g}" if self.bits is not None else f"--max-kl {self.kl:g}"
