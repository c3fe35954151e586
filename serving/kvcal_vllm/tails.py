"""Exact keys and values of unfinished blocks. A request has at most one, in its last page, which no other request
reads: the number of that page says whose they are.

vLLM does not say when a request has ended. A tail that nothing has touched in this step is therefore only given away
when all are taken. vLLM admits a request in no step that leaves a running one without tokens, so such a tail belongs to
no running request. Were it otherwise, the step would raise, because each tail knows how many tokens it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal_artifacts.errors import KVCalError
from kvcal_kernels.layout import BLOCK


@dataclass
class _Tail:
    """One page's tail. tokens: how many it holds behind the current step. step: the last one that touched it."""

    slot: int
    tokens: int
    step: int


class TailTable:
    """Which slot holds the tail of which page. All layers of an engine share it.

    capacity: of slots; a step needs at most two of each request: of the block that it finishes and of the next one.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._tails: dict[int, _Tail] = {}  # by page, in the order in which steps touched them
        self._free = list(range(capacity - 1, -1, -1))
        self._step = 0

    def begin(self, spans: Sequence[tuple[Tensor, int, int]]) -> list[int]:
        """Give the next step's requests their tails. spans: of each request its pages, and how many tokens it has
        before and behind the step. Return the slot of the tail that each reads, -1 where it begins with a page.

        Raises KVCalError where a tail is not what vLLM says that the request has.
        """
        self._step += 1
        for page in [page for page, tail in self._tails.items() if tail.tokens == BLOCK]:
            self._free.append(self._tails.pop(page).slot)
        read = [self._read(pages, before) for pages, before, _ in spans]
        for pages, before, behind in spans:
            self._write(pages, before, behind)
        return read

    def _read(self, pages: Tensor, before: int) -> int:
        if before % BLOCK == 0:
            return -1
        page = int(pages[before // BLOCK])
        tail = self._tails.get(page)
        if tail is None or tail.tokens != before % BLOCK:
            tokens = 0 if tail is None else tail.tokens
            raise KVCalError(
                f"page {page}: {tokens} exact tokens of an unfinished block are there, vLLM says {before % BLOCK}; "
                "please report this with the engine's options"
            )
        self._touch(page, tail)
        return tail.slot

    def _write(self, pages: Tensor, before: int, behind: int) -> None:
        if before % BLOCK and behind // BLOCK > before // BLOCK:
            self._tails[int(pages[before // BLOCK])].tokens = BLOCK  # finished in this step, and read by it
        if behind % BLOCK == 0:
            return
        page = int(pages[behind // BLOCK])
        tail = self._tails.get(page)
        if tail is None:
            tail = _Tail(self._take(), 0, self._step)
        tail.tokens = behind % BLOCK
        self._touch(page, tail)

    def _touch(self, page: int, tail: _Tail) -> None:
        self._tails.pop(page, None)
        tail.step = self._step
        self._tails[page] = tail

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        page, oldest = next(iter(self._tails.items()))
        if oldest.step == self._step:
            raise KVCalError(f"more than {self.capacity} unfinished blocks in one step; please report this")
        return self._tails.pop(page).slot

    def slots(self, pages: Tensor) -> list[int]:
        """The slots of pages, int64 (P,); -1 where a page's block came whole in this step."""
        return [tail.slot if (tail := self._tails.get(page)) is not None else -1 for page in pages.tolist()]


class LayerTails:
    """The exact keys and values of one layer's unfinished blocks, (slots, H, b, D) each, in the model's dtype."""

    def __init__(self, table: TailTable) -> None:
        self.table = table
        self._stored: list[Tensor] = []  # keys, values; as many slots as were needed so far

    def join(self, pages: Tensor, fresh: Tensor, blocks: Sequence[Tensor]) -> None:
        """Put earlier tokens of pages, int64 (P,), into blocks (P, H, b, D) of keys and of values next to the fresh
        ones, bool (P, b), and keep them all.
        """
        slots = self.table.slots(pages)
        tailed = torch.tensor([slot >= 0 for slot in slots], device="cpu")
        index = torch.tensor([slot for slot in slots if slot >= 0], device="cpu")
        if not len(index):
            return
        self._reserve(int(index.max()) + 1, blocks)
        for stored, block in zip(self._stored, blocks, strict=True):
            joined = torch.where(fresh[tailed][:, None, :, None], block[tailed], stored[index])
            stored[index] = joined
            block[tailed] = joined

    def read(self, slot: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The first tokens of a tail: keys and values (H, tokens, D)."""
        key, value = (stored[slot, :, :tokens] for stored in self._stored)
        return key, value

    def _reserve(self, count: int, like: Sequence[Tensor]) -> None:
        size_before = len(self._stored[0]) if self._stored else 0
        if count <= size_before:
            return
        size = min(max(count, 2 * size_before), self.table.capacity)
        grown = [torch.zeros(size, *x.shape[1:], dtype=x.dtype, device="cpu") for x in like]
        for new, old in zip(grown, self._stored, strict=False):
            new[:size_before] = old
        self._stored = grown
