"""PTX of a block's scores: queries, which outer groups round again, times codes of keys."""

from __future__ import annotations

from ....layout.form import POINTS
from ....triton import constexpr_function
from .ptx import (
    MAGIC,
    MAGIC_FLOAT,
    QUERY,
    as_floats,
    decimal,
    field_place,
    grid_codes,
    int8_mma,
    key_pair,
    loaded_scales,
    loaded_tiles,
    pairs_of_word,
    products_of,
    selected_points,
    separated_fields,
    tile_words,
)


@constexpr_function
def groups_begun(slices: int, pieces: int, bits: int) -> list[tuple[int, int]]:
    """Return (group of 32 channels, place) of keys, each combination once, in the order of `begins`."""
    groups: list[tuple[int, int]] = []
    for pair in range(pieces):  # of both halves
        group = key_pair(pair, pieces, bits)[1], field_place(pair % pairs_of_word(bits), bits)
        if group[0] < slices // 2 and group not in groups:
            groups.append(group)
    return groups


@constexpr_function
def beginning(slices: int, pieces: int, bits: int, mode: int) -> str:
    """Return assembly for `begins` of queries. A symmetric code c counts c - 2^(bits - 1), so that accumulators begin
    at MAGIC minus that much of the queries' sum; outputs are tensors of `groups_begun`. Asymmetric: sums of a group's
    queries, four groups a tensor.
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
        operands = ", ".join("{" + ", ".join(x) + "}" for x in (into, ["one"] * 4, query, ["magic"] * 4))
        text += [f"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {operands};"]
        if mode == 1:
            text += ["mov.b32 x, s0; mov.b32 y, s1;"]
            text += [f"fma.rn.f32 x, x, {decimal(256)}, {decimal(-257 * MAGIC_FLOAT)};"]
            text += [f"add.f32 x, x, y; mov.f32 ${i}, x;"]
    if mode == 1:
        text += [f"mov.f32 ${i}, 0.0;" for i in range(len(begun), outputs)]
    return " ".join([*text, "}"])


@constexpr_function
def block_scores(
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
    """Return assembly for scores s0..s3 of tokens r and r + 8 of both halves, before the unit. scales: byte of the slot
    at which they begin.
    """
    groups, each, both = slices * 16 // group, group // 32, 1 + mode
    if mode == POINTS:
        return _scored_points(slices, tiles, bits, group, scales, queries, begins, magic)
    text = loaded_tiles("k", 0, bits, tiles, scales)
    for h in range(2 if mode < 2 else 0):
        text += loaded_scales(f"ks{h}_", "key_scales", scales + h * groups * both * 32, groups * both)
        text += as_floats(f"ks{h}_", groups * both)
    text += [".reg .f32 s<4>, y;"]
    if mode == 2:
        return text + _chained(slices, pieces, tiles, bits, queries, magic)
    begun = groups_begun(slices, pieces, bits) if mode == 0 else []
    started = set()
    for p, u, h, g in _key_products(slices, pieces, tiles, bits):
        place, d = field_place(p, bits), f"kd{u}_{p}_"
        text += [f".reg .b32 {d}<4>, {d}a<4>;"]
        a = [f"{d}a{i}" for i in range(4)]
        text += separated_fields(bits, p, a, tile_words("k", u, p, bits))
        first = 4 * begun.index((g, place)) if mode == 0 else 0
        begin = begins[first : first + 4] if mode == 0 else magic
        text += [int8_mma(d, a, queries[2 * g : 2 * g + 2], begin, "u8.s8")]
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
    """Return assembly of `block_scores` for points of a grid: products of all channels add up as integers, below 256 *
    128 * 128 = 2^22.
    """
    text = grid_codes("k", 0, tiles, bits * vector, scales)
    for h in range(2):
        text += [*loaded_scales(f"ks{h}_", "key_scales", scales + 32 * h, 1), *as_floats(f"ks{h}_", 1)]
    text += [
        ".reg .f32 s<4>, y; .reg .b32 ka0_<4>, ka1_<4>, kd0_<4>, kd1_<4>, ke0_<4>, ke1_<4>, none; mov.b32 none, 0;"
    ]
    for group in range(slices // 2):
        for h in range(2):
            which = (h * (slices // 2) + group) // vector  # both numbers of a code are of one set
            table = points[4 * (group % vector) :]
            text += selected_points("ka", "k", which, bits * vector, table)
            for part in range(products_of(bits * vector)):
                d, a = f"k{'de'[part]}{h}_", [f"ka{part}_{i}" for i in range(4)]
                begin = [f"{d}{i}" for i in range(4)] if group else ["none"] * 4 if part else magic
                text += [int8_mma(d, a, queries[2 * group : 2 * group + 2], begin, "s8.s8")]
    for h in range(2):
        if products_of(bits * vector) > 1:
            text += [f"add.s32 kd{h}_{i}, kd{h}_{i}, ke{h}_{i};" for i in range(4)]
        for row in range(2):
            score = f"s{2 * h + row}"
            text += [*_summed(score, f"kd{h}_", row, 1), f"mul.f32 {score}, {score}, ks{h}_0_{row};"]
    return text


@constexpr_function
def _key_products(slices: int, pieces: int, tiles: int, bits: int) -> list[tuple[int, int, int, int]]:
    """Return (field, tile, half block, group) of products with keys, field by field."""
    in_word = pairs_of_word(bits)
    products = [(p, u, *key_pair(u * in_word + p, pieces, bits)) for p in range(in_word) for u in range(tiles)]
    return [one for one in products if one[2] < 2 and one[3] < slices // 2]


@constexpr_function
def _summed(into: str, d: str, row: int, place: int) -> list[str]:
    """Return assembly that joins both parts of a product's row of codes that count `place`."""
    text = [f"fma.rn.f32 {into}, {d}{2 * row}, {decimal(256 / place)}, {decimal(-257 * MAGIC_FLOAT / place)};"]
    return [*text, f"fma.rn.f32 {into}, {d}{2 * row + 1}, {decimal(1 / place)}, {into};"]


