"""Kernels started without Triton's own binding of arguments: what is checked and compiled once, and what each time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.cases.attention_cases import Case, made
from tests.support.interpreted import needs_triton

pytestmark = needs_triton


class Compiled(dict[Any, Any]):
    """What a kernel is compiled to, by grid: of three numbers, as what Triton compiles wants it."""


class Kernel:
    """Stands for a triton.jit function: what is asked of it."""

    def __init__(self) -> None:
        self.arg_names = ["p_x", "p_count", "n", "SIZE"]
        self.params = [SimpleNamespace(do_not_specialize_on_alignment=name == "p_count") for name in self.arg_names]
        self.warm = 0
        self.options: list[Any] = []
        self.bound: list[Any] = []
        self.started: list[Any] = []
        self.made: Any = Compiled({(3, 1, 1): lambda *given: self.started.append(given)})

    def warmup(self, *given: Any, grid: Any, **options: Any) -> Any:
        self.warm += 1
        self.options.append(options)
        return self.made

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given, **options: self.bound.append((given, options))


def test_what_is_compiled_is_examined_once_and_then_started_by_addresses() -> None:
    from kvcal_kernels.triton import Ready

    kernel = Kernel()
    seen: list[Any] = []
    x, count = torch.zeros(4), torch.zeros(3, dtype=torch.int32)[1:]  # counts may lie anywhere
    assert x.data_ptr() % 16 == 0 and count.data_ptr() % 16
    options = {"num_warps": 1, "SIZE": 64}
    for ready in (Ready(kernel, (3,), options, seen.append), Ready(kernel, (3,), options, seen.append)):
        for n in (5, 6):
            ready((x, count), n)
    assert kernel.warm == 2 and seen == [kernel.made] and not kernel.bound
    assert kernel.started == [(x.data_ptr(), count.data_ptr(), n, 64) for n in (5, 6)] * 2


def test_what_triton_would_compile_otherwise_is_left_to_it() -> None:
    from kvcal_kernels.triton import Ready

    kernel = Kernel()
    seen: list[Any] = []
    x, count = torch.zeros(5)[1:], torch.zeros(2, dtype=torch.int32)
    ready = Ready(kernel, (3,), {"num_warps": 1, "SIZE": 64}, seen.append)
    ready((x, count), 5)
    ready((x, count), 5)
    assert len(seen) == 1 and not kernel.started
    (given, options) = kernel.bound[1]
    assert given[0] is x and options == {"num_warps": 1, "SIZE": 64}


def test_a_kernel_that_fails_its_examination_is_never_started() -> None:
    from kvcal_kernels.triton import Ready

    def refuse(compiled: Any) -> None:
        raise RuntimeError("unknown layout")

    kernel = Kernel()
    ready = Ready(kernel, (3,), {"SIZE": 64}, refuse)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="unknown layout"):
            ready((torch.zeros(4), torch.zeros(2, dtype=torch.int32)), 5)
    assert not kernel.started and not kernel.bound


def test_two_threads_first_launches_are_examined_once() -> None:
    """Triton gives both the same compiled kernel, which must not be loaded before it has been examined."""
    from kvcal_kernels.triton import Ready

    kernel, examined, failed = Kernel(), list[Any](), list[Exception]()
    begun, compile_ = threading.Barrier(2), kernel.warmup

    def warmup(*given: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return compile_(*given, **options)

    def examine(made: Any) -> None:
        time.sleep(0.1)
        if examined:
            raise RuntimeError("was loaded before")
        examined.append(made)

    def launch(ready: Ready) -> None:
        begun.wait(10)
        try:
            ready((torch.zeros(4), torch.zeros(2, dtype=torch.int32)), 5)
        except Exception as error:
            failed.append(error)

    kernel.warmup = warmup  # type: ignore[method-assign]
    own = [Ready(kernel, (3,), {"SIZE": 64}, examine) for _ in range(2)]
    threads = [threading.Thread(target=launch, args=(ready,)) for ready in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not failed and examined == [kernel.made] and len(kernel.started) == 2


def test_kernels_of_other_constants_are_compiled_side_by_side() -> None:
    from kvcal_kernels.triton import Ready

    kernel, both = Kernel(), threading.Barrier(2)
    compile_ = kernel.warmup

    def warmup(*given: Any, **options: Any) -> Any:
        both.wait(10)  # which breaks where one waits for the other's end
        return compile_(*given, **options)

    kernel.warmup = warmup  # type: ignore[method-assign]
    tensors = torch.zeros(4), torch.zeros(2, dtype=torch.int32)
    threads = [
        threading.Thread(target=Ready(kernel, (3,), {"SIZE": size}, lambda made: None), args=(tensors, 5))
        for size in (32, 64)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not both.broken and sorted(given[3] for given in kernel.started) == [32, 64]


def test_what_is_prepared_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcal_kernels.triton import Prepared

    monkeypatch.setattr(Prepared, "MOST", 3)
    held = Prepared()
    for i in range(7):
        held[i] = i
        assert held[i] == i and len(held) <= 3


class Metadata(NamedTuple):
    shared: int = 1000
    target: str = "a GPU"


class Loadable:
    """What Triton compiled and did not load yet."""

    def __init__(self) -> None:
        self.asm, self.metadata, self.packed_metadata = {"ttgir": ""}, Metadata(), "packed 1000"
        self.module: Any = None
        self.function: Any = None
        self.loaded: list[int] = []

    def _init_handles(self) -> None:
        if self.module is None:
            self.module = self.function = object()
            self.loaded.append(self.metadata.shared)


@pytest.mark.parametrize("ring", [0, 4096])
@pytest.mark.parametrize("fails", ["_allow", "programs_at_once"])
def test_an_examination_that_failed_is_made_again(fails: str, ring: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring's room is added once, and nothing is launched without it."""
    from kvcal_kernels.attention import triton

    shared = 1024 + ring if ring else 1000
    monkeypatch.setattr(
        triton.launch, "make_backend", lambda target: SimpleNamespace(pack_metadata=lambda m: f"packed {m.shared}")
    )
    monkeypatch.setattr(triton.launch, "PROGRAMS_AT_ONCE", {})

    def refused(made: Any) -> int:
        raise RuntimeError("CUDA error 201")

    own = Loadable()
    with monkeypatch.context() as then:
        then.setattr(triton.launch, "_allow", lambda made: None)
        then.setattr(triton.launch, "programs_at_once", lambda made: 3)
        then.setattr(triton.launch, fails, refused)
        with pytest.raises(RuntimeError, match="CUDA error 201"):
            triton.launch.examine(ring, own)
    assert own.module is None and own.metadata.shared == 1000 and own.packed_metadata == "packed 1000"
    assert not triton.launch.PROGRAMS_AT_ONCE
    monkeypatch.setattr(triton.launch, "_allow", lambda made: None)
    monkeypatch.setattr(triton.launch, "programs_at_once", lambda made: 3)
    triton.launch.examine(ring, own)
    assert own.loaded == [shared, shared] and own.packed_metadata == f"packed {shared}"
    assert {id(own): 3} == triton.launch.PROGRAMS_AT_ONCE


