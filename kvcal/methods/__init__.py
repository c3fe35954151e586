"""Methods by name. Adding one here adds it to the contract tests."""

from __future__ import annotations

from typing import Any

from .aqua_kv import AquaKV
from .innerq import InnerQ

METHODS: dict[str, type[Any]] = {method.name: method for method in (AquaKV, InnerQ)}

__all__ = ["METHODS", "AquaKV", "InnerQ"]
