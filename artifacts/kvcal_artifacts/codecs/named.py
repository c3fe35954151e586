"""Codecs that need no data by a short name: higgs-2, uniform-4, uniform-2-channel, kivi-2, inner-3-symmetric, exact-16.

The command line, recipes and servers name codecs so; kvcal.methods.registry also reads names of codecs that are learned
from text.
"""

from __future__ import annotations

from collections.abc import Callable

from ..presets import INNERQ_KEYS, INNERQ_VALUES, divisor
from .base import Codec, Role, Shape
from .exact import Exact
from .float8 import Float8
from .higgs import Axis, Gain, Higgs, Points, Span
from .mixkvq import MixKVQ
from .scaled import Scaled
from .squat import Squat
from .uniform import MODES, Uniform

CodecMaker = Callable[[Shape, Role], Codec]
QUANTO_GROUP = 64  # AQUA-KV section 4.1: Quanto, group size 64, per token
CHANNEL_GROUP = 32  # tokens a group along the token axis: one block
KIVI_GROUP = INNER_GROUP = 32  # KIVI; InnerQ section 5.1


def _higgs(
    d: int, n: int, rotation: Span, axis: Axis = "channel", gain: Gain = "mse", points: Points = "exact"
) -> CodecMaker:
    return lambda shape, role: Higgs(shape, role, d=d, n=n, rotation=rotation, axis=axis, gain=gain, points=points)


def _uniform(bits: int, axis: str) -> CodecMaker:
    def make(shape: Shape, role: Role) -> Codec:
        if axis == "token":
            return Uniform(shape, role, bits, divisor(CHANNEL_GROUP, shape.block), "token")
        return Uniform(shape, role, bits, divisor(QUANTO_GROUP, shape.dim), "channel")

    return make


def _kivi(bits: int, group: int = KIVI_GROUP) -> CodecMaker:
    """Asymmetric; keys in groups of tokens of one channel, values in groups of channels of one token (KIVI section
    3.2).

    A group is no longer than a block (keys) or a head (values).
    """

    def make(shape: Shape, role: Role) -> Codec:
        if role == "key":
            return Uniform(shape, role, bits, divisor(group, shape.block), "token")
        return Uniform(shape, role, bits, divisor(group, shape.dim), "channel")

    return make


def _squat(bits: int, group: int = KIVI_GROUP) -> CodecMaker:
    """SQuat's keys at its Appendix D.2 settings, g being half of head_dim (64 of 128); its values are KIVI's."""
    plain = _kivi(bits, group)

    def make(shape: Shape, role: Role) -> Codec:
        inner = plain(shape, role)
        assert isinstance(inner, Uniform)
        return Squat(inner, channels=-(-shape.dim // 2)) if role == "key" else inner

    return make


def mixkvq(full: int | None = None, four: int | None = None) -> CodecMaker:
    """MixKVQ's keys, the first tier in float16: at the thresholds of the preset, or so many channels a head in the
    first two tiers. Its values are KIVI's of 2 bits.
    """

    def make(shape: Shape, role: Role) -> Codec:
        if role == "value":
            return _kivi(2)(shape, role)
        return MixKVQ(shape, role, group=divisor(KIVI_GROUP, shape.block), full=full, four=four)

    return make


def _inner(bits: int, mode: str, search: bool) -> CodecMaker:
    """Groups along the dimension that attention contracts: keys' channels, values' tokens (InnerQ section 4.4)."""

    def make(shape: Shape, role: Role) -> Codec:
        length = shape.dim if role == "key" else shape.block
        axis = "channel" if role == "key" else "token"
        return Uniform(shape, role, bits, divisor(INNER_GROUP, length), axis, mode, search)  # type: ignore[arg-type]

    return make


def _by_role(key: CodecMaker, value: CodecMaker) -> CodecMaker:
    return lambda shape, role: (key if role == "key" else value)(shape, role)


def _from_prefill(make: CodecMaker) -> CodecMaker:
    """Keys divided by factors from the row's first tokens (InnerQ section 4.3)."""
    return lambda shape, role: Scaled(make(shape, role), None, "prefill")


def _turboquant(bits: int, points: Points = "exact") -> CodecMaker:
    return lambda shape, role: Higgs(shape, role, d=1, n=2**bits, norm="head", points=points)


GAINS: tuple[tuple[str, Gain], ...] = (("", "mse"), ("-debiased", "debiased"))  # by the ends of names


def _table() -> dict[str, CodecMaker]:
    table: dict[str, CodecMaker] = {}
    for name, d, n in (("2", 2, 16), ("3", 2, 64), ("4", 2, 256), ("2-d4", 4, 256)):
        for suffix, gain in GAINS:
            table[f"higgs-{name}{suffix}"] = _higgs(d, n, "head", gain=gain)
            table[f"higgs-{name}-wide{suffix}"] = _higgs(d, n, "token", gain=gain)
            table[f"higgs-{name}-channel{suffix}"] = _higgs(d, n, "token", "token", gain=gain)
    for suffix, gain in GAINS:
        table[f"higgs-2-bytes{suffix}"] = _higgs(2, 16, "head", gain=gain, points="bytes")
    for bits in range(1, 9):
        table[f"uniform-{bits}"] = _uniform(bits, "channel")
        table[f"uniform-{bits}-channel"] = _uniform(bits, "token")
    for bits in (2, 3, 4, 8):
        table[f"kivi-{bits}"] = _kivi(bits)
    for bits in (2, 3, 4):
        table[f"turboquant-{bits}"] = _turboquant(bits)
        table[f"turboquant-{bits}-bytes"] = _turboquant(bits, "bytes")
        for mode in MODES:
            table[f"inner-{bits}-{mode}"] = _inner(bits, mode, search=True)
            table[f"inner-{bits}-{mode}-max"] = _inner(bits, mode, search=False)
    for variant, value in INNERQ_VALUES.items():
        table[f"innerq-{variant}"] = _by_role(_from_prefill(table[INNERQ_KEYS]), table[value])
        table[f"innerq-{variant}-plain"] = _by_role(table[INNERQ_KEYS], table[value])
    for format, name in (("e4m3fn", "fp8"), ("e5m2", "fp8-e5m2")):
        table[name] = lambda shape, role, format=format: Float8(shape, role, format)  # type: ignore[misc]
    for bits in (2, 3, 4):
        table[f"squat-{bits}"] = _squat(bits)
        table[f"kivi-{bits}-g128"], table[f"squat-{bits}-g128"] = _kivi(bits, 128), _squat(bits, 128)
    table["mixkvq"] = mixkvq()
    for bits, dtype in ((16, "float16"), (32, "float32")):
        table[f"exact-{bits}"] = lambda shape, role, dtype=dtype: Exact(shape, role, dtype)  # type: ignore[misc]
    table["exact-bf16"] = lambda shape, role: Exact(shape, role, "bfloat16")
    return table


CODEC_MAKERS = _table()
