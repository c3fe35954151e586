"""Fused decode attention: the stored order against its description, the reference against torch and the codecs, the
Triton kernel against the reference in the interpreter and on a GPU, and what it compiles to without one.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcal_artifacts.codecs import Higgs, MixKVQ, Shape, Uniform
from kvcal_artifacts.codecs.higgs_grids import GRID_MSE, GRIDS, gaussian_grid
from kvcal_artifacts.errors import KVCalError
from kvcal_kernels.attention import plan, reference
from kvcal_kernels.lattice import nearest
from kvcal_kernels.layout import Blocks, Form, Grid, Rope, decode, grid_of, grids, pack, unpack
from kvcal_kernels.layout.form import BITS, BYTE_DIMS, DIMS
from tests.support.cases import attention_cases
from tests.support.cases.attention_cases import (
    BYTES,
    INFINITE,
    INTEGERS,
    SCHEMES,
    SETTINGS,
    Case,
    by_torch,
    carried,
    carrying,
    exhaustive,
    launches,
    made,
    misplaced,
    off,
    random_codes,
    random_grid,
    small,
    wrong,
)
from tests.support.compiled import compiled, loops, resources, skip_unless_pinned
from tests.support.interpreted import interpreted, needs_triton

FORMS = [setting.form(role, dim, 3) for role in ("key", "value") for dim in DIMS for setting in SETTINGS.values()] + [
    setting.form(role, dim, 3) for role in ("key", "value") for dim in BYTE_DIMS for setting in BYTES.values()
]


def random(form: Form, room: int = 4, seed: int = 0) -> tuple[Any, Any, Any]:
    return random_codes(form, 2, 3, room, torch.Generator().manual_seed(seed))


def grid(form: Form) -> Grid | None:
    return random_grid(form, 3, torch.Generator().manual_seed(0))


def is_(form: Form) -> str:
    settings = (form.role, form.dim, form.bits, form.group, form.inner, form.symmetric, form.vector, form.in_bytes)
    return "-".join(map(str, settings))


# The order in which blocks are stored.


@pytest.mark.parametrize("form", [*FORMS, Form("key", 128, 2, 128, False, False), Form("key", 64, 3, 64)], ids=is_)
def test_unpack_gives_what_was_packed(form: Form) -> None:
    codes, scale, zero = random(form)
    packed = pack(codes, scale, zero, form, grid(form))
    assert (packed.words.dtype, packed.words.shape) == (torch.int16, (2, 3, 4, form.words))
    scales = (2, 3 // form.norm_heads, 4 // form.scale_blocks, form.scales)
    assert (packed.scale.dtype, packed.scale.shape) == (torch.float16, scales)
    again = unpack(packed)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(again, (codes, scale, zero), strict=True))


@pytest.mark.parametrize(
    ("dim", "bits", "stored"),
    [(128, 4, 4.5), (128, 3, 3.5), (64, 3, 3.5), (64, 2, 2.5), (96, 8, 8.5), (96, 2, 2.5), (96, 3, 4.5)],
)
def test_stored_bits(dim: int, bits: int, stored: float) -> None:
    """96 channels are 6 pieces; 3 bits keep room for 8."""
    form = Form("key", dim, bits)
    assert form.stored_bits == pytest.approx(stored, abs=0.005)
    packed = pack(*random(form), form)
    size = packed.words.numel() * 2 + packed.scale.numel() * 2
    assert size * 8 / (2 * 3 * 128 * dim) == pytest.approx(form.stored_bits)


@given(st.sampled_from([form for form in FORMS if not form.vector]), st.integers(0, 31), st.integers(0, 10**6))
def test_a_code_lies_where_the_description_says(form: Form, token: int, channel: int) -> None:
    """Module docstring of reference.py, computed once more: tile, place and bit of one number."""
    channel %= form.dim
    codes = torch.zeros(1, 1, 32, form.dim, dtype=torch.int32)
    codes[..., token, channel] = (1 << form.bits) - 1
    scale, zero = (None if x is None else x[:1, :1] for x in random(form, max(1, form.scale_blocks))[1:])
    assert scale is not None
    if form.scale_blocks > 1:
        codes = torch.cat([codes, torch.zeros_like(codes).repeat(1, 1, form.scale_blocks - 1, 1)], 2)
    words = pack(codes, scale, zero, form).words[0, 0, 0].int() & 0xFFFF
    pieces = {2: 8, 3: 8, 4: 4, 8: 2}[form.bits]  # to a tile
    across = -(-form.dim // 64) * 4 if form.bits == 3 else form.dim // 16
    half, slice_ = token // 16, channel // 16
    row, column = (token % 16, channel % 16) if form.role == "key" else (channel % 16, token % 16)
    turns = form.dim == 96 and form.bits in (2, 4)  # three pairs of a half block to tiles of four or two
    if not form.inner and form.role == "key" and not (turns and form.bits == 2):
        tile, field = divmod(half * across + slice_, pieces)
    elif form.role == "value":  # the halves of a slice in the bytes of a word
        tile, field = slice_ // (pieces // 2), slice_ % (pieces // 2) + half * (pieces // 2)
    else:  # neighbouring slices
        pair = half * (across // 2) + slice_ // 2
        if turns:
            pair = slice_ // 2 * 2 + half
        tile, field = pair // (pieces // 2), pair % (pieces // 2) + slice_ % 2 * (pieces // 2)
    wanted = {tile * 256 + row * 16 + column: ((1 << min(form.bits, 16 // pieces)) - 1) << field * (16 // pieces)}
    if form.bits == 2 and form.dim == 96 and tile == 1:  # half a tile, in whose fields 2, 3, 6, 7 lie columns from 8 on
        wanted = {256 + row * 8 + column % 8: 3 << 2 * field + column // 8 * 4}
    if form.bits == 3:
        tiles = -(-2 * across // 8)
        if form.dim == 64:  # half a tile, in whose odd bits lie columns from 8 on
            wanted[tiles * 256 + row * 8 + column % 8] = 1 << (2 * field + column // 8)
        else:
            wanted[(tiles + tile // 2) * 256 + row * 16 + column] = 1 << (2 * field + tile % 2)
    assert {int(i): int(words[i]) for i in words.nonzero()[:, 0]} == wanted


@given(st.sampled_from([form for form in FORMS if form.in_bytes]), st.integers(0, 31), st.integers(0, 10**6))
def test_a_code_of_a_grid_in_bytes_lies_where_the_description_says(form: Form, token: int, code: int) -> None:
    """Module docstring of grids.py, computed once more: every bit of one code."""
    bits, d, code = form.bits * form.vector, form.vector, code % (form.dim // form.vector)
    codes = torch.zeros(1, 1, 32, form.dim // d, dtype=torch.int32)
    codes[..., token, code] = (1 << bits) - 1
    packed = pack(codes, torch.ones(1, 1, 32, 1).half(), None, replace(form, norm_heads=1), grid(form))
    if form.role == "value":  # tokens of a lane: 2 q and 2 q + 1 of a quarter block, of both half blocks in turns
        number, row = code // 16, code % 16
        register, lane, place = token % 16 // 8, token % 8 // 2, token % 2 * 2 + token // 16
    else:
        channel, row = code * d, token % 16
        register, lane, place = channel % 4 // 2, channel % 16 // 4, channel % 64 // 16
        number = token // 16 * (form.dim // 64) + channel // 64
        number = number * 2 + channel % 2 if d == 1 else number
    at = 8 * register + 2 * lane + number % 2
    if bits == 4:
        wanted = {(number // 2, row, at, 4 * place + bit) for bit in range(4)}
    elif bits == 2:
        wanted = {(number // 4, row, at, 4 * place + number // 2 % 2 * 2 + bit) for bit in range(2)}
    elif form.dim == 64 and number > 1:  # half a tile has the lower bits, of register 1 in the higher 2 of four
        lower = (1, row // 2, row % 2 * 8 + at % 8)
        wanted = {(*lower, 4 * place + 2 * register + bit) for bit in range(2)} | {(0, row, at, 4 * place + 3)}
    elif number % 8 < 6:
        wanted = {(number // 8 * 3 + number % 8 // 2, row, at, 4 * place + bit) for bit in range(3)}
    else:
        wanted = {(number // 8 * 3 + bit, row, at, 4 * place + 3) for bit in range(3)}
    bitwise = packed.words[0, 0, 0].view(-1, 16, 1).int() >> torch.arange(16) & 1
    assert {(i // 16, i % 16, *rest) for i, *rest in bitwise.nonzero().tolist()} == wanted


def selected(table: Tensor, code: Tensor, points: int) -> Tensor:
    """What `prmt` selects from a table of bytes (16,) by codes, both products added up, as PTX says."""

    def prmt(own: Tensor, which: Tensor) -> Tensor:
        found = own[which & 7].int()
        return torch.where(which > 7, -(found < 0).int(), found)

    return prmt(table[:8], code) + (prmt(table[8:], code ^ 8) if points == 16 else 0)


def test_tables_of_bytes_give_every_pair_of_points_that_share_their_lower_bits() -> None:
    whole, codes = torch.arange(-grids.LARGEST, grids.LARGEST + 1), torch.arange(16)
    low, high = (x.flatten().float() for x in torch.meshgrid(whole, whole, indexing="ij"))
    fill = torch.full((-len(low) % 7,), 0.0)
    for own in zip(*(torch.cat([x, fill]).split(7) for x in (low, high)), strict=True):
        points = torch.cat([own[0], torch.tensor([126.0]), own[1], torch.tensor([-1.0])])
        table, step = grids.byte_table(points[:, None], 4)
        assert step == 1.0
        assert torch.equal(selected(table.view(torch.int8), codes, 16).float(), points)


@pytest.mark.parametrize(("bits", "d"), grids.IN_BYTES)
def test_grids_in_bytes_are_multiples_of_a_step_and_tables_give_them(bits: int, d: int) -> None:
    n = 1 << bits * d
    points = grids.in_bytes(gaussian_grid(d, n))
    table, step = grids.byte_table(points, bits)
    assert (table.dtype, table.shape) == (torch.int32, (4 * d,))
    found = torch.stack([selected(own, torch.arange(n), n) for own in table.view(torch.int8).view(d, 16)], 1)
    assert torch.equal(found.float() * step, points) and int(found.abs().max()) == grids.LARGEST
    looked_up, unit = grids.table_of(points, bits)
    numbers = looked_up.view(looked_up.shape[0], -1, d)[:n, 0].double() * unit
    assert torch.equal(numbers.float(), points)  # the same points either way


def test_points_that_are_no_multiples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"points up to 2\.73.*not multiples of 126ths"):
        grids.byte_table(gaussian_grid(1, 16), 4)
    with pytest.raises(ValueError, match="grid of 64 points of 2 numbers at 3 bits: in bytes are allowed"):
        grids.byte_table(gaussian_grid(2, 64), 3)


@given(
    st.sampled_from([form for form in FORMS if form.vector and not form.in_bytes]),
    st.integers(0, 31),
    st.integers(0, 10**6),
)
def test_a_code_of_a_grid_lies_where_the_description_says(form: Form, token: int, code: int) -> None:
    """Module docstring of grids.py, computed once more: every bit of one code."""
    bits, d, code = form.bits, form.vector, code % (form.dim // form.vector)
    codes = torch.zeros(1, 1, 32, form.dim // d, dtype=torch.int32)
    codes[..., token, code] = (1 << bits * d) - 1
    packed = pack(codes, torch.ones(1, 1, 32, 1).half(), None, replace(form, norm_heads=1), grid(form))
    wide, across = bits * min(d, 2), form.dim // 16
    if form.role == "key" and d < 4:
        channel = code * d
        found = [(token // 16 * across + channel // 16, token % 16, channel % 16 // 2, channel % 2 * bits)]
    elif form.role == "key":
        found = [(token // 16 * across + code // 8 * 2 + part, token % 16, code % 8, 0) for part in range(2)]
    elif d == 1:
        found = [(token // 16 * across + code // 16, code % 16, token % 16 // 2, token % 2 * bits)]
    elif d == 2:
        found = [(token // 8 * (form.dim // 32) + code // 16, code % 16, token % 8, 0)]
    else:
        found = [(token // 8 * (form.dim // 32) + code // 8, code % 8 + 8 * part, token % 8, 0) for part in range(2)]
    wanted = set()
    for piece, row, pair, offset in found:
        for bit in range(offset, offset + wide):
            tile, unit_row, at = piece * bits // 16, row, 7 + piece * 2 * bits % 32 + bit
            if bits == 3 and form.dim == 64 and (piece in (5, 6) or (piece == 7 and bit > 1)):  # half a tile of 16 x 4
                at = 7 + (6 * (piece - 5) + bit if piece < 7 else 10 + bit) + pair // 4 * 16
                wanted.add((128 + row * 4 + pair % 4, at % 32 // 16, at % 16))
                continue
            if bits == 3 and form.dim == 64 and piece == 7:
                tile, at = 0, 5 + bit
            elif bits == 2 and (form.role, d) != ("key", 4):
                unit_row, at = row % 8 + piece % 8 // 4 * 8, 7 + piece % 4 * 8 + row // 8 * 4 + bit
            elif bits == 3 and piece % 16 == 15:
                tile, at = piece // 16 * 3 + bit // 2, 5 + bit % 2
            elif bits == 3:
                tile, at = piece // 16 * 3 + piece % 16 // 5, 7 + piece % 16 % 5 * 6 + bit
            wanted.add((tile * 128 + unit_row * 8 + pair, at % 32 // 16, at % 16))
    bitwise = packed.words[0, 0, 0].view(-1, 2, 1).int() >> torch.arange(16) & 1
    assert {tuple(i) for i in bitwise.nonzero().tolist()} == wanted


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("key", 128, 5), "5 bits at head_dim 128"),
        (("key", 80, 4), "4 bits at head_dim 80"),
        (("key", 128, 4, 32, False), "symmetric groups"),
        (("value", 128, 4, 48), "groups of 48 tokens: must be a multiple of 32"),
        (("key", 128, 4, 24), "groups of 24 channels"),
        (("key", 96, 4, 64), "that divides 96"),
        (("key", 128, 3, 32, True, True, 4), "grid of 3 bits, 4 numbers a code, at head_dim 128"),
        (("value", 80, 2, 32, True, True, 2), "at head_dim 80"),
        (("value", 64, 2, 32, True, True, 2, 0), "norms over 0 heads"),
        (("value", 64, 2, 32, False, False, 0, 1, 16), "only keys of 2 bits in outer groups have tiers"),
        (("key", 64, 2, 32, True, True, 0, 8), "integers with norms over 8 heads"),
        (("key", 96, 4, 32, True, True, 1, 1, 0, 0, True), "grid in bytes of 4 bits, 1 numbers a code, at head_dim 96"),
        (("value", 128, 3, 32, True, True, 2, 1, 0, 0, True), r"may be \(\(2, 2\), .*head_dim \(64, 128, 256\)"),
    ],
)
def test_forms_are_refused_in_one_line(settings: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Form(*settings)


# Against codecs.


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize(
    ("bits", "axis", "mode"),
    [
        *((bits, axis, "asymmetric") for bits in BITS for axis in ("channel", "token")),
        *((bits, "inner", mode) for bits in BITS for mode in ("symmetric", "hybrid")),
    ],
)
def test_blocks_hold_what_a_codec_decodes(role: Any, bits: int, axis: Any, mode: Any) -> None:
    axis = ("channel" if role == "key" else "token") if axis == "inner" else axis
    codec = Uniform(Shape(2, 64, 32), role, bits, 32, axis, mode)
    x = torch.randn(2, 2, 96, 64, generator=torch.Generator().manual_seed(bits)) * 3 + 1
    x[..., ::3] -= 2
    packed = codec.encode(x)
    if mode == "hybrid":
        assert 0.05 < codec.symmetric_share(packed) < 0.95
    made, form = codec.as_blocks(packed), codec.fused()
    assert isinstance(form, Form) and made.form == form
    assert all(
        t.untyped_storage().data_ptr() == packed[n].untyped_storage().data_ptr()
        for n, t in (("words", made.words), ("scale", made.scale))
    )
    codec._form = "as it was stored before there was a kernel"
    other = codec.encode(x)
    assert set(other) == {"codes", "scale"} | ({"min"} if mode != "symmetric" else set())
    assert torch.equal(decode(made), codec.decode(other))


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("norm", ["head", "token"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("n", "d"), [(16, 2), (64, 2), (256, 2), (256, 4), (4, 1), (8, 1), (16, 1)])
def test_blocks_hold_what_a_grid_codec_decodes(role: Any, norm: Any, dim: int, n: int, d: int) -> None:
    codec = Higgs(Shape(2, dim, 64), role, d, n, norm=norm, gain="debiased", seed=n)
    x = torch.randn(2, 2, 128, dim, generator=torch.Generator().manual_seed(d)) * 3 + 1
    packed, other = codec.encode(x), codec.for_decoding()
    made = codec.as_blocks(packed)
    assert made.form == codec.fused() and made.form.stored_bits == codec.bits_per_value() == other.bits_per_value()
    assert all(
        t.untyped_storage().data_ptr() == packed[n].untyped_storage().data_ptr()
        for n, t in (("words", made.words), ("norm", made.scale))
    )
    before = other.encode(x)
    assert set(before) == {"codes", "norm"} and torch.equal(packed["norm"], before["norm"])
    assert torch.equal(codec.codes(packed), other.codes(before))
    assert torch.equal(decode(made), other.decode(before))


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("dim", BYTE_DIMS)
@pytest.mark.parametrize(("n", "d"), [(16, 2), (4, 1), (8, 1), (16, 1)])
def test_blocks_in_bytes_hold_what_a_grid_codec_decodes(role: Any, dim: int, n: int, d: int) -> None:
    """And what the same codec holds for look-ups, and a bundle's reader of before them: points are those of the grid."""
    codec = Higgs(Shape(2, dim, 64), role, d, n, norm="head", seed=n, points="bytes")
    x = torch.randn(2, 2, 128, dim, generator=torch.Generator().manual_seed(d)) * 3 + 1
    packed, looked_up, other = codec.encode(x), codec.for_lookups(), codec.for_decoding()
    made, elsewhere = codec.as_blocks(packed), looked_up.encode(x)
    assert made.form.in_bytes and not looked_up.as_blocks(elsewhere).form.in_bytes
    assert made.form.stored_bits == codec.bits_per_value() == looked_up.bits_per_value()
    assert not torch.equal(packed["words"], elsewhere["words"]) and torch.equal(packed["norm"], elsewhere["norm"])
    assert torch.equal(codec.codes(packed), looked_up.codes(elsewhere))
    assert torch.equal(decode(made), looked_up.decode(elsewhere)) and torch.equal(
        decode(made), other.decode(other.encode(x))
    )
    said = [
        own.describe().partition("gain=mse")[2] for own in (codec, looked_up, other, Higgs(codec.shape, role, d, n))
    ]
    assert said == [", points=bytes)", ", points=bytes looked up)", ", points=bytes looked up)", ")"]
    again = Higgs.from_state(codec.shape, role, codec.config(), codec.tensors())
    assert again.fused() == codec.fused() and torch.equal(again.encode(x)["words"], packed["words"])
    assert not Higgs(Shape(2, dim, 64), role, d, n).fused().in_bytes  # type: ignore[union-attr]


