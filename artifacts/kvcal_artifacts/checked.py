"""What may stand in a bundle: exact types, ranges, shapes, values. bundle.py and every codec's `from_state` use it.

A field is a small object with `check(value, what)`, which raises KVCalError naming `what`, the value and what is allowed.
Types are exact: `true` is no number, `1.0` no whole number. Constants are checked before anything of their size is made.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .errors import KVCalError

Found = TypeVar("Found")

# Far above any model that there is, and low enough that what a header claims costs nothing.
LAYERS, HEADS, HEAD_DIM, BLOCK = 1024, 1024, 1024, 1 << 16
TOKENS = 1 << 24  # of a window
DEPTH = 64  # of nested objects: `kvcal combine` adds two for each bundle that it combines
WHOLE = 1 << 64  # integers in free parts lie below it
HALF_MAX = 65504.0
DTYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8, "uint8": torch.uint8}

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def shown(value: Any) -> str:
    """A value in one short line."""
    return _SHORT.repr(value)


class Field(Protocol):
    def check(self, value: Any, what: str) -> None:
        """Raises KVCalError unless the value is allowed."""


@dataclass(frozen=True)
class Whole:
    """An integer from `least` to `most`."""

    least: int
    most: int

    def check(self, value: Any, what: str) -> None:
        if type(value) is not int or not self.least <= value <= self.most:
            raise KVCalError(
                f"{what} {shown(value)}: must be a whole number of at least {self.least}, at most {self.most}"
            )


@dataclass(frozen=True)
class Number:
    """An integer or a float from `least` (`above`: not itself) to `most`."""

    least: float
    most: float
    above: bool = False

    def check(self, value: Any, what: str) -> None:
        fits = type(value) in (int, float) and self.least <= value <= self.most
        if not fits or (self.above and value == self.least):
            limit = f"above {self.least:g}" if self.above else f"of at least {self.least:g}"
            raise KVCalError(f"{what} {shown(value)}: must be a number {limit}, at most {self.most:g}")


@dataclass(frozen=True)
class Flag:
    def check(self, value: Any, what: str) -> None:
        if type(value) is not bool:
            raise KVCalError(f"{what} {shown(value)}: must be true or false")


@dataclass(frozen=True)
class Choice:
    """One of these strings."""

    allowed: tuple[str, ...]

    def check(self, value: Any, what: str) -> None:
        if type(value) is not str or value not in self.allowed:
            raise KVCalError(f"{what} {shown(value)}: allowed are {', '.join(map(repr, self.allowed))}")


@dataclass(frozen=True)
class Text:
    """A string of `least` to `most` characters."""

    most: int = 300
    least: int = 1

    def check(self, value: Any, what: str) -> None:
        if type(value) is not str or not self.least <= len(value) <= self.most:
            raise KVCalError(f"{what} {shown(value)}: must be a string of {self.least} to {self.most} characters")


@dataclass(frozen=True)
class Hash:
    """A SHA-256 in lower-case hex digits. empty: or an empty string."""

    empty: bool = False

    def check(self, value: Any, what: str) -> None:
        if (
            type(value) is str
            and (len(value) == 64 or (self.empty and not value))
            and not value.strip("0123456789abcdef")
        ):
            return
        raise KVCalError(f"{what} {shown(value)}: must be 64 lower-case hex digits")


@dataclass(frozen=True)
class OrNull:
    of: Field

    def check(self, value: Any, what: str) -> None:
        if value is not None:
            self.of.check(value, what)


@dataclass(frozen=True)
class Listed:
    """A list of `least` to `most` entries, each of them `of`. once: no entry twice."""

    of: Field
    least: int
    most: int
    once: bool = False

    def check(self, value: Any, what: str) -> None:
        if type(value) is not list or not self.least <= len(value) <= self.most:
            size = f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"
            actual = f" of {len(value)}" if type(value) is list else f" {shown(value)}"
            raise KVCalError(f"{what}{actual}: must be a list of {size} entries")
        for number, entry in enumerate(value):
            self.of.check(entry, f"{what}[{number}]")
        if self.once and len(set(value)) != len(value):
            raise KVCalError(f"{what} {shown(value)}: must not hold an entry twice")


@dataclass(frozen=True)
class Table:
    """An object with exactly these keys; those in `optional` may be absent."""

    fields: Mapping[str, Field]
    optional: frozenset[str] = frozenset()

    def check(self, value: Any, what: str) -> None:
        if type(value) is not dict:
            raise KVCalError(f"{what} {shown(value)}: must be an object with {', '.join(self.fields)}")
        if missing := [name for name in self.fields if name not in value and name not in self.optional]:
            raise KVCalError(f"{what} lacks {', '.join(missing)}")
        if unknown := sorted(set(value) - set(self.fields)):
            raise KVCalError(f"{what} has {shown(unknown[0])}: allowed are {', '.join(self.fields)}")
        for name, entry in value.items():
            self.fields[name].check(entry, f"{what}, {name}")


@dataclass(frozen=True)
class Named:
    """An object whose keys are free and whose values are each `of`."""

    of: Field

    def check(self, value: Any, what: str) -> None:
        if type(value) is not dict:
            raise KVCalError(f"{what} {shown(value)}: must be an object")
        for name, entry in value.items():
            self.of.check(entry, f"{what}, {shown(name)}")


@dataclass(frozen=True)
class Free:
    """An object that says what it likes, to a limited depth. sized: in integers of at most 64 bits."""

    sized: bool = True

    def check(self, value: Any, what: str) -> None:
        if type(value) is not dict:
            raise KVCalError(f"{what} {shown(value)}: must be an object")
        level: list[Any] = [value]
        for _ in range(DEPTH):
            level = [inner for outer in level for inner in self._inside(outer, what)]
            if not level:
                return
        raise KVCalError(f"{what}: more than {DEPTH} objects and lists inside one another")

    def _inside(self, value: Any, what: str) -> list[Any]:
        """Objects and lists in an object or a list."""
        entries = value.values() if type(value) is dict else value
        for entry in entries:
            if self.sized and type(entry) is int and not -WHOLE < entry < WHOLE:
                raise KVCalError(f"{what}, {shown(entry)}: integers must have at most 64 bits")
        return [entry for entry in entries if type(entry) in (dict, list)]


SETTINGS = Free(sized=False)  # of a codec, which checks them itself
INNER = Table({"codec": Text(), "config": SETTINGS})  # a codec inside another


# Constants.


@dataclass(frozen=True)
class Constant:
    """dtype and shape of a tensor; a letter in the shape: any size, the same wherever a codec's constants have the letter.

    positive: no entry is 0 or less. largest: no entry's magnitude is beyond it; all are finite.
    """

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    positive: bool = False
    largest: float = field(default=math.inf)

    def fits(self, tensor: Tensor, sizes: dict[str, int]) -> bool:
        """Whether the tensor has this dtype and shape; sizes: those of letters so far, to which its own are added."""
        if tensor.dtype != self.dtype or tensor.ndim != len(self.shape):
            return False
        pairs = zip(self.shape, tensor.shape, strict=True)
        return all(size >= 1 and size == (sizes.setdefault(w, size) if isinstance(w, str) else w) for w, size in pairs)

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.shape))}{',' * (len(self.shape) == 1)}) {name_of(self.dtype)}"


def name_of(dtype: torch.dtype) -> str:
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
        raise KVCalError(f"{what} of {max(-low, high, key=abs):.3g}: must be at most {constant.largest:g} in magnitude")


def extremes(tensor: Tensor) -> tuple[float, float]:
    """The smallest and the largest entry; NaN where one is NaN."""

    def find() -> tuple[float, float]:
        low, high = tensor.aminmax()
        return float(low), float(high)

    return once(tensor, "extremes", find)


_FOUND = WeakTensorKeyDictionary()  # tensor -> what `once` found of it, by name


def once(tensor: Tensor, name: Any, find: Callable[[], Found]) -> Found:
    """What `find` finds of a tensor that nobody changes, found once: a thousand layers may name the same one."""
    facts: dict[Any, Found] = _FOUND.setdefault(tensor, {})
    if name not in facts:
        facts[name] = find()
    return facts[name]


def split(tensors: Mapping[str, Tensor], *prefixes: str) -> tuple[dict[str, Tensor], ...]:
    """Tensors whose names start with each prefix, without it; last those with none of them."""
    parts: tuple[dict[str, Tensor], ...] = tuple({} for _ in (*prefixes, ""))
    for name, tensor in tensors.items():
        at = next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), len(prefixes))
        parts[at][name.removeprefix(prefixes[at]) if at < len(prefixes) else name] = tensor
    return parts
