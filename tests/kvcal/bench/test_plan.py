"""`kvcal plan`: its arithmetic against real caches, real files of weights and what GPUs measured; the command."""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import re
import resource
import runpy
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcal.bench import devices, filled, fused
from kvcal.bench import schemes as bench_schemes
from kvcal.bench.planning import cards, formats, projection, quality, schemes, speed, units
from kvcal.bench.planning import memory as planning
from kvcal.bench.planning.memory import Load, Model, Windows
from kvcal.cli.plan import _cells, _foot
from kvcal.commands.api import plan
from kvcal.commands.plan import PlanOptions, run_plan
from kvcal.methods.data_free import PRESETS, Preset
from kvcal.methods.registry import codec_maker
from kvcal.models import configuration, plain_config
from kvcal.models.catalogue import CATALOGUE
from kvcal.models.geometry import Geometry
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.cache.static.layer import StaticLayer
from kvcal_artifacts.codecs import Shape, Transform
from kvcal_artifacts.codecs.named import CODEC_MAKERS
from kvcal_artifacts.errors import KVCalError, ModelUnavailable, UnsupportedModel, UsageError
from kvcal_artifacts.scheme import LayerCodecs, Scheme
from tests.support import architectures
from tests.support.models_fixture import kvcal as program

pytestmark = pytest.mark.transformers
ROOT = Path(__file__).resolve().parent
while not (ROOT / "pyproject.toml").exists():
    ROOT = ROOT.parent
RECORDED = ROOT / "docs" / "benchmarks"
LLAMA_8B = CATALOGUE["llama-3.1-8b"].geometry
H200 = cards.of_profile(devices.DEVICES["h200"])
SHAPES = [(8, 128, 32), (8, 128, 128), (3, 64, 32), (1, 256, 32), (8, 96, 32), (5, 80, 32), (4, 128, 16), (2, 64, 64)]


def model_of(geometry: Geometry, width: int = 2) -> Model:
    return Model(geometry, geometry.parameters * width, width)


