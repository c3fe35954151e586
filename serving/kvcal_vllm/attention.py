"""Attention of the tokens of one step over blocks of packed keys and values, in torch: what a kernel must equal.

Letters: R requests, T tokens of the step, H kv heads, Hq query heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal_kernels.layout import BLOCK

from .paging import PagedLayer


@dataclass(frozen=True)
class Step:
    """Which tokens are whose. starts: where each request's tokens begin, and the end, R + 1 numbers; lengths: tokens of
    each request up to now, the step's included. table: int64 (R, pages): the pages
    of 32 tokens of each request.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    table: Tensor

    @property
    def requests(self) -> list[tuple[slice, int]]:
        """The step's tokens of each request that has some, and how many tokens that request has."""
        spans = zip(self.starts[:-1], self.starts[1:], strict=True)
        return [(slice(a, b), length) for (a, b), length in zip(spans, self.lengths, strict=True) if b > a]


def attend(
    layer: PagedLayer,
    pages: Tensor,
    step: Step,
    query: Tensor,
    scale: float,
    exact: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention (T, Hq, D) float32 of query (T, Hq, D) over all tokens of each request.

    exact: the step's own keys and values, (T, H, D) each, which then take the place of the packed ones.
    """
    out = torch.zeros(query.shape)
    rows = [row for row in range(len(step.lengths)) if step.starts[row + 1] > step.starts[row]]
    counts = [-(-step.lengths[row] // BLOCK) for row in rows]
    if not rows:
        return out
    numbers = torch.cat([step.table[row, :count] for row, count in zip(rows, counts, strict=True)])
    keys, values = (x.split(counts) for x in layer.load(pages, numbers))
    for (tokens, length), k, v in zip(step.requests, keys, values, strict=True):
        key, value = _by_token(k, length), _by_token(v, length)
        new = tokens.stop - tokens.start
        if exact is not None:
            key[:, -new:], value[:, -new:] = (x[tokens].transpose(0, 1).float() for x in exact)
        out[tokens] = _attention(query[tokens].transpose(0, 1).float(), key, value, scale).transpose(0, 1)
    return out


def _by_token(blocks: Tensor, length: int) -> Tensor:
    """Blocks (P, H, b, D) as (H, length, D): what lies behind the last token is whatever the page held before."""
    return blocks.transpose(0, 1).flatten(1, 2)[:, :length].contiguous()


def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of the last tokens: query (Hq, T, D), key and value (H, L, D) -> (Hq, T, D)."""
    new, length = query.shape[1], key.shape[1]
    mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out[0]
