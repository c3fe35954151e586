"""What `import kvcal` offers to Python. Each function imports what it needs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from kvcal_artifacts.bundle import Bundle
    from kvcal_artifacts.cache import KVCalCache
    from kvcal_artifacts.codecs import Codec
    from kvcal_artifacts.codecs.named import CodecMaker
    from kvcal_artifacts.scheme import Scheme

    from ..evaluate.codec_contract import Outcome
    from ..evaluate.perplexity import Row
    from ..methods.base import Method
    from ..methods.data_free import DataFree
    from ..methods.vqkv import VQKV
    from .plan import PlanResult, ServedPlan

    SchemeLike: TypeAlias = str | os.PathLike[str] | Bundle | Scheme | DataFree


def _silent(line: str) -> None:
    """Say nothing."""


def cache(
    model: nn.Module,
    scheme: SchemeLike,
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

    scheme: a preset by name (`kvcal names preset`), auto-4, auto-3 or auto-2, a bundle or its path, or a Scheme. keep,
    heavy and subspace are explained in kvcal_artifacts.load_cache, the other options in KVCalCache. Raises UsageError
    for an unknown name, IncompatibleBundle for a bundle of another model, UnsupportedModel for a model that cannot be
    compressed.
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


def _bundle_of(model: nn.Module, scheme: SchemeLike) -> Bundle | str:
    """What load_cache takes: a bundle, or a preset of kvcal_artifacts.cache.auto."""
    from kvcal_artifacts.bundle import SUFFIX, Bundle, Fingerprint, load_bundle
    from kvcal_artifacts.errors import UsageError
    from kvcal_artifacts.presets import AUTO_BITS
    from kvcal_artifacts.scheme import Scheme

    from ..methods.data_free import PRESETS, preset

    if isinstance(scheme, Bundle) or (isinstance(scheme, str) and scheme in AUTO_BITS):
        return scheme
    if isinstance(scheme, os.PathLike):
        return load_bundle(scheme)
    if isinstance(scheme, str):
        if scheme not in PRESETS and (
            scheme.endswith((SUFFIX, ".safetensors")) or os.path.sep in scheme or Path(scheme).exists()
        ):
            return load_bundle(scheme)
        scheme = preset(scheme)
    if isinstance(scheme, Scheme):
        return Bundle(Fingerprint.of(model), scheme)
    if not hasattr(scheme, "scheme"):
        what = f"scheme is a {type(scheme).__name__}"
        if hasattr(scheme, "forward"):
            raise UsageError(f"{what}, a model: the order is kvcal.cache(model, scheme)")
        raise UsageError(f"{what}, must be a preset's name, a bundle, its path or a Scheme")
    return Bundle(Fingerprint.of(model), scheme.scheme(model))


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

    text: a file, a folder, a data set of the hub or `embedded:calibration`, as `--text` takes it; column: which of its
    columns. method: a name of kvcal.methods.METHODS, with default settings, or a method with settings of your own, as
    AquaKV(backbone="higgs-3-wide"). output: the bundle's file; without one nothing is stored, and a killed run begins
    anew. windows: of text in all, the last `holdout` of which measure the fit; length: tokens per window; seed: which
    windows. batch: windows at a time. resume: go on from a killed run. say: is called with notes, a line each.

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
    from ..text import token_windows

    settings = _method(method) if isinstance(method, str) else method
    hf.check_supported(model)
    _check_tokenizer(tokenizer)
    if output is not None:
        check_output(Path(output))
    ids = token_windows.token_windows(
        tokenizer, os.fspath(text), windows=windows, holdout=holdout, length=length, seed=seed, column=column, say=say
    )
    config: Any = hf.config_of(model)
    revision = getattr(config, "_commit_hash", None)
    name = str(getattr(config, "_name_or_path", "") or config.model_type).rstrip("/").rpartition("/")[2]
    device: torch.device = hf.input_device(model)
    with tempfile.TemporaryDirectory() as folder:
        result = fit_bundle(
            settings,
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


def _check_tokenizer(tokenizer: object) -> None:
    """Raises UsageError for what is no tokenizer, such as a model's name."""
    from kvcal_artifacts import hf

    if not callable(tokenizer):
        raise hf.not_loaded("tokenizer", tokenizer, "a loaded tokenizer", "AutoTokenizer")


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
    schemes: Mapping[str, SchemeLike] | Sequence[SchemeLike],
    *,
    windows: int | None = 4,
    length: int = 1024,
    step: int = 32,
    column: str | None = None,
    batch: int | None = None,
    say: Callable[[str], None] = _silent,
) -> list[Row]:
    """Perplexity and KL through the cache, as `kvcal eval` measures: a row for full precision, then one per scheme.

    text and column are explained in `fit`. schemes: what `cache` takes, in a list, or in a dict under names of your
    own. windows: how many consecutive ones from the text's start, at most; length: tokens per window. step: tokens per
    forward pass. batch: windows at a time. Raises UsageError for two schemes of one name, TextError for a text that is
    too short.
    """
    from kvcal_artifacts import hf
    from kvcal_artifacts.errors import UsageError

    from ..evaluate.perplexity import evaluate as measure
    from ..models.weights import causal_lm
    from ..text import token_windows

    if not isinstance(schemes, Mapping | Sequence) or isinstance(schemes, str):
        raise UsageError(f"schemes={_name(schemes)!r}: one scheme alone; give a list of them, as [{_name(schemes)!r}]")
    named = schemes if isinstance(schemes, Mapping) else {_name(scheme): scheme for scheme in schemes}
    if len(named) < len(schemes) or "full" in named:
        raise UsageError("two rows would have one name, or one is called full: give a dict with names of your own")
    hf.check_supported(model)
    _check_tokenizer(tokenizer)
    ids = token_windows.evaluation_windows(
        tokenizer, os.fspath(text), windows=windows, length=length, column=column, say=say
    ).ids
    bundles = {name: _bundle_of(model, scheme) for name, scheme in named.items()}
    makers: dict[str, Callable[[], KVCalCache]] = {
        name: lambda bundle=bundle: cache(model, bundle, remember=True)  # type: ignore[misc]
        for name, bundle in bundles.items()
    }
    return measure(causal_lm(model), ids, makers, step=step, batch=batch)


