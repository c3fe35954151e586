"""`kvcal plan`. Imports neither torch nor Transformers, unless only Transformers knows a model's shape, or --serve asks
the plug-in for vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, final

from kvcal_artifacts.errors import UnsupportedModel, UsageError

from ..bench import devices
from ..bench.planning import cards, projection, quality, schemes, units
from ..bench.planning.cards import Card
from ..bench.planning.memory import ALLOCATOR, CHUNK, RUNTIME, Model
from ..bench.planning.projection import Choice, Goal
from ..bench.planning.schemes import Planned
from ..models import plain_config
from ..models.geometry import Geometry
from ..models.names import ModelSource, resolve
from ..report.suggest import allowed
from .options import PlanOptions

if TYPE_CHECKING:
    from ..bench.planning.paged import PagedRow

WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
SERVERS = ("vllm",)
Say = Callable[[str], None]


class ModelRecord(TypedDict):
    """The model that is planned for. context: tokens; weights_bytes: in `dtype`; kv_bytes_per_token: at that width."""

    name: str
    architecture: str
    context: int
    dtype: str
    weights_bytes: int
    parameters: int | None
    layers: int
    sliding_layers: int
    kv_bytes_per_token: int


class CardRecord(TypedDict):
    """The card that is planned for. asked: whether its driver said so; sources: of each figure, where it is from."""

    name: str
    title: str
    asked: bool
    memory_bytes: int
    bytes_per_second: float | None
    flops: float | None
    no_kernels: str | None
    sources: Mapping[str, str]


class Assumed(TypedDict):
    """What a plan rests on: kvcal.bench.planning says of each figure what it is and where it was measured."""

    runtime_bytes: float
    allocator_part: float
    chunk_tokens: int
    weights_read_at: float
    full_cache_read_at: float
    seconds_a_layer: float
    seconds_an_attention: float
    prompt_products_at: float
    packed_prompt_times: float
    eager_seconds_a_layer: float
    prompt_in_chunks_times: float
    prompt_measured_on: str
    measured_on: str
    memory_of_the_system_counted: bool | None
    kl_models: Mapping[str, quality.MeasuredModel]


class AssumedOfEngine(TypedDict):
    """What a plan for vLLM rests on: its options, bytes that torch takes, and the models that KL was measured on."""

    gpu_memory_utilization: float
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    runtime_bytes: float
    kl_models: Mapping[str, quality.MeasuredModel]


class PlanHead(TypedDict):
    """What is planned. context: tokens of each of `batch` rows; budget_kl: nats per token."""

    model: ModelRecord
    gpu: CardRecord
    context: int
    batch: int
    budget_kl: float | None
    serve: str | None
    recommended: str | None
    recommended_why: str | None


@final
class PlanResult(PlanHead):
    """What `kvcal plan --json` prints."""

    assumed: Assumed
    rows: list[projection.Row]


@final
class ServedPlan(PlanHead):
    """What `kvcal plan --serve vllm --json` prints. refused: schemes that the plug-in does not serve, and why."""

    assumed: AssumedOfEngine
    rows: list[PagedRow]
    refused: dict[str, str]


def check(options: PlanOptions) -> None:
    """UsageError for values, and pairs of options, that say nothing."""
    if options.dtype not in WIDTHS:
        raise UsageError(f"--dtype {options.dtype}: allowed are {', '.join(WIDTHS)}")
    if options.budget_kl is not None and not 0 < options.budget_kl < float("inf"):
        raise UsageError(f"--budget-kl {options.budget_kl:g}: must be positive and finite, nats a token as 0.05")
    if options.gpu is not None and options.memory is not None:
        raise UsageError(f"--gpu {options.gpu} and --memory {options.memory}: give one of the two")
    if options.serve not in (None, *SERVERS):
        raise UsageError(f"--serve {options.serve}: allowed is {', '.join(SERVERS)}")
    if options.bandwidth is not None and options.memory is None:
        raise UsageError(f"--bandwidth {options.bandwidth} goes with --memory; --gpu has a bandwidth of its own")


def run_plan(options: PlanOptions, say: Say) -> PlanResult | ServedPlan:
    """What the model takes on the card and how fast it runs, for FP16 and each scheme. say: prints assumptions."""
    check(options)
    source = _source(options)
    usual = schemes.DEFAULT if options.serve is None else schemes.SERVED
    chosen = [schemes.planned(name) for name in dict.fromkeys(options.preset or usual)]
    card = _card(options)
    model = _model(source, options, say)
    geometry = model.geometry
    context = geometry.context if options.context is None else units.tokens_of(options.context, "--context")
    if context > geometry.context:
        say(f"--context {options.context}: {options.model} is made for {geometry.context:,} tokens; planned are those")
        context = geometry.context
    reads_all = not plain_config.experts(source)
    goal = Goal(source.name, model, context, geometry.context, options.batch, options.budget_kl, reads_all)
    if options.serve is not None:
        return _served(goal, chosen, card, _head(source, goal, card, options))
    rows = projection.rows(goal, chosen, card)
    choice = projection.recommended(rows, options.budget_kl)
    head = _head(source, goal, card, options)
    return {**_chosen(head, choice), "assumed": _assumed(card), "rows": rows}


def _head(source: ModelSource, goal: Goal, card: Card, options: PlanOptions) -> PlanHead:
    return {
        "model": _model_record(source, goal.model, options),
        "gpu": _card_record(card),
        "context": goal.context,
        "batch": options.batch,
        "budget_kl": options.budget_kl,
        "serve": options.serve,
        "recommended": None,
        "recommended_why": None,
    }


def _chosen(head: PlanHead, choice: Choice | None) -> PlanHead:
    if choice is not None:
        head["recommended"], head["recommended_why"] = choice.scheme, choice.why
    return head


def _served(goal: Goal, chosen: Sequence[Planned], card: Card, head: PlanHead) -> ServedPlan:
    """What vLLM holds of each scheme that the plug-in serves on a GPU."""
    from ..bench.planning import paged

    rows, refused = paged.rows(goal, chosen, card)
    engine = paged.engine(card, goal.context)
    return {
        **_chosen(head, paged.recommended(rows, goal.budget, goal.batch)),
        "assumed": {
            "gpu_memory_utilization": engine.utilisation,
            "max_num_batched_tokens": engine.step_tokens,
            "max_num_seqs": engine.requests,
            "max_model_len": engine.longest,
            "runtime_bytes": RUNTIME,
            "kl_models": quality.models(),
        },
        "rows": rows,
        "refused": refused,
    }


def _card(options: PlanOptions) -> Card:
    """The card that is planned for: where the one that is named, or none, is this machine's, it is asked."""
    if options.memory is not None:
        bandwidth = None if options.bandwidth is None else units.rate_of(options.bandwidth, "--bandwidth")
        return cards.of_numbers(units.bytes_of(options.memory, "--memory"), bandwidth)
    if options.gpu is None:
        card = cards.here()
        if card is None:
            raise UsageError(
                "no GPU was found here: say for which one, --gpu rtx-4090 (`kvcal names device` lists them), or "
                "--memory 24GB --bandwidth 1008GB/s"
            )
        return card
    name = options.gpu.strip().lower()
    if name not in devices.DEVICES:
        hint = allowed(name, devices.DEVICES, "kvcal names device")
        raise UsageError(f"--gpu {options.gpu or repr(options.gpu)}: no such profile; {hint}, or give --memory 24GB")
    card = cards.here()
    return card if card is not None and card.name == name else cards.of_profile(devices.DEVICES[name])


