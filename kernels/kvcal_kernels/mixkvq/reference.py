"""MixKVQ's choice of channels (Zhang et al. 2025, Eq. 6 to 8): salience is the importance of a channel to the queries
times the step that 2 bits would take, and tiers go by it. Choices are those of the codec `mixkvq`
(kvcal_artifacts/codecs/mixkvq.py), bit for bit as it makes them on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 3.0  # of the lowest tier, 2 bits


@dataclass(frozen=True)
class Tiers:
    """How channels are shared out over tiers: by thresholds over the median of the block's positive saliences (median
    False: over 1), counts rounded up to multiples of `round_up`; or, with full and four, so many channels of each kv
    head.
    """

    low: float = 2.0
    high: float = 8.0
    round_up: int = 8
    median: bool = True
    full: int | None = None
    four: int | None = None


def select(x: Tensor, importance: Tensor | None, how: Tiers, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return channels tier by tier, ascending in each, uint8 (B, H, N, D); and where the second and the third tier
    begin, int32 (B, H, N). x (B, H, T, D) floats, T whole blocks; importance float32 (B, H, N or 1, D), None: 1.
    """
    blocks = x.float().unflatten(2, (-1, block))
    salience = (blocks.amax(3) - blocks.amin(3)) / torch.full((), STEPS, dtype=torch.float32, device=x.device)
    salience = salience if importance is None else salience * importance
    dim = x.shape[3]
    if how.full is not None and how.four is not None:
        first = torch.full_like(salience[..., 0], how.full, dtype=torch.long)
        second = first + how.four
    else:
        unit = _median(salience) if how.median else torch.ones_like(salience[:, :1, :, :1])
        counts = [(salience > tau * unit).sum(-1) for tau in (how.high, how.low)]
        first, second = (-(-count // how.round_up) * how.round_up for count in counts)
        first = first.clamp_max(dim)
        second = torch.maximum(first, second.clamp_max(dim))
    rank = salience.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    tier = (rank >= first[..., None]).long() + (rank >= second[..., None])
    perm = (tier * dim + torch.arange(dim, device=x.device)).argsort(-1)
    return perm.to(torch.uint8), first.int(), second.int()


def refusal(heads: int, dim: int) -> str | None:
    """Return why the Triton kernel does not choose channels of so many kv heads of `dim` channels; None if it does."""
    if heads & (heads - 1) or dim & (dim - 1) or not 16 <= dim <= 256:
        return f"{heads} kv heads of {dim}: must be powers of two, head_dim 16 to 256"
    return None


def _median(salience: Tensor) -> Tensor:
    """Return the lower median of all kv heads' positive saliences of a block, (B, 1, N, 1); 0 where there are none."""
    flat = salience.transpose(1, 2).flatten(2).sort(-1).values
    zeros = (flat <= 0).sum(-1, keepdim=True)
    middle = zeros + (flat.shape[-1] - zeros - 1).clamp_min(0) // 2
    return flat.gather(-1, middle.clamp_max(flat.shape[-1] - 1))[:, None]
