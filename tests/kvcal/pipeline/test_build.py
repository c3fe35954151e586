"""kvcal build: what a recipe says, what is built again and why, the bytes after a kill; and its gates, to the end."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcal.commands import build_passes, gpus
from kvcal.commands.build_plan import KINDS, RECORDS, BuildPass
from kvcal.methods import METHODS
from kvcal.pipeline.names import COMMANDS
from kvcal_artifacts import load_bundle
from kvcal_artifacts.errors import UsageError
from tests.kvcal.pipeline.test_gates import failures, harm
from tests.support.fork_server import forking
from tests.support.models_fixture import (
    SUFFIX,
    Done,
    finished,
    killed_at,
    kvcal,
    started,
    wait_until,
    write_model,
    write_text,
)
from tests.support.pages import ROOT, run_page, sources

SMALL = """
output = "out"

[defaults]
windows = 8
length = 68
sink = 4
recent = 16
block = 8

[models.small]
model = "model"
text = "words.txt"
"""
FOUR = """
[bundles.aqua]
method = "aqua-kv"

[bundles.squat]
method = "squat"
group = 8

[bundles.kvtuner]
method = "kvtuner"
group = 8
max_bits = 9

[bundles.plain]
preset = "fp8"
"""
NAMES = ["small-aqua", "small-squat", "small-kvtuner", "small-plain"]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a text."""
    base = tmp_path_factory.mktemp("build")
    write_model(base / "model", 3)
    write_text(base / "words.txt")
    return base


@pytest.fixture
def base(kit: Path, tmp_path: Path) -> Path:
    """A folder of a test's own with both, and a recipe of four bundles."""
    shutil.copytree(kit, tmp_path, dirs_exist_ok=True)
    return recipe(tmp_path, SMALL + FOUR).parent


def recipe(folder: Path, text: str) -> Path:
    path = folder / "r.toml"
    path.write_text(text)
    return path


def build(base: Path, *options: Any) -> dict[str, Any]:
    done = kvcal("build", base / "r.toml", "--json", *options)
    assert done.code == 0, done.err
    return dict(done.json)


def actions(found: dict[str, Any]) -> dict[str, str | None]:
    """Bundle -> why it was built, None if it was not."""
    return {row["name"]: row["why"] for row in found["bundles"]}


def content(folder: Path) -> dict[str, str]:
    """Every file, hidden ones too."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.fixture(scope="module")
def usual(kit: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What an undisturbed build leaves."""
    folder = tmp_path_factory.mktemp("usual")
    shutil.copytree(kit, folder, dirs_exist_ok=True)
    recipe(folder, SMALL + FOUR)
    build(folder)
    return content(folder / "out")


# Issue 5, Done when 1.


def test_the_pipeline_from_recipe_to_gate(tmp_path: Path) -> None:
    """The embedded model, four methods, gates; then one of them harmed."""
    path = recipe(
        tmp_path,
        """
        output = "out"
        [defaults]
        windows = 4
        length = 132
        sink = 4
        recent = 32
        block = 32
        [models.tiny]
        [bundles.aqua]
        method = "aqua-kv"
        predictor = "linear-4bit"
        [bundles.innerq]
        method = "innerq"
        [bundles.squat]
        method = "squat"
        [bundles.kivi]
        preset = "kivi-4"
        [gates]
        max_ppl_increase = "2%"
        max_kl = 0.01
        max_bits = 5.5
        max_cache_bytes = 1e6
        [evaluation]
        windows = 1
        length = 132
        """,
    )
    found = build(tmp_path, "--junit", tmp_path / "gates.xml")
    assert [row["action"] for row in found["bundles"]] == ["built"] * 4
    assert {row["pass"] for row in found["bundles"][:3]} == {1}  # over the model
    assert found["passed"]
    assert len(found["gates"]) == 4 * 5
    assert failures(tmp_path / "gates.xml") == []

    before = stamps(tmp_path / "out")
    again = build(tmp_path)
    assert set(actions(again).values()) == {None}
    assert again["gates"] == found["gates"]
    assert stamps(tmp_path / "out") == before

    good, harmed = tmp_path / "out" / f"tiny-aqua{SUFFIX}", tmp_path / f"harmed{SUFFIX}"
    harm(good, harmed, 5)
    options = ["--windows", 1, "--length", 132, "--max-kl", 0.01, "--junit", tmp_path / "harmed.xml"]
    done = kvcal("eval", harmed, *options)
    assert done.code == 3
    [(gate, message)] = failures(tmp_path / "harmed.xml")
    assert gate == "max-kl"
    assert "layer 5, " in message
    assert "times the recorded" in message

    path.write_text(path.read_text().replace('"kivi-4"', '"kivi-4"\nrecent = 64'))
    assert actions(build(tmp_path, "--no-gates")) == {
        "tiny-aqua": None, "tiny-innerq": None, "tiny-squat": None, "tiny-kivi": "recent: 32 -> 64",
    }  # fmt: skip


