"""Decode attention over packed keys and values."""

from .grids import Grid, grid_of
from .reference import Blocks, Form, decode, pack, pack_tiers, unpack

__all__ = ["Blocks", "Form", "Grid", "decode", "grid_of", "pack", "pack_tiers", "unpack"]
