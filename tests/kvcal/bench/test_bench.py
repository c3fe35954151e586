"""`kvcal bench` and `kvcal doctor`: projections against the paper, measured rows on a CPU, what is refused."""

from __future__ import annotations

import csv
import json
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcal.bench import (
    caches,
    decoding,
    devices,
    distortion,
    filled,
    fused,
    generation,
    jetson,
    kernels,
    layer,
    measure,
    memory,
    needed,
    operation,
    operations,
    paper,
    peers,
    quantising,
    roofline,
    rows,
    schemes,
    target,
    timing,
)
from kvcal.bench.layer import Case
from kvcal.bench.operation import Operation
from kvcal.bench.operations import OPERATIONS
from kvcal.bench.planning import memory as planning
from kvcal.bench.target import Target
from kvcal.bench.timing import Clock
from kvcal.commands import bench as command
from kvcal.commands import bench_measured, bench_options, bench_projected, doctor
from kvcal.commands.options import BenchOptions
from kvcal.methods.registry import codec_maker
from kvcal.models.catalogue import CATALOGUE
from kvcal.models.geometry import Geometry
from kvcal.report import bench as report
from kvcal.report import checkout
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import (
    CODECS,
    ByHead,
    Codec,
    Exact,
    Float8,
    Higgs,
    MixKVQ,
    Predicted,
    ResidualVQ,
    Scaled,
    Shape,
    Squat,
    Transform,
    Uniform,
    ragged,
)  # fmt: skip
from kvcal_artifacts.errors import KernelsUnavailable, KVCalError, UsageError
from kvcal_artifacts.paths import codebook
from kvcal_artifacts.paths.preflight import verdicts
from kvcal_artifacts.scheme import HeavyHitters, LayerCodecs, Scheme, Windows
from kvcal_artifacts.storage import block_store
from kvcal_artifacts.storage.plan import Plan
from kvcal_kernels import quantise as quantise_kernels
from kvcal_kernels.quantise import Layer, reference
from kvcal_kernels.residual_vq import append as vq_append
from tests.artifacts.paths.test_fused import Card
from tests.support import quick_clock
from tests.support.architectures import TINY
from tests.support.interpreted import interpreted, needs_triton
from tests.support.models_fixture import Done, kvcal
from tests.support.pages import ROOT

CPU = torch.device("cpu")
SMALL = replace(CATALOGUE["tiny"].geometry, heads=4, kv_heads=2, head_dim=32, hidden=64, intermediate=96)
LENGTH = 200  # two blocks of 32 behind a sink of 32 and a recent window of 96
STABLE = [
    "operation", "scheme", "model", "batch", "length", "microseconds", "stored_bits", "fraction_of_copy", "ratio_to_fp16",
    "fp16_backend", "projected",
]  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ceilings from small buffers, and nothing kept from one test to the next."""
    quick_clock.quicken(monkeypatch)
    yield
    layer.fill.cache_clear()


def case(
    name: str, batch: int = 2, length: int = LENGTH, geometry: Geometry = SMALL, dtype: torch.dtype = torch.float32
) -> Case:
    return Case(schemes.named(name, geometry), geometry, batch, length, CPU, dtype)


# Projections.


@pytest.fixture(scope="module")
def table_4() -> list[rows.Row]:
    return jetson.table_4()


def test_fp16_totals_of_table_4_are_within_5_percent(table_4: list[rows.Row]) -> None:
    totals = {row.length: row for row in table_4 if row.scheme == "fp16" and row.operation.endswith("total")}
    assert list(totals) == list(paper.LENGTHS)
    for length, row in totals.items():
        reported = paper.TABLE_4["fp16"]["total"][paper.LENGTHS.index(length)]
        fitted = length in (1024, 16384)
        assert row.more["used_for_fit"] == fitted
        assert row.microseconds == pytest.approx(reported, rel=1e-9 if fitted else 0.05)


def test_the_fit_is_plausible_for_the_board() -> None:
    machine = jetson.fitted()
    assert 0.9 < machine.efficiency < 1
    assert 0 < machine.launch < 10


def test_table_4_is_complete_and_adds_up(table_4: list[rows.Row]) -> None:
    assert len(table_4) == 6 * 3 * 7
    assert all(row.projected for row in table_4)
    cells = {(row.scheme, row.operation.split()[-1], row.length): row for row in table_4}
    for scheme, parts in paper.TABLE_4.items():
        for i, length in enumerate(paper.LENGTHS):
            k, v, total = (cells[scheme, part, length] for part in paper.PARTS)
            assert k.microseconds + v.microseconds == pytest.approx(total.microseconds)  # type: ignore[operator]
            assert parts["K"][i] + parts["V"][i] == pytest.approx(parts["total"][i], abs=2)  # as printed in the paper


@pytest.mark.parametrize(
    ("scheme", "part", "rate"),
    [("fp16", "K", 58.4), ("innerq-base", "K", 39.4), ("innerq-small", "V", 25.5), ("kivi-2", "K", 23.7)],
)
def test_implied_bandwidths(table_4: list[rows.Row], scheme: str, part: str, rate: float) -> None:
    """The figures that the project's notes computed by hand from the paper."""
    row = next(r for r in table_4 if (r.scheme, r.operation.split()[-1], r.length) == (scheme, part, 32768))
    assert row.more["paper_gb_per_s"] == pytest.approx(rate, rel=0.01)


def test_sharing_reads_a_quarter(table_4: list[rows.Row]) -> None:
    launch = jetson.fitted().launch
    for row in table_4:
        launches = 2 if row.operation.endswith("total") else 1
        reading = row.microseconds - launches * launch  # type: ignore[operator]
        assert row.more["shared_microseconds"] - launches * launch == pytest.approx(reading / 4)


def test_bits_come_from_the_codecs(table_4: list[rows.Row]) -> None:
    bits = {row.scheme: row.stored_bits for row in table_4 if row.operation.endswith("total")}
    assert bits == {
        "fp16": 16, "kivi-2": 3, "turboquant-4-3": 3.625, "innerq-base": 3.5, "innerq-hybrid": 3.25, "innerq-small": 3,
    }  # fmt: skip


def test_a_roofline_takes_the_slower_of_bytes_and_instructions() -> None:
    machine = roofline.Machine(devices.device("jetson-orin-nano"), 1.0, 5.0)
    assert machine.time(68e3) == pytest.approx(5 + 1)  # 68 GB/s
    rate = machine.device.issue_rate
    assert rate == 8 * 128 * 625e6
    assert machine.time(68e3, elements=rate / 1e6, instructions=3) == pytest.approx(5 + 3)
    assert machine.implied(68e3, 6.0) == pytest.approx(68)


def test_ours_are_projected_on_the_orin_nano_and_refused_on_the_xavier() -> None:
    geometry = CATALOGUE["llama-3.1-8b"].geometry
    own = [schemes.named("innerq-base", geometry)]
    full, ours = jetson.projected(devices.device("jetson-orin-nano"), own, geometry, "m", 1, 32768)
    assert full.projected and ours.projected
    tokens = (32768 - 128) // 32 * 32
    assert ours.bytes == 2 * 8 * 128 * (tokens * 3.5 + (32768 - tokens) * 16) / 8
    assert ours.ratio_to_fp16 == pytest.approx(full.microseconds / ours.microseconds)  # type: ignore[operator]
    full, refused = jetson.projected(devices.device("jetson-xavier-nx"), own, geometry, "m", 1, 4096)
    assert full.microseconds is not None
    assert refused.microseconds is None
    assert "7.2" in str(refused.refused)


def test_grids_of_two_bits_are_projected_faster_than_of_four() -> None:
    """Bytes limit both on the Orin Nano: the instructions that they were timed to take less time there."""
    geometry = CATALOGUE["llama-3.1-8b"].geometry
    own = [schemes.named(f"higgs-{bits}", geometry) for bits in (2, 4)]
    board = devices.device("jetson-orin-nano")
    _, two, four = jetson.projected(board, own, geometry, "m", 1, 32768)
    for row, count in ((two, 3.44), (four, 4.36)):
        issuing = 2 * 32768 * 8 * 128 * count / (8 * 128 * 625e6) * 1e6
        reading = row.bytes / (0.967 * 68e9) * 1e6  # type: ignore[operator]
        bound = max(issuing, reading)
        assert row.more["bound"] == ("bytes" if reading > issuing else "instructions")
        assert row.microseconds == pytest.approx(10 + bound, rel=1e-3)
    assert two.microseconds < four.microseconds  # type: ignore[operator]


@pytest.mark.parametrize(("model", "instructions"), [("llama-3.1-8b", 1.59), ("qwen2.5-7b", 2.21)])
def test_instructions_are_those_of_the_models_heads(model: str, instructions: float) -> None:
    """Of a scheme that was counted and not timed; seven query heads a kv head in the second."""
    geometry = CATALOGUE[model].geometry
    own = [replace(schemes.named("inner-3", geometry), name="mine")]
    _, row = jetson.projected(devices.device("jetson-orin-nano"), own, geometry, model, 1, 4096)
    assert row.more["instructions_per_element"] == instructions


AT_128, AT_4, AT_8 = "head_dim 128", "4 query heads a kv head", "8 query heads a kv head"


@pytest.mark.parametrize(
    ("heads", "dim", "name", "said"),
    [
        (32, 128, "inner-4", []),
        (32, 64, "inner-4", [AT_128]),
        (64, 128, "inner-4", [AT_4]),
        (64, 128, "inner-4 counted", []),
        (56, 128, "inner-4 counted", []),
        (128, 128, "inner-4 counted", [AT_8]),
        (128, 64, "inner-4 counted", [AT_128, AT_8]),
        (8, 128, "inner-4", []),
        (64, 128, "higgs-2", [AT_4]),
        (64, 128, "kivi-2", [AT_4]),
        (64, 128, "kivi-2 counted", []),
        (64, 128, "squat-pre-2", [AT_4]),
    ],
)
def test_projections_say_of_which_shape_instructions_were_counted(
    heads: int, dim: int, name: str, said: list[str]
) -> None:
    geometry = replace(CATALOGUE["llama-3.1-8b"].geometry, heads=heads, kv_heads=8, head_dim=dim)
    how = "counted" if name.endswith("counted") else "timed"
    own = [replace(schemes.named(name.removesuffix(" counted"), geometry), name=name)]
    full, row = jetson.projected(devices.device("jetson-orin-nano"), own, geometry, "m", 1, 4096)
    note = f"instructions {how} at {' and '.join(said)}" if said else None
    assert row.microseconds is not None and row.more.get("note") == note
    assert full.more.get("note") is None
    [table] = report.tables({"rows": [full.as_dict(), row.as_dict()]}, wide=True)
    assert (note or "limit: ") in table.rows[1][-1]


def test_schemes_that_are_not_counted_have_no_projection() -> None:
    geometry = CATALOGUE["llama-3.1-8b"].geometry
    own = replace(schemes.named("uniform-4", geometry), frame="pre_rope")
    _, row = jetson.projected(devices.device("jetson-orin-nano"), [own], geometry, "m", 1, 4096)
    assert row.microseconds is None
    assert row.refused == "instructions of the compiled kernel are not counted for asymmetric 4 before RoPE"


UNCOUNTED = "instructions of the compiled kernels are not counted for vector codes"


@pytest.mark.parametrize("name", schemes.scheme_names())
def test_presets_that_the_kernel_takes_are_counted(name: str) -> None:
    geometry = CATALOGUE["llama-3.1-8b"].geometry
    own = case(name, 1, 4096, geometry)
    _, row = jetson.projected(devices.device("jetson-orin-nano"), [own.scheme], geometry, "m", 1, 4096)
    assert row.refused == (UNCOUNTED if name.startswith("vqkv") else fused.refuses_anywhere(own))


@pytest.mark.parametrize(
    ("name", "length", "why"),
    [
        ("aqua-kv-2", 4096, "layers are predicted from reconstructions of others"),
        ("fp8", 4096, "no fused kernel reads float8"),
        ("exact", 4096, "no fused kernel reads exact"),
        ("mixkvq", 4096, "tiers take another size in every block"),
        ("kivi-2", 159, "nothing is packed: needs more than 159 tokens"),
        ("mixkvq-16-16", 4096, None),
        ("kivi-2", 160, None),
    ],
)
def test_what_the_fused_kernel_does_not_take_has_no_projection(name: str, length: int, why: str | None) -> None:
    """The answer is that of the measured rows."""
    geometry = CATALOGUE["llama-3.1-8b"].geometry
    own = case(name, 1, length, geometry)
    _, row = jetson.projected(devices.device("jetson-orin-nano"), [own.scheme], geometry, "m", 1, length)
    assert row.refused == fused.refuses_anywhere(own)
    assert (row.microseconds is None) == (row.ratio_to_fp16 is None) == (why is not None)
    assert why is None or why in str(row.refused)


@pytest.mark.parametrize(
    ("batch", "length", "missing"),
    [
        (63, 32768, ()),
        (64, 32768, ("fp16",)),  # 8 GiB of 8: nothing else would fit
        (1, 4096 * 1024, ("fp16",)),
        (256, 32768, ("fp16", "inner-4")),
        (1024, 32768, ("fp16", "inner-4", "higgs-2")),
    ],
)
def test_layers_that_do_not_fit_the_device_have_no_projection(
    batch: int, length: int, missing: tuple[str, ...]
) -> None:
    geometry, board = CATALOGUE["llama-3.1-8b"].geometry, devices.device("jetson-orin-nano")
    own = [schemes.named(name, geometry) for name in ("inner-4", "higgs-2")]
    found = jetson.projected(board, own, geometry, "m", batch, length)
    assert tuple(row.scheme for row in found if row.microseconds is None) == missing
    for row in found:
        assert (row.scheme in missing) == (row.bytes >= 8 * 2**30)  # type: ignore[operator]
        assert (row.ratio_to_fp16 is None) == bool(missing)
        said = f"keys and values of one layer take {row.bytes / 2**30:.1f} GiB, the device has 8"  # type: ignore[operator]
        assert row.refused == (said if row.scheme in missing else None)


def test_a_projection_that_does_not_fit_is_shown() -> None:
    done = kvcal("bench", "--device", "jetson-orin-nano", "--length", "128k", "--batch", 32, "-p", "higgs-2", "--wide")
    line = next(line for line in done.out.splitlines() if line.startswith("decode-attention"))
    assert done.code == 0 and "the device has 8" in line


def test_every_fact_of_a_device_has_a_source() -> None:
    for device in devices.DEVICES.values():
        assert {"sms", "clock", "bandwidth", "memory"} <= set(device.sources)
        assert all(device.sources.values())
        known_too = {name for name in ("usable", "tflops") if getattr(device, name) is not None}
        assert known_too <= set(device.sources)
        assert device.usable is None or 0.9 * device.memory < device.usable < 1.01 * device.memory


NVIDIA = re.compile(r"NVIDIA \w.* (data sheet|white paper|product page)\b|https://(www|developer)\.nvidia\.com/")