# Bytes, against codecs and caches.


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_as_large_as_the_codecs_say(shape: tuple[int, int, int]) -> None:
    """Of every codec that needs no data, in both roles; and a kernel reads those that their form says."""
    compared = 0
    for name in [*CODEC_MAKERS, "mixkvq-16-16", "mixkvq-8-16"]:
        for role in ("key", "value"):
            if name == "mixkvq":  # differs in size from block to block
                continue
            codec, size = codec_maker(name)(Shape(*shape), role), formats.codec(name, role, formats.Shape(*shape))
            assert size.bytes == codec.block_bytes(), (name, role)
            assert size.kernel == (not isinstance(codec.fused(), str)), (name, role)
            compared += 1
    assert compared > 180


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_a_transform_are_as_large_as_the_codec_says(shape: tuple[int, int, int]) -> None:
    heads, dim, block = shape
    for bits in ([4] * dim, [3] * dim, [4] * (dim // 4) + [2] * (dim // 2) + [0] * (dim // 4)):
        codec = Transform(Shape(heads, dim, block), "key", bits=bits)
        size = formats.codec(f"transform-{round(sum(bits) / dim)}", "key", formats.Shape(*shape))
        assert sum(bits) % dim or size.bytes == codec.block_bytes()
        assert size.kernel == (not isinstance(codec.fused(), str))


def test_schemes_are_the_presets() -> None:
    planned = schemes.SCHEMES
    unplanned = {"exact", "bf16"}  # compress nothing
    assert set(PRESETS) - unplanned == {name for name in [*planned, *schemes.ALIASES] if name in PRESETS}
    for name, preset in PRESETS.items():
        if name in unplanned:
            continue
        mine = schemes.planned(name)
        if isinstance(preset, Preset):
            assert (mine.key, mine.value, mine.frame) == (preset.key, preset.value, preset.rope), name
        windows = (preset.sink, preset.recent, preset.block)
        assert (mine.sink, mine.recent, mine.block) == windows, name


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_what_a_kernel_reads_is_what_a_cache_says(dim: int) -> None:
    geometry = replace(LLAMA_8B, head_dim=dim)
    names = [*(name for name, one in schemes.SCHEMES.items() if one.command != schemes.FITTED), "kivi-4+kivi-2"]
    names.remove("aqua-kv")
    for name in names:
        scheme = schemes.planned(name)
        pair = bench_schemes.named("aqua-kv-2" if name == "aqua-kv" else name, geometry)
        refusal = fused.unreadable(pair, pair.codecs, 4)
        assert (schemes.sizes(scheme, geometry).why_decoded is None) == (refusal is None), (name, refusal)


def test_many_query_heads_have_no_kernel() -> None:
    geometry = replace(LLAMA_8B, heads=136)
    assert "17 query heads" in str(schemes.sizes(schemes.planned("kivi-2"), geometry).why_decoded)


def test_predictors_take_what_aqua_kv_stores() -> None:
    """Random ones of the benchmark, whose weights have the shapes of the paper's."""
    geometry = CATALOGUE["tiny"].geometry
    one = bench_schemes.named("aqua-kv-2", geometry)
    layer = sum(t.numel() * t.element_size() for c in (one.codecs.key, one.codecs.value)
                for name, t in c.tensors().items() if name.startswith("predictor."))  # fmt: skip
    assert schemes.sizes(schemes.planned("aqua-kv"), geometry).constants == (geometry.layers - 1) * layer > 0


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_model(resolve("tiny"), dtype="float32", device="cpu").model


def scheme_on(model: Any, name: str) -> tuple[Scheme, Load]:
    """The preset for the model, and its plan: exact tokens in the model's float32, storage as kernels would have it."""
    geometry = CATALOGUE["tiny"].geometry
    mine, preset = schemes.planned(name), PRESETS[name]
    size = schemes.sizes(mine, geometry)
    windows = Windows(mine.sink, mine.recent, mine.block)
    return preset.scheme(model), Load(model_of(geometry, 4), windows, sum(size.blocks))


@pytest.mark.parametrize("name", ["kivi-2", "kivi-4", "innerq-small", "higgs-3", "turboquant-4-3", "squat-2", "fp8"])
@pytest.mark.parametrize("length", [20, 300, 517])
def test_a_real_cache_holds_what_is_planned(tiny: Any, name: str, length: int) -> None:
    """tiny's own weights and keys, two rows."""
    scheme, load = scheme_on(tiny, name)
    ids = torch.randint(1, 256, (2, length), generator=torch.Generator().manual_seed(0))
    with KVCalCache(scheme, tiny) as cache, torch.no_grad():
        tiny(ids, past_key_values=cache)
        held = cache.describe()["nbytes"]
    assert held["packed"] == 2 * load.packed_bytes(length)
    assert held["window"] == 2 * load.window_bytes(length)


@pytest.mark.parametrize("name", ["kivi-2", "innerq-base", "higgs-2"])
@pytest.mark.parametrize("length", [300, 517])
def test_storage_that_is_allocated_once_takes_what_is_planned(tiny: Any, name: str, length: int) -> None:
    scheme, load = scheme_on(tiny, name)
    ids = torch.randint(1, 256, (2, length - 8), generator=torch.Generator().manual_seed(0))
    with KVCalCache(scheme, tiny, kernels="torch", max_length=length) as cache, torch.no_grad():
        tiny(ids, past_key_values=cache)
        held = cache.describe()["nbytes"]
    parts = load.decode(2, length)
    assert (held["packed"], held["window"]) == (parts.packed, parts.windows)


def test_a_filled_cache_has_no_copies_of_windows(tiny: Any) -> None:
    """Of static storage: what the driver counts is then the storage."""
    geometry = CATALOGUE["tiny"].geometry
    one = bench_schemes.named("kivi-2", geometry)
    with filled.filled_cache(tiny, geometry, one, 2, 400, kernels="torch", max_length=420) as cache:
        for layer in cache.compressed_layers:
            assert isinstance(layer, StaticLayer) and layer.allocation is not None
            assert layer.storage._window == [] and layer.ready
        shown = cache.compressed_layers[0].packed[0]
        assert all(bool(part.any()) for part in shown.values()) and cache.ledger.blocks.tolist() == [8, 8]


def test_sliding_layers_keep_their_window() -> None:
    geometry = replace(LLAMA_8B, layers=4, sliding_layers=3, sliding_window=512)
    load = Load(model_of(geometry), Windows())
    token = 2 * geometry.kv_width * 2
    assert load.cache_bytes(2048) == token * (2048 + 3 * 512) and load.cache_bytes(100) == token * 400
    assert len(schemes.sizes(schemes.planned("kivi-2"), geometry).blocks) == 1


def test_sliding_layers_hold_a_prompt_until_the_next_step() -> None:
    """Of Transformers' own: its layers keep a view of all that a forward brought."""
    model = architectures.HYBRID["gemma3"]()
    geometry = Geometry.from_config(model.config.to_dict())
    assert 0 < geometry.sliding_layers < geometry.layers
    load = Load(Model(geometry, 0, 4), Windows(0, 32, 32), 1.0)
    ids = torch.randint(1, 50, (1, 61), generator=torch.Generator().manual_seed(0))
    with KVCalCache(PRESETS["kivi-2"].scheme(model), model) as cache, torch.no_grad():
        model(ids[:, :60], past_key_values=cache)
        prefilled = cache.nbytes("window")
        model(ids[:, 60:], past_key_values=cache)
        stepped = cache.nbytes("window")
    more = load.prefill(1, 60).windows - load.decode(1, 60).windows
    assert prefilled == load.window_bytes(60) + more > load.window_bytes(60)
    token = load.model.layer_token
    assert load.window_bytes(61) <= stepped <= load.window_bytes(61) + geometry.sliding_layers * token


# Weights, against files.

SMOLLM2 = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
           "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192,
           "tie_word_embeddings": True}  # fmt: skip
CODER = {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "max_position_embeddings": 32768,
         "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 32768}  # fmt: skip
GEMMA = {"model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4,
         "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 2048, "vocab_size": 262144,
         "max_position_embeddings": 32768, "tie_word_embeddings": True, "sliding_window": 512,
         "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "in_file", "sliding"),
    [(SMOLLM2, 134515008, 0), (CODER, 630167424, 0), (GEMMA, 268098176, 15)],
    ids=["SmolLM2-135M", "Qwen2.5-Coder-0.5B", "gemma-3-270m"],
)
def test_parameters_are_those_of_the_published_files(fields: dict[str, Any], in_file: int, sliding: int) -> None:
    """in_file: numbers of all tensors in the model's own model.safetensors, from its header."""
    geometry = Geometry.from_config(fields)
    assert (geometry.parameters, geometry.sliding_layers) == (in_file, sliding)


def test_parameters_are_those_of_the_model(tiny: Any) -> None:
    assert CATALOGUE["tiny"].geometry.parameters == sum(p.numel() for p in tiny.parameters())


def safetensors(folder: Path, **shapes: list[int]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def test_weights_of_a_folder_are_counted_in_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    options = PlanOptions(model=str(tmp_path), gpu="h100")
    assert run_plan(options, print)["model"]["weights_bytes"] == 2 * 134515008
    by_file = run_plan(replace(options, model=str(tmp_path / "config.json")), print)
    assert by_file["rows"] == run_plan(options, print)["rows"]
    safetensors(tmp_path, a=[10, 7], b=[5])
    assert run_plan(options, print)["model"]["weights_bytes"] == 2 * 75
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not a header....")
    with pytest.raises(ModelUnavailable, match="no safetensors file"):
        run_plan(options, print)


def test_weights_are_counted_once(tmp_path: Path) -> None:
    """A second copy, an adapter and a bundle beside model.safetensors are not weights; shards are those of the index."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    options = PlanOptions(model=str(tmp_path), gpu="h100")
    safetensors(tmp_path, a=[10, 7])
    for name in ("consolidated", "adapter_model", "x.kvcal"):
        (tmp_path / f"{name}.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    assert run_plan(options, print)["model"]["weights_bytes"] == 140
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    assert run_plan(options, print)["model"]["weights_bytes"] == 140
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "consolidated.safetensors"}}))
    assert run_plan(options, print)["model"]["weights_bytes"] == 280
    index.write_text("[]")
    with pytest.raises(ModelUnavailable, match="index of weights"):
        run_plan(options, print)


def test_quantised_weights_are_bytes_of_the_files(tmp_path: Path) -> None:
    config = {**SMOLLM2, "quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = PlanOptions(model=str(tmp_path), gpu="h100")
    with pytest.raises(UsageError, match=r"quantised \(awq\): give .*--weights"):
        run_plan(options, print)
    safetensors(tmp_path, a=[10, 7])
    said: list[str] = []
    model = run_plan(options, said.append)["model"]
    assert (model["weights_bytes"], model["parameters"]) == (140, 134515008)
    assert "quantised (awq)" in said[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_smaller_weights_do_not_make_fewer_products(dtype: str) -> None:
    """A prompt's products are those of all parameters, however few bytes these take; a step reads less."""
    options = PlanOptions(model="llama-3.1-8b", gpu="rtx-4090", context="8k", dtype=dtype)
    whole, small = (run_plan(replace(options, weights=size), print)["rows"] for size in (None, "5.7GB"))
    for one, other in zip(whole, small, strict=True):
        assert other["prefill_seconds"] >= one["prefill_seconds"]
        assert one["tokens_per_second"] is None or other["tokens_per_second"] >= one["tokens_per_second"]
    with pytest.raises(UsageError, match=r"--weights 0.5GB: must be more than the 1.05 GB that the table"):
        run_plan(replace(options, weights="0.5GB"), print)


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "tiny"])
def test_a_config_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    entry = CATALOGUE[name]
    fields = configuration.catalogue_config(entry).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert plain_config.geometry(resolve(str(tmp_path))) == entry.geometry


def test_transformers_is_asked_where_a_config_leaves_fields_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(source: Any) -> Geometry:
        asked.append(source.name)
        return LLAMA_8B

    monkeypatch.setattr(configuration, "geometry", ask)
    for fields in (SMOLLM2 | {"model_type": "qwen3"}, GEMMA | {"layer_types": None}, {"model_type": "new-decoder"}):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert plain_config.geometry(resolve(str(tmp_path))) is LLAMA_8B
    assert len(asked) == 3
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    assert plain_config.geometry(resolve(str(tmp_path))).layers == 30 and len(asked) == 3


# Time and memory, against what was measured.


def _recorded() -> Iterator[Any]:
    """Rows of whole models under CUDA graphs: FP16 as bench bounds it, by cuDNN, and the fused kernel."""
    for path in sorted(RECORDED.glob("generation-*.json")):
        for row in json.loads(path.read_text())["rows"]:
            graph = row["path"].endswith("CUDA graph") and not row["refused"]
            if graph and not row["path"].startswith("StaticCache"):
                yield pytest.param(
                    row, id=f"{path.stem}-{row['scheme']}-{row['batch']}x{row['length']}-{row['path'][:24]}"
                )


RECORDED_ROWS = list(_recorded())


def candidate_of(row: dict[str, Any]) -> projection.Candidate:
    model = model_of(LLAMA_8B)
    if row["scheme"] == "fp16":
        return projection.full(model)
    (scheme,) = schemes.with_windows([schemes.planned(row["scheme"])], 32, 96)  # bench's own
    return projection.candidate(scheme, model, H200)


@pytest.mark.parametrize("row", RECORDED_ROWS)
def test_recorded_memory_is_planned_within_5_percent(row: dict[str, Any]) -> None:
    planned = candidate_of(row).load.decode(row["batch"], row["tokens"])
    assert planned.total == pytest.approx(row["peak_bytes"], rel=0.05)


@pytest.mark.parametrize("row", RECORDED_ROWS)
def test_recorded_bytes_of_a_step_are_exact(row: dict[str, Any]) -> None:
    if row["bytes"] is None:
        pytest.skip("this run did not record them")
    load = candidate_of(row).load
    assert load.model.read_bytes + row["batch"] * load.cache_bytes(row["tokens"]) == row["bytes"]


def slower(row: dict[str, Any]) -> bool:
    """What was measured otherwise than is planned: torch's flash at 30 rows, whose reading is half as fast as cuDNN's;
    compiled forwards; InnerQ before its factors were made by one kernel.
    """
    flash = "sdpa flash" in row["path"] and row["batch"] > 1
    return (
        flash
        or "compiled" in row["path"]
        or (row["scheme"] == "innerq-small" and row["microseconds"] > 9000 and row["batch"] == 1)
    )


@pytest.mark.parametrize("row", [row for row in RECORDED_ROWS if not slower(row.values[0])])
def test_recorded_times_are_planned_within_15_percent(row: dict[str, Any]) -> None:
    one = candidate_of(row)
    goal = projection.Goal("x", one.load.model, row["tokens"], LLAMA_8B.context, row["batch"])
    step = projection.step_of(goal, one)
    assert step is not None
    planned = speed.seconds(step, H200)
    assert planned is not None
    assert planned * 1e6 == pytest.approx(row["microseconds"], rel=0.15)


def attention_rows() -> dict[str, float]:
    """Microseconds at 32 rows of 32768 tokens, by scheme, of the newest run."""
    measured = json.loads((RECORDED / "decode_attention-2708de7.json").read_text())
    shape = [row for row in measured["rows"] if (row["batch"], row["length"]) == (32, 32768)]
    return {row["scheme"]: row["microseconds"] for row in shape} | {
        "fp16": min(measured["fp16"]["32 x 32768"].values())
    }


NAMES = {
    "inner-4": "uniform 4/4", "innerq-base": "InnerQ Base 3/3", "innerq-hybrid": "InnerQ Hybrid",
    "innerq-small": "InnerQ Small", "inner-2": "uniform 2/2", "kivi-2": "KIVI 2/2 G=32",
    "kivi-2-before": "KIVI 2/2 before RoPE", "kivi-2-g128": "KIVI 2/2 G=128", "turboquant-4-3": "TurboQuant 4/3",
    "higgs-2": "HIGGS 2", "turboquant-4-3-bytes": "TurboQuant 4/3 in bytes", "higgs-2-bytes": "HIGGS 2 in bytes",
    "higgs-3": "HIGGS 3", "higgs-4": "HIGGS 4",
}  # fmt: skip


def test_rates_are_those_of_the_recorded_runs() -> None:
    profile, rows = devices.DEVICES["h200"], attention_rows()
    values = 2 * 32 * 32768 * 8 * 128
    assert set(NAMES) == set(speed.SLOTS)
    for name, title in NAMES.items():
        slots = (rows[title] * 1e-6 - speed.ATTENTION) * profile.issue_rate / values
        assert speed.SLOTS[name] == pytest.approx(slots, rel=0.01), name
    reading = 2 * values / (rows["fp16"] * 1e-6 - speed.ATTENTION)
    assert pytest.approx(reading / (profile.bandwidth * 1e9), rel=0.01) == speed.FULL_READ
    generation = json.loads((RECORDED / "generation-2708de7.json").read_text())
    assert pytest.approx(generation["copy_bandwidth"] / (profile.bandwidth * 1e9), rel=0.01) == speed.READ
    aqua = json.loads((RECORDED / "aqua_tokens-2246769.json").read_text())
    assert profile.tflops is not None
    assert pytest.approx(aqua["ceilings"]["matmul"] / (profile.tflops * 1e12), rel=0.01) == speed.PRODUCTS
    at_32k = next(shape for shape in aqua["shapes"] if shape["length"] == 32768)
    decoding = at_32k["device"]["higgs-2, decoded"]["reconstruct_microseconds"] * 1e-6
    slots = decoding * profile.issue_rate / (2 * 32768 * LLAMA_8B.kv_width * LLAMA_8B.layers)
    assert pytest.approx(slots, rel=0.02) == speed.DECODING


def test_eager_steps_are_those_of_the_recorded_run() -> None:
    """Median of AQUA-KV's steps at 8192 tokens."""
    aqua = json.loads((RECORDED / "aqua_tokens-2246769.json").read_text())
    at_8k = next(shape for shape in aqua["shapes"] if shape["length"] == 8192)
    first = at_8k["passes"]["again"]
    number, wall = first["caches"].index("aqua-kv-2"), aqua["columns"].index("wall")
    steps = [step[wall] for step in first["steps"] if step[aqua["columns"].index("cache")] == number]
    assert pytest.approx(statistics.median(steps) * 1e-6 / LLAMA_8B.layers, rel=0.02) == speed.EAGER


def test_the_rate_of_a_prompt_is_that_of_the_recorded_run() -> None:
    """One H100: 32768 tokens of Llama-3.1-8B, FP16 in one forward, kivi-4 in one and in chunks."""
    recorded = json.loads((RECORDED / "plan-3ee60f8.json").read_text())["rows"]
    taken = {(row["what"], row["scheme"]): row["seconds"] for row in recorded if row["what"].startswith("prefill")}
    h100 = cards.of_profile(devices.DEVICES["h100"])
    assert h100.flops is not None
    whole, packed = taken["prefill", "fp16"], taken["prefill", "kivi-4"]
    operations = model_of(LLAMA_8B).prompt_operations(32768)
    assert operations / whole / h100.flops == pytest.approx(speed.PROMPT, rel=0.01)
    assert packed / whole == pytest.approx(speed.PACKED_PROMPT, rel=0.01)
    assert taken["prefill-chunks", "kivi-4"] / whole == pytest.approx(speed.CHUNKED_PROMPT, rel=0.01)
    rows = plan("llama-3.1-8b", gpu="h100", context="32k", presets=["kivi-4"])["rows"]
    assert [row["prefill_seconds"] for row in rows] == pytest.approx([whole, packed], rel=0.02)


def test_operations_of_a_prompt_are_those_of_its_products() -> None:
    """Counted one matrix after the other; queries attend to themselves and what came before, in a window if there is
    one.
    """
    geometry, length = replace(LLAMA_8B, layers=3, sliding_layers=1, sliding_window=5), 12
    projections = geometry.hidden * geometry.head_dim * (2 * geometry.heads + 2 * geometry.kv_heads)
    weights = geometry.layers * (projections + 3 * geometry.hidden * geometry.intermediate)
    pairs = sum(2 * (at + 1) + min(at + 1, 5) for at in range(length))
    expected = (
        2 * (weights * length + geometry.hidden * geometry.vocab) + 4 * geometry.heads * geometry.head_dim * pairs
    )
    assert model_of(geometry).prompt_operations(length) == pytest.approx(expected, rel=0.001)  # norms are weights, too


def test_a_prompt_that_cannot_be_timed_has_no_time() -> None:
    def times(**options: Any) -> list[float | None]:
        return [row["prefill_seconds"] for row in plan("llama-3.1-8b", presets=["kivi-4"], **options)["rows"]]

    assert times(memory="80GB", bandwidth="3TB/s", context="4k") == [None, None]  # no rate of products
    assert times(gpu="h100", context="4k", dtype="float32") == [None, None]  # the sheet's rate is of 16 bits
    assert times(gpu="jetson-orin-nano", context="4k") == [None, None]  # nothing fits
    short = times(gpu="h100", context="1")
    assert short[0] == pytest.approx(model_of(LLAMA_8B).read_bytes / (speed.READ * 3350e9))  # reading the weights


AGREE = ("kivi-2", "kivi-4", "inner-4", "innerq-base", "innerq-small", "higgs-2", "higgs-3", "turboquant-4-3", "fp8")


@pytest.mark.parametrize("gpu", ["rtx-4090", "l4", "a100-40gb", "h200", "jetson-agx-orin"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.2-1b"])
def test_bench_projects_as_the_plan_does(gpu: str, model: str) -> None:
    """Rows and tokens in memory, and the time of attention: the plan's step is the weights and bench's layers."""
    words = [word for name in AGREE for word in ("-p", name)]
    done = program(
        "bench", "--device", gpu, "--model", model, *words, "--length", "8k", "--json",
        "-o", "fused-attention", "-o", "largest-batch", "-o", "longest-generation",
    )  # fmt: skip
    assert done.code == 0, done.err
    benched = {(row["operation"].replace("decode", "fused"), row["scheme"]): row for row in done.json["rows"]}
    geometry, card = CATALOGUE[model].geometry, cards.of_profile(devices.DEVICES[gpu])
    windows = {name: bench_schemes.named(name, geometry).windows for name in AGREE}
    planned = [
        replace(schemes.planned(name), sink=windows[name].sink, recent=windows[name].recent, block=windows[name].block)
        for name in AGREE
    ]
    goal = projection.Goal(model, model_of(geometry), 8192, geometry.context, 1)
    timed = 0
    for row in projection.rows(goal, planned, card):
        name = row["scheme"]
        assert benched["largest-batch", name]["batch"] == row["largest_batch"], name
        longest = benched["longest-generation", name]["longest_length"]
        assert longest == pytest.approx(row["longest_context"], rel=1e-4), name  # a grid of 1 KiB is counted there
        attention = benched["fused-attention", name]["microseconds"]
        one = projection.full(goal.model) if name == "fp16" else None
        one = one or projection.candidate(next(p for p in planned if p.name == name), goal.model, card)
        step = projection.step_of(goal, one)
        if attention is None or step is None:
            assert name == "fp8", name
            continue
        timed += 1
        layers = speed.weights_seconds(step, card) + step.layers * (speed.LAYER + attention * 1e-6)
        assert speed.device_seconds(step, card) == pytest.approx(layers, rel=1e-6), name
    assert timed == len(AGREE)


def test_seconds_a_layer_are_what_a_fp16_step_has_left() -> None:
    """Of one row of 128k tokens, weights and attention taken off."""
    row = next(row.values[0] for row in RECORDED_ROWS if row.values[0]["path"] == "full cache, sdpa cuDNN; CUDA graph"
               and row.values[0]["batch"] == 1)  # fmt: skip
    bandwidth = devices.DEVICES["h200"].bandwidth * 1e9
    reading = model_of(LLAMA_8B).read_bytes / (speed.READ * bandwidth)
    attending = 131072 * LLAMA_8B.kv_bytes_per_token() / (speed.FULL_READ * bandwidth)
    left = row["microseconds"] * 1e-6 - reading - attending
    assert pytest.approx(left / LLAMA_8B.layers, rel=0.06) == speed.LAYER + speed.ATTENTION


@pytest.mark.parametrize(("scheme", "length"), [(s, n) for s in ("higgs-2", "aqua-kv") for n in (2048, 8192, 32768)])
def test_a_gpus_own_time_of_other_schemes_is_planned_within_15_percent(scheme: str, length: int) -> None:
    """By torch's profiler: nothing of the host's is in it."""
    aqua = json.loads((RECORDED / "aqua_tokens-2246769.json").read_text())
    shape = next(shape for shape in aqua["shapes"] if shape["length"] == length)
    name = {"higgs-2": "higgs-2, fused", "aqua-kv": "aqua-kv-2"}[scheme]
    one = projection.candidate(schemes.planned(scheme), model_of(LLAMA_8B), H200)
    goal = projection.Goal("x", one.load.model, length, LLAMA_8B.context, 1)
    step = projection.step_of(goal, one)
    assert step is not None
    planned = speed.device_seconds(step, H200)
    assert planned is not None
    assert planned * 1e6 == pytest.approx(shape["device"][name]["device_microseconds"], rel=0.15)


def test_the_runtime_is_what_compiled_steps_had_besides_tensors() -> None:
    measured = json.loads((RECORDED / "generation-steps-2246769.json").read_text())
    full = next(row for row in measured["rows"] if row["scheme"] == "fp16" and "cuDNN" in row["path"])
    tensors = LLAMA_8B.parameters * 2 + full["batch"] * full["length"] * LLAMA_8B.kv_bytes_per_token()
    assert full["peak_bytes"] - tensors == pytest.approx(planning.RUNTIME, rel=0.01)


def test_kl_is_that_of_the_recorded_files() -> None:
    script = ROOT / "docs" / "ablations" / "measured_kl.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_kl_is_of_the_same_architecture_or_the_worst() -> None:
    llama, other = quality.expected("uniform-4", "llama"), quality.expected("uniform-4", "mistral")
    assert llama is not None and other is not None
    assert (llama.models, llama.alike, llama.kl_class) == (("smollm2-135m",), True, "< 0.05")
    assert llama.kl < 0.01 < llama.upper < llama.anywhere  # the class goes by two standard errors
    assert other.kl == max(quality.expected("uniform-4", kind).kl for kind in ("llama", "qwen2", "gemma3_text"))  # type: ignore[union-attr]
    assert (len(other.models), other.alike, other.kl_class) == (3, False, "> 0.2")
    assert quality.expected("turboquant-2-bytes", "llama") is None


# The card.


def driver(called: bytes = b"NVIDIA H100 80GB HBM3", fails: bool = False) -> Any:
    """The driver's library with one GPU, an H100 by its figures."""
    numbers = {13: 1_980_000, 16: 132, 36: 2_619_000, 37: 5120, 75: 9, 76: 0}

    def name(out: Any, length: int, device: Any) -> int:
        out.value = called
        return 0

    def memory(out: Any, device: Any) -> int:
        ctypes.cast(out, ctypes.POINTER(ctypes.c_size_t))[0] = 85_000_000_000
        return 0

    def attribute(out: Any, number: int, device: Any) -> int:
        ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = numbers[number]
        return 0

    return SimpleNamespace(
        cuInit=lambda flags: int(fails),
        cuDeviceGet=lambda device, index: 0,
        cuDeviceGetName=name,
        cuDeviceTotalMem_v2=memory,
        cuDeviceGetAttribute=attribute,
    )


def test_a_card_that_is_here_is_asked() -> None:
    answers = cards.ask(driver())
    assert answers is not None
    card = cards.of_answers(answers)
    assert (card.name, card.memory, card.bandwidth, card.asked) == ("h100", 85e9, 3350e9, True)
    unknown = cards.of_answers(cards.ask(driver(b"NVIDIA H900")))  # type: ignore[arg-type]
    assert unknown.bandwidth == pytest.approx(3.352e12, rel=1e-3)  # 5120 bits, 2619 MHz, both edges
    assert unknown.issue_rate == devices.DEVICES["h100"].issue_rate
    assert cards.ask(driver(fails=True)) is None


def test_a_named_card_that_is_here_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cards, "ask", lambda: cards.Answers("NVIDIA H100 80GB HBM3", 84_000_000_000, 132, 1, 1, 1, (9, 0))
    )
    for gpu in (None, "h100"):
        record = run_plan(PlanOptions(model="llama-3.2-1b", gpu=gpu), print)["gpu"]
        assert (record["memory_bytes"], record["asked"]) == (84_000_000_000, True)
    assert not run_plan(PlanOptions(model="llama-3.2-1b", gpu="l4"), print)["gpu"]["asked"]


def test_an_old_gpu_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_plan(PlanOptions(model="llama-3.2-1b", gpu="jetson-xavier-nx", preset=["kivi-2"]), print)
    assert "compute capability 7.2" in result["rows"][1]["step"] and "eager" in result["rows"][1]["step"]


# The script that compares a plan with a GPU.


def test_the_script_measures_row_by_row_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU, which has no plan of its own: measured figures, and the parts."""
    monkeypatch.syspath_prepend(str(RECORDED))
    script = importlib.import_module("plan")
    words = ["--device", "cpu", "--dtype", "float32", "--model", "tiny", "--out", str(tmp_path), "--lengths", "256,512"]
    assert script.main([*words, "--schemes", "kivi-4,higgs-2", "--seconds", "1000"]) == 0
    saved = json.loads((tmp_path / "plan.json").read_text())
    rows = saved["rows"]
    jobs = [(row["what"], row["scheme"], row["length"]) for row in rows]
    both = [("decode", name, length) for length in (256, 512) for name in ("kivi-4", "higgs-2", "fp16")]
    assert jobs == [*both, ("prefill", "kivi-4", 256), ("prefill", "fp16", 256), ("prefill-chunks", "kivi-4", 256)]
    assert [row for row in rows if "refused" in row] == []
    assert all(row["measured"]["tokens_per_second"] > 0 for row in rows[:6]) and saved["card"] is None
    saved["rows"] = [*rows[:4], {**rows[4], "refused": "a mistake"}]
    (tmp_path / "plan.json").write_text(json.dumps(saved))
    capsys.readouterr()
    assert script.main([*words, "--schemes", "kivi-4,higgs-2", "--seconds", "-1"]) == 1
    assert json.loads((tmp_path / "plan.json").read_text())["rows"] == saved["rows"]  # nothing began
    assert capsys.readouterr().out.count("not measured, -1 s are over") == 5
    monkeypatch.setitem(script.MEASURES, "decode", lambda run, job: time.sleep(60))
    monkeypatch.setattr(script, "cleared", lambda run: None)
    late = script.measure(None, script.Job("decode", "kivi-4", 256), 0)
    assert late["refused"] == "TimeoutError: not done 35 s behind --seconds"


def test_the_script_compares_with_limits() -> None:
    script = runpy.run_path(str(RECORDED / "plan.py"))
    ratios = [{"device_bytes": 0.96, "tokens_per_second": 1.2}, {"device_bytes": 1.02, "tokens_per_second": 0.9}]
    rows = [{"what": "decode", "planned_to_measured": ratio} for ratio in ratios]
    said = "device_bytes within 5%: 2 of 2, worst 4.0%; tokens_per_second within 15%: 1 of 2, worst 20.0%"
    assert script["verdict"](rows) == said
    more = "; prefill's device_bytes, without a limit: +800.0% to +800.0%"
    assert script["verdict"]([*rows, {"what": "prefill", "planned_to_measured": {"device_bytes": 9.0}}]) == said + more


# The plan.


def test_longer_or_more_never_takes_less() -> None:
    for name in ("kivi-2", "mixkvq", "aqua-kv"):
        load = projection.candidate(schemes.planned(name), model_of(LLAMA_8B), H200).load
        lengths = [load.peak(2, length, planning.CHUNK) for length in range(1, 6000, 7)]
        assert lengths == sorted(lengths)
        batches = [load.decode(batch, 4096).total for batch in range(1, 200)]
        assert batches == sorted(batches)


@pytest.mark.parametrize(("limit", "most", "answer"), [(7, 100, 7), (0, 100, 0), (100, 100, 100), (5, 3, 3)])
def test_the_largest_that_fits(limit: int, most: int, answer: int) -> None:
    assert planning.largest(lambda n: n <= limit, most) == answer


def test_rows_fill_the_memory_and_not_more() -> None:
    result = run_plan(PlanOptions(model="llama-3.1-8b", gpu="rtx-4090", context="32k"), print)
    memory = result["gpu"]["memory_bytes"]
    full = projection.full(model_of(LLAMA_8B)).load
    first = result["rows"][0]
    assert first["scheme"] == "fp16" and first["next"] is None
    longest, batch = first["longest_context"], first["largest_batch"]
    assert full.peak(1, longest, planning.CHUNK) <= memory < full.peak(1, longest + 1, planning.CHUNK)
    assert full.peak(batch, 32768, planning.CHUNK) <= memory < full.peak(batch + 1, 32768, planning.CHUNK)
    sizes = [row["cache_bytes"] for row in result["rows"]]
    assert sizes == sorted(sizes, reverse=True)


def test_no_row_is_longer_than_the_model_and_a_longer_context_is_said() -> None:
    lines: list[str] = []
    result = run_plan(PlanOptions(model="mistral-7b-v0.3", gpu="h200", context="128k"), lines.append)
    assert result["context"] == 32768
    assert lines == ["--context 128k: mistral-7b-v0.3 is made for 32,768 tokens; planned are those"]
    assert {row["longest_context"] for row in result["rows"]} == {32768}


def test_a_model_that_does_not_fit_is_said_not_to() -> None:
    result = run_plan(PlanOptions(model="llama-3.1-8b", gpu="jetson-orin-nano"), print)
    assert {row["fits"] for row in result["rows"]} == {"no"} and result["recommended"] is None
    assert {(row["longest_context"], row["largest_batch"]) for row in result["rows"]} == {(0, 0)}
    assert {_cells(row)[5] for row in result["rows"]} == {None}  # no speed of what does not run


def test_a_budget_moves_the_recommendation() -> None:
    def best(budget: float | None) -> Any:
        return run_plan(PlanOptions(model="qwen2.5-7b", gpu="rtx-4090", context="32k", budget_kl=budget), print)[
            "recommended"
        ]

    assert (best(None), best(0.006)) == ("kivi-4", "uniform-8")  # KIVI-4's 0.0049 has 0.0012 of two standard errors
    assert best(0.5) == "kivi-2" and best(1e-6) is None
    result = run_plan(PlanOptions(model="qwen2.5-7b", gpu="rtx-4090", budget_kl=1e-6), print)
    assert result["recommended_why"] is None


def row_of(scheme: str, **figures: Any) -> Any:
    usual = {
        "fits": "yes",
        "tokens_per_second": 40.0,
        "cache_bytes": 100,
        "kl_upper": 0.001,
        "kl_upper_anywhere": 0.001,
    }
    return {"scheme": scheme, "step": "CUDA graph", **usual, **figures}


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([row_of("a"), row_of("small", cache_bytes=50, tokens_per_second=39)], "small"),  # as good as as fast
        ([row_of("a"), row_of("small", cache_bytes=50, tokens_per_second=12)], "a"),
        ([row_of("a"), row_of("small", cache_bytes=50, kl_upper=0.011)], "a"),
        ([row_of("a"), row_of("fragile", cache_bytes=50, kl_upper_anywhere=1.2)], "a"),
        ([row_of("fragile", cache_bytes=50, kl_upper_anywhere=1.2)], "fragile"),  # nothing held everywhere
        ([row_of("a", fits="no"), row_of("chunks", fits="in chunks", tokens_per_second=1)], "chunks"),
        ([row_of("a", tokens_per_second=None), row_of("small", tokens_per_second=None, cache_bytes=9)], "small"),
        ([row_of("a", tokens_per_second=None),
          row_of("small", tokens_per_second=None, cache_bytes=9, step="eager, blocks decoded at each step")], "a"),
        ([row_of("unmeasured", kl_upper=None)], None),
    ],
)  # fmt: skip
def test_the_recommendation_is_quick_and_holds(rows: list[Any], best: str | None) -> None:
    choice = projection.recommended([row_of("fp16"), *rows], None)
    assert (choice and choice.scheme) == best


EVERYWHERE = "KL up to 0.00100 on every measured model (limit 0.01); "


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([row_of("a")], EVERYWHERE + "the only one that fits and holds there"),
        ([row_of("a"), row_of("loose", kl_upper=0.02)], EVERYWHERE + "the only one that fits and holds there"),
        ([row_of("a"), row_of("slow", tokens_per_second=3)], EVERYWHERE + "the fastest of those that fit and hold there"),
        ([row_of("a"), row_of("large", cache_bytes=200)],
         EVERYWHERE + "of those that fit and hold there, the smallest cache within 5% of the fastest"),
        ([row_of("fragile", kl_upper_anywhere=1.2)],
         "KL up to 0.00100 on this architecture, though not on every measured model (limit 0.01); the only one "
         "that fits and holds there"),
        ([row_of("a", tokens_per_second=None), row_of("b", cache_bytes=200, tokens_per_second=None)],
         EVERYWHERE + "the smallest cache of those that fit, hold there and have a kernel, as no speed is known"),
    ],
)  # fmt: skip
def test_the_recommendation_says_why(rows: list[Any], why: str) -> None:
    choice = projection.recommended([row_of("fp16"), *rows], None)
    assert choice is not None and choice.why == why


def test_a_memory_without_bandwidth_has_no_speed() -> None:
    rows = run_plan(PlanOptions(model="llama-3.2-3b", memory="24GB"), print)["rows"]
    assert {row["tokens_per_second"] for row in rows} == {None}
    rows = run_plan(PlanOptions(model="llama-3.2-3b", memory="24GB", bandwidth="1008GB/s"), print)["rows"]
    speeds = {row["scheme"]: row["tokens_per_second"] for row in rows}
    # what is decoded before attention is bound by a rate that --bandwidth does not tell
    assert {name for name, speed in speeds.items() if speed is None} == {"fp8", "mixkvq", "aqua-kv"}
    assert speeds["kivi-4"] > speeds["fp16"] > 0


def test_weights_are_taken_as_given() -> None:
    result = run_plan(PlanOptions(model="llama-3.1-8b", gpu="rtx-4090", weights="5.7GB"), print)
    assert result["model"]["weights_bytes"] == 5.7e9 and result["rows"][0]["longest_context"] > 100_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpu": "rtx-409"}, r"--gpu rtx-409: no such profile; did you mean rtx-4090"),
        ({"memory": "24"}, r"--memory '24': .* unit of MB, GB, TB, MiB, GiB, TiB"),
        ({"memory": "24Gb/s"}, "--memory '24Gb/s'"),
        ({"memory": "24GB", "bandwidth": "1008GB"}, r"--bandwidth '1008GB': .* MB/s"),
        ({"memory": "0GB"}, "not a positive"),
        ({"bandwidth": "1008GB/s"}, "--bandwidth 1008GB/s goes with --memory"),
        ({"gpu": "l4", "memory": "24GB"}, "give one of the two"),
        ({"gpu": "l4", "context": "12m"}, "--context '12m': not a whole number of tokens"),
        ({"gpu": "l4", "preset": ["kivi-9"]}, r"--preset 'kivi-9': cannot be planned; did you mean"),
        ({"gpu": "l4", "preset": ["kivi-2+nothing"]}, "codec 'nothing'"),
        ({"gpu": "l4", "budget_kl": -1.0}, "--budget-kl -1: must be positive"),
        ({"gpu": "l4", "dtype": "int8"}, "--dtype int8: allowed are bfloat16, float16, float32"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_plan(PlanOptions(model="llama-3.2-1b", **options), print)


def test_no_gpu_and_none_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "here", lambda: None)
    with pytest.raises(UsageError, match="no GPU was found here"):
        run_plan(PlanOptions(model="llama-3.2-1b"), print)


def test_models_that_cannot_be_planned() -> None:
    with pytest.raises(UnsupportedModel, match="all its 32 layers attend to a window of 2047 tokens"):
        run_plan(PlanOptions(model="phi-3-mini-4k", gpu="l4"), print)


def test_experts_need_the_size_of_their_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2 | {"num_local_experts": 8}))
    with pytest.raises(UsageError, match="has experts"):
        run_plan(PlanOptions(model=str(tmp_path), gpu="h100"), print)
    rows = run_plan(PlanOptions(model=str(tmp_path), gpu="h100", weights="40GB"), print)["rows"]
    assert {row["tokens_per_second"] for row in rows} == {None}


@pytest.mark.parametrize(
    ("text", "size"), [("24GB", 24e9), ("22.5 GiB", 22.5 * 2**30), ("1.5tb", 1.5e12), ("512MiB", 2**29)]
)
def test_sizes_are_read(text: str, size: float) -> None:
    assert units.bytes_of(text, "--memory") == size
    assert units.tokens_of("128k", "--context") == 131072 == units.tokens_of("131072", "--context")


# The command.


def kvcal(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvcal", "plan", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False
    )


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-r1-distill-qwen-1.5b", "granite-3.3-8b"])
def test_the_table_fits_80_columns(model: str) -> None:
    done = kvcal("-m", model, "--gpu", "rtx-4090", "--context", "32k", "--budget-kl", "0.05")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    why = next(number for number, line in enumerate(lines) if line.startswith("recommended: kvcal ")) + 1
    assert lines[why].startswith("why ") and "KL up to" in lines[why]
    assert max(len(line.rstrip()) for line in lines) <= 80, max(lines, key=len)
    assert next(line for line in lines if line.startswith("fp16"))
    commands = [line.split(maxsplit=1)[1] for line in lines if re.match(r"[a-z0-9-]+ +kvcal ", line)]
    assert len(commands) == len(schemes.DEFAULT) and all(command.startswith("kvcal ") for command in commands)


def test_notes_are_of_the_rows_that_stand_there() -> None:
    """Chunks are explained where a row needs them; the KL's windows wherever there is one."""
    short, long = (
        _foot(run_plan(PlanOptions(model="llama-3.1-8b", gpu="rtx-4090", context=context), print))
        for context in ("32k", "64k")
    )
    [chunks] = [text for text in long if text.startswith("chunks: ")]
    assert "at most 26.9 a row" in chunks and not any(text.startswith("chunks: ") for text in short)
    assert all(
        any("windows of 1,024 tokens and grows with length" in text for text in lines) for lines in (short, long)
    )


def test_speed_is_of_the_planned_rows_and_of_the_largest_batch() -> None:
    def rows(batch: int) -> Any:
        options = PlanOptions(model="llama-3.1-8b", gpu="rtx-4090", context="32k", batch=batch, preset=["kivi-4"])
        return run_plan(options, print)["rows"][1]

    one, most = rows(1), rows(4)
    assert one["largest_batch"] == 4 and one["tokens_per_second"] < 50
    assert one["tokens_per_second_of_largest_batch"] == most["tokens_per_second"] > 150
    assert _cells(one)[5:7] == ["46.0", "4: 153"]


def test_cells_of_a_small_model_on_a_large_card_stay_short() -> None:
    rows = run_plan(PlanOptions(model="tiny", gpu="h200"), print)["rows"]
    assert {_cells(row)[4] for row in rows} == {"< 1 ms"}
    assert re.fullmatch(r"[\d,]+: \d+k", _cells(rows[0])[6])


def test_wide_and_json_say_all() -> None:
    wide = kvcal("-m", "llama-3.2-3b", "--gpu", "l4", "--wide")
    assert "prefill peak GiB" in wide.stdout and "CUDA graph" in wide.stdout
    result = json.loads(kvcal("-m", "llama-3.2-3b", "--gpu", "l4", "--json").stdout)
    page = (ROOT / "docs" / "plan.md").read_text()
    parts = [result, result["model"], result["gpu"], result["assumed"], result["rows"][1], result["rows"][1]["bytes"]]
    undocumented = {key for part in parts for key in part if f"`{key}`" not in page}
    assert undocumented == set()


def test_it_starts_quickly_and_imports_neither_torch_nor_transformers() -> None:
    script = (
        "import sys\nfrom kvcal.cli.app import main\n"
        "sys.argv = ['kvcal', 'plan', '-m', 'llama-3.1-8b', '--gpu', 'rtx-4090', '--json']\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
        "print(sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    loaded = set(re.findall(r"'(\w+)'", done.stderr))
    assert "kvcal" in loaded and not loaded & {"torch", "transformers", "numpy"}
    taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert taken < 2.5, f"{taken:.2f} s of CPU time"


def test_every_planned_command_parses() -> None:
    """`next` of every scheme, by the program's own parser."""
    import kvcal.cli.app  # noqa: F401, whose commands options_of asks
    from kvcal.cli.defaults import options_of

    for scheme, windows in product([*schemes.SCHEMES.values(), schemes.planned("kivi-4+kivi-2")], (True, False)):
        verb, *words = shlex.split(projection.command_of(scheme, "llama-3.1-8b", windows))[1:]
        if verb == "fit":
            assert words.pop(0) == "aqua-kv"
        elif not words[0].startswith("-"):
            assert words.pop(0) in PRESETS
        pairs = {name.lstrip("-").replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
        assert pairs.pop("m") == "llama-3.1-8b"
        if "residual" in pairs:
            pairs["backbone"] = pairs.pop("residual")
        if pairs:
            assert options_of("preset" if verb == "preset" else "fit-predictors", pairs)
        assert windows or verb == "fit-predictors" or (pairs["sink"], pairs["recent"]) == ("0", "0")
    with pytest.raises(KVCalError):
        schemes.planned("higgs-9+higgs-9")


def test_a_composed_scheme_is_made_by_its_command() -> None:
    """kivi-2-g128 needs a block of 128: its command names all that is not the usual."""
    one = projection.candidate(schemes.planned("kivi-2-g128"), model_of(LLAMA_8B), H200)
    command = projection.command_of(schemes.planned("kivi-2-g128"), "m")
    assert command == "kvcal preset --keys kivi-2-g128 --values kivi-2-g128 --sink 32 --recent 96 --block 128 -m m"
    pair = bench_schemes.named("kivi-2-g128", LLAMA_8B)
    built = Preset("kivi-2-g128", "kivi-2-g128", sink=32, recent=96, block=128).composition
    shape = Shape(8, 128, 128)
    codecs = LayerCodecs(*(built.codec(0, 32, role)(shape, role) for role in ("key", "value")))
    assert codecs.bits_per_value() == pair.stored_bits == one.bits
