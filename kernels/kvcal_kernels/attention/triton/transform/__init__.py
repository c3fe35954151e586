"""Decode attention over the transform codec: coordinates of a fitted basis, unequal bits by direction."""

from __future__ import annotations

from .launch import attend, reserve
from .paged_launch import attend_pages

__all__ = ["attend", "attend_pages", "reserve"]
