"""The constant tensors of a codec in a bundle: their dtypes, shapes and values, checked before they are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..checked import shown
from ..errors import KVCalError

Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Constant:
    """The dtype and shape that a tensor must have.

    A letter in the shape stands for any size, the same wherever a codec's constants have the letter. positive: no entry
    is 0 or less. largest: no entry's magnitude is beyond it; all are finite.
    """

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    positive: bool = False
    largest: float = field(default=math.inf)

    def fits(self, tensor: Tensor, sizes: dict[str, int]) -> bool:
        """Whether the tensor has this dtype and shape. sizes: those of letters so far, to which it adds its own."""
        if tensor.dtype != self.dtype or tensor.ndim != len(self.shape):
            return False
        pairs = zip(self.shape, tensor.shape, strict=True)
        return all(size >= 1 and size == (sizes.setdefault(w, size) if isinstance(w, str) else w) for w, size in pairs)

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.shape))}{',' * (len(self.shape) == 1)}) {name_of(self.dtype)}"


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype as errors have it: float16 of torch.float16."""
    return str(dtype).removeprefix("torch.")


def constants(tensors: Mapping[str, Tensor], expected: Mapping[str, Constant], what: str) -> None:
    """Raises KVCalError unless these are the tensors expected, by name, dtype, shape and values."""
    if missing := sorted(set(expected) - set(tensors)):
        raise KVCalError(f"{what} lacks {', '.join(missing)}")
    if unknown := sorted(set(tensors) - set(expected)):
        raise KVCalError(f"{what} has no tensor {shown(unknown[0])}")
    sizes: dict[str, int] = {}
    for name, constant in expected.items():
        tensor = tensors[name]
        if not constant.fits(tensor, sizes):
            raise KVCalError(f"{what}, {name} {tuple(tensor.shape)} {name_of(tensor.dtype)}: needs {constant}")
    for name, constant in expected.items():
        _values(tensors[name], constant, f"{what}, {name}")


def _values(tensor: Tensor, constant: Constant, what: str) -> None:
    if not tensor.is_floating_point():
        return
    low, high = extremes(tensor)
    if not -math.inf < low <= high < math.inf:
        raise KVCalError(f"{what}: holds a NaN or infinity")
    if constant.positive and low <= 0:
        raise KVCalError(f"{what} of {low:.3g}: must be positive everywhere")
    if max(-low, high) > constant.largest:
        raise KVCalError(f"{what} of {max(low, high, key=abs):.3g}: must be at most {constant.largest:g} in magnitude")


def extremes(tensor: Tensor) -> tuple[float, float]:
    """The smallest and the largest entry; NaN where one is NaN."""

    def find() -> tuple[float, float]:
        low, high = tensor.aminmax()
        return float(low), float(high)

    return once(tensor, "extremes", find)


_FACTS = WeakTensorKeyDictionary()  # tensor -> what `once` computed of it, by name


def once(tensor: Tensor, name: Hashable, find: Callable[[], Fact]) -> Fact:
    """What `find` returns for a tensor that nobody changes, computed once: a thousand layers may name the same one."""
    facts: dict[Hashable, Fact] = _FACTS.setdefault(tensor, {})
    if name not in facts:
        facts[name] = find()
    return facts[name]


def contents(tensor: Tensor) -> bytes:
    """The bytes of a tensor that nobody changes."""
    return once(tensor, "contents", lambda: tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())


def split(tensors: Mapping[str, Tensor], *prefixes: str) -> tuple[dict[str, Tensor], ...]:
    """Tensors whose names start with each prefix, without it; last those with none of them."""
    parts: tuple[dict[str, Tensor], ...] = tuple({} for _ in (*prefixes, ""))
    for name, tensor in tensors.items():
        at = next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), len(prefixes))
        parts[at][name.removeprefix(prefixes[at]) if at < len(prefixes) else name] = tensor
    return parts
