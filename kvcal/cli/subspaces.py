"""`kvcal measure-subspaces`."""

from __future__ import annotations

from kvcal.cli.output import note, print_json, print_next, print_table
from kvcal.cli.signature import Typed, command
from kvcal.pipeline.options import MeasureSubspacesOptions


@command(MeasureSubspacesOptions)
def measure_subspaces(o: MeasureSubspacesOptions, typed: Typed) -> None:
    """Measure the subspaces that queries lie in, and write a bundle of SQuat that uses them."""
    from kvcal.commands.measure_subspaces import SOURCES, run_measure_subspaces

    result = run_measure_subspaces(o, note, typed)
    if o.json:
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
    print_next("eval", result["bundle"], "--model", o.model)
