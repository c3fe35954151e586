"""`attend_pages` of reference.py over grids that are looked up and over integers in groups of channels, in one launch:
as `attend_kernel` does, over the blocks that a row's table names, without exact tokens and without products of bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...hadamard import largest_power_of_two
from ..plan import power_of_two
from .grids import load_tables
from .kernel import output_of, query_of, step
from .merge import blocks_of_split, merge_splits, store_split
from .numbers import LOW, zeros
from .queries import powers, rows_in_pages
from .ring import fetch_pages, open_page_ring, pages_of, wait_for_blocks
from .softmax import declare_parities

_rotation_width = triton.constexpr_function(largest_power_of_two)  # as in layout/grids.py
_power_of_two = triton.constexpr_function(power_of_two)


@triton.constexpr_function
def _rows_of(rows, most):
    """Return how many query rows a program merges, a power of two."""
    return min(_power_of_two(rows), most)


@triton.constexpr_function
def _reads_private_blocks(keys, values, warps):
    """Return whether a warp reads no blocks but those that it has fetched itself."""
    return warps == 1 or (keys.grid and values.grid)


@triton.jit(
    do_not_specialize=[
        "q_stride", "page_stride", "head_stride", "table_stride", "capacity", "splits", "merge_width", "merges",
    ],
    do_not_specialize_on_alignment=["p_q", "p_table", "p_lengths", "p_starts"],
)
def paged_kernel(
    p_q, p_out, p_pages, p_table, p_lengths, p_starts, p_partial, p_stat, p_count, p_kt, p_vt, p_k_sign, p_v_sign,
    q_stride, page_stride, head_stride, table_stride, capacity, splits, merge_width, merges, factor, k_unit, v_unit,
    HEADS: tl.constexpr, RATIO: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, CHUNKS: tl.constexpr,
    AT_ONCE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, SAME: tl.constexpr, STEP: tl.constexpr,
    PAIRED: tl.constexpr, SLOTS: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr, LONG: tl.constexpr,
):
    """Attend with a grid (batch, HEADS * CHUNKS, splits). p_pages: uint8; page_stride, head_stride: bytes of a page,
    and of a head in it. p_table: a row's pages, `capacity` of them. QUERIES: of a row at most. The rest is as in
    `attend_kernel`.
    """
    SLICES: tl.constexpr = D // 16
    WIDTH: tl.constexpr = _rotation_width(D)
    WIDE: tl.constexpr = D // 32 if PAIRED else SLICES
    ZEROS: tl.constexpr = D // VALUES.group if VALUES.outer else 0
    EACH: tl.constexpr = 2 if PAIRED else 1
    QUERY_ROWS: tl.constexpr = N // EACH
    ROWS: tl.constexpr = _rows_of(RATIO * QUERIES, QUERY_ROWS)
    SLOT: tl.constexpr = KEYS.slot + VALUES.slot
    PRIVATE_BLOCKS: tl.constexpr = _reads_private_blocks(KEYS, VALUES, NW)
    i_split, i_batch = tl.program_id(2), tl.program_id(0)
    i_kv, i_chunk = tl.program_id(1) // CHUNKS, tl.program_id(1) % CHUNKS
    i_head = (i_batch * HEADS + i_kv).to(tl.int64)
    i_group = i_head * CHUNKS + i_chunk
    n = i_chunk * QUERY_ROWS + tl.arange(0, N) // EACH
    count, length, b_row, o_q, limit = rows_in_pages(
        p_lengths, p_starts, i_batch, i_kv, n, q_stride, capacity, RATIO, QUERIES, D
    )
    start, stop = blocks_of_split(i_split, tl.cdiv(length, 32), splits, splits, 0, 0, NW, LONG)
    o_head = i_kv.to(tl.int64) * head_stride
    p_head, p_row = p_pages + o_head, p_table + i_batch.to(tl.int64) * table_stride
    p_k, p_v = (p_pages).to(tl.pointer_type(tl.int16)), (p_pages + KEYS.slot).to(tl.pointer_type(tl.int16))
    p_ks = (p_k + KEYS.words).to(tl.pointer_type(tl.float16))
    p_vs = (p_v + VALUES.words).to(tl.pointer_type(tl.float16))
    lane = tl.arange(0, 32 * NW) % 32
    swapped = lane * 16 ^ lane // 8 % 2 * 16

    PEAK: tl.constexpr = 16.0
    LOWEST: tl.constexpr = (51 if KEYS.grid else 27) << 23  # as in `attend_kernel`
    b_down, b_up = powers(p_q, o_q, b_row, KEYS, SLICES, PEAK, LOWEST, False, N)
    q, plain, sums, _, b_up = query_of(
        p_q, p_k_sign, p_k_sign, p_partial, 0, b_down, b_up, i_head, i_kv, i_chunk, o_q, b_row, KEYS, SLICES, WIDTH,
        PEAK, LOWEST, PAIRED, 0, RATIO, QUERIES, NW, N, ASM,
    )
    SCALE: tl.constexpr = WIDTH**-0.5 if KEYS.grid else 2.0**24
    unit = tl.broadcast_to((b_up * (factor * k_unit * SCALE))[None, :], [NW, N])
    if ASM and PAIRED and KEYS.grid:
        declare_parities()
    if ASM and KEYS.entries + VALUES.entries > 0:
        load_tables(p_kt, p_vt, i_split * 0, KEYS, VALUES, SAME, STEP)
    b_m = tl.full([NW, 16, N], LOW, tl.float32)  # rows alike
    b_l = tl.zeros([NW, 16, N], tl.float32)  # rows alike, except where values are of a grid
    acc = zeros(WIDE + ZEROS, NW, N)
    b_ring, o_slot = tl.zeros([NW, 1], tl.int32), 0
    to = tl.zeros([32 * NW], tl.int32)
    pages = to
    if ASM:
        base = open_page_ring(
            p_head, p_row, page_stride, lane, i_split * 0, start, stop, swapped, KEYS, VALUES, SLOTS, NW
        )
        b_ring += (base + tl.arange(0, NW) * (SLOT * SLOTS))[:, None]
        to = base + tl.arange(0, 32 * NW) // 32 * (SLOT * SLOTS)
        pages = pages_of(p_row, start + (SLOTS - 1) * NW, stop, NW)
    whole = tl.maximum(length - count + 1, 0) // 32  # blocks all of whose tokens every query sees
    middle = start + tl.maximum(tl.minimum(stop, whole) - start, 0) // NW * NW
    o_word = o_head // 2
    for MASKED in tl.static_range(2):  # the second time over blocks with tokens that some query does not see
        for first in tl.range(middle if MASKED else start, stop if MASKED else middle, NW, num_stages=1):
            if ASM:
                wait_for_blocks(SLOTS - 2, PRIVATE_BLOCKS, NW)
                behind = to + tl.where(o_slot == 0, SLOT * (SLOTS - 1), o_slot - SLOT)
                fetch_pages(p_head, pages, page_stride, behind, lane, swapped, KEYS, VALUES, NW)
                pages = pages_of(p_row, first + SLOTS * NW, stop, NW)
            b_m, b_l, acc = step(
                p_k, p_ks, p_v, p_vs, o_word, first, stop, b_ring + o_slot, q, plain, sums, unit, b_m, b_l, acc, p_kt,
                p_vt, (o_word, o_word), p_k, p_k, 0, p_k, p_k, 0, 0, KEYS, VALUES, 0, SLICES, STEP, PAIRED, NW, N, ASM,
                MASKED == 1, p_row, limit,
            )
            if ASM:
                o_slot = tl.where(o_slot == SLOT * (SLOTS - 1), 0, o_slot + SLOT)
    if ASM:
        wait_for_blocks(0, PRIVATE_BLOCKS, NW)
    out, b_m, b_l = output_of(
        acc, b_m, b_l, p_v_sign, i_kv, v_unit, VALUES, SLICES, WIDE, WIDTH, PAIRED, PAIRED, NW, N, ASM
    )
    store_split(
        p_partial, p_stat, out, b_m, b_l, i_group * splits + i_split, b_row, False, VALUES, WIDE, PAIRED, PAIRED, EACH,
        D, NW, N,
    )
    tl.debug_barrier()  # all of the program's stores come before its arrival
    merge_splits(
        p_out, p_partial, p_stat, p_count, i_head, i_group, i_chunk, i_split, splits, merge_width, merges, RATIO,
        QUERIES, D, AT_ONCE, ROWS, QUERY_ROWS, ASM, p_starts, HEADS,
    )
