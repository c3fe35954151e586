"""Names of the presets that look at a model and choose its codecs, as cache/auto.py does. Imports no torch."""

from __future__ import annotations

AUTO_BITS = {"auto-4": 4, "auto-3": 3, "auto-2": 2}  # name -> bits of a code
