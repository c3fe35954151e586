"""What the attention kernel knows of keys, or of values, when it is compiled: one constant for each of the two."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import Form
from ..layout.form import GRID, INNER, INNER_SYMMETRIC, OUTER, POINTS, TIERS, mode_of
from ..layout.grids import ENTRIES


@dataclass(frozen=True)
class Side:
    """The compile-time constants of keys or of values. bits: of a code. mode: of layout.form.mode_of. group: numbers
    that share a scale; of a grid in bytes, numbers that a code stands for. pieces: of half a block, 16 x 16 numbers
    each; of tiers, fields. tiles, words: of a block. scales: float16 of the blocks that share them; scale_blocks: how
    many do. slot: bytes of a block in the ring, 0 where codes do not go through it. full, four: pieces of 16 channels
    in the two upper tiers. order: bytes of a group's order of channels. quads: a code of a grid stands for four
    channels. shared_norm: a token's norm is that of all kv heads. entries, pairs: of the grid's table, and pairs of
    float16 of an entry; first: byte at which it lies in shared memory. factor: odd factor of head_dim that the rotation
    mixes; paley: by a Hadamard matrix, not by a cosine transform. page: words of 16 bits between two pages, 0 where
    blocks of a head lie one behind the other.

    This is a frozen dataclass, not a NamedTuple: the interpreter of Triton 3.6 hands tuples on as plain ones.
    """

    bits: int
    mode: int
    group: int
    pieces: int
    tiles: int
    words: int
    scales: int
    scale_blocks: int
    slot: int
    full: int = 0
    four: int = 0
    order: int = 0
    quads: bool = False
    shared_norm: bool = False
    entries: int = 0
    pairs: int = 1
    first: int = 0
    factor: int = 1
    paley: bool = False
    page: int = 0

    @property
    def symmetric(self) -> bool:
        """Integers in groups along what attention contracts, without zero points."""
        return self.mode == INNER_SYMMETRIC

    @property
    def zeros(self) -> bool:
        """Integers in groups along what attention contracts, with zero points."""
        return self.mode == INNER

    @property
    def inner(self) -> bool:
        """Integers in groups along what attention contracts."""
        return self.mode in (INNER_SYMMETRIC, INNER)

    @property
    def outer(self) -> bool:
        """Integers in groups along the other dimension: tokens of a key's channel, channels of a value's token."""
        return self.mode == OUTER

    @property
    def grid(self) -> bool:
        """Points of a grid that is looked up."""
        return self.mode == GRID

    @property
    def tiers(self) -> bool:
        """Three tiers of precision."""
        return self.mode == TIERS

    @property
    def points(self) -> bool:
        """Points of a grid in bytes."""
        return self.mode == POINTS

    @property
    def columns(self) -> int:
        """Columns of a group of an inner form: a scale, or a scale and a zero point."""
        return 1 + self.mode

    @property
    def codes(self) -> tuple[int, ...]:
        """What assembly of a block (int8/block.py) takes: pieces, tiles, words, bits, mode, group, slot."""
        return self.pieces, self.tiles, self.words, self.bits, self.mode, self.group, self.slot


def side_of(form: Form) -> Side:
    """Return the constants of a form."""
    entries, numbers = ENTRIES[form.bits] if form.vector and not form.in_bytes else (0, 2)
    return Side(
        form.bits,
        mode_of(form),
        form.vector if form.in_bytes else form.group,
        form.fields if form.tiered else form.pieces,
        form.tiles,
        form.words,
        form.scales,
        form.scale_blocks,
        2 * (form.words + form.scales) + (form.dim if form.tiered else 0),
        form.full // 16,
        form.four // 16,
        form.dim if form.tiered else 0,
        form.vector == 4,
        form.norm_heads > 1,
        entries,
        numbers // 2,
        0,
        form.factor,
        form.mix == "hadamard",
    )
