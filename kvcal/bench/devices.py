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

# Memory, bandwidth and 16-bit rates are NVIDIA's: data sheets, white papers, product pages. No page of NVIDIA's
# opens from where this was written, so each figure was compared with a copy. A10, L4, L40S, A100, H100 and H200: with
# NVIDIA's tensorrt_llm/auto_parallel/cluster_info.py (TensorRT-LLM, commit 16d2467), which names these sheets.
# GeForce and B200: with public transcriptions of the tables named here. SMs x clock x operations gives the same rates.
XAVIER = "https://www.nvidia.com/en-us/autonomous-machines/embedded-systems/jetson-xavier-series/ (59.7 and 137 GB/s)"
XAVIER_NX_SHEET = "NVIDIA Jetson Xavier NX data sheet DA-09366-001"
AGX_XAVIER_QUERY = "https://gist.github.com/r7vme/7276929c7ddcce41eb0872d389634e4d (deviceQuery)"
ORIN_NANO_SHEET = "NVIDIA Jetson Orin Nano series data sheet DS-11105-001"
ORIN_NX_SHEET = (
    "NVIDIA Jetson Orin NX series data sheet DS-10712-001, "
    "https://developer.nvidia.com/downloads/jetson-orin-nx-series-data-sheet"
)
AGX_ORIN_SHEET = "NVIDIA Jetson AGX Orin series data sheet DS-10662-001"
SUPER = "https://developer.nvidia.com/blog/nvidia-jetson-orin-nano-developer-kit-gets-a-super-boost/"
THOR = (
    "NVIDIA Jetson Thor series modules data sheet DS-11945-001, https://developer.nvidia.com/downloads/assets/embedded/"
    "secure/jetson/thor/docs/jetson-thor-series-modules-datasheet_ds-11945-001.pdf (128 GB, 273 GB/s)"
)
THOR_CLOCK = (
    "https://developer.ridgerun.com/wiki/index.php/NVIDIA_Jetson_AGX_Thor/Introduction/SoM_Overview (1.575 GHz)"
)
THOR_QUERY = (
    "https://forums.developer.nvidia.com/t/clarification-on-cuda-core-and-tensor-core-counts-for-jetson-agx-thor/356355"
)
AMPERE = (
    "NVIDIA Ampere GA102 white paper, https://www.nvidia.com/content/PDF/"
    "nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf "
    "(RTX 3090: 82 SMs, 1695 MHz, 24 GB, 936 GB/s, 71 TFLOPS with float32 sums)"
)
ADA = (
    "NVIDIA Ada white paper, https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf "
    "(RTX 4090: 128 SMs, 2520 MHz, 24 GB, 1008 GB/s, 165.2 TFLOPS with float32 sums)"
)
BLACKWELL = (
    "NVIDIA RTX Blackwell white paper, "
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf "
    "(RTX 5090: 170 SMs, 2407 MHz, 32 GB, 1792 GB/s, 209.5 TFLOPS with float32 sums)"
)
L4 = "NVIDIA L4 data sheet, https://nvdam.widen.net/s/rvq98gbwsw/l4-datasheet-2595652 (24 GB, 300 GB/s)"
L4_RATE = (
    "NVIDIA L4 product page, https://www.nvidia.com/en-us/data-center/l4/ (242 TFLOPS with sparsity, half without)"
)
L4_CHIP = "NVIDIA Ada white paper, appendix on the L4 (7,424 cores of 128 an SM, 2040 MHz); CUDA reports 58 SMs"
A10 = (
    "NVIDIA A10 data sheet, "
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/datasheet-new/nvidia-a10-datasheet.pdf "
    "(24 GB, 600 GB/s, 125 TFLOPS)"
)
A10_CHIP = "https://sysrqmts.com/ru/gpus/compare/nvidia-a10-pcie-vs-nvidia-quadro-rtx-4000 (72 SMs)"
A10_USABLE = "https://github.com/aalanwyr/face2cuda step2cuda/README.md (CUDA: 23609475072 bytes, 1695 MHz)"
L40S = (
    "NVIDIA L40S data sheet, https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413 "
    "(48 GB, 864 GB/s, 362.05 TFLOPS; 18,176 cores of 128 an SM)"
)
L40S_CHIP = (
    "https://m.reach.dog/shop/computizer/products/nvidia-l40s-48gb-gddr6-graphics-card-for-ai-and-graphics-performance"
)
L40S_USABLE = "https://github.com/Wan-Video/Wan2.1/issues/205 (total capacity of 44.53 GiB)"
A100 = (
    "NVIDIA A100 data sheet, https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf (40 GB: 1,555 GB/s; 80 GB, SXM: 2,039 GB/s; 312 TFLOPS)"
)
A100_QUERY = "https://gist.github.com/gengwg/3520df2ebf8872e5ee4818367e3a4122 (deviceQuery)"
A100_USABLE = "https://upb-pc2.atlassian.net/wiki/spaces/PC2DOK/pages/1900609 (deviceQuery: 42405855232 bytes)"
H100 = (
    "NVIDIA H100 data sheet, https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet "
    "(SXM: 80 GB, 3.35 TB/s, 989 TFLOPS without sparsity)"
)
H100_CHIP = "https://glennklockwood.com/garden/processors/h100 (132 SMs, 1.98 GHz; cites NVIDIA's)"
H100_USABLE = "what CUDA says of one (docs/benchmarks/plan-3ee60f8.json, total_memory): 79.18 GiB"
H200 = (
    "NVIDIA H200 data sheet, https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446 "
    "(SXM: 141 GB, 4.8 TB/s, 1,979 TFLOPS with sparsity, half without)"
)
H200_CHIP = "https://www.saulelectric.com/nvidia-h200.html (132 SMs)"
H200_CLOCK = (
    "https://geektopia.es/es/technology/2023/11/13/noticias/"
    "nvidia-anuncia-la-aceleradora-h200-tiene-141-gb-de-hbm3e.html"
)
H200_USABLE = (
    "what CUDA says of one (docs/benchmarks/generation-ffe395f.json, total_bytes): 139.8 GiB, all for programs"
)
B200 = "NVIDIA DGX B200 product page, https://www.nvidia.com/en-us/data-center/dgx-b200/ (8 GPUs: 1,440 GB, 64 TB/s)"
B200_RATE = (
    "NVIDIA HGX product page, https://www.nvidia.com/en-us/data-center/hgx/ "
    "(8 GPUs: 36 PFLOPS of 16 bits with sparsity, half without)"
)
B200_CHIP = (
    "https://developer.nvidia.com/blog/boost-gpu-memory-performance-with-no-code-changes-using-nvidia-cuda-mps/ "
    "(148 SMs)"
)
B200_CLOCK = "https://hmc-tech.com/gpus/nvidia-b200-vs-nvidia-b100 (1.98 GHz)"
B200_USABLE = "https://github.com/pytorch/ao/pull/4002 (CUDA: 178.35 GiB, 148 SMs)"
L4_USABLE = "what CUDA says of one, in several public logs: 23659151360 bytes"
RTX_3090_USABLE = "https://github.com/Jumperkables/cuda-benchmarking 00_deviceQuery/README.md (25286672384 bytes)"
RTX_4090_USABLE = "https://github.com/3DTopia/Phidias-Diffusion/issues/8 (total capacity of 23.64 GiB)"
RTX_5090_USABLE = "https://github.com/Wan-Video/Wan2.1/issues/465 (total capacity of 31.37 GiB)"
SYSTEM = "what a Jetson's system has of its memory, see PART"


