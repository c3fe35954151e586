"""Files that are read and written by name: no pipe is waited for, and nothing foreign is lost or left open to others."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcal.calibrate import checkpoint
from kvcal.calibrate.checkpoint import partial_folder
from kvcal.models.folding import write_folded
from kvcal.models.names import resolve
from kvcal_artifacts import files
from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.files import drop_cached, write_atomically
from kvcal_artifacts.paths.preflight import verdicts
from tests.support.models_fixture import SMALL, SUFFIX, Done, kvcal, write_model, write_text


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("files")
    write_model(base / "model")
    write_text(base / "words.txt", 8000)
    return base


def fitting(base: Path, output: Path, *options: object) -> list[object]:
    given = ["--model", base / "model", "--text", base / "words.txt", *SMALL, "--output", output, *options]
    return ["fit-predictors", *given]


def one_line(done: Done, code: int, *parts: object) -> None:
    assert done.code == code, done.err
    assert all(str(part) in done.complaint for part in parts), done.complaint


# Permissions.


def modes_under(mask: int, folder: Path, write: Callable[[], object]) -> dict[str, int]:
    before = os.umask(mask)
    try:
        write()
    finally:
        os.umask(before)
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_are_those_of_a_new_file(mask: int, base: Path, tmp_path: Path) -> None:
    """The oracle is a file that Python itself makes."""

    def write() -> None:
        (tmp_path / "plain").write_bytes(b"")
        write_atomically(tmp_path / "x", b"new")
        (tmp_path / "folder").mkdir()
        write_folded(resolve(str(base / "model")), {}, tmp_path / "model")

    found = modes_under(mask, tmp_path, write)
    assert found.pop("folder") == found.pop("model") == 0o777 & ~mask
    assert len(found) >= 5 and set(found.values()) == {0o666 & ~mask}


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_that_is_replaced_keeps_its_permissions(mode: int, tmp_path: Path) -> None:
    place = tmp_path / "x"
    place.write_bytes(b"secret")
    place.chmod(mode)
    (tmp_path / "mode").touch(0o600)  # of another file: not what new ones get
    found = modes_under(0o022, tmp_path, lambda: files.write_together({place: b"new", tmp_path / "y": b"new"}))
    assert found["x"] == mode and found["y"] == 0o644 and place.read_bytes() == b"new"
    place.unlink()
    assert modes_under(0o027, tmp_path, lambda: (tmp_path / "z").touch(files.new_file_mode(tmp_path)))["z"] == 0o640


def test_no_umask_is_changed_while_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the whole process: files that other threads make meanwhile would be writable by all."""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask was changed"))
    write_atomically(tmp_path / "x", b"new")
    files.new_file_mode(tmp_path)
    used = [path for name in ("kvcal", "artifacts", "kernels") for path in Path(name).rglob("*.py")]
    assert not [path for path in used if "umask(" in path.read_text()]


@pytest.mark.parametrize("linked", [False, True])
def test_a_read_only_output_is_refused_and_stays(linked: bool, base: Path, tmp_path: Path) -> None:
    """For root, too. A link's target decides, and it is said before any work."""
    place, given = tmp_path / f"x{SUFFIX}", tmp_path / f"link{SUFFIX}"
    place.write_bytes(b"precious")
    place.chmod(0o444)
    given.symlink_to(place)
    given = given if linked else place
    with pytest.raises(KVCalError, match="is read-only"):
        write_atomically(given, b"new")
    one_line(kvcal(*fitting(base, given)), 1, given, "is read-only (mode 0444)", "make it writable")
    one_line(kvcal("preset", "kivi-2", "--config-only", "--output", given), 1, given, "is read-only")
    assert place.read_bytes() == b"precious" and stat.S_IMODE(place.stat().st_mode) == 0o444
    place.chmod(0o644)
    assert kvcal("preset", "kivi-2", "--config-only", "--output", given).code == 0


