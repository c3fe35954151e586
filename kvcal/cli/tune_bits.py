"""`kvcal tune-bits`."""

from __future__ import annotations

from kvcal.cli.options import Typed, command
from kvcal.cli.output import note, print_json, print_table
from kvcal.pipeline.options import TuneBitsOptions


@command(TuneBitsOptions)
def tune_bits(o: TuneBitsOptions, typed: Typed) -> None:
    """Choose each layer's key and value bits for the least attention error under a limit (KVTuner-like baseline)."""
    from kvcal.commands.tune_bits import run_tune_bits

    result = run_tune_bits(o, note)
    if o.json:
        print_json(result)
        return
    print_table(["what", "value"], [[name, value] for name, value in result.items() if name != "layers"])
    rows = [
        [row["layer"], int(row["key_bits"]), int(row["value_bits"]), row["output_error"]] for row in result["layers"]
    ]
    print_table(["layer", "key bits", "value bits", "output error"], rows)
