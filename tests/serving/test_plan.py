"""What the user asks for becomes a plan, or a refusal that says why; vLLM is not needed for it."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig, DeepseekV3Config, FalconConfig, LlamaConfig, MptConfig

from kvcal.cli.app import app
from kvcal.methods.data_free import PRESETS, Preset
from kvcal.methods.data_free import preset as kvcal_preset
from kvcal.methods.mixkvq import MixKVQ
from kvcal.models import load_model, resolve
from kvcal_artifacts import load_bundle
from kvcal_artifacts.bundle import Bundle, Fingerprint
from kvcal_artifacts.codecs import Shape, Transform
from kvcal_artifacts.errors import IncompatibleBundle, UnsupportedModel, UsageError
from kvcal_artifacts.hf import key_probe
from kvcal_artifacts.hf.sites import attention_sites
from kvcal_artifacts.scheme import HeavyHitters, LayerCodecs, Scheme, Windows
from kvcal_vllm import presets
from kvcal_vllm.plan import Plan, Rank, page_layer, plan
from kvcal_vllm.settings import Settings, settings
from kvcal_vllm.weights import key_probes
from tests.support.architectures import HYBRID, TINY, initialise
from tests.support.pages import FENCE, ROOT


@pytest.fixture(scope="module")
def model() -> Any:
    made = TINY["llama"](hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    initialise(made, 1)
    return made


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def bundle_of(model: Any, path: Path, preset: Any, **changes: Any) -> str:
    scheme = replace(preset.scheme(model), **changes)
    Bundle(Fingerprint.of(model), scheme, {"method": "test"}).write(path / "x.kvcal.safetensors")
    return str(path / "x.kvcal.safetensors")


def planned(model: Any, source: str, folder: Path = Path("no-such-folder")) -> Plan:
    return plan(Settings(source), model.config, model=str(folder))


def test_presets_are_kvcals() -> None:
    shape = Shape(2, 64, 32)
    for name in presets.PRESETS:
        theirs = kvcal_preset(name)
        assert isinstance(theirs, Preset)
        pair = presets.codecs(name, shape)
        for role, codec in (("key", pair.key), ("value", pair.value)):
            other = theirs.composition.codec(0, 2, role)(shape, role)  # type: ignore[arg-type]
            assert (codec.name, codec.config()) == (other.name, other.config()), name
            assert all(torch.equal(tensor, codec.tensors()[key]) for key, tensor in other.tensors().items())


def test_a_preset_fits_any_model(model: Any) -> None:
    served = planned(model, "higgs-2")
    assert len(served.layers) == model.config.num_hidden_layers
    assert served.bits == 2.25
    assert served.token_bytes == 36
    assert served.describe().startswith("kvcal: higgs-2: 2.25 bits per value in pages, 7.11 x the tokens of FP16; ")
    assert served.capacity(1000) == "kvcal: 32,000 tokens fit, where 4,500 would at FP16"


def test_a_bundle_of_layers_of_unlike_bytes(model: Any, folder: Path, tmp_path: Path) -> None:
    path = bundle_of(model, tmp_path, Preset("higgs-2", "higgs-4", per_layer=("0=turboquant-4",)))
    served = planned(model, path, folder)
    assert [layer.token_bytes for layer in served.layers[:2]] == [68, 52]
    assert served.token_bytes is None
    assert served.weighed is True
    assert "were not compared" not in served.describe()
    assert "the model's key weights were not compared" in planned(model, path).describe()


OWN = "depends on the request's own tokens"
REFUSED = {  # kvcal's presets whose bundles cannot be served either
    **{f"innerq-{variant}": OWN for variant in ("base", "hybrid", "small")},
    **{f"squat-{bits}": OWN for bits in (2, 3, 4)},
    **{f"squat-pre-{bits}": "before RoPE" for bits in (2, 3, 4)},
    "mixkvq": OWN,
}
BY_NAME = {  # what the others' names are answered with
    "kivi-sink-2": "cannot be served: it is kivi-2 with its first 32 and newest 96 tokens exact, and a server packs",
    "fp8": "is served from a bundle only; make it by `kvcal preset fp8 --model MODEL --sink 0 --recent 0 --output",
    "bf16": "cannot be served: it takes 16 bits per value in pages, and FP16 16; start vLLM without kvcal",
    "exact": "cannot be served: it takes 32 bits per value in pages, and FP16 16; start vLLM without kvcal",
}


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in presets.PRESETS])
def test_other_presets_are_served_from_bundles_or_refused(name: str, model: Any, tmp_path: Path) -> None:
    """By name and as bundles for the same reason."""
    path = bundle_of(model, tmp_path, kvcal_preset(name))
    if name in REFUSED:
        for source in (name, path):
            with pytest.raises(UsageError, match=f"cannot be served: .*{REFUSED[name]}"):
                planned(model, source)
    else:
        assert planned(model, path).bits > 2
        with pytest.raises(UsageError, match=f"^preset {name} {BY_NAME[name]}"):
            planned(model, name)


def test_names_that_the_guide_has_are_answered(model: Any) -> None:
    """A codec's and a method's, too, with what a server cannot do or with the command that makes the bundle."""
    for name in ("higgs-4-wide", "higgs-2-wide-debiased"):
        with pytest.raises(UsageError, match=rf"^codec {name}, keys, .* cannot be served: it rotates all heads of a"):
            planned(model, name)
    with pytest.raises(UsageError, match=r"^preset h2o cannot be served: it selects tokens by attention"):
        planned(model, "h2o")
    with pytest.raises(UsageError, match=r"^codec exact-16 cannot be served: it takes 16 bits per value in pages"):
        planned(model, "exact-16")
    with pytest.raises(UsageError, match=r"^vqkv cannot be served: on a GPU kvcal's kernels read HIGGS and"):
        on_gpu(model, "vqkv")


COMMAND = re.compile("served from a bundle only; make it by `(kvcal .*)`$")


@pytest.mark.parametrize("name", ["fp8", "uniform-5", "higgs-2-d4", "transform-4", "vqkv"])
def test_the_command_that_a_refusal_names_makes_what_is_served(name: str, tmp_path: Path) -> None:
    tiny = load_model(resolve("tiny"), dtype=torch.float32, device="cpu").model
    with pytest.raises(UsageError) as refused:
        planned(tiny, name)
    [command] = COMMAND.findall(str(refused.value))
    program, *arguments = shlex.split(command.replace("MODEL", "tiny").replace("TEXT", "embedded:calibration"))
    assert program == "kvcal"
    if "--text" in arguments:
        arguments += ["--windows", "4", "--length", "128", *(["--stages", "1,1,1"] if name == "vqkv" else [])]
    made = str(tmp_path / "x.kvcal.safetensors")
    app([*arguments, "--output", made], standalone_mode=False)
    assert planned(tiny, made).bits < 16
    assert load_bundle(made).scheme.windows == Windows(0, 0, 32)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("aqua-kv", "preset aqua-kv cannot be served: it predicts layers from the one below"),
        ("auto-4", "preset auto-4 cannot be served: it chooses by the keys of a loaded model"),
        ("./smol.safetensors", r"bundle './smol.safetensors': no such file; .* ends with .kvcal.safetensors"),
        ("folder/smol", "bundle 'folder/smol': no such file"),
        ("smol.safetensors", "bundle 'smol.safetensors': no such file"),
        ("higgs-5", "preset 'higgs-5': allowed is higgs-2, .*, kivi-2, .*, or a bundle's path"),
    ],
)
def test_names_of_nothing_that_is_served(name: str, reason: str, model: Any) -> None:
    with pytest.raises(UsageError, match=reason):
        planned(model, name)


def test_names_that_are_allowed_on_a_gpu_are_served_there(model: Any) -> None:
    with pytest.raises(UsageError) as refused:
        on_gpu(model, "higgs-5")
    names = str(refused.value).split("allowed is ")[1].split(", or a bundle's")[0].split(", ")
    assert {"higgs-4", "uniform-8", "turboquant-3"} <= set(names)
    for name in presets.PRESETS:
        if name in names:
            assert on_gpu(model, name).gpu
        else:
            with pytest.raises(UsageError, match=f"preset {name}, .* cannot be served: on a GPU kvcal's kernels"):
                on_gpu(model, name)


@pytest.mark.parametrize(
    ("preset", "reason"),
    [
        (Preset("innerq-base", "innerq-base"), "requests could not share a prefix"),
        (Preset("mixkvq", "mixkvq"), "requests could not share a prefix"),
        (Preset("higgs-2-wide", "higgs-2"), "it rotates all heads of a token together"),
        (Preset("1xhiggs-2+1xhiggs-4", "higgs-2"), "its heads are stored in different codecs"),
        (Preset("higgs-2", "higgs-2", "pre_rope"), "it stores keys before RoPE.*; fit with --frame post_rope"),
        (Preset("higgs-2", "higgs-2", block=64), "blocks of 64 tokens: a page holds 32"),
        (MixKVQ(importance="none", block=32), "its blocks differ in size"),
    ],
)
def test_schemes_that_pages_cannot_hold(preset: Any, reason: str, model: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=reason):
        planned(model, bundle_of(model, tmp_path, preset))


def test_blocks_of_tokens_have_tails(model: Any, tmp_path: Path) -> None:
    served = planned(model, bundle_of(model, tmp_path, Preset("higgs-2", "higgs-2", per_layer=("0=kivi-2",))))
    assert [layer.tailed for layer in served.layers] == [True, *[False] * (len(served.layers) - 1)]
    assert "; blocks of 32 tokens are packed once they are full, and lie outside of pages until" in served.describe()
    fixed = planned(model, bundle_of(model, tmp_path, MixKVQ(importance="none", full=8, four=8, block=32)))
    assert all(layer.tailed for layer in fixed.layers)


def test_selection_and_skipped_layers_are_refused(model: Any, tmp_path: Path) -> None:
    preset = Preset("higgs-2", "higgs-2")
    with pytest.raises(UsageError, match="selects tokens by attention"):
        planned(model, bundle_of(model, tmp_path, preset, selection=HeavyHitters()))
    layers = (None, *preset.scheme(model).layers[1:])
    with pytest.raises(UsageError, match="layer 0 is not compressed: too wild"):
        planned(model, bundle_of(model, tmp_path, preset, layers=layers, skipped={0: "too wild"}))


def test_another_models_bundle_is_refused(model: Any, folder: Path, tmp_path: Path) -> None:
    path = bundle_of(model, tmp_path, Preset("higgs-2", "higgs-2"))
    other = TINY["llama"](hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=99)
    with pytest.raises(IncompatibleBundle, match="config_sha256"):
        planned(other, path)
    twin = TINY["llama"](hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    initialise(twin, 2)
    twin.save_pretrained(tmp_path / "twin")
    with pytest.raises(IncompatibleBundle, match="key weights"):
        planned(model, path, tmp_path / "twin")


def test_probes_of_files_are_the_models(model: Any, folder: Path, tmp_path: Path) -> None:
    sites = attention_sites(model)
    assert key_probes(folder, len(sites)) == (*key_probe(sites[0]), *key_probe(sites[-1]))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert key_probes(tmp_path, len(sites)) == key_probes(folder, len(sites))
    assert key_probes(tmp_path / "none", len(sites)) == ()


def test_models_with_other_layers_are_refused() -> None:
    gemma = HYBRID["gemma3"]()
    with pytest.raises(UnsupportedModel, match="layer 0: sliding-attention"):
        planned(gemma, "higgs-2")
    latent = DeepseekV3Config(num_hidden_layers=2)
    with pytest.raises(UnsupportedModel, match="deepseek_v3: multi-head latent attention caches a latent"):
        plan(Settings("higgs-2"), latent)


def test_head_sizes_that_need_no_tail() -> None:
    """As the guide says. At others whole blocks are stored."""
    for dim in (32, 48, 64, 80, 96, 112, 128, 192, 256):
        config = LlamaConfig(hidden_size=2 * dim, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
        for name in ("higgs-2", "higgs-3", "higgs-4", "turboquant-3", "turboquant-4", "uniform-4", "uniform-8"):
            apart = dim in (64, 128, 256) or (dim == 96 and not name.endswith("-3"))
            assert plan(Settings(name), config).tailed is not apart, (dim, name)


@pytest.mark.parametrize("config", [BloomConfig(), FalconConfig(alibi=True), MptConfig()])
def test_models_with_biases_by_distance_are_refused(config: Any) -> None:
    with pytest.raises(UnsupportedModel, match=f"{config.model_type}: its attention adds biases by distance"):
        plan(Settings("higgs-2"), config)


def test_models_of_those_families_without_biases_are_not_refused() -> None:
    for config in (FalconConfig(), MptConfig(attn_config={"alibi": False})):
        assert plan(Settings("uniform-4"), config).bits > 4


@pytest.mark.parametrize(
    ("additional", "environment", "expected"),
    [
        ({}, {}, None),
        ({"other": 1}, {"KVCAL_BUNDLE": ""}, None),
        ({"kvcal": "a"}, {"KVCAL_BUNDLE": "b"}, Settings("a")),
        ({}, {"KVCAL_BUNDLE": "b", "KVCAL_DETERMINISTIC": "1"}, Settings("b", True)),
        ({"kvcal": "a", "kvcal_deterministic": True}, {}, Settings("a", True)),
        ({"kvcal": "a", "kvcal_deterministic": False}, {"KVCAL_DETERMINISTIC": "1"}, Settings("a")),
    ],
)
def test_settings(additional: dict[str, object], environment: dict[str, str], expected: Settings | None) -> None:
    assert settings(additional, environment) == expected


@pytest.mark.parametrize(
    ("additional", "environment", "reason"),
    [
        ({"kvcal_deterministic": True}, {}, "without a bundle"),
        ({"kvcal": 3}, {}, "kvcal = 3: must be"),
        ({"kvcal": None}, {"KVCAL_BUNDLE": "b"}, "kvcal = None: must be a bundle's path or a preset's name"),
        ({"kvcal": "a", "kvcal_mode": 1}, {}, "kvcal_mode"),
        ({"kvcal": "a", "kvcal_deterministic": "yes"}, {}, "must be true or false"),
        ({"kvcal": "a"}, {"KVCAL_DETERMINISTIC": "yes"}, "must be 0 or 1"),
    ],
)
def test_settings_that_mean_nothing(additional: dict[str, object], environment: dict[str, str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        settings(additional, environment)


def on_gpu(model: Any, source: str, rank: Rank | None = None, deterministic: bool = False) -> Plan:
    return plan(Settings(source, deterministic), model.config, model="no-such-folder", multiple=2, gpu=True, rank=rank)


def test_what_kernels_serve_on_a_gpu(model: Any, tmp_path: Path) -> None:
    for name in ("higgs-2", "turboquant-4-3", "uniform-4"):
        assert on_gpu(model, name).bits == planned(model, name).bits
    assert (
        "one that comes alone is packed; single tokens attend by kvcal's kernel" in on_gpu(model, "higgs-2").describe()
    )
    line = on_gpu(model, "higgs-2", deterministic=True).describe()
    assert (
        "every token attends to packed keys and values; up to 16 tokens of a request attend by kvcal's kernel" in line
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("kivi-2", "its groups are of tokens.*no kernel reads the exact tokens of unfinished blocks"),
        ("innerq-base-plain", "its groups are of tokens"),
        ("higgs-2-bytes", "its grid is for products of bytes"),
    ],
)
def test_what_no_kernel_reads_is_refused_on_a_gpu(name: str, reason: str, model: Any) -> None:
    with pytest.raises(UsageError, match=f"cannot be served: on a GPU kvcal's kernels read HIGGS and .*: {reason}"):
        on_gpu(model, name)
    assert planned(model, name).bits > 2


@pytest.mark.parametrize(("dim", "name"), [(80, "higgs-4"), (80, "uniform-4"), (192, "higgs-2")])
def test_head_sizes_that_no_kernel_reads_are_refused_on_a_gpu(dim: int, name: str) -> None:
    config = LlamaConfig(hidden_size=2 * dim, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
    with pytest.raises(UsageError, match=f"preset {name}, keys, codec .* on a GPU kvcal's kernels .* head_dim {dim}"):
        plan(Settings(name), config, gpu=True)
    assert plan(Settings(name), config).bits > 2


@pytest.mark.parametrize(
    ("dim", "name", "allowed"),
    [
        (80, "higgs-4", "64, 128, 256"),
        (96, "turboquant-3", "64, 128, 256"),
        (80, "uniform-4", "64, 96, 128, 256"),
        (96, "uniform-3", "64, 128, 256"),
    ],
)
def test_refused_head_sizes_come_with_those_that_are_served(dim: int, name: str, allowed: str, tmp_path: Path) -> None:
    """Not with all that attention reads; of presets and of bundles."""
    model = TINY["llama"](hidden_size=2 * dim, num_attention_heads=2, num_key_value_heads=2, head_dim=dim)
    for source in (name, bundle_of(model, tmp_path, kvcal_preset(name))):
        with pytest.raises(UsageError, match=rf": head_dim {dim}: this codec is served at {allowed}$"):
            on_gpu(model, source)
    if dim == 80:
        with pytest.raises(UsageError, match="preset 'higgs-5': at head_dim 80 a GPU serves no preset"):
            on_gpu(model, "higgs-5")
        with pytest.raises(UsageError, match="fused kernel cannot read"):
            on_gpu(model, "higgs-2-bytes")


def test_a_codec_without_a_name_says_itself_which_head_sizes_kernels_take() -> None:
    """Also at a head_dim that codecs with names refuse."""
    shape = Shape(2, 512, 32)
    with pytest.raises(UsageError, match=r"transform at head_dim 512: the kernel takes \(64, 128\)$"):
        page_layer("mine", LayerCodecs(Transform(shape, "key"), Transform(shape, "value")), multiple=2, gpu=True)


GUIDE = ROOT / "docs" / "guides" / "vllm.md"
SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)  # head_dim of models


def test_commands_that_start_a_server_on_a_cpu_say_how_much_memory_it_takes() -> None:
    """Else vLLM wants 92 % of all memory to be free."""
    blocks = [
        block[3]
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for block in FENCE.finditer(page.read_text("utf-8"))
    ]
    starts = [block for block in blocks if "vllm.entrypoints.openai.api_server" in block]
    assert len(starts) == 2
    for block in starts:
        assert re.search(r"^VLLM_CPU_KVCACHE_SPACE=\d+ python -m vllm.entrypoints", block, flags=re.MULTILINE)


def served_on_a_gpu(name: str, dim: int) -> bool:
    """Whether page_layer takes a scheme of the guide's at a head_dim."""
    shape = Shape(8, dim, 32)
    if name == "transform":
        pair = LayerCodecs(Transform(shape, "key"), Transform(shape, "value"))
    else:
        pair = presets.codecs(name, shape)
    try:
        page_layer(name, pair, multiple=2, gpu=True)
    except UsageError:
        return False
    return True


