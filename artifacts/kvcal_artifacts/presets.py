"""Presets by name: which codecs they take, by names of codecs/named.py, and which tokens stay exact. The command
line and servers read this one table. Imports no torch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

AUTO_BITS = {"auto-4": 4, "auto-3": 3, "auto-2": 2}  # presets that look at a model (cache/auto.py) -> bits of a code

INNERQ_KEYS = "inner-3-symmetric"  # InnerQ section 4.4: keys of all variants
INNERQ_VALUES = {"base": "inner-3-symmetric", "hybrid": "inner-2-hybrid", "small": "inner-2-symmetric"}


Frame = Literal["post_rope", "pre_rope"]  # keys as they are stored


class NamedPreset(NamedTuple):
    """A preset that needs no data. key, value: names of codecs. frame: of stored keys. sink, recent: exact tokens.

    AQUA-KV's windows by default; presets of other papers have theirs. Blocks have 32 tokens.
    """

    key: str
    value: str
    frame: Frame = "post_rope"
    sink: int = 4
    recent: int = 128


def _both(codec: str, *, frame: Frame = "post_rope", sink: int = 4, recent: int = 128) -> NamedPreset:
    return NamedPreset(codec, codec, frame, sink, recent)


PRESETS: dict[str, NamedPreset] = {
    **{f"higgs-{bits}": _both(f"higgs-{bits}") for bits in (2, 3, 4)},
    **{f"higgs-{bits}-debiased": _both(f"higgs-{bits}-debiased") for bits in (2, 3, 4)},
    **{f"uniform-{bits}": _both(f"uniform-{bits}") for bits in (2, 3, 4, 8)},
    **{f"kivi-{bits}": _both(f"kivi-{bits}", sink=0, recent=32) for bits in (2, 4)},  # R = 32
    "kivi-sink-2": _both("kivi-2", sink=32, recent=96),  # InnerQ section 5.1
    **{f"turboquant-{k}": _both(f"turboquant-{k}", sink=0) for k in (2, 3, 4)},
    # as InnerQ section 5.1 compares it
    **dict.fromkeys(("turboquant-4-3", "turboquant-k4v3"), NamedPreset("turboquant-4", "turboquant-3", sink=0)),
    # grids whose points are bytes, which attention reads faster; ours (docs/lab/methods.md)
    **{f"higgs-2-bytes{gain}": _both(f"higgs-2-bytes{gain}") for gain in ("", "-debiased")},
    **{f"turboquant-{k}-bytes": _both(f"turboquant-{k}-bytes", sink=0) for k in (2, 3, 4)},
    "turboquant-4-3-bytes": NamedPreset("turboquant-4-bytes", "turboquant-3-bytes", sink=0),
    # innerq-base, innerq-hybrid, innerq-small
    **{f"innerq-{name}": _both(f"innerq-{name}", sink=32, recent=96) for name in INNERQ_VALUES},
    **{f"innerq-{name}-plain": _both(f"innerq-{name}-plain", sink=32, recent=96) for name in INNERQ_VALUES},
    "fp8": _both("fp8", sink=0, recent=0),
    "bf16": _both("exact-bf16"),
    **{f"squat-{bits}": _both(f"squat-{bits}", sink=0, recent=32) for bits in (2, 3, 4)},
    **{f"squat-pre-{b}": _both(f"squat-{b}", frame="pre_rope", sink=0, recent=32) for b in (2, 3, 4)},
    "exact": _both("exact-32"),
}


def divisor(limit: int, length: int) -> int:
    """The largest size of a group, up to `limit`, that divides `length`."""
    return next(size for size in range(min(limit, length), 0, -1) if length % size == 0)
