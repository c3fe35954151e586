"""Baselines without data: KIVI against a loop written from the paper, bits and windows of every preset, `kvcal preset`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcal.methods.backbones import backbone
from kvcal.methods.plain import PRESETS, preset
from kvcal_artifacts import load_bundle
from kvcal_artifacts.codecs import Higgs, Shape, Uniform
from models_fixture import SUFFIX, kvcal, write_model
from schemes import numbers, tiny

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
        codec = backbone(f"kivi-{bits}")(SHAPE, role)  # type: ignore[arg-type]
        packed = codec.encode(x)
        assert isinstance(codec, Uniform)
        found, scale, low = codec.groups(packed)
        assert low is not None
        codes = (
            found[0] if role == "key" else found[0].transpose(-1, -2)
        )  # (H, N, b, D) for keys, (H, N, D, b) for values
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
    """b + 16/128 bits; a head's error does not depend on the other head's size."""
    for bits in (2, 3, 4):
        codec = backbone(f"turboquant-{bits}")(Shape(8, 128, 32), "key")
        assert isinstance(codec, Higgs) and (codec.d, codec.n, codec.rotation_width) == (1, 2**bits, 128)
        assert codec.bits_per_value() == bits + 16 / 128
        x = numbers(1, 8, 64, 128)
        x[:, 1] *= 1000
        error = (codec.decode(codec.encode(x)) - x).square().mean((0, 2, 3)) / x.square().mean((0, 2, 3))
        bar = {2: 0.1175, 3: 0.03455, 4: 0.0095}[bits]
        assert float(error.mean()) < 1.01 * bar and float(error.max()) < 1.1 * bar


# At Llama-3.1-8B's geometry: bits a value, sink, recent
PAPERS = {
    "kivi-2": (3.0, 0, 32),
    "kivi-4": (5.0, 0, 32),
    "kivi-sink-2": (3.0, 32, 96),
    "turboquant-2": (2.125, 0, 128),
    "turboquant-3": (3.125, 0, 128),
    "turboquant-4": (4.125, 0, 128),
    "turboquant-4-3": (3.625, 0, 128),
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
    codecs = backbone(method.key)(shape, "key"), backbone(method.value)(shape, "value")
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


def test_preset_with_other_windows(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / f"x{SUFFIX}"
    given = ["--sink", 3, "--recent", 9, "--block", 16, "--frame", "pre_rope"]
    done = kvcal("preset", "innerq-hybrid", "--model", folder, "--output", output, *given, "--json")
    assert (done.json["windows"], done.json["frame"]) == ({"sink": 3, "recent": 9, "block": 16}, "pre_rope")
    assert load_bundle(output).scheme.windows.block == 16


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
        (["kivi-9"], 2, "preset 'kivi-9' is not known; allowed are higgs-2"),
        (["kivi-2", "--frame", "rope"], 2, "frame 'rope': allowed are pre_rope, post_rope"),
        (["kivi-2", "--config-only", "--random-weights"], 2, "--config-only and --random-weights"),
        (["kivi-2", "--output", "/nowhere/x"], 1, "/nowhere is not a folder"),
    ],
)
def test_presets_that_are_refused(folder: Path, arguments: list[str], code: int, message: str, tmp_path: Path) -> None:
    output = [] if "--output" in arguments else ["--output", tmp_path / "x"]
    done = kvcal("preset", *arguments, "--model", folder, *output)
    assert done.code == code
    assert message in done.complaint


def test_fp8_round_trip_in_a_cache() -> None:
    """As servers do: keys and values as 8-bit floats of the whole tensor, two significant digits."""
    codec = backbone("fp8")(SHAPE, "key")
    x: Tensor = numbers(1, 2, 32, 64) * 10
    made = codec.decode(codec.encode(x))
    assert torch.equal(made, x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
