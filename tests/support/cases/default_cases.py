"""Tensors that torch makes by default of another dtype or elsewhere: for tests that nothing depends on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

# meta stands in for a GPU: what is made there by mistake has no numbers, and fails where it meets a tensor of the CPU.
DEFAULTS = pytest.mark.parametrize("default", ["meta", "float16", "bfloat16", "float64"])


@contextmanager
def making(default: str) -> Iterator[None]:
    """Let torch make tensors of this dtype, or on this device, that name none. Before and after, nothing of kvcal's is
    cached: neither constants that are right before the test nor wrong ones behind it.
    """
    forget()
    try:
        if default == "meta":
            with torch.device(default):
                yield
        else:
            torch.set_default_dtype(getattr(torch, default))
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        forget()


def forget() -> None:
    """Empty every functools.cache of a function or class of kvcal's modules."""
    for cached in caches():
        cached.cache_clear()


def caches() -> list[Any]:
    modules = [module for name, module in sys.modules.items() if name.startswith("kvcal")]
    named = [value for module in modules for value in vars(module).values()]
    in_classes = [
        getattr(one, "__func__", one) for each in named if isinstance(each, type) for one in vars(each).values()
    ]
    return [value for value in named + in_classes if isinstance(getattr(value, "cache_clear", None), Callable)]  # type: ignore[arg-type]


def require_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """The same tensors by name, in device, dtype, shape and bytes."""
    assert actual.keys() == expected.keys(), what
    for name, tensor in expected.items():
        other = actual[name]
        seen = other.device.type, other.dtype, other.shape
        assert seen == (tensor.device.type, tensor.dtype, tensor.shape), f"{what}: {name} is {seen}"
        assert bytes_of(other) == bytes_of(tensor), f"{what}: {name} has other bytes"


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
