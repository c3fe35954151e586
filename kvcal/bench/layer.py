"""One layer of a cache filled with random tokens, as the scheme stores them, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from kvcal_artifacts.cache.statistics import statistic
from kvcal_artifacts.cache.statistics.base import Statistic
from kvcal_artifacts.cache.statistics.prefixes import Prefixes
from kvcal_artifacts.codecs import Codec, Context
from kvcal_artifacts.codecs.base import Packed
from kvcal_artifacts.codecs.ragged import Ragged
from kvcal_artifacts.scheme import LayerCodecs
from kvcal_artifacts.storage.block_store import Stored, tensors_of
from kvcal_artifacts.storage.ledger import Ledger
from kvcal_artifacts.storage.plan import Plan
from kvcal_kernels.dequantise import Rotation

from ..models.geometry import Geometry
from .schemes import Benched

ROPE_BASE = 10000.0  # of keys stored before RoPE: the work is the same whatever the base


@dataclass(frozen=True)
class Case:
    """What one figure is of. dtype: of the model, and so of windows and queries. new: tokens that a call brings, the
    last of `length`: each attends to those before it and itself.
    """

    scheme: Benched
    geometry: Geometry
    batch: int
    length: int
    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    new: int = 1

    def __post_init__(self) -> None:
        codecs = self.scheme.codecs.read_by(self.group)
        if codecs is not self.scheme.codecs:  # as a cache has them
            object.__setattr__(self, "scheme", replace(self.scheme, codecs=codecs))

    @property
    def group(self) -> int:
        """Query heads a kv head."""
        return self.geometry.heads // self.geometry.kv_heads

    def random(self, heads: int, tokens: int, salt: int, rows: int | None = None) -> Tensor:
        """(rows or batch, heads, tokens, head_dim) standard normal numbers in the model's dtype."""
        generator = torch.Generator(self.device).manual_seed(self.seed * 1000 + salt)
        size = (self.batch if rows is None else rows, heads, tokens, self.geometry.head_dim)
        return torch.randn(size, generator=generator, device=self.device, dtype=torch.float32).to(self.dtype)

    def queries(self, count: int | None = None) -> Tensor:
        """(B, heads, count, D), by default of the new tokens."""
        return self.random(self.geometry.heads, self.new if count is None else count, salt=1)


SOME = 4  # rows of a batch


def some_rows(batch: int, seed: int = 0) -> list[int]:
    """Choose at most SOME rows of a batch, for checks that cannot look at all of them: the first, the last, and others
    between them by that seed.
    """
    order = torch.randperm(max(0, batch - 2), generator=torch.Generator().manual_seed(seed), device="cpu")
    return sorted({0, batch - 1, *(1 + int(row) for row in order[: SOME - 2])})


