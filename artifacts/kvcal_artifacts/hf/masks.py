"""Attention masks: built as a layer takes them, and read as generate() builds them."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import implementation
from .sites import AttentionSite


def mask_for(site: AttentionSite, allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask (B, 1, Q, keys) as the layer's attention takes it, from allowed (B, Q, keys) bool."""
    mask = allowed[:, None]
    if implementation(site) == "sdpa":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def real_columns(mask: Tensor, past: int, query: int) -> Tensor | None:
    """Which columns are real tokens by a mask (B, 1, query, past + query or more): (B, past + query) bool.

    generate() makes such masks for caches that compile. None where it is not the causal mask of these columns.
    """
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != query or mask.shape[3] < past + query:
        return None
    visible = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] >= 0
    real = visible[:, -1, : past + query]
    causal = visible.sum(-1) == real.cumsum(1)[:, past:]
    return real if bool((causal | ~real[:, past:]).all()) else None
