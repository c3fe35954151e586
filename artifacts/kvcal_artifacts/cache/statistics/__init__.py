"""What codecs learn at run time from a row's queries and keys, without depending on how the tokens came in.

Block j of a row is packed when the row has sink + (j + 1) * block + recent tokens. A statistic of that block is one of
exactly so many first real tokens, whether they came in one call or in many, alone or in a batch. Sums are therefore in
fixed-point numbers, where the order of adding does not matter.
"""

from __future__ import annotations

from ...codecs import Shape
from ...errors import KVCalError
from .base import Statistic
from .key_scale import KeyScale
from .query_magnitude import QueryMagnitude
from .subspace import QuerySubspace, QuerySubspaceBeforeRope

STATISTICS: dict[str, type[Statistic]] = {
    s.name: s for s in (QueryMagnitude, KeyScale, QuerySubspace, QuerySubspaceBeforeRope)
}


def statistic(name: str, shape: Shape) -> Statistic:
    """A statistic by the name that codecs ask for, NAME or NAME:ARGUMENT."""
    kind, _, argument = name.partition(":")
    if kind not in STATISTICS:
        raise KVCalError(f"statistic {name!r}: known are {', '.join(STATISTICS)}")
    return STATISTICS[kind](shape, argument)


__all__ = ["STATISTICS", "Statistic", "statistic"]
