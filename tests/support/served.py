"""Engines of vLLM with the plug-in, and what they must equal: the same model in Transformers with every token packed."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from kvcal.methods.data_free import Preset
from kvcal.models import load_model, resolve
from kvcal_artifacts.bundle import Bundle, Fingerprint
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import Codec, Shape, Transform
from kvcal_artifacts.scheme import LayerCodecs, Scheme, Windows

TINY = Path(__file__).resolve().parents[2] / "kvcal" / "demo" / "tiny"
CACHE_BYTES = 64 << 20
MODEL_LENGTH = 512


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


def transform_scheme(folder: Path) -> Scheme:
    """Transform codecs of unlike bits in each layer, in bases that rotate and scale."""
    config, layers = reference_model(folder).config, []
    shape = Shape(config.num_key_value_heads, config.head_dim, 32)
    for index in range(config.num_hidden_layers):
        generator = torch.Generator().manual_seed(index)
        bits = sorted([4] * (16 + 2 * (index % 3)) + [2] * (shape.dim - 16 - 2 * (index % 3)), reverse=True)
        bases = [torch.linalg.qr(torch.randn(shape.heads, shape.dim, shape.dim, generator=generator))[0] for _ in "kv"]
        layers.append(LayerCodecs(Transform(shape, "key", bits, bases[0]), Transform(shape, "value", bits, bases[1])))
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
def greedy(folder: Path, ids: Sequence[int], count: int, past: Any) -> list[int]:
    """The most probable next tokens of a prompt, by Transformers with this cache."""
    model, out = reference_model(folder), list(ids)
    step = torch.tensor([out])
    for _ in range(count):
        logits = model(step, past_key_values=past, use_cache=True).logits[0, -1]
        out.append(int(logits.argmax()))
        step = torch.tensor([out[-1:]])
    return out[len(ids) :]


def packed_reference(folder: Path, scheme: Scheme, ids: Sequence[int], count: int) -> list[int]:
    """What deterministic mode must answer."""
    return greedy(folder, ids, count, RoundTrip(scheme, reference_model(folder).config))


def cache_reference(folder: Path, scheme: Scheme, ids: Sequence[int], count: int) -> list[int]:
    """What the default mode must answer to a cold prompt that comes in one step: kvcal's cache with empty windows."""
    return greedy(folder, ids, count, KVCalCache(scheme, reference_model(folder)))


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


_RUNNING: list[Any] = []


def stop() -> None:
    """End the engine in this process: vLLM's groups of processes are global, and a second engine needs its own."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    while _RUNNING:
        _RUNNING.pop().llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def engine(folder: Path, source: str | None, deterministic: bool = True, dtype: str = "float32", **more: Any) -> Any:
    """An engine in this process, which ends the one before. source: a bundle or preset; None: vLLM's own cache."""
    from vllm import LLM

    stop()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if source is not None:
        more["attention_config"] = {"backend": "CUSTOM"}
        more["additional_config"] = {"kvcal": source, "kvcal_deterministic": deterministic}
    options = {"max_model_len": MODEL_LENGTH, "max_num_seqs": 8, "kv_cache_memory_bytes": CACHE_BYTES} | more
    _RUNNING.append(LLM(str(folder), dtype=dtype, enforce_eager=True, **options))
    return _RUNNING[-1]


def answers(llm: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy tokens of prompts that come together."""
    return [list(out.outputs[0].token_ids) for out in outputs(llm, prompts, count)]


def outputs(llm: Any, prompts: Sequence[Sequence[int]], count: int) -> list[Any]:
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
    return list(llm.generate(asked, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True), use_tqdm=False))
