"""Randomised Hadamard rotation."""

from .reference import cosines, hadamard, largest_power_of_two, root, rotate, signs, tree_sum, unrotate

__all__ = ["cosines", "hadamard", "largest_power_of_two", "root", "rotate", "signs", "tree_sum", "unrotate"]
