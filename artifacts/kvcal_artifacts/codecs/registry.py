"""Codecs by the names that files give them.

The package fills the table; a codec around another builds that one here.
"""

from __future__ import annotations

from torch import Tensor

from ..checked import State, shown
from ..errors import KVCalError
from .base import Codec, Role, Shape

CODECS: dict[str, type[Codec]] = {}


def build(shape: Shape, role: Role, state: State, tensors: dict[str, Tensor]) -> Codec:
    """A codec from {"codec": name, "config": {...}} and its tensors; no name is ever imported.

    Raises KVCalError unless all settings, and dtype, shape and values of all tensors, are allowed.
    """
    name = state.get("codec")
    if not isinstance(name, str) or name not in CODECS:
        raise KVCalError(f"codec {shown(name)}: this version knows {', '.join(CODECS)}")
    try:
        return CODECS[name].from_state(shape, role, state["config"], tensors)
    except (TypeError, KeyError, RuntimeError) as error:
        raise KVCalError(f"codec {name!r}: settings or tensors do not fit ({error})") from error


def state_of(codec: Codec) -> State:
    """What `build` makes the codec of, without its tensors."""
    return {"codec": codec.name, "config": codec.config()}
