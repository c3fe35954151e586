"""What the modules of this folder use of a cache and of its layers, so that none has to import those that import it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, TypeAlias, TypedDict

import torch
from torch import Tensor, nn

from kvcal_kernels.layout import AnyBlocks

from .. import hf
from ..codecs import Codec, Context, Packed
from ..paths.choose import LayerPaths
from ..scheme import LayerCodecs, Scheme
from ..storage.eviction import EvictingLedger
from ..storage.ledger import Ledger
from ..storage.plan import Plan
from ..storage.static_storage import Contents, Steps
from .forward import Forward
from .record import Record
from .rope import StoredRope
from .shared_memory import SharedMemory
from .statistics.base import Statistic

AnyLedger: TypeAlias = Ledger | EvictingLedger
AnyLayer: TypeAlias = Any  # a KVCalLayer, or one of Transformers' own classes, which share no base with all methods


class CacheOptions(TypedDict, total=False):
    """Options of KVCalCache, whose docstring explains them."""

    strict: bool
    offload: bool
    remember: bool
    kernels: str
    require_kernels: bool
    max_length: int | None


class Watch(Protocol):
    """Gets what a cache packs and reads, for those who measure; `KVCalCache.watch`."""

    def packed(self, layer: int, exact: list[Tensor], decoded: list[Tensor]) -> None:
        """Called with keys and values (B, H, T, D) of blocks just packed, and with what they decode to, float32."""

    def read(self, layer: int, blocks: int) -> None:
        """Called when a call's attention gets so many blocks, all rows together."""


class KeyFactorProtocol(Protocol):
    """The factor that packed keys were divided by; KeyFactor is it."""

    def of(self, layer: LayerProtocol) -> tuple[Tensor | None, Tensor | None]: ...
    def forget(self) -> None: ...


class LayerStorage(Protocol):
    """Where a layer's tokens lie: HostStorage, or StaticStorage of static/, which explain the members."""

    sink: list[Tensor]
    window: list[Tensor]
    packed: list[Packed]

    @property
    def ready(self) -> bool: ...
    @property
    def is_allocated(self) -> bool: ...
    def clear(self) -> None: ...
    def publish(self, layer: LayerProtocol) -> None: ...
    def grow_on_host(self) -> None: ...
    def heed(self, layer: LayerProtocol) -> None: ...
    def bookkeeping(self, layer: LayerProtocol) -> list[Tensor]: ...
    def tensors(self, part: str) -> list[Tensor]: ...


class LayerProtocol(Protocol):
    """A compressed layer of a cache; KVCalLayer is one, and explains its attributes."""

    index: int
    site: hf.AttentionSite
    rotary: int
    title: str
    codecs: LayerCodecs
    decoding: Hashable
    paths: LayerPaths
    statistics: dict[str, Statistic]
    remembered: tuple[list[Packed], list[Tensor]] | None
    sink: list[Tensor]
    window: list[Tensor]
    packed: list[Packed]
    is_initialized: bool
    is_verified: bool
    unseen: int
    missed: int
    columns: int
    dtype: torch.dtype
    device: torch.device

    @property
    def cache(self) -> CacheProtocol: ...
    @property
    def storage(self) -> LayerStorage: ...
    @property
    def key_factor(self) -> KeyFactorProtocol: ...
    @property
    def pair(self) -> tuple[Codec, Codec]: ...
    @property
    def rotates(self) -> bool: ...
    @property
    def block_slots(self) -> int: ...
    def as_blocks(self, packed: list[Packed]) -> tuple[AnyBlocks, AnyBlocks]: ...
    def grow_on_host(self) -> None: ...
    def on_moved(self) -> None: ...
    def learns(self, keys: Tensor, values: Tensor) -> bool: ...
    def current_statistics(self) -> dict[str, Tensor]: ...
    def decode(self, packed: list[Packed], context: Context) -> tuple[Tensor, Tensor]: ...
    def decode_all(self) -> tuple[Tensor, Tensor]: ...


class CacheProtocol(Protocol):
    """A cache; KVCalCache is one, and explains its attributes."""

    scheme: Scheme
    model: nn.Module
    kernels: str
    max_length: int | None
    remember: bool
    offloading_layers: bool
    watch: Watch | None
    record: Record
    forward: Forward
    ledger: AnyLedger
    stored_rope: StoredRope
    memory: SharedMemory
    most_queries: int
    steps: dict[torch.device, Steps]

    @property
    def full_ledger(self) -> Ledger: ...
    @property
    def evicting_ledger(self) -> EvictingLedger: ...
    @property
    def contents(self) -> Contents: ...
    @property
    def opened(self) -> bool: ...
    @property
    def uneven(self) -> str | None: ...
    @property
    def is_compileable(self) -> bool: ...
    @property
    def compressed_layers(self) -> Sequence[LayerProtocol]: ...
    def plan_for(self, layer: LayerProtocol, keys: Tensor) -> Plan: ...
    def steps_on_device(self, keys: Tensor) -> bool: ...
    def why_not_compiled(self, query: int) -> str: ...
    def settle(self) -> None: ...
    def check_use(self) -> None: ...
    def grow(self, why: str) -> None: ...
    def on_keys_of(self, dtype: torch.dtype) -> None: ...
    def on_refused(self, layer: LayerProtocol) -> None: ...
    def note_decoded(self, layer: LayerProtocol, why: str) -> None: ...
    def of_all_heads(self, x: Tensor) -> Tensor: ...
    def add_mass(self, mass: Tensor) -> None: ...
