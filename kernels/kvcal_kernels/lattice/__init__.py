"""Vector grids: nearest point and look-up."""

from .reference import lookup, nearest

__all__ = ["lookup", "nearest"]
