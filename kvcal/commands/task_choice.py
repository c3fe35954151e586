"""Which tasks `kvcal eval --task` names, as far as that can be checked without torch, a model or lm-eval."""

from __future__ import annotations

from kvcal_artifacts.errors import UsageError

from ..pipeline.options import EvalOptions
from ..report.suggest import nearest
from .idle import refuse_idle

HUMANEVAL = "humaneval"
CONTEXT_NAMES = ("needle", "context-once", "agreement")  # of evaluate.contexts.CONTEXT_TASKS
KVCAL_TASKS = (*CONTEXT_NAMES, HUMANEVAL)
IDLE = ("limit", "lengths", "tasks_path", "allow_code", "chat", "needle_plot", "max_score_drop")
CODE = f"--task {HUMANEVAL}"
OF_LM_EVAL = f"tasks of lm-eval and {HUMANEVAL}"
SYNTHETIC = "tasks with synthetic contexts (needle, context-once, agreement, RULER)"
UNITS = {"k": 1024, "": 1}


def lengths_of(text: str | None) -> tuple[int, ...]:
    """ "4k,8k,1000" -> (4096, 8192, 1000), None -> (). Raises UsageError for anything else."""
    if text is not None and not _listed(text):
        raise UsageError("--lengths is empty: give whole numbers of tokens, as 4k,8192, or leave the option out")
    numbers = []
    for part in _listed((text or "").lower()):
        unit = "k" if part.endswith("k") else ""
        number = part.removesuffix(unit)
        if not number.isdecimal() or not int(number):
            raise UsageError(f"--lengths {text}: {part!r} is no length; give whole numbers of tokens, as 4k,8192")
        numbers.append(int(number) * UNITS[unit])
    return tuple(dict.fromkeys(numbers))


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def chosen_tasks(o: EvalOptions) -> list[str]:
    """The names of --task, known or not. Raises UsageError for a --task without a name, and for options that none of
    them takes.
    """
    if not all(map(_listed, o.task or [])):
        raise UsageError(f"--task is empty: give a task, as needle or {HUMANEVAL}, or leave the option out")
    names = list(dict.fromkeys(name for names in o.task or [] for name in _listed(names)))
    if not names:
        for name in IDLE:
            if o.by_name()[name] not in (None, False):
                raise UsageError(f"--{name.replace('_', '-')} applies only to --task: give one, or leave it out")
    lengths_of(o.lengths)
    if names:
        _refuse_idle_of(o, names)
    if o.needle_plot is not None and "needle" not in names:
        raise UsageError("--needle-plot draws the task `needle`: give --task needle, or leave it out")
    if o.max_score_drop is not None and set(names) <= {"agreement"}:
        raise UsageError("--max-score-drop needs a --task with a score: give another than agreement, or leave it out")
    if HUMANEVAL in names and not o.allow_code:
        raise UsageError(
            f"--task {HUMANEVAL}: runs programs that a model wrote, in a sandbox: give --allow-code to allow it"
        )
    return names


def _refuse_idle_of(o: EvalOptions, names: list[str]) -> None:
    """UsageError for an option that none of the tasks `names` takes, and for a --tasks-path that is no folder. What
    lm-eval's tasks take shows only when they are looked at (`evaluate.harness.check_names`).
    """
    typed = [name for name in IDLE if o.by_name()[name] not in (None, False)]
    of_lm_eval = any(name not in KVCAL_TASKS for name in names)
    if HUMANEVAL not in names:
        refuse_idle(typed, ("allow_code",), CODE, f"give {CODE}, or leave it out")
    if HUMANEVAL not in names and not of_lm_eval:
        refuse_idle(typed, ("tasks_path", "chat"), OF_LM_EVAL, "give one to --task, or leave it out")
    if not of_lm_eval and not any(name in CONTEXT_NAMES for name in names):
        refuse_idle(typed, ("lengths",), SYNTHETIC, "give one to --task, or leave it out")
    if o.tasks_path is not None and not o.tasks_path.is_dir():
        raise UsageError(f"--tasks-path {o.tasks_path}: no such folder; give one with task files, or leave it out")


def meant(name: str) -> str:
    """Words for an error about an unknown task: kvcal's own tasks that are nearly called so, or nothing."""
    near = nearest(name, KVCAL_TASKS)
    return f" ({' or '.join(near)}?)" if near else ""


def refuse_lengths(o: EvalOptions, names: list[str], context: int, label: str) -> None:
    """UsageError for a length of kvcal's own contexts that exceeds `context`, the model's tokens. label: of the model.

    lm-eval cuts its contexts itself.
    """
    too_long = [length for length in lengths_of(o.lengths) if length > context]
    if too_long and (task := next((name for name in names if name in CONTEXT_NAMES), None)):
        raise UsageError(
            f"--lengths {o.lengths}: a context of {task} would have {max(too_long)} tokens, {label} was made for "
            f"{context}; give at most {context}"
        )
