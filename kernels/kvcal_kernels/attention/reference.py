"""Decode attention over packed integers: the order in which blocks are stored, and what attention over them gives.

A block is 32 tokens of one kv head. Its codes are cut into pieces of 16 tokens by 16 channels, half block after half block; W
= 16 / bits pieces share a tile of 16 x 16 words of 16 bits, a field each, so that one word holds the same place of W pieces.
Key words lie [token][channel], value words [channel][token]: neighbours along what attention contracts share a 32-bit
register. 3 bits are two planes: tiles of the lower two bits, then tiles of the third, whose bit 2 f + o belongs to field f of
the even (o = 0) or odd tile of the first plane. Where pieces do not fill tiles, the rest is zero; where they fill half of the
last one, that is half a tile, 16 rows of 8 words, with columns from 8 on in the bits that the others leave: one bit further
of third bits (3 bits at head_dim 64), four further of 2 bits (at 96: fields 0, 1, 4, 5), eight further of tiers.

Keys in outer groups (not of 2 bits at 96): piece m is field m % W of tile m / W. Others: pieces that a product over 32 8-bit
numbers contracts together are a pair, the first of which lies in the low byte of a word, the second at the same place of the
high byte. Of a key a pair is slices 2 g and 2 g + 1 (of 16 channels) of a half block, number P = half * pairs + g; of a value
the two half blocks of a slice, P = slice. Pair P is fields P % (W / 2) and P % (W / 2) + W / 2 of tile P / (W / 2). Where a
key's half block has an odd number of pairs to tiles of two or four (4 and 2 bits at head_dim 96), half blocks take turns, P =
2 g + half: fields of the second lie as many bits beyond those of the first for all g, 4 and 2 there, 4 at head_dim 64 in 2 or
3 bits too, else none.

Scales and zero points are float16, x = code * scale + zero point; symmetric forms have none, their codes count from
-2^(bits - 1). Of groups along the contracted dimension they lie as columns of 16 (tokens of a key, channels of a value),
w = 4, 2 or 1 of them side by side: [columns / w][16][w]; of others as [columns / 2][8][scale, scale, zero point, zero point],
the 16 being neighbours along the contracted dimension.

Keys in tiers (MixKVQ): `full` channels in float16, `four` of 4 bits, the rest of 2, which ones a permutation of a group of
tokens says. Pieces of the first as they are [2 halves][pieces][16 tokens][16 channels], then tiles of 2-bit fields: half block
by half block two fields a piece of 4 bits (the lower bits in the first), then one a piece of 2 bits, an even number.

Grids (HIGGS, TurboQuant): see grids.py. Their scale is one float16 norm of a token, of its head or of all of them.

Letters: B batch, H kv heads, D head_dim, b = 32, N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ..hadamard import unrotate
from . import grids
from .grids import Grid
from .rope import Rope, recent_places

BLOCK = 32
PIECE = 16
HALF_TILE = PIECE * PIECE // 2  # words
BITS = (2, 3, 4, 8)
DIMS = (64, 96, 128, 256)
BYTE_DIMS = (64, 128, 256)  # of grids in bytes, whose words are of 64 channels


@dataclass(frozen=True)
class Form:
    """How the keys or values of a layer are stored. inner: groups lie along what attention contracts (channels of a key,
    tokens of a value: InnerQ), else along the other (tokens of a key's channel, channels of a value's token: KIVI). group:
    numbers that share a scale. symmetric: without zero points. ValueError names what cannot be stored.

    vector: 0, or how many numbers a code of a grid stands for; group, inner and symmetric then do not count: a token has one
    norm, over `norm_heads` kv heads, which is 1 or all of them. in_bytes: points are bytes times one step, and codes lie as
    products of bytes take them (grids.py). mixed: of a head_dim that is no power of two, the rotation ends with a cosine
    transform of its odd factor (hadamard.rotate), so that it mixes all channels of the head.

    full, four: channels of a key in the tiers above its 2 bits, multiples of 16, the same in every block; outer groups only.
    """

    role: Literal["key", "value"]
    dim: int
    bits: int
    group: int = 32
    inner: bool = True
    symmetric: bool = True
    vector: int = 0
    norm_heads: int = 1
    full: int = 0
    four: int = 0
    in_bytes: bool = False
    mixed: bool = False

    def __post_init__(self) -> None:
        if self.in_bytes and ((self.bits, self.vector) not in grids.IN_BYTES or self.dim not in BYTE_DIMS):
            raise ValueError(
                f"grid in bytes of {self.bits} bits, {self.vector} numbers a code, at head_dim {self.dim}: bits, numbers may "
                f"be {grids.IN_BYTES}, head_dim {BYTE_DIMS}"
            )
        if self.full or self.four:
            self._check_tiers()
        if self.vector:
            self._check_grid()
            return
        if self.norm_heads != 1:
            raise ValueError(f"integers with norms over {self.norm_heads} heads: only grids have norms")
        if self.bits not in BITS or self.dim not in DIMS:
            raise ValueError(f"{self.bits} bits at head_dim {self.dim}: bits may be {BITS}, head_dim {DIMS}")
        if self.symmetric and not self.inner:
            raise ValueError("symmetric groups must lie along the contracted dimension")
        if self.along_tokens and self.group % BLOCK:
            raise ValueError(f"groups of {self.group} tokens: must be a multiple of {BLOCK}")
        if not self.along_tokens and (self.group % PIECE or self.dim % self.group):
            raise ValueError(f"groups of {self.group} channels: must be a multiple of {PIECE} that divides {self.dim}")

    def _check_tiers(self) -> None:
        if (self.role, self.bits, self.inner, self.symmetric, self.vector) != ("key", 2, False, False, 0):
            raise ValueError(
                f"tiers of {self.role}s of {self.bits} bits: only keys of 2 bits in outer groups have tiers"
            )
        counts = (self.full, self.four)
        if min(counts) < 0 or any(count % PIECE for count in counts) or sum(counts) >= self.dim:
            raise ValueError(f"tiers of {counts} channels: must be multiples of {PIECE} that leave some of {self.dim}")

    @property
    def fields(self) -> int:
        """Fields of 2 bits that a half block of the lower tiers takes."""
        count = (self.dim - self.full + self.four) // PIECE
        return count + count % 2

    @property
    def factor(self) -> int:
        """Numbers that the rotation's cosine transform takes; 1: there is none."""
        return self.dim // grids.rotation_width(self.dim) if self.mixed else 1

    @property
    def tiered(self) -> bool:
        return self.full + self.four > 0

    def _check_grid(self) -> None:
        if (self.bits, self.vector) not in grids.GRIDS or self.dim not in DIMS:
            raise ValueError(
                f"grid of {self.bits} bits, {self.vector} numbers a code, at head_dim {self.dim}: bits, numbers may be "
                f"{grids.GRIDS}, head_dim {DIMS}"
            )
        if self.norm_heads < 1:
            raise ValueError(f"norms over {self.norm_heads} heads: must be 1 or all kv heads")

    @property
    def paired(self) -> bool:
        """Whether a register holds two channels of a token's value, not two tokens of a channel's."""
        return self.role == "value" and self.vector > 1

    @property
    def pieces(self) -> int:
        """Pieces of a half block, with empty ones where fields of both halves must lie at the same bits."""
        count = self.dim // PIECE
        return -(-count // 4) * 4 if self.bits == 3 and not self.vector else count

    @property
    def tiles(self) -> int:
        """Tiles of the only or of the lower plane."""
        if self.tiered:
            return -(-2 * self.fields // 8)
        if self.in_bytes:
            return grids.byte_tiles(self.dim // PIECE // self.vector, self.bits * self.vector)
        if self.vector:
            return grids.tiles(2 * self.pieces, self.bits)
        return -(-2 * self.pieces // (16 // self._plane))

    @property
    def words(self) -> int:
        """Words of 16 bits in a block."""
        third = -(-self.tiles // 2) if self.bits == 3 and not self.vector else 0
        tiles = (self.tiles + third) * PIECE * PIECE - (HALF_TILE if self.halved else 0)
        return BLOCK * self.full + tiles if self.tiered else tiles

    @property
    def halved(self) -> bool:
        """Whether the last tile is half of one."""
        if self.in_bytes:
            return grids.byte_halved(self.dim // PIECE // self.vector, self.bits * self.vector)
        if self.vector:
            upper = self.bits == 2 and not (self.role == "key" and self.vector == 4)
            return grids.halved(2 * self.pieces, self.bits) or (upper and self.pieces % 4 == 2)
        if self.bits == 3:
            return self.tiles % 2 == 1
        return self.bits == 2 and (self.fields if self.tiered else self.pieces) % 4 == 2

    @property
    def _beyond(self) -> int:
        """How many bits columns from 8 on lie beyond the others in a half tile of integers."""
        return 1 if self.bits == 3 else 4

    @property
    def _in_pairs(self) -> bool:
        """Whether pieces lie in pairs (`field_number`), not as they are counted."""
        return self.inner or self.role == "value" or (self.bits == 2 and self.halved)

    @property
    def scale_blocks(self) -> int:
        """Blocks that share scales."""
        return self.group // BLOCK if self.along_tokens else 1

    @property
    def along_tokens(self) -> bool:
        """Whether a group is of tokens of one channel."""
        return not self.vector and self.inner == (self.role == "value")

    @property
    def columns(self) -> int:
        """Columns of 16 scales or zero points: of a half block, or where groups lie along tokens of `scale_blocks`."""
        if self.vector:
            return 1
        if self.tiered:
            return (self.dim - self.full) // PIECE * 2
        return self.dim // (PIECE if self.along_tokens else self.group) * (1 if self.symmetric else 2)

    @property
    def scales(self) -> int:
        """Float16 numbers that belong to `scale_blocks` blocks."""
        return self.columns * PIECE * (1 if self.along_tokens else 2)

    @property
    def stored_bits(self) -> float:
        """Bits a number."""
        order = 8 / self.group if self.tiered else 0.0
        return 16 * (self.words + self.scales / self.scale_blocks / self.norm_heads) / (BLOCK * self.dim) + order

    @property
    def _plane(self) -> int:
        return 2 if self.bits == 3 else self.bits


def looked_up(keys: Form, values: Form) -> bool:
    """Whether either is a grid whose points are looked up."""
    return any(form.vector and not form.in_bytes for form in (keys, values))


def fits_bytes(keys: Form, values: Form) -> bool:
    """Whether products of 8-bit integers (attention/triton/int8) take both: integers in inner groups (16 key channels are half
    of what one contracts), in outer ones of four blocks and more of keys, as queries are rounded anew for each, and of all
    channels of values, as probabilities have one power of two; grids in bytes.
    """
    if keys.tiered or looked_up(keys, values):
        return False
    if keys.vector:
        fits = True
    elif keys.inner:
        fits = keys.group % 32 == 0 and keys.group <= 128
    else:  # both bytes of a word of one half block
        in_word = 8 // (2 if keys.bits == 3 else keys.bits)
        fits = keys.scale_blocks >= 4 and keys.dim % 64 == 0 and keys.pieces % (2 * in_word) == 0
        fits = fits and keys.bits * keys.dim < 8 * 256  # sums of all channels are below 2^22
    return fits and (bool(values.vector) or values.inner or values.group == values.dim)


@dataclass(frozen=True)
class _Fields(Form):
    """The tiles of lower tiers, as 2-bit codes of as many channels as they have fields."""

    def __post_init__(self) -> None:
        pass

    @property
    def _beyond(self) -> int:
        return 8

    @property
    def _in_pairs(self) -> bool:
        return False


@dataclass(frozen=True)
class Blocks:
    """words (B, H, N, form.words) int16; scale (B, H, N / form.scale_blocks, form.scales) float16, of grids
    (B, H / form.norm_heads, N, 32); grid of forms that have one; order uint8 (B, H, N / form.scale_blocks, D) of tiers: the
    channels, tier by tier.
    """

    form: Form
    words: Tensor
    scale: Tensor
    grid: Grid | None = None
    order: Tensor | None = None

    @cached_property
    def about(self) -> tuple[Any, ...]:
        """All that a kernel takes for granted of them but their numbers; see `about`."""
        grid = None if self.grid is None else (self.grid.vector, about(self.grid.table), about(self.grid.sign))
        order = None if self.order is None else about(self.order)
        # the form's name in its place: a string keeps its hash
        return repr(self.form), about(self.words), about(self.scale), grid, order

    @property
    def written(self) -> Tensor:
        """The words as kernels write them: of a grid in units of 32 bits."""
        return self.words.view(torch.int32) if self.form.vector else self.words


def field_number(half: Any, piece: Any, bits: int, pieces: int, inner: bool, value: bool) -> Any:
    """tile * W + field of piece number `piece` of half block `half` (int, or a tensor of them) of integers, whose half blocks
    have `pieces`. Kernels compute it, too, as they are compiled.
    """
    across = 8 // (2 if bits == 3 else bits)  # pairs of a tile
    if not (inner or value) and (bits >= 4 or pieces // 2 % across % 2 == 0):
        return half * pieces + piece
    if value:
        pair, second = piece, half
    elif pieces // 2 % across % 2:
        pair, second = piece // 2 * 2 + half, piece % 2
    else:
        pair, second = half * (pieces // 2) + piece // 2, piece % 2
    return pair // across * (2 * across) + second * across + pair % across


def _field_numbers(form: Form, device: torch.device) -> Tensor:
    """Which field has each piece: int64 (2 * form.pieces,)."""
    piece = torch.arange(2 * form.pieces, device=device)  # made there: a list would be copied from the host
    rest = form.bits, form.pieces, form.inner, form.role == "value"
    numbers: Tensor = field_number(piece // form.pieces, piece % form.pieces, *rest)
    return numbers


def about(x: Tensor) -> tuple[Any, ...]:
    """Shape, strides, dtype and device: what checks of a tensor look at, to tell one that was checked before."""
    return x.shape, x.stride(), x.dtype, x.device


def pack_tiers(
    full: Tensor, four: Tensor, two: Tensor, scale: Tensor, zero: Tensor, order: Tensor, form: Form
) -> Blocks:
    """full (B, H, T, form.full) float16; four, two: codes (B, H, T, channels) of their tiers; scale, zero float16
    (B, H, T / group, D - form.full); all with channels in the order of `order` (B, H, T / group, D).
    """
    exact = full.unflatten(2, (-1, 2, PIECE)).unflatten(-1, (-1, PIECE)).transpose(4, 5).flatten(3)
    wide = four.unflatten(-1, (-1, PIECE))
    codes = torch.cat([torch.stack([wide & 3, wide >> 2], -2).flatten(-3), two], -1)
    fields = torch.nn.functional.pad(codes, (0, form.fields * PIECE - codes.shape[-1]))
    inner = _Fields("key", form.fields * PIECE, 2, form.group, False, False)
    packed = pack(fields, scale, zero, inner)
    words = torch.cat([exact.contiguous().view(torch.int16), packed.words], -1)
    return Blocks(form, words, packed.scale, None, order.to(torch.uint8).contiguous())


def _decode_tiers(blocks: Blocks) -> Tensor:
    form = blocks.form
    exact, words = blocks.words.tensor_split((BLOCK * form.full,), -1)
    full = exact.contiguous().view(torch.float16).unflatten(-1, (2, -1, PIECE, PIECE)).transpose(4, 5)
    inner = _Fields("key", form.fields * PIECE, 2, form.group, False, False)
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
    """codes (B, H, T, D) integers in [0, 2^bits), T whole blocks. scale, zero float16: (B, H, T, D / group) where groups lie
    along channels, (B, H, T / group, D) along tokens; zero None where symmetric.

    Of a grid: codes (B, H, T, D / vector) in [0, n), scale (B, H / norm_heads, T, 1) the norms, zero None.
    """
    if form.vector:
        return _pack_grid(codes, scale, form, grid)
    empty = form.pieces - form.dim // PIECE
    wide = torch.nn.functional.pad(codes.to(torch.int32).unflatten(-1, (-1, PIECE)), (0, 0, 0, empty))
    wide = wide.unflatten(2, (-1, 2, PIECE)).transpose(4, 5)  # (B, H, N, 2, pieces, 16 tokens, 16 channels)
    wide = wide.flatten(3, 4)
    if form.role == "value":
        wide = wide.transpose(-1, -2)
    fields = 16 // form._plane
    if form._in_pairs:
        none = wide.new_zeros(*wide.shape[:3], form.tiles * fields, PIECE, PIECE)
        wide = none.index_copy_(3, _field_numbers(form, wide.device), wide)
    else:
        wide = torch.nn.functional.pad(wide, (0, 0, 0, 0, 0, form.tiles * fields - wide.shape[3]))
    wide = wide.unflatten(3, (form.tiles, fields))
    planes = [_gather(wide & ((1 << form._plane) - 1), form._plane)]
    if form.bits == 3:
        third = torch.nn.functional.pad(wide >> 2, (0, 0, 0, 0, 0, 0, 0, form.tiles % 2)).unflatten(3, (-1, 2))
        planes.append(_gather(third.transpose(4, 5).flatten(4, 5), 1))  # field f of even, odd tile: bits 2 f, 2 f + 1
    words = torch.cat(planes, 3).flatten(3)
    if form.halved:
        words = _folded(words, form._beyond)
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
        own = grids.byte_codes(blocks.words, len(places), form.bits * form.vector)
        codes: Tensor = torch.empty_like(own.flatten(3))
        codes[..., places.flatten()] = own.flatten(3)
        made: Tensor = codes.unflatten(-1, (BLOCK, -1))
        return made.flatten(2, 3)
    order = grids.order(form.role, form.dim, form.bits, form.vector, blocks.words.device)
    words = torch.nn.functional.pad(blocks.words, (0, HALF_TILE if form.bits == 2 and form.halved else 0))
    found = grids.ununits(words, len(order), form.bits).flatten(3)
    wide = found.new_empty(*found.shape[:-1], PIECE * form.dim + 1)
    wide[..., order.flatten()] = found
    wide = wide[..., :-1]
    along = _pairs_of_tokens(form)
    wide = wide.unflatten(-1, (BLOCK // 2, -1) if along else (BLOCK, -1))
    return grids.unpairs(wide, form.bits, form.vector, along).flatten(2, 3)


def _pairs_of_tokens(form: Form) -> bool:
    return form.role == "value" and form.vector == 1


def _gather(fields: Tensor, width: int) -> Tensor:
    """(..., tiles, fields, 16, 16) -> (..., tiles, 16, 16): field f at bit f * width."""
    shifts = torch.arange(fields.shape[-3], device=fields.device, dtype=torch.int32) * width
    return (fields << shifts[:, None, None]).sum(-3, dtype=torch.int32)


def _folded(words: Tensor, beyond: int) -> Tensor:
    """Words (..., n) of which the last tile becomes half of one: columns from 8 on, `beyond` bits further, in the others."""
    whole, last = words.tensor_split((-2 * HALF_TILE,), -1)
    left, right = last.unflatten(-1, (PIECE, 2, -1)).unbind(-2)
    return torch.cat([whole, (left | right << beyond).flatten(-2)], -1)


def _unfolded(words: Tensor, beyond: int) -> Tensor:
    """The other way round; bits of fields that are none may be anything."""
    whole, half = words.tensor_split((-HALF_TILE,), -1)
    half = half.unflatten(-1, (PIECE, -1))
    return torch.cat([whole, torch.cat([half, half >> beyond], -1).flatten(-2)], -1)


def _int16(words: Tensor) -> Tensor:
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)


def _laid_out(columns: Tensor, form: Form) -> Tensor:
    """(..., C, 16) -> as stored (..., C * 16)."""
    made: Tensor
    if form.inner:
        made = columns.unflatten(-2, (-1, together(form.columns))).transpose(-1, -2).flatten(-3)
    else:
        made = columns.unflatten(-2, (-1, 2)).unflatten(-1, (8, 2)).transpose(-2, -3).flatten(-4)
    return made


def _columns(stored: Tensor, form: Form) -> Tensor:
    """The other way round."""
    made: Tensor
    if form.inner:
        made = stored.unflatten(-1, (-1, PIECE, together(form.columns))).transpose(-1, -2).flatten(-3, -2)
    else:
        made = stored.unflatten(-1, (-1, 8, 2, 2)).transpose(-2, -3).flatten(-2).flatten(-3, -2)
    return made


def pack_scales(scale: Tensor, zero: Tensor | None, form: Form) -> Tensor:
    """scale, zero as `pack` takes them -> (B, H, N / form.scale_blocks, form.scales), in the order of Blocks.scale."""
    parts = [scale] if zero is None else [scale, zero]
    if form.along_tokens:  # (B, H, blocks, D): columns are pieces of 16 channels
        columns = torch.stack([x.unflatten(-1, (-1, PIECE)) for x in parts], 4).flatten(3, 4)
        return _laid_out(columns, form)
    columns = torch.stack([x.unflatten(2, (-1, 2, PIECE)).transpose(-1, -2) for x in parts], 5).flatten(4, 5)
    return _laid_out(columns, form).flatten(3)


def together(count: int) -> int:
    """How many of `count` columns of float16 lie side by side, so that one load of 64, 32 or 16 bits brings them."""
    return 4 if count % 4 == 0 else 2 if count % 2 == 0 else 1


def unpack(blocks: Blocks) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes (B, H, T, D) int32, scale and zero float16: the three that `pack` was given. Not of tiers: ValueError."""
    if blocks.form.tiered:
        raise ValueError("keys in tiers are more than codes, scales and zero points: decode gives their numbers")
    if blocks.form.vector:
        return _unpack_grid(blocks), blocks.scale.flatten(2)[..., None], None
    form, words = blocks.form, blocks.words.to(torch.int32) & 0xFFFF
    if form.halved:
        words = _unfolded(words, form._beyond)
    words = words.unflatten(-1, (-1, PIECE, PIECE))
    fields = _scatter(words[:, :, :, : form.tiles], form._plane)
    if form.bits == 3:
        third = _scatter(words[:, :, :, form.tiles :], 1).unflatten(4, (-1, 2)).transpose(4, 5).flatten(3, 4)
        fields = fields | third[:, :, :, : form.tiles] << 2
    pieces = fields.flatten(3, 4)
    chosen = _field_numbers(form, pieces.device) if form._in_pairs else slice(2 * form.pieces)
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
    """Blocks.scale -> scale and zero, as `pack` takes them."""
    kinds = 1 if form.symmetric else 2
    if form.along_tokens:
        columns = _columns(packed, form).unflatten(3, (-1, kinds))
        parts = [columns[:, :, :, :, i].flatten(3) for i in range(kinds)]
    else:
        columns = _columns(packed.unflatten(-1, (2, -1)), form).unflatten(4, (-1, kinds))
        parts = [columns[:, :, :, :, :, i].transpose(-1, -2).flatten(2, 4) for i in range(kinds)]
    return parts[0], parts[1] if kinds == 2 else None


def decode(blocks: Blocks) -> Tensor:
    """-> (B, H, N * 32, D) float32."""
    form = blocks.form
    if form.tiered:
        return _decode_tiers(blocks)
    codes, scale, zero = unpack(blocks)
    if blocks.grid is not None:
        rotated = blocks.grid.points[codes].flatten(-2) * scale.float()
        return unrotate(rotated, blocks.grid.sign[:, None], grids.rotation_width(form.dim), form.factor)
    offset = torch.full((), -(2.0 ** (form.bits - 1)), device=codes.device) if zero is None else None
    if form.along_tokens:
        wide = [x.float().repeat_interleave(form.group, 2) for x in (scale, zero) if x is not None]
    else:
        wide = [x.float().repeat_interleave(form.group, 3) for x in (scale, zero) if x is not None]
    if offset is not None:
        return (codes + offset) * wide[0]
    return codes * wide[0] + wide[1]


def attend(
    q: Tensor,
    keys: Blocks,
    values: Blocks,
    blocks: Tensor,
    sink: tuple[Tensor, Tensor, Tensor],
    recent: tuple[Tensor, Tensor, Tensor],
    scaling: float,
    packed_q: Tensor | None = None,
    ring: bool = False,
    rope: Rope | None = None,
) -> Tensor:
    """Attention of the newest tokens over a row's sink, packed blocks and recent tokens: the first two wholly, the last up to
    the query itself. The newest tokens are the last of `recent`, or of sink and recent together where nothing is packed.
    packed_q: queries for the packed keys, where these are stored divided by a factor of their channel.

    q (B, Hq, Q, D), Hq a multiple of H, Q <= the recent tokens of each row with packed blocks. blocks (B,) int32: how many
    count. sink, recent: keys (B, H, room, D), values alike, and counts (B,) int32. -> (B, Hq, Q, D) of q's dtype; computed
    in float32. ring: token j of `recent` is in slot (32 * blocks + j) mod room, as quantise.append puts it. rope: what turns
    keys that are all stored before RoPE; queries are after it.
    """
    if ring:
        index = ring_slots(blocks, recent[0].shape[2])[:, None, :, None].expand_as(recent[0])
        recent = (recent[0].gather(2, index), recent[1].gather(2, index), recent[2])
    ratio, queries = q.shape[1] // keys.words.shape[1], q.shape[2]
    stored = [sink[0].float(), decode(keys), recent[0].float()]
    if rope is not None:
        stored = [rope.turn(k, place) for k, place in zip(stored, _places(keys, blocks, sink, recent), strict=True)]
    parts = zip((q, q if packed_q is None else packed_q, q), stored, strict=True)
    products = [own.float() @ k.repeat_interleave(ratio, 1).transpose(-1, -2) for own, k in parts]
    v = torch.cat([sink[1].float(), decode(values), recent[1].float()], 2).repeat_interleave(ratio, 1)
    behind = queries - 1 - torch.arange(queries, device=q.device)
    reach = recent[2][:, None] - behind
    seen = [
        _seen(sink[0].shape[2], sink[2][:, None] + reach.clamp_max(0)),
        _seen(keys.words.shape[2] * BLOCK, (blocks * BLOCK)[:, None].expand(-1, queries)),
        _seen(recent[0].shape[2], reach),
    ]
    mask = torch.cat(seen, -1)[:, None]
    scores = (torch.cat(products, -1) * scaling).masked_fill(~mask, -torch.inf)
    kept = mask.any(-2).squeeze(1)[:, None, :, None]  # what lies in unused room may be anything
    return (scores.softmax(-1) @ v.masked_fill(~kept, 0)).to(q.dtype)


def _places(keys: Blocks, blocks: Tensor, sink: tuple[Tensor, ...], recent: tuple[Tensor, ...]) -> list[Tensor]:
    """Where sink, packed and recent tokens are in a row's runs: (1 or B, T) each."""
    room, device = sink[0].shape[2], blocks.device
    packed = torch.arange(keys.words.shape[2] * BLOCK, device=device) + -(-room // BLOCK) * BLOCK
    own = torch.arange(room, device=device)[None], packed[None]
    return [*own, recent_places(sink[2], room, blocks, recent[0].shape[2])]


def ring_slots(blocks: Tensor, room: int) -> Tensor:
    """Where token j of a row's recent window lies in a ring: blocks (B,), its packed ones -> (B, room) int64."""
    return (torch.arange(room, device=blocks.device) + blocks[:, None] * BLOCK) % room


def _seen(room: int, limit: Tensor) -> Tensor:
    """(B, Q) -> (B, Q, room)."""
    return torch.arange(room, device=limit.device) < limit[..., None]
