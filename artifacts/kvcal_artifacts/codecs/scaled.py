"""Any codec around channels divided by a factor: InnerQ's key normalisation (section 4.3), outside of the weights.

encode: Q(x / f)          decode: f * Q^-1(codes)

One factor per kv head and channel evens out channels that share a group. Scores do not change:
q . (f * k̂) = (f * q) . k̂, so a fused kernel multiplies the query once instead of every cached key.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import TypedDict

import torch
from torch import Tensor

from kvcal_kernels.layout import Blocks, Form, TransformForm
from kvcal_kernels.quantise import AnyRule

from ..checked import INNER, Choice, Schema, State
from ..errors import KVCalError
from .base import EMPTY, Codec, Context, Packed, Role, Shape, Specs
from .constants import Constant, constants, contents, split
from .registry import build, state_of

SOURCES = ("calibrated", "prefill")
STATISTIC = "key_scale"
LARGEST = 4096.0  # of a factor, the root of a key's magnitude: no model has keys of 16 million


class ScaledSettings(TypedDict):
    """The settings of Scaled in a bundle."""

    source: str
    inner: State


SETTINGS = Schema[ScaledSettings]({"source": Choice(SOURCES), "inner": INNER})


class Scaled(Codec):
    """Another codec of channels that are divided by factors.

    inner: any codec that codes by itself (a predictor goes outside: Predicted(Scaled(...))).

    source: "calibrated": `factor` (H, D) float16, positive, is a constant of the bundle. "prefill", for keys only: each
    row has its own. It is the square root of the largest magnitude among the tokens that the row has when its first
    block is packed (statistics.KeyScale).
    """

    name = "scaled"

    def __init__(self, inner: Codec, factor: Tensor | None, source: str = "calibrated") -> None:
        super().__init__(inner.shape, inner.role)
        if source not in SOURCES:
            raise KVCalError(f"scaled codec, factor from {source!r}: allowed are {', '.join(map(repr, SOURCES))}")
        if inner.needs:
            raise KVCalError(f"scaled codec around {inner.name!r}: predictions are not scaled; put it inside instead")
        self.inner, self.source, self.factor = inner, source, factor
        if source == "prefill":
            if self.role != "key" or factor is not None:
                raise KVCalError("scaled codec, factor from 'prefill': for keys, and without a factor in the bundle")
            return
        expected = (self.shape.heads, self.shape.dim)
        if factor is None:
            raise KVCalError(f"scaled codec, no factor: needs {expected} torch.float16, or source 'prefill'")
        if tuple(factor.shape) != expected or factor.dtype != torch.float16:
            raise KVCalError(
                f"scaled codec, factor {tuple(factor.shape)} {factor.dtype}: needs {expected} torch.float16"
            )
        if not bool(((factor > 0) & torch.isfinite(factor)).all()):
            raise KVCalError(f"scaled codec, factor of {float(factor.float().min())}: must be positive and finite")

    @property
    def stats(self) -> frozenset[str]:
        return self.inner.stats | ({STATISTIC} if self.factor is None else frozenset())

    @property
    def ragged(self) -> bool:
        return self.inner.ragged

    def _factor(self, context: Context) -> Tensor:
        """The factor of the tokens being coded, (H, 1, D) or (B, H, 1, D) float32."""
        if self.factor is not None:
            return self.factor.float()[:, None]
        if STATISTIC not in context.stats:
            raise KVCalError(f"layer {context.layer}: run-time statistic {STATISTIC} is missing")
        return context.stats[STATISTIC]

    def fused(self) -> Form | TransformForm | str:
        if self.role == "value":
            return "values divided by factors: the fused kernel adds packed and exact ones into one output"
        return self.inner.fused()

    divided = True

    @property
    def undivided(self) -> Codec:
        return self.inner

    @property
    def not_rotated(self) -> str | None:
        if self.attention_kernel is None:
            return None
        return super().not_rotated or "keys divided by factors"

    def rule(self, within: str = "") -> AnyRule | str:
        """The rule of the codec inside: keys, and only keys, are divided by factors before it."""
        return super().rule(within) if within or self.role != "key" else self.inner.rule(self.name)

    @property
    def encoding_codec(self) -> Codec:
        return self.inner

    def as_blocks(self, packed: Packed) -> Blocks:
        blocks: Blocks = self.inner.as_blocks(packed)
        return blocks

    def for_decoding(self) -> Scaled:
        inner = self.inner.for_decoding()
        return self if inner is self.inner else self._around(inner, self.factor)

    def for_lookups(self) -> Scaled:
        inner = self.inner.for_lookups()
        return self if inner is self.inner else self._around(inner, self.factor)

    def by_kernel(self) -> Scaled:
        inner = self.inner.by_kernel()
        return self if inner is self.inner else self._around(inner, self.factor)

    @property
    def encodes_by_kernel(self) -> bool:
        return self.inner.encodes_by_kernel

    def key_factor(self, context: Context = EMPTY) -> Tensor:
        below = self.inner.key_factor(context)
        return self._factor(context) if below is None else self._factor(context) * below

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        self.shape.blocks(x)  # refuses a wrong shape
        return self.inner.encode(x.float() / self._factor(context), context)

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        return self.inner.decode(packed, context) * self._factor(context)

    def decoding(self) -> Hashable:
        inner, factor = self.inner.decoding(), None if self.factor is None else contents(self.factor)
        return None if inner is None else (self.settings(), inner, factor)

    def encode_decode(self, x: Tensor, context: Context = EMPTY) -> tuple[Packed, Tensor]:
        self.shape.blocks(x)
        factor = self._factor(context)
        packed, decoded = self.inner.encode_decode(x.float() / factor, context)
        return packed, decoded * factor

    def of_heads(self, heads: slice) -> Codec | str:
        inner = self.inner.of_heads(heads)
        if isinstance(inner, str):
            return inner
        return Scaled(inner, None if self.factor is None else self.factor[heads], self.source)

    def config(self) -> ScaledSettings:
        return {"source": self.source, "inner": state_of(self.inner)}

    def tensors(self) -> dict[str, Tensor]:
        calibrated = {} if self.factor is None else {"factor": self.factor}
        return calibrated | {f"inner.{name}": t for name, t in self.inner.tensors().items()}

    @classmethod
    def from_state(cls, shape: Shape, role: Role, config: Mapping[str, object], tensors: dict[str, Tensor]) -> Scaled:
        settings = SETTINGS.read(config, "scaled codec")
        below, calibrated = split(tensors, "inner.")
        factor = Constant(torch.float16, (shape.heads, shape.dim), positive=True, largest=LARGEST)
        constants(calibrated, {"factor": factor} if settings["source"] == "calibrated" else {}, "scaled codec")
        return cls(build(shape, role, settings["inner"], below), calibrated.get("factor"), settings["source"])

    def tensor_specs(self) -> Specs:
        return self.inner.tensor_specs()

    def empty(self, batch: int, device: torch.device) -> Packed:
        return self.inner.empty(batch, device)

    def block_bytes(self) -> int:
        return self.inner.block_bytes()

    def to(self, device: torch.device) -> Scaled:
        inner = self.inner.to(device)
        factor = self.factor
        if inner is self.inner and (factor is None or factor.device == device):
            return self
        return self._around(inner, None if factor is None else factor.to(device))

    def _around(self, inner: Codec, factor: Tensor | None) -> Scaled:
        twin = copy.copy(self)
        twin.inner, twin.factor = inner, factor
        return twin

    def paper_bits(self) -> float:
        return self.inner.paper_bits()

    def code_bits_per_value(self) -> float:
        return self.inner.code_bits_per_value()

    def paper_bits_of(self, packed: Packed) -> float:
        return self.inner.paper_bits_of(packed)

    def describe(self) -> str:
        return f"scaled({self.source}) {self.inner.describe()}"
