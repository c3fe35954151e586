"""One layer over vLLM's pages by kvcal's kernels: `paging.PagedLayer` and `attention.attend` for a GPU.

Letters: P pages, H kv heads, Hq query heads, D head_dim, T tokens of a step, R rows (requests) of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from kvcal_artifacts.errors import KVCalError
from kvcal_kernels import attention
from kvcal_kernels.layout import BLOCK, Basis, Constants, Grid, PageForm, TransformForm, decode, read_pages
from kvcal_kernels.quantise import GridRule
from kvcal_kernels.quantise import pages as storing
from kvcal_kernels.quantise.pages import StoreRule, TransformRule

from ..paging import PagedLayer
from ..sides import FormSide, Side
from .step import Prefill, Step

AT_ONCE = 256  # pages that are dequantised together: float32 of 8,192 tokens


class Scratch:
    """Memory that all layers share: where a prompt's dequantised keys and values lie, and where programs of a decode
    step leave partial results.

    graphs: of steps that a CUDA graph holds, which knows where it lies. eager: of all other steps.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graphs, self.eager = (attention.fast().Workspace(device) for _ in range(2))
        self._dense: list[Tensor] = []
        self._replaced: list[Tensor] = []  # memory of graphs that were captured before theirs grew

    @contextmanager
    def reserving(self) -> Iterator[None]:
        """Launches meanwhile take the memory of graphs, which may grow: what it was before stays, too."""
        before, eager = list(vars(self.graphs).values()), self.eager
        self.eager = self.graphs
        try:
            yield
        finally:
            self.eager = eager
            now = {x.data_ptr() for x in vars(self.graphs).values()}
            self._replaced += [x for x in before if x.numel() and x.data_ptr() not in now]

    def dense(self, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two tensors (H, T, D), of keys and of values, that hold anything."""
        size = heads * tokens * dim
        if not self._dense or self._dense[0].numel() < size or self._dense[0].dtype != dtype:
            self._dense = []  # freed before their successors are allocated
            self._dense = [torch.empty(size, dtype=dtype, device=self.device) for _ in range(2)]
        key, value = (x[:size].view(heads, tokens, dim) for x in self._dense)
        return key, value


class _Sides(NamedTuple):
    """How keys and values of a layer are coded, and what decodes them, on a device."""

    rules: tuple[StoreRule, StoreRule]
    constants: tuple[Constants, Constants]


class GPULayer:
    """The kernels of one layer on a device. Its pages are those of a PagedLayer: uint8, or a dtype of one or two bytes,
    (P, H, 32, C).

    Nothing here waits for the device, except for `prefill`, which no CUDA graph holds. What a kernel cannot refuse
    (numbers beyond float16) is stored as it comes.
    """

    def __init__(self, layer: PagedLayer, device: torch.device) -> None:
        key, value = layer.key, layer.value
        if not isinstance(key, FormSide) or not isinstance(value, FormSide):
            raise KVCalError("a layer that no kernel reads in pages; the plan must refuse it")
        self.form, self.device = PageForm(key.form, value.form), device
        self._rules, self._constants = _sides(key, value, device)

    @property
    def _kernels(self) -> ModuleType:
        return attention.transform() if isinstance(self.form.keys, TransformForm) else attention.fast()

    def store(self, pages: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Pack tokens key, value (T, H, D) into slots int64 (T,) of pages, 32 * page + place, in one launch, or two of
        the transform codec; negative slots are padding.
        """
        storing.fast().store(key, value, self._raw(pages), self.form, slots, *self._rules)

    def decode(self, pages: Tensor, step: Step, query: Tensor, scale: float, scratch: Scratch, out: Tensor) -> None:
        """Attention of the step's decode rows over all that their pages hold, the step's tokens included, in one launch
        over vLLM's block table. query (T, Hq, D), out (T, Hq, D) contiguous: of the whole step.
        """
        if not step.decode_tokens:
            return
        rows, tokens = step.decodes, step.decode_tokens
        workspace = scratch.graphs if step.captured else scratch.eager
        before = _addresses(workspace) if step.captured else ()
        self._kernels.attend_pages(
            query[:tokens], self._raw(pages), self.form, step.table[:rows], step.lengths[:rows],
            step.starts[: rows + 1], scale, *self._constants, step.queries, step.blocks, workspace=workspace,
            out=out[:tokens],
        )  # fmt: skip
        if step.captured and _addresses(workspace) != before:
            raise KVCalError(
                f"a step of {rows} requests is captured that was not reserved; please report this with the engine's "
                "options, and start it with --enforce-eager meanwhile"
            )

    def prefill(
        self,
        pages: Tensor,
        table: Tensor,
        part: Prefill,
        query: Tensor,
        exact: tuple[Tensor, Tensor] | None,
        scale: float,
        scratch: Scratch,
        out: Tensor,
    ) -> None:
        """Causal attention of one request's chunk over the request, by torch over dequantised pages. query, out: (T,
        Hq, D) of the whole step. exact: the step's keys and values, (T, H, D) each, which then take the place of the
        chunk's packed ones. table (R, n).
        """
        tokens, chunk = slice(part.first, part.stop), part.stop - part.first
        packed = part.length if exact is None else part.length - chunk
        fresh = () if exact is None else tuple(x[tokens].transpose(0, 1) for x in exact)
        if packed:
            buffers = scratch.dense(pages.shape[1], _whole(part.length), query.shape[2], query.dtype)
            self.load(pages, table[part.row, : -(-packed // BLOCK)], buffers)
            for buffer, x in zip(buffers, fresh, strict=False):
                buffer[:, packed : part.length] = x
            fresh = tuple(buffer[:, : part.length] for buffer in buffers)
        key, value = (x[None] for x in fresh)
        out[tokens] = torch.nn.functional.scaled_dot_product_attention(
            query[tokens].transpose(0, 1)[None],
            key,
            value,
            attn_mask=causal_lower_right(chunk, part.length),
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)

    def load(self, pages: Tensor, numbers: Tensor, out: tuple[Tensor, Tensor]) -> None:
        """Dequantise pages of these numbers, int (n,), into the first 32 n tokens of keys and values (H, T, D)."""
        raw, at = self._raw(pages), 0
        for part in numbers.split(AT_ONCE):
            blocks = read_pages(raw, self.form, part[None], *self._constants)
            for buffer, side in zip(out, blocks, strict=True):
                buffer[:, at : at + BLOCK * len(part)] = decode(side)[0]
            at += BLOCK * len(part)

    def reserve(self, step: Step, query: Tensor, pages: Tensor, scratch: Scratch) -> None:
        """Launch once what graphs of such a step will hold: kernels are compiled, and `scratch` has what they need. No
        token is stored.
        """
        heads, dim = pages.shape[1], query.shape[2]
        tokens = query.new_zeros(len(query), heads, dim)
        slots = torch.full((len(query),), -1, dtype=torch.int64, device=self.device)
        self.store(pages, slots, tokens, tokens)
        with scratch.reserving():
            self.decode(pages, replace(step, captured=False), query, 1.0, scratch, torch.empty_like(query))

    def _raw(self, pages: Tensor) -> Tensor:
        """Pages (P, H, 32, C) as uint8 (P, H, head_bytes), in the same memory, without what fills a head's last
        token.
        """
        raw = pages.view(torch.uint8)
        return raw.view(*raw.shape[:2], -1)[..., : self.form.head_bytes]


@functools.cache
def layer_on(layer: PagedLayer, device: torch.device) -> GPULayer:
    """The kernels of a layer on a device, built once: layers of a preset share them, and graphs find their tables."""
    return GPULayer(layer, device)


@functools.cache
def scratch_on(device: torch.device) -> Scratch:
    """The memory of all layers on a device: engines run their layers one after the other."""
    return Scratch(device)


def _sides(key: FormSide, value: FormSide, device: torch.device) -> _Sides:
    key_constants, value_constants = (_moved(side.constants, device) for side in (key, value))
    if isinstance(key_constants, Grid) and isinstance(value_constants, Grid):
        same = key_constants.table.shape == value_constants.table.shape
        if same and torch.equal(key_constants.table, value_constants.table):
            value_constants = replace(value_constants, table=key_constants.table)  # kernels then keep it once
    constants = key_constants, value_constants
    return _Sides((_rule(key, key_constants), _rule(value, value_constants)), constants)


def _moved(constants: Constants, device: torch.device) -> Constants:
    if isinstance(constants, Basis):
        points = {bits: x.to(device) for bits, x in constants.points.items()}
        return Basis(constants.decoder.to(device), constants.mean.to(device), points, constants.gain)
    return None if constants is None else constants.to(device)


def _rule(side: Side, constants: Constants) -> StoreRule:
    """How a side's tokens are coded on the device of its constants."""
    assert isinstance(side, FormSide)
    if isinstance(constants, Basis):
        assert isinstance(side.form, TransformForm)
        encoder = side.codec.tensors()["encoder"].to(constants.mean.device)
        points = {bits: constants.points[bits] for bits, _ in side.form.tiers if bits > 1}
        return TransformRule(side.form, encoder, constants.mean, points)
    rule = side.codec.rule()
    if isinstance(rule, str):
        raise KVCalError(f"codec {side.codec.name!r}: {rule}; the plan must refuse it")
    return GridRule(rule.form, constants, rule.gain) if isinstance(rule, GridRule) and constants else rule


def _addresses(workspace: object) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in vars(workspace).values())


def _whole(tokens: int) -> int:
    """Tokens of so many, rounded up to whole pages."""
    return -(-tokens // BLOCK) * BLOCK
