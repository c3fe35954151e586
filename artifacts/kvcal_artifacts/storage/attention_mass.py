"""How much attention each token gets: by that heavy hitters are chosen."""

from __future__ import annotations

import torch
from torch import Tensor

SCORES = 1 << 24  # attention weights in memory at a time: 64 MB


def allowed(alive: Tensor, valid: Tensor | None, start: int, stop: int) -> Tensor:
    """Which slots the call's columns start to stop may attend to: (B, stop - start, P + stop) bool.

    alive (B, P): slots that hold a token; valid (B, Q): columns that are not padding, None for all. Every column, pads
    too, attends to itself, so that no softmax is over nothing.
    """
    column = torch.arange(stop, device=alive.device)
    row = column[start:, None]
    new = (column <= row)[None].expand(len(alive), -1, -1)
    if valid is not None:
        new = new & (valid[:, None, :stop] | (column == row))
    return torch.cat([alive[:, None].expand(-1, stop - start, -1), new], 2)


def attention_mass(q: Tensor, k: Tensor, alive: Tensor, valid: Tensor | None, scaling: float) -> Tensor:
    """Attention that each slot gets from the call's queries, summed over heads and queries: (B, P + Q) float64.

    q (B, heads, Q, D) after RoPE; k (B, kv heads, P + Q, D) as attention takes them; alive, valid: see `allowed`. The
    softmax is in float32, over so many queries at a time that at most SCORES weights are in memory (or those of one
    query).
    """
    batch, heads, query, _ = q.shape
    past = alive.shape[1]
    mass = torch.zeros(batch, past + query, dtype=torch.float64, device=q.device)
    queries, keys = q.float().unflatten(1, (k.shape[1], -1)), k.float().transpose(2, 3)
    step = max(1, SCORES // (batch * heads * (past + query)))
    for start in range(0, query, step):
        stop = min(start + step, query)
        part = queries[:, :, :, start:stop]
        scores = (part.flatten(2, 3) @ keys[..., : past + stop]).unflatten(2, part.shape[2:4]) * scaling
        hidden = ~allowed(alive, valid, start, stop)[:, None, None]
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1).sum((1, 2))  # (B, queries, slots)
        if valid is not None:
            weights = weights.masked_fill(~valid[:, start:stop, None], 0)
        mass[:, : past + stop] += weights.sum(1, dtype=torch.float64)
    return mass
