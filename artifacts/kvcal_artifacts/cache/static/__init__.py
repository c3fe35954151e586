"""Layers whose storage is allocated once (max_length), and the steps that the device does by itself."""

from __future__ import annotations

from .layer import StaticLayer

__all__ = ["StaticLayer"]
