"""What programs of the store kernel do with a token's codes, and how those of the transform codec are found.

Coordinates of the transform codec come from a matrix product in three parts of TF32, whose last bits are its own. Their
norm spans all kv heads: a launch before writes coordinates and sums of squares, a program a head, and then a program
codes one tier of a head.

Words of a block hold bits of several tokens, some of which other programs may store in the same launch: each program
flips those of its tokens' bits that differ from what is stored, by an atomic exclusive or. Nobody else writes these
bits, so that reading them before is safe.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....higgs.triton import nearest_points
from ....transform.triton import LEAST
from ..reference import HALF_MAX
from ..side import FROM, SHIFT, WIDTH

SHIFT_, FROM_, WIDTH_ = tl.constexpr(SHIFT), tl.constexpr(FROM), tl.constexpr(WIDTH)
LARGEST = tl.constexpr(HALF_MAX)


@triton.jit
def put_codes(p_side, p_places, place, live, code, index, inside, SIDE: tl.constexpr):
    """Store codes [16, n] of numbers `index` [n] of tokens at `place` [16] of their blocks. p_side: int32 [16], of each
    block.
    """
    PARTS: tl.constexpr = SIDE.parts
    ok = live[:, None] & inside[None, :]
    for part in tl.static_range(PARTS):
        entry = tl.load(p_places + (place[:, None] * SIDE.codes + index[None, :]) * PARTS + part, mask=ok, other=0)
        shift, mask = entry >> SHIFT_ & 31, (1 << (entry >> WIDTH_)) - 1
        p = p_side[:, None] + (entry & 0xFFFF)
        stored = tl.load(p, mask=ok, other=0)
        flipped = (((stored >> shift) ^ (code >> (entry >> FROM_ & 15))) & mask) << shift
        tl.atomic_xor(p, flipped, mask=ok & (flipped != 0), sem="relaxed")


@triton.jit
def put_scale(p_side, p_places, place, live, scale, NUMBER: tl.constexpr, SIDE: tl.constexpr):
    """Store scale NUMBER of tokens, float16 [16]."""
    at = tl.load(p_places + 32 * SIDE.codes * SIDE.parts + place * SIDE.scales + NUMBER)
    tl.store(p_side.to(tl.pointer_type(tl.float16)) + at, scale, mask=live)


@triton.jit
def _write_coordinates(
    p_x,
    p_slots,
    p_table,
    p_y,
    p_square,
    tokens,
    stride,
    side,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Write a head's coordinates of 16 tokens, and the sum of their squares."""
    WIDE: tl.constexpr = max(triton.next_power_of_2(SIDE.coded), 16)
    token, i_head, column = tl.program_id(0) * 16 + tl.arange(0, 16), tl.program_id(1), tl.arange(0, WIDE)
    live = tl.load(p_slots + token, mask=token < tokens, other=-1) >= 0
    p_token = p_x + token.to(tl.int64) * stride
    y = tl.zeros([16, WIDE], tl.float32)
    for i in range(D // 32):
        channel = i_head * D + i * 32 + tl.arange(0, 32)
        x = tl.load(p_token[:, None] + channel[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        x = x - tl.load(p_table + SIDE.means + channel)[None, :]
        p_column = p_table + channel[:, None] * SIDE.stride + column[None, :]
        y = tl.dot(x, tl.load(p_column, mask=column[None, :] < SIDE.stride, other=0.0), y, input_precision="tf32x3")
    at = (side * tokens + token) * HEADS + i_head
    tl.store(p_y + at[:, None] * ROW + column[None, :], y, mask=live[:, None] & (column < SIDE.coded)[None, :])
    tl.store(p_square + at, tl.sum(y * y, 1), mask=live)


@triton.jit(
    do_not_specialize=["tokens", "k_stride", "v_stride"], do_not_specialize_on_alignment=["p_k", "p_v", "p_slots"]
)
def coordinates_kernel(
    p_k,
    p_v,
    p_slots,
    p_k_table,
    p_v_table,
    p_y,
    p_square,
    tokens,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Write coordinates (2, T, HEADS, ROW) and sums of squares (2, T, HEADS), float32, of keys and then of values, with
    a grid (tokens / 16, HEADS, 2); nothing of a side that is not of the transform codec, and of padding.
    """
    if tl.program_id(2) == 0:
        if KEYS.transform:
            _write_coordinates(p_k, p_slots, p_k_table, p_y, p_square, tokens, k_stride, 0, HEADS, D, ROW, KEYS)
    else:
        if VALUES.transform:
            _write_coordinates(p_v, p_slots, p_v_table, p_y, p_square, tokens, v_stride, 1, HEADS, D, ROW, VALUES)


@triton.jit
def _tier(
    p_y,
    p_side,
    p_table,
    p_places,
    place,
    live,
    size,
    FIRST: tl.constexpr,
    CODE: tl.constexpr,
    PAIRS: tl.constexpr,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    RASTER: tl.constexpr,
    SIDE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Code and store PAIRS pairs of coordinates from number FIRST on; p_y [16]: of tokens' coordinates; CODE: of the
    tier's first code.
    """
    AT: tl.constexpr = 32
    at, pair = tl.arange(0, 2 * AT), tl.arange(0, AT)
    for start in range(0, PAIRS, AT):
        inside = start * 2 + at < 2 * PAIRS
        y = tl.load(p_y[:, None] + (FIRST + start * 2 + at)[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        wide = tl.broadcast_to(size[:, None], y.shape)
        unit = tl.div_rn(y, wide) if ASM else y / wide
        if BITS == 1:
            index = CODE + start * 2 + at
            put_codes(p_side, p_places, place, live, (unit >= 0).to(tl.int32), index, inside, SIDE)
        else:
            code = nearest_points(unit, p_table + TABLE, 16, 2 * AT, RASTER[0], 2, RASTER[1], RASTER[2], RASTER[3], ASM)
            put_codes(p_side, p_places, place, live, code, CODE + start + pair, start + pair < PAIRS, SIDE)


@triton.jit
def store_transform(
    p_y,
    p_square,
    p_side,
    p_table,
    p_places,
    place,
    live,
    tier,
    HEADS: tl.constexpr,
    SIDE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Store one of a head's tiers, of 4, 3, 2 and 1 bits, for 16 tokens, and the norm with the first. p_y [16]: of
    tokens' coordinates; p_square [16]: of their sums of squares, of all heads.
    """
    FOUR: tl.constexpr = SIDE.pairs[0]
    THREE: tl.constexpr = SIDE.pairs[1]
    TWO: tl.constexpr = SIDE.pairs[2]
    ONE: tl.constexpr = SIDE.pairs[3]
    # Triton 3.6 passes on what has a name alone
    TABLE_4: tl.constexpr = SIDE.tables[0]
    TABLE_3: tl.constexpr = SIDE.tables[1]
    TABLE_2: tl.constexpr = SIDE.tables[2]
    RASTER_4: tl.constexpr = SIDE.rasters[0]
    RASTER_3: tl.constexpr = SIDE.rasters[1]
    RASTER_2: tl.constexpr = SIDE.rasters[2]
    THREES: tl.constexpr = 2 * FOUR
    TWOS: tl.constexpr = FOUR + THREE
    ONES: tl.constexpr = FOUR + THREE + TWO
    total = tl.zeros([16], tl.float32)
    for i_head in range(HEADS):
        total += tl.load(p_square + i_head, mask=live, other=0.0)
    mean = total * (1.0 / (HEADS * SIDE.coded))
    norm = tl.minimum(tl.sqrt_rn(mean) if ASM else tl.sqrt(mean), LARGEST).to(tl.float16)
    size = tl.maximum(norm.to(tl.float32), LEAST)
    if tier == 0:
        put_scale(p_side, p_places, place, live, norm, 0, SIDE)
        if FOUR > 0:
            _tier(p_y, p_side, p_table, p_places, place, live, size, 0, 0, FOUR, 4, TABLE_4, RASTER_4, SIDE, ASM)
    elif tier == 1:
        if THREE > 0:
            _tier(
                p_y, p_side, p_table, p_places, place, live, size, THREES, FOUR, THREE, 3, TABLE_3, RASTER_3, SIDE, ASM
            )
    elif tier == 2:
        if TWO > 0:
            _tier(
                p_y, p_side, p_table, p_places, place, live, size, 2 * TWOS, TWOS, TWO, 2, TABLE_2, RASTER_2, SIDE, ASM
            )
    else:
        if ONE > 0:
            _tier(p_y, p_side, p_table, p_places, place, live, size, 2 * ONES, ONES, ONE, 1, 0, RASTER_2, SIDE, ASM)
