"""What calibration learns of a layer's keys and values. It has the run-time statistics that a cache would have when it
packs each block, what a layer stores on the training windows, and its moments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal_artifacts.cache.statistics import STATISTICS, statistic
from kvcal_artifacts.cache.statistics.prefixes import Prefixes
from kvcal_artifacts.codecs import Codec, Context, Exact, Predicted, Predictor, Role, Shape
from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.hf import AttentionSite, output_projection
from kvcal_artifacts.scheme import Frame, Windows
from kvcal_artifacts.storage.plan import Plan

from ..capture.scan import LayerTaps, TapBatch
from ..capture.shards import S, ShardSums
from .attention import squared_weights
from .base import Carry


def taps_of(stats: Iterable[str]) -> frozenset[str]:
    """Which of q, k the statistics of these names are of."""
    return frozenset(_wants(name)[0] for name in stats)  # q_pre is q, too


def _wants(name: str) -> str:
    kind = name.partition(":")[0]
    if kind not in STATISTICS:
        raise KVCalError(f"statistic {name!r}: known are {', '.join(STATISTICS)}")
    return STATISTICS[kind].wants


def window_statistics(
    codec: Codec, windows: Windows, frame: Frame, taps: LayerTaps, batch: TapBatch
) -> dict[str, Tensor]:
    """The codec's statistics (B, H, N or 1, ...) for the N coded blocks of whole windows.

    batch: of `frame`, so q (B, heads, T, D) is before or after RoPE with it, and k as the cache stores it. The last
    blocks of a window, which a cache would not pack yet, get the statistic of the whole window.
    """
    values: dict[str, Tensor] = {}
    for name in sorted(codec.stats):
        wants = _wants(name)
        x = batch.k if wants == "k" else batch.q
        assert x is not None
        if wants == "q" and frame == "pre_rope" and taps.rope is not None:
            x = taps.site.rotate(x, *taps.rope)
        if wants == "q_pre" and frame == "post_rope" and taps.rope is not None:
            raise KVCalError(f"statistic {name}: queries before RoPE are seen in the frame pre_rope only")
        blocks = statistic(name, codec.shape).observe(x, whole_window(x, windows))
        assert blocks is not None
        values[name] = blocks
    return values


def whole_window(x: Tensor, windows: Windows) -> Prefixes:
    """All blocks of windows (B, heads, T, D) that came in one piece."""
    rows, length = x.shape[0], x.shape[2]
    blocks = (length - windows.sink) // windows.block
    none = torch.zeros(rows, dtype=torch.long, device="cpu")
    return Prefixes(Plan(0, length, 0, 0, blocks, blocks, lengths=none, packed=none), windows, x.device)


@dataclass(frozen=True)
class TrainingData:
    """One layer's keys or values on the training windows. predictor, inputs: what is taken off first; None: nothing.

    windows, frame: of the scheme. Each pass computes q, k, v and the predictions again: nothing of a layer is stored.
    """

    layer: int
    role: Role
    windows: Windows
    frame: Frame
    taps: LayerTaps
    carry: Carry
    predictor: Predictor | None = None
    inputs: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        return self.carry.shape

    @property
    def vectors(self) -> int:
        """How many vectors, each of one head, a pass over the training windows yields."""
        tokens: int = self.carry.tokens.stop - self.carry.tokens.start
        return self.carry.train * self.shape.heads * tokens

    def batches(
        self, also: Collection[str] = (), sums: ShardSums[S] | None = None
    ) -> Iterator[tuple[Tensor, TapBatch]]:
        """What is stored of some windows, residuals where there is a predictor: (B, H, coded tokens, D) float32. The
        batch has the layer's keys or values whole, and those of q, k, v that are named.
        """
        carry, tap = self.carry, "k" if self.role == "key" else "v"
        stand_in = (
            None if self.predictor is None else Predicted(Exact(self.shape, self.role), self.predictor, self.inputs)
        )
        for batch in self.taps.batches({tap, *also}, self.frame, rows=slice(0, carry.train), sums=sums):
            x = batch.k if self.role == "key" else batch.v
            assert x is not None
            with carry.timer("moments"):
                stored = carry.coded(x).float()
                if stand_in is not None:
                    context = carry.context(self.layer, self.inputs, batch.rows)
                    stored = stored - stand_in.predict(context, stand_in.predictor.working())
            yield stored, batch

    def queries(self, batch: TapBatch) -> Tensor:
        """A batch's queries (B, heads, T, D) as stored keys meet them."""
        assert batch.q is not None
        return at_distances(self.taps.site, batch.q, self.taps.rope) if self.frame == "pre_rope" else batch.q

    def context(self, codec: Codec, batch: TapBatch) -> Context:
        """What encoding these windows by `codec` reads: the run-time statistics that a cache would know."""
        return Context(self.layer, stats=window_statistics(codec, self.windows, self.frame, self.taps, batch))

    def weighed(self, moments: Moments, batch: TapBatch) -> None:
        """Add to the metric of `moments` what a batch's keys will be multiplied by; values are weighed at the end."""
        if batch.q is not None:
            moments.weigh(self.queries(batch))

    def attention(self, batch: TapBatch) -> Tensor:
        """How much attention coded tokens get: `squared_weights`, (B, H, coded tokens) float64. batch: with q and k.

        Sinks and soft caps of scores, which some models have, are left out of it.
        """
        q, k, site = batch.q, batch.k, self.taps.site
        assert q is not None and k is not None
        if self.frame == "pre_rope" and self.taps.rope is not None:
            q, k = (site.rotate(x, *self.taps.rope) for x in (q, k))
        weights = squared_weights(q, k, self.windows, float(getattr(site.module, "scaling", self.shape.dim**-0.5)))
        return weights[:, :, self.carry.tokens]

    def moments(self, attended: bool = False) -> Moments:
        """Moments of what is stored, with the metric of what it will be multiplied by: queries or output projection
        rows.

        attended: also their centre by attention, unless values are stored of a layer whose queries cannot be had.
        """
        sums = ShardSums(lambda: Moments(self.shape, self.taps.device))
        attended = attended and self.taps.site.odd is None
        for stored, batch in self.batches({"q", "k"} if attended else {"q"} if self.role == "key" else (), sums):
            with self.carry.timer("moments"):
                sums.part.add(stored)
                if attended:
                    sums.part.attend(stored, self.attention(batch))
                if self.role == "key":
                    self.weighed(sums.part, batch)
        moments = sums.total
        if self.role == "value" and (projection := output_projection(self.taps.site)) is not None:
            moments.weigh_output(projection)
        return moments


