"""Files as --text takes them: rows of every kind, chats, what is refused by name, and files that unpack to far too
much.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcal.models import layerwise, loading
from kvcal.text import csv_rows, json_rows, parquet_rows, unpacked
from kvcal.text.documents import check_local
from kvcal.text.file_kinds import ALLOWED, SECOND, folder_files, kind_of
from kvcal.text.files import read_file
from kvcal.text.rows import WITHOUT, Picker
from kvcal.text.token_stream import chat_renderer
from kvcal.text.token_windows import evaluation_windows, token_windows
from kvcal_artifacts.errors import TextError
from tests.support.models_fixture import SMALL, kvcal, write_model, write_text
from tests.support.texts import PLAIN, WITH_BOS, byte_tokenizer, numbered, write

ROWS = [{"text": f'It is é number {i},\n"so" it is\tsaid.\n', "n": i} for i in range(5)]
TEXTS = [str(row["text"]) for row in ROWS]
CHAT = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Good day."}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].name }}"
    "{% endif %}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def zstd(content: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(content, asbytes=True))


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstd,
}  # fmt: skip


def table(separator: str) -> str:
    made = io.StringIO()
    out = csv.writer(made, delimiter=separator)  # of the standard library, with \r\n
    out.writerow(["n", "text"])
    out.writerows([row["n"], row["text"]] for row in ROWS)
    return made.getvalue()


FORMS = {
    ".jsonl": "\n".join(map(json.dumps, ROWS)),
    ".ndjson": "\n".join(map(json.dumps, ROWS)) + "\n",
    ".json": json.dumps(ROWS),
    "-lines.json": "\n".join(map(json.dumps, ROWS)),
    "-pretty.json": "".join(json.dumps(row, indent=2) for row in ROWS),
    "-strings.json": json.dumps(TEXTS),
    "-strings.jsonl": "\n".join(map(json.dumps, TEXTS)),
    "-field.json": json.dumps({"version": "1", "data": ROWS, "tags": []}, indent=1),
    ".csv": table(","),
    ".tsv": table("\t"),
}


def documents(path: str | Path, column: str | None = None, **options: Any) -> list[str]:
    return ["".join(document) for document in read_file(Path(path), column, Picker(column, **options))]


def refused(path: str | Path, column: str | None = None, **options: Any) -> str:
    with pytest.raises(TextError) as caught:
        documents(path, column, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# rows


@pytest.mark.parametrize("pack", ["", *PACKERS])
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_the_same_in_every_form(form: str, pack: str, tmp_path: Path) -> None:
    content = FORMS[form].encode()
    path = write(tmp_path / f"a{form}{pack}", PACKERS[pack](content) if pack else content)
    assert documents(path) == TEXTS


@pytest.mark.parametrize("pack", PACKERS)
def test_plain_text_unpacked(pack: str, tmp_path: Path) -> None:
    text = numbered(200_000)  # 1.4 MB: more than one read
    assert documents(write(tmp_path / f"a.txt{pack}", PACKERS[pack](text.encode()))) == [text]
    twice = PACKERS[pack](b"one ") + PACKERS[pack](b"two")
    assert documents(write(tmp_path / f"b.txt{pack}", twice)) == ["one two"]


@settings(max_examples=40)
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(["text", "a"]), st.text(max_size=9) | st.integers()), max_size=9),
    size=st.integers(1, 40), indent=st.sampled_from([None, 1]), lines=st.booleans(),
)  # fmt: skip
def test_json_in_parts_of_any_size(rows: list[Any], size: int, indent: int | None, lines: bool) -> None:
    """Against json.loads of the whole."""
    text = "\n".join(json.dumps(row, indent=indent) for row in rows) if lines else json.dumps(rows, indent=indent)
    values = json_rows._Values(iter([text[at : at + size] for at in range(0, len(text), size)]), Path("a.json"))
    found = values.of_array() if values.peek() == "[" else values.to_end()
    assert list(found) == rows


def test_an_object_with_a_chat_is_a_row_and_one_with_rows_is_not(tmp_path: Path) -> None:
    one = write(tmp_path / "one.json", json.dumps({"messages": CHAT}))
    assert documents(one, render=json.dumps) == [json.dumps(CHAT)]
    many = write(tmp_path / "many.json", json.dumps({"data": [{"body": "x"}, {"body": "y"}], "body": 3}))
    assert documents(many, "body") == ["x", "y"]
    columns = write(tmp_path / "columns.json", json.dumps({"text": ["x", "y"]}))
    assert documents(columns) == ["x", "y"]
    two = write(tmp_path / "two.json", json.dumps({"train": ["x"], "test": ["y"]}))
    assert "2 fields of train, test are arrays" in refused(two)


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write(path, '\ufeffid,body\n1,"one, two"\n\n2,"a ""b""\nc"\n')
    assert documents(path, "body") == ["one, two", 'a "b"\nc']
    assert "no column 'text'; its columns are id, body" in refused(path, "text")
    assert "its columns are id, body" in refused(path)
    limit = csv.field_size_limit()
    long = write(tmp_path / "long.csv", f"text\n{'x' * 200_000}\n")
    assert documents(long) == ["x" * 200_000]
    assert csv.field_size_limit() == limit


def test_empty_and_null_rows_are_counted(tmp_path: Path) -> None:
    rows = ['{"text": "one"}', '{"text": null}', '{"text": ""}', "null", "{}", '{"text": " \\n"}', '{"text": "two"}']
    path = write(tmp_path / "a.jsonl", "\n".join(rows))
    picker = Picker()
    found = ["".join(document) for document in read_file(Path(path), None, picker)]
    assert found == ["one", "", " \n", "two"]  # an empty row leaves its blank line, as texts of earlier bundles have it
    assert (picker.rows, picker.null, picker.empty) == (7, 3, 2)
    told: list[str] = []
    token_windows(PLAIN, path, windows=1, length=4, say=told.append)
    assert told == ["note: file:a.jsonl: of 7 rows read 2 are empty and 3 null; skipped"]
    nothing = write(tmp_path / "b.jsonl", '{"text": ""}\n' * 50 + '{"text": null}')
    with pytest.raises(TextError, match=r"text file:b.jsonl is empty: its 51 rows are empty or null"):
        token_windows(PLAIN, nothing, windows=1, length=8)
    blank = write(tmp_path / "b.txt", "\n \n" * 50)
    with pytest.raises(TextError, match=r"text file:b.txt is empty"):
        token_windows(PLAIN, blank, windows=1, length=8)


def test_null_in_parquet_and_in_one_of_a_pair(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["p", "q", None], "completion": ["a", None, "c"]}), path)
    assert documents(path) == ["p\na"]


# which columns of a row


def joined(messages: list[dict[str, object]]) -> str:
    return "|".join(f"{message['role']}: {message['content']}" for message in messages)


TURNS = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}]
WHOLE = "user: p|assistant: c"


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": None, "messages": TURNS}, WHOLE),
        ({"text": " ", "messages": TURNS}, WHOLE),
        ({"text": "t", "messages": TURNS}, "t"),
        ({"text": None, "content": "c"}, "c"),
        ({"question": "q", "answer": None, "messages": TURNS}, WHOLE),
        ({"text": None, "conversation": TURNS}, WHOLE),
        ({"system": "s", "conversations": [{"from": "human", "value": "p"}]}, "system: s|user: p"),
        ({"system": "s", "messages": [{"role": "system", "content": "own"}, *TURNS]}, f"system: own|{WHOLE}"),
        ({"system": "", "messages": TURNS}, WHOLE),
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, "p\nc"),
        ({"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]}, WHOLE),
        ({"prompt": TURNS[:1], "chosen": TURNS, "rejected": TURNS}, WHOLE),
        ({"prompt": "p", "chosen": TURNS, "rejected": TURNS, "score_chosen": 5.0}, WHOLE),
        ({"prompt": "p", "chosen": TURNS[1:], "rejected": TURNS[1:]}, WHOLE),
        ({"chosen": TURNS, "rejected": TURNS}, WHOLE),
        ({"chosen": "Human: p", "rejected": "r"}, "Human: p"),
        ({"system": "s", "prompt": "p", "chosen": TURNS[1:]}, f"system: s|{WHOLE}"),
        ({"instruction": "i", "input": "n", "output": "o"}, "i\nn\no"),
        ({"instruction": "i", "input": "", "output": "o", "text": None}, "i\no"),
        ({"instruction": "i", "context": "x", "response": "r", "category": "c"}, "i\nx\nr"),
        ({"system_prompt": "s", "question": "q", "response": "r"}, "s\nq\nr"),
        ({"context": "x", "question": "q", "answer": "a"}, "x\nq\na"),
        ({"prompt": "p", "response": "r"}, "p\nr"),
        (TURNS, WHOLE),
        ([{"from": "human", "value": "p"}, {"from": "gpt", "value": "c"}], WHOLE),
    ],
    ids=json.dumps,
)
def test_all_of_a_row_is_read(row: Any, text: str, tmp_path: Path) -> None:
    """Never one half of it: what stands beside a null, before an answer, or in a list of messages."""
    for name, content in (("a.jsonl", json.dumps(row)), ("a.json", json.dumps([row]))):
        assert documents(write(tmp_path / name, content), render=joined) == [text]
    if isinstance(row, dict) and not any(isinstance(value, list) for value in row.values()):
        table = tmp_path / "a.csv"
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerow(row)
        assert documents(table) == [text]
    if isinstance(row, dict):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
        assert documents(tmp_path / "a.parquet", render=joined) == [text]


def test_rows_of_several_kinds_and_rows_without_a_column(tmp_path: Path) -> None:
    rows = [
        {"id": 1},
        {"text": "one"},
        {"content": "two"},
        {"id": 2},
        {"messages": TURNS},
        {"text": None},
        {"text": ""},
    ]
    picker = Picker(None, joined)
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert ["".join(document) for document in read_file(Path(path), None, picker)] == ["one", "two", WHOLE, ""]
    assert (picker.rows, picker.lacking, picker.null, picker.empty) == (7, 2, 1, 1)
    told: list[str] = []
    few = write(tmp_path / "b.jsonl", "\n".join(map(json.dumps, rows[:4])))
    token_windows(PLAIN, few, windows=1, length=4, say=told.append)
    assert told == ["note: file:b.jsonl: of 4 rows read 0 are empty, 0 null and 2 without a column of text; skipped"]
    assert documents(path, "content") == ["two"]


def test_no_row_with_a_column_is_refused_with_all_columns_that_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"id": 1}\n{"id": 2, "body": "x"}\nnull')
    assert "a.jsonl: no text or content" in refused(path) and "its columns are id, body: name one" in refused(path)
    assert "no column 'text'; its columns are id, body" in refused(path, "text")
    endless = write(tmp_path / "b.jsonl", '{"id": 1}\n' * 1000 + "no JSON")  # found out before the end
    assert "its columns are id: name one" in refused(endless)
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "a.jsonl", '{"text": "x"}')
    write(folder / "b.jsonl", '{"id": 1}')
    with pytest.raises(TextError, match=r"b.jsonl: no text or content"):
        token_windows(PLAIN, str(folder), windows=1, length=80)


COLUMNS = {"text": ["one", None, "two"], "n": [1, 2, 3]}


@pytest.mark.parametrize("orient", ["list", "columns", "split", "records", "index", "table", "values"])
def test_what_pandas_writes(orient: str, tmp_path: Path) -> None:
    rows: list[Any] = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
    content = {
        "list": COLUMNS,
        "columns": {name: {str(i): value for i, value in enumerate(values)} for name, values in COLUMNS.items()},
        "split": {"columns": list(COLUMNS), "index": [0, 1, 2], "data": [list(row.values()) for row in rows]},
        "records": rows,
        "index": {str(i): row for i, row in enumerate(rows)},
        "table": {"schema": {"fields": [{"name": "text"}]}, "data": rows},
        "values": [list(row.values()) for row in rows],
    }[orient]
    path = write(tmp_path / "a.json", json.dumps(content))
    if orient == "values":
        assert "row 1: a JSON object is expected, found list" in refused(path)
        return
    assert documents(path) == ["one", "two"]
    assert "its columns are text, n" in refused(path, "other") or "fields of" in refused(path, "other")


def test_columns_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write(path, json.dumps({"prompt": ["p", "q"], "chosen": ["c", "d"], "rejected": ["r", "s"], "version": 1}))
    assert documents(path) == ["p\nc", "q\nd"]
    write(path, json.dumps({"messages": [TURNS, TURNS]}))
    assert documents(path, render=joined) == [WHOLE, WHOLE]
    write(path, json.dumps({"data": [TURNS, TURNS]}))
    assert documents(path, render=joined) == [WHOLE, WHOLE]
    write(path, json.dumps({"text": ["x"], "title": ["t", "u"], "content": ["y", "z"]}))
    assert "columns text, content are not of one length" in refused(path)
    write(path, json.dumps({"columns": ["text", "n"], "data": [["x"]]}))
    assert "rows of its data are not as long as its columns, 2" in refused(path)


@pytest.mark.parametrize("message", [TURNS[0], {"from": "gpt", "value": "x"}])
def test_a_message_alone_is_no_row(message: dict[str, str], tmp_path: Path) -> None:
    """A file of one chat: its messages would be texts without their roles."""
    path = write(tmp_path / "a.json", json.dumps([message, message]))
    said = refused(path, render=joined)
    assert "row 1: one message of a chat; a row is a whole chat: a list of its messages, or an object with" in said
    key = "content" if "content" in message else "value"
    assert documents(path, key) == [message[key]] * 2


def test_a_prompt_of_text_and_an_answer_that_is_a_chat(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"prompt": "p", "completion": TURNS}))
    assert "columns prompt and completion are text and a chat; both must be one or the other" in refused(path)


# chats


def chatty(bos: bool = True) -> Any:
    tokenizer = byte_tokenizer(bos)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


SHAREGPT = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Good day.", "weight": None}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo?"}]}, CHAT[1]]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT}, {"messages": PARTS}, {"conversations": SHAREGPT}, {"conversation": CHAT},
        {"prompt": CHAT[:1], "completion": CHAT[1:]}, {"messages": json.dumps(CHAT)},
    ],
    ids=["messages", "parts", "sharegpt", "conversation", "prompt-completion", "as-json"],
)  # fmt: skip
def test_chats_go_through_the_template(row: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = chatty(bos=False)
    path = write(tmp_path / "a.jsonl", "\n".join([json.dumps(row)] * 2))
    once = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert once == "<bos><user>Hello?</><assistant>Good day.</>"
    made = evaluation_windows(tokenizer, path, windows=1, length=40)
    assert tokenizer.decode(made.ids[0]) == f"{once}\n\n{once}"[: len("<bos>") + 39]
    if row.get("messages") is not PARTS:  # Arrow has no type for text or a list
        pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / "a.parquet")
        assert documents(tmp_path / "a.parquet", render=chat_renderer(tokenizer)) == [once, once]


def test_a_window_begins_with_one_bos(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"messages": CHAT}))
    ids = evaluation_windows(chatty(), path, windows=1, length=20).ids[0].tolist()
    assert ids.count(0) == 1
    assert ids[0] == 0


def test_what_a_message_has_besides_reaches_the_template(tmp_path: Path) -> None:
    call = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [{"name": "look_up"}]}]
    path = write(tmp_path / "a.jsonl", json.dumps({"messages": call}))
    assert documents(path, render=chat_renderer(chatty(False)))[0].endswith("<assistant>look_up</>")
    empty = write(tmp_path / "b.jsonl", json.dumps({"messages": []}))
    assert documents(empty) == [""]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (CHAT, "a chat, and the tokenizer has no chat template to read it by; give a model"),
        ([{"role": "user", "content": [{"type": "image_url", "url": "x"}]}], "a message has a part of type image_url"),
        ([{"role": 3, "content": "x"}], "a message's role is int"),
        (["x"], "column 'messages' is a list of other things than messages"),
        ("no json", "column 'messages' is no list of messages"),
        (7, "column 'messages' is int, not text"),
    ],
)
def test_chats_that_cannot_be_read(messages: Any, said: str, tmp_path: Path) -> None:
    assert said in refused(write(tmp_path / "a.jsonl", json.dumps({"messages": messages})))


def test_a_template_that_refuses_names_the_row(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(True)
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('No system here') }}{% endif %}x"
    rows = [{"messages": CHAT}, {"messages": [{"role": "system", "content": "y"}]}]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert "line 2: the tokenizer's chat template refuses this chat (No system here)" in refused(
        path, render=chat_renderer(tokenizer)
    )


def test_text_and_pairs_stay_before_chats(tmp_path: Path) -> None:
    """What was read before is read the same."""
    rows = [{"prompt": "p", "completion": "c", "messages": CHAT}, {"prompt": "q", "completion": "d", "messages": CHAT}]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert documents(path) == ["p\nc", "q\nd"]
    assert documents(path, "messages", render=lambda messages: f"{len(messages)} messages") == ["2 messages"] * 2


# refused


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
@pytest.mark.parametrize("name", ["p", "p.txt", "p.jsonl", "p.json", "p.csv", "p.parquet", "p.txt.gz", "p.jsonl.zst"])
def test_what_is_no_file_is_refused_without_waiting(name: str, tmp_path: Path) -> None:
    """A pipe without a writer keeps its reader for ever."""
    pipe = tmp_path / name
    os.mkfifo(pipe)
    said = f"{pipe}: a pipe, not a file; write its text to a file and give that"
    assert refused(pipe) == said
    with pytest.raises(TextError) as caught:
        check_local(str(pipe))
    assert str(caught.value) == said
    link = tmp_path / f"link-{name}"
    link.symlink_to(pipe)
    assert refused(link) == f"{link}: a pipe, not a file; write its text to a file and give that"
    write(tmp_path / "a.txt", "words")
    files, others = folder_files(tmp_path)
    assert [path.name for path in files] == ["a.txt"]
    assert {path.name for path in others} == {name, link.name}


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null", "/dev/tty"])
def test_devices_are_refused(name: str) -> None:
    if Path(name).exists():
        with pytest.raises(TextError, match=f"{name}: a device, not a file; write its text to a file and give that"):
            check_local(name)


def test_sockets_and_standard_input_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path has few characters
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.txt")
        with pytest.raises(TextError, match=r"s\.txt: a socket, not a file"):
            check_local("s.txt")
    with pytest.raises(TextError, match="text '-': standard input is not read; write the text to a file"):
        check_local("-")


@pytest.mark.parametrize(
    "name",
    ["a.pdf", "a.docx", "a.zip", "a.tar.gz", "a.xlsx", "a.html", "a.safetensors", "a.npz", "a.yaml", "a.7z", "a.bin"],
)
def test_what_is_no_text_is_refused_by_name(name: str, tmp_path: Path) -> None:
    said = refused(write(tmp_path / name, "words that could be read"))
    suffix = "".join(Path(name).suffixes)
    assert f"{name}: {suffix} files are not read as text; allowed are {ALLOWED}" in said


@pytest.mark.parametrize("name", ["README", "a.md", "a.py", "a.TXT", "wiki.test.tokens", "a.b.txt"])
def test_what_is_text_by_its_name(name: str, tmp_path: Path) -> None:
    assert documents(write(tmp_path / name, "words")) == ["words"]


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"good\x00bad", "byte 4 is 0: no plain text"),
        ("a.txt", "words".encode("utf-16"), "byte 0 is not UTF-8"),
        ("a.txt", gzip.compress(b"words", mtime=0), "is not UTF-8"),
        ("a.txt.gz", b"no gzip", "damaged or cut short (Not a gzipped file"),
        ("a.txt.gz", gzip.compress(b"text" * 5000, mtime=0)[:-9], "damaged or cut short"),
        ("a.txt.gz", gzip.compress(b"text" * 5000, mtime=0)[:12] + b"\xff" * 30, "damaged or cut short"),
        ("a.txt.bz2", b"no bz2 at all", "damaged or cut short"),
        ("a.txt.bz2", bz2.compress(b"text" * 5000)[:-9], "damaged or cut short"),
        ("a.txt.zst", b"no zstd at all", "damaged or cut short"),
        ("a.txt.zst", zstd(b"text" * 5000)[:-9], "damaged or cut short"),
        ("a.parquet.gz", b"", "Parquet is packed inside and cannot be read from .gz"),
        ("a.json", b'[{"text": "x"}, {"text": ', "row 2: not JSON"),
        ("a.json", b'[{"text": "x"} {"text": "y"}]', "row 1: not JSON (a comma or ] is expected"),
        ("a.json", b'[{"text": "x"}] more', "text behind the end of its array"),
        ("a.json", b'[{"text": "x"}, 5]', "row 2: a JSON object is expected, found int"),
        ("a.json", b"words", "row 1: not JSON"),
        ("a.json", b'{"title": "x", "n": [1]}', "its columns are title, n"),
        ("a.json", DEEP.encode(), "row 1: not JSON that can be read (maximum recursion depth"),
        ("a.jsonl", DEEP.encode(), "line 1: not JSON (maximum recursion depth"),
        ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", "line 1: not JSON"),
        ("a.csv", b"text,n\none\n", "line 2: 1 fields under a header of 2"),
        ("a.csv", b'text\n"open', "line 2: not CSV (unexpected end of data"),
        ("a.csv", b"text,text\na,b\n", "two columns are called 'text'"),
        ("a.csv", b"text\nx\xff\n", "is not UTF-8"),
    ],
)
def test_unusable_files(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    assert said in refused(write(tmp_path / name, content))


# folders


def test_a_folder_says_what_it_leaves_out(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    write(folder / "a.txt", numbered(20))
    for name in ("b.json", "c.csv", "sub/d.jsonl.gz", "e.pdf", ".hidden"):
        write(folder / name, "[]")
    (folder / "f.txt").symlink_to("nowhere.txt")
    told: list[str] = []
    made = token_windows(PLAIN, str(folder), windows=1, length=8, say=told.append)
    assert told == [
        "note: folder:texts: 5 files left out (b.json, c.csv, e.pdf, ...), 1 read (a.txt); a text that is left out can "
        "be "
        "given by its name, or in a folder of its own"
    ]
    assert made.source == "folder:texts"
    (folder / "a.txt").unlink()
    write(folder / "b.json", '["first"]')
    write(folder / "c.csv", "text\nsecond\n")
    write(folder / "sub" / "d.jsonl.gz", gzip.compress(b'{"text": "third"}', mtime=0))
    made_of_rows = evaluation_windows(PLAIN, str(folder), windows=1, length=20, say=told.append)
    assert PLAIN.decode(made_of_rows.ids[0]) == "first\n\nsecond\n\nthird"[:20]
    assert "2 files left out (e.pdf, f.txt), 3 read" in told[-1]


def test_a_folder_reads_every_kind_that_a_file_may_be(tmp_path: Path) -> None:
    for name in SECOND:
        folder = tmp_path / name
        folder.mkdir()
        write(folder / f"a{name}", "")
        assert folder_files(folder) == ([folder / f"a{name}"], [])
        assert kind_of(folder / f"a{name}")


# far too much


def far_too_much(folder: Path, name: str) -> str:
    """A small file that a reader without limits makes hundreds of megabytes of, or never ends with."""
    path = folder / name
    if name == "line.jsonl.xz":
        made = lzma.LZMACompressor(preset=0)
        parts = [made.compress(b'{"text": "'), *(made.compress(bytes([97]) * (1 << 20)) for _ in range(80)), b'"}']
        return write(path, b"".join([*parts, made.flush()]))
    if name == "blank.txt.gz":
        return write(path, gzip.compress(b"\n" * (80 << 20), 1))
    if name == "words.txt.zst":
        return write(path, zstd(b"words " * (4 << 20)))
    if name == "dictionary.txt.xz":
        options = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1500 << 20}]
        return write(path, lzma.compress(b"words", filters=options))
    if name == "lists.json":
        return write(path, '[{"text": "x", "y": [' + "[]," * (1 << 20) + "[]]}]")
    if name == "string.json":
        return write(path, '["' + "x" * (8 << 20))
    if name == "open.csv":
        return write(path, 'text,n\n"' + ("x" * 1000 + "\n") * 8_000)
    assert name == "nulls.jsonl.gz"
    return write(path, gzip.compress(b"null\n" * (WITHOUT + 2), 1))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("line.jsonl.xz", "one row of more than 4,194,304"), ("blank.txt.gz", "unpacks to more than"),
        ("words.txt.zst", "unpacks to more than"), ("dictionary.txt.xz", "Memory usage limit exceeded"),
        ("lists.json", "one row of more than 1,048,576 JSON values"), ("open.csv", "is a quotation mark left open?"),
        ("string.json", "one row of more than 4,194,304 characters"), ("nulls.jsonl.gz", "rows are empty or null"),
    ],
)  # fmt: skip
def test_far_too_much_is_refused(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (unpacked, json_rows, csv_rows):
        monkeypatch.setattr(module, "ROW", 1 << 22)
    path, read = far_too_much(tmp_path, name), 0

    def all_of_it() -> None:
        nonlocal read
        for document in read_file(Path(path)):
            read += sum(map(len, document))

    with pytest.raises(TextError) as caught:
        all_of_it()
    assert said in str(caught.value)
    assert read <= 17 << 20


def test_a_long_line_is_read_in_linear_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: characters that joins of its parts copy."""
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "x" * (12 << 20)}))
    copied = 0

    class Counting(str):
        def __add__(self, other: str) -> str:
            nonlocal copied
            copied += len(self) + len(other)
            return str(self) + other

        def split(self, *given: Any, **options: Any) -> list[Any]:
            return [Counting(part) for part in str(self).split(*given, **options)]

    whole = unpacked.decoded
    monkeypatch.setattr(unpacked, "decoded", lambda file: map(Counting, whole(file)))
    assert len(documents(path)[0]) == 12 << 20
    assert copied < 24 << 20


