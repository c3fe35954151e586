"""Names, geometry, loading, and every way a model can fail to be there."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import errors as hub_errors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvcal.models import configuration, hub, layerwise, loading, names
from kvcal.models.catalogue import ALIASES, CATALOGUE, TINY, models_table
from kvcal.models.configuration import catalogue_config, load_config
from kvcal.models.geometry import Geometry
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.models.revision import weights_revision
from kvcal.models.structure import empty_model
from kvcal.models.tokenizers import load_tokenizer
from kvcal.models.weights import RandomWeights
from kvcal_artifacts.errors import KVCalError, ModelUnavailable, OutOfMemory, UsageError
from tests.support.architectures import TINY as MODELS

PUBLISHED = {  # billions of parameters, from the model cards
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.02,
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-7b": 7.62,
    "qwen2.5-14b": 14.8,
    "qwen2.5-32b": 32.8,
    "qwen2.5-72b": 72.7,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.8,
    "mistral-7b-v0.3": 7.25,
    "phi-3-mini-4k": 3.82,
    "smollm3-3b": 3.08,
    "granite-3.3-8b": 8.17,
    "olmo-2-1b": 1.48,
    "olmo-2-7b": 7.30,
    "r1-distill-qwen-1.5b": 1.78,
    "smollm2-135m": 0.134515008,  # exact, by the headers of their model.safetensors
    "smollm2-135m-instruct": 0.134515008,
    "gemma-3-270m": 0.268098176,
    "gemma-3-270m-it": 0.268098176,
}
ONLINE = [name for name, entry in CATALOGUE.items() if entry.hub_id]


def one_line(error: KVCalError) -> str:
    message = str(error)
    assert "\n" not in message
    return message


# names


def test_a_short_name_an_alias_a_hub_id_and_a_folder(tmp_path: Path) -> None:
    assert resolve("tiny").kind == "embedded"
    named = resolve("Llama-3.2-3B")
    assert (named.kind, named.name, named.hub_id) == ("hub", "llama-3.2-3b", "meta-llama/Llama-3.2-3B")
    assert resolve("deepseek-r1-distill-qwen-7b").name == "r1-distill-qwen-7b"
    by_id = resolve("Qwen/Qwen3-8B", "abc")
    assert by_id.entry is CATALOGUE["qwen3-8b"]
    assert by_id.revision == "abc"
    assert resolve("someone/else").entry is None
    MODELS["llama"]().config.save_pretrained(tmp_path)
    assert resolve(str(tmp_path)).folder == tmp_path


def test_file_name_stems(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve("llama-3.2-3b").stem == "llama-3.2-3b"
    assert resolve("someone/Else-7B").stem == "else-7b"
    assert resolve(f"{tmp_path}/").stem == tmp_path.name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama-3.2-4b", "did you mean llama-3.2-3b"),
        ("r1-distil-qwen-7b", "did you mean r1-distill-qwen-7b"),
        ("zzz", "`kvcal models` lists"),
        ("", "`kvcal models` lists"),
        ("./nowhere", "no such folder"),
        ("/no/such/place", "no such folder"),
        ("a b/c", "unknown model"),
        ("~nobody-here/x", "no such folder"),
        ("x" * 5000, "unknown model"),
    ],
)
def test_unknown_names(name: str, said: str) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        resolve(name)
    assert said in one_line(caught.value)
    assert caught.value.exit_code == 5


def test_a_folder_that_is_no_model_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"holds no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "x").write_text("")
    with pytest.raises(ModelUnavailable, match="is a file"):
        resolve(str(tmp_path / "x"))


def test_revision_only_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("tiny", str(tmp_path)):
        with pytest.raises(UsageError, match="--revision main"):
            resolve(name, "main")


@given(st.text(max_size=40))
def test_any_text_is_a_source_or_an_error_of_ours(name: str) -> None:
    with contextlib.suppress(KVCalError):
        resolve(name)


def test_names_need_no_torch() -> None:
    code = (
        "import sys; from kvcal.models import catalogue, names; catalogue.models_table(); names.resolve('tiny'); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=_environment())


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


# geometry


@pytest.mark.transformers
@pytest.mark.parametrize("name", ONLINE)
def test_config_builds_and_counts(name: str) -> None:
    config = catalogue_config(CATALOGUE[name])
    model = empty_model(config, torch.bfloat16)
    geometry = CATALOGUE[name].geometry
    assert sum(p.numel() for p in model.parameters()) == geometry.parameters
    assert Geometry.from_config(config.to_dict()) == geometry
    key = model.model.layers[0].self_attn.k_proj if hasattr(model.model.layers[0].self_attn, "k_proj") else None
    assert key is None or key.weight.shape == (geometry.kv_width, geometry.hidden)


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_published_sizes(name: str, billions: float) -> None:
    assert CATALOGUE[name].geometry.parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_kv_bytes_per_token() -> None:
    geometry = CATALOGUE["llama-3.2-3b"].geometry
    assert (geometry.kv_width, geometry.kv_bytes_per_token()) == (1024, 114688)
    assert geometry.kv_bytes_per_token(2) == 14336


def test_presets_are_the_papers() -> None:
    assert CATALOGUE["llama-3.2-3b"].presets["aqua-kv"] == {
        "windows": 256,
        "length": 8192,
        "holdout": 32,
        "seed": 0,
        "sink": 4,
        "recent": 128,
        "first_layer_bits": 4,
        "higgs_group": 1024,
    }
    short = CATALOGUE["llama-2-7b"].presets["aqua-kv"]
    assert (short["windows"], short["length"]) == (512, 4096)
    groups = {"qwen2.5-3b": 256, "smollm2-135m": 64, "gemma-3-270m": 256}  # C is 256, 192 and 256
    assert {name: CATALOGUE[name].presets["aqua-kv"]["higgs_group"] for name in groups} == groups


def test_table_and_aliases() -> None:
    rows = models_table()
    assert [row["name"] for row in rows] == list(CATALOGUE)
    assert all(row["heads"] % row["kv_heads"] == 0 and row["parameters"] > 0 for row in rows)
    assert not set(ALIASES) & set(CATALOGUE)
    assert next(row for row in rows if row["name"] == "phi-3-mini-4k")["sliding_window"] == 2047
    assert next(row for row in rows if row["name"] == "mistral-7b-v0.3")["sliding_window"] is None
    gemma = next(row for row in rows if row["name"] == "gemma-3-270m")
    assert (gemma["sliding_window"], CATALOGUE["gemma-3-270m"].geometry.sliding_layers) == (512, 15)
    json.dumps(rows)


def test_geometry_of_a_folder(tmp_path: Path) -> None:
    MODELS["qwen3"]().config.save_pretrained(tmp_path)
    geometry = configuration.geometry(resolve(str(tmp_path)))
    assert (geometry.layers, geometry.kv_width, geometry.sliding_window) == (3, 32, None)
    assert configuration.presets(resolve(str(tmp_path)))["aqua-kv"]["length"] == geometry.context


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("head_dim", -4, "-4, must be a whole number from 1, or null"),
        ("head_dim", 0, "0, must be a whole number from 1, or null"),
        ("num_key_value_heads", 0, "0, must be a whole number from 1, or null"),
        ("num_attention_heads", -1, "-1, must be a whole number from 1"),
        ("num_hidden_layers", 0, "0, must be a whole number from 1"),
    ],
)
def test_a_folder_with_an_impossible_geometry(tmp_path: Path, field: str, value: int, said: str) -> None:
    MODELS["llama"]().config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ModelUnavailable) as raised:
        configuration.geometry(resolve(str(tmp_path)))
    assert f"{field} of its config.json is {said}; correct" in str(raised.value)


# the embedded model


@pytest.fixture(scope="module")
def tiny_loaded() -> Any:
    return load_model(resolve("tiny"), dtype="float32", device="cpu")


@pytest.mark.transformers
def test_tiny_is_what_the_training_script_packed(tiny_loaded: Any) -> None:
    packed = load_file(TINY / "packed.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    dense = packed[f"{name}.q"].float() * packed[f"{name}.s"].float()[:, None]
    assert torch.equal(tiny_loaded.model.state_dict()[name], dense)
    assert tiny_loaded.model.lm_head.weight is tiny_loaded.model.model.embed_tokens.weight
    assert tiny_loaded.revision.startswith("sha256:")
    assert not tiny_loaded.model.training
    ids = tiny_loaded.tokenizer("Once upon a time")["input_ids"]
    assert ids[0] == tiny_loaded.tokenizer.bos_token_id
    assert torch.isfinite(tiny_loaded.model(torch.tensor([ids])).logits).all()


@pytest.mark.transformers
def test_tiny_fits_its_contract() -> None:
    geometry = CATALOGUE["tiny"].geometry
    assert geometry.kv_width * 3 <= geometry.hidden
    assert geometry.kv_heads < geometry.heads
    assert geometry.context >= 2048


@pytest.mark.transformers
def test_bfloat16_keeps_rope_in_float32() -> None:
    loaded = load_model(resolve("tiny"), dtype="bfloat16", device="cpu")
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_damaged_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "TINY", tmp_path)
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    packed = tmp_path / "packed.safetensors"
    packed.write_bytes(packed.read_bytes()[:1000])
    with pytest.raises(ModelUnavailable, match="install kvcal again") as caught:
        load_model(resolve("tiny"), dtype="float32", device="cpu")
    one_line(caught.value)
    packed.unlink()
    with pytest.raises(ModelUnavailable, match="install kvcal again"):
        load_model(resolve("tiny"), dtype="float32", device="cpu")


# folders


def folder_with(model: Any, path: Path, **options: Any) -> Any:
    model.save_pretrained(path, **options)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((TINY / name).read_bytes())
    return resolve(str(path))


@pytest.mark.transformers
def test_folder_loads_silently_and_changes_with_its_weights(tmp_path: Path, capfd: Any) -> None:
    source = folder_with(MODELS["llama"](), tmp_path)
    state = torch.get_rng_state()
    capfd.readouterr()  # the bar of save_pretrained
    loaded = load_model(source, dtype="float32", device="cpu")
    assert torch.equal(state, torch.get_rng_state())
    assert capfd.readouterr() == ("", "")
    assert torch.equal(loaded.model.lm_head.weight, MODELS["llama"]().lm_head.weight)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_model(source, dtype="float32", device="cpu").revision != loaded.revision


def test_sampled_revision_of_large_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    source = folder_with(MODELS["llama"](), tmp_path, max_shard_size="60KB")
    whole = weights_revision(source, random_weights=False, seed=0)
    monkeypatch.setattr("kvcal.models.file_hashes.FULL_HASH_BYTES", 1000)
    sampled = weights_revision(source, random_weights=False, seed=0)
    assert whole.startswith("sha256:")
    assert sampled.startswith("sampled-sha256:")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
    tensors = {name: tensor + 1 for name, tensor in load_file(shard).items()}
    save_file(tensors, shard, metadata={"format": "pt"})
    assert weights_revision(source, random_weights=False, seed=0) != sampled


def _no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def _pickled(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def _truncated(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def _incomplete(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _deeper(path: Path) -> None:
    _set(path, num_hidden_layers=2)


def _wider(path: Path) -> None:
    _set(path, intermediate_size=96)


def _broken_config(path: Path) -> None:
    (path / "config.json").write_text("{")


def _unknown_type(path: Path) -> None:
    _set(path, model_type="brand-new", auto_map={"AutoConfig": "evil.Config"})


def _no_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink()


def _template_alone(path: Path) -> None:
    _no_tokenizer(path)
    (path / "chat_template.jinja").write_text("{{ messages }}")


def _broken_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text("{")


def _set(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_no_weights, "no weights; expected"),
        (_pickled, "pickled: convert it"),
        (_truncated, "cannot be read"),
        (_incomplete, "its weights lack model.layers.1.mlp.up_proj.weight"),
        (_deeper, "its weights hold model.layers.2"),
        (_wider, "gate_proj.weight has shape (128, 64), its config.json asks for (96, 64)"),
        (_broken_config, "its config.json cannot be used"),
        (_unknown_type, "its config.json cannot be used"),
        (_no_tokenizer, "no tokenizer in"),
        (
            _template_alone,
            "which holds chat_template.jinja, config.json, generation_config.json, model.safetensors; "
            "needed is tokenizer.json or tokenizer.model: copy it",
        ),
        (_broken_tokenizer, "its tokenizer cannot be read"),
    ],
)
def test_spoilt_folders(spoil: Any, said: str, tmp_path: Path, capfd: Any) -> None:
    source = folder_with(MODELS["llama"](), tmp_path)
    spoil(tmp_path)
    capfd.readouterr()
    with pytest.raises(ModelUnavailable) as caught:
        load_model(source, dtype="float32", device="cpu")
    assert said in one_line(caught.value)
    assert capfd.readouterr() == ("", "")


def test_missing_shard(tmp_path: Path) -> None:
    source = folder_with(MODELS["llama"](), tmp_path, max_shard_size="60KB")
    sorted(tmp_path.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(ModelUnavailable, match=r"model-00002-.* is missing"):
        load_model(source, dtype="float32", device="cpu")


def test_dtype_and_device() -> None:
    with pytest.raises(UsageError, match="dtype int3: allowed are auto, float32, bfloat16, float16"):
        load_model(resolve("tiny"), dtype="int3", device="cpu")
    with pytest.raises(UsageError, match="device warp9"):
        load_model(resolve("tiny"), dtype="float32", device="warp9")


def test_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried …")

    monkeypatch.setattr(loading, "_embedded", fail)
    with pytest.raises(OutOfMemory, match=r"tiny: its weights need about 0\.0 GB") as caught:
        load_model(resolve("tiny"), dtype="float32", device="cpu")
    assert caught.value.exit_code == 6


# random weights


def random_parameter(seed: int, name: str = "a.weight", shape: tuple[int, ...] = (300, 400)) -> torch.Tensor:
    meta = torch.empty(shape, device="meta")
    return RandomWeights(seed, 0.02).get(name, meta, torch.device("cpu"))


def test_random_weights_are_uniform_and_independent() -> None:
    weight = random_parameter(0).flatten().double()
    assert weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert weight.mean().abs().item() < 2e-4
    assert weight.abs().max().item() <= 0.02 * 3**0.5 * 1.0001
    others = [random_parameter(1), random_parameter(0, "b.weight"), random_parameter(0).roll(1)]
    for other in others:
        assert torch.corrcoef(torch.stack([weight, other.flatten().double()]))[0, 1].abs() < 0.02


def test_random_weights_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    # 1 << 16 values a chunk on the CPU: the second and third chunk continue the sequence of the first
    whole = random_parameter(3, shape=(3, 1 << 16)).flatten()
    assert torch.equal(whole[: 1 << 16], random_parameter(3, shape=(1, 1 << 16)).flatten())
    assert not torch.equal(whole[: 1 << 16], whole[1 << 16 : 2 << 16])


def test_random_weights_pinned() -> None:
    """The values themselves: a bundle from random weights must come out the same in a year."""
    expected = [-0.020900, -0.027606, -0.002179]
    assert random_parameter(0).flatten()[:3].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.transformers
def test_random_weights_leave_the_generators_alone() -> None:
    state = torch.get_rng_state()
    first = load_model(resolve("tiny"), dtype="float32", device="cpu", random_weights=True, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(99)
    second = load_model(resolve("tiny"), dtype="float32", device="cpu", random_weights=True, seed=1)
    torch.set_rng_state(state)
    assert first.revision == "random:1"
    assert first.tokenizer is not None
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_random_weights_of_a_hub_model_need_no_network() -> None:
    source = resolve("qwen2.5-0.5b")
    config = configuration.geometry_config(source)
    assert config.num_hidden_layers == 24
    with pytest.raises(ModelUnavailable, match="HF_HUB_OFFLINE is set"):
        configuration.geometry_config(resolve("someone/else"))


@pytest.mark.gpu
def test_random_weights_are_the_same_on_a_gpu() -> None:
    meta = torch.empty((5000, 30001), dtype=torch.bfloat16, device="meta")
    here = RandomWeights(7, 0.02).get("x.weight", meta, torch.device("cpu"))
    there = RandomWeights(7, 0.02).get("x.weight", meta, torch.device("cuda"))
    assert torch.equal(here, there.cpu())


# the hub, without a network


def test_offline_is_one_line(capfd: Any) -> None:
    hub.reachable.cache_clear()
    with pytest.raises(ModelUnavailable) as caught:
        load_config(resolve("llama-3.2-3b", "main"))
    said = one_line(caught.value)
    assert "meta-llama/Llama-3.2-3B at revision main is not in the cache" in said
    assert "HF_HUB_OFFLINE is set" in said
    assert "--random-weights" in said
    assert capfd.readouterr() == ("", "")


def test_a_hub_that_never_answers_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    answer = threading.Event()
    monkeypatch.setattr(huggingface_hub, "get_session", answer.wait)
    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.2)
    hub.reachable.cache_clear()
    try:
        assert not hub.reachable()  # who waits for the answer meets the test's own time limit: it comes only below
        assert "cannot be reached" in hub.why_unreachable()
    finally:
        answer.set()
        hub.reachable.cache_clear()


def made(kind: type[Exception]) -> Exception:
    """A hub error without the HTTP response that its constructor asks for."""
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (hub_errors.GatedRepoError, "is gated: accept its terms at https://huggingface.co/org/name"),
        (hub_errors.RepositoryNotFoundError, "is not on the hub, or it is private"),
        (hub_errors.RevisionNotFoundError, "has no revision 'v9'"),
        (hub_errors.RemoteEntryNotFoundError, "has no file config.json"),
        (hub_errors.HFValidationError, "is not a valid hub id"),
        (hub_errors.HfHubHTTPError, "the hub did not deliver config.json"),
        (ConnectionError, "the hub did not deliver config.json"),
    ],
)
def test_hub_errors(kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise made(kind)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(ModelUnavailable) as caught:
        load_config(resolve("org/name", "v9"))
    assert said in one_line(caught.value)


def cached_repo(cache: Path, sha: str = "0123456789abcdef0123456789abcdef01234567") -> Path:
    """A model as the hub's cache holds it."""
    repo = cache / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(sha)
    folder = repo / "snapshots" / sha
    folder_with(MODELS["llama"](), folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants, file_download

    for module in (constants, file_download.constants):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path))
    hub.fetch_config.cache_clear()
    return tmp_path


