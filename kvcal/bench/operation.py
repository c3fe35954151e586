"""What an operation is, and the checks that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from kvcal_artifacts import store
from kvcal_artifacts.codecs.base import Packed

from .layer import Case, Filled, nbytes

Peer = Literal["attention"]


@dataclass(frozen=True)
class Prepared:
    """run: what is timed. bytes: what it must move, read and, where it stores something, written. check: None if the result
    is right, else what is wrong with it. path: which code it is. per: calls that one call of `run` stands for, so that the
    figure is the time of one decode step, say. flops: of matrix products in it.
    """

    run: Callable[[], object]
    bytes: int
    check: Callable[[], str | None]
    path: str
    per: float = 1.0
    flops: float = 0.0
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """refuses: why there is no such operation for a case, or None. peer: what FP16 does in its place, for the ratio. alone: it
    depends on the model's shape only, so it is measured once for all schemes, and beyond that for those it does not refuse.
    """

    name: str
    what: str
    build: Callable[[Case], Prepared]
    refuses: Callable[[Case], str | None] = lambda case: None
    peer: Peer | None = None
    by_default: bool = True
    alone: bool = False


def packed_blocks(case: Case) -> int:
    own = case.scheme.windows
    return max(0, case.length - own.sink - own.recent) // own.block


def needs_blocks(case: Case) -> str | None:
    own = case.scheme.windows
    if packed_blocks(case):
        return None
    return f"nothing is packed: needs more than {own.sink + own.recent + own.block - 1} tokens"


def one_block(case: Case) -> Case:
    own = case.scheme.windows
    return Case(
        case.scheme, case.geometry, case.batch, own.sink + own.block + own.recent, case.device, case.dtype, case.seed
    )


def misencoded(filled: Filled) -> str | None:
    """Packed bytes are those that the formula gives, they decode to something like the input, and do so block by block."""
    again = filled.encoded(filled.raw)
    for role, (codec, one) in enumerate(zip(filled.pair, again, strict=True)):
        blocks = filled.case.batch * int(next(iter(one.values())).shape[2])
        size = sum(nbytes(t) for t in one.values())
        if not codec.ragged and size != blocks * codec.block_bytes():
            return f"check failed: {size} bytes for {blocks} blocks of {codec.block_bytes()}"
        differing = [name for name in one if not same(one[name], filled.packed[role][name])]
        if differing:
            return f"check failed: {differing[0]} differs from what rows alone were packed to"
    return misread(filled, filled.decoded())


def misread(filled: Filled, made: Sequence[Tensor | None]) -> str | None:
    """Keys and values as they were read are something like the input."""
    for name, found, raw in zip(("keys", "values"), made, filled.raw, strict=False):
        assert found is not None
        exact = raw.float()
        error = float((found.float() - exact).square().sum() / exact.square().sum())
        if not error < 1:
            return f"check failed: decoding misses {name} by {error:.2g} of their squares"
    return None


def same(one: store.Stored, other: store.Stored) -> bool:
    return all(torch.equal(a, b) for a, b in zip(store.tensors_of(one), store.tensors_of(other), strict=True))


def bytes_of(packed: Packed) -> int:
    return sum(nbytes(stored) for stored in packed.values())
