"""lm-eval's tasks through the compressed cache: `CacheLM` answers its requests, `TaskScore` is the objective made of
it.

Generation prefills in one call, so that only new tokens attend to compressed ones, as in the papers; likelihoods are
teacher-forced in steps, as `kvcal eval` does. lm-eval is imported where it is used (`pip install 'kvcal[tasks]'`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.checked import Json
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.scheme import Scheme

from ..models.spread import input_device
from ..report.extras import require
from ..report.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..methods.mixkvq import MixKVQ
    from ..models.structure import CausalLM

Settings = Mapping[str, Any]  # of generation, as a task's YAML has them
MAX_NEW_TOKENS = 256  # where a task does not say, as in lm-eval


def check_installed() -> None:
    """Raise UsageError where lm-eval is missing."""
    require("lm_eval", "--objective task:", "use --objective attention")


class Request(Protocol):
    """What lm-eval asks of a model: an Instance."""

    @property
    def args(self) -> tuple[Any, ...]: ...


@dataclass
class CacheCalls:
    """The three kinds of requests of lm-eval, each answered through a fresh cache; bits of all caches are added up."""

    model: CausalLM
    tokenizer: PreTrainedTokenizerBase
    scheme: Scheme
    batch: int = 1
    step: int = 32
    packed_bytes: int = field(default=0, init=False)
    packed_values: int = field(default=0, init=False)

    @property
    def bits_per_value(self) -> float | None:
        return self.packed_bytes * 8 / self.packed_values if self.packed_values else None

    @property
    def max_length(self) -> int:
        return int(self.model.config.get_text_config().max_position_embeddings)

    @contextmanager
    def _cache(self) -> Iterator[KVCalCache]:
        with KVCalCache(self.scheme, self.model) as cache:
            yield cache
            self.packed_bytes += cache.nbytes("packed")
            self.packed_values += cache.packed_values()

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[str]:
        """Generate for each request, .args = (prompt, {"until", "max_gen_toks", ...}), the text before the first of
        `until`.
        """
        prompts = [self.tokenizer(request.args[0]).input_ids for request in requests]
        order = sorted(range(len(requests)), key=lambda i: -len(prompts[i]))
        answers = [""] * len(requests)
        with progress("Generating", total=len(requests)) as advance:
            for part in _alike(order, [request.args[1] for request in requests], self.batch):
                texts = self._generate([prompts[i] for i in part], requests[part[0]].args[1])
                for i, text in zip(part, texts, strict=True):
                    answers[i] = text
                advance(len(part))
        return answers

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], settings: Settings) -> list[str]:
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        new = int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or MAX_NEW_TOKENS)
        longest = max(1, self.max_length - new)
        ids, mask = _left_padded([prompt[-longest:] for prompt in prompts], self._pad, input_device(self.model))
        sample = bool(settings.get("do_sample", False)) and float(settings.get("temperature", 0.0)) > 0
        drawn = {name: settings[name] for name in ("temperature", "top_p", "top_k") if sample and name in settings}
        with self._cache() as cache:
            out = self.model.generate(
                ids,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=new,
                do_sample=sample,
                pad_token_id=self._pad,
                **drawn,
                **({"stop_strings": stops, "tokenizer": self.tokenizer} if stops else {}),
            )
        texts = self.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        return [_before(text, stops) for text in texts]

    @property
    def _pad(self) -> int:
        return int(self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0)

    def loglikelihood(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-likelihood of each request's continuation, .args = (context, continuation), and whether greedy
        decoding gives it.
        """
        with progress("Scoring", total=len(requests)) as advance:
            answers = []
            for request in requests:
                context, continuation = self._pair(*request.args)
                answers.append(self._score(context, continuation))
                advance()
        return answers

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Spaces between the two belong to the continuation, as in lm-eval."""
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        if not bare:
            return [self._prefix], list(self.tokenizer(continuation, add_special_tokens=False).input_ids)
        first = list(self.tokenizer(bare).input_ids)
        return first, list(self.tokenizer(bare + continuation).input_ids)[len(first) :]

    @property
    def _prefix(self) -> int:
        begin = self.tokenizer.bos_token_id
        return int(self._pad if begin is None else begin)

    @torch.no_grad()
    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        ids = torch.tensor([(context + continuation)[-self.max_length - 1 :]], device=input_device(self.model))
        count, total, greedy = len(continuation), 0.0, True
        first = ids.shape[1] - 1 - count  # position whose logits give the continuation's first token
        with self._cache() as cache:
            for start in range(0, ids.shape[1] - 1, self.step):
                chunk = ids[:, start : min(start + self.step, ids.shape[1] - 1)]
                logits = self.model(input_ids=chunk, past_key_values=cache, use_cache=True).logits[0].float()
                skip = max(0, first - start)
                if skip >= chunk.shape[1]:
                    continue
                target = ids[0, start + skip + 1 : start + chunk.shape[1] + 1]
                logs = logits[skip:].log_softmax(-1)
                total += float(logs.gather(-1, target[:, None]).double().sum())
                greedy = greedy and bool((logs.argmax(-1) == target).all())
        return total, greedy

    def loglikelihood_rolling(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each request's text, .args = (text,), in windows of the model's context that follow
        each other.
        """
        answers = []
        with progress("Scoring", total=len(requests)) as advance:
            for request in requests:
                ids = list(self.tokenizer(request.args[0], add_special_tokens=False).input_ids)
                pieces = [ids[i : i + self.max_length - 1] for i in range(0, len(ids), self.max_length - 1)]
                answers.append(sum(self._score([self._prefix], piece)[0] for piece in pieces))
                advance()
        return answers


