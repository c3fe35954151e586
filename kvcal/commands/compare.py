"""`kvcal compare`."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from kvcal_artifacts.bundle import SUFFIX, Bundle, load_bundle
from kvcal_artifacts.checked import Json
from kvcal_artifacts.errors import CorruptBundle, KVCalError, UsageError
from kvcal_artifacts.files import write_atomically
from kvcal_artifacts.scheme import FRAMES, Frame, HeavyHitters

from ..bundles.paths import bundle_at
from ..calibrate.checkpoint import BatchCheckpoint as SavedBatches
from ..calibrate.checkpoint import CommandCheckpoint, check_partial, command_checkpoint, partial_folder, short
from ..calibrate.driver import fit
from ..calibrate.job import FitOptions
from ..capture import ranks
from ..capture.scan import WholeModel
from ..capture.spread import spread
from ..evaluate.attention_error import attention_errors
from ..evaluate.perplexity import Batches, CacheMaker, FullRuns, evaluate
from ..evaluate.spread import ties
from ..methods.aqua_kv import AquaKV
from ..methods.composition import Composition
from ..methods.data_free import DataFree, Preset, block_notes, composed, preset
from ..models import configuration
from ..models.loading import LoadedModel
from ..models.memory import free_bytes
from ..models.names import ModelSource, resolve
from ..pipeline.options import FitPredictorsOptions
from ..pipeline.scheme_file import Recipe, read_recipe
from ..report.drawn import machine_and_date
from ..report.outputs import check_output, figures_first
from ..report.progress import Items
from ..report.version import __version__
from ..search.comparison import Ledger, as_csv, best, bytes_at, front, read_results, token_bytes, within
from ..text.token_windows import EvaluationWindows
from .common import (
    Say,
    calibration_windows,
    check_column,
    check_context,
    decided_by,
    each_line_once,
    evaluation_text,
    kernels_required,
    machine,
    measured_with,
    refuse_idle,
    row_key,
    say_coverage,
    selection_of,
    text_for,
    tokenizer_for,
)
from .evaluation import EVAL_LENGTH
from .fit_predictors import aqua_method
from .fit_predictors import check_taken as check_predictor
from .guard import full_precision_warnings, measured_warnings
from .options import CompareOptions
from .target_model import with_model_of
from .workbench import bundle_row, cache_makers, check_rows, named_error, open_model_of, raise_first

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAIRED = ("predict", "per_layer", "sink", "recent", "block", "frame")
PREDICTED = ("first_layer", "key_inputs", "value_inputs")
FITTED = ("calibration", "fit_windows", "fit_length")
MEASURED = ("cache_bytes", "window_bytes", "resident_bytes")
FULL_BYTES = 1 << 32  # at most, and an eighth of free memory: of full precision's log-probabilities for all rows
FIGURES = 3  # which figures a row has; rows of result files that have others are measured again


@dataclass(frozen=True)
class Candidate:
    """One row: a preset, a bundle, or a method to be fitted first."""

    name: str
    what: DataFree | Bundle | AquaKV

    @property
    def key(self) -> str:
        return row_key(self.what)


def listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def candidates(o: CompareOptions) -> list[Candidate]:
    """Presets, bundles and recipes as named, then every pair of --keys and --values, plain and, if asked for,
    predicted. What has codecs learned from text is fitted, with predictors or without.
    """
    rows = [Candidate(name, preset(name)) for name in o.preset or []]
    rows += [Candidate(path.stem, of_recipe(read_recipe(path))) for path in o.recipe or []]
    rows += _pairs(o)
    others = {row.name for row in rows}
    bundles = [bundle_at(path, presets=True) for path in o.bundle or []]
    rows += [Candidate(bundle_row(bundle.name, others), bundle) for bundle in bundles]
    names = [row.name for row in rows]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two rows would be called {twice!r}; leave one out, or rename the file")
    if not rows:
        raise UsageError("nothing to compare: give --preset, --bundle, --recipe, or --keys with --values")
    return rows


def _pairs(o: CompareOptions) -> Iterator[Candidate]:
    """Every pair of --keys and --values, and under --predict the same pair under predictors."""
    for name, codecs in (("keys", o.keys), ("values", o.values)):
        if codecs is not None and not listed(codecs):
            raise UsageError(f"--{name} is empty: give codecs, as higgs-2,kivi-2, or leave the option out")
    if bool(listed(o.keys)) != bool(listed(o.values)):
        raise UsageError("--keys and --values go together: every pair of one and the other is a row")
    windows = {"sink": o.sink, "recent": o.recent, "block": o.block}
    per_layer = tuple(o.per_layer or ())
    for key, value in itertools.product(listed(o.keys), listed(o.values)):
        learns = Composition(key, value, per_layer).learns  # names are checked before any model is loaded
        name = key if key == value else f"{key} + {value}"
        fitted = FitPredictorsOptions(
            keys=key,
            values=value,
            per_layer=o.per_layer,
            frame=o.frame,
            first_layer=o.first_layer,
            key_inputs=o.key_inputs,
            value_inputs=o.value_inputs,
            sink=o.sink,
            recent=o.recent,
            block=o.block,
        )
        alone = Preset(key, value, cast(Frame, o.frame), **windows, per_layer=per_layer)
        yield Candidate(name, aqua_method(unpredicted(fitted)) if learns else alone)
        if o.predict:
            yield Candidate(f"aqua({name})", aqua_method(fitted))


def unpredicted(o: FitPredictorsOptions) -> FitPredictorsOptions:
    """The same codecs without predictors, in all layers."""
    return replace(o, first_layer="", key_inputs="none", value_inputs="none")


def check_taken(o: CompareOptions, rows: list[Candidate], typed: Collection[str]) -> None:
    """Raise UsageError for the first option (`typed`) that none of the rows takes."""
    if not listed(o.keys):
        refuse_idle(
            typed,
            (*PAIRED, *PREDICTED),
            "the pairs of --keys and --values",
            "presets, bundles and recipes have their own; give --keys and --values, put it into a --recipe, or leave "
            "it out",
        )
    if not o.predict:
        refuse_idle(typed, PREDICTED, "pairs under predictors", "give --predict, or leave it out")
    if not any(isinstance(row.what, AquaKV) for row in rows):
        refuse_idle(
            typed, FITTED, "rows that are fitted", "give --predict, learned codecs or a --recipe, or leave it out"
        )
        if not o.random_weights:
            refuse_idle(
                typed, ("seed",), "random weights and rows that are fitted", "give --random-weights, or leave it out"
            )


def of_recipe(recipe: Recipe) -> DataFree | AquaKV:
    """What a recipe of `kvcal fit-predictors` or `kvcal preset` describes."""
    method = aqua_method(replace(FitPredictorsOptions(), **recipe.options()))
    if recipe.predicts or method.composition.learns:
        check_predictor(method, recipe.option_names)
        return method
    options = recipe.plain()
    keys, values, per_layer = options.pop("keys"), options.pop("values"), tuple(options.pop("per_layer"))
    options |= {"rope": options.pop("frame")} if "frame" in options else {}
    return replace(composed(None, keys, values, per_layer), **options)


def run_compare(o: CompareOptions, say: Say, typed: Collection[str] = ()) -> dict[str, Any]:
    """Every candidate through the cache on one text; the front of bits and KL, and the best under --max-bits. "failed"
    has the errors of rows that could not be fitted or measured, by name, "unwritten" those of files: all else is there
    nevertheless.

    typed: names of the options that somebody gave; UsageError for one that no row takes. Raises the first of the errors
    where no row is left.
    """
    say = each_line_once(say)
    if o.frame not in FRAMES:
        raise UsageError(f"--frame {o.frame}: allowed are {', '.join(FRAMES)}")
    rows, selection, require = candidates(o), selection_of(o), kernels_required(o)
    check_taken(o, rows, typed)
    if "block" not in typed:
        for line in block_notes([*listed(o.keys), *listed(o.values)], o.block):
            say(line)
    _check_files(o)
    o = with_model_of(o, (row.what for row in rows), typed)
    every = {row.name: row.what for row in rows}
    check_rows(resolve(o.model, o.revision), every, selection, random_weights=o.random_weights)
    texts = _texts(o, rows, say)
    loaded = open_model_of(o)
    say_coverage(loaded.model, say)
    settings, sized = _settings(o, texts, loaded, selection), {"at_length": o.at_length or texts.length}
    ready = {row.name: row.what for row in rows if not isinstance(row.what, AquaKV)}  # a fit says it itself
    cache_makers(loaded.model, ready, loaded.revision, selection, require)  # refuses rows before any work
    hashes = [texts.evaluation.ids_sha256, *([texts.fitting["text"].ids_sha256] if texts.fitting else [])]
    record = settings | decided_by(o, loaded.model.dtype, loaded.device, *hashes)
    work = command_checkpoint("compare", record, output=o.output, resume=o.resume, say=say)
    ledger = Ledger("compare", o.output, settings, work, o.resume, ranks.current())
    resumed = sum(row.key in ledger.rows for row in rows)
    if resumed:
        say(f"resuming: {resumed} of {len(rows)} rows are in {ledger.where}")

    def makers(name: str, method: DataFree | Bundle) -> dict[str, CacheMaker]:
        return cache_makers(loaded.model, {name: method}, loaded.revision, selection, require)

    failed = _measure_rows(rows, ledger, work, loaded, texts, makers, settings | sized, o.batch, say)
    ranks.leave_to_first()
    if len(failed) == len(rows):
        raise_first(failed)
    rows = [row for row in rows if row.name not in failed]
    behind = {row.name: ledger.rows[row.key]["kl_behind"] for row in rows}
    ready = {name: what for name, what in ready.items() if name in behind}
    unlikely = full_precision_warnings(ledger.rows[rows[0].key]["full_perplexity"], loaded.random_weights)
    for line in [*unlikely, *measured_warnings(o.model, ready, behind)]:
        say(line)
    measured = [at_length(ledger.rows[row.key] | {"name": row.name}, sized["at_length"]) for row in rows]
    count = f"{len(texts.evaluation.ids)} window{'s' * (len(texts.evaluation.ids) > 1)} of {texts.length:,} tokens"
    text = f"{texts.evaluation.source}, {count}"
    judged = _judged(o, measured, text, machine(loaded.device), resumed)
    return settings | sized | judged | {"failed": failed}


def _check_files(o: CompareOptions) -> None:
    """Refuse before any work files that cannot be written, and an --output that holds something else."""
    for name, path in (("output", o.output), ("csv", o.csv)):
        if path is not None:
            check_output(path, f"--{name}")
    if o.output is not None:
        check_partial(o.output)
        read_results(o.output, "compare")
    if o.plot is not None:
        from ..report.plots import check_plot

        check_plot(o.plot)


@dataclass(frozen=True)
class Texts:
    """The texts of a comparison, cut into windows. source: the model whose tokenizer cut them. length: tokens of an
    evaluation window. fitting: as `_calibration` gives it, empty where nothing is fitted.
    """

    source: ModelSource
    length: int
    evaluation: EvaluationWindows
    fitting: dict[str, Any]


def _texts(o: CompareOptions, rows: list[Candidate], say: Say) -> Texts:
    source = resolve(o.model, o.revision)
    origin = text_for(o, source, "evaluation")
    fitted = any(isinstance(row.what, AquaKV) for row in rows)
    fitting_origin = text_for(replace(o, text=o.calibration), source, "calibration") if fitted else None
    check_column(o.column, origin, fitting_origin)
    say(f"text: {origin}")
    length = o.length or min(configuration.presets(source)["aqua-kv"]["length"], EVAL_LENGTH[source.kind])
    tokenizer = tokenizer_for(o, source, origin, fitting_origin)
    text = evaluation_text(o, source, tokenizer, origin, length, say)
    check_context(source, length, say)
    fitting = _calibration(o, source, tokenizer, say) if fitted else {}
    return Texts(source, length, text, fitting)


def _settings(o: CompareOptions, texts: Texts, loaded: LoadedModel, selection: HeavyHitters | None) -> dict[str, Json]:
    """What all rows of a file have in common."""
    text, length = texts.evaluation, texts.length
    settings: dict[str, Json] = {
        "model": texts.source.public,
        "revision": loaded.revision,
        "random_weights": loaded.random_weights,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": loaded.device.type,
        "text": text.source,
        "text_sha256": text.sha256,
        "windows": len(text.ids),
        "length": length,
        "step": o.step,
        "attention_windows": min(o.attention_windows, len(text.ids)),
        "version": __version__,
        "figures": FIGURES,
    }
    if selection is not None:  # figures of one kind in a file, as with every other setting
        settings |= {"selection": asdict(selection)}
    if texts.fitting:
        settings["calibration_sha256"] = texts.fitting["text"].ids_sha256
    return settings


def _measure_rows(
    rows: list[Candidate],
    ledger: Ledger,
    work: CommandCheckpoint,
    loaded: LoadedModel,
    texts: Texts,
    makers: Callable[[str, DataFree | Bundle], dict[str, CacheMaker]],
    settings: Mapping[str, Json],
    batch: int | None,
    say: Say,
) -> dict[str, KVCalError]:
    """Fit and measure what the ledger does not have yet, each row by one rank; the errors of rows that cannot be, by
    name.
    """
    ids, failed = texts.evaluation.ids, dict[str, KVCalError]()
    todo = [row for row in rows if row.key not in ledger.rows]
    items = Items(say, len(rows), len(rows) - len(todo))
    full = FullRuns(most=min(FULL_BYTES, (free_bytes(loaded.device) or 0) // 8)) if len(todo) > 1 else None

    def figures_of(row: Candidate) -> dict[str, Any] | KVCalError:
        method = row.what
        batches = SavedBatches(work, _windows_name(row), row.name, len(ids), say)
        try:
            if isinstance(method, AquaKV):
                method = _fitted(method, loaded, texts.fitting, work, _bundle_name(row), say)
            [figures] = measure(loaded, ids, makers(row.name, method), settings, batch, batches, full).values()
            return figures
        except KVCalError as error:
            return named_error(row.name, error)

    measured = spread(ledger.ranks, todo, figures_of, lambda row: items.begin(row.name))
    for row, figures in zip(todo, measured, strict=True):
        if isinstance(figures, KVCalError):
            failed[row.name] = figures
            continue
        ledger.add(row.key, figures | {"measured_with": measured_with()})
        bundle = _bundle_name(row)
        work.drop(f"{_windows_name(row)}.json", bundle, partial_folder(Path(bundle)).name)
    ledger.done(row.key for row in rows if row.name not in failed)
    return failed


def _windows_name(row: Candidate) -> str:
    return f"windows-{short(row.name + row.key)}"  # sums bear names


def _bundle_name(row: Candidate) -> str:
    return f"fit-{short(row.key)}{SUFFIX}"


def _judged(o: CompareOptions, measured: list[dict[str, Any]], text: str, called: str, resumed: int) -> dict[str, Any]:
    """All rows by bits, which are on the front, which is best; the files asked for are written."""
    on_front = front(measured, cost="size" if o.against == "size" else "bits_per_value")
    chosen = best(measured, o.max_bits) if o.max_bits is not None else None
    ordered = [row | {"front": row["name"] in on_front} for row in sorted(measured, key=_order)]
    unwritten: list[KVCalError] = []
    if o.csv is not None:
        with figures_first(unwritten):
            write_atomically(o.csv, as_csv(ordered).encode(), "--csv")
    if o.plot is not None:
        from ..report.costs import BITS, SIZE
        from ..report.plots import plot_quality

        name = resolve(o.model, o.revision).public
        cost = SIZE if o.against == "size" else BITS
        with figures_first(unwritten):
            plot_quality(ordered, f"{name}, {text}; {machine_and_date(called)}", o.plot, cost)
    return {
        "unwritten": unwritten,
        "full_perplexity": measured[0]["full_perplexity"],
        "rows": ordered,
        "resumed_rows": resumed,
        "against": o.against,
        "max_bits": o.max_bits,
        "best": chosen["name"] if chosen else None,
        "ties": [] if chosen is None or o.max_bits is None else _ties(measured, chosen, o.max_bits),
    }


def _ties(measured: list[dict[str, Any]], chosen: dict[str, Any], max_bits: float) -> list[str]:
    """Names of the rows of at most so many bits that the spread over windows does not tell from the best."""
    return ties([row for row in measured if within(row, max_bits)], chosen)


def measure(
    loaded: LoadedModel,
    ids: Tensor,
    makers: Mapping[str, CacheMaker],
    settings: Mapping[str, Any],
    batch: int | None = None,
    saved: Batches | None = None,
    full_runs: FullRuns | None = None,
) -> dict[str, dict[str, Any]]:
    """Rows by name: what `kvcal eval` measures, attention errors, and bytes at a length. Full precision runs once for
    all, and with `full_runs` once for all calls.

    settings: step, attention_windows, at_length; attention_tokens, if attention errors are of windows' first tokens
    only. saved: `evaluate` explains it.
    """
    full, *rows = evaluate(loaded.model, ids, makers, step=settings["step"], batch=batch, saved=saved, full=full_runs)
    part = ids[: settings["attention_windows"], : settings.get("attention_tokens")]
    figures = {}
    for row, (name, make) in zip(rows, makers.items(), strict=True):
        errors = attention_errors(loaded.model, part, make, step=settings["step"], batch=batch)
        quality, item = row.as_dict(), loaded.model.dtype.itemsize
        with make() as cache:
            # what the table compares with a cache of 16 bits, whatever dtype the model ran in
            halves = quality | {"window_bytes": quality["window_bytes"] * 2 // item}
            windows = cache.scheme.windows
            sizes: dict[str, float] = {"sink": windows.sink, "recent": windows.recent, "block": windows.block}
            sizes["window_tokens"] = ids.shape[1]
            for kind, counted, width in (("", quality, item), ("_16_bit", halves, 2)):
                sizes[f"window_end_bytes{kind}"] = sum(counted[name] for name in MEASURED)
                sizes[f"token_bytes{kind}"] = token_bytes(cache.scheme, counted, width)
        by = {"logit_error": None, "output_error": None} if errors is None else errors.as_dict()
        figures[name] = at_length(quality | by | sizes, settings["at_length"]) | {"full_perplexity": full.perplexity}
    return figures


def at_length(row: dict[str, Any], length: int) -> dict[str, Any]:
    """The row with its bytes of one sequence of so many tokens."""
    sizes = {"bytes_at_length": bytes_at(row, length), "bytes_at_length_16_bit": bytes_at(row, length, at_16_bit=True)}
    return row | sizes


def _order(row: dict[str, Any]) -> tuple[float, float]:
    bits = row["bits_per_value"]
    return (float("inf") if bits is None else bits, row["kl"])


def _calibration(
    o: CompareOptions, source: ModelSource, tokenizer: PreTrainedTokenizerBase | None, say: Say
) -> dict[str, Any]:
    options = FitPredictorsOptions(
        text=o.calibration,
        random_weights=o.random_weights,
        seed=o.seed,
        column=o.column,
        windows=o.fit_windows,
        length=o.fit_length,
    )
    origin = text_for(options, source, "calibration")
    say(f"calibration text: {origin}")
    return {
        "text": calibration_windows(options, source, tokenizer, origin, say),
        "seed": o.seed,
        "name": source.public,
    }


def _fitted(
    method: AquaKV, loaded: LoadedModel, fitting: dict[str, Any], work: CommandCheckpoint, name: str, say: Say
) -> Bundle:
    """Fit the method, or take the bundle from `work`, where a killed run left it, whole or some layers of it. name: of
    its file.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = work.file(name) or Path(folder) / name
        if path.exists():
            with suppress(CorruptBundle):
                return load_bundle(path)
        result = fit(
            method,
            WholeModel(loaded.model),
            fitting["text"],
            path,
            model_record={"name": fitting["name"]},
            revision=loaded.revision,
            device=loaded.device,
            seed=fitting["seed"],
            options=FitOptions(),
            say=say,
        )
        return load_bundle(result.path)
