"""Decode steps of a whole model: eager, and recorded once as a CUDA graph and replayed; the plain forward, or
compiled.

A step is a forward of one token a row, and the greedy choice of the next one, which stays on the device. A graph's
steps are compared with eager ones of the plain forward, from the same start, before any is timed.
"""

from __future__ import annotations

import gc
import itertools
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvcal_kernels.device import on

from ..models.memory import cuda_bytes, is_oom
from .caches import FLUSH_AT, Kind, Start, attention, weight_bytes
from .layer import fill, some_rows
from .peers import first_line

if TYPE_CHECKING:
    from ..models.structure import CausalLM

WARM_UP = FLUSH_AT + 2  # steps nobody times: kernels are compiled, a block is packed
CHECKED = FLUSH_AT + 3  # steps of which logits are compared
STEPS = 10  # timed
LEAST = CHECKED
SECONDS = 3.0  # for timing a pass, at most
TOLERANCE = 8  # units of the dtype's eps, relative error of logits: products may be taken by another kernel in a graph
# Of a compiled forward, which rounds elsewhere in every layer (docs/benchmarks/reasons.md).
COMPILED_TOLERANCE = 16
ALIKE = 0.99  # of the bytes of a packed block
MARGIN = 1 << 28  # bytes that recording takes besides what an eager step took
# Of torch.compile. With it Inductor makes the products of a single row, too, instead of cuBLAS, which is slower
# (docs/benchmarks/reasons.md).
INDUCTOR = {"coordinate_descent_tuning": True}


@dataclass(frozen=True)
class Ran:
    """Microseconds of a decode step, packing shared out over the steps from one to the next; None where there is no
    graph. flush: of a step that packs. bytes: what the driver reports as used (CUDA), or this process's peak resident
    size (CPU). no_graph: why there is no graph, or no figure of one. length: tokens a row at the first step. read:
    bytes of weights and cache that this step must read; None where they are not counted.
    """

    length: int
    eager: float
    graph: float | None
    no_graph: str | None
    bytes: int
    eager_flush: float | None = None
    graph_flush: float | None = None
    apart: float | None = None  # relative error of the graph's logits against eager ones
    read: int | None = None


class Output(Protocol):
    """What the forward of a causal language model returns: logits (B, T, vocabulary)."""

    logits: Tensor


class Stepper:
    """The model with a cache, and what goes from one step to the next: token (B, 1) and position (1, 1)."""

    def __init__(self, model: CausalLM, start: Start, batch: int) -> None:
        self.model, self.start = model, start
        self.forward: Callable[..., Output] = model
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        self.place = torch.full((1, 1), start.length, dtype=torch.long, device=model.device)
        self.rows = some_rows(
            batch
        )  # whose logits are compared: of all rows they take more than there is next to a full cache

    def step(self) -> Tensor:
        """Logits (B, vocabulary) of the next token, which is chosen."""
        inputs = {"input_ids": self.token, "position_ids": self.place, "past_key_values": self.start.cache}
        logits = self.forward(**inputs, use_cache=True).logits[:, -1]
        self.token.copy_(logits.argmax(-1, keepdim=True))
        self.place.add_(1)
        return logits

    def back(self) -> None:
        """Go back to the start."""
        self.start.again()
        self.token.zero_()
        self.place.fill_(self.start.length)


@dataclass
class Pass:
    """Steps from the start, timed.

    Recorded are the microseconds of each step, and what the cache's witness saw behind them. Of the first CHECKED steps
    the token that went in (B, 1) is recorded, too, with the logits of a few rows.
    """

    times: list[float] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    witness: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def run(model: CausalLM, kind: Kind, batch: int, length: int, steps: int = STEPS, compiled: bool = False) -> Ran:
    """Fill a cache with `length` tokens per row, and take steps eagerly, then by a graph where there can be one.

    All of it runs on the model's device, whose streams, events and graphs are the current ones meanwhile. compiled: the
    graph is one of the forward that torch.compile makes.
    """
    assert kind.maker is not None
    with on(model.device), compiling() if compiled else nullcontext():
        start = kind.maker(batch, length, WARM_UP + max(steps, CHECKED))
        try:
            with attention(model, kind):
                return _run(Stepper(model, start, batch), steps, compiled)
        finally:
            start.close()


@contextmanager
def compiling() -> Iterator[None]:
    """Compile one kind's forward. Code compiled before is not asked for: it is found by the call of attention,
    whichever of torch's backends is set, so that cuDNN's served for flash, too (torch 2.11). Nothing stays that holds
    the cache.
    """
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor

    try:
        with inductor.patch(fx_graph_cache=False), autograd.patch(enable_autograd_cache=False):
            yield
    finally:
        torch.compiler.reset()


