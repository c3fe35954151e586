"""`model.generate()` itself on a filled cache: what a caller gets, next to the bare steps of decoding.py.

A call of WARM_UP tokens that nobody times, then one of TOKENS, from the same start where the cache can go back there. A
token's moment is taken where generate() asks whether to stop, with the device waited for as generate() waits itself;
times are from one token to the next. So the first token, and with it what a call does once, is in no figure. Logits are
compared with those of bare steps that are given the same tokens, where the cache can go back.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import (
    Cache,
    CompileConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from kvcal_kernels.device import on

from . import decoding
from .caches import FullLayer, Kind, Start, attention, weight_bytes
from .decoding import CHECKED, Stepper, peak_bytes, typical, wait

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..models.structure import CausalLM

WARM_UP = 4  # tokens: a block is packed; a compiled forward is compiled, recorded and replayed
TOKENS = 17  # 16 times
LEAST = 1 + CHECKED
SECONDS = 2.0  # of the call that is timed, at most
ROOM = TOKENS + 1


@dataclass(frozen=True)
class Called:
    """How long generate() takes from one token to the next, in microseconds; `Ran` explains bytes, apart and read.

    taken: of a step, packing shared out over all. flush: of a step that packs. mean: of the `timed` steps, as they
    came. wrong: why the figure is none.
    """

    length: int
    taken: float
    flush: float | None
    mean: float
    timed: int
    bytes: int
    apart: float | None
    wrong: str | None
    read: int | None


class Heard(LogitsProcessor):
    """Keeps the first CHECKED logits of a few rows."""

    def __init__(self, rows: list[int]) -> None:
        self.rows, self.logits = rows, list[Tensor]()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if len(self.logits) < CHECKED:
            self.logits.append(scores[self.rows].clone())
        return scores


class Stamps(StoppingCriteria):
    """When each token was there; says that it is enough after SECONDS."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: object) -> torch.BoolTensor:
        wait(input_ids.device)
        self.times.append(time.perf_counter())
        over = len(self.times) >= LEAST and self.times[-1] - self.times[0] > SECONDS
        rows, device = len(input_ids), input_ids.device
        return torch.full((rows,), over, dtype=torch.bool, device=device)  # type: ignore[return-value]


def run(model: CausalLM, kind: Kind, batch: int, length: int, compiled: CompileConfig | None = None) -> Called | str:
    """Fill a cache with `length` tokens per row and let generate() continue it.

    generate() calls the model's forward unchanged, or compiled in the way given. Where that does not compile with such
    a cache, the result is the reason.
    """
    assert kind.maker is not None
    with on(model.device):
        start = kind.maker(batch, length, ROOM)
        try:
            if compiled is not None and (why := why_not_compiled(model, start.cache, compiled)):
                return why
            with attention(model, kind):
                return _run(Stepper(model, start, batch), batch, compiled)
        finally:
            start.close()
            if compiled is not None:  # it holds memory, and would be compiled again for shapes of all sizes
                torch.compiler.reset()
                vars(model).pop("_compiled_call", None)


def why_not_compiled(model: PreTrainedModel, cache: Cache, compiled: CompileConfig) -> str | None:
    if model.device.type != "cuda" and not compiled._compile_all_devices:
        return "generate() compiles on a GPU only"
    return None if cache.is_compileable else "generate() does not compile with this cache"


def _run(stepper: Stepper, batch: int, compiled: CompileConfig | None) -> Called | str:
    start, model = stepper.start, stepper.model
    generate(model, start.cache, batch, WARM_UP, Heard(stepper.rows), Stamps(), compiled)
    if compiled is not None and not hasattr(model, "_compiled_call"):
        return "generate() did not compile its forward"
    stepper.back()
    heard, stamps, before = Heard(stepper.rows), Stamps(), int(start.cache.get_seq_length())
    tokens = generate(model, start.cache, batch, TOKENS, heard, stamps, compiled)
    used, after = peak_bytes(model.device), int(start.cache.get_seq_length())
    times = [1e6 * (b - a) for a, b in itertools.pairwise(stamps.times)]
    flush = None if start.flush is None else start.flush - 1  # the first step's time is not among them
    taken, packing = typical(times, replace(start, flush=flush))
    wrong, apart = _miscounted(start, tokens, after - before, len(stamps.times)), None
    if wrong is None and start.goes_back:
        wrong, apart = _compare(stepper, heard, tokens)
    weights = weight_bytes(model)
    read = None if weights is None or start.bytes is None else weights + start.bytes
    return Called(before, taken, packing, statistics.fmean(times), len(times), used, apart, wrong, read)


def generate(
    model: CausalLM,
    cache: Cache,
    batch: int,
    tokens: int,
    heard: Heard,
    stamps: Stamps,
    compiled: CompileConfig | None,
) -> Tensor:
    """New tokens (batch, at most `tokens`) behind those of the cache and one of id 0. Ids and mask are as long as what
    is cached and that one: generate() cuts off what the cache has.
    """
    length = int(cache.get_seq_length())
    compiling: dict[str, object] = {"disable_compile": True} if compiled is None else {"compile_config": compiled}
    ids = model.generate(
        torch.zeros(batch, length + 1, dtype=torch.long, device=model.device),
        attention_mask=torch.ones(batch, length + 1, dtype=torch.long, device=model.device),
        past_key_values=cache,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([heard]),
        stopping_criteria=StoppingCriteriaList([stamps]),
        **compiling,
    )
    return ids[:, length + 1 :].clone()  # all of it is as long as the cache


def _miscounted(start: Start, tokens: Tensor, grown: int, stamped: int) -> str | None:
    """Why tokens, moments and what the cache grew by are not as many; None if they are. A full cache never grows."""
    if isinstance(start.cache.layers[0], FullLayer):
        grown = stamped
    if tokens.shape[1] == stamped == grown:
        return None
    return f"check failed: generate() gave {tokens.shape[1]} tokens in {stamped} steps, and the cache grew by {grown}"


@torch.no_grad()
def _compare(stepper: Stepper, heard: Heard, tokens: Tensor) -> tuple[str | None, float]:
    """Why the logits of generate() are not those of bare steps from the same start, None if they are; their relative
    error.
    """
    stepper.back()
    worst = 0.0
    for i, logits in enumerate(heard.logits):
        expected = stepper.step()
        allowed = decoding.TOLERANCE * torch.finfo(expected.dtype).eps
        finite = ~logits.isneginf()  # the end of a text, which min_new_tokens forbids
        exact = expected[stepper.rows].double()[finite]
        apart = float((logits.double()[finite] - exact).norm() / exact.norm())
        worst = apart if apart != apart else max(worst, apart)
        if not worst <= allowed:
            return f"check failed: logits of generate() are off by {worst:.2g}, allowed {allowed:.2g}", worst
        stepper.token.copy_(tokens[:, i, None])
    return None, worst
