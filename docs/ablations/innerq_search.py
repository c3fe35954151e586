"""InnerQ's 3-bit keys: how a group's scale is chosen. Prints score errors, errors of attention outputs, and KL.

    python docs/ablations/innerq_search.py --model ./qwen2.5-coder-0.5b --text wiki.test.raw --calibration books.txt

Windows of text in steps of 32 tokens; sink 32, recent 96, keys `inner-3-symmetric`, values exact. Keys are divided by
factors of the row's own first tokens (--factors prefill, presets `innerq-*`) or of the calibration text (--factors
calibrated, `fit-norms`).

| rule | scale of a group |
|---|---|
| max | largest magnitude / 4 (codec `inner-3-symmetric-max`) |
| authors | largest magnitude / 3, the authors' simulation: sign and magnitude, codes -3 to 3 |
| sign | as max, or its negative, whichever has the lower squared error |
| search | the candidate with the lowest squared error (codec `inner-3-symmetric`) |
| f2 | search, channel c counts f_c^2: squared errors of keys as they were before their factors |
| f2q2 | channel c counts f_c^2 q_c^2, q_c^2 the mean square of queries: squared errors of scores |
| q2 | channel c counts q_c^2 (`fit-norms`, codecs CODEC-scaled and CODEC-balanced) |
| q2-own | q2 of the very text that is measured |

Factors and weights are of the calibration text, except those of q2-own. Score error: the squared error of q k over the
variance of q k, both less their mean over tokens, which a softmax does not see; of the worst kv head, mean and largest
over layers. Output error: squared error of attention outputs over their squares, mean and largest over layers. Both are
measured on the model's exact queries, keys and values. KL: to full precision, through the cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcal.capture.scan import Capture
from kvcal.cli.output import print_table
from kvcal.evaluate.perplexity import evaluate
from kvcal.methods.factors import channel_factor, query_weight
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.text import sources, token_windows
from kvcal_artifacts import hf
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import Context, Exact, Scaled, Shape, Uniform
from kvcal_artifacts.scheme import LayerCodecs, Scheme, Windows
from kvcal_kernels.quantise import factors_of

WINDOWS, STEP = Windows(32, 96, 32), 32
RULES = ("max", "authors", "sign", "search", "f2", "f2q2", "q2", "q2-own")
FIXED = {"max": (1.0,), "authors": (4 / 3,), "sign": (1.0, -1.0)}


class Fixed(Uniform):
    """Keys in 3 bits that try these factors of largest magnitude / 4 and no others."""

    factors: tuple[float, ...] = (1.0,)

    def _candidates(self, x: Tensor) -> Iterator[Any]:
        yield from self._symmetric(x, list(self.factors))


class Channels:
    """Of a layer's coded tokens, (H, D) float32: largest magnitudes of keys and mean squares of queries."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.largest = k[:, :, WINDOWS.sink :].abs().amax((0, 2))
        self.queries = torch.unflatten(q, 1, (k.shape[1], -1)).square().mean((0, 2, 3))
        self.measured = self.queries  # of the text that is measured; set when it is seen


def weight(rule: str, own: Channels) -> Tensor:
    """(H, D) float16."""
    square = channel_factor(own.largest).float().square() if "f2" in rule else torch.ones_like(own.largest)
    queries = own.measured if rule.endswith("own") else own.queries
    return query_weight(square * queries if "q2" in rule else square)


def key_codec(rule: str, shape: Shape, own: Channels, factors: str, group: int) -> Scaled:
    if rule in FIXED:
        inner: Uniform = Fixed(shape, "key", 3, group, "channel", "symmetric", True)
        inner.factors = FIXED[rule]  # type: ignore[attr-defined]
    else:
        inner = Uniform(shape, "key", 3, group, "channel", "symmetric", True)
        inner = inner if rule == "search" else inner.weighted(weight(rule, own))
    return Scaled(inner, channel_factor(own.largest)) if factors == "calibrated" else Scaled(inner, None, "prefill")