@pytest.mark.parametrize("name", devices.DEVICES)
def test_memory_bandwidth_and_rate_are_nvidias(name: str) -> None:
    """Each has a source of NVIDIA, which gives the very figure where it names any."""
    device = devices.DEVICES[name]
    for field in ("memory", "bandwidth", *(["tflops"] if device.tflops else [])):
        assert NVIDIA.match(device.sources[field]), (field, device.sources[field])
    figures = {
        "memory": f"{device.memory:g} GB",
        "bandwidth": f"{device.bandwidth:,.0f} GB/s" if name.startswith("a100") else f"{device.bandwidth:g} GB/s",
        "tflops": f"{device.tflops or 0:g} TFLOPS",
    }
    if device.jetson or name in ("h100", "h200", "b200", "l4"):  # TB/s, totals of eight GPUs, rates with sparsity
        return
    for field, figure in figures.items():
        shown = device.sources[field].replace("362.05", "362")
        assert figure in shown, (field, figure, device.sources[field])


@pytest.mark.parametrize("name", ["rtx-3090", "rtx-4090", "rtx-5090", "l4", "a10", "l40s", "a100-40gb", "a100-80gb"])
def test_rates_are_those_of_the_cores(name: str) -> None:
    """Operations of 16 bits that an SM does in a clock, float32 sums: 2048 of a GA100, 1024 of a data-centre card's
    GA102 or AD10x, half of that of GeForce. The L4 had the 60 SMs of the whole chip once, of which it has 58.
    """
    device = devices.DEVICES[name]
    per_clock = 512 if name.startswith("rtx") else 2048 if device.capability == (8, 0) else 1024
    assert device.sms * device.clock * 1e6 * per_clock == pytest.approx((device.tflops or 0) * 1e12, rel=0.015)


