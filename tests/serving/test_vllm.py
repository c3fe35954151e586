"""The plug-in in stock vLLM on a CPU: `nox -s tests_vllm`. Where vLLM is not installed these tests are skipped."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: nox -s tests_vllm")

from vllm.plugins import load_general_plugins
from vllm.v1.attention import selector
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from kvcal_artifacts.errors import UnsupportedModel, UsageError
from kvcal_artifacts.scheme import Scheme
from kvcal_vllm import backend, plugin, testing
from kvcal_vllm.gpu.backend import KVCalGPUImpl
from tests.support import served
from tests.support.cases.served_cases import References
from tests.support.pages import FENCE

pytestmark = pytest.mark.vllm
COUNT = testing.NEW
CHUNK = 64  # tokens of a step


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served.write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Parts of a text: random tokens have many likeliest next ones, which rounding exchanges."""
    ids = served.text_ids()
    return [ids[start : start + length] for start, length in ((0, 150), (300, 33), (500, 97), (700, 7), (900, 200))]


@pytest.fixture(scope="module", autouse=True)
def _stop() -> Iterator[None]:
    yield
    testing.stop()


TAILED = ("kivi-2", "kivi-4", "inner-2-symmetric", "inner-4-symmetric", "squat", "mixkvq")  # blocks of 32 tokens


def scheme_of(folder: Path, name: str) -> Scheme:
    """Schemes by name: a preset's, or one that only a bundle can say."""
    if name in served.MADE:
        return served.made_scheme(folder, name)
    if name == "mixed":  # layers of unlike bytes
        return served.preset_scheme(folder, "higgs-2", "turboquant-3", ("0=higgs-4", "5:values=uniform-4"))
    return served.preset_scheme(folder, name, name)


@pytest.fixture(scope="module")
def sources(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bundles")
    return {
        name: served.write_bundle(folder / f"{name}.kvcal.safetensors", tiny, scheme_of(tiny, name))
        for name in ("transform", "mixed", "uniform-4", "higgs-2", "vqkv", *TAILED)
    }


def check_answers(llm: Any, prompts: list[list[int]], expected: served.Expected) -> None:
    """Those of prompts that come together, and of the first one behind a prefix hit."""
    with expected.ties():
        assert testing.answers(llm, prompts, COUNT) == expected.answers
        again = testing.outputs(llm, prompts[:1], COUNT)[0]
    assert again.num_cached_tokens >= 128
    assert list(again.outputs[0].token_ids) == expected.answers[0]


@pytest.mark.parametrize("name", ["uniform-4", "transform", "mixed", "vqkv"])
def test_deterministic_answers_are_those_of_transformers(
    name: str, tiny: Path, sources: dict[str, str], prompts: list[list[int]]
) -> None:
    llm = served.engine(tiny, sources[name])
    check_answers(llm, prompts, served.packed_references(tiny, scheme_of(tiny, name), prompts, COUNT))


@pytest.mark.parametrize("name", TAILED)
def test_answers_of_blocks_are_those_of_kvcals_cache(
    name: str, tiny: Path, sources: dict[str, str], prompts: list[list[int]]
) -> None:
    """A cache with empty windows that gets a prompt block by block attends to packed blocks and to its own exact one.

    In steps of 64 tokens, which cut blocks apart, beside other requests, and again behind a prefix hit.
    """
    llm = served.engine(tiny, sources[name], max_num_batched_tokens=CHUNK)
    check_answers(llm, prompts, served.cache_references(tiny, scheme_of(tiny, name), prompts, COUNT, 32))


def test_default_answers_are_those_of_kvcals_cache(
    tiny: Path, sources: dict[str, str], prompts: list[list[int]]
) -> None:
    """Cold prompts of one step each: windows are empty, so the cache, too, packs a token behind the step it came in."""
    llm = served.engine(tiny, sources["higgs-2"], deterministic=False)
    scheme = served.preset_scheme(tiny, "higgs-2", "higgs-2", block=1)
    expected = served.cache_references(tiny, scheme, prompts, COUNT)
    with expected.ties():
        assert testing.answers(llm, prompts, COUNT) == expected.answers


@pytest.fixture
def gpu_backend() -> Iterator[References]:
    """The backend of GPUs in an engine on a CPU, with references for kernels: all but what they compute."""
    references = References()
    with pytest.MonkeyPatch.context() as patch:
        references.replace_kernels(patch)
        patch.setattr(backend, "check_device", lambda config, gpu: None)
        patch.setattr(plugin, "ON_CPU", plugin.ON_GPU)
        plugin.register()
        selector._cached_get_attn_backend.cache_clear()
        yield references
        testing.stop()
    plugin.register()
    selector._cached_get_attn_backend.cache_clear()


@pytest.mark.parametrize("name", ["uniform-4", "transform", "mixed"])
def test_the_backend_of_gpus_answers_as_transformers_does(
    name: str, tiny: Path, sources: dict[str, str], prompts: list[list[int]], gpu_backend: References
) -> None:
    """In chunks beside other requests and behind a prefix hit."""
    llm = served.engine(tiny, sources[name], max_num_batched_tokens=CHUNK)
    check_answers(llm, prompts, served.packed_references(tiny, scheme_of(tiny, name), prompts, COUNT))
    assert set(gpu_backend.launches) == {"store", "attend"}


def test_a_second_registration_changes_nothing() -> None:
    """vLLM calls the entry point in each of its processes, and more than once in some."""
    from vllm.model_executor.layers.attention import Attention

    plugin.register()
    backend.size_each_layer()
    members = AttentionBackendEnum.CUSTOM, AttentionBackendEnum.CPU_ATTN
    before = [member.get_path() for member in members], Attention.get_kv_cache_spec
    plugin.register()
    backend.size_each_layer()
    assert ([member.get_path() for member in members], Attention.get_kv_cache_spec) == before
    assert before[0] == [plugin.ON_CPU] * 2


class OnTiny(testing.Conformance):
    @classmethod
    def setup_class(cls) -> None:
        cls.folder = TemporaryDirectory()
        cls.model = str(served.write_tiny(Path(cls.folder.name)))
        super().setup_class()

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        cls.folder.cleanup()


class TestBlockByBlock(OnTiny):
    options = served.options("kivi-4")
    least_capacity = 6


def test_the_conformance_suite_sees_what_depends_on_chunks(tiny: Path) -> None:
    """The default mode does, as documented."""
    suite = testing.Suite(str(tiny), served.options("higgs-2", deterministic=False))
    assert suite.check_batch().endswith("tokens the same")
    with pytest.raises(AssertionError, match=r"answer \d differs from token \d+ on"):
        suite.check_chunks()
    suite.nats = 0.0
    with pytest.raises(AssertionError, match="nats from stock vLLM's, at most 0"):
        suite.check_quality()


class Corrupt(CPUAttentionBackend):
    """Another package's backend, whose attention is nothing."""

    @staticmethod
    def get_impl_cls() -> Any:
        return CorruptImpl


class CorruptImpl(CPUAttentionBackendImpl):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs).zero_()


