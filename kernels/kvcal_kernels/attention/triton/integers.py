"""Keys and values of integers in groups: codes to float16, scores, and what values add to the outputs.

A field is left where it is: an integer c at bit p, p <= 6, is the subnormal float16 c * 2^(p - 24). Tensor cores take
subnormals exactly, so nothing is added that would have to be subtracted again. 2^-p goes into the query, 2^(24 - p)
into the scores' factor and the output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numbers import field_number, half_tile_shift, transposed
from .queries import row_offset
from .scales import row_scales, scale_columns, scale_pairs, scaled_queries
from .tiles import blocks_at, half_tile, tile


@triton.jit
def masked_field(w, SHIFT: tl.constexpr, MASK: tl.constexpr):
    return ((w >> SHIFT) & MASK).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def unpack8(w, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $2, 0x00FF00FF; prmt.b32 $1, $2, 0, 0x4341;",
            "=&r,=r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )
    return masked_field(w, 0, 255), masked_field(w, 8, 255)


@triton.jit
def unpack4(w, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            shr.u32 t, $4, 8;
            and.b32 $0, $4, 0x000F000F;
            and.b32 $1, $4, 0x00F000F0;
            and.b32 $2, t, 0x000F000F;
            and.b32 $3, t, 0x00F000F0;
            }""",
            "=&r,=&r,=&r,=&r,r", [w], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )
    return masked_field(w, 0, 15), masked_field(w, 0, 240), masked_field(w, 8, 15), masked_field(w, 8, 240)


@triton.jit
def unpack2(w, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            shr.u32 t, $8, 8;
            and.b32 $0, $8, 0x00030003;
            and.b32 $1, $8, 0x000C000C;
            and.b32 $2, $8, 0x00300030;
            and.b32 $3, $8, 0x00C000C0;
            and.b32 $4, t, 0x00030003;
            and.b32 $5, t, 0x000C000C;
            and.b32 $6, t, 0x00300030;
            and.b32 $7, t, 0x00C000C0;
            }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [w],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )
    return (
        masked_field(w, 0, 3), masked_field(w, 0, 12), masked_field(w, 0, 48), masked_field(w, 0, 192),
        masked_field(w, 8, 3), masked_field(w, 8, 12), masked_field(w, 8, 48), masked_field(w, 8, 192),
    )


@triton.constexpr_function
def _third_bits(odd):
    """Return assembly that joins two-bit fields ($8) and their third bits ($9), which lie one bit further up for an odd
    tile.
    """
    up, down = (1, 7) if odd else (2, 6)
    return f"""{{
            .reg .b32 t, a, b, e;
            shl.b32 a, $9, {up};
            lop3.b32 e, $8, a, 0x00330033, 0xE4;
            and.b32 $0, e, 0x00070007;
            and.b32 $2, e, 0x00700070;
            lop3.b32 e, $8, a, 0x00CC00CC, 0xE4;
            and.b32 $1, e, 0x001C001C;
            and.b32 $3, e, 0x01C001C0;
            shr.u32 t, $8, 8;
            shr.u32 b, $9, {down};
            lop3.b32 e, t, b, 0x00330033, 0xE4;
            and.b32 $4, e, 0x00070007;
            and.b32 $6, e, 0x00700070;
            lop3.b32 e, t, b, 0x00CC00CC, 0xE4;
            and.b32 $5, e, 0x001C001C;
            and.b32 $7, e, 0x01C001C0;
            }}"""


