"""Randomised Hadamard rotation."""

from .reference import (
    Mix,
    cosines,
    hadamard,
    largest_power_of_two,
    paley,
    paley_order,
    root,
    rotate,
    signs,
    tree_sum,
    unrotate,
)

__all__ = [
    "Mix",
    "cosines",
    "hadamard",
    "largest_power_of_two",
    "paley",
    "paley_order",
    "root",
    "rotate",
    "signs",
    "tree_sum",
    "unrotate",
]
