"""`kvcal names`: what options take by name, with the bits that it stores.

Names, and their bits at the geometry of MODEL, are read from a file, so that listing them imports no torch.
`python -m kvcal.commands.names` writes it anew.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from importlib.metadata import entry_points

from kvcal_artifacts.errors import UsageError

from ..models.names import resolve
from ..pipeline.names import FILE, MODEL, NameRow, stored
from ..report.suggest import allowed
from .idle import refuse_idle

PLUGINS = "kvcal"  # the group of entry points by which packages bring codecs, methods and presets
KINDS = ("preset", "codec", "scheme", "operation", "device")


def run_names(kind: str | None, model: str, typed: Collection[str] = ()) -> list[NameRow]:
    """Names with their bits at this model's geometry, of one kind or of all.

    Raises UsageError for an unknown kind or model, and for a model given (`typed`) where nothing has bits. Reads no
    weights.
    """
    if kind is not None and kind not in KINDS:
        raise UsageError(f"kind {kind!r} is not known; {allowed(kind, KINDS, 'kvcal names')}")
    if kind in ("operation", "device"):
        refuse_idle(typed, ("model",), "names with bits/value", f"no {kind} has them; leave it out")
    plugins = bool(entry_points(group=PLUGINS))
    rows = stored() if model == MODEL and not plugins else _counted(model)
    return [row for row in rows if kind in (None, row["kind"])]


def _counted(model: str) -> list[NameRow]:
    """The names of kvcal and of installed packages, counted by the codecs themselves. Imports torch."""
    source = resolve(model)
    from kvcal_artifacts.codecs import load_plugins

    load_plugins()
    from ..models.configuration import geometry
    from .names_counted import counted

    return counted(geometry(source))


if __name__ == "__main__":
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in _counted(MODEL)) + "\n]\n", "utf-8")
