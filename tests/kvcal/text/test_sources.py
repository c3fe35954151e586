"""Text in, token windows out: every source, the same seed the same windows, and every way a text can fail."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvcal.models import hub
from kvcal.models.names import resolve
from kvcal.text import files, hub_datasets, sources, unpacked
from kvcal.text.files import read_file
from kvcal.text.sources import EMBEDDED, resolve_text
from kvcal.text.token_stream import pieces
from kvcal.text.token_windows import evaluation_windows, random_windows, token_windows
from kvcal_artifacts.errors import KVCalError, TextError, TextUnavailable, UsageError

pytestmark = pytest.mark.transformers


def byte_tokenizer(bos: bool) -> Any:
    """One token a byte, ids 2 to 257, so that a test can see through the windows; BOS is 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<bos>": 0, "<eos>": 1, **{letter: i + 2 for i, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


START = 0x4E00  # a block of 20,000 letters


class Characters:
    """A tokenizer with a token a character, its code point: ids then say where in the text they come from."""

    def __init__(self, bos: bool) -> None:
        self.bos = bos
        self.bos_token_id = 0

    def __call__(self, text: str | list[str], *, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        texts = [text] if isinstance(text, str) else text
        start = [0] if self.bos and add_special_tokens else []
        ids = [[*start, *map(ord, piece)] for piece in texts]
        return {"input_ids": ids[0] if isinstance(text, str) else ids}


WITH_BOS, PLAIN = byte_tokenizer(True), byte_tokenizer(False)


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def numbered(count: int) -> str:
    """Lines of eight characters, each different."""
    return "".join(f"{i:06d}\n" for i in range(count))


def documents(path: str | Path, column: str | None = None) -> list[str]:
    return ["".join(document) for document in read_file(Path(path), column)]


def refused(text: str, **options: Any) -> str:
    with pytest.raises(TextError) as caught:
        token_windows(WITH_BOS, text, **{"windows": 2, "length": 8, **options})
    message = str(caught.value)
    assert "\n" not in message
    return message


# windows


@given(
    windows=st.integers(1, 12),
    length=st.integers(2, 40),
    share=st.floats(0, 0.99),
    seed=st.integers(0, 2**31),
    bos=st.booleans(),
)
def test_windows_never_overlap_and_repeat_with_the_seed(
    windows: int, length: int, share: float, seed: int, bos: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = tmp_path_factory.getbasetemp() / "distinct.txt"
    if not text.exists():
        text.write_text("".join(chr(START + i) for i in range(1200)), "utf-8")
    holdout = int(windows * share)
    options: dict[str, Any] = {"windows": windows, "length": length, "holdout": holdout, "seed": seed}
    first = token_windows(Characters(bos), str(text), **options)
    again = token_windows(Characters(bos), str(text), **options)
    assert torch.equal(first.train, again.train)
    assert torch.equal(first.holdout, again.holdout)
    assert first.ids_sha256 == again.ids_sha256
    assert (first.train.shape, first.holdout.shape) == ((windows - holdout, length), (holdout, length))
    if bos:
        assert (torch.cat([first.train, first.holdout])[:, 0] == 0).all()
    train, held = first.train[:, bos:], first.holdout[:, bos:]
    seen = [*train.flatten().tolist(), *held.flatten().tolist()]
    assert len(set(seen)) == len(seen)  # no character of the text is in two windows
    assert ((torch.cat([train, held]).diff(dim=1)) == 1).all()  # each is one stretch of the text
    if holdout:  # from a part of its own, behind every training window
        assert train.max() < held.min()


def test_another_seed_chooses_other_windows() -> None:
    text = "embedded:calibration"
    one, two = (token_windows(WITH_BOS, text, windows=8, length=256, seed=seed) for seed in (0, 1))
    assert not torch.equal(one.train, two.train)
    assert one.sha256 == two.sha256


def test_the_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    token_windows(WITH_BOS, "embedded:calibration", windows=4, length=64, holdout=1)
    random_windows(50, windows=4, length=8)
    assert torch.equal(state, torch.get_rng_state())


def test_evaluation_windows_are_consecutive_and_do_not_depend_on_their_number() -> None:
    text = EMBEDDED["embedded:evaluation"].read_text("utf-8")
    three = evaluation_windows(WITH_BOS, "embedded:evaluation", windows=3, length=101)
    whole = evaluation_windows(WITH_BOS, "embedded:evaluation", windows=None, length=101)
    assert torch.equal(three.ids, whole.ids[:3])
    assert len(whole.ids) == len(text.encode()) // 100
    assert WITH_BOS.decode(three.ids[:, 1:].flatten()).encode() == text.encode()[:300]
    assert (whole.ids[:, 0] == 0).all()
    assert whole.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert len(evaluation_windows(PLAIN, "embedded:evaluation", windows=10**6, length=4000).ids) == 32


def test_random_windows() -> None:
    made = random_windows(100, windows=6, length=16, holdout=2, seed=3)
    assert made.train.shape == (4, 16)
    assert made.holdout.shape == (2, 16)
    assert made.source == "random-tokens:3"
    assert torch.equal(made.train, random_windows(100, windows=6, length=16, holdout=2, seed=3).train)


@pytest.mark.parametrize(("windows", "length", "holdout"), [(0, 8, 0), (4, 1, 0), (4, 8, 4), (4, 8, -1)])
def test_counts_that_make_no_sense(windows: int, length: int, holdout: int) -> None:
    with pytest.raises(UsageError):
        token_windows(WITH_BOS, "embedded:calibration", windows=windows, length=length, holdout=holdout)


def test_progress_is_reported() -> None:
    seen: list[tuple[int, int]] = []
    token_windows(WITH_BOS, "embedded:calibration", windows=4, length=512, progress=lambda *step: seen.append(step))
    assert seen
    assert seen[-1][0] == seen[-1][1]


# pieces


@given(st.lists(st.text(alphabet="ab \n", max_size=60), max_size=8), st.integers(2, 40))
def test_pieces_are_the_documents_joined(texts: list[str], size: int) -> None:
    cut = list(pieces(([text] for text in texts), size))
    assert "".join(cut) == "\n\n".join(texts)
    assert all(0 < len(piece) <= size for piece in cut)


def test_pieces_are_cut_before_a_line_or_a_word() -> None:
    lines = list(pieces([["one two\n\nthree four\nfive six\nseven eight nine\n"]], 30))
    assert lines[0] == "one two\n\nthree four\nfive six\n"
    words = list(pieces([["one two three four five six seven"]], 14))
    assert words == ["one two three", " four five six", " seven"]


def test_large_files_are_read_lazily(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "large.txt", numbered(1_000_000))  # 7 MB
    taken: list[int] = []
    decoded = unpacked.decoded

    def counting(file: Path) -> Iterator[str]:
        for part in decoded(file):
            taken.append(len(part))
            yield part

    monkeypatch.setattr(files, "decoded", counting)
    token_windows(WITH_BOS, path, windows=2, length=64)
    assert sum(taken) < 3 << 20


# sources


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


# data sets


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A hub that answers with these rows."""
    rows: list[Any] = [{"text": numbered(50)}, {"text": numbered(50)}]
    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(hub, "dataset_info", lambda _: type("Info", (), {"sha": "abc123"}))
    monkeypatch.setattr(hub_datasets, "_rows", lambda *_: rows)
    return rows


def test_a_streamed_data_set_names_its_commit(streamed: list[Any]) -> None:
    made = token_windows(WITH_BOS, "org/name:small:train", windows=4, length=32, holdout=1)
    assert made.source == "org/name:small:train@abc123"
    whole = f"{numbered(50)}\n\n{numbered(50)}"
    assert made.sha256 == hashlib.sha256(whole.encode()).hexdigest()


def test_a_dataset_at_a_commit(streamed: list[Any]) -> None:
    """What a bundle names is what gives the same text again, whatever its main branch has become."""
    made = token_windows(WITH_BOS, f"org/name:small:train@{'c' * 40}", windows=2, length=8)
    assert made.source == f"org/name:small:train@{'c' * 40}"
    assert "no such file or folder" in refused("org/name@main")


def test_a_stream_that_breaks_off(streamed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*_: Any) -> Iterator[Any]:
        yield streamed[0]
        raise ConnectionError("reset\nby peer")

    monkeypatch.setattr(hub_datasets, "_rows", rows)
    assert "broke off after row 1 (reset by peer)" in refused("org/name", windows=100)


def test_a_data_set_without_a_text_column(streamed: list[Any]) -> None:
    streamed[:] = [{"id": 1, "body": "xyz"}]
    assert "its columns are id, body" in refused("org/name")
    assert token_windows(WITH_BOS, "org/name", windows=1, length=3, column="body").tokens_read == 3


def test_data_set_errors(streamed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    cases: list[tuple[Exception, str]] = [
        (errors.GatedRepoError.__new__(errors.GatedRepoError), "is gated: accept its terms at"),
        (errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError), "is not on the hub"),
        (ValueError("Unknown split 'x'.\nShould be one of ['train']"), "Should be one of ['train']"),
        (RuntimeError("Dataset scripts are no longer supported, but found x.py"), "use a parquet one"),
    ]
    for error, said in cases:

        def fail(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(hub_datasets, "_rows", fail)
        assert said in refused("org/name")


def test_offline_data_set() -> None:
    hub.reachable.cache_clear()
    with pytest.raises(TextUnavailable, match="HF_HUB_OFFLINE is set; connect, or give a local text") as caught:
        token_windows(WITH_BOS, "org/name", windows=1, length=8)
    assert caught.value.exit_code == 5
    assert isinstance(caught.value, KVCalError)
