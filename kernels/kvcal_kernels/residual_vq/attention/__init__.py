"""Decode attention straight from residual vector codes."""

from __future__ import annotations

from types import ModuleType

from .reference import Band, Coded, attend, attend_exact, decode, halves, longest, merge


def fast() -> ModuleType:
    """Return the Triton module, which does the same on a GPU. ImportError where Triton is not installed."""
    from . import triton

    return triton


__all__ = ["Band", "Coded", "attend", "attend_exact", "decode", "fast", "halves", "longest", "merge"]
