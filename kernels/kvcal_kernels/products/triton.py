"""Assembly of a block of codes that are bytes, products of 8-bit integers (m16n8k32).

One AND separates the codes of four numbers, not of two, and a product contracts 32 numbers, not 16. What codes meet has
16 bits in two parts, a column each: queries 256 high + low, signed, in steps of their row's largest / QUERY; probabilities
256 high + low, unsigned, in steps of 1 / PROBABILITY of the power of two above the largest of the block's 32. So up to four
query rows fill the eight columns, and a lane has both parts of one query.

Accumulators begin at MAGIC, the bits of 1.5 * 2^23: below 2^22 a sum added to them counts the last bits of that float, so
that no integer is converted. 256 (MAGIC + high) - 257 MAGIC + (MAGIC + low) is 256 high + low, exact but for its last
rounding.

Groups along what is contracted (inner: InnerQ) multiply what products give. Outer ones (KIVI, SQuat) multiply queries, which
are rounded anew for each group (`_renewed`), and probabilities, before these are rounded.

Points of a grid (mode POINTS) are signed bytes times one step, which is part of the query's or the output's unit; grids.py has
the order of their codes. A code of 4 bits is what `prmt` selects a byte by, so that points of four numbers are one instruction
from a table of 8 entries in two registers. Of 16 entries its fourth bit makes it repeat the entry's sign instead, 0 or -1: one
`prmt` has the points of the codes below 8, a second one, of codes with that bit turned over, those of the others, and two
products add both up (`parted`). That costs less than to select. A token's norm multiplies its score, and its probabilities
before these are rounded.

Operands are registers of tensors [warps, 16, 8] in the layout of a product's result, four a lane, with a meaning of their own:

- state: the power of two that outputs are in, as an exponent; the lane's part of the sum; the query's unit, by which products
  become scores in powers of two; of outer groups, what zero points add to all channels.
- acc, D / 32 of them: slices 2 c and 2 c + 1 of outputs, channel (2 c + column % 2) * 16 + row of query column / 2.
- queries, a tensor for two groups of 32 channels: (group of the two, first or second register) of a second operand.
- begins: what a group's accumulators begin with; asymmetric: sums of a group's queries, a number each.
- points: a grid's table, four registers for each number of a point.
- places: shared addresses of a lane in slot 0 of the ring: for ldmatrix, of its key scales, of its value scales; for ldmatrix
  of half tiles, where there are such (`beyond`).

The interpreter does not run it: `_byte_step` in attention/triton.py computes the same there, tests/test_products.py runs the
assembly.
"""

from __future__ import annotations

from typing import Any

from ..attention.reference import together
from ..triton import constexpr_function

MAGIC = 0x4B400000
MAGIC_FLOAT = 12582912.0
QUERY = 32639  # 127 * 256 + 127
PROBABILITY = 65534  # a rounding below 2^16
SLACK = 16  # powers of two by which a block may lie above the outputs before they are scaled anew
# by which what was before is nothing beside a block: 2^17 tokens of 2^SLACK at most are 2^-43 of it. Outputs stay below 2^121:
# 32 probabilities of 2^16, codes of 2^8, scales of 2^16, times 2^JUMP
JUMP = 76
POINTS = 5  # a mode: points of a grid; its `group` is how many numbers a code stands for
_together = constexpr_function(together)


@constexpr_function
def pairs_of_word(bits: int) -> int:
    """Pairs of pieces that a word of 16 bits holds."""
    return {2: 4, 3: 4, 4: 2, 8: 1}[bits]


