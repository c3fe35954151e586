"""What a cache does with a model's keys and values: windows, frame, and one pair of codecs per layer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from kvcal_kernels.layout import Form
from kvcal_kernels.layout.form import fits_int8_mma

from ..codecs import Codec, Packed
from ..codecs.base import AttentionKernel
from ..errors import KVCalError
from .windows import HeavyHitters, Windows

Frame = Literal["pre_rope", "post_rope"]
FRAMES = ("pre_rope", "post_rope")


@dataclass(frozen=True)
class LayerCodecs:
    """The codecs of one layer.

    dequantisers: by what paths/dequantised.py makes them of; caches on a device share them.
    """

    key: Codec
    value: Codec
    dequantisers: dict[object, object] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def needs(self) -> frozenset[str]:
        return self.key.needs | self.value.needs

    def read_by(self, ratio: int = 1) -> LayerCodecs:
        """The same codecs, blocks in the order in which a kernel reads them for `ratio` query heads per kv head.

        Grids in bytes are looked up where the ratio is above four, or where the other codec's blocks are not for
        products of bytes.
        """
        forms = [form for codec in (self.key, self.value) if isinstance(form := codec.fused(), Form)]
        if not any(form.in_bytes for form in forms) or (ratio <= 4 and len(forms) == 2 and fits_int8_mma(*forms)):
            return self
        return LayerCodecs(self.key.for_lookups(), self.value.for_lookups())

    @property
    def attention_kernel(self) -> AttentionKernel | None:
        """The kernel that attends to both codecs' blocks; None where none does, or not one for both."""
        kernel = self.key.attention_kernel
        return kernel if kernel is self.value.attention_kernel else None

    @property
    def has_codes(self) -> bool:
        """Whether keys and values are vector codes, which the kernels of residual_vq read and append."""
        return self.attention_kernel is AttentionKernel.CODEBOOK

    @property
    def decoding(self) -> Hashable:
        """What `Codec.decoding` says of both; None where either says None."""
        both = self.key.decoding(), self.value.decoding()
        return None if None in both else both

    @property
    def stats(self) -> frozenset[str]:
        """Run-time statistics that either reads."""
        return self.key.stats | self.value.stats

    def bits_per_value(self) -> float:
        """Stored bits over keys and values together."""
        numbers = self.key.shape.values + self.value.shape.values
        return (self.key.block_bytes() + self.value.block_bytes()) * 8 / numbers

    def paper_bits(self, codes_alone: bool = False, packed: Sequence[Packed] | None = None) -> float:
        """Bits per value as the papers count, keys and values together. packed: blocks of both, whose sizes then count.

        codes_alone: without scales and zero points. MixKVQ's paper counts so, its 2-bit values too (Eq. 17; "2.3
        bits").
        """
        key = self.key.paper_bits() if packed is None else self.key.paper_bits_of(packed[0])
        value = self.value.paper_bits() if packed is None else self.value.paper_bits_of(packed[1])
        if codes_alone:
            key = self.key.code_bits_per_value()
        if codes_alone or self.key.values_by_codes:
            value = self.value.code_bits_per_value()
        numbers = self.key.shape.values, self.value.shape.values
        return (key * numbers[0] + value * numbers[1]) / sum(numbers)


def coverage(layers: int, skipped: Mapping[int, str]) -> str:
    """One line: "compresses 3 of 18 layers; 15 sliding-window layers keep their own cache".

    skipped: index -> reason.
    """
    phrases = [f"compresses {layers - len(skipped)} of {layers} layers"]
    kinds: dict[str, int] = {}
    for reason in skipped.values():
        kind = next(
            (phrase for start, phrase in KINDS.items() if reason.startswith(start)), f"not compressed: {reason}"
        )
        kinds[kind] = kinds.get(kind, 0) + 1
    return "; ".join(phrases + [f"{count} {kind}" for kind, count in kinds.items()])


KINDS = {  # how a reason starts -> what describe() calls such layers
    "sliding-attention": "sliding-window layers keep their own cache",
    "chunked-attention": "chunked-attention layers keep their own cache",
    "shares": "layers share the keys and values of earlier ones",
}


