"""Kernels of a few lines, for the emulator alone: python -m tests.emulator -m
tests.support.cases.simple_kernels
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
import triton.language as tl

TYPES = (  # of the operands; M, N, K, warps
    (torch.float16, (64, 64, 64, 4)),
    (torch.float16, (128, 32, 128, 8)),
    (torch.bfloat16, (64, 128, 32, 4)),
    (torch.float32, (64, 64, 32, 4)),
    (torch.bfloat16, (16, 16, 64, 1)),
    (torch.int8, (16, 16, 64, 1)),
)


@triton.jit
def product(p_x, p_y, p_out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TURN: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    y = tl.load(p_y + n[None, :] * K + k[:, None]) if TURN else tl.load(p_y + k[:, None] * N + n[None, :])
    x = tl.load(p_x + m[:, None] * K + k[None, :])
    kind: tl.constexpr = p_out.dtype.element_ty
    tl.store(p_out + m[:, None] * N + n[None, :], tl.dot(x, y, out_dtype=kind))


@triton.jit
def sums(p_x, p_out, p_count, p_last, N: tl.constexpr):
    i = tl.program_id(0)
    x = tl.load(p_x + i * N + tl.arange(0, N))
    tl.store(p_out + i, tl.sum(tl.exp(x - tl.max(x, 0)), 0))
    if tl.atomic_add(p_count, 1) == tl.num_programs(0) - 1:
        tl.store(p_last, i)


def main() -> None:
    g = torch.Generator().manual_seed(0)
    found: list[Any] = []
    for dtype, (m, n, k, warps) in TYPES:
        for turn in (False, True):
            sizes = (m, k), (n, k) if turn else (k, n)
            x, y = ((torch.randn(size, generator=g) * 20).to(dtype) for size in sizes)
            out = torch.empty(m, n, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
            product[1,](x, y, out, m, n, k, turn, num_warps=warps)
            exact = x.double() @ (y.double().T if turn else y.double())
            found.append((str(dtype), m, n, k, turn, float((out - exact).abs().max() / exact.abs().max())))
    print(json.dumps(found))
    x, out = torch.randn(7, 256, generator=g), torch.empty(7)
    count, last = torch.zeros(1, dtype=torch.int32), torch.full((1,), -1)
    sums[7,](x, out, count, last, 256)
    print(float((out - (x - x.amax(1, True)).exp().sum(1)).abs().max()), int(count), int(last) in range(7))


if __name__ == "__main__":
    main()
