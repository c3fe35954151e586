"""Decode attention over packed keys and values."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from . import grids, rope
from .grids import Grid, grid_of
from .reference import BLOCK, Blocks, Form, decode, pack, pack_scales, pack_tiers, unpack, unpack_scales
from .rope import Rope


@cache
def fast() -> ModuleType:
    """The Triton kernel's `attend`, `Launch` and `Workspace`, as `reference` has the first; ImportError without triton."""
    from . import triton

    return triton


__all__ = [
    "BLOCK", "Blocks", "Form", "Grid", "Rope", "decode", "fast", "grid_of", "grids", "pack", "pack_scales", "pack_tiers",
    "rope", "unpack", "unpack_scales",
]  # fmt: skip
