"""What a codec is: blocks of tokens go in, packed tensors come out, and it remembers nothing else.

Letters: B batch, H kv heads, T tokens, D head_dim, N blocks, b tokens of a block. Every packed tensor is
(B, H or 1, N, ...), so append, reorder, select, crop and offload are written once, in the cache. Where a part of the
heads has another codec (by_head.py), H is their number.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kvcal_kernels.layout import Blocks, Form, TransformForm
from kvcal_kernels.quantise import AnyRule, Counts
from kvcal_kernels.residual_vq.attention import Coded
from kvcal_kernels.squat import Digits, Moves

from ..errors import KVCalError

Packed: TypeAlias = dict[str, Any]  # tensors by name, or ragged.Ragged where items differ in size
Specs: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of packed tensors by name
Role = Literal["key", "value"]
CONTEXT_TENSORS = ("k1", "v1", "k2", "v2", "k0")


class AttentionKernel(Enum):
    """The kernels that attend to packed tokens as they lie."""

    BLOCKS = "integers, grids and tiers"
    TRANSFORM = "coordinates of a basis"
    CODEBOOK = "vector codes"


@dataclass
class Context:
    """What the layers below decoded of the tokens being coded; every tensor (B, H, T, D) float32 or absent.

    k1, v1: of the previous layer; k2, v2: of the one before; k0: this layer's keys (for values only). stats: run-time
    statistics by name (see cache/statistics/), (B, H, N or 1, ...) for the N blocks being encoded; for decoding those
    that it needs, (B, H, 1, ...).
    """

    layer: int = 0
    k1: Tensor | None = None
    v1: Tensor | None = None
    k2: Tensor | None = None
    v2: Tensor | None = None
    k0: Tensor | None = None
    stats: dict[str, Tensor] = field(default_factory=dict)

    def part(self, start: int, stop: int) -> Context:
        """The context of tokens start to stop."""
        return self._cut(lambda x: x[:, :, start:stop])

    def rows(self, start: int, stop: int) -> Context:
        """The context of batch rows start to stop."""
        cut = self._cut(lambda x: x[start:stop])
        return replace(cut, stats={name: x[start:stop] for name, x in self.stats.items()})

    def _cut(self, change: Callable[[Tensor], Tensor]) -> Context:
        def part(x: Tensor | None) -> Tensor | None:
            return None if x is None else change(x)

        return Context(self.layer, part(self.k1), part(self.v1), part(self.k2), part(self.v2), part(self.k0))


EMPTY = Context()


@dataclass(frozen=True)
class Shape:
    """The keys or values of one layer: kv heads, head_dim, and tokens of a block."""

    heads: int
    dim: int
    block: int

    @property
    def values(self) -> int:
        """Numbers in one block of one row."""
        return self.heads * self.dim * self.block

    def of_heads(self, heads: slice) -> Shape:
        """The shape of some of the heads."""
        return replace(self, heads=len(range(*heads.indices(self.heads))))

    def blocks(self, x: Tensor) -> Tensor:
        """The tokens of x (B, H, T, D) by block: (B, H, N, b, D).

        Raises KVCalError unless T is a multiple of the block.
        """
        if x.shape[1] != self.heads or x.shape[3] != self.dim or x.shape[2] % self.block:
            raise KVCalError(
                f"codec got {tuple(x.shape)}, needs (batch, {self.heads} heads, a multiple of {self.block} tokens, "
                f"{self.dim} channels)"
            )
        return torch.unflatten(x, 2, (-1, self.block))


class Codec(ABC):
    """One way to store keys or values. Configuration is frozen at construction; tensors are constants of the bundle.

    encode is invariant, bit for bit, to batch companions and to how many blocks come in one call.
    """

    name: ClassVar[str]
    needs: frozenset[str] = frozenset()  # Context fields it reads

    @property
    def stats(self) -> frozenset[str]:
        """Names of the run-time statistics it reads from Context.stats."""
        return frozenset()

    @property
    def ragged(self) -> bool:
        """Whether blocks differ in size.

        block_bytes() and bits_per_value() are then what calibration expects of a block, and only a cache knows what its
        blocks take (KVCalCache.bits_per_value()).
        """
        return False

    def __init__(self, shape: Shape, role: Role) -> None:
        self.shape, self.role = shape, role

    @abstractmethod
    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        """Packed tensors (B, H or 1, N, ...) of x (B, H, T, D), of any float dtype, T whole blocks."""

    @abstractmethod
    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        """The numbers (B, H, N * b, D) float32 of packed tensors of N blocks."""

    def decoding(self) -> Hashable:
        """What all codecs have in common whose `decode` may be called once for the rows of all; None: no others.

        It is of codecs that decode alike, each row bit for bit as if it were alone.
        """
        return None

    def settings(self) -> Hashable:
        """Kind, shape and settings, without tensors."""
        return type(self), self.shape, self.role, json.dumps(self.config(), sort_keys=True)

    def fused(self) -> Form | TransformForm | str:
        """How the fused decode-attention kernel reads the packed tensors as they lie, or in one line why it cannot."""
        return f"no fused kernel reads {self.name}"

    # Which kernels can serve it, and what they must know of it.

    @property
    def attention_kernel(self) -> AttentionKernel | None:
        """Which kernel attends to the packed tensors as they lie; None where none does."""
        form = self.fused()
        if isinstance(form, str):
            return None
        return AttentionKernel.TRANSFORM if isinstance(form, TransformForm) else AttentionKernel.BLOCKS

    @property
    def has_attention_kernel(self) -> bool:
        """Whether a kernel attends to blocks of this codec at some shape, if perhaps not at this one."""
        return type(self).fused is not Codec.fused

    def attention_refusal(self, other: Codec) -> str | None:
        """Why no kernel attends to its blocks, `other` being the layer's other codec; None where one may."""
        form = self.fused()
        return form if isinstance(form, str) else None

    @property
    def not_rotated(self) -> str | None:
        """What its blocks hold that the kernel cannot rotate by RoPE as it reads them; None where it can."""
        form = self.fused()
        if isinstance(form, TransformForm):
            return "coordinates of a basis"
        if isinstance(form, Form) and (form.vector or form.tiered):
            return "grids" if form.vector else "tiers"
        return None

    def as_codes(self, packed: Packed) -> Coded:
        """Packed vector codes as the kernels of residual_vq take them. KVCalError where the codec has none."""
        raise KVCalError(f"codec {self.name!r}: it stores no vector codes")

    codebooks: tuple[Tensor, ...] = ()  # of vector codes, each (stages, codewords, dimensions) float16

    @property
    def codewords(self) -> int:
        """How many codewords the largest codebook has; 0 where the codec has no codebooks."""
        return max((book.shape[1] for book in self.codebooks), default=0)

    same_bytes_everywhere: ClassVar[bool] = True  # whether `encode` gives the same bytes on every device
    divided: ClassVar[bool] = False  # whether keys are divided by factors before they are rounded
    # how many channels are rounded at a time, those behind them then corrected; 0: keys are rounded as they are
    corrected_channels: int = 0

    def rule(self, within: str = "") -> AnyRule | str:
        """How quantise's kernels write what the codec stores, or why they cannot. within: the codec around it."""
        return f"no kernel quantises for {within or self.name}"

    def due(
        self, ring: Tensor, counts: Counts, new: Tensor, moves: Moves | Digits, out: Tensor | None = None
    ) -> Tensor:
        """Keys that a step packs, as they are rounded: (B, H, block, D) float32. Only with `corrected_channels`."""
        raise KVCalError(f"codec {self.name!r}: it corrects no keys")

    def step_moves(self, subspaces: Tensor | None) -> Moves:
        """What corrects the blocks of steps. Only with `corrected_channels`.

        subspaces: one per row, (B, H, R, D), which these steps do not change; None where there are none.
        """
        raise KVCalError(f"codec {self.name!r}: it corrects no keys")

    subspace: str | None = None  # directions in which keys are corrected, of those that `choose` takes

    def choose(self, subspace: str) -> Codec:
        """The same codec with another choice of subspace; packed blocks stay readable. Itself where it has none."""
        return self

    @property
    def rounding(self) -> Codec:
        """The codec that rounds what `before_rounding` gives: itself, or the one inside."""
        return self

    @property
    def standing_stats(self) -> frozenset[str]:
        """Run-time statistics that steps on the device do not change after the row's prompt."""
        return frozenset()

    def step_refusal(self, stats: frozenset[str]) -> str | None:
        """Why steps that store keys by this codec cannot run on the device alone; None if they can.

        stats: run-time statistics that keys or values read.
        """
        return None

    @property
    def encoding_codec(self) -> Codec:
        """The codec whose kernels encode: itself, or the one inside, which then encodes float32."""
        return self

    def encoding(self) -> str:
        """What the code of its kernels depends on, in the name of a verdict."""
        return f"{self.outline()}, {self.describe()}"

    def outline(self) -> str:
        """Name and shape in one line."""
        return f"{self.name}, {self.shape.heads} x {self.shape.dim}, blocks of {self.shape.block}"

    def as_blocks(self, packed: Packed) -> Any:
        """The packed tensors of a codec with a form as the kernel takes them, layout.Blocks or TransformBlocks of (B,
        H, N * b / 32, ...), not copied.
        """
        raise KVCalError(f"codec {self.name!r}: {self.fused()}")

    def from_blocks(self, blocks: Blocks, count: int) -> Packed:
        """Packed tensors of `count` of the codec's blocks, integers or a grid, from the kernel's, without a copy."""
        parts = zip(self.tensor_specs(), (blocks.words, blocks.scale), strict=True)
        return {name: x.view(*x.shape[:2], count, -1) for name, x in parts}

    # What methods, checks and servers must know of it.

    lossless: bool = False  # whether float32 numbers come back bit for bit
    channels_apart: bool = False  # whether channels share no scale, so that a large one costs the others nothing
    heads_together: bool = False  # whether a token's kv heads are rotated together, and cannot be decoded one by one
    mixed_heads: ClassVar[bool] = False  # whether kv heads are stored by different codecs
    factor: Tensor | None = None  # of keys' channels, (H, D) float16: what `divided` ones were divided by, from text

    @property
    def undivided(self) -> Codec:
        """The codec of what factors leave: itself, or the one inside."""
        return self

    @property
    def weighable(self) -> bool:
        """Whether weights of channels would change what is stored."""
        return False

    def weighted(self, weight: Tensor) -> Codec:
        """The same codec with these weights of channels, (H, D) float16, where it is `weighable`."""
        raise KVCalError(f"codec {self.name!r}: it weighs no channels")

    inputs: tuple[str, ...] = ()  # what a predictor of its numbers reads of the Context

    @property
    def unpredicted(self) -> Codec:
        """The codec of what a predictor leaves: itself where nothing is predicted, else the one inside."""
        return self

    def prediction(self, context: Context) -> Tensor | None:
        """What a predictor says of the context's tokens, (B, H, T, D) float32; None where there is none."""
        return None

    def decode_as_encoded(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        """The numbers that `encode_decode` gave, bit for bit, from blocks cut in any way."""
        return self.decode(packed, context)

    @property
    def predictor_size(self) -> int:
        """Numbers in the matrices of a predictor; 0 without one."""
        return 0

    def expecting(self, channels: tuple[float, float]) -> Codec:
        """A codec of tiers with the mean channels of a head in the first two, by which `ragged` ones tell their size.

        Others, and those of one size, do not change.
        """
        return self

    def for_decoding(self) -> Codec:
        """The same codec where no kernel attends to its blocks, which may then be stored otherwise, in as many bytes.

        That is so under a predictor, and in schemes that predict layers or store keys before RoPE.
        """
        return self

    def for_lookups(self) -> Codec:
        """The same codec with blocks that kernels read by look-ups, where its blocks are for products of bytes.

        The same numbers come from the same codes in another order, in as many bytes.
        """
        return self

    def by_kernel(self) -> Codec:
        """The same codec, encoding by a Triton kernel; itself where none encodes for it."""
        return self

    @property
    def encodes_by_kernel(self) -> bool:
        """Whether `encode` runs a Triton kernel: after `by_kernel`, or by itself on this device."""
        return False

    def before_rounding(self, x: Tensor, context: Context = EMPTY) -> Tensor:
        """What `encode` rounds, (B, H, T, D): x, unless a codec corrects it first.

        It refuses by `to_half` as encode does; what is not finite it may leave to the rounding.
        """
        return x

    def example_stats(self, batch: int, blocks: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Random run-time statistics of so many rows and blocks, as a Context has them: for a trial of `encode`."""
        return {}

    def key_factor(self, context: Context = EMPTY) -> Tensor | None:
        """The factor of keys decoded from as_blocks, (H, 1, D) or (B, H, 1, D) float32, which queries take instead."""
        return None

    def encode_decode(self, x: Tensor, context: Context = EMPTY) -> tuple[Packed, Tensor]:
        """The result of encode(x), and what it decodes to, (B, H, T, D) float32.

        That is as invariant as encode, because other layers' packed bytes may be computed from it.
        """
        packed = self.encode(x, context)
        return packed, self.decode(packed, context)

    @abstractmethod
    def config(self) -> Mapping[str, object]:
        """JSON-able settings, enough with tensors() to build the codec again by from_state."""

    def tensors(self) -> dict[str, Tensor]:
        """Constants that the bundle stores (grids, signs, predictors), by name."""
        return {}

    @classmethod
    @abstractmethod
    def from_state(
        cls, shape: Shape, role: Role, config: Mapping[str, object], tensors: dict[str, Tensor]
    ) -> Codec: ...

    head_tensors: ClassVar[tuple[str, ...] | None] = None  # constants (H, ...); None: heads may be stored together

    def of_heads(self, heads: slice) -> Codec | str:
        """The codec that stores these kv heads alone, as this one stores them; or why none does.

        A process that holds some of a layer's heads stores them by it.
        """
        if self.head_tensors is None:
            return f"{self.name} may store heads together"
        tensors = {name: t[heads] if name in self.head_tensors else t for name, t in self.tensors().items()}
        return type(self).from_state(self.shape.of_heads(heads), self.role, self.config(), tensors)

    @abstractmethod
    def tensor_specs(self) -> Specs:
        """Shape (without B and N: (H or 1, ...)) and dtype of each packed tensor of one block."""

    def empty(self, batch: int, device: torch.device) -> Packed:
        """Packed tensors of no blocks, for `batch` rows."""
        return {
            name: torch.empty(batch, shape[0], 0, *shape[1:], dtype=dtype, device=device)
            for name, (shape, dtype) in self.tensor_specs().items()
        }

    def block_bytes(self) -> int:
        """Bytes that one block of one row takes."""
        total = 0
        for shape, dtype in self.tensor_specs().values():
            count = 1
            for size in shape:
                count *= size
            total += count * dtype.itemsize
        return total

    def bits_per_value(self) -> float:
        """Stored bits over the values they stand for."""
        return self.block_bytes() * 8 / self.shape.values

    def paper_bits(self) -> float:
        """Bits per value as the method's paper counts them; stored bits where it says nothing else."""
        return self.bits_per_value()

    def code_bits_per_value(self) -> float:
        """Bits per value of the codes alone, for papers that count nothing else; paper_bits() where none does."""
        return self.paper_bits()

    values_by_codes: ClassVar[bool] = False  # whether its paper counts the values of such keys by their codes alone

    def paper_bits_of(self, packed: Packed) -> float:
        """Bits per value of these blocks as `paper_bits` counts them, where their sizes differ (`ragged`)."""
        return self.paper_bits()

    def resident_bytes(self) -> int:
        """Bytes of the constants that must stay in memory to use the codec."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def to(self, device: torch.device) -> Codec:
        """The same codec with its constants on `device`: itself if they are there, else a copy."""
        return self

    def describe(self) -> str:
        """Name and settings in one line."""
        settings = ", ".join(f"{k}={v}" for k, v in self.config().items() if not isinstance(v, dict))
        return f"{self.name}({settings})" if settings else self.name


def outline_of_form(form: Form | str) -> str:
    """How blocks lie in one line, in the name of a verdict; a str says why no attention kernel reads them."""
    return (
        "plain codes" if isinstance(form, str) else ", ".join(f"{name} {value}" for name, value in vars(form).items())
    )


_COPIES = WeakTensorKeyDictionary()  # tensor -> its copies by device


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`: one copy for all codecs that share it, which lives as long as the tensor itself."""
    if tensor.device == device:
        return tensor
    copies: dict[torch.device, Tensor] = _COPIES.setdefault(tensor, {})
    if device not in copies:
        copies[device] = tensor.to(device)
    return copies[device]


PRODUCT_BLOCKS = 8  # blocks of a matrix product while encoding


def by_fixed_rows(x: Tensor, block: int, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute product(x) over the rows of x (..., rows, n), PRODUCT_BLOCKS blocks at a time, padded with zeros.

    A matrix product's last bits may depend on its row count; so a row's bits depend neither on chunking nor on batch
    companions.
    """
    count, step = x.shape[-2], PRODUCT_BLOCKS * block
    padded = torch.nn.functional.pad(x, (0, 0, 0, -count % step))
    products = [product(part) for part in padded.split(step, -2)]
    return (torch.cat(products, -2) if len(products) > 1 else products[0])[..., :count, :]
