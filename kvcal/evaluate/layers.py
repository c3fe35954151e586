"""What compression does to each layer, seen in the cache while an evaluation runs, and which layer is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

ROLES = ("key", "value")
LEAST = 1e-5  # what counts as recorded at least: figures have six decimals, and exact codecs are recorded as 0


class LayerErrors:
    """A Watch that sums over packed blocks, layer by layer: squared errors, squares, and how many blocks were read."""

    def __init__(self, layers: int) -> None:
        self.sums = [[[0.0, 0.0] for _ in ROLES] for _ in range(layers)]
        self.blocks_read = [0] * layers

    def packed(self, layer: int, exact: list[Tensor], decoded: list[Tensor]) -> None:
        for total, x, made in zip(self.sums[layer], exact, decoded, strict=True):
            total[0] += float((x.float() - made).square().sum(dtype=x.double().dtype))
            total[1] += float(x.float().square().sum(dtype=x.double().dtype))

    def read(self, layer: int, blocks: int) -> None:
        self.blocks_read[layer] += blocks

    def rows(self) -> list[dict[str, Any]]:
        """One a layer: key_relative_error and value_relative_error, |x - decoded|^2 / |x|^2 over all packed tokens, None where
        nothing was packed, as in bundles' metrics; blocks_read: summed over calls.
        """
        return [
            {"layer": index}
            | {
                f"{role}_relative_error": round(error / square, 6) if square else None
                for role, (error, square) in zip(ROLES, sums, strict=True)
            }
            | {"blocks_read": read}
            for index, (sums, read) in enumerate(zip(self.sums, self.blocks_read, strict=True))
        ]


@dataclass(frozen=True)
class Blame:
    """A layer's keys or values. error: as of LayerErrors. recorded: what the bundle says of it, None if it says nothing."""

    layer: int
    role: str
    error: float
    recorded: float | None = None

    @property
    def drift(self) -> float | None:
        """Times the recorded error."""
        return None if self.recorded is None else self.error / max(self.recorded, LEAST)

    def __str__(self) -> str:
        said = "" if self.drift is None else f", {self.drift:,.1f} times the recorded {self.recorded:g}"
        return f"layer {self.layer}, {self.role}s: relative error {self.error:.4g}{said}"


def worst_layer(rows: Sequence[dict[str, Any]], recorded: Sequence[dict[str, Any]] | None) -> Blame | None:
    """The layer and role whose error is the most times what its bundle recorded when it was fitted; where nothing was
    recorded, the one with the largest error. rows: of LayerErrors. None if nothing was packed.
    """
    found = [
        Blame(row["layer"], role, row[name], _recorded(recorded, row["layer"], name))
        for row in rows
        for role in ROLES
        if row[name := f"{role}_relative_error"] is not None
    ]
    drifts = [blame for blame in found if blame.drift is not None]
    if drifts:
        return max(drifts, key=lambda blame: blame.drift or 0.0)
    return max(found, key=lambda blame: blame.error, default=None)


def _recorded(recorded: Sequence[dict[str, Any]] | None, layer: int, name: str) -> float | None:
    if not recorded or layer >= len(recorded):
        return None
    value = recorded[layer].get(name)
    return float(value) if isinstance(value, (int, float)) else None
