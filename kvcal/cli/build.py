"""`kvcal build`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcal.cli.evaluate import check_reports, print_gates
from kvcal.cli.options import Json, said_of
from kvcal.cli.output import note, print_json, print_table


def build(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="A build recipe, TOML (docs/pipeline.md).")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be built, and why.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes that build at a time.")] = 1,
    share: Annotated[
        bool, typer.Option(help="One pass over the model for bundles whose text and windows agree; else less memory.")
    ] = True,
    gates: Annotated[bool, typer.Option(help="Hold bundles to the recipe's gates.")] = True,
    junit: Annotated[Path | None, typer.Option(help="Write the gates as JUnit XML.")] = None,
    summary: Annotated[
        Path | None,
        typer.Option(help="Write the gates as Markdown; it is also appended to the file in $GITHUB_STEP_SUMMARY."),
    ] = None,
    json: Json = False,
) -> None:
    """Build the bundles of a recipe: those that changed; interrupted, the same command goes on where it was.

    What each bundle was made of lies in <recipe>.lock.json beside the outputs. Exit code 3 if a gate of the recipe
    fails.
    """
    from kvcal.cli.defaults import defaults_of, options_of
    from kvcal.commands.build import run_build
    from kvcal.pipeline.build import read_build_recipe
    from kvcal.pipeline.gates import raise_if_failed, report

    check_reports(junit, summary)
    read = read_build_recipe(recipe, options_of, defaults_of)
    typed = said_of(context)
    result = run_build(read, note, dry_run=dry_run, jobs=jobs, share=share, gates=gates, typed=typed)
    report(result["gates"], junit, summary)
    if json:
        print_json(result)
    else:
        rows = [[row["name"], row["method"], row["action"], row["pass"], row["why"]] for row in result["bundles"]]
        print_table(["bundle", "method", "would be" if dry_run else "state", "pass", "why"], rows)
        print_gates(result["gates"])
    raise_if_failed(result["gates"])
