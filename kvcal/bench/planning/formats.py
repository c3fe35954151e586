"""Bytes of a packed block by the name of its codec, without torch.

The codecs themselves (kvcal_artifacts.codecs) say the same by `block_bytes()`; a test compares the two for all codecs
of kvcal.methods.registry at many shapes. Where a codec is stored as the fused kernel reads it, its block is as large.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.presets import divisor

Role = Literal["key", "value"]
TRANSFORM_DIMS = (64, 128)
KERNEL_DIMS = (64, 96, 128, 256)  # docs/benchmarks/decode_attention.md, "What is fused at which head_dim"


@dataclass(frozen=True)
class Shape:
    """A block's kv heads, head_dim and tokens."""

    heads: int
    dim: int
    block: int


@dataclass(frozen=True)
class Codec:
    """What planning knows of a codec in one role. bytes: of a block. bits: of a code; kernel: whether the fused kernel
    reads it at this shape, keys stored after RoPE; rotates: whether it reads keys before RoPE, too.
    """

    bytes: int
    bits: float
    kernel: bool
    rotates: bool = False


def codec(name: str, role: Role, shape: Shape) -> Codec:
    """The codec of that name; UsageError for a name whose size depends on data."""
    for pattern, make in FORMATS:
        if (match := re.fullmatch(pattern, name)) is not None:
            return make(match, role, shape)
    raise UsageError(
        f"codec {name!r}: its size is not known without calibration, or there is none of that name; "
        "`kvcal names codec` lists those that need no data"
    )


