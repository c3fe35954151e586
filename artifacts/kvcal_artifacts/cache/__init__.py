"""The cache: what Transformers calls, its layers, and what they share during one forward."""

from __future__ import annotations

from .cache import KVCalCache
from .construction import check_served
from .evicting_layer import EvictingLayer
from .layer import KVCalLayer
from .protocols import Watch

__all__ = ["EvictingLayer", "KVCalCache", "KVCalLayer", "Watch", "check_served"]
