"""What `kvcal build` has to do: the inputs of every bundle, what of them changed, and which bundles share a pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from kvcal_artifacts.bundle.canonical import canonical, sha256_text
from kvcal_artifacts.checked import Json
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.scheme import Windows

from ..calibrate import provenance
from ..calibrate.provenance import cpu_record
from ..methods.base import Method, coded_tokens
from ..methods.mixkvq import MixKVQ
from ..methods.vqkv import VQKV
from ..models import configuration
from ..models.devices import pick_device
from ..models.names import ModelSource, resolve
from ..pipeline.build_recipe import BuildRecipe, Entry
from ..pipeline.identity import code_identity, model_identity, settings_identity, text_identity
from ..pipeline.lock_file import Lock, Planned, planned
from ..pipeline.options import (
    BuiltOptions,
    CalibrationOptions,
    EvalOptions,
    FitNormsOptions,
    FitPredictorsOptions,
    MeasureSubspacesOptions,
    PresetOptions,
    TrainCodebooksOptions,
    TuneBitsOptions,
    TuneThresholdsOptions,
)
from ..pipeline.shared_options import Selection, WeightsOptions
from .calibration import SPILLS, is_layerwise, spill_dir
from .common import RANDOM_TOKENS, check_column, other_text, selection_of, text_for, window_numbers
from .fit_norms import innerq_method
from .fit_predictors import aqua_method
from .measure_subspaces import squat_method
from .measure_subspaces import with_windows as with_squat_windows
from .preset import preset_of
from .train_codebooks import vqkv_method
from .tune_bits import kvtuner_method
from .tune_thresholds import mixkvq_method, search_settings, with_windows
from .tune_thresholds import objective_name as mixkvq_objective
from .tune_thresholds import searches as mixkvq_searches
from .workbench import check_selection

KINDS = ("aqua-kv", "innerq", "kvtuner", "squat", "vqkv", "mixkvq")  # methods that `fit_together` takes


def method_of(o: CalibrationOptions, source: ModelSource) -> Method | VQKV:
    """The method that a command's options describe; of MixKVQ with fixed thresholds: a search goes another way."""
    match o:
        case FitPredictorsOptions():
            return aqua_method(o)
        case FitNormsOptions():
            return innerq_method(o)
        case TuneBitsOptions():
            return kvtuner_method(o)
        case MeasureSubspacesOptions():
            return squat_method(o, source)
        case TrainCodebooksOptions():
            return vqkv_method(o, configuration.geometry(source))
        case TuneThresholdsOptions():
            return _mixkvq(o)
    raise TypeError(type(o).__name__)


def _mixkvq(o: TuneThresholdsOptions) -> MixKVQ:
    from ..search.thresholds import with_thresholds

    settings, method = search_settings(o), mixkvq_method(o)
    return method if method.full is not None else with_thresholds(method, settings.only)


def counted(o: CalibrationOptions) -> CalibrationOptions:
    """The options with the method's numbers of windows, where the recipe names none."""
    if isinstance(o, MeasureSubspacesOptions):
        return with_squat_windows(o)
    if isinstance(o, TuneBitsOptions):
        return with_windows(o)
    return with_windows(o) if isinstance(o, TuneThresholdsOptions) else o


RECORDS = ("aqua-kv", "innerq", "squat")  # methods whose bundles say how much keys and values of each layer err


def searches(entry: Entry) -> bool:
    """Whether thresholds must be searched first: such a bundle has separate runs."""
    return isinstance(entry.options, TuneThresholdsOptions) and mixkvq_searches(entry.options)


def check_entry(recipe: BuildRecipe, entry: Entry) -> None:
    """Refuse settings that no run would accept, before any run."""
    try:
        if entry.gates.max_layer_drift is not None and entry.method not in RECORDS:
            raise UsageError(
                f"gate max_layer_drift: bundles of {entry.method} record no errors of all keys and values to compare "
                "with; "
                "give gates = {max_layer_drift = false}"
            )
        if isinstance(o := entry.options, Selection):
            check_selection(resolve(o.model, o.revision), selection_of(o), random_weights=o.random_weights)
        if isinstance(o := entry.options, PresetOptions):
            preset_of(o)
        elif o is not None:
            source = resolve(o.model, o.revision)
            method = method_of(o, source)
            *_, length = window_numbers(counted(o), source)
            if isinstance(windows := getattr(method, "windows", None), Windows):
                coded_tokens(length, windows.sink, windows.block)
            if o.spill not in SPILLS:
                raise UsageError(f"spill {o.spill}: allowed are {', '.join(SPILLS)}")
            if isinstance(o, TuneThresholdsOptions) and mixkvq_searches(o):
                mixkvq_objective(o, source)
    except KVCalError as error:
        raise type(error)(f"recipe {recipe.path}: {entry.name}: {error}") from error


