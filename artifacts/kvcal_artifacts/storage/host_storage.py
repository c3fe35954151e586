"""Storage of a layer that grows on the host."""

from __future__ import annotations

from torch import Tensor

from ..codecs import Packed


class HostStorage:
    """Storage of one layer that grows on the host.

    sink, window: keys and values, each (B, H, tokens, D) in the model's dtype; packed: their blocks.
    """

    def __init__(self) -> None:
        self.sink: list[Tensor] = []
        self.window: list[Tensor] = []
        self.packed: list[Packed] = [{}, {}]

    def clear(self) -> None:
        """Does nothing: the layer gives it tensors of no tokens."""
