"""`quantise` and `append` of reference.py for NVIDIA GPUs: one read of keys and values, one write of words and scales,
one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ...device import on
from ...higgs import triton as higgs
from ...layout import BLOCK, Blocks, launch_key
from ...layout.form import together
from ...triton import Prepared, Ready, interpreted
from .. import reference
from ..reference import FIELDS, AnyRule, Counts, GridRule, Layer, Rule
from ..side import Side
from .kernel import advance_kernel, append_kernel, observe_kernel

KERNEL_MODES = {"symmetric": 0, "asymmetric": 1, "hybrid": 2}
PROGRAMS = 8  # that write the windows of a long call


@dataclass(frozen=True)
class Launch:
    """Options of a launch. warps: units at a time of a program; with a grid it takes one at a time. registers: of a
    thread at most; 0: the compiler's choice.
    """

    warps: int = 4
    registers: int = 0


# A row packs one unit at most, and one warp is faster than four (docs/benchmarks/quantise.md).
STEP = Launch(warps=1)
# Registers of programs over grids, which left to the compiler take up to 239. GRID_STEP: of a decode step, in which
# most have nothing to pack. With 128, four programs of 4 warps fit a multiprocessor of 65,536 registers, with 240 only
# two (docs/benchmarks/quantise.md). At head_dim 256 the 8192 numbers of a block want 8 warps, and two programs fit: 64
# registers, for four, would hold little more than the numbers themselves.
GRID, GRID_STEP = 240, 128


def launch_of(key: AnyRule, value: AnyRule, step: bool) -> Launch:
    """Return the launch for rules. step: of a decode step. A grid's unit of 32 * D numbers takes a whole program, 32
    numbers a thread.
    """
    if isinstance(key, GridRule) or isinstance(value, GridRule):
        return Launch(max(4, key.form.dim // 32), GRID_STEP if step else GRID)
    return Launch() if not step and (key.search or value.search) else STEP


def _programs(units: int, key: AnyRule, value: AnyRule, launch: Launch) -> int:
    """Return the programs for so many units of each head."""
    one = isinstance(key, GridRule) or isinstance(value, GridRule)
    return units if one else -(-units // launch.warps)


def settings(key: AnyRule, value: AnyRule) -> dict[str, object]:
    """Return the compile-time constants of append_kernel that follow from the rules."""
    return {"D": key.form.dim, "KEYS": side_of(key), "VALUES": side_of(value)}


def side_of(rule: AnyRule) -> Side:
    """Return the constants of a rule."""
    form = rule.form
    if isinstance(rule, GridRule):
        mode, symmetric, candidates, raster = int(form.in_bytes), 0, 0, higgs.searched(rule.how)
    else:
        mode, symmetric, candidates = KERNEL_MODES[rule.mode], len(rule.symmetric_factors), len(rule.factors)
        raster = {"POINTS": 0, **higgs.NO_RASTER}
    return Side(
        form.bits,
        mode,
        form.along_tokens,
        form.inner,
        form.group,
        form.pieces,
        form.tiles,
        form.words,
        form.columns,
        together(form.columns),
        symmetric,
        candidates,
        form.vector,
        form.norm_heads,
        raster["POINTS"],
        raster["SIDE"],
        raster["FEW"],
        raster["MOST"],
    )


@functools.cache
def factors_of(rule: Rule, device: torch.device) -> Tensor:
    """Return a rule's factors, (n, 2) float32. They are made once, as a CUDA graph must find them where they were."""
    return torch.tensor(rule.factors, dtype=torch.float32, device="cpu").to(device)


def _table(rule: AnyRule, device: torch.device) -> Tensor:
    return rule.table if isinstance(rule, GridRule) else factors_of(rule, device)


def advance(counts: Counts, new: Tensor) -> None:
    """Do what `reference.advance` does, in one launch of one program: once a forward, before its first layer."""
    batch, windows = counts.data.shape[1], counts.windows
    if new.shape != (batch,) or new.dtype != torch.int32:
        raise ValueError(f"new tokens {tuple(new.shape)} {new.dtype}: must be ({batch},) torch.int32")
    with on(counts.data.device):
        advance_kernel[(1,)](
            counts.data,
            new,
            batch,
            windows.sink,
            windows.recent,
            windows.block,
            triton.next_power_of_2(batch),
            num_warps=1,
        )


