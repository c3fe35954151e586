"""`kvcal fit-norms`."""

from __future__ import annotations

import time
from typing import Any

import torch

from kvcal_artifacts.codecs import Scaled
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import Scheme

from .. import models
from ..fit import FitOptions, fit
from ..methods.backbones import INNERQ_KEYS, INNERQ_VALUES
from ..methods.innerq import InnerQ
from ..workbench import open_for_fit
from .common import Say, calibration_windows, check_context, output_for, text_for


def innerq_method(o: dict[str, Any]) -> InnerQ:
    if o["variant"] not in INNERQ_VALUES:
        raise UsageError(f"--variant {o['variant']}: allowed are {', '.join(INNERQ_VALUES)}")
    return InnerQ(
        key=o["keys"] or INNERQ_KEYS,
        value=o["values"] or INNERQ_VALUES[o["variant"]],
        factors=o["factors"],
        exponent=o["exponent"],
        powers_of_two=o["powers_of_two"],
        sink=o["sink"],
        recent=o["recent"],
        block=o["block"],
    )


def run_fit_norms(o: dict[str, Any], say: Say) -> dict[str, Any]:
    """Options by name, as the command line gives them -> what was written, and a row a layer with outliers and errors."""
    started = time.monotonic()
    method = innerq_method(o)
    source = models.resolve(o["model"], o["revision"])
    origin = text_for(o, source, "calibration")
    say(f"text: {origin}")
    output = output_for(o, source, f"{method.name}-{o['variant']}")
    opened = open_for_fit(
        o["model"], o["revision"], dtype=o["dtype"], device=o["device"], layerwise=o["layerwise"],
        random_weights=o["random_weights"], seed=o["seed"],
    )  # fmt: skip
    text = calibration_windows(o, source, opened.tokenizer, origin)
    check_context(source, int(text.train.shape[1]), say)
    result = fit(
        method, opened.source, text, output, model_record=opened.record, revision=opened.revision,
        device=opened.device, seed=o["seed"], say=say, options=FitOptions(o["batch"], resume=o["resume"]),
    )  # fmt: skip
    scheme, metrics = result.bundle.scheme, result.bundle.metrics
    rows = layer_rows(scheme, result.layer_metrics)
    worst = max(rows, key=lambda row: row["key_outlier_ratio"])
    return {
        "bundle": str(result.path),
        "sha256": result.sha256,
        "bytes": result.path.stat().st_size,
        "bits_per_value": round(scheme.bits_per_value(), 4),
        "factor_bytes": scheme.resident_bytes(),
        "largest_key_outlier": worst["key_outlier_ratio"],
        "largest_key_outlier_layer": worst["layer"],
        **{name: metrics.get(name) for name in (
            "key_relative_error", "value_relative_error", "logit_error", "logit_error_plain", "value_symmetric_share",
        )},
        "train_windows": len(text.train),
        "holdout_windows": len(text.holdout),
        "length": int(text.train.shape[1]),
        "resumed_layers": result.resumed_layers,
        "seconds": round(time.monotonic() - started, 1),
        "phases": result.seconds,
        "peak_device_bytes": torch.cuda.max_memory_allocated(opened.device) if opened.device.type == "cuda" else None,
        "layers": rows,
    }  # fmt: skip


def layer_rows(scheme: Scheme, metrics: list[dict[str, float]]) -> list[dict[str, Any]]:
    """One a layer: its metrics, and the range of its factors."""
    rows = []
    for index, (pair, measured) in enumerate(zip(scheme.layers, metrics, strict=True)):
        row: dict[str, Any] = {"layer": index, **measured}
        if pair is not None and isinstance(pair.key, Scaled) and pair.key.factor is not None:
            factor = pair.key.factor.float()
            row |= {"factor_min": round(float(factor.min()), 4), "factor_max": round(float(factor.max()), 4)}
        rows.append(row)
    return rows