def _run(stepper: Stepper, steps: int, compiled: bool = False) -> Ran:
    start, device = stepper.start, stepper.model.device
    on_gpu = device.type == "cuda"
    no_graph = start.no_graph if on_gpu or start.no_graph else "needs a CUDA GPU"
    _warm_up(stepper, no_graph is None)
    eager = _eager(stepper, steps)
    used, graph, apart = peak_bytes(device), None, None
    if no_graph is None:
        if compiled:
            stepper.back()
            stepper.forward = torch.compile(stepper.model, dynamic=False, options=dict(INDUCTOR))
            _warm_up(stepper, True)
        recorded = _record(stepper)
        if isinstance(recorded, str):
            no_graph = recorded
        else:
            replay, logits = recorded
            no_graph, apart = _compare(stepper, eager, replay, logits, compiled)
            graph = _replayed(stepper, replay, len(eager.times)) if no_graph is None else None
            used = max(used, peak_bytes(device))
    times = [typical(one, start) if one else (None, None) for one in (eager.times, graph)]
    assert times[0][0] is not None
    weights = weight_bytes(stepper.model)
    read = None if weights is None or start.bytes is None else weights + start.bytes
    return Ran(start.length, times[0][0], times[1][0], no_graph, used, times[0][1], times[1][1], apart, read)


def typical(times: Sequence[float], start: Start) -> tuple[float, float | None]:
    """A step's time with its share of packing, and the time of a step that packs, if one did."""
    plain = statistics.median(t for i, t in enumerate(times) if i != start.flush)
    if start.flush is None or start.flush >= len(times):
        return plain, None
    flush = times[start.flush]
    return plain + max(0.0, flush - plain) / start.period, flush


def _warm_up(stepper: Stepper, aside: bool) -> None:
    """Run steps on a separate stream where a graph will be recorded, as torch asks; then back to the start."""
    if aside:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream) if aside else nullcontext():
        for _ in range(WARM_UP):
            stepper.step()
    if aside:
        torch.cuda.current_stream().wait_stream(stream)
    wait(stepper.model.device)
    stepper.back()


def _eager(stepper: Stepper, steps: int) -> Pass:
    run, began = Pass(), time.perf_counter()
    if stepper.model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(stepper.model.device)  # of steps alone, without filling
    for i in range(max(steps, CHECKED)):
        if i >= LEAST and time.perf_counter() - began > SECONDS:
            break
        if i < CHECKED:
            run.tokens.append(stepper.token.clone())
        wait(stepper.model.device)
        start = time.perf_counter()
        logits = stepper.step()
        wait(stepper.model.device)
        run.times.append((time.perf_counter() - start) * 1e6)
        if i < CHECKED:
            run.logits.append(logits[stepper.rows].clone())
        if i == CHECKED - 1:
            run.witness = stepper.start.witness()
    return run


def _record(stepper: Stepper) -> tuple[Callable[[], None], Tensor] | str:
    """How to replay a step, and where it leaves its logits; else why it cannot be recorded."""
    device = stepper.model.device
    transient = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    stepper.back()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    if cuda_bytes(device) < transient + MARGIN:
        raise torch.OutOfMemoryError("out of memory: a graph's own does not fit beside the cache")
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            logits = stepper.step()
    except Exception as error:
        if ran_out(error):
            raise
        return f"cannot be recorded: {first_line(error)}"
    finally:
        torch.cuda.set_stream(current)  # a recording that fails does not restore the stream
    return graph.replay, logits


def _compare(
    stepper: Stepper, eager: Pass, replay: Callable[[], None], logits: Tensor, compiled: bool = False
) -> tuple[str | None, float]:
    """Why the steps of a graph are not the eager ones from the same start, None if they are; relative error of
    logits.
    """
    stepper.back()
    worst = 0.0
    for token, expected in zip(eager.tokens, eager.logits, strict=True):
        stepper.token.copy_(token)
        replay()
        stepped = logits[stepper.rows].double()
        apart = float((stepped - expected.double()).norm() / expected.double().norm())
        worst = max(worst, apart) if apart == apart else float("nan")
        if worst != worst:
            break
    allowed = (COMPILED_TOLERANCE if compiled else TOLERANCE) * torch.finfo(logits.dtype).eps
    if not worst <= allowed:
        return f"check failed: logits of the graph are off by {worst:.2g}, allowed {allowed:.2g}", worst
    return differ(eager.witness, stepper.start.witness()), worst


def differ(one: Sequence[Tensor], other: Sequence[Tensor]) -> str | None:
    """Why two witnesses do not agree. Whole numbers of tokens and blocks come first, then bytes of a block."""
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        if a.shape != b.shape or (i < 2 and not torch.equal(a, b)):
            return f"check failed: the graph leaves {_short(b)} tokens or blocks, eager steps {_short(a)}"
        same = a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)
        share = float(same.double().mean())
        if share < ALIKE:
            return f"check failed: {1 - share:.1%} of the bytes of the newest packed block differ"
    return None


def _short(x: Tensor) -> str:
    return str(x.flatten()[:3].tolist())


def _replayed(stepper: Stepper, replay: Callable[[], None], steps: int) -> list[float]:
    """Microseconds of each step, by events."""
    stepper.back()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize(stepper.model.device)
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    torch.cuda.synchronize(stepper.model.device)
    return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":  # torch keeps what it took, so what is in use after steps is what was at most
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def capacity(device: torch.device) -> float:
    """Bytes in use, as the driver counts, when there is no more room."""
    return peak_bytes(device) + cuda_bytes(device)


def released(device: torch.device) -> None:
    """Free what earlier runs took, so that the next peak is of the next run alone."""
    fill.cache_clear()
    gc.collect()  # caches and their layers know each other
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def ran_out(error: BaseException | None) -> bool:
    """Whether it, or what it came from, says that memory is short."""
    while error is not None:
        if is_oom(error) or "alloc_failed" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False
