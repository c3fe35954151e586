"""Conformance of a KV-cache backend of vLLM's that lives outside of vLLM: kvcal's or any other.

Where answers must not depend on how vLLM schedules them, they are compared token for token. The suite runs stock vLLM,
too, and tells how far the backend's answers are from its.

    python -m kvcal_vllm.testing --model FOLDER --options '{"attention_config": {"backend": "CUSTOM"}}'

prints a line for each check and ends with code 1 where one fails, and with 2 where an engine does not start. With
pytest, inherit from `Conformance`:

    class TestMine(Conformance):
        model = "my-model"
        options = {"attention_config": {"backend": "CUSTOM"}}

Engines run in this process, one at a time (`engine`), and cost some seconds each: checks share three and stock vLLM's.
For stock vLLM's the suite puts vLLM's own attention backends back, whatever packages have registered instead of them.
On a CPU vLLM takes the backend that is registered as CPU_ATTN: register yours as that, too. If it is vLLM's own until
something asks for it, let it say so by a class method, `stands_aside() -> bool`. kvcal leaves names that are taken
alone; `VLLM_PLUGINS=NAME` loads only your package's plug-in.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from kvcal_artifacts.errors import KVCalError, UsageError

TEXT = (
    "The first bridge over the river was of wood, and the flood of the next spring carried it away. The second "
    "was of stone, with seven arches, and it stood for two hundred years. Carts crossed it on market days, "
    "soldiers crossed it in both directions, and once, in a hard winter, a bear crossed it at night and was seen "
    "by the miller's daughter. When the railway came, the engineers measured the old arches and found that no two"
    " of them were alike. They wrote that the builders must have worked without a plan. The people of the town "
    "answered that the builders had worked without a ruler, which was another matter, and that the bridge had not"
    " minded. The third bridge is of iron. It was opened by a minister who arrived late and left early, and whose"
    " speech, according to the newspaper, was mostly about the second bridge. "
)
NEW = 24  # tokens of an answer
SPANS = ((0, 150), (40, 33), (20, 97), (90, 7), (60, 100))  # of the text's tokens: first, count; twice over where short
MEMORY = 64 << 20  # bytes of a cache, unless options say otherwise
LENGTH = 512  # tokens of a request, at most

_RUNNING: list[Any] = []


def stop() -> None:
    """End the engine in this process: vLLM's groups of processes are global, and a second engine needs its own."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    while _RUNNING:
        _RUNNING.pop().llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def usual_dtype() -> str:
    """float32 on a CPU, where answers part by ties the least; elsewhere the model's ("auto"), as backends for GPUs,
    kvcal's among them, take 16 bits only.
    """
    from vllm.platforms import current_platform

    return "float32" if current_platform.is_cpu() else "auto"


def engine(model: str, **options: Any) -> Any:
    """A `vllm.LLM` in this process, small and eager unless the options say otherwise; it ends the one before."""
    from vllm import LLM

    stop()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    small = {"max_model_len": LENGTH, "max_num_seqs": 8, "kv_cache_memory_bytes": MEMORY, "enforce_eager": True}
    _RUNNING.append(LLM(model, **small | options))
    return _RUNNING[-1]


def outputs(llm: Any, prompts: Sequence[Sequence[int]], count: int = NEW, **more: Any) -> list[Any]:
    """vLLM's greedy answers to prompts that come together, `count` tokens each."""
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
    sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, **more)
    return list(llm.generate(asked, sampling, use_tqdm=False))


def answers(llm: Any, prompts: Sequence[Sequence[int]], count: int = NEW) -> list[list[int]]:
    """The tokens of `outputs`."""
    return [list(out.outputs[0].token_ids) for out in outputs(llm, prompts, count)]


def capacity(llm: Any) -> int:
    """How many tokens the cache of an engine holds."""
    config = llm.llm_engine.vllm_config.cache_config
    return int(config.num_gpu_blocks) * int(config.block_size)


