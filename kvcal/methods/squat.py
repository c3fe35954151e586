"""SQuat (Wang et al. 2025): keys rounded so that errors stay out of the subspace in which queries lie. Values as
KIVI's.

The paper needs no calibration. What is fitted here is a subspace per kv head, from queries on text, to be used instead
of the row's own or with it. On held-out windows it is measured how well subspaces hold unseen queries (Figures 2 and
6). So is the error of attention logits, also over a grid of settings (Table 3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvcal_artifacts import codecs
from kvcal_artifacts.cache.statistics import statistic
from kvcal_artifacts.cache.statistics.prefixes import Prefixes, due_tokens
from kvcal_artifacts.cache.statistics.subspace import principal, subspace
from kvcal_artifacts.checked import Json
from kvcal_artifacts.codecs import Context, Shape, Uniform
from kvcal_artifacts.codecs.squat import CHOICES, LEAST
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.presets import divisor
from kvcal_artifacts.scheme import FRAMES, Frame, LayerCodecs, Windows
from kvcal_artifacts.storage.ledger import Ledger

from ..capture.scan import LayerTaps
from ..capture.shards import ShardSums
from .base import Carry, HoldoutError, LayerFit, flat, summed

DEVIATION_RANKS = (1, 2, 5, 10, 20, 30, 40, 60, 80, 100, 120)
# Table 3's grid; over the root of the length, strengths that do the same to a few thousand queries
SEARCH_RANKS = (5, 10, 20, 40, 60)
SEARCH_STRENGTHS = {"paper": (1e-4, 5e-4, 1e-3, 1e-2, 1e-1), "length": (0.03, 0.1, 0.3, 1.0, 3.0)}

# Appendix D.2: rank, strength, channels a step
PAPER = (5, 1e-3, 64)
PAPER_MODELS: dict[tuple[str, str, Frame], tuple[int, float, int]] = {
    ("longbench", "llama-2-7b", "pre_rope"): (5, 1e-3, 32),
    ("longbench", "llama-2-7b", "post_rope"): (40, 1e-3, 64),
    ("longbench", "llama-3.1-8b-instruct", "pre_rope"): (60, 5e-4, 32),
    ("longbench", "llama-3.1-8b-instruct", "post_rope"): (10, 5e-4, 64),
    ("longbench", "mistral-7b-instruct-v0.3", "pre_rope"): (20, 5e-4, 64),
    ("longbench", "mistral-7b-instruct-v0.3", "post_rope"): (5, 1e-3, 64),
    ("math-500", "r1-distill-llama-8b", "pre_rope"): (40, 5e-4, 64),
    ("math-500", "r1-distill-llama-8b", "post_rope"): (40, 5e-4, 64),
}
TASKS = ("lm-eval", "longbench", "math-500")


def paper_settings(task: str, model: str, frame: Frame) -> tuple[int, float, int]:
    """(rank, strength, channels) of Appendix D.2; model: a short name of `kvcal models`."""
    if task not in TASKS:
        raise UsageError(f"--settings {task}: allowed are {', '.join(TASKS)}")
    if task == "lm-eval":
        return PAPER
    if (task, model, frame) not in PAPER_MODELS:
        names = sorted({name for kind, name, _ in PAPER_MODELS if kind == task})
        raise UsageError(f"--settings {task}: the paper has it for {', '.join(names)}, not for {model}")
    return PAPER_MODELS[task, model, frame]


def not_nothing(directions: Tensor) -> Tensor:
    """Directions (H, R, D) float32 as they are. Where all queries of a layer are next to nothing: axes of the least
    length that a bundle may hold, which correct next to nothing, too.
    """
    if float(directions.norm(dim=-1).max()) >= LEAST:
        return directions
    axes = torch.eye(*directions.shape[1:], dtype=directions.dtype, device=directions.device)
    return (axes * LEAST).expand_as(directions).contiguous()


@dataclass(frozen=True)
class Squat:
    """The paper's defaults (LM-Eval, Appendix D.2): 2 bits, groups and recent window of 32, no sink, rank 5, strength
    1e-3.

    group: of tokens of a key channel, and of value channels, at most (the largest size that divides head_dim). rank: 0
    is head_dim. channels: rounded at a time; 0 is half of head_dim, the paper's 64 of 128. subspace, normalise,
    queries: see kvcal_artifacts.codecs.squat. search_ranks, search_strengths: a grid of which each layer takes the
    point with the lowest logit error on held-out windows. prompt: first tokens of a window that count as its prompt in
    the measured deviations; 0 is a quarter of it.
    """

    name: ClassVar[str] = "squat"
    taps: ClassVar[frozenset[str]] = frozenset({"q", "k", "v"})

    bits: int = 2
    group: int = 32
    rank: int = 5
    strength: float = 1e-3
    channels: int = 0
    subspace: str = "calibrated"
    normalise: str = "paper"
    rope: Frame = "post_rope"
    queries: Frame = "post_rope"
    search_ranks: tuple[int, ...] = ()
    search_strengths: tuple[float, ...] = ()
    prompt: int = 0
    sink: int = 0
    recent: int = 32
    block: int = 32

    def __post_init__(self) -> None:
        for name, allowed in (*CHOICES.items(), ("rope", FRAMES)):
            if getattr(self, name) not in allowed:
                option = "frame" if name == "rope" else name
                raise UsageError(f"--{option} {getattr(self, name)}: allowed are {', '.join(allowed)}")
        for rank, strength in self.grid:
            if rank < 0 or not 0 <= strength < float("inf"):
                raise UsageError(
                    f"rank {rank}, strength {strength}: needs a rank of at least 1 (0: all), a strength of at least 0"
                )
        if self.group < 1 or self.windows.block % self.group:
            raise UsageError(f"--group {self.group}: must divide the block of {self.block} tokens")

    @property
    def windows(self) -> Windows:
        return Windows(self.sink, self.recent, self.block)

    @property
    def frame(self) -> Frame:
        return self.rope

    @property
    def grid(self) -> list[tuple[int, float]]:
        """Settings (rank, strength) to try, the one asked for alone without a search; rank 0 stands for head_dim."""
        return [(r, s) for r in self.search_ranks or (self.rank,) for s in self.search_strengths or (self.strength,)]

    def buffers(self) -> dict[str, str]:
        return {}

    def codecs(self, shape: Shape, rank: int, strength: float, calibrated: Tensor | None) -> LayerCodecs:
        """A layer's codecs; calibrated (H, at least rank, D), its first rows are taken."""
        inner = Uniform(shape, "key", self.bits, self.group, "token")
        directions = None if calibrated is None else calibrated[:, :rank].contiguous()
        key = codecs.Squat(
            inner,
            rank,
            strength,
            self.channels or -(-shape.dim // 2),
            self.subspace,  # type: ignore[arg-type]
            self.normalise,
            self.queries,
            directions,
        )
        return LayerCodecs(key, Uniform(shape, "value", self.bits, divisor(self.group, shape.dim), "channel"))

    def fit_layer(self, layer: int, taps: LayerTaps, carry: Carry) -> LayerFit:
        return _LayerRun(self, layer, taps, carry).fit()

    def replay_layer(self, layer: int, taps: LayerTaps, carry: Carry, codecs: LayerCodecs) -> None:
        """Do nothing: SQuat leaves nothing of a layer for the next one."""


@dataclass
class QuerySum:
    """Q'Q of a kv head's queries over text: gram (H, D, D) float64, count of query vectors a head."""

    gram: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64, device="cpu"))
    count: int = 0

    def add(self, q: Tensor) -> None:
        """q (B, H, group, T, D); a window at a time, so that float64 copies stay small."""
        for window in q.flatten(2, 3):
            wide = window.double()
            self.gram = self.gram + wide.transpose(-1, -2) @ wide
            self.count += wide.shape[1]

    def merge(self, other: QuerySum) -> None:
        """Add the sums of other windows."""
        self.gram = self.gram.to(other.gram.device) + other.gram
        self.count += other.count

    @property
    def mean(self) -> Tensor:
        return self.gram / self.count


