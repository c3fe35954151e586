"""Assembly of a block of codes that are bytes, products of 8-bit integers (m16n8k32).

One AND separates the codes of four numbers, not of two, and a product contracts 32 numbers, not 16. What codes meet has
16 bits in two parts, a column each: queries 256 high + low, signed, in steps of their row's largest / QUERY;
probabilities 256 high + low, unsigned, in steps of 1 / PROBABILITY of the power of two above the largest of the block's
32. So up to four query rows fill the eight columns, and a lane has both parts of one query.

Accumulators begin at MAGIC, the bits of 1.5 * 2^23: below 2^22 a sum added to them counts the last bits of that float,
so that no integer is converted. 256 (MAGIC + high) - 257 MAGIC + (MAGIC + low) is 256 high + low, exact except for
its last rounding.

Groups along what is contracted (inner: InnerQ) multiply what products give. Outer ones (KIVI, SQuat) multiply queries,
which are rounded again for each group (`renewed_queries`), and probabilities, before these are rounded.

Points of a grid (mode POINTS) are signed bytes times one step, which is part of the query's or the output's unit;
grids.py has the order of their codes. A code of 4 bits is what `prmt` selects a byte by, so that points of four numbers
are one instruction from a table of 8 entries in two registers. Of 16 entries its fourth bit makes it repeat the entry's
sign instead, 0 or -1: one `prmt` has the points of the codes below 8, a second one, of codes with that bit inverted,
those of the others, and two products add both up. That costs less than to select. A token's norm multiplies
its score, and its probabilities before these are rounded.

Operands are registers of tensors [warps, 16, 8] in the layout of a product's result, four a lane:

- state: the power of two that outputs are in, as an exponent; the lane's part of the sum; the query's unit, by which
  products become scores in powers of two; of outer groups, what zero points add to all channels.
- acc, D / 32 of them: slices 2 c and 2 c + 1 of outputs, channel (2 c + column % 2) * 16 + row of query column / 2.
- queries, a tensor for two groups of 32 channels: (group of the two, first or second register) of a second operand.
- begins: what a group's accumulators begin with; asymmetric: sums of a group's queries, a number each.
- points: a grid's table, four registers for each number of a point.
- places: shared addresses of a lane in slot 0 of the ring: for ldmatrix, of its key scales, of its value scales; for
  ldmatrix of half tiles, where there are such (`beyond`).

The interpreter does not run it: emulated.py computes the same there, and tests/kernels/attention/test_int8.py runs the
assembly.
"""

from __future__ import annotations

from ....layout.form import POINTS
from ....triton import constexpr_function
from ..numbers import half_tile_shift, side_by_side

MAGIC = 0x4B400000
MAGIC_FLOAT = 12582912.0
QUERY = 32639  # 127 * 256 + 127
PROBABILITY = 65534  # a rounding below 2^16
SLACK = 16  # powers of two by which a block may lie above the outputs before they are scaled again
# powers of two by which a block makes earlier tokens negligible: 2^17 tokens of 2^SLACK at most are 2^-43 of it.
# Outputs stay below 2^121: 32 probabilities of 2^16, codes of 2^8, scales of 2^16, times 2^JUMP
JUMP = 76


@constexpr_function
def pairs_of_word(bits: int) -> int:
    """Return the pairs of pieces that a word of 16 bits holds."""
    return {2: 4, 3: 4, 4: 2, 8: 1}[bits]


