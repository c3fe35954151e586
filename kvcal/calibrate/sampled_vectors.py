"""The vectors that codebooks are trained on: a seeded sample of every layer's keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ..capture.ranks import ALONE, Ranks
from ..capture.scan import Capture, LayerTaps
from ..capture.shards import ShardSums
from ..methods.hashing import spread
from ..methods.training_vectors import VectorShards
from ..methods.vqkv import VQKV, band_split, two_scales
from ..report.progress import tracked

# Held-out vectors: a 32nd of the training ones within these bounds.
HOLDOUT_PART, HOLDOUT_LEAST, HOLDOUT_MOST = 32, 4096, 1 << 17
WORKING = {"cuda": torch.bfloat16}  # dtype of training vectors by device; elsewhere float32
Say = Callable[[str], None]


@dataclass
class Vectors:
    """Sampled vectors of all layers, layer after layer, divided by their layer's scales.

    keys, values (n, D): those that this rank holds, in the working dtype: bfloat16 on a GPU, float32 elsewhere.
    holdout_* (m, D) float32: every rank has them. train_of: each layer's among keys and values. totals: how many all
    ranks have of each layer. holdout_layer, holdout_head: of each held-out vector.
    """

    keys: Tensor
    values: Tensor
    holdout_keys: Tensor
    holdout_values: Tensor
    holdout_layer: Tensor
    holdout_head: Tensor
    train_of: list[slice]
    holdout_of: list[slice]
    totals: list[int]
    rotary: int
    scales: list[dict[str, Tensor | None]] = field(default_factory=list)
    probe: tuple[float, ...] = ()
    ranks: Ranks = ALONE


def collect(method: VQKV, capture: Capture, train: int, heads: int, say: Say = lambda line: None) -> Vectors:
    """A Collection of all layers of a capture that serves nothing else."""
    collection = Collection(method, train, heads, len(capture), capture.length, capture.shards.ranks)
    for taps in tracked(capture, "Reading layers", len(capture)):
        collection.take(collection.sample(taps))
    return collection.vectors(say)


class Collection:
    """A seeded sample of at most method.vectors keys, and as many values, from the first `train` windows, and a
    held-out one from the others. Tokens of the sink are never taken. length: tokens a window; ranks: the processes that
    divide the vectors.
    """

    def __init__(self, method: VQKV, train: int, heads: int, layers: int, length: int, ranks: Ranks = ALONE) -> None:
        self.method, self.train, self.heads, self.layers, self.ranks = method, train, heads, layers, ranks
        self.parts: list[Sample] = []
        self.holdout = max(HOLDOUT_LEAST, min(HOLDOUT_MOST, method.vectors // HOLDOUT_PART))
        every = train * heads * (length - method.sink)  # vectors of a layer
        self.totals = [min(every, _share(method.vectors, layers, layer)) for layer in range(layers)]

    @property
    def rotary(self) -> int:
        """The rotary dimensions of the first layer with RoPE; 0 without one."""
        return next((part.rotary for part in self.parts if part.rotary), 0)

    @property
    def probe(self) -> tuple[float, ...]:
        """The fingerprint's, of what was collected."""
        return tuple(number for part in self.parts for number in part.probe)

    def sample(self, taps: LayerTaps) -> Sample:
        """The next layer's vectors, all of them on every rank; an argument for `take`."""
        before = self.rotary
        sample = LayerSample(self.method, taps, self.train, self.heads, self.layers, self.holdout).gather()
        if sample.rotary and not before:
            none = torch.zeros(taps.site.head_dim, dtype=torch.float32, device="cpu")
            # Refuses what does not fit its pairs.
            band_split(none, none, self.method.high, sample.rotary, self.method.split)
        sample.probe = taps.probe
        return sample

    def take(self, sample: Sample) -> None:
        """Hold the next layer's sample, on the device of the first; of training vectors those that are this rank's."""
        layer = len(self.parts)
        device = self.parts[0].keys.device if self.parts else sample.keys.device
        if self.method.shared:
            shards, start = VectorShards(sum(self.totals), self.ranks), sum(self.totals[:layer])
        else:
            shards, start = VectorShards(self.totals[layer], self.ranks), 0
        self.parts.append(
            replace(
                sample,
                keys=shards.select(sample.keys, start).to(device),
                values=shards.select(sample.values, start).to(device),
                holdout_keys=sample.holdout_keys.to(device),
                holdout_values=sample.holdout_values.to(device),
                holdout_head=sample.holdout_head.to(device),
            )
        )

    def vectors(self, say: Say) -> Vectors:
        """The whole sample; the parts are freed."""
        rotary, probe = self.rotary, self.probe
        parts, self.parts = self.parts, []
        vectors = Vectors(
            keys=torch.cat([p.keys for p in parts]),
            values=torch.cat([p.values for p in parts]),
            holdout_keys=torch.cat([p.holdout_keys for p in parts]),
            holdout_values=torch.cat([p.holdout_values for p in parts]),
            holdout_layer=torch.cat([torch.full_like(p.holdout_head, layer) for layer, p in enumerate(parts)]),
            holdout_head=torch.cat([p.holdout_head for p in parts]),
            train_of=list(_runs([len(p.keys) for p in parts])),
            holdout_of=list(_runs([len(p.holdout_keys) for p in parts])),
            totals=self.totals,
            rotary=rotary,
            scales=[p.scales for p in parts],
            probe=probe,
            ranks=self.ranks,
        )
        if sum(self.totals) < self.method.vectors:
            say(f"note: {sum(self.totals)} vectors, all that these windows have, not {self.method.vectors}")
        return vectors


