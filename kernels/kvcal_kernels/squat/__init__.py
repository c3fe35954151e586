"""Error-compensated rounding (SQuat)."""

from __future__ import annotations

from types import ModuleType

from .reference import Digits, Moves, corrected, due, moves, refusal


def fast() -> ModuleType:
    """The Triton kernels' `corrected` and `due`; ImportError without triton."""
    from . import triton

    return triton


__all__ = ["Digits", "Moves", "corrected", "due", "fast", "moves", "refusal"]
