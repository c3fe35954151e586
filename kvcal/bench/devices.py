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
H200_USABLE = (
    "what CUDA says of one (docs/benchmarks/generation-ffe395f.json, total_bytes): 139.8 GiB, all for programs"
)
# NVIDIA's own sheets of the cards below could not be opened from where this was written: these pages repeat them.
RTX_3090 = "https://holynerdvana.blogspot.com/2022/10/nvidia-geforce-rtx-3090-specifications.html (82 SMs, 936 GB/s)"
RTX_4090 = "https://holynerdvana.blogspot.com/2022/10/nvidia-geforce-rtx-4090-specifications.html (128 SMs, 1008 GB/s)"
RTX_5090 = (
    "https://fpsbench.com/compare/gpu/nvidia-geforce-rtx-4090-d-vs-nvidia-geforce-rtx-5090 (170 SMs, 512 bit, 28 Gbps)"
)
HALVED = "half of the rate with float16 sums on that page: GeForce cards halve it with float32 sums"
L4 = "https://pcpartdb.com/gpus/view/nvidia-l4 (7,680 cores of 128 an SM, 300 GB/s)"
L4_RATE = "https://grokipedia.com/page/NVIDIA_L4_vs_L40S (242 TFLOPS with sparsity)"
A10 = "https://sysrqmts.com/ru/gpus/compare/nvidia-a10-pcie-vs-nvidia-quadro-rtx-4000 (72 SMs, 600 GB/s)"
A10_RATE = "https://gist.github.com/kimbochen (125 TFLOP/s)"
A10_USABLE = "https://github.com/QwenLM/Qwen3/issues/678 (nvidia-smi: 23028 MiB)"
L40S = (
    "https://m.reach.dog/shop/computizer/products/nvidia-l40s-48gb-gddr6-graphics-card-for-ai-and-graphics-performance"
)
L40S_RATE = "https://www.mullet.se/product.html?product_id=355414 (362 and, with sparsity, 733 TFLOPS)"
L40S_USABLE = "https://github.com/Wan-Video/Wan2.1/issues/205 (total capacity of 44.53 GiB)"
A100_RATE = (
    "https://glennklockwood.com/garden/processors/A100 (312 TFLOPS; 80 GB: 2.039 TB/s; cites NVIDIA's data sheet)"
)
A100_USABLE = "https://upb-pc2.atlassian.net/wiki/spaces/PC2DOK/pages/1900609 (deviceQuery: 42405855232 bytes)"
H100 = "https://glennklockwood.com/garden/processors/h100 (132 SMs, 1.98 GHz, 3.35 TB/s, 989 TFLOPS; cites NVIDIA's)"
H100_TOO = "https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html (3,350 GB/s)"
B200 = (
    "https://brent-newsom-nvidia.github.io/AIPS-Boom/wiki/NVIDIA-DGX-B200 (8 GPUs: 1,440 GB, 64 TB/s; cites NVIDIA's)"
)
B200_CHIP = "https://hmc-tech.com/gpus/nvidia-b200-vs-nvidia-b100 (148 SMs, 1.98 GHz, 2.25 PFLOPS dense)"
B200_USABLE = "https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview (nvidia-smi: 179 GB)"
RTX_4090_USABLE = "https://github.com/3DTopia/Phidias-Diffusion/issues/8 (total capacity of 23.64 GiB)"
LIKE_4090 = "no figure of this card was found: the same part of its memory as the RTX 4090 has"
SYSTEM = "what a Jetson's system has of its memory, see PART"
H200_CLOCK = (
    "https://geektopia.es/es/technology/2023/11/13/noticias/"
    "nvidia-anuncia-la-aceleradora-h200-tiene-141-gb-de-hbm3e.html"
)


