"""Ctrl-C that is never lost.

torch's C extension clears a KeyboardInterrupt that arrives while it is imported. Of 7 signals sent 0.27 to 0.32 s after
the start of `kvcal fit-predictors` 6 vanished, and the run went on to its end. So a signal that arrives during such an
import is kept until the import is over.

When a command is over, Python waits for threads, as for one that writes a checkpoint to a slow disk. Ctrl-C then ends
the process at once: Python would print a traceback. Files have their names only when they are whole.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

IMPORTED = ("torch", "transformers", "numpy")
AGAIN = 0.05  # seconds


def install() -> None:
    """Take SIGINT over from Python, unless it is ignored (a background job) or somebody else's."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _interrupt)


def command_is_over() -> None:
    """Let Ctrl-C end the process from here on without a word, with exit code 130."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _importing() and hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, AGAIN)
        return
    raise KeyboardInterrupt


def _importing() -> bool:
    specs = [getattr(sys.modules.get(name), "__spec__", None) for name in IMPORTED]
    return any(getattr(spec, "_initializing", False) for spec in specs)
