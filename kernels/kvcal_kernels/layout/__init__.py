"""How packed keys and values lie in memory: the order of codes and scales in a block, grids, and RoPE by runs of
positions.
"""

from __future__ import annotations

from . import grids, rope
from .blocks import AnyBlocks, Blocks, decode, launch_key, pack, pack_scales, pack_tiers, unpack, unpack_scales
from .form import BLOCK, Form
from .grids import Grid, grid_of
from .rope import Rope
from .transform import Basis, TransformBlocks, TransformForm

__all__ = [
    "BLOCK",
    "AnyBlocks",
    "Basis",
    "Blocks",
    "Form",
    "Grid",
    "Rope",
    "TransformBlocks",
    "TransformForm",
    "decode",
    "grid_of",
    "grids",
    "launch_key",
    "pack",
    "pack_scales",
    "pack_tiers",
    "rope",
    "unpack",
    "unpack_scales",
]