def _source(options: PlanOptions) -> ModelSource:
    """The source that --model names, as in every command. Here a config.json may be named itself, too."""
    path = Path(options.model)
    named_file = path.name == "config.json" and path.is_file()
    return resolve(str(path.parent.resolve()) if named_file else options.model, options.revision)


def _model(source: ModelSource, options: PlanOptions, say: Say) -> Model:
    """Its shape, and its weights' bytes: as given, as counted in its files, or by its shape."""
    geometry, width = plain_config.geometry(source), WIDTHS[options.dtype]
    if geometry.sliding_layers >= geometry.layers:
        raise UnsupportedModel(
            f"{source.label}: all its {geometry.layers} layers attend to a window of {geometry.sliding_window} tokens "
            "and keep caches of their own: there is nothing to compress"
        )
    weights, parameters = _weights(source, geometry, width, options, say)
    table = 0 if geometry.tied else geometry.vocab * geometry.hidden * width
    if options.weights is not None and weights <= table:
        raise UsageError(
            f"--weights {options.weights}: must be more than the {table / 1e9:.2f} GB that the table of embeddings of "
            f"{options.model} takes in {options.dtype}; give the size of all weights, as 5.7GB"
        )
    return Model(geometry, weights, width, parameters)


def _weights(
    source: ModelSource, geometry: Geometry, width: int, options: PlanOptions, say: Say
) -> tuple[float, float]:
    """Bytes of all weights, and how many there are."""
    quantised = plain_config.quantised(source)
    if options.weights is not None:
        return units.bytes_of(options.weights, "--weights"), geometry.parameters
    stored = None if source.folder is None else plain_config.stored_weights(source.folder, source.label)
    if stored is not None:
        if quantised is None:
            return stored.numbers * width, stored.numbers
        say(f"weights of {options.model} are quantised ({quantised}): as many bytes as its files hold")
        return stored.bytes, geometry.parameters
    if quantised is not None:
        raise UsageError(
            f"--model {options.model} is quantised ({quantised}): give what its weights take, as --weights 5.7GB"
        )
    if plain_config.experts(source):
        raise UsageError(
            f"--model {options.model} has experts, whose weights its shape does not tell: give their size, as "
            "--weights 93GB"
        )
    if geometry.model_type not in plain_config.PLAIN:
        say(f"weights of {options.model} are estimated by its shape; --weights says what they take")
    return geometry.parameters * width, geometry.parameters


