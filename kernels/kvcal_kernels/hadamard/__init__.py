"""Randomised Hadamard rotation."""

from .reference import hadamard, largest_power_of_two, root, rotate, signs, tree_sum, unrotate

__all__ = ["hadamard", "largest_power_of_two", "root", "rotate", "signs", "tree_sum", "unrotate"]
