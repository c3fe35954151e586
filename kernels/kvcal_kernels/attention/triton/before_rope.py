"""Keys of integers that are stored before RoPE: decoded and rotated in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from .integers import codes_of
from .numbers import field_number
from .scales import loaded_pairs, token_scales

# Keys before RoPE. A block's 32 positions follow one another: the query is rotated back to the first of them, once a
# block. The rest, j positions of token j, is one table for all blocks, 8 KB at 128 channels that stay in the
# first-level cache. Assembly reads it through a register known by name, as an address that is an operand keeps Triton
# from loading words in the layout that a product wants.


@triton.constexpr_function
def _bit(m, bits):
    """Return the bit at which unpacking leaves field number m."""
    return {8: 0, 4: 4 * (m % 2)}.get(bits, 2 * (m % 4))


@triton.constexpr_function
def _bias(bit, zero):
    """Return the bits of 2^(10 - bit) + zero in float16, below which a code at `bit` counts ones."""
    return (25 - bit << 10) | zero << bit


@triton.constexpr_function
def _counting(bit, zero):
    """Return assembly of `_number`."""
    bias = _bias(bit, zero) * 0x10001
    return f"{{ .reg .b32 t, b; or.b32 t, $1, kvcal_one{bit}; mov.b32 b, {bias}; sub.f16x2 $0, t, b; }}"


@triton.jit
def _number(part, BIT: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr):
    """Return code - ZERO, exactly, from codes at bit BIT of a subnormal."""
    if ASM:
        number = tl.inline_asm_elementwise(_counting(BIT, ZERO), "=r,r", [part], dtype=tl.float16, is_pure=True, pack=2)
    else:
        number = (part.to(tl.float32) * 2.0 ** (24 - BIT) - ZERO).to(tl.float16)
    return number


@triton.constexpr_function
def _rotation_text(half, pair, pairs):
    """Return assembly that rotates four registers of a piece and of its partner by the table's entries for half block
    `half`.
    """
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
    """Return assembly of `_names`."""
    text = ".reg .b32 kvcal_lane, kvcal_odd; .reg .b64 kvcal_near, kvcal_top; mov.u32 kvcal_lane, %laneid; "
    text += "mad.wide.u32 kvcal_near, kvcal_lane, 16, $1; "
    text += "shr.u64 kvcal_top, kvcal_near, 63; cvt.u32.u64 kvcal_odd, kvcal_top; "
    for bit in {8: (0,), 4: (0, 4)}.get(bits, (0, 2, 4, 6)):
        text += f".reg .b32 kvcal_one{bit}; add.u32 kvcal_one{bit}, kvcal_odd, {_bias(bit, 0) * 0x10001}; "
    return text + "mov.b32 $0, 0;"


@triton.jit
def _names(p_near, BITS: tl.constexpr):
    """Declare the registers that assembly knows by name: where a lane's part of the table begins, and what makes fields
    of BITS bits numbers. The compiler must not see that the latter are constant: one operand of an instruction may be,
    and the mask is.
    """
    tl.inline_asm_elementwise(_naming(BITS), "=r,l", [p_near.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def near_offset(token, channel, PAIRS: tl.constexpr):
    """Return where the cosine of a block's token and a channel below PAIRS * 16 lies in the table; the sine is 256
    behind. The order is that in which a lane holds pieces: [half][pair][cosine, sine][lane][row / 8][column % 4].
    """
    row, column = token % 16, channel % 16
    return (token // 16 * PAIRS + channel // 16) * 512 + (row % 8 * 4 + column // 4) * 8 + row // 8 * 4 + column % 4


@triton.jit
def _by_angle(x, y, cos, sin, SIGN: tl.constexpr):
    """Return x cos + SIGN y sin, rounded as assembly rounds it, for the interpreter: its float16 has no multiply-add.
    """
    first = (x.to(tl.float32) * cos.to(tl.float32)).to(tl.float16)
    return (first.to(tl.float32) + SIGN * (y.to(tl.float32) * sin.to(tl.float32))).to(tl.float16)


@triton.jit
def _rotated_pair(low, high, p_near, HALF: tl.constexpr, PAIR: tl.constexpr, PAIRS: tl.constexpr, ASM: tl.constexpr):
    """Return pieces of channels and of their partners, rotated by as many positions as each token is behind its block's
    first. This counts on the order of a lane's numbers in a product's first operand (`check_layouts`).
    """
    if ASM:
        halves = tl.inline_asm_elementwise(
            _rotation_text(HALF, PAIR, PAIRS), "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", [low, high],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=8,
        )
    else:
        r = tl.arange(0, 16)
        p = p_near + near_offset(HALF * 16 + r[:, None], PAIR * 16 + r[None, :], PAIRS)
        cos, sin = tl.load(p)[None], tl.load(p + 256)[None]
        halves = (_by_angle(low, high, cos, sin, -1), _by_angle(high, low, cos, sin, 1))
    return halves


@triton.jit
def _joined_queries(p, live, N: tl.constexpr):
    """Load 16 channels of the query, [16, N], in pairs that are joined like the cosines by which keys are rotated.
    Triton takes four numbers at a time of whatever meets what was joined, two of others, and finds no layout for one
    word of both.
    """
    pair = 2 * tl.arange(0, 8)[:, None]
    joined = tl.join(tl.load(p + pair, mask=live, other=0.0), tl.load(p + pair + 1, mask=live, other=0.0))
    return tl.reshape(tl.permute(joined, (0, 2, 1)), [16, N])


@triton.jit
def _rotated_back(low, high, p_run, live, NW: tl.constexpr):
    """Return a piece of queries [NW, 16, N] and its partner, as the first positions of runs see them."""
    cos, sin = loaded_pairs(p_run, tl.zeros([NW, 1], tl.int64), live, NW)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return low * cos + high * sin, high * cos - low * sin


@triton.jit
def _value(
    part, scale, zero, BIT: tl.constexpr, KEYS: tl.constexpr, ASM: tl.constexpr
):
    """Return a piece of numbers from codes at bit BIT. scale, zero: float16, as wide as the piece; symmetric keys have
    no zero.
    """
    ZERO: tl.constexpr = (1 << KEYS.bits - 1) if KEYS.symmetric else 0
    x = _number(part, BIT, ZERO, ASM) * scale
    if not KEYS.symmetric:
        x += zero
    return x


@triton.jit
def _both_halves(
    parts, p_scale, tokens, live, PIECE: tl.constexpr, KEYS: tl.constexpr, EACH: tl.constexpr, NW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return numbers of piece PIECE of both half blocks. Scales of outer groups are loaded from p_scale, others are
    `token_scales` of each half, of EACH pieces.
    """
    BIT_0: tl.constexpr = _bit(field_number(0, PIECE, KEYS.bits, KEYS.pieces, KEYS.inner, False), KEYS.bits)
    BIT_1: tl.constexpr = _bit(field_number(1, PIECE, KEYS.bits, KEYS.pieces, KEYS.inner, False), KEYS.bits)
    if KEYS.outer:
        scale, zero = loaded_pairs(p_scale + PIECE * 32, tl.zeros([NW, 1], tl.int64), live, NW)
        x_0 = _value(parts[PIECE], scale[:, None, :], zero[:, None, :], BIT_0, KEYS, ASM)
        x_1 = _value(parts[KEYS.pieces + PIECE], scale[:, None, :], zero[:, None, :], BIT_1, KEYS, ASM)
    else:
        x_0 = _value(parts[PIECE], tokens[0][PIECE // EACH], tokens[1][PIECE // EACH], BIT_0, KEYS, ASM)
        x_1 = _value(parts[KEYS.pieces + PIECE], tokens[2][PIECE // EACH], tokens[3][PIECE // EACH], BIT_1, KEYS, ASM)
    return x_0, x_1


@triton.jit
def scores_of(
    p_k, p_ks, p_first, p_near, i_head, b_block, b_run, b_live, q, capacity, KEYS: tl.constexpr, SLICES: tl.constexpr,
    PAIRS: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Return `integers.scores_of` for keys stored before RoPE, in units of the query's. b_run: number of each block's
    first position in p_first. PAIRS: pairs of pieces that are rotated; the others are as they are.
    """
    at = (i_head * capacity + b_block)[:, None]
    live = b_live[:, None]
    parts = codes_of(p_k, at * KEYS.words, live, at, KEYS, 0, False, NW, False, ASM)
    p_run = p_first + b_run[:, None] * (PAIRS * 32)
    b_0 = tl.zeros([NW, 16, N], tl.float32)
    b_1 = tl.zeros([NW, 16, N], tl.float32)
    EACH: tl.constexpr = KEYS.group // (32 if KEYS.outer else 16)
    if KEYS.outer:
        p_scale = p_ks + (i_head * (capacity // EACH) + b_block // EACH)[:, None] * (SLICES * 32)
        tokens = ()
    else:
        p_scale = p_ks + at * (2 * SLICES // EACH * KEYS.columns * 16)
        tokens = token_scales(p_scale, live, SLICES // EACH, KEYS)
        p_scale = p_scale + SLICES // EACH * KEYS.columns * 16
        tokens = tokens + token_scales(p_scale, live, SLICES // EACH, KEYS)
    BYTES: tl.constexpr = 2 if KEYS.inner else 1  # all that lies in words' low bytes first: fewer registers wait
    for byte in tl.static_range(BYTES):
        for i in tl.static_range(byte, PAIRS, BYTES):
            # partners first: the other order spills registers (docs/benchmarks/decode_attention.md)
            y_0, y_1 = _both_halves(parts, p_scale, tokens, live, i + PAIRS, KEYS, EACH, NW, ASM)
            x_0, x_1 = _both_halves(parts, p_scale, tokens, live, i, KEYS, EACH, NW, ASM)
            x_0, y_0 = _rotated_pair(x_0, y_0, p_near, 0, i, PAIRS, ASM)
            x_1, y_1 = _rotated_pair(x_1, y_1, p_near, 1, i, PAIRS, ASM)
            b_x, b_y = _rotated_back(q[i], q[i + PAIRS], p_run + i * 32, live, NW)
            b_0 = tl.dot(y_0, b_y, tl.dot(x_0, b_x, b_0))
            b_1 = tl.dot(y_1, b_y, tl.dot(x_1, b_x, b_1))
    for i in tl.static_range(2 * PAIRS, SLICES):
        x_0, x_1 = _both_halves(parts, p_scale, tokens, live, i, KEYS, EACH, NW, ASM)
        b_0 = tl.dot(x_0, q[i], b_0)
        b_1 = tl.dot(x_1, q[i], b_1)
    return b_0, b_1


@triton.jit
def query_of(
    p_q, p_near, o_q, b_row, b_down, KEYS: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr, NW: tl.constexpr,
    N: tl.constexpr, ASM: tl.constexpr,
):
    """Return queries for `scores_of`: SLICES of [NW, 16, N] float16."""
    r = tl.arange(0, 16)
    q = ()
    for i in tl.static_range(SLICES):
        if KEYS.inner and i >= 2 * PAIRS:
            b_q = _joined_queries(p_q + o_q[None, :] + i * 16, b_row[None, :], N)
        else:
            b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0)
        b_q = (b_q.to(tl.float32) * b_down[None, :]).to(tl.float16)
        q = q + (tl.broadcast_to(b_q[None], [NW, 16, N]),)
    if ASM:
        _names(p_near, KEYS.bits)
    return q
