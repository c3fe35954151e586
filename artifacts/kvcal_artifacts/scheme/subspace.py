"""The choice of SQuat's subspace, over a whole scheme."""

from __future__ import annotations

from dataclasses import replace

from ..codecs import Codec
from ..codecs.squat import corrects
from ..errors import KVCalError
from .scheme import LayerCodecs, Scheme


def has_subspace(scheme: Scheme) -> bool:
    """Whether any layer's keys are stored by SQuat, so that there is a subspace to choose."""
    return any(pair is not None and corrects(pair.key) for pair in scheme.layers)


def choose(scheme: Scheme, subspace: str) -> Scheme:
    """A bundle's scheme with another choice of subspace, for a cache of its own: KVCalCache(choose(...), model)."""

    def other(codec: Codec) -> Codec:
        return codec.choose(subspace) if corrects(codec) else codec

    layers = tuple(pair and LayerCodecs(other(pair.key), other(pair.value)) for pair in scheme.layers)
    if not has_subspace(scheme):
        raise KVCalError("no layer's keys are stored by the codec squat: there is no subspace to choose")
    return replace(scheme, layers=layers, _placed={})
