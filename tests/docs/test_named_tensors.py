"""Every tensor that kvcal makes names its device, and its dtype where torch's default would count: the default is the
user's, or vLLM's while it builds a model.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

from tests.support.house import SOURCE_ROOTS, modules

CONSTRUCTORS = frozenset(function.__name__ for function in _device_constructors())
OF_THE_DEFAULT_DTYPE = frozenset(
    {"empty", "empty_strided", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"}
)
OF_THEIR_NUMBERS = frozenset({"as_tensor", "asarray", "full", "scalar_tensor", "tensor"})
CALLED_ELSEWHERE = {"kvcal_kernels.quantise.reference": 1, "kvcal_kernels.quantise.triton.launch": 1}  # of blocks_for


def unnamed(source: str) -> Iterator[str]:
    """Calls of torch's constructors that leave device or dtype to torch, a line each; and constructors not called."""
    nodes = list(ast.walk(ast.parse(source))) if "torch" in source else []
    called = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from (f"{node.lineno}: {one.name} imported" for one in node.names if one.name in CONSTRUCTORS)
        if not (isinstance(node, ast.Attribute) and node.attr in CONSTRUCTORS and is_torch(node.value)):
            continue
        call = called.get(id(node))
        if call is None:
            yield f"{node.lineno}: {node.attr} not called"
            continue
        names = {keyword.arg for keyword in call.keywords}
        if "device" not in names:
            yield f"{node.lineno}: {node.attr} without a device"
        if "dtype" not in names and (
            node.attr in OF_THE_DEFAULT_DTYPE or (node.attr in OF_THEIR_NUMBERS and any(map(has_float, call.args)))
        ):
            yield f"{node.lineno}: {node.attr} without a dtype"


def is_torch(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "torch"


def has_float(argument: ast.expr) -> bool:
    return any(isinstance(node, ast.Constant) and isinstance(node.value, float) for node in ast.walk(argument))


@pytest.mark.parametrize("package", SOURCE_ROOTS)
def test_every_tensor_names_device_and_dtype(package: str) -> None:
    lines = [(module, line) for module, path in modules(package) for line in unnamed(Path(path).read_text("utf-8"))]
    others = [module for module, line in lines if line.endswith("not called") and module in CALLED_ELSEWHERE]
    assert [one for one in lines if one[0] not in others] == []
    assert {module: others.count(module) for module in others} == {
        module: count for module, count in CALLED_ELSEWHERE.items() if module.startswith(f"{package}.")
    }


def test_unnamed_tensors_are_seen() -> None:
    source = (
        "from torch import zeros\n"
        "torch.randint(0, 2, (3,), generator=generator)\n"
        "torch.zeros(3, device=x.device)\n"
        "torch.tensor([[-0.75], [0.75]], device='cpu')\n"
        "torch.tensor(ids, device='cpu')\n"
        "make = torch.empty\n"
        "torch.eye(3, dtype=torch.float32, device='cpu'), torch.zeros_like(x)\n"
        "torch.as_tensor(total)\n"
    )
    assert sorted(unnamed(source)) == [
        "1: zeros imported",
        "2: randint without a device",
        "3: zeros without a dtype",
        "4: tensor without a dtype",
        "6: empty not called",
        "8: as_tensor without a device",
    ]
