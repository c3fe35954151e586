"""What `--device` and `--dtype` mean for the weights of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcal_artifacts.errors import UsageError

from . import devices
from .hub import one_line

if TYPE_CHECKING:
    import torch


def to_dtype(dtype: torch.dtype | str) -> torch.dtype:
    import torch

    allowed = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if isinstance(dtype, torch.dtype) and dtype in allowed.values():
        return dtype
    if str(dtype) not in allowed:
        raise UsageError(f"dtype {dtype}: allowed are auto, {', '.join(allowed)}")
    return allowed[str(dtype)]


def to_device(device: torch.device | str) -> torch.device:
    import torch

    allowed, device = "allowed are cpu, cuda, cuda:N and auto", device or "''"
    try:
        target = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device {device}: torch knows no such device; {allowed}") from None
    if target.type == "meta":
        raise UsageError(f"device {device}: holds no numbers; {allowed}")
    try:
        torch.empty(0, device=target, dtype=torch.float32)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"device {device}: not usable here ({one_line(error, 120)}); {allowed}") from error
    return target


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return devices.to_device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return devices.to_dtype(name)
