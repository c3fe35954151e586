"""Calibrate compression of the key-value cache and measure what it costs."""

__version__ = "0.1.0"
