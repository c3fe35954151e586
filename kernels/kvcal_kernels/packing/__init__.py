"""Bit packing of quantisation codes."""

from .reference import pack, packed_bytes, planes, unpack

__all__ = ["pack", "packed_bytes", "planes", "unpack"]
