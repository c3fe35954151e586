"""Free memory of a device, to refuse what cannot fit before anything is allocated.

Linux grants a process more than there is and ends it where it writes: no error would come that a command could explain.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from kvcal_artifacts.errors import OutOfMemory

MEMINFO, PROCESS_GROUPS, GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# version of control groups -> limit, bytes in use, what of memory.stat the kernel gives back when asked
GROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def check_fits(label: str, size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises OutOfMemory where weights of `size` bytes are more than is free on the device. label: of the model."""
    free = free_bytes(device)
    if free is not None and size > free:
        raise OutOfMemory(
            f"{label}: its weights need {size / 2**30:.1f} GiB in {str(dtype).removeprefix('torch.')}, "
            f"{free / 2**30:.1f} GiB "
            f"are free on {device}; take a smaller --model, a --dtype of 16 bits or a device with more memory"
        )


def free_bytes(device: torch.device) -> int | None:
    """What torch can still allocate there; None where the system does not say it."""
    if device.type != "cuda":
        return host_bytes()
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = int(cuda_bytes(device)) + reusable
    if torch.cuda.get_device_properties(device).is_integrated:  # one memory: the driver takes file caches for used
        free = max(free, host_bytes() or 0)
    return free


def cuda_bytes(device: torch.device) -> float:
    """Bytes that torch can still take of a CUDA device, or may (torch.cuda.set_per_process_memory_fraction)."""
    index = torch.cuda.current_device() if device.index is None else device.index  # the fraction is asked for by number
    free, total = torch.cuda.mem_get_info(index)
    allowed = torch.cuda.get_per_process_memory_fraction(index) * total
    return min(free, allowed - torch.cuda.memory_reserved(index))


def host_bytes() -> int | None:
    """Free memory of the machine, or of a control group that allows less (a container's); None where there is no /proc,
    as on macOS.
    """
    try:
        fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        machine = int(fields["MemAvailable"].removesuffix("kB")) * 1024
    except (OSError, KeyError, ValueError):
        return None
    return min([machine, *_group_bytes()])


def _group_bytes() -> Iterator[int]:
    """What each control group of this process that has a limit still gives."""
    for folder, version in _groups():
        limit, used, stale = GROUP_FILES[version]
        try:
            most, now = (int((folder / name).read_text()) for name in (limit, used))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group where a container sees only its group; "max" is no limit
            continue
        yield max(0, most - now + int(stat.get(stale, 0)))


def _groups() -> Iterator[tuple[Path, int]]:
    """(folder, version) of the process's groups and those above, /proc/self/cgroup's lines being
    number:controllers:path.
    """
    try:
        lines = PROCESS_GROUPS.read_text().splitlines()
    except OSError:
        return
    for number, controllers, path in (line.split(":", 2) for line in lines):
        if number == "0" or "memory" in controllers.split(","):
            top, version = (GROUPS, 2) if number == "0" else (GROUPS / "memory", 1)
            inner = top / path.strip("/")
            for folder in (inner, *inner.parents):
                yield folder, version
                if folder == top:
                    break


def is_oom(error: BaseException) -> bool:
    import torch

    message = str(error).lower()
    typed = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return typed or "out of memory" in message or "can't allocate memory" in message
