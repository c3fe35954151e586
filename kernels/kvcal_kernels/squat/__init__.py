"""Error-compensated rounding (SQuat)."""

from __future__ import annotations

from types import ModuleType

from .reference import Digits, Moves, corrected, due, integers, moves, refusal


def fast() -> ModuleType:
    """Return the Triton module, whose `corrected` and `due` do the same on a GPU. ImportError where Triton is not
    installed.
    """
    from . import triton

    return triton


__all__ = ["Digits", "Moves", "corrected", "due", "fast", "integers", "moves", "refusal"]