@contextmanager
def preemptions() -> Iterator[list[str]]:
    """The requests that vLLM's scheduler preempts meanwhile, in this process."""
    from vllm.v1.core.sched.scheduler import Scheduler

    stock, requests = Scheduler._preempt_request, list[str]()

    def preempt(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        requests.append(request.request_id)
        return stock(scheduler, request, *args, **kwargs)

    Scheduler._preempt_request = preempt
    try:
        yield requests
    finally:
        Scheduler._preempt_request = stock


@contextmanager
def stock_backends() -> Iterator[None]:
    """vLLM's own attention backends meanwhile, in this process: what packages registered instead is put aside."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.attention.selector import _cached_get_attn_backend

    load_general_plugins()  # an engine would load them later, and register their backends again
    paths = {member: member.get_path() for member in AttentionBackendEnum if member.is_overridden()}
    for member in paths:
        member.clear_override()
    _cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        for member, path in paths.items():
            register_backend(member, path)
        _cached_get_attn_backend.cache_clear()


def foreign_attention(llm: Any) -> list[str]:
    """The classes, from outside of vLLM, of the attention of an engine's layers: backends, and what computes. A backend
    that says by `stands_aside()` that it is vLLM's own in this engine, as kvcal's where no bundle is named, counts as
    vLLM's.
    """
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    layers = [layer for layer in context.values() if hasattr(layer, "impl")]
    kinds = {type(layer.impl) for layer in layers}
    backends = {layer.get_attn_backend() for layer in layers}
    kinds |= {kind for kind in backends if not (hasattr(kind, "stands_aside") and kind.stands_aside())}
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    return sorted(name for name in names if not name.startswith("vllm."))


@dataclass(frozen=True)
class Measured:
    """An engine: tokens that its cache holds, the log-probability of each token of a text, and answers to prompts that
    come one by one, together, and one by one again.
    """

    capacity: int
    logprobs: list[float]
    single: list[list[int]] = field(default_factory=list)
    together: list[list[int]] = field(default_factory=list)
    again: list[list[int]] = field(default_factory=list)


class Suite:
    """The checks of one backend. model: a folder or a name; options: of `vllm.LLM`, with what selects the backend;
    dtype: of the model; None for that of the options, or `usual_dtype()`. Engines of stock vLLM have none of the
    options, except for dtype and the cache's memory, kv_cache_memory_bytes. Raises UsageError for options that name
    the model, or another dtype than `dtype`.

    nats: how far the log-probabilities of a text's tokens may be from stock vLLM's, on average. least_capacity: how
    many times stock vLLM's tokens the cache must hold in the same memory.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        dtype: str | None = None,
        nats: float = 0.5,
        least_capacity: float = 1.0,
    ) -> None:
        self.model, self.options = model, dict(options)
        self.dtype = _dtype(self.options, dtype) or usual_dtype()
        self.nats, self.least_capacity = nats, least_capacity
        self._chunked: Any = None

    def _engine(self, **options: Any) -> Any:
        llm = engine(self.model, dtype=self.dtype, **self.options | options)
        if not foreign_attention(llm):
            raise UsageError(
                f"options {json.dumps(self.options, default=str)} select no backend: the engine's attention is vLLM's "
                f"own, and would be compared with itself; {self._advice()}"
            )
        return llm

    def _advice(self) -> str:
        """What selects a backend, where the options did not."""
        if {"attention_config", "attention_backend"} & self.options.keys():
            return "on a CPU vLLM takes the backend that is registered as CPU_ATTN: register yours as that, too"
        return 'give those of your backend, such as {"attention_config": {"backend": "CUSTOM"}}'

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Token ids of parts of a text, of many lengths, none a multiple of a page."""
        from vllm.tokenizers import get_tokenizer

        ids = get_tokenizer(self.model).encode(TEXT * 2)
        return [list(ids[first : first + count]) for first, count in SPANS]

    @cached_property
    def stock(self) -> Measured:
        """Stock vLLM, whose answers count for nothing. Raises UsageError where its attention is not vLLM's own."""
        memory = {name: size for name, size in self.options.items() if name == "kv_cache_memory_bytes"}
        with stock_backends():
            llm = engine(self.model, dtype=self.dtype, **memory)
        if names := foreign_attention(llm):
            raise UsageError(
                f"stock vLLM: its attention is {names[0]}, which is not vLLM's, so there is nothing to compare with; "
                "run the suite where no package replaces classes of vLLM"
            )
        return Measured(capacity(llm), _text_logprobs(llm, self.prompts[0]))

    @cached_property
    def alone(self) -> Measured:
        """The backend without a cache of prefixes: prompts one by one, together, and one by one again."""
        llm = self._engine(enable_prefix_caching=False)
        single = [answers(llm, [ids])[0] for ids in self.prompts]
        together, again = answers(llm, self.prompts), [answers(llm, [ids])[0] for ids in self.prompts]
        return Measured(capacity(llm), _text_logprobs(llm, self.prompts[0]), single, together, again)

    def _small_steps(self) -> Any:
        """An engine of small steps that caches prefixes: the running one if it is that."""
        if _RUNNING[-1:] != [self._chunked]:
            self._chunked = self._engine(max_num_batched_tokens=64)
        return self._chunked

    def check_capacity(self) -> str:
        """The cache holds enough tokens in the memory that vLLM gives it."""
        factor = self.alone.capacity / self.stock.capacity
        assert factor >= self.least_capacity, f"{factor:.2f} x stock vLLM's tokens, {self.least_capacity} wanted"
        return f"{factor:.2f} x stock vLLM's tokens"

    def check_quality(self) -> str:
        """A text is about as probable as in stock vLLM: what is read is what was stored."""
        pairs = list(zip(self.alone.logprobs, self.stock.logprobs, strict=True))
        apart = sum(abs(a - b) for a, b in pairs) / len(pairs)
        assert apart <= self.nats, f"log-probabilities {apart:.3f} nats from stock vLLM's, at most {self.nats}"
        return f"log-probabilities {apart:.4f} nats from stock vLLM's on average"

    def check_batch(self) -> str:
        """Requests that come together get the answers that each gets alone."""
        return _same(self.alone.together, self.alone.single)

    def check_used_pages(self) -> str:
        """What other requests left in pages changes nothing."""
        return _same(self.alone.again, self.alone.single)

    def check_chunks(self) -> str:
        """A prompt that comes in chunks, next to others, gets the same answer."""
        expected = self.alone.single
        return _same(answers(self._small_steps(), self.prompts), expected)

    def check_prefix(self) -> str:
        """A prompt whose prefix is cached gets the same answer."""
        expected = self.alone.single[:1]
        llm = self._small_steps()
        answers(llm, self.prompts[:1])
        [output] = outputs(llm, self.prompts[:1])
        assert output.num_cached_tokens, "vLLM found no prefix in its cache"
        return f"{output.num_cached_tokens} tokens cached, {_same([list(output.outputs[0].token_ids)], expected)}"

    def check_abort(self) -> str:
        """A request that ends early changes no other's answer."""
        from vllm import SamplingParams

        expected = self.alone.single
        inner, finished = self._small_steps().llm_engine, dict[str, list[int]]()
        sampling = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
        for number, ids in enumerate(self.prompts):
            inner.add_request(f"abort-{number}", {"prompt_token_ids": ids}, sampling)
        for step in range(10_000):
            if step == 6:
                inner.abort_request([name for name in _unfinished(inner) if "abort-1" in name])
            for out in inner.step():
                if out.finished:
                    finished[out.request_id] = list(out.outputs[0].token_ids)
            if not inner.has_unfinished_requests():
                break
        rest = [number for number in range(len(self.prompts)) if number != 1]
        missing = [number for number in rest if f"abort-{number}" not in finished]
        assert not missing, f"no answers to {missing}"
        return _same([finished[f"abort-{number}"] for number in rest], [expected[number] for number in rest])

    def check_preemption(self) -> str:
        """Requests that vLLM preempts, and computes again, get the same answers."""
        page = max(32, int(self.options.get("block_size", 32)))
        pair = [self.prompts[0][: 2 * page - 4], self.prompts[4][: 2 * page - 2]]
        roomy = self._engine(block_size=page, max_model_len=4 * page)
        expected = answers(roomy, pair)
        scarce = self._engine(block_size=page, max_model_len=4 * page, num_gpu_blocks_override=6)
        with preemptions() as preempted:
            again = answers(scarce, pair)
        assert preempted, "vLLM preempted no request"
        return f"{len(preempted)} preempted, {_same(again, expected)}"


