"""lm-eval's tasks through a compressed cache, by a subclass of lm-eval's Hugging Face model class.

Chat templates, batches, truncation, stop strings and seeds are lm-eval's. Only the model's calls differ: generation
prefills in one call and decodes through the cache; likelihoods are teacher-forced in the calls of `kvcal eval`. lm-eval
is imported where it is used (`pip install 'kvcal[tasks]'`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcal_artifacts.errors import KVCalError, TextUnavailable, UsageError

from .compressed_lm import language_model
from .packed_share import OpenCache
from .ruler import Contexts, Generator, is_generator

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerBase

    from ..models.structure import CausalLM

MAKER = "custom_dataset"  # in a task's file: the function that makes its questions, which --lengths is given to
SEED = 1234  # of few-shot examples, lm-eval's default
LARGEST = 64 * 2**20  # bytes of a file next to task files whose content is read for a hash
Scores = dict[str, list[float]]  # by name of a task, question by question


def check_installed(option: str) -> None:
    """Raise UsageError where lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(f"{option}: needs lm-eval, which is not installed: pip install 'kvcal[tasks]'")


def check_names(
    names: Sequence[str], tasks_path: Path | None, meant: Callable[[str], str], *, lengths: bool = False
) -> None:
    """Raise UsageError for a task that lm-eval does not know; without a model or tokenizer, in some seconds. meant: of
    a name, the words that tell of a likely one. lengths: whether --lengths is given for these tasks alone; UsageError
    where none makes its contexts by itself.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if tasks_path is None else str(tasks_path))
    _check_task_names(names, manager, meant)
    if lengths and all(_reads_its_questions(manager.task_index[name].cfg or {}) for name in names):
        raise UsageError(
            f"--lengths applies only to tasks with synthetic contexts, and --task {','.join(names)} reads its own: "
            "give one of RULER, say, or leave it out"
        )


def _reads_its_questions(config: Mapping[str, object]) -> bool:
    """Whether a task's file says that its questions are data. Groups, tags and tasks in Python do not show it."""
    return isinstance(config.get("task"), str) and not {"group", "class", MAKER} & config.keys()


def _check_task_names(names: Sequence[str], manager: TaskManager, meant: Callable[[str], str] = lambda _: "") -> None:
    if strange := [name for name in names if name not in set(manager.all_tasks)]:
        raise UsageError(  # lm-eval would take it for a path
            f"--task {strange[0]}{meant(strange[0])}: lm-eval has no task, group or tag of this name; give "
            "--tasks-path FOLDER if a file in that folder has it"
        )


@dataclass(frozen=True)
class TaskOptions:
    """How tasks are run. limit: questions of each task, and of each length. lengths: of synthetic contexts, in tokens.
    tasks_path: a folder of task files next to lm-eval's, whose Python lm-eval runs. allow_code: whether generated
    programs may run (in a sandbox). chat: whether prompts are put into the tokenizer's chat template.
    """

    limit: int | None = None
    lengths: tuple[int, ...] = ()
    tasks_path: Path | None = None
    allow_code: bool = False
    chat: bool = False
    batch: int = 1
    step: int = 32


@dataclass
class Harness:
    """lm-eval's tasks of these names, with their data, for one tokenizer. Raises UsageError for what lm-eval does not
    know, and KVCalError in one line for what it cannot load.
    """

    tokenizer: PreTrainedTokenizerBase
    names: Sequence[str]
    options: TaskOptions
    contexts: Contexts
    _loaded: Any = field(init=False)

    def __post_init__(self) -> None:
        from lm_eval.tasks import TaskManager

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        with in_one_line(self.names), tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)  # generators of synthetic contexts open it by a path
            metadata: dict[str, object] = {"tokenizer": folder}
            if self.options.lengths:
                metadata["max_seq_lengths"] = list(self.options.lengths)
            path = self.options.tasks_path
            manager = TaskManager(include_path=None if path is None else str(path), metadata=metadata)
            _check_task_names(self.names, manager)
            with _contexts_by(self._contexts_of):
                self._loaded = manager.load(list(self.names))
        for task in self._loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=SEED)
        self._check_code()

    def _contexts_of(self, task: str, generate: Generator, settings: dict[str, Any]) -> Mapping[str, Any]:
        if is_generator(generate):
            return self.contexts.of(task, generate, settings)
        for length in self.options.lengths:
            self.contexts.check(task, length)
        return generate(**settings)

    def _asked(self, task: Task) -> Sequence[int]:
        """The numbers of the documents that are asked: the first `limit`, or of generated contexts so many of each
        length.
        """
        documents, limit = task.eval_docs, self.options.limit
        numbers = range(len(documents))
        if limit is None:
            return numbers
        if "max_length" not in (getattr(documents, "column_names", None) or ()):
            return numbers[:limit]
        lengths = documents["max_length"]
        by_length = ([i for i in numbers if lengths[i] == length] for length in dict.fromkeys(lengths))
        return sorted(itertools.chain.from_iterable(one[:limit] for one in by_length))

    def _check_code(self) -> None:
        unsafe = [name for name, task in self._loaded["tasks"].items() if task.get_config("unsafe_code")]
        if unsafe:
            raise UsageError(
                f"--task {unsafe[0]}: lm-eval runs the generated programs unprotected; `humaneval` of kvcal runs them "
                "in a sandbox (--allow-code)"
            )

    @property
    def content(self) -> str:
        """A hash of lm-eval's version and of all documents that are asked of, or are examples."""
        read = hashlib.sha256(version("lm_eval").encode())
        for name, task in sorted(self._loaded["tasks"].items()):
            examples = task.fewshot_docs() if task.get_config("num_fewshot") else []
            documents = task.eval_docs
            asked = (documents[number] for number in self._asked(task))
            for document in itertools.chain([name], asked, examples):
                read.update(json.dumps(document, sort_keys=True, default=lambda one: type(one).__name__).encode())
        return read.hexdigest()

    def scores(self, model: CausalLM, maker: OpenCache | None) -> Scores:
        """Score of each question, by the name of its task; synthetic contexts of several lengths are tasks of their
        own, as NAME@4096. maker: of the caches that answer; None: the model's cache.
        """
        from lm_eval.evaluator import evaluate

        lm = language_model(model, self.tokenizer, maker, self.options.step, self.options.batch)
        with in_one_line(self.names):
            results = evaluate(
                lm=lm,
                task_dict=self._loaded,
                samples={name: self._asked(task) for name, task in self._loaded["tasks"].items()},
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=self.options.chat,
            )
        return {
            label: numbers
            for name, samples in results["samples"].items()
            for label, numbers in by_question(name, samples, results["higher_is_better"].get(name, {})).items()
        }


