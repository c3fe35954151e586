"""The outlier guard: schemes whose forecast KL on this model is high are named before they serve, and what would be
better.

Some models have key channels 10 to 95 times larger than the rest (Qwen2.5's K bias). A codec that spreads its error
evenly over the channels of a token (2-bit integers per token, anything after a rotation) then drowns the small ones.
Others have none and suffer from coarse values all the same. So nothing is judged by its name or by one error: what the
scheme does to the model on short windows of text is computed, layer by layer (forecast.py).
"""

from __future__ import annotations

import math
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from kvcal_artifacts.codecs import Codec, Role
from kvcal_artifacts.codecs.named import CODEC_MAKERS
from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.hf import config_of
from kvcal_artifacts.scheme import LayerCodecs, Scheme
from kvcal_kernels.device import on

from ..capture.scan import Capture, LayerSource, WholeModel
from ..methods.base import Carry, Unfitted, coded_tokens
from ..methods.calibrated import CalibratedFactors
from ..methods.data_free import preset
from ..methods.statistics import TrainingData
from ..models.spread import input_device
from ..report.progress import progress
from ..report.timing import PhaseTimer
from .forecast import Forecast, forecasts, least_tokens
from .job import Scan

# Forecast KL from which a scheme is warned of, and in which words. KL 0.1: what 2-bit integers cost SmolLM2-135M and
# Qwen2.5-Coder-0.5B at their worst settings; at 1 the next token is another one in most places.
GRADES = ((1.0, "breaks the model"), (0.3, "costs much quality"), (0.1, "costs noticeable quality"))
# Perplexity of the exact model from which it is named. Pretrained models have 5 to 60 on text that suits them; a folder
# of Gemma-3 whose tokenizer was damaged when it was converted had 9,400.
UNLIKELY = 3000.0
# Largest over median size of a key channel from which on it is named, where treating channels apart helps as well
# (`_advice`): models with such channels have 10 to 95. Below that balanced factors may help, too (1-bit keys on `tiny`,
# whose ratio is 6), but there is no channel to point at.
OUTLIER = 10.0
# More bits per value, of keys and values, that count as "about the same": scales of groups along tokens take 0.38 more
# than one of a whole head; another bit of keys takes 0.5.
WIDER = 0.5
WORSE = 1.25  # a fit is named whose forecast is at least so many times that of its preset, and LEAST_LOSS more
LEAST_LOSS = 1e-3  # nats per token: less is within what forecasts of one scheme on two texts differ by
BETTER = 0.5  # an alternative is named where its forecast is at most so many times the scheme's


@dataclass(frozen=True)
class Alternative:
    """Codecs that replace a scheme's; values: empty for the scheme's."""

    keys: str
    values: str = ""

    def __str__(self) -> str:
        return f"{self.keys} keys" + (f" and {self.values} values" if self.values else "")


ALTERNATIVES = (  # in the order in which they are named, by bits
    Alternative("uniform-2-channel"),
    Alternative("uniform-3-channel"),
    Alternative("uniform-4-channel"),
    Alternative("uniform-4"),
    Alternative("uniform-4-channel", "uniform-4"),
    Alternative("uniform-8", "uniform-8"),
)
PRESET = "kivi-4"  # forecast as a whole, with its windows, next to them: key channels apart, without text, by a kernel


PASSES_OF_ADVICE = 2  # over the model: balanced factors, and forecasts of what would be better
WINDOWS = 2  # of text for a forecast, at most
LENGTH = 512  # tokens of each window for a forecast, where the scheme packs a block of them


