"""Triton kernels compiled without a GPU: the registers they take, what they spill, the instructions of their loops."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TARGETS = [90, *[pytest.param(capability, marks=pytest.mark.slow) for capability in (80, 87)]]


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    aligned: list[str],
    capability: int = 90,
    **options: int,
) -> Any:
    import triton

    return triton.compile(ast_source(kernel, types, constants, aligned), target=target(capability), options=options)


def ast_source(kernel: Any, types: dict[str, str], constants: dict[str, Any], aligned: list[str]) -> Any:
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = types | dict.fromkeys(constants, "constexpr")
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)


def target(capability: int) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", capability, 32)


PINNED = "3.7.1"


def skip_unless_pinned() -> None:
    """Instructions and registers are counted for the compiler that constraints.txt pins."""
    import triton

    if triton.__version__ != PINNED:
        pytest.skip(f"triton {triton.__version__}: counts are those of {PINNED}")


def resources(made: Any, folder: Path) -> tuple[int, int]:
    """(registers a thread, bytes of stack, that is of spilled registers)."""
    said = _tool(made, folder, "cuobjdump", "-res-usage")
    registers, stack = re.search(r"REG:(\d+)", said), re.search(r"STACK:(\d+)", said)
    assert registers and stack, said
    return int(registers[1]), int(stack[1])


INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)(.*)")


LISTING = "nvdisasm", "-c", "-ndf"  # without its analysis of data flow, which takes a third and prints nothing here


def whole(made: Any, folder: Path) -> int:
    """Instructions of the whole program, each once, without NOPs, which fill its end."""
    found = [INSTRUCTION.match(line) for line in _tool(made, folder, *LISTING).splitlines()]
    return sum(one is not None and one[1] != "NOP" for one in found)


def loops(made: Any, folder: Path) -> list[Counter[str]]:
    """Instructions of each loop by their name without modifiers, loops in the order of their code. A loop is what a
    branch backwards encloses.
    """
    labels: dict[str, int] = {}
    names: list[str] = []
    found: list[tuple[int, int]] = []
    for line in _tool(made, folder, *LISTING).splitlines():
        if label := re.match(r"(\.L_\w+):", line.strip()):
            labels[label[1]] = len(names)
        elif one := INSTRUCTION.match(line):
            target = re.search(r"(\.L_\w+)", one[2]) if one[1] == "BRA" else None
            if target and target[1] in labels:
                found.append((labels[target[1]], len(names) + 1))
            names.append(one[1])
    return [Counter(names[start:stop]) for start, stop in sorted(found) if stop - start > 1]


def _tool(made: Any, folder: Path, name: str, *options: str) -> str:
    import triton

    binary = folder / "kernel.cubin"
    binary.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *options, binary], capture_output=True, text=True, check=True).stdout