@constexpr_function
def field_place(pair: int, bits: int) -> int:
    """Return what a code in field `pair` of a byte counts, once separated."""
    counts: int = 16 ** (pair // 2) if bits == 3 else {2: 4, 4: 16, 8: 1}[bits] ** pair
    return counts


@constexpr_function
def decimal(x: float) -> str:
    """Return a float as PTX writes it."""
    return repr(float(x))


@constexpr_function
def separated_fields(bits: int, pair: int, into: list[str], words: list[str]) -> list[str]:
    """Return assembly that separates field `pair` of four registers; `words` of 3 bits come from `_thirds`."""
    if bits == 8:
        return [f"mov.b32 {a}, {w};" for a, w in zip(into, words, strict=True)]
    mask = {2: 0x03030303 << 2 * pair, 3: 0x07070707 << 4 * (pair // 2), 4: 0x0F0F0F0F << 4 * pair}[bits]
    return [f"and.b32 {a}, {w}, {mask};" for a, w in zip(into, words, strict=True)]


@constexpr_function
def _thirds(name: str, third: str, odd: bool) -> list[str]:
    """Return assembly that joins words {name}0..3 and their third bits: {name}e0..3 with fields 0 and 2, {name}o0..3
    with fields 1 and 3.
    """
    text = []
    for i in range(4):
        text += [f"shl.b32 t, {third}{i}, {1 if odd else 2}; lop3.b32 {name}e{i}, {name}{i}, t, 0x33333333, 0xE4;"]
        text += [f"shr.u32 t, {name}{i}, 2;"]
        u = f"{third}{i}"
        if odd:
            text += [f"shr.u32 u, {u}, 1;"]
            u = "u"
        text += [f"lop3.b32 {name}o{i}, t, {u}, 0x33333333, 0xE4;"]
    return text


@constexpr_function
def loaded_tiles(name: str, byte: int, bits: int, tiles: int, behind: int) -> list[str]:
    """Return assembly that loads registers {name}{tile}_ 0..3 of each tile (3 bits: with e and o, see `_thirds`).
    behind: where words end.
    """
    text, further = [], half_tile_shift((behind - byte) // 2, bits, 0)
    for u in range(tiles):
        text += [
            f".reg .b32 {name}{u}_<4>;" if bits != 3 else f".reg .b32 {name}{u}_<4>, {name}{u}_e<4>, {name}{u}_o<4>;"
        ]
        register, at = f"{name}{u}_", byte + 512 * u
        half = further and bits == 2 and u + 1 == tiles
        text += [_half_matrix(register, at, further) if half else _matrix(register, at)]
    if bits == 3:
        for u in range(0, tiles, 2):
            register, at = f"{name}third{u}_", byte + 512 * (tiles + u // 2)
            text += [
                f".reg .b32 {register}<4>;",
                _half_matrix(register, at, further) if u + 1 == tiles else _matrix(register, at),
            ]
            for v in range(u, min(u + 2, tiles)):
                text += _thirds(f"{name}{v}_", f"{name}third{u}_", v % 2 == 1)
    return text


@constexpr_function
def _matrix(name: str, byte: int) -> str:
    """Return assembly that loads a tile."""
    return f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{name}0, {name}1, {name}2, {name}3}}, [words+{byte}];"


@constexpr_function
def _half_matrix(name: str, byte: int, further: int) -> str:
    """Return assembly that loads half a tile, whose columns from 8 on lie `further` bits beyond the others. Other bits
    are anything.
    """
    load = f"ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{{name}0, {name}1}}, [halves+{byte}];"
    return f"{load} shr.u32 {name}2, {name}0, {further}; shr.u32 {name}3, {name}1, {further};"


# Of each kind of code: assembly, then (kind, set in the lower half of its registers, those registers); the upper half
# is the next set.


@constexpr_function
def _codes_of_four_bits(name: str, tiles: int) -> tuple[list[str], list[tuple[str, int, list[str]]]]:
    """Return assembly and registers of 4-bit codes, and of these codes with their highest bit inverted."""
    text = [f".reg .b32 {name}{u}_n<4>;" for u in range(tiles)]
    text += [f"xor.b32 {name}{u}_n{i}, {name}{u}_{i}, 0x88888888;" for u in range(tiles) for i in range(4)]
    codes = [
        (kind, 2 * u, [f"{name}{u}_{kind if kind == 'n' else ''}{i}" for i in range(4)])
        for u in range(tiles)
        for kind in "sn"
    ]
    return text, codes


@constexpr_function
def _codes_of_half_tiles(name: str) -> tuple[list[str], list[tuple[str, int, list[str]]]]:
    """Return assembly and registers of 3-bit codes at 64 channels."""
    text = [f".reg .b32 {name}0_l<4>, {name}1_l<4>;"]
    for i in range(4):
        text += [f"and.b32 {name}0_l{i}, {name}0_{i}, 0x77777777;"]
        text += [f"shr.u32 t, {name}0_{i}, 1; and.b32 t, t, 0x44444444;"]
        text += [f"lop3.b32 {name}1_l{i}, {name}1_{i}, 0x33333333, t, 0xEA;"]
    return text, [("s", 2 * u, [f"{name}{u}_l{i}" for i in range(4)]) for u in range(2)]


@constexpr_function
def _codes_of_three_bits(name: str, tiles: int) -> tuple[list[str], list[tuple[str, int, list[str]]]]:
    """Return assembly and registers of 3-bit codes."""
    text, codes = list[str](), list[tuple[str, int, list[str]]]()
    for u in range(tiles):
        text += [f".reg .b32 {name}{u}_l<4>;"]
        text += [f"and.b32 {name}{u}_l{i}, {name}{u}_{i}, 0x77777777;" for i in range(4)]
        codes += [("s", u // 3 * 8 + u % 3 * 2, [f"{name}{u}_l{i}" for i in range(4)])]
    for u in range(0, tiles - 2, 3):
        text += [f".reg .b32 {name}{u}_f<4>;"]
        for i in range(4):
            f = f"{name}{u}_f{i}"
            text += [f"shr.u32 t, {name}{u}_{i}, 3; and.b32 {f}, t, 0x11111111;"]
            for j in (1, 2):
                text += [f"shr.u32 t, {name}{u + j}_{i}, {3 - j}; lop3.b32 {f}, t, {0x11111111 << j}, {f}, 0xEA;"]
        codes += [("s", u // 3 * 8 + 6, [f"{name}{u}_f{i}" for i in range(4)])]
    return text, codes


@constexpr_function
def _codes_of_two_bits(name: str, tiles: int) -> tuple[list[str], list[tuple[str, int, list[str]]]]:
    """Return assembly and registers of 2-bit codes."""
    text, codes = list[str](), list[tuple[str, int, list[str]]]()
    for u in range(tiles):
        text += [f".reg .b32 {name}{u}_l<4>, {name}{u}_h<4>;"]
        for i in range(4):
            text += [f"and.b32 {name}{u}_l{i}, {name}{u}_{i}, 0x33333333;"]
            text += [f"shr.u32 t, {name}{u}_{i}, 2; and.b32 {name}{u}_h{i}, t, 0x33333333;"]
        codes += [("s", 4 * u + 2 * f, [f"{name}{u}_{'lh'[f]}{i}" for i in range(4)]) for f in range(2)]
    return text, codes


@constexpr_function
def grid_codes(name: str, byte: int, tiles: int, bits: int, behind: int) -> list[str]:
    """Return assembly for registers {name}s{set}_ 0..3 of each set of codes of `bits` bits, whose lower 16 bits are
    four codes; for 4 bits also {name}n{set}_ with their highest bit inverted. behind: the byte at which words end.
    """
    text, further = [], half_tile_shift((behind - byte) // 2, bits, POINTS)
    for u in range(tiles):
        register, at = f"{name}{u}_", byte + 512 * u
        half = further and u + 1 == tiles
        text += [f".reg .b32 {register}<4>;", _half_matrix(register, at, further) if half else _matrix(register, at)]
    if bits == 4:
        more, codes = _codes_of_four_bits(name, tiles)
    elif further:
        more, codes = _codes_of_half_tiles(name)
    elif bits == 3:
        more, codes = _codes_of_three_bits(name, tiles)
    else:
        more, codes = _codes_of_two_bits(name, tiles)
    text += more
    for kind, first, registers in codes:
        text += [f".reg .b32 {name}{kind}{first}_<4>, {name}{kind}{first + 1}_<4>;"]
        for i in range(4):
            text += [f"mov.b32 {name}{kind}{first}_{i}, {registers[i]};"]
            text += [f"shr.u32 {name}{kind}{first + 1}_{i}, {registers[i]}, 16;"]
    return text


@constexpr_function
def selected_points(into: str, name: str, which: int, bits: int, points: list[str]) -> list[str]:
    """Return assembly for registers {into}{part}_ 0..3: points of set `which` as first operands. Points of 4 bits have
    two parts that are added up.
    """
    text = []
    for part in range(products_of(bits)):
        table = points[2 * part : 2 * part + 2] if bits > 2 else points[:1] * 2
        for i in range(4):
            text += [f"prmt.b32 {into}{part}_{i}, {table[0]}, {table[1]}, {name}{'sn'[part]}{which}_{i};"]
    return text


@constexpr_function
def products_of(bits: int) -> int:
    """Return how many products points of codes of so many bits take."""
    return 2 if bits == 4 else 1


@constexpr_function
def points_tensors(mode: int, group: int) -> int:
    """Return how many tensors the points of a grid take."""
    return group if mode == POINTS else 0


@constexpr_function
def tile_words(name: str, tile: int, pair: int, bits: int) -> list[str]:
    """Return the registers of a tile that hold field `pair`."""
    kind = "" if bits != 3 else "eo"[pair % 2]
    return [f"{name}{tile}_{kind}{i}" for i in range(4)]


@constexpr_function
def loaded_scales(name: str, address: str, byte: int, count: int) -> list[str]:
    """Return assembly for registers {name}{column}_{0, 1}w of rows r and r + 8: columns of float16, stored [count /
    w][16][w], w to a register.
    """
    width, text = side_by_side(count), []
    for first in range(0, count, width):
        for row in range(2):
            into = f"{name}{first}_{row}w"
            at = byte + first * 32 + row * 16 * width
            text += [f".reg .b{16 * width} {into}; ld.shared.b{16 * width} {into}, [{address}+{at}];"]
    return text


@constexpr_function
def as_floats(name: str, count: int) -> list[str]:
    """Return assembly that converts the registers of `loaded_scales` to floats {name}{column}_{0, 1}."""
    width, text = side_by_side(count), []
    halves = ", ".join(f"h{i}" for i in range(width))
    for first in range(0, count, width):
        for row in range(2):
            text += [f".reg .f32 {name}{first + i}_{row};" for i in range(width)]
            text += [
                f"{{ .reg .b16 {halves}; mov.b{16 * width} {{{halves}}}, {name}{first}_{row}w;"
                if width > 1
                else f"{{ .reg .b16 h0; mov.b16 h0, {name}{first}_{row}w;"
            ]
            text += [f"cvt.f32.f16 {name}{first + i}_{row}, h{i};" for i in range(width)] + ["}"]
    return text


@constexpr_function
def int8_mma(out: str, a: list[str], b: list[str], begin: list[str], kinds: str) -> str:
    """Return one product of 8-bit integers, m16n8k32."""
    operands = ", ".join("{" + ", ".join(x) + "}" for x in ([f"{out}{i}" for i in range(4)], a, b, begin))
    return f"mma.sync.aligned.m16n8k32.row.col.s32.{kinds}.s32 {operands};"


@constexpr_function
def key_pair(pair: int, pieces: int, bits: int) -> tuple[int, int]:
    """Return (half block, group of 32 channels) of a pair of keys; see layout/form.py."""
    if pieces // 2 % pairs_of_word(bits) % 2:
        return pair % 2, pair // 2
    return pair // (pieces // 2), pair % (pieces // 2)
