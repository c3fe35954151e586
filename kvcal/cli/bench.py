"""`kvcal bench` and `kvcal doctor`."""

from __future__ import annotations

from typing import Any

from kvcal.cli.output import line, note, on_stdout, print_json, print_open, print_table, wrapped
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import BenchOptions
from kvcal.pipeline.spec import Options


@command(BenchOptions)
def bench(o: BenchOptions, typed: Typed) -> None:
    """Measure kernels and generation of any scheme on random data; project them for devices that are not here.

    After a kill the same command goes on behind the last batch and length of kernels, or scheme of a whole model, that
    it measured.
    """
    from kvcal.commands.bench import run_bench

    run_bench(o, note, print_json if o.json else lambda result: _print_bench(result, o.wide), typed)
    if (files := [path for path in (o.csv, o.plot) if path is not None]) and not o.json:
        print_open(*files)


def _print_bench(result: dict[str, Any], wide: bool) -> None:
    from kvcal.report.bench import rates, tables

    if result.get("why_projected"):
        note("projected: " + "; ".join(filter(None, (result[k] for k in ("why_projected", "paper_device")))))
    with on_stdout():
        if result.get("assumed"):
            wrapped(f"projected: {result['assumed']}", wide=wide)
        for rate in rates(result):
            wrapped(rate, wide=wide)
        for table in tables(result, wide):
            wrapped(table.title, wide=wide)
            print_table(table.columns, table.rows, keys=table.keys, wide=wide)
            line()


@command(Options)
def doctor(o: Options, typed: Typed) -> None:
    """What this machine has, and which kernels would run on it, or why not."""
    from kvcal.commands.doctor import run_doctor

    facts = run_doctor()
    if o.json:
        print_json(facts)
        return
    for name, value in facts["machine"].items():
        wrapped(f"{name}: {value if value is not None else 'none'}", wide=o.wide)
    for row in facts["kernels"]:
        wrapped(f"kernel {row['kernel']}: {'runs' if row['runs'] else 'does not run'}: {row['why']}", wide=o.wide)
    checked = facts["preflight"]
    wrapped(f"kernels checked on first use: {len(checked['verdicts'])} in {checked['file']}", wide=o.wide)
    for name, why in checked["verdicts"].items():
        wrapped(f"  {'passes' if why is None else f'fails, {why}'}: {name}", indent="    ", wide=o.wide)
    if any(checked["verdicts"].values()):
        line("  to have those that fail tried again delete that file")
