"""`attend` over the transform codec, in one launch: as the kernel of the other formats (`..kernel`), with a decoder of
its own. What this kernel has no part in: keys before RoPE, keys divided by factors, head_dims other than 64 and 128.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..merge import blocks_of_split, merge_splits, store_split
from ..queries import row_offset
from .blocks import packed_blocks
from .exact import exact_tokens
from .output import output_of
from .query import begin
from .ring import open_ring, origins_of


@triton.jit(
    do_not_specialize=[
        "capacity", "sink_capacity", "recent_capacity", "packed_splits", "tail_start", "tail_cost", "tail_total",
        "sink_splits", "splits", "tail_tokens", "merge_width", "merges",
    ],
    do_not_specialize_on_alignment=["p_blocks", "p_sink", "p_recent"],
)
def transform_kernel(
    p_q, p_out, p_k4, p_k3, p_k2, p_k1, p_kn, p_v4, p_v3, p_v2, p_v1, p_vn, p_sink_k, p_sink_v, p_recent_k, p_recent_v,
    p_blocks, p_sink, p_recent, p_partial, p_stat, p_count, p_table, p_key_basis, p_value_basis, p_factor, p_mean,
    capacity, sink_capacity, recent_capacity, packed_splits, tail_start, tail_cost, tail_total, sink_splits, splits,
    tail_tokens, merge_width, merges, factor, HEADS: tl.constexpr, RATIO: tl.constexpr, QUERIES: tl.constexpr,
    D: tl.constexpr, CHUNKS: tl.constexpr, AT_ONCE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, TABLES: tl.constexpr, ENTRIES: tl.constexpr, SLOTS: tl.constexpr, NW: tl.constexpr,
    N: tl.constexpr, ASM: tl.constexpr, RING: tl.constexpr, LONG: tl.constexpr,
):
    """Attend with a grid (batch, HEADS * CHUNKS, splits), as `attend_kernel` does. p_k4 to p_k1, p_v4 to p_v1: codes of
    tiers, p_kn, p_vn norms. p_key_basis, p_value_basis: decoders in tiles, of each head. p_factor: of coordinates of
    keys, then of values. p_mean: of keys, then of values (2, HEADS, D).
    """
    SLICES: tl.constexpr = D // 16
    WIDE: tl.constexpr = D // 32
    QUERY_ROWS: tl.constexpr = N // 2
    KEY_STEPS: tl.constexpr = KEYS.steps
    VALUE_STEPS: tl.constexpr = VALUES.steps
    i_split, i_batch = tl.program_id(2), tl.program_id(0)
    i_kv, i_chunk = tl.program_id(1) // CHUNKS, tl.program_id(1) % CHUNKS
    i_head = (i_batch * HEADS + i_kv).to(tl.int64)
    n = i_chunk * QUERY_ROWS + tl.arange(0, N) // 2
    b_row = n < RATIO * QUERIES
    o_q = row_offset(i_head, n, RATIO, QUERIES, D)
    sink, recent = tl.load(p_sink + i_batch), tl.load(p_recent + i_batch)
    blocks = tl.minimum(tl.load(p_blocks + i_batch), capacity)  # a graph may be replayed once too often
    start, stop = blocks_of_split(i_split, blocks, packed_splits, tail_start, tail_cost, tail_total, NW, LONG)
    key_pointers, value_pointers = (p_k4, p_k3, p_k2, p_k1), (p_v4, p_v3, p_v2, p_v1)
    lane, last = tl.arange(0, 32 * NW) % 32, tl.maximum(stop, 1) - 1

    # blocks are on their way while the query is rotated
    origins = ()
    to = tl.zeros([32 * NW], tl.int32)
    if ASM:
        origins = origins_of(
            key_pointers, p_kn, value_pointers, p_vn, i_head, i_batch, capacity, lane, KEYS, VALUES, False
        )
        to += open_ring(origins, p_blocks, 0, lane, i_split * 0, start, last, KEYS, VALUES, SLOTS, False, NW)
    i_group = i_head * CHUNKS + i_chunk
    q, unit, b_mean, b_m, b_l, acc = begin(
        p_q, p_key_basis, p_factor, p_mean, p_table, o_q, b_row, to, i_split * 0, i_kv, factor, KEYS, VALUES, SLICES,
        ENTRIES, NW, N, ASM,
    )
    b_m, b_l, acc = packed_blocks(
        key_pointers, p_kn, value_pointers, p_vn, p_blocks, 0, p_table, i_head, i_batch, start, stop, stop, 0, origins,
        to, to, lane, q, unit, b_m, b_l, acc, capacity, KEYS, VALUES, TABLES, SLOTS, False, NW, N, ASM,
    )
    out, b_m, b_l = output_of(
        acc, b_m, b_l, b_mean, factor, p_value_basis + i_kv * (WIDE * VALUE_STEPS * 1024),
        p_factor + KEY_STEPS * 16, p_mean + (HEADS + i_kv) * D, VALUES, WIDE, NW, N, ASM,
    )
    if i_split >= tail_start:
        b_m, b_l, out = exact_tokens(
            p_sink_k, p_sink_v, p_recent_k, p_recent_v, p_q, o_q, b_row, n, i_head, i_batch,
            (i_split - tail_start) * tail_tokens, tail_tokens, sink_splits, sink, recent, blocks, sink_capacity,
            recent_capacity, factor, b_m, b_l, out, VALUES, SLICES, RATIO, QUERIES, NW, N, ASM, RING,
        )
    store_split(
        p_partial, p_stat, out, b_m, b_l, i_group * splits + i_split, b_row, i_split >= tail_start, VALUES, WIDE, 1, 1,
        2, D, NW, N,
    )
    tl.debug_barrier()  # all of the program's stores come before its arrival
    merge_splits(
        p_out, p_partial, p_stat, p_count, i_head, i_group, i_chunk, i_split, splits, merge_width, merges, RATIO,
        QUERIES, D, AT_ONCE, ROWS, QUERY_ROWS, ASM,
    )
