"""`kvcal eval --task`: tasks answered through every cache and in full precision, on the same questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from statistics import fmean
from typing import TYPE_CHECKING

from kvcal_artifacts.bundle.canonical import sha256_text
from kvcal_artifacts.errors import TextError, UsageError
from kvcal_artifacts.files import read_text

from ..calibrate.checkpoint import CommandCheckpoint, short
from ..evaluate.contexts import CONTEXT_TASKS, ContextTask, Haystack, by_length, questions_per_context, refuse_short
from ..evaluate.harness import Harness, Scores, TaskOptions, check_installed, check_names, content_of
from ..evaluate.packed_share import OpenCache, PackedShare, share_of
from ..evaluate.paired import Paired
from ..evaluate.perplexity import CacheMaker
from ..evaluate.programs import humaneval, problems
from ..evaluate.ruler import Contexts
from ..models import configuration
from ..models.names import ModelSource
from ..pipeline.gates import Check
from ..pipeline.options import EvalOptions
from ..report.quantities import questions
from ..text import sources
from ..text.documents import open_documents
from ..text.rows import Picker
from ..text.sources import resolve_text
from ..text.token_stream import chat_renderer, pieces
from .common import Say
from .task_choice import CONTEXT_NAMES, HUMANEVAL, KVCAL_TASKS, chosen_tasks, lengths_of, meant, refuse_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models.structure import CausalLM

TEXT = "embedded:evaluation"
ESSAY = 2**20  # characters of a text that essays are taken from, at least
GATE = "max-score-drop"
BLIND = "full precision answered none of {questions}, so that no drop can be seen"
COUNTED = "each row to its own end"  # of `rows` in checkpoints; those of other counts are not taken up
EXACT = "nothing was packed while it was answered, so that its score is full precision's"
LONGER = "give a task of longer contexts, or a scheme with smaller windows"
OTHER_TASK = "give a task that this model can do"
Answer = Callable[[OpenCache | None], Scores]


def task_names(o: EvalOptions) -> list[str]:
    """The names of --task. Raises UsageError for unknown ones, and for options that no task takes, before any work."""
    names = chosen_tasks(o)
    if o.needle_plot is not None:
        from ..report.plots import check_plot

        check_plot(o.needle_plot, "--needle-plot")
    of_lm_eval = [name for name in names if name not in KVCAL_TASKS]
    if of_lm_eval or HUMANEVAL in names:
        check_installed("--task" + next((f" {name}{near}" for name in of_lm_eval if (near := meant(name))), ""))
    if of_lm_eval:
        lengths = o.lengths is not None and not any(name in CONTEXT_NAMES for name in names)
        check_names(of_lm_eval, o.tasks_path, meant, lengths=lengths)
    return names


@dataclass(frozen=True)
class Asked:
    """Tasks that are ready to be answered. tokenizer: of the model. harnesses: lm-eval's, by name. contents: by name, a
    hash of the data and programs that a task's scores depend on. haystack: the text of kvcal's contexts, where a task
    has such.
    """

    names: list[str]
    options: TaskOptions
    tokenizer: PreTrainedTokenizerBase
    harnesses: dict[str, Harness]
    contents: dict[str, str]
    haystack: Haystack | None


def load_tasks(
    o: EvalOptions, names: list[str], source: ModelSource, tokenizer: PreTrainedTokenizerBase, say: Say
) -> Asked:
    """The tasks with their data, before any weights are read. Raises UsageError for contexts longer than the model's
    or too short for a task, and for --chat without a chat template; KVCalError for data that cannot be had.
    """
    if o.chat and not tokenizer.chat_template:
        raise UsageError(f"--chat: the tokenizer of {source.label} has no chat template; leave --chat out")
    context = configuration.geometry(source).context
    refuse_lengths(o, names, context, source.label)
    options, haystack = task_options(o), None
    if any(name in CONTEXT_TASKS for name in names):
        haystack = Haystack.of(tokenizer, read_text(sources.EMBEDDED[TEXT]))
        refuse_short(haystack, names, options)
    contents = dict.fromkeys(names, "")
    if HUMANEVAL in names:
        contents[HUMANEVAL] = sha256_text(json.dumps([version("lm_eval"), problems(options)]))
    contexts = Contexts(o.limit, context, partial(essay_words, o, tokenizer, say), say)
    harnesses = {name: Harness(tokenizer, [name], options, contexts) for name in names if name not in KVCAL_TASKS}
    folder = "" if o.tasks_path is None or not harnesses else content_of(o.tasks_path)
    contents |= {name: harness.content + folder for name, harness in harnesses.items()}
    return Asked(names, options, tokenizer, harnesses, contents, haystack)


def essay_words(o: EvalOptions, tokenizer: PreTrainedTokenizerBase, say: Say, task: str, count: int) -> list[str]:
    """Read at least `count` words from the beginning of --text, or of the embedded text where none is given. A shorter
    text is repeated. Raises TextError for one without words.
    """
    source = resolve_text(o.text or TEXT, column=o.column if o.text else None)
    documents, label = open_documents(source, Picker(source.column, chat_renderer(tokenizer)))
    words = next(pieces(documents, max(ESSAY, 16 * count)), "").split()
    if not words:
        raise TextError(f"text {label}: has no words for the essays of {task}; give another --text")
    say(f"note: essays of {task} are {label}, instead of lm-eval's download")
    return words * -(-count // len(words))


def task_options(o: EvalOptions) -> TaskOptions:
    return TaskOptions(
        limit=o.limit,
        lengths=lengths_of(o.lengths),
        tasks_path=o.tasks_path,
        allow_code=o.allow_code,
        chat=o.chat,
        batch=o.batch or 1,
        step=o.step,
    )


@dataclass(frozen=True)
class Answered:
    """Scores of the tasks that were run. tasks: by row and task, scores next to those of full precision. needles: by
    row, `full` first, the share of needles found by needle@LENGTH/DEPTH; empty without --task needle. packed: by row
    and task, the share of tokens that lay in packed blocks when answers were there.
    """

    tasks: dict[str, dict[str, Paired]] = field(default_factory=dict)
    packed: dict[str, dict[str, float | None]] = field(default_factory=dict)
    needles: dict[str, dict[str, float]] = field(default_factory=dict)

    def of(self, row: str) -> dict[str, object]:
        """What a row of `kvcal eval --json` says of it."""
        tasks = self.tasks.get(row, {})
        paired = {name: asdict(one) | {"packed": self.packed.get(row, {}).get(name)} for name, one in tasks.items()}
        return ({"tasks": paired} if paired else {}) | ({"needles": self.needles[row]} if row in self.needles else {})


def run_tasks(
    asked: Asked,
    model: CausalLM,
    makers: Mapping[str, CacheMaker],
    work: CommandCheckpoint,
    say: Say,
) -> Answered:
    """Every task through every cache. What a killed run answered of the same content is not asked again."""
    answered = Answered({name: {} for name in makers}, packed={name: {} for name in makers})
    settings = asdict(asked.options)
    for task, answer in _answers(asked, model).items():
        full: Scores = {}
        for row, maker in (("full", None), *makers.items()):
            place = f"task-{short(json.dumps([COUNTED, task, row, settings, asked.contents[task]], default=str))}"
            recorded = work.read(place)
            if recorded is None:
                say(f"task {task}: {row}")
                share = PackedShare()
                recorded = {"scores": answer(None if maker is None else share.counting(maker)), "rows": share.rows}
                work.keep(place, recorded)
            else:
                say(f"resuming: task {task}: {row} was answered by an earlier run, in {work.folder}")
            scores = recorded["scores"]
            if task == "needle":
                answered.needles[row] = {name: fmean(cell) for name, cell in scores.items()}
            joined = by_length(scores)
            if maker is None:
                full = joined
            else:
                answered.tasks[row] |= {
                    name: Paired.of(joined[name], full[name], questions_per_context(name)) for name in full
                }
                answered.packed[row] |= {name: share_of(recorded["rows"], name) for name in full}
    return answered


def _answers(asked: Asked, model: CausalLM) -> dict[str, Answer]:
    """What answers each task."""
    answers: dict[str, Answer] = {}
    for name in asked.names:
        if name in CONTEXT_TASKS and asked.haystack is not None:
            task = CONTEXT_TASKS[name]()
            answers[name] = partial(_of_contexts, task, model, asked.haystack, asked.options)
        elif name == HUMANEVAL:
            answers[name] = lambda maker: humaneval(model, asked.tokenizer, maker, asked.options)
        else:
            answers[name] = partial(asked.harnesses[name].scores, model)
    return answers


def _of_contexts(
    task: ContextTask, model: CausalLM, haystack: Haystack, options: TaskOptions, maker: OpenCache | None
) -> Scores:
    return task(model, haystack, maker, options)


def judged(answered: Answered, limit: float | None) -> list[Check]:
    """A gate for each row: the largest drop of a score below full precision's.

    A task of which full precision's score is 0 has a failed gate, since no drop can be seen. So has one that was
    answered without a packed block. Agreement with full precision is no such score.
    """
    checks: list[Check] = []
    if limit is None:
        return checks
    for row, tasks in answered.tasks.items():
        scored = {name: paired for name, paired in tasks.items() if not name.startswith("agreement@")}
        drops = {name: -paired.difference for name, paired in scored.items() if paired.full}
        if drops:
            worst = max(drops, key=lambda name: drops[name])
            paired = scored[worst]
            detail = f"{worst}: {paired.score:.4g}, full precision {paired.full:.4g}, {questions(paired.n)}"
            checks.append(Check(row, GATE, drops[worst] <= limit, drops[worst], limit, None, detail))
        checks += [
            Check(row, GATE, False, detail=f"{name}: {BLIND.format(questions=questions(paired.n))}; {OTHER_TASK}")
            for name, paired in scored.items()
            if not paired.full
        ]
        checks += [
            Check(row, GATE, False, detail=f"{name}: {EXACT}; {LONGER}")
            for name in scored
            if answered.packed.get(row, {}).get(name) == 0
        ]
    return checks
