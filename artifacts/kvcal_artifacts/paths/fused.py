"""Decode attention straight from packed blocks: which layers take it and why others do not, and the attention itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcal_kernels import quantise
from kvcal_kernels.attention import fast, reference, transform
from kvcal_kernels.layout import BLOCK, Blocks, Form, Rope, TransformBlocks, TransformForm, rope
from kvcal_kernels.quantise import AnyRule

from ..scheme import LayerCodecs

QUERIES = 16  # new tokens a call, at most
Exact = tuple[Tensor, Tensor, Tensor]  # keys, values (B, H, room, D), tokens of each row (B,) int32


def attention(
    kernels: str,
    q: Tensor,
    keys: Blocks | TransformBlocks,
    values: Blocks | TransformBlocks,
    blocks: Tensor,
    sink: Exact,
    recent: Exact,
    scaling: float,
    factor: Tensor | None,
    workspace: Any,
    ring: bool = False,
    turns: Rope | None = None,
) -> Tensor:
    """As attention.reference.attend; factor: what packed keys were divided by, (H, 1, D) or (B, H, 1, D). turns: of keys
    before RoPE.
    """
    packed_q, arguments = queries_for(q, factor), (q, keys, values, blocks, sink, recent, scaling)
    if kernels == "torch":
        return reference.attend(*arguments, packed_q, ring, turns)
    if isinstance(keys, TransformBlocks):
        by_basis: Tensor = transform().attend(*arguments, None, workspace, ring)
        return by_basis
    out: Tensor = fast().attend(*arguments, None, workspace, packed_q, ring, turns)
    return out


def workspace(kernels: str, device: torch.device) -> Any:
    """Memory for the kernel's launches on a device; None where it needs none."""
    return None if kernels == "torch" else fast().Workspace(device)


def reserve(
    kernels: str,
    space: Any,
    keys: Form | TransformForm,
    values: Form | TransformForm,
    batch: int,
    heads: int,
    ratio: int,
    room: int,
    windows: tuple[int, int],
    rotary: int = 0,
) -> None:
    """Have the memory of any step over `room` blocks before a graph of one is recorded: it must not move. rotary: channels
    that the kernel turns by RoPE.
    """
    if kernels == "torch":
        return
    for queries in range(1, QUERIES + 1):
        if isinstance(keys, TransformForm):
            transform().reserve(space, keys, values, batch, heads, ratio, room, windows, queries)
        else:
            fast().reserve(space, keys, values, batch, heads, ratio, room, windows, queries, rotary // (2 * rope.PIECE))


def quantise_by(
    rules: tuple[AnyRule, AnyRule], x: list[Tensor], factor: Tensor | None
) -> tuple[tuple[Blocks, Blocks], Tensor]:
    """Keys and values (B, H, T, D) of whole blocks, packed in one launch; and flags of quantise.check."""
    keys, values, flags = quantise.fast().quantise(*x, *rules, None if factor is None else factor.contiguous())
    return (keys, values), flags


def refused_by(flags: Tensor, layer: int) -> str:
    return f"{quantise.check(flags, layer)}; only finite values can be compressed: check the model's dtype and weights"


def steps_by(kernels: str) -> Any:
    """What moves counts and appends tokens of a step: the Triton kernels of quantise."""
    return quantise.fast() if kernels != "torch" else None


def kernel_blocks(pair: LayerCodecs) -> int:
    """Blocks of the kernel in one of the scheme."""
    return pair.key.shape.block // BLOCK


def queries_for(q: Tensor, factor: Tensor | None) -> Tensor | None:
    """q (B, Hq, Q, D) times the factor of its head's channels, of kv or query heads (H or Hq, 1, D) or (B, H or Hq, 1, D): in
    float32, then q's dtype.
    """
    if factor is None:
        return None
    factors = for_queries(factor, q.shape[1])
    return torch.mul(q, factors, out=torch.empty_like(q))  # one launch


def for_queries(factor: Tensor, heads: int) -> Tensor:
    """A factor of kv heads as one of so many query heads."""
    ratio = heads // factor.shape[-3]
    return factor if ratio == 1 else factor.repeat_interleave(ratio, -3)