@constexpr_function
def _added_up(begun: set[tuple[int, int]]) -> list[str]:
    """Return assembly for scores of both half blocks' rows: sums over products (half, place) of codes that count
    differently.
    """
    text = list[str]()
    for h in range(2):
        places = sorted(place for half, place in begun if half == h)
        for row in range(2):
            for place in places:
                first = place == places[0]
                text += _summed(f"s{2 * h + row}" if first else "y", f"kd{h}_{place}_", row, place)
                text += [] if first else [f"add.f32 s{2 * h + row}, s{2 * h + row}, y;"]
    return text


@constexpr_function
def _chained(slices: int, pieces: int, tiles: int, bits: int, queries: list[str], magic: list[str]) -> list[str]:
    """Return assembly for scores of outer groups, whose scales are the queries'. Products of all channels whose codes
    count alike add up as integers, 4 products of 32 numbers and 255 * 128 at most: below 2^22 (`fits_int8_mma` leaves 8
    bits of 256 channels out). Words of 2 bits are shifted, so that codes count 1 or 16.
    """
    text, begun = [".reg .b32 ka<4>;"], set[tuple[int, int]]()
    if bits == 2:
        text += [f"shr.u32 k{u}_s{i}, k{u}_{i}, 2;" for u in range(tiles) for i in range(4)]
        text = [f".reg .b32 k{u}_s<4>;" for u in range(tiles)] + text
    for p, u, h, g in _key_products(slices, pieces, tiles, bits):
        place, d = field_place(p, 3 if bits == 2 else bits), f"kd{h}_{field_place(p, 3 if bits == 2 else bits)}_"
        words = tile_words("k", u, p, bits)
        if bits == 2:
            words = [f"k{u}_{'s' if p % 2 else ''}{i}" for i in range(4)]
            text += [f"and.b32 ka{i}, {words[i]}, {0x03030303 << 4 * (p // 2)};" for i in range(4)]
        else:
            text += separated_fields(bits, p, [f"ka{i}" for i in range(4)], words)
        text += [f".reg .b32 {d}<4>;"] if (h, place) not in begun else []
        text += [
            int8_mma(
                d,
                [f"ka{i}" for i in range(4)],
                queries[2 * g : 2 * g + 2],
                [f"{d}{i}" for i in range(4)] if (h, place) in begun else magic,
                "u8.s8",
            )
        ]
        begun.add((h, place))
    return text + _added_up(begun)


@constexpr_function
def renewed_queries(
    slices: int,
    bits: int,
    scales: int,
    renew: str,
    plain: list[str],
    base: list[str],
    queries: list[str],
    renewed: list[str],
) -> list[str]:
    """Return assembly that, where `renew` is not 0, multiplies queries by their channels' scales (outer groups) into
    `queries`, with their unit and what zero points add to scores as the first two of `renewed`. plain: queries, float16
    below 1; scales: byte of the slot at which they begin. base: the unit of `plain`; what a lane's part of a number is
    rounded with, and which byte of it that is.
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
        text += [
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {n0, n1, n2, n3}, {a0, a1, a2, a3}, "
            f"{{{plain[2 * i]}, {plain[2 * i + 1]}}}, {{n0, n1, n2, n3}};"
        ]
    text += ["mov.b32 {h0, h1}, w; cvt.f32.f16 top, h0; cvt.f32.f16 x, h1; max.f32 top, top, x;"]
    for step in (1, 2):
        text += [f"shfl.sync.bfly.b32 x, top, {step}, 31, 0xffffffff; max.f32 top, top, x;"]
    # a little less than QUERY, for what the reciprocals are off by
    text += [f"max.f32 top, top, {decimal(2.0**-24)}; rcp.approx.ftz.f32 x, top;"]
    text += [f"mul.f32 x, x, {decimal(QUERY - 0.25)};"]
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
    text += [f"mul.f32 {renewed[0]}, x, {base[0]}; mul.f32 {renewed[1]}, n2, {base[0]};"]
    return [*text, "KVCAL_SAME: }"]


@constexpr_function
def beginning_tensors(slices: int, pieces: int, bits: int, mode: int) -> int:
    """Return how many tensors `begins` are."""
    return len(groups_begun(slices, pieces, bits)) if mode == 0 else -(-slices // 8)


@constexpr_function
def beginning_constraints(slices: int, pieces: int, bits: int, mode: int) -> str:
    """Return the constraints of `beginning`'s operands."""
    outputs = 4 * beginning_tensors(slices, pieces, bits, mode)
    return ",".join(["=&r" if mode == 0 else "=&f"] * outputs + ["r"] * (4 * -(-slices // 4)))


@constexpr_function
def spreading(which: tuple[int, ...]) -> str:
    """Return assembly for a lane's registers: number `which[i]` of four as the i-th, 0.0 where it is negative."""
    return " ".join(f"mov.f32 ${i}, {'0.0' if which[i] < 0 else f'${4 + which[i]}'};" for i in range(4))
