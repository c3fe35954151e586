"""A pytest plugin that shows whether a change of source changes compiled kernels: hashes of PTX, without ptxas or a
GPU.

    python -m pytest -p tests.support.ptx_hashes --ptx-hashes before.json -m "not gpu" -k compiled tests/...
    python -m tests.support.ptx_hashes compare before.json after.json

Each kernel that a test compiles through `compiled.compiled` is taken to PTX and hashed, under the test's name and
parameters and the kernel's number within the test. The test then ends as skipped, since no program was made of the PTX.
Lines with places in the source (`.loc`, `.file`, comments, debug sections and their labels) are left out of the hash.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

HASHES: dict[str, str] = {}
_running = ""
_number = 0


class WithoutProgram(dict[str, str]):
    """What a kernel was compiled to, up to PTX. Whoever asks for the program ends the test."""

    def __missing__(self, name: str) -> str:
        pytest.skip(f"PTX only: no {name}")


class Compiled:
    def __init__(self, ptx: str, metadata: dict[str, Any]) -> None:
        self.asm, self.metadata = WithoutProgram(ptx=ptx), metadata


def to_ptx(source: Any, target: Any, options: dict[str, Any]) -> str:
    """The stages of `triton.compile` (3.7.1) up to PTX."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    parsed = backend.parse_options(dict(options, **source.parse_options()))
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata: dict[str, Any] = {"target": target, **parsed.__dict__}
    module = source.make_ir(
        target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
    )
    for name, stage in stages.items():
        if name == "cubin":
            break
        module = stage(module, metadata)
    return str(module)


def without_places(ptx: str) -> str:
    """PTX without what tells where in the source an instruction was written, names of functions included."""
    ptx = ptx.split(".section\t.debug", 1)[0].split(".section .debug", 1)[0]
    kept = (line for line in ptx.splitlines() if not re.match(r"\s*(\.loc|\.file|//|\$L__(func|tmp))", line))
    return "\n".join(line.split("//", 1)[0].rstrip() for line in kept)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ptx-hashes", type=Path, help="file to which hashes of the tests' kernels are written")


def pytest_configure(config: pytest.Config) -> None:
    from tests.support import compiled

    def compiled_to_ptx(
        kernel: Any,
        types: dict[str, str],
        constants: dict[str, Any],
        aligned: list[str],
        capability: int = 90,
        **options: int,
    ) -> Compiled:
        global _number
        source, target = compiled.ast_source(kernel, types, constants, aligned), compiled.target(capability)
        ptx = to_ptx(source, target, options)
        HASHES[f"{_running} {_number}"] = hashlib.sha256(without_places(ptx).encode()).hexdigest()
        _number += 1
        return Compiled(ptx, {})

    compiled.compiled = compiled_to_ptx


def pytest_runtest_setup(item: pytest.Item) -> None:
    global _running, _number
    _running, _number = item.name if item.cls is None else f"{item.cls.__name__}.{item.name}", 0
    _running = f"{item.path.stem}::{_running}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    file: Path | None = session.config.getoption("--ptx-hashes")
    if file:
        file.write_text(json.dumps(HASHES, indent=1, sort_keys=True) + "\n")


def compare(before: Path, after: Path) -> int:
    old, new = (json.loads(file.read_text()) for file in (before, after))
    changed = [name for name in old if new.get(name) not in (None, old[name])]
    lost = [name for name in old if name not in new]
    for word, names in (("changed", changed), ("not compiled", lost)):
        for name in names:
            print(f"{word}: {name}")
    print(f"{len(old)} kernels before, {len(new)} after: {len(changed)} changed, {len(lost)} not compiled")
    return int(bool(changed or lost))


if __name__ == "__main__":
    sys.exit(compare(Path(sys.argv[2]), Path(sys.argv[3])))
