"""Time of a kernel from what it must read and what it must compute: launch + max(bytes / bandwidth, instructions / rate).

Instructions are thread-instructions a key or value element, whole loop (loads, unpacking, softmax, matrix products), all query
heads of the kv head together; counted in SASS for sm_90 with tiles of 128 or 256 tokens of head_dim 128. Other GPUs are
assumed to need as many. They are counts of designs: `counted` says where each is from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcal_artifacts.codecs import Codec, Exact, Higgs, MixKVQ, Predicted, Scaled, Squat, Uniform

from .devices import Device

COUNTED: dict[str, tuple[float, str]] = {
    "16 bit": (1.38, "FP16 loop"),
    "4 bit": (1.68, "4 bit, two values a register"),
    "3 bit": (2.5, "3 bit as planes of 2 and 1 bits"),
    "2 bit": (1.52, "2 bit, two values a register"),
    "8 bit": (4.2, "plain casts"),
    "grid": (4.1, "16 levels by byte permute"),
    "gather": (10.4, "centroids gathered from memory"),
}


@dataclass(frozen=True)
class Machine:
    """A device as its kernels find it. efficiency: part of the data-sheet bandwidth that reading reaches; launch: µs."""

    device: Device
    efficiency: float
    launch: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.efficiency * self.device.bandwidth * 1e9

    def reading(self, size: float) -> float:
        """µs to read so many bytes, nothing else."""
        return size / self.bandwidth * 1e6

    def time(self, size: float, elements: float = 0, instructions: float = 0, launches: int = 1) -> float:
        """µs of kernels that read `size` bytes and spend so many instructions on each element."""
        issuing = elements * instructions / self.device.issue_rate * 1e6
        return launches * self.launch + max(self.reading(size), issuing)

    def implied(self, size: float, microseconds: float, launches: int = 1) -> float:
        """1e9 bytes a second that a measured time means, the launches taken off."""
        return size / (microseconds - launches * self.launch) / 1e3


def fit(device: Device, sizes: Sequence[float], microseconds: Sequence[float], launches: int) -> Machine:
    """Efficiency and launch time from two measurements of the same kernels: the line through both."""
    (small, large), (short, long) = sizes, microseconds
    slope = (long - short) / (large - small)  # µs a byte
    return Machine(device, 1e-3 / slope / device.bandwidth, (short - slope * small) / launches)


def counted(codec: Codec) -> tuple[float, str]:
    """Instructions an element of the fused decode kernel for this storage, and what they were counted for."""
    if isinstance(codec, Scaled | Squat | Predicted):
        return counted(codec.inner)
    if isinstance(codec, Exact):
        return COUNTED["16 bit"]
    if isinstance(codec, Uniform):
        return COUNTED.get(f"{codec.bits} bit", COUNTED["8 bit"])
    if isinstance(codec, MixKVQ):
        return COUNTED["4 bit"]
    if isinstance(codec, Higgs) and codec.d == 1 and codec.n <= 16:
        return COUNTED["grid"]
    return COUNTED["gather"]
