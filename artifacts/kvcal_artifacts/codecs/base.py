"""What a codec is: blocks of tokens in, packed tensors out, and nothing else kept.

Letters: B batch, H kv heads, T tokens, D head_dim, N blocks, b tokens a block. Every packed tensor is (B, H or 1, N, ...), so
append, reorder, select, crop and offload are written once, in the cache.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kvcal_kernels.attention import Blocks, Form

from ..errors import KVCalError, NonFiniteError

Packed = dict[str, Any]  # Tensor, or store.Ragged where items differ in size
Role = Literal["key", "value"]
CONTEXT_TENSORS = ("k1", "v1", "k2", "v2", "k0")


@dataclass
class Context:
    """What the layers below left for the tokens being coded; every tensor (B, H, T, D) float32 or absent.

    k1, v1: reconstructions of the previous layer; k2, v2: of the one before; k0: this layer's reconstructed keys (for
    values only). stats: run-time statistics by name (see kvcal_artifacts.statistics), (B, H, N or 1, ...) for the N blocks
    being encoded; for decoding those that it needs, (B, H, 1, ...).
    """

    layer: int = 0
    k1: Tensor | None = None
    v1: Tensor | None = None
    k2: Tensor | None = None
    v2: Tensor | None = None
    k0: Tensor | None = None
    stats: dict[str, Tensor] = field(default_factory=dict)

    def part(self, start: int, stop: int) -> Context:
        """The same for tokens start to stop."""
        return self._cut(lambda x: x[:, :, start:stop])

    def rows(self, start: int, stop: int) -> Context:
        """The same for batch rows start to stop."""
        cut = self._cut(lambda x: x[start:stop])
        return replace(cut, stats={name: x[start:stop] for name, x in self.stats.items()})

    def _cut(self, change: Callable[[Tensor], Tensor]) -> Context:
        parts: dict[str, Any] = {name: change(x) for name in CONTEXT_TENSORS if (x := getattr(self, name)) is not None}
        return Context(self.layer, **parts)


EMPTY = Context()


@dataclass(frozen=True)
class Shape:
    """The keys or values of one layer: kv heads, head_dim, tokens a block."""

    heads: int
    dim: int
    block: int

    @property
    def values(self) -> int:
        """Numbers in one block of one row."""
        return self.heads * self.dim * self.block

    def blocks(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, H, N, b, D), T a multiple of the block."""
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
    needs: ClassVar[frozenset[str]] = frozenset()  # Context fields it reads

    @property
    def stats(self) -> frozenset[str]:
        """Names of the run-time statistics it reads from Context.stats."""
        return frozenset()

    @property
    def ragged(self) -> bool:
        """Whether blocks differ in size: block_bytes() and bits_per_value() are then what calibration expects of a block, and
        only a cache knows what its blocks take (KVCalCache.bits_per_value()).
        """
        return False

    def __init__(self, shape: Shape, role: Role) -> None:
        self.shape, self.role = shape, role

    @abstractmethod
    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        """x (B, H, T, D) any float dtype, T whole blocks -> packed tensors (B, H or 1, N, ...)."""

    @abstractmethod
    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        """Packed tensors of N blocks -> (B, H, N * b, D) float32."""

    def fused(self) -> Form | str:
        """How the fused decode-attention kernel reads the packed tensors as they lie; else, in one line, why it cannot."""
        return f"no fused kernel reads {self.name}"

    def as_blocks(self, packed: Packed) -> Blocks:
        """The packed tensors of a codec with a form as the kernel takes them, (B, H, N * b / 32, ...), without a copy."""
        raise KVCalError(f"codec {self.name!r}: {self.fused()}")

    def for_decoding(self) -> Codec:
        """The same codec where no kernel attends to its blocks, which may then be stored otherwise, in as many bytes: under a
        predictor, and in schemes that predict layers or keep keys before RoPE.
        """
        return self

    def by_kernel(self) -> Codec:
        """The same codec, encoding by a Triton kernel where there is one for it: itself where there is none."""
        return self

    def key_factor(self, context: Context = EMPTY) -> Tensor | None:
        """What decoded keys are multiplied by after as_blocks, (H, 1, D) or (B, H, 1, D) float32: the query takes it."""
        return None

    def encode_decode(self, x: Tensor, context: Context = EMPTY) -> tuple[Packed, Tensor]:
        """encode(x), and what it decodes to (B, H, T, D) float32: as invariant as encode, because other layers' packed
        bytes may be computed from it.
        """
        packed = self.encode(x, context)
        return packed, self.decode(packed, context)

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """JSON-able settings, enough with tensors() to build the codec again by from_state."""

    def tensors(self) -> dict[str, Tensor]:
        """Constants kept in the bundle (grids, signs, predictors), by name."""
        return {}

    @classmethod
    @abstractmethod
    def from_state(cls, shape: Shape, role: Role, config: dict[str, Any], tensors: dict[str, Tensor]) -> Codec: ...

    @abstractmethod
    def tensor_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape (without B and N: (H or 1, ...)) and dtype of each packed tensor of one block."""

    def empty(self, batch: int, device: torch.device) -> Packed:
        """Packed tensors of no blocks, for `batch` rows."""
        return {
            name: torch.empty(batch, shape[0], 0, *shape[1:], dtype=dtype, device=device)
            for name, (shape, dtype) in self.tensor_specs().items()
        }

    def block_bytes(self) -> int:
        """Bytes that one block of one row takes, from tensor_specs."""
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
        """Bits a value as the method's own paper counts them; stored bits where it says nothing else."""
        return self.bits_per_value()

    def resident_bytes(self) -> int:
        """Bytes of the constants that must stay in memory to use the codec."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def to(self, device: torch.device) -> Codec:
        """The same codec with its constants on `device`: itself if they are there, else a copy that shares nothing moved."""
        return self

    def describe(self) -> str:
        settings = ", ".join(f"{k}={v}" for k, v in self.config().items() if not isinstance(v, dict))
        return f"{self.name}({settings})" if settings else self.name


_COPIES = WeakTensorKeyDictionary()  # tensor -> its copies by device


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`: one copy for all codecs that share it, kept as long as the tensor itself."""
    if tensor.device == device:
        return tensor
    copies: dict[torch.device, Tensor] = _COPIES.setdefault(tensor, {})
    if device not in copies:
        copies[device] = tensor.to(device)
    return copies[device]


