"""The Hugging Face hub: files in, one-line errors out, and never a long wait where there is no network.

Without a network huggingface_hub retries every request for about 25 s and prints a line each time. So one probe with a
hard limit decides first whether the hub is reachable. If not, only the local cache is asked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from kvcal_artifacts.errors import KVCalError, ModelUnavailable

from .catalogue import BY_HUB_ID
from .quiet import quiet

if TYPE_CHECKING:
    from huggingface_hub import DatasetInfo

PROBE_SECONDS = 4.0
SAFETENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def one_line(error: object, limit: int = 200) -> str:
    """An error as one line of at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


@contextmanager
def no_bars() -> Iterator[None]:
    """No progress bars of huggingface_hub inside: they are for weights, not for files of a few kilobytes."""
    bars: Any = import_module("huggingface_hub.utils")  # it exports these three without saying so
    already = bars.are_progress_bars_disabled()
    bars.disable_progress_bars()
    try:
        yield
    finally:
        if not already:
            with suppress(Exception):  # refused when HF_HUB_DISABLE_PROGRESS_BARS is set: they stay off then
                bars.enable_progress_bars()


@cache
def reachable() -> bool:
    """Whether the hub answers at all, within PROBE_SECONDS. Asked once per process; no probe in offline mode.

    In a thread, because a broken resolver blocks getaddrinfo for longer than any request timeout.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def probe() -> None:
        from huggingface_hub import get_session

        with suppress(Exception):
            get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
            answered.set()

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return answered.is_set()


def why_unreachable() -> str:
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{public(constants.ENDPOINT)} cannot be reached"


def public(url: str) -> str:
    """An address without the user name and password that may stand in it, for messages and files."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def fetch(repo: str, filename: str, revision: str | None) -> Path:
    """One file of a model repository, from the hub or from the local cache; ModelUnavailable otherwise."""
    from huggingface_hub import hf_hub_download

    try:
        with quiet():
            return Path(
                hf_hub_download(
                    repo,
                    filename,
                    revision=revision,
                    local_files_only=not reachable(),
                    etag_timeout=PROBE_SECONDS,
                )
            )
    except KVCalError:
        raise
    except Exception as error:
        raise explain(error, repo, revision, filename) from error


@cache
def fetch_config(repo: str, revision: str | None) -> Path:
    """config.json; the name of its folder is the commit sha, one and the same for the whole process."""
    with no_bars():
        return fetch(repo, "config.json", revision)


def fetch_tokenizer(repo: str, sha: str) -> Path:
    """The folder of that commit, with whichever tokenizer files the repository has."""
    with no_bars():
        return _snapshot(repo, sha, list(TOKENIZER_FILES))


def fetch_index(repo: str, sha: str) -> Path:
    """The index of a sharded checkpoint, or the one safetensors file."""
    with suppress(MissingFile), no_bars():
        return fetch(repo, INDEX, sha)
    try:
        return fetch(repo, SAFETENSORS, sha)
    except MissingFile:
        raise _no_weights(repo, sha) from None


def _no_weights(repo: str, sha: str) -> ModelUnavailable:
    if not reachable():
        return ModelUnavailable(
            f"{repo} at {sha[:12]}: its config is in the cache, its weights are not, "
            f"and {why_unreachable()}: connect, or use --random-weights for its geometry alone"
        )
    return ModelUnavailable(
        f"{repo} at {sha[:12]}: neither {SAFETENSORS} nor its index is there; kvcal reads safetensors only, "
        "convert the checkpoint"
    )


def fetch_weights(repo: str, sha: str, shards: list[str]) -> Path:
    """The folder of that commit, with all these shards in it."""
    return _snapshot(repo, sha, shards)


def _snapshot(repo: str, sha: str, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        with quiet():
            return Path(
                snapshot_download(
                    repo,
                    revision=sha,
                    allow_patterns=files,
                    local_files_only=not reachable(),
                    etag_timeout=PROBE_SECONDS,
                )
            )
    except KVCalError:
        raise
    except Exception as error:
        raise explain(error, repo, sha, files[0]) from error


class MissingFile(ModelUnavailable):
    """The repository is there, the file is not."""


def explain(error: Exception, repo: str, revision: str | None, what: str) -> ModelUnavailable:
    """An error of huggingface_hub as one line that says what to do. The order matters: subclasses first."""
    from huggingface_hub import errors

    site = f"https://huggingface.co/{repo}"
    if isinstance(error, errors.GatedRepoError):
        return ModelUnavailable(
            f"{repo} is gated: accept its terms at {site} and set HF_TOKEN (or run `hf auth login`)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelUnavailable(f"{repo} has no revision {revision!r}: see {site}/commits for those it has")
    if isinstance(error, errors.LocalEntryNotFoundError):
        return _not_cached(repo, revision, what)
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelUnavailable(
            f"{repo} is not on the hub, or it is private: check the name, or set HF_TOKEN to one that may read it"
        )
    if isinstance(error, errors.EntryNotFoundError):
        return MissingFile(f"{repo} has no file {what}: it is not a model that kvcal can read")
    if isinstance(error, errors.HFValidationError):
        return ModelUnavailable(f"{repo!r} is not a valid hub id: expected org/name")
    return ModelUnavailable(f"{repo}: the hub did not deliver {what} ({one_line(error)}); try again")


def _not_cached(repo: str, revision: str | None, what: str) -> ModelUnavailable:
    from huggingface_hub import constants

    if what in (INDEX, SAFETENSORS):
        return MissingFile(f"{repo} has no cached {what}")
    at = f" at revision {revision}" if revision else ""
    reason = "the connection broke" if reachable() else why_unreachable()
    entry = BY_HUB_ID.get(repo)
    otherwise = "or a model of `kvcal models`" if entry is None else "or use --random-weights for its geometry alone"
    local = "pass a local folder"
    if entry is not None and Path(entry.name).is_dir():  # which the short name goes before
        local = f"give ./{entry.name} for the folder of that name"
    return ModelUnavailable(
        f"{repo}{at} is not in the cache {constants.HF_HUB_CACHE} and {reason}: connect, {local}, {otherwise}"
    )


def revision_of(config_path: Path) -> str:
    """The commit sha in a cached path .../snapshots/SHA/config.json."""
    return config_path.parent.name


def dataset_info(repo: str) -> DatasetInfo:
    """What the hub says of a data set; errors of huggingface_hub pass through."""
    from huggingface_hub import HfApi

    return HfApi().dataset_info(repo, timeout=PROBE_SECONDS)
