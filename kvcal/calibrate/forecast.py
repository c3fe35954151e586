"""What a scheme costs in KL on short windows of text, layer by layer, without a cache.

Every token attends to the window's packed tokens as the scheme decodes them, and to the exact sink and newest tokens.
Hidden states, and the keys and values made of them, are then those of a model that has run with the scheme: errors add
up over layers and tokens. So they do over a long text. The KL of the last tokens has the order of the KL that `kvcal
eval` measures (docs/ablations/guard.md). Only one layer's weights are needed at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvcal_artifacts.codecs import Context
from kvcal_artifacts.errors import NonFiniteError
from kvcal_artifacts.hf import AttentionSite, Decoder, attention_site, check_frame
from kvcal_artifacts.scheme import Scheme
from kvcal_kernels.device import on

from ..capture.call import LayerCall, call_layer, check_rotation
from ..capture.checks import check_finite
from ..capture.scan import Capture, LayerSource, TapBatch, execution_device
from ..methods.statistics import taps_of, window_statistics
from ..models.spread import input_device
from ..report.progress import progress

BEHIND = 128  # tokens at a window's end whose KL counts, none of them packed; a quarter of a window at most


@dataclass(frozen=True)
class Forecast:
    """A scheme's forecast KL on this model. kl: mean nats between the next-token distributions of the scheme and of the
    exact model, over the tokens behind the prompt; infinite where the scheme's are not finite. packed: tokens of the
    prompt that the scheme packs; of none the KL is 0. ratio: largest over median root mean square of a channel of keys,
    of the worst layer and kv head; layer: which layer. perplexity: of the exact model on the tokens behind the prompt,
    without the first; nan where there is one alone.
    """

    kl: float
    packed: int
    ratio: float
    layer: int
    perplexity: float = math.nan


def channel_ratio(keys: Tensor) -> float:
    """Largest over median root mean square of a channel, of the worst kv head; keys (B, H, T, D)."""
    size = keys.double().square().mean((0, 2)).sqrt()
    return float((size.amax(-1) / size.median(-1).values.clamp_min(1e-30)).max())


def prompt_of(length: int) -> int:
    """Tokens of a window of so many before those whose KL counts."""
    return length - min(BEHIND, length // 4)


def least_tokens(scheme: Scheme) -> int:
    """Tokens of the shortest window of which the scheme packs a block before those whose KL counts."""
    windows = scheme.windows
    prompt = windows.sink + windows.recent + windows.block
    return next(length for length in range(prompt, prompt + BEHIND + 1) if prompt_of(length) >= prompt)


@torch.no_grad()
def forecasts(
    model: LayerSource | nn.Module, ids: Tensor, schemes: Mapping[str, Scheme], device: torch.device | None = None
) -> dict[str, Forecast]:
    """Forecast the KL of each scheme on token windows ids (N, T) int64, all in one batch. device: where a LayerSource
    puts its layers; otherwise the model's.
    """
    if not schemes:
        return {}
    if device is None:
        assert isinstance(model, nn.Module)
        device = input_device(model)
    with ExitStack() as stack:
        capture = stack.enter_context(Capture(model, ids, device=device, batch=len(ids)))
        layers = int(capture.decoder.config.num_hidden_layers)
        advance = stack.enter_context(progress("Forecasting", total=layers))
        prompt = prompt_of(capture.length)
        x = capture.first_input()
        runs = {name: _Run(scheme, prompt, x) for name, scheme in schemes.items()}
        worst = (0.0, 0)
        for index in range(layers):
            layer = capture.source.load_layer(index)
            where = execution_device(layer, capture.device)
            moved = {id(run.x): run.x.to(where) for run in runs.values()} | {id(x): x.to(where)}
            for run in runs.values():  # one that is still exact stays the same tensor as x
                run.move(moved[id(run.x)])
            x = moved[id(x)]
            try:
                with on(where):
                    if index in capture.skipped:
                        x = _uncompressed_layer(capture, index, layer, x, runs)
                    else:
                        x, ratio = _compressed(capture, index, layer, x, runs)
                        worst = max(worst, (ratio, index))
            finally:
                capture.source.free_layer(index)
            check_finite(x, f"layer {index}, its output", slice(0, len(ids)))
            advance()
        return _kls(capture, ids, x[:, prompt:], runs, worst)


def _uncompressed_layer(capture: Capture, index: int, layer: nn.Module, x: Tensor, runs: Mapping[str, _Run]) -> Tensor:
    """The output of a layer that Transformers caches, of input x (N, T, hidden size); advances each run."""
    kwargs = capture.kwargs_of(index, x.device)
    output = _output(layer(x, **kwargs))
    for run in runs.values():
        run.x = output if run.x is x else _output(layer(run.x, **kwargs))
    return output


def _compressed(
    capture: Capture, index: int, layer: nn.Module, x: Tensor, runs: Mapping[str, _Run]
) -> tuple[Tensor, float]:
    """Another layer: its exact output, and the channel_ratio of its keys. NonFiniteError names keys or values;
    KVCalError where a scheme stores keys before RoPE, and these do not become the model's.
    """
    kwargs, site = capture.kwargs_of(index, x.device), attention_site(capture.decoder, index)
    rope = capture.rope_of(index, x.device) if site.rope else None
    taps = {name: run.taps(index) for name, run in runs.items()}
    if any(taps.values()):
        check_frame([site], "pre_rope")  # else there are no keys or queries before RoPE
    exact = call_layer(layer, x, kwargs, site, frozenset().union(*taps.values()) & {"k"}, stop=False)
    check_rotation(site, rope, exact)
    for role, states in (("key", exact.keys), ("value", exact.values)):
        check_finite(states, f"layer {index}, {role} head", slice(0, len(x)))
    for name, run in runs.items():
        if run.x is x and run.is_exact(index):  # nothing below was changed either
            assert exact.output is not None
            run.x = exact.output
            run.pass_on(exact)
            continue
        packed = partial(run.packed_in, _Layer(index, site, rope))
        attended = call_layer(layer, run.x, kwargs, site, taps[name], stop=False, change=packed)
        assert attended.output is not None
        run.x = attended.output
    assert exact.output is not None
    return exact.output, channel_ratio(exact.keys)


@dataclass(frozen=True)
class _Layer:
    """What run-time statistics ask of a layer's taps."""

    index: int
    site: AttentionSite
    rope: tuple[Tensor, Tensor] | None


