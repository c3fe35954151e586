"""The rows of `kvcal plan`: each scheme on one model and one card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypedDict, TypeVar, final

from ...report.quantities import significant
from . import quality, schemes, speed
from .cards import Card
from .memory import CHUNK, Load, Model, Windows, largest
from .quality import Quality
from .schemes import COMPOSED, FITTED, Planned, Sizes
from .speed import Step

FULL = "fp16"
MOST_ROWS = 1 << 16
YES, CHUNKS, NO = "yes", "in chunks", "no"  # whether it fits: as it is, if the prompt is fed in chunks, not at all
EAGER = "eager"  # how a step begins that no CUDA graph has
EVEN = 0.95  # of the fastest scheme's tokens per second, within which a smaller cache is the better choice


@dataclass(frozen=True)
class Goal:
    """What is planned.

    name: of the model, in commands. read: whether the weights that a step reads are known, which they are not with
    experts. context: tokens per row. longest: of the model. budget: of KL, nats per token.
    """

    name: str
    model: Model
    context: int
    longest: int
    batch: int
    budget: float | None = None
    read: bool = True


@dataclass(frozen=True)
class Candidate:
    """A scheme, or FP16 where `scheme` is None, with what it takes on the model."""

    name: str
    load: Load
    scheme: Planned | None = None
    sizes: Sizes | None = None

    @property
    def bits(self) -> float:
        return 8.0 * self.load.model.width if self.sizes is None else self.sizes.bits


def candidate(scheme: Planned, model: Model, card: Card) -> Candidate:
    """UsageError where the scheme does not fit the model's shape."""
    sizes = schemes.sizes(scheme, model.geometry)
    decodes = sizes.why_decoded is not None or card.no_kernels is not None or model.width != 2
    windows = Windows(scheme.sink, scheme.recent, scheme.block)
    return Candidate(
        scheme.name, Load(model, windows, float(sum(sizes.blocks)), sizes.constants, decodes), scheme, sizes
    )


def full(model: Model) -> Candidate:
    return Candidate(FULL if model.width == 2 else "fp32", Load(model, Windows()))


class KL(TypedDict):
    """The measured KL of a row's scheme, in nats per token; None where it was never measured."""

    kl: float | None
    kl_upper: float | None
    kl_upper_anywhere: float | None
    kl_model: str | None
    kl_models: list[str]
    kl_se: float | None
    kl_same_architecture: bool | None


@final
class Row(KL):
    """A scheme, or FP16, on the model and card. Bytes of a row of `context` tokens; seconds and KL where measured."""

    scheme: str
    bits: float
    cache_bytes: int
    times_smaller: float
    fits: str
    longest_context: int
    longest_context_whole_prompt: int
    largest_batch: int
    tokens_per_second: float | None
    tokens_per_second_of_largest_batch: float | None
    prefill_seconds: float | None
    step: str
    kl_class: str | None
    within_budget: bool | None
    bytes: dict[str, int]
    decode_peak_bytes: int
    prefill_peak_bytes: int
    prefill_in_chunks_peak_bytes: int
    next: str | None


def rows(goal: Goal, planned: Sequence[Planned], card: Card) -> list[Row]:
    """FP16 first, then the schemes by size, the largest first."""
    first = full(goal.model)
    others = [candidate(scheme, goal.model, card) for scheme in planned]
    others.sort(key=lambda one: -one.load.cache_bytes(goal.context))
    size = first.load.cache_bytes(goal.context)
    return [_row(goal, one, card, size) for one in (first, *others)]


