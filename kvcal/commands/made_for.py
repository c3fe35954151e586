"""Which model a bundle was made for: taken where --model is not given, named where another one is."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.errors import IncompatibleBundle, UsageError

from ..bundles.provenance import MadeFor, made_for
from ..pipeline.options import EvalOptions, ModelOptions
from .options import CompareOptions, GenerateOptions

WithBundles = TypeVar("WithBundles", EvalOptions, CompareOptions, GenerateOptions)
DEFAULT = ModelOptions().model


def with_model_of(o: WithBundles, rows: Iterable[object], typed: Collection[str]) -> WithBundles:
    """Options with the model of the bundles among `rows`, where --model was not given.

    typed: names of the options that somebody gave. Raises UsageError where the bundles were made for different models,
    IncompatibleBundle for a local folder, whose place no bundle records.
    """
    bundles = {bundle.name: made for bundle in rows if isinstance(bundle, Bundle) and (made := made_for(bundle))}
    if not bundles or "model" in typed or o.model != DEFAULT:
        return o
    (first, made), *others = bundles.items()
    for name, other in others:
        if other.name != made.name:
            raise UsageError(f"{first} was made for {made.name}, {name} for {other.name}: give --model")
    if made.local:
        raise IncompatibleBundle(f"{first} was made for {made.name}: give --model PATH")
    if made.seed is not None and "seed" not in typed and not o.random_weights:
        return replace(o, model=made.name, random_weights=True, seed=made.seed)
    revision = o.revision if "revision" in typed or o.random_weights else made.revision
    return replace(o, model=made.name, revision=revision)


def check_made_for(
    bundle: Bundle, model: Any, revision: str | None = None, probe: tuple[float, ...] | None = None
) -> None:
    """`bundle.check`, whose IncompatibleBundle also says which model to give."""
    try:
        bundle.check(model, revision, probe)
    except IncompatibleBundle as error:
        made = made_for(bundle)
        raise IncompatibleBundle(f"{error}; {_give(made)}" if made else str(error)) from error


def _give(made: MadeFor) -> str:
    return f"made for {made.name}: give --model {'PATH' if made.local else made.name}"
