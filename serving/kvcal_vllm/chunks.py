"""Whole chunks of tokens, of all layers at once, as bytes and back: what a cold tier of a server stores.

A cold tier sees every layer of a chunk together. Codecs that read the layer below (AQUA-KV) fit there, though not the
pages of a running request. A stored chunk is a header, each layer's packed keys and then its packed values in the
codec's order of tensors, and a checksum over all of it.

Letters: L layers, T tokens, H kv heads, D head_dim, b tokens of a block.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator

import torch
from torch import Tensor

from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.checked import shown
from kvcal_artifacts.codecs import Codec, Context, Packed
from kvcal_artifacts.codecs.refusals import check_finite
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.scheme import LayerCodecs, Scheme

HEADER = struct.Struct("<8sHI32s")  # magic, version of the format, tokens, sha256 of the bundle
MAGIC, VERSION = b"kvcalchk", 1
CHECKSUM = 32  # bytes of BLAKE2b behind all others


def usable_device(name: object) -> torch.device:
    """The device of a serde's entry. Raises UsageError for one that cannot hold numbers here."""
    allowed = "must be cpu, cuda or cuda:N, and usable here"
    try:
        device = torch.device(str(name))
        if device.type not in ("cpu", "cuda"):
            raise UsageError(f"serde kvcal, device = {shown(name)}: {allowed}")
        torch.empty(1, device=device, dtype=torch.float32)
    except (RuntimeError, AssertionError) as error:  # what torch raises where it is built without CUDA
        reason = str(error).splitlines()[0]
        raise UsageError(f"serde kvcal, device = {shown(name)}: {allowed}: {reason}") from error
    return device


