"""Numbers rounded to codes and scales of integers, as the codec rounds.

x / s to nearest is q = x / s within 2 units of its last place, then q + (x - q s) / s in two fused operations. As s has
11 bits, no quotient of a 24-bit x lies within 2^-12 units of a tie, so this is the IEEE quotient (Markstein 1990).
Adding 1.5 * 2^23 rounds it to an integer, halves to even, and leaves the code in the low bits of the sum. Sums of
squares are added as tree_sum adds them, and nothing else is fused (enable_fp_fusion=False), so choices between
candidates are the codec's own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import reference

HALF_MAX = tl.constexpr(reference.HALF_MAX)
HALF_FLOOR = tl.constexpr(reference.HALF_FLOOR)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23


@triton.jit
def _divide(y, s, inverse, ASM: tl.constexpr):
    """Return IEEE y / s for s of at most 11 bits; inverse: 1 / s within 2 units of its last place."""
    if ASM:
        q = y * inverse
        return tl.fma(tl.fma(-q, s, y), inverse, q)
    else:  # noqa: RET505 (both are compiled otherwise)
        return y / s  # the interpreter's is IEEE's, and its fma is not fused


@triton.jit
def _reciprocal(s, ASM: tl.constexpr):
    """Return 1 / s of a scale, within one unit of its last place."""
    if ASM:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [s], tl.float32, is_pure=True, pack=1)
    else:  # noqa: RET505
        return 1.0 / s


@triton.jit
def _fit(x, LIMIT: tl.constexpr):
    """Return a scale as float16 holds it, as float32; never zero, never infinite."""
    return tl.minimum(tl.maximum(x, HALF_FLOOR), LIMIT).to(tl.float16).to(tl.float32)


@triton.jit
def _along(x, ALONG: tl.constexpr):
    """Broadcast numbers of groups [NW, 16] against pieces [NW, 16 tokens, 16 channels]; ALONG: groups lie along tokens.
    """
    return x[:, None, :] if ALONG else x[:, :, None]


@triton.jit
def _tree(x, NW: tl.constexpr, ALONG: tl.constexpr):
    """Return tree_sum over tokens or channels of a piece: [NW, 16, 16] -> [NW, 16]."""
    if ALONG:
        x = tl.sum(tl.reshape(x, [NW, 2, 8, 16]), 1)
        x = tl.sum(tl.reshape(x, [NW, 2, 4, 16]), 1)
        x = tl.sum(tl.reshape(x, [NW, 2, 2, 16]), 1)
        x = tl.sum(x, 1)
    else:
        x = tl.sum(tl.reshape(x, [NW, 16, 2, 8]), 2)
        x = tl.sum(tl.reshape(x, [NW, 16, 2, 4]), 2)
        x = tl.sum(tl.reshape(x, [NW, 16, 2, 2]), 2)
        x = tl.sum(x, 2)
    return x


@triton.jit
def _rounded(x, base, scale, inverse, low, high, SHIFTED: tl.constexpr, ASM: tl.constexpr):
    """Return (x - base) / scale, cut to [low, high], before it is rounded."""
    y = x - base if SHIFTED else x
    q = _divide(y, scale, inverse, ASM)
    return tl.minimum(tl.maximum(q, low), high)


@triton.jit
def _fold(parts):
    """Apply one halving of tree_sum to pieces; one piece stays as it is."""
    sums = ()
    for i in tl.static_range(len(parts) // 2):
        sums = sums + (parts[i] + parts[i + len(parts) // 2],)
    return parts if len(parts) == 1 else sums


@triton.jit
def _error(
    xs, scale, base, low, high,
    NW: tl.constexpr, ALONG: tl.constexpr, SHIFTED: tl.constexpr, ASM: tl.constexpr,
):
    """Return the squared error of a group [NW, 16]; low, high: of its integers."""
    b_s, b_base = _along(scale, ALONG), _along(base, ALONG)
    inverse = _along(_reciprocal(scale, ASM), ALONG)
    squares = ()
    for i in tl.static_range(len(xs)):
        q = _rounded(xs[i], b_base, b_s, inverse, low, high, SHIFTED, ASM)
        off = ((q + ROUND) - ROUND) * b_s
        if SHIFTED:
            off = off + b_base
        off = off - xs[i]
        squares = squares + (off * off,)
    # 8 pieces at most; the pieces of a group are its outermost halves
    return _tree(_fold(_fold(_fold(squares)))[0], NW, ALONG)


@triton.jit
def choose_scales(
    xs, p_table, worst, lows, SIDE: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr
):
    """Return scale, zero point, whether it is asymmetric, of a group of pieces, [NW, 16] each, and its codes (see
    _coded); then what must fit float16, the largest so far: plain scales, magnitudes of minima.

    SIDE.mode is 0 symmetric, 1 asymmetric, 2 hybrid. p_table (SIDE.candidates, 2): factors, the first SIDE.symmetric of
    them of symmetric scales.
    """
    HALF: tl.constexpr = 2.0 ** (SIDE.bits - 1)
    TOP: tl.constexpr = 2.0**SIDE.bits - 1
    AXIS: tl.constexpr = 1 if SIDE.along else 2
    COMPARE: tl.constexpr = SIDE.candidates > 1
    SYMMETRIC: tl.constexpr = SIDE.symmetric
    CANDIDATES: tl.constexpr = SIDE.candidates
    LIMIT: tl.constexpr = HALF_MAX / HALF if SIDE.mode == 2 else HALF_MAX  # hybrid: the lowest code's number is stored
    if SIDE.mode != 0:
        b_low, b_high = xs[0], xs[0]
        for i in tl.static_range(1, len(xs)):
            b_low, b_high = tl.minimum(b_low, xs[i]), tl.maximum(b_high, xs[i])
        low, high = tl.min(b_low, AXIS), tl.max(b_high, AXIS)
    if SIDE.mode == 0:
        b_peak = tl.abs(xs[0])
        for i in tl.static_range(1, len(xs)):
            b_peak = tl.maximum(b_peak, tl.abs(xs[i]))
        peak = tl.max(b_peak, AXIS)
    if SIDE.mode == 2:
        peak = tl.maximum(tl.abs(low), tl.abs(high))
    if SIDE.mode != 1:
        plain = peak * (1.0 / HALF)
        worst = tl.maximum(worst, plain)
        size = _fit(plain, LIMIT)
        best = size
        base = best * 0.0
        shifted = best < 0.0
        if COMPARE:
            lowest = _error(xs, best, base, -HALF, HALF - 1, NW, SIDE.along, False, ASM)
            for i in range(1, SYMMETRIC):
                factor = tl.load(p_table + 2 * i)
                size = _fit(plain * tl.abs(factor), LIMIT)
                scale = tl.where(factor > 0, size, -size)
                error = _error(xs, scale, base, -HALF, HALF - 1, NW, SIDE.along, False, ASM)
                best = tl.where(error < lowest, scale, best)
                lowest = tl.where(error < lowest, error, lowest)
    if SIDE.mode != 0:
        spread = high - low
        plain = _divide(spread, TOP, 1.0 / TOP, ASM)
        worst, lows = tl.maximum(worst, plain), tl.maximum(lows, tl.abs(low))
        other = _fit(plain, HALF_MAX)
        under = (low + 0.0).to(tl.float16).to(tl.float32)
        if SIDE.mode == 1:
            best, base, shifted = other, under, other > 0.0
            if COMPARE:
                lowest = _error(xs, best, base, 0.0, TOP, NW, SIDE.along, True, ASM)
        else:
            error = _error(xs, other, under, 0.0, TOP, NW, SIDE.along, True, ASM)
            better = error < lowest
            best, base = tl.where(better, other, best), tl.where(better, under, base)
            shifted, lowest = better, tl.where(better, error, lowest)
        if COMPARE:
            for i in range(SYMMETRIC + 1, CANDIDATES):
                factor, below = tl.load(p_table + 2 * i), tl.load(p_table + 2 * i + 1)
                other = _divide(spread * factor, TOP, 1.0 / TOP, ASM)
                other = _fit(other, HALF_MAX)
                under = (low + spread * below).to(tl.float16).to(tl.float32)
                error = _error(xs, other, under, 0.0, TOP, NW, SIDE.along, True, ASM)
                better = error < lowest
                best, base = tl.where(better, other, best), tl.where(better, under, base)
                shifted, lowest = shifted | better, tl.where(better, error, lowest)
    codes = _coded(xs, best, base, shifted, SIDE, ASM)
    return best, base, shifted, codes, worst, lows


@triton.jit
def _coded(
    xs, best, base, shifted, SIDE: tl.constexpr, ASM: tl.constexpr
):
    """Return the codes of a group's pieces plus ROUND: float32 [NW, 16, 16], the code in the low 16 bits."""
    HALF: tl.constexpr = 2.0 ** (SIDE.bits - 1)
    TOP: tl.constexpr = 2.0**SIDE.bits - 1
    if SIDE.mode == 2:
        low = _along(tl.where(shifted, 0.0, -HALF), SIDE.along)
        high, up = low + TOP, ROUND - low
    else:
        low = -HALF if SIDE.mode == 0 else 0.0
        high, up = low + TOP, ROUND - low
    scale, b_base = _along(best, SIDE.along), _along(base, SIDE.along)
    inverse = _along(_reciprocal(best, ASM), SIDE.along)
    codes = ()
    for i in tl.static_range(len(xs)):
        q = _rounded(xs[i], b_base, scale, inverse, low, high, SIDE.mode != 0, ASM)
        codes = codes + (q + up,)
    return codes