@pytest.mark.parametrize("dim", [96])
def test_a_grid_in_bytes_is_looked_up_at_other_head_dims(dim: int) -> None:
    form = Higgs(Shape(2, dim, 32), "key", 1, 16, points="bytes").fused()
    assert isinstance(form, Form) and not form.in_bytes


def test_codes_that_do_not_fill_words_are_stored_without() -> None:
    assert "codes of 3 bits at head_dim 96 would take 4 bits in" in str(Higgs(Shape(2, 96, 32), "key", 2, 64).fused())
    wide = str(Uniform(Shape(2, 96, 32), "value", 3, 32, "token", "symmetric").fused())
    assert "3 bits at head_dim 96 would take 4.5 bits in the fused kernel's layout, 3.5 as stored" in wide


@pytest.mark.parametrize(("n", "d"), [(64, 2), (256, 2), (256, 4)])
def test_larger_grids_have_no_points_of_bytes(n: int, d: int) -> None:
    with pytest.raises(KVCalError, match=f"higgs grid d={d} n={n} with points of bytes: allowed are d=2 n=16, d=1 n=4"):
        Higgs(Shape(2, 128, 32), "key", d, n, points="bytes")


def test_codecs_of_one_grid_share_their_table() -> None:
    keys, values, others = (
        Higgs(Shape(2, 64, 32), role, 2, n) for role, n in (("key", 16), ("value", 16), ("key", 256))
    )  # type: ignore[arg-type]
    tables = [codec.as_blocks(codec.empty(1, torch.device("cpu"))).grid.table for codec in (keys, values, others)]  # type: ignore[union-attr]
    assert tables[0].data_ptr() == tables[1].data_ptr() != tables[2].data_ptr()


