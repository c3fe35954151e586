"""What the commands do once their options are parsed; everything here may import torch."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvcal_artifacts.bundle import load_bundle
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.scheme import FRAMES

from . import corpus, models
from .evaluate.perplexity import evaluate
from .fit import FitOptions, fit
from .methods.aqua_kv import AquaKV
from .report.progress import progress
from .workbench import cache_makers, check_bundle, default_output, open_for_fit, open_model, rows_named

Say = Callable[[str], None]
RANDOM_TOKENS = "random token ids (random weights)"


RANDOM_WINDOWS = 4  # of an evaluation that is a smoke test: random weights have no quality to measure
DEMO_FIT = {"windows": 48, "holdout": 6, "length": 1024}  # of 72: the whole demo within 90 s on 2 cores
DEMO_WINDOWS = 6
EVAL_LENGTH = {"embedded": 1024, "hub": 8192, "folder": 8192}


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _names(text: str) -> tuple[str, ...]:
    """ "v1,k0" -> ("v1", "k0"); "none" -> ()."""
    return () if text.strip().lower() in ("", "none") else tuple(part.strip() for part in text.split(","))


def aqua_method(o: dict[str, Any]) -> AquaKV:
    return AquaKV(
        backbone=o["backbone"],
        first_layer=o["first_layer"],
        predictor=o["predictor"],
        rank=o["rank"],
        key_inputs=_names(o["key_inputs"]),
        value_inputs=_names(o["value_inputs"]),
        rope=o["frame"],
        ridge=o["ridge"],
        quantiser_agnostic=o["quantiser_agnostic"],
        sink=o["sink"],
        recent=o["recent"],
        block=o["block"],
        mlp_epochs=o["mlp_epochs"],
    )


def run_fit_predictors(o: dict[str, Any], say: Say) -> dict[str, Any]:
    """Options by name, as the command line gives them -> what was written and how good it is."""
    started = time.monotonic()
    method = aqua_method(o)
    if o["spill"] not in ("device", "cpu", "disk"):
        raise UsageError(f"--spill {o['spill']}: allowed are device, cpu and disk")
    if o["frame"] not in FRAMES:
        raise UsageError(f"--frame {o['frame']}: allowed are {', '.join(FRAMES)}")
    source = models.resolve(o["model"], o["revision"])
    text_source = text_for(o, source, "calibration")
    say(f"text: {text_source}")
    output = Path(o["output"] or default_output(source, method.name))
    opened = open_for_fit(
        o["model"], o["revision"], dtype=o["dtype"], device=o["device"], layerwise=o["layerwise"],
        random_weights=o["random_weights"], seed=o["seed"],
    )  # fmt: skip
    text = calibration_windows(o, source, opened.tokenizer, text_source)
    check_context(source, int(text.train.shape[1]), say)
    result = fit(
        method, opened.source, text, output, model_record=opened.record, revision=opened.revision,
        device=opened.device, seed=o["seed"], say=say,
        options=FitOptions(o["batch"], o["spill"], o["spill_dir"], o["resume"]),
    )  # fmt: skip
    scheme, metrics = result.bundle.scheme, result.bundle.metrics
    return {
        "bundle": str(result.path),
        "sha256": result.sha256,
        "bytes": result.path.stat().st_size,
        "bits_per_value": round(scheme.bits_per_value(), 4),
        "predictor_bytes": scheme.resident_bytes(),
        "key_explained_variance": metrics.get("key_explained_variance"),
        "value_explained_variance": metrics.get("value_explained_variance"),
        "key_relative_error": metrics.get("key_relative_error"),
        "value_relative_error": metrics.get("value_relative_error"),
        "train_windows": len(text.train),
        "holdout_windows": len(text.holdout),
        "length": int(text.train.shape[1]),
        "resumed_layers": result.resumed_layers,
        "seconds": round(time.monotonic() - started, 1),
        "phases": result.seconds,
        "peak_device_bytes": torch.cuda.max_memory_allocated(opened.device) if opened.device.type == "cuda" else None,
        "layers": result.layer_metrics,
    }


def given_text(o: dict[str, Any]) -> str:
    """--text as given; an empty one (an unset variable, say) is not taken for none."""
    if not str(o["text"]).strip():
        raise UsageError("--text is empty: give a file, a folder or a data set, or leave the option out")
    return str(o["text"])


def check_context(source: models.ModelSource, length: int, say: Say) -> None:
    """Said, not refused: models run beyond their context, badly."""
    context = models.geometry(source).context
    if length > context:
        say(f"note: windows of {length} tokens exceed the {context} that {source.label} was made for")


def text_for(o: dict[str, Any], source: models.ModelSource, purpose: str) -> str:
    """Where the text is from; random weights of a model that is not here get random token ids."""
    if o["text"] is not None:
        return given_text(o)
    if o["random_weights"] and source.kind == "hub":
        return RANDOM_TOKENS
    return corpus.default_text(source, purpose)


def known(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise UsageError("--random-weights of a hub model comes without a tokenizer: no --text or --prompt can be read")
    return tokenizer


def evaluation_text(
    o: dict[str, Any], source: models.ModelSource, tokenizer: Any, origin: str, length: int
) -> corpus.EvaluationWindows:
    if origin == RANDOM_TOKENS:
        vocabulary, count = models.geometry(source).vocab, o["windows"] or RANDOM_WINDOWS
        return corpus.random_evaluation(vocabulary, windows=count, length=length, seed=o["seed"])
    return corpus.evaluation_windows(known(tokenizer), origin, length=length, windows=o["windows"], column=o["column"])


def calibration_windows(
    o: dict[str, Any], source: models.ModelSource, tokenizer: Any, text_source: str
) -> corpus.Windows:
    """Windows as asked for, by default as the model's preset has them."""
    paper = models.presets(source)["aqua-kv"]
    count, length = o["windows"] or paper["windows"], o["length"] or paper["length"]
    held = o["holdout"] or (paper["holdout"] if o["windows"] is None else max(1, count // 8))
    if held >= count:
        raise UsageError(f"--holdout {held} of {count} windows leaves none to fit on")
    if text_source == RANDOM_TOKENS:
        vocabulary = models.geometry(source).vocab
        return corpus.random_windows(vocabulary, windows=count, length=length, holdout=held, seed=o["seed"])
    return corpus.token_windows(
        known(tokenizer), text_source, windows=count, holdout=held, length=length, seed=o["seed"], column=o["column"]
    )


def run_inspect(path: Path) -> dict[str, Any]:
    """A bundle's header in short, every hash checked."""
    bundle = load_bundle(path)
    scheme = bundle.scheme
    rows = [
        {"layer": i, "key": pair.key.describe(), "value": pair.value.describe()}
        if pair
        else {"layer": i, "key": "skipped", "value": scheme.skipped[i]}
        for i, pair in enumerate(scheme.layers)
    ]
    return {
        "bundle": str(path),
        "sha256": file_sha256(path),
        "bytes": path.stat().st_size,
        "model": asdict(bundle.fingerprint),
        "windows": asdict(scheme.windows),
        "frame": scheme.frame,
        "bits_per_value": scheme.bits_per_value(),
        "resident_bytes": scheme.resident_bytes(),
        "provenance": bundle.provenance,
        "metrics": bundle.metrics,
        "layers": rows,
    }


def run_verify(
    path: Path, model: str | None, revision: str | None, device: str, random_weights: bool, seed: int
) -> dict[str, Any]:
    """Format and hashes; with a model also that the bundle was made for it."""
    if model is None and (revision is not None or random_weights):
        raise UsageError("--revision and --random-weights say which weights of --model are meant: give --model too")
    bundle = load_bundle(path)
    checks = ["format", "header hash", "tensor hashes", "tensors finite", "codecs", "layer chain"]
    if model is not None:
        check_bundle(bundle, model, revision, device=device, random_weights=random_weights, seed=seed)
        checks.append(f"model {model}")
    return {"bundle": str(path), "sha256": file_sha256(path), "ok": True, "checked": checks}


def run_eval(o: dict[str, Any], say: Say) -> dict[str, Any]:
    """Rows `full`, presets, bundles on the same text."""
    source = models.resolve(o["model"], o["revision"])
    origin = text_for(o, source, "evaluation")
    say(f"text: {origin}")
    methods = rows_named(o["preset"] or [], o["bundle"] or [])
    loaded = open_model(
        o["model"], o["revision"], dtype=o["dtype"], device=o["device"],
        random_weights=o["random_weights"], seed=o["seed"],
    )  # fmt: skip
    length = o["length"] or min(models.presets(source)["aqua-kv"]["length"], EVAL_LENGTH[source.kind])
    text = evaluation_text(o, source, loaded.tokenizer, origin, length)
    check_context(source, length, say)
    makers = cache_makers(loaded.model, methods, loaded.revision)
    started = time.monotonic()
    rows = evaluate(loaded.model, text.ids, makers, step=o["step"], batch=o["batch"])
    for row in rows[1:]:
        if row.bits_per_value is None:
            say(f"note: {row.name} packed nothing: windows of {length} tokens fit into its sink and recent window")
    return {
        "rows": [row.as_dict() for row in rows],
        "model": o["model"],
        "revision": loaded.revision,
        "random_weights": loaded.random_weights,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "text": text.source,
        "text_sha256": text.sha256,
        "windows": len(text.ids),
        "length": length,
        "step": o["step"],
        "seconds": round(time.monotonic() - started, 1),
    }


class _Counting:
    """What generate() tells of every new token; the first call is the prompt's."""

    def __init__(self, advance: Callable[..., None]) -> None:
        self._advance, self._prompt = advance, True

    def put(self, tokens: Any) -> None:
        if not self._prompt:
            self._advance()
        self._prompt = False

    def end(self) -> None:
        """Nothing is held back."""


def run_generate(o: dict[str, Any]) -> dict[str, Any]:
    """Text from a compressed cache, and what the cache held at the end."""
    if not o["prompt"].strip():
        raise UsageError("--prompt is empty: give some text to go on from")
    methods = rows_named([o["preset"]] if o["preset"] else [], [o["bundle"]] if o["bundle"] else [])
    if len(methods) != 1:
        raise UsageError("give one --bundle or one --preset")
    loaded = open_model(
        o["model"], o["revision"], dtype=o["dtype"], device=o["device"],
        random_weights=o["random_weights"], seed=o["seed"],
    )  # fmt: skip
    name, maker = next(iter(cache_makers(loaded.model, methods, loaded.revision).items()))
    tokenizer = known(loaded.tokenizer)
    ids = tokenizer(o["prompt"], return_tensors="pt").input_ids.to(loaded.model.device)
    started = time.monotonic()
    where = [ids.device] if ids.is_cuda else []
    with (
        maker() as cache,
        torch.no_grad(),
        torch.random.fork_rng(where, enabled=o["sample"]),
        progress("Generating", total=o["tokens"]) as advance,
    ):
        if o["sample"]:
            torch.manual_seed(o["seed"])  # generate() draws from the global generator
        out = loaded.model.generate(
            ids, past_key_values=cache, max_new_tokens=o["tokens"], do_sample=o["sample"],
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0, streamer=_Counting(advance),
        )  # fmt: skip
        seen = cache.describe()
    return {
        "name": name,
        "text": tokenizer.decode(out[0], skip_special_tokens=True),
        "new_tokens": int(out.shape[1] - ids.shape[1]),
        "seconds": round(time.monotonic() - started, 2),
        "nbytes": seen["nbytes"],
        "bits_per_value": seen["bits_per_value"],
        "resident_bytes": seen["resident_bytes"],
        "path": seen["path"],
    }


DEMO_PROMPT = (
    "The emperor had resolved to march against the city before the end of the summer. His soldiers, who had been "
    "assembled on the banks of the river"
)


def run_demo(output: Path, fit_options: dict[str, Any], eval_options: dict[str, Any], say: Say) -> dict[str, Any]:
    """fit, eval and generate on the embedded model; generate runs in a process of its own."""
    started = time.monotonic()
    say("1/3 calibrating AQUA-KV on the embedded model and text")
    fitted = run_fit_predictors(fit_options | DEMO_FIT | {"output": output}, say)
    say("2/3 perplexity through the cache: full precision, HIGGS and AQUA-KV at 2 bits")
    options = {"bundle": [output], "preset": ["higgs-2", "higgs-2-debiased"], "windows": DEMO_WINDOWS}
    found = run_eval(eval_options | options, say)
    say("3/3 loading the bundle in a fresh process and generating")
    command = [
        sys.executable,
        "-m",
        "kvcal.cli",
        "generate",
        "--bundle",
        str(output),
        "--prompt",
        DEMO_PROMPT,
        "--json",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # its stderr is ours
    if done.returncode:
        raise KVCalError(
            f"generating in a fresh process failed with exit code {done.returncode}; its own line is above"
        )
    generated = json.loads(done.stdout)
    return found | {
        "bundle": str(output.resolve()),
        "sha256": fitted["sha256"],
        "sample": generated["text"],
        "generated": generated,
        "seconds": round(time.monotonic() - started, 1),
    }
