"""Which channels of a key block are worth more bits (MixKVQ)."""

from .reference import Tiers, select

__all__ = ["Tiers", "select"]
