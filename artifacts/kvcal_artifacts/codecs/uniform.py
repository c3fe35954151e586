"""Uniform integers in groups: any axis, symmetric or asymmetric, 1 to 8 bits, really packed.

Asymmetric (KIVI Eq. 1 and 2; Quanto's qint2/qint4 cache): s = (max - min) / (2^b - 1), code = round((x - min) / s).
Symmetric: two's-complement codes with s = max|x| / 2^(b-1); at one bit the two codes are -s and +s with s = mean|x|.
Scale and minimum are rounded to float16 before the codes are computed, so that encoder and decoder agree.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from kvcal_kernels.hadamard import tree_sum
from kvcal_kernels.packing import pack, packed_bytes, unpack

from ..errors import KVCalError
from .base import EMPTY, HALF_FLOOR, Codec, Context, Packed, Role, Shape, to_half

Axis = Literal["channel", "token"]


class Uniform(Codec):
    """axis "channel": a group is `group` consecutive channels of one token ("per token"); "token": `group` consecutive
    tokens of one channel ("per channel"). Key codes are packed along channels, value codes along tokens, the order in
    which a fused kernel contracts them.
    """

    name = "uniform"

    def __init__(
        self, shape: Shape, role: Role, bits: int = 4, group: int = 64, axis: Axis = "channel", symmetric: bool = False
    ) -> None:
        super().__init__(shape, role)
        if type(bits) is not int or type(group) is not int:
            raise KVCalError(f"uniform codec, bits {bits!r}, group {group!r}: must be integers")
        length = shape.dim if axis == "channel" else shape.block
        if not 1 <= bits <= 8:
            raise KVCalError(f"uniform codec of {bits} bits: allowed are 1 to 8")
        if axis not in ("channel", "token"):
            raise KVCalError(f"uniform codec along axis {axis!r}: allowed are 'channel' and 'token'")
        if group < 1 or length % group:
            raise KVCalError(f"uniform codec, groups of {group} along {axis}: must divide {length}")
        self.bits, self.group, self.axis, self.symmetric = bits, group, axis, symmetric

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        grouped = self._grouped(self.shape.blocks(x.float()))
        if self.symmetric:
            codes, parts = self._encode_symmetric(grouped)
        else:
            codes, parts = self._encode_asymmetric(grouped)
        flat = self._ungrouped(codes)
        if self.role == "value":
            flat = flat.transpose(-1, -2)
        return {"codes": pack(flat, self.bits), **parts}

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        count = self.shape.block if self.role == "value" else self.shape.dim
        codes = unpack(packed["codes"], self.bits, count)
        if self.role == "value":
            codes = codes.transpose(-1, -2)
        grouped = self._grouped(codes.float())
        scale = packed["scale"].float()[..., None]
        if not self.symmetric:
            out = grouped * scale + packed["min"].float()[..., None]
        elif self.bits == 1:
            out = (grouped * 2 - 1) * scale
        else:
            out = (grouped - 2 ** (self.bits - 1)) * scale
        return self._ungrouped(out).flatten(2, 3)

    def _encode_asymmetric(self, grouped: Tensor) -> tuple[Tensor, Packed]:
        low, high = grouped.amin(-1), grouped.amax(-1)
        top = 2**self.bits - 1
        scale = to_half(((high - low) / top).clamp_min(HALF_FLOOR), "scale")
        base = to_half(low, "group minimum")
        codes = ((grouped - base.float()[..., None]) / scale.float()[..., None]).round_().clamp_(0, top)
        return codes, {"scale": scale, "min": base}

    def _encode_symmetric(self, grouped: Tensor) -> tuple[Tensor, Packed]:
        if self.bits == 1:
            scale = to_half((tree_sum(grouped.abs()) / self.group).clamp_min(HALF_FLOOR), "scale")
            return (grouped >= 0).float(), {"scale": scale}
        half = 2 ** (self.bits - 1)
        scale = to_half((grouped.abs().amax(-1) / half).clamp_min(HALF_FLOOR), "scale")
        codes = (grouped / scale.float()[..., None]).round_().clamp_(-half, half - 1)
        return codes + half, {"scale": scale}

    def _grouped(self, blocks: Tensor) -> Tensor:
        """(B, H, N, b, D) -> (..., group): channel axis (B, H, N, b, D/g, g); token axis (B, H, N, D, b/g, g)."""
        if self.axis == "token":
            blocks = blocks.transpose(-1, -2)
        return torch.unflatten(blocks, -1, (-1, self.group))

    def _ungrouped(self, grouped: Tensor) -> Tensor:
        flat = grouped.flatten(-2)
        return flat.transpose(-1, -2) if self.axis == "token" else flat

    def config(self) -> dict[str, Any]:
        return {"bits": self.bits, "group": self.group, "axis": self.axis, "symmetric": self.symmetric}

    @classmethod
    def from_state(cls, shape: Shape, role: Role, config: dict[str, Any], tensors: dict[str, Tensor]) -> Uniform:
        return cls(shape, role, **config)

    def tensor_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        s = self.shape
        rows, count = (s.dim, s.block) if self.role == "value" else (s.block, s.dim)
        groups = (s.block, s.dim // self.group) if self.axis == "channel" else (s.dim, s.block // self.group)
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "codes": ((s.heads, rows, packed_bytes(count, self.bits)), torch.uint8),
            "scale": ((s.heads, *groups), torch.float16),
        }
        if not self.symmetric:
            specs["min"] = ((s.heads, *groups), torch.float16)
        return specs
