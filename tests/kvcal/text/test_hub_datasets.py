"""Data sets of the hub, streamed at one commit, and every way a stream can fail."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from kvcal.models import hub
from kvcal.text import hub_datasets
from kvcal.text.token_windows import token_windows
from kvcal_artifacts.errors import KVCalError, TextUnavailable
from tests.support.texts import WITH_BOS, numbered, refused

pytestmark = pytest.mark.transformers


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
