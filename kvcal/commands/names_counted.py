"""What options take by name, with the bits that the codecs themselves count."""

from __future__ import annotations

from collections.abc import Iterator

from kvcal_artifacts.codecs import Role, Shape
from kvcal_artifacts.codecs.named import CODEC_MAKERS, CodecMaker
from kvcal_artifacts.errors import KVCalError

from ..bench import schemes
from ..bench.devices import DEVICES, MEASURED
from ..bench.operations import OPERATIONS
from ..methods.data_free import PRESETS
from ..methods.registry import BY_HEAD, CALIBRATED, EXAMPLE
from ..models.geometry import Geometry
from ..pipeline.names import NameRow
from .bench_options import ALWAYS_PROJECTED, GENERATION, GROUPS

ROLES: tuple[Role, Role] = ("key", "value")
BLOCK = 32  # tokens; groups of keys along the tokens are no longer
JETSON = "measured on a Jetson, else projected: the Orin Nano, and Table 4 of the Xavier NX"
TIERS = "mixkvq-FULL-FOUR"


def counted(geometry: Geometry) -> list[NameRow]:
    """All names, with the bits that the codecs themselves count at this model's geometry. Imports torch."""
    return [*_rows(geometry)]


def _rows(geometry: Geometry) -> Iterator[NameRow]:
    for name in schemes.scheme_names():
        yield _scheme(name, geometry)
    for name, make in CODEC_MAKERS.items():
        yield _row("codec", name, "", *(_bits(make, geometry, role) for role in ROLES))
    yield _row("codec", TIERS, "keys in float16, 4 and 2 bits: so many channels a head in the first two")
    yield _row("codec", BY_HEAD, f"so many kv heads of a layer in each codec, from head 0 on, as {EXAMPLE}")
    for name, family in CALIBRATED.items():
        yield _row("codec", name, f"learned by `kvcal fit-predictors`, as {family.example}")
    for name, operation in OPERATIONS.items():
        yield _row("operation", name, operation.what)
    for name, what in GENERATION.items():
        yield _row("operation", name, what)
    for name, parts in GROUPS.items():
        yield _row("operation", name, ", ".join(parts))
    for name, what in ALWAYS_PROJECTED.items():
        yield _row("operation", name, f"{what}; always projected")
    for name in MEASURED:
        yield _row("device", name, JETSON if name == "jetson" else "measured here")
    for name, device in DEVICES.items():
        yield _row("device", name, device.title)


def _scheme(name: str, geometry: Geometry) -> NameRow:
    kind = "preset" if name in PRESETS else "scheme"
    try:
        scheme = schemes.named(name, geometry)
    except KVCalError as error:
        return _row(kind, name, str(error))
    preset = PRESETS.get(name)
    windows = scheme.windows if preset is None else preset
    text = f"{scheme.frame}, sink {windows.sink}, recent {windows.recent}"
    text += f", {scheme.placeholder}" if scheme.placeholder else ""
    return _row(kind, name, text, scheme.codecs.key.bits_per_value(), scheme.codecs.value.bits_per_value())


def _bits(make: CodecMaker, geometry: Geometry, role: Role) -> float | None:
    try:
        bits: float = make(Shape(geometry.kv_heads, geometry.head_dim, BLOCK), role).bits_per_value()
    except KVCalError:
        return None
    return bits


def _row(kind: str, name: str, text: str, key: float | None = None, value: float | None = None) -> NameRow:
    return {"kind": kind, "name": name, "key_bits": key, "value_bits": value, "about": text}
