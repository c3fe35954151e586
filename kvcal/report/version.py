"""kvcal's version, in a module that imports nothing: `kvcal` itself imports commands."""

from __future__ import annotations

__version__ = "0.1.0"
