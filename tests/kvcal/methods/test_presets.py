"""Baselines without data: KIVI against a loop written from the paper, bits and windows of every preset, `kvcal preset`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvcal.methods.data_free import PRESETS, Preset, preset
from kvcal.methods.registry import codec_maker
from kvcal_artifacts import load_bundle
from kvcal_artifacts.codecs import Higgs, Role, Shape, Uniform
from kvcal_artifacts.errors import UsageError
from tests.support.architectures import build
from tests.support.models_fixture import SUFFIX, kvcal, write_model
from tests.support.schemes import numbers, tiny

SHAPE = Shape(2, 64, 32)


def kivi_group(values: Any, bits: int) -> tuple[list[int], np.float16, np.float16]:
    """KIVI section 3.1: Q(X) = round((X - z) / s), z = min X, s = (max X - min X) / (2^B - 1); s and z in float16."""
    z = np.float16(min(values))
    s = np.float16((max(values) - min(values)) / np.float32(2**bits - 1))
    codes = []
    for value in values:
        scaled = (value - np.float32(z)) / np.float32(s)
        codes.append(min(max(round(float(scaled)), 0), 2**bits - 1))  # Python rounds halves to even
    return codes, s, z


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_keys_per_channel_and_values_per_token(bits: int) -> None:
    x = numbers(1, SHAPE.heads, 3 * SHAPE.block, SHAPE.dim, seed=bits) * 3
    x[..., 5] += 20  # a channel apart
    for role in ("key", "value"):
        codec = codec_maker(f"kivi-{bits}")(SHAPE, role)  # type: ignore[arg-type]
        packed = codec.encode(x)
        assert isinstance(codec, Uniform)
        found, scale, low = codec.groups(packed)
        assert low is not None
        # (H, N, b, D) for keys, (H, N, D, b) for values.
        codes = found[0] if role == "key" else found[0].transpose(-1, -2)
        for head in range(SHAPE.heads):
            for block in range(3):
                part = x[0, head, 32 * block : 32 * block + 32].numpy()  # 32 tokens
                for line in range(SHAPE.dim if role == "key" else 2 * SHAPE.block):
                    if role == "key":  # all tokens of a channel
                        group, at = part[:, line], (line, 0)
                        own = codes[head, block][:, line]
                    else:  # 32 channels of a token
                        token, half = divmod(line, 2)
                        group, at = part[token, 32 * half : 32 * half + 32], (token, half)
                        own = codes[head, block][32 * half : 32 * half + 32, token]
                    wanted, s, z = kivi_group(list(group), bits)
                    assert own.tolist() == wanted
                    assert scale[0, head, block][at] == float(s)
                    assert low[0, head, block][at] == float(z)


def test_turboquant_is_a_scalar_grid_with_a_norm_a_head() -> None:
    """b + 16/128 bits; a head's error does not depend on the other head's size. With points of bytes, too."""
    for bits, kind in itertools.product((2, 3, 4), ("", "-bytes")):
        codec = codec_maker(f"turboquant-{bits}{kind}")(Shape(8, 128, 32), "key")
        assert isinstance(codec, Higgs) and (codec.d, codec.n, codec.rotation_width) == (1, 2**bits, 128)
        assert codec.bits_per_value() == bits + 16 / 128
        x = numbers(1, 8, 64, 128)
        x[:, 1] *= 1000
        error = (codec.decode(codec.encode(x)) - x).square().mean((0, 2, 3)) / x.square().mean((0, 2, 3))
        bar = {2: 0.1175, 3: 0.03455, 4: 0.0095}[bits]
        assert float(error.mean()) < 1.01 * bar and float(error.max()) < 1.1 * bar


# At Llama-3.1-8B's geometry: bits per value, sink, recent
PAPERS = {
    "kivi-2": (3.0, 0, 32),
    "kivi-4": (5.0, 0, 32),
    "kivi-sink-2": (3.0, 32, 96),
    "turboquant-2": (2.125, 0, 128),
    "turboquant-3": (3.125, 0, 128),
    "turboquant-4": (4.125, 0, 128),
    "turboquant-4-3": (3.625, 0, 128),
    "turboquant-4-3-bytes": (3.625, 0, 128),
    "turboquant-k4v3": (3.625, 0, 128),
    "innerq-base": (3.5, 32, 96),
    "innerq-hybrid": (3.25, 32, 96),
    "innerq-small": (3.0, 32, 96),
    "fp8": (8.0, 0, 0),
    "bf16": (16.0, 4, 128),
}


@pytest.mark.parametrize("name", PAPERS)
def test_bits_and_windows_of_the_papers(name: str) -> None:
    method, shape = preset(name), Shape(8, 128, 32)
    codecs = codec_maker(method.key)(shape, "key"), codec_maker(method.value)(shape, "value")
    bits = sum(codec.bits_per_value() for codec in codecs) / 2
    assert (bits, method.sink, method.recent, method.block, method.rope) == (*PAPERS[name], 32, "post_rope")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_scheme_for_a_small_model(name: str) -> None:
    scheme = preset(name).scheme(tiny("llama"))
    assert len(scheme.layers) == 3 and 1 < scheme.bits_per_value() <= 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("presets") / "model")


def test_preset_writes_a_bundle(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / f"x{SUFFIX}"
    done = kvcal("preset", "kivi-2", "--model", folder, "--output", output, "--json")
    assert done.code == 0, done.err
    assert kvcal("preset", "kivi-2", "--model", folder, "--output", output, "--json").json == done.json
    assert kvcal("verify", output, "--model", folder).code == 0
    other = write_model(tmp_path / "other", seed=2)
    assert kvcal("verify", output, "--model", other).code == 4
    bundle = load_bundle(output)
    assert bundle.provenance["method"] == "kivi-2" and bundle.provenance["settings"]["key"] == "kivi-2"
    assert str(folder.parent) not in json.dumps(bundle.provenance)
    assert len(bundle.fingerprint.probe) == 16


def test_a_model_with_a_nan_gets_no_preset(tmp_path: Path) -> None:
    """In a layer that the fingerprint does not look at: the guard, which runs them all, finds it before anything is
    there.
    """
    broken, output = write_model(tmp_path / "broken", 4), tmp_path / f"x{SUFFIX}"
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.2.self_attn.k_proj.weight"][0, 0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    output.write_bytes(b"old")
    done = kvcal("preset", "turboquant-2", "--model", broken, "-o", output)
    assert done.code == 1 and "layer 2, key head 0: NaN or infinity in window 0" in done.complaint
    assert output.read_bytes() == b"old"
    assert kvcal("preset", "turboquant-2", "--model", broken, "-o", output, "--no-check").code == 0


def test_preset_with_other_windows(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / f"x{SUFFIX}"
    given = ["--sink", 3, "--recent", 9, "--block", 16, "--frame", "pre_rope"]
    done = kvcal("preset", "innerq-hybrid", "--model", folder, "--output", output, *given, "--json")
    assert (done.json["windows"], done.json["frame"]) == ({"sink": 3, "recent": 9, "block": 16}, "pre_rope")
    assert load_bundle(output).scheme.windows.block == 16


def kinds(path: Path) -> list[tuple[str, str]]:
    """What each layer's key and value codecs say they are, without their sizes."""
    return [(pair.key.describe(), pair.value.describe()) for pair in load_bundle(path).scheme.layers if pair]