@dataclass
class Filled:
    """Keys and values [keys, values] of `length` tokens: sink and window (B, H, tokens, D) in the model's dtype, packed
    blocks between them. plan: of the one call that brought them. contexts: what encoding and decoding need besides.
    """

    case: Case
    codecs: LayerCodecs
    plan: Plan
    sink: list[Tensor]
    window: list[Tensor]
    packed: list[Packed]
    encoding: Context
    decoding: Context
    raw: list[Tensor]  # what was packed, (B, H, N * b, D)

    @property
    def pair(self) -> tuple[Codec, Codec]:
        return self.codecs.key, self.codecs.value

    @property
    def packed_bytes(self) -> int:
        return sum(nbytes(stored) for one in self.packed for stored in one.values())

    @property
    def book_bytes(self) -> int:
        """Codebooks: what reads or writes vector codes reads each of them once at least. 0 for other formats."""
        return self.book_bytes_of(0) + self.book_bytes_of(1)

    def book_bytes_of(self, role: int) -> int:
        """Bytes of the codebooks of keys (0) or values (1)."""
        return sum(nbytes(t) for name, t in self.pair[role].tensors().items() if "codebooks." in name)

    @property
    def window_bytes(self) -> int:
        return sum(nbytes(t) for t in (*self.sink, *self.window))

    def decoded(self, packed: Sequence[Packed] | None = None) -> tuple[Tensor, Tensor]:
        """Packed blocks only, this layer's or others: (B, H, N * b, D) float32."""
        stored = self.packed if packed is None else packed
        keys = self.codecs.key.decode(stored[0], self.decoding)
        values = self.codecs.value.decode(stored[1], replace(self.decoding, k0=keys))
        return keys, values

    def encoded(self, raw: Sequence[Tensor], by: LayerCodecs | None = None) -> list[Packed]:
        """Keys and values (B, H, N * b, D) as this layer packs them; by: the same codecs, encoding by other code."""
        codecs = by or self.codecs
        keys, blocks = (
            codecs.key.encode_decode(raw[0], self.encoding)
            if "k0" in codecs.value.needs
            else (codecs.key.encode(raw[0], self.encoding), None)
        )
        return [keys, codecs.value.encode(raw[1], replace(self.encoding, k0=blocks))]

    def materialised(self, decoded: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """All tokens (B, H, T, D) in the model's dtype, keys after RoPE: what decode-then-attend attends to. decoded:
        packed blocks, where they are at hand.
        """
        keys, values = decoded or self.decoded()
        dtype = self.case.dtype
        keys, values = (
            torch.cat([self.sink[role], x.to(dtype), self.window[role]], 2) for role, x in enumerate((keys, values))
        )
        if self.case.scheme.frame == "pre_rope":
            keys = rotated(keys)
        return keys, values


@lru_cache(maxsize=2)  # operations of one case share it, and the one of a single block; emptied when rows are done
def fill(case: Case) -> Filled:
    """Random tokens, packed a row at a time as the cache would pack one long prompt."""
    scheme = case.scheme
    codecs = LayerCodecs(scheme.codecs.key.to(case.device), scheme.codecs.value.to(case.device))
    plan = Ledger(scheme.windows).begin(1, case.length, None)
    shape = codecs.key.shape
    start, stop = plan.sink, plan.sink + plan.flush * shape.block
    observers = {name: statistic(name, shape) for name in sorted(codecs.stats)}
    parts: list[Filled] = []
    for row in range(case.batch):
        raw = [case.random(shape.heads, case.length, salt=100 + 3 * row + role, rows=1) for role in (0, 1)]
        for one in observers.values():
            one.state = {}
        encoding, decoding = _contexts(case, observers, plan, raw[0], row)
        cut = [x[:, :, start:stop] for x in raw]
        filled = Filled(
            case,
            codecs,
            plan,
            [x[:, :, :start] for x in raw],
            [x[:, :, stop:] for x in raw],
            [],
            encoding,
            decoding,
            cut,
        )
        filled.packed = filled.encoded(cut)
        parts.append(filled)
    return _joined(parts)


def _contexts(
    case: Case, observers: dict[str, Statistic], plan: Plan, keys: Tensor, row: int
) -> tuple[Context, Context]:
    """Statistics of the row, and random reconstructions of the layers below where predictors read them."""
    at = Prefixes(plan, case.scheme.windows, case.device)
    states: dict[str, Tensor] = {"k": keys}
    if any(one.wants != "k" for one in observers.values()):
        states["q"] = states["q_pre"] = case.random(case.geometry.heads, case.length, salt=50 + row, rows=1)
    observed = {name: one.observe(states[one.wants], at) for name, one in observers.items()}
    current = {name: one.current() for name, one in observers.items()}
    tokens = plan.flush * case.scheme.windows.block
    below = {
        name: case.random(case.geometry.kv_heads, tokens, salt=10 + i, rows=1).float()
        for i, name in enumerate(sorted(case.scheme.codecs.needs - {"k0"}))
    }
    return (
        _context(below, {name: x for name, x in observed.items() if x is not None}),
        _context(below, {name: x for name, x in current.items() if x is not None}),
    )


def _context(below: Mapping[str, Tensor], stats: dict[str, Tensor]) -> Context:
    k1, v1, k2, v2 = (below.get(name) for name in ("k1", "v1", "k2", "v2"))
    return Context(k1=k1, v1=v1, k2=k2, v2=v2, stats=stats)


def _joined(rows: list[Filled]) -> Filled:
    """Rows of one batch."""
    first = rows[0]
    if len(rows) == 1:
        return first

    def cat(name: str) -> list[Tensor]:
        return [torch.cat(list(parts)) for parts in zip(*(getattr(row, name) for row in rows), strict=True)]

    packed = [{name: join([row.packed[role][name] for row in rows]) for name in first.packed[role]} for role in (0, 1)]
    encoding = _contexts_joined([row.encoding for row in rows])
    decoding = _contexts_joined([row.decoding for row in rows])
    return replace(
        first,
        sink=cat("sink"),
        window=cat("window"),
        raw=cat("raw"),
        packed=packed,
        encoding=encoding,
        decoding=decoding,
    )


def _contexts_joined(rows: list[Context]) -> Context:
    stats = {name: torch.cat([row.stats[name] for row in rows]) for name in rows[0].stats}
    names = [name for name in ("k1", "v1", "k2", "v2") if getattr(rows[0], name) is not None]
    parts = {name: torch.cat([getattr(row, name) for row in rows]) for name in names}
    return _context(parts, stats)


def join(rows: Sequence[Stored]) -> Stored:
    """Packed tensors of single rows as those of a batch."""
    if isinstance(rows[0], Ragged):
        pools = [row for row in rows if isinstance(row, Ragged)]
        return Ragged(torch.cat([row.data for row in pools]), torch.cat([row.counts for row in pools]))
    return torch.cat([row for row in rows if isinstance(row, Tensor)])


def nbytes(stored: Stored) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(stored))


def rope(tokens: int, dim: int, device: torch.device) -> Rotation:
    """RoPE of positions 0 to tokens - 1, halves paired as Llama pairs them."""
    angle = angles(torch.arange(tokens, device=device), dim).repeat(1, 2)[None]
    return Rotation(angle.cos(), angle.sin())


def angles(positions: Tensor, dim: int) -> Tensor:
    """Angles by which RoPE rotates pairs of `dim` channels at positions (...): (..., dim / 2)."""
    speed = ROPE_BASE ** -(torch.arange(dim // 2, dtype=torch.float32, device=positions.device) / (dim // 2))
    return positions[..., None] * speed


def rotated(keys: Tensor) -> Tensor:
    """RoPE of keys (B, H, T, D) at positions 0 to T - 1, in float32."""
    return rope(keys.shape[2], keys.shape[3], keys.device)(keys.float()).to(keys.dtype)
