"""Launches of the kernel over checked arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...triton import Ready, interpreted
from ..reference import Coded, Rotation
from .kernel import dequantise_kernel
from .prepare import MOST_INPUTS, Launch, Prepared, depth_of, launch_for, settings


def dequantise(
    coded: Coded,
    prepared: Prepared,
    inputs: Sequence[Tensor] = (),
    rotation: Rotation | None = None,
    out: Tensor | None = None,
    rotated: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Do what `reference.dequantise` does, rounded to float16 or bfloat16: of `out` if given, else `dtype`.

    inputs, out, rotated (B, H, T or more, D): one dtype, and tokens and channels of a head contiguous; inputs alike in
    strides. `out` and `rotated` are written up to T and may be views of larger buffers, but not of an input.
    """
    batch, heads, tokens, dim = coded.codes.shape[0], coded.heads, coded.tokens, coded.dim
    shape = (batch, heads, tokens, dim)
    out = torch.empty(shape, dtype=dtype, device=coded.codes.device) if out is None else out
    if rotation is not None and rotated is None:
        rotated = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
    _check(coded, prepared, inputs, rotation, out, rotated, shape)
    if launch is None:  # without products 128 hide more of the loads
        launch = launch_for(out.device) if inputs else Launch(128)
    rows = batch * tokens
    if rows + launch.tokens >= 1 << 31:
        raise ValueError(f"dequantise: {batch} rows of {tokens} tokens; 2^31 tokens at most, in one call")
    if not rows:
        return out, rotated
    x = [*inputs, *([inputs[0]] if inputs else [out]) * (MOST_INPUTS - len(inputs))]
    table = prepared.grid if rotation is None else rotation.table
    strides = (
        *coded.codes.stride()[:2],
        *coded.norm.stride()[:2],
        *x[0].stride()[:2],
        *out.stride()[:2],
        table.stride(0) if len(table) > 1 else 0,
    )
    kind = launch, rows, strides, out.dtype
    if (ready := prepared.launches.get(kind)) is None:
        grid = (prepared.matrix.shape[0] * -(-rows // launch.tokens),)
        constants = settings(coded, prepared, len(inputs), rows, launch)
        constants |= {"ASM": not interpreted(), "num_warps": launch.warps, "num_stages": launch.stages}
        ready = prepared.launches[kind] = Ready(dequantise_kernel, grid, constants)
    tensors = (
        out,
        out if rotated is None else rotated,
        coded.codes,
        coded.norm,
        prepared.grid,
        prepared.matrix,
        prepared.matrix if prepared.factors is None else prepared.factors,
        prepared.matrix if prepared.bias is None else prepared.bias,
        prepared.matrix if prepared.weight is None else prepared.weight,
        *x,
        table,
    )
    ready(tensors, rows, tokens, heads * dim // depth_of(coded, launch), *strides)
    return out, rotated


def _check(
    coded: Coded,
    prepared: Prepared,
    inputs: Sequence[Tensor],
    rotation: Rotation | None,
    out: Tensor,
    rotated: Tensor | None,
    shape: tuple[int, int, int, int],
) -> None:
    """Check shapes, dtypes and strides: the kernel gets pointers."""
    if out.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"dequantise into {out.dtype}: must be float16 or bfloat16")
    features = 0 if prepared.weight is None else prepared.weight.shape[0] // prepared.weight.shape[1]
    if len(inputs) != features or (prepared.weight is not None and prepared.weight.dtype != out.dtype):
        raise ValueError(f"dequantise of {len(inputs)} inputs in {out.dtype}: prepared for {features} in another way")
    rotary_dim = 0 if rotation is None else rotation.cos.shape[-1]
    if rotary_dim != prepared.rotary_dim:
        raise ValueError(
            f"dequantise: RoPE of {rotary_dim} channels, prepared for RoPE of {prepared.rotary_dim} channels; prepare "
            "the layer for the same rotation"
        )
    for name, each in [("out", out), ("rotated", rotated), *(("input", x) for x in inputs)]:
        if each is not None and not _fits(each, shape, out.dtype):
            layout = f"{tuple(each.shape)} {each.dtype}, strides {each.stride()}"
            raise ValueError(f"dequantise, {name}: {layout}; must be {shape} {out.dtype}, heads contiguous")
    strides = inputs[0].stride() if inputs else ()
    if any(x.stride() != strides for x in inputs[1:]) or (rotated is not None and rotated.stride() != out.stride()):
        raise ValueError("dequantise: inputs, and out and rotated, must have the same strides")
    rows = coded.codes.stride()[2:], coded.norm.stride()[2:]
    inner = coded.codes.shape[-1]
    if rows != ((coded.codes.shape[3] * inner, inner, 1), (coded.block, 1)):
        raise ValueError(f"dequantise: blocks of strides {rows}; blocks of a head must be contiguous")


def _fits(x: Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype) -> bool:
    batch, heads, tokens, dim = x.shape
    same = (batch, heads, dim) == (shape[0], shape[1], shape[3]) and x.dtype == dtype
    return same and tokens >= shape[2] and x.stride()[2:] == (dim, 1)
