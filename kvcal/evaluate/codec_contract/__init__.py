"""The contract that every codec keeps, for codecs of kvcal and of other packages alike.

`check_codec` holds one codec to it. The tests call the same checks over the registry, with what the theory of each
codec promises instead of the bound that any codec must meet.
"""

from __future__ import annotations

from . import checks, numbers
from .numbers import Broken
from .report import CHECKS, Outcome, check_codec
from .subject import Make, Subject

__all__ = ["CHECKS", "Broken", "Make", "Outcome", "Subject", "check_codec", "checks", "numbers"]
