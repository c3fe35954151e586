"""Options that somebody gave and nothing takes, and values that mean nothing, are refused. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

from kvcal_artifacts.errors import UsageError

from ..pipeline.shared_options import RandomWeights, Selection
from .options import GenerateOptions


def refuse_idle(typed: Collection[str], names: Collection[str], of: str, instead: str) -> None:
    """UsageError for the first of the options `names` that somebody gave (`typed`) where nothing takes it.

    of: what they apply to, of which there is none. instead: what to do.
    """
    for name in names:
        if name in typed:
            raise UsageError(f"--{name.replace('_', '-')} applies only to {of}, and there is none: {instead}")


def refuse_idle_seed(o: RandomWeights, typed: Collection[str]) -> None:
    """`refuse_idle` of --seed, in commands where it is of --random-weights alone."""
    if not o.random_weights:
        refuse_idle(typed, ("seed",), "random weights", "give --random-weights, or leave it out")


def refuse_empty_text(text: str) -> None:
    """UsageError for an empty --text (an unset variable, say), which is not taken for none."""
    if not text.strip():
        raise UsageError("--text is empty: give a file, a folder or a data set, or leave the option out")


def refuse_shares(o: Selection) -> None:
    """UsageError for a --keep or --heavy that is no share, and for --heavy alone."""
    if o.keep is None:
        if o.heavy is not None:
            raise UsageError("--heavy is a share of the tokens that --keep keeps: give --keep too")
        return
    if not 0 < o.keep <= 1:
        raise UsageError(f"--keep {o.keep:g}: a share of tokens, above 0 to 1")
    if o.heavy is not None and not 0 <= o.heavy <= 1:
        raise UsageError(f"--heavy {o.heavy:g}: a share of tokens, from 0 to 1")


def refuse_prompt(o: GenerateOptions) -> None:
    """UsageError for `kvcal generate` without a prompt, or with none or two of a bundle and a preset."""
    if not o.prompt.strip():
        raise UsageError("--prompt is empty: give some text to go on from")
    if (o.bundle is None) == (not o.preset):
        raise UsageError("give one --bundle or one --preset")
