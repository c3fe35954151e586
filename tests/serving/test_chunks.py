"""Chunks of a cold tier: the bytes of kvcal's cache, back bit for bit, and nothing that was touched."""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvcal.models import load_model, resolve
from kvcal_artifacts import load_bundle
from kvcal_artifacts.bundle import Bundle, Fingerprint
from kvcal_artifacts.codecs import PREDICTORS, Context, Predicted, Role, Shape, Transform
from kvcal_artifacts.errors import KVCalError, NonFiniteError, UsageError
from kvcal_artifacts.scheme import HeavyHitters, LayerCodecs, Scheme, Windows
from kvcal_vllm.chunks import CHECKSUM, HEADER, ChunkCodec, usable_device
from tests.support import schemes
from tests.support.pages import ROOT, run_page
from tests.support.schemes import BLOCK, DIM, FED_SHAPE, HEADS, LAYERS, Fed, Rows, numbers

TOKENS, KEY = 6 * BLOCK, b"a chunk's name"


def transform(role: Role, seed: int) -> Transform:
    basis = torch.linalg.qr(numbers(HEADS, DIM, DIM, seed=seed))[0]
    return Transform(FED_SHAPE, role, [4] * 16 + [2] * 10 + [0] * 6, basis, numbers(HEADS, DIM, seed=seed + 1))


def predicted(role: Role, inputs: tuple[str, ...], seed: int) -> Predicted:
    width = HEADS * DIM
    weights = {"weight": numbers(len(inputs) * width, width, seed=seed) / 16, "bias": numbers(width, seed=seed)}
    return Predicted(
        transform(role, seed), PREDICTORS["linear"]({name: w.half() for name, w in weights.items()}), inputs
    )


def aqua_transform() -> Scheme:
    """Transform in layer 0; above, of what AQUA-KV's predictors do not know, some of which read two layers below."""
    layers = [LayerCodecs(transform("key", 0), transform("value", 1))]
    for index in range(1, LAYERS):
        below = ("k1", "k2") if index > 1 else ("k1",)
        layers.append(
            LayerCodecs(predicted("key", below, 10 * index), predicted("value", ("v1", "k0"), 10 * index + 5))
        )
    return Scheme(Windows(0, 0, BLOCK), "post_rope", tuple(layers))


def wide() -> Scheme:
    """Rotations over all heads, which pages cannot hold."""
    return replace(schemes.chained(), windows=Windows(0, 0, BLOCK))


def bundle(scheme: Scheme) -> Bundle:
    return Bundle(Fingerprint.of(Fed()), scheme, {"method": "test"})


@pytest.fixture(scope="module", params=[aqua_transform, wide], ids=lambda make: make.__name__)
def scheme(request: pytest.FixtureRequest) -> Scheme:
    made: Scheme = request.param()
    return made


@pytest.fixture(scope="module")
def codec(scheme: Scheme) -> ChunkCodec:
    return ChunkCodec(bundle(scheme))


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows([TOKENS])


@pytest.fixture(scope="module")
def chunk(rows: Rows) -> Tensor:
    """Keys after RoPE and values of the row, as a server has them: (2, L, T, H * D)."""
    keys, values = rows.keys[0], rows.values[0]
    cos, sin = Fed().rotary_emb(keys, position_ids=torch.arange(TOKENS)[None])
    rotated = apply_rotary_pos_emb(keys, keys, cos, sin)[1]
    return torch.stack([rotated, values]).transpose(2, 3).flatten(3)


def test_the_bytes_are_those_of_kvcals_cache(scheme: Scheme, codec: ChunkCodec, rows: Rows, chunk: Tensor) -> None:
    cache = schemes.opened(scheme, Fed())
    schemes.feed(cache, rows)
    held = [t for layer in cache.compressed_layers for packed in layer.packed for t in packed.values()]
    schemes.close_all()
    expected = torch.cat([t.contiguous().flatten().view(torch.uint8) for t in held])
    stored = codec.encode(chunk, KEY)
    assert torch.equal(stored[HEADER.size : -CHECKSUM], expected)
    assert len(stored) == codec.size(TOKENS)


def test_what_comes_back_is_what_layers_were_predicted_from(scheme: Scheme, codec: ChunkCodec, chunk: Tensor) -> None:
    """By the codecs alone, one layer after the other; and the same of any part of the chunk."""
    read = codec.decode(codec.encode(chunk, KEY), torch.float32, KEY)
    below: list[Tensor] = [torch.empty(0)] * 4  # k1, v1, k2, v2
    for layer, pair in enumerate(scheme.layers):
        assert pair is not None
        context = Context(layer, *below)
        keys, values = (x[layer].unflatten(1, (HEADS, DIM)).transpose(0, 1)[None] for x in chunk)
        context.k0 = pair.key.encode_decode(keys, context)[1]
        decoded = pair.value.encode_decode(values, context)[1]
        for role, x in enumerate((context.k0, decoded)):
            assert torch.equal(read[role, layer], x[0].transpose(0, 1).flatten(1))
        below = [context.k0, decoded, *below[:2]]
    part = chunk[:, :, BLOCK : 3 * BLOCK]
    assert torch.equal(codec.decode(codec.encode(part), torch.float32), read[:, :, BLOCK : 3 * BLOCK])
    half = codec.decode(codec.encode(chunk), torch.bfloat16)
    assert torch.equal(half, read.bfloat16())


