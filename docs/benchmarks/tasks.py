"""Tasks through the default scheme, the best 2.25-bit scheme and full precision: HumanEval, GSM8K, RULER, needles.

    python docs/benchmarks/tasks.py --qwen ./qwen2.5-coder-0.5b --smollm2 ./smollm2-135m --calibration books.txt \
        --text wiki.txt --data eval --output tasks --jobs 4

Every task, and every length of a RULER task or of needles, is one `kvcal eval --task …` in a process of its own, with all
schemes in it. It writes OUTPUT/NAME.json when it ends, to a temporary name first, and its progress to OUTPUT/NAME.log.
Nothing is fetched: HumanEval and GSM8K are read from --data (`humaneval/HumanEval.jsonl`, `gsm8k/test.jsonl`), where they
are asked; RULER's contexts are generated. Can be cut at any second: the same command leaves out what is there, and
`kvcal eval` goes on behind the last task and row that were answered (in KVCAL_CACHE_DIR or HF_HOME, so leave these as
they were). `--task-seconds` ends one task, `--budget-seconds` all.

Needs lm-eval; `--packages` prints what a machine lacks of it, for pip. GSM8K is lm-eval's gsm8k_cot, whose eight examples
stand in its task file. `--table` prints Markdown from what is there, `--report` makes
pages of it, `--collect` one file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcal.evaluate.paired import Paired

ROOT = Path(__file__).resolve().parents[2]
# those of RULER that need no essays
RULER = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")
PACKAGES = {  # what lm-eval and kvcal import beside torch and Transformers -> what pip calls it
    "lm_eval": "lm-eval", "datasets": "datasets", "dill": "dill", "multiprocess": "multiprocess", "pyarrow": "pyarrow",
    "cloudpickle": "cloudpickle",
    "pandas": "pandas", "dateutil": "python-dateutil", "pytz": "pytz", "xxhash": "xxhash", "sacrebleu": "sacrebleu",
    "portalocker": "portalocker", "colorama": "colorama", "lxml": "lxml", "tabulate": "tabulate", "chardet": "chardet",
    "nltk": "nltk", "wonderwords": "wonderwords", "defusedxml": "defusedxml", "joblib": "joblib",
    "threadpoolctl": "threadpoolctl", "sklearn": "scikit-learn", "scipy": "scipy", "narwhals": "narwhals",
    "fsspec": "fsspec", "requests": "requests", "rich": "rich", "jinja2": "jinja2", "yaml": "pyyaml", "tqdm": "tqdm",
    "typer": "typer", "click": "click", "shellingham": "shellingham", "accelerate": "accelerate", "psutil": "psutil",
}  # fmt: skip
DATA = {  # by task: the file in --data, and where it comes from
    "humaneval": (
        Path("humaneval/HumanEval.jsonl"),
        "data/HumanEval.jsonl.gz of github.com/openai/human-eval (MIT), unpacked",
    ),
    "gsm8k": (
        Path("gsm8k/test.jsonl"),
        "grade_school_math/data/test.jsonl of github.com/openai/grade-school-math (MIT)",
    ),
}
BEST = "--keys transform-2.25 --values transform-2 --key-inputs k1,v1 --value-inputs v1,k1,k0"  # 2.19 to 2.25 bits
BEST_FIT = [*BEST.split(), "--first-layer", ""]


@dataclass(frozen=True)
class Task:
    """One run of `kvcal eval`. options: of the task."""

    name: str
    model: str
    options: tuple[str, ...]


def tasks(args: argparse.Namespace, folder: Path) -> list[Task]:
    """In the order in which they are begun: those that take longest first."""
    limit = ("--limit", str(args.limit)) if args.limit else ()

    def at_most(questions: int) -> tuple[str, str]:
        return ("--limit", str(min(questions, args.limit or questions)))

    path, batch = ("--tasks-path", str(folder)), ("--batch", str(args.batch))
    every = [
        Task("humaneval", args.qwen, ("--task", "humaneval", "--allow-code", *path, *limit, *batch)),
        Task("gsm8k", args.qwen, ("--task", "gsm8k_offline", *path, *at_most(args.gsm8k), *batch)),
    ]
    models = (("qwen", args.qwen, args.qwen_lengths), ("smollm2", args.smollm2, args.smollm2_lengths))
    for name, model, lengths in models:
        for length in reversed(lengths.split(",")):
            needles = ("--task", "needle,agreement", "--lengths", length, *at_most(args.needles))
            every.append(Task(f"needle-{name}-{length}", model, needles))
            for ruler in RULER:
                options = ("--task", ruler, "--lengths", length, *at_most(args.ruler))
                every.append(Task(f"ruler-{name}-{length}-{ruler}", model, options))
    names = [task.name for task in every]
    begun = args.tasks.split(",") if args.tasks else [""]
    if strange := [start for start in begun if not any(name.startswith(start) for name in names)]:
        raise SystemExit(f"--tasks {strange[0]}: allowed are {', '.join(names)}, or how they begin")
    return [task for task in every if task.name.startswith(tuple(begun))]


def write_tasks(data: Path, folder: Path, names: Collection[str]) -> None:
    """The files that --tasks-path names, of those tasks that need them: HumanEval's problems, and GSM8K with lm-eval's
    examples and filters. Ends in one line where data are missing, or lm-eval is, without which needles alone are asked.
    """
    if "lm-eval" in lacking() and any(not name.startswith("needle") for name in names):
        raise SystemExit("tasks.py: needs lm-eval, which is not installed; --packages prints what to install")
    problems = {name: data / DATA[name][0] for name in names if name in DATA}
    for name, path in problems.items():
        if not path.is_file():
            raise SystemExit(
                f"tasks.py: {name} needs {path}, which is not there: it is {DATA[name][1]}; put it there, give another "
                "--data, or choose other --tasks"
            )
    folder.mkdir(parents=True, exist_ok=True)
    if "humaneval" in problems:
        shutil.copy(problems["humaneval"], folder / "humaneval.jsonl")
    if "gsm8k" in problems:
        _write_gsm8k(problems["gsm8k"].resolve(), folder / "gsm8k_offline.yaml")


def _write_gsm8k(problems: Path, place: Path) -> None:
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.origin is not None
    theirs = Path(spec.origin).parent / "tasks"
    place.write_text(
        f"include: {theirs}/gsm8k/gsm8k-cot.yaml\ntask: gsm8k_offline\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs:\n  data_files:\n    test: {problems}\ntest_split: test\ntag: []\n"
    )


def fitted(args: argparse.Namespace, model: str) -> list[Path]:
    """The bundles of a model, fitted where they are not there: AQUA-KV's default, and predictors over the transform."""
    paths = []
    for label, options in (("default", []), ("best", BEST_FIT)):
        path = args.output / "bundles" / f"{Path(model).name}-{label}.kvcal.safetensors"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            text = ["--text", args.calibration, "--windows", str(args.fit_windows), "--length", str(args.fit_length)]
            kvcal(["fit-predictors", "-m", model, *text, *options, "--device", args.device, "--output", str(path)])
        paths.append(path)
    return paths


