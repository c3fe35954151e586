"""The ledger against rows kept as Python lists: counts, and what every gather index picks."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.scheme import Windows
from kvcal_artifacts.storage.ledger import Ledger
from kvcal_artifacts.storage.plan import Plan

NOTHING = -1  # in a slot that holds no token


@dataclass
class Row:
    """One row, one token at a time: columns hold a token's number, or None for a pad."""

    windows: Windows
    columns: list[int | None] = field(default_factory=list)
    sink: list[int] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    window: list[int] = field(default_factory=list)

    def append(self, token: int | None) -> None:
        self.columns.append(token)
        if token is None:
            return
        (self.sink if len(self.sink) < self.windows.sink else self.window).append(token)
        if len(self.window) == self.windows.recent + self.windows.block:
            self.blocks.append(self.window[: self.windows.block])
            self.window = self.window[self.windows.block :]

    def remove(self) -> None:
        if self.columns.pop() is None:
            return
        if not self.window and self.blocks:
            self.window = self.blocks.pop()
        (self.window or self.sink).pop()

    def crop(self, count: int) -> int:
        """Returns how many tokens came back out of blocks and stayed."""
        before = len(self.blocks)
        for _ in range(count):
            self.remove()
        return len(self.window) if len(self.blocks) < before else 0

    @property
    def tokens(self) -> list[int]:
        """In order, as the parts hold them."""
        return self.sink + [token for block in self.blocks for token in block] + self.window


class Slots:
    """A cache of token numbers that follows a ledger's plans to the letter: (B, slots) for each part."""

    def __init__(self) -> None:
        self.sink = self.packed = self.window = torch.zeros(0, 0, dtype=torch.long)

    def start(self, batch: int) -> None:
        self.sink = self.packed = self.window = torch.zeros(batch, 0, dtype=torch.long)

    def past(self, plan: Plan) -> Tensor:
        """Each old column's token; anything for a pad."""
        slots = torch.cat([self.sink, self.packed, self.window], 1)
        if plan.past_index is None:
            return slots
        return slots.gather(1, plan.past_index) if slots.shape[1] else plan.past_index + NOTHING

    def store(self, plan: Plan, new: Tensor, block: int) -> None:
        fresh = torch.cat([self.sink, self.window, new], 1)
        if plan.sink_index is None:
            wide = plan.flush * block
            self.sink, rest = fresh[:, : plan.sink], fresh[:, plan.sink :]
            leaving, self.window = rest[:, :wide], rest[:, wide:]
            self.packed = torch.cat([self.packed, leaving], 1)
            return
        self.sink, self.window = fresh.gather(1, plan.sink_index), fresh.gather(1, plan.window_index)
        leaving = fresh.gather(1, plan.flush_index).masked_fill(plan.idle, NOTHING)
        self.packed = self._appended(plan, leaving.unflatten(1, (-1, block)) if plan.flush else None, block)

    def _appended(self, plan: Plan, leaving: Tensor | None, block: int) -> Tensor:
        grown = torch.full((len(self.packed), plan.blocks * block), NOTHING)
        grown[:, : self.packed.shape[1]] = self.packed
        if leaving is not None:
            grown.unflatten(1, (-1, block))[plan.rows, plan.slots] = leaving[plan.rows, plan.picks]
        return grown