@triton.jit
def unpack3(w, u, ODD: tl.constexpr, ASM: tl.constexpr):
    """Unpack a tile of 3-bit codes. w: a tile of two-bit fields. u: the tile of third bits; ODD: whether it holds w's
    at odd places.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            _third_bits(ODD), "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [w, u],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )
    w, u = w.to(tl.int32) & 0xFFFF, (u.to(tl.int32) & 0xFFFF) >> (1 if ODD else 0)
    a, t, b = u << 2, w >> 8, u >> 6
    return (
        _join(w, a, 3, 4), _join(w, a, 12, 16), _join(w, a, 48, 64), _join(w, a, 192, 256),
        _join(t, b, 3, 4), _join(t, b, 12, 16), _join(t, b, 48, 64), _join(t, b, 192, 256),
    )


@triton.jit
def _join(w, a, TWO: tl.constexpr, ONE: tl.constexpr):
    return ((w & TWO) | (a & ONE)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def codes_of(
    p_words, b_at, b_live, ring, SIDE: tl.constexpr, BYTE: tl.constexpr, VALUE: tl.constexpr, NW: tl.constexpr,
    IN_RING: tl.constexpr, ASM: tl.constexpr,
):
    """Return the 16 x 16 pieces of NW blocks as float16 [NW, 16, 16], half block by half block; see `tile`. VALUE: the
    order of fields is that of values. IN_RING: whether the ring has the words.
    """
    FURTHER: tl.constexpr = half_tile_shift(SIDE.words, SIDE.bits, 0)
    TILES: tl.constexpr = SIDE.tiles
    COUNT: tl.constexpr = 2 * SIDE.pieces
    parts = ()
    for u in tl.static_range(TILES):
        if SIDE.bits == 2 and FURTHER > 0 and u == SIDE.tiles - 1:
            w = half_tile(p_words, b_at, b_live, ring, BYTE, u, FURTHER, NW, ASM and IN_RING)
        else:
            w = tile(p_words, b_at, b_live, ring, BYTE, u, False, NW, ASM and IN_RING)
        if SIDE.bits == 8:
            parts = parts + unpack8(w, ASM)
        if SIDE.bits == 4:
            parts = parts + unpack4(w, ASM)
        if SIDE.bits == 2:
            parts = parts + unpack2(w, ASM)
        if SIDE.bits == 3:
            if FURTHER > 0 and u == SIDE.tiles - 1:
                third = half_tile(p_words, b_at, b_live, ring, BYTE, SIDE.tiles + u // 2, FURTHER, NW, ASM and IN_RING)
            else:
                third = tile(p_words, b_at, b_live, ring, BYTE, SIDE.tiles + u // 2, False, NW, ASM and IN_RING)
            parts = parts + unpack3(w, third, u % 2 == 1, ASM)
    pieces = ()
    for m in tl.static_range(COUNT):
        pieces = pieces + (
            parts[field_number(m // SIDE.pieces, m % SIDE.pieces, SIDE.bits, SIDE.pieces, SIDE.inner, VALUE)],
        )
    return pieces


@triton.constexpr_function
def bit_weight(m, bits):
    """Return 2^p of field number m, p being the bit at which unpacking leaves it."""
    if bits == 8:
        return 1.0
    return 16.0 ** (m % 2) if bits == 4 else 4.0 ** (m % 4)


@triton.constexpr_function
def key_bit_weight(half, i, bits, mode, stride):
    """Return `bit_weight` of piece i of a half block of keys."""
    return bit_weight(field_number(half, i, bits, stride, mode < 2, False), bits)


@triton.constexpr_function
def _ahead(bits, mode, stride):
    """Return the weight of a key's piece in the second half block over that in the first."""
    return key_bit_weight(1, 0, bits, mode, stride) / key_bit_weight(0, 0, bits, mode, stride)


@triton.constexpr_function
def group_unit(bits, mode):
    """Return what a group adds to each of its codes: symmetric codes are stored without their sign, others have a zero
    point.
    """
    return -(2.0 ** (bits - 1)) if mode == 0 else 1.0


