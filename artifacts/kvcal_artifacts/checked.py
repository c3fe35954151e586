"""What may stand in a bundle: exact types, ranges, shapes, values. bundle/ and every codec's `from_state` use it.

A field is a small object with `check(value, what)`, which raises KVCalError naming `what`, the value and what is
allowed. Types are exact: `true` is no number, `1.0` no whole number. Constants are checked before anything of their
size is made.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypedDict, TypeGuard, TypeVar

import torch

from .errors import KVCalError

Fact = TypeVar("Fact")
Stated = TypeVar("Stated")  # a TypedDict

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

# Far above any model that there is, and low enough that what a header claims costs nothing.
LAYERS, HEADS, HEAD_DIM, BLOCK = 1024, 1024, 1024, 1 << 16
TOKENS = 1 << 24  # of a window
DEPTH = 64  # of nested objects: `kvcal combine` adds two for each bundle that it combines
WHOLE = 1 << 64  # integers in free parts lie below it
HALF_MAX = 65504.0  # the largest float16
DTYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8, "uint8": torch.uint8}

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def shown(value: object) -> str:
    """A value in one short line."""
    return _SHORT.repr(value)


class Field(Protocol):
    """What one value of a bundle may be."""

    def check(self, value: object, what: str) -> None:
        """Raises KVCalError unless the value is allowed."""


@dataclass(frozen=True)
class Whole:
    """An integer from `least` to `most`."""

    least: int
    most: int

    def check(self, value: object, what: str) -> None:
        if type(value) is not int or not self.least <= value <= self.most:
            raise KVCalError(
                f"{what} {shown(value)}: must be a whole number of at least {self.least}, at most {self.most}"
            )


@dataclass(frozen=True)
class Number:
    """An integer or a float from `least` to `most`. above: `least` itself is not allowed."""

    least: float
    most: float
    above: bool = False

    def check(self, value: object, what: str) -> None:
        fits = (type(value) is int or type(value) is float) and self.least <= value <= self.most
        if not fits or (self.above and value == self.least):
            limit = f"above {self.least:g}" if self.above else f"of at least {self.least:g}"
            raise KVCalError(f"{what} {shown(value)}: must be a number {limit}, at most {self.most:g}")


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def check(self, value: object, what: str) -> None:
        if type(value) is not bool:
            raise KVCalError(f"{what} {shown(value)}: must be true or false")


@dataclass(frozen=True)
class FlagOr:
    """True, false, or one string."""

    name: str

    def check(self, value: object, what: str) -> None:
        if type(value) is not bool and not (type(value) is str and value == self.name):
            raise KVCalError(f"{what} {shown(value)}: must be true, false or {self.name!r}")


@dataclass(frozen=True)
class Choice:
    """A string that is one of those allowed."""

    allowed: tuple[str, ...]

    def check(self, value: object, what: str) -> None:
        if type(value) is not str or value not in self.allowed:
            raise KVCalError(f"{what} {shown(value)}: allowed are {', '.join(map(repr, self.allowed))}")


@dataclass(frozen=True)
class Text:
    """A string of `least` to `most` characters."""

    most: int = 300
    least: int = 1

    def check(self, value: object, what: str) -> None:
        if type(value) is not str or not self.least <= len(value) <= self.most:
            raise KVCalError(f"{what} {shown(value)}: must be a string of {self.least} to {self.most} characters")


@dataclass(frozen=True)
class Hash:
    """A SHA-256 in lower-case hex digits. empty: whether it may also be an empty string."""

    empty: bool = False

    def check(self, value: object, what: str) -> None:
        if (
            type(value) is str
            and (len(value) == 64 or (self.empty and not value))
            and not value.strip("0123456789abcdef")
        ):
            return
        raise KVCalError(f"{what} {shown(value)}: must be 64 lower-case hex digits")


@dataclass(frozen=True)
class OrNull:
    """Null, or what `of` allows."""

    of: Field

    def check(self, value: object, what: str) -> None:
        if value is not None:
            self.of.check(value, what)


@dataclass(frozen=True)
class Listed:
    """A list of `least` to `most` entries, each as `of` allows. once: no entry stands in it twice."""

    of: Field
    least: int
    most: int
    once: bool = False

    def check(self, value: object, what: str) -> None:
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

    def check(self, value: object, what: str) -> None:
        if type(value) is not dict:
            raise KVCalError(f"{what} {shown(value)}: must be an object with {', '.join(self.fields)}")
        if missing := [name for name in self.fields if name not in value and name not in self.optional]:
            raise KVCalError(f"{what} lacks {', '.join(missing)}")
        if unknown := sorted(set(value) - set(self.fields)):
            raise KVCalError(f"{what} has {shown(unknown[0])}: allowed are {', '.join(self.fields)}")
        for name, entry in value.items():
            self.fields[name].check(entry, f"{what}, {name}")


@dataclass(frozen=True)
class Schema(Table, Generic[Stated]):
    """A table whose entries have the types of the TypedDict Stated."""

    def read(self, value: object, what: str) -> Stated:
        """The value, once `check` has passed it."""
        self.check(value, what)
        assert self._is_checked(value)
        return value

    def _is_checked(self, value: object) -> TypeGuard[Stated]:
        return type(value) is dict


@dataclass(frozen=True)
class Named:
    """An object whose keys are free and whose values are each as `of` allows."""

    of: Field

    def check(self, value: object, what: str) -> None:
        if type(value) is not dict:
            raise KVCalError(f"{what} {shown(value)}: must be an object")
        for name, entry in value.items():
            self.of.check(entry, f"{what}, {shown(name)}")


@dataclass(frozen=True)
class Free:
    """An object of any content, to a limited depth. sized: whether its integers must have at most 64 bits."""

    sized: bool = True

    def check(self, value: object, what: str) -> None:
        if type(value) is not dict:
            raise KVCalError(f"{what} {shown(value)}: must be an object")
        level: list[Iterable[object]] = [value.values()]
        for _ in range(DEPTH):
            level = [inner for outer in level for inner in self._inside(outer, what)]
            if not level:
                return
        raise KVCalError(f"{what}: more than {DEPTH} objects and lists inside one another")

    def _inside(self, entries: Iterable[object], what: str) -> Iterator[Iterable[object]]:
        """The entries of the objects and lists among these."""
        for entry in entries:
            if self.sized and type(entry) is int and not -WHOLE < entry < WHOLE:
                raise KVCalError(f"{what}, {shown(entry)}: integers must have at most 64 bits")
            if type(entry) is dict:
                yield entry.values()
            elif type(entry) is list:
                yield entry


class State(TypedDict):
    """A codec as a bundle states it, without its tensors."""

    codec: str
    config: Mapping[str, object]


SETTINGS = Free(sized=False)  # of a codec, which checks them itself
INNER = Table({"codec": Text(), "config": SETTINGS})  # a codec inside another, a State
