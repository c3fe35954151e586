"""The best FP16 there is: decode attention over uncompressed keys and values by every backend of torch, and
FlashInfer.
"""

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

from ..models.hub import one_line
from ..models.memory import is_oom
from . import needed
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
# Times the error of plain products in the same dtype, plus so many of its units: for ours in 16 bits, for torch's own
# there, and in float32, whose kernels of torch sum in the order that a CPU likes best (34 seen over 32k tokens, 40 000
# and more where a token that a query points at is missing).
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


def unseen(queries: int, new: int, tokens: int, device: torch.device) -> Tensor:
    """(queries, tokens) bool, True where a query of calls of `new` each, whose tokens are the last, attends to
    none.
    """
    behind = new - 1 - torch.arange(queries, device=device) % new
    return torch.arange(tokens, device=device) >= (tokens - behind)[:, None]


def attention(queries: Tensor, keys: Tensor, values: Tensor, new: int = 1) -> Tensor:
    """Plain products and softmax in the dtype of the arguments: q (B, heads, Q, D), k and v (B, H, T, D) -> as q. new:
    queries of a call; the last one sees all tokens, each other one less than the next.
    """
    grouped = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
    scores = (grouped @ keys.transpose(-1, -2)) * keys.shape[-1] ** -0.5
    if new > 1:
        hidden = unseen(queries.shape[2], new, keys.shape[2], keys.device)
        scores = scores.masked_fill_(hidden.repeat(queries.shape[1] // keys.shape[1], 1), -torch.inf)
    out: Tensor = (scores.softmax(-1) @ values).view_as(queries)
    return out


class ExactAttention:
    """What attention over these keys and values is, of every row and query: in float64, and by plain products in the
    same dtype. A row at a time, and a call's `new` queries, so that its memory is that of one row's keys, values and
    scores.
    """

    def __init__(self, queries: Tensor, keys: Tensor, values: Tensor, new: int = 1) -> None:
        exact, plain = [], []
        for row in range(len(queries)):
            q, k, v = (x[row, None] for x in (queries, keys, values))
            wide = k.double(), v.double()
            calls = q.split(new, 2)
            exact.append(torch.cat([attention(one.double(), *wide, new) for one in calls], 2))
            plain.append(torch.cat([attention(one, k, v, new) for one in calls], 2))
        self.exact, self.dtype = torch.cat(exact), queries.dtype
        self.scales = self.exact.abs().amax((0, 1, 3))
        self.errors = self._off(torch.cat(plain))

    def _off(self, output: Tensor) -> Tensor:
        """The largest error of each query of a head."""
        return torch.stack([(a.double() - b).abs().amax((0, 2)) for a, b in zip(output, self.exact, strict=True)]).amax(
            0
        )

    def wrong(self, output: Tensor, units: float | Sequence[float]) -> str | None:
        """What is wrong with these outputs (B, heads, Q, D); None if they are as exact as they should be.

        Each query of a head may have twice the error of plain products, and `units` of the dtype's rounding. units: one
        number for all queries of a head, or one each; of float32 UNITS_OF_FLOAT32, because it is torch that attends
        there.
        """
        if self.dtype == torch.float32:
            units = UNITS_OF_FLOAT32
        least = torch.as_tensor(units, device=self.scales.device) * float(torch.finfo(self.dtype).eps)
        allowances = TOLERANCE * self.errors + least * self.scales
        for error, allowed, scale in torch.stack([self._off(output), allowances, self.scales], 1).tolist():
            if not error <= allowed:  # of NaN, too
                return f"check failed: off by {error:.2g}, allowed {allowed:.2g} (values up to {scale:.2g})"
        return None


def wrong(
    output: Tensor, queries: Tensor, keys: Tensor, values: Tensor, units: float | Sequence[float] = UNITS, new: int = 1
) -> str | None:
    """None if attention over these is as exact as `ExactAttention.wrong` asks. new: queries of a call."""
    return ExactAttention(queries, keys, values, new).wrong(output, units)


class Check:
    """A check of attention over these keys and values (B, H, T, D), computed once for all that is checked.

    It has the queries of a call (B, Hq, new, D), and those that `pointed` makes, each of these in all places of a call.
    """

    def __init__(self, queries: Tensor, keys: Tensor, values: Tensor, sink: int, recent: int) -> None:
        new = queries.shape[2]
        more = pointed(queries[:, :, :1], keys, sink, recent)
        self.every = [queries, *(one.expand_as(queries).contiguous() for one in more)]
        self.exact = ExactAttention(torch.cat(self.every, 2), keys, values, new)

    def misattends(self, attend: Attend, units: float = UNITS) -> str | None:
        """None if `attend` of them is as exact as `ExactAttention.wrong` asks."""
        others = [max(units, UNITS_POINTED)] * (len(self.every) - 1)
        each = [unit for unit in (units, *others) for _ in range(self.every[0].shape[2])]
        return self.exact.wrong(torch.cat([attend(one) for one in self.every], 2), each)


def pointed(queries: Tensor, keys: Tensor, sink: int, recent: int) -> list[Tensor]:
    """Queries shaped like these (B, Hq, 1, D) whose weight is about half on a few of the tokens.

    A query points at one token in 32 channels, at AT_MOST of them at most. Each query of a kv head has other tokens, in
    the order of `places`. There are as many queries as point at LEAST of the tokens.

    Over random keys and queries all tokens weigh much the same: that one is missing, or 128, is less than what bfloat16
    rounds. Scores are ln(tokens) + 4 for each of the chosen, by least squares, so that the others together keep a part.
    """
    batch, heads, _, dim = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    each = min(tokens, max(1, min(AT_MOST, dim // 32)))
    one = heads // kv_heads * each
    count = max(1, -(-LEAST // one)) * one
    chosen = places(tokens, sink, recent, count)
    at = torch.tensor([chosen[i % len(chosen)] for i in range(count)], device=keys.device)
    those = keys[:, :, at].cpu().double().view(batch, kv_heads, -1, each, dim)  # small; no solver's workspace on a GPU
    scores = torch.full((*those.shape[:-1], 1), (math.log(tokens) + 4) * dim**0.5, dtype=torch.float64, device="cpu")
    solution = torch.linalg.lstsq(
        those, scores, driver="gelsd"
    ).solution  # the shortest: of least weight on other tokens
    sets = solution.view(batch, kv_heads, -1, heads // kv_heads, dim).unbind(2)
    return [part.reshape(queries.shape).to(queries) for part in sets]


def places(tokens: int, sink: int, recent: int, count: int) -> list[int]:
    """Choose at most `count` of the tokens, those first that faulty code leaves out first.

    These are the newest token, the first of all, packed ones at both ends and in the middle, and the ends of both
    windows. Then come packed ones all over.
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
    """The dtypes to try: on a GPU the model's, or both of 16 bits next to a model of float32: what is called FP16 is
    never wider. On a CPU float32 too: there it may be the faster one.
    """
    if case.device.type != "cuda":
        return (*SIXTEEN, torch.float32)
    return (case.dtype,) if case.dtype in SIXTEEN else SIXTEEN


def _of_dtype(case: Case, clock: Clock, dtype: torch.dtype) -> list[Peer]:
    if why := needed.FreeMemory.of(clock).lacks(needed.peers(case, dtype)):
        return [Peer(f"every backend {DTYPE_NAMES[dtype]}", None, why, DTYPE_NAMES[dtype])]
    try:
        queries = case.queries().to(dtype)
        keys, values = (case.random(case.geometry.kv_heads, case.length, salt=2 + role).to(dtype) for role in (0, 1))
        check = Check(queries, keys, values, WINDOWS.sink, WINDOWS.recent)
    except Exception as error:  # no memory for them: compressed ones may still fit
        return [Peer(f"every backend {DTYPE_NAMES[dtype]}", None, first_line(error), DTYPE_NAMES[dtype])]
    peers = []
    for name, attend in _candidates(keys, values, case.group, case.new):
        peers.append(_tried(f"{name} {DTYPE_NAMES[dtype]}", attend, clock, queries, check))
    if case.device.type == "cuda" and importlib.util.find_spec("flashinfer"):
        try:
            attend = _flashinfer(queries, keys, values)
        except Exception as error:  # another version's interface, no compiler: a peer less, with a line that says so
            peers.append(Peer("flashinfer", None, first_line(error), DTYPE_NAMES[dtype]))
        else:
            peers.append(_tried(f"flashinfer {DTYPE_NAMES[dtype]}", attend, clock, queries, check))
    return peers


def _candidates(keys: Tensor, values: Tensor, ratio: int, new: int) -> Iterator[tuple[str, Attend]]:
    """Each backend with grouped heads as torch has them, and with a kv head's query heads as rows of one query. Several
    new tokens have a mask; flash, which takes none on a GPU, torch's own name for it.
    """
    from torch.nn.attention.bias import causal_lower_right

    tokens = keys.shape[2]
    mask = None if new == 1 else ~unseen(new, new, tokens, keys.device)
    rows_mask = None if mask is None else mask.repeat(ratio, 1)
    for name, backend in BACKENDS.items():
        bias = causal_lower_right(new, tokens) if new > 1 and name == "flash" else mask

        def gqa(queries: Tensor, backend: SDPBackend = backend, bias: Tensor | None = bias) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(queries, keys, values, attn_mask=bias, enable_gqa=True)

        def stacked(queries: Tensor, backend: SDPBackend = backend) -> Tensor:
            rows = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(rows, keys, values, attn_mask=rows_mask).reshape(queries.shape)

        yield f"sdpa {name}", gqa
        if ratio > 1:
            yield f"sdpa {name}, heads as rows", stacked


def _tried(name: str, attend: Attend, clock: Clock, queries: Tensor, check: Check) -> Peer:
    dtype = DTYPE_NAMES[queries.dtype]
    try:
        why = check.misattends(attend, UNITS_OF_PEERS)
        return Peer(name, None if why else clock.time(lambda: attend(queries)), why, dtype)
    except Exception as error:  # "No viable backend", a shape it does not take, or no memory
        return Peer(name, None, first_line(error), dtype)


def first_line(error: BaseException) -> str:
    """What it says, in one line."""
    if is_oom(error):
        return "out of memory"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    expected = isinstance(error, KVCalError | RuntimeError | NotImplementedError)
    named = first if first and expected else f"{type(error).__name__}: {first}".removesuffix(": ")
    return one_line(named, LINE)


def _flashinfer(queries: Tensor, keys: Tensor, values: Tensor) -> Attend:
    """FlashInfer's batched decode over a paged cache of the same tokens; of several new tokens its prefill behind
    others.
    """
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
    shape, kinds = (queries.shape[1], heads, dim, PAGE), {"q_data_type": queries.dtype, "kv_data_type": keys.dtype}
    if (new := queries.shape[2]) == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, *shape, **kinds)
        return lambda queries: wrapper.run(queries[:, :, 0], paged)[:, :, None]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=keys.device) * new
    several = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    several.plan(starts, indptr, indices, last, *shape, causal=True, **kinds)

    def attend(queries: Tensor) -> Tensor:
        out: Tensor = several.run(queries.transpose(1, 2).flatten(0, 1), paged)
        rows: Tensor = out.unflatten(0, (batch, new))
        return rows.transpose(1, 2)

    return attend
