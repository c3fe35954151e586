"""Batches that vLLM would hand over, stored and attended to by kvcal's kernels, and what must come out; run by tests in a
process of their own: `python -m tests.support.cases.served_cases few|small`, in Triton's interpreter. Prints what is
wrong, then how many cases there were.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcal_artifacts.codecs import Shape
from kvcal_artifacts.scheme import LayerCodecs
from kvcal_kernels.attention import reference
from kvcal_kernels.layout import BLOCK
from kvcal_kernels.quantise.pages import store
from kvcal_vllm import presets
from kvcal_vllm.attention import Step as HostStep
from kvcal_vllm.attention import attend
from kvcal_vllm.gpu import layer as gpu_layer
from kvcal_vllm.gpu.layer import GPULayer, Scratch
from kvcal_vllm.gpu.step import Step, step_of
from kvcal_vllm.paging import PagedLayer
from tests.support.cases.transform_cases import codec_of
from tests.support.interpreted import run_cases

HEADS, RATIO, DIM = 2, 2, 64
MOST_OFF = 2e-3  # of an output in float16, relative
CPU = torch.device("cpu")
PADDING = 2  # tokens at the end of a step, as of a CUDA graph that is larger


class References:
    """The kernels' references under the names of the kernels; counts launches."""

    def __init__(self) -> None:
        self.launches: list[str] = []

    def store(self, *arguments: Any) -> None:
        self.launches.append("store")
        store(*arguments)

    def attend_pages(self, *arguments: Any, workspace: Any, out: torch.Tensor) -> None:
        self.launches.append("attend")
        *given, _, _ = arguments
        count = int(given[5][-1])
        out[:count] = reference.attend_pages(given[0][:count], *given[1:])

    def replace_kernels(self, patch: pytest.MonkeyPatch) -> None:
        """Let the plug-in have references for kernels."""
        for module, name in (
            (gpu_layer.attention, "fast"), (gpu_layer.attention, "transform"), (gpu_layer.storing, "fast")
        ):  # fmt: skip
            patch.setattr(module, name, lambda: self)

    class Workspace:
        def __init__(self, device: torch.device) -> None:
            self.partial = torch.empty(0, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Case:
    """steps: how many new tokens each row has in each step. shared: pages that all rows begin with, stored by the first. most:
    tokens of a row that the decode kernel takes. heads: of a process that has some of `HEADS`.
    """

    name: str
    steps: tuple[tuple[int, ...], ...]
    deterministic: bool = True
    shared: int = 0
    most: int = 16


def small() -> list[Case]:
    """Ragged batches, chunks that end anywhere, 1 to 16 queries, a shared prefix, rows and steps without tokens."""
    return [
        Case("higgs-2", ((33, 5, 0), (1, 16, 31), (0, 0, 0)), shared=1),
        Case("higgs-4", ((40, 1), (1, 1), (7, 34)), deterministic=False, most=1),
        Case("turboquant-4-3", ((35, 2), (1, 0))),
        Case("uniform-4", ((1, 31), (2, 37)), deterministic=False, most=1),
        Case("transform", ((3, 40), (1, 1))),
    ]


def few() -> list[Case]:
    """Cases that take little time in the interpreter."""
    return [Case("higgs-2", ((2, 33),), most=4), Case("transform", ((1, 2),))]


def layer_of(name: str) -> PagedLayer:
    if name != "transform":
        return PagedLayer(presets.codecs(name, Shape(HEADS, DIM, BLOCK)), multiple=2)
    return PagedLayer(
        LayerCodecs(codec_of("key", (3, 5, 9, 6), DIM, HEADS), codec_of("value", (2, 11, 4, 9), DIM, HEADS)), 2
    )


class Batch:
    """Rows in pages of a cache that others have left. `table` is wider than any row, with pages of others behind its own."""

    def __init__(self, case: Case, seed: int, device: torch.device = CPU) -> None:
        self.device = device
        self.case, self.layer, self.rows = case, layer_of(case.name), len(case.steps[0])
        g = torch.Generator().manual_seed(seed)
        width = -(-max(sum(counts) for counts in zip(*case.steps, strict=True)) // BLOCK) + case.shared + 1
        order = torch.randperm(self.rows * width, generator=g, device=CPU)
        self.table = order.view(self.rows, width).int()
        self.table[:, : case.shared] = self.table[0, : case.shared]
        shape = self.rows * width, HEADS, BLOCK, self.layer.token_bytes
        pages = torch.randint(0, 256, shape, dtype=torch.uint8, generator=g, device=CPU)
        self.pages = pages.view(torch.float16)
        self.lengths = [case.shared * BLOCK] * self.rows
        self.kernels, self.scratch = GPULayer(self.layer, device), Scratch(device)
        self.generator = g

    def tokens(self, count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, DIM, generator=self.generator, dtype=torch.float32, device=CPU).half()

    def slots(self, row: int, first: int, stop: int) -> Tensor:
        at = torch.arange(first, stop, device=CPU)
        return self.table[row, at // BLOCK].long() * BLOCK + at % BLOCK

    def share(self) -> None:
        """Store what all rows begin with."""
        count = self.case.shared * BLOCK
        if count:
            self.store(self.slots(0, 0, count), self.tokens(count, HEADS), self.tokens(count, HEADS))

    def store(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        pages = self.pages.to(self.device)
        self.kernels.store(pages, *(x.to(self.device) for x in (slots, key, value)))
        self.pages = pages.cpu()

    def step(self, counts: tuple[int, ...]) -> str | None:
        """Take a step with so many new tokens of each row; return what is wrong with it."""
        before, self.lengths = self.lengths, [a + b for a, b in zip(self.lengths, counts, strict=True)]
        spans = [self.slots(*one) for one in zip(range(self.rows), before, self.lengths, strict=True)]
        slots = torch.cat([*spans, torch.full((PADDING,), -1, device=CPU)])
        key, value, query = (self.tokens(len(slots), heads) for heads in (HEADS, HEADS, HEADS * RATIO))
        expected_pages = self.pages.clone()
        self.store(slots, key, value)
        self.layer.store(expected_pages, slots, key, value)
        different = self.pages.view(torch.uint8) != expected_pages.view(torch.uint8)
        if float(different.float().mean()) > (2e-3 if self.case.name == "transform" else 0):
            return f"{int(different.sum())} bytes are stored differently"
        out, pages, there = (x.to(self.device) for x in (torch.zeros_like(query), self.pages, query))
        step = self.device_step(counts, len(slots))
        self.kernels.decode(pages, step, there, DIM**-0.5, self.scratch, out)
        exact = None if self.case.deterministic else (key.to(self.device), value.to(self.device))
        for part in step.prefills:
            self.kernels.prefill(pages, step.table, part, there, exact, DIM**-0.5, self.scratch, out)
        out = out.cpu()
        return self.off(counts, (key, value), query, out)

    def device_step(self, counts: tuple[int, ...], tokens: int) -> Step:
        starts = [0, *accumulate(counts)]
        lengths, device_starts = (torch.tensor(x, dtype=torch.int32, device=CPU) for x in (self.lengths, starts))
        longest = max(self.lengths)
        device = (x.to(self.device) for x in (self.table, lengths, device_starts))
        return step_of(*device, starts, self.lengths, tokens, self.case.most, longest)

    def off(self, counts: tuple[int, ...], fresh: tuple[Tensor, Tensor], query: Tensor, out: Tensor) -> str | None:
        """Beside the backend of a CPU, in float32, over the same pages; chunks of the default mode with their exact tokens."""
        starts = (0, *accumulate(counts))
        host = HostStep(starts, tuple(self.lengths), self.table.long())
        packed = attend(self.layer, self.pages, host, query, DIM**-0.5)
        expected = packed
        if not self.case.deterministic:
            expected = attend(self.layer, self.pages, host, query, DIM**-0.5, fresh)
            for row, count in enumerate(counts):
                if count <= self.case.most and not any(n > self.case.most for n in counts[:row]):
                    expected[starts[row] : starts[row + 1]] = packed[starts[row] : starts[row + 1]]
        error = float((out.float() - expected).norm() / expected.norm().clamp_min(1e-9))
        return f"off by {error:.2e}" if error > MOST_OFF else None


def main(cases: list[Case]) -> None:
    for number, case in enumerate(cases):
        batch = Batch(case, number)
        batch.share()
        for counts in case.steps:
            if why := batch.step(counts):
                print(f"{case}, {counts}: {why}")
    print(len(cases))


if __name__ == "__main__":
    run_cases(main, few=few, small=small)
