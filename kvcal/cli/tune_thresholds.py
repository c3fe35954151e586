"""`kvcal tune-thresholds`."""

from __future__ import annotations

from kvcal.cli.output import note, print_json, print_next, print_table
from kvcal.cli.signature import Typed, command
from kvcal.pipeline.options import TuneThresholdsOptions


@command(TuneThresholdsOptions)
def tune_thresholds(o: TuneThresholdsOptions, typed: Typed) -> None:
    """Search MixKVQ's thresholds: quality against stored bits, the best under a limit; write bundle and plot."""
    from kvcal.commands.tune_thresholds import run_tune_thresholds

    result = run_tune_thresholds(o, note, typed)
    if o.json:
        print_json(result)
        return
    print_table(["what", "value"], [[name, value] for name, value in result.items() if name != "front"])
    if "front" in result:
        names = ("trial", "tau_low", "tau_high", "quality", "bits")
        rows = [[f"{row[name]:.6g}" for name in names] for row in result["front"]]
        print_table(["trial", "tau_low", "tau_high", "quality", "bits/value"], rows, title="Pareto front")
    print_next("eval", result["bundle"], "--model", o.model)