@pytest.mark.transformers
def test_a_cached_model_loads_offline_and_knows_its_commit(cache: Path, capfd: Any) -> None:
    cached_repo(cache)
    capfd.readouterr()
    loaded = load_model(resolve("org/name"), dtype="float32", device="cpu")
    assert loaded.revision == loaded.model.config._commit_hash == "0123456789abcdef0123456789abcdef01234567"
    assert loaded.tokenizer is not None
    parts = layerwise.open_layerwise(resolve("org/name"), dtype="float32", device="cpu")
    weight = parts.load_layer(2).mlp.up_proj.weight
    assert torch.equal(weight, loaded.model.model.layers[2].mlp.up_proj.weight)
    assert capfd.readouterr() == ("", "")


def test_a_cached_config_without_weights(cache: Path) -> None:
    (cached_repo(cache) / "model.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match="its weights are not, and HF_HUB_OFFLINE is set"):
        load_model(resolve("org/name"), dtype="float32", device="cpu")


def test_a_cached_model_without_tokenizer(cache: Path) -> None:
    folder = cached_repo(cache)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelUnavailable, match=r"no tokenizer in .*copy it from where the model is from"):
        load_tokenizer(resolve("org/name"))


def test_a_folder_that_a_short_name_hides_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "reachable", lambda: False)
    with pytest.raises(ModelUnavailable, match="connect, pass a local folder, or use --random-weights"):
        load_config(resolve("smollm2-135m"))
    (tmp_path / "smollm2-135m").mkdir()
    with pytest.raises(ModelUnavailable, match=r"connect, give \./smollm2-135m for the folder of that name, or use"):
        load_config(resolve("smollm2-135m"))


def test_a_revision_that_is_not_cached(cache: Path) -> None:
    cached_repo(cache)
    with pytest.raises(ModelUnavailable, match="org/name at revision v9 is not in the cache"):
        load_config(resolve("org/name", "v9"))
