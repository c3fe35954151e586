"""Decode attention over residual vector codes (VQKV), written out: what the Triton kernels are held to.

Letters: B rows, H kv heads, N blocks of b tokens, D head_dim; a band of d dimensions has S stages of k codewords. R =
query heads a kv head times new tokens: query rows that see the same keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...packing import unpack
from ..nearest import residual_sum


def longest(books: Tensor) -> Tensor:
    """Return the length of each stage's longest codeword: books (S, k, d) -> float32 (S,), positive."""
    return torch.stack([book.float().norm(dim=-1).amax() for book in books]).clamp_min(1e-30)


def halves(books: Tensor) -> Tensor:
    """Return half of each codeword's square: books (S, k, d) -> float32 (S, k)."""
    return torch.stack([0.5 * book.float().square().sum(-1) for book in books])


@dataclass(frozen=True)
class Band:
    """Codes and codebooks of some of a head's channels. codes: uint8 (B, H, N, S, bytes), packed along a block's
    tokens. books (S, k, d) float16, k a power of two. dims: int (d,), the channels of a head that the band has.
    lengths: longest(books), half: halves(books), if they are known.
    """

    codes: Tensor
    books: Tensor
    dims: Tensor
    lengths: Tensor | None = None
    half: Tensor | None = None

    @cached_property
    def reach(self) -> Tensor:
        """The length of each stage's longest codeword, float32 (S,): `lengths` where given, which saves reading all of
        them.
        """
        if self.lengths is not None:
            return self.lengths
        return longest(self.books)

    @cached_property
    def halves(self) -> Tensor:
        """Half of each codeword's square: `half` where given, which saves reading all codewords."""
        return halves(self.books) if self.half is None else self.half

    @property
    def bits(self) -> int:
        return (self.books.shape[1] - 1).bit_length()


@dataclass(frozen=True)
class Coded:
    """Keys or values of one layer: bands that have each of the D channels once. block: tokens. scale: (H, D) float16
    that multiplies what is decoded, or None.
    """

    bands: tuple[Band, ...]
    block: int
    scale: Tensor | None = None

    @property
    def dim(self) -> int:
        return sum(len(band.dims) for band in self.bands)

    @property
    def tokens(self) -> int:
        return self.bands[0].codes.shape[2] * self.block


def decode(coded: Coded) -> Tensor:
    """Return every token, (B, H, N * b, D) float32."""
    batch, heads = coded.bands[0].codes.shape[:2]
    device = coded.bands[0].codes.device
    out = torch.empty(batch, heads, coded.tokens, coded.dim, dtype=torch.float32, device=device)
    for band in coded.bands:
        codes = unpack(band.codes, band.bits, coded.block).movedim(-2, 0)  # (S, B, H, N, b)
        decoded = residual_sum(codes.flatten(1), band.books)
        out[..., band.dims] = decoded.view(batch, heads, coded.tokens, -1)
    return out if coded.scale is None else out * coded.scale.to(out.dtype)[:, None]


def attend(q: Tensor, keys: Coded, values: Coded, blocks: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the attention of every query to all packed tokens of its row; keys, values and weights are rounded to q's
    dtype, which is also that of the output, sums are at least float32.

    q (B, H * ratio, Q, D); blocks int (B,): blocks that a row has, the rest of the capacity N is unused. -> out (B, H *
    ratio, Q, D) and the natural logarithm of the softmax's sum (B, H * ratio, Q): `merge` joins it with attention to
    other tokens. A row without blocks: zeros, and a logarithm below all others.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = (decode(x).to(q.dtype).to(wide) for x in (keys, values))
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
    scores = q.to(wide) @ k.transpose(-1, -2) * scaling
    there = torch.arange(k.shape[2], device=q.device) < blocks[:, None] * keys.block
    scores = scores.masked_fill(~there[:, None, None], -torch.inf)
    total = scores.logsumexp(-1).clamp_min(-1e30)
    weights = (scores - total[..., None]).exp().to(q.dtype).to(wide)
    return (weights @ v).to(q.dtype), total


def attend_exact(
    q: Tensor,
    sink: tuple[Tensor, Tensor, Tensor],
    recent: tuple[Tensor, Tensor, Tensor],
    scaling: float,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention to a row's sink, wholly, and its recent tokens up to the query itself, in the arguments of
    attention.reference: keys, values (B, H, capacity, D), counts (B,) int32; the newest tokens are the last of
    `recent`. first (B,): where these lie in a ring, token j of a row in slot (first + j) mod capacity; None: in slot j.

    q (B, Hq, Q, D) -> out (B, Hq, Q, D) and logarithms (B, Hq, Q), float32, as `attend` gives them.
    """
    queries, ratio = q.shape[2], q.shape[1] // sink[0].shape[1]
    reach = recent[2][:, None] - (queries - 1 - torch.arange(queries, device=q.device))
    limits = sink[2][:, None] + reach.clamp_max(0), reach
    tokens = [torch.arange(part[0].shape[2], device=q.device)[None] for part in (sink, recent)]  # of each slot
    if first is not None:
        tokens[1] = (tokens[1] - first[:, None]) % recent[0].shape[2]
    visible = torch.cat(
        [token[:, None] < limit[..., None] for token, limit in zip(tokens, limits, strict=True)],
        -1,
    )[:, None]
    k, v = (torch.cat([a, b], 2).float() for a, b in zip(sink[:2], recent[:2], strict=True))
    v = v.masked_fill(~visible.any(-2)[..., None], 0)  # unused capacity may hold anything
    grouped = q.float().unflatten(1, (-1, ratio)).flatten(2, 3)  # (B, H, ratio * Q, D)
    hidden = ~visible.repeat(1, 1, ratio, 1)
    scores = (grouped @ k.transpose(-1, -2) * scaling).masked_fill(hidden, -torch.inf)
    total = scores.logsumexp(-1).clamp_min(-1e30)
    out = (scores - total[..., None]).exp() @ v
    return out.unflatten(2, (ratio, queries)).flatten(1, 2), total.unflatten(2, (ratio, queries)).flatten(1, 2)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the attention to several sets of tokens, each (out, logarithm of its sum), as attention to all of them."""
    out, total = parts[0]
    for more, sum_ in parts[1:]:
        both = torch.logaddexp(total, sum_)
        out = out * (total - both).exp()[..., None] + more * (sum_ - both).exp()[..., None]
        total = both
    return out, total
