"""`encode` of reference.py for NVIDIA GPUs: all tiers in one launch, a program for a block of a head.

Numbers are divided and compared as the reference does (enable_fp_fusion=False), so that codes are the same bytes. A
matrix product made the coordinates: it is torch's, whose last bits no kernel of ours repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import on
from ..higgs.reference import Rotated
from ..higgs.triton import nearest_points, searched
from ..layout import BLOCK, TransformForm
from ..layout.transform import PAIR_BYTES
from ..triton import interpreted
from . import reference

LEAST = tl.constexpr(reference.LEAST)
AT_ONCE = 32  # pairs that a program codes at a time


@triton.jit
def _joined(field, FIELDS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, LOG: tl.constexpr):
    """Join fields [FIELDS, WIDTH, REST] of a word in one, field 0 lowest, already shifted: [WIDTH, REST]. `tl.sum` may
    have two threads write different numbers to one place (higgs.triton).
    """
    x = tl.reshape(field, [FIELDS, WIDTH * REST])
    for i in tl.static_range(LOG):
        low, high = tl.split(tl.permute(tl.reshape(x, [2, FIELDS >> (i + 1), WIDTH * REST]), (1, 2, 0)))
        x = low | high
    return tl.reshape(x, [WIDTH, REST])


@triton.jit
def _store_plane(
    p_codes, numbers, live, column, STRIDE: tl.constexpr, BITS: tl.constexpr, COUNT: tl.constexpr
):
    """Store a plane of BITS bits of numbers [32, COUNT]: field j of word i is token j * words + i. column [COUNT]: of
    each code, whose bytes are STRIDE.
    """
    FIELDS: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = 2 * BITS
    LOG: tl.constexpr = 4 if BITS == 1 else 3 if BITS == 2 else 2
    token = tl.arange(0, 32)[:, None]
    words = _joined(numbers << token // WORDS * BITS, FIELDS, WORDS, COUNT, LOG)
    at = column[None, :] * (STRIDE // 2) + tl.arange(0, WORDS)[:, None]
    tl.store(p_codes.to(tl.pointer_type(tl.int16)) + at, words.to(tl.int16), mask=live[None, :])


@triton.jit
def _tier(
    p_y, p_norm, p_codes, p_table, block, o_y, o_norm, FIRST: tl.constexpr, PAIRS: tl.constexpr, CODED: tl.constexpr,
    BITS: tl.constexpr, POINTS: tl.constexpr, SIDE: tl.constexpr, FEW: tl.constexpr, MOST: tl.constexpr,
    AT: tl.constexpr, ASM: tl.constexpr,
):
    """Code and pack a tier of a block: PAIRS pairs of coordinates from FIRST on, AT of them at a time."""
    token = tl.arange(0, 32)[:, None]
    size = tl.maximum(tl.load(p_norm + o_norm + tl.arange(0, 32)).to(tl.float32), LEAST)[:, None]
    for start in range(0, PAIRS, AT):
        at = tl.arange(0, 2 * AT)
        live = start * 2 + at < 2 * PAIRS
        y = tl.load(p_y + o_y + token * CODED + FIRST + start * 2 + at[None, :], mask=live[None, :], other=0.0)
        wide = tl.broadcast_to(size, y.shape)
        unit = tl.div_rn(y, wide) if ASM else y / wide
        if BITS == 1:
            p = p_codes + block * (PAIRS * 8)
            _store_plane(p, (unit >= 0).to(tl.int32), live, start * 2 + at, 4, 1, 2 * AT)
        else:
            code = nearest_points(unit, p_table, 32, 2 * AT, POINTS, 2, SIDE, FEW, MOST, ASM)
            pair = start + tl.arange(0, AT)
            inside = pair < PAIRS
            if BITS == 4:
                p = p_codes + block * (PAIRS * 32) + pair[None, :] * 32 + token
                tl.store(p, code.to(tl.uint8), mask=inside[None, :] & (token < 32))
            elif BITS == 3:
                p = p_codes + block * (PAIRS * 24)
                _store_plane(p, code >> 2, inside, pair, 24, 4, AT)
                _store_plane(p + 16, code & 3, inside, pair, 24, 2, AT)
            else:
                _store_plane(p_codes + block * (PAIRS * 16), code, inside, pair, 16, 4, AT)


@triton.jit(do_not_specialize=["blocks", "batch_stride", "head_stride"])
def encode_kernel(
    p_y, p_norm, p_c4, p_c3, p_c2, p_c1, p_t4, p_t3, p_t2, blocks, batch_stride, head_stride, HEADS: tl.constexpr,
    CODED: tl.constexpr, FOUR: tl.constexpr, THREE: tl.constexpr, TWO: tl.constexpr, ONE: tl.constexpr,
    RASTER4: tl.constexpr, RASTER3: tl.constexpr, RASTER2: tl.constexpr, AT: tl.constexpr, ASM: tl.constexpr,
):
    """Encode with a grid (blocks, HEADS, batch). FOUR to ONE: pairs of each tier; RASTER4 to RASTER2: of points
    (`searched`).
    """
    i_block, i_kv, i_batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_y = i_batch.to(tl.int64) * batch_stride + i_kv.to(tl.int64) * head_stride + i_block.to(tl.int64) * (32 * CODED)
    o_norm = (i_batch.to(tl.int64) * blocks + i_block) * 32
    block = (i_batch.to(tl.int64) * HEADS + i_kv) * blocks + i_block
    if FOUR > 0:
        _tier(p_y, p_norm, p_c4, p_t4, block, o_y, o_norm, 0, FOUR, CODED, 4, 256, RASTER4[0], RASTER4[1], RASTER4[2],
              AT, ASM)
    if THREE > 0:
        _tier(p_y, p_norm, p_c3, p_t3, block, o_y, o_norm, 2 * FOUR, THREE, CODED, 3, 64, RASTER3[0], RASTER3[1],
              RASTER3[2], AT, ASM)
    if TWO > 0:
        _tier(p_y, p_norm, p_c2, p_t2, block, o_y, o_norm, 2 * (FOUR + THREE), TWO, CODED, 2, 16, RASTER2[0],
              RASTER2[1], RASTER2[2], AT, ASM)
    if ONE > 0:
        _tier(p_y, p_norm, p_c1, p_t2, block, o_y, o_norm, 2 * (FOUR + THREE + TWO), ONE, CODED, 1, 2, 0, 0, 0, AT, ASM)


_TABLES: dict[int, tuple[Tensor, Rotated]] = {}


def how_of(points: Tensor) -> Rotated:
    """Return what finds the nearest of points, made once for a tensor."""
    if id(points) not in _TABLES:
        _TABLES[id(points)] = points, Rotated(points, points.new_zeros(1))
    return _TABLES[id(points)][1]


@cache
def _raster(side: int, few: int, most: int) -> tuple[int, int, int]:
    return side, few, most


def encode(y: Tensor, norm: Tensor, form: TransformForm, points: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
    """Do what `reference.encode` does, in one launch."""
    batch, heads, blocks, _, coded = y.shape
    contiguous = y.stride()[2:] == (BLOCK * coded, coded, 1)
    if y.shape[3] != BLOCK or coded != form.coded or y.dtype != torch.float32 or not contiguous:
        raise ValueError(f"coordinates {tuple(y.shape)} {y.dtype}, strides {y.stride()}: must be (B, H, N, {BLOCK}, "
                         f"{form.coded}) float32, contiguous from blocks on")  # fmt: skip
    if norm.shape != (batch, blocks, BLOCK) or norm.dtype != torch.float16 or not norm.is_contiguous():
        shape = (batch, blocks, BLOCK)
        raise ValueError(f"norms {tuple(norm.shape)} {norm.dtype}: must be {shape} float16, contiguous")
    codes = {}
    for bits, count in form.tiers:
        size = (count, PAIR_BYTES[bits]) if bits > 1 else (2 * count, PAIR_BYTES[1] // 2)
        codes[bits] = torch.empty(batch, heads, blocks, *size, dtype=torch.uint8, device=y.device)
    some = next(iter(codes.values()))
    hows = {bits: how_of(points[bits]) for bits, _ in form.tiers if bits > 1}
    rasters = []
    for bits in (4, 3, 2):
        constants = searched(hows[bits]) if bits in hows else {"SIDE": 0, "FEW": 0, "MOST": 0}
        rasters.append(_raster(constants["SIDE"], constants["FEW"], constants["MOST"]))
    tables = [hows[bits].table if bits in hows else norm for bits in (4, 3, 2)]
    if blocks and batch:
        with on(y.device):
            encode_kernel[(blocks, heads, batch)](
                y, norm, *(codes.get(bits, some) for bits in (4, 3, 2, 1)), *tables, blocks, y.stride(0), y.stride(1),
                heads, coded, *form.pairs, *rasters, AT_ONCE, not interpreted(), num_warps=4, enable_fp_fusion=False,
            )
    return tuple(codes.values())
