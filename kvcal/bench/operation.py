"""What an operation is, and the checks that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from kvcal_artifacts.checked import Json
from kvcal_artifacts.codecs.base import Packed
from kvcal_artifacts.scheme import LayerCodecs
from kvcal_artifacts.storage import block_store

from . import distortion, needed
from .layer import Case, Filled, nbytes
from .peers import Attend, Check

Peer = Literal["attention"]
APART = 1e-3  # of a packed tensor's numbers, a kernel's against torch's: CUDA divides by a constant differently


@dataclass(frozen=True)
class Prepared:
    """An operation that is ready to be timed. run: what is timed. bytes: what it must move, read and, where it stores
    something, written. check: None if the result is right, else what is wrong with it. path: which code it is. per:
    calls that one call of `run` stands for, so that the figure is the time of one decode step, say. flops: of matrix
    products in it; bounded: nothing multiplies faster than the product of `Clock.matmul_rate`, so that a figure well
    above it is impossible.
    """

    run: Callable[[], object]
    bytes: int
    check: Callable[[], str | None]
    path: str
    per: float = 1.0
    flops: float = 0.0
    bounded: bool = True
    more: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """Something that can be measured of a case. refuses: why there is no such operation for a case, or None. peer: what
    FP16 does in its place, for the ratio. alone: it depends on the model's shape only, so it is measured once for all
    schemes, and beyond that for those it does not refuse. of_calls: it depends on how many new tokens a call brings.
    needs: bytes of memory, as `needed` has them.
    """

    name: str
    what: str
    build: Callable[[Case], Prepared]
    refuses: Callable[[Case], str | None] = lambda case: None
    peer: Peer | None = None
    by_default: bool = True
    alone: bool = False
    of_calls: bool = False
    needs: Callable[[Case], int] = needed.whole


def packed_blocks(case: Case) -> int:
    windows = case.scheme.windows
    return max(0, case.length - windows.sink - windows.recent) // windows.block


def needs_blocks(case: Case) -> str | None:
    windows = case.scheme.windows
    if packed_blocks(case):
        return None
    return f"nothing is packed: needs more than {windows.sink + windows.recent + windows.block - 1} tokens"


def needs_window(case: Case) -> str | None:
    """Blocks, and a window that holds the new tokens of a call."""
    windows = case.scheme.windows
    window = case.length - windows.sink - packed_blocks(case) * windows.block
    if (why := needs_blocks(case)) or case.new == 1 or window >= case.new:
        return why
    return f"{case.new} new tokens of a call are not packed yet: needs as many in the window, which holds {window}"


def needs_whole_calls(case: Case) -> str | None:
    """Blocks, each of them filled by whole calls."""
    if (block := case.scheme.windows.block) % case.new:
        return f"calls of {case.new} tokens do not fill a block of {block}: needs a divisor of it"
    return needs_blocks(case)


def one_block(case: Case) -> Case:
    windows = case.scheme.windows
    return Case(
        case.scheme,
        case.geometry,
        case.batch,
        windows.sink + windows.block + windows.recent,
        case.device,
        case.dtype,
        case.seed,
    )


def needs_a_block(case: Case) -> int:
    """Bytes of memory, of what looks at no other tokens."""
    return needed.whole(one_block(case))


def needs_of_append(case: Case) -> int:
    """Bytes an append needs: on a GPU, whose kernels put a block behind none, the least, elsewhere the store is
    copied.
    """
    return needs_a_block(case) if case.device.type == "cuda" else needed.whole(case)


def misencoded(filled: Filled, by: LayerCodecs | None = None) -> str | None:
    """Packed bytes are those that the formula gives, the same block by block, and decode to what their format promises.

    by: codecs with kernels, whose numbers are those of torch except where CUDA divides differently.
    """
    again = filled.encoded(filled.raw, by)
    allowed = _apart(filled, by)
    for role, (codec, one) in enumerate(zip(filled.pair, again, strict=True)):
        blocks = filled.case.batch * int(next(iter(one.values())).shape[2])
        size = sum(nbytes(t) for t in one.values())
        if not codec.ragged and size != blocks * codec.block_bytes():
            return f"check failed: {size} bytes for {blocks} blocks of {codec.block_bytes()}"
        differing = [name for name in one if not alike(one[name], filled.packed[role][name], allowed)]
        if differing:
            return f"check failed: {differing[0]} differs from what rows alone were packed to"
    return misread(filled, filled.decoded(again))


def _apart(filled: Filled, by: LayerCodecs | None) -> float:
    """Part of a packed tensor's numbers that may differ."""
    return 0.0 if by is None or by == filled.codecs else APART


def misread(filled: Filled, outputs: Sequence[Tensor | None]) -> str | None:
    """Keys and values as they were read (the first two) are as near to the input as their formats promise."""
    for role, output in enumerate(outputs[:2]):
        assert output is not None
        if why := distortion.misread(filled, role, output):
            return why
    return None


def misattended(attend: Attend, queries: Tensor, filled: Filled) -> str | None:
    """`attend` is attention over all tokens decoded, of every row, and these are what their formats promise."""
    decoded = filled.decoded()
    sink, recent = filled.sink[0].shape[2], filled.window[0].shape[2]
    check = Check(queries, *filled.materialised(decoded), sink, recent)
    return check.misattends(attend) or misread(filled, decoded)


def misappended(old: Filled, new: Filled, grown: Sequence[Packed], by: LayerCodecs | None = None) -> str | None:
    """What is wrong with blocks after an append, None if nothing is: they must be the old ones, byte by byte, then the
    new ones. by: the codecs whose encoding on the GPU may differ from torch, as for `misencoded`.
    """
    before, allowed = packed_blocks(old.case), _apart(new, by)
    for codec, was, more, now in zip(old.pair, old.packed, new.packed, grown, strict=True):
        for name, stored in now.items():
            blocks = int(stored.shape[2])
            added = int(more[name].shape[2])
            if blocks != before + added:
                return f"check failed: {blocks} blocks of {codec.role}s after appending {added} to {before}"
            if not same(block_store.first_blocks(stored, before), was[name]):
                return f"check failed: {name} of {codec.role}s differs from what it was before appending"
            if not alike(block_store.from_block(stored, before), more[name], allowed):
                return f"check failed: {name} of the appended {codec.role}s differs from what was to be appended"
    return None


def same(one: block_store.Stored, other: block_store.Stored) -> bool:
    return alike(one, other, 0.0)


def alike(one: block_store.Stored, other: block_store.Stored, apart: float) -> bool:
    """Whether both are of one shape, and of each tensor's numbers a part of at most `apart` differs."""
    pairs = zip(block_store.tensors_of(one), block_store.tensors_of(other), strict=True)
    return all(a.shape == b.shape and int((a != b).sum()) <= apart * a.numel() for a, b in pairs)


def bytes_of(packed: Packed) -> int:
    return sum(nbytes(stored) for stored in packed.values())
