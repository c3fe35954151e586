"""The store kernel: 16 tokens of one or of all kv heads a program, or of a tier of one head.

Numbers of integers and of grids are those of the reference, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....higgs.triton import nearest_points, norms_of, rotate_rows, units_of
from ...triton.rounding import choose_scales
from .coordinates import put_codes, put_scale, store_transform


@triton.constexpr_function
def _log(n):
    return n.bit_length() - 1


@triton.jit
def _store_grid(
    p_x, o_x, p_side, p_table, p_places, place, live, i_head, HEADS: tl.constexpr, D: tl.constexpr, SIDE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Store 16 tokens of a head as points of a grid; p_table: GridRule.table."""
    SIGNS: tl.constexpr = HEADS * D
    RASTER: tl.constexpr = SIDE.rasters[0]
    channel, gain = i_head * D + tl.arange(0, D), tl.load(p_table + SIGNS)
    x = tl.load(p_x + o_x[:, None] + channel[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    x = rotate_rows(x, tl.load(p_table + channel), D**-0.5, 16, D, _log(D))
    norm = norms_of(x, gain, 16, D, _log(D), ASM).to(tl.float16)
    x = x * units_of(norm, gain, 16, ASM)[:, None]
    code = nearest_points(
        x, p_table + SIGNS + 1, 16, D, RASTER[0], SIDE.vector, RASTER[1], RASTER[2], RASTER[3], ASM
    )
    index = tl.arange(0, D // SIDE.vector)
    put_codes(p_side, p_places, place, live, code, index, index >= 0, SIDE)
    put_scale(p_side, p_places, place, live, norm, 0, SIDE)


@triton.jit
def _store_integers(
    p_x, o_x, p_side, p_table, p_places, place, live, i_head, D: tl.constexpr, SIDE: tl.constexpr, RULE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Store 16 tokens of a head as integers in groups of channels; p_table: factors of scales that are tried."""
    GROUPS: tl.constexpr = D // RULE.group
    EACH: tl.constexpr = RULE.group // 16
    r = tl.arange(0, 16)
    unused = tl.zeros([1, 16], tl.float32)
    for g in tl.static_range(GROUPS):
        xs = ()
        for i in tl.static_range(EACH):
            p = p_x + o_x[None, :, None] + (i_head * D + g * RULE.group + i * 16 + r)[None, None, :]
            xs = xs + (tl.load(p, mask=live[None, :, None], other=0.0).to(tl.float32),)
        best, base, shifted, codes, _, _ = choose_scales(xs, p_table, unused, unused, RULE, 1, ASM)
        for i in tl.static_range(EACH):
            code = tl.reshape(codes[i].to(tl.int32, bitcast=True), [16, 16])
            put_codes(p_side, p_places, place, live, code, g * RULE.group + i * 16 + r, r >= 0, SIDE)
        put_scale(p_side, p_places, place, live, tl.reshape(best, [16]).to(tl.float16), g, SIDE)
        if RULE.mode == 2:
            base = tl.where(shifted, base, best * (-(2.0 ** (RULE.bits - 1))))
        if RULE.mode != 0:
            put_scale(p_side, p_places, place, live, tl.reshape(base, [16]).to(tl.float16), GROUPS + g, SIDE)


@triton.jit
def _store_side(
    p_x, p_pages, p_slots, p_table, p_places, p_y, p_square, tokens, stride, page_stride, head_stride, side,
    HEADS: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, SIDE: tl.constexpr,
    RULE: tl.constexpr, ASM: tl.constexpr,
):
    """Store 16 tokens' keys or values: of EACH heads, or where some side is of the transform codec, a tier of one."""
    TIERS: tl.constexpr = 4 if ROW > 0 else 1
    token, group = tl.program_id(0) * 16 + tl.arange(0, 16), tl.program_id(1)
    first, tier = group // TIERS * EACH, group % TIERS
    slot = tl.load(p_slots + token, mask=token < tokens, other=-1)
    live, place = slot >= 0, (slot & 31).to(tl.int32)
    o_x, o_page = token.to(tl.int64) * stride, tl.maximum(slot >> 5, 0) * page_stride
    if SIDE.transform:
        at = (side * tokens + token) * HEADS
        p_side = (p_pages + o_page + first * head_stride + SIDE.at).to(tl.pointer_type(tl.int32))
        store_transform(
            p_y + (at + first) * ROW, p_square + at, p_side, p_table, p_places, place, live, tier, HEADS, SIDE, ASM
        )
    elif tier == 0:
        for i_head in range(first, first + EACH):
            p_side = (p_pages + o_page + i_head * head_stride + SIDE.at).to(tl.pointer_type(tl.int32))
            if SIDE.grid:
                _store_grid(p_x, o_x, p_side, p_table, p_places, place, live, i_head, HEADS, D, SIDE, ASM)
            else:
                _store_integers(p_x, o_x, p_side, p_table, p_places, place, live, i_head, D, SIDE, RULE, ASM)


@triton.jit(
    do_not_specialize=["tokens", "k_stride", "v_stride", "page_stride", "head_stride"],
    do_not_specialize_on_alignment=["p_k", "p_v", "p_slots"],
)
def store_kernel(
    p_k, p_v, p_pages, p_slots, p_k_table, p_v_table, p_k_places, p_v_places, p_y, p_square, tokens, k_stride, v_stride,
    page_stride, head_stride, HEADS: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_RULE: tl.constexpr, VALUE_RULE: tl.constexpr, ASM: tl.constexpr,
):
    """Store with a grid (tokens / 16, HEADS / EACH, 2), keys and then values. Strides: of a token's keys, of its
    values, bytes of a page, and of a head in it. KEY_RULE, VALUE_RULE: quantise.side.Side of integers. ROW: of
    coordinates that `coordinates_kernel` wrote, and then the grid is (tokens / 16, 4 HEADS, 2); or 0.
    """
    if tl.program_id(2) == 0:
        _store_side(p_k, p_pages, p_slots, p_k_table, p_k_places, p_y, p_square, tokens, k_stride, page_stride,
                    head_stride, 0, HEADS, EACH, D, ROW, KEYS, KEY_RULE, ASM)
    else:
        _store_side(p_v, p_pages, p_slots, p_v_table, p_v_places, p_y, p_square, tokens, v_stride, page_stride,
                    head_stride, 1, HEADS, EACH, D, ROW, VALUES, VALUE_RULE, ASM)
