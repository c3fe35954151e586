"""InnerQ (Tayaranian et al. 2026): groups along the inner dimension, and keys evened out by a factor a channel.

The codecs need no data: innerq-base, -hybrid and -small are presets (kvcal_artifacts.presets, codecs.named). What is
measured on text is the key normalisation of section 4.3: f_c = sqrt(max |K_c|) for each kv head and channel after RoPE.
The bundle carries it, and the cache divides keys by it before they are rounded. Ours: queries on text also say how much
each channel's error counts when the scale of a group is searched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvcal_artifacts import hf
from kvcal_artifacts.checked import Json
from kvcal_artifacts.codecs import Codec, Scaled, Uniform
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.presets import INNERQ_KEYS, INNERQ_VALUES
from kvcal_artifacts.scheme import Frame, LayerCodecs, Windows

from ..capture.scan import LayerTaps, TapBatch
from ..capture.shards import Added, Largest, ShardSums
from .base import Carry, HoldoutError, LayerFit, Unfitted, flat
from .composition import DataFreeComposition
from .data_free import Preset
from .factors import by_queries, channel_factor, outlier_ratios, share_pairs
from .registry import no_factors

FACTORS = ("channel", "pair", "none")
SEARCHES = ("queries", "plain")
QUERIES = 64  # a window's last ones, whose logits are compared


@dataclass(frozen=True)
class InnerQ:
    """InnerQ: integers in groups, keys divided by factors of their channels. key, value: names of codecs (see
    registry); the defaults are InnerQ_Base. per_layer: exceptions (see composition). Windows of section 5.1.

    factors: "channel" (the paper's), "pair" (the channels of a RoPE pair share the larger one, as `kvcal fold` needs),
    "none". UsageError where `key` has no use for any; an exception's codec that has none goes without. exponent: f =
    (max |K_c|) ** exponent, the paper's 0.5. powers_of_two: rounded to them: folding is exact in any dtype. search: of
    codecs that search for a group's scale: the squared error of each key channel counts as the mean square of its
    queries ("queries"), or all count alike ("plain").
    """

    name: ClassVar[str] = "innerq"
    taps: ClassVar[frozenset[str]] = frozenset({"q", "k", "v"})

    key: str = INNERQ_KEYS
    value: str = INNERQ_VALUES["base"]
    factors: str = "channel"
    exponent: float = 0.5
    powers_of_two: bool = False
    search: str = "queries"
    per_layer: tuple[str, ...] = ()
    sink: int = 32
    recent: int = 96
    block: int = 32

    def __post_init__(self) -> None:
        if self.factors not in FACTORS:
            raise UsageError(f"factors {self.factors!r}: allowed are {', '.join(FACTORS)}")
        if self.search not in SEARCHES:
            raise UsageError(f"--search {self.search}: allowed are {', '.join(SEARCHES)}")
        if not 0 < self.exponent <= 1:
            raise UsageError(f"exponent {self.exponent}: must be above 0 and at most 1")
        self.composition, self.windows  # noqa: B018  validates
        if self.factors != "none" and (refusal := no_factors(self.key)) is not None:
            why, bare = refusal
            take = f"take {bare} for keys" if bare else f"take codes along channels for keys, as {INNERQ_KEYS}"
            raise UsageError(f"factors {self.factors!r}: {why}; {take}, or factors none")

    @property
    def composition(self) -> DataFreeComposition:
        return DataFreeComposition(self.key, self.value, self.per_layer)

    @property
    def windows(self) -> Windows:
        return Windows(self.sink, self.recent, self.block)

    @property
    def frame(self) -> Frame:
        return "post_rope"

    def unfitted(self) -> Unfitted | None:
        """The preset of these codecs, whose factors are those of each prompt."""
        variants = [name for name, value in INNERQ_VALUES.items() if (self.key, self.value) == (INNERQ_KEYS, value)]
        if not variants or self.per_layer:
            return None
        name = f"innerq-{variants[0]}"
        bare = Preset(name, name, self.frame, self.sink, self.recent, self.block)
        return Unfitted(name, bare, "--search plain" if self.search == "queries" else "")

    def buffers(self) -> dict[str, str]:
        return {}

    def fit_layer(self, layer: int, taps: LayerTaps, carry: Carry) -> LayerFit:
        self.composition.check(carry.layers)
        self.composition.check_reach(carry.layers, carry.skipped)
        largest = self._largest(taps, carry)
        codec, name = self.composition.codec, self.composition.name(layer, carry.layers, "key")
        inner = codec(layer, carry.layers, "key")(carry.shape, "key")
        if self.search == "queries" and inner.weighable:
            inner = by_queries(inner, self._query_squares(taps, carry))
        value = codec(layer, carry.layers, "value")(carry.shape, "value")
        key = inner if self.factors == "none" or no_factors(name) else Scaled(inner, self._factor(largest, taps).cpu())
        sums = ShardSums(lambda: _Errors(key, inner, value))
        for batch in taps.batches(self.taps, self.frame, advance=True, sums=sums):
            if (train := carry.training_rows(batch.rows)) < batch.rows.stop - batch.rows.start:
                with carry.timer("encode"):
                    sums.part.add(batch, train, carry.tokens)
        measured = {"key_outlier_ratio": round(float(outlier_ratios(largest).max()), 3)} | sums.total.metrics()
        return LayerFit(LayerCodecs(key, value), measured)

    def replay_layer(self, layer: int, taps: LayerTaps, carry: Carry, codecs: LayerCodecs) -> None:
        taps.advance()

    def _largest(self, taps: LayerTaps, carry: Carry) -> Tensor:
        """(H, D) float32: max |K_c| over the training windows' coded tokens; sinks are not coded and do not count."""
        sums = ShardSums(Largest)
        for batch in taps.batches({"k"}, self.frame, rows=slice(0, carry.train), sums=sums):
            assert batch.k is not None
            sums.part.add(carry.coded(batch.k).float().abs().amax((0, 2)))
        assert sums.total.value is not None
        return sums.total.value

    def _query_squares(self, taps: LayerTaps, carry: Carry) -> Tensor:
        """(H, D) float64: sums over the training windows' queries of their squares."""
        sums = ShardSums(Added)
        for batch in taps.batches({"q"}, self.frame, rows=slice(0, carry.train), sums=sums):
            assert batch.q is not None
            sums.part.add(_by_kv_head(batch.q, carry.shape.heads).double().square().sum((0, 2)).cpu())
        assert sums.total.value is not None
        return sums.total.value

    def _factor(self, largest: Tensor, taps: LayerTaps) -> Tensor:
        if self.factors == "pair" and taps.rope is not None:
            largest = share_pairs(largest, hf.rope_partners(taps.site, taps.rope[0].shape[-1]))
        factor = channel_factor(largest, self.exponent)
        return torch.exp2(factor.float().log2().round()).half() if self.powers_of_two else factor


@dataclass
class _Errors:
    """What held-out windows say of the codecs: of keys and values, and of the logits that keys are for."""

    key: Codec
    plain: Codec  # the key codec without factors
    value: Codec
    keys: HoldoutError = field(default_factory=HoldoutError)
    values: HoldoutError = field(default_factory=HoldoutError)
    logits: dict[str, float] = field(default_factory=dict)
    spread: float = 0.0
    symmetric: list[float] = field(default_factory=list)

    def add(self, batch: TapBatch, train: int, tokens: slice) -> None:
        """The batch's windows from `train` on; tokens: which of each are coded."""
        assert batch.q is not None and batch.k is not None and batch.v is not None
        keys, values = (x[train:, :, tokens].float() for x in (batch.k, batch.v))
        value = self.value.to(values.device)
        packed, decoded = value.encode_decode(values)
        self.values.add(flat(values), None, flat(decoded))
        if isinstance(value, Uniform) and value.mode == "hybrid":
            self.symmetric.append(value.symmetric_share(packed))
        queries = _by_kv_head(batch.q[train:, :, -QUERIES:].float(), keys.shape[1])
        self.spread += _spread(queries, keys)
        for name, codec in (("logit_error", self.key), ("logit_error_plain", self.plain)):
            decoded = codec.to(keys.device).encode_decode(keys)[1]
            self.logits[name] = self.logits.get(name, 0.0) + _spread(queries, decoded - keys)
            if name == "logit_error":
                self.keys.add(flat(keys), None, flat(decoded))

    def merge(self, other: _Errors) -> None:
        """Add the sums of other windows."""
        self.keys.merge(other.keys)
        self.values.merge(other.values)
        for name, error in other.logits.items():
            self.logits[name] = self.logits.get(name, 0.0) + error
        self.spread += other.spread
        self.symmetric += other.symmetric

    def metrics(self) -> dict[str, Json]:
        """Squared errors over squares; of logits over their variance, since a constant added to all changes nothing."""
        heads = self.key.shape.heads
        metrics = self.keys.metrics("key", heads) | self.values.metrics("value", heads)
        metrics |= {name: round(error / max(self.spread, 1e-30), 6) for name, error in self.logits.items()}
        if self.symmetric:
            metrics["value_symmetric_share"] = round(math.fsum(self.symmetric) / len(self.symmetric), 6)
        return metrics


def _by_kv_head(queries: Tensor, heads: int) -> Tensor:
    """(B, query heads, Q, D) -> (B, H, queries of the group, D)."""
    return torch.unflatten(queries, 1, (heads, -1)).flatten(2, 3)


def _spread(queries: Tensor, keys: Tensor) -> float:
    """Sum over queries of the squares of their logits (or errors of them) about the mean over keys."""
    logits = queries @ keys.mT
    return float((logits - logits.mean(-1, keepdim=True)).double().square().sum())
