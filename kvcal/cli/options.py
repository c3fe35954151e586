"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

PerLayer = Annotated[
    list[str] | None,
    typer.Option(
        help="Exceptions, LAYERS[:keys|:values]=CODEC: 0=higgs-4, 3-5:keys=uniform-4, -1=exact-16; may be repeated."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")]
Model = Annotated[str, typer.Option("--model", "-m", help="Short name (see `kvcal models`), hub id, or local folder.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
Text = Annotated[
    str | None,
    typer.Option(
        help="A file (plain text, .json, .jsonl, .csv, .tsv or .parquet; also .gz, .xz, .bz2, .zst), a folder of them, a hub "
        "data set org/name[:config][:split][@commit], or `embedded:calibration`. Default: the model's own."
    ),
]
Column = Annotated[
    str | None, typer.Option(help="Column of a file of rows or a data set that holds the text or chats.")
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: float32 on a CPU, bfloat16 on a GPU.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU if there is one.")]
Step = Annotated[int, typer.Option(min=1, help="Tokens a forward pass: each step sees the compressed past.")]
Random = Annotated[bool, typer.Option("--random-weights", help="The geometry with random weights, no download.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of --random-weights.")]
Keep = Annotated[
    float | None,
    typer.Option(
        help="Keep this share of the tokens, by attention and age (H2O), as 0.2. Default: all, or what a bundle says."
    ),
]
Heavy = Annotated[
    float | None,
    typer.Option(help="With --keep: which share of the kept tokens is chosen by attention (default: 0.5)."),
]
Bundles = Annotated[list[Path] | None, typer.Option("--bundle", "-b", help="A bundle file; may be repeated.")]
Presets = Annotated[list[str] | None, typer.Option("--preset", "-p", help="A method without data; may be repeated.")]
Subspace = Annotated[
    str | None,
    typer.Option(help="Of SQuat bundles: prompt (the row's own queries), calibrated or both. Default: the bundle's."),
]
RequireKernels = Annotated[
    bool, typer.Option("--require-kernels", help="Fail, with exit code 8, where a layer cannot take the fused kernel.")
]
Holdout = Annotated[int | None, typer.Option(min=1, help="How many of them are held out (default: 1 in 8).")]
WindowLength = Annotated[int | None, typer.Option(min=2, help="Tokens a window; default: the model's preset.")]
WindowSeed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Which windows are drawn.")]
Sink = Annotated[int, typer.Option(min=0, help="First tokens kept in the model's dtype.")]
Recent = Annotated[int, typer.Option(min=0, help="Newest tokens kept, at least.")]
Block = Annotated[int, typer.Option(min=1, help="Tokens packed at a time.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Windows at a time.")]
Spill = Annotated[str, typer.Option(help="Where hidden states lie: device, cpu or disk.")]
SpillDir = Annotated[Path | None, typer.Option(help="Folder for --spill disk.")]
Layerwise = Annotated[bool, typer.Option("--layerwise", help="One layer's weights on the device at a time.")]
Resume = Annotated[bool, typer.Option(help="Go on from an interrupted run of the same settings.")]


@dataclass(frozen=True)
class Machine:
    """What a model runs as, and on."""

    dtype: Dtype = "auto"
    device: Device = "auto"


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command, called with loose options where it takes a dataclass of them: in its signature, which Typer reads,
    the fields stand in the dataclass's place.
    """
    types = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in types.items() if is_dataclass(kind)}
    loose: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        name = parameter.name
        if name not in groups:
            loose.append(parameter.replace(annotation=types[name]))
            continue
        kinds = get_type_hints(groups[name], include_extras=True)
        loose += [
            parameter.replace(name=one.name, default=one.default, annotation=kinds[one.name])
            for one in fields(groups[name])
        ]

    @functools.wraps(command)
    def call(**options: Any) -> None:
        values = {
            name: group(**{one.name: options.pop(one.name) for one in fields(group)}) for name, group in groups.items()
        }
        command(**values, **options)

    call.__signature__ = inspect.Signature(loose)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in loose}
    return call


def options_by_name(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A command's arguments (its `locals()`) as options by name, without its context and with groups taken apart."""
    options: dict[str, Any] = {}
    for name, value in arguments.items():
        if is_dataclass(value):
            options |= {one.name: getattr(value, one.name) for one in fields(value)}
        elif name != "context":
            options[name] = value
    return options


def said_of(context: typer.Context) -> set[str]:
    """Names of the options that somebody gave, be it at their default."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
