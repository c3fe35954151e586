"""Codecs by layer and side for the least KL under a budget of stored bits.

First each codec alone is measured: the forward KL of the model with one layer's keys, or values, in that codec and all
else exact (kvcal.calibrate.forecast). Then comes the assignment with the least sum of these under the budget
(knapsack.py). The sum leaves out how errors add up, so the assignment is measured whole, through the cache and on
held-out windows. Next to it stands every pair of one codec for all keys and one for all values that fits the budget.
The best of all is taken. Codecs need no data, or are fitted under predictors (predicted_codecs.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from kvcal_artifacts.codecs import Role
from kvcal_artifacts.errors import NonFiniteError, UsageError
from kvcal_artifacts.scheme import Scheme

from ..calibrate.forecast import forecasts, least_tokens
from ..capture.ranks import ALONE, Ranks
from ..capture.spread import spread
from ..evaluate.perplexity import CacheMaker, Row, evaluate
from ..methods.data_free import Preset
from ..report.progress import progress
from ..report.records import is_number
from .knapsack import Option, least_size, solve

if TYPE_CHECKING:
    from kvcal_artifacts.cache import KVCalCache

    from ..models.structure import CausalLM

EXACT = "exact-32"
TUNED, BY_LAYER = "tuned", "tuned by layer"  # by head group, where there are any; one codec for all heads of a side
ROLES: tuple[Role, Role] = ("key", "value")
WORST = 1e6  # nats instead of an infinite KL, so that sums stay comparable

Place = tuple[int, Role]


class Store(Protocol):
    """Where measured sensitivities are stored for a run that goes on."""

    def read(self, name: str) -> object:
        """The value of that name; None where there is none."""

    def keep(self, name: str, value: object) -> None:
        """A value that JSON has."""


@dataclass(frozen=True)
class Assignment:
    """A codec for each layer and side. key, value: the most frequent codec of each side; per_layer: exceptions, as
    --per-layer has them.
    """

    key: str
    value: str
    per_layer: tuple[str, ...] = ()

    @classmethod
    def of(cls, chosen: Mapping[Place, str]) -> Assignment:
        sides = {role: {layer: name for (layer, side), name in chosen.items() if side == role} for role in ROLES}
        main = {role: _most_frequent(list(names.values())) for role, names in sides.items()}
        exceptions = [
            f"{_span(layers)}:{role}s={name}"
            for role, names in sides.items()
            for name, layers in _runs(names)
            if name != main[role]
        ]
        return cls(main["key"], main["value"], tuple(exceptions))

    def preset(self, base: Preset) -> Preset:
        """Windows and frame of `base` with these codecs."""
        return replace(base, key=self.key, value=self.value, per_layer=self.per_layer)


class Schemes(Protocol):
    """How codecs by name become schemes of a model."""

    @property
    def exact(self) -> Scheme:
        """Every layer in float32."""

    def alone(self, layer: int, role: Role, codec: str) -> Scheme:
        """One layer's keys, or values, in that codec and all else exact."""

    def whole(self, assignments: Mapping[str, Assignment]) -> dict[str, Scheme]:
        """The scheme of each assignment, by its name."""


@dataclass(frozen=True)
class DataFreeSchemes:
    """Codecs that need no data. base: windows and frame."""

    model: CausalLM
    base: Preset

    @property
    def exact(self) -> Scheme:
        return replace(self.base, key=EXACT, value=EXACT, per_layer=()).scheme(self.model)

    def alone(self, layer: int, role: Role, codec: str) -> Scheme:
        exception = f"{layer}:{role}s={codec}"
        return replace(self.base, key=EXACT, value=EXACT, per_layer=(exception,)).scheme(self.model)

    def whole(self, assignments: Mapping[str, Assignment]) -> dict[str, Scheme]:
        return {name: one.preset(self.base).scheme(self.model) for name, one in assignments.items()}


def _most_frequent(names: list[str]) -> str:
    return max(dict.fromkeys(names), key=names.count)


def _runs(names: Mapping[int, str]) -> Iterator[tuple[str, list[int]]]:
    """Consecutive layers with one codec."""
    numbered = enumerate(sorted(names))
    for (name, _), run in itertools.groupby(numbered, key=lambda pair: (names[pair[1]], pair[1] - pair[0])):
        yield name, [layer for _, layer in run]


def _span(layers: list[int]) -> str:
    return f"{layers[0]}" if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def budget_of(schemes: Schemes, max_bits: float) -> int:
    """Bytes that a block of all layers may take at `max_bits` stored bits per value."""
    return int(max_bits * _values(schemes) / 8 + 1e-6)


