"""`kvcal eval` and `kvcal generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.checked import Json
from kvcal_artifacts.errors import KVCalError, NonFiniteError, UsageError
from kvcal_artifacts.scheme import HeavyHitters, Scheme
from kvcal_artifacts.scheme.subspace import choose, has_subspace

from ..calibrate.checkpoint import BatchCheckpoint, CommandCheckpoint, command_checkpoint, short
from ..calibrate.outlier_guard import warnings
from ..capture import ranks
from ..capture.ranks import RankEndedError
from ..capture.spread import spread
from ..evaluate.canary import Audit, AuditState, Canary, canary
from ..evaluate.layers import Figure, LayerErrors, State
from ..evaluate.perplexity import CacheMaker, Row, evaluate
from ..methods.data_free import DataFree
from ..models import configuration
from ..models.hub import one_line
from ..models.loading import LoadedModel
from ..models.names import ModelSource, resolve
from ..models.spread import input_device
from ..pipeline.gates import Check, Limits, broken_off, check_recorded, check_row
from ..pipeline.options import EvalOptions
from ..report.drawn import machine_and_date
from ..report.outputs import figures_first
from ..report.progress import progress, tracked
from ..text.token_windows import EvaluationWindows
from .bundles import file_sha256
from .calibration import refuse_ranks
from .common import (
    Say,
    check_column,
    check_context,
    decided_by,
    evaluation_text,
    kernels_required,
    machine,
    refuse_idle,
    refuse_idle_seed,
    required_tokenizer,
    row_key,
    say_coverage,
    selection_of,
    text_for,
    tokenizer_for,
)
from .guard import TEXT as GUARD_TEXT
from .guard import full_precision_warnings, guard_window, measured_warnings, schemes_of
from .idle import refuse_prompt
from .options import GenerateOptions
from .target_model import with_model_of
from .tasks import Answered, Asked, judged, load_tasks, run_tasks, task_names
from .workbench import cache_makers, check_rows, named_error, open_model_of, rows_named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models.structure import CausalLM

EVAL_LENGTH = {"embedded": 1024, "hub": 8192, "folder": 8192}


def run_eval(
    o: EvalOptions, say: Say, limits: Mapping[str, Limits] | None = None, typed: Collection[str] = ()
) -> dict[str, Any]:
    """Rows `full`, presets, bundles (with their files' "sha256") on the same text. limits: of each row by name; by
    default those of the options for all. typed: names of the options that somebody gave; UsageError for one that
    nothing takes. "failed" has the errors of rows that could not be measured, by name, "unwritten" those of a plot
    that could not be written: all else is there nevertheless.
    """
    refuse_idle_seed(o, typed)
    methods = rows_named(o.preset or [], [*(o.bundles or []), *(o.bundle or [])])
    o = with_model_of(o, methods.values(), typed)
    plan, tasks = _planned(o, methods, say, limits), task_names(o)
    tokenizer = tokenizer_for(o, plan.source, plan.origin)
    asked = _asked(o, plan, tasks, tokenizer, say)
    text = evaluation_text(o, plan.source, tokenizer, plan.origin, plan.length, say)
    check_context(plan.source, plan.length, say)
    loaded, makers = _opened(o, plan, say)
    started = time.monotonic()
    record, alike = _record(o, plan, loaded.model, text), ranks.current().hold_one_model
    resume = o.resume and not alike  # processes that hold one model begin at one window
    work = command_checkpoint("eval", record, output=None, resume=resume, say=say)
    with work.until_done():
        measured, broken = _measured(loaded.model, text.ids, makers, o, work, say)
        ranks.leave_to_first()
        row_names = dict(zip(makers, plan.methods, strict=True))  # a row's name tells of --keep, too
        checks = _judged(plan, row_names, measured, broken, say)  # before hours of tasks
        sound = {name: maker for name, maker in makers.items() if name not in broken}
        answered = Answered() if asked is None else run_tasks(asked, loaded.model, sound, work, say)
    behind = {row_names[row.name]: row.kl_behind for row in measured.rows[1:]}
    unlikely = full_precision_warnings(measured.rows[0].perplexity, loaded.random_weights)
    for line in [*unlikely, *measured_warnings(o.model, plan.methods, behind)]:
        say(line)
    checks += judged(answered, o.max_score_drop)
    unwritten: list[KVCalError] = []
    if o.needle_plot is not None:
        from ..report.plots import plot_needle_maps

        title = f"{plan.source.public}, needles found; {machine_and_date(machine(loaded.device))}"
        with figures_first(unwritten):
            plot_needle_maps(answered.needles, title, o.needle_plot)
    selection = plan.selection
    return {
        "rows": [
            row.as_dict()
            | measured.windows_of(row.name)
            | plan.hashes.get(row_names.get(row.name, ""), {})
            | answered.of(row.name)
            for row in measured.rows
        ],
        "layers": {name: watched.rows for name, watched in measured.watched.items()},
        "canary": {name: str(alive) for name, alive in measured.canaries.items()},
        "gates": checks,
        "failed": {
            name: named_error(name, error)
            for name, error in broken.items()
            if not _fails_gate(error, plan.limits[row_names[name]])
        },
        "unwritten": unwritten,
        "passed": all(check.passed for check in checks),
        "model": plan.source.public,
        "revision": loaded.revision,
        "random_weights": loaded.random_weights,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "text": text.source,
        "text_sha256": text.sha256,
        "windows": len(text.ids),
        "resumed_windows": measured.resumed,
        "length": plan.length,
        "step": o.step,
        "keep": None if selection is None else selection.keep,
        "heavy": None if selection is None else selection.heavy,
        "seconds": round(time.monotonic() - started, 1),
    }


@dataclass(frozen=True)
class Plan:
    """What an evaluation is of, checked before any weights are read. limits, hashes: by name of a method.

    require: whether every layer must take a fused kernel. length: tokens of a window.
    """

    source: ModelSource
    origin: str
    methods: dict[str, DataFree | Bundle]
    limits: dict[str, Limits]
    hashes: dict[str, dict[str, str]]
    selection: HeavyHitters | None
    require: bool
    length: int


def _planned(
    o: EvalOptions, methods: dict[str, DataFree | Bundle], say: Say, limits: Mapping[str, Limits] | None
) -> Plan:
    common, selection = Limits.of(o.by_name()), selection_of(o)
    source = resolve(o.model, o.revision)
    origin = text_for(o, source, "evaluation")
    check_column(o.column, origin)
    if o.task and o.tp_plan is not None:
        raise UsageError("--task is answered by one process: give --device-map instead of --tp-plan")
    say(f"text: {origin}")
    require = kernels_required(o)
    hashes = _hashes(methods)
    methods = with_subspace(methods, o.subspace)
    if not methods:
        idle = [name for name, value in (("keep", o.keep), ("require_kernels", o.require_kernels)) if value]
        refuse_idle(idle, idle, "bundles and presets", "give a bundle, or --preset, or leave it out")
    if common and not methods:
        raise UsageError("a gate needs something to hold to it: give a bundle, or --preset")
    check_rows(source, methods, selection, random_weights=o.random_weights)
    limits = {name: common if limits is None else limits[name] for name in methods}
    for name, method in methods.items():
        check_recorded(limits[name], name, method if isinstance(method, Bundle) else None)
    length = o.length or min(configuration.presets(source)["aqua-kv"]["length"], EVAL_LENGTH[source.kind])
    return Plan(source, origin, methods, limits, hashes, selection, require, length)


def _asked(
    o: EvalOptions, plan: Plan, tasks: list[str], tokenizer: PreTrainedTokenizerBase | None, say: Say
) -> Asked | None:
    """The tasks with their data; None where there are none."""
    if not tasks:
        return None
    refuse_ranks("--task", "start it without torchrun")
    if not plan.methods:
        raise UsageError("--task compares caches with full precision: give a bundle, or --preset")
    return load_tasks(o, tasks, plan.source, required_tokenizer(tokenizer), say)


def _hashes(methods: Mapping[str, DataFree | Bundle]) -> dict[str, dict[str, str]]:
    bundles = {name: method for name, method in methods.items() if isinstance(method, Bundle)}
    return {name: {"sha256": file_sha256(bundle.path)} for name, bundle in bundles.items() if bundle.path is not None}


def _opened(o: EvalOptions, plan: Plan, say: Say) -> tuple[LoadedModel, dict[str, CacheMaker]]:
    """The model and a maker of caches for each row."""
    loaded = open_model_of(o)
    if plan.methods:
        say_coverage(loaded.model, say)
    # refuses bundles of other models
    return loaded, cache_makers(loaded.model, plan.methods, loaded.revision, plan.selection, plan.require)


def _record(o: EvalOptions, plan: Plan, model: CausalLM, text: EvaluationWindows) -> dict[str, Json]:
    """What the figures depend on: the key of the checkpoint."""
    return decided_by(o, model.dtype, input_device(model), text.ids_sha256) | {
        "rows": {name: row_key(method) for name, method in plan.methods.items()},
        "step": o.step,
        "selection": None if plan.selection is None else asdict(plan.selection),
    }


def _judged(
    plan: Plan,
    row_names: Mapping[str, str],
    measured: Measured,
    broken: Mapping[str, KVCalError],
    say: Say,
) -> list[Check]:
    """The gates of rows that have limits; of the others, whether their caches stored anything. row_names: of a row, its
    method's.
    """
    checks: list[Check] = []
    by_name = {row.name: row for row in measured.rows}
    for name, method_name in row_names.items():
        if (error := broken.get(name)) is not None:
            if isinstance(error, NonFiniteError) and _fails_gate(error, plan.limits[method_name]):
                checks.append(broken_off(name, error.layer, str(error).removeprefix(f"{name}: ")))
            continue
        row, alive, watched = by_name[name], measured.canaries[name], measured.watched[name]
        if limits := plan.limits[method_name]:
            method, figures = plan.methods[method_name], (row.as_dict(), measured.rows[0].as_dict())
            bundle = method if isinstance(method, Bundle) else None
            checks += check_row(*figures, limits, watched.rows, alive, bundle, watched.scheme)
        elif row.bits_per_value is None:
            why = f"windows of {plan.length} tokens fit into its sink and recent window"
            if watched.scheme.selection is not None:
                why = f"of windows of {plan.length} tokens all that it keeps are exact"
            say(f"note: {row.name} packed nothing: {why}")
        elif not alive.blocks:
            say(f"note: {row.name}: {alive}")
        else:
            alive.check(row.name)
    return checks


def _fails_gate(error: KVCalError, limits: Limits) -> bool:
    """Whether the error of a row is one that its gates judge: numbers that overflow."""
    return isinstance(error, NonFiniteError) and bool(limits)


@dataclass(frozen=True)
class Measured:
    """Rows of an evaluation and what was watched in them. rows: `full` first. watched, canaries: by name of the others.
    resumed: windows that a killed run had done.
    """

    rows: list[Row]
    watched: dict[str, Watched]
    canaries: dict[str, Canary]
    resumed: int

    def windows_of(self, name: str) -> dict[str, int]:
        """Exact tokens and block of a row; of full precision none."""
        return asdict(self.watched[name].scheme.windows) if name in self.watched else {}

    def joined_with(self, other: Measured) -> Measured:
        """These rows and those of `other`, whose `full` is the same."""
        rows = [*self.rows, *other.rows[1:]]
        return Measured(rows, self.watched | other.watched, self.canaries | other.canaries, self.resumed)


def _measured(
    model: CausalLM,
    ids: torch.Tensor,
    makers: Mapping[str, CacheMaker],
    o: EvalOptions,
    work: CommandCheckpoint,
    say: Say,
) -> tuple[Measured, dict[str, KVCalError]]:
    """All side by side; where one cannot be measured, each for itself, so that the others are. Second: the errors."""

    def run(names: Iterable[str]) -> Measured:
        watched = {name: Watched(makers[name], ids.shape[1]) for name in names}
        label = ", ".join(["full", *watched])
        saved = BatchCheckpoint(work, f"windows-{short(label)}", label, len(ids), say)
        rows = evaluate(model, ids, watched, step=o.step, batch=o.batch, saved=saved, ranks=shared)
        computed = spread(shared, list(watched), lambda name: canary(model, ids, makers[name], step=o.step))
        canaries = {
            name: alive.counted(one.rows, one.audit)
            for (name, one), alive in zip(watched.items(), tracked(computed, "Canary", len(watched)), strict=True)
        }
        return Measured(rows, watched, canaries, saved.resumed)

    shared = ranks.current().of_windows
    try:
        return run(makers), {}
    except RankEndedError:
        raise
    except KVCalError:
        measured = run([])  # raises where the model itself is to blame
    broken: dict[str, KVCalError] = {}
    for name in makers:
        try:
            measured = measured.joined_with(run([name]))
        except RankEndedError:
            raise
        except KVCalError as error:
            broken[name] = error
    return measured, broken


def with_subspace(rows: dict[str, DataFree | Bundle], subspace: str | None) -> dict[str, DataFree | Bundle]:
    """The rows, bundles of SQuat with this choice of subspace instead of their own (None: as they are)."""
    if subspace is None:
        return rows
    chosen = {
        name: replace(row, scheme=choose(row.scheme, subspace))
        for name, row in rows.items()
        if isinstance(row, Bundle) and has_subspace(row.scheme)
    }
    if not chosen:
        raise UsageError(
            f"--subspace {subspace}: no bundle given stores keys by squat; `kvcal measure-subspaces` writes one"
        )
    return rows | chosen


class WatchedState(TypedDict):
    """What `Watched` has added up, as JSON has it."""

    errors: State
    audit: AuditState


class Watched:
    """Makes caches whose LayerErrors, of what they pack and read, and Audit are added up batch by batch. length: tokens
    of a window.
    """

    scheme: Scheme

    def __init__(self, maker: CacheMaker, length: int) -> None:
        self._maker, self._errors, self.audit = maker, LayerErrors(0), Audit(length)
        self._part = self._errors, self.audit

    def __call__(self) -> KVCalCache:
        cache = self._maker()
        self.scheme, self._part = cache.scheme, (LayerErrors(len(cache.layers)), Audit(self.audit.last))
        cache.watch, audit = self._part
        return audit.attach(cache)

    @property
    def rows(self) -> list[dict[str, Figure]]:
        return self._errors.rows()

    def take(self) -> tuple[LayerErrors, Audit]:
        return self._part

    def merge(self, part: tuple[LayerErrors, Audit]) -> None:
        self._errors.merge(part[0])
        self.audit.merge(part[1])

    def state(self) -> WatchedState:
        return {"errors": self._errors.state(), "audit": self.audit.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        with self._maker() as cache:
            self.scheme = cache.scheme
        self._errors = LayerErrors.of(state["errors"])
        self.audit.restore(state["audit"])


class _Counting:
    """What generate() tells of every new token; the first call is the prompt's."""

    def __init__(self, advance: Callable[..., None]) -> None:
        self._advance, self._prompt = advance, True

    def put(self, tokens: torch.Tensor) -> None:
        if not self._prompt:
            self._advance()
        self._prompt = False

    def end(self) -> None:
        """Nothing is held back."""


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool, label: str) -> torch.Tensor:
    """Token ids (1, T) of a prompt; chat: as a user's message, with the start of the answer that is to follow.

    Raises UsageError for a tokenizer without a chat template, and for a prompt that makes no tokens.
    """
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError(
                f"--chat: the tokenizer of {label} has no chat template; leave --chat out, or give an instruct model"
            )
        try:
            messages = [{"role": "user", "content": prompt}]
            prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template raises what it likes
            raise UsageError(f"--chat: the chat template of {label} refuses the prompt ({one_line(error)})") from error
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=not chat).input_ids], dtype=torch.int64, device="cpu")
    if not ids.numel():
        raise UsageError("--prompt makes no tokens: give some text to go on from")
    return ids


