"""Rotated numbers to codes of a grid and norms (HIGGS, TurboQuant)."""

from .reference import Rotated, encode

__all__ = ["Rotated", "encode"]
