"""AQUA-KV's wrapper: store only what a predictor does not know (Algorithms 2 and 3).

    encode:  Q(x - f(inputs))          decode:  Q^-1(codes) + f(inputs)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import KVCalError
from .base import EMPTY, Codec, Context, Packed, Role, Shape
from .predictors import INPUTS, PREDICTORS, Predictor, predictor_config

DECODE_TOKENS = 1 << 15  # predictor inputs are concatenated for this many tokens at a time


class Predicted(Codec):
    """Any codec around the residual of a predictor.

    inputs: which reconstructions feed the predictor, concatenated in this order: k1, v1 (previous layer), k2, v2 (the
    one before), k0 (this layer's keys; values only).
    """

    name = "predicted"

    def __init__(self, inner: Codec, predictor: Predictor, inputs: tuple[str, ...]) -> None:
        super().__init__(inner.shape, inner.role)
        unknown = [name for name in inputs if name not in INPUTS or (name == "k0" and inner.role == "key")]
        if unknown or not inputs:
            raise KVCalError(f"{inner.role} predictor inputs {inputs}: allowed are {', '.join(INPUTS)} (k0 for values)")
        self.inner, self.predictor, self.inputs = inner, predictor, tuple(inputs)
        self.needs = frozenset(inputs) | inner.needs  # type: ignore[misc]

    def predict(self, context: Context, weights: dict[str, Tensor]) -> Tensor:
        """f(inputs) for the context's tokens: (B, H, T, D) float32; weights from predictor.working()."""
        parts = [getattr(context, name) for name in self.inputs]
        if any(part is None for part in parts):
            absent = [name for name, part in zip(self.inputs, parts, strict=True) if part is None]
            raise KVCalError(f"layer {context.layer}: predictor input {', '.join(absent)} is missing (wrong layer order?)")
        flat = torch.cat([part.transpose(1, 2).flatten(2) for part in parts], -1)
        return self.predictor.forward(flat, weights).unflatten(-1, (self.shape.heads, -1)).transpose(1, 2)

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        # A matrix product's last bits may depend on its row count, so the predictor runs on one block of one row at a
        # time: packed bytes then depend neither on chunking nor on batch companions.
        block, weights = self.shape.block, self.predictor.working()
        guess = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        for row in range(x.shape[0]):
            own = context.rows(row, row + 1)
            for start in range(0, x.shape[2], block):
                guess[row : row + 1, :, start : start + block] = self.predict(own.part(start, start + block), weights)
        return self.inner.encode(x.float() - guess, context)

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        out, weights = self.inner.decode(packed, context), self.predictor.working()
        step = max(self.shape.block, DECODE_TOKENS // max(1, out.shape[0]))
        for start in range(0, out.shape[2], step):
            out[:, :, start : start + step] += self.predict(context.part(start, start + step), weights)
        return out

    def config(self) -> dict[str, Any]:
        inner = {"codec": self.inner.name, "config": self.inner.config()}
        return {"predictor": predictor_config(self.predictor, self.inputs), "inner": inner}

    def tensors(self) -> dict[str, Tensor]:
        own = {f"predictor.{name}": w for name, w in self.predictor.weights.items()}
        return own | {f"inner.{name}": t for name, t in self.inner.tensors().items()}

    @classmethod
    def from_state(cls, shape: Shape, role: Role, config: dict[str, Any], tensors: dict[str, Tensor]) -> Predicted:
        from . import build

        inner = build(shape, role, config["inner"], _below(tensors, "inner."))
        kind = config["predictor"]["kind"]
        if kind not in PREDICTORS:
            raise KVCalError(f"predictor {kind!r}: known are {', '.join(PREDICTORS)}")
        predictor = PREDICTORS[kind](_below(tensors, "predictor."))
        return cls(inner, predictor, tuple(config["predictor"]["inputs"]))

    def tensor_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return self.inner.tensor_specs()

    def to(self, device: torch.device) -> Predicted:
        self.inner = self.inner.to(device)
        self.predictor = self.predictor.to(device)
        return self

    def describe(self) -> str:
        return f"{self.predictor.name}({'+'.join(self.inputs)}) + {self.inner.describe()}"


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
