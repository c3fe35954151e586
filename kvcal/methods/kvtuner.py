"""KVTuner-like bits per layer, a baseline: KIVI's integers, key and value bits of each layer by what its attention
loses.

Each layer's attention-output error is measured for every pair of key and value bits, exact inputs, calibration windows.
The sum over layers is then minimised under a limit of stored bits, exactly: costs are whole numbers, so a table over
what may be spent finds it. (KVTuner itself prunes and clusters layers and searches pairs with a task's accuracy.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvcal_artifacts.codecs import Codec, Shape, Uniform
from kvcal_artifacts.codecs.base import Role
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.presets import divisor
from kvcal_artifacts.scheme import Frame, LayerCodecs, Windows

from ..capture.scan import LayerTaps
from ..capture.shards import ShardSums
from .attention import OutputError, Probe, probe
from .base import Carry, LayerFit

Pair = tuple[int, int]  # key bits, value bits


@dataclass(frozen=True)
class KVTuner:
    """A search for bits of each layer, like KVTuner. choices: bits that a layer's keys and values may have. max_bits:
    stored bits per value, scales and minima included, at most on average. Keys per channel in groups of `group` tokens,
    values per token in groups of `group` channels.
    """

    name: ClassVar[str] = "kvtuner"
    taps: ClassVar[frozenset[str]] = frozenset({"q", "k", "v"})
    frame: ClassVar[Frame] = "post_rope"

    max_bits: float = 3.7
    choices: tuple[int, ...] = (2, 4, 8)
    group: int = 32
    sink: int = 4
    recent: int = 128
    block: int = 128

    def __post_init__(self) -> None:
        if not self.choices or any(type(bits) is not int or not 1 <= bits <= 8 for bits in self.choices):
            raise UsageError(f"bits {self.choices}: allowed are 1 to 8")
        if self.group < 1 or self.block % self.group:
            raise UsageError(f"--group {self.group}: must divide the block of {self.block} tokens")
        self.windows  # noqa: B018  validates

    @property
    def windows(self) -> Windows:
        return Windows(self.sink, self.recent, self.block)

    @property
    def pairs(self) -> list[Pair]:
        """Cheapest first; keys before values where the sum is the same."""
        bits = sorted(set(self.choices))
        return sorted(itertools.product(bits, bits), key=lambda pair: (sum(pair), -pair[0]))

    def codec(self, shape: Shape, role: Role, bits: int) -> Codec:
        if role == "key":
            return Uniform(shape, role, bits, self.group, "token")
        return Uniform(shape, role, bits, divisor(self.group, shape.dim), "channel")

    def buffers(self) -> dict[str, str]:
        return {}

    def fit_layer(self, layer: int, taps: LayerTaps, carry: Carry) -> LayerFit:
        """Errors of every pair, on training and held-out windows; the codecs are those of most bits until `finish`."""
        self._budget(carry.shape, len(carry.compressed))  # refuses before any work what could not be met in the end
        sums = ShardSums(lambda: _Tables(self.pairs))
        for batch in taps.batches(self.taps, self.frame, advance=True, sums=sums):
            with carry.timer("encode"):
                layer_probe = probe(batch, layer, taps.site, carry.shape, self.windows, frozenset())
                train = carry.training_rows(batch.rows)
                self._add(sums.part.fitted, layer_probe.rows(0, train), carry.shape)
                self._add(sums.part.holdout, layer_probe.rows(train), carry.shape)
        most = max(self.choices)
        pair = LayerCodecs(self.codec(carry.shape, "key", most), self.codec(carry.shape, "value", most))
        tables = {"error": sums.total.fitted, "holdout_error": sums.total.holdout}
        metrics = {
            f"{what}_{label(bits)}": float(f"{error.value:.6g}")
            for what, table in tables.items()
            for bits, error in table.items()
        }
        return LayerFit(pair, metrics)

    def _add(self, errors: dict[Pair, OutputError], layer_probe: Probe, shape: Shape) -> None:
        if not len(layer_probe.k):
            return
        exact = layer_probe.outputs()
        keys, values = (
            {bits: layer_probe.decoded(self.codec(shape, role, bits)) for bits in set(self.choices)}
            for role in ("key", "value")
        )
        for (k, v), error in errors.items():
            error.add(exact, layer_probe.outputs(keys[k], values[v]))

    def replay_layer(self, layer: int, taps: LayerTaps, carry: Carry, codecs: LayerCodecs) -> None:
        taps.advance()

    def finish(
        self, codecs: list[LayerCodecs], metrics: list[dict[str, float]]
    ) -> tuple[list[LayerCodecs], list[dict[str, float]]]:
        """Choose every layer's bits (the errors are in the metrics, so that a resumed run chooses the same)."""
        shape = codecs[0].key.shape
        chosen = allocate(
            [{pair: row[f"error_{label(pair)}"] for pair in self.pairs} for row in metrics],
            self._budget(shape, len(codecs)),
        )
        fitted = [LayerCodecs(self.codec(shape, "key", k), self.codec(shape, "value", v)) for k, v in chosen]
        rows = [
            row | {"key_bits": float(k), "value_bits": float(v), "output_error": row[f"holdout_error_{label((k, v))}"]}
            for row, (k, v) in zip(metrics, chosen, strict=True)
        ]
        return fitted, rows

    def _budget(self, shape: Shape, layers: int) -> int:
        """Sum of key and value bits that all layers may have together; what scales and minima take is the same for
        all.
        """
        least = min(self.choices)
        smallest = LayerCodecs(self.codec(shape, "key", least), self.codec(shape, "value", least)).bits_per_value()
        if self.max_bits < smallest:
            raise UsageError(
                f"--max-bits {self.max_bits:g}: {least}-bit keys and values with their scales take {smallest:g}; raise "
                "it",
            )
        return math.floor((self.max_bits - smallest + least) * 2 * layers + 1e-9)


class _Tables:
    """Errors of every pair of bits, on training and on held-out windows."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.fitted = {pair: OutputError() for pair in pairs}
        self.holdout = {pair: OutputError() for pair in pairs}

    def merge(self, other: _Tables) -> None:
        for pair, error in other.fitted.items():
            self.fitted[pair].merge(error)
        for pair, error in other.holdout.items():
            self.holdout[pair].merge(error)


def label(pair: Pair) -> str:
    return f"k{pair[0]}v{pair[1]}"


def allocate(errors: Sequence[dict[Pair, float]], budget: int) -> list[Pair]:
    """Choose one pair per layer for the least sum of errors, its cost being key bits plus value bits.

    The costs add up to at most `budget`. best[c] has the errors of the layers so far for each sum c. Of equal errors
    the cheaper is taken, then the first listed.
    """
    best: dict[int, tuple[float, list[Pair]]] = {0: (0.0, [])}
    for layer in errors:
        grown: dict[int, tuple[float, list[Pair]]] = {}
        for spent, (total, taken) in sorted(best.items()):
            for pair, error in layer.items():
                cost = spent + sum(pair)
                if cost <= budget and (cost not in grown or total + error < grown[cost][0]):
                    grown[cost] = (total + error, [*taken, pair])
        best = grown
    if not best:
        raise UsageError(f"{len(errors)} layers cannot share {budget} bits")
    return min(sorted(best.items()), key=lambda item: item[1][0])[1][1]
