"""MixKVQ's choice of the channels of a key block that get more bits."""

from __future__ import annotations

from types import ModuleType

from .reference import Tiers, refusal, select


def fast() -> ModuleType:
    """Return the Triton module, whose `select` does the same on a GPU. ImportError where Triton is not installed."""
    from . import triton

    return triton


__all__ = ["Tiers", "fast", "refusal", "select"]