@pytest.mark.parametrize(("d", "n"), sorted(GRID_MSE))
def test_rounding_of_a_table_does_not_add_up_over_tokens(d: int, n: int) -> None:
    """32000 tokens of one weight, in which quantisation errors cancel: what all tokens share is left."""
    points = gaussian_grid(d, n)
    x = torch.randn(64 * 32000, d, generator=torch.Generator().manual_seed(d))
    codes = nearest(x, points).long().view(32000, 64)
    made = grid_of(points, torch.ones(1, 64), GRIDS[d, n] // d)
    table = made.table[:n, :d].double() * made.unit
    assert off(table[codes].mean(0), points.double()[codes].mean(0)) < 4e-4  # as they are up to 4.8e-3


@pytest.mark.parametrize(
    ("dim", "block", "full", "four"), [(64, 32, 16, 16), (128, 64, 0, 64), (96, 128, 16, 48), (96, 32, 16, 16)]
)
def test_blocks_hold_what_a_codec_of_tiers_decodes(dim: int, block: int, full: int, four: int) -> None:
    settings: Any = {"group": block, "round_up": 16, "full": full, "four": four, "importance": "none"}
    codec, other = (MixKVQ(Shape(2, dim, block), "key", **settings) for _ in range(2))
    other._form = "as it was stored before there was a kernel"
    x = torch.randn(2, 2, 256, dim, generator=torch.Generator().manual_seed(full)) * torch.linspace(0.5, 4, dim)
    packed, before = codec.encode(x), other.encode(x)
    made = codec.as_blocks(packed)
    assert made.form == codec.fused() and made.order is not None and len(made.order.unique(dim=2)[0, 0]) > 1
    assert codec.block_bytes() == other.block_bytes() and set(packed) == {"perm", "words", "scale"}
    assert all(
        t.untyped_storage().data_ptr() == packed[n].untyped_storage().data_ptr()
        for n, t in (("words", made.words), ("scale", made.scale), ("perm", made.order))
    )
    assert torch.equal(packed["perm"], before["perm"])
    assert all(torch.equal(a, b) for a, b in zip(codec.counts(packed), other.counts(before), strict=True))
    assert torch.equal(decode(made), other.decode(before))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"full": 8, "four": 16}, r"tiers of \(8, 16\) channels: must be multiples of 16"),
        ({"full": 16, "four": 48}, "that leave some of 64"),
        ({"full": 0, "four": 0}, "without channels in the upper tiers"),
        ({}, "another size in every block"),
        ({"full": 16, "four": 16, "group": 16}, "groups of 16 tokens, blocks of 32"),
        ({"full": 16, "four": 16, "dtype": "bfloat16"}, "first tier in bfloat16"),
        ({"full": 0, "four": 16}, "tiers of 0 and 16 of 64 channels would take 192 bits a token .*, 160 as stored"),
    ],
)
def test_tiers_that_the_kernel_does_not_read_are_refused(settings: Any, says: str) -> None:
    why = MixKVQ(Shape(2, 64, 32), "key", **{"group": 32, **settings}).fused()
    assert isinstance(why, str) and re.search(says, why)


GRID = Form("key", 128, 4, vector=2)

# The reference.

RAGGED = Case(blocks=(4, 0, 1, 0), sink=(9, 3, 0, 0), recent=(40, 2, 3, 3), queries=3, heads=2, dim=64)


@pytest.mark.parametrize("case", [*small(), RAGGED], ids=str)
def test_the_reference_is_attention_over_what_a_row_holds(case: Case) -> None:
    """Room beyond a row's counts holds what is not a number."""
    own = made(case)
    found = reference.attend(own.q.float(), *own.arguments()[1:], **own.named())
    assert off(found, by_torch(own, torch.float64)) < 2e-6
    assert reference.attend(*own.arguments(), **own.named()).dtype == case.dtype


def test_queries_of_packed_keys_take_the_factors_that_keys_were_divided_by() -> None:
    factored, plain = attention_cases.factored()
    assert torch.equal(reference.attend(*plain.arguments()), reference.attend(*factored[0].arguments(), factored[1]))


def test_the_test_of_errors_can_fail() -> None:
    own = made(Case(ratio=16))
    good = reference.attend(*own.arguments())
    assert wrong(own, good) is None
    assert "off by" in str(wrong(own, good * 1.002))
    one = good.clone()
    one[:, 2] *= 1.0016
    assert "query head 2" in str(wrong(own, one))
    assert "off by nan" in str(wrong(own, good * torch.nan))
    shifted = reference.attend(own.q, own.keys, own.values, own.blocks - 1, *own.arguments()[4:])
    assert "off by" in str(wrong(own, shifted))


# The kernel in Triton's interpreter.


@needs_triton
def test_interpreted_kernel_agrees_with_the_reference() -> None:
    assert interpreted("-m", "tests.support.cases.attention_cases", "small") == [str(len(small()))]


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_interpreted_kernel_agrees_with_the_reference_everywhere() -> None:
    assert interpreted("-m", "tests.support.cases.attention_cases", "exhaustive") == [str(len(exhaustive()))]


@needs_triton
@pytest.mark.parametrize(
    ("case", "change", "says"),
    [
        (Case(heads=2, blocks=(2,), rotary=128), {"packed_q": lambda o: 2 * o.q}, "packed_q with keys before RoPE"),
        (Case("grid 3 of 2", blocks=(2,), rotary=128), {}, "only integers in one tier are rotated"),
        (
            Case(blocks=(2, 3), sink=(1, 1), recent=(5, 5), rotary=64, starts=(0, 1, 2)),
            {},
            "3 rows of .* must be of at most 128, 1 or 2",
        ),
        (Case(dim=64, blocks=(2,), rotary=128), {}, "RoPE of 128 channels, .*at most 64"),
        (
            Case(blocks=(2,), rotary=128),
            {"rope": lambda o: replace(o.rope, first=o.rope.first[:, 1:])},
            "8 runs: .*9 or more",
        ),
    ],
)
def test_what_the_kernel_would_misturn_is_refused(case: Case, change: dict[str, Any], says: str) -> None:
    from kvcal_kernels.attention import triton

    own = made(case)
    with pytest.raises(ValueError, match=says):
        triton.attend(*own.arguments(), **{**own.named(), **{name: make(own) for name, make in change.items()}})
    with pytest.raises(ValueError, match="RoPE of 48 channels: the fused kernel rotates multiples of 32"):
        Rope(torch.zeros(1, 1, 2, 24), torch.zeros(32, 2, 24))


@needs_triton
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": lambda o: o.q.float()}, "queries of torch.float32"),
        ({"q": lambda o: o.q[:, :3]}, r"queries \(1, 3, 1, 128\): must be \(1, a multiple of 2, Q, 128\)"),
        ({"q": lambda o: o.q[..., :64]}, "queries"),
        ({"keys": lambda o: o.values}, "must be keys and values"),
        (
            {"keys": lambda o: Blocks(o.keys.form, o.keys.words[:, :, :3], o.keys.scale)},
            r"keys: words \(1, 2, 3, 1024\)",
        ),
        ({"values": lambda o: Blocks(o.values.form, o.values.words[:, :, :3], o.values.scale)}, "values: words"),
        ({"keys": lambda o: replace(o.keys, grid=random_grid(GRID, 2, torch.Generator()))}, r"keys of Form.*: a grid;"),
        ({"keys": lambda o: replace(o.keys, form=GRID)}, r"keys of Form.*: no grid;"),
        (
            {"keys": lambda o: Blocks(replace(GRID, norm_heads=3), o.keys.words, o.keys.scale)},
            "keys: norms over 3 heads",
        ),
        (
            {"keys": lambda o: replace(o.keys, form=GRID, grid=random_grid(GRID, 4, torch.Generator()))},
            r"keys: table \(256, 2\), signs \(4, 128\), 2 numbers a point; must be \(256, 2\), \(2, 128\), 2",
        ),
        ({"keys": lambda o: replace(o.keys, order=o.blocks)}, r"keys: order of channels \(1,\); must be None"),
        ({"blocks": lambda o: o.blocks.long()}, r"blocks: \(1,\) torch.int64; must be \(1,\) torch.int32"),
        ({"sink": lambda o: (o.sink[0], o.sink[1][:, :, 1:], o.sink[2])}, "sink: keys"),
        ({"recent": lambda o: (*o.recent[:2], o.recent[2].repeat(2))}, "recent: keys"),
        ({"recent": lambda o: (o.recent[0].bfloat16(), *o.recent[1:])}, "recent: keys .* torch.bfloat16"),
        ({"q": lambda o: o.q.transpose(1, 2).contiguous().transpose(1, 2)}, "q: strides"),
        ({"sink": lambda o: (o.sink[0].mT.contiguous().mT, *o.sink[1:])}, "sink: strides"),
    ],
)
def test_what_the_kernel_would_misread_is_refused(change: dict[str, Any], says: str) -> None:
    from kvcal_kernels.attention import triton

    own = made(Case(heads=2, ratio=2, blocks=(2,)))
    own = replace(own, q=own.q.repeat(1, 1, 2, 1)) if "q: strides" in says else own
    with pytest.raises(ValueError, match=says):
        triton.attend(*replace(own, **{name: make(own) for name, make in change.items()}).arguments())