class OnlyPages(CPUAttentionBackend):
    """Another package's backend, whose attention is vLLM's."""


@contextmanager
def registered(kind: type) -> Iterator[None]:
    """Another package's backend as CUSTOM and CPU_ATTN."""
    members, path = (AttentionBackendEnum.CUSTOM, AttentionBackendEnum.CPU_ATTN), f"{__name__}.{kind.__name__}"
    load_general_plugins()
    for member in members:
        register_backend(member, path)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        testing.stop()
        for member in members:
            member.clear_override()
        plugin.register()
        selector._cached_get_attn_backend.cache_clear()


def test_the_conformance_suite_sees_what_is_corrupt(tiny: Path) -> None:
    """Also where a package has replaced vLLM's own backend in this process. Without options nothing is compared."""
    with registered(Corrupt):
        suite = testing.Suite(str(tiny), {"attention_config": {"backend": "CUSTOM"}})
        with pytest.raises(AssertionError, match=r"nats from stock vLLM's, at most 0\.5"):
            suite.check_quality()
        refused = pytest.raises(UsageError, match="select no backend: the engine's attention is vLLM")
        with testing.stock_backends(), refused:
            testing.Suite(str(tiny), {}).check_capacity()


def test_the_conformance_suite_takes_a_backend_that_computes_as_vllm_does(tiny: Path) -> None:
    """In a dtype that the options say. kvcal's without a bundle is no backend: it stands aside."""
    with registered(OnlyPages):
        suite = testing.Suite(str(tiny), {"attention_config": {"backend": "CUSTOM"}, "dtype": "bfloat16"})
        assert suite.check_capacity() == "1.00 x stock vLLM's tokens"
        assert suite.check_quality().startswith("log-probabilities 0.0000 nats from")
    with pytest.raises(UsageError, match="select no backend: the engine's attention is vLLM's own"):
        testing.Suite(str(tiny), {}).check_capacity()


