"""RULER's contexts by lm-eval's generators, offline: so many of each length, from a local text, or one line why not."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from kvcal.commands import evaluation
from kvcal.commands.tasks import Asked, load_tasks
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.pipeline.options import EvalOptions
from kvcal_artifacts.errors import UsageError
from tests.support.models_fixture import kvcal

NEEDS = ("lm_eval", "nltk", "wonderwords")
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDS), reason="lm-eval's extra `ruler` is not installed"
)
LENGTHS = {"niah_single_1": "400,500", "ruler_vt": "1000,1300", "ruler_cwe": "1100,1400", "ruler_fwe": "300,500"}
SHORT = ("--windows", 1, "--length", 64)


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load_model(resolve("tiny"), dtype="float32", device="cpu")


def asked(loaded: Any, task: str, say: Any = lambda line: None, **options: Any) -> Asked:
    return load_tasks(EvalOptions(task=[task], **options), [task], resolve("tiny"), loaded.tokenizer, say)


def contexts(loaded: Any, task: str, say: Any = lambda line: None, **options: Any) -> list[dict[str, Any]]:
    harness = asked(loaded, task, say, **options).harnesses[task]
    [made] = harness._loaded["tasks"].values()
    return list(made.eval_docs)


@pytest.mark.parametrize(("task", "lengths"), LENGTHS.items())
def test_a_limit_is_of_each_length(loaded: Any, task: str, lengths: str) -> None:
    rows = contexts(loaded, task, lengths=lengths, limit=2)
    short, long = map(int, lengths.split(","))
    assert [row["max_length"] for row in rows] == [short, short, long, long]
    assert len({row["input"] for row in rows}) == 4
    for row in rows:
        assert len(loaded.tokenizer(row["input"]).input_ids) <= row["max_length"] < 2 * row["length"]
        assert all(answer in row["input"] for answer in row["outputs"])
    assert contexts(loaded, task, lengths=f"{long}", limit=1) == rows[2:3]  # the same in every run


@pytest.mark.parametrize(("task", "lengths"), LENGTHS.items())
def test_every_length_is_answered(loaded: Any, task: str, lengths: str) -> None:
    answered = asked(loaded, task, lengths=lengths, limit=1).harnesses[task].scores(loaded.model, None)
    assert {name: len(scores) for name, scores in answered.items()} == {
        f"{task}@{length}": 1 for length in lengths.split(",")
    }


def test_the_command_answers_every_length_through_the_cache() -> None:
    words = ["--task", "niah_single_1", "--lengths", "400,500", "--limit", 2, "--json"]
    done = kvcal("eval", "--preset", "exact", *SHORT, *words)
    assert done.code == 0, done.err
    tasks = done.json["rows"][1]["tasks"]
    assert {name: (one["n"], one["difference"]) for name, one in tasks.items()} == {
        "niah_single_1@400": (2, 0),
        "niah_single_1@500": (2, 0),
    }
    assert all(one["packed"] > 0.1 for one in tasks.values())


FEW = """\
from lm_eval.tasks.ruler.niah_utils import niah_single_1


def contexts(**settings):
    return niah_single_1(**settings)
"""
TASK = "include: {ruler}/niah_single_1.yaml\ntask: few\ntag: []\ncustom_dataset: !function few.contexts\n"


def test_a_limit_is_of_each_length_of_a_task_of_ones_own(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its function is none of lm-eval's, and makes 3 contexts of each length."""
    from lm_eval.tasks.ruler import niah_utils

    honest = niah_utils.generate_samples
    monkeypatch.setattr(
        niah_utils, "generate_samples", lambda *args, **options: honest(*args, **options | {"num_samples": 3})
    )
    (tmp_path / "few.py").write_text(FEW)
    (tmp_path / "few.yaml").write_text(TASK.format(ruler=Path(niah_utils.__file__).parent))
    options = {"tasks_path": tmp_path, "lengths": "400,500", "limit": 2}
    harness = asked(loaded, "few", **options).harnesses["few"]
    [made] = harness._loaded["tasks"].values()
    assert len(made.eval_docs) == 6
    assert harness._asked(made) == [0, 1, 3, 4]
    with pytest.raises(UsageError, match="a context of few would have 4096 tokens"):
        asked(loaded, "few", **options | {"lengths": "400,4k"})


@pytest.mark.parametrize("options", [(), ("--lengths", "400,3000")])
def test_contexts_longer_than_the_models_are_refused(options: tuple[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval would cut them. Without --lengths it makes contexts of 4096 tokens."""
    monkeypatch.setattr(evaluation, "open_model_of", None)  # before any weights
    done = kvcal("eval", "--preset", "exact", *SHORT, "--task", "niah_single_1", *options)
    length = 3000 if options else 4096
    expected = f"a context of niah_single_1 would have {length} tokens, the model was made for 2048; give at most"
    assert (done.code, expected in done.err) == (2, True), done.err


@pytest.mark.parametrize("task", [*LENGTHS, "niah_single_2", "niah_multikey_3", "niah_multiquery"])
def test_lengths_that_hold_no_context_are_refused(loaded: Any, task: str) -> None:
    """Of ruler_vt, ruler_cwe and ruler_fwe lm-eval would try for ever. The length that the line names is enough."""
    with pytest.raises(UsageError, match=f"^--lengths 120: too short for {task}, whose smallest context") as caught:
        contexts(loaded, task, lengths="120", limit=1)
    [least] = re.findall(r"give at least --lengths (\d+)$", str(caught.value))
    with pytest.raises(UsageError, match=f"give at least --lengths {least}$"):
        contexts(loaded, task, lengths=str(int(least) - 1), limit=1)
    [row] = contexts(loaded, task, lengths=least, limit=1)
    assert row["outputs"] and all(answer in row["input"] for answer in row["outputs"])


def test_essays_are_of_a_local_text(loaded: Any, tmp_path: Path) -> None:
    said: list[str] = []
    embedded, _ = contexts(loaded, "niah_single_2", said.append, lengths="1200,1300", limit=1)
    assert said == ["note: essays of niah_single_2 are embedded:evaluation, instead of lm-eval's download"]
    place = tmp_path / "fen.txt"
    place.write_text("Fog lay on the fen. A heron rose! Nobody saw it. " * 5)
    [foggy] = contexts(loaded, "niah_single_2", said.append, lengths="1200", limit=1, text=str(place))
    assert "essays of niah_single_2 are file:fen.txt" in said[1]
    assert (foggy["input"].count("heron") > 30, "heron" in embedded["input"]) == (True, False)
    needle = re.search(r"(.)(.) One of the special magic numbers for \S+ is: \d+\. (.)", foggy["input"])
    assert needle is not None and needle.group(2) in ".!"  # it lies between two sentences
    assert foggy["outputs"] == embedded["outputs"]