@dataclass
class Deviation:
    """Mean distance of normalised queries from a subspace, for every rank (Definition 1): sums over queries (D,)."""

    total: Tensor | float = 0.0
    count: int = 0

    def add(self, q: Tensor, vectors: Tensor) -> None:
        """q (B, H, n, D); vectors (H or B, H, D, D), rows by falling singular value."""
        unit = q.double() / q.double().norm(dim=-1, keepdim=True).clamp_min(1e-30)
        inside = (unit @ vectors.transpose(-1, -2)).square().cumsum(-1)
        self.total = self.total + (1 - inside).clamp_min(0).sqrt().flatten(0, 2).sum(0)
        self.count += inside.shape[:-1].numel()

    def merge(self, other: Deviation) -> None:
        """Add the sums of other queries."""
        self.total = self.total + other.total
        self.count += other.count

    def metrics(self, source: str) -> dict[str, float]:
        means = (summed(self.total) / self.count).tolist()
        return {f"deviation_{source}_r{r}": round(means[r - 1], 6) for r in DEVIATION_RANKS if r <= len(means)}


@dataclass
class _LayerRun:
    """One layer's passes over the windows: training text, other text, then all with the layer's advance."""

    method: Squat
    layer: int
    taps: LayerTaps
    carry: Carry

    def fit(self) -> LayerFit:
        carry, grid = self.carry, [(rank or self.carry.shape.dim, strength) for rank, strength in self.method.grid]
        holdout = slice(carry.train, carry.train + carry.holdout)
        text, other = self._sum(slice(0, carry.train)), self._sum(slice(holdout.stop, self.taps.windows))
        with carry.timer("solve"):
            calibrated = self._calibrated(text, max(rank for rank, _ in grid))
            vectors = {n: principal(t.mean)[1] for n, t in (("same_text", text), ("other_text", other)) if t.count}
        points = [self.method.codecs(carry.shape, rank, strength, calibrated) for rank, strength in grid]
        kivi = self.method.codecs(carry.shape, 1, 0.0, calibrated)
        pairs = [*points, kivi]
        measure = _Holdout(self.method, self.layer, self.taps, pairs)
        sums = ShardSums(lambda: HoldoutSums.of(len(pairs)))
        for batch in self.taps.batches({"q", "k", "v"}, "pre_rope", advance=True, sums=sums):
            rows = slice(max(holdout.start - batch.rows.start, 0), max(holdout.stop - batch.rows.start, 0))
            assert batch.q is not None and batch.k is not None and batch.v is not None
            with carry.timer("measure"):
                measure.add(sums.part, batch.q[rows], batch.k[rows], batch.v[rows], vectors)
        return self._chosen(points, grid, sums.total)

    def _sum(self, rows: slice) -> QuerySum:
        """Q'Q of these windows, which may be none."""
        sums = ShardSums(QuerySum)
        if rows.start < rows.stop:
            for batch in self.taps.batches({"q"}, self.method.queries, rows=rows, sums=sums):
                assert batch.q is not None
                with self.carry.timer("gram"):
                    sums.part.add(torch.unflatten(batch.q, 1, (self.carry.shape.heads, -1)))
        return sums.total

    def _calibrated(self, text: QuerySum, rank: int) -> Tensor:
        """(H, rank, D) float32 as if one window of the text were the prompt; over the root of the length, of any."""
        scale = 1.0 if self.method.normalise == "length" else (text.count / self.carry.train) ** 0.5
        return not_nothing((subspace(text.mean, rank) * scale).float())

    def _chosen(self, points: list[LayerCodecs], grid: list[tuple[int, float]], sums: HoldoutSums) -> LayerFit:
        """The point with the lowest logit error, and what was measured."""
        metrics: dict[str, Json] = {**sums.deviation_metrics()}
        shape, module = self.carry.shape, self.taps.site.module
        logits = sums.logit_errors(float(getattr(module, "scaling", shape.dim**-0.5)))
        best = 0
        if logits:
            best = min(range(len(grid)), key=lambda i: logits[i])
            heads = self.carry.shape.heads
            metrics |= sums.key_errors[best].metrics("key", heads) | sums.value_error.metrics("value", heads)
            metrics |= {"logit_error": round(logits[best], 6), "logit_error_kivi": round(logits[-1], 6)}
        if len(grid) > 1:
            if not logits:
                raise UsageError(
                    f"windows of {self.taps.length} tokens pack nothing behind a sink of {self.method.sink} and a "
                    "recent "
                    f"window of {self.method.recent}: no error to search by; use a longer --length"
                )
            metrics |= {search_name(*point): round(error, 6) for point, error in zip(grid, logits, strict=False)}
        rank, strength = grid[best]
        return LayerFit(points[best], metrics | {"rank": rank, "strength": strength})


