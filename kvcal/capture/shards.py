"""Shards of a calibration's windows: what each rank holds, and sums that come out the same for any number of ranks.

A shard is a run of whole batches. Sums over each shard are added in the order of the shards, by one process as by
several (docs/scale.md).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from .ranks import ALONE, Ranks
from .spill import Pending, SpillStore, Where

SHARDS = 24  # of training windows, and of others, at most: as many for 1, 2, 3, 4, 6, 8 or 12 ranks each


@dataclass(frozen=True)
class Shards:
    """Windows 0 to `windows`, run `batch` at a time, in shards, each of one rank.

    train: windows [0, train) are fitted on. Their batches lie in at most SHARDS shards, and those behind them in as
    many again, so that ranks have equal shares of a pass over either. None: all windows are alike.
    """

    windows: int
    batch: int
    ranks: Ranks = ALONE
    train: int | None = None

    @property
    def batches(self) -> int:
        return -(-self.windows // self.batch)

    @property
    def most_ranks(self) -> int:
        """How many ranks can have a shard."""
        return min(SHARDS, self.batches)

    @property
    def _trained_batches(self) -> int:
        """How many batches have training windows: the first ones, one of which may hold others, too."""
        return self.batches if self.train is None else min(self.batches, -(-self.train // self.batch))

    @cached_property
    def _edges(self) -> tuple[int, ...]:
        """Where each shard begins, in batches, and where the last one ends; shards of training windows come first."""
        border = self._trained_batches
        return (*_starts(0, border), *_starts(border, self.batches), self.batches)

    @property
    def count(self) -> int:
        return len(self._edges) - 1

    def of(self, window: int) -> int:
        """The shard of a window."""
        return bisect_right(self._edges, window // self.batch, hi=self.count) - 1

    def within(self, rows: slice) -> range:
        """The shards that these windows, not none, lie in."""
        return range(self.of(rows.start), self.of(rows.stop - 1) + 1)

    def span(self, shard: int) -> slice:
        """The windows of a shard."""
        first, stop = self._edges[shard : shard + 2]
        return slice(first * self.batch, min(stop * self.batch, self.windows))

    def owner(self, shard: int) -> int:
        """The rank that a shard belongs to."""
        return self._owners[shard]

    @cached_property
    def _owners(self) -> tuple[int, ...]:
        """The rank of each shard. Each rank has neighbouring shards of training windows, and of others. Where these
        shares are not equal, a rank with fewer of the first kind has more of the second.
        """
        trained, hands = min(SHARDS, self._trained_batches), range(self.ranks.count)
        first = [range(trained * hand // len(hands), trained * (hand + 1) // len(hands)) for hand in hands]
        others = self.count - trained
        second = [range(others * hand // len(hands), others * (hand + 1) // len(hands)) for hand in hands]
        owners = {shard: hand for hand, shards in enumerate(first) for shard in shards}
        least_first = sorted(hands, key=lambda hand: self._batches_of(first[hand]))
        most_first = sorted(second, key=lambda shards: -self._batches_of(shards, trained))
        owners |= {trained + one: hand for hand, shards in zip(least_first, most_first, strict=True) for one in shards}
        return tuple(owners[shard] for shard in range(self.count))

    def _batches_of(self, shards: range, behind: int = 0) -> int:
        """How many batches these shards have, numbered from `behind`."""
        return self._edges[behind + shards.stop] - self._edges[behind + shards.start]

    def branches(self, passed: range) -> frozenset[range]:
        """The runs of shards that are summed up by themselves in a pass over the shards `passed`, whatever the ranks:
        halves, their halves and so on. Training windows and others are halved apart.
        """
        border = min(SHARDS, self._trained_batches)
        kinds = [range(passed.start, min(border, passed.stop)), range(max(border, passed.start), passed.stop)]
        return frozenset({passed, *(branch for kind in kinds if kind for branch in _halves(kind))})

    def owners(self, rows: slice) -> list[int]:
        """The rank of each batch in which those windows are run, in window order."""
        size = self.batch
        return [self.owner(self.of(one * size)) for one in range(rows.start // size, -(-rows.stop // size))]

    def chunks(self, rows: slice) -> list[slice]:
        """The batches of this rank, in window order, in which those windows are run: whole, or cut at the ends."""
        size = self.batch
        cut = [
            slice(max(rows.start, one * size), min(rows.stop, (one + 1) * size))
            for one in range(rows.start // size, -(-rows.stop // size))
            if self.owner(self.of(one * size)) == self.ranks.rank
        ]
        return [one for one in cut if one.start < one.stop]

    @cached_property
    def _places(self) -> dict[int, int]:
        """Where each of this rank's batches begins among the windows that it holds, by the batch's number."""
        rank, size = self.ranks.rank, self.batch
        numbers = [batch for batch in range(self.batches) if self.owner(self.of(batch * size)) == rank]
        return {number: place * size for place, number in enumerate(numbers)}

    @property
    def local_windows(self) -> int:
        """How many windows this rank holds."""
        return sum(one.stop - one.start for one in self.chunks(slice(0, self.windows)))

    def local(self, rows: slice) -> slice:
        """Windows of one of this rank's batches -> their places among those that it holds."""
        if self.ranks.count == 1:
            return rows
        start = self._places[rows.start // self.batch] + rows.start % self.batch
        return slice(start, start + rows.stop - rows.start)


def _starts(first: int, stop: int) -> list[int]:
    """Where at most SHARDS shards of batches [first, stop) begin: any runs of as many shards have as many batches, or
    one more.
    """
    count = min(SHARDS, stop - first)
    return [first + (stop - first) * number // count for number in range(count)]


def _halves(parts: range) -> set[range]:
    """A run of parts, its halves, their halves and so on, down to single parts."""
    if len(parts) == 1:
        return {parts}
    middle = (parts.start + parts.stop + 1) // 2
    return {parts} | _halves(range(parts.start, middle)) | _halves(range(middle, parts.stop))


class ShardStore(SpillStore):
    """A SpillStore of this rank's windows, read and written by their numbers among all.

    shape: of a window's row.
    """

    def __init__(
        self,
        shards: Shards,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        device: torch.device | str,
        where: Where = "device",
        spill_dir: Path | None = None,
        label: str = "spilled tensor",
    ) -> None:
        self._shards = shards
        super().__init__(
            (shards.local_windows, *shape), dtype, device=device, where=where, spill_dir=spill_dir, label=label
        )

    def write(self, rows: slice, x: Tensor) -> None:
        super().write(self._shards.local(rows), x)

    def _start(self, rows: slice) -> Pending:
        return super()._start(self._shards.local(rows))


class Sums(Protocol):
    """What a pass over windows sums up."""

    def merge(self, other: Self) -> None:
        """Add what another shard came to."""


class HasRows(Protocol):
    @property
    def rows(self) -> slice: ...


S = TypeVar("S", bound=Sums)
B = TypeVar("B", bound=HasRows)


class _Branches(Generic[S]):
    """Sums of runs of shards, added as soon as two runs are the halves of a branch (`Shards.branches`)."""

    def __init__(self, branches: frozenset[range]) -> None:
        self._branches = branches
        self.sums: list[tuple[range, S]] = []

    def add(self, run: range, sums: S) -> None:
        """Take the sums of a run of shards; runs come in their order, and may have gaps between them."""
        self.sums.append((run, sums))
        while len(self.sums) > 1:
            (first, one), (second, other) = self.sums[-2:]
            both = range(first.start, second.stop)
            if first.stop < second.start or both not in self._branches:
                return
            one.merge(other)
            self.sums[-2:] = [(both, one)]


class ShardSums(Generic[S]):
    """The sums of one pass, given to `LayerTaps.batches`. The batch at hand is added to `part`; when the pass is over,
    `total` holds the sums of all shards of every rank.

    empty: makes sums of nothing. Halves of the shards are added to halves, in an order that does not depend on the
    ranks. Each rank adds what it can by itself, and the ranks tell each other the rest when the pass is over.
    """

    def __init__(self, empty: Callable[[], S]) -> None:
        self._empty, self.part, self.total = empty, empty(), empty()

    def over(
        self, batches: Iterator[B], shards: Shards, rows: slice, timer: Callable[[str], AbstractContextManager[None]]
    ) -> Iterator[B]:
        """Yield the batches of a pass over the windows `rows`. Between two of them the caller has added the first to
        `part`; after the last batch of a shard `part` is set aside and begins anew.
        """
        if rows.start >= rows.stop:
            return
        passed = shards.within(rows)
        branches = shards.branches(passed)
        mine, every = _Branches[S](branches), _Branches[S](branches)
        at = -1  # the shard of `part`
        for batch in _and_none(batches):
            shard = -1 if batch is None else shards.of(batch.rows.start)
            if shard != at >= 0:
                mine.add(range(at, at + 1), self.part)
                self.part = self._empty()
            at = shard
            if batch is not None:
                yield batch
        with timer("exchange") if shards.ranks.count > 1 else nullcontext():
            by_rank = shards.ranks.exchange(mine.sums)
        for run, sums in sorted((one for some in by_rank for one in some), key=lambda one: one[0].start):
            every.add(run, sums)
        [(_, total)] = every.sums
        self.total.merge(total)


def _and_none(items: Iterator[B]) -> Iterator[B | None]:
    """Yield the items, and then None."""
    yield from items
    yield None


@dataclass
class Gathered:
    """Tensors of batches in the order of their windows."""

    tensors: list[Tensor] = field(default_factory=list)

    def merge(self, other: Gathered) -> None:
        self.tensors += other.tensors


@dataclass
class Added:
    """The sum of tensors that have one shape."""

    value: Tensor | None = None

    def add(self, x: Tensor) -> None:
        self.value = x if self.value is None else self.value + x

    def merge(self, other: Added) -> None:
        if other.value is not None:
            self.add(other.value)


@dataclass
class Largest:
    """The largest value of each place of tensors that have one shape."""

    value: Tensor | None = None

    def add(self, x: Tensor) -> None:
        self.value = x if self.value is None else torch.maximum(self.value, x)

    def merge(self, other: Largest) -> None:
        if other.value is not None:
            self.add(other.value)


def tree_sum(ranks: Ranks, parts: int, part: Callable[[int], Tensor], like: Tensor) -> Tensor:
    """The sum of part(0), part(1), ..., one or more, on every rank; each rank calls `part` for a run of neighbours.

    like: has the shape, dtype and device of a part. Halves are added to halves in that dtype: an order that does not
    depend on the ranks. Each rank sends only the sums of whole branches of this tree, not every part.
    """
    edges = [-(-parts * rank // ranks.count) for rank in range(ranks.count + 1)]
    branches = frozenset(_halves(range(parts)))

    def added(rank: int, value: Callable[[int], Tensor | None]) -> list[tuple[range, Added]]:
        """A rank's branches, of parts with these values."""
        sums = _Branches[Added](branches)
        for number in range(edges[rank], edges[rank + 1]):
            sums.add(range(number, number + 1), Added(value(number)))
        return sums.sums

    runs = [[run for run, _ in added(rank, lambda _: None)] for rank in range(ranks.count)]
    mine = [one.value for _, one in added(ranks.rank, part) if one.value is not None]
    unused = max(map(len, runs)) - len(mine)
    received = ranks.gather(torch.stack(mine + [torch.zeros_like(like)] * unused))
    every = _Branches[Added](branches)
    for some, tensors in zip(runs, received, strict=True):
        for run, tensor in zip(some, tensors, strict=False):  # others are unused
            every.add(run, Added(tensor))
    [(_, total)] = every.sums
    assert total.value is not None
    return total.value
