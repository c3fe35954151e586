"""Different codecs for different kv heads of one layer's keys or values.

Consecutive heads form a part, and each part is stored by another codec: heads differ in how much their errors
cost, and bits go where they matter. No kernel reads or writes such blocks: torch encodes and decodes them, and the
model's own attention reads what is decoded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypedDict, TypeVar

import torch
from torch import Tensor

from ..checked import HEADS, SETTINGS, Listed, Schema, State, Table, Text, Whole
from ..errors import KVCalError
from .base import EMPTY, Codec, Context, Packed, Role, Shape, Specs
from .constants import constants, split
from .registry import build, state_of

Value = TypeVar("Value")


class Part(State):
    """The codec of `heads` consecutive kv heads in a bundle."""

    heads: int


class ByHeadSettings(TypedDict):
    """The settings of ByHead in a bundle."""

    parts: list[Part]


BY_HEAD = Schema[ByHeadSettings](
    {"parts": Listed(Table({"heads": Whole(1, HEADS), "codec": Text(), "config": SETTINGS}), 2, HEADS)}
)


class ByHead(Codec):
    """Codecs of consecutive kv heads, from head 0 on: each part's shape says how many heads it has.

    Parts have one head_dim, block and role, code by themselves (a predictor goes outside: Predicted(ByHead(...))), have
    blocks of one size, and are not divided by head again. Packed tensors and constants have their part's number before
    their name ("0.words"), and packed ones (B, its heads or 1, N, ...).

    Raises KVCalError for other parts.
    """

    name = "by-head"

    def __init__(self, parts: Sequence[Codec]) -> None:
        if len(parts) < 2:
            raise KVCalError(f"by-head codec of {len(parts)} parts: needs two or more; one codec is for all heads")
        first = parts[0]
        super().__init__(replace(first.shape, heads=sum(part.shape.heads for part in parts)), first.role)
        for number, part in enumerate(parts):
            self._check(number, part)
        self.parts = tuple(part.for_decoding() for part in parts)
        self.channels_apart = all(part.channels_apart for part in parts)

    def _check(self, number: int, part: Codec) -> None:
        what, shape = f"by-head codec, part {number} of {part.name!r}", part.shape
        if (shape.dim, shape.block, part.role) != (self.shape.dim, self.shape.block, self.role):
            raise KVCalError(
                f"{what}: {part.role}s of {shape.dim} channels in blocks of {shape.block} tokens, part 0 has "
                f"{self.role}s of {self.shape.dim} in blocks of {self.shape.block}"
            )
        if part.needs:
            raise KVCalError(f"{what}: predictors read all heads; put by-head inside of them instead")
        if part.ragged:
            raise KVCalError(f"{what}: its blocks differ in size; take one of a fixed size")
        if _divides_heads(part):
            raise KVCalError(f"{what}: heads are divided already; list all parts in one by-head codec")

    @property
    def stats(self) -> frozenset[str]:
        return frozenset[str]().union(*(part.stats for part in self.parts))

    mixed_heads = True

    def fused(self) -> str:
        return "groups of heads in different codecs: the fused kernel reads one form for all heads of a layer"

    def cut(self, context: Context) -> Iterator[tuple[Codec, slice, Context]]:
        """Each part, which heads it has, and the context of these heads: parts read statistics alone."""
        start = 0
        for part in self.parts:
            heads = slice(start, start + part.shape.heads)
            stats = {name: x[:, heads] for name, x in context.stats.items() if name in part.stats}
            yield part, heads, Context(context.layer, stats=stats)
            start = heads.stop

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        self.shape.blocks(x)  # refuses a wrong shape
        return _numbered([part.encode(x[:, heads], cut) for part, heads, cut in self.cut(context)])

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        pairs = zip(_apart(packed, len(self.parts)), self.cut(context), strict=True)
        return torch.cat([part.decode(stored, cut) for stored, (part, _, cut) in pairs], 1)

    def encode_decode(self, x: Tensor, context: Context = EMPTY) -> tuple[Packed, Tensor]:
        self.shape.blocks(x)
        coded = [part.encode_decode(x[:, heads], cut) for part, heads, cut in self.cut(context)]
        return _numbered([packed for packed, _ in coded]), torch.cat([decoded for _, decoded in coded], 1)

    def of_heads(self, heads: slice) -> Codec | str:
        start, stop, _ = heads.indices(self.shape.heads)
        parts: list[Codec] = []
        for part, here, _ in self.cut(EMPTY):
            first, last = max(start, here.start), min(stop, here.stop)
            if first < last:
                cut = part.of_heads(slice(first - here.start, last - here.start))
                if isinstance(cut, str):
                    return cut
                parts.append(cut)
        return ByHead(parts) if len(parts) > 1 else parts[0]

    def config(self) -> ByHeadSettings:
        states = [(part.shape.heads, state_of(part)) for part in self.parts]
        return {"parts": [{"heads": heads, "codec": s["codec"], "config": s["config"]} for heads, s in states]}

    def tensors(self) -> dict[str, Tensor]:
        return _numbered([part.tensors() for part in self.parts])

    @classmethod
    def from_state(cls, shape: Shape, role: Role, config: Mapping[str, object], tensors: dict[str, Tensor]) -> ByHead:
        parts = BY_HEAD.read(config, "by-head codec")["parts"]
        if (heads := sum(part["heads"] for part in parts)) != shape.heads:
            raise KVCalError(f"by-head codec, parts of {heads} heads in all: must be those of the layer, {shape.heads}")
        *below, others = split(tensors, *(f"{number}." for number in range(len(parts))))
        constants(others, {}, "by-head codec")
        for number, part in enumerate(parts):
            if part["codec"] == cls.name:  # before any is built: nothing is nested
                raise KVCalError(f"by-head codec, part {number} of {cls.name!r}: list all parts in one by-head codec")
        return cls(
            [
                build(replace(shape, heads=part["heads"]), role, part, constants_of)
                for part, constants_of in zip(parts, below, strict=True)
            ]
        )

    def tensor_specs(self) -> Specs:
        return _numbered([part.tensor_specs() for part in self.parts])

    def to(self, device: torch.device) -> ByHead:
        parts = tuple(part.to(device) for part in self.parts)
        if all(new is old for new, old in zip(parts, self.parts, strict=True)):
            return self
        twin = copy.copy(self)
        twin.parts = parts
        return twin

    def paper_bits(self) -> float:
        return self._mean([part.paper_bits() for part in self.parts])

    def code_bits_per_value(self) -> float:
        return self._mean([part.code_bits_per_value() for part in self.parts])

    def _mean(self, bits: Sequence[float]) -> float:
        """The mean over heads of a figure that each part has."""
        heads = [part.shape.heads for part in self.parts]
        return sum(n * figure for n, figure in zip(heads, bits, strict=True)) / self.shape.heads

    def describe(self) -> str:
        return f"{self.name}({', '.join(f'{part.shape.heads} x {part.describe()}' for part in self.parts)})"


def _divides_heads(codec: Codec) -> bool:
    """Whether a codec is ByHead, or has it inside."""
    inner: object = codec
    while isinstance(inner, Codec):
        if isinstance(inner, ByHead):
            return True
        inner = getattr(inner, "inner", None)
    return False


def _numbered(parts: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    return {f"{number}.{name}": value for number, part in enumerate(parts) for name, value in part.items()}


def _apart(packed: Packed, count: int) -> list[Packed]:
    """The packed tensors of each part by their names in that part."""
    parts: list[Packed] = [{} for _ in range(count)]
    for name, stored in packed.items():
        number, _, local = name.partition(".")
        parts[int(number)][local] = stored
    return parts
