"""Operands of 8-bit products that are made once a program: queries in bytes, constants, states and addresses."""

from __future__ import annotations

import triton
import triton.language as tl

from ....layout.form import POINTS
from ..numbers import LOW, side_by_side
from ..queries import row_offset
from ..rotation import rotated_queries
from ..softmax import dtypes
from ..tiles import lane_zeros
from .ptx import JUMP, MAGIC_FLOAT, PROBABILITY, QUERY, SLACK, field_place, pairs_of_word
from .scores import beginning, beginning_constraints, beginning_tensors, spreading

FULL_QUERY, FULL_PROBABILITY, ROUND = tl.constexpr(QUERY), tl.constexpr(PROBABILITY), tl.constexpr(MAGIC_FLOAT)
BLOCK_SLACK, BLOCK_JUMP = tl.constexpr(SLACK), tl.constexpr(JUMP)


@triton.constexpr_function
def slice_weight(i, bits, mode):
    """Return what a code of slice i counts."""
    return 1.0 if mode == POINTS else float(field_place(i % pairs_of_word(bits), bits))


@triton.jit
def _two_numbers(word, TYPE: tl.constexpr):
    """Return two numbers of TYPE, 16 bits each, of a word int32 as float32, the first from its low half."""
    low = word.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return low, (word >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def _bytes_of(one, two, which):
    """Select bytes of two registers by `which`."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [one, two, which], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _fixed(x, inverse, rounded):
    """Return the bits of x times its row's factor, as integers in the low bits of a float of the size of `rounded`."""
    factor = tl.broadcast_to(inverse[:, None], x.shape)
    return tl.fma(x, factor, tl.broadcast_to(rounded, x.shape)).to(tl.int32, bitcast=True)


@triton.jit
def _bytes_of_queries(p_q, o_t, there, inverse, D: tl.constexpr, NW: tl.constexpr):
    """Return queries as ptx.py has them, int32 [NW, 16, 8] for every two groups of channels. o_t, there, inverse (16,):
    of row n % 8 where the row begins, whether it exists, and by what it is multiplied. Compiled code only.
    """
    r, column = tl.arange(0, 16)[:, None], tl.arange(0, 8)[None, :]
    p_pair = p_q.to(tl.pointer_type(tl.int32))
    high = r % 2 == 0
    # a high byte is that of the number rounded to a multiple of 256
    rounded = tl.where(high, ROUND + 128.0, ROUND)
    which = tl.where(high, 0x51, 0x40) + column * 0
    registers = ()
    for c in tl.static_range((D + 63) // 64):
        channel = (2 * c + r // 8) * 32 + column // 2 * 2 + column % 2 * 8
        p_word = p_pair + (o_t[:, None] + channel) // 2
        x0, x1 = _two_numbers(tl.load(p_word, mask=there[:, None] & (channel < D), other=0), p_q.dtype.element_ty)
        further = there[:, None] & (channel + 16 < D)
        x2, x3 = _two_numbers(tl.load(p_word + 8, mask=further, other=0), p_q.dtype.element_ty)
        first = _bytes_of(_fixed(x0, inverse, rounded), _fixed(x2, inverse, rounded), which)
        second = _bytes_of(_fixed(x1, inverse, rounded), _fixed(x3, inverse, rounded), which)
        registers = registers + (
            _bytes_of(first, second, tl.full([16, 8], 0x5410, tl.int32))[None] + lane_zeros(NW, 8),
        )
    return registers


@triton.jit
def _rotated_bytes(plain, inverse, SLICES: tl.constexpr, NW: tl.constexpr, N: tl.constexpr):
    """Return rotated queries plain, SLICES of [NW, 16, N] float32, times inverse [NW, N] in the registers of
    `_bytes_of_queries`: a byte of the register is of a slice, even channels of 64 neighbours come before odd ones.
    Compiled code only.
    """
    high = (tl.arange(0, N) % 2 == 0)[None, None, :]
    factor = tl.broadcast_to(inverse[:, None, :], [NW, 16, N])
    rounded = tl.broadcast_to(tl.where(high, ROUND + 128.0, ROUND), [NW, 16, N])
    which = tl.broadcast_to(tl.where(high, 0x51, 0x40), [NW, 16, N])
    registers = ()
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
        transposed = tl.permute(
            tl.reshape(four, [NW, 8, 2, 8]), [0, 2, 3, 1]
        )  # parity, row of the query, pair of channels
        registers = registers + (tl.reshape(transposed, [NW, 16, 8]) + lane_zeros(NW, 8),)
    return registers


@triton.jit
def byte_tables(p_table, COUNT: tl.constexpr, NW: tl.constexpr, N: tl.constexpr):
    """Load COUNT tensors of `Grid.table` of a grid in bytes, four registers each."""
    number, _ = _lanes(NW, N)
    tables = ()
    for i in tl.static_range(COUNT):
        tables = tables + (tl.load(p_table.to(tl.pointer_type(tl.int32)) + (i * 4 + number)),)
    return tables


@triton.jit
def accumulator_starts(queries, SLICES: tl.constexpr, PIECES: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr):
    """Return what products begin with, of queries in bytes (`beginning`)."""
    COUNT: tl.constexpr = beginning_tensors(SLICES, PIECES, BITS, MODE)
    KIND: tl.constexpr = tl.int32 if MODE == 0 else tl.float32
    return tl.inline_asm_elementwise(
        beginning(SLICES, PIECES, BITS, MODE), beginning_constraints(SLICES, PIECES, BITS, MODE), queries,
        dtype=dtypes(KIND, COUNT), is_pure=True, pack=4,
    )


@triton.jit
def spread_state(state, WHICH: tl.constexpr):
    """Return a lane's registers of the state in the order of WHICH."""
    return tl.inline_asm_elementwise(
        spreading(WHICH), "=&f,=&f,=&f,=&f,f,f,f,f", [state], dtype=tl.float32, is_pure=True, pack=4
    )


@triton.jit
def _lanes(NW: tl.constexpr, N: tl.constexpr):
    """Return for each number of a product's result [NW, 16, N] which of its lane's four numbers it is, and the lane."""
    b_none = lane_zeros(NW, N)
    r, column = tl.arange(0, 16)[None, :, None] + b_none, tl.arange(0, N)[None, None, :] + b_none
    return r // 8 * 2 + column % 2, r % 8 * 4 + column // 2


@triton.jit
def first_state(
    unit, at, KEYS: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, HALVES: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr,
):
    """Return state and places of ptx.py. unit [NW, N]; at [NW]: where each warp's ring begins. HALVES: whether keys or
    values have half tiles.
    """
    number, lane = _lanes(NW, N)
    row = lane & 15
    words = row * 32 + ((lane >> 4) ^ (row >> 2 & 1)) * 16
    keys, values = lane % 4 * 8, lane // 8 * 8 + lane // 4 % 2 * 2
    if KEYS.points:
        keys = lane // 4 * 2
    if VALUES.points:
        values = lane // 4 * 2
    if KEYS.inner:
        keys = lane // 4 * (2 * side_by_side(D // KEYS.group * KEYS.columns))
    if VALUES.inner:
        values = lane // 4 * (2 * side_by_side(D // 16 * VALUES.columns))
    state = tl.where(number == 0, LOW, tl.where(number == 2, unit[:, None, :], 0.0))
    places = tl.where(number == 0, words, tl.where(number == 1, keys, values))
    if HALVES:
        places = tl.where(number == 3, (row ^ row >> 3) * 16, places)
    return state, places + at[:, None, None]


@triton.jit
def first_base(unit, NW: tl.constexpr, N: tl.constexpr):
    """Return `base` of ptx.py, int32."""
    number, lane = _lanes(NW, N)
    low = lane // 4 % 2
    rounded = tl.where(low == 1, ROUND, ROUND + 128.0)
    base = tl.where(number == 0, unit[:, None, :], rounded).to(tl.int32, bitcast=True)
    return tl.where(number == 2, tl.where(low == 1, 0x40, 0x51), base)


@triton.jit
def float16_queries(p_q, o_t, there, shrink, D: tl.constexpr, NW: tl.constexpr):
    """Return queries times shrink as registers of second operands of 16 float16, int32 [NW, 16, 8] for every two
    slices. o_t, there, shrink: as `_bytes_of_queries` has them.
    """
    r, column = tl.arange(0, 16)[:, None], tl.arange(0, 8)[None, :]
    registers = ()
    for c in tl.static_range(D // 32):
        channel = (2 * c + r // 8) * 16 + column // 2 * 2 + column % 2 * 8
        word = tl.zeros([16, 8], tl.int32)
        for i in tl.static_range(2):
            x = tl.load(p_q + o_t[:, None] + channel + i, mask=there[:, None], other=0.0).to(tl.float32)
            x = x * shrink[:, None]
            word = word | (x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) << (16 * i)
        registers = registers + (word[None] + lane_zeros(NW, 8),)
    return registers


@triton.jit
def hidden_constants(capacity, NUMBERS: tl.constexpr, NW: tl.constexpr, N: tl.constexpr):
    """Return tensors of one number each, in registers that the compiler does not know to be constant: it would move
    each again for every product, whose operands are four neighbouring registers. capacity: not negative, which the
    compiler does not know either.
    """
    b_none = lane_zeros(NW, N)
    number = tl.arange(0, 16)[None, :, None] * N + tl.arange(0, N)[None, None, :]  # of lanes too: no uniform registers
    hidden = (capacity >> 31) * (number + 1) + b_none
    numbers = ()
    for i in tl.static_range(len(NUMBERS)):
        numbers = numbers + (hidden + NUMBERS[i],)
    return numbers


@triton.jit
def query_of_points(
    p_q, p_sign, o_q, b_row, b_down, b_up, i_kv, SLICES: tl.constexpr, WIDTH: tl.constexpr, NW: tl.constexpr,
    N: tl.constexpr, ASM: tl.constexpr,
):
    """Return rotated queries for keys of points in bytes, as `_rotated_bytes` or, interpreted, as integers; and b_up
    times a step.
    """
    plain = rotated_queries(p_q, p_sign, o_q, b_row, b_down, i_kv, SLICES, SLICES * 16, WIDTH, 1, False, False, NW, N)
    b_high = tl.full([NW, 16, N], 2.0**-24, tl.float32)
    for i in tl.static_range(SLICES):
        b_high = tl.maximum(b_high, tl.abs(plain[i]))
    b_step = tl.max(b_high, 1) * (1 / FULL_QUERY)
    b_finite = tl.sum(plain[0] - plain[0], 1)  # 0, or NaN where a number is not finite, which integers do not show
    q = ()
    if ASM:
        q = _rotated_bytes(plain, 1 / b_step, SLICES, NW, N)
    else:
        for i in tl.static_range(SLICES):
            q = q + (tl.floor(plain[i] / b_step[:, None, :] + 0.5),)
    return q, b_up * tl.max(b_step + b_finite, 0)


@triton.jit
def query_of(
    p_q, b_q, i_head, i_chunk, o_q, b_row, KEYS: tl.constexpr, SLICES: tl.constexpr, RATIO: tl.constexpr,
    QUERIES: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Return queries for keys of integers: q in two bytes, for outer groups what the assembly renews; sums with which
    products begin; plain_q, for outer groups, in float16; and b_up, by which a row is larger than what is multiplied.
    b_q: `whole_rows`.
    """
    r = tl.arange(0, 16)
    q, sums, plain_q = (), (), ()
    ROWS: tl.constexpr = N // 2
    # as integers, which order floats that are not negative, NaN above all
    b_up = tl.max(b_q.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    b_up = tl.maximum(b_up, 27 << 23).to(tl.float32, bitcast=True)  # 2^-100
    b_finite = b_up - b_up  # 0, or NaN where a number is not finite: integers do not show it
    n_t = i_chunk * ROWS + r % 8 // 2
    there = n_t < RATIO * QUERIES
    o_t = row_offset(i_head, n_t, RATIO, QUERIES, SLICES * 16)
    if KEYS.outer:  # powers of two: below 1
        b_up = (b_up.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 2.0
        b_down = tl.reshape(tl.broadcast_to((1 / b_up)[None, :, None], [2, ROWS, 2]), [16])
        plain_q = float16_queries(p_q, o_t, there, b_down, SLICES * 16, NW)
        if ASM:
            for _ in tl.static_range((SLICES + 3) // 4):
                q = q + (lane_zeros(NW, 8),)
            q = q + (lane_zeros(NW, 8).to(tl.float32),)
    else:
        b_up = b_up * (1 / FULL_QUERY)
        b_down = tl.reshape(tl.broadcast_to((1 / b_up)[None, :, None], [2, ROWS, 2]), [16])
        if ASM:
            q = _bytes_of_queries(p_q, o_t, there, b_down, SLICES * 16, NW)
    b_up = tl.reshape(tl.broadcast_to((b_up + b_finite)[:, None], [ROWS, 2]), [N])
    if not ASM:
        for i in tl.static_range(SLICES):
            b_q = tl.load(p_q + o_q[None, :] + (i * 16 + r)[:, None], mask=b_row[None, :], other=0.0)
            b_q = b_q.to(tl.float32) / b_up[None, :]
            b_q = b_q.to(tl.float16).to(tl.float32) if KEYS.outer else tl.floor(b_q + 0.5)
            q = q + (tl.broadcast_to(b_q[None], [NW, 16, N]),)
    if ASM and KEYS.inner:
        sums = accumulator_starts(q, SLICES, KEYS.pieces, KEYS.bits, KEYS.mode)
    return q, sums, plain_q, b_up
