"""The contract every command keeps: walks the commands of the program and gives each option it has something odd.

Whatever is wrong is one line on stderr, a documented exit code, nothing on stdout, and no file, before any long work.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvcal.cli.app import COMMANDS
from kvcal.cli.failure import EXIT_CODES
from tests.support.models_fixture import ROOT_COMMAND, SUFFIX, Done, kvcal, write_model, write_text

every_command = pytest.mark.parametrize("name", COMMANDS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a text, and a bundle for the model."""
    base = tmp_path_factory.mktemp("commands")
    write_model(base / "model", 4)
    write_text(base / "words.txt")
    (base / "recipe.toml").write_text('[models.tiny]\n[bundles.kivi]\npreset = "kivi-2"\n')
    done = kvcal("preset", "kivi-2", "--model", base / "model", "--output", base / f"kivi{SUFFIX}")
    assert done.code == 0, done.err
    fit = ["--windows", "4", "--length", "68", "--block", "8", "--factors", "pair", "--output", base / f"norms{SUFFIX}"]
    done = kvcal("fit-norms", "--model", base / "model", "--text", base / "words.txt", *fit)
    assert done.code == 0, done.err
    return base


def options_of(name: str) -> dict[str, Any]:
    """Every long option of a command, and what it is."""
    return {o: p for p in ROOT_COMMAND.commands[name].params for o in p.opts if o.startswith("--")}


def having(option: str) -> list[str]:
    return [name for name in COMMANDS if option in options_of(name)]


def needed(name: str, base: Path, folder: Path) -> list[str]:
    """What the command cannot do without, all of it good, and the small model and text if it takes any."""
    given = {
        "bundle": base / f"kivi{SUFFIX}", "keys": base / f"kivi{SUFFIX}", "values": base / f"kivi{SUFFIX}",
        "name": "kivi-2", "prompt": "a", "output": folder / "made", "preset": "kivi-2", "repo": "org/name",
        "inputs": base / f"kivi{SUFFIX}", "to": "fp8",
        "recipe": base / "recipe.toml", "a": base / f"kivi{SUFFIX}", "b": base / f"kivi{SUFFIX}",
    }  # fmt: skip
    arguments: list[str] = []
    given |= {"bundle": base / f"norms{SUFFIX}"} if name in ("fold", "reproduce") else {}
    given |= {"output": folder / "made.html"} if name == "report" else {}
    for parameter in ROOT_COMMAND.commands[name].params:
        wanted = {"generate": "preset", "compare": "preset", "preset": "name"}  # one of several that would do
        if parameter.required or wanted.get(name) == parameter.name:
            arguments += ([parameter.opts[-1]] if parameter.opts[0].startswith("-") else []) + [
                str(given[parameter.name])
            ]
    for option, value in (("--model", base / "model"), ("--text", base / "words.txt"), ("--objective", "attention")):
        if option in options_of(name):
            arguments += [option, str(value)]
    return arguments


def refused(done: Done, *parts: str) -> None:
    lines = [line for line in done.err.splitlines() if line.startswith(("kvcal: ", "Error: "))]
    assert done.code in EXIT_CODES and done.code not in (0, 130), (done.code, done.out, done.err)
    assert len(lines) == 1 and lines[0] == done.err.splitlines()[-1], done.err
    assert "--debug" not in lines[0], "an error that nobody foresaw"
    assert done.out == ""
    for part in parts:
        assert part in lines[0]


@every_command
def test_every_command_prints_json_on_request(name: str) -> None:
    assert "--json" in options_of(name)


ODD: dict[str, tuple[str, tuple[str, ...]]] = {  # option -> a value, what the line says
    "--model": ("lama-3.2-3b", ("unknown model", "did you mean llama-3.2-3b")),
    "--device": ("abacus", ("abacus",)),
    "--dtype": ("int4", ("int4", "float32")),
    "--revision": ("main", ("only models on the hub have revisions",)),
    "--spill": ("tape", ("tape", "allowed are device")),
    "--frame": ("mid_rope", ("mid_rope", "pre_rope")),
    "--keys": ("gzip", ("gzip",)),
    "--values": ("gzip", ("gzip",)),
    "--preset": ("gzip", ("gzip",)),
    "--trainer": ("gzip", ("gzip", "allowed are")),
    "--objective": ("beauty", ("beauty", "allowed are")),
    "--keep": ("2", ("--keep 2",)),
    "--max-bits": ("nan", ("--max-bits",)),
    "--block": ("0", ("--block",)),
    "--sink": ("-1", ("--sink",)),
    "--batch": ("0", ("--batch",)),
    "--length": ("1", ("--length",)),
    "--seed": ("-1", ("--seed",)),
    "--group": ("7", ("7", "must divide")),
    "--plot": ("front.gif", ("--plot front.gif: must end in .png, .svg, .pdf",)),
    "--recipe": ("none.toml", ("none.toml",)),
    "--bundle": ("none", ("none",)),
}
UNLIKE = {  # a length that packs nothing leaves rows out; the hub is asked; a new place, not a model's name
    ("bench", "--length"), ("pull", "--revision"), ("push", "--revision"), ("reproduce", "--model"),
}  # fmt: skip
PAIRS = [(name, option) for option in ODD for name in having(option) if (name, option) not in UNLIKE]


