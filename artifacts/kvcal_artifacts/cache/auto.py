"""Presets that choose codecs for the model at hand: auto-4, auto-3, auto-2, of 4, 3 and 2 bits a code.

A short probe, fixed token ids through the model, shows the keys of every layer. Values, and keys whose channels are of a
size, are stored by HIGGS, which spreads its error evenly over the channels of a head. Keys with outlier channels are stored
channel by channel: there the large channels' share of the error would drown the small ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from .. import hf
from ..codecs import Codec, Higgs, Shape, Uniform
from ..errors import NonFiniteError
from ..scheme import LayerCodecs, Scheme
from ..windows import Windows

NAMES = {"auto-4": 4, "auto-3": 3, "auto-2": 2}  # bits of a code
POINTS = {4: 256, 3: 64, 2: 16}  # of the grid of pairs
WINDOWS = Windows(4, 128, 32)
TOKENS = 256  # of the probe
STEP, START = 7919, 13  # the probe's token ids are (START + i * STEP) modulo the vocabulary
# Mean over median square of a head's channels from which on keys are stored channel by channel. Scales and zero points of
# groups of 32 tokens take a bit per value more than one norm of a head of 64, and a bit divides a squared error by four.
EXCESS = 4.0


@dataclass(frozen=True)
class Choice:
    """The codecs of one layer's keys. excess: mean over median square of a channel, of the worst kv head of the probe."""

    layer: int
    excess: float
    by_channel: bool

    def as_dict(self) -> dict[str, Any]:
        """The choice as describe() gives it."""
        return {"layer": self.layer, "excess": round(self.excess, 2), "by_channel": self.by_channel}


def auto_scheme(name: str, model: nn.Module) -> tuple[Scheme, dict[str, Any]]:
    """The scheme that a preset of NAMES chooses for the model, and what it chose and why, as describe() gives it.

    The same weights, dtype and device give the same scheme. Raises UnsupportedModel for a model that cannot be
    compressed, NonFiniteError where keys of the probe are not finite.
    """
    hf.check_supported(model)
    config, bits = hf.config_of(model), NAMES[name]
    skipped, shape = hf.unsupported_layers(config), hf.layer_shape(config, WINDOWS.block)
    keys = probe_keys(name, model)
    choices = {
        index: Choice(index, excess, excess >= EXCESS)
        for index in range(config.num_hidden_layers)
        if index not in skipped
        for excess in (channel_excess(keys[index][:, :, WINDOWS.sink :]),)
    }
    pairs = {
        index: LayerCodecs(
            _by_channel(shape, bits) if one.by_channel else Higgs(shape, "key", d=2, n=POINTS[bits]),
            Higgs(shape, "value", d=2, n=POINTS[bits]),
        )
        for index, one in choices.items()
    }
    layers = tuple(pairs.get(index) for index in range(config.num_hidden_layers))
    return Scheme(WINDOWS, "post_rope", layers, skipped), _described(name, list(choices.values()))


def _by_channel(shape: Shape, bits: int) -> Codec:
    return Uniform(shape, "key", bits, shape.block, "token")


def channel_excess(keys: Tensor) -> float:
    """Mean over median of the channels' mean squares, of the worst kv head; keys (B, H, T, D)."""
    square = keys.double().square().mean((0, 2))
    return float((square.mean(-1) / square.median(-1).values.clamp_min(1e-30)).max())


@torch.no_grad()
def probe_keys(name: str, model: Any) -> dict[int, Tensor]:
    """Keys after RoPE (1, H, TOKENS, D) of each layer that can be compressed. name: of the preset, for errors."""
    decoder = hf.decoder_of(model)
    config = decoder.config
    ids = (START + STEP * torch.arange(TOKENS)) % config.vocab_size
    cache = DynamicCache(config=config)
    with _evaluating(model):
        decoder(
            input_ids=ids[None].to(decoder.get_input_embeddings().weight.device), past_key_values=cache, use_cache=True
        )
    skipped = hf.unsupported_layers(config)
    keys = {index: layer.keys for index, layer in enumerate(cache.layers) if index not in skipped}
    for index, one in keys.items():
        if one is None or not bool(one.isfinite().all()):
            raise NonFiniteError(
                f"{name}: layer {index}: keys of the probe are not finite; load the model in another dtype, as bfloat16"
            )
    return {index: one for index, one in keys.items() if one is not None}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, which would make the probe another one each time."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _described(name: str, choices: list[Choice]) -> dict[str, Any]:
    apart = [one for one in choices if one.by_channel]
    bits, worst = NAMES[name], max(choices, key=lambda one: one.excess)
    why = (
        f"layer {worst.layer} has the most unequal key channels: mean over median square {worst.excess:.1f}, of a probe of "
        f"{TOKENS} tokens; from {EXCESS:g} on, keys are stored channel by channel"
    )
    chosen = f"{bits}-bit HIGGS"
    if apart:
        which = "all layers" if len(apart) == len(choices) else f"{len(apart)} of {len(choices)} layers"
        chosen += f", keys of {which} as {bits}-bit integers by channel"
    return {"preset": name, "chosen": chosen, "why": why, "layers": [one.as_dict() for one in choices]}