def command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "kvcal", *words]


def environment() -> dict[str, str]:
    path = [
        *(str(ROOT / part) for part in (".", "kernels", "artifacts")),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **offline, "PYTHONPATH": os.pathsep.join(path)}


def kvcal(words: list[str]) -> None:
    subprocess.run(command(words), env=environment(), check=True)


class Running:
    """A task in a process of its own."""

    def __init__(self, task: Task, bundles: list[Path], args: argparse.Namespace) -> None:
        self.task, self._output, self._started = task, args.output / f"{task.name}.json", time.monotonic()
        self._partial = self._output.with_suffix(".partial")
        shown = [word for path in bundles for word in ("--bundle", str(path))]
        text = ["--text", args.text, "--windows", "1", "--length", "512"]  # the figures beside the tasks
        words = ["eval", "-m", task.model, *shown, *text, *task.options, "--device", args.device, "--json"]
        with self._partial.open("wb") as out, self._output.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(command(words), stdout=out, stderr=log, env=environment())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def ended(self) -> bool:
        if self._process.poll() is None:
            return False
        if self._process.returncode == 0:
            json.loads(self._partial.read_text())
            self._partial.replace(self._output)
        word = "done" if self._process.returncode == 0 else f"exit code {self._process.returncode}, see the log"
        print(f"{self.task.name}: {word} after {self.seconds:.0f} s", flush=True)
        return True

    def stop(self) -> None:
        """Its finished tasks and rows are kept, and a later run goes on from there."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        print(f"{self.task.name}: stopped after {self.seconds:.0f} s; the same command goes on", flush=True)


SETTINGS = ("qwen", "smollm2", "calibration", "text", "fit_windows", "fit_length", "gsm8k", "ruler", "needles", "limit")


def check_settings(args: argparse.Namespace) -> None:
    """Results are left out where they are there, so a folder holds those of one set of settings."""
    settings, place = {name: getattr(args, name) for name in SETTINGS}, args.output / "settings.txt"
    if not place.exists():
        place.write_text(json.dumps(settings, indent=1) + "\n")
    before = json.loads(place.read_text())
    if other := [name for name in SETTINGS if before.get(name) != settings[name]]:
        raise SystemExit(
            f"tasks.py: {args.output} holds results with --{other[0].replace('_', '-')} {before.get(other[0])}, not "
            f"{settings[other[0]]}: give another --output, or delete it"
        )


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 where every task has its file."""
    end = time.monotonic() + args.budget_seconds
    chosen = tasks(args, args.output / "task-files")
    waiting = [task for task in chosen if not (args.output / f"{task.name}.json").exists()]
    write_tasks(args.data, args.output / "task-files", [task.name for task in waiting])
    check_settings(args)
    bundles = {model: fitted(args, model) for model in dict.fromkeys(task.model for task in waiting)}
    running: list[Running] = []
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < args.jobs:
            task = waiting.pop(0)
            print(f"{task.name}: begun", flush=True)
            running.append(Running(task, bundles[task.model], args))
        time.sleep(0.5)
        running = [one for one in running if not one.ended()]
        for one in [one for one in running if one.seconds > args.task_seconds]:
            one.stop()
            running.remove(one)
    for one in running:
        one.stop()
    return int(any(not (args.output / f"{task.name}.json").exists() for task in chosen))


