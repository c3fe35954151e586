"""Uniform integers in groups: any axis, symmetric, asymmetric or the better of both, 1 to 8 bits, really packed.

Asymmetric (KIVI Eq. 1 and 2; InnerQ Eq. 10 to 12; Quanto's qint2/qint4 cache): s = (max - min) / (2^b - 1), code =
round((x - min) / s), half to even.

Symmetric: two's-complement codes -2^(b-1) to 2^(b-1) - 1 with s = max|x| / 2^(b-1), the range of InnerQ's kernels. Its
Eq. 13 has another level count (docs/lab/methods.md). At one bit the two codes are -s and +s with s = mean|x|.

Hybrid (InnerQ section 4.1.2): each group is symmetric or asymmetric with the same bits, whichever has the lower squared
error. The sign bit of the scale says which (set: asymmetric). Minima are stored densely, 0 for symmetric groups.

`search` tries a list of factors on each group's scale and takes the one with the lowest squared error. Keys may have a
`weight` for each channel, by which the error counts: only an encoder reads it. Scale and minimum are rounded to float16
before the codes are computed, so that encoder and decoder agree.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

import torch
from torch import Tensor

from kvcal_kernels import layout
from kvcal_kernels.hadamard import tree_sum
from kvcal_kernels.layout import Blocks, Form
from kvcal_kernels.packing import pack, packed_bytes, unpack
from kvcal_kernels.quantise import AnyRule, Rule

from ..checked import BLOCK, HALF_MAX, Choice, Field, Flag, Schema, Whole
from ..errors import KVCalError
from .base import EMPTY, Codec, Context, Packed, Role, Shape, Specs, on_device
from .constants import Constant, constants
from .refusals import HALF_FLOOR, to_half

Axis = Literal["channel", "token"]
Mode = Literal["asymmetric", "symmetric", "hybrid"]
MODES = ("asymmetric", "symmetric", "hybrid")

# `search` tries these, the plain scale first, so that it wins a tie. On Gaussian groups of 32 the best factors lie
# between 0.6 and 1.35 (symmetric, 2 bits: 1st to 99th percentile), those of a range between 0.55 and 1, at one bit down
# to 0.3; finer steps gain less than 1 % of the error.
SCALES = tuple(i / 20 for i in (*range(20, 10, -1), *range(21, 28)))
RANGES = tuple(i / 20 for i in range(20, 5, -1))


class UniformSettings(TypedDict):
    """The settings of Uniform in a bundle."""

    bits: int
    group: int
    axis: Axis
    mode: Mode
    search: bool


class FirstSettings(TypedDict):
    """The settings of Uniform in a bundle written before there was a hybrid mode."""

    bits: int
    group: int
    axis: Axis
    symmetric: bool


_SHARED: dict[str, Field] = {"bits": Whole(1, 8), "group": Whole(1, BLOCK), "axis": Choice(("channel", "token"))}
SETTINGS = Schema[UniformSettings]({**_SHARED, "mode": Choice(MODES), "search": Flag()})
FIRST_SETTINGS = Schema[FirstSettings]({**_SHARED, "symmetric": Flag()})


@dataclass
class _Coded:
    """Groups (..., g) coded with one choice of scale: codes float32, scale and base float16 (...)."""

    codes: Tensor
    scale: Tensor
    base: Tensor | None
    error: Tensor | None = None  # sum of squares over the group, float32; only where choices are compared


class Uniform(Codec):
    """Integers of 1 to 8 bits in groups that share a scale.

    axis "channel": a group is `group` consecutive channels of one token ("per token"); "token": `group` consecutive
    tokens of one channel ("per channel"). Where `fused` gives a form, blocks are stored as the fused kernel reads them;
    else key codes are packed along channels, value codes along tokens.

    search: in mode "symmetric" the factors are also tried with a negative sign. That puts the longer end of the code
    range on the side where the group needs it; stored scales are then negative in about half of the groups. weight: (H,
    D) float16, positive: what a squared error of each channel counts where candidates are compared; None: all count
    alike. It is for groups of channels only: a group of tokens has one channel, so a weight changes nothing.
    """

    name = "uniform"
    head_tensors = ("weight",)

    def __init__(
        self,
        shape: Shape,
        role: Role,
        bits: int = 4,
        group: int = 64,
        axis: Axis = "channel",
        mode: Mode = "asymmetric",
        search: bool = False,
        weight: Tensor | None = None,
    ) -> None:
        super().__init__(shape, role)
        if type(bits) is not int or type(group) is not int:
            raise KVCalError(f"uniform codec, bits {bits!r}, group {group!r}: must be integers")
        length = shape.dim if axis == "channel" else shape.block
        if not 1 <= bits <= 8:
            raise KVCalError(f"uniform codec of {bits} bits: allowed are 1 to 8")
        if axis not in ("channel", "token"):
            raise KVCalError(f"uniform codec along axis {axis!r}: allowed are 'channel' and 'token'")
        if group < 1 or length % group:
            raise KVCalError(f"uniform codec, groups of {group} along {axis}: must divide {length}")
        if mode not in MODES:
            raise KVCalError(f"uniform codec of mode {mode!r}: allowed are {', '.join(map(repr, MODES))}")
        if search not in (False, True):
            raise KVCalError(f"uniform codec, search {search!r}: must be true or false")
        self.bits, self.group, self.axis, self.mode, self.search = bits, group, axis, mode, bool(search)
        self.weight, self.channels_apart = weight, axis == "token"
        if weight is not None:
            self._check_weight(weight)
        self._form = self._find_form()

    @property
    def weighable(self) -> bool:
        """Whether weights of channels would change what is stored."""
        return self.axis == "channel" and self.search

    def _check_weight(self, weight: Tensor) -> None:
        if not self.weighable:
            raise KVCalError(
                f"uniform codec, weights of channels with axis {self.axis!r}, search {self.search}: need axis "
                "'channel' and a search"
            )
        expected = Constant(torch.float16, (self.shape.heads, self.shape.dim), positive=True)
        constants({"weight": weight}, {"weight": expected}, "uniform codec")

    def weighted(self, weight: Tensor) -> Uniform:
        """The same codec with these weights of channels, (H, D) float16."""
        return Uniform(self.shape, self.role, **self.config(), weight=weight)

    def paper_bits(self) -> float:
        """Codes, a 16-bit scale per group, and a 16-bit zero point per group except in mode "symmetric".

        InnerQ's Table 3 and AQUA-KV's tables, of KIVI and Quanto, count so.
        """
        return self.bits + (16 if self.mode == "symmetric" else 32) / self.group

    def code_bits_per_value(self) -> float:
        return self.bits

    def fused(self) -> Form | str:
        return self._form

    def _find_form(self) -> Form | str:
        inner = (self.axis == "channel") == (self.role == "key")
        if self.shape.block % layout.BLOCK:
            return f"blocks of {self.shape.block} tokens: the fused kernel reads multiples of {layout.BLOCK}"
        try:
            form = Form(self.role, self.shape.dim, self.bits, self.group, inner, self.mode == "symmetric")
        except ValueError as error:
            return f"the fused kernel cannot read {error}"
        nominal = self.paper_bits()
        if form.stored_bits > nominal:
            return (
                f"{self.bits} bits at head_dim {self.shape.dim} would take {form.stored_bits:g} bits in the fused "
                f"kernel's layout, {nominal:g} as stored"
            )
        return form

    def rule(self, within: str = "") -> AnyRule | str:
        if self.weight is not None:
            return (
                "a search for scales weighted by queries is torch's (fit-norms --search plain is packed by the kernel)"
            )
        form = self.fused()
        if isinstance(form, str):
            return form
        try:
            return Rule(form, self.mode, self.search)
        except ValueError as error:
            return str(error)

    def as_blocks(self, packed: Packed) -> Blocks:
        if isinstance(self._form, str):
            refused: Blocks = super().as_blocks(packed)
            return refused
        words, scale = packed["words"], packed["scale"]
        return Blocks(
            self._form,
            words.flatten(2).unflatten(2, (-1, self._form.words)),
            scale.flatten(2).unflatten(2, (-1, self._form.scales)),
        )

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        best = self._best(self._grouped(self.shape.blocks(x.float())))
        flat = self._ungrouped(best.codes)
        if isinstance(self._form, Form):
            zero = None if best.base is None else self._by_token(self._zero(best.scale, best.base))
            scale = best.scale.abs() if self.mode == "hybrid" else best.scale
            stored = layout.pack(flat.flatten(2, 3), self._by_token(scale), zero, self._form)
            return {
                name: getattr(stored, name).unflatten(2, (flat.shape[2], -1)).flatten(3) for name in ("words", "scale")
            }
        if self.role == "value":
            flat = flat.transpose(-1, -2)
        packed = {"codes": pack(flat, self.bits), "scale": best.scale}
        if self.mode != "symmetric":
            assert best.base is not None
            packed["min"] = best.base
        return packed

    def _by_token(self, x: Tensor) -> Tensor:
        """Scales of groups in the order of layout.pack: (B, H, T, D/g) or (B, H, T/g, D)."""
        return (x.transpose(-1, -2) if self.axis == "token" else x).flatten(2, 3)

    def _zero(self, scale: Tensor, base: Tensor) -> Tensor:
        """Zero points; for symmetric groups of the hybrid mode, what their lowest code stands for."""
        return torch.where(torch.signbit(scale), base, self._lowest(scale)) if self.mode == "hybrid" else base

    def _lowest(self, scale: Tensor) -> Tensor:
        return -(2.0 ** (self.bits - 1)) * scale

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        if isinstance(self._form, Form):
            return layout.decode(self.as_blocks(packed))
        codes, scale, base = self.groups(packed)
        return self._ungrouped(self._restore(self._grouped(codes.float()), scale, base)).flatten(2, 3)

    def decoding(self) -> Hashable:
        return self.settings()

    def groups(self, packed: Packed) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes (B, H, N, b, D), float16 scales and zero points (B, H, N, b, D/g), along tokens (B, H, N, D, b/g)."""
        s = self.shape
        if isinstance(self._form, Form):
            codes, *parts = layout.unpack(self.as_blocks(packed))
            tokens = s.block if self.axis == "channel" else s.block // self.group
            wide = [None if x is None else x.unflatten(2, (-1, tokens)) for x in parts]
            scale, base = (x if x is None or self.axis == "channel" else x.transpose(-1, -2) for x in wide)
            assert scale is not None
            return s.blocks(codes), scale, base
        codes = unpack(packed["codes"], self.bits, s.block if self.role == "value" else s.dim)
        return codes.transpose(-1, -2) if self.role == "value" else codes, packed["scale"], packed.get("min")

    def symmetric_share(self, packed: Packed) -> float:
        """The share of groups that are symmetric: InnerQ's sparsity of the mode mask (section 6.2)."""
        if self.mode == "hybrid":
            _, scale, base = self.groups(packed)
            assert base is not None
            same = base == self._lowest(scale) if isinstance(self._form, Form) else ~torch.signbit(scale)
            return float(same.double().mean())
        return float(self.mode == "symmetric")

    def _restore(self, codes: Tensor, scale: Tensor, base: Tensor | None) -> Tensor:
        """Codes (..., g) float32 in [0, 2^b), scale and base (...) -> (..., g) float32."""
        step = scale.float()[..., None]
        if self.mode == "symmetric":
            return self._centred(codes) * step
        assert base is not None
        if self.mode == "asymmetric":
            return codes * step + base.float()[..., None]
        size, shifted = step.abs(), torch.signbit(step)
        return torch.where(shifted, codes, self._centred(codes)) * size + base.float()[..., None]

    def _centred(self, codes: Tensor) -> Tensor:
        return codes * 2 - 1 if self.bits == 1 else codes - 2 ** (self.bits - 1)

    def _best(self, x: Tensor) -> _Coded:
        """The candidate with the lowest squared error for each group, by the weights if any; the first of equals."""
        if not self.search and self.mode != "hybrid":
            return next(self._candidates(x))
        best: _Coded | None = None
        weight = None
        if self.weight is not None:  # (H, 1, 1, D / g, g)
            weight = torch.unflatten(self.weight.float(), -1, (-1, self.group))[:, None, None]
        for other in self._candidates(x):
            off = self._restore(other.codes, other.scale, other.base) - x
            other.error = tree_sum(off * off if weight is None else off * off * weight)
            best = other if best is None else _lower(best, other)
        assert best is not None
        return best

    def _candidates(self, x: Tensor) -> Iterator[_Coded]:
        """Ways to code the groups: symmetric ones first, the plain scale before searched ones."""
        if self.mode != "asymmetric":
            wide = self.search and self.bits > 1  # at one bit mean|x| is the best there is
            signs = (1, -1) if wide and self.mode == "symmetric" else (1,)
            scales = SCALES if wide else (1.0,)
            yield from self._symmetric(x, [sign * factor for factor in scales for sign in signs])
        if self.mode != "symmetric":
            yield from self._asymmetric(x, RANGES if self.search else (1.0,))

    def _symmetric(self, x: Tensor, factors: list[float]) -> Iterator[_Coded]:
        base = torch.zeros(x.shape[:-1], dtype=torch.float16, device=x.device) if self.mode == "hybrid" else None
        half = 2 ** (self.bits - 1)
        limit = HALF_MAX if base is None else HALF_MAX / half  # hybrid: the lowest code must fit float16 too
        plain = tree_sum(x.abs()) / self.group if self.bits == 1 else x.abs().amax(-1) / half
        to_half(plain, "scale")  # refuses before a factor below 1 could hide it
        for factor in factors:
            size = (plain * abs(factor)).clamp(HALF_FLOOR, limit).to(torch.float16)
            scale = size if factor > 0 else -size
            if self.bits == 1:
                yield _Coded((x >= 0).float(), scale, base)
            else:
                codes = (x / scale.float()[..., None]).round_().clamp_(-half, half - 1)
                yield _Coded(codes.add_(half), scale, base)

    def _asymmetric(self, x: Tensor, factors: tuple[float, ...]) -> Iterator[_Coded]:
        """Codes over ranges of `factor` times the group's range, around its middle."""
        low, spread, levels = x.amin(-1), x.amax(-1) - x.amin(-1), 2**self.bits - 1
        # a tensor: by a plain number a GPU divides as by its reciprocal, one bit off now and then
        top = x.new_full((), levels)
        to_half(spread / top, "scale")
        to_half(low, "group minimum")
        for factor in factors:
            scale = (spread * factor / top).clamp(HALF_FLOOR, HALF_MAX).to(torch.float16)
            base = (low + spread * ((1 - factor) / 2)).to(torch.float16)
            codes = ((x - base.float()[..., None]) / scale.float()[..., None]).round_().clamp_(0, levels)
            yield _Coded(codes, -scale if self.mode == "hybrid" else scale, base)

    def _grouped(self, blocks: Tensor) -> Tensor:
        """Blocks (B, H, N, b, D) by group: channel axis (B, H, N, b, D/g, g); token axis (B, H, N, D, b/g, g)."""
        if self.axis == "token":
            blocks = blocks.transpose(-1, -2)
        return torch.unflatten(blocks, -1, (-1, self.group))

    def _ungrouped(self, grouped: Tensor) -> Tensor:
        flat = grouped.flatten(-2)
        return flat.transpose(-1, -2) if self.axis == "token" else flat

    def config(self) -> UniformSettings:
        return {"bits": self.bits, "group": self.group, "axis": self.axis, "mode": self.mode, "search": self.search}

    @classmethod
    def from_state(cls, shape: Shape, role: Role, config: Mapping[str, object], tensors: dict[str, Tensor]) -> Uniform:
        settings = _settings(config)
        constants({name: t for name, t in tensors.items() if name != "weight"}, {}, "uniform codec")
        if "weight" in tensors:  # its mean over a head is 1
            expected = Constant(torch.float16, (shape.heads, shape.dim), positive=True, largest=shape.dim)
            constants({"weight": tensors["weight"]}, {"weight": expected}, "uniform codec")
        return cls(shape, role, **settings, weight=tensors.get("weight"))

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.weight is None else {"weight": self.weight}

    def to(self, device: torch.device) -> Uniform:
        if self.weight is None or self.weight.device == device:
            return self
        twin = copy.copy(self)
        twin.weight = on_device(self.weight, device)
        return twin

    def tensor_specs(self) -> Specs:
        s = self.shape
        if isinstance(self._form, Form):
            kernel_blocks = s.block // layout.BLOCK
            return {
                "words": ((s.heads, kernel_blocks * self._form.words), torch.int16),
                "scale": ((s.heads, kernel_blocks // self._form.scale_blocks * self._form.scales), torch.float16),
            }
        rows, count = (s.dim, s.block) if self.role == "value" else (s.block, s.dim)
        groups = (s.block, s.dim // self.group) if self.axis == "channel" else (s.dim, s.block // self.group)
        specs: Specs = {
            "codes": ((s.heads, rows, packed_bytes(count, self.bits)), torch.uint8),
            "scale": ((s.heads, *groups), torch.float16),
        }
        if self.mode != "symmetric":
            specs["min"] = ((s.heads, *groups), torch.float16)
        return specs


def _settings(config: object) -> UniformSettings:
    if type(config) is not dict or "symmetric" not in config:
        return SETTINGS.read(config, "uniform codec")
    first = FIRST_SETTINGS.read(config, "uniform codec")
    mode: Mode = "symmetric" if first["symmetric"] else "asymmetric"
    return {"bits": first["bits"], "group": first["group"], "axis": first["axis"], "mode": mode, "search": False}


def _lower(best: _Coded, other: _Coded) -> _Coded:
    """The one with the lower error for each group; `best` where they are equal."""
    assert best.error is not None and other.error is not None
    better = other.error < best.error
    base = None
    if best.base is not None and other.base is not None:
        base = torch.where(better, other.base, best.base)
    return _Coded(
        torch.where(better[..., None], other.codes, best.codes),
        torch.where(better, other.scale, best.scale),
        base,
        torch.where(better, other.error, best.error),
    )
