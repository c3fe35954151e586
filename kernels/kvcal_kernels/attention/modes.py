"""How codes of keys or values are read, one number for each kind of storage: the kernel's K_MODE and V_MODE."""

from __future__ import annotations

from .reference import Form

POINTS = 5  # points of a grid in bytes; its `group` is how many numbers a code stands for


def mode_of(form: Form) -> int:
    """Of integers 0 to 2, by their groups; 3 a grid that is looked up, 4 tiers, POINTS a grid in bytes."""
    if form.vector:
        return POINTS if form.in_bytes else 3
    return 4 if form.tiered else {(True, True): 0, (True, False): 1, (False, False): 2}[form.inner, form.symmetric]
