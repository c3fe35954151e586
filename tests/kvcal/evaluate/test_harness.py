"""`kvcal eval --task`: lm-eval's own model class over our caches, and our own tasks, beside full precision."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal.cli.evaluate import print_tasks
from kvcal.commands import evaluation
from kvcal.commands.tasks import Answered, judged, lengths_of
from kvcal.evaluate.contexts import Haystack, agreed, agreement, by_length, context_once, needle
from kvcal.evaluate.harness import TaskOptions, by_question, forced_logits, in_one_line, language_model
from kvcal.evaluate.paired import Paired
from kvcal.methods.data_free import Preset
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.report.plots import needle_table
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.errors import TextUnavailable, UsageError
from tests.support.models_fixture import kvcal, write_text

LM_EVAL = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(not LM_EVAL, reason="lm-eval is not installed")
TASK = """\
task: next_words
dataset_path: json
dataset_kwargs:
  data_files: {data}
output_type: {kind}
test_split: train
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{next}}}}"
"""
GENERATED = """\
generation_kwargs: {until: ["q"], max_gen_toks: 4, do_sample: false}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load_model(resolve("tiny"), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def haystack(loaded: Any) -> Haystack:
    return Haystack.of(loaded.tokenizer, "It was a long day in the middle of the year, and nobody said a word. " * 30)


def exact(loaded: Any) -> Any:
    scheme = Preset("exact-32", "exact-32", sink=4, recent=16, block=8).scheme(loaded.model)
    return lambda: KVCalCache(scheme, loaded.model)


def folder_of(tmp_path: Path, kind: str) -> Path:
    rows = [{"text": "it was a " * 30, "next": " day"}, {"text": "the year of " * 30, "next": " night"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = GENERATED if kind == "generate_until" else ""
    (tmp_path / "task.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl", kind=kind) + more)
    return tmp_path


def test_lengths() -> None:
    assert lengths_of("4k, 8K,1000,4096") == (4096, 8192, 1000)
    assert lengths_of(None) == ()
    for wrong in ("4x", "k", "0", "-1", "1.5k"):
        with pytest.raises(UsageError, match="--lengths"):
            lengths_of(wrong)


def test_what_lm_eval_prints_stays_out_of_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    with in_one_line(["ruler_vt"]):
        print("Max length 4096 | Current length 511")
    assert capsys.readouterr() == ("", "Max length 4096 | Current length 511\n")


def test_a_task_whose_data_cannot_be_reached() -> None:
    said = "--task gsm8k: its data are on the hub, .* connect, or"
    with pytest.raises(TextUnavailable, match=said) as caught, in_one_line(["gsm8k"]):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub (OfflineModeIsEnabled)")
    assert caught.value.exit_code == 5


def test_a_score_without_a_difference_is_no_proof(capsys: pytest.CaptureFixture[str]) -> None:
    same = {"score": 1.0, "full": 1.0, "difference": 0.0, "low": 0.0, "high": 0.0, "mcnemar": 1.0, "n": 5}
    print_tasks([{"name": "kivi-4", "tasks": {"needle@256": same}}])
    assert "with 5 questions the true loss may still be up to 45.1 % (95 %)" in " ".join(
        capsys.readouterr().out.split()
    )
    print_tasks([{"name": "kivi-4", "tasks": {"needle@256": same | {"low": -0.2}}}])
    assert "may still be" not in capsys.readouterr().out


def test_forced_logits_are_the_models_own(loaded: Any) -> None:
    ids = torch.randint(0, loaded.model.config.vocab_size, (2, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = loaded.model(ids).logits
    assert torch.allclose(forced_logits(loaded.model, ids, exact(loaded), 32), expected, atol=1e-3)


@needs_lm_eval
def test_lm_evals_class_answers_through_the_cache(loaded: Any) -> None:
    """Likelihoods and generated text of an exact codec are those of the model's own cache; a coarse one's are others."""
    from lm_eval.api.instance import Instance

    def answers(maker: Any) -> tuple[list[float], list[str]]:
        lm = language_model(loaded.model, loaded.tokenizer, maker, TaskOptions(batch=2))
        pairs = [("it was a " * 20, "long day"), ("the year " * 25, "of the night"), ("in", " the end")]
        asked = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
        settings = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
        prompts = [Instance("generate_until", {}, (text, dict(settings)), 0) for text, _ in pairs[:2]]
        return [score for score, _ in lm.loglikelihood(asked)], lm.generate_until(prompts)

    own, through = answers(None), answers(exact(loaded))
    assert through[0] == pytest.approx(own[0], abs=1e-3)
    assert through[1] == own[1]
    coarse = Preset("uniform-1", "uniform-1", sink=0, recent=0, block=8).scheme(loaded.model)
    assert answers(lambda: KVCalCache(coarse, loaded.model))[0] != pytest.approx(own[0], abs=1e-2)


@needs_lm_eval
@pytest.mark.parametrize("kind", ["generate_until", "loglikelihood"])
def test_a_local_task_is_paired_with_full_precision(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ["--windows", 1, "--length", 64, "--json"]
    command = ["eval", "--preset", "exact", "--task", "next_words", "--max-score-drop", 0, *short]
    done = kvcal(*command, "--tasks-path", folder_of(tmp_path, kind))
    assert done.code == 0, done.err
    full, row = done.json["rows"]
    assert "tasks" not in full
    paired = row["tasks"]["next_words"]
    assert {"score", "full", "difference", "low", "high", "n"} <= set(paired)
    assert (paired["n"], paired["difference"]) == (2, 0)
    assert [gate["gate"] for gate in done.json["gates"]] == ["max-score-drop"]
    monkeypatch.setattr(evaluation, "evaluation_text", None)  # the name is looked at before any text
    unknown = kvcal(*command)
    assert (unknown.code, "--task next_words: lm-eval has no task" in unknown.err) == (2, True)


def test_own_tasks_of_an_exact_codec_are_those_of_full_precision(loaded: Any, haystack: Haystack) -> None:
    options = TaskOptions(limit=1, lengths=(96,))
    for task, count in ((needle, 5), (context_once, 5), (agreement, 1)):
        own = task(loaded.model, haystack, None, options)
        assert task(loaded.model, haystack, exact(loaded), options) == own
        assert sum(map(len, own.values())) == count
    coarse = Preset("uniform-1", "uniform-1", sink=0, recent=0, block=8).scheme(loaded.model)
    assert agreement(loaded.model, haystack, lambda: KVCalCache(coarse, loaded.model), options)["agreement@96"][0] < 1


def test_needles_lie_where_they_are_said_to(loaded: Any, haystack: Haystack) -> None:
    sentence = " The secret number of Oslo is 12345. "
    tokens = loaded.tokenizer(sentence, add_special_tokens=False).input_ids
    for depth in (0.0, 0.5, 1.0):
        context = haystack.context(200, [(depth, sentence)], 7)
        assert len(context) == 200
        place = round(depth * (200 - len(tokens)))
        assert context[place : place + len(tokens)] == tokens
    with pytest.raises(UsageError, match="--lengths 3: too short"):
        haystack.context(3, [(0.5, sentence)], 0)


def test_agreement_ends_at_the_first_other_token() -> None:
    a = torch.tensor([1, 2, 3, 4])
    assert agreed(a, a) == 1
    assert agreed(a, torch.tensor([1, 2, 9, 4])) == 0.5
    assert agreed(a, torch.tensor([1, 2])) == 0.5


def test_depths_are_joined_and_drawn() -> None:
    scores = {
        "needle@64/0": [1.0],
        "needle@64/0.5": [0.0],
        "needle@128/0": [1.0],
        "needle@128/0.5": [1.0],
        "x/y": [0.5],
    }
    assert by_length(scores) == {"needle@64": [1.0, 0.0], "needle@128": [1.0, 1.0], "x/y": [0.5]}
    cells = {name: numbers[0] for name, numbers in scores.items()}
    assert needle_table(cells) == ([64, 128], [0.0, 0.5], [[1.0, 1.0], [0.0, 1.0]])


def test_a_metric_a_question() -> None:
    def sample(number: int, **metrics: Any) -> dict[str, Any]:
        return {"doc_id": number, "filter": "none", "metrics": list(metrics), **metrics}

    assert by_question("t", [sample(1, f1=0.5), sample(0, f1=1)], {"f1": True}) == {"t": [1.0, 0.5]}
    lengths = [sample(0, **{"4096": 1.0, "8192": -1}), sample(1, **{"4096": -1, "8192": 0.5})]
    assert by_question("r", lengths, {}) == {"r@4096": [1.0], "r@8192": [0.5]}
    with pytest.raises(UsageError, match="--task t: reports loss, words, and no number a question"):
        by_question("t", [sample(0, loss=1.0, words=(1, 2))], {"loss": False})


def test_the_gate_takes_the_largest_drop() -> None:
    pairs = {
        "a": Paired.of([1.0, 0.0], [1.0, 1.0]),
        "b": Paired.of([1.0], [0.0]),
        "agreement@9": Paired.of([0.0], [1.0]),
    }
    [check] = judged(Answered({"row": pairs}), 0.25)
    assert (check.passed, check.figure, check.limit) == (False, 0.5, 0.25)
    assert check.detail.startswith("a: 0.5, full precision 1")
    assert judged(Answered({"row": pairs}), None) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--limit", 3], "--limit applies only to --task"),
        (["--task", "humaneval"], "give --allow-code"),
        (["--task", "agreement", "--max-score-drop", 0.1], "--max-score-drop needs a --task with a score"),
        (["--task", "context-once", "--needle-plot", "x.png"], "--needle-plot draws the task `needle`"),
        (["--task", "needle", "--needle-plot", "x.jpg"], "--needle-plot x.jpg: must end in .png"),
        (["--task", "needle", "--lengths", "4x"], "--lengths 4x"),
    ],
)
def test_options_that_nothing_takes(options: list[Any], said: str) -> None:
    done = kvcal("eval", "--preset", "exact", "--windows", 1, "--length", 64, *options)
    assert (done.code, said in done.err) == (2, True), done.err


def test_a_task_needs_something_to_compare(tmp_path: Path) -> None:
    write_text(tmp_path / "words.txt")
    done = kvcal("eval", "--task", "needle", "--text", tmp_path / "words.txt")
    assert (done.code, "--task compares caches with full precision" in done.err) == (2, True)