def _values(schemes: Schemes) -> int:
    """Keys' and values' numbers in a block of all layers."""
    return sum(pair.key.shape.values + pair.value.shape.values for pair in schemes.exact.layers if pair is not None)


def check_budget(codecs: Sequence[str], schemes: Schemes, max_bits: float) -> None:
    """Raises UsageError, which names the least bits that fit, where not even the smallest codecs do; before anything is
    measured.
    """
    uniform = schemes.whole({name: Assignment(name, name) for name in codecs}).values()
    places = itertools.product(schemes.exact.compressed, ROLES)
    sizes = [[Option("", _size(one, layer, role), 0.0) for one in uniform] for layer, role in places]
    if (least := least_size(sizes)) > budget_of(schemes, max_bits):
        bits = math.ceil(round(least * 8 / _values(schemes) * 1e4, 6)) / 1e4  # up, so that it fits
        raise UsageError(
            f"--max-bits {max_bits:g}: the smallest of --codecs {','.join(codecs)} take {bits:g} stored bits per "
            f"value; give at least {bits:g}, or a smaller codec"
        )


def sensitivities(
    model: CausalLM, ids: Tensor, codecs: Sequence[str], schemes: Schemes, store: Store, ranks: Ranks = ALONE
) -> dict[Place, list[Option]]:
    """Each codec's bytes a block and its KL on token windows ids (N, T), all else exact, for each compressed layer and
    side. ranks: the processes that share these. Raises UsageError where windows are too short to pack a block.
    """
    exact = schemes.exact
    check_length(exact, ids)
    places = {f"codecs-{layer}-{role}": (layer, role) for layer, role in itertools.product(exact.compressed, ROLES)}

    def alone(label: str) -> dict[str, Scheme]:
        return {name: schemes.alone(*places[label], name) for name in codecs}

    options: dict[Place, list[Option]] = {}
    with progress("Measuring codecs", total=len(places)) as advance:
        for label, kls in kls_alone(model, ids, list(places), alone, codecs, store, ranks):
            layer, role = places[label]
            sizes = {name: _size(one, layer, role) for name, one in alone(label).items()}
            options[layer, role] = [Option(name, sizes[name], kls[name]) for name in codecs]
            advance()
    return options


def check_length(exact: Scheme, ids: Tensor) -> None:
    """Raises UsageError where token windows ids (N, T) are too short to pack a block."""
    if (need := least_tokens(exact)) > ids.shape[1]:
        raise UsageError(f"--length {ids.shape[1]}: packs nothing to measure; give {need} or more")


def kls_alone(
    model: CausalLM,
    ids: Tensor,
    labels: Sequence[str],
    alone: Callable[[str], Mapping[str, Scheme]],
    codecs: Sequence[str],
    store: Store,
    ranks: Ranks,
) -> Iterator[tuple[str, dict[str, float]]]:
    """Each label, and the KL of each of its schemes by codec, at most WORST.

    What rank 0 has in `store` under the label is taken; the others are measured by one rank, and stored.
    """
    stored = ranks.agree({label: kls for label in labels if (kls := _stored(store.read(label), codecs)) is not None})

    def measure(label: str) -> dict[str, float]:
        return {name: min(result.kl, WORST) for name, result in forecasts(model, ids, alone(label)).items()}

    measured = spread(ranks, [label for label in labels if label not in stored], measure)
    for label in labels:
        if (kls := stored.get(label)) is None:
            kls = next(measured)
            store.keep(label, kls)
        yield label, kls


def _stored(value: object, codecs: Sequence[str]) -> dict[str, float] | None:
    """The KL of each codec as a store has it; None where it has none, or not all of them."""
    kls = value if isinstance(value, dict) else {}
    stored = {name: float(kls[name]) for name in codecs if is_number(kls.get(name))}
    return stored if len(stored) == len(set(codecs)) else None


def _size(scheme: Scheme, layer: int, role: Role) -> int:
    pair = scheme.layers[layer]
    assert pair is not None
    return (pair.key if role == "key" else pair.value).block_bytes()


@dataclass(frozen=True)
class Chosen:
    """What a search of bits came to.

    assignment: the best measured, by name in `rows` (TUNED, BY_LAYER, or KEYS + VALUES of a uniform one). rows: all
    measured whole, on held-out windows. predicted: the sum of sensitivities of the tuned one.
    """

    assignment: Assignment
    name: str
    rows: dict[str, Row]
    predicted: float


