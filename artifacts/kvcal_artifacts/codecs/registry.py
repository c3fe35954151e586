"""Codecs by the names that files give them. The package fills the table; a codec around another builds that one here, too."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..checked import shown
from ..errors import KVCalError
from .base import Codec, Role, Shape

CODECS: dict[str, type[Codec]] = {}


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
