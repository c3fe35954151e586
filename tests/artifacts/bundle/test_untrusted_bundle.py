"""Bundles of strangers, every hash right: what they record chooses nothing that is read, and never ends in a traceback."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcal.bundles import card
from kvcal.bundles.diff import compared, phrase
from kvcal.bundles.provenance import recorded
from kvcal.bundles.record_checks import HUB_TEXT
from kvcal.commands import reproduce
from kvcal.evaluate.layers import recorded_rows, worst_layer
from kvcal.evaluate.tasks import check_installed
from kvcal.pipeline.gates import Limits, check_recorded
from kvcal.pipeline.spec import Options
from kvcal_artifacts import load_bundle
from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.errors import KVCalError, UsageError
from tests.support.models_fixture import SMALL, SUFFIX, Done, kvcal, write_model, write_text

TEXT = ["--windows", "6", "--length", "68"]
WIDE = ["--recent", "16", "--block", "16", "--group", "16"]
CACHE = ["--sink", "4", "--recent", "16", "--block", "8"]
MADE: dict[str, list[str]] = {
    "aqua": ["fit-predictors", *SMALL, "--backbone", "higgs-2"],
    "tiers": ["tune-thresholds", *TEXT, *WIDE, "--trials", "2", "--max-bits", "12", "--objective", "attention"],
    "preset": ["preset", "kivi-2", *CACHE],
    "both": ["combine", "preset", "preset"],
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("strangers")
    write_model(base / "model")
    write_text(base / "words.txt", 8000)
    for name, (command, *options) in MADE.items():
        given: list[object] = [base / f"{o}{SUFFIX}" if o in MADE else o for o in options]
        given += ["--output", base / f"{name}{SUFFIX}"]
        given += [] if command == "combine" else ["--model", base / "model"]
        given += [] if command in ("combine", "preset") else ["--text", base / "words.txt"]
        assert kvcal(command, *given).code == 0
    return {name: base / f"{name}{SUFFIX}" for name in MADE}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Options of the commands that would have been run."""
    seen: list[dict[str, Any]] = []

    def stop(typed: Options, say: Any) -> None:
        options = typed.by_name()
        text = options.get("text")
        linked = text is not None and Path(text).is_symlink()
        seen.append(options | ({"text": str(Path(text).resolve())} if linked else {}))
        raise KVCalError("this is where the work would begin")

    monkeypatch.setattr(reproduce, "run_again", stop)
    return seen


