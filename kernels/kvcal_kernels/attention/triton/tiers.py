"""Keys in three tiers of precision (MixKVQ): channels in 16, 4 and 2 bits, in an order that each group chooses."""

from __future__ import annotations

import triton
import triton.language as tl

from .integers import masked_field
from .numbers import transposed
from .scales import scale_pairs, scaled_queries
from .tiles import ends_with_half, half_tile, lane_zeros, tile


@triton.constexpr_function
def _field(shift, mask):
    return f"{{ .reg .b32 t; shr.u32 t, $1, {shift}; and.b32 $0, t, {mask | mask << 16}; }}"


@triton.jit
def unpack_field(w, FIELD: tl.constexpr, WIDTH: tl.constexpr, ASM: tl.constexpr):
    """Return WIDTH bits of a code from 2-bit field FIELD of 8 on, left at bit 2 FIELD % 8."""
    SHIFT: tl.constexpr = FIELD // 4 * 8
    MASK: tl.constexpr = (1 << WIDTH) - 1 << FIELD % 4 * 2
    if ASM:
        part = tl.inline_asm_elementwise(_field(SHIFT, MASK), "=r,r", [w], dtype=tl.float16, is_pure=True, pack=2)
    else:
        part = masked_field(w, SHIFT, MASK)
    return part


@triton.constexpr_function
def _first(m, four):
    """Return the first field of piece m of the lower tiers, `four` of which take two."""
    return m + min(m, four)


