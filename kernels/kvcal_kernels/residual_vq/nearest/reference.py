"""Nearest codeword, residual codes and sums by code in plain PyTorch: what the Triton kernels are held to.

Letters: n vectors of dimension d, a codebook of k codewords, S stages of codebooks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...hadamard import tree_sum

SLAB, LEAST_ROWS = 1 << 18, 64  # scores held at a time: 1 MiB, which a core's cache holds, or 64 rows
SLAB_CUDA = 1 << 28
PAIRS = 1 << 14  # candidates compared in float64 at a time


def nearest(x: Tensor, codebook: Tensor) -> Tensor:
    """Return the index of the codeword nearest to each vector in float64 arithmetic; the lowest index on a tie.

    x (n, d) any float dtype, codebook (k, d) float16 or float32, both finite -> int32 (n,). A matrix product in float32
    proposes, and every codeword that its rounding could have hidden is compared again in float64: so a vector's code
    depends neither on the other vectors of the call nor on how the product was summed.
    """
    book = codebook.float()
    half = 0.5 * book.square().sum(-1)
    reach = half.amax().mul(2).sqrt()
    rows = max(LEAST_ROWS, (SLAB_CUDA if x.is_cuda else SLAB) // book.shape[0])
    out = torch.empty(x.shape[0], dtype=torch.int32, device=x.device)
    for start in range(0, x.shape[0], rows):
        part = x[start : start + rows].float()
        score = torch.addmm(half, part, book.T, alpha=-1)  # |x - c|^2 / 2 up to |x|^2 / 2
        low, best = score.min(-1, keepdim=True)
        out[start : start + rows] = best[:, 0]
        limit = low + 2 * _rounding(part, reach)
        second = score.scatter(1, best, torch.inf).amin(-1, keepdim=True)
        unsure = (second <= limit)[:, 0].nonzero().flatten()
        if len(unsure):
            out[start + unsure] = _settle(part[unsure], book, score[unsure] <= limit[unsure])
    return out


def _rounding(x: Tensor, reach: Tensor) -> Tensor:
    """Return a bound of a score's error (n, 1): float32 products of d terms summed in any order; reach: the longest
    codeword.
    """
    unit = 2.0**-24 if torch.get_float32_matmul_precision() == "highest" else 2.0**-8  # bfloat16 may be used else
    length = x.square().sum(-1, keepdim=True).sqrt()
    return (x.shape[1] + 8) * unit * reach * (0.5 * reach + length)


def _settle(x: Tensor, book: Tensor, near: Tensor) -> Tensor:
    """Return the nearest of the candidates near (n, k) bool by lowest distance in float64, then lowest index; int32
    (n,).
    """
    row, code = near.nonzero().unbind(1)
    parts = [
        tree_sum((x[i].double() - book[j].double()).square())
        for i, j in zip(row.split(PAIRS), code.split(PAIRS), strict=True)
    ]
    distance = torch.cat(parts)
    low = torch.full((x.shape[0],), torch.inf, dtype=torch.float64, device=x.device)
    low.scatter_reduce_(0, row, distance, "amin")
    first = torch.full((x.shape[0],), book.shape[0], dtype=torch.int64, device=x.device)
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