@dataclass
class HoldoutSums:
    """Sums over the held-out windows of a layer, of the key codec of every pair, and of values.

    squares: of logits' errors by pair; pairs: how many logits of each.
    """

    key_errors: list[HoldoutError]
    squares: list[float]
    value_error: HoldoutError = field(default_factory=HoldoutError)
    deviations: dict[str, Deviation] = field(default_factory=dict)
    pairs: int = 0

    @classmethod
    def of(cls, count: int) -> HoldoutSums:
        """Those of no windows, for so many pairs."""
        return cls([HoldoutError() for _ in range(count)], [0.0] * count)

    def merge(self, other: HoldoutSums) -> None:
        """Add the sums of other windows."""
        for error, more in zip(self.key_errors, other.key_errors, strict=True):
            error.merge(more)
        self.squares = [a + b for a, b in zip(self.squares, other.squares, strict=True)]
        self.value_error.merge(other.value_error)
        for name, deviation in other.deviations.items():
            self.deviations.setdefault(name, Deviation()).merge(deviation)
        self.pairs += other.pairs

    def deviation_metrics(self) -> dict[str, float]:
        return {k: v for name, deviation in self.deviations.items() for k, v in deviation.metrics(name).items()}

    def logit_errors(self, scaling: float) -> list[float]:
        """Root mean square error of attention logits by codec; empty where windows were too short to pack anything.

        scaling: of the scores.
        """
        return [scaling * (total / self.pairs) ** 0.5 for total in self.squares] if self.pairs else []


