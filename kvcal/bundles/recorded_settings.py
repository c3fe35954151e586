"""The options of a method's command, read back from the settings that the method records. A field that is no option has
the command's own value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.scheme import Frame

from ..methods.squat import TASKS, paper_settings
from .record_checks import Fields, list_of, table_of


def _renamed(settings: Fields, names: Mapping[str, str], drop: tuple[str, ...] = ()) -> dict[str, object]:
    return {names.get(name, name): value for name, value in settings.items() if name not in drop}


def _joined(values: Iterable[object]) -> str:
    return ",".join(map(str, values)) or "none"


def _aqua_kv(s: Fields, p: Fields) -> dict[str, object]:
    inputs = {name: _joined(list_of(s, name)) for name in ("key_inputs", "value_inputs")}
    return _renamed(s, {"rope": "frame"}) | inputs


def _innerq(s: Fields, p: Fields) -> dict[str, object]:
    return {"search": "plain"} | _renamed(s, {"key": "keys", "value": "values"})  # bundles of before the option


def _squat(s: Fields, p: Fields) -> dict[str, object]:
    options = _renamed(s, {"rope": "frame", "prompt": "prompt_tokens"}, ("search_ranks", "search_strengths"))
    if s["search_ranks"]:  # a search names no point; --settings says where it starts from
        rank, strength = options.pop("rank"), options.pop("strength")
        options |= {"search": True, "settings": _task(table_of(p, "model")["name"], s["rope"], rank, strength)}
    return options


def _task(model: object, frame: object, rank: object, strength: object) -> str:
    space: Frame = "pre_rope" if frame == "pre_rope" else "post_rope"
    for task in TASKS:
        try:
            if paper_settings(task, str(model), space)[:2] == (rank, strength):
                return task
        except KVCalError:  # the paper has it for other models
            continue
    return TASKS[0]


def _vqkv(s: Fields, p: Fields) -> dict[str, object]:
    names = {"high": "high_dims", "split": "split_by", "rope": "frame"}
    options = _renamed(s, names, ("training", "shared", "stages", "sizes"))
    training = {"least": "min_iterations", "most": "max_iterations", "batch": "batch_vectors"}
    return (
        options
        | {"stages": _joined(list_of(s, "stages")), "sizes": _joined(list_of(s, "sizes")), "per_layer": not s["shared"]}
        | _renamed(table_of(s, "training"), training, ("seed",))
    )


def _mixkvq(s: Fields, p: Fields) -> dict[str, object]:
    drop = ("tau_low", "tau_high", "normalise", "value_group")
    options = _renamed(s, {"raw": "raw_dtype"}, drop) | {"raw_salience": s["normalise"] == "none"}
    if p.get("search") is None:
        fixed = s["full"] is not None
        return options if fixed else options | {name: str(s[name]) for name in ("tau_low", "tau_high")}
    search = table_of(p, "search")
    goal, space = table_of(search, "objective"), table_of(search, "space")
    options |= {name: _joined(list_of(space, name)) for name in ("tau_low", "tau_high")}
    options |= {"trials": search["trials"], "max_bits": search["max_bits"], "objective": goal["name"]}
    if goal["name"] == "task":
        tasks = ",".join(map(str, list_of(goal, "tasks")))
        options |= {"objective": f"task:{tasks}", "limit": goal["limit"], "metric": goal["metric"]}
    return options | ({"step": goal["step"]} if "step" in goal else {})


def _kvtuner(s: Fields, p: Fields) -> dict[str, object]:
    return _renamed(s, {"choices": "bits"}) | {"bits": _joined(list_of(s, "choices"))}


FITS: dict[str, tuple[str, Callable[[Fields, Fields], dict[str, object]]]] = {
    "aqua-kv": ("fit-predictors", _aqua_kv),
    "innerq": ("fit-norms", _innerq),
    "squat": ("measure-subspaces", _squat),
    "vqkv": ("train-codebooks", _vqkv),
    "mixkvq": ("tune-thresholds", _mixkvq),
    "kvtuner": ("tune-bits", _kvtuner),
}
