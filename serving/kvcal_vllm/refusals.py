"""One line of the log for what ends an engine: vLLM ends with a traceback of each of its processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvcal_artifacts.errors import KVCalError

logger = logging.getLogger("vllm.kvcal")  # below vLLM's own, whose level and format it takes


@contextmanager
def one_line() -> Iterator[None]:
    """Log an error of kvcal's that is raised inside, in a line that begins with "kvcal: "."""
    try:
        yield
    except KVCalError as error:
        logger.error("kvcal: %s", str(error).removeprefix("kvcal: "))
        raise
