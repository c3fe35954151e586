"""`kvcal measure-subspaces`."""

from __future__ import annotations

from kvcal.cli.output import line, note, print_facts, print_json, print_next, print_rows, print_table
from kvcal.cli.signature import Typed, command
from kvcal.pipeline.options import MeasureSubspacesOptions

# root mean square in nats, where `kvcal compare` has it relative to the scores
NATS = {"logit_error": "logit error, nats", "logit_error_kivi": "logit error of KIVI, nats"}


@command(MeasureSubspacesOptions, spread=True)
def measure_subspaces(o: MeasureSubspacesOptions, typed: Typed) -> None:
    """Measure the subspaces that queries lie in, and write a bundle of SQuat that uses them."""
    from kvcal.commands.measure_subspaces import SOURCES, run_measure_subspaces

    result = run_measure_subspaces(o, note, typed)
    if o.json:
        print_json(result)
        return
    tables = ("layers", "deviation", "search", "phases")
    print_facts({name: value for name, value in result.items() if name not in tables}, names=NATS, wide=o.wide)
    line()
    deviation = result["deviation"]
    rows = zip(deviation["ranks"], *deviation["mean"].values(), strict=True)
    columns = ["rank", *(SOURCES[source] for source in deviation["mean"])]
    cells = [[rank, *(f"{value:.4f}" for value in values)] for rank, *values in rows]
    print_table(columns, cells, title="deviation of queries", wide=o.wide)
    if result["search"]:
        line()
        columns = ["rank", "strength", "logit_error", "layers"]
        print_rows(columns, result["search"], names=NATS, title="search", wide=o.wide)
    print_next("eval", result["bundle"], "--model", o.model)
