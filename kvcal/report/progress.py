"""Progress on stderr for anything over a second.

    with progress("Fitting layers", total=28) as advance:
        for layer in layers:
            ...
            advance()

In a terminal it is a bar with done, total, time and time left, and a progress inside another is a second bar below it.
Elsewhere (a log, a pipe) it is a line now and then that says the same. `HF_HUB_DISABLE_PROGRESS_BARS=1`, which
`kvcal --quiet` sets, switches it off. rich is imported only when a bar is drawn.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from kvcal_artifacts.shown import shown

from .quantities import duration

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")
Advance = Callable[..., None]  # advance(steps=1, total=None); total: where it shows only now

SECONDS_BETWEEN_LINES = 30.0
LEAST_SECONDS_ESTIMATED = 5.0  # less is not printed
LEAST_SECONDS_REPORTED = 10.0  # what took longer ends with a line

_bars: Progress | None = None  # a terminal has one live display: the outermost progress owns it


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Advance]:
    """Yields `advance(steps=1, total=None)`, which may also give the total. Without a total it counts."""
    description = shown(description)  # names of models are in it
    if _disabled():
        yield lambda steps=1, total=None: None
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bar(description, total) as advance:
            yield advance
    else:
        lines = _Lines(description, total)
        yield lines.advance
        lines.end()


def tracked(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """The items, with progress: one is done when the next is asked for."""
    with progress(description, total=total) as advance:
        for item in items:
            yield item
            advance()


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
        yield lambda steps=1, total=None: bars.update(task, advance=steps, total=total)
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


class Items:
    """Says of so many items which one begins, and how long those left take at the pace of those that are done.

    already: how many of them a run before has done.
    """

    def __init__(self, say: Callable[[str], object], total: int, already: int = 0) -> None:
        self._say, self._total, self._already = say, total, already
        self._begun, self._started = 0, time.monotonic()

    def begin(self, label: str) -> None:
        done, self._begun = self._begun, self._begun + 1
        remaining = _time_remaining(time.monotonic() - self._started, done, self._total - self._already)
        self._say(f"{self._already + self._begun}/{self._total} {label}{remaining}")


def _time_remaining(elapsed: float, done: int, total: int | None) -> str:
    """ ", about 3 min 5 s left", at the pace so far; empty where it is unknown or next to nothing."""
    seconds = elapsed / done * (total - done) if done and total is not None else 0.0
    return f", about {duration(seconds)} left" if seconds >= LEAST_SECONDS_ESTIMATED else ""


class _Lines:
    """A line every half minute, and one at the end: enough to see in a log that it lives and how long it took, nothing
    at all for what is quick.
    """

    def __init__(self, description: str, total: int | None) -> None:
        self.description, self.total = description, total
        self.done = self.printed_done = 0
        self.started = self.printed = time.monotonic()

    def advance(self, steps: int = 1, total: int | None = None) -> None:
        self.done += steps
        self.total = self.total if total is None else total
        now = time.monotonic()
        if now - self.printed < SECONDS_BETWEEN_LINES:
            return
        self.printed, self.printed_done = now, self.done
        self._print(now - self.started, _time_remaining(now - self.started, self.done, self.total))

    def end(self) -> None:
        elapsed = time.monotonic() - self.started
        if elapsed >= LEAST_SECONDS_REPORTED and self.printed_done < self.done:
            self._print(elapsed)

    def _print(self, elapsed: float, remaining: str = "") -> None:
        of_total = "" if self.total is None else f"/{self.total:,}"
        text = f"{self.description}: {self.done:,}{of_total} after {duration(elapsed)}{remaining}"
        print(text, file=sys.stderr, flush=True)
