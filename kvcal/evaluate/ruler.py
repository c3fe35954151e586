"""RULER's contexts (Hsieh et al. 2024), made by lm-eval's generators from a fixed seed.

lm-eval draws from no seed, makes 500 contexts for each task and length, takes essays from the hub, and where its
smallest context does not fit it tries for ever. Here it makes as many as are asked for, and lengths are checked first.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcal_artifacts.errors import KVCalError, UsageError

if TYPE_CHECKING:
    from datasets import Dataset

MODULES = "lm_eval.tasks.ruler."
SEED = 1234  # of all lengths: a longer context has the same needles
DEFAULT_LENGTH = 4096  # tokens, of lm-eval
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
LEAST_FREQUENT = 27  # words of ruler_fwe among which the third answer occurs: 1 / (4**-2 / zeta(2))
LEAST_FREQUENT_LENGTH = 200  # tokens of ruler_fwe: it has a coded word for each 50, and needs four

Generator = Callable[..., Mapping[str, "Dataset"]]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Contexts:
    """How contexts are made. limit: of each length; None: as many as lm-eval makes. context: of the model, in tokens.
    essays: of a task's name and a number, at least so many words of text. say: called with lines for the user.
    """

    limit: int | None
    context: int
    essays: Callable[[str, int], list[str]]
    say: Say

    def check(self, task: str, length: int) -> None:
        """Raise UsageError for contexts longer than the model's: lm-eval would cut them."""
        if length > self.context:
            raise UsageError(
                f"--lengths: a context of {task} would have {length} tokens, the model was made for {self.context}; "
                f"give at most --lengths {self.context}"
            )

    def of(self, task: str, generate: Generator, settings: dict[str, Any]) -> dict[str, Dataset]:
        """The data set that a generator of lm-eval makes for all lengths of `settings`.

        Raises UsageError for a length that is too long for the model or too short for the task.
        """
        from datasets import concatenate_datasets

        lengths = settings.get("max_seq_lengths", [DEFAULT_LENGTH])
        for length in lengths:
            self.check(task, length)
        essay = cache(partial(self.essays, task, max(lengths)))
        parts = [self._of_length(task, generate, essay, settings | {"max_seq_lengths": [each]}) for each in lengths]
        return {split: concatenate_datasets([part[split] for part in parts]) for split in parts[0]}

    def _of_length(
        self, task: str, generate: Generator, essay: Callable[[], list[str]], settings: Mapping[str, Any]
    ) -> Mapping[str, Dataset]:
        names, [length] = generate.__globals__, settings["max_seq_lengths"]
        sampler = next((name for name in NEEDED if name in names), None)
        if sampler is None:
            raise KVCalError(f"--task {task}: this lm-eval makes RULER's contexts otherwise than lm-eval 0.4.13")
        changed: dict[str, Any] = {sampler: self._checked(task, names[sampler], NEEDED[sampler], length)}
        if "RNG" in names:
            changed["RNG"] = random.Random(SEED)
        if "get_haystack" in names:
            changed["get_haystack"] = partial(_haystack, names["get_haystack"], essay)
        of_sampler = inspect.unwrap(names[sampler]).__globals__
        sentences = {"cached_sent_tokenize": SENTENCE_END.split} if "cached_sent_tokenize" in of_sampler else {}
        with _drawn_from(SEED), _replaced(names, changed), _replaced(of_sampler, sentences):
            splits = generate(**settings)
        for rows in splits.values():
            self._check_rows(task, length, rows)
        return splits

    def _checked(self, task: str, sampler: Callable[..., Any], needed: Needed, target: int) -> Callable[..., Any]:
        """The sampler of at most `limit` contexts, which refuses lengths that would never end."""

        def sampled(*args: Any, **keywords: Any) -> Any:
            bound = inspect.signature(sampler).bind(*args, **keywords)
            bound.apply_defaults()
            arguments, names = bound.arguments, inspect.unwrap(sampler).__globals__
            if self.limit is not None:
                arguments["num_samples"] = min(arguments["num_samples"], self.limit)
            with _undone(names.get("RNG")):
                least = 0 if "qas" in arguments else needed(names, arguments)
            length = arguments["max_seq_length"]
            if least > length != target:  # the example of ruler_vt, whose length lm-eval fixes
                raise UsageError(
                    f"--task {task}: lm-eval's example may have {length} tokens, and needs {least} with this "
                    "tokenizer; give another task"
                )
            if least > length:
                raise too_short(task, length, f"needs {least} tokens with this tokenizer", least)
            return sampler(**arguments)

        return sampled

    def _check_rows(self, task: str, length: int, rows: Dataset) -> None:
        """Raise UsageError for a context without its answer; say where fewer contexts fitted than were asked for."""
        for row in rows:
            answers = row["outputs"]
            if not answers or not (task.startswith("ruler_qa") or all(answer in row["input"] for answer in answers)):
                raise too_short(task, length, "has no room for all answers", 2 * length)
        if self.limit is not None and len(rows) < self.limit:
            self.say(f"note: {task}: {len(rows)} of {self.limit} contexts fit into {length} tokens")


