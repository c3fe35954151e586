"""Codecs by a short name, as users write them: those that need no data (kvcal_artifacts.codecs.named), by kv head
(1xhiggs-4+2xhiggs-2), and those that are learned from text (vq-2).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from kvcal_artifacts.codecs import (
    ByHead,
    Codec,
    Role,
    Shape,
    load_plugins,
)
from kvcal_artifacts.codecs.named import CODEC_MAKERS, CodecMaker, mixkvq
from kvcal_artifacts.codecs.transform import MSE as TRANSFORM_MSE
from kvcal_artifacts.errors import UsageError

from ..report.suggest import allowed

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
        return mixkvq(int(tiers[1]), int(tiers[2]))
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
    """Why factors from text are of no use to keys of that codec; None where they are of use. Second: which codec is the
    same without factors of its own, "" for none. Raises UsageError for an unknown name.
    """
    make = codec_maker(codec)
    if NEXT in codec:
        return f"{codec} has codecs of its own for groups of heads, without factors", ""
    example = make(Shape(1, 256, 32), "key")
    if example.divided:
        return f"{codec} divides keys by factors of each row's own already", f"{codec}-plain"
    if example.channels_apart:
        return f"{codec} codes each key channel by itself, where a factor changes nothing", ""
    return None


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
