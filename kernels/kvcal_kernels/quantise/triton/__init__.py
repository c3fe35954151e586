"""`quantise`, `append` and their like of reference.py for NVIDIA GPUs: one read of keys and values, one write of words
and scales, one launch. Modules, lowest first: rounding, words, rows, kernel, launch.
"""

from __future__ import annotations

from .kernel import advance_kernel, append_kernel, observe_kernel
from .launch import GRID_STEP, Launch, advance, append, launch_of, observe, quantise, settings

__all__ = [
    "GRID_STEP",
    "Launch",
    "advance",
    "advance_kernel",
    "append",
    "append_kernel",
    "launch_of",
    "observe",
    "observe_kernel",
    "quantise",
    "settings",
]
