"""`kvcal export`: calibrated scales of 8-bit caches for servers without our code."""

from __future__ import annotations

import time

from ..calibrate.kv_scales import ScaleSettings, check_exportable, kv_scales, span
from ..models import configuration, names
from ..models.folding import check_new_folder, plain_fields, write_with_tensors
from ..pipeline.shared_options import CalibrationText
from .common import Say, calibration_windows, check_column, required_tokenizer, text_for, tokenizer_for
from .options import ExportOptions
from .workbench import open_model

WINDOWS, LENGTH = 16, 2048


def run_export(o: ExportOptions, say: Say) -> dict[str, object]:
    """A new checkpoint: the model's weights, `k_scale` and `v_scale` of each layer, and config.json that names them."""
    started = time.monotonic()
    settings = ScaleSettings(o.to, o.per_head)
    source = names.resolve(o.model, o.revision)
    check_new_folder(o.output)
    plain_fields(source)  # refuses a quantised model before any work
    check_exportable(configuration.load_config(source))
    run = CalibrationText(
        text=o.text,
        column=o.column,
        windows=o.windows or WINDOWS,
        holdout=0,  # a maximum over more text is nearer to the largest, and nothing is fitted that could be checked
        length=o.length or LENGTH,
        seed=o.seed,
        dtype=o.dtype,
        device=o.device,
    )
    origin = text_for(run, source, "calibration")
    check_column(o.column, origin)
    say(f"text: {origin}")
    tokenizer = required_tokenizer(tokenizer_for(run, source, origin))
    text = calibration_windows(run, source, tokenizer, origin, say)
    loaded = open_model(o.model, o.revision, dtype=o.dtype, device=o.device, random_weights=False, seed=o.seed)
    scales = kv_scales(loaded.model, text.train, settings, o.batch)
    write_with_tensors(source, o.output, scales, {"quantization_config": settings.config})
    sizes = span(scales)
    return {
        "model": str(o.output),
        "to": settings.to,
        "strategy": settings.strategy,
        "scales": len(scales),
        "k_scale": sizes["k"],
        "v_scale": sizes["v"],
        "windows": len(text.train),
        "length": text.length,
        "seconds": round(time.monotonic() - started, 1),
    }
