"""`store` of ../reference.py for NVIDIA GPUs: keys and values of all tokens in one launch, those of the transform codec
in two. Modules, lowest first: coordinates, kernel, launch.
"""

from __future__ import annotations

from .coordinates import coordinates_kernel
from .kernel import store_kernel
from .launch import FIRST, settings, store

__all__ = ["FIRST", "coordinates_kernel", "settings", "store", "store_kernel"]
