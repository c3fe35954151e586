"""What compressing one layer's keys and values does to its attention outputs, with the windows and statistics of a
cache.

A query at position t sees block n decoded if the row had sink + (n + 1) * block + recent tokens before it. So it is in
a cache that is called token by token. All other keys and values are exact. Some queries of each window are enough.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcal_artifacts.cache.statistics import statistic
from kvcal_artifacts.cache.statistics.prefixes import Prefixes
from kvcal_artifacts.codecs import Codec, Context, Shape
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.hf import AttentionSite
from kvcal_artifacts.scheme import Windows
from kvcal_artifacts.storage.attention_mass import SCORES
from kvcal_artifacts.storage.ledger import Ledger

from ..capture.scan import TapBatch

QUERIES = 64  # of each window, evenly spaced from where the first block is packed


@dataclass(frozen=True)
class Probe:
    """One layer, some windows, after RoPE. q (B, heads, S, D): the sampled queries, at positions `at` (S,) int64.

    k, v: (B, H, T, D). stats: what the codecs read, (B, H, N, ...) for the N blocks that a cache packs of T tokens.
    scaling: of the scores.
    """

    layer: int
    windows: Windows
    q: Tensor
    at: Tensor
    k: Tensor
    v: Tensor
    stats: dict[str, Tensor]
    scaling: float

    @property
    def packed(self) -> slice:
        """Tokens that a cache packs of the T."""
        return slice(
            self.windows.sink, self.windows.sink + blocks_of(self.windows, self.k.shape[2]) * self.windows.block
        )

    def to(self, device: torch.device | str) -> Probe:
        return replace(
            self,
            q=self.q.to(device),
            at=self.at.to(device),
            k=self.k.to(device),
            v=self.v.to(device),
            stats={name: x.to(device) for name, x in self.stats.items()},
        )

    def rows(self, first: int, end: int | None = None) -> Probe:
        """The windows from `first` on, up to `end`."""
        stats = {name: x[first:end] for name, x in self.stats.items()}
        return replace(self, q=self.q[first:end], k=self.k[first:end], v=self.v[first:end], stats=stats)

    def context(self) -> Context:
        return Context(self.layer, stats=self.stats)

    def outputs(self, keys: Tensor | None = None, values: Tensor | None = None) -> Tensor:
        """Attention outputs (B, H, group, S, D) float32 with these instead of the packed tokens' keys and values."""
        here, length = self.packed, self.k.shape[2]
        heads = self.k.shape[1]
        q = self.q.float().unflatten(1, (heads, -1)).flatten(2, 3) * self.scaling  # (B, H, group * S, D)
        scores = _by_query(q @ self.k.float().transpose(-1, -2), self.at)
        late = self._late()
        if keys is not None:
            packed_scores = _by_query(q @ keys.transpose(-1, -2), self.at)
            scores[..., here] = torch.where(late, packed_scores, scores[..., here])
        future = torch.arange(length, device=self.at.device) > self.at[:, None]
        weights = scores.masked_fill_(future, float("-inf")).softmax(-1)
        if values is None:
            return self._heads(weights.flatten(2, 3) @ self.v.float())
        old = torch.where(late, weights[..., here], 0)
        weights[..., here] -= old
        return self._heads(weights.flatten(2, 3) @ self.v.float() + old.flatten(2, 3) @ values)

    def _heads(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, 2, (-1, len(self.at)))

    def _late(self) -> Tensor:
        """(S, packed tokens): whether a query finds that token's block packed."""
        w, count = self.windows, blocks_of(self.windows, self.k.shape[2])
        due = w.sink + (torch.arange(count, device=self.at.device) + 1) * w.block + w.recent
        return (due <= self.at[:, None]).repeat_interleave(w.block, 1)

    def decoded(self, codec: Codec) -> Tensor:
        """The packed tokens' keys or values as the codec gives them back: (B, H, tokens, D) float32."""
        x = (self.k if codec.role == "key" else self.v)[:, :, self.packed]
        return codec.decode(codec.encode(x, self.context()), self.context())


def _by_query(scores: Tensor, at: Tensor) -> Tensor:
    """(B, H, group * S, T) -> (B, H, group, S, T)."""
    return torch.unflatten(scores, 2, (-1, len(at)))


