"""What `--model` means: a short name, a hub id or a local folder; and how each is loaded.

    source = resolve("llama-3.2-3b")            # names only: no network, no torch
    config = load_config(source)                # downloads a config.json at most
    loaded = load_model(source, dtype="bfloat16", device="cuda")

`kvcal.models.layerwise` opens a model one layer at a time. Loading never touches the global random state.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcal_artifacts.errors import KVCalError, ModelUnavailable, OutOfMemory, UsageError

from .configuration import geometry, geometry_config, load_config
from .devices import to_device, to_dtype
from .files import WeightFiles, weight_files
from .hub import one_line
from .memory import is_oom
from .names import ModelSource
from .quiet import quiet
from .revision import weights_revision
from .spread import WHOLE, Spread, dispatch, input_device, map_for, tensor_parallel, weights_device
from .tokenizers import local_tokenizer, read_tokenizer

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from .structure import CausalLM
    from .weights import LoadingReport, Weights


@dataclass(frozen=True)
class LoadedModel:
    model: CausalLM  # in eval mode
    tokenizer: PreTrainedTokenizerBase | None  # None for random weights of a hub model: nothing is downloaded then
    source: ModelSource
    revision: str
    random_weights: bool

    @property
    def device(self) -> torch.device:
        """Where the model takes token ids, and runs if it is on one device; `model.device` is where weights lie."""
        return input_device(self.model)


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    random_weights: bool = False,
    seed: int = 0,
    spread: Spread = WHOLE,
) -> LoadedModel:
    """The whole model, in eval mode, without gradients: on one device, or where `spread` says."""
    target, kind = to_device(device), to_dtype(dtype)
    with out_of_memory(source, kind):
        if random_weights:
            return _random(source, kind, target, seed, spread)
        load = _embedded if source.kind == "embedded" else _pretrained
        model, files = load(source, kind, target, spread)
    revision = weights_revision(source, random_weights=False, seed=seed, files=files)
    return LoadedModel(model, read_tokenizer(source), source, revision, random_weights=False)


def _random(source: ModelSource, dtype: torch.dtype, device: torch.device, seed: int, spread: Spread) -> LoadedModel:
    from . import structure
    from .memory import check_fits

    config = geometry_config(source)
    model = structure.empty_model(config, dtype)
    if spread == WHOLE:
        check_fits(source.label, sum(one.numel() * one.element_size() for one in model.parameters()), dtype, device)
    model = _filled(source, model, random_source(config, seed), dtype, device, spread)
    revision = weights_revision(source, random_weights=True, seed=seed)
    return LoadedModel(model, local_tokenizer(source), source, revision, random_weights=True)


def _filled(
    source: ModelSource, model: CausalLM, numbers: Weights, dtype: torch.dtype, device: torch.device, spread: Spread
) -> CausalLM:
    """A model on the meta device with these weights, where `spread` says."""
    from . import weights
    from .structure import head_of, tied

    if spread.device_map is not None:
        devices = map_for(model, spread.device_map, dtype)
        for name, place in devices.items():
            try:
                part = model.get_submodule(name)
            except AttributeError:
                raise UsageError(f"--device-map: {source.label} has no module {name!r}") from None
            if not (tied(model) and part is head_of(model)):  # whose weight is the embedding's
                weights.fill(part, f"{name}." if name else "", numbers, weights_device(place), model)
        weights.tie(model)
        dispatch(model, devices)
        return model
    weights.fill(model, "", numbers, to_device("cpu") if spread.tp_plan is not None else device)
    weights.tie(model)
    if spread.tp_plan is None:
        return model
    whole: Any = model
    whole.should_save_on_this_rank = lambda is_main_process: True  # each process reads another folder
    with tempfile.TemporaryDirectory(prefix="kvcal-tp-") as folder:  # from_pretrained alone makes the parts
        with _silent_loading():
            whole.save_pretrained(folder)
        return _from_folder(source, Path(folder), model.config, dtype, device, spread)


def random_source(config: PreTrainedConfig, seed: int) -> Weights:
    from .weights import RandomWeights

    return RandomWeights(seed, getattr(config, "initializer_range", 0.02))


def _embedded(
    source: ModelSource, dtype: torch.dtype, device: torch.device, spread: Spread
) -> tuple[CausalLM, WeightFiles]:
    from . import structure
    from .embedded import EmbeddedWeights

    model = structure.empty_model(load_config(source), dtype)
    files = weight_files(source)
    return _filled(source, model, EmbeddedWeights(files.index), dtype, device, spread), files


def _pretrained(
    source: ModelSource, dtype: torch.dtype, device: torch.device, spread: Spread
) -> tuple[CausalLM, WeightFiles]:
    from . import structure, weights

    config = load_config(source)
    files = weight_files(source)
    quantised = getattr(config, "quantization_config", None) is not None
    if not quantised:  # whose tensors have other shapes
        weights.check_shapes(source.label, files.index, structure.empty_model(config, dtype))
    return _from_folder(source, files.index.parent, config, dtype, device, spread), files


def _from_folder(
    source: ModelSource,
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    spread: Spread,
) -> CausalLM:
    import torch

    from . import structure

    where: dict[str, Any] = {} if spread.tp_plan is None else tensor_parallel()
    if spread.device_map is not None:
        device_map = spread.device_map
        if not isinstance(device_map, str):
            device_map = map_for(structure.empty_model(config, dtype), device_map, dtype)
        where = {"device_map": device_map}
    try:
        with _silent_loading(), torch.device("cpu"):  # else where torch's default is, whatever `device` says
            loaded: Any = structure.model_class(config).from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,  # None would ask on the terminal
                output_loading_info=True,
                **where,
            )
        model: CausalLM = loaded[0]
        report: LoadingReport = loaded[1]
    except Exception as error:  # a damaged shard, shapes that do not fit, an unknown architecture
        if is_oom(error):
            raise
        raise ModelUnavailable(f"{source.label}: cannot be loaded ({one_line(error)})") from error
    _check_complete(source, report)
    module: nn.Module = model.eval().requires_grad_(False)
    if spread == WHOLE:
        module.to(device)
    return model


def _check_complete(source: ModelSource, report: LoadingReport) -> None:
    """Refuse quantised weights that lack tensors or have unknown ones: these are not compared with the model
    beforehand.
    """
    from .conversion import check_complete

    missing, surplus = report.get("missing_keys") or (), report.get("unexpected_keys") or ()
    check_complete(source.label, list(map(str, missing)), list(map(str, surplus)))


@contextmanager
def _silent_loading() -> Iterator[None]:
    """No weight-loading bar and no load report: what they would say is checked and raised instead."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet():
            yield
    finally:
        if bars:
            logging.enable_progress_bar()


@contextmanager
def out_of_memory(source: ModelSource, dtype: torch.dtype) -> Iterator[None]:
    """Turn an allocation that failed into one line that names the need."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_oom(error):
            raise
        need = _parameter_bytes(source, dtype)
        raise OutOfMemory(
            f"{source.label}: its weights need {need}, more than is free on the device; "
            "load one layer at a time, or in bfloat16"
        ) from error


def _parameter_bytes(source: ModelSource, dtype: torch.dtype) -> str:
    try:
        return f"about {geometry(source).parameters * dtype.itemsize / 1e9:.1f} GB"
    except KVCalError:
        return "memory"
