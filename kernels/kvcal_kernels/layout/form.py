"""How the codes and scales of a block lie in memory.

A block is 32 tokens of one kv head. Its codes are cut into pieces of 16 tokens by 16 channels, half block after half
block; W = 16 / bits pieces share a tile of 16 x 16 words of 16 bits, a field each, so that one word holds the same
place of W pieces. Key words lie [token][channel], value words [channel][token]: neighbours along what attention
contracts share a 32-bit register. 3 bits are two planes: tiles of the lower two bits, then tiles of the third, whose
bit 2 f + o belongs to field f of the even (o = 0) or odd tile of the first plane. Where pieces do not fill tiles, the
rest is zero; where they fill half of the last one, that is half a tile, 16 rows of 8 words, with columns from 8 on in
the bits that the others leave: one bit further of third bits (3 bits at head_dim 64), four further of 2 bits (at 96:
fields 0, 1, 4, 5), eight further of tiers.

Keys in outer groups (not of 2 bits at 96): piece m is field m % W of tile m / W. Others: pieces that a product over 32
8-bit numbers contracts together are a pair, the first of which lies in the low byte of a word, the second at the same
place of the high byte. Of a key a pair is slices 2 g and 2 g + 1 (of 16 channels) of a half block, number P = half *
pairs + g; of a value the two half blocks of a slice, P = slice. Pair P is fields P % (W / 2) and P % (W / 2) + W / 2 of
tile P / (W / 2). Where a key's half block has an odd number of pairs to tiles of two or four (4 and 2 bits at head_dim
96), half blocks alternate, P = 2 g + half: fields of the second lie as many bits beyond those of the first for all g,
4 and 2 there, 4 at head_dim 64 in 2 or 3 bits too, else none.

Scales and zero points are float16, x = code * scale + zero point; symmetric forms have none, their codes count from
-2^(bits - 1). Of groups along the contracted dimension they lie as columns of 16 (tokens of a key, channels of a
value), w = 4, 2 or 1 of them side by side: [columns / w][16][w]; of others as [columns / 2][8][scale, scale, zero
point, zero point], the 16 being neighbours along the contracted dimension.

Keys in tiers (MixKVQ): `full` channels in float16, `four` of 4 bits, the rest of 2, which ones a permutation of a group
of tokens says. Pieces of the first as they are [2 halves][pieces][16 tokens][16 channels], then tiles of 2-bit fields:
half block by half block two fields a piece of 4 bits (the lower bits in the first), then one a piece of 2 bits, an even
number.

Grids (HIGGS, TurboQuant): see grids.py. Their scale is one float16 norm of a token, of its head or of all of them.

Letters: B batch, H kv heads, D head_dim, b = 32, N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from torch import Tensor

from ..hadamard import Mix
from . import grids

BLOCK = 32
PIECE = 16
HALF_TILE = PIECE * PIECE // 2  # words
BITS = (2, 3, 4, 8)  # what another width needs: docs/adding-a-method.md, "A width of bits"
DIMS = (64, 96, 128, 256)
BYTE_DIMS = (64, 128, 256)  # of grids in bytes, whose words are of 64 channels


@dataclass(frozen=True)
class Form:
    """How the keys or values of a layer are stored. inner: groups lie along what attention contracts (channels of a
    key, tokens of a value: InnerQ), else along the other (tokens of a key's channel, channels of a value's token:
    KIVI). group: numbers that share a scale. symmetric: without zero points. ValueError names what cannot be stored.

    vector: 0, or how many numbers a code of a grid stands for; group, inner and symmetric then do not count: a token
    has one norm, over `norm_heads` kv heads, which is 1 or all of them. in_bytes: points are bytes times one step, and
    codes lie as 8-bit products take them (grids.py). mix: of a head_dim that is no power of two, how the rotation mixes
    its odd factor (hadamard.rotate): by a Hadamard matrix, by a cosine transform, or not at all.

    full, four: channels of a key in the tiers above its 2 bits, multiples of 16, the same in every block; outer groups
    only.
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
    mix: Mix = "none"

    def __post_init__(self) -> None:
        if self.in_bytes and ((self.bits, self.vector) not in grids.IN_BYTES or self.dim not in BYTE_DIMS):
            raise ValueError(
                f"grid in bytes of {self.bits} bits, {self.vector} numbers a code, at head_dim {self.dim}: bits, "
                "numbers may "
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

    @cached_property
    def fields(self) -> int:
        """Fields of 2 bits that a half block of the lower tiers takes."""
        count = (self.dim - self.full + self.four) // PIECE
        return count + count % 2

    @property
    def factor(self) -> int:
        """The odd factor of head_dim that the rotation mixes; 1 where it mixes none."""
        return 1 if self.mix == "none" else self.dim // grids.rotation_width(self.dim)

    @cached_property
    def tiered(self) -> bool:
        """Keys in three tiers of precision."""
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
        """A register holds two channels of a token's value, not two tokens of a channel's."""
        return self.role == "value" and self.vector > 1

    @cached_property
    def pieces(self) -> int:
        """Pieces of a half block, with empty ones where fields of both halves must lie at the same bits."""
        count = self.dim // PIECE
        return -(-count // 4) * 4 if self.bits == 3 and not self.vector else count

    @cached_property
    def tiles(self) -> int:
        """Tiles of the only or of the lower plane."""
        if self.tiered:
            return -(-2 * self.fields // 8)
        if self.in_bytes:
            return grids.byte_tiles(self.dim // PIECE // self.vector, self.bits * self.vector)
        if self.vector:
            return grids.tiles(2 * self.pieces, self.bits)
        return -(-2 * self.pieces // (16 // self.plane_bits))

    @cached_property
    def words(self) -> int:
        """Words of 16 bits in a block."""
        third = -(-self.tiles // 2) if self.bits == 3 and not self.vector else 0
        tiles = (self.tiles + third) * PIECE * PIECE - (HALF_TILE if self.halved else 0)
        return BLOCK * self.full + tiles if self.tiered else tiles

    @cached_property
    def halved(self) -> bool:
        """The last tile is half of one."""
        if self.in_bytes:
            return grids.byte_halved(self.dim // PIECE // self.vector, self.bits * self.vector)
        if self.vector:
            upper = self.bits == 2 and not (self.role == "key" and self.vector == 4)
            return grids.halved(2 * self.pieces, self.bits) or (upper and self.pieces % 4 == 2)
        if self.bits == 3:
            return self.tiles % 2 == 1
        return self.bits == 2 and (self.fields if self.tiered else self.pieces) % 4 == 2

    @property
    def half_tile_shift(self) -> int:
        """How many bits columns from 8 on lie beyond the others in a half tile of integers."""
        return 1 if self.bits == 3 else 4

    @property
    def pieces_in_pairs(self) -> bool:
        """Pieces lie in pairs (`field_number`), not as they are counted."""
        return self.inner or self.role == "value" or (self.bits == 2 and self.halved)

    @property
    def scale_blocks(self) -> int:
        """Blocks that share scales."""
        return self.group // BLOCK if self.along_tokens else 1

    @property
    def along_tokens(self) -> bool:
        """A group is of tokens of one channel."""
        return not self.vector and self.inner == (self.role == "value")

    @cached_property
    def columns(self) -> int:
        """Columns of 16 scales or zero points: of a half block, or where groups lie along tokens of `scale_blocks`."""
        if self.vector:
            return 1
        if self.tiered:
            return (self.dim - self.full) // PIECE * 2
        return self.dim // (PIECE if self.along_tokens else self.group) * (1 if self.symmetric else 2)

    @cached_property
    def scales(self) -> int:
        """Float16 numbers that belong to `scale_blocks` blocks."""
        return self.columns * PIECE * (1 if self.along_tokens else 2)

    @property
    def stored_bits(self) -> float:
        """Stored bits for each number."""
        order = 8 / self.group if self.tiered else 0.0
        return 16 * (self.words + self.scales / self.scale_blocks / self.norm_heads) / (BLOCK * self.dim) + order

    @property
    def plane_bits(self) -> int:
        """Bits of a code in the first plane."""
        return 2 if self.bits == 3 else self.bits


def looked_up(keys: Form, values: Form) -> bool:
    """Return whether either is a grid whose points are looked up."""
    return any(form.vector and not form.in_bytes for form in (keys, values))


def fits_int8_mma(keys: Form, values: Form) -> bool:
    """Return whether products of 8-bit integers (attention/triton/int8) take both keys and values: integers in inner
    groups (16 key channels are half of what one contracts); integers in outer groups of keys of four blocks and more,
    as queries are rounded again for each, and of values of all channels, as probabilities have one power of two; grids
    in bytes.
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
class TierFields(Form):
    """The tiles of lower tiers, as 2-bit codes of as many channels as they have fields."""

    def __post_init__(self) -> None:
        pass

    @property
    def half_tile_shift(self) -> int:
        return 8

    @property
    def pieces_in_pairs(self) -> bool:
        return False


Number = TypeVar("Number", int, Tensor)


def field_number(half: Number, piece: Number, bits: int, pieces: int, inner: bool, value: bool) -> Number:
    """Return tile * W + field of piece number `piece` of half block `half` (int, or a tensor of them) of integers,
    whose half blocks have `pieces`. Kernels compute it as well when they are compiled.
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


def together(count: int) -> int:
    """Return how many of `count` columns of float16 lie side by side, so that one load of 64, 32 or 16 bits brings
    them.
    """
    return 4 if count % 4 == 0 else 2 if count % 2 == 0 else 1


# Modes: how codes are read. Integers in groups along what attention contracts, without zero points or with them, or
# along the other dimension; points of a grid that is looked up; three tiers of precision; points of a grid in bytes.
INNER_SYMMETRIC, INNER, OUTER, GRID, TIERS, POINTS = range(6)


def mode_of(form: Form) -> int:
    """Return how a kernel reads the codes of a form."""
    if form.vector:
        return POINTS if form.in_bytes else GRID
    if form.tiered:
        return TIERS
    if form.inner:
        return INNER_SYMMETRIC if form.symmetric else INNER
    return OUTER


def half_tile_shift(words: int, bits: int, mode: int) -> int:
    """Return how many bits columns from 8 on lie beyond the others in the half tile with which words end; 0 where the
    last one is whole.
    """
    if words % 256 == 0:
        return 0
    return 2 if mode == POINTS else 1 if bits == 3 else 4
