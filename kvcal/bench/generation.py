"""Whole models with random weights: tokens per second, largest batch and longest generation on a memory, peak memory.

Caches start filled with random packed data (caches.py), so that no prefill of the length is needed. Decode steps then
run through the model, eagerly and as a CUDA graph (decoding.py), each in a row of its own. Or generate() itself takes
them (calling.py), in rows of operations of their own. Ratios are to the best FP16 among the rows at hand, named in each
(`with_fp16_ratios`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from transformers import CompileConfig

from . import calling, decoding
from .caches import Kind
from .decoding import Ran, ran_out, released
from .memory import vqkv_reference
from .peers import first_line
from .rows import Row

if TYPE_CHECKING:
    from kvcal_artifacts.checked import Json

    from ..models.structure import CausalLM

LARGEST = 1 << 24  # where a search for a length or a batch ends
TRIALS = 8  # of a largest batch, each some seconds of a GPU
PROBES = (1, 8)  # batches from whose memory the largest is estimated
CAUTION = 0.97  # of that estimate: a large batch that runs gives a far better one
EAGER, GRAPH, CALL, COMPILED = "eager", "CUDA graph", "generate()", "generate(), its forward compiled"
COMPILED_GRAPH = "forward compiled, CUDA graph"
CALLED, LARGEST_CALLED = "generate-call", "largest-batch-call"  # operations of rows that generate() itself gives
COMPILED_STEPS = "generate-compiled"  # of rows whose forward torch compiled
AT_BATCH, AT_LARGEST = ("generate", COMPILED_STEPS, CALLED), ("largest-batch", LARGEST_CALLED)
FEWER = 2  # times that a smaller batch is tried where generate() does not fit at the largest one of steps
NEEDS_GPU = "needs a CUDA GPU: steps of a compiled forward are measured under a CUDA graph"
FP16 = ("fp16", "fp32")  # schemes that compress nothing
Measured = TypeVar("Measured")


def tried(
    model: CausalLM, kind: Kind, batch: int, length: int, steps: int = decoding.STEPS, compiled: bool = False
) -> Ran | str:
    """How decode steps ran; else why they did not: memory, a backend that is not there, or what the kind itself
    refuses. What else is raised goes on.
    """
    run = partial(decoding.run, compiled=True) if compiled else decoding.run
    refusal = kind.refusal(batch, length)
    if refusal is not None:
        return refusal
    return _attempted(model, kind, lambda: run(model, kind, batch, length, steps))


def _attempted(model: CausalLM, kind: Kind, run: Callable[[], Measured]) -> Measured | str:
    """What `run` gives; else, as a text, why it did not run."""
    released(model.device)
    try:
        return run()
    except Exception as error:
        if ran_out(error):
            return "out of memory"
        if kind.backend is not None and isinstance(error, RuntimeError):
            return f"this backend of torch does not run here: {first_line(error)}"
        raise


def generate_rows(
    model_name: str,
    model: CausalLM,
    every: Sequence[Kind],
    shapes: Sequence[tuple[int, int]],
    device: str,
    steps: int = decoding.STEPS,
    copy: float | None = None,
) -> Iterator[Row]:
    """Tokens per second of each kind at each (batch, length), as they are measured: one row eager, one of a graph.

    steps: timed ones, at most. copy: bytes per second of a large copy, for the rows' fraction of it.
    """
    for batch, length in shapes:
        for kind in every:
            try:
                ran = str(kind.why_not) if kind.maker is None else tried(model, kind, batch, length, steps)
            except Exception as error:  # of this kind alone: the others go on
                ran = first_line(error)
            yield from _timed(model_name, kind, batch, length, device, "generate", ran, copy)


def compiled_rows(
    model_name: str,
    model: CausalLM,
    every: Sequence[Kind],
    shapes: Sequence[tuple[int, int]],
    device: str,
    copy: float | None = None,
) -> Iterator[Row]:
    """Like generate_rows of CUDA graphs, with the forward that torch.compile makes: of each kind anew, a minute or so
    of an 8B model. Where there is no graph, the reason.
    """
    for batch, length in shapes:
        for kind in every:
            ran: Ran | str
            try:
                ran = str(kind.why_not) if kind.maker is None else NEEDS_GPU
                if kind.maker is not None and model.device.type == "cuda":
                    ran = tried(model, kind, batch, length, compiled=True)
            except Exception as error:  # of this kind alone: the others go on
                ran = first_line(error)
            at = replace(kind, path=f"{kind.path}; {COMPILED_GRAPH}")
            if isinstance(ran, Ran) and ran.graph is None:
                ran = str(ran.no_graph)
            if isinstance(ran, str):
                yield _row(model_name, at, batch, length, device, COMPILED_STEPS, None, refused=ran)
                continue
            yield list(_timed(model_name, kind, batch, length, device, COMPILED_STEPS, ran, copy))[-1]


def _timed(
    model: str,
    kind: Kind,
    batch: int,
    length: int,
    device: str,
    operation: str,
    ran: Ran | str,
    copy: float | None,
    **more: Json,
) -> Iterator[Row]:
    """An eager row, and one of a graph where one could be recorded; where it was refused, it says so."""
    if isinstance(ran, str):
        yield _row(model, kind, batch, length, device, operation, None, refused=ran)
        return
    shared: dict[str, Json] = {"tokens": ran.length, "peak_bytes": ran.bytes, **kind.more, **more}

    def row(mode: str, taken: float | None, flush: float | None, refused: str | None = None, **figures: Json) -> Row:
        if taken is not None:
            figures = {"tokens_per_second": batch * 1e6 / taken, "flush_microseconds": flush, **figures}
        at = replace(kind, path=f"{kind.path}; {mode}")
        plain_row = _row(model, at, batch, length, device, operation, taken, refused, more={**figures, **shared})
        if ran.read is None or copy is None or taken is None:
            return replace(plain_row, bytes=ran.read)
        return replace(plain_row, bytes=ran.read, fraction_of_copy=ran.read / copy * 1e6 / taken)

    failed = ran.no_graph is not None and ran.apart is not None
    graph = COMPILED_GRAPH if operation == COMPILED_STEPS else GRAPH
    yield row(EAGER, ran.eager, ran.eager_flush, no_graph=None if failed else ran.no_graph)
    if ran.graph is not None or failed or str(ran.no_graph).startswith("cannot be recorded"):
        yield row(graph, ran.graph, ran.graph_flush, ran.no_graph, logits_apart=ran.apart)


def _row(
    model: str,
    kind: Kind,
    batch: int,
    length: int,
    device: str,
    operation: str,
    taken: float | None,
    refused: str | None = None,
    more: dict[str, Json] | None = None,
) -> Row:
    return Row(
        operation=operation,
        scheme=kind.name,
        model=model,
        batch=batch,
        length=length,
        microseconds=taken,
        stored_bits=kind.stored_bits,
        fraction_of_copy=None,
        ratio_to_fp16=None,
        fp16_backend=None,
        projected=False,
        device=device,
        path=kind.path,
        refused=refused,
        **kind.settings,
        more=more or {},
    )


def called_rows(
    model_name: str,
    model: CausalLM,
    every: Sequence[Kind],
    shapes: Sequence[tuple[int, int]],
    device: str,
    copy: float | None = None,
) -> Iterator[Row]:
    """Tokens per second that generate() gives with each kind at each (batch, length). copy: see `generate_rows`."""
    for batch, length in shapes:
        for kind in every:
            try:
                ran = str(kind.why_not) if kind.maker is None else _called(model, kind, batch, length, None)
            except Exception as error:  # of this kind alone: the others go on
                ran = first_line(error)
            yield _call_row(model_name, kind, batch, length, device, CALLED, ran, copy, CALL)


def largest_called_rows(
    model_name: str,
    model: CausalLM,
    kind: Kind,
    length: int,
    largest: int,
    device: str,
    copy: float | None = None,
    compiled: CompileConfig | None = None,
) -> list[Row]:
    """generate() at the largest batch of decode steps. The batch is somewhat smaller where memory does not hold what it
    needs besides: ids, masks, logits in float32, what a compiled forward holds. compiled: how its forward is; None: not
    at all.
    """
    sizes = [largest]
    for _ in range(FEWER if largest > FEWER else 0):
        sizes.append(min(sizes[-1] - 1, int(CAUTION * sizes[-1])))
    ran: calling.Called | str = "out of memory"
    try:
        for batch in sizes:
            ran = _called(model, kind, batch, length, compiled)
            if ran != "out of memory":
                break
    except Exception as error:  # of this row alone
        ran = first_line(error)
    mode = CALL if compiled is None else COMPILED
    called = _call_row(model_name, kind, batch, length, device, LARGEST_CALLED, ran, copy, mode, largest_batch=largest)
    return [called]


def _called(
    model: CausalLM, kind: Kind, batch: int, length: int, compiled: CompileConfig | None
) -> calling.Called | str:
    refusal = kind.refusal(batch, length)
    if refusal is not None:
        return refusal
    return _attempted(model, kind, lambda: calling.run(model, kind, batch, length, compiled))


def _call_row(
    model: str,
    kind: Kind,
    batch: int,
    length: int,
    device: str,
    operation: str,
    ran: calling.Called | str,
    copy: float | None,
    mode: str,
    **more: Json,
) -> Row:
    at = replace(kind, path=f"{kind.path}; {mode}")
    if isinstance(ran, str):
        return _row(model, at, batch, length, device, operation, None, ran)
    more = {"tokens": ran.length, "logits_apart": ran.apart, "peak_bytes": ran.bytes, **kind.more, **more}
    if ran.wrong is not None:
        return _row(model, at, batch, length, device, operation, None, ran.wrong, more)
    more = {
        "tokens_per_second": batch * 1e6 / ran.taken,
        "flush_microseconds": ran.flush,
        "mean_microseconds": ran.mean,
        **more,
    }
    plain_row = _row(model, at, batch, length, device, operation, ran.taken, more=more)
    fraction = None if ran.read is None or copy is None else ran.read / copy * 1e6 / ran.taken
    return replace(plain_row, bytes=ran.read, fraction_of_copy=fraction, repeats=ran.timed)


def with_fp16_ratios(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their ratios to the best FP16 of the same model and shape among them, eager or not.

    generate, generate-compiled, generate-call: time, of the same batch. largest-batch, largest-batch-call:
    `batch_to_fp16`, and `throughput_to_fp16` each at its own batch.
    """
    return [_with_fp16_ratio(row, rows) if row.operation in (*AT_BATCH, *AT_LARGEST) else row for row in rows]


