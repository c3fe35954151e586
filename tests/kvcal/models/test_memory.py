"""Free memory as Linux, a container and CUDA give it, and random weights that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvcal.models import loading, memory, weights
from kvcal.models.catalogue import CATALOGUE
from kvcal.models.names import resolve
from kvcal_artifacts.errors import OutOfMemory
from tests.support.models_fixture import kvcal

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 16 GiB available, of a kernel's own wording, without control groups."""
    (tmp_path / "meminfo").write_text("MemTotal: 24684092 kB\nMemAvailable:   16777216 kB\nHugePages_Total:       0\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "PROCESS_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")
    return tmp_path


def group(folder: Path, limit: tuple[str, object], used: tuple[str, int], stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (limit, used, ("memory.stat", stat)):
        (folder / name).write_text(f"{value}\n")


def test_the_machine_alone(system: Path) -> None:
    assert memory.free_bytes(CPU) == 16 * GIB


def test_groups_of_version_2_and_those_above(system: Path) -> None:
    (system / "cgroup").write_text("0::/user.slice/run\n")
    stat = f"anon 5\ninactive_file {GIB}"
    group(system / "groups/user.slice/run", ("memory.max", "max"), ("memory.current", 3 * GIB), stat)
    assert memory.free_bytes(CPU) == 16 * GIB
    group(system / "groups/user.slice", ("memory.max", 8 * GIB), ("memory.current", 3 * GIB), stat)
    assert memory.free_bytes(CPU) == 6 * GIB
    group(system / "groups/user.slice/run", ("memory.max", 2 * GIB), ("memory.current", 4 * GIB), stat)
    assert memory.free_bytes(CPU) == 0


def test_a_container_of_version_1_sees_its_own_group_at_the_top(system: Path) -> None:
    (system / "cgroup").write_text("4:cpu,memory:/docker/0123\n1:name=systemd:/\n0::/\n")
    names = ("memory.limit_in_bytes", 4 * GIB), ("memory.usage_in_bytes", GIB)
    group(system / "groups/memory", *names, "total_inactive_file 0")
    assert memory.free_bytes(CPU) == 3 * GIB
    group(system / "groups/memory", ("memory.limit_in_bytes", 2**63 - 4096), names[1], "total_inactive_file 0")
    assert memory.free_bytes(CPU) == 16 * GIB


@pytest.mark.parametrize("text", [None, "", "MemTotal: 1 kB", "MemAvailable: much"])
def test_where_the_system_does_not_say_it_nothing_is_refused(system: Path, text: str | None) -> None:
    (system / "meminfo").unlink() if text is None else (system / "meminfo").write_text(text)
    assert memory.free_bytes(CPU) is None
    memory.check_fits("m", 2**60, torch.float32, CPU)


def test_this_machine() -> None:
    free = memory.host_bytes()
    assert free is None or 0 <= free < 2**50


def test_weights_that_just_fit(system: Path) -> None:
    memory.check_fits("m", 16 * GIB, torch.float32, CPU)
    with pytest.raises(
        OutOfMemory, match=r"m: its weights need 16\.0 GiB in float32, 16\.0 GiB are free on cpu; take a "
    ):
        memory.check_fits("m", 16 * GIB + 1, torch.float32, CPU)


def test_random_weights_are_refused_before_any_is_made(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "fill", lambda *given: pytest.fail("allocated"))
    (system / "meminfo").write_text("MemAvailable: 2097152 kB\n")
    size = CATALOGUE["llama-3.2-1b"].geometry.parameters * 2 / GIB
    with pytest.raises(OutOfMemory, match=rf"need {size:.1f} GiB in bfloat16, 2\.0 GiB are free on cpu"):
        loading.load_model(resolve("llama-3.2-1b"), dtype="bfloat16", device="cpu", random_weights=True)


def test_the_benchmark_says_so_before_it_measures(system: Path) -> None:
    done = kvcal(
        "bench", "--device", "cpu", "-o", "append", "-o", "generate", "-p", "kivi-2", "--model", "llama-3.1-70b",
        "--length", "256",
    )  # fmt: skip
    size = CATALOGUE["llama-3.1-70b"].geometry.parameters * 4 / GIB
    assert done.code == 6
    assert f"its weights need {size:.1f} GiB in float32, 16.0 GiB are free on cpu" in done.complaint


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks for the fraction's device by number."""
    cuda = memory.torch.cuda
    asked: list[int] = []

    def known(index: int) -> int:
        assert isinstance(index, int)
        asked.append(index)
        return index

    monkeypatch.setattr(cuda, "current_device", lambda: 1)
    monkeypatch.setattr(cuda, "mem_get_info", lambda index: (6 * GIB, (8 + known(index)) * GIB))
    monkeypatch.setattr(cuda, "get_per_process_memory_fraction", lambda index: 0.5 + 0 * known(index))
    monkeypatch.setattr(cuda, "memory_reserved", lambda index: GIB * known(index))
    assert memory.cuda_bytes(torch.device("cuda")) == 3.5 * GIB
    assert memory.cuda_bytes(torch.device("cuda:0")) == 4 * GIB
    assert asked == [1] * 3 + [0] * 3


@pytest.mark.gpu
def test_free_memory_of_a_gpu() -> None:
    device = torch.device("cuda")
    for _ in range(50):  # others may use the device meanwhile
        before = memory.free_bytes(device)
        held = torch.empty(GIB, dtype=torch.uint8, device=device)
        while_held = memory.free_bytes(device)
        del held  # torch keeps it, and would give it again
        after = memory.free_bytes(device)
        assert before is not None and while_held is not None and after is not None
        if abs(while_held + GIB - before) <= GIB // 8 and abs(after - before) <= GIB // 8:
            break
    else:
        pytest.fail(f"{before}, {while_held}, {after} bytes free before, with and after one GiB")
    with pytest.raises(OutOfMemory, match="are free on cuda"):
        memory.check_fits("m", before + GIB, torch.bfloat16, device)
