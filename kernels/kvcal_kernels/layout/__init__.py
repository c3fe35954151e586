"""How packed keys and values lie in memory: the order of codes and scales in a block, grids, and RoPE by runs of
positions.
"""

from __future__ import annotations

from . import grids, rope
from .blocks import AnyBlocks, Blocks, decode, launch_key, pack, pack_scales, pack_tiers, unpack, unpack_scales
from .form import BLOCK, Form
from .grids import Grid, grid_of
from .pages import AnyForm, Constants, PageForm, check_pages, move_blocks, move_tokens, read_pages, token_places
from .rope import Rope
from .transform import Basis, TransformBlocks, TransformForm

__all__ = [
    "BLOCK",
    "AnyBlocks",
    "AnyForm",
    "Basis",
    "Blocks",
    "Constants",
    "Form",
    "Grid",
    "PageForm",
    "Rope",
    "TransformBlocks",
    "TransformForm",
    "check_pages",
    "decode",
    "grid_of",
    "grids",
    "launch_key",
    "move_blocks",
    "move_tokens",
    "pack",
    "pack_scales",
    "pack_tiers",
    "read_pages",
    "rope",
    "token_places",
    "unpack",
    "unpack_scales",
]
