"""`kvcal eval --task`: lm-eval's own model class over our caches, and our own tasks, beside full precision."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from transformers import DynamicCache

from kvcal.calibrate.checkpoint import CommandCheckpoint
from kvcal.cli.evaluate import print_tasks
from kvcal.commands import evaluation
from kvcal.commands.task_choice import CONTEXT_NAMES, HUMANEVAL, chosen_tasks, lengths_of
from kvcal.commands.tasks import Answered, judged, load_tasks, run_tasks, task_names
from kvcal.evaluate import contexts, harness, programs
from kvcal.evaluate.compressed_lm import forced_logits, language_model
from kvcal.evaluate.contexts import CONTEXT_TASKS, Agreement, Haystack, agreed, by_length, context_once, needle
from kvcal.evaluate.harness import TaskOptions, by_question, in_one_line
from kvcal.evaluate.packed_share import PackedShare, share_of
from kvcal.evaluate.paired import Paired
from kvcal.evaluate.row_ends import Reading, Requests, answer_lengths, forced, generated
from kvcal.methods.data_free import Preset
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.pipeline.options import EvalOptions
from kvcal.report.plots import needle_table
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.errors import TextUnavailable, UsageError
from kvcal_artifacts.scheme import HeavyHitters
from tests.support.models_fixture import kvcal, write_text

if TYPE_CHECKING:
    from kvcal.commands.results import TaskScores
    from kvcal.evaluate.packed_share import OpenCache

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
    return lambda *length, **kind: KVCalCache(scheme, loaded.model)


def folder_of(tmp_path: Path, kind: str) -> Path:
    """Of two questions the tiny model answers the first."""
    right = " thing to be." if kind == "generate_until" else " thing"
    rows = [{"text": ("it was a " * 75).rstrip(), "next": right}, {"text": "the year of " * 75, "next": " night"}]
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
    same = asdict(Paired.of([1.0] * 5, [1.0] * 5))
    print_tasks([{"name": "kivi-4", "tasks": {"needle@256": cast("TaskScores", same)}}])
    out = " ".join(capsys.readouterr().out.split())
    assert "no answer differs; the true loss may still be up to 43.4 % (95 %)" in out
    assert "-0.4345" in out and " 0.4345" in out
    other = asdict(Paired.of([1.0, 0.0, 0.0], [1.0, 1.0, 0.0]))
    print_tasks([{"name": "kivi-4", "tasks": {"needle@256": cast("TaskScores", other)}}])
    assert "no answer" not in capsys.readouterr().out
    one = asdict(Paired.of([1.0], [1.0]))
    print_tasks([{"name": "kivi-4", "tasks": {"gsm8k": cast("TaskScores", one)}}])
    words = capsys.readouterr().out.split()
    assert words.count("–") == 3  # of low, high and packed
    assert "no answer of gsm8k by kivi-4 differs: without an interval that is no proof" in " ".join(words)


def test_a_task_that_full_precision_cannot_do_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    none = Paired.of([0.0] * 5, [0.0] * 5)
    print_tasks([{"name": "kivi-4", "tasks": {"needle@256": cast("TaskScores", asdict(none))}}])
    out = " ".join(capsys.readouterr().out.split())
    assert "full precision answered none of 5 questions of needle@256: the comparison says nothing" in out
    assert "no answer differs" not in out


def test_a_gate_that_can_see_no_drop_fails() -> None:
    pairs = {"a": Paired.of([1.0, 1.0], [1.0, 1.0]), "b": Paired.of([0.0, 1.0], [0.0, 0.0])}
    seen, unseen = judged(Answered({"row": pairs}), 0)
    assert (seen.passed, unseen.passed) == (True, False)
    assert unseen.line == (
        "row: max-score-drop (b: full precision answered none of 2 questions, so that no drop can be seen; give a task "
        "that this model can do)"
    )


def test_a_score_without_a_packed_block_is_full_precisions(capsys: pytest.CaptureFixture[str]) -> None:
    right = Paired.of([1.0, 1.0], [1.0, 1.0])
    answered = Answered({"row": {"a": right, "b": right}}, packed={"row": {"a": 0.5, "b": 0.0}})
    assert [one["packed"] for one in answered.of("row")["tasks"].values()] == [0.5, 0.0]  # type: ignore[attr-defined]
    seen, exact = judged(answered, 0)
    assert (seen.passed, exact.passed) == (True, False)
    assert "b: nothing was packed while it was answered" in exact.line
    assert [check.passed for check in judged(replace(answered, packed={}), 0)] == [True]  # of files of before
    print_tasks([{"name": "row", **cast("dict[str, Any]", answered.of("row"))}])
    out = " ".join(capsys.readouterr().out.split())
    assert "nothing was packed while answering b by row" in out and "answering a" not in out
    assert "50.0 %" in out and "0 %" in out


def test_shares_of_contexts_by_their_length() -> None:
    rows = [(512, 530, 352), (512, 500, 320), (1024, 1040, 864), (1024, 1010, 800)]
    assert share_of(rows, "needle@512") == 672 / 1030
    assert share_of(rows, "needle@1024") == 1664 / 2050
    of_lm_eval = [(0, 500, 320), (0, 20, 0)]
    assert share_of(of_lm_eval, "gsm8k") == share_of(of_lm_eval, "ruler_vt@4096") == 320 / 520
    assert share_of([], "gsm8k") is None


def counted(loaded: Any, use: Any, keep: float | None = None) -> list[tuple[int, int, int]]:
    """Rows of an exact codec with 4 + 16 exact tokens and blocks of 8."""
    share, scheme = PackedShare(), Preset("exact-32", "exact-32", sink=4, recent=16, block=8).scheme(loaded.model)
    scheme = scheme if keep is None else scheme.keeping(HeavyHitters(keep))
    with share.counting(lambda: KVCalCache(scheme, loaded.model))(7) as cache, torch.no_grad():
        use(cache)
    return share.rows


def test_what_the_last_call_packs_is_not_counted(loaded: Any) -> None:
    """Nothing has read it: a prompt by itself is answered by exact tokens."""
    ids = torch.ones(2, 61, dtype=torch.long)
    once = counted(loaded, lambda cache: loaded.model(ids, past_key_values=cache))
    assert once == [(7, 61, 0)] * 2

    def steps(cache: KVCalCache) -> None:
        loaded.model(ids[:, :60], past_key_values=cache)
        loaded.model(ids[:, 60:], past_key_values=cache)

    assert counted(loaded, steps) == [(7, 61, 40)] * 2  # of 60, 4 + 16 are exact; the 61st packs no more


def test_evicted_tokens_are_none_that_were_left_as_they_were(loaded: Any) -> None:
    ids = torch.ones(1, 101, dtype=torch.long)

    def steps(cache: KVCalCache) -> None:
        loaded.model(ids[:, :100], past_key_values=cache)
        loaded.model(ids[:, 100:], past_key_values=cache)

    [(_, tokens, changed)] = counted(loaded, steps, keep=0.2)
    assert (tokens, changed) == (101, 80)


def test_the_command_counts_what_was_packed(tmp_path: Path) -> None:
    """Of 4 + 128 exact tokens and blocks of 32, contexts of 100 and of 400 tokens, with a question and an answer."""
    words = ["--windows", 1, "--length", 512, "--lengths", "100,400", "--limit", 1, "--task", "needle", "--json"]
    done = kvcal("eval", "--preset", "higgs-2", *words)
    tasks = done.json["rows"][1]["tasks"]
    assert tasks["needle@100"]["packed"] == 0
    assert 0.5 < tasks["needle@400"]["packed"] < 0.8
    assert "nothing was packed while answering needle@100 by higgs-2" in " ".join(
        kvcal("eval", "--preset", "higgs-2", *words[:-1]).out.split()
    )


def test_the_command_draws_whole_contexts() -> None:
    """One context of five questions has no spread, and no test of independent questions."""
    short = ["--windows", 1, "--length", 64, "--lengths", 256, "--limit", 1, "--json"]
    done = kvcal("eval", "--preset", "exact", "--task", "context-once,needle", *short)
    once, needles = (done.json["rows"][1]["tasks"][name] for name in ("context-once@256", "needle@256"))
    assert (once["n"], once["low"], once["high"], once["mcnemar"]) == (5, None, None, None)
    assert (needles["n"], needles["mcnemar"], needles["low"] is None) == (5, 1, False)


def test_the_command_fails_where_no_drop_can_be_seen(tmp_path: Path) -> None:
    """The tiny model finds no needle."""
    short = ["--windows", 1, "--length", 64, "--lengths", 256, "--limit", 1, "--max-score-drop", 0]
    done = kvcal("eval", "--preset", "exact", "--task", "needle", *short, "--junit", tmp_path / "gates.xml")
    assert (done.code, "needle@256: full precision answered none of 5 questions" in done.err) == (3, True), done.err
    assert 'failures="1"' in (tmp_path / "gates.xml").read_text()


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
        lm = language_model(loaded.model, loaded.tokenizer, maker, TaskOptions().step, 2)
        pairs = [("it was a " * 20, "long day"), ("the year " * 25, "of the night"), ("in", " the end")]
        asked = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
        settings = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
        prompts = [Instance("generate_until", {}, (text, dict(settings)), 0) for text, _ in pairs[:2]]
        return [score for score, _ in lm.loglikelihood(asked)], lm.generate_until(prompts)

    own, through = answers(None), answers(exact(loaded))
    assert through[0] == pytest.approx(own[0], abs=1e-3)
    assert through[1] == own[1]
    coarse = Preset("uniform-1", "uniform-1", sink=0, recent=0, block=8).scheme(loaded.model)
    assert answers(lambda **_: KVCalCache(coarse, loaded.model))[0] != pytest.approx(own[0], abs=1e-2)


@needs_lm_eval
@pytest.mark.parametrize("keep", [None, 0.4])
def test_the_packed_share_does_not_depend_on_the_batch(loaded: Any, keep: float | None) -> None:
    """Rows of unlike prompts and answers are counted up to their own ends; alone, a row is counted by the cache."""
    from lm_eval.api.instance import Instance

    scheme = Preset("exact-32", "exact-32", sink=4, recent=16, block=8).scheme(loaded.model)
    scheme = scheme if keep is None else scheme.keeping(HeavyHitters(keep))
    texts = [
        "it was a long day",
        "the year of " * 9,
        "in the middle of the year and " * 3,
        "nobody said",
        "a man " * 20,
    ]
    settings = {"until": [",", " that"], "max_gen_toks": 40, "do_sample": False}
    written = [Instance("generate_until", {}, (text, dict(settings)), 0) for text in texts]
    likely = [Instance("loglikelihood", {}, (text * 3, " of the night" * i), 0) for i, text in enumerate(texts, 1)]

    def rows(batch: int, by_cache: bool = False) -> tuple[list[tuple[int, int, int]], list[str]]:
        share = PackedShare()
        opened = share.counting(lambda: KVCalCache(scheme, loaded.model))
        maker = cast("OpenCache", lambda readings: opened()) if by_cache else opened
        lm = language_model(loaded.model, loaded.tokenizer, maker, TaskOptions().step, batch)
        answers = lm.generate_until(written)
        lm.loglikelihood(likely)
        return sorted(share.rows), answers

    alone, answers = rows(1, by_cache=True)
    assert len(set(map(len, answers))) > 2 and any(changed for _, _, changed in alone)
    together, same = rows(5)
    assert answers == same or keep is not None  # an evicting cache may answer otherwise, where rows are padded
    assert together == alone


def test_an_answer_ends_with_its_first_stop() -> None:
    """With the end of a text, a stop string, or the last token that there is; what follows is its neighbours'."""
    tokens = torch.tensor([[5, 9, 0, 0], [5, 6, 7, 9], [5, 6, 6, 6], [9, 7, 0, 0]])
    stopped = lambda so_far: [7 in row for row in so_far.tolist()]  # noqa: E731
    assert answer_lengths(tokens, {9}, stopped) == [2, 3, 4, 1]
    assert generated([10, 10], [1, 3]) == [Reading(10, 0), Reading(12, 11)]


