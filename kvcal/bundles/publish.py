"""Bundles on the Hugging Face hub: push with card and plots in one commit, pull by commit with every hash checked.

What goes over the network goes through huggingface_hub. Nothing is left where a file was asked for until it is whole
and its hash is the hub's.
"""

from __future__ import annotations

import errno
import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcal_artifacts.bundle import SUFFIX, load_bundle
from kvcal_artifacts.errors import CorruptBundle, KVCalError, ModelUnavailable, UsageError
from kvcal_artifacts.files import read_bytes, refuse_dash, temporary_folder, write_together

from ..models import hub
from ..models.names import HUB_ID
from ..models.quiet import quiet
from ..report.outputs import check_output
from .card import Card

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo
    from huggingface_hub.hf_api import RepoSibling

CARD = "README.md"
RECORD = ".pulled.json"
LOCAL_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE)


@dataclass(frozen=True)
class Pushed:
    """What a push changed. commit: the one that holds the bundle now. changed: False where the repository had all of it
    already.
    """

    repo: str
    url: str
    commit: str
    changed: bool
    file: str
    sha256: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Pulled:
    """What RECORD next to the bundle holds too. revision: as asked for."""

    repo: str
    endpoint: str
    revision: str | None
    commit: str
    file: str
    sha256: str
    files: tuple[str, ...]


def push(
    bundle: Path, repo: str, card: Card, *, branch: str | None = None, message: str | None = None, private: bool = False
) -> Pushed:
    """Bundle, card and plots in one commit; the repository is made where there is none. The bundle is checked first.

    private: of a new repository. Raises UsageError for a name that `pull` would not find, and for `private` where there
    is a public repository. Raises ModelUnavailable offline, without permission, or where there is no such branch; then
    no repository is made. Raises CorruptBundle where the hub then holds another hash.
    """
    from huggingface_hub import CommitOperationAdd

    if not _is_bundle(bundle.name):
        raise UsageError(f"{bundle}: `kvcal pull` finds names that end in {SUFFIX}: rename the file")
    data = read_bytes(bundle)
    digest = hashlib.sha256(data).hexdigest()
    contents = {bundle.name: data, CARD: card.text.encode(), **card.plots}
    api = _api(repo)
    with _explained(repo, branch, "push to"):
        if branch not in (None, "main") and not api.repo_exists(repo):
            raise ModelUnavailable(
                f"{repo} has no revision {branch!r}: it is not there yet; a new one has main, leave --branch out"
            )
        if private and api.repo_exists(repo) and not api.model_info(repo).private:
            raise UsageError(
                f"--private: {repo} is there already and public, and nothing was pushed; make it private on the hub, "
                "or leave "
                "--private out"
            )
        api.create_repo(repo, private=private or None, exist_ok=True)
        before = api.model_info(repo, revision=branch).sha
        done = api.create_commit(
            repo,
            [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in contents.items()],
            commit_message=message or f"{bundle.name}, sha256 {digest[:16]}",
            revision=branch,
        )
        info = api.model_info(repo, revision=done.oid, files_metadata=True)
    for name, content in contents.items():
        _compare(f"{repo}: {name} on the hub", content, _entry(info, name))
    return Pushed(repo, hub.public(done.commit_url), done.oid, done.oid != before, bundle.name, digest, tuple(contents))


def pull(
    repo: str, folder: Path, *, revision: str | None = None, file: str | None = None, sha256: str | None = None
) -> Pulled:
    """The bundle with its card and plots at one commit, into `folder`; RECORD next to it says which commit. A symlink
    there stays one: the file it leads to is replaced.

    file: where the repository holds several bundles. sha256: what the bundle must have, from elsewhere than the hub.
    Raises ModelUnavailable (offline, no permission, no such repository, revision or file), CorruptBundle (half a
    download, a wrong hash, a damaged bundle); then nothing is written.
    """
    refuse_dash(folder, "--output")
    if not folder.is_dir():
        raise KVCalError(f"{folder} is not a folder; create it or give another --output")
    api = _api(repo)
    with _explained(repo, revision, "read"):
        info = api.model_info(repo, revision=revision, files_metadata=True)
    commit = str(info.sha)
    name = _chosen(repo, info, file)
    names = [name, *_companions(info, name)]
    places = {part: _local(name) if part == CARD else part for part in names}
    record = f"{name.removesuffix(SUFFIX)}{RECORD}"
    _check_places(folder, [*places.values(), record])
    contents: dict[str, bytes] = {}
    with _temporary(folder, name) as temporary:
        for part, place in places.items():
            with _explained(repo, revision, "read", part):
                _download(repo, part, commit, temporary)
            contents[place] = (temporary / part).read_bytes()
            _compare(f"{repo} at {commit[:12]}: {part}", contents[place], _entry(info, part))
        digest = hashlib.sha256(contents[name]).hexdigest()
        if sha256 is not None and digest != sha256.lower():
            raise CorruptBundle(
                f"{repo}: {name} has sha256 {digest[:16]}…, --sha256 says {sha256[:16]}…; nothing was written"
            )
        _check(repo, temporary / name)
    pulled = Pulled(repo, hub.public(api.endpoint), revision, commit, name, digest, tuple(places.values()))
    contents[record] = (json.dumps(asdict(pulled), indent=2, sort_keys=True) + "\n").encode()
    write_together({folder / place: contents[place] for place in reversed(contents)})  # the bundle comes last
    return pulled


