"""What the commands share: a model on a device, its text, its caches. Thin: each function is a few calls in order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from kvcal_artifacts import hf
from kvcal_artifacts.bundle import SUFFIX, Bundle, probed_layers
from kvcal_artifacts.checked import Json
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.scheme import Frame, HeavyHitters

from ..bundles.paths import bundle_at
from ..capture import ranks
from ..capture.scan import LayerSource, WholeModel
from ..methods.aqua_kv import AquaKV
from ..methods.data_free import DataFree, preset
from ..models import configuration, loading, names, tokenizers
from ..models.devices import pick_device, pick_dtype
from ..models.layerwise import LayerwiseWeights, open_layerwise
from ..models.spread import WHOLE, Spread
from ..pipeline.options import EvalOptions, TuneBitsOptions
from ..pipeline.shared_options import DeviceMap, TensorParallel
from ..report.progress import progress
from .options import CompareOptions, GenerateOptions
from .target_model import check_target_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..evaluate.perplexity import CacheMaker


@dataclass(frozen=True)
class Opened:
    """A model ready to calibrate: whole in memory, or one layer at a time."""

    source: LayerSource
    name: names.ModelSource
    revision: str
    random_weights: bool
    device: torch.device
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def record(self) -> dict[str, Json]:
        """What provenance says of the model."""
        return model_record(self.name, self.revision, self.random_weights)


def open_for_fit(
    name: str,
    revision: str | None,
    *,
    dtype: str,
    device: str,
    layerwise: bool,
    random_weights: bool,
    seed: int,
    spread: Spread = WHOLE,
) -> Opened:
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    source = names.resolve(name, revision)
    if layerwise:
        parts = open_layerwise(source, dtype=kind, device=where, random_weights=random_weights, seed=seed)
        return Opened(parts, source, parts.revision, random_weights, where, _tokenizer(source, random_weights))
    loaded = _loaded(source, kind, where, random_weights, seed, spread)
    return Opened(WholeModel(loaded.model), source, loaded.revision, random_weights, where, loaded.tokenizer)


def _tokenizer(source: names.ModelSource, random_weights: bool) -> PreTrainedTokenizerBase | None:
    return None if random_weights and source.kind == "hub" else tokenizers.read_tokenizer(source)


def open_model(
    name: str,
    revision: str | None,
    *,
    dtype: str,
    device: str,
    random_weights: bool = False,
    seed: int = 0,
    spread: Spread = WHOLE,
) -> loading.LoadedModel:
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    source = names.resolve(name, revision)
    return _loaded(source, kind, where, random_weights, seed, spread)


def open_model_of(o: EvalOptions | CompareOptions | GenerateOptions | TuneBitsOptions) -> loading.LoadedModel:
    """The model that a command's options name."""
    spread = spread_of(o)
    return open_model(
        o.model, o.revision, dtype=o.dtype, device=o.device, random_weights=o.random_weights, seed=o.seed, spread=spread
    )


def spread_of(o: DeviceMap, *, layerwise: bool = False) -> Spread:
    """--device-map and --tp-plan. Raises UsageError for what they cannot mean, also under torchrun."""
    if o.device_map is not None and (count := ranks.current().count) > 1:
        raise UsageError(
            f"--device-map spreads one model over the GPUs of one process, and torchrun started {count}: start it "
            "without torchrun, or give --tp-plan auto"
        )
    return Spread.of(o.device_map, o.tp_plan if isinstance(o, TensorParallel) else None, layerwise=layerwise)


def _loaded(
    source: names.ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    random_weights: bool,
    seed: int,
    spread: Spread,
) -> loading.LoadedModel:
    with progress(f"{'Making' if random_weights else 'Loading'} {source.label}"):
        return loading.load_model(
            source, dtype=dtype, device=device, random_weights=random_weights, seed=seed, spread=spread
        )


def check_bundle(
    bundle: Bundle, name: str, revision: str | None, *, device: str, random_weights: bool, seed: int
) -> None:
    """Raises IncompatibleBundle if it was made for another model, KVCalError if no cache of it can serve the model.

    Reads config and revision, then two layers' weights.
    """
    from kvcal_artifacts.cache import check_served

    where = pick_device(device)

    parts = open_layerwise(
        names.resolve(name, revision), dtype="bfloat16", device=where, random_weights=random_weights, seed=seed
    )
    check_target_model(bundle, parts.model, parts.revision, probe=())
    check_served(parts.model, bundle.scheme)
    check_target_model(bundle, parts.model, parts.revision, key_probe(parts))


def key_probe(parts: LayerwiseWeights) -> tuple[float, ...]:
    """The fingerprint's probe of a model opened layer by layer; reads two layers."""
    probe: tuple[float, ...] = ()
    for layer in probed_layers(len(parts)):
        parts.load_layer(layer)
        probe += hf.layer_probe(hf.decoder_of(parts.model), layer)
        parts.free_layer(layer)
    return probe


