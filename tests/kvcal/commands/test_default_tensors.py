"""Models, fits, caches, evaluations, kernels' references and the plug-in give the same numbers whatever torch makes
tensors on, and of, by default. `load_model` loads under the default, too; Transformers' own from_pretrained refuses meta.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcal
from kvcal.commands.evaluation import prompt_ids
from kvcal.methods.aqua_kv import AquaKV
from kvcal.models import load_model, resolve
from kvcal_artifacts import load_cache
from kvcal_artifacts.bundle import load_bundle
from kvcal_artifacts.cache import KVCalCache
from kvcal_vllm.plan import plan
from kvcal_vllm.presets import PRESETS as SERVED
from kvcal_vllm.settings import Settings
from tests.support.cases.default_cases import DEFAULTS, making, require_same
from tests.support.cases.served_cases import Batch, Case, References
from tests.support.models_fixture import SUFFIX, write_model, write_text

CACHES: dict[str, dict[str, Any]] = {  # presets, and what a cache does with them
    "higgs-2": {},
    "turboquant-3": {"max_length": 176},
    "kivi-2": {"keep": 0.5},
    "innerq-base": {},
    "mixkvq": {},
    "squat-2": {},
    "uniform-4": {"keep": 0.5, "heavy": 0.5},
    "auto-3": {"remember": True},
}
CALLS = (70, 1, 41)  # tokens of each forward pass
FIT = {"windows": 2, "holdout": 1, "length": 100}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("defaults")
    write_model(folder / "model", 2)
    write_text(folder / "words.txt", 2_000)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "model").eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "model")


def ids(count: int = sum(CALLS)) -> Tensor:
    return torch.arange(count, device="cpu")[None] * 7 % 256


@torch.no_grad()
def logits(model: Any, cache: KVCalCache) -> Tensor:
    with cache:
        return torch.cat([model(part, past_key_values=cache).logits for part in ids().split(CALLS, 1)], 1)


def walk_caches(model: Any) -> dict[str, Tensor]:
    return {name: logits(model, kvcal.cache(model, name, **options)) for name, options in CACHES.items()}


@pytest.fixture(scope="module")
def logits_of_caches(model: Any) -> dict[str, Tensor]:
    return walk_caches(model)


@DEFAULTS
def test_caches_give_the_same_logits(default: str, model: Any, logits_of_caches: dict[str, Tensor]) -> None:
    with making(default):
        actual = walk_caches(model)
    require_same(actual, logits_of_caches, f"by default {default}")


def walk(folder: Path, path: Path, model: Any, tokenizer: Any) -> dict[str, Any]:
    """A fit, its bundle read again, text by generate(), and an evaluation of both it and a preset."""
    text, method = folder / "words.txt", AquaKV(recent=16)
    kvcal.fit(model, tokenizer, text, method=method, output=path, **FIT)  # type: ignore[arg-type]
    with load_cache(load_bundle(path), model) as cache:
        tokens = model.generate(
            ids(), past_key_values=cache, attention_mask=torch.ones_like(ids()), max_new_tokens=8, do_sample=False
        )
    schemes = {"fitted": path, "kivi": "kivi-2"}
    rows = kvcal.evaluate(model, tokenizer, text, schemes, windows=1, length=100)
    shown = [{name: value for name, value in asdict(row).items() if "seconds" not in name} for row in rows]
    return {"bundle": path.read_bytes(), "tokens": tokens.tolist(), "rows": shown}


@pytest.fixture(scope="module")
def walked(folder: Path, model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return walk(folder, tmp_path_factory.mktemp("usual") / f"a{SUFFIX}", model, tokenizer)


@DEFAULTS
def test_a_fit_gives_the_same_bundle_text_and_rows(
    default: str, folder: Path, model: Any, tokenizer: Any, walked: dict[str, Any], tmp_path: Path
) -> None:
    with making(default):
        actual = walk(folder, tmp_path / f"a{SUFFIX}", model, tokenizer)
    assert {name: actual[name] == walked[name] for name in walked} == dict.fromkeys(walked, True)


def serve(config: Any) -> dict[str, Tensor]:
    """Constants of the plug-in's plans, and pages that its kernels' references wrote, beside the backend of a CPU."""
    tensors: dict[str, Tensor] = {}
    for name in SERVED:
        layer = plan(Settings(name), config).layers[0]
        for role, codec in (("key", layer.key.codec), ("value", layer.value.codec)):
            tensors |= {f"{name} {role} {part}": tensor for part, tensor in codec.tensors().items()}
    for case in (Case("higgs-2", ((33, 5), (1, 16))), Case("transform", ((3, 40), (1, 1)))):
        batch = Batch(case, 3)
        assert [why for counts in case.steps if (why := batch.step(counts))] == []
        tensors[f"pages of {case.name}"] = batch.pages
    return tensors


@DEFAULTS
def test_the_plug_in_has_the_same_constants_and_pages(
    default: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    References().replace_kernels(monkeypatch)
    expected = serve(model.config)
    with making(default):
        actual = serve(model.config)
    require_same(actual, expected, f"by default {default}")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> dict[str, Tensor]:
    return load(folder)


def load(folder: Path) -> dict[str, Tensor]:
    """Weights and buffers of the embedded model, of a folder's, and of random ones, and ids of a prompt."""
    tensors: dict[str, Tensor] = {}
    for name, random in (("tiny", False), (str(folder / "model"), False), (str(folder / "model"), True)):
        loaded = load_model(resolve(name), dtype="float32", device="cpu", random_weights=random)
        parts = [*loaded.model.named_parameters(), *loaded.model.named_buffers()]
        tensors |= {f"{name} {random} {part}": tensor for part, tensor in parts}
        tensors |= {f"{name} {random} ids": prompt_ids(loaded.tokenizer, "What is", False, name)}
    return tensors


@DEFAULTS
def test_loaded_models_are_the_same(default: str, folder: Path, loaded: dict[str, Tensor]) -> None:
    with making(default):
        require_same(load(folder), loaded, f"by default {default}")
