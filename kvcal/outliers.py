"""The outlier guard: does a key codec survive this model's key channels?

Some models have key channels 10 to 50 times larger than the rest (Qwen2.5's K bias). A codec that spreads its error evenly
over the channels of a token (2-bit integers per token, anything after a rotation) then drowns the small ones, while the
relative error of whole keys still looks fine. So the error is counted channel by channel, over that channel's variance.

That alone would also blame what puts its error where no query looks (SQuat), and outliers that are harmless. So the error of
scores is counted too, over their variance: a scheme breaks where both are large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvcal_artifacts.codecs import Codec, Context, Predicted
from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.scheme import LayerCodecs, Scheme

from .capture import Capture, LayerSource, LayerTaps
from .fit import coded_tokens
from .methods.backbones import BACKBONES
from .methods.base import BROKEN, OUTLIER, Carry
from .methods.learned import FactorBackbone
from .methods.observed import taps_of, window_statistics
from .methods.seen import Seen
from .report.timing import PhaseTimer

# Of scores' variance. 2 bits per channel, SQuat's too, err by 0.10 to 0.20 on `tiny`, kvref-28m and their twins, what costs
# less KL than they do by up to 0.32. HIGGS at 3 bits errs by 0.65 on the twin of `tiny` (65 times the model's KL), at 4 bits
# by 0.62 on the other (18 times).
BLURRED = 0.35
ALTERNATIVES = ("uniform-2-channel", "uniform-3-channel", "uniform-4-channel", "uniform-4", "uniform-8")  # by bits


@dataclass(frozen=True)
class KeyChannels:
    """One layer. ratio: largest over median root mean square of a channel, worst kv head. error: mean over channels of
    |k - decoded|^2 over the channel's variance, worst kv head. score: |q (k - decoded)|^2 over the variance of q k, worst kv
    head, both less their mean over the tokens, which a softmax does not see.
    """

    layer: int
    ratio: float
    error: float
    score: float

    @property
    def broken(self) -> bool:
        return self.error > BROKEN and self.score > BLURRED


def channel_ratio(keys: Tensor) -> float:
    """keys (B, H, T, D)."""
    size = keys.double().square().mean((0, 2)).sqrt()  # (H, D)
    return float((size.amax(-1) / size.median(-1).values.clamp_min(1e-30)).max())


def channel_error(keys: Tensor, decoded: Tensor) -> float:
    """Both (B, H, T, D)."""
    x = keys.double()
    variance = x.var((0, 2), unbiased=False).clamp_min(1e-12 * float(x.square().mean().clamp_min(1e-30)))
    return float(((x - decoded.double()).square().mean((0, 2)) / variance).mean(-1).max())


def score_error(queries: Tensor, keys: Tensor, decoded: Tensor) -> float:
    """queries (B, heads, Q, D) and keys (B, H, T, D) twice, as they meet; every query sees every key."""
    shared = queries.double().unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
    wanted = shared.mT @ shared
    error, spread = ((wanted * _spread(x.double())).sum((0, 2, 3)) for x in (keys.double() - decoded.double(), keys))
    return float((error / spread.clamp_min(1e-30)).max())


def _spread(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, H, D, D): products of channels, less their mean over tokens."""
    centred = x - x.mean(2, keepdim=True)
    return centred.mT @ centred


def key_channels(
    model: LayerSource | nn.Module, ids: Tensor, schemes: Mapping[str, Scheme], device: torch.device | None = None
) -> dict[str, list[KeyChannels]]:
    """Every layer of every scheme on token windows ids (N, T). Layers that predict their keys are left out: their error is
    measured when they are fitted.

    device: where a LayerSource puts its layers; a model's own otherwise.
    """
    found: dict[str, list[KeyChannels]] = {name: [] for name in schemes}
    if device is None:
        assert isinstance(model, nn.Module)
        device = next(model.parameters()).device
    with torch.no_grad(), Capture(model, ids, device=device) as capture:
        for taps in capture:
            for name, scheme in schemes.items():
                pair = scheme.layers[taps.index]
                if pair is None or isinstance(pair.key, Predicted):
                    continue
                batch = next(iter(taps.batches(frozenset("qk") | taps_of(pair.key.stats), scheme.frame)))
                assert batch.k is not None and batch.q is not None
                coded = coded_tokens(ids.shape[1], scheme.windows.sink, scheme.windows.block)
                keys = batch.k[:, :, coded]
                codec = scheme.on(taps.index, keys.device).key
                context = Context(taps.index)
                context.stats = window_statistics(codec, scheme.windows, scheme.frame, taps, batch)
                decoded = codec.decode(codec.encode(keys, context), context)
                figures = channel_ratio(keys), channel_error(keys, decoded)
                meet = batch.q, keys, decoded.to(keys.dtype)
                if scheme.frame == "pre_rope" and taps.rope is not None:
                    meet = _turned(taps, coded, *meet)
                found[name].append(KeyChannels(taps.index, *figures, score_error(*meet)))
    return found


