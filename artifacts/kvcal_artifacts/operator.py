"""The operator by which compiled code finds the layer of a cache that attends for it."""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor

from .errors import KVCalError


class Layer(Protocol):
    """The layer that the operator finds by a handle."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, positions: Tensor | None = None) -> Tensor:
        """Attention as decode_attention computes it; the layer stores the new tokens."""


_LAYERS: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count(1)


def register(layer: Layer) -> int:
    """A number by which compiled code finds the layer: Python attributes do not survive compilation."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return number


def decode_eagerly(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, handle: int, positions: Tensor | None = None
) -> Tensor:
    """Attention of the new tokens over these and all that the layer of `handle` stores; it then stores them, too.

    q (B, Hq, Q, D) after RoPE, k, v (B, H, Q, D), keys as the layer stores them -> (B, Hq, Q, D). positions: int
    (B or 1, Q) of the new tokens, where keys are stored before RoPE.
    """
    layer = _LAYERS.get(handle)
    if layer is None:
        raise KVCalError("the cache that this forward was compiled for is gone; compile it again with the one in use")
    return layer.attend(q, k, v, scaling, positions)


# What is compiled calls the operator; from Python its dispatcher would cost too much (docs/benchmarks/reasons.md).
decode_attention = torch.library.custom_op("kvcal::decode_attention", mutates_args=())(decode_eagerly)


@decode_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scaling: float, handle: int, positions: Tensor | None = None) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)
