"""Methods by name. Adding one here adds it to the contract tests."""

from __future__ import annotations

from typing import Any

from .aqua_kv import AquaKV
from .innerq import InnerQ
from .kvtuner import KVTuner
from .mixkvq import MixKVQ
from .squat import Squat
from .vqkv import VQKV

METHODS: dict[str, type[Any]] = {
    method.name: method
    for method in (
        AquaKV,
        VQKV,
        MixKVQ,
        Squat,
        InnerQ,
        KVTuner,
    )
}

__all__ = ["METHODS", "VQKV", "AquaKV", "InnerQ", "KVTuner", "MixKVQ", "Squat"]