class LedgerMachine(RuleBasedStateMachine):
    @initialize(sink=st.integers(0, 3), recent=st.integers(0, 5), block=st.integers(1, 4), batch=st.integers(1, 3))
    def start(self, sink: int, recent: int, block: int, batch: int) -> None:
        self.windows, self.next = Windows(sink, recent, block), 0
        self.ledger, self.slots = Ledger(self.windows), Slots()
        self._start(batch)

    def _start(self, batch: int) -> None:
        self.rows = [Row(self.windows) for _ in range(batch)]
        self.slots.start(batch)

    @rule(query=st.integers(1, 12), data=st.data())
    def append_with_pads(self, query: int, data: st.DataObject) -> None:
        shape = st.lists(st.booleans(), min_size=query, max_size=query)
        self._append(torch.tensor([data.draw(shape) for _ in self.rows]))

    @rule(query=st.integers(1, 12), said=st.booleans())
    def append_real(self, query: int, said: bool) -> None:
        self._append(torch.ones(len(self.rows), query, dtype=torch.bool), said)

    def _append(self, valid: Tensor, said: bool = True) -> None:
        batch, query = valid.shape
        new = torch.arange(self.next, self.next + batch * query).view(batch, query)
        self.next += batch * query
        plan = self.ledger.begin(batch, query, valid if said else None)
        assert (plan.past, plan.query) == (len(self.rows[0].columns), query)
        self._check_past(self.slots.past(plan))
        before = [len(row.blocks) for row in self.rows]
        for row, tokens, real in zip(self.rows, new.tolist(), valid.tolist(), strict=True):
            for token, kept in zip(tokens, real, strict=True):
                row.append(token if kept else None)
        assert plan.flush == max(len(row.blocks) - old for row, old in zip(self.rows, before, strict=True))
        self.slots.store(plan, new, self.windows.block)
        assert (plan.sink, plan.window) == (self.slots.sink.shape[1], self.slots.window.shape[1])

    def _check_past(self, past: Tensor) -> None:
        for row, found in zip(self.rows, past.tolist(), strict=True):
            assert len(found) == len(row.columns)
            assert [got for got, want in zip(found, row.columns, strict=True) if want is not None] == [
                want for want in row.columns if want is not None
            ]

    @precondition(lambda self: self.ledger.columns)
    @rule(count=st.integers(0, 30))
    def crop(self, count: int) -> None:
        count = min(count, self.ledger.columns)
        frozen = copy.deepcopy(self.ledger)
        plan = self.ledger.crop(count)
        assert same_counts(frozen, self.ledger)  # nothing before commit
        blocks = [len(row.blocks) for row in self.rows]
        returned = sum(row.crop(count) for row in self.rows)
        assert plan.returned == returned
        assert plan.deep == any(len(row.blocks) < old for row, old in zip(self.rows, blocks, strict=True))
        if plan.window_index is not None:
            self.slots.window = torch.cat([self.slots.packed, self.slots.window], 1).gather(1, plan.window_index)
        self.slots.sink, self.slots.window = self.slots.sink[:, : plan.sink], self.slots.window[:, : plan.window]
        self.slots.packed = self.slots.packed[:, : plan.blocks * self.windows.block]
        self.ledger.commit_crop(count)

    @precondition(lambda self: self.ledger.columns)
    @rule(picks=st.lists(st.integers(0, 9), min_size=1, max_size=4), by_mask=st.booleans())
    def select(self, picks: list[int], by_mask: bool) -> None:
        index = torch.tensor(picks) % len(self.rows)
        if by_mask:
            index = torch.zeros(len(self.rows), dtype=torch.bool).index_fill(0, index, True)
        self.ledger.select(index)
        kept = (index.nonzero().flatten() if by_mask else index).tolist()
        self.rows = [copy.deepcopy(self.rows[row]) for row in kept]
        sink, blocks, window = self.ledger.widths
        for name, width in (("sink", sink), ("packed", blocks * self.windows.block), ("window", window)):
            setattr(self.slots, name, getattr(self.slots, name)[index][:, :width])

    @rule(batch=st.integers(1, 3))
    def clear(self, batch: int) -> None:
        self.ledger.clear()
        self._start(batch)

    @invariant()
    def counts_agree(self) -> None:
        ledger = self.ledger
        if not ledger.columns:
            return
        assert ledger.batch == len(self.rows)
        assert ledger.columns == len(self.rows[0].columns)
        assert ledger.valid.tolist() == [[token is not None for token in row.columns] for row in self.rows]
        assert ledger.sink.tolist() == [len(row.sink) for row in self.rows]
        assert ledger.blocks.tolist() == [len(row.blocks) for row in self.rows]
        assert ledger.window.tolist() == [len(row.window) for row in self.rows]
        assert ledger.padded == any(None in row.columns for row in self.rows)
        assert ledger.nbytes == len(self.rows) * (ledger.columns + 3 * 8)

    @invariant()
    def slots_agree(self) -> None:
        if not self.ledger.columns:
            return
        for index, row in enumerate(self.rows):
            assert row.tokens == [token for token in row.columns if token is not None]
            assert self.slots.sink[index, : len(row.sink)].tolist() == row.sink
            assert self.slots.window[index, : len(row.window)].tolist() == row.window
            packed = self.slots.packed[index, : len(row.blocks) * self.windows.block]
            assert packed.tolist() == [token for block in row.blocks for token in block]