@dataclass(frozen=True)
class Device:
    """One board or card.

    bandwidth: 1e9 bytes per second. memory: 2^30 bytes. clock: MHz, the highest of the GPU. usable: the 2^30 bytes of
    memory that CUDA reports; None: not known. tflops: 1e12 dense 16-bit operations per second of matrix products,
    summed in float32; None: not known.

    reported_names: what the machine calls itself, any of them. A Jetson's are words of its device tree. A card's are
    CUDA's name as a whole, "NVIDIA" before it or not: "GH200", "H200 NVL" and parts of a card ("H200 MIG 1g.18gb") are
    others. sources: field -> where the fact is from.
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
        """Thread-instructions per second that all SMs can issue."""
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
        {"sms": THOR_QUERY, "clock": THOR_CLOCK, "bandwidth": THOR, "memory": THOR}, least_triton="3.9",
    ),
    Device(
        "rtx-3090", "GeForce RTX 3090 (24 GB)", (8, 6), 82, 1695, 936, 24, ("GeForce RTX 3090",),
        {"sms": AMPERE, "clock": AMPERE, "bandwidth": AMPERE, "memory": AMPERE, "usable": RTX_3090_USABLE,
         "tflops": AMPERE},
        jetson=False, usable=23.55, tflops=71,
    ),
    Device(
        "rtx-4090", "GeForce RTX 4090 (24 GB)", (8, 9), 128, 2520, 1008, 24, ("GeForce RTX 4090",),
        {"sms": ADA, "clock": ADA, "bandwidth": ADA, "memory": ADA, "usable": RTX_4090_USABLE, "tflops": ADA},
        jetson=False, usable=23.64, tflops=165.2,
    ),
    Device(
        "rtx-5090", "GeForce RTX 5090 (32 GB)", (12, 0), 170, 2407, 1792, 32, ("GeForce RTX 5090",),
        {"sms": BLACKWELL, "clock": BLACKWELL, "bandwidth": BLACKWELL, "memory": BLACKWELL, "usable": RTX_5090_USABLE,
         "tflops": BLACKWELL},
        jetson=False, usable=31.37, tflops=209.5,
    ),
    Device(
        "l4", "L4 (24 GB)", (8, 9), 58, 2040, 300, 24, ("L4",),
        {"sms": L4_CHIP, "clock": L4_CHIP, "bandwidth": L4, "memory": L4, "tflops": L4_RATE, "usable": L4_USABLE},
        jetson=False, usable=22.03, tflops=121,
    ),
    Device(
        "a10", "A10 (24 GB)", (8, 6), 72, 1695, 600, 24, ("A10",),
        {"sms": A10_CHIP, "clock": A10_USABLE, "bandwidth": A10, "memory": A10, "usable": A10_USABLE, "tflops": A10},
        jetson=False, usable=21.99, tflops=125,
    ),
    Device(
        "l40s", "L40S (48 GB)", (8, 9), 142, 2520, 864, 48, ("L40S",),
        {"sms": L40S, "clock": L40S_CHIP, "bandwidth": L40S, "memory": L40S, "usable": L40S_USABLE, "tflops": L40S},
        jetson=False, usable=44.53, tflops=362,
    ),
    Device(
        "a100-40gb", "A100 (40 GB)", (8, 0), 108, 1410, 1555, 40, ("A100-SXM4-40GB", "A100-PCIE-40GB"),
        {"sms": A100_QUERY, "clock": A100_QUERY, "bandwidth": A100, "memory": A100, "usable": A100_USABLE,
         "tflops": A100},
        jetson=False, usable=39.49, tflops=312,
    ),
    Device(
        "a100-80gb", "A100 (SXM, 80 GB)", (8, 0), 108, 1410, 2039, 80, ("A100-SXM4-80GB",),
        {"sms": A100_QUERY, "clock": A100_QUERY, "bandwidth": A100, "memory": A100, "tflops": A100,
         "usable": "no figure of this card was found: twice the 40 GB card's"},
        jetson=False, usable=78.98, tflops=312,
    ),
    Device(
        "h100", "H100 (SXM, 80 GB)", (9, 0), 132, 1980, 3350, 80, ("H100 80GB HBM3",),
        {"sms": H100_CHIP, "clock": H100_CHIP, "bandwidth": H100, "memory": H100, "tflops": H100,
         "usable": H100_USABLE},
        jetson=False, usable=79.18, tflops=989,
    ),
    Device(
        "h200", "H200 (SXM, 141 GB)", (9, 0), 132, 1930, 4800, 141, ("H200",),
        {"sms": H200_CHIP, "clock": H200_CLOCK, "bandwidth": H200, "memory": H200, "usable": H200_USABLE,
         "tflops": H200},
        jetson=False, usable=139.8, tflops=989,
    ),
    Device(
        "b200", "B200 (180 GB)", (10, 0), 148, 1980, 8000, 180, ("B200",),
        {"sms": B200_CHIP, "clock": B200_CLOCK, "bandwidth": B200, "memory": B200, "usable": B200_USABLE,
         "tflops": B200_RATE},
        jetson=False, usable=178.35, tflops=2250,
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
    """The Jetson whose GPU calls itself so, as "Orin", and has so many GiB and SMs. None where there is none, or where
    two are alike: Orin Nano, Orin Nano Super and Orin NX of 8 GB are.
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
