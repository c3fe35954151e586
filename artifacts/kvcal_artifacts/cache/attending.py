"""The part of a layer that attention calls: a decode step over packed blocks, and what is stored after each call."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvcal_kernels.layout import AnyBlocks

from ..codecs.base import Packed
from ..errors import KVCalError
from ..modes import without_autocast, without_grad
from ..paths.choose import PathKind
from ..storage.plan import Plan
from . import attention, observing, storing
from .protocols import LayerProtocol

Due = tuple[Plan, list[Tensor]]  # a call, and its keys and values in the frame they are stored in
Shown = tuple[list[Packed], tuple[AnyBlocks, AnyBlocks]]  # packed tensors, and how the kernel sees them


class _Layer(LayerProtocol, Protocol):
    """What a layer has besides, for the methods here."""

    _due: Due | None
    _shown: Shown | None

    def finish(self, plan: Plan, stored: list[Tensor], extended: list[Tensor] | None = None) -> None: ...
    def offload(self) -> None: ...


class AttendingLayer:
    """A part of KVCalLayer, which has the other members of LayerProtocol."""

    _due: Due | None = None  # between update() and its attention by the kernel
    _shown: Shown | None = None

    @without_grad
    def attend(
        self: _Layer, q: Tensor, k: Tensor, v: Tensor, scaling: float, positions: Tensor | None = None
    ) -> Tensor:
        """Attention of the call that update() began, for operator.py; then its tokens are stored."""
        due, self._due = self._due, None
        if due is None:
            raise KVCalError(f"layer {self.index}: attention was called without update(); call reset() and start again")
        packed = None if self.paths.kind is PathKind.CODEBOOK else self.as_blocks(self.storage.packed)
        with without_autocast(q.device.type):
            out, extended = attention.attend(self, packed, *due, q, scaling)
            self.finish(*due, extended)
        return out.to(q.dtype)

    def as_blocks(self: _Layer, packed: list[Packed]) -> tuple[AnyBlocks, AnyBlocks]:
        """Keys and values as the kernel takes them, wrapped once for tensors that stay."""
        if self._shown is None or self._shown[0] is not packed:
            keys, values = (codec.as_blocks(tensors) for codec, tensors in zip(self.pair, packed, strict=True))
            self._shown = packed, (keys, values)
        return self._shown[1]

    def finish(self: _Layer, plan: Plan, stored: list[Tensor], extended: list[Tensor] | None = None) -> None:
        """Store the call's tokens. extended: windows with the new tokens behind them, if attention joined them."""
        storing.store(self, plan, stored, observing.observe(self, plan, stored[0]), extended)
        self.columns += plan.query
        if self.cache.offloading_layers:
            self.offload()
        self.storage.publish(self)
