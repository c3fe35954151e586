"""Codecs by their stable name in a bundle; adding one here adds it to the contract tests."""

from __future__ import annotations

from .base import Codec, Context, Packed, Role, Shape
from .by_head import ByHead
from .exact import Exact
from .float8 import Float8
from .higgs import Higgs
from .mixkvq import MixKVQ
from .predicted import Predicted
from .predictors import PREDICTORS, Predictor
from .registry import CODECS, build, load_plugins, register_codec, state_of
from .residual_vq import ResidualVQ
from .scaled import Scaled
from .squat import Squat
from .transform import Transform
from .uniform import Uniform

CODECS.update(
    (codec.name, codec)
    for codec in (
        Exact,
        Float8,
        Uniform,
        Higgs,
        ResidualVQ,
        Squat,
        Scaled,
        Predicted,
        MixKVQ,
        Transform,
        ByHead,
    )
)

__all__ = [
    "CODECS",
    "PREDICTORS",
    "ByHead",
    "Codec",
    "Context",
    "Exact",
    "Float8",
    "Higgs",
    "MixKVQ",
    "Packed",
    "Predicted",
    "Predictor",
    "ResidualVQ",
    "Role",
    "Scaled",
    "Shape",
    "Squat",
    "Transform",
    "Uniform",
    "build",
    "load_plugins",
    "register_codec",
    "state_of",
]
