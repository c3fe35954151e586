"""Keys and values packed to blocks in the order that attention reads (layout/form.py), and the windows before them.

Numbers are those of the codec `uniform` (kvcal_artifacts/codecs/uniform.py), bit for bit as it gives them on a CPU:
float32, halves to even, scale and minimum rounded to float16 before codes. Hybrid groups (InnerQ section 4.1.2) are
stored as asymmetric ones: a symmetric group's zero point is what its lowest code stands for, as in layout.Blocks. Grids
(HIGGS, TurboQuant) are those of the codec `higgs` rotated per kv head, likewise (higgs/reference.py).

A kernel cannot raise: what the codec refuses becomes bits of an int32 per kv head, read when the caller likes. Flags
are only ever set; blocks of a head with one are not to be used.

A row's tokens lie, in order, in its sink, its packed blocks and its recent window, a ring: token j of the window is in
slot (32 * blocks + j) mod capacity, blocks being the packed blocks of the row. So neither packing nor cropping moves
anything. Counts of all rows are on the device (`Counts`); one `advance` a forward moves them, every layer then carries
it out (`append`). Letters: docs/interfaces.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

import torch
from torch import Tensor

from ..hadamard import root, tree_sum
from ..higgs import reference as higgs
from ..layout import BLOCK, Blocks, Form, launch_key, pack
from ..layout.grids import Grid

Mode = Literal["symmetric", "asymmetric", "hybrid"]

NONFINITE = 1  # a NaN or an infinity in the input; the other bits then mean nothing
SCALE = 2  # a scale beyond float16: smaller groups help
MINIMUM = 4  # a group's minimum beyond float16
NO_SLOT = 8  # a block that the packed buffer has no slot for; it was dropped
VALUES = 8  # bits by which the flags of values are shifted
MEANING = {
    NONFINITE: "a NaN or infinity reached the cache",
    SCALE: "a scale does not fit float16 (largest 65504)",
    MINIMUM: "a group minimum does not fit float16 (largest 65504)",
    NO_SLOT: "there is no slot left",
}
HALF_MAX, HALF_FLOOR = 65504.0, 2.0**-24
SCALES = tuple(i / 20 for i in (*range(20, 10, -1), *range(21, 28)))  # those of the codec
RANGES = tuple(i / 20 for i in range(20, 5, -1))


@dataclass(frozen=True)
class Rule:
    """How numbers become codes of a form. search: the best of SCALES and RANGES instead of the plain scale. ValueError
    where form and mode do not fit, or where a group is no power of two and errors must be compared.
    """

    form: Form
    mode: Mode
    search: bool = False

    def __post_init__(self) -> None:
        if self.form.symmetric != (self.mode == "symmetric"):
            raise ValueError(f"mode {self.mode!r} for {self.form}: only 'symmetric' is stored without zero points")
        group = self.form.group
        if group & (group - 1) and (self.search or self.mode == "hybrid"):
            raise ValueError(f"groups of {group} with search or mode 'hybrid': must be a power of two")

    @property
    def factors(self) -> list[tuple[float, float]]:
        """Factors that are tried, in the codec's order: (factor of the scale, 0) of symmetric ones, (factor of the
        range, part of the range that is left out below) of asymmetric ones.
        """
        return self.symmetric_factors + self.asymmetric_factors

    @property
    def symmetric_factors(self) -> list[tuple[float, float]]:
        """The symmetric ones of `factors`."""
        if self.mode == "asymmetric":
            return []
        signs = (1, -1) if self.search and self.mode == "symmetric" else (1,)
        return [(sign * factor, 0.0) for factor in (SCALES if self.search else (1.0,)) for sign in signs]

    @property
    def asymmetric_factors(self) -> list[tuple[float, float]]:
        """The asymmetric ones of `factors`."""
        if self.mode == "symmetric":
            return []
        return [(factor, (1 - factor) / 2) for factor in (RANGES if self.search else (1.0,))]


@dataclass(frozen=True, eq=False)
class GridRule:
    """How numbers become codes of a grid's form: rotated per kv head, divided by a norm, the nearest point. grid: the
    signs are of each head, (H, D). gain: of higgs.Rotated. ValueError where a head, or what a norm spans, is no power
    of two.
    """

    form: Form
    grid: Grid
    gain: float = 1.0

    def __post_init__(self) -> None:
        heads, dim = self.grid.sign.shape
        if not self.form.vector or dim != self.form.dim or self.form.norm_heads not in (1, heads):
            raise ValueError(
                f"{heads} heads of {dim} for {self.form}: must be a grid's, with its norms over 1 head or all"
            )
        if dim & dim - 1 or self.form.norm_heads & self.form.norm_heads - 1:
            raise ValueError(
                f"grid at head_dim {dim}, norms over {self.form.norm_heads} kv heads: both must be powers of two"
            )

    def __deepcopy__(self, memo: dict[int, object]) -> GridRule:
        """Return the rule itself: copies of a cache read the same table."""
        return self

    @property
    def heads(self) -> int:
        return self.grid.sign.shape[0]

    @functools.cached_property
    def how(self) -> higgs.Rotated:
        norms = self.heads // self.form.norm_heads
        return higgs.Rotated(self.grid.points, self.grid.sign.flatten(), norms, self.gain)

    @functools.cached_property
    def table(self) -> Tensor:
        """The numbers that the kernel reads, float32: signs (H * D,), gain, `higgs.Rotated.table`. It is made once, as
        a CUDA graph must find it where it was.
        """
        how = self.how
        return torch.cat([how.sign.float(), how.table.new_full((1,), self.gain), how.table])


AnyRule: TypeAlias = Rule | GridRule


@dataclass(frozen=True)
class _Coded:
    """Coded groups: codes float32 (..., g) in [0, 2^bits), scale, zero float16 (...), error: sum of squares (...)."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    error: Tensor


