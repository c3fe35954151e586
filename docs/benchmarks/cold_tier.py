"""When a cold tier gains from a bundle's codecs: bytes saved for a chunk against the time that codecs take.

    python docs/benchmarks/cold_tier.py [--tokens 256] [--device cpu] [--repeats 3] [--out FILE]
    python docs/benchmarks/cold_tier.py --bundle FILE .. --model FOLDER --text FILE [the same options]

A chunk of so many tokens of all layers, bfloat16 as a server has it. Without bundles: AQUA-KV's linear predictors around
`transform` of 2 and 3 bits in the geometries of SmolLM2-135M and Llama-3.1-8B, all constants random, and so is the
chunk. With bundles it has the keys and values of the model they were fitted to, of a text's first tokens. A load of
packed bytes is faster than one of exact bytes from a tier slower than (bytes saved) / (time to decode); a store likewise
by the time to encode. Every chunk is read back, and its error is stated, before a time is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcal_artifacts import load_bundle
from kvcal_artifacts.bundle import Bundle, Fingerprint
from kvcal_artifacts.codecs import PREDICTORS, Codec, Predicted, Role, Shape, Transform
from kvcal_artifacts.files import write_atomically
from kvcal_artifacts.scheme import LayerCodecs, Scheme, Windows
from kvcal_vllm.chunks import ChunkCodec

GEOMETRIES = {"SmolLM2-135M": (30, 3, 64), "Llama-3.1-8B": (32, 8, 128)}  # layers, kv heads, head_dim
BITS = (2, 3)


def random_bundle(layers: int, shape: Shape, bits: int) -> Bundle:
    """AQUA-KV x transform with random constants: layer 0 as it is, above it what predictors do not know."""
    generator = torch.Generator().manual_seed(bits)

    def transform(role: Role) -> Transform:
        basis = torch.linalg.qr(torch.randn(shape.heads, shape.dim, shape.dim, generator=generator))[0]
        return Transform(shape, role, [bits] * shape.dim, basis)

    def predicted(role: Role, inputs: tuple[str, ...]) -> Codec:
        width = shape.heads * shape.dim
        weight = torch.randn(len(inputs) * width, width, generator=generator) / (len(inputs) * width) ** 0.5
        weights = {"weight": (0.5 * weight).half(), "bias": torch.zeros(width).half()}
        return Predicted(transform(role), PREDICTORS["linear"](weights), inputs)

    pairs = [LayerCodecs(transform("key"), transform("value"))]
    pairs += [LayerCodecs(predicted("key", ("k1",)), predicted("value", ("v1", "k0"))) for _ in range(1, layers)]
    fingerprint = Fingerprint("llama", layers, shape.heads, shape.dim, {}, "0" * 64)
    return Bundle(fingerprint, Scheme(Windows(0, 0, shape.block), "post_rope", tuple(pairs)), {"method": "random"})


def random_chunk(layers: int, tokens: int, hidden: int) -> Tensor:
    """(2, L, T, H * D) bfloat16, normal numbers."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn((2, layers, tokens, hidden), generator=generator).bfloat16()


@torch.no_grad()
def chunk_of_text(folder: str, text: Path, tokens: int) -> Tensor:
    """(2, L, T, H * D) bfloat16: keys after RoPE and values of the first tokens, which a model computes in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with text.open(encoding="utf-8") as file:
        ids = AutoTokenizer.from_pretrained(folder)(file.read(100 * tokens), return_tensors="pt").input_ids[:, :tokens]
    assert ids.shape[1] == tokens, f"{text}: {ids.shape[1]} tokens, {tokens} wanted"
    cache = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids, use_cache=True).past_key_values
    pairs = torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers], 1)  # (2, L, 1, H, T, D)
    return pairs[:, :, 0].transpose(2, 3).flatten(3).bfloat16()


def bundles(paths: list[str]) -> Iterator[tuple[str, Bundle]]:
    """What to measure, by a row's name."""
    for path in paths:
        bundle = load_bundle(path)
        yield bundle.name, bundle
    if not paths:
        for name, (layers, heads, dim) in GEOMETRIES.items():
            for bits in BITS:
                made = random_bundle(layers, Shape(heads, dim, 32), bits)
                yield f"{name}, AQUA-KV x transform-{bits}, random constants", made


def median(work: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Seconds of one call, the first one left out."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def measure(name: str, codec: ChunkCodec, chunk: Tensor, device: torch.device, repeats: int) -> dict[str, Any]:
    """One row. Raises AssertionError where a chunk does not come back as its codecs read it."""
    stored = codec.encode(chunk, b"row")
    read = codec.decode(stored, torch.bfloat16, b"row").cpu()
    error = float((read.float() - chunk.float()).square().mean() / chunk.float().square().mean())
    assert read.shape == chunk.shape and error < 1, f"{name}: relative squared error {error}"
    assert torch.equal(codec.encode(chunk, b"row"), stored), f"{name}: other bytes the second time"
    exact = chunk.numel() * chunk.element_size()
    saved = exact - len(stored)
    encode = median(lambda: codec.encode(chunk, b"row"), repeats, device)
    decode = median(lambda: codec.decode(stored, torch.bfloat16, b"row").cpu(), repeats, device)
    return {
        "row": name,
        "device": str(device),
        "tokens": chunk.shape[2],
        "relative_squared_error": round(error, 4),
        "exact_bytes": exact,
        "stored_bytes": len(stored),
        "encode_s": round(encode, 4),
        "decode_s": round(decode, 4),
        "store_gains_below_mb_per_s": round(saved / encode / 1e6, 1),
        "load_gains_below_mb_per_s": round(saved / decode / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bundle", nargs="*", default=[], help="bundles whose keys are stored after RoPE")
    parser.add_argument("--model", help="with --bundle: a folder, whose keys and values the chunk has")
    parser.add_argument("--text", type=Path, help="with --bundle: a file")
    parser.add_argument("--tokens", type=int, default=256, help="of a chunk: LMCache's are 256")
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    asked = parser.parse_args()
    if len({bool(asked.bundle), asked.model is not None, asked.text is not None}) != 1:
        parser.error("--bundle, --model and --text go together")
    rows, columns = [], "| bundle | exact, MB | stored, MB | error | encode, ms | decode, ms | a store gains below "
    print(f"{columns}| a load gains below |\n|---|---|---|---|---|---|---|---|")
    for name, bundle in bundles(asked.bundle):
        codec, layers = ChunkCodec(bundle, asked.device), len(bundle.scheme.layers)
        chunk = (
            chunk_of_text(asked.model, asked.text, asked.tokens)
            if asked.bundle
            else random_chunk(layers, asked.tokens, codec.hidden)
        )
        row = measure(name, codec, chunk, asked.device, asked.repeats)
        rows.append(row)
        cells = [row["row"], f"{row['exact_bytes'] / 1e6:.2f}", f"{row['stored_bytes'] / 1e6:.2f}"]
        cells += [f"{row['relative_squared_error']:.3f}"]
        cells += [f"{row[part] * 1e3:.0f}" for part in ("encode_s", "decode_s")]
        cells += [f"{row[part]:.0f} MB/s" for part in ("store_gains_below_mb_per_s", "load_gains_below_mb_per_s")]
        print(f"| {' | '.join(cells)} |", flush=True)
        if asked.out is not None:
            write_atomically(asked.out, json.dumps(rows, indent=1).encode())


if __name__ == "__main__":
    main()