CHECKS = ("capacity", "quality", "batch", "used_pages", "chunks", "prefix", "abort", "preemption")  # engines in turn


def _dtype(options: dict[str, Any], dtype: str | None) -> str | None:
    """Take the model's dtype out of options. Raises UsageError for two dtypes, and for options that name a model."""
    if "model" in options:
        raise UsageError(f"options name model {options['model']}: the suite has its own (--model): leave it out there")
    stated = options.pop("dtype", None)
    if None not in (stated, dtype) and stated != dtype:
        raise UsageError(f"dtype {dtype} (--dtype), and {stated} in the options: give one of them")
    return dtype or stated


def _same(actual: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> str:
    for number, (mine, right) in enumerate(zip(actual, expected, strict=True)):
        if list(mine) != list(right):
            at = next(at for at, pair in enumerate(zip(mine, right, strict=True)) if pair[0] != pair[1])
            raise AssertionError(f"answer {number} differs from token {at} on: {mine[at]} instead of {right[at]}")
    return f"{sum(map(len, actual))} tokens the same"


def _text_logprobs(llm: Any, ids: Sequence[int]) -> list[float]:
    """The log-probability of each token of a text, except for the first."""
    [out] = outputs(llm, [ids], 1, prompt_logprobs=0)
    return [entry[token].logprob for entry, token in zip(out.prompt_logprobs[1:], ids[1:], strict=True)]


def _unfinished(inner: Any) -> list[str]:
    """Names of the requests that an engine has not answered."""
    return list(inner.output_processor.request_states)


class Conformance:
    """The suite as tests of pytest: a subclass gives `model` and `options`, and what else it wants of `Suite`'s."""

    model: ClassVar[str]
    options: ClassVar[Mapping[str, Any]]
    dtype: ClassVar[str | None] = None
    nats: ClassVar[float] = 0.5
    least_capacity: ClassVar[float] = 1.0
    suite: ClassVar[Suite]

    @classmethod
    def setup_class(cls) -> None:
        cls.suite = Suite(cls.model, cls.options, cls.dtype, cls.nats, cls.least_capacity)

    @classmethod
    def teardown_class(cls) -> None:
        stop()

    def test_capacity(self) -> None:
        print(self.suite.check_capacity())

    def test_quality(self) -> None:
        print(self.suite.check_quality())

    def test_batch(self) -> None:
        print(self.suite.check_batch())

    def test_used_pages(self) -> None:
        print(self.suite.check_used_pages())

    def test_chunks(self) -> None:
        print(self.suite.check_chunks())

    def test_prefix(self) -> None:
        print(self.suite.check_prefix())

    def test_abort(self) -> None:
        print(self.suite.check_abort())

    def test_preemption(self) -> None:
        print(self.suite.check_preemption())


def main() -> None:
    """`python -m kvcal_vllm.testing`."""
    parser = argparse.ArgumentParser(prog="python -m kvcal_vllm.testing", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", required=True, help="a folder or a name")
    parser.add_argument("--options", type=_options, default={}, help="of vllm.LLM, as JSON: what selects the backend")
    parser.add_argument("--dtype", help="float32 on a CPU, elsewhere the model's, unless given")
    parser.add_argument("--nats", type=float, default=0.5, help="how far log-probabilities may be from stock vLLM's")
    parser.add_argument("--least-capacity", type=float, default=1.0, help="times stock vLLM's tokens")
    asked = parser.parse_args()
    try:
        suite, failed = Suite(asked.model, asked.options, asked.dtype, asked.nats, asked.least_capacity), 0
    except UsageError as error:
        parser.error(str(error))
    for name in CHECKS:
        try:
            print(f"{name}: {getattr(suite, f'check_{name}')()}", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"{name}: FAILED: {error}", flush=True)
        except Exception as error:  # vLLM's, of options or a model that it refuses; its log has the rest
            print(f"{name}: not checked, nor what follows: {_first_line(error)}", file=sys.stderr, flush=True)
            sys.exit(error.exit_code if isinstance(error, KVCalError) else 2)
    stop()
    sys.exit(1 if failed else 0)


def _options(text: str) -> dict[str, Any]:
    """What --options says. Raises argparse's error for what is no object of JSON."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from error
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError('must be an object, such as {"attention_config": {"backend": "CUSTOM"}}')
    return options


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    main()