@dataclass(frozen=True)
class Device:
    """One board or card. bandwidth: 1e9 bytes a second; memory: 2^30 bytes; clock: MHz, the highest of the GPU. usable:
    2^30 bytes of it that CUDA reports, None: not known; tflops: 1e12 dense 16-bit operations a second of matrix
    products, summed in float32, None: not known.

    reported_names: what the machine calls itself, any of them: words of a Jetson's device tree; of a card CUDA's name
    as a whole, "NVIDIA" before it or not ("GH200", "H200 NVL" and parts of a card, "H200 MIG 1g.18gb", are others).
    sources: field -> where the fact is from.
    """

    name: str
    title: str
    capability: tuple[int, int]
    sms: int
    clock: float
    bandwidth: float
    memory: float
    reported_names: tuple[str, ...]
    sources: Mapping[str, str]
    least_triton: str = OLDEST_TRITON  # with code for this GPU
    jetson: bool = True
    usable: float | None = None
    tflops: float | None = None

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
         "memory": XAVIER, "usable": SYSTEM}, usable=7.4,
    ),
    Device(
        "jetson-agx-xavier", "Jetson AGX Xavier (32 GB)", (7, 2), 8, 1377, 137, 32, ("AGX Xavier", "Jetson-AGX"),
        {"sms": AGX_XAVIER_QUERY, "clock": AGX_XAVIER_QUERY, "bandwidth": XAVIER, "memory": XAVIER},
    ),
    Device(
        "jetson-orin-nano", "Jetson Orin Nano (8 GB, 15 W)", (8, 7), 8, 625, 68, 8, ("Orin Nano",),
        {"sms": f"{ORIN_NANO_SHEET}: 1024 CUDA cores, 128 an SM", "clock": ORIN_NANO_SHEET,
         "bandwidth": ORIN_NANO_SHEET, "memory": ORIN_NANO_SHEET, "usable": SYSTEM}, usable=7.4,
    ),
    Device(
        "jetson-orin-nano-super", "Jetson Orin Nano Super (8 GB, 25 W)", (8, 7), 8, 1020, 102, 8,
        ("Orin Nano", "Super"),
        {"sms": f"{ORIN_NANO_SHEET}: 1024 CUDA cores, 128 an SM", "clock": SUPER, "bandwidth": SUPER, "memory": SUPER,
         "usable": SYSTEM}, usable=7.4,
    ),
    Device(
        "jetson-orin-nx", "Jetson Orin NX (16 GB)", (8, 7), 8, 918, 102, 16, ("Orin NX",),
        {"sms": f"{ORIN_NX_SHEET}: 1024 CUDA cores, 128 an SM", "clock": ORIN_NX_SHEET, "bandwidth": ORIN_NX_SHEET,
         "memory": ORIN_NX_SHEET, "usable": SYSTEM}, usable=15.3,
    ),
    Device(
        "jetson-agx-orin", "Jetson AGX Orin (64 GB)", (8, 7), 16, 1300, 204.8, 64, ("AGX Orin",),
        {"sms": f"{AGX_ORIN_SHEET}: 8 TPCs of 2 SMs", "clock": AGX_ORIN_SHEET, "bandwidth": AGX_ORIN_SHEET,
         "memory": AGX_ORIN_SHEET, "usable": SYSTEM}, usable=61.4,
    ),
    Device(
        "jetson-thor", "Jetson T5000 (AGX Thor, 128 GB)", (11, 0), 20, 1575, 273, 128, ("Thor",),
        {"sms": THOR_QUERY, "clock": THOR, "bandwidth": THOR, "memory": THOR}, least_triton="3.9",
    ),
    Device(
        "rtx-3090", "GeForce RTX 3090 (24 GB)", (8, 6), 82, 1695, 936, 24, ("GeForce RTX 3090",),
        {"sms": RTX_3090, "clock": RTX_3090, "bandwidth": RTX_3090, "memory": RTX_3090, "usable": LIKE_4090,
         "tflops": HALVED},
        jetson=False, usable=23.64, tflops=71,
    ),
    Device(
        "rtx-4090", "GeForce RTX 4090 (24 GB)", (8, 9), 128, 2520, 1008, 24, ("GeForce RTX 4090",),
        {"sms": RTX_4090, "clock": RTX_4090, "bandwidth": RTX_4090, "memory": RTX_4090, "usable": RTX_4090_USABLE,
         "tflops": HALVED},
        jetson=False, usable=23.64, tflops=165,
    ),
    Device(
        "rtx-5090", "GeForce RTX 5090 (32 GB)", (12, 0), 170, 2407, 1792, 32, ("GeForce RTX 5090",),
        {"sms": RTX_5090, "clock": RTX_5090, "bandwidth": RTX_5090, "memory": RTX_5090, "usable": LIKE_4090,
         "tflops": "no source could be seen"},
        jetson=False, usable=31.52, tflops=209,
    ),
    Device(
        "l4", "L4 (24 GB)", (8, 9), 60, 2040, 300, 24, ("L4",),
        {"sms": L4, "clock": L4, "bandwidth": L4, "memory": L4, "tflops": L4_RATE,
         "usable": "no figure of this card was found: the A10's, which has ECC and as much"},
        jetson=False, usable=22.49, tflops=121,
    ),
    Device(
        "a10", "A10 (24 GB)", (8, 6), 72, 1695, 600, 24, ("A10",),
        {"sms": A10, "clock": A10, "bandwidth": A10, "memory": A10, "usable": A10_USABLE, "tflops": A10_RATE},
        jetson=False, usable=22.49, tflops=125,
    ),
    Device(
        "l40s", "L40S (48 GB)", (8, 9), 142, 2520, 864, 48, ("L40S",),
        {"sms": L40S, "clock": L40S, "bandwidth": L40S, "memory": L40S, "usable": L40S_USABLE, "tflops": L40S_RATE},
        jetson=False, usable=44.53, tflops=362,
    ),
    Device(
        "a100-40gb", "A100 (40 GB)", (8, 0), 108, 1410, 1555, 40, ("A100-SXM4-40GB", "A100-PCIE-40GB"),
        {"sms": A100_QUERY, "clock": A100_QUERY, "bandwidth": A100_SHEET, "memory": A100_SHEET, "usable": A100_USABLE,
         "tflops": A100_RATE},
        jetson=False, usable=39.49, tflops=312,
    ),
    Device(
        "a100-80gb", "A100 (SXM, 80 GB)", (8, 0), 108, 1410, 2039, 80, ("A100-SXM4-80GB",),
        {"sms": A100_QUERY, "clock": A100_QUERY, "bandwidth": A100_RATE, "memory": A100_RATE, "tflops": A100_RATE,
         "usable": "no figure of this card was found: twice the 40 GB card's"},
        jetson=False, usable=78.98, tflops=312,
    ),
    Device(
        "h100", "H100 (SXM, 80 GB)", (9, 0), 132, 1980, 3350, 80, ("H100 80GB HBM3",),
        {"sms": H100, "clock": H100, "bandwidth": H100_TOO, "memory": H100_TOO, "tflops": H100,
         "usable": "no source could be seen: the A100's of 80 GB"},
        jetson=False, usable=78.98, tflops=989,
    ),
    Device(
        "h200", "H200 (SXM, 141 GB)", (9, 0), 132, 1930, 4800, 139, ("H200",),
        {"sms": H200_FACTS, "clock": H200_CLOCK, "bandwidth": H200_FACTS, "memory": H200_USABLE, "usable": H200_USABLE,
         "tflops": f"{H100}: the same chip"},
        jetson=False, usable=139.8, tflops=989,
    ),
    Device(
        "b200", "B200 (180 GB)", (10, 0), 148, 1980, 8000, 180, ("B200",),
        {"sms": B200_CHIP, "clock": B200_CHIP, "bandwidth": B200, "memory": B200, "usable": B200_USABLE,
         "tflops": B200_CHIP},
        jetson=False, usable=179, tflops=2250,
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
        fitting = [(count, one) for count, one in fitting if "Super" not in one.reported_names]
    count, best = max(fitting, key=lambda pair: pair[0])
    return best if count and "Industrial" not in called and _as_large(best, memory) else None


def _matching(called: str, one: Device) -> int:
    """How many of its names the machine's is, or has as words."""
    if not one.jetson:
        return int(called.removeprefix("NVIDIA ") in one.reported_names)
    return sum(re.search(rf"\b{re.escape(part)}\b", called) is not None for part in one.reported_names)


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
    matches = [one for one in every if any(part in name for name in one.reported_names)]
    return matches[0] if len(matches) == 1 else None


def chip(called: str) -> str | None:
    """Which of CHIPS a GPU calls itself, with other words or without."""
    return next((one for one in CHIPS if one in called.split()), None)
