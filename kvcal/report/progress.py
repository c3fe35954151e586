"""Progress on stderr for anything over a second.

    with progress("Fitting layers", total=28) as advance:
        for layer in layers:
            ...
            advance()

In a terminal it is a bar, and a progress inside another is a second bar below it. Elsewhere (a log, a pipe)
it is a line now and then. `HF_HUB_DISABLE_PROGRESS_BARS=1`, which `kvcal --quiet` sets, switches it off.
rich is imported only when a bar is drawn.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcal_artifacts.shown import shown

if TYPE_CHECKING:
    from rich.progress import Progress

Advance = Callable[..., None]  # advance() or advance(steps)

SECONDS_BETWEEN_LINES = 30.0

_bars: Progress | None = None  # a terminal has one live display: the outermost progress owns it


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Advance]:
    """Yields `advance(steps=1)`. Without a `total` it counts."""
    description = shown(description)  # names of models are in it
    if _disabled():
        yield lambda steps=1: None
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bar(description, total) as advance:
            yield advance
    else:
        yield _Lines(description, total).advance


def _disabled() -> bool:
    return os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in ("1", "ON", "YES", "TRUE")


@contextmanager
def _bar(description: str, total: int | None) -> Iterator[Advance]:
    global _bars
    owner = _bars is None
    if _bars is None:
        _bars = _new_bars(transient=total is None)  # what only says that something goes on leaves no trace
        _bars.start()
    bars = _bars
    task = bars.add_task(description, total=total)
    try:
        yield lambda steps=1: bars.advance(task, steps)
    finally:
        if owner:
            bars.stop()
            _bars = None
        else:
            bars.remove_task(task)


def _new_bars(transient: bool) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=transient,
        redirect_stdout=sys.stdout.isatty(),  # else rich would send results meant for a file to stderr
    )


class _Lines:
    """A line every half minute: enough to see in a log that it lives, nothing at all for what is quick."""

    def __init__(self, description: str, total: int | None) -> None:
        self.description, self.total = description, total
        self.done = 0
        self.started = self.printed = time.monotonic()

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        now = time.monotonic()
        if now - self.printed < SECONDS_BETWEEN_LINES:
            return
        self.printed = now
        of_total = "" if self.total is None else f"/{self.total}"
        print(
            f"{self.description}: {self.done}{of_total} after {now - self.started:.0f} s",
            file=sys.stderr,
            flush=True,
        )
