"""The cache: what Transformers calls, its layers, and what they share during one forward.

Its classes are loaded when they are asked for: they need Transformers, and `cache.statistics` does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cache import KVCalCache
    from .construction import check_served
    from .evicting_layer import EvictingLayer
    from .layer import KVCalLayer
    from .protocols import Watch

__all__ = ["EvictingLayer", "KVCalCache", "KVCalLayer", "Watch", "check_served"]
_MODULES = {
    "EvictingLayer": "evicting_layer",
    "KVCalCache": "cache",
    "KVCalLayer": "layer",
    "Watch": "protocols",
    "check_served": "construction",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
