"""What compression does to each layer and head, measured in the cache while an evaluation runs, and which one is to
blame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from ..report.records import is_number

ROLES = ("key", "value")
LEAST = 1e-5  # what counts as recorded at least: figures have six decimals, and exact codecs are recorded as 0

Recorded = Sequence[Mapping[str, object]]  # a bundle's metrics["layers"]
Figure = int | float | list[float] | None  # of a layer


class State(TypedDict):
    """The sums of a LayerErrors as JSON has them, by layer and role."""

    sums: list[list[list[list[float]] | None]]
    blocks_read: list[int]


class LayerErrors:
    """A Watch that sums over packed blocks, by layer and head: squared errors and squares, and how many blocks were
    read.
    """

    def __init__(self, layers: int) -> None:
        self.sums: list[list[Tensor | None]] = [[None for _ in ROLES] for _ in range(layers)]
        self.blocks_read = [0] * layers

    def packed(self, layer: int, exact: list[Tensor], decoded: list[Tensor]) -> None:
        sums = self.sums[layer]
        for role, (x, back) in enumerate(zip(exact, decoded, strict=True)):
            now, before = _squares(x, back), sums[role]
            sums[role] = now if before is None else before + now

    def read(self, layer: int, blocks: int) -> None:
        self.blocks_read[layer] += blocks

    def merge(self, other: LayerErrors) -> None:
        """Add the sums of another one of the same layers; of none, where nothing was summed here yet."""
        if not self.blocks_read:
            self.sums, self.blocks_read = [[None for _ in ROLES] for _ in other.sums], [0] * len(other.sums)
        for layer, roles in enumerate(other.sums):
            for role, theirs in enumerate(roles):
                mine = self.sums[layer][role]
                if theirs is not None:
                    self.sums[layer][role] = theirs if mine is None else mine + theirs
            self.blocks_read[layer] += other.blocks_read[layer]

    def state(self) -> State:
        """The sums as JSON has them; `of` makes the same again."""
        sums = [[None if one is None else one.tolist() for one in pair] for pair in self.sums]
        return {"sums": sums, "blocks_read": list(self.blocks_read)}

    @classmethod
    def of(cls, state: State) -> LayerErrors:
        errors = cls(0)
        errors.sums = [
            [None if one is None else torch.tensor(one, dtype=torch.float64, device="cpu") for one in pair]
            for pair in state["sums"]
        ]
        errors.blocks_read = list(state["blocks_read"])
        return errors

    def rows(self) -> list[dict[str, Figure]]:
        """A row per layer. key_relative_error, value_relative_error: |x - decoded|^2 / |x|^2 over all packed tokens,
        None where nothing was packed. key_head_errors, value_head_errors: the same by kv head, as in bundles' metrics.
        blocks_read: summed over calls.
        """
        return [
            {"layer": index}
            | {f"{role}_relative_error": _relative(total) for role, total in zip(ROLES, sums, strict=True)}
            | {f"{role}_head_errors": _by_head(total) for role, total in zip(ROLES, sums, strict=True)}
            | {"blocks_read": read}
            for index, (sums, read) in enumerate(zip(self.sums, self.blocks_read, strict=True))
        ]

    def by_head(self, role: str) -> list[list[float] | None]:
        """Relative squared errors by kv head, a row a layer, of keys or of values; None where nothing was packed."""
        return [_by_head(sums[ROLES.index(role)]) for sums in self.sums]


def _squares(exact: Tensor, decoded: Tensor) -> Tensor:
    """(B, H, T, D) twice -> (2, H) float64 on the CPU: squared error, squares."""
    x = exact.float()
    return torch.stack([y.square().sum((0, 2, 3), dtype=torch.float64) for y in (x - decoded, x)]).cpu()


def _relative(total: Tensor | None) -> float | None:
    if total is None or not total[1].sum():
        return None
    return round(float(total[0].sum() / total[1].sum()), 6)


def _by_head(total: Tensor | None) -> list[float] | None:
    """A head of zeros alone has an error of 0."""
    if total is None or not total[1].sum():
        return None
    return [round(value, 6) for value in (total[0] / total[1].clamp_min(1e-30)).tolist()]


@dataclass(frozen=True)
class Blame:
    """A layer's keys or values, or those of one kv head of it. error: relative and squared, see
    `LayerErrors`. recorded: what the bundle says of it, None if it says nothing.
    """

    layer: int
    role: str
    error: float
    recorded: float | None = None
    head: int | None = None

    @property
    def drift(self) -> float | None:
        """Times the recorded error."""
        return None if self.recorded is None else self.error / max(self.recorded, LEAST)

    def __str__(self) -> str:
        drift = "" if self.drift is None else f", {self.drift:,.1f} times the recorded {self.recorded:g}"
        where = f"{self.role}s" if self.head is None else f"{self.role}s of head {self.head}"
        return f"layer {self.layer}, {where}: relative error {self.error:.4g}{drift}"


def worst_layer(rows: Sequence[Mapping[str, object]], recorded: Recorded | None) -> Blame | None:
    """The layer and role whose error is the most times what the bundle recorded when it was fitted, and the head, where
    it recorded heads. Where it recorded nothing: the layer with the largest error. rows: of LayerErrors. None if
    nothing was packed.
    """
    blames = [blame for row in rows for role in ROLES for blame in _blames(row, role, recorded)]
    drifts = [blame for blame in blames if blame.drift is not None]
    if drifts:
        return max(drifts, key=lambda blame: blame.drift or 0.0)
    return max(blames, key=lambda blame: blame.error, default=None)


def _blames(row: Mapping[str, object], role: str, recorded: Recorded | None) -> list[Blame]:
    """Heads first: of a layer and its head that err alike the head is named."""
    error, layer = _number(row, f"{role}_relative_error"), row["layer"]
    if error is None:
        return []
    assert isinstance(layer, int)
    reference = recorded[layer] if recorded and layer < len(recorded) else {}
    heads, measured = (_numbers(figures, f"{role}_head_errors") for figures in (reference, row))
    by_head = zip(measured, heads, strict=True) if len(measured) == len(heads) else []
    return [
        *(Blame(layer, role, mine, theirs, head) for head, (mine, theirs) in enumerate(by_head)),
        Blame(layer, role, error, _number(reference, f"{role}_relative_error")),
    ]


def _number(figures: Mapping[str, object], name: str) -> float | None:
    """A figure of a layer; None where there is none. What was recorded has passed `recorded_rows`."""
    figure = figures.get(name)
    assert figure is None or isinstance(figure, (int, float))
    return None if figure is None else float(figure)


def _numbers(figures: Mapping[str, object], name: str) -> list[float]:
    """The figures of a layer's heads; empty where there are none."""
    by_head = figures.get(name) or []
    assert isinstance(by_head, list)
    return [float(figure) for figure in by_head]


