"""Decode attention over packed keys and values."""

from .reference import Blocks, Form, decode, pack, unpack

__all__ = ["Blocks", "Form", "decode", "pack", "unpack"]