# The assembly of unpacking, which the interpreter does not run, computed instruction by instruction.

PTX: dict[str, Callable[..., Tensor]] = {
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": lambda a, b, c, table: sum(
        (~(a ^ -(i >> 2 & 1)) & ~(b ^ -(i >> 1 & 1)) & ~(c ^ -(i & 1)) & 0xFFFFFFFF) * (table >> i & 1) for i in range(8)
    ),
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "add.u32": lambda a, b: a + b,
    "shf.r.wrap.b32": lambda a, b, n: (a | b << 32) >> n & 0xFFFFFFFF,
    "prmt.b32": lambda a, b, select: sum(
        ((a | b << 32) >> 8 * (select >> 4 * i & 7) & 255) << 8 * i for i in range(4)
    ),
}  # fmt: skip


def executed(text: str, outputs: int, inputs: list[Tensor]) -> list[Tensor]:
    values: dict[str, Any] = {f"${outputs + i}": x for i, x in enumerate(inputs)}
    for line in text.replace("{", "").replace("}", "").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name and not name.startswith(".reg"):
            target, *operands = (part.strip() for part in rest.split(","))
            values[target] = PTX[name](*(values[o] if o in values else int(o, 0) for o in operands))
    return [values[f"${i}"] for i in range(outputs)]


