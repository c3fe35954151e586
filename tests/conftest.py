"""What holds for every test: no network, no files in the user's cache, and `torch.empty` is full of NaN."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

gc.disable()  # until tests are collected: what they and torch's import leave is no garbage, and takes seconds to walk

_assets = tempfile.TemporaryDirectory(prefix="kvcal-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub, which reads both once
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # also for the processes that tests start
os.environ["HF_ASSETS_CACHE"] = _assets.name
os.environ["KVCAL_CACHE_DIR"] = _assets.name  # verdicts on kernels

import pytest  # noqa: E402

if TYPE_CHECKING:
    import torch

_patches = pytest.MonkeyPatch()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        gc.enable()  # xdist's own process collects no tests, and starts its workers the sooner without torch
        return
    import hypothesis
    import torch

    torch.set_num_threads(1)  # the models here are tiny: a second thread only waits, 6 times slower on a busy machine
    hypothesis.settings.register_profile("kvcal", deadline=None, derandomize=True)  # a busy machine is not a bug
    hypothesis.settings.load_profile("kvcal")
    fill_uninitialised()


def fill_uninitialised() -> None:
    """From now on `torch.empty` and its like are full of NaN, or of the largest integer; `pytest_unconfigure` undoes it."""
    import torch
    import torch.utils._device

    # torch's own switch, fill_uninitialized_memory, needs deterministic mode, which also swaps kernels.
    torch.utils._device._device_constructors()  # cached by torch: else a meta context would not know the patched ones
    uninitialised = (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")
    for owner, name in uninitialised:
        _patches.setattr(owner, name, _poisoned(getattr(owner, name)))


LONG = (  # beginnings of names of tests that take 5 to 20 s each and share no fixture with others of their file
    "test_a_bare_install", "test_an_installed_package", "test_case_and_parity_flips", "test_compiled_kernels_agree",
    "test_interpreted_kernel", "test_kernels_in_the_interpreter", "test_listing_brings_codec_and_method",
    "test_logits_and_trials_of_the_triton", "test_logits_of_the_triton", "test_no_mutant_is_accepted",
    "test_nothing_is_served_unwarned", "test_steps_of_the_triton_kernels", "test_the_triton_kernels_in_the_interpreter",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first: at the end one of two workers would wait for the other's."""
    items.sort(key=lambda item: not item.name.startswith(LONG))


def pytest_collection_finish() -> None:
    """Modules and 12,000 tests are no garbage: without them a test's own `gc.collect()` takes 0.02 in place of 0.3 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # a test of a cache makes 700 objects, the usual threshold, in a millisecond
    gc.enable()


def pytest_unconfigure() -> None:
    _patches.undo()
    _assets.cleanup()


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    import torch

    strided = torch.strided

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.device.type != "meta" and tensor.layout == strided and tensor.numel():
            tensor.detach().fill_(_poison(tensor.dtype))
        return tensor

    return poisoned


def _poison(dtype: torch.dtype) -> float | int | bool:
    import torch

    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of new tokens of each attention that a kernel computed."""
    seen: list[int] = []
    from kvcal_artifacts.paths import codebook, fused

    for module in (fused, codebook):
        own: Any = module.attention

        def counted(kernels: str, q: torch.Tensor, *rest: Any, own: Any = own, **more: Any) -> torch.Tensor:
            seen.append(q.shape[2])
            found: torch.Tensor = own(kernels, q, *rest, **more)
            return found

        monkeypatch.setattr(module, "attention", counted)
    return seen
