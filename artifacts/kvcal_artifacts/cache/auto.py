"""Presets that choose codecs for a model: auto-4, auto-3 and auto-2, of 4, 3 and 2 bits per code.

A short probe, fixed token ids through the model, shows the keys of every layer. Values are stored by HIGGS, and so are
keys whose channels are alike: HIGGS spreads its error evenly over the channels of a head. Keys with outlier channels
are stored channel by channel, because the error that large channels bring would drown the small ones.
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
from ..presets import AUTO_BITS
from ..scheme import LayerCodecs, Scheme, Windows

POINTS = {4: 256, 3: 64, 2: 16}  # of the grid of pairs
WINDOWS = Windows(4, 128, 32)
TOKENS = 256  # of the probe
STEP, START = 7919, 13  # the probe's token ids are (START + i * STEP) modulo the vocabulary
# From this mean over median square of a head's channels on, keys are stored channel by channel. Scales and zero points
# of groups of 32 tokens take about a bit per value more than HIGGS, and a bit divides a squared error by 4.
EXCESS = 4.0


@dataclass(frozen=True)
class Choice:
    """How one layer's keys are stored. excess: mean over median square of a channel, of the worst kv head."""

    layer: int
    excess: float
    by_channel: bool

    def as_dict(self) -> dict[str, object]:
        """The choice as describe() gives it."""
        return {"layer": self.layer, "excess": round(self.excess, 2), "by_channel": self.by_channel}


def auto_scheme(name: str, model: nn.Module) -> tuple[Scheme, dict[str, object]]:
    """The scheme that a preset of AUTO_BITS chooses for the model, and what it chose and why, as describe() gives it.

    The same weights, dtype and device give the same scheme. Raises UnsupportedModel for a model that cannot be
    compressed, NonFiniteError where keys of the probe are not finite.
    """
    hf.check_supported(model)
    config, bits = hf.config_of(model), AUTO_BITS[name]
    skipped, shape = hf.unsupported_layers(config), hf.layer_shape(config, WINDOWS.block)
    choices = [_choice(index, keys) for index, keys in probe_keys(name, model).items()]
    pairs = {
        choice.layer: LayerCodecs(
            _key_codec(shape, bits, choice.by_channel), Higgs(shape, "value", d=2, n=POINTS[bits])
        )
        for choice in choices
    }
    layers = tuple(pairs.get(index) for index in range(config.num_hidden_layers))
    return Scheme(WINDOWS, "post_rope", layers, skipped), _described(name, choices)


def _choice(layer: int, keys: Tensor) -> Choice:
    excess = channel_excess(keys[:, :, WINDOWS.sink :])
    return Choice(layer, excess, excess >= EXCESS)


def _key_codec(shape: Shape, bits: int, by_channel: bool) -> Codec:
    return Uniform(shape, "key", bits, shape.block, "token") if by_channel else Higgs(shape, "key", d=2, n=POINTS[bits])


def channel_excess(keys: Tensor) -> float:
    """Mean over median of the channels' mean squares, of the worst kv head; keys (B, H, T, D)."""
    square = keys.double().square().mean((0, 2))
    return float((square.mean(-1) / square.median(-1).values.clamp_min(1e-30)).max())


@torch.no_grad()
def probe_keys(name: str, model: nn.Module) -> dict[int, Tensor]:
    """Keys after RoPE (1, H, TOKENS, D) of each layer that can be compressed. name: of the preset, for errors.

    Raises NonFiniteError where keys are not finite.
    """
    decoder: Any = hf.decoder_of(model)  # of a class of Transformers, called
    ids = (START + STEP * torch.arange(TOKENS, device="cpu")) % decoder.get_input_embeddings().num_embeddings
    cache: Any = DynamicCache(config=decoder.config)  # its layers share no class that has keys
    with _evaluating(model):
        decoder(input_ids=ids[None].to(hf.input_device(decoder)), past_key_values=cache, use_cache=True)
    probed: dict[int, Tensor] = {
        site.index: site.gather(cache.layers[site.index].keys) for site in hf.attention_sites(model)
    }
    for index, keys in probed.items():
        if not bool(keys.isfinite().all()):
            raise NonFiniteError(
                f"{name}: layer {index}: keys of the probe are not finite; load the model in another dtype, as bfloat16"
            )
    return probed


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout, which would change the probe from call to call."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _described(name: str, choices: list[Choice]) -> dict[str, object]:
    apart = [choice for choice in choices if choice.by_channel]
    bits, worst = AUTO_BITS[name], max(choices, key=lambda choice: choice.excess)
    why = (
        f"layer {worst.layer} has the most unequal key channels: mean over median square {worst.excess:.1f}, in a "
        f"probe of {TOKENS} tokens; from {EXCESS:g} on, keys are stored channel by channel"
    )
    chosen = f"{bits}-bit HIGGS"
    if apart:
        which = "all layers" if len(apart) == len(choices) else f"{len(apart)} of {len(choices)} layers"
        chosen += f", keys of {which} as {bits}-bit integers by channel"
    return {"preset": name, "chosen": chosen, "why": why, "layers": [choice.as_dict() for choice in choices]}
