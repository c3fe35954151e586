"""Methods that need no data: one codec for all keys, one for all values. Presets of `kvcal eval --preset`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import FRAMES, Frame, LayerCodecs, Scheme, Windows

from .backbones import INNERQ_VALUES, backbone
from .base import same_everywhere
from .mixkvq import MixKVQ


@dataclass(frozen=True)
class Preset:
    """key, value: names of codecs (see backbones). AQUA-KV's windows by default; presets of other papers have theirs."""

    key: str
    value: str
    rope: Frame = "post_rope"
    sink: int = 4
    recent: int = 128
    block: int = 32

    def scheme(self, model: nn.Module) -> Scheme:
        """The preset for this model; layers that cannot be compressed are skipped with the reason."""
        if self.rope not in FRAMES:
            raise UsageError(f"frame {self.rope!r}: allowed are {', '.join(FRAMES)}")
        windows = Windows(self.sink, self.recent, self.block)
        return same_everywhere(
            model, windows, self.rope,
            lambda shape: LayerCodecs(backbone(self.key)(shape, "key"), backbone(self.value)(shape, "value")),
        )  # fmt: skip


DataFree = Preset | MixKVQ  # what has a scheme without calibration

PRESETS: dict[str, DataFree] = {
    **{f"higgs-{bits}": Preset(f"higgs-{bits}", f"higgs-{bits}") for bits in (2, 3, 4)},
    **{f"higgs-{bits}-debiased": Preset(f"higgs-{bits}-debiased", f"higgs-{bits}-debiased") for bits in (2, 3, 4)},
    **{f"uniform-{bits}": Preset(f"uniform-{bits}", f"uniform-{bits}") for bits in (2, 3, 4, 8)},
    **{f"kivi-{bits}": Preset(f"kivi-{bits}", f"kivi-{bits}", sink=0, recent=32) for bits in (2, 4)},  # R = 32
    "kivi-sink-2": Preset("kivi-2", "kivi-2", sink=32, recent=96),  # InnerQ section 5.1
    **{f"turboquant-{k}": Preset(f"turboquant-{k}", f"turboquant-{k}", sink=0) for k in (2, 3, 4)},
    # InnerQ section 5.1
    **dict.fromkeys(("turboquant-4-3", "turboquant-k4v3"), Preset("turboquant-4", "turboquant-3", sink=0)),
    **{f"innerq-{name}": Preset(f"innerq-{name}", f"innerq-{name}", sink=32, recent=96) for name in INNERQ_VALUES},
    **{
        f"innerq-{name}-plain": Preset(f"innerq-{name}-plain", f"innerq-{name}-plain", sink=32, recent=96)
        for name in INNERQ_VALUES
    },
    "fp8": Preset("fp8", "fp8", sink=0, recent=0),
    "bf16": Preset("exact-bf16", "exact-bf16"),
    **{f"squat-{bits}": Preset(f"squat-{bits}", f"squat-{bits}", sink=0, recent=32) for bits in (2, 3, 4)},
    **{f"squat-pre-{b}": Preset(f"squat-{b}", f"squat-{b}", "pre_rope", sink=0, recent=32) for b in (2, 3, 4)},
    "exact": Preset("exact-32", "exact-32"),
    "mixkvq": MixKVQ(),
}


def preset(name: str) -> DataFree:
    if name not in PRESETS:
        raise UsageError(f"preset {name!r} is not known; allowed are {', '.join(PRESETS)}")
    return PRESETS[name]
