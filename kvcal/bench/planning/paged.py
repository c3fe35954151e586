"""`kvcal plan --serve vllm`: which schemes our plug-in serves on a GPU, and how many tokens vLLM holds there.

What is served, and in how many bytes, is asked of the plug-in's code (kvcal_vllm.plan), which imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from kvcal_artifacts.codecs import Codec, Role, Shape, Transform
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import LayerCodecs
from kvcal_vllm.plan import page_layer, scheme_refusal

from ...methods.registry import codec_maker
from . import projection, quality
from .cards import Card
from .memory import RUNTIME, Model
from .projection import FULL, KL, Choice, Goal
from .schemes import FITTED, Planned

PAGE = 32  # tokens
DTYPE_BYTES = 2  # of the dtype as which vLLM views its pages
UTILISATION = 0.9  # --gpu-memory-utilization, of the card's memory
# vLLM 0.24's server (engine/arg_utils.py): tokens of a step and requests at most, by whether the card has 70 GiB and is
# no A100.
SMALL, LARGE = (2048, 256), (8192, 1024)
LARGE_FROM = 70 * 2.0**30
VLLM_FP8 = "fp8"  # vLLM's cache, without the plug-in: shown for comparison, not recommended


@final
class PagedRow(KL):
    """A scheme that vLLM serves on a GPU, or FP16. bits: of memory in pages for each number. tokens: that vLLM holds,
    of all requests. requests: of the planned context that this is. KL is of every token packed.
    """

    scheme: str
    bits: float
    times_smaller: float
    tokens: int
    requests: int
    next: str | None


@dataclass(frozen=True)
class Engine:
    """What vLLM is started with. step_tokens, requests: at most (--max-num-batched-tokens, --max-num-seqs). longest:
    tokens of a request (--max-model-len).
    """

    step_tokens: int
    requests: int
    longest: int
    utilisation: float = UTILISATION

    def memory(self, model: Model, card_bytes: float, ours: bool) -> float:
        """Bytes that are left for keys and values: its part of the card without weights, the runtime, and the larger of
        a step's activations and its logits. ours: whether our plug-in, which keeps room for one request's dequantised
        keys and values of a layer.
        """
        transient = max(self.step_tokens * model.activation, self.requests * model.logits)
        dense = self.longest * model.layer_token if ours else 0.0
        return self.utilisation * card_bytes - model.weights - RUNTIME - transient - dense


def engine(card: Card, longest: int) -> Engine:
    """What vLLM's server starts with by default on a card. longest: tokens of a request."""
    large = card.memory >= LARGE_FROM and "a100" not in card.title.lower()
    return Engine(*(LARGE if large else SMALL), longest)


def page_bits(scheme: Planned, model: Model) -> float:
    """Bits of a page for each number of it. Raises UsageError, which says why, for what the plug-in refuses on a
    GPU.
    """
    if model.geometry.sliding_layers:
        raise UsageError("the model has sliding windows; kvcal's pages hold full attention only")
    if (reason := scheme_refusal(scheme.predicted, scheme.frame)) is not None:
        raise UsageError(reason)
    shape = Shape(model.geometry.kv_heads, model.geometry.head_dim, scheme.block)
    pair = LayerCodecs(_codec(scheme, scheme.key, shape, "key"), _codec(scheme, scheme.value, shape, "value"))
    return page_layer(scheme.name, pair, DTYPE_BYTES, gpu=True).bits


def _codec(scheme: Planned, name: str, shape: Shape, role: Role) -> Codec:
    if scheme.command == FITTED:  # of as many bits in every direction; a fit's have as many on average
        return Transform(shape, role, bits=[int(name.rpartition("-")[2])] * shape.dim)
    return codec_maker(name)(shape, role)


def rows(goal: Goal, planned: Sequence[Planned], card: Card) -> tuple[list[PagedRow], dict[str, str]]:
    """FP16 first, then what is served by size, the largest first; and why each other scheme is not, by its name."""
    served, refused = [_row(goal, FULL, 8.0 * goal.model.width, None, card)], {}
    for scheme in planned:
        if scheme.name == VLLM_FP8:
            served.append(_row(goal, VLLM_FP8, 8.0, scheme, card))
            continue
        try:
            if card.no_kernels is not None:
                raise UsageError(f"no kernel runs there: {card.no_kernels}")
            served.append(_row(goal, scheme.name, page_bits(scheme, goal.model), scheme, card))
        except UsageError as error:
            refused[scheme.name] = str(error).rpartition("cannot be served: ")[2]
    return [served[0], *sorted(served[1:], key=lambda row: -row["bits"])], refused


def _row(goal: Goal, name: str, bits: float, scheme: Planned | None, card: Card) -> PagedRow:
    model = goal.model
    ours = scheme is not None and name != VLLM_FP8
    geometry = model.geometry
    layers = geometry.layers - geometry.sliding_layers  # what windows take does not grow with tokens
    token = 2.0 * geometry.kv_width * layers * bits / 8
    free = engine(card, goal.context).memory(model, card.memory, ours)
    tokens = max(0, int(free / token) // PAGE * PAGE)
    kl = quality.NOTHING if scheme is None else quality.expected(name, geometry.model_type, served=True)
    return {
        "scheme": name,
        "bits": bits,
        "times_smaller": 8.0 * model.width / bits,
        "tokens": tokens,
        "requests": tokens // goal.context,
        **projection.kl_fields(kl),
        "next": None if scheme is None else _next(scheme, goal.name),
    }


def _next(scheme: Planned, model: str) -> str:
    """The command that writes the bundle that vLLM reads."""
    if scheme.name == VLLM_FP8:
        return f"kvcal export --to fp8 -m {model} -o fp8-checkpoint"
    return projection.command_of(scheme, model, windows=False)


def recommended(paged: Sequence[PagedRow], budget: float | None, batch: int) -> Choice | None:
    """The smallest cache of what the plug-in serves, where `batch` requests of the planned context fit and the KL is
    within the budget. None where there is none.
    """
    ours = [row for row in paged[1:] if row["scheme"] != VLLM_FP8 and row["requests"] >= batch]
    chosen = projection.holding(ours, budget)
    if not chosen.rows:
        return None
    best = min(chosen.rows, key=lambda row: row["bits"])
    one = "the only one that the plug-in serves and that fits and holds there"
    many = "the smallest cache of those that the plug-in serves and that fit and hold there"
    why = one if len(chosen.rows) == 1 else many
    return Choice(best["scheme"], f"{chosen.words(best)}; {why}")