def check_errors(recorded: Recorded, layers: Mapping[int, int]) -> None:
    """Raise ValueError naming the first layer for which an error is missing, or is none that a codec can have.

    layers: kv heads of each compressed one. Errors by head, where any are recorded, must be there for all.
    """
    by_head = any(f"{role}_head_errors" in row for row in recorded for role in ROLES)
    for layer, heads in layers.items():
        row = recorded[layer] if layer < len(recorded) else {}
        for role in ROLES:
            figures = {f"{role}_relative_error": [row.get(f"{role}_relative_error")]}
            if by_head:
                listed = row.get(f"{role}_head_errors")
                figures[f"{role}_head_errors"] = listed if isinstance(listed, list) and len(listed) == heads else [None]
            for name, values in figures.items():
                if bad := [value for value in values if not _plausible(value)]:
                    fault = "is missing" if bad[0] is None else f"holds {bad[0]!r}, not a number from 0 to 1"
                    raise ValueError(f"layer {layer}: {name} {fault}")


def recorded_rows(metrics: Mapping[str, object]) -> Recorded | None:
    """metrics["layers"] of a bundle without what is no error that a codec can have; None where it is no list of
    tables.
    """
    rows = metrics.get("layers")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return None
    return [{name: value for name, value in row.items() if _usable(name, value)} for row in rows]


def _usable(name: object, value: object) -> bool:
    if str(name).endswith("_head_errors"):
        return isinstance(value, list) and all(map(_plausible, value))
    return not str(name).endswith("_relative_error") or _plausible(value)


def _plausible(value: object) -> bool:
    """Zeros instead of everything would have an error of 1."""
    return is_number(value) and 0 <= value <= 1
