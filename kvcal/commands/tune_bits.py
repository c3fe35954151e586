"""`kvcal tune-bits`."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from kvcal_artifacts.errors import UsageError

from ..methods.kvtuner import KVTuner
from ..models import names
from ..pipeline.options import TuneBitsOptions
from ..report.timing import command_start
from .calibration import prepare, written
from .common import Say, output_for
from .tune_kl import refuse_other, run_tune_kl
from .tune_thresholds import with_windows

OBJECTIVES = ("attention", "kl")


def kvtuner_method(o: TuneBitsOptions) -> KVTuner:
    try:
        choices = tuple(int(part) for part in str(o.bits).split(","))
    except ValueError as error:
        raise UsageError(f"--bits {o.bits}: needs whole numbers, as in 2,4,8") from error
    return KVTuner(max_bits=o.max_bits, choices=choices, group=o.group, sink=o.sink, recent=o.recent, block=o.block)


def run_tune_bits(o: TuneBitsOptions, say: Say, typed: Collection[str] = ()) -> dict[str, Any]:
    """What was chosen and written. typed: names of the options that somebody gave; UsageError for one of the other
    objective.
    """
    started = command_start()
    if o.objective not in OBJECTIVES:
        raise UsageError(f"--objective {o.objective}: allowed are {', '.join(OBJECTIVES)}")
    refuse_other(o, typed)
    if o.objective == "kl":
        return run_tune_kl(o, say)
    method = kvtuner_method(o)
    source = names.resolve(o.model, o.revision)
    output = output_for(o, source, method.name)
    result = prepare(with_windows(o), source, output, say).fit(method, output)
    rows = result.bundle.metrics["layers"]
    return {
        **written(result),
        "output_error": result.bundle.metrics["output_error"],
        "resumed_layers": result.resumed_layers,
        "seconds": round(time.monotonic() - started, 1),
        "layers": [
            {"layer": i, **{name: row[name] for name in ("key_bits", "value_bits", "output_error")}}
            for i, row in enumerate(rows)
            if row
        ],
    }