def test_the_page_has_the_profiles() -> None:
    page = (ROOT / "docs" / "lab" / "benchmarks.md").read_text("utf-8")
    for device in devices.DEVICES.values():
        capability = ".".join(map(str, device.capability))
        cells = (capability, device.sms, device.clock, device.bandwidth, device.memory)
        row = " | ".join(
            (f"| `{device.name}`", *(f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in cells))
        )
        assert f"{row} | " in page, row


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("NVIDIA Jetson Orin Nano Developer Kit", "jetson-orin-nano"),
        ("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super", "jetson-orin-nano-super"),
        ("NVIDIA Jetson Xavier NX Developer Kit", "jetson-xavier-nx"),
        ("Jetson-AGX", "jetson-agx-xavier"),
        ("NVIDIA Jetson AGX Orin Developer Kit", "jetson-agx-orin"),
        ("NVIDIA Jetson AGX Thor Developer Kit", "jetson-thor"),
        ("NVIDIA Orin NX Developer Kit", "jetson-orin-nx"),
        ("NVIDIA Jetson AGX Orin Industrial", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
    ],
)
def test_machines_are_recognised(called: str, name: str | None) -> None:
    found = devices.recognised(called)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("called", "memory", "name"),
    [
        ("NVIDIA Jetson Orin Nano Developer Kit", 7.44, "jetson-orin-nano"),
        ("NVIDIA Jetson Orin Nano Developer Kit", 3.4, None),
        ("NVIDIA Jetson Xavier NX Developer Kit", 6.7, "jetson-xavier-nx"),
        ("NVIDIA Jetson Xavier NX Developer Kit", 15.3, None),
        ("NVIDIA Orin NX Developer Kit", 7.4, None),
        ("NVIDIA Jetson AGX Orin Developer Kit", 61.4, "jetson-agx-orin"),
        ("NVIDIA Jetson AGX Orin Developer Kit", 29.8, None),
        ("NVIDIA H200", 139.8, "h200"),
    ],
)
def test_another_size_of_that_name_is_not_labelled_so(called: str, memory: float, name: str | None) -> None:
    found = devices.recognised(called, memory)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("called", "memory", "sms", "name"),
    [
        ("Orin", 61.4, 16, "jetson-agx-orin"),
        ("Orin", 29.8, 14, None),
        ("Orin", 15.3, 8, "jetson-orin-nx"),
        ("Orin (nvgpu)", 7.4, 8, None),  # Orin Nano, Orin Nano Super or Orin NX
        ("Xavier", 7.4, 6, "jetson-xavier-nx"),
        ("Xavier", 31.0, 8, "jetson-agx-xavier"),
        ("NVIDIA Thor", 122.8, 20, "jetson-thor"),
        ("NVIDIA GB10", 122.8, 20, None),
    ],
)
def test_a_jetson_without_a_device_tree_is_known_by_its_gpu(
    called: str, memory: float, sms: int, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container. With no profile it is measured all the same, but for what is no Jetson."""
    monkeypatch.setattr(devices, "BOARD", tmp_path / "none")
    facts = SimpleNamespace(is_integrated=True, total_memory=memory * 2**30, multi_processor_count=sms)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: called)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: facts)
    found = target.target("jetson")
    if "GB10" in called:
        assert found.device is None and not found.jetson
        return
    assert (found.name, found.device) == (name or f"a Jetson ({called})", torch.device("cuda"))
    assert found.jetson and found.table_4 and (found.profile and found.profile.name) == name
    assert target.target("auto").name == (name or called)
    facts.is_integrated = False
    assert target.target("jetson").device is None


def test_a_jetson_is_known_by_its_systems_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "BOARD", tmp_path / "none")
    monkeypatch.setattr(devices, "RELEASE", tmp_path / "nv_tegra_release")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert target.board() is None
    (tmp_path / "nv_tegra_release").write_text("# R36 (release), REVISION: 4.0, GCID: 3, BOARD: generic\nmore")
    with pytest.raises(UsageError, match=r"jetson: this is a Jetson \(R36 \(release\), REVISION: 4.0\), but its torch"):
        target.target("jetson")
    assert target.target("cpu").jetson
    away = target.target("jetson-orin-nano")
    assert away.device is None
    given = BenchOptions(preset=["kivi-2"], length="1k")
    said = bench_projected.projected(given, away, "llama-3.1-8b", ["fused-attention"])["why_projected"]
    assert said.startswith("this machine is not known to be a Jetson Orin Nano")


def test_a_jetson_measures_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").write_text("NVIDIA Jetson Orin Nano Developer Kit\0")
    monkeypatch.setattr(devices, "BOARD", tmp_path / "model")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "host_memory", lambda: 7802312 * 1024)
    for name in ("jetson", "jetson-orin-nano"):
        with pytest.raises(
            UsageError, match=f"--device {name}: this is NVIDIA Jetson Orin .*, but its torch has no CUDA"
        ):
            target.target(name)
    assert target.target("jetson-orin-nx").device is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("jetson", "jetson-orin-nano"):
        found = target.target(name)
        assert (found.name, found.device, found.jetson) == ("jetson-orin-nano", torch.device("cuda"), True)
    assert bench_options.resolve_operations(None, target.target("jetson"))[:2] == [
        "innerq-table-4",
        "decode-then-attend",
    ]
    assert bench_options.resolve_operations(None, target.target("jetson-orin-nano"))[0] == "decode-then-attend"
    assert bench_options.resolve_operations(["innerq-table-4"], target.target("jetson")) == ["innerq-table-4"]


# Measured.


def clock(seconds: float = 0.0) -> Clock:
    return Clock(CPU, repeats=3, seconds=seconds)


def measured(names: list[str], which: list[str], **shape: Any) -> list[dict[str, Any]]:
    found = measure.rows_of(
        "small", SMALL, [schemes.named(name, SMALL) for name in names], [OPERATIONS[name] for name in which],
        [(shape.get("batch", 2), shape.get("length", LENGTH))], clock(), torch.float32, "cpu", lambda line: None,
    )  # fmt: skip
    return [row.as_dict() for row in found]


SCHEMES = [
    "innerq-hybrid", "kivi-2", "turboquant-4-3", "higgs-2", "squat-2", "aqua-kv-2", "fp8", "inner-4",
    "inner-3-symmetric+kivi-2",
]  # fmt: skip


@pytest.mark.parametrize("name", SCHEMES)
def test_every_operation_of_a_scheme_passes_its_check(name: str) -> None:
    for found in measured([name], ["decode-then-attend", "quantise", "append", "reconstruct", "quantise-step"]):
        if found["operation"] == "decode-attention":
            continue
        assert found["refused"] is None
        assert found["scheme"] == name
        assert found["microseconds"] > 0
        assert found["fraction_of_copy"] > 0
        assert not found["projected"]
        assert list(found)[: len(STABLE)] == STABLE
        compares = found["operation"] == "decode-then-attend"
        assert (found["ratio_to_fp16"] is not None) == compares == (found["fp16_backend"] is not None)


@pytest.mark.parametrize("name", ["mixkvq", "kivi-2-g128", "squat-2-g128", "mixkvq-g128", "vqkv-256"])
def test_schemes_of_long_blocks(name: str) -> None:
    found = measured([name], ["decode-then-attend", "reconstruct"], batch=1, length=300)
    assert [row["refused"] for row in found if row["scheme"] == name] == [None, None]


def test_the_ratio_is_to_the_fastest_peer() -> None:
    found = measured(["kivi-2"], ["decode-then-attend"])
    peer = min((r for r in found if r["scheme"] == "fp16" and r["microseconds"]), key=lambda r: r["microseconds"])
    ours = found[-1]
    assert ours["fp16_backend"] == peer["path"]
    assert ours["ratio_to_fp16"] == pytest.approx(peer["microseconds"] / ours["microseconds"])
    assert peer["ratio_to_fp16"] == 1


def test_bytes_are_what_the_cache_would_hold() -> None:
    """Two packed blocks of three bits with float16 scales, and the rest of 200 tokens in the model's dtype."""
    one = case("innerq-base", batch=2)
    held = layer.fill(one)
    values = 2 * 2 * 2 * 32  # rows, keys and values, heads, head_dim
    assert held.packed_bytes == values * 64 * 3.5 / 8
    assert held.window_bytes == values * (200 - 64) * 4
    assert OPERATIONS["decode-then-attend"].build(one).bytes == held.packed_bytes + held.window_bytes


def test_rows_of_a_batch_are_packed_alike_alone_and_together() -> None:
    one = layer.fill(case("mixkvq", batch=2, length=300))
    again = one.encoded(one.raw)
    for role in (0, 1):
        assert all(operation.same(again[role][name], one.packed[role][name]) for name in again[role])


def test_no_figure_where_the_check_fails() -> None:
    def build(given: Case) -> operation.Prepared:
        good = kernels.decode_then_attend(given)
        queries = given.queries()
        return replace(good, check=lambda: peers.wrong(queries * 1.5, queries, *layer.fill(given).materialised()))

    broken = Operation("broken", "", build, peer="attention")
    found = measure.rows_of(
        "small", SMALL, [schemes.named("kivi-2", SMALL)], [broken], [(1, LENGTH)], clock(), torch.float32, "cpu",
        lambda line: None,
    )[-1]  # fmt: skip
    assert found.microseconds is None and found.fraction_of_copy is None and found.ratio_to_fp16 is None
    assert "check failed" in str(found.refused)


def test_a_wrong_packing_is_seen() -> None:
    held = layer.fill(case("kivi-2"))
    assert operation.misencoded(held) is None
    held.packed[0]["codes"] = held.packed[0]["codes"] ^ 1
    assert "differs" in str(operation.misencoded(held))


# What a check must see, and the unspoilt code beside it. A format's promise is computed without encode and decode.

READS = ["decode-then-attend", "quantise", "append", "reconstruct", "quantise-step"]
FORMATS: dict[str, type[Codec]] = {
    "kivi-2": Uniform, "innerq-hybrid": Scaled, "higgs-2": Higgs, "squat-2": Squat, "mixkvq": MixKVQ, "fp8": Float8,
    "bf16": Exact, "aqua-kv-2": Predicted, "vqkv-256": ResidualVQ,
}  # fmt: skip


def refusals(name: str, which: list[str]) -> dict[str, str | None]:
    long = name in ("vqkv-256", "mixkvq")  # blocks of 128 tokens
    found = measured([name], which, batch=1, length=300 if long else LENGTH)
    return {row["operation"]: row["refused"] for row in found if row["scheme"] == name}


@pytest.mark.parametrize("part", [0.05, 0.0])
@pytest.mark.parametrize("name", FORMATS)
def test_a_decode_that_shrinks_numbers_is_refused(name: str, part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    own = FORMATS[name]
    honest = own.decode
    monkeypatch.setattr(own, "decode", lambda *given, **more: honest(*given, **more) * part)
    found = refusals(name, READS)
    assert list(found) == READS
    assert all(why and why.startswith("check failed: ") for why in found.values()), found


def test_a_shrunk_decode_of_hybrid_groups_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Uniform.decode
    assert refusals("innerq-hybrid", ["hybrid-50"]) == {"hybrid-50": None}
    monkeypatch.setattr(Uniform, "decode", lambda *given, **more: honest(*given, **more) * 0.05)
    assert "off by 0.95" in str(refusals("innerq-hybrid", ["hybrid-50"])["hybrid-50"])


@pytest.mark.parametrize("name", ["kivi-2", "mixkvq"])
@pytest.mark.parametrize("old", [True, False])
def test_an_append_that_stores_zeros_is_refused(name: str, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the old blocks, or of the new one."""
    honest = block_store.append

    def zeros(stored: block_store.Stored) -> block_store.Stored:
        if isinstance(stored, ragged.Ragged):
            return ragged.Ragged(torch.zeros_like(stored.data), stored.counts)
        return torch.zeros_like(stored)

    def spoilt(was: block_store.Stored, more: block_store.Stored, plan: Plan) -> block_store.Stored:
        return honest(zeros(was), more, plan) if old else honest(was, zeros(more), plan)

    monkeypatch.setattr(block_store, "append", spoilt)
    found = refusals(name, ["append", "quantise"])
    said = "differs from what it was before appending" if old else "differs from what was to be appended"
    assert said in str(found["append"]) and found["quantise"] is None


def test_one_block_that_decodes_to_another_is_seen() -> None:
    held = layer.fill(case("inner-4", batch=2, length=32 * 20 + 128))
    keys, values = held.decoded()
    assert operation.misread(held, (keys, values)) is None
    keys[1, :, 32:64] = keys[1, :, 64:96]
    values[0, 0, 0, 0] = float("nan")
    assert "misses keys" in str(distortion.misread(held, 0, keys))
    assert "misses values" in str(distortion.misread(held, 1, values))
    assert "decoding gives" in str(distortion.misread(held, 1, values[:, :, :32]))


def scaled_scales(given: Layer) -> None:
    given.keys.scale.mul_(1.1)


def wrong_words(given: Layer) -> None:
    given.values.words.bitwise_xor_(1)


def lost_token(given: Layer) -> None:
    given.recent[1][:, :, 96].zero_()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (None, None),
        (scaled_scales, "scale of keys differ"),
        (wrong_words, "words of values differ"),
        (lost_token, "the window's token 96 of values"),
    ],
)
@pytest.mark.parametrize("name", ["kivi-2", "higgs-2"])
def test_an_append_kernel_that_stores_something_else_is_refused(
    name: str, spoil: Callable[[Layer], None] | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's reference in its place, so that it runs without Triton."""

    def append(given: Layer, *rest: Any) -> None:
        reference.append(given, *rest)
        if spoil is not None:
            spoil(given)

    stand_in = SimpleNamespace(append=append, advance=reference.advance)
    monkeypatch.setattr(quantise_kernels, "triton", stand_in, raising=False)
    monkeypatch.setattr(quantising, "interpreted", lambda: True)
    made = kernels.append(case(name, geometry=replace(SMALL, head_dim=64), dtype=torch.float16))
    why = made.check()
    assert made.path == "triton: append"
    assert why == said if said is None else said in str(why)
    several = kernels.append(replace(case(name, geometry=replace(SMALL, head_dim=64), dtype=torch.float16), new=16))
    why = several.check()  # of two calls, which bring the same tokens
    assert (several.per, several.bytes > made.bytes) == (2, True)
    assert why == said if said is None else said in str(why)


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_has_a_promise(name: str) -> None:
    """A codec that no named scheme has is filled by itself: the transform codec with tiers of every kind, over a basis
    that is no rotation, and codecs by head.
    """
    covered = {codec.name: scheme for scheme, codec in FORMATS.items()}
    if name in covered:
        held = layer.fill(case(covered[name], length=300))
        assert operation.misread(held, held.decoded()) is None
        return
    if name == "by-head":
        parts = [codec_maker(part) for part in ("higgs-2", "uniform-4")]
        pair = LayerCodecs(*(ByHead([make(Shape(1, 32, 32), role) for make in parts]) for role in ("key", "value")))  # type: ignore[arg-type]
        held = layer.fill(replace(case("kivi-2"), scheme=replace(case("kivi-2").scheme, codecs=pair)))
        keys, values = held.decoded()
        assert operation.misread(held, (keys, values)) is None
        assert operation.misread(held, (keys * 0.05, values)) is not None
        return
    assert name == "transform"
    shape = Shape(2, 32, 32)
    bits = [4] * 8 + [3] * 8 + [2] * 8 + [1] * 4 + [0] * 4
    turn = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0))
    for gain in ("mse", "debiased"):
        pair = LayerCodecs(*(Transform(shape, role, bits, turn, gain=gain) for role in ("key", "value")))  # type: ignore[arg-type]
        one = replace(case("kivi-2"), scheme=replace(case("kivi-2").scheme, codecs=pair))
        held = layer.fill(one)
        keys, values = held.decoded()
        assert operation.misread(held, (keys, values)) is None
        assert "of the nearest codewords" in str(operation.misread(held, (keys * 0.05, values)))
        assert "of the nearest codewords" in str(operation.misread(held, (keys, values * 0)))


@pytest.mark.parametrize("broken", [0, 300, 1024, 1300, 2560, 2999])
def test_codewords_are_checked_in_every_part_of_the_call_that_is_timed(
    broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From that vector on, of 3000, the farthest codeword; behind the last whole tile of 512, a partial one too."""
    honest = kernels.residual_vq.nearest.nearest

    def spoilt(x: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
        found = honest(x, book)
        return torch.cat([found[:broken], honest(-x[broken:], book)])

    one = case("vqkv-256", batch=1, length=3000)
    assert kernels.nearest(one).check() is None
    monkeypatch.setattr(kernels.residual_vq.nearest, "nearest", spoilt)
    why = str(kernels.nearest(one).check())
    assert "farther than the nearest" in why and " of 3000, got" in why


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda codes: codes[:-1], r"codes of shape \(2999,\) for 3000 vectors"),
        (lambda codes: codes - 1, "codes from -1 to .* codewords"),
        (lambda codes: codes + 4096, "codes from 4.* codewords"),
    ],
)
def test_codes_that_name_no_codeword_are_not_looked_up(
    spoil: Callable[[torch.Tensor], torch.Tensor], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = kernels.residual_vq.nearest.nearest
    monkeypatch.setattr(kernels.residual_vq.nearest, "nearest", lambda x, book: spoil(honest(x, book)))
    assert re.search(said, str(kernels.nearest(case("vqkv-256", batch=1, length=3000)).check()))


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize(("fraction", "refused"), [(1.1, False), (1.3, True)])
def test_more_products_than_the_device_makes_are_no_figure(
    bounded: bool, fraction: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second measurement of the device's own rate decides."""
    asked: list[bool] = []

    def rate(self: Clock, again: bool = False) -> float:
        asked.append(again)
        return 1e12 if again else 0.8e12

    monkeypatch.setattr(Clock, "matmul_rate", rate)
    monkeypatch.setattr(Clock, "time", lambda self, run: timing.Timed(10.0, 10.0, 10.0, 3))
    monkeypatch.setattr(Clock, "copy_bandwidth", lambda self: 1e9)
    prepared = operation.Prepared(
        lambda: None, 1, lambda: None, "x", flops=fraction * 1e12 * 10e-6, bounded=bounded
    )  # fmt: skip
    made = Operation("x", "", lambda given: prepared)
    row = measure._row("m", case("kivi-2"), made, None, clock(), "cpu")
    if refused and bounded:
        assert row.microseconds is None
        assert str(row.refused).startswith("impossible figure: 10.0 us are 1.30 times the rate of torch's own matrix")
    else:
        assert row.refused is None
        assert row.more["fraction_of_matmul"] == pytest.approx(fraction / (1 if bounded else 0.8))
    assert asked == ([False, True] if bounded else [False])


def test_attention_in_plain_products_is_attention() -> None:
    one = case("kivi-2", 3)
    queries, keys, values = one.queries(3), one.random(2, 50, salt=2), one.random(2, 50, salt=3)
    wanted = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
    torch.testing.assert_close(peers.attention(queries, keys, values), wanted, atol=1e-5, rtol=1e-5)
    assert peers.wrong(wanted, queries, keys, values) is None
    assert peers.wrong(wanted + 1e-4, queries, keys, values) is not None
    assert peers.wrong(wanted * float("nan"), queries, keys, values) is not None
    for row in range(3):  # of every row, as the largest error of any
        off = wanted.clone()
        off[row] += 1e-4
        assert peers.wrong(off, queries, keys, values) is not None


def test_new_tokens_of_a_call_see_those_before_them() -> None:
    """Three calls of four: the mask is torch's lower triangle of the last columns, in each call the same."""
    one = case("kivi-2", 2)
    queries, keys, values = one.queries(12), one.random(2, 50, salt=2), one.random(2, 50, salt=3)
    mask = torch.ones(4, 50, dtype=torch.bool).tril(46)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask.repeat(3, 1), enable_gqa=True
    )
    torch.testing.assert_close(peers.attention(queries, keys, values, 4), wanted, atol=1e-5, rtol=1e-5)
    assert peers.wrong(wanted, queries, keys, values, new=4) is None
    assert peers.wrong(wanted, queries, keys, values) is not None
    assert bool((peers.unseen(12, 4, 50, CPU) == ~mask.repeat(3, 1)).all())


@pytest.mark.parametrize("new", [2, 16])
def test_attention_of_several_new_tokens_is_measured_and_checked(new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and every peer's, with the mask, without one, and with that of the first columns."""
    one = replace(case("inner-4", 3, 200, WIDE, torch.bfloat16), new=new)
    assert one.queries().shape[2] == new and kernels.decode_then_attend(one).check() is None
    ran = [peer for peer in peers.measure(one, clock()) if peer.timed is not None]
    assert {peer.name.split(" ")[1].strip(",") for peer in ran} == {"flash", "math"} and len(ran) == 12
    honest = torch.nn.functional.scaled_dot_product_attention
    upper = torch.ones(new, 200, dtype=torch.bool).tril()
    for wrong in (None, upper):

        def attends(q: Any, k: Any, v: Any, wrong: Any = wrong, attn_mask: Any = None, **more: Any) -> torch.Tensor:
            mask = wrong if wrong is None else wrong.repeat(q.shape[2] // new, 1)
            return honest(q, k, v, attn_mask=mask, **more)

        for module in (kernels, peers):
            monkeypatch.setattr(module, "scaled_dot_product_attention", attends)
        assert str(kernels.decode_then_attend(one).check()).startswith("check failed: off by ")
        monkeypatch.setattr(peers, "BACKENDS", {"math": peers.BACKENDS["math"]})
        found = peers._of_dtype(one, clock(), torch.bfloat16)
        assert len(found) == 2 and all(str(peer.why_not).startswith("check failed: off by ") for peer in found)


@pytest.mark.parametrize("row", range(5))
def test_each_row_of_a_batch_is_checked(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of five that attends to nothing of its own, and one whose feed-forward part is off."""
    honest, silu = torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.silu
    one = case("inner-4", 5, 200, WIDE, torch.bfloat16)
    assert kernels.decode_then_attend(one).check() is None and OPERATIONS["mlp"].build(one).check() is None

    def spoilt(found: torch.Tensor) -> torch.Tensor:
        if found.dtype == torch.bfloat16 and len(found) == 5:
            found[row] = found[row - 1]
        return found

    for module in (kernels, peers):
        attends = lambda q, k, v, **more: spoilt(honest(q, k, v, **more))  # noqa: E731
        monkeypatch.setattr(module, "scaled_dot_product_attention", attends)
    assert str(kernels.decode_then_attend(one).check()).startswith("check failed: off by ")
    monkeypatch.setattr(peers, "BACKENDS", {"math": peers.BACKENDS["math"]})
    assert all("check failed" in str(peer.why_not) for peer in peers._of_dtype(one, clock(), torch.bfloat16))
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x: spoilt(silu(x)))
    assert str(OPERATIONS["mlp"].build(one).check()).startswith("check failed: off by ")


def test_some_rows_are_spread_by_a_seed() -> None:
    for batch in range(1, 9):
        found = layer.some_rows(batch)
        assert found == sorted(set(found)) and {0, batch - 1} <= set(found) <= set(range(batch))
        assert len(found) == min(batch, 4)
    every = {row for seed in range(99) for row in layer.some_rows(9, seed)}
    assert every == set(range(9)) and layer.some_rows(9, 3) == layer.some_rows(9, 3)


def test_where_several_new_tokens_do_not_go() -> None:
    several, known = replace(case("kivi-2", length=131), new=8), OPERATIONS
    assert "nothing is packed" in str(known["decode-then-attend"].refuses(several))
    near = replace(several.scheme, windows=Windows(32, 0, 32))
    few = replace(several, scheme=near, length=32 + 64 + 5)
    for name in ("decode-then-attend", "append"):
        assert known[name].refuses(replace(several, length=300)) is None
    assert known["decode-then-attend"].refuses(replace(few, length=32 + 64 + 8)) is None
    assert known["decode-then-attend"].refuses(few) == (
        "8 new tokens of a call are not packed yet: needs as many in the window, which holds 5"
    )
    assert known["append"].refuses(replace(several, new=3, length=300)) == (
        "calls of 3 tokens do not fill a block of 32: needs a divisor of it"
    )


def test_vector_codes_take_fewer_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    Kernels(monkeypatch)
    one = of_few_codewords(VECTORS, torch.float16)
    assert (
        fused.refuses_fused(replace(one, new=16)) is None
        and fused.fused_attention(replace(one, new=16)).check() is None
    )
    assert kernels.append(replace(one, new=16)).check() is None
    many = of_few_codewords(replace(VECTORS, heads=32), torch.float16)
    most = codebook.most_queries(16)
    assert most < 16 and fused.refuses_fused(replace(many, new=most)) is None
    assert "up to" in str(fused.refuses_fused(replace(many, new=most + 1)))


def test_rows_say_how_many_new_tokens_a_call_has() -> None:
    which = ["decode-then-attend", "append", "quantise"]
    found = measure.rows_of(
        "small", SMALL, [schemes.named("kivi-2", SMALL)], [OPERATIONS[name] for name in which], [(2, LENGTH)], clock(),
        torch.float32, "cpu", lambda line: None, 0, 4,
    )  # fmt: skip
    said = {(row.operation, row.queries) for row in found}
    assert said == {("decode-attention", 4), ("decode-then-attend", 4), ("append", 4), ("quantise", None)}
    assert [row.more["calls"] for row in found if row.operation == "append"] == ["one in 8 steps"]
    assert all(row.refused is None for row in found if row.operation != "decode-attention")


LOST = {  # of tokens, sink 32, recent 96
    "the newest": lambda x: x[:, :, :-1],
    "the first": lambda x: x[:, :, 1:],
    "the sink": lambda x: x[:, :, 32:],
    "the window": lambda x: x[:, :, :-96],
    "the last block": lambda x: torch.cat([x[:, :, :-128], x[:, :, -96:]], 2),
    "the first block": lambda x: torch.cat([x[:, :, :32], x[:, :, 64:]], 2),
}  # fmt: skip
WIDE = replace(SMALL, heads=8, head_dim=128)


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize(
    ("geometry", "dtype"), [(WIDE, torch.bfloat16), (WIDE, torch.float16), (SMALL, torch.bfloat16)]
)
def test_attention_that_leaves_out_tokens_is_refused(
    lost: str, geometry: Geometry, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over random queries one token of 4096, or the sink, is less than what bfloat16 rounds. Ours and every peer's."""
    honest, less = torch.nn.functional.scaled_dot_product_attention, LOST[lost]
    one = case("inner-4", 1, 4096, geometry, dtype)
    assert kernels.decode_then_attend(one).check() is None
    for module in (kernels, peers):
        monkeypatch.setattr(
            module, "scaled_dot_product_attention", lambda q, k, v, **more: honest(q, less(k), less(v), **more)
        )
    assert str(kernels.decode_then_attend(one).check()).startswith("check failed: off by ")
    monkeypatch.setattr(peers, "BACKENDS", {"flash": peers.BACKENDS["flash"]})
    found = peers._of_dtype(one, clock(), dtype)
    assert len(found) == 2 and all(str(peer.why_not).startswith("check failed: off by ") for peer in found)


@pytest.mark.parametrize(("geometry", "tokens", "sets"), [(WIDE, 4096, 1), (SMALL, 4096, 4), (SMALL, 3, 4)])
def test_queries_of_a_check_point_at_both_windows_and_packed_tokens(geometry: Geometry, tokens: int, sets: int) -> None:
    """In each kv head."""
    one = case("inner-4", 2, tokens, geometry)
    queries, keys = one.queries().double(), one.random(geometry.kv_heads, tokens, salt=2).double()
    made = peers.pointed(queries, keys, 32, 96)
    assert len(made) == sets
    weights = sum(
        (q.unflatten(1, (geometry.kv_heads, -1)).flatten(2, 3) @ keys.mT / geometry.head_dim**0.5).softmax(-1).sum(2)
        for q in made
    )
    wanted = [4095, 0, 3999, 32, 2016, 31, 4000] if tokens > 7 else [2, 0]
    assert peers.places(tokens, 32, 96, 7)[: len(wanted)] == wanted
    assert bool((weights[..., wanted] > 0.1).all())


def test_each_query_has_its_own_tolerance() -> None:
    """One of large results hides nothing of others."""
    one = case("kivi-2")
    queries, keys, values = one.queries(2), one.random(2, 50, salt=2), one.random(2, 50, salt=3)
    queries[:, :, 1] = 0  # the mean of values
    found = peers.attention(queries, keys, values)
    assert peers.wrong(found, queries, keys, values) is None
    found[:, :, 1] += 2e-5
    assert peers.wrong(found, queries, keys, values) is not None


def test_the_median_is_of_times_and_not_of_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Clock(CPU, repeats=5, seconds=100)
    times = iter([9.0, 1.0, 2.0, 3.0, 1000.0])
    monkeypatch.setattr(Clock, "_once", lambda self, run: next(times))
    assert own.time(lambda: None) == timing.Timed(3.0, 1.0, 1000.0, 5)


def test_nothing_packed_is_left_out_and_said() -> None:
    notes: list[str] = []
    found = measure.rows_of(
        "small", SMALL, [schemes.named("kivi-2", SMALL)], [OPERATIONS["quantise"]], [(1, 100)], clock(), torch.float32,
        "cpu", notes.append,
    )  # fmt: skip
    assert found == []
    assert "needs more than 159 tokens" in notes[-1]


def test_tables_of_papers_say_where_torch_is_measured() -> None:
    which = ["hybrid-50", "quantise-step", "quantise"]
    found = measured(["innerq-hybrid"], which, batch=1)
    [table] = report.tables({"rows": found})
    said = "; of InnerQ Table 6 and InnerQ Table 5, rows of reference are torch's times, no kernel's"
    assert table.title.endswith(said)
    for row in found:
        row["path"] = "triton: quantise"
    assert "torch" not in next(iter(report.tables({"rows": found}))).title
    [plain] = report.tables({"rows": found[-1:]})
    assert plain.title == "small on cpu, measured"
    shares = measured(["mixkvq"], list(operations.TABLES["mixkvq-table-7"]), length=300)
    assert "of MixKVQ Table 7, rows of reference" in next(iter(report.tables({"rows": shares}))).title


def test_parts_of_table_5() -> None:
    found = measured(["innerq-small"], list(operations.TABLES["innerq-table-5"]), batch=1)
    assert [row["paper_microseconds"] for row in found] == [17.3, 0.9, 18.2]
    keys, values, both = (row["bytes"] for row in found)
    assert keys + values == pytest.approx(both, abs=1)
    assert all(row["refused"] is None and row["microseconds"] > 0 for row in found)


def test_fused_attention_is_left_out_with_the_reason() -> None:
    notes: list[str] = []
    which = [OPERATIONS["fused-attention"]]
    wide = replace(SMALL, head_dim=64)
    own = [schemes.named(name, wide) for name in ("inner-4", "higgs-2", "aqua-kv-2")]
    found = measure.rows_of("wide", wide, own, which, [(1, LENGTH)], clock(), torch.float32, "cpu", notes.append)
    assert [row.scheme for row in found if row.scheme != "fp16"] == []
    assert all("needs a CUDA GPU" in note for note in notes[-3:-1])
    assert "layers are predicted" in notes[-1]  # on any device


def test_what_is_left_out_is_a_row_with_the_reason() -> None:
    """A script that reads rows alone sees it; what has its row without a scheme, or one already, gets none."""
    which = ["fused-attention", "append", "nearest", "mlp", "quantise"]
    done = kvcal(
        "bench", "--device", "cpu", "--model", "tiny", *(word for name in which for word in ("-o", name)),
        "-p", "kivi-2", "-p", "kivi-2-g128", "--length", "160,260", "--repeats", "1", "--seconds", "0", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    every = [row for row in done.json["rows"] if row["scheme"] != "fp16"]
    cells = [(row["operation"], row["scheme"], row["length"]) for row in every]
    assert len(set(cells)) == len(cells) == 2 * (2 * 3 + 2)
    refused = {cell: row for cell, row in zip(cells, every, strict=True) if row["refused"]}
    short = {(name, "kivi-2-g128", 160) for name in ("append", "quantise")}
    assert set(refused) == short | {
        ("fused-attention", name, n) for name in ("kivi-2", "kivi-2-g128") for n in (160, 260)
    }
    assert {row["refused"] for cell, row in refused.items() if cell not in short} == {"needs a CUDA GPU"}
    assert all("needs more than 255 tokens" in refused[cell]["refused"] for cell in short)
    for row in refused.values():
        assert row["microseconds"] is row["ratio_to_fp16"] is row["bytes"] is None and not row["projected"]
        assert list(row)[: len(STABLE)] == STABLE


INTERPRETED = """
from dataclasses import replace
import torch
from kvcal.bench import fused, kernels, schemes, tables
from kvcal.bench.layer import Case
from kvcal.models.catalogue import CATALOGUE
from tests.kvcal.bench.test_bench import of_few_codewords
geometry = replace(CATALOGUE["llama-3.1-8b"].geometry, heads=2, kv_heads=1, head_dim=128)
for name in ("kivi-2", "innerq-hybrid-plain", "innerq-hybrid", "squat-pre-2"):
    case = Case(schemes.named(name, geometry), geometry, 1, 170, torch.device("cpu"), torch.float16)
    print(fused.refuses_fused(case), fused.fused_attention(case).check(), fused.fused_attention(replace(case, new=3)).check())
for name in ("kivi-2", "higgs-2", "turboquant-4-3"):
    case = Case(schemes.named(name, geometry), geometry, 1, 170, torch.device("cpu"), torch.float16)
    made = kernels.quantise(case), kernels.append(case)
    print(*(one.path for one in made), *(one.check() for one in (*made, kernels.append(replace(case, new=4)))))
for dtype in (torch.float16, torch.bfloat16):
    case = of_few_codewords(geometry, dtype)
    made = fused.fused_attention(case), kernels.append(case)
    print(fused.refuses_fused(case), *(one.path for one in made), *(one.check() for one in made), sep="; ")
case = Case(schemes.named("aqua-kv-2", geometry), geometry, 1, 170, torch.device("cpu"), torch.float16)
steps = [tables.quantise_step_of(role)(case) for role in (0, 1)]
made = [kernels.quantise(case), kernels.append(case), tables.quantise_step(case), *steps]
print(*(one.path for one in made), *(one.check() for one in made), sep="; ")
case = Case(schemes.named("kivi-2-g128", geometry), geometry, 2, 400, torch.device("cpu"), torch.float16)
made = tables.quantise_step(case), kernels.append(case)
print(*(one.path for one in made), *(one.check() for one in made), sep="; ")
case = Case(schemes.named("squat-2", geometry), geometry, 2, 170, torch.device("cpu"), torch.float16)
made = kernels.quantise(case), kernels.append(case), tables.quantise_step_of(0)(case)
print(*(one.path for one in made), *(one.check() for one in made), sep="; ")
case = Case(schemes.named("mixkvq-16-16", geometry), geometry, 2, 170, torch.device("cpu"), torch.float16)
made = kernels.append(case), tables.channel_selection(case)
print(*(one.path for one in made), *(one.check() for one in made), sep="; ")
"""
CORRECTED = "triton: correct, triton: quantise"
CHOSEN = "keys triton: choose channels, then torch, values reference, then copy the store"
ENCODED = ["triton: encode", "triton: encode, then copy the store", *["triton: encode"] * 3]


@needs_triton
def test_kernels_in_the_interpreter_pass_their_checks() -> None:
    found = interpreted("-c", INTERPRETED)
    assert found[:4] == ["None None None"] * 4
    assert found[4:7] == ["triton: quantise triton: append None None None"] * 3
    assert (
        found[7:9] == ["None; triton: fused, exact tokens by torch; triton: append to vector codes; None; None"] * 2
    )  # the kernels that a cache runs
    assert found[9] == "; ".join([*ENCODED, *["None"] * 5])
    assert found[10:] == [
        "triton: quantise; triton: append; None; None",
        f"{CORRECTED}; triton: correct, triton: append; triton: correct, then torch; None; None; None",
        f"{CHOSEN}; triton: select; None; None",
    ]


def of_few_codewords(geometry: Geometry, dtype: torch.dtype) -> Case:
    """Vector codes as vqkv-256 has them, in few stages of few codewords; two blocks in each of two rows."""
    shape = Shape(geometry.kv_heads, geometry.head_dim, 128)
    one = replace(schemes.named("vqkv-256", geometry), codecs=schemes._vqkv(64, (3, 4, 3))(shape))
    return Case(one, geometry, 2, 128 + 2 * 128 + 30, CPU, dtype)


class Kernels:
    """The references of vector codes where Triton's kernels are looked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spoilt: Callable[[Any], None] | None = None
        for module in (fused, quantising):
            monkeypatch.setattr(module, "interpreted", lambda: True)
        stand_in = SimpleNamespace(attend=self._attend, append=self._append, Workspace=lambda *given: None)
        for package in (codebook.residual_vq.attention, codebook.residual_vq.append):
            monkeypatch.setattr(package, "fast", lambda: stand_in)
        monkeypatch.setattr(quantise_kernels, "triton", SimpleNamespace(advance=reference.advance), raising=False)

    def _attend(self, q: torch.Tensor, keys: Any, values: Any, blocks: Any, scaling: float, space: Any) -> Any:
        if self.spoilt is not None:
            self.spoilt(blocks)
        return codebook.reference.attend(q, keys, values, blocks, scaling)

    def _append(self, keys: Any, values: Any, sink: Any, ring: Any, counts: Any, flags: Any, *rest: Any) -> None:
        vq_append.append(keys, values, sink, ring, counts, flags, *rest[:2])
        if self.spoilt is not None:
            self.spoilt((values.bands[0].codes, ring[1]))


VECTORS = replace(SMALL, head_dim=64)


def test_attention_over_vector_codes_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it must read: codes, each codebook once, exact tokens; the check sees one token too few."""
    kernels_found, one = Kernels(monkeypatch), of_few_codewords(VECTORS, torch.float16)
    made = fused.fused_attention(one)
    assert made.check() is None and made.path.startswith("triton: fused")
    codes = 2 * 2 * 2 * 128 * 6 * (3 + 4 + 3) / 8  # rows, heads, blocks, tokens, bits, stages
    high = 24  # of 64 dimensions
    books = 64 * 2 * (3 * 64 + 4 * (64 - high) + 3 * high)
    exact = 2 * 2 * 2 * (32 + 96 + 30) * 64 * 2
    assert (made.more["codec_bytes"], made.more["codebook_bytes"], made.more["window_bytes"]) == (codes, books, exact)
    assert made.bytes == codes + books + exact
    assert kernels.decode_then_attend(one).bytes == made.bytes
    assert "note" not in made.more
    monkeypatch.setattr(codebook, "CODEWORDS", 32)
    assert "decodes up to 600 packed tokens" in fused.fused_attention(one).more["note"]
    kernels_found.spoilt = lambda blocks: blocks.clamp_(max=1)
    assert "check failed: off by" in str(made.check())


def wrong_codes(given: Any) -> None:
    given[0][0].bitwise_xor_(1)


def wrong_token(given: Any) -> None:
    given[1][:, :, 96 + 127].zero_()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (None, None),
        (wrong_codes, "times that of the codec's own codes"),
        (wrong_token, "the window's token 223 of values is not the one that came"),
    ],
)
def test_appending_to_vector_codes_is_measured(
    spoil: Callable[[Any], None] | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Kernels(monkeypatch).spoilt = spoil
    made = kernels.append(of_few_codewords(VECTORS, torch.float16))
    assert made.path == "triton: append to vector codes"
    why = made.check()
    assert why == said if said is None else said in str(why)


def test_a_gpu_without_triton_has_the_times_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the paper's own device: Table 5 is measured there, by torch."""
    Card(monkeypatch, tmp_path, (7, 2))
    for name in ("innerq-small", "squat-2"):
        xavier = replace(case(name, 1, LENGTH, CATALOGUE["llama-3.1-8b"].geometry), device=torch.device("cuda"))
        assert "7.2; Triton needs 8.0" in str(fused.refuses_fused(xavier))
        assert all("7.2" in str(find(xavier)) for find in (quantising.rules, quantising.block_rules))
        assert quantising.encoders(xavier, xavier.scheme.codecs)[1] == "reference"
    assert not quantising.appends_vectors(
        replace(of_few_codewords(VECTORS, torch.float16), device=torch.device("cuda"))
    )
    Card(monkeypatch, tmp_path, (8, 7))
    assert (
        fused.refuses_fused(
            replace(case("inner-4", 1, LENGTH, CATALOGUE["llama-3.1-8b"].geometry), device=torch.device("cuda"))
        )
        is None
    )


def test_what_a_cache_packs_by_its_codecs_is_measured_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels that attend read what the quantise kernel writes; where none does, torch packs."""
    Card(monkeypatch, tmp_path)
    one = case("kivi-2", 1, LENGTH, CATALOGUE["llama-3.1-8b"].geometry)
    whole = Scheme(one.scheme.windows, "post_rope", (one.scheme.codecs,)).keeping(HeavyHitters())
    plain = replace(one, device=torch.device("cuda"), dtype=torch.float16)
    selects, wide = replace(plain, scheme=replace(one.scheme, whole=whole)), replace(plain, dtype=torch.float32)
    for find in (quantising.rules, quantising.block_rules):
        assert "token selection" in str(find(selects)) and not isinstance(find(plain), str)
        assert "float16 and bfloat16, not float32" in str(find(wide))


def test_vector_codes_in_float32_are_appended_as_the_cache_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch: the cache takes no kernel for them."""
    Kernels(monkeypatch)
    assert kernels.append(of_few_codewords(VECTORS, torch.float32)).path.startswith("reference")


# What --require-kernels accepts is what a cache accepts.


WIDE = replace(CATALOGUE["tiny"].geometry, layers=3, hidden=256, heads=4, kv_heads=2, head_dim=128, intermediate=64)


@pytest.fixture(scope="module")
def wide_model() -> Any:
    config = LlamaConfig(
        vocab_size=32, hidden_size=256, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128,
    )  # fmt: skip
    return LlamaForCausalLM(config).half()


@needs_triton
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", schemes.scheme_names())
def test_required_kernels_are_those_of_the_cache(
    name: str, fails: bool, wide_model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a pretended GPU whose kernels pass all their checks, or none."""
    card = Card(monkeypatch, tmp_path)
    card.says = "off by 0.3" if fails else None
    monkeypatch.setattr(verdicts, "_TRIED", {})
    monkeypatch.setattr(verdicts, "unsupported", lambda device: None)
    for trial in ("codebook_trial", "codebook_append_trial", "dequantise_trial", "encode_trial"):
        monkeypatch.setattr(verdicts, trial, card._trial)
    one = schemes.named(name, WIDE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with KVCalCache(filled.scheme_of(wide_model, one), wide_model) as cache:
            layer_of = cache.compressed_layers[-1]
            refused, reader = layer_of.paths.refused, layer_of.paths.dequantiser
            place = torch.float16, CPU
            assert (fused.unreadable(one, one.codecs, 2) is None) == (layer_of.paths.unreadable is None)
            takes = not refused or reader is not None
        given = [one], WIDE, *place
        if takes:
            fused.require_fused(*given)
            KVCalCache(filled.scheme_of(wide_model, one), wide_model, require_kernels=True).close()
            return
        with pytest.raises(KernelsUnavailable) as ours:
            fused.require_fused(*given)
        with pytest.raises(KernelsUnavailable) as theirs:
            KVCalCache(filled.scheme_of(wide_model, one), wide_model, require_kernels=True)
    assert f"--require-kernels, scheme {name}: {refused}; use" in str(ours.value)
    assert str(refused) in str(theirs.value)


def test_required_kernels_take_vector_codes_and_no_layer_of_a_bundle_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card = Card(monkeypatch, tmp_path)
    monkeypatch.setattr(verdicts, "_TRIED", {})
    monkeypatch.setattr(verdicts, "unsupported", lambda device: None)
    monkeypatch.setattr(verdicts, "codebook_trial", card._trial)
    codes, plain = schemes.named("vqkv-256", WIDE), schemes.named("fp8", WIDE)
    given = WIDE, torch.float16, CPU
    fused.require_fused([codes], *given)
    assert len(card.tried) == 1
    eight = LayerCodecs(*(Float8(codes.codecs.key.shape, role) for role in ("key", "value")))  # type: ignore[arg-type]
    assert type(eight.key) is type(plain.codecs.key)
    whole = Scheme(codes.windows, "post_rope", (codes.codecs, codes.codecs, eight))
    with pytest.raises(KernelsUnavailable, match="scheme vqkv-256: keys: no fused kernel reads float8"):
        fused.require_fused([replace(codes, whole=whole)], *given)
    kept = Scheme(codes.windows, "post_rope", (codes.codecs,) * 2, selection=HeavyHitters(0.5))
    with pytest.raises(KernelsUnavailable, match="token selection"):
        fused.require_fused([replace(codes, whole=kept)], *given)


# Default schemes.


@needs_triton
def test_default_schemes_of_a_gpu_are_those_of_the_page() -> None:
    """None is refused; each form of the page's table is there, but for the mixed pair and grids in bytes, which are
    named.
    """
    geometry = CATALOGUE[bench_options.MODEL].geometry
    assert [fused.refuses_anywhere(case(name, 1, 4096, geometry)) for name in bench_options.GPU_SCHEMES] == [None] * 15
    pairs = [schemes.named(name, geometry).codecs for name in bench_options.GPU_SCHEMES]
    found = {(_behind(pair.key).fused(), _behind(pair.value).fused()) for pair in pairs}
    script = runpy.run_path(str(ROOT / "docs" / "benchmarks" / "decode_attention.py"), run_name="decode_attention")
    wanted = {
        name: (script["form"]("key", key), script["form"]("value", value))
        for name, (key, value, _) in script["SCHEMES"].items()
    }
    left_out = {"HIGGS 3, InnerQ 3", "TurboQuant 4/3 in bytes", "HIGGS 2 in bytes"}
    assert {name for name, forms in wanted.items() if forms not in found} == left_out


PAGE = (ROOT / "docs/benchmarks/decode_attention.md").read_text().split("### What is fused at which head_dim\n")[1]
FUSED_AT = {  # of the page's table: of each name what stands under 64, 96, 128, 256
    name: tuple(cells[1:])
    for cells in (line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("|"))
    for name in re.findall("`([^`]+)`", cells[0])
    if name != "kvcal bench"
}


def test_the_page_names_every_scheme_by_head_dim() -> None:
    assert sorted(FUSED_AT) == sorted(schemes.scheme_names())


@pytest.mark.parametrize("name", schemes.scheme_names())
def test_what_is_fused_at_which_head_dim_is_as_the_page_says(name: str) -> None:
    whole = replace(CATALOGUE["llama-3.1-8b"].geometry, kv_heads=2, heads=8)
    every = [case(name, 1, 4096, replace(whole, head_dim=dim)) for dim in (64, 96, 128, 256)]
    assert FUSED_AT[name] == tuple("–" if fused.refuses_anywhere(one) else "fused" for one in every)
    other = replace(whole, head_dim=80)
    assert fused.refuses_anywhere(case(name, 1, 4096, other)) or name.startswith("vqkv")


def _behind(codec: Codec) -> Codec:
    return codec.inner if isinstance(codec, Scaled) else codec


class Unexpected(Exception):
    """Of no module that the benchmark knows."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("queries of torch.float32: must be\nmore"), "ValueError: queries of torch.float32: must be"),
        (RuntimeError("\n CUDA error: something\nadvice"), "CUDA error: something"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of memory"),
        (KVCalError("codec 'x': cannot"), "codec 'x': cannot"),
        (AssertionError(), "AssertionError"),
        (Unexpected("y" * 1000), "Unexpected: " + "y" * 187 + "…"),
    ],
)
@pytest.mark.parametrize("where", ["build", "check", "run"])
def test_an_operation_that_fails_is_a_row_and_the_others_go_on(where: str, error: Exception, said: str) -> None:
    def fail() -> None:
        raise error

    def build(given: Case) -> operation.Prepared:
        return fail() or good if where == "build" else replace(good, **{where: fail})  # type: ignore[func-returns-value]

    good = kernels.quantise(case("kivi-2", 1))
    which = [Operation("broken", "", build), OPERATIONS["quantise"]]
    own = [schemes.named(name, SMALL) for name in ("kivi-2", "inner-4")]
    found = measure.rows_of("s", SMALL, own, which, [(1, LENGTH)], clock(), torch.float32, "cpu", lambda line: None)
    assert [(row.operation, row.refused) for row in found] == [("broken", said), ("quantise", None)] * 2
    assert all((row.microseconds is None) == (row.operation == "broken") for row in found)


def test_what_does_not_fit_the_memory_is_a_refused_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the process would be ended. A step's block fits beside a prefill that does not; FP16 is a row, too."""
    which = ["decode-then-attend", "quantise", "quantise-step", "mlp", "append"]
    monkeypatch.setattr(needed, "free_bytes", lambda device: 128 << 20)
    found = {row["operation"]: row for row in measured(["kivi-2"], which, batch=1, length=65536)}
    for name in ("decode-attention", "decode-then-attend", "quantise", "append"):
        assert found[name]["microseconds"] is None
        assert re.match(
            r"needs 0\.\d GiB, 0\.1 GiB are free on cpu; take a smaller --batch or ", found[name]["refused"]
        )
    assert all(found[name]["microseconds"] for name in ("quantise-step", "mlp"))
    monkeypatch.setattr(needed, "free_bytes", lambda device: None)  # not known
    assert all(row["microseconds"] for row in measured(["kivi-2"], ["quantise"], batch=1))
    monkeypatch.setattr(needed, "free_bytes", lambda device: 128 << 20)
    monkeypatch.setattr(timing, "last_cache", lambda device: 80 << 20)  # a buffer of twice the cache empties it
    assert "needs 0.2 GiB, 0.1 GiB are free" in measured(["kivi-2"], ["quantise"], batch=1)[0]["refused"]


def test_the_command_refuses_what_does_not_fit_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needed, "free_bytes", lambda device: 1 << 29)
    done = kvcal(
        "bench", "--device", "cpu", "-o", "quantise", "-p", "kivi-2", "-m", "llama-3.1-8b", "--length", "256k,256",
        "--repeats", "1", "--seconds", "0", "--json",
    )  # fmt: skip
    large, small = done.json["rows"]
    assert (done.code, large["microseconds"], small["refused"]) == (0, None, None)
    assert large["refused"].startswith("needs 25.0 GiB, 0.5 GiB are free on cpu; ")


@pytest.mark.parametrize(("batch", "length"), [(32, 32768), (1, 131072), (64, 32768)])
def test_shapes_that_were_measured_on_gpus_are_not_refused(batch: int, length: int) -> None:
    """Llama-3.1-8B on 78 GiB: what is needed for certain is a part of it."""
    geometry = CATALOGUE["llama-3.1-8b"].geometry
    gpu = torch.device("cuda")
    for name in schemes.scheme_names():
        one = replace(case(name, batch, length, geometry, torch.float16), device=gpu)
        every = [operation.needs(one) for operation in OPERATIONS.values()]
        assert max(*every, needed.peers(one, torch.float16)) < 78 * 2**30
    assert needed.whole(one) > 2 * 2 * batch * length * 8 * 128  # what comes in, at least
    beyond = needed.FreeMemory(gpu, 78 << 30).lacks(needed.whole(replace(one, batch=1024, length=32768)))
    assert str(beyond).startswith("needs ") and "78.0 GiB are free on cuda" in str(beyond)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "fused-attention", "-p", "inner-4"], "fused-attention of inner-4: needs a CUDA GPU"),
        (["-o", "decode-then-attend", "-p", "kivi-2", "-m", "tiny", "--length", "100"], "nothing is packed: needs"),
    ],
)
def test_fp16_beside_nothing_is_not_measured(options: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "measure", lambda *given: pytest.fail("measured"))
    done = kvcal("bench", "--device", "cpu", *options)
    assert (done.code, done.out) == (2, "")
    assert "kvcal: nothing to measure: " in done.err and said in done.err


