"""`kvcal export`: scales as compressed-tensors loads them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

from kvcal.calibrate.kv_scales import LARGEST, ScaleSettings, check_exportable, kv_scales
from kvcal.commands import export
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal_artifacts.errors import UsageError
from tests.support.architectures import HYBRID
from tests.support.models_fixture import kvcal, write_model, write_text

PACKAGE = importlib.util.find_spec("compressed_tensors") is not None


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("export")
    write_model(base / "model")
    write_text(base / "words.txt")
    return base


def exported(base: Path, output: Path, *options: object) -> Any:
    sizes = ["--windows", 2, "--length", 64, "--batch", 1]
    return kvcal(
        "export",
        "--model",
        base / "model",
        "--text",
        base / "words.txt",
        "--output",
        output,
        *sizes,
        *options,
        "--json",
    )


@torch.no_grad()
def test_scales_are_the_largest_states(base: Path) -> None:
    model = load_model(resolve(str(base / "model")), dtype="float32", device="cpu").model
    ids = torch.randint(0, 200, (3, 40), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    for to, per_head in (("fp8", False), ("int8", True)):
        scales = kv_scales(model, ids, ScaleSettings(to, per_head), batch=1)
        assert len(scales) == 2 * len(cache.layers)
        for index, layer in enumerate(cache.layers):
            for role, states in (("k", layer.keys), ("v", layer.values)):
                found = scales[f"model.layers.{index}.self_attn.{role}_scale"]
                largest = states.abs().amax((0, 2, 3)) if per_head else states.abs().max()[None]
                assert found.flatten() * LARGEST[to] == pytest.approx(largest, rel=1e-5)
                assert found.shape == ((len(largest), 1, 1) if per_head else (1,))
    assert ScaleSettings().scale(torch.zeros(2)).tolist() == [1.0]


@pytest.mark.skipif(not PACKAGE, reason="compressed-tensors is not installed")
def test_layers_of_sliding_windows_have_scales(tmp_path: Path) -> None:
    """Each layer's scale is of all tokens, not of those that a window still holds at the end."""
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = HYBRID["gemma3"]().eval()
    ids = torch.randint(0, 200, (1, 40), generator=torch.Generator().manual_seed(0))
    scales = kv_scales(model, ids, ScaleSettings("fp8"))
    assert len(scales) == 2 * model.config.num_hidden_layers
    first = model.model.layers[0].self_attn  # sliding, 16 tokens
    given: dict[str, torch.Tensor] = {}
    first.v_proj.register_forward_hook(lambda module, args, output: given.update(v=output))
    with torch.no_grad():
        model(ids)
    assert float(scales["model.layers.0.self_attn.v_scale"]) * 448 == pytest.approx(float(given["v"].abs().max()))
    apply_quantization_config(model, QuantizationConfig.model_validate(ScaleSettings("fp8").config))
    parameters = dict(model.named_parameters())
    assert {name for name in parameters if name.endswith(("k_scale", "v_scale"))} == scales.keys()
    assert all(parameters[name].shape == scale.shape for name, scale in scales.items())
    model.config.num_kv_shared_layers = 1
    with pytest.raises(UsageError, match="export: layer 4 has no scale: shares the keys and values"):
        check_exportable(model.config)


@pytest.mark.skipif(not PACKAGE, reason="compressed-tensors is not installed")
@pytest.mark.parametrize(("to", "options"), [("fp8", []), ("int8", ["--per-head"])])
def test_compressed_tensors_loads_what_was_written(base: Path, tmp_path: Path, to: str, options: list[str]) -> None:
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    done = exported(base, tmp_path / "out", "--to", to, *options)
    assert done.code == 0, done.err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    read = QuantizationConfig.model_validate(config["quantization_config"])
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype="float32")
    apply_quantization_config(model, read)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("_scale")}
    assert done.json["scales"] == len(scales) == 2 * config["num_hidden_layers"]
    parameters = dict(model.named_parameters())
    for name, scale in scales.items():
        assert parameters[name].shape == scale.shape
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert not [name for name in missing if name.endswith("_scale")]
    ids = torch.arange(30)[None]
    plain = AutoModelForCausalLM.from_pretrained(base / "model", dtype="float32")
    with torch.no_grad():
        one, other = (
            m(ids, past_key_values=DynamicCache(config=m.config)).logits.log_softmax(-1) for m in (model, plain)
        )
    assert 0 < float((one - other).abs().max()) < 1  # it quantises, and well


def test_weights_are_those_of_the_model(base: Path, tmp_path: Path) -> None:
    assert exported(base, tmp_path / "out", "--to", "fp8").code == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (base / "model", tmp_path / "out"))
    assert {name for name in after if name not in before} == {name for name in after if name.endswith("_scale")}
    for name, tensor in before.items():
        if name in after:
            assert torch.equal(tensor, after[name])


@pytest.mark.parametrize("windows", [1, 3])
def test_all_windows_are_calibrated_on(
    base: Path, tmp_path: Path, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is held out: the scales are the largest of all that is read."""
    measured: list[torch.Tensor] = []

    def recorded(model: Any, ids: torch.Tensor, *others: Any) -> dict[str, torch.Tensor]:
        measured.append(ids)
        return kv_scales(model, ids, *others)

    monkeypatch.setattr(export, "kv_scales", recorded)
    done = exported(base, tmp_path / "out", "--to", "fp8", "--windows", windows)
    assert (done.code, done.json["windows"]) == (0, windows), done.err
    assert [ids.shape for ids in measured] == [(windows, 64)]


def test_what_cannot_be_exported_is_one_line(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--to fp4: allowed are fp8, int8"):
        ScaleSettings("fp4")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").touch()
    done = exported(base, tmp_path / "there", "--to", "fp8")
    assert (done.code, "is there already" in done.err) == (2, True)
    assert exported(base, tmp_path / "out", "--to", "fp8").code == 0
    again = kvcal("export", "--model", tmp_path / "out", "--to", "fp8", "--output", tmp_path / "twice")
    assert (again.code, "it has scales of an 8-bit cache already" in again.err) == (2, True)
    assert "give the model that it was exported from" in again.err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["config_groups"] = {"group_0": {"targets": ["Linear"]}}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    quantised = kvcal("export", "--model", tmp_path / "out", "--to", "fp8", "--output", tmp_path / "twice")
    assert (quantised.code, "its weights are quantised" in quantised.err) == (2, True)
    assert not (tmp_path / "twice").exists()
