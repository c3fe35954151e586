"""Keys and values to packed blocks, and the windows in front of them."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from .reference import (
    AnyRule,
    Counts,
    GridRule,
    Layer,
    Rule,
    Windows,
    advance,
    append,
    blocks_for,
    check,
    factors_of,
    keep,
    observe,
    quantise,
)


@cache
def fast() -> ModuleType:
    """The Triton kernels, named as those of `reference`; ImportError without triton."""
    from . import triton

    return triton


__all__ = [
    "AnyRule",
    "Counts",
    "GridRule",
    "Layer",
    "Rule",
    "Windows",
    "advance",
    "append",
    "blocks_for",
    "check",
    "factors_of",
    "fast",
    "keep",
    "observe",
    "quantise",
]