def blocks_of(windows: Windows, length: int) -> int:
    """Blocks that a cache has packed before the last of `length` tokens comes."""
    return max(0, (length - 1 - windows.sink - windows.recent) // windows.block)


def probe(
    batch: TapBatch, layer: int, site: AttentionSite, shape: Shape, windows: Windows, stats: frozenset[str]
) -> Probe:
    """Sample a layer's attention from its q, k, v (frame post_rope). Raises UsageError where the windows are too short
    to pack anything.
    """
    assert batch.q is not None and batch.k is not None and batch.v is not None
    length = batch.k.shape[2]
    count = blocks_of(windows, length)
    if not count:
        first = windows.sink + windows.block + windows.recent
        raise UsageError(
            f"windows of {length} tokens fit into sink {windows.sink}, block {windows.block} and recent "
            f"{windows.recent}: "
            f"nothing would be packed; use --length {first + 1} or more"
        )
    at = _sampled_queries(windows, length).to(batch.q.device)
    scaling = float(getattr(site.module, "scaling", shape.dim**-0.5))
    statistics = _statistics(batch, shape, windows, stats, count)
    return Probe(layer, windows, batch.q[:, :, at], at, batch.k, batch.v, statistics, scaling)


def _sampled_queries(windows: Windows, length: int) -> Tensor:
    """Positions of queries that find a block packed, evenly spaced: int64, QUERIES at most, none in short windows."""
    first = windows.sink + windows.block + windows.recent
    count = max(0, min(QUERIES, length - first))
    return torch.linspace(first, length - 1, count, dtype=torch.float64, device="cpu").round().long()


def squared_weights(q: Tensor, k: Tensor, windows: Windows, scaling: float) -> Tensor:
    """Squares of the attention weights that tokens get once they are packed, summed over the sampled queries of a kv
    head: (B, H, T) float64.

    q (B, heads, T, D), k (B, H, T, D): after RoPE. scaling: of the scores. Errors of tokens are about independent, so
    that of an attention output is the sum of these squares times theirs. At most SCORES weights are in memory at a
    time, or those of one query. All are 0 where windows are too short to pack anything.
    """
    heads, length = k.shape[1], k.shape[2]
    token = torch.arange(length, device=k.device)
    due = windows.sink + ((token - windows.sink) // windows.block + 1) * windows.block + windows.recent
    squares = torch.zeros(*k.shape[:3], dtype=torch.float64, device=k.device)
    keys = k.float().transpose(-1, -2)
    sampled = _sampled_queries(windows, length).to(k.device)
    step = max(1, SCORES // (q.shape[:2].numel() * length))
    for at in sampled.split(step) if len(sampled) else ():
        queries = torch.unflatten(q[:, :, at].float(), 1, (heads, -1)).flatten(2, 3) * scaling
        scores = torch.unflatten(queries @ keys, 2, (-1, len(at)))  # (B, H, group, queries, T)
        weights = scores.masked_fill_(token > at[:, None], float("-inf")).softmax(-1)
        hidden = (due > at[:, None]) | (token < windows.sink)
        squares += weights.square().masked_fill(hidden, 0).sum((2, 3), dtype=torch.float64)
    return squares


def _statistics(
    batch: TapBatch, shape: Shape, windows: Windows, names: frozenset[str], count: int
) -> dict[str, Tensor]:
    """Return the statistics that a cache would hand to encode(): of the tokens before each block is due."""
    assert batch.q is not None and batch.k is not None
    plan = Ledger(windows).begin(batch.k.shape[0], batch.k.shape[2], None)
    at, values = Prefixes(plan, windows, batch.k.device), {}
    for name in sorted(names):
        observer = statistic(name, shape)
        if observer.wants == "q_pre":
            raise KVCalError(f"statistic {name}: of queries before RoPE, which are not at hand here")
        blocks = observer.observe(batch.q if observer.wants == "q" else batch.k, at)
        assert blocks is not None
        values[name] = blocks[:, :, :count]
    return values


@dataclass
class OutputError:
    """Relative squared error of attention outputs: |o - o'|^2 / |o|^2 over all windows, heads and sampled queries."""

    error: float = 0.0
    total: float = 0.0

    def add(self, exact: Tensor, output: Tensor) -> None:
        self.error += float((exact - output).double().square().sum())
        self.total += float(exact.double().square().sum())

    def merge(self, other: OutputError) -> None:
        """Add the sums of other windows."""
        self.error += other.error
        self.total += other.total

    @property
    def value(self) -> float:
        return self.error / max(self.total, 1e-30)
