"""The serde in LMCache's own classes: `nox -s tests_vllm`. Where LMCache is not installed these tests are skipped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache", reason="LMCache is not installed: nox -s tests_vllm")

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat

from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.errors import UsageError
from kvcal_vllm.chunks import ChunkCodec
from tests.serving.test_chunks import aqua_transform, bundle
from tests.support.schemes import BLOCK, DIM, HEADS, LAYERS, numbers

pytestmark = pytest.mark.vllm
SHAPE = torch.Size([2, LAYERS, 4 * BLOCK, HEADS * DIM])
KEYS = [ObjectKey(bytes([number]) * 8, "a/model", 0) for number in range(2)]


@pytest.fixture(scope="module")
def made() -> Bundle:
    return bundle(aqua_transform())


@pytest.fixture(scope="module")
def path(made: Bundle, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("bundle") / "x.kvcal.safetensors"
    made.write(file)
    return str(file)


@pytest.fixture(scope="module")
def storage(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """LMCache's adapter of files, made of the module's words as LMCache reads them off its command line."""
    import kvcal_vllm.lmcache as ours

    folder = tmp_path_factory.mktemp("files")
    words = (ours.__doc__ or "").split("--l2-adapter '")[1].split("'\n")[0]
    spec = json.loads(words.replace("/cache", str(folder)).replace("x.kvcal.safetensors", path))
    config = get_l2_adapter_config_class(spec["type"]).from_dict(spec)
    config.serde_config = config._parse_serde_config(spec)
    adapter = create_l2_adapter(config)
    yield SimpleNamespace(adapter=adapter, serde=create_serde_processor(config.serde_config), folder=folder)
    adapter.close()


POOL = TensorMemoryAllocator(torch.zeros(1 << 20, dtype=torch.uint8))


def memory(shape: torch.Size, dtype: torch.dtype, form: Any = MemoryFormat.KV_2LTD) -> Any:
    """LMCache's own memory, as its first tier has it."""
    obj = POOL.allocate(shape, dtype, form)
    assert obj is not None
    return obj


def awaited(ask: Callable[[], Any]) -> Any:
    """What a task of LMCache gives once it is done."""
    for _ in range(2000):
        if (result := ask()) is not None and result != {}:
            return result
        time.sleep(0.01)
    raise AssertionError("no result within 20 s")


def test_chunks_go_to_files_and_come_back(made: Bundle, storage: Any) -> None:
    serde, adapter = storage.serde, storage.adapter
    chunks = [memory(SHAPE, torch.bfloat16) for _ in KEYS]
    for number, chunk in enumerate(chunks):
        chunk.tensor.copy_(numbers(*SHAPE, seed=number))
    size = serde.estimate_serialized_size(MemoryLayoutDesc([SHAPE], [torch.bfloat16]))
    assert size < SHAPE.numel() * 2 / 4
    buffers = [memory(torch.Size([size]), torch.uint8, MemoryFormat.BINARY) for _ in KEYS]
    task = serde.submit_serialize(chunks, buffers, KEYS)
    assert awaited(lambda: serde.query_serialize_result(task)) is True

    task = adapter.submit_store_task(KEYS, buffers)
    assert task in awaited(adapter.pop_completed_store_tasks)
    files = [file for file in storage.folder.rglob("*") if file.is_file()]
    assert [file.stat().st_size for file in files] == [size] * len(KEYS)

    read = [memory(torch.Size([size]), torch.uint8, MemoryFormat.BINARY) for _ in KEYS]
    task = adapter.submit_load_task(KEYS, read)
    awaited(lambda: adapter.query_load_result(task))
    back = [memory(SHAPE, torch.bfloat16) for _ in KEYS]
    task = serde.submit_deserialize(read, back, KEYS)
    assert awaited(lambda: serde.query_deserialize_result(task)) is True
    codec = ChunkCodec(made)
    for chunk, result in zip(chunks, back, strict=True):
        assert torch.equal(result.tensor, codec.decode(codec.encode(chunk.tensor), torch.bfloat16))

    read[0].tensor[size // 2] ^= 1
    for sources, keys in ((read[:1], KEYS[:1]), (read[1:], KEYS[:1])):  # touched; under another's name
        task = serde.submit_deserialize(sources, back[:1], keys)
        assert awaited(lambda task=task: serde.query_deserialize_result(task)) is False


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({}, "bundle = None: must be a bundle's path"),
        ({"bundle": "x", "bits": 2}, "'bits': its entries are bundle, device, max_workers"),
        ({"bundle": "x", "max_workers": 0}, "max_workers = 0: must be an integer, 1 or more"),
    ],
)
def test_entries_that_mean_nothing(entries: dict[str, object], reason: str) -> None:
    import kvcal_vllm.lmcache  # noqa: F401  it registers the serde

    with pytest.raises(UsageError, match=reason):
        create_serde_processor(SerdeConfig("kvcal", entries))
