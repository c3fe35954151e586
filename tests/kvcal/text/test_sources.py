"""Every kind of source that --text names, and every way a local one can fail."""

from __future__ import annotations

import hashlib
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from kvcal.models.names import resolve
from kvcal.text import sources, unpacked
from kvcal.text.files import read_file
from kvcal.text.sources import EMBEDDED, resolve_text
from kvcal.text.token_windows import evaluation_windows, token_windows
from kvcal_artifacts.errors import TextError, UsageError
from tests.support.texts import PLAIN, WITH_BOS, numbered, refused, write

pytestmark = pytest.mark.transformers


def documents(path: str | Path, column: str | None = None) -> list[str]:
    return ["".join(document) for document in read_file(Path(path), column)]


def test_embedded_text_is_what_its_readme_says() -> None:
    readme = (sources.TEXT / "README.md").read_text("utf-8")
    for name, path in EMBEDDED.items():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert digest in readme, name
        assert evaluation_windows(PLAIN, name, windows=None, length=4096).sha256 == digest
    first, second = (set(path.read_text("utf-8").split("\n\n")) for path in EMBEDDED.values())
    assert not {paragraph for paragraph in first & second if len(paragraph) > 100}


def test_defaults() -> None:
    tiny, real = resolve("tiny"), resolve("llama-3.2-3b")
    assert sources.default_text(tiny, "calibration") == "embedded:calibration"
    assert sources.default_text(tiny, "evaluation") == "embedded:evaluation"
    for purpose in ("calibration", "evaluation"):
        assert resolve_text(sources.default_text(real, purpose)).kind == "dataset"
    with pytest.raises(UsageError, match="allowed are calibration, evaluation"):
        sources.default_text(tiny, "training")


def test_plain_xz_and_line_ends(tmp_path: Path) -> None:
    text = "Größe — naïve\nsecond\n"
    plain = write(tmp_path / "a.txt", "\ufeff" + text.replace("\n", "\r\n"))
    packed = write(tmp_path / "b.txt.xz", lzma.compress(text.encode()))
    odd = write(tmp_path / "c.tokens", text)
    assert documents(plain) == documents(packed) == documents(odd) == [text]


def test_characters_and_line_ends_across_blocks(tmp_path: Path) -> None:
    text = "x" * ((1 << 20) - 1) + "\r\né" + "y" * ((1 << 20) - 3) + "ü"
    assert documents(write(tmp_path / "a.txt", text)) == [text.replace("\r\n", "\n")]


def test_jsonl_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, '{"text": "one", "n": 1}\n\n{"text": "two"}\n')
    assert documents(path) == ["one", "two"]
    write(path, '{"question": "q", "answer": "a"}')
    assert documents(path) == ["q\na"]
    write(path, '{"code": "x = 1", "text": "not this"}\n')
    assert documents(path, "code") == ["x = 1"]


def test_plain_text_has_no_columns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(TextError, match=r"--column body: only .* files have columns"):
        documents(tmp_path / "a.txt", "body")


def test_parquet_columns(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["one", "two"], "n": [1, 2]}), path)
    assert documents(path) == ["one", "two"]
    with pytest.raises(TextError, match="no column 'code'; its columns are content, n"):
        documents(path, "code")
    pq.write_table(pa.table({"text": ["one", None, "two"]}), path)
    assert documents(path) == ["one", "two"]


def test_a_folder_takes_its_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / "b" / "2.txt", "second " * 10)
    write(tmp_path / "a.jsonl", json.dumps({"text": "first " * 10}))
    write(tmp_path / "c.txt.xz", lzma.compress(b"third " * 10))
    write(tmp_path / "README", "not this")
    write(tmp_path / ".hidden" / "x.txt", "nor this")
    made = evaluation_windows(PLAIN, str(tmp_path), windows=None, length=194)
    assert made.source == f"folder:{tmp_path.name}"
    assert PLAIN.decode(made.ids[0]) == "\n\n".join(["first " * 10, "second " * 10, "third " * 10])


