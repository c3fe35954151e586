"""`kvcal eval --task`: tasks answered through every cache and in full precision, on the same questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.files import read_text

from ..calibrate.checkpoint import CommandCheckpoint, short
from ..evaluate.contexts import CONTEXT_TASKS, Haystack, by_length
from ..evaluate.harness import Harness, Scores, TaskOptions, check_installed, check_names
from ..evaluate.paired import Paired
from ..evaluate.perplexity import CacheMaker
from ..evaluate.programs import NAME as HUMANEVAL
from ..evaluate.programs import humaneval
from ..pipeline.gates import Check
from ..pipeline.options import EvalOptions
from ..text import sources
from .common import Say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models.structure import CausalLM

TEXT = "embedded:evaluation"
UNITS = {"k": 1024, "": 1}
Answer = Callable[[CacheMaker | None], Scores]


def lengths_of(text: str | None) -> tuple[int, ...]:
    """ "4k,8k,1000" -> (4096, 8192, 1000). Raises UsageError for anything else."""
    numbers = []
    for part in (text or "").split(","):
        part = part.strip().lower()
        unit = "k" if part.endswith("k") else ""
        number = part.removesuffix(unit)
        if not part:
            continue
        if not number.isdecimal() or not int(number):
            raise UsageError(f"--lengths {text}: {part!r} is no length; give whole numbers of tokens, as 4k,8192")
        numbers.append(int(number) * UNITS[unit])
    return tuple(dict.fromkeys(numbers))


def task_names(o: EvalOptions) -> list[str]:
    """The names of --task. Raises UsageError for options that no task takes, before any work."""
    names = list(dict.fromkeys(part.strip() for names in o.task or [] for part in names.split(",") if part.strip()))
    if not names:
        idle = ("limit", "lengths", "tasks_path", "allow_code", "chat", "needle_plot", "max_score_drop")
        for name in idle:
            if o.by_name()[name] not in (None, False):
                raise UsageError(f"--{name.replace('_', '-')} applies only to --task: give one, or leave it out")
    lengths_of(o.lengths)
    if o.needle_plot is not None:
        from ..report.plots import check_plot

        if "needle" not in names:
            raise UsageError("--needle-plot draws the task `needle`: give --task needle, or leave it out")
        check_plot(o.needle_plot, "--needle-plot")
    if o.max_score_drop is not None and set(names) <= {"agreement"}:
        raise UsageError("--max-score-drop needs a --task with a score: give another than agreement, or leave it out")
    if HUMANEVAL in names and not o.allow_code:
        raise UsageError(
            f"--task {HUMANEVAL}: runs programs that a model wrote, in a sandbox: give --allow-code to allow it"
        )
    if any(name not in CONTEXT_TASKS for name in names):
        check_installed("--task")
    if of_lm_eval := [name for name in names if name not in CONTEXT_TASKS and name != HUMANEVAL]:
        check_names(of_lm_eval, o.tasks_path)
    return names


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
    row, `full` first, the share of needles found by needle@LENGTH/DEPTH; empty without --task needle.
    """

    tasks: dict[str, dict[str, Paired]] = field(default_factory=dict)
    needles: dict[str, dict[str, float]] = field(default_factory=dict)

    def of(self, row: str) -> dict[str, object]:
        """What a row of `kvcal eval --json` says of it."""
        paired = {name: asdict(one) for name, one in self.tasks.get(row, {}).items()}
        return ({"tasks": paired} if paired else {}) | ({"needles": self.needles[row]} if row in self.needles else {})


def run_tasks(
    o: EvalOptions,
    model: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    makers: Mapping[str, CacheMaker],
    work: CommandCheckpoint,
    say: Say,
) -> Answered:
    """Every task through every cache. What a killed run answered is not asked again."""
    names, options = task_names(o), task_options(o)
    answered = Answered({name: {} for name in makers})
    for task, answer in _answers(names, model, tokenizer, options).items():
        full: Scores = {}
        for row, maker in (("full", None), *makers.items()):
            place = f"task-{short(json.dumps([task, row, asdict(options)], default=str))}"
            scores: Scores | None = work.read(place)
            if scores is None:
                say(f"task {task}: {row}")
                scores = answer(maker)
                work.keep(place, scores)
            if task == "needle":
                answered.needles[row] = {name: fmean(cell) for name, cell in scores.items()}
            joined = by_length(scores)
            if maker is None:
                full = joined
            else:
                answered.tasks[row] |= {name: Paired.of(joined[name], full[name]) for name in full}
    return answered


def _answers(
    names: list[str], model: CausalLM, tokenizer: PreTrainedTokenizerBase, options: TaskOptions
) -> dict[str, Answer]:
    """What answers each task; lm-eval's are all loaded together, before any is run."""
    answers: dict[str, Answer] = {}
    if any(name in CONTEXT_TASKS for name in names):
        haystack = Haystack.of(tokenizer, read_text(sources.EMBEDDED[TEXT]))
    theirs = [name for name in names if name not in CONTEXT_TASKS and name != HUMANEVAL]
    harnesses = {name: Harness(model, tokenizer, [name], options) for name in theirs}
    for name in names:
        if name in CONTEXT_TASKS:
            run = CONTEXT_TASKS[name]
            answers[name] = lambda maker, run=run: run(model, haystack, maker, options)  # type: ignore[misc]
        elif name == HUMANEVAL:
            answers[name] = lambda maker: humaneval(model, tokenizer, maker, options)
        else:
            answers[name] = harnesses[name].scores
    return answers


def judged(answered: Answered, limit: float | None) -> list[Check]:
    """A gate for each row: the largest drop of a score below full precision's.

    Agreement with full precision is no such score.
    """
    checks = []
    for row, tasks in answered.tasks.items():
        drops = {name: -paired.difference for name, paired in tasks.items() if not name.startswith("agreement@")}
        if limit is None or not drops:
            continue
        worst = max(drops, key=lambda name: drops[name])
        paired = tasks[worst]
        detail = f"{worst}: {paired.score:.4g}, full precision {paired.full:.4g}, {paired.n} questions"
        checks.append(Check(row, "max-score-drop", drops[worst] <= limit, drops[worst], limit, None, detail))
    return checks
