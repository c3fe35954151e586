"""Push and pull against a local stand-in of the hub (hub_stand_in.py): the round trip, and everything that can go
wrong.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcal.models import hub as client
from kvcal_artifacts import load_bundle
from kvcal_artifacts.files import temporary_folder
from tests.support.hub_stand_in import READER, STRANGER, WRITER, File, Hub, Repository, Tree, running
from tests.support.models_fixture import SMALL, SUFFIX, Done, kvcal, write_model, write_text

NAME, REPO = f"fitted{SUFFIX}", "lab/fitted"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("hub")
    write_model(base / "model")
    write_text(base / "words.txt")
    options = ["--model", base / "model", "--text", base / "words.txt", *SMALL, "--output", base / NAME]
    assert kvcal("fit-predictors", *options).code == 0
    return base


@pytest.fixture(scope="module")
def bundle(base: Path) -> Path:
    return base / NAME


@pytest.fixture(scope="module")
def tree(base: Path, bundle: Path) -> Tree:
    """What a push of the bundle leaves in its repository: pushed once, for the tests of pull."""
    card = kvcal("card", bundle, "--repo", REPO, "--output", base / "README.md")
    assert card.code == 0, card.err
    plot = "fitted.errors.png"
    files = {"README.md": File((base / "README.md").read_bytes(), large=False)}
    return files | {name: File((base / name).read_bytes(), large=True) for name in (NAME, plot)}


@pytest.fixture
def commit(hub: Hub, tree: Tree) -> str:
    """Of the bundle in the stand-in, as a push leaves it (test_bundle_card_and_plot_are_one_commit)."""
    hub.repositories[REPO] = Repository()
    return hub.repositories[REPO].commit("main", tree, "pushed")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A stand-in that huggingface_hub talks to, as a writer, without waiting between attempts."""
    from huggingface_hub import constants, file_download

    with running() as server:
        place = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", place)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
        monkeypatch.setenv("HF_TOKEN", WRITER)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,127.0.0.2")
        client.reachable.cache_clear()
        yield server
    client.reachable.cache_clear()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def published(bundle: Path) -> Any:
    done = kvcal("push", bundle, REPO, "--json")
    assert done.code == 0, done.err
    return done.json


def refused(done: Done, code: int, *parts: str) -> None:
    assert done.code == code, done.err
    for part in parts:
        assert part in done.complaint


# The round trip.


