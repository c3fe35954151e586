"""Devices that figures are projected for, and which device this machine is. Nothing here imports torch.

Compute capabilities are those of https://developer.nvidia.com/cuda-gpus and
https://developer.nvidia.com/cuda-legacy-gpus, and what Triton supports is the line "NVIDIA GPUs (Compute Capability
8.0+)" of https://github.com/triton-lang/triton.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcal_artifacts.errors import UsageError

from ..report.suggest import allowed

CPU_INFO = Path("/proc/cpuinfo")
BOARD = Path("/proc/device-tree/model")  # of a Jetson: "NVIDIA Jetson Orin Nano Developer Kit"
RELEASE = Path("/etc/nv_tegra_release")  # of a Jetson's system, also where a container masks BOARD
CHIPS = ("Orin", "Xavier", "Thor")  # what CUDA calls a Jetson's GPU, "NVIDIA" before it or not
PART = 0.8  # of a board's memory that its system has at least: 7.4 of 8 GiB, 15.3 of 16, 61.4 of 64
TRITON_LEAST = (8, 0)
OLDEST_TRITON = "3.6"  # what kvcal asks for anyway
LANES = 128  # thread-instructions an SM issues in a clock: four schedulers, a warp of 32 each (Volta to Blackwell)

XAVIER = "https://www.nvidia.com/en-us/autonomous-machines/embedded-systems/jetson-xavier-series/ (59.7 and 137 GB/s)"
XAVIER_NX_SHEET = "NVIDIA Jetson Xavier NX data sheet DA-09366-001"
AGX_XAVIER_QUERY = "https://gist.github.com/r7vme/7276929c7ddcce41eb0872d389634e4d (deviceQuery)"
ORIN_NANO_SHEET = "NVIDIA Jetson Orin Nano series data sheet DS-11105-001"
ORIN_NX_SHEET = "NVIDIA Jetson Orin NX series data sheet DS-10712-001"
AGX_ORIN_SHEET = "NVIDIA Jetson AGX Orin series data sheet DS-10662-001"
SUPER = "https://developer.nvidia.com/blog/nvidia-jetson-orin-nano-developer-kit-gets-a-super-boost/"
THOR = "https://developer.ridgerun.com/wiki/index.php/NVIDIA_Jetson_AGX_Thor/Introduction/SoM_Overview"
THOR_QUERY = (
    "https://forums.developer.nvidia.com/t/clarification-on-cuda-core-and-tensor-core-counts-for-jetson-agx-thor/356355"
)
A100_SHEET = "https://huggingface.co/RajBhope/gpu-runtime-predictor/blob/main/gpu_catalog.json (1555 GB/s)"
A100_QUERY = "https://gist.github.com/gengwg/3520df2ebf8872e5ee4818367e3a4122 (deviceQuery)"
H200_FACTS = "https://www.saulelectric.com/nvidia-h200.html (132 SMs, 4.8 TB/s, 141 GB)"
H200_SEEN = "what CUDA says of one (docs/benchmarks/generation-ffe395f.json, total_bytes): 139.8 GiB, all for programs"
H200_CLOCK = "https://geektopia.es/es/technology/2023/11/13/noticias/nvidia-anuncia-la-aceleradora-h200-tiene-141-gb-de-hbm3e.html"


@dataclass(frozen=True)
class Device:
    """One board or card. bandwidth: 1e9 bytes a second; memory: 2^30 bytes; clock: MHz, the highest of the GPU.

    found_as: what the machine calls itself, any of them: words of a Jetson's device tree; of a card CUDA's name as a
    whole, "NVIDIA" before it or not ("GH200", "H200 NVL" and parts of a card, "H200 MIG 1g.18gb", are others). sources:
    field -> where the fact is from.
    """

    name: str
    title: str
    capability: tuple[int, int]
    sms: int
    clock: float
    bandwidth: float
    memory: float
    found_as: tuple[str, ...]
    sources: Mapping[str, str]
    least_triton: str = OLDEST_TRITON  # with code for this GPU
    jetson: bool = True

    @property
    def issue_rate(self) -> float:
        """Thread-instructions a second that all SMs can issue."""
        return self.sms * LANES * self.clock * 1e6

    def needs_triton(self, installed: str | None) -> str | None:
        """Which Triton its kernels need, where that is newer than all of kvcal need and than the installed one."""
        newer = version(self.least_triton) > version(OLDEST_TRITON)
        older = installed is None or version(installed) < version(self.least_triton)
        return f"needs Triton {self.least_triton}" if newer and older else None

    @property
    def why_no_triton(self) -> str | None:
        """None where Triton kernels run."""
        if self.capability < TRITON_LEAST:
            least = ".".join(map(str, TRITON_LEAST))
            return f"compute capability {self.capability[0]}.{self.capability[1]}; Triton supports {least} and up"
        return None


_TABLE = (
    Device(
        "jetson-xavier-nx", "Jetson Xavier NX (8 GB)", (7, 2), 6, 1100, 59.7, 8, ("Xavier NX",),
        {"sms": f"{XAVIER_NX_SHEET}: 384 CUDA cores, 64 an SM", "clock": XAVIER_NX_SHEET, "bandwidth": XAVIER,
         "memory": XAVIER},
    ),
    Device(
        "jetson-agx-xavier", "Jetson AGX Xavier (32 GB)", (7, 2), 8, 1377, 137, 32, ("AGX Xavier", "Jetson-AGX"),
        {"sms": AGX_XAVIER_QUERY, "clock": AGX_XAVIER_QUERY, "bandwidth": XAVIER, "memory": XAVIER},
    ),
    Device(
        "jetson-orin-nano", "Jetson Orin Nano (8 GB, 15 W)", (8, 7), 8, 625, 68, 8, ("Orin Nano",),
        {"sms": f"{ORIN_NANO_SHEET}: 1024 CUDA cores, 128 an SM", "clock": ORIN_NANO_SHEET,
         "bandwidth": ORIN_NANO_SHEET, "memory": ORIN_NANO_SHEET},
    ),
    Device(
        "jetson-orin-nano-super", "Jetson Orin Nano Super (8 GB, 25 W)", (8, 7), 8, 1020, 102, 8,
        ("Orin Nano", "Super"),
        {"sms": f"{ORIN_NANO_SHEET}: 1024 CUDA cores, 128 an SM", "clock": SUPER, "bandwidth": SUPER, "memory": SUPER},
    ),
    Device(
        "jetson-orin-nx", "Jetson Orin NX (16 GB)", (8, 7), 8, 918, 102, 16, ("Orin NX",),
        {"sms": f"{ORIN_NX_SHEET}: 1024 CUDA cores, 128 an SM", "clock": ORIN_NX_SHEET, "bandwidth": ORIN_NX_SHEET,
         "memory": ORIN_NX_SHEET},
    ),
    Device(
        "jetson-agx-orin", "Jetson AGX Orin (64 GB)", (8, 7), 16, 1300, 204.8, 64, ("AGX Orin",),
        {"sms": f"{AGX_ORIN_SHEET}: 8 TPCs of 2 SMs", "clock": AGX_ORIN_SHEET, "bandwidth": AGX_ORIN_SHEET,
         "memory": AGX_ORIN_SHEET},
    ),
    Device(
        "jetson-thor", "Jetson T5000 (AGX Thor, 128 GB)", (11, 0), 20, 1575, 273, 128, ("Thor",),
        {"sms": THOR_QUERY, "clock": THOR, "bandwidth": THOR, "memory": THOR}, least_triton="3.9",
    ),
    Device(
        "a100-40gb", "A100 (40 GB)", (8, 0), 108, 1410, 1555, 40, ("A100-SXM4-40GB", "A100-PCIE-40GB"),
        {"sms": A100_QUERY, "clock": A100_QUERY, "bandwidth": A100_SHEET, "memory": A100_SHEET}, jetson=False,
    ),
    Device(
        "h200", "H200 (SXM, 141 GB)", (9, 0), 132, 1930, 4800, 139, ("H200",),
        {"sms": H200_FACTS, "clock": H200_CLOCK, "bandwidth": H200_FACTS, "memory": H200_SEEN}, jetson=False,
    ),
)  # fmt: skip

DEVICES: dict[str, Device] = {device.name: device for device in _TABLE}
MEASURED = ("auto", "cpu", "cuda", "jetson")  # what --device takes besides: cuda:1 too


def version(text: str) -> tuple[int, ...]:
    """The first two numbers of Triton's version."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


