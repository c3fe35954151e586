"""Which channels of a key block are worth more bits (MixKVQ)."""

from __future__ import annotations

from types import ModuleType

from .reference import Tiers, refusal, select


def fast() -> ModuleType:
    """The Triton kernel's `select`; ImportError without triton."""
    from . import triton

    return triton


__all__ = ["Tiers", "fast", "refusal", "select"]
