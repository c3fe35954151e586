"""8-bit floats with one constant scale: the FP8 cache that servers offer (per-tensor e4m3fn; e5m2 by option).

code = the nearest 8-bit float to x / scale (half to even), saturating at the largest finite one; x̂ = code * scale.
Codes are stored as bytes, because few tensor operations know 8-bit floats. Formats: OCP 8-bit Floating Point
Specification 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TypedDict

import torch
from torch import Tensor

from ..checked import HALF_MAX, Choice, Number, Schema
from ..errors import KVCalError
from .base import EMPTY, Codec, Context, Packed, Role, Shape, Specs
from .constants import constants

FORMATS = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Float8Settings(TypedDict):
    """The settings of Float8 in a bundle."""

    format: str
    scale: float


SETTINGS = Schema[Float8Settings]({"format": Choice(tuple(FORMATS)), "scale": Number(2.0**-24, HALF_MAX)})


class Float8(Codec):
    """8-bit floats of one scale.

    format: "e4m3fn" (largest 448) or "e5m2" (57344). scale: of the whole tensor, a constant of the bundle; servers take
    1 where nothing was calibrated.
    """

    name = "float8"
    head_tensors = ()
    channels_apart = True

    def __init__(self, shape: Shape, role: Role, format: str = "e4m3fn", scale: float = 1.0) -> None:
        super().__init__(shape, role)
        if format not in FORMATS:
            raise KVCalError(f"float8 codec of format {format!r}: allowed are {', '.join(map(repr, FORMATS))}")
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
            raise KVCalError(f"float8 codec, scale {scale!r}: must be a positive finite number")
        self.format, self.scale = format, float(scale)
        self._dtype = FORMATS[format]
        self._largest = torch.finfo(self._dtype).max

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        scaled = self.shape.blocks(x.float()) / self.scale
        # clamped first: torch turns what lies beyond into NaN (e4m3fn) or infinity (e5m2)
        codes = scaled.clamp(-self._largest, self._largest).to(self._dtype)
        return {"codes": codes.contiguous().view(torch.uint8)}

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        codes: Tensor = packed["codes"].contiguous().view(self._dtype)
        return codes.float().flatten(2, 3) * self.scale

    def decoding(self) -> Hashable:
        return self.settings()

    def config(self) -> Float8Settings:
        return {"format": self.format, "scale": self.scale}

    @classmethod
    def from_state(cls, shape: Shape, role: Role, config: Mapping[str, object], tensors: dict[str, Tensor]) -> Float8:
        settings = SETTINGS.read(config, "float8 codec")
        constants(tensors, {}, "float8 codec")
        return cls(shape, role, **settings)

    def tensor_specs(self) -> Specs:
        return {"codes": ((self.shape.heads, self.shape.block, self.shape.dim), torch.uint8)}
