"""`kvcal bench`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kvcal_artifacts.files import write_atomically
from kvcal_kernels.device import on

from ..bench.rows import KEY, SETTINGS, compared, environment_of, read_earlier, remarks, to_csv
from ..bench.target import target
from ..calibrate.checkpoint import CommandCheckpoint
from ..report.checkout import commit
from ..report.drawn import machine_and_date
from ..report.plots import plot_bench
from ..report.version import __version__
from .bench_options import GROUP_MODEL, MODEL, check_files, check_memory, check_numbers, check_taken, resolve_operations
from .bench_projected import projected
from .common import Say
from .options import BenchOptions


def run_bench(o: BenchOptions, say: Say, show: Callable[[dict[str, Any]], None], typed: Collection[str] = ()) -> None:
    """Measure, or project where the device is not this machine; show rows, and how they compare with an earlier file's,
    then write the files asked for. What was measured is kept until all of that is out.

    show: prints the result. typed: names of the options that somebody gave; UsageError for one that no row takes.
    """
    check_numbers(o)
    check_files(o)
    ran_from = commit()  # now: the next commit may come while this runs
    earlier = read_earlier(o.compare) if o.compare is not None else None
    where = target(o.device)
    operations = resolve_operations(o.operation, where)
    check_taken(o, where, operations, typed)
    check_memory(o, where, operations)
    model = o.model
    if model is None:
        model = next((GROUP_MODEL[name] for name in o.operation or () if name in GROUP_MODEL), MODEL)
    work: CommandCheckpoint | None = None
    if where.device is None:
        result = projected(o, where, model, operations)
    else:
        from .bench_measured import measured_rows

        with on(where.device):  # the current one for all that is measured: CUDA's events and streams are of that
            result, work = measured_rows(o, where, model, operations, say)
    rows = [row.as_dict() for row in result.pop("rows")]
    comparison = None if earlier is None else compared(rows, earlier.rows)
    result = {
        "version": __version__,
        "commit": ran_from,
        "device": where.name,
        "projected": where.device is None,
        **result,
        "rows": rows,
        "compared": comparison,
    }
    if earlier is not None and o.compare is not None:
        if not comparison:
            say(_nothing_common(o.compare, earlier.rows, rows))
        for line in remarks(rows, environment_of(result), earlier):
            say(f"--compare {o.compare}: {line}")
    with nullcontext() if work is None else work.until_out():
        _put_out(o, result, show)


def _put_out(o: BenchOptions, result: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> None:
    """The table first: of all that is asked for it is the least to fail. The files even where it does."""
    try:
        show(result)
    finally:
        if o.csv is not None:
            write_atomically(o.csv, to_csv(result["rows"]).encode(), "--csv")
        if o.plot is not None:
            plot_bench(result["rows"], _title(result), o.plot)


def _title(result: dict[str, Any]) -> str:
    """A plot's title: models, machine, date, and whether the times are projected."""
    models = ", ".join(sorted({str(row["model"]) for row in result["rows"] if row["model"]}))
    projected = "projected for " if result["projected"] else ""
    return f"{models or 'kernels'}; {projected}{machine_and_date(result['device'])}"


def _nothing_common(path: Path, earlier: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """Names what must be alike, and the devices, in which files differ most often."""
    then, this = (", ".join(sorted({str(row["device"]) for row in every})) or "no device" for every in (earlier, now))
    return (
        f"--compare {path}: no row in common, nothing is compared: its rows are of {then}, these of {this}; compared "
        "are rows "
        f"that agree in {', '.join((*KEY, *SETTINGS))}"
    )
