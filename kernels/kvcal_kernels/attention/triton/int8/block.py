"""PTX of a whole block: its scores, the softmax, and what its values add."""

from __future__ import annotations

from ....layout.form import POINTS
from ....triton import constexpr_function
from ..numbers import half_tile_shift
from .ptx import points_tensors
from .scores import beginning_tensors, block_scores, renewed_queries
from .values import added_values, constants, prepared_values, probabilities


@constexpr_function
def _fallen(scaled: list[str]) -> list[str]:
    """Return assembly that brings sums and outputs, `scaled`, to the block's power of two where that of some lane is
    more than SLACK above theirs.
    """
    text = ["vote.sync.any.pred rise, rise, 0xffffffff; @!rise bra KVCAL_BELOW;"]
    text += ["max.f32 x, e, $0; sub.f32 d, $0, x; ex2.approx.ftz.f32 f, d; mov.f32 $0, x;"]
    return [*text, *[f"mul.f32 {one}, {one}, f;" for one in scaled], "KVCAL_BELOW:"]


@constexpr_function
def _operands(
    slices: int, keys: tuple[int, ...], values: tuple[int, ...], masked: bool, same: bool = False
) -> list[tuple[str, int, str]]:
    """Return the tensors of `block`: name, how many, their registers' kind. Those that are changed come first."""
    pieces, _, _, bits, mode, group, _ = keys
    _, v_tiles, _, v_bits, v_mode, v_group, _ = values
    queries, fixed = -(-slices // 4), len(constants(slices, v_tiles, v_bits, v_mode))
    changed = [("state", 1, "f"), ("acc", slices // 2, "f")]
    inputs = [("slot", 1, "r"), ("places", 1, "r")]
    if mode == 2:
        changed += [("queries", queries, "r"), ("about", 1, "f")]
        inputs += [("renew", 1, "r"), ("constants", fixed, "r"), ("plain", slices // 2, "r"), ("base", 1, "r")]
    elif mode == POINTS:
        inputs += [("queries", queries, "r"), ("constants", fixed, "r")]
    else:
        begins = beginning_tensors(slices, pieces, bits, mode), "r" if mode == 0 else "f"
        inputs += [("queries", queries, "r"), ("begins", *begins), ("constants", fixed, "r")]
    inputs += [("k_points", points_tensors(mode, group), "r")]
    inputs += [("v_points", 0 if same else points_tensors(v_mode, v_group), "r")]
    return [*changed, *inputs, *([("live", 1, "r")] if masked else [])]


@constexpr_function
def block(slices: int, keys: tuple[int, ...], values: tuple[int, ...], masked: bool = False, same: bool = False) -> str:
    """Return assembly of a block. keys, values: (pieces, tiles, words, bits, mode, group, bytes of a slot). Modes 0 and
    1 are inner groups without and with zero points, 2 outer ones, for values all channels of a token; POINTS. same:
    values are points of the keys' grid.

    Operands, see `_operands`: changed are state, acc and for keys of mode 2 queries and about (their unit, what zero
    points add). Inputs are slot (the byte of the ring's slot), places, then queries, begins, constants, or renew
    (whether the block is the first of its group), constants, plain and base (see `renewed_queries`); points of keys, of
    values; masked: live, 0 where the warp has no block left.
    """
    pieces, tiles, words, bits, mode, group, slot = keys
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
    if half_tile_shift(words, bits, mode) or half_tile_shift(v_words, v_bits, v_mode):
        text += [f".reg .b32 halves; add.s32 halves, {names['slot'][0]}, {names['places'][3]};"]
    unit, shift, magic = names["state"][2], "", names["constants"][:4]
    if mode == 2:
        unit, shift = names["about"][0], names["about"][1]
        text += renewed_queries(
            slices, bits, 2 * words, names["renew"][0], names["plain"], names["base"], names["queries"], names["about"]
        )
    begins = names["k_points"] if mode == POINTS else names.get("begins", [])
    text += block_scores(slices, pieces, tiles, bits, mode, group, 2 * words, names["queries"], begins, magic)
    points = names["k_points" if same else "v_points"]
    text += prepared_values(slices, v_tiles, v_bits, v_mode, v_group, slot, slot + 2 * v_words, points)
    outputs = names["state"] + names["acc"]
    text += ["{", *probabilities(unit, shift, v_mode)]
    text += ["{", *added_values(slices, v_tiles, v_bits, v_mode, v_group, outputs, names["constants"]), "}"]
    text += _fallen([outputs[1], *([outputs[3]] if v_mode == 2 else []), *names["acc"]])
    return " ".join([*text, "}", *(["KVCAL_NONE:"] if masked else []), "}"])


@constexpr_function
def block_constraints(
    slices: int, keys: tuple[int, ...], values: tuple[int, ...], masked: bool = False, same: bool = False
) -> str:
    """Return the constraints of `block`'s operands."""
    outputs: list[str] = []
    inputs: list[str] = []
    for name, count, kind in _operands(slices, keys, values, masked, same):
        changed = name in ("state", "acc", "about") or (name == "queries" and keys[4] == 2)
        (outputs if changed else inputs).extend([("=" if changed else "") + kind] * (4 * count))
    return ",".join([*outputs, *inputs, *[str(i) for i in range(len(outputs))]])