def _packed(count: int, bits: int) -> int:
    """Bytes of `count` codes, each cut into planes of 8, 4, 2 and 1 bits (kvcal_kernels.packing)."""
    total = 0
    for width in (width for width in (8, 4, 2, 1) if bits & width):
        word = 16 if width < 8 and count % (16 // width) == 0 else 8
        total += -(-count // (word // width)) * (word // 8)
    return total


def _integers(role: Role, shape: Shape, bits: int, group: int, axis: str, zero: bool = True) -> Codec:
    """The size of integers in groups. axis: channel, where a group is channels of one token, or token. zero: whether
    groups have zero points.
    """
    rows, count = (shape.dim, shape.block) if role == "value" else (shape.block, shape.dim)
    groups = shape.block * shape.dim // group
    size = shape.heads * (rows * _packed(count, bits) + groups * (4 if zero else 2))
    inner = (axis == "channel") == (role == "key")
    along_tokens = inner == (role == "value")
    fits = group % 32 == 0 if along_tokens else group % 16 == 0
    kernel = bits in (2, 3, 4, 8) and _kernel_shape(shape) and fits and not (bits == 3 and shape.dim == 96)
    return Codec(size, bits, kernel and (inner or zero), kernel and (inner or zero))


def _kernel_shape(shape: Shape) -> bool:
    return shape.dim in KERNEL_DIMS and shape.block % 32 == 0


def _uniform(match: re.Match[str], role: Role, shape: Shape) -> Codec:
    if match["channel"]:
        return _integers(role, shape, int(match["bits"]), divisor(32, shape.block), "token")
    return _integers(role, shape, int(match["bits"]), divisor(64, shape.dim), "channel")


def _kivi(match: re.Match[str], role: Role, shape: Shape) -> Codec:
    """KIVI, and SQuat, whose codes and scales lie in the same way."""
    group = 128 if match["long"] else 32
    length, axis = (shape.block, "token") if role == "key" else (shape.dim, "channel")
    return _integers(role, shape, int(match["bits"]), divisor(group, length), axis)


def _inner(match: re.Match[str], role: Role, shape: Shape) -> Codec:
    return _inner_of(int(match["bits"]), match["mode"], role, shape)


def _inner_of(bits: int, mode: str, role: Role, shape: Shape) -> Codec:
    length, axis = (shape.dim, "channel") if role == "key" else (shape.block, "token")
    return _integers(role, shape, bits, divisor(32, length), axis, mode != "symmetric")


INNERQ_VALUES = {"base": (3, "symmetric"), "hybrid": (2, "hybrid"), "small": (2, "symmetric")}


def _innerq(match: re.Match[str], role: Role, shape: Shape) -> Codec:
    bits, mode = (3, "symmetric") if role == "key" else INNERQ_VALUES[match["variant"]]
    inner = _inner_of(bits, mode, role, shape)
    divided = role == "key" and not match["plain"]  # by factors: not before RoPE
    return Codec(inner.bytes, inner.bits, inner.kernel, inner.rotates and not divided)


def _higgs(match: re.Match[str], role: Role, shape: Shape) -> Codec:
    span = match["span"] or ""
    d, code_bits = (4, 8) if "d4" in match.groupdict() else (2, 2 * int(match["bits"]))
    return _grid(role, shape, d, code_bits, span)


def _turboquant(match: re.Match[str], role: Role, shape: Shape) -> Codec:
    return _grid(role, shape, 1, int(match["bits"]), "")


def _grid(role: Role, shape: Shape, d: int, code_bits: int, span: str) -> Codec:
    """The size of grid codes with their norms. span: "" for norms of a token and head, "-wide" of a token, "-channel"
    of a channel of a block.
    """
    if role == "key":
        count = shape.dim if span == "-channel" else shape.dim // d
    else:
        count = shape.block // d if span == "-channel" else shape.block
    rows = shape.block * shape.dim // d // count
    norms = shape.heads * shape.dim if span == "-channel" else shape.block * (1 if span else shape.heads)
    bits = code_bits / d
    empty = shape.dim == 96 and (bits == 3 or (d == 4 and role == "key"))  # words of the kernel that nothing fills
    kernel = not span and _kernel_shape(shape) and not empty
    return Codec(shape.heads * rows * _packed(count, code_bits) + 2 * norms, bits, kernel)


def _tiers(match: re.Match[str], role: Role, shape: Shape) -> Codec:
    """MixKVQ with so many channels a head in 16 and in 4 bits, the rest in 2."""
    if role == "value":
        return _integers(role, shape, 2, divisor(32, shape.dim), "channel")
    full, four = int(match["full"]), int(match["four"])
    groups = shape.block // divisor(32, shape.block)
    two = shape.dim - full - four
    if two < 0:
        raise UsageError(f"codec {match[0]!r}: {full} and {four} channels a head, head_dim is {shape.dim}")
    rows = full * 2 * shape.block + four * _packed(shape.block, 4) + two * _packed(shape.block, 2)
    size = shape.heads * (shape.dim + rows + (four + two) * groups * 4)
    pieces = (shape.dim - full + four) // 16  # an odd number would leave a part of the kernel's words empty
    kernel = _kernel_shape(shape) and groups == 1 and full % 16 == four % 16 == pieces % 2 == 0 and two > 0
    return Codec(size, size * 8 / (shape.heads * shape.dim * shape.block), kernel)


def _transform(match: re.Match[str], role: Role, shape: Shape) -> Codec:
    """Coordinates of a fitted basis, and one norm of a token."""
    bits = int(match["bits"])
    size = shape.heads * shape.dim * shape.block * bits // 8 + 2 * shape.block
    return Codec(size, bits, shape.dim in TRANSFORM_DIMS and shape.block == 32)


def _float(width: int) -> Callable[[re.Match[str], Role, Shape], Codec]:
    return lambda match, role, shape: Codec(shape.heads * shape.dim * shape.block * width, 8 * width, False)


FORMATS: tuple[tuple[str, Callable[[re.Match[str], Role, Shape], Codec]], ...] = (
    (r"uniform-(?P<bits>[1-8])(?P<channel>-channel)?", _uniform),
    (r"kivi-(?P<bits>[2348])(?P<long>-g128)?", _kivi),
    (r"squat-(?P<bits>[234])(?P<long>-g128)?", _kivi),
    (r"inner-(?P<bits>[234])-(?P<mode>symmetric|asymmetric|hybrid)(-max)?", _inner),
    (r"innerq-(?P<variant>base|hybrid|small)(?P<plain>-plain)?", _innerq),
    (r"higgs-(?P<bits>[234])(?P<span>-wide|-channel)?(-debiased)?", _higgs),
    (r"higgs-(?P<bits>2)(?P<d4>-d4)(?P<span>-wide|-channel)?(-debiased)?", _higgs),
    (r"higgs-(?P<bits>2)(?P<span>)-bytes(-debiased)?", _higgs),
    (r"turboquant-(?P<bits>[234])(-bytes)?", _turboquant),
    (r"transform-(?P<bits>[234])", _transform),
    (r"mixkvq-(?P<full>\d+)-(?P<four>\d+)", _tiers),
    (r"fp8(-e5m2)?", _float(1)),
    (r"exact-16|exact-bf16", _float(2)),
    (r"exact-32", _float(4)),
)
