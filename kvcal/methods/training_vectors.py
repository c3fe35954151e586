"""The vectors that codebooks are trained on, in fixed shards of their rows: what each rank holds, and what they sum up
to.

The sums are the same for any number of ranks (docs/scale.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal_kernels.residual_vq.nearest import nearest, sums

from ..capture.ranks import ALONE, Ranks
from ..capture.shards import SHARDS

LEAST = 1 << 16  # vectors of a shard: what is smaller than two of them is one shard, which every rank holds
# Products of a vector and a codeword from which ranks divide a search in vectors that all of them hold; for fewer
# it takes less time than to tell each other the codes.
WORTH = {"cuda": 1 << 30, "cpu": 1 << 22}
ROWS = 1 << 20  # vectors changed at a time


@dataclass(frozen=True)
class VectorShards:
    """Vectors 0 to `total` in at most SHARDS shards of LEAST or more; shard s belongs to rank s mod N, a single one to
    all.
    """

    total: int
    ranks: Ranks = ALONE

    @property
    def count(self) -> int:
        return max(1, min(SHARDS, self.total // LEAST))

    @property
    def divided(self) -> bool:
        """Whether the ranks hold different vectors."""
        return self.ranks.count > 1 and self.count > 1

    def span(self, shard: int) -> range:
        """The numbers of a shard's vectors."""
        return range(self.total * shard // self.count, self.total * (shard + 1) // self.count)

    def of(self, rank: int) -> list[int]:
        """The shards that a rank holds."""
        return [shard for shard in range(self.count) if not self.divided or shard % self.ranks.count == rank]

    def select(self, x: Tensor, start: int = 0) -> Tensor:
        """Those of the vectors x (n, ...), numbered from `start`, that this rank holds: x itself where that is all."""
        if not self.divided:
            return x
        spans = [self.span(shard) for shard in self.of(self.ranks.rank)]
        edges = [(max(one.start - start, 0), min(one.stop - start, len(x))) for one in spans]
        return torch.cat([x[first:stop] for first, stop in edges if first < stop] or [x[:0]])


class TrainingVectors:
    """Vectors (n, d), of which this rank holds those of its shards. Every method is to be called by all ranks."""

    def __init__(self, local: Tensor, shards: VectorShards) -> None:
        """Hold `local`, this rank's vectors in the order of their numbers; `subtract` changes them in place."""
        self.local, self.shards = local, shards

    @classmethod
    def of(cls, x: Tensor, ranks: Ranks = ALONE) -> TrainingVectors:
        """Vectors x (n, d) that every rank has."""
        shards = VectorShards(len(x), ranks)
        return cls(shards.select(x), shards)

    def __len__(self) -> int:
        return self.shards.total

    @property
    def dim(self) -> int:
        return int(self.local.shape[1])

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def ranks(self) -> Ranks:
        return self.shards.ranks

    def columns(self, dims: Sequence[int]) -> TrainingVectors:
        """Some dimensions of all vectors, copied."""
        return TrainingVectors(self.local[:, torch.tensor(dims, device=self.device)], self.shards)

    def parts(self) -> Iterator[tuple[range, Tensor]]:
        """The numbers of each shard's vectors that this rank holds, and these vectors, not copied."""
        start = 0
        for shard in self.shards.of(self.ranks.rank):
            span = self.shards.span(shard)
            yield span, self.local[start : start + len(span)]
            start += len(span)

    def rows(self, numbers: Tensor) -> Tensor:
        """The vectors of these numbers (m,) int64, in their order, on every rank: (m, d)."""
        if not self.shards.divided:
            return self.local[numbers.to(self.device)]
        picked = torch.empty(len(numbers), self.dim, dtype=self.local.dtype, device=self.device)
        numbers = numbers.to(self.device)
        within = self._by_shard(numbers)
        places_of = [
            torch.cat([numbers[:0], *(within[shard] for shard in self.shards.of(rank))])
            for rank in range(self.ranks.count)
        ]
        most = max(len(places) for places in places_of)
        missing = picked.new_zeros(most - len(places_of[self.ranks.rank]), self.dim)
        sent = torch.cat([*self._picked(numbers, within), missing])
        for places, x in zip(places_of, self.ranks.gather(sent), strict=True):
            picked[places] = x[: len(places)]
        return picked

    def _by_shard(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Which of these numbers are of each shard's vectors, in their order."""
        starts = [self.shards.span(shard).start for shard in range(self.shards.count)]
        behind = torch.bucketize(numbers, torch.tensor(starts, device=numbers.device), right=True)
        shards, order = (behind - 1).sort(stable=True)
        parts: tuple[Tensor, ...] = order.split(shards.bincount(minlength=self.shards.count).tolist())
        return parts

    def picked(self, numbers: Tensor) -> Iterator[Tensor]:
        """Those of the vectors of these numbers that lie in each shard that this rank holds, in their order."""
        numbers = numbers.to(self.device)
        within = [slice(None)] if self.shards.count == 1 else self._by_shard(numbers)
        return self._picked(numbers, within)

    def _picked(self, numbers: Tensor, within: Sequence[slice | Tensor]) -> Iterator[Tensor]:
        for shard, (span, x) in zip(self.shards.of(self.ranks.rank), self.parts(), strict=True):
            yield x[numbers[within[shard]] - span.start]

    def nearest(self, x: Tensor, book: Tensor) -> Tensor:
        """The codeword nearest to each of some vectors x (m, d) of one shard: int32 (m,)."""
        return shared_nearest(x, book, self.ranks) if self.shards.count == 1 else nearest(x, book)

    def sums(self, book: Tensor) -> tuple[Tensor, Tensor]:
        """How many vectors each codeword of `book` (k, d) is nearest to, int64 (k,), and their sum, float32 (k, d)."""
        size = len(book)
        parts = (sums(x, self.nearest(x, book), size) for _, x in self.parts())
        counts = torch.empty(size, dtype=torch.int64, device=self.device)
        count, total = self.added(parts, (counts, torch.empty(size, self.dim, device=self.device, dtype=torch.float32)))
        return count, total

    def added(self, parts: Iterator[tuple[Tensor, ...]], like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What all shards came to together: added in their order, in float64. parts: tensors of each shard that this
        rank holds; like: have the shapes, dtypes and device of these.
        """
        if self.shards.count == 1:
            return next(parts)
        return self._added_by_rows(parts, like) if self.shards.divided else _added(parts, like)

    def _added_by_rows(self, parts: Iterator[tuple[Tensor, ...]], like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What `added` returns where ranks hold different shards. Each rank adds some rows of all shards' tensors, and
        tells the others, so that a rank gets a number from each of them once.
        """
        ranks, size = self.ranks.count, len(like[0])
        rows = -(-size // ranks)  # of a rank; beyond the last they are zeros
        as_bytes = _as_bytes(like)
        most = -(-self.shards.count // ranks)
        sent = as_bytes.new_zeros(ranks, most, rows, as_bytes.shape[1])
        for number, part in enumerate(parts):
            for rank, some in enumerate(_as_bytes(part).split(rows)):
                sent[rank, number, : len(some)] = some
        received = self.ranks.swap(sent)
        of_rows = tuple(one.new_empty(rows, *one.shape[1:]) for one in like)
        every = (_from_bytes(received[shard % ranks, shard // ranks], of_rows) for shard in range(self.shards.count))
        total = torch.cat(self.ranks.gather(_as_bytes(_added(every, of_rows))))
        return _from_bytes(total[:size], like)

    def subtract(self, book: Tensor) -> int:
        """Residuals in place: each vector less its nearest codeword; how many codewords were used."""
        alone = self.shards.count > 1
        used = torch.zeros(len(book), dtype=torch.bool, device=self.device)
        for _, x in self.parts():
            used |= _subtract(x, book, ALONE if alone else self.ranks)
        if self.shards.divided:
            used = torch.stack(self.ranks.gather(used)).any(0)
        return int(used.sum())


def _added(parts: Iterable[tuple[Tensor, ...]], like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The sums of the parts' tensors, added in their order, in float64, with the dtypes of `like`."""
    totals = tuple(torch.zeros_like(one, dtype=torch.float64) for one in like)
    for part in parts:
        for total, x in zip(totals, part, strict=True):
            total += x
    return tuple(total.to(one.dtype) for total, one in zip(totals, like, strict=True))


def _as_bytes(tensors: tuple[Tensor, ...]) -> Tensor:
    """Tensors (n, ...) side by side: uint8 (n, bytes)."""
    return torch.cat([x.contiguous().view(len(x), -1).view(torch.uint8) for x in tensors], 1)


def _from_bytes(rows: Tensor, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors of `_as_bytes`, with the shapes and dtypes of `like`."""
    widths = [one[0].nbytes for one in like]
    columns = [part.clone(memory_format=torch.contiguous_format) for part in rows.split(widths, 1)]
    return tuple(x.view(one.dtype).view(one.shape) for x, one in zip(columns, like, strict=True))


def is_shared(x: Tensor, size: int) -> bool:
    """Whether ranks that all have vectors x (n, d) share the search among `size` codewords."""
    return len(x) * size >= WORTH.get(x.device.type, WORTH["cpu"])


def shared_nearest(x: Tensor, book: Tensor, ranks: Ranks) -> Tensor:
    """The codeword of `book` (k, d) nearest to each vector of x (n, d), which every rank has: int32 (n,). Each rank
    searches for a share of them: a vector's code depends on no other vector.
    """
    if ranks.count == 1 or not is_shared(x, len(book)):
        return nearest(x, book)
    size = -(-len(x) // ranks.count)
    mine = x[ranks.rank * size : (ranks.rank + 1) * size]
    codes = torch.zeros(size, dtype=torch.int32, device=x.device)
    if len(mine):
        codes[: len(mine)] = nearest(mine, book)
    return torch.cat(ranks.gather(codes))[: len(x)]


def subtract(x: Tensor, book: Tensor, ranks: Ranks = ALONE) -> int:
    """Residuals written over vectors x (n, d), which every rank has: each less its nearest codeword; how many codewords
    were used.
    """
    return int(_subtract(x, book, ranks).sum())


def _subtract(x: Tensor, book: Tensor, ranks: Ranks) -> Tensor:
    """Residuals in place; which codewords were used, bool (k,)."""
    used = torch.zeros(len(book), dtype=torch.bool, device=x.device)
    for part in x.split(ROWS):
        codes = shared_nearest(part, book, ranks)
        used[codes.long()] = True
        part.copy_(part.float() - book[codes].float())
    return used