class _Holdout:
    """Measures the held-out windows of a layer, with the key codec of every pair; value codecs are alike."""

    def __init__(self, method: Squat, layer: int, taps: LayerTaps, pairs: list[LayerCodecs]) -> None:
        self.method, self.layer, self.taps, self.value = method, layer, taps, pairs[0].value
        self.tried = [pair.key for pair in pairs if isinstance(pair.key, codecs.Squat)]

    def add(self, sums: HoldoutSums, q: Tensor, k: Tensor, v: Tensor, vectors: dict[str, Tensor]) -> None:
        """Add held-out windows, none perhaps: q (B, heads, T, D) and k before RoPE, v; vectors (H, D, D) by source."""
        if not len(q):
            return
        rotated = self._rotate(q, slice(None))
        queries = rotated if self.method.queries == "post_rope" else q
        self._deviate(sums, torch.unflatten(queries, 1, (k.shape[1], -1)), vectors)
        windows = self.method.windows
        blocks = (q.shape[2] - windows.sink - windows.recent) // windows.block
        if blocks > 0:
            packed = slice(windows.sink, windows.sink + blocks * windows.block)
            stored = self._rotate(k, slice(None)) if self.method.frame == "post_rope" else k
            errors = self._encode(sums, queries, stored[:, :, packed], packed)
            squares, pairs = logit_squares(torch.unflatten(rotated, 1, (k.shape[1], -1)), errors, windows)
            sums.squares = [a + b for a, b in zip(sums.squares, squares, strict=True)]
            sums.pairs += pairs
            decoded = self.value.encode_decode(v[:, :, packed])[1]
            sums.value_error.add(flat(v[:, :, packed]), None, flat(decoded))

    def _rotate(self, x: Tensor, tokens: slice) -> Tensor:
        """x (B, heads, these tokens, D) as attention multiplies it."""
        if self.taps.rope is None:
            return x
        cos, sin = (t[:, tokens].to(x.dtype) for t in self.taps.rope)
        return self.taps.site.rotate(x, cos, sin)

    def _encode(self, sums: HoldoutSums, queries: Tensor, x: Tensor, packed: slice) -> list[Tensor]:
        """The error of each codec on keys x (B, H, packed tokens, D), as attention multiplies it; queries: its
        queries.
        """
        widest, errors = max(self.tried, key=lambda codec: codec.rank), []
        subspaces = window_subspaces(queries, widest.shape, self.method.windows, widest.statistic)
        for codec, total in zip(self.tried, sums.key_errors, strict=True):
            stats = {codec.statistic: subspaces[..., : codec.rank, :]}  # of the widest subspace the first directions
            decoded = codec.encode_decode(x, Context(self.layer, stats=stats))[1]
            total.add(flat(x), None, flat(decoded))
            error = decoded - x.float()
            errors.append(self._rotate(error, packed) if self.method.frame == "pre_rope" else error)
        return errors

    def _deviate(self, sums: HoldoutSums, q: Tensor, vectors: dict[str, Tensor]) -> None:
        """Queries q (B, H, group, T, D) behind the prompt, from subspaces of their prompt, their window, and
        `vectors`.
        """
        prompt = self.method.prompt or q.shape[3] // 4
        if not 0 < prompt < q.shape[3]:
            raise UsageError(f"--prompt-tokens {prompt}: windows have {q.shape[3]} tokens")
        bases = {}
        for name, tokens in (("prompt", slice(0, prompt)), ("window", slice(None))):
            wide = q[:, :, :, tokens].flatten(2, 3).double()
            bases[name] = principal(wide.transpose(-1, -2) @ wide)[1]
        later = q[:, :, :, prompt:].flatten(2, 3)
        for name, rows in (bases | vectors).items():
            sums.deviations.setdefault(name, Deviation()).add(later, rows)


