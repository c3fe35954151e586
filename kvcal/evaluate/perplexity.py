"""Perplexity and KL to the full-precision logits, teacher-forced through the cache in small steps.

Every step attends to what the cache gives back, so sinks, blocks and the recent window act as in generation (AQUA-KV
section 4). Full precision runs once for all rows, stretch by stretch through DynamicCache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from kvcal_artifacts import hf
from kvcal_artifacts.errors import NonFiniteError, UsageError

from ..capture.ranks import ALONE, Ranks
from ..capture.spread import spread
from ..models.spread import input_device
from ..report.progress import progress
from .calls import calls, longest_call, segments
from .divergence import EXACT, Bucket, Reference, Spread, Tokens
from .spread import standard_error

if TYPE_CHECKING:
    from transformers import Cache, DynamicCache

    from kvcal_artifacts.cache import KVCalCache

    from ..calibrate.checkpoint import EvaluationState
    from ..models.structure import CausalLM

CacheMaker: TypeAlias = Callable[[], "KVCalCache"]
TOKENS_PER_BATCH = {"cuda": 1 << 18, "cpu": 1 << 13}


@dataclass(frozen=True)
class Row:
    """What one cache gives on the whole text. Bytes are those at the end of a window, averaged over windows.

    The row `full` counts 16 bits per number, whatever dtype measured it. perplexity: exp of the mean of nll_windows.
    kl: mean KL divergence from the logits of full precision, in nats per token. kl_se: its standard error over windows,
    None for one window. kl_windows, nll_windows: KL and negative log-likelihood of each window, in nats per token.
    kl_median, kl_p99, kl_max, same_top, kl_behind, positions: the spread over tokens, which `Spread` explains.

    bits_per_value: stored bits of packed blocks over the values they stand for. paper_bits: the same as the codecs'
    papers count it. cache_bytes: packed blocks. window_bytes: exact tokens. resident_bytes: predictors and codebooks.
    bytes_at_16_bit: what the same tokens take uncompressed at 16 bits per value. smaller: 16-bit bytes of full
    precision over those of this cache (packed blocks, windows at 16 bits, run-time statistics).
    """

    name: str
    perplexity: float
    kl: float
    bits_per_value: float | None
    paper_bits: float | None
    cache_bytes: int
    window_bytes: int
    resident_bytes: int
    tokens: int
    bytes_at_16_bit: int
    kl_se: float | None
    kl_windows: list[float]
    nll_windows: list[float]
    kl_median: float
    kl_p99: float
    kl_max: float
    same_top: float
    kl_behind: float | None
    positions: list[Bucket]
    smaller: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Batches(Protocol):
    """Where an evaluation keeps how far it came, and goes on from."""

    def load(self) -> EvaluationState | None:
        """The state stored last; None: begin."""

    def keep(self, state: EvaluationState) -> None:
        """Keep what was summed after a batch of windows. state: as JSON has it; "windows" that are done, their "sums",
        and what was "watched" in caches.
        """


@runtime_checkable
class Watching(Protocol):
    """A CacheMaker that sums up what its caches tell it, a batch of windows at a time."""

    def __call__(self) -> KVCalCache: ...

    def take(self) -> Any:
        """What the cache of the last batch reported."""

    def merge(self, part: Any) -> None:
        """Add what `take` gave, here or in another process."""

    def state(self) -> Mapping[str, Any]:
        """All that was added, as JSON has it."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave."""


@dataclass
class FullRuns:
    """What full precision gave for token windows, for later evaluations of the same model, windows, step and batch.

    log_probabilities: (B, count, vocabulary) float32 on the model's device, by a batch's place and a stretch's first
    column. numbers: how many numbers the uncompressed cache held at the end of each batch. most: bytes that they take
    in all; batches beyond run again in every evaluation. None: there is no limit.
    """

    log_probabilities: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    most: int | None = None

    def take(self, place: int, size: int) -> bool:
        """Whether the batch at `place`, of `size` bytes, is kept or may be."""
        others = sum(x.nbytes for (batch, _), x in self.log_probabilities.items() if batch != place)
        return place in self.numbers or self.most is None or others + size <= self.most


