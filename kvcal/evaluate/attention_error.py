"""What a scheme does to attention, layer by layer, on the very keys and values of the full-precision model.

The model runs over a window once, with exact keys and values in every layer, so that each is judged on the same inputs.
In a cache of the scheme a token attends to packed blocks of older tokens, decoded. This is compared with what it
attended to, on the model's own queries. Where what blocks decode to changes with the text behind them (run-time
statistics), the cache is run in steps instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor
from transformers import DynamicCache

from kvcal_artifacts.cache import KVCalCache, KVCalLayer
from kvcal_artifacts.cache.chain import Chain
from kvcal_artifacts.errors import UsageError

from ..models.spread import input_device
from ..report.progress import progress
from .attended import Visible, attention, mixed_attention

if TYPE_CHECKING:
    from ..models.structure import CausalLM

Update = Callable[..., tuple[Tensor, Tensor]]  # a layer's: new keys and values -> all that attention gets


class LayerError:
    """Sums of one layer over windows, heads and queries: squared errors of scores, squares of scores, and the same two
    of outputs. They stay on the layer's device until they are asked for, so that no call waits for it.
    """

    def __init__(self) -> None:
        self._totals: Tensor | None = None  # (4,) float64
        self._by_head: Tensor | None = None  # the same four of each kv head, (4, H) float64

    def add(self, exact: tuple[Tensor, Tensor], decoded: tuple[Tensor, Tensor]) -> None:
        """Add a call's scores and outputs (B, H, ...), exact ones and those of decoded states."""
        differences = (decoded[0] - exact[0], exact[0], decoded[1] - exact[1], exact[1])
        squares = [x.square() for x in differences]
        totals = torch.stack([x.sum(dtype=torch.float64) for x in squares])
        by_head = torch.stack([x.sum([0, *range(2, x.ndim)], dtype=torch.float64) for x in squares])
        self._totals = totals if self._totals is None else self._totals + totals
        self._by_head = by_head if self._by_head is None else self._by_head + by_head

    def errors(self) -> tuple[float, float]:
        """Relative errors of scores and of outputs; 0 where nothing was packed."""
        logit, logits, output, outputs = [0.0] * 4 if self._totals is None else self._totals.tolist()
        return (logit / max(logits, 1e-30)) ** 0.5, (output / max(outputs, 1e-30)) ** 0.5

    def head_errors(self) -> tuple[list[float], list[float]]:
        """The same, one number for each kv head; empty where nothing was packed."""
        if self._by_head is None:
            return [], []
        logit, logits, output, outputs = self._by_head.cpu().clamp_min(1e-30)
        return (logit / logits).sqrt().tolist(), (output / outputs).sqrt().tolist()


class ErrorRow(TypedDict):
    """Attention errors of a layer, and of each of its kv heads."""

    layer: int
    logit_error: float
    output_error: float
    logit_head_errors: list[float]
    output_head_errors: list[float]


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

    def rows(self) -> list[ErrorRow]:
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
    model: CausalLM, ids: Tensor, make: Callable[[], KVCalCache], *, step: int = 32, batch: int | None = None
) -> AttentionErrors | None:
    """Errors of scores and outputs over token windows ids (N, T), for the tokens behind the first `step`. Each token
    sees what was packed before its step of `step` tokens. None for a scheme that evicts tokens: it gives back other
    tokens than the model has, and a score of one that is gone has no error.
    """
    sums: dict[int, LayerError] = {}
    device = input_device(model)
    parts = ids.split(batch or len(ids))
    with progress("Attention errors", total=ids.numel()) as advance:
        for part in parts:
            with make() as cache:
                if cache.scheme.selection is not None:
                    return None
                whole = decodes_alike(cache)
                meter = (WholeMeter if whole else Meter)(cache, sums, step)
                try:
                    for chunk in part.to(device).split(part.shape[1] if whole else step, 1):
                        model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
                        advance(chunk.numel())
                finally:
                    meter.close()
    errors = {index: (one.errors(), one.head_errors()) for index, one in sums.items()}
    return AttentionErrors(
        {index: logit for index, ((logit, _), _) in errors.items()},
        {index: output for index, ((_, output), _) in errors.items()},
        {index: logits for index, (_, (logits, _)) in errors.items()},
        {index: outputs for index, (_, (_, outputs)) in errors.items()},
    )


def decodes_alike(cache: KVCalCache) -> bool:
    """Whether packed blocks decode to the same at any time: no codec has run-time statistics."""
    return not any(layer.statistics for layer in cache.compressed_layers)