def _alike(order: list[int], settings: list[Settings], size: int) -> Iterator[list[int]]:
    """Batches of at most `size` requests that ask for the same settings."""
    waiting = list(order)
    while waiting:
        part = [i for i in waiting if settings[i] == settings[waiting[0]]][:size]
        waiting = [i for i in waiting if i not in part]
        yield part


def _left_padded(prompts: list[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    wide = max(map(len, prompts))
    ids = torch.tensor([[pad] * (wide - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (wide - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


def _before(text: str, stops: list[str]) -> str:
    for stop in stops:
        text = text.split(stop)[0] if stop else text
    return text


FEWSHOT_SEED = 1234  # lm-eval's default


class TaskScore:
    """Mean score of lm-eval tasks, and stored bits of the caches that answered them.

    tasks_path: a folder of task files next to lm-eval's. metric: METRIC or METRIC,FILTER; None: each task's first.
    limit: questions of each task. Raises KVCalError in one line for what lm-eval cannot load,
    and for a task that is named by a path: a file may import code from its folder.
    """

    label = "score"
    maximise = True

    def __init__(
        self,
        model: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        tasks: list[str],
        tasks_path: Path | None = None,
        limit: int | None = None,
        metric: str | None = None,
        batch: int = 1,
    ) -> None:
        from lm_eval.tasks import TaskManager

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self.model, self.tokenizer, self.batch = model, tokenizer, batch
        self.tasks, self.limit, self.metric = tasks, limit, metric
        with self._in_one_line():
            manager = TaskManager(include_path=None if tasks_path is None else str(tasks_path))
            names = set(manager.all_tasks)
            if strange := [task for task in tasks if task not in names]:  # lm-eval would take it for a path
                raise KVCalError(
                    f"task {','.join(tasks)}: lm-eval failed: it has no task, group or tag {strange[0]}; give "
                    "--tasks-path "
                    "FOLDER if a file in that folder has it"
                )
            self._loaded = manager.load(list(tasks))
        for task in self._loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)

    @contextmanager
    def _in_one_line(self) -> Iterator[None]:
        try:
            yield
        except KVCalError:
            raise
        except Exception as error:  # of whatever kind: task files, data sets, metrics
            message = " ".join(str(error).split())[:300]
            raise KVCalError(
                f"task {','.join(self.tasks)}: lm-eval failed: {type(error).__name__}: {message}"
            ) from error

    @property
    def record(self) -> dict[str, Json]:
        from importlib.metadata import version

        settings = {"tasks": self.tasks, "limit": self.limit, "metric": self.metric}
        return {"name": "task", **settings, "lm_eval": version("lm_eval")}

    def score(self, scheme: Scheme) -> tuple[float, float | None]:
        """Mean score, and stored bits per value (None if nothing was packed)."""
        from lm_eval.api.model import LM
        from lm_eval.evaluator import evaluate

        kind = type("CacheLM", (CacheCalls, LM), {"__init__": _both})
        answering = kind(self.model, self.tokenizer, scheme, self.batch)
        with self._in_one_line():
            results = evaluate(
                lm=answering,
                task_dict=self._loaded,
                limit=self.limit,
                bootstrap_iters=0,
                log_samples=False,
                verbosity="ERROR",
            )
        scores = [pick(results, task, self.metric) for task in self.tasks]
        return sum(scores) / len(scores), answering.bits_per_value

    def __call__(self, method: MixKVQ) -> tuple[float, float]:
        value, bits = self.score(method.scheme(self.model))
        if bits is None:
            w = method.windows
            raise UsageError(
                f"task {','.join(self.tasks)}: no request is longer than the {w.sink + w.recent + w.block} tokens of "
                "sink, "
                "recent and block, so nothing was packed; use smaller windows or another task"
            )
        return value, bits


def _both(self: CacheCalls, model: CausalLM, tokenizer: PreTrainedTokenizerBase, scheme: Scheme, batch: int) -> None:
    from lm_eval.api.model import LM

    LM.__init__(self)
    CacheCalls.__init__(self, model, tokenizer, scheme, batch)


def pick(results: Mapping[str, Any], task: str, metric: str | None) -> float:
    """A task's score by METRIC or METRIC,FILTER, else its first, from what lm-eval reports; higher must be better."""
    rows = {
        name: value
        for name, value in results["results"].get(task, {}).items()
        if "," in name and "_stderr" not in name and isinstance(value, (int, float))
    }
    fitting = [name for name in rows if metric is None or name == metric or name.split(",")[0] == metric]
    if not fitting:
        raise UsageError(f"--metric {metric}: task {task} reports {', '.join(rows) or 'nothing'}")
    name = fitting[0].split(",")[0]
    if results.get("higher_is_better", {}).get(task, {}).get(name) is False:
        raise UsageError(f"task {task}: {name} is better when lower; give a --metric of which more is better")
    return float(rows[fitting[0]])