class _Run:
    """One scheme on its way through the layers. x: its hidden states, (N, T, hidden size)."""

    def __init__(self, scheme: Scheme, prompt: int, x: Tensor) -> None:
        self.scheme, self.prompt, self.x = scheme, prompt, x
        windows = scheme.windows
        self.blocks = max(0, prompt - windows.sink - windows.recent) // windows.block
        self.packed = slice(windows.sink, windows.sink + self.blocks * windows.block)
        self.broken = False  # whether a codec got numbers that are not finite
        self._below: dict[str, Tensor] = {}

    def move(self, x: Tensor) -> None:
        """Go on with x, the same hidden states on the next layer's device."""
        self.x = x
        self._below = {name: one.to(x.device) for name, one in self._below.items()}

    def is_exact(self, index: int) -> bool:
        """Whether the layer's codecs store numbers without loss."""
        pair = self.scheme.layers[index]
        codecs = () if pair is None else (pair.key, pair.value)
        return all(one.lossless for one in codecs)

    def pass_on(self, exact: LayerCall) -> None:
        """Hand a layer's exact keys and values to the predictors of the layers above."""
        if not self.scheme.chained:
            return
        keys = exact.pre_rope_keys if self.scheme.frame == "pre_rope" else exact.keys
        assert keys is not None
        self._leave(keys[:, :, self.packed].float(), exact.values[:, :, self.packed].float())

    def _leave(self, keys: Tensor, values: Tensor) -> None:
        """What the predictors of the layers above read."""
        deeper = {"k2": self._below["k1"], "v2": self._below["v1"]} if self._below else {}
        self._below = {"k1": keys, "v1": values} | deeper

    def taps(self, index: int) -> frozenset[str]:
        """What the layer's codecs ask of keys ("k") and queries ("q") before RoPE."""
        pair = self.scheme.layers[index]
        if pair is None:
            return frozenset()
        return frozenset("k" if self.scheme.frame == "pre_rope" else "") | (
            taps_of(pair.key.stats | pair.value.stats) & {"q"}
        )

    def packed_in(self, layer: _Layer, called: LayerCall) -> tuple[Tensor, Tensor]:
        """The keys after RoPE and values (N, H, T, D) of a call on `x`, with what is packed in its place."""
        if self.scheme.layers[layer.index] is None or not self.blocks or self.broken:
            return called.keys, called.values
        try:
            decoded = self._pack(layer, called)
        except NonFiniteError:
            self.broken = True
            return called.keys, called.values
        keys, values = called.keys.clone(), called.values.clone()
        keys[:, :, self.packed], values[:, :, self.packed] = decoded
        return keys, values

    def _pack(self, layer: _Layer, called: LayerCall) -> tuple[Tensor, Tensor]:
        """Keys after RoPE and values (N, H, packed tokens, D), encoded and decoded."""
        pre, rope, site = self.scheme.frame == "pre_rope", layer.rope, layer.site
        keys, queries = (called.pre_rope_keys if pre else called.keys), called.pre_rope_queries
        assert keys is not None
        if queries is not None and not pre and rope is not None:
            queries = site.rotate(queries, *rope)
        keys, values = keys[:, :, : self.prompt], called.values[:, :, : self.prompt]
        queries = queries if queries is None else queries[:, :, : self.prompt]
        pair = self.scheme.on(layer.index, keys.device)
        taps: Any = _Layer(layer.index, site, rope and (rope[0][:, : self.prompt], rope[1][:, : self.prompt]))
        batch, whole = TapBatch(slice(0, len(keys)), queries, keys, values), dict[str, Tensor]()
        for codec in (pair.key, pair.value):
            whole |= window_statistics(codec, self.scheme.windows, self.scheme.frame, taps, batch)
        stats = {name: x[:, :, : self.blocks] if x.shape[2] > 1 else x for name, x in whole.items()}
        context = Context(layer.index, **self._below, stats=stats)
        context.k0 = pair.key.encode_decode(keys[:, :, self.packed], context)[1]
        values_back = pair.value.encode_decode(values[:, :, self.packed], context)[1]
        self._leave(context.k0, values_back)
        rotated = context.k0.to(keys.dtype)
        if pre and rope is not None:
            rotated = site.rotate(rotated, *(x[:, self.packed] for x in rope))
        return rotated, values_back.to(values.dtype)


