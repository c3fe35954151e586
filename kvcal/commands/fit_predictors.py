"""`kvcal fit-predictors`."""

from __future__ import annotations

import time
from typing import Any

import torch

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import FRAMES

from .. import models
from ..fit import FitOptions, fit
from ..methods.aqua_kv import AquaKV
from ..workbench import open_for_fit
from .common import Say, calibration_windows, check_context, output_for, text_for


def _names(text: str) -> tuple[str, ...]:
    """ "v1,k0" -> ("v1", "k0"); "none" -> ()."""
    return () if text.strip().lower() in ("", "none") else tuple(part.strip() for part in text.split(","))


def aqua_method(o: dict[str, Any]) -> AquaKV:
    return AquaKV(
        backbone=o["backbone"],
        first_layer=o["first_layer"],
        keys=o["keys"],
        values=o["values"],
        per_layer=tuple(o["per_layer"] or ()),
        predictor=o["predictor"],
        rank=o["rank"],
        key_inputs=_names(o["key_inputs"]),
        value_inputs=_names(o["value_inputs"]),
        rope=o["frame"],
        ridge=o["ridge"],
        quantiser_agnostic=o["quantiser_agnostic"],
        sink=o["sink"],
        recent=o["recent"],
        block=o["block"],
        mlp_epochs=o["mlp_epochs"],
    )


def run_fit_predictors(o: dict[str, Any], say: Say) -> dict[str, Any]:
    """Options by name, as the command line gives them -> what was written and how good it is."""
    started = time.monotonic()
    method = aqua_method(o)
    if o["spill"] not in ("device", "cpu", "disk"):
        raise UsageError(f"--spill {o['spill']}: allowed are device, cpu and disk")
    if o["frame"] not in FRAMES:
        raise UsageError(f"--frame {o['frame']}: allowed are {', '.join(FRAMES)}")
    source = models.resolve(o["model"], o["revision"])
    text_source = text_for(o, source, "calibration")
    say(f"text: {text_source}")
    output = output_for(o, source, method.name)
    opened = open_for_fit(
        o["model"], o["revision"], dtype=o["dtype"], device=o["device"], layerwise=o["layerwise"],
        random_weights=o["random_weights"], seed=o["seed"],
    )  # fmt: skip
    text = calibration_windows(o, source, opened.tokenizer, text_source)
    check_context(source, int(text.train.shape[1]), say)
    result = fit(
        method, opened.source, text, output, model_record=opened.record, revision=opened.revision,
        device=opened.device, seed=o["seed"], say=say,
        options=FitOptions(o["batch"], o["spill"], o["spill_dir"], o["resume"]),
    )  # fmt: skip
    scheme, metrics = result.bundle.scheme, result.bundle.metrics
    return {
        "bundle": str(result.path),
        "sha256": result.sha256,
        "bytes": result.path.stat().st_size,
        "bits_per_value": round(scheme.bits_per_value(), 4),
        "predictor_bytes": scheme.resident_bytes(),
        "key_explained_variance": metrics.get("key_explained_variance"),
        "value_explained_variance": metrics.get("value_explained_variance"),
        "key_relative_error": metrics.get("key_relative_error"),
        "value_relative_error": metrics.get("value_relative_error"),
        "train_windows": len(text.train),
        "holdout_windows": len(text.holdout),
        "length": int(text.train.shape[1]),
        "resumed_layers": result.resumed_layers,
        "seconds": round(time.monotonic() - started, 1),
        "phases": result.seconds,
        "peak_device_bytes": torch.cuda.max_memory_allocated(opened.device) if opened.device.type == "cuda" else None,
        "layers": result.layer_metrics,
    }