def _check_places(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        if (folder / name).is_dir():
            raise KVCalError(f"{folder / name} is a folder, in the way of the file; move it or give another --output")
        check_output(folder / name)


def _unwritable(folder: Path, error: OSError) -> KVCalError:
    return KVCalError(f"{folder}: cannot be written to ({error.strerror or error}); make room or give another --output")


@contextmanager
def _temporary(folder: Path, name: str) -> Iterator[Path]:
    """A folder for what is not checked yet, locked while in use. Those of killed pulls are not locked, and go
    away.
    """
    with ExitStack() as stack:
        try:
            temporary = stack.enter_context(temporary_folder(folder / name))
        except OSError as error:
            raise _unwritable(folder, error) from error
        yield temporary


def _api(repo: str) -> HfApi:
    from huggingface_hub import HfApi, constants

    if not HUB_ID.fullmatch(repo):
        raise _misnamed(repo)
    if not hub.reachable():
        raise ModelUnavailable(f"{repo}: {hub.why_unreachable()}; connect, and try again: nothing was changed")
    return HfApi(endpoint=constants.ENDPOINT)


def _misnamed(repo: str) -> UsageError:
    return UsageError(f"{repo!r} is not a repository's name: org/name, of letters, digits, '-', '_' and '.'")


def _download(repo: str, name: str, commit: str, folder: Path) -> None:
    """Not through the shared cache: a tampered answer stored there would be taken for good the next time."""
    from huggingface_hub import constants, hf_hub_download

    hf_hub_download(
        repo,
        name,
        revision=commit,
        local_dir=folder,
        force_download=True,
        endpoint=constants.ENDPOINT,
        etag_timeout=hub.PROBE_SECONDS,
    )


def _chosen(repo: str, info: ModelInfo, file: str | None) -> str:
    bundles = sorted(one.rfilename for one in info.siblings or [] if _is_bundle(one.rfilename))
    if file is not None and file in bundles:
        return file
    if file is None and len(bundles) == 1:
        return bundles[0]
    names = ", ".join(bundles) or "none"
    if file is None and bundles:
        raise UsageError(f"{repo} holds several bundles ({names}): say which with --file")
    what = f"file {file}" if file is not None else f"bundle (*{SUFFIX})"
    raise ModelUnavailable(f"{repo} at {str(info.sha)[:12]} holds no {what}; its bundles: {names}")


def _is_bundle(name: str) -> bool:
    """Whether it is a bundle in the repository's root: a name with a folder would be written there."""
    return name.endswith(SUFFIX) and "/" not in name


def _companions(info: ModelInfo, name: str) -> list[str]:
    """Card and plots of a bundle."""
    stem = name.removesuffix(SUFFIX)
    ours = {CARD, f"{stem}.errors.png", f"{stem}.front.png"}
    return sorted(one.rfilename for one in info.siblings or [] if one.rfilename in ours)


def _local(name: str) -> str:
    """What the card is called next to the bundle: a README.md may be there already, of something else."""
    return f"{name.removesuffix(SUFFIX)}.card.md"


def _entry(info: ModelInfo, name: str) -> RepoSibling:
    entry = next((one for one in info.siblings or [] if one.rfilename == name), None)
    if entry is None:
        raise CorruptBundle(f"{name}: not in commit {str(info.sha)[:12]}, although the hub took it")
    return entry


def _compare(what: str, data: bytes, entry: RepoSibling) -> None:
    """Content against the hash that the hub lists: sha256 of large files, git's sha1 of others."""
    if entry.lfs is not None:
        stated, computed = str(entry.lfs.sha256), hashlib.sha256(data).hexdigest()
    else:
        computed = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        stated = str(entry.blob_id)
    if stated != computed:
        raise CorruptBundle(f"{what} has hash {computed[:16]}…, the hub lists {stated[:16]}…; try again")


def _check(repo: str, path: Path) -> None:
    try:
        load_bundle(path)
    except KVCalError as error:
        reason = str(error).replace(str(path), path.name)
        raise type(error)(f"{repo}: {reason}; nothing was written") from error


@contextmanager
def _explained(repo: str, revision: str | None, doing: str, what: str = "its list of files") -> Iterator[None]:
    """Errors of huggingface_hub as one line, without its log lines and warnings."""
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except KVCalError:
        raise
    except Exception as error:
        raise _explain(error, repo, revision, doing, what) from error


def _explain(error: Exception, repo: str, revision: str | None, doing: str, what: str) -> KVCalError:
    from huggingface_hub import errors

    if isinstance(error, ValueError) and isinstance(error.__cause__, Exception):  # "failed due to the above error"
        error = error.__cause__
    status = _status(error)
    if (local := _of_this_machine(error)) is not None:
        return KVCalError(
            f"{repo}: {what} cannot be stored here ({local.strerror}); make room or give another --output"
        )
    if isinstance(error, errors.HFValidationError):
        return _misnamed(repo)
    if isinstance(error, (errors.GatedRepoError, errors.RevisionNotFoundError)):
        return hub.explain(error, repo, revision, what)
    if isinstance(error, errors.RepositoryNotFoundError) and doing == "read":
        return hub.explain(error, repo, revision, what)
    if status in (401, 403) or isinstance(error, errors.RepositoryNotFoundError):
        return ModelUnavailable(
            f"no permission to {doing} {repo} (HTTP {status}): set HF_TOKEN to a token that may {doing} it, or check "
            "the name",
        )
    if "Consistency check failed" in str(error):
        return CorruptBundle(f"{repo}: the download of {what} broke off ({hub.one_line(error, 120)}); try again")
    return ModelUnavailable(f"{repo}: the hub did not let kvcal {doing} {what} ({hub.one_line(error)}); try again")


def _of_this_machine(error: BaseException | None) -> OSError | None:
    """A full or read-only disk, in the error or in what it comes from."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in LOCAL_FAULTS:
            return error
        error = error.__cause__ or error.__context__
    return None


def _status(error: BaseException | None) -> int | None:
    """The HTTP status of an error, or of the one that it comes from."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return int(status)
        error = error.__cause__
    return None