def choose(
    model: CausalLM,
    holdout: Tensor,
    options: Mapping[Place, Sequence[Option]],
    schemes: Schemes,
    max_bits: float,
    *,
    step: int = 32,
    batch: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    codecs: Collection[str] = (),
    ranks: Ranks = ALONE,
) -> Chosen:
    """The assignment of at most `max_bits` stored bits per value that has the least KL on held-out windows (N, T).

    codecs: those that a uniform assignment may have, of all heads of a side; by default all. The best assignment of
    these alone is a candidate, too. ranks: the processes that share the candidates.
    """
    budget = budget_of(schemes, max_bits)
    solved, tuned = _solved(options, budget)
    candidates = {TUNED: tuned}
    if codecs:
        options = {place: [one for one in these if one.name in codecs] for place, these in options.items()}
        candidates |= {BY_LAYER: by_layer} if (by_layer := _solved(options, budget)[1]) != tuned else {}
    candidates |= _uniform(options, budget)
    makers = {name: _maker(scheme, model) for name, scheme in schemes.whole(candidates).items()}
    rows = _measured_by_ranks(model, holdout, makers, step, batch, say, ranks)
    if not rows:
        raise NonFiniteError("no assignment under --max-bits gives finite logits; give other --codecs")
    best = min(rows, key=lambda name: rows[name].kl)
    return Chosen(candidates[best], best, rows, sum(option.cost for option in solved))


def _solved(options: Mapping[Place, Sequence[Option]], budget: int) -> tuple[list[Option], Assignment]:
    """The options of least cost under the budget, and as an assignment."""
    solved = solve(list(options.values()), budget)
    return solved, Assignment.of({place: option.name for place, option in zip(options, solved, strict=True)})


def _measured_by_ranks(
    model: CausalLM,
    ids: Tensor,
    makers: Mapping[str, CacheMaker],
    step: int,
    batch: int | None,
    say: Callable[[str], None],
    ranks: Ranks,
) -> dict[str, Row]:
    """The rows of `_measured`, on every rank; rank i mod N measures candidate i, side by side with its others."""
    names = list(makers)
    shares = [names[rank :: ranks.count] for rank in range(min(ranks.count, len(names)))]

    def measure(share: list[str]) -> tuple[dict[str, Row], list[str]]:
        lines: list[str] = []
        rows = _measured(model, ids, {name: makers[name] for name in share}, step, batch, lines.append)
        return rows, lines

    rows: dict[str, Row] = {}
    for some, lines in spread(ranks, shares, measure):
        rows |= some
        for line in lines:
            say(line)
    return {name: rows[name] for name in names if name in rows}


def _measured(
    model: CausalLM,
    ids: Tensor,
    makers: Mapping[str, CacheMaker],
    step: int,
    batch: int | None,
    say: Callable[[str], None],
) -> dict[str, Row]:
    """All side by side; where numbers of one overflow each for itself, without those that do."""
    try:
        return {row.name: row for row in evaluate(model, ids, makers, step=step, batch=batch)[1:]}
    except NonFiniteError as error:
        if len(makers) == 1:
            say(f"note: {error}; left out")
            return {}
    alone = ({name: make} for name, make in makers.items())
    return {name: row for one in alone for name, row in _measured(model, ids, one, step, batch, say).items()}


def _maker(scheme: Scheme, model: CausalLM) -> Callable[[], KVCalCache]:
    from kvcal_artifacts.cache import KVCalCache

    return lambda: KVCalCache(scheme, model, remember=True)


def _uniform(options: Mapping[Place, Sequence[Option]], budget: int) -> dict[str, Assignment]:
    """Pairs of one codec for all keys and one for all values, of at most `budget` bytes. A pair is dropped where
    another with as many bytes or fewer has a smaller sum of sensitivities: it is not worth a measurement.
    """
    names = [option.name for option in next(iter(options.values()))]
    fitting = []
    for key, value in itertools.product(names, names):
        chosen = {"key": key, "value": value}
        taken = [one for (_, role), choices in options.items() for one in choices if one.name == chosen[role]]
        size, cost = sum(one.size for one in taken), sum(one.cost for one in taken)
        if size <= budget:
            fitting.append((size, cost, Assignment(key, value)))
    best = [one for one in fitting if not any(o[0] <= one[0] and o[1] < one[1] for o in fitting)]
    return {f"{one.key} + {one.value}": one for _, _, one in best}