def _row(goal: Goal, one: Candidate, card: Card, full_size: float) -> Row:
    load, length, batch = one.load, goal.context, goal.batch
    cache = load.cache_bytes(length)
    decode, prefill = load.decode(batch, length), load.prefill(batch, length)
    chunked = load.prefill(batch, length, CHUNK)
    fits = _fits(load, batch, length, card.memory)
    kl = quality.NOTHING if one.scheme is None else quality.expected(one.name, goal.model.geometry.model_type)
    most = largest(lambda n: load.peak(n, length, CHUNK) <= card.memory, MOST_ROWS)
    return {
        "scheme": one.name,
        "bits": one.bits,
        "cache_bytes": round(cache),
        "times_smaller": full_size / cache,
        "fits": fits,
        "longest_context": largest(lambda n: load.peak(batch, n, CHUNK) <= card.memory, goal.longest),
        "longest_context_whole_prompt": largest(lambda n: load.peak(batch, n) <= card.memory, goal.longest),
        "largest_batch": most,
        "tokens_per_second": _speed(goal, one, card),
        "tokens_per_second_of_largest_batch": _speed(replace(goal, batch=most), one, card) if most else None,
        "prefill_seconds": _prefill(goal, one, card, fits),
        "step": _how(one, card),
        **kl_fields(kl),
        "kl_class": None if kl is None else "0" if one.scheme is None else kl.kl_class,
        "within_budget": None if goal.budget is None else kl is not None and kl.upper <= goal.budget,
        "bytes": {name: round(size) for name, size in vars(decode).items()},
        "decode_peak_bytes": round(decode.total),
        "prefill_peak_bytes": round(prefill.total),
        "prefill_in_chunks_peak_bytes": round(chunked.total),
        "next": None if one.scheme is None else command_of(one.scheme, goal.name),
    }


def _prefill(goal: Goal, one: Candidate, card: Card, fits: str) -> float | None:
    """Seconds of the prompts of all rows, fed as they fit; None where they do not fit, or no rate was measured."""
    model = goal.model
    if fits == NO or not goal.read or model.width != 2:  # the card's rate is that of 16-bit products
        return None
    operations = goal.batch * model.prompt_operations(goal.context)
    return speed.prompt_seconds(operations, model.read_bytes, card, one.scheme is not None, fits == CHUNKS)


def _fits(load: Load, batch: int, length: int, memory: float) -> str:
    if load.peak(batch, length) <= memory:
        return YES
    return CHUNKS if load.peak(batch, length, CHUNK) <= memory else NO


def kl_fields(kl: Quality | None) -> KL:
    return {
        "kl": None if kl is None else kl.kl,
        "kl_upper": None if kl is None else kl.upper,
        "kl_upper_anywhere": None if kl is None else kl.anywhere,
        "kl_model": None if kl is None else kl.model,
        "kl_models": [] if kl is None else list(kl.models),
        "kl_se": None if kl is None else kl.se,
        "kl_same_architecture": None if kl is None else kl.alike,
    }


def _speed(goal: Goal, one: Candidate, card: Card) -> float | None:
    """Tokens per second of all rows together; None where no rate was measured."""
    step = step_of(goal, one)
    taken = None if step is None else speed.seconds(step, card)
    return None if taken is None else goal.batch / taken


def step_of(goal: Goal, one: Candidate) -> Step | None:
    """None where what a step reads is not known, or no such scheme's kernel was timed."""
    load, batch = one.load, goal.batch
    timed = None if one.scheme is None else one.scheme.timed
    if not goal.read or (one.scheme is not None and timed is None and not load.decodes):
        return None
    geometry = goal.model.geometry
    packed = load.blocks(goal.context) * load.windows.block
    return Step(
        geometry.layers,
        batch,
        goal.model.read_bytes,
        goal.model.multiplied,
        batch * load.cache_bytes(goal.context) + load.constants,
        2.0 * batch * goal.context * geometry.kv_width * load.layers,
        timed,
        batch * packed * load.layers * goal.model.layer_token if load.decodes else 0.0,
        batch * packed * load.constants if one.scheme is not None and one.scheme.predicted else 0.0,
    )


def _how(one: Candidate, card: Card) -> str:
    if one.scheme is None:
        return "CUDA graph, cache allocated once, attention as cuDNN's"
    if not one.load.decodes:
        return f"CUDA graph, fused kernel as timed for {one.scheme.timed}" if one.scheme.timed else "not timed"
    assert one.sizes is not None
    why = one.sizes.why_decoded or (f"{card.no_kernels}" if card.no_kernels else "float32 has no kernel")
    return f"{EAGER}, blocks decoded at each step: {why}"


