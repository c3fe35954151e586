"""Probabilities of scores, as products with values take them.

A query row has two columns, which are alike until values of even coordinates meet one and those of odd ones the other.
Where all tokens of a block count, assembly computes one of the two: a lane's first and third number of a product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..numbers import LOW
from ..softmax import by_parity, dtypes, raised, second_of, slack
from .codes import token_norms


@triton.constexpr_function
def _two_norms(byte):
    """Return assembly for the norms of a lane's two rows. byte: from z on."""
    return f"ld.shared.b32 w, [z + {byte}]; mov.b32 {{h, k}}, w; cvt.f32.f16 u, h; cvt.f32.f16 v, k;"


@triton.constexpr_function
def _weighed(count, key_norms, value_norms, slack, headroom):
    """Return assembly for one product's numbers of a lane, as `softmax._rising`. Operands: maximum, sums, and `count`
    outputs, which are changed; two halves' probabilities, each as two operands (`softmax.by_parity`); scores of both
    halves without norms, unit, and where the slot begins. Of numbers that are alike the first is read and written.
    """
    text = ["{ .reg .pred p; .reg .b16 h, k; .reg .b32 w, z; .reg .f32 a, b, c, d, u, v, f;"]
    inputs = [f"${4 * (2 + count) + 8 + i}" for i in range(0, 16, 2)]  # scores, unit, slot: every other one
    text += [f"add.u32 z, kvcal_norm, {inputs[6]};"]
    text += [_two_norms(key_norms), f"mul.f32 a, {inputs[0]}, u; mul.f32 b, {inputs[1]}, v;"]
    text += [_two_norms(key_norms + 32), f"mul.f32 c, {inputs[2]}, u; mul.f32 d, {inputs[3]}, v;"]
    unit = inputs[4]
    text += ["max.f32 u, a, b; max.f32 v, c, d; max.f32 u, u, v;"]
    text += [f"neg.f32 f, $0; fma.rn.f32 v, u, {unit}, f; setp.gt.f32 p, v, {slack};"]
    text += ["vote.sync.any.pred p, p, 0xffffffff; @!p bra KVCAL_LOW;"]
    for step in (16, 8, 4):
        text += [f"shfl.sync.bfly.b32 v, u, {step}, 31, 0xffffffff; max.f32 u, u, v;"]
    text += [f"fma.rn.f32 u, u, {unit}, {headroom}; max.f32 u, u, $0; sub.f32 f, $0, u; ex2.approx.ftz.f32 f, f;"]
    text += ["mov.f32 $0, u; mul.f32 $4, $4, f; mul.f32 $6, $6, f;"]
    text += [f"mul.f32 ${8 + i}, ${8 + i}, f;" for i in range(4 * count)]
    text += ["KVCAL_LOW: neg.f32 f, $0;"]
    text += [f"fma.rn.f32 {x}, {x}, {unit}, f; ex2.approx.ftz.f32 {x}, {x};" for x in "abcd"]
    text += ["add.f32 u, a, c; add.f32 $4, u, $4; add.f32 v, b, d; add.f32 $6, v, $6;"]
    for half in range(2):
        text += [_two_norms(value_norms + 32 * half)]
        for i in range(2):  # rows g, g + 8
            x, to = "abcd"[2 * half + i], 4 * (2 + count) + 4 * half + 2 * i
            text += [f"mul.f32 {x}, {x}, {'uv'[i]}; cvt.rn.f16x2.f32 w, {x}, {x};"]
            text += ["movmatrix.sync.aligned.m8n8.trans.b16 w, w;"]
            text += [f"prmt.b32 ${to}, w, 0, kvcal_low; prmt.b32 ${to + 1}, w, 0, kvcal_high;"]
    return " ".join([*text, "}"])


@triton.constexpr_function
def _weighed_constraints(count):
    changed = 4 * (2 + count)
    outputs = ["=&f"] * changed + ["=&r"] * 8
    return ",".join([*outputs, *["f"] * 12, *["r"] * 4, *(str(i) for i in range(changed))])


