"""Nearest codeword, residual codes and sums by code in plain PyTorch: what the Triton kernels are held to.

Letters: n vectors of dimension d, a codebook of k codewords, S stages of codebooks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...hadamard import tree_sum

SLAB, LEAST_ROWS = 1 << 18, 64  # scores held at a time: 1 MiB, which a core's cache holds, or 64 rows
SLAB_CUDA = 1 << 28
PAIRS = 1 << 14  # candidates compared in float64 at a time
TILE, TILE_CUDA = 1 << 13, 1 << 20  # the same where a vector is compared with all codewords
FEW = 4  # candidates a vector, on average, that are compared one by one without a look at the others
CROWDED = 16  # a vector with more than one in so many codewords as candidates is compared with all


class _Words(NamedTuple):
    """Codewords (k, d), half their squares (k,) and the longest one's length, in float32 or float64."""

    words: Tensor
    half: Tensor
    reach: Tensor

    @classmethod
    def of(cls, codebook: Tensor, kind: torch.dtype) -> _Words:
        words = codebook.to(kind)
        half = 0.5 * words.square().sum(-1)
        return cls(words, half, half.amax().mul(2).sqrt())

    def scores(self, x: Tensor) -> Tensor:
        """|x - c|^2 / 2 up to |x|^2 / 2 of vectors (n, d) and all codewords: (n, k)."""
        return torch.addmm(self.half, x.to(self.words.dtype), self.words.T, alpha=-1)

    def slack(self, x: Tensor) -> Tensor:
        """How far above the lowest score (n, 1) the nearest codeword's can lie: products of d terms are summed in any
        order.
        """
        length = x.to(self.words.dtype).square().sum(-1, keepdim=True).sqrt()
        if self.words.dtype == torch.float32:
            return 2 * (x.shape[1] + 8) * 2.0**-24 * self.reach * (0.5 * self.reach + length)
        # here the float64 distances, by which the nearest is chosen, are rounded as much as the scores
        return 2 * (x.shape[1] + 8) * 2.0**-53 * (self.reach + length).square()