@pytest.mark.parametrize(("name", "option"), PAIRS)
def test_an_odd_value_is_one_line(
    name: str, option: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value, parts = ODD[option]
    if name == "compare" and option in ("--keys", "--values"):
        parts = ("--keys and --values go together",)
    done = kvcal(name, *needed(name, base, tmp_path), option, value)
    refused(done, *parts)
    if option in ("--preset", "--device"):  # few names are said, of many where they are listed
        assert "allowed are " in done.err or "`kvcal names" in done.err
    assert list(tmp_path.iterdir()) == []


TEXTS = [(name, kind) for name in having("--text") for kind in ("missing", "empty")]
TEXTS.remove(("reproduce", "empty"))  # takes any number and reads the one that went into the bundle


@pytest.mark.parametrize(("name", "kind"), TEXTS)
def test_an_odd_text_is_one_line(
    name: str, kind: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / f"{kind}.txt"
    if kind == "empty":
        path.touch()
    refused(
        kvcal(name, *needed(name, base, tmp_path / "here"), "--text", path), str(path) if kind == "missing" else "empty"
    )
    assert list((tmp_path / "here").iterdir()) == []


PLACES = [(name, option) for option in ("--output", "--plot", "--bundle-output", "--csv") for name in having(option)]


@pytest.mark.parametrize("kind", ["no folder", "folder", "long name", "pipe"])
@pytest.mark.parametrize(("name", "option"), PLACES)
def test_a_place_that_cannot_be_written_is_one_line_before_any_work(
    name: str, option: str, kind: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "folder.png" / "file").touch()
    os.mkfifo(pipe := tmp_path / "folder.png" / "pipe.png")
    place = {"no folder": "none/x.png", "folder": "folder.png", "long name": f"{'x' * 300}.png", "pipe": pipe}[kind]
    monkeypatch.setattr(
        "kvcal.models.loading.load_model", lambda *args, **kwargs: pytest.fail("the model was read before")
    )
    refused(kvcal(name, *needed(name, base, tmp_path), option, place))
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["file", "folder.png", "pipe.png"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("options", [[], ["--no-resume"]], ids=["resume", "no resume"])
@pytest.mark.parametrize(
    "content",
    [
        b"my notes\n", b'{"a": 1}', b'{"rows": [', b"[]", b"null", b"\xff\xfe", b"[" * 100_000,
        b'{"command": "eval", "settings": {}, "rows": []}', b'{"command": "NAME", "settings": {}, "rows": [1]}',
        b'{"command": "NAME", "settings": {}, "rows": null}', b'{"command": "NAME", "settings": [], "rows": []}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["compare", "probe"])
def test_what_is_no_result_of_the_command_is_not_overwritten(
    name: str, content: bytes, options: list[str], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, content = tmp_path / "out.json", content.replace(b"NAME", name.encode())
    path.write_bytes(content)
    monkeypatch.setattr(
        "kvcal.models.loading.load_model", lambda *args, **kwargs: pytest.fail("the model was read before")
    )
    given = [*needed(name, base, tmp_path), *options, "--output", path]
    refused(kvcal(name, *given), str(path), f"no result file of `kvcal {name}`", "give another name")
    assert path.read_bytes() == content and [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


@every_command
def test_an_argument_too_many_is_a_usage_error(name: str, base: Path, tmp_path: Path) -> None:
    done = kvcal(name, *needed(name, base, tmp_path), "and", "more")
    if any(p.nargs == -1 for p in ROOT_COMMAND.commands[name].params):  # takes as many files as one gives
        assert done.code in (2, 4) and " and" in done.err.splitlines()[-1]
    else:
        assert done.code == 2 and "unexpected extra argument" in done.err


@pytest.mark.parametrize("name", ["eval", "compare", "generate"])
def test_a_bundle_of_another_model_is_refused_as_such(name: str, base: Path) -> None:
    """Before the guard runs it on the model's keys."""
    more = ["--prompt", "a"] if name == "generate" else ["--windows", 1]
    done = kvcal(name, "--model", "tiny", "--bundle", base / f"kivi{SUFFIX}", *more)
    refused(done, "made for another model")
    assert done.code == 4
