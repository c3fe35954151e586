"""Items of work that ranks share, each done whole by one of them: batches of an evaluation, schemes, canaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcal_artifacts.errors import KVCalError

from .ranks import Ranks

Item = TypeVar("Item")
R = TypeVar("R")


@dataclass(frozen=True)
class _Outcome(Generic[R]):
    """What an item came to: a result, or the error that ended it."""

    results: list[R]
    error: KVCalError | None = None


def spread(
    ranks: Ranks,
    items: Sequence[Item],
    work: Callable[[Item], R],
    begin: Callable[[Item], object] = lambda item: None,
) -> Iterator[R]:
    """The results of all items in their order, on every rank; item i is worked on by rank i mod N, N at a time.

    begin: called for each item of a round, on every rank, before the round is worked on. A KVCalError of an item is
    raised in its place, on every rank, as one process raises it.
    """
    for start in range(0, len(items), ranks.count):
        numbers = range(start, min(start + ranks.count, len(items)))
        for number in numbers:
            begin(items[number])
        mine = start + ranks.rank
        if ranks.count == 1:
            yield work(items[mine])
            continue
        computed = _tried(work, items[mine]) if mine in numbers else None
        for owner, _ in enumerate(numbers):
            outcome = ranks.broadcast(computed if owner == ranks.rank else None, owner)
            if outcome.error is not None:
                raise outcome.error
            yield from outcome.results


def _tried(work: Callable[[Item], R], item: Item) -> _Outcome[R]:
    try:
        return _Outcome([work(item)])
    except KVCalError as error:
        return _Outcome([], error)
