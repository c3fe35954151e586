"""`kvcal fit-predictors`."""

from __future__ import annotations

from kvcal.cli.output import note, print_facts, print_json, print_next
from kvcal.cli.signature import Typed, command
from kvcal.pipeline.options import FitPredictorsOptions


@command(FitPredictorsOptions, spread=True)
def fit_predictors(o: FitPredictorsOptions, typed: Typed) -> None:
    """Calibrate AQUA-KV: fit each layer's predictors on text and write a bundle."""
    from kvcal.commands.fit_predictors import run_fit_predictors
    from kvcal.pipeline.scheme_file import read_recipe, with_recipe

    options = with_recipe(o, typed)
    result = run_fit_predictors(
        options, note, typed if o.recipe is None else typed | read_recipe(o.recipe).option_names
    )
    if o.json:
        print_json(result)
    else:
        print_facts({name: value for name, value in result.items() if name != "layers"}, wide=o.wide)
        print_next("eval", result["bundle"], "--model", o.model)
