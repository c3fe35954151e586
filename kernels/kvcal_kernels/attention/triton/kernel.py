"""`attend` of reference.py for NVIDIA GPUs: decode attention that reads packed codes and nothing else, in one launch.

A warp takes a block of 32 tokens; a program NW consecutive ones, every warp with a softmax of its own until the end. All
query rows of a kv head are the N = 8, 16 or 32 columns of one tensor-core product, whose 16 rows are tokens (keys) or
channels (values): that order of storage (see reference.py) makes a 32-bit register hold the same field of two neighbours
along the contracted dimension, so one AND unpacks two codes.

Queries enter as float16 whatever their dtype: each row is scaled by a power of two. Scales along the contracted dimension
multiply partial products, others the query (keys) or the probabilities (values).
Grids are looked up in a table in shared memory, a pair of numbers, or two, by one load (`_look_up`); queries are rotated as
they are read, outputs before they are merged. Where a code stands for channels, the pair in a register is of two channels of
a value: rows of the product are then pairs of channels, what is contracted is (token, parity), and every query row takes two
columns, one of which meets the even channels, the other the odd ones (PAIRED).

Keys before RoPE are decoded and turned in registers (`_turned_scores`), sink and recent ones where they are read.

Sink and recent tokens are the last program of a kv head; the program that arrives last at a counter merges all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .before_rope import _joined_queries, _names, _turned_scores
from .exact import _exact
from .grids import _add_points, _grid_scores, _tables
from .int8.ptx import points_tensors
from .int8.queries import (
    FULL_PROBABILITY,
    FULL_QUERY,
    _begun,
    _byte_base,
    _byte_place,
    _byte_state,
    _byte_tables,
    _bytes_of_queries,
    _constants,
    _plain_queries,
    _rotated_bytes,
    _spread_state,
)
from .int8.step import _byte_step
from .int8.values import constants
from .integers import _add, _key_place, _place, _scores, _unit
from .merge import _at_a_time, _joined, _merge, _numbers, _over_warps, _share
from .numbers import LOW, _transposed
from .ring import _arrive, _fetch, _open_ring
from .rotation import _across, _butterflies, _hadamard, _of_parity, _rotated, _sign, _value_channels
from .softmax import _operand, _parities, _risen
from .tiers import _fit_table, _tier_scores
from .tiles import _halved, _spot


@triton.jit
def _step(
    p_k, p_ks, p_v, p_vs, i_head, first, stop, ring, q, plain, sums, unit, b_m, b_l, acc,
    p_kt, p_vt, norms, p_order, p_fit, fit, p_first, p_near, run, room, KEYS: tl.constexpr, VALUES: tl.constexpr,
    PAIRS: tl.constexpr, SLICES: tl.constexpr, STEP: tl.constexpr, PAIRED: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """NW blocks more: the new maxima, sums and outputs of each warp. MASK: some lie beyond `stop`."""
    MIXED: tl.constexpr = ASM and PAIRED and KEYS.grid
    b_block = first + tl.arange(0, NW)
    b_live = b_block < (stop if MASK else 0x7FFFFFFF)
    if KEYS.tiers:
        b_0, b_1 = _tier_scores(
            p_k, p_ks, p_order, p_fit, i_head, b_block, b_live, ring, fit, room, KEYS, SLICES, NW, N, ASM
        )  # fmt: skip
    elif KEYS.grid:
        b_0, b_1 = _grid_scores(
            p_k, p_ks, i_head, b_block, b_live, ring, q, room, p_kt, norms[0], KEYS, SLICES, STEP, MIXED,
            NW, N, ASM,
        )  # fmt: skip
    elif PAIRS > 0:
        b_0, b_1 = _turned_scores(
            p_k, p_ks, p_first, p_near, i_head, b_block, run + b_block, b_live, q, room, KEYS, SLICES, PAIRS, NW, N,
            ASM,
        )  # fmt: skip
    else:
        b_0, b_1 = _scores(
            p_k, p_ks, i_head, b_block, b_live, ring, q, plain, sums, room, KEYS, SLICES, NW, N, ASM
        )  # fmt: skip
    if MASK:
        b_0 = tl.where(b_live[:, None, None], b_0, LOW)
        b_1 = tl.where(b_live[:, None, None], b_1, LOW)
    unit = tl.broadcast_to(unit[:, None, :], [NW, 16, N])
    b_m, b_l, acc = _risen(b_0, b_1, b_m, b_l, unit, acc, VALUES, ASM)
    b_0 = tl.exp2(b_0 * unit - b_m)
    b_1 = tl.exp2(b_1 * unit - b_m)
    if MASK:  # a warp without any block has LOW * unit as its maximum: the rounding of that product may be huge
        b_0 = tl.where(b_live[:, None, None], b_0, 0.0)
        b_1 = tl.where(b_live[:, None, None], b_1, 0.0)
    if VALUES.grid:
        b_sum = b_0 + b_1
        acc = _add_points(
            p_v, p_vs, i_head, b_block, b_live, ring, b_0, b_1, acc, room, p_vt, norms[1], VALUES, KEYS.slot,
            SLICES, STEP, PAIRED, MIXED, NW, N, ASM,
        )  # fmt: skip
    else:
        ones = tl.full([NW, 16, 16], 1.0, tl.float16)
        b_0 = _operand(b_0.to(tl.float16), NW, N, ASM)
        b_1 = _operand(b_1.to(tl.float16), NW, N, ASM)
        b_sum = tl.dot(ones, b_1, tl.dot(ones, b_0))
        acc = _add(
            p_v, p_vs, i_head, b_block, b_live, ring, b_0, b_1, b_sum, acc, room, VALUES, KEYS.slot, SLICES,
            NW, N, ASM,
        )  # fmt: skip
    return b_m, b_l + b_sum, acc


@triton.jit(
    do_not_specialize=[
        "room",
        "sink_room",
        "recent_room",
        "splits",
        "early",
        "less",
        "extra",
        "sink_parts",
        "parts",
        "share",
        "fan",
        "fans",
        "runs",
    ],
    do_not_specialize_on_alignment=["p_blocks", "p_sink", "p_recent"],  # rows of one tensor, as they come
)
def attend_kernel(
    p_q, p_exact_q, p_out, p_k, p_ks, p_v, p_vs, p_sink_k, p_sink_v, p_recent_k, p_recent_v,
    p_blocks, p_sink, p_recent, p_part, p_stat, p_count, p_kt, p_vt, p_k_sign, p_v_sign, p_order,
    p_first, p_near, room, sink_room, recent_room, splits, early, less, extra, sink_parts, parts, share, fan, fans, runs,
    factor, k_unit, v_unit,
    HEADS: tl.constexpr, RATIO: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, CHUNKS: tl.constexpr,
    AT_ONCE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, SAME: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    PAIRED: tl.constexpr, SLOTS: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, RING: tl.constexpr, LONG: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Grid (batch, HEADS * CHUNKS, parts): programs of one part begin together, see `plan`. A row's blocks and `extra` ones
    are divided by `splits`; parts from `early` on have `less` of them fewer than the others, or none, and behind them `share`
    exact tokens each, `sink_parts` of the sink, the rest of recent ones. The last program of each `fan` parts merges them,
    the last of those `fans` what they merged: one program alone, which waits for each few parts anew, took 25 of 70 us for the
    100 parts of 1 x 131072 (H200).
    factor: softmax scale times log2(e). p_exact_q: p_q of sink and recent. k_unit, v_unit: of tables. LONG: as of `_over`.

    Keys before RoPE, PAIRS pairs of pieces of which it turns: p_first, p_near are `Rope.first_words` and `near_words`, runs
    how many runs of positions a row has in p_first, 0 where all rows share them.
    """
    SLICES: tl.constexpr = D // 16
    WIDE: tl.constexpr = D // 32 if PAIRED else SLICES  # slices of outputs
    ZEROS: tl.constexpr = D // VALUES.group if VALUES.outer and PAIRED == 0 else 0
    EACH: tl.constexpr = 2 if PAIRED else 1  # columns of a query row
    BYTES: tl.constexpr = PAIRED == 2
    ROOM: tl.constexpr = N // EACH
    i_split, i_batch = tl.program_id(2), tl.program_id(0)
    i_kv, i_chunk = tl.program_id(1) // CHUNKS, tl.program_id(1) % CHUNKS
    i_head = (i_batch * HEADS + i_kv).to(tl.int64)
    r = tl.arange(0, 16)
    column = tl.arange(0, N)
    n = i_chunk * ROOM + column // EACH
    b_row = n < RATIO * QUERIES
    o_q = ((i_head * RATIO + n % RATIO) * QUERIES + n // RATIO) * D

    # heads of scales
    norms = (
        i_batch.to(tl.int64) if KEYS.shared_norm else i_head,
        i_batch.to(tl.int64) if VALUES.shared_norm else i_head,
    )
    sink, recent = tl.load(p_sink + i_batch), tl.load(p_recent + i_batch)
    blocks = tl.minimum(tl.load(p_blocks + i_batch), room)  # a graph may be replayed once too often
    start, stop = _share(i_split, blocks, splits, early, less, extra, NW, LONG)
    middle = start + (stop - start) // NW * NW
    SLOT: tl.constexpr = KEYS.slot + VALUES.slot
    FETCH: tl.constexpr = ASM and SLOT > 0
    OWN: tl.constexpr = NW == 1 or BYTES or (KEYS.grid and VALUES.grid)
    # what waits longest comes first, 0.5 to 1 us earlier (H200); not where the query is rotated meanwhile: that spills
    EARLY: tl.constexpr = FETCH and (not (KEYS.tiers or KEYS.grid)) and PAIRS == 0
    b_ring, o_slot = tl.zeros([NW, 1], tl.int32), 0
    thread, last = tl.arange(0, 32 * NW), tl.maximum(stop, 1) - 1
    lane = thread % 32
    swapped = lane * 16 ^ lane // 8 % 2 * 16
    # ahead of the ring, which waits for the count of blocks: the compiler would begin the ring behind the query's use
    if BYTES and not KEYS.points:
        n_4 = i_chunk * ROOM + tl.arange(0, ROOM)
        channel = tl.arange(0, triton.next_power_of_2(D))
        o_4 = ((i_head * RATIO + n_4 % RATIO) * QUERIES + n_4 // RATIO) * D
        inside = (n_4 < RATIO * QUERIES)[:, None] & (channel < D)[None, :]
        b_q = tl.load(p_q + o_4[:, None] + channel[None, :], mask=inside, other=0.0)
    if EARLY:
        origins, base = _open_ring(
            p_k, p_ks, p_order, p_v, p_vs, i_head, norms, room, lane, i_split * 0, start, last, swapped, KEYS, VALUES,
            SLOTS, NW,
        )  # fmt: skip

    # each row's query times a power of two, so that its largest element lies in [16, 32); scales of outer groups multiply it
    # in float16 and may be 43669 (2 bits, keys of +-65504): in [0.5, 1) there
    PEAK: tl.constexpr = 0.5 if (KEYS.outer and PAIRS == 0) or KEYS.tiers else 16.0
    b_peak = tl.zeros([N], tl.float32)
    if KEYS.points:  # one maximum across lanes for all slices
        b_high = tl.zeros([16, N], tl.float32)
        for i in tl.static_range(SLICES):
            b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0)
            b_high = tl.maximum(b_high, tl.abs(b_q.to(tl.float32)))
        b_peak = tl.max(b_high, 0)
    for i in tl.static_range(0 if BYTES else SLICES):
        b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0)
        b_peak = tl.maximum(b_peak, tl.max(tl.abs(b_q.to(tl.float32)), 0))
    # at least 2^-100, of grids and before RoPE 2^-76: LOW times `unit` must stay far below every score
    lowest: tl.constexpr = (51 if KEYS.grid or PAIRS > 0 else 27) << 23
    exponent = tl.maximum(b_peak.to(tl.int32, bitcast=True) & 0x7F800000, lowest)
    b_down = ((254 << 23) - exponent).to(tl.float32, bitcast=True) * PEAK
    b_up = exponent.to(tl.float32, bitcast=True) * (1 / PEAK)
    q, plain, sums, plain_q = (), (), (), ()
    i_group = i_head * CHUNKS + i_chunk
    # where this program's output will lie
    p_fit = p_part.to(tl.pointer_type(tl.float16)) + (i_group * parts + i_split) * (2 * ROOM * D)
    if KEYS.points:
        plain = _rotated(p_q, p_k_sign, o_q, b_row, b_down, i_kv, SLICES, D, WIDTH, 1, False, NW, N)
        b_high = tl.full([NW, 16, N], 2.0**-24, tl.float32)
        for i in tl.static_range(SLICES):
            b_high = tl.maximum(b_high, tl.abs(plain[i]))
        b_step = tl.max(b_high, 1) * (1 / FULL_QUERY)
        b_finite = tl.sum(plain[0] - plain[0], 1)  # 0, or NaN where a number is not finite, which integers do not show
        if ASM:
            q = _rotated_bytes(plain, 1 / b_step, SLICES, NW, N)
        else:
            for i in tl.static_range(SLICES):
                q = q + (tl.floor(plain[i] / b_step[:, None, :] + 0.5),)
        b_up = b_up * tl.max(b_step + b_finite, 0)
        plain = ()
    elif BYTES:
        # as integers, which order floats that are not negative, NaN above all
        b_up = tl.max(b_q.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        b_up = tl.maximum(b_up, 27 << 23).to(tl.float32, bitcast=True)  # 2^-100
        b_finite = b_up - b_up  # 0, or NaN where a number is not finite: integers do not show it
        n_t = i_chunk * ROOM + r % 8 // 2
        there = n_t < RATIO * QUERIES
        o_t = ((i_head * RATIO + n_t % RATIO) * QUERIES + n_t // RATIO) * D
        if KEYS.outer:  # powers of two: below 1
            b_up = (b_up.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 2.0
            b_down = tl.reshape(tl.broadcast_to((1 / b_up)[None, :, None], [2, ROOM, 2]), [16])
            plain_q = _plain_queries(p_q, o_t, there, b_down, D, NW)
            if ASM:
                for _ in tl.static_range((SLICES + 3) // 4):
                    q = q + (_spot(NW, 8),)
                q = q + (_spot(NW, 8).to(tl.float32),)
        else:
            b_up = b_up * (1 / FULL_QUERY)
            b_down = tl.reshape(tl.broadcast_to((1 / b_up)[None, :, None], [2, ROOM, 2]), [16])
            if ASM:
                q = _bytes_of_queries(p_q, o_t, there, b_down, D, NW)
        b_up = tl.reshape(tl.broadcast_to((b_up + b_finite)[:, None], [ROOM, 2]), [N])
        if not ASM:
            for i in tl.static_range(SLICES):
                b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0)
                b_q = b_q.to(tl.float32) / b_up[None, :]
                b_q = b_q.to(tl.float16).to(tl.float32) if KEYS.outer else tl.floor(b_q + 0.5)
                q = q + (tl.broadcast_to(b_q[None], [NW, 16, N]),)
        if ASM and KEYS.inner:
            sums = _begun(q, SLICES, KEYS.pieces, KEYS.bits, KEYS.mode)
    elif KEYS.tiers:
        channel = tl.arange(0, triton.next_power_of_2(D))
        b_q = tl.load(p_q + o_q[None, :] + channel[:, None], mask=b_row[None, :] & (channel < D)[:, None], other=0.0)
        b_q = (b_q.to(tl.float32) * b_down[None, :]).to(tl.float16)
        at, inside = channel[:, None] * N + column[None, :], channel[:, None] < D + 0 * column[None, :]
        _fit_table(p_fit, b_q, at, inside, 2 * N * triton.next_power_of_2(D), ASM)
        tl.debug_barrier()
    elif KEYS.grid:
        plain = _rotated(p_q, p_k_sign, o_q, b_row, b_down, i_kv, SLICES, D, WIDTH, KEYS.factor, KEYS.quads, NW, N)
        for i in tl.static_range(SLICES):
            q = q + (plain[i].to(tl.float16),)
    elif PAIRS > 0:
        for i in tl.static_range(SLICES):
            if KEYS.inner and i >= 2 * PAIRS:
                b_q = _joined_queries(p_q + o_q[None, :] + i * 16, b_row[None, :], N)
            else:
                b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0)
            b_q = (b_q.to(tl.float32) * b_down[None, :]).to(tl.float16)
            q = q + (tl.broadcast_to(b_q[None], [NW, 16, N]),)
        if ASM:
            _names(p_near, KEYS.bits)
    else:
        TALL: tl.constexpr = max(N, 16)
        if KEYS.outer:  # by rows, see `_transposed`
            tall = tl.arange(0, TALL)
            n_t = i_chunk * ROOM + tall // EACH
            b_there = (tall < N) & (n_t < RATIO * QUERIES)
            o_t = ((i_head * RATIO + n_t % RATIO) * QUERIES + n_t // RATIO) * D
            b_high = tl.zeros([TALL], tl.float32)
            for i in tl.static_range(SLICES):
                b_q = tl.load(p_q + o_t[:, None] + (i * 16 + r)[None, :], mask=b_there[:, None], other=0.0)
                b_high = tl.maximum(b_high, tl.max(tl.abs(b_q.to(tl.float32)), 1))
            top = tl.maximum(b_high.to(tl.int32, bitcast=True) & 0x7F800000, lowest)
            b_shrink = ((254 << 23) - top).to(tl.float32, bitcast=True) * PEAK
        b_none = 0.0
        if KEYS.zeros:  # zeros in the layout of a product: without them sums, and scores with them, take another
            b_none = tl.dot(tl.zeros([NW, 16, 16], tl.float16), tl.zeros([NW, 16, N], tl.float16))
        for i in tl.static_range(SLICES):
            b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0)
            b_q = b_q.to(tl.float32) * b_down[None, :]
            place = _key_place(0, i, KEYS.bits, KEYS.mode, KEYS.pieces)
            b_fit = tl.broadcast_to((b_q / place).to(tl.float16)[None], [NW, 16, N])
            if KEYS.outer:
                b_q = tl.load(p_q + o_t[:, None] + (i * 16 + r)[None, :], mask=b_there[:, None], other=0.0)
                b_q = b_q.to(tl.float32) * b_shrink[:, None]
                q = q + (tl.broadcast_to((b_q / place).to(tl.float16)[None], [NW, TALL, 16]),)
                plain = plain + (_transposed(tl.broadcast_to(b_q.to(tl.float16)[None], [NW, TALL, 16]), NW, N),)
            else:
                q = q + (b_fit,)
                b_total = tl.sum(b_fit.to(tl.float32), 1) * place
                if i % (KEYS.group // 16) == 0:
                    b_group = b_total
                else:
                    b_group += b_total
                if (i + 1) % (KEYS.group // 16) == 0:
                    b_group = b_group * (_unit(KEYS.bits, KEYS.mode) * 2.0**-24)
                    sums = sums + (tl.broadcast_to(b_group[:, None, :], [NW, 16, N]) + b_none,)
    scale: tl.constexpr = WIDTH**-0.5 if KEYS.grid or KEYS.points else 1.0 if PAIRS > 0 or BYTES else 2.0**24
    run = i_batch * runs + tl.cdiv(sink_room, 32)  # of the first block
    unit = tl.broadcast_to((b_up * (factor * k_unit * scale))[None, :], [NW, N])

    if ASM and PAIRED and KEYS.grid:
        _parities()
    if ASM and KEYS.entries + VALUES.entries > 0:  # noqa: SIM102
        if i_split < splits:
            _tables(p_kt, p_vt, i_split * 0, KEYS, VALUES, SAME, STEP)
    b_m = tl.full([NW, 16, N], LOW, tl.float32)  # rows alike
    places, tables = b_m, ()
    if BYTES and ASM:
        HALVES: tl.constexpr = _halved(KEYS.words) or _halved(VALUES.words)
        b_m, places = _byte_state(
            unit, base + tl.arange(0, NW) * (SLOT * SLOTS), KEYS, VALUES, D, HALVES, NW, N
        )  # fmt: skip
        if KEYS.outer:
            sums = (_byte_base(unit, NW, N),)
        plain = _constants(room, constants(SLICES, VALUES.tiles, VALUES.bits, VALUES.mode), NW, N)
        tables = _byte_tables(p_kt, points_tensors(KEYS.mode, KEYS.group), NW, N)
        if not SAME:
            tables = tables + _byte_tables(p_vt, points_tensors(VALUES.mode, VALUES.group), NW, N)
    b_l = tl.zeros([NW, 16, N], tl.float32)  # rows alike, except where values are of a grid
    acc = ()
    for _ in tl.static_range(WIDE + ZEROS):
        acc = acc + (tl.zeros([NW, 16, N], tl.float32),)
    fit = 0
    if KEYS.tiers:
        TALL: tl.constexpr = max(N, 16)
        fit = tl.arange(0, TALL)[None, :, None] * 2 + _spot(NW, 16, TALL)
    if FETCH and not EARLY:
        origins, base = _open_ring(
            p_k, p_ks, p_order, p_v, p_vs, i_head, norms, room, lane, i_split * 0, start, last, swapped, KEYS, VALUES,
            SLOTS, NW,
        )  # fmt: skip
    if FETCH:
        b_ring += (base + tl.arange(0, NW) * (SLOT * SLOTS))[:, None]
        to = base + thread // 32 * (SLOT * SLOTS)
    for first in tl.range(start, stop if BYTES else middle, NW, num_stages=STAGES):
        if FETCH:
            _arrive(SLOTS - 2, OWN, NW)
            behind = tl.where(o_slot == 0, SLOT * (SLOTS - 1), o_slot - SLOT)
            _fetch(
                origins, first + (SLOTS - 1) * NW, last, to + behind, lane, swapped, KEYS, VALUES, NW,
            )  # fmt: skip
        if BYTES:
            b_m, b_l, acc, q = _byte_step(
                p_k, p_ks, p_v, p_vs, i_head, norms, first, start, stop, o_slot, places, q, sums, plain, plain_q, tables,
                p_kt, p_vt, unit, b_m, b_l, acc, room, KEYS, VALUES, SAME, SLICES, NW, N, ASM,
            )  # fmt: skip
        else:
            b_m, b_l, acc = _step(
                p_k, p_ks, p_v, p_vs, i_head, first, stop, b_ring + o_slot, q, plain, sums, unit, b_m, b_l, acc,
                p_kt, p_vt, norms, p_order, p_fit, fit, p_first, p_near, run, room, KEYS, VALUES,
                PAIRS, SLICES, STEP, PAIRED, NW, N, ASM, False,
            )  # fmt: skip
        if FETCH:
            o_slot = tl.where(o_slot == SLOT * (SLOTS - 1), 0, o_slot + SLOT)
    if NW > 1 and not BYTES:
        for first in tl.range(middle, stop, NW, num_stages=1):
            if FETCH:
                _arrive(0, OWN, NW)
            b_m, b_l, acc = _step(
                p_k, p_ks, p_v, p_vs, i_head, first, stop, b_ring + o_slot, q, plain, sums, unit, b_m, b_l, acc,
                p_kt, p_vt, norms, p_order, p_fit, fit, p_first, p_near, run, room, KEYS, VALUES,
                PAIRS, SLICES, STEP, PAIRED, NW, N, ASM, True,
            )  # fmt: skip
    if FETCH:
        _arrive(0, OWN, NW)
    if BYTES and ASM:
        if VALUES.outer:
            shift = tl.sum(_spread_state(b_m, (3, 3, -1, -1)), 1)
        b_l = _spread_state(b_m, (1, 1, -1, -1))
        b_m = _spread_state(b_m, (0, 0, 0, 0))
    b_m = tl.max(b_m, 1)
    out = ()
    if BYTES:
        b_l = tl.sum(b_l, 1)
        odd = column % 2 == 1
        for i in tl.static_range(WIDE):
            b_unit = tl.where(
                odd,
                1 / _byte_place(2 * i + 1, VALUES.bits, VALUES.mode),
                1 / _byte_place(2 * i, VALUES.bits, VALUES.mode),
            ) * (1 / FULL_PROBABILITY)
            # sums show what integers do not
            b_o = acc[i] * b_unit[None, None, :] + (b_l - b_l)[:, None, :]
            if VALUES.outer and ASM:
                b_o += shift[:, None, :]
            out = out + (b_o,)
    elif VALUES.grid:
        b_l = tl.sum(b_l, 1)
        out = acc
    else:
        b_l = tl.max(b_l, 1)
        for i in tl.static_range(SLICES):
            b_o = acc[i] * (2.0**24 / _place(i, VALUES.bits))
            if VALUES.outer:
                b_o += acc[SLICES + i * 16 // VALUES.group]
            out = out + (b_o,)

    # how channels of values lie in outputs
    LAID: tl.constexpr = 1 if VALUES.points and VALUES.group > 1 else PAIRED
    if VALUES.grid or VALUES.points:
        turned = ()
        for i in tl.static_range(WIDE):
            b_o = tl.dot(_hadamard(NW, tl.float32), out[i], input_precision="tf32x3")
            turned = turned + (_of_parity(b_o, NW, N) if PAIRED else b_o,)
        turned = _across(turned, WIDE, WIDTH // (16 * EACH), VALUES.factor, True)
        turned = _butterflies(turned, WIDE, WIDTH // (16 * EACH))
        out = ()
        for i in tl.static_range(WIDE):
            channel = _value_channels(i, r[:, None], column[None, :] % EACH, LAID, VALUES.quads)
            sign = _sign(p_v_sign, i_kv * D + channel) * (v_unit * WIDTH**-0.5)
            out = out + (turned[i] * sign[None],)

    # what tables and tiers leave of shared memory
    FEW: tl.constexpr = 2 if KEYS.entries + VALUES.entries + PAIRS == 0 and not (KEYS.tiers or KEYS.points) else 1
    b_behind = QUERIES - 1 - n // RATIO
    if i_split >= early:
        own = (i_split - early) * share
        exact = out
        if BYTES:  # slices of one parity each, in whose columns of the other lies what is not read
            exact = ()
            for i in tl.static_range(SLICES):
                exact = exact + (out[i // 2],)
        if own < sink_parts * share:
            b_m, b_l, exact = _exact(
                p_sink_k, p_sink_v, p_exact_q, o_q, b_row, i_head, sink_room, 0, sink + tl.minimum(recent - b_behind, 0),
                own, tl.minimum(own + share, sink), factor, b_m, b_l, exact,
                SLICES, PAIRED == 1, VALUES.quads, FEW, NW, N, ASM, False, p_first, p_near, i_batch * runs, 0, 0, PAIRS,
            )  # fmt: skip
        else:
            own -= sink_parts * share
            b_m, b_l, exact = _exact(
                p_recent_k, p_recent_v, p_exact_q, o_q, b_row, i_head, recent_room, blocks * 32 % recent_room,
                recent - b_behind, own, tl.minimum(own + share, recent), factor, b_m, b_l, exact,
                SLICES, PAIRED == 1, VALUES.quads, FEW, NW, N, ASM, RING,
                p_first, p_near, run + blocks, tl.where(blocks > 0, 0, sink_room - sink),
                sink - tl.cdiv(sink_room, 32) * 32, PAIRS,
            )  # fmt: skip
        out = exact
        if BYTES:
            out = ()
            for i in tl.static_range(WIDE):
                out = out + (tl.where((column % 2 == 1)[None, None, :], exact[2 * i + 1], exact[2 * i]),)

    # the program's warps into one, then to memory
    b_top = tl.max(b_m, 0)
    fade = tl.exp2(b_m - b_top[None, :])
    o_part = (i_group * parts + i_split) * ROOM + column // EACH
    TOGETHER: tl.constexpr = _at_a_time(WIDE, N)
    for i in tl.static_range(0, WIDE, TOGETHER):
        which = i + _numbers(TOGETHER)
        b_o = _over_warps(_joined(out, i, TOGETHER, fade[:, None, :]), NW)
        channel = _value_channels(
            which, r[:, None, None, None], column[None, :, None, None] % EACH, PAIRED, VALUES.quads
        )
        if LAID != PAIRED:  # exact tokens' outputs are never rotated, and have programs of their own
            own = _value_channels(which, r[:, None, None, None], column[None, :, None, None] % EACH, LAID, VALUES.quads)
            channel = tl.where(i_split < early, own, channel)
        tl.store(p_part + o_part[None, :, None, None] * D + channel, b_o, mask=b_row[None, :, None, None])
    o_stat = (i_group * parts + i_split) * 2 * ROOM + column // EACH
    tl.store(p_stat + o_stat, b_top, mask=b_row)
    tl.store(p_stat + o_stat + ROOM, tl.sum(b_l * fade, 0), mask=b_row)

    tl.debug_barrier()  # all of the program's stores come before its arrival
    _merge(
        p_out, p_part, p_stat, p_count, i_head, i_group, i_chunk, i_split, parts, fan, fans,
        RATIO, QUERIES, D, AT_ONCE, ROWS, ROOM, ASM,
    )  # fmt: skip