def reports(folder: Path) -> None:
    """A page of `kvcal report` for each model of a folder: MODEL.html in it."""
    files: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.json")):
        files.setdefault(json.loads(path.read_text())["model"], []).append(str(path))
    for model, some in files.items():
        kvcal(["report", *some, "--output", str(folder / f"{Path(model).name}.html")])


def collected(folder: Path, machine: str) -> dict[str, Any]:
    """All results of a folder, without the text's figures beside them. machine: what ran them, and at which commit.
    "packed_by_row" says that shares of packed tokens count each row of a batch up to its own end.
    """
    kept = ("name", "bits_per_value", "sha256", "tasks", "needles")
    runs = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        rows = [{key: row[key] for key in kept if key in row} for row in result["rows"] if "tasks" in row]
        runs.append({"run": path.stem, "model": result["model"], "seconds": result.get("seconds"), "rows": rows})
    return {"machine": machine, "packed_by_row": True, "runs": runs}


def table(files: list[dict[str, Any]]) -> str:
    """Scores beside full precision, with the interval of the difference: a table for each model and set of schemes,
    and for each length the mean of the tasks of RULER that are there.
    """
    lines: list[str] = []
    runs = [run for file in files for run in file["runs"]]
    whole = {run["model"] for file in files if not file.get("packed_by_row") for run in file["runs"]}
    for model, schemes in dict.fromkeys((run["model"], tuple(row["name"] for row in run["rows"])) for run in runs):
        here = [
            run["rows"] for run in runs if (run["model"], tuple(r["name"] for r in run["rows"])) == (model, schemes)
        ]
        heads = [f"{row['name'].removeprefix(f'{model}-')}, {row['bits_per_value']:.2f} bits" for row in here[0]]
        pairs = [(task, [row["tasks"][task] for row in rows]) for rows in here for task in rows[0]["tasks"]]
        pairs.sort(key=lambda pair: _order(pair[0]))
        columns = ["task", "tokens", "questions", "full", *(word for h in heads for word in (h, "difference, 95 %"))]
        lines += [f"**{model}**", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [_line(_titled(task), ones) for task, ones in pairs]
        lines += _means([(_titled(task), ones) for task, ones in pairs], len(columns))
        lines += ["", _least(pairs, model in whole), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _least(pairs: list[tuple[str, list[dict[str, Any]]]], whole: bool) -> str:
    """The least share of packed tokens. whole: batches were counted at their end, where rows that had ended were as
    long as the slowest, so that the tasks of batches are left out.
    """
    named = [(_titled(task)[0], ones) for task, ones in pairs]
    counted = [ones for name, ones in named if not (whole and name in DATA)]
    shares = [one["packed"] for ones in counted for one in ones if one.get("packed") is not None]
    if not shares:
        return "No share of packed tokens was counted row by row."
    start = "At" if len(counted) == len(named) else "Except for HumanEval and GSM8K, at"
    return f"{start} least {min(shares):.0%} of a context were packed when its last token was asked for."


def _titled(task: str) -> tuple[str, int | None]:
    """A task's name for a reader, and its length."""
    name, _, length = task.partition("@")
    return name.removesuffix("_few").removesuffix("_offline"), int(length) if length else None


def _order(task: str) -> tuple[int, str, int]:
    (name, length), first = _titled(task), ("humaneval", "gsm8k", "needle", "agreement")
    return first.index(name) if name in first else len(first), name, length or 0


def _line(task: tuple[str, int | None], ones: list[dict[str, Any]]) -> str:
    name, length = task
    cells = [name, "–" if length is None else f"{length:,}", str(ones[0]["n"]), f"{ones[0]['full']:.3f}"]
    for one in ones:
        low, high = interval(one)
        shown = "" if low is None else f" ({low:+.3f} to {high:+.3f})"
        cells += [f"{one['score']:.3f}", f"{one['difference']:+.3f}{shown}"]
    return f"| {' | '.join(cells)} |"


def interval(one: dict[str, Any]) -> tuple[float, float] | tuple[None, None]:
    """The interval of a task's difference as `kvcal eval` has it today: of scores of 0 or 1 Tango's.

    Files without "differing" are older and have the bootstrap's. Their difference and p-value tell how many questions
    are answered worse and how many better. Where they do not, the file's interval stays; one of no width is none.
    """
    if one["low"] is None or "differing" in one:
        return one["low"], one["high"]
    if len(pairs := possible(one)) == 1:
        return pairs[0].low, pairs[0].high
    return (one["low"], one["high"]) if one["high"] - one["low"] > 1e-9 else (None, None)


def possible(one: dict[str, Any]) -> list[Paired]:
    """The comparisons of scores of 0 or 1 that have a row's scores and McNemar's p-value; none for other scores. Where
    several do, as p is 1 for most differences of one question or none, those whose bootstrap is the row's.
    """
    import numpy as np

    from kvcal.evaluate.paired import Paired, bootstrap

    if one.get("mcnemar") is None:
        return []
    count, ends, pairs = one["n"], (one["low"], one["high"]), {}
    right = round(one["full"] * count)
    gained = round(one["score"] * count) - right
    for worse in range(max(0, -gained), min(right, count - right - gained) + 1):
        better = gained + worse
        scores = [0] * worse + [1] * (right - worse + better) + [0] * (count - right - better)
        full = [1] * right + [0] * (count - right)
        pair = Paired.of(scores, full)
        if pair.mcnemar is not None and math.isclose(pair.mcnemar, one["mcnemar"], abs_tol=1e-9):
            pairs[pair] = np.subtract(scores, full, dtype="f8")
    if len(pairs) == 1:
        return list(pairs)
    near = 0.5 / count  # a bootstrap's ends are whole numbers of questions, and depend a little on their order
    return [pair for pair, differences in pairs.items() if np.allclose(bootstrap(differences), ends, rtol=0, atol=near)]


def _means(pairs: list[tuple[tuple[str, int | None], list[dict[str, Any]]]], columns: int) -> list[str]:
    """Lines with the means of RULER's tasks by length."""
    names, lines = {_titled(task)[0] for task in RULER}, []
    for length in sorted({length for (name, length), _ in pairs if name in names and length is not None}):
        rows = [ones for (name, at), ones in pairs if name in names and at == length]
        means = [sum(ones[0]["full"] for ones in rows) / len(rows)]
        means += [sum(ones[i]["score"] for ones in rows) / len(rows) for i in range(len(rows[0]))]
        cells = [
            f"mean of {len(rows)} of RULER",
            f"{length:,}",
            str(sum(ones[0]["n"] for ones in rows)),
            f"{means[0]:.3f}",
        ]
        for mean in means[1:]:
            cells += [f"{mean:.3f}", f"{mean - means[0]:+.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def lacking() -> list[str]:
    """Names for pip of the packages that are not installed here."""
    return [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qwen", default="./qwen2.5-coder-0.5b", help="a folder")
    parser.add_argument("--smollm2", default="./smollm2-135m", help="a folder")
    parser.add_argument("--data", type=Path, default=Path("eval"), help="a folder, of HumanEval and GSM8K")
    parser.add_argument("--calibration", default="embedded:calibration")
    parser.add_argument("--text", default="embedded:evaluation")
    parser.add_argument("--fit-windows", type=int, default=24)
    parser.add_argument("--fit-length", type=int, default=1024)
    parser.add_argument("--qwen-lengths", default="4k,8k,16k,32k")
    parser.add_argument("--smollm2-lengths", default="4k,8k")
    parser.add_argument("--gsm8k", type=int, default=200, help="questions of GSM8K, from the first")
    parser.add_argument("--ruler", type=int, default=10, help="questions of each RULER task and length")
    parser.add_argument("--needles", type=int, default=4, help="questions of each length and depth")
    parser.add_argument("--limit", type=int, help="questions of every task, at most")
    parser.add_argument("--batch", type=int, default=16, help="questions at a time, of HumanEval and GSM8K")
    parser.add_argument("--tasks", help="names or the beginnings of names, separated by commas")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="tasks at a time")
    parser.add_argument("--task-seconds", type=float, default=1200.0)
    parser.add_argument("--budget-seconds", type=float, default=3600.0)
    parser.add_argument("--output", type=Path, default=Path("tasks"), help="a folder")
    parser.add_argument("--packages", action="store_true", help="print the packages that lm-eval needs and are absent")
    parser.add_argument("--report", action="store_true", help="write OUTPUT/MODEL.html of what is there")
    parser.add_argument("--collect", type=Path, help="write what is in --output to one JSON file")
    parser.add_argument("--machine", default="", help="of --collect: card and commit")
    parser.add_argument("--table", nargs="*", type=Path, help="print Markdown of such files, or of --output")
    args = parser.parse_args()
    if args.packages:
        print("\n".join(lacking()))
    elif args.report:
        reports(args.output)
    elif args.collect:
        args.collect.write_text(json.dumps(collected(args.output, args.machine), indent=1) + "\n")
    elif args.table is not None:
        files = [json.loads(path.read_text()) for path in args.table] or [collected(args.output, args.machine)]
        print(table(files), end="")
    else:
        sys.exit(run(args))


if __name__ == "__main__":
    main()
