"""Which codec each layer's keys and values get: one name for keys, one for values, exceptions by layer.

An exception reads LAYERS=CODEC, LAYERS:keys=CODEC or LAYERS:values=CODEC; LAYERS is a number, a range 3-5, or counted
from the end, -1. The last exception that names a layer holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvcal_artifacts.codecs import Role
from kvcal_artifacts.codecs.named import CodecMaker
from kvcal_artifacts.errors import UsageError

from .calibrated import Calibrated, calibration_of
from .registry import codec_maker

EXCEPTION = re.compile(r"(?P<first>-?\d+)(-(?P<last>\d+))?(:(?P<role>keys|values))?=(?P<codec>.+)")
ROLES: dict[str, Role] = {"keys": "key", "values": "value"}


@dataclass(frozen=True)
class LayerException:
    """One exception, read."""

    first: int
    last: int
    role: Role | None
    codec: str

    def names(self, layer: int, layers: int) -> bool:
        first, last = (n + layers if n < 0 else n for n in (self.first, self.last))
        return first <= layer <= last

    def holds(self, layer: int, layers: int, role: Role) -> bool:
        return self.names(layer, layers) and self.role in (None, role)


@dataclass(frozen=True)
class _Names:
    """Names of codecs of all layers. keys, values: of layers without exceptions. exceptions: in the caller's order."""

    keys: str
    values: str
    exceptions: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [self.keys, self.values, *(e.codec for e in self.read())]

    def roles(self) -> dict[str, frozenset[Role]]:
        """Codec by name -> of which of keys and values it is, of some layer."""
        by_codec: dict[str, frozenset[Role]] = {}
        both: frozenset[Role] = frozenset({"key", "value"})
        named = [(self.keys, frozenset[Role]({"key"})), (self.values, frozenset[Role]({"value"}))]
        named += [(e.codec, both if e.role is None else frozenset({e.role})) for e in self.read()]
        for name, roles in named:
            by_codec[name] = by_codec.get(name, frozenset()) | roles
        return by_codec

    def read(self) -> list[LayerException]:
        return [_read(text) for text in self.exceptions]

    def check(self, layers: int) -> None:
        """Raises UsageError for an exception that names a layer the model does not have."""
        for text, e in zip(self.exceptions, self.read(), strict=True):
            if not -layers <= e.first < layers or not -layers <= e.last < layers:
                raise UsageError(f"--per-layer {text}: the model has layers 0 to {layers - 1} (or -{layers} to -1)")

    def check_reach(self, layers: int, skipped: Mapping[int, str]) -> None:
        """Raises UsageError for an exception of none but skipped layers: index -> reason."""
        for text, e in zip(self.exceptions, self.read(), strict=True):
            named = [layer for layer in range(layers) if e.names(layer, layers)]
            if named and all(layer in skipped for layer in named):
                raise UsageError(f"--per-layer {text}: layer {named[0]} is not compressed: {skipped[named[0]]}")

    def name(self, layer: int, layers: int, role: Role) -> str:
        """The name of this layer's codec."""
        name = self.keys if role == "key" else self.values
        for e in self.read():
            name = e.codec if e.holds(layer, layers, role) else name
        return name


@dataclass(frozen=True)
class Composition(_Names):
    """Which layer gets which codec, with data or without, where there is text to learn from."""

    def __post_init__(self) -> None:
        for name in self.names:
            _named(name)

    @property
    def learns(self) -> bool:
        """Whether any of its codecs is learned from text."""
        return any(calibration_of(name) is not None for name in self.names)

    def codec(self, layer: int, layers: int, role: Role) -> CodecMaker | Calibrated:
        """The maker of this layer's codec, or what learns it."""
        return _named(self.name(layer, layers, role))


@dataclass(frozen=True)
class DataFreeComposition(_Names):
    """Which layer gets which codec where none needs data; UsageError for others."""

    def __post_init__(self) -> None:
        for name in self.names:
            codec_maker(name)

    def codec(self, layer: int, layers: int, role: Role) -> CodecMaker:
        return codec_maker(self.name(layer, layers, role))


def _named(name: str) -> CodecMaker | Calibrated:
    return calibration_of(name) or codec_maker(name)


def _read(text: str) -> LayerException:
    parts = EXCEPTION.fullmatch(text.strip())
    if parts is None:
        raise UsageError(
            f"--per-layer {text!r}: reads LAYERS=CODEC or LAYERS:keys=CODEC, as in 0=higgs-4 or -1:values=uniform-4"
        )
    first = int(parts["first"])
    last = int(parts["last"]) if parts["last"] else first
    if last < first:
        raise UsageError(f"--per-layer {text!r}: the range ends before it begins")
    return LayerException(first, last, ROLES.get(parts["role"] or ""), parts["codec"])
