"""Codecs by a short name, as users write them: higgs-2, uniform-4, uniform-2-channel, kivi-2, inner-3-symmetric,
exact-16.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from kvcal_artifacts.codecs import (
    ByHead,
    Codec,
    Exact,
    Float8,
    Higgs,
    MixKVQ,
    Role,
    Scaled,
    Shape,
    Squat,
    Uniform,
    load_plugins,
)
from kvcal_artifacts.codecs.higgs import Axis, Gain, Points, Span
from kvcal_artifacts.codecs.transform import MSE as TRANSFORM_MSE
from kvcal_artifacts.codecs.uniform import MODES
from kvcal_artifacts.errors import UsageError

from ..report.suggest import allowed

CodecMaker = Callable[[Shape, Role], Codec]
QUANTO_GROUP = 64  # AQUA-KV section 4.1: Quanto, group size 64, per token
CHANNEL_GROUP = 32  # tokens a group along the token axis: one block
KIVI_GROUP = INNER_GROUP = 32  # KIVI; InnerQ section 5.1


INNERQ_KEYS = "inner-3-symmetric"  # InnerQ section 4.4: keys of all variants
INNERQ_VALUES = {"base": "inner-3-symmetric", "hybrid": "inner-2-hybrid", "small": "inner-2-symmetric"}


def divisor(limit: int, length: int) -> int:
    """The largest size up to `limit` that divides `length`."""
    return next(size for size in range(min(limit, length), 0, -1) if length % size == 0)


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


def _mixkvq(full: int | None = None, four: int | None = None) -> CodecMaker:
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
    """Keys divided by factors of the row's own first tokens (InnerQ section 4.3)."""
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
    table["mixkvq"] = _mixkvq()
    for bits, dtype in ((16, "float16"), (32, "float32")):
        table[f"exact-{bits}"] = lambda shape, role, dtype=dtype: Exact(shape, role, dtype)  # type: ignore[misc]
    table["exact-bf16"] = lambda shape, role: Exact(shape, role, "bfloat16")
    return table


CODEC_MAKERS = _table()

# Names of methods and of the format's codecs that mean nothing by themselves -> their own command; what to name
# instead.
FITTED = {
    "vqkv": ("train-codebooks", "codebooks of residuals are vq-2 or vq-2-k4096"),
    "residual-vq": ("train-codebooks", "codebooks of residuals are vq-2 or vq-2-k4096"),
    "kvtuner": ("tune-bits", "bits of layers go into --per-layer"),
    "scaled": ("fit-norms", "with factors a codec is CODEC-scaled, as inner-3-symmetric-scaled"),
    "innerq": ("fit-norms", "InnerQ is innerq-base, with factors of residuals innerq-base-plain-scaled"),
    "squat": ("measure-subspaces", "SQuat is squat-2, with a subspace from text squat-2-calibrated"),
    "predicted": ("fit-predictors", "name what codes the residuals, as higgs-2-wide-debiased"),
    "aqua-kv": ("fit-predictors", "name what codes the residuals, as higgs-2-wide-debiased"),
}
FIXED_TIERS = re.compile(r"mixkvq-(\d+)-(\d+)")
BY_HEAD = "NxCODEC+NxCODEC"  # as names of codecs by kv head read; NEXT joins their parts
NEXT, EXAMPLE = "+", "1xhiggs-4+2xhiggs-2"
PART = re.compile(r"([1-9][0-9]{0,3})x(.+)")


def codec_maker(name: str) -> CodecMaker:
    """The maker of that name, of a codec that needs no data; UsageError naming what is allowed."""
    if name in CODEC_MAKERS:
        return CODEC_MAKERS[name]
    if tiers := FIXED_TIERS.fullmatch(name):
        return _mixkvq(int(tiers[1]), int(tiers[2]))
    if NEXT in name:
        return _by_head(name)
    if name in FITTED:
        command, instead = FITTED[name]
        raise UsageError(
            f"codec {name!r} needs a fit of its own (`kvcal {command}`), its name alone is no codec; {instead}"
        )
    if calibrated_name(name) is not None:
        raise UsageError(
            f"codec {name!r} is learned from text: fit it with `kvcal fit-predictors --residual {name}`, without "
            "predictors "
            "with --key-inputs none --value-inputs none"
        )
    load_plugins()
    if name in CODEC_MAKERS:
        return CODEC_MAKERS[name]
    names = [*CODEC_MAKERS, *(family.example for family in CALIBRATED.values())]
    raise UsageError(f"codec {name!r} is not known; {allowed(name, names, 'kvcal names codec')}")


def _by_head(name: str) -> CodecMaker:
    """The maker of a codec by kv head, from a name as "1xhiggs-4+2xhiggs-2". UsageError for parts that cannot be."""
    parts: list[tuple[int, CodecMaker]] = []
    for text in name.split(NEXT):
        if (read := PART.fullmatch(text)) is None:
            raise UsageError(f"codec {name!r}, part {text!r}: reads {BY_HEAD}, so many kv heads of each, as {EXAMPLE}")
        if calibrated_name(codec := read[2]) is not None:
            raise UsageError(
                f"codec {name!r}: {codec} is learned from text, for all heads of a layer; heads of their own take "
                "codecs that need no data, as higgs-2"
            )
        parts.append((int(read[1]), codec_maker(codec)))
    heads = sum(count for count, _ in parts)

    def make(shape: Shape, role: Role) -> Codec:
        if heads != shape.heads:
            raise UsageError(f"codec {name!r} is for {heads} kv heads, the model's layers have {shape.heads}")
        return ByHead([make(Shape(count, shape.dim, shape.block), role) for count, make in parts])

    return make


