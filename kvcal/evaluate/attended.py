"""Attention over exact and over decoded states, in float32, for errors of scores and of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal_artifacts.hf import AttentionSite


@dataclass(frozen=True)
class Visible:
    """What S queries see of T columns. future (S, T) bool: those behind each. count (S, 1): how many it sees.
    compressed (S, T) bool: in whose place a query sees decoded states; others: its complement; both None where there
    are none.
    """

    future: Tensor
    count: Tensor
    compressed: Tensor | None = None
    others: Tensor | None = None

    @classmethod
    def of(cls, positions: Tensor, length: int, packed: tuple[int, Tensor] | None = None) -> Visible:
        """What queries at `positions` (S,) see of `length` columns.

        packed: first column, and one behind the last (S,).
        """
        columns = torch.arange(length, device=positions.device)
        future, count = columns > positions[:, None], (positions + 1)[:, None]
        if packed is None:
            return cls(future, count)
        compressed = (columns >= packed[0]) & (columns < packed[1][:, None])
        return cls(future, count, compressed, ~compressed)


def mixed_attention(
    site: AttentionSite, q: Tensor, states: list[Tensor], visible: Visible
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What `attention` gives with exact keys and values, and with those that each query sees of a cache.

    q (B, heads, S, D). states: exact keys and values, then decoded ones, (B, H, T, D) each. visible: with `compressed`.
    """
    keys, values, decoded_keys, decoded_values = (x.float()[:, :, None] for x in states)
    grouped, compressed, others = _grouped(site, q, keys.shape[1]), visible.compressed, visible.others
    assert compressed is not None and others is not None
    exact = grouped @ keys.transpose(-1, -2)
    mixed = torch.where(compressed, grouped @ decoded_keys.transpose(-1, -2), exact)

    def outputs(scores: Tensor, packed_values: Tensor) -> Tensor:
        """Both sums apart for exact states too, so that an exact codec has an error of exactly 0."""
        weights = scores.masked_fill(visible.future, float("-inf")).softmax(-1)
        return weights.masked_fill(compressed, 0) @ values + weights.masked_fill(others, 0) @ packed_values

    return (
        (_centred(exact, visible), outputs(exact, values)),
        (_centred(mixed, visible), outputs(mixed, decoded_values)),
    )


def attention(
    site: AttentionSite, q: Tensor, states: Sequence[tuple[Tensor, Tensor]], visible: Visible
) -> list[tuple[Tensor, Tensor]]:
    """Scores and outputs of the last S tokens' queries q (B, heads, S, D) over each of these keys and values (B, H, T,
    D), all float32.

    Scores (B, H, group, S, T) are less their mean over what a query sees, and zero elsewhere. Outputs are (B, H, group,
    S, D).
    """
    grouped, results = _grouped(site, q, states[0][0].shape[1]), []
    for keys, values in states:
        scores = grouped @ keys.float()[:, :, None].transpose(-1, -2)
        weights = scores.masked_fill(visible.future, float("-inf")).softmax(-1)
        results.append((_centred(scores, visible), weights @ values.float()[:, :, None]))
    return results


def _grouped(site: AttentionSite, q: Tensor, heads: int) -> Tensor:
    """Queries (B, heads, S, D) by kv head and scaled: (B, H, group, S, D) float32."""
    scaling = float(getattr(site.module, "scaling", q.shape[3] ** -0.5))
    return torch.unflatten(q.float(), 1, (heads, -1)) * scaling


def _centred(scores: Tensor, visible: Visible) -> Tensor:
    """Scores (..., S, T) less their mean over what queries see, zero elsewhere."""
    scores = scores.masked_fill(visible.future, 0)
    scores -= scores.sum(-1, keepdim=True) / visible.count
    return scores.masked_fill_(visible.future, 0)
