"""`kvcal fit-norms` and `kvcal fold`."""

from __future__ import annotations

from kvcal.cli.output import line, note, print_facts, print_json, print_next, print_rows
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import FoldOptions
from kvcal.pipeline.options import FitNormsOptions

COLUMNS = {
    "layer": "layer", "key_outlier_ratio": "key outlier", "factor_min": "least factor",
    "factor_max": "largest factor", "key_relative_error": "key error", "value_relative_error": "value error",
    "logit_error": "squared logit error", "logit_error_plain": "without factors",
    "value_symmetric_share": "symmetric groups",
}  # fmt: skip
# squared errors over the variance of scores, where `kvcal compare` has the root of squared errors over squares
FACTS = {"logit_error": "squared logit error", "logit_error_plain": "the same, no factors"}


@command(FitNormsOptions, spread=True)
def fit_norms(o: FitNormsOptions, typed: Typed) -> None:
    """Calibrate InnerQ: measure key channels on text, report outliers, write a bundle with a factor a channel."""
    from kvcal.commands.fit_norms import run_fit_norms

    result = run_fit_norms(o, note, typed)
    if o.json:
        print_json(result)
        return
    print_facts({name: value for name, value in result.items() if name != "layers"}, names=FACTS, wide=o.wide)
    shown = [name for name in COLUMNS if any(name in row for row in result["layers"])]
    line()
    print_rows(shown, result["layers"], names=COLUMNS, wide=o.wide)
    print_next("eval", result["bundle"], "--model", o.model)


@command(FoldOptions)
def fold(o: FoldOptions, typed: Typed) -> None:
    """Write a new checkpoint with a bundle's key factors folded in: W_K divided by them, W_Q multiplied."""
    from kvcal.commands.fold import run_fold

    result = run_fold(o, note)
    if o.json:
        print_json(result)
        return
    print_facts(result, wide=o.wide)
    bundle = [] if result["bundle"] is None else ["--bundle", result["bundle"]]
    print_next("eval", *bundle, "--model", o.output)
