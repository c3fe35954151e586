"""Two-layer predictors trained by Adam on the same tokens as the closed form (AQUA-KV section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvcal_artifacts.codecs.predictors import MLP, Predictor

from ..capture.ranks import ALONE, Ranks
from ..capture.shards import tree_sum
from .regression import Gram

Pairs = Callable[[], Iterator[tuple[Tensor, Tensor]]]
PART = 512  # tokens of a minibatch whose gradient one rank finds at a time


@dataclass(frozen=True)
class MLPSettings:
    """Not in the paper: width 2C gives its 540 MiB; Adam, cosine from `rate`, minibatches of `batch` tokens."""

    norm: bool = True
    epochs: int = 4
    rate: float = 1e-3
    batch: int = 2048
    seed: int = 0


def fit_mlp(pairs: Pairs, gram: Gram, tokens: int, settings: MLPSettings, ranks: Ranks = ALONE) -> Predictor:
    """pairs(): a fresh pass of (x (n, Cin), y (n, C)) float32; gram of the same tokens gives the scaling.

    ranks: the processes that share each minibatch. All are given all pairs, and find the gradients of some parts of
    PART tokens, which are added in one order however many ranks there are (docs/scale.md).
    """
    device = gram.xx.device
    inputs, outputs = len(gram.xx) - 1, gram.xy.shape[1]
    mean_x, mean_y = gram.mean_x.float(), gram.mean_y.float()
    std_x = (gram.xx.diagonal()[:-1] / gram.count - gram.mean_x**2).clamp_min(1e-12).sqrt().float()
    rms = (gram.xx.diagonal()[:-1] / gram.count).sqrt().float()
    # a constant channel says nothing: scaled by 1, its weight stays within float16 when folded
    std_x = torch.where(std_x > 1e-3 * rms.clamp_min(1e-3), std_x, torch.ones_like(std_x))
    std_y = (gram.yy / gram.count - gram.mean_y**2).clamp_min(1e-12).sqrt().float()
    weights = _start(inputs, outputs, settings, device)
    optimizer = torch.optim.Adam(weights.values(), lr=settings.rate)
    total, tokens_done = settings.epochs * tokens, 0
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.epochs):
        for x, y in pairs():
            order = torch.randperm(len(x), generator=generator, device="cpu").to(device)
            for part in order.split(settings.batch):
                scaled = x[part] if settings.norm else (x[part] - mean_x) / std_x
                _set_gradients(weights, scaled, (y[part] - mean_y) / std_y, ranks)
                optimizer.param_groups[0]["lr"] = settings.rate * 0.5 * (1 + math.cos(math.pi * tokens_done / total))
                with torch.device("cpu"):  # where Adam counts its steps
                    optimizer.step()
                tokens_done += len(part)
    return MLP(_fold(weights, settings.norm, mean_x, std_x, mean_y, std_y))


def _set_gradients(weights: dict[str, Tensor], x: Tensor, y: Tensor, ranks: Ranks) -> None:
    """Set each weight's gradient of the mean squared error on a minibatch, computed by parts of PART tokens."""
    inputs, targets = x.split(PART), y.split(PART)

    def gradient(part: int) -> Tensor:
        """Gradients of all weights, flat, of one part's share of the loss."""
        loss = functional.mse_loss(_forward(inputs[part], weights), targets[part]) * (len(inputs[part]) / len(x))
        return torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(weights.values()))])

    like = torch.empty(sum(w.numel() for w in weights.values()), device=x.device, dtype=torch.float32)
    flat = tree_sum(ranks, len(inputs), gradient, like)
    for weight, grad in zip(weights.values(), flat.split([w.numel() for w in weights.values()]), strict=True):
        weight.grad = grad.view_as(weight)


def _start(inputs: int, outputs: int, settings: MLPSettings, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(settings.seed)
    hidden = 2 * outputs

    def normal(rows: int, columns: int) -> Tensor:
        start: Tensor = torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu") * rows**-0.5
        return start.to(device)

    weights = {
        "in_weight": normal(inputs, hidden),
        "in_bias": torch.zeros(hidden, device=device, dtype=torch.float32),
        "out_weight": normal(hidden, outputs),
        "out_bias": torch.zeros(outputs, device=device, dtype=torch.float32),
    }
    if settings.norm:
        weights |= {
            "norm_weight": torch.ones(inputs, device=device, dtype=torch.float32),
            "norm_bias": torch.zeros(inputs, device=device, dtype=torch.float32),
        }
    return {name: w.requires_grad_() for name, w in weights.items()}


def _forward(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    if "norm_weight" in w:
        x = functional.layer_norm(x, x.shape[-1:], w["norm_weight"], w["norm_bias"])
    return functional.gelu(x @ w["in_weight"] + w["in_bias"]) @ w["out_weight"] + w["out_bias"]


def _fold(
    trained: dict[str, Tensor], norm: bool, mean_x: Tensor, std_x: Tensor, mean_y: Tensor, std_y: Tensor
) -> dict[str, Tensor]:
    """Input and target scaling folded into the weights, float16."""
    w = {name: t.detach() for name, t in trained.items()}
    if not norm:
        w["in_bias"] = w["in_bias"] - (mean_x / std_x) @ w["in_weight"]
        w["in_weight"] = w["in_weight"] / std_x[:, None]
    w["out_weight"] = w["out_weight"] * std_y
    w["out_bias"] = w["out_bias"] * std_y + mean_y
    return {name: t.half() for name, t in w.items()}
