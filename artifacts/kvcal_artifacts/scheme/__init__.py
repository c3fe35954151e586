"""What a cache does with keys and values: windows, token selection, frame, and one pair of codecs per layer."""

from __future__ import annotations

from .scheme import FRAMES, Frame, LayerCodecs, Scheme, coverage
from .windows import HeavyHitters, Windows

__all__ = ["FRAMES", "Frame", "HeavyHitters", "LayerCodecs", "Scheme", "Windows", "coverage"]
