"""What the assembly of a block of 8-bit products computes, with its roundings, for Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from ..integers import bit_weight, codes_of, key_bit_weight
from ..scales import scale_columns
from .queries import FULL_PROBABILITY, FULL_QUERY, slice_weight


@triton.jit
def emulated_scores(
    p_k, p_ks, i_head, i_norm, block_at, queries, unit, p_table, capacity, KEYS: tl.constexpr, SLICES: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr,
):
    """Return scores of both halves in powers of two, of queries that are rounded as ptx.py does."""
    at = (i_head * capacity + block_at)[:, None]
    live = at >= 0
    scores = ()
    if not KEYS.points:
        parts = codes_of(p_k, at * KEYS.words, live, at, KEYS, 0, False, NW, False, False)
    if KEYS.points:
        r = tl.arange(0, 16)
        for h in tl.static_range(2):
            b_s = tl.zeros([NW, 16, N], tl.float32)
            for i in tl.static_range(SLICES):
                p_words = p_k + (at * KEYS.words)[:, :, None]
                x = _byte_points(p_words, r[:, None], r[None, :], p_table, h, i, False, SLICES, KEYS.bits, KEYS.group)
                b_s += tl.dot(x, queries[i], input_precision="ieee")
            norm = tl.load(p_ks + (i_norm * capacity + block_at)[:, None] * 32 + h * 16 + r[None, :]).to(tl.float32)
            scores = scores + (b_s * norm[:, :, None] * unit[:, None, :],)
    elif KEYS.outer:
        at_group = (i_head * (capacity // (KEYS.group // 32)) + block_at // (KEYS.group // 32))[:, None] * (SLICES * 32)
        r = tl.arange(0, 16)[None, :]
        b_top, b_zero = tl.full([NW, N], 2.0**-24, tl.float32), tl.zeros([NW, N], tl.float32)
        scaled = ()
        for i in tl.static_range(SLICES):
            p = p_ks + at_group + (i * 32 + r // 2 * 4 + r % 2)
            b_zero += tl.sum(queries[i] * tl.load(p + 2).to(tl.float32)[:, :, None], 1)
            b_q = (queries[i] * tl.load(p).to(tl.float32)[:, :, None]).to(tl.float16).to(tl.float32)
            b_top = tl.maximum(b_top, tl.max(tl.abs(b_q), 1))
            scaled = scaled + (b_q,)
        b_step = b_top / (FULL_QUERY - 0.25)
        for h in tl.static_range(2):
            b_s = tl.zeros([NW, 16, N], tl.float32)
            for i in tl.static_range(SLICES):
                x = _counted(parts[h * KEYS.pieces + i], key_bit_weight(h, i, KEYS.bits, KEYS.mode, KEYS.pieces), KEYS)
                b_s += tl.dot(x, tl.floor(scaled[i] / b_step[:, None, :] + 0.5), input_precision="ieee")
            scores = scores + ((b_s * b_step[:, None, :] + b_zero[:, None, :]) * unit[:, None, :],)
    else:
        BOTH: tl.constexpr = KEYS.columns
        COLUMNS: tl.constexpr = SLICES * 16 // KEYS.group * BOTH
        for h in tl.static_range(2):
            scale = scale_columns(p_ks, (at * 2 + h) * COLUMNS * 16, live, at, 0, COLUMNS, False)
            b_s = tl.zeros([NW, 16, N], tl.float32)
            for i in tl.static_range(SLICES):
                g: tl.constexpr = i * 16 // KEYS.group * BOTH
                x = _counted(parts[h * KEYS.pieces + i], key_bit_weight(h, i, KEYS.bits, KEYS.mode, KEYS.pieces), KEYS)
                b_s += tl.dot(x, queries[i], input_precision="ieee") * scale[g][:, :, None]
                if KEYS.zeros:
                    b_s += tl.sum(queries[i], 1)[:, None, :] * scale[g + 1][:, :, None]
            scores = scores + (b_s * unit[:, None, :],)
    return scores


@triton.jit
def _byte_points(
    p_words, row, k, p_table, HALF: tl.constexpr, SLICE: tl.constexpr, VALUE: tl.constexpr, SLICES: tl.constexpr,
    BITS: tl.constexpr, VECTOR: tl.constexpr,
):
    """Return points of a grid in bytes in steps, as float32. Keys: of half block HALF token `row` and channel `k` of
    slice SLICE. VALUE: row `row` and token `k` of slice SLICE as outputs have it, of d = 2 even or odd channels of 32.
    """
    CODE: tl.constexpr = BITS * VECTOR
    if VALUE:
        SET: tl.constexpr = SLICE // VECTOR
        place, nibble = k // 8 * 8 + k % 8 // 2 * 2, k % 2 * 2 + HALF
        number, second = SLICE % VECTOR, SET % 2
    else:
        place, nibble = k // 2 % 2 * 8 + k // 4 * 2, SLICE % 4
        if VECTOR == 1:  # both sets of a chunk are in one tile
            SET: tl.constexpr = HALF * (SLICES // 2) + SLICE // 4 * 2
            number, second = 0, k % 2
        else:
            SET: tl.constexpr = HALF * (SLICES // 4) + SLICE // 4
            number, second = k % 2, SET % 2
    at = row * 16 + place + second
    if CODE == 4:
        code = _nibble(p_words + SET // 2 * 256 + at, nibble) & 15
    elif CODE == 2:
        code = _nibble(p_words + SET // 4 * 256 + at, nibble) >> SET // 2 % 2 * 2 & 3
    else:
        p_first = p_words + SET // 8 * 768 + at
        if SLICES == 4 and SET >= 2:  # in half a tile, except for the highest bit
            low = _nibble(p_words + 256 + row * 8 + place % 8 + second, nibble) >> place // 8 * 2 & 3
            code = low | (_nibble(p_words + at, nibble) >> 3 & 1) << 2
        elif SET % 8 < 6:
            code = _nibble(p_first + SET % 8 // 2 * 256, nibble) & 7
        else:
            code = _nibble(p_first, nibble) >> 3 & 1
            code = (
                code | (_nibble(p_first + 256, nibble) >> 3 & 1) << 1 | (_nibble(p_first + 512, nibble) >> 3 & 1) << 2
            )
    return _byte_entry(p_table, code, number, CODE)


@triton.jit
def _nibble(p, which):
    """Return a word from bit 4 `which` on."""
    return (tl.load(p).to(tl.int32) & 0xFFFF) >> which * 4


@triton.jit
def _byte_entry(p_table, code, number, BITS: tl.constexpr):
    """Return what `byte_table` holds for a code, as assembly adds it up."""
    p = p_table.to(tl.pointer_type(tl.int8)) + number * 16
    x = tl.load(p + code).to(tl.float32)
    if BITS == 4:
        x -= (tl.load(p + (code ^ 8)) < 0).to(tl.float32)
    return x


@triton.jit
def value_exponents(
    p_vs, at, HALF: tl.constexpr, VALUES: tl.constexpr, NW: tl.constexpr
):
    """Return the powers of two of the scales of half a block's values, [NW, 16, 1], for outer groups of all channels
    and grids; else 0.
    """
    size = tl.zeros([NW, 16], tl.float32)
    if VALUES.points:
        norm = tl.load(p_vs + (at * 32 + HALF * 16)[:, None] + tl.arange(0, 16)[None, :]).to(tl.float32)
        size = tl.log2(tl.maximum(norm, 2.0**-24))
    if VALUES.outer:
        r = tl.arange(0, 16)[None, :]
        scale = tl.load(p_vs + (at * 64 + HALF * 32)[:, None] + (r // 2 * 4 + r % 2)).to(tl.float32)
        size = tl.log2(tl.maximum(scale, 2.0**-24))
    return size[:, :, None]


@triton.jit
def emulated_added(
    p_v, p_vs, i_head, block_at, b_0, b_1, s_0, s_1, fade, acc, p_table, capacity, VALUES: tl.constexpr,
    SLICES: tl.constexpr, NW: tl.constexpr, N: tl.constexpr,
):
    """Return acc plus fade times what a block adds, of probabilities 2^b_0 and 2^b_1, rounded as ptx.py does. s_0, s_1:
    `value_exponents`.
    """
    at = (i_head * capacity + block_at)[:, None]
    live = at >= 0
    if not VALUES.points:
        parts = codes_of(p_v, at * VALUES.words, live, at, VALUES, 0, True, NW, False, False)
    p_0 = tl.floor(tl.exp2(b_0 + s_0) * FULL_PROBABILITY + 0.5)
    p_1 = tl.floor(tl.exp2(b_1 + s_1) * FULL_PROBABILITY + 0.5)
    b_sum = tl.sum(p_0 + p_1, 1)[:, None, :]
    if VALUES.inner:
        BOTH: tl.constexpr = VALUES.columns
        PER: tl.constexpr = VALUES.group // 32
        at_scale = (i_head * (capacity // PER) + block_at // PER)[:, None] * (SLICES * BOTH * 16)
        scale = scale_columns(p_vs, at_scale, live, at, 0, SLICES * BOTH, False)
    elif VALUES.outer:  # what zero points add to all channels
        r = tl.arange(0, 16)[None, :]
        p = p_vs + at * 64 + (r // 2 * 4 + r % 2 + 2)
        z_0, z_1 = tl.load(p).to(tl.float32)[:, :, None], tl.load(p + 32).to(tl.float32)[:, :, None]
        b_zero = tl.sum(tl.exp2(b_0) * z_0 + tl.exp2(b_1) * z_1, 1)[:, None, :] * fade * FULL_PROBABILITY
    slices = ()
    for i in tl.static_range(SLICES):
        if VALUES.points:
            r = tl.arange(0, 16)
            p_words = p_v + (at * VALUES.words)[:, :, None]
            x_0 = _byte_points(p_words, r[:, None], r[None, :], p_table, 0, i, True, SLICES, VALUES.bits, VALUES.group)
            x_1 = _byte_points(p_words, r[:, None], r[None, :], p_table, 1, i, True, SLICES, VALUES.bits, VALUES.group)
        else:
            x_0 = _counted(parts[i], bit_weight(i, VALUES.bits), VALUES)
            x_1 = _counted(parts[VALUES.pieces + i], bit_weight(i, VALUES.bits), VALUES)
        b_dot = tl.dot(x_0, p_0, input_precision="ieee") + tl.dot(x_1, p_1, input_precision="ieee")
        if VALUES.inner:
            b_dot = b_dot * scale[i * BOTH][:, :, None]
        if VALUES.zeros:
            b_dot += b_sum * scale[2 * i + 1][:, :, None]
        b_dot = b_dot * fade
        if VALUES.outer:
            b_dot += b_zero
        slices = slices + (b_dot * slice_weight(i, VALUES.bits, VALUES.mode),)
    odd = (tl.arange(0, N) % 2 == 1)[None, None, :]
    outputs = ()
    for i in tl.static_range(SLICES // 2):
        outputs = outputs + (acc[i] + tl.where(odd, slices[2 * i + 1], slices[2 * i]),)
    return outputs


@triton.jit
def _counted(
    part, PLACE: tl.constexpr, SIDE: tl.constexpr
):
    """Return numbers from codes as `codes_of` leaves them, of symmetric forms with their sign."""
    x = part.to(tl.float32) * (2.0**24 / PLACE)
    if SIDE.symmetric:
        x -= 2.0 ** (SIDE.bits - 1)
    return x
