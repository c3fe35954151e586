"""Which model a bundle was made for: taken where --model is not given, named where another one is."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.errors import IncompatibleBundle, UsageError

from ..bundles.target_model import TargetModel, target_model
from ..pipeline.options import EvalOptions
from ..pipeline.shared_options import ModelOptions
from .options import CompareOptions, GenerateOptions

if TYPE_CHECKING:
    from torch import nn

WithBundles = TypeVar("WithBundles", EvalOptions, CompareOptions, GenerateOptions)
DEFAULT = ModelOptions().model


def with_model_of(o: WithBundles, rows: Iterable[object], typed: Collection[str]) -> WithBundles:
    """Options with the model of the bundles among `rows`, where --model was not given.

    typed: names of the options that somebody gave. Raises UsageError where the bundles were made for different models,
    IncompatibleBundle for a local folder, whose place no bundle records.
    """
    bundles = {row.name: origin for row in rows if isinstance(row, Bundle) and (origin := target_model(row))}
    if not bundles or "model" in typed or o.model != DEFAULT:
        return o
    (first, origin), *others = bundles.items()
    for name, other in others:
        if other.name != origin.name:
            raise UsageError(f"{first} was made for {origin.name}, {name} for {other.name}: give --model")
    if origin.local:
        raise IncompatibleBundle(f"{first} was made for {origin.name}: give --model PATH")
    if origin.seed is not None and "seed" not in typed and not o.random_weights:
        return replace(o, model=origin.name, random_weights=True, seed=origin.seed)
    revision = o.revision if "revision" in typed or o.random_weights else origin.revision
    return replace(o, model=origin.name, revision=revision)


def check_target_model(
    bundle: Bundle, model: nn.Module, revision: str | None = None, probe: tuple[float, ...] | None = None
) -> None:
    """`bundle.check`, whose IncompatibleBundle also says which model to give."""
    try:
        bundle.check(model, revision, probe)
    except IncompatibleBundle as error:
        origin = target_model(bundle)
        raise IncompatibleBundle(f"{error}; {_give(origin)}" if origin else str(error)) from error


def _give(origin: TargetModel) -> str:
    return f"made for {origin.name}: give --model {'PATH' if origin.local else origin.name}"
