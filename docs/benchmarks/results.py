"""Results on pretrained models: every method at 2, 2.25, 3 and 4 stored bits and at its paper's setting, and the verdicts.

    python docs/benchmarks/results.py measure --models ./smollm2-135m,./qwen2.5-coder-0.5b,./gemma-3-270m \
        --calibration books.txt --text wiki.txt --output results
    python docs/benchmarks/results.py tables results/*.json > results.md

`measure` writes OUTPUT/MODEL.json behind every row, to a temporary name first: it can be cut at any second, and the same
command goes on. Rows and claims are those of results.toml, in its order. A process loads the model once, cuts the texts
once, and runs full precision once where its logits fit `--full-gigabytes`. `--jobs 4` measures rows in so many processes:
on a GPU most of a row's time is Python's. `--bundles FOLDER` keeps the fitted bundles, which are then fitted once.
`--rows 'AQUA|2 bits'` takes rows whose TABLE.LABEL has the regular expression; `--budget-seconds` begins no row later,
a like share of it for each model.

`errors`, with the options of `measure`, adds the attention errors that a claim asks for to rows that lack them. Another
device may do that, which each such row names; a row that has them is measured again and compared, weights with it.

`tables` prints Markdown: each claim's verdict with a column for each model; then for each model the claims' figures, and
for each table KL (mean, standard error over windows, median, 99 %, maximum), share of tokens whose likeliest next token is
full precision's, and perplexity. A verdict needs a difference over the same windows that Student's t tells from none at
95 %: 2.13 standard errors of 16 windows. A figure that rows do not have by window has no verdict.

On one GPU, processes take turns: start `nvidia-cuda-mps-control -d` first, and eight rows at a time take 12 to 30 s
instead of 40 to 200. One that ran out of memory is refused, and tried again with `--jobs 2 --batch 4`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import re
import shlex
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcal.evaluate.attention_error import AttentionErrors

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "ablations")]

import run  # noqa: E402
from result_tables import RECIPE, labelled, read_recipe, tables  # noqa: E402

STEP = 32
LOGIT_TOKENS = 320  # first ones of each window, of which rows have attention errors that a claim asks for
STATE: dict[str, Any] = {}  # of a process that measures

Row = dict[str, Any]


def of_claims(recipe: dict[str, Any], by: str) -> set[str]:
    """Keys of the rows that a claim compares by this figure."""
    names = {
        claim[side]
        for claim in recipe["claim"]
        if claim.get("by", "kl") == by
        for side in ("better", "worse")
        if isinstance(claim[side], str)
    }
    return {run.key_of(row) for name, row in labelled(recipe) if name in names or row["label"] in names}


# In a process that measures.


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Load the model and the texts; returns what all rows have in common."""
    import torch

    from kvcal.commands import calibration, workbench
    from kvcal.evaluate.perplexity import FullRuns
    from kvcal.models import loading
    from kvcal.text.token_windows import evaluation_windows

    torch.set_num_threads(options["threads"])
    loaded = workbench.open_model(options["model"], None, dtype=options["dtype"], device=options["device"])
    # commands that fit load the model and cut the text: here they take what is there
    loading.load_model = lambda source, **settings: loaded
    calibration.calibration_windows = shared_windows(calibration.calibration_windows)
    text = evaluation_windows(loaded.tokenizer, options["text"], windows=options["windows"], length=options["length"])
    STATE.update(options=options, loaded=loaded, text=text)
    run.STATE.update(args=options, loaded=loaded, text=text)
    logits = 4 * text.ids.numel() * loaded.model.config.get_text_config().vocab_size
    STATE["full"] = FullRuns() if logits <= options["full_gigabytes"] * 1e9 else None
    STATE["settings"] = {
        "model": Path(options["model"]).name,
        "revision": loaded.revision,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": device_name(loaded.model.device),
        "text": Path(text.source).name,
        "text_sha256": text.sha256,
        "windows": len(text.ids),
        "length": options["length"],
        "step": STEP,
        "logit_tokens": LOGIT_TOKENS,
        "calibration": Path(options["calibration"]).name,
        "fit_windows": options["fit_windows"],
        "fit_length": options["fit_length"],
        "seed": 0,
    }
    settings: dict[str, Any] = STATE["settings"]
    return settings


