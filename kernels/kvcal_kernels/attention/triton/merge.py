"""How programs split the blocks, and how the last ones to arrive merge the results of the others."""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton import rounded_product
from .numbers import LOW, cast
from .rotation import value_channels


@triton.constexpr_function
def _at_a_time(count, columns):
    """Return how many slices of outputs warps add up together. Each time costs three barriers, and shared memory as
    large as the slices are.
    """
    most = 32 // columns
    return 4 if most >= 4 and count % 4 == 0 else 2 if most >= 2 and count % 2 == 0 else 1


@triton.jit
def _numbers(COUNT: tl.constexpr):
    """Return where the tensors of `_joined` lie in it: [1, 1, inner, outer]."""
    inner = tl.arange(0, min(COUNT, 2))[None, None, :, None]
    return inner + 2 * tl.arange(0, max(COUNT // 2, 1))[None, None, None, :]


@triton.jit
def _joined(x, FIRST: tl.constexpr, COUNT: tl.constexpr, factor):
    """Join COUNT (1, 2 or 4) tensors of a tuple, times factor: [NW, 16, N, inner, outer]."""
    if COUNT == 1:
        joined = (x[FIRST] * factor)[:, :, :, None, None]
    else:
        joined = tl.join(x[FIRST] * factor, x[FIRST + 1] * factor)
        if COUNT == 2:
            joined = joined[:, :, :, :, None]
        else:
            joined = tl.join(joined, tl.join(x[FIRST + 2] * factor, x[FIRST + 3] * factor))
    return joined


@triton.constexpr_function
def _log2(count):
    return count.bit_length() - 1


@triton.jit
def over_warps(x, NW: tl.constexpr):
    """Return the sum over the first of five dimensions, the program's warps: numbers go to threads that have them of
    two warps. `tl.sum` would write them 64 bytes apart, into two banks of shared memory, which takes 8 to 16 times as
    long.
    """
    if NW > 1:
        x = tl.permute(x, (1, 2, 3, 4, 0))
        for i in tl.static_range(1, _log2(NW)):
            low, high = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], x.shape[3], NW >> i, 2]))
            x = low + high
        low, high = tl.split(x)
        total = low + high
    else:
        total = tl.sum(x, 0)
    return total


@triton.jit
def blocks_of_split(
    i_split, blocks, packed_splits, tail_start, tail_cost, tail_total, NW: tl.constexpr, LONG: tl.constexpr
):
    """Return a split's first block and the one behind its last."""
    each = tl.cdiv(floor_divide(blocks + tail_total + packed_splits - 1, packed_splits, LONG), NW) * NW
    cut = tl.minimum(tail_cost, each)
    stop = tl.minimum((i_split + 1) * each - tl.maximum(i_split + 1 - tail_start, 0) * cut, blocks)
    start = tl.minimum(i_split * each - tl.maximum(i_split - tail_start, 0) * cut, stop)
    return start, stop


@triton.jit
def floor_divide(a, b, LONG: tl.constexpr = False):
    """Return a // b, exactly: with LONG for any a, else for those below SHORT, in 9 instructions instead of 25, of
    which 4 wait for a.
    """
    if LONG:
        out = a // b
    else:
        out = ((a.to(tl.float32) + 0.5) * (1.0 / b.to(tl.float32))).to(tl.int32)
    return out


