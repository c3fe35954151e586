"""`select` of reference.py for NVIDIA GPUs: a program takes a block of one row, all its kv heads, and reads each key
once.

A channel's rank is the number of channels before it: D comparisons a channel, 4 a key at D = 128 and 32 tokens a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import on
from . import reference
from .reference import Tiers, refusal

STEPS = tl.constexpr(reference.STEPS)


@triton.jit(do_not_specialize=["blocks", "importance_batch", "importance_head", "importance_block"])
def select_kernel(
    p_x, p_importance, p_salience, p_perm, p_first, p_second, blocks, batch_stride, head_stride, token_stride,
    importance_batch, importance_head, importance_block, low, high,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr, FULL: tl.constexpr,
    FOUR: tl.constexpr, FIXED: tl.constexpr, MEDIAN: tl.constexpr, WEIGHED: tl.constexpr,
):
    """Select with a grid (blocks, batch)."""
    N: tl.constexpr = HEADS * DIM
    i_block, i_batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, N)
    head, channel = at // DIM, at % DIM
    p_row = p_x + i_batch * batch_stride + head.to(tl.int64) * head_stride + channel
    p_row += (i_block * BLOCK).to(tl.int64) * token_stride
    least = tl.load(p_row).to(tl.float32)
    most = least
    for t in range(1, BLOCK):
        x = tl.load(p_row + t * token_stride).to(tl.float32)
        least, most = tl.minimum(least, x), tl.maximum(most, x)
    salience = tl.div_rn(most - least, tl.zeros_like(least) + STEPS)
    if WEIGHED:
        o_importance = i_batch * importance_batch + head * importance_head + i_block * importance_block + channel
        salience = salience * tl.load(p_importance + o_importance)
    o_head = (i_batch * HEADS + head) * blocks + i_block
    tl.store(p_salience + o_head * DIM + channel, salience)
    unit = 1.0
    if MEDIAN:
        ordered = tl.sort(salience, 0)
        zeros = tl.sum((ordered <= 0).to(tl.int32), 0)
        middle = tl.minimum(zeros + tl.maximum(N - zeros - 1, 0) // 2, N - 1)
        unit = tl.sum(tl.where(at == middle, ordered, 0.0), 0)
    tl.debug_barrier()  # all saliences are there before a head's are read
    c = tl.arange(0, DIM)
    for h in range(HEADS):
        o_block = (i_batch * HEADS + h) * blocks + i_block
        head_salience = tl.load(p_salience + o_block * DIM + c)
        if FIXED:
            first, second = FULL, FULL + FOUR
        else:
            first = tl.sum((head_salience > high * unit).to(tl.int32), 0)
            second = tl.sum((head_salience > low * unit).to(tl.int32), 0)
            first = tl.minimum((first + ROUND - 1) // ROUND * ROUND, DIM)
            second = tl.maximum(tl.minimum((second + ROUND - 1) // ROUND * ROUND, DIM), first)
        # a NaN has a rank, too: places of `perm` are all written
        head_salience = tl.where(head_salience == head_salience, head_salience, float("inf"))
        larger = head_salience[:, None] > head_salience[None, :]
        before = (head_salience[:, None] == head_salience[None, :]) & (c[:, None] < c[None, :])
        rank = tl.sum((larger | before).to(tl.int32), 0)  # along registers: half the instructions of the other way
        tier = (rank >= first).to(tl.int32) + (rank >= second).to(tl.int32)
        place = tl.zeros_like(tier)
        for i in tl.static_range(3):
            begin = 0 if i == 0 else first if i == 1 else second
            mine = (tier == i).to(tl.int32)
            place += mine * (begin + tl.cumsum(mine, 0) - 1)
        tl.store(p_perm + o_block * DIM + place, c.to(tl.uint8))
        tl.store(p_first + o_block, first)
        tl.store(p_second + o_block, second)


def select(x: Tensor, importance: Tensor | None, how: Tiers, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `reference.select` does, for any strides except for that of channels, which is 1; kv heads and head_dim
    are powers of two.
    """
    batch, heads, tokens, dim = x.shape
    if why := refusal(heads, dim):
        raise ValueError(why)
    if x.stride(3) != 1 or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"keys of {x.dtype}, strides {x.stride()}: float16, bfloat16 or float32 with contiguous channels"
        )
    if tokens % block:
        raise ValueError(f"{tokens} tokens: must be whole blocks of {block}")
    blocks, strides = tokens // block, (0, 0, 0)
    if importance is not None:
        shapes = [(batch, heads, count, dim) for count in (1, blocks)]
        if tuple(importance.shape) not in shapes or importance.dtype != torch.float32 or importance.stride(3) != 1:
            raise ValueError(
                f"importance {tuple(importance.shape)} {importance.dtype}: must be {shapes[0]} or {shapes[1]} float32"
            )
        salience_strides = importance.stride()
        strides = (salience_strides[0], salience_strides[1], salience_strides[2] if importance.shape[2] > 1 else 0)
    salience = torch.empty(batch, heads, blocks, dim, device=x.device, dtype=torch.float32)
    perm = torch.empty(batch, heads, blocks, dim, dtype=torch.uint8, device=x.device)
    first, second = (torch.empty(batch, heads, blocks, dtype=torch.int32, device=x.device) for _ in range(2))
    with on(x.device):
        select_kernel[(blocks, batch)](
            x, salience if importance is None else importance, salience, perm, first, second, blocks, *x.stride()[:3],
            *strides, how.low, how.high, HEADS=heads, DIM=dim, BLOCK=block, ROUND=how.round_up, FULL=how.full or 0,
            FOUR=how.four or 0, FIXED=how.full is not None, MEDIAN=how.median and how.full is None,
            WEIGHED=importance is not None, num_warps=4, num_stages=1, enable_fp_fusion=False,
        )
    return perm, first, second
