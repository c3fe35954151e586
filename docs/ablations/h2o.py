"""What one token set for all heads and layers costs against H2O's own, a set for each kv head: KL on one text.

    python docs/ablations/h2o.py --model tiny --keep 0.2

A simulation: Transformers' DynamicCache holds everything, evicted tokens are hidden from attention, and nothing is
packed. The rule is storage/eviction.py's with 16-bit tokens; so the line `row` is what `kvcal eval --preset exact
--keep` prints.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, DynamicCache

from kvcal.commands.workbench import open_model
from kvcal.models import names
from kvcal.report.progress import progress
from kvcal.text import sources, token_windows
from kvcal_artifacts.scheme import HeavyHitters, Windows

SETS = {
    "row": (0, 2),
    "layer": (2,),
    "head": (),
}  # over which dimensions of (layer, row, kv head, token) scores are summed


@dataclass
class Simulation:
    """kept, mass: (layers, rows, kv heads, tokens so far)."""

    selection: HeavyHitters
    windows: Windows
    summed: tuple[int, ...]
    shape: tuple[int, int, int]
    kept: Tensor = field(init=False)
    mass: Tensor = field(init=False)
    left: int = 0  # tokens behind the sink that left the window
    recents: int = 0  # blocks of recent tokens before the window

    def __post_init__(self) -> None:
        self.kept, self.mass = torch.zeros(*self.shape, 0, dtype=torch.bool), torch.zeros(*self.shape, 0)

    def grow(self, count: int) -> None:
        new = (*self.shape, count)
        self.kept = torch.cat([self.kept, torch.ones(new, dtype=torch.bool)], 3)
        self.mass = torch.cat([self.mass, torch.zeros(new)], 3)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """(B, Q, heads, D)."""
        query, total = q.shape[2], k.shape[2]
        scores = (q.unflatten(1, (k.shape[1], -1)).flatten(2, 3) @ k.transpose(2, 3)).unflatten(
            2, (-1, query)
        ) * scaling
        hidden = torch.ones(query, total, dtype=torch.bool).triu(total - query + 1)
        hidden = hidden | ~self.kept[layer][:, :, None, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)  # (B, kv heads, group, Q, tokens)
        self.mass[layer] += weights.sum((2, 3))
        return (weights @ v[:, :, None]).flatten(1, 2).transpose(1, 2)

    def choose(self) -> None:
        w, seen = self.windows, self.kept.shape[3]
        flushed = (seen - w.sink - self.left - w.recent) // w.block
        if flushed <= 0:
            return
        self.left += flushed * w.block
        total, heavy = self.selection.budget(seen)
        heavy, window = max(heavy, w.sink), seen - w.sink - self.left
        self.recents = min(max(0, total - heavy - window) // w.block, self.recents + flushed)
        newest = window + self.recents * w.block
        room = max(total - newest, heavy) - w.sink
        scores = self.mass.sum(self.summed, keepdim=True).expand_as(self.mass) if self.summed else self.mass
        older = scores.masked_fill(~self.kept, -1)[..., w.sink : seen - newest]
        stays = torch.zeros_like(older, dtype=torch.bool)
        stays.scatter_(3, older.topk(min(room, older.shape[3]), -1).indices, True)
        self.kept[..., w.sink : seen - newest] &= stays


@torch.no_grad()
def run(model: Any, ids: Tensor, step: int, simulation: Simulation | None) -> list[Tensor]:
    """Log-probabilities of each step."""

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        assert simulation is not None
        return simulation.attend(module.layer_idx, q, k, v, scaling), None

    AttentionInterface.register("h2o_simulation", attention)
    model.set_attn_implementation("sdpa" if simulation is None else "h2o_simulation")
    cache, found = DynamicCache(config=model.config), []
    for part in ids.split(step, 1):
        if simulation is not None:
            simulation.grow(part.shape[1])
        found.append(functional.log_softmax(model(part, past_key_values=cache).logits.float(), -1))
        if simulation is not None:
            simulation.choose()
    return found


def divergence(model: Any, ids: Tensor, step: int, selection: HeavyHitters, batch: int) -> dict[str, float]:
    """Mean KL in nats to the full cache, by the kind of set."""
    config, totals, count = model.config, dict.fromkeys(SETS, 0.0), 0
    with progress("Simulating", total=len(SETS) * -(-len(ids) // batch)) as advance:
        for part in ids.split(batch):
            full = run(model, part, step, None)
            count += part.numel() - len(part)
            for name, summed in SETS.items():
                shape = (config.num_hidden_layers, len(part), config.num_key_value_heads)
                own = run(model, part, step, Simulation(selection, Windows(), summed, shape))
                pairs = [
                    (a, b)
                    for a, b in zip(torch.cat(own, 1).split(128, 1), torch.cat(full, 1).split(128, 1), strict=True)
                ]
                each = torch.cat(
                    [functional.kl_div(a, b, reduction="none", log_target=True).sum(-1) for a, b in pairs], 1
                )
                totals[name] += each[:, :-1].double().sum().item()
                advance()
    return {name: total / count for name, total in totals.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--text")
    parser.add_argument("--keep", type=float, default=0.2)
    parser.add_argument("--heavy", type=float, default=0.5)
    for name, default in (("length", 1024), ("windows", 16), ("step", 32), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    loaded = open_model(o.model, None, dtype="float32", device="cpu")
    text = o.text or sources.default_text(names.resolve(o.model, None), "evaluation")
    ids = token_windows.evaluation_windows(loaded.tokenizer, text, length=o.length, windows=o.windows, column=None).ids
    for name, kl in divergence(loaded.model, ids, o.step, HeavyHitters(o.keep, o.heavy), o.batch).items():
        print(f"one set a {name:5} KL {kl:.5f}")


if __name__ == "__main__":
    main()