class Meter:
    """Puts itself between a cache's layers and the model: layers store and decode, the model gets what is exact."""

    def __init__(self, cache: KVCalCache, sums: dict[int, LayerError], step: int) -> None:
        if cache.head_shard is not None:
            raise UsageError("attention errors are measured of all heads in one process: load the model by device_map")
        self._cache, self._sums, self._step = cache, sums, step
        self._queries: dict[int, Tensor] = {}
        self._visible: dict[tuple[int, int, torch.device], Visible] = {}
        self._handles = []
        for layer in cache.compressed_layers:
            self._sums.setdefault(layer.index, LayerError())
            self._handles.append(layer.site.query_source.register_forward_hook(self._hook(layer)))
            layer.update = self._update(layer, layer.update)  # type: ignore[method-assign]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for layer in self._cache.compressed_layers:
            vars(layer).pop("update", None)

    def _hook(self, layer: KVCalLayer) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[object, ...], output: Tensor) -> None:
            self._queries[layer.index] = layer.site.queries_from(output)

        return hook

    def _update(self, layer: KVCalLayer, update: Update) -> Update:
        uncompressed, site = DynamicCache(), layer.site

        def metered(keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            decoded = update(keys, values, *args, **kwargs)
            exact = uncompressed.update(keys, values, 0)
            q = self._rotated_queries(layer)
            if decoded[0].shape[2] > q.shape[2]:  # the first call sees nothing packed
                visible = self._of_call(q, decoded[0].shape[2])
                self._sums[layer.index].add(*attention(site, q, [exact, decoded], visible))
            return exact

        return metered

    def _of_call(self, q: Tensor, length: int) -> Visible:
        """What the call's queries see of so many columns, computed once for the layers of a device."""
        key = length, q.shape[2], q.device
        if key not in self._visible:
            self._visible = {key: Visible.of(torch.arange(length - q.shape[2], length, device=q.device), length)}
        return self._visible[key]

    def _rotated_queries(self, layer: KVCalLayer) -> Tensor:
        """The current call's queries (B, heads, Q, D) after RoPE."""
        q = self._queries.pop(layer.index)
        return layer.site.rotate(q, *self._cache.rope_now(q)) if layer.site.rope else q


QUERIES = 256  # of a window that are compared at a time: scores (B, heads, QUERIES, T) are held
VISIBLE = 1 << 26  # numbers, at most, of what queries see: more are computed anew in every layer


class WholeMeter(Meter):
    """A Meter of one call for the whole window, of codecs whose blocks decode to the same at any time."""

    def __init__(self, cache: KVCalCache, sums: dict[int, LayerError], step: int) -> None:
        super().__init__(cache, sums, step)
        self._chain = Chain(cache.scheme)

    def _update(self, layer: KVCalLayer, update: Update) -> Update:
        def metered(keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            exact = update(keys, values, *args, **kwargs)
            q, decoded = self._rotated_queries(layer), self._decoded(layer, keys, values)
            length = keys.shape[2]
            for start in range(self._step, length, QUERIES):
                stop = min(start + QUERIES, length)
                states = [x[:, :, :stop] for x in (keys, values, *decoded)]
                visible = self._of_queries(start, stop, length, q.device)
                self._sums[layer.index].add(*mixed_attention(layer.site, q[:, :, start:stop], states, visible))
            return exact

        return metered

    def _of_queries(self, start: int, stop: int, length: int, device: torch.device) -> Visible:
        """What the queries from `start` to `stop` of a window of `length` tokens see."""
        key = start, stop, device
        if key in self._visible:
            return self._visible[key]
        queries = torch.arange(start, stop, device=device)
        visible = Visible.of(queries, stop, self._packed(queries))
        if length * length <= VISIBLE:
            self._visible[key] = visible
        return visible

    def _decoded(self, layer: KVCalLayer, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Keys after RoPE and values (B, H, T, D) of the whole window, those of packed blocks as they decode."""
        context, sink = self._chain.context("old", layer.index, keys.device), self._cache.scheme.windows.sink
        whole = [keys.clone(), values.clone()]
        if not layer.block_slots:
            self._chain.leave("old", layer.index, None, None)
            return whole
        decoded = layer.decode(layer.packed, context)
        self._chain.leave("old", layer.index, *decoded)
        columns = slice(sink, sink + decoded[0].shape[2])
        packed = [x.to(layer.dtype) for x in decoded]
        if layer.rotates:
            packed[0] = layer.site.rotate(packed[0], *self._cache.rope(columns, packed[0]))
        for states, x in zip(whole, packed, strict=True):
            states[:, :, columns] = x
        return whole

    def _packed(self, queries: Tensor) -> tuple[int, Tensor]:
        """The first packed column, and for each position the one behind the last that is packed before its step."""
        windows = self._cache.scheme.windows
        begun = queries // self._step * self._step
        blocks = ((begun - windows.sink - windows.recent) // windows.block).clamp_min(0)
        return windows.sink, windows.sink + blocks * windows.block
