"""Linear probes of the cache (AQUA-KV section 3.1): how much of each layer's keys and values others predict.

A probe predicts keys or values, all heads of a token. Its inputs are those of the same token one to three layers below,
those of earlier tokens in the same layer, the other role, or several of these. Fitted by ridge on training windows,
scored by explained variance on held-out ones: one pass over the windows a layer. Nothing is quantised, everything is
exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import Frame

from ..capture.scan import Capture, LayerTaps, TapBatch
from ..capture.spill import SpillStore
from ..methods.regression import Gram, SharedGram, explained_variance, ridge_solution
from ..report.progress import progress

ROLES = {"k": "keys", "v": "values"}
VARIES = 1e-12  # of a channel's energy: less variance than this is rounding, and nothing to explain


@dataclass(frozen=True)
class Input:
    """Keys or values `below` compressed layers below and `before` tokens before: k1, v0, k0t1."""

    role: str
    below: int
    before: int

    @classmethod
    def parse(cls, name: str) -> Input:
        parts = re.fullmatch(r"([kv])(\d)(?:t([1-9]))?", name)
        if parts is None:
            raise UsageError(
                f"probe input {name!r}: needs k or v, layers below and, behind a t, tokens before: k1, v0, k0t1"
            )
        return cls(parts[1], int(parts[2]), int(parts[3] or 0))


@dataclass(frozen=True)
class Probe:
    """One prediction to be probed. target: k or v, of this layer and token. inputs: names as Input.parse reads them."""

    target: str
    inputs: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.target not in ROLES:
            raise UsageError(f"probe target {self.target!r}: allowed are k and v")
        if not self.inputs or len(set(self.inputs)) < len(self.inputs):
            raise UsageError(f"probe {self.name}: needs one input or more, each once")
        if Input(self.target, 0, 0) in self.read:
            raise UsageError(f"probe {self.name}: {self.target}0 is the target itself")

    @classmethod
    def parse(cls, text: str) -> Probe:
        """ "v=v1,k0" -> values from the values of the layer below and this layer's keys."""
        target, sign, inputs = text.partition("=")
        if not sign:
            raise UsageError(f"--probe {text}: needs TARGET=INPUTS, as v=v1,k0")
        return cls(target.strip(), tuple(part.strip() for part in inputs.split(",") if part.strip()))

    @property
    def name(self) -> str:
        return f"{self.target}={','.join(self.inputs)}"

    @property
    def read(self) -> list[Input]:
        return [Input.parse(name) for name in self.inputs]

    @property
    def reach(self) -> int:
        """Layers below that it reads; it does not exist in layers lower than this."""
        return max(one.below for one in self.read)


def paper_probes() -> tuple[Probe, ...]:
    """Figures 2 and 4: for keys and values, from blocks -1 to -3, tokens -1 to -3, the other role, some of them
    together.
    """
    probes = []
    for role, other in ("kv", "vk"):
        blocks, tokens = [f"{role}{n}" for n in (1, 2, 3)], [f"{role}0t{n}" for n in (1, 2, 3)]
        sets: list[list[str]] = [[name] for name in (*blocks, *tokens, f"{other}0", f"{other}1")]
        sets += [blocks[:2], blocks, tokens]
        sets += [[blocks[0], name] for name in (f"{other}0", f"{other}1", tokens[0])]
        probes += [Probe(role, tuple(names)) for names in sets]
    return tuple(probes)


@dataclass
class History:
    """Keys and values of the layers below, (N, T, C) each; a layer's own take the place of the lowest that is still
    read.
    """

    stores: Mapping[str, Sequence[SpillStore]]  # role -> as many as layers below are read

    def move(self, device: torch.device) -> None:
        for store in (one for role in self.stores.values() for one in role):
            store.move(device)

    def read(self, role: str, layer: int, rows: slice) -> Tensor:
        return self.stores[role][layer % len(self.stores[role])].read(rows)

    def write(self, role: str, layer: int, rows: slice, x: Tensor) -> None:
        if self.stores[role]:
            self.stores[role][layer % len(self.stores[role])].write(rows, x)


@dataclass(frozen=True)
class Settings:
    """How probes are fitted. ridge: times the mean of the Gram diagonal. sink: first tokens of a window, not predicted,
    only looked back at.
    """

    probes: tuple[Probe, ...]
    frame: Frame = "pre_rope"
    ridge: float = 1e-3
    sink: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.ridge < float("inf"):
            raise UsageError(f"--ridge {self.ridge}: must be positive and finite")
        names = [probe.name for probe in self.probes]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(f"--probe {twice}: given twice")

    @property
    def first(self) -> int:
        """The first token of a window that is predicted: every probe gets the same ones."""
        return max(self.sink, *(one.before for probe in self.probes for one in probe.read))

    def reach(self, role: str) -> int:
        return max((one.below for probe in self.probes for one in probe.read if one.role == role), default=0)

    def at(self, place: int) -> list[Probe]:
        """The probes whose inputs exist with so many compressed layers below."""
        return [probe for probe in self.probes if probe.reach <= place]


Scores = dict[str, float]  # name of a probe -> explained variance