def test_a_killed_build_goes_on_and_ends_with_the_same_bytes(base: Path, usual: dict[str, str]) -> None:
    """Three bundles share a pass: each has layers done when the process is killed."""
    killed_at(f"{base}/out/.small-kvtuner*.partial/layer-0001*", "build", base / "r.toml", folder=base)
    assert not list((base / "out").glob(f"*{SUFFIX}"))
    found = kvcal("build", base / "r.toml")
    assert found.code == 0, found.err
    assert found.err.count("resuming after layer") == 3
    assert content(base / "out") == usual


# What is built.


def test_separate_passes_change_no_byte(base: Path, usual: dict[str, str]) -> None:
    found = build(base, "--no-share")
    assert [row["pass"] for row in found["bundles"]] == [1, 2, 3, 4]
    assert content(base / "out") == usual


def test_bundles_are_those_of_the_commands(base: Path, usual: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)
    common = ["--model", "model", "--text", "words.txt", "--windows", 8, "--length", 68]
    common += ["--sink", 4, "--recent", 16, "--block", 8]
    for command, name, own in (
        ("fit-predictors", "aqua", []),
        ("measure-subspaces", "squat", ["--group", 8]),
        ("tune-bits", "kvtuner", ["--group", 8, "--max-bits", 9]),
    ):
        done = kvcal(command, *common, *own, "--output", "x", "--json")
        assert done.code == 0, done.err
        assert done.json["sha256"] == usual[f"small-{name}{SUFFIX}"]
    done = kvcal("preset", "fp8", "--model", "model", "--sink", 4, "--recent", 16, "--block", 8, "-o", "x", "--json")
    assert done.json["sha256"] == usual[f"small-plain{SUFFIX}"]


