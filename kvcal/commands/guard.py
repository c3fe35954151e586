"""The outlier guard at the commands' doors: a scheme that will break on the model's key channels is named before it serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.hf import config_of, unsupported_layers
from kvcal_artifacts.scheme import Scheme

from .. import corpus
from ..capture import LayerSource
from ..evaluate.layers import recorded_rows
from ..methods.plain import DataFree
from ..outliers import warnings

TEXT, LENGTH = "embedded:evaluation", 512  # outlier channels are the model's, whatever it reads


def unmeasured(model: nn.Module, rows: Mapping[str, DataFree | Bundle]) -> dict[str, Scheme]:
    """Schemes whose key channels no calibration has looked at: presets, and bundles without such figures."""
    found: dict[str, Scheme] = {}
    for name, row in rows.items():
        if isinstance(row, Bundle):
            seen = any("key_channel_error" in layer for layer in recorded_rows(row.metrics) or [])
            found |= {} if seen else {name: row.scheme}
        else:
            found[name] = row.scheme(model)
    return found


def outlier_warnings(
    model: LayerSource | nn.Module, ids: Tensor, schemes: Mapping[str, Scheme], device: torch.device | None = None
) -> list[str]:
    """A line for each scheme that will break, measured on token windows ids (N, T); none for models with layers that cannot
    be compressed, and for windows too short to pack anything.
    """
    config = config_of(model if isinstance(model, nn.Module) else model.model)
    if not schemes or unsupported_layers(config):
        return []
    try:
        return warnings(model, ids, schemes, device)
    except UsageError:  # a window too short for one block: nothing is packed, nothing breaks
        return []


def guard_window(tokenizer: Any, schemes: Mapping[str, Scheme]) -> Tensor:
    """One window (1, T) of embedded text, long enough for a block of each scheme."""
    least = max((s.windows.sink + s.windows.block for s in schemes.values()), default=0)
    return corpus.evaluation_windows(tokenizer, TEXT, windows=1, length=max(LENGTH, least)).ids
