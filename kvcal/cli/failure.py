"""What a failed command prints and returns: one line on stderr, one documented exit code."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

import typer

from kvcal_artifacts.shown import message

P = ParamSpec("P")
R = TypeVar("R")

DIFFERENT, INTERRUPTED = 7, 130
EXIT_CODES = {
    0: "done",
    1: "error",
    2: "usage: no such command or option, or a value that cannot be read",
    3: "a quality gate failed",
    4: "the bundle is missing, damaged, of an unknown format, or belongs to another model",
    5: "a model, data set or repository on the hub is not available: gated, offline, no permission, no such name or "
    "revision",
    6: "out of memory, on the host or on the device",
    DIFFERENT: "`kvcal diff` or `kvcal reproduce` found a difference (1, which diff uses for it, is an error here)",
    8: "`--require-kernels`, and a layer cannot take the fused kernel",
    INTERRUPTED: "interrupted (Ctrl-C)",
}


NO_STDOUT = "stdout: cannot be written: {}; send it where there is room"
LARGEST = 2**63 - 1  # whole numbers of 64 bits, as seeds are

printed: list[str] = []  # lines printed: Typer turns a Ctrl-C outside a command into a bare exit code


def say(line: str) -> None:
    line = message(line)
    printed.append(line)
    print(f"kvcal: {line}", file=sys.stderr)


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """`command`, with every exception but Typer's own turned into a line and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        _check_sizes(kwargs)
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if os.environ.get("KVCAL_DEBUG", "0") not in ("", "0"):
                traceback.print_exception(error)
            line, code = explain(error, kwargs)
            say(line)
            raise typer.Exit(code) from error

    return run


def _check_sizes(options: Mapping[str, object]) -> None:
    """A number of no use to anybody would end in an overflow of torch's."""
    for name, value in options.items():
        if isinstance(value, int) and value > LARGEST:
            raise typer.BadParameter(f"--{name.replace('_', '-')} {value}: at most {LARGEST}")


def explain(error: BaseException, options: Collection[str] = ()) -> tuple[str, int]:
    """(one line, exit code). options: names of those that the command has."""
    kvcal_error = _loaded("kvcal_artifacts.errors", "KVCalError")
    if kvcal_error and isinstance(error, kvcal_error):
        return _one_line(error), error.exit_code
    if _is_interrupt(error):
        return "interrupted", INTERRUPTED
    if _is_out_of_memory(error):
        return f"out of memory: {_first_sentences(error)}; try {_less(options)}", 6
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return (f"{error.strerror}{where}" if error.strerror else _one_line(error)), 1
    return (
        f"{type(error).__name__}: {_one_line(error)} (for the traceback: kvcal --debug …, or KVCAL_DEBUG=1)",
        1,
    )


def _loaded(module: str, name: str) -> Any:
    """An error class can only have been raised if its module is imported: so nothing needs importing here."""
    return getattr(sys.modules.get(module), name, None)


def _is_interrupt(error: BaseException | None) -> bool:
    """Also behind another error: what is raised while a class is made becomes a RuntimeError before Python 3.12."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def _is_out_of_memory(error: BaseException) -> bool:
    device_oom = _loaded("torch", "OutOfMemoryError")
    if isinstance(error, MemoryError) or (device_oom and isinstance(error, device_oom)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)  # torch has no class for the host


def _less(options: Collection[str]) -> str:
    """What of these takes less memory."""
    less = [f"a smaller --{name}" for name in ("batch", "length") if name in options]
    less += ["fewer --windows"] if "windows" in options else []
    return ", or ".join(less) or "a smaller model, or a machine with more"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _first_sentences(error: BaseException, limit: int = 160) -> str:
    """torch's message goes on with allocator advice for ten lines; the amount is in its beginning."""
    text = _one_line(error)
    return (text if len(text) <= limit else text[:limit].rsplit(". ", 1)[0]).rstrip(". ") or "the host's memory"
