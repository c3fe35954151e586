"""A model spread over the devices of one process, layer by layer (`--device-map`), or over processes, head by head
(`--tp-plan`).

The first is accelerate's dispatch: modules run where they lie, and hooks move what goes from one to the next. The
second is Transformers' tensor-parallel plan.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.hf import input_device as input_device  # others ask here

from ..report.extras import require
from .structure import head_of, tied

if TYPE_CHECKING:
    from torch import nn

    from .structure import CausalLM

DeviceMap: TypeAlias = str | Mapping[str, str | int]
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class Spread:
    """Where the parts of a model go. device_map: one of MAPS, or devices by names of modules; tp_plan: "auto". One of
    them, or neither: the whole model is on one device.
    """

    device_map: DeviceMap | None = None
    tp_plan: str | None = None

    @classmethod
    def of(cls, device_map: str | None, tp_plan: str | None, *, layerwise: bool = False) -> Spread:
        """What the options --device-map and --tp-plan mean. Raises UsageError where they mean nothing, or contradict
        each other or --layerwise.
        """
        if device_map is None and tp_plan is None:
            return WHOLE
        name = "--device-map" if device_map is not None else "--tp-plan"
        if device_map is not None and tp_plan is not None:
            raise UsageError("--device-map and --tp-plan: give one of them; both say where the weights go")
        if layerwise:
            raise UsageError(f"{name} and --layerwise: give one of them; both say where the weights go")
        require("accelerate", name)
        if tp_plan is not None:
            if tp_plan != "auto":
                raise UsageError(f"--tp-plan {tp_plan}: allowed is auto")
            _processes()
            return cls(tp_plan=tp_plan)
        assert device_map is not None
        return cls(device_map=_parsed(device_map))


WHOLE = Spread()


def _parsed(text: str) -> DeviceMap:
    """The map that --device-map gives."""
    if text in MAPS:
        return text
    try:
        devices = json.loads(text)
    except ValueError:
        devices = None
    if not isinstance(devices, dict) or not devices or not all(type(one) in (str, int) for one in devices.values()):
        raise UsageError(
            f"--device-map {text[:80]}: allowed are {', '.join(MAPS)}, or a JSON object of devices by names of "
            'modules, as {"model.embed_tokens": 0, …}'
        )
    _check_places(devices)
    return devices


def _check_places(devices: Mapping[str, str | int]) -> None:
    """Raises UsageError for a device that is not here."""
    gpus = torch.cuda.device_count()
    here = ["cpu", "disk", *range(gpus), *(f"cuda:{index}" for index in range(gpus)), *["cuda"][:gpus]]
    for name, place in devices.items():
        if place not in here:
            shown = ", ".join(map(json.dumps, here[: gpus + 2]))
            raise UsageError(
                f"--device-map: {json.dumps(name)} is given {json.dumps(place)[:80]}, which is no device here; allowed "
                f"are {shown}{'' if gpus else ': torch sees no GPU'}"
            )


def map_for(model: CausalLM, device_map: DeviceMap, dtype: torch.dtype) -> dict[str, str | int]:
    """Devices by names of modules, for a model on the meta device: `divided`, a tied head's that of `tied_together`."""
    if not isinstance(device_map, str):
        return tied_together(model, divided(model, device_map))
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole: list[str] = list(getattr(model, "_no_split_modules", None) or [])
    memory = None
    if device_map != "sequential":
        low = device_map == "balanced_low_0"
        memory = get_balanced_memory(model, dtype=dtype, no_split_module_classes=whole, low_zero=low)
    return tied_together(model, divided(model, infer_auto_device_map(model, memory, whole, dtype=dtype)))


def divided(model: nn.Module, device_map: Mapping[str, str | int]) -> dict[str, str | int]:
    """The same devices by names of modules, of which none holds another, and none is "", the whole model.

    Such a module is divided into those of its parts that the map does not name. It stays, too, if it has weights beside
    its parts. accelerate writes nothing of "" to a disk, and fails for a part on a CPU whose whole is on a disk.
    """
    modules = {name for name, _ in model.named_modules()}
    devices = _divided(model, "", device_map, None)
    return devices | {name: place for name, place in device_map.items() if name not in modules}


def _divided(
    module: nn.Module, name: str, device_map: Mapping[str, str | int], around: str | int | None
) -> dict[str, str | int]:
    """The devices of a module's parts. around: that of what the module is in."""
    place, prefix = device_map.get(name, around), f"{name}." if name else ""
    children = dict(module.named_children())
    whole = bool(name) and not any(part.startswith(prefix) for part in device_map)
    if whole or not children:
        return {} if place is None else {name: place}
    weights = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    devices = {name: place} if weights and place is not None else {}
    for child, part in children.items():
        devices |= _divided(part, prefix + child, device_map, place)
    return devices


def tied_together(model: CausalLM, device_map: Mapping[str, str | int]) -> dict[str, str | int]:
    """The same devices by names of modules; a head that is tied to the embedding runs where the embedding is.

    One tensor has one device: accelerate would tie the two again on the head's, where no token ids go. What enters the
    head is moved by its hook.
    """
    devices = dict(device_map)
    if not tied(model):
        return devices
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = names[id(model.get_input_embeddings())], names[id(head_of(model))]
    parts = [part for part in devices if not part or part == embedding or embedding.startswith(f"{part}.")]
    if parts:
        devices[head] = devices[max(parts, key=len)]
    return devices


def weights_device(device: str | int) -> torch.device:
    """Where the weights of a part lie that its map gives to a device; those for a disk lie in memory first."""
    return torch.device("cpu") if device == "disk" else torch.device(device)


def dispatch(model: CausalLM, device_map: dict[str, str | int]) -> None:
    """Put accelerate's hooks on a model, its weights being where `weights_device` says."""
    from accelerate import dispatch_model

    names = [name for name, _ in model.named_parameters()]
    for name in names:
        if not any(name == part or not part or name.startswith(f"{part}.") for part in device_map):
            raise UsageError(f"--device-map has no device for {name}: name its module, too")
    folder = tempfile.TemporaryDirectory(prefix="kvcal-offload-") if "disk" in device_map.values() else None
    try:
        dispatch_model(model, device_map, offload_dir=None if folder is None else folder.name)
    except ValueError as error:
        raise UsageError(f"--device-map: {' '.join(str(error).split())}") from error
    if folder is not None:
        weakref.finalize(model, folder.cleanup)


def tensor_parallel() -> dict[str, object]:
    """What from_pretrained takes, to give each process that torchrun started its part of every layer."""
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=_processes(), tp_plan="auto")}


def _processes() -> int:
    """How many processes torchrun started. Raises UsageError for fewer than two."""
    count = os.environ.get("WORLD_SIZE", "1")
    if not count.isdecimal() or int(count) < 2:
        raise UsageError(
            "--tp-plan spreads heads over processes: start it by torchrun --nproc-per-node N, N at least 2"
        )
    return int(count)
