"""Layers whose blocks a kernel dequantises (AQUA-KV, HIGGS that no query can be rotated for) for the model's attention.

One layer at a time is decoded into storage that a cache's layers share. The keys and values of a call are written where
attention reads them, and nothing is copied.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvcal_kernels import dequantise
from kvcal_kernels.dequantise import Rotation

from ..codecs import Context
from ..codecs.base import Packed
from ..codecs.dequantise import Dequantiser, refuses
from ..scheme import LayerCodecs
from . import notices
from .preflight import verdicts

STEP = 256  # tokens by which shared storage grows at least


def refusal(kernels: str, pair: LayerCodecs, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why torch decodes a layer's blocks on their device; None where the kernel does. On a GPU it is tried once."""
    if kernels == "off":
        return "kernels='off'"
    anywhere = kernels == "torch" or (kernels == "triton" and verdicts.interpreted())
    if not anywhere and (why := verdicts.unsupported(device)):
        return why
    for codec in (pair.key, pair.value):
        if why := refuses(codec, dtype if kernels != "torch" else torch.float16):
            return f"{codec.role}s: {why}"
    if anywhere:
        return None
    for codec in (pair.key, pair.value):
        if why := verdicts.dequantise_verdict(codec, dtype, 0, device):
            reason = f"the reconstruction kernel does not pass on {torch.cuda.get_device_name(device)}: {why}"
            notices.warn(reason, verdict=why)
            return reason
    return None


class SharedStorage:
    """Storage of one device for layers that are read one after the other.

    Tensors (B, H, capacity, D) lie under names and have one shape, so that the kernel finds its inputs at the strides
    of its output. For another shape it starts anew, with capacity to grow.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, tokens: int, like: Tensor) -> Tensor:
        """A tensor (B, H, tokens or more, D) of like's rows, heads, channels, dtype and device, of any content."""
        batch, heads, _, dim = like.shape
        buffer = next(iter(self._buffers.values()), None)
        kind = like.shape[:2], dim, like.dtype, like.device
        fits = buffer is not None and (buffer.shape[:2], buffer.shape[3], buffer.dtype, buffer.device) == kind
        if buffer is None or not fits or buffer.shape[2] < tokens:
            self._buffers = {}
            capacity = -(-(tokens + tokens // 16) // STEP) * STEP
        else:
            capacity = buffer.shape[2]
        if name not in self._buffers:
            with torch.inference_mode(False):  # may be written to outside of it
                self._buffers[name] = torch.empty(batch, heads, capacity, dim, dtype=like.dtype, device=like.device)
        return self._buffers[name]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._buffers.values())


def dequantiser_of(pair: LayerCodecs, dtype: torch.dtype, kernels: str, number: int, places: int) -> LayerDequantiser:
    """The dequantiser of a layer's codecs on their device, shared by all caches: it may have converted weights."""
    key = dtype, kernels, number, places
    shared = pair.dequantisers.get(key)
    if not isinstance(shared, LayerDequantiser):
        shared = pair.dequantisers[key] = LayerDequantiser(pair, dtype, kernels, number % places)
    return shared


class LayerDequantiser:
    """Dequantises one layer's blocks. kernels: the choice of the cache. number: of its tensors in shared storage."""

    def __init__(self, pair: LayerCodecs, dtype: torch.dtype, kernels: str, number: int) -> None:
        self._pair, self._dtype, self._by, self._number = pair, dtype, kernels, number
        self._plain = [Dequantiser(codec, dtype, 0, kernels) for codec in (pair.key, pair.value)]
        self._rotating: Dequantiser | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> LayerDequantiser:
        return self  # holds nothing of a cache

    def rotates(self, rotary: int, device: torch.device) -> bool:
        """Whether it reads keys with RoPE of so many channels; on a GPU that is tried once."""
        if self._rotating is None:
            if self._by == "auto" and (why := verdicts.dequantise_verdict(self._pair.key, self._dtype, rotary, device)):
                notices.warn(f"reconstruction with RoPE: {why}", "keys are rotated by torch", why)
                return False
            self._rotating = Dequantiser(self._pair.key, self._dtype, rotary, self._by)
        return True

    def __call__(
        self,
        storage: SharedStorage,
        packed: list[Packed],
        context: Context,
        exact: tuple[list[Tensor], list[Tensor], list[Tensor]],
        rotations: tuple[Rotation, Rotation] | None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Whole keys and values (B, H, T, D) in shared storage, and what blocks decode to without RoPE.

        packed: blocks of keys and values. exact: sink, window and new tokens of both. rotations: RoPE of the packed
        tokens, and of sink and window, where keys are stored before it; new ones have it.
        """
        sink, window, new = exact
        like, start = window[0], sink[0].shape[2]
        stop = start + packed[0]["norm"].shape[2] * self._pair.key.shape.block
        total = stop + like.shape[2] + new[0].shape[2]
        whole = [storage.take(f"{what} {self._number}", total, like) for what in ("keys", "values")]
        keys, values = (x[:, :, start:stop] for x in whole)
        if rotations is None:
            unrotated = keys
            self._plain[0](packed[0], context, None, unrotated)
        else:
            assert self._rotating is not None
            unrotated = storage.take(f"keys before RoPE {self._number}", total, like)[:, :, start:stop]
            self._rotating(packed[0], context, rotations[0], unrotated, keys)
        self._plain[1](packed[1], replace(context, k0=unrotated), None, values)
        by = dequantise if self._plain[0].path == "reference" else dequantise.fast()
        fresh = [x if x.dtype == like.dtype else x.to(like.dtype) for x in new]
        by.place(whole, sink, window, fresh, stop, rotations and rotations[1])
        return [x[:, :, :total] for x in whole], [unrotated, values]
