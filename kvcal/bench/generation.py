"""Whole models with random weights: tokens a second, largest batch and longest generation on a memory, peak memory.

Caches start filled: random keys and values packed by the scheme's codecs, a few blocks repeated over rows and tokens, so that
no prefill of the length is needed. Every decode step then runs through the model as generate() runs it.
"""

from __future__ import annotations

import importlib.util
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcal_artifacts.cache import KVCalCache

from ..catalogue import Geometry
from ..models import is_oom
from .filled import filled_cache, scheme_of, tokens
from .layer import fill
from .memory import vqkv_beside
from .rows import Row
from .schemes import Benched

WARM_UP = 1
STEPS = 8
LARGEST = 1 << 24  # where a search for a length or a batch ends

Maker = Callable[[int, int], Any]  # (batch, length) -> a cache that holds so many tokens


@dataclass(frozen=True)
class Kind:
    """One kind of cache. maker is None where `why_not` says that it cannot be had here."""

    name: str
    maker: Maker | None
    stored_bits: float | None
    path: str
    why_not: str | None = None


def kinds(model: Any, geometry: Geometry, schemes: Sequence[Benched], require_kernels: bool = False) -> list[Kind]:
    """FP16, Transformers' QuantizedCache where optimum-quanto is installed, and each scheme."""
    plain = "fp32" if model.dtype == torch.float32 else "fp16"
    found = [Kind(plain, lambda batch, length: _dynamic(model, geometry, batch, length), None, "DynamicCache")]
    if importlib.util.find_spec("optimum.quanto") if importlib.util.find_spec("optimum") else None:
        found += [
            Kind(f"transformers-quanto-{bits}", _quanto(model, geometry, bits), None, "QuantizedCache")
            for bits in (2, 4)
        ]
    for one in schemes:

        def maker(batch: int, length: int, one: Benched = one) -> KVCalCache:
            return filled_cache(model, geometry, one, batch, length)

        with KVCalCache(scheme_of(model, one), model, require_kernels=require_kernels) as empty:
            path: str = empty.describe()["path"]
        found.append(Kind(one.name, maker, one.stored_bits, path))
    return found


def _updated(cache: Any, model: Any, geometry: Geometry, batch: int, length: int) -> Any:
    for layer in range(geometry.layers):
        keys, values = (tokens(model, geometry, batch, length, 2 * layer + role) for role in (0, 1))
        cache.update(keys, values, layer)
    return cache


def _dynamic(model: Any, geometry: Geometry, batch: int, length: int) -> Any:
    from transformers import DynamicCache

    return _updated(DynamicCache(), model, geometry, batch, length)


def _quanto(model: Any, geometry: Geometry, bits: int) -> Maker:
    def make(batch: int, length: int) -> Any:
        from transformers import QuantizedCache

        cache = QuantizedCache(backend="quanto", config=model.config, nbits=bits)
        return _updated(cache, model, geometry, batch, length)

    return make


# One run.


@dataclass(frozen=True)
class Ran:
    """microseconds: median of a decode step. bytes: peak that the driver reports for the device (CUDA), or the peak resident
    size of this process (CPU).
    """

    microseconds: float
    bytes: int