def test_an_interrupt_is_no_row() -> None:
    def build(given: Case) -> operation.Prepared:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure.rows_of(
            "s", SMALL, [], [Operation("broken", "", build, alone=True)], [(1, LENGTH)], clock(), torch.float32, "cpu",
            lambda line: None,
        )  # fmt: skip


def test_a_peer_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **more: Any) -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr(peers, "scaled_dot_product_attention", fail)
    found = measured(["kivi-2"], ["decode-then-attend"])
    assert {row["refused"] for row in found if row["scheme"] == "fp16"} == {"TypeError: no such argument"}
    ours = found[-1]
    assert ours["scheme"] == "kivi-2" and ours["microseconds"] and ours["ratio_to_fp16"] is None
    monkeypatch.setattr(Case, "queries", fail)
    without = peers.measure(case("kivi-2"), clock())
    assert [(one.name, one.timed) for one in without] == [
        (f"every backend {name}", None) for name in ("float16", "bfloat16", "float32")
    ]


def test_what_is_called_fp16_has_16_bits_on_a_gpu() -> None:
    wide = case("kivi-2", dtype=torch.float32)
    on_gpu = replace(wide, device=torch.device("cuda"))
    assert peers.dtypes_of(on_gpu) == (torch.float16, torch.bfloat16)
    for dtype in (torch.float16, torch.bfloat16):
        assert peers.dtypes_of(replace(on_gpu, dtype=dtype)) == (dtype,)
    assert peers.dtypes_of(wide) == (torch.float16, torch.bfloat16, torch.float32)