@pytest.mark.parametrize("name", ["higgs-2", "kivi-4"])
def test_answers_do_not_depend_on_preemption(
    name: str, tiny: Path, sources: dict[str, str], prompts: list[list[int]]
) -> None:
    """Two prompts of two pages each that grow to three, where five pages are free: vLLM computes what it preempts again,
    unless a connector has it.
    """
    pair, scheme = [prompts[0][:60], prompts[4][:62]], scheme_of(tiny, name)
    if name in TAILED:
        expected = served.cache_references(tiny, scheme, pair, COUNT, 32)
    else:
        expected = served.packed_references(tiny, scheme, pair, COUNT)
    scarce = served.engine(tiny, sources[name], block_size=32, num_gpu_blocks_override=6, max_model_len=128)
    with testing.preemptions() as preempted, expected.ties():
        assert testing.answers(scarce, pair, COUNT) == expected.answers
    assert preempted


def connector(folder: Path) -> dict[str, object]:
    """vLLM's stock connector that runs on a CPU: it writes the pages of prompts to files, and reads them again."""
    settings = {"shared_storage_path": str(folder)}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}


def test_answers_do_not_depend_on_swap(
    tiny: Path, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts of three pages each, of which one grows to four where six are free: the other is preempted, and gets
    its pages back out of files.
    """
    pair, scheme = [prompts[0][:75], prompts[4][:66]], served.preset_scheme(tiny, "higgs-2", "higgs-2")
    expected = served.packed_references(tiny, scheme, pair, COUNT)
    stock, read = safetensors.torch.load_file, list[str]()

    def load(path: str) -> Any:
        read.append(path)
        return stock(path)

    monkeypatch.setattr(safetensors.torch, "load_file", load)
    scarce = served.engine(
        tiny,
        "higgs-2",
        block_size=32,
        num_gpu_blocks_override=7,
        max_model_len=128,
        enable_prefix_caching=False,
        kv_transfer_config=connector(tmp_path),
    )
    with testing.preemptions() as preempted, expected.ties():
        assert testing.answers(scarce, pair, COUNT) == expected.answers
    assert preempted
    assert len(read) == len(scheme.layers)  # of the preempted request, a file for each layer
    with expected.ties():
        assert testing.answers(scarce, pair[:1], COUNT) == expected.answers[:1]
    assert len(read) == 2 * len(scheme.layers)


def test_capacity_by_vllms_own_line(tiny: Path, sources: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    tokens = {}
    for name in (None, "uniform-4", "higgs-4", "higgs-2", sources["mixed"]):
        with served.log() as lines:
            # a length of its own: vLLM logs a line once, and other tests have engines of as many tokens
            llm = served.engine(tiny, name, dtype="bfloat16", max_model_len=384)
            at_start = len(lines)
            testing.answers(llm, [[2, 3]], 1)
        assert not [line for line in lines[at_start:] if line.startswith("kvcal: ")]
        tokens[name] = served.capacity(lines)
        ours = [line for line in lines if line.startswith("kvcal: ")]
        assert len(ours) == (0 if name is None else 2), ours
        if name is not None:
            assert f"{tokens[name]:,} tokens fit" in ours[1]
            assert testing.capacity(llm) == tokens[name]
    with capsys.disabled():
        for name, count in tokens.items():
            print(f"\n{Path(name or 'stock vLLM').name}: {count:,} tokens, {count / tokens[None]:.2f} x", end=" ")
    assert tokens["uniform-4"] >= 3.4 * tokens[None]
    assert tokens["higgs-4"] >= 3.7 * tokens[None]
    assert tokens["higgs-2"] >= 7 * tokens[None]
    assert tokens["higgs-4"] < tokens[sources["mixed"]] < tokens["higgs-2"]


def test_another_models_bundle_is_refused(tiny: Path, tmp_path: Path) -> None:
    """By a server, in one line of its log beside vLLM's own tracebacks."""
    model = served.reference_model(tiny)
    row = model.model.layers[0].self_attn.k_proj.weight.data[-1]
    before = row.clone()
    row.mul_(1.5)
    try:
        other = served.write_bundle(tmp_path / "other.kvcal.safetensors", tiny, scheme_of(tiny, "higgs-2"))
    finally:
        row.copy_(before)
    server = served.started(served.command(tiny, other, "0"), tmp_path / "log")
    assert server.wait(240) != 0
    said = [line for line in (tmp_path / "log").read_text().splitlines() if "] kvcal: " in line]
    assert len(said) == 1
    assert "ERROR" in said[0]
    assert "] kvcal: other was made for another model: key weights: bundle starts (" in said[0]


def test_what_cannot_be_served_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="CUSTOM without a bundle"):
        served.engine(tiny, None, attention_config={"backend": "CUSTOM"})
    with pytest.raises(UsageError, match="add --attention-backend CUSTOM"):
        served.engine(tiny, None, additional_config={"kvcal": "higgs-2"})
    with pytest.raises(UsageError, match="--block-size 16: a page holds 32 tokens"):
        served.engine(tiny, "higgs-2", block_size=16)
    with pytest.raises(UsageError, match="kv-cache-dtype"):
        served.engine(tiny, "higgs-2", kv_cache_dtype="fp8")
    with pytest.raises(UsageError, match="kivi-4 with a KV connector: unfinished blocks lie outside of pages"):
        served.engine(tiny, "kivi-4", kv_transfer_config=connector(tmp_path))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ({"alibi_slopes": [0.5, 0.25]}, "ALiBi slopes"),
        ({"sliding_window": 8}, "a sliding window of 8"),
        ({"logits_soft_cap": 30.0}, "soft-capped logits"),
        ({"kv_sharing_target_layer_name": "model.layers.0"}, "keys and values of another layer"),
        ({"sinks": torch.zeros(2)}, "attention sinks"),
    ],
)
@pytest.mark.parametrize("kind", [backend.KVCalImpl, KVCalGPUImpl])
def test_layers_that_cannot_be_served_are_refused_in_one_line(kind: Any, layer: dict[str, Any], reason: str) -> None:
    with served.log() as lines, pytest.raises(UnsupportedModel, match=reason):
        kind(2, 64, 0.125, 2, **layer)
    assert lines == [f"kvcal: a layer with {reason}: kvcal's pages hold plain causal attention only"]


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_a_cpu_is_served_by_one_process(kind: str) -> None:
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"), parallel_config=SimpleNamespace(**sizes))
    backend.check_device(config, gpu=False)
    setattr(config.parallel_config, f"{kind}_parallel_size", 2)
    with pytest.raises(UsageError, match=f"{kind} parallel size 2: a CPU is served by one process"):
        backend.check_device(config, gpu=False)


