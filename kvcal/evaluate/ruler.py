"""RULER's contexts (Hsieh et al. 2024), made by lm-eval's generators from a fixed seed.

lm-eval draws from no seed, and makes 500 contexts for each task and length. Here it makes as many as are asked for.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcal_artifacts.errors import KVCalError, UsageError

if TYPE_CHECKING:
    from datasets import Dataset

MODULES = "lm_eval.tasks.ruler."
SEED = 1234  # of all lengths: a longer context has the same needles
DEFAULT_LENGTH = 4096  # tokens, of lm-eval

Generator = Callable[..., Mapping[str, "Dataset"]]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Contexts:
    """How contexts are made. limit: of each length; None: as many as lm-eval makes. context: of the model, in tokens.
    say: called with lines for the user.
    """

    limit: int | None
    context: int
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

        Raises UsageError for a length that is too long for the model.
        """
        from datasets import concatenate_datasets

        lengths = settings.get("max_seq_lengths", [DEFAULT_LENGTH])
        for length in lengths:
            self.check(task, length)
        parts = [self._of_length(task, generate, settings | {"max_seq_lengths": [each]}) for each in lengths]
        return {split: concatenate_datasets([part[split] for part in parts]) for split in parts[0]}

    def _of_length(self, task: str, generate: Generator, settings: Mapping[str, Any]) -> Mapping[str, Dataset]:
        names, [length] = generate.__globals__, settings["max_seq_lengths"]
        sampler = next((name for name in SAMPLERS if name in names), None)
        if sampler is None:
            raise KVCalError(f"--task {task}: this lm-eval makes RULER's contexts otherwise than lm-eval 0.4.13")
        changed: dict[str, Any] = {sampler: self._limited(names[sampler])}
        if "RNG" in names:
            changed["RNG"] = random.Random(SEED)
        with _drawn_from(SEED), _replaced(names, changed):
            splits = generate(**settings)
        for rows in splits.values():
            self._check_rows(task, length, rows)
        return splits

    def _limited(self, sampler: Callable[..., Any]) -> Callable[..., Any]:
        """The sampler of at most `limit` contexts."""

        def sampled(*args: Any, **keywords: Any) -> Any:
            bound = inspect.signature(sampler).bind(*args, **keywords)
            bound.apply_defaults()
            if self.limit is not None:
                bound.arguments["num_samples"] = min(bound.arguments["num_samples"], self.limit)
            return sampler(**bound.arguments)

        return sampled

    def _check_rows(self, task: str, length: int, rows: Dataset) -> None:
        """Say where fewer contexts fitted than were asked for."""
        if self.limit is not None and len(rows) < self.limit:
            self.say(f"note: {task}: {len(rows)} of {self.limit} contexts fit into {length} tokens")


def is_generator(custom_dataset: object) -> bool:
    """Whether a task's data set is made by one of lm-eval's generators of RULER."""
    return callable(custom_dataset) and getattr(custom_dataset, "__module__", "").startswith(MODULES)


SAMPLERS = ("generate_samples", "sys_vartrack_w_noise_random", "sys_word_pair_random", "sys_kwext")


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