def test_a_read_only_output_of_a_build_is_refused_before_any_work(base: Path, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        '[models.tiny]\nmodel = "tiny"\n[bundles.a]\npreset = "kivi-2"\nconfig_only = true\n'
    )
    for name in (f"tiny-a{SUFFIX}", "r.lock.json"):
        (tmp_path / name).write_text('{"format": "kvcal build 1", "bundles": {}, "gates": {}}')
        (tmp_path / name).chmod(0o444)
        one_line(kvcal("build", tmp_path / "r.toml"), 1, name, "is read-only")
        (tmp_path / name).unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["r.toml"]


# Temporary files.

KILLED = """
import os, signal, sys
from pathlib import Path
from kvcal_artifacts.files import write_atomically

os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
write_atomically(Path(sys.argv[1]), b"half")
"""


def test_what_a_killed_write_left_goes_away_with_the_next(tmp_path: Path) -> None:
    place = tmp_path / "x"
    done = subprocess.run([sys.executable, "-c", KILLED, str(place)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1 and not place.exists()
    write_atomically(tmp_path / "y", b"other")  # another file's are left alone
    assert len(list(tmp_path.iterdir())) == 2
    write_atomically(place, b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]
    assert place.read_bytes() == b"new"


def test_a_write_under_way_and_what_is_not_ours_stay(tmp_path: Path) -> None:
    place = tmp_path / "x"
    handle, used = files.temporary_file(place)
    name = used.name.split(".")
    foreign = [
        ".x.tmp",
        ".x.mine.tmp",
        ".x.0123abcd.01234567.tmp",
        f".x.{name[2]}.0123456.tmp",
        f".x.{name[2]}.01234567.txt",
    ]
    for one in foreign:
        (tmp_path / one).write_text("mine")
    link = tmp_path / f".x.{name[2]}.76543210.tmp"
    link.symlink_to(tmp_path / ".x.tmp")
    pipe = tmp_path / f".x.{name[2]}.76543211.tmp"
    os.mkfifo(pipe)
    write_atomically(place, b"new")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*foreign, used.name, link.name, pipe.name, "x"}
    os.close(handle)
    write_atomically(place, b"newer")
    assert {path.name for path in tmp_path.iterdir()} == {*foreign, link.name, pipe.name, "x"}


def test_many_writers_of_one_file_never_take_each_others(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def writer(number: int) -> None:
        try:
            for _ in range(15):
                write_atomically(tmp_path / "x", bytes([number]) * 1000)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=writer, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert len(set((tmp_path / "x").read_bytes())) == 1


def test_a_name_as_long_as_the_system_takes(tmp_path: Path) -> None:
    place = tmp_path / ("ä" * 127)
    write_atomically(place, b"new")
    assert [path.name for path in tmp_path.iterdir()] == [place.name]


# Folders of killed runs.


@pytest.mark.parametrize(
    "what", ["files", "settings", "link", "file", "pipe", "pipe as settings"],
)  # fmt: skip
@pytest.mark.parametrize("resume", ["--resume", "--no-resume"])
def test_a_foreign_folder_in_the_place_of_a_killed_run_stays(
    what: str, resume: str, base: Path, tmp_path: Path
) -> None:
    output = tmp_path / f"x{SUFFIX}"
    folder, far = partial_folder(output), tmp_path / "far"
    far.mkdir()
    (far / "thesis.txt").write_text("years of work")
    if what == "link":
        folder.symlink_to(far)
    elif what == "file":
        folder.write_text("years of work")
    elif what == "pipe":
        os.mkfifo(folder)
    else:
        far.rename(folder)
        if what == "settings":
            (folder / "settings.json").write_text('{"theme": "dark"}')
        if what == "pipe as settings":
            os.mkfifo(folder / "settings.json")
    one_line(kvcal(*fitting(base, output, resume)), 1, folder, "move")
    held = next(
        path for path in (folder / "thesis.txt", far / "thesis.txt", folder) if path.is_file() or path.is_fifo()
    )
    assert held.is_fifo() or held.read_text() == "years of work"
    assert not output.exists()


@pytest.mark.parametrize("what", ["empty", "temporary", "damaged", "of before"])
def test_a_folder_of_ours_is_used_or_removed(what: str, base: Path, tmp_path: Path) -> None:
    output = tmp_path / f"x{SUFFIX}"
    folder = partial_folder(output)
    folder.mkdir()
    if what == "temporary":
        (folder / ".settings.json.abcdefgh.tmp").write_text("{")
    if what == "damaged":
        (folder / "settings.json").write_text("{")
        (folder / "layer-0000.safetensors").write_text("half")
    if what == "of before":
        (folder / "settings.json").write_text(json.dumps({"key": "0" * 64}))
        (folder / "layer-0000.safetensors").write_text("half")
    assert kvcal(*fitting(base, output)).code == 0
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


def test_a_foreign_folder_in_the_place_of_a_search_stays(base: Path, tmp_path: Path) -> None:
    output = tmp_path / f"x{SUFFIX}"
    folder = tmp_path / f".{output.name}.search"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    given = ["--model", base / "model", "--text", base / "words.txt", *SMALL, "--group", 8, "--output", output]
    search = ["tune-thresholds", *given, "--objective", "attention", "--trials", 1, "--max-bits", 12]
    for resume in ("--resume", "--no-resume"):
        done = kvcal(*search, resume)
        assert done.code == 1 and "thesis.txt, which kvcal did not make" in done.err, done.err
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_only_folders_of_ours_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVCAL_CACHE_DIR may hold other things, such as a folder called `partial`."""
    monkeypatch.setenv("KVCAL_CACHE_DIR", str(tmp_path))
    names = ["photos", f"eval-{'0' * 20}", f"bench-{'1' * 20}"]
    for name in names:
        (tmp_path / "partial" / name).mkdir(parents=True)
        (tmp_path / "partial" / name / "x.jpg").write_text("mine")
    (tmp_path / "partial" / names[2] / "settings.json").write_text(json.dumps({"key": "0" * 64}))
    for name in names:
        os.utime(tmp_path / "partial" / name, (0, 0))
    checkpoint.CommandCheckpoint("eval", {}, output=None, resume=True, say=lambda line: None)
    assert sorted(path.name for path in (tmp_path / "partial").iterdir()) == sorted(names[:2])


# What is no regular file. A command of its own with a limit: one that waits for a pipe would never end.


def place_pipe(path: Path) -> None:
    os.mkfifo(path)


def place_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has at most 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


def place_folder(path: Path) -> None:
    path.mkdir()


def place_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


PLACES: list[Callable[[Path], None]] = [place_pipe, place_socket, place_folder, place_device]
READ: dict[str, list[object]] = {
    "inspect": ["inspect", "ODD"],
    "verify": ["verify", "ODD"],
    "recipe": ["preset", "--recipe", "ODD", "--config-only"],
    "build": ["build", "ODD"],
    "card": ["card", "GOOD", "--eval", "ODD"],
    "compare": ["compare", "--preset", "kivi-2", "--output", "ODD"],
    "bench": ["bench", "--compare", "ODD"],
    "input": ["reproduce", "BOTH", "--input", "ODD"],
    "generate": ["generate", "--prompt", "a", "--bundle", "ODD"],
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    good, both = folder / f"good{SUFFIX}", folder / f"both{SUFFIX}"
    assert kvcal("preset", "kivi-2", "--config-only", "--output", good).code == 0
    assert kvcal("combine", good, good, "--output", both).code == 0
    return {"GOOD": good, "BOTH": both}


@pytest.fixture
def alarm() -> Any:
    """What waits for a pipe fails after some seconds, and does not hang the suite."""

    def fail(*_: object) -> None:
        raise AssertionError("it waits for ever")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("place", PLACES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", READ)
def test_what_is_no_file_is_refused_in_one_line(
    name: str, place: Callable[[Path], None], bundles: dict[str, Path], tmp_path: Path
) -> None:
    odd = tmp_path / "odd"
    place(odd)
    done = kvcal(*({"ODD": odd, **bundles}.get(str(word), word) for word in READ[name]))
    one_line(done, done.code, odd)
    assert done.code in (1, 2, 4) and "Traceback" not in done.err and "Error:" not in done.complaint


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("place", PLACES, ids=lambda one: one.__name__)
def test_a_lock_file_of_a_build_that_is_none(place: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        '[models.tiny]\nmodel = "tiny"\n[bundles.a]\npreset = "kivi-2"\nconfig_only = true\n'
    )
    place(tmp_path / "r.lock.json")
    one_line(kvcal("build", tmp_path / "r.toml"), 1, tmp_path / "r.lock.json")


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("place", PLACES, ids=lambda one: one.__name__)
def test_verdicts_of_kernels_that_are_no_file(
    place: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCAL_CACHE_DIR", str(tmp_path))
    place(tmp_path / verdicts.LOCK)
    verdicts.keep("kernel", None)
    place(tmp_path / verdicts.FILE)
    if place is place_folder:
        assert verdicts.read() == {}
    else:
        with pytest.raises(KVCalError, match=r"preflight.json is a (pipe|socket|device), not a file: remove it"):
            verdicts.read()
        one_line(kvcal("doctor"), 1, verdicts.FILE, "remove it")


@pytest.mark.usefixtures("alarm")
def test_pipes_among_what_a_killed_run_left(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fitted layers and figures are made again."""
    output = tmp_path / f"x{SUFFIX}"
    assert kvcal(*fitting(base, output, "--text", base / "missing")).code == 1  # nothing kept yet
    folder = partial_folder(output)
    folder.mkdir()
    os.mkfifo(folder / "layer-0000.safetensors")
    assert kvcal(*fitting(base, output)).code == 0
    monkeypatch.setenv("KVCAL_CACHE_DIR", str(tmp_path / "cache"))
    work = checkpoint.CommandCheckpoint("eval", {}, output=None, resume=True, say=lambda line: None)
    work.keep("row", 1)
    (work.folder / "row.json").unlink()
    os.mkfifo(work.folder / "row.json")
    assert work.read("row") is None
    stages = tmp_path / ".y.partial"
    stages.mkdir()
    os.mkfifo(stages / "key-001.safetensors")
    from kvcal.calibrate.stage_checkpoint import StageCheckpoint

    assert StageCheckpoint(tmp_path / "y", {}, resume=True).load("key", 1, (4, 3)) is None


@pytest.mark.usefixtures("alarm")
def test_a_pipe_in_a_model_folder(base: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    os.mkfifo(folder / "chat_template.jinja")
    one_line(kvcal("preset", "kivi-2", "--model", folder), 5, "chat_template.jinja, a pipe")


@pytest.mark.usefixtures("alarm")
def test_a_pipe_as_the_summary_of_a_job(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcal.pipeline.gates import Check, raise_if_failed, report

    os.mkfifo(tmp_path / "summary")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    with pytest.raises(KVCalError, match=r"cannot be written .a pipe, not a file"):
        raise_if_failed([], report([Check("a", "canary", True)], None, None))


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="asks Linux which pages are in memory")
def test_a_file_out_of_memory_is_as_it_was(tmp_path: Path) -> None:
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=False).stdout
    if not kind.startswith("ext"):
        pytest.skip(f"a file system of another kind, {kind.strip() or 'unknown'}")
    place, data = tmp_path / "x", os.urandom(1 << 16)
    write_atomically(place, data)
    assert at_once(place) == data
    drop_cached(place)
    assert at_once(place) is None
    assert place.read_bytes() == data
    drop_cached(tmp_path / "none")


def at_once(path: Path) -> bytes | None:
    """What a file holds, if its first page is in memory."""
    handle, data = os.open(path, os.O_RDONLY), bytearray(path.stat().st_size)
    try:
        return bytes(data[: os.preadv(handle, [data], 0, os.RWF_NOWAIT)])
    except OSError:
        return None
    finally:
        os.close(handle)
