"""What `import kvcal` offers to Python: cache, fit, evaluate, plan, register. Imports what it needs where it is needed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from kvcal_artifacts.bundle import Bundle
    from kvcal_artifacts.cache import KVCalCache
    from kvcal_artifacts.codecs import Codec
    from kvcal_artifacts.scheme import Scheme

    from ..evaluate.perplexity import Row
    from ..methods.base import Method
    from ..methods.data_free import DataFree
    from ..methods.registry import Backbone
    from ..methods.vqkv import VQKV

    Given: TypeAlias = str | os.PathLike[str] | Bundle | Scheme | DataFree


def _silent(line: str) -> None:
    """Say nothing."""


def cache(
    model: nn.Module,
    scheme: Given,
    *,
    keep: float | None = None,
    heavy: float | None = None,
    subspace: str | None = None,
    strict: bool = False,
    offload: bool = False,
    remember: bool = False,
    kernels: str = "auto",
    require_kernels: bool = False,
    max_length: int | None = None,
) -> KVCalCache:
    """A Transformers cache for `model.generate(past_key_values=cache)` that stores what the scheme says.

    scheme: a preset by name (`kvcal names preset`), auto-4, auto-3 or auto-2, a bundle or its path, or a scheme. keep,
    heavy, subspace: as of kvcal_artifacts.load_cache; the others as of KVCalCache. Raises UsageError for an unknown name,
    IncompatibleBundle for a bundle of another model, UnsupportedModel for a model that cannot be compressed.
    """
    from kvcal_artifacts import load_cache

    return load_cache(
        _bundle_of(model, scheme),
        model,
        keep=keep,
        heavy=heavy,
        subspace=subspace,
        strict=strict,
        offload=offload,
        remember=remember,
        kernels=kernels,
        require_kernels=require_kernels,
        max_length=max_length,
    )


def _bundle_of(model: nn.Module, given: Given) -> Bundle | str:
    """What load_cache takes: a bundle, or a preset of kvcal_artifacts.cache.auto."""
    from kvcal_artifacts.bundle import SUFFIX, Bundle, load_bundle
    from kvcal_artifacts.cache.auto import NAMES
    from kvcal_artifacts.fingerprint import Fingerprint
    from kvcal_artifacts.scheme import Scheme

    from ..methods.data_free import PRESETS, preset

    if isinstance(given, Bundle) or (isinstance(given, str) and given in NAMES):
        return given
    if isinstance(given, os.PathLike):
        return load_bundle(given)
    if isinstance(given, str):
        if given not in PRESETS and (given.endswith(SUFFIX) or os.path.sep in given or Path(given).exists()):
            return load_bundle(given)
        given = preset(given)
    scheme = given if isinstance(given, Scheme) else given.scheme(model)
    return Bundle(Fingerprint.of(model), scheme)


def fit(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: str | os.PathLike[str],
    *,
    method: str | Method | VQKV = "aqua-kv",
    output: str | os.PathLike[str] | None = None,
    windows: int = 36,
    holdout: int = 4,
    length: int = 1024,
    column: str | None = None,
    seed: int = 0,
    batch: int | None = None,
    resume: bool = True,
    say: Callable[[str], None] = _silent,
) -> Bundle:
    """Calibrate a method on text and return the bundle; the same arguments give the same bundle.

    text: a file, a folder, a data set of the hub or `embedded:calibration`, as `--text`; column: of its rows. method: a name
    of kvcal.methods.METHODS at its defaults, or one with settings of its own, as AquaKV(backbone="higgs-3-wide"). output:
    the bundle's file; without one nothing is kept, and a killed run begins anew. windows: of text in all, the last `holdout`
    of which measure the fit; length: tokens a window; seed: which windows. batch: windows at a time. resume: go on from a
    killed run. say: is told notes, a line each.

    Raises UsageError for an unknown method, TextError for a text that cannot be read or is too short, KVCalError for a
    model that cannot be calibrated.
    """
    import torch

    from kvcal_artifacts import hf
    from kvcal_artifacts.bundle import load_bundle

    from ..calibrate.driver import fit as fit_bundle
    from ..calibrate.job import FitOptions
    from ..capture.scan import WholeModel
    from ..report.outputs import check_output
    from ..text import sources

    made = _method(method) if isinstance(method, str) else method
    hf.check_supported(model)
    if output is not None:
        check_output(Path(output))
    ids = sources.token_windows(
        tokenizer, os.fspath(text), windows=windows, holdout=holdout, length=length, seed=seed, column=column, say=say
    )
    config: Any = hf.config_of(model)
    revision = getattr(config, "_commit_hash", None)
    name = str(getattr(config, "_name_or_path", "") or config.model_type).rstrip("/").rpartition("/")[2]
    device: torch.device = next(model.parameters()).device
    with tempfile.TemporaryDirectory() as folder:
        result = fit_bundle(
            made,
            WholeModel(model),
            ids,
            Path(folder) / "fit.kvcal.safetensors" if output is None else Path(output),
            model_record={"name": name, "revision": revision},
            revision=revision,
            device=device,
            seed=seed,
            options=FitOptions(batch=batch, resume=resume),
            say=say,
        )
        bundle = load_bundle(result.path)
    if output is None:
        bundle.path = None
    return bundle


def _method(name: str) -> Any:
    """A method at its defaults. Raises UsageError naming what is allowed."""
    from kvcal_artifacts.codecs import load_plugins
    from kvcal_artifacts.errors import UsageError

    from ..methods import METHODS
    from ..methods.data_free import PRESETS
    from ..report.suggest import allowed

    if name not in METHODS:
        load_plugins()
    if name in METHODS:
        return METHODS[name]()
    if name in PRESETS:
        raise UsageError(f"method {name!r} is a preset, which needs no fit: kvcal.cache(model, {name!r})")
    raise UsageError(f"method {name!r} is not known; {allowed(name, METHODS, 'kvcal.methods.METHODS')}")


def evaluate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: str | os.PathLike[str],
    schemes: Mapping[str, Given] | Sequence[Given],
    *,
    windows: int | None = 4,
    length: int = 1024,
    step: int = 32,
    column: str | None = None,
    batch: int | None = None,
    say: Callable[[str], None] = _silent,
) -> list[Row]:
    """Perplexity and KL through the cache: a row for full precision, then one for each scheme, as `kvcal eval` measures.

    text, column: as of `fit`. schemes: as `cache` takes them, under names of your own, or in a list. windows: consecutive
    ones from the text's start, at most; length: tokens of each. step: tokens a forward. batch: windows at a time.
    Raises UsageError for two schemes of one name, TextError for a text that is too short.
    """
    from kvcal_artifacts.errors import UsageError

    from ..evaluate.perplexity import evaluate as measure
    from ..text import sources

    named = schemes.items() if isinstance(schemes, Mapping) else [(_name(one), one) for one in schemes]
    given = dict(named)
    if len(given) < len(schemes) or "full" in given:
        raise UsageError("two rows would have one name, or one is called full: give a dict with names of your own")
    ids = sources.evaluation_windows(
        tokenizer, os.fspath(text), windows=windows, length=length, column=column, say=say
    ).ids
    bundles = {name: _bundle_of(model, one) for name, one in given.items()}
    makers: dict[str, Callable[[], KVCalCache]] = {
        name: lambda bundle=bundle: cache(model, bundle, remember=True)  # type: ignore[misc]
        for name, bundle in bundles.items()
    }
    return measure(model, ids, makers, step=step, batch=batch)


def _name(given: Given) -> str:
    """The row's name of a scheme in a list."""
    from kvcal_artifacts.bundle import SUFFIX, Bundle
    from kvcal_artifacts.errors import UsageError

    if isinstance(given, Bundle):
        return given.name
    if isinstance(given, (str, os.PathLike)):
        return Path(given).name.removesuffix(SUFFIX)
    raise UsageError(f"a {type(given).__name__} has no name: give a dict of names and schemes")


