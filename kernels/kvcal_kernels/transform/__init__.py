"""What the transform codec does once tokens are coordinates: the nearest points of each tier, packed along tokens."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from .reference import encode


@cache
def fast() -> ModuleType:
    """Return the Triton module, whose functions are named as those of `reference`. ImportError where Triton is not
    installed.
    """
    from . import triton

    return triton


__all__ = ["encode", "fast"]
