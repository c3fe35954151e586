"""`kvcal tune-thresholds`."""

from __future__ import annotations

from kvcal.cli.output import line, note, print_facts, print_json, print_next, print_rows
from kvcal.cli.signature import Typed, command
from kvcal.pipeline.options import TuneThresholdsOptions


@command(TuneThresholdsOptions, spread=True)
def tune_thresholds(o: TuneThresholdsOptions, typed: Typed) -> None:
    """Search MixKVQ's thresholds: quality against stored bits, the best under a limit; write bundle and plot."""
    from kvcal.commands.tune_thresholds import run_tune_thresholds

    result = run_tune_thresholds(o, note, typed)
    if o.json:
        print_json(result)
        return
    print_facts({name: value for name, value in result.items() if name != "front"}, wide=o.wide)
    if "front" in result:
        line()
        columns = ["trial", "tau_low", "tau_high", "quality", "bits"]
        print_rows(columns, result["front"], title="Pareto front", wide=o.wide)
    print_next("eval", result["bundle"], "--model", o.model)
