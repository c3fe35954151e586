"""Perplexity and KL to the full-precision logits, teacher-forced through the cache in small steps.

Every step attends to what the cache gives back, so sinks, blocks and the recent window act as in generation (AQUA-KV
section 4). Full precision runs through DynamicCache in the same steps, side by side.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.errors import NonFiniteError, UsageError

from ..report.progress import progress

CacheMaker = Callable[[], KVCalCache]
TOKENS_PER_BATCH = {"cuda": 1 << 18, "cpu": 1 << 13}


@dataclass(frozen=True)
class Row:
    """One cache on the whole text. kl: mean nats to the full-precision logits. Bytes are of one window's end, mean.

    bits_per_value: stored bits of packed blocks over the values they stand for; for `full` the bits of its dtype.
    paper_bits: as the codecs' own papers count. bytes_at_16_bit: what the same tokens take uncompressed at 16 bits a
    value. kl_se: standard error of kl over windows, None of one window. kl_windows: kl of each window, in order.
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Batches(Protocol):
    """Where an evaluation keeps how far it came, and goes on from."""

    def load(self) -> dict[str, Any] | None:
        """What was last kept; None: begin."""

    def keep(self, state: dict[str, Any]) -> None:
        """After a batch of windows. state: as JSON has it; "windows" that are done, and their "sums"."""


@dataclass
class _Sums:
    nats: float = 0.0
    kl: float = 0.0
    kl_windows: list[float] = field(default_factory=list)  # summed over the tokens of each
    tokens: int = 0
    packed: int = 0
    packed_values: int = 0
    window: int = 0
    resident: int = 0
    paper: list[list[Any]] = field(default_factory=list)  # bits a value, and of how many values, by batch


def evaluate(
    model: Any,
    ids: Tensor,
    caches: Mapping[str, CacheMaker],
    *,
    step: int = 32,
    batch: int | None = None,
    saved: Batches | None = None,
) -> list[Row]:
    """Rows `full` and then one for each cache, over token windows ids (N, T) int64.

    step: tokens a forward. batch: windows at a time (chosen from the device and T by default). saved: of the same
    windows, caches, step and batch, or the figures are of neither. Raises UsageError for windows of one token,
    NonFiniteError for logits that are not finite.
    """
    if ids.shape[1] < 2 or step < 1:
        raise UsageError(f"windows of {ids.shape[1]} tokens in steps of {step}: needs at least 2 and 1")
    device = next(model.parameters()).device
    size = batch or max(1, TOKENS_PER_BATCH.get(device.type, 1 << 13) // ids.shape[1])
    before = None if saved is None else saved.load()
    names = ("full", *caches)
    done, partial_sums = (0, {name: {} for name in names}) if before is None else (before["windows"], before["sums"])
    sums = {name: _Sums(**partial_sums[name]) for name in names}
    steps, parts = -(-ids.shape[1] // step), ids.split(size)
    with torch.no_grad(), progress("Evaluating", total=steps * len(parts)) as advance:
        advance(steps * -(-done // size))
        for part in parts[-(-done // size) :]:
            _one_batch(model, part.to(device), caches, step, sums, advance)
            done += len(part)
            if saved is not None:
                saved.keep({"windows": done, "sums": {name: asdict(total) for name, total in sums.items()}})
    return [_row(name, total, model, ids) for name, total in sums.items()]


def _one_batch(
    model: Any,
    ids: Tensor,
    makers: Mapping[str, CacheMaker],
    step: int,
    sums: dict[str, _Sums],
    advance: Callable[[], None],
) -> None:
    from transformers import DynamicCache

    full = DynamicCache(config=model.config)
    before = {name: len(total.kl_windows) for name, total in sums.items()}
    for total in sums.values():
        total.kl_windows += [0.0] * len(ids)
    caches = {name: make() for name, make in makers.items()}
    try:
        for start in range(0, ids.shape[1], step):
            chunk, target = ids[:, start : start + step], ids[:, start + 1 : start + step + 1]
            logits = _logits(model, chunk, full, target.shape[1])
            reference = logits, functional.log_softmax(logits, -1)
            _add(sums["full"], logits, reference, target, "full", before["full"])
            for name, cache in caches.items():
                row_logits = _logits(model, chunk, cache, target.shape[1])
                _add(sums[name], row_logits, reference, target, name, before[name])
            advance()
        plain: list[Any] = full.layers
        sums["full"].packed += sum(layer.keys.nbytes + layer.values.nbytes for layer in plain)
        sums["full"].packed_values += sum(layer.keys.numel() + layer.values.numel() for layer in plain)
        for name, cache in caches.items():
            total = sums[name]
            total.packed += cache.nbytes("packed")
            total.packed_values += cache.packed_values()
            total.window += cache.nbytes("window") + cache.nbytes("bookkeeping")
            total.resident = cache.resident_bytes()
            total.paper.append([cache.paper_bits(), cache.packed_values()])
    finally:
        for cache in caches.values():
            cache.close()


def _logits(model: Any, chunk: Tensor, cache: Any, count: int) -> Tensor:
    """(B, count, vocabulary) float32 of the positions that have a target, less their mean over the vocabulary."""
    logits: Tensor = model(input_ids=chunk, past_key_values=cache, use_cache=True).logits[:, :count].float()
    return logits - logits.mean(-1, keepdim=True)


def _add(total: _Sums, logits: Tensor, reference: tuple[Tensor, Tensor], target: Tensor, name: str, first: int) -> None:
    """reference: the full-precision logits and their log-probabilities. first: the number of the batch's first window."""
    if not target.shape[1]:
        return
    exact, right = reference
    log_probabilities = right if logits is exact else functional.log_softmax(logits, -1)
    nats = -log_probabilities.gather(-1, target[..., None]).double().sum().item()
    if not math.isfinite(nats):
        raise NonFiniteError(f"{name}: logits hold a NaN or infinity; check the model's dtype (--dtype float32)")
    total.nats += nats
    total.tokens += target.numel()
    if logits is not exact:
        divergence = functional.kl_div(log_probabilities, right, reduction="none", log_target=True).sum(-1).double()
        total.kl += divergence.sum().item()
        for window, nats in enumerate(divergence.sum(1).tolist(), first):
            total.kl_windows[window] += nats


def _mean(weighted: list[list[Any]]) -> float:
    return float(sum(one * count for one, count in weighted) / sum(count for _, count in weighted))


def _row(name: str, total: _Sums, model: Any, ids: Tensor) -> Row:
    windows = len(ids)
    shape = model.config.get_text_config()
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    values = 2 * shape.num_hidden_layers * shape.num_key_value_heads * dim * ids.shape[1]
    bits = total.packed * 8 / total.packed_values if total.packed_values else None
    counted = {one for one, _ in total.paper}
    by_window = [nats * len(total.kl_windows) / total.tokens for nats in total.kl_windows]
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
    )


def standard_error(numbers: list[float]) -> float:
    """The standard error of the mean of two or more numbers."""
    return statistics.stdev(numbers) / math.sqrt(len(numbers))