@dataclass
class _Sums:
    nats: float = 0.0
    kl: float = 0.0
    kl_windows: list[float] = field(default_factory=list)  # summed over the tokens of each
    nll_windows: list[float] = field(default_factory=list)  # likewise
    tokens: int = 0
    packed: int = 0
    packed_values: int = 0
    window: int = 0
    at_16_bit: int = 0  # packed blocks, windows at 16 bits a number, run-time statistics
    resident: int = 0
    first_packed: int | None = None  # position
    by_token: list[list[str]] = field(default_factory=list)  # as of Tokens.pack, by batch
    paper: list[list[float]] = field(default_factory=list)  # bits per value, and of how many values, by batch

    def merge(self, other: _Sums) -> None:
        """Add those of the windows behind."""
        self.nats += other.nats
        self.kl += other.kl
        self.kl_windows += other.kl_windows
        self.nll_windows += other.nll_windows
        self.tokens += other.tokens
        self.packed += other.packed
        self.packed_values += other.packed_values
        self.window += other.window
        self.at_16_bit += other.at_16_bit
        self.resident, self.first_packed = other.resident, other.first_packed
        self.by_token += other.by_token
        self.paper += other.paper


def evaluate(
    model: CausalLM,
    ids: Tensor,
    caches: Mapping[str, CacheMaker],
    *,
    step: int = 32,
    batch: int | None = None,
    saved: Batches | None = None,
    full: FullRuns | None = None,
    ranks: Ranks = ALONE,
) -> list[Row]:
    """Rows `full` and then one for each cache, over token windows ids (N, T) int64.

    step: tokens a forward, or more where no token sees other blocks then (`calls`). batch: windows at a time (chosen
    from the device and T by default). saved: of the same windows, caches, step and batch, or the figures are of
    neither. full: filled by the first evaluation and read by the later ones, which run no full precision then. It takes
    4·N·T·vocabulary bytes on the model's device, or what its limit allows. ranks: the processes that share the batches;
    each gets all rows.
    Raises UsageError for windows of one token and for more ranks than batches, NonFiniteError for logits that are not
    finite.
    """
    if ids.shape[1] < 2 or step < 1:
        raise UsageError(f"windows of {ids.shape[1]} tokens in steps of {step}: needs at least 2 and 1")
    device = input_device(model)
    size = batch or max(1, TOKENS_PER_BATCH.get(device.type, 1 << 13) // ids.shape[1])
    length, parts = ids.shape[1], ids.split(size)
    if ranks.count > len(parts):
        batches = "1 batch" if len(parts) == 1 else f"{len(parts)} batches"
        fewer = "one process" if len(parts) == 1 else f"--nproc-per-node {len(parts)} or less"
        raise UsageError(
            f"{ranks.count} ranks for {batches} of windows: give {fewer}, more --windows, or a smaller --batch"
        )
    [before] = ranks.agree([None if saved is None else saved.load()])
    names = ("full", *caches)
    watching = {name: maker for name, maker in caches.items() if isinstance(maker, Watching)}
    done, sums = 0, {name: _Sums() for name in names}
    if before is not None:
        done, sums = before["windows"], {name: _Sums(**before["sums"][name]) for name in names}
        for name, maker in watching.items():
            maker.restore(before["watched"][name])
    todo = range(-(-done // size), len(parts))
    with torch.no_grad(), progress("Evaluating", total=length * len(parts)) as advance:
        advance(length * todo.start)

        def run(place: int) -> tuple[dict[str, _Sums], dict[str, Any]]:
            part, batch_sums = parts[place].to(device), {name: _Sums() for name in names}
            full_batch = _FullBatch(model, part, place, full)
            _one_batch(model, part, caches, step, batch_sums, full_batch, advance if ranks.count == 1 else _quiet)
            return batch_sums, {name: maker.take() for name, maker in watching.items()}

        for place, (batch_sums, watched_parts) in zip(todo, spread(ranks, todo, run), strict=True):
            for name, total in sums.items():
                total.merge(batch_sums[name])
            for name, maker in watching.items():
                maker.merge(watched_parts[name])
            done += len(parts[place])
            if ranks.count > 1:
                advance(length)
            if saved is not None:
                saved.keep(_state(done, sums, watching))
    return [_row(name, total, model, ids, sums["full"]) for name, total in sums.items()]


def _quiet(tokens: int) -> None:
    """Progress of a batch among those of other ranks: it counts when it is done."""


def _state(done: int, sums: Mapping[str, _Sums], watching: Mapping[str, Watching]) -> EvaluationState:
    state: EvaluationState = {"windows": done, "sums": {name: asdict(total) for name, total in sums.items()}}
    if watching:
        state["watched"] = {name: maker.state() for name, maker in watching.items()}
    return state


class _FullBatch:
    """Full precision over the token windows ids (B, T) of one batch, stretch by stretch; kept in `runs` if given."""

    def __init__(self, model: CausalLM, ids: Tensor, place: int, runs: FullRuns | None) -> None:
        from transformers import DynamicCache

        size = 4 * len(ids) * (ids.shape[1] - 1) * model.config.get_text_config().vocab_size
        self._model, self._ids, self._place = model, ids, place
        self._runs = runs if runs is not None and runs.take(place, size) else None
        self._cache = DynamicCache(config=model.config)

    def log_probabilities(self, start: int, stop: int) -> Tensor:
        """(B, count, vocabulary) float32 of the positions from `start` to `stop` that have a target."""
        runs = self._runs
        if runs is not None and self._place in runs.numbers:
            return runs.log_probabilities[self._place, start]
        count = min(stop, self._ids.shape[1] - 1) - start
        exact = _log_probabilities(self._model, self._ids[:, start:stop], self._cache, count)
        if runs is not None:
            runs.log_probabilities[self._place, start] = exact
        return exact

    def numbers(self) -> int:
        """How many numbers the uncompressed cache holds at the end of the windows."""
        count = numbers_in(self._cache)
        return count if self._runs is None else self._runs.numbers.setdefault(self._place, count)


def _one_batch(
    model: CausalLM,
    ids: Tensor,
    makers: Mapping[str, CacheMaker],
    step: int,
    sums: dict[str, _Sums],
    full: _FullBatch,
    advance: Callable[[int], None],
) -> None:
    caches = {name: make() for name, make in makers.items()}
    batches = {name: _Batch(name, ids) for name in sums}
    longest = longest_call(step, len(ids), model.config.get_text_config().vocab_size, ids.device.type)
    try:
        for start, stop in segments(ids.shape[1], longest):
            exact = full.log_probabilities(start, stop)
            reference = Reference.of(exact)
            batches["full"].add(exact, None, start)
            for name, cache in caches.items():
                for first, last in calls(cache.scheme, start, stop, step):
                    count = min(last, ids.shape[1] - 1) - first
                    row_logits = _log_probabilities(model, ids[:, first:last], cache, count)
                    batches[name].add(row_logits, reference.part(first - start, first - start + count), first)
            advance(stop - start)
        _add_full(sums["full"], full.numbers() * hf.head_processes(model))
        for name, cache in caches.items():
            _add_cache(sums[name], cache, model.dtype.itemsize)
        for name, batch in batches.items():
            batch.into(sums[name])
    finally:
        for cache in caches.values():
            cache.close()


def _log_probabilities(model: CausalLM, chunk: Tensor, cache: Cache, count: int) -> Tensor:
    """(B, count, vocabulary) float32 of the positions that have a target; of logits less their mean over the
    vocabulary.
    """
    logits: Tensor = model(input_ids=chunk, past_key_values=cache, use_cache=True).logits[:, :count].float()
    return functional.log_softmax(logits - logits.mean(-1, keepdim=True), -1)


class _Batch:
    """What one row gives for token windows ids (B, T), call by call."""

    def __init__(self, name: str, ids: Tensor) -> None:
        self._name, self._ids = name, ids
        self._nats = torch.zeros(len(ids), dtype=torch.float64, device="cpu")  # of each window
        self._kl: list[Tensor] = []
        self._same: list[Tensor] = []

    def add(self, log_probabilities: Tensor, reference: Reference | None, first: int) -> None:
        """Log-probabilities (B, count, vocabulary) of the positions from `first` on. reference: None of full
        precision.
        """
        count = log_probabilities.shape[1]
        if not count:
            return
        target = self._ids[:, first + 1 : first + 1 + count]
        nats = -log_probabilities.gather(-1, target[..., None]).double().sum((1, 2)).cpu()
        if not nats.isfinite().all():
            raise NonFiniteError(
                f"{self._name}: logits hold a NaN or infinity; check the model's dtype (--dtype float32)"
            )
        self._nats += nats
        if reference is not None:
            self._kl.append(reference.divergence(log_probabilities))
            self._same.append(reference.agrees(log_probabilities))

    def into(self, total: _Sums) -> None:
        """Add the batch, which is complete, to the sums of the windows before it."""
        total.nats += self._nats.sum().item()
        total.nll_windows += self._nats.tolist()
        total.tokens += self._ids.numel() - len(self._ids)
        if not self._kl:
            total.kl_windows += [0.0] * len(self._ids)
            return
        kl = torch.cat(self._kl, 1)
        total.kl += kl.sum().item()
        total.kl_windows += kl.sum(1).tolist()
        total.by_token.append(Tokens.pack(kl, torch.cat(self._same, 1)))


def numbers_in(cache: DynamicCache) -> int:
    """How many numbers the keys and values of an uncompressed cache have."""
    from transformers.cache_utils import CacheLayerMixin

    layers = (layer for layer in cache.layers if isinstance(layer, CacheLayerMixin))
    return sum(states.numel() for layer in layers for states in (layer.keys, layer.values) if states is not None)


def _add_full(total: _Sums, numbers: int) -> None:
    """Uncompressed layers at 16 bits a number."""
    total.packed += 2 * numbers
    total.at_16_bit += 2 * numbers
    total.packed_values += numbers


def _add_cache(total: _Sums, cache: KVCalCache, itemsize: int) -> None:
    """Add a cache's bytes to the sums. itemsize: bytes of the model's dtype, which windows have."""
    packed, window, bookkeeping = (cache.processes * cache.nbytes(part) for part in ("packed", "window", "bookkeeping"))
    windows, selection = cache.scheme.windows, cache.scheme.selection
    total.packed += packed
    total.packed_values += cache.processes * cache.packed_values()
    total.window += window + bookkeeping
    total.at_16_bit += packed + window * 2 // itemsize + bookkeeping
    total.resident = cache.resident_bytes()
    total.paper.append([cache.paper_bits(), cache.packed_values()])
    if selection is None:
        total.first_packed = windows.sink + windows.recent + windows.block


def _mean(weighted: list[list[float]]) -> float:
    return float(sum(one * count for one, count in weighted) / sum(count for _, count in weighted))


def _row(name: str, total: _Sums, model: CausalLM, ids: Tensor, full: _Sums) -> Row:
    windows, length = len(ids), ids.shape[1] - 1
    spread = Spread.of(total.by_token, length, total.first_packed) if total.by_token else EXACT
    shape = model.config.get_text_config()
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    values = 2 * shape.num_hidden_layers * shape.num_key_value_heads * dim * ids.shape[1]
    bits = total.packed * 8 / total.packed_values if total.packed_values else None
    counted = {one for one, _ in total.paper}
    by_window, nll = (
        [nats * windows / total.tokens for nats in sums] for sums in (total.kl_windows, total.nll_windows)
    )
    paper = bits if not counted else counted.pop() if len(counted) == 1 else _mean(total.paper)
    return Row(
        name=name,
        perplexity=math.exp(min(700.0, total.nats / total.tokens)),
        kl=total.kl / total.tokens,
        bits_per_value=bits,
        paper_bits=paper,
        cache_bytes=total.packed // windows,
        window_bytes=total.window // windows,
        resident_bytes=total.resident,
        tokens=total.tokens,
        bytes_at_16_bit=values * 2,
        kl_se=standard_error(by_window) if len(by_window) > 1 else None,
        kl_windows=by_window,
        nll_windows=nll,
        smaller=full.at_16_bit / total.at_16_bit,
        **vars(spread),
    )
