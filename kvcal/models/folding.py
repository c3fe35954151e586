"""Factors of key channels folded into a checkpoint: W_K divided by them, W_Q multiplied (InnerQ section 4.3).

Scores stay as they were, keys come out evened. Exact (up to rounding) only where nothing but RoPE stands between the
projection and attention, and only if the two channels that RoPE rotates together share their factor.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from kvcal_artifacts import hf
from kvcal_artifacts.errors import KVCalError, ModelUnavailable, UsageError
from kvcal_artifacts.files import new_file_mode, refuse_dash, temporary_folder
from kvcal_artifacts.scheme import LayerCodecs, Scheme

from ..report.progress import progress
from . import configuration, devices, hub, layerwise
from .names import ModelSource

if TYPE_CHECKING:
    from kvcal_artifacts.checked import Json

    from .layerwise import LayerwiseWeights

SHARD_BYTES = 4 << 30
NORMS = ("k_norm", "q_norm", "k_layernorm", "q_layernorm", "key_layernorm", "query_layernorm", "key_norm", "query_norm")
COPIED = (*hub.TOKENIZER_FILES, "generation_config.json")


def key_factors(scheme: Scheme) -> dict[int, Tensor]:
    """Layer -> factors (H, D) of its keys. Raises UsageError where there are none, or where they scale residuals."""
    factors: dict[int, Tensor] = {}
    for index, pair in enumerate(scheme.layers):
        if pair is None:
            continue
        if pair.key.unpredicted.divided and not pair.key.divided:
            raise UsageError(
                f"layer {index}: its factors scale what a predictor leaves, not keys; they cannot be folded"
            )
        if pair.key.divided:
            if pair.key.factor is None:
                raise UsageError(
                    f"layer {index}: its factors come from each prompt and serve one sequence only; "
                    "`kvcal fit-norms --factors pair` measures some that can be folded"
                )
            factors[index] = pair.key.factor
    if not factors:
        raise UsageError("the bundle has no key factors to fold; `kvcal fit-norms --factors pair` measures them")
    return factors


def without_factors(scheme: Scheme) -> Scheme:
    """The scheme for a model that its factors were folded into."""
    layers = tuple(
        LayerCodecs(pair.key.undivided, pair.value) if pair is not None and pair.key.divided else pair
        for pair in scheme.layers
    )
    return Scheme(scheme.windows, scheme.frame, layers, scheme.skipped, scheme.selection)


def row_factors(site: hf.AttentionSite, factor: Tensor, partners: Tensor) -> list[tuple[nn.Module, Tensor]]:
    """The projections that a factor goes into, and what each of their output rows is multiplied by, float64.

    factor: (H, D) of the keys. partners: hf.rope_partners. Raises UsageError, with the reason, where folding would
    change the model's function.
    """
    _check_projections(site)
    _check_shared(site.index, factor, partners)
    down = (1 / factor.double()).flatten()
    wide = _rows(site.query_source) if site.query_slice is None else site.query_slice.stop - site.query_slice.start
    # Kv head j serves query heads j*g to j*g+g-1.
    up = factor.double().repeat_interleave(wide // down.numel(), 0).flatten()
    if site.key_slice is not None and site.query_slice is not None:
        rows = torch.ones(_rows(site.key_source), dtype=torch.float64, device="cpu")
        rows[site.query_slice], rows[site.key_slice] = up, down
        return [(site.key_source, rows)]
    for what, source, rows in (("query", site.query_source, up), ("key", site.key_source, down)):
        if _rows(source) != rows.numel():
            raise UsageError(
                f"layer {site.index}: its {what} projection has {_rows(source)} outputs, {rows.numel()} are "
                "understood; "
                "factors cannot be folded into it"
            )
    return [(site.query_source, up), (site.key_source, down)]


def _rows(projection: nn.Module) -> int:
    weight = projection.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def _check_projections(site: hf.AttentionSite) -> None:
    if site.odd is not None:
        raise UsageError(f"layer {site.index}: {site.odd}; nothing can be folded")
    for name in NORMS:
        if getattr(site.module, name, None) is not None:
            raise UsageError(
                f"layer {site.index}: {name} stands behind the projection and would undo a factor folded into it; "
                "keep the factor in the bundle, where the cache applies it"
            )
    if clip := getattr(getattr(site.module, "config", None), "clip_qkv", None):
        raise UsageError(f"layer {site.index}: queries and keys are clipped at {clip}; nothing can be folded")
    for source in {site.key_source, site.query_source}:
        if type(source) is not nn.Linear or not source.weight.is_floating_point():
            raise UsageError(
                f"layer {site.index}: its projection is a {type(source).__name__}, not a plain linear layer; "
                "nothing can be folded into it"
            )


def _check_shared(layer: int, factor: Tensor, partners: Tensor) -> None:
    other = factor[:, partners]
    if not bool((factor == other).all()):
        head, channel = (int(i) for i in (factor != other).nonzero()[0])
        raise UsageError(
            f"layer {layer}, kv head {head}: channels {channel} and {int(partners[channel])} rotate together under "
            f"RoPE and have factors {float(factor[head, channel]):.4g} and {float(other[head, channel]):.4g}; "
            "fit with --factors pair"
        )


@torch.no_grad()
def fold_in_place(model: nn.Module, factors: Mapping[int, Tensor]) -> None:
    """Fold factors into a model in memory. factors: layer -> (H, D) of its keys. Raises UsageError before anything
    changes.
    """
    for module, rows in _all_rows(model, factors):
        for parameter in module.parameters(recurse=False):
            parameter.copy_(_multiplied(parameter, rows))


def _all_rows(model: nn.Module, factors: Mapping[int, Tensor]) -> list[tuple[nn.Module, Tensor]]:
    width, decoder = hf.rotary_width(model), hf.decoder_of(model)
    return [
        pair
        for layer, factor in sorted(factors.items())
        for site in [hf.attention_site(decoder, layer)]
        for pair in row_factors(site, factor.cpu(), hf.rope_partners(site, width))
    ]


def _multiplied(parameter: Tensor, rows: Tensor) -> Tensor:
    """A weight (out, in) or bias (out), each output times its factor; float64 inside, so rounded once."""
    by = rows.to(parameter.device)
    return (parameter.double() * (by[:, None] if parameter.ndim == 2 else by)).to(parameter.dtype)


def write_folded(source: ModelSource, factors: Mapping[int, Tensor], output: Path, *, dtype: str = "auto") -> list[str]:
    """Write the model with these factors folded in as a new folder: config, safetensors, tokenizer; all or nothing.

    factors: layer -> (H, D) of its keys. dtype: of the new weights; "auto": the checkpoint's own. A shard of at most 4
    GiB is held at a time. A symlink to an empty folder or to none stays one. Returns the names of the changed tensors.
    Raises UsageError where folding would change the model's function or the output is there already, before anything is
    written.
    """
    check_new_folder(output)
    fields = plain_fields(source)
    kind = _dtype(fields, dtype)
    rows: dict[str, Tensor] = {}

    def write(parts: LayerwiseWeights, folder: Path) -> None:
        rows.update(changed_rows(parts, factors))
        _write_weights(parts, rows, folder)

    write_model(source, output, kind, fields, write)
    return sorted(rows)


def plain_fields(source: ModelSource) -> dict[str, Json]:
    """config.json of a model whose weights are not quantised, and which has no scales of an 8-bit cache."""
    fields = configuration.config_fields(source)
    config = fields.get("quantization_config")
    if isinstance(config, dict) and config.get("kv_cache_scheme") and not config.get("config_groups"):
        raise UsageError(
            f"{source.label}: it has scales of an 8-bit cache already (kv_cache_scheme in its config.json, as `kvcal "
            "export` writes it); give the model that it was exported from"
        )
    if config is not None:
        raise UsageError(f"{source.label}: its weights are quantised; give a model with plain ones")
    return fields


def check_new_folder(output: Path) -> Path:
    """Where a new folder of that name really goes. Raises UsageError where something is there already, KVCalError where
    it cannot be.
    """
    refuse_dash(output, "--output")
    place = Path(os.path.realpath(output))
    if place.is_symlink():
        raise UsageError(f"{output} is a link that leads to itself; give the name of a new folder")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UsageError(f"{output} is there already; give the name of a new folder")
    if not place.parent.is_dir():
        raise KVCalError(f"{place.parent} is not a folder; create it or give another --output")
    return place


def write_model(
    source: ModelSource,
    output: Path,
    kind: str,
    fields: dict[str, Json],
    write: Callable[[LayerwiseWeights, Path], None],
) -> None:
    """A new model folder, all or nothing: weights as `write` puts them there, config of these fields, tokenizer.

    kind: dtype of the weights. Raises UsageError where the output is there already, KVCalError where it cannot be.
    """
    place = check_new_folder(output)
    parts = layerwise.open_layerwise(source, dtype=kind, device="cpu")
    try:
        with temporary_folder(place) as temporary:
            write(parts, temporary)
            fields.pop("torch_dtype", None)
            _write_json(temporary / "config.json", fields | {"dtype": kind})
            _copy_rest(source, temporary)
            _open_up(temporary)
            os.replace(temporary, place)
    except OSError as error:
        raise KVCalError(f"{output}: cannot be written: {error.strerror or error}; nothing is there") from error
    except SafetensorError as error:
        if not (why := re.search(r"I/O error: (.*?)(?: \(os error \d+\))?$", str(error))):
            raise
        raise KVCalError(f"{output}: cannot be written: {why[1]}; nothing is there") from error


def _open_up(folder: Path) -> None:
    """Give all files of a folder the permissions that new files get there: safetensors writes files that only their
    owner reads.
    """
    mode = new_file_mode(folder)
    for path in folder.iterdir():
        path.chmod(mode)


def _dtype(fields: Mapping[str, Json], asked: str) -> str:
    if asked != "auto":
        devices.to_dtype(asked)
        return asked
    return str(fields.get("dtype") or fields.get("torch_dtype") or "float32")


def changed_rows(parts: LayerwiseWeights, factors: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Parameter name -> what its rows are multiplied by."""
    from . import weights

    weights.place_rotary(parts.model, torch.device("cpu"))
    names = {module: name for name, module in parts.model.named_modules()}
    return {
        f"{names[module]}.{leaf}": rows
        for module, rows in _all_rows(parts.model, factors)
        for leaf, _ in module.named_parameters(recurse=False)
    }


