"""Which package a codec comes from that is none of kvcal's: a bundle names it, and its reader knows what to install."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from typing import TypedDict

from ..checked import shown
from ..errors import IncompatibleBundle
from .base import Codec
from .registry import BROUGHT, CODECS, GROUP, load_plugins

OURS = __name__.partition(".")[0]


class Origin(TypedDict):
    """A package and its version; a module and None where no installed package has it."""

    package: str
    version: str | None


def origins_of(states: object) -> dict[str, Origin]:
    """The origin of each codec in these states that is none of kvcal's, by name; codecs inside others too."""
    names = sorted(set(names_in(states)) & CODECS.keys())
    return {name: _origin(name, CODECS[name]) for name in names if not _is_ours(CODECS[name])}


def names_in(states: object) -> Iterator[str]:
    """Every text under a key `codec` in nested objects and lists: what states of codecs name, among other texts."""
    inside = states.values() if isinstance(states, Mapping) else states if isinstance(states, (list, tuple)) else ()
    if isinstance(states, Mapping) and isinstance(states.get("codec"), str):
        yield states["codec"]
    for entry in inside:
        yield from names_in(entry)


def _is_ours(codec: type[Codec]) -> bool:
    return codec.__module__.partition(".")[0] == OURS


def is_ours(name: str) -> bool:
    """Whether the codec of that name is one of kvcal's."""
    return name in CODECS and _is_ours(CODECS[name])


def _origin(name: str, codec: type[Codec]) -> Origin:
    """The package whose entry point brought the codec, else the one that its module is installed with."""
    module = codec.__module__.partition(".")[0]
    packages = [BROUGHT[name]] if name in BROUGHT else []
    packages += [one.dist.name for one in entry_points(group=GROUP) if one.dist and _top(one.value) == module]
    packages = packages or packages_distributions().get(module, [])
    for package in packages:
        try:
            return {"package": package, "version": version(package)}
        except PackageNotFoundError:
            continue
    return {"package": module, "version": None}


def _top(value: str) -> str:
    """The top module of an entry point's value, as "acme.codecs:register" names it."""
    return value.partition(":")[0].partition(".")[0]


def require_codecs(origins: Mapping[str, Origin]) -> None:
    """Raises IncompatibleBundle for a codec that is not there, naming what to install."""
    for name, origin in origins.items():
        if name not in CODECS:
            load_plugins()
        if name not in CODECS:
            raise IncompatibleBundle(_absent(name, origin))


def _absent(name: str, origin: Origin) -> str:
    package, recorded = origin["package"], origin["version"]
    if recorded is None:
        return (
            f"codec {shown(name)} is of module {package}, which was in no package: call "
            "kvcal_artifacts.codecs.register_codec with its class first"
        )
    install = f"if you trust it, pip install {package}=={recorded}"
    importlib.invalidate_caches()
    try:
        installed = version(package)
    except PackageNotFoundError:
        return f"codec {shown(name)} is of package {package} {recorded}, which is not installed: {install}"
    return f"codec {shown(name)} is of package {package} {recorded}, and {installed} has no such codec: {install}"
