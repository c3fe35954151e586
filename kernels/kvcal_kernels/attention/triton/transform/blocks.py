"""A program's packed blocks: each warp attends to one of NW at a time, which its ring has for it."""

from __future__ import annotations

import triton
import triton.language as tl

from ..ring import pages_of, wait_for_blocks
from .decoder import add_values, scores_of
from .probabilities import both_columns, weighed, weighed_by_assembly
from .ring import fetch_blocks


@triton.constexpr_function
def turns_of(slots):
    """Return how many turns of a loop are written out: with two slots both, so that where blocks lie is constant."""
    return 2 if slots == 2 else 1


@triton.jit
def _offsets(p_pages, page_stride, i_head, i_batch, b_block, b_live, capacity, PAGED: tl.constexpr):
    """Return which blocks, and norms, are read without a ring: bytes from the first page on, or numbers of blocks."""
    if PAGED:
        page = tl.load(p_pages + b_block, mask=b_live, other=0).to(tl.int64)
        o_block = page * page_stride + i_head
        o_norm = o_block // 2
    else:
        o_block = i_head * capacity + b_block
        o_norm = (i_batch.to(tl.int64) * capacity + b_block) * 32
    return o_block, o_norm


@triton.jit
def _step(
    key_pointers, p_kn, value_pointers, p_vn, p_pages, page_stride, p_table, i_head, i_batch, first, stop, limit,
    o_slot, q, unit, b_m, b_l, acc, capacity, KEYS: tl.constexpr, VALUES: tl.constexpr, TABLES: tl.constexpr,
    PAGED: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr, MASK: tl.constexpr,
):
    """Attend to NW more blocks: return the new maxima, sums and outputs of each warp. MASK: some blocks lie beyond
    `stop`, or some of their tokens are none that a row sees, from `limit` [N] on.
    """
    b_block = first + tl.arange(0, NW)
    b_live = b_block < (stop if MASK else 0x7FFFFFFF)
    o_block, o_norm = _offsets(p_pages, page_stride, i_head, i_batch, b_block, b_live, capacity, PAGED)
    b_0, b_1 = scores_of(
        key_pointers, o_block, b_live, o_slot, q, p_table, KEYS, TABLES, PAGED, NW, N, ASM
    )
    unit = tl.broadcast_to(unit[:, None, :], [NW, 16, N])
    if ASM and not MASK:
        b_m, b_l, acc, probabilities = weighed_by_assembly(
            b_0, b_1, b_m, b_l, unit, acc, o_slot, KEYS, VALUES, NW, N
        )
    else:
        see_0, see_1 = b_live[:, None, None], b_live[:, None, None]
        if MASK and PAGED:
            r = tl.arange(0, 16)
            token = b_block[:, None, None] * 32 + (r % 8 * 2 + r // 8)[None, :, None]
            see_0, see_1 = see_0 & (token < limit[None, None, :]), see_1 & (token + 16 < limit[None, None, :])
        b_m, b_l, acc, probabilities = weighed(
            b_0, b_1, b_m, b_l, unit, acc, see_0, see_1, p_kn, p_vn, o_norm, b_live, o_slot, KEYS, VALUES, NW, N, ASM,
            MASK,
        )
    acc = add_values(
        value_pointers, o_block, b_live, o_slot, probabilities, acc, p_table, VALUES, KEYS.slot, TABLES, PAGED,
        NW, ASM,
    )
    return b_m, b_l, acc


@triton.jit
def _fetched(
    origins, p_pages, pages, page_stride, first, last, to, o_slot, lane, KEYS: tl.constexpr, VALUES: tl.constexpr,
    SLOTS: tl.constexpr, PAGED: tl.constexpr, NW: tl.constexpr,
):
    """Wait for the blocks from `first` on, and begin to fetch those that are SLOTS - 1 turns later to the slot before
    theirs, `o_slot`: return the pages of those another turn behind.
    """
    SLOT: tl.constexpr = KEYS.slot + VALUES.slot
    wait_for_blocks(SLOTS - 2, True, NW)
    behind = to + tl.where(o_slot == 0, SLOT * (SLOTS - 1), o_slot - SLOT)
    fetch_blocks(
        origins, pages, page_stride, first + (SLOTS - 1) * NW, last, behind, lane, KEYS, VALUES, PAGED, NW
    )
    return pages_of(p_pages, first + SLOTS * NW, last + 1, NW) if PAGED else pages


@triton.jit
def packed_blocks(
    key_pointers, p_kn, value_pointers, p_vn, p_pages, page_stride, p_table, i_head, i_batch, start, middle, stop,
    limit, origins, pages, to, lane, q, unit, b_m, b_l, acc, capacity, KEYS: tl.constexpr, VALUES: tl.constexpr,
    TABLES: tl.constexpr, SLOTS: tl.constexpr, PAGED: tl.constexpr, NW: tl.constexpr, N: tl.constexpr,
    ASM: tl.constexpr,
):
    """Attend to the blocks from start to stop: return maxima, sums and outputs of each warp. middle: up to where every
    row sees all of a block. pages: with PAGED of the blocks SLOTS - 1 turns after the first.
    """
    SLOT: tl.constexpr = KEYS.slot + VALUES.slot
    EACH: tl.constexpr = turns_of(SLOTS)
    last, o_next = tl.maximum(stop, 1) - 1, 0
    middle = start + tl.maximum(middle - start, 0) // (EACH * NW) * (EACH * NW)
    for even in tl.range(start, middle, EACH * NW, num_stages=1):
        for turn in tl.static_range(EACH):
            first = even + turn * NW
            o_slot = turn * SLOT if EACH > 1 else o_next
            if ASM:
                pages = _fetched(
                    origins, p_pages, pages, page_stride, first, last, to, o_slot, lane, KEYS, VALUES, SLOTS, PAGED, NW
                )
            b_m, b_l, acc = _step(
                key_pointers, p_kn, value_pointers, p_vn, p_pages, page_stride, p_table, i_head, i_batch, first, stop,
                limit, o_slot, q, unit, b_m, b_l, acc, capacity, KEYS, VALUES, TABLES, PAGED, NW, N, ASM, False,
            )
        if EACH == 1:
            o_next = tl.where(o_next == SLOT * (SLOTS - 1), 0, o_next + SLOT)
    b_m, b_l = both_columns(b_m, b_l, ASM)
    for first in tl.range(middle, stop, NW, num_stages=1):
        if ASM:
            pages = _fetched(
                origins, p_pages, pages, page_stride, first, last, to, o_next, lane, KEYS, VALUES, SLOTS, PAGED, NW
            )
        b_m, b_l, acc = _step(
            key_pointers, p_kn, value_pointers, p_vn, p_pages, page_stride, p_table, i_head, i_batch, first, stop,
            limit, o_next, q, unit, b_m, b_l, acc, capacity, KEYS, VALUES, TABLES, PAGED, NW, N, ASM, True,
        )
        o_next = tl.where(o_next == SLOT * (SLOTS - 1), 0, o_next + SLOT)
    if ASM:
        wait_for_blocks(0, True, NW)
    return b_m, b_l, acc
