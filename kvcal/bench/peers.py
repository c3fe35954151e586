"""The best FP16 there is: decode attention over uncompressed keys and values by every backend of torch, and FlashInfer."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvcal_artifacts.errors import KVCalError

from ..hub import one_line
from ..models import is_oom
from .layer import Case
from .schemes import WINDOWS
from .timing import Clock, Timed

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
SIXTEEN = (torch.float16, torch.bfloat16)
DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
LINE = 200  # characters of why something did not run
PAGE = 64  # tokens a page of FlashInfer's cache
WORKSPACE = 128 << 20
# Times the error of plain products in the same dtype, plus so many of its units: for ours in 16 bits, for torch's own there,
# and in float32, whose kernels of torch sum in the order that a CPU likes best (34 seen over 32k tokens, 40 000 and more
# where a token that a query points at is missing).
TOLERANCE = 2.0
UNITS, UNITS_OF_PEERS, UNITS_OF_FLOAT32 = 1.0, 16.0, 128.0
UNITS_POINTED = 4.0  # of queries with scores of 10 to 16, at least: roundings of keys and angles count so much more
AT_MOST = 4  # tokens that a query of a check points at: with more of them in few channels others win
LEAST = 7  # tokens that a check points at
Attend = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Peer:
    """One backend that ran here, with its time, or why it did not."""

    name: str
    timed: Timed | None
    why_not: str | None = None
    dtype: str | None = None


def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Plain products and softmax in the dtype of the arguments: q (B, heads, Q, D), k and v (B, H, T, D) -> as q."""
    grouped = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
    scores = (grouped @ keys.transpose(-1, -2)) * keys.shape[-1] ** -0.5
    out: Tensor = (scores.softmax(-1) @ values).view_as(queries)
    return out


def wrong(
    found: Tensor, queries: Tensor, keys: Tensor, values: Tensor, units: float | Sequence[float] = UNITS
) -> str | None:
    """None if attention over these (first and last row) is as exact as it should be: each query of a head at most twice the
    error that plain products in the same dtype have against float64, and `units` of the dtype's rounding (one for all
    queries of a head, or one each; of float32 UNITS_OF_FLOAT32: it is torch that attends there); else what was found.
    """
    if queries.dtype == torch.float32:
        units = UNITS_OF_FLOAT32
    ends = sorted({0, len(queries) - 1})
    own = [x[ends] for x in (queries, keys, values)]
    exact = attention(*(x.double() for x in own))
    plain = attention(*own).double()
    scales = exact.abs().amax((0, 1, 3))
    errors, allowances = ((x.double() - exact).abs().amax((0, 1, 3)) for x in (found[ends], plain))
    least = torch.as_tensor(units, device=scales.device) * float(torch.finfo(queries.dtype).eps)
    allowances = TOLERANCE * allowances + least * scales
    for error, allowed, scale in torch.stack([errors, allowances, scales], 1).tolist():
        if not error <= allowed:  # of NaN, too
            return f"check failed: off by {error:.2g}, allowed {allowed:.2g} (values up to {scale:.2g})"
    return None


def misattends(
    attend: Attend, queries: Tensor, keys: Tensor, values: Tensor, sink: int, recent: int, units: float = UNITS
) -> str | None:
    """None if `attend` of these queries (B, Hq, 1, D), and of those that `pointed` makes, is as exact as `wrong` asks."""
    more = pointed(queries, keys, sink, recent)
    every, each = [queries, *more], [units, *[max(units, UNITS_POINTED)] * len(more)]
    return wrong(torch.cat([attend(one) for one in every], 2), torch.cat(every, 2), keys, values, each)