def test_fused_attention_in_float32_is_a_refused_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel could run; no Triton is needed to say so."""
    monkeypatch.setattr(fused, "interpreted", lambda: True)
    geometry = replace(SMALL, head_dim=64)
    own = [schemes.named("inner-4", geometry)]
    which = [OPERATIONS[name] for name in ("fused-attention", "reconstruct")]
    found = measure.rows_of("s", geometry, own, which, [(1, LENGTH)], clock(), torch.float32, "cpu", lambda line: None)
    assert [row.refused for row in found if row.operation == "fused-attention"] == [
        "the fused kernel takes float16 and bfloat16, not float32; give --dtype float16"
    ]
    assert found[-1].operation == "reconstruct" and found[-1].microseconds
    assert any(row.scheme == "fp16" and row.microseconds for row in found)


def test_hybrid_shares_are_what_they_are_named_after() -> None:
    for found in measured(["innerq-hybrid"], ["hybrid-99", "hybrid-50", "hybrid-1"]):
        assert found["symmetric_percent"] == pytest.approx(float(found["operation"].split("-")[1]), abs=5)
        assert found["refused"] is None


def test_mixkvq_shares_add_up() -> None:
    found = measured(["mixkvq"], list(operations.TABLES["mixkvq-table-7"]), length=300)
    rebuilt = [rows.Row(**{k: v for k, v in row.items() if k in rows.Row.__dataclass_fields__}) for row in found]
    shares = [row.more["share_percent"] for row in bench_measured._with_shares(rebuilt) if "share_percent" in row.more]
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(100)


# Whole models.


LLAMA: Any = TINY["llama"]()
GEOMETRY = Geometry.from_config(LLAMA.config.to_dict())


@pytest.mark.parametrize("name", ["innerq-base", "mixkvq", "aqua-kv-2", "squat-pre-2"])
def test_a_filled_cache_goes_on_generating(name: str) -> None:
    one = schemes.named(name, GEOMETRY)
    own = one.windows
    length = own.sink + own.recent + 3 * own.block - 2  # two blocks; the third is due two tokens later
    with filled.filled_cache(LLAMA, GEOMETRY, one, 2, length) as cache, torch.no_grad():
        assert isinstance(cache, KVCalCache)
        assert cache.get_seq_length() == length
        assert cache.ledger.blocks.tolist() == [2, 2]
        if not one.codecs.key.ragged and not one.codecs.needs:
            assert cache.bits_per_value() == pytest.approx(one.stored_bits)
        for _ in range(3):
            logits = LLAMA(input_ids=torch.zeros(2, 1, dtype=torch.long), past_key_values=cache).logits
            assert bool(logits.isfinite().all())
        assert cache.ledger.blocks.tolist() == [3, 3]


@pytest.mark.parametrize("length", [1, 31, 32, 40])
@pytest.mark.parametrize("name", ["kivi-2", "aqua-kv-2"])
def test_a_filled_cache_of_few_tokens_holds_no_more(name: str, length: int) -> None:
    """Fewer than the sink takes, as many, and some of the window."""
    one = schemes.named(name, GEOMETRY)
    with filled.filled_cache(LLAMA, GEOMETRY, one, 2, length) as cache, torch.no_grad():
        for columns in (length, length + 1):
            held = [layer.sink[0].shape[2] + layer.window[0].shape[2] for layer in cache.compressed_layers]
            assert set(held) == {columns} and cache.get_seq_length() == columns
            LLAMA(input_ids=torch.zeros(2, 1, dtype=torch.long), past_key_values=cache)


@pytest.mark.parametrize(
    ("limit", "start", "step"), [(0, 1, 1), (1, 1, 1), (5, 1, 1), (1000, 1024, 256), (70000, 1024, 256)]
)
def test_the_search_for_the_largest(limit: int, start: int, step: int) -> None:
    search = generation.Search(lambda n: n <= limit, step)
    assert search.run(start) == limit // step * step and search.proven


def test_a_memory_is_filled_and_not_more() -> None:
    geometry = CATALOGUE["llama-3.1-8b"].geometry
    every = memory.footprints(geometry, [schemes.named("innerq-base", geometry)], torch.float32)
    size = 40 * 2**30
    full, ours = (row.length for row in memory.projected_longest("m", every, 1, 40, "x"))
    left = size - geometry.parameters * 4 - planning.RUNTIME
    assert 0.9 < full / (left / (2 * 32 * 8 * 128 * 4)) < 1  # what weights and runtime leave, but for activations
    assert every[0].used(1, full) <= size < every[0].used(1, full + 1)
    assert ours == geometry.context and every[1].used(1, ours) < size
    rows_at_32k = [row.batch for row in memory.projected_batch("m", every, 32768, 40, "x")]
    for one, batch in zip(every, rows_at_32k, strict=True):
        assert one.used(batch, 32768) <= size < one.used(batch + 1, 32768)
    paper_like = memory.projected_longest("llama-3.1-8b", every, 1, 40, "x")[0]
    assert paper_like.more["paper_longest"] == 25841
    assert every[1].load.decode(1, 1000).decoded == 1000 * 2 * 8 * 128 * 4  # a layer is decoded in float32
    half = memory.footprints(geometry, [schemes.named(n, geometry) for n in ("inner-4", "fp8")], torch.float16)
    assert [one.load.decode(1, 10).decoded for one in half] == [0, 0, 10 * 2 * 8 * 128 * 2]  # no kernel reads float8
    xavier = devices.device("jetson-xavier-nx")
    of_it = memory.footprints(geometry, [schemes.named("inner-4", geometry)], torch.float16, xavier)
    assert of_it[1].load.decodes
    assert "constants and runtime alone" in str(memory.projected_longest("m", every, 1, 8, "x")[0].refused)


def test_no_row_is_longer_than_the_models_context() -> None:
    """Mistral's 32,768 tokens, whatever the memory has room for."""
    geometry = CATALOGUE["mistral-7b-v0.3"].geometry
    every = memory.footprints(geometry, [schemes.named("kivi-2", geometry)], torch.float16)
    rows = memory.projected_longest("m", every, 1, 139, "x")
    assert [(row.length, row.more["note"]) for row in rows] == [(32768, "the model's own context")] * 2


