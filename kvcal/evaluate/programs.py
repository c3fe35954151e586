"""HumanEval (Chen et al. 2021): programs completed through the cache, and run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvcal_artifacts.errors import KVCalError, TextUnavailable, UsageError
from kvcal_artifacts.files import read_text

from ..report.extras import require
from ..report.progress import progress
from . import sandbox
from .compressed_lm import language_model
from .harness import Scores, TaskOptions, check_installed, in_one_line
from .packed_share import OpenCache

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerBase

    from ..models.structure import CausalLM

NAME, DATA_SET = "humaneval", "openai/openai_humaneval"
FILES = (f"{NAME}.jsonl", "HumanEval.jsonl")  # the second is the name under which it is distributed
STOPS = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]  # as in lm-eval's task
NEW_TOKENS = 512
FENCE = "```"
INSTRUCTION = (
    f"Write a solution to the following problem and make sure that it passes the tests:\n{FENCE}python\n{{}}\n{FENCE}\n"
)
BEGINNING = f"Here is the completed function:\n{FENCE}python\n{{}}"  # of the answer, as in lm-eval's humaneval_instruct
FIELDS = ("prompt", "test", "entry_point")


def problems(options: TaskOptions) -> list[dict[str, str]]:
    """The problems: of `humaneval.jsonl` or `HumanEval.jsonl` in the folder --tasks-path where there is one, else of
    the hub's data set. Raises TextUnavailable, which names the files looked for, where that cannot be reached.
    """
    places = [] if options.tasks_path is None else [options.tasks_path / name for name in FILES]
    local = next((place for place in places if place.exists()), None)
    if local is not None:
        rows = (json.loads(line) for line in read_text(local).splitlines() if line.strip())
        return _checked(rows, local)[: options.limit]
    require("datasets", f"--task {NAME}", f"put {NAME}.jsonl into a folder and give it with --tasks-path")
    from datasets import load_dataset

    try:
        with in_one_line([NAME]):
            return _checked(load_dataset(DATA_SET, split="test"), Path(DATA_SET))[: options.limit]
    except TextUnavailable as error:
        missing = f"there is no {' or '.join(map(str, places))}" if places else f"no --tasks-path holds {FILES[0]}"
        raise TextUnavailable(
            f"--task {NAME}: {missing}, and {DATA_SET} on the hub cannot be reached; connect, or put {FILES[-1]} into "
            "a folder and give it with --tasks-path"
        ) from error


def _checked(rows: Iterable[Mapping[str, object]], source: Path) -> list[dict[str, str]]:
    """The problems' texts by FIELDS. Raises KVCalError for rows that are no objects with all of them, each text."""
    try:
        fields = [{name: row[name] for name in FIELDS} for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise KVCalError(
            f"--task {NAME}: {source}: needs a JSON object a line with {', '.join(FIELDS)}, each text; got "
            f"{type(error).__name__}: {error}"
        ) from error
    chosen = [{name: text for name, text in row.items() if isinstance(text, str)} for row in fields]
    if not chosen or chosen != fields:
        raise KVCalError(f"--task {NAME}: {source}: holds no problems, or one whose {', '.join(FIELDS)} are no text")
    return chosen


def humaneval(
    model: CausalLM, tokenizer: PreTrainedTokenizerBase, maker: OpenCache | None, options: TaskOptions
) -> Scores:
    """1 for each problem whose completed program passes its tests. With --chat the model goes on from the beginning of
    an answer in its chat template, which holds the program so far. Raises UsageError without --allow-code.
    """
    if not options.allow_code:
        raise UsageError(
            f"--task {NAME}: runs programs that a model wrote, in a sandbox: give --allow-code to allow it"
        )
    check_installed(f"--task {NAME}")
    sandbox.check()
    from lm_eval.api.instance import Instance

    chosen = problems(options)
    lm = language_model(model, tokenizer, maker, options.step, options.batch)
    settings = {"until": [*STOPS, FENCE] if options.chat else STOPS, "max_gen_toks": NEW_TOKENS, "do_sample": False}
    with in_one_line([NAME]):
        prompts = [_in_chat(lm, row["prompt"]) if options.chat else row["prompt"] for row in chosen]
    requests = [
        Instance(request_type="generate_until", doc=dict(row), arguments=(prompt, dict(settings)), idx=0)
        for row, prompt in zip(chosen, prompts, strict=True)
    ]
    answers = lm.generate_until(requests)
    scores = []
    with progress("Running programs", total=len(chosen)) as advance:
        for row, answer in zip(chosen, answers, strict=True):
            program = f"{row['prompt']}{answer}\n{row['test']}\ncheck({row['entry_point']})\n"
            scores.append(float(sandbox.passes(program)))
            advance()
    return {NAME: scores}


def _in_chat(lm: HFLM, program: str) -> str:
    """A problem in the model's chat template: the instruction, and an answer that ends with the program so far."""
    texts = {"user": INSTRUCTION.format(program), "assistant": BEGINNING.format(program)}
    messages = [{"role": role, "content": text} for role, text in texts.items()]
    return str(lm.apply_chat_template(messages, add_generation_prompt=False))
