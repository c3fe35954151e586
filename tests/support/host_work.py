"""What one decode step copies to its devices and waits for, with 3 layers and with 6: run by test_host_work.py.

Devices are not there (counted.py), so this runs in a process of its own. Prints a line of JSON for each case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from kvcal_artifacts import operator
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.paths import fused
from tests.artifacts.paths.test_fused import PAIRS, scheme
from tests.support import counted, schemes
from tests.support.counted import Counted, far
from tests.support.schemes import Fed, Rows, left_mask, packed_row, window_row

LENGTHS, PROMPT = (134, 97), 128  # row 0 packs a block with 132 tokens
SHORT = (58, 40), 52  # nothing is packed


class Turning(nn.Module):
    """A rotary module on the first device."""

    def __init__(self, own: nn.Module, there: bool) -> None:
        super().__init__()
        self.own, self.there = own, there

    def forward(self, x: Tensor, position_ids: Tensor) -> list[Tensor]:
        return [far(t) if self.there else t for t in self.own(x, position_ids=position_ids)]


class Placed(Fed):
    """Its layers lie on devices in turn, and attend by the operator's layer where the cache leaves word."""

    def __init__(self, layers: int, devices: int) -> None:
        super().__init__(layers, 2, 64)
        self.devices = devices
        self.eval()
        self.rotary_emb: Any = Turning(self.rotary_emb, devices > 0)
        for layer in self.layers:
            attention: Any = layer.self_attn
            attention.config, attention.scaling = self.config, 0.1

    def place(self, x: Tensor, layer: int) -> Tensor:
        return far(x.contiguous(), layer % self.devices) if self.devices else x.contiguous()

    def forward(self, keys: Tensor, values: Tensor, attention_mask: Any = None, past_key_values: Any = None) -> bool:  # type: ignore[override]
        held = past_key_values.ledger.columns
        self.rotary_emb(keys, position_ids=torch.arange(held, held + keys.shape[3])[None])
        for index, layer in enumerate(self.layers):
            own: Any = layer.self_attn
            k, v = self.place(keys[index], index), self.place(values[index], index)
            own.q_proj(k.transpose(1, 2).flatten(2))
            own.k_proj(k.transpose(1, 2).flatten(2))
            past_key_values.update(k, v, index)
            turn = getattr(own.config, "kvcal_hand_off", None)
            if turn is not None and (left := turn.take()) is not None:
                operator._LAYERS[left[0]].attend(k, k, v, 0.1)
        return True


def steps(cache: KVCalCache, padded: bool, lengths: tuple[int, int] = LENGTHS, prompt: int = PROMPT) -> Iterator[None]:
    """A prompt and single tokens; every layer is fed the same."""
    model: Any = cache.model
    rows = Rows(lengths, heads=2, dim=64)
    valid = left_mask(lengths).bool()
    keys, values = (x[:1].expand(len(model.layers), -1, -1, -1, -1) for x in rows.columns(valid))
    for start, stop in schemes.pieces(0, lengths[0], range(prompt, lengths[0])):
        mask = valid[:, :stop].long() if padded else None
        with torch.no_grad():
            model(keys[..., start:stop, :], values[..., start:stop, :], mask, cache)
        yield


def case(name: str, layers: int, devices: int, padded: bool, **options: Any) -> dict[str, Any]:
    cache = KVCalCache(scheme(PAIRS[name], layers), Placed(layers, devices), **options)
    up, waits, launches, blocks = [], [], [], []
    with Counted() as here:
        for _ in steps(cache, padded, *(SHORT if name == "squat" else (LENGTHS, PROMPT))):
            up.append([list(x) for x in here.counts.up])
            waits.append(len(here.counts.waits))
            launches.append(len(here.counts.launches))
            blocks.append(cache.ledger.blocks.tolist())
            here.counts.clear()
    packs = [a != b for a, b in pairwise(blocks)]
    return {"up": up[1:], "waits": waits[1:], "launches": launches[1:], "packs": packs}


def alike(name: str, padded: bool, **options: Any) -> bool:
    """The same bytes on two devices as on the CPU."""
    held = []
    for devices in (2, 0):
        cache = KVCalCache(scheme(PAIRS[name], 3), Placed(3, devices), **options)
        with Counted():
            for _ in steps(cache, padded):
                pass
            cache.settle()
            held.append([t.to("cpu") for row in (0, 1) for t in packed_row(cache, row) + window_row(cache, row)])
    return schemes.same(*held)


def main() -> None:
    counted.start()
    own = fused.attention
    for path, options in PATHS.items():
        for name in ("innerq-prefill", "squat") if path == "reference" else ("innerq-prefill",):
            for padded in (False, True):
                fused.attention = lambda kernels, q, *rest, **more: q  # type: ignore[assignment]
                for layers, devices in ((2, 1), (4, 1), (4, 2)) if padded else ((2, 1), (4, 1)):
                    found = case(name, layers, devices, padded, **options)
                    print(json.dumps([path, name, padded, layers, devices, found]))
                fused.attention = own
    print(json.dumps({path: alike("innerq-prefill", True, **options) for path, options in PATHS.items()}))


PATHS: dict[str, dict[str, Any]] = {
    "reference": {"kernels": "off"},
    "fused": {"kernels": "torch"},
    "fixed": {"kernels": "torch", "max_length": 256},
}


if __name__ == "__main__":
    sys.exit(main())
