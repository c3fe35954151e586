"""Keys and values to packed blocks, and the windows in front of them."""

from .reference import Counts, Layer, Rule, Windows, advance, append, check, quantise

__all__ = ["Counts", "Layer", "Rule", "Windows", "advance", "append", "check", "quantise"]
