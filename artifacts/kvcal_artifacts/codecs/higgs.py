"""HIGGS: randomised Hadamard rotation, one norm, nearest point of a grid optimal for the Gaussian (Malinovskii et al. 2024).

Per token: rotate, divide by the norm so that coordinates have unit variance, round d-tuples to the grid, store codes and
the norm in float16. Bits = log2(n) / d + 16 / norm width. The rotation runs per kv head by default (then keys can be
attended by rotating the query), or over the largest power of two dividing H * D as in the AQUA-KV paper (`rotation="token"`);
the norm spans the token by default, or one head.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from kvcal_kernels.hadamard import largest_power_of_two, rotate, signs, tree_sum, unrotate
from kvcal_kernels.lattice import lookup, nearest
from kvcal_kernels.packing import pack, packed_bytes, unpack
from safetensors.torch import load_file
from torch import Tensor

from ..errors import KVCalError
from .base import EMPTY, Codec, Context, Packed, Role, Shape, to_half

Span = Literal["head", "token"]
GRIDS = {(2, 16): 4, (2, 64): 6, (2, 256): 8, (4, 256): 8}  # (d, n): bits of one code


@cache
def gaussian_grid(d: int, n: int) -> Tensor:
    """float32 (n, d): our grid for N(0, I), made by codecs/make_grids.py."""
    if (d, n) not in GRIDS:
        raise KVCalError(f"HIGGS grid d={d} n={n}: allowed are {', '.join(f'd={a} n={b}' for a, b in GRIDS)}")
    return load_file(Path(__file__).with_name("grids.safetensors"))[f"d{d}n{n}"]


class Higgs(Codec):
    name = "higgs"

    def __init__(
        self,
        shape: Shape,
        role: Role,
        d: int = 2,
        n: int = 16,
        rotation: Span = "head",
        norm: Span = "token",
        seed: int = 0,
        grid: Tensor | None = None,
        sign: Tensor | None = None,
    ) -> None:
        super().__init__(shape, role)
        for what, span in (("rotation", rotation), ("norm", norm)):
            if span not in ("head", "token"):
                raise KVCalError(f"HIGGS {what} over {span!r}: allowed are 'head' and 'token'")
        self.d, self.n, self.rotation, self.norm, self.seed = d, n, rotation, norm, seed
        self.grid = gaussian_grid(d, n) if grid is None else grid.float()
        if shape.dim % d:
            raise KVCalError(f"HIGGS with d={d}: head_dim {shape.dim} is not a multiple of it")
        self.code_bits = GRIDS[d, n]
        width = shape.heads * shape.dim
        self.rotation_width = largest_power_of_two(shape.dim if rotation == "head" else width)
        self.sign = signs(width, seed) if sign is None else sign.float()

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        blocks = self.shape.blocks(x.float())
        flat = blocks.movedim(1, 3).flatten(3)  # (B, N, b, H * D)
        rotated = rotate(flat, self.sign, self.rotation_width)
        groups = rotated.unflatten(-1, (self._norms, -1))
        norm = to_half(tree_sum(groups * groups).sqrt(), "norm")  # (B, N, b, 1 or H)
        unit = groups.shape[-1] ** 0.5 / norm.float().clamp_min(1e-30)
        scaled = (groups * unit[..., None]).flatten(-2)
        codes = nearest(scaled.reshape(-1, self.d), self.grid)
        codes = codes.view(*flat.shape[:3], self.shape.heads, -1).movedim(3, 1)  # (B, H, N, b, D/d)
        if self.role == "value":
            codes = codes.transpose(-1, -2)
        return {"codes": pack(codes, self.code_bits), "norm": norm.movedim(3, 1).contiguous()}

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        count = self.shape.block if self.role == "value" else self.shape.dim // self.d
        codes = unpack(packed["codes"], self.code_bits, count)
        if self.role == "value":
            codes = codes.transpose(-1, -2)
        points = lookup(codes, self.grid).movedim(1, 3).flatten(3)  # (B, N, b, H * D)
        groups = points.unflatten(-1, (self._norms, -1))
        size = packed["norm"].float().movedim(1, 3) * groups.shape[-1] ** -0.5
        flat = unrotate((groups * size[..., None]).flatten(-2), self.sign, self.rotation_width)
        return flat.unflatten(-1, (self.shape.heads, -1)).movedim(3, 1).flatten(2, 3)

    @property
    def _norms(self) -> int:
        return 1 if self.norm == "token" else self.shape.heads

    def config(self) -> dict[str, Any]:
        return {"d": self.d, "n": self.n, "rotation": self.rotation, "norm": self.norm, "seed": self.seed}

    def tensors(self) -> dict[str, Tensor]:
        return {"grid": self.grid, "sign": self.sign.to(torch.int8)}

    @classmethod
    def from_state(cls, shape: Shape, role: Role, config: dict[str, Any], tensors: dict[str, Tensor]) -> Higgs:
        return cls(shape, role, **config, grid=tensors["grid"], sign=tensors["sign"])

    def to(self, device: torch.device) -> Higgs:
        self.grid, self.sign = self.grid.to(device), self.sign.to(device)
        return self

    def tensor_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        s = self.shape
        tuples = s.dim // self.d
        rows, count = (tuples, s.block) if self.role == "value" else (s.block, tuples)
        return {
            "codes": ((s.heads, rows, packed_bytes(count, self.code_bits)), torch.uint8),
            "norm": ((self._norms, s.block), torch.float16),
        }
