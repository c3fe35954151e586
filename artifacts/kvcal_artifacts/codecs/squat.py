"""SQuat's rounding (Wang et al. 2025): channels of a key are rounded a block after the other, and what is not yet rounded
takes back, in the directions that queries look at, what rounding did.

With Q^ the query subspace (rows: singular values times right singular vectors) and M = I + strength Q^'Q^, after channels b
are rounded to deq, the channels r behind them become k_r - M_rr^-1 M_rb (deq - k_b): the minimum of Lemma 2, Eq. 5, in the
form that its recursion (Lemma 3) computes step by step. Strength 0 changes nothing.

Storage and decoding are those of the codec inside, which must treat channels apart (KIVI's keys: uniform integers along
tokens). Bits of a block depend on the block and its subspace alone: M_rr^-1 M_rb comes from element-wise float64 operations
in a fixed order, its product with the error is a sum of integers that float64 holds exactly.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, cast

import torch
from torch import Tensor

from kvcal_kernels import squat
from kvcal_kernels.hadamard import tree_sum
from kvcal_kernels.layout import Blocks, Form, TransformForm
from kvcal_kernels.squat import Digits, Moves

from ..checked import HEAD_DIM, INNER, Choice, Constant, Number, Table, Whole, constants, split
from ..errors import KVCalError
from .base import EMPTY, Codec, Context, Packed, Role, Shape, check_finite
from .registry import build, state_of
from .uniform import Uniform

if TYPE_CHECKING:
    from kvcal_kernels.quantise import Counts

Subspace = Literal["prompt", "calibrated", "both"]
CHOICES: dict[str, tuple[str, ...]] = {
    "subspace": ("prompt", "calibrated", "both"),
    "normalise": ("paper", "length"),
    "queries": ("post_rope", "pre_rope"),
}
STATISTIC = {"post_rope": "query_subspace", "pre_rope": "query_subspace_pre"}
LARGEST = 1e9  # of a calibrated subspace: squares, a million times their strength, are then far from what float64 holds
SETTINGS = Table(
    {
        "rank": Whole(1, HEAD_DIM),
        "strength": Number(0, 1e6),
        "channels": Whole(1, HEAD_DIM),
        "inner": INNER,
        **{name: Choice(allowed) for name, allowed in CHOICES.items()},
    }
)


class Squat(Codec):
    """rank: directions of the row's own subspace. strength: lambda of Eq. 2 and 5. channels: rounded at a time, g.

    subspace: the row's own queries so far ("prompt"), the bundle's `calibrated` (H, R, D), or both terms added in M.
    normalise: singular values as they are, which grow with the root of the tokens ("paper"), or over that root ("length");
    `calibrated` is used as it is. queries: whether the row's own are taken before or after RoPE, in either frame of the keys.

    Steps that the device does by itself (max_length) keep the row's own subspace as they find it, that of the prompt as in the
    paper's Algorithm 1; where the host does them it is fitted anew as often as the tokens have doubled.
    """

    name = "squat"

    def __init__(
        self,
        inner: Codec,
        rank: int = 5,
        strength: float = 1e-3,
        channels: int = 64,
        subspace: Subspace = "prompt",
        normalise: str = "paper",
        queries: str = "post_rope",
        calibrated: Tensor | None = None,
    ) -> None:
        super().__init__(inner.shape, inner.role)
        self.inner, self.rank, self.strength, self.channels = inner, rank, strength, channels
        self.corrected_channels = channels
        self.subspace, self.normalise, self.queries, self.calibrated = subspace, normalise, queries, calibrated
        self._memo: _Solved | None = None
        self._kernel = False  # whether one corrects
        self._check()

    def _check(self) -> None:
        if getattr(self.inner, "axis", None) != "token":
            raise KVCalError(
                f"squat codec over {self.inner.describe()}: needs one whose groups run along tokens (axis 'token'), "
                "or rounding a channel would depend on the channels behind it"
            )
        for name, value in (("rank", self.rank), ("channels", self.channels)):
            if type(value) is not int or value < 1:
                raise KVCalError(f"squat codec, {name} {value!r}: must be a whole number of at least 1")
        if not isinstance(self.strength, float | int) or not 0 <= self.strength < math.inf:
            raise KVCalError(f"squat codec, strength {self.strength!r}: must be a number of at least 0, and finite")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise KVCalError(f"squat codec, {name} {getattr(self, name)!r}: allowed are {', '.join(allowed)}")
        calibrated = self.calibrated
        if calibrated is None and self.subspace != "prompt":
            raise KVCalError(f"squat codec, subspace {self.subspace!r}: no calibrated subspace is given")
        if calibrated is not None and (
            calibrated.ndim != 3 or (calibrated.shape[0], calibrated.shape[2]) != (self.shape.heads, self.shape.dim)
        ):
            raise KVCalError(
                f"squat codec, calibrated {tuple(calibrated.shape)}: must be ({self.shape.heads}, R, {self.shape.dim})"
            )

    @property
    def stats(self) -> frozenset[str]:
        return self.inner.stats if self.subspace == "calibrated" else self.inner.stats | {self.statistic}

    @property
    def statistic(self) -> str:
        """The run-time statistic that gives the row's own subspace."""
        return f"{STATISTIC[self.queries]}:{self.rank}" + (":length" if self.normalise == "length" else "")

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        return self.inner.encode(self.corrected(x, context), context)

    def before_rounding(self, x: Tensor, context: Context = EMPTY) -> Tensor:
        # what the kernel makes of a NaN is not finite either, where it is rounded; torch rounds here, and refuses scales
        return self.corrected(x if self._kernel else check_finite(x, context.layer, self.role), context)

    @property
    def rounding(self) -> Codec:
        return self.inner

    @property
    def standing_stats(self) -> frozenset[str]:
        return frozenset({self.statistic})

    def step_refusal(self, stats: frozenset[str]) -> str | None:
        return None if self.plain else f"SQuat over {self.inner.describe()}, whose correction asks the host"

    def encoding(self) -> str:
        inner = self.inner
        if not isinstance(inner, Uniform):
            return super().encoding()
        return f"{self.outline()}, {self.channels} channels, {inner.bits} bits, group {inner.group}, {self.subspace}"

    @property
    def plain(self) -> bool:
        """Whether `kvcal_kernels.squat` has its corrections: of uniform integers, asymmetric, without a search."""
        inner = self.inner
        return isinstance(inner, Uniform) and inner.mode == "asymmetric" and not inner.search

    def by_kernel(self) -> Squat:
        """Its corrections by a Triton kernel, bit for bit those of torch: of `plain` ones at shapes that `squat.refusal`
        lets through.
        """
        inner, dim, block = self.inner, self.shape.dim, self.shape.block
        if not self.plain or not isinstance(inner, Uniform) or squat.refusal(dim, self.channels, inner.group, block):
            return self
        if self.subspace == "calibrated":  # solved once for all caches; a prompt's own subspace is of one
            self._solved(next(self._bases(EMPTY, 1))[1])
        twin = copy.copy(self)
        twin._kernel = True
        return twin

    @property
    def encodes_by_kernel(self) -> bool:
        return self._kernel

    def example_stats(self, batch: int, blocks: int, generator: torch.Generator) -> dict[str, Tensor]:
        if self.subspace == "calibrated":
            return {}
        size = (batch, self.shape.heads, blocks, self.rank, self.shape.dim)
        return {self.statistic: torch.randn(size, generator=generator)}

    def corrected(self, x: Tensor, context: Context) -> Tensor:
        """Keys as they are rounded in the end (B, H, T, D) float32: the first channels unchanged, each later block with the
        corrections of those before it.
        """
        if self._kernel:
            return self._corrected_by_kernel(x, context)
        keys = self.shape.blocks(x.float()).clone()
        parts = [(blocks, self._responses(basis)) for blocks, basis in self._bases(context, keys.shape[2])]
        for i, here in enumerate(self._steps):
            error = self._rounded(keys[..., here]) - keys[..., here]
            rest = keys[..., here.stop :]
            for blocks, moves in parts:
                change = exact_product(error[:, :, blocks], moves[i])
                rest[:, :, blocks] = (rest[:, :, blocks].double() - change).float()
        return keys.flatten(2, 3)

    def _corrected_by_kernel(self, x: Tensor, context: Context) -> Tensor:
        """Queued run by run; each launch reads x where it lies."""
        count, block = self.shape.blocks(x).shape[2], self.shape.block
        x = x if x.stride(3) == 1 else x.contiguous()
        assert isinstance(self.inner, Uniform)
        parts = []
        for run, basis in self._bases(context, count):
            first, last, _ = run.indices(count)
            part = x[:, :, first * block : last * block]
            rounding = self.inner.bits, self.inner.group, block
            parts.append(squat.fast().corrected(part, self._moves(basis), *rounding))
        return torch.cat(parts, 2) if len(parts) != 1 else parts[0]

    def _moves(self, basis: Tensor) -> Moves:
        return self._solved(basis).moves

    def step_moves(self, subspaces: Tensor | None) -> Moves:
        """What corrects the blocks of steps whose rows' own subspaces (B, H, R, D) stay; None where there are none."""
        root = self.strength**0.5
        fixed = [] if self.subspace == "prompt" or self.calibrated is None else [self.calibrated.double()[None] * root]
        if subspaces is None:
            return self._moves(fixed[0])
        return self._moves(
            torch.cat([subspaces.double() * root, *(basis.expand(len(subspaces), -1, -1, -1) for basis in fixed)], 2)
        )

    def due(
        self, ring: Tensor, counts: Counts, new: Tensor, moves: Moves | Digits, out: Tensor | None = None
    ) -> Tensor:
        """squat.due of the codec inside: keys that a step packs, as they are rounded (B, H, block, D) float32."""
        inner = self.inner
        assert isinstance(inner, Uniform)
        by = squat.fast() if self._kernel else squat
        keys: Tensor = by.due(ring, counts, new, moves, inner.bits, inner.group, out)
        return keys

    @property
    def _steps(self) -> list[slice]:
        """Channels rounded at a time, but for the last ones, which have none behind them."""
        return [slice(i, i + self.channels) for i in range(0, self.shape.dim - self.channels, self.channels)]

    def _rounded(self, part: Tensor) -> Tensor:
        """What the codec inside makes of some channels (B, H, N, b, g) alone; it treats channels apart."""
        shape = Shape(self.shape.heads, part.shape[-1], self.shape.block)
        inner = build(shape, self.role, state_of(self.inner), self.inner.tensors())
        return shape.blocks(inner.decode(inner.encode(part.flatten(2, 3))))

    def _responses(self, basis: Tensor) -> list[Tensor]:
        return self._solved(basis).responses

    def _solved(self, basis: Tensor) -> _Solved:
        """The last one is remembered, as a row's own basis changes a dozen times in its life."""
        last = self._memo
        if last is None or not _same(last.basis, basis):
            last = self._memo = _Solved(basis, responses(basis, self._steps), self.channels)
        return last

    def _bases(self, context: Context, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Runs of blocks with the same subspace in every row, and what M - I is the square of: (B or 1, H, R, D) float64."""
        root, fixed = self.strength**0.5, []
        if self.subspace != "prompt":
            assert self.calibrated is not None
            fixed = [self.calibrated.double()[None] * root]
        if self.subspace == "calibrated":
            yield slice(None), fixed[0]
            return
        subspaces = context.stats.get(self.statistic)
        if subspaces is None:
            raise KVCalError(f"layer {context.layer}: run-time statistic {self.statistic} is missing")
        subspaces = subspaces.expand(-1, -1, count, -1, -1)
        changes = (subspaces[:, :, 1:] != subspaces[:, :, :-1]).flatten(3).any(3).any(1).any(0).nonzero().flatten() + 1
        fixed = [basis.expand(len(subspaces), -1, -1, -1) for basis in fixed]
        for start, stop in pairwise([0, *changes.tolist(), count]):
            if start < stop:
                yield slice(start, stop), torch.cat([subspaces[:, :, start].double() * root, *fixed], 2)

    def fused(self) -> Form | TransformForm | str:
        return self.inner.fused()

    def as_blocks(self, packed: Packed) -> Blocks:
        blocks: Blocks = self.inner.as_blocks(packed)
        return blocks

    def key_factor(self, context: Context = EMPTY) -> Tensor | None:
        return self.inner.key_factor(context)

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        return self.inner.decode(packed, context)

    def config(self) -> dict[str, Any]:
        names = ("rank", "strength", "channels", "subspace", "normalise", "queries")
        inner = {"codec": self.inner.name, "config": self.inner.config()}
        return {name: getattr(self, name) for name in names} | {"inner": inner}

    def tensors(self) -> dict[str, Tensor]:
        calibrated = {} if self.calibrated is None else {"calibrated": self.calibrated}
        return calibrated | {f"inner.{name}": t for name, t in self.inner.tensors().items()}

    @classmethod
    def from_state(cls, shape: Shape, role: Role, config: dict[str, Any], tensors: dict[str, Tensor]) -> Squat:
        SETTINGS.check(config, "squat codec")
        below, calibrated = split(tensors, "inner.")
        if calibrated or config["subspace"] != "prompt":
            subspace = Constant(torch.float32, (shape.heads, "R", shape.dim), largest=LARGEST)
            constants(calibrated, {"calibrated": subspace}, "squat codec")
        settings = dict(config)
        inner = build(shape, role, settings.pop("inner"), below)
        return cls(inner, **settings, calibrated=calibrated.get("calibrated"))

    def tensor_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return self.inner.tensor_specs()

    def paper_bits(self) -> float:
        return self.inner.paper_bits()

    def code_bits_per_value(self) -> float:
        return self.inner.code_bits_per_value()

    def to(self, device: torch.device) -> Squat:
        inner, calibrated = self.inner.to(device), self.calibrated
        if inner is self.inner and (calibrated is None or calibrated.device == device):
            return self
        twin = copy.copy(self)
        twin.inner, twin.calibrated, twin._memo = inner, None if calibrated is None else calibrated.to(device), None
        return twin

    def choose(self, subspace: str) -> Squat:
        """The same codec with another choice of subspace; packed blocks stay readable."""
        settings = {name: value for name, value in self.config().items() if name not in ("inner", "subspace")}
        return Squat(self.inner, **settings, subspace=cast(Subspace, subspace), calibrated=self.calibrated)

    def describe(self) -> str:
        return f"{super().describe()} + {self.inner.describe()}"


@dataclass(frozen=True)
class _Solved:
    """What a basis of `_bases` gives: `responses` of its steps of so many channels, and what the kernel takes of them."""

    basis: Tensor
    responses: list[Tensor]
    channels: int

    @cached_property
    def moves(self) -> Moves:
        return squat.moves(self.responses, self.channels)


def corrects(codec: Codec) -> TypeGuard[Squat]:
    """Whether it is this codec, whose corrections steps on the device make by themselves."""
    return isinstance(codec, Squat)


def responses(basis: Tensor, steps: list[slice]) -> list[Tensor]:
    """M_br M_rr^-1 of M = I + basis'basis for each step: b its channels, r those behind them.

    basis (..., R, D) float64 -> for each step (..., g, D - stop) float64. As M_rr^-1 basis_r' = basis_r' K^-1 with
    K = I + basis_r basis_r' (R, R), K^-1 is all that is needed; channels enter it from the last one on, one at a time
    (Sherman and Morrison), and every step takes it as it is then.
    """
    rank, behind, products = basis.shape[-2], basis.shape[-1], []
    inverse = torch.eye(rank, dtype=basis.dtype, device=basis.device).expand(*basis.shape[:-1], rank)
    for here in reversed(steps):
        for channel in reversed(range(here.stop, behind)):
            column = basis[..., channel]
            moved = tree_sum(inverse * column[..., None, :])
            size = 1 + tree_sum(column * moved)
            inverse = inverse - moved[..., :, None] * moved[..., None, :] / size[..., None, None]
        behind = here.stop
        solved = _product(inverse, basis[..., here])
        products.append(_product(solved.transpose(-1, -2), basis[..., behind:]))
    return products[::-1]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.shape == other.shape and torch.equal(one, other)


def _product(first: Tensor, second: Tensor) -> Tensor:
    """first @ second, element by element in a fixed order; of few columns of `first`."""
    total = first[..., :, :1] * second[..., :1, :]
    for i in range(1, second.shape[-2]):
        total = total + first[..., :, i, None] * second[..., i, None, :]
    return total


def exact_product(error: Tensor, response: Tensor) -> Tensor:
    """error (B, H, N, b, g) float32 @ response (B or 1, H, g, r) float64 -> (B, H, N, b, r) float64.

    Both are rounded to integers of at most (53 - log2 g) / 2 bits, errors block by block, so that float64 adds the products
    exactly in any order and shape. For g = 64 that is 23 bits: at most g * 2^-23 times the largest of both (7.6e-6).
    """
    bits = (53 - (error.shape[-1] - 1).bit_length()) // 2
    whole, unit = squat.integers(error, bits)
    weight, step = squat.integers(response, bits)
    product = whole.flatten(2, 3) @ weight
    exact: Tensor = torch.unflatten(product, 2, error.shape[2:4])
    return exact * (unit * step[:, :, None])
