"""Predictors of a layer's keys or values from what was decoded before it (AQUA-KV section 3.2 and 4.1).

A predictor maps concatenated heads to concatenated heads: x (..., inputs * C) -> (..., C), C = H * D. Weights are
stored in 16 bits (the paper's 162 MiB for Llama-3.2-3B), computed in float32.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, TypedDict

import torch
from torch import Tensor
from torch.nn import functional

from kvcal_kernels.packing import pack, packed_bytes, unpack

from ..checked import HALF_MAX
from ..errors import KVCalError
from .constants import Constant

INPUTS = ("k1", "v1", "k2", "v2", "k0")


def _half(*shape: int | str) -> Constant:
    return Constant(torch.float16, shape)


class Predictor(ABC):
    """A function from what was decoded before to the keys or values of a layer, with its weights."""

    name: ClassVar[str]

    def __init__(self, weights: dict[str, Tensor]) -> None:
        missing = set(self.constants(weights, 1, 1)) - set(weights)
        if missing:
            raise KVCalError(f"{self.name} predictor lacks {', '.join(sorted(missing))}")
        # As a bundle, or another rank, gives them: products of a matrix that lies by columns differ in their last bits.
        self.weights = {name: w.contiguous() for name, w in weights.items()}

    @classmethod
    @abstractmethod
    def constants(cls, weights: dict[str, Tensor], inputs: int, outputs: int) -> dict[str, Constant]:
        """The tensors that it needs for so many inputs and outputs (Cin, C).

        weights: the given ones, some are optional.
        """

    @abstractmethod
    def forward(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        """The prediction (..., C) float32 for x (..., Cin) float32. w: the weights in float32."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x, self.working())

    def working(self) -> dict[str, Tensor]:
        """The weights as they are computed with: float32, converted for one use and dropped."""
        return {name: w.float() for name, w in self.weights.items()}

    def to(self, device: torch.device) -> Predictor:
        if all(w.device == device for w in self.weights.values()):
            return self
        twin = copy.copy(self)
        twin.weights = {name: w.to(device) for name, w in self.weights.items()}
        return twin

    @property
    def nbytes(self) -> int:
        return sum(w.numel() * w.element_size() for w in self.weights.values())


class Bias(Predictor):
    """A constant vector: only the shape of x matters (Table 5, "Only bias")."""

    name = "bias"

    @classmethod
    def constants(cls, weights: dict[str, Tensor], inputs: int, outputs: int) -> dict[str, Constant]:
        return {"bias": _half(outputs)}

    def forward(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        return w["bias"].expand(*x.shape[:-1], -1)


class Linear(Predictor):
    """A linear map: x @ weight + bias, weight (Cin, C)."""

    name = "linear"

    @classmethod
    def constants(cls, weights: dict[str, Tensor], inputs: int, outputs: int) -> dict[str, Constant]:
        return {"weight": _half(inputs, outputs), "bias": _half(outputs)}

    def forward(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        return x @ w["weight"] + w["bias"]


class ReducedRank(Predictor):
    """A linear map of low rank: x @ down @ up + bias, down (Cin, r), up (r, C) (Reinsel and Velu 1998)."""

    name = "reduced-rank"

    @classmethod
    def constants(cls, weights: dict[str, Tensor], inputs: int, outputs: int) -> dict[str, Constant]:
        return {"down": _half(inputs, "rank"), "up": _half("rank", outputs), "bias": _half(outputs)}

    def forward(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        return x @ w["down"] @ w["up"] + w["bias"]


class MLP(Predictor):
    """Two layers with a hidden width of 2C and GELU; `norm_weight`, `norm_bias` present: LayerNorm on the input."""

    name = "mlp"

    @classmethod
    def constants(cls, weights: dict[str, Tensor], inputs: int, outputs: int) -> dict[str, Constant]:
        first = {"in_weight": _half(inputs, "hidden"), "in_bias": _half("hidden")}
        last = {"out_weight": _half("hidden", outputs), "out_bias": _half(outputs)}
        norm = {"norm_weight": _half(inputs), "norm_bias": _half(inputs)} if "norm_weight" in weights else {}
        return first | last | norm

    def forward(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        if "norm_weight" in w:
            x = functional.layer_norm(x, x.shape[-1:], w["norm_weight"], w["norm_bias"])
        return functional.gelu(x @ w["in_weight"] + w["in_bias"]) @ w["out_weight"] + w["out_bias"]


class QuantisedLinear(Predictor):
    """A linear map, x @ W + bias, with W of 4-bit codes, one float16 scale and minimum per output channel.

    codes: uint8 (C, packed Cin) in the split order of kvcal_kernels.packing; W[i, o] = code * scale[o] + min[o].
    """

    name = "linear-4bit"
    bits = 4

    @classmethod
    def constants(cls, weights: dict[str, Tensor], inputs: int, outputs: int) -> dict[str, Constant]:
        codes = Constant(torch.uint8, (outputs, packed_bytes(inputs, cls.bits)))
        scale = Constant(torch.float16, (outputs,), positive=True)
        return {"codes": codes, "scale": scale, "min": _half(outputs), "bias": _half(outputs)}

    @classmethod
    def from_codes(cls, codes: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor) -> QuantisedLinear:
        """The predictor of codes (Cin, C), integers 0 to 15, with scale, minimum and bias (C,)."""
        packed = pack(codes.T.contiguous(), cls.bits)
        return cls({"codes": packed, "scale": scale.half(), "min": minimum.half(), "bias": bias.half()})

    def working(self) -> dict[str, Tensor]:
        packed = self.weights["codes"]
        codes = unpack(packed, self.bits, packed.shape[-1] * 8 // self.bits).float().T
        weight = codes * self.weights["scale"].float() + self.weights["min"].float()
        return {"weight": weight, "bias": self.weights["bias"].float()}

    def forward(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        return x @ w["weight"] + w["bias"]


def check_gain(weights: Mapping[str, Tensor], what: str) -> None:
    """Raises KVCalError for a matrix that makes more of inputs of size 1 than float16 holds. No fit to keys and values
    in 16 bits does. Judged are a column's length and, of 4-bit codes, the largest entry that they can mean.
    """
    for name, weight in weights.items():
        if weight.ndim == 2 and weight.is_floating_point():
            gain = float(weight.float().square().sum(0).max().sqrt())  # norm(dim=0) takes ten times as long
        elif name == "scale":
            lowest = weights["min"].float()
            gain = float(lowest.abs().maximum((lowest + 15 * weight.float()).abs()).max())
        else:
            continue
        if gain > HALF_MAX:
            raise KVCalError(f"{what}, {name}: gives {gain:.3g} for inputs of size 1, must be at most {HALF_MAX:g}")


PREDICTORS: dict[str, type[Predictor]] = {p.name: p for p in (Bias, Linear, ReducedRank, MLP, QuantisedLinear)}


class PredictorSettings(TypedDict):
    """The settings of a predictor in a bundle."""

    kind: str
    inputs: list[str]


def predictor_config(predictor: Predictor, inputs: tuple[str, ...]) -> PredictorSettings:
    """What a bundle says of a predictor besides its tensors."""
    return {"kind": predictor.name, "inputs": list(inputs)}
