"""What --text means: embedded text, a local file or folder, or a data set of the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcal_artifacts.errors import TextError, UsageError
from kvcal_artifacts.files import existing_path

from .file_kinds import looks_like_file

if TYPE_CHECKING:
    from ..models.names import ModelSource

TEXT = Path(__file__).parents[1] / "demo" / "text"
EMBEDDED = {f"embedded:{path.stem}": path for path in (TEXT / "calibration.txt", TEXT / "evaluation.txt")}
DEFAULTS = {
    "calibration": "HuggingFaceFW/fineweb-edu:sample-10BT:train",
    "evaluation": "Salesforce/wikitext:wikitext-2-raw-v1:test",
}
SPLITS = ("train", "test", "validation", "dev")
DATASET = re.compile(r"[\w.-]+/[\w.-]+(:[\w.+-]*){0,2}(@[0-9a-f]{40})?")


@dataclass(frozen=True)
class TextSource:
    """A text by name. `label` goes into bundles: it holds no path of this machine, only names."""

    kind: str  # embedded | file | folder | dataset
    label: str
    path: Path | None = None
    dataset: str | None = None
    config: str | None = None
    split: str = "train"
    column: str | None = None
    commit: str | None = None  # of a data set; None: its main branch's present one


def default_text(source: ModelSource, purpose: str) -> str:
    """The text used when the user names none; purpose: calibration or evaluation. The caller prints it."""
    if purpose not in DEFAULTS:
        raise UsageError(f"text for {purpose!r}: allowed are {', '.join(DEFAULTS)}")
    return f"embedded:{purpose}" if source.kind == "embedded" else DEFAULTS[purpose]


def resolve_text(text: str, *, column: str | None = None) -> TextSource:
    """`embedded:calibration`, an existing file or folder, or `org/name[:config][:split][@commit]`, in this order."""
    if text == "-":
        raise TextError("text '-': standard input is not read; write the text to a file and give that")
    if text in EMBEDDED:
        return TextSource("embedded", text, path=EMBEDDED[text])
    path = existing_path(text)
    if path is not None and path.is_dir():
        return TextSource("folder", f"folder:{path.resolve().name}", path=path, column=column)
    if path is not None:
        return TextSource("file", f"file:{path.name}", path=path, column=column)
    if DATASET.fullmatch(text) and not looks_like_file(text):
        return _dataset(text, column)
    if text.startswith("embedded:"):
        raise TextError(f"text {text!r}: embedded are {', '.join(EMBEDDED)}")
    raise TextError(f"text {text!r}: no such file or folder; a data set on the hub reads org/name[:config][:split]")


def _dataset(text: str, column: str | None) -> TextSource:
    """`org/name:x` is a split if x is the name of a usual one, else a config."""
    text, _, commit = text.partition("@")
    name, *parts = text.split(":")
    if len(parts) == 1 and parts[0] in SPLITS:
        parts = ["", parts[0]]
    config, split = (*parts, "", "")[:2]
    label = ":".join([name, config or "default", split or "train"])
    return TextSource("dataset", label, None, name, config or None, split or "train", column, commit or None)
