"""Tasks of our own on embedded text, offline and for any model: needles, one context for several questions, agreement.

A needle is a sentence with a random number that is put into a text; a question behind the text asks for the number. All
draws come from a seed, so that full precision and every cache answer the same questions.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache

from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.errors import UsageError

from ..models.spread import input_device
from ..report.progress import progress
from .harness import Scores, TaskOptions
from .packed_share import OpenCache

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedTokenizerBase

    from ..models.structure import CausalLM

AnyCache = TypeVar("AnyCache", bound="Cache")

NEEDLE = " The secret number of {city} is {number}. "
QUESTION = "\n\nQuestion: What is the secret number of {city}?\nAnswer: The secret number of {city} is"
CITIES = ("Lisbon", "Oslo", "Kyoto", "Lima", "Cairo", "Quito", "Perth", "Riga", "Accra", "Hanoi")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (512, 1024)  # tokens of a context, where --lengths says nothing
REPEATS = 2  # questions a depth and length, where --limit says nothing
QUESTIONS = 5  # about one context
NEW_TOKENS, AGREEMENT_TOKENS = 12, 64
SEED = 0


@dataclass(frozen=True)
class Haystack:
    """Token ids of a text, from which contexts are cut; and the tokenizer they are of."""

    tokenizer: PreTrainedTokenizerBase
    ids: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, text: str) -> Haystack:
        return cls(tokenizer, list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids))

    def context(self, length: int, needles: list[tuple[float, str]], start: int) -> list[int]:
        """Exactly `length` tokens of the text from token `start` on, repeated if need be, with sentences in them at
        these depths (0 to 1).
        """
        pieces = sorted((depth, self._tokens(text)) for depth, text in needles)
        body = length - sum(len(tokens) for _, tokens in pieces)
        if body < 0:
            raise UsageError(f"--lengths {length}: too short for the needles; give at least {length - body}")
        stream = [self.ids[(start + i) % len(self.ids)] for i in range(body)]
        for depth, tokens in reversed(pieces):
            place = round(depth * body)
            stream[place:place] = tokens
        return stream

    def needed(self, drawn: Drawn) -> int:
        """How many tokens the needles of a context have."""
        return sum(len(self._tokens(sentence)) for _, sentence in drawn.needles)

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def question(self, city: str) -> list[int]:
        return self._tokens(QUESTION.format(city=city))

    @property
    def head(self) -> list[int]:
        """The token that a text begins with, where the tokenizer has one."""
        begin = self.tokenizer.bos_token_id
        return [] if begin is None else [int(begin)]


@dataclass(frozen=True)
class Drawn:
    """A context with needles before it is cut. label: the name that its scores have. length: tokens. cities, numbers:
    of the needles, in order. depths: of each, 0 to 1. start: the text's token that the context begins with.
    """

    label: str
    length: int
    cities: list[str]
    numbers: list[str]
    depths: list[float]
    start: int

    @property
    def needles(self) -> list[tuple[float, str]]:
        facts = zip(self.depths, self.cities, self.numbers, strict=True)
        return [(depth, NEEDLE.format(city=city, number=number)) for depth, city, number in facts]

    def cut(self, haystack: Haystack) -> list[int]:
        """The context's token ids."""
        return haystack.head + haystack.context(self.length, self.needles, self.start)


def _of_needle(haystack: Haystack, options: TaskOptions) -> Iterator[Drawn]:
    for length in options.lengths or LENGTHS:
        for depth in DEPTHS:
            draw = random.Random(f"{SEED}/{length}/{depth}")
            for _ in range(options.limit or REPEATS):
                city, number = draw.choice(CITIES), str(draw.randrange(10**4, 10**5))
                start = draw.randrange(len(haystack.ids))
                yield Drawn(f"needle@{length}/{depth:g}", length, [city], [number], [depth], start)


def _of_context_once(haystack: Haystack, options: TaskOptions) -> Iterator[Drawn]:
    depths = [(i + 0.5) / QUESTIONS for i in range(QUESTIONS)]
    for length in options.lengths or LENGTHS:
        draw = random.Random(f"{SEED}/once/{length}")
        for _ in range(options.limit or REPEATS):
            cities = draw.sample(CITIES, QUESTIONS)
            numbers = [str(draw.randrange(10**4, 10**5)) for _ in cities]
            start = draw.randrange(len(haystack.ids))
            yield Drawn(f"context-once@{length}", length, cities, numbers, depths, start)


WITH_NEEDLES = {"needle": _of_needle, "context-once": _of_context_once}


def refuse_short(haystack: Haystack, names: Collection[str], options: TaskOptions) -> None:
    """Raise UsageError for a length into which the needles of one of the tasks `names` do not fit, before any work."""
    for name, drawn in WITH_NEEDLES.items():
        for length in (options.lengths or LENGTHS) if name in names else ():
            least = length
            while (needed := max(map(haystack.needed, drawn(haystack, replace(options, lengths=(least,)))))) > least:
                least = needed  # which is asked again: another length has other needles
            if least > length:
                raise UsageError(f"--lengths {length}: too short for the needles of {name}; give at least {least}")


