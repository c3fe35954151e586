"""`kvcal report`."""

from __future__ import annotations

from kvcal.cli.output import note, print_facts, print_json, print_open
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import ReportOptions


@command(ReportOptions)
def report(o: ReportOptions, typed: Typed) -> None:
    """Write one HTML page, which needs no network: figures, quality against bits, KL by position, errors by layer and
    head, needles, tasks, memory against length, speed; and what bundles hold.
    """
    from kvcal.commands.report import run_report

    result = run_report(o, note)
    if o.json:
        print_json(result)
    else:
        print_facts(result, wide=o.wide)
        print_open(o.output)
