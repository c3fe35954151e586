"""AQUA-KV's wrapper: it stores only what a predictor does not know (Algorithms 2 and 3).

encode:  Q(x - f(inputs))          decode:  Q^-1(codes) + f(inputs)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor

from ..checked import INNER, Choice, Listed, Schema, State, Table
from ..errors import KVCalError
from .base import EMPTY, Codec, Context, Packed, Role, Shape, Specs, by_fixed_rows
from .constants import constants, split
from .predictors import INPUTS, PREDICTORS, Predictor, PredictorSettings, check_gain, predictor_config
from .registry import build, state_of


class PredictedSettings(TypedDict):
    """The settings of Predicted in a bundle."""

    predictor: PredictorSettings
    inner: State


SETTINGS = Schema[PredictedSettings](
    {
        "predictor": Table(
            {"kind": Choice(tuple(PREDICTORS)), "inputs": Listed(Choice(INPUTS), 1, len(INPUTS), once=True)}
        ),
        "inner": INNER,
    }
)
DECODE_TOKENS = 1 << 15  # predictor inputs are concatenated for this many tokens at a time


class Predicted(Codec):
    """Any codec around the residual of a predictor.

    inputs: which decoded keys and values feed the predictor, concatenated in this order: k1, v1 (previous layer), k2,
    v2 (the one before), k0 (this layer's keys; values only).
    """

    name = "predicted"

    def __init__(self, inner: Codec, predictor: Predictor, inputs: tuple[str, ...]) -> None:
        super().__init__(inner.shape, inner.role)
        unknown = [name for name in inputs if name not in INPUTS or (name == "k0" and inner.role == "key")]
        if unknown or not inputs:
            allowed = f"allowed are {', '.join(INPUTS)} (k0 for values)"
            raise KVCalError(f"{inner.role} predictor inputs {inputs}: {allowed}")
        if inner.needs:
            raise KVCalError(f"predicted codec around {inner.name!r}: what it stores is predicted already")
        self.inner, self.predictor, self.inputs = inner.for_decoding(), predictor, tuple(inputs)
        self._check_widths()
        self.needs = frozenset(inputs) | inner.needs
        self.channels_apart = inner.channels_apart

    @property
    def stats(self) -> frozenset[str]:
        return self.inner.stats

    @property
    def ragged(self) -> bool:
        return self.inner.ragged

    def _check_widths(self) -> None:
        width = self.shape.heads * self.shape.dim
        wide = len(self.inputs) * width
        weights, sizes = self.predictor.weights, dict[str, int]()
        for name, constant in self.predictor.constants(weights, wide, width).items():
            if not replace(constant, dtype=weights[name].dtype).fits(weights[name], sizes):
                raise KVCalError(
                    f"{self.predictor.name} predictor of {wide} inputs ({', '.join(self.inputs)}) and {width} "
                    f"channels, {name} {tuple(weights[name].shape)}: needs {constant}"
                )

    def check_inputs(self, context: Context) -> None:
        """Raises KVCalError if the context lacks an input of the predictor."""
        absent = [name for name in self.inputs if getattr(context, name) is None]
        if absent:
            raise KVCalError(
                f"layer {context.layer}: predictor input {', '.join(absent)} is missing (wrong layer order?)"
            )

    def _inputs(self, context: Context) -> Tensor:
        """The predictor's inputs for the context's tokens, heads and inputs concatenated: (B, T, Cin) float32."""
        self.check_inputs(context)
        parts = [getattr(context, name) for name in self.inputs]
        return torch.cat([part.float().transpose(1, 2).flatten(2) for part in parts], -1)

    def _heads(self, guess: Tensor) -> Tensor:
        """Predictions (B, T, C) by kv head: (B, H, T, D)."""
        return torch.unflatten(guess, -1, (self.shape.heads, -1)).transpose(1, 2)

    def predict(self, context: Context, weights: dict[str, Tensor]) -> Tensor:
        """The prediction for the context's tokens: (B, H, T, D) float32. weights: those of predictor.working()."""
        return self._heads(self.predictor.forward(self._inputs(context), weights))

    def predict_blocks(self, context: Context) -> Tensor:
        """The prediction for the context's tokens; unlike `predict`, a block's bits depend only on the block."""
        x, weights = self._inputs(context), self.predictor.working()
        predicted = by_fixed_rows(x.flatten(0, 1), self.shape.block, lambda part: self.predictor.forward(part, weights))
        return self._heads(predicted.unflatten(0, x.shape[:2]))

    def expecting(self, channels: tuple[float, float]) -> Predicted:
        return Predicted(self.inner.expecting(channels), self.predictor, self.inputs) if self.ragged else self

    @property
    def unpredicted(self) -> Codec:
        return self.inner

    def prediction(self, context: Context) -> Tensor:
        return self.predict(context, self.predictor.working())

    def decode_as_encoded(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        return self.inner.decode(packed, context) + self.predict_blocks(context)

    @property
    def predictor_size(self) -> int:
        return sum(w.numel() for w in self.predictor.weights.values() if w.ndim == 2)

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        self.shape.blocks(x)  # refuses a wrong shape
        return self.inner.encode(x.float() - self.predict_blocks(context), context)

    def encode_decode(self, x: Tensor, context: Context = EMPTY) -> tuple[Packed, Tensor]:
        self.shape.blocks(x)
        guess = self.predict_blocks(context)
        packed, decoded = self.inner.encode_decode(x.float() - guess, context)
        return packed, decoded + guess

    @property
    def encoding_codec(self) -> Codec:
        return self.inner

    def by_kernel(self) -> Predicted:
        inner = self.inner.by_kernel()
        if inner is self.inner:
            return self
        twin = copy.copy(self)
        twin.inner = inner
        return twin

    @property
    def encodes_by_kernel(self) -> bool:
        return self.inner.encodes_by_kernel

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        out, weights = self.inner.decode(packed, context), self.predictor.working()
        step = max(self.shape.block, DECODE_TOKENS // max(1, out.shape[0]))
        for start in range(0, out.shape[2], step):
            out[:, :, start : start + step] += self.predict(context.part(start, start + step), weights)
        return out

    def of_heads(self, heads: slice) -> Codec | str:
        return "predictors read all heads of the layers below"

    def config(self) -> PredictedSettings:
        return {"predictor": predictor_config(self.predictor, self.inputs), "inner": state_of(self.inner)}

    def tensors(self) -> dict[str, Tensor]:
        weights = {f"predictor.{name}": w for name, w in self.predictor.weights.items()}
        return weights | {f"inner.{name}": t for name, t in self.inner.tensors().items()}

    @classmethod
    def from_state(
        cls, shape: Shape, role: Role, config: Mapping[str, object], tensors: dict[str, Tensor]
    ) -> Predicted:
        settings = SETTINGS.read(config, "predicted codec")
        below, weights, others = split(tensors, "inner.", "predictor.")
        constants(others, {}, "predicted codec")
        inner = build(shape, role, settings["inner"], below)
        kind, inputs = settings["predictor"]["kind"], settings["predictor"]["inputs"]
        width = shape.heads * shape.dim
        constants(weights, PREDICTORS[kind].constants(weights, len(inputs) * width, width), f"{kind} predictor")
        check_gain(weights, f"{kind} predictor")
        return cls(inner, PREDICTORS[kind](weights), tuple(inputs))

    def tensor_specs(self) -> Specs:
        return self.inner.tensor_specs()

    def empty(self, batch: int, device: torch.device) -> Packed:
        return self.inner.empty(batch, device)

    def block_bytes(self) -> int:
        return self.inner.block_bytes()

    def to(self, device: torch.device) -> Predicted:
        inner, predictor = self.inner.to(device), self.predictor.to(device)
        if inner is self.inner and predictor is self.predictor:
            return self
        twin = copy.copy(self)
        twin.inner, twin.predictor = inner, predictor
        return twin

    def paper_bits(self) -> float:
        return self.inner.paper_bits()

    def code_bits_per_value(self) -> float:
        return self.inner.code_bits_per_value()

    def paper_bits_of(self, packed: Packed) -> float:
        return self.inner.paper_bits_of(packed)

    def describe(self) -> str:
        return f"{self.predictor.name}({'+'.join(self.inputs)}) + {self.inner.describe()}"