def needle(model: CausalLM, haystack: Haystack, maker: OpenCache | None, options: TaskOptions) -> Scores:
    """1 for each needle found, by length and depth, as needle@1024/0.25 (`by_length` joins the depths); `--limit`
    questions of each.
    """
    drawn, scores = list(_of_needle(haystack, options)), Scores()
    with progress("Needles", total=len(drawn)) as advance:
        for one in drawn:
            [city], [number] = one.cities, one.numbers
            prompt = one.cut(haystack) + haystack.question(city)
            with _cache(model, maker, one.length) as cache:
                answer = _answer(model, haystack.tokenizer, prompt, cache)
            scores.setdefault(one.label, []).append(float(number in answer))
            advance()
    return scores


def by_length(scores: Scores) -> Scores:
    """Scores with all depths of needles at one length together."""
    joined: Scores = {}
    for name, numbers in scores.items():
        label = name.partition("/")[0] if name.startswith("needle@") else name
        joined[label] = joined.get(label, []) + numbers
    return joined


def context_once(model: CausalLM, haystack: Haystack, maker: OpenCache | None, options: TaskOptions) -> Scores:
    """A context with several needles is compressed once; each question is asked of a copy of that cache. Scored as
    context-once@1024; `--limit` contexts of each length.
    """
    drawn, scores = list(_of_context_once(haystack, options)), Scores()
    with progress("Context once", total=len(drawn)) as advance:
        for one in drawn:
            scores.setdefault(one.label, []).extend(_asked(model, haystack, one, maker))
            advance()
    return scores


@torch.no_grad()
def _asked(model: CausalLM, haystack: Haystack, drawn: Drawn, maker: OpenCache | None) -> Iterator[float]:
    context = drawn.cut(haystack)
    with _cache(model, maker, drawn.length, copied=True) as filled:
        ids = torch.tensor([context], device=input_device(model))
        model(input_ids=ids, past_key_values=filled, use_cache=True, logits_to_keep=1)
        for city, number in zip(drawn.cities, drawn.numbers, strict=True):
            with _closing(copy.deepcopy(filled)) as cache:
                answer = _answer(model, haystack.tokenizer, context + haystack.question(city), cache)
            yield float(number in answer)


def questions_per_context(name: str) -> int:
    """How many questions of a task are about one context, of the name that its scores have."""
    return QUESTIONS if name.startswith("context-once@") else 1


@dataclass(frozen=True)
class Agreement:
    """How long greedy decoding says what full precision says: the share of AGREEMENT_TOKENS tokens before the first
    other one. An object is of one model, and decodes each context in full precision once, for all caches.
    """

    _exact: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # by prompt

    def __call__(self, model: CausalLM, haystack: Haystack, maker: OpenCache | None, options: TaskOptions) -> Scores:
        """Contexts have each length, as agreement@1024, `--limit` of each. maker: None: 1 for each, and nothing is
        decoded.
        """
        lengths, repeats = options.lengths or LENGTHS, options.limit or REPEATS
        if maker is None:
            return {f"agreement@{length}": [1.0] * repeats for length in lengths}
        scores: Scores = {}
        with progress("Agreement", total=len(lengths) * repeats) as advance:
            for length in lengths:
                draw = random.Random(f"{SEED}/agreement/{length}")
                answered = scores.setdefault(f"agreement@{length}", [])
                for _ in range(repeats):
                    prompt = haystack.head + haystack.context(length, [], draw.randrange(len(haystack.ids)))
                    exact = self._continued(model, prompt)
                    with maker(length) as cache:
                        answered.append(agreed(exact, _decoded(model, prompt, cache, AGREEMENT_TOKENS)))
                    advance()
        return scores

    def _continued(self, model: CausalLM, prompt: list[int]) -> Tensor:
        """Full precision's continuation."""
        key = tuple(prompt)
        if key not in self._exact:
            self._exact[key] = _decoded(model, prompt, DynamicCache(config=model.config), AGREEMENT_TOKENS)
        return self._exact[key]


def agreed(exact: Tensor, other: Tensor) -> float:
    """The share of tokens before the first that differs; the shorter of both ends there."""
    length = min(len(exact), len(other))
    differs = (exact[:length] != other[:length]).nonzero()
    same = int(differs[0]) if len(differs) else length
    return same / max(len(exact), len(other))


ContextTask = Callable[["CausalLM", Haystack, OpenCache | None, TaskOptions], Scores]
CONTEXT_TASKS: dict[str, Callable[[], ContextTask]] = {  # by name, what makes the task for one model
    "needle": lambda: needle,
    "context-once": lambda: context_once,
    "agreement": Agreement,
}


@torch.no_grad()
def _decoded(model: CausalLM, prompt: list[int], cache: Cache, tokens: int) -> Tensor:
    """The greedy continuation of a prompt, whose first tokens may be in the cache already."""
    ids = torch.tensor([prompt], device=input_device(model))
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :]


def _answer(model: CausalLM, tokenizer: PreTrainedTokenizerBase, prompt: list[int], cache: Cache) -> str:
    return str(tokenizer.decode(_decoded(model, prompt, cache, NEW_TOKENS), skip_special_tokens=True))


@contextmanager
def _closing(cache: AnyCache) -> Iterator[AnyCache]:
    """Closes a cache of ours behind the block; Transformers' cache has nothing to close."""
    try:
        yield cache
    finally:
        if isinstance(cache, KVCalCache):
            cache.close()


def _cache(
    model: CausalLM, maker: OpenCache | None, length: int, copied: bool = False
) -> AbstractContextManager[Cache]:
    return nullcontext(DynamicCache(config=model.config)) if maker is None else maker(length, copied)
