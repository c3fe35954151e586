"""Decode steps through compressed caches next to full precision: which next token, how much memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.errors import UsageError

from ..report.progress import progress
from .perplexity import CacheMaker, numbers_in

if TYPE_CHECKING:
    from transformers import Cache

    from ..models.structure import CausalLM


@dataclass(frozen=True)
class Agreement:
    """One cache after a prompt and `steps` tokens of a text.

    nbytes: of all rows: packed blocks, exact tokens at 16 bits a number, statistics, predictors and codebooks.
    bits_per_value: stored bits of packed blocks, None of full precision. kl: mean nats per step to full precision.
    same: in how many of `of` steps the likeliest next token is full precision's.
    """

    name: str
    nbytes: int
    bits_per_value: float | None
    kl: float
    same: int
    of: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def agreement(model: CausalLM, ids: Tensor, caches: Mapping[str, CacheMaker], steps: int) -> list[Agreement]:
    """`full` and then a row for each cache: ids (B, T) int64 are fed as a prompt and then `steps` single tokens.

    The text's tokens are fed whatever a cache would choose, so that steps stay comparable. Raises UsageError where
    the windows have at most `steps` tokens.
    """
    if not 0 < steps < ids.shape[1]:
        raise UsageError(f"{steps} steps over windows of {ids.shape[1]} tokens: needs at least one, and a prompt")
    from transformers import DynamicCache

    with torch.no_grad(), progress("Comparing", total=(1 + len(caches)) * (1 + steps)) as advance:
        full = DynamicCache(config=model.config)
        exact = _steps(model, ids, full, steps, advance)
        values = numbers_in(full)
        every = exact.shape[0] * exact.shape[1]
        rows = [Agreement("full", 2 * values, None, 0.0, every, every)]
        for name, make in caches.items():
            with make() as cache:
                logits = _steps(model, ids, cache, steps, advance)
                rows.append(_row(name, cache, logits, exact, model.dtype.itemsize))
    return rows


def _steps(model: CausalLM, ids: Tensor, cache: Cache, steps: int, advance: Callable[[], None]) -> Tensor:
    """Log-probabilities (B, steps, vocabulary) float32 after each of the last `steps` tokens."""
    model(input_ids=ids[:, :-steps], past_key_values=cache, use_cache=True, logits_to_keep=1)
    advance()
    steps_logits = []
    for token in ids[:, -steps:].split(1, dim=1):
        steps_logits.append(model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1].float())
        advance()
    return functional.log_softmax(torch.stack(steps_logits, 1), -1)


def _row(name: str, cache: KVCalCache, logits: Tensor, exact: Tensor, width: int) -> Agreement:
    """How far the logits of a cache agree with exact ones, with its size. width: bytes of a number of the model's
    dtype, in which exact tokens lie here.
    """
    every = exact.shape[0] * exact.shape[1]
    at_16_bit = cache.nbytes("window") * 2 // width
    return Agreement(
        name=name,
        nbytes=cache.nbytes("packed") + at_16_bit + cache.nbytes("bookkeeping") + cache.resident_bytes(),
        bits_per_value=cache.bits_per_value(),
        kl=functional.kl_div(logits, exact, reduction="sum", log_target=True).item() / every,
        same=int((logits.argmax(-1) == exact.argmax(-1)).sum()),
        of=every,
    )
