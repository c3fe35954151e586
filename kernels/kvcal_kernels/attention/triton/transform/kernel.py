"""`attend` over the transform codec, in one launch: as the kernel of the other formats (`..kernel`), with a decoder of
its own. What this kernel has no part in: keys before RoPE, keys divided by factors, head_dims other than 64 and 128.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..exact import exact_tokens
from ..merge import blocks_of_split, merge_splits, store_split
from ..numbers import LOW, zeros
from ..queries import powers, row_offset
from ..ring import wait_for_blocks
from ..softmax import declare_parities, raised
from .codes import declare_lanes
from .decoder import add_values, load_points, output_of, query_of, scores_of
from .ring import fetch_blocks, open_ring, origins_of


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
    key_pointers, p_kn, value_pointers, p_vn, p_pages, page_stride, p_table, i_head, i_batch, first, stop, limit, ring,
    q, unit, b_m, b_l, acc, capacity, KEYS: tl.constexpr, VALUES: tl.constexpr, TABLES: tl.constexpr,
    PAGED: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr, MASK: tl.constexpr,
):
    """Attend to NW more blocks: return the new maxima, sums and outputs of each warp. MASK: some blocks lie beyond
    `stop`, or some of their tokens are none that a row sees, from `limit` [N] on.
    """
    b_block = first + tl.arange(0, NW)
    b_live = b_block < (stop if MASK else 0x7FFFFFFF)
    o_block, o_norm = _offsets(p_pages, page_stride, i_head, i_batch, b_block, b_live, capacity, PAGED)
    b_0, b_1 = scores_of(
        key_pointers, p_kn, o_block, o_norm, b_live, ring, q, p_table, KEYS, TABLES, PAGED, NW, N, ASM
    )
    if MASK:
        see_0, see_1 = b_live[:, None, None], b_live[:, None, None]
        if PAGED:
            r = tl.arange(0, 16)
            token = b_block[:, None, None] * 32 + (r % 8 * 2 + r // 8)[None, :, None]
            see_0, see_1 = see_0 & (token < limit[None, None, :]), see_1 & (token + 16 < limit[None, None, :])
        b_0 = tl.where(see_0, b_0, LOW)
        b_1 = tl.where(see_1, b_1, LOW)
    unit = tl.broadcast_to(unit[:, None, :], [NW, 16, N])
    b_m, b_l, acc = raised(b_0, b_1, b_m, b_l, unit, acc, VALUES, ASM)
    b_0 = tl.exp2(b_0 * unit - b_m)
    b_1 = tl.exp2(b_1 * unit - b_m)
    if MASK:  # a warp without any block has LOW * unit as its maximum: the rounding of that product may be huge
        b_0 = tl.where(see_0, b_0, 0.0)
        b_1 = tl.where(see_1, b_1, 0.0)
    acc = add_values(
        value_pointers, p_vn, o_block, o_norm, b_live, ring, b_0, b_1, acc, p_table, VALUES, KEYS.slot, TABLES, PAGED,
        NW, N, ASM,
    )
    return b_m, b_l + (b_0 + b_1), acc


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
    SLOT: tl.constexpr = KEYS.slot + VALUES.slot
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
    origins, base, o_slot = (), 0, 0
    b_ring = tl.zeros([NW, 1], tl.int32)
    to = tl.zeros([32 * NW], tl.int32)
    if ASM:
        origins = origins_of(
            key_pointers, p_kn, value_pointers, p_vn, i_head, i_batch, capacity, lane, KEYS, VALUES, False
        )
        base = open_ring(origins, p_blocks, 0, lane, i_split * 0, start, last, KEYS, VALUES, SLOTS, False, NW)
        b_ring += (base + tl.arange(0, NW) * (SLOT * SLOTS))[:, None]
        to = base + tl.arange(0, 32 * NW) // 32 * (SLOT * SLOTS)
    b_down, b_up = powers(p_q, o_q, b_row, KEYS, SLICES, 16.0, 51 << 23, False, N)
    i_group = i_head * CHUNKS + i_chunk
    q, b_up, b_mean = query_of(
        p_q, p_key_basis + i_kv * (KEY_STEPS * SLICES * 256), p_factor, p_mean + i_kv * D, o_q, b_row, b_down, b_up,
        KEYS, SLICES, NW, N, ASM,
    )
    unit = b_up * factor
    if ASM:
        declare_parities()
        declare_lanes()
        load_points(p_table, i_split * 0, ENTRIES)
    b_m = tl.full([NW, 16, N], LOW, tl.float32)  # rows alike
    b_l = tl.zeros([NW, 16, N], tl.float32)
    acc = zeros(VALUE_STEPS, NW, N)
    middle = start + (stop - start) // NW * NW
    for first in tl.range(start, middle, NW, num_stages=1):
        if ASM:
            wait_for_blocks(SLOTS - 2, True, NW)
            behind = tl.where(o_slot == 0, SLOT * (SLOTS - 1), o_slot - SLOT)
            fetch_blocks(
                origins, p_blocks, 0, first + (SLOTS - 1) * NW, last, to + behind, lane, KEYS, VALUES, False, NW
            )
        b_m, b_l, acc = _step(
            key_pointers, p_kn, value_pointers, p_vn, p_blocks, 0, p_table, i_head, i_batch, first, stop, 0,
            b_ring + o_slot, q, unit, b_m, b_l, acc, capacity, KEYS, VALUES, TABLES, False, NW, N, ASM, False,
        )
        if ASM:
            o_slot = tl.where(o_slot == SLOT * (SLOTS - 1), 0, o_slot + SLOT)
    for first in tl.range(middle, stop, NW, num_stages=1):
        if ASM:
            wait_for_blocks(0, True, NW)
        b_m, b_l, acc = _step(
            key_pointers, p_kn, value_pointers, p_vn, p_blocks, 0, p_table, i_head, i_batch, first, stop, 0,
            b_ring + o_slot, q, unit, b_m, b_l, acc, capacity, KEYS, VALUES, TABLES, False, NW, N, ASM, True,
        )
    if ASM:
        wait_for_blocks(0, True, NW)
    out, b_m, b_l = output_of(
        acc, b_m, b_l, b_mean, factor, p_value_basis + i_kv * (WIDE * VALUE_STEPS * 1024),
        p_factor + KEY_STEPS * 16, p_mean + (HEADS + i_kv) * D, VALUES, WIDE, NW, N, ASM,
    )
    if i_split >= tail_start:
        b_m, b_l, out = exact_tokens(
            p_sink_k, p_sink_v, p_recent_k, p_recent_v, p_q, o_q, b_row, n, i_head, i_batch,
            (i_split - tail_start) * tail_tokens, tail_tokens, sink_splits, sink, recent, blocks, sink_capacity,
            recent_capacity, factor, b_m, b_l, out, p_blocks, p_blocks, 0, 0, VALUES, SLICES, 1, 1, RATIO, QUERIES, 0,
            NW, N, ASM, RING,
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
