"""Storage of a layer that grows on the host."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..codecs import Packed
from . import block_store


class Exposed(Protocol):
    """Storage whose tensors the host sees, as HostStorage explains them."""

    @property
    def sink(self) -> list[Tensor]: ...
    @property
    def window(self) -> list[Tensor]: ...
    @property
    def packed(self) -> list[Packed]: ...


class HostStorage:
    """Storage of one layer that grows on the host.

    sink, window: keys and values, each (B, H, tokens, D) in the model's dtype; packed: their blocks. ready,
    is_allocated: no device steps by itself here, and nothing is allocated for steps to come. The methods do for a layer
    what StaticStorage does for one: mostly nothing.
    """

    ready = False
    is_allocated = False

    def __init__(self) -> None:
        self.sink: list[Tensor] = []
        self.window: list[Tensor] = []
        self.packed: list[Packed] = [{}, {}]

    def clear(self) -> None:
        """Does nothing: the layer gives it tensors of no tokens."""

    def publish(self, layer: object) -> None:
        """Does nothing: the host has all there is, and no device needs to know."""

    def grow_on_host(self) -> None:
        """Does nothing: it always grows there."""

    def heed(self, layer: object) -> None:
        """Does nothing: no device takes steps by itself."""

    def bookkeeping(self, layer: object) -> list[Tensor]:
        """Tensors that are neither tokens nor blocks: none."""
        return []

    def tensors(self, part: str) -> list[Tensor]:
        """The tensors of a part, packed or window."""
        return tensors_of(self, part)


def tensors_of(storage: Exposed, part: str) -> list[Tensor]:
    """The tensors of a part, packed or window, as the host sees them."""
    if part == "packed":
        return [t for packed in storage.packed for tensors in packed.values() for t in block_store.tensors_of(tensors)]
    return storage.sink + storage.window
