"""Functions that the kernels of several families share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import compress
from operator import or_
from threading import RLock
from typing import Any, TypeAlias, TypeVar

import triton
import triton.language as tl
from torch import Tensor

from .device import on

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")
Kernel: TypeAlias = Any  # Triton's JITFunction or CompiledKernel, which have no types
Constants: TypeAlias = Mapping[str, object]  # of a launch: compile-time constants by name, num_warps and the like


def constexpr_function(function: F) -> F:
    """Mark a function as Triton's constexpr_function and keep its types. It may be called as kernels are compiled, and
    calls others of its kind only.
    """
    compiled: F = triton.constexpr_function(function)
    return compiled


@functools.cache
def interpreted() -> bool:
    """Return whether TRITON_INTERPRET=1 held when kernels were imported, which then have no inline assembly."""
    return bool(triton.knobs.runtime.interpret)


@triton.jit
def half(x, J: tl.constexpr):
    """Return bits 16 J to 16 J + 15 as float16."""
    return (x >> (16 * J)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def rounded_product(x, y, ASM: tl.constexpr):
    """Round the product before it is added. A fused multiply-add would give lanes different last bits, and all lanes
    write to the same address.
    """
    if ASM:
        product = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        product = x * y
    return product


class Ready:
    """Launches of a kernel whose grid, compile-time constants and numbers are settled: they start the compiled kernel
    itself. Triton's own way binds and specialises every argument each time, which takes about ten times as long on the
    host (docs/benchmarks/decode_attention.md).

    kernel: its tensors come first, then numbers, then constants. options: the constants by name, and num_warps and the
    like. examine: called once with each compiled kernel before it is launched. A Ready is made for tensors of one
    device, one dtype each, and for numbers of one specialisation (Triton's: 1, a multiple of 16, or neither); its
    caller answers for that. It launches on the tensors' device, whichever is the current one.
    """

    def __init__(
        self, kernel: Kernel, grid: tuple[int, ...], options: Constants, examine: Callable[[Kernel], None] | None = None
    ) -> None:
        self.kernel, self.grid, self.options = kernel, grid, options
        self._examine, self._interpreted = examine, interpreted()
        self._key = id(kernel), repr(sorted(options.items()))
        self._run: Callable[..., object] | None = None
        names = kernel.arg_names
        self._constants = tuple(options[name] for name in names if name in options)
        self._specialised = [not p.do_not_specialize_on_alignment for p in getattr(kernel, "params", ())]

    def __call__(self, tensors: Sequence[Tensor], *numbers: float) -> None:
        if self._interpreted:
            self.kernel[self.grid](*tensors, *numbers, **self.options)
            return
        pointers = [tensor.data_ptr() for tensor in tensors]
        with on(tensors[0].device):
            if reduce(or_, compress(pointers, self._specialised)) % ALIGNMENT:
                self.compiled(tensors, numbers)
                self.kernel[self.grid](*tensors, *numbers, **self.options)
                return
            if self._run is None:
                self._run = self.compiled(tensors, numbers)[(*self.grid, 1, 1)[:3]]
            self._run(*pointers, *numbers, *self._constants)  # an address stands for a tensor, as Triton takes either

    def compiled(self, tensors: Sequence[Tensor], numbers: tuple[float, ...]) -> Kernel:
        """Return the compiled kernel, loaded and examined."""
        with on(tensors[0].device), _FIRST.setdefault(self._key, RLock()):
            kernel = self.kernel.warmup(*tensors, *numbers, grid=self.grid, **self.options)
            if self._examine is not None and id(kernel) not in _EXAMINED:
                self._examine(kernel)
                _EXAMINED[id(kernel)] = kernel
        return kernel


def examined() -> list[Kernel]:
    """Return the compiled kernels of which launches by `Ready` have begun in this process, first ones first."""
    return list(_EXAMINED.values())


ALIGNMENT = 16  # bytes: where pointers are multiples of it, Triton compiles for that
_EXAMINED: dict[int, Kernel] = {}  # compiled kernels, which Triton keeps as long as the process
# By the kernel and the constants of a launch: a thread's first one. Triton hands the same compiled kernel to a second
# thread before it is examined. Kernels of other constants are compiled meanwhile.
_FIRST: dict[tuple[int, str], RLock] = {}


class Prepared(dict[object, T]):
    """A cache of what launches need, by what it follows from. It is emptied when it has MOST entries, as capacities
    grow with a sequence.
    """

    MOST = 4096

    def __setitem__(self, key: object, value: T) -> None:
        if len(self) >= self.MOST:
            self.clear()
        super().__setitem__(key, value)
