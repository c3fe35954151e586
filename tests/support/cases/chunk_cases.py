"""Prompts of deterministic mode in chunks, stored and attended to by kvcal's kernels over pages: cold, behind a prefix that
another request has stored, beside others; run by tests in a process of their own: `python -m
tests.support.cases.chunk_cases few`, in Triton's interpreter. Prints what is wrong, then how many cases there were.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kvcal_kernels.layout import BLOCK
from kvcal_vllm.gpu.layer import GPULayer, Scratch
from kvcal_vllm.gpu.step import step_of
from tests.support.cases.served_cases import CPU, DIM, HEADS, MOST_OFF, RATIO, layer_of
from tests.support.interpreted import run_cases

MOST = 16  # tokens of a row that the decode kernel takes


@dataclass(frozen=True)
class Case:
    """chunkings: how a prompt's tokens come, each way as many of them; the first, one chunk, is what others must give.
    prefix: blocks of it that another request has stored. Chunks end there, too, so that the rest comes in the same ones.
    """

    name: str
    chunkings: tuple[tuple[int, ...], ...]
    prefix: int = 1


def few() -> list[Case]:
    """Small enough for the interpreter."""
    chunkings = (64,), (31, 1, 16, 16), (32, 5, 11, 16)
    return [Case(name, chunkings) for name in ("higgs-4", "uniform-4", "transform")]


def large() -> list[Case]:
    """Of several splits, by both paths: chunks that the kernel takes, and longer ones."""
    chunkings = (1024,), (512, *[16] * 32), (511, 1, *[1] * 16, 300, 196), (*[64] * 8, 7, 9, 256, 240)
    names = "higgs-2", "higgs-4", "uniform-4", "uniform-8", "transform"
    return [Case(name, chunkings, 16) for name in names]


class Server:
    """A prompt's keys, values and queries, and pages that others have left."""

    def __init__(self, case: Case, seed: int, device: torch.device = CPU) -> None:
        self.layer, self.device = layer_of(case.name), device
        self.kernels, self.scratch = GPULayer(self.layer, device), Scratch(device)
        self.tokens, self.generator = sum(case.chunkings[0]), torch.Generator().manual_seed(seed)
        sizes = HEADS, HEADS, HEADS * RATIO
        self.key, self.value, self.query = (self._normal(self.tokens, heads) for heads in sizes)
        self.blocks = self.tokens // BLOCK
        shape = 4 * self.blocks, HEADS, BLOCK, self.layer.token_bytes
        self.pages = torch.zeros(shape, dtype=torch.uint8, device=device)  # as vLLM allocates them
        slots = torch.arange(4 * self.tokens, device=device)
        self.kernels.store(self.pages, slots, *(self._normal(len(slots), HEADS) for _ in range(2)))
        order = torch.randperm(4 * self.blocks, generator=self.generator, device=CPU)
        self.rows = order.view(4, self.blocks).int()  # pages of four requests

    def _normal(self, tokens: int, heads: int) -> Tensor:
        x = torch.randn(tokens, heads, DIM, generator=self.generator, dtype=torch.float32, device=CPU)
        return x.half().to(self.device)

    def answers(self, row: Tensor, chunks: tuple[int, ...], known: int = 0, beside: Tensor | None = None) -> Tensor:
        """Outputs (T, Hq, D) of a request's chunks behind its first `known` tokens; row: its pages. beside: pages of a request
        that takes one token in each step, in front of it.
        """
        outputs = []
        for first, stop in pairwise(accumulate(chunks, initial=known)):
            span = torch.arange(first, stop, device=CPU)
            slots = (row[span // BLOCK].long() * BLOCK + span % BLOCK).to(self.device)
            self.kernels.store(self.pages, slots, self.key[first:stop], self.value[first:stop])
            outputs.append(self._attended(row, first, stop, beside))
        return torch.cat(outputs)

    def _attended(self, row: Tensor, first: int, stop: int, beside: Tensor | None) -> Tensor:
        counts, lengths, rows = [stop - first], [stop], [row]
        query = self.query[first:stop]
        if beside is not None:
            counts, lengths, rows = [1, *counts], [BLOCK, *lengths], [beside, row]
            query = torch.cat([self.query[:1], query])
        starts = [0, *accumulate(counts)]
        there = [torch.tensor(x, dtype=torch.int32).to(self.device) for x in (lengths, starts)]
        table = torch.stack(rows).to(self.device)
        step = step_of(table, *there, starts, lengths, len(query), MOST, max(lengths))
        out = torch.zeros_like(query)
        self.kernels.decode(self.pages, step, query, DIM**-0.5, self.scratch, out)
        for part in step.prefills:
            self.kernels.prefill(self.pages, table, part, query, None, DIM**-0.5, self.scratch, out)
        return out[len(query) - (stop - first) :]

    def stored(self, row: Tensor) -> Tensor:
        """Bytes of a request's blocks."""
        return self.pages[row.long().to(self.device)]


def wrong(case: Case, seed: int = 0, device: torch.device = CPU) -> list[str]:
    """What differs from the prompt in one chunk: bytes that are stored, or outputs by more than the rounding of float16; and
    what differs at all where nothing but the pages does.
    """
    server = Server(case, seed, device)
    cold, other, third, beside = server.rows
    whole, stored = server.answers(cold, case.chunkings[0]), server.stored(cold)
    known, reasons = case.prefix * BLOCK, []

    def check(what: str, out: Tensor, row: Tensor, exact: Tensor | None = None) -> None:
        if not torch.equal(server.stored(row), stored):
            reasons.append(f"{what}: other bytes are stored")
        expected = whole[len(whole) - len(out) :].float()
        error = float((out.float() - expected).norm(dim=-1).div(expected.norm(dim=-1)).max())
        if not error <= 4 * MOST_OFF:
            reasons.append(f"{what}: off by {error:.1e}")
        if exact is not None and not torch.equal(out, exact):
            reasons.append(f"{what}: not the same bits")

    for chunks in case.chunkings[1:]:
        out = server.answers(other, chunks)
        check(f"chunks of {chunks}", out, other)
        rest = chunks[next(i for i, stop in enumerate(accumulate(chunks)) if stop == known) + 1 :]
        hit = torch.cat([cold[: case.prefix], third[case.prefix :]])  # the first request's pages, then others
        check(f"{chunks} behind a prefix", server.answers(hit, rest, known), hit, out[known:])
        check(f"{chunks} beside a request", server.answers(hit, rest, known, beside), hit)
    return reasons


def main(cases: list[Case]) -> None:
    for number, case in enumerate(cases):
        for why in wrong(case, number):
            print(f"{case}: {why}")
    print(len(cases))


if __name__ == "__main__":
    run_cases(main, few=few, large=large)
