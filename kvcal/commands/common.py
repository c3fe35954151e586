"""What several commands share: which text, which windows, notes to the reader, what decides a figure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from kvcal_artifacts import hf
from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.checked import Json
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.paths.fused import QUERIES
from kvcal_artifacts.paths.preflight.verdicts import triton_version
from kvcal_artifacts.scheme import HeavyHitters, coverage

from ..bench.devices import processor
from ..calibrate.checkpoint import check_partial
from ..calibrate.provenance import cpu_record, device_name
from ..methods.aqua_kv import AquaKV
from ..methods.data_free import DataFree
from ..models import configuration, tokenizers
from ..models.devices import pick_device, pick_dtype
from ..models.names import ModelSource
from ..pipeline.identity import code_identity, model_identity
from ..pipeline.options import BuiltOptions, CalibrationOptions, EvalOptions, MeasureSubspacesOptions, PresetOptions
from ..pipeline.shared_options import CalibrationText, Kernels, RunOptions, Selection, Stepped, TextOptions
from ..report.checkout import commit
from ..report.outputs import check_output
from ..report.progress import progress
from ..report.version import __version__
from ..text import documents, sources, token_stream, token_windows
from .idle import refuse_empty_text, refuse_shares
from .idle import refuse_idle as refuse_idle
from .idle import refuse_idle_seed as refuse_idle_seed
from .options import CompareOptions, ProbeOptions
from .workbench import default_output

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Say = Callable[[str], None]
RANDOM_TOKENS = "random token ids (random weights)"
RANDOM_WINDOWS = 4  # of an evaluation that is a smoke test: random weights have no quality to measure


def machine(device: torch.device) -> str:
    """The GPU's name, or what the processor calls itself."""
    return device_name(device) if device.type != "cpu" else processor() or "CPU"


def measured_with() -> dict[str, str | None]:
    """When and with which code a row was measured: date in UTC, commit of a checkout, versions. It decides no row: what
    settings and checkpoints compare has none of it.
    """
    import transformers

    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": commit(),
        "kvcal": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": triton_version(),
    }


@contextmanager
def reading() -> Iterator[token_stream.Progress]:
    """Progress of reading and tokenising a text, as kvcal.text.token_stream reports it."""
    with progress("Reading text, tokens") as advance:
        before = 0

        def report(tokens: int, total: int) -> None:
            nonlocal before
            advance(tokens - before, total=total if total > tokens else None)
            before = tokens

        yield report


def output_for(o: BuiltOptions, source: ModelSource, method: str) -> Path:
    """--output, or a name from model and method.

    Raises KVCalError, before any work, where no file can be written, or something that is not ours lies in the place of
    the folder that a run keeps.
    """
    output = Path(o.output or default_output(source, method))
    check_output(output)
    if not isinstance(o, PresetOptions):  # which keeps none
        check_partial(output)
    return output


def kernels_required(o: Kernels) -> bool:
    """Whether kernels are required; UsageError where the step is one that no kernel serves."""
    if o.require_kernels and isinstance(o, Stepped) and o.step > QUERIES:
        raise UsageError(
            f"--require-kernels: the fused kernel serves up to {QUERIES} tokens a call, --step is {o.step}; "
            f"give --step {QUERIES} or less"
        )
    return o.require_kernels


def selection_of(o: Selection) -> HeavyHitters | None:
    """--keep and --heavy; None without them: those of each bundle."""
    refuse_shares(o)
    if o.keep is None:
        return None
    return HeavyHitters(o.keep, 0.5 if o.heavy is None else o.heavy)


def check_context(source: ModelSource, length: int, say: Say) -> None:
    """Warn, not refuse: models run beyond their context, badly."""
    context = configuration.geometry(source).context
    if length > context:
        say(f"note: windows of {length} tokens exceed the {context} that {source.label} was made for")


def text_for(o: TextOptions, source: ModelSource, purpose: str) -> str:
    """Where the text is from; random weights of a model that is not here get random token ids."""
    if o.text is not None:
        refuse_empty_text(o.text)
        return o.text
    if o.random_weights and source.kind == "hub":
        return RANDOM_TOKENS
    return sources.default_text(source, purpose)


def check_column(column: str | None, *origins: str | None) -> None:
    """UsageError for a --column where no text, as `text_for` gives it, has any; files without are refused when read."""
    plain = [origin for origin in origins if origin is not None]
    if column is not None and all(origin in (*sources.EMBEDDED, RANDOM_TOKENS) for origin in plain):
        raise UsageError(
            f"--column {column}: {', '.join(plain)} has no columns, only files of rows and data sets of the hub; "
            "give --text, or leave it out"
        )


def each_line_once(say: Say) -> Say:
    """`say` that leaves out a line that was said before: many schemes have the same advice, or are skipped alike."""
    before: set[str] = set()

    def once(line: str) -> None:
        if line not in before:
            before.add(line)
            say(line)

    return once


