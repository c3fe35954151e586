"""Codecs by a short name, as users write them: higgs-2, uniform-4, uniform-2-channel, exact."""

from __future__ import annotations

from collections.abc import Callable

from kvcal_artifacts.codecs import Codec, Exact, Higgs, Role, Shape, Uniform
from kvcal_artifacts.errors import UsageError

Backbone = Callable[[Shape, Role], Codec]
QUANTO_GROUP = 64  # AQUA-KV section 4.1: Quanto, group size 64, per token
CHANNEL_GROUP = 32  # tokens a group along the token axis: one block


def _largest_divisor(limit: int, length: int) -> int:
    return next(size for size in range(min(limit, length), 0, -1) if length % size == 0)


def _higgs(d: int, n: int, rotation: str, axis: str = "channel", gain: str = "mse") -> Backbone:
    return lambda shape, role: Higgs(shape, role, d=d, n=n, rotation=rotation, axis=axis, gain=gain)  # type: ignore[arg-type]


def _uniform(bits: int, axis: str) -> Backbone:
    def make(shape: Shape, role: Role) -> Codec:
        if axis == "token":
            return Uniform(shape, role, bits, _largest_divisor(CHANNEL_GROUP, shape.block), "token")
        return Uniform(shape, role, bits, _largest_divisor(QUANTO_GROUP, shape.dim), "channel")

    return make


def _table() -> dict[str, Backbone]:
    table: dict[str, Backbone] = {}
    for name, d, n in (("2", 2, 16), ("3", 2, 64), ("4", 2, 256), ("2-d4", 4, 256)):
        for suffix, gain in (("", "mse"), ("-debiased", "debiased")):
            table[f"higgs-{name}{suffix}"] = _higgs(d, n, "head", gain=gain)
            table[f"higgs-{name}-wide{suffix}"] = _higgs(d, n, "token", gain=gain)
            table[f"higgs-{name}-channel{suffix}"] = _higgs(d, n, "token", "token", gain=gain)
    for bits in range(1, 9):
        table[f"uniform-{bits}"] = _uniform(bits, "channel")
        table[f"uniform-{bits}-channel"] = _uniform(bits, "token")
    for bits, dtype in ((16, "float16"), (32, "float32")):
        table[f"exact-{bits}"] = lambda shape, role, dtype=dtype: Exact(shape, role, dtype)  # type: ignore[misc]
    table["exact-bf16"] = lambda shape, role: Exact(shape, role, "bfloat16")
    return table


BACKBONES = _table()


def backbone(name: str) -> Backbone:
    """The codec maker of that name; UsageError naming what is allowed."""
    if name not in BACKBONES:
        raise UsageError(f"codec {name!r} is not known; allowed are {', '.join(BACKBONES)}")
    return BACKBONES[name]
