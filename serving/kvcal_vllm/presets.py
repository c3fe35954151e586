"""Data-free presets that pages can hold, by the names that `kvcal eval --preset` has for them.

Their codecs are those of kvcal_artifacts.presets; exact tokens are vLLM's business (tails.py).
"""

from __future__ import annotations

from kvcal_artifacts import presets
from kvcal_artifacts.codecs import Shape
from kvcal_artifacts.codecs.named import CODEC_MAKERS
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


# kvcal's names of schemes that are no presets of two codecs -> why a server cannot make them out of a name
OTHERS = {
    "mixkvq": "what it stores depends on the request's own tokens, so requests could not share a prefix",
    "aqua-kv": "it predicts layers from the one below, for all tokens of a request at every step",
    **dict.fromkeys(presets.AUTO_BITS, "it chooses by the keys of a loaded model; make a bundle by `kvcal recommend`"),
}


def codecs(name: str, shape: Shape) -> LayerCodecs:
    """The codecs of one layer of any of kvcal's presets of two codecs, served or not."""
    key, value = presets.PRESETS[name][:2]
    return LayerCodecs(CODEC_MAKERS[key](shape, "key"), CODEC_MAKERS[value](shape, "value"))