def shared_windows(cut: Callable[..., Any]) -> Callable[..., Any]:
    """`calibration_windows` that cuts a text once for each number and length of windows."""
    kept: dict[tuple[Any, ...], Any] = {}

    def windows(o: Any, source: Any, tokenizer: Any, origin: Any, say: Any) -> Any:
        key = (str(origin), o.windows, o.holdout, o.length, o.seed, o.column)
        if key not in kept:
            kept[key] = cut(o, source, tokenizer, origin, say)
        return kept[key]

    return windows


def device_name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def measured(key: str, with_logits: bool) -> Row:
    """Figures of one row; of one that cannot be made or measured the reason, as "refused"."""
    from kvcal_artifacts.errors import KVCalError

    try:
        return figures(at_width(json.loads(key)), key, with_logits)
    except KVCalError as error:
        return {"refused": str(error)}
    except Exception as error:  # memory, a fault of ours: the other rows are measured, and this one is tried again
        traceback.print_exc()
        return {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def at_width(what: Row) -> Row:
    """The row for this model's heads: VQKV's stages are those of a head of 64 channels, and a wider one takes as many
    more of them for the same bits.
    """
    from kvcal_artifacts.hf import head_dim_of

    wider = head_dim_of(STATE["loaded"].model.config.get_text_config()) // 64
    if "stages" not in what.get("options", {}) or wider < 2:
        return what
    stages = ",".join(str(int(one) * wider) for one in what["options"]["stages"].split(","))
    return what | {"options": what["options"] | {"stages": stages}}


def figures(what: Row, key: str, with_logits: bool) -> Row:
    from kvcal.commands.common import measured_with
    from kvcal.evaluate.perplexity import evaluate

    started = time.monotonic()
    maker, sha256 = maker_of(what, key)
    fitted = time.monotonic()
    loaded, ids, options = STATE["loaded"], STATE["text"].ids, STATE["options"]
    full, row = evaluate(loaded.model, ids, {"row": maker}, step=STEP, batch=options["batch"], full=STATE["full"])
    result = {name: value for name, value in row.as_dict().items() if name != "name"}
    if with_logits:
        result |= attention(maker)
    return result | {
        "measured_with": measured_with() | ({"commit": options["commit"]} if options["commit"] else {}),
        "command": command_of(what),
        "sha256": sha256,
        "full_perplexity": full.perplexity,
        "fit_seconds": round(fitted - started, 1),
        "eval_seconds": round(time.monotonic() - fitted, 1),
    }


def maker_of(what: Row, key: str) -> tuple[Callable[[], Any], str | None]:
    """What makes a row's caches, and the hash of its bundle's file."""
    from kvcal.commands.workbench import cache_makers
    from kvcal_artifacts.scheme import HeavyHitters

    method, sha256 = made(what, key)
    loaded, selection = STATE["loaded"], HeavyHitters(what["keep"], 0.5) if "keep" in what else None
    [maker] = cache_makers(loaded.model, {"row": method}, loaded.revision, selection).values()
    return maker, sha256


def attention(maker: Callable[[], Any]) -> Row:
    """Attention errors of the first tokens of all windows."""
    from kvcal.evaluate.attention_error import attention_errors

    model, ids = STATE["loaded"].model, STATE["text"].ids
    return errors_by_window([attention_errors(model, one[None, :LOGIT_TOKENS], maker, step=STEP) for one in ids])


def errors_by_window(errors: list[AttentionErrors | None]) -> Row:
    """Attention errors as means over windows, and of each window as NAME_windows; nothing for a scheme that evicts
    tokens.
    """
    windows = [one.as_dict() for one in errors if one is not None]
    if not windows:
        return {}
    by_name = {name: [one[name] for one in windows] for name in windows[0]}
    means = {name: statistics.fmean(values) for name, values in by_name.items()}
    return means | {f"{name}_windows": values for name, values in by_name.items()}


def made(what: Row, key: str) -> tuple[Any, str | None]:
    """A preset, or a bundle and the hash of its file; fitted, or read from --bundles where it is there already."""
    from kvcal_artifacts.bundle import SUFFIX, load_bundle

    if "command" not in what:
        return run.scheme_of(what, Path())[0], None
    options = STATE["options"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options["bundles"] is not None:
            asked = [
                STATE["loaded"].revision,
                *(options[name] for name in ("calibration", "fit_windows", "fit_length")),
            ]
            name = hashlib.sha256(json.dumps([key, *asked], default=str).encode()).hexdigest()[:12]
            folder = Path(options["bundles"]) / Path(options["model"]).name
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{what['command']}-{name}{SUFFIX}"
        else:
            path = folder / f"row{SUFFIX}"
        if not path.exists():
            run.run_command(what["command"], what["options"] | {"output": path})
        return load_bundle(path), hashlib.sha256(path.read_bytes()).hexdigest()


def command_of(what: Row) -> str:
    """The command that makes the row's scheme, less model, text and numbers of windows of all rows."""
    flags = {"backbone": "residual"} if what.get("command") == "fit-predictors" else {}
    options = [(flags.get(name, name), value) for name, value in what["options"].items()]
    if "command" not in what:
        options = [(name, what[name]) for name in ("keys", "values") if name in what] + options
    words = ["kvcal", what.get("command", "preset"), *([what["preset"]] if "preset" in what else [])]
    for name, value in options:
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", shlex.quote(f"{value}")]
    return " ".join(words) + (f"    # kvcal eval --keep {what['keep']}" if "keep" in what else "")


# All rows of all models.


def measure(args: argparse.Namespace) -> int:
    """Exit code: 1 where a row was refused, 0 otherwise, also where the time was up."""
    recipe, models = read_recipe(args.recipe), args.models.split(",")
    args.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.budget_seconds if args.budget_seconds else float("inf")
    shared = {name: value for name, value in vars(args).items() if name not in ("models", "output", "recipe", "action")}
    refused = 0
    for place, model in enumerate(models):
        now = time.monotonic()
        until = now + (end - now) / (len(models) - place)
        refused += of_model(recipe, shared | {"model": model, "fit_device": None}, args.output, until)
    return 1 if refused else 0


def of_model(recipe: dict[str, Any], options: dict[str, Any], folder: Path, until: float) -> int:
    """Measure the rows that the model's file does not have yet; how many were refused."""
    path = folder / f"{Path(options['model']).name}.json"
    logits, chosen = of_claims(recipe, "logit_error"), {}
    for name, row in labelled(recipe):
        if re.search(options["rows"], name):
            chosen.setdefault(run.key_of(row), name)
    with Workers(options) as workers:
        settings = workers.settings
        before = earlier(path, settings)
        without = {key for key in logits if "logit_error" not in before.get(key, {})}
        waiting = [key for key in chosen if key not in before or key in without]
        rows, refused = before, 0
        print(
            f"{settings['model']}: {len(waiting)} rows to measure, {len(chosen) - len(waiting)} are there", flush=True
        )
        for key, result in workers.results(waiting, logits, until):
            rows[key] = result
            run.write(path, {"settings": settings, "rows": rows})
            refused += "refused" in result
            said = result.get("refused") or (
                f"{result['bits_per_value'] or 16:.3f} bits, KL {result['kl']:.5f}, "
                f"{result['fit_seconds']} + {result['eval_seconds']} s"
            )
            done = len(rows.keys() & chosen.keys())
            print(f"{settings['model']} {done}/{len(chosen)} {chosen[key]}: {said}", flush=True)
    return refused


def add_errors(args: argparse.Namespace) -> int:
    """Attention errors of rows that a claim needs them of and that lack them. Exit code: 1 where those of the row that
    is compared are not what its file has, to one part in a thousand.
    """
    recipe, wrong = read_recipe(args.recipe), 0
    for model in args.models.split(","):
        settings = prepare(vars(args) | {"model": model, "fit_device": None})
        path = args.output / f"{settings['model']}.json"
        rows = earlier(path, settings, but=("device", "revision"))
        keys = [key for key in of_claims(recipe, "logit_error") if key in rows]
        known = [key for key in keys if "logit_error" in rows[key]][:1]
        for key in known + [key for key in keys if "logit_error" not in rows[key]]:
            one = attention(maker_of(at_width(json.loads(key)), key)[0])
            print(f"{settings['model']} {key}: logit error {one['logit_error']:.6g}", flush=True)
            if key in known:
                print(f"    on {json.loads(path.read_text())['settings']['device']}: {rows[key]['logit_error']:.6g}")
                wrong += abs(one["logit_error"] / rows[key]["logit_error"] - 1) > 1e-3
                continue
            rows[key] |= one | {"attention_errors_on": settings["device"]}
            run.write(path, json.loads(path.read_text()) | {"rows": rows})
    return 1 if wrong else 0


def earlier(path: Path, settings: dict[str, Any], but: tuple[str, ...] = ()) -> dict[str, Row]:
    """The rows of a file that were measured in this way; those that were refused are tried again. but: settings that may
    differ.
    """
    if not path.exists():
        return {}
    before = json.loads(path.read_text())
    other = {name: x for name, x in before["settings"].items() if settings.get(name) != x and name not in but}
    if other or before["settings"].keys() != settings.keys():
        raise SystemExit(f"{path}: was measured with {other}; give another --output, or the same options")
    return {key: row for key, row in before["rows"].items() if "refused" not in row}


class Workers:
    """Processes that measure rows; with one job this process. settings: what all rows have in common."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._jobs = options["jobs"]
        self._pool: ProcessPoolExecutor | None = None
        if self._jobs == 1:
            self.settings = prepare(options)
            return
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(self._jobs, context, prepare, (options,))
        self.settings = self._pool.submit(settings_here).result()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            processes = list((self._pool._processes or {}).values())
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:  # what they still measure comes too late
                process.terminate()
        STATE.clear()

    def results(self, keys: list[str], logits: set[str], until: float) -> Iterator[tuple[str, Row]]:
        """Each key with its figures as they come, until the time is up."""
        if self._pool is None:
            for key in keys:
                if time.monotonic() < until:
                    yield key, measured(key, key in logits)
            return
        running: dict[Future[Row], str] = {self._pool.submit(measured, key, key in logits): key for key in keys}
        while running and (left := until - time.monotonic()) > 0:
            done, _ = wait(running, min(left, 3600.0), FIRST_COMPLETED)
            for one in done:
                yield running.pop(one), one.result()


def settings_here() -> dict[str, Any]:
    """What `prepare` returned in this process."""
    settings: dict[str, Any] = STATE["settings"]
    return settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("measure", "errors"):
        one = actions.add_parser(name)
        one.add_argument("--recipe", type=Path, default=RECIPE)
        one.add_argument("--models", default="tiny", help="names or folders, separated by commas")
        one.add_argument("--calibration", default="embedded:calibration")
        one.add_argument("--text", default="embedded:evaluation")
        one.add_argument("--rows", default="", help="a regular expression that TABLE.LABEL has")
        one.add_argument("--windows", type=int, default=16)
        one.add_argument("--length", type=int, default=2048)
        one.add_argument("--fit-windows", type=int, default=24)
        one.add_argument("--fit-length", type=int, default=1024)
        one.add_argument("--batch", type=int, help="windows at a time")
        one.add_argument("--dtype", default="float32")
        one.add_argument("--device", default="auto")
        one.add_argument("--threads", type=int, default=1, help="of each process on a CPU")
        one.add_argument("--jobs", type=int, default=1, help="processes; each holds the model")
        one.add_argument(
            "--full-gigabytes", type=float, default=4.0, help="of full precision's logits, for each process"
        )
        one.add_argument("--bundles", type=Path, help="a folder where fitted bundles stay")
        one.add_argument(
            "--commit", help="that rows are of; default: the checkout's, which a copy without .git has not"
        )
        one.add_argument("--budget-seconds", type=float, help="begin no row after so many seconds")
        one.add_argument("--output", type=Path, required=True, help="a folder")
    other = actions.add_parser("tables")
    other.add_argument("--recipe", type=Path, default=RECIPE)
    other.add_argument("files", type=Path, nargs="+", help="MODEL.json of measure")
    args = parser.parse_args()
    if args.action != "tables":
        sys.exit(measure(args) if args.action == "measure" else add_errors(args))
    print(tables(read_recipe(args.recipe), [json.loads(path.read_text()) for path in args.files]), end="")


if __name__ == "__main__":
    main()
