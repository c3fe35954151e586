"""docs/format.md is enough to read a bundle: the reader below was written from it and imports nothing of kvcal."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy import ndarray

from kvcal_artifacts.bundle import Bundle, Fingerprint, load_bundle
from kvcal_artifacts.codecs import (
    CODECS,
    PREDICTORS,
    ByHead,
    Codec,
    Context,
    Exact,
    Float8,
    Higgs,
    MixKVQ,
    Predicted,
    ResidualVQ,
    Role,
    Scaled,
    Shape,
    Uniform,
)
from kvcal_artifacts.codecs.base import CONTEXT_TENSORS
from kvcal_artifacts.codecs.predictors import QuantisedLinear
from kvcal_artifacts.codecs.ragged import Ragged
from kvcal_artifacts.scheme import LayerCodecs, Scheme, Windows

# The reader. From here to the next line of dashes: docs/format.md, the standard library and numpy.

DTYPES = {"F32": ("<f4", "float32"), "F16": ("<f2", "float16"), "I8": ("i1", "int8"), "U8": ("u1", "uint8")}


def read(data: bytes) -> tuple[dict[str, Any], dict[str, ndarray]]:
    start = 8 + struct.unpack("<Q", data[:8])[0]
    listing = json.loads(data[8:start])
    text = listing.pop("__metadata__")["kvcal"].encode()
    assert hashlib.sha256(text[10:-77]).hexdigest() == text[-66:-2].decode()
    header = json.loads(text[10:-77])
    assert (header["format"], header["version"]) == ("kvcal", 1)
    assert set(header["tensors"]) == set(listing)
    tensors = {}
    for name, entry in listing.items():
        begin, end = entry["data_offsets"]
        raw, stated = data[start + begin : start + end], header["tensors"][name]
        assert hashlib.sha256(raw).hexdigest() == stated["sha256"]
        assert (DTYPES[entry["dtype"]][1], entry["shape"]) == (stated["dtype"], stated["shape"])
        tensors[name] = np.frombuffer(raw, DTYPES[entry["dtype"]][0]).reshape(entry["shape"])
    return header, tensors


def unpacked(packed: ndarray, bits: int, count: int) -> ndarray:
    codes, start, shift = np.zeros((*packed.shape[:-1], count), np.int64), 0, bits
    for w in [8] * (bits > 8) + [plane for plane in (8, 4, 2, 1) if (bits - 8 * (bits > 8)) & plane]:
        size = 2 if w < 8 and count % (16 // w) == 0 else 1
        words = -(-count * w // (8 * size))
        word = np.ascontiguousarray(packed[..., start : start + words * size]).view(f"<u{size}").astype(np.int64)
        fields = [(word >> j * w) & (2**w - 1) for j in range(8 * size // w)]
        start, shift = start + words * size, shift - w
        codes |= np.concatenate(fields, -1)[..., :count] << shift
    return codes


def matrix(packed: ndarray, role: str, bits: int, down: int, across: int) -> ndarray:
    """(..., down, across): keys are packed by rows, values by columns."""
    return unpacked(packed, bits, across) if role == "key" else np.swapaxes(unpacked(packed, bits, down), -1, -2)


def uniform(state: dict[str, Any], role: str, block: int, packed: dict[str, ndarray]) -> ndarray:
    c, (_, dim) = state["config"], state["shape"]
    q = matrix(packed["codes"], role, c["bits"], block, dim).astype(np.float32)

    def spread(part: ndarray) -> ndarray:
        wide = np.repeat(part.astype(np.float32), c["group"], -1)
        return wide if c["axis"] == "channel" else np.swapaxes(wide, -1, -2)

    if c["mode"] == "asymmetric":
        return q * spread(packed["scale"]) + spread(packed["min"])
    centred, scale = 2 * q - 1 if c["bits"] == 1 else q - 2 ** (c["bits"] - 1), spread(packed["scale"])
    if c["mode"] == "symmetric":
        return centred * scale
    return np.where(np.signbit(scale), q * np.abs(scale) + spread(packed["min"]), centred * np.abs(scale))


def whole(half: ndarray, beyond: int) -> ndarray:
    """A tile (..., 256) of half of one (..., 128), whose right half lies `beyond` bits further; between fields is
    anything.
    """
    rows = half.reshape(*half.shape[:-1], 16, 8)
    return np.concatenate([rows, rows >> beyond], -1).reshape(*half.shape[:-1], 256)


def uniform_words(state: dict[str, Any], role: str, block: int, packed: dict[str, ndarray]) -> ndarray:
    """Number by number: (B, H, T, D) of the fused kernel's words and scales."""
    c, (_, dim) = state["config"], state["shape"]
    bits, group, tokens_too = c["bits"], c["group"], c["axis"] == "token"
    plane, symmetric = (2 if bits == 3 else bits), c["mode"] == "symmetric"
    fields, pieces = 16 // plane, dim // 16
    kinds, inner = (1 if symmetric else 2), tokens_too == (role == "value")
    per = pieces if tokens_too else dim // group  # columns of scales: of a group of tokens, or of a half block
    blocks = packed["words"].shape[2] * block // 32
    words = packed["words"].astype(np.uint16).reshape(*packed["words"].shape[:2], blocks, -1).astype(np.int64)
    if (bits, dim) in ((3, 64), (2, 96)):  # behind one tile half of one, between whose fields the right half is
        words = np.concatenate([words[..., :256], whole(words[..., 256:], 1 if bits == 3 else 4)], -1)
    words = words.reshape(*words.shape[:3], -1, 16, 16)
    shared = group // 32 if tokens_too else 1
    scales = packed["scale"].reshape(*words.shape[:2], blocks // shared, -1).astype(np.float32)
    made = np.zeros((*words.shape[:2], blocks * 32, dim), np.float32)
    tiles = -(-2 * pieces // fields)
    for t, d in np.ndindex(blocks * 32, dim):
        n, half, row, piece, column = t // 32, t % 32 // 16, t % 16, d // 16, d % 16
        turns = pieces // 2 % (fields // 2) % 2 and bits in (2, 4)
        if not inner and role == "key" and not (turns and bits == 2):
            tile, field = divmod(half * pieces + piece, fields)
        else:
            of_key = piece // 2 * 2 + half if turns else half * (pieces // 2) + piece // 2
            pair, byte = (of_key, piece % 2) if role == "key" else (piece, half)
            tile, field = pair // (fields // 2), pair % (fields // 2) + byte * (fields // 2)
        at = (row, column) if role == "key" else (column, row)
        q = words[:, :, n, tile, *at] >> field * plane & (1 << plane) - 1
        if bits == 3:
            q = q | (words[:, :, n, tiles + tile // 2, *at] >> 2 * field + tile % 2 & 1) << 2
        place = row if not tokens_too else column  # in a column
        first = 0 if tokens_too else half * per * kinds
        number = piece if tokens_too else d // group
        found = []
        for kind in range(kinds):
            if inner:
                count = per * kinds
                wide = 4 if count % 4 == 0 else 2 if count % 2 == 0 else 1
                i, j = divmod(number * kinds + kind, wide)
                index = first * 16 + i * 16 * wide + place * wide + j
            else:
                index = (first // 2 + number) * 32 + place // 2 * 4 + kind * 2 + place % 2
            found.append(scales[:, :, n // shared, index])
        made[:, :, t, d] = (q - 2 ** (bits - 1)) * found[0] if symmetric else q * found[0] + found[1]
    return made


WORDS = [
    ("key", 4, 128, 32, "channel", "symmetric", 32), ("key", 3, 128, 32, "channel", "asymmetric", 32),
    ("value", 2, 64, 32, "token", "hybrid", 32), ("value", 3, 128, 32, "token", "symmetric", 64),
    ("key", 2, 64, 64, "token", "asymmetric", 128), ("value", 8, 96, 16, "channel", "asymmetric", 32),
    ("value", 4, 64, 64, "token", "asymmetric", 64), ("key", 4, 96, 48, "channel", "asymmetric", 32),
    ("key", 2, 64, 16, "channel", "symmetric", 32), ("key", 8, 96, 32, "channel", "symmetric", 32),
    ("key", 3, 64, 32, "channel", "symmetric", 32), ("value", 3, 64, 32, "channel", "asymmetric", 32),
    ("key", 2, 96, 32, "channel", "asymmetric", 32), ("value", 2, 96, 32, "token", "symmetric", 32),
    ("key", 2, 96, 32, "token", "asymmetric", 32), ("value", 2, 96, 96, "channel", "asymmetric", 32),
]  # fmt: skip


@pytest.mark.parametrize(("role", "bits", "dim", "group", "axis", "mode", "block"), WORDS)
def test_words_of_the_fused_kernel_are_as_the_page_says(
    role: Any, bits: int, dim: int, group: int, axis: Any, mode: Any, block: int
) -> None:
    codec = Uniform(Shape(2, dim, block), role, bits, group, axis, mode)
    x = numbers(2, 2, 2 * block, dim, seed=bits) + 1
    packed = codec.encode(x)
    assert set(packed) == {"words", "scale"}
    state = {"config": codec.config(), "shape": [2, dim]}
    found = uniform_words(state, role, block, {name: t.numpy() for name, t in packed.items()})
    assert np.array_equal(found, codec.decode(packed).numpy())


def pair_code(words: ndarray, role: str, bits: int, d: int, piece: int, row: int, column: int) -> ndarray:
    """words (..., units) unsigned 32 bits."""
    turned = words >> 7 | words << 25 & 0xFFFFFFFF
    if bits == 3 and words.shape[-1] == 192:  # D 64
        whole, half = (turned[..., i : i + n].reshape(*turned.shape[:-1], 16, -1) for i, n in ((0, 128), (128, 64)))
        if piece < 5:
            return whole[..., row, column] >> 6 * piece & 63
        own = half[..., row, column % 4] >> 16 * (column // 4) + 6 * (piece - 5)
        return own & 63 if piece < 7 else whole[..., row, column] >> 30 & 3 | (own & 15) << 2
    if bits == 2 and words.shape[-1] == 192:  # D 96: the upper half of a tile
        turned = np.concatenate([turned, np.zeros_like(turned[..., :64])], -1)
    turned = turned.reshape(*turned.shape[:-1], -1, 16, 8)
    if bits == 4:
        return turned[..., piece // 4, row, column] >> 8 * (piece % 4) & 255
    if bits == 3 and piece % 16 == 15:
        parts = [(turned[..., piece // 16 * 3 + i, row, column] >> 30 & 3) << 2 * i for i in range(3)]
        return parts[0] | parts[1] | parts[2]
    if bits == 3:
        return turned[..., piece // 16 * 3 + piece % 16 // 5, row, column] >> 6 * (piece % 16 % 5) & 63
    tile, at = divmod(piece, 8)
    if role == "key" and d == 4:
        return turned[..., tile, row, column] >> 4 * at & 15
    return turned[..., tile, row % 8 + at // 4 * 8, column] >> 8 * (at % 4) + row // 8 * 4 & 15


def higgs_words(state: dict[str, Any], role: str, block: int, packed: dict[str, ndarray]) -> ndarray:
    """Codes (B, H, N, b, D/d) of the fused kernel's words."""
    d, dim = state["config"]["d"], state["shape"][1]
    bits = (state["config"]["n"] - 1).bit_length() // d
    shape = packed["words"].shape
    own = packed["words"].reshape(*shape[:2], shape[2] * block // 32, -1, 2).view(np.uint32)[..., 0].astype(np.int64)
    found = np.zeros((*own.shape[:3], 32, dim // d), np.int64)
    for t, i in np.ndindex(32, dim // d):
        half, across = t // 16, dim // 16
        if role == "key" and d == 4:
            places = [(half * across + i // 8 * 2 + part, t % 16, i % 8) for part in (0, 1)]
        elif role == "key":
            places = [(half * across + i * d // 16, t % 16, i * d % 16 // 2)]
        elif d == 1:
            places = [(half * across + i // 16, i % 16, t % 16 // 2)]
        elif d == 2:
            places = [(t // 8 * (dim // 32) + i // 16, i % 16, t % 8)]
        else:
            places = [(t // 8 * (dim // 32) + i // 8, i % 8 + 8 * part, t % 8) for part in (0, 1)]
        codes = [pair_code(own, role, bits, d, *place) for place in places]
        if d == 1:
            codes[0] = codes[0] >> bits * ((i if role == "key" else t) % 2) & 2**bits - 1
        found[..., t, i] = codes[0] | codes[-1] << 4 if d == 4 else codes[0]
    return found.reshape(*shape[:3], block, dim // d)


GRIDS = [
    ("key", 2, 16, 64, 32), ("value", 2, 16, 128, 32), ("key", 2, 64, 128, 32), ("value", 2, 64, 128, 64),
    ("key", 2, 256, 96, 32), ("value", 2, 256, 64, 32), ("key", 4, 256, 64, 64), ("value", 4, 256, 128, 32),
    ("key", 1, 8, 128, 32), ("value", 1, 8, 256, 32), ("key", 1, 16, 64, 32), ("value", 1, 4, 64, 32),
    ("key", 2, 64, 64, 32), ("value", 1, 8, 64, 32), ("value", 2, 64, 64, 32), ("key", 2, 16, 96, 32),
    ("value", 2, 16, 96, 32), ("key", 1, 4, 96, 32),
]  # fmt: skip


@pytest.mark.parametrize(("role", "d", "n", "dim", "block"), GRIDS)
def test_words_of_grids_are_as_the_page_says(role: Any, d: int, n: int, dim: int, block: int) -> None:
    norm = "head" if d == 1 else "token"
    mixed = "hadamard" if d == 1 else "cosine" if role == "value" else "none"
    codec = Higgs(Shape(2, dim, block), role, d, n, norm=norm, seed=n, mixed=mixed)  # type: ignore[arg-type]
    packed = {name: t.numpy() for name, t in codec.encode(numbers(2, 2, 2 * block, dim, seed=n)).items()}
    assert set(packed) == {"words", "norm"}
    state, own = {"config": codec.config(), "shape": [2, dim]}, {name: t.numpy() for name, t in codec.tensors().items()}
    found = higgs(state, role, block, packed, own).reshape(2, 2, -1, dim)
    wanted = codec.decode({name: torch.from_numpy(t) for name, t in packed.items()}).numpy()
    assert np.allclose(found, wanted, atol=1e-5)


def higgs(state: dict[str, Any], role: str, block: int, packed: dict[str, ndarray], own: dict[str, ndarray]) -> ndarray:
    c, (heads, dim), d = state["config"], state["shape"], state["config"]["d"]
    tokens, bits, norm = c["axis"] == "token", (c["n"] - 1).bit_length(), packed["norm"].astype(np.float32)
    down, across = (block // d, dim) if tokens else (block, dim // d)
    codes = (
        matrix(packed["codes"], role, bits, down, across)
        if "codes" in packed
        else higgs_words(state, role, block, packed)
    )
    if tokens:  # (B, H, N, D) vectors of b
        y = own["grid"][np.swapaxes(codes, -1, -2)].reshape(*codes.shape[:3], dim, block) * norm[..., None]
    else:  # (B, N, b) vectors of C
        y = own["grid"][codes].reshape(*codes.shape[:4], dim) * norm[..., None]
        y = np.moveaxis(y, 1, 3).reshape(len(y), -1, block, heads * dim)
    length = block if tokens else (dim if c["rotation"] == "head" else heads * dim)
    w = length & -length
    signs = np.array([[(-1) ** (i & j).bit_count() for j in range(w)] for i in range(w)], np.float32)
    m = length // w if c.get("mixed") is True else 1
    if c.get("mixed") == "hadamard":
        y = unmixed(y.reshape(-1, length), length // w, w).astype(np.float32)
        signs, w = np.ones((1, 1), np.float32), 1
    i, j = np.arange(m)[None, :], np.arange(m)[:, None]
    cosines = np.sqrt(np.where(j == 0, 1, 2) / m) * np.cos(np.pi * (2 * i + 1) * j / (2 * m))
    y = np.einsum("ji,njr->nir", cosines, y.reshape(-1, m, w)).astype(np.float32)
    x = (y.reshape(-1, w) @ signs / np.float32(math.sqrt(w))).reshape(-1, m * w)
    if m > 1 and (tokens or c["rotation"] == "token"):  # element b w + r of the span was at r m + b
        x = np.swapaxes(x.reshape(-1, w, m), 1, 2)
    x = x.reshape(*codes.shape[:3], dim, block) if tokens else x.reshape(len(codes), -1, block, heads * dim)
    x = x * own["sign"]
    return np.swapaxes(x, -1, -2) if tokens else np.moveaxis(x.reshape(*x.shape[:3], heads, dim), 3, 1)


def unmixed(y: ndarray, m: int, w: int) -> ndarray:
    """Rows of y, whose odd factor m Paley's matrix mixed, without sign."""
    n = 4 * m
    while (q := paley_prime(n)) == 0:
        n *= 2
    p = n // m
    c = min(4, w // p)
    chi = [0] + [1 if any(r * r % q == k for r in range(q)) else -1 for k in range(1, q)]
    one_mod_4 = q % 4 == 1
    C = [[chi[(j - i) % q] if i and j else int(i != j) for j in range(q + 1)] for i in range(q + 1)]
    if one_mod_4:
        A, B = [[1, 1], [1, -1]], [[1, -1], [-1, -1]]
        P = [
            [C[i // 2][j // 2] * A[i % 2][j % 2] + (i // 2 == j // 2) * B[i % 2][j % 2] for j in range(n)]
            for i in range(n)
        ]
    else:
        P = [[1 if i == j else -1 if i and not j else C[i][j] for j in range(n)] for i in range(n)]
    S = [[(-1) ** (i & j).bit_count() for j in range(w // p)] for i in range(w // p)]
    Y = y.reshape(-1, m, w // (p * c), p, c).swapaxes(2, 3).reshape(-1, n, w // p)
    X = np.einsum("ki,zkr,rs->zis", np.array(P), Y, np.array(S)) / math.sqrt(m * w)
    return X.reshape(-1, m, p, w // (p * c), c).swapaxes(2, 3).reshape(len(y), m * w)


def paley_prime(n: int) -> int:
    for q, rest in ((n - 1, 3), (n // 2 - 1, 1)):
        if q % 4 == rest and all(q % d for d in range(2, math.isqrt(q) + 1)):
            return q
    return 0


def float8(codes: ndarray, mantissa_bits: int) -> ndarray:
    bias = 2 ** (6 - mantissa_bits) - 1
    exponent, mantissa = (codes & 127) >> mantissa_bits, (codes & 2**mantissa_bits - 1) / 2**mantissa_bits
    size = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    return np.where(codes & 128, -size, size).astype(np.float32)


def mixkvq(state: dict[str, Any], packed: dict[str, Any], block: int) -> ndarray:
    """(B, H, N, b, D); pools come as (data, counts)."""
    perm, group = packed["perm"].astype(np.int64), state["config"]["group"]
    out, begin = np.zeros((*perm.shape, block), np.float32), np.zeros(perm.shape[:-1], np.int64)
    for name, bits in (("raw", 0), ("four", 4), ("two", 2)):
        parts = [packed[name]] if not bits else [packed[f"{name}_codes"], packed[f"{name}_scale"]]
        if state["config"]["full"] is None:
            counts, parts = parts[0][1].astype(np.int64), [data for data, _ in parts]
        else:
            counts = np.full(perm.shape[:-1], parts[0].shape[3])
            parts = [part.reshape(-1, *part.shape[4:]) for part in parts]
        rows = parts[0].astype(np.float32)
        if bits:
            scale, low = np.moveaxis(np.repeat(parts[1].astype(np.float32), group, 1), -1, 0)
            rows = unpacked(parts[0], bits, block) * scale + low
        place = 0
        for at in np.ndindex(*counts.shape):
            chosen = perm[at][begin[at] : begin[at] + counts[at]]
            out[at][chosen] = rows[place : place + counts[at]]
            place += counts[at]
        begin += counts
    return np.swapaxes(out, -1, -2)


def mixkvq_words(state: dict[str, Any], packed: dict[str, ndarray], block: int) -> ndarray:
    """(B, H, N * b, D) of the fused kernel's words."""
    c, dim, perm = state["config"], state["shape"][1], packed["perm"].astype(np.int64)
    full, four, low = c["full"], c["four"], dim - c["full"]
    words = packed["words"].reshape(*perm.shape[:3], block // 32, -1).view(np.uint16)
    exact, tiles = words[..., : 32 * full].view(np.float16), words[..., 32 * full :].astype(np.int64)
    if tiles.shape[-1] % 256:
        tiles = np.concatenate([tiles[..., :-128], whole(tiles[..., -128:], 8)], -1)
    scale = packed["scale"].astype(np.float32).reshape(*perm.shape[:3], -1)
    out = np.zeros((*perm.shape[:3], block, dim), np.float32)
    for t, i in np.ndindex(block, dim):
        n, half, row = t // 32, t % 32 // 16, t % 16
        if i < full:
            x = exact[..., n, (half * full // 16 + i // 16) * 256 + row * 16 + i % 16].astype(np.float32)
        else:
            j, fields = i - full, (low + four) // 16

            def field(number: int, column: int, n: int = n, first: int = half * fields, row: int = row) -> ndarray:
                tile, bit = divmod(first + number, 8)
                return tiles[..., n, tile * 256 + row * 16 + column] >> 2 * bit & 3

            if j < four:
                q = field(j // 16 * 2, j % 16) | field(j // 16 * 2 + 1, j % 16) << 2
            else:
                q = field(four // 16 + j // 16, j % 16)
            at = j // 16 * 32 + j % 16 // 2 * 4 + j % 2
            x = q * scale[..., at] + scale[..., at + 2]
        np.put_along_axis(out[..., t, :], perm[..., i : i + 1], x[..., None], -1)
    return out.reshape(*perm.shape[:2], -1, dim)


@pytest.mark.parametrize(("dim", "block", "full", "four"), [(64, 32, 16, 16), (128, 64, 0, 64), (96, 32, 16, 16)])
def test_words_of_tiers_are_as_the_page_says(dim: int, block: int, full: int, four: int) -> None:
    codec = MixKVQ(Shape(2, dim, block), "key", group=block, full=full, four=four, importance="none")
    packed = codec.encode(numbers(2, 2, 2 * block, dim, seed=full))
    assert set(packed) == {"perm", "words", "scale"}
    state = {"config": codec.config(), "shape": [2, dim]}
    found = mixkvq_words(state, {name: t.numpy() for name, t in packed.items()}, block)
    assert np.array_equal(found, codec.decode(packed).numpy())


def residual_vq(state: dict[str, Any], block: int, packed: dict[str, ndarray], own: dict[str, ndarray]) -> ndarray:
    c = state["config"]
    found = np.zeros((*packed["codes.0"].shape[:3], block, state["shape"][1]), np.float32)
    for i, band in enumerate(c["bands"]):
        codes = unpacked(packed[f"codes.{i}"], (c["sizes"][i] - 1).bit_length(), block)  # (B, H, N, stages, b)
        for stage in range(c["stages"][i]):
            found[..., band] += own[f"codebooks.{i}"][stage].astype(np.float32)[codes[..., stage, :]]
    return found * own["scale"].astype(np.float32)[:, None, None] if "scale" in own else found


def predictor(kind: str, x: ndarray, p: dict[str, ndarray]) -> ndarray:
    w = {name: t if name == "codes" else t.astype(np.float32) for name, t in p.items()}
    if kind == "bias":
        return np.broadcast_to(w["bias"], (*x.shape[:-1], len(w["bias"])))
    if kind == "linear":
        return x @ w["weight"] + w["bias"]
    if kind == "reduced-rank":
        return x @ w["down"] @ w["up"] + w["bias"]
    if kind == "linear-4bit":
        weight = unpacked(w["codes"], 4, x.shape[-1]).T.astype(np.float32) * w["scale"] + w["min"]
        return x @ weight + w["bias"]
    if "norm_weight" in w:
        centred = x - x.mean(-1, keepdims=True)
        x = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w["norm_weight"] + w["norm_bias"]
    z = x @ w["in_weight"] + w["in_bias"]
    return z * (1 + np.vectorize(math.erf)(z / math.sqrt(2))) / 2 @ w["out_weight"] + w["out_bias"]


def decode(
    state: dict[str, Any],
    role: str,
    block: int,
    packed: dict[str, ndarray],
    own: dict[str, ndarray],
    below: dict[str, ndarray],
) -> ndarray:
    """(B, H, N * b, D); own: the codec's constants by local name; below: k1, v1, k2, v2, k0 as (B, T, C)."""
    if state["codec"] == "predicted":
        settings, heads = state["config"]["predictor"], state["shape"][0]
        parts = {at: {n[len(at) :]: t for n, t in own.items() if n.startswith(at)} for at in ("inner.", "predictor.")}
        rest = decode(state["config"]["inner"] | {"shape": state["shape"]}, role, block, packed, parts["inner."], below)
        inputs = np.concatenate([below[name] for name in settings["inputs"]], -1)
        guess = predictor(settings["kind"], inputs, parts["predictor."])
        return rest + np.moveaxis(guess.reshape(*guess.shape[:2], heads, -1), 2, 1)
    if state["codec"] == "by-head":
        found = []
        for i, part in enumerate(state["config"]["parts"]):
            at = f"{i}."
            stored, constants = ({n[len(at) :]: t for n, t in x.items() if n.startswith(at)} for x in (packed, own))
            shape = [part["heads"], state["shape"][1]]
            found.append(decode(part | {"shape": shape}, role, block, stored, constants, below))
        return np.concatenate(found, 1)
    if state["codec"] == "scaled":
        inner = {n.removeprefix("inner."): t for n, t in own.items()}
        rest = decode(state["config"]["inner"] | {"shape": state["shape"]}, role, block, packed, inner, below)
        return rest * own["factor"].astype(np.float32)[:, None]
    if state["codec"] == "mixkvq":
        blocks = mixkvq(state, packed, block)
    elif state["codec"] == "exact":
        blocks = packed["raw"].astype(np.float32)
    elif state["codec"] == "float8":
        mantissa_bits = {"e4m3fn": 3, "e5m2": 2}[state["config"]["format"]]
        blocks = float8(packed["codes"].astype(np.int64), mantissa_bits) * np.float32(state["config"]["scale"])
    elif state["codec"] == "uniform":
        blocks = uniform(state, role, block, packed)
    elif state["codec"] == "residual-vq":
        blocks = residual_vq(state, block, packed, own)
    else:
        blocks = higgs(state, role, block, packed, own)
    return blocks.reshape(*blocks.shape[:2], -1, blocks.shape[-1])


# ---------------------------------------------------------------------------------------------------------------------

SHAPE = Shape(2, 48, 16)  # a head of 48 channels is rotated in widths of 16, all 96 in widths of 32
C = SHAPE.heads * SHAPE.dim


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(kind: str, wide: int, seed: int) -> dict[str, torch.Tensor]:
    sizes: dict[str, dict[str, tuple[int, ...]]] = {
        "linear": {"weight": (wide, C), "bias": (C,)},
        "reduced-rank": {"down": (wide, 7), "up": (7, C), "bias": (C,)},
        "mlp": {"in_weight": (wide, C), "in_bias": (C,), "out_weight": (C, C), "out_bias": (C,)},
        "bias": {"bias": (C,)},
    }
    sizes["mlp-norm"] = sizes["mlp"] | {"norm_weight": (wide,), "norm_bias": (wide,)}
    return {n: (numbers(*s, seed=seed + i) / s[0] ** 0.5).half() for i, (n, s) in enumerate(sizes[kind].items())}


def predicted(inner: Codec, kind: str, inputs: tuple[str, ...], seed: int) -> Codec:
    wide = len(inputs) * C
    if kind == "linear-4bit":
        codes = torch.randint(0, 16, (wide, C), generator=torch.Generator().manual_seed(seed))
        made = QuantisedLinear.from_codes(codes, torch.full((C,), 0.01), torch.full((C,), -0.08), numbers(C, seed=seed))
    else:
        made = PREDICTORS[kind.removesuffix("-norm")](weights(kind, wide, seed))
    return Predicted(inner, made, inputs)


BOOKS, HEADS = 23, 24  # layers behind the skipped one


def books(role: Role) -> Codec:
    """Two bands for keys, one for values; codes of 11, 3 and 9 bits."""
    low, high = [d for d in range(SHAPE.dim) if d % 3], list(range(0, SHAPE.dim, 3))
    bands, sizes = ([low, high], (2048, 8)) if role == "key" else ([list(range(SHAPE.dim))], (512,))
    made = [numbers(3 - i, k, len(band), seed=i).half() for i, (band, k) in enumerate(zip(bands, sizes, strict=True))]
    scale = numbers(SHAPE.heads, SHAPE.dim, seed=9).exp().half() if role == "key" else None
    return ResidualVQ(SHAPE, role, bands, made, scale)


def layer(index: int) -> LayerCodecs | None:
    """Every codec, axis and kind of predictor in turn."""

    def pair(make: Any) -> LayerCodecs:
        return LayerCodecs(make("key"), make("value"))

    plain: list[Any] = [
        lambda role: Higgs(SHAPE, role, 2, 256, rotation="token"),
        lambda role: Higgs(SHAPE, role, 2, 64, rotation="head"),
        lambda role: Higgs(SHAPE, role, 4, 256, norm="head", seed=3),
        lambda role: Higgs(SHAPE, role, 2, 16, axis="token"),
        lambda role: Uniform(SHAPE, role, 3, 24),
        lambda role: Uniform(SHAPE, role, 5, 8, "token"),
        lambda role: Uniform(SHAPE, role, 4, 48, mode="symmetric", search=True),
        lambda role: Uniform(SHAPE, role, 1, 16, "token", mode="symmetric"),
        lambda role: Exact(SHAPE, role, "float16"),
        lambda role: Exact(SHAPE, role),
        lambda role: Higgs(SHAPE, role, 1, 8, norm="head", seed=3),
        lambda role: Uniform(SHAPE, role, 2, 16, "token", mode="hybrid", search=True),
        lambda role: Float8(SHAPE, role, "e4m3fn", 0.5),
        lambda role: Float8(SHAPE, role, "e5m2"),
        lambda role: Scaled(Uniform(SHAPE, role, 3, 24, mode="hybrid"), numbers(2, 48, seed=9).abs().half() + 0.1),
        lambda role: Scaled(Higgs(SHAPE, role, 2, 16, seed=3), numbers(2, 48, seed=8).abs().half() + 0.1),
    ]
    kinds = ["linear", "reduced-rank", "mlp", "mlp-norm", "linear-4bit", "bias"]
    if index < len(plain):
        return pair(plain[index])
    if index - len(plain) == len(kinds):
        return None
    if index == BOOKS:
        return pair(books)
    if index == HEADS:
        one = Shape(1, SHAPE.dim, SHAPE.block)
        return pair(lambda role: ByHead([Higgs(one, role, seed=3), Uniform(one, role, 3, 8, "token")]))
    kind = kinds[index - len(plain)]
    key = predicted(Higgs(SHAPE, "key", rotation="token"), kind, ("k1", "k2"), 10 * index)
    return LayerCodecs(key, predicted(Higgs(SHAPE, "value"), kind, ("v1", "k0"), 10 * index + 5))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = tuple(layer(index) for index in range(25))
    scheme = Scheme(Windows(4, 16, SHAPE.block), "pre_rope", layers, {22: "for the test"})
    mark = Fingerprint("llama", 25, SHAPE.heads, SHAPE.dim, {"rope_theta": 1e4}, "0" * 64, None, (0.125, -1e-7))
    bundle = Bundle(mark, scheme, {"text": 'ä "quoted" \n \\ …'}, {"small": 1e-05, "third": 1 / 3})
    bundle.write(tmp_path_factory.mktemp("format") / "x.kvcal.safetensors")
    assert bundle.path is not None
    return bundle.path


def flat(x: torch.Tensor) -> ndarray:
    """(B, H, T, D) -> (B, T, C)."""
    return x.transpose(1, 2).flatten(2).numpy()


@pytest.mark.parametrize("index", [*range(22), BOOKS, HEADS])
def test_codes_decode_as_specified(path: Path, index: int) -> None:
    header, tensors = read(path.read_bytes())
    pair = load_bundle(path).scheme.layers[index]
    assert pair is not None
    size = (2, SHAPE.heads, 3 * SHAPE.block, SHAPE.dim)
    parts = {name: numbers(*size, seed=i) for i, name in enumerate(CONTEXT_TENSORS)}
    below = {name: flat(x) for name, x in parts.items()}
    for role, codec in (("key", pair.key), ("value", pair.value)):
        context = Context(index, **parts)
        packed = codec.encode(numbers(*size, seed=50) * 3, context)
        state = header["scheme"]["layers"][index][role]
        own = {local: tensors[name] for local, name in state["tensors"].items()}
        found = decode(state, role, SHAPE.block, {n: t.numpy() for n, t in packed.items()}, own, below)
        wanted = codec.decode(packed, context).numpy()
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("settings", [{}, {"full": 8, "four": 16}], ids=["ragged", "fixed"])
def test_tiers_decode_as_specified(tmp_path: Path, settings: dict[str, Any]) -> None:
    key = MixKVQ(SHAPE, "key", 0.8, 1.3, group=8, **settings)
    scheme = Scheme(Windows(4, 16, SHAPE.block), "post_rope", (LayerCodecs(key, Uniform(SHAPE, "value", 2, 24)),))
    mark = Fingerprint("llama", 1, SHAPE.heads, SHAPE.dim, {}, "0" * 64)
    Bundle(mark, scheme).write(tmp_path / "x.kvcal.safetensors")
    header, _ = read((tmp_path / "x.kvcal.safetensors").read_bytes())
    stats = {"query_abs": numbers(2, SHAPE.heads, 3, SHAPE.dim, seed=1).abs()}
    packed = key.encode(numbers(2, SHAPE.heads, 3 * SHAPE.block, SHAPE.dim, seed=2), Context(stats=stats))
    plain: Any = {
        n: (t.data.numpy(), t.counts.numpy()) if isinstance(t, Ragged) else t.numpy() for n, t in packed.items()
    }
    found = decode(header["scheme"]["layers"][0]["key"], "key", SHAPE.block, plain, {}, {})
    wanted = key.decode(packed).numpy()
    assert np.abs(found - wanted).max() <= 1e-6 * np.abs(wanted).max()


def test_header_is_as_specified(path: Path) -> None:
    header, tensors = read(path.read_bytes())
    assert set(header) == {"format", "version", "model", "scheme", "provenance", "metrics", "tensors"}
    assert set(header["scheme"]) == {"windows", "frame", "layers"}
    assert set(header["model"]) == {
        "architecture", "layers", "kv_heads", "head_dim", "rope", "config_sha256", "revision", "probe"
    }  # fmt: skip
    assert header["scheme"]["layers"][22] == {"skipped": "for the test"}
    assert header["metrics"]["third"] == 1 / 3
    assert header["scheme"]["layers"][16]["value"]["tensors"]["inner.grid"] == "layers.3.key.grid"  # stored once
    assert {name.split(".")[0] for name in tensors} == {"layers"}


def test_every_kind_is_specified() -> None:
    page = Path(__file__).parents[3].joinpath("docs", "format.md").read_text("utf-8")
    for name in (*CODECS, *PREDICTORS):
        assert re.search(rf"^\| `{name}` (\(keys only\) )?\|", page, flags=re.MULTILINE), name


def test_examples_of_packing() -> None:
    page = Path(__file__).parents[3].joinpath("docs", "format.md").read_text("utf-8")
    examples = re.findall(r"^\| (\d+) \| ([\d ]+) \| ([0-9a-f ]+) \|", page, flags=re.MULTILINE)
    assert len(examples) == 4
    for bits, codes, packed in examples:
        wanted = [int(code) for code in codes.split()]
        assert unpacked(np.frombuffer(bytes.fromhex(packed), "u1"), int(bits), len(wanted)).tolist() == wanted


@pytest.mark.parametrize("where", [200, -1])
def test_a_changed_byte_is_seen(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    with pytest.raises((AssertionError, ValueError, KeyError)):
        read(bytes(data))
