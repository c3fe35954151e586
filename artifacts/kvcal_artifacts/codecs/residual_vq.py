"""Residual vector quantisation (VQKV): a head's vector is a sum of codewords, one from each stage's codebook.

The dimensions of a head are cut into bands, each with its own stages (keys: two bands, values: one). Encoding is
greedy: each stage takes the codeword nearest to the residual of the stages before (Eq. 1 and 2). Decoding adds the
codewords up (Eq. 3). Codebooks hold effective codewords in float16; for SimVQ that is W q, so the projections are no
longer needed. They are meant to be shared: layers, heads and devices' caches point to one tensor. `scale`, if there is
one, divides a head's channels before and multiplies them after: it costs no bits per token, and says in which units
nearness is measured.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor

from kvcal_kernels.packing import pack, packed_bytes, unpack
from kvcal_kernels.residual_vq.attention import Band, Coded, halves, longest
from kvcal_kernels.residual_vq.nearest import backend, residual_codes, residual_sum

from ..checked import HEAD_DIM, Listed, Schema, Whole, shown
from ..errors import KVCalError, NonFiniteError
from .base import EMPTY, AttentionKernel, Codec, Context, Packed, Role, Shape, Specs, on_device
from .constants import Constant, constants, once

LARGEST = 65504.0  # of float16: no sum of a few codewords reaches what is far beyond
LEAST = 2.0**-14  # float16's smallest normal number
ODD = 0x1E3779B97F4A7C15  # mixes bits when multiplied by, modulo 2^64
FEW = 4  # channels whose 16 bits are one number of 64
STAGES, CODEWORDS = 1024, 65536  # at most, of a band and of a stage


class ResidualVQSettings(TypedDict):
    """The settings of ResidualVQ in a bundle."""

    bands: list[list[int]]
    stages: list[int]
    sizes: list[int]


SETTINGS = Schema[ResidualVQSettings](
    {
        "bands": Listed(Listed(Whole(0, HEAD_DIM - 1), 1, HEAD_DIM, once=True), 1, HEAD_DIM),
        "stages": Listed(Whole(1, STAGES), 1, HEAD_DIM),
        "sizes": Listed(Whole(2, CODEWORDS), 1, HEAD_DIM),
    }
)
PAPER_CODE_BITS = 16  # VQKV Eq. 12 counts every code as one 16-bit number


class ResidualVQ(Codec):
    """A head's vector as the codes of one codeword per stage.

    bands: for each band the head's dimensions in it, all of them once. codebooks: for each band (S, k, d) float16, S
    stages of k codewords, k a power of two from 2 to 65536, d the band's dimensions. scale: (H, D) float16, or None.
    """

    name = "residual-vq"
    head_tensors = ("scale",)
    _derived: list[tuple[Tensor, Tensor]] | None = None  # Band.lengths and Band.half of each band, computed when needed

    def __init__(
        self,
        shape: Shape,
        role: Role,
        bands: Sequence[Sequence[int]],
        codebooks: Sequence[Tensor],
        scale: Tensor | None = None,
    ) -> None:
        super().__init__(shape, role)
        self.bands = tuple(tuple(band) for band in bands)
        self.codebooks = tuple(codebooks)
        self.scale = scale
        self._check()
        self.code_bits = tuple((book.shape[1] - 1).bit_length() for book in self.codebooks)
        order = torch.tensor([dim for band in self.bands for dim in band], device="cpu")
        self._into_bands, self._back = order, order.argsort()
        self._dims = tuple(torch.tensor(band, dtype=torch.int32, device="cpu") for band in self.bands)

    def _check(self) -> None:
        dims = sorted(dim for band in self.bands for dim in band)
        if len(dims) != self.shape.dim or dims != list(range(len(dims))) or not all(self.bands):
            raise KVCalError(
                f"residual-vq bands {shown(self.bands)}: need every dimension 0 to {self.shape.dim - 1} once"
            )
        if len(self.codebooks) != len(self.bands):
            raise KVCalError(f"residual-vq: {len(self.codebooks)} codebooks for {len(self.bands)} bands")
        for number, (band, book) in enumerate(zip(self.bands, self.codebooks, strict=True)):
            if book.ndim != 3 or book.shape[0] < 1 or book.shape[2] != len(band) or book.dtype != torch.float16:
                raise KVCalError(
                    f"residual-vq codebooks of band {number}: {tuple(book.shape)} {book.dtype}, needs (stages, "
                    f"codewords, {len(band)}) float16"
                )
            size = book.shape[1]
            if not 2 <= size <= 65536 or size & (size - 1):
                raise KVCalError(f"residual-vq codebooks of {size} codewords: allowed are powers of two, 2 to 65536")
        expected = (self.shape.heads, self.shape.dim)
        if self.scale is not None and (self.scale.shape != expected or self.scale.dtype != torch.float16):
            raise KVCalError(
                f"residual-vq scale {tuple(self.scale.shape)} {self.scale.dtype}: needs {expected} float16"
            )
        if self.scale is not None and not self.scale.is_meta and not bool((self.scale > 0).all()):
            raise KVCalError("residual-vq scale: must be positive in every channel")

    def check_range(self) -> None:
        """Raises KVCalError where a sum of codewords, times its channel's scale, can lie beyond float16, the dtype of
        some caches. Raises it, too, where a stage's codewords say nothing.
        """
        for number, (band, book) in enumerate(zip(self.bands, self.codebooks, strict=True)):
            reach = once(book, "reach", partial(_reach, book))
            if self.scale is not None:
                reach = reach * self.scale.amax(0).double()[list(band)].to(reach.device)
            if float(reach.max()) >= LARGEST:
                raise KVCalError(
                    f"residual-vq codec, codebooks.{number}: codewords add up to {float(reach.max()):.3g} in channel "
                    f"{band[int(reach.argmax())]}, must stay below {LARGEST:g}; divide the vectors by other units "
                    "(--scale), or keep this layer with another codec"
                )
            if why := once(book, "empty", partial(_empty_stage, book)):
                raise KVCalError(f"residual-vq codec, codebooks.{number}, {why}")

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        vectors = self._vectors(self.shape.blocks(x.float()))
        packed: Packed = {}
        for number, (part, book) in enumerate(zip(self._split(vectors), self.codebooks, strict=True)):
            codes = residual_codes(part.flatten(0, -2), book)
            by_stage = codes.view(len(book), *part.shape[:-1]).movedim(0, -2)  # (B, H, N, S, b)
            packed[f"codes.{number}"] = pack(by_stage, self.code_bits[number])
        return packed

    @property
    def encodes_by_kernel(self) -> bool:
        return all(backend(book, book) == "triton" for book in self.codebooks)

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        parts = []
        for number, (book, bits) in enumerate(zip(self.codebooks, self.code_bits, strict=True)):
            codes = unpack(packed[f"codes.{number}"], bits, self.shape.block).movedim(-2, 0)  # (S, B, H, N, b)
            parts.append(residual_sum(codes.flatten(1), book).unflatten(0, codes.shape[1:]))
        vectors = torch.cat(parts, -1)[..., self._back] if len(parts) > 1 else parts[0][..., self._back]
        if self.scale is not None:
            vectors = vectors * self._scale
        return vectors.flatten(2, 3)

    attention_kernel = AttentionKernel.CODEBOOK
    not_rotated = "vector codes"

    def attention_refusal(self, other: Codec) -> str | None:
        """Why the kernels over codes do not read them, which they do only where both codecs have codes."""
        if other.attention_kernel is not AttentionKernel.CODEBOOK:
            return super().attention_refusal(other)
        if self.role == "key" and len(self.bands) > 2:
            return f"residual-vq in {len(self.bands)} bands: the kernels take two at most"
        if (narrow := min(len(band) for band in self.bands)) < 16:
            return f"residual-vq, a band of {narrow} dimensions: the kernels take 16 at least"
        return None

    def encoding(self) -> str:
        books = [tuple(book.shape) for book in self.codebooks]
        return f"{self.outline()}, codebooks {books}, scaled {self.scale is not None}"

    def as_codes(self, packed: Packed) -> Coded:
        """Packed blocks as kvcal_kernels.residual_vq.attention takes them; its `fast().attend` reads them on a GPU."""
        if self._derived is None:
            self._derived = [(longest(book), halves(book)) for book in self.codebooks]
        bands = [
            Band(packed[f"codes.{number}"].contiguous(), book, dims, *derived)
            for number, (dims, book, derived) in enumerate(zip(self._dims, self.codebooks, self._derived, strict=True))
        ]
        return Coded(tuple(bands), self.shape.block, self.scale)

    def _vectors(self, blocks: Tensor) -> Tensor:
        """Blocks (B, H, N, b, D) in the units of the codebooks.

        Raises NonFiniteError for what no codeword is near to.
        """
        if self.scale is not None:
            blocks = blocks / self._scale
        if not bool((blocks.abs() <= LARGEST).all()):  # also for NaN
            raise NonFiniteError(
                f"residual-vq: a {self.role} of {float(blocks.abs().max()):.3g} lies beyond any float16 codeword "
                f"(largest {LARGEST:g}); check the model, or keep this layer with another codec"
            )
        return blocks

    @property
    def _scale(self) -> Tensor:
        """The scale, (1, H, 1, 1, D) float32."""
        assert self.scale is not None
        return self.scale.float()[None, :, None, None, :]

    def _split(self, vectors: Tensor) -> list[Tensor]:
        return list(vectors[..., self._into_bands].split([len(band) for band in self.bands], -1))

    def config(self) -> ResidualVQSettings:
        return {
            "bands": [list(band) for band in self.bands],
            "stages": [book.shape[0] for book in self.codebooks],
            "sizes": [book.shape[1] for book in self.codebooks],
        }

    def tensors(self) -> dict[str, Tensor]:
        codebooks = {f"codebooks.{number}": book for number, book in enumerate(self.codebooks)}
        return codebooks if self.scale is None else codebooks | {"scale": self.scale}

    @classmethod
    def from_state(
        cls, shape: Shape, role: Role, config: Mapping[str, object], tensors: dict[str, Tensor]
    ) -> ResidualVQ:
        settings = SETTINGS.read(config, "residual-vq codec")
        bands, stages, sizes = settings["bands"], settings["stages"], settings["sizes"]
        if not len(bands) == len(stages) == len(sizes):
            raise KVCalError(
                f"residual-vq codec: {len(bands)} bands, {len(stages)} stages, {len(sizes)} sizes: must be as many"
            )
        expected = {
            f"codebooks.{number}": Constant(torch.float16, (stages[number], sizes[number], len(band)))
            for number, band in enumerate(bands)
        }
        if "scale" in tensors:
            expected["scale"] = Constant(torch.float16, (shape.heads, shape.dim), positive=True)
        constants(tensors, expected, "residual-vq codec")
        codec = cls(
            shape, role, bands, [tensors[f"codebooks.{number}"] for number in range(len(bands))], tensors.get("scale")
        )
        codec.check_range()
        return codec

    def to(self, device: torch.device) -> ResidualVQ:
        if self._back.device == device and all(t.device == device for t in self.tensors().values()):
            return self
        twin = copy.copy(self)
        twin.codebooks = tuple(on_device(book, device) for book in self.codebooks)
        twin._derived = None
        twin.scale = None if self.scale is None else self.scale.to(device)
        twin._into_bands, twin._back = self._into_bands.to(device), self._back.to(device)
        twin._dims = tuple(dims.to(device) for dims in self._dims)
        return twin

    def tensor_specs(self) -> Specs:
        specs: Specs = {}
        for number, (book, bits) in enumerate(zip(self.codebooks, self.code_bits, strict=True)):
            specs[f"codes.{number}"] = (
                (self.shape.heads, book.shape[0], packed_bytes(self.shape.block, bits)),
                torch.uint8,
            )
        return specs

    def paper_bits(self) -> float:
        """Bits as VQKV's Eq. 12 counts them: every code is one 16-bit number, whatever the codebook's size."""
        return PAPER_CODE_BITS * sum(book.shape[0] for book in self.codebooks) / self.shape.dim

    def describe(self) -> str:
        bands = " + ".join(
            f"{len(band)} dims {book.shape[0]} x {book.shape[1]}"
            for band, book in zip(self.bands, self.codebooks, strict=True)
        )
        megabytes = sum(book.nbytes for book in self.codebooks) / 1e6
        scaled = "" if self.scale is None else ", scaled"
        return (
            f"{self.name}({bands}{scaled}; {self.bits_per_value():.4g} bits, {self.paper_bits():.4g} in the "
            f"paper's count; codebooks {megabytes:.3g} MB)"
        )


def _empty_stage(books: Tensor) -> str:
    """What is wrong with the first stage of codebooks (S, k, d) whose codewords say nothing, or ""."""
    reasons = ((stage, no_codewords(book)) for stage, book in enumerate(books))
    return next((f"stage {stage}: {why}" for stage, why in reasons if why), "")


def no_codewords(book: Tensor) -> str:
    """Why a stage's codewords (k, d) float16 are none that a fit would keep, in one clause; "" where they are.

    A smaller codebook does the same where no more than half of them differ, sizes being powers of two. Where all are
    below float16's normal numbers, their digits are lost.
    """
    size, ends = len(book), book.aminmax()
    largest = float(torch.maximum(-ends.min, ends.max)) + 0.0  # no -0
    if largest < LEAST:
        return f"no codeword's magnitude is above {largest:.3g}, needs {LEAST:.3g}, float16's smallest normal number"
    least = size // 2 + 1
    if book.shape[1] >= FEW and book.dtype == torch.float16:  # they mostly differ in their first channels alone
        first = (book[:, :FEW] + 0.0).contiguous().view(torch.int64)
        if len(first.unique()) >= least:
            return ""
    # rows as numbers modulo 2^64, which sort faster; two that share one by chance only lower the count
    digits = (book.float() + 0.0).view(torch.int32).long()  # one zero of either sign
    factors = torch.arange(1, book.shape[1] + 1, device=book.device) * ODD
    factors = (factors ^ (factors >> 29)) * ODD | 1
    distinct = len((digits * factors).sum(-1).unique())
    return "" if distinct >= least else f"{distinct} of {size} codewords differ, needs {least}"


def _reach(book: Tensor) -> Tensor:
    """The largest magnitude that a sum of one codeword per stage can have in each channel: float64 (d,)."""
    # float16 without its sign is as large as its bits, and the largest of integers is found in a quarter of the time
    bits = torch.stack([(stage.view(torch.int16) & 0x7FFF).amax(0) for stage in book])
    return bits.view(torch.float16).double().sum(0)
