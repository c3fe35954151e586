"""How tokens of a kv head are shared out among programs: what `plan` says, and what the kernel makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interpreted import interpreted, needs_triton
from program_cases import SLOTS, WARPS, planned, spans

parts_of_a_launch = st.fixed_dictionaries(
    {"parts": st.sampled_from([0, 1, 2, 6, 48]), "length": st.sampled_from([0, 1, 64])}
)


@needs_triton
@given(
    st.integers(1, 5000), st.integers(0, 40000), st.integers(0, 300), st.integers(1, 3000), st.sampled_from(WARPS),
    st.sampled_from(SLOTS), st.booleans(), st.sampled_from([None, 0, 1, 3, 1 << 20]), parts_of_a_launch,
)  # fmt: skip
def test_a_plan_has_a_program_for_every_token(
    groups: int, blocks: int, sink: int, recent: int, warps: int, slots: int, carried: bool, less: Any, own: Any
) -> None:
    from kvcal_kernels.attention.triton import ALONE, PARTS, SHORT, SPARE

    made = planned(groups, blocks, (sink, recent), warps, slots, carried, less=less, **own)
    splits, early, fewer, extra = made.numbers()
    # as the kernel takes them: no program has tokens of both windows
    assert made.exact == -(-sink // made.share) + -(-recent // made.share)
    assert 0 <= made.exact <= made.parts and early == made.parts - made.exact
    if made.less == ALONE:
        assert splits == early >= 1 and extra == 0
    else:
        assert carried and less != ALONE and splits == made.parts and extra == made.exact * fewer
    assert made.parts - (made.exact if made.less == ALONE else 0) <= max(PARTS, own["parts"])
    # what `_over` divides without LONG, as `_prepared` chooses it
    assert blocks + SPARE > SHORT or blocks + extra + splits - 1 < SHORT
    if own["parts"] > (made.less != ALONE):
        assert splits == own["parts"]


@needs_triton
@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize("slots", SLOTS[2:])
def test_programs_of_packed_tokens_fill_their_rounds(slots: int, warps: int) -> None:
    """The last round takes as long as the others, however few programs it has."""
    for groups in (1, 8, 40, 256, 1024):
        for blocks in (64, 128, 1024, 4096):
            programs = groups * planned(groups, blocks, (32, 96), warps, slots, True).numbers()[0]
            rounds = -(-programs // slots)
            assert rounds == 1 or programs >= 0.8 * rounds * slots, (groups, blocks)


@needs_triton
@pytest.mark.parametrize("blocks", [64, 128, 1020, 4092])
def test_programs_take_equally_long(blocks: int) -> None:
    """In turns of a warp, of which 16 exact tokens take about four; a part has whole turns, the last what is left."""
    from kvcal_kernels.attention.triton import ALONE

    for groups in (8, 64, 256):
        made = planned(groups, blocks, (32, 96), 1, 1584, True)
        if made.less == ALONE:
            continue
        each = [stop - start for start, stop in spans(blocks, made.numbers(), 1)]
        turns = [own + (made.share // 4 if i >= made.parts - made.exact else 0) for i, own in enumerate(each)]
        assert max(turns) == -(-(blocks + made.exact * made.less) // made.parts)
        assert sorted(turns)[1] >= max(turns) - made.parts  # of the last


@needs_triton
def test_the_kernel_shares_out_every_block_once() -> None:
    assert interpreted("-m", "program_cases") == ["0"]
