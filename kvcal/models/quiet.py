"""Silence of the Hugging Face libraries, whose errors kvcal says in one line of its own."""

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
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
