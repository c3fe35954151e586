"""`store` of reference.py for NVIDIA GPUs: keys and values of all tokens in one launch, those of the transform codec in two.

A program takes 16 tokens of one or of all kv heads. `coordinates` says how they share words with other programs.

Numbers of integers and of grids are those of the reference, bit for bit. Coordinates of the transform codec come from a
matrix product in three parts of TF32, whose last bits are its own. Their norm spans all kv heads: a launch before writes
coordinates and sums of squares, a program a head, and then a program codes one tier of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import on
from ...higgs.triton import NO_RASTER, nearest_points, norms_of, rotate_rows, searched, units_of
from ...layout import PageForm
from ...layout.pages import block_bytes, token_scales, widths
from ...triton import interpreted
from ..reference import GridRule, Rule
from ..triton.launch import _factors
from ..triton.launch import side_of as rule_side
from ..triton.rounding import choose_scales
from .coordinates import coordinates_kernel, put_codes, put_scale, store_transform
from .reference import StoreRule, TransformRule, check_store
from .side import StoreSide, places

TILE = 16  # tokens of a program
MANY = 512  # tokens from which on a program takes all heads
AT_ONCE = 2048  # tokens whose coordinates are in memory at a time, at most


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


_PLACES: dict[object, Tensor] = {}


def _places_on(rule: StoreRule, device: torch.device) -> Tensor:
    """Return `places` on a device, copied there once: a CUDA graph must find them where they were."""
    name = rule.form, device
    if name not in _PLACES:
        _PLACES[name] = places(rule.form)[0].to(device)
    return _PLACES[name]


def side_of(rule: StoreRule, at: int) -> StoreSide:
    """Return the constants of a rule's side that begins at byte `at` of a head."""
    form, parts = rule.form, places(rule.form)[1]
    sizes = at, len(widths(form)), token_scales(form), parts
    none = (0, 0, 0, 0)
    if isinstance(rule, TransformRule):
        means, stride = rule.columns.numel(), rule.columns.shape[-1]
        first, tables, rasters = means + rule.mean.numel(), [], []
        for bits in (4, 3, 2):
            tables.append(first)
            raster = none
            if bits in rule.hows:
                first += rule.hows[bits].table.numel()
                raster = _raster(searched(rule.hows[bits]))
            rasters.append(raster)
        pairs = rule.form.pairs
        begin = tables[0], tables[1], tables[2]
        return StoreSide(*sizes, 0, 2, rule.form.coded, stride, pairs, means, begin, tuple(rasters))
    raster = _raster(searched(rule.how)) if isinstance(rule, GridRule) else _raster({"POINTS": 0, **NO_RASTER})
    return StoreSide(*sizes, rule.form.bits, rule.form.vector, 0, 0, none, 0, (0, 0, 0), (raster,))


def _raster(constants: dict[str, int]) -> tuple[int, int, int, int]:
    return constants["POINTS"], constants["SIDE"], constants["FEW"], constants["MOST"]


def _table(rule: StoreRule, device: torch.device) -> Tensor:
    return _factors(rule, device) if isinstance(rule, Rule) else rule.table


def settings(form: PageForm, keys: StoreRule, values: StoreRule, heads: int, tokens: int) -> dict[str, Any]:
    """Return the compile-time constants of store_kernel."""
    columns = [rule.columns.shape[-1] for rule in (keys, values) if isinstance(rule, TransformRule)]
    return {
        "HEADS": heads,
        "EACH": heads if tokens >= MANY and not columns else 1,
        "D": form.keys.dim,
        "ROW": max(columns, default=0),
        "KEYS": side_of(keys, 0),
        "VALUES": side_of(values, block_bytes(form.keys)),
        "KEY_RULE": rule_side(keys) if isinstance(keys, Rule) else None,
        "VALUE_RULE": rule_side(values) if isinstance(values, Rule) else None,
    }


_SETTINGS: dict[object, tuple[dict[str, Any], StoreRule, StoreRule]] = {}
FIRST = ("HEADS", "D", "ROW", "KEYS", "VALUES")  # constants of the launch before


def store(
    k: Tensor, v: Tensor, pages: Tensor, form: PageForm, slots: Tensor, keys: StoreRule, values: StoreRule
) -> None:
    """Do what `reference.store` does, for k and v of float16, bfloat16 or float32, in one launch; with the transform
    codec in two for 2,048 tokens. Nothing waits for the device, and under a CUDA graph slots may change between replays.
    """
    check_store(k, v, pages, form, slots, keys, values)
    tokens, heads, _ = k.shape
    if not tokens:
        return
    name = form, id(keys), id(values), heads, tokens >= MANY
    if name not in _SETTINGS:
        _SETTINGS[name] = settings(form, keys, values, heads, tokens), keys, values  # rules stay, and so do their ids
    constants = _SETTINGS[name][0]
    parts = zip(*(x.split(AT_ONCE if constants["ROW"] else tokens) for x in (k, v, slots)), strict=True)
    with on(k.device):
        for k_part, v_part, slots_part in parts:
            _launch(k_part, v_part, pages, slots_part, keys, values, constants)


def _launch(
    k: Tensor, v: Tensor, pages: Tensor, slots: Tensor, keys: StoreRule, values: StoreRule, constants: dict[str, Any]
) -> None:
    """Store these tokens; constants: `settings`."""
    tokens, heads, _ = k.shape
    tables = _table(keys, k.device), _table(values, k.device)
    y = square = tables[0]  # not read
    tiles, groups = triton.cdiv(tokens, TILE), heads // constants["EACH"]
    if row := constants["ROW"]:
        groups = 4 * heads
        y = torch.empty(2, tokens, heads, row, dtype=torch.float32, device=k.device)
        square = torch.empty(2, tokens, heads, dtype=torch.float32, device=k.device)
        coordinates_kernel[(tiles, heads, 2)](
            k, v, slots, *tables, y, square, tokens, k.stride(0), v.stride(0),
            **{name: constants[name] for name in FIRST}, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    store_kernel[(tiles, groups, 2)](
        k, v, pages, slots, *tables, _places_on(keys, k.device), _places_on(values, k.device), y, square, tokens,
        k.stride(0), v.stride(0), pages.stride(0), pages.stride(1), **constants, ASM=not interpreted(), num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
