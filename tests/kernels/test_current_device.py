"""Work goes to the GPU where its tensors are, whichever is the current one: kernels, their checks, and what is timed."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcal.bench import decoding, timing
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.paths.preflight import codebook_trials, packing_trials, trials, verdicts
from kvcal_kernels import device, quantise
from kvcal_kernels.layout import Form, TransformForm
from tests.artifacts.paths import test_codebook, test_dequantised, test_fused
from tests.kernels import test_higgs, test_mixkvq, test_squat
from tests.support.cases import attention_cases, dequantise_cases, quantise_cases, vq_append_cases, vq_attention_cases
from tests.support.interpreted import needs_triton
from tests.support.models_fixture import kvcal
from tests.support.schemes import token_ids

KERNELS = Path(device.__file__).parent
SECOND = torch.device("cuda", 1)


class Current:
    """Stands for `on`: devices that it has made the current one, the innermost last."""

    def __init__(self) -> None:
        self.inside: list[torch.device] = []

    @contextmanager
    def __call__(self, where: torch.device) -> Iterator[None]:
        self.inside.append(where)
        try:
            yield
        finally:
            self.inside.pop()

    @property
    def now(self) -> torch.device | None:
        return self.inside[-1] if self.inside else None


# What makes a device the current one.


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device of a machine with two GPUs, last, and those before it."""
    current = [0]

    @contextmanager
    def switched(where: torch.device) -> Iterator[None]:
        assert where.index is not None
        current.append(where.index)
        yield
        current.append(0)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", switched)
    return current


def test_another_gpu_is_the_current_one_meanwhile(cuda: list[int]) -> None:
    with device.on(SECOND):
        assert cuda == [0, 1]
        with device.on(SECOND):
            assert cuda == [0, 1]  # is already: nothing is called
    assert cuda == [0, 1, 0]
    with device.on(torch.device("cuda", 0)):
        assert cuda == [0, 1, 0]


def test_no_gpu_is_asked_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("CUDA was asked"))
    for kind in ("cpu", "meta"):
        with device.on(torch.device(kind)):
            pass


# Launches.


def unguarded(source: str) -> set[str]:
    """Public functions of a module from which a kernel may be launched on whatever device is the current one. Launches
    are `name_kernel[...](...)`; those through `Ready` are guarded there.
    """
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    bare: set[str] = set()
    while found := {n for n, node in functions.items() if n not in bare and any(_bare(node, bare))}:
        bare |= found
    return {name for name in bare if not name.startswith("_")}


def _bare(node: ast.AST, known: set[str]) -> Iterator[bool]:
    """Of each launch, or call of a function known to launch, that no `with on(...)` encloses."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.With) and any(
            ast.unparse(item.context_expr).startswith("on(") for item in child.items
        ):
            continue
        if isinstance(child, ast.Call):
            called = child.func
            launch = isinstance(called, ast.Subscript) and ast.unparse(called.value).endswith("_kernel")
            yield launch or (isinstance(called, ast.Name) and called.id in known)
        yield from _bare(child, known)


TRITON_FILES = sorted({*KERNELS.glob("*/**/triton.py"), *KERNELS.glob("*/**/triton/**/*.py")})


@pytest.mark.parametrize("path", TRITON_FILES, ids=lambda path: path.relative_to(KERNELS).as_posix())
def test_every_launch_is_on_the_device_of_its_tensors(path: Path) -> None:
    """`jit` functions launch nothing; what is launched elsewhere than in Triton's files would be found below."""
    assert unguarded(path.read_text()) == set()


def test_no_other_module_launches() -> None:
    roots = [KERNELS, KERNELS.parents[1] / "artifacts", KERNELS.parents[1] / "kvcal"]
    for path in (path for root in roots for path in root.rglob("*.py") if path not in TRITON_FILES):
        assert not unguarded(path.read_text()), path


def test_the_reader_of_launches_sees_them() -> None:
    source = (
        "def f(x):\n    _g(x)\ndef _g(x):\n    a_kernel[(1,)](x)\ndef h(x):\n    with on(x.device):\n        _g(x)\n"
        "def i(x):\n    for y in x:\n        b_kernel[grid](y, n=1)\ndef j(x):\n    with open(x):\n        h(x), "
        "_g(x)\n"
    )
    assert unguarded(source) == {"f", "i", "j"}


class Launched:
    """Stands for a kernel: where it is launched."""

    def __init__(self, kernel: Any, current: Current, seen: list[torch.device | None]) -> None:
        self.arg_names, self.params, self.current, self.seen = kernel.arg_names, kernel.params, current, seen

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given, **options: self.seen.append(self.current.now)

    def warmup(self, *given: Any, **options: Any) -> Launched:
        assert self.current.now is not None, "compiled for whatever device is the current one"
        return self


