"""The command line. `app.py` lists the commands; a file per group holds them. Nothing here imports torch."""

from __future__ import annotations

import sys

from kvcal.cli import interrupt


def main() -> None:
    """The `kvcal` program."""
    interrupt.install()
    try:
        from kvcal.cli.app import main as run

        run()
    except KeyboardInterrupt:  # before a command began
        print("kvcal: interrupted", file=sys.stderr)
        sys.exit(130)


__all__ = ["main"]
