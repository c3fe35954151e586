"""What the conformance suite asks of vLLM; vLLM is not needed for it."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from kvcal_vllm import testing


def on_platform(monkeypatch: pytest.MonkeyPatch, cpu: bool) -> None:
    platform = SimpleNamespace(is_cpu=lambda: cpu)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))


@pytest.mark.parametrize(("cpu", "expected"), [(True, "float32"), (False, "auto")])
def test_dtype_is_the_devices_unless_given(cpu: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_platform(monkeypatch, cpu)
    assert testing.Suite("a-model", {}).dtype == expected
    assert testing.Suite("a-model", {}, "bfloat16").dtype == "bfloat16"
    made: list[testing.Suite] = []
    monkeypatch.setattr(testing, "CHECKS", ("dtype",))
    monkeypatch.setattr(testing.Suite, "check_dtype", lambda suite: made.append(suite) or "seen", raising=False)
    options = ["--options", '{"attention_config": {"backend": "CUSTOM"}}']
    for given in ([], ["--dtype", "float16"]):
        monkeypatch.setattr(sys, "argv", ["testing", "--model", "a-model", *options, *given])
        monkeypatch.setattr(testing, "stop", lambda: None)
        with pytest.raises(SystemExit) as ended:
            testing.main()
        assert ended.value.code == 0
    assert [suite.dtype for suite in made] == [expected, "float16"]


def test_stock_vllm_has_the_memory_and_the_dtype_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or capacities would be of unlike caches."""
    asked: list[dict[str, Any]] = []

    def engine(model: str, **options: Any) -> Any:
        asked.append(options)
        config = SimpleNamespace(num_gpu_blocks=4, block_size=32)
        return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(cache_config=config)))

    monkeypatch.setattr(testing, "engine", engine)
    monkeypatch.setattr(testing, "stock_backends", nullcontext)
    monkeypatch.setattr(testing, "foreign_attention", lambda llm: [])
    monkeypatch.setattr(testing, "_text_logprobs", lambda llm, ids: [])
    monkeypatch.setattr(testing.Suite, "prompts", [[1, 2]])
    given = {"attention_config": {"backend": "CUSTOM"}, "kv_cache_memory_bytes": 256 << 20}
    assert testing.Suite("a-model", given, "float32").stock.capacity == 128
    assert testing.Suite("a-model", {"block_size": 32}, "float32").stock.capacity == 128
    assert testing.Suite("a-model", {"dtype": "bfloat16"}).stock.capacity == 128
    expected = [{"dtype": "float32", "kv_cache_memory_bytes": 256 << 20}, {"dtype": "float32"}, {"dtype": "bfloat16"}]
    assert asked == expected


def test_dtype_of_the_options_is_the_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def engine(model: str, **options: Any) -> None:
        asked.append(options)

    monkeypatch.setattr(testing, "engine", engine)
    monkeypatch.setattr(testing, "foreign_attention", lambda llm: ["mine.Backend"])
    given = {"dtype": "bfloat16", "block_size": 32}
    for dtype in (None, "bfloat16"):
        testing.Suite("a-model", given, dtype)._engine(enable_prefix_caching=False)
    assert asked == [{"dtype": "bfloat16", "block_size": 32, "enable_prefix_caching": False}] * 2
    assert given["dtype"] == "bfloat16"  # as the caller has it
