"""The outlier guard at the commands' doors: a scheme whose KL on this model is high is named.

Presets and bundles are judged alike: what a bundle's file records of its quality is anybody's claim. `generate` and
`preset` forecast it. `eval` and `compare` measure it anyway.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.scheme import Scheme

from ..calibrate.outlier_guard import LENGTH, WINDOWS, measured_warning, unlikely, window_length
from ..methods.data_free import DataFree
from ..text import token_windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models.loading import LoadedModel

TEXT = "embedded:evaluation"


def schemes_of(model: nn.Module, rows: Mapping[str, DataFree | Bundle]) -> dict[str, Scheme]:
    """Schemes by the rows' names."""
    return {name: row.scheme if isinstance(row, Bundle) else row.scheme(model) for name, row in rows.items()}


def guard_window(tokenizer: PreTrainedTokenizerBase, schemes: Mapping[str, Scheme]) -> Tensor:
    """Windows (N, LENGTH) of embedded text, consecutive; joined they are long enough for a block of each scheme, if the
    text is.
    """
    pieces = -(-window_length(schemes.values()) // LENGTH) + 1  # one more: joined windows lose a BOS each
    return token_windows.evaluation_windows(tokenizer, TEXT, windows=WINDOWS * pieces, length=LENGTH).ids


def say_unlikely(loaded: LoadedModel, ids: Tensor, say: Callable[[str], None]) -> None:
    """Say it where the model cannot predict the first of token windows ids (N, T) int64: what is chosen by KL there
    would be chosen by nothing.
    """
    if loaded.random_weights:
        return
    window = ids[:1, :LENGTH].to(loaded.device)
    with torch.no_grad():
        logits = loaded.model(window, use_cache=False).logits[0, :-1]
    nats = float(functional.cross_entropy(logits.float(), window[0, 1:].to(logits.device)))
    for line in unlikely(math.exp(min(nats, 700.0)), f"{window.shape[1]} tokens of this text"):
        say(line)


def full_precision_warnings(perplexity: float, random_weights: bool) -> list[str]:
    """A line for a model that cannot predict the text itself; none where its weights are random."""
    return [] if random_weights else unlikely(perplexity, "this text")


def measured_warnings(
    model: str, rows: Mapping[str, DataFree | Bundle], kl: Mapping[str, float | None]
) -> Iterator[str]:
    """A line for each row whose measured KL is warned of. model: as the command line names it. kl: by the rows' names,
    mean nats of tokens that see packed blocks, None where there is none.
    """
    for name, row in rows.items():
        if isinstance(row, Bundle):
            better = f"kvcal generate --model {shlex.quote(model)} --bundle {shlex.quote(str(row.path))} --prompt TEXT"
        else:
            better = f"kvcal generate --model {shlex.quote(model)} --preset {shlex.quote(name)} --prompt TEXT"
        if (line := measured_warning(name, kl.get(name), better)) is not None:
            yield line
