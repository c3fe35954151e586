"""The outlier guard: schemes whose forecast KL on this model is high are named before they serve, and what would be better.

Some models have key channels 10 to 95 times larger than the rest (Qwen2.5's K bias). A codec that spreads its error evenly
over the channels of a token (2-bit integers per token, anything after a rotation) then drowns the small ones. Others have none
and suffer from coarse values all the same. So nothing is judged by its name or by one error: what the scheme does to the
model on short windows of text is computed, layer by layer (forecast.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvcal_artifacts.codecs import Codec, Predicted
from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.scheme import LayerCodecs, Scheme

from .capture import Capture, LayerSource
from .fit import coded_tokens
from .forecast import Forecast, forecasts, least_tokens
from .methods.backbones import BACKBONES
from .methods.base import Carry
from .methods.learned import FactorBackbone
from .methods.seen import Seen
from .report.timing import PhaseTimer

# Forecast KL from which a scheme is warned of, and in which words. KL 0.1: what 2-bit integers cost SmolLM2-135M and
# Qwen2.5-Coder-0.5B at their worst settings; at 1 the next token is another one in most places.
GRADES = ((1.0, "breaks the model"), (0.3, "costs much quality"), (0.1, "costs noticeable quality"))
BETTER = 0.5  # an alternative is named where its forecast is at most so many times the scheme's


@dataclass(frozen=True)
class Alternative:
    """Codecs in the place of a scheme's own; values: empty keeps those."""

    keys: str
    values: str = ""

    def __str__(self) -> str:
        return f"{self.keys} keys" + (f" and {self.values} values" if self.values else "")


ALTERNATIVES = (  # in the order in which they are named, by bits
    Alternative("uniform-2-channel"), Alternative("uniform-3-channel"), Alternative("uniform-4-channel"),
    Alternative("uniform-4"), Alternative("uniform-4-channel", "uniform-4"), Alternative("uniform-8", "uniform-8"),
)  # fmt: skip


WINDOWS = 2  # of text that a forecast is made from, at most
LENGTH = 512  # tokens of each that a forecast is made from, where the scheme packs a block of them


def window_of(ids: Tensor, schemes: Iterable[Scheme]) -> Tensor:
    """The first token windows of ids (N, T), cut to what forecasts of these schemes take: (WINDOWS or fewer, T)."""
    return ids[:WINDOWS, : window_length(schemes)]


def window_length(schemes: Iterable[Scheme]) -> int:
    return max([LENGTH, *(least_tokens(scheme) for scheme in schemes)])


def grade(kl: float) -> str | None:
    """In words, a forecast KL that is warned of; None for others."""
    return next((word for least, word in GRADES if kl >= least), None)


def warnings(
    model: LayerSource | nn.Module, ids: Tensor, schemes: Mapping[str, Scheme], device: torch.device | None = None
) -> list[str]:
    """One line for each scheme whose forecast KL on token windows ids (N, T) is high; empty if there is none."""
    made = forecasts(model, ids, schemes, device)
    words = {name: word for name, found in made.items() if (word := grade(found.kl)) is not None}
    instead = advice(model, ids, {name: (schemes[name], made[name].kl) for name in words}, device)
    return [_line(name, made[name], word, instead[name]) for name, word in words.items()]


def _line(name: str, found: Forecast, word: str, instead: str) -> str:
    return (
        f"warning: {name} {word} here: KL about {found.kl:.2g} nats per token where {found.packed} tokens of a text are "
        f"packed; key channels are up to {found.ratio:.0f} times the median (layer {found.layer}); {instead}"
    )


def advice(
    model: LayerSource | nn.Module,
    ids: Tensor,
    schemes: Mapping[str, tuple[Scheme, float]],
    device: torch.device | None = None,
) -> dict[str, str]:
    """What would be better than each of these schemes of forecast KL, on the same windows: the first of ALTERNATIVES that is
    not warned of, and the scheme's own key codecs behind balanced factors, which have its bits. Two passes serve all schemes.
    """
    if not schemes:
        return {}
    balanced = _balanced(model, ids, {name: scheme for name, (scheme, _) in schemes.items()}, device)
    tried = {name: _tried(scheme, *balanced[name]) for name, (scheme, _) in schemes.items()}
    flat = {str(number): one for number, one in enumerate(one for own in tried.values() for one in own.values())}
    costs = iter(forecasts(model, ids, flat, device).values())
    found = {name: {other: next(costs).kl for other in own} for name, own in tried.items()}
    return {name: _named(found[name], kl) for name, (_, kl) in schemes.items()}