def test_push_and_pull_give_the_same_bundle(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    pushed = published(bundle)
    assert pushed["changed"] is True and pushed["sha256"] == sha256(bundle)
    done = kvcal("pull", REPO, "--output", tmp_path, "--json")
    assert done.code == 0, done.err
    assert done.json["commit"] == pushed["commit"] == hub.repositories[REPO].branches["main"]
    assert (tmp_path / NAME).read_bytes() == bundle.read_bytes()
    record = json.loads((tmp_path / "fitted.pulled.json").read_text())
    assert (record["repo"], record["commit"], record["sha256"]) == (REPO, pushed["commit"], pushed["sha256"])
    assert {path.name for path in tmp_path.iterdir()} == {
        NAME,
        "fitted.card.md",
        "fitted.errors.png",
        "fitted.pulled.json",
    }


def test_bundle_card_and_plot_are_one_commit(hub: Hub, bundle: Path) -> None:
    pushed = published(bundle)
    repository = hub.repositories[REPO]
    assert len(repository.commits) == 2  # the first is the repository's own
    tree = repository.commits[pushed["commit"]]
    assert {NAME, "README.md", "fitted.errors.png"} <= set(tree)
    assert tree[NAME].large and tree["fitted.errors.png"].data.startswith(b"\x89PNG")
    fields = yaml.safe_load(tree["README.md"].data.decode().split("---")[1])
    assert fields["library_name"] == "kvcal" and f"kvcal pull {REPO}" in tree["README.md"].data.decode()
    assert any("preupload" in call for call in hub.calls) and any(call.startswith("PUT /lfs/") for call in hub.calls)


@pytest.fixture(scope="module")
def local(base: Path) -> Path:
    """Of a text whose name is no id on the hub."""
    write_text(base / "my text.txt")
    options = ["--model", base / "model", "--text", base / "my text.txt", *SMALL, "--output", base / f"local{SUFFIX}"]
    assert kvcal("fit-norms", *options).code == 0
    return base / f"local{SUFFIX}"


def test_a_card_of_local_files_is_one_that_the_hub_takes(hub: Hub, local: Path) -> None:
    done = kvcal("push", local, "lab/local", "--json")
    assert done.code == 0, done.err
    card = hub.repositories["lab/local"].commits[done.json["commit"]]["README.md"].data.decode()
    fields = yaml.safe_load(card.split("---")[1])
    assert not {"datasets", "base_model", "base_model_relation"} & set(fields)
    assert "file:my text.txt" in card and "**model**" in card  # in words


@pytest.mark.parametrize("field", ["datasets: ['file:a.txt']", "base_model: my model", "base_model: [/srv/model]"])
def test_the_stand_in_knows_ids(field: str, hub: Hub) -> None:
    from huggingface_hub import get_session

    def status(front: str) -> int:
        asked = {"content": f"---\n{front}\n---\n", "repoType": "model"}
        return get_session().post(f"{hub.url}/api/validate-yaml", json=asked).status_code

    assert status(field) == 400
    assert status("datasets: [org/name, name]\nbase_model: org/name") == 200


def test_a_private_push_to_a_public_repository_is_refused(hub: Hub, bundle: Path) -> None:
    """Whoever asks for a private one does not expect all the world to read it."""
    first = published(bundle)["commit"]
    refused(kvcal("push", bundle, REPO, "--private"), 2, f"--private: {REPO} is there already and public")
    assert hub.repositories[REPO].branches["main"] == first
    for _ in range(2):  # a new one is made so, and that one then is
        assert kvcal("push", bundle, "lab/private", "--private").code == 0
    assert hub.repositories["lab/private"].private and not hub.repositories[REPO].private


def test_a_second_push_changes_nothing(hub: Hub, bundle: Path) -> None:
    first, second = published(bundle), published(bundle)
    assert (second["changed"], second["commit"]) == (False, first["commit"])
    assert len(hub.repositories[REPO].commits) == 2


def test_a_large_bundle_goes_up_in_parts(hub: Hub, bundle: Path) -> None:
    hub.part_size = 10_000
    commit = published(bundle)["commit"]
    assert hub.repositories[REPO].commits[commit][NAME].data == bundle.read_bytes()
    assert sum(call.endswith("/complete") for call in hub.calls) >= 1


def test_a_revision_is_pinned(hub: Hub, commit: str, bundle: Path, tree: Tree, tmp_path: Path) -> None:
    """main moves on; the commit still gives what it gave."""
    changed = load_bundle(bundle)
    changed.metrics["note"] = 1
    changed.write(tmp_path / "changed")
    later = hub.repositories[REPO].commit(
        "main", tree | {NAME: File((tmp_path / "changed").read_bytes(), large=True)}, "2"
    )
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old = kvcal("pull", REPO, "--revision", commit, "--output", tmp_path / "old", "--json").json
    new = kvcal("pull", REPO, "--output", tmp_path / "new", "--json").json
    assert (old["commit"], old["revision"], new["commit"], new["revision"]) == (commit, commit, later, None)
    assert (tmp_path / "old" / NAME).read_bytes() == bundle.read_bytes()
    assert (tmp_path / "new" / NAME).read_bytes() == (tmp_path / "changed").read_bytes()


def test_a_readme_of_something_else_stays(commit: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert kvcal("pull", REPO, "--output", tmp_path).code == 0
    assert (tmp_path / "README.md").read_text() == "mine"
    assert "library_name: kvcal" in (tmp_path / "fitted.card.md").read_text()


def test_a_pull_in_words(commit: str, bundle: Path, tmp_path: Path) -> None:
    done = kvcal("pull", REPO, "--output", tmp_path)
    assert commit in done.out and sha256(bundle) in done.out


def test_several_bundles_need_a_name(hub: Hub, commit: str, tree: Tree, tmp_path: Path) -> None:
    hub.repositories[REPO].commit("main", tree | {f"twin{SUFFIX}": tree[NAME]}, "two")
    refused(kvcal("pull", REPO, "--output", tmp_path), 2, "several bundles", NAME, "--file")
    assert kvcal("pull", REPO, "--file", NAME, "--output", tmp_path).code == 0
    refused(kvcal("pull", REPO, "--file", "other", "--output", tmp_path), 5, "holds no file other", NAME)


def test_a_name_with_a_folder_is_no_bundle(hub: Hub, commit: str, tree: Tree, tmp_path: Path) -> None:
    """It would be written elsewhere than asked for."""
    hub.repositories[REPO].commit("main", {f"../evil{SUFFIX}": tree[NAME], f"sub/evil{SUFFIX}": tree[NAME]}, "evil")
    refused(kvcal("pull", REPO, "--output", tmp_path), 5, "holds no bundle")


def test_a_connection_that_breaks_once_is_taken_up_again(hub: Hub, commit: str, bundle: Path, tmp_path: Path) -> None:
    hub.faults[SUFFIX] = "cut once"
    assert kvcal("pull", REPO, "--output", tmp_path).code == 0
    assert (tmp_path / NAME).read_bytes() == bundle.read_bytes()
    assert sum(call.startswith("GET /cdn/") and call.endswith(SUFFIX) for call in hub.calls) == 2


# What goes wrong is one line, and nothing is left.


def nothing_new(folder: Path) -> bool:
    return not list(folder.iterdir())


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [("tampered", 4, "the hub lists"), ("short", 4, "broke off"), ("broken", 5, "try again")],
)
def test_a_download_that_is_not_the_file(
    fault: str, code: int, said: str, hub: Hub, commit: str, tmp_path: Path
) -> None:
    hub.faults[SUFFIX] = fault
    refused(kvcal("pull", REPO, "--output", tmp_path), code, REPO, NAME, said)
    assert nothing_new(tmp_path)


def test_what_lay_there_stays_when_a_pull_fails(hub: Hub, commit: str, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"before")
    hub.faults[SUFFIX] = "tampered"
    assert kvcal("pull", REPO, "--output", tmp_path).code == 4
    assert [path.name for path in tmp_path.iterdir()] == [NAME] and (tmp_path / NAME).read_bytes() == b"before"


def test_a_bundle_that_was_tampered_with_on_the_hub(hub: Hub, commit: str, bundle: Path, tmp_path: Path) -> None:
    """The hub's own hash fits; the bundle's do not."""
    data = bytearray(bundle.read_bytes())
    data[-100] ^= 1
    repository = hub.repositories[REPO]
    tree = dict(repository.commits[repository.branches["main"]])
    repository.commit("main", tree | {NAME: File(bytes(data), large=True)}, "evil")
    refused(kvcal("pull", REPO, "--output", tmp_path), 4, NAME, "has hash", "header says")
    assert nothing_new(tmp_path)


def test_another_hash_than_expected(hub: Hub, commit: str, bundle: Path, tmp_path: Path) -> None:
    refused(
        kvcal("pull", REPO, "--sha256", "0" * 64, "--output", tmp_path), 4, "--sha256 says 0000", sha256(bundle)[:16]
    )
    assert nothing_new(tmp_path)
    assert kvcal("pull", REPO, "--sha256", sha256(bundle), "--output", tmp_path).code == 0


@pytest.mark.parametrize("name", ["fitted.card.md", "fitted.errors.png", "fitted.pulled.json", NAME])
def test_a_folder_in_the_way(name: str, hub: Hub, commit: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    refused(kvcal("pull", REPO, "--output", tmp_path), 1, f"{tmp_path / name} is a folder")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert not any("/resolve/" in call for call in hub.calls)  # said before anything is fetched


def test_a_link_stays_and_the_file_it_leads_to_is_replaced(commit: str, bundle: Path, tmp_path: Path) -> None:
    far, here = tmp_path / "far", tmp_path / "here"
    far.mkdir()
    here.mkdir()
    old = far / "old"
    old.write_bytes(b"before")
    for name, target in {NAME: old, "fitted.card.md": far / "new"}.items():  # the second is not there yet
        (here / name).symlink_to(target)
    done = kvcal("pull", REPO, "--output", here)
    assert done.code == 0, done.err
    assert (here / NAME).is_symlink() and (here / "fitted.card.md").is_symlink()
    assert old.read_bytes() == bundle.read_bytes() and "kvcal pull" in (far / "new").read_text()
    assert sorted(entry.name for entry in far.iterdir()) == ["new", "old"]


def test_a_link_into_no_folder_is_refused_before_anything_is_fetched(hub: Hub, commit: str, tmp_path: Path) -> None:
    (tmp_path / NAME).symlink_to("none/x")
    refused(kvcal("pull", REPO, "--output", tmp_path), 1, f"{tmp_path / 'none'} is not a folder")
    assert [path.name for path in tmp_path.iterdir()] == [NAME] and (tmp_path / NAME).is_symlink()
    assert not any("/resolve/" in call for call in hub.calls)


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_disk_that_fills_up_in_the_middle_changes_nothing(
    nth: int, commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are four files; no card of one commit is left beside a bundle of another."""
    names = [NAME, "fitted.card.md", "fitted.errors.png", "fitted.pulled.json"]
    for name in names:
        (tmp_path / name).write_bytes(b"before")
    seen: list[int] = []

    def full(handle: int) -> None:
        seen.append(handle)
        if len(seen) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refused(kvcal("pull", REPO, "--output", tmp_path), 1, "cannot be written: No space left on device")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"before"}


def test_a_full_disk_is_not_the_hub(commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import file_download

    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_download, "http_get", full)
    refused(kvcal("pull", REPO, "--output", tmp_path), 1, "cannot be stored here (No space left on device)")
    assert nothing_new(tmp_path)


def test_what_a_killed_pull_left_goes_away(commit: str, tmp_path: Path) -> None:
    """That of another one which is still at work stays."""
    with ExitStack() as stack:
        left, used = (stack.enter_context(temporary_folder(tmp_path / NAME)) for _ in range(2))
    foreign = tmp_path / f".{NAME}.mine.tmp"
    for folder in (left, used, foreign):
        folder.mkdir()
        (folder / NAME).write_bytes(b"half")
    handle = os.open(used, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert kvcal("pull", REPO, "--output", tmp_path).code == 0
    finally:
        os.close(handle)
    assert not left.exists() and (used / NAME).exists() and (foreign / NAME).exists()


def test_a_name_that_pull_would_not_find(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    shutil.copy(bundle, tmp_path / "foo.safetensors")
    refused(kvcal("push", tmp_path / "foo.safetensors", REPO), 2, "foo.safetensors", f"end in {SUFFIX}")
    assert not hub.repositories


@pytest.mark.parametrize("branch", ["nope", "main"])
def test_a_branch_of_a_new_repository(branch: str, hub: Hub, bundle: Path) -> None:
    """There is only main; for any other no empty repository is left."""
    done = kvcal("push", bundle, REPO, "--branch", branch)
    if branch == "main":
        assert done.code == 0 and REPO in hub.repositories
        return
    refused(done, 5, f"{REPO} has no revision 'nope'", "leave --branch out")
    assert not hub.repositories


def test_offline(bundle: Path, tmp_path: Path) -> None:
    """As conftest.py sets it: HF_HUB_OFFLINE."""
    client.reachable.cache_clear()
    refused(kvcal("push", bundle, REPO), 5, REPO, "HF_HUB_OFFLINE is set")
    refused(kvcal("pull", REPO, "--output", tmp_path), 5, REPO, "HF_HUB_OFFLINE is set")
    assert nothing_new(tmp_path)


def test_nobody_answers(hub: Hub, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused(kvcal("push", bundle, REPO), 5, "http://127.0.0.1:9 cannot be reached")
    refused(kvcal("pull", REPO, "--output", tmp_path), 5, "http://127.0.0.1:9 cannot be reached")


@pytest.mark.parametrize(("token", "status"), [(None, 401), (STRANGER, 403), ("hf_wrong", 401)])
def test_no_permission_to_create(
    token: str | None, status: int, hub: Hub, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_token(monkeypatch, token)
    refused(kvcal("push", bundle, REPO), 5, f"no permission to push to {REPO}", f"HTTP {status}", "HF_TOKEN")
    assert REPO not in hub.repositories and not hub.objects


def test_no_permission_to_write(hub: Hub, commit: str, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = len(hub.repositories[REPO].commits)
    give_token(monkeypatch, READER)
    refused(kvcal("push", bundle, REPO), 5, f"no permission to push to {REPO}", "HTTP 403")
    assert len(hub.repositories[REPO].commits) == commits


def give_token(monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)


def test_what_may_not_be_read(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["lab/private"] = Repository(private=True)
    hub.repositories["lab/gated"] = Repository(gated=True)
    give_token(monkeypatch, STRANGER)
    refused(kvcal("pull", "lab/private", "--output", tmp_path), 5, "not on the hub, or it is private")
    refused(kvcal("pull", "lab/gated", "--output", tmp_path), 5, "is gated")
    assert nothing_new(tmp_path)


def test_what_is_not_there(hub: Hub, commit: str, bundle: Path, tmp_path: Path) -> None:
    refused(kvcal("pull", "lab/nothing", "--output", tmp_path), 5, "lab/nothing is not on the hub")
    refused(kvcal("pull", REPO, "--revision", "v9", "--output", tmp_path), 5, "no revision 'v9'")
    refused(kvcal("push", bundle, REPO, "--branch", "v9"), 5, "no revision 'v9'")
    hub.repositories["lab/empty"] = Repository()
    hub.repositories["lab/empty"].commit("main", {}, "nothing")
    refused(kvcal("pull", "lab/empty", "--output", tmp_path), 5, "holds no bundle")
    refused(kvcal("pull", REPO, "--output", tmp_path / "none"), 1, "none is not a folder")
    assert nothing_new(tmp_path)


def test_names_and_files_are_checked_first(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    for name in ("no such name", "name", "lab/a..b", "lab/-a"):
        refused(kvcal("push", bundle, name), 2, f"'{name}' is not a repository's name")
    damaged = tmp_path / NAME
    damaged.write_bytes(bundle.read_bytes()[:-1])
    refused(kvcal("push", damaged, REPO), 4, NAME)
    assert all(call.startswith(("HEAD /", "GET /api/agent")) for call in hub.calls)  # whether it answers at all


def test_the_stand_in_refuses_what_the_hub_would(hub: Hub, commit: str) -> None:
    """Else a push that sends garbage would pass here."""
    from huggingface_hub import get_session

    assert get_session().put(f"{hub.storage}/lfs/{'0' * 64}", content=b"x").status_code == 400
    lines = [
        {"key": "header", "value": {"summary": "s"}},
        {"key": "lfsFile", "value": {"path": "p", "algo": "sha256", "oid": "1"}},
    ]
    body = "\n".join(map(json.dumps, lines)).encode()
    headers = {"Authorization": f"Bearer {WRITER}"}
    assert (
        get_session().post(f"{hub.url}/api/models/{REPO}/commit/main", content=body, headers=headers).status_code == 400
    )
    text = {"content": "---\ntags: [\n---\n", "repoType": "model"}
    assert get_session().post(f"{hub.url}/api/validate-yaml", json=text).status_code == 400