def no_factors(codec: str) -> tuple[str, str] | None:
    """Why factors from text are of no use to keys of that codec, and which codec is the same without factors
    of its own, "" for none; None where they are of use. Raises UsageError for an unknown name.
    """
    make = codec_maker(codec)
    if NEXT in codec:
        return f"{codec} has codecs of its own for groups of heads, without factors", ""
    example = make(Shape(1, 256, 32), "key")
    if isinstance(example, Scaled):
        return f"{codec} divides keys by factors of each row's own already", f"{codec}-plain"
    if codes_apart(example):
        return f"{codec} codes each key channel by itself, where a factor changes nothing", ""
    return None


def codes_apart(codec: Codec) -> bool:
    """Whether keys' channels do not share a scale, so that a large one costs the others nothing."""
    if isinstance(codec, ByHead):
        return all(codes_apart(part) for part in codec.parts)
    return isinstance(codec, Exact | Float8 | MixKVQ | Squat) or getattr(codec, "axis", "channel") == "token"


@dataclass(frozen=True)
class Family:
    """Names of one kind of codec that is learned from text (see calibrated). example: one of them.

    check: raises UsageError for a name that reads like this kind, but cannot be made.
    """

    example: str
    pattern: re.Pattern[str]
    check: Callable[[re.Match[str]], None]


def _check_transform(name: re.Match[str]) -> None:
    if not 0 < float(name["bits"]) <= max(TRANSFORM_MSE):
        raise UsageError(f"codec {name[0]!r}: transform coding takes above 0 to {max(TRANSFORM_MSE)} bits")


def _check_codebooks(name: re.Match[str]) -> None:
    size = int(name["size"] or CODEWORDS)
    if not 2 <= size <= 65536 or size & (size - 1):
        raise UsageError(f"codec {name[0]!r}: a codebook has a power of two from 2 to 65536 codewords")
    if not 0 < float(name["bits"]) <= 16:
        raise UsageError(f"codec {name[0]!r}: residual codebooks take above 0 to 16 bits")


def _check_tiers(name: re.Match[str]) -> None:
    if not 2 <= float(name["bits"]) <= 16:
        raise UsageError(f"codec {name[0]!r}: tiers of 2, 4 and 16 bits make 2 to 16 bits")


def _check_subspace(name: re.Match[str]) -> None:
    codec_maker(name["codec"])  # refuses bits that SQuat is not named with


def _check_factors(name: re.Match[str]) -> None:
    if calibrated_name(name["codec"]) is not None:
        raise UsageError(f"codec {name[0]!r}: {name['codec']} learns its own units or tiers; take it without factors")
    refuse_factors(name["codec"], name["rule"])


def refuse_factors(codec: str, rule: str) -> None:
    """Raises UsageError where factors from text are of no use to that codec, naming what to take."""
    if (refusal := no_factors(codec)) is not None:
        why, bare = refusal
        other = f"{codec}, or factors with codes along channels, as higgs-2-wide-{rule}"
        raise UsageError(f"codec '{codec}-{rule}': {why}; take {f'{bare}-{rule}' if bare else other}")


CODEWORDS = 256  # of a codebook whose name gives no other number

# By how they read. `calibrated` has the maker of each; adding one here adds its example to the contract tests.
CALIBRATED = {
    "transform-BITS[-debiased]": Family(
        "transform-2.5", re.compile(r"transform-(?P<bits>\d(\.\d+)?)(?P<gain>-debiased)?"), _check_transform
    ),
    "vq-BITS[-kCODEWORDS]": Family("vq-2", re.compile(r"vq-(?P<bits>\d+(\.\d+)?)(-k(?P<size>\d+))?"), _check_codebooks),
    "mixkvq-BITS": Family("mixkvq-3", re.compile(r"mixkvq-(?P<bits>\d+(\.\d+)?)"), _check_tiers),
    "squat-BITS[-g128]-calibrated": Family(
        "squat-2-calibrated", re.compile(r"(?P<codec>squat-\d(-g128)?)-calibrated"), _check_subspace
    ),
    "CODEC-scaled": Family("inner-2-symmetric-scaled", re.compile(r"(?P<codec>.+)-(?P<rule>scaled)"), _check_factors),
    "CODEC-balanced": Family("higgs-2-wide-balanced", re.compile(r"(?P<codec>.+)-(?P<rule>balanced)"), _check_factors),
}


def calibrated_name(name: str) -> tuple[str, re.Match[str]] | None:
    """The kind (a key of CALIBRATED) and the parts of the name of a codec that is learned from text; None for names of
    others.

    Raises UsageError for one that cannot be.
    """
    if NEXT in name:  # codecs by kv head: what their parts' names end in is not said of all
        return None
    for kind, family in CALIBRATED.items():
        if (parts := family.pattern.fullmatch(name)) is not None:
            family.check(parts)
            return kind, parts
    return None