def nearest(x: Tensor, codebook: Tensor) -> Tensor:
    """Return the index of the codeword nearest to each vector in float64 arithmetic; the lowest index on a tie.

    x (n, d) any float dtype, codebook (k, d) float16 or float32, both finite -> int32 (n,). A matrix product in float32
    proposes, and every codeword that its rounding could have hidden is compared again in float64: so a vector's code
    depends neither on the other vectors of the call nor on how the product was summed. Where torch may take float32
    products in TF32 or bfloat16, the product is in float64. No codebook takes more than some twenty times as long as
    one whose codewords lie apart: `_settle` says why.
    """
    book = _Words.of(codebook, torch.float32 if _is_full(x.device) else torch.float64)
    rows = max(LEAST_ROWS, (SLAB_CUDA if x.is_cuda else SLAB) // codebook.shape[0])
    out = torch.empty(x.shape[0], dtype=torch.int32, device=x.device)
    first = cache(partial(_first_of_equal, codebook))
    for start in range(0, x.shape[0], rows):
        part = x[start : start + rows].float()
        score = book.scores(part)
        low, best = score.min(-1, keepdim=True)
        out[start : start + rows] = best[:, 0]
        limit = low + book.slack(part)
        second = score.scatter(1, best, torch.inf).amin(-1, keepdim=True)
        unsure = (second <= limit)[:, 0].nonzero().flatten()
        if len(unsure):
            out[start + unsure] = _settle(part[unsure], codebook, score[unsure] <= limit[unsure], first)
    return out


def _is_full(device: torch.device) -> bool:
    """Whether products of float32 matrices are float32 on this device, whatever its arithmetic units offer."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    setting = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if setting is None:  # torch before 2.9 has one setting for all
        return torch.get_float32_matmul_precision() == "highest"
    return setting in ("none", "ieee")


def _settle(x: Tensor, codebook: Tensor, near: Tensor, first: Callable[[], Tensor]) -> Tensor:
    """Return the nearest of the candidates near (n, k) bool by lowest distance in float64, then lowest index; int32
    (n,). first: `_first_of_equal`, found when it is needed.

    Few candidates are compared pair by pair. Of many, one of those that are equal stays; if that does not do, those
    that a product in float64 cannot tell apart. Whatever is crowded still is compared with the whole codebook in tiles,
    which costs a twentieth a pair.
    """
    if _are_many(near):
        near = near & first()
        if _are_many(near):
            book = _Words.of(codebook, torch.float64)
            score = book.scores(x).masked_fill_(~near, torch.inf)
            near = score <= score.amin(-1, keepdim=True) + book.slack(x)
    crowded = near.sum(-1) * CROWDED > near.shape[1]
    out = torch.empty(len(x), dtype=torch.int32, device=x.device)
    for rows, settle in ((crowded, _by_tile), (~crowded, _by_pair)):
        if len(chosen := rows.nonzero().flatten()):
            out[chosen] = settle(x[chosen], codebook, near[chosen])
    return out


def _are_many(near: Tensor) -> bool:
    return int(near.sum()) > FEW * len(near)


def _first_of_equal(codebook: Tensor) -> Tensor:
    """Whether no earlier codeword has the same numbers: bool (k,)."""
    k = codebook.shape[0]
    group = codebook.unique(dim=0, return_inverse=True)[1]
    number = torch.arange(k, device=codebook.device)
    first = torch.full_like(number, k).scatter_reduce_(0, group, number, "amin")
    return first[group] == number


def _by_tile(x: Tensor, codebook: Tensor, near: Tensor) -> Tensor:
    """Do what `_settle` does by comparing vectors with all codewords; the nearest are among `near` anyway."""
    tile = TILE_CUDA if x.is_cuda else TILE
    words = codebook.double().T.contiguous()
    rows = max(1, tile // words.shape[1])
    out = []
    for part in x.double().T.split(rows, 1):
        low = torch.full((part.shape[1],), torch.inf, dtype=torch.float64, device=x.device)
        first = torch.zeros(part.shape[1], dtype=torch.int64, device=x.device)
        for start in range(0, words.shape[1], tile):
            apart = part[:, :, None] - words[:, None, start : start + tile]  # (d, n, k): sums run over whole rows
            distance = tree_sum(apart.square_().movedim(0, -1))
            code = distance.argmin(-1)
            least = distance.gather(-1, code[:, None])[:, 0]
            first = torch.where(least < low, start + code, first)
            low = torch.minimum(least, low)
        out.append(first)
    return torch.cat(out).int()


def _by_pair(x: Tensor, codebook: Tensor, near: Tensor) -> Tensor:
    """Do what `_settle` does, candidate by candidate."""
    row, code = near.nonzero().unbind(1)
    parts = [
        tree_sum((x[i].double() - codebook[j].double()).square())
        for i, j in zip(row.split(PAIRS), code.split(PAIRS), strict=True)
    ]
    distance = torch.cat(parts)
    low = torch.full((x.shape[0],), torch.inf, dtype=torch.float64, device=x.device)
    low.scatter_reduce_(0, row, distance, "amin")
    first = torch.full((x.shape[0],), codebook.shape[0], dtype=torch.int64, device=x.device)
    tied = distance == low[row]
    return first.scatter_reduce_(0, row[tied], code[tied], "amin").int()


def sums(x: Tensor, codes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return how many vectors have each code, and their sum. x (n, d), codes (n,) integers below k -> int64 (k,),
    float32 (k, d).

    Each sum runs in the order of the vectors, so the same input gives the same bits.
    """
    order, offsets = by_code(codes, k)
    added = torch.nn.functional.embedding_bag(order, x.float(), offsets[:-1], mode="sum")
    return offsets.diff(), added


def by_code(codes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return vector numbers sorted by code, in their order within a code (n,), and where each code begins (k + 1,);
    int64.
    """
    sorted_codes, order = codes.sort(stable=True)
    edges = torch.arange(k + 1, dtype=sorted_codes.dtype, device=codes.device)
    return order, torch.searchsorted(sorted_codes, edges)
