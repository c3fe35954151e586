"""Codecs of what predictors leave, by name, as schemes for a search of bits by layer (sensitivity.py).

Each codec is fitted in all layers first, all of them in one scan: that gives the codec of one layer alone, whose
neighbours are exact. A whole assignment is fitted again, because predictors are fitted on what the layers below decode
to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.codecs import Codec, Role, Shape
from kvcal_artifacts.scheme import LayerCodecs, Scheme

from ..methods.aqua_kv import AquaKV
from ..methods.registry import codec_maker
from .sensitivity import EXACT, Assignment

Fit = Callable[[Mapping[str, AquaKV]], dict[str, Bundle]]


class PredictedSchemes:
    """Schemes of assigned codecs behind predictors. base: predictors, windows and frame; its own codecs are not used.
    fit: the bundles of methods, by their names. bundles: those of the assignments that `whole` was given.
    """

    def __init__(self, base: AquaKV, codecs: Sequence[str], fit: Fit) -> None:
        self._base, self._fit = base, fit
        self._uniform = fit({name: self.method(Assignment(name, name)) for name in codecs})
        self.bundles: dict[str, Bundle] = {}

    def method(self, assignment: Assignment) -> AquaKV:
        """What fits this assignment."""
        return replace(
            self._base,
            first_layer="",
            keys=assignment.key,
            values=assignment.value,
            per_layer=assignment.per_layer,
        )

    @property
    def exact(self) -> Scheme:
        some = next(iter(self._uniform.values())).scheme
        pairs = [
            None if pair is None else LayerCodecs(_exact(pair.key.shape, "key"), _exact(pair.value.shape, "value"))
            for pair in some.layers
        ]
        return Scheme(some.windows, some.frame, tuple(pairs), some.skipped)

    def alone(self, layer: int, role: Role, codec: str) -> Scheme:
        """Predictors read what is exact then, and only this layer's keys, or values, are what they leave, coded."""
        exact, pair = self.exact, self._uniform[codec].scheme.layers[layer]
        one = exact.layers[layer]
        assert pair is not None and one is not None
        changed = LayerCodecs(pair.key, one.value) if role == "key" else LayerCodecs(one.key, pair.value)
        layers = (*exact.layers[:layer], changed, *exact.layers[layer + 1 :])
        return Scheme(exact.windows, exact.frame, layers, exact.skipped)

    def whole(self, assignments: Mapping[str, Assignment]) -> dict[str, Scheme]:
        fitted = {
            name: self._uniform[one.key]
            for name, one in assignments.items()
            if one.key == one.value and not one.per_layer
        }
        others = {name: self.method(one) for name, one in assignments.items() if name not in fitted}
        self.bundles = fitted | (self._fit(others) if others else {})
        return {name: self.bundles[name].scheme for name in assignments}


def _exact(shape: Shape, role: Role) -> Codec:
    return codec_maker(EXACT)(shape, role)
