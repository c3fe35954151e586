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

from kvcal_kernels.layout import Blocks, Form, TransformForm
from kvcal_kernels.quantise import AnyRule

from ..errors import KVCalError, NonFiniteError

Packed = dict[str, Any]  # Tensor, or store.Ragged where items differ in size
Role = Literal["key", "value"]
CONTEXT_TENSORS = ("k1", "v1", "k2", "v2", "k0")


@dataclass
class Context:
    """What the layers below left for the tokens being coded; every tensor (B, H, T, D) float32 or absent.

    k1, v1: reconstructions of the previous layer; k2, v2: of the one before; k0: this layer's reconstructed keys (for
    values only). stats: run-time statistics by name (see cache/statistics.py), (B, H, N or 1, ...) for the N blocks
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

    def fused(self) -> Form | TransformForm | str:
        """How the fused decode-attention kernel reads the packed tensors as they lie; else, in one line, why it cannot."""
        return f"no fused kernel reads {self.name}"

    # What kernels other than the codec's own must know of it, to serve it.

    same_bytes_everywhere: ClassVar[bool] = True  # whether `encode` gives the same bytes on every device
    divided: ClassVar[bool] = False  # whether keys are divided by factors before they are rounded
    corrected_channels: int = (
        0  # so many are rounded at a time, and those behind corrected; 0: keys are rounded as they are
    )

    def rule(self, within: str = "") -> AnyRule | str:
        """How quantise's kernels write what the codec stores; else why they cannot. within: the codec that it lies in."""
        return f"no kernel quantises for {within or self.name}"

    @property
    def rounding(self) -> Codec:
        """The codec that rounds what `before_rounding` gives: itself, or the one inside."""
        return self

    @property
    def standing_stats(self) -> frozenset[str]:
        """Run-time statistics that steps on the device leave as the row's prompt has made them."""
        return frozenset()

    def step_refusal(self, stats: frozenset[str]) -> str | None:
        """Why steps that store keys by this codec cannot be left to the device; None if they can. stats: run-time statistics
        that keys or values read.
        """
        return None

    @property
    def encoding_codec(self) -> Codec:
        """The codec whose kernels encode: itself, or the one inside, which is then given float32."""
        return self

    def encoding(self) -> str:
        """What the code of its encoding kernels depends on, in the name of a verdict."""
        return f"{self.outline()}, {self.describe()}"

    def outline(self) -> str:
        return f"{self.name}, {self.shape.heads} x {self.shape.dim}, blocks of {self.shape.block}"

    def as_blocks(self, packed: Packed) -> Any:
        """The packed tensors of a codec with a form as the kernel takes them, layout.Blocks or TransformBlocks of (B, H,
        N * b / 32, ...), without a copy.
        """
        raise KVCalError(f"codec {self.name!r}: {self.fused()}")

    def from_blocks(self, blocks: Blocks, count: int) -> Packed:
        """The other way round, without a copy: `count` of the codec's blocks, of integers or a grid."""
        parts = zip(self.tensor_specs(), (blocks.words, blocks.scale), strict=True)
        return {name: x.view(*x.shape[:2], count, -1) for name, x in parts}

    def for_decoding(self) -> Codec:
        """The same codec where no kernel attends to its blocks, which may then be stored otherwise, in as many bytes: under a
        predictor, and in schemes that predict layers or keep keys before RoPE.
        """
        return self

    def for_lookups(self) -> Codec:
        """The same codec with blocks that kernels read by look-ups where its own are for products of bytes: the same numbers
        from the same codes in another order, in as many bytes.
        """
        return self

    def by_kernel(self) -> Codec:
        """The same codec, encoding by a Triton kernel where there is one for it: itself where there is none."""
        return self

    @property
    def encodes_by_kernel(self) -> bool:
        """Whether `encode` runs a Triton kernel: it is what `by_kernel` made, or takes one by itself where it lies."""
        return False

    def before_rounding(self, x: Tensor, context: Context = EMPTY) -> Tensor:
        """What `encode` rounds, (B, H, T, D): x, unless a codec corrects it first. As encode, it refuses by `to_half`; what is
        not finite it may leave to the rounding.
        """
        return x

    def example_stats(self, batch: int, blocks: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Random run-time statistics, as a Context has them, of so many rows and blocks: what a trial of `encode` needs."""
        return {}

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

    def code_bits_per_value(self) -> float:
        """Bits a value of the codes alone, for papers that count nothing else; paper_bits() where no such paper uses it."""
        return self.paper_bits()

    values_by_codes: ClassVar[bool] = False  # whether its paper counts the values beside such keys by their codes alone

    def paper_bits_of(self, packed: Packed) -> float:
        """As paper_bits, of these blocks, where their sizes differ (`ragged`)."""
        return self.paper_bits()

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


_THREAD = threading.local()


class Refusals:
    """What encoding refused inside `collecting`: told by `check`, with one wait for each device, not some for each layer.

    Until then what was refused is encoded as something else, which must not be used.
    """

    def __init__(self) -> None:
        self._found: list[tuple[int, Tensor, Callable[[], NonFiniteError]]] = []

    def note(self, layer: int, fine: Tensor, error: Callable[[], NonFiniteError]) -> None:
        """fine: 0-d bool on the device; error: what to raise where it is not."""
        self._found.append((layer, fine, error))

    def check(self) -> None:
        """Raises NonFiniteError, which names its layer, for the first refusal since the last check."""
        noted, self._found = self._found, []
        places: dict[torch.device, list[Tensor]] = {}
        for _, fine, _ in noted:
            places.setdefault(fine.device, []).append(fine)
        passed = {place: iter(torch.stack(flags).to("cpu").tolist()) for place, flags in places.items()}
        for layer, fine, error in noted:
            if not next(passed[fine.device]):
                raise _of_layer(layer, str(error()))


def _of_layer(layer: int, why: str) -> NonFiniteError:
    error = NonFiniteError(why if why.startswith(f"layer {layer},") else f"layer {layer}: {why}")
    error.layer = layer
    return error


@contextmanager
def collecting(refusals: Refusals, layer: int) -> Iterator[None]:
    """Inside, on this thread, check_finite and to_half leave what they refuse to `refusals`."""
    before, _THREAD.refusals = getattr(_THREAD, "refusals", None), (refusals, layer)
    try:
        yield
    finally:
        _THREAD.refusals = before


def check_finite(x: Tensor, layer: int, role: Role) -> Tensor:
    """x (B, H, T, D); one clear error naming layer and head instead of a silent NaN in the cache."""
    finite = torch.isfinite(x)
    heads = finite.transpose(0, 1).flatten(1).all(1)

    def error() -> NonFiniteError:
        return NonFiniteError(
            f"layer {layer}, {role} head {int((~heads).nonzero()[0])}: a NaN or infinity reached the cache; "
            "only finite values can be compressed: check the model's dtype and weights"
        )

    return _unless(heads.all(), error, x, lambda: x.masked_fill(~finite, 0))


def _unless(fine: Tensor, error: Callable[[], NonFiniteError], x: Tensor, otherwise: Callable[[], Tensor]) -> Tensor:
    """x where `fine` holds. Else raises the error, now or when collected refusals are looked at; then `otherwise`, always."""
    collected: tuple[Refusals, int] | None = getattr(_THREAD, "refusals", None)
    if collected is not None:
        refusals, layer = collected
        refusals.note(layer, fine, error)
        return otherwise()
    if not bool(fine):
        raise error()
    return x


@contextmanager
def device_only() -> Iterator[list[Tensor]]:
    """Inside, encoding waits for no number from the device. What it would refuse is told by the list: (B, H) bool a tensor of
    scales or minima (B, H, ...), True where float16 holds all of a row's head.
    """
    fits: list[Tensor] = []
    _THREAD.fits = fits
    try:
        yield fits
    finally:
        _THREAD.fits = None


def to_half(x: Tensor, what: str) -> Tensor:
    """float32 (B, ...) -> float16 for scales and norms; refuses what float16 cannot hold instead of storing infinity."""
    fits = getattr(_THREAD, "fits", None)
    if fits is not None:
        fits.append((x.abs() <= HALF_MAX).flatten(2).all(2))  # not where x is NaN
        return x.to(torch.float16)
    largest = x.abs().amax() if x.numel() else x.new_zeros(())

    def error() -> NonFiniteError:
        return NonFiniteError(
            f"{what} of {float(largest):.3g} does not fit float16 (largest 65504); use smaller groups"
        )

    return _unless(largest <= HALF_MAX, error, x, lambda: x.clamp(-HALF_MAX, HALF_MAX)).to(torch.float16)


PRODUCT_BLOCKS = 8  # blocks a matrix product while encoding


def by_fixed_rows(x: Tensor, block: int, product: Callable[[Tensor], Tensor]) -> Tensor:
    """product(x) over the rows of x (..., rows, n), always PRODUCT_BLOCKS blocks of them at a time, padded with zeros.

    A matrix product's last bits may depend on its row count; so a row's bits depend neither on chunking nor on batch
    companions.
    """
    count, step = x.shape[-2], PRODUCT_BLOCKS * block
    padded = torch.nn.functional.pad(x, (0, 0, 0, -count % step))
    products = [product(part) for part in padded.split(step, -2)]
    return (torch.cat(products, -2) if len(products) > 1 else products[0])[..., :count, :]


HALF_MAX = 65504.0
HALF_FLOOR = 2.0**-24  # the smallest positive float16: scales never round to zero
