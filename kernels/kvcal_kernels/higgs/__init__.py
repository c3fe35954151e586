"""Numbers rotated, then coded as points of a grid and norms (HIGGS, TurboQuant)."""

from __future__ import annotations

from types import ModuleType

from .reference import Rotated, encode


def fast() -> ModuleType:
    """Return the Triton module, whose `encode` does the same on a GPU. ImportError where Triton is not installed."""
    from . import triton

    return triton


__all__ = ["Rotated", "encode", "fast"]