def test_rows_of_likelihoods_are_found_without_their_padding() -> None:
    requests = Requests(frozenset({(1, 2), (1, 2, 0), (3,), (0,)}))
    assert requests.lengths(torch.tensor([[1, 2, 5], [3, 0, 0], [1, 2, 0], [0, 0, 0]])) == [3, 1, 3, 1]
    assert forced([3, 32, 33, 70], [(0, 32), (32, 96)]) == [
        Reading(3, 0),
        Reading(32, 0),
        Reading(33, 32),
        Reading(70, 32),
    ]


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
    assert (paired["n"], paired["full"], paired["difference"]) == (2, 0.5, 0)
    assert paired["packed"] > 0.1  # else the codec answered nothing
    assert [gate["gate"] for gate in done.json["gates"]] == ["max-score-drop"]
    monkeypatch.setattr(evaluation, "evaluation_text", None)  # the name is looked at before any text
    unknown = kvcal(*command)
    assert (unknown.code, "--task next_words: lm-eval has no task" in unknown.err) == (2, True)
    near = kvcal("eval", "--preset", "exact", "--task", "nedle")
    assert (near.code, "--task nedle (needle?): lm-eval has no task" in near.err) == (2, True)


@needs_lm_eval
def test_answers_of_other_content_are_not_taken_up(
    tmp_path: Path, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a killed run; the data lie outside the folder of task files."""
    files, data = tmp_path / "files", tmp_path / "data.jsonl"
    files.mkdir()
    folder_of(tmp_path, "loglikelihood")
    task = (tmp_path / "task.yaml").rename(files / "task.yaml")
    options = EvalOptions(task=["next_words"], tasks_path=files)
    monkeypatch.setenv("KVCAL_CACHE_DIR", str(tmp_path / "cache"))

    def lines() -> list[str]:
        said: list[str] = []
        asked = load_tasks(options, ["next_words"], resolve("tiny"), loaded.tokenizer, said.append)
        work = CommandCheckpoint("eval", {}, output=None, resume=True, say=said.append)
        run_tasks(asked, loaded.model, {}, work, said.append)
        return [line.partition(", in ")[0] for line in said]

    new, resumed = ["task next_words: full"], ["resuming: task next_words: full was answered by an earlier run"]
    assert (lines(), lines()) == (new, resumed)
    data.write_text(data.read_text().replace("night", "day"))
    assert (lines(), lines()) == (new, resumed)
    task.write_text(task.read_text() + "description: 'Go on. '\n")
    assert (lines(), lines()) == (new, resumed)
    monkeypatch.setattr(harness, "version", lambda name: "0.0")
    assert lines() == new


def test_own_tasks_of_an_exact_codec_are_those_of_full_precision(loaded: Any, haystack: Haystack) -> None:
    options = TaskOptions(limit=1, lengths=(96,))
    for task, count in ((needle, 5), (context_once, 5), (Agreement(), 1)):
        own = task(loaded.model, haystack, None, options)
        assert task(loaded.model, haystack, exact(loaded), options) == own
        assert sum(map(len, own.values())) == count
    coarse = Preset("uniform-1", "uniform-1", sink=0, recent=0, block=8).scheme(loaded.model)
    assert (
        Agreement()(loaded.model, haystack, lambda *length: KVCalCache(coarse, loaded.model), options)["agreement@96"][
            0
        ]
        < 1
    )


def test_agreement_decodes_full_precision_once_for_all_caches(
    loaded: Any, haystack: Haystack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at all for its own row, whose score is 1. A task made anew decodes again, with the same scores."""
    decoded: list[type] = []

    def counting(model: Any, prompt: list[int], cache: Any, tokens: int) -> torch.Tensor:
        decoded.append(type(cache))
        return _decoded(model, prompt, cache, tokens)

    _decoded = contexts._decoded
    monkeypatch.setattr(contexts, "_decoded", counting)
    options, task = TaskOptions(limit=2, lengths=(64, 96)), CONTEXT_TASKS["agreement"]()
    assert task(loaded.model, haystack, None, options) == {"agreement@64": [1.0, 1.0], "agreement@96": [1.0, 1.0]}
    assert decoded == []
    coarse = Preset("uniform-1", "uniform-1", sink=0, recent=0, block=8).scheme(loaded.model)
    makers = [exact(loaded), lambda *length: KVCalCache(coarse, loaded.model)]
    scores = [task(loaded.model, haystack, maker, options) for maker in makers]
    assert (decoded.count(DynamicCache), decoded.count(KVCalCache)) == (4, 8)
    assert scores[0] == task(loaded.model, haystack, None, options) != scores[1]
    assert [CONTEXT_TASKS["agreement"]()(loaded.model, haystack, maker, options) for maker in makers] == scores
    assert decoded.count(DynamicCache) == 12


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


@pytest.mark.parametrize("task", ["needle", "context-once"])
def test_a_length_too_short_for_needles_is_refused_before_any_text(
    loaded: Any, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the length that the line names is enough; agreement, which has no needles, takes any."""
    monkeypatch.setattr(evaluation, "evaluation_text", None)
    refused = kvcal("eval", "--preset", "kivi-2", "--task", f"agreement,{task}", "--lengths", "1024,9", "--limit", 2)
    assert (refused.code, f"--lengths 9: too short for the needles of {task}; give at least" in refused.err) == (
        2,
        True,
    )
    least = int(refused.err.split()[-1])
    options = EvalOptions(task=[task], lengths=f"{least}", limit=2)
    asked = load_tasks(options, [task], resolve("tiny"), loaded.tokenizer, print)
    scores = CONTEXT_TASKS[task]()(loaded.model, asked.haystack, None, asked.options)
    assert {name.partition("@")[2].partition("/")[0] for name in scores} == {f"{least}"}
    options = EvalOptions(task=["agreement"], lengths="9")
    assert load_tasks(options, ["agreement"], resolve("tiny"), loaded.tokenizer, print).options.lengths == (9,)


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
        "b": Paired.of([1.0], [0.5]),
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
        (["--task", ""], "kvcal: --task is empty: give a task, as needle or humaneval, or leave the option out"),
        (["--task", "needle", "--task", ", "], "--task is empty"),
        (["--task", "needle", "--lengths", ""], "--lengths is empty: give whole numbers of tokens"),
        (["--task", "humaneval"], "give --allow-code"),
        (["--task", "agreement", "--max-score-drop", 0.1], "--max-score-drop needs a --task with a score"),
        (["--task", "context-once", "--needle-plot", "x.png"], "--needle-plot draws the task `needle`"),
        (["--task", "needle", "--needle-plot", "x.jpg"], "--needle-plot x.jpg: must end in .png"),
        (["--task", "needle", "--lengths", "4x"], "--lengths 4x"),
        (["--task", "needle", "--chat"], "--chat applies only to tasks of lm-eval and humaneval, and there is none"),
        (["--task", "agreement", "--tasks-path", "."], "--tasks-path applies only to tasks of lm-eval and humaneval"),
        (["--task", "needle,gsm8k", "--allow-code"], "--allow-code applies only to --task humaneval"),
        (["--task", "humaneval", "--allow-code", "--lengths", "4k"], "--lengths applies only to tasks with synthetic"),
        (["--task", "humaneval,gsm8k", "--allow-code", "--tasks-path", "/nosuchdir"], "/nosuchdir: no such folder"),
        (["--task", "agreement,needle", "--lengths", "64,100k"], "--lengths 64,100k: a context of agreement would have "
         "102400 tokens, tiny was made for 2048; give at most 2048"),
    ],
)  # fmt: skip
def test_options_that_nothing_takes(options: list[Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "open_model_of", None)  # before any weights
    done = kvcal("eval", "--preset", "exact", "--windows", 1, "--length", 64, *options)
    assert (done.code, said in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    "options",
    [
        {"task": ["needle,gsm8k"], "chat": True, "tasks_path": Path(), "lengths": "4k"},
        {"task": ["humaneval"], "allow_code": True, "chat": True, "tasks_path": Path(), "limit": 3},
        {"task": ["humaneval,agreement"], "allow_code": True, "lengths": "4k"},
        {"task": ["ruler_vt"], "lengths": "4k"},
    ],
)
def test_options_that_some_task_takes(options: dict[str, Any]) -> None:
    assert chosen_tasks(EvalOptions(**options)) == options["task"][0].split(",")


@needs_lm_eval
def test_lengths_that_no_task_of_lm_eval_takes() -> None:
    """Tasks that make their contexts take them, and groups that may hold such tasks."""
    with pytest.raises(UsageError, match=r"--lengths applies only to .* --task gsm8k,arc_easy reads its own: give one"):
        task_names(EvalOptions(task=["gsm8k,arc_easy"], lengths="4k"))
    for names in (["gsm8k", "ruler_vt"], ["ruler"], ["niah_single_2"], ["gsm8k", "needle"]):
        assert task_names(EvalOptions(task=names, lengths="4k")) == names


@needs_lm_eval
def test_chat_needs_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "open_model_of", None)  # before any weights
    done = kvcal("eval", "--preset", "exact", "--task", "humaneval", "--allow-code", "--chat")
    said = "--chat: the tokenizer of tiny has no chat template; leave --chat out"
    assert (done.code, said in done.err) == (2, True), done.err


TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}</{{ message.role }}>{% endfor %}"
)


@needs_lm_eval
@pytest.mark.parametrize("chat", [False, True])
def test_humaneval_in_the_chat_template(
    chat: bool, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model goes on with the program in its answer, up to the same stops or the end of the program's fence."""
    problem = {"prompt": 'def one():\n    """1"""\n', "test": "def check(f): pass", "entry_point": "one"}
    (tmp_path / "humaneval.jsonl").write_text(json.dumps(problem))
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = TEMPLATE
    asked: list[Any] = []
    ran: list[str] = []

    def recorded(*given: Any) -> Any:
        lm = language_model(*given)
        generate = lm.generate_until
        lm.generate_until = lambda requests: asked.extend(requests) or generate(requests)
        return lm

    monkeypatch.setattr(programs, "language_model", recorded)
    monkeypatch.setattr(programs, "NEW_TOKENS", 4)
    monkeypatch.setattr(programs.sandbox, "check", lambda: None)
    monkeypatch.setattr(programs.sandbox, "passes", lambda program: ran.append(program) or True)
    options = TaskOptions(tasks_path=tmp_path, allow_code=True, chat=chat)
    assert programs.humaneval(loaded.model, tokenizer, exact(loaded), options) == {"humaneval": [1.0]}
    [request] = asked
    prompt, settings = request.args
    assert ran[0].startswith(problem["prompt"])
    assert ran[0].endswith("\ndef check(f): pass\ncheck(one)\n")
    if not chat:
        assert (prompt, settings["until"]) == (problem["prompt"], programs.STOPS)
        return
    assert prompt.startswith("<user>Write a solution") and "</user><assistant>Here is the completed" in prompt
    assert prompt.endswith('```python\ndef one():\n    """1"""')
    assert settings["until"] == [*programs.STOPS, "```"]


@pytest.mark.parametrize("options", [["--max-score-drop", "0"], ["--task", "humaneval,gsm8k"]])
def test_what_needs_another_option_is_refused_before_torch_is_imported(options: list[str]) -> None:
    code = (
        "import sys\nfrom kvcal.cli import main\ntry:\n    main()\nfinally:\n"
        "    print('imported', [name for name in ('torch', 'lm_eval') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "eval", "--preset", "exact", *options], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "imported []" in done.stdout) == (2, True), done.stdout + done.stderr


def test_a_misspelt_task_is_named_without_lm_eval_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--task nedle \(needle\?\): needs lm-eval, which is not installed"):
        task_names(EvalOptions(task=["nedle"]))


@needs_lm_eval
def test_problems_of_humaneval_are_looked_for_before_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "open_model_of", None)
    (tmp_path / "HumanEval.jsonl").write_text("{")
    options = ["--task", "humaneval", "--allow-code", "--tasks-path", tmp_path]
    done = kvcal("eval", "--preset", "exact", "--windows", 1, "--length", 64, *options)
    assert (done.code, f"--task humaneval: {tmp_path / 'HumanEval.jsonl'}: needs a JSON object" in done.err) == (
        1,
        True,
    )


def test_kvcals_tasks_are_those_that_are_named() -> None:
    assert (tuple(CONTEXT_TASKS), programs.NAME) == (CONTEXT_NAMES, HUMANEVAL)


def test_a_task_needs_something_to_compare(tmp_path: Path) -> None:
    write_text(tmp_path / "words.txt")
    done = kvcal("eval", "--task", "needle", "--text", tmp_path / "words.txt")
    assert (done.code, "--task compares caches with full precision" in done.err) == (2, True)
