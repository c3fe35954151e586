"""PTX of what a block's values add to the outputs: probabilities in two bytes times codes of values."""

from __future__ import annotations

from ....layout.form import POINTS
from ....triton import constexpr_function
from .ptx import (
    JUMP,
    MAGIC,
    MAGIC_FLOAT,
    PROBABILITY,
    SLACK,
    as_floats,
    decimal,
    field_place,
    grid_codes,
    int8_mma,
    loaded_scales,
    loaded_tiles,
    pairs_of_word,
    products_of,
    selected_points,
    separated_fields,
    tile_words,
)


@constexpr_function
def _leveled(unit: str, shift: str, scaled: bool) -> list[str]:
    """Return assembly for the power of two e above a query's scores. shift: what all of them have more, or none.
    scaled: scales of values multiply probabilities; e then is above those products, of which t0..t3 are the powers of
    two. With either s0..s3 become theirs.
    """
    text = [".reg .f32 top, other, e, d, x, f, f_high, f_begin, t<4>; .reg .b32 p<2>, bits; .reg .pred rise;"]
    above = "t" if scaled else "s"
    if shift or scaled:
        text += [
            f"fma.rn.f32 s{i}, s{i}, {unit}, {shift};" if shift else f"mul.f32 s{i}, s{i}, {unit};" for i in range(4)
        ]
    for i in range(4 if scaled else 0):  # of nothing 2^-40
        text += [f"max.f32 t{i}, vs{i}, {decimal(2.0**-40)}; lg2.approx.ftz.f32 t{i}, t{i}; add.f32 t{i}, t{i}, s{i};"]
    text += [f"max.f32 top, {above}0, {above}1; max.f32 other, {above}2, {above}3; max.f32 top, top, other;"]
    for step in (4, 8, 16):
        text += [f"shfl.sync.bfly.b32 other, top, {step}, 31, 0xffffffff; max.f32 top, top, other;"]
    if shift or scaled:
        text += ["cvt.rpi.f32.f32 e, top;"]
    else:  # no rounding of the product may leave a score above e
        text += [f"mul.f32 x, top, {unit}; abs.f32 e, x; fma.rn.f32 x, e, {decimal(2.0**-22)}, x;"]
        text += ["cvt.rpi.f32.f32 e, x;"]
    return text


@constexpr_function
def probabilities(unit: str, shift: str, v_mode: int) -> list[str]:
    """Return assembly for probabilities as second operands p0, p1, and the block's power of two above the outputs' as
    floats f, f_high, f_begin. $0: the outputs', $1: the sum. What lies JUMP below a block counts nothing in comparison,
    so that its power of two may rise with nothing scaled; a block above SLACK is what outputs are scaled to afterwards
    (`_fallen`).
    """
    scaled = v_mode in (2, POINTS)
    text = _leveled(unit, shift, scaled)
    text += [
        f"sub.f32 d, e, {decimal(JUMP)}; max.f32 $0, $0, d; sub.f32 d, e, $0; setp.gt.f32 rise, d, {decimal(SLACK)};",
    ]
    text += [f"max.f32 d, d, {decimal(-127)}; add.f32 d, d, {decimal(MAGIC_FLOAT + 127)};"]
    text += ["mov.b32 bits, d; shl.b32 bits, bits, 23; mov.b32 f, bits;"]
    text += [f"mul.f32 f_high, f, {decimal(256)}; mul.f32 f_begin, f, {decimal(-257 * MAGIC_FLOAT)};"]
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
        source = "t" if scaled else "s"
        text += [f"fma.rn.f32 t{i}, {source}{i}, {decimal(PROBABILITY / 65536)}, {decimal(128)};"]
    text += [f".reg .b32 b<4>; {' '.join(f'mov.b32 b{i}, t{i};' for i in range(4))}"]
    for i in range(2):
        text += [f"prmt.b32 p{i}, b{i}, b{2 + i}, 0x4051; movmatrix.sync.aligned.m8n8.trans.b16 p{i}, p{i};"]
    return text


@constexpr_function
def _value_products(slices: int, tiles: int, bits: int) -> list[tuple[int, int, int]]:
    """Return (field, tile, slice) of products with values, field by field."""
    in_word = pairs_of_word(bits)
    products = [(p, u, u * in_word + p) for p in range(in_word) for u in range(tiles)]
    return [one for one in products if one[2] < slices]


@constexpr_function
def value_places(slices: int, tiles: int, bits: int) -> list[int]:
    """Return what codes of values count, once separated, each number once."""
    places: list[int] = []
    for pair, _, _ in _value_products(slices, tiles, bits):
        places += [field_place(pair, bits)] if field_place(pair, bits) not in places else []
    return places


