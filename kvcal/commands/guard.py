"""The outlier guard at the commands' doors: a scheme that will break on the model's key channels is named before it serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.scheme import Scheme

from .. import corpus
from ..capture import LayerSource
from ..evaluate.layers import recorded_rows
from ..methods.plain import DataFree
from ..outliers import WINDOWS, warnings, window_length, window_of

TEXT = "embedded:evaluation"


def unmeasured(model: nn.Module, rows: Mapping[str, DataFree | Bundle]) -> dict[str, Scheme]:
    """Schemes that no calibration has forecast: presets, and bundles made of others."""
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
    """A line for each scheme with a high forecast KL, from the first of token windows ids (N, T); none for windows in which
    it packs nothing.
    """
    return warnings(model, window_of(ids, schemes.values()), schemes, device) if schemes else []


def guard_window(tokenizer: Any, schemes: Mapping[str, Scheme]) -> Tensor:
    """Windows (N, T) of embedded text, long enough for a block of each scheme."""
    return corpus.evaluation_windows(tokenizer, TEXT, windows=WINDOWS, length=window_length(schemes.values())).ids
