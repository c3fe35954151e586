"""A model loaded in parts is the model loaded whole, bit for bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PaliGemmaConfig

from kvcal.models.layerwise import LayerwiseWeights, open_layerwise
from kvcal.models.loading import load_model
from kvcal.models.names import ModelSource, resolve
from kvcal.models.revision import weights_revision
from kvcal_artifacts.errors import ModelUnavailable, UsageError
from tests.support.architectures import MIXTURES, TINY, VARIANTS
from tests.support.models_fixture import write_tokenizer

pytestmark = pytest.mark.transformers

IDS = torch.tensor([[1, 5, 9, 200, 31, 7, 3, 64]])
CASES = {**TINY, "phi3-partial": VARIANTS["phi3-partial"], "llama-yarn": VARIANTS["llama-yarn"]}


def save(model: Any, folder: Path, shard: str = "60KB") -> str:
    model.save_pretrained(folder, max_shard_size=shard)
    return str(folder)


def load_all(parts: LayerwiseWeights) -> Any:
    parts.load_outer()
    for index in range(len(parts)):
        parts.load_layer(index)
    return parts.model


def assert_equal(left: Any, right: Any) -> None:
    first, second = left.state_dict(), right.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        assert tensor.dtype == second[name].dtype, name
    with torch.no_grad():
        assert torch.equal(left(IDS).logits, right(IDS).logits)


@pytest.mark.parametrize("name", CASES)
def test_parts_equal_the_ordinary_load(name: str, tmp_path: Path) -> None:
    source = resolve(save(CASES[name](), tmp_path))
    assert (tmp_path / "model.safetensors.index.json").exists()
    ordinary = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_equal(load_all(open_layerwise(source, dtype="float32", device="cpu")), ordinary)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_and_in_one_file(dtype: str, tmp_path: Path) -> None:
    source = resolve(save(TINY["qwen2"](tie_word_embeddings=True), tmp_path, "1GB"))
    parts = open_layerwise(source, dtype=dtype, device="cpu")
    assert_equal(load_all(parts), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype)))
    outer = parts.load_outer()
    assert outer.lm_head.weight is outer.embed_tokens.weight


def test_only_what_is_loaded_takes_memory(tmp_path: Path) -> None:
    parts = open_layerwise(resolve(save(TINY["llama"](), tmp_path)), dtype="float32", device="cpu")
    assert all(p.is_meta for p in parts.model.parameters())
    layer = parts.load_layer(1)
    assert layer is parts.model.model.layers[1]
    assert not any(p.is_meta for p in layer.parameters())
    assert all(p.is_meta for p in parts.model.model.layers[0].parameters())
    parts.free_layer(1)
    outer = parts.load_outer()
    assert not outer.rotary_emb.inv_freq.is_meta
    parts.free_outer()
    assert all(t.is_meta for t in [*parts.model.parameters(), *parts.model.buffers()])
    reloaded = {name: p.clone() for name, p in parts.load_layer(1).named_parameters()}
    assert torch.equal(reloaded["mlp.up_proj.weight"], TINY["llama"]().model.layers[1].mlp.up_proj.weight)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3", "granite"])
def test_random_weights_are_the_same_in_parts_and_whole(name: str, tmp_path: Path) -> None:
    source = resolve(save(TINY[name](), tmp_path))
    whole = load_model(source, dtype="bfloat16", device="cpu", random_weights=True, seed=5)
    parts = open_layerwise(source, dtype="bfloat16", device="cpu", random_weights=True, seed=5)
    assert (whole.revision, whole.random_weights) == (parts.revision, parts.random_weights) == ("random:5", True)
    assert_equal(load_all(parts), whole.model)


def test_revision_is_that_of_the_whole(tmp_path: Path) -> None:
    source = resolve(save(TINY["llama"](), tmp_path))
    whole = weights_revision(source, random_weights=False, seed=0)
    assert open_layerwise(source, dtype="float32", device="cpu").revision == whole


def test_no_such_layer(tmp_path: Path) -> None:
    parts = open_layerwise(resolve(save(TINY["llama"](), tmp_path)), dtype="float32", device="cpu")
    with pytest.raises(UsageError, match=r"layer 3: .* has layers 0 to 2"):
        parts.load_layer(3)


def test_a_tensor_that_is_missing_or_of_another_shape(tmp_path: Path) -> None:
    source = resolve(save(TINY["llama"](), tmp_path, "1GB"))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(3, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    parts = open_layerwise(source, dtype="float32", device="cpu")
    parts.load_layer(0)
    with pytest.raises(ModelUnavailable, match=r"has shape \(3, 4\), its config.json asks for \(128, 64\)"):
        parts.load_layer(2)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    said = refusals(source)
    assert len(said) == 1
    assert re.search(r"its weights lack model\.layers\.1\.mlp\.up_proj\.weight \(1 in all\), which its", said.pop())


def refusals(source: ModelSource) -> set[str]:
    """What the whole load and opening layer by layer say."""
    said = set()
    for load in (load_model, open_layerwise):
        with pytest.raises(ModelUnavailable) as caught:
            load(source, dtype="float32", device="cpu")
        said.add(str(caught.value))
    return said


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_layers_beyond_the_config_are_refused_alike(name: str, tmp_path: Path) -> None:
    source = resolve(save({**TINY, **MIXTURES}[name](), tmp_path, "1GB"))
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 1}))
    write_tokenizer(tmp_path)
    said = refusals(source)
    assert len(said) == 1
    assert re.search(
        r"its weights hold model\.layers\.1\..* in all\), which its config\.json does not ask for", said.pop()
    )


def test_missing_shard(tmp_path: Path) -> None:
    source = resolve(save(TINY["llama"](), tmp_path))
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(ModelUnavailable, match="is missing"):
        open_layerwise(source, dtype="float32", device="cpu")


def test_buffers_of_a_text_tower_are_made_by_its_own_class(tmp_path: Path) -> None:
    """PaliGemma's class does not know how Gemma scales its embedding."""
    text = {"model_type": "gemma", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    eyes = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = PaliGemmaConfig(
        text_config=text | counts,
        vision_config=eyes | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        projection_dim=64,
    )
    model = AutoModelForImageTextToText.from_config(config)
    outer = open_layerwise(resolve(save(model, tmp_path)), dtype="float32", device="cpu").load_outer()
    assert float(outer.embed_tokens.get_buffer("embed_scale")) == 8.0
