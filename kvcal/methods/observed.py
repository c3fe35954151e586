"""Run-time statistics during calibration: what a cache would know when it packs each block of a window."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Codec
from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.ledger import Plan
from kvcal_artifacts.scheme import Frame, Windows
from kvcal_artifacts.statistics import STATISTICS, Prefixes, statistic

from ..capture.scan import LayerTaps, TapBatch


def taps_of(stats: Iterable[str]) -> frozenset[str]:
    """Which of q, k the statistics of these names are of."""
    return frozenset(_wants(name)[0] for name in stats)  # q_pre is q, too


def _wants(name: str) -> str:
    kind = name.partition(":")[0]
    if kind not in STATISTICS:
        raise KVCalError(f"statistic {name!r}: known are {', '.join(STATISTICS)}")
    return STATISTICS[kind].wants


def window_statistics(
    codec: Codec, windows: Windows, frame: Frame, taps: LayerTaps, batch: TapBatch
) -> dict[str, Tensor]:
    """The codec's statistics (B, H, N or 1, ...) for the N coded blocks of whole windows.

    batch: of `frame`, so q (B, heads, T, D) is before or after RoPE with it, and k as the cache stores it. The last
    blocks of a window, which a cache would not pack yet, get the statistic of the whole window.
    """
    found: dict[str, Tensor] = {}
    for name in sorted(codec.stats):
        wants = _wants(name)
        x = batch.k if wants == "k" else batch.q
        assert x is not None
        if wants == "q" and frame == "pre_rope" and taps.rope is not None:
            x = taps.site.rotate(x, *taps.rope)
        if wants == "q_pre" and frame == "post_rope" and taps.rope is not None:
            raise KVCalError(f"statistic {name}: queries before RoPE are seen in the frame pre_rope only")
        made = statistic(name, codec.shape).observe(x, whole_window(x, windows))
        assert made is not None
        found[name] = made
    return found


def whole_window(x: Tensor, windows: Windows) -> Prefixes:
    """All blocks of windows (B, heads, T, D) that came in one piece."""
    rows, length = x.shape[0], x.shape[2]
    blocks = (length - windows.sink) // windows.block
    none = torch.zeros(rows, dtype=torch.long)
    return Prefixes(Plan(0, length, 0, 0, blocks, blocks, seen=none, packed=none), windows, x.device)
