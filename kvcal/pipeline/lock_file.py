"""The lock file of `kvcal build`: what each bundle depends on, so that only what changed is built again."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcal_artifacts.bundle.canonical import canonical, sha256_text
from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.files import read_text, write_atomically

from ..models.file_hashes import file_sha256
from .build_recipe import Entry
from .gates import Check
from .identity import differences
from .scheme_file import table_of

if TYPE_CHECKING:
    from kvcal_artifacts.checked import Json


@dataclass
class Lock:
    """What a build has written and checked. bundles: name -> file, sha256, bytes, inputs, and key, a hash of the
    inputs. gates: name -> key, checks.
    """

    path: Path
    bundles: dict[str, dict[str, Any]] = field(default_factory=dict)
    gates: dict[str, dict[str, Any]] = field(default_factory=dict)

    FORMAT = "kvcal build 1"

    @classmethod
    def read(cls, path: Path) -> Lock:
        try:
            content: object = json.loads(read_text(path))
            if not isinstance(content, dict):
                raise ValueError("no table")
            if content["format"] != cls.FORMAT:
                raise ValueError(f"format {content['format']!r}, not {cls.FORMAT!r}")
            _check_lock(content["bundles"], content["gates"])
            return cls(path, content["bundles"], content["gates"])
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise KVCalError(
                f"{path}: not a lock file of `kvcal build` ({why}); delete it to build all again"
            ) from error

    def write(self) -> None:
        content = {"format": self.FORMAT, "bundles": self.bundles, "gates": self.gates}
        text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        if not self.path.exists() or read_text(self.path) != text:
            write_atomically(self.path, text.encode())

    def keep_only(self, names: Collection[str]) -> list[str]:
        """Forget all others; returns their names."""
        gone = sorted({*self.bundles, *self.gates} - set(names))
        for name in gone:
            self.bundles.pop(name, None)
            self.gates.pop(name, None)
        return gone


ROW: dict[str, type] = {"file": str, "sha256": str, "bytes": int, "key": str, "inputs": dict}
GATED: dict[str, type] = {"key": str, "checks": list}
TABLES = ("model", "settings", "code", "text", "other_text", "cpu")  # inputs that are tables themselves


def _check_lock(bundles: object, gates: object) -> None:
    """Raise ValueError unless both hold what `Lock` says: people edit such files, and merges damage them."""
    built, gated = _rows("bundles", bundles, ROW), _rows("gates", gates, GATED)
    for name, row in built.items():
        inputs = table_of(row, "inputs")
        if wrong := [key for key in TABLES if not isinstance(inputs.get(key, {}), dict)]:
            raise ValueError(f"bundles.{name}.inputs.{wrong[0]} is no table")
    for name, row in gated.items():
        checks = row["checks"]
        for check in checks if isinstance(checks, list) else ():
            try:
                Check.of(check)
            except ValueError as error:
                raise ValueError(f"gates.{name}: {error}") from error


def _rows(part: str, rows: object, fields: Mapping[str, type]) -> dict[str, dict[str, object]]:
    """The tables of a part of the lock file, whose fields have these types. Raises ValueError."""
    if not isinstance(rows, dict):
        raise ValueError(f"{part} is no table")
    for name, row in rows.items():
        if not isinstance(row, dict):
            raise ValueError(f"{part}.{name} is no table")
        if wrong := [key for key, kind in fields.items() if not isinstance(row.get(key), kind)]:
            raise ValueError(f"{part}.{name}.{wrong[0]} is {row.get(wrong[0])!r}")
    return rows


@dataclass(frozen=True)
class Planned:
    """An entry of a build file with its inputs. why: the reason to build it; None: it is up to date."""

    entry: Entry
    path: Path
    inputs: Mapping[str, Json]
    key: str
    why: str | None


def planned(entry: Entry, folder: Path, inputs: Mapping[str, Json], lock: Lock) -> Planned:
    path, row = folder / entry.file, lock.bundles.get(entry.name)
    key = sha256_text(canonical(inputs))
    if row is None:
        why: str | None = "it is new" if not path.exists() else "the lock file does not know it"
    elif row["key"] != key:
        why = differences(row["inputs"], inputs)
    elif not path.is_file():
        why = "its file is missing"
    else:
        why = None if file_sha256(path) == row["sha256"] else "its file was changed"
    return Planned(entry, path, inputs, key, why)
