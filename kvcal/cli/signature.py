"""Typer's signature of a command, from the dataclass of its options."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from kvcal.cli.launched import as_rank
from kvcal.pipeline.spec import Options, Spec, specs

O = TypeVar("O", bound=Options)  # noqa: E741
Typed = frozenset[str]  # names of the options that somebody gave, be it at their default


def command(
    options: type[O], *, light: bool = False, spread: bool = False
) -> Callable[[Callable[[O, Typed], None]], Callable[..., None]]:
    """Make a function of typed options a command of Typer, which reads loose ones from its signature. The function also
    takes the names of those that somebody gave.

    light: whether the command may do its work without torch, which is then not imported before it. spread: whether
    processes that torchrun started share its work; others are refused there.
    """

    def decorated(run: Callable[[O, Typed], None]) -> Callable[..., None]:
        @functools.wraps(run)
        def call(typer_context: typer.Context, **values: Any) -> None:  # plan has an option --context
            from kvcal.commands.early import refuse  # a command's imports take seconds

            o = options(**values)
            refuse(o)
            if not light:
                _import_torch()
            as_rank(lambda: run(o, typed_of(typer_context)), typer_context.info_name or "", spread, o)

        parameters = [inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        parameters += _parameters(options)
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.options = options  # type: ignore[attr-defined]
        return call

    return decorated


def _import_torch() -> None:
    """Import torch without the garbage collector: 1.0 s of CPU instead of 1.4 (docs/benchmarks/startup.py).

    An import leaves hundreds of thousands of objects and hardly any garbage. They are frozen, so that neither later
    collections nor the end of the process walks them.
    """
    if "torch" in sys.modules or not gc.isenabled():
        return
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def options_class(run: Callable[..., None]) -> type[Options]:
    """The dataclass of the options of a command from `command`."""
    options: type[Options] = run.options  # type: ignore[attr-defined]
    return options


def typed_of(context: typer.Context) -> Typed:
    """Names of the options that somebody gave."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name != "DEFAULT")


def _parameters(options: type[Options]) -> list[inspect.Parameter]:
    """Parameters in the order of the help: what has a place, then panel after panel, the command's first."""
    by_name, kinds = specs(options), get_type_hints(options)
    defaults = {one.name: inspect.Parameter.empty if one.default is MISSING else one.default for one in fields(options)}
    names = [name for name, one in by_name.items() if one.argument]
    names += sorted(by_name.keys() - set(names), key=lambda name: _place(options, name, by_name[name]))
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults[name],
            annotation=Annotated[kinds[name], _typer(name, by_name[name])],
        )
        for name in names
    ]


PANELS = ("Model", "Text", "Scheme", "Search", "Cache", "Gates", "Machine", "Output")  # others stand before Machine


def _place(options: type[Options], name: str, spec: Spec) -> tuple[float, int]:
    panel = spec.panel or ""
    order = [one.name for one in fields(options)]
    return PANELS.index(panel) if panel in PANELS else PANELS.index("Machine") - 0.5, order.index(name)


def completion(spec: Spec) -> Callable[[str], list[str]]:
    """What the shell offers for the beginning of a value."""

    def complete(incomplete: str) -> list[str]:
        from kvcal.models.catalogue import CATALOGUE
        from kvcal.pipeline.names import names_of

        offered = [*spec.one_of, *spec.words, *names_of(*spec.names)]
        offered += CATALOGUE if "model" in spec.names else []
        offered += ["auto", "cpu", "cuda"] if "machine" in spec.names else []
        before, comma, last = incomplete.rpartition(",") if spec.listed else ("", "", incomplete)
        return [f"{before}{comma}{name}" for name in offered if name.startswith(last)]

    return complete


def _typer(name: str, spec: Spec) -> Any:
    """Typer's description of an option."""
    complete = completion(spec) if spec.names or spec.one_of or spec.words else None
    if spec.argument:
        return typer.Argument(help=spec.help, autocompletion=complete)
    flags = spec.flags or ((f"--{name.replace('_', '-')}",) if spec.only_on else ())
    return typer.Option(
        *flags, help=spec.help, rich_help_panel=spec.panel, min=spec.at_least, max=spec.at_most, autocompletion=complete
    )
