"""What calibration shows a codec that is learned under predictors: what it will store, and what that will be multiplied by."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Codec, Context, Exact, Predicted, Predictor, Role, Shape
from kvcal_artifacts.hf import AttentionSite, output_projection
from kvcal_artifacts.scheme import Frame, Windows

from ..capture.scan import LayerTaps, TapBatch
from .base import Carry
from .observed import window_statistics
from .transform import Moments


@dataclass(frozen=True)
class Seen:
    """One layer's keys or values on the training windows. predictor, inputs: what is taken off first; None: nothing.

    windows, frame: of the scheme. Each pass computes q, k, v and the predictions again: nothing of a layer is kept.
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
        """Of one head each, that a pass shows in all."""
        tokens: int = self.carry.tokens.stop - self.carry.tokens.start
        return self.carry.train * self.shape.heads * tokens

    def batches(self, also: Collection[str] = ()) -> Iterator[tuple[Tensor, TapBatch]]:
        """What is stored of some windows, residuals where there is a predictor: (B, H, coded tokens, D) float32. The batch has
        the layer's keys or values whole, and those of q, k, v that are named.
        """
        carry, own = self.carry, "k" if self.role == "key" else "v"
        stand_in = (
            None if self.predictor is None else Predicted(Exact(self.shape, self.role), self.predictor, self.inputs)
        )
        for batch in self.taps.batches({own, *also}, self.frame, rows=slice(0, carry.train)):
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

    def weighed(self, found: Moments, batch: TapBatch) -> None:
        """Add to the metric of `found` what a batch's keys will be multiplied by; values are weighed at the end."""
        if batch.q is not None:
            found.weigh(self.queries(batch))

    def moments(self) -> Moments:
        """Of what is stored, with the metric of what it will be multiplied by: queries, or rows of the output projection."""
        found: Moments | None = None
        for stored, batch in self.batches({"q"} if self.role == "key" else ()):
            found = found or Moments(self.shape, stored.device)
            with self.carry.timer("moments"):
                found.add(stored)
                self.weighed(found, batch)
        assert found is not None
        if self.role == "value" and (projection := output_projection(self.taps.site)) is not None:
            found.weigh_output(projection)
        return found


def at_distances(site: AttentionSite, queries: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    """Queries before RoPE (B, heads, T, D) as keys before RoPE meet them: each turned by its distance to a token before it.

    q at t and k at s score q . R(s - t) k = (R(t - s) q) . k. The distance of the query at t is drawn from 0 to t, seeded.
    """
    if rope is None:
        return queries
    length = queries.shape[2]
    drawn = torch.rand(length, generator=torch.Generator().manual_seed(0)) * torch.arange(1, length + 1)
    at = drawn.long().to(queries.device)
    cos, sin = (t[:, at] for t in rope)
    return site.rotate(queries, cos, sin)
