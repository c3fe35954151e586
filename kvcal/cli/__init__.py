"""The command line. `app.py` lists the commands; a file per group holds them. Nothing here imports torch."""

from __future__ import annotations

import gc
import sys

from kvcal.cli import interrupt

# New objects after which the collector looks for cycles, instead of Python's (700, 10, 10): importing torch makes very
# many that stay, and a sixth of its time went into looking through them.
COLLECT_AFTER = (10_000, 10, 10)


def main() -> None:
    """The `kvcal` program."""
    interrupt.install()
    gc.set_threshold(*COLLECT_AFTER)
    try:
        from kvcal.cli.app import main as run

        run()
    except KeyboardInterrupt:  # before a command began
        print("kvcal: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        interrupt.command_is_over()


__all__ = ["main"]