def of(name: str, role: Role, block: int = 32) -> str:
    """What a codec says it is on the model of `folder`, in blocks of so many tokens."""
    return codec_maker(name)(Shape(2, 16, block), role).describe()


def test_codecs_and_exceptions_in_the_place_of_a_presets_own(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / f"x{SUFFIX}"
    given = ["--values", "uniform-4", "--per-layer", "0=higgs-4", "--per-layer", "-1:keys=exact-16"]
    done = kvcal("preset", "kivi-2", *given, "--model", folder, "--output", output, "--json")
    assert done.code == 0, done.err
    assert kinds(output) == [
        (of("higgs-4", "key"), of("higgs-4", "value")),
        *[(of("kivi-2", "key"), of("uniform-4", "value"))] * 2,
        (of("exact-16", "key"), of("uniform-4", "value")),
    ]
    bundle = load_bundle(output)
    assert vars(bundle.scheme.windows) == {"sink": 0, "recent": 32, "block": 32}, "the preset's own"
    assert bundle.provenance["settings"]["per_layer"] == ["0=higgs-4", "-1:keys=exact-16"]
    assert done.json["bits_per_value"] == pytest.approx(bundle.scheme.bits_per_value(), abs=1e-4)


def test_mixkvq_beside_other_values(folder: Path, tmp_path: Path) -> None:
    """The preset of that name is no pair of codecs by itself: its keys and windows are the same ones."""
    plain, output = tmp_path / f"plain{SUFFIX}", tmp_path / f"x{SUFFIX}"
    assert kvcal("preset", "mixkvq", "--model", folder, "--output", plain).code == 0
    done = kvcal("preset", "mixkvq", "--values", "uniform-4", "--model", folder, "--output", output)
    assert done.code == 0, done.err
    assert load_bundle(output).scheme.windows == load_bundle(plain).scheme.windows
    assert [key for key, _ in kinds(output)] == [key for key, _ in kinds(plain)]
    assert {value for _, value in kinds(output)} == {of("uniform-4", "value", 128)}


RECIPE = """
codec = "higgs-3"
values = "uniform-2"
frame = "pre_rope"
[layers]
"1-2" = {keys = "uniform-4"}
[windows]
recent = 24
"""


def test_a_recipe_is_its_options_without_a_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(RECIPE)
    by_file, by_options = tmp_path / f"file{SUFFIX}", tmp_path / f"options{SUFFIX}"
    done = kvcal("preset", "--recipe", tmp_path / "own.toml", "--model", folder, "--output", by_file)
    assert done.code == 0, done.err
    options = ["--keys", "higgs-3", "--values", "uniform-2", "--frame", "pre_rope", "--per-layer", "1-2:keys=uniform-4",
               "--recent", 24]  # fmt: skip
    assert kvcal("preset", *options, "--model", folder, "--output", by_options).code == 0
    assert by_file.read_bytes() == by_options.read_bytes()
    bundle = load_bundle(by_file)
    assert bundle.provenance["method"] == "composed" and bundle.scheme.frame == "pre_rope"
    assert [key for key, _ in kinds(by_file)] == [
        of(name, "key") for name in ("higgs-3", "uniform-4", "uniform-4", "higgs-3")
    ]


def test_an_exception_for_a_layer_that_is_not_compressed() -> None:
    types = ["full_attention", "sliding_attention", "full_attention"]
    model = build("Qwen2", use_sliding_window=True, sliding_window=16, layer_types=types)
    with pytest.raises(UsageError, match=r"--per-layer 1=higgs-4: layer 1 is not compressed: "):
        Preset("higgs-2", "higgs-2", per_layer=("1=higgs-4",)).scheme(model)
    made = Preset("higgs-2", "higgs-2", per_layer=("0-1=higgs-4",)).scheme(model)  # and one that is
    found = [pair and pair.key.config()["n"] for pair in made.layers]
    assert found == [256, None, 16]


def test_preset_from_the_config_alone(folder: Path, tmp_path: Path) -> None:
    """No weights are there; the bundle then fits any weights of the config."""
    bare, output = tmp_path / "bare", tmp_path / f"x{SUFFIX}"
    bare.mkdir()
    (bare / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert kvcal("preset", "higgs-2", "--model", bare, "--output", output).code == 5
    done = kvcal("preset", "higgs-2", "--model", bare, "--output", output, "--config-only", "--json")
    assert done.code == 0, done.err
    assert done.json["fits"] == "any weights of this config"
    assert kvcal("verify", output, "--model", folder).code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["kivi-9"], 2, "preset 'kivi-9' is not known; did you mean kivi-4 or kivi-2?"),
        (["kivi-2", "--values", "vq-2"], 2, "codec 'vq-2' is learned from text: fit it with `kvcal fit-predictors"),
        (["kivi-2", "--per-layer", "4=higgs-4"], 2, "--per-layer 4=higgs-4: the model has layers 0 to 3"),
        (["kivi-2", "--per-layer", "0:higgs-4"], 2, "reads LAYERS=CODEC"),
        (
            ["--keys", "kivi-2"],
            2,
            "nothing says what to store: give a preset's name, --keys with --values, or --recipe",
        ),
        (["kivi-2", "--recipe", "PREDICTS"], 2, "/PREDICTS both say what to store: leave one out"),
        (["--values", "kivi-2", "--recipe", "PREDICTS"], 2, "--values and --recipe both say what to store"),
        (["--recipe", "PREDICTS"], 2, "has a [predictor], which is fitted to text: use `kvcal fit-predictors`"),
        (["kivi-2", "--frame", "rope"], 2, "--frame rope: allowed are pre_rope, post_rope"),
        (["kivi-2", "--config-only", "--random-weights"], 2, "--config-only and --random-weights"),
        (["kivi-2", "--output", "/nowhere/x"], 1, "/nowhere is not a folder"),
    ],
)
def test_presets_that_are_refused(folder: Path, arguments: list[str], code: int, message: str, tmp_path: Path) -> None:
    output = [] if "--output" in arguments else ["--output", tmp_path / "x"]
    (tmp_path / "PREDICTS").write_text(f"{RECIPE}\n[predictor]\nkind = 'bias'\n")
    arguments = [str(tmp_path / word) if word == "PREDICTS" else word for word in arguments]
    done = kvcal("preset", *arguments, "--model", folder, *output)
    assert done.code == code
    assert message in done.complaint
    assert not (tmp_path / "x").exists()


def test_fp8_round_trip_in_a_cache() -> None:
    """As servers do: keys and values as 8-bit floats of the whole tensor, two significant digits."""
    codec = codec_maker("fp8")(SHAPE, "key")
    x: Tensor = numbers(1, 2, 32, 64) * 10
    made = codec.decode(codec.encode(x))
    assert torch.equal(made, x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