def _runs(counts: list[int]) -> Iterator[slice]:
    at = 0
    for count in counts:
        yield slice(at, at + count)
        at += count


@dataclass
class Picked:
    """keys, values (n, D) and the head of each (n,), on the device."""

    keys: Tensor
    values: Tensor
    head: Tensor


@dataclass
class Sample:
    """One layer's part of Vectors, with their dtypes.

    scales: (H, D) or None, on the CPU. rotary: dimensions that RoPE rotates; 0 without it. probe: of the layer's key
    weights; empty where the fingerprint does not look at it.
    """

    keys: Tensor
    values: Tensor
    holdout_keys: Tensor
    holdout_values: Tensor
    holdout_head: Tensor
    scales: dict[str, Tensor | None]
    rotary: int = 0
    probe: tuple[float, ...] = ()

    VECTORS = ("keys", "values", "holdout_keys", "holdout_values", "holdout_head")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The sample's tensors by name, scales as scales.ROLE."""
        scales = {f"scales.{role}": scale for role, scale in self.scales.items() if scale is not None}
        return {name: getattr(self, name) for name in self.VECTORS} | scales

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass
class _Taken:
    """What a pass over windows takes of a layer: vectors for training and held out, in window order, and sums of
    squares float64 (H, D) of k, v and q.
    """

    picked: dict[str, list[Picked]] = field(default_factory=lambda: {"train": [], "held": []})
    squares: dict[str, Tensor] = field(default_factory=dict)

    def add(self, tap: str, square: Tensor) -> None:
        self.squares[tap] = self.squares[tap] + square if tap in self.squares else square

    def merge(self, other: _Taken) -> None:
        for name, picked in other.picked.items():
            self.picked[name] += picked
        for tap, square in other.squares.items():
            self.add(tap, square)


class LayerSample:
    """One layer's sample, in one pass over the windows."""

    def __init__(self, method: VQKV, taps: LayerTaps, train: int, heads: int, layers: int, holdout: int) -> None:
        self.method, self.taps, self.windows, self.heads = method, taps, train, heads
        self.tokens = taps.length - method.sink
        self.places = {
            "train": self._places("train", 0, train, _share(method.vectors, layers, taps.place)),
            "held": self._places("held", train, taps.windows, _share(holdout, layers, taps.place)),
        }

    def gather(self) -> Sample:
        """Run the layer once; what was picked, divided by its scales."""
        sums = ShardSums(_Taken)
        for batch in self.taps.batches(self.method.taps, self.method.frame, advance=True, sums=sums):
            assert batch.k is not None and batch.v is not None
            for name, places in self.places.items():
                sums.part.picked[name].append(self._pick(batch.k, batch.v, places, batch.rows))
            fitted = max(0, self.windows - batch.rows.start)
            for tap, x in (("k", batch.k), ("v", batch.v), ("q", batch.q)):
                if x is not None and fitted:
                    sums.part.add(tap, self._squares(x[:fitted]))
        taken = sums.total
        mean = {name: total / (self.windows * self.tokens) for name, total in taken.squares.items()}
        self.scales = two_scales(self.method, mean["k"], mean["v"], mean.get("q"))
        working = WORKING.get(self.taps.device.type, torch.float32)
        train, holdout = self._scaled(taken.picked["train"], working), self._scaled(taken.picked["held"], torch.float32)
        scales = {name: None if s is None else s.cpu() for name, s in self.scales.items()}
        rotary = 0 if self.taps.rope is None else self.taps.rope[0].shape[-1]
        return Sample(train.keys, train.values, holdout.keys, holdout.values, holdout.head, scales, rotary)

    def _places(self, name: str, first: int, stop: int, count: int) -> Tensor:
        """Sorted numbers of (window, head, token) among all, windows counted from the first of the text."""
        whole = (stop - first) * self.heads * self.tokens
        label = f"{self.method.training.seed}:{name}:{self.taps.index}"
        places = np.sort(spread(whole, min(count, whole), label).numpy())  # in a third of torch's time
        return torch.from_numpy(places) + first * self.heads * self.tokens

    def _pick(self, keys: Tensor, values: Tensor, places: Tensor, rows: slice) -> Picked:
        unit = self.heads * self.tokens
        low, high = torch.searchsorted(places, torch.tensor([rows.start * unit, rows.stop * unit], device="cpu"))
        here = (places[low:high] - rows.start * unit).to(keys.device)
        window, head, token = here // unit, here // self.tokens % self.heads, here % self.tokens + self.method.sink
        return Picked(keys[window, head, token], values[window, head, token], head)

    def _squares(self, x: Tensor) -> Tensor:
        """Sum of squares over windows and coded tokens, the mean over query heads that share a kv head: float64 (H,
        D).
        """
        grouped = x[:, :, self.method.sink :].unflatten(1, (self.heads, -1))
        total: Tensor = grouped.float().square().sum(3).double().sum(0).mean(1)
        return total

    def _scaled(self, parts: list[Picked], dtype: torch.dtype) -> Picked:
        head = torch.cat([p.head for p in parts])
        scaled = {}
        for role, pieces in (("key", [p.keys for p in parts]), ("value", [p.values for p in parts])):
            x, scale = torch.cat(pieces).float(), self.scales[role]
            scaled[role] = (x if scale is None else x / scale.to(x.device).float()[head]).to(dtype)
        return Picked(scaled["key"], scaled["value"], head)


def _share(total: int, parts: int, index: int) -> int:
    """How many of `total` fall to one of so many parts: they differ by at most one."""
    return total // parts + (index < total % parts)
