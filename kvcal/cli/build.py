"""`kvcal build`."""

from __future__ import annotations

from typing import Any

from kvcal.cli.evaluate import check_reports, print_gates
from kvcal.cli.output import note, print_json, print_next, print_table
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import BuildOptions


@command(BuildOptions)
def build(o: BuildOptions, typed: Typed) -> None:
    """Build the bundles of a recipe: those that changed; interrupted, the same command goes on where it was.

    What each bundle was made of lies in <recipe>.lock.json beside the outputs. Exit code 3 if a gate of the recipe
    fails.
    """
    from kvcal.cli.defaults import defaults_of, options_of
    from kvcal.commands.build import run_build
    from kvcal.pipeline.build_recipe import read_build_recipe
    from kvcal.pipeline.gates import raise_if_failed, report

    check_reports(o.junit, o.summary)
    read = read_build_recipe(o.recipe, options_of, defaults_of)
    result = run_build(
        read, note, dry_run=o.dry_run, jobs=o.jobs, gpus=o.gpus, share=o.share, gates=o.gates, typed=typed
    )
    unwritten = report(result["gates"], o.junit, o.summary)
    if o.json:
        print_json(result)
    else:
        rows = [[row["name"], row["method"], row["action"], row["pass"], row["why"]] for row in result["bundles"]]
        print_table(["bundle", "method", "would be" if o.dry_run else "state", "pass", "why"], rows, wide=o.wide)
        print_gates(result["gates"], o.wide)
    raise_if_failed(result["gates"], unwritten)
    if not o.json:
        _next(o, result)


def _next(o: BuildOptions, result: dict[str, Any]) -> None:
    """Print the next command: `kvcal build` after a dry run, else `kvcal card` for the first bundle."""
    if o.dry_run:
        print_next("build", o.recipe)
    elif result["bundles"]:
        print_next("card", result["bundles"][0]["file"], "--output", "README.md")
