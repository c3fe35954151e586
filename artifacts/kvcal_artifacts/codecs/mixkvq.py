"""MixKVQ's keys (Zhang et al. 2025): a channel of a block takes the model's dtype, 4 bits or 2 bits, as queries need.

Salience of a channel (Eq. 6 to 8): A = I * S. I is the mean |q| of the row so far, after RoPE, over the query heads
that share the kv head. S is (max - min) / (2^2 - 1) of the block's keys. A > tau_high stays exact, tau_low < A <=
tau_high takes 4 bits, the rest 2 bits: asymmetric, `group` tokens of a channel share scale and minimum.

Tiers differ from block to block and head to head. `perm` lists a block's channels tier by tier, ascending within a
tier; the rows of each tier, one per channel, lie in one pool for all blocks (ragged.Ragged). Tier counts are rounded
up, to the better tier. With `full` and `four` given, tiers go by rank, every block has one size, and the tensors are
dense.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, TypedDict

import torch
from torch import Tensor

from kvcal_kernels import layout, mixkvq
from kvcal_kernels.layout import Blocks, Form
from kvcal_kernels.mixkvq import Tiers
from kvcal_kernels.packing import pack, packed_bytes, unpack

from ..checked import BLOCK, Choice, Listed, Number, OrNull, Schema, Whole
from ..errors import KVCalError
from .base import EMPTY, Codec, Context, Packed, Role, Shape, Specs
from .constants import constants
from .exact import DTYPES
from .ragged import Ragged
from .refusals import HALF_FLOOR, to_half

Importance = Literal["query", "recent", "none"]
Normalise = Literal["median", "none"]
STATISTIC = {"query": "query_abs", "recent": "query_abs:recent", "none": ""}
BITS = (4, 2)  # of the second and third tier
NAMES = ("four", "two")
CHANNELS = 256  # a head at most: they are numbered in a byte
_THRESHOLD, _COUNT = Number(0, 1e30), OrNull(Whole(0, CHANNELS))


class MixKVQSettings(TypedDict):
    """The settings of MixKVQ in a bundle."""

    tau_low: float
    tau_high: float
    group: int
    round_up: int
    dtype: str
    importance: Importance
    normalise: Normalise
    full: int | None
    four: int | None
    expected: Sequence[float] | None


SETTINGS = Schema[MixKVQSettings](
    {
        "tau_low": _THRESHOLD,
        "tau_high": _THRESHOLD,
        "group": Whole(1, BLOCK),
        "round_up": Whole(1, BLOCK),
        "dtype": Choice(tuple(DTYPES)),
        "importance": Choice(tuple(STATISTIC)),
        "normalise": Choice(("median", "none")),
        "full": _COUNT,
        "four": _COUNT,
        "expected": OrNull(Listed(Number(0, CHANNELS), 2, 2)),
    }
)


class MixKVQ(Codec):
    """Keys whose channels lie in tiers of 16, 4 and 2 bits. Values cannot be stored so.

    tau_low, tau_high: thresholds of the salience over its median in the layer, or of the salience itself with normalise
    "none". The median is over all kv heads and channels of the block; over the positive ones, if most are zero.

    dtype: of the first tier, float16 by default. A codec does not know what the model computes in, so whoever makes it
    says; kvcal says bfloat16 for bfloat16 models. importance: "query" (Eq. 6 over all tokens so far), "recent" (since
    the block before), "none" (I = 1: the error-only selection of Table 6). round_up: tier counts are multiples of it.
    full, four: channels per head by rank instead of thresholds: one size for all blocks. expected: mean channels per
    head in the first two tiers, measured at calibration, by which block_bytes() is an expectation; without it, that of
    2 bits for all.
    """

    name = "mixkvq"
    head_tensors = ()
    channels_apart = True

    def __init__(
        self,
        shape: Shape,
        role: Role,
        tau_low: float = 2.0,
        tau_high: float = 8.0,
        group: int = 32,
        round_up: int = 8,
        dtype: str = "float16",
        importance: Importance = "query",
        normalise: Normalise = "median",
        full: int | None = None,
        four: int | None = None,
        expected: Sequence[float] | None = None,
    ) -> None:
        super().__init__(shape, role)
        self.tau_low, self.tau_high = float(tau_low), float(tau_high)
        self.group, self.round_up, self.dtype = group, round_up, dtype
        self.importance, self.normalise = importance, normalise
        self.full, self.four = full, four
        self.expected = None if expected is None else (float(expected[0]), float(expected[1]))
        self._check()
        self._form = self._find_form()
        self._kernel = False  # whether one chooses channels

    def _check(self) -> None:
        dim, block = self.shape.dim, self.shape.block
        if self.role != "key":
            raise KVCalError("mixkvq codec for values: it chooses channels by their queries, so it stores keys only")
        if dim > CHANNELS:
            raise KVCalError(f"mixkvq codec, head_dim {dim}: channels are numbered in a byte, at most 256")
        for what, value in (("group", self.group), ("round_up", self.round_up)):
            if type(value) is not int or value < 1:
                raise KVCalError(f"mixkvq codec, {what} {value!r}: must be a positive integer")
        if block % self.group:
            raise KVCalError(f"mixkvq codec, groups of {self.group} tokens: must divide the block of {block}")
        for name, allowed in (("dtype", DTYPES), ("importance", STATISTIC), ("normalise", ("median", "none"))):
            if getattr(self, name) not in allowed:
                raise KVCalError(f"mixkvq codec, {name} {getattr(self, name)!r}: allowed are {', '.join(allowed)}")
        if not 0 <= self.tau_low <= self.tau_high < float("inf"):
            raise KVCalError(
                f"mixkvq codec, thresholds {self.tau_low} and {self.tau_high}: must be finite, not negative, in this "
                "order"
            )
        self._check_shape(dim)

    def _check_shape(self, dim: int) -> None:
        """Raises KVCalError unless the tiers' counts of channels, where they are given, fit into a head."""
        if (self.full is None) != (self.four is None):
            raise KVCalError("mixkvq codec: full and four fix the shape together; give both or none")
        if self.full is not None and self.four is not None:
            counts = (self.full, self.four)
            fits = all(type(n) is int and n >= 0 and n % self.round_up == 0 for n in counts) and sum(counts) <= dim
            if not fits:
                raise KVCalError(
                    f"mixkvq codec, full {self.full} and four {self.four}: must be multiples of {self.round_up} "
                    f"that add up to at most {dim}"
                )
        if self.expected is not None and not (min(self.expected) >= 0 and sum(self.expected) <= dim):
            raise KVCalError(f"mixkvq codec, expected {self.expected}: channels of {dim}")

    @property
    def stats(self) -> frozenset[str]:
        name = STATISTIC[self.importance]
        return frozenset({name}) if name else frozenset()

    @property
    def ragged(self) -> bool:
        return self.full is None

    def expecting(self, channels: tuple[float, float]) -> MixKVQ:
        settings = self.config() | {"expected": list(channels)}
        return MixKVQ.from_state(self.shape, self.role, settings, {}) if self.ragged else self

    def fused(self) -> Form | str:
        return self._form

    def _find_form(self) -> Form | str:
        block, dim = self.shape.block, self.shape.dim
        if self.full is None or self.four is None:
            return "MixKVQ's tiers take another size in every block; full and four (channels a head) give them one"
        if not self.full + self.four:
            return "MixKVQ without channels in the upper tiers"
        if self.group != block:
            return (
                f"MixKVQ in groups of {self.group} tokens, blocks of {block}: the fused kernel reads those of one size"
            )
        if self.full and self.dtype != "float16":
            return f"MixKVQ's first tier in {self.dtype}: the fused kernel reads float16"
        try:
            form = Form("key", dim, BITS[1], self.group, False, False, full=self.full, four=self.four)
        except ValueError as error:
            return f"the fused kernel cannot read {error}"
        stored = 16 * self.full + BITS[0] * self.four + BITS[1] * (dim - self.full - self.four)  # bits per token
        if form.words * 16 > stored * layout.BLOCK:
            return (
                f"tiers of {self.full} and {self.four} of {dim} channels would take {form.words / 2:g} bits a token in "
                f"the fused kernel's layout, {stored} as stored; as many channels of 4 bits as exact ones fill it"
            )
        return form

    values_by_codes = True  # Eq. 17

    def step_refusal(self, stats: frozenset[str]) -> str | None:
        by = f", by {', '.join(sorted(stats))}, which the host counts" if stats else ""
        return f"MixKVQ chooses the channels of its tiers block by block{by}: no kernel appends them"

    def encoding(self) -> str:
        how = f"{self.normalise} {self.importance} {self.full} {self.four}"
        return f"{self.outline()}, {how}, rounded to {self.round_up}, group {self.group}, {self.dtype}"

    def as_blocks(self, packed: Packed) -> Blocks:
        if isinstance(self._form, str):
            refused: Blocks = super().as_blocks(packed)
            return refused
        words = packed["words"].flatten(2).unflatten(2, (-1, self._form.words))
        return Blocks(self._form, words, packed["scale"], None, packed["perm"])

    def salience(self, x: Tensor, context: Context = EMPTY) -> Tensor:
        """The salience A = I * S of Eq.

        8: x (B, H, T, D) -> (B, H, N, D) float32; Eq. 7 with the lowest tier's bits.
        """
        blocks = self.shape.blocks(x.float())
        # by a tensor: by a plain number a GPU divides as by its reciprocal, one bit off now and then
        spread: Tensor = (blocks.amax(3) - blocks.amin(3)) / blocks.new_full((), 2 ** BITS[1] - 1)
        importance = self._importance(context)
        return spread if importance is None else spread * importance

    def _importance(self, context: Context) -> Tensor | None:
        """The importance I of Eq. 6, (B, H, N or 1, D) float32; None where it is 1."""
        name = STATISTIC[self.importance]
        if not name:
            return None
        if name not in context.stats:
            raise KVCalError(
                f"layer {context.layer}: mixkvq needs the run-time statistic {name} (mean |q| of a row's channels), "
                'which a cache gives and this caller does not; use importance "none" (error-only selection) without '
                "queries"
            )
        return context.stats[name].float().contiguous()

    def tiers(self, salience: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Salience (B, H, N, D) -> channels tier by tier, and where the second and the third tier begin.

        Channels are int64 (B, H, N, D), the beginnings int64 (B, H, N).
        """
        dim, (first, second) = self.shape.dim, self.bounds(salience)
        order = salience.argsort(dim=-1, descending=True, stable=True)
        rank = order.argsort(-1)
        tier = (rank >= first[..., None]).long() + (rank >= second[..., None])
        channel = torch.arange(dim, device=salience.device)
        return (tier * dim + channel).argsort(-1), first, second

    def bounds(self, salience: Tensor) -> tuple[Tensor, Tensor]:
        """The beginnings of the second and the third tier: salience (B, H, N, D) -> two int64 (B, H, N)."""
        if self.full is not None and self.four is not None:
            first = torch.full_like(salience[..., 0], self.full, dtype=torch.long)
            return first, first + self.four
        unit = _median(salience) if self.normalise == "median" else torch.ones_like(salience[:, :1, :, :1])
        first = self._rounded((salience > self.tau_high * unit).sum(-1))
        return first, torch.maximum(first, self._rounded((salience > self.tau_low * unit).sum(-1)))

    def _rounded(self, count: Tensor) -> Tensor:
        step = self.round_up
        return ((count + step - 1).div(step, rounding_mode="floor") * step).clamp_max(self.shape.dim)

    def by_kernel(self) -> MixKVQ:
        """The same codec with channels chosen by a Triton kernel, as torch does; itself where none takes its shape."""
        if mixkvq.refusal(self.shape.heads, self.shape.dim):
            return self
        twin = copy.copy(self)
        twin._kernel = True
        return twin

    @property
    def encodes_by_kernel(self) -> bool:
        return self._kernel

    def example_stats(self, batch: int, blocks: int, generator: torch.Generator) -> dict[str, Tensor]:
        size = (batch, self.shape.heads, blocks, self.shape.dim)
        return {name: torch.rand(size, generator=generator, dtype=torch.float32, device="cpu") for name in self.stats}

    def chosen(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """The `tiers` of the salience of x (B, H, T, D)."""
        if not self._kernel:
            return self.tiers(self.salience(x, context))
        importance, keys = self._importance(context), x if x.stride(3) == 1 else x.contiguous()
        how = Tiers(self.tau_low, self.tau_high, self.round_up, self.normalise == "median", self.full, self.four)
        perm, first, second = mixkvq.fast().select(keys, importance, how, self.shape.block)
        return perm.long(), first.long(), second.long()

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        self.shape.blocks(x)  # refuses a wrong shape
        perm, first, second = self.chosen(x, context)
        if isinstance(self._form, Form):
            return self._encode_words(x, perm, self._form)
        channels = self.shape.blocks(x.float()).transpose(-1, -2).reshape(-1, self.shape.block)
        packed: Packed = {"perm": perm.to(torch.uint8)}
        ends = [first, second, torch.full_like(first, self.shape.dim)]
        begin = torch.zeros_like(first)
        for tier, end in enumerate(ends):
            counts = end - begin
            rows = channels.index_select(0, _rows(perm, begin, counts))
            for name, data in self._encode_rows(tier, rows).items():
                packed[name] = self._stored(tier, data, counts)
            begin = end
        return packed

    def _encode_words(self, x: Tensor, perm: Tensor, form: Form) -> Packed:
        blocks = self.shape.blocks(x.float())
        ordered = blocks.gather(-1, perm[:, :, :, None].expand_as(blocks))
        raw, *lower = ordered.split((form.full, form.four, form.dim - form.full - form.four), -1)
        coded = [self._coded(rows.transpose(-1, -2), bits) for rows, bits in zip(lower, BITS, strict=True)]
        four, two = (codes.transpose(-1, -2).flatten(2, 3) for codes, _, _ in coded)
        scale, base = (torch.cat([one[i][..., 0] for one in coded], -1) for i in (1, 2))
        exact = to_half(raw, "key").flatten(2, 3)
        packed = layout.pack_tiers(exact, four.int(), two.int(), scale, base, perm, form)
        words = packed.words.unflatten(2, (blocks.shape[2], -1)).flatten(3)
        return {"perm": perm.to(torch.uint8), "words": words, "scale": packed.scale}

    def _coded(self, rows: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes (..., b) float32, scale and minimum float16 (..., b / group), from rows (..., b) float32."""
        groups = rows.unflatten(-1, (-1, self.group))
        low, high = groups.amin(-1), groups.amax(-1)
        scale = to_half(((high - low) / low.new_full((), 2**bits - 1)).clamp_min(HALF_FLOOR), "scale")
        base = to_half(low, "group minimum")
        codes = ((groups - base.float()[..., None]) / scale.float()[..., None]).round_().clamp_(0, 2**bits - 1)
        return codes.flatten(-2), scale, base

    def _encode_rows(self, tier: int, rows: Tensor) -> dict[str, Tensor]:
        """Rows (n, b) float32, each a channel -> the tier's tensors (n, ...)."""
        if tier == 0:
            raw = to_half(rows, "key") if self.dtype == "float16" else rows.to(DTYPES[self.dtype])
            return {"raw": raw}
        name, bits = NAMES[tier - 1], BITS[tier - 1]
        codes, scale, base = self._coded(rows, bits)
        return {f"{name}_codes": pack(codes, bits), f"{name}_scale": torch.stack([scale, base], -1)}

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        if isinstance(self._form, Form):
            return layout.decode(self.as_blocks(packed))
        perm = packed["perm"].long()
        size = perm.numel(), self.shape.block
        out = torch.zeros(size, device=perm.device, dtype=torch.float32)  # slots of no block have no rows
        begin = torch.zeros_like(perm[..., 0])
        for tier, name in enumerate(("raw", "four_codes", "two_codes")):
            counts = self._count(packed[name])
            rows = self._decode_rows(tier, packed)
            out.index_copy_(0, _rows(perm, begin, counts), rows)
            begin = begin + counts
        return out.view(*perm.shape, self.shape.block).transpose(-1, -2).flatten(2, 3)

    def decoding(self) -> Hashable:
        return self.settings()

    def _decode_rows(self, tier: int, packed: Packed) -> Tensor:
        if tier == 0:
            return _pool(packed["raw"]).float()
        name, bits = NAMES[tier - 1], BITS[tier - 1]
        codes = unpack(_pool(packed[f"{name}_codes"]), bits, self.shape.block).float()
        scale, base = _pool(packed[f"{name}_scale"]).float()[..., None].unbind(-2)
        return (torch.unflatten(codes, -1, (-1, self.group)) * scale + base).flatten(-2)

    def _stored(self, tier: int, data: Tensor, counts: Tensor) -> Tensor | Ragged:
        """The rows of all items as a pool, or as a tensor (B, H, N, rows, ...) where all items have one size."""
        if self.ragged:
            return Ragged(data, counts.to(self._count_dtype))
        return data.view(*counts.shape, int(self.channels()[tier]), *data.shape[1:])

    def counts(self, packed: Packed) -> list[Tensor]:
        """Channels of each block in each tier: three int64 (B, H, N)."""
        if isinstance(self._form, Form):
            return [torch.full_like(packed["perm"][..., 0], int(n), dtype=torch.long) for n in self.channels()]
        return [self._count(packed[name]) for name in ("raw", "four_codes", "two_codes")]

    @staticmethod
    def _count(stored: Tensor | Ragged) -> Tensor:
        """Channels of each block in a packed tensor's tier: int64 (B, H, N)."""
        if isinstance(stored, Ragged):
            return stored.counts.long()
        return torch.full(stored.shape[:3], stored.shape[3], device=stored.device)

    @property
    def _count_dtype(self) -> torch.dtype:
        return torch.uint8 if self.shape.dim < 256 else torch.int16

    def _row_specs(self) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
        """Tier, shape and dtype of a channel's row in each tensor."""
        block = self.shape.block
        specs: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {"raw": (0, (block,), DTYPES[self.dtype])}
        for tier, (name, bits) in enumerate(zip(NAMES, BITS, strict=True), 1):
            specs[f"{name}_codes"] = (tier, (packed_bytes(block, bits),), torch.uint8)
            specs[f"{name}_scale"] = (tier, (block // self.group, 2), torch.float16)
        return specs

    def channels(self) -> tuple[float, float, float]:
        """Channels per head in each tier: of every block where they are given, else the expected ones."""
        first, second = (self.full, self.four) if self.full is not None else self.expected or (0, 0)
        assert second is not None
        return first, second, self.shape.dim - first - second

    def paper_bits(self) -> float:
        """The mean bits of a channel (Eq. 17), without scales and indices; of ragged blocks by `expected`."""
        return self._mean_bits(*self.channels())

    def paper_bits_of(self, packed: Packed) -> float:
        """The mean bits of a channel (Eq. 17) in the tiers that were chosen; paper_bits() where nothing is packed."""
        full, four, two = [int(count.sum()) for count in self.counts(packed)] if packed else (0, 0, 0)
        return self._mean_bits(full, four, two) if full + four + two else self.paper_bits()

    def _mean_bits(self, full: float, four: float, two: float) -> float:
        exact = 8 * DTYPES[self.dtype].itemsize
        return (full * exact + four * BITS[0] + two * BITS[1]) / (full + four + two)

    def tensor_specs(self) -> Specs:
        """Shape and dtype of the dense tensors: only of the permutation where blocks are ragged."""
        heads, dim = self.shape.heads, self.shape.dim
        specs: Specs = {"perm": ((heads, dim), torch.uint8)}
        if isinstance(self._form, Form):
            words = self.shape.block // layout.BLOCK * self._form.words
            specs |= {"words": ((heads, words), torch.int16), "scale": ((heads, self._form.scales), torch.float16)}
        elif not self.ragged:
            for name, (tier, row, dtype) in self._row_specs().items():
                specs[name] = ((heads, int(self.channels()[tier]), *row), dtype)
        return specs

    def empty(self, batch: int, device: torch.device) -> Packed:
        packed = super().empty(batch, device)
        if self.ragged:
            counts = torch.zeros(batch, self.shape.heads, 0, dtype=self._count_dtype, device=device)
            for name, (_, row, dtype) in self._row_specs().items():
                packed[name] = Ragged(torch.zeros(0, *row, dtype=dtype, device=device), counts.clone())
        return packed

    def block_bytes(self) -> int:
        """Bytes of a block: exact where all have one size, else expected (see `expected`)."""
        if not self.ragged:
            return super().block_bytes()
        heads, total = self.shape.heads, float(super().block_bytes())
        for tier, row, dtype in self._row_specs().values():
            numbers = row[0] * (row[1] if len(row) > 1 else 1)
            total += heads * (self.channels()[tier] * numbers * dtype.itemsize + self._count_dtype.itemsize)
        return round(total)

    def of_heads(self, heads: slice) -> Codec | str:
        if self.ragged and self.normalise == "median":
            return "mixkvq compares a channel's salience with the median of all heads"
        return super().of_heads(heads)

    def config(self) -> MixKVQSettings:
        return {
            "tau_low": self.tau_low,
            "tau_high": self.tau_high,
            "group": self.group,
            "round_up": self.round_up,
            "dtype": self.dtype,
            "importance": self.importance,
            "normalise": self.normalise,
            "full": self.full,
            "four": self.four,
            "expected": None if self.expected is None else list(self.expected),
        }

    @classmethod
    def from_state(cls, shape: Shape, role: Role, config: Mapping[str, object], tensors: dict[str, Tensor]) -> MixKVQ:
        settings = SETTINGS.read(config, "mixkvq codec")
        constants(tensors, {}, "mixkvq codec")
        return cls(shape, role, **settings)


def _median(salience: Tensor) -> Tensor:
    """Lower median of a layer's positive saliences: (B, H, N, D) -> (B, 1, N, 1); 0 where all are zero."""
    flat = salience.transpose(1, 2).flatten(2).sort(-1).values  # (B, N, H * D)
    zeros = (flat <= 0).sum(-1, keepdim=True)
    middle = (zeros + (flat.shape[-1] - zeros - 1).clamp_min(0).div(2, rounding_mode="floor")).clamp_max(
        flat.shape[-1] - 1
    )
    return flat.gather(-1, middle)[:, None]


def _rows(perm: Tensor, begin: Tensor, counts: Tensor) -> Tensor:
    """The rows of a tier among all channels of all items, item after item.

    perm (B, H, N, D), begin and counts (B, H, N) -> int64 (sum of counts,), each item * D + channel.
    """
    dim, sizes = perm.shape[-1], counts.flatten()
    items = torch.repeat_interleave(torch.arange(len(sizes), device=perm.device), sizes)
    within = torch.arange(len(items), device=perm.device) - (sizes.cumsum(0) - sizes)[items]
    place = items * dim + begin.flatten()[items] + within
    return items * dim + perm.flatten()[place]


def _pool(stored: Tensor | Ragged) -> Tensor:
    """The rows of all items, item after item."""
    return stored.data if isinstance(stored, Ragged) else stored.flatten(0, 3)
