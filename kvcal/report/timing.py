"""Where the time went: wall seconds by phase, each second counted once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ahead = 0.0  # seconds of an import that came before the command


def command_start() -> float:
    """Return the time.monotonic() at which a command began, what was imported for it included."""
    return time.monotonic() - _ahead


@contextmanager
def importing_ahead() -> Iterator[None]:
    """Count what is imported within, before a command, as the command's own phase "import"."""
    global _ahead
    began = time.monotonic()
    yield
    _ahead = time.monotonic() - began


class PhaseTimer:
    """`with timer("forward"): ...` adds wall time to a phase; an inner phase interrupts the outer one.

    Kernels run after the call that launched them, so a phase begins and ends by waiting for the current CUDA stream.
    Copies that run ahead on other streams stay in flight.

    device: whose stream that is; it may be set later, where phases come before it is known.
    """

    IMPORT = "import"

    def __init__(self, device: torch.device | str = "cpu", clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self.device = device
        self._clock = clock
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._charge()
        self.seconds.setdefault(phase, 0.0)
        self._open.append(phase)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        """Give the time since the last change of phase to the phase that was open."""
        _wait_for(self.device)
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def count_imports(self) -> None:
        """Charge the phase IMPORT with what was imported ahead of the command."""
        self.seconds[self.IMPORT] = self.seconds.get(self.IMPORT, 0.0) + _ahead

    @property
    def total(self) -> float:
        """Seconds in any phase."""
        return sum(self.seconds.values())

    def split(self) -> dict[str, float]:
        """Seconds by phase, longest first, rounded to milliseconds: what goes into `--json`."""
        ordered = sorted(self.seconds.items(), key=lambda item: -item[1])
        return {phase: round(seconds, 3) for phase, seconds in ordered}

    def __str__(self) -> str:
        """A line such as: forward 61.2 s (58 %) · solve 30.1 s (28 %) · load 14.7 s (14 %)."""
        total = self.total or 1.0
        parts = [f"{phase} {seconds:.1f} s ({seconds / total:.0%})" for phase, seconds in self.split().items()]
        return " · ".join(parts).replace("%)", " %)")


def _wait_for(device: torch.device | str) -> None:
    if str(device).startswith("cuda"):
        import torch

        torch.cuda.current_stream(device).synchronize()
