"""`kvcal train-codebooks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcal.cli.options import (
    Batch,
    Column,
    Heavy,
    Holdout,
    Json,
    Keep,
    Layerwise,
    Machine,
    Model,
    Random,
    Resume,
    Revision,
    Sink,
    Spill,
    SpillDir,
    Text,
    WindowLength,
    grouped,
    options_by_name,
    said_of,
)
from kvcal.cli.output import note, print_json, print_table


@grouped
def train_codebooks(
    context: typer.Context,
    model: Model = "tiny",
    revision: Revision = None,
    text: Text = None,
    column: Column = None,
    windows: Annotated[int | None, typer.Option(min=2, help="Windows in all; default: the model's preset.")] = None,
    holdout: Holdout = None,
    length: WindowLength = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Windows, vectors, first codewords.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: <model>-vqkv.kvcal.safetensors here.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="8b and 3b are the paper's for Llama-3.1-8B and Llama-3.2-3B; medium: 4096 codewords, small: 256. "
            "Default: by the model's size. Stages and high band are scaled to the model's head_dim."
        ),
    ] = None,
    stages: Annotated[str | None, typer.Option(help="VALUES,LOW,HIGH instead of the preset's: 10,20,14.")] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Codewords a stage, powers of two up to 65536: 65536,65536,16384.")
    ] = None,
    high_dims: Annotated[
        int | None, typer.Option(min=0, help="Key dimensions in the high band; 0: one band. Default: 48 of 128.")
    ] = None,
    split_by: Annotated[
        str, typer.Option(help="Dimensions ranked by their error over their energy (relative), or as such (absolute).")
    ] = "relative",
    scale: Annotated[
        str,
        typer.Option(
            help="Units in which vectors are quantised: none (the paper), head, channel, or query (keys times the "
            "queries' root mean square)."
        ),
    ] = "query",
    vectors: Annotated[
        int | None, typer.Option(min=1, help="Keys and values trained on; default: the preset's.")
    ] = None,
    per_layer: Annotated[bool, typer.Option("--per-layer", help="Codebooks of each layer's own.")] = False,
    trainer: Annotated[
        str, typer.Option(help="k-means (free codewords), closed-form or adam (SimVQ, as in the paper).")
    ] = "k-means",
    tolerance: Annotated[
        float, typer.Option(help="A stage ends with the iteration that lowers the held-out error by less.")
    ] = 0.01,
    min_iterations: Annotated[int, typer.Option(min=1, help="Iterations a stage, at least.")] = 5,
    max_iterations: Annotated[int, typer.Option(min=1, help="And at most.")] = 50,
    rate: Annotated[float, typer.Option(help="Adam's learning rate.")] = 1e-3,
    batch_vectors: Annotated[int, typer.Option(min=1, help="Vectors a step of Adam.")] = 65536,
    beta: Annotated[float, typer.Option(help="Of the paper's loss, Eq. 4.")] = 1.0,
    gamma: Annotated[float, typer.Option(help="Likewise; without an encoder it changes nothing.")] = 0.25,
    frame: Annotated[str, typer.Option(help="post_rope (the paper) or pre_rope.")] = "post_rope",
    sink: Sink = 4,
    recent: Annotated[
        int | None, typer.Option(min=0, help="Newest tokens kept, at least. Default: 1024; preset small 128.")
    ] = None,
    block: Annotated[int | None, typer.Option(min=1, help="Tokens packed at a time. Default: as --recent's.")] = None,
    keep: Keep = None,
    heavy: Heavy = None,
    machine: Machine = Machine(),  # noqa: B008, frozen
    batch: Batch = None,
    spill: Spill = "device",
    spill_dir: SpillDir = None,
    layerwise: Layerwise = False,
    random_weights: Random = False,
    resume: Resume = True,
    json: Json = False,
) -> None:
    """Calibrate VQKV: train residual codebooks for keys and values and write a bundle."""
    options = options_by_name(locals())
    from kvcal.commands.train_codebooks import run_train_codebooks

    result = run_train_codebooks(options, note, said_of(context))
    if json:
        print_json(result)
        return
    rows = [{name: v for name, v in row.items() if name != "errors"} for row in result.pop("stage_rows")]
    print_table(list(rows[0]), [[f"{v:.4f}" if isinstance(v, float) else v for v in row.values()] for row in rows])
    print_table(["what", "value"], [[name, value] for name, value in result.items() if name != "bands"])
