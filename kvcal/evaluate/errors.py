"""Errors by layer and kv head: what attention reads from a compressed cache against what the model computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import Scheme

from ..models.spread import input_device
from ..report.progress import progress
from ..report.records import is_number, kind_of, mistyped
from .layers import LayerErrors

if TYPE_CHECKING:
    from ..models.structure import CausalLM

Rows = list[list[float] | None]  # a row a layer, a number a kv head; None: a layer that is not compressed


@dataclass(frozen=True)
class HeadErrors:
    """|x - decoded|^2 / |x|^2 of packed tokens, key and value. tokens: how many a head they were measured on."""

    key: Rows
    value: Rows
    tokens: int


def stored_head_errors(metrics: Mapping[str, object]) -> HeadErrors | None:
    """What the fit wrote into a bundle's metrics, of its held-out windows; None where it wrote none, or no errors by
    head.
    """
    layers = metrics.get("layers")
    if not isinstance(layers, list) or not all(isinstance(row, dict) for row in layers):
        return None
    key, value = ([row.get(f"{role}_head_errors") for row in layers] for role in ("key", "value"))
    return HeadErrors(key, value, 0) if head_errors_fault(metrics) is None and any((*key, *value)) else None


def head_errors_fault(metrics: Mapping[str, object]) -> str | None:
    """What is wrong with the errors by head in a bundle's metrics; None where they are good, or there are none."""
    layers = metrics.get("layers")
    if layers is None:
        return None
    if not isinstance(layers, list):
        return mistyped(layers, list)
    heads: set[int] = set()
    for layer, row in enumerate(layers):
        if not isinstance(row, dict):
            return f"layer {layer} {mistyped(row, dict)}"
        for name in ("key_head_errors", "value_head_errors"):
            errors = row.get(name)
            if errors is None:
                continue
            if not isinstance(errors, list) or not errors:
                return (
                    f"{name} of layer {layer} {mistyped(errors, list) if errors != [] else 'recorded without numbers'}"
                )
            if bad := [one for one in errors if not is_number(one) or one < 0]:
                return f"{name} of layer {layer} holds {kind_of(bad[0])} that is no error, expected numbers from 0"
            heads.add(len(errors))
    return (
        None if len(heads) < 2 else f"recorded for {min(heads)} and for {max(heads)} heads, expected as many everywhere"
    )


def measured_head_errors(model: CausalLM, scheme: Scheme, ids: Tensor) -> HeadErrors:
    """Measure errors of heads on token windows ids (N, T) int64, each in one forward pass, whose keys and values are
    the model's own.

    Token selection is left out: an error is of tokens that are there. Raises UsageError where windows pack nothing.
    """
    windows = scheme.windows
    if ids.shape[1] < (least := windows.sink + windows.recent + windows.block):
        raise UsageError(f"windows of {ids.shape[1]} tokens pack nothing: use --length {least} or more")
    from kvcal_artifacts.cache import KVCalCache

    errors, tokens = LayerErrors(len(scheme.layers)), 0
    device = input_device(model)
    with torch.no_grad(), progress("Measuring", total=len(ids)) as advance:
        for row in ids:
            with KVCalCache(replace(scheme, selection=None), model) as cache:
                cache.watch = errors
                model(input_ids=row[None].to(device), past_key_values=cache, use_cache=True)
                tokens += int(cache.ledger.blocks.sum()) * windows.block
            advance()
    return HeadErrors(errors.by_head("key"), errors.by_head("value"), tokens)
