"""The GPU that is planned for: a profile, the card that is there, or a memory and a bandwidth. Nothing imports torch.

The card is asked through the driver's library, which honours CUDA_VISIBLE_DEVICES; no CUDA context is created.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from .. import devices
from ..devices import LANES, Device

DRIVER = "libcuda.so.1"
# CUdevice_attribute of cuda.h
CLOCK_KHZ, PROCESSORS, MEMORY_KHZ, BUS_BITS, MAJOR, MINOR = 13, 16, 36, 37, 75, 76
TRANSFERS = 2  # a memory clock: both its edges


@dataclass(frozen=True)
class Card:
    """A GPU as the planner knows it. memory: bytes for programs; bandwidth: bytes per second; issue_rate:
    thread-instructions per second; flops: dense 16-bit operations per second of matrix products. None: not known.
    no_kernels: why Triton kernels do not run.
    """

    name: str
    title: str
    memory: float
    bandwidth: float | None = None
    issue_rate: float | None = None
    flops: float | None = None
    no_kernels: str | None = None
    asked: bool = False
    sources: dict[str, str] = field(default_factory=dict)


def of_profile(profile: Device) -> Card:
    """What the profile says; its memory as CUDA reports it, if it does."""
    gib = profile.usable or profile.memory
    return Card(
        profile.name,
        profile.title,
        gib * 2**30,
        profile.bandwidth * 1e9,
        profile.issue_rate,
        None if profile.tflops is None else profile.tflops * 1e12,
        profile.why_no_triton,
        sources=dict(profile.sources),
    )


def of_numbers(memory: float, bandwidth: float | None) -> Card:
    """A memory in bytes, all of it for programs, and a bandwidth in bytes per second."""
    return Card(
        "given", "the memory given", memory, bandwidth, sources={"memory": "--memory", "bandwidth": "--bandwidth"}
    )


@dataclass(frozen=True)
class Answers:
    """What the driver says of a GPU. memory: bytes; clocks: kHz."""

    called: str
    memory: int
    processors: int
    clock: int
    memory_clock: int
    bus_bits: int
    capability: tuple[int, int]


def here() -> Card | None:
    """The card of this machine; None where there is none."""
    board = devices.board()
    if board is not None:
        profile = devices.recognised(board, devices.host_memory() / 2**30)
        return None if profile is None else _with_memory(profile, devices.host_memory(), "the system's own MemTotal")
    answers = ask()
    return None if answers is None else of_answers(answers)


def of_answers(answers: Answers) -> Card:
    """The profile of that name with the memory that the driver reports; of another card the driver's figures alone."""
    profile = devices.recognised(answers.called)
    if profile is not None:
        return _with_memory(profile, answers.memory, "the driver (cuDeviceTotalMem)")
    bandwidth = TRANSFERS * answers.memory_clock * 1e3 * answers.bus_bits / 8
    older = answers.capability < devices.TRITON_LEAST
    return Card(
        answers.called,
        answers.called,
        float(answers.memory),
        bandwidth or None,
        answers.processors * LANES * answers.clock * 1e3,
        no_kernels=f"compute capability {answers.capability[0]}.{answers.capability[1]}" if older else None,
        asked=True,
        sources=dict.fromkeys(("memory", "bandwidth", "issue_rate"), "the driver (cuDeviceGetAttribute)"),
    )


def _with_memory(profile: Device, memory: float, source: str) -> Card:
    card = of_profile(profile)
    return Card(**{**vars(card), "memory": float(memory), "asked": True, "sources": {**card.sources, "memory": source}})


def ask(library: Any = None) -> Answers | None:
    """What the driver says of its first GPU; None without a driver or a GPU. library: instead of the driver's."""
    try:
        cuda = ctypes.CDLL(DRIVER) if library is None else library
    except OSError:
        return None
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    calls = (
        lambda: cuda.cuInit(0),
        lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
        lambda: cuda.cuDeviceGetName(name, len(name), device),
        lambda: cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device),
    )
    if any(call() for call in calls):
        return None

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        return 0 if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device) else value.value

    return Answers(
        name.value.decode("utf-8", "replace"),
        memory.value,
        attribute(PROCESSORS),
        attribute(CLOCK_KHZ),
        attribute(MEMORY_KHZ),
        attribute(BUS_BITS),
        (attribute(MAJOR), attribute(MINOR)),
    )
