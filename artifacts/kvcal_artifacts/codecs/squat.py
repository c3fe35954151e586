"""SQuat's rounding of keys (Wang et al. 2025): later channels take back the errors of those rounded before them.

They do so in the directions of the queries. Q^ is the query subspace, whose rows are singular values times right
singular vectors, and M = I + strength Q^'Q^. After channels b are rounded to deq, the channels r behind them become k_r
- M_rr^-1 M_rb (deq - k_b). That is the minimum of Lemma 2, Eq. 5, in the form that its recursion (Lemma 3) computes
step by step (squat_correction.py). Strength 0 changes nothing.

Storage and decoding are those of the codec inside, which must treat channels apart (KIVI's keys: uniform integers along
tokens).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Iterator, Mapping
from itertools import pairwise
from typing import Literal, TypedDict

import torch
from torch import Tensor

from kvcal_kernels import squat
from kvcal_kernels.layout import Blocks, Form, TransformForm
from kvcal_kernels.quantise import Counts
from kvcal_kernels.squat import Digits, Moves

from ..checked import HEAD_DIM, INNER, Choice, Number, Schema, State, Whole
from ..errors import KVCalError
from .base import EMPTY, Codec, Context, Packed, Role, Shape, Specs
from .constants import Constant, constants, split
from .refusals import check_finite
from .registry import build, state_of
from .squat_correction import Solved, exact_product, responses
from .uniform import Uniform

Subspace = Literal["prompt", "calibrated", "both"]
SUBSPACES: tuple[Subspace, ...] = ("prompt", "calibrated", "both")
CHOICES: dict[str, tuple[str, ...]] = {
    "subspace": SUBSPACES,
    "normalise": ("paper", "length"),
    "queries": ("post_rope", "pre_rope"),
}
STATISTIC = {"post_rope": "query_subspace", "pre_rope": "query_subspace_pre"}
LARGEST = 1e9  # of a calibrated subspace: squares, a million times their strength, are then far from what float64 holds

LEAST = 2.0**-14  # length of the longest one: queries of a model in 16 bits are larger
APART = 1e-4  # cosines of directions rounded to float32 are below 1e-6; so are differences of equal lengths


class SquatSettings(TypedDict):
    """The settings of Squat in a bundle."""

    rank: int
    strength: float
    channels: int
    subspace: Subspace
    normalise: str
    queries: str
    inner: State


SETTINGS = Schema[SquatSettings](
    {
        "rank": Whole(1, HEAD_DIM),
        "strength": Number(0, 1e6),
        "channels": Whole(1, HEAD_DIM),
        "inner": INNER,
        **{name: Choice(allowed) for name, allowed in CHOICES.items()},
    }
)


class Squat(Codec):
    """Keys of another codec, with SQuat's corrections before they are rounded.

    rank: directions of the row's subspace. strength: lambda of Eq. 2 and 5. channels: rounded at a time, g.

    subspace: of the row's queries so far ("prompt"), the bundle's `calibrated` (H, R, D), or both terms added in M.
    normalise: singular values unchanged, which grow with the root of the tokens ("paper"), or over that root
    ("length"); `calibrated` is used unchanged. queries: whether the row's are taken before or after RoPE, in either
    frame of the keys.

    Steps that the device does by itself (max_length) do not change the row's subspace: it is that of the prompt, as
    in the paper's Algorithm 1. Where the host does them it is fitted anew as often as the tokens have doubled.
    """

    name = "squat"
    channels_apart = True
    subspace: Subspace

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
        self._memo: Solved | None = None
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
        """The run-time statistic that gives the row's subspace."""
        return f"{STATISTIC[self.queries]}:{self.rank}" + (":length" if self.normalise == "length" else "")

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        return self.inner.encode(self.corrected(x, context), context)

    def before_rounding(self, x: Tensor, context: Context = EMPTY) -> Tensor:
        # the kernel's result for a NaN is not finite either, where it is rounded; torch rounds here, and refuses scales
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
        """The same codec with corrections by a Triton kernel, bit for bit those of torch.

        It is the codec itself unless it is `plain`, at a shape that `squat.refusal` allows.
        """
        inner, dim, block = self.inner, self.shape.dim, self.shape.block
        if not self.plain or not isinstance(inner, Uniform) or squat.refusal(dim, self.channels, inner.group, block):
            return self
        if self.subspace == "calibrated":  # solved once for all caches; a prompt's subspace is of one cache
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
        return {self.statistic: torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")}

    def corrected(self, x: Tensor, context: Context) -> Tensor:
        """Keys as they are rounded in the end, (B, H, T, D) float32.

        The first channels are unchanged; each later block of channels has the corrections of those before it.
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
        """The result of `corrected` by the kernel, queued run by run; each launch reads x in place."""
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
        """What corrects the blocks of steps whose rows' subspaces (B, H, R, D) stay; None where there are none."""
        root, calibrated = self.strength**0.5, self._calibrated_basis()
        if subspaces is None:
            return self._moves(calibrated[0])
        wide = [basis.expand(len(subspaces), -1, -1, -1) for basis in calibrated]
        return self._moves(torch.cat([subspaces.double() * root, *wide], 2))

    def _calibrated_basis(self) -> list[Tensor]:
        """The calibrated term of M - I, (1, H, R, D) float64, if the codec has one."""
        if self.subspace == "prompt":
            return []
        assert self.calibrated is not None
        return [self.calibrated.double()[None] * self.strength**0.5]

    def due(
        self, ring: Tensor, counts: Counts, new: Tensor, moves: Moves | Digits, out: Tensor | None = None
    ) -> Tensor:
        """Keys that a step packs, as they are rounded, (B, H, block, D) float32: squat.due of the codec inside."""
        inner = self.inner
        assert isinstance(inner, Uniform)
        by = squat.fast() if self._kernel else squat
        keys: Tensor = by.due(ring, counts, new, moves, inner.bits, inner.group, out)
        return keys

    @property
    def _steps(self) -> list[slice]:
        """Channels rounded at a time, except for the last ones, which have none behind them."""
        return [slice(i, i + self.channels) for i in range(0, self.shape.dim - self.channels, self.channels)]

    def _rounded(self, part: Tensor) -> Tensor:
        """What the codec inside decodes of some channels (B, H, N, b, g) alone; it treats channels apart."""
        shape = Shape(self.shape.heads, part.shape[-1], self.shape.block)
        inner = build(shape, self.role, state_of(self.inner), self.inner.tensors())
        return shape.blocks(inner.decode(inner.encode(part.flatten(2, 3))))

    def _responses(self, basis: Tensor) -> list[Tensor]:
        return self._solved(basis).responses

    def _solved(self, basis: Tensor) -> Solved:
        """The corrections of a basis.

        The last ones are remembered: a row's basis changes a dozen times in its life.
        """
        last = self._memo
        if last is None or not last.is_of(basis):
            # by the CPU, a thousand operations on few numbers, bit for bit those of a GPU
            solved = [response.to(basis.device) for response in responses(basis.cpu(), self._steps)]
            last = self._memo = Solved(basis, solved, self.channels)
        return last

    def _bases(self, context: Context, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Runs of blocks with the same subspace in every row, each with its basis (B or 1, H, R, D) float64.

        M - I is the square of the basis.
        """
        root, calibrated = self.strength**0.5, self._calibrated_basis()
        if self.subspace == "calibrated":
            yield slice(None), calibrated[0]
            return
        subspaces = context.stats.get(self.statistic)
        if subspaces is None:
            raise KVCalError(f"layer {context.layer}: run-time statistic {self.statistic} is missing")
        subspaces = subspaces.expand(-1, -1, count, -1, -1)
        changes: list[int] = []
        if count > 1:
            other = (subspaces[:, :, 1:] != subspaces[:, :, :-1]).flatten(3).any(3).any(1).any(0)
            changes = (other.nonzero().flatten() + 1).tolist()
        wide = [basis.expand(len(subspaces), -1, -1, -1) for basis in calibrated]
        for start, stop in pairwise([0, *changes, count]):
            if start < stop:
                yield slice(start, stop), torch.cat([subspaces[:, :, start].double() * root, *wide], 2)

    def fused(self) -> Form | TransformForm | str:
        return self.inner.fused()

    def as_blocks(self, packed: Packed) -> Blocks:
        blocks: Blocks = self.inner.as_blocks(packed)
        return blocks

    def key_factor(self, context: Context = EMPTY) -> Tensor | None:
        return self.inner.key_factor(context)

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        return self.inner.decode(packed, context)

    def decoding(self) -> Hashable:
        return self.inner.decoding()

    def of_heads(self, heads: slice) -> Codec | str:
        inner = self.inner.of_heads(heads)
        if isinstance(inner, str):
            return inner
        settings = self.rank, self.strength, self.channels, self.subspace, self.normalise, self.queries
        return Squat(inner, *settings, None if self.calibrated is None else self.calibrated[heads])

    def config(self) -> SquatSettings:
        return {
            "rank": self.rank,
            "strength": self.strength,
            "channels": self.channels,
            "subspace": self.subspace,
            "normalise": self.normalise,
            "queries": self.queries,
            "inner": state_of(self.inner),
        }

    def tensors(self) -> dict[str, Tensor]:
        calibrated = {} if self.calibrated is None else {"calibrated": self.calibrated}
        return calibrated | {f"inner.{name}": t for name, t in self.inner.tensors().items()}

    @classmethod
    def from_state(cls, shape: Shape, role: Role, config: Mapping[str, object], tensors: dict[str, Tensor]) -> Squat:
        settings = SETTINGS.read(config, "squat codec")
        below, calibrated = split(tensors, "inner.")
        if calibrated or settings["subspace"] != "prompt":
            subspace = Constant(torch.float32, (shape.heads, "R", shape.dim), largest=LARGEST)
            constants(calibrated, {"calibrated": subspace}, "squat codec")
            check_directions(calibrated["calibrated"])
        return cls(
            build(shape, role, settings["inner"], below),
            settings["rank"],
            settings["strength"],
            settings["channels"],
            settings["subspace"],
            settings["normalise"],
            settings["queries"],
            calibrated.get("calibrated"),
        )

    def tensor_specs(self) -> Specs:
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
        chosen = next((one for one in SUBSPACES if one == subspace), None)
        if chosen is None:
            raise KVCalError(f"squat codec, subspace {subspace!r}: allowed are {', '.join(SUBSPACES)}")
        rounding = self.rank, self.strength, self.channels
        return Squat(self.inner, *rounding, chosen, self.normalise, self.queries, self.calibrated)

    def describe(self) -> str:
        return f"{super().describe()} + {self.inner.describe()}"


def check_directions(calibrated: Tensor) -> None:
    """Raises KVCalError for what no singular value decomposition gives. Such rows (H, R, D) are not at right angles to
    one another, do not fall in length, or are all next to nothing.
    """
    if calibrated.is_meta:
        return
    rows = calibrated.double()
    length = rows.norm(dim=-1)
    if float(length.max()) < LEAST:
        raise KVCalError(
            f"squat codec, calibrated: no direction is longer than {float(length.max()):.3g}, needs {LEAST:.3g}"
        )
    if len(grown := (length[:, 1:] > length[:, :-1] * (1 + APART)).nonzero()):
        head, place = grown[0].tolist()
        raise KVCalError(
            f"squat codec, calibrated, head {head}: direction {place + 1} has length "
            f"{float(length[head, place + 1]):.3g}, must be at most that of the one before, "
            f"{float(length[head, place]):.3g}"
        )
    unit = rows / length.clamp_min(1e-300)[..., None]
    cosine = (unit @ unit.mT).triu(1).abs().amax((1, 2))
    if float(cosine.max()) > APART:
        raise KVCalError(
            f"squat codec, calibrated, head {int(cosine.argmax())}: two directions have a cosine of "
            f"{float(cosine.max()):.3g}, must be at right angles"
        )
