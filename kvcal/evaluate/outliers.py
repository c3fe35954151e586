"""The same model with outlier key channels: a twin of the same function on which a method that minds them breaks.

Real models have key channels 10 to 50 times larger than the rest (Qwen2.5's key bias is the extreme). The twin has both
rows of a RoPE pair in W_K multiplied by s. The matching rows of W_Q, of all query heads of the group, are divided by s.
No score changes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from kvcal_artifacts import hf

from ..models import layerwise, names
from ..models.folding import fold_in_place, write_folded

Model = TypeVar("Model", bound=nn.Module)
SCALE, SHARE = 16.0, 0.1


def outlier_twin(model: Model, scale: float = SCALE, share: float = SHARE, seed: int = 0) -> Model:
    """A copy of a model in memory whose keys have outlier channels, and whose logits are the same up to rounding.

    scale: of these channels; a power of two is exact in any dtype. share: of a head's RoPE pairs, at least one; which
    ones differs by layer and kv head and comes from `seed`. Raises UsageError where folding.row_factors does.
    """
    twin = copy.deepcopy(model)
    fold_in_place(twin, _factors(twin, scale, share, seed))
    return twin


def write_outlier_twin(
    source: names.ModelSource, output: Path, *, scale: float = SCALE, share: float = SHARE, seed: int = 0
) -> None:
    """Write the twin as a new model folder, for other processes."""
    from ..models.weights import place_rotary

    parts = layerwise.open_layerwise(source, dtype="float32", device="cpu")
    place_rotary(parts.model, torch.device("cpu"))
    write_folded(source, _factors(parts.model, scale, share, seed), output)


def _factors(model: nn.Module, scale: float, share: float, seed: int) -> dict[int, Tensor]:
    """Layer -> (H, D): 1 / scale on both channels of the chosen pairs, else 1."""
    width, generator = hf.rotary_width(model), torch.Generator().manual_seed(seed)
    factors: dict[int, Tensor] = {}
    decoder = hf.decoder_of(model)
    for site in (hf.attention_site(decoder, index) for index in range(len(decoder.layers))):
        partners = hf.rope_partners(site, width)
        channels = torch.arange(site.head_dim, device="cpu")
        first = channels[channels <= partners]  # one of each pair, and channels that are not rotated
        factor = torch.ones(site.kv_heads, site.head_dim, dtype=torch.float64, device="cpu")
        for row in factor:
            chosen = first[
                torch.randperm(len(first), generator=generator, device="cpu")[: max(1, round(share * len(first)))]
            ]
            row[chosen] = row[partners[chosen]] = 1 / scale
        factors[site.index] = factor
    return factors