def test_labels_hold_no_path_of_this_machine(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", numbered(10))
    assert token_windows(WITH_BOS, path, windows=1, length=8).source == "file:a.txt"


@pytest.mark.parametrize(
    ("text", "config", "split"),
    [
        ("org/name", None, "train"),
        ("org/name:test", None, "test"),
        ("org/name:small", "small", "train"),
        ("org/name:small:test[:10%]", None, None),
        ("org/name:small:test", "small", "test"),
        ("org/name::validation", None, "validation"),
    ],
)
def test_data_set_names(text: str, config: str | None, split: str | None) -> None:
    if split is None:
        with pytest.raises(TextError, match="no such file or folder"):
            resolve_text(text)
        return
    source = resolve_text(text)
    assert (source.kind, source.config, source.split) == ("dataset", config, split)


# failures


def test_too_little_says_how_much(tmp_path: Path) -> None:
    said = refused(write(tmp_path / "a.txt", "x" * 50), windows=8, length=16)
    assert "file:a.txt holds 50 tokens, 8 windows of 16 need 120" in said
    with pytest.raises(TextError, match="one window of 100 needs 99"):
        evaluation_windows(WITH_BOS, str(tmp_path / "a.txt"), windows=4, length=100)


def test_empty(tmp_path: Path) -> None:
    assert "file:a.txt is empty" in refused(write(tmp_path / "a.txt", ""))
    assert "file:b.jsonl is empty" in refused(write(tmp_path / "b.jsonl", "\n"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"good\nbad \xff\xfe", "byte 9 is not UTF-8"),
        ("a.txt", b"cut \xc3", "byte 4 is not UTF-8"),
        ("a.txt.xz", b"no xz at all", "damaged or cut short"),
        ("a.txt.xz", lzma.compress(b"text" * 5000)[:-40], "damaged or cut short"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', "line 2: not JSON"),
        ("a.jsonl", b'["text"]\n', "line 1: a JSON object is expected, found list"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": 5}\n', "line 2: column 'text' is int, not text"),
        ("a.jsonl", b'{"title": "x", "body": "y"}\n', "its columns are title, body"),
        ("a.jsonl", b'{"text": "half \\ud83d of a pair"}\n', "half of a surrogate pair near 'half"),
        ("a.parquet", b"PAR1 nonsense", "not a parquet file"),
        (
            "weights.bin",
            bytes(range(256)),
            "weights.bin: .bin files are not read as text; allowed are plain text (.txt,",
        ),
    ],
)
def test_unusable_files(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    assert said in refused(write(tmp_path / name, content))


def test_undecodable_bytes_are_counted_across_blocks(tmp_path: Path) -> None:
    content = b"a" * ((1 << 20) - 1) + "é".encode() + b"\xff"
    with pytest.raises(TextError, match="byte 1,048,577 is not UTF-8"):
        documents(write(tmp_path / "a.txt", content))


@pytest.mark.parametrize("name", ["nowhere.txt", "data/nowhere.jsonl", "", "nowhere", "x" * 5000, "~nobody-here/a"])
def test_no_such_path(name: str) -> None:
    assert "no such file or folder" in refused(name)


def test_folder_without_text(tmp_path: Path) -> None:
    write(tmp_path / "weights.bin", b"")
    write(tmp_path / "README", b"a text, but in a folder only suffixes tell")
    said = refused(str(tmp_path))
    assert "holds no text among 2 files (README, weights.bin): looked for plain text (.txt, .text, .raw" in said
    assert "no suffix" not in said


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path / "a.txt.xz", b"")
    monkeypatch.setattr(unpacked, "open", forbidden, raising=False)
    assert "cannot be read (Permission denied)" in refused(path)


def test_unknown_embedded() -> None:
    assert "embedded are embedded:calibration, embedded:evaluation" in refused("embedded:other")
