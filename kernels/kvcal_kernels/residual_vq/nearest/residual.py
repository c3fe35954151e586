"""The choice of an implementation, and residual quantisation with it: codes stage by stage, codewords summed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from . import reference

TRITON_WIDEST = 256  # dimensions that triton.py takes


def backend(x: Tensor, codebook: Tensor) -> Literal["triton", "reference"]:
    """Return the implementation: Triton for float16 codebooks of up to 256 dimensions on a GPU, the reference
    elsewhere.
    """
    fits = codebook.dtype == torch.float16 and codebook.shape[-1] <= TRITON_WIDEST
    return "triton" if x.is_cuda and fits and find_spec("triton") else "reference"


def nearest(x: Tensor, codebook: Tensor) -> Tensor:
    """Return the index of the nearest codeword of each vector: x (n, d) float, codebook (k, d) float16 or float32 ->
    int32 (n,).

    A vector's code depends on nothing but the vector; triton.py says how far it may differ from the reference.
    """
    if backend(x, codebook) == "triton":
        from .triton import nearest as fused

        return fused(x, codebook)
    return reference.nearest(x, codebook)


def sums(x: Tensor, codes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return counts int64 (k,) and sums float32 (k, d) of vectors by code, for x (n, d) float, codes (n,); the same
    bits every time.
    """
    if x.is_cuda and find_spec("triton"):
        from .triton import sums as fused

        return fused(x, codes, k)
    return reference.sums(x, codes, k)


def compile_for(d: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile, and load, the kernels that `nearest` and `sums` take on a GPU for vectors (n, d) of this dtype and
    codebooks (k, d) float16, so that their first use does not wait for it.
    """
    x, book = torch.zeros(1, d, dtype=dtype, device=device), torch.zeros(k, d, dtype=torch.float16, device=device)
    sums(x, nearest(x, book), k)


def residual_codes(x: Tensor, codebooks: Tensor) -> Tensor:
    """Return greedy residual codes (VQKV Eq. 1 and 2): x (n, d) float, codebooks (S, k, d) -> int32 (S, n)."""
    rest = x.float()
    codes = torch.empty(codebooks.shape[0], x.shape[0], dtype=torch.int32, device=x.device)
    for stage, book in enumerate(codebooks):
        codes[stage] = nearest(rest, book)
        rest = rest - book[codes[stage]]
    return codes


def residual_sum(codes: Tensor, codebooks: Tensor) -> Tensor:
    """Return the sum of the codewords (VQKV Eq. 3), stage after stage: codes (S, n) integers, codebooks (S, k, d) ->
    float32 (n, d).
    """
    out = codebooks.new_zeros(codes.shape[1], codebooks.shape[2], dtype=torch.float32)
    for part, book in zip(codes, codebooks, strict=True):
        out += book[part.int()]  # bytes would be taken for a mask
    return out
