"""What the header of a bundle holds, field by field. A codec's config and tensors are the codec's to check."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NotRequired, TypedDict, final

from .. import checked
from ..checked import Choice, Free, Hash, Json, Listed, Named, Number, OrNull, Schema, State, Table, Text, Whole, shown
from ..codecs import Role
from ..codecs.origins import Origin
from ..errors import KVCalError
from ..scheme import FRAMES, Frame
from .settings import FIELDS, VERSION

FORMAT = "kvcal"
VERSIONS = (1, 2)  # 2: the scheme selects tokens, which a reader of version 1 would overlook
SUFFIX = ".kvcal.safetensors"
ROLES: tuple[Role, Role] = ("key", "value")


def version_with(selection: bool) -> int:
    """The version of a bundle whose scheme selects tokens, or of one whose scheme does not."""
    return VERSIONS[1] if selection else VERSIONS[0]


class CodecEntry(State):
    """One codec: its settings, [kv heads, head_dim], and by its own names for its tensors theirs in the file."""

    shape: list[int]
    tensors: dict[str, str]


@final
class LayerEntry(TypedDict):
    """The codecs of one layer."""

    key: CodecEntry
    value: CodecEntry


@final
class SkippedEntry(TypedDict):
    """Why a layer has no codecs."""

    skipped: str


class SettingsEntry(TypedDict):
    """The fields of Settings."""

    version: int
    fields: dict[str, Json]


class ModelEntry(TypedDict):
    """The fields of a Fingerprint."""

    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    rope: dict[str, Json]
    config_sha256: str
    revision: str | None
    probe: list[float]
    settings: NotRequired[SettingsEntry]


class WindowsEntry(TypedDict):
    """The fields of Windows."""

    sink: int
    recent: int
    block: int


class SelectionEntry(TypedDict):
    """The fields of HeavyHitters."""

    keep: float
    heavy: float


class SchemeEntry(TypedDict):
    """Windows, frame and token selection of a scheme, and the codecs of each layer."""

    windows: WindowsEntry
    frame: Frame
    selection: NotRequired[SelectionEntry]
    layers: list[LayerEntry | SkippedEntry]


class TensorEntry(TypedDict):
    """What the header says of a tensor in the file."""

    dtype: str
    shape: list[int]
    sha256: str


class Header(TypedDict):
    """The whole header."""

    format: str
    version: int
    model: ModelEntry
    codecs: NotRequired[dict[str, Origin]]
    scheme: SchemeEntry
    provenance: dict[str, Json]
    metrics: dict[str, Json]
    tensors: dict[str, TensorEntry]


_TOKENS, _NUMBER = Whole(0, checked.TOKENS), Number(-1e30, 1e30)
_CODEC = Table(
    {
        "codec": Text(),
        "config": checked.SETTINGS,
        "shape": Listed(Whole(1, checked.HEAD_DIM), 2, 2),
        "tensors": Named(Text()),
    }
)


class _Settings:
    """Settings of a version that this code reads, and none that its list lacks."""

    def check(self, value: object, what: str) -> None:
        Table({"version": Whole(1, VERSION), "fields": Free()}).check(value, what)
        assert isinstance(value, dict)
        fields = {name: _Setting() for name in FIELDS[value["version"]]}
        Table(fields, optional=frozenset(fields)).check(value["fields"], f"{what}, fields")


class _Setting:
    """A number, a text, true, or a list of such values, false and null, at most one for each layer."""

    def check(self, value: object, what: str) -> None:
        if type(value) is list:
            Listed(_Listed(), 0, checked.LAYERS).check(value, what)
        elif value is not True:
            (Text() if type(value) is str else _NUMBER).check(value, what)


class _Listed:
    """An entry of a setting that is a list."""

    def check(self, value: object, what: str) -> None:
        if value is not None and type(value) is not bool:
            (Text() if type(value) is str else _NUMBER).check(value, what)


_LAYER, _SKIPPED = Table({"key": _CODEC, "value": _CODEC}), Table({"skipped": Text(2000)})
_MODEL = Table(
    {
        "architecture": Text(),
        "layers": Whole(1, checked.LAYERS),
        "kv_heads": Whole(1, checked.HEADS),
        "head_dim": Whole(1, checked.HEAD_DIM),
        "rope": Free(),
        "config_sha256": Hash(empty=True),  # empty in the one layer that an unfinished run writes
        "revision": OrNull(Text()),
        "probe": Listed(_NUMBER, 0, 64),
        "settings": _Settings(),
    },
    optional=frozenset({"settings"}),
)


class _Layer:
    """A layer's codecs, or why there are none."""

    def check(self, value: object, what: str) -> None:
        (_SKIPPED if type(value) is dict and "skipped" in value else _LAYER).check(value, what)


_SCHEME = Table(
    {
        "windows": Table({"sink": _TOKENS, "recent": _TOKENS, "block": Whole(1, checked.BLOCK)}),
        "frame": Choice(FRAMES),
        "selection": Table({"keep": Number(0, 1, above=True), "heavy": Number(0, 1)}),
        "layers": Listed(_Layer(), 1, checked.LAYERS),
    },
    optional=frozenset({"selection"}),
)
_TENSOR = Table(
    {
        "dtype": Choice(tuple(checked.DTYPES)),
        "shape": Listed(Whole(1, 1 << 40), 1, 4),
        "sha256": Hash(),
    }
)
PACKAGE = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,98}[A-Za-z0-9_])?")  # as a distribution or a module is called
RELEASE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.!+_-]{0,98}[A-Za-z0-9])?")


@dataclass(frozen=True)
class _Written:
    """A text of a pattern: it stands in a command that a message shows."""

    pattern: re.Pattern[str]
    called: str

    def check(self, value: object, what: str) -> None:
        if type(value) is not str or self.pattern.fullmatch(value) is None:
            raise KVCalError(f"{what} {shown(value)}: must be {self.called} of letters, digits and -._")


_ORIGIN = Table({"package": _Written(PACKAGE, "a name"), "version": OrNull(_Written(RELEASE, "a version"))})
HEADER = Schema[Header](
    {
        "format": Choice((FORMAT,)),
        "version": Whole(min(VERSIONS), max(VERSIONS)),
        "model": _MODEL,
        "codecs": Named(_ORIGIN),
        "scheme": _SCHEME,
        "provenance": Free(),
        "metrics": Free(),
        "tensors": Named(_TENSOR),
    },
    optional=frozenset({"codecs"}),
)