def test_the_guide_says_which_head_sizes_a_gpu_serves() -> None:
    [section] = re.findall(r"^### Head sizes\n(.*?)^### ", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| (.+) \| ([\d, ]+) \|$", section, flags=re.MULTILINE)
    assert len(rows) == 4
    families = ("higgs-", "turboquant-", "uniform-")
    kinds = [name for name in presets.PRESETS if name.startswith(families) and not re.search("-bytes", name)]
    for scheme, sizes in rows:
        names = re.findall("`(.+?)`", scheme)
        names += [name for name in kinds if name.partition("-")[0] in scheme.lower() and "`" not in scheme]
        names += ["transform"] if scheme == "transform" else []
        assert names
        for name in names:
            assert [dim for dim in SIZES if served_on_a_gpu(name, dim)] == list(map(int, sizes.split(", "))), name
    for dim in (80, 112):
        assert all(page_layer(name, presets.codecs(name, Shape(8, dim, 32))).tailed for name in kinds)


def test_heads_are_split_as_vllm_splits_them(model: Any) -> None:
    assert [Rank(i, 2).heads(8) for i in range(2)] == [slice(0, 4), slice(4, 8)]
    assert [Rank(i, 4).heads(2) for i in range(4)] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
    whole = on_gpu(model, "higgs-2").layers[0]
    for index in range(2):
        part = on_gpu(model, "higgs-2", Rank(index, 2)).layers[0]
        assert (part.shape.heads, part.token_bytes) == (1, whole.token_bytes)
        x = torch.randn(1, 2, 32, 64, generator=torch.Generator().manual_seed(1))
        cut = slice(index, index + 1)
        assert torch.equal(part.key.pack(x[:, cut]), whole.key.pack(x)[:, cut])  # the bytes of its heads alone
    with pytest.raises(UsageError, match="2 kv heads and 3 processes: one must divide the other"):
        on_gpu(model, "higgs-2", Rank(0, 3))


def test_a_norm_of_all_heads_is_not_split(model: Any, tmp_path: Path) -> None:
    shape = Shape(2, 64, 32)
    pair = LayerCodecs(Transform(shape, "key"), Transform(shape, "value"))
    scheme = Scheme(Windows(0, 0, 32), "post_rope", (pair,) * model.config.num_hidden_layers)
    Bundle(Fingerprint.of(model), scheme, {"method": "test"}).write(tmp_path / "t.kvcal.safetensors")
    source = str(tmp_path / "t.kvcal.safetensors")
    assert on_gpu(model, source).bits < 3
    with pytest.raises(UsageError, match=r"by heads \(tensor parallel\): transform has one norm for all heads"):
        on_gpu(model, source, Rank(0, 2))