@triton.jit
def scores_of(
    p_k, p_ks, i_head, b_block, b_live, ring, q, plain, sums, capacity, KEYS: tl.constexpr, SLICES: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Return scores of both halves of NW blocks, [NW, 16, N] float32 each, of integers in units of 2^-24 of the
    query's.
    """
    at = blocks_at(i_head, b_block, capacity, 1, KEYS.page)
    live = b_live[:, None]
    parts = codes_of(p_k, at if KEYS.page > 0 else at * KEYS.words, live, ring, KEYS, 0, False, NW, True, ASM)
    BEHIND: tl.constexpr = KEYS.words * 2  # bytes of a slot before the scales
    AHEAD: tl.constexpr = _ahead(KEYS.bits, KEYS.mode, KEYS.pieces)
    scores = ()
    if KEYS.inner:  # groups of channels of one token
        GROUPS: tl.constexpr = SLICES * 16 // KEYS.group
        EACH: tl.constexpr = KEYS.group // 16
        BOTH: tl.constexpr = KEYS.columns  # scales, or scales and zero points
        HALF: tl.constexpr = GROUPS * BOTH * 16
        for h in tl.static_range(2):
            at_half = at + h * HALF if KEYS.page > 0 else (at * 2 + h) * HALF
            scale = scale_columns(p_ks, at_half, live, ring, BEHIND + h * HALF * 2, GROUPS * BOTH, ASM)
            for g in tl.static_range(GROUPS):
                group_scale = scale[g * BOTH]
                if h == 1 and AHEAD > 1:
                    group_scale = group_scale * (1 / AHEAD)
                if KEYS.symmetric:
                    b_dot = tl.dot(parts[h * KEYS.pieces + g * EACH], q[g * EACH], sums[g] * (AHEAD if h == 1 else 1.0))
                else:
                    b_dot = tl.dot(parts[h * KEYS.pieces + g * EACH], q[g * EACH])
                for i in tl.static_range(1, EACH):
                    b_dot = tl.dot(parts[h * KEYS.pieces + g * EACH + i], q[g * EACH + i], b_dot)
                b_dot = b_dot * group_scale[:, :, None]
                b_s = b_dot if g == 0 else b_s + b_dot  # noqa: F821
                if KEYS.zeros:
                    b_s += sums[g] * scale[g * 2 + 1][:, :, None]
            scores = scores + (b_s,)
    else:  # groups of tokens of one channel: scales multiply the query
        PER: tl.constexpr = KEYS.group // 32
        at_scale = (i_head * (capacity // PER) + b_block // PER)[:, None] * (SLICES * 32)
        b_zero = tl.zeros([NW, 16, N], tl.float32)
        b_0 = tl.zeros([NW, 16, N], tl.float32)
        b_1 = tl.zeros([NW, 16, N], tl.float32)
        for i in tl.static_range(SLICES):
            scale, zero = scale_pairs(p_ks, at_scale + i * 32, live, ring, BEHIND + i * 64, NW, ASM)
            b_zero = tl.dot(zero, plain[i], b_zero)
            b_q = scaled_queries(q[i], scale, NW, N)
            b_0 = tl.dot(parts[i], b_q, b_0)
            b_1 = tl.dot(parts[KEYS.pieces + i], b_q, b_1)
        if AHEAD > 1:
            b_1 = b_1 * (1 / AHEAD)
        scores = (b_0 + b_zero * 2.0**-24, b_1 + b_zero * 2.0**-24)
    return scores


@triton.jit
def add_values(
    p_v, p_vs, i_head, b_block, b_live, ring, b_0, b_1, b_sum, acc, capacity, VALUES: tl.constexpr, BYTE: tl.constexpr,
    SLICES: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Return acc plus probabilities b_0, b_1 (halves of NW blocks) times values. b_sum: the sum of the probabilities
    [NW, 16, N], every row the same. BYTE: of a slot of the ring at which values begin.
    """
    at = blocks_at(i_head, b_block, capacity, 1, VALUES.page)
    live = b_live[:, None]
    parts = codes_of(p_v, at if VALUES.page > 0 else at * VALUES.words, live, ring, VALUES, BYTE, True, NW, True, ASM)
    BEHIND: tl.constexpr = BYTE + VALUES.words * 2
    outputs = ()
    if VALUES.inner:  # groups of tokens of one channel
        PER: tl.constexpr = VALUES.group // 32
        BOTH: tl.constexpr = VALUES.columns
        at_scale = (i_head * (capacity // PER) + b_block // PER)[:, None] * (SLICES * BOTH * 16)
        scale = scale_columns(p_vs, at_scale, live, ring, BEHIND, SLICES * BOTH, ASM)
        for i in tl.static_range(SLICES):
            if VALUES.symmetric:
                b_dot = tl.dot(
                    parts[VALUES.pieces + i],
                    b_1,
                    b_sum * (group_unit(VALUES.bits, VALUES.mode) * bit_weight(i, VALUES.bits) * 2.0**-24),
                )
            else:
                b_dot = tl.dot(parts[VALUES.pieces + i], b_1)
            b_dot = tl.dot(parts[i], b_0, b_dot)
            b_acc = acc[i] + b_dot * scale[i * BOTH][:, :, None]
            if VALUES.zeros:
                b_acc += b_sum * (scale[2 * i + 1] * (bit_weight(i, VALUES.bits) * 2.0**-24))[:, :, None]
            outputs = outputs + (b_acc,)
    else:  # groups of channels of one token: scales multiply the probabilities
        GROUPS: tl.constexpr = SLICES * 16 // VALUES.group
        EACH: tl.constexpr = VALUES.group // 16
        zeros = ()
        for g in tl.static_range(GROUPS):
            at_0 = (at if VALUES.page > 0 else at * (GROUPS * 64)) + g * 32
            b_p0 = b_0 * row_scales(p_vs, at_0, live, ring, BEHIND + g * 64, ASM)
            b_p1 = b_1 * row_scales(p_vs, at_0 + GROUPS * 32, live, ring, BEHIND + (GROUPS + g) * 64, ASM)
            _, b_z0 = scale_pairs(p_vs, at_0, live, ring, BEHIND + g * 64, NW, ASM)
            _, b_z1 = scale_pairs(p_vs, at_0 + GROUPS * 32, live, ring, BEHIND + (GROUPS + g) * 64, NW, ASM)
            zeros = zeros + (tl.dot(b_z1, b_1, tl.dot(b_z0, b_0, acc[SLICES + g])),)
            for i in tl.static_range(EACH):
                b_acc = tl.dot(parts[g * EACH + i], b_p0, acc[g * EACH + i])
                outputs = outputs + (tl.dot(parts[VALUES.pieces + g * EACH + i], b_p1, b_acc),)
        outputs = outputs + zeros
    return outputs


@triton.jit
def query_of(
    p_q, i_head, i_chunk, o_q, b_row, b_down, KEYS: tl.constexpr, SLICES: tl.constexpr, PEAK: tl.constexpr,
    LOWEST: tl.constexpr, EACH: tl.constexpr, RATIO: tl.constexpr, QUERIES: tl.constexpr, NW: tl.constexpr,
    N: tl.constexpr,
):
    """Return queries for `scores_of`: slices that meet codes, by rows for outer groups (see `transposed`); slices that
    meet zero points of outer groups; what a group's sum adds for inner groups. EACH: columns of a query row.
    """
    r = tl.arange(0, 16)
    q, plain, sums = (), (), ()
    TALL: tl.constexpr = max(N, 16)
    if KEYS.outer:
        tall = tl.arange(0, TALL)
        n_t = i_chunk * (N // EACH) + tall // EACH
        b_there = (tall < N) & (n_t < RATIO * QUERIES)
        o_t = row_offset(i_head, n_t, RATIO, QUERIES, SLICES * 16)
        b_high = tl.zeros([TALL], tl.float32)
        for i in tl.static_range(SLICES):
            b_q = tl.load(p_q + o_t[:, None] + (i * 16 + r)[None, :], mask=b_there[:, None], other=0.0)
            b_high = tl.maximum(b_high, tl.max(tl.abs(b_q.to(tl.float32)), 1))
        top = tl.maximum(b_high.to(tl.int32, bitcast=True) & 0x7F800000, LOWEST)
        b_shrink = ((254 << 23) - top).to(tl.float32, bitcast=True) * PEAK
    b_none = 0.0
    if KEYS.zeros:  # zeros in the layout of a product: without them sums, and scores with them, take another
        b_none = tl.dot(tl.zeros([NW, 16, 16], tl.float16), tl.zeros([NW, 16, N], tl.float16))
    for i in tl.static_range(SLICES):
        b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0)
        b_q = b_q.to(tl.float32) * b_down[None, :]
        place = key_bit_weight(0, i, KEYS.bits, KEYS.mode, KEYS.pieces)
        b_fit = tl.broadcast_to((b_q / place).to(tl.float16)[None], [NW, 16, N])
        if KEYS.outer:
            b_q = tl.load(p_q + o_t[:, None] + (i * 16 + r)[None, :], mask=b_there[:, None], other=0.0)
            b_q = b_q.to(tl.float32) * b_shrink[:, None]
            q = q + (tl.broadcast_to((b_q / place).to(tl.float16)[None], [NW, TALL, 16]),)
            plain = plain + (transposed(tl.broadcast_to(b_q.to(tl.float16)[None], [NW, TALL, 16]), NW, N),)
        else:
            q = q + (b_fit,)
            b_total = tl.sum(b_fit.to(tl.float32), 1) * place
            if i % (KEYS.group // 16) == 0:
                b_group = b_total
            else:
                b_group += b_total
            if (i + 1) % (KEYS.group // 16) == 0:
                b_group = b_group * (group_unit(KEYS.bits, KEYS.mode) * 2.0**-24)
                sums = sums + (tl.broadcast_to(b_group[:, None, :], [NW, 16, N]) + b_none,)
    return q, plain, sums


@triton.jit
def output_of(acc, b_l, VALUES: tl.constexpr, SLICES: tl.constexpr):
    """Return the outputs of `add_values`'s acc in units of the values', a slice each, and the sums of probabilities
    [NW, N].
    """
    b_l = tl.max(b_l, 1)
    out = ()
    for i in tl.static_range(SLICES):
        b_o = acc[i] * (2.0**24 / bit_weight(i, VALUES.bits))
        if VALUES.outer:
            b_o += acc[SLICES + i * 16 // VALUES.group]
        out = out + (b_o,)
    return out, b_l
