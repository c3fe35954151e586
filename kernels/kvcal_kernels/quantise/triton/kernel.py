"""The kernels: `append_kernel` packs what is due of keys and values, the others keep counts and key factors."""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import encode_block, write_windows
from .words import MINIMUM, NO_SLOT, NONFINITE, SCALE, VALUE_FLAGS, pack_units


@triton.jit
def _any(bad, BIT: tl.constexpr):
    return tl.max(tl.max(bad & BIT, 1), 0)


@triton.jit
def _role(
    p_new, p_sink, p_ring, p_words, p_scale, p_factor, p_table, p_counts, p_flags, p_due,
    i_batch, i_kv, i_program, programs, batch, queries, capacity, sink_capacity, ring_capacity,
    batch_stride, head_stride, token_stride, factor_stride, SIDE: tl.constexpr, DUE: tl.constexpr, HEADS: tl.constexpr,
    SLICES: tl.constexpr, WRITE: tl.constexpr, PACK: tl.constexpr, STORED: tl.constexpr, VALUE: tl.constexpr,
    FACTOR: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr,
):
    """Do all that one program does for keys or values. DUE: tokens of a row's part of p_due, from which everything that
    it packs comes; 0: it packs what the ring has.
    """
    i_head = (i_batch * HEADS + i_kv).to(tl.int64)
    p_row = p_counts + i_batch
    sink_before, window, before = tl.load(p_row), tl.load(p_row + batch), tl.load(p_row + 2 * batch)
    new, sink, waiting = tl.load(p_row + 3 * batch), tl.load(p_row + 4 * batch), tl.load(p_row + 5 * batch)
    flush = tl.load(p_row + 7 * batch) - before
    taken = sink - sink_before
    o_new = i_batch.to(tl.int64) * batch_stride + i_kv.to(tl.int64) * head_stride
    o_new += (queries - new).to(tl.int64) * token_stride
    if WRITE:
        start = tl.maximum(tl.where(taken > 0, 0, new - ring_capacity), 0) + i_program * (16 * NW)
        for token in range(start, new, programs * (16 * NW)):
            nothing = write_windows(
                p_new, p_sink, p_ring, o_new, i_head, token, sink_before, taken, sink_capacity, window, waiting, new,
                before * 32, ring_capacity, token_stride, SLICES, NW,
            )
            faults = tl.max(tl.max(tl.max(nothing, 2), 1), 0)
            if faults != 0:
                tl.atomic_or(p_flags + i_kv, faults << (VALUE_FLAGS if VALUE else 0))
    if PACK:
        UNIT: tl.constexpr = SIDE.unit
        p_row_factor = p_factor + i_batch * factor_stride
    if PACK and SIDE.vector > 0:
        o_row = o_new + taken * token_stride - i_kv.to(tl.int64) * head_stride
        for unit in tl.range(i_program, flush, programs, disable_licm=True):
            faults = encode_block(
                p_new, p_ring, p_words, p_scale, p_row_factor, p_table, o_row, i_batch * HEADS, i_kv, unit, flush,
                window, before, capacity, ring_capacity, head_stride, token_stride, SIDE, HEADS, SLICES * 16, VALUE,
                FACTOR, STORED, ASM,
            )
            if faults != 0:
                tl.atomic_or(p_flags + i_kv, faults << (VALUE_FLAGS if VALUE else 0))
    elif PACK:
        for first in range(i_program * NW, tl.cdiv(flush, UNIT), programs * NW):
            if DUE > 0:
                bad = pack_units(
                    p_due, p_due, p_words, p_scale, p_row_factor, p_table, i_head * (DUE * SLICES * 16), i_head, i_kv,
                    first, flush, 0, before, capacity, ring_capacity, SLICES * 16, SIDE, SLICES, VALUE, FACTOR, False,
                    NW, ASM,
                )
            else:
                bad = pack_units(
                    p_new, p_ring, p_words, p_scale, p_row_factor, p_table, o_new + taken * token_stride, i_head, i_kv,
                    first, flush, window, before, capacity, ring_capacity, token_stride, SIDE, SLICES, VALUE, FACTOR,
                    STORED, NW, ASM,
                )
            faults = _any(bad, NONFINITE) | _any(bad, SCALE) | _any(bad, MINIMUM) | _any(bad, NO_SLOT)
            if faults != 0:
                tl.atomic_or(p_flags + i_kv, faults << (VALUE_FLAGS if VALUE else 0))


