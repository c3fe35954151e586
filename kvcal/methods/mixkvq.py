"""MixKVQ (Zhang et al. 2025): key channels in three tiers by query importance and range, values in 2 bits per token.

The thresholds come from a search (kvcal/search/thresholds.py, the paper's Appendix C). With them given, this method
only measures, layer by layer: how many channels a head has in each tier, what a block therefore takes, and what
attention outputs lose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from kvcal_artifacts import codecs
from kvcal_artifacts.codecs import Codec, Shape, Uniform
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.hf.protocols import attribute
from kvcal_artifacts.presets import divisor
from kvcal_artifacts.scheme import Frame, LayerCodecs, Scheme, Windows
from kvcal_artifacts.storage import block_store

from ..capture.scan import LayerTaps
from ..capture.shards import ShardSums
from .attention import OutputError, probe
from .base import Carry, LayerFit, layer_by_layer


@dataclass(frozen=True)
class MixKVQ:
    """The fields are those of the codec (kvcal_artifacts.codecs.MixKVQ). The paper's group 32 and buffer R = 128, which
    is our block; the windows of AQUA-KV (the ablation's sink of 32 and the paper's buffer, emptied at once, are
    `sink=32, recent=0`). raw: dtype of the first tier; "auto" is bfloat16 for models in bfloat16, else float16: float32
    would cost 32 bits per value. With full and four float16 for all, which the fused kernel reads: it holds bfloat16
    exactly from 2^-14 to 65504.
    """

    name: ClassVar[str] = "mixkvq"
    taps: ClassVar[frozenset[str]] = frozenset({"q", "k", "v"})
    frame: ClassVar[Frame] = "post_rope"

    tau_low: float = 2.0
    tau_high: float = 8.0
    group: int = 32
    round_up: int = 8
    importance: str = "query"
    normalise: str = "median"
    full: int | None = None
    four: int | None = None
    raw: str = "auto"
    value_bits: int = 2
    value_group: int = 32
    sink: int = 4
    recent: int = 128
    block: int = 128

    def __post_init__(self) -> None:
        shape = Shape(1, 256, self.windows.block)
        try:
            self.key_codec(shape, torch.float32)
            self.value_codec(shape)
        except KVCalError as error:
            raise UsageError(str(error)) from error

    @property
    def windows(self) -> Windows:
        return Windows(self.sink, self.recent, self.block)

    def key_codec(self, shape: Shape, dtype: torch.dtype, expected: tuple[float, float] | None = None) -> codecs.MixKVQ:
        """The codec of keys for a model of that dtype."""
        wide = dtype == torch.bfloat16 and self.full is None
        raw = ("bfloat16" if wide else "float16") if self.raw == "auto" else self.raw
        return codecs.MixKVQ(
            shape,
            "key",
            self.tau_low,
            self.tau_high,
            self.group,
            self.round_up,
            raw,
            self.importance,  # type: ignore[arg-type]
            self.normalise,  # type: ignore[arg-type]
            self.full,
            self.four,
            expected,
        )

    def value_codec(self, shape: Shape) -> Codec:
        return Uniform(shape, "value", self.value_bits, divisor(self.value_group, shape.dim), "channel")

    def least_bits(self, shape: Shape, dtype: torch.dtype) -> float:
        """Stored bits per value, keys and values, that no thresholds go below. dtype: of the model.

        All channels at 2 bits, or all exact, which has no scales: less only in groups of one or two tokens.
        """
        tiers = ((0.0, 0.0), (float(shape.dim), 0.0))
        keys = min(self.key_codec(shape, dtype, tier).bits_per_value() for tier in tiers)
        return (keys + self.value_codec(shape).bits_per_value()) / 2

    def scheme(self, model: nn.Module) -> Scheme:
        """These thresholds for a model, uncalibrated: what a block takes is known when it is packed."""

        dtype: torch.dtype = attribute(model, "dtype")

        def pair(layer: int, shape: Shape) -> LayerCodecs:
            return LayerCodecs(self.key_codec(shape, dtype), self.value_codec(shape))

        return layer_by_layer(model, self.windows, self.frame, pair)

    def buffers(self) -> dict[str, str]:
        return {}

    def fit_layer(self, layer: int, taps: LayerTaps, carry: Carry) -> LayerFit:
        """Counts on the training windows, errors on the held-out ones."""
        dtype = next(taps.site.module.parameters()).dtype
        key, value = self.key_codec(carry.shape, dtype), self.value_codec(carry.shape)
        sums = ShardSums(_Measured)
        for batch in taps.batches(self.taps, self.frame, advance=True, sums=sums):
            with carry.timer("encode"):
                layer_probe = probe(batch, layer, taps.site, carry.shape, self.windows, key.stats)
                train = carry.training_rows(batch.rows)
                packed = key.encode(layer_probe.k[:, :, layer_probe.packed], layer_probe.context())
                sums.part.sizes.add(
                    key,
                    {
                        name: block_store.select(tensors, torch.arange(train, device="cpu"))
                        for name, tensors in packed.items()
                    },
                )
                if train < len(layer_probe.k):
                    rest, decoded = layer_probe.rows(train), key.decode(packed, layer_probe.context())[train:]
                    sums.part.keys.add(rest.k[:, :, rest.packed].float(), decoded)
                    sums.part.outputs.add(rest.outputs(), rest.outputs(decoded, rest.decoded(value)))
        measured = sums.total
        first, second = measured.sizes.means()
        expected = self.key_codec(carry.shape, dtype, None if self.full is not None else (first, second))
        pair = LayerCodecs(expected, value)
        metrics = {
            "full_channels": first,
            "four_bit_channels": second,
            "key_relative_error": measured.keys.value,
            "output_error": measured.outputs.value,
            "expected_bits_per_value": pair.bits_per_value(),
            "paper_bits_per_value": pair.paper_bits(),
        }
        return LayerFit(pair, {name: round(x, 6) for name, x in metrics.items()})

    def replay_layer(self, layer: int, taps: LayerTaps, carry: Carry, codecs: LayerCodecs) -> None:
        taps.advance()


@dataclass
class TierSizes:
    """Bytes and channels of packed keys, summed over blocks."""

    nbytes: int = 0
    blocks: int = 0  # of one head
    channels: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, codec: codecs.MixKVQ, packed: codecs.Packed) -> None:
        self.blocks += packed["perm"][..., 0].numel()
        self.nbytes += sum(
            t.numel() * t.element_size() for field in packed.values() for t in block_store.tensors_of(field)
        )
        for tier, counts in enumerate(codec.counts(packed)[:2]):
            self.channels[tier] += int(counts.sum())

    def merge(self, other: TierSizes) -> None:
        """Add those of other blocks."""
        self.nbytes += other.nbytes
        self.blocks += other.blocks
        self.channels = [a + b for a, b in zip(self.channels, other.channels, strict=True)]

    def means(self) -> tuple[float, float]:
        """Channels a head in the first two tiers."""
        blocks = max(self.blocks, 1)
        return round(self.channels[0] / blocks, 4), round(self.channels[1] / blocks, 4)

    def bits(self, shape: Shape) -> float:
        """Stored bits a key value."""
        return self.nbytes * 8 / max(self.blocks * shape.dim * shape.block, 1)


@dataclass
class _Measured:
    """What packed keys take on training windows, and the errors of keys and of attention outputs on held-out ones."""

    sizes: TierSizes = field(default_factory=TierSizes)
    keys: OutputError = field(default_factory=OutputError)
    outputs: OutputError = field(default_factory=OutputError)

    def merge(self, other: _Measured) -> None:
        self.sizes.merge(other.sizes)
        self.keys.merge(other.keys)
        self.outputs.merge(other.outputs)
