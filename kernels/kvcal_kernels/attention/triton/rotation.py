"""Rotated queries and outputs: signs, Hadamard transforms, and how they mix an odd factor of head_dim."""

from __future__ import annotations

import triton
import triton.language as tl

# Rotation: a Hadamard transform of 2^k channels is one of 16 rows on tensor cores, then one of the tensors of a tuple.
# At head_dim 96 Paley's matrix of order 12 mixes the three parts of 32 channels with the two bits of a row that count
# four and eight channels (hadamard.rotate). It takes the place of two steps of the transform of rows.


@triton.jit
def sign_at(p_sign, at):
    """Return number `at` of int8 as float32. It is not loaded as a byte: Triton lays out a product's operands by the
    narrowest load that they come from, and with bytes takes kWidth 4 or, behind a join, 8, which contracts 32 numbers,
    not 16 (`check_layouts`).
    """
    both = tl.load(p_sign.to(tl.pointer_type(tl.int16)) + at // 2).to(tl.int32)
    return (both << 24 - at % 2 * 8 >> 24).to(tl.float32)


@triton.jit
def hadamard_tile(NW: tl.constexpr, TYPE: tl.constexpr):
    """Return the 16 x 16 Hadamard matrix of +1 and -1, once for each warp."""
    r = tl.arange(0, 16)
    v = r[:, None] & r[None, :]
    v = v ^ (v >> 2)
    v = v ^ (v >> 1)
    return tl.broadcast_to((1 - 2 * (v & 1)).to(TYPE)[None], [NW, 16, 16])


@triton.jit
def _butterfly(x, COUNT: tl.constexpr, STEP: tl.constexpr):
    sums = ()
    for i in tl.static_range(COUNT):
        sums = sums + (x[i] + x[i + STEP] if i // STEP % 2 == 0 else x[i - STEP] - x[i],)
    return sums


@triton.jit
def butterflies(x, COUNT: tl.constexpr, SPAN: tl.constexpr):
    """Apply the Hadamard transform across every SPAN of a tuple's COUNT tensors."""
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
    """Return an entry of the orthonormal cosine transform of three numbers, the odd factor of head_dim 96:
    hadamard.cosines(3), which Triton 3.6 lets no compiled function call. back: of its transpose.
    """
    row, column = (column, row) if back else (row, column)
    if row == 0:
        return 3**-0.5
    return (1 - column) * 2**-0.5 if row == 1 else (1 - column % 2 * 3) * 6**-0.5


@triton.jit
def across_factor(x, COUNT: tl.constexpr, SPAN: tl.constexpr, FACTOR: tl.constexpr, BACK: tl.constexpr):
    """Apply cosine transforms of FACTOR numbers across spans of SPAN of a tuple's COUNT tensors, as `hadamard.rotate`
    has them; BACK: the inverse.
    """
    if FACTOR == 1:
        return x
    else:  # noqa: RET505 (both are compiled otherwise)
        sums = ()
        for i in tl.static_range(COUNT):
            total = x[i // (SPAN * FACTOR) * (SPAN * FACTOR) + i % SPAN] * _across_weight(i // SPAN % FACTOR, 0, BACK)
            for j in tl.static_range(1, FACTOR):
                part = x[i // (SPAN * FACTOR) * (SPAN * FACTOR) + j * SPAN + i % SPAN]
                total += part * _across_weight(i // SPAN % FACTOR, j, BACK)
            sums = sums + (total,)
        return sums


@triton.constexpr_function
def _paley_signs(row, column):
    """Return 16 bits of Paley's Hadamard matrix of order 12 (hadamard.paley(12)): bit 4 s + t is set where its entry
    (4 row + s, 4 column + t) is -1.
    """
    signs = 0
    for s in range(4):
        for t in range(4):
            i, j = 4 * row + s, 4 * column + t
            negative = i > 0 and (j == 0 or (j != i and (j - i) % 11 not in (1, 3, 4, 5, 9)))
            signs += negative << (4 * s + t)
    return signs


@triton.jit
def _paley_tile(ROW: tl.constexpr, COLUMN: tl.constexpr, PLACE: tl.constexpr, BACK: tl.constexpr, NW: tl.constexpr,
                TYPE: tl.constexpr):
    """Return 16 x 16 numbers +1 and -1, once for each warp: Paley's matrix of order 12 between bits PLACE and PLACE + 1
    of the rows of part ROW and of the columns of part COLUMN, a Hadamard matrix between the others. BACK: of the
    transposed matrix.
    """
    r = tl.arange(0, 16)
    row, column = (r[:, None] >> PLACE) & 3, (r[None, :] >> PLACE) & 3
    if BACK:
        bit = (_paley_signs(COLUMN, ROW) >> (4 * column + row)) & 1
    else:
        bit = (_paley_signs(ROW, COLUMN) >> (4 * row + column)) & 1
    v = r[:, None] & r[None, :] & (15 - (3 << PLACE))
    v = v ^ (v >> 2)
    v = v ^ (v >> 1) ^ bit
    return tl.broadcast_to((1 - 2 * (v & 1)).to(TYPE)[None], [NW, 16, 16])


@triton.jit
def _paley_row(x, PART: tl.constexpr, FIRST: tl.constexpr, SPAN: tl.constexpr, FACTOR: tl.constexpr,
               PLACE: tl.constexpr, BACK: tl.constexpr, NW: tl.constexpr):
    """Return part PART of Paley's matrix, divided by the root of FACTOR, times tensors FIRST, FIRST + SPAN, ... of
    x.
    """
    b_x = tl.dot(_paley_tile(PART, 0, PLACE, BACK, NW, x[FIRST].dtype), x[FIRST], input_precision="tf32x3")
    for j in tl.static_range(1, FACTOR):
        tile = _paley_tile(PART, j, PLACE, BACK, NW, x[FIRST].dtype)
        b_x = tl.dot(tile, x[FIRST + j * SPAN], b_x, input_precision="tf32x3")
    return b_x * FACTOR**-0.5


@triton.jit
def across_rows(x, COUNT: tl.constexpr, SPAN: tl.constexpr, FACTOR: tl.constexpr, PALEY: tl.constexpr,
                PLACE: tl.constexpr, BACK: tl.constexpr, NW: tl.constexpr):
    """Apply the Hadamard transform across the 16 rows of a tuple's COUNT tensors [NW, 16, N], float32 or float16 ->
    float32. PALEY: also across FACTOR spans of SPAN tensors, with what bits PLACE and PLACE + 1 of a row count.
    """
    sums = ()
    for i in tl.static_range(COUNT):
        if PALEY:
            b_x = _paley_row(
                x, i // SPAN % FACTOR, i // (SPAN * FACTOR) * (SPAN * FACTOR) + i % SPAN, SPAN, FACTOR, PLACE, BACK, NW
            )
        else:
            b_x = tl.dot(hadamard_tile(NW, x[i].dtype), x[i], input_precision="tf32x3")
        sums = sums + (b_x,)
    return sums


@triton.jit
def parity_step(x, NW: tl.constexpr, N: tl.constexpr):
    """Apply the step between even and odd channels, which are neighbouring columns."""
    even, odd = tl.split(tl.reshape(x, [NW, 16, N // 2, 2]))
    return tl.reshape(tl.join(even + odd, even - odd), [NW, 16, N])


@triton.jit
def rotated_queries(
    p_q, p_sign, o_q, b_row, b_down, i_kv, SLICES: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    FACTOR: tl.constexpr, PALEY: tl.constexpr, FOUR: tl.constexpr, NW: tl.constexpr, N: tl.constexpr,
):
    """Return queries times b_down [N] and their head's signs, rotated except for the factor WIDTH^-0.5: SLICES of [NW,
    16, N] float32.
    """
    slices = ()
    for i in tl.static_range(SLICES):
        channel = query_channels(i, FOUR)
        b_q = tl.load(p_q + o_q[None, :] + channel[:, None], mask=b_row[None, :], other=0.0)
        sign = sign_at(p_sign, i_kv * D + channel)
        b_q = (b_q.to(tl.float32) * b_down[None, :] * sign[:, None]).to(tl.float16)
        slices = slices + (tl.broadcast_to(b_q[None], [NW, 16, N]),)
    rotated = across_rows(slices, SLICES, WIDTH // 16, FACTOR, PALEY, 1 if FOUR else 2, False, NW)
    rotated = butterflies(rotated, SLICES, WIDTH // 16)
    return across_factor(rotated, SLICES, WIDTH // 16, 1 if PALEY else FACTOR, False)


@triton.jit
def query_channels(i: tl.constexpr, FOUR: tl.constexpr):
    """Return the channels of slice i of queries (16,). FOUR: a code stands for four of them."""
    r = tl.arange(0, 16)
    return i // 2 * 32 + r // 2 * 4 + i % 2 * 2 + r % 2 if FOUR else i * 16 + r


@triton.jit
def value_channels(i: tl.constexpr, r, odd, PAIRED: tl.constexpr, FOUR: tl.constexpr):
    """Return the channels of rows r of slice i of values. odd: which one of a pair, of neighbours or, with PAIRED 2, of
    slices; other layouts have no pairs.
    """
    if PAIRED == 0:
        return i * 16 + r + odd * 0
    if PAIRED == 2:
        return i * 32 + odd * 16 + r
    return i * 32 + (r % 8 * 4 + r // 8 * 2 if FOUR else r * 2) + odd
