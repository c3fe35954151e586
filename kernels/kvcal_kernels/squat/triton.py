"""`corrected` and `due` of reference.py for NVIDIA GPUs: one launch for each step of channels, a block's error and what
it moves in registers.

Both factors of the product are integers of at most 25 bits, in three digits of 8 bits each: float16 tensor-core
products of digits add up to less than 2^24, which float32 holds exactly in any order, and float64 puts the digits' sums
together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import on
from ..layout import launch_key
from ..triton import Prepared, Ready
from .reference import Digits, Moves, check_due, factor_bits, refusal
from .reference import due as due_by_torch

if TYPE_CHECKING:
    from ..quantise import Counts

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23
ROUND64 = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52
ROWS = 32  # tokens of a program, or one block


@triton.jit
def _error(
    x, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, TOP: tl.constexpr
):
    """Return the error of rounding [BLOCKS * GROUPS * GROUP, CHANNELS] in groups of tokens."""
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
    """Return 2^(exponent - BITS) of float32 numbers, with frexp's exponent; float64."""
    bits = largest.to(tl.float64).to(tl.int64, bitcast=True)
    exponent = tl.where(largest > 0, (bits >> 52) - 1022, 0)
    return ((exponent - BITS + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _digits(x):
    """Return three float16 of int32 x, -128 to 127, the last up to 2^9: x = d0 + 2^8 d1 + 2^16 d2."""
    low = ((x + 128) & 255) - 128
    x = (x - low) >> 8
    middle = ((x + 128) & 255) - 128
    return low.to(tl.float16), middle.to(tl.float16), ((x - middle) >> 8).to(tl.float16)


@triton.jit
def _step(
    p_from, p_to, p_weight, p_unit, i_head, live, plane,
    DIM: tl.constexpr, START: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr,
):
    """Round channels from START on of the keys at p_from, and store at p_to those that change, with START 0 all;
    pointers [BLOCK * BLOCKS, 1] of channel 0. i_head: of the weights.
    """
    channel = START + tl.arange(0, CHANNELS)[None, :]
    x = tl.load(p_from + channel, mask=live, other=0.0).to(tl.float32)
    if START == 0:
        tl.store(p_to + channel, x, mask=live)
    error = _error(x, BLOCKS, BLOCK // GROUP, GROUP, CHANNELS, TOP)
    size = _unit(tl.max(tl.max(tl.abs(error), 2), 1), BITS)
    whole = error.to(tl.float64) * (1.0 / size)[:, None, None] + ROUND64
    digits = _digits(tl.reshape(whole, [BLOCKS * BLOCK, CHANNELS]).to(tl.int64, bitcast=True).to(tl.int32))
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


@triton.jit(do_not_specialize=["tokens", "batch_of_weights"])
def correct_kernel(
    p_x, p_out, p_weight, p_unit, tokens, plane, batch_stride, head_stride, token_stride, batch_of_weights,
    HEADS: tl.constexpr, DIM: tl.constexpr, START: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr,
):
    """Round channels from START on with a grid (tokens / (BLOCK * BLOCKS), HEADS, batch). With START 0 `p_out` gets all
    channels, else it is `p_x` and those behind change. plane: numbers of a digit of all weights. batch_of_weights: 0 if
    all rows share them, else 1.
    """
    # heads of a prompt lie 2^31 numbers apart, and more
    i_kv, i_batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * (BLOCK * BLOCKS) + tl.arange(0, BLOCK * BLOCKS)
    live = (token < tokens)[:, None]
    p_from = p_x + i_batch * batch_stride + i_kv * head_stride + token.to(tl.int64)[:, None] * token_stride
    p_to = p_out + ((i_batch * HEADS + i_kv) * tokens + token)[:, None] * DIM
    i_head = (i_batch * batch_of_weights) * HEADS + i_kv
    _step(
        p_from, p_to, p_weight, p_unit, i_head, live, plane, DIM, START, CHANNELS, CHUNK, BLOCK, BLOCKS, GROUP, TOP,
        BITS,
    )


@triton.jit(do_not_specialize=["batch", "queries", "batch_of_weights"])
def due_kernel(
    p_new, p_ring, p_out, p_weight, p_unit, p_counts, batch, queries, plane, ring_capacity, batch_stride, head_stride,
    token_stride, batch_of_weights,
    HEADS: tl.constexpr, DIM: tl.constexpr, START: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr,
):
    """Round the block that a row packs now as correct_kernel does, with a grid (HEADS, batch). With START 0 keys come
    from the ring or are new, else from p_out. BLOCKS: 1.
    """
    i_kv, i_batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    p_row = p_counts + i_batch
    before = tl.load(p_row + 2 * batch)
    if tl.load(p_row + 7 * batch) > before:
        token = tl.arange(0, BLOCK)
        live = tl.full([BLOCK, 1], True, tl.int1)
        p_to = p_out + ((i_batch * HEADS + i_kv) * BLOCK + token)[:, None] * DIM
        i_head = (i_batch * batch_of_weights) * HEADS + i_kv
        if START == 0:
            window = tl.load(p_row + batch)
            pads = queries - tl.load(p_row + 3 * batch) + tl.load(p_row + 4 * batch) - tl.load(p_row)
            slot = (before * 32 % ring_capacity + token) % ring_capacity
            p_old = p_ring + ((i_batch * HEADS + i_kv) * ring_capacity + slot)[:, None] * DIM
            new = (pads + token - window).to(tl.int64) * token_stride
            p_fresh = p_new + i_batch * batch_stride + i_kv * head_stride + new[:, None]
            p_from = tl.where((token < window)[:, None], p_old, p_fresh)
            _step(
                p_from, p_to, p_weight, p_unit, i_head, live, plane, DIM, START, CHANNELS, CHUNK, BLOCK, BLOCKS, GROUP,
                TOP, BITS,
            )
        else:
            _step(
                p_to, p_to, p_weight, p_unit, i_head, live, plane, DIM, START, CHANNELS, CHUNK, BLOCK, BLOCKS, GROUP,
                TOP, BITS,
            )


def corrected(x: Tensor, moves: Moves | Digits, bits: int, group: int, block: int) -> Tensor:
    """Do what `reference.corrected` does, for any strides except for that of channels, which is 1. There is one launch
    for each of `moves.digits`.
    """
    batch, heads, tokens, dim = x.shape
    _check(x, moves, group, block)
    if tokens % block:
        raise ValueError(f"{tokens} tokens: must be whole blocks of {block}")
    if not moves.units:
        return x.float().contiguous()
    out = torch.empty(batch, heads, tokens, dim, dtype=torch.float32, device=x.device)
    with on(x.device):
        for i, (weight, unit) in enumerate(zip(moves.digits, moves.units, strict=True)):
            source, fixed = out if i else x, settings(i, moves.channels, heads, dim, bits, group, block)
            correct_kernel[(-(-tokens // (block * fixed["BLOCKS"])), heads, batch)](
                source, out, weight, unit, tokens, weight[0].numel(), *source.stride()[:3], int(len(unit) > 1),
                **fixed, num_warps=warps(block), num_stages=1, enable_fp_fusion=False,
            )
    return out


def due(
    ring: Tensor, counts: Counts, new: Tensor, moves: Moves | Digits, bits: int, group: int, out: Tensor | None = None
) -> Tensor:
    """Do what `reference.due` does, in one launch for each of `moves.digits`, which ends at once in rows of which no
    block is due.
    """
    batch, heads, queries, dim = new.shape
    block = counts.windows.block
    _check(new, moves, group, block)
    check_due(ring, counts, new)
    if not ring.is_contiguous():
        raise ValueError(f"ring: strides {ring.stride()} of {tuple(ring.shape)}; must be contiguous")
    if out is None:
        out = torch.empty(batch, heads, block, dim, dtype=torch.float32, device=new.device)
    if not moves.units:
        return due_by_torch(ring, counts, new, moves, bits, group, out)
    tensors = [ring, counts.data, out]
    for i, (weight, unit) in enumerate(zip(moves.digits, moves.units, strict=True)):
        name = (i, bits, group, counts.windows, *map(launch_key, (new, *tensors, weight, unit)))
        if name not in _PREPARED:
            fixed = settings(i, moves.channels, heads, dim, bits, group, block) | {"BLOCKS": 1}
            numbers = (
                batch, queries, weight[0].numel(), ring.shape[2], *new.stride()[:3], int(len(unit) > 1),
            )
            options = fixed | {"num_warps": warps(block), "num_stages": 1, "enable_fp_fusion": False}
            _PREPARED[name] = Ready(due_kernel, (heads, batch), options), numbers
        ready, numbers = _PREPARED[name]
        ready((new, ring, out, weight, unit, counts.data), *numbers)
    return out


_PREPARED: Prepared[tuple[Ready, tuple[int, ...]]] = Prepared()


def _check(x: Tensor, moves: Moves | Digits, group: int, block: int) -> None:
    """Check shapes, dtypes and strides: the kernels get pointers."""
    batch, heads, _, dim = x.shape
    if why := refusal(dim, moves.channels, group, block):
        raise ValueError(why)
    if x.stride(3) != 1 or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"keys of {x.dtype}, strides {x.stride()}: float16, bfloat16 or float32 with contiguous channels"
        )
    for i, (weight, unit) in enumerate(zip(moves.digits, moves.units, strict=True)):
        shape = (heads, moves.channels, dim - (i + 1) * moves.channels)
        if tuple(weight.shape[2:]) != shape or weight.shape[1] not in (1, batch) or unit.shape != weight.shape[1:3]:
            raise ValueError(

                f"step {i}: weight {tuple(weight.shape[1:])}, units {tuple(unit.shape)}; must be (1 or {batch}, "
                f"*{shape})",
            )


def settings(
    step: int, channels: int, heads: int, dim: int, bits: int, group: int, block: int
) -> dict[str, int | float]:
    """Return the compile-time constants of correct_kernel."""
    rest = dim - (step + 1) * channels
    chunk = min(64, rest & -rest)
    return {
        "HEADS": heads,
        "DIM": dim,
        "START": step * channels,
        "CHANNELS": channels,
        "CHUNK": chunk,
        "BLOCK": block,
        "BLOCKS": max(1, ROWS // block),
        "GROUP": group,
        "TOP": 2.0**bits - 1,
        "BITS": factor_bits(channels),
    }


def warps(block: int) -> int:
    """Return the warps of a program: 128 tokens with 4 warps would spill."""
    return 8 if block > 64 else 4
