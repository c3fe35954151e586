"""`quantise` and `append` of reference.py for NVIDIA GPUs: one read of keys and values, one write of words and scales,
one launch.

A warp takes a unit: the blocks that share scales, 1, 2 or 4. It loads them piece by piece (16 tokens x 16 channels), so that
a thread has the same place of every piece and a word is a sum of its own shifted codes: packing moves nothing between
threads. Value words are transposed after packing, 16 / bits numbers at a time.

Rounding: x / s to nearest is q = x / s within 2 units of its last place, then q + (x - q s) / s in two fused
operations. As s has 11 bits, no quotient of a 24-bit x lies within 2^-12 units of a tie, so this is the IEEE quotient
(Markstein 1990). Adding 1.5 * 2^23 rounds it to an integer, halves to even, and leaves the code in the low bits of the
sum. Sums of squares are added as tree_sum adds them, and nothing else is fused (enable_fp_fusion=False), so choices
between candidates are the codec's own.

Of a grid a program takes a head's block. Where norms span all heads it rotates those of the others too, which it needs for
nothing else: H rotations in the place of one, in the steps in which a block is due, and no second launch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.reference import BLOCK, Blocks, about, field_number, together
from ..attention.triton.int8.ptx import beyond
from ..device import on
from ..rotated import triton as rotated
from ..rotated.triton import NUMBERS, nearest_points, norms_of, rotate_rows, store_words, units_of
from ..triton import Prepared, Ready, interpreted
from . import reference
from .reference import FIELDS, AnyRule, Counts, GridRule, Layer, Rule

HALF_MAX = tl.constexpr(reference.HALF_MAX)
HALF_FLOOR = tl.constexpr(reference.HALF_FLOOR)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23
NONFINITE, SCALE, MINIMUM = (tl.constexpr(i) for i in (reference.NONFINITE, reference.SCALE, reference.MINIMUM))
ROOM = tl.constexpr(reference.ROOM)
VALUES = tl.constexpr(reference.VALUES)
GRID_IN_BYTES = tl.constexpr(1)  # MODE of a grid; of others 0
_field_number = triton.constexpr_function(field_number)


@triton.jit
def _divide(y, s, inverse, ASM: tl.constexpr):
    """IEEE y / s for s of at most 11 bits; inverse: 1 / s within 2 units of its last place."""
    if ASM:
        q = y * inverse
        return tl.fma(tl.fma(-q, s, y), inverse, q)
    else:  # noqa: RET505 (both are compiled otherwise)
        return y / s  # the interpreter's is IEEE's, and its fma is not fused


@triton.jit
def _reciprocal(s, ASM: tl.constexpr):
    """1 / s of a scale, within one unit of its last place."""
    if ASM:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [s], tl.float32, is_pure=True, pack=1)
    else:  # noqa: RET505
        return 1.0 / s


@triton.jit
def _fit(x, LIMIT: tl.constexpr):
    """A scale as float16 holds it, as float32; never zero, never infinite."""
    return tl.minimum(tl.maximum(x, HALF_FLOOR), LIMIT).to(tl.float16).to(tl.float32)


@triton.jit
def _along(x, ALONG: tl.constexpr):
    """Numbers of groups [NW, 16] against pieces [NW, 16 tokens, 16 channels]; ALONG: groups lie along tokens."""
    return x[:, None, :] if ALONG else x[:, :, None]


@triton.jit
def _tree(x, NW: tl.constexpr, ALONG: tl.constexpr):
    """tree_sum over tokens or channels of a piece: [NW, 16, 16] -> [NW, 16]."""
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
    """(x - base) / scale, cut to [low, high], before it is rounded."""
    y = x - base if SHIFTED else x
    q = _divide(y, scale, inverse, ASM)
    return tl.minimum(tl.maximum(q, low), high)


@triton.jit
def _fold(parts):
    """One halving of tree_sum, of pieces; one piece stays as it is."""
    made = ()
    for i in tl.static_range(len(parts) // 2):
        made = made + (parts[i] + parts[i + len(parts) // 2],)
    return parts if len(parts) == 1 else made


@triton.jit
def _error(
    xs, scale, base, low, high,
    NW: tl.constexpr, ALONG: tl.constexpr, SHIFTED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Squared error of a group [NW, 16]; low, high: of its integers."""
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
def _choose(
    xs, p_table, worst, lows,
    BITS: tl.constexpr, MODE: tl.constexpr, ALONG: tl.constexpr, FIRST: tl.constexpr, ALL: tl.constexpr,
    NW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Scale, zero point, whether it is asymmetric, of a group of pieces, [NW, 16] each, and its codes (see _coded); then what
    must fit float16, the largest so far: plain scales, magnitudes of minima.

    MODE 0 symmetric, 1 asymmetric, 2 hybrid. p_table (ALL, 2): factors, the first FIRST of them of symmetric scales.
    """
    HALF: tl.constexpr = 2.0 ** (BITS - 1)
    TOP: tl.constexpr = 2.0**BITS - 1
    AXIS: tl.constexpr = 1 if ALONG else 2
    COMPARE: tl.constexpr = ALL > 1
    LIMIT: tl.constexpr = HALF_MAX / HALF if MODE == 2 else HALF_MAX  # hybrid: the lowest code's number is stored
    if MODE != 0:
        b_low, b_high = xs[0], xs[0]
        for i in tl.static_range(1, len(xs)):
            b_low, b_high = tl.minimum(b_low, xs[i]), tl.maximum(b_high, xs[i])
        low, high = tl.min(b_low, AXIS), tl.max(b_high, AXIS)
    if MODE == 0:
        b_peak = tl.abs(xs[0])
        for i in tl.static_range(1, len(xs)):
            b_peak = tl.maximum(b_peak, tl.abs(xs[i]))
        peak = tl.max(b_peak, AXIS)
    if MODE == 2:
        peak = tl.maximum(tl.abs(low), tl.abs(high))
    if MODE != 1:
        plain = peak * (1.0 / HALF)
        worst = tl.maximum(worst, plain)
        size = _fit(plain, LIMIT)
        best = size
        base = best * 0.0
        shifted = best < 0.0
        if COMPARE:
            lowest = _error(xs, best, base, -HALF, HALF - 1, NW, ALONG, False, ASM)
            for i in range(1, FIRST):
                factor = tl.load(p_table + 2 * i)
                size = _fit(plain * tl.abs(factor), LIMIT)
                scale = tl.where(factor > 0, size, -size)
                error = _error(xs, scale, base, -HALF, HALF - 1, NW, ALONG, False, ASM)
                best = tl.where(error < lowest, scale, best)
                lowest = tl.where(error < lowest, error, lowest)
    if MODE != 0:
        spread = high - low
        plain = _divide(spread, TOP, 1.0 / TOP, ASM)
        worst, lows = tl.maximum(worst, plain), tl.maximum(lows, tl.abs(low))
        other = _fit(plain, HALF_MAX)
        under = (low + 0.0).to(tl.float16).to(tl.float32)
        if MODE == 1:
            best, base, shifted = other, under, other > 0.0
            if COMPARE:
                lowest = _error(xs, best, base, 0.0, TOP, NW, ALONG, True, ASM)
        else:
            error = _error(xs, other, under, 0.0, TOP, NW, ALONG, True, ASM)
            better = error < lowest
            best, base = tl.where(better, other, best), tl.where(better, under, base)
            shifted, lowest = better, tl.where(better, error, lowest)
        if COMPARE:
            for i in range(FIRST + 1, ALL):
                factor, below = tl.load(p_table + 2 * i), tl.load(p_table + 2 * i + 1)
                other = _divide(spread * factor, TOP, 1.0 / TOP, ASM)
                other = _fit(other, HALF_MAX)
                under = (low + spread * below).to(tl.float16).to(tl.float32)
                error = _error(xs, other, under, 0.0, TOP, NW, ALONG, True, ASM)
                better = error < lowest
                best, base = tl.where(better, other, best), tl.where(better, under, base)
                shifted, lowest = shifted | better, tl.where(better, error, lowest)
    codes = _coded(xs, best, base, shifted, BITS, MODE, ALONG, ASM)
    return best, base, shifted, codes, worst, lows


@triton.jit
def _coded(
    xs, best, base, shifted,
    BITS: tl.constexpr, MODE: tl.constexpr, ALONG: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Codes of a group's pieces plus ROUND: float32 [NW, 16, 16], the code in the low 16 bits."""
    HALF: tl.constexpr = 2.0 ** (BITS - 1)
    TOP: tl.constexpr = 2.0**BITS - 1
    if MODE == 2:
        low = _along(tl.where(shifted, 0.0, -HALF), ALONG)
        high, up = low + TOP, ROUND - low
    else:
        low = -HALF if MODE == 0 else 0.0
        high, up = low + TOP, ROUND - low
    scale, b_base = _along(best, ALONG), _along(base, ALONG)
    inverse = _along(_reciprocal(best, ASM), ALONG)
    codes = ()
    for i in tl.static_range(len(xs)):
        q = _rounded(xs[i], b_base, scale, inverse, low, high, MODE != 0, ASM)
        codes = codes + (q + up,)
    return codes


@triton.constexpr_function
def _bits(block, number, i, tiles, extra, bits):
    """(lowest bit of the code, mask or 0, shift, shift more a field further) of what a piece, whose `field_number` it is, adds
    to tile i of a unit's words; None where it adds nothing.
    """
    plane = 2 if bits == 3 else bits
    tile, field = divmod(number, 16 // plane)
    i -= block * (tiles + extra)
    if i == tile:
        return 0, 3 if bits == 3 else 0, field * plane, plane
    if bits == 3 and i == tiles + tile // 2:
        return 2, 1, 2 * field + tile % 2, 2
    return None


@triton.jit
def _put(
    words, code, further, BLOCK_: tl.constexpr, NUMBER: tl.constexpr, TILES: tl.constexpr, EXTRA: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Words of a unit with the code of a piece put into its fields (attention/reference.py): `further` fields beyond field
    NUMBER.
    """
    made = ()
    for i in tl.static_range(len(words)):
        if _bits(BLOCK_, NUMBER, i, TILES, EXTRA, BITS) is None:
            made = made + (words[i],)
        else:
            made = made + (words[i] + _field(code, further, _bits(BLOCK_, NUMBER, i, TILES, EXTRA, BITS)),)
    return made


@triton.jit
def _field(code, further, BITS: tl.constexpr):
    part = code >> BITS[0]
    if BITS[1] != 0:
        part = part & BITS[1]
    return part << (BITS[2] + further * BITS[3])


@triton.constexpr_function
def _across(bits):
    """Pairs of pieces that share a tile."""
    return 8 // (2 if bits == 3 else bits)


@triton.jit
def _further(
    done, FIRST: tl.constexpr, EACH: tl.constexpr, BITS: tl.constexpr, PAIRED: tl.constexpr, VALUE: tl.constexpr
):
    """Fields from that of the slice FIRST behind an even one to that of the slice `done` behind it in the same tile. done: a
    multiple of EACH. PAIRED: keys whose slices are pairs.
    """
    if VALUE or not PAIRED:
        further = done
    elif EACH % 2 == 0:
        further = done >> 1
    else:
        at = done + FIRST
        further = (at >> 1) - FIRST // 2 + ((at & 1) - FIRST % 2) * _across(BITS)
    return further


@triton.constexpr_function
def _turns(pieces, bits):
    """Whether half blocks of keys take turns in outer groups, too (`field_number`)."""
    return _field_number(1, 0, bits, pieces, False, False) != pieces


@triton.constexpr_function
def _span(pieces, each, bits, paired, value):
    """Slices handled before words are stored: words fill up while a runtime loop runs over fields of one tile."""
    across = _across(bits)
    if value:
        whole = math.gcd(pieces, across)
        return each if whole % each else whole
    if paired:
        return max(each, 2 * math.gcd(pieces // 2, across))
    return max(each, math.gcd(pieces, 2 * across))


@triton.jit
def _store_scales(
    p_scale, o_unit, live, scale, zero, column, TOGETHER: tl.constexpr, INNER: tl.constexpr, BOTH: tl.constexpr
):
    """A group's scale and, with BOTH, its zero point, [NW, 16] float16, as columns `column` and the next one."""
    r = tl.arange(0, 16)[None, :]
    if INNER:
        first = o_unit[:, None] + column // TOGETHER * (16 * TOGETHER) + r * TOGETHER + column % TOGETHER
        tl.store(p_scale + first, scale, mask=live[:, None])
        if BOTH:
            tl.store(p_scale + first + 1, zero, mask=live[:, None])
    else:
        first = o_unit[:, None] + column // 2 * 32 + r // 2 * 4 + r % 2
        tl.store(p_scale + first, scale, mask=live[:, None])
        tl.store(p_scale + first + 2, zero, mask=live[:, None])


@triton.jit
def _load(
    p_new, p_ring, news, rings, olds, live, piece,
    HALVES: tl.constexpr, EACH: tl.constexpr, SLICES: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Slices `piece` to piece + EACH - 1 of every half block, half after half; nothing beyond the last."""
    r = tl.arange(0, 16)
    inside = live[:, :, None] & (piece < SLICES)
    made = ()
    for h in tl.static_range(HALVES):
        for e in tl.static_range(EACH):
            column = (piece + e) * 16 + r[None, None, :]
            p = p_new + news[h][:, :, None] + column
            if STORED:
                p = tl.where(olds[h][:, :, None], p_ring + rings[h][:, :, None] + column, p)
            made = made + (tl.load(p, mask=inside, other=0.0),)
    return made


@triton.jit
def _pack(
    p_new, p_ring, p_words, p_scale, p_factor, p_table, o_new, i_head, i_kv, first, flush, before, slot, room, ring_room,
    token_stride,
    SLICES: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, ALONG: tl.constexpr, INNER: tl.constexpr,
    GROUP: tl.constexpr, PIECES: tl.constexpr, TILES: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr, FIRST: tl.constexpr, ALL: tl.constexpr, VALUE: tl.constexpr,
    FACTOR: tl.constexpr, STORED: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Units first to first + NW - 1 of the blocks that a row packs now; flags [NW, 16].

    o_new: of the first new token that waits. before: how many wait in the ring. slot: of the first block packed now.
    """
    UNIT: tl.constexpr = GROUP // 32 if ALONG else 1
    HALVES: tl.constexpr = 2 * UNIT
    EACH: tl.constexpr = 1 if ALONG else GROUP // 16  # slices of a group
    BOTH: tl.constexpr = MODE != 0
    EXTRA: tl.constexpr = (TILES + 1) // 2 if BITS == 3 else 0
    ALL_TILES: tl.constexpr = TILES + EXTRA
    PAIRED: tl.constexpr = INNER or _turns(PIECES, BITS)
    SPAN: tl.constexpr = _span(PIECES, EACH, BITS, PAIRED, VALUE)
    r = tl.arange(0, 16)
    unit = first + tl.arange(0, NW)
    fits = (unit + 1) * UNIT <= tl.minimum(flush, room - slot)
    live = tl.broadcast_to(fits[:, None], [NW, 16])
    news, rings, olds = (), (), ()
    for h in tl.static_range(HALVES):
        token = unit[:, None] * (UNIT * 32) + h * 16 + r[None, :]
        at = (slot * 32) % ring_room + token
        rings = rings + ((i_head * ring_room + tl.where(at >= ring_room, at - ring_room, at)) * (SLICES * 16),)
        news = news + (o_new + (token - before).to(tl.int64) * token_stride,)
        olds = olds + (token < before,)
    block = i_head * room + slot + unit * UNIT
    o_scale = block // UNIT * (COLUMNS * 16 * (1 if ALONG else 2))
    worst = tl.zeros([NW, 16], tl.float32)
    lows = worst
    nothing = tl.zeros([NW, 16, 16], tl.float32)
    words = ()
    for _ in tl.static_range(UNIT * ALL_TILES):
        words = words + (tl.zeros([NW, 16, 16], tl.int32),)
    raw = _load(p_new, p_ring, news, rings, olds, live, 0, HALVES, EACH, SLICES, STORED)
    for start in tl.static_range(0, SLICES, SPAN):
        for piece in range(start, min(start + SPAN, SLICES), EACH):
            xs = ()
            for i in tl.static_range(HALVES * EACH):
                x = raw[i].to(tl.float32)
                if FACTOR:
                    divisor = tl.load(p_factor + i_kv * (SLICES * 16) + (piece + i % EACH) * 16 + r).to(tl.float32)
                    divisor = tl.broadcast_to(divisor[None, None, :], [NW, 16, 16])
                    x = tl.div_rn(x, divisor) if ASM else x / divisor
                nothing = tl.fma(x, 0.0, nothing) if ASM else nothing + x * 0.0  # a NaN where any is not finite
                xs = xs + (x,)
            raw = _load(p_new, p_ring, news, rings, olds, live, piece + EACH, HALVES, EACH, SLICES, STORED)
            for g in tl.static_range(1 if ALONG else HALVES):
                group = ()
                for i in tl.static_range(HALVES if ALONG else EACH):
                    group = group + (xs[g * EACH + i],)
                best, base, shifted, codes, worst, lows = _choose(
                    group, p_table, worst, lows, BITS, MODE, ALONG, FIRST, ALL, NW, ASM
                )  # fmt: skip
                for i in tl.static_range(HALVES if ALONG else EACH):
                    further = _further(piece - start, 0 if ALONG else i, EACH, BITS, PAIRED, VALUE)
                    words = _put(
                        words, codes[i].to(tl.int32, bitcast=True), further, i // 2 if ALONG else 0,
                        _field_number(i % 2 if ALONG else g, start + (0 if ALONG else i), BITS, PIECES, INNER, VALUE),
                        TILES, EXTRA, BITS,
                    )  # fmt: skip
                if MODE == 2:
                    base = tl.where(shifted, base, best * (-(2.0 ** (BITS - 1))))
                _store_scales(
                    p_scale, o_scale + g * (COLUMNS * 16), fits, best.to(tl.float16), base.to(tl.float16),
                    piece // EACH * (1 + BOTH), TOGETHER, INNER, BOTH,
                )  # fmt: skip
        _store_words(
            p_words, words, block * WORDS, fits, start, SPAN, SLICES, PIECES, TILES, ALL_TILES, WORDS, BITS, INNER, VALUE,
        )  # fmt: skip
    bad = tl.where(worst <= HALF_MAX, 0, SCALE) | tl.where(lows <= HALF_MAX, 0, MINIMUM)
    bad = bad | tl.where(tl.min((nothing == 0).to(tl.int32), 2) > 0, 0, NONFINITE)
    return tl.where(live, bad, tl.where((unit * UNIT < flush)[:, None], ROOM, 0))


@triton.jit
def _store_words(
    p_words, words, o_unit, fits, START: tl.constexpr, SPAN: tl.constexpr, SLICES: tl.constexpr, PIECES: tl.constexpr,
    TILES: tl.constexpr, ALL_TILES: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, INNER: tl.constexpr,
    VALUE: tl.constexpr,
):  # fmt: skip
    """Those tiles that are complete after the slices from START on."""
    BEYOND: tl.constexpr = beyond(WORDS, BITS, 0)
    r = tl.arange(0, 16)
    for i in tl.static_range(len(words)):
        if _complete(i % ALL_TILES, START, SPAN, SLICES, PIECES, TILES, BITS, INNER, VALUE):
            word = words[i].to(tl.int16)
            if VALUE:
                word = tl.trans(word, 0, 2, 1)
            o_words = o_unit + i // ALL_TILES * WORDS + i % ALL_TILES * 256
            if BEYOND > 0 and i % ALL_TILES == ALL_TILES - 1:  # half a tile
                word = tl.reshape(word, [word.shape[0], 16, 2, 8])
                word = tl.sum(word << (tl.arange(0, 2) * BEYOND).to(tl.int16)[None, None, :, None], 2).to(tl.int16)
                o_word = o_words[:, None, None] + (r[:, None] * 8 + tl.arange(0, 8)[None, :])[None]
            else:
                o_word = o_words[:, None, None] + (r[:, None] * 16 + r[None, :])[None]
            tl.store(p_words + o_word, word, mask=fits[:, None, None])


@triton.constexpr_function
def _complete(tile, start, span, slices, pieces, tiles, bits, inner, value):
    """Whether a block's tile has its last code by the slices from `start` on. A tile of third bits belongs to two others."""
    fields, last = 2 * _across(bits), 0
    for half in range(2):
        for i in range(slices):
            own = _field_number(half, i, bits, pieces, inner, value) // fields
            if tile in (own, tiles + own // 2):
                last = max(last, i)
    return start <= last < start + span


@triton.jit
def _write(
    p_new, p_sink, p_ring, o_new, i_head, start, sink_before, taken, sink_room, window, seen, new, first, ring_room,
    token_stride, SLICES: tl.constexpr, NW: tl.constexpr,
):  # fmt: skip
    """16 * NW new tokens from number `start` on to sink and ring; 1 where one is not finite, [NW, 16, 16]."""
    r = tl.arange(0, 16)
    token = start + tl.arange(0, NW)[:, None] * 16 + r[None, :]
    into_sink = token < taken
    waits = window + token - taken
    live = (token < new) & ((into_sink & (sink_before + token < sink_room)) | (waits >= seen - ring_room))
    o_sink = (i_head * sink_room + sink_before + token) * (SLICES * 16)
    o_ring = (i_head * ring_room + (first + waits) % ring_room) * (SLICES * 16)
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
    """Tokens of `width` numbers whose norms are taken at a time."""
    return min(32, max(1, NUMBERS // width))


@triton.jit
def _waiting(
    p_new, p_ring, p_factor, o_new, i_row, first_head, token, live, window, before, ring_room, head_stride, token_stride,
    N: tl.constexpr, DIM: tl.constexpr, FACTOR: tl.constexpr, STORED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Numbers [tokens, N] float32 of N / DIM heads from `first_head` on, of `token`s that a row packs now; divided by the
    factor. o_new: of the first new token that waits, in head 0. i_row: heads of the rows before.
    """
    at = tl.arange(0, N)
    head, channel = first_head + at // DIM, at % DIM
    p = p_new + (o_new + (token - window).to(tl.int64) * token_stride)[:, None]
    p = p + (head.to(tl.int64) * head_stride + channel)[None, :]
    if STORED:
        slot = ((before * 32) % ring_room + token) % ring_room
        o_ring = ((i_row + head).to(tl.int64) * (ring_room * DIM) + channel)[None, :] + (slot * DIM)[:, None]
        p = tl.where((token < window)[:, None], p_ring + o_ring, p)
    x = tl.load(p, mask=live[:, None], other=0.0).to(tl.float32)
    if FACTOR:
        divisor = tl.broadcast_to(tl.load(p_factor + head * DIM + channel).to(tl.float32)[None, :], x.shape)
        x = tl.div_rn(x, divisor) if ASM else x / divisor
    return x


@triton.jit
def _encode(
    p_new, p_ring, p_words, p_scale, p_factor, p_table, o_new, i_row, i_kv, unit, flush, window, before, room, ring_room,
    head_stride, token_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, POINTS: tl.constexpr,
    SIDE: tl.constexpr, FEW: tl.constexpr, MOST: tl.constexpr, NORM_HEADS: tl.constexpr, WORDS: tl.constexpr,
    BYTES: tl.constexpr, VALUE: tl.constexpr, FACTOR: tl.constexpr, STORED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """_pack of a grid: block `unit` of those that a row packs now; its flags. p_table: GridRule.table."""
    LOG: tl.constexpr = _log(DIM)
    SIGNS: tl.constexpr = HEADS * DIM
    r = tl.arange(0, 32)
    fits = unit < tl.minimum(flush, room - before)
    live = tl.broadcast_to(fits, [32])
    gain = tl.load(p_table + SIGNS)
    if NORM_HEADS != 1:  # before its own numbers take registers
        ROWS: tl.constexpr = _rows(HEADS * DIM)
        sign = tl.load(p_table + tl.arange(0, HEADS * DIM))
        norm = tl.zeros([32], tl.float32)
        for i in range(32 // ROWS):
            token = i * ROWS + tl.arange(0, ROWS)
            y = _waiting(
                p_new, p_ring, p_factor, o_new, i_row, 0, unit * 32 + token, tl.broadcast_to(fits, [ROWS]), window, before,
                ring_room, head_stride, token_stride, HEADS * DIM, DIM, FACTOR, STORED, ASM,
            )  # fmt: skip
            y = rotate_rows(y, sign, DIM**-0.5, ROWS, HEADS * DIM, LOG)
            some = norms_of(y, gain, ROWS, HEADS * DIM, _log(HEADS * DIM), ASM)
            wide = tl.reshape(tl.broadcast_to(some[None, :], [32 // ROWS, ROWS]), [32])
            norm = tl.where(r // ROWS == i, wide, norm)
    x = _waiting(
        p_new, p_ring, p_factor, o_new, i_row, i_kv, unit * 32 + r, live, window, before, ring_room, head_stride,
        token_stride, DIM, DIM, FACTOR, STORED, ASM,
    )  # fmt: skip
    bad = tl.where(tl.min(tl.min((x * 0.0 == 0.0).to(tl.int32), 1), 0) == 0, NONFINITE, 0)
    x = rotate_rows(x, tl.load(p_table + i_kv * DIM + tl.arange(0, DIM)), DIM**-0.5, 32, DIM, LOG)
    if NORM_HEADS == 1:
        norm = norms_of(x, gain, 32, DIM, LOG, ASM)
    stored = norm.to(tl.float16)
    x = x * units_of(stored, gain, 32, ASM)[:, None]
    code = nearest_points(x, p_table + SIGNS + 1, 32, DIM, POINTS, D, SIDE, FEW, MOST, ASM)
    block = (i_row + i_kv).to(tl.int64) * room + before + unit
    store_words(p_words + block * (WORDS // 2), code, fits, DIM, BITS, D, VALUE, BYTES)
    own = fits & ((NORM_HEADS == 1) | (i_kv == 0))
    o_norm = (i_row // HEADS * (HEADS // NORM_HEADS) + (i_kv if NORM_HEADS == 1 else 0)).to(tl.int64)
    tl.store(p_scale + (o_norm * room + before + unit) * 32 + r, stored, mask=tl.broadcast_to(own, [32]))
    bad = bad | tl.where(tl.min((norm <= HALF_MAX).to(tl.int32), 0) == 0, SCALE, 0)
    return tl.where(fits, bad, ROOM)


@triton.jit
def _any(bad, BIT: tl.constexpr):
    return tl.max(tl.max(bad & BIT, 1), 0)


@triton.jit
def _role(
    p_new, p_sink, p_ring, p_words, p_scale, p_factor, p_table, p_counts, p_flags, p_due,
    i_batch, i_kv, i_program, programs, batch, queries, room, sink_room, ring_room,
    batch_stride, head_stride, token_stride, factor_stride, DUE: tl.constexpr,
    HEADS: tl.constexpr, SLICES: tl.constexpr, WRITE: tl.constexpr, PACK: tl.constexpr, STORED: tl.constexpr,
    BITS: tl.constexpr, MODE: tl.constexpr, ALONG: tl.constexpr, INNER: tl.constexpr,
    GROUP: tl.constexpr, PIECES: tl.constexpr, TILES: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr, FIRST: tl.constexpr, ALL: tl.constexpr, VECTOR: tl.constexpr, POINTS: tl.constexpr,
    SIDE: tl.constexpr, FEW: tl.constexpr, MOST: tl.constexpr, NORM_HEADS: tl.constexpr, VALUE: tl.constexpr,
    FACTOR: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """All that one program does for keys or values. DUE: tokens of a row's part of p_due, of which all that it packs is; 0: it
    packs what the ring has.
    """
    i_head = (i_batch * HEADS + i_kv).to(tl.int64)
    p_row = p_counts + i_batch
    sink_before, window, before = tl.load(p_row), tl.load(p_row + batch), tl.load(p_row + 2 * batch)
    new, sink, seen = tl.load(p_row + 3 * batch), tl.load(p_row + 4 * batch), tl.load(p_row + 5 * batch)
    flush = tl.load(p_row + 7 * batch) - before
    taken = sink - sink_before
    o_new = i_batch.to(tl.int64) * batch_stride + i_kv.to(tl.int64) * head_stride
    o_new += (queries - new).to(tl.int64) * token_stride
    if WRITE:
        start = tl.maximum(tl.where(taken > 0, 0, new - ring_room), 0) + i_program * (16 * NW)
        for token in range(start, new, programs * (16 * NW)):
            nothing = _write(
                p_new, p_sink, p_ring, o_new, i_head, token, sink_before, taken, sink_room, window, seen, new,
                before * 32, ring_room, token_stride, SLICES, NW,
            )  # fmt: skip
            found = tl.max(tl.max(tl.max(nothing, 2), 1), 0)
            if found != 0:
                tl.atomic_or(p_flags + i_kv, found << (VALUES if VALUE else 0))
    if PACK:
        UNIT: tl.constexpr = GROUP // 32 if ALONG else 1
        p_own = p_factor + i_batch * factor_stride
    if PACK and VECTOR > 0:
        o_row = o_new + taken * token_stride - i_kv.to(tl.int64) * head_stride
        for unit in tl.range(i_program, flush, programs, disable_licm=True):
            found = _encode(
                p_new, p_ring, p_words, p_scale, p_own, p_table, o_row, i_batch * HEADS, i_kv, unit, flush, window, before,
                room, ring_room, head_stride, token_stride, HEADS, SLICES * 16, BITS, VECTOR, POINTS, SIDE, FEW,
                MOST, NORM_HEADS, WORDS, MODE == GRID_IN_BYTES, VALUE, FACTOR, STORED, ASM,
            )  # fmt: skip
            if found != 0:
                tl.atomic_or(p_flags + i_kv, found << (VALUES if VALUE else 0))
    elif PACK:
        for first in range(i_program * NW, tl.cdiv(flush, UNIT), programs * NW):
            if DUE > 0:
                bad = _pack(
                    p_due, p_due, p_words, p_scale, p_own, p_table, i_head * (DUE * SLICES * 16), i_head, i_kv, first, flush,
                    0, before, room, ring_room, SLICES * 16,
                    SLICES, BITS, MODE, ALONG, INNER, GROUP, PIECES, TILES, WORDS, COLUMNS, TOGETHER, FIRST, ALL,
                    VALUE, FACTOR, False, NW, ASM,
                )  # fmt: skip
            else:
                bad = _pack(
                    p_new, p_ring, p_words, p_scale, p_own, p_table, o_new + taken * token_stride, i_head, i_kv, first, flush,
                    window, before, room, ring_room, token_stride,
                    SLICES, BITS, MODE, ALONG, INNER, GROUP, PIECES, TILES, WORDS, COLUMNS, TOGETHER, FIRST, ALL,
                    VALUE, FACTOR, STORED, NW, ASM,
                )  # fmt: skip
            found = _any(bad, NONFINITE) | _any(bad, SCALE) | _any(bad, MINIMUM) | _any(bad, ROOM)
            if found != 0:
                tl.atomic_or(p_flags + i_kv, found << (VALUES if VALUE else 0))


@triton.jit(do_not_specialize=["programs", "batch", "queries", "room", "sink_room", "ring_room", "factor_stride"])
def append_kernel(
    p_k, p_v, p_sink_k, p_sink_v, p_ring_k, p_ring_v, p_kw, p_ks, p_vw, p_vs, p_factor, p_k_table, p_v_table, p_counts,
    p_flags, p_due, programs, batch, queries, room, sink_room, ring_room,
    k_batch, k_head, k_token, v_batch, v_head, v_token, factor_stride, DUE: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, WRITE: tl.constexpr, PACK: tl.constexpr, STORED: tl.constexpr,
    FACTOR: tl.constexpr,
    K_BITS: tl.constexpr, K_MODE: tl.constexpr, K_ALONG: tl.constexpr, K_INNER: tl.constexpr, K_GROUP: tl.constexpr,
    K_PIECES: tl.constexpr, K_TILES: tl.constexpr, K_WORDS: tl.constexpr, K_COLUMNS: tl.constexpr,
    K_TOGETHER: tl.constexpr, K_FIRST: tl.constexpr, K_ALL: tl.constexpr,
    K_VECTOR: tl.constexpr, K_POINTS: tl.constexpr, K_SIDE: tl.constexpr, K_FEW: tl.constexpr, K_MOST: tl.constexpr,
    K_NORM_HEADS: tl.constexpr,
    V_BITS: tl.constexpr, V_MODE: tl.constexpr, V_ALONG: tl.constexpr, V_INNER: tl.constexpr, V_GROUP: tl.constexpr,
    V_PIECES: tl.constexpr, V_TILES: tl.constexpr, V_WORDS: tl.constexpr, V_COLUMNS: tl.constexpr,
    V_TOGETHER: tl.constexpr, V_FIRST: tl.constexpr, V_ALL: tl.constexpr,
    V_VECTOR: tl.constexpr, V_POINTS: tl.constexpr, V_SIDE: tl.constexpr, V_FEW: tl.constexpr, V_MOST: tl.constexpr,
    V_NORM_HEADS: tl.constexpr,
    NW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (programs, HEADS, 2 * batch): keys of every row, then values. WRITE: new tokens to sink and ring. PACK: what
    is due. STORED: there is a ring. DUE: keys of the block of so many tokens that is due are those of p_due (batch, HEADS,
    DUE, D); 0: the ring's.
    """
    i_program, i_kv = tl.program_id(0), tl.program_id(1)
    i_batch = tl.program_id(2) // 2
    if tl.program_id(2) % 2 == 0:
        _role(
            p_k, p_sink_k, p_ring_k, p_kw, p_ks, p_factor, p_k_table, p_counts, p_flags, p_due,
            i_batch, i_kv, i_program, programs, batch, queries, room, sink_room, ring_room,
            k_batch, k_head, k_token, factor_stride, DUE, HEADS, D // 16, WRITE, PACK, STORED,
            K_BITS, K_MODE, K_ALONG, K_INNER, K_GROUP, K_PIECES, K_TILES, K_WORDS, K_COLUMNS, K_TOGETHER,
            K_FIRST, K_ALL, K_VECTOR, K_POINTS, K_SIDE, K_FEW, K_MOST, K_NORM_HEADS, False, FACTOR, NW, ASM,
        )  # fmt: skip
    else:
        _role(
            p_v, p_sink_v, p_ring_v, p_vw, p_vs, p_factor, p_v_table, p_counts, p_flags, p_due,
            i_batch, i_kv, i_program, programs, batch, queries, room, sink_room, ring_room,
            v_batch, v_head, v_token, factor_stride, 0, HEADS, D // 16, WRITE, PACK, STORED,
            V_BITS, V_MODE, V_ALONG, V_INNER, V_GROUP, V_PIECES, V_TILES, V_WORDS, V_COLUMNS, V_TOGETHER,
            V_FIRST, V_ALL, V_VECTOR, V_POINTS, V_SIDE, V_FEW, V_MOST, V_NORM_HEADS, True, False, NW, ASM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["batch"])
def advance_kernel(
    p_counts, p_new, batch, SINK: tl.constexpr, RECENT: tl.constexpr, BLOCK_: tl.constexpr, WIDE: tl.constexpr
):
    row = tl.arange(0, WIDE)
    live = row < batch
    p_row = p_counts + row
    new = tl.load(p_new + row, mask=live, other=0)
    sink = tl.load(p_row + 4 * batch, mask=live, other=0)
    window = tl.load(p_row + 6 * batch, mask=live, other=0)
    blocks = tl.load(p_row + 7 * batch, mask=live, other=0)
    after = tl.minimum(sink + new, SINK)
    seen = window + new - (after - sink)
    flush = tl.maximum(seen - RECENT, 0) // BLOCK_
    tl.store(p_row, sink, mask=live)
    tl.store(p_row + batch, window, mask=live)
    tl.store(p_row + 2 * batch, blocks, mask=live)
    tl.store(p_row + 3 * batch, new, mask=live)
    tl.store(p_row + 4 * batch, after, mask=live)
    tl.store(p_row + 5 * batch, seen, mask=live)
    tl.store(p_row + 6 * batch, seen - flush * BLOCK_, mask=live)
    tl.store(p_row + 7 * batch, blocks + flush * (BLOCK_ // 32), mask=live)


@triton.jit(do_not_specialize=["batch", "queries", "until"])
def observe_kernel(
    p_k, p_peak, p_fixed, p_counts, p_factor, p_wide, batch, queries, until,
    HEADS: tl.constexpr, RATIO: tl.constexpr, D: tl.constexpr, H_WIDE: tl.constexpr, D_WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (batch,): a program takes all heads of its row, so that none reads `fixed` behind another's store."""
    i_row = tl.program_id(0).to(tl.int64)
    head, channel = tl.arange(0, H_WIDE)[:, None], tl.arange(0, D_WIDE)[None, :]
    inside = (head < HEADS) & (channel < D)
    o_head = i_row * HEADS + head
    p_own = p_peak + o_head * D + channel
    b_peak = tl.load(p_own, mask=inside, other=0.0)
    fixed = tl.load(p_fixed + i_row)
    seen = tl.load(p_counts + i_row) + tl.load(p_counts + batch + i_row)
    count = tl.where(fixed != 0, 0, tl.minimum(until - seen, queries))
    for i in tl.range(0, count):
        b_k = tl.load(p_k + (o_head * queries + i) * D + channel, mask=inside, other=0.0).to(tl.float32)
        b_peak = tl.maximum(b_peak, tl.abs(b_k), propagate_nan=tl.PropagateNan.ALL)
    tl.store(p_own, b_peak, mask=inside)
    b_factor = tl.sqrt_rn(b_peak).to(tl.float16).to(tl.float32)
    b_factor = tl.where(b_factor > 0, b_factor, 1.0)
    tl.store(p_factor + o_head * D + channel, b_factor, mask=inside)
    for i in tl.static_range(RATIO):
        tl.store(p_wide + (o_head * RATIO + i) * D + channel, b_factor, mask=inside)
    blocks = tl.load(p_counts + 7 * batch + i_row)
    tl.debug_barrier()  # every thread has read it
    tl.store(p_fixed + i_row, ((fixed != 0) | (blocks > 0)).to(tl.uint8))


KERNEL_MODES = {"symmetric": 0, "asymmetric": 1, "hybrid": 2}
PROGRAMS = 8  # that write the windows of a long call


@dataclass(frozen=True)
class Launch:
    """warps: units at a time of a program; of a grid it takes one at a time. registers: a thread at most, 0: as the compiler
    likes.
    """

    warps: int = 4
    registers: int = 0


# A row packs one unit at most: of prompts, one warp took 0.70 of four warps' time at 4/4, 0.35 hybrid (H200).
STEP = Launch(warps=1)
# Registers of programs over grids, which left to the compiler take up to 239. GRID_STEP: of a decode step, in which most have
# nothing to pack. With 128, four of 4 warps fit a multiprocessor of 65,536, so that the 512 of 32 rows and 8 kv heads run at
# once on an H200, where 240 let two: an append takes 7.5 in place of 9.8 to 9.9 us with nothing due, and one with a block in
# every row 16 to 28 % less (HIGGS 2 36.7 in place of 50.8); 160, which let three, 9.3. At head_dim 256 the 8192 numbers of a
# block want 8 warps, and two programs fit: 64 registers, for four, would hold little more than the numbers themselves.
GRID, GRID_STEP = 240, 128


def launch_of(key: AnyRule, value: AnyRule, step: bool) -> Launch:
    """step: of a decode step. A grid's unit of 32 * D numbers takes a whole program, 32 numbers a thread."""
    if isinstance(key, GridRule) or isinstance(value, GridRule):
        return Launch(max(4, key.form.dim // 32), GRID_STEP if step else GRID)
    return Launch() if not step and (key.search or value.search) else STEP


def _programs(units: int, key: AnyRule, value: AnyRule, launch: Launch) -> int:
    """For so many units of each head."""
    one = isinstance(key, GridRule) or isinstance(value, GridRule)
    return units if one else -(-units // launch.warps)


def settings(key: AnyRule, value: AnyRule) -> dict[str, Any]:
    """Compile-time constants of append_kernel that follow from the rules."""
    made: dict[str, Any] = {"D": key.form.dim}
    for name, rule in (("K", key), ("V", value)):
        form = rule.form
        own = {
            "BITS": form.bits, "ALONG": form.along_tokens, "INNER": form.inner, "GROUP": form.group, "PIECES": form.pieces,
            "TILES": form.tiles, "WORDS": form.words, "COLUMNS": form.columns, "TOGETHER": together(form.columns),
            "VECTOR": form.vector, "NORM_HEADS": form.norm_heads,
        }  # fmt: skip
        if isinstance(rule, GridRule):
            own |= {"MODE": int(form.in_bytes), "FIRST": 0, "ALL": 0} | rotated.searched(rule.how)
        else:
            own |= {
                "MODE": KERNEL_MODES[rule.mode],
                "FIRST": len(rule._symmetric),
                "ALL": len(rule.factors),
                "POINTS": 0,
                **rotated.NO_RASTER,
            }
        made |= {f"{name}_{what}": number for what, number in own.items()}
    return made


@functools.cache
def _factors(rule: Rule, device: torch.device) -> Tensor:
    """(n, 2) float32: made once, as a CUDA graph must find them where they were."""
    return torch.tensor(rule.factors, dtype=torch.float32).to(device)


def _table(rule: AnyRule, device: torch.device) -> Tensor:
    return rule.table if isinstance(rule, GridRule) else _factors(rule, device)


def advance(counts: Counts, new: Tensor) -> None:
    """As reference.advance, in one launch of one program: once a forward, before its first layer."""
    batch, own = counts.data.shape[1], counts.windows
    if new.shape != (batch,) or new.dtype != torch.int32:
        raise ValueError(f"new tokens {tuple(new.shape)} {new.dtype}: must be ({batch},) torch.int32")
    with on(counts.data.device):
        advance_kernel[(1,)](
            counts.data, new, batch, own.sink, own.recent, own.block, triton.next_power_of_2(batch), num_warps=1
        )


def observe(peak: Tensor, fixed: Tensor, counts: Counts, keys: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    """As reference.observe, in one launch, where that takes about twenty: of each layer in every step of a CUDA graph."""
    batch, heads, queries, dim = keys.shape
    wanted = ((batch, heads, dim), torch.float32), ((batch,), torch.bool)
    for name, x, (shape, dtype) in zip(("peak", "fixed"), (peak, fixed), wanted, strict=True):
        if x.shape != shape or x.dtype != dtype or not x.is_contiguous():
            raise ValueError(f"{name} {tuple(x.shape)} {x.dtype}: must be {shape} {dtype}, contiguous")
    if counts.data.shape[1] != batch:
        raise ValueError(f"counts of {counts.data.shape[1]} rows, keys of {batch}: must be the same")
    own, windows = torch.empty_like(peak), counts.windows
    wide = torch.empty(batch, ratio * heads, dim, dtype=torch.float32, device=peak.device)
    sizes = (heads, ratio, dim, triton.next_power_of_2(heads), triton.next_power_of_2(dim))
    with on(peak.device):
        observe_kernel[(batch,)](
            keys.contiguous(), peak, fixed.view(torch.uint8), counts.data, own, wide,
            batch, queries, windows.sink + windows.recent + windows.block, *sizes, num_warps=4,
        )  # fmt: skip
    return own[:, :, None], wide[:, :, None]


def append(
    layer: Layer,
    counts: Counts,
    k: Tensor,
    v: Tensor,
    key: AnyRule,
    value: AnyRule,
    factor: Tensor | None = None,
    due: Tensor | None = None,
) -> None:
    """As reference.append, for k, v, sink and recent of one dtype. The grid follows from shapes alone, so a CUDA graph of a
    decode step can be replayed. One launch; two where a call brings more than the ring takes beside what it may hold.
    """
    given = (layer.about, counts.windows, about(counts.data), about(k), about(v))
    name = (*given, key, value, *(None if x is None else about(x) for x in (factor, due)))
    prepared = _PREPARED.get(name)
    if prepared is None:
        _check_layer(layer, counts, k, v, key, value)
        if due is not None:
            reference.check_due(counts, k, key, due, factor)
        launches = list(_steps(layer, counts, k, v, key, value, factor, due))
        prepared = _PREPARED[name] = [_table(rule, k.device) for rule in (key, value)], launches
    tables, launches = prepared
    tensors = _tensors(layer, counts.data, k, v, factor, tables, due)
    for ready, numbers in launches:
        ready(tensors, *numbers)


_PREPARED = Prepared()


def _steps(
    layer: Layer,
    counts: Counts,
    k: Tensor,
    v: Tensor,
    key: AnyRule,
    value: AnyRule,
    factor: Tensor | None,
    due: Tensor | None,
) -> Iterator[tuple[Ready, tuple[int, ...]]]:
    """The launches of an `append`."""
    queries, windows, room = k.shape[2], counts.windows, layer.recent[0].shape[2]
    prepare = functools.partial(_prepared, layer, k, v, key, value, factor, due=due)
    if queries <= room - (windows.recent + windows.block - 1):
        yield prepare(1, launch_of(key, value, step=True), write=True, pack=True)
        return
    own = launch_of(key, value, step=False)
    yield prepare(_programs(-(-(queries + room) // BLOCK), key, value, own), own, write=False, pack=True)
    yield prepare(PROGRAMS, Launch(), write=True, pack=False)


def quantise(
    k: Tensor,
    v: Tensor,
    key: AnyRule,
    value: AnyRule,
    factor: Tensor | None = None,
    flags: Tensor | None = None,
    launch: Launch | None = None,
) -> tuple[Blocks, Blocks, Tensor]:
    """reference.quantise of keys and of values (B, H, T, D) in one launch -> blocks of both, and flags int32 (H,),
    those of values shifted by VALUES; given ones are added to. Any strides but that of channels, which is 1, and any
    two dtypes. Two grids of which one has norms over all heads take two launches a side, so that each number is rotated once.
    """
    batch, heads, tokens = k.shape[:3]
    for name, x, rule in (("keys", k, key), ("values", v, value)):
        form = rule.form
        _check_input(name, x, k, rule)
        if tokens % BLOCK or tokens % (BLOCK * form.scale_blocks):
            raise ValueError(f"{name} of {tokens} tokens: must be whole blocks of {BLOCK * form.scale_blocks}")
    if flags is None:
        flags = torch.zeros(heads, dtype=torch.int32, device=k.device)
    if isinstance(key, GridRule) and isinstance(value, GridRule) and key.form.norm_heads + value.form.norm_heads > 2:
        return (
            _in_two_launches(k, key, factor, flags, 0),
            _in_two_launches(v, value, None, flags, reference.VALUES),
            flags,
        )
    count = tokens // BLOCK
    made = [reference.blocks_for(rule, batch, heads, count, k.device, torch.empty) for rule in (key, value)]
    data = torch.zeros(len(FIELDS), batch, dtype=torch.int32, device=k.device)
    data[3], data[7] = tokens, count
    layer = Layer(made[0], made[1], (k, v), (k, v), flags)
    own = launch or launch_of(key, value, step=False)
    programs = _programs(count, key, value, own)
    ready, numbers = _prepared(layer, k, v, key, value, factor, programs, own, write=False, pack=True, stored=False)
    tables = [_table(rule, k.device) for rule in (key, value)]
    ready(_tensors(layer, data, k, v, factor, tables), *numbers)
    return made[0], made[1], flags


def _in_two_launches(x: Tensor, rule: GridRule, factor: Tensor | None, flags: Tensor, shift: int) -> Blocks:
    """Codes in one launch, their words in another."""
    codes, norm, found = rotated.encode(x if factor is None else x.float() / factor.float(), rule.how)
    flags.bitwise_or_(found << shift)
    return Blocks(rule.form, rotated.pack(codes, rule.form), norm.unflatten(2, (-1, BLOCK)), rule.grid)


def _tensors(
    layer: Layer,
    data: Tensor,
    k: Tensor,
    v: Tensor,
    factor: Tensor | None,
    tables: list[Tensor],
    due: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return k, v, *layer.tensors, k if factor is None else factor, *tables, data, layer.flags, k if due is None else due


def _prepared(
    layer: Layer,
    k: Tensor,
    v: Tensor,
    key: AnyRule,
    value: AnyRule,
    factor: Tensor | None,
    programs: int,
    launch: Launch,
    write: bool,
    pack: bool,
    stored: bool = True,
    due: Tensor | None = None,
) -> tuple[Ready, tuple[int, ...]]:
    """What starts a launch, and its numbers: all that follows from shapes and strides."""
    batch, heads, queries, dim = k.shape
    if factor is not None:
        wanted = [(heads, 1, dim), (batch, heads, 1, dim)]
        if tuple(factor.shape) not in wanted or not factor.is_contiguous():
            raise ValueError(f"factor {tuple(factor.shape)}: must be {wanted[0]} or {wanted[1]}, contiguous")
    options = settings(key, value) | {
        "HEADS": heads, "WRITE": write, "PACK": pack, "STORED": stored, "FACTOR": factor is not None,
        "DUE": 0 if due is None else due.shape[2], "NW": launch.warps,
        "ASM": not interpreted(), "num_warps": launch.warps, "num_stages": 1, "enable_fp_fusion": False,
    }  # fmt: skip
    options |= {"maxnreg": launch.registers} if launch.registers else {}
    numbers = (
        programs, batch, queries, layer.keys.words.shape[2], layer.sink[0].shape[2], layer.recent[0].shape[2],
        *k.stride()[:3], *v.stride()[:3], heads * dim if factor is not None and factor.ndim == 4 else 0,
    )  # fmt: skip
    return Ready(append_kernel, (programs, heads, 2 * batch), options), numbers


def _check_input(name: str, x: Tensor, k: Tensor, rule: AnyRule) -> None:
    dim, heads = rule.form.dim, rule.heads if isinstance(rule, GridRule) else k.shape[1]
    if x.shape != k.shape or x.ndim != 4 or x.shape[1] != heads or x.shape[3] != dim:
        wanted = (k.shape[0], heads, k.shape[2], dim)
        raise ValueError(f"{name} {tuple(x.shape)}: must be {wanted}, as keys and values alike")
    if isinstance(rule, GridRule) and rule.grid.points.device != x.device:
        raise ValueError(f"{name} on {x.device}, their grid on {rule.grid.points.device}: must be on one device")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"{name} of {x.dtype}: must be float16, bfloat16 or float32")
    if x.stride(3) != 1:
        raise ValueError(f"{name}: strides {x.stride()} of {tuple(x.shape)}; channels must be contiguous")


def _check_layer(layer: Layer, counts: Counts, k: Tensor, v: Tensor, key: AnyRule, value: AnyRule) -> None:
    """What the kernel relies on and cannot see."""
    batch, heads, _, dim = k.shape
    windows, room = counts.windows, layer.keys.words.shape[2]
    for name, x, rule, made in (("keys", k, key, layer.keys), ("values", v, value, layer.values)):
        form = rule.form
        _check_input(name, x, k, rule)
        if x.dtype != k.dtype:
            raise ValueError(f"{name} of {x.dtype}: must be {k.dtype}, as keys and values alike")
        if windows.block % (BLOCK * form.scale_blocks):
            raise ValueError(
                f"{name}: {windows.block} tokens a block; must be a multiple of {BLOCK * form.scale_blocks}"
            )
        words = batch, heads, room, form.words
        scales = batch, heads // form.norm_heads, room // form.scale_blocks, form.scales
        if made.form != form or made.words.shape != words or made.scale.shape != scales or room % form.scale_blocks:
            seen = f"{made.form}, words {tuple(made.words.shape)}, scales {tuple(made.scale.shape)}"
            raise ValueError(f"stored {name}: {seen}; must be {form}, {words} and {scales}")
    least = windows.recent + windows.block
    for name, pair, wanted in (("sink", layer.sink, windows.sink), ("recent", layer.recent, least)):
        for x in pair:
            fits = x.ndim == 4 and x.shape == (batch, heads, pair[0].shape[2], dim) and x.shape[2] >= wanted
            if not fits or x.dtype != k.dtype or not x.is_contiguous():
                raise ValueError(
                    f"{name} {tuple(x.shape)} {x.dtype}: must be ({batch}, {heads}, at least {wanted}, {dim}) {k.dtype}, "
                    "contiguous"
                )
    for x in (*layer.tensors, layer.flags, counts.data):
        if x.device != k.device:
            raise ValueError(f"storage or counts on {x.device}, keys on {k.device}: must be on one device")
    if layer.recent[0].shape[2] % BLOCK:
        raise ValueError(f"recent, room for {layer.recent[0].shape[2]}: must be a multiple of {BLOCK}")
    if counts.data.shape != (len(FIELDS), batch) or layer.flags.shape != (heads,):
        raise ValueError(
            f"counts {tuple(counts.data.shape)}, flags {tuple(layer.flags.shape)}: must be {(len(FIELDS), batch)} and "
            f"({heads},)"
        )
