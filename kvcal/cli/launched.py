"""A command as one of the processes that `torchrun` started: rank 0 prints, and one rank says what failed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout

import typer

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets

LINE_SECONDS = 30.0  # in which rank 0 has imported what it needs, and printed why it ends


def processes() -> int:
    """How many processes torchrun started together with this one, as the environment says; 1 without it."""
    if any(name not in os.environ for name in LAUNCHED):
        return 1
    count = os.environ["WORLD_SIZE"]
    return int(count) if count.isdecimal() else 1


def as_rank(run: Callable[[], None], name: str, spread: bool, options: object) -> None:
    """Run a command, `name`, which shares its work with the other processes if there are any. spread: whether it can;
    any can share a model that they hold together (--tp-plan).

    Raises UsageError, on rank 0, for a command that cannot; the others wait until that ends them, without a word.
    """
    if (count := processes()) == 1:
        run()
    elif (tp_plan := getattr(options, "tp_plan", None) is not None) or spread:
        _share(run, str(getattr(options, "device", "auto")), tp_plan)
    elif os.environ["RANK"] == "0":
        from kvcal_artifacts.errors import UsageError

        raise UsageError(
            f"`kvcal {name}` is not spread over processes, and torchrun started {count}: start it without torchrun"
        )
    else:
        time.sleep(LINE_SECONDS)  # torchrun ends all with the first that ends: rank 0, which has a line to print
        raise typer.Exit(2)


def _share(run: Callable[[], None], device: str, hold_one_model: bool) -> None:
    from kvcal.capture.ranks import LinePrintedError, ShareDoneError, joined
    from kvcal.report.timing import importing_ahead

    # Before ranks wait for each other: it may take longer on one than on another, and longer beside the threads and the
    # memory that torch.distributed and CUDA take.
    with importing_ahead(), nullcontext() if os.environ["RANK"] == "0" else _silent():
        import transformers.modeling_utils  # noqa: F401
    try:
        with joined(device, hold_one_model) as ranks:
            if ranks.rank == 0:
                run()
                return
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
            with _silent():
                run()
    except ShareDoneError:
        return
    except LinePrintedError as error:
        raise typer.Exit(error.exit_code) from error


@contextmanager
def _silent() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
