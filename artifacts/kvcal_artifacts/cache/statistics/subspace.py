"""Subspaces of a row's queries: a run-time statistic, and the spectra behind it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvcal_kernels.device import on

from ...codecs import Shape
from ...errors import KVCalError
from .base import Summed, Wants
from .prefixes import Prefixes, Span

QUERY_STEP = 2.0**-10  # queries in a Gram matrix are rounded to this and end at +-256: 18 bits and a sign
QUERY_LIMIT = 2.0**18
COLUMNS = 4096  # of a call at a time, in float64
STOOD = "stood"  # of a subspace's state: rows whose fit is of all queries in their sum, see `standing`
GRAM_ROWS = 1 << 17  # query vectors of a product: sums of so many products of 2^36 are below 2^53, exact in float64


class QuerySubspace(Summed):
    """Singular values times right singular vectors of a row's queries so far, per kv head (SQuat Algorithm 1, line 6).

    Arguments: R or R:length. A block's value is (R, D) float32. Q is (tokens x query heads of the kv head, D). Row i is
    its i-th largest singular value times the vector, largest entry positive; rows beyond the rank of Q are zero. With
    `length` it is divided by the root of the number of query vectors: root mean squares instead of sums.

    It is fitted for block 0 and whenever the tokens before a due block have doubled since (`refits`); blocks in between
    use the fit before them. Q'Q is a sum of integers, so the order of adding never shows. Products of fixed-point
    queries are summed exactly in float64, and from product to product in int64. That suffices for 2^63 / 2^36 = 1.3e8
    query vectors of the largest entries. A NaN counts as zero: its keys are refused where they are packed.

    Steps that a device does by itself are not observed (`standing`). Their queries are in no sum, and a fit that falls
    among them is left out. With `length` later fits still divide by all tokens.
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
            self.state["fitted"] = torch.zeros(*wide, self.rank, dim, device=x.device, dtype=torch.float32)
        self.state.pop(STOOD, None)
        fits = [self.state["fitted"]]
        for refit in at.refitting.refits:
            self._count(x, at, refit.span)
            self._refit(refit.rows, refit.tokens * group)
            fits.append(self.state["fitted"])
        self._count(x, at, at.refitting.rest)
        if not at.flush:
            return None
        if len(fits) == 1:
            return fits[0][:, :, None].expand(-1, -1, at.flush, -1, -1)
        rows = torch.arange(batch, device=x.device)[:, None]
        return torch.stack(fits)[at.refitting.use.to(x.device), rows].transpose(1, 2)

    def _count(self, x: Tensor, at: Prefixes, span: Span) -> None:
        """Add the queries of each row's columns in the span."""
        low, latest_start, first_stop, high = span.bounds
        step = max(1, min(COLUMNS, GRAM_ROWS * self.shape.heads // x.shape[1]))
        for begin in range(low, high, step):
            end = min(begin + step, high)
            inside = None if at.valid is None else at.valid[:, begin:end]
            if latest_start > begin or first_stop < end:
                columns = torch.arange(begin, end, device="cpu")
                counts = ((columns >= span.start[:, None]) & (columns < span.stop[:, None])).to(x.device)
                inside = counts if inside is None else counts & inside
            self.state["gram"] = self.state["gram"] + self._gram(x[:, :, begin:end], inside)

    def _gram(self, x: Tensor, inside: Tensor | None = None) -> Tensor:
        """The Gram matrices int64 (B, H, D, D) of queries (B, heads, columns, D).

        inside: (B, columns) bool, which count.
        """
        part = self.grouped(x).double().div(QUERY_STEP).round_().clamp_(-QUERY_LIMIT, QUERY_LIMIT).nan_to_num_(0)
        if inside is not None:
            part.masked_fill_(~inside[:, None, None, :, None], 0)
        part = part.flatten(2, 3)
        return (part.transpose(-1, -2) @ part).long()

    def _forget(self, x: Tensor) -> None:
        self.state["gram"] = self.state["gram"] - self._gram(x)
        self.state.pop(STOOD, None)

    def _refit(self, rows: list[int], vectors: int) -> None:
        if len(rows) == len(self.state["fitted"]):
            self.state["fitted"] = self._fit(slice(None), vectors)
            return
        fitted = self.state["fitted"].clone()
        fitted[rows] = self._fit(rows, vectors)
        self.state["fitted"] = fitted

    def _fit(self, rows: int | list[int] | slice, vectors: int) -> Tensor:
        """The fit (rows, H, R, D) float32 of rows' sums so far, over so many query vectors per kv head; of a number
        (H, R, D).
        """
        unit = QUERY_STEP / (vectors**0.5 if self.by_length else 1.0)
        return (subspace(self.state["gram"][rows].double(), self.rank) * unit).float()

    def standing(self, blocks: Tensor, counted: Tensor, group: int) -> Tensor:
        """The subspaces (B, H, R, D) of blocks that are packed without the host from now on: the last fit.

        Rows without a block get a fit of their queries so far, which stays theirs until more come. blocks, counted (B,)
        on the CPU: packed blocks, and tokens whose queries are in the sums; group: query heads per kv head.
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
    """QuerySubspace of queries before RoPE."""

    name = "query_subspace_pre"
    wants: ClassVar[Wants] = "q_pre"


def principal(gram: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvalues (..., D) of Q'Q (..., D, D) float64, largest first, and eigenvectors as rows (..., D, D).

    Eigenvalues below float64's noise are zero, each vector's largest entry is positive. It is one matrix at a time: a
    batched solver may choose its algorithm, and so last bits, by the number of matrices. The solver's handle and memory
    are those of the current GPU, which may be another one than the matrices'.
    """
    dim = gram.shape[-1]
    with on(gram.device):
        spectra = [torch.linalg.eigh(one) for one in gram.reshape(-1, dim, dim)]
    values = torch.stack([f.eigenvalues.flip(0) for f in spectra]).view(gram.shape[:-1])
    rows = torch.stack([f.eigenvectors.T.flip(0) for f in spectra]).view(gram.shape)
    values = torch.where(values > 2.0**-52 * dim * values[..., :1], values, 0.0)
    return values, rows * rows.gather(-1, rows.abs().argmax(-1, keepdim=True)).sign()


def subspace(gram: Tensor, rank: int) -> Tensor:
    """Singular values of Q times its right singular vectors (..., rank, D), zero beyond D; gram: Q'Q, float64."""
    values, rows = principal(gram)
    scaled = (values.sqrt()[..., None] * rows)[..., :rank, :]
    return torch.nn.functional.pad(scaled, (0, 0, 0, rank - scaled.shape[-2]))
