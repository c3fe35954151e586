"""`kvcal measure-subspaces`."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import Frame

from ..calibrate.job import FitResult
from ..methods.squat import DEVIATION_RANKS, SEARCH_RANKS, SEARCH_STRENGTHS, Squat, paper_settings, search_name
from ..models import configuration, names
from ..pipeline.options import MeasureSubspacesOptions
from ..report.drawn import machine_and_date
from ..report.timing import command_start
from .calibration import Calibration, prepare, written
from .common import Say, machine, output_for, refuse_idle

WINDOWS, HOLDOUT = 32, 8  # a Gram matrix of 64 channels settles within a few thousand queries
SOURCES = {"window": "same window", "prompt": "its prompt", "same_text": "same text", "other_text": "other text"}


def squat_method(o: MeasureSubspacesOptions, source: names.ModelSource) -> Squat:
    """The paper's settings for the model and task, where an option does not say otherwise."""
    model, dim = source.entry.name if source.entry else source.name, configuration.geometry(source).head_dim
    for name, count in (("rank", o.rank), ("channels", o.channels)):
        if count is not None and count > dim:
            raise UsageError(f"--{name} {count}: keys have {dim} channels a head; give at most {dim}")
    rank, strength, channels = paper_settings(o.settings, model, cast(Frame, o.frame))
    if o.normalise == "length":
        strength = 1.0  # the paper's 1e-3 times a thousand query vectors
    if o.settings == "lm-eval":
        channels = 0  # 64, half of the paper's head_dim
    searched = (SEARCH_RANKS, SEARCH_STRENGTHS.get(o.normalise, ())) if o.search else ((), ())
    return Squat(
        bits=o.bits,
        group=o.group,
        rank=rank if o.rank is None else o.rank,
        strength=strength if o.strength is None else o.strength,
        channels=channels if o.channels is None else o.channels,
        subspace=o.subspace,
        normalise=o.normalise,
        rope=cast(Frame, o.frame),
        queries=cast(Frame, o.queries),
        search_ranks=searched[0],
        search_strengths=searched[1],
        prompt=o.prompt_tokens,
        sink=o.sink,
        recent=o.recent,
        block=o.block,
    )


def run_measure_subspaces(o: MeasureSubspacesOptions, say: Say, typed: Collection[str] = ()) -> dict[str, Any]:
    """What was written and what was measured.

    typed: names of the options that somebody gave; UsageError for one that nothing takes.
    """
    started = command_start()
    if o.search and (o.rank is not None or o.strength is not None):
        raise UsageError("--search tries ranks and strengths of its own: leave --rank and --strength out")
    if None not in (o.rank, o.strength, o.channels):  # what --settings stands for
        refuse_idle(
            typed,
            ("settings",),
            "a rank, strength or number of channels that is not given",
            "leave out it or one of these",
        )
    source = names.resolve(o.model, o.revision)
    method = squat_method(o, source)
    if o.plot is not None:
        from ..report.plots import check_plot

        check_plot(o.plot)
    output = output_for(o, source, method.name)
    of = prepare(with_windows(o), source, output, say)
    result = of.fit(method, output)
    summary = _summary(method, result, of)
    if o.plot is not None:
        from ..report.plots import plot_deviation

        place = machine_and_date(machine(of.opened.device))
        title = f"{source.public}, {of.text.source}, queries {method.queries}; {place}"
        plot_deviation(summary["deviation"], SOURCES, title, o.plot)
        summary["plot"] = str(o.plot)
    return summary | {"seconds": round(time.monotonic() - started, 1)}


def with_windows(o: MeasureSubspacesOptions) -> MeasureSubspacesOptions:
    """The options with numbers of windows where the command line has none."""
    holdout = HOLDOUT if o.windows is None else None
    return replace(o, windows=o.windows or WINDOWS, holdout=o.holdout or holdout)


def _summary(method: Squat, result: FitResult, of: Calibration) -> dict[str, Any]:
    scheme, metrics = result.bundle.scheme, result.bundle.metrics
    return {
        **written(result),
        "subspace_bytes": scheme.resident_bytes(),
        "subspace": method.subspace,
        "key_relative_error": metrics.get("key_relative_error"),
        "value_relative_error": metrics.get("value_relative_error"),
        "logit_error": metrics.get("logit_error"),
        "logit_error_kivi": metrics.get("logit_error_kivi"),
        **of.counts(),
        "other_windows": 0 if of.other is None else len(of.other.train),
        "resumed_layers": result.resumed_layers,
        "phases": result.seconds,
        "deviation": deviation_table(metrics),
        "search": search_table(method, metrics),
        "layers": result.layer_metrics,
    }


def deviation_table(metrics: dict[str, Any]) -> dict[str, Any]:
    """Mean deviation by rank: {"ranks": [...], "mean": {source: [...]}, "layers": [{source: [...]}, ...]}."""
    ranks = [rank for rank in DEVIATION_RANKS if f"deviation_window_r{rank}" in metrics]

    def curves(row: dict[str, Any]) -> dict[str, list[float]]:
        return {
            source: [row[f"deviation_{source}_r{rank}"] for rank in ranks]
            for source in SOURCES
            if f"deviation_{source}_r{ranks[0]}" in row
        }

    return {"ranks": ranks, "mean": curves(metrics), "layers": [curves(row) for row in metrics["layers"] if row]}


def search_table(method: Squat, metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Every point of the grid: mean logit error over the layers, and how many of them took it."""
    if len(method.grid) == 1:
        return []
    chosen = [(row["rank"], row["strength"]) for row in metrics["layers"] if row]
    return [
        {"rank": r, "strength": s, "logit_error": metrics[search_name(r, s)], "layers": chosen.count((r, s))}
        for r, s in method.grid
    ]