def quantise(x: Tensor, rule: AnyRule, factor: Tensor | None = None) -> tuple[Blocks, Tensor]:
    """Pack x (B, H, T, D) float16, bfloat16 or float32, T whole blocks and groups -> its blocks, and flags int32 (H,),
    not shifted.

    factor (H, 1, D) or (B, H, 1, D): x is divided by it first, in float32 (InnerQ section 4.3, codecs/scaled.py).
    """
    form, wide = rule.form, x.float()
    if factor is not None:
        wide = wide / factor.float()
    if isinstance(rule, GridRule):
        codes, norm, flags = higgs.encode(wide, rule.how)
        return pack(codes, norm[..., None], None, form, rule.grid), flags
    groups = (wide.transpose(-1, -2) if form.along_tokens else wide).unflatten(-1, (-1, form.group))
    best: _Coded | None = None
    for other in _candidates(groups, rule):
        best = other if best is None else _lower(best, other)
    assert best is not None
    codes, scale, zero = best.codes.nan_to_num().flatten(-2), best.scale, best.zero
    if form.along_tokens:
        codes, scale, zero = (t.transpose(-1, -2) for t in (codes, scale, zero))
    return pack(codes.int(), scale, None if form.symmetric else zero, form), _flags(groups, rule)


def _candidates(x: Tensor, rule: Rule) -> Iterator[_Coded]:
    """Yield coded groups, symmetric ones first; the first is plain."""
    half, top = 2.0 ** (rule.form.bits - 1), _like(x, 2.0**rule.form.bits - 1)
    plain = x.abs().amax(-1) / half
    # Hybrid: what the lowest code stands for is stored too.
    limit = HALF_MAX / half if rule.mode == "hybrid" else HALF_MAX
    for factor, _ in rule.symmetric_factors:
        size = (plain * abs(factor)).clamp(HALF_FLOOR, limit).half()
        scale = size if factor > 0 else -size
        step = scale.float()[..., None]
        codes = (x / step).round().clamp(-half, half - 1)
        yield _Coded(codes + half, scale, -half * size, _error(codes * step, x))
    low, spread = x.amin(-1), x.amax(-1) - x.amin(-1)
    for factor, below in rule.asymmetric_factors:
        scale = (spread * factor / top).clamp(HALF_FLOOR, HALF_MAX).half()
        base = (low + spread * below).half()
        step = scale.float()[..., None]
        codes = torch.minimum(((x - base.float()[..., None]) / step).round().clamp_min(0), top)
        yield _Coded(codes, scale, base, _error(codes * step + base.float()[..., None], x))


def _like(x: Tensor, number: float) -> Tensor:
    """Return a number as a tensor on x's device: CUDA divides by a number of the host by multiplying with its
    reciprocal, which gives another last bit.
    """
    return torch.full((), number, dtype=torch.float32, device=x.device)


