"""How packed keys and values lie in the pages of a paged cache.

A page is one block of 32 tokens. It lies [head][bytes]: for each kv head the bytes of a block of keys, then those of a
block of values. A block of the transform codec has the codes of its tiers, each tier from a multiple of 16 bytes on,
then the norms of its tokens, which every head has a copy of. Other blocks have their words, then their scales (norms of
grids; scales and zero points of integers), both in the order of `layout.Blocks`. A head's bytes are a multiple of 32,
so that a cache counts whole bytes for each token and head.

A page fills token by token. Words of a block hold bits of several tokens: `token_places` says which bits are whose.

Letters: P pages, H kv heads, D head_dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..packing import pack as pack_codes
from .blocks import AnyBlocks, Blocks, pack
from .form import BLOCK, Form
from .grids import Grid
from .transform import CODE_BITS, Basis, TransformBlocks, TransformForm

AnyForm: TypeAlias = Form | TransformForm
Constants: TypeAlias = Basis | Grid | None  # what decodes a block next to its bytes; None of integers


@dataclass(frozen=True)
class PageForm:
    """How keys and values of a layer are stored in pages. ValueError says why a form does not fit pages."""

    keys: AnyForm
    values: AnyForm

    def __post_init__(self) -> None:
        keys, values = self.keys, self.values
        if keys.role != "key" or values.role != "value" or keys.dim != values.dim:
            raise ValueError(f"pages of {keys} and {values}: must be keys and values of one head_dim")
        if isinstance(keys, TransformForm) != isinstance(values, TransformForm):
            raise ValueError(f"pages of {keys} and {values}: both or neither must be of the transform codec")
        for form in (keys, values):
            if reason := unfit(form):
                raise ValueError(f"pages of {form}: {reason}")

    @property
    def value_at(self) -> int:
        """Byte of a head at which its values begin."""
        return block_bytes(self.keys)

    @property
    def head_bytes(self) -> int:
        """Bytes of a head in a page, a multiple of 32."""
        return -(-(self.value_at + block_bytes(self.values)) // BLOCK) * BLOCK

    @property
    def token_bytes(self) -> int:
        """Bytes of a head for each token: a page takes 32 times as many."""
        return self.head_bytes // BLOCK

    def empty(self, pages: int, heads: int, device: torch.device | str = "cpu") -> Tensor:
        """Return pages full of zeros: uint8 (pages, heads, head_bytes)."""
        return torch.zeros(pages, heads, self.head_bytes, dtype=torch.uint8, device=device)


def unfit(form: AnyForm) -> str | None:
    """Return why blocks of a form cannot be filled token by token, each head by itself; None where they can."""
    if isinstance(form, TransformForm):
        return None
    if form.tiered:
        return "its channels are chosen for groups of tokens; pages fill one token at a time"
    if form.along_tokens:
        return "its groups are of tokens; pages fill one token at a time"
    if form.norm_heads > 1:
        return f"its norms span {form.norm_heads} heads; a page holds each head by itself"
    return None


def block_bytes(form: AnyForm) -> int:
    """Return the bytes of a block of keys or of values of one head: a multiple of 16."""
    return form.block_bytes if isinstance(form, TransformForm) else 2 * (form.words + form.scales)


def check_pages(pages: Tensor, form: PageForm) -> None:
    """Raise ValueError unless pages are uint8 (P, H, head_bytes) from multiples of 16 bytes on."""
    shape, strides = tuple(pages.shape), pages.stride()
    if pages.ndim != 3 or pages.dtype != torch.uint8 or shape[2] != form.head_bytes:
        raise ValueError(f"pages {shape} {pages.dtype}: must be (P, H, {form.head_bytes}) torch.uint8")
    if strides[2] != 1 or strides[0] % 16 or strides[1] % 16:
        raise ValueError(f"pages with strides {strides}: bytes of a head must be neighbours, others multiples of 16")
    if pages.data_ptr() % 16:
        raise ValueError(f"pages at address {pages.data_ptr():#x}: must begin at a multiple of 16")


def bytes_of(blocks: AnyBlocks) -> Tensor:
    """Return blocks as bytes of a page: uint8 (B, H, N, block_bytes)."""
    if isinstance(blocks, Blocks):
        return torch.cat([blocks.words.contiguous().view(torch.uint8), blocks.scale.contiguous().view(torch.uint8)], -1)
    heads, parts, at = blocks.words.shape[1], [], 0
    for (size, first), codes in zip(blocks.form.pieces, blocks.codes, strict=True):
        parts += [codes.flatten(3), codes.new_zeros(*codes.shape[:3], -size % 16)]
        at = first + size + -size % 16
    norm = blocks.norm.expand(-1, heads, -1, -1).contiguous().view(torch.uint8)
    assert at == blocks.form.norm_at
    return torch.cat([*parts, norm], -1)


def from_bytes(raw: Tensor, form: AnyForm, constants: Constants) -> AnyBlocks:
    """Return the blocks of uint8 (B, H, N, block_bytes). A transform's norms are then of each head, (B, H, N, 32)."""
    if isinstance(form, TransformForm):
        assert isinstance(constants, Basis)
        codes = []
        for (bits, count), (size, at) in zip(form.tiers, form.pieces, strict=True):
            codes.append(raw[..., at : at + size].unflatten(-1, (count if bits > 1 else 2 * count, -1)).contiguous())
        norm = raw[..., form.norm_at : form.block_bytes].contiguous().view(torch.float16)
        return TransformBlocks(form, tuple(codes), norm, constants)
    assert not isinstance(constants, Basis)
    words, scale = raw[..., : block_bytes(form)].tensor_split((2 * form.words,), -1)
    return Blocks(form, words.contiguous().view(torch.int16), scale.contiguous().view(torch.float16), constants)


