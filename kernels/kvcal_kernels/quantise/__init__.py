"""Keys and values to packed blocks, and the windows in front of them."""

from __future__ import annotations

from types import ModuleType

from .reference import Counts, Layer, Rule, Windows, advance, append, check, quantise


def fast() -> ModuleType:
    """The Triton kernels, named as those of `reference`; ImportError without triton."""
    from . import triton

    return triton


__all__ = ["Counts", "Layer", "Rule", "Windows", "advance", "append", "check", "fast", "quantise"]
