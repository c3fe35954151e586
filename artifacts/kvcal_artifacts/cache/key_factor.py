"""The factor that packed keys were divided by, which queries are multiplied by instead."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_not

from torch import Tensor

from ..codecs import Context
from ..paths import fused
from .protocols import LayerProtocol


class KeyFactor:
    """The factor of one layer, remembered for statistics that stay, which are never changed in place here."""

    def __init__(self) -> None:
        self.remembered: tuple[list[Tensor], tuple[Tensor | None, Tensor | None]] | None = None

    def forget(self) -> None:
        """Compute it anew when it is next asked for."""
        self.remembered = None

    def of(
        self, layer: LayerProtocol, remember: bool = True, observed: Mapping[str, tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The factor of kv heads, contiguous, and that of query heads.

        observed: statistics of kv heads and of query heads, if they are at hand.
        """
        trackers = layer.statistics.values()
        states = [state for tracker in trackers for state in tracker.state.values()] if trackers else []
        if self.remembered is not None and len(self.remembered[0]) == len(states):
            states_then, both = self.remembered
            if not any(map(is_not, states, states_then)):
                return both
        if observed is None:
            stats = layer.current_statistics()
        else:
            stats = {name: of_keys for name, (of_keys, _) in observed.items()}
        factor = layer.codecs.key.key_factor(Context(layer.index, stats=stats))
        heads = layer.site.ratio * layer.site.kv_heads
        wide = next((of_queries for of_keys, of_queries in (observed or {}).values() if of_keys is factor), None)
        if factor is not None and wide is None:
            wide = fused.for_queries(factor, heads)
        both = (None if factor is None else factor.contiguous(), wide)
        self.remembered = (states, both) if remember else None
        return both
