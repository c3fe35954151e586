"""How much of the contexts that a task was answered from lay in packed blocks.

Prompts shorter than a scheme's exact windows are answered by full precision, and its score says nothing of the scheme.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.storage.eviction import EvictingLedger

from .calls import packed_blocks
from .perplexity import CacheMaker
from .row_ends import Reading


class OpenCache(Protocol):
    """Opens a cache that answers. length: of the context that is asked for, in tokens; 0: of no certain length. copied:
    copies of it answer, behind its last call. readings: a list that is filled within the block, with what each row's
    answer came from, where rows end before the cache's last call; None: all of it.
    """

    def __call__(
        self, length: int = 0, copied: bool = False, readings: list[Reading] | None = None
    ) -> AbstractContextManager[KVCalCache]: ...


@dataclass
class PackedShare:
    """What the caches of a task's answers held before the last call of the model, row by row up to the row's own end.

    rows: a tuple for each row of a batch. It has the length of contexts that was asked for (0: none was), and the row's
    tokens. The third is how many of these no call can read as they were: those in packed blocks, and evicted ones.
    """

    rows: list[tuple[int, int, int]] = field(default_factory=list)

    def counting(self, maker: CacheMaker) -> OpenCache:
        """The same caches, each of which is counted when it is closed."""

        @contextmanager
        def opened(
            length: int = 0, copied: bool = False, readings: list[Reading] | None = None
        ) -> Iterator[KVCalCache]:
            with maker() as cache:
                yield cache
                rows = _counts(cache, copied) if readings is None else [_count(cache, one) for one in readings]
                self.rows += [(length, *row) for row in rows]

        return opened


def _count(cache: KVCalCache, reading: Reading) -> tuple[int, int]:
    """The tokens of a row, and how many of them were in packed blocks or evicted before the call of a reading."""
    blocks = packed_blocks(cache.scheme, reading.before)
    return reading.tokens, min(blocks * cache.scheme.windows.block, reading.tokens)


def _counts(cache: KVCalCache, with_last: bool) -> list[tuple[int, int]]:
    """The tokens of each row, and how many of them were in packed blocks or evicted before the last call.

    That call may have packed more, which nothing reads. with_last: a copy of the cache does.
    """
    cache.settle()
    ledger, windows = cache.ledger, cache.scheme.windows
    tokens, plan = ledger.lengths, cache.forward.begun
    if not with_last and plan is not None and plan.packed is not None:
        blocks = plan.packed
    elif isinstance(ledger, EvictingLedger):  # blocks' worth of tokens that left the recent window: packed, or evicted
        blocks = ledger.passed
    else:  # a device's steps by itself have no plan on the host
        blocks = ledger.blocks
    changed = blocks * windows.block
    return list(zip(tokens.tolist(), torch.minimum(changed, tokens).tolist(), strict=True))


def share_of(rows: Sequence[Sequence[int]], name: str) -> float | None:
    """The share of tokens in packed blocks, from 0 to 1, for the task `name`; None where there are no tokens.

    rows: of a PackedShare. A name that ends in @LENGTH has the rows of contexts of that length, if any are. lm-eval's
    contexts come without a length: all of a task count for each of its lengths.
    """
    length = name.rpartition("@")[2]
    chosen = [row for row in rows if str(row[0]) == length] or rows
    tokens = sum(row[1] for row in chosen)
    return sum(row[2] for row in chosen) / tokens if tokens else None