@constexpr_function
def constants(slices: int, tiles: int, bits: int, mode: int) -> tuple[int, ...]:
    """Return the constants of values of `mode`, one for each tensor of which products take four registers: the
    beginning of accumulators, and first operands. Those of symmetric codes are minus what they count from at each
    place, those of asymmetric ones in inner groups are ones.
    """
    if mode in (2, POINTS):
        return (MAGIC,)
    ones = [(256 - place * 2 ** (bits - 1)) % 256 for place in value_places(slices, tiles, bits)] if mode == 0 else [1]
    signed = [one * 0x01010101 for one in ones]
    return (MAGIC, *[one - (1 << 32) if one >> 31 else one for one in signed])


@constexpr_function
def prepared_values(
    slices: int, tiles: int, bits: int, mode: int, group: int, byte: int, scales: int, points: list[str]
) -> list[str]:
    """Return assembly for all of values that does not wait for probabilities."""
    if mode == POINTS:
        return _prepared_points(slices, tiles, bits, group, byte, scales, points)
    text = loaded_tiles("v", byte, bits, tiles, scales)
    if mode < 2:
        text += loaded_scales("vs", "value_scales", scales, slices * (1 + mode))
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
            *separated_fields(bits, p, [f"{d}a{j}" for j in range(4)], tile_words("v", u, p, bits)),
        ]
    return text


@constexpr_function
def _prepared_points(
    slices: int, tiles: int, bits: int, vector: int, byte: int, scales: int, points: list[str]
) -> list[str]:
    """Return assembly of `prepared_values` for points of a grid."""
    text = grid_codes("v", byte, tiles, bits * vector, scales)
    text += [".reg .f32 vs<4>; .reg .b16 vh;"]
    for i in range(4):  # of a lane's four tokens
        at = scales + i // 2 * 32 + i % 2 * 16
        text += [f"ld.shared.b16 vh, [value_scales+{at}]; cvt.f32.f16 vs{i}, vh;"]
    for i in range(slices):
        text += [f".reg .b32 vd{i}_<4>, vd{i}_a0_<4>, vd{i}_a1_<4>;"]
        text += selected_points(f"vd{i}_a", "v", i // vector, bits * vector, points[4 * (i % vector) :])
    return text


@constexpr_function
def _added_points(slices: int, bits: int, outputs: list[str], constants: list[str]) -> list[str]:
    """Return assembly of `added_values` for points of a grid."""
    text = []
    for i in range(slices):
        d = f"vd{i}_"
        for part in range(products_of(bits)):
            begin = [f"{d}{j}" for j in range(4)] if part else constants[:4]
            text += [int8_mma(d, [f"{d}a{part}_{j}" for j in range(4)], ["p0", "p1"], begin, "s8.u8")]
        for row in range(2):
            out = outputs[4 + i // 2 * 4 + row * 2 + i % 2]
            text += [f"fma.rn.f32 y, {d}{2 * row}, f_high, f_begin; fma.rn.f32 y, {d}{2 * row + 1}, f, y;"]
            text += [f"add.f32 {out}, {out}, y;"]
    return text


@constexpr_function
def added_values(
    slices: int, tiles: int, bits: int, mode: int, group: int, outputs: list[str], constants: list[str]
) -> list[str]:
    """Return assembly for outputs plus probabilities times values, as `prepared_values` left them."""
    if mode == POINTS:
        return _added_points(slices, bits * group, outputs, constants)
    text = as_floats("vs", slices * (1 + mode)) if mode < 2 else []
    text += [".reg .b32 vc<4>;"]
    if mode == 1:
        text += [".reg .f32 total, part;", int8_mma("vc", constants[4:8], ["p0", "p1"], constants[:4], "u8.u8")]
        text += ["fma.rn.f32 total, vc0, f_high, f_begin; fma.rn.f32 total, vc1, f, total;"]
    places = value_places(slices, tiles, bits)
    before = 0
    for p, u, i in _value_products(slices, tiles, bits):
        place, d = field_place(p, bits), f"vd{u}_{p}_"
        if place != before:
            before = place
            if mode == 0:
                first = 4 + 4 * places.index(place)
                text += [int8_mma("vc", constants[first : first + 4], ["p0", "p1"], constants[:4], "s8.u8")]
            elif mode == 1:
                text += [f"mul.f32 part, total, {decimal(place)};"]
        begin = [f"vc{j}" for j in range(4)] if mode == 0 else constants[:4]
        text += [int8_mma(d, [f"{d}a{j}" for j in range(4)], ["p0", "p1"], begin, "u8.u8")]
        for row in range(2):
            out = outputs[4 + i // 2 * 4 + row * 2 + i % 2]
            text += [f"fma.rn.f32 y, {d}{2 * row}, f_high, f_begin; fma.rn.f32 y, {d}{2 * row + 1}, f, y;"]
            text += [
                f"fma.rn.f32 {out}, y, vs{i * (1 + mode)}_{row}, {out};" if mode < 2 else f"add.f32 {out}, {out}, y;"
            ]
            if mode == 1:
                text += [f"fma.rn.f32 {out}, vs{2 * i + 1}_{row}, part, {out};"]
    return text
