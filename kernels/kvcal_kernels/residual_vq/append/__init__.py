"""New tokens of a step appended to sink and ring, and the block that leaves the ring coded as residual vector codes, if
one is due.
"""

from __future__ import annotations

from types import ModuleType

from .reference import append


def fast() -> ModuleType:
    """Return the Triton module, which does the same on a GPU. ImportError where Triton is not installed."""
    from . import triton

    return triton


__all__ = ["append", "fast"]