def test_parquet_pages_are_looked_at_before_they_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    texts = ["a"] * 1000 + ["x" * 3_000_000] + ["b"] * 1000
    pq.write_table(pa.table({"text": texts, "n": range(2001)}), path)
    sizes = []
    with pq.ParquetFile(path) as file, open(path, "rb") as raw:
        chunk = file.metadata.row_group(0).column(0)
        sizes = list(parquet_rows._pages(path, raw, chunk))
        assert sum(sizes) < chunk.total_uncompressed_size < sum(sizes) + 1000  # which counts headers, too
    assert max(sizes) > 3_000_000
    assert documents(path) == texts
    for module in (unpacked, parquet_rows):
        monkeypatch.setattr(module, "ROW", 1 << 20)
    assert "row 1001: one row of more than 1,048,576 bytes" in refused(path)
    monkeypatch.setattr(parquet_rows, "PAGE", 1 << 20)
    assert "a page of column text unpacks to 3,000,0" in refused(path)


@pytest.mark.parametrize("codec", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_page_headers_of_every_writer(codec: str, version: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [{"messages": [{"role": "user", "content": f"{i} " * 50}] * (i % 3)} for i in range(3000)]
    options: dict[str, Any] = {"data_page_size": 20_000, "data_page_version": version, "row_group_size": 1000}
    pq.write_table(pa.Table.from_pylist(rows), path, compression=codec, write_page_checksum=True, **options)
    metadata = pq.read_metadata(path)
    with open(path, "rb") as raw:
        for group in range(3):
            for column in range(2):
                chunk = metadata.row_group(group).column(column)
                sizes = list(parquet_rows._pages(path, raw, chunk))
                assert 0 <= chunk.total_uncompressed_size - sum(sizes) < 500 * len(sizes)
    assert len(documents(path, render=json.dumps)) == 3000


def test_a_damaged_page_header(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["words"] * 9}), path)
    content = bytearray(path.read_bytes())
    content[4:12] = b"\xff" * 8
    path.write_bytes(content)
    assert "a page of column text has a damaged header" in refused(path)