def _with_fp16_ratio(row: Row, rows: Sequence[Row]) -> Row:
    at_batch = row.operation in AT_BATCH
    peers = [
        one
        for one in rows
        if one.scheme in FP16
        and one.microseconds
        and (one.operation, one.model, one.length) == (row.operation, row.model, row.length)
        and (one.batch == row.batch or not at_batch)
    ]
    if not peers or not row.microseconds:
        return row
    best = max(peers, key=_speed)
    ratio = _speed(row) / _speed(best)
    if at_batch:
        return replace(row, ratio_to_fp16=ratio, fp16_backend=best.path)
    most = max(one.batch for one in peers)
    more = {"throughput_to_fp16": ratio, "batch_to_fp16": row.batch / most}
    return replace(row, fp16_backend=best.path, more={**row.more, **more})


def _speed(row: Row) -> float:
    """Tokens per second."""
    speed = row.more["tokens_per_second"]
    assert isinstance(speed, (int, float))
    return float(speed)


@dataclass
class Search:
    """The largest number that fits, by doubling and halving from an estimate. fits: asked at most `trials` times for a
    number from 1. step: numbers are multiples of it. better: a new estimate, after a number has fitted.
    """

    fits: Callable[[int], bool]
    step: int = 1
    trials: int = 64
    better: Callable[[], int] = lambda: 0
    fitted: dict[int, bool] = field(default_factory=dict)

    @property
    def low(self) -> int:
        return max((n for n, good in self.fitted.items() if good), default=0)

    @property
    def high(self) -> int | None:
        return min((n for n, good in self.fitted.items() if not good), default=None)

    @property
    def proven(self) -> bool:
        """Whether the next larger number has been tried and does not fit."""
        return self.high is not None and self.high - self.low <= self.step

    def run(self, start: int) -> int:
        """The largest number that fits, tried from `start`, a multiple of step; 0 if not even the first fits."""
        at, width = max(start, self.step), self.step
        for _ in range(self.trials):
            if self.proven or at > LARGEST:
                break
            self.fitted[at] = self.fits(at)
            low, high = self.low, self.high
            if high is None:
                at = max(low + width, self.better())
            elif at - width > low and not self.fitted[at]:
                at -= width
            else:
                at = max(low + self.step, (low + high) // 2 // self.step * self.step)
            width *= 2
        return self.low


def estimate(used: dict[int, int], total: float) -> int:
    """How many fit into `total` bytes, from what two numbers of them used."""
    (few, least), (many, most) = sorted(used.items())[:1] + sorted(used.items())[-1:]
    each = (most - least) / max(1, many - few)
    return max(1, int(few + (total - least) / each)) if each > 0 else many


def largest_batch_rows(
    model_name: str,
    model: CausalLM,
    every: Sequence[Kind],
    length: int,
    device: str,
    largest: dict[str, int] | None = None,
    copy: float | None = None,
) -> Iterator[Row]:
    """Measured: the largest batch at that length, and the tokens per second there, as they are found.

    A batch fits where its steps run, under a graph if there can be one. Small batches give an estimate, which is tried
    with its neighbours. largest: of earlier calls, by path; is added to. copy: see `generate_rows`.
    """
    largest = {} if largest is None else largest
    for kind in every:
        if kind.maker is None:
            yield _row(model_name, kind, 1, length, device, "largest-batch", None, kind.why_not)
            continue
        ran: dict[int, Ran | str] = {}

        def fits(batch: int, kind: Kind = kind, ran: dict[int, Ran | str] = ran) -> bool:
            ran[batch] = tried(model, kind, batch, length)
            return not isinstance(ran[batch], str)

        most = kind.most_rows(length)

        def better(ran: dict[int, Ran | str] = ran, most: int | None = most) -> int:
            used = {n: one.bytes for n, one in ran.items() if isinstance(one, Ran)}
            estimated = estimate(used, decoding.capacity(model.device)) if len(used) > 1 else 0
            return estimated if most is None else min(estimated, most + 1)

        search = Search(fits, trials=TRIALS, better=better)
        try:
            start = largest.get(kind.bytes_like or "") or (_probed(search) and int(CAUTION * better())) or search.low
            batch = search.run(start if most is None else min(start, most)) if start else 0
        except Exception as error:  # of this kind alone, and not of memory: what fitted so far is no largest batch
            yield _row(model_name, kind, 1, length, device, "largest-batch", None, first_line(error))
            continue
        if not batch:
            why = next((str(one) for one in ran.values() if isinstance(one, str)), "out of memory")
            yield _row(model_name, kind, 1, length, device, "largest-batch", None, why)
            continue
        largest[kind.path] = batch
        more: dict[str, Json] = {
            "largest_batch": batch,
            "one_more_fails": search.proven,
            "limited_by": kind.refusal(batch + 1, length),
        }
        yield from _timed(model_name, kind, batch, length, device, "largest-batch", ran[batch], copy, **more)


def _probed(search: Search) -> bool:
    """Small batches, from which the largest is estimated; whether all of them ran."""
    for batch in PROBES:
        search.fitted[batch] = search.fits(batch)
        if not search.fitted[batch]:
            return False
    return True


def longest_rows(
    model_name: str, model: CausalLM, every: Sequence[Kind], batch: int, memory: float, device: str
) -> list[Row]:
    """Measured: the most tokens a row can hold and still make the next one (VQKV Table 3)."""
    rows = []
    for kind in every:
        if kind.maker is None:
            continue
        try:
            longest = Search(partial(_goes_on, model, kind, batch), 256).run(1024)
        except Exception as error:  # of this kind alone, and not of memory
            none: dict[str, Json] = {"longest_length": 0, "memory_gib": memory}
            rows.append(_row(model_name, kind, batch, 0, device, "longest-generation", None, first_line(error), none))
            continue
        more: dict[str, Json] = {
            "longest_length": longest,
            "memory_gib": memory,
            **vqkv_reference(model_name, kind.name, memory, model.dtype.itemsize),
        }
        rows.append(_row(model_name, kind, batch, longest, device, "longest-generation", None, more=more))
    return rows


def _goes_on(model: CausalLM, kind: Kind, batch: int, length: int) -> bool:
    return not isinstance(tried(model, kind, batch, length, steps=1), str)
