"""What is refused before and during a capture: token windows, models, numbers that are not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvcal_artifacts.errors import NonFiniteError, UsageError
from kvcal_artifacts.hf import (
    check_supported,
)


def checked_ids(ids: Tensor, config: Any) -> Tensor:
    if ids.ndim != 2 or ids.dtype != torch.int64 or ids.numel() == 0:
        raise ValueError(f"token windows must be (N, T) int64, none empty, not {tuple(ids.shape)} {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocab_size:
        raise UsageError(
            f"token {low if low < 0 else high}: the model knows 0 to {config.vocab_size - 1}; "
            "were the windows cut with another model's tokenizer?"
        )
    return ids


def check_model(model: nn.Module, decoder: object) -> None:
    """Raise for a model that cannot be calibrated: UnsupportedModel, or UsageError in training mode."""
    check_supported(model)
    if model.training:
        raise UsageError(f"{type(model).__name__} is in training mode, where dropout is random; call model.eval()")


def check_finite(x: Tensor, what: str, rows: slice) -> None:
    """NonFiniteError on NaN or infinity in x: (B, T, C), or (B, H, T, D) whose head is then named. One read of x."""
    low, high = torch.aminmax(x.detach())
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return
    bad = (~torch.isfinite(x)).nonzero()
    windows = [rows.start + int(row) for row in bad[:, 0].unique()]
    heads = f" {', '.join(str(int(head)) for head in bad[:, 1].unique())}" if x.ndim == 4 else ""
    advice = "take bfloat16 or float32" if x.dtype == torch.float16 else "check the model's weights"
    raise NonFiniteError(f"{what}{heads}: NaN or infinity in window {_spans(windows)} ({x.dtype}); {advice}")


def _spans(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
