"""Options of a command by name: at their defaults, or from a file, read as the command line reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import TYPE_CHECKING

from kvcal.cli.signature import options_class
from kvcal.pipeline.spec import Options

if TYPE_CHECKING:
    from typer import Typer
    from typer._click import Command, Parameter


class _Program:
    """The commands by name, and the program that Typer makes of them; `register` sets both."""

    commands: Mapping[str, Callable[..., None]]
    app: Typer


def register(commands: Mapping[str, Callable[..., None]], app: Typer) -> None:
    """Set the commands and the program. app.py, which imports all commands, calls this once: commands ask this module
    for each other's options, so it cannot import app.py.
    """
    _Program.commands, _Program.app = commands, app


def defaults_of(command: str) -> dict[str, object]:
    """Option name -> default, as `kvcal COMMAND` alone would have them; without those that must be given."""
    options = options_class(_Program.commands[command])
    return {one.name: one.default for one in fields(options) if one.default is not MISSING}


def options_of(command: str, values: Mapping[str, object]) -> Options:
    """All options of `kvcal COMMAND`: `values`, read and checked as on the command line, and else the defaults.

    A list is repeated, or joined by commas where the option is given once. Raises UsageError in the words of the
    command line.
    """
    from kvcal_artifacts.errors import UsageError

    parser = _parsers()[command]
    parameters = {parameter.name: parameter for parameter in parser.params}
    words = [word for name, value in values.items() for word in _words(parameters[name], value)]
    try:
        read = parser.make_context(command, words).params
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise UsageError(" ".join(error.format_message().split()).rstrip(".")) from error
    return options_class(_Program.commands[command])(**{name: read[name] for name in values})


@cache
def _parsers() -> Mapping[str, Command]:
    """Every command's; made once, as a recipe asks again and again."""
    import typer

    root = typer.main.get_command(_Program.app)
    assert isinstance(root, typer.core.TyperGroup)  # of several commands
    return root.commands


def _words(parameter: Parameter, value: object) -> list[str]:
    """What stands on the command line for an option with this value."""
    from kvcal_artifacts.errors import UsageError

    if parameter.param_type_name == "argument":
        return [str(value)]
    flag = bool(getattr(parameter, "is_flag", False))
    if isinstance(value, dict) or isinstance(value, bool) != flag:
        kinds = "true or false" if flag else "text, a number, or a list of them"
        raise UsageError(f"{parameter.name} is {value!r}; it must be {kinds}")
    if flag:
        return list(parameter.opts[:1] if value else parameter.secondary_opts[:1])
    if isinstance(value, list) and not value:
        raise UsageError(f"{parameter.name} is an empty list; leave it out")
    parts = [str(part) for part in value] if isinstance(value, list) else [str(value)]
    parts = parts if parameter.multiple else [",".join(parts)]
    return [word for part in parts for word in (parameter.opts[0], part)]
