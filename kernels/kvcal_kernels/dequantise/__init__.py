"""Keys and values of a layer from HIGGS codes and a linear predictor."""

from __future__ import annotations

import functools
from types import ModuleType

from .reference import Coded, Rotation, decode, dequantise, place


@functools.cache
def fast() -> ModuleType:
    """Return the Triton module, which does the same on a GPU. ImportError where Triton is not installed."""
    from . import triton

    return triton


__all__ = ["Coded", "Rotation", "decode", "dequantise", "fast", "place"]
