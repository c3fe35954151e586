"""AQUA-KV (Shutova et al. 2025): predict each layer's keys and values from the layer below, store the residual.

Algorithm 1 as a scan over layers: predictors are fitted on reconstructions, one layer at a time, while hidden states
propagate unquantised. Variants of Tables 1 and 5 are fields of the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Codec, Context, MixKVQ, Packed, Predicted, Predictor
from kvcal_artifacts.codecs.base import Role
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import Frame, LayerCodecs, Windows
from kvcal_artifacts.storage import block_store

from ..capture.scan import LayerTaps
from ..capture.shards import ShardSums
from .base import Carry, HoldoutError, LayerFit, flat
from .calibrated import Calibrated
from .composition import Composition
from .mixkvq import TierSizes
from .mlp import MLPSettings, fit_mlp
from .regression import Gram, fit_bias, fit_linear, fit_quantised, fit_reduced_rank
from .statistics import TrainingData, taps_of, window_statistics

PREDICTOR_KINDS = ("linear", "reduced-rank", "mlp", "mlp-no-norm", "linear-4bit", "bias")
KEY_INPUTS, VALUE_INPUTS = ("k1", "k2", "v1", "v2"), ("v1", "k0", "k1", "v2", "k2")


@dataclass(frozen=True)
class AquaKV:
    """Keys and values stored as residuals of predictors from the layer below.

    The paper's defaults: linear predictors, K from K of the layer below, V from [V of the layer below; K]. Keys are
    stored before RoPE, by HIGGS at 2 bits, the first layer at 4; sink 4, recent 128. Ours: HIGGS debiased
    (`higgs-2-wide` is the published one), and keys divided by balanced factors before it, which cost no bits per token
    (calibrated.CalibratedFactors).

    first_layer: codec of the first compressed layer, which nothing predicts; empty: as the others. keys, values: codecs
    of the residuals where they differ from `backbone`. per_layer: exceptions (see composition), last. key_inputs,
    value_inputs: k1, v1 (compressed layer below), k2, v2 (two below), k0 (this layer's keys); empty: no predictor.
    rank: of the reduced-rank variant; 0 means a quarter of C (the paper's 256 at 1024). quantiser_agnostic: fit on true
    keys and values, whatever the codec (Table 1, last row).
    """

    name: ClassVar[str] = "aqua-kv"
    taps: ClassVar[frozenset[str]] = frozenset({"k", "v"})

    backbone: str = "higgs-2-wide-debiased-balanced"
    first_layer: str = "higgs-4-wide-debiased-balanced"
    keys: str = ""
    values: str = ""
    per_layer: tuple[str, ...] = ()
    predictor: str = "linear"
    rank: int = 0
    key_inputs: tuple[str, ...] = ("k1",)
    value_inputs: tuple[str, ...] = ("v1", "k0")
    rope: Frame = "pre_rope"
    ridge: float = 1e-3
    quantiser_agnostic: bool = False
    sink: int = 4
    recent: int = 128
    block: int = 32
    mlp_epochs: int = 4

    def __post_init__(self) -> None:
        if self.predictor not in PREDICTOR_KINDS:
            raise UsageError(f"predictor {self.predictor!r}: allowed are {', '.join(PREDICTOR_KINDS)}")
        for what, inputs, allowed in (
            ("key", self.key_inputs, KEY_INPUTS),
            ("value", self.value_inputs, VALUE_INPUTS),
        ):
            if wrong := [name for name in inputs if name not in allowed]:
                raise UsageError(f"{what} predictor input {wrong[0]!r}: allowed are {', '.join(allowed)}")
        if not 0 < self.ridge < float("inf"):
            raise UsageError(f"ridge {self.ridge}: must be positive and finite")
        self.composition, self.windows  # noqa: B018  validates

    @property
    def composition(self) -> Composition:
        """Codecs by layer, of a model whose first layer is compressed."""
        return self.composition_from(0)

    def composition_from(self, first: int) -> Composition:
        """Codecs by layer: the first compressed layer, which nothing predicts, is an exception."""
        keys, values = self.keys or self.backbone, self.values or self.backbone
        first_layer = (f"{first}={self.first_layer}",) if self.first_layer else ()
        return Composition(keys, values, (*first_layer, *self.per_layer))

    @property
    def windows(self) -> Windows:
        return Windows(self.sink, self.recent, self.block)

    @property
    def frame(self) -> Frame:
        return self.rope

    def fit_layer(self, layer: int, taps: LayerTaps, carry: Carry) -> LayerFit:
        composition = self.composition_from(carry.compressed[0])
        composition.check(carry.layers)
        composition.check_reach(carry.layers, carry.skipped)
        run = _LayerRun(self, layer, taps, carry)
        place = carry.compressed.index(layer)
        key = run.codec("key", self._inputs(place, self.key_inputs), {"k"})
        key_error = run.encode_keys(key)
        key = run.expecting(key)
        value = run.codec("value", self._inputs(place, self.value_inputs), {"v"})
        value_error = run.encode_values(value)
        self.shift(carry)
        heads = carry.shape.heads
        return LayerFit(LayerCodecs(key, value), key_error.metrics("key", heads) | value_error.metrics("value", heads))

    def replay_layer(self, layer: int, taps: LayerTaps, carry: Carry, codecs: LayerCodecs) -> None:
        run = _LayerRun(self, layer, taps, carry)
        run.encode_keys(codecs.key)
        run.encode_values(codecs.value)
        self.shift(carry)

    @property
    def reach(self) -> int:
        """Layers below that any predictor reads."""
        return max((int(name[1]) for name in self.key_inputs + self.value_inputs), default=0)

    def buffers(self) -> dict[str, str]:
        """Which buffer each reconstruction lies in: this layer's (0) and those of `reach` layers below.

        Where nothing reads the layer below any longer when this layer's rows are written, they share a buffer.
        """
        buffers = {f"{role}{back}": f"{role}{back}" for back in range(self.reach + 1) for role in "kv"}
        if self.reach == 1:
            buffers["v0"] = "v1"
            buffers["k0"] = "k0" if "k1" in self.value_inputs else "k1"
        return buffers

    def _inputs(self, place: int, names: tuple[str, ...]) -> tuple[str, ...]:
        """Inputs that exist with so many compressed layers below; of a deeper one the deepest there is."""
        if place == 0:
            return ()
        return tuple(dict.fromkeys(f"{name[0]}{min(int(name[1]), place)}" for name in names))

    def shift(self, carry: Carry) -> None:
        """Layer l's reconstructions become those of the layer below; the oldest buffers are used again."""
        for role in "kv":
            ring = [f"{role}{back}" for back in range(self.reach + 1)]
            stores = [carry.stores[name] for name in ring]
            for name, buffer in zip(ring, stores[-1:] + stores[:-1], strict=True):
                carry.stores[name] = buffer


@dataclass
class _Encoded:
    """What a pass that encodes sums up."""

    holdout: HoldoutError = field(default_factory=HoldoutError)
    sizes: TierSizes = field(default_factory=TierSizes)

    def merge(self, other: _Encoded) -> None:
        self.holdout.merge(other.holdout)
        self.sizes.merge(other.sizes)


@dataclass
class _LayerRun:
    """One layer's passes over the windows."""

    method: AquaKV
    layer: int
    taps: LayerTaps
    carry: Carry
    sizes: TierSizes = field(default_factory=TierSizes)  # of packed keys whose blocks differ in size

    def codec(self, role: Role, inputs: tuple[str, ...], want: set[str]) -> Codec:
        """The codec of residuals, behind a predictor fitted on the training windows if there are inputs."""
        composition = self.method.composition_from(self.carry.compressed[0])
        make = composition.codec(self.layer, self.carry.layers, role)
        predictor = self._fit(inputs, frozenset(want)) if inputs else None
        if isinstance(make, Calibrated):
            windows, frame = self.method.windows, self.method.frame
            data = TrainingData(self.layer, role, windows, frame, self.taps, self.carry, predictor, inputs)
            inner = make.learn(data)
        else:
            inner = make(self.carry.shape, role)
        codec = inner if predictor is None else Predicted(inner, predictor, inputs)
        return self.taps.ranks.agree(codec)

    def encode_keys(self, codec: Codec) -> HoldoutError:
        """Keys of all windows to reconstructions in the carry (Algorithm 1 lines 14 and 15)."""
        return self._encode(codec, "k", advance=False)

    def encode_values(self, codec: Codec) -> HoldoutError:
        """Encode values likewise (lines 18 and 19), in the pass that also advances the hidden states (line 7)."""
        return self._encode(codec, "v", advance=True)

    def _encode(self, codec: Codec, role: str, advance: bool) -> HoldoutError:
        carry = self.carry
        sums = ShardSums(_Encoded)
        want = frozenset(role) | taps_of(codec.stats)
        for batch in self.taps.batches(want, self.method.frame, advance=advance, sums=sums):
            x = getattr(batch, role)
            codec = codec.to(x.device)
            stats = window_statistics(codec, self.method.windows, self.method.frame, self.taps, batch)
            x = carry.coded(x)
            with carry.timer("encode"):
                context = carry.context(self.layer, codec.inputs, batch.rows)
                context.stats = stats
                packed, decoded, guess = reconstruct(codec, x, context)
            train = carry.training_rows(batch.rows)
            if codec.ragged:
                inner = codec.unpredicted
                assert isinstance(inner, MixKVQ)
                sums.part.sizes.add(
                    inner,
                    {
                        name: block_store.select(tensors, torch.arange(train, device="cpu"))
                        for name, tensors in packed.items()
                    },
                )
            # held-out windows always as a cache has them, or the stated error would be of inputs that it never sees
            reconstruction = (
                torch.cat([x[:train].float(), decoded[train:]]) if self.method.quantiser_agnostic else decoded
            )
            carry.write(f"{role}0", batch.rows, reconstruction)
            if train < x.shape[0]:
                sums.part.holdout.add(
                    flat(x[train:]), None if guess is None else flat(guess[train:]), flat(decoded[train:])
                )
        self.sizes.merge(sums.total.sizes)
        return sums.total.holdout

    def expecting(self, codec: Codec) -> Codec:
        """A codec of ragged blocks with what they took on the training windows, in `sizes`; others unchanged."""
        return codec.expecting(self.sizes.means()) if codec.ragged else codec

    def _pairs(
        self, inputs: tuple[str, ...], want: frozenset[str], sums: ShardSums[Gram] | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Training tokens: predictor inputs (n, Cin) and targets (n, C), float32."""
        carry = self.carry
        for batch in self.taps.batches(want, self.method.frame, rows=slice(0, carry.train), sums=sums):
            target = batch.k if "k" in want else batch.v
            assert target is not None
            parts = carry.read(inputs, batch.rows)
            yield torch.cat([flat(parts[name]) for name in inputs], -1), flat(carry.coded(target))

    def _fit(self, inputs: tuple[str, ...], want: frozenset[str]) -> Predictor:
        method, width = self.method, self.carry.shape.heads * self.carry.shape.dim
        sizes = len(inputs) * width, width
        sums = ShardSums(lambda: Gram.empty(*sizes, self.taps.device))
        for x, y in self._pairs(inputs, want, sums):
            with self.carry.timer("gram"):
                sums.part.add(x, y)
        gram = sums.total
        with self.carry.timer("solve"):
            if method.predictor == "linear":
                return fit_linear(gram, method.ridge)
            if method.predictor == "reduced-rank":
                if method.rank > width:
                    raise UsageError(f"--rank {method.rank}: at most the kv width, {width}")
                return fit_reduced_rank(gram, method.ridge, method.rank or max(1, width // 4))
            if method.predictor == "linear-4bit":
                return fit_quantised(gram, method.ridge)
            if method.predictor == "bias":
                return fit_bias(gram)
            settings = MLPSettings(norm=method.predictor == "mlp", epochs=method.mlp_epochs)
            rows = slice(0, self.carry.train)
            with torch.enable_grad():
                return fit_mlp(
                    lambda: self.taps.of_all(self._pairs(inputs, want), rows),
                    gram,
                    gram.count,
                    settings,
                    self.taps.ranks,
                )


def reconstruct(codec: Codec, x: Tensor, context: Context) -> tuple[Packed, Tensor, Tensor | None]:
    """x (B, H, T, D) -> packed, what the cache would give back, and the prediction (None without one); float32.

    As Predicted.encode and decode, with the predictor run once and on all tokens: here nothing depends on block edges.
    """
    guess, inner = codec.prediction(context), codec.unpredicted
    if guess is None:
        packed = codec.encode(x, context)
        return packed, codec.decode(packed, context), None
    packed = inner.encode(x.float() - guess, context)
    return packed, inner.decode(packed, context) + guess, guess
