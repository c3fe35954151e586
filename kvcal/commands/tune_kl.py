"""`kvcal tune-bits --objective kl`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from kvcal_artifacts.bundle import SUFFIX, Bundle, load_bundle
from kvcal_artifacts.bundle.fingerprint import Fingerprint, probed_layers
from kvcal_artifacts.checked import Json
from kvcal_artifacts.errors import UsageError

from ..calibrate.checkpoint import CommandCheckpoint, command_checkpoint, short
from ..calibrate.driver import fit_together
from ..calibrate.job import FitJob, FitOptions
from ..capture.ranks import ShareDoneError, current, leave_to_first
from ..capture.scan import WholeModel
from ..methods.aqua_kv import AquaKV
from ..methods.base import settings_of
from ..methods.composition import Composition, DataFreeComposition
from ..methods.data_free import Preset
from ..methods.registry import NEXT
from ..models import names
from ..pipeline.options import TuneBitsOptions
from ..report.timing import command_start
from ..report.version import __version__
from ..search.head_groups import by_side, group_sensitivities
from ..search.knapsack import Option
from ..search.predicted_codecs import PredictedSchemes
from ..search.sensitivity import (
    BY_LAYER,
    TUNED,
    Chosen,
    DataFreeSchemes,
    Place,
    check_budget,
    check_length,
    choose,
    sensitivities,
)
from .common import (
    Say,
    calibration_windows,
    check_column,
    decided_by,
    each_line_once,
    output_for,
    refuse_idle,
    required_tokenizer,
    say_coverage,
    selection_of,
    text_for,
    tokenizer_for,
)
from .guard import say_unlikely
from .workbench import check_selection, model_record, open_model_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.loading import LoadedModel
    from ..models.structure import CausalLM
    from ..text.token_windows import Windows

METHOD = "tuned-kl"
CODECS = "higgs-2,higgs-3,higgs-4,uniform-2-channel,uniform-4"
WINDOWS, HOLDOUT, LENGTH = 4, 2, 512
FITTED_WINDOWS, SENSED = 34, 2  # of --predict: in all; those of the text fitted on that measure codecs alone


def refuse_other(o: TuneBitsOptions, typed: Collection[str]) -> None:
    """UsageError for an option of the other objective."""
    idle: tuple[str, ...]
    if o.objective == "kl":
        idle = ("bits", "group", "spill", "spill_dir", "layerwise")
        refuse_idle(typed, idle, "--objective attention", "leave it out, or give --codecs")
    else:
        idle = ("codecs", "predict", "head_groups")
        refuse_idle(typed, idle, "--objective kl", "give --objective kl, or leave it out")


def _codecs(o: TuneBitsOptions) -> list[str]:
    """The codecs to choose from, their names checked before any model is loaded."""
    codecs = list(dict.fromkeys(part.strip() for part in o.codecs.split(",") if part.strip()))
    if len(codecs) < 2:
        raise UsageError(f"--codecs {o.codecs}: needs two or more to choose from, as {CODECS}")
    if o.predict and o.head_groups > 1:
        raise UsageError(
            f"--head-groups {o.head_groups} with --predict: predictors are fitted for codecs of all heads; leave one "
            "out"
        )
    if o.head_groups > 1 and (divided := [name for name in codecs if NEXT in name]):
        raise UsageError(f"--head-groups {o.head_groups} with codec {divided[0]!r}: give codecs of all heads")
    for name in codecs:
        Composition(name, name) if o.predict else DataFreeComposition(name, name)
    return codecs


def run_tune_kl(o: TuneBitsOptions, say: Say) -> dict[str, Any]:
    """Measure, choose, verify, write: what was chosen, next to the best uniform assignment."""
    say = each_line_once(say)
    started = command_start()
    codecs = _codecs(o)
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
    check_length(DataFreeSchemes(loaded.model, base).exact, text.train)  # before minutes of fits
    say_unlikely(loaded, text.holdout, say)
    record = decided_by(o, loaded.model.dtype, loaded.device, text.ids_sha256)
    settings: dict[str, Json] = {"codecs": codecs, "base": asdict(base), "predict": o.predict}
    settings |= {} if o.head_groups == 1 else {"head_groups": o.head_groups}
    work, ranks = command_checkpoint("tune-bits", record | settings, output=output, resume=o.resume, say=say), current()
    model = model_record(source, loaded.revision, o.random_weights)
    with work.until_out():
        schemes: DataFreeSchemes | PredictedSchemes = DataFreeSchemes(loaded.model, base)
        if o.predict:
            schemes = PredictedSchemes(_predictors(o), codecs, _fit(o, loaded, text, model, work, say))
        check_budget(codecs, schemes, o.max_bits)
        measured_on = text.train[:SENSED] if o.predict else text.train
        options, sensitivity = _measure(o, loaded.model, measured_on, codecs, schemes, work)
        plain = codecs if o.head_groups > 1 else ()
        chosen = choose(
            loaded.model,
            text.holdout,
            options,
            schemes,
            o.max_bits,
            batch=o.batch,
            say=say,
            codecs=plain,
            ranks=ranks,
        )
        leave_to_first()
        uniform = {name: row for name, row in chosen.rows.items() if name not in (TUNED, BY_LAYER)}
        best = min(uniform, key=lambda name: uniform[name].kl, default=None)
        metrics = _metrics(o, chosen, sensitivity)
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
        "holdout_kl_se": chosen.rows[chosen.name].kl_se,
        "tuned_kl": _kl(chosen, TUNED),
        **({} if o.head_groups == 1 else {"head_groups": o.head_groups, "by_layer_kl": _kl(chosen, BY_LAYER)}),
        "predicted_kl": chosen.predicted,
        "best_uniform": best,
        "best_uniform_kl": None if best is None else uniform[best].kl,
        "best_uniform_kl_se": None if best is None else uniform[best].kl_se,
        "best_uniform_bits": None if best is None else uniform[best].bits_per_value,
        "keys": chosen.assignment.key,
        "values": chosen.assignment.value,
        "per_layer": list(chosen.assignment.per_layer),
        "sensitivity": sensitivity,
        "seconds": round(time.monotonic() - started, 1),
    }


def _measure(
    o: TuneBitsOptions,
    model: CausalLM,
    ids: Tensor,
    codecs: Sequence[str],
    schemes: DataFreeSchemes | PredictedSchemes,
    work: CommandCheckpoint,
) -> tuple[dict[Place, list[Option]], dict[str, dict[str, float]]]:
    """What each layer's side may be stored in, and the KL of each codec where it was measured, by its name."""
    if o.head_groups == 1:
        options = sensitivities(model, ids, codecs, schemes, work, current())
        return options, {f"{layer}:{role}s": _costs(choices) for (layer, role), choices in options.items()}
    groups = group_sensitivities(model, ids, codecs, schemes, work, o.head_groups, current())
    return by_side(groups, schemes), {str(group): _costs(choices) for group, choices in groups.items()}


