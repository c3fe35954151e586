"""A second cache on the same model gets the contents of the first."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from .layer import KVCalLayer
from .whole_cache import WholeCache

# what a layer does not share with its copies
NOT_COPIED = ("_owner", "site", "title", "_in_place", "codecs", "handle", "_shown")


def fill(twin: WholeCache, cache: WholeCache, memo: dict[int, object]) -> None:
    """Copy the contents of `cache`, of which the host must know, into a new cache of the same settings."""
    twin.ledger = copy.deepcopy(cache.ledger, memo)
    twin.record, twin.steps = cache.record.copied(), copy.deepcopy(cache.steps, memo)
    twin.growing = cache.growing
    for index, (layer, other) in enumerate(zip(cache.layers, twin.layers, strict=True)):
        if isinstance(layer, KVCalLayer) and isinstance(other, KVCalLayer):
            state = {name: value for name, value in vars(layer).items() if name not in NOT_COPIED}
            other.__dict__.update(copy.deepcopy(state, memo))
            other.codecs = layer.codecs
        else:
            twin.layers[index] = copy.deepcopy(layer, memo)


@contextmanager
def undone(cache: WholeCache, layer: KVCalLayer) -> Iterator[None]:
    """What a call does within the block to one layer, and to what it leaves for the layers above, is undone."""
    state = {name: value for name, value in vars(layer).items() if name not in NOT_COPIED}
    contents, codecs = copy.deepcopy(state), layer.codecs
    with cache.forward.chain.undone():
        yield
    layer.__dict__.update(contents)
    layer.codecs = codecs