def test_every_method_can_be_built(base: Path) -> None:
    """And only those: a method added elsewhere is missed here."""
    assert set(METHODS) == set(KINDS) == set(COMMANDS) - {"preset", "combine"}
    recipe(
        base,
        SMALL
        + FOUR
        + """
        [bundles.innerq]
        method = "innerq"
        block = 32
        length = 100
        [bundles.vqkv]
        method = "vqkv"
        stages = [1, 1, 1]
        sizes = [16, 16, 16]
        high_dims = 0
        vectors = 400
        max_iterations = 2
        min_iterations = 1
        [bundles.fixed]
        method = "mixkvq"
        group = 8
        tau_low = "1"
        tau_high = "4"
        [bundles.searched]
        method = "mixkvq"
        group = 8
        objective = "attention"
        trials = 2
        max_bits = 16
        [bundles.scheme]
        method = "aqua-kv"
        recipe = "scheme.toml"
        [bundles.plain-scheme]
        method = "preset"
        recipe = 'scheme.toml'
        [bundles.pair]
        method = "preset"
        keys = "higgs-2"
        values = "uniform-4"
        per_layer = ["0=exact-16"]
        [bundles.many]
        models = ["small"]
        matrix = {preset = ["uniform-2", "higgs-2"], recent = [8, 16]}
        [bundles.mixed]
        method = "combine"
        keys = "squat"
        values = "kvtuner"
        """,
    )
    (base / "scheme.toml").write_text(
        'keys = "uniform-4-channel"\nvalues = "uniform-2"\n[windows]\nsink = 8\nrecent = 16\nblock = 8\n'
    )
    (base / "r.toml").write_text((base / "r.toml").read_text().replace("length = 68", "length = 172"))
    found = build(base)
    names = [row["name"] for row in found["bundles"]]
    assert names[-5:-1] == [f"small-many-{p}-recent{r}" for p in ("uniform-2", "higgs-2") for r in (8, 16)]
    assert {row["action"] for row in found["bundles"]} == {"built"}
    assert sorted(path.name for path in (base / "out").glob("[!.]*.safetensors")) == sorted(
        f"{n}{SUFFIX}" for n in names
    )
    schemes = {name: load_bundle(base / "out" / f"{name}{SUFFIX}").scheme for name in names}
    rows = {name: load_bundle(base / "out" / f"{name}{SUFFIX}").metrics.get("layers", [{}]) for name in names}
    records = {row["method"] for row in found["bundles"] if "value_relative_error" in rows[row["name"]][0]}
    assert records == set(RECORDS)
    scheme = schemes["small-scheme"]
    assert scheme.windows.sink == 8  # the scheme recipe's, not that of [defaults]
    edit(base, 'recipe = "scheme.toml"', 'recipe = "scheme.toml"\nsink = 4')
    assert "bundles.scheme.sink: scheme.toml says it too; leave one out" in kvcal("build", base / "r.toml").complaint
    edit(base, "\nsink = 4\n        [bundles.plain-scheme]", "\n        [bundles.plain-scheme]")
    assert set(actions(build(base)).values()) == {None}
    (base / "scheme.toml").write_text((base / "scheme.toml").read_text().replace("sink = 8", "sink = 4"))
    changed = {name: why for name, why in actions(build(base, "--dry-run")).items() if why is not None}
    assert changed == dict.fromkeys(("small-scheme", "small-plain-scheme"), "sink: 8 -> 4")


# What is built again.


@pytest.fixture
def built(base: Path) -> Path:
    build(base)
    return base


def edit(base: Path, old: str, new: str) -> None:
    text = (base / "r.toml").read_text()
    assert text.count(old) == 1
    (base / "r.toml").write_text(text.replace(old, new))


def test_only_what_changed_is_built_again(built: Path, usual: dict[str, str]) -> None:
    """One thing after the other; the last build is the first one's."""
    out = built / "out"
    edit(built, "max_bits = 9", "max_bits = 8")
    assert actions(build(built)) == dict.fromkeys(NAMES) | {"small-kvtuner": "max_bits: 9.0 -> 8.0"}

    edit(built, "max_bits = 8", "max_bits = 9")
    (out / f"small-aqua{SUFFIX}").unlink()
    with (out / f"small-plain{SUFFIX}").open("ab") as file:
        file.write(b"x")
    assert actions(build(built)) == {
        "small-aqua": "its file is missing", "small-squat": None, "small-kvtuner": "max_bits: 8.0 -> 9.0",
        "small-plain": "its file was changed",
    }  # fmt: skip
    assert content(out) == usual

    (built / "words.txt").write_text((built / "words.txt").read_text() + "more")
    assert actions(build(built, "--dry-run")) == dict.fromkeys(NAMES[:3], "the text changed") | {"small-plain": None}
    tokenizer = json.loads((built / "model" / "tokenizer_config.json").read_text())
    (built / "model" / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"note": 1}))
    assert actions(build(built, "--dry-run"))["small-plain"] == "the model changed"
    assert content(out) == usual