def _model_record(source: ModelSource, model: Model, options: PlanOptions) -> ModelRecord:
    geometry = model.geometry
    return {
        "name": source.name,
        "architecture": geometry.model_type,
        "context": geometry.context,
        "dtype": options.dtype,
        "weights_bytes": round(model.weights),
        "parameters": None if model.parameters is None or options.weights is not None else round(model.parameters),
        "layers": geometry.layers,
        "sliding_layers": geometry.sliding_layers,
        "kv_bytes_per_token": round(model.layer_token * geometry.layers),
    }


def _card_record(card: Card) -> CardRecord:
    return {
        "name": card.name,
        "title": card.title,
        "asked": card.asked,
        "memory_bytes": round(card.memory),
        "bytes_per_second": card.bandwidth,
        "flops": card.flops,
        "no_kernels": card.no_kernels,
        "sources": card.sources,
    }


def _assumed(card: Card) -> Assumed:
    from ..bench.planning import speed

    return {
        "runtime_bytes": RUNTIME,
        "allocator_part": ALLOCATOR,
        "chunk_tokens": CHUNK,
        "weights_read_at": speed.READ,
        "full_cache_read_at": speed.FULL_READ,
        "seconds_a_layer": speed.LAYER,
        "seconds_an_attention": speed.ATTENTION,
        "eager_seconds_a_layer": speed.EAGER,
        "prompt_products_at": speed.PROMPT,
        "packed_prompt_times": speed.PACKED_PROMPT,
        "prompt_in_chunks_times": speed.CHUNKED_PROMPT,
        "prompt_measured_on": "one H100, 32,768 tokens of Llama-3.1-8B, bfloat16",
        "measured_on": "one H200, Llama-3.1-8B's shape, bfloat16",
        "memory_of_the_system_counted": False if card.name.startswith("jetson") else None,
        "kl_models": quality.models(),
    }
