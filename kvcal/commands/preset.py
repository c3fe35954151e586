"""`kvcal preset`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from typing import Any

import torch

from kvcal_artifacts.bundle import Bundle, Fingerprint
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import Scheme

from ..calibrate.outlier_guard import warnings
from ..methods.base import settings_of
from ..methods.data_free import COMPOSED, DataFree, Preset, block_notes, composed
from ..models import configuration, layerwise, names, tokenizers
from ..models.devices import pick_device, pick_dtype
from ..pipeline.options import PresetOptions
from ..report.version import __version__
from .common import Say, output_for, refuse_idle, refuse_idle_seed, say_coverage, selection_of
from .guard import TEXT as GUARD_TEXT
from .guard import guard_window
from .workbench import key_probe, model_record


def preset_of(o: PresetOptions) -> DataFree:
    """The preset of that name, with codecs, windows and frame where given; or the codecs without a name."""
    preset = composed(o.name, o.keys, o.values, tuple(o.per_layer or ()))
    windows: dict[str, int | str | None] = {"sink": o.sink, "recent": o.recent, "block": o.block}
    if isinstance(preset, Preset):
        windows["rope"] = o.frame
    elif o.frame not in (None, preset.frame):
        raise UsageError(f"--frame {o.frame}: {o.name} stores keys {preset.frame}")
    changes: dict[str, Any] = {name: value for name, value in windows.items() if value is not None}
    return replace(preset, **changes)


def run_preset(o: PresetOptions, say: Say, typed: Collection[str] = ()) -> dict[str, Any]:
    """A bundle for a method that needs no data: from the model's config, and two layers' weights for the fingerprint.
    All layers are run on two windows of text for the outlier guard, unless told not to; nothing is written where that
    fails.

    typed: names of the options that somebody gave; UsageError for one that nothing takes.
    """
    method, selection = preset_of(o), selection_of(o)
    if o.config_only and o.random_weights:
        raise UsageError("--config-only and --random-weights: with the one no weights are meant, with the other some")
    refuse_idle_seed(o, typed)
    guarded = o.check and not (o.config_only or o.random_weights)
    if not guarded:
        idle = ("device", "check") if o.check else ("device",)  # --no-check says what happens anyway
        refuse_idle(
            typed,
            idle,
            "the model's run on a text",
            "with --no-check, --config-only and --random-weights it is not run; leave it out",
        )
    source = names.resolve(o.model, o.revision)
    name = o.name or COMPOSED
    output = output_for(o, source, name)
    if o.name is None and o.block is None:
        for line in block_notes([one for one in (o.keys, o.values) if one is not None], method.block):
            say(line)
    pick_device(o.device)  # refused before anything is written
    model, revision, probe = _from_config(source) if o.config_only else _opened(source, o)
    scheme = method.scheme(model).keeping(selection)
    from kvcal_artifacts.cache import check_served

    check_served(model, scheme)
    say_coverage(model, say)
    record = {
        "tool": f"kvcal {__version__}",
        "method": name,
        "settings": settings_of(method),
        "model": model_record(source, revision, o.random_weights),
    }
    if selection is not None:
        record["selection"] = asdict(selection)
    fingerprint = Fingerprint.of(model, revision, probe)
    if guarded:
        for line in _warnings(source, {name: scheme}, o.device):
            say(line)
    sha256 = Bundle(fingerprint, scheme, record).write(output)
    return {
        "bundle": str(output),
        "sha256": sha256,
        "bytes": output.stat().st_size,
        "bits_per_value": round(scheme.bits_per_value(), 4),
        "windows": asdict(scheme.windows),
        "frame": scheme.frame,
        "selection": None if selection is None else asdict(selection),
        "layers": len(scheme.layers),
        "skipped": {str(index): reason for index, reason in scheme.skipped.items()},
        "fits": fingerprint.revision or "any weights of this config",
    }


def _opened(source: names.ModelSource, o: PresetOptions) -> tuple[Any, str, tuple[float, ...]]:
    parts = layerwise.open_layerwise(
        source, dtype="float32", device="cpu", random_weights=o.random_weights, seed=o.seed
    )
    parts.check_shapes()
    return parts.model, parts.revision, key_probe(parts)


def _warnings(source: names.ModelSource, schemes: dict[str, Scheme], device: str) -> list[str]:
    where = pick_device(device)
    parts = layerwise.open_layerwise(source, dtype=pick_dtype("auto", where), device=where)
    return warnings(parts, guard_window(tokenizers.load_tokenizer(source), schemes), schemes, where, text=GUARD_TEXT)


def _from_config(source: names.ModelSource) -> tuple[Any, str | None, tuple[float, ...]]:
    """Nothing but config.json is read."""
    from ..models.structure import empty_model

    return empty_model(configuration.load_config(source), torch.float32), None, ()
