"""Error-compensated rounding (SQuat)."""

from __future__ import annotations

from types import ModuleType

from .reference import Moves, corrected, moves, refusal


def fast() -> ModuleType:
    """The Triton kernel's `corrected`; ImportError without triton."""
    from . import triton

    return triton


__all__ = ["Moves", "corrected", "fast", "moves", "refusal"]
