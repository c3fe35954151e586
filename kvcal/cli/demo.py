"""`kvcal demo`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcal.cli.evaluate import FULL
from kvcal.cli.output import line, note, print_json, print_rows, prose, wrapped
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import DemoOptions
from kvcal.report.quantities import size

if TYPE_CHECKING:
    from kvcal.commands.results import DemoRow


@command(DemoOptions)
def demo(o: DemoOptions, typed: Typed) -> None:
    """The whole way in a minute or two: calibrate the embedded model, write a bundle, load it, generate, compare."""
    from kvcal.commands.demo import run_demo

    result = run_demo(o.output, note)
    if o.json:
        print_json(result)
        return
    full, *_, ours = result["rows"]
    print_rows(
        ["cache", "bits_per_value", "nbytes", "smaller", "kl", "same"],
        [_row(row, full["nbytes"]) for row in result["rows"]],
        names={"same": "same next token"},
        title=f"tiny, {result['rows_of_text']} texts of {result['length']:,} tokens",
        wide=o.wide,
    )
    prose(f"\nText from the compressed cache, in a fresh process:\n{result['sample']}\n")
    wrapped(
        f"16-bit cache {size(full['nbytes'])} -> {size(ours['nbytes'])} with predictors; same next token in "
        f"{ours['same']} of {ours['of']}",
        wide=o.wide,
    )
    wrapped(f"bundle: {result['bundle']}", wide=o.wide)
    line(f"next: {result['next']}")


def _row(row: DemoRow, full: int) -> dict[str, object]:
    name, bits = (FULL, 16.0) if row["name"] == "full" else (row["name"], row["bits_per_value"])
    same = f"{row['same']}/{row['of']}"
    return row | {"cache": name, "bits_per_value": bits, "smaller": full / row["nbytes"], "same": same}
