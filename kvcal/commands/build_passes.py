"""The passes over models in which `kvcal build` makes its bundles, in this process or in several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from multiprocessing.queues import SimpleQueue
from typing import cast

import torch

from kvcal_artifacts.bundle import SUFFIX
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.shown import message

from ..calibrate.driver import fit_together
from ..calibrate.job import FitJob, FitOptions
from ..capture.spill import Where
from ..models.names import resolve
from ..models.spread import Spread
from ..pipeline.options import PresetOptions, TuneThresholdsOptions
from ..pipeline.shared_options import Selection
from ..report.progress import Items
from .build_plan import BuildPass, calibration_of, counted, method_of
from .calibration import is_layerwise, spill_dir
from .combine import run_combine
from .common import (
    Say,
    calibration_windows,
    check_context,
    other_text,
    other_windows,
    selection_of,
    text_for,
    tokenizer_for,
)
from .gpus import VISIBLE
from .preset import run_preset
from .tune_thresholds import run_tune_thresholds
from .workbench import Opened, open_for_fit

FOLLOW = 0.2  # seconds between a worker's looks at whether its parent is still there

Written = Callable[[str, str, int], None]  # name, sha256 and bytes of a bundle that is on disk


def run_work(work: BuildPass, say: Say, written: Written) -> None:
    """Build its bundles; `written` is called as soon as each is on disk."""
    if work.shared:
        _scan_shared(work, say, written)
        return
    [plan] = work.plans
    if plan.entry.parts:
        keys, values = (plan.path.with_name(f"{part}{SUFFIX}") for part in plan.entry.parts)
        result = run_combine(keys, values, plan.path)
    elif isinstance(o := plan.entry.options, PresetOptions):
        result = run_preset(replace(o, output=plan.path), say)
    else:
        assert isinstance(o, TuneThresholdsOptions)
        result = run_tune_thresholds(replace(o, output=plan.path), say)
    written(plan.entry.name, result["sha256"], result["bytes"])


def _scan_shared(work: BuildPass, say: Say, written: Written) -> None:
    """Where the settings of one are refused on the way, each has a separate pass, so that the others are built."""
    if len(work.plans) == 1:
        _scan(work, say, written)
        return
    try:
        _scan(work, say, written)
        return
    except UsageError as error:
        say(f"note: one pass for {len(work.plans)} bundles failed ({error}); each has its own now")
    refused: list[KVCalError] = []
    for plan in work.plans:
        alone = BuildPass((plan,), True)
        try:
            with _named(alone):
                _scan(alone, say, written)
        except UsageError as error:
            refused.append(error)
    if refused:
        raise refused[0]


def _scan(work: BuildPass, say: Say, written: Written) -> None:
    o = counted(calibration_of(work.plans[0]))
    source = resolve(o.model, o.revision)
    origin = text_for(o, source, "calibration")
    tokenizer = tokenizer_for(o, source, origin, other_text(o))
    text = calibration_windows(o, source, tokenizer, origin, say)
    check_context(source, text.length, say)
    other = other_windows(o, tokenizer, origin, len(text.train), text.length, say)
    opened = opened_model(
        o.model, o.revision, o.dtype, o.device, is_layerwise(o), o.random_weights, o.seed, o.device_map
    )
    jobs = [
        FitJob(
            method_of(one := calibration_of(plan), source),
            plan.path,
            o.seed,
            selection=selection_of(one) if isinstance(one, Selection) else None,
        )
        for plan in work.plans
    ]
    names = {plan.path: plan.entry.name for plan in work.plans}
    fit_together(
        jobs,
        opened.source,
        text,
        model_record=opened.record,
        revision=opened.revision,
        device=opened.device,
        say=say,
        other=other,
        options=FitOptions(o.batch, cast(Where, o.spill), spill_dir(o)),
        written=lambda job, result: written(names[job.output], result.sha256, job.output.stat().st_size),
    )


@lru_cache(maxsize=1)
def opened_model(
    name: str,
    revision: str | None,
    dtype: str,
    device: str,
    layerwise: bool,
    random_weights: bool,
    seed: int,
    device_map: str | None,
) -> Opened:
    """The model that was used last stays for the next work."""
    return open_for_fit(
        name,
        revision,
        dtype=dtype,
        device=device,
        layerwise=layerwise,
        random_weights=random_weights,
        seed=seed,
        spread=Spread.of(device_map, None, layerwise=layerwise),
    )


def _worker_start(parent: int, threads: int, gpus: SimpleQueue[str] | None) -> None:
    """Take as many threads as the parent has (they decide last bits on a CPU), and the next of the GPUs; lines instead
    of bars; ends with the parent.
    """
    if gpus is not None:
        os.environ[VISIBLE] = gpus.get()  # torch looks at it when CUDA is first used, which no import does
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C goes to all: one line is enough, the parent's
    torch.set_num_threads(threads)
    os.environ["TERM"] = "dumb"

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(FOLLOW)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _worker_run(work: BuildPass) -> list[tuple[str, str, int]]:
    done: list[tuple[str, str, int]] = []
    run_work(work, lambda line: print(message(line), file=sys.stderr), lambda *written: done.append(written))
    return done


def run_all(
    todo: Sequence[BuildPass], jobs: int, say: Say, written: Written, gpus: Sequence[str] | None = None
) -> None:
    """All works, combinations when everything else is there. gpus: what CUDA_VISIBLE_DEVICES is in each of so many
    processes. Raises the first error, as soon as the running ones are done, and says the others.
    """
    first = [work for work in todo if not work.plans[0].entry.parts]
    if (gpus is None and (jobs == 1 or len(first) < 2)) or not first:
        items = Items(say, len(todo))
        for work in todo:
            items.begin(work.label)
            with _named(work):
                run_work(work, say, written)
        return
    _run_in_processes(first, min(jobs if gpus is None else len(gpus), len(first)), say, written, gpus)
    run_all([work for work in todo if work.plans[0].entry.parts], 1, say, written)


def _run_in_processes(
    todo: Sequence[BuildPass], jobs: int, say: Say, written: Written, gpus: Sequence[str] | None
) -> None:
    context = multiprocessing.get_context("spawn")
    queue: SimpleQueue[str] = context.SimpleQueue()
    for gpu in gpus or ():
        queue.put(gpu)
    started_with = os.getpid(), torch.get_num_threads(), None if gpus is None else queue
    pool = ProcessPoolExecutor(jobs, context, _worker_start, started_with)
    running: dict[Future[list[tuple[str, str, int]]], BuildPass] = {}
    others = multiprocessing.active_children()
    try:
        for number, work in enumerate(todo, 1):
            say(f"{number}/{len(todo)} {work.label}")
            running[pool.submit(_worker_run, work)] = work
        _collect(running, say, written)
    except BaseException as error:
        for child in multiprocessing.active_children():
            if child not in others:
                child.terminate()  # an interrupted build does not wait for its workers: they have checkpoints
        if isinstance(error, BrokenProcessPool):
            fewer = "--jobs" if gpus is None else "--gpus"
            raise KVCalError(f"a worker process ended early, perhaps for lack of memory; take fewer {fewer}") from error
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _collect(running: dict[Future[list[tuple[str, str, int]]], BuildPass], say: Say, written: Written) -> None:
    """Wait until all passes are done. After an error nothing new is begun, and what runs may still end well; errors
    behind the first are said.
    """
    first: KVCalError | None = None
    while running:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            work = running.pop(future)
            if future.cancelled():
                continue
            try:
                with _named(work):
                    for done in future.result():
                        written(*done)
            except KVCalError as error:
                if first is not None:
                    say(str(error))
                first = first or error
                for other in running:
                    other.cancel()
    if first is not None:
        raise first


@contextmanager
def _named(work: BuildPass) -> Iterator[None]:
    try:
        yield
    except KVCalError as error:
        names = [plan.entry.name for plan in work.plans]
        if any(str(error).startswith(f"{name}: ") for name in names):
            raise
        raise type(error)(f"{', '.join(names)}: {error}") from error