def check_finite(x: Tensor, layer: int, role: Role) -> None:
    """One clear error naming layer and head instead of a silent NaN in the cache."""
    if bool(torch.isfinite(x).all()):
        return
    bad = (~torch.isfinite(x)).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    raise NonFiniteError(
        f"layer {layer}, {role} head {bad[0]}: a NaN or infinity reached the cache; "
        "only finite values can be compressed: check the model's dtype and weights"
    )


_THREAD = threading.local()


@contextmanager
def device_only() -> Iterator[list[Tensor]]:
    """Inside, encoding waits for no number from the device. What it would refuse is told, row by row, by the list: (B,) bool a
    tensor of scales or minima, True where float16 holds all.
    """
    fits: list[Tensor] = []
    _THREAD.fits = fits
    try:
        yield fits
    finally:
        _THREAD.fits = None


def to_half(x: Tensor, what: str) -> Tensor:
    """float32 (B, ...) -> float16 for scales and norms; refuses what float16 cannot hold instead of storing infinity."""
    holds, fits = x.abs() <= 65504.0, getattr(_THREAD, "fits", None)  # not where x is NaN
    if fits is not None:
        fits.append(holds.flatten(1).all(1))
    elif not bool(holds.all()):
        raise NonFiniteError(
            f"{what} of {float(x.abs().max()):.3g} does not fit float16 (largest 65504); use smaller groups"
        )
    return x.to(torch.float16)


PRODUCT_BLOCKS = 8  # blocks a matrix product while encoding


def by_fixed_rows(x: Tensor, block: int, product: Callable[[Tensor], Tensor]) -> Tensor:
    """product(x) over the rows of x (..., rows, n), always PRODUCT_BLOCKS blocks of them at a time, padded with zeros.

    A matrix product's last bits may depend on its row count; so a row's bits depend neither on chunking nor on batch
    companions.
    """
    count, step = x.shape[-2], PRODUCT_BLOCKS * block
    padded = torch.nn.functional.pad(x, (0, 0, 0, -count % step))
    made = [product(part) for part in padded.split(step, -2)]
    return (torch.cat(made, -2) if len(made) > 1 else made[0])[..., :count, :]


HALF_FLOOR = 2.0**-24  # the smallest positive float16: scales never round to zero
