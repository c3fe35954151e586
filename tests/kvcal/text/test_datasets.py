"""Why local files are read by kvcal.text.files and not by `datasets` (docs/decisions.md): it changes their text."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("datasets", reason="datasets is of the extra `data`")

from datasets import DownloadConfig, load_dataset

from kvcal.text.files import read_file

CASES = {  # a file and its content -> its texts; `datasets` gives others, or none
    "missing.csv": ("text\nNA\nnull\nhello\n", ["NA", "null", "hello"]),
    "dates.jsonl": ('{"text": "2024-01-05"}\n{"text": "2024-01-06T10:00:00"}\n', ["2024-01-05", "2024-01-06T10:00:00"]),
    "strings.jsonl": ('"a string"\n"another"\n', ["a string", "another"]),
    "plain.txt": ("one\n\ntwo  \nthree", ["one\n\ntwo  \nthree"]),
}
LOADERS = {".csv": "csv", ".jsonl": "json", ".txt": "text"}


@pytest.mark.parametrize("name", CASES)
def test_a_text_is_what_the_file_says(name: str, tmp_path: Path) -> None:
    content, texts = CASES[name]
    path = tmp_path / name
    path.write_text(content)
    assert ["".join(document) for document in read_file(path)] == texts
    assert texts_of_datasets(path, tmp_path / "cache") != texts


def texts_of_datasets(path: Path, cache: Path) -> list[object] | None:
    """What `datasets` makes of a local file; None where it cannot read it."""
    try:
        rows = load_dataset(
            LOADERS[path.suffix],
            data_files=str(path),
            split="train",
            streaming=True,
            cache_dir=str(cache),
            download_config=DownloadConfig(local_files_only=True),
        )
        return [row["text"] for row in rows]
    except Exception:  # of Arrow, by many classes
        return None


def test_a_file_that_both_read_alike_shows_that_the_comparison_can_fail(tmp_path: Path) -> None:
    path = tmp_path / "words.jsonl"
    path.write_text('{"text": "a b"}\n{"text": "c"}\n')
    assert ["".join(document) for document in read_file(path)] == texts_of_datasets(path, tmp_path / "cache")
