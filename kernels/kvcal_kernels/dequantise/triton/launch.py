"""Launches of the kernel over checked arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...triton import Ready, interpreted
from ..reference import Coded, Turn
from .kernel import reconstruct_kernel
from .prepare import MOST_INPUTS, Launch, Prepared, launch_for, settings


def reconstruct(
    coded: Coded,
    prepared: Prepared,
    inputs: Sequence[Tensor] = (),
    turn: Turn | None = None,
    out: Tensor | None = None,
    turned: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As reference.reconstruct, rounded to float16 or bfloat16: of `out` if given, else `dtype`.

    inputs, out, turned (B, H, T or more, D): one dtype, and tokens and channels of a head contiguous; inputs alike in
    strides. `out` and `turned` are written up to T and may be views of larger buffers, but not of an input.
    """
    batch, heads, tokens, dim = coded.codes.shape[0], coded.heads, coded.tokens, coded.dim
    shape = (batch, heads, tokens, dim)
    out = torch.empty(shape, dtype=dtype, device=coded.codes.device) if out is None else out
    if turn is not None and turned is None:
        turned = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
    _check(coded, prepared, inputs, turn, out, turned, shape)
    if launch is None:  # without products 128 hide more of the loads
        launch = launch_for(out.device) if inputs else Launch(128)
    rows = batch * tokens
    if rows + launch.tokens >= 1 << 31:
        raise ValueError(f"reconstruct: {batch} rows of {tokens} tokens; 2^31 tokens at most, in one call")
    if not rows:
        return out, turned
    x = [*inputs, *([inputs[0]] if inputs else [out]) * (MOST_INPUTS - len(inputs))]
    table = prepared.grid if turn is None else turn.table
    strides = (
        *coded.codes.stride()[:2], *coded.norm.stride()[:2], *x[0].stride()[:2], *out.stride()[:2],
        table.stride(0) if len(table) > 1 else 0,
    )
    kind = launch, rows, strides, out.dtype
    if (ready := prepared.launches.get(kind)) is None:
        grid = (prepared.matrix.shape[0] * -(-rows // launch.tokens),)
        fixed: dict[str, Any] = {
            "ASM": not interpreted(),
            "num_warps": launch.warps,
            "num_stages": launch.stages,
        }
        fixed |= settings(coded, prepared, len(inputs), rows, launch)
        ready = prepared.launches[kind] = Ready(reconstruct_kernel, grid, fixed)
    tensors = (
        out, out if turned is None else turned, coded.codes, coded.norm, prepared.grid, prepared.matrix,
        prepared.matrix if prepared.factors is None else prepared.factors,
        prepared.matrix if prepared.bias is None else prepared.bias,
        prepared.matrix if prepared.weight is None else prepared.weight, *x, table,
    )
    ready(tensors, rows, tokens, heads * dim // ready.options["BK"], *strides)
    return out, turned


def _check(
    coded: Coded,
    prepared: Prepared,
    inputs: Sequence[Tensor],
    turn: Turn | None,
    out: Tensor,
    turned: Tensor | None,
    shape: tuple[int, int, int, int],
) -> None:
    """What the kernel relies on and cannot see."""
    if out.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"reconstruct into {out.dtype}: must be float16 or bfloat16")
    features = 0 if prepared.weight is None else prepared.weight.shape[0] // prepared.weight.shape[1]
    if len(inputs) != features or (prepared.weight is not None and prepared.weight.dtype != out.dtype):
        raise ValueError(f"reconstruct of {len(inputs)} inputs in {out.dtype}: prepared for {features} in another way")
    if (turn is not None) != bool(prepared.turned) or (turn is not None and turn.cos.shape[-1] != prepared.turned):
        raise ValueError(f"reconstruct: prepared for RoPE of {prepared.turned} channels, got {turn and turn.cos.shape}")
    for name, each in [("out", out), ("turned", turned), *(("input", x) for x in inputs)]:
        if each is not None and not _fits(each, shape, out.dtype):
            layout = f"{tuple(each.shape)} {each.dtype}, strides {each.stride()}"
            raise ValueError(f"reconstruct, {name}: {layout}; must be {shape} {out.dtype}, heads contiguous")
    strides = inputs[0].stride() if inputs else ()
    if any(x.stride() != strides for x in inputs[1:]) or (turned is not None and turned.stride() != out.stride()):
        raise ValueError("reconstruct: inputs, and out and turned, must have the same strides")
    rows = coded.codes.stride()[2:], coded.norm.stride()[2:]
    inner = coded.codes.shape[-1]
    if rows != ((coded.codes.shape[3] * inner, inner, 1), (coded.block, 1)):
        raise ValueError(f"reconstruct: blocks of strides {rows}; blocks of a head must be contiguous")


def _fits(x: Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype) -> bool:
    batch, heads, tokens, dim = x.shape
    same = (batch, heads, dim) == (shape[0], shape[1], shape[3]) and x.dtype == dtype
    return same and tokens >= shape[2] and x.stride()[2:] == (dim, 1)