def content_of(folder: Path) -> str:
    """A hash of the files of a folder of tasks: of their names and bytes; of a file above LARGEST of its size and time
    in place of bytes. Hidden folders and Python's caches are left out.
    """
    read = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") or part == "__pycache__" for part in name.parts) or not path.is_file():
            continue
        status = path.stat()
        content = path.read_bytes() if status.st_size <= LARGEST else f"{status.st_size} {status.st_mtime_ns}".encode()
        read.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return read.hexdigest()


def by_question(name: str, samples: Sequence[Mapping[str, Any]], higher: Mapping[str, object]) -> Scores:
    """Scores of one task's questions, from what lm-eval logs of them: those of its first metric of which more is
    better, by the first filter. Metrics that are named for lengths give scores each, as NAME@LENGTH.

    Raises UsageError where no metric is a number a question of which more is better.
    """
    chosen = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    ordered = sorted(chosen, key=lambda sample: sample["doc_id"])
    metrics = list(dict.fromkeys(metric for sample in ordered for metric in sample["metrics"]))
    if all(metric.isdigit() for metric in metrics):
        by_length = {metric: [float(s[metric]) for s in ordered if s.get(metric, -1) != -1] for metric in metrics}
        return {f"{name}@{length}": scores for length, scores in by_length.items() if scores}
    for metric in metrics:
        numbers = [sample[metric] for sample in ordered]
        if higher.get(metric) is not False and all(isinstance(x, (int, float)) for x in numbers):
            return {name: [float(x) for x in numbers]}
    raise UsageError(f"--task {name}: reports {', '.join(metrics) or 'nothing'}, and no number a question to pair")


@contextmanager
def _contexts_by(make: Callable[[str, Generator, dict[str, Any]], Mapping[str, Any]]) -> Iterator[None]:
    """Let tasks of lm-eval that make their documents take them from `make` within the block. It is called with a task's
    name, the function that lm-eval would call, and its settings.
    """
    from lm_eval.api.task import ConfigurableTask

    download = ConfigurableTask.download

    def downloaded(task: Any, dataset_kwargs: dict[str, Any] | None = None, **others: Any) -> None:
        config = task.config
        if callable(config.custom_dataset):
            settings = {**(config.metadata or {}), **(config.dataset_kwargs or {})}
            task.dataset = make(config.task, config.custom_dataset, settings)
        else:
            download(task, dataset_kwargs, **others)

    ConfigurableTask.download = downloaded
    try:
        yield
    finally:
        ConfigurableTask.download = download


@contextmanager
def in_one_line(names: Sequence[str]) -> Iterator[None]:
    """What lm-eval raises within the block, of whatever kind, as a KVCalError of one line; what it prints to stderr."""
    try:
        with redirect_stdout(sys.stderr):  # generators of contexts print how far they are, into --json
            yield
    except KVCalError:
        raise
    except Exception as error:  # task files, data sets, metrics
        if isinstance(error, ConnectionError):  # the hub's client is offline, or the data set's address is not reached
            raise TextUnavailable(
                f"--task {','.join(names)}: its data are on the hub, which cannot be reached; connect, or give a "
                "task of your own that reads local data, in --tasks-path FOLDER"
            ) from error
        message = " ".join(str(error).split())[:300]
        raise KVCalError(f"--task {','.join(names)}: lm-eval failed: {type(error).__name__}: {message}") from error
