"""Decode attention straight from packed blocks: which layers take it, and the step itself."""

from __future__ import annotations

from torch import Tensor


def queries_for(q: Tensor, factor: Tensor | None) -> Tensor | None:
    """q (B, Hq, Q, D) times the factor of its kv head's channels, (H, 1, D) or (B, H, 1, D): in float32, then q's dtype."""
    if factor is None:
        return None
    heads = factor.shape[-3]
    shared: Tensor = q.float().unflatten(1, (heads, -1)) * factor.unsqueeze(-3)
    return shared.flatten(1, 2).to(q.dtype)
