"""What the modules that work on a whole cache use of it, its layers included."""

from __future__ import annotations

from typing import Protocol

from .. import hf
from .layer import KVCalLayer
from .masks import MaskHistory
from .protocols import AnyLayer, CacheProtocol


class WholeCache(CacheProtocol, hf.Listener, Protocol):
    """A cache and its layers; KVCalCache is one, and explains its attributes."""

    layers: list[AnyLayer]
    hooks: hf.Hooks
    mask_history: MaskHistory
    caveats: list[str]
    strict: bool
    growing: str | None
    auto: dict[str, object] | None
    head_shard: hf.HeadShard | None
    why_all_heads: str | None

    @property
    def compressed_layers(self) -> list[KVCalLayer]: ...
    @property
    def why_not_compileable(self) -> str | None: ...
    def grow_on_host(self) -> None: ...
    def leave_forward(self) -> None: ...
    def publish(self) -> None: ...
    def nbytes(self, part: str | None = None) -> int: ...
    def bits_per_value(self) -> float: ...
    def resident_bytes(self) -> int: ...
