"""Whether a text is enough for what is fitted on it: before the work a warning says how much it lacks.

With n tokens for p inputs, least squares errs on other text by about n / (n - p) times what it must. That is 1.33 times
with four tokens per input, and without bound with one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcal_artifacts.codecs import Role, Shape

from ..methods.aqua_kv import AquaKV
from ..methods.calibrated import (
    CalibratedCodebooks,
    CalibratedFactors,
    CalibratedSubspace,
    CalibratedTiers,
    calibration_of,
)
from ..methods.innerq import InnerQ
from ..methods.kvtuner import KVTuner
from ..methods.squat import Squat
from ..methods.transform import CalibratedTransform
from ..methods.vqkv import VQKV

if TYPE_CHECKING:
    from kvcal_artifacts.checked import Json

ADVISED = 4  # times what is determined
SHOWN = 12  # layers that a line names
LINEAR = ("linear", "reduced-rank", "linear-4bit", "mlp", "mlp-no-norm")


@dataclass(frozen=True)
class Need:
    """What a fit needs of the training text. what: is fitted; count of a unit (tokens, say) that the training windows
    have; least: numbers to determine, and what.
    """

    what: str
    count: int
    unit: str
    least: int
    of: str
    more: str = "give more --windows or a larger --length"

    @property
    def met(self) -> bool:
        return self.count >= ADVISED * self.least or not self.count  # without any, an error says so

    def __str__(self) -> str:
        return (
            f"warning: too little text: {self.what}: {self.count:,} {self.unit} for {self.least:,} {self.of}, advised "
            "are "
            f"{ADVISED * self.least:,}; {self.more}"
        )


def too_little(method: object, shape: Shape, group: int, windows: int, tokens: int) -> list[str]:
    """A line for each part of a method that the text is too little for.

    shape: of a layer's cache; group: query heads a kv head; windows: that are trained on; tokens: of each that are
    coded.
    """
    lines = [str(need) for need in _needs(method, shape, group, windows * tokens) if not need.met]
    return [*lines, *([one_window("bits of each layer")] if isinstance(method, KVTuner) and windows == 1 else [])]


def one_window(what: str) -> str:
    """The warning about a choice from a single window."""
    return (
        f"warning: too little text: {what} chosen on one window of text; give --windows with two or more to choose on"
    )


def _needs(method: object, shape: Shape, group: int, tokens: int) -> Iterator[Need]:
    channels = shape.heads * shape.dim
    if isinstance(method, AquaKV):
        for role, inputs in (("keys", method.key_inputs), ("values", method.value_inputs)):
            if inputs and method.predictor in LINEAR:
                names = " and ".join(inputs)
                yield Need(f"predictors of {role} from {names}", tokens, "tokens", len(inputs) * channels, "inputs")
        for name, roles in method.composition.roles().items():
            yield from _codec_needs(name, roles, shape, group, tokens)
    elif isinstance(method, InnerQ) and method.factors != "none":
        yield Need("a factor for each key channel", tokens, "tokens", shape.dim, "channels a head")
    elif isinstance(method, Squat) and method.subspace != "prompt":
        # the directions that matter most, of however few, are found among all
        yield Need("subspaces of queries", tokens * group, "queries a head", shape.dim, "channels a head")


def _codec_needs(name: str, roles: Collection[Role], shape: Shape, group: int, tokens: int) -> Iterator[Need]:
    """What the fit of a codec needs. roles: what the codec is of. Factors, subspaces and tiers are learned for keys
    alone.
    """
    maker = calibration_of(name)
    if "key" not in roles and isinstance(maker, CalibratedSubspace | CalibratedFactors | CalibratedTiers):
        return
    if isinstance(maker, CalibratedCodebooks):
        count = tokens * shape.heads
        yield Need(f"codec {name}", count, "vectors a layer", maker.size, "codewords")
    elif isinstance(maker, CalibratedSubspace):
        yield Need(f"codec {name}", tokens * group, "queries a head", shape.dim, "channels a head")
    elif isinstance(maker, CalibratedTransform | CalibratedFactors | CalibratedTiers):
        yield Need(f"codec {name}", tokens, "tokens", shape.dim, "channels a head")


def few_vectors(method: VQKV, vectors: int) -> list[str]:
    """A line where codebooks have too few vectors. vectors: that each is trained on."""
    whose = "codebooks of all layers" if method.shared else "codebooks of a layer"
    more = "give more --windows or --vectors, or smaller --sizes"
    need = Need(whose, vectors, "vectors", max(method.sizes), "codewords", more)
    return [] if need.met else [str(need)]


def few_tokens(probes: Mapping[str, int], tokens: int) -> list[str]:
    """A line where linear probes have too few tokens, naming the widest. probes: inputs of each by name."""
    name, inputs = max(probes.items(), key=lambda item: item[1])
    short = sum(tokens < ADVISED * width for width in probes.values())
    need = Need(f"{short} of {len(probes)} probes, most of all {name}", tokens, "tokens", inputs, "inputs")
    return [] if need.met else [str(need)]


def worse_than_none(what: str, scores: Sequence[float | None]) -> str | None:
    """A line where the held-out explained variance of some layers is negative; None where it is not. scores: by
    layer.
    """
    below = [(layer, score) for layer, score in enumerate(scores) if score is not None and score < 0]
    if not below:
        return None
    names = ", ".join([*(str(layer) for layer, _ in below[:SHOWN]), *(["..."] if len(below) > SHOWN else [])])
    return (
        f"warning: {what}: held-out explained variance is below 0 in layer{'s' if len(below) > 1 else ''} {names} "
        "(lowest "
        f"{min(score for _, score in below):.3g}): worse than no prediction; give more text, or predict from other "
        "inputs"
    )


def probes_worse_than_none(probes: Mapping[str, Sequence[float | None]]) -> str | None:
    """`worse_than_none` of the probe with the lowest score, after how many there are with one below 0; None where no
    probe has. probes: scores by layer, by name.
    """
    lowest = {
        name: min([score for score in scores if score is not None], default=0.0) for name, scores in probes.items()
    }
    below = sorted((score, name) for name, score in lowest.items() if score < 0)
    if not below:
        return None
    worst = below[0][1]
    what = f"probe {worst}" if len(below) == 1 else f"{len(below)} of {len(probes)} probes, most of all {worst}"
    return worse_than_none(what, probes[worst])


def _number(value: Json) -> float | None:
    return value if isinstance(value, (int, float)) else None


def predictions_worse_than_none(metrics: Sequence[Mapping[str, Json]]) -> list[str]:
    """`worse_than_none` of the keys and the values that a bundle's predictors predict. metrics: a row a layer."""
    lines = (
        worse_than_none(f"predicted {role}s", [_number(row.get(f"{role}_explained_variance")) for row in metrics])
        for role in ("key", "value")
    )
    return [line for line in lines if line is not None]
