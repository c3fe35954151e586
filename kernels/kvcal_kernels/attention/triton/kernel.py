"""`attend` of reference.py for NVIDIA GPUs: decode attention that reads packed codes and nothing else, in one launch.

A warp takes a block of 32 tokens; a program NW consecutive ones, every warp with a softmax of its own until the end.
All query rows of a kv head are the N = 8, 16 or 32 columns of one tensor-core product, whose 16 rows are tokens (keys)
or channels (values). That order of storage (see layout/form.py) makes a 32-bit register hold the same field of two
neighbours along the contracted dimension, so one AND unpacks two codes.

Queries enter as float16 whatever their dtype: each row is scaled by a power of two. Scales along the contracted
dimension multiply partial products, others the query (keys) or the probabilities (values). Grids are looked up in a
table in shared memory, a pair of numbers, or two, by one load (`_look_up`); queries are rotated as they are read,
outputs before they are merged. Where a code stands for channels, the pair in a register is of two channels of a value:
rows of the product are then pairs of channels, what is contracted is (token, parity), and every query row takes two
columns, one of which meets the even channels, the other the odd ones (PAIRED).

Keys before RoPE are decoded and rotated in registers (`before_rope.scores_of`), sink and recent ones where they are
read.

Sink and recent tokens are attended to by the last programs of a kv head (the tail of `plan`); the program that arrives
last at a counter merges the results of all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import before_rope, grids, integers, tiers
from .exact import exact_tokens
from .grids import load_tables
from .int8 import queries as int8_queries
from .int8 import step as int8_step
from .merge import blocks_of_split, merge_splits, store_split
from .numbers import LOW, zeros
from .queries import powers, row_offset, whole_rows
from .ring import fetch_blocks, open_ring, wait_for_blocks
from .softmax import declare_parities, raised, second_operand
from .tiles import interleaved_row


@triton.jit
def step(
    p_k, p_ks, p_v, p_vs, i_head, first, stop, ring, q, plain, sums, unit, b_m, b_l, acc,
    p_kt, p_vt, norms, p_order, p_fit, fit, p_first, p_near, run, capacity, KEYS: tl.constexpr, VALUES: tl.constexpr,
    PAIRS: tl.constexpr, SLICES: tl.constexpr, STEP: tl.constexpr, PAIRED: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr, MASK: tl.constexpr, p_pages=None, limit=None,
):
    """Attend to NW more blocks: return the new maxima, sums and outputs of each warp. MASK: some blocks lie beyond
    `stop`. Over pages (`Side.page`): p_pages names a row's; i_head is where a head begins in one, in words; with MASK a
    query sees tokens below its `limit` [N].
    """
    MIXED: tl.constexpr = ASM and PAIRED and KEYS.grid
    b_block = first + tl.arange(0, NW)
    b_live = b_block < (stop if MASK else 0x7FFFFFFF)
    if MASK:
        see_0, see_1 = b_live[:, None, None], b_live[:, None, None]
        if KEYS.page > 0:
            r = tl.arange(0, 16)
            token = b_block[:, None, None] * 32 + (interleaved_row(r) if MIXED else r)[None, :, None]
            see_0, see_1 = see_0 & (token < limit[None, None, :]), see_1 & (token + 16 < limit[None, None, :])
    if KEYS.page > 0:
        b_block = tl.load(p_pages + b_block, mask=b_live, other=0)
    if KEYS.tiers:
        b_0, b_1 = tiers.scores_of(
            p_k, p_ks, p_order, p_fit, i_head, b_block, b_live, ring, fit, capacity, KEYS, SLICES, NW, N, ASM
        )
    elif KEYS.grid:
        b_0, b_1 = grids.scores_of(
            p_k, p_ks, i_head, b_block, b_live, ring, q, capacity, p_kt, norms[0], KEYS, SLICES, STEP, MIXED,
            NW, N, ASM,
        )
    elif PAIRS > 0:
        b_0, b_1 = before_rope.scores_of(
            p_k, p_ks, p_first, p_near, i_head, b_block, run + b_block, b_live, q, capacity, KEYS, SLICES, PAIRS, NW, N,
            ASM,
        )
    else:
        b_0, b_1 = integers.scores_of(
            p_k, p_ks, i_head, b_block, b_live, ring, q, plain, sums, capacity, KEYS, SLICES, NW, N, ASM
        )
    if MASK:
        b_0 = tl.where(see_0, b_0, LOW)
        b_1 = tl.where(see_1, b_1, LOW)
    unit = tl.broadcast_to(unit[:, None, :], [NW, 16, N])
    b_m, b_l, acc = raised(b_0, b_1, b_m, b_l, unit, acc, VALUES, ASM)
    b_0 = tl.exp2(b_0 * unit - b_m)
    b_1 = tl.exp2(b_1 * unit - b_m)
    if MASK:  # a warp without any block has LOW * unit as its maximum: the rounding of that product may be huge
        b_0 = tl.where(see_0, b_0, 0.0)
        b_1 = tl.where(see_1, b_1, 0.0)
    if VALUES.grid:
        b_sum = b_0 + b_1
        acc = grids.add_values(
            p_v, p_vs, i_head, b_block, b_live, ring, b_0, b_1, acc, capacity, p_vt, norms[1], VALUES, KEYS.slot,
            SLICES, STEP, PAIRED, MIXED, NW, N, ASM,
        )
    else:
        ones = tl.full([NW, 16, 16], 1.0, tl.float16)
        b_0 = second_operand(b_0.to(tl.float16), NW, N, ASM)
        b_1 = second_operand(b_1.to(tl.float16), NW, N, ASM)
        b_sum = tl.dot(ones, b_1, tl.dot(ones, b_0))
        acc = integers.add_values(
            p_v, p_vs, i_head, b_block, b_live, ring, b_0, b_1, b_sum, acc, capacity, VALUES, KEYS.slot, SLICES,
            NW, N, ASM,
        )
    return b_m, b_l + b_sum, acc


@triton.jit
def _norm_head(i_batch, i_head, SIDE: tl.constexpr):
    """Return whose scales a kv head reads: its own, or those that all of the row's heads share."""
    return i_batch.to(tl.int64) if SIDE.shared_norm else i_head


