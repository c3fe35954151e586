"""SQuat: what its subspace is made of, measured. The paper's is of the prompt's queries; a cache's grows with the row.

    python docs/ablations/squat.py [--model tiny] [--windows 8] [--prompt 512]

Windows of 1024 tokens. A prompt comes in one call, the rest in steps of 32 tokens; KL is of the tokens behind the prompt.
Logit errors are of all keys that a cache would have packed, over the queries that see them packed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from kvcal import corpus
from kvcal.capture import Capture
from kvcal.cli.output import print_table
from kvcal.methods.squat import logit_squares, window_subspaces
from kvcal.models import load_model, resolve
from kvcal_artifacts import hf, statistics
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import Context, Squat, Uniform
from kvcal_artifacts.scheme import FRAMES, Frame, LayerCodecs, Scheme, Windows
from kvcal_artifacts.statistics import QuerySubspace, Statistic, subspace

WINDOWS, LENGTH, STEP = Windows(0, 32, 32), 1024, 32


class PromptOnly(QuerySubspace):
    """The paper's: fitted once, on all of the first call, for every block of the row."""

    def observe(self, x: Tensor, at: statistics.Prefixes) -> Tensor | None:
        if not self.state:
            q = self.grouped(x).flatten(2, 3).double()
            self.state["fitted"] = subspace(q.mT @ q, self.rank).float()
        return self.state["fitted"][:, :, None] if at.flush else None


def scheme(model: Any, frame: Frame, strength: float, queries: str = "post_rope") -> Scheme:
    shape = hf.layer_shape(hf.config_of(model), WINDOWS.block)
    inner, value = Uniform(shape, "key", 2, 32, "token"), Uniform(shape, "value", 2, 32, "channel")
    key = Squat(inner, strength=strength, channels=shape.dim // 2, queries=queries)
    return Scheme(WINDOWS, frame, (LayerCodecs(key, value),) * model.config.num_hidden_layers)


@torch.no_grad()
def log_probabilities(model: Any, ids: Tensor, cache: Any, prompt: int) -> Tensor:
    """(B, tokens behind the prompt, vocabulary)."""
    model(ids[:, :prompt], past_key_values=cache)
    made = [model(part, past_key_values=cache).logits for part in ids[:, prompt:].split(STEP, 1)]
    return functional.log_softmax(torch.cat(made, 1), -1)


def kl(model: Any, ids: Tensor, prompt: int, made: Scheme, own: type[Statistic]) -> float:
    """Mean KL to full precision; own: what the cache takes for its query subspace."""
    total = 0.0
    before, statistics.STATISTICS["query_subspace"] = statistics.STATISTICS["query_subspace"], own
    try:
        for window in ids.split(1):
            full = log_probabilities(model, window, DynamicCache(config=model.config), prompt)
            with KVCalCache(made, model) as cache:
                found = log_probabilities(model, window, cache, prompt)
            total += float(functional.kl_div(found, full, reduction="none", log_target=True).sum(-1).mean())
    finally:
        statistics.STATISTICS["query_subspace"] = before
    return total / len(ids)


def basis_of(q: Tensor, tokens: slice, heads: int) -> Tensor:
    """(B, H, 1, 5, D) of these tokens' queries."""
    wide = torch.unflatten(q, 1, (heads, -1))[:, :, :, tokens].flatten(2, 3).double()
    return subspace(wide.mT @ wide, 5).float()[:, :, None]


def logit_errors(model: Any, ids: Tensor, prompt: int, frame: Frame, strength: float) -> dict[str, float]:
    """Root mean square error of logits, mean over layers, by what the subspace is made of."""
    pair = scheme(model, frame, strength).layers[0]
    assert pair is not None and isinstance(pair.key, Squat)
    codec, heads = pair.key, pair.key.shape.heads
    bases: dict[str, Callable[[Tensor], Tensor]] = {
        "none": lambda q: torch.zeros(len(q), heads, 1, 5, q.shape[3]),
        "so far": lambda q: window_subspaces(q, codec.shape, WINDOWS, codec.statistic),
        "prompt": lambda q: basis_of(q, slice(0, prompt), heads),
        "window": lambda q: basis_of(q, slice(None), heads),
    }
    found = dict.fromkeys(bases, 0.0)
    with Capture(model, ids, device="cpu") as capture:
        for taps in capture:
            squares, pairs = dict.fromkeys(bases, 0.0), 0
            for batch in taps.batches({"q", "k"}, "pre_rope"):
                assert batch.q is not None and batch.k is not None and taps.rope is not None
                packed = slice(0, (LENGTH - WINDOWS.recent) // WINDOWS.block * WINDOWS.block)
                q = taps.site.rotate(batch.q, *taps.rope)
                k = (taps.site.rotate(batch.k, *taps.rope) if frame == "post_rope" else batch.k)[:, :, packed]
                errors = []
                for basis in bases.values():
                    error = codec.encode_decode(k, Context(stats={codec.statistic: basis(q)}))[1] - k
                    turned = taps.site.rotate(error, *(t[:, packed] for t in taps.rope))
                    errors.append(turned if frame == "pre_rope" else error)
                totals, count = logit_squares(torch.unflatten(q, 1, (heads, -1)), errors, WINDOWS)
                squares = {name: squares[name] + total for name, total in zip(bases, totals, strict=True)}
                pairs += count
            for name, total in squares.items():
                found[name] += (total / pairs / codec.shape.dim) ** 0.5 / len(capture)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--text", default=None)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--strength", type=float, default=1e-3)
    given = parser.parse_args()
    source = resolve(given.model)
    loaded = load_model(source, dtype="float32", device="cpu")
    text = given.text or corpus.default_text(source, "evaluation")
    ids = corpus.evaluation_windows(loaded.tokenizer, text, windows=given.windows, length=LENGTH).ids
    rows = []
    for frame in FRAMES:
        errors = logit_errors(loaded.model, ids, given.prompt, frame, given.strength)
        made = scheme(loaded.model, frame, given.strength)
        divergence = {
            "none": kl(loaded.model, ids, given.prompt, scheme(loaded.model, frame, 0.0), QuerySubspace),
            "so far": kl(loaded.model, ids, given.prompt, made, QuerySubspace),
            "prompt": kl(loaded.model, ids, given.prompt, made, PromptOnly),
        }
        rows += [
            [frame, name, f"{error:.4f}", f"{divergence[name]:.5f}" if name in divergence else ""]
            for name, error in errors.items()
        ]
    print_table(["keys", "subspace of", "logit error", "KL"], rows)


if __name__ == "__main__":
    main()