@pytest.fixture(scope="module")
def address(tiny: Path, sources: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server as a user starts it, in processes of its own."""
    command = served.command(tiny, sources["uniform-4"], "{port}")
    with served.listening(command, tmp_path_factory.mktemp("server") / "log") as url:
        yield url


def test_an_openai_request_is_answered(address: str, tiny: Path, prompts: list[list[int]]) -> None:
    body = {"model": str(tiny), "prompt": prompts[1], "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body | {"return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    answer = json.load(urllib.request.urlopen(request, timeout=120))
    expected = served.packed_references(tiny, scheme_of(tiny, "uniform-4"), prompts[1:2], COUNT)
    assert answer["choices"][0]["token_ids"] == expected.answers[0]


GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "vllm.md"


HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def guided(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has what the guide's commands need."""
    folder = tmp_path_factory.mktemp("guide")
    shutil.copytree(tiny, folder / "smollm2-135m")
    shutil.copy(served.TEXTS / "calibration.txt", folder / "texts.txt")
    return folder


def commands(heading: str) -> list[str]:
    """The guide's commands below a heading. A model of the hub is a folder here."""
    [section] = re.findall(rf"^#+ {heading}\n(.*?)(?=^#+ |\Z)", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [fence[3].replace(HUB, "./smollm2-135m") for fence in FENCE.finditer(section) if fence[1] == "bash"]


def shell(command: str, folder: Path) -> str:
    """What a command prints. It must end well."""
    given = ["bash", "-eu", "-o", "pipefail", "-c", command]
    done = subprocess.run(given, cwd=folder, env=served.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("made", ["preset", "fit"])
def test_the_guide_leads_to_an_answer(made: str, guided: Path) -> None:
    """With the bundle of its first step, and with the calibrated one instead."""
    preset, serve, ask = commands("From a model to an answer")
    [fit] = commands("A calibrated bundle")
    make = {"preset": preset, "fit": fit}[made]
    assert make.startswith(f"kvcal {made} ")
    shell(make, guided)
    with served.listening(["bash", "-c", f"exec env {serve.rstrip()} --port {{port}}"], guided / "log", guided) as url:
        log = (guided / "log").read_text()
        assert "tokens fit, where" in log  # before the first request
        assert "Explicitly set (1.0/" in log  # GiB of the cache, by the command; else 92 % of all memory must be free
        answer = json.loads(shell(ask.replace("http://127.0.0.1:8000", url), guided))
    assert answer["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] > 0
    said = [line.split("] kvcal: ")[1] for line in (guided / "log").read_text().splitlines() if "] kvcal: " in line]
    assert [line.split(":")[0] for line in said[:1]] == ["smollm2"]
    assert "tokens fit, where" in said[1]


def test_the_guide_tests_a_backend(guided: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [suite] = commands("Test another backend")
    said = shell(suite, guided)
    lines = [line for line in said.splitlines() if line.split(":")[0] in testing.CHECKS]
    with capsys.disabled():
        print("", *lines, sep="\n", end=" ")
    assert [line.split(":")[0] for line in lines] == list(testing.CHECKS)
    assert "FAILED" not in said