def device(name: str) -> Device:
    """The profile of that name; UsageError with what is allowed."""
    if name not in DEVICES:
        raise UsageError(
            f"--device {name or repr(name)}: no such device; "
            f"{allowed(name, [*MEASURED, *DEVICES], 'kvcal names device')}",
        )
    return DEVICES[name]


def board() -> str | None:
    """What a Jetson calls itself in its device tree; None on other machines, and where that is masked."""
    try:
        text = BOARD.read_text("utf-8", "replace").strip("\0 \n")
    except OSError:
        return None
    return text if "jetson" in text.lower() or "orin" in text.lower() else None


def release() -> str | None:
    """A Jetson by the file of its system: which release that is; None where there is no such file."""
    try:
        text = RELEASE.read_text("utf-8", "replace").partition("\n")[0]
    except OSError:
        return None
    return f"a Jetson ({', '.join(part.strip(' #') for part in text.split(',')[:2])})"


def host_memory() -> int:
    """Bytes that the system has; of a Jetson they are the GPU's, too."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def processor() -> str | None:
    """What the CPU calls itself; None where the system does not say."""
    try:
        lines = CPU_INFO.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "hardware")))
    return next(filter(None, names), None) or platform.processor() or None


def recognised(called: str, memory: float | None = None) -> Device | None:
    """The profile of a machine that calls itself so and has so many GiB (None: not known); None where it is another
    size or kind of that name.
    """
    fitting = [(_matching(called, one), one) for one in DEVICES.values()]
    if "Super" in called:
        fitting = [(count, one) for count, one in fitting if one.name != "jetson-orin-nano"]
    else:
        fitting = [(count, one) for count, one in fitting if "Super" not in one.found_as]
    count, best = max(fitting, key=lambda pair: pair[0])
    return best if count and "Industrial" not in called and _as_large(best, memory) else None


def _matching(called: str, one: Device) -> int:
    """How many of its names the machine's is, or has as words."""
    if not one.jetson:
        return int(called.removeprefix("NVIDIA ") in one.found_as)
    return sum(re.search(rf"\b{re.escape(part)}\b", called) is not None for part in one.found_as)


def _as_large(one: Device, memory: float | None) -> bool:
    """Tell devices of one name apart by their memory; cards' names say it."""
    return memory is None or not one.jetson or PART * one.memory < memory <= one.memory


def of_gpu(called: str, memory: float, sms: int) -> Device | None:
    """The Jetson whose GPU calls itself so, as "Orin", and has so many GiB and SMs; None where there is none, or where
    two are alike (Orin Nano and Orin Nano Super; Orin NX of 8 GB, too).
    """
    part = chip(called)
    if part is None:
        return None
    every = [one for one in DEVICES.values() if one.jetson and one.sms == sms and _as_large(one, memory)]
    matches = [one for one in every if any(part in name for name in one.found_as)]
    return matches[0] if len(matches) == 1 else None


def chip(called: str) -> str | None:
    """Which of CHIPS a GPU calls itself, with other words or without."""
    return next((one for one in CHIPS if one in called.split()), None)
