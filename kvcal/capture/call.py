"""One decoder layer called with a stand-in for its cache, which receives keys and values and can stop the layer
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.hf import (
    AttentionSite,
    Decoder,
    layer_kind,
)


@dataclass
class LayerCall:
    """What one call of a layer gave. Keys and values (B, H, T, D) as its cache received them."""

    keys: Tensor
    values: Tensor
    pre_rope_keys: Tensor | None
    pre_rope_queries: Tensor | None
    output: Tensor | None  # (B, T, hidden size); None before attention has run


Change = Callable[[LayerCall], tuple[Tensor, Tensor]]


def check_rotation(site: AttentionSite, rope: tuple[Tensor, Tensor] | None, called: LayerCall) -> None:
    """Raises KVCalError where keys before RoPE do not become those that attention gets, bit for bit. rope: cos and
    sin (1, T, rotary dim); None in a layer without RoPE.
    """
    before = called.pre_rope_keys
    if before is None:
        return
    with torch.no_grad():
        rotated = before if rope is None else site.rotate(before, *rope)
    same = (rotated == called.keys) | (rotated.isnan() & called.keys.isnan())
    if not bool(same.all()):
        raise KVCalError(
            f"layer {site.index}: keys captured before RoPE do not give the model's keys when rotated (largest "
            "difference "
            f"{float((rotated - called.keys).abs().max()):.2g}); store keys after RoPE (--frame post_rope)"
        )


class _Stop(Exception):
    """Not an error: the way out of a forward that has yielded all that is needed."""


class _StandIn:
    """Takes the cache's place in one layer: notes what it receives, hands it back or stops the forward."""

    def __init__(
        self, site: AttentionSite, stop: bool, repeat: int, noted: Mapping[str, Tensor], change: Change | None
    ) -> None:
        self._site, self._stop = site, stop
        self._repeat = repeat  # times each kv head is handed back
        self._noted, self._change = noted, change
        self.received: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        self.received = self._site.gather(keys), self._site.gather(values)
        if self._stop:
            raise _Stop
        if self._change is not None:
            changed = self._change(self.call(None))
            keys, values = self._site.local(changed[0]), self._site.local(changed[1])
        if self._repeat > 1:
            return keys.repeat_interleave(self._repeat, 1), values.repeat_interleave(self._repeat, 1)
        return keys, values

    def call(self, output: Tensor | None) -> LayerCall:
        """The call that handed over keys and values, with the layer's output."""
        assert self.received is not None
        return LayerCall(*self.received, self._noted.get("k"), self._noted.get("q"), output)


@torch.no_grad()
def layer_calls(decoder: Decoder, ids: Tensor) -> tuple[Tensor, dict[str, dict[str, object]]]:
    """The first layer's input (B, T, hidden size) for ids (B, T), and the keyword arguments of the layers of each kind.

    No layer runs. No inference mode: rotary modules keep tensors made here, and methods may train on what they are
    handed.
    """
    assert isinstance(decoder, nn.Module)
    kinds = [layer_kind(decoder.config, index) for index in range(decoder.config.num_hidden_layers)]
    missing = set(kinds)
    caught: dict[str, dict[str, object]] = {}
    inputs: list[Tensor] = []

    def catch(kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            options = dict(kwargs)
            x = args[0] if args else options.pop("hidden_states")
            assert isinstance(x, Tensor)
            if len(args) > 1 or x.ndim != 3:
                raise KVCalError(
                    f"{type(decoder).__name__} calls its layers with {max(1, len(args))} tensors, the first of "
                    f"{x.ndim} "
                    "dimensions; calibration knows layers that get hidden states (windows, tokens, channels) alone"
                )
            inputs.append(x)
            caught.setdefault(kind, options)
            if missing == caught.keys():
                raise _Stop

        return hook

    with ExitStack() as stack:
        for layer, kind in zip(decoder.layers, kinds, strict=False):
            stack.enter_context(layer.register_forward_pre_hook(catch(kind), with_kwargs=True))
            if len(missing) > 1:
                stack.enter_context(_passed_by(layer))
        with suppress(_Stop):
            decoder(input_ids=ids, use_cache=False)
    return inputs[0], caught


@contextmanager
def _passed_by(layer: nn.Module) -> Iterator[None]:
    """Let the layer give back its input within the block."""
    before = vars(layer).get("forward")
    layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
    try:
        yield
    finally:
        del layer.forward
        if before is not None:
            layer.forward = before


@torch.no_grad()
def call_layer(
    layer: nn.Module,
    x: Tensor,
    kwargs: dict[str, object],
    site: AttentionSite,
    want: frozenset[str],
    stop: bool,
    change: Change | None = None,
) -> LayerCall:
    """One layer on its input x (B, T, hidden size), or only its norm and projections with `stop`. change: makes the
    keys (after RoPE) and values, (B, H, T, D) each, that attention gets, of the call so far, which has no output.

    Heads are those of all processes where a tensor-parallel model is spread over some.
    """
    repeat = kv_repeats(site, x)
    noted: dict[str, Tensor] = {}
    cache = _StandIn(site, stop, repeat, noted, change)

    def note(name: str, read: Callable[[Tensor], Tensor]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], output: Tensor) -> None:
            noted[name] = site.gather(read(output))

        return hook

    output = None
    with ExitStack() as hooks:
        if "k" in want:
            hooks.enter_context(site.key_source.register_forward_hook(note("k", site.keys_from)))
        if "q" in want:
            hooks.enter_context(site.query_source.register_forward_hook(note("q", site.queries_from)))
        if repeat > 1:
            hooks.enter_context(_as_if_ungrouped(site.module))
        with suppress(_Stop):
            output = layer(x, **{**kwargs, "past_key_values": cache})
    if cache.received is None:
        raise KVCalError(f"layer {site.index} ({type(layer).__name__}) gave its cache no keys; it is not supported")
    output = output[0] if isinstance(output, tuple) else output
    return cache.call(output)


def kv_repeats(site: AttentionSite, x: Tensor) -> int:
    """How often kv heads are repeated before attention, where PyTorch would else hold (T, T) scores.

    On CUDA SDPA has a fused kernel in float32 for equal numbers of heads, but none for grouped heads. Without repeats
    one window of 4096 tokens and 24 heads took 3.8 GB (torch 2.11).
    """
    if x.is_cuda and x.dtype == torch.float32:
        return int(getattr(site.module, "num_key_value_groups", 1))
    return 1


@contextmanager
def _as_if_ungrouped(attention: Any) -> Iterator[None]:
    """Let the attention module take as many kv heads as query heads within the block."""
    groups = attention.num_key_value_groups
    attention.num_key_value_groups = 1
    try:
        yield
    finally:
        attention.num_key_value_groups = groups
