"""The outlier guard at the commands' doors: a scheme whose forecast KL on this model is high is named before it serves.

Presets and bundles are forecast alike: what a bundle's file records of its own quality is anybody's claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.scheme import Scheme

from ..calibrate.outlier_guard import LENGTH, WINDOWS, window_length
from ..methods.data_free import DataFree
from ..text import sources

TEXT = "embedded:evaluation"


def schemes_of(model: nn.Module, rows: Mapping[str, DataFree | Bundle]) -> dict[str, Scheme]:
    """Schemes by the rows' names."""
    return {name: row.scheme if isinstance(row, Bundle) else row.scheme(model) for name, row in rows.items()}


def guard_window(tokenizer: Any, schemes: Mapping[str, Scheme]) -> Tensor:
    """Windows (N, LENGTH) of embedded text, consecutive; joined they are long enough for a block of each scheme, if the
    text is.
    """
    pieces = -(-window_length(schemes.values()) // LENGTH) + 1  # one more: joined windows lose a BOS each
    return sources.evaluation_windows(tokenizer, TEXT, windows=WINDOWS * pieces, length=LENGTH).ids
