"""How an option is declared: a field of a frozen dataclass, with its type, default, range and help.

The command line reads such classes to parse what somebody types, recipes and records to check what a file says. Imports
neither torch nor Typer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Spec:
    """How an option is typed. flags: as --model and -m, by default from the name. at_least, at_most: of numbers.

    argument: has a place instead of a name. panel: its heading in the help, where not that of its group. one_of: all
    that it may be. The shell completes it with these, with `words`, and with all `names` of a kind: model, preset,
    codec, scheme, operation, device. listed: whether it is several of them, with commas between.
    """

    help: str
    flags: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None
    argument: bool = False
    only_on: bool = False
    panel: str | None = None
    one_of: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    listed: bool = False


def option(
    default: T,
    help: str,
    *flags: str,
    at_least: float | None = None,
    at_most: float | None = None,
    panel: str | None = None,
    one_of: tuple[str, ...] = (),
    names: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    listed: bool = False,
) -> T:
    """A field that is an option; of a bool that is on, --NAME and --no-NAME."""
    spec = Spec(help, flags, at_least, at_most, panel=panel, one_of=one_of, names=names, words=words, listed=listed)
    return field(default=default, metadata={"option": spec})


def flag(help: str, panel: str | None = None) -> bool:
    """A field that only --NAME turns on."""
    return field(default=False, metadata={"option": Spec(help, only_on=True, panel=panel)})


def argument(default: T, help: str, names: tuple[str, ...] = (), words: tuple[str, ...] = ()) -> T:
    """A field that has a place on the command line and may be absent."""
    return field(default=default, metadata={"option": Spec(help, argument=True, names=names, words=words)})


def required(kind: type[T], help: str, *flags: str) -> T:
    """A required field of type `kind`: an option with flags, a place on the command line without."""
    value: T = field(metadata={"option": Spec(help, flags, argument=not flags)})
    return value


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every command takes. panel: the heading of the class's options in the help."""

    panel: ClassVar[str] = "Output"

    json: bool = flag("Print JSON on stdout instead of a table.")
    wide: bool = flag("All columns and digits, in lines of any length.")

    def by_name(self) -> dict[str, object]:
        """All options by name, without copying any."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def specs(options: type[Options]) -> dict[str, Spec]:
    """How each field of a class is typed. A field that a class gives another default keeps what its group says."""
    by_name: dict[str, Spec] = {}
    panels: dict[str, str] = {}
    for kind in reversed([kind for kind in options.__mro__ if issubclass(kind, Options)]):
        annotated = vars(kind).get("__annotations__", {})
        for one in fields(kind):
            if (name := one.name) not in annotated:
                continue
            by_name[name] = one.metadata.get("option") or by_name[name]
            panels[name] = by_name[name].panel or panels.get(name) or kind.panel
    return {
        one.name: Spec(**{**vars(by_name[one.name]), "panel": panels[one.name]})
        for one in fields(options)
        if one.name in by_name
    }


OptionsOf = Callable[[str, Mapping[str, object]], Options]  # kvcal.cli.defaults.options_of
DefaultsOf = Callable[[str], Mapping[str, object]]
