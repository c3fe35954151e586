"""The online softmax of a warp: maxima that rise (`raised`), and probabilities as second operands. The exponentials
themselves are in `kernel.step`, of integer keys and values in `int8/step`, of exact tokens in `exact`; their sums over
programs in `merge`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def by_parity(b_p, MIXED: tl.constexpr, NW: tl.constexpr, N: tl.constexpr):
    """Return probabilities of 16 tokens [NW, 16, N] as operands of 8 tokens each, row 2 token + parity: 0 in columns of
    the other parity. MIXED: tokens are in the order of `interleaved_row`.
    """
    if MIXED:
        first, second = tl.inline_asm_elementwise(
            _movmatrix(True), "=r,=r,=r,=r,r,r", [b_p], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
        return second_of(first, NW, N), second_of(second, NW, N)
    odd = (-(tl.arange(0, N) % 2)).to(tl.int16)[None, None, :]
    bits = b_p.to(tl.int16, bitcast=True)
    both = tl.join(bits & ~odd, bits & odd).to(b_p.dtype, bitcast=True)
    wide = tl.reshape(tl.permute(both, [0, 1, 3, 2]), [NW, 2, 16, N])
    return tl.split(tl.permute(wide, [0, 2, 3, 1]))


@triton.constexpr_function
def _movmatrix(mixed):
    """Return assembly that transposes the 8 x 8 parts of a product's result; mixed: each as operands of 8 tokens, row 2
    token + parity, 0 in columns of the other parity.
    """
    if not mixed:
        return "movmatrix.sync.aligned.m8n8.trans.b16 $0, $2; movmatrix.sync.aligned.m8n8.trans.b16 $1, $3;"
    text = "{ .reg .b32 t, u;"
    for i in range(2):
        text += f"movmatrix.sync.aligned.m8n8.trans.b16 t, ${4 + i}; "
        text += f"prmt.b32 ${2 * i}, t, 0, kvcal_low; prmt.b32 ${2 * i + 1}, t, 0, kvcal_high; "
    return text + "}"


@triton.jit
def declare_parities():
    """Declare registers that `_movmatrix` knows by name: where a lane's column takes numbers of even or of odd
    channels.
    """
    tl.inline_asm_elementwise(
        """.reg .b32 kvcal_low, kvcal_high; .reg .pred kvcal_parity;
        mov.u32 kvcal_low, %laneid; and.b32 kvcal_low, kvcal_low, 4; setp.ne.u32 kvcal_parity, kvcal_low, 0;
        selp.b32 kvcal_low, 0x1044, 0x4410, kvcal_parity; selp.b32 kvcal_high, 0x3244, 0x4432, kvcal_parity;
        mov.b32 $0, 0;""",
        "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1,
    )


@triton.jit
def second_of(x, NW: tl.constexpr, N: tl.constexpr):
    """Return `_movmatrix`'s result, [NW, 16, N], as a second operand."""
    return tl.reshape(tl.permute(tl.reshape(x, [NW, 2, 8, N // 8, 8]), [0, 1, 4, 3, 2]), [NW, 16, N])


@triton.jit
def second_operand(b_p, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr):
    """Return probabilities of 16 tokens [NW, 16, N] float16 as a second operand. Triton's own way takes two shuffles
    and twelve instructions where this takes two.
    """
    if ASM:
        transposed = tl.inline_asm_elementwise(
            _movmatrix(False), "=r,=r,r,r", [b_p], dtype=tl.float16, is_pure=True, pack=4
        )
        b_p = second_of(transposed, NW, N)
    return b_p


@triton.constexpr_function
def _rising(count, slack, headroom):
    """Return assembly for one product's numbers of a lane (two rows of two columns): scores of both halves, unit, then
    what is changed: the maximum, and `count` products with it. Nothing changes where no lane of the warp has a score
    that is more than `slack` above; else the maximum becomes that of the scores plus `headroom`.
    """
    inputs = [f"${4 * (1 + count) + i}" for i in range(12)]  # inputs behind outputs
    text = ["{ .reg .pred p; .reg .f32 a, b, x, y, f, g;"]
    for name, column, over in (("a", 0, "x"), ("b", 1, "y")):
        text += [
            f"max.f32 {name}, {inputs[column]}, {inputs[column + 2]};",
            f"max.f32 {over}, {inputs[column + 4]}, {inputs[column + 6]};",
        ]
        text += [f"max.f32 {name}, {name}, {over};"]
    text += [f"neg.f32 f, $0; neg.f32 g, $1; fma.rn.f32 x, a, {inputs[8]}, f; fma.rn.f32 y, b, {inputs[9]}, g;"]
    text += [f"max.f32 x, x, y; setp.gt.f32 p, x, {slack}; vote.sync.any.pred p, p, 0xffffffff; @!p bra KVCAL_LOW;"]
    for step in (16, 8, 4):
        for name, other in (("a", "x"), ("b", "y")):
            text += [f"shfl.sync.bfly.b32 {other}, {name}, {step}, 31, 0xffffffff; max.f32 {name}, {name}, {other};"]
    text += [f"fma.rn.f32 a, a, {inputs[8]}, {headroom}; fma.rn.f32 b, b, {inputs[9]}, {headroom};"]
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
def dtypes(kind, count):
    return (kind,) * count


@triton.jit
def faded(acc, fade):
    """Return every tensor of a tuple times fade."""
    scaled = ()
    for i in tl.static_range(len(acc)):
        scaled = scaled + (acc[i] * fade,)
    return scaled


@triton.constexpr_function
def slack(values):
    """Return the powers of two by which scores may pass the maximum that is subtracted from them, and by which it is
    above the scores when it rises. Probabilities alone are float16 up to 2^15. Times a scale or a norm, which may be
    65504, they must not pass 1.
    """
    return (0.0, 3.0) if not values.inner else (8.0, 0.0)


@triton.jit
def raised(b_0, b_1, b_m, b_l, unit, acc, VALUES: tl.constexpr, ASM: tl.constexpr):
    """Return maxima b_m [NW, 16, N], rows alike, and sums and outputs relative to them, after scores b_0, b_1 times
    unit. They stay as they are while no score of a warp passes its column's maximum by more than `slack` allows.
    """
    SLACK: tl.constexpr = slack(VALUES)
    if ASM:
        COUNT: tl.constexpr = 1 + len(acc)
        changed = tl.inline_asm_elementwise(
            _rising(COUNT, SLACK[0], SLACK[1]), _rising_constraints(COUNT), (b_0, b_1, unit, b_m, b_l) + acc,
            dtype=dtypes(tl.float32, 1 + COUNT), is_pure=False, pack=4,
        )
        b_m, b_l = changed[0], changed[1]
        acc = changed[2:]
    else:
        b_top = tl.max(tl.maximum(b_0, b_1) * unit, 1)[:, None, :]
        if tl.max(b_top - b_m) > SLACK[0]:
            b_new = tl.maximum(b_m, b_top + SLACK[1])
            fade = tl.exp2(b_m - b_new)
            b_m, b_l, acc = b_new, b_l * fade, faded(acc, fade)
    return b_m, b_l, acc
