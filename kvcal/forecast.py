"""What a scheme will cost in KL, forecast from one window of text without running the model through a cache.

Layer by layer, the attention module is run a second time with the keys and values that the scheme would give back. Its output
changes by some share, and the sum of these shares over the layers predicts the KL of the whole model (`expected_kl`): on
three pretrained models and 20 schemes the rank correlation is 0.9 and more (docs/ablations/guard.md). Hidden states stay
exact, as in calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvcal_artifacts.codecs import Context
from kvcal_artifacts.scheme import LayerCodecs, Scheme

from .capture import Capture, LayerSource, LayerTaps
from .methods.observed import taps_of, window_statistics
from .report.progress import progress

LAST = (
    128  # tokens at a window's end whose attention is looked at: before them, less than a whole window would be packed
)
GAIN, POWER = 0.06, 0.95  # of expected_kl, fitted by docs/ablations/guard.py


@dataclass(frozen=True)
class LayerChange:
    """One layer. change: mean over tokens of |attention output with the scheme - exact|^2 / |exact|^2. residual: the same over
    |layer input + exact attention output|^2. ratio: largest over median root mean square of a channel of its keys, of the
    worst kv head.
    """

    layer: int
    change: float
    residual: float
    ratio: float


@dataclass(frozen=True)
class Forecast:
    """layers: those that the scheme compresses, in order; empty where the window is too short to pack a block."""

    layers: tuple[LayerChange, ...]

    @property
    def kl(self) -> float:
        """Mean nats a token between the scheme's and the exact model's next-token distributions, forecast."""
        return expected_kl(sum(layer.change for layer in self.layers))

    @property
    def worst(self) -> LayerChange:
        return max(self.layers, key=lambda layer: layer.change)


def expected_kl(change: float) -> float:
    """change: summed over layers."""
    return float(GAIN * change**POWER)


def channel_ratio(keys: Tensor) -> float:
    """Largest over median root mean square of a channel, of the worst kv head; keys (B, H, T, D)."""
    size = keys.double().square().mean((0, 2)).sqrt()
    return float((size.amax(-1) / size.median(-1).values.clamp_min(1e-30)).max())


@torch.no_grad()
def forecasts(
    model: LayerSource | nn.Module, ids: Tensor, schemes: Mapping[str, Scheme], device: torch.device | None = None
) -> dict[str, Forecast]:
    """Of each scheme, on token windows ids (N, T), all in one batch. device: where a LayerSource puts its layers; a model's
    own otherwise.
    """
    if not schemes:
        return {}
    if device is None:
        assert isinstance(model, nn.Module)
        device = next(model.parameters()).device
    found: dict[str, list[LayerChange]] = {name: [] for name in schemes}
    below: dict[str, dict[str, Tensor]] = {name: {} for name in schemes}
    with ExitStack() as stack:
        capture = stack.enter_context(Capture(model, ids, device=device, batch=len(ids)))
        advance = stack.enter_context(progress("Forecasting", total=len(capture.layers)))
        for taps in capture:
            x, exact = taps.attention()
            for name, scheme in schemes.items():
                if scheme.layers[taps.index] is not None:
                    run = _LayerRun(taps, scheme)
                    below[name] = run.decode(below[name])
                    if run.packed.stop > run.packed.start:
                        found[name].append(run.change(x, exact))
                advance()
    return {name: Forecast(tuple(layers)) for name, layers in found.items()}


class _LayerRun:
    """One layer under one scheme."""

    def __init__(self, taps: LayerTaps, scheme: Scheme) -> None:
        self._taps, self._scheme = taps, scheme
        windows = scheme.windows
        blocks = max(0, taps.length - windows.sink - windows.recent) // windows.block
        self.packed = slice(windows.sink, windows.sink + blocks * windows.block)
        self._made: tuple[Tensor, Tensor] | None = None

    def decode(self, below: dict[str, Tensor]) -> dict[str, Tensor]:
        """below: reconstructions of the compressed layers under this one, by Context's names; gives those for the next."""
        taps, scheme = self._taps, self._scheme
        own = scheme.layers[taps.index]
        assert own is not None
        want = frozenset("kv") | taps_of(own.key.stats | own.value.stats)
        batch = next(iter(taps.batches(want, scheme.frame)))
        assert batch.k is not None and batch.v is not None
        self._batch = batch
        if self.packed.stop == self.packed.start:
            return {}
        pair: LayerCodecs = scheme.on(taps.index, batch.k.device)
        whole: dict[str, Any] = {}
        for codec in (pair.key, pair.value):
            whole |= window_statistics(codec, scheme.windows, scheme.frame, taps, batch)
        count = (self.packed.stop - self.packed.start) // scheme.windows.block
        stats = {name: x[:, :, :count] if x.shape[2] > 1 else x for name, x in whole.items()}
        context = Context(taps.index, **below, stats=stats)
        context.k0 = pair.key.encode_decode(batch.k[:, :, self.packed], context)[1]
        values = pair.value.encode_decode(batch.v[:, :, self.packed], context)[1]
        self._made = context.k0, values
        deeper = {"k2": below["k1"], "v2": below["v1"]} if below else {}
        return {"k1": context.k0, "v1": values} | deeper

    def change(self, x: Tensor, exact: Tensor) -> LayerChange:
        """x: the layer's input; exact: its attention module's output, both (N, T, hidden size)."""
        taps, batch, made = self._taps, self._batch, self._made
        assert made is not None and batch.k is not None and batch.v is not None
        keys, values = batch.k.clone(), batch.v.clone()
        keys[:, :, self.packed], values[:, :, self.packed] = made[0].to(keys.dtype), made[1].to(values.dtype)
        if self._scheme.frame == "pre_rope" and taps.rope is not None:
            keys = taps.site.rotate(keys, *taps.rope)
        output = taps.attention((keys, values))[1]
        wanted, stream, off = (
            part[:, -LAST:].float().square().sum(-1).clamp_min(1e-30) for part in (exact, x + exact, output - exact)
        )
        change, residual = (float((off / size).mean()) for size in (wanted, stream))
        return LayerChange(taps.index, change, residual, channel_ratio(batch.k))


def least_tokens(scheme: Scheme) -> int:
    """Tokens of the shortest window in which the scheme packs a block."""
    windows = scheme.windows
    return windows.sink + windows.recent + windows.block
