"""Data-free presets that pages can hold, by the names that `kvcal eval --preset` has for them; and what kvcal's other
names are answered with.

Their codecs are those of kvcal_artifacts.presets; exact tokens are vLLM's business (tails.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from kvcal_artifacts import presets
from kvcal_artifacts.bundle import SUFFIX
from kvcal_artifacts.codecs import Codec, Shape
from kvcal_artifacts.codecs.named import CODEC_MAKERS
from kvcal_artifacts.errors import KVCalError
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
    "h2o": "it selects tokens by attention, and a page that requests share cannot lose those of one",
    **dict.fromkeys(presets.AUTO_BITS, "it chooses by the keys of a loaded model; make a bundle by `kvcal recommend`"),
}

_TO_BUNDLE = f"--model MODEL --text TEXT --sink 0 --recent 0 --output x{SUFFIX}"
TRANSFORM = re.compile(r"transform-\d(\.\d+)?(-debiased)?")
VQKV = f"kvcal fit vqkv --block 32 {_TO_BUNDLE}"  # on a CPU; no kernel reads codebooks in pages


def fit_of(transform: str) -> str:
    """The command that fits transform coding by name, transform-4, into a bundle that pages can hold."""
    settings = '--first-layer "" --key-inputs none --value-inputs none --frame post_rope'
    return f"kvcal fit aqua-kv --residual {transform} {settings} {_TO_BUNDLE}"


def make(name: str) -> str:
    """The command that writes a bundle of one of kvcal's presets or data-free codecs, without exact windows."""
    what = name if name in presets.PRESETS else f"--keys {name} --values {name}"
    return f"kvcal preset {what} --model MODEL --sink 0 --recent 0 --output x{SUFFIX}"


def without_windows(name: str) -> str | None:
    """The served preset of the same codecs as one of kvcal's that is not served: they differ in their exact tokens."""
    return next((one for one in NAMES if PRESETS[one][:2] == presets.PRESETS[name][:2]), None)


def codecs(name: str, shape: Shape) -> LayerCodecs:
    """The codecs of one layer of any of kvcal's presets or data-free codecs, served or not."""
    key, value = presets.PRESETS[name][:2] if name in presets.PRESETS else (name, name)
    return LayerCodecs(CODEC_MAKERS[key](shape, "key"), CODEC_MAKERS[value](shape, "value"))


def of_other_sizes(codec: Codec, dims: Iterable[int]) -> list[Codec]:
    """A codec that has a name of kvcal's without data, at other head_dims; none where it has no such name."""
    shape, role = codec.shape, codec.role
    for make_codec in CODEC_MAKERS.values():
        try:
            named = make_codec(shape, role)
        except KVCalError:  # of a codec that has no such head_dim
            continue
        if (named.name, named.config()) == (codec.name, codec.config()) and same_tensors(named, codec):
            return [make_codec(Shape(shape.heads, dim, shape.block), role) for dim in dims if dim != shape.dim]
    return []


def same_tensors(one: Codec, other: Codec) -> bool:
    """Whether two codecs have the same constants, numbers of -bytes among them."""
    a, b = one.tensors(), other.tensors()
    return a.keys() == b.keys() and all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


def is_codec(name: str) -> bool:
    """Whether kvcal has a data-free codec of this name."""
    return name in CODEC_MAKERS
