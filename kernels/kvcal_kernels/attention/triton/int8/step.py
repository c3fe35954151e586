"""One step over blocks by products of 8-bit integers."""

from __future__ import annotations

import triton
import triton.language as tl

from ..softmax import _faded
from .block import block, block_constraints
from .emulated import _plain_added, _plain_scores, _value_sizes
from .queries import BLOCK_JUMP, BLOCK_SLACK


@triton.constexpr_function
def _changed(slices, k_mode):
    """Types of what `block` changes."""
    queries = (tl.int32,) * -(-slices // 4) + (tl.float32,) if k_mode == 2 else ()
    return (tl.float32,) * (1 + slices // 2) + queries


@triton.jit
def _byte_step(
    p_k, p_ks, p_v, p_vs, i_head, norms, first, start, stop, slot, places, queries, begins, fixed, plain, tables, p_kt, p_vt,
    unit, b_m, b_l, acc, room, KEYS: tl.constexpr, VALUES: tl.constexpr, SAME: tl.constexpr, SLICES: tl.constexpr,
    NW: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As `_step`, by products of bytes (ptx.py): under ASM b_m is its state, and of keys in outer groups queries
    are its queries and about, which change, begins its base.
    """
    if ASM:
        none = tl.zeros([NW, 16, N], tl.int32)
        changed = (b_m,) + acc
        given = (none + slot, places)
        if KEYS.outer:
            renew = (first == start) | (first % (KEYS.group // 32) == 0)
            changed = changed + queries
            given = given + (none + renew.to(tl.int32),) + fixed + plain + begins
        elif KEYS.points:
            given = given + queries + fixed
        else:
            given = given + queries + begins + fixed
        given = given + tables
        if NW > 1:
            given = given + (none + (first + tl.arange(0, NW) < stop).to(tl.int32)[:, None, None],)
        made = tl.inline_asm_elementwise(
            block(SLICES, KEYS.codes, VALUES.codes, NW > 1, SAME),
            block_constraints(SLICES, KEYS.codes, VALUES.codes, NW > 1, SAME),
            given + changed, dtype=_changed(SLICES, KEYS.mode), is_pure=False, pack=4,
        )  # fmt: skip
        b_m = made[0]
        acc = made[1 : 1 + SLICES // 2]
        if KEYS.outer:
            queries = made[1 + SLICES // 2 :]
    else:
        live = first + tl.arange(0, NW) < stop
        block_at = tl.minimum(first + tl.arange(0, NW), stop - 1)
        b_0, b_1 = _plain_scores(
            p_k, p_ks, i_head, norms[0], block_at, queries, unit, p_kt, room, KEYS, SLICES, NW, N
        )  # fmt: skip
        at_size = (norms[1] if VALUES.points else i_head) * room + block_at
        s_0 = _value_sizes(p_vs, at_size, 0, VALUES, NW)
        s_1 = _value_sizes(p_vs, at_size, 1, VALUES, NW)
        b_top = tl.max(tl.maximum(b_0 + s_0, b_1 + s_1), 1)[:, None, :]
        b_e = tl.ceil(b_top + tl.abs(b_top) * 2.0**-22) + tl.zeros([NW, 16, N], tl.float32)
        b_e = tl.where(live[:, None, None], b_e, float("-inf"))  # a warp without a block left adds nothing
        b_m = tl.maximum(b_m, b_e - BLOCK_JUMP)
        b_d = b_e - b_m
        fade = tl.where(b_d > -127, tl.exp2(b_d), 0.0)
        b_0 = tl.where(live[:, None, None], b_0 - b_e, 0.0)
        b_1 = tl.where(live[:, None, None], b_1 - b_e, 0.0)
        b_l += (tl.exp2(b_0) + tl.exp2(b_1)) * fade
        acc = _plain_added(
            p_v, p_vs, i_head, block_at, b_0, b_1, s_0, s_1, fade, acc, p_vt, room, VALUES, SLICES, NW, N
        )  # fmt: skip
        if tl.max(b_d) > BLOCK_SLACK:
            b_new = tl.maximum(b_m, b_e)
            fade = tl.exp2(b_m - b_new)
            b_m, b_l, acc = b_new, b_l * fade, _faded(acc, fade)
    return b_m, b_l, acc, queries
