"""Which codec each layer's keys and values get: one name for keys, one for values, exceptions by layer.

An exception reads LAYERS=CODEC, LAYERS:keys=CODEC or LAYERS:values=CODEC; LAYERS is a number, a range 3-5, or counted
from the end, -1. The last exception that names a layer holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvcal_artifacts.codecs import Role
from kvcal_artifacts.errors import UsageError

from .backbones import Backbone, backbone
from .learned import Learned, learned

EXCEPTION = re.compile(r"(?P<first>-?\d+)(-(?P<last>\d+))?(:(?P<role>keys|values))?=(?P<codec>.+)")
ROLES: dict[str, Role] = {"keys": "key", "values": "value"}


@dataclass(frozen=True)
class LayerException:
    """One exception, read."""

    first: int
    last: int
    role: Role | None
    codec: str

    def holds(self, layer: int, layers: int, role: Role) -> bool:
        first, last = (n + layers if n < 0 else n for n in (self.first, self.last))
        return first <= layer <= last and self.role in (None, role)


@dataclass(frozen=True)
class Composition:
    """keys, values: codecs by name (see backbones); exceptions in the order given."""

    keys: str
    values: str
    exceptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.names:
            _named(name)

    @property
    def names(self) -> list[str]:
        return [self.keys, self.values, *(e.codec for e in self.read())]

    def read(self) -> list[LayerException]:
        return [_read(text) for text in self.exceptions]

    def check(self, layers: int) -> None:
        """Raises UsageError for an exception that names a layer the model does not have."""
        for text, e in zip(self.exceptions, self.read(), strict=True):
            if not -layers <= e.first < layers or not -layers <= e.last < layers:
                raise UsageError(f"--per-layer {text}: the model has layers 0 to {layers - 1} (or -{layers} to -1)")

    @property
    def learns(self) -> bool:
        """Whether any of its codecs is learned from text."""
        return any(learned(name) is not None for name in self.names)

    def codec(self, layer: int, layers: int, role: Role) -> Backbone | Learned:
        """The maker of this layer's codec, or what learns it."""
        name = self.keys if role == "key" else self.values
        for e in self.read():
            name = e.codec if e.holds(layer, layers, role) else name
        return _named(name)


def _named(name: str) -> Backbone | Learned:
    return learned(name) or backbone(name)


def _read(text: str) -> LayerException:
    found = EXCEPTION.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"--per-layer {text!r}: reads LAYERS=CODEC or LAYERS:keys=CODEC, as in 0=higgs-4 or -1:values=uniform-4"
        )
    first = int(found["first"])
    last = int(found["last"]) if found["last"] else first
    if last < first:
        raise UsageError(f"--per-layer {text!r}: the range ends before it begins")
    return LayerException(first, last, ROLES.get(found["role"] or ""), found["codec"])
