"""Transform coding: coordinates of a fitted basis, more bits for those that matter more, points of Gaussian grids.

Per token and head: y = (x - mean) A, divided by the token's RMS over all coded coordinates. Coordinate pair j is
rounded to the grid of its own bits (0 to 4), and x̂ = mean + ŷ B, B the inverse of A. Bits fall with j and are the same
for all heads, so every packed tensor has one shape. Calibration makes A and the bits (kvcal/methods/transform.py:
directions by query-weighted energy). A token's norm takes 16 / (H * D) bits per value.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import TypedDict

import torch
from torch import Tensor

from kvcal_kernels import transform
from kvcal_kernels.hadamard import root, tree_sum
from kvcal_kernels.lattice import lookup, nearest
from kvcal_kernels.layout import BLOCK, Basis, TransformBlocks, TransformForm
from kvcal_kernels.layout.transform import TRANSFORM_DIMS
from kvcal_kernels.packing import pack, packed_bytes, unpack

from ..checked import HEAD_DIM, Choice, Listed, Schema, Whole
from ..errors import KVCalError
from .base import EMPTY, Codec, Context, Packed, Role, Shape, Specs, by_fixed_rows
from .constants import Constant, constants, once
from .higgs_grids import GRID_MSE, GRIDS, gaussian_grid
from .refusals import to_half

GRID_OF = {2: (2, 16), 3: (2, 64), 4: (2, 256)}  # bits a coordinate -> (d, n); 1 bit: a sign
ONE_BIT = math.sqrt(2 / math.pi)  # what the sign of a unit Gaussian stands for (Max 1960)
MSE = {0: 1.0, 1: 1 - 2 / math.pi} | {bits: GRID_MSE[grid] for bits, grid in GRID_OF.items()}


class TransformSettings(TypedDict):
    """The settings of Transform in a bundle."""

    bits: list[int]
    gain: str


SETTINGS = Schema[TransformSettings](
    {"bits": Listed(Whole(0, max(MSE)), 1, HEAD_DIM), "gain": Choice(("mse", "debiased"))}
)
# rounding error of an encoder stored in float32, relative to the products that its inverse adds up
ROUNDING = 2.0**-21


class Transform(Codec):
    """Coordinates of a fitted basis, each in the bits that calibration gives it.

    bits: of each basis direction, not rising, in equal pairs. decoder: B, (H, D, D) float16, row j what a unit of
    coordinate j adds, coordinates being of about unit variance. encoder: the columns of its inverse for coded
    coordinates, float32. mean: (H, D) float16. gain: see Higgs. Without them channels are coded unmixed, in 2 bits.
    """

    name = "transform"

    def __init__(
        self,
        shape: Shape,
        role: Role,
        bits: list[int] | None = None,
        decoder: Tensor | None = None,
        mean: Tensor | None = None,
        gain: str = "mse",
        encoder: Tensor | None = None,
    ) -> None:
        super().__init__(shape, role)
        bits = [2] * shape.dim if bits is None else bits
        if decoder is None:
            decoder = torch.eye(shape.dim, dtype=torch.float32, device="cpu").expand(shape.heads, -1, -1)
        mean = torch.zeros(shape.heads, shape.dim, dtype=torch.float32, device="cpu") if mean is None else mean
        if len(bits) != shape.dim or any(type(b) is not int or b not in MSE for b in bits):
            raise KVCalError(f"transform codec, bits {bits}: needs {shape.dim} of 0 to 4")
        if sorted(bits, reverse=True) != bits or bits[::2] != bits[1::2] or not bits[0]:
            raise KVCalError("transform codec: bits must not rise, come in equal pairs, and not all be 0")
        if decoder.shape != (shape.heads, shape.dim, shape.dim) or mean.shape != (shape.heads, shape.dim):
            raise KVCalError(
                f"transform codec, decoder {tuple(decoder.shape)}, mean {tuple(mean.shape)}: needs "
                f"{(shape.heads, shape.dim, shape.dim)} and {(shape.heads, shape.dim)}"
            )
        if gain not in ("mse", "debiased"):
            raise KVCalError(f"transform codec, gain {gain!r}: allowed are 'mse' and 'debiased'")
        self.bits, self.decoder, self.mean, self.gain = list(bits), decoder.half().contiguous(), mean.half(), gain
        self.coded = sum(b > 0 for b in bits)
        self.encoder = self._inverse() if encoder is None else encoder.float()
        if self.encoder.shape != (shape.heads, shape.dim, self.coded):
            raise KVCalError(
                f"transform codec, encoder {tuple(self.encoder.shape)}: needs {(shape.heads, shape.dim, self.coded)}"
            )
        self._grids = {b: gaussian_grid(*GRID_OF[b]).to(decoder.device) for b in self.tiers if b > 1}
        self._form = self._find_form()
        self._basis: Basis | None = None  # of `basis`, after its first use
        self._kernel = False  # whether a kernel codes and packs

    def _inverse(self) -> Tensor:
        """The inverse of the decoder as it is stored: its columns of the coded coordinates."""
        encoder, singular = torch.linalg.inv_ex(self.decoder.cpu().double())
        if bool(singular.any()) or not bool(torch.isfinite(encoder).all()):
            raise KVCalError("transform codec: the decoder matrix has no inverse")
        inverse: Tensor = encoder[..., : self.coded].float().contiguous()
        return inverse.to(self.decoder.device)

    def of_heads(self, heads: slice) -> Codec | str:
        return "transform has one norm for all heads of a token"

    @property
    def tiers(self) -> dict[int, slice]:
        """The coordinates of each number of bits, most bits first."""
        slices: dict[int, slice] = {}
        for b in sorted(set(self.bits) - {0}, reverse=True):
            first = self.bits.index(b)
            slices[b] = slice(first, first + self.bits.count(b))
        return slices

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        blocks = self.shape.blocks(x.float()) - self.mean.float()[:, None, None]
        y = self._product(blocks, self.encoder)  # (B, H, N, b, coded)
        norm = to_half(root(tree_sum(self._token(y * y)) / (self.shape.heads * self.coded)), "norm")  # (B, N, b)
        if self._kernel and isinstance(self._form, TransformForm):
            codes = transform.fast().encode(y, norm.contiguous(), self._form, self._grids)
            return dict(zip((f"codes{b}" for b in self.tiers), codes, strict=True)) | {"norm": norm[:, None]}
        unit = y / norm.float().clamp_min(2.0**-24)[:, None, ..., None]
        packed = {f"codes{b}": self._pack(self._codes(unit[..., at], b), b) for b, at in self.tiers.items()}
        return packed | {"norm": norm[:, None]}

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        out: Tensor = self._stored(packed).flatten(2, 3) @ self.decoder[:, : self.coded].float()
        return out + self.mean.float()[:, None]

    def encode_decode(self, x: Tensor, context: Context = EMPTY) -> tuple[Packed, Tensor]:
        """The result of encode(x), and what it decodes to, both in products of a constant number of rows."""
        packed = self.encode(x, context)
        decoded = self._product(self._stored(packed), self.decoder[:, : self.coded].float())
        return packed, decoded.flatten(2, 3) + self.mean.float()[:, None]

    def _stored(self, packed: Packed) -> Tensor:
        """The stored coordinates: (B, H, N, b, coded) float32."""
        parts = [self._points(self._unpack(packed[f"codes{b}"], b), b) for b in self.tiers]
        norm: Tensor = packed["norm"]
        return torch.cat(parts, -1) * norm.float()[..., None]

    def _product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """The product of x (B, H, N, b, n) and matrix (H, n, m)."""
        rows = x.movedim(1, 0)
        products = by_fixed_rows(rows.flatten(1, 3), self.shape.block, lambda part: part @ matrix)
        wide: Tensor = torch.unflatten(products, 1, rows.shape[1:4])
        return wide.movedim(0, 1)

    @staticmethod
    def _token(y: Tensor) -> Tensor:
        """The coordinates y (B, H, N, b, n) of a token together: (B, N, b, H * n)."""
        return y.movedim(1, 3).flatten(3)

    def _gain_at(self, b: int) -> float:
        """The gain at b bits, as in Higgs: unbiased values, keys of the right length."""
        return 1.0 if self.gain == "mse" else float((1 - MSE[b]) ** (-0.5 if self.role == "key" else -1))

    def _codes(self, unit: Tensor, b: int) -> Tensor:
        """Codes of coordinates (..., n): (..., n) at 1 bit, else (..., n / 2)."""
        if b == 1:
            return (unit >= 0).to(torch.uint8)
        return nearest(unit.reshape(-1, 2), self._grids[b]).view(*unit.shape[:-1], unit.shape[-1] // 2)

    def _points(self, codes: Tensor, b: int) -> Tensor:
        points: Tensor = (codes.float() * 2 - 1) * ONE_BIT if b == 1 else lookup(codes, self._grids[b])
        return points * self._gain_at(b)

    def _pack(self, codes: Tensor, b: int) -> Tensor:
        """Codes (B, H, N, b, n) packed along tokens, which divide into bytes: (B, H, N, n, bytes)."""
        return pack(codes.transpose(-1, -2), self._code_bits(b))

    def _unpack(self, packed: Tensor, b: int) -> Tensor:
        return unpack(packed, self._code_bits(b), self.shape.block).transpose(-1, -2)

    @staticmethod
    def _code_bits(b: int) -> int:
        return 1 if b == 1 else GRIDS[GRID_OF[b]]

    def _find_form(self) -> TransformForm | str:
        """How the fused kernel reads the packed tensors; else why it cannot."""
        if self.shape.block != BLOCK:
            return f"transform in blocks of {self.shape.block}: the kernel reads blocks of {BLOCK}"
        if self.shape.dim not in TRANSFORM_DIMS:
            return f"transform at head_dim {self.shape.dim}: the kernel takes {TRANSFORM_DIMS}"
        four, three, two, one = (self.bits.count(b) // 2 for b in (4, 3, 2, 1))
        return TransformForm(self.role, self.shape.dim, (four, three, two, one))

    def fused(self) -> TransformForm | str:
        return self._form

    @property
    def basis(self) -> Basis:
        """What kernels decode by, built once."""
        if self._basis is None:
            signs = torch.tensor([[-ONE_BIT], [ONE_BIT]], dtype=torch.float32, device=self.decoder.device)
            points = {b: signs if b == 1 else self._grids[b] for b in self.tiers}
            self._basis = Basis(self.decoder, self.mean, points, {b: self._gain_at(b) for b in self.tiers})
        return self._basis

    def as_blocks(self, packed: Packed) -> TransformBlocks:
        if isinstance(self._form, str):
            raise KVCalError(f"codec {self.name!r}: {self._form}")
        codes = tuple(packed[f"codes{b}"].contiguous() for b in self.tiers)
        return TransformBlocks(self._form, codes, packed["norm"].contiguous(), self.basis)

    same_bytes_everywhere = False  # a matrix product makes coordinates, whose last bits are the device's

    def by_kernel(self) -> Transform:
        """Its bytes are those of torch on the same device: torch multiplies by the encoder, the kernel does the
        rest."""
        if isinstance(self._form, str):
            return self
        twin = copy.copy(self)
        twin._kernel = True
        return twin

    @property
    def encodes_by_kernel(self) -> bool:
        return self._kernel

    def config(self) -> TransformSettings:
        return {"bits": self.bits, "gain": self.gain}

    def tensors(self) -> dict[str, Tensor]:
        return {"decoder": self.decoder, "encoder": self.encoder, "mean": self.mean}

    @classmethod
    def from_state(
        cls, shape: Shape, role: Role, config: Mapping[str, object], tensors: dict[str, Tensor]
    ) -> Transform:
        settings = SETTINGS.read(config, "transform codec")
        heads, dim, coded = shape.heads, shape.dim, sum(b > 0 for b in settings["bits"])
        expected = {
            "decoder": Constant(torch.float16, (heads, dim, dim)),
            "encoder": Constant(torch.float32, (heads, dim, coded)),
            "mean": Constant(torch.float16, (heads, dim)),
        }
        constants(tensors, expected, "transform codec")
        codec = cls(shape, role, **settings, **tensors)
        codec.check_inverse()
        return codec

    def check_inverse(self) -> None:
        """Raises KVCalError unless the encoder is the decoder's inverse, up to its rounding to float32."""
        # the encoder is stored with its figure, so that no other tensor gets its id
        off, _ = once(self.decoder, id(self.encoder), lambda: (self._off_inverse(), self.encoder))
        if off > 1:
            raise KVCalError(
                f"transform codec, encoder: times the decoder it is {off:.3g} roundings off the identity, allowed is 1"
            )

    def _off_inverse(self) -> float:
        """The largest difference of decoder @ encoder from the identity, over what rounding the encoder explains."""
        decoder, encoder = self.decoder.double(), self.encoder.double()
        eye = torch.eye(self.shape.dim, self.coded, dtype=torch.float64, device=decoder.device)
        allowed = ROUNDING * (decoder.abs() @ encoder.abs()) + ROUNDING
        return float(((decoder @ encoder - eye).abs() / allowed).max())

    def tensor_specs(self) -> Specs:
        return dict(self._specs())

    def _specs(self) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
        s = self.shape
        for b, at in self.tiers.items():
            count = (at.stop - at.start) // (1 if b == 1 else 2)
            yield f"codes{b}", ((s.heads, count, packed_bytes(s.block, self._code_bits(b))), torch.uint8)
        yield "norm", ((1, s.block), torch.float16)

    def to(self, device: torch.device) -> Transform:
        if self.decoder.device == device:
            return self
        twin = copy.copy(self)
        twin.decoder, twin.mean, twin.encoder = (t.to(device) for t in (self.decoder, self.mean, self.encoder))
        twin._grids, twin._basis = {b: grid.to(device) for b, grid in self._grids.items()}, None
        return twin

    def describe(self) -> str:
        tiers = ", ".join(f"{at.stop - at.start} of {b}" for b, at in self.tiers.items())
        return f"transform({tiers} bits, gain={self.gain})"
