"""The codec that stores numbers uncompressed: for tests (the cache then equals DynamicCache) and for exact layers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypedDict

import torch
from torch import Tensor

from ..checked import Choice, Schema
from ..errors import KVCalError
from .base import EMPTY, Codec, Context, Packed, Role, Shape, Specs
from .constants import constants
from .refusals import to_half

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ExactSettings(TypedDict):
    """The settings of Exact in a bundle."""

    dtype: str


SETTINGS = Schema[ExactSettings]({"dtype": Choice(tuple(DTYPES))})


class Exact(Codec):
    """Keys or values in a float dtype, not compressed."""

    name = "exact"
    head_tensors = ()

    def __init__(self, shape: Shape, role: Role, dtype: str = "float32") -> None:
        super().__init__(shape, role)
        if dtype not in DTYPES:
            raise KVCalError(f"exact codec in {dtype!r}: allowed are {', '.join(DTYPES)}")
        self.dtype, self.lossless = dtype, dtype == "float32"

    channels_apart = True

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        blocks = self.shape.blocks(x)
        raw = to_half(blocks, "value") if self.dtype == "float16" else blocks.to(DTYPES[self.dtype])
        return {"raw": raw.contiguous()}

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        raw: Tensor = packed["raw"]
        return raw.flatten(2, 3).to(torch.float32, copy=True)

    def decoding(self) -> Hashable:
        return self.settings()

    def config(self) -> ExactSettings:
        return {"dtype": self.dtype}

    @classmethod
    def from_state(cls, shape: Shape, role: Role, config: Mapping[str, object], tensors: dict[str, Tensor]) -> Exact:
        settings = SETTINGS.read(config, "exact codec")
        constants(tensors, {}, "exact codec")
        return cls(shape, role, **settings)

    def tensor_specs(self) -> Specs:
        return {"raw": ((self.shape.heads, self.shape.block, self.shape.dim), DTYPES[self.dtype])}
