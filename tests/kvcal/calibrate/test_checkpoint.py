"""Commands that write no bundle, killed and started again: the same figures, from where they were, and nothing left
behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvcal.calibrate import checkpoint as kept
from kvcal.calibrate.checkpoint import CommandCheckpoint, LayerCheckpoint, partial_folder
from kvcal.commands import bench
from kvcal.evaluate.perplexity import _Sums
from kvcal_artifacts.errors import KVCalError
from tests.support import quick_clock
from tests.support.models_fixture import (
    ROOT_COMMAND,
    SUFFIX,
    Done,
    denied,
    killed_at,
    kvcal,
    small_disk,
    write_model,
    write_text,
)

WINDOWS = 6  # one at a time
TEXT = ["--length", 132, "--windows", WINDOWS, "--batch", 1, "--step", 33]
ROWS = ["--preset", "kivi-2", "--preset", "higgs-2", "--preset", "uniform-4"]
PAIRS = ["--keys", "higgs-2-wide", "--values", "higgs-2-wide", "--recent", 16, "--predict"]
FIT = ["--fit-windows", 6, "--fit-length", 132]
PROBE = ["--windows", 12, "--holdout", 2, "--length", 60]


@dataclass(frozen=True)
class Given:
    folder: Path
    text: Path

    @property
    def named(self) -> list[object]:
        return ["--model", self.folder, "--text", self.text]

    def command(self, name: str) -> list[object]:
        more: dict[str, list[object]] = {
            "eval": [*TEXT, *ROWS], "probe": [*PROBE],
            "compare": [*TEXT, *ROWS, *PAIRS, "--calibration", self.text, *FIT],
        }  # fmt: skip
        return [name, *self.named, *more[name]]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    base = tmp_path_factory.mktemp("kept")
    return Given(write_model(base / "small", 4), write_text(base / "words.txt"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, and quick clocks; processes that it starts have them too."""
    quick_clock.quicken(monkeypatch)
    monkeypatch.setenv("KVCAL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def good(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    return dict(done.json)


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """All that does not say how long or in how many runs it took."""
    return {
        n: value
        for n, value in found.items()
        if not n.startswith("resumed_") and n not in ("seconds", "phases", "output")
    }


@pytest.fixture(scope="module")
def undisturbed(given: Given) -> dict[str, dict[str, Any]]:
    return {name: good(kvcal(*given.command(name), "--json")) for name in ("eval", "compare", "probe")}


def pieces(cache: Path, name: str) -> list[Path]:
    return sorted(cache.glob(f"partial/*/{name}"))


def windows_in(file: Path) -> int:
    return int(json.loads(file.read_text())["value"]["windows"])


def test_a_killed_eval_goes_on_and_gives_the_same_figures(
    given: Given, cache: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    killed_at(f"{cache}/partial/eval-*/windows-*.json", *given.command("eval"), folder=tmp_path)
    [file] = pieces(cache, "windows-*.json")
    done = windows_in(file)
    assert 1 <= done < WINDOWS
    again = kvcal(*given.command("eval"), "--json")
    assert figures(good(again)) == figures(undisturbed["eval"])
    assert again.json["resumed_windows"] == done
    assert (
        f"full, kivi-2, higgs-2, uniform-4: resuming after {done} of {WINDOWS} windows from {file.parent}" in again.err
    )
    assert list((cache / "partial").iterdir()) == []
    assert good(kvcal(*given.command("eval"), "--json"))["resumed_windows"] == 0


@pytest.mark.parametrize(
    "what", [pytest.param("windows-*.json", marks=pytest.mark.slow), ".fit-*.partial/layer-0002*", "fit-*.safetensors"]
)
def test_a_killed_comparison_goes_on_in_the_middle_of_a_row(
    given: Given, cache: Path, tmp_path: Path, undisturbed: dict[str, Any], what: str
) -> None:
    """Between windows, between the layers of a fit, and between a fit and its windows."""
    killed_at(f"{cache}/partial/compare-*/{what}", *given.command("compare"), folder=tmp_path)
    rows = len(pieces(cache, "row-*.json"))
    again = kvcal(*given.command("compare"), "--json")
    assert figures(good(again)) == figures(undisturbed["compare"])
    assert again.json["resumed_rows"] == rows
    said = {"windows-*.json": "windows from", "fit-*.safetensors": "4 of 5 rows are in"}
    assert said.get(what, "resuming after layer") in again.err
    assert list((cache / "partial").iterdir()) == []


def test_a_row_of_another_name_is_measured_whole(given: Given, cache: Path, tmp_path: Path) -> None:
    """A bundle's file may be renamed between a kill and the next run."""
    old, new = tmp_path / f"a{SUFFIX}", tmp_path / f"b{SUFFIX}"
    assert kvcal("preset", "kivi-2", "--model", given.folder, "-o", old, "--no-check").code == 0
    command = ["compare", *given.named, *TEXT, "--bundle"]
    whole = good(kvcal(*command, old, "--json"))["rows"]
    own = CommandCheckpoint.keep

    def some(self: CommandCheckpoint, name: str, value: Any) -> None:
        own(self, name, value)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommandCheckpoint, "keep", some)
        assert kvcal(*command, old).code == 130
    assert len(pieces(cache, "windows-*.json")) == 1
    old.rename(new)
    assert good(kvcal(*command, new, "--json"))["rows"] == [whole[0] | {"name": "b"}]


def test_with_an_output_it_keeps_beside_it(
    given: Given, cache: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    output = tmp_path / "rows.json"
    layer = partial_folder(output) / ".fit-*.partial/layer-0002*"
    killed_at(str(layer), *given.command("compare"), "--output", output, folder=tmp_path)
    assert len(json.loads(output.read_text())["rows"]) == 4  # all but the one under predictors
    again = good(kvcal(*given.command("compare"), "--output", output, "--json"))
    assert (figures(again), again["resumed_rows"]) == (figures(undisturbed["compare"]), 4)
    assert not partial_folder(output).exists()
    assert not (cache / "partial").exists()
    anew = good(kvcal(*given.command("compare"), "--output", output, "--no-resume", "--json"))
    assert (figures(anew), anew["resumed_rows"]) == (figures(undisturbed["compare"]), 0)


def test_a_killed_probe_goes_on(given: Given, cache: Path, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    killed_at(f"{cache}/partial/probe-*/row-*.json", *given.command("probe"), folder=tmp_path)
    layers = len(pieces(cache, "row-*.json"))
    again = kvcal(*given.command("probe"), "--json")
    assert figures(good(again)) == figures(undisturbed["probe"])
    assert again.json["resumed_layers"] == layers >= 1
    assert f"resuming: {layers} layers are in {cache / 'partial'}" in again.err
    assert list((cache / "partial").iterdir()) == []


@pytest.fixture
def broken_off(given: Given, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An eval that ended after three windows; its file."""
    own, seen = CommandCheckpoint.keep, 0

    def some(self: CommandCheckpoint, name: str, value: Any) -> None:
        nonlocal seen
        own(self, name, value)
        if (seen := seen + 1) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(CommandCheckpoint, "keep", some)
    assert kvcal(*given.command("eval")).code == 130
    monkeypatch.setattr(CommandCheckpoint, "keep", own)
    [file] = pieces(cache, "windows-*.json")
    assert windows_in(file) == 3
    return file


def resumed(*command: object) -> int:
    return int(good(kvcal(*command, "--json"))["resumed_windows"])


def test_ctrl_c_keeps_what_was_done(given: Given, broken_off: Path) -> None:
    assert resumed(*given.command("eval")) == 3


@pytest.mark.parametrize(
    "options",
    [
        ["--step", 31],
        ["--keep", 0.5],
        ["--windows", 5],
        *(pytest.param(more, marks=pytest.mark.slow) for more in (["--batch", 2], ["--dtype", "bfloat16"])),
    ],
    ids=str,
)
def test_other_settings_begin_at_the_start(given: Given, broken_off: Path, options: list[object]) -> None:
    assert resumed(*given.command("eval"), *options) == 0
    assert resumed(*given.command("eval")) == 3  # and leave the others' work alone


def test_no_resume(given: Given, broken_off: Path, undisturbed: dict[str, Any]) -> None:
    found = good(kvcal(*given.command("eval"), "--no-resume", "--json"))
    assert (figures(found), found["resumed_windows"]) == (figures(undisturbed["eval"]), 0)


def test_another_model_or_code_begins_at_the_start(
    given: Given, broken_off: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = shutil.copytree(given.folder, tmp_path / "twin")
    config = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | {"rms_norm_eps": config["rms_norm_eps"] * 4}))
    command = [twin if part == given.folder else part for part in given.command("eval")]
    assert resumed(*command) == 0
    monkeypatch.setattr("kvcal.commands.common.code_identity", lambda: {"source": "other"})
    assert resumed(*given.command("eval")) == 0


@pytest.mark.parametrize("damage", ["flipped", "cut", "other", pytest.param("empty", marks=pytest.mark.slow)])
def test_damaged_work_is_done_again(given: Given, broken_off: Path, undisturbed: dict[str, Any], damage: str) -> None:
    whole = broken_off.read_text()
    at = whole.index('"nats": ') + 8
    digit = str((int(whole[at]) + 1) % 10)
    broken_off.write_text({"flipped": whole[:at] + digit + whole[at + 1 :], "cut": whole[:-9], "empty": "",
                           "other": "[]"}[damage])  # fmt: skip
    found = good(kvcal(*given.command("eval"), "--json"))
    assert (figures(found), found["resumed_windows"]) == (figures(undisturbed["eval"]), 0)


def test_a_cache_that_cannot_be_written_is_said_once_and_costs_nothing(
    given: Given, cache: Path, undisturbed: dict[str, Any]
) -> None:
    cache.mkdir()
    with denied(cache):
        for name in ("eval", "compare", "probe"):
            done = kvcal(*given.command(name), "--json")
            assert figures(good(done)) == figures(undisturbed[name])
            assert done.err.count("note: nothing is kept") == 1


def test_what_nobody_went_on_with_goes_away(given: Given, broken_off: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    for days, there in ((kept.DAYS - 1, True), (kept.DAYS + 1, False)):
        os.utime(broken_off.parent, (now - days * 86400,) * 2)
        good(kvcal("eval", *given.named, "--length", 68, "--windows", 1, "--json"))
        assert broken_off.exists() == there


def test_sums_survive_as_json() -> None:
    """Floats to the last bit, NaN too."""
    sums = _Sums(nats=0.1 + 0.2, kl=1e-300, tokens=3, packed=1 << 60, paper=[[2.1 / 3, 7]])
    assert _Sums(**json.loads(json.dumps(vars(sums)))) == sums


BENCH = ["bench", "--device", "cpu", "--model", "tiny", "-p", "kivi-2", "-p", "higgs-2", "--batch", "1,2", "--length", 100,
         "--sink", 4, "--recent", 32]  # fmt: skip


def places(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in ("operation", "scheme", "batch", "length", "path")) for row in rows]


@pytest.mark.parametrize(
    "operations",
    [
        ["-o", "decode-then-attend", "-o", "nearest", "--repeats", "2", "--seconds", "0.05"],
        pytest.param(["-o", "generate"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_killed_benchmark_goes_on(cache: Path, tmp_path: Path, operations: list[str]) -> None:
    """What was measured is not measured again: the very times are there."""
    command = [*BENCH, *operations]
    killed_at(f"{cache}/partial/bench-*/rows-*.json", *command, folder=tmp_path)
    kept = [json.loads(file.read_text())["value"] for file in pieces(cache, "rows-*.json")]
    known = [row for value in kept for row in value["rows"]]
    again = kvcal(*command, "--json")
    found = good(again)
    assert found["resumed_rows"] == len(known) > 0
    assert found["resumed_copy_gb_per_s"] == [rate / 1e9 for rate in dict.fromkeys(kept[0]["copy"])] != []
    assert "measured by a run before, from" in again.err
    times = {place: row["microseconds"] for place, row in zip(places(found["rows"]), found["rows"], strict=True)}
    assert [times[place] for place in places(known)] == [row["microseconds"] for row in known]
    assert list((cache / "partial").iterdir()) == []
    anew = good(kvcal(*command, "--json"))
    assert anew["resumed_rows"] == 0 and anew["resumed_copy_gb_per_s"] == []
    assert places(anew["rows"]) == places(found["rows"])
    assert {row["batch"] for row in anew["rows"]} == {1, 2}


SHORT = [*BENCH[:5], "-p", "kivi-2", "-o", "append", "--length", 160, "--repeats", 1, "--seconds", 0]


def measured_times(rows: list[dict[str, Any]]) -> list[Any]:
    return [row["microseconds"] for row in rows]


def kept_times(cache: Path) -> list[Any]:
    (file,) = pieces(cache, "rows-*.json")
    return measured_times(json.loads(file.read_text())["value"]["rows"])


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["table", "json"])
def test_figures_that_stdout_has_no_room_for_are_kept(
    cache: Path, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """/dev/full takes nothing. The files asked for are written all the same."""
    rows = tmp_path / "rows.csv"
    full = open("/dev/full", "w")  # noqa: SIM115 (closing it writes what it holds back, and fails once more)
    with contextlib.redirect_stdout(full), pytest.raises(SystemExit) as ended:
        ROOT_COMMAND.main([str(a) for a in (*SHORT, *more, "--csv", rows)], prog_name="kvcal")
    with contextlib.suppress(OSError):
        full.close()
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1
    assert lines[-1] == "kvcal: stdout: cannot be written: No space left on device; send it where there is room"
    assert f"is kept in {cache}" in lines[-2]
    assert rows.read_text().count("append") == 1
    known = kept_times(cache)
    again = good(kvcal(*SHORT, "--json"))
    assert again["resumed_rows"] == 1 and measured_times(again["rows"]) == known
    assert list((cache / "partial").iterdir()) == []


@pytest.mark.parametrize("option", ["--csv", "--plot"])
def test_figures_of_a_file_that_fails_are_shown_and_kept(
    cache: Path, tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ("rows.csv" if option == "--csv" else "rows.png")

    def fails(*given: Any) -> None:
        raise KVCalError(f"{path}: cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(bench, "write_atomically" if option == "--csv" else "plot_bench", fails)
        failed = kvcal(*SHORT, option, path, "--json")
    assert failed.code == 1 and f"kvcal: {path}: cannot be written" in failed.err
    assert measured_times(failed.json["rows"]) == kept_times(cache)
    again = good(kvcal(*SHORT, option, path, "--json"))
    assert again["rows"] == failed.json["rows"] and path.exists()
    assert list((cache / "partial").iterdir()) == []


def test_only_what_is_stored_is_said_to_be_kept(tmp_path: Path) -> None:
    """On a full disk nothing is; where it fills meanwhile, a part."""

    def lines_of(disk: Path, *values: object) -> list[str]:
        lines: list[str] = []
        work = CommandCheckpoint("x", {}, output=disk / "y", resume=True, say=lines.append)
        with contextlib.suppress(KVCalError), work.until_out():
            for place, value in enumerate(values):
                work.keep(f"row-{place}", value)
            raise KVCalError("no room")
        return lines

    with small_disk(tmp_path) as disk:
        unkept, part = lines_of(disk, 1, "x" * (1 << 14))
        assert "nothing is kept" in unkept and part.startswith(
            f"note: a part of what was measured is kept in {disk}/.y"
        )
        shutil.rmtree(disk / ".y.partial")
        assert "note: what was measured is kept" in lines_of(disk, 1)[0]
        shutil.rmtree(disk / ".y.partial")
        (disk / "rest").write_bytes(bytes(1 << 14))
        [unkept] = lines_of(disk, 1)
        assert "nothing is kept" in unkept and not (disk / ".y.partial").exists()


def test_a_reader_that_left_wants_no_more(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvcal bench --csv rows.csv | head -1`."""

    def left(value: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("kvcal.cli.bench.print_json", left)
    with contextlib.suppress(BrokenPipeError):
        kvcal(*SHORT, "--csv", tmp_path / "rows.csv", "--json")
    assert (tmp_path / "rows.csv").exists()
    assert list((cache / "partial").iterdir()) == []


def test_a_file_is_written_meanwhile_and_its_error_comes_with_the_next(tmp_path: Path) -> None:
    work, go, written = LayerCheckpoint(tmp_path / f"x{SUFFIX}", {"method": "m"}, True), Event(), list[int]()

    def one() -> None:
        assert go.wait(60)
        written.append(1)

    def full() -> None:
        raise KVCalError("no room")

    work.write_meanwhile(one)
    assert written == []
    go.set()
    work.write_meanwhile(full)
    assert written == [1]
    with pytest.raises(KVCalError, match="no room"):
        work.write_meanwhile(lambda: written.append(2))
    assert written == [1]
    work.settle()
    work.write_meanwhile(full)
    work.remove()  # of no use any more