def _write_weights(
    parts: LayerwiseWeights, rows: Mapping[str, Tensor], folder: Path, extra: Mapping[str, Tensor] | None = None
) -> None:
    """Write a model's weights, folded, as files of the hub's layout. rows: by name, what a tensor's rows are multiplied
    by. extra: tensors that the model itself does not have.
    """
    more = dict(extra or {})
    sizes = {name: like.numel() * like.element_size() for name, like in parts.model.named_parameters()}
    shards = _shards(sizes)
    files = [hub.SAFETENSORS] if len(shards) == 1 else _shard_names(len(shards))
    with progress("Writing weights", total=len(sizes)) as advance:
        for file, names in zip(files, shards, strict=True):
            shard: dict[str, Tensor] = {}
            for name, tensor in parts.tensors(names):
                shard[name] = (_multiplied(tensor, rows[name]) if name in rows else tensor).contiguous()
                advance()
            if file == files[-1]:
                shard |= more
            save_file(shard, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        where |= dict.fromkeys(more, files[-1])
        _write_json(
            folder / hub.INDEX,
            {
                "metadata": {"total_size": sum(sizes.values()) + sum(x.nbytes for x in more.values())},
                "weight_map": where,
            },
        )


def _shard_names(count: int) -> list[str]:
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _shards(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names in order, cut where a shard would exceed SHARD_BYTES."""
    shards: list[list[str]] = [[]]
    bytes_now = 0
    for name, size in sizes.items():
        if shards[-1] and bytes_now + size > SHARD_BYTES:
            shards.append([])
            bytes_now = 0
        shards[-1].append(name)
        bytes_now += size
    return shards


def _write_json(path: Path, value: Mapping[str, Json]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")


def _copy_rest(source: ModelSource, folder: Path) -> None:
    for path in _rest(source):
        shutil.copyfile(path, folder / path.name)


def _rest(source: ModelSource) -> Iterator[Path]:
    """Tokenizer and generation settings, as far as the model has them."""
    home = source.folder
    if source.kind == "hub":
        assert source.hub_id is not None
        sha = str(configuration.load_config(source)._commit_hash)
        home = hub.fetch_tokenizer(source.hub_id, sha)
        with suppress(ModelUnavailable):  # few models have none; offline it cannot be told from one not downloaded
            hub.fetch(source.hub_id, "generation_config.json", sha)
    assert home is not None
    yield from (home / name for name in COPIED if (home / name).is_file())


def write_with_tensors(
    source: ModelSource, output: Path, tensors: Mapping[str, Tensor], fields: Mapping[str, Json], *, dtype: str = "auto"
) -> None:
    """Write the model as a new folder with these tensors next to its weights, and these fields in its config.json."""
    before = plain_fields(source)
    kind = _dtype(before, dtype)
    write_model(source, output, kind, before | dict(fields), lambda parts, to: _write_weights(parts, {}, to, tensors))