def test_another_version_builds_all_again(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcal.pipeline.identity.__version__", "99")
    for why in actions(build(built, "--dry-run")).values():
        assert why is not None and why.startswith("kvcal ") and why.endswith(" -> 99")


@pytest.mark.parametrize(("name", "other"), [("threads", 99), ("vectors", "DEFAULT")])
def test_another_cpu_builds_again_what_it_decides(
    built: Path, monkeypatch: pytest.MonkeyPatch, name: str, other: Any
) -> None:
    """As provenance has it: `reproduce` would not find the same bytes. A preset is made of no sums."""
    from kvcal.calibrate.provenance import cpu_record

    own = cpu_record()
    monkeypatch.setattr("kvcal.commands.build_plan.cpu_record", lambda: own | {name: other})
    why = f"the CPU's {name}: {own[name]} -> {other}"
    assert actions(build(built, "--dry-run")) == dict.fromkeys(NAMES[:3], why) | {"small-plain": None}


def test_a_dry_run_writes_nothing(base: Path) -> None:
    before = content(base)
    done = kvcal("build", base / "r.toml", "--dry-run")
    assert done.code == 0, done.err
    assert content(base) == before
    assert not (base / "out").exists()
    for name in NAMES:
        assert name in done.out
    assert done.out.count("it is new") == 4


def test_what_left_the_recipe_leaves_the_lock_file(built: Path) -> None:
    edit(built, '[bundles.plain]\npreset = "fp8"\n', "")
    done = kvcal("build", built / "r.toml")
    assert done.code == 0
    assert "note: small-plain is no longer in the recipe" in done.err
    lock = json.loads((built / "out" / "r.lock.json").read_text())
    assert sorted(lock["bundles"]) == sorted(NAMES[:3])
    assert (built / "out" / f"small-plain{SUFFIX}").exists()


def test_every_model_gets_every_bundle_unless_said(base: Path) -> None:
    """In the order of models."""
    twin = SMALL + '[models.twin]\nmodel = "model"\ntext = "words.txt"\nrecent = 24\n'
    recipe(base, twin + FOUR + 'models = ["twin"]\n')
    found = build(base, "--dry-run")
    names = [name.replace("small", "twin") for name in NAMES]
    assert [row["name"] for row in found["bundles"]] == [*NAMES[:3], *names]
    assert [row["pass"] for row in found["bundles"]] == [1] * 6 + [2]  # two names of one model
    build(base)
    assert load_bundle(base / "out" / f"twin-squat{SUFFIX}").scheme.windows.recent == 24


def test_a_combination_follows_its_parts(base: Path) -> None:
    edit(
        base,
        "[bundles.plain]",
        '[bundles.mixed]\nmethod = "combine"\nkeys = "squat"\nvalues = "kvtuner"\n[bundles.plain]',
    )
    assert build(base)["bundles"][3]["name"] == "small-mixed"
    edit(base, "max_bits = 9", "max_bits = 8")
    assert actions(build(base)) == dict.fromkeys(NAMES) | {
        "small-kvtuner": "max_bits: 9.0 -> 8.0", "small-mixed": "the values part changed",
    }  # fmt: skip


# Gates of a recipe.

GATES = """
[gates]
max_bits = 20
max_layer_drift = 100
[evaluation]
text = "words.txt"
length = 60
windows = 1
step = 16
"""


def test_gates_of_a_recipe_and_of_one_bundle(base: Path) -> None:
    """All are shown, the failed one decides the exit code; nothing is measured twice."""
    text = (SMALL + FOUR + GATES).replace("max_bits = 9", "max_bits = 9\ngates = {max_layer_drift = false}")
    text = text.replace('preset = "fp8"', 'preset = "fp8"\ngates = {max_layer_drift = false, max_bits = 1}')
    recipe(base, text)
    done = kvcal("build", base / "r.toml", "--json", "--junit", base / "j.xml", "--summary", base / "s.md")
    assert done.code == 3
    assert "kvcal: gate failed: small-plain: max-bits 8, at most 1 (layer 0 stores the most: 8 bits/value)" in done.err
    seen = {(check["name"], check["gate"]): check["passed"] for check in done.json["gates"]}
    assert [pair for pair, passed in seen.items() if not passed] == [("small-plain", "max-bits")]
    assert ("small-squat", "max-layer-drift") in seen
    assert ("small-kvtuner", "max-layer-drift") not in seen
    assert len(failures(base / "j.xml")) == 1
    assert "small-plain" in (base / "s.md").read_text()
    before = stamps(base / "out")
    again = kvcal("build", base / "r.toml", "--json")
    assert again.code == 3
    assert again.json["gates"] == done.json["gates"]
    assert "gates of" not in again.err
    assert stamps(base / "out") == before
    lock = base / "out" / "r.lock.json"
    assert lock.read_text().count('"passed": false') == 1
    lock.write_text(
        lock.read_text().replace('"passed": false', '"passed": true').replace('"limit": 1.0', '"limit": 99')
    )
    assert kvcal("build", base / "r.toml", "--json").json["gates"] == done.json["gates"]  # what figures say counts
    edit(base, "max_bits = 1}", "max_bits = 9}")
    third = kvcal("build", base / "r.toml", "--json")
    assert third.code == 0, third.err
    assert third.err.splitlines()[0] == "gates of small-plain"


# What a recipe may not say.


def refused(base: Path, text: str, *options: Any) -> str:
    recipe(base, text)
    done: Done = kvcal("build", base / "r.toml", *options)
    assert done.code == 2, done.err
    line = done.complaint
    assert line.startswith(f"kvcal: recipe {base / 'r.toml'}: ")
    assert not (base / "out").exists()
    return line.split("r.toml: ", 1)[1]


BAD = {
    "top": ("outptu = 'x'\n" + SMALL.replace('output = "out"', "") + FOUR, "unknown key outptu; did you mean output?"),
    "default": (SMALL.replace("recent", "recnt") + FOUR, "unknown key defaults.recnt; did you mean recent?"),
    "model": (SMALL.replace("text =", "txt =") + FOUR, "unknown key models.small.txt; did you mean text?"),
    "option": (
        SMALL + FOUR.replace("max_bits", "max-bits"),
        "unknown key bundles.kvtuner.max-bits; did you mean max_bits?",
    ),
    "gate": (SMALL + FOUR + "[gates]\nmax_lk = 1", "unknown key gates.max_lk; did you mean max_kl?"),
    "own gate": (
        SMALL + FOUR + "gates = {max_bit = 1}",
        "unknown key bundles.plain.gates.max_bit; did you mean max_bits?",
    ),
    "evaluation": (SMALL + FOUR + "[evaluation]\nlenght = 1", "unknown key evaluation.lenght; did you mean length?"),
    "matrix": (SMALL + FOUR + "matrix = {rcent = [1]}", "unknown key bundles.plain.matrix.rcent; did you mean recent?"),
    "method": (
        SMALL + FOUR.replace("aqua-kv", "aquakv"),
        "bundles.aqua.method 'aquakv' is not known; did you mean aqua-kv?",
    ),
    "no method": (SMALL + "[bundles.x]\nrank = 1", "bundles.x names no method"),
    "no preset": (SMALL + "[bundles.x]\nmethod = 'preset'", 'bundles.x names no preset; give preset = "NAME"'),
    "preset of a method": (
        SMALL + FOUR.replace("group = 8\n", "preset = 'x'\n", 1),
        "unknown key bundles.squat.preset",
    ),
    "preset of a learned codec": (
        SMALL + "[bundles.x]\nmethod = 'preset'\nkeys = 'vq-2'\nvalues = 'vq-2'",
        "small-x: codec 'vq-2' is learned from text",
    ),
    "preset of half a pair": (SMALL + "[bundles.x]\nmethod = 'preset'\nkeys = 'kivi-2'", "bundles.x names no preset"),
    "unknown preset": (SMALL + FOUR.replace("fp8", "fp9"), "small-plain: preset 'fp9' is not known"),
    "no bundles": (SMALL, "has no [bundles.NAME]: nothing to build"),
    "no models": ("[bundles.x]\nmethod = 'squat'", "has no [models.NAME]: nothing to build"),
    "not a table": (SMALL + "[bundles]\nx = 1", "bundles.x is 1; it must be a table"),
    "name": (SMALL + '[bundles."a/b"]\nmethod = "squat"', "bundles.a/b: names become file names"),
    "type": (
        SMALL.replace("windows = 8", 'windows = "many"') + FOUR,
        "bundles.aqua: Invalid value for '--windows': ",
    ),
    "range": (
        SMALL.replace("windows = 8", "windows = 1") + FOUR,
        "bundles.aqua: Invalid value for '--windows': ",
    ),
    "flag": (SMALL + FOUR.replace("group = 8", "layerwise = 8", 1), "layerwise is 8; it must be true or false"),
    "no flag": (
        SMALL + FOUR.replace("group = 8", "group = true", 1),
        "group is True; it must be text, a number, or a list",
    ),
    "setting": (SMALL + FOUR.replace("group = 8", "subspace = 'x'", 1), "small-squat: --subspace x: allowed are"),
    "models": (SMALL + FOUR + "models = ['large']", "bundles.plain.models: no [models.large]; there are small"),
    "models in lists": (
        SMALL + FOUR + "models = [['small']]",
        "bundles.plain.models is [['small']]; it must be a list of",
    ),
    "none of the models": (SMALL + FOUR + "models = []", "bundles.plain.models is []; it must be a list of names"),
    "no whole number": (
        SMALL.replace("recent = 16", "recent = 16.0") + FOUR,
        "bundles.aqua: recent is 16.0; it must be a",
    ),
    "matrix list": (SMALL + FOUR + "matrix = {recent = 1}", "bundles.plain.matrix.recent is 1; it must be a list"),
    "twice": (SMALL + FOUR + "matrix = {recent = [8, 8]}", "two bundles would be called small-plain-recent8"),
    "no part": (SMALL + FOUR + "[bundles.m]\nmethod = 'combine'\nkeys = 'aqua'", "bundles.m.values is missing"),
    "unknown part": (
        SMALL + FOUR + "[bundles.m]\nmethod = 'combine'\nkeys = 'aqua'\nvalues = 'squatt'",
        "small-m: no bundle small-squatt to combine, or it comes later; did you mean squat?",
    ),
    "nothing to compress": (
        SMALL + FOUR.replace('"aqua-kv"', '"aqua-kv"\nblock = 128'),
        "small-aqua: windows of 68 tokens leave nothing to compress behind a sink of 4 in blocks of 128; use --length "
        "132",
    ),
    "nothing to fit on": (
        SMALL + FOUR.replace("group = 8", "group = 8\nholdout = 8", 1),
        "small-squat: --holdout 8 of 8",
    ),
    "drift of a preset": (
        SMALL + FOUR.replace("max_bits = 9", "max_bits = 9\ngates = {max_layer_drift = false}") + GATES,
        "small-plain: gate max_layer_drift: bundles of preset record no errors of all keys and values to compare with; "
        "give",
    ),
    "limit": (SMALL + FOUR + "[gates]\nmax_kl = 'x'", "gates.max_kl x: needs a number of at least 0"),
    "not TOML": ("[", "not TOML"),
}


@pytest.mark.parametrize("case", BAD)
def test_recipes_that_are_refused(base: Path, case: str) -> None:
    text, says = BAD[case]
    assert says in refused(base, text)


def test_no_recipe(tmp_path: Path) -> None:
    done = kvcal("build", tmp_path / "none.toml")
    assert done.code == 2
    assert "none.toml: cannot be read (No such file or directory)" in done.complaint


def lock_text(bundles: str = "{}", gates: str = "{}") -> str:
    return f'{{"format": "kvcal build 1", "bundles": {bundles}, "gates": {gates}}}'


LOCKED = '{"small-aqua": {"file": "x", "sha256": "x", "bytes": 1, "key": "x", "inputs": %s}}'
CHECKED = '{"small-aqua": {"key": "x", "checks": [%s]}}'
NO_LOCKS = [
    "{", "{}", "[]", "1",
    lock_text().replace("build 1", "build 0"),
    lock_text("[]"),
    lock_text("{}", "[[1, 2]]"),
    lock_text('{"small-aqua": 1}'),
    lock_text('{"small-aqua": {}}'),
    lock_text(LOCKED % "[]"),
    lock_text(LOCKED % '{"settings": 1}'),
    lock_text(LOCKED % '{"text": []}'),
    lock_text(LOCKED.replace('"bytes": 1', '"bytes": "1"') % "{}"),
    lock_text("{}", '{"small-aqua": {"key": "x"}}'),
    lock_text("{}", CHECKED % "1"),
    lock_text("{}", CHECKED % '{"name": "a"}'),
    lock_text("{}", CHECKED % '{"name": "a", "gate": 1, "passed": 1, "seen": "", "limit": 1, "layer": 1, "detail": ""}'),
]  # fmt: skip


@pytest.mark.parametrize("held", NO_LOCKS)
def test_a_lock_file_that_is_none(base: Path, held: str) -> None:
    (base / "out").mkdir()
    (base / "out" / "r.lock.json").write_text(held)
    done = kvcal("build", base / "r.toml")
    assert done.code == 1
    assert "r.lock.json: not a lock file of `kvcal build`" in done.complaint
    assert "delete it to build all again" in done.complaint


@pytest.fixture
def busy(base: Path) -> Iterator[Path]:
    import fcntl

    (base / "out").mkdir()
    handle = os.open(base / "out", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield base
    os.close(handle)


def test_two_builds_do_not_meet(busy: Path) -> None:
    done = kvcal("build", busy / "r.toml")
    assert done.code == 1
    assert "another `kvcal build` is at work there; wait for it" in done.complaint


LONG = '[bundles.long]\nmethod = "squat"\ngroup = 8\nlength = 9999\n'


def test_an_error_names_its_bundle_and_keeps_the_rest(base: Path, usual: dict[str, str]) -> None:
    """A bundle that the text is too short for stands between those that can be built."""
    edit(base, "[bundles.plain]", f"{LONG}[bundles.plain]")
    done = kvcal("build", base / "r.toml")
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("kvcal: small-long: ")
    edit(base, LONG, "")
    assert actions(build(base)) == dict.fromkeys(NAMES) | {"small-plain": "it is new"}
    assert content(base / "out") == usual


def test_a_refusal_on_the_way_names_its_bundle_and_stops_no_other(
    base: Path, usual: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one pass over the model, where one layer's fit says that its settings do not do."""
    from kvcal.methods.squat import Squat

    def refuse(self: Squat, *given: Any) -> Any:
        raise UsageError("these settings do not do")

    with monkeypatch.context() as patch:
        patch.setattr(Squat, "fit_layer", refuse)
        done = kvcal("build", base / "r.toml")
        assert done.code == 2
        assert done.err.splitlines()[-1] == "kvcal: small-squat: these settings do not do"
    expected = dict.fromkeys(NAMES) | {"small-squat": "it is new", "small-plain": "it is new"}
    assert actions(build(base)) == expected
    assert content(base / "out") == usual


@pytest.mark.slow
def test_processes_change_no_byte(base: Path, usual: dict[str, str]) -> None:
    build(base, "--jobs", 2)
    assert content(base / "out") == usual


def run_beside_another(work: BuildPass) -> list[tuple[str, str, int]]:
    """A worker's work, begun when two workers have work: each writes down which GPU it sees, and waits for the other."""
    folder = work.plans[0].path.parent.parent / "seen"
    (folder / str(os.getpid())).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    end = time.monotonic() + 100
    while len(list(folder.iterdir())) < 2:
        assert time.monotonic() < end, "no other worker came"
        time.sleep(0.01)
    return WORKER_RUN(work)


WORKER_RUN = build_passes._worker_run


def with_gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(gpus, "gpu_names", lambda: list(names))
    monkeypatch.delenv(gpus.VISIBLE, raising=False)


def test_gpus_build_side_by_side(base: Path, usual: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which the workers find instead of GPUs 3 and 5."""
    with_gpus(monkeypatch, *["H100"] * 6)
    monkeypatch.setattr(build_passes, "_worker_run", run_beside_another)
    (base / "seen").mkdir()
    build(base, "--gpus", "3,5")
    assert content(base / "out") == usual
    assert sorted(path.read_text() for path in (base / "seen").iterdir()) == ["3", "5"]
    assert gpus.VISIBLE not in os.environ


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("0-7", "--gpus 0-7: no GPU 2 here; there are 0 to 1"),
        ("x", "--gpus x: 'x' is no GPU; give numbers and ranges, as 0-7 or 0,2,5"),
        ("1-0", "--gpus 1-0: '1-0' is no GPU; give numbers and ranges, as 0-7 or 0,2,5"),
        ("0,0-1", "--gpus 0,0-1: GPU 0 is named twice; each builds one bundle at a time"),
        ("1", "--gpus 1: GPU 0 is a H100, 1 a A100: give GPUs of one kind, GPU 0's"),
    ],
)
def test_gpus_that_cannot_be_are_refused(base: Path, monkeypatch: pytest.MonkeyPatch, given: str, line: str) -> None:
    with_gpus(monkeypatch, "H100", "A100" if given == "1" else "H100")
    done = kvcal("build", base / "r.toml", "--gpus", given)
    assert (done.code, done.complaint) == (2, f"kvcal: {line}")
    assert not (base / "out").exists()


def test_gpus_are_numbered_among_those_that_are_visible(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, "H100", "H100", "H100")
    monkeypatch.setenv(gpus.VISIBLE, "4, 6,GPU-8a")
    assert gpus.gpus_of("1-2") == ["6", "GPU-8a"]
    with_gpus(monkeypatch)
    done = kvcal("build", base / "r.toml", "--gpus", "0")
    assert done.complaint == "kvcal: --gpus 0: no GPU 0 here; there is none at all, leave it out"
    done = kvcal("build", base / "r.toml", "--gpus", "0", "--jobs", "2")
    assert done.complaint == "kvcal: --jobs and --gpus: each of the GPUs has one process; leave --jobs out"
    edit(base, 'preset = "fp8"', 'preset = "fp8"\ndevice = "cuda:3"')
    done = kvcal("build", base / "r.toml", "--gpus", "0")
    assert done.code == 2 and "small-plain has device cuda:3, and each process sees one GPU" in done.complaint


def begun(base: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A build by two workers that have something done, and its child processes."""
    process = started("build", base / "r.toml", "--jobs", "2", "--no-share", folder=base)
    wait_until(lambda: bool(list((base / "out").glob(".*.partial"))), process)
    workers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(workers) >= 2
    return process, workers


def wait_for_end(pids: list[int]) -> None:
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(base: Path, usual: dict[str, str]) -> None:
    """They would else go on writing while the next build runs."""
    process, workers = begun(base)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for_end(workers)
    assert len(list((base / "out").glob(f"[!.]*{SUFFIX}"))) < 4
    build(base, "--jobs", 2, "--no-share")
    assert content(base / "out") == usual


@pytest.mark.slow
def test_an_interrupted_build_does_not_wait_for_its_workers(base: Path, usual: dict[str, str]) -> None:
    process, workers = begun(base)
    process.send_signal(signal.SIGINT)
    done = finished(process)
    assert done.code == 130
    assert done.err.splitlines()[-1] == "kvcal: interrupted"
    wait_for_end(workers)
    assert len(list((base / "out").glob(f"[!.]*{SUFFIX}"))) < 4
    build(base)
    assert content(base / "out") == usual


@pytest.mark.slow
def test_an_error_in_a_process_names_its_bundle(base: Path) -> None:
    """And what ran beside it is kept."""
    edit(base, "[bundles.plain]", f"{LONG}[bundles.plain]")
    done = kvcal("build", base / "r.toml", "--jobs", 2)
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("kvcal: small-long: ")
    lock = json.loads((base / "out" / "r.lock.json").read_text())
    assert {"small-aqua", "small-squat", "small-kvtuner"} <= set(lock["bundles"])


# The page.


@pytest.mark.slow
def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    (server := tmp_path / "server").mkdir()
    with forking(server, sources(server)) as tools:
        ran = run_page(
            ROOT / "docs" / "pipeline.md", tmp_path, ["Recipe", "Build", "Gates"], environment=sources(tools)
        )
    assert [one.block.heading for one in ran] == ["Recipe", "Build", "Gates"]
    assert ran[0].out.count("it is new") == 5
    assert ran[1].out.count("built") == 5
    assert "max-bits 2.375, at most 2 (layer 0 stores the most: 4.125 bits/value)" in ran[2].err
    assert [gate for gate, _ in failures(tmp_path / "gates.xml")] == ["max-bits"]
    assert (tmp_path / "gates.md").read_text().startswith("### kvcal: 1 of 6 gates failed")


def test_a_page_whose_block_fails_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n```bash\ntouch a\n```\n```text\nfalse\n```\n## B\n```bash\nfalse | true\n```\n")
    assert [ran.block.heading for ran in run_page(page, tmp_path, ["A"])] == ["A"]
    assert (tmp_path / "a").exists()
    with pytest.raises(AssertionError, match="## B"):
        run_page(page, tmp_path)