def say_coverage(model: nn.Module, say: Say) -> None:
    """How many layers are compressed, where Transformers caches others."""
    config = hf.config_of(model)
    if skipped := hf.unsupported_layers(config):
        say(coverage(config.num_hidden_layers, skipped))


def required_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise UsageError("--random-weights of a hub model comes without a tokenizer: no --text or --prompt can be read")
    return tokenizer


def tokenizer_for(o: RunOptions, source: ModelSource, *origins: str | None) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer, so that a text is read before any weights are; None for random weights of a hub model.

    First raises what `configuration.check_config` does. Then come TextError for one of the texts `origins` that kvcal
    cannot read, and UsageError for a --device or --dtype that cannot be used. Last comes ModelUnavailable for a
    tokenizer that cannot be read.
    """
    configuration.check_config(source, random_weights=o.random_weights)
    for origin in origins:
        if origin is not None and origin != RANDOM_TOKENS:
            documents.check_local(origin)
    pick_dtype(o.dtype, pick_device(o.device))
    if not o.random_weights:
        return tokenizers.load_tokenizer(source)
    return tokenizers.local_tokenizer(source)


def evaluation_text(
    o: TextOptions, source: ModelSource, tokenizer: PreTrainedTokenizerBase | None, origin: str, length: int, say: Say
) -> token_windows.EvaluationWindows:
    if origin == RANDOM_TOKENS:
        vocabulary, count = configuration.geometry(source).vocab, o.windows or RANDOM_WINDOWS
        return token_windows.random_evaluation(vocabulary, windows=count, length=length, seed=o.seed)
    with reading() as on_progress:
        return token_windows.evaluation_windows(
            required_tokenizer(tokenizer),
            origin,
            length=length,
            windows=o.windows,
            column=o.column,
            progress=on_progress,
            say=say,
        )


def window_numbers(o: CalibrationText, source: ModelSource) -> tuple[int, int, int]:
    """How many calibration windows, how many of them held out (0 where the options say so), tokens per window."""
    paper = configuration.presets(source)["aqua-kv"]
    count, length = o.windows or paper["windows"], o.length or paper["length"]
    holdout = o.holdout
    if holdout is None:
        holdout = paper["holdout"] if o.windows is None else max(1, count // 8)
    if holdout >= count:
        raise UsageError(f"--holdout {holdout} of {count} windows leaves none to fit on")
    return count, holdout, length


def calibration_windows(
    o: CalibrationText, source: ModelSource, tokenizer: PreTrainedTokenizerBase | None, text_source: str, say: Say
) -> token_windows.Windows:
    """Windows as asked for, by default as the model's preset has them."""
    count, holdout, length = window_numbers(o, source)
    if text_source == RANDOM_TOKENS:
        vocabulary = configuration.geometry(source).vocab
        return token_windows.random_windows(vocabulary, windows=count, length=length, holdout=holdout, seed=o.seed)
    with reading() as on_progress:
        return token_windows.token_windows(
            required_tokenizer(tokenizer),
            text_source,
            windows=count,
            holdout=holdout,
            length=length,
            seed=o.seed,
            column=o.column,
            progress=on_progress,
            say=say,
        )


def other_text(o: CalibrationOptions) -> str | None:
    """--other-text, which methods have that compare two texts."""
    return o.other_text if isinstance(o, MeasureSubspacesOptions) else None


def other_windows(
    o: CalibrationOptions,
    tokenizer: PreTrainedTokenizerBase | None,
    text_source: str,
    windows: int,
    length: int,
    say: Say,
) -> token_windows.Windows | None:
    """Windows of --other-text, as many as of the text, for methods that compare; None without it."""
    if (other := other_text(o)) is None:
        return None
    if text_source == RANDOM_TOKENS:
        raise UsageError("--other-text: random weights without a tokenizer read no text")
    return token_windows.token_windows(
        required_tokenizer(tokenizer), other, windows=windows, length=length, seed=o.seed, column=o.column, say=say
    )


def decided_by(
    o: EvalOptions | CompareOptions | ProbeOptions | CalibrationOptions,
    dtype: torch.dtype,
    device: torch.device,
    *ids_sha256: str,
) -> dict[str, Json]:
    """What the last bits of figures of these token ids depend on, besides a command's own settings: code and versions,
    model, machine, and how many windows run at a time.
    """
    return {
        "code": code_identity() | {"triton": triton_version()},
        "model": model_identity(o),
        "dtype": str(dtype),
        "device": device_name(device),
        "cpu": cpu_record(),
        "ids_sha256": ids_sha256,
        "batch": o.batch,
        "require_kernels": isinstance(o, Kernels) and o.require_kernels,
    }


def row_key(what: DataFree | Bundle | AquaKV) -> str:
    """What a row's figures depend on, besides model and text."""
    content = hashlib.sha256(what.to_bytes()).hexdigest() if isinstance(what, Bundle) else asdict(what)
    return json.dumps([type(what).__name__, content], sort_keys=True)
