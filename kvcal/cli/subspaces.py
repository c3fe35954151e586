"""`kvcal measure-subspaces`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.options import (
    Batch,
    Block,
    Column,
    Device,
    Dtype,
    Heavy,
    Json,
    Keep,
    Layerwise,
    Model,
    Random,
    Recent,
    Resume,
    Revision,
    Sink,
    Spill,
    SpillDir,
    Text,
    WindowLength,
    WindowSeed,
    said_of,
)
from kvcal.cli.output import note, print_json, print_table


def measure_subspaces(
    context: typer.Context,
    model: Model = "tiny",
    revision: Revision = None,
    text: Text = None,
    column: Column = None,
    other_text: Annotated[str | None, typer.Option(help="Another text: is its subspace as good for this one?")] = None,
    windows: Annotated[int | None, typer.Option(min=2, help="Windows in all; default: 32.")] = None,
    holdout: Annotated[int | None, typer.Option(min=1, help="How many of them are held out (default: 8).")] = None,
    length: WindowLength = None,
    seed: WindowSeed = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: <model>-squat.kvcal.safetensors here.")
    ] = None,
    subspace: Annotated[
        str, typer.Option(help="What the cache uses: prompt (the row's own queries), calibrated, or both.")
    ] = "calibrated",
    frame: Annotated[str, typer.Option(help="Keys after RoPE, post_rope, or before it, pre_rope.")] = "post_rope",
    queries: Annotated[str, typer.Option(help="The same of the queries that make the subspace.")] = "post_rope",
    settings: Annotated[
        str, typer.Option(help="The paper's rank, strength and channels for lm-eval, longbench or math-500.")
    ] = "lm-eval",
    rank: Annotated[int | None, typer.Option(min=0, help="Directions of a subspace; 0: all, head_dim.")] = None,
    strength: Annotated[float | None, typer.Option(min=0, help="Lambda of the paper; 0 is KIVI.")] = None,
    channels: Annotated[
        int | None, typer.Option(min=0, help="Channels rounded at a time; 0: half of head_dim.")
    ] = None,
    normalise: Annotated[
        str, typer.Option(help="paper: singular values grow with the text; length: divided by the root of its tokens.")
    ] = "paper",
    search: Annotated[
        bool, typer.Option("--search", help="Take each layer's best of a grid of ranks and strengths (Table 3).")
    ] = False,
    prompt_tokens: Annotated[
        int, typer.Option(min=0, help="First tokens of a window taken for its prompt; 0: a quarter.")
    ] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Deviation against rank as .png, .svg or .pdf (Figures 2 and 6).")
    ] = None,
    bits: Annotated[int, typer.Option(min=1, max=8, help="Of keys and values.")] = 2,
    group: Annotated[int, typer.Option(min=1, help="Tokens, or channels of a value, that share a scale.")] = 32,
    sink: Sink = 0,
    recent: Recent = 32,
    block: Block = 32,
    keep: Keep = None,
    heavy: Heavy = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    batch: Batch = None,
    spill: Spill = "device",
    spill_dir: SpillDir = None,
    layerwise: Layerwise = False,
    random_weights: Random = False,
    resume: Resume = True,
    json: Json = False,
) -> None:
    """Measure the subspaces that queries lie in, and write a bundle of SQuat that uses them."""
    from kvcal.commands.measure_subspaces import SOURCES, run_measure_subspaces

    options: dict[str, Any] = {name: value for name, value in locals().items() if name != "context"}
    result = run_measure_subspaces(options, note, said_of(context))
    if json:
        print_json(result)
        return
    tables = ("layers", "deviation", "search", "phases")
    print_table(["what", "value"], [[name, value] for name, value in result.items() if name not in tables])
    deviation = result["deviation"]
    rows = zip(deviation["ranks"], *deviation["mean"].values(), strict=True)
    columns = ["rank", *(SOURCES[source] for source in deviation["mean"])]
    print_table(columns, [[r, *(f"{v:.4f}" for v in values)] for r, *values in rows], title="deviation of queries")
    if result["search"]:
        cells = [[p["rank"], f"{p['strength']:g}", f"{p['logit_error']:.5f}", p["layers"]] for p in result["search"]]
        print_table(["rank", "strength", "logit error", "layers"], cells, title="search")
