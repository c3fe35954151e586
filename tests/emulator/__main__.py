"""python -m tests.emulator ARGUMENTS: `python ARGUMENTS` (-m MODULE, -c TEXT or FILE) where Triton's kernels run as
compiled for a GPU, inline assembly and all, on tensors of the CPU (see ptx.py).

KVCAL_EMULATE: compute capability to compile for, as 90. With a comma `early`: copies to shared memory land at once; or
`count`: at the end a line of JSON a kernel, instructions of warps and cycles of shared memory, with those without
conflicts.

Without ARGUMENTS it runs what lines of standard input ask for, each in a fork (quick_interpreter.serve).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import triton.compiler.compiler as compiler
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from tests.emulator.ptx import Fault, Machine, Memory
from tests.emulator.quick_interpreter import run, serve

MOST_SHARED = {80: 163 * 1024, 86: 99 * 1024, 87: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # bytes a program may have


class Emulator(DriverBase):
    """Triton's driver. A launch may touch the storages of its own tensors, whole ones."""

    def __init__(self, capability: int, **options: Any) -> None:
        self.capability, self.options = capability, options
        self.launched = 0
        self.counts: dict[str, Counter[str]] | None = None
        self.utils, self.launcher_cls = self, lambda source, metadata: Launcher(self, source)
        self.loading, self.launching = threading.local(), threading.local()

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        return None

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is timed here")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MOST_SHARED[self.capability], "multiprocessor_count": 4, "warpSize": 32}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, Loaded, int, int, int]:
        made = self.loading.made
        counts = None if self.counts is None else self.counts.setdefault(name, Counter())
        return 1, Loaded(Machine(made.asm["ptx"], **self.options, counts=counts), name, shared), 32, 0, 1024

    def install(self) -> None:
        from kvcal_artifacts.paths.preflight import verdicts
        from kvcal_kernels import triton as shared
        from kvcal_kernels.attention import triton as attention

        driver.set_active(self)
        load, call = compiler.CompiledKernel._init_handles, shared.Ready.__call__

        def loaded(made: Any) -> None:
            self.loading.made = made
            load(made)

        def known(ready: Any, tensors: Any, *numbers: float) -> None:
            self.launching.tensors = tensors  # it gives addresses to the launch
            try:
                call(ready, tensors, *numbers)
            finally:
                self.launching.tensors = ()

        compiler.CompiledKernel._init_handles = loaded
        shared.Ready.__call__ = known  # type: ignore[method-assign]
        verdicts.interpreted = lambda: True  # kernels run on the CPU
        attention.launch._allow = lambda made: None  # these ask the driver's library
        attention.launch.programs_at_once = lambda made: 1


def memory_of(tensors: Iterable[Tensor]) -> Memory:
    memory = Memory()
    for storage in (tensor.untyped_storage() for tensor in tensors):
        if storage.nbytes():
            start = storage.data_ptr()
            held = np.frombuffer((ctypes.c_uint8 * storage.nbytes()).from_address(start), np.uint8)
            memory.add(start, held, storage)
    return memory


class Loaded:
    """A kernel as the driver knows it."""

    def __init__(self, machine: Machine, name: str, shared: int) -> None:
        self.machine, self.name, self.shared = machine, name, shared


class Launcher:
    """What Triton calls to launch a kernel."""

    def __init__(self, owner: Emulator, source: Any) -> None:
        self.owner, self.kinds = owner, list(source.signature.values())

    def __call__(self, x: int, y: int, z: int, stream: int, kernel: Loaded, *given: Any) -> None:
        values: list[Any] = []
        for kind, value in zip(self.kinds, given[-len(self.kinds) :], strict=True):
            if kind != "constexpr":
                values.append(value.data_ptr() if isinstance(value, Tensor) else value)
        values += [0] * (len(kernel.machine.code.parameters) - len(values))  # Triton's own scratch memory: none
        self.owner.launched += 1
        tensors = [*getattr(self.owner.launching, "tensors", ()), *(x for x in given if isinstance(x, Tensor))]
        try:
            kernel.machine.launch((x, y, z), values, kernel.shared, memory_of(tensors))
        except Fault as error:
            raise type(error)(f"{kernel.name}: {error}") from None


IMPORTED = (
    "pytest",
    "tests.kernels.test_higgs",
    *(f"tests.support.cases.{name}_cases" for name in ("attention", "dequantise", "paged", "quantise", "transform")),
)


def emulate(arguments: list[str]) -> None:
    """python ARGUMENTS, by the environment's KVCAL_EMULATE."""
    capability, _, more = os.environ["KVCAL_EMULATE"].partition(",")
    if more not in ("", "early", "count"):
        sys.exit(f"KVCAL_EMULATE: {more!r} is neither early nor count")
    own = Emulator(int(capability), early=more == "early")
    own.counts = {} if more == "count" else None
    own.install()
    run(arguments)
    if not own.launched:
        sys.exit("no kernel was launched")
    for name, counts in (own.counts or {}).items():
        print(json.dumps({"kernel": name, **counts}))


def main() -> None:
    if len(sys.argv) > 1:
        emulate(sys.argv[1:])
    else:
        serve(IMPORTED, lambda: None, emulate)


if __name__ == "__main__":
    main()
