"""Decode attention over packed keys and values."""

from __future__ import annotations

from types import ModuleType

from .reference import BLOCK, Blocks, Form, decode, pack, pack_scales, unpack, unpack_scales


def fast() -> ModuleType:
    """The Triton kernel's `attend`, `Launch` and `Workspace`, as `reference` has the first; ImportError without triton."""
    from . import triton

    return triton


__all__ = ["BLOCK", "Blocks", "Form", "decode", "fast", "pack", "pack_scales", "unpack", "unpack_scales"]
