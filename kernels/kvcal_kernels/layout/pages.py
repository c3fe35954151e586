"""How a page of a paged cache holds the packed keys and values of its tokens.

A page is one block of 32 tokens in one layer: (H, S) bytes. A head's S bytes are its block of keys, then its block of
values, so a head is contiguous, and a page can be split over GPUs by heads. Within a block lie the parts that `parts`
names, each at a multiple of 16 bytes: of integers the words, then scales and zero points; of a grid the words, then 32
norms; of the transform codec the codes of each tier, then 32 norms. Where one norm stands for all heads of a token,
every head has a copy. S is a multiple of 32, so it is so many bytes for each token.

Only forms fit whose numbers depend on one token each: tokens come one by one, and a page may be shared by requests.
`token_masks` says which bits of a block are whose.

Letters: P pages, H kv heads, D head_dim, b = 32.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..packing import pack as pack_along
from . import grids
from .blocks import pack, pack_scales
from .form import BLOCK, Form
from .transform import CODE_BITS, PAIR_BYTES, TransformForm

ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Part:
    """A tensor of a block of one head: its name in a codec's packed tensors, shape, dtype, and first byte."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    at: int

    @property
    def size(self) -> int:
        """Bytes of the part."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PageForm:
    """How a page holds keys and values of one layer. ValueError says why a form does not fit pages."""

    key: Form | TransformForm
    value: Form | TransformForm

    def __post_init__(self) -> None:
        for form in (self.key, self.value):
            if (reason := unpaged(form)) is not None:
                raise ValueError(reason)

    @property
    def value_at(self) -> int:
        """Byte of a head at which its values begin."""
        return block_bytes(self.key)

    @property
    def head_bytes(self) -> int:
        """Bytes of a head in a page, a multiple of 32."""
        return _aligned(self.value_at + block_bytes(self.value), BLOCK)

    @property
    def stored_bits(self) -> float:
        """Bits of a page for each number that it stands for, copies of norms and padding included."""
        return 8 * self.head_bytes / (BLOCK * (self.key.dim + self.value.dim))


def unpaged(form: Form | TransformForm) -> str | None:
    """Return why pages cannot hold blocks of this form; None if they can."""
    if isinstance(form, TransformForm):
        return None
    if form.tiered:
        return (
            "keys in tiers: which channel has which bits is chosen for a group of tokens, so pages cannot grow by one"
        )
    if form.along_tokens:
        return f"{form.role}s in groups of {form.group} tokens: a group has one scale, so pages cannot grow by a token"
    if form.norm_heads != 1:
        return f"one norm over {form.norm_heads} heads: a page keeps each head's bytes apart"
    return None


@functools.cache
def parts(form: Form | TransformForm) -> tuple[Part, ...]:
    """Return the parts of a block of one head, in their order."""
    if isinstance(form, TransformForm):
        counts = [(f"codes{bits}", _code_shape(bits, count), torch.uint8) for bits, count in form.tiers]
        return _placed([*counts, ("norm", (BLOCK,), torch.float16)])
    second = ("norm", (BLOCK,), torch.float16) if form.vector else ("scale", (form.scales,), torch.float16)
    return _placed([("words", (form.words,), torch.int16), second])


def block_bytes(form: Form | TransformForm) -> int:
    """Return the bytes of a block of one head, with what aligns the one behind it."""
    last = parts(form)[-1]
    return _aligned(last.at + last.size)


def views(blocks: Tensor, form: Form | TransformForm) -> dict[str, Tensor]:
    """Return the parts of blocks (..., at least block_bytes) uint8 as tensors (..., *shape) that share their memory."""
    return {
        part.name: blocks[..., part.at : part.at + part.size].view(part.dtype).unflatten(-1, part.shape)
        for part in parts(form)
    }


@functools.cache
def token_masks(form: Form | TransformForm) -> Tensor:
    """Return the bits that belong to each token: uint8 (32, block_bytes). No bit is of two tokens, padding of none."""
    masks = torch.zeros(BLOCK, block_bytes(form), dtype=torch.uint8)
    whole = _ones(form)
    for name, part in views(masks, form).items():
        part.copy_(whole[name])
    return masks


def _ones(form: Form | TransformForm) -> dict[str, Tensor]:
    """Return the parts of 32 blocks, block t with all bits of token t and no other: (32, *shape)."""
    token = torch.eye(BLOCK, dtype=torch.int32)
    halves = (-token).to(torch.int16).view(torch.float16)  # all bits of a float16
    if isinstance(form, TransformForm):
        ones = {"norm": halves}
        for bits, count in form.tiers:
            rows = count * (2 if bits == 1 else 1)
            codes = (token * ((1 << CODE_BITS[bits]) - 1)).to(torch.uint8)
            ones[f"codes{bits}"] = pack_along(codes[:, None].expand(-1, rows, -1), CODE_BITS[bits])
        return ones
    width = form.dim // (form.vector or 1)
    codes = (token * ((1 << form.bits * (form.vector or 1)) - 1))[:, None, :, None].expand(-1, -1, -1, width)
    if form.vector:
        packed = pack(codes, halves[:, None, :, None], None, form, _any_grid(form))
        return {"words": packed.words[:, 0, 0], "norm": halves}
    scale = halves[:, None, :, None].expand(-1, -1, -1, form.dim // form.group)
    zero = None if form.symmetric else scale
    packed = pack(codes, torch.zeros_like(scale), None if zero is None else torch.zeros_like(scale), form)
    return {"words": packed.words[:, 0, 0], "scale": pack_scales(scale, zero, form)[:, 0, 0]}


def _any_grid(form: Form) -> grids.Grid:
    """Return a grid of the right size: the order of codes does not depend on its points."""
    points = torch.zeros(1 << form.bits * form.vector, form.vector)
    return grids.Grid(points, torch.ones(1, form.dim, dtype=torch.int8), torch.empty(0), 1.0)


def _code_shape(bits: int, count: int) -> tuple[int, ...]:
    return (count, PAIR_BYTES[bits]) if bits > 1 else (2 * count, PAIR_BYTES[1] // 2)


def _placed(named: list[tuple[str, tuple[int, ...], torch.dtype]]) -> tuple[Part, ...]:
    placed, at = [], 0
    for name, shape, dtype in named:
        placed.append(Part(name, shape, dtype, at))
        at = _aligned(at + placed[-1].size)
    return tuple(placed)


def _aligned(size: int, multiple: int = ALIGNMENT) -> int:
    return -(-size // multiple) * multiple