def layers_of(model: Any, ids: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v (B, heads, T, D) float32 of each layer, after RoPE."""
    with torch.no_grad(), Capture(model, ids, device="cpu") as capture:
        for taps in capture:
            found = list(taps.batches({"q", "k", "v"}, "post_rope"))
            q, k, v = (torch.cat([getattr(batch, name) for batch in found]).float() for name in "qkv")
            yield q, k, v


def decoded(codec: Scaled, k: Tensor) -> Tensor:
    """Keys (B, H, T, D), those of whole blocks behind the sink as the cache gives them back."""
    stop = WINDOWS.sink + (k.shape[2] - WINDOWS.sink) // WINDOWS.block * WINDOWS.block
    first = k[:, :, : WINDOWS.sink + WINDOWS.recent + WINDOWS.block].abs().amax(2)
    context = Context(stats={"key_scale": factors_of(first)[:, :, None]})
    made = k.clone()
    part = slice(WINDOWS.sink, stop)
    made[:, :, part] = codec.decode(codec.encode(k[:, :, part], context), context)
    return made


def seen_packed(tokens: int) -> Tensor:
    """(T, T) bool: which keys each query sees packed, in steps of 32 tokens."""
    at = torch.arange(tokens)
    due = WINDOWS.sink + ((at - WINDOWS.sink).div(WINDOWS.block, rounding_mode="floor") + 1) * WINDOWS.block
    return (at >= WINDOWS.sink)[None] & (due + WINDOWS.recent <= at[:, None] // STEP * STEP)


def score_error(q: Tensor, k: Tensor, made: Tensor) -> float:
    """q (B, heads, T, D), keys (B, H, T, D) and what they come back as; every query meets every key."""
    queries = torch.unflatten(q.double(), 1, (k.shape[1], -1)).flatten(2, 3)
    metric = queries.mT @ queries

    def spread(x: Tensor) -> Tensor:
        centred = x - x.mean(2, keepdim=True)
        return (metric * (centred.mT @ centred)).sum((0, 2, 3))

    return float((spread(made.double() - k.double()) / spread(k.double())).max())


def outputs(q: Tensor, k: Tensor, v: Tensor, made: Tensor | None = None) -> Tensor:
    """Attention outputs (B, H, group, T, D) of the queries that see something packed; made: keys as they come back."""
    wide, tokens = torch.unflatten(q, 1, (k.shape[1], -1)), k.shape[2]
    scores = wide @ k[:, :, None].mT
    if made is not None:
        scores = torch.where(seen_packed(tokens), wide @ made[:, :, None].mT, scores)
    ahead = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    weights = (scores / q.shape[3] ** 0.5).masked_fill(ahead, float("-inf")).softmax(-1)
    return (weights @ v[:, :, None])[..., seen_packed(tokens).any(1), :]


def measured(rule: str, own: Channels, layer: tuple[Tensor, Tensor, Tensor], factors: str, group: int) -> list[float]:
    """Score error and output error of a layer."""
    q, k, v = layer
    made = decoded(key_codec(rule, Shape(k.shape[1], k.shape[3], WINDOWS.block), own, factors, group), k)
    exact = outputs(q, k, v)
    off = (outputs(q, k, v, made) - exact).square().sum() / exact.square().sum()
    coded = slice(WINDOWS.sink, None)
    return [score_error(q, k[:, :, coded], made[:, :, coded]), float(off)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--text", default=None)
    parser.add_argument("--calibration", default=None)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--factors", choices=("prefill", "calibrated"), default="prefill")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--no-kl", action="store_true", help="layers alone, which takes a fraction of the time")
    given = parser.parse_args()
    source = resolve(given.model)
    loaded = load_model(source, dtype="float32", device="cpu")
    texts = (
        given.text or sources.default_text(source, "evaluation"),
        given.calibration or sources.default_text(source, "calibration"),
    )
    ids, other = (
        token_windows.evaluation_windows(loaded.tokenizer, text, windows=given.windows, length=given.length).ids
        for text in texts
    )
    rules = given.rules.split(",")
    channels = [Channels(q, k) for q, k, _ in layers_of(loaded.model, other)]
    shape = hf.layer_shape(hf.config_of(loaded.model), WINDOWS.block)
    group = min(32, shape.dim)
    found: dict[str, list[list[float]]] = {rule: [] for rule in rules}
    for own, layer in zip(channels, layers_of(loaded.model, ids), strict=True):
        own.measured = Channels(*layer[:2]).queries
        for rule in rules:
            found[rule].append(measured(rule, own, layer, given.factors, group))
    rows = {}
    for rule, layers in found.items():
        score, output = zip(*layers, strict=True)
        means = (sum(score) / len(score), max(score), sum(output) / len(output), max(output))
        rows[rule] = [rule, *(f"{x:.4f}" for x in means)]
    if not given.no_kl:
        schemes = {
            rule: Scheme(
                WINDOWS,
                "post_rope",
                tuple(
                    LayerCodecs(key_codec(rule, shape, own, given.factors, group), Exact(shape, "value", "float32"))
                    for own in channels
                ),
            )
            for rule in rules
        }
        caches = {rule: partial(KVCalCache, scheme, loaded.model, kernels="off") for rule, scheme in schemes.items()}
        for row in evaluate(loaded.model, ids, caches, step=STEP)[1:]:
            rows[row.name].append(f"{row.kl:.4f}")
    columns = ["rule", "score error", "largest", "output error", "largest", *([] if given.no_kl else ["KL"])]
    print_table(columns, rows.values())


if __name__ == "__main__":
    main()
