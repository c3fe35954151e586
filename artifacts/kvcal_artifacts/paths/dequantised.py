"""Layers whose blocks the reconstruction kernel decodes (AQUA-KV, HIGGS that no query can be rotated for), one layer at a time
into storage that a cache's layers share: what attention sees of a call is written where it is read, and nothing copied.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvcal_kernels import dequantise
from kvcal_kernels.dequantise import Rotation

from ..codecs import Context
from ..codecs.base import Packed
from ..codecs.reconstruct import Reconstruction, refuses
from ..scheme import LayerCodecs
from . import notices
from .preflight import verdicts

STEP = 256  # tokens by which shared storage grows at least


def refusal(kernels: str, pair: LayerCodecs, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why torch decodes a layer's blocks where they are; None where the kernel does. On a GPU that is tried out once."""
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
        if why := verdicts.reconstruct_verdict(codec, dtype, 0, device):
            reason = f"the reconstruction kernel does not pass on {torch.cuda.get_device_name(device)}: {why}"
            notices.warn(reason, verdict=why)
            return reason
    return None


class Rooms:
    """Storage of one device for layers that are read one after the other: tensors (B, H, room, D) by name, of one shape, so
    that the kernel finds its inputs at the strides of its output. Asked for another shape it starts anew, with room to grow.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, tokens: int, like: Tensor) -> Tensor:
        """(B, H, tokens or more, D) of like's rows, heads, channels, dtype and device; holds anything."""
        batch, heads, _, dim = like.shape
        buffer = next(iter(self._held.values()), None)
        kind = like.shape[:2], dim, like.dtype, like.device
        fits = buffer is not None and (buffer.shape[:2], buffer.shape[3], buffer.dtype, buffer.device) == kind
        if buffer is None or not fits or buffer.shape[2] < tokens:
            self._held = {}
            room = -(-(tokens + tokens // 16) // STEP) * STEP
        else:
            room = buffer.shape[2]
        if name not in self._held:
            with torch.inference_mode(False):  # may be written to outside of it
                self._held[name] = torch.empty(batch, heads, room, dim, dtype=like.dtype, device=like.device)
        return self._held[name]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._held.values())


def reader_of(pair: LayerCodecs, dtype: torch.dtype, kernels: str, number: int, places: int) -> Reader:
    """The reader of a layer's codecs where they are, shared by all caches: it may hold weights of its own."""
    key = dtype, kernels, number, places
    if key not in pair.readers:
        pair.readers[key] = Reader(pair, dtype, kernels, number % places)
    reader: Reader = pair.readers[key]
    return reader


class Reader:
    """Reads one layer's blocks. kernels: as of the cache. number: of the tensors that it uses in shared storage."""

    def __init__(self, pair: LayerCodecs, dtype: torch.dtype, kernels: str, number: int) -> None:
        self._pair, self._dtype, self._by, self._number = pair, dtype, kernels, number
        self._plain = [Reconstruction(codec, dtype, 0, kernels) for codec in (pair.key, pair.value)]
        self._turning: Reconstruction | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Reader:
        return self  # holds nothing of a cache

    def turns(self, rotary: int, device: torch.device) -> bool:
        """Whether keys may be read with RoPE of so many channels; on a GPU that is tried out once."""
        if self._turning is None:
            if self._by == "auto" and (
                why := verdicts.reconstruct_verdict(self._pair.key, self._dtype, rotary, device)
            ):
                notices.warn(f"reconstruction with RoPE: {why}", "keys are turned by torch", why)
                return False
            self._turning = Reconstruction(self._pair.key, self._dtype, rotary, self._by)
        return True

    def __call__(
        self,
        rooms: Rooms,
        packed: list[Packed],
        context: Context,
        exact: tuple[list[Tensor], list[Tensor], list[Tensor]],
        turns: tuple[Rotation, Rotation] | None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """packed: blocks of keys and values. exact: sink, window and new tokens of both. turns: RoPE of the packed tokens, and
        of sink and window, where keys are stored before it; new ones have it. -> whole keys and values (B, H, T, D) in
        shared storage, and what the blocks hold without RoPE, for the layers above.
        """
        sink, window, new = exact
        like, start = window[0], sink[0].shape[2]
        stop = start + packed[0]["norm"].shape[2] * self._pair.key.shape.block
        total = stop + like.shape[2] + new[0].shape[2]
        whole = [rooms.take(f"{what} {self._number}", total, like) for what in ("keys", "values")]
        keys, values = (x[:, :, start:stop] for x in whole)
        if turns is None:
            unrotated = keys
            self._plain[0](packed[0], context, None, unrotated)
        else:
            assert self._turning is not None
            unrotated = rooms.take(f"keys before RoPE {self._number}", total, like)[:, :, start:stop]
            self._turning(packed[0], context, turns[0], unrotated, keys)
        self._plain[1](packed[1], replace(context, k0=unrotated), None, values)
        by = dequantise if self._plain[0].path == "reference" else dequantise.fast()
        fresh = [x if x.dtype == like.dtype else x.to(like.dtype) for x in new]
        by.place(whole, sink, window, fresh, stop, turns and turns[1])
        return [x[:, :, :total] for x in whole], [unrotated, values]
