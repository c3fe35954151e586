"""Numbers from a text by integer hashing: the same on every machine, device and torch version, and no generator is
touched.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache

import torch
from torch import Tensor

from ..models.weights import fill_hashed

LEVELS = 1 << 16


def hashed_normal(rows: int, columns: int, label: str) -> Tensor:
    """float32 (rows, columns) of N(0, 1), made of 65536 equally likely values: the quantiles of (i + 1/2) / 65536."""
    raw = torch.empty(rows * columns, dtype=torch.float32, device="cpu")
    fill_hashed(raw, _keys(label), LEVELS / 2)
    level = raw.floor_().add_(LEVELS / 2).clamp_(0, LEVELS - 1)
    return _quantiles()[level.int()].view(rows, columns)


@cache
def _quantiles() -> Tensor:
    middle = (torch.arange(LEVELS, dtype=torch.float64, device="cpu") + 0.5) / LEVELS
    # float16 has 11 bits: a last bit of another machine's double-precision logarithm does not show
    quantiles: Tensor = torch.special.ndtri(middle)
    return quantiles.half().float()


def spread(population: int, count: int, label: str) -> Tensor:
    """`count` different numbers below `population`, evenly strewn, another set for every label: int64 (count,)."""
    if not 0 <= count <= population:
        raise ValueError(f"{count} different numbers below {population}")
    first = int.from_bytes(hashlib.sha256(label.encode()).digest()[8:16], "little") % max(1, population)
    step = round(population * (math.sqrt(5) - 1) / 2)
    while math.gcd(step, population) != 1:
        step += 1
    return (torch.arange(count, dtype=torch.int64, device="cpu") * step + first) % max(1, population)


def _keys(label: str) -> list[int]:
    digest = hashlib.sha256(label.encode()).digest()
    return [int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4)]
