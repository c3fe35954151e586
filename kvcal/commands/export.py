"""`kvcal export`: calibrated scales of 8-bit caches for servers without our code."""

from __future__ import annotations

import time
from typing import Any

from ..calibrate.kv_scales import ScaleSettings, kv_scales, span
from ..models import names
from ..models.folding import check_new_folder, plain_fields, write_with_tensors
from .common import Options, Say, calibration_windows, check_column, known, text_for, tokenizer_for
from .workbench import open_given

WINDOWS, LENGTH = 16, 2048


def run_export(o: Options, say: Say) -> dict[str, Any]:
    """A new checkpoint: the model's weights, `k_scale` and `v_scale` of each layer, and config.json that names them."""
    started = time.monotonic()
    settings = ScaleSettings(o["to"], o["per_head"])
    source = names.resolve(o["model"], o["revision"])
    check_new_folder(o["output"])
    plain_fields(source)  # refuses a quantised model before any work
    origin = text_for(o, source, "calibration")
    check_column(o["column"], origin)
    say(f"text: {origin}")
    counts = {"windows": o["windows"] or WINDOWS, "length": o["length"] or LENGTH, "holdout": 0}
    tokenizer = known(tokenizer_for(o, source, origin))
    text = calibration_windows(o | counts, source, tokenizer, origin, say)
    loaded = open_given(o)
    scales = kv_scales(loaded.model, text.train, settings, o["batch"])
    write_with_tensors(source, o["output"], scales, {"quantization_config": settings.config})
    sizes = span(scales)
    return {
        "model": str(o["output"]),
        "to": settings.to,
        "strategy": settings.config["kv_cache_scheme"]["strategy"],
        "scales": len(scales),
        "k_scale": sizes["k"],
        "v_scale": sizes["v"],
        "windows": len(text.train),
        "length": text.length,
        "seconds": round(time.monotonic() - started, 1),
    }
