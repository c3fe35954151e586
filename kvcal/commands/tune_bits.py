"""`kvcal tune-bits`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kvcal_artifacts.errors import UsageError

from .. import models
from ..fit import FitOptions, fit
from ..methods.kvtuner import KVTuner
from ..workbench import default_output, open_for_fit
from .common import Say, calibration_windows, check_context, text_for
from .tune_thresholds import window_counts


def kvtuner_method(o: dict[str, Any]) -> KVTuner:
    try:
        choices = tuple(int(part) for part in str(o["bits"]).split(","))
    except ValueError as error:
        raise UsageError(f"--bits {o['bits']}: needs whole numbers, as in 2,4,8") from error
    return KVTuner(
        max_bits=o["max_bits"], choices=choices, group=o["group"], sink=o["sink"], recent=o["recent"], block=o["block"]
    )


def run_tune_bits(o: dict[str, Any], say: Say) -> dict[str, Any]:
    """Options by name, as the command line gives them -> what was chosen and written."""
    started = time.monotonic()
    method = kvtuner_method(o)
    if o["spill"] not in ("device", "cpu", "disk"):
        raise UsageError(f"--spill {o['spill']}: allowed are device, cpu and disk")
    source = models.resolve(o["model"], o["revision"])
    text_source = text_for(o, source, "calibration")
    say(f"text: {text_source}")
    output = Path(o["output"] or default_output(source, method.name))
    opened = open_for_fit(
        o["model"], o["revision"], dtype=o["dtype"], device=o["device"], layerwise=o["layerwise"],
        random_weights=o["random_weights"], seed=o["seed"],
    )  # fmt: skip
    text = calibration_windows(o | window_counts(o), source, opened.tokenizer, text_source)
    check_context(source, int(text.train.shape[1]), say)
    result = fit(
        method, opened.source, text, output, model_record=opened.record, revision=opened.revision,
        device=opened.device, seed=o["seed"], say=say,
        options=FitOptions(o["batch"], o["spill"], o["spill_dir"], o["resume"]),
    )  # fmt: skip
    rows = result.bundle.metrics["layers"]
    return {
        "bundle": str(result.path),
        "sha256": result.sha256,
        "bytes": result.path.stat().st_size,
        "bits_per_value": round(result.bundle.scheme.bits_per_value(), 4),
        "output_error": result.bundle.metrics["output_error"],
        "resumed_layers": result.resumed_layers,
        "seconds": round(time.monotonic() - started, 1),
        "layers": [
            {"layer": i, **{name: row[name] for name in ("key_bits", "value_bits", "output_error")}}
            for i, row in enumerate(rows)
        ],
    }
