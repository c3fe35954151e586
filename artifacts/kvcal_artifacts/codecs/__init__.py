"""Codecs by their stable name in a bundle; adding one here adds it to the contract tests."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..checked import shown
from ..errors import KVCalError
from .base import Codec, Context, Packed, Role, Shape
from .exact import Exact
from .float8 import Float8
from .higgs import Higgs
from .mixkvq import MixKVQ
from .predicted import Predicted
from .predictors import PREDICTORS, Predictor
from .residual_vq import ResidualVQ
from .scaled import Scaled
from .squat import Squat
from .transform import Transform
from .uniform import Uniform

CODECS: dict[str, type[Codec]] = {
    codec.name: codec
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
    )
}


def build(shape: Shape, role: Role, state: dict[str, Any], tensors: dict[str, Tensor]) -> Codec:
    """A codec from {"codec": name, "config": {...}} and its tensors; no name is ever imported. All settings, and dtype, shape
    and values of all tensors, are checked: KVCalError.
    """
    name = state.get("codec")
    if not isinstance(name, str) or name not in CODECS:
        raise KVCalError(f"codec {shown(name)}: this version knows {', '.join(CODECS)}")
    try:
        return CODECS[name].from_state(shape, role, state["config"], tensors)
    except (TypeError, KeyError, RuntimeError) as error:
        raise KVCalError(f"codec {name!r}: settings or tensors do not fit ({error})") from error


def state_of(codec: Codec) -> dict[str, Any]:
    return {"codec": codec.name, "config": codec.config()}


__all__ = [
    "CODECS", "PREDICTORS", "Codec", "Context", "Exact", "Float8", "Higgs", "MixKVQ", "Packed", "Predicted", "Predictor",
    "ResidualVQ", "Role", "Scaled", "Shape", "Squat", "Transform", "Uniform", "build", "state_of",
]  # fmt: skip
