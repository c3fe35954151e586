"""`kvcal train-codebooks`."""

from __future__ import annotations

from kvcal.cli.output import note, print_json, print_next, print_table
from kvcal.cli.signature import Typed, command
from kvcal.pipeline.options import TrainCodebooksOptions


@command(TrainCodebooksOptions)
def train_codebooks(o: TrainCodebooksOptions, typed: Typed) -> None:
    """Calibrate VQKV: train residual codebooks for keys and values and write a bundle."""
    from kvcal.commands.train_codebooks import run_train_codebooks

    result = run_train_codebooks(o, note, typed)
    if o.json:
        print_json(result)
        return
    rows = [{name: v for name, v in row.items() if name != "errors"} for row in result.pop("stage_rows")]
    print_table(list(rows[0]), [[f"{v:.4f}" if isinstance(v, float) else v for v in row.values()] for row in rows])
    print_table(["what", "value"], [[name, value] for name, value in result.items() if name != "bands"])
    print_next("eval", result["bundle"], "--model", o.model)
