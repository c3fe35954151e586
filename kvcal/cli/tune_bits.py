"""`kvcal tune-bits`."""

from __future__ import annotations

from kvcal.cli.output import note, print_json, print_next, print_table
from kvcal.cli.signature import Typed, command
from kvcal.pipeline.options import TuneBitsOptions


@command(TuneBitsOptions)
def tune_bits(o: TuneBitsOptions, typed: Typed) -> None:
    """Choose each layer's key and value codecs for the least error under a limit of stored bits.

    --objective attention chooses bits of integers (KVTuner-like baseline). --objective kl measures the KL of each codec
    in each layer, solves the assignment as a knapsack, and takes it if it beats every uniform one on held-out windows.
    """
    from kvcal.commands.tune_bits import run_tune_bits

    result = run_tune_bits(o, note, typed)
    if o.json:
        print_json(result)
        return
    print_table(
        ["what", "value"], [[name, value] for name, value in result.items() if name not in ("layers", "sensitivity")]
    )
    if o.objective != "kl":
        columns = ["layer", "key bits", "value bits", "output error"]
        layers = result["layers"]
        rows = [[one["layer"], int(one["key_bits"]), int(one["value_bits"]), one["output_error"]] for one in layers]
        print_table(columns, rows)
    print_next("eval", result["bundle"], "--model", o.model)