def _attended() -> None:
    from kvcal_kernels.attention import triton

    own = attention_cases.made(attention_cases.Case(heads=2, ratio=2, blocks=(2,)))
    triton.attend(*own.arguments())


def _quantised() -> None:
    from kvcal_kernels.quantise import triton

    for case in (quantise_cases.Case(), quantise_cases.Case("higgs 2", "higgs 2")):  # in one launch, and in four
        k, v, _ = quantise_cases.inputs(case)
        triton.quantise(k, v, case.rule("key"), case.rule("value"))


def _appended() -> None:
    from kvcal_kernels.quantise import triton

    case = quantise_cases.Case(windows=quantise.Windows(4, 32, 32), cuts=(4,))
    k, v, _ = quantise_cases.inputs(case)
    counts = quantise.Counts(len(k), quantise.Windows(4, 32, 32), k.device)
    triton.advance(counts, torch.full((len(k),), 4, dtype=torch.int32))
    triton.append(quantise_cases.layer(case, k, 4, 4), counts, k, v, case.rule("key"), case.rule("value"))
    triton.observe(torch.zeros(2, 2, 64), torch.zeros(2, dtype=torch.bool), counts, k, 2)


def _reconstructed() -> None:
    from kvcal_kernels.dequantise import triton

    case = dequantise_cases.Case(inputs=())
    codec = dequantise_cases.codec_of(case)
    packed = codec.encode(torch.randn(2, 2, 64, 64))
    triton.dequantise(
        blocks := dequantise_cases.coded(codec, packed),
        triton.prepare(blocks, None, None, 0, torch.float16),  # type: ignore[arg-type]
    )
    whole, parts = [[torch.zeros(2, 2, count, 64).half() for _ in (0, 1)] for count in (64, 9)]
    triton.place(whole, parts, parts, parts, 18)


def _rotated() -> None:
    from kvcal_kernels.higgs import triton

    _, how, x = test_higgs.made(test_higgs.CASES[0])
    triton.encode(x, how)
    triton.pack(torch.zeros(2, 2, 64, 32, dtype=torch.uint8), Form("key", 64, 2, 64, True, True, vector=2))


def _corrected() -> None:
    from kvcal_kernels.squat import triton

    _, own, x = test_squat.made(test_squat.CASES[0])
    triton.corrected(x, own, 2, 32, 32)


def _selected() -> None:
    from kvcal_kernels.mixkvq import triton

    case = test_mixkvq.CASES[0]
    triton.select(*test_mixkvq.made(case), case[0], 32)


def _nearest() -> None:
    from kvcal_kernels.residual_vq.nearest import triton

    x, book = torch.randn(300, 16), torch.randn(64, 16).half()
    triton.nearest(x, book)
    triton.sums(x, torch.zeros(300, dtype=torch.int32), 64)


def _coded_attended() -> None:
    from kvcal_kernels.residual_vq.attention import triton

    given = vq_attention_cases.made(vq_attention_cases.Case())
    triton.attend(*given.arguments())
    triton.decode(given.keys)


def _coded_appended() -> None:
    from kvcal_kernels.residual_vq.append import triton

    held = vq_append_cases.empty(vq_append_cases.Case())
    k, v = torch.randn(2, 2, 2, 1, 64).half()
    triton.append(*held.coded, held.sink, held.ring, held.counts, held.flags, k, v)


