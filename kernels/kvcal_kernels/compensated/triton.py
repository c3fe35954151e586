"""`corrected` of reference.py for NVIDIA GPUs: one launch for each step of channels, a block's error and what it moves
in registers.

Both factors of the product are integers of at most 25 bits, in three digits of 8 bits each: float16 tensor-core products of
digits add up to less than 2^24, which float32 holds exactly in any order, and float64 puts the digits' sums together.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import on
from .reference import Moves, _bits, refusal

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23
ROUND64 = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52
ROWS = 32  # tokens of a program, or one block


@triton.jit
def _error(
    x, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, TOP: tl.constexpr
):
    """What rounding adds to [BLOCKS * GROUPS * GROUP, CHANNELS], groups of tokens."""
    x = tl.reshape(x, [BLOCKS * GROUPS, GROUP, CHANNELS])
    low = tl.min(x, 1)
    scale = tl.div_rn(tl.max(x, 1) - low, tl.zeros_like(low) + TOP)
    scale = tl.minimum(tl.maximum(scale, 2.0**-24), 65504.0).to(tl.float16).to(tl.float32)[:, None, :]
    base = (low + 0.0).to(tl.float16).to(tl.float32)[:, None, :]
    codes = tl.div_rn(x - base, tl.broadcast_to(scale, [BLOCKS * GROUPS, GROUP, CHANNELS]))
    codes = (tl.minimum(tl.maximum(codes, 0.0), TOP) + ROUND) - ROUND
    return tl.reshape(codes * scale + base - x, [BLOCKS, GROUPS * GROUP, CHANNELS])


@triton.jit
def _unit(largest, BITS: tl.constexpr):
    """2^(exponent - BITS) of float32 numbers, their exponent that of frexp; float64."""
    bits = largest.to(tl.float64).to(tl.int64, bitcast=True)
    exponent = tl.where(largest > 0, (bits >> 52) - 1022, 0)
    return ((exponent - BITS + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _digits(x):
    """int32 -> three float16, -128 to 127, the last up to 2^9: x = d0 + 2^8 d1 + 2^16 d2."""
    low = ((x + 128) & 255) - 128
    x = (x - low) >> 8
    middle = ((x + 128) & 255) - 128
    return low.to(tl.float16), middle.to(tl.float16), ((x - middle) >> 8).to(tl.float16)


@triton.jit(do_not_specialize=["tokens", "batch_of_weights"])
def correct_kernel(
    p_x, p_out, p_weight, p_unit, tokens, plane, batch_stride, head_stride, token_stride, batch_of_weights,
    HEADS: tl.constexpr, DIM: tl.constexpr, START: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens / (BLOCK * BLOCKS), HEADS, batch). Rounds channels from START on; with START 0 `p_out` gets all
    channels, else it is `p_x` and those behind change. plane: numbers of a digit of all weights. batch_of_weights: 0 if
    all rows share them, else 1.
    """
    # heads of a prompt lie 2^31 numbers apart, and more
    i_kv, i_batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * (BLOCK * BLOCKS) + tl.arange(0, BLOCK * BLOCKS)
    live = (token < tokens)[:, None]
    p_from = p_x + i_batch * batch_stride + i_kv * head_stride + token.to(tl.int64)[:, None] * token_stride
    p_to = p_out + ((i_batch * HEADS + i_kv) * tokens + token)[:, None] * DIM
    channel = START + tl.arange(0, CHANNELS)[None, :]
    x = tl.load(p_from + channel, mask=live, other=0.0).to(tl.float32)
    if START == 0:
        tl.store(p_to + channel, x, mask=live)
    error = _error(x, BLOCKS, BLOCK // GROUP, GROUP, CHANNELS, TOP)
    size = _unit(tl.max(tl.max(tl.abs(error), 2), 1), BITS)
    whole = error.to(tl.float64) * (1.0 / size)[:, None, None] + ROUND64
    digits = _digits(tl.reshape(whole, [BLOCKS * BLOCK, CHANNELS]).to(tl.int64, bitcast=True).to(tl.int32))
    i_head = (i_batch * batch_of_weights) * HEADS + i_kv
    size = tl.broadcast_to((size * tl.load(p_unit + i_head))[:, None], [BLOCKS, BLOCK])
    size = tl.reshape(size, [BLOCKS * BLOCK, 1])
    REST: tl.constexpr = DIM - START - CHANNELS
    rows = tl.arange(0, CHANNELS)[:, None]
    for first in tl.static_range(0, REST, CHUNK):
        column = first + tl.arange(0, CHUNK)[None, :]
        o_weight = (i_head * CHANNELS + rows) * REST + column
        moved = tl.zeros([BLOCKS * BLOCK, CHUNK], tl.float64)
        for place in tl.static_range(5):
            b_sum = tl.zeros([BLOCKS * BLOCK, CHUNK], tl.float32)
            for i in tl.static_range(3):
                if (place - i >= 0) and (place - i < 3):
                    weight = tl.load(p_weight + (place - i) * plane + o_weight)
                    b_sum = tl.dot(digits[i], weight, b_sum)
            moved += b_sum.to(tl.float64) * 256.0**place
        behind = START + CHANNELS + column
        y = tl.load(p_from + behind, mask=live, other=0.0).to(tl.float32)
        tl.store(p_to + behind, (y.to(tl.float64) - moved * size).to(tl.float32), mask=live)


def corrected(x: Tensor, own: Moves, bits: int, group: int, block: int) -> Tensor:
    """As reference.corrected, for any strides but that of channels, which is 1. One launch for each of `own.weights`."""
    batch, heads, tokens, dim = x.shape
    if why := refusal(dim, own.channels, group, block):
        raise ValueError(why)
    if tokens % block:
        raise ValueError(f"{tokens} tokens: must be whole blocks of {block}")
    if x.stride(3) != 1 or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"keys of {x.dtype}, strides {x.stride()}: float16, bfloat16 or float32 with contiguous channels"
        )
    for i, (weight, unit) in enumerate(zip(own.weights, own.units, strict=True)):
        wanted = (heads, own.channels, dim - (i + 1) * own.channels)
        if tuple(weight.shape[1:]) != wanted or len(weight) not in (1, batch) or unit.shape != weight.shape[:2]:
            raise ValueError(
                f"step {i}: weight {tuple(weight.shape)}, units {tuple(unit.shape)}; must be (1 or {batch}, *{wanted})"
            )
    if not own.weights:
        return x.float().contiguous()
    out = torch.empty(batch, heads, tokens, dim, dtype=torch.float32, device=x.device)
    with on(x.device):
        for i, (weight, unit) in enumerate(zip(own.digits, own.units, strict=True)):
            given, fixed = out if i else x, settings(i, own.channels, heads, dim, bits, group, block)
            correct_kernel[(-(-tokens // (block * fixed["BLOCKS"])), heads, batch)](
                given, out, weight, unit, tokens, weight[0].numel(), *given.stride()[:3], int(len(unit) > 1),
                **fixed, num_warps=warps(block), num_stages=1, enable_fp_fusion=False,
            )  # fmt: skip
    return out


def settings(step: int, channels: int, heads: int, dim: int, bits: int, group: int, block: int) -> dict[str, Any]:
    """Compile-time constants of correct_kernel."""
    rest = dim - (step + 1) * channels
    chunk = min(64, rest & -rest)
    made: dict[str, Any] = {"HEADS": heads, "DIM": dim, "START": step * channels, "CHANNELS": channels, "CHUNK": chunk}
    made |= {"BLOCK": block, "BLOCKS": max(1, ROWS // block), "GROUP": group, "TOP": 2.0**bits - 1}
    return made | {"BITS": _bits(channels)}


def warps(block: int) -> int:
    """Of a program: 128 tokens with 4 warps would spill."""
    return 8 if block > 64 else 4
