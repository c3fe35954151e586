"""`dequantise` and `place` of reference.py for NVIDIA GPUs. Modules, lowest first: points, kernel, prepare, launch;
exact stands alone.
"""

from __future__ import annotations

from .exact import PLACED, place, place_kernel
from .kernel import dequantise_kernel
from .launch import dequantise
from .prepare import CHANNELS, MOST_INPUTS, Launch, Prepared, columns_of, launch_for, places, prepare, refuses, settings

__all__ = [
    "CHANNELS",
    "MOST_INPUTS",
    "PLACED",
    "Launch",
    "Prepared",
    "columns_of",
    "dequantise",
    "dequantise_kernel",
    "launch_for",
    "place",
    "place_kernel",
    "places",
    "prepare",
    "refuses",
    "settings",
]
