"""What a scheme does to attention, layer by layer, on the very keys and values of the full-precision model.

A cache of the scheme is run by the model as in decoding, but every layer gets the exact keys and values back, so that
each is judged on the same inputs. What the cache would have given is compared with what was given, on the model's own
queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvcal_artifacts.cache import KVCalCache, KVCalLayer

from ..report.progress import progress


@dataclass
class LayerError:
    """Sums of one layer over windows, heads and queries."""

    logit_error: float = 0.0
    logits: float = 0.0
    output_error: float = 0.0
    outputs: float = 0.0
    by_head: Tensor = field(default_factory=lambda: torch.zeros(()))  # the same four sums of each kv head, (4, H)

    def add(self, exact: tuple[Tensor, Tensor], decoded: tuple[Tensor, Tensor]) -> None:
        self.logit_error += float((decoded[0] - exact[0]).square().sum(dtype=torch.float64))
        self.logits += float(exact[0].square().sum(dtype=torch.float64))
        self.output_error += float((decoded[1] - exact[1]).square().sum(dtype=torch.float64))
        self.outputs += float(exact[1].square().sum(dtype=torch.float64))
        squares = (decoded[0] - exact[0], exact[0], decoded[1] - exact[1], exact[1])
        self.by_head = self.by_head + torch.stack([_squares(x) for x in squares]).cpu()

    def head_errors(self) -> tuple[list[float], list[float]]:
        """Of scores and of outputs, one number for each kv head; empty where nothing was packed."""
        if not self.by_head.ndim:
            return [], []
        logit, logits, output, outputs = self.by_head.clamp_min(1e-30)
        return (logit / logits).sqrt().tolist(), (output / outputs).sqrt().tolist()


def _squares(x: Tensor) -> Tensor:
    """(B, H, ...) -> (H,) float64."""
    return x.square().sum([0, *range(2, x.ndim)], dtype=torch.float64)


@dataclass(frozen=True)
class AttentionErrors:
    """Root of summed squared error over summed squares, by layer. logit: of scores q . k over the tokens that a query
    sees, less their mean, which the softmax does not see. output: of attention outputs. logit_heads, output_heads: of
    each kv head. Layers left uncompressed are not there.
    """

    logit: dict[int, float]
    output: dict[int, float]
    logit_heads: dict[int, list[float]] = field(default_factory=dict)
    output_heads: dict[int, list[float]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """One table for each layer: its errors, and those of its kv heads."""
        return [
            {
                "layer": index,
                "logit_error": self.logit[index],
                "output_error": self.output[index],
                "logit_head_errors": self.logit_heads[index],
                "output_head_errors": self.output_heads[index],
            }
            for index in sorted(self.logit)
        ]

    def as_dict(self) -> dict[str, float]:
        """Means over the layers."""
        return {
            "logit_error": sum(self.logit.values()) / max(1, len(self.logit)),
            "output_error": sum(self.output.values()) / max(1, len(self.output)),
        }


@torch.no_grad()
def attention_errors(
    model: Any, ids: Tensor, make: Callable[[], KVCalCache], *, step: int = 32, batch: int | None = None
) -> AttentionErrors | None:
    """Over token windows ids (N, T), in steps of `step` tokens; None for a scheme that evicts tokens: it gives back
    other tokens than the model has, and a score of one that is gone has no error.
    """
    sums: dict[int, LayerError] = {}
    device = next(model.parameters()).device
    parts = ids.split(batch or len(ids))
    with progress("Attention errors", total=len(parts) * -(-ids.shape[1] // step)) as advance:
        for part in parts:
            with make() as cache:
                if cache.scheme.selection is not None:
                    return None
                meter = Meter(cache, sums)
                try:
                    for chunk in part.to(device).split(step, 1):
                        model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
                        advance()
                finally:
                    meter.close()
    return AttentionErrors(
        {i: (s.logit_error / max(s.logits, 1e-30)) ** 0.5 for i, s in sums.items()},
        {i: (s.output_error / max(s.outputs, 1e-30)) ** 0.5 for i, s in sums.items()},
        {i: s.head_errors()[0] for i, s in sums.items()},
        {i: s.head_errors()[1] for i, s in sums.items()},
    )


class Meter:
    """Puts itself between a cache's layers and the model: layers store and decode, the model gets what is exact."""

    def __init__(self, cache: KVCalCache, sums: dict[int, LayerError]) -> None:
        self._cache, self._sums = cache, sums
        self._queries: dict[int, Tensor] = {}
        self._handles = []
        for layer in cache.own_layers:
            self._sums.setdefault(layer.index, LayerError())
            self._handles.append(layer.site.query_source.register_forward_hook(self._hook(layer)))
            layer.update = self._update(layer, layer.update)  # type: ignore[method-assign]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for layer in self._cache.own_layers:
            vars(layer).pop("update", None)

    def _hook(self, layer: KVCalLayer) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            self._queries[layer.index] = layer.site.queries_from(output)

        return hook

    def _update(self, layer: KVCalLayer, update: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
        uncompressed, site = DynamicCache(), layer.site

        def metered(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            decoded = update(keys, values, *args, **kwargs)
            exact = uncompressed.update(keys, values, 0)
            q = self._queries.pop(layer.index)
            q = site.rotate(q, *self._cache.rope_now(q)) if site.rope else q
            if decoded[0].shape[2] > q.shape[2]:  # the first call sees nothing packed
                outputs = attention(site, q, *exact), attention(site, q, *decoded)
                self._sums[layer.index].add(*outputs)
            return exact

        return metered


def attention(site: Any, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """q (B, heads, S, D) of the last S tokens, keys and values (B, H, T, D) -> scores less their mean over what a query
    sees, zero elsewhere, (B, H, group, S, T), and outputs (B, H, group, S, D), both float32.
    """
    heads, length, new = keys.shape[1], keys.shape[2], q.shape[2]
    scaling = float(getattr(site.module, "scaling", q.shape[3] ** -0.5))
    grouped = torch.unflatten(q.float(), 1, (heads, -1)) * scaling
    scores = grouped @ keys.float()[:, :, None].transpose(-1, -2)
    at = torch.arange(length - new, length, device=q.device)
    future = torch.arange(length, device=q.device) > at[:, None]
    outputs = scores.masked_fill(future, float("-inf")).softmax(-1) @ values.float()[:, :, None]
    scores = scores.masked_fill(future, 0)
    scores -= scores.sum(-1, keepdim=True) / (at + 1)[:, None]
    return scores.masked_fill_(future, 0), outputs