@dataclass(frozen=True)
class Scheme:
    """A value of this type is a compression method, fitted or not.

    layers[i] is None where the layer is left to Transformers' own cache; skipped[i] then says why. selection: which
    tokens are kept at all; None keeps every one. codes_alone: the method's paper counts codes only (paper_bits).
    """

    windows: Windows
    frame: Frame
    layers: tuple[LayerCodecs | None, ...]
    skipped: dict[int, str] = field(default_factory=dict)
    selection: HeavyHitters | None = None
    codes_alone: bool = field(default=False, compare=False)
    _placed: dict[tuple[int, torch.device, bool], LayerCodecs] = field(default_factory=dict, repr=False, compare=False)
    _of_heads: dict[tuple[int, int], Scheme | str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.frame not in FRAMES:
            raise KVCalError(f"frame {self.frame!r}: allowed are {', '.join(FRAMES)}")
        for index, pair in enumerate(self.layers):
            if pair is None and index not in self.skipped:
                raise KVCalError(f"layer {index} has no codecs and no reason for it")
            if pair is not None:
                self._check(index, pair)
        if self.chained or self.frame == "pre_rope":
            layers = [p and LayerCodecs(p.key.for_decoding(), p.value.for_decoding()) for p in self.layers]
            object.__setattr__(self, "layers", tuple(layers))
        object.__setattr__(self, "layers", tuple(pair and pair.read_by() for pair in self.layers))

    def _check(self, index: int, pair: LayerCodecs) -> None:
        for codec in (pair.key, pair.value):
            if codec.shape.block != self.windows.block:
                raise KVCalError(f"layer {index}: codec block {codec.shape.block}, window block {self.windows.block}")

    def check_chain(self) -> None:
        """Raises KVCalError where a layer is predicted from more layers below than are compressed."""
        for index, pair in enumerate(self.layers):
            if pair is not None and self.below(index, self.depth(pair)) is None:
                raise KVCalError(f"layer {index} is predicted from a layer below that is missing or not compressed")

    @cached_property
    def compressed(self) -> tuple[int, ...]:
        """The layers that have codecs, lowest first."""
        return tuple(index for index, pair in enumerate(self.layers) if pair is not None)

    def below(self, layer: int, back: int) -> int | None:
        """The layer `back` compressed layers below this one, which its predictors read; None where there is none.

        Layers that Transformers caches do not count.
        """
        place = self.compressed.index(layer) - back
        return self.compressed[place] if place >= 0 else None

    @property
    def coverage(self) -> str:
        """How many layers are compressed, and what becomes of the others."""
        return coverage(len(self.layers), self.skipped)

    @staticmethod
    def depth(pair: LayerCodecs) -> int:
        """How many compressed layers must lie below this one: 0, 1 or 2."""
        return max((int(name[1]) for name in pair.needs if name != "k0"), default=0)

    @cached_property
    def chained(self) -> bool:
        """Whether any layer reads reconstructions."""
        return any(pair is not None and pair.needs for pair in self.layers)

    @cached_property
    def reach(self) -> int:
        """How many layers' reconstructions are needed at a time."""
        return max((self.depth(pair) for pair in self.layers if pair is not None), default=0)

    @property
    def ragged(self) -> bool:
        """Whether any codec's blocks differ in size: bits_per_value() is then an expectation (Codec.ragged)."""
        return any(pair is not None and (pair.key.ragged or pair.value.ragged) for pair in self.layers)

    def bits_per_value(self) -> float:
        """Stored bits per value without the windows, by formula; an expectation where blocks differ in size."""
        pairs = [pair for pair in self.layers if pair is not None]
        stored = sum(p.key.block_bytes() + p.value.block_bytes() for p in pairs)
        return stored * 8 / sum(p.key.shape.values + p.value.shape.values for p in pairs)

    def paper_bits(self) -> float:
        """Bits per value as the methods' papers count, averaged over layers."""
        return self._mean({index: pair.paper_bits(self.codes_alone) for index, pair in self._pairs()})

    def paper_bits_of(self, packed: Mapping[int, Sequence[Packed]]) -> float:
        """Bits per value of a cache's blocks as `paper_bits` counts them.

        packed: layer -> packed keys and values, for every compressed layer.
        """
        bits = {index: pair.paper_bits(self.codes_alone, packed[index]) for index, pair in self._pairs()}
        return self._mean(bits)

    def _pairs(self) -> list[tuple[int, LayerCodecs]]:
        return [(index, pair) for index, pair in enumerate(self.layers) if pair is not None]

    def _mean(self, bits: Mapping[int, float]) -> float:
        """The mean over layers, weighted by the numbers that a block of each stands for."""
        numbers = {index: pair.key.shape.values + pair.value.shape.values for index, pair in self._pairs()}
        return sum(bits[index] * numbers[index] for index in bits) / sum(numbers.values())

    def resident_bytes(self) -> int:
        """Bytes of predictors, grids and signs; tensors shared by layers counted once."""
        codecs = [codec for pair in self.layers if pair for codec in (pair.key, pair.value)]
        tensors = {t.data_ptr(): t for codec in codecs for t in codec.tensors().values()}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    def on(self, layer: int, device: torch.device, ratio: int = 1) -> LayerCodecs:
        """A layer's codecs with their constants on `device`, shared by all caches there; other devices keep theirs.

        ratio: query heads per kv head.
        """
        pair = self.layers[layer]
        if pair is None:
            raise KVCalError(f"layer {layer} is not compressed: {self.skipped[layer]}")
        reading = pair.read_by(ratio)
        if (layer, device, reading is pair) not in self._placed:
            self._placed[layer, device, reading is pair] = LayerCodecs(reading.key.to(device), reading.value.to(device))
        return self._placed[layer, device, reading is pair]

    def of_heads(self, heads: slice) -> Scheme | str:
        """The scheme of these kv heads of every layer, or why some layer stores heads together."""
        span = heads.start, heads.stop
        if span not in self._of_heads:  # caches of one scheme share its constants
            self._of_heads[span] = self._cut(heads)
        return self._of_heads[span]

    def _cut(self, heads: slice) -> Scheme | str:
        layers: list[LayerCodecs | None] = []
        for index, pair in enumerate(self.layers):
            if pair is None:
                layers.append(None)
                continue
            key, value = pair.key.of_heads(heads), pair.value.of_heads(heads)
            for role, codec in (("keys", key), ("values", value)):
                if isinstance(codec, str):
                    return f"layer {index}, {role}: {codec}"
            assert not isinstance(key, str) and not isinstance(value, str)
            layers.append(LayerCodecs(key, value))
        return replace(self, layers=tuple(layers), _placed={})

    def keeping(self, selection: HeavyHitters | None) -> Scheme:
        """The same codecs with this token selection (None: without)."""
        return replace(self, selection=selection)

    def config(self) -> dict[str, object]:
        """JSON-able settings of the scheme, without its layers."""
        entries: dict[str, object] = {"windows": asdict(self.windows), "frame": self.frame}
        return entries if self.selection is None else entries | {"selection": asdict(self.selection)}
