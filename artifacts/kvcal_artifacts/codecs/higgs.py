"""HIGGS: randomised Hadamard rotation, one norm, nearest point of a Gaussian-optimal grid (Malinovskii et al. 2024).

Per token: rotate, divide by the RMS norm so that coordinates have unit variance, round d-tuples to the grid, store
codes and the norm in float16. Bits = log2(n) / d + 16 / norm width. One norm must span no more than the rotation mixes,
or parts of it have different variances, for which there is no grid. By default each kv head has its rotation and norm;
then keys can be attended by rotating the query. `rotation="token"` mixes all H * D channels of a token, as in the
AQUA-KV paper, and its norm spans them. With `axis="token"` the vectors are the block's tokens of one channel instead
(the paper's per-channel ablation): rotation and norm then span the block, 16 / block bits for the norm.

A Sylvester Hadamard matrix mixes a power of two of channels. An odd factor remains of heads of 96 channels or 3 kv
heads of 64; one of Paley's matrices mixes it (kvcal_kernels/hadamard). All entries of the rotation then have one
magnitude, and heads or channels of any sizes become coordinates of one variance. Bundles from before have
`mixed="cosine"`, a cosine transform whose rows are uneven, `mixed="none"`, or `norm="token"`, a norm over the token of
heads rotated one by one. Where there is no matrix of Paley, as for 43 heads of 64, the cosine transform is still used.

With d = 1 grids are scalar (Lloyd-Max). With the norm per head that is TurboQuant's MSE form (Zandieh et al. 2026), of
b + 16 / D bits. Only its rotation differs, which is dense and random there, and a randomised Hadamard transform here
(docs/lab/methods.md has both).

A nearest point is shorter than what it stands for: on average x̂ = (1 - D) x plus noise, D the grid's MSE (0.11 at 2
bits). Scores of such keys are 11 % lower than those of exact keys in the windows, and values add up 11 % short, however
many are averaged. `gain="debiased"` stores a larger norm. Values are made unbiased, by 1 / (1 - D). Keys keep their
length, by its square root, because the noise of a score raises its exponential (docs/lab/methods.md has the figures).
"mse" is HIGGS as published.

`points="bytes"` rounds the points of grids of at most 16 to multiples of one step, the largest 126 of it. At head_dim
64, 128 and 256 attention then takes products of 8-bit integers instead of look-ups. On Gaussian numbers the MSE is
0.004 % to 0.16 % larger (docs/benchmarks/byte_grids.py). Only the grid in the bundle differs.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Literal, NotRequired, TypedDict

import torch
from torch import Tensor

from kvcal_kernels import higgs, layout
from kvcal_kernels.hadamard import (
    Mix,
    largest_power_of_two,
    paley,
    paley_order,
    root,
    rotate,
    signs,
    tree_sum,
    unrotate,
)
from kvcal_kernels.higgs import Rotated
from kvcal_kernels.lattice import lookup, nearest
from kvcal_kernels.layout import Blocks, Form, Grid, grids
from kvcal_kernels.layout.form import BYTE_DIMS
from kvcal_kernels.packing import pack, packed_bytes, unpack
from kvcal_kernels.quantise import GridRule

from ..checked import Choice, FlagOr, Schema, Whole
from ..errors import KVCalError
from .base import EMPTY, Codec, Context, Packed, Role, Shape, Specs, on_device, outline_of_form
from .constants import Constant, constants, contents
from .higgs_grids import GRID_LARGEST, GRID_MSE, GRIDS, byte_grid, check_grid, check_values, gaussian_grid, grid_table
from .refusals import to_half

Span = Literal["head", "token"]
Points = Literal["exact", "bytes"]
Axis = Literal["channel", "token"]
Gain = Literal["mse", "debiased"]
Mixed = Literal["none", "cosine", "hadamard"]
TURBOQUANT_NORM_BITS = 32  # InnerQ, Table 3; stored are 16


class HiggsSettings(TypedDict):
    """The settings of Higgs in a bundle."""

    d: int
    n: int
    rotation: Span
    norm: Span
    seed: int
    axis: Axis
    gain: Gain
    mixed: NotRequired[bool | Literal["hadamard"]]


SETTINGS = Schema[HiggsSettings](
    {
        "d": Whole(1, 4),
        "n": Whole(4, 256),
        "rotation": Choice(("head", "token")),
        "norm": Choice(("head", "token")),
        "seed": Whole(0, (1 << 63) - 1),
        "axis": Choice(("channel", "token")),
        "gain": Choice(("mse", "debiased")),
        "mixed": FlagOr("hadamard"),
    },
    optional=frozenset({"mixed"}),
)


class Higgs(Codec):
    """Rotated vectors as a norm and codes of a grid.

    Where `fused` gives a form, blocks are stored as the fused kernel reads them.
    """

    name = "higgs"

    def __init__(
        self,
        shape: Shape,
        role: Role,
        d: int = 2,
        n: int = 16,
        rotation: Span = "head",
        norm: Span | None = None,
        seed: int = 0,
        axis: Axis = "channel",
        gain: Gain = "mse",
        points: Points = "exact",
        mixed: Mixed = "hadamard",
        grid: Tensor | None = None,
        sign: Tensor | None = None,
    ) -> None:
        """Make a codec of this shape. norm: what one norm spans; None for the rotation's span.

        mixed: how an odd factor of the channels is mixed; where the rotation spans a power of two there is none.
        "hadamard" means "cosine" where no Hadamard matrix of `paley_order` mixes it.
        """
        super().__init__(shape, role)
        norm = rotation if norm is None else norm
        for what, span in (("rotation", rotation), ("norm", norm)):
            if span not in ("head", "token"):
                raise KVCalError(f"HIGGS {what} over {span!r}: allowed are 'head' and 'token'")
        if axis not in ("channel", "token"):
            raise KVCalError(f"HIGGS along axis {axis!r}: allowed are 'channel' and 'token'")
        check_grid(d, n)
        if gain not in ("mse", "debiased"):
            raise KVCalError(f"HIGGS gain {gain!r}: allowed are 'mse' and 'debiased'")
        if points not in ("exact", "bytes"):
            raise KVCalError(f"HIGGS points {points!r}: allowed are 'exact' and 'bytes'")
        self.d, self.n, self.rotation, self.norm, self.seed, self.axis = d, n, rotation, norm, seed, axis
        self.channels_apart, self.heads_together = axis == "token", rotation != "head"
        self.gain = gain
        self._gain = 1.0 if gain == "mse" else (1 - GRID_MSE[d, n]) ** (-0.5 if role == "key" else -1)
        make = byte_grid if points == "bytes" else gaussian_grid
        self.grid = make(d, n) if grid is None else grid.float()
        # vectors of `length` numbers, `count` of them a token (axis channel) or a block (axis token)
        self.length = shape.heads * shape.dim if axis == "channel" else shape.block
        if (shape.dim if axis == "channel" else shape.block) % d:
            raise KVCalError(f"HIGGS with d={d}: {axis}s of {shape.dim}, blocks of {shape.block} do not divide by it")
        self.code_bits = GRIDS[d, n]
        width = shape.dim if axis == "channel" and rotation == "head" else self.length
        self.rotation_width = largest_power_of_two(width)
        self.rotation_factor = 1 if mixed == "none" else width // self.rotation_width
        self.mixed = self._mixed_by(mixed)
        self.sign = signs(self.length, seed) if sign is None else sign.to(torch.int8)
        if self.grid.shape != (n, d) or self.sign.shape != (self.length,):
            raise KVCalError(
                f"HIGGS grid {tuple(self.grid.shape)}, signs {tuple(self.sign.shape)}: needs {(n, d)} and "
                f"{(self.length,)}"
            )
        self._make_rotation()
        self._form = self._find_form(in_bytes=True)
        self._look_up = self._grid()
        self._how: Rotated | None = None  # of the kernel that encodes
        self._rule: GridRule | None = None  # of `rule`, after its first call

    def _mixed_by(self, mixed: Mixed) -> Mixed:
        """How the rotation mixes what it spans, if that is no power of two."""
        if mixed not in ("none", "cosine", "hadamard"):
            raise KVCalError(f"HIGGS mixed by {mixed!r}: allowed are 'none', 'cosine' and 'hadamard'")
        if self.rotation_factor == 1:
            return "none"
        return mixed if mixed == "cosine" or self._order else "cosine"

    @property
    def _order(self) -> int:
        """The order of the Hadamard matrix that mixes the odd factor; 0 where there is none."""
        return paley_order(self.rotation_width, self.rotation_factor)

    def _make_rotation(self) -> None:
        """Make the rotation's matrix on the codec's device: no graph of a step may copy it there."""
        if self.mixed == "hadamard":
            paley(self._order, self.sign.device)

    @property
    def mix(self) -> Mix:
        """How the rotation mixes an odd factor, of hadamard.rotate: a cosine transform interleaves a token's heads and
        a block's tokens, not the channels of a head.
        """
        interleaved = self.mixed == "cosine" and (self.rotation == "token" or self.axis == "token")
        return "interleaved" if interleaved else self.mixed

    @property
    def _rotation(self) -> tuple[int, int, Mix]:
        return self.rotation_width, self.rotation_factor, self.mix

    def encode(self, x: Tensor, context: Context = EMPTY) -> Packed:
        blocks = self.shape.blocks(x)
        if self._how is not None:
            return self._encode_by_kernel(x, self._how)
        codes, norms = self._coded(blocks.float())
        if isinstance(self._form, Form):
            by_head = self._by_head(codes).flatten(2, 3)
            packed = layout.pack(by_head, norms.flatten(2)[..., None], None, self._form, self._look_up)
            return {"words": packed.words.unflatten(2, (blocks.shape[2], -1)).flatten(3), "norm": norms}
        return {"codes": pack(self._store_codes(codes), self.code_bits), "norm": norms}

    def _coded(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Codes in the order of `codes`, and norms as they are stored."""
        vectors = self._vectors(blocks)
        groups = rotate(vectors, self.sign, *self._rotation).unflatten(-1, (self._norms, -1))
        norm = root(tree_sum(groups * groups) / groups.shape[-1])
        stored = to_half(norm * self._gain, "norm")
        unit = self._gain / stored.float().clamp_min(1e-30)
        scaled = (groups * unit[..., None]).flatten(-2)
        codes = nearest(scaled.reshape(-1, self.d), self.grid).view(*vectors.shape[:-1], self.length // self.d)
        return codes, self._store_norm(stored)

    def encode_decode(self, x: Tensor, context: Context = EMPTY) -> tuple[Packed, Tensor]:
        if self._how is None or isinstance(self._form, Form):
            return super().encode_decode(x, context)
        self.shape.blocks(x)  # refuses a wrong shape
        decoded = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        return self._encode_by_kernel(x, self._how, decoded), decoded

    def _encode_by_kernel(self, x: Tensor, how: Rotated, out: Tensor | None = None) -> Packed:
        """Encode x by the kernel, which writes what that decodes to into `out`."""
        codes, norms, _ = higgs.fast().encode(x if x.stride(3) == 1 else x.contiguous(), how, out=out)
        norm = to_half(norms.float(), "norm").unflatten(2, (-1, self.shape.block))
        if isinstance(self._form, Form):
            words = higgs.fast().pack(codes, self._form)
            return {"words": words.flatten(2).unflatten(2, (norm.shape[2], -1)), "norm": norm}
        by_token = codes.unflatten(2, (-1, self.shape.block)).movedim(1, 3).flatten(3)
        return {"codes": pack(self._store_codes(by_token), self.code_bits), "norm": norm}

    def by_kernel(self) -> Higgs:
        """The same codec encoding by a Triton kernel, which gives torch's numbers bit for bit.

        Kv heads and head_dim must be powers of two; of others it is the codec itself.
        """
        s = self.shape
        odd = s.heads & (s.heads - 1) or s.dim & (s.dim - 1) or not 16 <= s.dim <= 256  # nothing is `mixed` then
        if odd or self.axis == "token":
            return self
        self.rule()  # which all twins have
        twin = copy.copy(self)
        twin._how = Rotated(self.grid, self.sign, self._norms, self._gain, self.rotation_width)
        _ = twin._how.table  # made now: no graph of a step may wait for it
        return twin

    @property
    def encodes_by_kernel(self) -> bool:
        return self._how is not None

    def decode(self, packed: Packed, context: Context = EMPTY) -> Tensor:
        if isinstance(self._form, Form):
            return layout.decode(self.as_blocks(packed))
        groups = lookup(self.codes(packed), self.grid).unflatten(-1, (self._norms, -1))
        size = self._load_norm(packed["norm"].float())
        vectors = unrotate((groups * size[..., None]).flatten(-2), self.sign, *self._rotation)
        return self._blocks(vectors).flatten(2, 3)

    def decoding(self) -> Hashable:
        return self.settings(), str(self._form), contents(self.grid), contents(self.sign)

    def codes(self, packed: Packed) -> Tensor:
        """Codes of the vectors: (B, N, b, H * D / d), along tokens (B, H, N, D, b / d)."""
        if isinstance(self._form, Form):
            flat = layout.unpack(self.as_blocks(packed))[0]
            by_token: Tensor = flat.unflatten(2, (-1, self.shape.block)).movedim(1, 3)
            return by_token.flatten(3)
        return self._load_codes(unpack(packed["codes"], self.code_bits, self._packed_count))

    def outline_of_grid(self) -> str:
        """The grid, the rotation and the norms in one line."""
        mixed = "" if self.mix == "none" else f", mixed by {self.mix}"
        return f"d {self.d}, n {self.n}, rotation {self.rotation}, norm {self.norm}{mixed}"

    def encoding(self) -> str:
        return f"{self.role}s of {self.outline()}, {self.outline_of_grid()}, {outline_of_form(self._form)}"

    def fused(self) -> Form | str:
        return self._form

    def rule(self, within: str = "") -> GridRule | str:
        """How quantise's kernels write the blocks, or why they cannot: one rule for all caches, also after reset().

        A CUDA graph of a step knows where its table is.
        """
        if isinstance(self._form, str):
            return self._form
        if self._rule is None:
            assert self._look_up is not None
            try:
                self._rule = GridRule(self._form, self._look_up, self._gain)
            except ValueError as error:
                return f"no kernel quantises for a {error}"
            _ = self._rule.table  # made now: no graph of a step may wait for it
        return self._rule

    def for_decoding(self) -> Higgs:
        """The same codec with blocks as the kernel that dequantises reads them."""
        if isinstance(self._form, str):
            return self
        twin = copy.copy(self)
        twin._form, twin._look_up = "stored for decoding, as the scheme predicts layers or keeps keys before RoPE", None
        return twin

    def for_lookups(self) -> Higgs:
        if isinstance(self._form, str) or not self._form.in_bytes:
            return self
        twin = copy.copy(self)
        twin._form = twin._find_form(in_bytes=False)
        twin._look_up, twin._rule = twin._grid(), None
        return twin

    def _find_form(self, in_bytes: bool) -> Form | str:
        """The kernel's form of these blocks, or why there is none.

        in_bytes: whether blocks may be for products of bytes, where the grid's points and head_dim allow it.
        """
        s = self.shape
        if self.axis == "token":
            return "HIGGS along tokens: the fused kernel rotates a query's channels"
        if self.rotation == "token":
            return (
                f"HIGGS rotated over all heads of a token, {self.rotation_width * self.rotation_factor} channels: the "
                "fused kernel rotates the query of one head"
            )
        if s.block % layout.BLOCK:
            return f"blocks of {s.block} tokens: the fused kernel reads multiples of {layout.BLOCK}"
        bits, heads = self.code_bits // self.d, s.heads if self.norm == "token" else 1
        in_bytes = in_bytes and s.dim in BYTE_DIMS and grids.are_bytes(self.grid, bits)
        try:
            form = Form(self.role, s.dim, bits, vector=self.d, norm_heads=heads, in_bytes=in_bytes, mix=self.mix)
        except ValueError as error:
            return f"the fused kernel cannot read {error}"
        words = bits * s.dim * layout.BLOCK // 16
        if form.words > words:
            return (
                f"codes of {bits} bits at head_dim {s.dim} would take {bits * form.words / words:g} bits in the fused "
                "kernel's layout"
            )
        return form

    def _grid(self) -> Grid | None:
        """What the kernel looks up, on the codec's device; tables are shared by all codecs of a grid there."""
        if isinstance(self._form, str):
            return None
        form, device = self._form, self.grid.device
        table, unit = grid_table(tuple(self.grid.flatten().tolist()), self.d, form.bits, form.in_bytes)
        # made now: no graph of a step may copy it there
        if form.in_bytes:
            grids.byte_order(self.role, form.dim, form.vector, device)
        else:
            grids.order(self.role, form.dim, form.bits, form.vector, device)
        return Grid(self.grid, self.sign.view(self.shape.heads, -1), on_device(table, device), unit)

    def as_blocks(self, packed: Packed) -> Blocks:
        if isinstance(self._form, str):
            refused: Blocks = super().as_blocks(packed)
            return refused
        words, norm = packed["words"], packed["norm"]
        return Blocks(
            self._form,
            words.flatten(2).unflatten(2, (-1, self._form.words)),
            norm.flatten(2).unflatten(2, (-1, layout.BLOCK)),
            self._look_up,
        )

    # Vectors are (B, N, b, H * D) along channels, (B, H, N, D, b) along tokens; packed tensors are always (B, H, N,
    # ...).

    def _vectors(self, blocks: Tensor) -> Tensor:
        return blocks.transpose(-1, -2) if self.axis == "token" else blocks.movedim(1, 3).flatten(3)

    def _blocks(self, vectors: Tensor) -> Tensor:
        if self.axis == "token":
            return vectors.transpose(-1, -2)
        return torch.unflatten(vectors, -1, (self.shape.heads, -1)).movedim(3, 1)

    def _store_codes(self, codes: Tensor) -> Tensor:
        """Codes as they are stored, (B, H, N, rows, packed): keys packed along channels, values along tokens."""
        if self.axis == "token":  # (B, H, N, D, b/d)
            return codes.transpose(-1, -2) if self.role == "key" else codes
        codes = self._by_head(codes)
        return codes.transpose(-1, -2) if self.role == "value" else codes

    def _by_head(self, codes: Tensor) -> Tensor:
        """Codes (B, N, b, C/d) by kv head: (B, H, N, b, D/d)."""
        apart: Tensor = codes.unflatten(-1, (self.shape.heads, -1))
        return apart.movedim(3, 1)

    def _load_codes(self, codes: Tensor) -> Tensor:
        if self.axis == "token":
            return codes.transpose(-1, -2) if self.role == "key" else codes
        codes = codes.transpose(-1, -2) if self.role == "value" else codes
        return codes.movedim(1, 3).flatten(3)

    def _store_norm(self, norm: Tensor) -> Tensor:
        """Norms (B, N, b, 1 or H) -> (B, 1 or H, N, b); along tokens (B, H, N, D, 1) -> (B, H, N, D)."""
        return norm.squeeze(-1) if self.axis == "token" else norm.movedim(3, 1).contiguous()

    def _load_norm(self, norm: Tensor) -> Tensor:
        return norm[..., None] if self.axis == "token" else norm.movedim(1, 3)

    @property
    def _packed_count(self) -> int:
        """Codes in the packed dimension."""
        s, along_tokens = self.shape, self.axis == "token"
        if self.role == "key":
            return s.dim if along_tokens else s.dim // self.d
        return s.block // self.d if along_tokens else s.block

    @property
    def _norms(self) -> int:
        return 1 if self.norm == "token" or self.axis == "token" else self.shape.heads

    def paper_bits(self) -> float:
        """Codes, and a 16-bit norm per vector (AQUA-KV: 2.02 bits at vectors of 1024).

        With d = 1 it is TurboQuant, whose norm InnerQ's Table 3 counts in 32 bits.
        """
        normed = self.length // self._norms
        return self.code_bits / self.d + (TURBOQUANT_NORM_BITS if self.d == 1 else 16) / normed

    def of_heads(self, heads: slice) -> Codec | str:
        if self.axis == "channel" and "token" in (self.rotation, self.norm):
            return "HIGGS with a rotation or norm over all heads of a token"
        sign = self.sign if self.axis == "token" else self.sign.view(self.shape.heads, -1)[heads].flatten()
        settings = self.d, self.n, self.rotation, self.norm, self.seed, self.axis, self.gain
        return Higgs(self.shape.of_heads(heads), self.role, *settings, "exact", self.mixed, self.grid, sign)

    def config(self) -> HiggsSettings:
        settings: HiggsSettings = {
            "d": self.d,
            "n": self.n,
            "rotation": self.rotation,
            "norm": self.norm,
            "seed": self.seed,
            "axis": self.axis,
            "gain": self.gain,
        }
        if self.mixed != "none":
            settings["mixed"] = "hadamard" if self.mixed == "hadamard" else True
        return settings

    def describe(self) -> str:
        if not grids.are_bytes(self.grid, self.code_bits // self.d):
            return super().describe()
        by_bytes = isinstance(self._form, Form) and self._form.in_bytes
        return f"{super().describe().removesuffix(')')}, points=bytes{'' if by_bytes else ' looked up'})"

    def tensors(self) -> dict[str, Tensor]:
        return {"grid": self.grid, "sign": self.sign}

    @classmethod
    def from_state(cls, shape: Shape, role: Role, config: Mapping[str, object], tensors: dict[str, Tensor]) -> Higgs:
        settings = SETTINGS.read(config, "higgs codec")
        check_grid(settings["d"], settings["n"])
        length = shape.block if settings["axis"] == "token" else shape.heads * shape.dim
        expected = {
            "grid": Constant(torch.float32, (settings["n"], settings["d"]), largest=GRID_LARGEST),
            "sign": Constant(torch.int8, (length,)),
        }
        constants(tensors, expected, "higgs codec")
        check_values(tensors["grid"], tensors["sign"], settings["seed"])
        stated = settings.get("mixed")
        mixed: Mixed = "hadamard" if stated == "hadamard" else "cosine" if stated else "none"
        d, n, rotation, norm = settings["d"], settings["n"], settings["rotation"], settings["norm"]
        seed, axis, gain = settings["seed"], settings["axis"], settings["gain"]
        grid, sign = tensors["grid"], tensors["sign"]
        codec = cls(shape, role, d, n, rotation, norm, seed, axis, gain, "exact", mixed, grid, sign)
        if mixed != codec.mixed:
            lacks = "odd factor" if codec.mixed == "none" else "odd factor that a Hadamard matrix mixes"
            raise KVCalError(f"higgs codec, mixed = {stated!r}: its rotation has no {lacks}")
        return codec

    def to(self, device: torch.device) -> Higgs:
        if self.grid.device == device and self.sign.device == device:
            return self
        twin = copy.copy(self)
        twin.grid, twin.sign = self.grid.to(device), self.sign.to(device)
        twin._look_up, twin._how, twin._rule = twin._grid(), None, None
        twin._make_rotation()
        return twin

    def tensor_specs(self) -> Specs:
        s = self.shape
        norms = (s.heads, s.dim) if self.axis == "token" else (self._norms, s.block)
        if isinstance(self._form, Form):
            words = s.block // layout.BLOCK * self._form.words
            return {"words": ((s.heads, words), torch.int16), "norm": (norms, torch.float16)}
        rows = s.block * s.dim // self.d // self._packed_count
        return {
            "codes": ((s.heads, rows, packed_bytes(self._packed_count, self.code_bits)), torch.uint8),
            "norm": (norms, torch.float16),
        }