def pointed(queries: Tensor, keys: Tensor, sink: int, recent: int) -> list[Tensor]:
    """Queries as these (B, Hq, 1, D) whose weight is about half on a few of the tokens: one in 32 channels, at most AT_MOST a
    query, other ones for each query of a kv head, in the order of `places`; as many as point at LEAST of them.

    Over random keys and queries all tokens weigh much the same, and that one, or 128, are missing is less than what bfloat16
    rounds. Scores are ln(tokens) + 4 for each of the chosen, by least squares, so that the others together keep a part.
    """
    batch, heads, _, dim = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    each = min(tokens, max(1, min(AT_MOST, dim // 32)))
    one = heads // kv_heads * each
    count = max(1, -(-LEAST // one)) * one
    chosen = places(tokens, sink, recent, count)
    at = torch.tensor([chosen[i % len(chosen)] for i in range(count)], device=keys.device)
    those = keys[:, :, at].cpu().double().view(batch, kv_heads, -1, each, dim)  # small; no solver's room on a GPU
    scores = torch.full((*those.shape[:-1], 1), (math.log(tokens) + 4) * dim**0.5, dtype=torch.float64)
    found = torch.linalg.lstsq(those, scores, driver="gelsd").solution  # the shortest: of least weight on other tokens
    sets = found.view(batch, kv_heads, -1, heads // kv_heads, dim).unbind(2)
    return [part.reshape(queries.shape).to(queries) for part in sets]


def places(tokens: int, sink: int, recent: int, count: int) -> list[int]:
    """At most `count` of the tokens, those first that code leaves out first: the newest, the first of all, packed ones at both
    ends and in the middle, the ends of both windows, then packed ones all over.
    """
    first, end = sink, tokens - recent  # of packed tokens
    ends = [tokens - 1, 0, end - 1, first, (first + end) // 2, sink - 1, end]
    over = [first + (2 * i + 1) * (end - first) // (2 * count) for i in range(count)]
    return list(dict.fromkeys(at for at in (*ends, *over) if 0 <= at < tokens))[:count]


def best(peers: list[Peer]) -> Peer | None:
    ran = [peer for peer in peers if peer.timed is not None]
    return min(ran, key=lambda peer: peer.timed.microseconds if peer.timed else 0.0, default=None)


def measure(case: Case, clock: Clock) -> list[Peer]:
    """Every backend in every one of `dtypes_of`."""
    return [peer for dtype in dtypes_of(case) for peer in _of_dtype(case, clock, dtype)]


def dtypes_of(case: Case) -> tuple[torch.dtype, ...]:
    """On a GPU the model's, or both of 16 bits beside a model of float32: what is called FP16 is never wider. On a CPU float32
    too: there it may be the faster one.
    """
    if case.device.type != "cuda":
        return (*SIXTEEN, torch.float32)
    return (case.dtype,) if case.dtype in SIXTEEN else SIXTEEN


def _of_dtype(case: Case, clock: Clock, dtype: torch.dtype) -> list[Peer]:
    try:
        queries = case.queries().to(dtype)
        keys, values = (case.random(case.geometry.kv_heads, case.length, salt=2 + role).to(dtype) for role in (0, 1))
    except Exception as error:  # no memory for them: compressed ones may still fit
        return [Peer(f"every backend {DTYPE_NAMES[dtype]}", None, first_line(error), DTYPE_NAMES[dtype])]
    found = []
    for name, attend in _candidates(keys, values, case.group):
        found.append(_tried(f"{name} {DTYPE_NAMES[dtype]}", attend, clock, (queries, keys, values)))
    if case.device.type == "cuda" and importlib.util.find_spec("flashinfer"):
        try:
            attend = _flashinfer(queries, keys, values)
        except Exception as error:  # another version's interface, no compiler: a peer less, and said
            found.append(Peer("flashinfer", None, first_line(error), DTYPE_NAMES[dtype]))
        else:
            found.append(_tried(f"flashinfer {DTYPE_NAMES[dtype]}", attend, clock, (queries, keys, values)))
    return found


def _candidates(keys: Tensor, values: Tensor, ratio: int) -> Iterator[tuple[str, Attend]]:
    """Each backend with grouped heads as torch has them, and with a kv head's query heads as rows of one query."""
    for name, backend in BACKENDS.items():

        def gqa(queries: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(queries, keys, values, enable_gqa=True)

        def stacked(queries: Tensor, backend: SDPBackend = backend) -> Tensor:
            rows = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(rows, keys, values).reshape(queries.shape)

        yield f"sdpa {name}", gqa
        if ratio > 1:
            yield f"sdpa {name}, heads as rows", stacked


def _tried(name: str, attend: Attend, clock: Clock, given: tuple[Tensor, Tensor, Tensor]) -> Peer:
    dtype = DTYPE_NAMES[given[0].dtype]
    try:
        why = misattends(attend, *given, WINDOWS.sink, WINDOWS.recent, UNITS_OF_PEERS)
        return Peer(name, None if why else clock.time(lambda: attend(given[0])), why, dtype)
    except Exception as error:  # "No viable backend", a shape it does not take, or no memory
        return Peer(name, None, first_line(error), dtype)


def first_line(error: BaseException) -> str:
    """What it says, in one line."""
    if is_oom(error):
        return "out of memory"
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    expected = isinstance(error, KVCalError | RuntimeError | NotImplementedError)
    named = said if said and expected else f"{type(error).__name__}: {said}".removesuffix(": ")
    return one_line(named, LINE)


def _flashinfer(queries: Tensor, keys: Tensor, values: Tensor) -> Attend:
    """FlashInfer's batched decode over a paged cache of the same tokens."""
    import flashinfer

    batch, heads, tokens, dim = keys.shape
    pages = -(-tokens // PAGE)
    short = (0, 0, 0, pages * PAGE - tokens)
    both = torch.stack([torch.nn.functional.pad(x, short) for x in (keys, values)])  # (2, B, H, pages * PAGE, D)
    paged = both.view(2, batch, heads, pages, PAGE, dim).permute(1, 3, 0, 4, 2, 5).reshape(-1, 2, PAGE, heads, dim)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=keys.device) * pages
    indices = torch.arange(batch * pages, dtype=torch.int32, device=keys.device)
    last = torch.full((batch,), tokens - (pages - 1) * PAGE, dtype=torch.int32, device=keys.device)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=keys.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        indptr, indices, last, queries.shape[1], heads, dim, PAGE, q_data_type=queries.dtype, kv_data_type=keys.dtype
    )
    return lambda queries: wrapper.run(queries[:, :, 0], paged)[:, :, None]
