"""Launches of the store kernels, and what they are compiled with."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ....device import on
from ....higgs.triton import NO_RASTER, searched
from ....layout import PageForm
from ....layout.pages import block_bytes, token_scales, widths
from ....triton import interpreted
from ...reference import GridRule, Rule
from ...triton.launch import factors_of
from ...triton.launch import side_of as rule_side
from ..reference import StoreRule, TransformRule, check_store
from ..side import StoreSide, places
from .coordinates import coordinates_kernel
from .kernel import store_kernel

TILE = 16  # tokens of a program
MANY = 512  # tokens from which on a program takes all heads
AT_ONCE = 2048  # tokens whose coordinates are in memory at a time, at most
_PLACES: dict[object, Tensor] = {}


def _places_on(rule: StoreRule, device: torch.device) -> Tensor:
    """Return `places` on a device, copied there once: a CUDA graph must find them where they were."""
    name = rule.form, device
    if name not in _PLACES:
        _PLACES[name] = places(rule.form)[0].to(device)
    return _PLACES[name]


def side_of(rule: StoreRule, at: int) -> StoreSide:
    """Return the constants of a rule's side that begins at byte `at` of a head."""
    form, parts = rule.form, places(rule.form)[1]
    sizes = at, len(widths(form)), token_scales(form), parts
    none = (0, 0, 0, 0)
    if isinstance(rule, TransformRule):
        means, stride = rule.columns.numel(), rule.columns.shape[-1]
        first, tables, rasters = means + rule.mean.numel(), [], []
        for bits in (4, 3, 2):
            tables.append(first)
            raster = none
            if bits in rule.hows:
                first += rule.hows[bits].table.numel()
                raster = _raster(searched(rule.hows[bits]))
            rasters.append(raster)
        pairs = rule.form.pairs
        begin = tables[0], tables[1], tables[2]
        return StoreSide(*sizes, 0, 2, rule.form.coded, stride, pairs, means, begin, tuple(rasters))
    raster = _raster(searched(rule.how)) if isinstance(rule, GridRule) else _raster({"POINTS": 0, **NO_RASTER})
    return StoreSide(*sizes, rule.form.bits, rule.form.vector, 0, 0, none, 0, (0, 0, 0), (raster,))


def _raster(constants: dict[str, int]) -> tuple[int, int, int, int]:
    return constants["POINTS"], constants["SIDE"], constants["FEW"], constants["MOST"]


def _table(rule: StoreRule, device: torch.device) -> Tensor:
    return factors_of(rule, device) if isinstance(rule, Rule) else rule.table


def settings(form: PageForm, keys: StoreRule, values: StoreRule, heads: int, tokens: int) -> dict[str, Any]:
    """Return the compile-time constants of store_kernel."""
    columns = [rule.columns.shape[-1] for rule in (keys, values) if isinstance(rule, TransformRule)]
    return {
        "HEADS": heads,
        "EACH": heads if tokens >= MANY and not columns else 1,
        "D": form.keys.dim,
        "ROW": max(columns, default=0),
        "KEYS": side_of(keys, 0),
        "VALUES": side_of(values, block_bytes(form.keys)),
        "KEY_RULE": rule_side(keys) if isinstance(keys, Rule) else None,
        "VALUE_RULE": rule_side(values) if isinstance(values, Rule) else None,
    }


_SETTINGS: dict[object, tuple[dict[str, Any], StoreRule, StoreRule]] = {}
FIRST = ("HEADS", "D", "ROW", "KEYS", "VALUES")  # constants of the launch before


def store(
    k: Tensor, v: Tensor, pages: Tensor, form: PageForm, slots: Tensor, keys: StoreRule, values: StoreRule
) -> None:
    """Do what `reference.store` does, for k and v of float16, bfloat16 or float32, in one launch; with the transform
    codec in two for 2,048 tokens. Nothing waits for the device, and under a CUDA graph slots may change between
    replays.
    """
    check_store(k, v, pages, form, slots, keys, values)
    tokens, heads, _ = k.shape
    if not tokens:
        return
    name = form, id(keys), id(values), heads, tokens >= MANY
    if name not in _SETTINGS:
        _SETTINGS[name] = settings(form, keys, values, heads, tokens), keys, values  # rules stay, and so do their ids
    constants = _SETTINGS[name][0]
    parts = zip(*(x.split(AT_ONCE if constants["ROW"] else tokens) for x in (k, v, slots)), strict=True)
    with on(k.device):
        for k_part, v_part, slots_part in parts:
            _launch(k_part, v_part, pages, slots_part, keys, values, constants)


def _launch(
    k: Tensor, v: Tensor, pages: Tensor, slots: Tensor, keys: StoreRule, values: StoreRule, constants: dict[str, Any]
) -> None:
    """Store these tokens; constants: `settings`."""
    tokens, heads, _ = k.shape
    tables = _table(keys, k.device), _table(values, k.device)
    y = square = tables[0]  # not read
    tiles, groups = triton.cdiv(tokens, TILE), heads // constants["EACH"]
    if row := constants["ROW"]:
        groups = 4 * heads
        y = torch.empty(2, tokens, heads, row, dtype=torch.float32, device=k.device)
        square = torch.empty(2, tokens, heads, dtype=torch.float32, device=k.device)
        coordinates_kernel[(tiles, heads, 2)](
            k,
            v,
            slots,
            *tables,
            y,
            square,
            tokens,
            k.stride(0),
            v.stride(0),
            **{name: constants[name] for name in FIRST},
            num_warps=4,
            enable_fp_fusion=False,
        )
    store_kernel[(tiles, groups, 2)](
        k,
        v,
        pages,
        slots,
        *tables,
        _places_on(keys, k.device),
        _places_on(values, k.device),
        y,
        square,
        tokens,
        k.stride(0),
        v.stride(0),
        pages.stride(0),
        pages.stride(1),
        **constants,
        ASM=not interpreted(),
        num_warps=4,
        enable_fp_fusion=False,
    )