class Planner:
    """Inputs of every bundle; each model and text is hashed once."""

    def __init__(self, recipe: BuildRecipe, lock: Lock) -> None:
        self.recipe, self.lock, self.code = recipe, lock, code_identity()
        self._rows_by_label: dict[str, dict[str, Json]] = {}

    def plan(self) -> list[Planned]:
        plans: dict[str, Planned] = {}
        for entry in self.recipe.entries:
            check_entry(self.recipe, entry)
        for entry in sorted(self.recipe.entries, key=lambda entry: bool(entry.parts)):  # combinations last
            inputs = self._combined(entry, plans) if entry.parts else self._inputs(entry)
            plans[entry.name] = planned(entry, self.recipe.output, inputs, self.lock)
        return list(plans.values())

    def _inputs(self, entry: Entry) -> dict[str, Json]:
        o = entry.built
        inputs: dict[str, Json] = {
            "method": entry.method,
            "model": self._once(["model", *_model_key(o)], lambda: model_identity(o)),
            "settings": settings_identity(o),
            "code": self.code,
        }
        if isinstance(o, CalibrationOptions):
            inputs["device"] = device_name(o)
            if inputs["device"] == "cpu":
                inputs["cpu"] = cpu_record()  # as provenance: reproduce compares with it
            source = resolve(o.model, o.revision)
            origin = text_for(o, source, "calibration")
            check_column(o.column, origin, other := other_text(o))
            inputs["text"] = self._text(entry, o, origin, "text")
            if other is not None:
                inputs["other_text"] = self._text(entry, o, other, "other_text")
        return inputs

    def _combined(self, entry: Entry, plans: Mapping[str, Planned]) -> dict[str, Json]:
        """The key of its parts' contents: parts that come out the same need no new combination."""
        keys, values = (plans[part] for part in entry.parts)
        return {"method": "combine", "keys": keys.key, "values": values.key, "code": self.code}

    def _text(self, entry: Entry, o: CalibrationOptions, origin: str, name: str) -> dict[str, Json]:
        if origin == RANDOM_TOKENS:
            return {"source": origin}
        earlier = self.lock.bundles.get(entry.name, {}).get("inputs", {}).get(name)
        return self._once(["text", origin, o.column], lambda: text_identity(origin, o.column, earlier))

    def _once(self, key: Sequence[object], make: Callable[[], dict[str, Json]]) -> dict[str, Json]:
        label = json.dumps(key, default=str)
        if label not in self._rows_by_label:
            self._rows_by_label[label] = make()
        return self._rows_by_label[label]

    def gate_key(self, entry: Entry, sha256: str) -> str:
        """The key of everything that decides what the gates of a bundle say."""
        o = self.recipe.evaluation[entry.model]
        origin = text_for(o, resolve(o.model, o.revision), "evaluation")
        text = (
            {}
            if origin == RANDOM_TOKENS
            else self._once(["text", origin, o.column], lambda: text_identity(origin, o.column))
        )
        model = self._once(["model", *_model_key(o)], lambda: model_identity(o))
        settings = {name: o.by_name()[name] for name in ("length", "windows", "step", "batch", "dtype", "seed")}
        inputs = [sha256, asdict(entry.gates), text, model, settings, device_name(o), self.code]
        return sha256_text(canonical(inputs))


def _model_key(o: WeightsOptions) -> list[str | int | None]:
    return [o.model, o.revision, o.random_weights, o.seed if o.random_weights else 0]


def device_name(o: BuiltOptions | EvalOptions) -> str:
    """The device's name as provenance states it."""
    return provenance.device_name(pick_device(o.device))


@dataclass(frozen=True)
class BuildPass:
    """What one process does at a time: one bundle, or several in one pass over their model."""

    plans: tuple[Planned, ...]
    shared: bool

    @property
    def label(self) -> str:
        names = ", ".join(plan.entry.name for plan in self.plans)
        return f"{names} (one pass over the model)" if len(self.plans) > 1 else names


def plan_passes(plans: Iterable[Planned], share: bool) -> list[BuildPass]:
    """Bundles of one model, text and set of windows together, in the recipe's order; combinations last."""
    groups: dict[str, list[Planned]] = {}
    for plan in plans:
        alone = not share or plan.entry.method not in KINDS or searches(plan.entry)
        groups.setdefault(plan.entry.name if alone else _scan_key(calibration_of(plan)), []).append(plan)
    return [
        BuildPass(tuple(group), group[0].entry.method in KINDS and not searches(group[0].entry))
        for group in groups.values()
    ]


def calibration_of(plan: Planned) -> CalibrationOptions:
    """The options of a bundle that is fitted on a text."""
    assert isinstance(plan.entry.options, CalibrationOptions)
    return plan.entry.options


def _scan_key(o: CalibrationOptions) -> str:
    source = resolve(o.model, o.revision)
    same = [o.model, o.revision, o.random_weights, o.seed, o.dtype, o.device, o.batch, o.text, o.column]
    how = [is_layerwise(o), o.spill, spill_dir(o), other_text(o)]
    return json.dumps(["scan", *same, *how, *window_numbers(counted(o), source)], default=str)