OWN = " keys at the same bits (learned from text: `kvcal fit-predictors`)"  # ends the name of a scheme's own balanced codecs


def _tried(scheme: Scheme, names: str, balanced: Scheme) -> dict[str, Scheme]:
    """The scheme with each of ALTERNATIVES that fits, and `balanced`, if its codecs have names."""
    tried = {str(one): made for one in ALTERNATIVES if (made := _with(scheme, one)) is not None}
    return tried | ({f"{names}{OWN}": balanced} if names else {})


def _named(found: Mapping[str, float], kl: float) -> str:
    """In words, which of these alternatives of forecast KL is to be taken where the scheme's own is `kl`."""
    better = [name for name, cost in found.items() if cost <= BETTER * kl and grade(cost) is None]
    others, own = ([name for name in better if name.endswith(OWN) == ours] for ours in (False, True))
    if said := [f"{name}: about {found[name]:.2g}" for name in (*others[:1], *own)]:
        return " or ".join(said)
    best = min(found, key=lambda name: found[name], default=None)
    if best is None or not found[best] <= min(BETTER * kl, sys.float_info.max):
        return "no codec tried is clearly better: keep keys and values in 16 bits"
    return f"the best of the codecs tried is {best}: about {found[best]:.2g}"


def _with(scheme: Scheme, other: Alternative) -> Scheme | None:
    """The scheme with these codecs; None where they do not fit the model's heads."""
    try:
        layers = [
            pair
            and LayerCodecs(
                BACKBONES[other.keys](pair.key.shape, "key"),
                BACKBONES[other.values](pair.value.shape, "value") if other.values else pair.value,
            )
            for pair in scheme.layers
        ]
    except KVCalError:
        return None
    return Scheme(scheme.windows, scheme.frame, tuple(layers), dict(scheme.skipped))


def _balanced(
    model: LayerSource | nn.Module, ids: Tensor, schemes: Mapping[str, Scheme], device: torch.device | None
) -> dict[str, tuple[str, Scheme]]:
    """Each scheme with its key codecs behind balanced factors of these windows, and how they are named: "" if none can be.
    Predicted keys are taken without their predictors.
    """
    if device is None:
        assert isinstance(model, nn.Module)
        device = next(model.parameters()).device
    tokens = {name: span for name, one in schemes.items() if (span := _span(one, ids.shape[1])) is not None}
    names: dict[str, dict[str, None]] = {name: {} for name in schemes}  # in order, once each
    keys: dict[str, list[Codec | None]] = {name: [None] * len(one.layers) for name, one in schemes.items()}
    if tokens:
        with torch.no_grad(), Capture(model, ids, device=device) as capture:
            for taps in capture:
                for name, span in tokens.items():
                    scheme = schemes[name]
                    pair = scheme.layers[taps.index]
                    factors = None if pair is None else _factors(pair.key)
                    if pair is not None and factors is not None:
                        carry = Carry(len(ids), span, pair.key.shape, PhaseTimer())
                        seen = Seen(taps.index, "key", scheme.windows, scheme.frame, taps, carry)
                        keys[name][taps.index] = factors.learn(seen)
                        names[name][f"{factors.codec}-{factors.rule}"] = None
    return {name: (" and ".join(names[name]), _with_keys(one, keys[name])) for name, one in schemes.items()}


def _span(scheme: Scheme, length: int) -> slice | None:
    """Which of a window's tokens the scheme codes; None if it is too short for a block."""
    try:
        return coded_tokens(length, scheme.windows.sink, scheme.windows.block)
    except KVCalError:
        return None


def _with_keys(scheme: Scheme, keys: Sequence[Codec | None]) -> Scheme:
    layers = (
        pair if pair is None or key is None else LayerCodecs(key, pair.value)
        for pair, key in zip(scheme.layers, keys, strict=True)
    )
    return Scheme(scheme.windows, scheme.frame, tuple(layers), dict(scheme.skipped))


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