def _turned(taps: LayerTaps, coded: slice, queries: Tensor, *keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of all tokens and keys of the coded ones after RoPE."""
    assert taps.rope is not None
    cos, sin = taps.rope
    made, held = (taps.site.rotate(x, cos[:, coded], sin[:, coded]) for x in keys)
    return taps.site.rotate(queries, cos, sin), made, held


def advice(model: LayerSource | nn.Module, ids: Tensor, scheme: Scheme, device: torch.device | None = None) -> str:
    """Which key codecs hold in this scheme's place, on the same windows: the first of ALTERNATIVES that breaks in no layer,
    and the scheme's own ones behind balanced factors, which have its bits.
    """
    names, balanced = _balanced(model, ids, scheme, device)
    same = f"{names} at the same bits (learned from text: `kvcal fit-predictors`)"
    held = bool(names) and not _breaks(model, ids, balanced, device)
    for name in ALTERNATIVES:
        keys = [None if pair is None else _made(name, pair.key) for pair in scheme.layers]
        if not _breaks(model, ids, _with_keys(scheme, keys), device):
            return f"{name} keys hold" + f", and {same}" * held
    return f"{names} keys hold{same.removeprefix(names)}" if held else "no codec tried holds: keep keys in 16 bits"


def _breaks(model: LayerSource | nn.Module, ids: Tensor, scheme: Scheme, device: torch.device | None) -> bool:
    return any(layer.broken for layer in key_channels(model, ids, {"": scheme}, device)[""])


def _with_keys(scheme: Scheme, keys: Sequence[Codec | None]) -> Scheme:
    layers = (
        pair if pair is None or key is None else LayerCodecs(key, pair.value)
        for pair, key in zip(scheme.layers, keys, strict=True)
    )
    return Scheme(scheme.windows, scheme.frame, tuple(layers), dict(scheme.skipped))


def _balanced(
    model: LayerSource | nn.Module, ids: Tensor, scheme: Scheme, device: torch.device | None
) -> tuple[str, Scheme]:
    """The scheme with the key codecs that break behind balanced factors of these windows, and how they are named: "" if none
    can be. Predicted keys, which are not looked at here, count as breaking and are taken without their predictors.
    """
    sound = {layer.layer for layer in key_channels(model, ids, {"": scheme}, device)[""] if not layer.broken}
    if device is None:
        assert isinstance(model, nn.Module)
        device = next(model.parameters()).device
    names: dict[str, None] = {}  # in order, once each
    keys: dict[int, Codec] = {}
    tokens = coded_tokens(ids.shape[1], scheme.windows.sink, scheme.windows.block)
    with torch.no_grad(), Capture(model, ids, device=device) as capture:
        for taps in capture:
            pair = scheme.layers[taps.index]
            factors = None if pair is None or taps.index in sound else _factors(pair.key)
            if pair is None or factors is None:
                continue
            carry = Carry(len(ids), tokens, pair.key.shape, PhaseTimer())
            keys[taps.index] = factors.learn(Seen(taps.index, "key", scheme.windows, scheme.frame, taps, carry))
            names[f"{factors.codec}-{factors.rule}"] = None
    return " and ".join(names), _with_keys(scheme, [keys.get(index) for index in range(len(scheme.layers))])


def _factors(key: Codec) -> FactorBackbone | None:
    """What learns balanced factors for this codec; None where it has no name or factors change nothing."""
    own = key.inner if isinstance(key, Predicted) else key
    for name, make in BACKBONES.items():
        try:
            made = make(own.shape, "key")
            if type(made) is type(own) and made.config() == own.config() and _alike(made.tensors(), own.tensors()):
                return FactorBackbone(name, "balanced")
        except KVCalError:  # that codec does not fit this head, or takes no factors
            continue
    return None


def _alike(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether constants that both have are equal: settings do not tell a grid in bytes from the papers'."""
    return all(torch.equal(first[name].cpu(), second[name].cpu()) for name in first.keys() & second.keys())


def _made(name: str, like: Codec) -> Codec:
    return BACKBONES[name](like.shape, "key")


def holds(model: LayerSource | nn.Module, ids: Tensor, scheme: Scheme, device: torch.device | None = None) -> bool:
    """Whether no layer breaks, and all can be looked at: of predicted keys what was measured when they were fitted counts."""
    predicted = any(pair is not None and isinstance(pair.key, Predicted) for pair in scheme.layers)
    return not predicted and not _breaks(model, ids, scheme, device)


def warnings(
    model: LayerSource | nn.Module, ids: Tensor, schemes: Mapping[str, Scheme], device: torch.device | None = None
) -> list[str]:
    """One line for each scheme that will break on this model's key channels; empty if all hold."""
    found = []
    for name, layers in key_channels(model, ids, schemes, device).items():
        broken = [layer for layer in layers if layer.broken and layer.ratio > OUTLIER]
        if broken:
            worst = max(broken, key=lambda layer: layer.error)
            found.append(
                f"warning: {name} will break on this model: in {len(broken)} of {len(layers)} layers key channels are up to "
                f"{max(layer.ratio for layer in broken):.0f} times the median, and it errs by {worst.error:.0%} of a "
                f"channel's variance and {worst.score:.0%} of scores' (layer {worst.layer}); "
                f"{advice(model, ids, schemes[name], device)}"
            )
    return found
