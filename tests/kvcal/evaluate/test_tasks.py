"""lm-eval's requests through the cache: with an exact codec the answers are the plain model's; a local task as
objective.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcal.evaluate.tasks import CacheCalls, pick
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.models.spread import Spread
from kvcal_artifacts.errors import UsageError
from tests.support import schemes
from tests.support.models_fixture import SMALL, SUFFIX, kvcal, write_model, write_text

LM_EVAL = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(not LM_EVAL, reason="lm-eval is not installed: pip install 'kvcal[tasks]'")
PROMPTS = [
    "the rain in the stone house",
    "a shirt on the line, and more than forty characters of words",
    "it is so",
    "no",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("tasks")
    write_text(base / "words.txt")
    return write_model(base / "small")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return load_model(resolve(str(folder)), dtype="float32", device="cpu")


def calls(loaded: Any, codec: str = "exact-32", batch: int = 1) -> CacheCalls:
    return CacheCalls(loaded.model, loaded.tokenizer, schemes.scheme(loaded.model, codec), batch, step=7)


def asked(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


def test_answers_of_a_model_on_a_disk_are_those_of_one_in_memory(loaded: Any, folder: Path) -> None:
    source, spread = resolve(str(folder)), Spread(device_map={"": "disk"})
    on_disk = load_model(source, dtype="float32", device="cpu", spread=spread)
    assert on_disk.model.device.type == "meta" and on_disk.device.type == "cpu"
    for kind, request in (("generate_until", {"max_gen_toks": 2}), ("loglikelihood", " words")):
        found, wanted = (getattr(calls(one), kind)([asked(PROMPTS[0], request)]) for one in (on_disk, loaded))
        assert found == wanted


def test_generation_is_the_models_own(loaded: Any) -> None:
    settings = {"until": ["e"], "max_gen_toks": 20, "do_sample": False}
    found = calls(loaded).generate_until([asked(prompt, settings) for prompt in PROMPTS])
    for prompt, text in zip(PROMPTS, found, strict=True):
        ids = loaded.tokenizer(prompt, return_tensors="pt").input_ids
        out = loaded.model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert text == loaded.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).split("e")[0]


def test_batches_answer_as_one_by_one_and_count_what_was_packed(loaded: Any) -> None:
    other = {"until": "t", "max_gen_toks": 12}
    requests = [asked(p, {"max_gen_toks": 40} if i % 2 else other) for i, p in enumerate(PROMPTS * 2)]
    single, many = calls(loaded, "uniform-4"), calls(loaded, "uniform-4", batch=3)
    assert many.generate_until(requests) == single.generate_until(requests)
    assert single.bits_per_value == pytest.approx(4 + 32 / 16)
    assert many.packed_values == single.packed_values > 0
    assert calls(loaded).bits_per_value is None


def test_a_prompt_longer_than_the_context_loses_its_beginning(loaded: Any) -> None:
    long = "x" * 700 + PROMPTS[1]
    settings = {"max_gen_toks": 8}
    kept = long[-(512 - 8) :]
    assert calls(loaded).generate_until([asked(long, settings)]) == calls(loaded).generate_until(
        [asked(kept, settings)]
    )


def test_likelihoods_are_the_models_own(loaded: Any) -> None:
    pairs = [("the rain in ", "the house"), ("", "words"), ("forty characters of text before", " it ends")]
    found = calls(loaded).loglikelihood([asked(*pair) for pair in pairs])
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        first = loaded.tokenizer(context.rstrip()).input_ids or [loaded.tokenizer.bos_token_id]
        both = first + loaded.tokenizer(context[len(context.rstrip()) :] + continuation).input_ids
        logs = loaded.model(torch.tensor([both])).logits[0].float().log_softmax(-1)[len(first) - 1 : -1]
        target = torch.tensor(both[len(first) :])
        assert total == pytest.approx(float(logs.gather(-1, target[:, None]).sum()), abs=1e-3)
        assert greedy == bool((logs.argmax(-1) == target).all())
    rolling = calls(loaded).loglikelihood_rolling([asked("words"), asked("w" * 1100)])
    assert rolling[0] == pytest.approx(found[1][0], abs=1e-3)
    assert rolling[1] < 5 * rolling[0]


REPORT = {
    "results": {"t": {"alias": "t", "f1,none": 0.5, "f1_stderr,none": 0.1, "f1,strict": 0.25, "loss,none": 3.0}},
    "higher_is_better": {"t": {"f1": True, "loss": False}},
}


def test_a_score_is_picked_by_name() -> None:
    assert [pick(REPORT, "t", metric) for metric in (None, "f1", "f1,strict")] == [0.5, 0.5, 0.25]
    with pytest.raises(UsageError, match="task t: loss is better when lower"):
        pick(REPORT, "t", "loss")
    with pytest.raises(UsageError, match="--metric bleu: task t reports f1,none, f1,strict, loss,none"):
        pick(REPORT, "t", "bleu")


@pytest.mark.skipif(LM_EVAL, reason="lm-eval is installed")
def test_without_lm_eval_it_says_what_to_install(folder: Path, tmp_path: Path) -> None:
    done = kvcal("tune-thresholds", "--model", folder, "--output", tmp_path / f"x{SUFFIX}", "--objective", "task:gsm8k")
    assert (done.code, "pip install 'kvcal[tasks]'" in done.complaint) == (2, True)


TASK = """\
task: next_words
dataset_path: json
dataset_kwargs:
  data_files: {data}
output_type: generate_until
test_split: train
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{next}}}}"
generation_kwargs: {{until: ["q"], max_gen_toks: 8, do_sample: false}}
metric_list:
  - metric: !function score.overlap
    aggregation: mean
    higher_is_better: true
"""
SCORE = "def overlap(references, predictions):\n    return len(set(references[0]) & set(predictions[0])) / 26\n"


@needs_lm_eval
def test_a_local_task_is_an_objective(folder: Path, tmp_path: Path) -> None:
    rows = [{"text": "the rain in " * 8 + word, "next": word * 2} for word in ("stone", "house", "forty")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "task.yaml").write_text(TASK.format(data=tmp_path / "rows.jsonl"))
    (tmp_path / "score.py").write_text(SCORE)
    common = ["--model", folder, "--text", folder.parent / "words.txt", *SMALL, "--group", 8, "--max-bits", 12]
    given = [*common, "--tasks-path", tmp_path, "--trials", 2, "--output", tmp_path / f"x{SUFFIX}", "--json"]
    done = kvcal("tune-thresholds", *given, "--objective", "task:next_words", "--limit", 2, "--batch", 2)
    assert done.code == 0, done.err
    assert 0 <= done.json["quality"] <= 1 and done.json["trials"] == 2
    assert 5 < done.json["bits_per_value"] < 12
    failed = kvcal("tune-thresholds", *given, "--objective", "task:no_such_task")
    assert failed.code == 1 and "kvcal: task no_such_task: lm-eval failed" in failed.err.splitlines()[-1]