@constexpr_function
def field_place(pair: int, bits: int) -> int:
    """What a code in field `pair` of a byte counts, once separated."""
    counts: int = 16 ** (pair // 2) if bits == 3 else {2: 4, 4: 16, 8: 1}[bits] ** pair
    return counts


@constexpr_function
def _float(x: float) -> str:
    return repr(float(x))


@constexpr_function
def _separated(bits: int, pair: int, into: list[str], words: list[str]) -> list[str]:
    """Field `pair` of four registers; of 3 bits `words` are what `_thirds` made."""
    if bits == 8:
        return [f"mov.b32 {a}, {w};" for a, w in zip(into, words, strict=True)]
    mask = {2: 0x03030303 << 2 * pair, 3: 0x07070707 << 4 * (pair // 2), 4: 0x0F0F0F0F << 4 * pair}[bits]
    return [f"and.b32 {a}, {w}, {mask};" for a, w in zip(into, words, strict=True)]


@constexpr_function
def _thirds(name: str, third: str, odd: bool) -> list[str]:
    """Of words {name}0..3 and their third bits: {name}e0..3 with fields 0 and 2, {name}o0..3 with fields 1 and 3."""
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
def _loaded(name: str, byte: int, bits: int, tiles: int, behind: int) -> list[str]:
    """Registers {name}{tile}_ 0..3 of each tile (of 3 bits with e and o, see `_thirds`). behind: where words end."""
    text, further = [], beyond((behind - byte) // 2, bits, 0)
    for u in range(tiles):
        text += [
            f".reg .b32 {name}{u}_<4>;" if bits != 3 else f".reg .b32 {name}{u}_<4>, {name}{u}_e<4>, {name}{u}_o<4>;"
        ]
        own, at = f"{name}{u}_", byte + 512 * u
        half = further and bits == 2 and u + 1 == tiles
        text += [_half_matrix(own, at, further) if half else _matrix(own, at)]
    if bits == 3:
        for u in range(0, tiles, 2):
            own, at = f"{name}third{u}_", byte + 512 * (tiles + u // 2)
            text += [f".reg .b32 {own}<4>;", _half_matrix(own, at, further) if u + 1 == tiles else _matrix(own, at)]
            for v in range(u, min(u + 2, tiles)):
                text += _thirds(f"{name}{v}_", f"{name}third{u}_", v % 2 == 1)
    return text


@constexpr_function
def _matrix(name: str, byte: int) -> str:
    return f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{name}0, {name}1, {name}2, {name}3}}, [words+{byte}];"


@constexpr_function
def _half_matrix(name: str, byte: int, further: int) -> str:
    """As `_matrix` of half a tile, whose columns from 8 on lie `further` bits beyond the others. Other bits are anything."""
    load = f"ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{{name}0, {name}1}}, [halves+{byte}];"
    return f"{load} shr.u32 {name}2, {name}0, {further}; shr.u32 {name}3, {name}1, {further};"


@constexpr_function
def beyond(words: int, bits: int, mode: int) -> int:
    """How many bits columns from 8 on lie beyond the others in the half tile with which words end; 0 where the last one is
    whole. See attention/reference.py and grids.py.
    """
    if words % 256 == 0:
        return 0
    return 2 if mode == POINTS else 1 if bits == 3 else 4


@constexpr_function
def _coded(name: str, byte: int, tiles: int, bits: int, behind: int) -> list[str]:
    """Registers {name}s{set}_ 0..3 of each set of codes of `bits` bits, whose lower 16 bits are four codes; of 4 bits
    {name}n{set}_ with their highest bit turned over. behind: the byte at which words end.
    """
    text, further = [], beyond((behind - byte) // 2, bits, POINTS)
    for u in range(tiles):
        own, at = f"{name}{u}_", byte + 512 * u
        half = further and u + 1 == tiles
        text += [f".reg .b32 {own}<4>;", _half_matrix(own, at, further) if half else _matrix(own, at)]
    made: list[
        tuple[str, int, list[str]]
    ] = []  # kind, set in the lower half (the next one is in the upper), its registers
    if bits == 4:
        text += [f".reg .b32 {name}{u}_n<4>;" for u in range(tiles)]
        text += [f"xor.b32 {name}{u}_n{i}, {name}{u}_{i}, 0x88888888;" for u in range(tiles) for i in range(4)]
        made = [(kind, 2 * u, [f"{name}{u}_{kind if kind == 'n' else ''}{i}" for i in range(4)])
                for u in range(tiles) for kind in "sn"]  # fmt: skip
    elif further:
        text += [f".reg .b32 {name}0_l<4>, {name}1_l<4>;"]
        for i in range(4):
            text += [f"and.b32 {name}0_l{i}, {name}0_{i}, 0x77777777;"]
            text += [f"shr.u32 t, {name}0_{i}, 1; and.b32 t, t, 0x44444444;"]
            text += [f"lop3.b32 {name}1_l{i}, {name}1_{i}, 0x33333333, t, 0xEA;"]
        made = [("s", 2 * u, [f"{name}{u}_l{i}" for i in range(4)]) for u in range(2)]
    elif bits == 3:
        for u in range(tiles):
            text += [f".reg .b32 {name}{u}_l<4>;"]
            text += [f"and.b32 {name}{u}_l{i}, {name}{u}_{i}, 0x77777777;" for i in range(4)]
            made += [("s", u // 3 * 8 + u % 3 * 2, [f"{name}{u}_l{i}" for i in range(4)])]
        for u in range(0, tiles - 2, 3):
            text += [f".reg .b32 {name}{u}_f<4>;"]
            for i in range(4):
                f = f"{name}{u}_f{i}"
                text += [f"shr.u32 t, {name}{u}_{i}, 3; and.b32 {f}, t, 0x11111111;"]
                for j in (1, 2):
                    text += [f"shr.u32 t, {name}{u + j}_{i}, {3 - j}; lop3.b32 {f}, t, {0x11111111 << j}, {f}, 0xEA;"]
            made += [("s", u // 3 * 8 + 6, [f"{name}{u}_f{i}" for i in range(4)])]
    else:
        for u in range(tiles):
            text += [f".reg .b32 {name}{u}_l<4>, {name}{u}_h<4>;"]
            for i in range(4):
                text += [f"and.b32 {name}{u}_l{i}, {name}{u}_{i}, 0x33333333;"]
                text += [f"shr.u32 t, {name}{u}_{i}, 2; and.b32 {name}{u}_h{i}, t, 0x33333333;"]
            made += [("s", 4 * u + 2 * f, [f"{name}{u}_{'lh'[f]}{i}" for i in range(4)]) for f in range(2)]
    for kind, first, registers in made:
        text += [f".reg .b32 {name}{kind}{first}_<4>, {name}{kind}{first + 1}_<4>;"]
        for i in range(4):
            text += [f"mov.b32 {name}{kind}{first}_{i}, {registers[i]};"]
            text += [f"shr.u32 {name}{kind}{first + 1}_{i}, {registers[i]}, 16;"]
    return text


@constexpr_function
def _pointed(into: str, name: str, which: int, bits: int, points: list[str]) -> list[str]:
    """Registers {into}{part}_ 0..3: points of set `which` as first operands, of 4 bits in two parts that are added up."""
    text = []
    for part in range(parts_of(bits)):
        table = points[2 * part : 2 * part + 2] if bits > 2 else points[:1] * 2
        for i in range(4):
            text += [f"prmt.b32 {into}{part}_{i}, {table[0]}, {table[1]}, {name}{'sn'[part]}{which}_{i};"]
    return text


@constexpr_function
def parts_of(bits: int) -> int:
    """Products that points of codes of so many bits take."""
    return 2 if bits == 4 else 1


@constexpr_function
def points_tensors(mode: int, group: int) -> int:
    return group if mode == POINTS else 0


@constexpr_function
def _words(name: str, tile: int, pair: int, bits: int) -> list[str]:
    kind = "" if bits != 3 else "eo"[pair % 2]
    return [f"{name}{tile}_{kind}{i}" for i in range(4)]


@constexpr_function
def _stored(name: str, address: str, byte: int, count: int) -> list[str]:
    """Registers {name}{column}_{0, 1}w of rows r and r + 8: columns of float16, stored [count / w][16][w], w to a register."""
    width, text = _together(count), []
    for first in range(0, count, width):
        for row in range(2):
            into = f"{name}{first}_{row}w"
            at = byte + first * 32 + row * 16 * width
            text += [f".reg .b{16 * width} {into}; ld.shared.b{16 * width} {into}, [{address}+{at}];"]
    return text


@constexpr_function
def _converted(name: str, count: int) -> list[str]:
    """What `_stored` holds as floats {name}{column}_{0, 1}."""
    width, text = _together(count), []
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
def _mma(out: str, a: list[str], b: list[str], begin: list[str], kinds: str) -> str:
    given = ", ".join("{" + ", ".join(x) + "}" for x in ([f"{out}{i}" for i in range(4)], a, b, begin))
    return f"mma.sync.aligned.m16n8k32.row.col.s32.{kinds}.s32 {given};"


@constexpr_function
def key_pair(pair: int, pieces: int, bits: int) -> tuple[int, int]:
    """(half block, group of 32 channels) of a pair of keys; see attention/reference.py."""
    if pieces // 2 % pairs_of_word(bits) % 2:
        return pair % 2, pair // 2
    return pair // (pieces // 2), pair % (pieces // 2)


@constexpr_function
def groups_begun(slices: int, pieces: int, bits: int) -> list[tuple[int, int]]:
    """(group of 32 channels, place) of keys, each combination once, in the order of `begins`."""
    found: list[tuple[int, int]] = []
    for pair in range(pieces):  # of both halves
        made = key_pair(pair, pieces, bits)[1], field_place(pair % pairs_of_word(bits), bits)
        if made[0] < slices // 2 and made not in found:
            found.append(made)
    return found


@constexpr_function
def beginning(slices: int, pieces: int, bits: int, mode: int) -> str:
    """begins of queries: a symmetric code c counts c - 2^(bits - 1), so that accumulators begin at MAGIC minus that much of
    the queries' sum; outputs are tensors of `groups_begun`. Asymmetric: sums of a group's queries, four groups a tensor.
    """
    begun = groups_begun(slices, pieces, bits) if mode == 0 else [(g, 1) for g in range(slices // 2)]
    outputs = 4 * len(begun) if mode == 0 else 4 * -(-len(begun) // 4)
    text = ["{ .reg .b32 one, magic; .reg .b32 s<4>; .reg .f32 x, y;", f"mov.b32 magic, {MAGIC};"]
    for i in range(len(begun)):
        group, place = begun[i]
        minus = (256 - place * 2 ** (bits - 1)) % 256 if mode == 0 else 1
        query = [f"${outputs + 2 * group + j}" for j in range(2)]
        text += [f"mov.b32 one, {minus * 0x01010101};"]
        into = [f"${4 * i + j}" for j in range(4)] if mode == 0 else [f"s{j}" for j in range(4)]
        given = ", ".join("{" + ", ".join(x) + "}" for x in (into, ["one"] * 4, query, ["magic"] * 4))
        text += [f"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {given};"]
        if mode == 1:
            text += ["mov.b32 x, s0; mov.b32 y, s1;"]
            text += [f"fma.rn.f32 x, x, {_float(256)}, {_float(-257 * MAGIC_FLOAT)}; add.f32 x, x, y; mov.f32 ${i}, x;"]
    if mode == 1:
        text += [f"mov.f32 ${i}, 0.0;" for i in range(len(begun), outputs)]
    return " ".join([*text, "}"])


@constexpr_function
def _scored(
    slices: int,
    pieces: int,
    tiles: int,
    bits: int,
    mode: int,
    group: int,
    scales: int,
    queries: list[str],
    begins: list[str],
    magic: list[str],
) -> list[str]:
    """Scores s0..s3 of tokens r and r + 8 of both halves, before the unit. scales: byte of the slot at which they begin."""
    groups, each, both = slices * 16 // group, group // 32, 1 + mode
    if mode == POINTS:
        return _scored_points(slices, tiles, bits, group, scales, queries, begins, magic)
    text = _loaded("k", 0, bits, tiles, scales)
    for h in range(2 if mode < 2 else 0):
        text += _stored(f"ks{h}_", "key_scales", scales + h * groups * both * 32, groups * both)
        text += _converted(f"ks{h}_", groups * both)
    text += [".reg .f32 s<4>, y;"]
    if mode == 2:
        return text + _chained(slices, pieces, tiles, bits, queries, magic)
    begun = groups_begun(slices, pieces, bits) if mode == 0 else []
    started = set()
    for p, u, h, g in _key_products(slices, pieces, tiles, bits):
        place, d = field_place(p, bits), f"kd{u}_{p}_"
        text += [f".reg .b32 {d}<4>, {d}a<4>;"]
        a = [f"{d}a{i}" for i in range(4)]
        text += _separated(bits, p, a, _words("k", u, p, bits))
        first = 4 * begun.index((g, place)) if mode == 0 else 0
        begin = begins[first : first + 4] if mode == 0 else magic
        text += [_mma(d, a, queries[2 * g : 2 * g + 2], begin, "u8.s8")]
        for row in range(2):
            score, column = f"s{2 * h + row}", g // each * both
            text += _summed("y", d, row, place)
            if score in started:
                text += [f"fma.rn.f32 {score}, y, ks{h}_{column}_{row}, {score};"]
            else:
                text += [f"mul.f32 {score}, y, ks{h}_{column}_{row};"]
                started.add(score)
            if mode == 1:
                text += [f"fma.rn.f32 {score}, ks{h}_{column + 1}_{row}, {begins[g]}, {score};"]
    return text


@constexpr_function
def _scored_points(
    slices: int,
    tiles: int,
    bits: int,
    vector: int,
    scales: int,
    queries: list[str],
    points: list[str],
    magic: list[str],
) -> list[str]:
    """As `_scored`, of points of a grid: products of all channels add up as integers, below 256 * 128 * 128 = 2^22."""
    text = _coded("k", 0, tiles, bits * vector, scales)
    for h in range(2):
        text += [*_stored(f"ks{h}_", "key_scales", scales + 32 * h, 1), *_converted(f"ks{h}_", 1)]
    text += [
        ".reg .f32 s<4>, y; .reg .b32 ka0_<4>, ka1_<4>, kd0_<4>, kd1_<4>, ke0_<4>, ke1_<4>, none; mov.b32 none, 0;"
    ]
    for group in range(slices // 2):
        for h in range(2):
            which = (h * (slices // 2) + group) // vector  # both numbers of a code are of one set
            table = points[4 * (group % vector) :]
            text += _pointed("ka", "k", which, bits * vector, table)
            for part in range(parts_of(bits * vector)):
                d, a = f"k{'de'[part]}{h}_", [f"ka{part}_{i}" for i in range(4)]
                begin = [f"{d}{i}" for i in range(4)] if group else ["none"] * 4 if part else magic
                text += [_mma(d, a, queries[2 * group : 2 * group + 2], begin, "s8.s8")]
    for h in range(2):
        if parts_of(bits * vector) > 1:
            text += [f"add.s32 kd{h}_{i}, kd{h}_{i}, ke{h}_{i};" for i in range(4)]
        for row in range(2):
            score = f"s{2 * h + row}"
            text += [*_summed(score, f"kd{h}_", row, 1), f"mul.f32 {score}, {score}, ks{h}_0_{row};"]
    return text


@constexpr_function
def _key_products(slices: int, pieces: int, tiles: int, bits: int) -> list[tuple[int, int, int, int]]:
    """(field, tile, half block, group) of products with keys, field by field."""
    in_word = pairs_of_word(bits)
    found = [(p, u, *key_pair(u * in_word + p, pieces, bits)) for p in range(in_word) for u in range(tiles)]
    return [one for one in found if one[2] < 2 and one[3] < slices // 2]


@constexpr_function
def _summed(into: str, d: str, row: int, place: int) -> list[str]:
    """Both parts of a product's row of codes that count `place`."""
    text = [f"fma.rn.f32 {into}, {d}{2 * row}, {_float(256 / place)}, {_float(-257 * MAGIC_FLOAT / place)};"]
    return [*text, f"fma.rn.f32 {into}, {d}{2 * row + 1}, {_float(1 / place)}, {into};"]


@constexpr_function
def _chained(slices: int, pieces: int, tiles: int, bits: int, queries: list[str], magic: list[str]) -> list[str]:
    """Scores of outer groups, whose scales are the queries': products of all channels whose codes count alike add up as
    integers, 4 products of 32 numbers and 255 * 128 at most: below 2^22 (`by_bytes` leaves 8 bits of 256 channels out). Of 2
    bits, words are shifted, so that codes count 1 or 16.
    """
    text, begun = [".reg .b32 ka<4>;"], set[tuple[int, int]]()
    if bits == 2:
        text += [f"shr.u32 k{u}_s{i}, k{u}_{i}, 2;" for u in range(tiles) for i in range(4)]
        text = [f".reg .b32 k{u}_s<4>;" for u in range(tiles)] + text
    for p, u, h, g in _key_products(slices, pieces, tiles, bits):
        place, d = field_place(p, 3 if bits == 2 else bits), f"kd{h}_{field_place(p, 3 if bits == 2 else bits)}_"
        words = _words("k", u, p, bits)
        if bits == 2:
            words = [f"k{u}_{'s' if p % 2 else ''}{i}" for i in range(4)]
            text += [f"and.b32 ka{i}, {words[i]}, {0x03030303 << 4 * (p // 2)};" for i in range(4)]
        else:
            text += _separated(bits, p, [f"ka{i}" for i in range(4)], words)
        text += [f".reg .b32 {d}<4>;"] if (h, place) not in begun else []
        text += [_mma(d, [f"ka{i}" for i in range(4)], queries[2 * g : 2 * g + 2],
                      [f"{d}{i}" for i in range(4)] if (h, place) in begun else magic, "u8.s8")]  # fmt: skip
        begun.add((h, place))
    for h in range(2):
        places = sorted(place for half, place in begun if half == h)
        for row in range(2):
            for place in places:
                first = place == places[0]
                text += _summed(f"s{2 * h + row}" if first else "y", f"kd{h}_{place}_", row, place)
                text += [] if first else [f"add.f32 s{2 * h + row}, s{2 * h + row}, y;"]
    return text


@constexpr_function
def _renewed(
    slices: int,
    bits: int,
    scales: int,
    renew: str,
    plain: list[str],
    base: list[str],
    queries: list[str],
    about: list[str],
) -> list[str]:
    """Where `renew` is not 0: queries times their channels' scales (outer groups) as `queries`, their unit and what zero
    points add to scores as the first two of `about`. plain: queries, float16 below 1; scales: byte of the slot at which they
    begin. base: the unit of `plain`; what a lane's part of a number is rounded with, and which byte of it that is.
    """
    text = [f"{{ .reg .pred again; setp.ne.s32 again, {renew}, 0; @!again bra KVCAL_SAME;"]
    text += [f".reg .b32 q<{2 * slices}>, a<4>, w; .reg .f32 n<4>, v<4>, top, x, y; .reg .b16 h0, h1;"]
    text += [" ".join(f"mov.f32 n{i}, 0.0;" for i in range(4)), "mov.b32 w, 0;"]
    for i in range(slices):
        for half in range(2):
            t = f"q{2 * i + half}"
            text += [f"ld.shared.v2.b32 {{a{2 * half}, a{2 * half + 1}}}, [key_scales+{scales + 64 * i + 32 * half}];"]
            text += [f"mul.f16x2 {t}, a{2 * half}, {plain[2 * i + half]}; abs.f16x2 u, {t}; max.f16x2 w, w, u;"]
        # scales are its upper rows, zero points the lower ones, as a load leaves them in registers
        text += ["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {n0, n1, n2, n3}, {a0, a1, a2, a3}, "
                 f"{{{plain[2 * i]}, {plain[2 * i + 1]}}}, {{n0, n1, n2, n3}};"]  # fmt: skip
    text += ["mov.b32 {h0, h1}, w; cvt.f32.f16 top, h0; cvt.f32.f16 x, h1; max.f32 top, top, x;"]
    for step in (1, 2):
        text += [f"shfl.sync.bfly.b32 x, top, {step}, 31, 0xffffffff; max.f32 top, top, x;"]
    # a little less than QUERY, for what the reciprocals are off by
    text += [f"max.f32 top, top, {_float(2.0**-24)}; rcp.approx.ftz.f32 x, top; mul.f32 x, x, {_float(QUERY - 0.25)};"]
    in_word = pairs_of_word(bits)
    for g in range(slices // 2):
        first = g // in_word * 2 * in_word + g % in_word
        for half in range(2):
            for j in range(2):
                text += [f"mov.b32 {{h0, h1}}, q{2 * (first + j * in_word) + half};"]
                text += [f"cvt.f32.f16 v{j}, h0; cvt.f32.f16 v{2 + j}, h1;"]
            text += [f"fma.rn.f32 v{j}, v{j}, x, {base[1]};" for j in range(4)]
            into = queries[2 * g + half]
            text += [f"mov.b32 t, v0; mov.b32 u, v1; prmt.b32 t, t, u, {base[2]};"]
            text += [f"mov.b32 u, v2; mov.b32 w, v3; prmt.b32 u, u, w, {base[2]}; prmt.b32 {into}, t, u, 0x5410;"]
    # both are of a lane's column there, of its query where scores are: from its first column's first lane
    text += ["rcp.approx.ftz.f32 x, x; mov.u32 w, %laneid; and.b32 w, w, 3; shl.b32 w, w, 3;"]
    text += ["shfl.sync.idx.b32 x, x, w, 31, 0xffffffff;"]
    text += [f"mul.f32 {about[0]}, x, {base[0]}; mul.f32 {about[1]}, n2, {base[0]};"]
    return [*text, "KVCAL_SAME: }"]


@constexpr_function
def _leveled(unit: str, shift: str, scaled: bool) -> list[str]:
    """The power of two e above a query's scores. shift: what all of them have more, or none. scaled: scales of values multiply
    probabilities; e then is above those products, of which t0..t3 are the powers of two. With either s0..s3 become theirs.
    """
    text = [".reg .f32 top, other, e, d, x, f, f_high, f_begin, t<4>; .reg .b32 p<2>, bits; .reg .pred rise;"]
    above = "t" if scaled else "s"
    if shift or scaled:
        text += [
            f"fma.rn.f32 s{i}, s{i}, {unit}, {shift};" if shift else f"mul.f32 s{i}, s{i}, {unit};" for i in range(4)
        ]
    for i in range(4 if scaled else 0):  # of nothing 2^-40
        text += [f"max.f32 t{i}, vs{i}, {_float(2.0**-40)}; lg2.approx.ftz.f32 t{i}, t{i}; add.f32 t{i}, t{i}, s{i};"]
    text += [f"max.f32 top, {above}0, {above}1; max.f32 other, {above}2, {above}3; max.f32 top, top, other;"]
    for step in (4, 8, 16):
        text += [f"shfl.sync.bfly.b32 other, top, {step}, 31, 0xffffffff; max.f32 top, top, other;"]
    if shift or scaled:
        text += ["cvt.rpi.f32.f32 e, top;"]
    else:  # no rounding of the product may leave a score above e
        text += [f"mul.f32 x, top, {unit}; abs.f32 e, x; fma.rn.f32 x, e, {_float(2.0**-22)}, x; cvt.rpi.f32.f32 e, x;"]
    return text


@constexpr_function
def _weighed(unit: str, shift: str, v_mode: int) -> list[str]:
    """Probabilities as second operands p0, p1; the block's power of two above the outputs' as floats f, f_high, f_begin. $0:
    the outputs', $1: the sum. What lies JUMP below a block counts nothing beside it, so that its power of two may rise with
    nothing scaled; a block above SLACK is what outputs are scaled to afterwards (`_fallen`).
    """
    scaled = v_mode in (2, POINTS)
    text = _leveled(unit, shift, scaled)
    text += [
        f"sub.f32 d, e, {_float(JUMP)}; max.f32 $0, $0, d; sub.f32 d, e, $0; setp.gt.f32 rise, d, {_float(SLACK)};"
    ]
    text += [f"max.f32 d, d, {_float(-127)}; add.f32 d, d, {_float(MAGIC_FLOAT + 127)};"]
    text += ["mov.b32 bits, d; shl.b32 bits, bits, 23; mov.b32 f, bits;"]
    text += [f"mul.f32 f_high, f, {_float(256)}; mul.f32 f_begin, f, {_float(-257 * MAGIC_FLOAT)};"]
    text += ["neg.f32 other, e;"]
    for i in range(4):
        text += [f"add.f32 s{i}, s{i}, other;" if shift or scaled else f"fma.rn.f32 s{i}, s{i}, {unit}, other;"]
        text += [f"ex2.approx.ftz.f32 s{i}, s{i};"]
        if scaled:
            text += [f"add.f32 t{i}, t{i}, other; ex2.approx.ftz.f32 t{i}, t{i};"]
    text += ["add.f32 x, s0, s1; add.f32 d, s2, s3; add.f32 x, x, d; fma.rn.f32 $1, x, f, $1;"]
    if v_mode == 2:  # zero points of all channels
        text += [
            "mul.f32 x, s0, vz0;",
            *[f"fma.rn.f32 x, s{i}, vz{i}, x;" for i in range(1, 4)],
            "fma.rn.f32 $3, x, f, $3;",
        ]
    for i in range(4):
        given = "t" if scaled else "s"
        text += [f"fma.rn.f32 t{i}, {given}{i}, {_float(PROBABILITY / 65536)}, {_float(128)};"]
    text += [f".reg .b32 b<4>; {' '.join(f'mov.b32 b{i}, t{i};' for i in range(4))}"]
    for i in range(2):
        text += [f"prmt.b32 p{i}, b{i}, b{2 + i}, 0x4051; movmatrix.sync.aligned.m8n8.trans.b16 p{i}, p{i};"]
    return text


@constexpr_function
def _value_products(slices: int, tiles: int, bits: int) -> list[tuple[int, int, int]]:
    """(field, tile, slice) of products with values, field by field."""
    in_word = pairs_of_word(bits)
    found = [(p, u, u * in_word + p) for p in range(in_word) for u in range(tiles)]
    return [one for one in found if one[2] < slices]


@constexpr_function
def value_places(slices: int, tiles: int, bits: int) -> list[int]:
    """What codes of values count, once separated, each number once."""
    found: list[int] = []
    for pair, _, _ in _value_products(slices, tiles, bits):
        found += [field_place(pair, bits)] if field_place(pair, bits) not in found else []
    return found


@constexpr_function
def constants(slices: int, tiles: int, bits: int, mode: int) -> tuple[int, ...]:
    """Of values of `mode`, a tensor each of what products take four registers of: the beginning of accumulators, and first
    operands, of symmetric codes minus what they count from at each place, of asymmetric ones in inner groups ones.
    """
    if mode in (2, POINTS):
        return (MAGIC,)
    ones = [(256 - place * 2 ** (bits - 1)) % 256 for place in value_places(slices, tiles, bits)] if mode == 0 else [1]
    signed = [one * 0x01010101 for one in ones]
    return (MAGIC, *[one - (1 << 32) if one >> 31 else one for one in signed])


@constexpr_function
def _prepared(
    slices: int, tiles: int, bits: int, mode: int, group: int, byte: int, scales: int, points: list[str]
) -> list[str]:
    """All of values that does not wait for probabilities."""
    if mode == POINTS:
        return _prepared_points(slices, tiles, bits, group, byte, scales, points)
    text = _loaded("v", byte, bits, tiles, scales)
    if mode < 2:
        text += _stored("vs", "value_scales", scales, slices * (1 + mode))
    else:  # of a lane's four tokens
        text += [".reg .f32 vs<4>, vz<4>; .reg .b16 vh;"]
        for i in range(4):
            at = scales + i // 2 * 64 + i % 2 * 32
            text += [f"ld.shared.b16 vh, [value_scales+{at}]; cvt.f32.f16 vs{i}, vh;"]
            text += [f"ld.shared.b16 vh, [value_scales+{at + 4}]; cvt.f32.f16 vz{i}, vh;"]
    for p, u, _ in _value_products(slices, tiles, bits):
        d = f"vd{u}_{p}_"
        text += [
            f".reg .b32 {d}<4>, {d}a<4>;",
            *_separated(bits, p, [f"{d}a{j}" for j in range(4)], _words("v", u, p, bits)),
        ]
    return text


@constexpr_function
def _prepared_points(
    slices: int, tiles: int, bits: int, vector: int, byte: int, scales: int, points: list[str]
) -> list[str]:
    text = _coded("v", byte, tiles, bits * vector, scales)
    text += [".reg .f32 vs<4>; .reg .b16 vh;"]
    for i in range(4):  # of a lane's four tokens
        at = scales + i // 2 * 32 + i % 2 * 16
        text += [f"ld.shared.b16 vh, [value_scales+{at}]; cvt.f32.f16 vs{i}, vh;"]
    for i in range(slices):
        text += [f".reg .b32 vd{i}_<4>, vd{i}_a0_<4>, vd{i}_a1_<4>;"]
        text += _pointed(f"vd{i}_a", "v", i // vector, bits * vector, points[4 * (i % vector) :])
    return text


@constexpr_function
def _added_points(slices: int, bits: int, outputs: list[str], constants: list[str]) -> list[str]:
    text = []
    for i in range(slices):
        d = f"vd{i}_"
        for part in range(parts_of(bits)):
            begin = [f"{d}{j}" for j in range(4)] if part else constants[:4]
            text += [_mma(d, [f"{d}a{part}_{j}" for j in range(4)], ["p0", "p1"], begin, "s8.u8")]
        for row in range(2):
            out = outputs[4 + i // 2 * 4 + row * 2 + i % 2]
            text += [f"fma.rn.f32 y, {d}{2 * row}, f_high, f_begin; fma.rn.f32 y, {d}{2 * row + 1}, f, y;"]
            text += [f"add.f32 {out}, {out}, y;"]
    return text


@constexpr_function
def _added(
    slices: int, tiles: int, bits: int, mode: int, group: int, outputs: list[str], constants: list[str]
) -> list[str]:
    """outputs plus probabilities times values, as `_prepared` left them."""
    if mode == POINTS:
        return _added_points(slices, bits * group, outputs, constants)
    text = _converted("vs", slices * (1 + mode)) if mode < 2 else []
    text += [".reg .b32 vc<4>;"]
    if mode == 1:
        text += [".reg .f32 total, part;", _mma("vc", constants[4:8], ["p0", "p1"], constants[:4], "u8.u8")]
        text += ["fma.rn.f32 total, vc0, f_high, f_begin; fma.rn.f32 total, vc1, f, total;"]
    places = value_places(slices, tiles, bits)
    before = 0
    for p, u, i in _value_products(slices, tiles, bits):
        place, d = field_place(p, bits), f"vd{u}_{p}_"
        if place != before:
            before = place
            if mode == 0:
                first = 4 + 4 * places.index(place)
                text += [_mma("vc", constants[first : first + 4], ["p0", "p1"], constants[:4], "s8.u8")]
            elif mode == 1:
                text += [f"mul.f32 part, total, {_float(place)};"]
        begin = [f"vc{j}" for j in range(4)] if mode == 0 else constants[:4]
        text += [_mma(d, [f"{d}a{j}" for j in range(4)], ["p0", "p1"], begin, "u8.u8")]
        for row in range(2):
            out = outputs[4 + i // 2 * 4 + row * 2 + i % 2]
            text += [f"fma.rn.f32 y, {d}{2 * row}, f_high, f_begin; fma.rn.f32 y, {d}{2 * row + 1}, f, y;"]
            text += [
                f"fma.rn.f32 {out}, y, vs{i * (1 + mode)}_{row}, {out};" if mode < 2 else f"add.f32 {out}, {out}, y;"
            ]
            if mode == 1:
                text += [f"fma.rn.f32 {out}, vs{2 * i + 1}_{row}, part, {out};"]
    return text


@constexpr_function
def _fallen(scaled: list[str]) -> list[str]:
    """Sums and outputs, `scaled`, in the block's power of two where that of some lane is more than SLACK above theirs."""
    text = ["vote.sync.any.pred rise, rise, 0xffffffff; @!rise bra KVCAL_BELOW;"]
    text += ["max.f32 x, e, $0; sub.f32 d, $0, x; ex2.approx.ftz.f32 f, d; mov.f32 $0, x;"]
    return [*text, *[f"mul.f32 {one}, {one}, f;" for one in scaled], "KVCAL_BELOW:"]


@constexpr_function
def _operands(
    slices: int, keys: tuple[Any, ...], values: tuple[Any, ...], masked: bool, same: bool = False
) -> list[tuple[str, int, str]]:
    """Tensors of `block`: name, how many, their registers' kind, those that are changed first."""
    pieces, _, _, bits, mode, group, _ = keys
    _, v_tiles, _, v_bits, v_mode, v_group, _ = values
    queries, fixed = -(-slices // 4), len(constants(slices, v_tiles, v_bits, v_mode))
    changed = [("state", 1, "f"), ("acc", slices // 2, "f")]
    given = [("slot", 1, "r"), ("places", 1, "r")]
    if mode == 2:
        changed += [("queries", queries, "r"), ("about", 1, "f")]
        given += [("renew", 1, "r"), ("constants", fixed, "r"), ("plain", slices // 2, "r"), ("base", 1, "r")]
    elif mode == POINTS:
        given += [("queries", queries, "r"), ("constants", fixed, "r")]
    else:
        begins = beginning_tensors(slices, pieces, bits, mode), "r" if mode == 0 else "f"
        given += [("queries", queries, "r"), ("begins", *begins), ("constants", fixed, "r")]
    given += [("k_points", points_tensors(mode, group), "r")]
    given += [("v_points", 0 if same else points_tensors(v_mode, v_group), "r")]
    return [*changed, *given, *([("live", 1, "r")] if masked else [])]


@constexpr_function
def block(slices: int, keys: tuple[Any, ...], values: tuple[Any, ...], masked: bool = False, same: bool = False) -> str:
    """Assembly of a block. keys, values: (pieces, tiles, words, bits, mode, group, bytes of a slot); modes 0 and 1 are inner
    groups without and with zero points, 2 outer ones, of values all channels of a token; POINTS. same: values are points of
    the keys' grid.

    Operands, see `_operands`: changed are state, acc and of mode 2 keys queries and about (their unit, what zero points add);
    given slot (the byte of the ring's slot), places, then queries, begins, constants, or renew (whether the block is the first
    of its group), constants, plain and base (see `_renewed`); points of keys, of values; masked: live, 0 where the warp has no
    block left.
    """
    pieces, tiles, words, bits, mode, group, held = keys
    _, v_tiles, v_words, v_bits, v_mode, v_group, _ = values
    names, at = {}, 0
    for name, count, _ in _operands(slices, keys, values, masked, same):
        names[name] = [f"${at + i}" for i in range(4 * count)]
        at += 4 * count
    text = ["{ .reg .b32 words, key_scales, value_scales, t, u; .reg .pred there;"]
    if masked:
        text += [f"setp.ne.s32 there, {names['live'][0]}, 0; @!there bra KVCAL_NONE;"]
    for i, name in enumerate(("words", "key_scales", "value_scales")):
        text += [f"add.s32 {name}, {names['slot'][0]}, {names['places'][i]};"]
    if beyond(words, bits, mode) or beyond(v_words, v_bits, v_mode):
        text += [f".reg .b32 halves; add.s32 halves, {names['slot'][0]}, {names['places'][3]};"]
    unit, shift, magic = names["state"][2], "", names["constants"][:4]
    if mode == 2:
        unit, shift = names["about"][0], names["about"][1]
        text += _renewed(
            slices, bits, 2 * words, names["renew"][0], names["plain"], names["base"], names["queries"], names["about"]
        )
    about = names["k_points"] if mode == POINTS else names.get("begins", [])
    text += _scored(slices, pieces, tiles, bits, mode, group, 2 * words, names["queries"], about, magic)
    points = names["k_points" if same else "v_points"]
    text += _prepared(slices, v_tiles, v_bits, v_mode, v_group, held, held + 2 * v_words, points)
    outputs = names["state"] + names["acc"]
    text += ["{", *_weighed(unit, shift, v_mode)]
    text += ["{", *_added(slices, v_tiles, v_bits, v_mode, v_group, outputs, names["constants"]), "}"]
    text += _fallen([outputs[1], *([outputs[3]] if v_mode == 2 else []), *names["acc"]])
    return " ".join([*text, "}", *(["KVCAL_NONE:"] if masked else []), "}"])


@constexpr_function
def block_constraints(
    slices: int, keys: tuple[Any, ...], values: tuple[Any, ...], masked: bool = False, same: bool = False
) -> str:
    outputs: list[str] = []
    inputs: list[str] = []
    for name, count, kind in _operands(slices, keys, values, masked, same):
        changed = name in ("state", "acc", "about") or (name == "queries" and keys[4] == 2)
        (outputs if changed else inputs).extend([("=" if changed else "") + kind] * (4 * count))
    return ",".join([*outputs, *inputs, *[str(i) for i in range(len(outputs))]])


@constexpr_function
def beginning_tensors(slices: int, pieces: int, bits: int, mode: int) -> int:
    """How many tensors `begins` are."""
    return len(groups_begun(slices, pieces, bits)) if mode == 0 else -(-slices // 8)


@constexpr_function
def beginning_constraints(slices: int, pieces: int, bits: int, mode: int) -> str:
    outputs = 4 * beginning_tensors(slices, pieces, bits, mode)
    return ",".join(["=&r" if mode == 0 else "=&f"] * outputs + ["r"] * (4 * -(-slices // 4)))


@constexpr_function
def spreading(which: tuple[int, ...]) -> str:
    """A lane's registers: number `which[i]` of four as the i-th, 0.0 where it is negative."""
    return " ".join(f"mov.f32 ${i}, {'0.0' if which[i] < 0 else f'${4 + which[i]}'};" for i in range(4))
