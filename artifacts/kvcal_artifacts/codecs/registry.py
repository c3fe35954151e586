"""Codecs by the names that files give them.

The package fills the table; a codec around another builds that one here. Other installed packages may add theirs: each
names a function in the entry point group `kvcal`, which takes nothing and calls `register_codec`, or `kvcal.register`.
These functions are called once a process, when a name comes up that is not known. What a file says never decides what
is imported.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from torch import Tensor

from ..checked import State, shown
from ..errors import KVCalError
from .base import Codec, Role, Shape

CODECS: dict[str, type[Codec]] = {}
GROUP = "kvcal"  # of entry points
BROUGHT: dict[str, str] = {}  # codecs that an entry point registered -> its package


@cache
def load_plugins() -> tuple[str, ...]:
    """Call the functions of all installed packages in the entry point group `kvcal`, once a process.

    Returns their names, as "package: name". Raises KVCalError, naming the package, where one fails.
    """
    names = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        package = "?" if entry.dist is None else entry.dist.name
        before = set(CODECS)
        try:
            entry.load()()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise KVCalError(
                f"package {package}: its entry point {GROUP}:{entry.name} fails ({reason}); mend or uninstall it"
            ) from error
        names.append(f"{package}: {entry.name}")
        BROUGHT.update(dict.fromkeys(CODECS.keys() - before, package))
    return tuple(names)


def register_codec(codec: type[Codec]) -> None:
    """Let bundles name this codec, by its `name`. Raises KVCalError where another class has that name."""
    if not (isinstance(codec, type) and issubclass(codec, Codec)):
        raise KVCalError(f"register_codec({codec!r}): must be a subclass of kvcal_artifacts.codecs.Codec")
    registered = CODECS.setdefault(codec.name, codec)
    if registered is not codec:
        where = f"{registered.__module__}.{registered.__qualname__}"
        raise KVCalError(f"codec {codec.name!r}: the name is taken, by {where}; give the class another name")


def build(shape: Shape, role: Role, state: State, tensors: dict[str, Tensor]) -> Codec:
    """A codec from {"codec": name, "config": {...}} and its tensors; no name is ever imported.

    Raises KVCalError unless all settings, and dtype, shape and values of all tensors, are allowed.
    """
    name = state.get("codec")
    if isinstance(name, str) and name not in CODECS:
        load_plugins()
    if not isinstance(name, str) or name not in CODECS:
        raise KVCalError(f"codec {shown(name)}: this version knows {', '.join(CODECS)}")
    try:
        return CODECS[name].from_state(shape, role, state["config"], tensors)
    except (TypeError, KeyError, RuntimeError) as error:
        raise KVCalError(f"codec {name!r}: settings or tensors do not fit ({error})") from error


def state_of(codec: Codec) -> State:
    """What `build` makes the codec of, without its tensors."""
    return {"codec": codec.name, "config": codec.config()}
