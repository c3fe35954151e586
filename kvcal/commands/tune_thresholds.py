"""`kvcal tune-thresholds`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from kvcal_artifacts.bundle import SUFFIX
from kvcal_artifacts.errors import UsageError

from ..bundles.record_checks import check_task, tasks_of
from ..calibrate.needs import one_window
from ..capture.ranks import current
from ..methods.mixkvq import MixKVQ
from ..models import names
from ..models.weights import causal_lm
from ..pipeline.options import TuneBitsOptions, TuneThresholdsOptions
from ..report.drawn import machine_and_date
from ..report.extras import require
from ..report.timing import command_start
from ..search.thresholds import HIGH, LOW, AttentionError, Job, Objective, Perplexity, Settings, Tuned, tune
from .calibration import prepare, refuse_ranks
from .common import Say, machine, output_for, refuse_idle, required_tokenizer
from .workbench import Opened

Searched = TypeVar("Searched", TuneBitsOptions, TuneThresholdsOptions)

WINDOWS, HOLDOUT = 12, 4  # the search needs few: two numbers are fitted
ANSWERED = ("tasks_path", "limit", "metric")
SEARCHED = ("trials", "max_bits", "objective", "step", *ANSWERED, "storage", "heartbeat", "plot")
DEFAULT_TASK = "gsm8k"  # the paper's


def _span(option: str, text: str | None, default: tuple[float, float]) -> tuple[float, float]:
    """ "0.5,8" -> (0.5, 8.0); "2" -> (2.0, 2.0)."""
    if text is None:
        return default
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise UsageError(f"{option} {text}: needs a range LOWEST,HIGHEST, or one number")
    return numbers[0], numbers[-1]


def search_settings(o: TuneThresholdsOptions) -> Settings:
    if o.raw_salience and (o.tau_low is None or o.tau_high is None) and o.full is None:
        raise UsageError("--raw-salience: thresholds then have the model's own scale; give --tau-low and --tau-high")
    low, high = _span("--tau-low", o.tau_low, LOW), _span("--tau-high", o.tau_high, HIGH)
    return Settings(o.trials, o.seed, o.max_bits, low, high)


def mixkvq_method(o: TuneThresholdsOptions) -> MixKVQ:
    return MixKVQ(
        group=o.group,
        round_up=o.round_up,
        importance=o.importance,
        normalise="none" if o.raw_salience else "median",
        full=o.full,
        four=o.four,
        raw=o.raw_dtype,
        value_bits=o.value_bits,
        sink=o.sink,
        recent=o.recent,
        block=o.block,
    )


def searches(o: TuneThresholdsOptions) -> bool:
    """Whether thresholds must be searched: neither they nor the sizes of tiers are on the command line."""
    return o.full is None and not search_settings(o).fixed


def check_taken(o: TuneThresholdsOptions, typed: Collection[str]) -> None:
    """Raise UsageError for the first option (`typed`) that nothing takes, before an objective is chosen."""
    if o.full is not None:
        refuse_idle(
            typed,
            ("tau_low", "tau_high", "raw_salience"),
            "tiers by thresholds",
            "--full and --four give their sizes; leave out these, or it",
        )
    if not searches(o):
        options = "--full and --four" if o.full is not None else "one number for --tau-low and one for --tau-high"
        refuse_idle(typed, SEARCHED, "a search", f"{options} leave nothing to search; leave it out")
    if o.storage is None:
        refuse_idle(typed, ("heartbeat",), "a storage that workers share", "give --storage, or leave it out")


def objective_name(o: TuneThresholdsOptions, source: names.ModelSource) -> str:
    """attention, perplexity or task:NAMES; random weights can answer no task, and where nothing is searched none is
    asked.
    """
    name = str(o.objective)
    if name == "auto":
        embedded = source.kind == "embedded" or o.random_weights or not searches(o)
        return "attention" if embedded else f"task:{DEFAULT_TASK}"
    valid = name in ("attention", "perplexity") or (name.startswith("task:") and name[5:].strip(", "))
    if not valid:
        raise UsageError(f"--objective {name}: allowed are auto, attention, perplexity and task:NAME[,NAME]")
    for task in tasks_of({"objective": name}):
        try:
            check_task(task)
        except ValueError as error:
            raise UsageError(f"--objective {name}: {error}") from error
    return name


def _objective(
    o: TuneThresholdsOptions, name: str, method: MixKVQ, opened: Opened, text: Any
) -> Callable[[], Objective]:
    model = causal_lm(opened.source.model)
    if name == "attention":
        return lambda: AttentionError(method, model, text.train, opened.device, o.batch, o.spill, current())
    if name == "perplexity":
        return lambda: Perplexity(model, text.train, o.step, o.batch, current())
    from ..evaluate.tasks import TaskScore, check_installed

    check_installed()
    tasks = tasks_of({"objective": name})
    tokenizer = required_tokenizer(opened.tokenizer)
    return lambda: TaskScore(model, tokenizer, tasks, o.tasks_path, o.limit, o.metric, o.batch or 1)


def run_tune_thresholds(o: TuneThresholdsOptions, say: Say, typed: Collection[str] = ()) -> dict[str, Any]:
    """The result of the search, and what was written.

    typed: names of the options that somebody gave; UsageError for one that nothing takes.
    """
    started = command_start()
    settings, method = search_settings(o), mixkvq_method(o)
    if o.spill not in ("device", "cpu"):
        raise UsageError(f"--spill {o.spill}: allowed are device and cpu")
    check_taken(o, typed)
    source = names.resolve(o.model, o.revision)
    name = objective_name(o, source)
    if name.startswith("task:"):
        refuse_ranks(f"--objective {name}", "give --objective attention or perplexity, or start it without torchrun")
        from ..evaluate.tasks import check_installed

        check_installed()  # before a model is loaded
    else:
        refuse_idle(typed, ANSWERED, "an objective of tasks", "give --objective task:NAME, or leave it out")
    if name != "perplexity":
        refuse_idle(typed, ("step",), "an objective of perplexity", "give --objective perplexity, or leave it out")
    if searches(o):
        for package in ("optuna", "matplotlib"):
            require(package, "a search for thresholds", "give one number for --tau-low and one for --tau-high")
        say(f"objective: {name}")
    output = output_for(o, source, method.name)
    if o.plot is not None:
        from ..report.plots import check_plot

        check_plot(o.plot)
    of = prepare(with_windows(o), source, output, say)
    opened, text = of.opened, of.text
    if searches(o) and not name.startswith("task:") and len(text.train) == 1:
        say(one_window("thresholds"))
    job = Job(
        causal_lm(opened.source.model),
        text,
        output,
        o.plot or _plot_path(output),
        opened.device,
        opened.record,
        opened.revision,
        of.options,
        say,
        f"{source.public}, {text.source}; {machine_and_date(machine(opened.device))}",
    )
    tuned = tune(method, job, settings, _objective(o, name, method, opened, text), o.storage, o.heartbeat)
    return _summary(tuned, job, name) | {"seconds": round(time.monotonic() - started, 1)}


def with_windows(o: Searched) -> Searched:
    """The options with numbers of windows where the command line has none."""
    return replace(o, windows=o.windows or WINDOWS, holdout=o.holdout or (None if o.windows else HOLDOUT))


def _plot_path(output: Path) -> Path:
    name = output.name.removesuffix(SUFFIX).removesuffix(".safetensors")
    return output.with_name(f"{name}.front.png")


def _summary(tuned: Tuned, job: Job, objective: str) -> dict[str, Any]:
    result, metrics = tuned.result, tuned.result.bundle.metrics
    summary: dict[str, Any] = {
        "bundle": str(result.path),
        "sha256": result.sha256,
        "bytes": result.path.stat().st_size,
        "tau_low": tuned.method.tau_low,
        "tau_high": tuned.method.tau_high,
        "expected_bits_per_value": round(result.bundle.scheme.bits_per_value(), 4),
        "full_channels": metrics["full_channels"],
        "four_bit_channels": metrics["four_bit_channels"],
        "output_error": metrics.get("output_error"),
        "key_relative_error": metrics.get("key_relative_error"),
    }
    if tuned.points is not None and tuned.chosen is not None:
        search, point = metrics["search"], tuned.points.points[tuned.chosen]
        summary |= {
            "plot": str(job.plot),
            "objective": objective,
            "quality": point.quality,
            "bits_per_value": point.cost,
            "trials": len(tuned.points.points),
            "front": [search["trials"][number] | {"trial": number} for number in tuned.front],
            "chosen": tuned.chosen,
            "order": result.bundle.provenance["search"]["order"],
        }
    return summary