def is_generator(custom_dataset: object) -> bool:
    """Whether a task's data set is made by one of lm-eval's generators of RULER."""
    return callable(custom_dataset) and getattr(custom_dataset, "__module__", "").startswith(MODULES)


def _haystack(of_lm_eval: Callable[[str], Any], essay: Callable[[], list[str]], type_haystack: str) -> Any:
    return essay() if type_haystack == "essay" else of_lm_eval(type_haystack)


def too_short(task: str, length: int, why: str, least: int) -> UsageError:
    """The error for a length into which not even a task's smallest context fits; least: tokens that do."""
    return UsageError(
        f"--lengths {length}: too short for {task}, whose smallest context {why}; give at least --lengths {least}"
    )


# Tokens that a sampler needs for its first, smallest context, with what it leaves free for the answer.
Needed = Callable[[Mapping[str, Any], Mapping[str, Any]], int]


def _tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, verbose=False).input_ids)


def _niah(names: Mapping[str, Any], arguments: Mapping[str, Any]) -> int:
    kind, keys = arguments["type_haystack"], max(arguments["num_needle_k"], arguments["num_needle_q"])
    step = 500 if kind == "essay" else 5 if arguments["max_seq_length"] < 4096 else 25  # words, or sentences
    taken = ("type_haystack", "type_needle_k", "num_needle_v", "type_needle_v", "template", "num_needle_q")
    options = {name: arguments[name] for name in taken} | {"num_needle_k": keys}
    units = max(step, keys * arguments["num_needle_v"])
    drawn = [names["generate_input_output"](units, arguments["haystack"], **options) for _ in range(16)]
    return int(arguments["tokens_to_generate"]) + max(
        _tokens(arguments["TOKENIZER"], text + " ".join(answer)) for text, answer, _ in drawn
    )


def _variables(names: Mapping[str, Any], arguments: Mapping[str, Any]) -> int:
    tokenizer, example, tokens = arguments["tokenizer"], arguments["icl_example"], 0
    if example is not None:
        tokens = _tokens(tokenizer, f"{example['input']} {' '.join(example['outputs'])}\n\n")
    numbers = (arguments[name] for name in ("incremental", "num_chains", "num_hops"))
    text, answer = names["generate_input_output"](*numbers, is_icl=arguments["add_fewshot"] and example is None)
    return int(arguments["tokens_to_generate"]) + tokens + _tokens(tokenizer, f"{text} {answer}")


def _common_words(names: Mapping[str, Any], arguments: Mapping[str, Any]) -> int:
    example, text, answer = names["generate_input_output"](arguments["incremental"], arguments["max_seq_length"])
    numbered = " ".join(f"{i + 1}. {word}" for i, word in enumerate(answer))
    return int(arguments["tokens_to_generate"]) + _tokens(arguments["tokenizer"], f"{example}\n{text} {numbered}")


def _frequent_words(names: Mapping[str, Any], arguments: Mapping[str, Any]) -> int:
    """lm-eval takes words away by steps of a 32nd of the length, until the context fits."""
    tokenizer, least = arguments["tokenizer"], LEAST_FREQUENT_LENGTH

    def tokens(words: int) -> int:
        options = {"num_words": words, "coded_wordlen": arguments["coded_wordlen"], "vocab_size": least // 50}
        return _tokens(tokenizer, names["generate_input_output"](10**9, tokenizer, **options, incremental=1)[0])

    while (longer := tokens(LEAST_FREQUENT + least // 32)) > least:
        least = longer
    return least


NEEDED: dict[str, Needed] = {
    "generate_samples": _niah,
    "sys_vartrack_w_noise_random": _variables,
    "sys_word_pair_random": _common_words,
    "sys_kwext": _frequent_words,
}


@contextmanager
def _undone(*others: random.Random | None) -> Iterator[None]:
    """What is drawn within the block, from `others` too, is drawn again behind it."""
    generators = [one for one in others if one is not None]
    before = random.getstate(), np.random.get_state(), [one.getstate() for one in generators]
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        for one, state in zip(generators, before[2], strict=True):
            one.setstate(state)


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    with _undone():
        random.seed(seed)
        np.random.seed(seed)
        yield


@contextmanager
def _replaced(names: dict[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """The names of a module, with these values within the block."""
    before = {name: names[name] for name in values}
    names.update(values)
    try:
        yield
    finally:
        names.update(before)