def _output(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _kls(
    capture: Capture, ids: Tensor, exact: Tensor, runs: Mapping[str, _Run], worst: tuple[float, int]
) -> dict[str, Forecast]:
    """The mean KL of each run's logits from the exact ones. exact: the last layer's output (N, Q, hidden size) of the
    windows' last tokens.
    """
    capture.source.load_outer()
    try:
        behind = ids[:, -exact.shape[1] :].to(exact.device)
        right = _log_probabilities(capture, behind, exact)
        perplexity = float(functional.nll_loss(right[:, :-1].flatten(0, 1), behind[:, 1:].flatten()).double().exp())
        results = {}
        for name, run in runs.items():
            logs = _log_probabilities(capture, behind, run.x[:, -behind.shape[1] :])
            kl = float(functional.kl_div(logs, right, reduction="none", log_target=True).sum(-1).double().mean())
            tokens = run.packed.stop - run.packed.start
            kl = max(0.0, kl) if math.isfinite(kl) and not run.broken else math.inf
            results[name] = Forecast(kl if tokens else 0.0, tokens, *worst, perplexity)
        return results
    finally:
        capture.source.free_outer()


def _log_probabilities(capture: Capture, ids: Tensor, x: Tensor) -> Tensor:
    """Log probabilities (N, Q, vocabulary) float32 of the last layer's output x (N, Q, hidden). The model's own
    forward, whose layers give x whatever they are given, applies its norm, head and what lies between.

    The text tower of a model for pictures is given embeddings, of which nothing is used: it would move those of ids to
    where the other tower is, which may not be loaded.
    """
    model = capture.source.model
    alone = capture.decoder.config is getattr(model, "config", None)
    inputs = {"input_ids": ids} if alone else {"inputs_embeds": x}
    with _layers_give(capture.decoder, x):
        logits: Tensor = model(**inputs, use_cache=False).logits
    return functional.log_softmax(logits.float(), -1)


@contextmanager
def _layers_give(decoder: Decoder, x: Tensor) -> Iterator[None]:
    before: list[Callable[..., object] | None] = [vars(layer).get("forward") for layer in decoder.layers]
    for layer in decoder.layers:
        layer.forward = lambda *args, **kwargs: x
    try:
        yield
    finally:
        for layer, forward in zip(decoder.layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward
