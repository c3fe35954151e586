"""Silence of the Hugging Face libraries, whose errors kvcal reports in one line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

NOISY = ("huggingface_hub", "transformers", "datasets", "httpx", "httpx2", "filelock", "fsspec")


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines of the Hugging Face libraries inside; their levels are put back afterwards."""
    loggers = [logging.getLogger(name) for name in NOISY]
    levels = [logger.level for logger in loggers]
    _set_levels(loggers, [logging.CRITICAL] * len(loggers))
    try:
        yield
    finally:
        _set_levels(loggers, levels)


def _set_levels(loggers: list[logging.Logger], levels: list[int]) -> None:
    """Set the levels of loggers.

    `setLevel` makes every logger of the process forget what it remembers of levels, 0.3 ms where torch is imported:
    only the last of these does so, for all of them.
    """
    for logger, level in zip(loggers, levels, strict=True):
        logger.level = level
    loggers[-1].setLevel(levels[-1])
