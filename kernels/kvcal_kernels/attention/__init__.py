"""Decode attention over packed keys and values."""

from __future__ import annotations

from types import ModuleType

from . import grids
from .grids import Grid, grid_of
from .reference import BLOCK, Blocks, Form, decode, pack, pack_scales, pack_tiers, unpack, unpack_scales


def fast() -> ModuleType:
    """The Triton kernel's `attend`, `Launch` and `Workspace`, as `reference` has the first; ImportError without triton."""
    from . import triton

    return triton


__all__ = [
    "BLOCK", "Blocks", "Form", "Grid", "decode", "fast", "grid_of", "grids", "pack", "pack_scales", "pack_tiers", "unpack",
    "unpack_scales",
]  # fmt: skip