@pytest.mark.slow
def test_memory_of_a_parquet_row_of_300_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "x" * 300_000_000]}), path)
    code = (
        "import sys; from pathlib import Path; from kvcal.text.files import read_file\n"
        "try: list(read_file(Path(sys.argv[1])))\n"
        "except Exception as error: print(error)\n"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    said, peak = done.stdout.strip().rsplit("\n", 1)
    assert "unpacks to 300,000,0" in said
    assert int(peak) < 700_000  # kB, of which Python's packages take 150,000 to 400,000


# commands


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("texts")
    write_model(base / "model", 2)
    write_text(base / "words.txt")
    return base


COMMANDS = {
    "fit-predictors": [*SMALL, "--output", "x.safetensors"],
    "fit-norms": [*SMALL, "--output", "x.safetensors"],
    "measure-subspaces": ["--windows", "4", "--length", "68", "--output", "x.safetensors"],
    "train-codebooks": [*SMALL, "--output", "x.safetensors"],
    "tune-thresholds": ["--windows", "4", "--length", "200", "--objective", "attention", "--output", "x.safetensors"],
    "tune-bits": ["--windows", "4", "--length", "200", "--output", "x.safetensors"],
    "probe": ["--windows", "4", "--length", "68"],
    "eval": ["--preset", "higgs-2", "--length", "64"],
    "compare": ["--preset", "higgs-2", "--length", "64"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_text_is_looked_at_before_the_weights(
    command: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of one word, where loading any weights would fail."""

    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "load_model", loaded)
    monkeypatch.setattr(layerwise, "open_layerwise", loaded)
    for name, content, said in [
        ("a.txt", b"word", "holds 4 tokens"), ("b.jsonl", b"", "is empty"), ("c.txt", b"\xff\xfe", "is not UTF-8"),
        ("d.pdf", b"%PDF", ".pdf files are not read as text"),
    ]:  # fmt: skip
        done = kvcal(command, "--model", model / "model", "--text", write(tmp_path / name, content), *COMMANDS[command])
        assert done.code == 1, done.err
        assert said in done.err


def test_other_texts_are_looked_at_before_the_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    named = ["--model", model / "model", "--text", model / "words.txt"]
    made = [*COMMANDS["measure-subspaces"][:-1], tmp_path / "x.safetensors", "--other-text", tmp_path / "none.txt"]
    assert "no such file or folder" in kvcal("measure-subspaces", *named, *made).err
    row = ["--keys", "higgs-2", "--values", "higgs-2", "--predict", "--calibration", tmp_path / "none.txt"]
    assert "no such file or folder" in kvcal("compare", *named, *row, "--length", 64).err


def test_one_text_in_every_form_gives_one_bundle(model: Path, tmp_path: Path) -> None:
    """As ../shared/faults/text_suffix.sh asks: the same windows from .json, .csv and .jsonl.gz, or a refusal."""
    rows = [{"text": line} for line in (model / "words.txt").read_text().split("\n") if line]
    made = io.StringIO()
    csv.writer(made).writerows([["text"], *([row["text"]] for row in rows)])
    lines = "\n".join(map(json.dumps, rows)).encode()
    files = {"a.json": json.dumps(rows).encode(), "a.ndjson": lines, "a.csv": made.getvalue().encode(),
             "a.jsonl.gz": gzip.compress(lines, mtime=0)}  # fmt: skip
    hashes = {
        token_windows(WITH_BOS, write(tmp_path / name, content), windows=4, length=60).ids_sha256
        for name, content in files.items()
    }
    assert len(hashes) == 1


def test_generate_by_the_chat_template(model: Path, tmp_path: Path) -> None:
    """The prompt's ids are those that apply_chat_template makes; a tokenizer without one is told of before any weights."""
    from transformers import AutoTokenizer

    options = ["--preset", "exact", "--prompt", "Hello?", "--tokens", 3, "--json"]
    done = kvcal("generate", "--model", model / "model", *options, "--chat")
    assert done.code == 2
    assert "--chat: the tokenizer of" in done.err
    assert "has no chat template; leave --chat out, or give an instruct model" in done.err

    folder = tmp_path / "chatty"
    write_model(folder, 2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE.replace("{{ bos_token }}", "")
    tokenizer.save_pretrained(folder)
    rendered = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert rendered == "<user>Hello?</><assistant>"
    chat = kvcal("generate", "--model", folder, *options, "--chat")
    plain = kvcal("generate", "--model", folder, *options[:3], rendered, *options[4:])
    assert chat.code == plain.code == 0, chat.err
    assert plain.json["text"] == rendered + chat.json["text"]
    assert chat.json["new_tokens"] == 3