def _error(decoded: Tensor, x: Tensor) -> Tensor:
    off = decoded - x
    return tree_sum(off * off)


def _lower(best: _Coded, other: _Coded) -> _Coded:
    better = other.error < best.error
    parts = [(other.scale, best.scale), (other.zero, best.zero), (other.error, best.error)]
    codes = torch.where(better[..., None], other.codes, best.codes)
    return _Coded(codes, *(torch.where(better, new, old) for new, old in parts))


def _flags(x: Tensor, rule: Rule) -> Tensor:
    """Return flags of the plain scale: a smaller one could hide that float16 cannot hold it."""
    half, top = 2.0 ** (rule.form.bits - 1), _like(x, 2.0**rule.form.bits - 1)
    low, high, peak = x.amin(-1), x.amax(-1), x.abs().amax(-1)
    faults = {NONFINITE: ~torch.isfinite(x).all(-1)}
    if rule.mode != "asymmetric":
        faults[SCALE] = ~(peak / half <= HALF_MAX)
    if rule.mode != "symmetric":
        faults[SCALE] = faults.get(SCALE, False) | ~((high - low) / top <= HALF_MAX)
        faults[MINIMUM] = ~(low.abs() <= HALF_MAX)
    flags = torch.zeros(x.shape[1], dtype=torch.int32, device=x.device)
    for bit, where in faults.items():
        flags |= where.flatten(2).any(-1).any(0) * bit
    return flags


def check(flags: Tensor, layer: int) -> str | None:
    """Describe flags (H,) int32 in one line naming layer and head; None where none is set. A flag of numbers that are
    not finite comes before others: a norm over all heads is not finite then. This waits for the device.
    """
    faults = [
        (not bits & NONFINITE, head, role, bits)
        for head, word in enumerate(flags.tolist())
        for role, bits in (("key", word & 255), ("value", word >> VALUES))
        if bits
    ]
    if not faults:
        return None
    _, head, role, bits = min(faults)
    what = "; ".join(text for bit, text in MEANING.items() if bits & bit and not (bit > 1 and bits & 1))
    return f"layer {layer}, {role} head {head}: {what}"


