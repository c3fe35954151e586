"""What codecs learn at run time from a row's own queries and keys, without depending on how the tokens came in.

Block j of a row is packed when the row has seen sink + (j + 1) * block + recent tokens. A statistic of that block is
one of exactly so many first real tokens, whether they came in one call or in many, alone or in a batch: sums are kept in
fixed point, where the order of adding does not matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvcal_kernels.device import on
from kvcal_kernels.quantise import factors_of

from ..codecs.base import Shape
from ..errors import KVCalError
from ..storage.ledger import Plan
from ..windows import Windows

Wants = Literal["q", "q_pre", "k"]
TAIL = 32  # newest columns of the last call that a crop can take back: more than speculative decoding rejects at a time
FIXED_POINT = 2.0**16  # steps of 1.5e-5; |q| up to 1e4 over 1e9 tokens stays below 2^63


class Prefixes:
    """For each block that a plan packs: how many of the call's columns come before it is due.

    columns: int64 (B, F), at least 1; the block's statistic is of everything before this call and of the first
    `columns` columns of it. tokens: int64 (B, F), the real tokens these are in all. valid: (B, Q) bool or None. flushed: (B,)
    blocks that this call really packs, the rest of F slots are idle. opening: (B,) rows without a block before this call.

    These lie on the device, copied there when first asked for, as most steps ask for none; those that begin with host_
    on the CPU.
    """

    def __init__(self, plan: Plan, windows: Windows, device: torch.device) -> None:
        assert plan.lengths is not None and plan.packed is not None
        self.flush = plan.flush
        number = plan.packed[:, None] + torch.arange(plan.flush)
        tokens = windows.sink + (number + 1) * windows.block + windows.recent
        ends = (tokens - plan.lengths[:, None]).clamp(1, plan.query)
        self._valid = None if plan.valid is None or bool(plan.valid.all()) else plan.valid
        if (
            self._valid is not None
        ):  # the column that holds the row's new token of that number; idle slots get the last one
            ends = (torch.searchsorted(self._valid.long().cumsum(1), ends) + 1).clamp_max(plan.query)
        self.windows, self._device, self._tokens = windows, device, tokens
        after = (plan.lengths + _count(plan) - windows.sink - windows.recent).div(windows.block, rounding_mode="floor")
        flushed = (after - plan.packed).clamp_min(0)
        # blocks of each row before this call, packed by it, and `columns`
        self.host_first, self.host_flushed, self.host_columns = plan.packed, flushed, ends

    @cached_property
    def columns(self) -> Tensor:
        return self.host_columns.to(self._device)

    @cached_property
    def tokens(self) -> Tensor:
        return self._tokens.to(self._device)

    @cached_property
    def valid(self) -> Tensor | None:
        return None if self._valid is None else self._valid.to(self._device)

    @cached_property
    def flushed(self) -> Tensor:
        return self.host_flushed.to(self._device)

    @cached_property
    def opening(self) -> Tensor:
        return (self.host_first == 0).to(self._device)

    def mask(self, x: Tensor) -> Tensor:
        """x (B, H, Q, ...) with the columns of pads zeroed."""
        if self.valid is None:
            return x
        shape = (self.valid.shape[0], 1, self.valid.shape[1], *[1] * (x.ndim - 3))
        return x.masked_fill(~self.valid.view(shape), 0)  # pads may hold anything, NaN too


def _count(plan: Plan) -> Tensor:
    """(B,) real tokens of the call."""
    assert plan.lengths is not None
    return torch.full_like(plan.lengths, plan.query) if plan.valid is None else plan.valid.sum(1)


class Statistic(ABC):
    """One row statistic of one layer. State tensors are (B, H, ...), created on first use."""

    name: ClassVar[str]
    wants: ClassVar[Wants]

    def __init__(self, shape: Shape, argument: str = "") -> None:
        self.shape = shape
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def observe(self, x: Tensor, at: Prefixes) -> Tensor | None:
        """x (B, heads, Q, D): queries or keys of this call -> the statistic of each block packed in it, (B, H, F or 1, ...)
        float32, or None if none is packed.
        """

    def current(self) -> Tensor | None:
        """(B, H, 1, ...) what decoding needs; None for what only encoding does."""
        return None

    def select(self, rows: Tensor) -> None:
        self.state = {name: t[rows.to(t.device)] for name, t in self.state.items()}

    def move(self, device: torch.device | str) -> None:
        self.state = {name: t.to(device, non_blocking=True) for name, t in self.state.items()}

    def grouped(self, q: Tensor) -> Tensor:
        """Queries (B, heads, Q, D) -> (B, kv heads, group, Q, D)."""
        if q.shape[1] % self.shape.heads:
            raise KVCalError(f"{q.shape[1]} query heads do not divide among {self.shape.heads} kv heads")
        return torch.unflatten(q, 1, (self.shape.heads, -1))


class Summed(Statistic):
    """A statistic of sums, from which the newest tokens can be taken out again."""

    def remember(self, x: Tensor, at: Prefixes) -> None:
        """Keep the end of what `observe` has just seen, so that a crop can take it back."""
        self.state["tail"] = at.mask(x)[:, :, -TAIL:].clone()

    @property
    def tail(self) -> int:
        """How many of the newest columns a crop can take back."""
        return int(self.state["tail"].shape[2]) if "tail" in self.state else 0

    def crop(self, count: int) -> None:
        """Take back the newest `count` columns, as far as they are in the tail; what is older stays in the sums."""
        if number := min(count, self.tail):
            self._forget(self.state["tail"][:, :, -number:])
            self.state["tail"] = self.state["tail"][:, :, :-number].clone()

    @abstractmethod
    def _forget(self, x: Tensor) -> None:
        """x (B, heads, columns, D), pads zero: undo what `observe` added for them."""


class QueryMagnitude(Summed):
    """Mean |q| per kv head and channel, mean over the query heads that share the head (MixKVQ, importance I_c).

    Of all tokens so far; with the argument `recent` of those since the block before became due.
    """

    name = "query_abs"
    wants: ClassVar[Wants] = "q"

    def __init__(self, shape: Shape, argument: str = "") -> None:
        super().__init__(shape, argument)
        if argument not in ("", "recent"):
            raise KVCalError(f"statistic query_abs:{argument}: allowed are query_abs and query_abs:recent")
        self.recent = argument == "recent"

    def observe(self, x: Tensor, at: Prefixes) -> Tensor | None:
        sums = at.mask(self._steps(x)).cumsum(2)  # (B, H, Q, D)
        if not self.state:
            self.state["total"] = torch.zeros_like(sums[:, :, 0])
            if self.recent:
                self.state["before"] = torch.zeros_like(sums[:, :, 0])
        total = self.state["total"]
        self.state["total"] = total + sums[:, :, -1]
        if not at.flush:
            return None
        index = (at.columns - 1)[:, None, :, None].expand(-1, sums.shape[1], -1, sums.shape[3])
        until = total[:, :, None] + sums.gather(2, index)
        tokens = at.tokens
        if self.recent:
            until, tokens = self._since(until, tokens, at)
        return until.float() / (FIXED_POINT * tokens[:, None, :, None].float())

    def _steps(self, x: Tensor) -> Tensor:
        """(B, heads, Q, D) -> int64 (B, H, Q, D)."""
        mean: Tensor = self.grouped(x.float().abs()).mean(2)
        return (mean * FIXED_POINT).round().long()

    def _forget(self, x: Tensor) -> None:
        self.state["total"] = self.state["total"] - self._steps(x).sum(2)
        if self.recent:  # of a block that counted some of them
            self.state["before"] = torch.minimum(self.state["before"], self.state["total"])

    def _since(self, until: Tensor, tokens: Tensor, at: Prefixes) -> tuple[Tensor, Tensor]:
        """Sums since the block before became due, and their tokens."""
        steps = torch.cat([self.state["before"][:, :, None], until], 2)  # (B, H, 1 + F, D)
        last = at.flushed[:, None, None, None].expand(-1, steps.shape[1], 1, steps.shape[3])
        self.state["before"] = steps.gather(2, last)[:, :, 0]
        opening = at.opening[:, None] & (torch.arange(at.flush, device=tokens.device) == 0)
        return steps.diff(dim=2), torch.where(opening, tokens, self.shape.block)


class KeyScale(Statistic):
    """sqrt(max |K_c|) per kv head and channel over the tokens seen when the row's first block is due (InnerQ section
    4.3), rounded to float16 and fixed from then on: blocks are decoded with the factor they were encoded with.
    """

    name = "key_scale"
    wants: ClassVar[Wants] = "k"

    def observe(self, x: Tensor, at: Prefixes) -> Tensor | None:
        size = at.mask(x.float().abs())
        if not self.state:
            self.state["peak"] = torch.zeros_like(size[:, :, 0])
            self.state["fixed"] = torch.zeros(size.shape[0], dtype=torch.bool, device=x.device)
        if at.flush:  # rows whose first block this call packs count until it is due
            until = torch.where(at.opening & (at.flushed > 0), at.columns[:, 0], x.shape[2])
            late = torch.arange(x.shape[2], device=x.device) >= until[:, None]
            size = size.masked_fill(late[:, None, :, None], 0)
        peak, fixed = torch.maximum(self.state["peak"], size.amax(2)), self.state["fixed"]
        self.state["peak"] = torch.where(fixed[:, None, None], self.state["peak"], peak)
        if not at.flush:
            return None
        self.state["fixed"] = fixed | (at.flushed > 0)
        return self.current()

    def renew(self, keys: Tensor, occupied: Tensor, untouched: Tensor) -> None:
        """After a crop: a maximum cannot be taken back, but the cache has all keys that count as long as nothing is packed.

        keys (B, H, S, D): the exact ones; occupied (B, S) bool: slots that hold a token; untouched (B,) bool: rows that have
        no other tokens, whose factor is free again.
        """
        if self.state:
            peak = keys.float().abs().masked_fill(~occupied[:, None, :, None], 0).amax(2) if keys.shape[2] else 0.0
            self.state["peak"] = torch.where(untouched[:, None, None], peak, self.state["peak"])
            self.state["fixed"] = self.state["fixed"] & ~untouched

    def current(self) -> Tensor | None:
        if not self.state:
            return None
        return factors_of(self.state["peak"])[:, :, None]


QUERY_STEP = 2.0**-10  # queries in a Gram matrix are rounded to this and end at +-256: 18 bits and a sign
QUERY_LIMIT = 2.0**18
COLUMNS = 4096  # of a call at a time, in float64
STOOD = "stood"  # of a subspace's state: rows whose fit is of all queries in their sum, see `standing`
GRAM_ROWS = 1 << 17  # query vectors a product: sums of so many products of 2^36 are below 2^53, exact in float64


class QuerySubspace(Summed):
    """Singular values times right singular vectors of a row's queries so far, per kv head (SQuat Algorithm 1, line 6).

    Arguments: R or R:length. A block's value is (R, D) float32, row i the i-th largest singular value of Q (tokens x query
    heads of the kv head, D) times its vector, largest entry positive; rows beyond the rank of Q are zero. With `length` it
    is divided by the root of the number of query vectors: root mean squares instead of sums.

    Fitted for block 0 and whenever the tokens before a due block have doubled since (`refits`); blocks in between use the
    fit before them. Q'Q is a sum of integers: products of fixed-point queries are summed exactly in float64, and in int64
    from product to product, 2^63 / 2^36 = 1.3e8 query vectors of the largest entries, so the order of adding never shows.
    A NaN counts as zero: its keys are refused where they are packed.

    Steps that a device does by itself are not seen (`standing`): their queries are in no sum, and a fit that falls among them
    is left out; with `length` later fits still divide by all tokens.
    """

    name = "query_subspace"
    wants: ClassVar[Wants] = "q"

    def __init__(self, shape: Shape, argument: str = "") -> None:
        super().__init__(shape, argument)
        rank, _, unit = argument.partition(":")
        if not rank.isdecimal() or int(rank) < 1 or unit not in ("", "length"):
            raise KVCalError(
                f"statistic {self.name}:{argument}: allowed are {self.name}:RANK and {self.name}:RANK:length"
            )
        self.rank, self.by_length = int(rank), unit == "length"

    def observe(self, x: Tensor, at: Prefixes) -> Tensor | None:
        batch, dim, group = x.shape[0], x.shape[3], x.shape[1] // self.shape.heads
        self.grouped(x[:, :, :0])  # refuses heads that do not divide
        if not self.state:
            wide = (batch, self.shape.heads)
            self.state["gram"] = torch.zeros(*wide, dim, dim, dtype=torch.int64, device=x.device)
            self.state["fitted"] = torch.zeros(*wide, self.rank, dim, device=x.device)
        self.state.pop(STOOD, None)
        counted, fits = torch.zeros(batch, dtype=torch.int64), [self.state["fitted"]]
        use = torch.zeros(batch, at.flush, dtype=torch.int64)  # which of the fits each block's is
        for number in refits(at.windows, int((at.host_first + at.host_flushed).max()) - 1):
            slot = number - at.host_first
            due = (slot >= 0) & (slot < at.host_flushed)
            if bool(due.any()):
                columns = at.host_columns.gather(1, slot.clamp(0, at.flush - 1)[:, None])[:, 0]
                until = torch.where(due, columns, counted)
                self._count(x, at, counted, until)
                self._refit(due, due_tokens(at.windows, number) * group)
                use[due[:, None] & (torch.arange(at.flush) >= slot[:, None])] = len(fits)
                fits.append(self.state["fitted"])
                counted = until
        self._count(x, at, counted, torch.full_like(counted, x.shape[2]))
        if not at.flush:
            return None
        rows = torch.arange(batch, device=x.device)[:, None]
        return torch.stack(fits)[use.to(x.device), rows].transpose(1, 2)

    def _count(self, x: Tensor, at: Prefixes, start: Tensor, stop: Tensor) -> None:
        """Add the queries of each row's columns start to stop, (B,) int64 on the CPU."""
        low, high = int(start.min()), int(stop.max())
        step = max(1, min(COLUMNS, GRAM_ROWS * self.shape.heads // x.shape[1]))
        for begin in range(low, high, step):
            end = min(begin + step, high)
            inside = None if at.valid is None else at.valid[:, begin:end]
            if int(start.max()) > begin or int(stop.min()) < end:
                columns = torch.arange(begin, end)
                counts = ((columns >= start[:, None]) & (columns < stop[:, None])).to(x.device)
                inside = counts if inside is None else counts & inside
            self.state["gram"] = self.state["gram"] + self._gram(x[:, :, begin:end], inside)

    def _gram(self, x: Tensor, inside: Tensor | None = None) -> Tensor:
        """int64 (B, H, D, D) of queries (B, heads, columns, D); inside (B, columns) bool: the columns that count."""
        part = self.grouped(x).double().div(QUERY_STEP).round_().clamp_(-QUERY_LIMIT, QUERY_LIMIT).nan_to_num_(0)
        if inside is not None:
            part.masked_fill_(~inside[:, None, None, :, None], 0)
        part = part.flatten(2, 3)
        return (part.transpose(-1, -2) @ part).long()

    def _forget(self, x: Tensor) -> None:
        self.state["gram"] = self.state["gram"] - self._gram(x)
        self.state.pop(STOOD, None)

    def _refit(self, due: Tensor, vectors: int) -> None:
        fitted = self.state["fitted"].clone()
        for row in due.nonzero().flatten().tolist():
            fitted[row] = self._fit(row, vectors)
        self.state["fitted"] = fitted

    def _fit(self, row: int, vectors: int) -> Tensor:
        """(H, R, D) float32 of a row's sums so far, of so many query vectors a kv head."""
        unit = QUERY_STEP / (vectors**0.5 if self.by_length else 1.0)
        return (subspace(self.state["gram"][row].double(), self.rank) * unit).float()

    def standing(self, blocks: Tensor, counted: Tensor, group: int) -> Tensor:
        """(B, H, R, D) of blocks that are packed unseen from now on: the last fit; rows without a block get one of their
        queries so far, which stays theirs until more are seen. blocks, counted (B,) on the CPU: packed blocks, tokens whose
        queries are in the sums; group: query heads of a kv head.
        """
        stood = self.state.get(STOOD)
        if stood is None:
            stood = torch.zeros(len(blocks), dtype=torch.bool, device=self.state["gram"].device)
        none = ((blocks == 0) & (counted > 0) & ~stood.to("cpu")).nonzero().flatten().tolist()
        if none:
            fitted, stood = self.state["fitted"].clone(), stood.clone()
            for row in none:
                fitted[row], stood[row] = self._fit(row, int(counted[row]) * group), True
            self.state |= {"fitted": fitted, STOOD: stood}
        return self.state["fitted"]


class QuerySubspaceBeforeRope(QuerySubspace):
    """The same of queries before RoPE."""

    name = "query_subspace_pre"
    wants: ClassVar[Wants] = "q_pre"


def due_tokens(windows: Windows, number: int) -> int:
    """Real tokens of a row when that block is packed."""
    return windows.sink + (number + 1) * windows.block + windows.recent


def refits(windows: Windows, last: int) -> list[int]:
    """Blocks up to `last` for which a subspace is fitted: 0, and each first one with twice the tokens of the fit before."""
    numbers, number = [], 0
    while number <= last:
        numbers.append(number)
        missing = 2 * due_tokens(windows, number) - windows.sink - windows.recent
        number = -(-missing // windows.block) - 1
    return numbers


def principal(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Q'Q (..., D, D) float64 -> its eigenvalues, largest first, (..., D), and vectors as rows (..., D, D).

    Eigenvalues below float64's noise are zero, each vector's largest entry is positive. One matrix at a time: a batched
    solver may choose its algorithm, and so last bits, by the number of matrices. The solver's handle and memory are those of
    the current GPU, which may be another one than the matrices'.
    """
    dim = gram.shape[-1]
    with on(gram.device):
        spectra = [torch.linalg.eigh(one) for one in gram.reshape(-1, dim, dim)]
    values = torch.stack([f.eigenvalues.flip(0) for f in spectra]).view(gram.shape[:-1])
    rows = torch.stack([f.eigenvectors.T.flip(0) for f in spectra]).view(gram.shape)
    values = torch.where(values > 2.0**-52 * dim * values[..., :1], values, 0.0)
    return values, rows * rows.gather(-1, rows.abs().argmax(-1, keepdim=True)).sign()


def subspace(gram: Tensor, rank: int) -> Tensor:
    """Q'Q (..., D, D) float64 -> singular values of Q times its right singular vectors (..., rank, D), zero beyond D."""
    values, rows = principal(gram)
    scaled = (values.sqrt()[..., None] * rows)[..., :rank, :]
    return torch.nn.functional.pad(scaled, (0, 0, 0, rank - scaled.shape[-2]))


STATISTICS: dict[str, type[Statistic]] = {
    s.name: s for s in (QueryMagnitude, KeyScale, QuerySubspace, QuerySubspaceBeforeRope)
}


def statistic(name: str, shape: Shape) -> Statistic:
    """A statistic by the name that codecs ask for, NAME or NAME:ARGUMENT."""
    kind, _, argument = name.partition(":")
    if kind not in STATISTICS:
        raise KVCalError(f"statistic {name!r}: known are {', '.join(STATISTICS)}")
    return STATISTICS[kind](shape, argument)
