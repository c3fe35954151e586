"""Decode attention over packed keys and values."""

from .grids import Grid, grid_of
from .reference import Blocks, Form, decode, pack, unpack

__all__ = ["Blocks", "Form", "Grid", "decode", "grid_of", "pack", "unpack"]