def window_of(ids: Tensor, schemes: Iterable[Scheme], context: int | None = None) -> Tensor:
    """Token windows for forecasts of these schemes: the first of ids (N, T) int64, cut to the length
    that it takes, as (WINDOWS or fewer, length). Windows that are too short are joined, to no more than `context`
    tokens.

    A token that all windows begin with (BOS) stands only at the start. A scheme that needs more than there is has no
    say.
    """
    head = ids[:1, :1] if len(ids) > 1 and bool((ids[:, 0] == ids[0, 0]).all()) else ids[:1, :0]
    stream = ids[:, head.shape[1] :].reshape(-1)
    most = head.shape[1] + len(stream)
    most = max(ids.shape[1], most if context is None else min(most, context))
    needs = [LENGTH, *(need for scheme in schemes if (need := least_tokens(scheme)) <= most)]
    length = min(most, max(needs))
    if length <= ids.shape[1]:
        return ids[:WINDOWS, :length]
    body = length - head.shape[1]
    joined = stream[: len(stream) // body * body].view(-1, body)[:WINDOWS]
    return torch.cat([head.expand(len(joined), -1), joined], 1)


def window_length(schemes: Iterable[Scheme]) -> int:
    return max([LENGTH, *(least_tokens(scheme) for scheme in schemes)])


def grade(kl: float) -> str | None:
    """Put a forecast KL that is warned of in words; None for others."""
    return next((word for least, word in GRADES if kl >= least), None)


def unlikely(perplexity: float, text: str) -> list[str]:
    """A line where the exact model cannot predict the text itself, so that what compression changes tells little."""
    if perplexity < UNLIKELY or math.isnan(perplexity):
        return []
    return [
        f"warning: full precision itself has perplexity {perplexity:,.0f} on {text}, where pretrained models have less "
        "than 100, so KL to it tells little: check that the weights, the tokenizer and the text belong together"
    ]


def warnings(
    model: LayerSource | nn.Module,
    ids: Tensor,
    schemes: Mapping[str, Scheme],
    device: torch.device | None = None,
    *,
    text: str,
    unfitted: Mapping[str, Unfitted] | None = None,
) -> list[str]:
    """One line for each scheme whose forecast KL on text is high, and one where the exact model cannot predict the
    text itself. A scheme that packs nothing of the text has no forecast, and a line, too. ids: token windows (N, T)
    int64, of which those of `window_of` are taken. text: what they are of, for the line. unfitted: by the scheme's
    name; a line says where fitting made it worse. Forecasts of one scheme on two texts differ, up to a few times.
    """
    if not schemes:
        return []
    context = getattr(config_of(_source(model).model), "max_position_embeddings", None)
    windows = window_of(ids, schemes.values(), context)
    forecastable = {name: scheme for name, scheme in schemes.items() if least_tokens(scheme) <= windows.shape[1]}
    lines = [_no_forecast(name, one, ids, context) for name, one in schemes.items() if name not in forecastable]
    bare = {name: one for name, one in (unfitted or {}).items() if name in forecastable}
    rivals = {f"{name}, unfitted": one.preset.scheme(_source(model).model) for name, one in bare.items()}
    with progress("Outlier guard, passes", total=1) as advance:
        by_name = forecasts(model, windows, forecastable | rivals, device)
        without = {name: by_name.pop(f"{name}, unfitted").kl for name in bare}
        words = {name: word for name, result in by_name.items() if (word := grade(result.kl)) is not None}
        advance(total=1 + PASSES_OF_ADVICE * bool(words))
        instead = advice(model, windows, {name: (forecastable[name], by_name[name].kl) for name in words}, device)
        advance(PASSES_OF_ADVICE * bool(words))
    count, length = windows.shape
    where = f"{count} window{'s' * (count > 1)} of {length:,} tokens of {text}"
    exact = next((result.perplexity for result in by_name.values()), math.nan)
    lines += unlikely(exact, where)
    lines += [_line(name, by_name[name], word, instead[name], where) for name, word in words.items()]
    return lines + [
        f"warning: fitting made {name} worse: forecast KL {by_name[name].kl:.2g} nats per token, and "
        f"{without[name]:.2g} of the preset {one.name}, which needs no text; take the preset"
        + (f", or fit with {one.options}" if one.options else "")
        for name, one in bare.items()
        if by_name[name].kl >= max(WORSE * without[name], without[name] + LEAST_LOSS)
    ]


def measured_warning(name: str, kl: float | None, command: str) -> str | None:
    """The line for a scheme whose KL was measured: mean nats of the tokens that see packed blocks. None where it is not
    warned of, or nothing was packed. command: what forecasts better codecs.
    """
    word = None if kl is None else grade(kl)
    if word is None:
        return None
    return (
        f"warning: {name} {word} here: KL {kl:.2g} nats per token, measured on tokens behind packed ones; "
        f"`{command}` forecasts what would be better"
    )


def _source(model: LayerSource | nn.Module) -> LayerSource:
    return WholeModel(model) if isinstance(model, nn.Module) else model


def _no_forecast(name: str, scheme: Scheme, ids: Tensor, context: int | None) -> str:
    need = least_tokens(scheme)
    if context is not None and need > context:
        why = f"the model's context is {context:,} tokens"
    else:
        why = f"the text has {ids.numel():,} ({len(ids)} x {ids.shape[1]:,}); give more --windows or a larger --length"
    return f"note: {name}: no KL is forecast, as it packs its first block in windows of {need:,} tokens, and {why}"


@dataclass(frozen=True)
class Advice:
    """What the guard advises. text: what would be better. channels: whether the scheme suffers from key channels being
    unequal.
    """

    text: str
    channels: bool = False


def _line(name: str, result: Forecast, word: str, instead: Advice, where: str) -> str:
    channels = f"key channels are up to {result.ratio:.0f} times the median (layer {result.layer}); "
    return (
        f"warning: {name} {word} here: KL about {result.kl:.2g} nats per token, of tokens behind {result.packed} "
        f"packed ones in {where} "
        "(`kvcal eval` averages over all tokens, those before the first packed block too); "
        f"{channels if instead.channels and result.ratio >= OUTLIER else ''}{instead.text}"
    )


@dataclass(frozen=True)
class Tried:
    """A scheme instead of another. command: what learns it from text, "" for one that needs none. apart: in
    contrast to the other it treats key channels apart, at about the same bits. whole: whether it is a preset.
    """

    name: str
    scheme: Scheme
    apart: bool
    command: str = ""
    whole: bool = False


def advice(
    model: LayerSource | nn.Module,
    ids: Tensor,
    schemes: Mapping[str, tuple[Scheme, float]],
    device: torch.device | None = None,
) -> dict[str, Advice]:
    """What would be better than each of these schemes of forecast KL, on the same windows.

    Three are tried. The first of ALTERNATIVES that is not warned of comes first, then PRESET, if it is not that one.
    Last come the scheme's key codecs behind balanced factors, which have its bits. Two passes serve all schemes.
    """
    if not schemes:
        return {}
    balanced = _balanced(model, ids, {name: scheme for name, (scheme, _) in schemes.items()}, device)
    tried = {name: _tried(scheme, balanced[name]) for name, (scheme, _) in schemes.items()}
    flat = {
        str(number): one.scheme
        for number, one in enumerate(one for alternatives in tried.values() for one in alternatives)
    }
    whole = _preset(_source(model).model, ids.shape[1])
    costs = forecasts(model, ids, flat | ({} if whole is None else {PRESET: whole.scheme}), device)
    preset_cost = [] if whole is None else [(whole, costs.pop(PRESET).kl)]
    kls = (cost.kl for cost in costs.values())
    return {
        name: _advice([*((one, next(kls)) for one in tried[name]), *preset_cost], kl)
        for name, (_, kl) in schemes.items()
    }


def _preset(model: nn.Module, length: int) -> Tried | None:
    """PRESET as an alternative; None where it does not fit the model's heads, or packs no block of so many tokens."""
    try:
        scheme = preset(PRESET).scheme(model)
    except KVCalError:
        return None
    return Tried(f"preset {PRESET}", scheme, False, whole=True) if least_tokens(scheme) <= length else None


def _tried(scheme: Scheme, balanced: Tried | None) -> list[Tried]:
    """The scheme with each of ALTERNATIVES that fits, and `balanced`."""
    tried = []
    for one in ALTERNATIVES:
        if (changed := _with(scheme, one)) is not None:
            apart = one.keys.endswith("-channel") and not one.values and not _apart(scheme)
            tried.append(Tried(str(one), changed, apart and changed.bits_per_value() - scheme.bits_per_value() < WIDER))
    return tried + ([balanced] if balanced is not None else [])


def _apart(scheme: Scheme) -> bool:
    """Whether the scheme's key channels do not share a scale anyway."""
    keys = [pair.key for pair in scheme.layers if pair is not None]
    return all(key.channels_apart for key in keys)


def _advice(results: Sequence[tuple[Tried, float]], kl: float) -> Advice:
    """Advise among these alternatives and their forecast KL, where the scheme has `kl`.

    Unequal key channels are a cause where an alternative that treats them apart, at about the same bits, has BETTER
    times the KL or less. A large ratio alone is none: keys may be coded by channel, and values what is coarse.
    """
    most = min(BETTER * kl, sys.float_info.max)
    channels = any(one.apart and cost <= most for one, cost in results)
    better = [(one, cost) for one, cost in results if cost <= most and grade(cost) is None]
    others = [pair for pair in better if not (pair[0].command or pair[0].whole)]
    whole, learning = [pair for pair in better if pair[0].whole], [pair for pair in better if pair[0].command]
    if phrases := [_phrase(*pair) for pair in (*others[:1], *whole, *learning)]:
        return Advice(" or ".join(phrases), channels)
    best = min(results, key=lambda pair: pair[1], default=None)
    if best is None or not best[1] <= most:
        return Advice("no codec tried is clearly better: keep keys and values in 16 bits", channels)
    return Advice(f"the best of the codecs tried is {_phrase(*best)}", channels)


def _phrase(one: Tried, kl: float) -> str:
    learned = f" at the same bits (learned from text: {one.command})" if one.command else ""
    return f"{one.name}{learned}: about {kl:.2g}"


def _with(scheme: Scheme, other: Alternative) -> Scheme | None:
    """The scheme with these codecs; None where they do not fit the model's heads."""
    try:
        layers = [
            pair
            and LayerCodecs(
                CODEC_MAKERS[other.keys](pair.key.shape, "key"),
                CODEC_MAKERS[other.values](pair.value.shape, "value") if other.values else pair.value,
            )
            for pair in scheme.layers
        ]
    except KVCalError:
        return None
    return Scheme(scheme.windows, scheme.frame, tuple(layers), dict(scheme.skipped))


def _balanced(
    model: LayerSource | nn.Module, ids: Tensor, schemes: Mapping[str, Scheme], device: torch.device | None
) -> dict[str, Tried | None]:
    """Each scheme with its key codecs behind balanced factors of these windows; None if no key takes any. Predicted
    keys are taken without their predictors.
    """
    if device is None:
        assert isinstance(model, nn.Module)
        device = input_device(model)
    tokens = {name: span for name, one in schemes.items() if (span := _span(one, ids.shape[1])) is not None}
    names: dict[str, dict[int, str]] = {name: {} for name in schemes}  # by layer
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
                        data = TrainingData(taps.index, "key", scheme.windows, scheme.frame, taps, carry)
                        with on(taps.device):
                            keys[name][taps.index] = factors.learn(data)
                        names[name][taps.index] = f"{factors.codec}-{factors.rule}"
    return {name: _tried_balanced(one, keys[name], names[name]) for name, one in schemes.items()}


def _tried_balanced(scheme: Scheme, keys: Sequence[Codec | None], names: Mapping[int, str]) -> Tried | None:
    """The scheme with these balanced keys, whose codecs `names` gives by layer; None without any."""
    if not names:
        return None
    phrase = " and ".join(dict.fromkeys(names.values())) + " keys"
    return Tried(phrase, _with_keys(scheme, keys), True, _command(scheme, names))


MANY = 6  # exceptions by layer that a command is printed with


def _command(scheme: Scheme, balanced: Mapping[int, str]) -> str:
    """The call of `kvcal fit-predictors` that learns this scheme with these key codecs, by layer. Where no call does,
    as codecs have no names or values keep their predictors: what to change in the one that made the scheme.
    """
    pairs = {index: pair for index, pair in enumerate(scheme.layers) if pair is not None}
    keys = {index: balanced.get(index) or _name(pair.key, "key") for index, pair in pairs.items()}
    values = {index: _name(pair.value, "value") for index, pair in pairs.items()}
    [main, *exceptions], [value, *others] = _options("keys", keys), _options("values", values)
    predicted = [any(codec.unpredicted is not codec for codec in role) for role in _by_role(pairs.values())]
    if None in keys.values() or None in values.values() or predicted[1] or len(exceptions) + len(others) > MANY:
        also = ["--key-inputs none"] if predicted[0] else []
        return f"`{' '.join(['kvcal fit-predictors', main, *also])}` with the scheme's other options"
    windows = scheme.windows
    rest = [
        "--first-layer ''",
        *exceptions,
        *others,
        "--key-inputs none",
        "--value-inputs none",
        f"--sink {windows.sink}",
        f"--recent {windows.recent}",
        f"--block {windows.block}",
        f"--frame {scheme.frame}",
    ]
    return f"`{' '.join(['kvcal fit-predictors', main, value, *rest])}`"


def _by_role(pairs: Iterable[LayerCodecs]) -> tuple[list[Codec], list[Codec]]:
    """Codecs of keys, and of values."""
    every = list(pairs)
    return [pair.key for pair in every], [pair.value for pair in every]


def _options(role: str, names: Mapping[int, str | None]) -> list[str]:
    """--keys or --values, the most frequent name, and a --per-layer for each run of layers with another."""
    main = Counter(name for name in names.values() if name is not None).most_common(1)
    first = main[0][0] if main else ""
    options = [f"--{role} {shlex.quote(first)}"]
    for name, run in groupby(names, key=lambda index: names[index]):
        layers = list(run)
        if name not in (None, first):
            span = f"{layers[0]}" if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
            options.append(f"--per-layer {span}:{role}={name}")
    return options


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


def _factors(key: Codec) -> CalibratedFactors | None:
    """What learns balanced factors for this codec; None where it has no name or factors change nothing."""
    for name in _names(key, "key"):
        try:
            return CalibratedFactors(name, "balanced")
        except KVCalError:  # it takes no factors
            continue
    return None


def _name(codec: Codec, role: Role) -> str | None:
    """The short name of a codec that needs no data, behind its predictor if it has one; None for others."""
    return next(_names(codec, role), None)


def _names(codec: Codec, role: Role) -> Iterator[str]:
    inner = codec.unpredicted
    for name, make in CODEC_MAKERS.items():
        try:
            maker = make(inner.shape, role)
        except KVCalError:  # that codec does not fit this head
            continue
        if type(maker) is type(inner) and maker.config() == inner.config() and _alike(maker.tensors(), inner.tensors()):
            yield name


def _alike(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether constants that both have are equal: settings do not tell a grid in bytes from the papers'."""
    return all(torch.equal(first[name].cpu(), second[name].cpu()) for name in first.keys() & second.keys())


def say_forecasts(scan: Scan, schemes: Mapping[str, Scheme], unfitted: Mapping[str, Unfitted] | None = None) -> None:
    """Say what these schemes are forecast to cost on held-out windows, where that is much, or more than without their
    fit. Training windows are taken too, where the held-out ones together are too short for a block of each. Of random
    weights nothing is forecast.
    """
    from .forecast import least_tokens

    if scan.model_record.get("random_weights"):
        scan.say("note: no KL is forecast, as it would say nothing: the weights are random")
        return
    holdout, train = scan.text.holdout, scan.text.train
    need = max(least_tokens(scheme) for scheme in schemes.values())
    enough = holdout.numel() - len(holdout) >= need  # joined windows lose a BOS each
    ids = holdout if enough else torch.cat((holdout, train))
    text = f"the {'held-out ' if enough else ''}calibration text"
    for line in warnings(scan.source, ids, schemes, scan.device, text=text, unfitted=unfitted):
        scan.say(line)
