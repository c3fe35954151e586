"""Keys and values packed to blocks, and the windows before them."""

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
    """Return the Triton module, whose functions are named as those of `reference`. ImportError where Triton is not
    installed.
    """
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
