"""`kvcal tune-bits`."""

from __future__ import annotations

from typing import Any

from kvcal.cli.output import line, note, print_facts, print_json, print_next, print_rows, print_table
from kvcal.cli.signature import Typed, command
from kvcal.pipeline.options import TuneBitsOptions
from kvcal.report.quantities import folded


@command(TuneBitsOptions, spread=True)
def tune_bits(o: TuneBitsOptions, typed: Typed) -> None:
    """Choose each layer's key and value codecs for the least error under a limit of stored bits.

    --objective attention chooses bits of integers (KVTuner-like baseline). With --objective kl the KL of each codec is
    measured in each layer, or each group of its kv heads (--head-groups). The assignment is then solved as a knapsack,
    and taken if it beats every uniform one on held-out windows.
    """
    from kvcal.commands.tune_bits import run_tune_bits

    result = run_tune_bits(o, note, typed)
    if o.json:
        print_json(result)
        return
    print_facts({name: value for name, value in result.items() if name not in ("layers", "sensitivity")}, wide=o.wide)
    if o.objective != "kl":
        _layers(result["layers"], o.wide)
    print_next("eval", result["bundle"], "--model", o.model)


def _layers(layers: list[dict[str, Any]], wide: bool) -> None:
    """Codecs of each layer, equal neighbours folded; with --wide a row a layer, and its error."""
    rows = [{**one, "key_bits": int(one["key_bits"]), "value_bits": int(one["value_bits"])} for one in layers]
    line()
    if wide:
        print_rows(["layer", "key_bits", "value_bits", "output_error"], rows, wide=True)
    else:
        bits = [[row["layer"], row["key_bits"], row["value_bits"]] for row in rows]
        print_table(["layers", "key bits", "value bits"], folded(bits))
