"""How much of the contexts that a task was answered from lay in packed blocks.

Prompts shorter than a scheme's exact windows are answered by full precision, and its score says nothing of the scheme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from kvcal_artifacts.cache import KVCalCache

from .perplexity import CacheMaker

OpenCache: TypeAlias = Callable[[], AbstractContextManager[KVCalCache]]  # a CacheMaker is one


@dataclass
class PackedShare:
    """What the caches of a task's answers held when the answer was there. rows: of each row of a batch its tokens, and
    those of them in packed blocks.
    """

    rows: list[tuple[int, int]] = field(default_factory=list)

    def counting(self, maker: CacheMaker) -> OpenCache:
        """The same caches, each of which is counted when it is closed."""

        @contextmanager
        def opened() -> Iterator[KVCalCache]:
            with maker() as cache:
                yield cache
                cache.settle()
                ledger, block = cache.ledger, cache.scheme.windows.block
                counts = zip(ledger.lengths.tolist(), ledger.blocks.tolist(), strict=True)
                self.rows += [(tokens, min(tokens, blocks * block)) for tokens, blocks in counts]

        return opened


def share_of(rows: Sequence[Sequence[int]], name: str, names: Iterable[str]) -> float | None:
    """The share of tokens in packed blocks, from 0 to 1, for the task `name` out of `names`, which were answered
    together; None where there are no tokens.

    rows: of a PackedShare. Names that end in @LENGTH have the rows whose length is nearest to theirs: contexts are some
    tokens shorter, or longer by a question.
    """
    lengths = {length for other in names if (length := _length(other)) is not None}
    length = _length(name)
    if length is not None:
        rows = [row for row in rows if min(lengths, key=lambda one: abs(math.log(max(1, row[0]) / one))) == length]
    tokens = sum(row[0] for row in rows)
    return sum(row[1] for row in rows) / tokens if tokens else None


def _length(name: str) -> int | None:
    length = name.rpartition("@")[2]
    return int(length) if "@" in name and length.isdecimal() else None
