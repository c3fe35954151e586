"""`kvcal tune-bits --objective kl`."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import asdict, replace
from typing import Any

from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.bundle.fingerprint import Fingerprint, probed_layers
from kvcal_artifacts.errors import UsageError

from .. import __version__
from ..calibrate.checkpoint import CommandCheckpoint
from ..methods.base import settings_of
from ..methods.composition import DataFreeComposition
from ..methods.data_free import Preset
from ..models import names
from ..pipeline.options import TuneBitsOptions
from ..search.sensitivity import choose, sensitivities
from .common import (
    Say,
    calibration_windows,
    check_column,
    decided_by,
    given_selection,
    known,
    output_for,
    refuse_idle,
    say_coverage,
    text_for,
    tokenizer_for,
)
from .workbench import check_selection, model_record, open_given

METHOD = "tuned-kl"
CODECS = "higgs-2,higgs-3,higgs-4,uniform-2-channel,uniform-4"
WINDOWS, HOLDOUT, LENGTH = 4, 2, 512


def refuse_other(o: TuneBitsOptions, typed: Collection[str]) -> None:
    """UsageError for an option of the other objective."""
    if o.objective == "kl":
        idle = ("bits", "group", "spill", "spill_dir", "layerwise")
        refuse_idle(typed, idle, "--objective attention", "leave it out, or give --codecs")
    else:
        refuse_idle(typed, ("codecs",), "--objective kl", "give --objective kl, or leave it out")


def run_tune_kl(o: TuneBitsOptions, say: Say) -> dict[str, Any]:
    """Measure, choose, verify, write: what was chosen, beside the best uniform assignment."""
    started = time.monotonic()
    codecs = list(dict.fromkeys(part.strip() for part in o.codecs.split(",") if part.strip()))
    if len(codecs) < 2:
        raise UsageError(f"--codecs {o.codecs}: needs two or more to choose from, as {CODECS}")
    for name in codecs:
        DataFreeComposition(name, name)  # names are checked before any model is loaded
    source = names.resolve(o.model, o.revision)
    output = output_for(o, source, METHOD)
    origin = text_for(o, source, "calibration")
    check_column(o.column, origin)
    say(f"text: {origin}")
    count = o.windows or WINDOWS
    holdout = o.holdout or (HOLDOUT if o.windows is None else max(1, count // 2))
    windows = replace(o, windows=count, length=o.length or LENGTH, holdout=holdout)
    tokenizer, selection = known(tokenizer_for(o, source, origin)), given_selection(o)
    check_selection(source, selection, random_weights=o.random_weights)
    text = calibration_windows(windows, source, tokenizer, origin, say)
    loaded = open_given(o)
    say_coverage(loaded.model, say)
    base = Preset(codecs[0], codecs[0], sink=o.sink, recent=o.recent, block=o.block)
    record = decided_by(o, loaded.model.dtype, loaded.model.device, text.ids_sha256)
    work = CommandCheckpoint(
        "tune-bits", record | {"codecs": codecs, "base": asdict(base)}, output=output, resume=o.resume, say=say
    )
    with work.until_out():
        options = sensitivities(loaded.model, text.train, codecs, base, work)
        chosen = choose(loaded.model, text.holdout, options, base, o.max_bits, batch=o.batch, say=say)
        preset = chosen.assignment.preset(base)
        scheme = preset.scheme(loaded.model).keeping(selection)
        uniform = {name: row for name, row in chosen.rows.items() if name != "tuned"}
        best = min(uniform, key=lambda name: uniform[name].kl, default=None)
        provenance = {
            "tool": f"kvcal {__version__}",
            "method": METHOD,
            "settings": settings_of(preset),
            "model": model_record(source, loaded.revision, o.random_weights),
        }
        sensitivity = {
            f"{layer}:{role}s": {x.name: x.cost for x in choices} for (layer, role), choices in options.items()
        }
        metrics = {"holdout_kl": chosen.rows[chosen.name].kl, "sensitivity": sensitivity}
        fingerprint = Fingerprint.of(loaded.model, loaded.revision, _probe(loaded.model))
        sha256 = Bundle(fingerprint, scheme, provenance, metrics).write(output)
    return {
        "bundle": str(output),
        "sha256": sha256,
        "bits_per_value": round(scheme.bits_per_value(), 4),
        "chosen": chosen.name,
        "holdout_kl": chosen.rows[chosen.name].kl,
        "tuned_kl": chosen.rows["tuned"].kl if "tuned" in chosen.rows else None,
        "predicted_kl": chosen.predicted,
        "best_uniform": best,
        "best_uniform_kl": None if best is None else uniform[best].kl,
        "keys": preset.key,
        "values": preset.value,
        "per_layer": list(preset.per_layer),
        "seconds": round(time.monotonic() - started, 1),
    }


def _probe(model: Any) -> tuple[float, ...]:
    """The fingerprint's probe of a whole model."""
    from kvcal_artifacts import hf

    decoder = hf.decoder_of(model)
    layers = probed_layers(len(decoder.layers))
    return tuple(number for layer in layers for number in hf.key_probe(hf.attention_site(decoder, layer)))