def changed(path: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """The bundle with another provenance, hashes made right, beside it."""
    bundle = load_bundle(path)
    change(bundle.provenance)
    return forged(bundle, path.with_name(f"{name}{SUFFIX}"))


def forged(bundle: Bundle, path: Path) -> Path:
    """Written without the checks that kvcal makes when it writes: strangers make none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvcal_artifacts.bundle.bundle.HEADER", SimpleNamespace(read=lambda value, what: value))
        patch.setattr("kvcal_artifacts.bundle.bundle.described", lambda header, tensors: None)
        bundle.write(path)
    return path


def stopped(done: Done, *parts: str) -> None:
    assert done.code in (1, 2) and done.out == "" and "raceback" not in done.err, done.err
    assert all(part in done.err.splitlines()[-1] for part in parts), done.err


PATHS = ["/etc/passwd", "../words.txt", "./words.txt", "~/words.txt", "~root/.bashrc", "/dev/zero", "words.txt", "pipe",
         "folder", "lab/words", "lab/words:default:train", "../lab/words", "file:/etc/passwd", "file:../words.txt",
         "folder:.", "file:", "embedded:../calibration", "embedded:x", ""]  # fmt: skip


@pytest.mark.parametrize("label", PATHS)
@pytest.mark.parametrize("which", ["text", "other_text"])
def test_a_recorded_text_that_is_a_path_is_not_read(
    which: str, label: str, bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[Any]
) -> None:
    """Though it lies there, in the current folder and beside the bundle."""
    for folder in (tmp_path, bundles["aqua"].parent):
        monkeypatch.chdir(folder)
        Path("lab").mkdir(exist_ok=True)
        Path("folder").mkdir(exist_ok=True)
        for name in ("words.txt", "lab/words", "lab/words:default:train"):
            Path(name).write_text("words " * 4000)
        if not Path("pipe").exists():
            os.mkfifo("pipe")
        odd = changed(bundles["aqua"], "odd", lambda p: p.setdefault(which, {}).update(source=label))
        given = ["--model", bundles["aqua"].parent / "model"]
        given += ["--text", bundles["aqua"].parent / "words.txt"] if which == "other_text" else []
        stopped(kvcal("reproduce", odd, *given), "text")
    assert ran == []


def test_a_local_text_is_read_where_the_caller_says(
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[Any]
) -> None:
    base = bundles["aqua"].parent
    monkeypatch.chdir(base)  # words.txt lies here
    stopped(kvcal("reproduce", bundles["aqua"], "--model", "model"), "made from file:words.txt", "--text")
    stopped(kvcal("reproduce", bundles["aqua"], "--model", "model", "--text", "words.txt"), "work would begin")
    assert Path(ran[0]["text"]) == (base / "words.txt").resolve()


@pytest.mark.parametrize(
    "label", ["HuggingFaceFW/fineweb-edu:sample-10BT:train@" + "0" * 40, "embedded:calibration", "org/name"]
)
def test_names_that_a_user_could_type_are_taken(label: str, bundles: dict[str, Path], ran: list[Any]) -> None:
    odd = changed(bundles["aqua"], "named", lambda p: p["text"].update(source=label))
    stopped(kvcal("reproduce", odd, "--model", odd.parent / "model"), "work would begin")
    assert ran[0]["text"] == label


MODELS: dict[str, dict[str, Any]] = {
    "path as hub": {"kind": "hub", "name": "/tmp/evil", "revision": "0" * 40},
    "up as hub": {"kind": "hub", "name": "../evil", "revision": "0" * 40},
    "folder here as hub": {"kind": "hub", "name": "lab/model", "revision": "0" * 40},
    "revision": {"kind": "hub", "name": "org/name", "revision": "../../x"},
    "embedded path": {"kind": "embedded", "name": "./model"},
    "embedded hub": {"kind": "embedded", "name": "llama-3.2-1b"},
    "hub embedded": {"kind": "hub", "name": "tiny"},
    "kind": {"kind": "url", "name": "https://evil.example"},
    "name": {"kind": "folder", "name": ["x"]},
    "sub folder": {"kind": "folder", "name": "a/b"},
    "dot": {"kind": "folder", "name": ".."},
    "weights": {"random_weights": "yes"},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_model_that_is_a_path_is_not_opened(
    name: str, bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab" / "model").mkdir(parents=True)
    (tmp_path / "lab" / "model" / "config.json").write_text("{}")
    odd = changed(bundles["preset"], "model", lambda p: p["model"].update(MODELS[name]))
    stopped(kvcal("reproduce", odd))
    assert ran == []


TASKS = ["evil/task.yaml", "/tmp/evil.yaml", "./task", "../task", "~/task", "task.yaml", "task.YML", "score.py", ".hidden",
         "a b", "x\x1b[2J", "gsm8k,evil/task.yaml"]  # fmt: skip


def answering(task: str) -> Callable[[dict[str, Any]], None]:
    goal = {"name": "task", "tasks": task.split(","), "limit": None, "metric": None, "lm_eval": "0.4.13"}
    return lambda p: p["search"].update(objective=goal)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_that_is_a_path_is_refused(
    task: str, bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[Any]
) -> None:
    """lm-eval would load the file, and import Python from beside it."""
    base = bundles["tiers"].parent
    odd = changed(bundles["tiers"], "task", answering(task))
    given = ["--model", base / "model", "--text", base / "words.txt"]
    stopped(kvcal("reproduce", odd, *given), "is no task's name", "--tasks-path alone")
    stopped(kvcal("reproduce", odd, *given, "--tasks-path", tmp_path), "is no task's name")
    assert ran == []
    typed = ["tune-thresholds", "--model", base / "model", "--text", base / "words.txt", "--objective", f"task:{task}"]
    done = kvcal(*typed, "--output", tmp_path / f"x{SUFFIX}")
    assert done.code == 2 and "is no task's name" in done.err, done.err


def test_tasks_are_searched_for_where_the_caller_says(bundles: dict[str, Path], tmp_path: Path, ran: list[Any]) -> None:
    base = bundles["tiers"].parent
    odd = changed(bundles["tiers"], "task", answering("next_words"))
    given = ["--model", base / "model", "--text", base / "words.txt"]
    stopped(kvcal("reproduce", odd, *given), "work would begin")
    stopped(kvcal("reproduce", odd, *given, "--tasks-path", tmp_path), "work would begin")
    assert [(one["objective"], one["tasks_path"]) for one in ran] == [
        ("task:next_words", None),
        ("task:next_words", tmp_path),
    ]
    stopped(kvcal("reproduce", odd, *given, "--tasks-path", tmp_path / "none"), "no such folder")
    stopped(
        kvcal("reproduce", bundles["tiers"], *given, "--tasks-path", tmp_path), "applies only to a recorded objective"
    )


def test_only_registered_tasks_reach_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with lm-eval's rule: what is no registered name is a path."""
    from types import ModuleType

    from kvcal.evaluate.tasks import TaskScore

    class TaskManager:
        all_tasks = ("gsm8k",)

        def __init__(self, include_path: str | None = None) -> None:
            pass

        def load(self, names: list[str]) -> dict[str, Any]:
            assert set(names) <= set(self.all_tasks), "it would be loaded from a path"
            return {"tasks": {}}

    fake = ModuleType("lm_eval.tasks")
    fake.TaskManager = TaskManager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", fake)
    TaskScore(None, None, ["gsm8k"])
    for name in ("task", "gsm8k.yaml", "evil/task"):
        with pytest.raises(KVCalError, match=f"lm-eval failed: it has no task, group or tag {name}"):
            TaskScore(None, None, ["gsm8k", name])
    assert check_installed is not None


NUMBERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "windows": lambda p: p["text"].update(train_windows=10**9),
    "tokens": lambda p: p["text"].update(train_windows=10**5, length=10**5),
    "length": lambda p: p["text"].update(length=10**9),
    "batch": lambda p: p.update(batch=10**9),
    "huge": lambda p: p.update(batch=2**64 - 1),
    "negative": lambda p: p["text"].update(train_windows=-(10**9)),
    "text as number": lambda p: p["text"].update(train_windows="6", holdout_windows="2"),
    "true": lambda p: p["text"].update(train_windows=True),
    "list": lambda p: p.update(batch=[2]),
    "text as batch": lambda p: p.update(batch="2"),
    "number as text": lambda p: p["settings"].update(backbone=5),
    "float": lambda p: p.update(seed=1.5),
    "unknown": lambda p: p["settings"].update(trust_remote_code=True),
    "unknown path": lambda p: p["settings"].update(recipe="/etc/passwd"),
    "storage": lambda p: p["settings"].update(storage="sqlite:////tmp/x"),
    "spill": lambda p: p["settings"].update(spill_dir="/tmp"),
    "column": lambda p: p["text"].update(column=["text"]),
    "threads": lambda p: p["cpu"].update(threads=10**9),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_recorded_values_are_checked_as_typed_ones(name: str, bundles: dict[str, Path], ran: list[Any]) -> None:
    base = bundles["aqua"].parent
    odd = changed(bundles["aqua"], "number", NUMBERS[name])
    stopped(kvcal("reproduce", odd, "--model", base / "model", "--text", base / "words.txt"))
    assert ran == []


@pytest.mark.parametrize("power", [20, 400, 5000])  # Python itself reads no more than 4300 digits
def test_integers_of_more_than_64_bits_are_refused_when_read(
    power: int, bundles: dict[str, Path], ran: list[Any]
) -> None:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        odd = changed(bundles["aqua"], "digits", lambda p: p.update(batch=10**power))
    finally:
        sys.set_int_max_str_digits(limit)
    base = odd.parent
    for command in (
        ["inspect"],
        ["verify"],
        ["card"],
        ["reproduce", "--model", base / "model", "--text", base / "words.txt"],
    ):
        done = kvcal(command[0], odd, *command[1:])
        assert (done.code, done.out, len(done.err.splitlines())) == (4, "", 1), done
        assert "raceback" not in done.err and odd.name in done.err, done
    assert ran == []


@pytest.mark.parametrize("method", ["--help", "--recipe=/etc/passwd", "-h", "none", "kivi-2\x1b[2J"])
def test_a_recorded_method_is_no_option(method: str, bundles: dict[str, Path], ran: list[Any]) -> None:
    odd = changed(bundles["preset"], "method", lambda p: p.update(method=method))
    stopped(kvcal("reproduce", odd, "--model", odd.parent / "model"), "is not known")
    assert ran == []


def test_bundles_within_bundles_have_an_end(bundles: dict[str, Path]) -> None:
    def nest(p: dict[str, Any]) -> None:
        for _ in range(20):
            inner = copy.deepcopy(p)
            p["keys"]["provenance"] = inner
            p["values"]["provenance"] = p["values"]["provenance"] if "text" in p else {"method": "x"}

    odd = changed(bundles["both"], "nested", nest)
    for command in ("inspect", "card", "reproduce"):
        done = kvcal(command, odd)
        assert done.code in (0, 1, 4) and "raceback" not in done.err and len(done.err.splitlines()) <= 1, done.err


# Any JSON anywhere.

VALUES: list[Any] = [
    None, True, False, 0, -1, 1.5, 10**400, -(10**30), "", "x", "\x1b[2J\n", "/etc/passwd", "\u202e", [], {}, [[]], {"": {}},
    [None], [1, "2"], [{}], {"a": [1]}, ["x"] * 3, [True], {"source": 5}, [[[[0.5]]]], 1e300, "1e5", [1e-9, 10**400],
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield (*path, name)
        yield from places(one, (*path, name))


def mutated(value: Any, chooser: random.Random) -> Any:
    """One to three places replaced, removed or added."""
    made = copy.deepcopy(value)
    for _ in range(chooser.randint(1, 3)):
        found = [path for path in places(made) if len(path) > 1]
        if not found:
            break
        *path, last = chooser.choice(found)
        holder = made
        for name in path:
            holder = holder[name]
        what = chooser.random()
        if what < 0.15:
            del holder[last]
        elif what < 0.25 and isinstance(holder, dict):
            holder[chooser.choice(["layers", "search", "text", "model", "x\x1b"])] = chooser.choice(VALUES)
        else:
            holder[last] = copy.deepcopy(chooser.choice(VALUES))
    return made


@pytest.mark.parametrize("name", MADE)
def test_no_json_in_a_bundle_ends_in_a_traceback(name: str, bundles: dict[str, Path], ran: list[Any]) -> None:
    """In the places of its own provenance and metrics; what calls them is what the commands call."""
    chooser = random.Random(name)
    whole = load_bundle(bundles[name])
    base = bundles[name].parent
    given = ["--model", base / "model", "--text", base / "words.txt"]
    outcomes: dict[str, int] = {}
    for number in range(150):
        provenance, metrics = mutated([whole.provenance, whole.metrics], chooser) if number else ({}, {})
        if isinstance(provenance.get("method"), (dict, list)):
            continue  # refused when it is read
        odd = replace(whole, provenance=provenance, metrics=metrics)
        path = base / f"random-{name}{SUFFIX}"
        forged(odd, path)
        for outcome in (carded(odd), limited(odd), told(whole, odd), commanded(path, given, number)):
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert outcomes["good"] > 200
    for options in ran:
        text = options.get("text")
        inside = text is None or text.startswith(("embedded:", "/tmp/")) or HUB_TEXT.fullmatch(text)
        assert inside and str(options["model"]) not in VALUES, options


def carded(bundle: Bundle) -> str:
    """Plots take 0.3 s each: here only what they are given is looked at."""

    def front(points: Any, front: Any, chosen: Any, limit: Any, quality: str, cost: str) -> bytes:
        assert all(math.isfinite(x + y) for x, y in points) and math.isfinite(limit) and isinstance(quality, str)
        assert points[chosen] and [points[number] for number in front]
        return b""

    def heads(key: Any, value: Any, title: str) -> bytes:
        rows = [row for row in (*key, *value) if row is not None]
        assert len({len(row) for row in rows}) == 1 and all(0 <= x < math.inf for row in rows for x in row)
        return b""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card, "front_png", front)
        patch.setattr(card, "head_errors_png", heads)
        return attempted(lambda: card.make_card(bundle, "0" * 64))


def limited(bundle: Bundle) -> str:
    rows = [
        {"layer": layer, "key_relative_error": 0.1, "value_relative_error": 0.1, "key_head_errors": [0.1, 0.1],
         "value_head_errors": [0.1, 0.1]}
        for layer in range(4)
    ]  # fmt: skip
    attempted(lambda: str(worst_layer(rows, recorded_rows(bundle.metrics))))
    return attempted(lambda: check_recorded(Limits(max_layer_drift=2.0), "x", bundle))


def told(a: Bundle, b: Bundle) -> str:
    def tell() -> None:
        for one, other in ((a.provenance, b.provenance), (a.metrics, b.metrics)):
            json.dumps([phrase(row) for row in compared(one, other)])

    return attempted(tell)


def commanded(path: Path, given: list[Any], number: int) -> str:
    """The whole command line now and then: it takes longer."""
    if number % 5:
        return attempted(lambda: recorded(load_bundle(path)).line({}))
    for command in (["inspect", path], ["inspect", path, "--json"], ["diff", path, path], ["reproduce", path, *given]):
        done = kvcal(*command)
        assert "raceback" not in done.err, (command, done.err)  # nor "for the traceback: ...", of what nobody foresaw
        assert done.code in (0, 1, 2, 4, 7), done
        assert len(done.err.splitlines()) <= 3, done.err
    return "good"


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / f"x{SUFFIX}"
    os.mkfifo(pipe)
    for path, problem in ((pipe, "a pipe, not a"), (tmp_path, "a folder, not a"), (tmp_path / "y", "no such")):
        with pytest.raises(KVCalError, match=f"^{path}: {problem} bundle file$"):
            load_bundle(path)


def attempted(call: Callable[[], object]) -> str:
    try:
        call()
    except (KVCalError, UsageError) as error:
        said = str(error)
    else:
        return "good"
    assert "\n" not in said and "\x1b" not in said
    return "refused"