def test_a_kernel_that_was_loaded_without_its_ring_is_refused() -> None:
    from kvcal_kernels.attention import triton

    own = Loadable()
    own._init_handles()
    with pytest.raises(RuntimeError, match="loaded before its shared memory was enlarged"):
        triton.launch.examine(4096, own)


class Attention(Kernel):
    def __init__(self) -> None:
        from kvcal_kernels.attention.triton import attend_kernel

        super().__init__()
        self.arg_names, self.params = attend_kernel.arg_names, attend_kernel.params
        self.made = _Anywhere(self.started)


class _Anywhere:
    """A compiled kernel with any grid."""

    def __init__(self, started: list[Any]) -> None:
        self.started = started

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given: self.started.append((grid, given))


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Attention:
    from kvcal_kernels.attention import triton

    own = Attention()
    monkeypatch.setattr(triton.launch, "attend_kernel", own)
    monkeypatch.setattr(triton.launch, "examine", lambda ring, compiled: None)
    monkeypatch.setattr(triton.launch, "_PREPARED", type(triton.launch._PREPARED)())
    return own


def test_checks_of_attention_are_made_once_for_tensors_alike(
    attention: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcal_kernels.attention import triton

    own, checked = made(Case(heads=2, ratio=2, blocks=(2,))), []
    from kvcal_kernels.attention import checks

    check = checks._check
    monkeypatch.setattr(checks, "_check", lambda *given: (checked.append(1), check(*given)))
    for _ in range(3):
        triton.attend(*own.arguments())
    other = replace(own, q=own.q.clone(), sink=tuple(x.clone() for x in own.sink))  # type: ignore[arg-type]
    triton.attend(*other.arguments())
    assert len(checked) == 2  # q twice, as it is packed_q, too
    assert attention.warm == 1 and len(attention.started) == 4
    (grid, given) = attention.started[-1]
    names = dict(zip(attention.arg_names, given, strict=True))
    assert grid == (1, 2, names["splits"])  # a row of two heads
    assert names["p_q"] == other.q.data_ptr() and names["p_sink_v"] == other.sink[1].data_ptr()
    assert (
        names["p_recent"] == own.recent[2].data_ptr()
        and names["capacity"] == own.keys.words.shape[2]
        and names["HEADS"] == 2
    )


@pytest.mark.parametrize(("blocks", "warps"), [(32, 1), (64, 4), (796, 4), (800, 1)])
def test_attention_launches_what_is_chosen(
    blocks: int, warps: int, attention: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 8 multiprocessors two groups are few, and have few blocks up to a room of 799."""
    from kvcal_kernels.attention import triton

    monkeypatch.setattr(triton.launch, "processors_of", lambda device: 8)
    own = made(Case("symmetric 2", "symmetric 2", dim=64, heads=2, ratio=2, blocks=(blocks,), spare=0))
    assert own.keys.words.shape[2] == blocks
    triton.attend(*own.arguments())
    (options,) = attention.options
    names = dict(zip(attention.arg_names, attention.started[0][1], strict=True))
    wanted = triton.chosen(own.keys.form, own.values.form, 2, False, 2, blocks, torch.device("cpu"))
    assert warps == wanted.warps == options["num_warps"] == names["NW"]
    assert options.get("maxnreg", 168) == wanted.registers


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": lambda o: o.q.float()}, "queries of torch.float32"),
        ({"blocks": lambda o: o.blocks.long()}, "blocks: .*int64"),
        ({"recent": lambda o: (o.recent[0].bfloat16(), *o.recent[1:])}, "recent: keys .* torch.bfloat16"),
        ({"sink": lambda o: (o.sink[0].mT.contiguous().mT, *o.sink[1:])}, "sink: strides"),
        ({"keys": lambda o: replace(o.keys, words=o.keys.words.to("meta"))}, "words of keys on meta, queries on cpu"),
    ],
)
def test_tensors_like_none_before_are_checked(attention: Attention, change: dict[str, Any], says: str) -> None:
    from kvcal_kernels.attention import triton

    own = made(Case(heads=2, ratio=2, blocks=(2,)))
    triton.attend(*own.arguments())
    with pytest.raises(ValueError, match=says):
        triton.attend(*replace(own, **{name: make(own) for name, make in change.items()}).arguments())
    assert len(attention.started) == 1


THREADS = """
import threading, torch
from tests.support.cases.attention_cases import Case, SCHEMES, made
from kvcal_kernels.attention import triton
given, outs, begun = made(Case(*SCHEMES["HIGGS 2"], 64, blocks=(9,))).to("cuda"), [], threading.Barrier(4)
def launch():
    begun.wait(60)
    outs.append(triton.attend(*given.arguments()))
threads = [threading.Thread(target=launch) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
torch.cuda.synchronize()
print(len(outs), all(torch.equal(out, triton.attend(*given.arguments())) for out in outs))
"""


@pytest.mark.gpu
def test_threads_launch_a_grid_kernel_for_the_first_time_on_a_gpu() -> None:
    """With a ring behind what Triton manages, for which a kernel is examined before it is loaded; in a process of its
    own.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.returncode) == ("4 True\n", 0), done.stderr


@pytest.mark.gpu
def test_queries_at_an_odd_address_get_the_same_attention() -> None:
    """Compiled otherwise, and started by Triton itself."""
    from kvcal_kernels.attention import triton

    own = made(Case(heads=2, ratio=4, blocks=(9,), sink=(32,), recent=(40,))).to("cuda")
    odd = torch.empty(own.q.numel() + 4, dtype=own.q.dtype, device="cuda")[4:].view_as(own.q).copy_(own.q)
    assert odd.data_ptr() % 16 == 8
    wanted = triton.attend(*own.arguments())
    found = triton.attend(*replace(own, q=odd).arguments())
    assert torch.equal(found, wanted) and bool(wanted.isfinite().all())
    with pytest.raises(ValueError, match="sink values on cpu, queries on cuda:0: must be on one device"):
        triton.attend(*replace(own, sink=(own.sink[0], own.sink[1].cpu(), own.sink[2])).arguments())