def test_every_byte_counts(codec: ChunkCodec, chunk: Tensor) -> None:
    stored = codec.encode(chunk, KEY)
    size = len(stored)
    for at in sorted({0, 8, 10, 14, *range(0, size, 97), HEADER.size, size - CHECKSUM, size - 1}):
        touched = stored.clone()
        touched[at] ^= 1
        with pytest.raises(KVCalError, match=f"a stored chunk of {size} bytes: .*; compute it again") as raised:
            codec.decode(touched, torch.float32, KEY)
        assert "\n" not in str(raised.value)
    for cut in (0, HEADER.size, size - 1):
        with pytest.raises(KVCalError, match=f"a stored chunk of {cut} bytes"):
            codec.decode(stored[:cut], torch.float32, KEY)
    with pytest.raises(KVCalError, match="damaged, or another chunk's"):
        codec.decode(stored, torch.float32, b"another name")


def test_another_bundles_chunk_is_refused(chunk: Tensor) -> None:
    ours, theirs = (ChunkCodec(bundle(make())) for make in (aqua_transform, wide))
    with pytest.raises(KVCalError, match=f"of bundle {theirs.identity.hex()[:12]}, this one is"):
        ours.decode(theirs.encode(chunk), torch.float32)
    forged = ours.encode(chunk)  # of fewer tokens, with a checksum that is right
    forged[:] = torch.cat([forged[:10], torch.tensor([BLOCK, 0, 0, 0], dtype=torch.uint8), forged[14:]])
    digest = hashlib.blake2b(bytes(8) + forged[:-CHECKSUM].numpy().tobytes(), digest_size=CHECKSUM).digest()
    forged[-CHECKSUM:] = torch.tensor(list(digest), dtype=torch.uint8)
    with pytest.raises(KVCalError, match=f"{BLOCK} tokens do not take so many"):
        ours.decode(forged, torch.float32)


def test_chunks_of_other_shapes_are_refused(chunk: Tensor) -> None:
    codec = ChunkCodec(bundle(aqua_transform()))
    with pytest.raises(UsageError, match=f"a chunk of 20 tokens: must be a multiple of {BLOCK}"):
        codec.encode(chunk[:, :, :20])
    with pytest.raises(UsageError, match=r"a chunk of shape .*: must be \(2, 3 layers, tokens, 2 heads x 32\)"):
        codec.encode(chunk[:, 1:])
    broken = chunk.clone()
    broken[1, 2, 3, DIM] = float("nan")
    with pytest.raises(NonFiniteError, match="layer 2, value head 1"):
        codec.encode(broken)


CHANGES: dict[str, Any] = {
    "keys before RoPE": lambda scheme: replace(scheme, frame="pre_rope"),
    "selects tokens by attention": lambda scheme: replace(scheme, selection=HeavyHitters()),
    "layer 2 is not compressed: too wild": lambda scheme: replace(
        scheme, layers=(*scheme.layers[:2], None), skipped={2: "too wild"}
    ),
    "blocks differ in size": lambda _: schemes.mixkvq(importance="none"),
    "depends on the request's own tokens": lambda _: schemes.squat(),
    "differ in heads or head_dim": lambda scheme: replace(scheme, layers=(*scheme.layers[:2], narrow())),
}


def narrow() -> LayerCodecs:
    shape = Shape(1, DIM, BLOCK)
    return LayerCodecs(*(Transform(shape, role) for role in ("key", "value")))  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", CHANGES)
def test_schemes_that_need_more_than_a_chunk_are_refused(reason: str) -> None:
    with pytest.raises(UsageError, match=f"test cannot store chunks: .*{reason}"):
        ChunkCodec(bundle(CHANGES[reason](aqua_transform())))


def test_the_guides_bundle_stores_chunks(tmp_path: Path) -> None:
    """Its command, with a short text and a model in the folder that it names."""
    guide = (ROOT / "docs" / "guides" / "vllm.md").read_text("utf-8")
    [section] = re.findall(r"^## A cold tier: LMCache\n(.*?)^## ", guide, flags=re.DOTALL | re.MULTILINE)
    page = tmp_path / "page.md"
    page.write_text(section.replace('bash title="needs a model in ./smollm2-135m, and a text"', "bash"), "utf-8")
    demo = ROOT / "kvcal" / "demo"
    model = load_model(resolve("tiny"), dtype=torch.float32, device="cpu").model
    model.save_pretrained(tmp_path / "smollm2-135m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / "tiny" / name, tmp_path / "smollm2-135m")
    shutil.copy(demo / "text" / "calibration.txt", tmp_path / "texts.txt")
    [ran] = run_page(page, tmp_path)
    assert ran.block.code.startswith("kvcal fit aqua-kv ")
    codec = ChunkCodec(load_bundle(tmp_path / "cold.kvcal.safetensors"))
    chunk = numbers(2, model.config.num_hidden_layers, 8 * BLOCK, codec.hidden, seed=3)
    stored = codec.encode(chunk, KEY)
    assert len(stored) == codec.size(8 * BLOCK) < chunk.nbytes / 8  # 3 bits of 32, and norms
    assert codec.decode(stored, torch.float32, KEY).isfinite().all()


@pytest.mark.parametrize("name", ["tpu", "xpu", "meta", "cuda:99", "", 3])
def test_devices_that_no_serde_can_use(name: object) -> None:
    with pytest.raises(UsageError, match=f"serde kvcal, device = {name!r}: must be cpu, cuda or cuda:N, and usable"):
        usable_device(name)


def test_the_host_is_a_device() -> None:
    assert usable_device("cpu") == torch.device("cpu")