def test_a_model_that_a_board_cannot_hold_is_named() -> None:
    done = kvcal("bench", "--device", "jetson-orin-nano", "-o", "fused-attention", "-p", "inner-4", "--length", "4k")
    assert done.code == 0
    assert "llama-3.1-8b in 16 bits does not fit its 8 GiB: its weights alone take 15.0 GiB" in done.err
    other = kvcal("bench", "--device", "h200", "-o", "fused-attention", "-p", "inner-4", "--length", "4k")
    assert "does not fit" not in other.err


def test_projected_attention_is_within_the_models_context() -> None:
    given = ("bench", "--device", "rtx-4090", "-m", "smollm2-135m", "-p", "kivi-2")
    done = kvcal(*given, "-o", "fused-attention", "-o", "largest-batch", "--length", "8k,64k", "--json")
    assert {row["length"] for row in done.json["rows"]} == {8192}
    assert {row["operation"] for row in done.json["rows"]} == {"decode-attention", "fused-attention", "largest-batch"}
    assert done.json["why_projected"].count("no rows of 65,536 tokens, as smollm2-135m holds at most 8,192") == 1
    for sized in ("fused-attention", "largest-batch"):
        refused = kvcal(*given, "-o", sized, "--length", "64k")
        assert refused.code == 2
        assert "--length 65,536: smollm2-135m holds at most 8,192 tokens" in refused.err


def test_caches_that_a_device_cannot_hold_are_named() -> None:
    given = ("bench", "--device", "rtx-4090", "-m", "smollm2-135m", "-o", "fused-attention", "-p", "kivi-2")
    few, many = (kvcal(*given, "--length", "8k", "--batch", batch, "--json").json for batch in ("64", "64,128,512"))
    assert "does not fit" not in few["why_projected"]
    assert "128 x 8,192 tokens does not fit 24 GiB: fp16, " in many["why_projected"]
    assert "512 x 8,192 tokens does not fit 24 GiB: every scheme, " in many["why_projected"]
    assert "with 64 x" not in many["why_projected"]


def test_vqkv_table_3_is_of_the_papers_dtype_where_nothing_else_is_asked_for() -> None:
    done = kvcal("bench", "--device", "a100-40gb", "-o", "vqkv-table-3", "--json")
    full, ours = done.json["rows"]
    assert (full["scheme"], full["dtype"], full["paper_longest"]) == ("fp32", "float32", 25841)
    assert (ours["scheme"], ours["paper_longest"]) == ("vqkv-4k", 52096)
    assert (ours["longest_length"], ours["note"]) == (131072, "the model's own context")
    assert "one decoded layer" in ours["path"]
    for more in (["--dtype", "float16"], ["-o", "largest-batch"]):
        row = kvcal("bench", "--device", "a100-40gb", "-o", "vqkv-table-3", *more, "--json").json["rows"][0]
        assert row["dtype"] == "float16" and "paper_longest" not in row


