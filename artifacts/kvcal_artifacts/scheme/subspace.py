"""The choice of SQuat's subspace, over a whole scheme."""

from __future__ import annotations

from dataclasses import replace

from ..errors import KVCalError
from .scheme import LayerCodecs, Scheme


def has_subspace(scheme: Scheme) -> bool:
    """Whether any layer's keys are stored by SQuat, so that there is a subspace to choose."""
    return any(pair is not None and pair.key.subspace is not None for pair in scheme.layers)


def choose(scheme: Scheme, subspace: str) -> Scheme:
    """A bundle's scheme with another choice of subspace, for another cache: KVCalCache(choose(...), model)."""
    layers = tuple(
        pair and LayerCodecs(pair.key.choose(subspace), pair.value.choose(subspace)) for pair in scheme.layers
    )
    if not has_subspace(scheme):
        raise KVCalError("no layer's keys are stored by the codec squat: there is no subspace to choose")
    return replace(scheme, layers=layers, _placed={})
