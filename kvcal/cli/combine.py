"""`kvcal combine`."""

from __future__ import annotations

from kvcal.cli.output import print_facts, print_json, print_next
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import CombineOptions


@command(CombineOptions)
def combine(o: CombineOptions, typed: Typed) -> None:
    """Make a bundle of one bundle's keys and another's values; refused with the reason where that cannot work."""
    from kvcal.commands.combine import run_combine

    result = run_combine(o.keys, o.values, o.output)
    if o.json:
        print_json(result)
    else:
        print_facts(result, wide=o.wide)
        print_next("inspect", result["bundle"])
