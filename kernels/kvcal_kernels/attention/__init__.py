"""Decode attention over packed keys and values."""

from __future__ import annotations

from functools import cache
from types import ModuleType


@cache
def fast() -> ModuleType:
    """Return the Triton module: `attend`, `Launch` and `Workspace`. ImportError where Triton is not installed."""
    from . import triton

    return triton


__all__ = ["fast"]
