"""GPU tests by several processes on one GPU, within a limit of time: most of their time is compiling, which takes a
core.

    PYTHONPATH=.:kernels:artifacts python docs/runs/gpu_tests.py [--jobs 14] [--seconds 280] [--out DIR] [tests/kernels ...]

Prints a line a file, every failure, and by name what had not run when time was over; gpu_tests.txt has all output. Exit
code 1 unless all passed. --few: FEW alone, each kernel once on small shapes.

--tool memcheck or racecheck: under NVIDIA's compute-sanitizer, each tensor in memory of its own, so that what is read
behind one is found. A process whose tests passed has failed nevertheless where the tool says of anything but 0 errors.
Compile first (--few without a tool): a process under a tool takes minutes for that.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

LINE = re.compile(r"^(tests/\S+\.py::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)
SUMMARY = re.compile(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", re.MULTILINE)
CLEAN = re.compile(r"SUMMARY: 0 (errors|hazards)")
SANITIZER = ["compute-sanitizer", "--target-processes", "application-only", "--print-limit", "20"]
SANITIZER += ["--launch-timeout", "300", "--tool"]  # seconds until a process must have come to the GPU; 10 are too few
FEW = (  # file of tests/kernels, and how the name goes on
    ("attention_kernel", "symmetric 3 and symmetric 2, dim 96, ratio 3, queries 3,"),
    ("attention_kernel", "asymmetric 3 and outer 3, dim 64, heads 2, blocks (2, 0, 7)"),  # two warps a program
    ("attention_kernel", "grid 3 of 2 and symmetric 3, dim 64"),
    ("attention_kernel", "bytes 3 of 1 and symmetric 3, dim 64"),  # half tiles in products of bytes
    ("attention_kernel", "tiers 0 16 and outer 2, dim 64"),
    (
        "attention_kernel",
        "outer 2 and outer 2, blocks (6,), spare 0, group 128, dtype torch.bfloat16, kind wide, rotary 64",
    ),
    ("quantise_kernel", "symmetric 3 and hybrid 2, factor rows"),  # a prompt, steps that append, counts that advance
    ("quantise_kernel", "higgs 2 and turboquant 2, factor rows"),
    ("squat", "(64, 16, 64, 32, 2)]"),
    ("squat", "(64, 16, 64, 32, 2)-a ring-1"),  # the block that a step packs
    ("mixkvq", "(Tiers(low=2.0, high=8.0, round_up=8, median=True, full=None, four=None)"),
    ("higgs", "(2, 16, 'token', 'mse', 64, 'token')"),
    ("vq", "64-256"),  # nearest codeword
    ("vq_attention", "Case(keys=((3, 64), (3, 16)), values=((3, 64),), blocks=(3, 1), heads=2, ratio=4, queries=1"),
    ("vq_append", "heads 1, dim 80"),
    ("dequantise", "Case(role='key', batch=2, heads=4, dim=64"),
    ("dequantise", "Case(role='value', batch=2, heads=2, dim=128"),
    ("dequantise", "Placed(batch=2, heads=3, dim=64, sink=4, window=41, new=1, rotary=64, dtype=torch.bfloat16"),
)


@dataclass(frozen=True)
class Part:
    """What one process was given and printed."""

    tests: list[str]
    said: str

    @property
    def summary(self) -> str:
        found = SUMMARY.findall(self.said)
        return found[-1] if found else "the tool did not come to its end"


def pytest(*given: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *given]


def collected(paths: list[str]) -> list[str]:
    done = subprocess.run(pytest("--collect-only", "-q", *paths), capture_output=True, text=True)
    if done.returncode:  # a file that cannot be imported has no tests, and would not be missed
        sys.exit(f"{done.stdout[-3000:]}{done.stderr[-1000:]}\ncollecting tests: exit code {done.returncode}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def few(tests: list[str]) -> list[str]:
    """The first test of each of FEW."""
    found = []
    for file, name in FEW:
        place = re.compile(rf"tests/kernels/(\w+/)?test_{file}\.py::")
        own = [test for test in tests if place.match(test) and f"[{name}" in test]
        if not own:
            raise SystemExit(f"no test of test_{file}.py in tests/kernels begins with [{name}: mend FEW")
        found.append(own[0])
    return found


def run(tests: list[str], jobs: int, seconds: float, tool: str) -> list[Part]:
    """The tests dealt out in turns to `jobs` processes, which are killed after so many seconds."""
    began, command = time.time(), [*SANITIZER, tool] if tool else []
    environment = {**os.environ, **({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool else {})}
    dealt = [tests[i::jobs] for i in range(min(jobs, len(tests)))]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(i)) for i in range(len(dealt))]
        running = []
        for own, file in zip(dealt, files, strict=True):
            with file.open("w") as out:
                given = {"stdout": out, "stderr": subprocess.STDOUT, "env": environment, "start_new_session": True}
                running.append(subprocess.Popen([*command, *pytest("-v", *own)], **given))  # type: ignore[call-overload]
        for one in running:
            try:
                one.wait(max(0.1, seconds + began - time.time()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.pid, signal.SIGKILL)  # the tool's own child, too
                one.wait()
        return [Part(own, file.read_text(errors="replace")) for own, file in zip(dealt, files, strict=True)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("paths", nargs="*", default=["tests"])
    options.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    options.add_argument("--seconds", type=float, default=280.0)
    options.add_argument("--few", action="store_true")
    options.add_argument("--tool", default="", choices=["", "memcheck", "racecheck", "synccheck", "initcheck"])
    options.add_argument("--out", default=os.environ.get("OUT", "."))
    chosen = options.parse_args()
    Path(chosen.out).mkdir(parents=True, exist_ok=True)  # before minutes of tests whose output goes there
    began = time.time()
    tests = collected(chosen.paths)
    tests = few(tests) if chosen.few else tests
    parts = run(tests, chosen.jobs, chosen.seconds + began - time.time(), chosen.tool) if tests else []
    said = "\n".join(part.said for part in parts)
    Path(chosen.out, f"gpu_tests{'_' * bool(chosen.tool)}{chosen.tool}.txt").write_text(said)
    found = dict(LINE.findall(said))
    for file in sorted({test.split("::")[0] for test in tests}):
        every = Counter(found.get(test, "not run") for test in tests if test.startswith(f"{file}::"))
        print(f"{file}: {', '.join(f'{count} {what.lower()}' for what, count in every.most_common())}")
    bad = [test for test in tests if found.get(test) != "PASSED"]
    for test in bad:
        print(f"{found.get(test, 'not run')}: {test}")
    unclean = [part for part in parts if chosen.tool and not CLEAN.search(part.summary)]
    for part in unclean:
        print(f"{chosen.tool}: {part.summary}: {', '.join(part.tests)}")
    if chosen.tool:
        print(f"{chosen.tool}: {len(parts) - len(unclean)} processes clean of {len(parts)}")
    print(f"{len(tests) - len(bad)} passed of {len(tests)}, {time.time() - began:.0f} s")
    sys.exit(bool(bad or unclean) or not tests)


if __name__ == "__main__":
    main()