def _name(scheme: SchemeLike) -> str:
    """The row's name of a scheme in a list."""
    from kvcal_artifacts.bundle import SUFFIX, Bundle
    from kvcal_artifacts.errors import UsageError

    if isinstance(scheme, Bundle):
        return scheme.name
    if isinstance(scheme, (str, os.PathLike)):
        return Path(scheme).name.removesuffix(SUFFIX)
    raise UsageError(f"a {type(scheme).__name__} has no name: give a dict of names and schemes")


def plan(
    model: str,
    *,
    revision: str | None = None,
    gpu: str | None = None,
    memory: str | None = None,
    bandwidth: str | None = None,
    context: str | int | None = None,
    batch: int = 1,
    budget_kl: float | None = None,
    presets: Sequence[str] = (),
    serve: str | None = None,
    weights: str | None = None,
    dtype: str = "bfloat16",
    say: Callable[[str], None] = _silent,
) -> PlanResult | ServedPlan:
    """What fits on a GPU under each scheme, without weights: the document that `kvcal plan --json` prints.

    model: a short name, a hub id or a folder. gpu: a profile, as rtx-4090; or memory, as 24GB, with a bandwidth, as
    1008GB/s; without either the card of this machine. context: tokens per row, 4096 or 128k. budget_kl: nats per token.
    presets: by default the usual ones. serve: "vllm" for what its plug-in serves on a GPU. say: is called with what was
    assumed. Raises UsageError as the command does.
    """
    from kvcal_artifacts.errors import UsageError

    from .options import MOST_ROWS, PlanOptions
    from .plan import run_plan

    if not 1 <= batch <= MOST_ROWS:
        raise UsageError(f"batch={batch}: rows at a time must be from 1 to {MOST_ROWS:,}")
    options = PlanOptions(
        model=model,
        revision=revision,
        gpu=gpu,
        memory=memory,
        bandwidth=bandwidth,
        context=None if context is None else str(context),
        batch=batch,
        budget_kl=budget_kl,
        preset=list(presets) or None,
        serve=serve,
        weights=weights,
        dtype=dtype,
    )
    return run_plan(options, say)


def register(
    *,
    codec: type[Codec] | None = None,
    method: type[Any] | None = None,
    backbones: Mapping[str, CodecMaker] | None = None,
    presets: Mapping[str, DataFree] | None = None,
) -> None:
    """Add what another package brings; all or any of these, at any time.

    codec: a class that bundles may then name, by its `name`. method: a class like kvcal.methods.base.Method, by its
    `name`. backbones: makers of codecs, by the short names that `--keys` and `--values` take. presets: by the names
    that `--preset` takes. An installed package calls this in a function that its entry point in the group `kvcal`
    names. That function is called when an unknown name comes up. Raises KVCalError where something else has a name.
    """
    from kvcal_artifacts.codecs import register_codec

    if codec is not None:
        register_codec(codec)
    if method is not None:
        from ..methods import METHODS

        _add("method", METHODS, {method.name: method})
    if backbones is not None:
        from kvcal_artifacts.codecs.named import CODEC_MAKERS

        _add("codec", CODEC_MAKERS, backbones)
    if presets is not None:
        from ..methods.data_free import PRESETS

        for name, preset in presets.items():
            asdict(preset)  # a frozen dataclass, whose fields a bundle records
            _add("preset", PRESETS, {name: preset})


def check_codec(codec: str | type[Codec] | CodecMaker) -> list[Outcome]:
    """Hold a codec to the contract that kvcal's codecs keep, as `kvcal check-codec` does: an outcome per check.

    codec: a name, a class that shape and role alone make, or a function of shape and role as in `register`. An outcome
    has check, passed, tried (at how many shapes and roles), failure (a line or None) and holds. Raises UsageError for
    an unknown name, and for one of a codec around another; what the codec does wrong is an outcome.
    """
    from ..evaluate.codec_contract import check_codec as check

    if isinstance(codec, str):
        from .check_codec import maker_of

        codec = maker_of(codec)
    return check(codec)


T = TypeVar("T")


def _add(kind: str, table: dict[str, T], more: Mapping[str, T]) -> None:
    """Add to a table by name. Raises KVCalError where another has the name."""
    from kvcal_artifacts.errors import KVCalError

    for name, entry in more.items():
        if table.setdefault(name, entry) is not entry:
            raise KVCalError(f"{kind} {name!r}: the name is taken; give yours another")
