"""The command line. `app.py` lists the commands; a file per group holds them. Nothing here imports torch."""

from kvcal.cli.app import main

__all__ = ["main"]
