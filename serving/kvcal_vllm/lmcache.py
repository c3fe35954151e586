"""A serde of LMCache's, "kvcal": what it writes to its second tier goes through a bundle's codecs.

    --l2-adapter '{"type": "plugin", "module_path": "kvcal_vllm.lmcache", "class_name": "Storage",
                   "adapter_params": {"type": "fs", "base_path": "/cache"},
                   "serde": {"type": "kvcal", "bundle": "x.kvcal.safetensors"}}'

LMCache imports no module for a serde's sake, but it does for an adapter of type "plugin": `Storage` is the adapter that
`adapter_params` describe. Read against LMCache 0.5.6.
"""

from __future__ import annotations

from typing import Any

from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    Serializer,
    get_registered_serde_types,
    register_serde_factory,
)

from kvcal_artifacts import load_bundle
from kvcal_artifacts.checked import shown
from kvcal_artifacts.errors import UsageError

from .chunks import ChunkCodec, usable_device

NAME = "kvcal"
ENTRIES = ("bundle", "device", "max_workers")


def key_bytes(key: Any) -> bytes:
    """What names a chunk in LMCache: a stored chunk opens under this name only."""
    parts = (key.chunk_hash, key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)
    return repr(parts).encode()


class KVCalSerializer(Serializer):
    """Chunks (2, L, T, H * D) to bytes."""

    def __init__(self, codec: ChunkCodec) -> None:
        self._codec = codec

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Write the bytes of src into dst; return how many."""
        stored = self._codec.encode(src.tensor, key_bytes(key))
        dst.tensor.flatten()[: len(stored)].copy_(stored)
        return len(stored)

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """The exact number of bytes. Raises UsageError for a layout of several tensors."""
        if len(layout_desc.shapes) != 1:
            raise UsageError(f"{self._codec.name}: {len(layout_desc.shapes)} tensors in a chunk: must be one")
        return self._codec.size(layout_desc.shapes[0][2])


class KVCalDeserializer(Deserializer):
    """Bytes back to chunks."""

    def __init__(self, codec: ChunkCodec) -> None:
        self._codec = codec

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """Read dst out of the bytes of src, which may be longer. Raises KVCalError for bytes of another chunk."""
        stored = src.tensor.flatten()[: self._codec.size(dst.tensor.shape[2])]
        dst.tensor.copy_(self._codec.decode(stored, dst.tensor.dtype, key_bytes(key)))


class Storage(L2AdapterInterface):
    """The adapter that its parameters describe, {"type": …} and what that type takes: never an object of this class."""

    def __new__(cls, params: dict[str, Any], l1_memory_desc: Any = None) -> Any:
        config = get_l2_adapter_config_class(str(params.get("type"))).from_dict(params)
        return create_l2_adapter(config, l1_memory_desc)


def processor(entries: dict[str, object]) -> AsyncSerdeProcessor:
    """What LMCache makes of {"type": "kvcal", …}. Raises UsageError for entries that mean nothing."""
    if unknown := sorted(set(entries) - set(ENTRIES)):
        raise UsageError(f"serde kvcal, {shown(unknown[0])}: its entries are {', '.join(ENTRIES)}")
    source, workers = entries.get("bundle"), entries.get("max_workers", 1)
    if not isinstance(source, str) or not source:
        raise UsageError(f"serde kvcal, bundle = {shown(source)}: must be a bundle's path")
    if type(workers) is not int or workers < 1:
        raise UsageError(f"serde kvcal, max_workers = {shown(workers)}: must be an integer, 1 or more")
    codec = ChunkCodec(load_bundle(source), usable_device(entries.get("device", "cpu")))
    return AsyncSerdeProcessor(KVCalSerializer(codec), KVCalDeserializer(codec), max_workers=workers)


if NAME not in get_registered_serde_types():
    register_serde_factory(NAME, processor)
