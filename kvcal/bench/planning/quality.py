"""KL that schemes were measured to cost on real models (measured_kl.json, from docs/ablations/measured_kl.py)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypedDict

FILE = Path(__file__).with_name("measured_kl.json")
CLASSES = (0.01, 0.05, 0.2)  # nats per token: upper ends of the classes


@dataclass(frozen=True)
class Quality:
    """A scheme's measured quality. kl: nats per token between next-token distributions with the scheme and without.
    upper: kl and two standard errors over windows, by which it is judged; kl itself where it is of one window. It is a
    margin to one side of a limit and no test between schemes, so that Student's t has no part in it. models: on which
    it was measured; where more than one, kl and upper are the largest. alike: whether the model is of the same
    architecture. anywhere: the largest upper of all measured models, of other architectures, too. model: the one of
    which kl is, None for full precision. se: its standard error over windows, None of one window.
    """

    kl: float
    upper: float
    anywhere: float
    models: tuple[str, ...]
    alike: bool
    model: str | None = None
    se: float | None = None

    @property
    def kl_class(self) -> str:
        """The class as people read it: "< 0.01" to "> 0.2"."""
        upper = next((limit for limit in CLASSES if self.upper < limit), None)
        return f"> {CLASSES[-1]:g}" if upper is None else f"< {upper:g}"


NOTHING = Quality(0.0, 0.0, 0.0, (), True)  # full precision's


class MeasuredModel(TypedDict):
    """The text and settings that a model's figures were measured on, and the file with all of them."""

    model_type: str
    text: str
    windows: int
    length: int
    dtype: str
    measured: str
    file: str


class Figures(TypedDict):
    """KL in nats per token and stored bits per value of one scheme on one model. kl_se: its standard error over
    windows, None of one window.
    """

    kl: float
    kl_se: float | None
    bits: float


class Measured(TypedDict):
    """The whole file. schemes: by scheme, then by model. served: the same with every token packed, as servers do."""

    models: dict[str, MeasuredModel]
    schemes: dict[str, dict[str, Figures]]
    served: dict[str, dict[str, Figures]]


@cache
def _measured() -> Measured:
    measured: Measured = json.loads(FILE.read_text("utf-8"))
    return measured


def models() -> dict[str, MeasuredModel]:
    """Name of a measured model -> model_type, text, windows, length, device and the file with all figures."""
    return _measured()["models"]


def expected(scheme: str, model_type: str, served: bool = False) -> Quality | None:
    """KL on the measured model of this architecture, else the largest of all measured ones; None where the scheme was
    never measured. served: with every token packed.
    """
    by_model = _measured()["served" if served else "schemes"].get(scheme, {})
    if not by_model:
        return None
    alike = [name for name in by_model if models()[name]["model_type"] == model_type]
    chosen = alike[:1] or list(by_model)
    upper = {name: row["kl"] + 2 * (row["kl_se"] or 0.0) for name, row in by_model.items()}
    worst = max(chosen, key=lambda name: by_model[name]["kl"])
    return Quality(
        by_model[worst]["kl"],
        max(upper[name] for name in chosen),
        max(upper.values()),
        tuple(chosen),
        bool(alike),
        worst,
        by_model[worst]["kl_se"],
    )


def largest_bits(scheme: str) -> float:
    """The most stored bits per value that a scheme took on a measured model, for those whose blocks differ in size."""
    return max(row["bits"] for row in _measured()["schemes"][scheme].values())
