"""`kvcal tune-bits --objective kl`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from kvcal_artifacts.bundle import SUFFIX, Bundle, load_bundle
from kvcal_artifacts.bundle.fingerprint import Fingerprint, probed_layers
from kvcal_artifacts.errors import UsageError

from .. import __version__
from ..calibrate.checkpoint import CommandCheckpoint, short
from ..calibrate.driver import fit_together
from ..calibrate.job import FitJob, FitOptions
from ..capture.scan import WholeModel
from ..methods.aqua_kv import AquaKV
from ..methods.base import settings_of
from ..methods.composition import Composition, DataFreeComposition
from ..methods.data_free import Preset
from ..models import names
from ..pipeline.options import TuneBitsOptions
from ..search.predicted_codecs import PredictedSchemes
from ..search.sensitivity import DataFreeSchemes, check_budget, choose, sensitivities
from .common import (
    Say,
    calibration_windows,
    check_column,
    decided_by,
    output_for,
    refuse_idle,
    required_tokenizer,
    say_coverage,
    selection_of,
    text_for,
    tokenizer_for,
)
from .workbench import check_selection, model_record, open_model_of

if TYPE_CHECKING:
    from ..models.loading import LoadedModel
    from ..text.token_windows import Windows

METHOD = "tuned-kl"
CODECS = "higgs-2,higgs-3,higgs-4,uniform-2-channel,uniform-4"
WINDOWS, HOLDOUT, LENGTH = 4, 2, 512
FITTED_WINDOWS, SENSED = 34, 2  # of --predict: in all; those of the text fitted on that measure codecs alone


def refuse_other(o: TuneBitsOptions, typed: Collection[str]) -> None:
    """UsageError for an option of the other objective."""
    if o.objective == "kl":
        idle = ("bits", "group", "spill", "spill_dir", "layerwise")
        refuse_idle(typed, idle, "--objective attention", "leave it out, or give --codecs")
    else:
        refuse_idle(typed, ("codecs", "predict"), "--objective kl", "give --objective kl, or leave it out")


def run_tune_kl(o: TuneBitsOptions, say: Say) -> dict[str, Any]:
    """Measure, choose, verify, write: what was chosen, beside the best uniform assignment."""
    started = time.monotonic()
    codecs = list(dict.fromkeys(part.strip() for part in o.codecs.split(",") if part.strip()))
    if len(codecs) < 2:
        raise UsageError(f"--codecs {o.codecs}: needs two or more to choose from, as {CODECS}")
    for name in codecs:  # names are checked before any model is loaded
        Composition(name, name) if o.predict else DataFreeComposition(name, name)
    source = names.resolve(o.model, o.revision)
    output = output_for(o, source, METHOD)
    origin = text_for(o, source, "calibration")
    check_column(o.column, origin)
    say(f"text: {origin}")
    count = o.windows or (FITTED_WINDOWS if o.predict else WINDOWS)
    holdout = o.holdout or (HOLDOUT if o.windows is None else max(1, count // 2))
    windows = replace(o, windows=count, length=o.length or LENGTH, holdout=holdout)
    tokenizer, selection = required_tokenizer(tokenizer_for(o, source, origin)), selection_of(o)
    check_selection(source, selection, random_weights=o.random_weights)
    text = calibration_windows(windows, source, tokenizer, origin, say)
    loaded = open_model_of(o)
    say_coverage(loaded.model, say)
    base = Preset(codecs[0], codecs[0], sink=o.sink, recent=o.recent, block=o.block)
    record = decided_by(o, loaded.model.dtype, loaded.model.device, text.ids_sha256)
    settings = {"codecs": codecs, "base": asdict(base), "predict": o.predict}
    work = CommandCheckpoint("tune-bits", record | settings, output=output, resume=o.resume, say=say)
    model = model_record(source, loaded.revision, o.random_weights)
    with work.until_out():
        schemes: DataFreeSchemes | PredictedSchemes = DataFreeSchemes(loaded.model, base)
        if o.predict:
            schemes = PredictedSchemes(_predictors(o), codecs, _fit(o, loaded, text, model, work, say))
        check_budget(codecs, schemes, o.max_bits)
        measured_on = text.train[:SENSED] if o.predict else text.train
        options = sensitivities(loaded.model, measured_on, codecs, schemes, work)
        chosen = choose(loaded.model, text.holdout, options, schemes, o.max_bits, batch=o.batch, say=say)
        uniform = {name: row for name, row in chosen.rows.items() if name != "tuned"}
        best = min(uniform, key=lambda name: uniform[name].kl, default=None)
        sensitivity = {
            f"{layer}:{role}s": {x.name: x.cost for x in choices} for (layer, role), choices in options.items()
        }
        metrics = {"holdout_kl": chosen.rows[chosen.name].kl, "sensitivity": sensitivity}
        if isinstance(schemes, PredictedSchemes):
            fitted = schemes.bundles[chosen.name]  # as `fit-predictors` writes it, so that `reproduce` does
            scheme = fitted.scheme.keeping(selection)
            bundle = replace(fitted, scheme=scheme)
        else:
            preset = chosen.assignment.preset(base)
            scheme = preset.scheme(loaded.model).keeping(selection)
            provenance = {
                "tool": f"kvcal {__version__}",
                "method": METHOD,
                "settings": settings_of(preset),
                "model": model,
            }
            fingerprint = Fingerprint.of(loaded.model, loaded.revision, _probe(loaded.model))
            bundle = Bundle(fingerprint, scheme, provenance, metrics)
        sha256 = bundle.write(output)
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
        "keys": chosen.assignment.key,
        "values": chosen.assignment.value,
        "per_layer": list(chosen.assignment.per_layer),
        "sensitivity": sensitivity,
        "seconds": round(time.monotonic() - started, 1),
    }


def _predictors(o: TuneBitsOptions) -> AquaKV:
    """AQUA-KV with the inputs of its best combination with other codecs (docs/methods/transform.md)."""
    return AquaKV(key_inputs=("k1", "v1"), value_inputs=("v1", "k1", "k0"), sink=o.sink, recent=o.recent, block=o.block)


def _fit(
    o: TuneBitsOptions,
    loaded: LoadedModel,
    text: Windows,
    model: dict[str, Any],
    work: CommandCheckpoint,
    say: Say,
) -> Callable[[Mapping[str, AquaKV]], dict[str, Bundle]]:
    """Fits methods in one scan over the layers, into files of `work`, from which a killed run goes on."""

    def bundles(methods: Mapping[str, AquaKV]) -> dict[str, Bundle]:
        paths = {
            name: work.place(f"fit-{short(json.dumps(asdict(method), sort_keys=True))}{SUFFIX}")
            for name, method in methods.items()
        }
        jobs = [FitJob(methods[name], path, o.seed) for name, path in paths.items() if not path.exists()]
        if jobs:
            fit_together(
                jobs,
                WholeModel(loaded.model),
                text,
                model_record=model,
                revision=loaded.revision,
                device=loaded.model.device,
                options=FitOptions(o.batch, resume=o.resume, warn=False),
                say=say,
            )
        return {name: load_bundle(path) for name, path in paths.items()}

    return bundles


def _probe(model: Any) -> tuple[float, ...]:
    """The fingerprint's probe of a whole model."""
    from kvcal_artifacts import hf

    decoder = hf.decoder_of(model)
    layers = probed_layers(len(decoder.layers))
    return tuple(number for layer in layers for number in hf.layer_probe(decoder, layer))
