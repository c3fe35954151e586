"""`attend` of reference.py for NVIDIA GPUs: one launch that reads packed codes and nothing else.

Each module knows only those before it in this list: numbers, tiles, ring, scales, softmax, rotation; the decoders
integers, grids, tiers and before_rope; int8, which multiplies 8-bit integers on tensor cores; exact and merge; the
kernel; its launch; the kernel over pages and its launch.
"""

from __future__ import annotations

from ..checks import check_layouts
from ..plan import Launch, launches, settings, usual
from .kernel import attend_kernel
from .launch import Workspace, attend, chosen, programs_at_once, reserve
from .paged_launch import attend_pages

__all__ = [
    "Launch",
    "Workspace",
    "attend",
    "attend_kernel",
    "attend_pages",
    "check_layouts",
    "chosen",
    "launches",
    "programs_at_once",
    "reserve",
    "settings",
    "usual",
]
