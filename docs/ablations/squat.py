"""SQuat: what its subspace is made of, measured. The paper's is of the prompt's queries; a cache's grows with the row.

    python docs/ablations/squat.py [--model tiny] [--windows 8] [--prompt 512]
    python docs/ablations/squat.py --rounding [--model ./smollm2-135m] [--windows 1] [--prompt 512]

Windows of 1024 tokens. A prompt comes in one call, the rest in steps of 32 tokens; KL is of the tokens behind the
prompt. Logit errors are of all keys that a cache would have packed, over the queries that see them packed.

--rounding: how exactly the corrections of Lemma 2 are computed, by strength (lambda). Keys after RoPE, the prompt's
subspace. Three columns of logit errors: the paper's recursion (Lemma 3) in float32 as the authors' public code runs it,
the codec, and a direct solve of Lemma 2 in float64; beside them the largest error of a correction matrix against the
direct solve's, over that one's largest entry.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from kvcal.capture.scan import Capture
from kvcal.cli.output import print_table
from kvcal.methods.squat import logit_squares, window_subspaces
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.text import sources, token_windows
from kvcal_artifacts import hf
from kvcal_artifacts.cache import KVCalCache, statistics
from kvcal_artifacts.cache.statistics.base import Statistic
from kvcal_artifacts.cache.statistics.prefixes import Prefixes
from kvcal_artifacts.cache.statistics.subspace import QuerySubspace, subspace
from kvcal_artifacts.codecs import Context, Squat, Uniform
from kvcal_artifacts.codecs.squat import responses
from kvcal_artifacts.scheme import FRAMES, Frame, LayerCodecs, Scheme, Windows

WINDOWS, LENGTH, STEP = Windows(0, 32, 32), 1024, 32
ROUNDINGS = ("recursion, float32", "codec", "solve, float64")


class PromptOnly(QuerySubspace):
    """The paper's: fitted once, on all of the first call, for every block of the row."""

    def observe(self, x: Tensor, at: Prefixes) -> Tensor | None:
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


def recursive_responses(basis: Tensor, steps: list[slice], ridge: float = 1e-7) -> list[Tensor]:
    """Lemma 2 and 3 in the precision of `basis` (..., R, D), the root of lambda times Q^: for each step -B_t H_t
    transposed, (..., g, D - stop), what `responses` gives in other operations. ridge: what the authors' code adds
    before it inverts.
    """
    eye = torch.eye(basis.shape[-1], dtype=basis.dtype)
    inverse = eye + basis.mT @ basis
    everything, made = torch.linalg.inv(inverse), []
    for here in reversed(steps):
        corner, side, own = (
            inverse[..., : here.stop, : here.stop],
            inverse[..., here.stop :, : here.stop],
            inverse[..., here.stop :, here.stop :],
        )
        inverse = corner - side.mT @ torch.linalg.inv(own + ridge * torch.eye(own.shape[-1], dtype=basis.dtype)) @ side
        made.append(-(everything[..., here.stop :, : here.stop] @ inverse[..., -(here.stop - here.start) :]).mT)
    return made[::-1]


def solved_responses(basis: Tensor, steps: list[slice]) -> list[Tensor]:
    """M_br M_rr^-1 by a solver, in the precision of `basis`."""
    whole = torch.eye(basis.shape[-1], dtype=basis.dtype) + basis.mT @ basis
    return [
        torch.linalg.solve(whole[..., here.stop :, here.stop :], whole[..., here.stop :, here]).mT for here in steps
    ]


def corrected(codec: Squat, keys: Tensor, moves: list[Tensor]) -> Tensor:
    """Keys (B, H, T, D) as they are rounded in the end, with products in the precision of `moves`."""
    keys = codec.shape.blocks(keys.float()).clone()
    for here, move in zip(codec._steps, moves, strict=True):
        error = (codec._rounded(keys[..., here]) - keys[..., here]).to(move.dtype)
        keys[..., here.stop :] = (keys[..., here.stop :].to(move.dtype) - error @ move[:, :, None]).float()
    return keys.flatten(2, 3)


def rounding_errors(model: Any, ids: Tensor, prompt: int, strength: float) -> tuple[dict[str, float], dict[str, float]]:
    """Logit errors, means over layers, and the largest relative errors of correction matrices, by how they are
    computed.
    """
    pair = scheme(model, "post_rope", strength).layers[0]
    assert pair is not None and isinstance(pair.key, Squat)
    codec, heads = pair.key, pair.key.shape.heads
    found, worst = dict.fromkeys(ROUNDINGS, 0.0), dict.fromkeys(ROUNDINGS, 0.0)
    packed = slice(0, (LENGTH - WINDOWS.recent) // WINDOWS.block * WINDOWS.block)
    with Capture(model, ids, device="cpu") as capture:
        for taps in capture:
            squares, pairs = dict.fromkeys(ROUNDINGS, 0.0), 0
            for batch in taps.batches({"q", "k"}, "post_rope"):
                assert batch.q is not None and batch.k is not None
                basis, keys = basis_of(batch.q, slice(0, prompt), heads), batch.k[:, :, packed]
                rooted = basis[:, :, 0].double() * strength**0.5
                moves = {
                    "recursion, float32": recursive_responses(rooted.float(), codec._steps),
                    "codec": responses(rooted, codec._steps),
                    "solve, float64": solved_responses(rooted, codec._steps),
                }
                for name, own in moves.items():
                    for one, exact in zip(own, moves["solve, float64"], strict=True):
                        off = float((one - exact).abs().max() / exact.abs().max().clamp_min(1e-30))
                        worst[name] = max(worst[name], off)
                made = {name: corrected(codec, keys, own) for name, own in moves.items()}
                made["codec"] = codec.corrected(keys, Context(stats={codec.statistic: basis}))
                errors = [codec.inner.encode_decode(x)[1] - keys for x in made.values()]
                totals, count = logit_squares(torch.unflatten(batch.q, 1, (heads, -1)), errors, WINDOWS)
                squares = {name: squares[name] + total for name, total in zip(made, totals, strict=True)}
                pairs += count
            for name, total in squares.items():
                found[name] += (total / pairs / codec.shape.dim) ** 0.5 / len(capture)
    return found, worst


def print_rounding(model: Any, ids: Tensor, prompt: int) -> None:
    rows = []
    for strength in (0.0, 1e-4, 1e-3, 1e-2, 1e-1):
        errors, worst = rounding_errors(model, ids, prompt, strength)
        off = (f"{worst[name]:.1e}" for name in ROUNDINGS[:2])
        rows.append([f"{strength:g}", *(f"{errors[name]:.4f}" for name in ROUNDINGS), *off])
    print_table(["lambda", *ROUNDINGS, *(f"matrix: {name}" for name in ROUNDINGS[:2])], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--text", default=None)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--strength", type=float, default=1e-3)
    parser.add_argument("--rounding", action="store_true", help="the recursion in float32 beside the exact solve")
    given = parser.parse_args()
    source = resolve(given.model)
    loaded = load_model(source, dtype="float32", device="cpu")
    text = given.text or sources.default_text(source, "evaluation")
    ids = token_windows.evaluation_windows(loaded.tokenizer, text, windows=given.windows, length=LENGTH).ids
    if given.rounding:
        print_rounding(loaded.model, ids, given.prompt)
        return
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
