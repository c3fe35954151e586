"""Residual vector quantisation (VQKV): nearest codewords, attention over codes, and new tokens appended to them."""

from . import append, attention, nearest

__all__ = ["append", "attention", "nearest"]
