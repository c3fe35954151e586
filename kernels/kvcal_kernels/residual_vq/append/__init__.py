"""New tokens of a step to sink and ring, and the block that leaves the ring to residual vector codes, if one is due."""

from __future__ import annotations

from types import ModuleType

from .reference import append


def fast() -> ModuleType:
    """The Triton module, which does the same on a GPU; ImportError without triton."""
    from . import triton

    return triton


__all__ = ["append", "fast"]