def model_record(source: names.ModelSource, revision: str | None, random_weights: bool) -> dict[str, Json]:
    """What provenance says of a model; no paths of this machine."""
    return {
        "name": source.public,
        "kind": source.kind,
        "hub_id": source.hub_id,
        "revision": revision,
        "random_weights": random_weights,
    }


def default_output(source: names.ModelSource, method: str) -> Path:
    return Path(f"{source.stem}-{method}{SUFFIX}")


def rows_named(presets: Iterable[str], bundles: Iterable[Path]) -> dict[str, DataFree | Bundle]:
    """Presets under their own names, then bundles under their files', of a preset's name as of `bundle_row`; checked
    before any model is loaded.
    """
    rows: dict[str, DataFree | Bundle] = {name: preset(name) for name in presets}
    others = {*rows}
    for path in bundles:
        bundle = bundle_at(path, presets=True)
        name = bundle_row(bundle.name, others)
        if name in rows or name == "full":
            raise UsageError(f"two rows would be called {name!r}; rename one file")
        rows[name] = bundle
    return rows


def bundle_row(name: str, others: Collection[str]) -> str:
    """The name of a bundle's row: its file's, "NAME (bundle)" where a row of no bundle has that name."""
    return f"{name} (bundle)" if name in others else name


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Let an error within name the row that it is of."""
    try:
        yield
    except KVCalError as error:
        raise named_error(name, error) from error


def named_error(name: str, error: KVCalError) -> KVCalError:
    """The error, its text beginning with the name of the row that it is of."""
    return error if str(error).startswith(name) else type(error)(f"{name}: {error}")


def raise_first(failed: Mapping[str, KVCalError], unwritten: Sequence[KVCalError] = ()) -> None:
    """Raise the first error of rows that failed, which says how many more did, and which files could not be written
    (`unwritten`). Nothing where no row failed.
    """
    if failed:
        first, *others = failed.values()
        more = [f"{len(others)} more"] if others else []
        raise type(first)("; and ".join([str(first), *more, *map(str, unwritten)]))


def check_selection(source: names.ModelSource, selection: HeavyHitters | None, *, random_weights: bool) -> None:
    """Raises UnsupportedModel where caches of the model cannot select tokens; reads config.json at most.

    None asks for nothing.
    """
    if selection is not None:
        _check_sites(configuration.structure(source, random_weights=random_weights), selection)


def _check_sites(model: nn.Module, selection: HeavyHitters | None, frame: Frame = "post_rope") -> None:
    """Raises UnsupportedModel where layers that can be compressed cannot give keys in `frame`, or select tokens."""
    sites = hf.attention_sites(model)
    hf.check_frame(sites, frame)
    for site in sites if selection is not None else []:
        hf.check_selectable(site)


def check_rows(
    source: names.ModelSource,
    rows: Mapping[str, DataFree | Bundle | AquaKV],
    selection: HeavyHitters | None,
    *,
    random_weights: bool,
) -> None:
    """Raises KVCalError, naming the row, where config.json is enough to refuse one; before any weights are read.

    selection: instead of each row's.
    """
    from kvcal_artifacts.cache import check_served

    if not rows:
        return
    model = configuration.structure(source, random_weights=random_weights)
    for name, row in rows.items():
        with naming(name):
            if isinstance(row, AquaKV):
                _check_sites(model, selection, row.frame)
                continue
            if isinstance(row, Bundle):  # its revision and weights are compared when the weights are there
                check_target_model(replace(row, fingerprint=replace(row.fingerprint, revision=None)), model, probe=())
            scheme = row.scheme if isinstance(row, Bundle) else row.scheme(model)
            check_served(model, scheme if selection is None else scheme.keeping(selection))


def cache_makers(
    model: nn.Module,
    rows: dict[str, DataFree | Bundle],
    revision: str | None = None,
    selection: HeavyHitters | None = None,
    require_kernels: bool = False,
) -> dict[str, CacheMaker]:
    """A maker of caches for each row; every bundle is checked against the model.

    selection: instead of each row's; names then end in +h2o and the share that is kept. Raises KVCalError,
    naming the row, for one whose caches cannot be made: none fails in the middle of the others for that.
    """
    from kvcal_artifacts.cache import KVCalCache, check_served

    makers: dict[str, CacheMaker] = {}
    for row_name, row in rows.items():
        with naming(row_name):
            if isinstance(row, Bundle):
                check_target_model(row, model, revision)
            name, scheme = row_name, row.scheme if isinstance(row, Bundle) else row.scheme(model)
            if selection is not None:
                name, scheme = f"{name}+h2o-{selection.keep:g}", scheme.keeping(selection)
            makers[name] = lambda scheme=scheme: KVCalCache(  # type: ignore[misc]
                scheme, model, remember=True, require_kernels=require_kernels
            )
            check_served(model, scheme)
            if require_kernels:
                makers[name]().close()
    return makers
