"""Decode attention over packed keys and values."""

from __future__ import annotations

from functools import cache
from types import ModuleType


@cache
def fast() -> ModuleType:
    """The Triton kernel's `attend`, `Launch` and `Workspace`, as `reference` has the first. ImportError: no triton."""
    from . import triton

    return triton


__all__ = ["fast"]
