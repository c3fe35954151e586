"""Sink, window and new tokens put around the decoded ones in one launch, with keys rotated by RoPE."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ... import triton as shared
from ...attention.triton.numbers import cast
from ...triton import Ready, interpreted
from ..reference import Rotation


@triton.jit
def _exact(p_sink, p_window, p_new, token, channel, live, sink, window, s_token, D: tl.constexpr):
    """Load [tokens, channels] of a head's exact tokens: sink, then window, then new ones."""
    token, channel = token[:, None], channel[None, :]
    is_sink, is_new = token < sink, token >= sink + window
    x = tl.load(p_sink + token * D + channel, mask=live & is_sink, other=0.0)
    token_row = tl.load(
        p_window + (token - sink) * D + channel, mask=live & (token >= sink) & (token < sink + window), other=0.0
    )
    new = tl.load(p_new + (token - sink - window) * s_token + channel, mask=live & is_new, other=0.0)
    return tl.where(is_sink, x, tl.where(is_new, new, token_row))


@triton.jit(do_not_specialize=["sink", "window", "new", "behind"])
def place_kernel(
    p_key, p_value, p_sink_key, p_sink_value, p_window_key, p_window_value, p_new_key, p_new_value, p_cos, p_sin, sink,
    window, new, behind, s_row, s_head, s_key_row, s_key_head, s_key_token, s_value_row, s_value_head, s_value_token,
    s_rotation, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, BT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Place tokens with a grid (tiles of tokens, rows * heads, keys and values). s_row, s_head: of p_key and p_value.
    DP: a power of two >= D.
    """
    i_head = tl.program_id(1).to(tl.int64)
    row, head = i_head // H, i_head % H
    token, channel = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, DP)
    live = (token < sink + window + new)[:, None] & (channel < D)[None, :]
    slot = tl.where(token < sink, token, token - sink + behind)
    o_out = row * s_row + head * s_head + slot[:, None] * D + channel[None, :]
    o_sink, o_window = i_head * sink * D, i_head * window * D
    if tl.program_id(2) == 1:
        p_new = p_new_value + row * s_value_row + head * s_value_head
        x = _exact(
            p_sink_value + o_sink,
            p_window_value + o_window,
            p_new,
            token,
            channel,
            live,
            sink,
            window,
            s_value_token,
            D,
        )
        tl.store(p_value + o_out, x, mask=live)
    else:
        p_new = p_new_key + row * s_key_row + head * s_key_head
        x = _exact(
            p_sink_key + o_sink, p_window_key + o_window, p_new, token, channel, live, sink, window, s_key_token, D
        )
        if R > 0:
            TYPE: tl.constexpr = p_key.dtype.element_ty
            first = channel < R // 2
            pair = tl.where(first, channel + R // 2, tl.where(channel < R, channel - R // 2, channel))
            y = _exact(
                p_sink_key + o_sink, p_window_key + o_window, p_new, token, pair, live, sink, window, s_key_token, D
            )
            rotates = live & (token < sink + window)[:, None] & (channel < R)[None, :]
            o_rotation = row * s_rotation + token[:, None] * R + channel[None, :]
            cos = tl.load(p_cos + o_rotation, mask=rotates, other=1.0).to(tl.float32)
            sin = tl.load(p_sin + o_rotation, mask=rotates, other=0.0).to(tl.float32)
            a, b = x.to(tl.float32) * cos, y.to(tl.float32) * tl.where(first[None, :], -sin, sin)
            if p_cos.dtype.element_ty == TYPE:  # a model that computes in this dtype rounds both products
                a, b = cast(a, TYPE, ASM).to(tl.float32), cast(b, TYPE, ASM).to(tl.float32)
            x = tl.where(rotates, cast(a + b, TYPE, ASM), x)
        tl.store(p_key + o_out, x, mask=live)


PLACED = 32  # tokens of a program


def _check(
    whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], counts: Sequence[int], behind: int,
    rotation: Rotation | None,
) -> None:
    """Check shapes, dtypes, devices and strides: the kernel gets pointers."""
    keys, values = whole
    batch, heads, capacity, dim = keys.shape
    total = sum(counts)
    alike = keys.shape == values.shape and keys.stride() == values.stride() and keys.stride()[2:] == (dim, 1)
    ends = behind + total - counts[0]
    if not alike or ends > capacity or any(x.stride(3) != 1 for x in parts[2]):
        raise ValueError(
            f"place: {total} tokens up to slot {ends} of {tuple(keys.shape)} {keys.dtype}, strides {keys.stride()}"
        )
    for pair, count in zip(parts, counts, strict=True):
        for x in pair:
            if x.shape != (batch, heads, count, dim) or x.dtype != keys.dtype or x.device != keys.device:
                shape = f"{tuple(x.shape)} {x.dtype} on {x.device}"
                raise ValueError(f"place: {shape}; must be {(batch, heads, count, dim)} {keys.dtype} on {keys.device}")
    if rotation is not None and rotation.cos.shape[1] != counts[0] + counts[1]:
        raise ValueError(f"place: RoPE of {rotation.cos.shape[1]} tokens for {counts[0]} and {counts[1]}")


def place(
    whole: Sequence[Tensor],
    sink: Sequence[Tensor],
    window: Sequence[Tensor],
    new: Sequence[Tensor],
    behind: int,
    rotation: Rotation | None = None,
) -> None:
    """Do what `reference.place` does, in one launch and bit by bit. All tensors except for those of rotation have one
    dtype, float16 or bfloat16; whole: strides alike, tokens and channels of a head contiguous; new: channels
    contiguous.
    """
    keys = whole[0]
    batch, heads, _, dim = keys.shape
    counts = [parts[0].shape[2] for parts in (sink, window, new)]
    total = sum(counts)
    _check(whole, (sink, window, new), counts, behind, rotation)
    if not total or not batch:
        return
    cos, sin = (keys, keys) if rotation is None else (rotation.cos.contiguous(), rotation.sin.contiguous())
    rotary_dim = 0 if rotation is None else rotation.cos.shape[-1]
    grid = -(-total // PLACED), batch * heads, 2
    strides = (
        *keys.stride()[:2], *new[0].stride()[:3], *new[1].stride()[:3],
        cos.stride(0) if rotation is not None and len(cos) > 1 else 0,
    )
    kind = grid, strides, heads, dim, rotary_dim, keys.dtype, cos.dtype, keys.device
    if (ready := _PLACES.get(kind)) is None:
        constants = {"H": heads, "D": dim, "DP": triton.next_power_of_2(dim), "R": rotary_dim, "BT": PLACED}
        # with fused operations LLVM makes one product and the sum one of bfloat16
        constants |= {"ASM": not interpreted(), "enable_fp_fusion": False}
        ready = _PLACES[kind] = Ready(place_kernel, grid, constants)
    ready((*whole, *(x.contiguous() for x in (*sink, *window)), *new, cos, sin), *counts, behind, *strides)


_PLACES: shared.Prepared[Ready] = shared.Prepared()
