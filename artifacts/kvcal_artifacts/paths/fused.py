"""Decode attention straight from packed blocks."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kvcal_kernels import quantise
from kvcal_kernels.attention import fast, reference, transform
from kvcal_kernels.layout import BLOCK, AnyBlocks, Form, Rope, TransformBlocks, TransformForm, rope

from ..scheme import LayerCodecs
from .preflight import verdicts

QUERIES = 16  # new tokens of a call, at most
Exact = tuple[Tensor, Tensor, Tensor]  # keys, values (B, H, capacity, D), tokens of each row (B,) int32


def attention(
    kernels: str,
    q: Tensor,
    keys: AnyBlocks,
    values: AnyBlocks,
    blocks: Tensor,
    sink: Exact,
    recent: Exact,
    scaling: float,
    factor: Tensor | None,
    workspace: object,
    ring: bool = False,
    rotation: Rope | None = None,
) -> Tensor:
    """Attention of the newest tokens, as attention.reference.attend computes it.

    factor: what packed keys were divided by, (H, 1, D) or (B, H, 1, D). rotation: RoPE of keys that are stored before
    it.
    """
    packed_q, arguments = queries_for(q, factor), (q, keys, values, blocks, sink, recent, scaling)
    if kernels == "torch":
        return reference.attend(*arguments, packed_q, ring, rotation)
    if isinstance(keys, TransformBlocks):
        by_basis: Tensor = transform().attend(*arguments, None, workspace, ring)
        return by_basis
    out: Tensor = fast().attend(*arguments, None, workspace, packed_q, ring, rotation)
    return out


def verdict(pair: LayerCodecs, ratio: int, dtype: torch.dtype, device: torch.device, rotary: int = 0) -> str | None:
    """Why the kernel does not pass its trial on a GPU; None if it does.

    ratio: query heads per kv head. rotary: channels that it rotates by RoPE.
    """
    keys, values, heads = pair.key.fused(), pair.value.fused(), pair.key.shape.heads
    if isinstance(keys, TransformForm) and isinstance(values, TransformForm):
        return verdicts.transform_verdict(keys, values, heads, ratio, dtype, device)
    assert isinstance(keys, Form) and isinstance(values, Form)
    return verdicts.verdict(keys, values, heads, ratio, dtype, device, rotary)


def workspace(kernels: str, device: torch.device) -> object:
    """Memory for the kernel's launches on a device; None where it needs none."""
    return None if kernels == "torch" else fast().Workspace(device)


def reserve(
    kernels: str,
    space: object,
    keys: Form | TransformForm,
    values: Form | TransformForm,
    batch: int,
    heads: int,
    ratio: int,
    capacity: int,
    windows: tuple[int, int],
    rotary: int = 0,
) -> None:
    """Allocate the memory of any step over `capacity` blocks, before a graph of one is recorded: it must not move.

    rotary: channels that the kernel rotates by RoPE.
    """
    if kernels == "torch":
        return
    pairs = rotary // (2 * rope.PIECE)
    for queries in range(1, QUERIES + 1):
        if isinstance(keys, TransformForm):
            transform().reserve(space, keys, values, batch, heads, ratio, capacity, windows, queries)
        else:
            fast().reserve(space, keys, values, batch, heads, ratio, capacity, windows, queries, pairs)


def steps_by(kernels: str) -> ModuleType | None:
    """The Triton kernels of quantise, which advance counts and append the tokens of a step; None where torch does."""
    return quantise.fast() if kernels != "torch" else None


def kernel_blocks(pair: LayerCodecs) -> int:
    """How many blocks of the kernel one of the scheme has."""
    return pair.key.shape.block // BLOCK


def queries_for(q: Tensor, factor: Tensor | None) -> Tensor | None:
    """Queries (B, Hq, Q, D) times the factor of their head's channels: in float32, then in the queries' dtype.

    factor: of kv or query heads, (H or Hq, 1, D) or (B, H or Hq, 1, D).
    """
    if factor is None:
        return None
    factors = for_queries(factor, q.shape[1])
    return torch.mul(q, factors, out=torch.empty_like(q))  # one launch


def for_queries(factor: Tensor, heads: int) -> Tensor:
    """The factor of so many query heads, from one of kv heads."""
    ratio = heads // factor.shape[-3]
    return factor if ratio == 1 else factor.repeat_interleave(ratio, -3)
