"""Decode attention over packed keys and values."""

from .reference import BLOCK, Blocks, Form, decode, pack, pack_scales, unpack, unpack_scales

__all__ = ["BLOCK", "Blocks", "Form", "decode", "pack", "pack_scales", "unpack", "unpack_scales"]
