"""What the append kernel knows of keys, or of values, when it is compiled: one constant for each of the two."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Side:
    """The compile-time constants of keys or of values. bits: of a code. mode: of integers 0 symmetric, 1 asymmetric, 2
    hybrid; of a grid 1 where it lies in bytes, else 0. along: groups lie along tokens. inner: along what attention
    contracts. group, pieces, tiles, words, columns: of layout.Form. together: columns of scales side by side.
    symmetric, candidates: how many factors of scales are tried of symmetric groups, and of all. vector: numbers that a
    code of a grid stands for, 0 of integers. norm_heads: kv heads that share a norm. points, cells, few, most: of the
    grid's raster (higgs.triton.searched).
    """

    bits: int
    mode: int
    along: bool
    inner: bool
    group: int
    pieces: int
    tiles: int
    words: int
    columns: int
    together: int
    symmetric: int
    candidates: int
    vector: int
    norm_heads: int
    points: int
    cells: int
    few: int
    most: int

    @property
    def unit(self) -> int:
        """Blocks that share scales."""
        return self.group // 32 if self.along else 1
