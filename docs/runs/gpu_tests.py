"""GPU tests by several processes on one GPU, within a limit of time: most of their time is compiling, which takes a core.

    PYTHONPATH=.:kernels:artifacts python docs/runs/gpu_tests.py [--jobs 14] [--seconds 280] [--out DIR] [tests/test_x.py ...]

Prints a line a file, every failure, and by name what had not run when time was over; gpu_tests.txt has all output. Exit code 1
unless all passed. Under compute-sanitizer: --tool "compute-sanitizer --tool memcheck", with few tests.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

LINE = re.compile(r"^(tests/\S+\.py::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)


def pytest(*given: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *given]


def collected(paths: list[str]) -> list[str]:
    said = subprocess.run(pytest("--collect-only", "-q", *paths), capture_output=True, text=True).stdout
    return [line for line in said.splitlines() if "::" in line]


def run(tests: list[str], jobs: int, seconds: float, tool: list[str]) -> str:
    """Everything that `jobs` processes print of the tests, dealt out in turns; killed after so many seconds."""
    began, said = time.time(), []
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(i)) for i in range(min(jobs, len(tests)))]
        running = []
        for i, file in enumerate(files):
            with file.open("w") as out:
                command = [*tool, *pytest("-v", *tests[i :: len(files)])]
                running.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
        for one in running:
            try:
                one.wait(max(0.1, seconds + began - time.time()))
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
        said = [file.read_text(errors="replace") for file in files]
    return "\n".join(said)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("paths", nargs="*", default=["tests"])
    options.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    options.add_argument("--seconds", type=float, default=280.0)
    options.add_argument("--tool", default="", help="put before python")
    options.add_argument("--out", default=os.environ.get("OUT", "."))
    chosen = options.parse_args()
    began = time.time()
    tests = collected(chosen.paths)
    said = run(tests, chosen.jobs, chosen.seconds + began - time.time(), shlex.split(chosen.tool)) if tests else ""
    Path(chosen.out, "gpu_tests.txt").write_text(said)
    found = dict(LINE.findall(said))
    for file in sorted({test.split("::")[0] for test in tests}):
        every = Counter(found.get(test, "not run") for test in tests if test.startswith(f"{file}::"))
        print(f"{file}: {', '.join(f'{count} {what.lower()}' for what, count in every.most_common())}")
    bad = [test for test in tests if found.get(test) != "PASSED"]
    for test in bad:
        print(f"{found.get(test, 'not run')}: {test}")
    print(f"{len(tests) - len(bad)} passed of {len(tests)}, {time.time() - began:.0f} s")
    sys.exit(bool(bad) or not tests)


if __name__ == "__main__":
    main()
