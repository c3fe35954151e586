"""Stores what it is given. For tests (the cache must then equal DynamicCache) and for layers kept at full precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checked import Choice, Table, constants
from ..errors import KVCalError
from .base import EMPTY, Codec, Context, Packed, Role, Shape, to_half

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

SETTINGS = Table({"dtype": Choice(tuple(DTYPES))})


class Exact(Codec):
    name = "exact"

    def __init__(self, shape: Shape, role: Role, dtype: str = "float32") -> None:
        super().__init__(shape, role)
        if dtype not in DTYPES:
            raise KVCalError(f"exact codec in {dtype!r}: allowed are {', '.join(DTYPES)}")
        self.dtype = dtype

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        blocks = self.shape.blocks(x)
        raw = to_half(blocks, "value") if self.dtype == "float16" else blocks.to(DTYPES[self.dtype])
        return {"raw": raw.contiguous()}

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        raw: Tensor = packed["raw"]
        return raw.flatten(2, 3).to(torch.float32, copy=True)

    def config(self) -> dict[str, Any]:
        return {"dtype": self.dtype}

    @classmethod
    def from_state(cls, shape: Shape, role: Role, config: dict[str, Any], tensors: dict[str, Tensor]) -> Exact:
        SETTINGS.check(config, "exact codec")
        constants(tensors, {}, "exact codec")
        return cls(shape, role, **config)

    def tensor_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"raw": ((self.shape.heads, self.shape.block, self.shape.dim), DTYPES[self.dtype])}