@triton.jit
def merge_splits(
    p_out, p_partial, p_stat, p_count, i_head, i_group, i_chunk, i_split, splits, merge_width, merges,
    RATIO: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr,
    AT_ONCE: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr, p_starts=None,
    HEADS: tl.constexpr = 0,
):
    """Merge the results of a group in the last programs to arrive. Counters of a group: of its merges, and of the
    splits of each; they are left at zero. With HEADS, kv heads, outputs lie token after token, those of a row from
    p_starts[row] on, and a row has QUERIES of them at most.
    """
    i_merge = floor_divide(i_split, merge_width)
    p_arrived = p_count + i_group * (merges + 1)
    p_merge = p_arrived + 1 + i_merge
    first = i_merge * merge_width
    count = tl.minimum(merge_width, splits - first)
    first += i_group * splits
    row, column = tl.arange(0, ROWS), tl.arange(0, triton.next_power_of_2(D))
    n = i_chunk * N + row
    live = n < RATIO * QUERIES
    inside = live[:, None] & (column < D)[None, :]
    if tl.atomic_add(p_merge, 1, sem="acq_rel") == count - 1:
        tl.store(p_merge, 0)
        b_m, b_l, b_o = _merged_splits(p_partial, p_stat, first, 1, count, D, ROWS, AT_ONCE, N, ASM)
        last = merges == 1
        if merges > 1:
            tl.debug_barrier()  # what is written over has been read
            tl.store(p_partial + (first * N + row)[:, None] * D + column[None, :], b_o, mask=inside)
            tl.store(p_stat + first * 2 * N + row, b_m, mask=live)
            tl.store(p_stat + first * 2 * N + N + row, b_l, mask=live)
            tl.debug_barrier()
            last = tl.atomic_add(p_arrived, 1, sem="acq_rel") == merges - 1
            if last:
                tl.store(p_arrived, 0)
                b_m, b_l, b_o = _merged_splits(
                    p_partial, p_stat, i_group * splits, merge_width, merges, D, ROWS, AT_ONCE, N, ASM
                )
        if last:
            b_o = b_o / tl.where(b_l > 0, b_l, 1.0)[:, None]
            # not as the query's offsets are computed, which then would be kept, in memory, since the start
            if HEADS > 0:
                p_row = p_starts + i_head // HEADS
                start = tl.load(p_row)
                inside = inside & (n < (tl.load(p_row + 1) - start) * RATIO)[:, None]
                o_out = n // RATIO * (HEADS * RATIO) + n % RATIO
                o_out = o_out[:, None] * D + column[None, :]
                p_out += (start.to(tl.int64) * HEADS + i_head % HEADS) * (RATIO * D)
            else:
                o_out = (n % RATIO * QUERIES + n // RATIO)[:, None] * D + column[None, :]
                p_out += i_head * (RATIO * QUERIES * D)
            tl.store(p_out + o_out, cast(b_o, p_out.dtype.element_ty, ASM), mask=inside)


@triton.jit
def _merged_splits(
    p_partial, p_stat, first, stride, count,
    D: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """Return maxima and sums [ROWS] and outputs [ROWS, D] of `count` splits, each `stride` behind the one before. Rows
    that no query has hold what lies in memory. Splits behind the last are copies of it that share its weight: a mask
    would be an instruction for each number, and a weight of zero would be NaN where its output is infinite.
    """
    WIDE: tl.constexpr = triton.next_power_of_2(D)
    row, number = tl.arange(0, ROWS), tl.arange(0, ROWS * WIDE)
    column = number % WIDE
    b_m = tl.full([ROWS], LOW, tl.float32)
    b_l = tl.zeros([ROWS], tl.float32)
    b_o = tl.zeros([ROWS, WIDE], tl.float32)
    for begin in tl.range(0, count, AT_ONCE):
        i = begin + tl.arange(0, AT_ONCE)
        split = first + tl.minimum(i, count - 1) * stride
        o_stat = split[:, None] * 2 * N + row[None, :]
        m = tl.load(p_stat + o_stat, cache_modifier=".cg")
        l = tl.load(p_stat + o_stat + N, cache_modifier=".cg")
        o_split = split[:, None] * (N * D) + (number // WIDE * D + column)[None, :]
        if WIDE > D:
            o = tl.load(
                p_partial + o_split, mask=(column < D)[None, :] & (o_split >= 0), other=0.0, cache_modifier=".cg"
            )
        else:
            o = tl.load(p_partial + o_split, cache_modifier=".cg")
        # rows and channels as one while they are read: lanes left over by 64 channels then take another row, not
        # another part, with which both would hold, and write, the same sum
        o = tl.reshape(o, [AT_ONCE, ROWS, WIDE])
        b_new = tl.maximum(b_m, tl.max(m, 0))
        copies = tl.maximum(begin + AT_ONCE - count + 1, 1).to(tl.float32)
        weight = tl.exp2(m - b_new[None, :]) * tl.where(i < count - 1, 1.0, 1.0 / copies)[:, None]
        fade = tl.exp2(b_m - b_new)
        b_l = b_l * fade + tl.sum(rounded_product(l, weight, ASM), 0)
        b_o = b_o * fade[:, None] + tl.sum(o * weight[:, :, None], 0)
        b_m = b_new
    return b_m, b_l, b_o


@triton.jit
def store_split(
    p_partial, p_stat, out, b_m, b_l, i_split, b_row, is_exact, VALUES: tl.constexpr, WIDE: tl.constexpr,
    PAIRED: tl.constexpr, LAID: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr, NW: tl.constexpr, N: tl.constexpr,
):
    """Merge the program's warps into one, then store outputs and statistics of split i_split. LAID: how channels lie in
    outputs of packed tokens, of `value_channels`; is_exact: whether the split is of exact tokens alone.
    """
    ROWS: tl.constexpr = N // EACH
    r, column = tl.arange(0, 16), tl.arange(0, N)
    b_top = tl.max(b_m, 0)
    fade = tl.exp2(b_m - b_top[None, :])
    o_split = i_split * ROWS + column // EACH
    TOGETHER: tl.constexpr = _at_a_time(WIDE, N)
    for i in tl.static_range(0, WIDE, TOGETHER):
        which = i + _numbers(TOGETHER)
        b_o = over_warps(_joined(out, i, TOGETHER, fade[:, None, :]), NW)
        channel = value_channels(
            which, r[:, None, None, None], column[None, :, None, None] % EACH, PAIRED, VALUES.quads
        )
        if LAID != PAIRED:  # exact tokens' outputs are never rotated, and have programs of their own
            packed = value_channels(
                which, r[:, None, None, None], column[None, :, None, None] % EACH, LAID, VALUES.quads
            )
            channel = tl.where(is_exact, channel, packed)
        tl.store(p_partial + o_split[None, :, None, None] * D + channel, b_o, mask=b_row[None, :, None, None])
    o_stat = i_split * 2 * ROWS + column // EACH
    tl.store(p_stat + o_stat, b_top, mask=b_row)
    tl.store(p_stat + o_stat + ROWS, tl.sum(b_l * fade, 0), mask=b_row)
