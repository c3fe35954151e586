"""`kvcal fit-norms`."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import torch

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.presets import INNERQ_KEYS, INNERQ_VALUES
from kvcal_artifacts.scheme import Scheme

from ..methods.innerq import InnerQ
from ..methods.registry import no_factors
from ..models import names
from ..pipeline.options import FitNormsOptions
from ..report.timing import command_start
from .calibration import prepare, written
from .common import Say, output_for, refuse_idle


def innerq_method(o: FitNormsOptions) -> InnerQ:
    """--factors by default as far as the codec of keys has a use for them."""
    if o.variant not in INNERQ_VALUES:
        raise UsageError(f"--variant {o.variant}: allowed are {', '.join(INNERQ_VALUES)}")
    key = INNERQ_KEYS if o.keys is None else o.keys
    value = INNERQ_VALUES[o.variant] if o.values is None else o.values
    usual = "none" if no_factors(key) else "channel"
    return InnerQ(
        key=key,
        value=value,
        factors=usual if o.factors is None else o.factors,
        exponent=o.exponent,
        powers_of_two=o.powers_of_two,
        search=o.search,
        per_layer=tuple(o.per_layer or ()),
        sink=o.sink,
        recent=o.recent,
        block=o.block,
    )


def run_fit_norms(o: FitNormsOptions, say: Say, typed: Collection[str] = ()) -> dict[str, Any]:
    """What was written, and a row a layer with outliers and errors.

    typed: names of the options that somebody gave; UsageError for one that nothing takes.
    """
    started = command_start()
    method = innerq_method(o)
    if method.factors == "none":
        refuse_idle(typed, ("exponent", "powers_of_two"), "factors", "give --factors channel or pair, or leave it out")
    if o.values is not None:
        refuse_idle(typed, ("variant",), "values without a codec of their own", "leave out it or --values")
    source = names.resolve(o.model, o.revision)
    output = output_for(o, source, f"{method.name}-{o.variant}")
    calibration = prepare(o, source, output, say)
    result = calibration.fit(method, output)
    scheme, metrics, device = result.bundle.scheme, result.bundle.metrics, calibration.opened.device
    rows = layer_rows(scheme, result.layer_metrics)
    worst = max((row for row in rows if "key_outlier_ratio" in row), key=lambda row: row["key_outlier_ratio"])
    return {
        **written(result),
        "factor_bytes": sum(factor.nbytes for factor in factors_in(scheme)),
        "largest_key_outlier": worst["key_outlier_ratio"],
        "largest_key_outlier_layer": worst["layer"],
        **{
            name: metrics.get(name)
            for name in (
                "key_relative_error",
                "value_relative_error",
                "logit_error",
                "logit_error_plain",
                "value_symmetric_share",
            )
        },
        **calibration.counts(),
        "resumed_layers": result.resumed_layers,
        "seconds": round(time.monotonic() - started, 1),
        "phases": result.seconds,
        "peak_device_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "layers": rows,
    }


def factors_in(scheme: Scheme) -> list[torch.Tensor]:
    """Factors of key channels (H, D) of the layers that have some."""
    keys = [pair.key for pair in scheme.layers if pair is not None]
    return [key.factor for key in keys if key.factor is not None]


def layer_rows(scheme: Scheme, metrics: list[dict[str, float]]) -> list[dict[str, Any]]:
    """One a layer: its metrics, and the range of its factors."""
    rows = []
    for index, (pair, measured) in enumerate(zip(scheme.layers, metrics, strict=True)):
        row: dict[str, Any] = {"layer": index, **measured}
        if pair is not None and pair.key.factor is not None:
            factor = pair.key.factor.float()
            row |= {"factor_min": round(float(factor.min()), 4), "factor_max": round(float(factor.max()), 4)}
        rows.append(row)
    return rows
