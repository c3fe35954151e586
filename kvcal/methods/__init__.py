"""Methods by name. Adding one here adds it to the contract tests."""

from __future__ import annotations

from .aqua_kv import AquaKV

METHODS = {method.name: method for method in (AquaKV,)}

__all__ = ["METHODS", "AquaKV"]
