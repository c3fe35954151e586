"""What the store kernel knows of keys, or of values, when it is compiled, and where it puts a token's bits."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ...layout import BLOCK, token_places
from ...layout.pages import AnyForm, token_scales, widths

WORD, SHIFT, FROM, WIDTH = 0, 16, 21, 25  # lowest bits of the fields of an entry of `places`


@dataclass(frozen=True)
class StoreSide:
    """The compile-time constants of keys or of values. at: byte of a head at which they begin. codes, scales: of a
    token. parts: pieces that a code is stored in. bits, vector: of a grid's code; of integers vector is 0. pairs: of 4,
    3, 2 and 1 bits of the transform codec, whose `coded` is not 0; stride: numbers of a row of its encoder; means,
    tables: where its means, and the tables of 4, 3 and 2 bits, begin. rasters: of 4, 3 and 2 bits, or of a grid:
    points, side, few, most (higgs.triton.searched).
    """

    at: int
    codes: int
    scales: int
    parts: int
    bits: int
    vector: int
    coded: int
    stride: int
    pairs: tuple[int, int, int, int]
    means: int
    tables: tuple[int, int, int]
    rasters: tuple[tuple[int, int, int, int], ...]

    @property
    def transform(self) -> bool:
        """Coordinates of the transform codec."""
        return self.coded > 0

    @property
    def grid(self) -> bool:
        """Points of a grid."""
        return self.coded == 0 and self.vector > 0


@functools.cache
def places(form: AnyForm) -> tuple[Tensor, int]:
    """Return where a kernel puts the codes and scales of a token, int32, and how many parts a code has.

    First come the parts of codes, (32, codes, parts): the 32-bit word of the block, by how much the part is shifted in
    it, its lowest bit in the code, and how many bits it has, 0 where a code has fewer parts. Then the places of scales,
    (32, scales): which float16 of the block.
    """
    each, where = widths(form), token_places(form)
    rows: list[list[list[int]]] = []
    for token in where.tolist():
        first, row = 0, []
        for width in each:
            row.append(_parts(token[first : first + width]))
            first += width
        rows.append(row)
    count = max(len(parts) for row in rows for parts in row)
    entries = [parts + [0] * (count - len(parts)) for row in rows for parts in row]
    scales = where[:, sum(each) :: 16] // 16
    assert scales.shape == (BLOCK, token_scales(form))
    return torch.cat([torch.tensor(entries, dtype=torch.int32, device="cpu").flatten(), scales.int().flatten()]), count


def _parts(bits: list[int]) -> list[int]:
    """Return the entries of a code whose bits lie there."""
    entries, first = [], 0
    for i in range(1, len(bits) + 1):
        if i == len(bits) or bits[i] != bits[i - 1] + 1 or bits[i] % 32 == 0:
            word, shift = divmod(bits[first], 32)
            entries.append(word << WORD | shift << SHIFT | first << FROM | i - first << WIDTH)
            first = i
    return entries
