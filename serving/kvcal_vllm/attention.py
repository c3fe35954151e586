"""Attention of the tokens of one step over blocks of packed keys and values, in torch: what a kernel must equal.

Letters: R requests, T tokens of the step, H kv heads, Hq query heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal_kernels.layout import BLOCK

from .paging import PagedLayer
from .tails import LayerTails


@dataclass(frozen=True)
class Step:
    """Which tokens are whose. starts: where each request's tokens begin, and the end, R + 1 numbers; lengths: tokens of
    each request up to now, the step's included. table: int64 (R, pages): the pages of 32 tokens of each request. tails:
    the slot of the tail that each request that has tokens reads, -1 for none.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    table: Tensor
    tails: tuple[int, ...] = ()

    @property
    def rows(self) -> list[int]:
        """The requests that have tokens in this step."""
        return [row for row in range(len(self.lengths)) if self.starts[row + 1] > self.starts[row]]

    @property
    def requests(self) -> list[tuple[slice, int]]:
        """The step's tokens of each request that has some, and how many tokens that request has."""
        return [(slice(self.starts[row], self.starts[row + 1]), self.lengths[row]) for row in self.rows]

    @property
    def spans(self) -> list[tuple[Tensor, int, int]]:
        """The pages of each request that has tokens, and how many tokens it has before and behind the step."""
        sizes = [(tokens.stop - tokens.start, length) for tokens, length in self.requests]
        return [(self.table[row], length - new, length) for row, (new, length) in zip(self.rows, sizes, strict=True)]


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
    out = torch.zeros(query.shape, dtype=torch.float32, device="cpu")
    counts = [-(-length // BLOCK) for _, length in step.requests]
    for (tokens, length), k, v in zip(step.requests, *_load(layer, pages, step, counts), strict=True):
        key, value = _by_token(k, length), _by_token(v, length)
        new = tokens.stop - tokens.start
        if exact is not None:
            key[:, -new:], value[:, -new:] = (x[tokens].transpose(0, 1).float() for x in exact)
        out[tokens] = _attention(query[tokens].transpose(0, 1).float(), key, value, scale).transpose(0, 1)
    return out


def attend_tails(
    layer: PagedLayer,
    pages: Tensor,
    step: Step,
    query: Tensor,
    scale: float,
    exact: tuple[Tensor, Tensor],
    tails: LayerTails,
    deterministic: bool,
) -> Tensor:
    """Causal attention (T, Hq, D) float32 of query (T, Hq, D) where unfinished blocks are exact.

    exact: the step's own keys and values, (T, H, D) each. Tokens of the blocks that were finished before the step
    are packed. deterministic: those of the blocks that it finishes are so, too, for queries behind their block.
    """
    out = torch.zeros(query.shape, dtype=torch.float32, device="cpu")
    begins = [before // BLOCK * BLOCK for _, before, _ in step.spans]
    ends = [(length - 1) // BLOCK * BLOCK for _, length in step.requests] if deterministic else begins
    packed = _load(layer, pages, step, [end // BLOCK for end in ends])
    for (tokens, length), begin, end, slot, k, v in zip(step.requests, begins, ends, step.tails, *packed, strict=True):
        unfinished = [x[tokens].transpose(0, 1).float() for x in exact]
        before = length - (tokens.stop - tokens.start)
        if slot >= 0:
            earlier = tails.read(slot, before - begin)
            unfinished = [torch.cat([a.float(), b], 1) for a, b in zip(earlier, unfinished, strict=True)]
        stored = [_by_token(x, end) for x in (k, v)]
        for border in range(begin, end + 1, BLOCK):  # queries of the block that begins here, or of all of the step
            first, last = max(before, border), min(length, border + BLOCK) if deterministic else length
            key, value = (
                torch.cat([a[:, :border], b[:, border - begin : last - begin]], 1)
                for a, b in zip(stored, unfinished, strict=True)
            )
            at = slice(tokens.start + first - before, tokens.start + last - before)
            out[at] = _attention(query[at].transpose(0, 1).float(), key, value, scale).transpose(0, 1)
    return out


def _load(
    layer: PagedLayer, pages: Tensor, step: Step, counts: list[int]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Keys and values of the first `counts` pages of each request that has tokens."""
    numbers = [step.table[row, :count] for row, count in zip(step.rows, counts, strict=True)]
    if not numbers:
        return (), ()
    keys, values = layer.load(pages, torch.cat(numbers))
    return keys.split(counts), values.split(counts)


def _by_token(blocks: Tensor, length: int) -> Tensor:
    """Blocks (P, H, b, D) as (H, length, D): what lies behind the last token is whatever the page held before."""
    return blocks.transpose(0, 1).flatten(1, 2)[:, :length].contiguous()


def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of the last tokens: query (Hq, T, D), key and value (H, L, D) -> (Hq, T, D) float32.

    Sums are float64: in float32 their last digits depend on T and L, so on how a prompt is cut, and the codes of layers
    above with them.
    """
    new, length = query.shape[1], key.shape[1]
    mask = torch.ones(new, length, dtype=torch.bool, device="cpu").tril(length - new)
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        query[None].double(), key[None].double(), value[None].double(), attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out[0].float()
