"""Packed blocks of a layer: from codes and scales to words, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from ..hadamard import unrotate
from . import grids
from .form import BLOCK, HALF_TILE, PIECE, Form, TierFields, field_number, together
from .grids import Grid
from .transform import TransformBlocks


@dataclass(frozen=True)
class Blocks:
    """Packed blocks of a layer. words (B, H, N, form.words) int16; scale (B, H, N / form.scale_blocks, form.scales)
    float16, of grids (B, H / form.norm_heads, N, 32); grid of forms that have one; order uint8 (B, H, N /
    form.scale_blocks, D) of tiers: the channels, tier by tier.
    """

    form: Form
    words: Tensor
    scale: Tensor
    grid: Grid | None = None
    order: Tensor | None = None

    @cached_property
    def launch_key(self) -> tuple[object, ...]:
        """All that a kernel takes for granted of the blocks, without their numbers; see `launch_key`."""
        grid = (
            None if self.grid is None else (self.grid.vector, launch_key(self.grid.table), launch_key(self.grid.sign))
        )
        order = None if self.order is None else launch_key(self.order)
        # the form's name in its place: a string keeps its hash
        return repr(self.form), launch_key(self.words), launch_key(self.scale), grid, order

    @property
    def written(self) -> Tensor:
        """The words as kernels write them: of a grid in units of 32 bits."""
        return self.words.view(torch.int32) if self.form.vector else self.words


AnyBlocks: TypeAlias = Blocks | TransformBlocks


def _field_numbers(form: Form, device: torch.device) -> Tensor:
    """Return which field has each piece: int64 (2 * form.pieces,)."""
    piece = torch.arange(2 * form.pieces, device=device)  # made there: a list would be copied from the host
    rest = form.bits, form.pieces, form.inner, form.role == "value"
    return field_number(piece // form.pieces, piece % form.pieces, *rest)


def launch_key(x: Tensor) -> tuple[object, ...]:
    """Return shape, strides, dtype and device: what checks of a tensor look at, to tell one that was checked before."""
    return x.shape, x.stride(), x.dtype, x.device


def pack_tiers(
    full: Tensor, four: Tensor, two: Tensor, scale: Tensor, zero: Tensor, order: Tensor, form: Form
) -> Blocks:
    """Pack keys in tiers. full (B, H, T, form.full) float16; four, two: codes (B, H, T, channels) of their tiers;
    scale, zero float16 (B, H, T / group, D - form.full); all with channels in the order of `order` (B, H, T / group,
    D).
    """
    exact = full.unflatten(2, (-1, 2, PIECE)).unflatten(-1, (-1, PIECE)).transpose(4, 5).flatten(3)
    wide = four.unflatten(-1, (-1, PIECE))
    codes = torch.cat([torch.stack([wide & 3, wide >> 2], -2).flatten(-3), two], -1)
    fields = torch.nn.functional.pad(codes, (0, form.fields * PIECE - codes.shape[-1]))
    inner = TierFields("key", form.fields * PIECE, 2, form.group, False, False)
    packed = pack(fields, scale, zero, inner)
    words = torch.cat([exact.contiguous().view(torch.int16), packed.words], -1)
    return Blocks(form, words, packed.scale, None, order.to(torch.uint8).contiguous())


def _decode_tiers(blocks: Blocks) -> Tensor:
    form = blocks.form
    exact, words = blocks.words.tensor_split((BLOCK * form.full,), -1)
    full = exact.contiguous().view(torch.float16).unflatten(-1, (2, -1, PIECE, PIECE)).transpose(4, 5)
    inner = TierFields("key", form.fields * PIECE, 2, form.group, False, False)
    fields = unpack(Blocks(inner, words, blocks.scale))[0]
    low, high = fields[..., : 2 * form.four].unflatten(-1, (-1, 2, PIECE)).unbind(-2)
    two = fields[..., 2 * form.four :][..., : form.dim - form.full - form.four]
    codes = torch.cat([(low | high << 2).flatten(-2), two], -1)
    scale, zero = unpack_scales(blocks.scale, form)
    assert zero is not None and blocks.order is not None
    lower = codes * scale.float().repeat_interleave(form.group, 2) + zero.float().repeat_interleave(form.group, 2)
    wide = torch.cat([full.flatten(-2).flatten(2, 4).float(), lower], -1)
    return torch.empty_like(wide).scatter_(-1, blocks.order.long().repeat_interleave(form.group, 2), wide)


def pack(codes: Tensor, scale: Tensor, zero: Tensor | None, form: Form, grid: Grid | None = None) -> Blocks:
    """Pack codes (B, H, T, D), integers in [0, 2^bits), T whole blocks. scale, zero float16: (B, H, T, D / group) where
    groups lie along channels, (B, H, T / group, D) along tokens; zero None where symmetric.

    Grids: codes (B, H, T, D / vector) in [0, n), scale (B, H / norm_heads, T, 1) the norms, zero None.
    """
    if form.vector:
        return _pack_grid(codes, scale, form, grid)
    empty = form.pieces - form.dim // PIECE
    wide = torch.nn.functional.pad(codes.to(torch.int32).unflatten(-1, (-1, PIECE)), (0, 0, 0, empty))
    wide = wide.unflatten(2, (-1, 2, PIECE)).transpose(4, 5)  # (B, H, N, 2, pieces, 16 tokens, 16 channels)
    wide = wide.flatten(3, 4)
    if form.role == "value":
        wide = wide.transpose(-1, -2)
    fields = 16 // form.plane_bits
    if form.pieces_in_pairs:
        none = wide.new_zeros(*wide.shape[:3], form.tiles * fields, PIECE, PIECE)
        wide = none.index_copy_(3, _field_numbers(form, wide.device), wide)
    else:
        wide = torch.nn.functional.pad(wide, (0, 0, 0, 0, 0, form.tiles * fields - wide.shape[3]))
    wide = wide.unflatten(3, (form.tiles, fields))
    planes = [_gather(wide & ((1 << form.plane_bits) - 1), form.plane_bits)]
    if form.bits == 3:
        third = torch.nn.functional.pad(wide >> 2, (0, 0, 0, 0, 0, 0, 0, form.tiles % 2)).unflatten(3, (-1, 2))
        planes.append(_gather(third.transpose(4, 5).flatten(4, 5), 1))  # field f of even, odd tile: bits 2 f, 2 f + 1
    words = torch.cat(planes, 3).flatten(3)
    if form.halved:
        words = _folded(words, form.half_tile_shift)
    return Blocks(form, _int16(words), pack_scales(scale, zero, form))


def _pack_grid(codes: Tensor, norm: Tensor, form: Form, grid: Grid | None) -> Blocks:
    if grid is None or grid.points.shape != (1 << form.bits * form.vector, form.vector):
        raise ValueError(f"blocks of {form}: need their grid, {1 << form.bits * form.vector} points of {form.vector}")
    if form.in_bytes:
        order = grids.byte_order(form.role, form.dim, form.vector, codes.device)
        words = grids.byte_words(codes.unflatten(2, (-1, BLOCK)).flatten(3)[..., order], form.bits * form.vector)
        return Blocks(form, words.contiguous(), norm[..., 0].unflatten(2, (-1, BLOCK)).contiguous(), grid)
    wide = grids.pairs(codes.unflatten(2, (-1, BLOCK)).int(), form.bits, form.vector, _pairs_of_tokens(form)).flatten(3)
    order = grids.order(form.role, form.dim, form.bits, form.vector, codes.device)
    words = grids.units(torch.nn.functional.pad(wide, (0, 1))[..., order], form.bits)
    words = words[..., : form.words].contiguous()  # of half a tile of 2 bits the first 8 rows
    return Blocks(form, words, norm[..., 0].unflatten(2, (-1, BLOCK)).contiguous(), grid)


def _unpack_grid(blocks: Blocks) -> Tensor:
    form = blocks.form
    if form.in_bytes:
        places = grids.byte_order(form.role, form.dim, form.vector, blocks.words.device)
        codes_in_bytes = grids.byte_codes(blocks.words, len(places), form.bits * form.vector)
        codes: Tensor = torch.empty_like(codes_in_bytes.flatten(3))
        codes[..., places.flatten()] = codes_in_bytes.flatten(3)
        by_token: Tensor = codes.unflatten(-1, (BLOCK, -1))
        return by_token.flatten(2, 3)
    order = grids.order(form.role, form.dim, form.bits, form.vector, blocks.words.device)
    words = torch.nn.functional.pad(blocks.words, (0, HALF_TILE if form.bits == 2 and form.halved else 0))
    pairs = grids.ununits(words, len(order), form.bits).flatten(3)
    wide = pairs.new_empty(*pairs.shape[:-1], PIECE * form.dim + 1)
    wide[..., order.flatten()] = pairs
    wide = wide[..., :-1]
    along = _pairs_of_tokens(form)
    wide = wide.unflatten(-1, (BLOCK // 2, -1) if along else (BLOCK, -1))
    return grids.unpairs(wide, form.bits, form.vector, along).flatten(2, 3)


def _pairs_of_tokens(form: Form) -> bool:
    return form.role == "value" and form.vector == 1


def _gather(fields: Tensor, width: int) -> Tensor:
    """Join fields (..., tiles, fields, 16, 16) -> (..., tiles, 16, 16): field f at bit f * width."""
    shifts = torch.arange(fields.shape[-3], device=fields.device, dtype=torch.int32) * width
    return (fields << shifts[:, None, None]).sum(-3, dtype=torch.int32)


def _folded(words: Tensor, shift: int) -> Tensor:
    """Return words (..., n) whose last tile becomes half of one: columns from 8 on, `shift` bits further, in the
    others.
    """
    whole, last = words.tensor_split((-2 * HALF_TILE,), -1)
    low, right = last.unflatten(-1, (PIECE, 2, -1)).unbind(-2)
    return torch.cat([whole, (low | right << shift).flatten(-2)], -1)


def _unfolded(words: Tensor, shift: int) -> Tensor:
    """Invert `_folded`; bits of fields that do not exist may be anything."""
    whole, half = words.tensor_split((-HALF_TILE,), -1)
    half = half.unflatten(-1, (PIECE, -1))
    return torch.cat([whole, torch.cat([half, half >> shift], -1).flatten(-2)], -1)


def _int16(words: Tensor) -> Tensor:
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)


def _laid_out(columns: Tensor, form: Form) -> Tensor:
    """Return columns (..., C, 16) as they are stored (..., C * 16)."""
    stored: Tensor
    if form.inner:
        stored = columns.unflatten(-2, (-1, together(form.columns))).transpose(-1, -2).flatten(-3)
    else:
        stored = columns.unflatten(-2, (-1, 2)).unflatten(-1, (8, 2)).transpose(-2, -3).flatten(-4)
    return stored


def _columns(stored: Tensor, form: Form) -> Tensor:
    """Invert `_laid_out`."""
    columns: Tensor
    if form.inner:
        columns = stored.unflatten(-1, (-1, PIECE, together(form.columns))).transpose(-1, -2).flatten(-3, -2)
    else:
        columns = stored.unflatten(-1, (-1, 8, 2, 2)).transpose(-2, -3).flatten(-2).flatten(-3, -2)
    return columns


def pack_scales(scale: Tensor, zero: Tensor | None, form: Form) -> Tensor:
    """Pack scale and zero as `pack` takes them -> (B, H, N / form.scale_blocks, form.scales), in the order of
    Blocks.scale.
    """
    parts = [scale] if zero is None else [scale, zero]
    if form.along_tokens:  # (B, H, blocks, D): columns are pieces of 16 channels
        columns = torch.stack([x.unflatten(-1, (-1, PIECE)) for x in parts], 4).flatten(3, 4)
        return _laid_out(columns, form)
    columns = torch.stack([x.unflatten(2, (-1, 2, PIECE)).transpose(-1, -2) for x in parts], 5).flatten(4, 5)
    return _laid_out(columns, form).flatten(3)


def unpack(blocks: Blocks) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes (B, H, T, D) int32, scale and zero float16: the arguments of `pack`. ValueError for tiers."""
    if blocks.form.tiered:
        raise ValueError("keys in tiers are more than codes, scales and zero points: decode gives their numbers")
    if blocks.form.vector:
        return _unpack_grid(blocks), blocks.scale.flatten(2)[..., None], None
    form, words = blocks.form, blocks.words.to(torch.int32) & 0xFFFF
    if form.halved:
        words = _unfolded(words, form.half_tile_shift)
    words = words.unflatten(-1, (-1, PIECE, PIECE))
    fields = _scatter(words[:, :, :, : form.tiles], form.plane_bits)
    if form.bits == 3:
        third = _scatter(words[:, :, :, form.tiles :], 1).unflatten(4, (-1, 2)).transpose(4, 5).flatten(3, 4)
        fields = fields | third[:, :, :, : form.tiles] << 2
    pieces = fields.flatten(3, 4)
    chosen = _field_numbers(form, pieces.device) if form.pieces_in_pairs else slice(2 * form.pieces)
    pieces = pieces[:, :, :, chosen]
    if form.role == "value":
        pieces = pieces.transpose(-1, -2)
    pieces = pieces.unflatten(3, (2, form.pieces)).transpose(4, 5)  # (B, H, N, 2, 16 tokens, pieces, 16)
    codes = pieces.flatten(2, 4).flatten(-2)[..., : form.dim]
    return codes, *unpack_scales(blocks.scale, form)


