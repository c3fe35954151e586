"""How tokens of a kv head are shared out among programs: what `plan` says, and what the kernel makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases.program_cases import SLOTS, WARPS, planned, spans
from tests.support.interpreted import interpreted, needs_triton

parts_of_a_launch = st.fixed_dictionaries(
    {"splits": st.sampled_from([0, 1, 2, 6, 48]), "iterations": st.sampled_from([0, 1, 64])}
)


@needs_triton
@given(
    st.integers(1, 5000), st.integers(0, 40000), st.integers(0, 300), st.integers(1, 3000), st.sampled_from(WARPS),
    st.sampled_from(SLOTS), st.booleans(), st.sampled_from([None, 0, 1, 3, 1 << 20]), parts_of_a_launch,
)  # fmt: skip
def test_a_plan_has_a_program_for_every_token(
    groups: int, blocks: int, sink: int, recent: int, warps: int, slots: int, carried: bool, less: Any, own: Any
) -> None:
    from kvcal_kernels.attention.plan import ALONE, MOST_SPLITS, SHORT, SPARE

    made = planned(groups, blocks, (sink, recent), warps, slots, carried, tail_cost=less, **own)
    splits, early, fewer, extra = made.numbers()
    # as the kernel takes them: no program has tokens of both windows
    assert made.tail == -(-sink // made.tail_tokens) + -(-recent // made.tail_tokens)
    assert 0 <= made.tail <= made.splits and early == made.splits - made.tail
    if made.tail_cost == ALONE:
        assert splits == early >= 1 and extra == 0
    else:
        assert carried and less != ALONE and splits == made.splits and extra == made.tail * fewer
    assert made.splits - (made.tail if made.tail_cost == ALONE else 0) <= max(MOST_SPLITS, own["splits"])
    # what `floor_divide` divides without LONG, as `_prepared` chooses it
    assert blocks + SPARE > SHORT or blocks + extra + splits - 1 < SHORT
    if own["splits"] > (made.tail_cost != ALONE):
        assert splits == own["splits"]


@needs_triton
@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize("slots", SLOTS[2:])
def test_programs_of_packed_tokens_fill_their_rounds(slots: int, warps: int) -> None:
    """The last round takes as long as the others, however few programs it has."""
    for groups in (1, 8, 40, 256, 1024):
        for blocks in (64, 128, 1024, 4096):
            programs = groups * planned(groups, blocks, (32, 96), warps, slots, True).numbers()[0]
            rounds = -(-programs // slots)
            assert rounds == 1 or programs >= 0.7 * rounds * slots, (groups, blocks)
            # and none is idle while one has many turns
            assert programs >= 0.3 * min(slots, groups * blocks / warps / 24), (groups, blocks, programs)


@needs_triton
@pytest.mark.parametrize("blocks", [64, 128, 1020, 4092])
def test_programs_take_equally_long(blocks: int) -> None:
    """In turns of a warp, of which 16 exact tokens take about four; a part has whole turns, the last what is left."""
    from kvcal_kernels.attention.plan import ALONE

    for groups in (8, 64, 256):
        made = planned(groups, blocks, (32, 96), 1, 1584, True)
        if made.tail_cost == ALONE:
            continue
        each = [stop - start for start, stop in spans(blocks, made.numbers(), 1)]
        turns = [own + (made.tail_tokens // 4 if i >= made.splits - made.tail else 0) for i, own in enumerate(each)]
        assert max(turns) == -(-(blocks + made.tail * made.tail_cost) // made.splits)
        assert sorted(turns)[1] >= max(turns) - made.splits  # of the last


PLANS = [  # of uniform 4/4 (12 programs of one warp) and of HIGGS 3 (4 of four) on 132 multiprocessors; 8 kv heads
    # batch, length, slots, warps: parts, of them with exact tokens, tokens of each, turns fewer
    (1, 4096, 1584, 1, (50, 8, 16, None)),
    (1, 32768, 1584, 1, (117, 8, 16, 4)),
    (1, 131072, 1584, 1, (188, 8, 16, 4)),
    (8, 32768, 1584, 1, (24, 8, 16, 4)),
    (32, 4096, 1584, 1, (6, 4, 32, 8)),
    (32, 32768, 1584, 1, (6, 4, 32, 8)),
    (1, 4096, 264, "few", (13, 4, 32, None)),
    (1, 32768, 264, "few", (31, 4, 32, None)),
    (1, 32768, 528, 4, (35, 4, 32, None)),
    (8, 32768, 528, 4, (8, 2, 128, None)),
    (32, 4096, 528, 4, (2, 2, 128, 32)),
    (32, 32768, 528, 4, (6, 2, 128, None)),
]


@needs_triton
@pytest.mark.parametrize(("batch", "length", "slots", "warps", "plan"), PLANS)
def test_plans_are_those_that_were_timed(batch: int, length: int, slots: int, warps: Any, plan: Any) -> None:
    from kvcal_kernels.attention.plan import ALONE

    own = {"merge_rate": 3} if warps == "few" else {}
    made = planned(8 * batch, (length - 128) // 32, (32, 96), 4 if own else warps, slots, True, **own)
    assert made == (*plan[:3], ALONE if plan[3] is None else plan[3])


@needs_triton
@pytest.mark.parametrize("warps", WARPS)
def test_turns_of_a_program_are_at_most_the_length(warps: int) -> None:
    for groups in (1, 64):
        for blocks in (5, 128, 1020):
            made = planned(groups, blocks, (32, 96), warps, 528, False, iterations=7)
            assert -(-blocks // warps // made.numbers()[0]) <= 7


@needs_triton
@pytest.mark.parametrize("windows", [(4, 2048), (128, 1024)])
@pytest.mark.parametrize("warps", WARPS)
def test_long_windows_are_not_one_program_s(warps: int, windows: tuple[int, int]) -> None:
    """On an idle GPU; their tokens take longer than a few packed blocks."""
    made = planned(64, 4, windows, warps, 528, True)
    assert made.tail_tokens <= 256 or made.tail >= 8, made


@needs_triton
@pytest.mark.parametrize(("batch", "length", "warps"), [
    (1, 512, 1), (1, 4096, 4), (1, 32768, 4), (2, 32768, 4), (1, 65536, 4), (1, 131072, 1), (8, 4096, 1), (8, 32768, 1),
    (32, 512, 1), (32, 4096, 1), (32, 32768, 1),
])  # fmt: skip
def test_programs_of_few_blocks_have_four_warps(
    batch: int, length: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they were timed on 132 multiprocessors."""
    import torch

    from kvcal_kernels.attention import triton as fused
    from kvcal_kernels.layout import Form

    monkeypatch.setattr(fused.launch, "processors_of", lambda device: 132)
    keys, values, device = Form("key", 128, 4), Form("value", 128, 4), torch.device("cpu")
    own = fused.chosen(keys, values, 4, False, 8 * batch, length // 32, device)
    assert own.warps == warps and own in fused.launches(keys, values, 4)
    # what has no second launch, whatever the length: more rows than a product takes, outer groups, tables, RoPE in the
    # kernel
    outer, grid = Form("key", 128, 2, 128, False, False), Form("key", 128, 2, vector=2)
    points = Form("key", 128, 4, vector=1, in_bytes=True)
    for others in (
        (keys, values, 8),
        (outer, values, 4),
        (grid, values, 4),
        (points, values, 4),
        (keys, values, 4, True),
    ):
        assert fused.launches(*others) == (fused.usual(*others),)


@needs_triton
def test_a_ring_of_four_warps_fits_the_smallest_shared_memory() -> None:
    """99 KB a program (compute capability 8.6 and 8.9), of which Triton takes up to 32 (test_attention_kernel's
    budgets).
    """
    from kvcal_kernels.attention import triton as fused
    from kvcal_kernels.attention.plan import ring_bytes
    from kvcal_kernels.layout import Form

    several = {}
    for bits in (2, 3, 4, 8):
        for symmetric in (True, False):
            keys, values = (Form(role, 128, bits, 32, True, symmetric) for role in ("key", "value"))
            own = fused.launches(keys, values, 4)
            several[bits, symmetric] = len(own) == 2
            for launch in own:
                ring = ring_bytes(fused.settings(keys, values, 8, 4, 1, launch.warps))
                assert ring + (32 << 10) <= 99 << 10, (bits, symmetric, launch)
    assert several == {(bits, symmetric): bits < 8 for bits in (2, 3, 4, 8) for symmetric in (True, False)}


@needs_triton
@pytest.mark.parametrize("scheme", [(4, None, 4, 128), (4, None, 4, 64), (2, 2, 4, 1024), (2, None, 16, 128)])
def test_a_reserved_workspace_never_grows(scheme: tuple[int, Any, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many programs the driver says that run at a time. scheme: bits, vector, query rows a kv head, room of
    blocks.
    """
    import torch

    from kvcal_kernels.attention import triton as fused
    from kvcal_kernels.attention.plan import merge_width_of
    from kvcal_kernels.layout import Form

    monkeypatch.setattr(fused.launch, "processors_of", lambda device: 132)
    bits, vector, rows, room = scheme
    keys, values = (Form(role, 128, bits, **({"vector": vector} if vector else {})) for role in ("key", "value"))
    space, windows = fused.Workspace(torch.device("cpu")), (32, 96)
    plan_of, launches = fused.launch._plan, []
    monkeypatch.setattr(fused.launch, "_plan", lambda *given: (launches.append(given[4]), plan_of(*given))[1])
    fused.reserve(space, keys, values, 3, 8, rows, room, windows)
    held = [x.data_ptr() for x in (space.partial, space.stat, space.counter)]
    launch = fused.chosen(keys, values, rows, False, 3 * 8, room, torch.device("cpu"))
    assert (launch.warps == 4) == (rows == 4) and set(launches) == {launch}
    fixed = fused.settings(keys, values, 8, rows, 1, launch.warps)
    for at_once in range(1, 64 // launch.warps + 1):
        own = fused.launch._plan(fixed, 3, room, windows, launch, min(at_once, 32), torch.device("cpu"))
        fan = merge_width_of(own.splits, fixed["AT_ONCE"])
        taken = space.take(3 * 8 * fixed["CHUNKS"], own.splits, fixed["N"], 128, fan)
        assert [x.data_ptr() for x in taken] == held


@needs_triton
def test_the_kernel_shares_out_every_block_once() -> None:
    assert interpreted("-m", "tests.support.cases.program_cases") == ["0"]
