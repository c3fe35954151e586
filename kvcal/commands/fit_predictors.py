"""`kvcal fit-predictors`."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import cast

import torch

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import FRAMES, Frame

from ..methods.aqua_kv import AquaKV
from ..models import names
from ..pipeline.options import FitPredictorsOptions
from ..report.timing import command_start
from .calibration import prepare, written
from .common import Say, output_for, refuse_idle

PREDICTS = ("predictor", "rank", "ridge", "quantiser_agnostic", "mlp_epochs")  # options of predictors
SOLVED = ("linear", "reduced-rank", "linear-4bit")  # kinds of them that ridge regression gives


def _names(text: str) -> tuple[str, ...]:
    """ "v1,k0" -> ("v1", "k0"); "none" -> ()."""
    return () if text.strip().lower() in ("", "none") else tuple(part.strip() for part in text.split(","))


def aqua_method(o: FitPredictorsOptions) -> AquaKV:
    return AquaKV(
        backbone=o.backbone,
        first_layer=o.first_layer,
        keys=o.keys,
        values=o.values,
        per_layer=tuple(o.per_layer or ()),
        predictor=o.predictor,
        rank=o.rank,
        key_inputs=_names(o.key_inputs),
        value_inputs=_names(o.value_inputs),
        rope=cast(Frame, o.frame),
        ridge=o.ridge,
        quantiser_agnostic=o.quantiser_agnostic,
        sink=o.sink,
        recent=o.recent,
        block=o.block,
        mlp_epochs=o.mlp_epochs,
    )


def check_taken(method: AquaKV, typed: Collection[str]) -> None:
    """Raise UsageError for the first option (`typed`) that the method does not use."""
    if not (method.key_inputs or method.value_inputs):
        refuse_idle(typed, PREDICTS, "predictors", "give --key-inputs or --value-inputs, or leave it out")
    if method.predictor != "reduced-rank":
        refuse_idle(typed, ("rank",), "predictors of reduced rank", "give --predictor reduced-rank, or leave it out")
    if not method.predictor.startswith("mlp"):
        refuse_idle(typed, ("mlp_epochs",), "MLP predictors", "give --predictor mlp or mlp-no-norm, or leave it out")
    if method.predictor not in SOLVED:
        instead = f"give --predictor {', '.join(SOLVED[:-1])} or {SOLVED[-1]}, or leave it out"
        refuse_idle(typed, ("ridge",), "predictors by least squares", instead)
    if method.keys and method.values:
        refuse_idle(
            typed,
            ("backbone",),
            "keys or values without a codec of their own",
            "leave out it, or one of --keys and --values",
        )


def run_fit_predictors(o: FitPredictorsOptions, say: Say, typed: Collection[str] = ()) -> dict[str, object]:
    """What was written and how good it is.

    typed: names of the options that somebody gave; UsageError for one that nothing takes.
    """
    started = command_start()
    method = aqua_method(o)
    check_taken(method, typed)
    if o.frame not in FRAMES:
        raise UsageError(f"--frame {o.frame}: allowed are {', '.join(FRAMES)}")
    source = names.resolve(o.model, o.revision)
    output = output_for(o, source, method.name)
    calibration = prepare(o, source, output, say)
    result = calibration.fit(method, output)
    metrics, device = result.bundle.metrics, calibration.opened.device
    return {
        **written(result),
        "predictor_bytes": result.bundle.scheme.resident_bytes(),
        "key_explained_variance": metrics.get("key_explained_variance"),
        "value_explained_variance": metrics.get("value_explained_variance"),
        "key_relative_error": metrics.get("key_relative_error"),
        "value_relative_error": metrics.get("value_relative_error"),
        **calibration.counts(),
        "resumed_layers": result.resumed_layers,
        "seconds": round(time.monotonic() - started, 1),
        "phases": result.seconds,
        "peak_device_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "layers": result.layer_metrics,
    }