def _scatter(words: Tensor, width: int) -> Tensor:
    shifts = torch.arange(16 // width, device=words.device, dtype=torch.int32) * width
    return (words[..., None, :, :] >> shifts[:, None, None]) & ((1 << width) - 1)


def unpack_scales(packed: Tensor, form: Form) -> tuple[Tensor, Tensor | None]:
    """Return scale and zero of Blocks.scale, as `pack` takes them."""
    kinds = 1 if form.symmetric else 2
    if form.along_tokens:
        columns = _columns(packed, form).unflatten(3, (-1, kinds))
        parts = [columns[:, :, :, :, i].flatten(3) for i in range(kinds)]
    else:
        columns = _columns(packed.unflatten(-1, (2, -1)), form).unflatten(4, (-1, kinds))
        parts = [columns[:, :, :, :, :, i].transpose(-1, -2).flatten(2, 4) for i in range(kinds)]
    return parts[0], parts[1] if kinds == 2 else None


def decode(blocks: AnyBlocks) -> Tensor:
    """Return the numbers of blocks, (B, H, N * 32, D) float32."""
    if isinstance(blocks, TransformBlocks):
        return blocks.decoded()
    form = blocks.form
    if form.tiered:
        return _decode_tiers(blocks)
    codes, scale, zero = unpack(blocks)
    if blocks.grid is not None:
        rotated = blocks.grid.points[codes].flatten(-2) * scale.float()
        return unrotate(rotated, blocks.grid.sign[:, None], grids.rotation_width(form.dim), form.factor, form.mix)
    offset = (
        torch.full((), -(2.0 ** (form.bits - 1)), dtype=torch.float32, device=codes.device) if zero is None else None
    )
    if form.along_tokens:
        wide = [x.float().repeat_interleave(form.group, 2) for x in (scale, zero) if x is not None]
    else:
        wide = [x.float().repeat_interleave(form.group, 3) for x in (scale, zero) if x is not None]
    if offset is not None:
        return (codes + offset) * wide[0]
    return codes * wide[0] + wide[1]