def same_counts(left: Ledger, right: Ledger) -> bool:
    names = ("valid", "sink", "blocks", "window")
    return left.columns == right.columns and all(torch.equal(getattr(left, n), getattr(right, n)) for n in names)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=200, stateful_step_count=20)


@settings(max_examples=50)
@given(
    sink=st.integers(0, 5),
    recent=st.integers(0, 20),
    block=st.integers(1, 9),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=4),
)
def test_counts_by_formula(sink: int, recent: int, block: int, lengths: list[int]) -> None:
    """Sinks first, at least `recent` newest, whole blocks in between, the most there can be."""
    longest = max(1, *lengths)
    valid = torch.tensor([[False] * (longest - n) + [True] * n for n in lengths])
    ledger = Ledger(Windows(sink, recent, block))
    ledger.begin(len(lengths), longest, valid)
    for row, length in enumerate(lengths):
        behind = max(0, length - sink)
        blocks = max(0, behind - recent) // block
        assert int(ledger.sink[row]) == min(sink, length)
        assert int(ledger.blocks[row]) == blocks
        assert int(ledger.window[row]) == behind - blocks * block
        assert behind < recent or recent <= int(ledger.window[row]) < recent + block


def test_rows_without_padding_need_no_index() -> None:
    ledger = Ledger(Windows(4, 16, 8))
    for query, said in ((40, None), (1, torch.ones(2, 1, dtype=torch.bool)), (9, None)):
        plan = ledger.begin(2, query, said)
        counts = ("lengths", "packed")  # on the host, for run-time statistics
        assert not any(isinstance(value, Tensor) for name, value in vars(plan).items() if name not in counts)
    assert (plan.past, plan.query, plan.sink, plan.window, plan.flush, plan.blocks) == (41, 9, 4, 22, 1, 3)


def test_rows_of_one_length_need_not_hold_the_same() -> None:
    """Tokens that are pads in one row pack a block in the other, which stays packed when a crop has removed them."""
    ledger = Ledger(Windows(4, 16, 8))
    ledger.begin(2, 27, None)  # one token less than packs a block
    ledger.begin(2, 3, torch.tensor([[True] * 3, [False] * 3]))
    assert ledger.blocks.tolist() == [1, 0]
    ledger.commit_crop(3)
    assert (ledger.lengths.tolist(), ledger.padded) == ([27, 27], False)
    plan = ledger.begin(2, 1, None)
    assert (plan.ragged, ledger.blocks.tolist(), ledger.window.tolist()) == (True, [1, 1], [16, 16])
    assert not ledger.begin(2, 1, None).ragged  # they hold the same again


def test_index_tensors_move_with_a_plan() -> None:
    ledger = Ledger(Windows(4, 16, 8))
    plan = ledger.begin(2, 40, torch.tensor([[True] * 40, [False] * 10 + [True] * 30]))
    moved = plan.to(torch.device("meta"))
    host = ("lengths", "packed", "valid")  # counts for run-time statistics
    kinds = {name: isinstance(value, Tensor) and name not in host for name, value in vars(plan).items()}
    assert {name: isinstance(value, Tensor) and value.is_meta for name, value in vars(moved).items()} == kinds


@pytest.mark.parametrize("batch", [1, 3])
def test_another_batch_is_refused(batch: int) -> None:
    ledger = Ledger(Windows(4, 16, 8))
    ledger.begin(2, 40, None)
    before = copy.deepcopy(ledger)
    with pytest.raises(KVCalError, match=f"cache holds 2 rows, the model was called with {batch}; .* or reset"):
        ledger.begin(batch, 1, None)
    assert same_counts(before, ledger)
