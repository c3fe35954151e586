"""docs/runs/several_gpus.py: what has not been compared is told, and nothing goes on when it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import ROOT

# a part whose bundle has these bytes, or which fails where there are none; its times are of tenths of a second
SCRIPT = """
sleep 0.1
bytes=$(cat '{folder}/{name}.bytes' 2>/dev/null) || {{ echo no bytes >&2; exit 1; }}
printf %s "$bytes" > '{folder}/{name}.kvcal.safetensors'
echo '{{"seconds": 2.0, "phases": {{"forward": 1.5, "weights": 0.5}}}}'
"""
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("several_gpus", ROOT / "docs" / "runs" / "several_gpus.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "several_gpus", module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "prepare", lambda folder, dry: None)
    monkeypatch.setattr(
        module,
        "launched",
        lambda part, folder, dry: ["sh", "-c", SCRIPT.format(folder=folder, name=part.name)],
    )
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield module
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def call(several: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def called(*words: str) -> tuple[int, str]:
        places = ["--dry", "--state", str(tmp_path), "--out", str(tmp_path / "out"), "--commit", "12345678"]
        monkeypatch.setattr(sys, "argv", ["several_gpus.py", *places, *words])
        with pytest.raises(SystemExit) as ended:
            several.main()
        printed = capsys.readouterr()
        return ended.value.code, (printed.out + printed.err).splitlines()[-1]  # type: ignore[return-value]

    return called


def write_bytes(folder: Path, **parts: str) -> None:
    for name, each in parts.items():
        (folder / f"{name.replace('_', '-')}.bytes").write_text(each)


def kept(folder: Path) -> Any:
    """What the folder of all calls has; the copy of the last call has the same."""
    text = (folder / "results.json").read_text()
    assert (folder / "out" / "several_gpus.json").read_text() == text
    return json.loads(text)


@pytest.mark.parametrize(("bytes_", "code"), [("same", 0), ("other", 1)])
def test_a_part_before_its_twin_is_compared_later(call: Call, tmp_path: Path, bytes_: str, code: int) -> None:
    write_bytes(tmp_path, small_1="same", small_2=bytes_)
    line = "failed: none; not compared: small-2 with small-1; waiting for the next call: none"
    assert call("--only", "small-2") == (3, line)
    assert call("--only", "small-2") == (3, line)  # done before
    failed = "none" if code == 0 else "small-2"
    assert call("--only", "small-1") == (
        code,
        f"failed: {failed}; not compared: none; waiting for the next call: none",
    )
    found = kept(tmp_path)["small-2"]
    assert found["same_bytes"] is found["ok"] is (code == 0)
    assert found["times_as_fast"] == found["times_as_fast_without_weights"] == 1.0


def test_a_part_whose_twin_failed_is_not_compared(call: Call, tmp_path: Path) -> None:
    write_bytes(tmp_path, small_2="same")
    line = "failed: small-1; not compared: small-2 with small-1; waiting for the next call: none"
    assert call("--only", "small-1", "small-2") == (1, line)
    write_bytes(tmp_path, small_1="same")
    assert call("--only", "small-1", "small-2")[0] == 0
    assert kept(tmp_path)["small-2"]["same_bytes"] is True


def test_a_twin_of_another_state_is_compared_with(call: Call, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write_bytes(tmp_path, small_1="same")
    assert call("--only", "small-1")[0] == 0
    (tmp_path / "results.json").rename(tmp_path / "other" / "results.json")
    write_bytes(tmp_path, small_2="same")
    assert call("--only", "small-2")[0] == 3
    (tmp_path / "small-1.bytes").unlink()
    assert call("--only", "small-1")[0] == 1  # the other one counts
    assert call("--only", "small-2", "--beside", str(tmp_path / "other"))[0] == 0
    assert call("--only", "small-2", "--beside", str(tmp_path / "none")) == (
        2,
        f"several_gpus.py: error: --beside {tmp_path / 'none'}: no results.json there: give a --state of an earlier call",
    )


def test_an_unknown_part_is_refused(call: Call, tmp_path: Path) -> None:
    code, line = call("--only", "fit1")
    assert code == 2
    assert line.startswith("several_gpus.py: error: argument --only: invalid choice: 'fit1' (choose from ")
    assert "fit-1" in line
    assert not list(tmp_path.iterdir())


def test_results_say_what_was_measured(call: Call, tmp_path: Path) -> None:
    write_bytes(tmp_path, small_1="same", small_2="same")
    assert call("--only", "small-1", "small-2", "--beside-running", "fit-1, on a card of its own")[0] == 0
    found = kept(tmp_path)["small-1"]
    names = ("device", "commit", "beside")
    assert [found[name] for name in names] == ["CPU", "12345678", "fit-1, on a card of its own"]
    assert {"torch", "gpus_here"} < found.keys()
    (tmp_path / "small-2.bytes").unlink()
    assert call("--only", "small-2")[0] == 0  # done before
    line = "failed: small-2; not compared: none; waiting for the next call: none"
    assert call("--only", "small-2", "--commit", "23456789") == (1, line)  # run again
    write_bytes(tmp_path, small_2="same")
    assert call("--only", "small-2", "--commit", "23456789")[0] == 3  # its twin is of another commit
    assert [kept(tmp_path)[name]["commit"] for name in ("small-1", "small-2")] == ["12345678", "23456789"]


def test_the_commit_is_the_checkouts(
    several: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    head = subprocess.run(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert several.commit_of(tmp_path) == head[:8]
    (tmp_path / "copy").mkdir()
    assert several.commit_of(tmp_path / "copy") is None
    monkeypatch.setattr(several, "ROOT", tmp_path / "copy")
    monkeypatch.setattr(sys, "argv", ["several_gpus.py"])
    with pytest.raises(SystemExit, match="2"):
        several.asked()
    assert f"no commit: git knows none of {tmp_path / 'copy'}: say of which" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("INT", 130, "several_gpus.py: interrupted: --state keeps the parts that have ended"),
        ("TERM", 143, "ready"),
    ],
)
def test_a_signal_ends_what_a_part_started(
    several: Any, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, line: str
) -> None:
    """A rank has a session of its own, as torchrun gives it, and its parent is gone; it does not heed SIGTERM."""
    rank = f"trap '' TERM; echo $$ > {tmp_path}/rank; while true; do sleep 0.05; done"
    script = f'(setsid sh -c "$0" &); until [ -s {tmp_path}/rank ]; do sleep 0.02; done; kill -{name} {os.getpid()}; sleep 30'
    monkeypatch.setattr(several, "launched", lambda *_: ["sh", "-c", script, rank])
    monkeypatch.setattr(several, "PATIENCE", 0.3)
    print("ready")
    assert call("--only", "small-1") == (code, line)
    rank_id = int((tmp_path / "rank").read_text())
    until = time.monotonic() + 5  # dead, but for whoever is its parent now
    while (entry := Path(f"/proc/{rank_id}/stat")).exists() and " Z " not in entry.read_text():
        assert time.monotonic() < until
    assert not (tmp_path / "results.json").exists()
