"""Data-free presets that pages can hold, by the names that `kvcal eval --preset` has for them.

Their codecs are those of kvcal_artifacts.presets; exact tokens are vLLM's business (tails.py).
"""

from __future__ import annotations

from kvcal_artifacts import presets
from kvcal_artifacts.checked import shown
from kvcal_artifacts.codecs import Shape
from kvcal_artifacts.codecs.named import CODEC_MAKERS
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import LayerCodecs

NAMES = (
    *(f"higgs-{kind}{gain}" for gain in ("", "-debiased") for kind in ("2", "3", "4", "2-bytes")),
    *(f"turboquant-{bits}{points}" for points in ("", "-bytes") for bits in ("2", "3", "4", "4-3")),
    "turboquant-k4v3",
    *(f"uniform-{bits}" for bits in (2, 3, 4, 8)),
    *(f"kivi-{bits}" for bits in (2, 4)),
    *(f"innerq-{name}-plain" for name in presets.INNERQ_VALUES),
)
PRESETS = {name: presets.PRESETS[name] for name in NAMES}


def codecs(name: str, shape: Shape) -> LayerCodecs:
    """The codecs of one layer. Raises UsageError for a name that is not in PRESETS."""
    if name not in PRESETS:
        raise UsageError(f"preset {shown(name)}: vLLM's pages hold {', '.join(PRESETS)}, or give a bundle's path")
    key, value = PRESETS[name][:2]
    return LayerCodecs(CODEC_MAKERS[key](shape, "key"), CODEC_MAKERS[value](shape, "value"))
