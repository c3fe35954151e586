"""New tokens of a decode step written to the windows, and blocks of a grid that come due.

A program takes one head's block of a grid. Where norms span all heads it rotates those of the others as well, which it
needs for nothing else: H rotations instead of one, in the steps in which a block is due, and no second launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...higgs.triton import NUMBERS, nearest_points, norms_of, rotate_rows, store_words, units_of
from .rounding import HALF_MAX
from .words import GRID_IN_BYTES, NO_SLOT, NONFINITE, SCALE


@triton.jit
def write_windows(
    p_new, p_sink, p_ring, o_new, i_head, start, sink_before, taken, sink_capacity, window, waiting, new, first,
    ring_capacity, token_stride, SLICES: tl.constexpr, NW: tl.constexpr,
):
    """Write 16 * NW new tokens from number `start` on to sink and ring; return 1 where one is not finite, [NW, 16, 16].
    """
    r = tl.arange(0, 16)
    token = start + tl.arange(0, NW)[:, None] * 16 + r[None, :]
    into_sink = token < taken
    waits = window + token - taken
    live = (token < new) & ((into_sink & (sink_before + token < sink_capacity)) | (waits >= waiting - ring_capacity))
    o_sink = (i_head * sink_capacity + sink_before + token) * (SLICES * 16)
    o_ring = (i_head * ring_capacity + (first + waits) % ring_capacity) * (SLICES * 16)
    p_to = tl.where(into_sink[:, :, None], p_sink + o_sink[:, :, None], p_ring + o_ring[:, :, None])
    p_from = p_new + (o_new + token.to(tl.int64) * token_stride)[:, :, None]
    nothing = tl.zeros([NW, 16, 16], tl.float32)
    for i in tl.static_range(SLICES):
        column = (i * 16 + r)[None, None, :]
        x = tl.load(p_from + column, mask=live[:, :, None], other=0.0)
        tl.store(p_to + column, x.to(p_ring.dtype.element_ty), mask=live[:, :, None])
        nothing = nothing + x.to(tl.float32) * 0.0
    return tl.where(nothing == nothing, 0, NONFINITE)


@triton.constexpr_function
def _log(n):
    return n.bit_length() - 1


@triton.constexpr_function
def _rows(width):
    """Return the tokens of `width` numbers whose norms are taken at a time."""
    return min(32, max(1, NUMBERS // width))


@triton.jit
def _waiting(
    p_new, p_ring, p_factor, o_new, i_row, first_head, token, live, window, before, ring_capacity, head_stride,
    token_stride, N: tl.constexpr, DIM: tl.constexpr, FACTOR: tl.constexpr, STORED: tl.constexpr, ASM: tl.constexpr,
):
    """Load numbers [tokens, N] float32 of N / DIM heads from `first_head` on, of `token`s that a row packs now; divided
    by the factor. o_new: of the first new token that waits, in head 0. i_row: heads of the rows before.
    """
    at = tl.arange(0, N)
    head, channel = first_head + at // DIM, at % DIM
    p = p_new + (o_new + (token - window).to(tl.int64) * token_stride)[:, None]
    p = p + (head.to(tl.int64) * head_stride + channel)[None, :]
    if STORED:
        slot = ((before * 32) % ring_capacity + token) % ring_capacity
        o_ring = ((i_row + head).to(tl.int64) * (ring_capacity * DIM) + channel)[None, :] + (slot * DIM)[:, None]
        p = tl.where((token < window)[:, None], p_ring + o_ring, p)
    x = tl.load(p, mask=live[:, None], other=0.0).to(tl.float32)
    if FACTOR:
        divisor = tl.broadcast_to(tl.load(p_factor + head * DIM + channel).to(tl.float32)[None, :], x.shape)
        x = tl.div_rn(x, divisor) if ASM else x / divisor
    return x


@triton.jit
def encode_block(
    p_new, p_ring, p_words, p_scale, p_factor, p_table, o_new, i_row, i_kv, unit, flush, window, before, capacity,
    ring_capacity, head_stride, token_stride, SIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    VALUE: tl.constexpr, FACTOR: tl.constexpr, STORED: tl.constexpr, ASM: tl.constexpr,
):
    """Pack block `unit` of a grid, of those that a row packs now, and return its flags; see `pack_units`. p_table:
    GridRule.table.
    """
    LOG: tl.constexpr = _log(DIM)
    SIGNS: tl.constexpr = HEADS * DIM
    r = tl.arange(0, 32)
    fits = unit < tl.minimum(flush, capacity - before)
    live = tl.broadcast_to(fits, [32])
    gain = tl.load(p_table + SIGNS)
    if SIDE.norm_heads != 1:  # before its own numbers take registers
        ROWS: tl.constexpr = _rows(HEADS * DIM)
        sign = tl.load(p_table + tl.arange(0, HEADS * DIM))
        norm = tl.zeros([32], tl.float32)
        for i in range(32 // ROWS):
            token = i * ROWS + tl.arange(0, ROWS)
            y = _waiting(
                p_new, p_ring, p_factor, o_new, i_row, 0, unit * 32 + token, tl.broadcast_to(fits, [ROWS]), window,
                before, ring_capacity, head_stride, token_stride, HEADS * DIM, DIM, FACTOR, STORED, ASM,
            )
            y = rotate_rows(y, sign, DIM**-0.5, ROWS, HEADS * DIM, LOG)
            some = norms_of(y, gain, ROWS, HEADS * DIM, _log(HEADS * DIM), ASM)
            wide = tl.reshape(tl.broadcast_to(some[None, :], [32 // ROWS, ROWS]), [32])
            norm = tl.where(r // ROWS == i, wide, norm)
    x = _waiting(
        p_new, p_ring, p_factor, o_new, i_row, i_kv, unit * 32 + r, live, window, before, ring_capacity, head_stride,
        token_stride, DIM, DIM, FACTOR, STORED, ASM,
    )
    bad = tl.where(tl.min(tl.min((x * 0.0 == 0.0).to(tl.int32), 1), 0) == 0, NONFINITE, 0)
    x = rotate_rows(x, tl.load(p_table + i_kv * DIM + tl.arange(0, DIM)), DIM**-0.5, 32, DIM, LOG)
    if SIDE.norm_heads == 1:
        norm = norms_of(x, gain, 32, DIM, LOG, ASM)
    stored = norm.to(tl.float16)
    x = x * units_of(stored, gain, 32, ASM)[:, None]
    code = nearest_points(
        x, p_table + SIGNS + 1, 32, DIM, SIDE.points, SIDE.vector, SIDE.cells, SIDE.few, SIDE.most, ASM
    )
    block = (i_row + i_kv).to(tl.int64) * capacity + before + unit
    store_words(
        p_words + block * (SIDE.words // 2), code, fits, DIM, SIDE.bits, SIDE.vector, VALUE, SIDE.mode == GRID_IN_BYTES
    )
    first_head = fits & ((SIDE.norm_heads == 1) | (i_kv == 0))
    o_norm = (i_row // HEADS * (HEADS // SIDE.norm_heads) + (i_kv if SIDE.norm_heads == 1 else 0)).to(tl.int64)
    tl.store(p_scale + (o_norm * capacity + before + unit) * 32 + r, stored, mask=tl.broadcast_to(first_head, [32]))
    bad = bad | tl.where(tl.min((norm <= HALF_MAX).to(tl.int32), 0) == 0, SCALE, 0)
    return tl.where(fits, bad, NO_SLOT)