def run(model: Any, maker: Maker, batch: int, length: int, steps: int = STEPS) -> Ran:
    """`steps` decode steps from a cache of `length` tokens."""
    cache, taken = maker(batch, length), []
    token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            for _ in range(WARM_UP + steps):
                _wait(model.device)
                start = time.perf_counter()
                token = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
                _wait(model.device)
                taken.append((time.perf_counter() - start) * 1e6)
        return Ran(statistics.median(taken[WARM_UP:]), peak_bytes(model.device))
    finally:
        if isinstance(cache, KVCalCache):
            cache.close()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":  # torch keeps what it took, so what is in use after a run is what was at most
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def released(device: torch.device) -> None:
    """Give back what earlier runs took, so that the next peak is its own."""
    fill.cache_clear()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def generate_rows(
    model_name: str,
    model: Any,
    geometry: Geometry,
    every: Sequence[Kind],
    shapes: Sequence[tuple[int, int]],
    device: str,
) -> list[Row]:
    """Tokens a second of each kind at each (batch, length); FP16's own time is what ratios are to."""
    rows = []
    for batch, length in shapes:
        full: float | None = None
        for kind in every:
            released(model.device)
            if kind.maker is None:
                rows.append(_row(model_name, kind, batch, length, device, "generate", None, None, refused=kind.why_not))
                continue
            try:
                ran = run(model, kind.maker, batch, length)
            except Exception as error:
                if not is_oom(error):
                    raise
                rows.append(
                    _row(model_name, kind, batch, length, device, "generate", None, None, refused="out of memory")
                )
                continue
            full = ran.microseconds if kind.path == "DynamicCache" else full
            more = {"tokens_per_second": batch * 1e6 / ran.microseconds, "peak_bytes": ran.bytes}
            rows.append(_row(model_name, kind, batch, length, device, "generate", ran.microseconds, full, more=more))
    return rows


def _row(
    model: str, kind: Kind, batch: int, length: int, device: str, operation: str, taken: float | None,
    full: float | None, **own: Any,
) -> Row:  # fmt: skip
    return Row(
        operation=operation, scheme=kind.name, model=model, batch=batch, length=length, microseconds=taken,
        stored_bits=kind.stored_bits, fraction_of_copy=None, ratio_to_fp16=full / taken if full and taken else None,
        fp16_backend="DynamicCache" if full else None, projected=False, device=device, path=kind.path, **own,
    )  # fmt: skip


# How far a memory goes.


def largest(fits: Callable[[int], bool], start: int = 1, step: int = 1) -> int:
    """The largest multiple of `step` that fits, by doubling and halving; 0 if not even the first does."""
    low, high = 0, start
    while high <= LARGEST and fits(high):
        low, high = high, 2 * high
    while high - low > step:
        middle = (low + high) // 2 // step * step
        middle = middle if middle > low else low + step
        if middle >= high:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fits(model: Any, maker: Maker, batch: int, length: int) -> bool:
    """Whether one decode step runs within the device's memory."""
    released(model.device)
    try:
        run(model, maker, batch, length, steps=1)
    except Exception as error:
        if not is_oom(error):
            raise
        return False
    return True


def largest_batch_rows(
    model_name: str, model: Any, geometry: Geometry, every: Sequence[Kind], length: int, device: str
) -> list[Row]:
    """Measured: the largest batch at that length, and the tokens a second there."""
    rows, full = [], None
    for kind in every:
        maker = kind.maker
        if maker is None:
            continue
        found = largest(lambda batch, maker=maker: fits(model, maker, batch, length))  # type: ignore[misc]
        released(model.device)
        if not found:
            rows.append(_row(model_name, kind, 1, length, device, "largest-batch", None, None, refused="out of memory"))
            continue
        ran = run(model, maker, found, length)
        speed = found * 1e6 / ran.microseconds
        full = speed if kind.path == "DynamicCache" else full
        more = {
            "largest_batch": found, "tokens_per_second": speed, "peak_bytes": ran.bytes,
            "throughput_to_fp16": speed / full if full else None,
        }  # fmt: skip
        rows.append(_row(model_name, kind, found, length, device, "largest-batch", ran.microseconds, None, more=more))
    return rows


def longest_rows(
    model_name: str, model: Any, every: Sequence[Kind], batch: int, memory: float, device: str
) -> list[Row]:
    """Measured: the most tokens a row can hold and still make the next one (VQKV Table 3)."""
    rows = []
    for kind in every:
        maker = kind.maker
        if maker is None:
            continue
        found = largest(lambda length, maker=maker: fits(model, maker, batch, length), 1024, 256)  # type: ignore[misc]
        more = {
            "longest_length": found,
            "memory_gib": memory,
            **vqkv_beside(model_name, kind.name, memory, model.dtype.itemsize),
        }
        rows.append(_row(model_name, kind, batch, found, device, "longest-generation", None, None, more=more))
    return rows