def command_of(scheme: Planned, model: str, windows: bool = True) -> str:
    """The command that makes a bundle of it. windows: False where every token is to be packed."""
    none = "" if windows else " --sink 0 --recent 0"
    if scheme.command == "preset":
        return f"kvcal preset {scheme.name}{none} -m {model}"
    if scheme.command == FITTED:
        alone = '--first-layer "" --key-inputs none --value-inputs none --frame post_rope'
        return f"kvcal fit aqua-kv --residual {scheme.name} {alone}{none} -m {model}"
    if scheme.command == COMPOSED:
        usual = Planned("", "", "")
        options = [
            f" --{name} {getattr(scheme, name)}"
            for name in ("sink", "recent", "block")
            if getattr(scheme, name) != getattr(usual, name) and (windows or name == "block")
        ]
        return f"kvcal preset --keys {scheme.key} --values {scheme.value}{''.join(options)}{none} -m {model}"
    return f"kvcal {scheme.command} -m {model}"


@dataclass(frozen=True)
class Choice:
    """The scheme that a plan recommends. why: a clause for people, KL in nats per token."""

    scheme: str
    why: str


def recommended(planned_rows: Sequence[Row], budget: float | None) -> Choice | None:
    """The smallest cache of the schemes that fit and whose KL with its spread is below `budget` (without one: the end
    of the lowest class). Only those count that are within EVEN of the fastest.

    A scheme good on every measured model goes before one good on this architecture's alone: outliers differ
    between models of one architecture. Where speeds are not known, one that a kernel attends to goes before one that is
    decoded at each step. None where none is left.
    """
    fitting = [row for row in planned_rows[1:] if row["fits"] != NO]
    chosen = holding(fitting, budget)
    if not (good := chosen.rows):
        return None
    fastest = max(row["tokens_per_second"] or 0.0 for row in good)
    quick = [row for row in good if (row["tokens_per_second"] or 0.0) >= EVEN * fastest]
    if not fastest:
        quick = [row for row in good if not row["step"].startswith(EAGER)] or good
    best = min(quick, key=lambda row: row["cache_bytes"])
    return Choice(best["scheme"], f"{chosen.words(best)}; {_leads(good, quick, bool(fastest))}")


RowT = TypeVar("RowT", bound=KL)


@dataclass(frozen=True)
class Holding(Generic[RowT]):
    """The rows whose KL is within the limit: on every measured model, or where there are none such, on this
    architecture.
    """

    rows: list[RowT]
    limit: float
    everywhere: bool

    def words(self, best: RowT) -> str:
        """Say on which models the KL of the best row is within the limit."""
        kl = best["kl_upper_anywhere"] if self.everywhere else best["kl_upper"]
        assert kl is not None
        on = "every measured model" if self.everywhere else "this architecture, though not on every measured model"
        return f"KL up to {significant(kl)} on {on} (limit {self.limit:g})"


def holding(rows: Sequence[RowT], budget: float | None) -> Holding[RowT]:
    """Those of the rows whose KL holds. budget: nats per token; None: the lowest class's end."""
    limit = quality.CLASSES[0] if budget is None else budget
    good = [row for row in rows if _below(row["kl_upper"], limit)]
    everywhere = [row for row in good if _below(row["kl_upper_anywhere"], limit)]
    return Holding(everywhere or good, limit, bool(everywhere))


def _leads(good: Sequence[Row], quick: Sequence[Row], timed: bool) -> str:
    """Say what the best row has before the other good ones."""
    if len(good) == 1:
        return "the only one that fits and holds there"
    if not timed:
        kernel = ", hold there" if quick[0]["step"].startswith(EAGER) else ", hold there and have a kernel"
        return f"the smallest cache of those that fit{kernel}, as no speed is known"
    if len(quick) == 1:
        return "the fastest of those that fit and hold there"
    return f"of those that fit and hold there, the smallest cache within {1 - EVEN:.0%} of the fastest"


def _below(kl: float | None, limit: float) -> bool:
    return kl is not None and kl <= limit
