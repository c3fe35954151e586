"""Rotated numbers to codes of a grid and norms (HIGGS, TurboQuant)."""

from __future__ import annotations

from types import ModuleType

from .reference import Rotated, encode


def fast() -> ModuleType:
    """The Triton kernel's `encode`; ImportError without triton."""
    from . import triton

    return triton


__all__ = ["Rotated", "encode", "fast"]
