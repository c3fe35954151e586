"""Outputs over the transform codec: added up over a program's warps in coordinates, then multiplied by the decoder,
each warp those of some steps, with the mean as often as probabilities add up to. Warps meet twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..softmax import second_operand
from .decoder import matrix_tile, power
from .warps import channel_pairs, exchanged_operand, get, put, row_factors


@triton.jit
def _shares(acc, b_m, b_l, p_factor, STEPS: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr):
    """Return coordinates of each warp's steps, one or every NW-th, which it has of all warps; the program's maximum and
    a warp's sums relative to it, [NW, N].
    """
    warp = tl.arange(0, NW)
    shares = ()
    if ASM:
        tl.debug_barrier()  # all have read the table
        put(b_m, warp, NW, N)
        for i in tl.static_range(STEPS):
            put(acc[i], warp + NW * (1 + i), NW, N)
        tl.debug_barrier()
        tops, fades, b_top = (), (), b_m
        for i in tl.static_range(NW):
            tops = tops + (get(warp * 0 + i, NW, N),)
            b_top = tl.maximum(b_top, tops[i])
        for i in tl.static_range(NW):
            fades = fades + (tl.exp2(tops[i] - b_top),)
        b_l = tl.sum(b_l * tl.exp2(b_m - b_top), 1)
        b_top = tl.max(b_top, 1)
    else:
        b_m = tl.max(b_m, 1)
        b_top = tl.broadcast_to(tl.max(b_m, 0)[None, :], [NW, N])
        b_l = tl.sum(b_l, 1) * tl.exp2(b_m - b_top)
    for first in tl.static_range(0, STEPS, NW):
        step = tl.minimum(first + warp, STEPS - 1)
        b_a = tl.zeros([NW, 16, N], tl.float32)
        if ASM:
            for i in tl.static_range(NW):
                b_a += get((step + 1) * NW + i, NW, N) * fades[i]
        else:
            for i in tl.static_range(STEPS):
                b_all = tl.sum(acc[i] * tl.exp2(b_m - b_top)[:, None, :], 0)[None]
                b_a = tl.where((step == i)[:, None, None], b_all, b_a)
        b_a = b_a * row_factors(p_factor, step, NW, N, ASM)
        shares = shares + (tl.where((first + warp < STEPS)[:, None, None], b_a, 0.0),)
    return shares, b_top, b_l


@triton.jit
def _as_operands(shares, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr):
    """Return coordinates as second operands, for each round two float16, what is rounded and the rest of it, and the
    same with the columns of even and odd ones exchanged; and by what they are larger [NW, N].
    """
    ROUNDS: tl.constexpr = len(shares)
    b_peak = tl.zeros([NW, N], tl.float32)
    for k in tl.static_range(ROUNDS):
        b_peak = tl.maximum(b_peak, tl.max(tl.abs(shares[k]), 1))
    # both columns of a query row are scaled alike
    b_peak = tl.broadcast_to(tl.max(tl.reshape(b_peak, [NW, N // 2, 2]), 2)[:, :, None], [NW, N // 2, 2])
    b_less, b_more = power(tl.reshape(b_peak, [NW, N]), 64.0)
    parts = ()
    for k in tl.static_range(ROUNDS):
        b_a = shares[k] * b_less[:, None, :]
        b_high = b_a.to(tl.float16)
        b_low = (b_a - b_high.to(tl.float32)).to(tl.float16)
        parts = parts + (second_operand(b_high, NW, N, ASM), second_operand(b_low, NW, N, ASM))
        parts = parts + (exchanged_operand(b_high, NW, N, ASM), exchanged_operand(b_low, NW, N, ASM))
    return parts, b_more


@triton.jit
def output_of(
    acc, b_m, b_l, b_mean, factor, p_matrix, p_factor, p_mean, VALUES: tl.constexpr, WIDE: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Return outputs by channels, as `value_channels` lays pairs out, maxima and sums of each warp [NW, N]: their sum
    over warps is the program's, with one maximum.
    """
    STEPS: tl.constexpr = VALUES.steps
    ROUNDS: tl.constexpr = (STEPS + NW - 1) // NW
    warp, column = tl.arange(0, NW), tl.arange(0, N)
    tiles = ()
    if ASM and ROUNDS == 1:  # on their way before warps meet
        for i in tl.static_range(WIDE * 4):
            at = (i // 4 * STEPS + tl.minimum(warp, STEPS - 1)) * 4 + i % 4
            tiles = tiles + (matrix_tile(p_matrix, at, NW, True),)
    shares, b_top, b_l = _shares(acc, b_m, b_l, p_factor, STEPS, NW, N, ASM)
    parts, b_more = _as_operands(shares, NW, N, ASM)
    odd = (column % 2 == 1)[None, None, :]
    out = ()
    for i in tl.static_range(WIDE):
        b_even = tl.zeros([NW, 16, N], tl.float32)
        b_odd = b_even
        for j in tl.static_range(ROUNDS):
            step = tl.minimum(j * NW + warp, STEPS - 1)
            for k in tl.static_range(4):  # whether of odd coordinates, and whether to odd channels
                at = (i * STEPS + step) * 4 + k
                m = tiles[i * 4 + k] if ASM and ROUNDS == 1 else matrix_tile(p_matrix, at, NW, ASM)
                if k % 2 == 0:
                    b_even = tl.dot(m, parts[j * 4 + k], tl.dot(m, parts[j * 4 + k + 1], b_even))
                else:
                    b_odd = tl.dot(m, parts[j * 4 + 3 - k], tl.dot(m, parts[j * 4 + 4 - k], b_odd))
        mean = channel_pairs(p_mean, i, NW, N, ASM)
        out = out + (tl.where(odd, b_odd, b_even) * b_more[:, None, :] + mean * b_l[:, None, :],)
    return out, b_top + b_mean * factor, b_l