def run_generate(o: GenerateOptions, say: Say, typed: Collection[str] = ()) -> dict[str, Any]:
    """Text from a compressed cache, and what the cache held at the end.

    typed: names of the options that somebody gave; UsageError for one that nothing takes.
    """
    if not (o.sample or o.random_weights):
        refuse_idle(typed, ("seed",), "--sample and --random-weights", "give one of them, or leave it out")
    refuse_prompt(o)
    methods = rows_named([o.preset] if o.preset else [], [o.bundle] if o.bundle else [])
    o = with_model_of(o, methods.values(), typed)
    selection, methods = selection_of(o), with_subspace(methods, o.subspace)
    source = resolve(o.model, o.revision)
    tokenizer = required_tokenizer(tokenizer_for(o, source))
    ids = prompt_ids(tokenizer, o.prompt, o.chat, source.label)
    check_rows(source, methods, selection, random_weights=o.random_weights)
    loaded = open_model_of(o)
    say_coverage(loaded.model, say)
    makers = cache_makers(loaded.model, methods, loaded.revision, selection, kernels_required(o))
    name, maker = next(iter(makers.items()))
    if not o.random_weights:
        schemes = schemes_of(loaded.model, methods)
        for line in warnings(loaded.model, guard_window(tokenizer, schemes), schemes, text=GUARD_TEXT):
            say(line)
    ids = ids.to(input_device(loaded.model))
    started = time.monotonic()
    where = [ids.device] if ids.is_cuda else []
    with (
        maker() as cache,
        torch.no_grad(),
        torch.random.fork_rng(where, enabled=o.sample),
        progress("Generating", total=o.tokens) as advance,
    ):
        if o.sample:
            torch.manual_seed(o.seed)  # generate() draws from the global generator
        out = loaded.model.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=o.tokens,
            do_sample=o.sample,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
            streamer=_Counting(advance),
        )
        described = cache.describe()
    if described["unpacked"] is not None:
        say(f"note: {described['unpacked']}")
    return {
        "name": name,
        "text": tokenizer.decode(out[0, ids.shape[1] if o.chat else 0 :], skip_special_tokens=True),
        "new_tokens": int(out.shape[1] - ids.shape[1]),
        "seconds": round(time.monotonic() - started, 2),
        "nbytes": described["nbytes"],
        "bits_per_value": described["bits_per_value"],
        "resident_bytes": described["resident_bytes"],
        "selection": described["selection"],
        "unpacked": described["unpacked"],
        "path": described["path"],
    }
