"""Decode attention straight from residual vector codes."""

from .reference import Band, Coded, decode, merge

__all__ = ["Band", "Coded", "decode", "merge"]
