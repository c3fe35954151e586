"""`attend` of reference.py for NVIDIA GPUs: decode attention that reads packed codes and nothing else, in one launch.

A warp takes a block of 32 tokens; a program NW consecutive ones, every warp with a softmax of its own until the end. All
query rows of a kv head are the N = 8, 16 or 32 columns of one tensor-core product, whose 16 rows are tokens (keys) or
channels (values): that order of storage (see reference.py) makes a 32-bit register hold the same field of two neighbours
along the contracted dimension, so one AND unpacks two codes.

A field is left where it is: an integer c at bit p, p <= 6, is the subnormal float16 c * 2^(p - 24). Tensor cores take
subnormals exactly, so nothing is added that would have to be subtracted again. 2^-p goes into the query, 2^(24 - p) into
the scores' factor and the output. Queries enter as float16 whatever their dtype: each row is scaled by a power of two.

Scales along the contracted dimension multiply partial products, others the query (keys) or the probabilities (values).
Grids are looked up in a table in shared memory, a pair of numbers, or two, by one load (`_look_up`); queries are rotated as
they are read, outputs before they are merged. Where a code stands for channels, the pair in a register is of two channels of
a value: rows of the product are then pairs of channels, what is contracted is (token, parity), and every query row takes two
columns, one of which meets the even channels, the other the odd ones (PAIRED).

Keys before RoPE are decoded and turned in registers (`_turned_scores`), sink and recent ones where they are read.

Sink and recent tokens are the last program of a kv head; the program that arrives last at a counter merges all of them.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler.compiler import make_backend

from ..products.triton import (
    JUMP,
    MAGIC_FLOAT,
    POINTS,
    PROBABILITY,
    QUERY,
    SLACK,
    beginning,
    beginning_constraints,
    beginning_tensors,
    beyond,
    block,
    block_constraints,
    constants,
    field_place,
    pairs_of_word,
    points_tensors,
    spreading,
)
from ..triton import Prepared, Ready, half, interpreted, rounded_product
from .grids import ALIGNED, ENTRIES, rotation_width
from .reference import Blocks, Form, field_number, fits_bytes, looked_up, together
from .rope import RUN, Rope
from .rope import runs as runs_of

TOKENS = tl.constexpr(32)  # a block
TILE = tl.constexpr(256)  # words of a tile: 16 x 16
FULL_QUERY, FULL_PROBABILITY, ROUND = tl.constexpr(QUERY), tl.constexpr(PROBABILITY), tl.constexpr(MAGIC_FLOAT)
IN_BYTES = tl.constexpr(POINTS)  # K_MODE, V_MODE
BLOCK_SLACK, BLOCK_JUMP = tl.constexpr(SLACK), tl.constexpr(JUMP)
LOW = tl.constexpr(-1e30)  # below every score; not infinity, whose differences are NaN
_field_number, _together = triton.constexpr_function(field_number), triton.constexpr_function(together)


@triton.jit
def _and(w, SHIFT: tl.constexpr, MASK: tl.constexpr):
    return ((w >> SHIFT) & MASK).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def unpack8(w, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $2, 0x00FF00FF; prmt.b32 $1, $2, 0, 0x4341;",
            "=&r,=r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return _and(w, 0, 255), _and(w, 8, 255)


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
        )  # fmt: skip
    return _and(w, 0, 15), _and(w, 0, 240), _and(w, 8, 15), _and(w, 8, 240)


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
        )  # fmt: skip
    return (
        _and(w, 0, 3), _and(w, 0, 12), _and(w, 0, 48), _and(w, 0, 192),
        _and(w, 8, 3), _and(w, 8, 12), _and(w, 8, 48), _and(w, 8, 192),
    )  # fmt: skip


@triton.jit
def unpack3(w, u, ODD: tl.constexpr, ASM: tl.constexpr):
    """w: a tile of two-bit fields. u: the tile of third bits; ODD: whether it holds w's at odd places."""
    if ASM:
        if ODD:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 t, a, b, e;
                shl.b32 a, $9, 1;
                lop3.b32 e, $8, a, 0x00330033, 0xE4;
                and.b32 $0, e, 0x00070007;
                and.b32 $2, e, 0x00700070;
                lop3.b32 e, $8, a, 0x00CC00CC, 0xE4;
                and.b32 $1, e, 0x001C001C;
                and.b32 $3, e, 0x01C001C0;
                shr.u32 t, $8, 8;
                shr.u32 b, $9, 7;
                lop3.b32 e, t, b, 0x00330033, 0xE4;
                and.b32 $4, e, 0x00070007;
                and.b32 $6, e, 0x00700070;
                lop3.b32 e, t, b, 0x00CC00CC, 0xE4;
                and.b32 $5, e, 0x001C001C;
                and.b32 $7, e, 0x01C001C0;
                }""",
                "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [w, u],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True, pack=2,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, a, b, e;
            shl.b32 a, $9, 2;
            lop3.b32 e, $8, a, 0x00330033, 0xE4;
            and.b32 $0, e, 0x00070007;
            and.b32 $2, e, 0x00700070;
            lop3.b32 e, $8, a, 0x00CC00CC, 0xE4;
            and.b32 $1, e, 0x001C001C;
            and.b32 $3, e, 0x01C001C0;
            shr.u32 t, $8, 8;
            shr.u32 b, $9, 6;
            lop3.b32 e, t, b, 0x00330033, 0xE4;
            and.b32 $4, e, 0x00070007;
            and.b32 $6, e, 0x00700070;
            lop3.b32 e, t, b, 0x00CC00CC, 0xE4;
            and.b32 $5, e, 0x001C001C;
            and.b32 $7, e, 0x01C001C0;
            }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [w, u],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    w, u = w.to(tl.int32) & 0xFFFF, (u.to(tl.int32) & 0xFFFF) >> (1 if ODD else 0)
    a, t, b = u << 2, w >> 8, u >> 6
    return (
        _join(w, a, 3, 4), _join(w, a, 12, 16), _join(w, a, 48, 64), _join(w, a, 192, 256),
        _join(t, b, 3, 4), _join(t, b, 12, 16), _join(t, b, 48, 64), _join(t, b, 192, 256),
    )  # fmt: skip


@triton.jit
def _join(w, a, TWO: tl.constexpr, ONE: tl.constexpr):
    return ((w & TWO) | (a & ONE)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.constexpr_function
def _field(shift, mask):
    return f"{{ .reg .b32 t; shr.u32 t, $1, {shift}; and.b32 $0, t, {mask | mask << 16}; }}"


@triton.jit
def unpack_field(w, FIELD: tl.constexpr, WIDTH: tl.constexpr, ASM: tl.constexpr):
    """WIDTH bits of a code from 2-bit field FIELD of 8 on, left at bit 2 FIELD % 8."""
    SHIFT: tl.constexpr = FIELD // 4 * 8
    MASK: tl.constexpr = (1 << WIDTH) - 1 << FIELD % 4 * 2
    if ASM:
        part = tl.inline_asm_elementwise(_field(SHIFT, MASK), "=r,r", [w], dtype=tl.float16, is_pure=True, pack=2)
    else:
        part = _and(w, SHIFT, MASK)
    return part


@triton.constexpr_function
def _first(m, four):
    """First field of piece m of the lower tiers, `four` of which take two."""
    return m + min(m, four)


@triton.jit
def _lower(tiles, FIELD: tl.constexpr, WIDTH: tl.constexpr, b_q, b_s, ASM: tl.constexpr):
    return tl.dot(unpack_field(tiles[FIELD // 8], FIELD % 8, WIDTH, ASM), b_q * (0.25 ** (FIELD % 4)), b_s)


@triton.jit
def _words(b_at):
    """Where the 16 x 16 words of a tile lie, [NW, 16, 16]; b_at [NW, 1] int64. Rows follow one another in memory, which Triton
    does not see: without the hint a warp loads four rows of each of four blocks, and their places share banks.
    """
    r = tl.arange(0, 16)
    return tl.max_contiguous(b_at[:, :, None] + (r[None, :, None] * 16 + r[None, None, :]), [1, 2, 16])


@triton.jit
def _tier_scores(
    p_k, p_ks, p_order, p_fit, i_head, b_block, b_live, ring, fit,
    SLICES: tl.constexpr, FIELDS: tl.constexpr, TILES: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
    FULL: tl.constexpr, FOUR: tl.constexpr, room, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As `_scores` for keys in tiers, FULL and FOUR pieces of the first two: queries are read in each group's channel order
    from float16 [D][N], in shared memory at the register kvcal_fit or at p_fit. fit: 2 n for row n, see `_gathered`.
    """
    EACH: tl.constexpr = GROUP // 32
    at = (i_head * room + b_block)[:, None] * WORDS
    at_group = (i_head * (room // EACH) + b_block // EACH)[:, None]
    live = b_live[:, None]
    BEHIND: tl.constexpr = WORDS * 2
    ORDER: tl.constexpr = BEHIND + (SLICES - FULL) * 64
    tiles = ()
    for u in tl.static_range(TILES):
        if _halved(WORDS) and u == TILES - 1:
            tiles = tiles + (_half_tile(p_k, at, live, ring, 0, 2 * FULL + u, 8, NW, ASM),)
        else:
            tiles = tiles + (_tile(p_k, at, live, ring, 0, 2 * FULL + u, False, NW, ASM),)
    b_plain = tl.zeros([NW, 16, N], tl.float32)  # zero points
    b_0, b_1, b_exact0, b_exact1 = b_plain, b_plain, b_plain, b_plain
    for i in tl.static_range(SLICES):
        b_t = _gathered(p_order + at_group * (SLICES * 16) + i * 16, p_fit, live, ring, ORDER + i * 16, fit, NW, N, ASM)
        b_q = _transposed(b_t, NW, N)
        if i < FULL:
            w = _tile(p_k, at, live, ring, 0, i, False, NW, ASM).to(tl.float16, bitcast=True)
            b_exact0 = tl.dot(w, b_q, b_exact0)
            w = _tile(p_k, at, live, ring, 0, FULL + i, False, NW, ASM).to(tl.float16, bitcast=True)
            b_exact1 = tl.dot(w, b_q, b_exact1)
        else:
            at_scale = at_group * ((SLICES - FULL) * 32) + (i - FULL) * 32
            scale, zero = _pairs(p_ks, at_scale, live, ring, BEHIND + (i - FULL) * 64, NW, ASM)
            b_plain = tl.dot(zero, b_q, b_plain)
            b_q = _scaled(b_t, scale, NW, N)
            b_0 = _lower(tiles, _first(i - FULL, FOUR), 4 if i < FULL + FOUR else 2, b_q, b_0, ASM)
            b_1 = _lower(tiles, FIELDS + _first(i - FULL, FOUR), 4 if i < FULL + FOUR else 2, b_q, b_1, ASM)
    return b_0 + (b_exact0 + b_plain) * 2.0**-24, b_1 + (b_exact1 + b_plain) * 2.0**-24


@triton.constexpr_function
def _gathering(byte, columns):
    """Two numbers of rows n and n + 8 of the query for each of two pairs of channels, whose bytes lie in shared memory."""
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
):  # fmt: skip
    """The query's 16 channels in the order that 16 bytes say, by rows [NW, 16 or 32, 16] float16 as `_transposed` takes it.
    The bytes are from byte BYTE of a slot of the ring on, or at p_order [NW, 1]. fit: int32 [NW, 16 or 32, 16].
    """
    TALL: tl.constexpr = max(N, 16)
    k = tl.arange(0, 16)[None, None, :]
    if ASM:
        at = ring[:, :, None] + (k % 8 // 2 * 2 + fit * 0)
        made = tl.inline_asm_elementwise(
            _gathering(BYTE, N), "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [at, fit],
            dtype=tl.float16, is_pure=False, pack=8,
        )  # fmt: skip
    else:
        channel = tl.load(p_order + tl.arange(0, 16)[None, :], mask=live, other=0).to(tl.int32)[:, None, :]
        n = tl.arange(0, TALL)[None, :, None]
        made = tl.load(p_fit + channel * N + n, mask=n < N, other=0.0)
    return made


@triton.jit
def _fit_table(p_fit, b_q, at, inside, SIZE: tl.constexpr, ASM: tl.constexpr):
    """Numbers b_q at places `at` of the table from which `_gathered` reads, of SIZE bytes; in memory those that are inside."""
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
    """Without braces: names hold for the whole kernel."""
    text = f".shared .align 16 .b8 kvcal_query[{size}]; .reg .b32 kvcal_fit;"
    return f"{text} mov.u32 kvcal_fit, kvcal_query; mov.u32 $0, kvcal_query;"


@triton.jit
def _loaded_pairs(p, b_at, b_live, NW: tl.constexpr):
    """Scales and zero points of 16 neighbours along the contracted dimension, [NW, 16] float16 each, stored as
    [8][scale, scale, zero, zero]: as a register of an operand holds them.
    """
    x = tl.load((p + b_at).to(tl.pointer_type(tl.int64)) + tl.arange(0, 8)[None, :], mask=b_live, other=0)
    low, high = x.to(tl.int32), (x >> 32).to(tl.int32)
    scale = tl.reshape(tl.join(low.to(tl.int16), (low >> 16).to(tl.int16)), [NW, 16])
    zero = tl.reshape(tl.join(high.to(tl.int16), (high >> 16).to(tl.int16)), [NW, 16])
    return scale.to(tl.float16, bitcast=True), zero.to(tl.float16, bitcast=True)


# The ring. A warp copies the codes and scales of its next blocks to shared memory and, alone in a program, waits for nobody.
# Triton's own pipeline of loads took half of the instructions around the products: it branches around lanes that have nothing
# to copy, commits every load by itself and reads scales through three layouts (H200: 541 instructions a block of 2/2, 268 us).


@triton.constexpr_function
def _width(size):
    """Bytes that a lane copies at a time of a piece of this size: what is left of it after whole warps of 16 bytes, without a
    branch where it is 256 or 128 bytes.
    """
    return {256: 8, 128: 4}.get(size, 16)


@triton.constexpr_function
def _copies(pieces):
    """Assembly that copies pieces (bytes, whether they are tiles of words) one behind the other. Of words the halves of rows
    are swapped in every other four rows, so that `ldmatrix` meets every bank once. Operands: shared address, lane, the lane's
    place of words, then of each piece its block's number and the lane's pointer into the first block.
    """
    text, at = ["{ .reg .b32 d; .reg .b64 a; .reg .pred q;"], 0
    for i in range(len(pieces)):
        size, words = pieces[i]
        wide = _width(size)
        text += [f"mad.wide.s32 a, ${4 + 2 * i}, {size}, ${5 + 2 * i};"]
        text += ["add.s32 d, $1, $3;" if words else f"mad.lo.s32 d, $2, {wide}, $1;"]
        how = "cg" if wide == 16 else "ca"
        for first in range(0, size - 32 * wide + 1, 32 * wide):
            text += [f"cp.async.{how}.shared.global [d+{at + first}], [a+{first}], {wide};"]
        first, rest = size // (32 * wide) * 32 * wide, size % (32 * wide)
        if rest:
            text += [
                f"setp.lt.u32 q, $2, {rest // 16};",
                f"@q cp.async.cg.shared.global [d+{at + first}], [a+{first}], 16;",
            ]
        at += size
    return " ".join([*text, "cp.async.commit_group;", "mov.b32 $0, 0; }"])


@triton.constexpr_function
def _constraints(sizes):
    return "=r,r,r,r" + ",r,l" * len(sizes)


def plain_beyond(warps: int, tables: int, slots: int) -> bool:
    """Whether the ring lies behind what Triton manages: of several warps, beside tables, or where it is most of 48 KB."""
    return warps > 1 or tables > 0 or slots > 24 * 1024


_beyond = triton.constexpr_function(plain_beyond)


@triton.constexpr_function
def _ring(size, beyond):
    """Where the ring begins. beyond: behind what Triton manages, see `_examine`; of several warps, or beside tables, it would
    not fit the 48 KB of shared memory that assembly may declare.
    """
    if beyond:
        text = f"{{ .reg .b32 t; mov.u32 t, %dynamic_smem_size; add.u32 t, t, -{size};"
        return f"{text} mov.u32 $0, global_smem; add.u32 $0, $0, t; }}"
    return f"{{ .shared .align 128 .b8 kvcal_ring[{size}]; mov.u32 $0, kvcal_ring; }}"


@triton.constexpr_function
def _arrived(pending):
    return f"cp.async.wait_group {pending}; bar.warp.sync 0xffffffff; mov.b32 $0, 0;"


@triton.constexpr_function
def _matrix(byte):
    return f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4+{byte}];"


@triton.constexpr_function
def _halved(words):
    """Whether a block's words end with half a tile."""
    return words % 256 > 0


@triton.constexpr_function
def _half_matrix(byte, further):
    """What `_matrix` gives of a tile of which there is half, as far as its fields count."""
    load = f"ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{$0, $1}}, [$4+{byte}];"
    return f"{load} shr.u32 $2, $0, {further}; shr.u32 $3, $1, {further};"


@triton.constexpr_function
def _upper_matrix(byte):
    """What `_matrix` gives of a tile's first 8 rows, and nothing of the others."""
    return f"ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{$0, $2}}, [$4+{byte}]; mov.b32 $1, 0; mov.b32 $3, 0;"


@triton.constexpr_function
def _half_units(byte):
    """What `_matrix` gives of a tile of units of which there is half: in the lower half of each what is its own."""
    load = f"ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{$0, $1}}, [$4+{byte}];"
    return f"{load} prmt.b32 $2, $0, $0, 0x1032; prmt.b32 $3, $1, $1, 0x1032;"


@triton.constexpr_function
def _shared(bits, byte):
    return f"ld.shared.b{bits} $0, [$1+{byte}];", {64: "=l,r", 32: "=r,r", 16: "=h,r"}[bits]


@triton.constexpr_function
def _pair(byte):
    """Scales and zero points of a lane's columns 2c, 2c + 1, 2c + 8, 2c + 9, for both of its rows."""
    return f"""{{ .reg .b32 a, b, c, d;
    ld.shared.v2.b32 {{a, b}}, [$8+{byte}]; ld.shared.v2.b32 {{c, d}}, [$8+{byte + 32}];
    mov.b32 $0, a; mov.b32 $1, a; mov.b32 $2, c; mov.b32 $3, c;
    mov.b32 $4, b; mov.b32 $5, b; mov.b32 $6, d; mov.b32 $7, d; }}"""


@triton.constexpr_function
def _word(width):
    """Integer of so many float16."""
    return {4: tl.int64, 2: tl.int32, 1: tl.int16}[width]


@triton.jit
def _arrive(PENDING: tl.constexpr, OWN: tl.constexpr, NW: tl.constexpr):
    """Wait until at most PENDING of a warp's fetches are on their way. OWN: each warp reads its own blocks only; else all wait
    for one another, as Triton may read scales of integers in a layout in which a warp has those of others' blocks.
    """
    tl.inline_asm_elementwise(_arrived(PENDING), "=r,r", [tl.arange(0, 32 * NW)], dtype=tl.int32, is_pure=False, pack=1)
    if not OWN:
        tl.debug_barrier()


@triton.jit
def _spot(NW: tl.constexpr, N: tl.constexpr = 16, ROWS: tl.constexpr = 16):
    """Zeros int32 [NW, ROWS, N] in the layout of a product, in which a lane has of a tile what it has of a first operand."""
    return tl.dot(tl.zeros([NW, ROWS, 16], tl.float16), tl.zeros([NW, 16, N], tl.float16)).to(tl.int32)


@triton.jit
def _mixed(row):
    """Rows 0, 4, 1, 5, 2, 6, 3, 7 of each eight. Scores in this order are, once transposed, what `_spread` needs."""
    return row & 8 | row >> 1 & 3 | (row & 1) << 2


@triton.jit
def _tile(
    p_words, b_at, b_live, ring, BYTE: tl.constexpr, U: tl.constexpr, MIXED: tl.constexpr, NW: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Tile U of NW blocks, [NW, 16, 16] int16: words that begin at byte BYTE of a slot of the ring, `ring` [NW, 1] int32,
    MIXED with rows as `_mixed` says; or in memory at b_at [NW, 1] int64.
    """
    r = tl.arange(0, 16)
    if ASM:
        lane = r[None, :, None] % 8 * 4 + r[None, None, :] % 8 // 2 + _spot(NW)
        row = _mixed(lane & 15) if MIXED else lane & 15
        at = ring[:, :, None] + (row * 32 + ((lane >> 4) ^ (row >> 2 & 1)) * 16)
        w = tl.inline_asm_elementwise(
            _matrix(BYTE + U * 512), "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [at], dtype=tl.int16, is_pure=False, pack=8
        )
    else:
        w = tl.load(p_words + _words(b_at) + U * TILE, mask=b_live[:, :, None], other=0)
    return w


@triton.jit
def _half_rows(ring, MIXED: tl.constexpr, NW: tl.constexpr):
    """Where a lane's row of half a tile lies in a slot of the ring: `_copies` swaps halves of 32 bytes, two rows here."""
    r = tl.arange(0, 16)
    lane = r[None, :, None] % 8 * 4 + r[None, None, :] % 8 // 2 + _spot(NW)
    row = _mixed(lane & 15) if MIXED else lane & 15
    return ring[:, :, None] + (row ^ row >> 3) * 16


@triton.jit
def _half_tile(
    p_words, b_at, b_live, ring, BYTE: tl.constexpr, U: tl.constexpr, FURTHER: tl.constexpr, NW: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """As `_tile` of which there is half: columns from 8 on lie FURTHER bits beyond the others. Bits of no field may be
    anything.
    """
    if ASM:
        w = tl.inline_asm_elementwise(
            _half_matrix(BYTE + U * 512, FURTHER), "=&r,=&r,=r,=r,r,r,r,r,r,r,r,r", [_half_rows(ring, False, NW)],
            dtype=tl.int16, is_pure=False, pack=8,
        )  # fmt: skip
    else:
        r = tl.arange(0, 16)
        # two loads: a shift that depends on the column keeps Triton from the layout that a product wants
        p = p_words + b_at[:, :, None] + (U * TILE + r[None, :, None] * 8 + r[None, None, :] % 8)
        first = r[None, None, :] < 8
        w = tl.load(p, mask=b_live[:, :, None] & first, other=0)
        w = w | tl.load(p, mask=b_live[:, :, None] & ~first, other=0) >> FURTHER
    return w


@triton.jit
def _codes(
    p_words, b_at, b_live, ring, BYTE: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr, STRIDE: tl.constexpr,
    WORDS: tl.constexpr, INNER: tl.constexpr, VALUE: tl.constexpr, NW: tl.constexpr, HELD: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """The 16 x 16 pieces of NW blocks as float16 [NW, 16, 16], half block by half block of STRIDE; see `_tile`. TILES: tiles
    of the first plane. INNER, VALUE: whose order of fields it is. HELD: whether the ring has them.
    """
    FURTHER: tl.constexpr = beyond(WORDS, BITS, 0)
    parts = ()
    for u in tl.static_range(TILES):
        if BITS == 2 and FURTHER > 0 and u == TILES - 1:
            w = _half_tile(p_words, b_at, b_live, ring, BYTE, u, FURTHER, NW, ASM and HELD)
        else:
            w = _tile(p_words, b_at, b_live, ring, BYTE, u, False, NW, ASM and HELD)
        if BITS == 8:
            parts = parts + unpack8(w, ASM)
        if BITS == 4:
            parts = parts + unpack4(w, ASM)
        if BITS == 2:
            parts = parts + unpack2(w, ASM)
        if BITS == 3:
            if FURTHER > 0 and u == TILES - 1:
                third = _half_tile(p_words, b_at, b_live, ring, BYTE, TILES + u // 2, FURTHER, NW, ASM and HELD)
            else:
                third = _tile(p_words, b_at, b_live, ring, BYTE, TILES + u // 2, False, NW, ASM and HELD)
            parts = parts + unpack3(w, third, u % 2 == 1, ASM)
    found = ()
    for m in tl.static_range(2 * STRIDE):
        found = found + (parts[_field_number(m // STRIDE, m % STRIDE, BITS, STRIDE, INNER, VALUE)],)
    return found


# Look-ups of grids. A table lies in shared memory once for every bank: an entry of 4 bytes 32 times, one of 8 bytes 16 times,
# 128 = 2^STEP bytes altogether, so that lanes of a warp never meet in a bank. With STEP 6, where two tables of 256 entries
# must fit, they meet in pairs.


@triton.constexpr_function
def _look_up(bits, step, first, pack=2):
    """Assembly of a look-up: the units of `pack` words (times three at 3 bits) as operands, pairs of numbers as results, piece
    by piece. grids.py says where codes lie. first: byte of kvcal_table at which the table begins. It is known by name: an
    address as an operand keeps Triton from loading words in the layout that a product wants.
    """
    pieces, units, codes = {2: (8, pack // 2, 4), 3: (16, 3, 5), 4: (4, 1, 4)}[bits]
    outputs = pieces * pack // 2
    size, width, mask = (8 if bits == 2 else 4), (6 if bits == 3 else 8), (63 if bits == 3 else 255) << step
    text = ["{ .reg .b32 lane, at, turned, table;", "mov.u32 table, kvcal_table;"]
    text += [f"and.b32 lane, kvcal_place, {(1 << step) // size - 1};", f"shl.b32 lane, lane, {size.bit_length() - 1};"]

    def load(unit, code):
        targets = _targets(bits, pack, unit, code)
        into = f".b32 ${targets[0]}" if len(targets) == 1 else f".v2.b32 {{${targets[0]}, ${targets[1]}}}"
        return ["add.u32 at, at, table;", f"ld.shared{into}, [at + {first}];"]

    for unit in range(units):
        for code in range(codes):
            turn, source = code * width + ALIGNED - step, f"${outputs + unit}"
            if turn:
                text += [f"shf.r.wrap.b32 turned, {source}, {source}, {turn};"]
                source = "turned"
            text += [f"lop3.b32 at, {source}, {mask}, lane, 0xEA;", *load(unit, code)]
    if bits == 3:
        text += ["mov.b32 at, lane;"]
        for unit in range(3):
            up = step + 2 * unit - 5
            text += [f"shl.b32 turned, ${outputs + unit}, {up};", f"lop3.b32 at, turned, {3 << up + 5}, at, 0xEA;"]
        text += load(3, 0)
    return " ".join([*text, "}"])


@triton.constexpr_function
def _look_up_eight(step, first):
    """As `_look_up` of 3 bits, of the 8 pieces of a unit and half of one: two words of each are the operands."""
    text = ["{ .reg .b32 lane, at, turned, table;", "mov.u32 table, kvcal_table;"]
    text += [f"and.b32 lane, kvcal_place, {(1 << step) // 4 - 1};", "shl.b32 lane, lane, 2;"]
    for piece in range(7):
        source, turn = f"${8 + piece // 5}", piece % 5 * 6 + ALIGNED - step
        if turn:
            text += [f"shf.r.wrap.b32 turned, {source}, {source}, {turn};"]
            source = "turned"
        text += [f"lop3.b32 at, {source}, {63 << step}, lane, 0xEA;"]
        text += ["add.u32 at, at, table;", f"ld.shared.b32 ${piece}, [at + {first}];"]
    text += [f"shl.b32 turned, $8, {step - 5};", f"lop3.b32 at, turned, {3 << step}, lane, 0xEA;"]
    text += [f"shr.u32 turned, $9, {17 - step};", f"lop3.b32 at, turned, {15 << step + 2}, at, 0xEA;"]
    return " ".join([*text, "add.u32 at, at, table;", f"ld.shared.b32 $7, [at + {first}];", "}"])


@triton.constexpr_function
def _targets(bits, pack, unit, code):
    """Results that a code's pairs are."""
    if bits != 2:
        return [unit * {3: 5, 4: 4}[bits] + code]
    if pack == 2:  # of two pieces
        return [2 * code, 2 * code + 1]
    return [8 * unit + 2 * code, 8 * unit + 2 * code + 1]  # units of rows r, r + 8


@triton.constexpr_function
def _reserve(size):
    """Without braces: the name holds for the whole kernel."""
    table = f".shared .align 128 .b8 kvcal_table[{size}]; mov.u32 $0, kvcal_table; "
    return table + ".reg .b32 kvcal_place; mov.u32 kvcal_place, %laneid;"


@triton.jit
def _table(p_table, base, ENTRIES: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr):
    """ENTRIES of PAIRS pairs of float16 into shared memory at `base`, as often as 2^STEP bytes an entry hold them."""
    p_pairs = p_table.to(tl.pointer_type(tl.int32))
    for first in range(0, ENTRIES << (STEP - 2), 1024):
        i = first + tl.arange(0, 1024)
        pair = tl.load(p_pairs + (i >> (STEP - 2)) * PAIRS + i % PAIRS)
        tl.inline_asm_elementwise(
            "st.shared.b32 [$1], $2; mov.b32 $0, 0;",
            "=r,r,r",
            [base + i * 4, pair],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _tables(
    p_kt, p_vt, zero, K_ENTRIES: tl.constexpr, K_PAIRS: tl.constexpr, V_ENTRIES: tl.constexpr, V_PAIRS: tl.constexpr,
    SAME: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Tables of keys and of values into shared memory, where all threads see them afterwards. zero: 0."""
    OWN: tl.constexpr = 0 if SAME else V_ENTRIES
    base = tl.inline_asm_elementwise(
        _reserve((K_ENTRIES + OWN) << STEP), "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1
    )
    _table(p_kt, base, K_ENTRIES, K_PAIRS, STEP)
    _table(p_vt, base + (K_ENTRIES << STEP), OWN, V_PAIRS, STEP)
    tl.debug_barrier()


@triton.jit
def _units(w, NW: tl.constexpr):
    """Words [NW, 16, 16] -> units [NW, 16, 8], twice one behind the other as int64."""
    low, high = tl.split(tl.reshape(w.to(tl.int64) & 0xFFFF, [NW, 16, 8, 2]))
    unit = low | (high << 16)
    return unit | (unit << 32)


@triton.jit
def _entry(p_table, index, PAIR: tl.constexpr, PAIRS: tl.constexpr, NW: tl.constexpr):
    p = p_table + index * (2 * PAIRS) + 2 * PAIR
    return tl.reshape(tl.join(tl.load(p), tl.load(p + 1)), [NW, 16, 16])


@triton.jit
def look2(w, p_table, STEP: tl.constexpr, FIRST: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr):
    """p_table: read without assembly. FIRST: byte of the table in shared memory. Here as below.

    A byte is of rows r and r + 8, registers side by side, as a load of 8 bytes writes them. So this counts on the order of a
    thread's numbers of a piece, that of a product's result (`check_layouts`): (r, k), (r, k + 1), (r + 8, k), (r + 8, k + 1).
    """
    if ASM:
        parts = tl.inline_asm_elementwise(
            _look_up(2, STEP, FIRST, 4),
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,"
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [w],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        top, bottom = tl.split(tl.permute(tl.reshape(_units(w, NW), [NW, 2, 8, 8]), [0, 2, 3, 1]))
        parts = ()
        for code in tl.static_range(8):
            index = ((top if code < 4 else bottom) >> (7 + 8 * (code % 4))) & 255
            p = p_table + index * 4
            upper = tl.join(tl.load(p), tl.load(p + 1))  # [NW, 8, 8, 2]
            lower = tl.join(tl.load(p + 2), tl.load(p + 3))
            both = tl.permute(tl.join(upper, lower), [0, 4, 1, 2, 3])
            parts = parts + (tl.reshape(both, [NW, 16, 16]),)
    return parts


@triton.jit
def look2_four(w, p_table, STEP: tl.constexpr, FIRST: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr):
    """Keys of which a code stands for four channels: a byte is of two pieces."""
    if ASM:
        parts = tl.inline_asm_elementwise(
            _look_up(2, STEP, FIRST), "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [w],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        unit = _units(w, NW)
        parts = ()
        for code in tl.static_range(4):
            index = (unit >> (7 + 8 * code)) & 255
            parts = parts + (_entry(p_table, index, 0, 2, NW), _entry(p_table, index, 1, 2, NW))
    return parts


@triton.jit
def look4(w, p_table, STEP: tl.constexpr, FIRST: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr):
    if ASM:
        parts = tl.inline_asm_elementwise(
            _look_up(4, STEP, FIRST), "=&r,=&r,=&r,=&r,r", [w],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        unit = _units(w, NW)
        parts = ()
        for code in tl.static_range(4):
            parts = parts + (_entry(p_table, (unit >> (7 + 8 * code)) & 255, 0, 1, NW),)
    return parts


@triton.jit
def look3(w, u, v, p_table, STEP: tl.constexpr, FIRST: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr):
    if ASM:
        parts = tl.inline_asm_elementwise(
            _look_up(3, STEP, FIRST),
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r", [w, u, v],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16,
                   tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        units = (_units(w, NW), _units(u, NW), _units(v, NW))
        parts = ()
        for code in tl.static_range(15):
            parts = parts + (_entry(p_table, (units[code // 5] >> (7 + 6 * (code % 5))) & 63, 0, 1, NW),)
        last = (units[0] >> 5) & 3 | ((units[1] >> 5) & 3) << 2 | ((units[2] >> 5) & 3) << 4
        parts = parts + (_entry(p_table, last, 0, 1, NW),)
    return parts


@triton.jit
def look3_half(w, u, p_table, STEP: tl.constexpr, FIRST: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr):
    """Eight pieces of a tile and of half a tile, as `_half_unit_tile` gives it."""
    if ASM:
        parts = tl.inline_asm_elementwise(
            _look_up_eight(STEP, FIRST), "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [w, u],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        whole, half_ = _units(w, NW), _units(u, NW)
        parts = ()
        for code in tl.static_range(5):
            parts = parts + (_entry(p_table, (whole >> (7 + 6 * code)) & 63, 0, 1, NW),)
        for code in tl.static_range(2):
            parts = parts + (_entry(p_table, (half_ >> (7 + 6 * code)) & 63, 0, 1, NW),)
        parts = parts + (_entry(p_table, (whole >> 5) & 3 | ((half_ >> 19) & 15) << 2, 0, 1, NW),)
    return parts


@triton.jit
def _half_unit_tile(
    p_words, b_at, b_live, ring, BYTE: tl.constexpr, U: tl.constexpr, MIXED: tl.constexpr, NW: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """As `_tile` of units of which there is half a tile: what is a unit's own is its lower half, not turned."""
    if ASM:
        w = tl.inline_asm_elementwise(
            _half_units(BYTE + U * 512), "=&r,=&r,=r,=r,r,r,r,r,r,r,r,r", [_half_rows(ring, MIXED, NW)],
            dtype=tl.int16, is_pure=False, pack=8,
        )  # fmt: skip
    else:
        r = tl.arange(0, 16)
        column = r % 8 ^ r // 8
        p = p_words + b_at[:, :, None] + (U * TILE + r[None, :, None] * 8 + column[None, None, :])
        w = tl.load(p, mask=b_live[:, :, None], other=0)
    return w


@triton.jit
def _upper_tile(
    p_words, b_at, b_live, ring, BYTE: tl.constexpr, U: tl.constexpr, MIXED: tl.constexpr, NW: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """As `_tile` of which there are the first 8 rows."""
    r = tl.arange(0, 16)
    if ASM:
        lane = r[None, :, None] % 8 * 4 + r[None, None, :] % 8 // 2 + _spot(NW)
        row = _mixed(lane & 7) if MIXED else lane & 7
        at = ring[:, :, None] + (row * 32 + ((lane >> 3 & 1) ^ (row >> 2)) * 16)
        w = tl.inline_asm_elementwise(
            _upper_matrix(BYTE + U * 512), "=&r,=r,=&r,=r,r,r,r,r,r,r,r,r", [at], dtype=tl.int16, is_pure=False, pack=8
        )
    else:
        upper = b_live[:, :, None] & (r < 8)[None, :, None]
        w = tl.load(p_words + _words(b_at) + U * TILE, mask=upper, other=0)
    return w


@triton.jit
def _points(
    p_words, b_at, b_live, ring, BYTE: tl.constexpr, p_table, BITS: tl.constexpr, TILES: tl.constexpr,
    HALVED: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr, FOUR: tl.constexpr, MIXED: tl.constexpr,
    NW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As `_codes`, of a grid: the points that codes stand for. HALVED: the last tile is half of one. FOUR: keys of which a
    code stands for four channels. MIXED: rows as `_mixed` says.
    """
    parts = ()
    if BITS == 3:
        for u in tl.static_range(0, TILES, 3):
            w0 = _tile(p_words, b_at, b_live, ring, BYTE, u, MIXED, NW, ASM)
            if HALVED and u + 2 == TILES:
                half_ = _half_unit_tile(p_words, b_at, b_live, ring, BYTE, u + 1, MIXED, NW, ASM)
                parts = parts + look3_half(w0, half_, p_table, STEP, FIRST, NW, ASM)
            else:
                w1 = _tile(p_words, b_at, b_live, ring, BYTE, u + 1, MIXED, NW, ASM)
                w2 = _tile(p_words, b_at, b_live, ring, BYTE, u + 2, MIXED, NW, ASM)
                parts = parts + look3(w0, w1, w2, p_table, STEP, FIRST, NW, ASM)
    else:
        for u in tl.static_range(TILES):
            if HALVED and u == TILES - 1:
                w = _upper_tile(p_words, b_at, b_live, ring, BYTE, u, MIXED, NW, ASM)
            else:
                w = _tile(p_words, b_at, b_live, ring, BYTE, u, MIXED, NW, ASM)
            if BITS == 4:
                parts = parts + look4(w, p_table, STEP, FIRST, NW, ASM)
            elif FOUR:
                parts = parts + look2_four(w, p_table, STEP, FIRST, NW, ASM)
            else:
                parts = parts + look2(w, p_table, STEP, FIRST, NW, ASM)
    return parts


# Rotation: a Hadamard transform of 2^k channels is one of 16 rows on tensor cores, then one of the tensors of a tuple.


@triton.jit
def _sign(p_sign, at):
    """Number `at` of int8 as float32. Not loaded as a byte: Triton lays out a product's operands by the narrowest load that
    they come from, and with bytes takes kWidth 4 or, behind a join, 8, which contracts 32 numbers, not 16 (`check_layouts`).
    """
    both = tl.load(p_sign.to(tl.pointer_type(tl.int16)) + at // 2).to(tl.int32)
    return (both << 24 - at % 2 * 8 >> 24).to(tl.float32)


@triton.jit
def _hadamard(NW: tl.constexpr, TYPE: tl.constexpr):
    r = tl.arange(0, 16)
    v = r[:, None] & r[None, :]
    v = v ^ (v >> 2)
    v = v ^ (v >> 1)
    return tl.broadcast_to((1 - 2 * (v & 1)).to(TYPE)[None], [NW, 16, 16])


@triton.jit
def _butterfly(x, COUNT: tl.constexpr, STEP: tl.constexpr):
    made = ()
    for i in tl.static_range(COUNT):
        made = made + (x[i] + x[i + STEP] if i // STEP % 2 == 0 else x[i - STEP] - x[i],)
    return made


@triton.jit
def _butterflies(x, COUNT: tl.constexpr, SPAN: tl.constexpr):
    """Of every SPAN of a tuple's COUNT tensors."""
    if SPAN > 1:
        x = _butterfly(x, COUNT, 1)
    if SPAN > 2:
        x = _butterfly(x, COUNT, 2)
    if SPAN > 4:
        x = _butterfly(x, COUNT, 4)
    if SPAN > 8:
        x = _butterfly(x, COUNT, 8)
    return x


@triton.constexpr_function
def _across_weight(row, column, back):
    """Of the orthonormal cosine transform of three numbers, the odd factor of head_dim 96: hadamard.cosines(3), which Triton
    3.6 lets no compiled function call. back: of its transpose.
    """
    row, column = (column, row) if back else (row, column)
    if row == 0:
        return 3**-0.5
    return (1 - column) * 2**-0.5 if row == 1 else (1 - column % 2 * 3) * 6**-0.5


@triton.jit
def _across(x, COUNT: tl.constexpr, SPAN: tl.constexpr, FACTOR: tl.constexpr, BACK: tl.constexpr):
    """Cosine transforms of FACTOR across spans of SPAN of a tuple's COUNT tensors, as `hadamard.rotate` has them; BACK: the
    inverse.
    """
    if FACTOR == 1:
        return x
    else:  # noqa: RET505 (both are compiled otherwise)
        made = ()
        for i in tl.static_range(COUNT):
            total = x[i // (SPAN * FACTOR) * (SPAN * FACTOR) + i % SPAN] * _across_weight(i // SPAN % FACTOR, 0, BACK)
            for j in tl.static_range(1, FACTOR):
                part = x[i // (SPAN * FACTOR) * (SPAN * FACTOR) + j * SPAN + i % SPAN]
                total += part * _across_weight(i // SPAN % FACTOR, j, BACK)
            made = made + (total,)
        return made


@triton.jit
def _of_parity(x, NW: tl.constexpr, N: tl.constexpr):
    """The step between even and odd channels, which are neighbouring columns."""
    even, odd = tl.split(tl.reshape(x, [NW, 16, N // 2, 2]))
    return tl.reshape(tl.join(even + odd, even - odd), [NW, 16, N])


@triton.jit
def _rotated(
    p_q, p_sign, o_q, b_row, b_down, i_kv, SLICES: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, FACTOR: tl.constexpr,
    FOUR: tl.constexpr, NW: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Queries times b_down [N] and their head's signs, rotated but for WIDTH^-0.5: SLICES of [NW, 16, N] float32."""
    rotated = ()
    for i in tl.static_range(SLICES):
        channel = _query_channels(i, FOUR)
        b_q = tl.load(p_q + o_q[None, :] + channel[:, None], mask=b_row[None, :], other=0.0)
        sign = _sign(p_sign, i_kv * D + channel)
        b_q = (b_q.to(tl.float32) * b_down[None, :] * sign[:, None]).to(tl.float16)
        rotated = rotated + (tl.dot(_hadamard(NW, tl.float16), tl.broadcast_to(b_q[None], [NW, 16, N])),)
    return _across(_butterflies(rotated, SLICES, WIDTH // 16), SLICES, WIDTH // 16, FACTOR, False)


@triton.jit
def _query_channels(i: tl.constexpr, FOUR: tl.constexpr):
    """Channels of slice i of queries (16,). FOUR: a code stands for four of them."""
    r = tl.arange(0, 16)
    return i // 2 * 32 + r // 2 * 4 + i % 2 * 2 + r % 2 if FOUR else i * 16 + r


@triton.jit
def _value_channels(i: tl.constexpr, r, odd, PAIRED: tl.constexpr, FOUR: tl.constexpr):
    """Channels of rows r of slice i of values. odd: which one of a pair, of neighbours or, PAIRED 2, of slices; other layouts
    have none.
    """
    if PAIRED == 0:
        return i * 16 + r + odd * 0
    if PAIRED == 2:
        return i * 32 + odd * 16 + r
    return i * 32 + (r % 8 * 4 + r // 8 * 2 if FOUR else r * 2) + odd


@triton.jit
def _spread(b_p, MIXED: tl.constexpr, NW: tl.constexpr, N: tl.constexpr):
    """Probabilities of 16 tokens [NW, 16, N] as operands of 8 tokens each, row 2 token + parity: 0 in columns of the other.
    MIXED: tokens are in the order of `_mixed`.
    """
    if MIXED:
        first, second = tl.inline_asm_elementwise(
            _movmatrix(True), "=r,=r,=r,=r,r,r", [b_p], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
        return _second(first, NW, N), _second(second, NW, N)
    odd = (-(tl.arange(0, N) % 2)).to(tl.int16)[None, None, :]
    bits = b_p.to(tl.int16, bitcast=True)
    both = tl.join(bits & ~odd, bits & odd).to(b_p.dtype, bitcast=True)
    wide = tl.reshape(tl.permute(both, [0, 1, 3, 2]), [NW, 2, 16, N])
    return tl.split(tl.permute(wide, [0, 2, 3, 1]))


@triton.constexpr_function
def _movmatrix(mixed):
    """Transposes of the 8 x 8 parts of a product's result; mixed: each as operands of 8 tokens, row 2 token + parity, 0 in
    columns of the other parity.
    """
    if not mixed:
        return "movmatrix.sync.aligned.m8n8.trans.b16 $0, $2; movmatrix.sync.aligned.m8n8.trans.b16 $1, $3;"
    text = "{ .reg .b32 t, u;"
    for i in range(2):
        text += f"movmatrix.sync.aligned.m8n8.trans.b16 t, ${4 + i}; "
        text += f"prmt.b32 ${2 * i}, t, 0, kvcal_low; prmt.b32 ${2 * i + 1}, t, 0, kvcal_high; "
    return text + "}"


@triton.jit
def _parities():
    """Registers that `_movmatrix` knows by name: where a lane's column takes numbers of even or of odd channels."""
    tl.inline_asm_elementwise(
        """.reg .b32 kvcal_low, kvcal_high; .reg .pred kvcal_parity;
        mov.u32 kvcal_low, %laneid; and.b32 kvcal_low, kvcal_low, 4; setp.ne.u32 kvcal_parity, kvcal_low, 0;
        selp.b32 kvcal_low, 0x1044, 0x4410, kvcal_parity; selp.b32 kvcal_high, 0x3244, 0x4432, kvcal_parity;
        mov.b32 $0, 0;""",
        "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _second(x, NW: tl.constexpr, N: tl.constexpr):
    """What `_movmatrix` made of [NW, 16, N], as a second operand."""
    return tl.reshape(tl.permute(tl.reshape(x, [NW, 2, 8, N // 8, 8]), [0, 1, 4, 3, 2]), [NW, 16, N])


@triton.jit
def _operand(b_p, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr):
    """Probabilities of 16 tokens [NW, 16, N] float16 as a second operand. Triton's own way takes two shuffles and twelve
    instructions where this takes two.
    """
    if ASM:
        made = tl.inline_asm_elementwise(_movmatrix(False), "=r,=r,r,r", [b_p], dtype=tl.float16, is_pure=True, pack=4)
        b_p = _second(made, NW, N)
    return b_p


@triton.jit
def _four(x, ASM: tl.constexpr):
    """int64 -> its four float16 as float32."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 a, b, c, d;
            mov.b64 {a, b, c, d}, $4;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }""",
            "=f,=f,=f,=f,l", [x], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return (
        half(x, 0).to(tl.float32), half(x, 1).to(tl.float32), half(x, 2).to(tl.float32), half(x, 3).to(tl.float32)
    )  # fmt: skip


@triton.jit
def _two(x, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
            "=f,=f,r", [x], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return half(x, 0).to(tl.float32), half(x, 1).to(tl.float32)


@triton.jit
def _from_shared(at, BITS: tl.constexpr, BYTE: tl.constexpr):
    """Integers of so many bits at shared addresses `at` + BYTE."""
    TEXT: tl.constexpr = _shared(BITS, BYTE)
    if BITS == 64:
        x = tl.inline_asm_elementwise(TEXT[0], TEXT[1], [at], dtype=tl.int64, is_pure=False, pack=1)
    elif BITS == 32:
        x = tl.inline_asm_elementwise(TEXT[0], TEXT[1], [at], dtype=tl.int32, is_pure=False, pack=1)
    else:
        x = tl.inline_asm_elementwise(TEXT[0], TEXT[1], [at], dtype=tl.int16, is_pure=False, pack=1)
    return x


@triton.jit
def _columns(p, b_at, b_live, ring, BYTE: tl.constexpr, COUNT: tl.constexpr, ASM: tl.constexpr):
    """COUNT columns of float16 as float32 [NW, 16], stored [COUNT / w][16][w], w = _together(COUNT), from byte BYTE of a slot
    of the ring on; or in memory at b_at [NW, 1] int64.
    """
    WIDTH: tl.constexpr = _together(COUNT)
    r = tl.arange(0, 16)[None, :]
    found = ()
    for i in tl.static_range(COUNT // WIDTH):
        if ASM:
            x = _from_shared(ring + r * (2 * WIDTH), 16 * WIDTH, BYTE + i * 32 * WIDTH)
        else:
            at = (p + b_at + i * 16 * WIDTH).to(tl.pointer_type(_word(WIDTH))) + r
            x = tl.load(at, mask=b_live, other=0)
        if WIDTH == 4:
            found = found + _four(x, ASM)
        elif WIDTH == 2:
            found = found + _two(x, ASM)
        else:
            found = found + (x.to(tl.float16, bitcast=True).to(tl.float32),)
    return found


@triton.jit
def _pairs(p, b_at, b_live, ring, BYTE: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr):
    """Scales and zero points of 16 neighbours along the contracted dimension, [NW, 16, 16] float16 each, every row alike,
    stored as [8][scale, scale, zero, zero].
    """
    r = tl.arange(0, 16)[None, None, :]
    if ASM:
        at = ring[:, :, None] + (r % 8 // 2 * 8 + _spot(NW))
        scale, zero = tl.inline_asm_elementwise(
            _pair(BYTE), "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r", [at],
            dtype=(tl.float16, tl.float16), is_pure=False, pack=8,
        )  # fmt: skip
    else:
        at = p + b_at[:, :, None] + (r // 2 * 4 + r % 2 + tl.zeros([NW, 16, 16], tl.int32))
        scale = tl.load(at, mask=b_live[:, :, None], other=0.0)
        zero = tl.load(at + 2, mask=b_live[:, :, None], other=0.0)
    return scale, zero


@triton.jit
def _row_scales(p, b_at, b_live, ring, BYTE: tl.constexpr, ASM: tl.constexpr):
    """The scales of `_pairs` by rows: [NW, 16, 1] float16."""
    r = tl.arange(0, 16)[None, :]
    if ASM:
        scale = _from_shared(ring + (r // 2 * 8 + r % 2 * 2), 16, BYTE).to(tl.float16, bitcast=True)
    else:
        scale = tl.load(p + b_at + (r // 2 * 4 + r % 2), mask=b_live, other=0.0)
    return scale[:, :, None]


@triton.jit
def _transposed(x, NW: tl.constexpr, N: tl.constexpr):
    """[NW, ROWS, 16] -> the transpose of its first N rows [NW, 16, N]: no moves, it is how a lane has a second operand."""
    if N == 8:
        x, _ = tl.split(tl.permute(tl.reshape(x, [NW, 2, 8, 16]), [0, 2, 3, 1]))
    return tl.permute(x, [0, 2, 1])


@triton.constexpr_function
def _place(m, bits):
    """2^p of field number m, p the bit at which unpacking leaves it."""
    if bits == 8:
        return 1.0
    return 16.0 ** (m % 2) if bits == 4 else 4.0 ** (m % 4)


@triton.constexpr_function
def _key_place(half, i, bits, mode, stride):
    """`_place` of piece i of a half block of keys."""
    return _place(_field_number(half, i, bits, stride, mode < 2, False), bits)


@triton.constexpr_function
def _ahead(bits, mode, stride):
    """How many times its place in the first half block a piece's in the second is, of keys."""
    return _key_place(1, 0, bits, mode, stride) / _key_place(0, 0, bits, mode, stride)


@triton.constexpr_function
def _unit(bits, mode):
    """What a group adds to each of its codes: symmetric codes are stored without their sign; else its zero point."""
    return -(2.0 ** (bits - 1)) if mode == 0 else 1.0


@triton.jit
def _scores(
    p_k, p_ks, i_head, b_block, b_live, ring, q, plain, sums,
    SLICES: tl.constexpr, STRIDE: tl.constexpr, TILES: tl.constexpr, WORDS: tl.constexpr,
    BITS: tl.constexpr, MODE: tl.constexpr, GROUP: tl.constexpr, room,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Scores of both halves of NW blocks, [NW, 16, N] float32 each, of integers in units of 2^-24 of the query's."""
    at = (i_head * room + b_block)[:, None]
    live = b_live[:, None]
    parts = _codes(p_k, at * WORDS, live, ring, 0, BITS, TILES, STRIDE, WORDS, MODE < 2, False, NW, True, ASM)
    BEHIND: tl.constexpr = WORDS * 2  # bytes of a slot before the scales
    AHEAD: tl.constexpr = _ahead(BITS, MODE, STRIDE)
    scores = ()
    if MODE < 2:  # groups of channels of one token
        GROUPS: tl.constexpr = SLICES * 16 // GROUP
        EACH: tl.constexpr = GROUP // 16
        BOTH: tl.constexpr = 1 + MODE  # scales, or scales and zero points
        HALF: tl.constexpr = GROUPS * BOTH * 16
        for h in tl.static_range(2):
            scale = _columns(p_ks, (at * 2 + h) * HALF, live, ring, BEHIND + h * HALF * 2, GROUPS * BOTH, ASM)
            for g in tl.static_range(GROUPS):
                own = scale[g * BOTH]
                if h == 1 and AHEAD > 1:
                    own = own * (1 / AHEAD)
                if MODE == 0:
                    b_dot = tl.dot(parts[h * STRIDE + g * EACH], q[g * EACH], sums[g] * (AHEAD if h == 1 else 1.0))
                else:
                    b_dot = tl.dot(parts[h * STRIDE + g * EACH], q[g * EACH])
                for i in tl.static_range(1, EACH):
                    b_dot = tl.dot(parts[h * STRIDE + g * EACH + i], q[g * EACH + i], b_dot)
                b_dot = b_dot * own[:, :, None]
                b_s = b_dot if g == 0 else b_s + b_dot  # noqa: F821
                if MODE == 1:
                    b_s += sums[g] * scale[g * 2 + 1][:, :, None]
            scores = scores + (b_s,)
    else:  # groups of tokens of one channel: scales multiply the query
        PER: tl.constexpr = GROUP // 32
        at_scale = (i_head * (room // PER) + b_block // PER)[:, None] * (SLICES * 32)
        b_zero = tl.zeros([NW, 16, N], tl.float32)
        b_0 = tl.zeros([NW, 16, N], tl.float32)
        b_1 = tl.zeros([NW, 16, N], tl.float32)
        for i in tl.static_range(SLICES):
            scale, zero = _pairs(p_ks, at_scale + i * 32, live, ring, BEHIND + i * 64, NW, ASM)
            b_zero = tl.dot(zero, plain[i], b_zero)
            b_q = _scaled(q[i], scale, NW, N)
            b_0 = tl.dot(parts[i], b_q, b_0)
            b_1 = tl.dot(parts[STRIDE + i], b_q, b_1)
        if AHEAD > 1:
            b_1 = b_1 * (1 / AHEAD)
        scores = (b_0 + b_zero * 2.0**-24, b_1 + b_zero * 2.0**-24)
    return scores


# Keys before RoPE. A block's 32 positions follow one another: the query is turned back to the first of them, once a block,
# and what is left, j positions of token j, is one table for all blocks, 8 KB at 128 channels that stay in the first-level
# cache. Assembly reads it through a register known by name, as an address that is an operand keeps Triton from loading words
# in the layout that a product wants.


@triton.constexpr_function
def _bit(m, bits):
    """The bit at which unpacking leaves field number m."""
    return {8: 0, 4: 4 * (m % 2)}.get(bits, 2 * (m % 4))


@triton.constexpr_function
def _bias(bit, zero):
    """Bits of 2^(10 - bit) + zero in float16: below them a code at `bit` counts ones."""
    return (25 - bit << 10) | zero << bit


@triton.constexpr_function
def _counting(bit, zero):
    bias = _bias(bit, zero) * 0x10001
    return f"{{ .reg .b32 t, b; or.b32 t, $1, kvcal_one{bit}; mov.b32 b, {bias}; sub.f16x2 $0, t, b; }}"


@triton.jit
def _number(part, BIT: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr):
    """Codes at bit BIT of a subnormal -> code - ZERO, exactly."""
    if ASM:
        made = tl.inline_asm_elementwise(_counting(BIT, ZERO), "=r,r", [part], dtype=tl.float16, is_pure=True, pack=2)
    else:
        made = (part.to(tl.float32) * 2.0 ** (24 - BIT) - ZERO).to(tl.float16)
    return made


@triton.constexpr_function
def _turning(half, pair, pairs):
    """Assembly: four registers of a piece and of its partner, turned by the table's entries for half block `half`."""
    text, base = ["{ .reg .b32 c<4>, s<4>, t, n;"], (half * pairs + pair) * 1024
    for name, at in (("c", base), ("s", base + 512)):
        text += [f"ld.global.nc.v4.b32 {{{name}0, {name}1, {name}2, {name}3}}, [kvcal_near + {at}];"]
    for i in range(4):
        low, high = f"${8 + i}", f"${12 + i}"
        text += [f"mul.f16x2 t, {low}, c{i};", f"neg.f16x2 n, {high};", f"fma.rn.f16x2 ${i}, n, s{i}, t;"]
        text += [f"mul.f16x2 t, {high}, c{i};", f"fma.rn.f16x2 ${4 + i}, {low}, s{i}, t;"]
    return " ".join([*text, "}"])


@triton.constexpr_function
def _naming(bits):
    text = ".reg .b32 kvcal_lane, kvcal_odd; .reg .b64 kvcal_near, kvcal_top; mov.u32 kvcal_lane, %laneid; "
    text += "mad.wide.u32 kvcal_near, kvcal_lane, 16, $1; "
    text += "shr.u64 kvcal_top, kvcal_near, 63; cvt.u32.u64 kvcal_odd, kvcal_top; "
    for bit in {8: (0,), 4: (0, 4)}.get(bits, (0, 2, 4, 6)):
        text += f".reg .b32 kvcal_one{bit}; add.u32 kvcal_one{bit}, kvcal_odd, {_bias(bit, 0) * 0x10001}; "
    return text + "mov.b32 $0, 0;"


@triton.jit
def _names(p_near, BITS: tl.constexpr):
    """Registers that assembly knows by name: where a lane's part of the table begins; what makes fields of BITS bits numbers,
    which the compiler must not see to be constant: one operand of an instruction may be, and the mask is.
    """
    tl.inline_asm_elementwise(_naming(BITS), "=r,l", [p_near.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _near_at(token, channel, PAIRS: tl.constexpr):
    """Where the cosine of a block's token and a channel below PAIRS * 16 lies in the table; the sine is 256 behind. In the
    order in which a lane holds pieces: [half][pair][cosine, sine][lane][row / 8][column % 4].
    """
    row, column = token % 16, channel % 16
    return (token // 16 * PAIRS + channel // 16) * 512 + (row % 8 * 4 + column // 4) * 8 + row // 8 * 4 + column % 4


@triton.jit
def _by_angle(x, y, cos, sin, SIGN: tl.constexpr):
    """x cos + SIGN y sin, rounded as assembly rounds it, for the interpreter: its float16 has no multiply-add."""
    first = (x.to(tl.float32) * cos.to(tl.float32)).to(tl.float16)
    return (first.to(tl.float32) + SIGN * (y.to(tl.float32) * sin.to(tl.float32))).to(tl.float16)


@triton.jit
def _turned(low, high, p_near, HALF: tl.constexpr, PAIR: tl.constexpr, PAIRS: tl.constexpr, ASM: tl.constexpr):
    """Pieces of channels and of their partners, turned by as many positions as each token is behind its block's first. Counts
    on the order of a lane's numbers in a product's first operand (`check_layouts`).
    """
    if ASM:
        made = tl.inline_asm_elementwise(
            _turning(HALF, PAIR, PAIRS), "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", [low, high],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=8,
        )  # fmt: skip
    else:
        r = tl.arange(0, 16)
        p = p_near + _near_at(HALF * 16 + r[:, None], PAIR * 16 + r[None, :], PAIRS)
        cos, sin = tl.load(p)[None], tl.load(p + 256)[None]
        made = (_by_angle(low, high, cos, sin, -1), _by_angle(high, low, cos, sin, 1))
    return made


@triton.jit
def _joined_queries(p, live, N: tl.constexpr):
    """16 channels of the query, [16, N], in pairs that are joined as the cosines of those are which are turned. Triton takes
    four numbers at a time of whatever meets what was joined, two of others, and finds no layout for one word of both.
    """
    pair = 2 * tl.arange(0, 8)[:, None]
    joined = tl.join(tl.load(p + pair, mask=live, other=0.0), tl.load(p + pair + 1, mask=live, other=0.0))
    return tl.reshape(tl.permute(joined, (0, 2, 1)), [16, N])


@triton.jit
def _turned_back(low, high, p_run, live, NW: tl.constexpr):
    """A piece of queries [NW, 16, N] and its partner, as the first positions of runs see them."""
    cos, sin = _loaded_pairs(p_run, tl.zeros([NW, 1], tl.int64), live, NW)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return low * cos + high * sin, high * cos - low * sin


@triton.jit
def _value(part, scale, zero, BIT: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, ASM: tl.constexpr):
    """A piece of numbers from codes at bit BIT. scale, zero: float16, as wide as the piece; MODE 0 has no zero."""
    ZERO: tl.constexpr = (1 << BITS - 1) if MODE == 0 else 0
    x = _number(part, BIT, ZERO, ASM) * scale
    if MODE > 0:
        x += zero
    return x


@triton.jit
def _token_scales(p_scale, live, COUNT: tl.constexpr, MODE: tl.constexpr):
    """Scales and zero points of a half block's tokens, group after group, [NW, 16, 1] float16 each; where MODE has no zero
    points, scales in their place. Stored as `_columns` has them.
    """
    WIDTH: tl.constexpr = _together(COUNT * (1 + MODE))
    kind: tl.constexpr = tl.int64 if WIDTH == 4 else tl.int32 if WIDTH == 2 else tl.int16
    r = tl.arange(0, 16)[None, :]
    column = ()
    for i in tl.static_range(COUNT * (1 + MODE) // WIDTH):
        x = tl.load((p_scale + i * 16 * WIDTH).to(tl.pointer_type(kind)) + r, mask=live, other=0)
        for j in tl.static_range(WIDTH):
            column = column + (half(x, j)[:, :, None],)
    scale, zero = (), ()
    for g in tl.static_range(COUNT):
        scale = scale + (column[g * (1 + MODE)],)
        zero = zero + (column[g * (1 + MODE) + MODE],)
    return scale, zero


@triton.jit
def _both_halves(
    parts, p_scale, tokens, live, PIECE: tl.constexpr, STRIDE: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr,
    EACH: tl.constexpr, NW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Numbers of piece PIECE of both half blocks. Their scales: of MODE 2 at p_scale, else `_token_scales` of each half, of
    EACH pieces.
    """
    BIT_0: tl.constexpr = _bit(_field_number(0, PIECE, BITS, STRIDE, MODE < 2, False), BITS)
    BIT_1: tl.constexpr = _bit(_field_number(1, PIECE, BITS, STRIDE, MODE < 2, False), BITS)
    if MODE == 2:
        scale, zero = _loaded_pairs(p_scale + PIECE * 32, tl.zeros([NW, 1], tl.int64), live, NW)
        x_0 = _value(parts[PIECE], scale[:, None, :], zero[:, None, :], BIT_0, BITS, MODE, ASM)
        x_1 = _value(parts[STRIDE + PIECE], scale[:, None, :], zero[:, None, :], BIT_1, BITS, MODE, ASM)
    else:
        x_0 = _value(parts[PIECE], tokens[0][PIECE // EACH], tokens[1][PIECE // EACH], BIT_0, BITS, MODE, ASM)
        x_1 = _value(parts[STRIDE + PIECE], tokens[2][PIECE // EACH], tokens[3][PIECE // EACH], BIT_1, BITS, MODE, ASM)
    return x_0, x_1


@triton.jit
def _turned_scores(
    p_k, p_ks, p_first, p_near, i_head, b_block, b_run, b_live, q,
    SLICES: tl.constexpr, STRIDE: tl.constexpr, TILES: tl.constexpr, WORDS: tl.constexpr,
    BITS: tl.constexpr, MODE: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, room,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As `_scores` of integers stored before RoPE, in units of the query's. b_run: number of each block's first position in
    p_first. PAIRS: pairs of pieces that are turned, the others are as they are.
    """
    at = (i_head * room + b_block)[:, None]
    live = b_live[:, None]
    parts = _codes(p_k, at * WORDS, live, at, 0, BITS, TILES, STRIDE, WORDS, MODE < 2, False, NW, False, ASM)
    p_run = p_first + b_run[:, None] * (PAIRS * 32)
    b_0 = tl.zeros([NW, 16, N], tl.float32)
    b_1 = tl.zeros([NW, 16, N], tl.float32)
    EACH: tl.constexpr = GROUP // (32 if MODE == 2 else 16)
    if MODE == 2:
        p_scale = p_ks + (i_head * (room // EACH) + b_block // EACH)[:, None] * (SLICES * 32)
        tokens = ()
    else:
        p_scale = p_ks + at * (2 * SLICES // EACH * (1 + MODE) * 16)
        tokens = _token_scales(p_scale, live, SLICES // EACH, MODE)
        p_scale = p_scale + SLICES // EACH * (1 + MODE) * 16
        tokens = tokens + _token_scales(p_scale, live, SLICES // EACH, MODE)
    BYTES: tl.constexpr = 2 if MODE < 2 else 1  # all that lies in words' low bytes first: fewer registers wait
    for byte in tl.static_range(BYTES):
        for i in tl.static_range(byte, PAIRS, BYTES):
            # partners first: the other way KIVI of 2 and 4 bits spilled 16 and 8 bytes of bfloat16 programs (sm_90, 168)
            y_0, y_1 = _both_halves(parts, p_scale, tokens, live, i + PAIRS, STRIDE, BITS, MODE, EACH, NW, ASM)
            x_0, x_1 = _both_halves(parts, p_scale, tokens, live, i, STRIDE, BITS, MODE, EACH, NW, ASM)
            x_0, y_0 = _turned(x_0, y_0, p_near, 0, i, PAIRS, ASM)
            x_1, y_1 = _turned(x_1, y_1, p_near, 1, i, PAIRS, ASM)
            b_x, b_y = _turned_back(q[i], q[i + PAIRS], p_run + i * 32, live, NW)
            b_0 = tl.dot(y_0, b_y, tl.dot(x_0, b_x, b_0))
            b_1 = tl.dot(y_1, b_y, tl.dot(x_1, b_x, b_1))
    for i in tl.static_range(2 * PAIRS, SLICES):
        x_0, x_1 = _both_halves(parts, p_scale, tokens, live, i, STRIDE, BITS, MODE, EACH, NW, ASM)
        b_0 = tl.dot(x_0, q[i], b_0)
        b_1 = tl.dot(x_1, q[i], b_1)
    return b_0, b_1


@triton.jit
def _scaled(q, scale, NW: tl.constexpr, N: tl.constexpr):
    """Queries by rows [NW, 16 or 32, 16] times scales of channels, as a second operand [NW, 16, N]."""
    return _transposed(q * _rows(scale, NW, N), NW, N)


@triton.jit
def _rows(x, NW: tl.constexpr, N: tl.constexpr):
    """[NW, 16, 16], every row alike, as at least N rows."""
    if N == 32:
        x = tl.reshape(tl.broadcast_to(x[:, None, :, :], [NW, 2, 16, 16]), [NW, 32, 16])
    return x


@triton.jit
def _grid_scores(
    p_k, p_ks, i_head, b_block, b_live, ring, q, SLICES: tl.constexpr, STRIDE: tl.constexpr, TILES: tl.constexpr,
    WORDS: tl.constexpr, BITS: tl.constexpr, room, p_table, i_norm, STEP: tl.constexpr, FOUR: tl.constexpr,
    MIXED: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As `_scores`, of points of a grid, with a norm for each token. MIXED: tokens in the order of `_mixed`."""
    live = b_live[:, None]
    at = (i_head * room + b_block)[:, None] * WORDS
    parts = _points(p_k, at, live, ring, 0, p_table, BITS, TILES, _halved(WORDS), STEP, 0, FOUR, MIXED, NW, ASM)
    scores = ()
    for h in tl.static_range(2):
        b_dot = tl.dot(parts[h * STRIDE], q[0])
        for i in tl.static_range(1, SLICES):
            b_dot = tl.dot(parts[h * STRIDE + i], q[i], b_dot)
        at_norm = (i_norm * room + b_block)[:, None] * 32 + h * 16
        scores = scores + (b_dot * _norms(p_ks, at_norm, live, ring, WORDS * 2 + h * 32, MIXED, NW, N, ASM),)
    return scores


@triton.constexpr_function
def _rows_of_halves(byte):
    """A lane's two rows of a product's result, from addresses of each number."""
    return f"""{{ .reg .b16 a, b;
    ld.shared.b16 a, [$4+{byte}]; ld.shared.b16 b, [$6+{byte}];
    cvt.f32.f16 $0, a; mov.b32 $1, $0; cvt.f32.f16 $2, b; mov.b32 $3, $2; }}"""


@triton.jit
def _norms(
    p, b_at, b_live, ring, BYTE: tl.constexpr, MIXED: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Norms of 16 tokens, [NW, 16, N] float32 in the layout of a product, every column alike, from byte BYTE of a slot of the
    ring on; or [NW, 16, 1] in memory at b_at [NW, 1].
    """
    r = tl.arange(0, 16)[None, :]
    if ASM:
        row = (_mixed(r) if MIXED else r)[:, :, None]
        at = ring[:, :, None] + (row * 2 + _spot(NW, N))
        norm = tl.inline_asm_elementwise(
            _rows_of_halves(BYTE), "=&f,=&f,=&f,=&f,r,r,r,r", [at], dtype=tl.float32, is_pure=False, pack=4
        )
    else:
        norm = tl.load(p + b_at + r, mask=b_live, other=0.0).to(tl.float32)[:, :, None]
    return norm


@triton.jit
def _add(
    p_v, p_vs, i_head, b_block, b_live, ring, b_0, b_1, b_sum, acc,
    SLICES: tl.constexpr, STRIDE: tl.constexpr, TILES: tl.constexpr, WORDS: tl.constexpr,
    BITS: tl.constexpr, MODE: tl.constexpr, GROUP: tl.constexpr, room, BYTE: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc plus probabilities b_0, b_1 (halves of NW blocks) times values; b_sum: the sum of the probabilities [NW, 16, N],
    every row the same. BYTE: of a slot of the ring at which values begin.
    """
    at = (i_head * room + b_block)[:, None]
    live = b_live[:, None]
    parts = _codes(p_v, at * WORDS, live, ring, BYTE, BITS, TILES, STRIDE, WORDS, MODE < 2, True, NW, True, ASM)
    BEHIND: tl.constexpr = BYTE + WORDS * 2
    made = ()
    if MODE < 2:  # groups of tokens of one channel
        PER: tl.constexpr = GROUP // 32
        BOTH: tl.constexpr = 1 + MODE
        at_scale = (i_head * (room // PER) + b_block // PER)[:, None] * (SLICES * BOTH * 16)
        scale = _columns(p_vs, at_scale, live, ring, BEHIND, SLICES * BOTH, ASM)
        for i in tl.static_range(SLICES):
            if MODE == 0:
                b_dot = tl.dot(parts[STRIDE + i], b_1, b_sum * (_unit(BITS, MODE) * _place(i, BITS) * 2.0**-24))
            else:
                b_dot = tl.dot(parts[STRIDE + i], b_1)
            b_dot = tl.dot(parts[i], b_0, b_dot)
            b_acc = acc[i] + b_dot * scale[i * BOTH][:, :, None]
            if MODE == 1:
                b_acc += b_sum * (scale[2 * i + 1] * (_place(i, BITS) * 2.0**-24))[:, :, None]
            made = made + (b_acc,)
    else:  # groups of channels of one token: scales multiply the probabilities
        GROUPS: tl.constexpr = SLICES * 16 // GROUP
        EACH: tl.constexpr = GROUP // 16
        zeros = ()
        for g in tl.static_range(GROUPS):
            at_0 = at * (GROUPS * 64) + g * 32
            b_p0 = b_0 * _row_scales(p_vs, at_0, live, ring, BEHIND + g * 64, ASM)
            b_p1 = b_1 * _row_scales(p_vs, at_0 + GROUPS * 32, live, ring, BEHIND + (GROUPS + g) * 64, ASM)
            _, b_z0 = _pairs(p_vs, at_0, live, ring, BEHIND + g * 64, NW, ASM)
            _, b_z1 = _pairs(p_vs, at_0 + GROUPS * 32, live, ring, BEHIND + (GROUPS + g) * 64, NW, ASM)
            zeros = zeros + (tl.dot(b_z1, b_1, tl.dot(b_z0, b_0, acc[SLICES + g])),)
            for i in tl.static_range(EACH):
                b_acc = tl.dot(parts[g * EACH + i], b_p0, acc[g * EACH + i])
                made = made + (tl.dot(parts[STRIDE + g * EACH + i], b_p1, b_acc),)
        made = made + zeros
    return made


@triton.jit
def _add_points(
    p_v, p_vs, i_head, b_block, b_live, ring, b_0, b_1, acc, SLICES: tl.constexpr, TILES: tl.constexpr,
    WORDS: tl.constexpr, BITS: tl.constexpr, room, BYTE: tl.constexpr, p_table, i_norm, STEP: tl.constexpr,
    FIRST: tl.constexpr, PAIRED: tl.constexpr, MIXED: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As `_add`, of points of a grid; b_0 and b_1 are float32, MIXED in the order of `_mixed`."""
    live = b_live[:, None]
    at = (i_head * room + b_block)[:, None] * WORDS
    parts = _points(p_v, at, live, ring, BYTE, p_table, BITS, TILES, _halved(WORDS), STEP, FIRST, False, False, NW, ASM)
    at_norm = (i_norm * room + b_block)[:, None] * 32
    b_0 = (b_0 * _norms(p_vs, at_norm, live, ring, BYTE + WORDS * 2, MIXED, NW, N, ASM)).to(tl.float16)
    b_1 = (b_1 * _norms(p_vs, at_norm + 16, live, ring, BYTE + WORDS * 2 + 32, MIXED, NW, N, ASM)).to(tl.float16)
    if PAIRED:
        probabilities = _spread(b_0, MIXED, NW, N) + _spread(b_1, MIXED, NW, N)
    else:
        probabilities = (_operand(b_0, NW, N, ASM), _operand(b_1, NW, N, ASM))
    WIDE: tl.constexpr = SLICES // 2 if PAIRED else SLICES
    made = ()
    for i in tl.static_range(WIDE):
        b_acc = acc[i]
        for j in tl.static_range(4 if PAIRED else 2):
            b_acc = tl.dot(parts[j * WIDE + i], probabilities[j], b_acc)
        made = made + (b_acc,)
    return made


@triton.constexpr_function
def _rising(count, slack, headroom):
    """Assembly for one product's numbers of a lane (two rows of two columns): scores of both halves, unit, then what is
    changed: the maximum, and `count` products beside it. Nothing is where no lane of the warp has a score by more than `slack`
    above; else the maximum is that of the scores and so much headroom.
    """
    own = [f"${4 * (1 + count) + i}" for i in range(12)]  # inputs behind outputs
    text = ["{ .reg .pred p; .reg .f32 a, b, x, y, f, g;"]
    for name, column, over in (("a", 0, "x"), ("b", 1, "y")):
        text += [
            f"max.f32 {name}, {own[column]}, {own[column + 2]};",
            f"max.f32 {over}, {own[column + 4]}, {own[column + 6]};",
        ]
        text += [f"max.f32 {name}, {name}, {over};"]
    text += [f"neg.f32 f, $0; neg.f32 g, $1; fma.rn.f32 x, a, {own[8]}, f; fma.rn.f32 y, b, {own[9]}, g;"]
    text += [f"max.f32 x, x, y; setp.gt.f32 p, x, {slack}; vote.sync.any.pred p, p, 0xffffffff; @!p bra KVCAL_LOW;"]
    for step in (16, 8, 4):
        for name, other in (("a", "x"), ("b", "y")):
            text += [f"shfl.sync.bfly.b32 {other}, {name}, {step}, 31, 0xffffffff; max.f32 {name}, {name}, {other};"]
    text += [f"fma.rn.f32 a, a, {own[8]}, {headroom}; fma.rn.f32 b, b, {own[9]}, {headroom};"]
    text += ["max.f32 a, a, $0; max.f32 b, b, $1;"]
    text += ["sub.f32 f, $0, a; sub.f32 g, $1, b; ex2.approx.ftz.f32 f, f; ex2.approx.ftz.f32 g, g;"]
    text += ["mov.f32 $0, a; mov.f32 $1, b; mov.f32 $2, a; mov.f32 $3, b;"]
    text += [f"mul.f32 ${4 + i}, ${4 + i}, {'fg'[i % 2]};" for i in range(4 * count)]
    return " ".join([*text, "KVCAL_LOW: }"])


@triton.constexpr_function
def _rising_constraints(count):
    outputs = 4 * (1 + count)
    return ",".join(["=f"] * outputs + ["f"] * 12 + [str(i) for i in range(outputs)])


@triton.constexpr_function
def _kinds(kind, count):
    return (kind,) * count


@triton.jit
def _faded(acc, fade):
    """Every tensor of a tuple times fade."""
    made = ()
    for i in tl.static_range(len(acc)):
        made = made + (acc[i] * fade,)
    return made


@triton.constexpr_function
def _slack(v_mode):
    """Powers of two by which scores may pass the maximum that is subtracted from them; by which it is above the scores when it
    rises. Probabilities alone are float16 up to 2^15. Times a scale or a norm, which may be 65504, they must not pass 1.
    """
    return (0.0, 3.0) if v_mode >= 2 else (8.0, 0.0)


@triton.jit
def _risen(b_0, b_1, b_m, b_l, unit, acc, V_MODE: tl.constexpr, ASM: tl.constexpr):
    """Maxima b_m [NW, 16, N], rows alike, and sums and outputs of them, after scores b_0, b_1 times unit: as they were while
    no score of a warp passes its column's maximum by more than `_slack` says.
    """
    SLACK: tl.constexpr = _slack(V_MODE)
    if ASM:
        COUNT: tl.constexpr = 1 + len(acc)
        made = tl.inline_asm_elementwise(
            _rising(COUNT, SLACK[0], SLACK[1]), _rising_constraints(COUNT), (b_0, b_1, unit, b_m, b_l) + acc,
            dtype=_kinds(tl.float32, 1 + COUNT), is_pure=False, pack=4,
        )  # fmt: skip
        b_m, b_l = made[0], made[1]
        acc = made[2:]
    else:
        b_top = tl.max(tl.maximum(b_0, b_1) * unit, 1)[:, None, :]
        if tl.max(b_top - b_m) > SLACK[0]:
            b_new = tl.maximum(b_m, b_top + SLACK[1])
            fade = tl.exp2(b_m - b_new)
            b_m, b_l, acc = b_new, b_l * fade, _faded(acc, fade)
    return b_m, b_l, acc


@triton.jit
def _step(
    p_k, p_ks, p_v, p_vs, i_head, first, stop, ring, q, plain, sums, unit, b_m, b_l, acc,
    p_kt, p_vt, norms, p_order, p_fit, fit, p_first, p_near, run, PAIRS: tl.constexpr,
    SLICES: tl.constexpr, STEP: tl.constexpr, K_FOUR: tl.constexpr, V_FIRST: tl.constexpr, PAIRED: tl.constexpr,
    K_FULL: tl.constexpr, K_TIER: tl.constexpr, K_STRIDE: tl.constexpr, K_TILES: tl.constexpr, K_WORDS: tl.constexpr,
    K_BITS: tl.constexpr, K_MODE: tl.constexpr, K_GROUP: tl.constexpr, K_HELD: tl.constexpr,
    V_STRIDE: tl.constexpr, V_TILES: tl.constexpr, V_WORDS: tl.constexpr,
    V_BITS: tl.constexpr, V_MODE: tl.constexpr, V_GROUP: tl.constexpr, room,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """NW blocks more: the new maxima, sums and outputs of each warp. MASK: some lie beyond `stop`."""
    MIXED: tl.constexpr = ASM and PAIRED and K_MODE == 3
    b_block = first + tl.arange(0, NW)
    b_live = b_block < (stop if MASK else 0x7FFFFFFF)
    if K_MODE == 4:
        b_0, b_1 = _tier_scores(
            p_k, p_ks, p_order, p_fit, i_head, b_block, b_live, ring, fit,
            SLICES, K_STRIDE, K_TILES, K_WORDS, K_GROUP, K_FULL, K_TIER, room, NW, N, ASM,
        )  # fmt: skip
    elif K_MODE == 3:
        b_0, b_1 = _grid_scores(
            p_k, p_ks, i_head, b_block, b_live, ring, q, SLICES, K_STRIDE, K_TILES, K_WORDS, K_BITS, room,
            p_kt, norms[0], STEP, K_FOUR, MIXED, NW, N, ASM,
        )  # fmt: skip
    elif PAIRS > 0:
        b_0, b_1 = _turned_scores(
            p_k, p_ks, p_first, p_near, i_head, b_block, run + b_block, b_live, q,
            SLICES, K_STRIDE, K_TILES, K_WORDS, K_BITS, K_MODE, K_GROUP, PAIRS, room, NW, N, ASM,
        )  # fmt: skip
    else:
        b_0, b_1 = _scores(
            p_k, p_ks, i_head, b_block, b_live, ring, q, plain, sums,
            SLICES, K_STRIDE, K_TILES, K_WORDS, K_BITS, K_MODE, K_GROUP, room, NW, N, ASM,
        )  # fmt: skip
    if MASK:
        b_0 = tl.where(b_live[:, None, None], b_0, LOW)
        b_1 = tl.where(b_live[:, None, None], b_1, LOW)
    unit = tl.broadcast_to(unit[:, None, :], [NW, 16, N])
    b_m, b_l, acc = _risen(b_0, b_1, b_m, b_l, unit, acc, V_MODE, ASM)
    b_0 = tl.exp2(b_0 * unit - b_m)
    b_1 = tl.exp2(b_1 * unit - b_m)
    if MASK:  # a warp without any block has LOW * unit as its maximum: the rounding of that product may be huge
        b_0 = tl.where(b_live[:, None, None], b_0, 0.0)
        b_1 = tl.where(b_live[:, None, None], b_1, 0.0)
    if V_MODE == 3:
        b_sum = b_0 + b_1
        acc = _add_points(
            p_v, p_vs, i_head, b_block, b_live, ring, b_0, b_1, acc, SLICES, V_TILES, V_WORDS, V_BITS, room,
            K_HELD, p_vt, norms[1], STEP, V_FIRST, PAIRED, MIXED, NW, N, ASM,
        )  # fmt: skip
    else:
        ones = tl.full([NW, 16, 16], 1.0, tl.float16)
        b_0 = _operand(b_0.to(tl.float16), NW, N, ASM)
        b_1 = _operand(b_1.to(tl.float16), NW, N, ASM)
        b_sum = tl.dot(ones, b_1, tl.dot(ones, b_0))
        acc = _add(
            p_v, p_vs, i_head, b_block, b_live, ring, b_0, b_1, b_sum, acc,
            SLICES, V_STRIDE, V_TILES, V_WORDS, V_BITS, V_MODE, V_GROUP, room, K_HELD, NW, N, ASM,
        )  # fmt: skip
    return b_m, b_l + b_sum, acc


@triton.constexpr_function
def _byte_place(i, bits, mode):
    return 1.0 if mode == POINTS else float(field_place(i % pairs_of_word(bits), bits))


@triton.jit
def _two_numbers(word, TYPE: tl.constexpr):
    """Two numbers of TYPE, 16 bits, of a word int32, the first in its low half, as float32."""
    low = word.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return low, (word >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def _bytes_of(one, two, which):
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [one, two, which], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _fixed(x, inverse, rounded):
    """Bits of x times its row's factor, as integers in the low bits of a float of the size of `rounded`."""
    factor = tl.broadcast_to(inverse[:, None], x.shape)
    return tl.fma(x, factor, tl.broadcast_to(rounded, x.shape)).to(tl.int32, bitcast=True)


@triton.jit
def _bytes_of_queries(p_q, o_t, there, inverse, D: tl.constexpr, NW: tl.constexpr):
    """Queries as products/triton.py has them, int32 [NW, 16, 8] for every two groups of channels. o_t, there, inverse (16,):
    of row n % 8 where the row begins, whether it is one, and by what it is multiplied. Compiled code alone.
    """
    r, column = tl.arange(0, 16)[:, None], tl.arange(0, 8)[None, :]
    p_pair = p_q.to(tl.pointer_type(tl.int32))
    high = r % 2 == 0
    # a high byte is that of the number rounded to a multiple of 256
    rounded = tl.where(high, ROUND + 128.0, ROUND)
    which = tl.where(high, 0x51, 0x40) + column * 0
    made = ()
    for c in tl.static_range((D + 63) // 64):
        channel = (2 * c + r // 8) * 32 + column // 2 * 2 + column % 2 * 8
        p_own = p_pair + (o_t[:, None] + channel) // 2
        x0, x1 = _two_numbers(tl.load(p_own, mask=there[:, None] & (channel < D), other=0), p_q.dtype.element_ty)
        further = there[:, None] & (channel + 16 < D)
        x2, x3 = _two_numbers(tl.load(p_own + 8, mask=further, other=0), p_q.dtype.element_ty)
        first = _bytes_of(_fixed(x0, inverse, rounded), _fixed(x2, inverse, rounded), which)
        second = _bytes_of(_fixed(x1, inverse, rounded), _fixed(x3, inverse, rounded), which)
        made = made + (_bytes_of(first, second, tl.full([16, 8], 0x5410, tl.int32))[None] + _spot(NW, 8),)
    return made


@triton.jit
def _rotated_bytes(plain, inverse, SLICES: tl.constexpr, NW: tl.constexpr, N: tl.constexpr):
    """As `_bytes_of_queries` of rotated queries plain, SLICES of [NW, 16, N] float32, times inverse [NW, N]: a byte of the
    register is of a slice, even channels of 64 neighbours come before odd ones. Compiled code alone.
    """
    high = (tl.arange(0, N) % 2 == 0)[None, None, :]
    factor = tl.broadcast_to(inverse[:, None, :], [NW, 16, N])
    rounded = tl.broadcast_to(tl.where(high, ROUND + 128.0, ROUND), [NW, 16, N])
    which = tl.broadcast_to(tl.where(high, 0x51, 0x40), [NW, 16, N])
    made = ()
    for c in tl.static_range(SLICES // 4):
        first = _bytes_of(
            tl.fma(plain[4 * c], factor, rounded).to(tl.int32, bitcast=True),
            tl.fma(plain[4 * c + 1], factor, rounded).to(tl.int32, bitcast=True),
            which,
        )
        second = _bytes_of(
            tl.fma(plain[4 * c + 2], factor, rounded).to(tl.int32, bitcast=True),
            tl.fma(plain[4 * c + 3], factor, rounded).to(tl.int32, bitcast=True),
            which,
        )
        four = _bytes_of(first, second, tl.full([NW, 16, N], 0x5410, tl.int32))
        turned = tl.permute(tl.reshape(four, [NW, 8, 2, 8]), [0, 2, 3, 1])  # parity, row of the query, pair of channels
        made = made + (tl.reshape(turned, [NW, 16, 8]) + _spot(NW, 8),)
    return made


@triton.jit
def _byte_tables(p_table, COUNT: tl.constexpr, NW: tl.constexpr, N: tl.constexpr):
    """COUNT tensors of `Grid.table` of a grid in bytes, four registers each."""
    number, _ = _lanes(NW, N)
    made = ()
    for i in tl.static_range(COUNT):
        made = made + (tl.load(p_table.to(tl.pointer_type(tl.int32)) + (i * 4 + number)),)
    return made


@triton.jit
def _begun(queries, SLICES: tl.constexpr, PIECES: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr):
    COUNT: tl.constexpr = beginning_tensors(SLICES, PIECES, BITS, MODE)
    KIND: tl.constexpr = tl.int32 if MODE == 0 else tl.float32
    return tl.inline_asm_elementwise(
        beginning(SLICES, PIECES, BITS, MODE), beginning_constraints(SLICES, PIECES, BITS, MODE), queries,
        dtype=_kinds(KIND, COUNT), is_pure=True, pack=4,
    )  # fmt: skip


@triton.constexpr_function
def _changed(slices, k_mode):
    """Types of what `block` changes."""
    queries = (tl.int32,) * -(-slices // 4) + (tl.float32,) if k_mode == 2 else ()
    return (tl.float32,) * (1 + slices // 2) + queries


@triton.jit
def _spread_state(state, WHICH: tl.constexpr):
    return tl.inline_asm_elementwise(
        spreading(WHICH), "=&f,=&f,=&f,=&f,f,f,f,f", [state], dtype=tl.float32, is_pure=True, pack=4
    )


@triton.jit
def _lanes(NW: tl.constexpr, N: tl.constexpr):
    """Of the four numbers that a lane has of a product's result [NW, 16, N]: which one it is, the lane."""
    b_none = _spot(NW, N)
    r, column = tl.arange(0, 16)[None, :, None] + b_none, tl.arange(0, N)[None, None, :] + b_none
    return r // 8 * 2 + column % 2, r % 8 * 4 + column // 2


@triton.jit
def _byte_state(
    unit, at, D: tl.constexpr, K_MODE: tl.constexpr, K_GROUP: tl.constexpr, V_MODE: tl.constexpr, HALVES: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """State and places of products/triton.py. unit [NW, N]; at [NW]: where each warp's ring begins. HALVES: whether keys or
    values have half tiles.
    """
    number, lane = _lanes(NW, N)
    row = lane & 15
    words = row * 32 + ((lane >> 4) ^ (row >> 2 & 1)) * 16
    keys, values = lane % 4 * 8, lane // 8 * 8 + lane // 4 % 2 * 2
    if K_MODE == IN_BYTES:
        keys = lane // 4 * 2
    if V_MODE == IN_BYTES:
        values = lane // 4 * 2
    if K_MODE < 2:
        keys = lane // 4 * (2 * _together(D // K_GROUP * (1 + K_MODE)))
    if V_MODE < 2:
        values = lane // 4 * (2 * _together(D // 16 * (1 + V_MODE)))
    state = tl.where(number == 0, LOW, tl.where(number == 2, unit[:, None, :], 0.0))
    places = tl.where(number == 0, words, tl.where(number == 1, keys, values))
    if HALVES:
        places = tl.where(number == 3, (row ^ row >> 3) * 16, places)
    return state, places + at[:, None, None]


@triton.jit
def _byte_base(unit, NW: tl.constexpr, N: tl.constexpr):
    """`base` of products/triton.py, int32."""
    number, lane = _lanes(NW, N)
    low = lane // 4 % 2
    rounded = tl.where(low == 1, ROUND, ROUND + 128.0)
    base = tl.where(number == 0, unit[:, None, :], rounded).to(tl.int32, bitcast=True)
    return tl.where(number == 2, tl.where(low == 1, 0x40, 0x51), base)


@triton.jit
def _plain_queries(p_q, o_t, there, shrink, D: tl.constexpr, NW: tl.constexpr):
    """Queries times shrink as registers of second operands of 16 float16, int32 [NW, 16, 8] for every two slices. o_t, there,
    shrink as `_bytes_of_queries` has them.
    """
    r, column = tl.arange(0, 16)[:, None], tl.arange(0, 8)[None, :]
    made = ()
    for c in tl.static_range(D // 32):
        channel = (2 * c + r // 8) * 16 + column // 2 * 2 + column % 2 * 8
        word = tl.zeros([16, 8], tl.int32)
        for i in tl.static_range(2):
            x = tl.load(p_q + o_t[:, None] + channel + i, mask=there[:, None], other=0.0).to(tl.float32)
            x = x * shrink[:, None]
            word = word | (x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) << (16 * i)
        made = made + (word[None] + _spot(NW, 8),)
    return made


@triton.jit
def _constants(room, NUMBERS: tl.constexpr, NW: tl.constexpr, N: tl.constexpr):
    """Tensors of a number each, in registers that the compiler does not know to be constant: it would move each anew for every
    product, whose operands are four neighbouring registers. room: not negative, which is unknown to it too.
    """
    b_none = _spot(NW, N)
    number = tl.arange(0, 16)[None, :, None] * N + tl.arange(0, N)[None, None, :]  # of lanes too: no uniform registers
    hidden = (room >> 31) * (number + 1) + b_none
    made = ()
    for i in tl.static_range(len(NUMBERS)):
        made = made + (hidden + NUMBERS[i],)
    return made


@triton.jit
def _byte_step(
    p_k, p_ks, p_v, p_vs, i_head, norms, first, start, stop, slot, places, queries, begins, fixed, plain, tables, p_kt, p_vt,
    unit, b_m, b_l, acc, SAME: tl.constexpr,
    SLICES: tl.constexpr, K_STRIDE: tl.constexpr, K_TILES: tl.constexpr, K_WORDS: tl.constexpr,
    K_BITS: tl.constexpr, K_MODE: tl.constexpr, K_GROUP: tl.constexpr, K_HELD: tl.constexpr,
    V_STRIDE: tl.constexpr, V_TILES: tl.constexpr, V_WORDS: tl.constexpr,
    V_BITS: tl.constexpr, V_MODE: tl.constexpr, V_GROUP: tl.constexpr, V_HELD: tl.constexpr, room,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As `_step`, by products of bytes (products/triton.py): under ASM b_m is its state, and of keys in outer groups queries
    are its queries and about, which change, begins its base.
    """
    if ASM:
        KEYS: tl.constexpr = (K_STRIDE, K_TILES, K_WORDS, K_BITS, K_MODE, K_GROUP, K_HELD)
        VALUES: tl.constexpr = (V_STRIDE, V_TILES, V_WORDS, V_BITS, V_MODE, V_GROUP, V_HELD)
        none = tl.zeros([NW, 16, N], tl.int32)
        changed = (b_m,) + acc
        given = (none + slot, places)
        if K_MODE == 2:
            renew = (first == start) | (first % (K_GROUP // 32) == 0)
            changed = changed + queries
            given = given + (none + renew.to(tl.int32),) + fixed + plain + begins
        elif K_MODE == IN_BYTES:
            given = given + queries + fixed
        else:
            given = given + queries + begins + fixed
        given = given + tables
        if NW > 1:
            given = given + (none + (first + tl.arange(0, NW) < stop).to(tl.int32)[:, None, None],)
        made = tl.inline_asm_elementwise(
            block(SLICES, KEYS, VALUES, NW > 1, SAME), block_constraints(SLICES, KEYS, VALUES, NW > 1, SAME),
            given + changed, dtype=_changed(SLICES, K_MODE), is_pure=False, pack=4,
        )  # fmt: skip
        b_m = made[0]
        acc = made[1 : 1 + SLICES // 2]
        if K_MODE == 2:
            queries = made[1 + SLICES // 2 :]
    else:
        live = first + tl.arange(0, NW) < stop
        block_at = tl.minimum(first + tl.arange(0, NW), stop - 1)
        b_0, b_1 = _plain_scores(
            p_k, p_ks, i_head, norms[0], block_at, queries, unit, p_kt,
            SLICES, K_STRIDE, K_TILES, K_WORDS, K_BITS, K_MODE, K_GROUP, room, NW, N,
        )  # fmt: skip
        at_size = (norms[1] if V_MODE == IN_BYTES else i_head) * room + block_at
        s_0 = _value_sizes(p_vs, at_size, 0, V_MODE, NW)
        s_1 = _value_sizes(p_vs, at_size, 1, V_MODE, NW)
        b_top = tl.max(tl.maximum(b_0 + s_0, b_1 + s_1), 1)[:, None, :]
        b_e = tl.ceil(b_top + tl.abs(b_top) * 2.0**-22) + tl.zeros([NW, 16, N], tl.float32)
        b_e = tl.where(live[:, None, None], b_e, float("-inf"))  # a warp without a block left adds nothing
        b_m = tl.maximum(b_m, b_e - BLOCK_JUMP)
        b_d = b_e - b_m
        fade = tl.where(b_d > -127, tl.exp2(b_d), 0.0)
        b_0 = tl.where(live[:, None, None], b_0 - b_e, 0.0)
        b_1 = tl.where(live[:, None, None], b_1 - b_e, 0.0)
        b_l += (tl.exp2(b_0) + tl.exp2(b_1)) * fade
        acc = _plain_added(
            p_v, p_vs, i_head, block_at, b_0, b_1, s_0, s_1, fade, acc, p_vt,
            SLICES, V_STRIDE, V_TILES, V_WORDS, V_BITS, V_MODE, V_GROUP, room, NW, N,
        )  # fmt: skip
        if tl.max(b_d) > BLOCK_SLACK:
            b_new = tl.maximum(b_m, b_e)
            fade = tl.exp2(b_m - b_new)
            b_m, b_l, acc = b_new, b_l * fade, _faded(acc, fade)
    return b_m, b_l, acc, queries


@triton.jit
def _plain_scores(
    p_k, p_ks, i_head, i_norm, block_at, queries, unit, p_table, SLICES: tl.constexpr, STRIDE: tl.constexpr,
    TILES: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, GROUP: tl.constexpr, room,
    NW: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """For the interpreter: scores of both halves in powers of two, of queries that are rounded as products/triton.py does."""
    at = (i_head * room + block_at)[:, None]
    live = at >= 0
    made = ()
    if MODE < IN_BYTES:
        parts = _codes(p_k, at * WORDS, live, at, 0, BITS, TILES, STRIDE, WORDS, MODE < 2, False, NW, False, False)
    if MODE == IN_BYTES:
        r = tl.arange(0, 16)
        for h in tl.static_range(2):
            b_s = tl.zeros([NW, 16, N], tl.float32)
            for i in tl.static_range(SLICES):
                p_words = p_k + (at * WORDS)[:, :, None]
                x = _byte_points(p_words, r[:, None], r[None, :], p_table, h, i, False, SLICES, BITS, GROUP)
                b_s += tl.dot(x, queries[i], input_precision="ieee")
            norm = tl.load(p_ks + (i_norm * room + block_at)[:, None] * 32 + h * 16 + r[None, :]).to(tl.float32)
            made = made + (b_s * norm[:, :, None] * unit[:, None, :],)
    elif MODE == 2:
        at_group = (i_head * (room // (GROUP // 32)) + block_at // (GROUP // 32))[:, None] * (SLICES * 32)
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
                x = _counted(parts[h * STRIDE + i], _key_place(h, i, BITS, MODE, STRIDE), BITS, MODE)
                b_s += tl.dot(x, tl.floor(scaled[i] / b_step[:, None, :] + 0.5), input_precision="ieee")
            made = made + ((b_s * b_step[:, None, :] + b_zero[:, None, :]) * unit[:, None, :],)
    else:
        BOTH: tl.constexpr = 1 + MODE
        COLUMNS: tl.constexpr = SLICES * 16 // GROUP * BOTH
        for h in tl.static_range(2):
            scale = _columns(p_ks, (at * 2 + h) * COLUMNS * 16, live, at, 0, COLUMNS, False)
            b_s = tl.zeros([NW, 16, N], tl.float32)
            for i in tl.static_range(SLICES):
                g: tl.constexpr = i * 16 // GROUP * BOTH
                x = _counted(parts[h * STRIDE + i], _key_place(h, i, BITS, MODE, STRIDE), BITS, MODE)
                b_s += tl.dot(x, queries[i], input_precision="ieee") * scale[g][:, :, None]
                if MODE == 1:
                    b_s += tl.sum(queries[i], 1)[:, None, :] * scale[g + 1][:, :, None]
            made = made + (b_s * unit[:, None, :],)
    return made


@triton.jit
def _byte_points(
    p_words, row, k, p_table, HALF: tl.constexpr, SLICE: tl.constexpr, VALUE: tl.constexpr, SLICES: tl.constexpr,
    BITS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """For the interpreter: points of a grid in bytes in steps, as float32. Of half block HALF token `row` and channel `k` of
    slice SLICE of keys, or VALUE: row `row` and token `k` of slice SLICE as outputs have it, of d = 2 even or odd channels of
    32.
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
        if SLICES == 4 and SET >= 2:  # in half a tile but for the highest bit
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
    """Bits 4 which and up of a word."""
    return (tl.load(p).to(tl.int32) & 0xFFFF) >> which * 4


@triton.jit
def _byte_entry(p_table, code, number, BITS: tl.constexpr):
    """What `byte_table` holds for a code, as assembly adds it up."""
    p = p_table.to(tl.pointer_type(tl.int8)) + number * 16
    x = tl.load(p + code).to(tl.float32)
    if BITS == 4:
        x -= (tl.load(p + (code ^ 8)) < 0).to(tl.float32)
    return x


@triton.jit
def _value_sizes(p_vs, at, HALF: tl.constexpr, MODE: tl.constexpr, NW: tl.constexpr):
    """Powers of two of the scales of half a block's values, [NW, 16, 1], of outer groups of all channels and grids; else 0."""
    size = tl.zeros([NW, 16], tl.float32)
    if MODE == IN_BYTES:
        norm = tl.load(p_vs + (at * 32 + HALF * 16)[:, None] + tl.arange(0, 16)[None, :]).to(tl.float32)
        size = tl.log2(tl.maximum(norm, 2.0**-24))
    if MODE == 2:
        r = tl.arange(0, 16)[None, :]
        scale = tl.load(p_vs + (at * 64 + HALF * 32)[:, None] + (r // 2 * 4 + r % 2)).to(tl.float32)
        size = tl.log2(tl.maximum(scale, 2.0**-24))
    return size[:, :, None]


@triton.jit
def _plain_added(
    p_v, p_vs, i_head, block_at, b_0, b_1, s_0, s_1, fade, acc, p_table, SLICES: tl.constexpr, STRIDE: tl.constexpr,
    TILES: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, GROUP: tl.constexpr, room,
    NW: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """For the interpreter: acc, and times fade what a block adds, of probabilities 2^b_0 and 2^b_1, rounded as
    products/triton.py does. s_0, s_1: `_value_sizes`.
    """
    at = (i_head * room + block_at)[:, None]
    live = at >= 0
    if MODE < IN_BYTES:
        parts = _codes(p_v, at * WORDS, live, at, 0, BITS, TILES, STRIDE, WORDS, True, True, NW, False, False)
    p_0 = tl.floor(tl.exp2(b_0 + s_0) * FULL_PROBABILITY + 0.5)
    p_1 = tl.floor(tl.exp2(b_1 + s_1) * FULL_PROBABILITY + 0.5)
    b_sum = tl.sum(p_0 + p_1, 1)[:, None, :]
    if MODE < 2:
        BOTH: tl.constexpr = 1 + MODE
        PER: tl.constexpr = GROUP // 32
        at_scale = (i_head * (room // PER) + block_at // PER)[:, None] * (SLICES * BOTH * 16)
        scale = _columns(p_vs, at_scale, live, at, 0, SLICES * BOTH, False)
    elif MODE == 2:  # what zero points add to all channels
        r = tl.arange(0, 16)[None, :]
        p = p_vs + at * 64 + (r // 2 * 4 + r % 2 + 2)
        z_0, z_1 = tl.load(p).to(tl.float32)[:, :, None], tl.load(p + 32).to(tl.float32)[:, :, None]
        b_zero = tl.sum(tl.exp2(b_0) * z_0 + tl.exp2(b_1) * z_1, 1)[:, None, :] * fade * FULL_PROBABILITY
    found = ()
    for i in tl.static_range(SLICES):
        if MODE == IN_BYTES:
            r = tl.arange(0, 16)
            p_words = p_v + (at * WORDS)[:, :, None]
            x_0 = _byte_points(p_words, r[:, None], r[None, :], p_table, 0, i, True, SLICES, BITS, GROUP)
            x_1 = _byte_points(p_words, r[:, None], r[None, :], p_table, 1, i, True, SLICES, BITS, GROUP)
        else:
            x_0 = _counted(parts[i], _place(i, BITS), BITS, MODE)
            x_1 = _counted(parts[STRIDE + i], _place(i, BITS), BITS, MODE)
        b_dot = tl.dot(x_0, p_0, input_precision="ieee") + tl.dot(x_1, p_1, input_precision="ieee")
        if MODE < 2:
            b_dot = b_dot * scale[i * BOTH][:, :, None]
        if MODE == 1:
            b_dot += b_sum * scale[2 * i + 1][:, :, None]
        b_dot = b_dot * fade
        if MODE == 2:
            b_dot += b_zero
        found = found + (b_dot * _byte_place(i, BITS, MODE),)
    odd = (tl.arange(0, N) % 2 == 1)[None, None, :]
    made = ()
    for i in tl.static_range(SLICES // 2):
        made = made + (acc[i] + tl.where(odd, found[2 * i + 1], found[2 * i]),)
    return made


@triton.jit
def _counted(part, PLACE: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr):
    """Codes as `_codes` leaves them -> numbers, of symmetric forms with their sign."""
    x = part.to(tl.float32) * (2.0**24 / PLACE)
    if MODE == 0:
        x -= 2.0 ** (BITS - 1)
    return x


@triton.jit
def _origins(
    p_k, p_ks, p_order, p_v, p_vs, i_head, i_scales, room, lane, K_ORDER: tl.constexpr,
    K_HELD: tl.constexpr, K_WORDS: tl.constexpr, K_SCALES: tl.constexpr, K_PER: tl.constexpr,
    V_HELD: tl.constexpr, V_WORDS: tl.constexpr, V_SCALES: tl.constexpr, V_PER: tl.constexpr,
):  # fmt: skip
    """Where each lane copies from in a head's first block: int64 [32 NW] for each piece that goes through the ring. i_scales:
    the heads of keys' and of values' scales, which may be of all heads.
    """
    found = ()
    if K_HELD > 0:
        found = found + ((p_k + i_head * room * K_WORDS).to(tl.int64) + lane * 16,)
        found = found + ((p_ks + i_scales[0] * (room // K_PER) * K_SCALES).to(tl.int64) + lane * _width(K_SCALES * 2),)
        found = found + ((p_order + i_head * (room // K_PER) * K_ORDER).to(tl.int64) + lane * _width(K_ORDER),)
    if V_HELD > 0:
        found = found + ((p_v + i_head * room * V_WORDS).to(tl.int64) + lane * 16,)
        found = found + ((p_vs + i_scales[1] * (room // V_PER) * V_SCALES).to(tl.int64) + lane * _width(V_SCALES * 2),)
    return found


@triton.constexpr_function
def _pieces(k_held, k_words, k_scales, k_order, v_held, v_words, v_scales):
    """(bytes, whether tiles of words) of what goes through the ring."""
    keys, values = ((2 * k_words, True), (2 * k_scales, False)), ((2 * v_words, True), (2 * v_scales, False))
    keys = (*keys, (k_order, False)) if k_order else keys
    return (keys if k_held else ()) + (values if v_held else ())


@triton.jit
def _fetch(
    origins, first, last, slot, lane, swapped, K_ORDER: tl.constexpr,
    K_HELD: tl.constexpr, K_WORDS: tl.constexpr, K_SCALES: tl.constexpr, K_PER: tl.constexpr,
    V_HELD: tl.constexpr, V_WORDS: tl.constexpr, V_SCALES: tl.constexpr, V_PER: tl.constexpr, NW: tl.constexpr,
):  # fmt: skip
    """Begin to copy the blocks from `first` on, one a warp, none behind `last`, to a slot of the ring. slot, lane, swapped:
    int32 [32 NW].
    """
    PIECES: tl.constexpr = _pieces(K_HELD, K_WORDS, K_SCALES, K_ORDER, V_HELD, V_WORDS, V_SCALES)
    block = tl.minimum(first + tl.arange(0, 32 * NW) // 32, last)
    given = (slot, lane, swapped)
    if K_HELD > 0:
        given = given + (block, origins[0], block // K_PER, origins[1])
        if K_ORDER > 0:
            given = given + (block // K_PER, origins[2])
    if V_HELD > 0:
        FIRST: tl.constexpr = 3 if K_HELD > 0 else 0
        given = given + (block, origins[FIRST], block // V_PER, origins[FIRST + 1])
    tl.inline_asm_elementwise(_copies(PIECES), _constraints(PIECES), given, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _open_ring(
    p_k, p_ks, p_order, p_v, p_vs, i_head, i_scales, room, lane, zero, start, last, swapped, K_ORDER: tl.constexpr,
    K_HELD: tl.constexpr, K_WORDS: tl.constexpr, K_SCALES: tl.constexpr, K_PER: tl.constexpr,
    V_HELD: tl.constexpr, V_WORDS: tl.constexpr, V_SCALES: tl.constexpr, V_PER: tl.constexpr,
    ENTRIES: tl.constexpr, SLOTS: tl.constexpr, NW: tl.constexpr,
):  # fmt: skip
    """`_origins`, and where the ring lies; all of its slots but one begin to fill."""
    SLOT: tl.constexpr = K_HELD + V_HELD
    origins = _origins(
        p_k, p_ks, p_order, p_v, p_vs, i_head, i_scales, room, lane, K_ORDER,
        K_HELD, K_WORDS, K_SCALES, K_PER, V_HELD, V_WORDS, V_SCALES, V_PER,
    )  # fmt: skip
    base = tl.inline_asm_elementwise(
        _ring(SLOT * SLOTS * NW, _beyond(NW, ENTRIES, SLOT * SLOTS)),
        "=r,r",
        [zero],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    to = base + tl.arange(0, 32 * NW) // 32 * (SLOT * SLOTS)
    for ahead in tl.static_range(SLOTS - 1):
        _fetch(
            origins, start + ahead * NW, last, to + ahead * SLOT, lane, swapped, K_ORDER,
            K_HELD, K_WORDS, K_SCALES, K_PER, V_HELD, V_WORDS, V_SCALES, V_PER, NW,
        )  # fmt: skip
    return origins, base


@triton.jit
def _as(x, TYPE: tl.constexpr, ASM: tl.constexpr):
    """float32 -> TYPE, to nearest, ties to even: the interpreter cuts bfloat16 off, so it is given what is exact."""
    if TYPE == tl.bfloat16 and not ASM:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(TYPE)


@triton.jit
def _times(a, b, c, ASM: tl.constexpr):
    """c + a b: the interpreter's products of bfloat16 are wrong."""
    if ASM:
        return tl.dot(a, b, c)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")


@triton.jit
def _slot(token, first, room, RING: tl.constexpr):
    if RING:
        token = tl.where(first + token >= room, first + token - room, first + token)
    return token


@triton.jit
def _exact_turned(
    p_k, o_token, live, place, p_first, p_near, PAIR: tl.constexpr, PAIRS: tl.constexpr, NW: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Piece PAIR of keys and its partner [NW, 16, 16], turned in float32, in the dtype in which they are stored."""
    r = tl.arange(0, 16)
    channel = (PAIR * 16 + r)[None, None, :]
    place = place[:, :, None]
    low = tl.load(p_k + o_token[:, :, None] + channel, mask=live[:, :, None], other=0.0).to(tl.float32)
    high = tl.load(p_k + o_token[:, :, None] + channel + PAIRS * 16, mask=live[:, :, None], other=0.0).to(tl.float32)
    p_run = p_first + place // 32 * (PAIRS * 32) + PAIR * 32 + r[None, None, :] // 2 * 4 + r[None, None, :] % 2
    p_own = p_near + _near_at(place % 32, channel, PAIRS)
    cos0, sin0 = (tl.load(p_run, mask=live[:, :, None], other=0.0).to(tl.float32),
                  tl.load(p_run + 2, mask=live[:, :, None], other=0.0).to(tl.float32))  # fmt: skip
    cos1, sin1 = tl.load(p_own).to(tl.float32), tl.load(p_own + 256).to(tl.float32)
    cos, sin = cos0 * cos1 - sin0 * sin1, sin0 * cos1 + cos0 * sin1
    kind: tl.constexpr = p_k.dtype.element_ty
    return _as(low * cos - high * sin, kind, ASM), _as(high * cos + low * sin, kind, ASM)


@triton.jit
def _exact(
    p_k, p_v, p_q, o_q, b_row, i_head, room, first, limit, begin, end, factor, b_m, b_l, acc,
    SLICES: tl.constexpr, PAIRED: tl.constexpr, FOUR: tl.constexpr, STAGES: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr, RING: tl.constexpr,
    p_first, p_near, run, gap, own, PAIRS: tl.constexpr,
):  # fmt: skip
    """Tokens `begin` to `end` as they are; token 0 is in slot 0, with RING in slot `first`, others behind it and around.
    limit (N,): the first token that a row does not see. run: of the tokens behind the first `gap` ones, these being `own`
    places further from there, where PAIRS says that keys are turned.
    """
    D: tl.constexpr = SLICES * 16
    r = tl.arange(0, 16)
    b_token = tl.arange(0, NW)[:, None] * 16 + r[None, :]
    for start in tl.range(begin, end, NW * 16, num_stages=STAGES):
        token = start + b_token
        live = token < end
        o_token = (i_head * room + _slot(token, first, room, RING)) * D
        b_s = tl.zeros([NW, 16, N], tl.float32)
        for i in tl.static_range(PAIRS):
            place = (run * 32 + token + tl.where(token < gap, own, -gap)).to(tl.int64)
            pair = _exact_turned(p_k, o_token, live, place, p_first, p_near, i, PAIRS, NW, ASM)
            for j in tl.static_range(2):
                channel = (i + j * PAIRS) * 16 + r
                b_q = tl.load(p_q + o_q[None, None, :] + channel[None, :, None], mask=b_row[None, None, :], other=0.0)
                b_s = _times(pair[j], tl.broadcast_to(b_q, [NW, 16, N]), b_s, ASM)
        for i in tl.static_range(2 * PAIRS, SLICES):
            b_k = tl.load(p_k + o_token[:, :, None] + (i * 16 + r)[None, None, :], mask=live[:, :, None], other=0.0)
            b_q = tl.load(p_q + o_q[None, None, :] + (i * 16 + r)[None, :, None], mask=b_row[None, None, :], other=0.0)
            b_q = tl.broadcast_to(b_q, [NW, 16, N])
            b_s = _times(b_k, b_q, b_s, ASM)
        b_s = tl.where(token[:, :, None] < tl.minimum(limit, end)[None, None, :], b_s * factor, LOW)
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        fade = tl.exp2(b_m - b_new)
        b_p = _as(tl.exp2(b_s - b_new[:, None, :]), p_v.dtype.element_ty, ASM)
        b_l = b_l * fade + tl.sum(b_p.to(tl.float32), 1)
        b_m = b_new
        made = ()
        if PAIRED:
            halves = _spread(b_p, False, NW, N)
            k = tl.arange(0, 16)[None, None, :]
            for i in tl.static_range(SLICES // 2):
                b_o = acc[i] * fade[:, None, :]
                channel = _value_channels(i, r[None, :, None], k % 2, True, FOUR)
                for j in tl.static_range(2):
                    token = start + tl.arange(0, NW)[:, None, None] * 16 + j * 8 + k // 2
                    o_v = (i_head * room + _slot(token, first, room, RING)) * D + channel
                    b_v = tl.load(p_v + o_v, mask=token + channel * 0 < end, other=0.0)
                    b_o = _times(b_v, halves[j], b_o, ASM)
                made = made + (b_o,)
        else:
            for i in tl.static_range(SLICES):
                b_v = tl.load(p_v + o_token[:, :, None] + (i * 16 + r)[None, None, :], mask=live[:, :, None], other=0.0)
                made = made + (_times(tl.trans(b_v, 0, 2, 1), b_p, acc[i] * fade[:, None, :], ASM),)
        acc = made
    return b_m, b_l, acc


@triton.constexpr_function
def _at_a_time(count, columns):
    """Slices of outputs that warps add up together: each time costs three barriers, and shared memory as large as they are."""
    most = 32 // columns
    return 4 if most >= 4 and count % 4 == 0 else 2 if most >= 2 and count % 2 == 0 else 1


@triton.jit
def _numbers(COUNT: tl.constexpr):
    """Of the tensors of `_joined`, where they lie there: [1, 1, inner, outer]."""
    inner = tl.arange(0, min(COUNT, 2))[None, None, :, None]
    return inner + 2 * tl.arange(0, max(COUNT // 2, 1))[None, None, None, :]


@triton.jit
def _joined(x, FIRST: tl.constexpr, COUNT: tl.constexpr, factor):
    """COUNT (1, 2 or 4) tensors of a tuple, times factor: [NW, 16, N, inner, outer]."""
    if COUNT == 1:
        made = (x[FIRST] * factor)[:, :, :, None, None]
    else:
        made = tl.join(x[FIRST] * factor, x[FIRST + 1] * factor)
        if COUNT == 2:
            made = made[:, :, :, :, None]
        else:
            made = tl.join(made, tl.join(x[FIRST + 2] * factor, x[FIRST + 3] * factor))
    return made


@triton.constexpr_function
def _log2(count):
    return count.bit_length() - 1


@triton.jit
def _over_warps(x, NW: tl.constexpr):
    """Sum over the first of five dimensions, the program's warps: numbers go to threads that have them of two warps. `tl.sum`
    would write them 64 bytes apart, into two banks of shared memory: 8 to 16 times as long.
    """
    if NW > 1:
        x = tl.permute(x, (1, 2, 3, 4, 0))
        for i in tl.static_range(1, _log2(NW)):
            shape: tl.constexpr = [x.shape[0], x.shape[1], x.shape[2], x.shape[3], NW >> i, 2]
            low, high = tl.split(tl.reshape(x, shape))
            x = low + high
        low, high = tl.split(x)
        made = low + high
    else:
        made = tl.sum(x, 0)
    return made


@triton.jit(
    do_not_specialize=[
        "room",
        "sink_room",
        "recent_room",
        "splits",
        "early",
        "less",
        "extra",
        "sink_parts",
        "parts",
        "share",
        "fan",
        "fans",
        "runs",
    ],
    do_not_specialize_on_alignment=["p_blocks", "p_sink", "p_recent"],  # rows of one tensor, as they come
)
def attend_kernel(
    p_q, p_exact_q, p_out, p_k, p_ks, p_v, p_vs, p_sink_k, p_sink_v, p_recent_k, p_recent_v,
    p_blocks, p_sink, p_recent, p_part, p_stat, p_count, p_kt, p_vt, p_k_sign, p_v_sign, p_order,
    p_first, p_near, room, sink_room, recent_room, splits, early, less, extra, sink_parts, parts, share, fan, fans, runs,
    factor, k_unit, v_unit,
    HEADS: tl.constexpr, RATIO: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, CHUNKS: tl.constexpr,
    AT_ONCE: tl.constexpr, ROWS: tl.constexpr,
    K_BITS: tl.constexpr, K_MODE: tl.constexpr, K_GROUP: tl.constexpr, K_STRIDE: tl.constexpr,
    K_TILES: tl.constexpr, K_WORDS: tl.constexpr,
    V_BITS: tl.constexpr, V_MODE: tl.constexpr, V_GROUP: tl.constexpr, V_STRIDE: tl.constexpr,
    V_TILES: tl.constexpr, V_WORDS: tl.constexpr,
    K_FULL: tl.constexpr, K_TIER: tl.constexpr,
    K_FOUR: tl.constexpr, K_SHARED: tl.constexpr, K_ENTRIES: tl.constexpr, K_PAIRS: tl.constexpr,
    V_FOUR: tl.constexpr, V_SHARED: tl.constexpr, V_ENTRIES: tl.constexpr, V_PAIRS: tl.constexpr,
    SAME: tl.constexpr, STEP: tl.constexpr, V_FIRST: tl.constexpr, WIDTH: tl.constexpr, PAIRED: tl.constexpr,
    K_FACTOR: tl.constexpr, V_FACTOR: tl.constexpr,
    K_SCALES: tl.constexpr, K_PER: tl.constexpr, K_HELD: tl.constexpr,
    V_SCALES: tl.constexpr, V_PER: tl.constexpr, V_HELD: tl.constexpr, SLOTS: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, RING: tl.constexpr, LONG: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Grid (batch, HEADS * CHUNKS, parts): programs of one part begin together, see `plan`. A row's blocks and `extra` ones
    are divided by `splits`; parts from `early` on have `less` of them fewer than the others, or none, and behind them `share`
    exact tokens each, `sink_parts` of the sink, the rest of recent ones. The last program of each `fan` parts merges them,
    the last of those `fans` what they merged: one program alone, which waits for each few parts anew, took 25 of 70 us for the
    100 parts of 1 x 131072 (H200).
    factor: softmax scale times log2(e). p_exact_q: p_q of sink and recent. k_unit, v_unit: of tables. LONG: as of `_over`.

    Keys before RoPE, PAIRS pairs of pieces of which it turns: p_first, p_near are `Rope.first_words` and `near_words`, runs
    how many runs of positions a row has in p_first, 0 where all rows share them.
    """
    SLICES: tl.constexpr = D // 16
    WIDE: tl.constexpr = D // 32 if PAIRED else SLICES  # slices of outputs
    ZEROS: tl.constexpr = D // V_GROUP if V_MODE == 2 and PAIRED == 0 else 0
    EACH: tl.constexpr = 2 if PAIRED else 1  # columns of a query row
    BYTES: tl.constexpr = PAIRED == 2
    ROOM: tl.constexpr = N // EACH
    i_split, i_batch = tl.program_id(2), tl.program_id(0)
    i_kv, i_chunk = tl.program_id(1) // CHUNKS, tl.program_id(1) % CHUNKS
    i_head = (i_batch * HEADS + i_kv).to(tl.int64)
    r = tl.arange(0, 16)
    column = tl.arange(0, N)
    n = i_chunk * ROOM + column // EACH
    b_row = n < RATIO * QUERIES
    o_q = ((i_head * RATIO + n % RATIO) * QUERIES + n // RATIO) * D

    # heads of scales
    norms = (i_batch.to(tl.int64) if K_SHARED else i_head, i_batch.to(tl.int64) if V_SHARED else i_head)
    sink, recent = tl.load(p_sink + i_batch), tl.load(p_recent + i_batch)
    blocks = tl.minimum(tl.load(p_blocks + i_batch), room)  # a graph may be replayed once too often
    start, stop = _share(i_split, blocks, splits, early, less, extra, NW, LONG)
    middle = start + (stop - start) // NW * NW
    SLOT: tl.constexpr = K_HELD + V_HELD
    K_ORDER: tl.constexpr = D if K_MODE == 4 else 0
    FETCH: tl.constexpr = ASM and SLOT > 0
    OWN: tl.constexpr = NW == 1 or BYTES or (K_MODE == 3 and V_MODE == 3)
    # what waits longest comes first, 0.5 to 1 us earlier (H200); not where the query is rotated meanwhile: that spills
    EARLY: tl.constexpr = FETCH and (K_MODE < 3 or K_MODE == IN_BYTES) and PAIRS == 0
    b_ring, o_slot = tl.zeros([NW, 1], tl.int32), 0
    thread, last = tl.arange(0, 32 * NW), tl.maximum(stop, 1) - 1
    lane = thread % 32
    swapped = lane * 16 ^ lane // 8 % 2 * 16
    # ahead of the ring, which waits for the count of blocks: the compiler would begin the ring behind the query's use
    if BYTES and K_MODE < 3:
        n_4 = i_chunk * ROOM + tl.arange(0, ROOM)
        channel = tl.arange(0, triton.next_power_of_2(D))
        o_4 = ((i_head * RATIO + n_4 % RATIO) * QUERIES + n_4 // RATIO) * D
        inside = (n_4 < RATIO * QUERIES)[:, None] & (channel < D)[None, :]
        b_q = tl.load(p_q + o_4[:, None] + channel[None, :], mask=inside, other=0.0)
    if EARLY:
        origins, base = _open_ring(
            p_k, p_ks, p_order, p_v, p_vs, i_head, norms, room, lane, i_split * 0, start, last, swapped, K_ORDER,
            K_HELD, K_WORDS, K_SCALES, K_PER, V_HELD, V_WORDS, V_SCALES, V_PER, K_ENTRIES + V_ENTRIES, SLOTS, NW,
        )  # fmt: skip

    # each row's query times a power of two, so that its largest element lies in [16, 32); scales of outer groups multiply it
    # in float16 and may be 43669 (2 bits, keys of +-65504): in [0.5, 1) there
    PEAK: tl.constexpr = 0.5 if (K_MODE == 2 and PAIRS == 0) or K_MODE == 4 else 16.0
    b_peak = tl.zeros([N], tl.float32)
    if K_MODE == IN_BYTES:  # one maximum across lanes for all slices
        b_high = tl.zeros([16, N], tl.float32)
        for i in tl.static_range(SLICES):
            b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0)
            b_high = tl.maximum(b_high, tl.abs(b_q.to(tl.float32)))
        b_peak = tl.max(b_high, 0)
    for i in tl.static_range(0 if BYTES else SLICES):
        b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0)
        b_peak = tl.maximum(b_peak, tl.max(tl.abs(b_q.to(tl.float32)), 0))
    # at least 2^-100, of grids and before RoPE 2^-76: LOW times `unit` must stay far below every score
    lowest: tl.constexpr = (51 if K_MODE == 3 or PAIRS > 0 else 27) << 23
    exponent = tl.maximum(b_peak.to(tl.int32, bitcast=True) & 0x7F800000, lowest)
    b_down = ((254 << 23) - exponent).to(tl.float32, bitcast=True) * PEAK
    b_up = exponent.to(tl.float32, bitcast=True) * (1 / PEAK)
    q, plain, sums, plain_q = (), (), (), ()
    i_group = i_head * CHUNKS + i_chunk
    # where this program's output will lie
    p_fit = p_part.to(tl.pointer_type(tl.float16)) + (i_group * parts + i_split) * (2 * ROOM * D)
    if K_MODE == IN_BYTES:
        plain = _rotated(p_q, p_k_sign, o_q, b_row, b_down, i_kv, SLICES, D, WIDTH, 1, False, NW, N)
        b_high = tl.full([NW, 16, N], 2.0**-24, tl.float32)
        for i in tl.static_range(SLICES):
            b_high = tl.maximum(b_high, tl.abs(plain[i]))
        b_step = tl.max(b_high, 1) * (1 / FULL_QUERY)
        b_finite = tl.sum(plain[0] - plain[0], 1)  # 0, or NaN where a number is not finite, which integers do not show
        if ASM:
            q = _rotated_bytes(plain, 1 / b_step, SLICES, NW, N)
        else:
            for i in tl.static_range(SLICES):
                q = q + (tl.floor(plain[i] / b_step[:, None, :] + 0.5),)
        b_up = b_up * tl.max(b_step + b_finite, 0)
        plain = ()
    elif BYTES:
        # as integers, which order floats that are not negative, NaN above all
        b_up = tl.max(b_q.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        b_up = tl.maximum(b_up, 27 << 23).to(tl.float32, bitcast=True)  # 2^-100
        b_finite = b_up - b_up  # 0, or NaN where a number is not finite: integers do not show it
        n_t = i_chunk * ROOM + r % 8 // 2
        there = n_t < RATIO * QUERIES
        o_t = ((i_head * RATIO + n_t % RATIO) * QUERIES + n_t // RATIO) * D
        if K_MODE == 2:  # powers of two: below 1
            b_up = (b_up.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 2.0
            b_down = tl.reshape(tl.broadcast_to((1 / b_up)[None, :, None], [2, ROOM, 2]), [16])
            plain_q = _plain_queries(p_q, o_t, there, b_down, D, NW)
            if ASM:
                for _ in tl.static_range((SLICES + 3) // 4):
                    q = q + (_spot(NW, 8),)
                q = q + (_spot(NW, 8).to(tl.float32),)
        else:
            b_up = b_up * (1 / FULL_QUERY)
            b_down = tl.reshape(tl.broadcast_to((1 / b_up)[None, :, None], [2, ROOM, 2]), [16])
            if ASM:
                q = _bytes_of_queries(p_q, o_t, there, b_down, D, NW)
        b_up = tl.reshape(tl.broadcast_to((b_up + b_finite)[:, None], [ROOM, 2]), [N])
        if not ASM:
            for i in tl.static_range(SLICES):
                b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0)
                b_q = b_q.to(tl.float32) / b_up[None, :]
                b_q = b_q.to(tl.float16).to(tl.float32) if K_MODE == 2 else tl.floor(b_q + 0.5)
                q = q + (tl.broadcast_to(b_q[None], [NW, 16, N]),)
        if ASM and K_MODE < 2:
            sums = _begun(q, SLICES, K_STRIDE, K_BITS, K_MODE)
    elif K_MODE == 4:
        channel = tl.arange(0, triton.next_power_of_2(D))
        b_q = tl.load(p_q + o_q[None, :] + channel[:, None], mask=b_row[None, :] & (channel < D)[:, None], other=0.0)
        b_q = (b_q.to(tl.float32) * b_down[None, :]).to(tl.float16)
        at, inside = channel[:, None] * N + column[None, :], channel[:, None] < D + 0 * column[None, :]
        _fit_table(p_fit, b_q, at, inside, 2 * N * triton.next_power_of_2(D), ASM)
        tl.debug_barrier()
    elif K_MODE == 3:
        plain = _rotated(p_q, p_k_sign, o_q, b_row, b_down, i_kv, SLICES, D, WIDTH, K_FACTOR, K_FOUR, NW, N)
        for i in tl.static_range(SLICES):
            q = q + (plain[i].to(tl.float16),)
    elif PAIRS > 0:
        for i in tl.static_range(SLICES):
            if K_MODE < 2 and i >= 2 * PAIRS:
                b_q = _joined_queries(p_q + o_q[None, :] + i * 16, b_row[None, :], N)
            else:
                b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0)
            b_q = (b_q.to(tl.float32) * b_down[None, :]).to(tl.float16)
            q = q + (tl.broadcast_to(b_q[None], [NW, 16, N]),)
        if ASM:
            _names(p_near, K_BITS)
    else:
        TALL: tl.constexpr = max(N, 16)
        if K_MODE == 2:  # by rows, see `_transposed`
            tall = tl.arange(0, TALL)
            n_t = i_chunk * ROOM + tall // EACH
            b_there = (tall < N) & (n_t < RATIO * QUERIES)
            o_t = ((i_head * RATIO + n_t % RATIO) * QUERIES + n_t // RATIO) * D
            b_high = tl.zeros([TALL], tl.float32)
            for i in tl.static_range(SLICES):
                b_q = tl.load(p_q + o_t[:, None] + (i * 16 + r)[None, :], mask=b_there[:, None], other=0.0)
                b_high = tl.maximum(b_high, tl.max(tl.abs(b_q.to(tl.float32)), 1))
            top = tl.maximum(b_high.to(tl.int32, bitcast=True) & 0x7F800000, lowest)
            b_shrink = ((254 << 23) - top).to(tl.float32, bitcast=True) * PEAK
        b_none = 0.0
        if K_MODE == 1:  # zeros in the layout of a product: without them sums, and scores with them, take another
            b_none = tl.dot(tl.zeros([NW, 16, 16], tl.float16), tl.zeros([NW, 16, N], tl.float16))
        for i in tl.static_range(SLICES):
            b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0)
            b_q = b_q.to(tl.float32) * b_down[None, :]
            place = _key_place(0, i, K_BITS, K_MODE, K_STRIDE)
            b_fit = tl.broadcast_to((b_q / place).to(tl.float16)[None], [NW, 16, N])
            if K_MODE == 2:
                b_q = tl.load(p_q + o_t[:, None] + (i * 16 + r)[None, :], mask=b_there[:, None], other=0.0)
                b_q = b_q.to(tl.float32) * b_shrink[:, None]
                q = q + (tl.broadcast_to((b_q / place).to(tl.float16)[None], [NW, TALL, 16]),)
                plain = plain + (_transposed(tl.broadcast_to(b_q.to(tl.float16)[None], [NW, TALL, 16]), NW, N),)
            else:
                q = q + (b_fit,)
                b_total = tl.sum(b_fit.to(tl.float32), 1) * place
                if i % (K_GROUP // 16) == 0:
                    b_group = b_total
                else:
                    b_group += b_total
                if (i + 1) % (K_GROUP // 16) == 0:
                    b_group = b_group * (_unit(K_BITS, K_MODE) * 2.0**-24)
                    sums = sums + (tl.broadcast_to(b_group[:, None, :], [NW, 16, N]) + b_none,)
    scale: tl.constexpr = WIDTH**-0.5 if K_MODE == 3 or K_MODE == IN_BYTES else 1.0 if PAIRS > 0 or BYTES else 2.0**24
    run = i_batch * runs + tl.cdiv(sink_room, 32)  # of the first block
    unit = tl.broadcast_to((b_up * (factor * k_unit * scale))[None, :], [NW, N])

    if ASM and PAIRED and K_MODE == 3:
        _parities()
    if ASM and K_ENTRIES + V_ENTRIES > 0:  # noqa: SIM102
        if i_split < splits:
            _tables(p_kt, p_vt, i_split * 0, K_ENTRIES, K_PAIRS, V_ENTRIES, V_PAIRS, SAME, STEP)
    b_m = tl.full([NW, 16, N], LOW, tl.float32)  # rows alike
    places, tables = b_m, ()
    if BYTES and ASM:
        HALVES: tl.constexpr = _halved(K_WORDS) or _halved(V_WORDS)
        b_m, places = _byte_state(
            unit, base + tl.arange(0, NW) * (SLOT * SLOTS), D, K_MODE, K_GROUP, V_MODE, HALVES, NW, N
        )  # fmt: skip
        if K_MODE == 2:
            sums = (_byte_base(unit, NW, N),)
        plain = _constants(room, constants(SLICES, V_TILES, V_BITS, V_MODE), NW, N)
        tables = _byte_tables(p_kt, points_tensors(K_MODE, K_GROUP), NW, N)
        if not SAME:
            tables = tables + _byte_tables(p_vt, points_tensors(V_MODE, V_GROUP), NW, N)
    b_l = tl.zeros([NW, 16, N], tl.float32)  # rows alike, except where values are of a grid
    acc = ()
    for _ in tl.static_range(WIDE + ZEROS):
        acc = acc + (tl.zeros([NW, 16, N], tl.float32),)
    fit = 0
    if K_MODE == 4:
        TALL: tl.constexpr = max(N, 16)
        fit = tl.arange(0, TALL)[None, :, None] * 2 + _spot(NW, 16, TALL)
    if FETCH and not EARLY:
        origins, base = _open_ring(
            p_k, p_ks, p_order, p_v, p_vs, i_head, norms, room, lane, i_split * 0, start, last, swapped, K_ORDER,
            K_HELD, K_WORDS, K_SCALES, K_PER, V_HELD, V_WORDS, V_SCALES, V_PER, K_ENTRIES + V_ENTRIES, SLOTS, NW,
        )  # fmt: skip
    if FETCH:
        b_ring += (base + tl.arange(0, NW) * (SLOT * SLOTS))[:, None]
        to = base + thread // 32 * (SLOT * SLOTS)
    for first in tl.range(start, stop if BYTES else middle, NW, num_stages=STAGES):
        if FETCH:
            _arrive(SLOTS - 2, OWN, NW)
            behind = tl.where(o_slot == 0, SLOT * (SLOTS - 1), o_slot - SLOT)
            _fetch(
                origins, first + (SLOTS - 1) * NW, last, to + behind, lane, swapped, K_ORDER,
                K_HELD, K_WORDS, K_SCALES, K_PER, V_HELD, V_WORDS, V_SCALES, V_PER, NW,
            )  # fmt: skip
        if BYTES:
            b_m, b_l, acc, q = _byte_step(
                p_k, p_ks, p_v, p_vs, i_head, norms, first, start, stop, o_slot, places, q, sums, plain, plain_q, tables,
                p_kt, p_vt, unit, b_m, b_l, acc, SAME,
                SLICES, K_STRIDE, K_TILES, K_WORDS, K_BITS, K_MODE, K_GROUP, K_HELD,
                V_STRIDE, V_TILES, V_WORDS, V_BITS, V_MODE, V_GROUP, V_HELD, room, NW, N, ASM,
            )  # fmt: skip
        else:
            b_m, b_l, acc = _step(
                p_k, p_ks, p_v, p_vs, i_head, first, stop, b_ring + o_slot, q, plain, sums, unit, b_m, b_l, acc,
                p_kt, p_vt, norms, p_order, p_fit, fit, p_first, p_near, run, PAIRS,
                SLICES, STEP, K_FOUR, V_FIRST, PAIRED, K_FULL, K_TIER, K_STRIDE, K_TILES, K_WORDS, K_BITS, K_MODE, K_GROUP,
                K_HELD, V_STRIDE, V_TILES, V_WORDS, V_BITS, V_MODE, V_GROUP, room, NW, N, ASM, False,
            )  # fmt: skip
        if FETCH:
            o_slot = tl.where(o_slot == SLOT * (SLOTS - 1), 0, o_slot + SLOT)
    if NW > 1 and not BYTES:
        for first in tl.range(middle, stop, NW, num_stages=1):
            if FETCH:
                _arrive(0, OWN, NW)
            b_m, b_l, acc = _step(
                p_k, p_ks, p_v, p_vs, i_head, first, stop, b_ring + o_slot, q, plain, sums, unit, b_m, b_l, acc,
                p_kt, p_vt, norms, p_order, p_fit, fit, p_first, p_near, run, PAIRS,
                SLICES, STEP, K_FOUR, V_FIRST, PAIRED, K_FULL, K_TIER,
                K_STRIDE, K_TILES, K_WORDS, K_BITS, K_MODE, K_GROUP, K_HELD,
                V_STRIDE, V_TILES, V_WORDS, V_BITS, V_MODE, V_GROUP, room, NW, N, ASM, True,
            )  # fmt: skip
    if FETCH:
        _arrive(0, OWN, NW)
    if BYTES and ASM:
        if V_MODE == 2:
            shift = tl.sum(_spread_state(b_m, (3, 3, -1, -1)), 1)
        b_l = _spread_state(b_m, (1, 1, -1, -1))
        b_m = _spread_state(b_m, (0, 0, 0, 0))
    b_m = tl.max(b_m, 1)
    out = ()
    if BYTES:
        b_l = tl.sum(b_l, 1)
        odd = column % 2 == 1
        for i in tl.static_range(WIDE):
            b_unit = tl.where(
                odd, 1 / _byte_place(2 * i + 1, V_BITS, V_MODE), 1 / _byte_place(2 * i, V_BITS, V_MODE)
            ) * (1 / FULL_PROBABILITY)
            # sums show what integers do not
            b_o = acc[i] * b_unit[None, None, :] + (b_l - b_l)[:, None, :]
            if V_MODE == 2 and ASM:
                b_o += shift[:, None, :]
            out = out + (b_o,)
    elif V_MODE == 3:
        b_l = tl.sum(b_l, 1)
        out = acc
    else:
        b_l = tl.max(b_l, 1)
        for i in tl.static_range(SLICES):
            b_o = acc[i] * (2.0**24 / _place(i, V_BITS))
            if V_MODE == 2:
                b_o += acc[SLICES + i * 16 // V_GROUP]
            out = out + (b_o,)

    # how channels of values lie in outputs
    LAID: tl.constexpr = 1 if V_MODE == IN_BYTES and V_GROUP > 1 else PAIRED
    if V_MODE == 3 or V_MODE == IN_BYTES:
        turned = ()
        for i in tl.static_range(WIDE):
            b_o = tl.dot(_hadamard(NW, tl.float32), out[i], input_precision="tf32x3")
            turned = turned + (_of_parity(b_o, NW, N) if PAIRED else b_o,)
        turned = _across(turned, WIDE, WIDTH // (16 * EACH), V_FACTOR, True)
        turned = _butterflies(turned, WIDE, WIDTH // (16 * EACH))
        out = ()
        for i in tl.static_range(WIDE):
            channel = _value_channels(i, r[:, None], column[None, :] % EACH, LAID, V_FOUR)
            sign = _sign(p_v_sign, i_kv * D + channel) * (v_unit * WIDTH**-0.5)
            out = out + (turned[i] * sign[None],)

    # what tables and tiers leave of shared memory
    FEW: tl.constexpr = 2 if K_ENTRIES + V_ENTRIES + PAIRS == 0 and K_MODE < 4 else 1
    b_behind = QUERIES - 1 - n // RATIO
    if i_split >= early:
        own = (i_split - early) * share
        exact = out
        if BYTES:  # slices of one parity each, in whose columns of the other lies what is not read
            exact = ()
            for i in tl.static_range(SLICES):
                exact = exact + (out[i // 2],)
        if own < sink_parts * share:
            b_m, b_l, exact = _exact(
                p_sink_k, p_sink_v, p_exact_q, o_q, b_row, i_head, sink_room, 0, sink + tl.minimum(recent - b_behind, 0),
                own, tl.minimum(own + share, sink), factor, b_m, b_l, exact,
                SLICES, PAIRED == 1, V_FOUR, FEW, NW, N, ASM, False, p_first, p_near, i_batch * runs, 0, 0, PAIRS,
            )  # fmt: skip
        else:
            own -= sink_parts * share
            b_m, b_l, exact = _exact(
                p_recent_k, p_recent_v, p_exact_q, o_q, b_row, i_head, recent_room, blocks * 32 % recent_room,
                recent - b_behind, own, tl.minimum(own + share, recent), factor, b_m, b_l, exact,
                SLICES, PAIRED == 1, V_FOUR, FEW, NW, N, ASM, RING,
                p_first, p_near, run + blocks, tl.where(blocks > 0, 0, sink_room - sink),
                sink - tl.cdiv(sink_room, 32) * 32, PAIRS,
            )  # fmt: skip
        out = exact
        if BYTES:
            out = ()
            for i in tl.static_range(WIDE):
                out = out + (tl.where((column % 2 == 1)[None, None, :], exact[2 * i + 1], exact[2 * i]),)

    # the program's warps into one, then to memory
    b_top = tl.max(b_m, 0)
    fade = tl.exp2(b_m - b_top[None, :])
    o_part = (i_group * parts + i_split) * ROOM + column // EACH
    TOGETHER: tl.constexpr = _at_a_time(WIDE, N)
    for i in tl.static_range(0, WIDE, TOGETHER):
        which = i + _numbers(TOGETHER)
        b_o = _over_warps(_joined(out, i, TOGETHER, fade[:, None, :]), NW)
        channel = _value_channels(which, r[:, None, None, None], column[None, :, None, None] % EACH, PAIRED, V_FOUR)
        if LAID != PAIRED:  # exact tokens' outputs are never rotated, and have programs of their own
            own = _value_channels(which, r[:, None, None, None], column[None, :, None, None] % EACH, LAID, V_FOUR)
            channel = tl.where(i_split < early, own, channel)
        tl.store(p_part + o_part[None, :, None, None] * D + channel, b_o, mask=b_row[None, :, None, None])
    o_stat = (i_group * parts + i_split) * 2 * ROOM + column // EACH
    tl.store(p_stat + o_stat, b_top, mask=b_row)
    tl.store(p_stat + o_stat + ROOM, tl.sum(b_l * fade, 0), mask=b_row)

    tl.debug_barrier()  # all of the program's stores come before its arrival
    _merge(
        p_out, p_part, p_stat, p_count, i_head, i_group, i_chunk, i_split, parts, fan, fans,
        RATIO, QUERIES, D, AT_ONCE, ROWS, ROOM, ASM,
    )  # fmt: skip


@triton.jit
def _share(i_split, blocks, splits, early, less, extra, NW: tl.constexpr, LONG: tl.constexpr):
    """A part's first block and the one behind its last."""
    each = tl.cdiv(_over(blocks + extra + splits - 1, splits, LONG), NW) * NW
    cut = tl.minimum(less, each)
    stop = tl.minimum((i_split + 1) * each - tl.maximum(i_split + 1 - early, 0) * cut, blocks)
    start = tl.minimum(i_split * each - tl.maximum(i_split - early, 0) * cut, stop)
    return start, stop


@triton.jit
def _over(a, b, LONG: tl.constexpr = False):
    """a // b, exact: LONG for any a, else for those below SHORT: 9 instructions, of which 4 wait for a, in place of 25."""
    if LONG:
        out = a // b
    else:
        out = ((a.to(tl.float32) + 0.5) * (1.0 / b.to(tl.float32))).to(tl.int32)
    return out


@triton.jit
def _merge(
    p_out, p_part, p_stat, p_count, i_head, i_group, i_chunk, i_split, parts, fan, fans,
    RATIO: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr,
    AT_ONCE: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """What the last programs to arrive do. Counters of a group: of its fans, and of the parts of each; left at zero."""
    own = _over(i_split, fan)
    p_arrived = p_count + i_group * (fans + 1)
    p_own = p_arrived + 1 + own
    first = own * fan
    count = tl.minimum(fan, parts - first)
    first += i_group * parts
    row, column = tl.arange(0, ROWS), tl.arange(0, triton.next_power_of_2(D))
    n = i_chunk * N + row
    live = n < RATIO * QUERIES
    inside = live[:, None] & (column < D)[None, :]
    if tl.atomic_add(p_own, 1, sem="acq_rel") == count - 1:
        tl.store(p_own, 0)
        b_m, b_l, b_o = _merged(p_part, p_stat, first, 1, count, D, ROWS, AT_ONCE, N, ASM)
        last = fans == 1
        if fans > 1:
            tl.debug_barrier()  # what is written over has been read
            tl.store(p_part + (first * N + row)[:, None] * D + column[None, :], b_o, mask=inside)
            tl.store(p_stat + first * 2 * N + row, b_m, mask=live)
            tl.store(p_stat + first * 2 * N + N + row, b_l, mask=live)
            tl.debug_barrier()
            last = tl.atomic_add(p_arrived, 1, sem="acq_rel") == fans - 1
            if last:
                tl.store(p_arrived, 0)
                b_m, b_l, b_o = _merged(p_part, p_stat, i_group * parts, fan, fans, D, ROWS, AT_ONCE, N, ASM)
        if last:
            b_o = b_o / tl.where(b_l > 0, b_l, 1.0)[:, None]
            # not as the query's offsets are computed, which then would be kept, in memory, since the start
            o_out = (n % RATIO * QUERIES + n // RATIO)[:, None] * D + column[None, :]
            p_out += i_head * (RATIO * QUERIES * D)
            tl.store(p_out + o_out, _as(b_o, p_out.dtype.element_ty, ASM), mask=inside)


@triton.jit
def _merged(
    p_part, p_stat, first, stride, count,
    D: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Maxima and sums [ROWS], outputs [ROWS, D] of `count` parts, each `stride` behind the one before. Rows that no query has
    are what lies in memory. Parts behind the last are it once more, and copies share its weight: a mask would be an
    instruction for each number, and no weight NaN where its output is infinite.
    """
    WIDE: tl.constexpr = triton.next_power_of_2(D)
    row, number = tl.arange(0, ROWS), tl.arange(0, ROWS * WIDE)
    column = number % WIDE
    b_m = tl.full([ROWS], LOW, tl.float32)
    b_l = tl.zeros([ROWS], tl.float32)
    b_o = tl.zeros([ROWS, WIDE], tl.float32)
    for begin in tl.range(0, count, AT_ONCE):
        i = begin + tl.arange(0, AT_ONCE)
        part = first + tl.minimum(i, count - 1) * stride
        o_stat = part[:, None] * 2 * N + row[None, :]
        m = tl.load(p_stat + o_stat, cache_modifier=".cg")
        l = tl.load(p_stat + o_stat + N, cache_modifier=".cg")
        o_part = part[:, None] * (N * D) + (number // WIDE * D + column)[None, :]
        if WIDE > D:
            o = tl.load(p_part + o_part, mask=(column < D)[None, :] & (o_part >= 0), other=0.0, cache_modifier=".cg")
        else:
            o = tl.load(p_part + o_part, cache_modifier=".cg")
        # rows and channels as one while they are read: lanes left over by 64 channels then take another row, not another part,
        # with which both would hold, and write, the same sum
        o = tl.reshape(o, [AT_ONCE, ROWS, WIDE])
        b_new = tl.maximum(b_m, tl.max(m, 0))
        copies = tl.maximum(begin + AT_ONCE - count + 1, 1).to(tl.float32)
        weight = tl.exp2(m - b_new[None, :]) * tl.where(i < count - 1, 1.0, 1.0 / copies)[:, None]
        fade = tl.exp2(b_m - b_new)
        b_l = b_l * fade + tl.sum(rounded_product(l, weight, ASM), 0)
        b_o = b_o * fade[:, None] + tl.sum(o * weight[:, :, None], 0)
        b_m = b_new
    return b_m, b_l, b_o


Exact = tuple[Tensor, Tensor, Tensor]  # keys, values (B, H, room, D), counts (B,) int32


def _mode(form: Form) -> int:
    """The kernel's K_MODE or V_MODE: of integers 0 to 2, by their groups; 3 a grid that is looked up."""
    if form.vector:
        return POINTS if form.in_bytes else 3
    return 4 if form.tiered else {(True, True): 0, (True, False): 1, (False, False): 2}[form.inner, form.symmetric]


def by_bytes(keys: Form, values: Form, rows: int, warps: int, pairs: int = 0) -> bool:
    """Whether a kernel takes products of 8-bit integers: of what `fits_bytes`, where both parts of all query rows are columns
    of one product. Of grids in bytes, which nothing else reads, more rows are taken four at a time.
    """
    if pairs or (rows > 4 and not (keys.in_bytes or values.in_bytes)):
        return False
    # of several warps the next block may be of another group each time
    return (keys.inner or warps == 1) and fits_bytes(keys, values)


def columns(keys: Form, values: Form, rows: int, in_bytes: bool) -> int:
    """Of a product, for so many query rows; more rows are programs of their own, which read blocks that others have just read.
    As many as compiled code holds in registers: 32 of integers at D = 128 spilled 808 bytes and took 7.9 instructions a number
    in place of 2 times 2.7 (sm_90, Triton 3.6).
    """
    if in_bytes or (keys.dim > 128 and not looked_up(keys, values)):
        return 8
    most = 32 if values.paired and keys.dim <= 128 else 16
    wide: int = triton.next_power_of_2(rows) * (1 + values.paired)
    return min(max(wide, 8), most)


def settings(
    keys: Form, values: Form, heads: int, ratio: int, queries: int, warps: int, same: bool = True, pairs: int = 0
) -> dict[str, int]:
    """Compile-time constants of attend_kernel that follow from the shapes and the warps. None follows from the batch, the
    length or the splits, so that a model's decode steps share one compiled kernel, or two (`chosen`). same: keys and values of
    one bit width are of one grid. pairs: Rope.pairs of keys before RoPE.
    """
    rows = ratio * queries
    in_bytes = by_bytes(keys, values, rows, warps, pairs)
    if (keys.in_bytes or values.in_bytes) and not in_bytes:
        raise ValueError(
            f"{keys} and {values}, {warps} warps a program: only products of bytes read grids in bytes; pack them otherwise"
        )
    each = 2 if values.paired or in_bytes else 1  # columns of a query row
    wide = columns(keys, values, rows, in_bytes)
    merged = min(triton.next_power_of_2(rows), wide // each)
    made = {"HEADS": heads, "RATIO": ratio, "QUERIES": queries, "D": keys.dim, "N": wide, "NW": warps}
    made |= {
        "CHUNKS": -(-rows * each // wide),
        "ROWS": merged,
        "WIDTH": rotation_width(keys.dim),
        "PAIRED": 2 if in_bytes else int(values.paired),
    }
    # merged in so many registers a thread; 128 spill of many rows or channels, of grids, which have that many in all, and
    # before RoPE, and leave room for a program less of tiers: MixKVQ at G = 32 took 359 us in place of 329 (H200)
    plain = in_bytes or not (keys.vector or values.vector or keys.tiered or pairs)
    held = 128 if plain and merged <= 4 and keys.dim <= 128 else 64
    at_once = max(1, held * 32 * warps // (merged * triton.next_power_of_2(keys.dim)))
    made["AT_ONCE"] = 1 << (at_once.bit_length() - 1)
    for name, form in (("K", keys), ("V", values)):
        entries, numbers = ENTRIES[form.bits] if form.vector and not form.in_bytes else (0, 2)
        made |= {f"{name}_BITS": form.bits, f"{name}_MODE": _mode(form)}
        made |= {f"{name}_GROUP": form.vector if form.in_bytes else form.group, f"{name}_STRIDE": form.pieces}
        made |= {f"{name}_TILES": form.tiles, f"{name}_WORDS": form.words}
        made |= {f"{name}_FACTOR": form.factor, f"{name}_FOUR": form.vector == 4, f"{name}_SHARED": form.norm_heads > 1}
        made |= {f"{name}_ENTRIES": entries, f"{name}_PAIRS": numbers // 2}
        made |= {f"{name}_SCALES": form.scales, f"{name}_PER": form.scale_blocks}
        made |= {f"{name}_HELD": 2 * (form.words + form.scales) + (form.dim if form.tiered else 0)}
    made |= {"K_FULL": keys.full // 16, "K_TIER": keys.four // 16}
    made |= {"K_STRIDE": keys.fields} if keys.tiered else {}
    made["PAIRS"] = pairs
    if pairs:  # codes are numbers before they meet the query: their own way from memory
        made["K_HELD"] = 0
    slot, ring = made["K_HELD"] + made["V_HELD"], RING_OF_FEW if in_bytes and warps > 1 else RING
    made["SLOTS"] = max(2, min(4, ring // slot)) if slot else 0
    alike = keys.bits == values.bits and keys.in_bytes == values.in_bytes
    made["SAME"] = same and alike and bool(keys.vector) and bool(values.vector)
    own = 0 if made["SAME"] else made["V_ENTRIES"]
    made["STEP"] = ALIGNED if made["K_ENTRIES"] + own <= 320 else ALIGNED - 1  # at most 40 KB
    made["V_FIRST"] = 0 if made["SAME"] else made["K_ENTRIES"] << made["STEP"]
    return made


PARTS = 192  # of a group, at most
SHORT = 1 << 20  # what `_over` divides by a product of float32
SPARE = 1 << 14  # of that, for what is added to a row's blocks
MOST_AT_ONCE, MOST_WARPS = 32, 64  # programs, and their warps, that a multiprocessor runs at a time
RING = 8192  # bytes of a warp: blocks on their way are at least two, at most four
# of several warps and products of bytes: 4/4 at 1 x 32768 took 20.1 us in place of 21.0 (H200)
RING_OF_FEW = 16384
FEW = 200  # blocks a multiprocessor, below which programs may have several warps, see `chosen`
ALONE = 1 << 20  # `less` of exact tokens with programs of their own


class Plan(NamedTuple):
    """How a group's tokens are shared out. parts: programs, the last `exact` of which have `share` tokens of sink or window
    each, and `less` turns over packed tokens fewer than the others, or none (ALONE).
    """

    parts: int
    exact: int
    share: int
    less: int

    def numbers(self) -> tuple[int, int, int, int]:
        """The kernel's splits, early, less and extra."""
        early = self.parts - self.exact
        if self.less == ALONE:
            return early, early, ALONE, 0
        return self.parts, early, self.less, self.exact * self.less


@functools.lru_cache(4096)
def plan(
    groups: int, blocks: int, windows: tuple[int, int], warps: int, slots: int, carried: bool, launch: Launch
) -> Plan:
    """For `groups` of query rows on a GPU that runs `slots` programs at a time. All take about equally long, so that it counts
    in how many rounds they run, the last of which takes as long as the others, however few programs it has. carried: whether
    programs of packed tokens may have exact ones, too.

    A multiprocessor gives programs of one warp to its four schedulers in turn, and waits for the one whose turn it is: short
    programs among long ones leave room that nobody takes (10.2 of 12 programs at a time in the mean, Base at 32 x 32768). So
    programs of a round begin together (all groups' first parts, then their second ones) and take equally long. H200, us, with
    11 parts and exact tokens' programs between them, with 6 and those behind, with 6 that have exact tokens, too: Base 239,
    233, 229; 2/2 183, 172, 168; KIVI at G = 32 245, 229, 228, G = 128 190, 171, 172.
    """
    several = warps > 1
    start, merging = (24, launch.merging or 4) if several else (10, launch.merging or 15)
    tile, turns = 16 * warps, max(1, -(-blocks // warps))

    def carrying(count: int) -> tuple[int, int, int]:
        """Programs that have exact tokens, how many, and turns that they have fewer: a tile takes about four."""
        tiles = max(1, -(-sum(windows) // (tile * count)))
        while (exact := sum(-(-window // (tile * tiles)) for window in windows)) > count:
            tiles += 1
        return exact, tile * tiles, 4 * tiles if launch.less is None else launch.less // warps

    def apart(count: int) -> tuple[int, int]:
        share, exact = shares(windows, False, warps)
        return shares(windows, True, warps) if groups * (count + exact) > slots else (share, exact)

    def time(count: int, alone: bool) -> float:
        """In turns."""
        rounds = -(-groups * count // slots)
        if not alone:
            exact, share, less = carrying(count)
            each = start + max((turns + exact * less) / count, 4 * (share // tile))
            return rounds * each + each / 64 if several else rounds * math.ceil(each)
        share, exact = apart(count)
        each, tiles = start + turns / count, -(-share // tile)
        late = groups * (count + exact) > slots * rounds  # they find no room until others end
        if several:
            behind = (each if rounds == 1 else start + 16) if late else 0
            return max(rounds * each + behind, start + 16) + each / 64
        each = math.ceil(each)
        return rounds * each + 4 * tiles if late else max(rounds * each, start + 5 * tiles - 2)

    least = min(PARTS, -(-turns // launch.length)) if launch.length else 1
    most = max(least, min(PARTS, turns, math.isqrt(merging * turns)))
    counts = [launch.parts] if launch.parts else range(least, most + 1)
    # tables in shared memory are busy all the time, also while others have exact tokens: only where those are most of the work
    pays = not several or (turns < 150 and 9 * groups > slots)
    both = carried and (pays if launch.less is None else launch.less != ALONE)
    ways = [(count, False) for count in counts if count > 1] if both else []
    if not ways or not (several or launch.less is not None):
        ways += [(count, True) for count in counts]
    count, alone = min(ways, key=lambda way: time(*way))  # of those that take as long the first
    if alone:
        share, exact = apart(count)
        return Plan(count + exact, exact, share, ALONE)
    exact, share, less = carrying(count)
    return Plan(count, exact, share, less * warps if launch.less is None else launch.less)


@functools.lru_cache(4096)
def fan_of(parts: int, at_once: int) -> int:
    """How many parts are merged first; all of them where a second round takes longer: reading `at_once` parts is a wait for
    memory, another round, which writes and counts, about two.
    """

    def waits(fan: int) -> int:
        each = math.ceil(fan / at_once)
        return each if fan >= parts else each + 2 + math.ceil(math.ceil(parts / fan) / at_once)

    best: int = min([parts, *range(at_once, parts, at_once)], key=waits)
    return best


def shares(windows: tuple[int, int], crowded: bool, warps: int = 1) -> tuple[int, int]:
    """Sink or recent tokens of a program, and how many programs windows of so many tokens take, at most about 16: few where
    multiprocessors have enough to do, else as many as finish before those of packed tokens, a turn of a warp if one is alone.
    """
    least = 128 if crowded else 16 if warps == 1 else 32
    share = max(1, -(-sum(windows) // (16 * least))) * least
    return share, sum(-(-window // share) for window in windows)


@dataclass(frozen=True)
class Launch:
    """warps: blocks at a time a program. stages: of the loads in flight that do not go through the ring. registers: a thread
    at most, 0: as the compiler likes. In the place of what `plan` chooses, 0 or None: its own: length: turns of a program at
    most; parts: programs of packed tokens; less: `Plan.less`. fan: of `fan_of`. merging: parts that are merged in a turn.
    """

    warps: int = 1
    stages: int = 3
    length: int = 0
    registers: int = 0
    parts: int = 0
    fan: int = 0
    less: int | None = None
    merging: int = 0


def usual(keys: Form, values: Form, rows: int = 1, turned: bool = False) -> Launch:
    """For so many query rows a kv head; turned: keys before RoPE. A warp alone waits for no other: 2/2 took 257 us in place of
    318 with four (H200). Tables of grids lie in shared memory once a program, so that there four warps share one. At 168
    registers a multiprocessor runs 12 warps and nothing is spilled; at 144 it is, and 2/2 took 258 us in place of 232.
    """
    # outputs of values without pairs, or of more rows, are as many more, and spill with 128 registers
    if looked_up(keys, values):
        wide = columns(keys, values, rows, False)
        enough = 128 if wide == 8 else 168 if wide == 16 and keys.dim <= 128 else 0
        return Launch(warps=4, registers=enough if values.paired else 0)
    if keys.dim > 128 or (rows > 8 and not (keys.in_bytes or values.in_bytes)):
        return Launch()
    if turned:
        # At 176 and more KIVI took 505 to 528 us in place of 431 (H200); of 3 bits they spill with 192, outer ones with 208.
        return Launch(registers=168 if keys.bits != 3 else 200 if keys.inner else 216)
    return Launch(registers=176 if keys.tiered else 168)


def launches(keys: Form, values: Form, rows: int = 1, turned: bool = False) -> tuple[Launch, ...]:
    """All that `chosen` takes: the usual one and, of integers that are multiplied as bytes, one of four warps a program."""
    own = usual(keys, values, rows, turned)
    other = turned or keys.vector or values.vector or keys.dim > 128
    if own.warps > 1 or other or not by_bytes(keys, values, rows, 4):
        return (own,)
    # 8 bits: with Triton's 32 KB 104 KB, where GPUs of compute capability 8.6 and 8.9 have 99
    if _reserved(settings(keys, values, 1, 1, 1, 4)) > 64 << 10:
        return (own,)
    return own, Launch(warps=4, registers=168, merging=3)


def chosen(keys: Form, values: Form, rows: int, turned: bool, groups: int, room: int, device: torch.device) -> Launch:
    """For `groups` of query rows with room for so many blocks each. Few blocks leave most of the time to what comes before and
    behind them: four warps leave their program one part, and those of a group are merged in one wait for memory in place of
    two or three. Many groups have few parts anyway. H200, us with programs of 1 and of 4 warps, uniform 4/4 (2/2):
    1 x 512 8.7, 9.2; 1 x 4096 10.9, 10.0 (10.2, 9.5); 1 x 32768 22.3, 20.4 (16.7, 15.3); 1 x 65536 33.5, 32.6; 2 x 32768 32.6,
    31.6; 1 x 131072 52.1, 51.8; 8 x 4096 21.8, 22.3; 32 x 512 19.8, 26.9. Points in bytes: TurboQuant 4/3 at 1 x 4096 18.2,
    19.0, HIGGS 2 at 1 x 32768 21.4, 21.6. Limits of other GPUs follow by their count of multiprocessors, untimed. A room that
    grows into these limits, or out of them, takes another compiled kernel from there on.
    """
    found, processors = launches(keys, values, rows, turned), _processors(device)
    few = 4 * groups <= processors and room >= 64 and groups * room < FEW * processors
    return found[-1] if few else found[0]


def attend(
    q: Tensor,
    keys: Blocks,
    values: Blocks,
    blocks: Tensor,
    sink: tuple[Tensor, Tensor, Tensor],
    recent: tuple[Tensor, Tensor, Tensor],
    scaling: float,
    launch: Launch | None = None,
    workspace: Workspace | None = None,
    packed_q: Tensor | None = None,
    ring: bool = False,
    rope: Rope | None = None,
) -> Tensor:
    """As reference.attend, for q, sink and recent of one dtype, float16 or bfloat16, and every tensor contiguous: ValueError
    says what is not. The room of blocks must be whole groups of tokens; scales of values in outer groups are not negative. A
    `workspace` of its own is needed where launches overlap, and under a CUDA graph.
    """
    packed_q = q if packed_q is None else packed_q
    if packed_q.data_ptr() % 4:  # two numbers are read at a time
        aligned = packed_q.clone()
        q, packed_q = aligned if packed_q is q else q, aligned
    k_table, k_sign = _of_grid(keys)
    v_table, v_sign = _of_grid(values)
    same = keys.grid is not None and k_table.data_ptr() == v_table.data_ptr()
    given = (q, packed_q, blocks, *sink, *recent)
    key = (
        keys.about, values.about, *map(_ABOUT, given), packed_q is q, same, launch, ring, None if rope is None else rope.about,
    )  # fmt: skip
    prepared = _PREPARED.get(key)
    if known := prepared is not None and all(map(Tensor.is_contiguous, given)):
        ready, take, numbers = prepared
    else:
        _check_all(q, packed_q, keys, values, blocks, sink, recent, rope)
    out = torch.empty_like(q)
    before = (
        packed_q, q, out, keys.words, keys.scale, values.words, values.scale, *sink[:2], *recent[:2],
        blocks, sink[2], recent[2],
    )  # fmt: skip
    behind = (
        k_table, v_table, k_sign, v_sign, keys.words if keys.order is None else keys.order, *_turns(rope, keys.scale),
    )  # fmt: skip
    if not known:
        made = _prepared(q, keys, values, sink, recent, launch, same, ring, rope, before, behind)
        ready, take, numbers = _PREPARED[key] = made
    tensors = (*before, *(workspace or Workspace(q.device)).take(*take), *behind)
    ready(tensors, *numbers, scaling * LOG2E, *(1.0 if b.grid is None else b.grid.unit for b in (keys, values)))
    return out


_ABOUT = attrgetter("shape", "dtype", "device")  # with contiguity all that is checked of a tensor
LOG2E = 1.4426950408889634
_PREPARED = Prepared()
_AT_ONCE: dict[int, int] = {}  # of compiled kernels that were examined, which stay: programs of a multiprocessor


def _prepared(
    q: Tensor, keys: Blocks, values: Blocks, sink: Exact, recent: Exact, launch: Launch | None, same: bool, ring: bool,
    rope: Rope | None, before: tuple[Tensor, ...], behind: tuple[Tensor, ...],
) -> tuple[Ready, tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """All of a launch that follows from shapes: what starts it, what it takes of a workspace, and whole numbers. before,
    behind: the launch's tensors but for the workspace's; the kernel is compiled for them, as only then it is known how many
    programs run at a time.
    """
    batch, heads, room = keys.words.shape[:3]
    ratio, queries, windows = q.shape[1] // heads, q.shape[2], (sink[0].shape[2], recent[0].shape[2])
    if launch is None:
        launch = chosen(keys.form, values.form, ratio * queries, rope is not None, batch * heads, room, q.device)
    pairs = 0 if rope is None else rope.pairs
    fixed = settings(keys.form, values.form, heads, ratio, queries, launch.warps, same, pairs)
    options = fixed | {"STAGES": launch.stages, "ASM": not interpreted(), "RING": ring, "LONG": room + SPARE > SHORT}
    options |= {"num_warps": launch.warps, "num_stages": launch.stages}
    options |= {"maxnreg": launch.registers} if launch.registers and not interpreted() else {}
    ready = Ready(attend_kernel, (1, 1, 1), options, functools.partial(_examine, _reserved(fixed)))
    runs = 0 if rope is None or len(rope.first) == 1 else rope.first.shape[1]

    def numbers(own: Plan, fan: int) -> tuple[int, ...]:
        parts, share = own.parts, own.share
        return room, *windows, *own.numbers(), -(-windows[0] // share), parts, share, fan, -(-parts // fan), runs

    at_once = _by_registers(launch)
    if q.is_cuda and not interpreted():
        some = q.new_empty(16, dtype=torch.float32)
        given = (
            (*before, some, some, some.view(torch.int32), *behind),
            (*numbers(Plan(2, 1, 16, ALONE), 1), 1.0, 1.0, 1.0),
        )
        at_once = _AT_ONCE[id(ready.compiled(*given))]
    own = _plan(fixed, batch, room, windows, launch, at_once, q.device)
    fan = launch.fan or fan_of(own.parts, fixed["AT_ONCE"])
    ready.grid = (batch, heads * fixed["CHUNKS"], own.parts)
    return ready, (batch * ready.grid[1], own.parts, fixed["N"], fixed["D"], fan), numbers(own, fan)


def _by_registers(launch: Launch) -> int:
    """Programs that a multiprocessor of 65536 registers runs at a time."""
    return max(1, 2048 // (launch.registers or 168) // launch.warps)


def programs_at_once(made: Any) -> int:
    """Of a compiled and loaded kernel, a multiprocessor's, by the driver's count; for a thread that has the kernel's context:
    one that launched nothing yet has none.
    """
    count, threads = ctypes.c_int(), 32 * made.metadata.num_warps
    error = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(count), ctypes.c_void_p(made.function), threads, ctypes.c_size_t(made.metadata.shared)
    )
    if error:
        raise RuntimeError(f"cuOccupancyMaxActiveBlocksPerMultiprocessor: CUDA error {error}")
    return max(1, count.value)


def _check_all(
    q: Tensor,
    packed_q: Tensor,
    keys: Blocks,
    values: Blocks,
    blocks: Tensor,
    sink: Exact,
    recent: Exact,
    rope: Rope | None,
) -> None:
    for given in (q, packed_q):
        _check(given, keys, values, blocks, sink, recent)
    if rope is not None:
        _check_rope(rope, keys, q, packed_q, (sink[0].shape[2], recent[0].shape[2]))


def _turns(rope: Rope | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    return (unused, unused) if rope is None else (rope.first_words, rope.near_words)


def _check_rope(rope: Rope, keys: Blocks, q: Tensor, packed_q: Tensor, windows: tuple[int, int]) -> None:
    batch, _, room = keys.words.shape[:3]
    if keys.form.vector or keys.form.tiered:
        raise ValueError(f"keys of {keys.form} before RoPE: only integers in one tier are turned where they are read")
    if packed_q is not q:
        raise ValueError("packed_q with keys before RoPE: they are not divided by factors")
    least, width = runs_of(windows[0], room, windows[1]), RUN * rope.pairs
    if width > keys.form.dim or len(rope.first) not in (1, batch) or rope.first.shape[1] < least:
        seen = f"RoPE of {width} channels, {len(rope.first)} rows of {rope.first.shape[1]} runs"
        raise ValueError(f"{seen}: must be of at most {keys.form.dim}, 1 or {batch}, {least} or more")
    if rope.first.device != q.device:
        raise ValueError(f"RoPE on {rope.first.device}, queries on {q.device}: must be on one device")


def _plan(
    fixed: dict[str, int],
    batch: int,
    room: int,
    windows: tuple[int, int],
    launch: Launch,
    at_once: int,
    device: torch.device,
) -> Plan:
    groups = batch * fixed["HEADS"] * fixed["CHUNKS"]
    return plan(groups, room, windows, launch.warps, at_once * _processors(device), _carried(fixed), launch)


def _carried(fixed: dict[str, int]) -> bool:
    """Whether packed tokens' programs may have exact tokens, too: not where outputs' channels lie otherwise. Before RoPE and
    of tiers they could, but take longer (H200, MixKVQ at G = 128, 32 x 32768: 268 in place of 263 us; KIVI 413 of 412).
    """
    mixed = fixed["V_MODE"] == POINTS and fixed["V_GROUP"] > 1
    return not (mixed or fixed["PAIRS"] or fixed["K_MODE"] == 4)


def reserve(
    space: Workspace, keys: Form, values: Form, batch: int, heads: int, ratio: int, room: int, windows: tuple[int, int],
    queries: int = 1, pairs: int = 0,
) -> None:  # fmt: skip
    """Let `space` have what a launch over exactly so many blocks of room needs, however many programs run at a time: under a
    CUDA graph it must not grow. A smaller room may need more (`chosen`). windows: rooms of sink and recent tokens. pairs:
    `Rope.pairs` of keys before RoPE.
    """
    launch = chosen(keys, values, ratio * queries, pairs > 0, batch * heads, room, space.counter.device)
    fixed = settings(keys, values, heads, ratio, queries, launch.warps, pairs=pairs)
    device, most = space.counter.device, min(MOST_AT_ONCE, MOST_WARPS // launch.warps)
    plans = {_plan(fixed, batch, room, windows, launch, at_once, device).parts for at_once in range(1, most + 1)}
    for parts in sorted(plans, reverse=True):
        fan = launch.fan or fan_of(parts, fixed["AT_ONCE"])
        space.take(batch * heads * fixed["CHUNKS"], parts, fixed["N"], fixed["D"], fan)


def _reserved(fixed: dict[str, Any]) -> int:
    """Bytes of a ring that lies behind what Triton manages, see `_ring`."""
    slots = int((fixed["K_HELD"] + fixed["V_HELD"]) * fixed["SLOTS"])
    tables = fixed["K_ENTRIES"] + fixed["V_ENTRIES"]
    return slots * int(fixed["NW"]) if plain_beyond(fixed["NW"], tables, slots) else 0


def _examine(ring: int, made: Any) -> None:
    """Of each compiled kernel its layouts are checked, and a ring behind what Triton manages gets its room: launches of the
    kernel, not yet loaded, have so many bytes of shared memory more. What assembly declares is limited to 48 KB, in which
    tables of grids leave no room for a ring.
    """
    check_layouts(made.asm["ttgir"])
    before = made.metadata, made.packed_metadata
    if ring:
        if made.module is not None:
            raise RuntimeError("attend_kernel was loaded before its shared memory was enlarged; report it, please")
        made.metadata = made.metadata._replace(shared=-(-made.metadata.shared // 128) * 128 + ring)
        made.packed_metadata = make_backend(made.metadata.target).pack_metadata(made.metadata)
    try:
        made._init_handles()  # which gives the thread the kernel's context
        _allow(made)
        _AT_ONCE[id(made)] = programs_at_once(made)
    except Exception:  # as it was, so that another launch can try again
        made.metadata, made.packed_metadata = before
        made.module = made.function = None
        raise


def _allow(made: Any) -> None:
    """The driver must allow more than 48 KB. Triton asks it where what Triton counts is that much; it does not count what
    assembly declares. And of a multiprocessor's memory as much as can be is to be shared: what is cached beside it is read
    once.
    """
    cuda, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(made.function)
    declared, dynamic = ctypes.c_int(), made.metadata.shared
    # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, _MAX_DYNAMIC_SHARED_SIZE_BYTES, _PREFERRED_SHARED_MEMORY_CARVEOUT (percent)
    shared_size, most_dynamic, carveout = 1, 8, 9
    cuda.cuFuncSetAttribute(function, carveout, 100)  # a hint, which a driver need not take
    error = cuda.cuFuncGetAttribute(ctypes.byref(declared), shared_size, function)
    if not error and dynamic <= 48 * 1024 < dynamic + declared.value:
        error = cuda.cuFuncSetAttribute(function, most_dynamic, dynamic)
    if error:
        raise RuntimeError(f"shared memory: {dynamic} bytes and {declared.value} of tables: CUDA error {error}")


def check_layouts(ttgir: str) -> None:
    """RuntimeError where a look-up of several rows, or a turn by RoPE, is not in the layout of a product's first operand that
    it counts on, where a read of the ring is not in that of a product's result, or where a product over 16 numbers has the
    layout of one over 32.
    """
    result = r"#ttg.nvidia_mma<\{versionMajor = 2, versionMinor = 0, warpsPerCTA = \[\d+, 1, 1\], instrShape = \[1, 16, 8\]\}>"
    for line in ttgir.splitlines():
        if re.search(r"tt\.dot.*x16xf16, .*kWidth = (8|16)", line):
            raise RuntimeError(f"this Triton contracts 32 numbers where there are 16: {line.strip()[:200]}")
        packed = re.search(r"elementwise_inline_asm.*packed_element = ([48]) ", line)
        if packed and re.search(
            r"ldmatrix|ld\.shared\.(v2\.b32 \{a, b\}|b16 a)|kvcal_table|movmatrix|KVCAL_LOW|kvcal_fit|mma\.sync|mov\.f32 \$0",
            line,
        ):
            if not re.search(rf"-> \(?tensor<[\dx]*x[if](16|32), ({_aliases(result, ttgir)})>", line):
                raise RuntimeError(f"this Triton puts tiles of the ring in an unknown layout: {line.strip()[-200:]}")
        elif packed:
            operand = rf"#ttg.dot_op<\{{opIdx = 0, [^}}]*kWidth = {int(packed[1]) // 2}\}}>"
            if not re.search(rf"-> \(?tensor<[\dx]*f16, ({_aliases(operand, ttgir)})>", line):
                raise RuntimeError(f"this Triton turns keys in an unknown layout: {line.strip()[-200:]}")


def _aliases(layout: str, ttgir: str) -> str:
    """An expression for a layout or the names that stand for it."""
    return "|".join([layout, *re.findall(rf"^(#\w+) = {layout}", ttgir, re.MULTILINE)])


def _of_grid(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Table and signs; of integers what is never read."""
    return (blocks.scale, blocks.words) if blocks.grid is None else (blocks.grid.table, blocks.grid.sign)


def _check(q: Tensor, keys: Blocks, values: Blocks, blocks: Tensor, sink: Exact, recent: Exact) -> None:
    """What the kernel relies on and cannot see: it gets pointers and takes strides from the shapes."""
    batch, heads, room = keys.words.shape[:3]
    if keys.form.role != "key" or values.form.role != "value" or keys.form.dim != values.form.dim:
        raise ValueError(f"blocks of {keys.form} and {values.form}: must be keys and values of one head_dim")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"queries of {q.dtype}: must be float16 or bfloat16")
    if q.ndim != 4 or q.shape[0] != batch or q.shape[1] % heads or q.shape[3] != keys.form.dim:
        raise ValueError(f"queries {tuple(q.shape)}: must be ({batch}, a multiple of {heads}, Q, {keys.form.dim})")
    for name, made in (("keys", keys), ("values", values)):
        words, scales = (
            (batch, heads, room, made.form.words),
            (batch, heads // made.form.norm_heads, room // made.form.scale_blocks, made.form.scales),
        )
        if made.form.norm_heads not in (1, heads):
            raise ValueError(f"{name}: norms over {made.form.norm_heads} heads; must be of each head or of all {heads}")
        _check_grid(name, made, heads)
        wanted = (batch, heads, room // made.form.scale_blocks, made.form.dim) if made.form.tiered else None
        if (wanted is None) != (made.order is None) or (made.order is not None and made.order.shape != wanted):
            seen = None if made.order is None else tuple(made.order.shape)
            raise ValueError(f"{name}: order of channels {seen}; must be {wanted}")
        if made.words.shape != words or made.scale.shape != scales or room % made.form.scale_blocks:
            seen = f"words {tuple(made.words.shape)}, scales {tuple(made.scale.shape)}"
            raise ValueError(f"{name}: {seen}; must be {words} and {scales}, of whole groups of tokens")
    for name, (k, v, count) in (("sink", sink), ("recent", recent)):
        wanted = (batch, heads, k.shape[2], keys.form.dim)
        if (
            k.shape != wanted
            or v.shape != wanted
            or k.dtype != q.dtype
            or v.dtype != q.dtype
            or count.shape != (batch,)
        ):
            seen = f"keys {tuple(k.shape)} {k.dtype}, values {tuple(v.shape)} {v.dtype}, counts {tuple(count.shape)}"
            raise ValueError(f"{name}: {seen}; must be {wanted} {q.dtype} and ({batch},)")
    counts = {"blocks": blocks, "sink counts": sink[2], "recent counts": recent[2]}
    for name, count in counts.items():
        if count.dtype != torch.int32 or count.shape != (batch,):
            raise ValueError(f"{name}: {tuple(count.shape)} {count.dtype}; must be ({batch},) torch.int32")
    given = {"q": q, "words of keys": keys.words, "words of values": values.words, "scales of keys": keys.scale}
    given |= {"scales of values": values.scale, "sink": sink[0], "sink values": sink[1], "recent": recent[0]}
    for name, made in (("keys", keys), ("values", values)):
        if made.grid is not None:
            given |= {f"table of {name}": made.grid.table, f"signs of {name}": made.grid.sign}
    if keys.order is not None:
        given["order of channels"] = keys.order
    for name, tensor in (given | {"recent values": recent[1]} | counts).items():
        if tensor.device != q.device:
            raise ValueError(f"{name} on {tensor.device}, queries on {q.device}: must be on one device")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()} of {tuple(tensor.shape)}; must be contiguous")


def _check_grid(name: str, made: Blocks, heads: int) -> None:
    form, grid = made.form, made.grid
    if (grid is not None) != bool(form.vector):
        raise ValueError(
            f"{name} of {form}: {'no grid' if grid is None else 'a grid'}; codes of a grid need one, others none"
        )
    if grid is None:
        return
    wanted = (4 * form.vector,) if form.in_bytes else ENTRIES[form.bits], (heads, form.dim)
    if grid.table.dtype != (torch.int32 if form.in_bytes else torch.float16):
        kind = "in bytes" if form.in_bytes else "looked up"
        raise ValueError(
            f"{name}: a table of {grid.table.dtype} for a grid {kind}; make it by grid_of(..., in_bytes=...)"
        )
    if (*grid.table.shape,) != wanted[0] or (*grid.sign.shape,) != wanted[1] or grid.vector != form.vector:
        seen = f"table {tuple(grid.table.shape)}, signs {tuple(grid.sign.shape)}, {grid.vector} numbers a point"
        raise ValueError(f"{name}: {seen}; must be {wanted[0]}, {wanted[1]}, {form.vector}")


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class Workspace:
    """Memory in which programs of one launch leave what they found; grows, and every launch leaves its counters at zero."""

    def __init__(self, device: torch.device) -> None:
        self.part = torch.empty(0, dtype=torch.float32, device=device)
        self.stat = torch.empty(0, dtype=torch.float32, device=device)
        self.counter = torch.zeros(0, dtype=torch.int32, device=device)

    def take(self, groups: int, parts: int, rows: int, dim: int, fan: int) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs (groups, parts, rows, dim) and statistics (groups, parts, 2, rows) float32; counters int32 of a group and of
        each `fan` of its parts, (groups, 1 + parts / fan).
        """
        counters = groups * (1 + -(-parts // fan))
        if self.part.numel() < groups * parts * rows * dim:
            self.part = self.part.new_empty(groups * parts * rows * dim)
        if self.stat.numel() < groups * parts * rows * 2:
            self.stat = self.stat.new_empty(groups * parts * rows * 2)
        if self.counter.numel() < counters:
            self.counter = self.counter.new_zeros(counters)
        return self.part, self.stat, self.counter
