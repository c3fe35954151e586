"""Decode attention over packed keys and values."""

from __future__ import annotations

from functools import cache
from types import ModuleType


@cache
def fast() -> ModuleType:
    """Return the Triton module: `attend`, `Launch` and `Workspace`. ImportError where Triton is not installed."""
    from . import triton

    return triton


@cache
def transform() -> ModuleType:
    """Return the Triton module for the transform codec: `attend` and `reserve`. ImportError where Triton is not
    installed.
    """
    from .triton import transform as module

    return module


__all__ = ["fast", "transform"]
