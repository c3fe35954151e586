"""Decoded keys and values that one layer leaves for those predicted from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..codecs import Context
from ..scheme import Scheme


class Chain:
    """What blocks decode to by layer: those packed before a call ("old"), and those that it packs ("new")."""

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme
        self._decoded: dict[str, dict[int | None, tuple[Tensor | None, Tensor | None]]] = {"old": {}, "new": {}}

    def context(self, which: str, layer: int, device: torch.device) -> Context:
        """What the layers below left for this one, on its device: a model may be spread over several."""
        chain = self._decoded[which]
        (k1, v1), (k2, v2) = (chain.get(self._scheme.below(layer, back), (None, None)) for back in (1, 2))
        k1, v1, k2, v2 = (None if x is None else x.to(device) for x in (k1, v1, k2, v2))
        return Context(layer, k1, v1, k2, v2)

    def leave(self, which: str, layer: int, keys: Tensor | None, values: Tensor | None) -> None:
        """Leave what a layer decodes for those above; drop what no layer will read again."""
        if self._scheme.chained:
            chain = self._decoded[which]
            chain[layer] = (keys, values)
            chain.pop(self._scheme.below(layer, self._scheme.reach), None)
            if layer == self._scheme.compressed[-1]:
                chain.clear()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """What is left or dropped within the block is as before behind it."""
        before = {which: dict(by_layer) for which, by_layer in self._decoded.items()}
        yield
        self._decoded = before
