"""Error-compensated rounding (SQuat)."""

from .reference import Moves, corrected, moves

__all__ = ["Moves", "corrected", "moves"]