@triton.jit
def query_of(
    p_q, p_sign, p_near, p_fit, b_q, b_down, b_up, i_head, i_kv, i_chunk, o_q, b_row, KEYS: tl.constexpr,
    SLICES: tl.constexpr, WIDTH: tl.constexpr, PEAK: tl.constexpr, LOWEST: tl.constexpr, PAIRED: tl.constexpr,
    PAIRS: tl.constexpr, RATIO: tl.constexpr, QUERIES: tl.constexpr, NW: tl.constexpr, N: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return queries as the decoder of keys takes them: what meets codes, what meets zero points, sums of groups,
    queries that are renewed; and b_up, by which a row is larger.
    """
    q, plain, sums, plain_q = (), (), (), ()
    if KEYS.points:
        q, b_up = int8_queries.query_of_points(
            p_q, p_sign, o_q, b_row, b_down, b_up, i_kv, SLICES, WIDTH, NW, N, ASM
        )
    elif PAIRED == 2:
        q, sums, plain_q, b_up = int8_queries.query_of(
            p_q, b_q, i_head, i_chunk, o_q, b_row, KEYS, SLICES, RATIO, QUERIES, NW, N, ASM
        )
    elif KEYS.tiers:
        tiers.query_of(p_q, p_fit, o_q, b_row, b_down, SLICES * 16, N, ASM)
    elif KEYS.grid:
        q = grids.query_of(p_q, p_sign, o_q, b_row, b_down, i_kv, KEYS, SLICES, WIDTH, NW, N)
    elif PAIRS > 0:
        q = before_rope.query_of(p_q, p_near, o_q, b_row, b_down, KEYS, SLICES, PAIRS, NW, N, ASM)
    else:
        q, plain, sums = integers.query_of(
            p_q, i_head, i_chunk, o_q, b_row, b_down, KEYS, SLICES, PEAK, LOWEST, 2 if PAIRED else 1, RATIO, QUERIES,
            NW, N,
        )
    return q, plain, sums, plain_q, b_up


@triton.jit
def output_of(
    acc, b_m, b_l, p_sign, i_kv, v_unit, VALUES: tl.constexpr, SLICES: tl.constexpr, WIDE: tl.constexpr,
    WIDTH: tl.constexpr, PAIRED: tl.constexpr, LAID: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Return what the decoder of values has added up, as numbers: outputs, and maxima and sums of each warp [NW, N]."""
    if PAIRED == 2:
        out, b_m, b_l = int8_step.output_of(acc, b_m, b_l, VALUES, WIDE, N, ASM)
    else:
        b_m = tl.max(b_m, 1)
        if VALUES.grid:
            b_l = tl.sum(b_l, 1)
            out = acc
        else:
            out, b_l = integers.output_of(acc, b_l, VALUES, SLICES)
    if VALUES.grid or VALUES.points:
        out = grids.output_of(
            out, p_sign, i_kv, v_unit, VALUES, WIDE, WIDTH, PAIRED, LAID, SLICES * 16, 2 if PAIRED else 1, NW, N
        )
    return out, b_m, b_l


@triton.jit
def _all_blocks(
    pointers, origins, base, i_head, norms, start, stop, last, lane, swapped, queries, prepared, unit, b_m, b_l, acc,
    capacity, KEYS: tl.constexpr, VALUES: tl.constexpr, SAME: tl.constexpr, PAIRS: tl.constexpr, SLICES: tl.constexpr,
    STEP: tl.constexpr, PAIRED: tl.constexpr, SLOTS: tl.constexpr, STAGES: tl.constexpr, FETCH: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Attend to a program's blocks, NW at a time, one for each warp. origins, base: of the ring, where FETCH. queries:
    of `query_of`; prepared: what else the decoders need.
    """
    p_k, p_ks, p_v, p_vs, p_kt, p_vt, p_order, p_fit, p_first, p_near = pointers
    q, plain, sums, plain_q = queries
    places, tables, fit, run = prepared
    SLOT: tl.constexpr = KEYS.slot + VALUES.slot
    INT8: tl.constexpr = PAIRED == 2
    PRIVATE_BLOCKS: tl.constexpr = NW == 1 or INT8 or (KEYS.grid and VALUES.grid)
    middle = start + (stop - start) // NW * NW
    b_ring, o_slot = tl.zeros([NW, 1], tl.int32), 0
    if FETCH:
        b_ring += (base + tl.arange(0, NW) * (SLOT * SLOTS))[:, None]
        to = base + tl.arange(0, 32 * NW) // 32 * (SLOT * SLOTS)
    for first in tl.range(start, stop if INT8 else middle, NW, num_stages=STAGES):
        if FETCH:
            wait_for_blocks(SLOTS - 2, PRIVATE_BLOCKS, NW)
            behind = tl.where(o_slot == 0, SLOT * (SLOTS - 1), o_slot - SLOT)
            fetch_blocks(origins, first + (SLOTS - 1) * NW, last, to + behind, lane, swapped, KEYS, VALUES, NW)
        if INT8:
            b_m, b_l, acc, q = int8_step.step(
                p_k, p_ks, p_v, p_vs, i_head, norms, first, start, stop, o_slot, places, q, sums, plain, plain_q,
                tables, p_kt, p_vt, unit, b_m, b_l, acc, capacity, KEYS, VALUES, SAME, SLICES, NW, N, ASM,
            )
        else:
            b_m, b_l, acc = step(
                p_k, p_ks, p_v, p_vs, i_head, first, stop, b_ring + o_slot, q, plain, sums, unit, b_m, b_l, acc,
                p_kt, p_vt, norms, p_order, p_fit, fit, p_first, p_near, run, capacity, KEYS, VALUES,
                PAIRS, SLICES, STEP, PAIRED, NW, N, ASM, False,
            )
        if FETCH:
            o_slot = tl.where(o_slot == SLOT * (SLOTS - 1), 0, o_slot + SLOT)
    if NW > 1 and not INT8:
        for first in tl.range(middle, stop, NW, num_stages=1):
            if FETCH:
                wait_for_blocks(0, PRIVATE_BLOCKS, NW)
            b_m, b_l, acc = step(
                p_k, p_ks, p_v, p_vs, i_head, first, stop, b_ring + o_slot, q, plain, sums, unit, b_m, b_l, acc,
                p_kt, p_vt, norms, p_order, p_fit, fit, p_first, p_near, run, capacity, KEYS, VALUES,
                PAIRS, SLICES, STEP, PAIRED, NW, N, ASM, True,
            )
    if FETCH:
        wait_for_blocks(0, PRIVATE_BLOCKS, NW)
    return b_m, b_l, acc


@triton.jit(
    do_not_specialize=[
        "capacity",
        "sink_capacity",
        "recent_capacity",
        "packed_splits",
        "tail_start",
        "tail_cost",
        "tail_total",
        "sink_splits",
        "splits",
        "tail_tokens",
        "merge_width",
        "merges",
        "runs",
    ],
    do_not_specialize_on_alignment=["p_blocks", "p_sink", "p_recent"],  # rows of one tensor, as they come
)
def attend_kernel(
    p_q, p_exact_q, p_out, p_k, p_ks, p_v, p_vs, p_sink_k, p_sink_v, p_recent_k, p_recent_v, p_blocks, p_sink, p_recent,
    p_partial, p_stat, p_count, p_kt, p_vt, p_k_sign, p_v_sign, p_order, p_first, p_near, capacity, sink_capacity,
    recent_capacity, packed_splits, tail_start, tail_cost, tail_total, sink_splits, splits, tail_tokens, merge_width,
    merges, runs, factor, k_unit, v_unit, HEADS: tl.constexpr, RATIO: tl.constexpr, QUERIES: tl.constexpr,
    D: tl.constexpr, CHUNKS: tl.constexpr, AT_ONCE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, SAME: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, PAIRED: tl.constexpr,
    SLOTS: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, RING: tl.constexpr,
    LONG: tl.constexpr, PAIRS: tl.constexpr,
):
    """Attend with a grid (batch, HEADS * CHUNKS, splits): programs of one split begin together, see `plan`. A row's
    blocks and `tail_total` ones are divided by `packed_splits`. Splits from `tail_start` on have `tail_cost` of them
    fewer than the others, or none, and then `tail_tokens` exact tokens each, `sink_splits` of the sink, the rest of
    recent ones. The last program of each `merge_width` splits merges them, the last of those `merges` what they merged
    (docs/benchmarks/decode_attention.md). factor: softmax scale times log2(e). p_exact_q: of sink and recent. k_unit,
    v_unit: of tables. LONG: of `floor_divide`.

    Keys before RoPE, of which PAIRS pairs of pieces are rotated: p_first, p_near are `Rope.first_words` and
    `near_words`, runs how many runs of positions a row has in p_first, 0 where all rows share them.
    """
    SLICES: tl.constexpr = D // 16
    WIDE: tl.constexpr = D // 32 if PAIRED else SLICES  # slices of outputs
    ZEROS: tl.constexpr = D // VALUES.group if VALUES.outer and PAIRED == 0 else 0
    EACH: tl.constexpr = 2 if PAIRED else 1  # columns of a query row
    INT8: tl.constexpr = PAIRED == 2
    QUERY_ROWS: tl.constexpr = N // EACH
    i_split, i_batch = tl.program_id(2), tl.program_id(0)
    i_kv, i_chunk = tl.program_id(1) // CHUNKS, tl.program_id(1) % CHUNKS
    i_head = (i_batch * HEADS + i_kv).to(tl.int64)
    n = i_chunk * QUERY_ROWS + tl.arange(0, N) // EACH
    b_row = n < RATIO * QUERIES
    o_q = row_offset(i_head, n, RATIO, QUERIES, D)
    norms = (_norm_head(i_batch, i_head, KEYS), _norm_head(i_batch, i_head, VALUES))
    sink, recent = tl.load(p_sink + i_batch), tl.load(p_recent + i_batch)
    blocks = tl.minimum(tl.load(p_blocks + i_batch), capacity)  # a graph may be replayed once too often
    start, stop = blocks_of_split(i_split, blocks, packed_splits, tail_start, tail_cost, tail_total, NW, LONG)

    # the ring
    SLOT: tl.constexpr = KEYS.slot + VALUES.slot
    FETCH: tl.constexpr = ASM and SLOT > 0
    # what waits longest comes first, except where the query is rotated meanwhile: that spills
    RING_FIRST: tl.constexpr = FETCH and (not (KEYS.tiers or KEYS.grid)) and PAIRS == 0
    lane, last = tl.arange(0, 32 * NW) % 32, tl.maximum(stop, 1) - 1
    swapped = lane * 16 ^ lane // 8 % 2 * 16
    # ahead of the ring, which waits for the count of blocks: the compiler would begin the ring behind the query's use
    b_q = whole_rows(p_q, i_head, i_chunk, QUERY_ROWS, RATIO, QUERIES, D) if INT8 and not KEYS.points else 0
    origins, base = (), 0
    if RING_FIRST:
        origins, base = open_ring(
            p_k, p_ks, p_order, p_v, p_vs, i_head, norms, capacity, lane, i_split * 0, start, last, swapped, KEYS,
            VALUES, SLOTS, NW,
        )

    # each row's query times a power of two, so that its largest element lies in [16, 32); scales of outer groups
    # multiply it in float16 and may be 43669 (2 bits, keys of +-65504): in [0.5, 1) there
    PEAK: tl.constexpr = 0.5 if (KEYS.outer and PAIRS == 0) or KEYS.tiers else 16.0
    # at least 2^-100, of grids and before RoPE 2^-76: LOW times `unit` must stay far below every score
    LOWEST: tl.constexpr = (51 if KEYS.grid or PAIRS > 0 else 27) << 23
    b_down, b_up = powers(p_q, o_q, b_row, KEYS, SLICES, PEAK, LOWEST, INT8, N)
    i_group = i_head * CHUNKS + i_chunk
    # where this program's output will lie
    p_fit = p_partial.to(tl.pointer_type(tl.float16)) + (i_group * splits + i_split) * (2 * QUERY_ROWS * D)
    q, plain, sums, plain_q, b_up = query_of(
        p_q, p_k_sign, p_near, p_fit, b_q, b_down, b_up, i_head, i_kv, i_chunk, o_q, b_row, KEYS, SLICES, WIDTH, PEAK,
        LOWEST, PAIRED, PAIRS, RATIO, QUERIES, NW, N, ASM,
    )
    SCALE: tl.constexpr = WIDTH**-0.5 if KEYS.grid or KEYS.points else 1.0 if PAIRS > 0 or INT8 else 2.0**24
    run = i_batch * runs + tl.cdiv(sink_capacity, 32)  # of the first block
    unit = tl.broadcast_to((b_up * (factor * k_unit * SCALE))[None, :], [NW, N])

    if ASM and PAIRED and KEYS.grid:
        declare_parities()
    if ASM and KEYS.entries + VALUES.entries > 0:  # noqa: SIM102
        if i_split < packed_splits:
            load_tables(p_kt, p_vt, i_split * 0, KEYS, VALUES, SAME, STEP)
    b_m = tl.full([NW, 16, N], LOW, tl.float32)  # rows alike
    places, tables = b_m, ()
    if INT8 and ASM:
        at = base + tl.arange(0, NW) * (SLOT * SLOTS)
        b_m, places, sums, plain, tables = int8_step.state_of(
            p_kt, p_vt, unit, at, sums, capacity, KEYS, VALUES, SAME, SLICES, NW, N
        )
    b_l = tl.zeros([NW, 16, N], tl.float32)  # rows alike, except where values are of a grid
    acc = zeros(WIDE + ZEROS, NW, N)
    fit = tiers.row_bytes(NW, N) if KEYS.tiers else 0
    if FETCH and not RING_FIRST:
        origins, base = open_ring(
            p_k, p_ks, p_order, p_v, p_vs, i_head, norms, capacity, lane, i_split * 0, start, last, swapped, KEYS,
            VALUES, SLOTS, NW,
        )
    b_m, b_l, acc = _all_blocks(
        (p_k, p_ks, p_v, p_vs, p_kt, p_vt, p_order, p_fit, p_first, p_near), origins, base, i_head, norms, start, stop,
        last, lane, swapped, (q, plain, sums, plain_q), (places, tables, fit, run), unit, b_m, b_l, acc, capacity, KEYS,
        VALUES, SAME, PAIRS, SLICES, STEP, PAIRED, SLOTS, STAGES, FETCH, NW, N, ASM,
    )
    LAID: tl.constexpr = 1 if VALUES.points and VALUES.group > 1 else PAIRED  # how channels of values lie in outputs
    out, b_m, b_l = output_of(
        acc, b_m, b_l, p_v_sign, i_kv, v_unit, VALUES, SLICES, WIDE, WIDTH, PAIRED, LAID, NW, N, ASM
    )

    # what tables and tiers leave of shared memory
    SPARE_MEMORY: tl.constexpr = KEYS.entries + VALUES.entries + PAIRS == 0 and not (KEYS.tiers or KEYS.points)
    EXACT_STAGES: tl.constexpr = 2 if SPARE_MEMORY else 1
    if i_split >= tail_start:
        b_m, b_l, out = exact_tokens(
            p_sink_k, p_sink_v, p_recent_k, p_recent_v, p_exact_q, o_q, b_row, n, i_head, i_batch,
            (i_split - tail_start) * tail_tokens, tail_tokens, sink_splits, sink, recent, blocks, sink_capacity,
            recent_capacity, factor, b_m, b_l, out, p_first, p_near, run, runs, VALUES, SLICES, PAIRED, EXACT_STAGES,
            RATIO, QUERIES, PAIRS, NW, N, ASM, RING,
        )
    store_split(
        p_partial, p_stat, out, b_m, b_l, i_group * splits + i_split, b_row, i_split >= tail_start, VALUES, WIDE,
        PAIRED, LAID, EACH, D, NW, N,
    )
    tl.debug_barrier()  # all of the program's stores come before its arrival
    merge_splits(
        p_out, p_partial, p_stat, p_count, i_head, i_group, i_chunk, i_split, splits, merge_width, merges,
        RATIO, QUERIES, D, AT_ONCE, ROWS, QUERY_ROWS, ASM,
    )