def observe(peak: Tensor, fixed: Tensor, counts: Counts, keys: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    """Do what `reference.observe` does, in one launch instead of about twenty: every layer runs it in every step of a
    CUDA graph.
    """
    batch, heads, queries, dim = keys.shape
    expected = ((batch, heads, dim), torch.float32), ((batch,), torch.bool)
    for name, x, (shape, dtype) in zip(("peak", "fixed"), (peak, fixed), expected, strict=True):
        if x.shape != shape or x.dtype != dtype or not x.is_contiguous():
            raise ValueError(f"{name} {tuple(x.shape)} {x.dtype}: must be {shape} {dtype}, contiguous")
    if counts.data.shape[1] != batch:
        raise ValueError(f"counts of {counts.data.shape[1]} rows, keys of {batch}: must be the same")
    factor, windows = torch.empty_like(peak), counts.windows
    wide = torch.empty(batch, ratio * heads, dim, dtype=torch.float32, device=peak.device)
    sizes = (heads, ratio, dim, triton.next_power_of_2(heads), triton.next_power_of_2(dim))
    with on(peak.device):
        observe_kernel[(batch,)](
            keys.contiguous(),
            peak,
            fixed.view(torch.uint8),
            counts.data,
            factor,
            wide,
            batch,
            queries,
            windows.sink + windows.recent + windows.block,
            *sizes,
            num_warps=4,
        )
    return factor[:, :, None], wide[:, :, None]


def append(
    layer: Layer,
    counts: Counts,
    k: Tensor,
    v: Tensor,
    key: AnyRule,
    value: AnyRule,
    factor: Tensor | None = None,
    due: Tensor | None = None,
) -> None:
    """Do what `reference.append` does, for k, v, sink and recent of one dtype. The grid follows from shapes alone, so a
    CUDA graph of a decode step can be replayed. There is one launch, or two where a call brings more than the ring
    takes in addition to what it may hold.
    """
    shapes = (layer.launch_key, counts.windows, launch_key(counts.data), launch_key(k), launch_key(v))
    name = (*shapes, key, value, *(None if x is None else launch_key(x) for x in (factor, due)))
    prepared = _PREPARED.get(name)
    if prepared is None:
        _check_layer(layer, counts, k, v, key, value)
        if due is not None:
            reference.check_due(counts, k, key, due, factor)
        launches = list(_steps(layer, counts, k, v, key, value, factor, due))
        prepared = _PREPARED[name] = [_table(rule, k.device) for rule in (key, value)], launches
    tables, launches = prepared
    tensors = _tensors(layer, counts.data, k, v, factor, tables, due)
    for ready, numbers in launches:
        ready(tensors, *numbers)


_PREPARED: Prepared[tuple[list[Tensor], list[tuple[Ready, tuple[int, ...]]]]] = Prepared()


def _steps(
    layer: Layer,
    counts: Counts,
    k: Tensor,
    v: Tensor,
    key: AnyRule,
    value: AnyRule,
    factor: Tensor | None,
    due: Tensor | None,
) -> Iterator[tuple[Ready, tuple[int, ...]]]:
    """Yield the launches of an `append`."""
    queries, windows, capacity = k.shape[2], counts.windows, layer.recent[0].shape[2]
    prepare = functools.partial(_prepared, layer, k, v, key, value, factor, due=due)
    if queries <= capacity - (windows.recent + windows.block - 1):
        yield prepare(1, launch_of(key, value, step=True), write=True, pack=True)
        return
    launch = launch_of(key, value, step=False)
    yield prepare(_programs(-(-(queries + capacity) // BLOCK), key, value, launch), launch, write=False, pack=True)
    yield prepare(PROGRAMS, Launch(), write=True, pack=False)


def quantise(
    k: Tensor,
    v: Tensor,
    key: AnyRule,
    value: AnyRule,
    factor: Tensor | None = None,
    flags: Tensor | None = None,
    launch: Launch | None = None,
) -> tuple[Blocks, Blocks, Tensor]:
    """Do what `reference.quantise` does for keys and for values (B, H, T, D) in one launch -> blocks of both, and flags
    int32 (H,), those of values shifted by VALUES; given ones are added to. Any strides except for that of channels,
    which is 1, and any two dtypes. Two grids of which one has norms over all heads take two launches a side, so that
    each number is rotated once.
    """
    batch, heads, tokens = k.shape[:3]
    for name, x, rule in (("keys", k, key), ("values", v, value)):
        form = rule.form
        _check_input(name, x, k, rule)
        if tokens % BLOCK or tokens % (BLOCK * form.scale_blocks):
            raise ValueError(f"{name} of {tokens} tokens: must be whole blocks of {BLOCK * form.scale_blocks}")
    if flags is None:
        flags = torch.zeros(heads, dtype=torch.int32, device=k.device)
    if isinstance(key, GridRule) and isinstance(value, GridRule) and key.form.norm_heads + value.form.norm_heads > 2:
        return (
            _in_two_launches(k, key, factor, flags, 0),
            _in_two_launches(v, value, None, flags, reference.VALUES),
            flags,
        )
    count = tokens // BLOCK
    packed = [reference.blocks_for(rule, batch, heads, count, k.device, torch.empty) for rule in (key, value)]
    data = torch.zeros(len(FIELDS), batch, dtype=torch.int32, device=k.device)
    data[3], data[7] = tokens, count
    layer = Layer(packed[0], packed[1], (k, v), (k, v), flags)
    chosen = launch or launch_of(key, value, step=False)
    programs = _programs(count, key, value, chosen)
    ready, numbers = _prepared(layer, k, v, key, value, factor, programs, chosen, write=False, pack=True, stored=False)
    tables = [_table(rule, k.device) for rule in (key, value)]
    ready(_tensors(layer, data, k, v, factor, tables), *numbers)
    return packed[0], packed[1], flags


def _in_two_launches(x: Tensor, rule: GridRule, factor: Tensor | None, flags: Tensor, shift: int) -> Blocks:
    """Make codes in one launch, their words in another."""
    codes, norm, encode_flags = higgs.encode(x if factor is None else x.float() / factor.float(), rule.how)
    flags.bitwise_or_(encode_flags << shift)
    return Blocks(rule.form, higgs.pack(codes, rule.form), norm.unflatten(2, (-1, BLOCK)), rule.grid)


def _tensors(
    layer: Layer,
    data: Tensor,
    k: Tensor,
    v: Tensor,
    factor: Tensor | None,
    tables: list[Tensor],
    due: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return k, v, *layer.tensors, k if factor is None else factor, *tables, data, layer.flags, k if due is None else due


def _prepared(
    layer: Layer,
    k: Tensor,
    v: Tensor,
    key: AnyRule,
    value: AnyRule,
    factor: Tensor | None,
    programs: int,
    launch: Launch,
    write: bool,
    pack: bool,
    stored: bool = True,
    due: Tensor | None = None,
) -> tuple[Ready, tuple[int, ...]]:
    """Return what starts a launch, and its numbers: all that follows from shapes and strides."""
    batch, heads, queries, dim = k.shape
    if factor is not None:
        shapes = [(heads, 1, dim), (batch, heads, 1, dim)]
        if tuple(factor.shape) not in shapes or not factor.is_contiguous():
            raise ValueError(f"factor {tuple(factor.shape)}: must be {shapes[0]} or {shapes[1]}, contiguous")
    options = settings(key, value) | {
        "HEADS": heads,
        "WRITE": write,
        "PACK": pack,
        "STORED": stored,
        "FACTOR": factor is not None,
        "DUE": 0 if due is None else due.shape[2],
        "NW": launch.warps,
        "ASM": not interpreted(),
        "num_warps": launch.warps,
        "num_stages": 1,
        "enable_fp_fusion": False,
    }
    options |= {"maxnreg": launch.registers} if launch.registers else {}
    numbers = (
        programs,
        batch,
        queries,
        layer.keys.words.shape[2],
        layer.sink[0].shape[2],
        layer.recent[0].shape[2],
        *k.stride()[:3],
        *v.stride()[:3],
        heads * dim if factor is not None and factor.ndim == 4 else 0,
    )
    return Ready(append_kernel, (programs, heads, 2 * batch), options), numbers


def _check_input(name: str, x: Tensor, k: Tensor, rule: AnyRule) -> None:
    dim, heads = rule.form.dim, rule.heads if isinstance(rule, GridRule) else k.shape[1]
    if x.shape != k.shape or x.ndim != 4 or x.shape[1] != heads or x.shape[3] != dim:
        shape = (k.shape[0], heads, k.shape[2], dim)
        raise ValueError(f"{name} {tuple(x.shape)}: must be {shape}, as keys and values alike")
    if isinstance(rule, GridRule) and rule.grid.points.device != x.device:
        raise ValueError(f"{name} on {x.device}, their grid on {rule.grid.points.device}: must be on one device")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"{name} of {x.dtype}: must be float16, bfloat16 or float32")
    if x.stride(3) != 1:
        raise ValueError(f"{name}: strides {x.stride()} of {tuple(x.shape)}; channels must be contiguous")


def _check_layer(layer: Layer, counts: Counts, k: Tensor, v: Tensor, key: AnyRule, value: AnyRule) -> None:
    """Check shapes, dtypes and devices: the kernel gets pointers."""
    batch, heads, _, dim = k.shape
    windows, capacity = counts.windows, layer.keys.words.shape[2]
    for name, x, rule, packed in (("keys", k, key, layer.keys), ("values", v, value, layer.values)):
        form = rule.form
        _check_input(name, x, k, rule)
        if x.dtype != k.dtype:
            raise ValueError(f"{name} of {x.dtype}: must be {k.dtype}, as keys and values alike")
        if windows.block % (BLOCK * form.scale_blocks):
            raise ValueError(
                f"{name}: {windows.block} tokens a block; must be a multiple of {BLOCK * form.scale_blocks}"
            )
        words = batch, heads, capacity, form.words
        scales = batch, heads // form.norm_heads, capacity // form.scale_blocks, form.scales
        if (
            packed.form != form
            or packed.words.shape != words
            or packed.scale.shape != scales
            or capacity % form.scale_blocks
        ):
            shapes = f"{packed.form}, words {tuple(packed.words.shape)}, scales {tuple(packed.scale.shape)}"
            raise ValueError(f"stored {name}: {shapes}; must be {form}, {words} and {scales}")
    least = windows.recent + windows.block
    for name, pair, tokens in (("sink", layer.sink, windows.sink), ("recent", layer.recent, least)):
        for x in pair:
            fits = x.ndim == 4 and x.shape == (batch, heads, pair[0].shape[2], dim) and x.shape[2] >= tokens
            if not fits or x.dtype != k.dtype or not x.is_contiguous():
                raise ValueError(
                    f"{name} {tuple(x.shape)} {x.dtype}: must be ({batch}, {heads}, at least {tokens}, {dim}) "
                    f"{k.dtype}, "
                    "contiguous"
                )
    for x in (*layer.tensors, layer.flags, counts.data):
        if x.device != k.device:
            raise ValueError(f"storage or counts on {x.device}, keys on {k.device}: must be on one device")
    if layer.recent[0].shape[2] % BLOCK:
        raise ValueError(f"recent, capacity {layer.recent[0].shape[2]}: must be a multiple of {BLOCK}")
    if counts.data.shape != (len(FIELDS), batch) or layer.flags.shape != (heads,):
        raise ValueError(
            f"counts {tuple(counts.data.shape)}, flags {tuple(layer.flags.shape)}: must be {(len(FIELDS), batch)} and "
            f"({heads},)"
        )
