"""`kvcal names`: what options take by name, with the bits that it stores."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from kvcal_artifacts.codecs import Shape
from kvcal_artifacts.errors import KVCalError, UsageError

from ..bench import schemes
from ..bench.devices import DEVICES, MEASURED
from ..bench.operations import OPERATIONS
from ..methods.data_free import PRESETS
from ..methods.registry import BACKBONES, CALIBRATED
from ..models import configuration, names
from ..models.catalogue import Geometry
from ..report.suggest import allowed
from .bench_options import ALWAYS_PROJECTED, GENERATION, GROUPS
from .common import refuse_idle

BLOCK = 32  # tokens; groups of keys along the tokens are no longer
KINDS = ("preset", "codec", "scheme", "operation", "device")
JETSON = "measured on a Jetson, else projected: the Orin Nano, and Table 4 of the Xavier NX"
TIERS = "mixkvq-FULL-FOUR"


def run_names(kind: str | None, model: str, typed: Collection[str] = ()) -> list[dict[str, Any]]:
    """Rows of kind, name, key_bits and value_bits at this model's geometry (None: it depends on the text, or does not
    fit), about. Raises UsageError for an unknown kind or model, and for a model given (`typed`) where nothing has bits;
    reads no weights.
    """
    if kind is not None and kind not in KINDS:
        raise UsageError(f"kind {kind!r} is not known; {allowed(kind, KINDS, 'kvcal names')}")
    if kind in ("operation", "device"):
        refuse_idle(typed, ("model",), "names with bits a value", f"no {kind} has them; leave it out")
    rows = _rows(configuration.geometry(names.resolve(model)))
    return [row for row in rows if kind in (None, row["kind"])]


def _rows(geometry: Geometry) -> Iterator[dict[str, Any]]:
    for name in schemes.known():
        yield _scheme(name, geometry)
    for name, make in BACKBONES.items():
        yield _row("codec", name, "", *(_bits(make, geometry, role) for role in ("key", "value")))
    yield _row("codec", TIERS, "keys in float16, 4 and 2 bits: so many channels a head in the first two")
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
        yield _row("device", name, f"{device.title}: measured, or projected where it is not here")


def _scheme(name: str, geometry: Geometry) -> dict[str, Any]:
    kind = "preset" if name in PRESETS else "scheme"
    try:
        scheme = schemes.named(name, geometry)
    except KVCalError as error:
        return _row(kind, name, str(error))
    preset = PRESETS.get(name)
    windows = scheme.windows if preset is None else preset
    text = f"{scheme.frame}, sink {windows.sink}, recent {windows.recent}"
    text += "; of `kvcal bench` alone" if preset is None else ""
    text += f", {scheme.made_up}" if scheme.made_up else ""
    return _row(kind, name, text, scheme.codecs.key.bits_per_value(), scheme.codecs.value.bits_per_value())


def _bits(make: Any, geometry: Geometry, role: str) -> float | None:
    try:
        bits: float = make(Shape(geometry.kv_heads, geometry.head_dim, BLOCK), role).bits_per_value()
    except KVCalError:
        return None
    return bits


def _row(kind: str, name: str, text: str, key: float | None = None, value: float | None = None) -> dict[str, Any]:
    return {"kind": kind, "name": name, "key_bits": key, "value_bits": value, "about": text}
