"""`kvcal probe`."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, cast

from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.files import write_atomically
from kvcal_artifacts.scheme import FRAMES, Frame

from ..calibrate.checkpoint import CommandCheckpoint, check_partial
from ..calibrate.needs import few_tokens, probes_worse_than_none
from ..capture.scan import Capture, default_batch
from ..capture.spill import SpillStore
from ..evaluate.probe import Probe, Settings, measure, paper_probes, table
from ..models import configuration, names
from ..report.drawn import machine_and_date
from ..report.outputs import check_output, figures_first
from ..report.timing import PhaseTimer
from ..report.version import __version__
from ..search.comparison import Ledger, read_results
from .calibration import Calibration, prepare
from .common import Say, decided_by, machine, say_coverage
from .options import ProbeOptions

# Of the embedded model: half a minute; other models have their preset's, the paper's 256 and 32.
WINDOWS, HOLDOUT = 32, 8


def probe_settings(o: ProbeOptions) -> Settings:
    if o.frame not in FRAMES:
        raise UsageError(f"--frame {o.frame}: allowed are {', '.join(FRAMES)}")
    probes = tuple(Probe.parse(text) for text in o.probe or ()) or paper_probes()
    return Settings(probes, cast(Frame, o.frame), o.ridge, o.sink)


def check_reach(settings: Settings, layers: int) -> None:
    """UsageError for the first probe that exists in none of a model's layers."""
    for probe in settings.probes:
        if probe.reach >= layers:
            raise UsageError(
                f"--probe {probe.name}: reads {probe.reach} layers below, and the model has {layers} layers; "
                f"read at most {layers - 1} below"
            )


def run_probe(o: ProbeOptions, say: Say) -> dict[str, Any]:
    """A row a probe, with its explained variance in every layer."""
    started = time.monotonic()
    settings = probe_settings(o)
    if o.plot is not None:
        from ..report.plots import check_plot

        check_plot(o.plot)
    if o.csv is not None:
        check_output(o.csv, "--csv")
    if o.output is not None:
        check_output(o.output)
        check_partial(o.output)
        read_results(o.output, "probe")  # refused before any work, if it is none
    source = names.resolve(o.model, o.revision)
    if o.probe:  # those of the paper are of any model
        check_reach(settings, compressible(source))
    counted = o
    if source.kind == "embedded" and o.windows is None:
        counted = replace(o, windows=WINDOWS, holdout=o.holdout or HOLDOUT)
    of = prepare(counted, source, o.output, say)
    say_coverage(of.opened.source.model, say)
    width = configuration.geometry(source).kv_heads * configuration.geometry(source).head_dim
    tokens = len(of.text.train) * max(0, of.length - settings.first)
    for line in few_tokens({probe.name: len(probe.inputs) * width for probe in settings.probes}, tokens):
        say(line)
    everything = _everything(o, settings, of)
    record = everything | decided_by(
        o, next(of.opened.source.model.parameters()).dtype, of.opened.device, of.text.ids_sha256
    )
    work = CommandCheckpoint("probe", record, output=o.output, resume=of.options.resume, say=say)
    ledger = Ledger("probe", o.output, everything, work, of.options.resume)
    resumed = len(ledger.rows)
    if resumed:
        say(f"resuming: {resumed} layers are in {ledger.where}")
    timer = PhaseTimer(of.opened.device)
    _run(settings, of, ledger, timer)
    ledger.done(ledger.rows)
    layers = {row["layer"]: row["explained_variance"] for row in ledger.rows.values()}
    rows = table(settings, layers)
    scores = {probe.name: [layers[layer].get(probe.name) for layer in sorted(layers)] for probe in settings.probes}
    if (worse := probes_worse_than_none(scores)) is not None:
        say(worse)
    result = {
        **ledger.settings,
        "rows": rows,
        "layers": len(layers),
        "layer_numbers": sorted(layers),
        "resumed_layers": resumed,
        "seconds": round(time.monotonic() - started, 1),
        "phases": timer.split(),
    }
    unwritten: list[KVCalError] = []
    if o.csv is not None:
        with figures_first(unwritten):
            write_atomically(o.csv, as_csv(rows, sorted(layers)).encode(), "--csv")
    if o.plot is not None:
        from ..report.plots import plot_probes

        title = (
            f"{source.public}, {of.text.source}, keys {settings.frame}; {machine_and_date(machine(of.opened.device))}"
        )
        with figures_first(unwritten):
            plot_probes(rows, title, o.plot)
    files = {"output": o.output, "csv": o.csv, "plot": o.plot}
    return result | {name: str(path) for name, path in files.items() if path is not None} | {"unwritten": unwritten}


def _run(settings: Settings, of: Calibration, ledger: Ledger, timer: PhaseTimer) -> None:
    """The layers that the ledger lacks, each into it as soon as it is measured."""
    import torch

    opened, options = of.opened, of.options
    earlier = {int(layer): row["explained_variance"] for layer, row in ledger.rows.items()}
    ids = torch.cat([of.text.train, of.text.holdout])
    spilled: dict[str, Any] = {"device": opened.device, "spill_dir": options.spill_dir}
    with Capture(opened.source, ids, batch=options.batch, hidden=options.spill, timer=timer, **spilled) as capture:
        if len(earlier) < len(capture):
            measure(
                settings,
                capture,
                len(of.text.train),
                earlier,
                lambda layer, scores: ledger.add(str(layer), {"layer": layer, "explained_variance": scores}),
                stores=lambda shape: SpillStore(
                    shape, capture.dtype, where=options.spill, label="keys and values", **spilled
                ),
            )


def _everything(o: ProbeOptions, settings: Settings, of: Calibration) -> dict[str, Any]:
    """All that the figures depend on, as JSON has it."""
    fields = asdict(settings) | {"probes": [probe.name for probe in settings.probes], "first_token": settings.first}
    opened, text = of.opened, of.text
    return {
        "version": __version__,
        "model": opened.name.public,
        "revision": opened.revision,
        "random_weights": opened.random_weights,
        "dtype": str(opened.source.model.dtype).removeprefix("torch."),
        "device": opened.device.type,
        "batch": o.batch or default_batch(of.length, opened.device),
        "seed": o.seed,
        "text": text.source,
        "text_sha256": text.sha256,
        "ids_sha256": text.ids_sha256,
        **of.counts(),
        **fields,
    }


def compressible(source: names.ModelSource) -> int:
    """Layers that are probed: those that Transformers caches are not."""
    from kvcal_artifacts.hf import text_config, unsupported_layers

    config = text_config(configuration.geometry_config(source))
    return int(config.num_hidden_layers) - len(unsupported_layers(config))


def as_csv(rows: list[dict[str, Any]], numbers: Sequence[int]) -> str:
    """A line a probe and layer, then its means; what does not exist is left out. numbers: of the layers."""
    stream = io.StringIO()
    out = csv.writer(stream, lineterminator="\n")
    out.writerow(["target", "inputs", "layer", "explained_variance"])
    for row in rows:
        scores = [*zip(numbers, row["layers"], strict=True), ("mean", row["mean"]), ("mean_common", row["mean_common"])]
        out.writerows([row["target"], "+".join(row["inputs"]), layer, x] for layer, x in scores if x is not None)
    return stream.getvalue()
