"""Data-free presets that pages can hold, by the names that `kvcal eval --preset` has for them."""

from __future__ import annotations

from collections.abc import Callable

from kvcal_artifacts.checked import shown
from kvcal_artifacts.codecs import Codec, Higgs, Role, Shape, Uniform
from kvcal_artifacts.codecs.higgs import Gain, Points
from kvcal_artifacts.codecs.uniform import Axis, Mode
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import LayerCodecs

GROUP = 64  # channels of a uniform codec that share a scale: AQUA-KV section 4.1
SHORT_GROUP = 32  # of KIVI and InnerQ, channels or tokens
Maker = Callable[[Shape, Role], Codec]


def _higgs(n: int, gain: Gain = "mse", points: Points = "exact") -> Maker:
    return lambda shape, role: Higgs(shape, role, d=2, n=n, gain=gain, points=points)


def _turboquant(bits: int, points: Points = "exact") -> Maker:
    return lambda shape, role: Higgs(shape, role, d=1, n=2**bits, norm="head", points=points)


def _uniform(bits: int) -> Maker:
    return lambda shape, role: Uniform(shape, role, bits, _divisor(GROUP, shape.dim), "channel")


def _kivi(bits: int, axis: Axis) -> Maker:
    return lambda shape, role: Uniform(shape, role, bits, _group(shape, axis), axis)


def _innerq(bits: int, axis: Axis, mode: Mode) -> Maker:
    return lambda shape, role: Uniform(shape, role, bits, _group(shape, axis), axis, mode, search=True)


def _group(shape: Shape, axis: Axis) -> int:
    return _divisor(SHORT_GROUP, shape.dim if axis == "channel" else shape.block)


def _divisor(limit: int, length: int) -> int:
    """The largest size up to `limit` that divides `length`."""
    return next(size for size in range(min(limit, length), 0, -1) if length % size == 0)


def _table() -> dict[str, tuple[Maker, Maker]]:
    """Makers of the codecs of keys and values by the preset's name."""
    table: dict[str, tuple[Maker, Maker]] = {}
    gains: tuple[tuple[str, Gain], ...] = (("", "mse"), ("-debiased", "debiased"))
    for end, gain in gains:
        for bits in (2, 3, 4):
            table[f"higgs-{bits}{end}"] = (_higgs(4**bits, gain),) * 2
        table[f"higgs-2-bytes{end}"] = (_higgs(16, gain, "bytes"),) * 2
    grids: tuple[tuple[str, Points], ...] = (("", "exact"), ("-bytes", "bytes"))
    for end, points in grids:
        for bits in (2, 3, 4):
            table[f"turboquant-{bits}{end}"] = (_turboquant(bits, points),) * 2
        table[f"turboquant-4-3{end}"] = _turboquant(4, points), _turboquant(3, points)
    table["turboquant-k4v3"] = table["turboquant-4-3"]
    for bits in (2, 3, 4, 8):
        table[f"uniform-{bits}"] = (_uniform(bits),) * 2
    for bits in (2, 4):
        table[f"kivi-{bits}"] = _kivi(bits, "token"), _kivi(bits, "channel")
    values: tuple[tuple[str, int, Mode], ...] = (("base", 3, "symmetric"), ("hybrid", 2, "hybrid"))
    for name, bits, mode in (*values, ("small", 2, "symmetric")):
        table[f"innerq-{name}-plain"] = _innerq(3, "channel", "symmetric"), _innerq(bits, "token", mode)
    return table


PRESETS = _table()


def codecs(name: str, shape: Shape) -> LayerCodecs:
    """The codecs of one layer. Raises UsageError for a name that is not in PRESETS."""
    if name not in PRESETS:
        raise UsageError(f"preset {shown(name)}: vLLM's pages hold {', '.join(PRESETS)}, or give a bundle's path")
    key, value = PRESETS[name]
    return LayerCodecs(key(shape, "key"), value(shape, "value"))
