"""Clocks: medians of a closure with caches cold, and what the device copies and multiplies at best."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kvcal_kernels.device import on

WARM_UP = 3
LEAST_REPEATS = 3
COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
CPU_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
UNKNOWN_CACHE = 1 << 26
FLUSH_CUDA = 1 << 30  # bytes: takes the GPU half a millisecond, in which the host launches what is timed

Run = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """The time of a call over its repeats. microseconds: median. low, high: first and ninth decile."""

    microseconds: float
    low: float
    high: float
    repeats: int


@dataclass
class Clock:
    """Times closures on one device, caches flushed before each. repeats: at most; seconds: at most a closure, from its
    warm-up on (LEAST_REPEATS run whatever they take).

    CPU: wall time. CUDA: events around the closure on this device, which is the current one meanwhile; the flush before
    it is long enough to hide its first launches.
    """

    device: torch.device
    repeats: int = 50
    seconds: float = 2.0
    _flush: Tensor | None = None
    _ceilings: dict[str, float] = field(default_factory=dict)

    def time(self, run: Run, repeats: int | None = None) -> Timed:
        """Time a closure with caches cold. repeats: instead of the clock's number."""
        with on(self.device):
            return self._time(run, repeats or self.repeats)

    def _time(self, run: Run, repeats: int) -> Timed:
        self.spare()  # allocated before memory is short
        started = time.perf_counter()
        for _ in range(WARM_UP):
            run()
            self.wait()
            if time.perf_counter() - started > self.seconds:
                break
        taken: list[float] = []
        while len(taken) < repeats:
            taken.append(self._once(run))
            if len(taken) >= LEAST_REPEATS and time.perf_counter() - started > self.seconds:
                break
        ordered = sorted(taken)
        low, high = (ordered[math.floor(part * (len(ordered) - 1) + 0.5)] for part in (0.1, 0.9))
        return Timed(statistics.median(ordered), low, high, len(ordered))

    def _once(self, run: Run) -> float:
        self.spare().add_(1)
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e3
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def spare(self) -> Tensor:
        """A buffer at least twice as large as the last cache: touching it empties the cache."""
        if self._flush is None:
            size = 2 * last_cache(self.device)
            if self.device.type == "cuda":
                size = max(size, min(FLUSH_CUDA, torch.cuda.mem_get_info(self.device)[0] // 16))
            self._flush = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._flush

    def buffer_to_come(self) -> int:
        """Bytes of the buffer of `spare` where it is not made yet, on a CPU: on a GPU it is a part of what is free."""
        return 0 if self._flush is not None or self.device.type == "cuda" else 2 * last_cache(self.device)

    def copy_bandwidth(self) -> float:
        """Bytes per second, read and written ones together, of one large copy; measured once."""
        if "copy" not in self._ceilings:
            size = COPY_BYTES[self.device.type]
            one = torch.ones(size, dtype=torch.uint8, device=self.device)
            other = torch.empty_like(one)
            self._ceilings["copy"] = 2 * size / self.time(lambda: other.copy_(one)).microseconds * 1e6
        return self._ceilings["copy"]

    def read_bandwidth(self) -> float:
        """Bytes per second of summing one large float32 buffer; measured once."""
        if "read" not in self._ceilings:
            size = COPY_BYTES[self.device.type]
            one = torch.ones(size // 4, device=self.device, dtype=torch.float32)
            self._ceilings["read"] = size / self.time(one.sum).microseconds * 1e6
        return self._ceilings["read"]

    def matmul_rate(self, again: bool = False) -> float:
        """Operations per second of torch's bfloat16 product of two square matrices (float32 on a CPU); measured once.
        again: once more, by the first decile, to tell the device's speed from what else kept it busy; the higher rate
        stays.
        """
        if again or "matmul" not in self._ceilings:
            size = MATMUL_SIZE[self.device.type]
            dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
            one = torch.randn(size, size, device=self.device, dtype=torch.float32).to(dtype)
            timed = self.time(lambda: one @ one)
            rate = 2 * size**3 / (timed.low if again else timed.microseconds) * 1e6
            self._ceilings["matmul"] = max(rate, self._ceilings.get("matmul", 0.0))
        return self._ceilings["matmul"]

    @property
    def ceilings(self) -> dict[str, float]:
        """What has been measured of the device: `copy` and `read` bytes, `matmul` operations per second."""
        return dict(self._ceilings)

    def release(self) -> None:
        """Let the buffer go, before others fill the memory; what is timed next makes another."""
        self._flush = None


def last_cache(device: torch.device) -> int:
    """Bytes of the cache nearest to memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for file in CPU_CACHE.glob("index*/size"):
        text = file.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes, default=UNKNOWN_CACHE)