@pytest.mark.parametrize(("installed", "said"), [(None, True), ("3.7.1", True), ("3.9.0", False), ("3.10.0", False)])
def test_projections_say_which_triton_they_need(
    installed: str | None, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of our kernels alone, and where it is newer than kvcal itself asks for."""
    monkeypatch.setattr(jetson, "triton_version", lambda: installed)
    geometry = CATALOGUE["llama-3.1-8b"].geometry
    own = [schemes.named("inner-4", geometry)]
    for name, newer in (("jetson-thor", said), ("jetson-orin-nano", False)):
        full, row = jetson.projected(devices.device(name), own, geometry, "m", 1, 4096)
        assert (full.more.get("note"), row.more.get("note")) == (None, "needs Triton 3.9" if newer else None)


def test_a_footprint_is_what_the_cache_holds() -> None:
    """Of a cache with as many tokens exact as it can have."""
    one = schemes.named("innerq-base", GEOMETRY)
    own = one.windows
    length = own.sink + own.recent + 4 * own.block - 1
    with filled.filled_cache(LLAMA, GEOMETRY, one, 2, length) as cache:
        load = memory.footprints(GEOMETRY, [one], torch.float32)[1].load
        assert cache.nbytes("packed") == 2 * load.packed_bytes(length)
        assert cache.nbytes("window") == 2 * load.window_bytes(length)


# The command.


@pytest.fixture(scope="module")
def projected() -> Done:
    return kvcal("bench", "--device", "jetson", "--wide")


def test_jetson_elsewhere_projects_and_every_line_says_so(projected: Done) -> None:
    assert projected.code == 0, projected.err
    assert "none measured" in projected.err
    figures = [line for line in projected.out.splitlines() if any(c.isdigit() for c in line)]
    headings = ("part ", "operation ")  # of columns
    lines = [line for line in figures if not line.startswith(headings)]
    assert len(lines) > 18 + 18 + 6 + 42
    assert all("projected" in line for line in lines)
    assert "4638 | 4638" in projected.out
    assert "jetson-orin-nano" in projected.out


def test_without_wide_a_heading_says_that_times_are_projected() -> None:
    narrow = kvcal("bench", "--device", "jetson-orin-nano", "--length", "1k").out
    assert "jetson-orin-nano, projected; limit: bytes" in narrow
    [heading] = [line for line in narrow.splitlines() if "projected" in line.split()[:1] and "bits/" in line]
    assert heading.split()[0] == "projected"


def test_the_projection_needs_no_device_and_is_the_same_every_time() -> None:
    first, second = (kvcal("bench", "--device", "jetson", "--json") for _ in range(2))
    assert first.out == second.out
    assert all(row["projected"] for row in first.json["rows"])
    assert first.json["largest_miss"] < 0.05


def test_one_projection_alone() -> None:
    found = kvcal(
        "bench", "--device", "jetson-orin-nx", "-o", "fused-attention", "-p", "inner-4", "--length", "4k", "--json"
    ).json["rows"]
    assert [(row["operation"], row["scheme"], row["device"]) for row in found] == [
        ("decode-attention", "fp16", "jetson-orin-nx"), ("fused-attention", "inner-4", "jetson-orin-nx"),
    ]  # fmt: skip
    table = kvcal("bench", "--device", "h200", "-o", "innerq-table-4", "--json").json["rows"]
    assert {row["device"] for row in table} == {"jetson-xavier-nx"}


def test_bench_writes_json_csv_and_plot_and_compares(tmp_path: Path) -> None:
    shape = ["--model", "qwen2.5-0.5b", "--length", "200", "--batch", "1", "--repeats", "3", "--seconds", "0"]
    options = [*shape, "-p", "kivi-2", "-o", "decode-then-attend", "--device", "cpu", "--json"]
    done = kvcal("bench", *options, "--csv", tmp_path / "rows.csv", "--plot", tmp_path / "rows.png")
    assert done.code == 0, done.err
    found = done.json
    assert found["device"] == "cpu" and not found["projected"] and found["copy_gb_per_s"] > 0
    assert all(list(row)[: len(STABLE)] == STABLE for row in found["rows"])
    written = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [row["path"] for row in written] == [row["path"] for row in found["rows"]]
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "earlier.json").write_text(done.out)
    again = kvcal("bench", *options, "--compare", tmp_path / "earlier.json")
    assert again.code == 0, again.err
    ours = next(row for row in again.json["compared"] if row["scheme"] == "kivi-2")
    assert ours["times_as_fast"] == pytest.approx(ours["earlier"] / ours["now"])


def test_rates_are_said_to_be_of_the_run_that_measured_them() -> None:
    now = "measured in this run: copy 4000.0 GB/s read and written, read 4500.0 GB/s"
    before = "3 rows are of a run before this one, beside its copy: 3900.0 GB/s read and written"
    both = {"copy_gb_per_s": 4000.0, "read_gb_per_s": 4500.0}
    resumed = {"resumed_rows": 3, "resumed_copy_gb_per_s": [3900.0]}
    assert list(report.rates(both)) == [now]
    assert list(report.rates(both | resumed)) == [now, before]
    assert list(report.rates({"copy_gb_per_s": None, **resumed})) == [before]
    assert list(report.rates({"resumed_rows": 0, "resumed_copy_gb_per_s": []})) == []


@pytest.mark.parametrize("operation", ["vqkv-table-3", "longest-generation", "largest-batch"])
def test_bytes_alone_are_of_the_model_of_all_other_operations(operation: str) -> None:
    done = kvcal("bench", "--device", "cpu", "-o", operation, "-p", "vqkv-4k", "--memory", "80", "--json")
    assert done.code == 0, done.err
    assert {row["model"] for row in done.json["rows"]} == {"llama-3.1-8b"}
    there = kvcal("bench", "--device", "h200", "-o", operation, "-p", "vqkv-4k", "--memory", "80", "--json").json
    found = ([row.get("longest_length") or row["largest_batch"] for row in one["rows"]] for one in (done.json, there))
    assert next(found) == next(found)


def test_a_model_that_runs_on_a_cpu_is_tiny() -> None:
    options = [
        "-o",
        "generate",
        "-o",
        "longest-generation",
        "--memory",
        "1",
        "--length",
        "160",
        "-p",
        "kivi-2",
        "--json",
    ]
    done = kvcal("bench", "--device", "cpu", *options)
    assert done.code == 0, done.err
    assert {row["model"] for row in done.json["rows"]} == {"tiny"}


def test_new_tokens_of_a_call_on_the_command_line(tmp_path: Path) -> None:
    """Rows say them, others than those of an earlier file are not compared, and what they do not go into is refused."""
    options = [
        "bench", "--device", "cpu", "--model", "tiny", "-o", "append", "-p", "kivi-2", "--length", "200", "--repeats", "1",
        "--seconds", "0", "--json",
    ]  # fmt: skip
    done = kvcal(*options, "--queries", "4")
    assert done.code == 0, done.err
    assert [row["queries"] for row in done.json["rows"]] == [4]
    path = tmp_path / "earlier.json"
    path.write_text(done.out)
    assert len(kvcal(*options, "--queries", "4", "--compare", path).json["compared"]) == 1
    one = kvcal(*options, "--compare", path)
    assert one.json["compared"] == [] and "queries 4 there, 1 here" in one.err
    none = kvcal(*options, "--queries", "5").err.splitlines()
    assert none[-1].startswith(
        "kvcal: nothing to measure: append of kivi-2: calls of 5 tokens do not fill a block of 32"
    )
    for count in ("0", "17"):
        assert kvcal(*options, "--queries", count).code == 2
    shown = report.tables({"rows": done.json["rows"]})
    assert "4 new tokens a call" in next(shown).rows[0][-1]


def test_files_without_a_row_in_common_are_said_to_be(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.json"
    options = ["bench", "--length", "1k", "-p", "inner-4", "--compare", earlier, "--device"]
    done = kvcal("bench", "--device", "h200", "-o", "fused-attention", "--length", "1k", "-p", "inner-4", "--json")
    earlier.write_text(done.out)
    for more in ((), ("--json",)):
        other = kvcal(*options, "jetson-orin-nano", *more)
        assert other.code == 0, other.err
        (line,) = (line for line in other.err.splitlines() if "--compare" in line)
        assert "no row in common" in line and "of h200, these of jetson-orin-nano" in line
    assert other.json["compared"] == []
    same = kvcal(*options, "h200", "--wide")
    assert "no row in common" not in same.err and "times as fast" in same.out
    earlier.write_text('{"rows": []}')
    assert "its rows are of no device, these of h200" in kvcal(*options, "h200").err


def test_a_bundle_is_a_scheme(tmp_path: Path) -> None:
    bundle = tmp_path / "own.kvcal.safetensors"
    made = kvcal("preset", "innerq-base", "--model", "tiny", "--config-only", "--output", bundle)
    assert made.code == 0, made.err
    done = kvcal(
        "bench", "--model", "tiny", "-b", bundle, "-o", "reconstruct", "--length", "200", "--repeats", "3", "--seconds", "0",
        "--device", "cpu", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert [(row["scheme"], row["refused"]) for row in done.json["rows"]] == [("own", None)]
    other = kvcal("bench", "--model", "llama-3.1-8b", "-b", bundle, "-o", "reconstruct", "--device", "cpu")
    assert other.code == 2
    assert "--model has 8 of 128" in other.complaint


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "jetson-nano-2"], "no such device; did you mean"),
        (["--device", "tpu"], "no such device; `kvcal names device` lists all"),
        (["--device", "cuda"], "not usable here"),
        (["--device", "jetson", "-o", "quantise"], "cannot be projected for jetson-orin-nano"),
        (["--device", "jetson", "-o", "no-such"], "allowed are fused-attention, largest-batch, longest-generation"),
        (
            ["--device", "jetson", "-o", "innerq-table-5"],
            "--operation innerq-table-5: cannot be projected for jetson-orin-nano; fused-attention, innerq-table-4,",
        ),
        (
            ["--device", "jetson", "-o", "generation"],
            "--operation generation: generate and generate-call cannot be projected for jetson-orin-nano",
        ),
        (["-o", "innerq-table-4", "--require-kernels"], "--require-kernels applies only to rows that are measured"),
        (
            ["-o", "quantize"],
            "--operation quantize: not known; did you mean quantise? `kvcal names operation` lists all",
        ),
        (["-p", "no-such"], "scheme 'no-such' is not known; `kvcal names` lists all, or KEYCODEC+VALUECODEC"),
        (["-p", "kivi-2", "-p", "kivi-2"], "two schemes would be called 'kivi-2'"),
        (["--length", "4q"], "'4q' is not a whole number from 1"),
        (["--batch", "0"], "'0' is not a whole number from 1"),
        (["--batch", "99999999999999999999"], "'99999999999999999999' is more than 2147483647"),
        (["--length", "2097152k"], "'2097152k' is more than 2147483647"),
        (
            ["--length", "64", "-p", "kivi-2", "-o", "quantise"],
            "nothing to measure: quantise of kivi-2: nothing is packed",
        ),
        (["--csv", "/no/such/folder/x.csv"], "is not a folder"),
        (["-p", "innerq-base+"], "scheme 'innerq-base+': no codec behind the +; give KEYCODEC+VALUECODEC"),
        (["-p", "+kivi-2"], "scheme '+kivi-2': no codec before the +"),
        (["-p", "kivi-2+no-such"], "scheme 'kivi-2+no-such': codec 'no-such' is not known"),
        (["--device", ""], "--device '': no such device; `kvcal names device` lists all"),
        (["--csv", "/proc/x"], "/proc: no file can be made in this folder; give another --csv"),
        (["--csv", ""], "--csv '' or . is a folder: give a file name"),
        (["--compare", ""], "--compare '' or .: cannot be read (Is a directory)"),
        (["--plot", "x.gif"], "must end in .png"),
        (["--compare", "/no/such/file"], "cannot be read"),
        (["--model", "no-such-model"], "unknown model"),
        (["--model", ""], "unknown model"),
        (["--model", "tiny", "-o", "longest-generation"], "on how much memory?"),
        (["-o", "longest-generation", "--memory", "0"], "--memory 0: GiB, needs a number above 0 and up to 8589934592"),
        (["--device", "jetson-orin-nano", "-o", "largest-batch", "--memory", "1e300"], "--memory 1e+300: GiB, needs a"),
        (["-o", "longest-generation", "--memory", "-3"], "--memory -3: GiB"),
        (["-o", "longest-generation", "--memory", "nan"], "--memory nan: GiB"),
        (["-o", "longest-generation", "--memory", "inf"], "--memory inf: GiB"),
        (["--seconds", "nan"], "--seconds nan: needs a finite number from 0"),
        (["--seconds", "-1"], "--seconds -1: needs a finite number from 0"),
    ],
)
def test_odd_input_is_one_line(options: list[str], said: str) -> None:
    if options[1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = kvcal("bench", *([] if "--device" in options else ["--device", "cpu"]), *options)
    lines = [line for line in done.err.splitlines() if line.startswith("kvcal: ")]
    assert done.code in (1, 2, 5)
    assert done.out == ""
    assert len(lines) == 1 and said in lines[0], done.err


def test_memory_is_asked_for_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "rows_of", lambda *given: pytest.fail("measured"))
    done = kvcal("bench", "--device", "cpu", "-o", "quantise", "-o", "longest-generation", "-p", "kivi-2")
    assert done.code == 2 and "on how much memory? give --memory in GiB" in done.complaint
    for where in (HERE_GPU, Target("a100-40gb", None, devices.device("a100-40gb"))):  # that have memory of their own
        bench_options.check_memory(BenchOptions(), where, ["longest-generation"])


@pytest.mark.parametrize("name", ["cpu", "jetson-agx-orin"])
def test_table_4_is_shown_on_every_device_as_projected(name: str, projected: Done) -> None:
    done = kvcal("bench", "--device", name, "-o", "innerq-table-4", "--wide")
    assert done.code == 0, done.err
    assert done.out.splitlines()[1:20] == projected.out.splitlines()[1:20] and "4638 | 4638" in done.out
    assert "projected: " in done.err
    found = kvcal("bench", "--device", name, "-o", "innerq-table-4", "--json").json
    assert all(row["projected"] and row["device"] == "jetson-xavier-nx" for row in found["rows"])
    assert found["largest_miss"] < 0.05


def test_table_4_beside_measured_rows() -> None:
    done = kvcal(
        "bench", "--device", "cpu", "-o", "quantise", "-o", "innerq-table-4", "-p", "kivi-2", "-m", "tiny", "--length", "200",
        "--repeats", "1", "--seconds", "0", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert [row["operation"] for row in done.json["rows"] if not row["projected"]] == ["quantise"]
    assert len(done.json["rows"]) == 1 + 6 * 3 * 7


def test_plots_of_projections(tmp_path: Path) -> None:
    done = kvcal("bench", "--device", "jetson", "--length", "1k,2k", "--plot", tmp_path / "a.png")
    assert done.code == 0, done.err
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_memory_as_large_as_allowed_has_figures() -> None:
    options = [
        "--memory",
        str(bench_options.MOST_GIB),
        "-o",
        "largest-batch",
        "-o",
        "longest-generation",
        "-p",
        "kivi-2",
        "--json",
    ]
    done = kvcal("bench", "--device", "jetson-orin-nano", *options)
    assert done.code == 0, done.err
    assert [row["operation"] for row in done.json["rows"]] == ["largest-batch"] * 2 + ["longest-generation"] * 2


def test_table_4_says_which_bits_are_not_the_papers(projected: Done) -> None:
    """TurboQuant's, as InnerQ's own table heads its column; nothing else differs."""
    lines = [line.split()[:5] for line in projected.out.splitlines() if "(paper " in line]
    every = {"K": ("4.125", "4.25"), "V": ("3.125", "3.25"), "total": ("3.625", "3.75")}
    wanted = [[part, "turboquant-4-3", ours, "(paper", f"{theirs})"] for part, (ours, theirs) in every.items()]
    assert lines == [*wanted, *wanted, wanted[-1]]  # three tables, the last of totals alone


EARLIER = {
    "operation": "quantise", "scheme": "kivi-2", "model": "tiny", "batch": 1, "length": 200, "path": "x", "device": "cpu",
    "projected": False, "microseconds": 2.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"operation": ["quantise"]}, "row 0: operation is a list, must be a text"),
        ({"device": {}}, "row 0: device is an object, must be a text"),
        ({"batch": "1"}, 'row 0: batch is "1", must be a whole number'),
        ({"length": True}, "row 0: length is true, must be a whole number"),
        ({"projected": None}, "row 0: projected is null, must be true or false"),
        ({"dtype": 16}, "row 0: dtype is 16, must be a text, or null"),
        ({"sink": "32"}, 'row 0: sink is "32", must be a whole number, or null'),
        ({"microseconds": "12"}, 'row 0: microseconds is "12", must be a number above 0 and up to 1e+18, or null'),
        ({"microseconds": 0}, "row 0: microseconds is 0, must be a number above 0"),
        ({"microseconds": 0.0}, "row 0: microseconds is 0.0, must be a number above 0"),
        ({"microseconds": float("nan")}, "row 0: microseconds is NaN"),
        ({"microseconds": float("inf")}, "row 0: microseconds is Infinity"),
        ({"microseconds": -1}, "row 0: microseconds is -1"),
        ({"microseconds": True}, "row 0: microseconds is true"),
        ({"microseconds": 10**400}, "row 0: microseconds is 1000000000000000000000000000000000000000…"),
    ],
)
def test_an_earlier_row_that_is_none_of_ours_is_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"rows": [EARLIER, EARLIER | {"microseconds": None}]}))
    assert len(rows.read_earlier(path).rows) == 2
    path.write_text(json.dumps({"rows": [EARLIER | changed]}))
    with pytest.raises(UsageError, match=re.escape(f"--compare {path}: {said}")):
        rows.read_earlier(path)


SET = {"dtype": "float16", "sink": 32, "recent": 96, "block": 32, "queries": None}
MADE = {"kvcal": "0.1.0", "commit": "d3bc10c", "torch": "2.13.0", "triton": None, "processor": "A", "GPU": None}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dtype": "float32"}, "dtype float16 there, float32 here"),
        ({"sink": 16384}, "sink 32 there, 16384 here"),
        ({"sink": 4, "recent": 0}, "sink 32 there, 4 here, recent 96 there, 0 here"),
        ({"block": None}, "block 32 there, none here"),
        ({"queries": 4}, "queries none there, 4 here"),
    ],
)
def test_rows_of_other_settings_are_not_compared(changed: dict[str, Any], said: str) -> None:
    then, now = EARLIER | SET, EARLIER | SET | changed
    assert rows.compared([now], [then]) == []
    lines = list(rows.remarks([now], MADE, rows.Earlier([then], MADE)))
    assert lines == [f"1 rows are not compared, they differ in settings: {said}; give the options of then"]
    both = rows.compared([now, then], [then])
    assert [row["dtype"] for row in both] == ["float16"] and both[0]["times_as_fast"] == 1
    assert len(list(rows.remarks([now, then], MADE, rows.Earlier([then], MADE)))) == 1


def test_older_files_without_settings_are_compared_and_said_to_be() -> None:
    now = [EARLIER | SET | {"microseconds": 5.0}]
    assert [row["times_as_fast"] for row in rows.compared(now, [EARLIER])] == [0.5]
    (line,) = rows.remarks(now, MADE, rows.Earlier([EARLIER], MADE))
    assert line.startswith("it does not say dtype, sink, recent, block of its rows")


def test_older_files_are_of_one_new_token_a_call() -> None:
    then = EARLIER | {name: value for name, value in SET.items() if name != "queries"}
    assert (
        len(rows.compared([EARLIER | SET | {"queries": 1}], [then])) == 1 == len(rows.compared([EARLIER | SET], [then]))
    )
    assert rows.compared([EARLIER | SET | {"queries": 4}], [then]) == []
    (line,) = rows.remarks([EARLIER | SET | {"queries": 4}], MADE, rows.Earlier([then], MADE))
    assert "they differ in settings: queries 1 there, 4 here" in line


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"torch": "2.14.0"}, ["torch 2.14.0 there, 2.13.0 here"]),
        ({"kvcal": "0.0.9", "processor": "B\nC"}, ["kvcal 0.0.9 there, 0.1.0 here, processor B C there, A here"]),
        ({"triton": "3.7.1"}, ["triton 3.7.1 there, none here"]),
        ({"commit": "abc0123-dirty"}, ["commit abc0123-dirty there, d3bc10c here"]),
        ({"commit": None}, ["commit none there, d3bc10c here"]),
    ],
)
def test_a_file_made_otherwise_is_said_to_be(changed: dict[str, Any], said: list[str]) -> None:
    made = list(rows.remarks([EARLIER | SET], MADE, rows.Earlier([EARLIER | SET], MADE | changed)))
    assert made == [f"not made as these rows, times may differ for that: {one}" for one in said]


def test_the_command_says_what_it_does_not_compare(tmp_path: Path) -> None:
    """Windows of another size, another dtype; a file of another version; one of before rows had settings."""
    options = [
        "bench", "--device", "cpu", "--model", "tiny", "-o", "reconstruct", "-p", "kivi-2", "--length", "200",
        "--repeats", "1", "--seconds", "0", "--json",
    ]  # fmt: skip
    done = kvcal(*options)
    assert done.code == 0, done.err
    (row,) = done.json["rows"]
    assert {name: row[name] for name in rows.SETTINGS} == SET
    assert {*rows.ENVIRONMENT} <= set(done.json["machine"]) and done.json["commit"] == checkout.commit()
    path = tmp_path / "earlier.json"
    path.write_text(done.out)

    def lines(*more: str) -> list[str]:
        again = kvcal(*options, "--compare", path, *more)
        assert again.code == 0, again.err
        found = [line for line in again.err.splitlines() if "--compare" in line]
        return [
            f"{len(again.json['compared'])} compared",
            *(line.partition(f"--compare {path}: ")[2] for line in found),
        ]

    assert lines() == ["1 compared"]
    none, why = lines("--dtype", "float32", "--sink", "4")[1:]
    assert "no row in common" in none and "dtype float16 there, float32 here, sink 32 there, 4 here" in why
    path.write_text(json.dumps(done.json | {"version": "0.0.1"}))
    said = f"kvcal 0.0.1 there, {done.json['version']} here"
    assert lines() == ["1 compared", f"not made as these rows, times may differ for that: {said}"]
    older = {name: value for name, value in row.items() if name not in rows.SETTINGS}
    path.write_text(json.dumps(done.json | {"rows": [older]}))
    assert lines()[0] == "1 compared" and "it does not say dtype, sink, recent, block" in lines()[1]


@pytest.mark.parametrize("content", ["[]", "{}", '{"rows": [{"a": 1}]}', "no", "[" * 100_000, b"\xff"])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, content: str | bytes) -> None:
    (tmp_path / "x.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match="--compare"):
        rows.read_earlier(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--csv", "x.png", "--plot", "x.png"], "--plot x.png: is the file of --csv too, and would replace it"),
        (["--csv", "link.png", "--plot", "x.png"], "--plot x.png: is the file of --csv too"),
        (["--csv", "x.json", "--compare", "x.json"], "--csv x.json: is the file of --compare too"),
        (["--csv", "./link.json", "--compare", "x.json"], "--csv link.json: is the file of --compare too"),
        (["--plot", "y.png", "--compare", "x.json"], "--plot y.png: is the file of --compare too"),
        (["--csv", "x.json", "--bundle", "x.json"], "--csv x.json: is the file of --bundle too"),
    ],
)
def test_no_file_replaces_another(given: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    earlier = json.dumps({"rows": [EARLIER]})
    (tmp_path / "x.json").write_text(earlier)
    for link, there in (("link.png", "x.png"), ("link.json", "x.json"), ("y.png", "x.json")):
        (tmp_path / link).symlink_to(there)
    done = kvcal("bench", "--device", "jetson", *given)
    assert done.code == 2 and said in done.complaint
    assert (tmp_path / "x.json").read_text() == earlier and not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("option", ["--csv", "--plot"])
def test_a_folder_that_goes_during_the_run_is_named_by_its_option(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    honest = command.compared

    def gone(*given: Any) -> list[dict[str, Any]]:
        folder.rmdir()
        return honest(*given)

    (tmp_path / "x.json").write_text(json.dumps({"rows": [EARLIER]}))
    monkeypatch.setattr(command, "compared", gone)
    done = kvcal("bench", "--device", "jetson", "--compare", tmp_path / "x.json", option, folder / "x.png")
    assert done.code != 0 and f"is not a folder; create it or give another {option}" in done.err


@pytest.mark.parametrize(
    "option", [["--csv", "no/x.csv"], ["--plot", "no/x.png"], ["--plot", "x.gif"], ["--compare", "no"]]
)
def test_files_that_cannot_be_are_one_exit_code(option: list[str]) -> None:
    assert kvcal("bench", "--device", "jetson", *option).code == 2


# An option that no row takes is refused. What it applies to depends on the device and the operations.

HERE_CPU, HERE_GPU = Target("cpu", torch.device("cpu"), None), Target("card", torch.device("cuda"), None)
PROJECTED = Target("jetson-orin-nano", None, None)  # not here: projected
EVERYWHERE = ("preset", "bundle", "sink", "recent", "model")
TAKEN: list[tuple[Target, str, tuple[str, ...]]] = [  # where, an operation, the options that it takes besides those
    (HERE_CPU, "quantise", ("repeats", "seconds", "seed", "require_kernels", "dtype", "batch", "length", "plot")),
    (HERE_CPU, "generate", ("seed", "require_kernels", "dtype", "batch", "length", "plot")),
    (HERE_CPU, "generate-compiled", ("seed", "require_kernels", "dtype", "batch", "length", "plot")),
    (HERE_CPU, "generate-call", ("seed", "require_kernels", "dtype", "batch", "length", "plot")),
    (HERE_CPU, "largest-batch", ("memory", "require_kernels", "dtype", "length")),
    (HERE_CPU, "longest-generation", ("memory", "require_kernels", "dtype", "batch")),
    (
        HERE_GPU,
        "append",
        ("repeats", "seconds", "seed", "require_kernels", "dtype", "batch", "length", "plot", "queries"),
    ),
    (HERE_GPU, "quantise", ("repeats", "seconds", "seed", "require_kernels", "dtype", "batch", "length", "plot")),
    (HERE_GPU, "generate", ("seed", "require_kernels", "dtype", "batch", "length", "plot")),
    (HERE_GPU, "generate-compiled", ("seed", "require_kernels", "dtype", "batch", "length", "plot")),
    (HERE_GPU, "generate-call", ("seed", "require_kernels", "dtype", "batch", "length", "plot")),
    (HERE_GPU, "largest-batch", ("memory", "seed", "require_kernels", "dtype", "length", "plot")),
    (HERE_GPU, "longest-generation", ("memory", "seed", "require_kernels", "dtype")),
    (PROJECTED, "fused-attention", ("batch", "length", "plot")),
    (PROJECTED, "largest-batch", ("memory", "dtype", "length")),
    (PROJECTED, "longest-generation", ("memory", "dtype", "batch")),
]
DEPENDING = ("memory", "repeats", "seconds", "seed", "require_kernels", "dtype", "batch", "length", "plot", "queries")
WITHOUT = BenchOptions()


@pytest.mark.parametrize(("where", "operation", "taken"), TAKEN, ids=[f"{w.name} {o}" for w, o, _ in TAKEN])
def test_what_an_operation_takes(where: Target, operation: str, taken: tuple[str, ...]) -> None:
    for name in (*DEPENDING, *EVERYWHERE):
        if name in (*taken, *EVERYWHERE):
            bench_options.check_taken(WITHOUT, where, [operation], {name})
        else:
            with pytest.raises(
                UsageError, match=rf"--{name.replace('_', '-')} applies only to .*, and there is none: give "
            ):
                bench_options.check_taken(WITHOUT, where, [operation], {name})


def test_what_has_no_scheme_takes_none() -> None:
    for where, name_of in ((PROJECTED, "innerq-table-4"), (HERE_CPU, "mlp")):
        for name in ("preset", "bundle", "sink", "recent"):
            with pytest.raises(UsageError, match=f"--{name} applies only to rows of a scheme"):
                bench_options.check_taken(WITHOUT, where, [name_of], {name})
    with pytest.raises(UsageError, match="--model applies only to rows of a given model"):
        bench_options.check_taken(WITHOUT, PROJECTED, ["innerq-table-4"], {"model"})
    with pytest.raises(UsageError, match="--sink applies only to schemes by name"):
        bench_options.check_taken(BenchOptions(bundle=[Path("x")]), HERE_CPU, ["quantise"], {"sink"})
    bench_options.check_taken(BenchOptions(preset=["fp8"], bundle=[Path("x")]), HERE_CPU, ["quantise"], {"sink"})


def test_one_row_that_takes_it_is_enough() -> None:
    bench_options.check_taken(WITHOUT, HERE_CPU, ["append", "longest-generation"], {*DEPENDING, *EVERYWHERE})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--device", "cpu", "--memory", "2", "-o", "quantise"],
            "--memory applies only to largest-batch and longest-generation",
        ),
        (["--device", "cpu", "--memory", "2"], "--memory applies only to largest-batch and longest-generation"),
        (
            ["--device", "cpu", "-o", "quantise", "--queries", "2"],
            "--queries applies only to decode attention and append",
        ),
        (
            ["--device", "jetson", "--queries", "2"],
            "--queries applies only to decode attention and append where they run",
        ),
        (["--device", "jetson", "--seed", "0"], "--seed applies only to random data that is measured"),
        (["--device", "jetson", "--require-kernels"], "--require-kernels applies only to rows that are measured"),
        (
            ["--device", "cpu", "-o", "longest-generation", "--memory", "2", "--plot", "x.png"],
            "--plot applies only to rows with a time",
        ),
    ],
)
def test_the_benchmark_refuses_them(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = kvcal("bench", *options)
    assert done.code == 2 and said in done.complaint
    assert list(tmp_path.iterdir()) == []


# The doctor.


def test_doctor_names_versions_and_every_kernel() -> None:
    plain, found = kvcal("doctor"), kvcal("doctor", "--json").json
    assert plain.code == 0, plain.err
    assert found["machine"]["torch"] == torch.__version__ or torch.__version__.startswith(found["machine"]["torch"])
    named = {row["kernel"]: row for row in found["kernels"]}
    with_kernels = {
        "attention",
        "dequantise",
        "higgs",
        "mixkvq",
        "packing",
        "quantise",
        "residual_vq",
        "squat",
        "transform",
    }
    assert {name for name, row in named.items() if "no GPU kernel" not in row["why"]} == with_kernels
    assert {"hadamard", "lattice", "layout"} == set(named) - with_kernels
    assert all(f"kernel {name}: " in plain.out for name in named)
    if not torch.cuda.is_available():
        assert not named["residual_vq"]["runs"]
        assert "no CUDA GPU" in named["residual_vq"]["why"]


@pytest.mark.parametrize(
    ("capability", "triton", "why"),
    [
        (None, "3.7.1", "no CUDA GPU"),
        ((9, 0), None, "triton is not installed"),
        ((7, 2), "3.7.1", "compute capability 7.2: Triton supports 8.0 and up"),
        ((11, 0), "3.7.1", "needs 3.9"),
        ((11, 0), "3.9.0", None),
        ((8, 7), "3.6.0+git1", None),
        ((9, 0), "3.10.0", None),
    ],
)
def test_why_kernels_do_not_run(capability: tuple[int, int] | None, triton: str | None, why: str | None) -> None:
    found = doctor.blocked(capability, triton)
    assert (found is None) == (why is None)
    assert why is None or why in str(found)


def test_bench_help_imports_no_torch() -> None:
    script = (
        "import sys\nfrom kvcal.cli.app import main\nsys.argv = ['kvcal', 'bench', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip().endswith("False")


# On a GPU.


ON_GPU = {  # scheme: what attends to it, what appends to it
    "innerq-hybrid": ("triton: fused", "triton: append"),
    "kivi-2": ("triton: fused", "triton: append"),
    "kivi-2-g128": ("triton: fused", "triton: append"),
    "higgs-2": ("triton: fused", "triton: append"),
    "turboquant-4-3": ("triton: fused", "triton: append"),
    "squat-2": ("triton: fused", "triton: correct, triton: append"),
    "squat-pre-2": ("triton: fused", "triton: correct, triton: append"),
    "mixkvq-16-16": ("triton: fused", CHOSEN),
    "vqkv-256": ("triton: fused, exact tokens by torch", "triton: append to vector codes"),
    "aqua-kv-2": (None, "triton: encode, then copy the store"),
    "mixkvq": (None, CHOSEN),
}
QUANTISED_ON_GPU = {
    **dict.fromkeys(("innerq-hybrid", "kivi-2-g128", "higgs-2"), "triton: quantise"),
    "aqua-kv-2": "triton: encode",
    "vqkv-256": "triton: nearest codeword, stage by stage",
}


def test_what_is_looked_for_on_a_gpu_is_what_kernels_take() -> None:
    """At head_dim 96 none reads 3 bits: the table must be of another."""
    geometry = CATALOGUE["llama-3.1-8b"].geometry
    taken = {name for name in ON_GPU if fused.refuses_anywhere(case(name, 2, 1024, geometry)) is None}
    assert taken == {name for name, (path, _) in ON_GPU.items() if path}
    small = CATALOGUE["llama-3.2-1b"].geometry
    assert small.head_dim == 64 and fused.refuses_anywhere(case("innerq-hybrid", 2, 1024, small)) is None
    other = replace(small, head_dim=96)
    assert "3 bits at head_dim 96" in str(fused.refuses_anywhere(case("innerq-hybrid", 2, 1024, other)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ON_GPU)
def test_rows_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """Figures by the kernels, of each scheme that has one: no row is refused, and none left out."""
    geometry = CATALOGUE["llama-3.1-8b"].geometry
    which = [operation for operation in OPERATIONS.values() if operation.by_default]
    on_gpu = Clock(torch.device("cuda"), repeats=3, seconds=0.0)
    own = [schemes.named(name, geometry)]
    found = measure.rows_of("m", geometry, own, which, [(2, 1024)], on_gpu, dtype, "gpu", lambda line: None)
    by = {row.operation: row for row in found if row.scheme != "fp16"}
    assert [(row.operation, row.refused) for row in by.values() if row.refused] == []
    assert any(row.scheme == "fp16" and row.microseconds for row in found)
    attended, appended = ON_GPU[name]
    assert ("fused-attention" in by) == (attended is not None)
    if attended is not None:
        row = by["fused-attention"]
        assert row.path == attended
        assert row.microseconds and row.fraction_of_copy and row.ratio_to_fp16 and row.fp16_backend
    assert by["append"].path == appended
    assert QUANTISED_ON_GPU.get(name, by["quantise"].path) == by["quantise"].path
    if name == "aqua-kv-2":
        assert by["reconstruct"].path == "triton"
    if name == "mixkvq":
        assert set(by) == {"decode-then-attend", "quantise", "append", "nearest", "reconstruct"}


@pytest.mark.gpu
def test_rows_of_float32_on_a_gpu() -> None:
    """FP16 has 16 bits there, and what the fused kernel does not take is a row."""
    geometry = CATALOGUE["llama-3.2-1b"].geometry
    own = [schemes.named(name, geometry) for name in ("inner-4", "higgs-2", "vqkv-256")]
    which = [operation for operation in OPERATIONS.values() if operation.by_default]
    on_gpu = Clock(torch.device("cuda"), repeats=3, seconds=0.0)
    found = measure.rows_of("m", geometry, own, which, [(2, 1024)], on_gpu, torch.float32, "gpu", lambda line: None)
    peers_found = [row for row in found if row.scheme == "fp16"]
    assert any(row.microseconds for row in peers_found)
    assert not any(row.path.endswith("float32") or row.stored_bits != 16 for row in peers_found)
    ours = {(row.operation, row.scheme): row.refused for row in found if row.scheme != "fp16"}
    assert all("not float32" in str(ours["fused-attention", one.name]) for one in own)
    assert {key: why for key, why in ours.items() if why and key[0] != "fused-attention"} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["kivi-2", "kivi-2-g128", "innerq-hybrid", "inner-4", "higgs-2", "turboquant-4-3", "turboquant-4-3-bytes"]
)
def test_an_append_kernel_with_wrong_scales_is_refused_on_a_gpu(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcal_kernels.quantise import triton as kernel

    geometry = CATALOGUE["llama-3.1-8b"].geometry
    one = Case(schemes.named(name, geometry), geometry, 3, 1024, torch.device("cuda"), dtype)
    made = kernels.append(one)
    assert made.path == "triton: append" and made.check() is None
    honest = kernel.append

    def spoilt(given: Layer, *rest: Any) -> None:
        honest(given, *rest)
        given.values.scale.mul_(1.1)

    monkeypatch.setattr(kernel, "append", spoilt)
    assert "scale of values differ" in str(kernels.append(one).check())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["vqkv-256", "vqkv-4k"])
def test_vector_codes_on_a_gpu(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels, with checks that see wrong codes; --require-kernels accepts them."""
    geometry, gpu = CATALOGUE["llama-3.1-8b"].geometry, torch.device("cuda", torch.cuda.current_device())
    one = Case(schemes.named(name, geometry), geometry, 3, 128 + 4 * 128 + 5, gpu, dtype)
    fused.require_fused([one.scheme], geometry, dtype, gpu)
    attended, appended = fused.fused_attention(one), kernels.append(one)
    assert (attended.check(), appended.check()) == (None, None)
    assert (attended.path, appended.path) == ON_GPU["vqkv-256"]
    honest = codebook.residual_vq.attention.fast().attend
    monkeypatch.setattr(
        codebook.residual_vq.attention.fast(),
        "attend",
        lambda q, k, v, blocks, *rest: honest(q, k, v, blocks - 1, *rest),
    )
    assert "check failed: off by" in str(attended.check())
    honest_append = codebook.residual_vq.append.fast().append

    def spoilt(keys: Any, *rest: Any) -> None:
        honest_append(keys, *rest)
        keys.bands[0].codes.bitwise_xor_(1)

    monkeypatch.setattr(codebook.residual_vq.append.fast(), "append", spoilt)
    assert "times that of the codec's own codes" in str(appended.check())


@pytest.mark.gpu
def test_a_step_that_fails_without_a_message_is_not_recorded() -> None:
    def step() -> None:
        raise AssertionError

    model = SimpleNamespace(device=torch.device("cuda"))
    stepper: Any = SimpleNamespace(model=model, step=step, back=lambda: None)
    assert decoding._record(stepper) == "cannot be recorded: AssertionError"


@pytest.mark.gpu
def test_generation_on_a_gpu() -> None:
    model = TINY["llama"]().to("cuda", torch.bfloat16)
    own = [schemes.named(name, GEOMETRY) for name in ("innerq-base", "mixkvq", "aqua-kv-2")]
    every = caches.kinds(model, GEOMETRY, own)
    found = list(generation.generate_rows("llama", model, every, [(2, 400)], "gpu"))
    found = [
        row for row in found if not (row.refused and "backend" in row.refused)
    ]  # of torch: none for a head_dim, say
    assert {row.scheme for row in found} >= {"fp16", *(one.name for one in own)}
    assert all(row.microseconds and row.more["peak_bytes"] > 0 for row in found), [row.refused for row in found]