@triton.jit(do_not_specialize=[
    "programs", "batch", "queries", "capacity", "sink_capacity", "ring_capacity", "factor_stride"
])
def append_kernel(
    p_k, p_v, p_sink_k, p_sink_v, p_ring_k, p_ring_v, p_kw, p_ks, p_vw, p_vs, p_factor, p_k_table, p_v_table, p_counts,
    p_flags, p_due, programs, batch, queries, capacity, sink_capacity, ring_capacity,
    k_batch, k_head, k_token, v_batch, v_head, v_token, factor_stride, DUE: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, WRITE: tl.constexpr, PACK: tl.constexpr, STORED: tl.constexpr,
    FACTOR: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr,
):
    """Append with a grid (programs, HEADS, 2 * batch): keys of every row, then values. WRITE: new tokens to sink and
    ring. PACK: what is due. STORED: there is a ring. DUE: keys of the block of so many tokens that is due are those of
    p_due (batch, HEADS, DUE, D); 0: the ring's.
    """
    i_program, i_kv = tl.program_id(0), tl.program_id(1)
    i_batch = tl.program_id(2) // 2
    if tl.program_id(2) % 2 == 0:
        _role(
            p_k, p_sink_k, p_ring_k, p_kw, p_ks, p_factor, p_k_table, p_counts, p_flags, p_due,
            i_batch, i_kv, i_program, programs, batch, queries, capacity, sink_capacity, ring_capacity,
            k_batch, k_head, k_token, factor_stride, KEYS, DUE, HEADS, D // 16, WRITE, PACK, STORED, False,
            FACTOR, NW, ASM,
        )
    else:
        _role(
            p_v, p_sink_v, p_ring_v, p_vw, p_vs, p_factor, p_v_table, p_counts, p_flags, p_due,
            i_batch, i_kv, i_program, programs, batch, queries, capacity, sink_capacity, ring_capacity,
            v_batch, v_head, v_token, factor_stride, VALUES, 0, HEADS, D // 16, WRITE, PACK, STORED, True,
            False, NW, ASM,
        )


@triton.jit(do_not_specialize=["batch"])
def advance_kernel(
    p_counts, p_new, batch, SINK: tl.constexpr, RECENT: tl.constexpr, BLOCK_: tl.constexpr, WIDE: tl.constexpr
):
    """Move the counts of all rows in one program."""
    row = tl.arange(0, WIDE)
    live = row < batch
    p_row = p_counts + row
    new = tl.load(p_new + row, mask=live, other=0)
    sink = tl.load(p_row + 4 * batch, mask=live, other=0)
    window = tl.load(p_row + 6 * batch, mask=live, other=0)
    blocks = tl.load(p_row + 7 * batch, mask=live, other=0)
    after = tl.minimum(sink + new, SINK)
    waiting = window + new - (after - sink)
    flush = tl.maximum(waiting - RECENT, 0) // BLOCK_
    tl.store(p_row, sink, mask=live)
    tl.store(p_row + batch, window, mask=live)
    tl.store(p_row + 2 * batch, blocks, mask=live)
    tl.store(p_row + 3 * batch, new, mask=live)
    tl.store(p_row + 4 * batch, after, mask=live)
    tl.store(p_row + 5 * batch, waiting, mask=live)
    tl.store(p_row + 6 * batch, waiting - flush * BLOCK_, mask=live)
    tl.store(p_row + 7 * batch, blocks + flush * (BLOCK_ // 32), mask=live)


@triton.jit(do_not_specialize=["batch", "queries", "until"])
def observe_kernel(
    p_k, p_peak, p_fixed, p_counts, p_factor, p_wide, batch, queries, until,
    HEADS: tl.constexpr, RATIO: tl.constexpr, D: tl.constexpr, H_WIDE: tl.constexpr, D_WIDE: tl.constexpr,
):
    """Observe keys with a grid (batch,): a program takes all heads of its row, so that none reads `fixed` after
    another's store.
    """
    i_row = tl.program_id(0).to(tl.int64)
    head, channel = tl.arange(0, H_WIDE)[:, None], tl.arange(0, D_WIDE)[None, :]
    inside = (head < HEADS) & (channel < D)
    o_head = i_row * HEADS + head
    p_peaks = p_peak + o_head * D + channel
    b_peak = tl.load(p_peaks, mask=inside, other=0.0)
    fixed = tl.load(p_fixed + i_row)
    before = tl.load(p_counts + i_row) + tl.load(p_counts + batch + i_row)
    count = tl.where(fixed != 0, 0, tl.minimum(until - before, queries))
    for i in tl.range(0, count):
        b_k = tl.load(p_k + (o_head * queries + i) * D + channel, mask=inside, other=0.0).to(tl.float32)
        b_peak = tl.maximum(b_peak, tl.abs(b_k), propagate_nan=tl.PropagateNan.ALL)
    tl.store(p_peaks, b_peak, mask=inside)
    b_factor = tl.sqrt_rn(b_peak).to(tl.float16).to(tl.float32)
    b_factor = tl.where(b_factor > 0, b_factor, 1.0)
    tl.store(p_factor + o_head * D + channel, b_factor, mask=inside)
    for i in tl.static_range(RATIO):
        tl.store(p_wide + (o_head * RATIO + i) * D + channel, b_factor, mask=inside)
    blocks = tl.load(p_counts + 7 * batch + i_row)
    tl.debug_barrier()  # every thread has read it
    tl.store(p_fixed + i_row, ((fixed != 0) | (blocks > 0)).to(tl.uint8))
