"""Reading provenance and metrics of a bundle, which may be any JSON: another type is reported, not raised."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, overload

from kvcal_artifacts.errors import CorruptBundle

if TYPE_CHECKING:
    from kvcal_artifacts.bundle import Bundle

KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a table",
    type(None): "nothing",
}
DEEPEST = 64  # tables and lists within each other; ours have 12, and Python's limit is near 1000 calls

Kind = TypeVar("Kind")


def kind_of(value: object) -> str:
    """The type of a JSON value in words: "text", "a list"."""
    return KINDS.get(type(value), "something else")


def mistyped(value: object, kind: type) -> str:
    """What to show instead of a value of another type than expected."""
    return f"recorded as {kind_of(value)}, expected {KINDS[kind]}"


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a finite number that a float can hold; true and false are none."""
    try:
        return (type(value) is int or type(value) is float) and math.isfinite(value)
    except OverflowError:  # a whole number of 400 digits
        return False


def check_depth(bundle: Bundle) -> None:
    """Raise CorruptBundle where provenance or metrics nest deeper than DEEPEST: what reads them calls itself at each
    level.
    """
    for name, value in (("provenance", bundle.provenance), ("metrics", bundle.metrics)):
        if _too_deep(value):
            raise CorruptBundle(f"{bundle.name}: its {name} has more than {DEEPEST} lists and tables within each other")


def _too_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        inner: list[object] = []
        for one in level:
            inner += one.values() if isinstance(one, dict) else one if isinstance(one, (list, tuple)) else ()
        level = [one for one in inner if isinstance(one, (dict, list, tuple))]
        if not level:
            return False
    return True


class Table:
    """A JSON table by name. fault: what to show where it is none; it then reads as an empty one."""

    def __init__(self, value: object) -> None:
        self.fields: Mapping[str, object] = value if isinstance(value, Mapping) else {}
        self.fault = None if value is None or isinstance(value, Mapping) else mistyped(value, dict)

    def __bool__(self) -> bool:
        return bool(self.fields)

    def table(self, name: str) -> Table:
        return Table(self.fields.get(name))

    def value(self, name: str, kind: type[Kind]) -> Kind | None:
        """The value of that name if it is of that type, else None. float: any finite number."""
        value: Any = self.fields.get(name)  # of type `kind` where it is returned: a whole number passes for a float
        return value if (is_number(value) if kind is float else type(value) is kind) else None

    @overload
    def display(self, name: str) -> str | None: ...

    @overload
    def display(self, name: str, kind: type[Kind]) -> Kind | str | None: ...

    def display(self, name: str, kind: type = str) -> object:
        """The value to be shown; where it is of another type, what it was recorded as; None where it is missing or
        null.
        """
        value = self.fields.get(name)
        return value if value is None or self.value(name, kind) is not None else mistyped(value, kind)

    def items(self) -> Iterator[tuple[str, object]]:
        """Names and values, these as they are shown: floats to five digits."""
        for name, value in self.fields.items():
            yield str(name), f"{value:.5g}" if isinstance(value, float) else value