def widths(form: AnyForm) -> list[int]:
    """Return the bits of each code of a token in a head, in the order of `pack`, or tier by tier."""
    if isinstance(form, TransformForm):
        return [CODE_BITS[bits] for bits, count in form.tiers for _ in range(count if bits > 1 else 2 * count)]
    return [form.bits * max(form.vector, 1)] * (form.dim // max(form.vector, 1))


def token_scales(form: AnyForm) -> int:
    """Return the float16 numbers of a token in a head: a norm, or scales and then zero points."""
    return 1 if isinstance(form, TransformForm) else form.scales // BLOCK


@functools.cache
def token_places(form: AnyForm) -> Tensor:
    """Return which bits of a block are of which token: int64 (32, bits of a token), code after code, lowest bit first,
    then its scales, 16 bits each. Bit b is bit b % 8 of byte b // 8.
    """
    each = widths(form)
    count, scales = sum(each), token_scales(form)
    names = torch.arange(BLOCK * count, device="cpu").view(BLOCK, count)
    length = 8 * block_bytes(form)
    name_at = torch.zeros(length, dtype=torch.int64, device="cpu")
    for k in range((BLOCK * count).bit_length()):
        name_at |= _bits(_probe(form, names >> k & 1, each)) << k
    used = _bits(_probe(form, torch.ones_like(names), each)) == 1
    places = torch.empty(BLOCK * count, dtype=torch.int64, device="cpu")
    places[name_at[used]] = torch.arange(length, device="cpu")[used]
    return torch.cat([places.view(BLOCK, count), _scale_places(form, scales)], 1)


def _probe(form: AnyForm, bits: Tensor, each: list[int]) -> Tensor:
    """Return the bytes of a block of one head whose codes have these bits (32, sum of widths), its scales zero."""
    codes, first = [], 0
    for width in each:
        shifts = torch.arange(width, device="cpu")
        codes.append((bits[:, first : first + width] << shifts).sum(-1))
        first += width
    wide = torch.stack(codes, -1)
    if isinstance(form, TransformForm):
        parts, before = [], 0
        for width, count in ((CODE_BITS[b], n if b > 1 else 2 * n) for b, n in form.tiers):
            packed = pack_codes(wide[:, before : before + count].T, width).flatten()
            parts += [packed, packed.new_zeros(-len(packed) % 16)]
            before += count
        return torch.cat([*parts, packed.new_zeros(2 * BLOCK)])
    scale, zero, grid = torch.zeros(1, 1, BLOCK, form.scales // BLOCK, dtype=torch.float16, device="cpu"), None, None
    if form.vector:
        points = torch.zeros(1 << form.bits * form.vector, form.vector, dtype=torch.float32, device="cpu")
        grid = Grid(points, torch.ones(1, form.dim, dtype=torch.int8, device="cpu"), points, 1.0)
    elif not form.symmetric:
        scale, zero = scale.chunk(2, -1)
    return bytes_of(pack(wide[None, None], scale, zero, form, grid)).flatten()


def _scale_places(form: AnyForm, count: int) -> Tensor:
    """Return the bits of a token's scales: int64 (32, 16 * count)."""
    if isinstance(form, TransformForm):
        order = torch.arange(BLOCK, device="cpu")[:, None]
        first = form.norm_at
    else:
        names = torch.arange(BLOCK * count, dtype=torch.int16, device="cpu")
        names = names.view(torch.float16)  # copied, never computed with
        codes = torch.zeros(1, 1, BLOCK, form.dim // max(form.vector, 1), dtype=torch.int32, device="cpu")
        grid, zero = None, None
        scale = names.view(1, 1, BLOCK, count)
        if form.vector:
            points = torch.zeros(1 << form.bits * form.vector, form.vector, dtype=torch.float32, device="cpu")
            grid = Grid(points, torch.ones(1, form.dim, dtype=torch.int8, device="cpu"), points, 1.0)
        elif not form.symmetric:
            scale, zero = scale.chunk(2, -1)
        stored = pack(codes, scale, zero, form, grid).scale.flatten().view(torch.int16).long()
        order = torch.empty_like(stored)
        order[stored] = torch.arange(len(stored), device="cpu")
        order, first = order.view(BLOCK, count), 2 * form.words
    return (8 * (first + 2 * order)[..., None] + torch.arange(16, device="cpu")).flatten(1)


def _bits(raw: Tensor) -> Tensor:
    """Return the bits of bytes (..., n): int64 (..., 8 n)."""
    return (raw[..., None].long() >> torch.arange(8, device=raw.device) & 1).flatten(-2)


def move_tokens(pages: Tensor, form: PageForm, keys: AnyBlocks, values: AnyBlocks, slots: Tensor) -> None:
    """Copy tokens of blocks of one row (1, H, N) to slots of pages (P, H, head_bytes), bit for bit. slots: for each
    token 32 * page + its place in the page, int64 (T,), T <= 32 N; negative where it goes nowhere. Bits of other tokens
    stay. ValueError names blocks of another form.
    """
    check_pages(pages, form)
    if (keys.form, values.form) != (form.keys, form.values):
        raise ValueError(f"blocks of {keys.form} and {values.form} for pages of {form.keys} and {form.values}")
    token = (slots >= 0).nonzero().flatten()
    place, (unique, page) = slots[token] % BLOCK, (slots[token] // BLOCK).unique(return_inverse=True)
    for blocks, at in ((keys, 0), (values, form.value_at)):
        places, raw = token_places(blocks.form).to(pages.device), bytes_of(blocks)[0]
        source = _bits(raw[:, token // BLOCK]).gather(2, places[token % BLOCK].expand(len(raw), -1, -1))
        stored = pages[unique, :, at : at + block_bytes(blocks.form)]
        wide = _bits(stored).transpose(1, 2).contiguous()  # (pages, bits, H)
        wide[page[:, None], places[place]] = source.permute(1, 2, 0)
        joined = wide.transpose(1, 2).unflatten(-1, (-1, 8)) << torch.arange(8, device=pages.device)
        pages[unique, :, at : at + block_bytes(blocks.form)] = joined.sum(-1).to(torch.uint8)


def move_blocks(pages: Tensor, form: PageForm, keys: AnyBlocks, values: AnyBlocks, table: Tensor) -> None:
    """Copy whole blocks (B, H, N) to pages; table: (B, N) int, the page of each block."""
    check_pages(pages, form)
    for blocks, at in ((keys, 0), (values, form.value_at)):
        raw = bytes_of(blocks).transpose(1, 2).flatten(0, 1)
        pages[table.flatten().long(), :, at : at + raw.shape[-1]] = raw


def read_pages(
    pages: Tensor, form: PageForm, table: Tensor, keys: Constants, values: Constants
) -> tuple[AnyBlocks, AnyBlocks]:
    """Return the blocks of keys and of values, (B, H, N), of pages that a table (B, N) int names. keys, values: the
    basis, or the grid, of each; None of integers.
    """
    check_pages(pages, form)
    raw = pages[table.long()].transpose(1, 2)
    cut = (raw[..., : form.value_at], raw[..., form.value_at : form.value_at + block_bytes(form.values)])
    return from_bytes(cut[0], form.keys, keys), from_bytes(cut[1], form.values, values)
