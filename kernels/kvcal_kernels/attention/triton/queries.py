"""Queries: where the rows of a kv head lie, and the power of two by which each is scaled."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_offset(i_head, n, RATIO: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr):
    """Return where query row n of a kv head begins: rows of one token of all the head's query heads follow one another.
    """
    return ((i_head * RATIO + n % RATIO) * QUERIES + n // RATIO) * D


@triton.jit
def whole_rows(p_q, i_head, i_chunk, ROWS: tl.constexpr, RATIO: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr):
    """Load all numbers of a program's query rows, [ROWS, D rounded up to a power of two]."""
    n_4 = i_chunk * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, triton.next_power_of_2(D))
    o_4 = row_offset(i_head, n_4, RATIO, QUERIES, D)
    inside = (n_4 < RATIO * QUERIES)[:, None] & (channel < D)[None, :]
    return tl.load(p_q + o_4[:, None] + channel[None, :], mask=inside, other=0.0)


@triton.jit
def powers(
    p_q, o_q, b_row, KEYS: tl.constexpr, SLICES: tl.constexpr, PEAK: tl.constexpr, LOWEST: tl.constexpr,
    INT8: tl.constexpr, N: tl.constexpr,
):
    """Return the power of two by which each row's query is multiplied, which brings its largest element into [PEAK, 2
    PEAK), and one over it. LOWEST: the least exponent, in a float32's place.
    """
    r = tl.arange(0, 16)
    b_peak = tl.zeros([N], tl.float32)
    if KEYS.points:  # one maximum across lanes for all slices
        b_high = tl.zeros([16, N], tl.float32)
        for i in tl.static_range(SLICES):
            b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0)
            b_high = tl.maximum(b_high, tl.abs(b_q.to(tl.float32)))
        b_peak = tl.max(b_high, 0)
    for i in tl.static_range(0 if INT8 else SLICES):
        b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0)
        b_peak = tl.maximum(b_peak, tl.max(tl.abs(b_q.to(tl.float32)), 0))
    exponent = tl.maximum(b_peak.to(tl.int32, bitcast=True) & 0x7F800000, LOWEST)
    b_down = ((254 << 23) - exponent).to(tl.float32, bitcast=True) * PEAK
    b_up = exponent.to(tl.float32, bitcast=True) * (1 / PEAK)
    return b_down, b_up


@triton.jit
def rows_in_pages(
    p_lengths, p_starts, i_batch, i_kv, n, q_stride, capacity, RATIO: tl.constexpr, QUERIES: tl.constexpr,
    D: tl.constexpr,
):
    """Return a request's queries and tokens; of its query rows n [N] which there are, where they begin, and the first
    token that each does not see.
    """
    query = tl.load(p_starts + i_batch)
    count = tl.load(p_starts + i_batch + 1) - query
    length = tl.minimum(tl.load(p_lengths + i_batch), capacity * 32)
    b_row = n < RATIO * tl.minimum(count, QUERIES)
    o_q = (query + n // RATIO).to(tl.int64) * q_stride + (i_kv * RATIO + n % RATIO) * D
    limit = tl.where(b_row, length - count + 1 + n // RATIO, 0)
    return count, length, b_row, o_q, limit
