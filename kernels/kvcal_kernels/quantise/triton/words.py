"""Codes into words, and words and scales into memory.

A warp takes a unit: the blocks that share scales, 1, 2 or 4. It loads them piece by piece (16 tokens x 16 channels), so
that a thread has the same place of every piece and a word is a sum of its own shifted codes: packing moves nothing
between threads. Value words are transposed after packing, 16 / bits numbers at a time.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ...layout.form import field_number, half_tile_shift
from .. import reference
from .rounding import HALF_MAX, choose_scales

NONFINITE, SCALE, MINIMUM = (tl.constexpr(i) for i in (reference.NONFINITE, reference.SCALE, reference.MINIMUM))
NO_SLOT = tl.constexpr(reference.NO_SLOT)
VALUE_FLAGS = tl.constexpr(reference.VALUES)
GRID_IN_BYTES = tl.constexpr(1)  # MODE of a grid; of others 0
_field_number, _half_tile_shift = triton.constexpr_function(field_number), triton.constexpr_function(half_tile_shift)


@triton.constexpr_function
def _field_of(half, piece, side, value):
    return _field_number(half, piece, side.bits, side.pieces, side.inner, value)


@triton.constexpr_function
def _bits(block, number, i, tiles, extra, bits):
    """Return (lowest bit of the code, mask or 0, shift, shift more a field further) of what a piece, whose
    `field_number` it is, adds to tile i of a unit's words; None where it adds nothing.
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
):
    """Return the words of a unit with the code of a piece put into its fields (layout/form.py): `further` fields beyond
    field NUMBER.
    """
    changed = ()
    for i in tl.static_range(len(words)):
        if _bits(BLOCK_, NUMBER, i, TILES, EXTRA, BITS) is None:
            changed = changed + (words[i],)
        else:
            changed = changed + (words[i] + _field(code, further, _bits(BLOCK_, NUMBER, i, TILES, EXTRA, BITS)),)
    return changed


@triton.jit
def _field(code, further, BITS: tl.constexpr):
    part = code >> BITS[0]
    if BITS[1] != 0:
        part = part & BITS[1]
    return part << (BITS[2] + further * BITS[3])


@triton.constexpr_function
def _across(bits):
    """Return the pairs of pieces that share a tile."""
    return 8 // (2 if bits == 3 else bits)


@triton.jit
def _further(
    done, FIRST: tl.constexpr, EACH: tl.constexpr, BITS: tl.constexpr, PAIRED: tl.constexpr, VALUE: tl.constexpr
):
    """Return the fields from that of the slice FIRST behind an even one to that of the slice `done` behind it in the
    same tile. done: a multiple of EACH. PAIRED: keys whose slices are pairs.
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
def _alternates(pieces, bits):
    """Return whether half blocks of keys alternate in outer groups, too (`field_number`)."""
    return _field_number(1, 0, bits, pieces, False, False) != pieces


@triton.constexpr_function
def _span(pieces, each, bits, paired, value):
    """Return the slices handled before words are stored: words fill up while a runtime loop runs over fields of one
    tile.
    """
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
    """Store a group's scale and, with BOTH, its zero point, [NW, 16] float16, as columns `column` and the next one."""
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
):
    """Load slices `piece` to piece + EACH - 1 of every half block, half after half; nothing beyond the last."""
    r = tl.arange(0, 16)
    inside = live[:, :, None] & (piece < SLICES)
    pieces = ()
    for h in tl.static_range(HALVES):
        for e in tl.static_range(EACH):
            column = (piece + e) * 16 + r[None, None, :]
            p = p_new + news[h][:, :, None] + column
            if STORED:
                p = tl.where(olds[h][:, :, None], p_ring + rings[h][:, :, None] + column, p)
            pieces = pieces + (tl.load(p, mask=inside, other=0.0),)
    return pieces