def search_name(rank: int, strength: float) -> str:
    """Name of a search point's logit error in a layer's metrics."""
    return f"search_r{rank}_l{strength:g}"


def window_subspaces(q: Tensor, shape: Shape, windows: Windows, name: str) -> Tensor:
    """What a cache that is fed these windows knows when it packs each block: (B, H, blocks, R, D) float32.

    q (B, heads, T, D), windows without padding; the statistic is the cache's.
    """
    plan = Ledger(windows).begin(q.shape[0], q.shape[2], None)
    subspaces = statistic(name, shape).observe(q, Prefixes(plan, windows, q.device))
    assert subspaces is not None
    return subspaces


def logit_squares(q: Tensor, errors: list[Tensor], windows: Windows) -> tuple[list[float], int]:
    """Sums of (q . e)^2 over all queries that come after a key was packed, for each of `errors`; and how many there
    are.

    q (B, H, group, T, D), e (B, H, packed tokens, D), both as attention multiplies them. Sums over queries come from
    their Gram matrix, grown from the end of the window: no (T, T) scores.
    """
    gram, last, count, totals = torch.zeros((), dtype=torch.float32, device="cpu"), q.shape[3], 0, [0.0] * len(errors)
    for number in reversed(range(errors[0].shape[2] // windows.block)):
        due = due_tokens(windows, number)
        late = q[:, :, :, due:last].flatten(2, 3).double()
        gram, last = late.transpose(-1, -2) @ late + gram, due
        packed = slice(number * windows.block, (number + 1) * windows.block)
        for i, error in enumerate(errors):
            part = error[:, :, packed].double()
            totals[i] += float(((part @ gram) * part).sum())
        count += q.shape[:3].numel() * (q.shape[3] - due) * windows.block
    return totals, count
