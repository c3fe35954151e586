"""One step over blocks by 8-bit products."""

from __future__ import annotations

import triton
import triton.language as tl

from ..softmax import faded
from ..tiles import ends_with_half
from .block import block, block_constraints
from .emulated import emulated_added, emulated_scores, value_exponents
from .ptx import points_tensors
from .queries import (
    BLOCK_JUMP,
    BLOCK_SLACK,
    FULL_PROBABILITY,
    byte_tables,
    first_base,
    first_state,
    hidden_constants,
    slice_weight,
    spread_state,
)
from .values import constants


@triton.constexpr_function
def _changed(slices, k_mode):
    """Return the types of what `block` changes."""
    queries = (tl.int32,) * -(-slices // 4) + (tl.float32,) if k_mode == 2 else ()
    return (tl.float32,) * (1 + slices // 2) + queries


@triton.jit
def step(
    p_k, p_ks, p_v, p_vs, i_head, norms, first, start, stop, slot, places, queries, begins, fixed, plain, tables, p_kt,
    p_vt, unit, b_m, b_l, acc, capacity, KEYS: tl.constexpr, VALUES: tl.constexpr, SAME: tl.constexpr,
    SLICES: tl.constexpr, NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Attend to NW more blocks by 8-bit products (ptx.py). Under ASM b_m is its state; for keys in outer groups queries
    are its queries and their unit, which change, and begins its base.
    """
    if ASM:
        none = tl.zeros([NW, 16, N], tl.int32)
        changed = (b_m,) + acc
        inputs = (none + slot, places)
        if KEYS.outer:
            renew = (first == start) | (first % (KEYS.group // 32) == 0)
            changed = changed + queries
            inputs = inputs + (none + renew.to(tl.int32),) + fixed + plain + begins
        elif KEYS.points:
            inputs = inputs + queries + fixed
        else:
            inputs = inputs + queries + begins + fixed
        inputs = inputs + tables
        if NW > 1:
            inputs = inputs + (none + (first + tl.arange(0, NW) < stop).to(tl.int32)[:, None, None],)
        changed_to = tl.inline_asm_elementwise(
            block(SLICES, KEYS.codes, VALUES.codes, NW > 1, SAME),
            block_constraints(SLICES, KEYS.codes, VALUES.codes, NW > 1, SAME),
            inputs + changed, dtype=_changed(SLICES, KEYS.mode), is_pure=False, pack=4,
        )
        b_m = changed_to[0]
        acc = changed_to[1 : 1 + SLICES // 2]
        if KEYS.outer:
            queries = changed_to[1 + SLICES // 2 :]
    else:
        live = first + tl.arange(0, NW) < stop
        block_at = tl.minimum(first + tl.arange(0, NW), stop - 1)
        b_0, b_1 = emulated_scores(
            p_k, p_ks, i_head, norms[0], block_at, queries, unit, p_kt, capacity, KEYS, SLICES, NW, N
        )
        at_size = (norms[1] if VALUES.points else i_head) * capacity + block_at
        s_0 = value_exponents(p_vs, at_size, 0, VALUES, NW)
        s_1 = value_exponents(p_vs, at_size, 1, VALUES, NW)
        b_top = tl.max(tl.maximum(b_0 + s_0, b_1 + s_1), 1)[:, None, :]
        b_e = tl.ceil(b_top + tl.abs(b_top) * 2.0**-22) + tl.zeros([NW, 16, N], tl.float32)
        b_e = tl.where(live[:, None, None], b_e, float("-inf"))  # a warp without a block left adds nothing
        b_m = tl.maximum(b_m, b_e - BLOCK_JUMP)
        b_d = b_e - b_m
        fade = tl.where(b_d > -127, tl.exp2(b_d), 0.0)
        b_0 = tl.where(live[:, None, None], b_0 - b_e, 0.0)
        b_1 = tl.where(live[:, None, None], b_1 - b_e, 0.0)
        b_l += (tl.exp2(b_0) + tl.exp2(b_1)) * fade
        acc = emulated_added(
            p_v, p_vs, i_head, block_at, b_0, b_1, s_0, s_1, fade, acc, p_vt, capacity, VALUES, SLICES, NW, N
        )
        if tl.max(b_d) > BLOCK_SLACK:
            b_new = tl.maximum(b_m, b_e)
            fade = tl.exp2(b_m - b_new)
            b_m, b_l, acc = b_new, b_l * fade, faded(acc, fade)
    return b_m, b_l, acc, queries


@triton.jit
def state_of(
    p_kt, p_vt, unit, at, sums, capacity, KEYS: tl.constexpr, VALUES: tl.constexpr, SAME: tl.constexpr,
    SLICES: tl.constexpr, NW: tl.constexpr, N: tl.constexpr,
):
    """Return what `step` changes and reads, before the first block: its state, places, what products begin with (for
    outer groups the base), constants and tables of grids. at [NW]: where each warp's ring begins.
    """
    HALVES: tl.constexpr = ends_with_half(KEYS.words) or ends_with_half(VALUES.words)
    b_m, places = first_state(unit, at, KEYS, VALUES, SLICES * 16, HALVES, NW, N)
    if KEYS.outer:
        sums = (first_base(unit, NW, N),)
    fixed = hidden_constants(capacity, constants(SLICES, VALUES.tiles, VALUES.bits, VALUES.mode), NW, N)
    tables = byte_tables(p_kt, points_tensors(KEYS.mode, KEYS.group), NW, N)
    if not SAME:
        tables = tables + byte_tables(p_vt, points_tensors(VALUES.mode, VALUES.group), NW, N)
    return b_m, places, sums, fixed, tables


@triton.jit
def output_of(acc, b_m, b_l, VALUES: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr):
    """Return outputs in units of the values', two slices each in columns of either parity; maxima and sums [NW, N]."""
    if ASM:
        if VALUES.outer:
            shift = tl.sum(spread_state(b_m, (3, 3, -1, -1)), 1)
        b_l = spread_state(b_m, (1, 1, -1, -1))
        b_m = spread_state(b_m, (0, 0, 0, 0))
    b_m = tl.max(b_m, 1)
    b_l = tl.sum(b_l, 1)
    odd = tl.arange(0, N) % 2 == 1
    out = ()
    for i in tl.static_range(WIDE):
        of_odd = 1 / slice_weight(2 * i + 1, VALUES.bits, VALUES.mode)
        b_unit = tl.where(odd, of_odd, 1 / slice_weight(2 * i, VALUES.bits, VALUES.mode)) * (1 / FULL_PROBABILITY)
        # sums show what integers do not
        b_o = acc[i] * b_unit[None, None, :] + (b_l - b_l)[:, None, :]
        if VALUES.outer and ASM:
            b_o += shift[:, None, :]
        out = out + (b_o,)
    return out, b_m, b_l