@triton.constexpr_function
def _weighed_types(count):
    return dtypes(tl.float32, 2 + count) + dtypes(tl.float16, 4)


@triton.jit
def both_columns(b_m, b_l, ASM: tl.constexpr):
    """Return maxima and sums [NW, 16, N] where `weighed_by_assembly` left some of a lane's as they were."""
    if ASM:
        b_m, b_l = tl.inline_asm_elementwise(
            "mov.f32 $0, $8; mov.f32 $1, $8; mov.f32 $2, $8; mov.f32 $3, $8; "
            "mov.f32 $4, $12; mov.f32 $5, $12; mov.f32 $6, $14; mov.f32 $7, $14;",
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f", [b_m, b_l], dtype=(tl.float32, tl.float32),
            is_pure=False, pack=4,
        )
    return b_m, b_l


@triton.jit
def weighed_by_assembly(
    b_0, b_1, b_m, b_l, unit, acc, o_slot, KEYS: tl.constexpr, VALUES: tl.constexpr, NW: tl.constexpr, N: tl.constexpr,
):
    """Return what `weighed` does where all tokens count: maxima and sums are whole after `both_columns`."""
    COUNT: tl.constexpr = len(acc)
    SLACK: tl.constexpr = slack(VALUES)
    TEXT: tl.constexpr = _weighed(COUNT, KEYS.norm_at, KEYS.slot + VALUES.norm_at, SLACK[0], SLACK[1])
    at = tl.zeros([NW, 16, N], tl.int32) + o_slot
    changed = tl.inline_asm_elementwise(
        TEXT, _weighed_constraints(COUNT), (b_0, b_1, unit, at, b_m, b_l) + acc, dtype=_weighed_types(COUNT),
        is_pure=False, pack=4,
    )
    operands = ()
    for i in tl.static_range(4):
        operands = operands + (second_of(changed[2 + COUNT + i], NW, N),)
    return changed[0], changed[1], changed[2 : 2 + COUNT], operands


@triton.jit
def weighed(
    b_0, b_1, b_m, b_l, unit, acc, see_0, see_1, p_kn, p_vn, o_norm, b_live, o_slot, KEYS: tl.constexpr,
    VALUES: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr, MASK: tl.constexpr,
):
    """Return new maxima, sums and outputs after scores b_0, b_1 of both halves of NW blocks, and probabilities times
    values' norms as four operands. see_0, see_1: with MASK, which tokens a row sees.
    """
    NORMS: tl.constexpr = KEYS.slot + VALUES.norm_at
    b_0 = b_0 * token_norms(p_kn, o_norm, b_live, o_slot, KEYS.norm_at, 0, NW, N, ASM)
    b_1 = b_1 * token_norms(p_kn, o_norm, b_live, o_slot, KEYS.norm_at, 1, NW, N, ASM)
    if MASK:
        b_0 = tl.where(see_0, b_0, LOW)
        b_1 = tl.where(see_1, b_1, LOW)
    b_m, b_l, acc = raised(b_0, b_1, b_m, b_l, unit, acc, VALUES, ASM)
    b_0 = tl.exp2(b_0 * unit - b_m)
    b_1 = tl.exp2(b_1 * unit - b_m)
    if MASK:  # a warp without any block has LOW * unit as its maximum: the rounding of that product may be huge
        b_0 = tl.where(see_0, b_0, 0.0)
        b_1 = tl.where(see_1, b_1, 0.0)
    b_l = b_l + (b_0 + b_1)
    b_0 = (b_0 * token_norms(p_vn, o_norm, b_live, o_slot, NORMS, 0, NW, N, ASM)).to(tl.float16)
    b_1 = (b_1 * token_norms(p_vn, o_norm, b_live, o_slot, NORMS, 1, NW, N, ASM)).to(tl.float16)
    return b_m, b_l, acc, by_parity(b_0, ASM, NW, N) + by_parity(b_1, ASM, NW, N)
