"""How blocks of the transform codec lie in memory, and what turns their codes into numbers.

A block is 32 tokens of one kv head. Coordinates of a fitted basis have 4, 3, 2 or 1 bits, most bits first, and come in
pairs. A pair of 4, 3 or 2 bits has one code of 8, 6 or 4 bits, a point of a Gaussian grid; a pair of 1 bit has two
signs. The codes of a pair lie along tokens as packing/reference.py packs them: token t of a code of 8 bits is byte t;
of 4 bits field t // 8 of word t % 8; of 6 bits that of the upper 4 bits, then field t // 4 of word t % 4 of the lower
2; of 1 bit field t // 2 of word t % 2. So a lane that has tokens 2 g, 2 g + 1, 16 + 2 g, 17 + 2 g of keys, or 4 t to
4 t + 3 and those 16 behind of values, finds each code of a tier in another byte of a register, whatever the tier.

x = mean + norm * (points @ decoder): the norm is one float16 of a token, of all heads.

Letters: B batch, H kv heads, D head_dim, N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ..packing import unpack
from . import grids
from .form import BLOCK

TIERS = (4, 3, 2, 1)  # bits of a coordinate
CODE_BITS = {4: 8, 3: 6, 2: 4, 1: 1}  # of a code: of a pair, of 1 bit of a coordinate
PAIR_BYTES = {4: 32, 3: 24, 2: 16, 1: 8}  # of a pair's 32 tokens
TRANSFORM_DIMS = (64, 128)
QUAD, OCTET = 4, 8  # pairs that a product of keys, and of values, takes from one tier


@dataclass(frozen=True)
class TransformForm:
    """How keys or values of the transform codec are stored: pairs of 4, 3, 2 and 1 bits a coordinate. ValueError names
    what cannot be read.
    """

    role: Literal["key", "value"]
    dim: int
    pairs: tuple[int, int, int, int]

    def __post_init__(self) -> None:
        if self.dim not in TRANSFORM_DIMS:
            raise ValueError(f"transform at head_dim {self.dim}: head_dim may be {TRANSFORM_DIMS}")
        if min(self.pairs) < 0 or not 0 < 2 * sum(self.pairs) <= self.dim:
            raise ValueError(f"transform with {self.pairs} pairs of {TIERS} bits: must be 1 to {self.dim // 2} in all")

    @property
    def tiers(self) -> tuple[tuple[int, int], ...]:
        """Bits and pairs of each tier that has some, most bits first."""
        return tuple((bits, count) for bits, count in zip(TIERS, self.pairs, strict=True) if count)

    @property
    def coded(self) -> int:
        """Coordinates that have bits."""
        return 2 * sum(self.pairs)

    @property
    def stored_bits(self) -> float:
        """Stored bits for each number, without the norm that all heads share."""
        return sum(8 * PAIR_BYTES[bits] * count for bits, count in self.tiers) / (BLOCK * self.dim)

    @cached_property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """Bytes of each tier's codes of a block, and where they begin in a block's bytes: multiples of 16. The norms of
        32 tokens are behind the last one.
        """
        pieces, at = [], 0
        for bits, count in self.tiers:
            size = PAIR_BYTES[bits] * count
            pieces.append((size, at))
            at += -(-size // 16) * 16
        return tuple(pieces)

    @property
    def norm_at(self) -> int:
        """Byte at which a block's norms begin."""
        size, at = self.pieces[-1]
        return at + -(-size // 16) * 16

    @property
    def block_bytes(self) -> int:
        """Bytes of a block with its norms, where it lies in one piece."""
        return self.norm_at + 2 * BLOCK

    def runs(self, width: int) -> tuple[tuple[int, int, int, int], ...]:
        """Cut each tier into runs of `width` pairs: bits, first pair in the tier, pairs, and the first one's number
        among all pairs. The last run of a tier may be shorter.
        """
        runs, before = [], 0
        for bits, count in self.tiers:
            runs += [(bits, i, min(width, count - i), before + i) for i in range(0, count, width)]
            before += count
        return tuple(runs)


@dataclass(frozen=True, eq=False)
class Basis:
    """What decodes coordinates: decoder (H, D, D) float16, row j the direction of coordinate j; mean (H, D) float16;
    points: by bits float32 (n, 2), or (2, 1) of 1 bit; gain: by bits what points are multiplied by.
    """

    decoder: Tensor
    mean: Tensor
    points: dict[int, Tensor]
    gain: dict[int, float]
    prepared: dict[object, Any] = field(default_factory=dict)  # what kernels make of it once

    def __deepcopy__(self, memo: dict[int, object]) -> Basis:
        """Return the basis itself: copies of a cache read the same constants."""
        return self


@dataclass(frozen=True, eq=False)
class TransformBlocks:
    """Packed blocks of a layer. codes: of each tier of the form uint8 (B, H, N, pairs, bytes), of 1 bit (B, H, N,
    coordinates, 4); norm float16 (B, 1, N, 32).
    """

    form: TransformForm
    codes: tuple[Tensor, ...]
    norm: Tensor
    basis: Basis

    @property
    def words(self) -> Tensor:
        """Codes of the first tier: their shape begins with (B, H, N)."""
        return self.codes[0]

    @cached_property
    def launch_key(self) -> tuple[object, ...]:
        """All that a kernel takes for granted of the blocks, without their numbers."""
        tensors = (*self.codes, self.norm, self.basis.decoder)
        return repr(self.form), *((x.shape, x.stride(), x.dtype, x.device) for x in tensors)

    def decoded(self) -> Tensor:
        """Return the numbers of blocks, (B, H, N * 32, D) float32."""
        y = torch.cat([self._points(bits, c) for (bits, _), c in zip(self.form.tiers, self.codes, strict=True)], -1)
        y = y * self.norm.float()[..., None]
        out: Tensor = y.flatten(2, 3) @ self.basis.decoder[:, : self.form.coded].float()
        return out + self.basis.mean.float()[:, None]

    def _points(self, bits: int, codes: Tensor) -> Tensor:
        numbers = unpack(codes, CODE_BITS[bits], BLOCK).transpose(-1, -2).int()
        return self.basis.points[bits][numbers].flatten(-2) * self.basis.gain[bits]


def check_transform(name: str, packed: TransformBlocks, batch: int, heads: int, capacity: int) -> None:
    """Raise ValueError where shapes or dtypes of blocks are not those of their form."""
    form, basis = packed.form, packed.basis
    shapes: dict[str, tuple[Tensor, tuple[int, ...], torch.dtype]] = {}
    shapes["norm"] = (packed.norm, (batch, 1, capacity, BLOCK), torch.float16)
    for (bits, count), codes in zip(form.tiers, packed.codes, strict=True):
        per_code: tuple[int, ...] = (count, PAIR_BYTES[bits]) if bits > 1 else (2 * count, PAIR_BYTES[1] // 2)
        shapes[f"codes of {bits} bits"] = codes, (batch, heads, capacity, *per_code), torch.uint8
    shapes["decoder"] = basis.decoder, (heads, form.dim, form.dim), torch.float16
    shapes["mean"] = basis.mean, (heads, form.dim), torch.float16
    for what, (x, shape, dtype) in shapes.items():
        if tuple(x.shape) != shape or x.dtype != dtype or not x.is_contiguous() or x.device != packed.norm.device:
            raise ValueError(f"{name}, {what}: {tuple(x.shape)} {x.dtype} on {x.device}; must be {shape} {dtype}, "
                             f"contiguous on {packed.norm.device}")  # fmt: skip


def half_points(points: Tensor) -> tuple[Tensor, float]:
    """Return points (n, 2) as float16 and the unit by which they must be multiplied (`grids.table_of`)."""
    times = grids.rounding_factor(points.cpu().double())
    return (points.double() * times).half().contiguous(), 1 / times
