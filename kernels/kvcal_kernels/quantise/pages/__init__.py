"""New tokens packed straight from K and V into pages."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from .reference import StoreRule, TransformRule, store


@cache
def fast() -> ModuleType:
    """Return the Triton module, whose functions are named as those of `reference`. ImportError where Triton is not
    installed.
    """
    from . import triton

    return triton


__all__ = ["StoreRule", "TransformRule", "fast", "store"]