def at_distances(site: AttentionSite, queries: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    """Queries before RoPE (B, heads, T, D) as keys before RoPE meet them: each is rotated by its distance to a token
    before it.

    q at t and k at s score q . R(s - t) k = (R(t - s) q) . k. The distance of the query at t is drawn from 0 to t,
    seeded.
    """
    if rope is None:
        return queries
    length = queries.shape[2]
    drawn = torch.rand(
        length, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    ) * torch.arange(1, length + 1, device="cpu")
    at = drawn.long().to(queries.device)
    cos, sin = (t[:, at] for t in rope)
    return site.rotate(queries, cos, sin)


class Moments:
    """Sums over training tokens, float64, per kv head."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        size = (shape.heads, shape.dim)
        self.count = 0
        self.total = torch.zeros(size, dtype=torch.float64, device=device)
        self.square = torch.zeros(*size, shape.dim, dtype=torch.float64, device=device)
        self.weight = torch.zeros_like(self.square)
        self.attended = torch.zeros_like(self.total)
        self.attention = torch.zeros_like(self.total[:, :1])

    def add(self, x: Tensor) -> None:
        """Add tokens x (B, H, T, D), as they will be stored."""
        rows = x.movedim(1, 0).flatten(1, 2).double()
        self.count += rows.shape[1]
        self.total += rows.sum(1)
        self.square += rows.mT @ rows

    def merge(self, other: Moments) -> None:
        """Add the sums of other tokens."""
        self.count += other.count
        self.total += other.total
        self.square += other.square
        self.weight += other.weight
        self.attended += other.attended
        self.attention += other.attention

    def attend(self, x: Tensor, weights: Tensor) -> None:
        """Add to `centre` tokens x (B, H, T, D), as they will be stored, by these weights (B, H, T)."""
        self.attended += (weights[..., None] * x).sum((0, 2))
        self.attention += weights.sum((0, 2))[:, None]

    def weigh(self, queries: Tensor) -> None:
        """Weigh keys by queries (B, H * group, T, D), in the frame in which keys are stored."""
        wide = torch.unflatten(queries, 1, (len(self.total), -1)).movedim(1, 0).flatten(1, 3).double()
        self.weight += wide.mT @ wide

    def weigh_output(self, projection: Tensor) -> None:
        """Weigh values by projection (hidden, heads * D), by whose rows attention outputs are multiplied."""
        heads, dim = self.total.shape
        parts = projection.double().unflatten(1, (heads, -1, dim)).permute(1, 2, 0, 3).flatten(1, 2)
        self.weight += parts.mT @ parts

    def covariance(self) -> tuple[Tensor, Tensor]:
        """Covariance (H, D, D) and mean (H, D)."""
        mean = self.total / max(1, self.count)
        return self.square / max(1, self.count) - mean[:, :, None] * mean[:, None], mean

    def centre(self) -> Tensor:
        """Mean (H, D) of tokens by the weights of `attend`; of all tokens alike where there is no weight."""
        mean = self.total / max(1, self.count)
        return torch.where(self.attention > 0, self.attended / self.attention.clamp_min(1e-300), mean)

    def spread(self, centre: Tensor) -> Tensor:
        """Second moment (H, D, D) of tokens less the centre (H, D)."""
        covariance, mean = self.covariance()
        offset = mean - centre
        return covariance + offset[:, :, None] * offset[:, None]

    def metric(self) -> Tensor:
        """(H, D, D), the identity where nothing was weighed."""
        eye = torch.eye(self.weight.shape[-1], dtype=torch.float64, device=self.weight.device).expand_as(self.weight)
        return self.weight if bool(self.weight.any()) else eye
