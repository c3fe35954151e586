"""`kvcal card`, `kvcal push` and `kvcal pull`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.bundle import File
from kvcal.cli.options import Json
from kvcal.cli.output import line, print_json, print_table, prose

Repo = Annotated[str, typer.Argument(help="A model repository on the hub, org/name.")]
Evaluation = Annotated[
    Path | None, typer.Option("--eval", help="What `kvcal eval --json` printed: its figures go into the card.")
]
License = Annotated[
    str | None, typer.Option(help="For the card, as apache-2.0. Default: the model's, where it is known.")
]


def card(
    bundle: File,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it there, its plots beside it. Default: print it.")
    ] = None,
    repo: Annotated[str | None, typer.Option(help="Where the bundle will be, for the commands in the card.")] = None,
    evaluation: Evaluation = None,
    license: License = None,
    json: Json = False,
) -> None:
    """Write a bundle's model card: metadata, tables, plots, and the commands that make it again."""
    options: dict[str, Any] = dict(locals())
    from kvcal.cli.defaults import defaults_of, options_of
    from kvcal.commands.publish import run_card

    result = run_card(options, defaults_of, options_of)
    if json:
        print_json(result)
    else:
        for place in result["files"]:
            line(place)
        if not result["files"]:
            prose(result["card"].rstrip())


def push(
    bundle: File,
    repo: Repo,
    branch: Annotated[str | None, typer.Option(help="Default: main.")] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit. Default: name and hash.")] = None,
    private: Annotated[bool, typer.Option("--private", help="If the repository is new.")] = False,
    evaluation: Evaluation = None,
    license: License = None,
    json: Json = False,
) -> None:
    """Publish a bundle with its card and plots on the Hugging Face hub, in one commit. Needs HF_TOKEN."""
    options: dict[str, Any] = dict(locals())
    from kvcal.cli.defaults import defaults_of, options_of
    from kvcal.commands.publish import run_push

    result = run_push(options, defaults_of, options_of)
    if json:
        print_json(result)
    else:
        print_table(["what", "value"], [[name, _listed(value)] for name, value in result.items()])


def pull(
    repo: Repo,
    output: Annotated[Path, typer.Option("--output", "-o", help="A folder. Default: here.")] = Path(),
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit. Default: main.")] = None,
    file: Annotated[str | None, typer.Option(help="Which bundle, where there are several.")] = None,
    sha256: Annotated[str | None, typer.Option(help="Refuse a bundle with another hash.")] = None,
    json: Json = False,
) -> None:
    """Fetch a bundle with its card and plots from the hub; every hash is checked, the commit is printed and recorded."""
    options: dict[str, Any] = dict(locals())
    from kvcal.commands.publish import run_pull

    result = run_pull(options)
    if json:
        print_json(result)
    else:
        print_table(["what", "value"], [[name, _listed(value)] for name, value in result.items()])


def _listed(value: Any) -> Any:
    return ", ".join(value) if isinstance(value, (list, tuple)) else value