@dataclass(frozen=True)
class Windows:
    """Numbers of tokens: sink, recent ones that stay exact at least, and how many are packed at a time, a multiple of
    32.
    """

    sink: int = 32
    recent: int = 96
    block: int = BLOCK

    def __post_init__(self) -> None:
        if self.block % BLOCK or self.block < BLOCK or min(self.sink, self.recent) < 0:
            raise ValueError(f"{self}: none negative, and a block a multiple of {BLOCK}")

    def ring_capacity(self, queries: int) -> int:
        """Return the slots of the ring for calls of up to so many new tokens in one launch: a multiple of 32."""
        return -(-(self.recent + self.block - 1 + queries) // BLOCK) * BLOCK


FIELDS = ("sink_before", "window_before", "blocks_before", "new", "sink", "seen", "window", "blocks")


class CountsState(TypedDict):
    """What a copy or a pickle of `Counts` holds."""

    windows: Windows
    data: Tensor


class Counts:
    """Counts of every row, int32 (B,), views of one tensor `data` (8, B): tokens of sink and window and packed blocks
    of 32, before and after the current call; `new`: its real tokens, the last ones of its columns; `seen`:
    window_before and the new tokens that the sink did not take, packed or not.

    Attention over (sink, blocks_before, seen) gives what the cache gives, new tokens exact; (sink, blocks, window) what
    is stored. Both may run after `append`: a ring still has what was just packed.
    """

    def __init__(self, batch: int, windows: Windows, device: torch.device | str = "cpu") -> None:
        self.windows = windows
        self.data = torch.zeros(len(FIELDS), batch, dtype=torch.int32, device=device)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "data" and isinstance(value, Tensor):  # views are made once: attention of every layer asks for three
            vars(self).update({field: value[i] for i, field in enumerate(FIELDS)})

    def __getstate__(self) -> CountsState:
        return {"windows": self.windows, "data": self.data}

    def __setstate__(self, state: CountsState) -> None:
        self.windows, self.data = state["windows"], state["data"]  # views of it again

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor: ...


def advance(counts: Counts, new: Tensor) -> None:
    """Move `counts` by a call that brings new (B,) int32 real tokens: Ledger._after of kvcal_artifacts, in blocks of
    32.
    """
    windows = counts.windows
    sink, window, blocks = (counts.data[i].clone() for i in (4, 6, 7))
    after = (sink + new).clamp_max(windows.sink)
    waiting = window + new - (after - sink)
    flush = ((waiting - windows.recent) // windows.block).clamp_min(0)
    rows = (sink, window, blocks, new, after, waiting, waiting - flush * windows.block)
    counts.data.copy_(torch.stack([*rows, blocks + flush * (windows.block // BLOCK)]))


def observe(peak: Tensor, fixed: Tensor, counts: Counts, keys: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    """Update InnerQ's key factors (section 4.3) by a call; `counts` are those after it. They are `factors_of` the
    largest magnitude of each channel up to the token with which a row's first block is due.

    peak (B, H, D) float32 and fixed (B,) bool, rows whose factors stay, are changed in place. keys (B, H, Q, D): of Q
    real tokens in every row. -> factors of kv heads (B, H, 1, D) and of query heads (B, ratio * H, 1, D), float32,
    contiguous.
    """
    windows = counts.windows
    rank = (counts.sink_before + counts.window_before)[:, None] + torch.arange(keys.shape[2], device=keys.device)
    there = (rank < windows.sink + windows.recent + windows.block) & ~fixed[:, None]
    peak.copy_(torch.maximum(peak, keys.float().abs().masked_fill(~there[:, None, :, None], 0).amax(2)))
    fixed.logical_or_(counts.blocks > 0)
    factors = factors_of(peak)[:, :, None]
    return factors, factors.repeat_interleave(ratio, 1)


def factors_of(peak: Tensor) -> Tensor:
    """Return the factor that keys are divided by, float32: the square root of peak, max |K_c|, in float16, 1 for
    channels that are zero.
    """
    factor = root(peak.float()).to(torch.float16).float()
    return torch.where(factor > 0, factor, 1.0)


@dataclass(frozen=True)
class Layer:
    """The storage of a layer. keys, values: capacity for N blocks. sink (2 tensors), recent (2 tensors, a ring): keys
    and values (B, H, capacity, D) of the model's dtype. flags (H,) int32.
    """

    keys: Blocks
    values: Blocks
    sink: tuple[Tensor, Tensor]
    recent: tuple[Tensor, Tensor]
    flags: Tensor

    @functools.cached_property
    def launch_key(self) -> tuple[object, ...]:
        """All that a kernel takes for granted of the layer, without its numbers; see layout.launch_key."""
        return (
            self.keys.launch_key,
            self.values.launch_key,
            *(launch_key(x) for x in (*self.sink, *self.recent, self.flags)),
        )

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Sink, ring, words and scales, keys before values, words of grids in units of 32 bits, as they are written."""
        stored = (x for blocks in (self.keys, self.values) for x in (blocks.written, blocks.scale))
        return *self.sink, *self.recent, *stored


def blocks_for(
    rule: AnyRule,
    batch: int,
    heads: int,
    count: int,
    device: torch.device | str,
    make: Callable[..., Tensor] = torch.zeros,
) -> Blocks:
    """Return empty blocks with capacity for `count` blocks of 32 tokens a row; make: torch.empty where all of them are
    written next.
    """
    form = rule.form
    words = make(batch, heads, count, form.words, dtype=torch.int16, device=device)
    scale_shape = batch, heads // form.norm_heads, count // form.scale_blocks, form.scales
    scale = make(scale_shape, dtype=torch.float16, device=device)
    return Blocks(form, words, scale, rule.grid if isinstance(rule, GridRule) else None)


def keep(sink: tuple[Tensor, Tensor], ring: tuple[Tensor, Tensor], counts: Counts, new: tuple[Tensor, Tensor]) -> None:
    """Do with new tokens (B, H, Q, D) what `append` does before any is packed, in operations of fixed shape. Tokens
    that the sink takes land in slots of the ring behind the window as well, as pads do; they are never read there.
    """
    queries, device = new[0].shape[2], counts.data.device
    pads = (queries - counts.new)[:, None].long()
    source = torch.arange(sink[0].shape[2], device=device) - counts.sink_before[:, None]
    taken = (counts.sink - counts.sink_before)[:, None]
    fills = ((source >= 0) & (source < taken))[:, None, :, None]
    first = counts.blocks_before[:, None].long() * BLOCK + counts.window_before[:, None]
    at = (first + (torch.arange(queries, device=device) - pads) % queries - taken) % ring[0].shape[2]
    for sink_slots, recent, x in zip(sink, ring, new, strict=True):

        def wide(index: Tensor, x: Tensor = x) -> Tensor:
            return index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])

        rows = x.gather(2, wide((source + pads).clamp(0, queries - 1)))
        sink_slots.copy_(torch.where(fills, rows, sink_slots))
        recent.scatter_(2, wide(at), x)


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
    """Carry out in one layer what `advance` counted. k, v (B, H, Q, D), a row's real tokens last, go to its sink and
    its window, and the window's oldest blocks, if they are due, are packed behind the row's others. factor: of keys,
    see `quantise`. due (B, H, block, D) float32, contiguous: replaces these keys, as they are rounded (squat.due).
    """
    if due is not None:
        check_due(counts, k, key, due, factor)
    for row in range(len(k)):
        here = {name: int(counts.data[i, row]) for i, name in enumerate(FIELDS)}
        for role, (x, rule, stored) in enumerate(((k, key, layer.keys), (v, value, layer.values))):
            role_factor = factor if role == 0 else None
            role_factor = role_factor[row] if role_factor is not None and role_factor.ndim == 4 else role_factor
            instead = None if role or due is None else due[row]
            bits = _append_row(layer, role, row, here, x[row], rule, stored, role_factor, instead)
            layer.flags.bitwise_or_(bits << VALUES * role)


def check_due(counts: Counts, k: Tensor, key: AnyRule, due: Tensor, factor: Tensor | None) -> None:
    """Raise ValueError unless `due` is what keys of the one block that a call can pack are rounded from."""
    block, shape = counts.windows.block, (*k.shape[:2], counts.windows.block, k.shape[3])
    if due.shape != shape or due.dtype != torch.float32 or not due.is_contiguous() or due.device != k.device:
        got = f"{tuple(due.shape)} {due.dtype} on {due.device}"
        raise ValueError(f"keys due: {got}; must be {shape} torch.float32 on {k.device}, contiguous")
    if k.shape[2] > block or factor is not None or isinstance(key, GridRule):
        raise ValueError(
            f"keys due: {k.shape[2]} new tokens, {'a' if factor is not None else 'no'} factor, {type(key).__name__}; "
            f"must be at most {block} new tokens, no factor, and a Rule of integers"
        )


def _append_row(
    layer: Layer,
    role: int,
    row: int,
    here: dict[str, int],
    x: Tensor,
    rule: AnyRule,
    stored: Blocks,
    factor: Tensor | None,
    due: Tensor | None,
) -> Tensor:
    """Append x (H, Q, D) to one row and return its flags (H,)."""
    sink, ring = layer.sink[role][row], layer.recent[role][row]
    real = x[:, x.shape[1] - here["new"] :]
    bits = (~torch.isfinite(real.float())).flatten(1).any(1).int() * NONFINITE
    taken = here["sink"] - here["sink_before"]
    sink[:, here["sink_before"] : here["sink"]] = real[:, :taken].to(sink.dtype)
    capacity, start = ring.shape[1], here["blocks_before"] * BLOCK
    old = ring[:, (torch.arange(here["window_before"], device=x.device) + start) % capacity]
    waiting = torch.cat([old.to(x.dtype), real[:, taken:]], 1)
    ring_tokens = torch.arange(
        max(here["window_before"], waiting.shape[1] - capacity), waiting.shape[1], device=x.device
    )
    ring[:, (ring_tokens + start) % capacity] = waiting[:, ring_tokens].to(ring.dtype)
    flush = here["blocks"] - here["blocks_before"]
    if flush:
        row_factor = None if factor is None else factor[None]
        packed, more = quantise(waiting[None, :, : flush * BLOCK] if due is None else due[None], rule, row_factor)
        first, each = here["blocks_before"], rule.form.scale_blocks
        fits = max(0, min(flush, stored.words.shape[2] - first))
        stored.words[row, :, first : first + fits] = packed.words[0, :, :fits]
        stored.scale[row, :, first // each : (first + fits) // each] = packed.scale[0, :, : fits // each]
        bits = bits | more | (NO_SLOT if fits < flush else 0)
    return bits
