"""`attend_pages` of reference.py over the transform codec, in one launch: as `transform_kernel` does, over the blocks
that a row's table names, without exact tokens. A page of a head goes through the ring in one piece. The number of a
page is loaded an iteration before the copy that needs it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..merge import blocks_of_split, merge_splits, store_split
from ..queries import rows_in_pages
from ..ring import pages_of
from .blocks import packed_blocks
from .output import output_of
from .query import begin
from .ring import open_ring, origins_of


@triton.jit(
    do_not_specialize=[
        "q_stride", "page_stride", "head_stride", "table_stride", "capacity", "splits", "merge_width", "merges",
    ],
    do_not_specialize_on_alignment=["p_q", "p_table", "p_lengths", "p_starts"],
)
def paged_kernel(
    p_q, p_out, p_pages, p_table, p_lengths, p_starts, p_partial, p_stat, p_count, p_points, p_key_basis,
    p_value_basis, p_factor, p_mean, q_stride, page_stride, head_stride, table_stride, capacity, splits, merge_width,
    merges, factor, HEADS: tl.constexpr, RATIO: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr,
    CHUNKS: tl.constexpr, AT_ONCE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    TABLES: tl.constexpr, ENTRIES: tl.constexpr, SLOTS: tl.constexpr, NW: tl.constexpr, N: tl.constexpr,
    ASM: tl.constexpr, LONG: tl.constexpr,
):
    """Attend with a grid (batch, HEADS * CHUNKS, splits). p_pages: uint8; page_stride, head_stride: bytes of a page,
    and of a head in it. p_table: a row's pages, `capacity` of them. QUERIES: of a row at most. The rest is as in
    `transform_kernel`.
    """
    SLICES: tl.constexpr = D // 16
    WIDE: tl.constexpr = D // 32
    QUERY_ROWS: tl.constexpr = N // 2
    KEY_STEPS: tl.constexpr = KEYS.steps
    VALUE_STEPS: tl.constexpr = VALUES.steps
    i_split, i_batch = tl.program_id(2), tl.program_id(0)
    i_kv, i_chunk = tl.program_id(1) // CHUNKS, tl.program_id(1) % CHUNKS
    i_head = (i_batch * HEADS + i_kv).to(tl.int64)
    i_group = i_head * CHUNKS + i_chunk
    n = i_chunk * QUERY_ROWS + tl.arange(0, N) // 2
    count, length, b_row, o_q, limit = rows_in_pages(
        p_lengths, p_starts, i_batch, i_kv, n, q_stride, capacity, RATIO, QUERIES, D
    )
    start, stop = blocks_of_split(i_split, tl.cdiv(length, 32), splits, splits, 0, 0, NW, LONG)
    o_head = i_kv.to(tl.int64) * head_stride
    p_row = p_table + i_batch.to(tl.int64) * table_stride
    p_values = p_pages + KEYS.slot
    p_kn = (p_pages + KEYS.norm_at).to(tl.pointer_type(tl.float16))
    p_vn = (p_values + VALUES.norm_at).to(tl.pointer_type(tl.float16))
    key_pointers, value_pointers = (p_pages,), (p_values,)
    lane, last = tl.arange(0, 32 * NW) % 32, stop - 1

    # blocks are on their way while the query is rotated
    origins = ()
    to = tl.zeros([32 * NW], tl.int32)
    pages = to
    if ASM:
        origins = origins_of(key_pointers, p_kn, value_pointers, p_vn, o_head, i_batch, 0, lane, KEYS, VALUES, True)
        to += open_ring(origins, p_row, page_stride, lane, i_split * 0, start, last, KEYS, VALUES, SLOTS, True, NW)
        pages = pages_of(p_row, start + (SLOTS - 1) * NW, stop, NW)
    q, unit, b_mean, b_m, b_l, acc = begin(
        p_q, p_key_basis, p_factor, p_mean, p_points, o_q, b_row, to, i_split * 0, i_kv, factor, KEYS, VALUES, SLICES,
        ENTRIES, NW, N, ASM,
    )
    whole = tl.maximum(length - count + 1, 0) // 32  # blocks all of whose tokens every query sees
    b_m, b_l, acc = packed_blocks(
        key_pointers, p_kn, value_pointers, p_vn, p_row, page_stride, p_points, o_head, i_batch, start,
        tl.minimum(stop, whole), stop, limit, origins, pages, to, lane, q, unit, b_m, b_l, acc, 0, KEYS, VALUES, TABLES,
        SLOTS, True, NW, N, ASM,
    )
    out, b_m, b_l = output_of(
        acc, b_m, b_l, b_mean, factor, p_value_basis + i_kv * (WIDE * VALUE_STEPS * 1024),
        p_factor + KEY_STEPS * 16, p_mean + (HEADS + i_kv) * D, VALUES, WIDE, NW, N, ASM,
    )
    store_split(p_partial, p_stat, out, b_m, b_l, i_group * splits + i_split, b_row, False, VALUES, WIDE, 1, 1, 2, D,
                NW, N)  # fmt: skip
    tl.debug_barrier()  # all of the program's stores come before its arrival
    merge_splits(
        p_out, p_partial, p_stat, p_count, i_head, i_group, i_chunk, i_split, splits, merge_width, merges, RATIO,
        QUERIES, D, AT_ONCE, ROWS, QUERY_ROWS, ASM, p_starts, HEADS,
    )