class ChunkCodec:
    """The codecs of a bundle over chunks (2, L, T, H * D) of keys and values, keys after RoPE, any float dtype.

    device: where codecs compute. Every token is packed, the bundle's windows do not apply. Equal chunks give equal
    bytes on one device. Raises UsageError for a scheme whose bytes depend on more than the chunk.
    """

    def __init__(self, bundle: Bundle, device: torch.device | str = "cpu") -> None:
        _check(bundle.name, bundle.scheme)
        self.name, self.scheme, self.device = bundle.name, bundle.scheme, torch.device(device)
        self.identity = hashlib.sha256(bundle.to_bytes()).digest()
        pairs = [pair for pair in bundle.scheme.layers if pair is not None]
        self._pairs = [LayerCodecs(pair.key.to(self.device), pair.value.to(self.device)) for pair in pairs]
        self.shape = pairs[0].key.shape

    @property
    def hidden(self) -> int:
        """Channels of a token in one layer: H * D."""
        return self.shape.heads * self.shape.dim

    def size(self, tokens: int) -> int:
        """Bytes of a stored chunk of so many tokens. Raises UsageError unless they are whole blocks."""
        if tokens <= 0 or tokens % self.shape.block:
            raise UsageError(f"{self.name}: a chunk of {tokens} tokens: must be a multiple of {self.shape.block}")
        blocks = tokens // self.shape.block
        return HEADER.size + blocks * sum(codec.block_bytes() for codec in self._codecs()) + CHECKSUM

    def encode(self, chunk: Tensor, key: bytes = b"") -> Tensor:
        """The bytes of a chunk (2, L, T, H * D): uint8 on the CPU. key: of the chunk; only it opens what is stored.

        Raises UsageError for a chunk of another shape, NonFiniteError for what is not finite.
        """
        tokens = self._tokens(tuple(chunk.shape))
        parts = [_bytes_of(HEADER.pack(MAGIC, VERSION, tokens, self.identity))]
        decoded: list[tuple[Tensor, Tensor]] = []
        for layer, pair in enumerate(self._pairs):
            context = _context(layer, decoded)
            both = []
            for role, codec in enumerate((pair.key, pair.value)):
                x = chunk[role, layer].to(self.device).unflatten(1, (self.shape.heads, -1)).transpose(0, 1)[None]
                packed, read = codec.encode_decode(check_finite(x, layer, codec.role), context)
                parts += [packed[name].contiguous().flatten().view(torch.uint8).cpu() for name in codec.tensor_specs()]
                context.k0 = read
                both.append(read)
            decoded.append((both[0], both[1]))
            del decoded[: -1 - self.scheme.reach]
        stored = torch.cat(parts)
        return torch.cat([stored, _bytes_of(_checksum(stored, key))])

    def decode(self, stored: Tensor, dtype: torch.dtype, key: bytes = b"") -> Tensor:
        """The chunk (2, L, T, H * D) of bytes, uint8 (n,), on the codecs' device. key: as `encode` got it.

        The numbers are those that `encode` predicted layers from, bit for bit. Raises KVCalError, before anything is
        decoded, for bytes that are not this chunk's.
        """
        stored = stored.cpu()
        tokens = self._open(stored, key)
        chunk = torch.empty(2, len(self._pairs), tokens, self.hidden, dtype=dtype, device=self.device)
        decoded: list[tuple[Tensor, Tensor]] = []
        at = HEADER.size
        for layer, pair in enumerate(self._pairs):
            context = _context(layer, decoded)
            both = []
            for role, codec in enumerate((pair.key, pair.value)):
                packed, at = self._packed(codec, stored, at, tokens // self.shape.block)
                read = codec.decode_as_encoded(packed, context)
                chunk[role, layer] = read[0].transpose(0, 1).flatten(1)
                context.k0 = read
                both.append(read)
            decoded.append((both[0], both[1]))
            del decoded[: -1 - self.scheme.reach]
        return chunk

    def _codecs(self) -> Iterator[Codec]:
        for pair in self._pairs:
            yield from (pair.key, pair.value)

    def _tokens(self, shape: tuple[int, ...]) -> int:
        """T of a chunk's shape."""
        if len(shape) != 4 or shape[:2] != (2, len(self._pairs)) or shape[3] != self.hidden:
            expected = f"(2, {len(self._pairs)} layers, tokens, {self.shape.heads} heads x {self.shape.dim})"
            raise UsageError(f"{self.name}: a chunk of shape {shape}: must be {expected}, keys and values exact")
        self.size(shape[2])
        return shape[2]

    def _open(self, stored: Tensor, key: bytes) -> int:
        """Check all of a stored chunk; return its tokens."""
        wrong = f"{self.name}: a stored chunk of {len(stored)} bytes"
        if len(stored) < HEADER.size + CHECKSUM:
            raise KVCalError(f"{wrong}: cut off, a header alone takes {HEADER.size + CHECKSUM}; compute it again")
        magic, version, tokens, identity = HEADER.unpack(stored[: HEADER.size].numpy().tobytes())
        if magic != MAGIC or version != VERSION:
            raise KVCalError(f"{wrong}: not one of kvcal's, version {VERSION}; compute it again")
        if identity != self.identity:
            raise KVCalError(
                f"{wrong}: of bundle {identity.hex()[:12]}, this one is {self.identity.hex()[:12]}; compute it again"
            )
        if not tokens or tokens % self.shape.block or len(stored) != self.size(tokens):
            raise KVCalError(f"{wrong}: {tokens} tokens do not take so many; compute it again")
        if _checksum(stored[:-CHECKSUM], key) != stored[-CHECKSUM:].numpy().tobytes():
            raise KVCalError(f"{wrong}: its checksum differs: damaged, or another chunk's; compute it again")
        return int(tokens)

    def _packed(self, codec: Codec, stored: Tensor, at: int, blocks: int) -> tuple[Packed, int]:
        """Packed tensors (1, H or 1, N, ...) of one codec that begin at byte `at`, and where the next begin."""
        packed: Packed = {}
        for name, (shape, dtype) in codec.tensor_specs().items():
            size = blocks * math.prod(shape) * dtype.itemsize
            part = stored[at : at + size].clone().view(dtype)  # a copy begins where any dtype may
            packed[name] = part.view(1, shape[0], blocks, *shape[1:]).to(self.device)
            at += size
        return packed, at


def _context(layer: int, decoded: list[tuple[Tensor, Tensor]]) -> Context:
    """What the layers below decoded, the last one first."""
    k1, v1 = decoded[-1] if decoded else (None, None)
    k2, v2 = decoded[-2] if len(decoded) > 1 else (None, None)
    return Context(layer, k1, v1, k2, v2)


def _checksum(stored: Tensor, key: bytes) -> bytes:
    digest = hashlib.blake2b(len(key).to_bytes(8, "little") + key, digest_size=CHECKSUM)
    digest.update(stored.numpy().data)
    return digest.digest()


def _bytes_of(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _check(name: str, scheme: Scheme) -> None:
    """Refuse what a chunk alone cannot give back."""
    reason = None
    if scheme.frame == "pre_rope":
        reason = "it stores keys before RoPE, and a server's are after RoPE; fit with --frame post_rope"
    elif scheme.selection is not None:
        reason = "it selects tokens by attention (H2O), and a chunk keeps all of its tokens"
    elif scheme.ragged:
        reason = "its blocks differ in size; give it fixed tiers (full and four)"
    elif scheme.skipped:
        index, why = min(scheme.skipped.items())
        reason = f"layer {index} is not compressed: {why}"
    elif any(pair is not None and pair.stats for pair in scheme.layers):
        reason = "what it stores depends on the request's own tokens, and requests share chunks"
    elif len({pair.key.shape for pair in scheme.layers if pair is not None}) > 1:
        reason = "its layers differ in heads or head_dim, and a chunk has one shape for all"
    if reason is not None:
        raise UsageError(f"{name} cannot store chunks: {reason}")
    scheme.check_chain()