def plan(
    model: str,
    *,
    revision: str | None = None,
    gpu: str | None = None,
    memory: str | None = None,
    bandwidth: str | None = None,
    context: str | None = None,
    batch: int = 1,
    budget_kl: float | None = None,
    presets: Sequence[str] = (),
    weights: str | None = None,
    dtype: str = "bfloat16",
    say: Callable[[str], None] = _silent,
) -> dict[str, Any]:
    """What fits on a GPU under each scheme, without weights; the document that `kvcal plan --json` prints.

    model: a short name, a hub id or a folder. gpu: a profile, as rtx-4090; or memory, as 24GB, with a bandwidth, as
    1008GB/s; without either the card that is here. context: tokens a row, as 128k. budget_kl: nats per token. presets: the
    usual ones where there is none. say: is told what was assumed. Raises UsageError as the command does.
    """
    from .plan import PlanOptions, run_plan

    options = PlanOptions(
        model, revision, gpu, memory, bandwidth, context, batch, budget_kl, tuple(presets), weights, dtype
    )
    return run_plan(options, say)


def register(
    *,
    codec: type[Codec] | None = None,
    method: type[Any] | None = None,
    backbones: Mapping[str, Backbone] | None = None,
    presets: Mapping[str, DataFree] | None = None,
) -> None:
    """Add what another package brings; all or any of these, at any time.

    codec: a class that bundles may then name, by its `name`. method: a class as of kvcal.methods.base.Method, by its `name`.
    backbones: makers of codecs, by the short names that `--keys` and `--values` take. presets: by name, as `--preset`
    takes. An installed package does it in a function that its entry point in the group `kvcal` names; that is called when an
    unknown name comes up. Raises KVCalError where a name is taken by something else.
    """
    from kvcal_artifacts.codecs import register_codec

    if codec is not None:
        register_codec(codec)
    if method is not None:
        from ..methods import METHODS

        _add("method", METHODS, {method.name: method})
    if backbones is not None:
        from ..methods.registry import BACKBONES

        _add("codec", BACKBONES, backbones)
    if presets is not None:
        from ..methods.data_free import PRESETS

        for name, one in presets.items():
            asdict(one)  # a frozen dataclass, whose fields a bundle records
            _add("preset", PRESETS, {name: one})


def _add(kind: str, table: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Raises KVCalError where another has the name."""
    from kvcal_artifacts.errors import KVCalError

    for name, one in more.items():
        if table.setdefault(name, one) is not one:
            raise KVCalError(f"{kind} {name!r}: the name is taken; give yours another")
