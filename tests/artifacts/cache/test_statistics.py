"""Run-time statistics: of exactly the tokens before a block became due, however they came in; and ragged blocks."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kvcal_artifacts.cache.statistics import statistic
from kvcal_artifacts.cache.statistics.prefixes import Prefixes, refits
from kvcal_artifacts.codecs import Shape
from kvcal_artifacts.codecs.ragged import Ragged
from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.scheme import Windows
from kvcal_artifacts.storage import block_store
from kvcal_artifacts.storage.ledger import Ledger
from kvcal_artifacts.storage.plan import Plan
from kvcal_kernels.quantise import factors_of

WINDOWS = Windows(sink=3, recent=5, block=4)
SHAPE = Shape(2, 6, 4)
NAMES = ("query_abs", "query_abs:recent", "key_scale", "query_subspace:6:length", "query_subspace_pre:6:length")


def tokens(rows: int, heads: int, length: int) -> Tensor:
    return torch.randn(rows, heads, length, 6, generator=torch.Generator().manual_seed(3))


def due(block: int) -> int:
    """Tokens that a row has seen when that block is packed."""
    return WINDOWS.sink + (block + 1) * WINDOWS.block + WINDOWS.recent


def watched(name: str, x: Tensor, valid: Tensor, pieces: list[int]) -> list[list[Tensor]]:
    """The statistic of every block of every row, fed in pieces."""
    ledger, own = Ledger(WINDOWS), statistic(name, SHAPE)
    found: list[list[Tensor]] = [[] for _ in x]
    start = 0
    for piece in pieces:
        before = ledger.blocks.clone() if ledger.columns else torch.zeros(len(x), dtype=torch.long)
        plan = ledger.begin(len(x), piece, valid[:, start : start + piece])
        made = own.observe(x[:, :, start : start + piece], Prefixes(plan, WINDOWS, x.device))
        for row in range(len(x)):
            for slot in range(int(ledger.blocks[row] - before[row])):
                assert made is not None
                found[row].append(made[row, :, min(slot, made.shape[2] - 1)])
        start += piece
    return found


def by_hand(name: str, x: Tensor, block: int) -> Tensor:
    """x (heads, tokens, D) of one row, real tokens only."""
    if name == "key_scale":
        return factors_of(x[:, : due(0)].abs().amax(1))
    if "subspace" in name:
        fitted = max(number for number in refits(WINDOWS, block) if number <= block)
        q = x[:, : due(fitted)].unflatten(0, (2, 2)).flatten(1, 2)
        return q.mT @ q / q.shape[1]
    first = due(block - 1) if name.endswith("recent") and block else 0
    return x.abs().unflatten(0, (2, 2)).mean(1)[:, first : due(block)].mean(1)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(st.data())
def test_statistics_are_of_the_tokens_before_a_block_is_due(name: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    width = max([*lengths, 1])
    cuts = sorted(data.draw(st.sets(st.integers(1, width - 1), max_size=6))) if width > 1 else []
    pieces = [b - a for a, b in zip([0, *cuts], [*cuts, width], strict=True)]
    x = tokens(len(lengths), 2 if name == "key_scale" else 4, width)
    valid = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    found = watched(name, x, valid, pieces)
    for row, length in enumerate(lengths):
        real = x[row, :, width - length :]
        alone = watched(name, real[None], torch.ones(1, length, dtype=torch.bool), [length])[0] if length else []
        assert len(found[row]) == len(alone) == max(0, (length - WINDOWS.sink - WINDOWS.recent) // WINDOWS.block)
        for block, (made, single) in enumerate(zip(found[row], alone, strict=True)):
            assert torch.equal(made, single)
            square, noise = ("subspace" in name), {"atol": 2e-5, "rtol": 1e-5}
            shown = made.mT @ made if square else made  # of all directions: the mean of q q', and q is rounded to 2^-10
            torch.testing.assert_close(
                shown, by_hand(name, real, block), **({"atol": 2e-3, "rtol": 0} if square else noise)
            )


def test_statistics_by_name() -> None:
    for bad in ("magnitude", "query_abs:old", "query_subspace", "query_subspace:0", "query_subspace_pre:4:long"):
        with pytest.raises(KVCalError, match=r"known are|allowed are"):
            statistic(bad, SHAPE)
    at = Prefixes(Ledger(WINDOWS).begin(1, 4, None), WINDOWS, torch.device("cpu"))
    with pytest.raises(KVCalError, match="3 query heads do not divide among 2"):
        statistic("query_abs", SHAPE).observe(tokens(1, 3, 4), at)


def test_a_channel_of_zeros_has_the_factor_one() -> None:
    assert factors_of(torch.tensor([0.0, 4.0, 1e-30])).tolist() == [1.0, 2.0, 1.0]


@st.composite
def ragged(draw: st.DrawFn, rows: int, blocks: int | None = None) -> list[list[list[list[int]]]]:
    """Items as lists: [row][head][block] -> numbers."""
    blocks = draw(st.integers(0, 3)) if blocks is None else blocks
    item = st.lists(st.integers(0, 99), max_size=4)
    return [[[draw(item) for _ in range(blocks)] for _ in range(2)] for _ in range(rows)]


def pooled(items: list[list[list[list[int]]]]) -> Ragged:
    blocks = len(items[0][0])
    counts = torch.tensor([[[len(i) for i in head] for head in row] for row in items], dtype=torch.uint8)
    flat = [number for row in items for head in row for item in head for number in item]
    return Ragged(torch.tensor(flat, dtype=torch.int16)[:, None], counts.view(len(items), 2, blocks))


def listed(stored: Any) -> list[list[list[list[int]]]]:
    starts = stored.offsets()
    return [
        [
            [
                stored.data[int(s) : int(s) + int(n), 0].tolist()
                for s, n in zip(starts[b, h], stored.counts[b, h], strict=True)
            ]
            for h in range(stored.shape[1])
        ]
        for b in range(stored.shape[0])
    ]


@settings(max_examples=60)
@given(st.data())
def test_ragged_blocks_are_lists(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    old, new = data.draw(ragged(rows)), data.draw(ragged(rows, blocks=data.draw(st.integers(0, 2))))
    plan = Plan(0, 1, 0, 0, len(new[0][0]), len(old[0][0]) + len(new[0][0]))
    joined = block_store.append(pooled(old), pooled(new), plan)
    wanted = [[a + b for a, b in zip(p, q, strict=True)] for p, q in zip(old, new, strict=True)]
    assert listed(joined) == wanted
    picked = data.draw(st.lists(st.integers(0, rows - 1), max_size=4))
    assert listed(block_store.select(joined, torch.tensor(picked, dtype=torch.long))) == [wanted[i] for i in picked]
    kept = data.draw(st.integers(0, plan.blocks))
    assert listed(block_store.first_blocks(joined, kept)) == [[head[:kept] for head in row] for row in wanted]
    assert listed(block_store.move(joined, "cpu")) == wanted
    assert {t.dtype for t in block_store.tensors_of(joined)} == {torch.int16, torch.uint8}


def test_ragged_rows_flush_different_numbers_of_blocks() -> None:
    old, new = [[[[1]], [[2, 2]]], [[[3]], [[]]]], [[[[4], [5]], [[6], [7]]], [[[8], [9]], [[10], [11]]]]
    rows, slots, picks = torch.tensor([0, 1, 1]), torch.tensor([1, 1, 2]), torch.tensor([0, 0, 1])
    plan = Plan(0, 1, 0, 0, 2, 3, rows=rows, slots=slots, picks=picks)
    joined = block_store.append(pooled(old), pooled(new), plan)
    assert listed(joined) == [[[[1], [4], []], [[2, 2], [6], []]], [[[3], [8], [9]], [[], [10], [11]]]]
