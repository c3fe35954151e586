"""Which codecs and windows a scheme's name means, and what a block of it takes; without torch.

The presets are those of kvcal.methods.data_free, the shapes of kvcal.bench.schemes; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from kvcal_artifacts.errors import UsageError

from ...models.geometry import Geometry
from ...report.suggest import allowed
from . import formats, quality
from .formats import Codec, Shape

MOST_HEADS = 16  # query heads a kv head that the fused kernel serves
COMPOSED = "composed"  # of a bundle that `kvcal preset --keys … --values …` makes
FITTED = "fitted"  # of a bundle that `kvcal fit aqua-kv` makes without predictors
PREDICTED = "layers are predicted from reconstructions of others, which decoding makes"
THRESHOLDS = "tiers by threshold differ in size from block to block"


@dataclass(frozen=True)
class Planned:
    """A scheme that `kvcal plan` knows. key, value: codecs by name. command: of kvcal, that makes a bundle of it, or
    COMPOSED or FITTED. timed: the scheme of SLOTS (speed.py) whose kernel's time is taken for this one's; None where
    none was measured. first: codec of the lowest layer, where that differs.
    """

    name: str
    key: str
    value: str
    sink: int = 4
    recent: int = 128
    block: int = 32
    frame: Literal["post_rope", "pre_rope"] = "post_rope"
    command: str = "preset"
    timed: str | None = None
    first: str | None = None

    @property
    def predicted(self) -> bool:
        return self.command == "fit-predictors"


@dataclass(frozen=True)
class Sizes:
    """What one scheme stores on one model. blocks: bytes of a packed block of each compressed layer, lowest first.
    why_decoded: why its blocks are decoded before attention, None where a kernel reads them. constants: bytes of
    predictors and codebooks. bits: stored bits per value, over all compressed layers. expected: what the bytes rest on,
    where blocks differ in size.
    """

    blocks: tuple[int, ...]
    why_decoded: str | None
    constants: int
    bits: float
    expected: str | None = None


def _both(name: str, sink: int = 4, recent: int = 128, timed: str | None = None) -> Planned:
    return Planned(name, name, name, sink, recent, timed=timed)


def _fitted(name: str) -> Planned:
    return Planned(name, name, name, command=FITTED)


_TABLE = (
    *(_both(f"higgs-{bits}{gain}", timed=f"higgs-{bits}") for gain in ("", "-debiased") for bits in (2, 3, 4)),
    *(_both(f"uniform-{bits}", timed="kivi-2") for bits in (2, 3, 4, 8)),
    *(_both(f"kivi-{bits}", 0, 32, "kivi-2") for bits in (2, 4)),
    Planned("kivi-sink-2", "kivi-2", "kivi-2", 32, 96, timed="kivi-2"),
    *(_both(f"turboquant-{bits}", 0, timed=like) for bits, like in ((2, "higgs-2"), (3, "higgs-3"), (4, "higgs-4"))),
    Planned("turboquant-4-3", "turboquant-4", "turboquant-3", 0, timed="turboquant-4-3"),
    *(_both(f"higgs-2-bytes{gain}", timed="higgs-2-bytes") for gain in ("", "-debiased")),
    *(_both(f"turboquant-{bits}-bytes", 0, timed="turboquant-4-3-bytes") for bits in (2, 3, 4)),
    Planned("turboquant-4-3-bytes", "turboquant-4-bytes", "turboquant-3-bytes", 0, timed="turboquant-4-3-bytes"),
    *(
        _both(f"innerq-{name}{plain}", 32, 96, f"innerq-{name}")
        for plain in ("", "-plain")
        for name in ("base", "hybrid", "small")
    ),
    _both("fp8", 0, 0),
    *(Planned(f"squat-{bits}", f"squat-{bits}", f"squat-{bits}", 0, 32, timed="kivi-2") for bits in (2, 3, 4)),
    *(
        Planned(f"squat-pre-{bits}", f"squat-{bits}", f"squat-{bits}", 0, 32, 32, "pre_rope", timed="kivi-2-before")
        for bits in (2, 3, 4)
    ),
    Planned("mixkvq", "mixkvq", "kivi-2", block=128),
    Planned(
        "aqua-kv", "higgs-2-wide", "higgs-2-wide", frame="pre_rope", command="fit-predictors", first="higgs-4-wide"
    ),
    *(
        Planned(
            f"inner-{bits}", f"inner-{bits}-symmetric", f"inner-{bits}-symmetric", 32, 96, timed=like, command=COMPOSED
        )
        for bits, like in ((2, "inner-2"), (3, "innerq-base"), (4, "inner-4"))
    ),
    *(_fitted(f"transform-{bits}") for bits in (2, 3, 4)),
    Planned("kivi-2-g128", "kivi-2-g128", "kivi-2-g128", 32, 96, 128, timed="kivi-2-g128", command=COMPOSED),
)

SCHEMES: dict[str, Planned] = {planned.name: planned for planned in _TABLE}
ALIASES = {"turboquant-k4v3": "turboquant-4-3"}
DEFAULT = (
    "uniform-8",
    "fp8",
    "kivi-4",
    "uniform-4",
    "higgs-4",
    "turboquant-4-3",
    "mixkvq",
    "innerq-base",
    "higgs-3",
    "innerq-small",
    "kivi-2",
    "squat-pre-2",
    "aqua-kv",
    "higgs-2",
)
SERVED = (*DEFAULT, "transform-4", "transform-3")  # what `--serve vllm` looks at, whether it is served or not


def planned(name: str) -> Planned:
    """A scheme of the table, or KEYCODEC+VALUECODEC; UsageError with what is allowed."""
    scheme = SCHEMES.get(ALIASES.get(name, name))
    if scheme is not None:
        return scheme
    key, plus, value = name.partition("+")
    if not plus:
        hint = allowed(name, [*SCHEMES, *ALIASES], "kvcal names preset")
        raise UsageError(f"--preset {name!r}: cannot be planned; {hint}, or give KEYCODEC+VALUECODEC")
    formats.codec(key, "key", Shape(1, 128, 32))  # names are checked
    formats.codec(value, "value", Shape(1, 128, 32))
    return Planned(name, key, value, command=COMPOSED)


def with_windows(schemes: Iterable[Planned], sink: int, recent: int) -> list[Planned]:
    """The same schemes with other windows; blocks stay, because groups depend on them."""
    return [replace(scheme, sink=sink, recent=recent) for scheme in schemes]


def sizes(scheme: Planned, geometry: Geometry) -> Sizes:
    """What the scheme takes on a model; UsageError where it does not fit the model's shape."""
    layers = geometry.layers - geometry.sliding_layers
    shape = Shape(geometry.kv_heads, geometry.head_dim, scheme.block)
    numbers = 2 * shape.heads * shape.dim * shape.block
    if scheme.key == "mixkvq":
        bits = quality.largest_bits(scheme.name)
        return Sizes((round(numbers * bits / 8),) * layers, THRESHOLDS, 0, bits, f"{bits:.2f} bits, as measured")
    key, value = formats.codec(scheme.key, "key", shape), formats.codec(scheme.value, "value", shape)
    blocks = [key.bytes + value.bytes] * layers
    if scheme.first is not None and blocks:
        blocks[0] = sum(formats.codec(scheme.first, role, shape).bytes for role in ("key", "value"))
    bits = sum(blocks) * 8 / (numbers * layers) if layers else 0.0
    constants = _predictors(geometry.kv_width, layers) if scheme.predicted else 0
    return Sizes(tuple(blocks), _why_decoded(scheme, key, value, geometry), constants, bits)


def _why_decoded(scheme: Planned, key: Codec, value: Codec, geometry: Geometry) -> str | None:
    if scheme.predicted:
        return PREDICTED
    ratio = geometry.heads // geometry.kv_heads
    if ratio > MOST_HEADS:
        return f"{ratio} query heads a kv head, the fused kernel serves {MOST_HEADS}"
    if not (key.kernel and value.kernel):
        return f"no kernel reads {scheme.key} beside {scheme.value} at head_dim {geometry.head_dim}"
    if scheme.frame == "pre_rope" and not key.rotates:
        return f"no kernel rotates keys of {scheme.key}"
    return None


def _predictors(width: int, layers: int) -> int:
    """AQUA-KV's linear predictors in float16: keys from keys of the layer below, values from its values and the
    keys.
    """
    return max(0, layers - 1) * 2 * (width * width + width + 2 * width * width + width)
