"""`attend` of reference.py for NVIDIA GPUs: one launch that reads packed codes and nothing else.

From the ground up, each room knows only those named before it: numbers, tiles, ring, scales, softmax, rotation; the
decoders integers, grids, tiers and before_rope; int8, products of 8-bit integers; exact and merge; the kernel; its
launch.
"""

from __future__ import annotations

from ..checks import check_layouts
from ..plan import Launch, launches, settings, usual
from .kernel import attend_kernel
from .launch import Workspace, attend, chosen, programs_at_once, reserve

__all__ = [
    "Launch", "Workspace", "attend", "attend_kernel", "check_layouts", "chosen", "launches", "programs_at_once",
    "reserve", "settings", "usual",
]
