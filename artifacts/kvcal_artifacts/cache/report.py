"""Reports of a cache: bytes, bits per value, and what every layer does."""

from __future__ import annotations

from ..errors import KVCalError
from ..paths import choose
from .layer import KVCalLayer
from .protocols import AnyLayer
from .whole_cache import WholeCache

PARTS = ("packed", "window", "bookkeeping", "decoded")


def nbytes(cache: WholeCache, part: str) -> int:
    """The bytes of real storage of one of PARTS."""
    if part not in PARTS:
        raise KVCalError(f"nbytes({part!r}): allowed are {', '.join(PARTS)}")
    if part == "bookkeeping":
        statistics = [t for layer in cache.compressed_layers for t in layer.bookkeeping()]
        return cache.ledger.nbytes + sum(t.numel() * t.element_size() for t in statistics)
    tensors = [t for layer in cache.compressed_layers for t in layer.stored(part)]
    if part == "window":
        plain = [layer for layer in cache.layers if not isinstance(layer, KVCalLayer)]
        tensors += [t for layer in plain for t in (layer.keys, layer.values) if t is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def packed_values(cache: WholeCache) -> int:
    """How many numbers the packed blocks stand for; those of evicted tokens do not count."""
    pairs = [pair for pair in cache.scheme.layers if pair is not None]
    numbers = sum(pair.key.shape.values + pair.value.shape.values for pair in pairs)
    if cache.scheme.selection is None:
        return int(cache.ledger.blocks.sum()) * numbers
    return cache.evicting_ledger.packed_tokens * numbers // cache.scheme.windows.block


def unpacked(cache: WholeCache) -> str | None:
    """Why a cache has packed nothing yet, in a sentence; None where it has, or where it holds no tokens."""
    ledger, windows = cache.ledger, cache.scheme.windows
    tokens = ledger.columns
    if not tokens or bool((ledger.blocks > 0).any()):
        return None
    first = windows.sink + windows.recent + windows.block
    return (
        f"nothing is packed yet: the cache holds {tokens} tokens, and the first block is packed at {first} (sink "
        f"{windows.sink}, recent {windows.recent}, block {windows.block}); until then all are in the model's dtype"
    )


def describe(cache: WholeCache) -> dict[str, object]:
    """The result of KVCalCache.describe, whose docstring explains its keys."""
    return {
        "windows": vars(cache.scheme.windows),
        "frame": cache.scheme.frame,
        "coverage": cache.scheme.coverage,
        "auto": cache.auto,
        "tokens": cache.ledger.columns,
        "selection": None if cache.scheme.selection is None else cache.evicting_ledger.describe(),
        "packed_blocks": cache.ledger.blocks.tolist(),
        "unpacked": unpacked(cache),
        "caveats": cache.caveats,
        "returned_by_crop": cache.record.returned_tokens,
        "unforgotten_by_statistics": dict(cache.record.unforgotten),
        "mask": "custom (not 2-D): every token counts as real" if cache.forward.custom_mask else "2-D or none",
        "decoded_steps": dict(cache.record.decoded_steps),
        "path": choose.summary([layer.why_reference for layer in cache.compressed_layers], cache.kernels),
        "max_length": cache.max_length,
        "compileable": cache.why_not_compileable or True,
        "nbytes": {name: cache.nbytes(name) for name in PARTS},
        "shared_bytes": cache.memory.nbytes,
        "bits_per_value": cache.bits_per_value(),
        "resident_bytes": cache.resident_bytes(),
        **({} if cache.head_shard is None else {"heads": _heads(cache)}),
        "layers": [_row(cache, index, layer) for index, layer in enumerate(cache.layers)],
    }


def _heads(cache: WholeCache) -> str:
    """Which kv heads the process of a tensor-parallel model stores, and why all of them, if it does."""
    shard = cache.head_shard
    assert shard is not None
    what = f"process {shard.rank} of {shard.count}"
    if cache.why_all_heads is not None:
        return f"{what} stores those of all: {cache.why_all_heads}"
    return f"{what} stores its own"


def _row(cache: WholeCache, index: int, layer: AnyLayer) -> dict[str, object]:
    if not isinstance(layer, KVCalLayer):
        return {"layer": index, "state": "skipped", "why": cache.scheme.skipped[index]}
    key, value = layer.codecs.key.describe(), layer.codecs.value.describe()
    row: dict[str, object] = {"layer": index, "state": "applied", "key": key, "value": value, "path": layer.path}
    return row | ({"packing": layer.packing} if layer.is_initialized else {})