def _metrics(o: TuneBitsOptions, chosen: Chosen, sensitivity: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """What the bundle records of the search; with head groups also every assignment that was measured whole."""
    metrics: dict[str, Any] = {"holdout_kl": chosen.rows[chosen.name].kl, "sensitivity": sensitivity}
    if o.head_groups > 1:
        rows = {name: {"kl": row.kl, "bits": row.bits_per_value} for name, row in chosen.rows.items()}
        metrics |= {"head_groups": o.head_groups, "candidates": rows}
    return metrics


def _costs(options: Sequence[Option]) -> dict[str, float]:
    return {option.name: option.cost for option in options}


def _kl(chosen: Chosen, name: str) -> float | None:
    return chosen.rows[name].kl if name in chosen.rows else None


def _predictors(o: TuneBitsOptions) -> AquaKV:
    """AQUA-KV with the inputs of its best combination with other codecs (docs/methods/transform.md)."""
    return AquaKV(key_inputs=("k1", "v1"), value_inputs=("v1", "k1", "k0"), sink=o.sink, recent=o.recent, block=o.block)


def _fit(
    o: TuneBitsOptions,
    loaded: LoadedModel,
    text: Windows,
    model: Mapping[str, Json],
    work: CommandCheckpoint,
    say: Say,
) -> Callable[[Mapping[str, AquaKV]], dict[str, Bundle]]:
    """Fits methods in one scan over the layers, into files of `work`, from which a killed run goes on."""

    ranks = current()

    def bundles(methods: Mapping[str, AquaKV]) -> dict[str, Bundle]:
        paths = {
            name: work.folder / f"fit-{short(json.dumps(asdict(method), sort_keys=True))}{SUFFIX}"
            for name, method in methods.items()
        }
        if ranks.rank == 0:
            for path in paths.values():
                work.place(path.name)
        missing = ranks.agree([name for name, path in paths.items() if not path.exists()])
        if missing:
            with suppress(ShareDoneError):
                fit_together(
                    [FitJob(methods[name], paths[name], o.seed) for name in missing],
                    WholeModel(loaded.model),
                    text,
                    model_record=model,
                    revision=loaded.revision,
                    device=loaded.device,
                    options=FitOptions(o.batch, resume=o.resume, warn=False, ranks=ranks),
                    say=say,
                )
        fitted = {name: load_bundle(path) for name, path in paths.items()} if ranks.rank == 0 else None
        return ranks.broadcast(fitted, 0)

    return bundles


def _probe(model: CausalLM) -> tuple[float, ...]:
    """The fingerprint's probe of a whole model."""
    from kvcal_artifacts import hf

    decoder = hf.decoder_of(model)
    layers = probed_layers(len(decoder.layers))
    return tuple(number for layer in layers for number in hf.layer_probe(decoder, layer))