@triton.jit
def _lower(tiles, FIELD: tl.constexpr, WIDTH: tl.constexpr, b_q, b_s, ASM: tl.constexpr):
    return tl.dot(unpack_field(tiles[FIELD // 8], FIELD % 8, WIDTH, ASM), b_q * (0.25 ** (FIELD % 4)), b_s)


@triton.jit
def scores_of(
    p_k, p_ks, p_order, p_fit, i_head, b_block, b_live, ring, fit, capacity, KEYS: tl.constexpr, SLICES: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Return scores of both halves of NW blocks for keys in tiers, FULL and FOUR pieces of the first two: queries are
    read in each group's channel order from float16 [D][N], in shared memory at the register kvcal_fit or at p_fit. fit:
    2 n for row n, see `_gathered`.
    """
    EACH: tl.constexpr = KEYS.group // 32
    at = (i_head * capacity + b_block)[:, None] * KEYS.words
    at_group = (i_head * (capacity // EACH) + b_block // EACH)[:, None]
    live = b_live[:, None]
    BEHIND: tl.constexpr = KEYS.words * 2
    ORDER: tl.constexpr = BEHIND + (SLICES - KEYS.full) * 64
    TILES: tl.constexpr = KEYS.tiles
    tiles = ()
    for u in tl.static_range(TILES):
        if ends_with_half(KEYS.words) and u == TILES - 1:
            tiles = tiles + (half_tile(p_k, at, live, ring, 0, 2 * KEYS.full + u, 8, NW, ASM),)
        else:
            tiles = tiles + (tile(p_k, at, live, ring, 0, 2 * KEYS.full + u, False, NW, ASM),)
    b_plain = tl.zeros([NW, 16, N], tl.float32)  # zero points
    b_0, b_1, b_exact0, b_exact1 = b_plain, b_plain, b_plain, b_plain
    for i in tl.static_range(SLICES):
        b_t = _gathered(p_order + at_group * (SLICES * 16) + i * 16, p_fit, live, ring, ORDER + i * 16, fit, NW, N, ASM)
        b_q = transposed(b_t, NW, N)
        if i < KEYS.full:
            w = tile(p_k, at, live, ring, 0, i, False, NW, ASM).to(tl.float16, bitcast=True)
            b_exact0 = tl.dot(w, b_q, b_exact0)
            w = tile(p_k, at, live, ring, 0, KEYS.full + i, False, NW, ASM).to(tl.float16, bitcast=True)
            b_exact1 = tl.dot(w, b_q, b_exact1)
        else:
            at_scale = at_group * ((SLICES - KEYS.full) * 32) + (i - KEYS.full) * 32
            scale, zero = scale_pairs(p_ks, at_scale, live, ring, BEHIND + (i - KEYS.full) * 64, NW, ASM)
            b_plain = tl.dot(zero, b_q, b_plain)
            b_q = scaled_queries(b_t, scale, NW, N)
            b_0 = _lower(tiles, _first(i - KEYS.full, KEYS.four), 4 if i < KEYS.full + KEYS.four else 2, b_q, b_0, ASM)
            b_1 = _lower(
                tiles,
                KEYS.pieces + _first(i - KEYS.full, KEYS.four),
                4 if i < KEYS.full + KEYS.four else 2,
                b_q,
                b_1,
                ASM,
            )
    return b_0 + (b_exact0 + b_plain) * 2.0**-24, b_1 + (b_exact1 + b_plain) * 2.0**-24


@triton.constexpr_function
def _gathering(byte, columns):
    """Return assembly that loads two numbers of rows n and n + 8 of the query for each of two pairs of channels, whose
    bytes lie in shared memory.
    """
    size = 2 * columns
    text = ["{ .reg .b16 a, b; .reg .b32 o, x, y, f; add.u32 f, kvcal_fit, $12;"]
    for pair in range(2):
        text += [f"ld.shared.u16 o, [$4 + {byte + 8 * pair}]; and.b32 x, o, 255; shr.u32 y, o, 8;"]
        text += [f"mad.lo.u32 x, x, {size}, f; mad.lo.u32 y, y, {size}, f;"]
        text += [f"ld.shared.b16 a, [x]; ld.shared.b16 b, [y]; mov.b32 ${2 * pair}, {{a, b}};"]
        if columns > 8:
            text += [f"ld.shared.b16 a, [x + 16]; ld.shared.b16 b, [y + 16]; mov.b32 ${2 * pair + 1}, {{a, b}};"]
        else:
            text += [f"mov.b32 ${2 * pair + 1}, ${2 * pair};"]  # rows that do not exist
    return " ".join([*text, "}"])


@triton.jit
def _gathered(
    p_order, p_fit, live, ring, BYTE: tl.constexpr, fit, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr
):
    """Return the query's 16 channels in the order that 16 bytes say, by rows [NW, 16 or 32, 16] float16 as `transposed`
    takes it. The bytes are from byte BYTE of a slot of the ring on, or at p_order [NW, 1]. fit: int32 [NW, 16 or 32,
    16].
    """
    TALL: tl.constexpr = max(N, 16)
    k = tl.arange(0, 16)[None, None, :]
    if ASM:
        at = ring[:, :, None] + (k % 8 // 2 * 2 + fit * 0)
        gathered = tl.inline_asm_elementwise(
            _gathering(BYTE, N), "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [at, fit],
            dtype=tl.float16, is_pure=False, pack=8,
        )
    else:
        channel = tl.load(p_order + tl.arange(0, 16)[None, :], mask=live, other=0).to(tl.int32)[:, None, :]
        n = tl.arange(0, TALL)[None, :, None]
        gathered = tl.load(p_fit + channel * N + n, mask=n < N, other=0.0)
    return gathered


@triton.jit
def _fit_table(p_fit, b_q, at, inside, SIZE: tl.constexpr, ASM: tl.constexpr):
    """Store numbers b_q at places `at` of the table from which `_gathered` reads, of SIZE bytes; in memory those that
    are inside.
    """
    if ASM:
        base = tl.inline_asm_elementwise(
            _fitting(SIZE), "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.inline_asm_elementwise(
            "st.shared.b16 [$1], $2; mov.b32 $0, 0;",
            "=r,r,h",
            [base + at * 2, b_q],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(p_fit + at, b_q, mask=inside)


@triton.constexpr_function
def _fitting(size):
    """Return assembly that declares the table. It has no braces, so that the names hold for the whole kernel."""
    text = f".shared .align 16 .b8 kvcal_query[{size}]; .reg .b32 kvcal_fit;"
    return f"{text} mov.u32 kvcal_fit, kvcal_query; mov.u32 $0, kvcal_query;"


@triton.jit
def query_of(p_q, p_fit, o_q, b_row, b_down, D: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr):
    """Store queries in the table from which `scores_of` reads them: float16 [D][N]."""
    channel, column = tl.arange(0, triton.next_power_of_2(D)), tl.arange(0, N)
    b_q = tl.load(p_q + o_q[None, :] + channel[:, None], mask=b_row[None, :] & (channel < D)[:, None], other=0.0)
    b_q = (b_q.to(tl.float32) * b_down[None, :]).to(tl.float16)
    at, inside = channel[:, None] * N + column[None, :], channel[:, None] < D + 0 * column[None, :]
    _fit_table(p_fit, b_q, at, inside, 2 * N * triton.next_power_of_2(D), ASM)
    tl.debug_barrier()


@triton.jit
def row_bytes(NW: tl.constexpr, N: tl.constexpr):
    """Return the bytes at which `_gathered`'s rows begin in a table of float16, 2 n for row n: [1, 16 or 32, 1] in the
    layout of a product.
    """
    TALL: tl.constexpr = max(N, 16)
    return tl.arange(0, TALL)[None, :, None] * 2 + lane_zeros(NW, 16, TALL)