def looked_up(
    text: str, outputs: int, inputs: list[Tensor], lane: int, first: int, step: int, size: int
) -> list[Tensor]:
    """As `executed`, with a table: a load of 4 bytes gives the entry's number, one of 8 twice the number and one more."""
    values: dict[str, Any] = {f"${outputs + i}": x for i, x in enumerate(inputs)} | {
        "kvcal_table": 0,
        "kvcal_place": lane,
    }
    for line in text.strip("{ }").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name.startswith("ld.shared"):
            *targets, place = (part.strip(" {}[]") for part in rest.split(","))
            address, plus = place.split(" + ")
            at = values[address]
            assert int(plus) == first and bool((at % (1 << step) == lane % ((1 << step) // size) * size).all())
            index = at >> step
            values |= {t: index * len(targets) + part for part, t in enumerate(targets)}
        elif name and name != ".reg":
            target, *operands = (part.strip() for part in rest.split(","))
            found = (values[o] if o in values else int(o, 0) for o in operands)
            values[target] = PTX[name](*(torch.as_tensor(x) for x in found))
    return [values[f"${i}"] for i in range(outputs)]


@needs_triton
@pytest.mark.parametrize(("bits", "pack", "pieces"), [(2, 2, 8), (2, 4, 8), (3, 2, 16), (3, 2, 8), (4, 2, 4)])
@pytest.mark.parametrize("step", [7, 6])
def test_assembly_looks_up_each_code(bits: int, pack: int, pieces: int, step: int) -> None:
    """Each result is the number of its pair's entry, from every lane's own copy of the table."""
    from kvcal_kernels.attention import triton as fused

    g = torch.Generator().manual_seed(bits)
    half, whole = bits == 3 and pieces == 8, grids.tiles(pieces, bits)
    words = torch.randint(-(1 << 15), 1 << 15, (whole * 256 - half * 128,), generator=g).short()
    units = words.view(torch.int32).long() & 0xFFFFFFFF
    if half:  # what is of columns 4 to 7 is the upper half of units of columns 0 to 3
        last = units[128:].view(16, 4)
        units = torch.cat([units[:128], torch.cat([last, last >> 16 | last << 16 & 0xFFFFFFFF], 1).flatten()])
    wide = units.view(-1, 16, 8)  # tile by tile
    codes = grids.ununits(words, pieces, bits)
    outputs, size = pieces * pack // 2, 8 if bits == 2 else 4
    made, given = (fused.grids._look_up_eight, (step, 640)) if half else (fused.grids._look_up, (bits, step, 640, pack))
    text = made.fn(*given) if hasattr(made, "fn") else made(*given)
    if bits > 2:
        inputs, wanted = list(wide), list(codes)
    else:
        whole = [
            (codes[2 * f] | codes[2 * f + 1] << 4) * 2 for f in range(4)
        ]  # a byte, as the number of its first half
    if (bits, pack) == (2, 2):
        inputs, wanted = list(wide), [whole[f // 2] + f % 2 for f in range(8)]
    elif (bits, pack) == (2, 4):
        inputs = [wide[0, :8], wide[0, 8:]]
        wanted = [(whole[f % 4][:8] if f < 4 else whole[f % 4][8:]) + half for f in range(8) for half in range(2)]
    for lane in (0, 13, 31):
        found = looked_up(text, outputs, inputs, lane, 640, step, size)
        assert all(torch.equal(x.long(), y.long()) for x, y in zip(found, wanted, strict=True))


def assembly(kernel: Any) -> list[str]:
    calls = [n for n in ast.walk(ast.parse(textwrap.dedent(kernel.src))) if isinstance(n, ast.Call)]
    calls = [n for n in calls if ast.unparse(n.func) == "tl.inline_asm_elementwise"]
    return [ast.literal_eval(n.args[0]) for n in sorted(calls, key=lambda n: n.lineno)]


@needs_triton
@pytest.mark.parametrize(("bits", "odd"), [(8, 0), (4, 0), (2, 0), (3, 0), (3, 1)])
def test_assembly_leaves_each_field_where_it_is(bits: int, odd: int) -> None:
    """Both halves of a register hold words: field f of each, shifted as `bit_weight` says."""
    from kvcal_kernels.attention import triton as fused

    thirds = plain(fused.integers._third_bits)
    text = thirds(bool(odd)) if bits == 3 else assembly(getattr(fused.integers, f"unpack{bits}"))[0]
    g = torch.Generator().manual_seed(0)
    w, u = (torch.randint(0, 1 << 32, (4000,), generator=g) for _ in range(2))
    width = 2 if bits == 3 else bits
    found = executed(text, 16 // width, [w, u] if bits == 3 else [w])
    for field, register in enumerate(found):
        bit = width * (field % {8: 1, 4: 2, 2: 4}[width])
        for half in (0, 16):
            wanted = w >> half >> width * field & ((1 << width) - 1)
            if bits == 3:
                wanted = wanted | (u >> half >> 2 * field + odd & 1) << 2
            assert torch.equal(register >> half & 0xFFFF, wanted << bit)


def plain(function: Any) -> Callable[..., Any]:
    """What a constexpr_function wraps."""
    return getattr(function, "fn", function)  # type: ignore[no-any-return]


@needs_triton
@pytest.mark.parametrize("bits", BITS)
def test_assembly_makes_numbers_of_codes_where_they_are(bits: int) -> None:
    """A code at its bit, of either half of a register, with the constants in the registers that are known by name."""
    from kvcal_kernels.attention import triton as fused

    ones = {
        int(b): int(n)
        for b, n in re.findall(r"add.u32 kvcal_one(\d+), kvcal_odd, (\d+)", plain(fused.before_rope._naming)(bits))
    }
    codes = torch.arange(1 << bits)
    for field in range(8):
        bit = plain(fused.before_rope._bit)(field, bits)
        assert 1 << bit == plain(fused.integers.bit_weight)(field, bits)
        for zero in (0, 1 << bits - 1):
            text = plain(fused.before_rope._counting)(bit, zero)
            assert f"or.b32 t, $1, kvcal_one{bit};" in text and text.endswith("sub.f16x2 $0, t, b; }")
            bias = int(re.findall(r"mov.b32 b, (\d+)", text)[0])
            for shift in (0, 16):
                counting = (codes << bit | ones[bit] >> shift & 0xFFFF).short().view(torch.float16)
                found = counting - torch.tensor(bias >> shift & 0xFFFF).short().view(torch.float16)
                assert torch.equal(found.long(), codes - zero)


@needs_triton
def test_assembly_turns_each_lanes_numbers_by_the_angle_of_their_token() -> None:
    """A lane has (row, 4 channels), (row + 8, the same 4) of a piece (`check_layouts`), two to a register."""
    from kvcal_kernels.attention import triton as fused

    rope = attention_cases.rope_of(Case(dim=64, rotary=64), 0, 1, 0)
    table, g = rope.near_words.flatten(), torch.Generator().manual_seed(0)
    low, high = torch.randn(2, 16, 16, generator=g).half()

    def registers(x: Tensor) -> Tensor:
        return x.view(2, 8, 4, 4).permute(1, 2, 0, 3).reshape(32, 4, 2)

    for half in range(2):
        for pair in range(2):
            values: dict[str, Tensor] = {
                f"${8 + 4 * i + j}": registers(x)[:, j] for i, x in enumerate((low, high)) for j in range(4)
            }
            for line in plain(fused.before_rope._rotation_text)(half, pair, 2).strip("{ }").split("; "):
                name, _, rest = line.strip(" ;").partition(" ")
                operands = [part.strip(" {}") for part in rest.split(",")]
                if name.startswith("ld.global"):
                    at = int(re.findall(r"\+ (\d+)\]", rest)[0]) // 2
                    for j, target in enumerate(operands[:4]):
                        values[target] = table[at : at + 256].view(32, 4, 2)[:, j]
                elif name in ("mul.f16x2", "neg.f16x2", "fma.rn.f16x2"):
                    own = [values[o].double() for o in operands[1:]]
                    made = -own[0] if name[0] == "n" else own[0] * own[1] + (own[2] if name[0] == "f" else 0)
                    values[operands[0]] = made.half()
            cos, sin = rope.near[16 * half : 16 * half + 16, :, 16 * pair : 16 * pair + 16].half().unbind(1)
            for first, (x, y, sign) in ((0, (low, high, -1)), (4, (high, low, 1))):
                wanted = ((x * cos).double() + sign * (y.double() * sin.double())).half()
                found = torch.stack([values[f"${first + j}"] for j in range(4)], 1)
                assert torch.equal(found, registers(wanted))


def copied(text: str, slot: int, lane: int, place: int, given: list[int], memory: bytes, shared: bytearray) -> None:
    """What one lane of a warp copies. given: block numbers and pointers, in turns."""
    values: dict[str, Any] = {"$1": slot, "$2": lane, "$3": place} | {f"${4 + i}": x for i, x in enumerate(given)}
    for line in text.strip("{ }").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name.startswith("@"):
            if not values[name[1:]]:
                continue
            name, _, rest = rest.partition(" ")
        operands = [part.strip(" []") for part in rest.split(",")]
        if name.endswith(".shared.global"):
            to, source = (values[o.split("+")[0]] + int(o.split("+")[1]) for o in operands[:2])
            size = int(operands[2])
            assert to % size == source % size == 0
            shared[to : to + size] = memory[source : source + size]
        elif name in ("mad.wide.s32", "mad.lo.s32", "add.s32", "setp.lt.u32"):
            a, b, *c = (values[o] if o in values else int(o) for o in operands[1:])
            done = {"add": a + b, "set": a < b, "mad": a * b + (c or [0])[0]}
            values[operands[0]] = done[name[:3]]


@needs_triton
@pytest.mark.parametrize(
    ("words", "scales", "blocks"),
    [(512, 128, 1), (512, 64, 1), (768, 96, 2), (1024, 256, 4), (1536, 192, 1), (2048, 384, 1)],
)
def test_a_warp_copies_a_block_and_reads_it_as_a_first_operand(words: int, scales: int, blocks: int) -> None:
    """All bytes of words and scales, float16 numbers of which `blocks` blocks share; every lane then gets from
    `ldmatrix` the two words of rows r and r + 8 that PTX gives a first operand, and no eight rows of it share a bank.
    """
    from kvcal_kernels.attention import triton as fused

    def plain(function: Any) -> Any:
        return getattr(function, "fn", function)

    g = torch.Generator().manual_seed(words)
    memory = bytes(torch.randint(0, 256, (3 * 2 * (words + scales),), generator=g, dtype=torch.uint8).tolist())
    behind, block, slot = 3 * 2 * words, 2, 1280
    pieces = ((2 * words, True), (2 * scales, False))
    text, shared = plain(fused.ring._copies)(pieces), bytearray(slot + 2 * (words + scales))
    for lane in range(32):
        wide = plain(fused.ring._width)(2 * scales)
        given = [block, lane * 16, block // blocks, behind + lane * wide]
        copied(text, slot, lane, lane * 16 ^ lane // 8 % 2 * 16, given, memory, shared)
    own = behind + block // blocks * 2 * scales
    assert shared[slot + 2 * words :] == memory[own : own + 2 * scales]
    tiles = torch.frombuffer(bytearray(memory[block * 2 * words : (block + 1) * 2 * words]), dtype=torch.int16)
    for number, tile in enumerate(tiles.view(-1, 16, 16)):
        rows = [(lane & 15) * 32 + ((lane >> 4) ^ (lane >> 2 & 1)) * 16 for lane in range(32)]
        for matrix in range(4):
            assert len({rows[8 * matrix + i] % 128 for i in range(8)}) == 8
        for lane, (r, c) in enumerate((i, j) for i in range(8) for j in range(4)):
            for matrix in range(4):
                at = slot + number * 512 + rows[8 * matrix + r] + 4 * c
                pair = torch.frombuffer(shared, dtype=torch.int16, count=2, offset=at)
                row, column = r + 8 * (matrix % 2), 2 * c + 8 * (matrix // 2)
                assert torch.equal(pair, tile[row, column : column + 2]), (lane, matrix)


# Compiled without a GPU.

COUNTS = [
    "capacity",
    "sink_capacity",
    "recent_capacity",
    "packed_splits",
    "tail_start",
    "tail_cost",
    "tail_total",
    "sink_splits",
    "splits",
    "tail_tokens",
    "merge_width",
    "merges",
    "runs",
]
EXACT = ["p_q", "p_exact_q", "p_out", "p_sink_k", "p_sink_v", "p_recent_k", "p_recent_v"]  # of the query's dtype
TYPES = {
    **dict.fromkeys(["p_k", "p_v"], "*i16"), **dict.fromkeys(["p_ks", "p_vs", "p_kt", "p_vt"], "*fp16"),
    **dict.fromkeys(["p_blocks", "p_sink", "p_recent", "p_count"], "*i32"), "p_partial": "*fp32", "p_stat": "*fp32",
    **dict.fromkeys(["p_k_sign", "p_v_sign"], "*i8"), "p_order": "*u8", **dict.fromkeys(["p_first", "p_near"], "*fp16"),
    **dict.fromkeys(COUNTS, "i32"),
    **dict.fromkeys(["factor", "k_unit", "v_unit"], "fp32"),
}  # fmt: skip


def built(
    case: Case, capability: int, registers: int, launch: Any = None, long: bool = False, ring: bool = False
) -> Any:
    """The kernel as it is usually launched, with at most so many registers (0: as many as it likes), for 8 kv heads.
    long: for rooms of as many blocks as there can be. ring: as caches of a max_length launch it.
    """
    from kvcal_kernels.attention import triton as fused

    case = replace(case, heads=8)
    usual = fused.usual(case.form("key"), case.form("value"), case.ratio * case.queries, case.rotary > 0)
    launch = launch or replace(usual, registers=registers)
    forms, pairs = (case.form("key"), case.form("value")), case.rotary // 32
    fixed = fused.settings(*forms, 8, case.ratio, case.queries, launch.warps, pairs=pairs)
    constants = {**fixed, "STAGES": launch.stages, "ASM": True, "RING": ring, "LONG": long}
    types = TYPES | dict.fromkeys(EXACT, "*bf16" if case.dtype == torch.bfloat16 else "*fp16")
    types = {name: types[name] for name in fused.attend_kernel.arg_names if name in types}
    options = {"num_warps": launch.warps, "num_stages": launch.stages} | ({"maxnreg": registers} if registers else {})
    aligned = [name for name in types if name.startswith("p_")]
    return compiled(fused.attend_kernel, types, constants, aligned, capability, **options)


def instructions(made: Any, case: Case, folder: Path) -> float:
    """Of a thread for each number, in the first loop over packed blocks: that of whole turns. A warp's block has
    2 * 32 * dim / 32 of them a thread; its products on tensor cores tell the loop from those over exact tokens.
    """
    packed = [loop for loop in loops(made, folder) if loop["HMMA"] + 2 * loop["IMMA"] >= 4 * case.dim // 16]
    return packed[0].total() / (2 * case.dim)


# Scheme, compute capability, cap on registers (0: none), then the ceilings: registers, instructions a number. They are
# what this kernel takes today, not a goal: kernels that are fast enough below 4 bits need fewer.
BUDGET = [
    ("uniform 4/4", 90, 0, 198, 1.32),
    ("InnerQ Base", 90, 0, 198, 1.58),
    ("InnerQ Hybrid", 90, 0, 198, 1.58),
    ("InnerQ Small", 90, 0, 198, 1.44),
    ("uniform 2/2", 90, 0, 198, 1.30),
    ("KIVI G=128", 90, 0, 198, 1.85),
    ("uniform 4/4", 90, 168, 168, 1.33),
    ("InnerQ Base", 90, 168, 168, 1.59),
    ("InnerQ Hybrid", 90, 168, 168, 1.60),
    ("InnerQ Small", 90, 168, 168, 1.46),
    ("uniform 2/2", 90, 168, 168, 1.31),
    ("KIVI", 90, 168, 168, 1.98),
    ("KIVI G=128", 90, 168, 168, 1.86),
    ("uniform 4/4", 87, 168, 168, 1.33),
    ("InnerQ Base", 87, 168, 168, 1.59),
    ("InnerQ Hybrid", 87, 168, 168, 1.60),
    ("uniform 2/2", 87, 168, 168, 1.32),
    ("KIVI", 87, 168, 168, 2.02),
    ("uniform 4/4", 80, 0, 197, 1.32),
    ("InnerQ Base", 80, 0, 197, 1.58),
    ("InnerQ Hybrid", 80, 0, 197, 1.58),
    ("uniform 2/2", 80, 168, 168, 1.32),
    ("HIGGS 2", 90, 0, 128, 1.51),
    ("HIGGS 2", 90, 128, 128, 1.63),
    ("HIGGS 2", 87, 128, 128, 1.67),
    ("HIGGS 3", 90, 128, 128, 2.48),
    ("HIGGS 4", 90, 128, 128, 2.35),
    ("TurboQuant 4/3", 90, 0, 128, 2.41),
    ("TurboQuant 4/3", 87, 128, 128, 2.33),
    ("TurboQuant 4/3 in bytes", 90, 0, 198, 1.70),
    ("TurboQuant 4/3 in bytes", 90, 168, 168, 1.72),
    ("TurboQuant 4/3 in bytes", 87, 168, 168, 1.73),
    ("TurboQuant 4/3 in bytes", 80, 168, 168, 1.73),
    ("HIGGS 2 in bytes", 90, 0, 198, 1.65),
    ("HIGGS 2 in bytes", 90, 168, 168, 1.65),
    ("HIGGS 2 in bytes", 87, 168, 168, 1.67),
    ("HIGGS 2 in bytes", 80, 168, 168, 1.67),
    ("MixKVQ", 90, 176, 153, 2.66),
    ("KIVI before RoPE", 90, 168, 168, 3.36),
    ("KIVI before RoPE", 87, 168, 168, 3.38),
    ("KIVI before RoPE", 80, 168, 168, 3.17),
    ("KIVI before RoPE G=128", 90, 168, 168, 3.14),
    ("uniform 4/4 before RoPE", 90, 168, 168, 3.35),
    ("uniform 2/2 before RoPE", 90, 168, 168, 3.25),
    ("InnerQ Base before RoPE", 90, 200, 200, 3.62),
    ("uniform 4/4 of 8 rows", 90, 168, 166, 1.89),
    ("InnerQ Base of 8 rows", 90, 168, 166, 2.21),
    ("InnerQ Hybrid of 8 rows", 87, 168, 160, 2.28),
    ("uniform 2/2 of 8 rows", 90, 168, 166, 1.83),
    ("KIVI of 8 rows G=128", 90, 168, 164, 1.73),
    ("KIVI 3", 87, 168, 168, 2.43),
    ("KIVI 4", 87, 168, 168, 2.10),
    ("KIVI 8", 87, 168, 168, 2.06),
    ("symmetric 8", 87, 168, 168, 1.15),
    ("asymmetric 2", 87, 168, 168, 1.59),
    ("asymmetric 3", 87, 168, 168, 1.87),
    ("asymmetric 4", 87, 168, 168, 1.61),
    ("asymmetric 8", 87, 168, 168, 1.43),
    ("TurboQuant 2", 87, 0, 128, 1.61),
    ("TurboQuant 3", 87, 0, 128, 2.48),
    ("TurboQuant 4", 87, 0, 128, 2.32),
    ("TurboQuant 2 in bytes", 87, 168, 168, 1.44),
    ("TurboQuant 3 in bytes", 87, 168, 168, 1.54),
    ("TurboQuant 4 in bytes", 87, 168, 168, 1.88),
    ("MixKVQ G=128", 87, 176, 165, 2.30),
    ("KIVI 3 before RoPE", 80, 216, 216, 3.54),
    ("KIVI 3 before RoPE", 87, 216, 216, 3.58),
    ("KIVI 3 before RoPE", 90, 216, 216, 3.64),
    ("KIVI 4 before RoPE", 87, 168, 168, 3.53),
    ("uniform 4/4 of 8 tokens", 90, 0, 252, 2.74),
    ("uniform 4/4 of 8 tokens", 87, 0, 250, 2.75),
    ("InnerQ Base of 8 tokens", 90, 0, 250, 3.11),
    ("InnerQ Small of 8 tokens", 90, 0, 248, 2.92),
    ("KIVI of 8 tokens", 90, 0, 252, 2.95),
    ("KIVI of 8 tokens", 87, 0, 242, 2.83),
    ("HIGGS 2 of 8 tokens", 90, 0, 255, 3.47),
    ("HIGGS 2 of 8 tokens", 87, 0, 255, 3.53),
    ("HIGGS 4 of 8 tokens", 90, 0, 255, 4.19),
    ("TurboQuant 4/3 of 8 tokens", 90, 0, 255, 3.0),
    ("TurboQuant 4/3 of 8 tokens", 87, 0, 255, 3.0),
    ("MixKVQ of 8 tokens", 90, 0, 227, 3.9),
    ("MixKVQ of 8 tokens", 87, 0, 223, 3.84),
    ("uniform 4/4 before RoPE of 8 tokens", 90, 0, 255, 4.05),
    ("HIGGS 2 of 7 rows", 90, 168, 168, 2.22),
    ("HIGGS 2 of 7 rows", 87, 168, 168, 2.26),
    # sm_89, a GeForce RTX 4090's: of schemes that `kvcal plan` shows for it
    ("KIVI", 89, 168, 168, 2.02),
    ("KIVI 4", 89, 168, 168, 2.10),
    ("InnerQ Small", 89, 168, 168, 1.46),
    ("asymmetric 8", 89, 168, 168, 1.43),
    ("uniform 4/4", 89, 168, 168, 1.33),
    ("HIGGS 2", 89, 128, 128, 1.67),
    ("HIGGS 4", 89, 128, 128, 2.38),
]


OTHERS = {  # of presets and shapes that no table of docs/benchmarks times, so that projections know their instructions
    **{f"KIVI {bits}": (f"outer {bits}", f"outer {bits}") for bits in (3, 4, 8)},
    **{f"{kind} 8": (f"{kind} 8", f"{kind} 8") for kind in ("symmetric", "asymmetric")},
    **{f"asymmetric {bits}": (f"asymmetric {bits}", f"asymmetric {bits}") for bits in (2, 3, 4)},
    **{f"TurboQuant {bits}": (f"grid {bits} of 1", f"grid {bits} of 1") for bits in (2, 3, 4)},
    **{f"TurboQuant {bits} in bytes": (f"bytes {bits} of 1", f"bytes {bits} of 1") for bits in (2, 3, 4)},
}


def scheme(name: str, dim: int = 128) -> Case:
    """NAME, then or not: before RoPE, of 8 or 7 rows (a kv head's queries), G=128, of 8 tokens."""
    tokens, name = 8 if name.endswith(" of 8 tokens") else 1, name.removesuffix(" of 8 tokens")
    long, name = name.endswith(" G=128"), name.removesuffix(" G=128")
    few, name = name.endswith(" of 7 rows"), name.removesuffix(" of 7 rows")
    many, name = name.endswith(" of 8 rows"), name.removesuffix(" of 8 rows")
    before, name = name.endswith(" before RoPE"), name.removesuffix(" before RoPE")
    group, rotary = 128 if long else None, dim if before else 0
    ratio = 8 if many else 7 if few else 4
    return Case(*(SCHEMES | OTHERS)[name], dim, group=group, rotary=rotary, ratio=ratio, queries=tokens)


@needs_triton
def test_compiled_kernel_keeps_to_its_budget(tmp_path: Path) -> None:
    """One small kernel of what the next test does for all schemes."""
    within(scheme("uniform 4/4", 64), 90, 168, 168, 2.55, tmp_path)


QUICK = [
    ("uniform 2/2", 80, 168),
    ("KIVI", 87, 168),
    ("HIGGS 2", 90, 128),
    ("TurboQuant 4/3 in bytes", 90, 168),
    ("uniform 4/4", 89, 168),
]  # one for each GPU; each takes some 10 s


@needs_triton
@pytest.mark.parametrize(
    ("name", "capability", "cap", "registers", "ceiling"),
    [pytest.param(*row, marks=() if row[:3] in QUICK else pytest.mark.slow) for row in BUDGET],
)
def test_compiled_kernels_keep_to_their_budgets(
    name: str, capability: int, cap: int, registers: int, ceiling: float, tmp_path: Path
) -> None:
    within(scheme(name), capability, cap, registers, ceiling, tmp_path)


# Registers and instructions of bfloat16, a GPU's default, with the ring of a max_length, where they are above those of
# BUDGET.
MORE = {("MixKVQ", 90, 176): (157, 2.66), ("InnerQ Base of 8 rows", 90, 168): (166, 2.22)}
RINGS = [(*row[:3], *MORE.get(row[:3], row[3:])) for row in BUDGET] + [("KIVI 4 before RoPE", 90, 168, 168, 3.50)]
QUICK_RINGS = [("uniform 2/2", 90, 168), ("KIVI", 90, 168), ("KIVI before RoPE", 90, 168)]  # 4, 4 and 11 s


@needs_triton
@pytest.mark.parametrize(
    ("name", "capability", "cap", "registers", "ceiling"),
    [pytest.param(*row, marks=() if row[:3] in QUICK_RINGS else pytest.mark.slow) for row in RINGS],
)
def test_compiled_kernels_of_bfloat16_and_a_ring_keep_to_their_budgets(
    name: str, capability: int, cap: int, registers: int, ceiling: float, tmp_path: Path
) -> None:
    within(replace(scheme(name), dtype=torch.bfloat16), capability, cap, registers, ceiling, tmp_path, ring=True)


HALF_TILES = [  # shapes whose words end with half a tile
    ("InnerQ Base", 64, 90, 168, 168, 1.95),
    ("InnerQ Hybrid", 64, 87, 168, 168, 1.95),
    ("KIVI 3", 64, 90, 168, 168, 2.83),
    ("InnerQ Base before RoPE", 64, 90, 200, 177, 4.48),
    ("KIVI 3 before RoPE", 64, 90, 216, 201, 4.46),
    ("HIGGS 3", 64, 90, 128, 125, 2.98),
    ("TurboQuant 4/3", 64, 90, 0, 128, 2.92),
    ("TurboQuant 4/3 in bytes", 64, 90, 168, 168, 2.26),
    ("KIVI", 96, 87, 168, 168, 2.15),
    ("HIGGS 2", 96, 90, 128, 128, 1.79),
    ("MixKVQ", 96, 90, 176, 156, 2.91),
]
HALF_RINGS = {("TurboQuant 4/3", 64): 2.95, ("KIVI", 96): 2.17}  # as MORE


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("ring", [False, True])  # with it bfloat16
@pytest.mark.parametrize(("name", "dim", "capability", "cap", "registers", "ceiling"), HALF_TILES)
def test_compiled_kernels_of_half_tiles_keep_to_their_budgets(
    name: str, dim: int, capability: int, cap: int, registers: int, ceiling: float, ring: bool, tmp_path: Path
) -> None:
    case = scheme(name, dim)
    if ring:
        case, ceiling = replace(case, dtype=torch.bfloat16), HALF_RINGS.get((name, dim), ceiling)
    within(case, capability, cap, registers, ceiling, tmp_path, ring=ring)


FEW = [  # four warps a program, see `chosen`
    ("uniform 4/4", 128, 90, 168, 1.35),
    ("InnerQ Base", 128, 90, 168, 1.62),
    ("InnerQ Hybrid", 128, 90, 168, 1.62),
    ("InnerQ Small", 128, 87, 168, 1.50),
    ("uniform 2/2", 128, 90, 168, 1.34),
    ("uniform 4/4", 64, 90, 168, 1.75),
    ("InnerQ Base", 64, 87, 168, 2.07),
    ("uniform 4/4", 96, 90, 168, 1.58),
]


@needs_triton
@pytest.mark.parametrize("ring", [False, pytest.param(True, marks=pytest.mark.slow)])  # with it bfloat16
@pytest.mark.parametrize(
    ("name", "dim", "capability", "registers", "ceiling"),
    [pytest.param(*row, marks=() if row[:2] == ("uniform 2/2", 128) else pytest.mark.slow) for row in FEW],
)
def test_compiled_kernels_of_few_blocks_keep_to_their_budgets(
    name: str, dim: int, capability: int, registers: int, ceiling: float, ring: bool, tmp_path: Path
) -> None:
    from kvcal_kernels.attention import triton as fused

    case = scheme(name, dim)
    case = replace(case, dtype=torch.bfloat16) if ring else case
    own = fused.launches(case.form("key"), case.form("value"), case.ratio)[1]
    assert (own.warps, own.registers) == (4, 168)
    within(case, capability, own.registers, registers, ceiling, tmp_path, own, ring)


@needs_triton
def test_counts_of_projections_are_those_of_the_compiled_kernels() -> None:
    """`kvcal bench` projects with ceilings of above, of launches as they are usual: sm_87's, else those of another GPU."""
    from kvcal.bench import roofline
    from kvcal_kernels.attention import triton as fused

    ceilings: dict[str, tuple[int, float]] = {}
    for name, capability, cap, _, ceiling in BUDGET:
        case = scheme(name)
        if case.queries > 1 or case.ratio == 7:
            continue
        usual = fused.usual(case.form("key"), case.form("value"), case.ratio, case.rotary > 0)
        order = (87, 90, 80, 89).index(capability)
        if usual.registers == cap and order <= ceilings.get(name, (order, 0.0))[0]:
            ceilings[name] = order, ceiling
    variants = (" G=128", " before RoPE", " of 8 rows")
    assert {functools.reduce(str.removesuffix, variants, name) for name in ceilings} == set(SCHEMES | OTHERS)
    kinds: dict[int, set[str]] = {4: set(), 8: set()}
    for name, (_, ceiling) in ceilings.items():
        case = scheme(name)
        forms = case.form("key"), case.form("value")
        kinds[case.ratio] |= {roofline.kind(forms[0]) + roofline.BEFORE * (case.rotary > 0), roofline.kind(forms[1])}
        assert roofline.counted(*forms, case.rotary > 0, case.ratio) == pytest.approx(ceiling, rel=0.02), name
    assert kinds[4] == set(roofline.COUNTED)
    assert kinds[8] - {"outer 2"} == set(roofline.COUNTED_OF_8)  # of groups of 32: as of four


def within(
    case: Case,
    capability: int,
    cap: int,
    registers: int,
    ceiling: float,
    folder: Path,
    launch: Any = None,
    ring: bool = False,
) -> None:
    from kvcal_kernels.attention.triton import check_layouts

    skip_unless_pinned()
    made = built(case, capability, cap, launch, ring=ring)
    check_layouts(made.asm["ttgir"])
    taken, spilled = resources(made, folder)
    assert spilled == 0
    assert taken <= registers
    assert instructions(made, case, folder) <= ceiling
    assert made.metadata.shared <= (48 if case.key in INTEGERS else 2 if case.key in BYTES else 56) * 1024


@needs_triton
def test_layouts_of_grids_are_those_that_look_ups_count_on() -> None:
    """Without which a compiler's other choice would be found only by wrong outputs."""
    from kvcal_kernels.attention.triton import check_layouts

    text = built(Case("grid 2 of 1", "grid 2 of 4", 64), 90, 0).asm["ttgir"]
    found = [line for line in text.splitlines() if re.search(r"packed_element = [48] ", line)]
    kinds = ("kvcal_table", "ldmatrix", "movmatrix", "KVCAL_LOW", "ld.shared.b16 a")
    assert all(any(kind in line for line in found) for kind in kinds)
    assert all(any(kind in line for kind in kinds) for line in found)
    check_layouts(text)
    for kind in kinds:
        other = (line.replace("#mma", "#blocked") if kind in line else line for line in text.splitlines())
        with pytest.raises(RuntimeError, match="unknown layout"):
            check_layouts("\n".join(other))
    tiers = built(Case("tiers 16 16", "outer 2", 64), 90, 0).asm["ttgir"]
    check_layouts(tiers)
    check_layouts(turned := built(Case("outer 2", "outer 2", 64, rotary=64), 90, 0).asm["ttgir"])
    assert turned.count("kvcal_near +") >= 4
    with pytest.raises(RuntimeError, match="unknown layout"):
        check_layouts(turned.replace("kWidth = 4", "kWidth = 2"))
    with pytest.raises(RuntimeError, match="contracts 32"):
        check_layouts(tiers.replace("kWidth = 2", "kWidth = 8"))


@needs_triton
@pytest.mark.parametrize(
    "key",
    [
        *(pytest.param(key, marks=pytest.mark.slow) for key in ("symmetric 3", "asymmetric 3")),
        *("outer 2", "grid 3 of 2", "tiers 16 16"),
    ],
)
def test_nothing_moves_between_lanes_but_what_assembly_moves(key: str) -> None:
    """In loops over packed blocks every number stays in a product's layouts: another would cost shared memory and a
    barrier, and a warp of several would read blocks of others.
    """
    from kvcal_kernels.attention import triton as fused

    for launch in (None, (2, 1)):
        own = fused.Launch(launch[0], 3, launch[1]) if launch else None
        lines = built(Case(key, "outer 2", 64), 90, 0, own).asm["ttgir"].splitlines()
        first = next(i for i, line in enumerate(lines) if "cp.async.wait_group" in line)
        last = next(i for i in range(first, len(lines)) if "scf.yield" in lines[i] and lines[i].startswith("      scf"))
        moved = [x.split(" : ")[-1] for x in lines[first:last] if "convert_layout" in x]
        assert len(moved) > 8
        for line in moved:
            assert re.search(r"(#mma|#linear\d*)> -> tensor<\S+, #ttg.dot_op", line), (key, launch, line)


@needs_triton
@pytest.mark.parametrize("case", [
    Case("asymmetric 4", "symmetric 3", launch=(1, 1)), Case("asymmetric 2", "asymmetric 2", 64),
    Case("asymmetric 8", "symmetric 4", 96),
    pytest.param(Case("asymmetric 4", "symmetric 8", 256, launch=(2, 1)), marks=pytest.mark.slow),
    Case("outer 2", "asymmetric 3", group=128),
    Case("symmetric 3", "outer 4", group=128, launch=(2, 1)), Case("outer 2", "outer 2", group=128),
    pytest.param(Case("bytes 4 of 1", "bytes 2 of 2", 256, ratio=8), marks=pytest.mark.slow),  # 38 s
    Case("bytes 2 of 2", "symmetric 3", 64, launch=(2, 1)),
    Case("outer 2", "bytes 3 of 1", group=128), Case("asymmetric 2", "bytes 2 of 1", launch=(4, 1)),
], ids=str)  # fmt: skip
def test_products_of_bytes_compile(case: Case) -> None:
    """The interpreter does not run their assembly, so that what does not compile is found here only."""
    from kvcal_kernels.attention import triton as fused

    warps = 1 if case.key.startswith("outer") else case.launch[0]
    assert plan.takes_int8_mma(case.form("key"), case.form("value"), case.ratio * case.queries, warps)
    made = built(case, 90, 0, fused.Launch(warps))
    fused.check_layouts(made.asm["ttgir"])
    assert "m16n8k32" in made.asm["ptx"]


@needs_triton
@pytest.mark.parametrize(
    ("keys", "values", "rotary"),
    [("bytes 2 of 2", "grid 3 of 2", 0), ("bytes 4 of 1", "outer 2", 0), ("outer 2", "bytes 4 of 1", 0),
     ("symmetric 3", "bytes 2 of 2", 64)],
)  # fmt: skip
def test_grids_in_bytes_beside_what_products_of_bytes_do_not_take_are_refused(
    keys: str, values: str, rotary: int
) -> None:
    """No other kernel reads them: caches pack them for look-ups there."""
    from kvcal_kernels.attention import triton as fused

    case = Case(keys, values, rotary=rotary)
    with pytest.raises(ValueError, match="only products of bytes read grids in bytes; pack them otherwise"):
        fused.settings(case.form("key"), case.form("value"), 8, 4, 1, 1, pairs=rotary // 32)


@needs_triton
def test_tables_of_grids_are_those_of_their_form() -> None:
    from kvcal_kernels.attention import triton as fused

    given = made(Case("bytes 2 of 2", "bytes 2 of 2"))
    wrong_table = replace(given.keys.grid, table=torch.zeros(256, 4, dtype=torch.float16))  # type: ignore[type-var]
    keys = replace(given.keys, grid=wrong_table)
    with pytest.raises(ValueError, match=r"keys: a table of torch.float16 for a grid in bytes; make it by grid_of"):
        fused.attend(given.q, keys, *given.arguments()[2:])


@needs_triton
def test_small_cases_reach_products_of_bytes() -> None:
    """With the launch of their own, which both runners take."""

    reached = [
        case for case in small()
        if plan.takes_int8_mma(
            case.form("key"), case.form("value"), case.ratio * case.queries, case.launch[0], case.rotary // 32
        )
    ]  # fmt: skip
    assert {case.launch[0] for case in reached} >= {1, 2, 4}
    assert {case.key.split()[0] for case in reached} == {"symmetric", "asymmetric", "outer", "bytes"}
    assert {case.value.split()[0] for case in reached} == {"symmetric", "asymmetric", "outer", "bytes"}
    assert {case.dim for case in reached} == {64, 96, 128, 256}


@needs_triton
def test_instructions_are_those_of_the_loop_over_packed_blocks(tmp_path: Path) -> None:
    """Products on tensor cores: of float16 2 * dim / 16 of scores, as many of outputs, 2 of the sum; of bytes half as
    many, and for each place of a field one that outputs begin with.
    """
    from kvcal_kernels.attention import triton as fused

    def found(case: Case, launch: Any, kind: str = "HMMA", least: int = 16) -> list[int]:
        return [loop[kind] for loop in loops(built(case, 90, 0, launch), tmp_path) if loop[kind] >= least]

    assert found(Case(dim=64, ratio=8), fused.Launch(1)) == [18]  # a warp alone leaves nothing over
    assert found(Case(dim=64, ratio=8), fused.Launch(4)) == [18, 18]  # whole turns, and the rest
    assert found(Case(dim=64), fused.Launch(1), "IMMA", 1) == [10]
    assert set(found(Case(dim=64), fused.Launch(4), "IMMA", 1)) == {10}  # warps without a block left pass over one


def test_one_compiled_kernel_serves_every_length_and_batch() -> None:
    """Nothing that `attend` takes from room, batch or splits is a compile-time constant, but that a room is very long."""
    from kvcal_kernels.attention import triton as fused

    constants = {p.name for p in fused.attend_kernel.params if p.is_constexpr}
    form = Case().form
    fixed = fused.settings(form("key"), form("value"), 8, 4, 1, 4)
    assert constants == {*fixed, "STAGES", "ASM", "RING", "LONG"}
    specialised = {p.name for p in fused.attend_kernel.params if not p.is_constexpr and not p.do_not_specialize}
    assert not specialised & set(COUNTS)


def by_product(a: Tensor, b: Tensor, apart: int = 0) -> Tensor:
    """What `floor_divide` makes of whole numbers that are not LONG, where its reciprocal is so many float32 numbers from the
    nearest: CUDA's full-range division, which Triton takes, may be 2 off.
    """
    inverse = 1 / b.float()
    for _ in range(abs(apart)):
        inverse = torch.nextafter(inverse, torch.tensor(torch.inf * apart))
    return ((a.float() + 0.5) * inverse).to(torch.int32)


@needs_triton
def test_blocks_are_shared_out_exactly_by_products_of_float32() -> None:
    """Every quotient that there is below SHORT, at both ends of the numbers that have it."""

    for programs in range(1, 2 * plan.MOST_SPLITS):
        last = torch.arange(
            programs - 1, plan.SHORT, programs, dtype=torch.int32
        )  # it and the next have other quotients
        for a, apart in itertools.product((last, (last + 1)[last + 1 < plan.SHORT]), (-2, -1, 0, 1, 2)):
            assert torch.equal(by_product(a, torch.tensor(programs), apart), a // programs), (programs, apart)
    beyond = torch.arange(128 * 2**16 - 1, 2**26, 2**16, dtype=torch.int32)
    assert not torch.equal(by_product(beyond, torch.tensor(128)), beyond // 128)


@needs_triton
@pytest.mark.parametrize("blocks", [1, 2**20 - 2**14, 2**20 - 2**14 + 1, 2**20, 2**26])
def test_very_long_rooms_are_shared_out_by_whole_division(blocks: int) -> None:
    """As many blocks as 2^31 - 1 tokens take at most."""
    from kvcal_kernels.attention import triton as fused

    def none(*size: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    keys, values = (
        Blocks(form, none(1, 1, blocks, form.words, dtype=torch.int16), none(1, 1, blocks, form.scales))
        for form in (Case(dim=64).form("key"), Case(dim=64).form("value"))
    )
    exact = none(1, 1, 32, 64), none(1, 1, 32, 64), none(1, dtype=torch.int32)
    ready, _, numbers = fused.launch._prepared(
        none(1, 4, 1, 64), keys, values, exact, exact, None, False, False, None, (), ()
    )
    room, programs, extra = numbers[0], numbers[3], numbers[6]
    assert room == blocks and ready.options["LONG"] == (blocks + 2**14 > 2**20)
    assert ready.options["LONG"] or room + extra + programs - 1 < plan.SHORT
    assert plan.SHORT == 2**20 and programs <= plan.MOST_SPLITS


LONG_ROOMS = """
import torch
from tests.support.cases.attention_cases import Case, SCHEMES, made
from kvcal_kernels.attention import triton
for case in (Case(blocks=(9,)), Case(*SCHEMES["HIGGS 2"], 64, blocks=(7,), launch=(2, 3))):
    given, outs = made(case), []
    for short in (triton.launch.SHORT, 0):
        triton.launch.SHORT = short
        triton.launch._PREPARED.clear()
        outs.append(triton.attend(*given.arguments(), triton.Launch(case.launch[0], iterations=case.launch[1])))
        options = [ready.options["LONG"] for ready, *_ in triton.launch._PREPARED.values()]
    print(torch.equal(*outs), options)
"""


@needs_triton
def test_very_long_rooms_are_attended_to_as_short_ones_are() -> None:
    assert interpreted("-c", LONG_ROOMS) == ["True [True]"] * 2


@needs_triton
def test_parts_are_merged_in_as_few_waits_for_memory_as_can_be() -> None:
    from kvcal_kernels.attention.plan import merge_width_of

    assert [merge_width_of(parts, 4) for parts in (1, 4, 16, 20, 24, 52, 103)] == [1, 4, 16, 20, 4, 8, 8]
    assert [merge_width_of(parts, 1) for parts in (3, 8, 9, 100)] == [3, 8, 3, 10]
    assert merge_width_of(100, 64) == 100


# On a GPU.

LONG = [
    Case(*SCHEMES["InnerQ Hybrid"], heads=8, blocks=(1000, 37), sink=(32, 5), recent=(96, 17)),
    Case(*SCHEMES["uniform 4/4"], heads=2, queries=4, blocks=(3000,), recent=(100,), dtype=torch.bfloat16),
    Case(*SCHEMES["KIVI"], heads=8, blocks=(260, 4, 131), sink=(32, 0, 9), recent=(96, 1, 64), group=128),
    Case(*SCHEMES["KIVI"], heads=8, blocks=(1000, 37), sink=(32, 32), recent=(96, 17), rotary=128),
    Case(*SCHEMES["KIVI"], heads=2, queries=4, blocks=(900,), recent=(100,), dtype=torch.bfloat16, rotary=64),
    Case(
        *SCHEMES["InnerQ Base"], heads=8, blocks=(300, 37), sink=(32, 32), recent=(96, 17), rotary=128, starts=(0, 9000)
    ),
    Case(*SCHEMES["uniform 4/4"], 256, ratio=16, blocks=(70,), sink=(32,), rotary=256),
]


def on_a_gpu(case: Case, fan: int = 0, launch: Any = None) -> tuple[Any, Any]:
    """(inputs, call of no arguments). fan: parts that are merged at first, if not as usual."""
    from kvcal_kernels.attention import triton as fused

    own, space = made(case).to("cuda"), fused.Workspace(torch.device("cuda"))
    warps, length = case.launch
    launch = launch or fused.Launch(warps, 3, length, merge_width=fan)
    return own, lambda: fused.attend(*own.arguments(), launch, space, **own.named())


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*small(), *LONG], ids=str)
def test_on_a_gpu(case: Case) -> None:
    own, call = on_a_gpu(case)
    found = call()
    assert wrong(own, found) is None
    assert torch.equal(call(), found)
    assert wrong(own, on_a_gpu(case, 2)[1]()) is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*carrying(), *LONG], ids=str)
def test_programs_of_packed_and_exact_tokens_on_a_gpu(case: Case) -> None:
    """And what caches launch."""
    own, call = on_a_gpu(case, launch=carried(case))
    found = call()
    assert wrong(own, found) is None
    assert torch.equal(call(), found)
    for launch in launches(case):
        assert wrong(own, on_a_gpu(case, launch=launch)[1]()) is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", INFINITE, ids=str)
@pytest.mark.parametrize("token", [0, 40])
def test_infinite_values_stay_where_they_are_on_a_gpu(case: Case, token: int) -> None:
    from kvcal_kernels.attention import triton as fused

    space = fused.Workspace(torch.device("cuda"))
    assert misplaced(lambda own: fused.attend(*own.arguments(), None, space), case, token, "cuda") is None


@pytest.mark.gpu
def test_queries_that_begin_at_an_odd_number_on_a_gpu() -> None:
    from kvcal_kernels.attention import triton as fused

    own, _ = on_a_gpu(LONG[0])
    space, wide = fused.Workspace(torch.device("cuda")), own.q.new_empty(own.q.numel() + 1)
    odd = replace(own, q=wide[1:].view_as(own.q).copy_(own.q))
    wanted, found = (fused.attend(*one.arguments(), None, space) for one in (own, odd))
    assert torch.equal(found, wanted)


@pytest.mark.gpu
def test_replayed_graph_equals_eager() -> None:
    own, call = on_a_gpu(LONG[0])
    eager = call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    own.blocks.sub_(1)  # counts lie on the device: the same graph serves another length
    graph.replay()
    assert torch.equal(found, call())
    own.blocks.add_(1)
    graph.replay()
    assert torch.equal(found, eager)
