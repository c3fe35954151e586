"""What several families' kernels share."""

from __future__ import annotations

import functools

import triton
import triton.language as tl


@functools.cache
def interpreted() -> bool:
    """Whether TRITON_INTERPRET=1 held when kernels were imported, which then have no inline assembly."""
    return bool(triton.knobs.runtime.interpret)


@triton.jit
def half(x, J: tl.constexpr):
    """Bits 16 J to 16 J + 15 as float16."""
    return (x >> (16 * J)).to(tl.int16).to(tl.float16, bitcast=True)
