"""What --device means on this machine: a device to measure on, or a profile to project for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcal_artifacts.errors import UsageError

from ..workbench import pick_device
from . import devices, jetson
from .devices import Device


@dataclass(frozen=True)
class Target:
    """device: where it is measured; None where it is projected. profile: of it, where there is one. table_4: whether the
    paper's device is meant too.
    """

    name: str
    device: torch.device | None
    profile: Device | None
    table_4: bool = False


def target(name: str) -> Target:
    """What --device means here: a device to measure on, or a profile to project for."""
    here = devices.board()
    own = None if here is None else devices.recognised(here)
    if name == "jetson":
        if here is None:
            return Target(jetson.OURS_ON, None, devices.device(jetson.OURS_ON), table_4=True)
        return Target(own.name if own else here, _cuda_of(here), own)
    if name in ("auto", "cpu") or name.split(":")[0] == "cuda":
        device = pick_device(name)
        called = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        profile = own or (devices.recognised(called) if called else None)
        label = profile.name if device.type == "cuda" and profile else called or "cpu"
        return Target(label, device, profile)
    profile = devices.device(name)
    if torch.cuda.is_available() and profile in (own, devices.recognised(torch.cuda.get_device_name())):
        return Target(profile.name, torch.device("cuda"), profile)
    if here is not None and profile is own:
        _cuda_of(here, name)  # says what is missing
    return Target(profile.name, None, profile, table_4=profile.name == jetson.PAPER_DEVICE)


def _cuda_of(board: str, asked: str = "jetson") -> torch.device:
    if not torch.cuda.is_available():
        raise UsageError(
            f"--device {asked}: this is {board}, but its torch has no CUDA; install NVIDIA's wheel of torch for JetPack, "
            "or give --device cpu"
        )
    return torch.device("cuda")