LAUNCHES: dict[str, tuple[Callable[[], None], int]] = {  # family, what launches its kernels, how often at least
    "attention": (_attended, 1), "quantise": (_quantised, 5), "append": (_appended, 3), "reconstruct": (_reconstructed, 2),
    "rotated": (_rotated, 2), "compensated": (_corrected, 1), "salience": (_selected, 1), "vq": (_nearest, 4),
    "vq_attention": (_coded_attended, 8), "vq_append": (_coded_appended, 7),
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_are_made_on_the_device_of_their_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that only tell where they are launched."""
    run, least = LAUNCHES[name]
    current, seen = Current(), list[torch.device | None]()
    for path in (KERNELS / "triton.py", *(path for path in TRITON_FILES if path.name != "__init__.py")):
        module = importlib.import_module(".".join(["kvcal_kernels", *path.relative_to(KERNELS).with_suffix("").parts]))
        if hasattr(module, "on"):
            monkeypatch.setattr(module, "on", current)
        for own in [own for own in vars(module) if own.endswith("_kernel")]:
            monkeypatch.setattr(module, own, Launched(getattr(module, own), current, seen))
        for cached in ("_PREPARED", "_PLACES"):
            if hasattr(module, cached):
                monkeypatch.setattr(module, cached, type(getattr(module, cached))())
    from kvcal_kernels.attention import triton

    monkeypatch.setattr(triton.launch, "examine", lambda ring, compiled: None)
    run()
    assert len(seen) >= least and set(seen) == {torch.device("cpu")}, seen
    assert not current.inside


# Checks before the first use.


CASE = quantise_cases.Case()
HIGGS = quantise_cases.higgs("higgs 2", "key", 2, 64)
CODES = [vq_append_cases.codec_of(vq_append_cases.Case(), role) for role in ("key", "value")]
FORMS = [Form(role, 64, 4) for role in ("key", "value")]  # type: ignore[arg-type]
COORDINATES = TransformForm("key", 64, (1, 2, 3, 4)), TransformForm("value", 64, (0, 2, 3, 4))
TRIALS: dict[str, Callable[[torch.device], str | None]] = {  # trial -> what asks for its verdict
    "trial": lambda d: verdicts.verdict(*FORMS, 2, 4, torch.float16, d),
    "append_trial": lambda d: verdicts.append_verdict(CASE.rule("key"), CASE.rule("value"), torch.float16, d),
    "quantise_trial": lambda d: verdicts.quantise_verdict(
        CASE.rule("key"), CASE.rule("value"), (torch.float16, torch.float16), True, d
    ),
    "dequantise_trial": lambda d: verdicts.dequantise_verdict(HIGGS.for_decoding(), torch.float16, 0, d),
    "encode_trial": lambda d: verdicts.encode_verdict(HIGGS, torch.float16, d),
    "transform_trial": lambda d: verdicts.transform_verdict(*COORDINATES, 2, 4, torch.float16, d),
    "codebook_trial": lambda d: verdicts.codebook_verdict(*CODES, 4, torch.float16, d),
    "codebook_append_trial": lambda d: verdicts.codebook_append_verdict(*CODES, torch.float16, d),
}


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Current:
    """Two GPUs of one kind, and where each check is made."""
    made = Current()
    monkeypatch.setenv("KVCAL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(verdicts, "_TRIED", {})
    monkeypatch.setattr(verdicts, "on", made)
    monkeypatch.setattr(verdicts, "triton_version", lambda: "3.7.1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Card 1")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return made


def test_every_trial_is_asked_for_here() -> None:
    modules = (trials, packing_trials, codebook_trials)
    functions = {name for module in modules for name, _ in inspect.getmembers(module, inspect.isfunction)}
    assert {name for name in functions if name.endswith("trial")} == {*TRIALS}


@pytest.mark.parametrize("name", TRIALS)
def test_trials_run_on_the_device_that_is_asked_for(
    name: str, current: Current, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.device | None] = []

    def trial(*given: Any) -> None:
        assert given[-1] == SECOND or SECOND in given
        seen.append(current.now)

    monkeypatch.setattr(verdicts, name, trial)
    assert TRIALS[name](SECOND) is None
    assert seen == [SECOND] and not current.inside


def test_what_one_device_could_not_try_another_of_its_kind_tries(
    current: Current, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory on one says nothing of the other; a verdict is of both, and is not made twice."""
    seen: list[torch.device | None] = []

    def trial(*given: Any) -> str:
        seen.append(current.now)
        if current.now == SECOND:
            raise torch.OutOfMemoryError("5 GiB")
        return "off by 0.3"

    monkeypatch.setattr(verdicts, "trial", trial)
    first, ask = torch.device("cuda", 0), TRIALS["trial"]
    assert [str(ask(where)) for where in (SECOND, SECOND, first, first, SECOND)] == [
        *["its check ran out of memory: 5 GiB"] * 2, *["off by 0.3"] * 3,
    ]  # fmt: skip
    assert seen == [SECOND, first]


# What is timed.


def test_a_clock_times_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current, seen = Current(), list[torch.device | None]()
    monkeypatch.setattr(timing, "on", current)
    clock = timing.Clock(torch.device("cpu"), repeats=3, seconds=0.0)
    assert clock.time(lambda: seen.append(current.now)).repeats == 3
    assert set(seen) == {clock.device} and not current.inside


def test_events_of_a_clock_are_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA has it: an event is recorded on the current device's stream."""
    current, recorded = Current(), list[torch.device | None]()
    event = SimpleNamespace(
        record=lambda: recorded.append(current.now), synchronize=lambda: None, elapsed_time=lambda other: 1.0
    )
    monkeypatch.setattr(timing, "on", current)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    clock = timing.Clock(SECOND, repeats=3, seconds=0.0, _flush=torch.zeros(1))
    assert clock.time(lambda: None).microseconds == 1000
    assert len(recorded) == 6 and set(recorded) == {SECOND}


def test_decode_steps_are_taken_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    current, seen = Current(), list[torch.device | None]()
    start = SimpleNamespace(close=lambda: seen.append(current.now), length=4)

    def maker(*given: int) -> Any:
        seen.append(current.now)
        return start

    @contextmanager
    def attention(*given: Any) -> Iterator[None]:
        seen.append(current.now)
        yield

    monkeypatch.setattr(decoding, "on", current)
    monkeypatch.setattr(decoding, "attention", attention)
    monkeypatch.setattr(decoding, "Stepper", lambda *given: seen.append(current.now))
    monkeypatch.setattr(decoding, "_run", lambda *given: seen.append(current.now))
    decoding.run(SimpleNamespace(device=SECOND), SimpleNamespace(maker=maker), 1, 4)  # type: ignore[arg-type]
    assert seen == [SECOND] * 5


def test_a_benchmark_runs_on_the_device_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcal.bench.target import Target
    from kvcal.commands import bench, bench_measured

    current, seen = Current(), list[torch.device | None]()

    def measured(*given: Any) -> Any:
        seen.append(current.now)
        sys.exit(7)

    monkeypatch.setattr(bench, "on", current)
    monkeypatch.setattr(bench_measured, "measured_rows", measured)
    monkeypatch.setattr(bench, "target", lambda name: Target("Card 1", torch.device(name), None))
    assert kvcal("bench", "--device", "cuda:1").code == 7
    assert seen == [SECOND]


# With two GPUs.


def served_on(where: torch.device, name: str, dtype: torch.dtype, **options: Any) -> tuple[torch.Tensor, list[str]]:
    """Logits of a prompt and steps over a flush, and how each layer attends."""
    kinds = {"vqkv": test_codebook.scheme, "aqua": test_dequantised.chained}
    scheme = kinds[name]() if name in kinds else test_fused.scheme(test_fused.PAIRS[name])
    model = copy.deepcopy(test_fused.model()).to(where, dtype)
    ids, ends = token_ids(2, 121, seed=1).to(where), (0, 100, 101, 104, 105, 120, 121)
    with KVCalCache(scheme, model, **options) as cache, torch.no_grad():
        logits = [model(ids[:, a:b], past_key_values=cache).logits[:, -1].float().cpu() for a, b in pairwise(ends)]
        return torch.stack(logits), [row["path"] for row in cache.describe()["layers"]]


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("longest", [None, 256], ids=["grows", "max_length"])
@pytest.mark.parametrize("name", ["kivi-4", "innerq", "squat", "mixkvq", "higgs-2", "turboquant-4-2", "vqkv", "aqua"])
def test_a_cache_on_the_second_gpu_is_one_on_the_first(
    name: str, longest: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first stays the current one. Verdicts are made anew, on the second."""
    monkeypatch.setenv("KVCAL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(verdicts, "_TRIED", {})
    there, paths = served_on(SECOND, name, torch.float16, max_length=longest)
    assert torch.cuda.current_device() == 0
    here, same = served_on(torch.device("cuda", 0), name, torch.float16, max_length=longest)
    assert paths == same and all("Triton kernel" in path for path in paths), paths
    assert bool(here.isfinite().all()) and float((there - here).norm() / here.norm()) < torch.finfo(torch.float16).eps


@pytest.mark.gpu
@two_gpus
def test_a_benchmark_of_the_second_gpu_has_its_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of launches alone a copy would take microseconds, thousands of times what any memory can, and so would every row:
    what takes the first GPU 100 us takes the second one no tenth of that. A slow neighbour makes nothing fail."""
    monkeypatch.setenv("KVCAL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(verdicts, "_TRIED", {})
    taken: dict[str, dict[tuple[str, str], float]] = {}
    for where in ("cuda:1", "cuda:0"):
        run = ("bench", "--device", where, "-p", "kivi-2", "-p", "higgs-2", "--batch", "8", "--length", "8k", "--json")
        done = kvcal(*run, "--require-kernels")
        assert done.code == 0, done.err
        found = json.loads(done.out)
        assert 1e2 < found["copy_gb_per_s"] < 2e4, found["copy_gb_per_s"]
        rows = {(row["operation"], row["scheme"]): row for row in found["rows"] if row["scheme"] != "fp16"}
        own = rows["fused-attention", "kivi-2"], rows["fused-attention", "higgs-2"]
        assert all(row["refused"] is None and 0.02 < row["fraction_of_copy"] < 1.2 for row in own), own
        taken[where] = {key: row["microseconds"] for key, row in rows.items() if row["microseconds"]}
    assert taken["cuda:0"].keys() == taken["cuda:1"].keys()
    long = [key for key, here in taken["cuda:0"].items() if here > 100]
    assert ("quantise", "kivi-2") in long, taken
    assert all(taken["cuda:1"][key] > taken["cuda:0"][key] / 10 for key in long), taken
