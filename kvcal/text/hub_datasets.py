"""Data sets of the Hugging Face hub, streamed row by row at one commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvcal_artifacts.errors import KVCalError, TextUnavailable

from ..models import hub
from ..models.hub import one_line
from ..report.extras import require
from .files import Document
from .rows import Picker
from .sources import TextSource


def check_datasets(source: TextSource) -> None:
    require("datasets", f"data set {source.label}", "give --text a local file")


def stream(source: TextSource, picker: Picker) -> tuple[Iterator[Document], str]:
    """A data set of the hub, streamed at the commit asked for or the main branch's present one; the label names it."""
    check_datasets(source)
    sha = dataset_commit(source)
    try:
        with hub.quiet():
            rows = _rows(source, sha)
    except KVCalError:
        raise
    except Exception as error:
        raise _unavailable(source, error) from error
    return _dataset_texts(source, rows, picker), f"{source.label}@{sha}"


def dataset_commit(source: TextSource) -> str | None:
    """The commit asked for, else the present one of the main branch."""
    name = source.dataset
    assert name is not None
    if not hub.reachable():
        raise TextUnavailable(
            f"data set {source.label}: no local file or folder has this name and {hub.why_unreachable()}; "
            "connect, or give a local text, or one that comes with kvcal: embedded:calibration, embedded:evaluation"
        )
    try:
        with hub.quiet():
            sha: str | None = source.commit or hub.dataset_info(name).sha
    except Exception as error:
        raise _unavailable(source, error) from error
    return sha


def _rows(source: TextSource, sha: str | None) -> Iterable[object]:
    import datasets

    rows: Iterable[object] = datasets.load_dataset(
        source.dataset, source.config, split=source.split, streaming=True, revision=sha
    )
    return rows


def _dataset_texts(source: TextSource, rows: Iterable[object], picker: Picker) -> Iterator[Document]:
    number = 0
    picker.begin(f"data set {source.label}")
    try:
        for number, row in enumerate(rows, 1):
            if (text := picker.text(row, f"data set {source.label} row {number}")) is not None:
                yield [text]
        picker.end()
    except KVCalError:
        raise
    except Exception as error:  # whatever the connection or a reader throws in the middle of a stream
        raise TextUnavailable(
            f"data set {source.label}: broke off after row {number:,} ({one_line(error)}); try again"
        ) from error


def _unavailable(source: TextSource, error: Exception) -> TextUnavailable:
    from huggingface_hub import errors

    site = f"https://huggingface.co/datasets/{source.dataset}"
    label = f"data set {source.label}"
    if isinstance(error, errors.GatedRepoError):
        return TextUnavailable(f"{label} is gated: accept its terms at {site} and set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        return TextUnavailable(
            f"{label} is not on the hub, or it is private: check the name (no local file has it either)"
        )
    if "scripts are no longer supported" in str(error):
        return TextUnavailable(f"{label} is a loading script, which no longer works: use a parquet one")
    return TextUnavailable(f"{label}: {one_line(error)}; see {site} for its configs and splits")
