"""`kvcal train-codebooks`."""

from __future__ import annotations

from kvcal.cli.output import line, note, print_facts, print_json, print_next, print_rows
from kvcal.cli.signature import Typed, command
from kvcal.pipeline.options import TrainCodebooksOptions


@command(TrainCodebooksOptions, spread=True)
def train_codebooks(o: TrainCodebooksOptions, typed: Typed) -> None:
    """Calibrate VQKV: train residual codebooks for keys and values and write a bundle."""
    from kvcal.commands.train_codebooks import run_train_codebooks

    result = run_train_codebooks(o, note, typed)
    if o.json:
        print_json(result)
        return
    rows = [{name: v for name, v in row.items() if name != "errors"} for row in result.pop("stage_rows")]
    print_facts({name: value for name, value in result.items() if name != "bands"}, wide=o.wide)
    line()
    print_rows(list(rows[0]), rows, wide=o.wide)
    print_next("eval", result["bundle"], "--model", o.model)