def measure(
    settings: Settings,
    capture: Capture,
    train: int,
    earlier: Mapping[int, Scores],
    done: Callable[[int, Scores], None],
    *,
    stores: Callable[[tuple[int, ...]], SpillStore],
) -> None:
    """Explained variance of every probe in every layer, handed to `done` layer by layer; those `earlier` are only run
    through.

    train: windows [0, train) are fitted on, the rest are scored. stores: makes a SpillStore of a shape.
    Raises UsageError for windows without a token to predict, and what Capture raises.
    """
    if capture.length <= settings.first:
        raise UsageError(
            f"windows of {capture.length} tokens leave nothing behind the first {settings.first}: use a larger --length"
        )
    history: History | None = None
    with ExitStack() as stack, progress("Probing layers", total=len(capture)) as advance:
        for taps in capture:
            if history is None:
                shape = (capture.windows, capture.length, taps.site.kv_heads * taps.site.head_dim)
                below = {r: [stack.enter_context(stores(shape)) for _ in range(settings.reach(r))] for r in ROLES}
                history = History(below)
            history.move(taps.device)
            run = _LayerRun(settings, taps, history, train, taps.device)
            if taps.index in earlier:
                run.pass_through()
            else:
                done(taps.index, run.scores())
            advance()


@dataclass
class _LayerRun:
    """One layer's pass over the windows."""

    settings: Settings
    taps: LayerTaps
    history: History
    train: int
    device: torch.device

    def pass_through(self) -> None:
        """Keys and values into the history; nothing is fitted."""
        for _ in self._batches():
            pass

    def scores(self) -> Scores:
        probes = self.settings.at(self.taps.place)
        products = [(probe.inputs, f"{probe.target}0") for probe in probes]
        channels = self.taps.site.kv_heads * self.taps.site.head_dim
        train, holdout = (SharedGram(products, channels, self.device) for _ in range(2))
        for rows, now in self._batches():
            with self.taps.timer("gram"):
                self._add(train, holdout, rows, now)
        with self.taps.timer("solve"):
            return {probe.name: self._score(probe, train, holdout) for probe in probes}

    def _batches(self) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Keys and values of this layer, role -> (n, T, C); they enter the history when the caller is done with the
        batch.
        """
        for batch in self.taps.batches({"k", "v"}, self.settings.frame, advance=True):
            now = _by_role(batch)
            yield batch.rows, now
            with self.taps.timer("spill"):
                for role, x in now.items():
                    self.history.write(role, self.taps.place, batch.rows, x)

    def _add(self, train: SharedGram, holdout: SharedGram, rows: slice, now: dict[str, Tensor]) -> None:
        """A batch's windows, up to self.train to the first of the sums, the others to the second."""
        x = {name: self._input(Input.parse(name), rows, now) for name in train.names}
        fitted = max(0, min(int(rows.stop), self.train) - int(rows.start))
        for sums, part in ((train, slice(0, fitted)), (holdout, slice(fitted, None))):
            sums.add({name: y[part].flatten(0, 1).float() for name, y in x.items()})

    def _input(self, one: Input, rows: slice, now: dict[str, Tensor]) -> Tensor:
        """(n, predicted tokens, C)."""
        x = now[one.role] if one.below == 0 else self.history.read(one.role, self.taps.place - one.below, rows)
        return x[:, self.settings.first - one.before : x.shape[1] - one.before]

    def _score(self, probe: Probe, train: SharedGram, holdout: SharedGram) -> float:
        target = f"{probe.target}0"
        weight, bias = ridge_solution(train.gram(probe.inputs, target), self.settings.ridge)
        return round(mean_explained(holdout.gram(probe.inputs, target), weight, bias), 6)


def _by_role(batch: TapBatch) -> dict[str, Tensor]:
    assert batch.k is not None and batch.v is not None
    return {role: x.transpose(1, 2).flatten(2) for role, x in (("k", batch.k), ("v", batch.v))}


def mean_explained(gram: Gram, weight: Tensor, bias: Tensor) -> float:
    """Mean over the channels that vary at all of 1 - residual / variance; NaN if none does."""
    variance = gram.yy - gram.count * gram.mean_y.square()
    varies = variance > VARIES * gram.yy
    return float(explained_variance(gram, weight, bias)[varies].mean()) if bool(varies.any()) else float("nan")


def table(settings: Settings, layers: Mapping[int, Scores]) -> list[dict[str, object]]:
    """A row per probe: its score in every layer, None where it does not exist. Its means are over the layers that it
    has, and over those that all probes have (None if there is no such layer).
    """
    deepest = max(probe.reach for probe in settings.probes)
    rows: list[dict[str, object]] = []
    for probe in settings.probes:
        scores = [layers[layer].get(probe.name) for layer in sorted(layers)]
        rows.append(
            {
                "probe": probe.name,
                "target": probe.target,
                "inputs": list(probe.inputs),
                "mean": _mean(scores),
                "mean_common": _mean(scores[deepest:]),
                "layers": scores,
            }
        )
    return rows


def _mean(scores: Sequence[float | None]) -> float | None:
    there = [score for score in scores if score is not None]
    return round(sum(there) / len(there), 6) if there else None
