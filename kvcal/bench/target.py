"""What --device means on this machine: a device to measure on, or a profile to project for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcal_artifacts.errors import UsageError

from ..models.devices import pick_device
from . import devices, jetson
from .devices import Device


@dataclass(frozen=True)
class Target:
    """A device that is measured or projected. device: where it is measured; None where it is projected. profile: of it,
    where there is one. table_4: whether the paper's device is meant too. jetson: whether it is one, with a profile or
    without.
    """

    name: str
    device: torch.device | None
    profile: Device | None
    table_4: bool = False
    jetson: bool = False


def target(name: str) -> Target:
    """What --device means here: a device to measure on, or a profile to project for."""
    here = board()
    here_profile = None if here is None else _profile(here)
    if name == "jetson":
        if here is None:
            return Target(jetson.OURS_ON, None, devices.device(jetson.OURS_ON), table_4=True)
        return Target(
            here_profile.name if here_profile else here, _cuda_of(name, here), here_profile, table_4=True, jetson=True
        )
    if name in ("auto", "cpu") or name.split(":")[0] == "cuda":
        device = pick_device(name)
        called = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        profile = here_profile or (devices.recognised(called) if called and here is None else None)
        label = profile.name if device.type == "cuda" and profile else called or "cpu"
        return Target(label, device, profile, jetson=here is not None)
    profile, paper = devices.device(name), name == jetson.PAPER_DEVICE
    if profile is here_profile and here is not None:
        return Target(name, _cuda_of(name, here), profile, table_4=paper, jetson=True)
    if here is None and torch.cuda.is_available() and profile is devices.recognised(torch.cuda.get_device_name()):
        return Target(name, torch.device("cuda"), profile)
    return Target(name, None, profile, table_4=paper, jetson=here is not None)


def board() -> str | None:
    """What this machine is called if it is a Jetson; None on other machines.

    It is known by its device tree, which containers mask; else by its GPU, one that shares the host's memory. Where
    CUDA finds no GPU, the system's release tells it.
    """
    if (device_tree := devices.board()) is not None:
        return device_tree
    if not torch.cuda.is_available():
        return devices.release()
    called = torch.cuda.get_device_name()
    is_jetson = devices.chip(called) is not None and torch.cuda.get_device_properties(0).is_integrated
    return f"a Jetson ({called})" if is_jetson else None


def _profile(here: str) -> Device | None:
    """The profile of this Jetson, as far as its name and memory tell it; without a device tree its GPU's."""
    if devices.board() is not None:
        return devices.recognised(here, devices.host_memory() / 2**30)
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return devices.of_gpu(
        torch.cuda.get_device_name(), properties.total_memory / 2**30, properties.multi_processor_count
    )


def _cuda_of(name: str, board: str) -> torch.device:
    if not torch.cuda.is_available():
        raise UsageError(
            f"--device {name}: this is {board}, but its torch has no CUDA; install NVIDIA's wheel of torch for "
            "JetPack, "
            "or give --device cpu"
        )
    return torch.device("cuda")
