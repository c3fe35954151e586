"""Decode attention straight from residual vector codes (VQKV).

Kernels of residual_vq attend to packed tokens, torch to exact ones; both are joined by the logarithms of their sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal_kernels import residual_vq
from kvcal_kernels.quantise import Counts
from kvcal_kernels.residual_vq.attention import Coded, reference

from ..codecs import Packed
from ..scheme import LayerCodecs
from . import fused
from .fused import Exact
from .preflight import verdicts

# Tables and sums by code are a constant cost of every row and step. On an H200 (docs/benchmarks/vq_attention.md) it
# pays at once with 4096 codewords; at the paper's sizes from 8000 tokens on against a decode in one pass, so from about
# 600 on against torch's, the alternative here, which takes ten times as long.
CODEWORDS, TOKENS = 4096, 600
ROWS = 64  # query heads of a kv head times new tokens, at most: MOST_ROWS of the kernels


def coded(pair: LayerCodecs, packed: list[Packed]) -> tuple[Coded, Coded]:
    """Packed keys and values of vector codes as the kernels take them."""
    return pair.key.as_codes(packed[0]), pair.value.as_codes(packed[1])


def most_queries(ratio: int) -> int:
    """The most new tokens of a call that the kernels take. ratio: query heads per kv head."""
    return max(1, min(fused.QUERIES, ROWS // ratio))


def least_tokens(pair: LayerCodecs) -> int:
    """The packed tokens of a row from which the kernels are faster than decoding."""
    return 0 if max(pair.key.codewords, pair.value.codewords) <= CODEWORDS else TOKENS


def verdict(pair: LayerCodecs, ratio: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernels do not pass their trial on a GPU; None if they do. ratio: query heads per kv head."""
    return verdicts.codebook_verdict(pair.key, pair.value, ratio, dtype, device)


def append_refusal(kernels: str, pair: LayerCodecs, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no kernel appends a step's tokens to these codes on their device; None where one or its reference does."""
    if kernels == "torch" or verdicts.interpreted():
        return None
    why = verdicts.codebook_append_verdict(pair.key, pair.value, dtype, device)
    return f"the append kernel of vector codes does not pass: {why}" if why else None


def append(
    kernels: str,
    pair: tuple[Coded, Coded],
    sink: tuple[Tensor, Tensor],
    ring: tuple[Tensor, Tensor],
    counts: Counts,
    flags: Tensor,
    new: tuple[Tensor, Tensor],
    space: object,
) -> None:
    """Append as residual_vq.append.append does, with the kernels of the path."""
    if kernels == "torch":
        residual_vq.append.append(*pair, sink, ring, counts, flags, *new)
    else:
        residual_vq.append.fast().append(*pair, sink, ring, counts, flags, *new, space)


def attention(
    kernels: str,
    q: Tensor,
    pair: tuple[Coded, Coded],
    blocks: Tensor,
    sink: Exact,
    recent: Exact,
    scaling: float,
    space: object,
    first: Tensor | None = None,
) -> Tensor:
    """Attention as fused.attention computes it, over vector codes.

    blocks: (B,) int32, of the scheme. first: of a ring, see residual_vq.attention.attend_exact.
    """
    if kernels == "torch":
        packed = reference.attend(q, *pair, blocks, scaling)
    else:
        packed = residual_vq.attention.fast().attend(q, *pair, blocks, scaling, space)
    out, _ = reference.merge([reference.attend_exact(q, sink, recent, scaling, first), (packed[0].float(), packed[1])])
    return out.to(q.dtype)


def workspace(kernels: str, device: torch.device, keeps: bool) -> object:
    """Memory for the kernels' launches on a device; None where they need none. keeps: graphs are recorded with it."""
    return None if kernels == "torch" else residual_vq.attention.fast().Workspace(device, keeps)


def reserve(kernels: str, pair: tuple[Coded, Coded], q: Tensor, space: object) -> None:
    """Allocate the memory of steps with q's shape (B, H_q, Q, D) and dtype, which must not move under a graph."""
    if kernels == "torch" or not q.is_cuda:
        return
    residual_vq.append.fast().reserve(*pair, space)
    residual_vq.attention.fast().attend(q, *pair, torch.zeros(len(q), dtype=torch.int32, device=q.device), 1.0, space)
