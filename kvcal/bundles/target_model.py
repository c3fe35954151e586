"""The model that a bundle was made for, as its provenance names it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvcal_artifacts.bundle import Bundle

from .record_checks import Fields, check_model, string_of, table_of


@dataclass(frozen=True)
class TargetModel:
    """The model that a bundle was made for, as its provenance names it: a name of the hub or of the catalogue. A local
    folder is named without its place. seed: of random weights.
    """

    name: str
    local: bool
    revision: str | None
    seed: int | None


def target_model(bundle: Bundle) -> TargetModel | None:
    """What a bundle's provenance says of its model; None where it says nothing that can be read."""
    try:
        provenance: Fields = bundle.provenance
        while provenance.get("method") == "combine":
            provenance = table_of(table_of(provenance, "keys"), "provenance")
        model = table_of(provenance, "model")
        check_model(model)
        name, revision = string_of(model, "name"), model["revision"]
        seed = re.fullmatch(r"random:(\d{1,18})", str(revision)) if model["random_weights"] else None
        commit = isinstance(revision, str) and model["kind"] == "hub" and not model["random_weights"]
        return TargetModel(
            name, model["kind"] == "folder", str(revision) if commit else None, int(seed[1]) if seed else None
        )
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
