"""The `kvcal` program: its commands and its root options."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvcal.cli import (
    bench,
    build,
    bundle,
    check_codec,
    combine,
    compare,
    demo,
    evaluate,
    export,
    failure,
    fit,
    models,
    names,
    norms,
    plan,
    preset,
    probe,
    publish,
    recommend,
    report,
    reproduce,
    subspaces,
    train_codebooks,
    tune_bits,
    tune_thresholds,
)
from kvcal.cli.defaults import register
from kvcal.cli.failure import INTERRUPTED, guarded
from kvcal.cli.help import METHODS, Command, Group, Methods
from kvcal.report.version import __version__
from kvcal_artifacts.shown import message

COMMANDS: dict[str, Callable[..., None]] = {
    "plan": plan.plan,
    "recommend": recommend.recommend,
    "fit-predictors": fit.fit_predictors,
    "combine": combine.combine,
    "fit-norms": norms.fit_norms,
    "fold": norms.fold,
    "export": export.export,
    "preset": preset.preset,
    "tune-thresholds": tune_thresholds.tune_thresholds,
    "tune-bits": tune_bits.tune_bits,
    "measure-subspaces": subspaces.measure_subspaces,
    "train-codebooks": train_codebooks.train_codebooks,
    "probe": probe.probe,
    "build": build.build,
    "check-codec": check_codec.check_codec,
    "inspect": bundle.inspect,
    "verify": bundle.verify,
    "diff": bundle.diff,
    "reproduce": reproduce.reproduce,
    "card": publish.card,
    "push": publish.push,
    "pull": publish.pull,
    "eval": evaluate.evaluate,
    "compare": compare.compare,
    "report": report.report,
    "generate": evaluate.generate,
    "bench": bench.bench,
    "doctor": bench.doctor,
    "models": models.models,
    "names": names.names,
    "demo": demo.demo,
}

# rich_markup_mode=None: plain help, because rich reads "[…]" in a help text as markup.
app = typer.Typer(
    name="kvcal",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
fit_app = typer.Typer(cls=Methods, no_args_is_help=True, rich_markup_mode=None)
for _name, _command in COMMANDS.items():
    app.command(_name, cls=Command)(guarded(_command))
for _method, _name in METHODS.items():
    fit_app.command(_method, cls=Command)(guarded(COMMANDS[_name]))
app.add_typer(
    fit_app,
    name="fit",
    help="Calibrate a method on text. Each is a command of its own, too.",
)
register(COMMANDS, app)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvcal {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print the traceback of an error too (also: KVCAL_DEBUG=1).")
    ] = False,
) -> None:
    """Compress the key-value cache of a language model: calibrate, carry in one file, generate, measure.

    Results go to stdout, progress and errors to stderr.
    """
    # Before torch is imported: OpenMP threads that spin while they wait cost 4 times the run time on two busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # one switch for our bars and the hub's
    if debug:
        os.environ["KVCAL_DEBUG"] = "1"


ClickError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main() -> None:
    try:
        try:
            code = app(prog_name="kvcal", standalone_mode=False)
        finally:
            sys.stdout.flush()
    except OSError as error:  # of stdout: a command's other errors are a line and a code by now
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
        # `kvcal models | head -1`: the reader has left, and nothing is wrong
        if not isinstance(error, BrokenPipeError) and not failure.printed:
            failure.say(failure.NO_STDOUT.format(error.strerror))
    except typer.Abort:
        code = INTERRUPTED
    except ClickError as error:
        code = _usage(error)
    if code == INTERRUPTED and not failure.printed:
        raise KeyboardInterrupt
    sys.exit(code if isinstance(code, int) else 0)


def _misplaced(error: Any) -> str | None:
    """What to say of a root option behind the command; None for every other error."""
    option = getattr(error, "option_name", None)
    if type(error).__name__ != "NoSuchOption" or error.ctx is None or error.ctx.parent is None:
        return None
    if not any(option in parameter.opts for parameter in error.ctx.parent.command.params):
        return None
    return f"{option} goes before the command: kvcal {option} {error.ctx.info_name} …"


def _usage(error: Any) -> int:
    """One line as for every other error; `kvcal` alone, and `kvcal fit`, print their help, which is no error."""
    command = error.ctx.command_path if error.ctx else "kvcal"
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.ctx.get_help())
        return 0
    text = _misplaced(error) or " ".join(error.format_message().split()).rstrip(".")
    print(message(f"kvcal: {text} (see {command} --help)"), file=sys.stderr)
    return int(error.exit_code)