@triton.jit
def _divided(
    raw, nothing, p_factor, HALVES: tl.constexpr, EACH: tl.constexpr, FACTOR: tl.constexpr, NW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return slices of every half block as float32, divided by their channels' factors; and `nothing` plus 0 times all
    of them, a NaN where any is not finite.
    """
    r = tl.arange(0, 16)
    xs = ()
    for i in tl.static_range(HALVES * EACH):
        x = raw[i].to(tl.float32)
        if FACTOR:
            divisor = tl.load(p_factor + i % EACH * 16 + r).to(tl.float32)
            divisor = tl.broadcast_to(divisor[None, None, :], [NW, 16, 16])
            x = tl.div_rn(x, divisor) if ASM else x / divisor
        nothing = tl.fma(x, 0.0, nothing) if ASM else nothing + x * 0.0
        xs = xs + (x,)
    return xs, nothing


@triton.jit
def pack_units(
    p_new, p_ring, p_words, p_scale, p_factor, p_table, o_new, i_head, i_kv, first, flush, before, slot, capacity,
    ring_capacity, token_stride, SIDE: tl.constexpr, SLICES: tl.constexpr, VALUE: tl.constexpr, FACTOR: tl.constexpr,
    STORED: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr,
):
    """Pack units first to first + NW - 1 of the blocks that a row packs now; return flags [NW, 16].

    o_new: of the first new token that waits. before: how many wait in the ring. slot: of the first block packed now.
    """
    UNIT: tl.constexpr = SIDE.unit
    HALVES: tl.constexpr = 2 * UNIT
    EACH: tl.constexpr = 1 if SIDE.along else SIDE.group // 16  # slices of a group
    BOTH: tl.constexpr = SIDE.mode != 0
    EXTRA: tl.constexpr = (SIDE.tiles + 1) // 2 if SIDE.bits == 3 else 0
    ALL_TILES: tl.constexpr = SIDE.tiles + EXTRA
    PAIRED: tl.constexpr = SIDE.inner or _alternates(SIDE.pieces, SIDE.bits)
    SPAN: tl.constexpr = _span(SIDE.pieces, EACH, SIDE.bits, PAIRED, VALUE)
    r = tl.arange(0, 16)
    unit = first + tl.arange(0, NW)
    fits = (unit + 1) * UNIT <= tl.minimum(flush, capacity - slot)
    live = tl.broadcast_to(fits[:, None], [NW, 16])
    news, rings, olds = (), (), ()
    for h in tl.static_range(HALVES):
        token = unit[:, None] * (UNIT * 32) + h * 16 + r[None, :]
        at = (slot * 32) % ring_capacity + token
        rings = rings + (
            (i_head * ring_capacity + tl.where(at >= ring_capacity, at - ring_capacity, at)) * (SLICES * 16),
        )
        news = news + (o_new + (token - before).to(tl.int64) * token_stride,)
        olds = olds + (token < before,)
    block = i_head * capacity + slot + unit * UNIT
    o_scale = block // UNIT * (SIDE.columns * 16 * (1 if SIDE.along else 2))
    worst = tl.zeros([NW, 16], tl.float32)
    lows = worst
    nothing = tl.zeros([NW, 16, 16], tl.float32)
    words = ()
    for _ in tl.static_range(UNIT * ALL_TILES):
        words = words + (tl.zeros([NW, 16, 16], tl.int32),)
    raw = _load(p_new, p_ring, news, rings, olds, live, 0, HALVES, EACH, SLICES, STORED)
    for start in tl.static_range(0, SLICES, SPAN):
        for piece in range(start, min(start + SPAN, SLICES), EACH):
            p_slice_factor = p_factor + (i_kv * SLICES + piece) * 16
            xs, nothing = _divided(raw, nothing, p_slice_factor, HALVES, EACH, FACTOR, NW, ASM)
            raw = _load(p_new, p_ring, news, rings, olds, live, piece + EACH, HALVES, EACH, SLICES, STORED)
            for g in tl.static_range(1 if SIDE.along else HALVES):
                group = ()
                for i in tl.static_range(HALVES if SIDE.along else EACH):
                    group = group + (xs[g * EACH + i],)
                best, base, shifted, codes, worst, lows = choose_scales(
                    group, p_table, worst, lows, SIDE, NW, ASM
                )
                for i in tl.static_range(HALVES if SIDE.along else EACH):
                    further = _further(piece - start, 0 if SIDE.along else i, EACH, SIDE.bits, PAIRED, VALUE)
                    words = _put(
                        words, codes[i].to(tl.int32, bitcast=True), further, i // 2 if SIDE.along else 0,
                        _field_of(i % 2 if SIDE.along else g, start + (0 if SIDE.along else i), SIDE, VALUE),
                        SIDE.tiles, EXTRA, SIDE.bits,
                    )
                if SIDE.mode == 2:
                    base = tl.where(shifted, base, best * (-(2.0 ** (SIDE.bits - 1))))
                _store_scales(
                    p_scale, o_scale + g * (SIDE.columns * 16), fits, best.to(tl.float16), base.to(tl.float16),
                    piece // EACH * (1 + BOTH), SIDE.together, SIDE.inner, BOTH,
                )
        _store_words(
            p_words, words, block * SIDE.words, fits, start, SPAN, SLICES, ALL_TILES, SIDE, VALUE,
        )
    bad = tl.where(worst <= HALF_MAX, 0, SCALE) | tl.where(lows <= HALF_MAX, 0, MINIMUM)
    bad = bad | tl.where(tl.min((nothing == 0).to(tl.int32), 2) > 0, 0, NONFINITE)
    return tl.where(live, bad, tl.where((unit * UNIT < flush)[:, None], NO_SLOT, 0))


@triton.jit
def _store_words(
    p_words, words, o_unit, fits, START: tl.constexpr, SPAN: tl.constexpr, SLICES: tl.constexpr,
    ALL_TILES: tl.constexpr, SIDE: tl.constexpr, VALUE: tl.constexpr,
):
    """Store those tiles that are complete after the slices from START on."""
    SHIFT: tl.constexpr = _half_tile_shift(SIDE.words, SIDE.bits, 0)
    r = tl.arange(0, 16)
    for i in tl.static_range(len(words)):
        if _complete(i % ALL_TILES, START, SPAN, SLICES, SIDE.pieces, SIDE.tiles, SIDE.bits, SIDE.inner, VALUE):
            word = words[i].to(tl.int16)
            if VALUE:
                word = tl.trans(word, 0, 2, 1)
            o_words = o_unit + i // ALL_TILES * SIDE.words + i % ALL_TILES * 256
            if SHIFT > 0 and i % ALL_TILES == ALL_TILES - 1:  # half a tile
                word = tl.reshape(word, [word.shape[0], 16, 2, 8])
                word = tl.sum(word << (tl.arange(0, 2) * SHIFT).to(tl.int16)[None, None, :, None], 2).to(tl.int16)
                o_word = o_words[:, None, None] + (r[:, None] * 8 + tl.arange(0, 8)[None, :])[None]
            else:
                o_word = o_words[:, None, None] + (r[:, None] * 16 + r[None, :])[None]
            tl.store(p_words + o_word, word, mask=fits[:, None, None])


@triton.constexpr_function
def _complete(tile, start, span, slices, pieces, tiles, bits, inner, value):
    """Return whether a block's tile has its last code by the slices from `start` on. A tile of third bits belongs to
    two others.
    """
    fields, last = 2 * _across(bits), 0
    for half in range(2):
        for i in range(slices):
            tile_of_field = _field_number(half, i, bits, pieces, inner, value) // fields
            if tile in (tile_of_field, tiles + tile_of_field // 2):
                last = max(last, i)
    return start <= last < start + span
